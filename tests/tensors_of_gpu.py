"""Tensors on the CPU that count as those of GPU 0, beneath a driver written in Python: for counting calls."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver, FakeGpu, installed, instant_compiler

import nvrtc_attn
from nvrtc_attn.front import remembered, signature, tensors
from nvrtc_attn.front.guards import guard
from nvrtc_attn.jit.params import BackwardParams, ForwardParams
from nvrtc_attn.plans import plan, repeats
from nvrtc_attn.runtime import arrays
from nvrtc_attn.torch import efficient, known, modified_known, ops, packed_ops, passes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PACKAGE = str(Path(nvrtc_attn.__file__).parent)
GIVEN: dict[str, Any] = {"device": 0}
ELSEWHERE: list[Any] = []


class Recorder(FakeDriver):
    """Keeps what each launch was told, but for addresses: the image, the grid and the numbers of the params."""

    def __init__(self, gpus: list[FakeGpu]) -> None:
        super().__init__(gpus)
        self.addresses: list[list[int]] = []
        """Of q, k and v, of every launch."""

    def do_LaunchKernel(self, function: int, *arguments: Any) -> None:
        address = ctypes.c_void_p.from_address(arguments[-2]).value
        assert address is not None
        # A pass has params of its own; the shorter ones are read, which both begin with.
        size, pointers = (
            ctypes.sizeof(ForwardParams),
            8 * max(len(ForwardParams.POINTERS), len(BackwardParams.POINTERS)),
        )
        numbers = ctypes.string_at(address + pointers, size - pointers)
        self.launches.append((self.images[function - 1], arguments[:-2], numbers))
        self.addresses.append((ctypes.c_uint64 * 3).from_address(address)[:])


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recorder]:
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    monkeypatch.delenv("NVRTC_ATTN_BACKEND", raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 1 if any(x is y for y in ELSEWHERE) else GIVEN["device"])
    for module in (passes, known, efficient, modified_known):
        monkeypatch.setattr(module, "raw_stream", lambda _: 7)
        monkeypatch.setattr(module, "empty_on_current", torch._C._dynamo.guards._empty_strided_cpu)
        monkeypatch.setattr(module, "current_device", lambda: GIVEN["device"])
    for module in (known, signature, modified_known):
        monkeypatch.setattr(module, "guard", guard_of_devices)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(arrays, "_of_torch", lambda: (None, None))  # a torch with CUDA would look for its driver
    monkeypatch.setattr(tensors._torch(), "current_raw_stream", lambda _: 7)
    with installed(Recorder([FakeGpu(), FakeGpu()])) as fake, instant_compiler(tmp_path):
        forget()
        yield fake
        forget()


def guard_of_devices(*known: Any) -> Any:
    """A guard for the GPUs that tensors count as being on, of which torch's own knows nothing here."""
    devices, fits = [x.get_device() for x in known], guard(*known)
    assert fits is not None or len({id(x) for x in known}) < len(known)
    return fits and (lambda *given: [x.get_device() for x in given] == devices and fits(*given))


TABLES: list[dict[Any, Any]] = [
    *(passes._forward_plans, passes._backward_plans, repeats._repeats),
    *(efficient._forward_calls, efficient._backward_calls),
]


KNOWN: list[dict[Any, Any]] = [
    known._known_plans,
    modified_known._known,
    ops._backward_calls,
    packed_ops._backward_calls,
    signature._known,
    signature._numbers,
]


def forget() -> None:
    """Empty every table of calls, problems, plans and kernels."""
    for table in (*TABLES, *KNOWN, plan._plans, plan._kernels, remembered._problems):
        table.clear()
    known._adopted.__dict__.clear()


def tensor(*shape: int, dtype: Any = BF16, **more: Any) -> Any:
    return torch.zeros(*shape, dtype=dtype, **more)


def qkv(dtype: Any = BF16, rows: int = 64, keys: int = 64, heads_kv: int = 4, grad: str = "") -> list[Any]:
    shapes = {"q": (2, rows, 4, 64), "k": (2, keys, heads_kv, 64), "v": (2, keys, heads_kv, 64)}
    return [tensor(*shape, dtype=dtype, requires_grad=name in grad) for name, shape in shapes.items()]


def calls_of(function: Callable[[], object]) -> int:
    """Functions that this package calls, in Python or in C, and that are called in it, in one call."""
    count = 0

    def seen(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(PACKAGE):
            count += 1

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
