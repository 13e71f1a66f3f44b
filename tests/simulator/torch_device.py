"""Torch's CPU as its GPU 0: for tests that make their tensors on "cuda", beneath the driver of `gpu.py`.

Tensors stay on the CPU and say that they are on the GPU; work on a stream is done when it is asked for. What needs
torch's own CUDA (graphs, streams, its allocator) skips.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

_GIVEN = {"cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0}


def _host(device: Any) -> Any:
    names = isinstance(device, (str, int, torch.device)) and not isinstance(device, bool)
    return "cpu" if names and device in _GIVEN else device


class OnTheHost(TorchFunctionMode):
    """Everything that names the GPU as a place names the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *[_host(x) if isinstance(x, (str, torch.device)) else x for x in args[1:]])
        return func(*args, **kwargs)


def _needs_torchs(what: str) -> Any:
    def skip(*_: Any, **__: Any) -> Any:
        pytest.skip(f"a simulated GPU has no {what} of torch's")

    return skip


def install(capability: tuple[int, int]) -> None:
    """For the rest of the process."""
    names = ("tensors", "passes", "efficient", "scaled_efficient")
    package = [importlib.import_module(f"nvrtc_attn.torch.{name}") for name in names]
    OnTheHost().__enter__()
    torch.Tensor.is_cuda = property(lambda x: x.device.type == "cpu")  # type: ignore[assignment,method-assign]
    torch.Tensor.get_device = lambda _: 0  # type: ignore[assignment,method-assign]
    for module in package:
        for name, value in (
            ("raw_stream", lambda _: 0), ("empty_on_current", torch._C._dynamo.guards._empty_strided_cpu),
            ("current_device", lambda: 0),
        ):  # fmt: skip
            if hasattr(module, name):
                setattr(module, name, value)
    from nvrtc_attn.front import tensors

    tensors._torch().current_raw_stream = lambda _: 0
    generator = torch.Generator
    torch.Generator = lambda device="cpu": generator(_host(device))  # type: ignore[assignment,misc]
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.set_device = cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.get_device_capability = lambda *_: capability
    cuda.is_current_stream_capturing = lambda: False
    for name in (
        "CUDAGraph", "graph", "Stream", "stream", "ExternalStream", "current_stream", "Event", "_sleep",
        "mem_get_info", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "memory_reserved",
        "set_per_process_memory_fraction", "get_device_properties",
    ):  # fmt: skip
        setattr(cuda, name, _needs_torchs(name))
