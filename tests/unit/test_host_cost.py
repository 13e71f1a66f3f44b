"""What a repeated call does on the host: no stale plan, and no more calls of functions than today.

Tensors on the CPU count as tensors of GPU 0 here, beneath a driver written in Python.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tensors_of_gpu import (  # noqa: E402
    BF16,
    ELSEWHERE,
    FP16,
    FP32,
    GIVEN,
    TABLES,
    Recorder,
    calls_of,
    fake_gpu,
    forget,
    qkv,
    tensor,
)  # fmt: skip

import nvrtc_attn  # noqa: E402
import nvrtc_attn.torch as na  # noqa: E402
from nvrtc_attn import aten  # noqa: E402
from nvrtc_attn.front import signature  # noqa: E402
from nvrtc_attn.front.guards import RECENT, guard, has_room, tell_apart  # noqa: E402
from nvrtc_attn.front.operands import INPUTS as INPUT_NAMES  # noqa: E402
from nvrtc_attn.runtime import arrays  # noqa: E402
from nvrtc_attn.torch import efficient, ops, packed_ops, passes  # noqa: E402
from nvrtc_attn.torch import known as torch_known  # noqa: E402

fake = fake_gpu


def permuted(x: Any) -> Any:
    """The same shape with heads outside of rows in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def shifted(x: Any) -> Any:
    """The same at an address that is no multiple of 16 bytes."""
    flat = torch.zeros(x.numel() + 1, dtype=x.dtype)
    return flat[1:].view(x.shape)


def changed(change: Callable[[Any], Any], name: str) -> list[Any]:
    return [change(x) if n == name else x for n, x in zip("qkv", qkv(), strict=True)]


STARTS = torch.tensor([0, 40, 64], dtype=torch.int32)
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 40, "max_seqlen_k": 40}
# Each differs from another in one thing that decides the kernels or their params.
INPUTS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "plain": (qkv(), {}),
    "float16": (qkv(FP16), {}),
    "float32": (qkv(FP32), {}),
    "rows": (qkv(rows=63), {}),
    "keys": (qkv(keys=65), {}),
    "key heads": (qkv(heads_kv=2), {}),
    **{f"{name} permuted": (changed(permuted, name), {}) for name in "qkv"},
    **{f"{name} shifted": (changed(shifted, name), {}) for name in "qkv"},
    "expanded": (changed(lambda x: x[:, :, :1].expand(x.shape), "k"), {}),
    "causal": (qkv(), {"causal": True}),
    "top left": (qkv(rows=32), {"causal": "top_left"}),
    "bottom right": (qkv(rows=32), {"causal": True}),
    "window": (qkv(), {"window_size": (3, 0)}),
    "other window": (qkv(), {"window_size": (3, 1)}),
    "scale": (qkv(), {"softmax_scale": 0.5}),
    "scale 1": (qkv(), {"softmax_scale": 1}),
    "softcap": (qkv(), {"softcap": 2.0}),
    "dropout": (qkv(), {"dropout_p": 0.25, "rng": (1, 2)}),
    "more dropout": (qkv(), {"dropout_p": 0.5, "rng": (1, 2)}),
    "bias": (qkv(), {"bias": tensor(1, 4, 64, 64)}),
    "float32 bias": (qkv(), {"bias": tensor(1, 4, 64, 64, dtype=FP32)}),
    "bias a batch": (qkv(), {"bias": tensor(2, 1, 64, 64)}),
    "bias permuted": (qkv(), {"bias": tensor(1, 4, 64, 64).mT}),
    "sink": (qkv(), {"sink": tensor(4, dtype=FP32)}),
    "sink of q's type": (qkv(), {"sink": tensor(4)}),
    "mask": (qkv(), {"mask": tensor(2, 1, 1, 64, dtype=torch.bool)}),
    "packed": ([x[:1] for x in qkv()], PACKED),
    "packed, longer": ([x[:1] for x in qkv()], {**PACKED, "max_seqlen_k": 41}),
    "seqused of batches": (qkv(), {"seqused_k": torch.tensor([3, 4], dtype=torch.int32)}),
    "seqused": ([x[:1] for x in qkv()], {**PACKED, "seqused_k": torch.tensor([3, 4], dtype=torch.int32)}),
}
MODES: dict[str, dict[str, Any]] = {
    "": {}, "lse": {"return_lse": True}, "deterministic": {"deterministic": True}, "portable": {},
}  # fmt: skip


def torch_call(name: str, mode: str, grad: str) -> None:
    values, options = INPUTS[name]
    leaves = [x.detach().requires_grad_(n in grad) for n, x in zip("qkv", values, strict=True)]
    if "bias" in options:
        options = {**options, "bias": options["bias"].detach().requires_grad_("b" in grad)}
    result = na.attention(*leaves, **options, **MODES[mode])
    if grad:
        out = result[0] if mode == "lse" else result
        wanted = [x for x in (*leaves, options.get("bias")) if x is not None and x.requires_grad]
        torch.autograd.grad(out, wanted, torch.zeros_like(out))


def sdpa_call(name: str, mode: str, grad: str) -> None:
    """Calls of torch's own signature, with those of the options that it has."""
    values, options = INPUTS[name]
    if mode == "lse" or not options.keys() <= {"causal", "softmax_scale", "bias", "mask", "dropout_p", "rng"}:
        return
    if "rng" in options or options.get("causal") is True or (options.keys() & {"bias", "mask"} and mode):
        return
    q, k, v = (x.detach().transpose(1, 2).requires_grad_(n in grad) for n, x in zip("qkv", values, strict=True))
    bias = options.get("bias")
    if bias is not None:
        bias = bias.detach().requires_grad_("b" in grad)
    torch.use_deterministic_algorithms(mode == "deterministic")
    try:
        out = na.scaled_dot_product_attention(
            q, k, v, options.get("mask") if bias is None else bias, is_causal="causal" in options,
            scale=options.get("softmax_scale"), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        assert out.shape == q.shape
        assert out.transpose(1, 2).is_contiguous()
        wanted = [x for x in (q, k, v, bias) if x is not None and x.requires_grad]
        if wanted:
            for x, gradient in zip(wanted, torch.autograd.grad(out, wanted, torch.zeros_like(out)), strict=True):
                assert gradient.shape == x.shape
                assert (gradient if x is bias else gradient.transpose(1, 2)).is_contiguous()
    finally:
        torch.use_deterministic_algorithms(False)


def packed_call(name: str, mode: str, grad: str) -> None:
    """k and v, and where they are alike q too, in one tensor, laid out as k is."""
    values, options = INPUTS[name]
    if not grad or grad == "b" or values[1].shape != values[2].shape:
        return
    whole = values if values[0].shape == values[1].shape else values[1:]
    pack = torch.stack(whole, 2)
    if not values[1].is_contiguous():
        pack = pack.transpose(1, 3).contiguous().transpose(1, 3)
    inputs = [*([] if whole is values else [values[0].detach().requires_grad_()]), pack.requires_grad_()]
    if "bias" in options:
        options = {**options, "bias": options["bias"].detach().requires_grad_("b" in grad)}
        inputs.append(options["bias"])
    door = na.attention_qkvpacked if whole is values else na.attention_kvpacked
    result = door(*inputs[: len(inputs) - ("bias" in options)], **options, **MODES[mode])
    out = result[0] if mode == "lse" else result
    wanted = [x for x in inputs if x.requires_grad]
    for x, gradient in zip(wanted, torch.autograd.grad(out, wanted, torch.zeros_like(out)), strict=True):
        assert gradient.shape == x.shape
        assert gradient.is_contiguous()


def core_call(name: str, mode: str, grad: str) -> None:
    values, options = INPUTS[name]
    if not grad:
        nvrtc_attn.attention(*values, **options, **MODES[mode])
        return
    q, k, v = values
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[0], q.shape[2], q.shape[1])
    dbias = {"dbias": torch.empty(options["bias"].shape, dtype=options["bias"].dtype)} if "b" in grad else {}
    more = {"deterministic": True} if mode == "deterministic" else {}
    nvrtc_attn.attention_forward(q, k, v, out, lse=lse, **options, workspace=torch.empty(1 << 22, dtype=torch.uint8))
    gradients = [torch.empty(x.shape, dtype=x.dtype) for x in values]
    nvrtc_attn.attention_backward(
        out.clone(), q, k, v, out, lse, *gradients, **dbias, **options, **more,
        workspace=torch.empty(1 << 22, dtype=torch.uint8),
    )  # fmt: skip


def aten_call(name: str, mode: str, grad: str) -> None:
    """The seed's entry points, with those of the options that they have."""
    values, options = INPUTS[name]
    causal, window = options.get("causal", False), options.get("window_size")
    if window == (3, 1) or options.keys() & {"softcap", "mask", "dropout_p", "sink"} or name == "seqused of batches":
        return
    kind = {False: 2 if window else 0, True: 2, "top_left": 1}[causal]
    packed = [options.get(f"{what}_{x}") for what in ("cu_seqlens", "max_seqlen") for x in "qk"]
    more = {"scale": options.get("softmax_scale"), "window_size": None if window is None else window[0] + 1}
    bias = options.get("bias")
    leaves = [x.detach().requires_grad_() for x in values]  # below autograd: no gradient is lost
    out, lse, seed, offset, *_ = aten.efficient_attention_forward(
        *leaves, bias, *packed, 0.0, kind, bool(mode or grad), **more, seqlen_k=options.get("seqused_k")
    )
    if grad and "seqused_k" not in options:
        aten.efficient_attention_backward(
            torch.zeros_like(out), *leaves, bias, out, *packed, lse, 0.0, seed, offset, kind, "b" in grad, **more,
            shared_storage_dqdkdv=mode == "lse" and len({x.shape for x in leaves}) == 1,
        )  # fmt: skip


def cases() -> list[tuple[str, str, str]]:
    found = [(name, mode, grad) for name in INPUTS for mode in MODES for grad in ("", "qkv")]
    return found + [(name, "", grad) for name in INPUTS if "bias" in name for grad in ("b", "qkvb")]


CALLS = {"torch": torch_call, "packed": packed_call, "sdpa": sdpa_call, "core": core_call, "aten": aten_call}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.turns(3)
def test_a_repeated_call_launches_what_a_first_one_does(
    fake: Recorder, monkeypatch: pytest.MonkeyPatch, call: Callable[..., None]
) -> None:
    """Every case three times, and then each with empty tables: a key that two of them share would show.

    The second time a call is found in the tables of plans, the third time among the calls that are known whole.
    """

    def run(case: tuple[str, str, str]) -> list[Any]:
        if case[1] == "portable":
            monkeypatch.setenv("NVRTC_ATTN_BACKEND", "portable")
        else:
            monkeypatch.delenv("NVRTC_ATTN_BACKEND", raising=False)
        fake.launches.clear()
        call(*case)
        return list(fake.launches)

    wanted = [
        case for case in cases() if call in (torch_call, packed_call, sdpa_call) or case[2] in ("", "qkv", "qkvb")
    ]
    for case in wanted:
        run(case)
    first = [run(case) for case in wanted]
    sizes = [len(table) for table in TABLES]
    assert sum(sizes) > (len(INPUTS) if call is not packed_call else len(INPUTS) // 2)
    # Of more kinds of tensors than are known at once those are looked up that were remembered last.
    assert bool(torch_known._known_plans) == (call in (torch_call, packed_call, sdpa_call))
    assert bool(signature._known) == (call in (core_call, aten_call))
    again = [run(case) for case in wanted]
    assert again == first
    assert [len(table) for table in TABLES] == sizes
    for case, found in zip(wanted, again, strict=True):
        forget()
        assert run(case) == found, case
        assert found or call in (aten_call, packed_call, sdpa_call), case


def as_torchs(q: Any, k: Any, v: Any) -> Any:
    return na.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def test_a_call_is_of_its_device_and_of_the_memory_that_its_tensors_stand_for(
    fake: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv()
    for _ in range(3):
        for function in (na.attention, nvrtc_attn.attention, as_torchs):
            fake.addresses.clear()
            function(q, k, v)
            function(torch._neg_view(q), k, v)
            assert [x[0] == q.data_ptr() for x in fake.addresses] == [True, False]
            assert {x[1] for x in fake.addresses} == {k.data_ptr()}
    monkeypatch.setitem(GIVEN, "device", 1)
    for _ in range(3):
        for function in (na.attention, nvrtc_attn.attention, as_torchs):
            fake.launches.clear()
            function(q, k, v)
            assert fake.launches[0][0][0] == 1, "the image of the other GPU"
    fake.stack[:] = [fake.context_of(0)]
    na.attention(q, k, v)
    assert fake.stack == [fake.context_of(0)]


def test_autocast_and_subclasses_do_not_find_the_plan_of_the_plain_call(fake: Recorder) -> None:
    q, k, v = qkv(FP32)
    for function in (na.attention, as_torchs):
        for _ in range(3):
            function(q, k, v)
        plain = fake.launches[-1]
        for _ in range(3):
            with torch.autocast("cpu", BF16):
                assert function(q, k, v).dtype is BF16
            assert fake.launches[-1] != plain
            function(q, k, v)
            assert fake.launches[-1] == plain

    class Marked(torch.Tensor):
        pass

    with pytest.raises(TypeError, match="a subclass of torch"):
        nvrtc_attn.attention(q.as_subclass(Marked), k, v)
    assert nvrtc_attn.attention(torch.nn.Parameter(q, requires_grad=False), k, v).shape == q.shape


REFUSED: dict[str, tuple[Callable[[Any, Any, Any, Any], dict[str, Any]], str]] = {
    "overlap": (lambda q, k, v, out: {"out": q.view(q.shape)}, "out: shares memory with q"),
    "overlap by half": (lambda q, k, v, out: {"out": halves(v)}, "out: shares memory with v"),
    "read by element": (lambda q, k, v, out: {"out": out[:, :1].expand(out.shape)}, "let elements share"),
    "gradient": (lambda q, k, v, out: {"k": k.detach().requires_grad_()}, "k: requires_grad is True"),
    "another device": (lambda q, k, v, out: {"v": elsewhere(v.clone())}, "v: .*cuda:1"),
    "no flag": (lambda q, k, v, out: {"causal": 1}, "causal"),
    "no window": (lambda q, k, v, out: {"window_size": (True, 0)}, "window_size"),
    "modifier": (lambda q, k, v, out: {"aux": {"x": q}}, "aux: given without score_mod"),
    "wrong lse": (lambda q, k, v, out: {"lse": out}, "lse: "),
}
_behind: dict[int, Any] = {}


def elsewhere(x: Any) -> Any:
    """``x``, which counts as a tensor of GPU 1."""
    ELSEWHERE.append(x)
    return x


def halves(v: Any) -> Any:
    """A tensor of v's shape in memory that begins in the middle of v's, and ends behind it."""
    return _behind[v.data_ptr()][v.numel() // 2 :][: v.numel()].view(v.shape)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("fake")
def test_what_a_first_call_refuses_a_repeated_one_refuses(case: str) -> None:
    q, k, v = qkv()
    memory = torch.zeros(2 * v.numel(), dtype=v.dtype)
    v = memory[: v.numel()].view(v.shape)
    _behind[v.data_ptr()] = memory
    out = torch.empty_like(q)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": torch.empty(2, 4, 64)}
    for _ in range(3):
        nvrtc_attn.attention_forward(**given)
    change, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        nvrtc_attn.attention_forward(**{**given, **change(q, k, v, out)})
    # What was apart once is asked again at other addresses, and known at the same ones.
    for memory_of_out in (out, halves(v), out):
        given["out"] = memory_of_out
        with pytest.raises(ValueError, match="shares") if memory_of_out is not out else contextlib.nullcontext():
            nvrtc_attn.attention_forward(**given)
    # Outputs between inputs of one buffer are apart, whatever the order of the addresses.
    whole = torch.zeros(2, 64, 4, 4, 64, dtype=BF16)
    slices = dict(zip(("k", "out", "q", "v"), whole.unbind(3), strict=True))
    for _ in range(2):
        nvrtc_attn.attention_forward(**slices)


def test_a_backward_pass_needs_its_workspace_and_its_seed_every_time(fake: Recorder) -> None:
    q, k, v = qkv()
    out, lse = torch.empty_like(q), torch.empty(2, 4, 64)
    grads = [torch.empty_like(q) for _ in range(3)]
    enough = torch.empty(nvrtc_attn.backward_workspace_bytes(q, k, v) + 64, dtype=torch.uint8)
    assert len(enough) > 64
    for workspace in (enough, enough):
        nvrtc_attn.attention_backward(out.clone(), q, k, v, out, lse, *grads, workspace=workspace)
    for workspace, message in ((None, "workspace: None"), (enough[:64], "bytes, needed are"), (enough[1:], "16 bytes")):
        with pytest.raises(ValueError, match=message):
            nvrtc_attn.attention_backward(out.clone(), q, k, v, out, lse, *grads, workspace=workspace)
    more: dict[str, Any] = {"dropout_p": 0.5, "workspace": enough}
    for _ in range(2):
        nvrtc_attn.attention_backward(out.clone(), q, k, v, out, lse, *grads, rng=(1, 2), **more)
    with pytest.raises(ValueError, match="rng: None"):
        nvrtc_attn.attention_backward(out.clone(), q, k, v, out, lse, *grads, **more)


def test_debugging_looks_at_the_lengths_of_repeated_calls(fake: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr("nvrtc_attn.plans.debug.check_device_lengths", looked.append)
    values = [x[:1] for x in qkv()]
    for debug, expected in ((None, 0), ("1", 4)):
        if debug:
            monkeypatch.setenv("NVRTC_ATTN_DEBUG", debug)
        for function in (na.attention, nvrtc_attn.attention) * 2:
            function(*values, **PACKED)
        assert len(looked) == expected


def test_debugging_looks_at_the_indices_of_repeated_calls(fake: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with functions are not remembered then."""
    looked: list[Any] = []
    monkeypatch.setattr("nvrtc_attn.plans.debug.check_device_indices", looked.append)
    monkeypatch.setenv("NVRTC_ATTN_DEBUG", "1")
    table, values = torch.zeros(64), qkv()
    heads_first = [x.transpose(1, 2) for x in values]
    doors: tuple[Callable[[], object], ...] = (
        lambda: na.attention(*values, score_mod=lambda s, b, h, q, k: s + table[k // 2]),
        lambda: nvrtc_attn.attention(*values, score_mod=lambda s, b, h, q, k: s + table[k // 2]),
        lambda: na.flex_attention(*heads_first, lambda s, b, h, q, k: s + table[k // 2]),
    )
    for count, door in enumerate((*doors, *doors, *doors), 1):
        door()
        assert len(looked) == count


def timed() -> dict[str, Callable[[], object]]:
    plain, leaves = qkv(), qkv(grad="qkv")
    heads_first, first_leaves = tensors_of("sdpa"), tensors_of("sdpa", "qkv")
    out, lse, dout = torch.empty_like(plain[0]), torch.empty(2, 4, 64), torch.zeros_like(plain[0])
    workspace = torch.empty(1 << 22, dtype=torch.uint8)
    grads = [torch.empty_like(x) for x in plain]
    return {
        "torch, no gradient": lambda: na.attention(*plain, causal=True),
        "torch, with gradient": lambda: na.attention(*leaves, causal=True),
        "torch, both passes": lambda: torch.autograd.grad(na.attention(*leaves, causal=True), leaves, dout),
        "torch's signature": lambda: na.scaled_dot_product_attention(*heads_first),
        "torch's signature, both passes": lambda: torch.autograd.grad(
            na.scaled_dot_product_attention(*first_leaves), first_leaves, dout.transpose(1, 2)
        ),
        "aten": lambda: aten.efficient_attention_forward(*plain, None, None, None, None, None, 0.0, 2),
        "attention": lambda: nvrtc_attn.attention(*plain, causal=True),
        "attention_forward": lambda: nvrtc_attn.attention_forward(*plain, out, lse=lse, causal=True),
        "attention_backward": lambda: nvrtc_attn.attention_backward(
            dout, *plain, out, lse, *grads, causal=True, workspace=workspace
        ),
        "forward operator": lambda: operator(*plain),
        "backward operator": lambda: operator_backward(dout, out, lse, *plain),
    }


# A fourteenth above what was counted with Python 3.11 and torch 2.13: 42, 45, 45, 41, 44, 58, 68, 68, 85, 38, 27.
BOUNDS = {
    "torch, no gradient": 45, "torch, with gradient": 48, "torch, both passes": 48, "torch's signature": 44,
    "torch's signature, both passes": 47, "aten": 62, "attention": 73, "attention_forward": 73,
    "attention_backward": 91, "forward operator": 41, "backward operator": 29,
}  # fmt: skip


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("name", BOUNDS)
def test_a_warm_call_calls_few_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory: dict[Any, Any] = {}

    def again(*made: Any) -> Any:
        """As torch's allocator on a GPU: the memory of the call before."""
        shape, strides, dtype = made
        return memory.setdefault(made, torch.empty_strided(shape, strides, dtype=dtype)).detach()

    for module in (passes, torch_known, efficient):
        monkeypatch.setattr(module, "empty_on_current", again)
    monkeypatch.setattr(arrays, "_of_torch", lambda: (again, lambda: 0))
    function = timed()[name]
    for _ in range(5):
        function()
    assert calls_of(function) <= BOUNDS[name]


# ---------------------------------------------------------------------------------------- calls that are known whole


def known(function: Callable[[], object]) -> int:
    """How many of the calls and backward passes in ``function`` are answered by what is known."""
    count = 0
    codes = {torch_known.Known.run.__code__, torch_known.KnownBackward.run.__code__}

    def seen(frame: Any, event: str, result: Any) -> None:
        nonlocal count
        count += event == "return" and frame.f_code in codes and result is not None

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


DOORS = {"attention": na.attention, "sdpa": na.scaled_dot_product_attention}
NO_TENSORS = (None,) * (len(INPUT_NAMES) - 3 + 2)
SCALARS = (0, 0, "bottom_right", None, None, None, 0.0, 0.0, None, None, False, None)


def operator(*qkv: Any, scalars: tuple[Any, ...] = SCALARS, flags: tuple[bool, bool] = (True, False)) -> Any:
    """The forward operator, as a program of torch.compile calls it."""
    with torch.no_grad():
        return ops.attention_forward(*qkv, *NO_TENSORS, *scalars, *flags)


def operator_backward(dout: Any, out: Any, lse: Any, *qkv: Any) -> Any:
    with torch.no_grad():
        return ops.attention_backward(dout, None, out, lse, *qkv, *NO_TENSORS, *SCALARS, False, False)


def tensors_of(door: str, grad: str = "") -> list[Any]:
    """q, k and v, laid out as the function takes them."""
    plain = [x.detach().transpose(1, 2) if door == "sdpa" else x.detach() for x in qkv()]
    return [x.requires_grad_(name in grad) for name, x in zip("qkv", plain, strict=True)]


class Marked(torch.Tensor):
    pass


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def otherwise(x: Any) -> Any:
    """The same with the second dim outside of the batch in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


OTHERS: dict[str, Callable[[Any], Any]] = {
    "another type": lambda x: x.half(), "other strides": otherwise, "not aligned": shifted,
    "wants a gradient": lambda x: x.detach().requires_grad_(), "lazily negated": torch._neg_view,
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False), "a subclass": lambda x: x.as_subclass(Marked),
    "smaller": lambda x: x[:1], "expanded": lambda x: x[:, :1].expand(x.shape),
    "on another GPU": lambda x: elsewhere(x.clone()),
}  # fmt: skip


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("door", [*DOORS, "operator"])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.turns(3)
def test_no_other_call_is_taken_for_a_known_one(door: str, other: str) -> None:
    call = (DOORS | {"operator": operator})[door]
    q, k, v = tensors_of(door)
    for _ in range(2):
        call(q, k, v)
    assert known(lambda: call(k.clone(), q.clone(), v.clone())) == 1
    for name in "qkv":
        torch_known._known_plans.clear()
        call(q, k, v)
        assert known(lambda: call(q, k, v)) == 1
        given = [OTHERS[other](x) if n == name else x for n, x in zip("qkv", (q, k, v), strict=True)]
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # which a call refuses that is not known
            assert known(lambda given=given: call(*given)) == 0


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("other", OTHERS)
def test_the_facts_of_no_other_tensors_are_taken_for_known_ones(other: str) -> None:
    """Those of the core functions and of the seed's entry points."""
    q, k, v = qkv()

    def facts(*given: Any) -> Any:
        found = signature.read(given, detached=True)
        return found and found[1]

    first = facts(q, k, None, v)
    for _ in range(3):
        assert facts(q, k, None, v) == facts(*(x.clone() for x in (q, k)), None, v.clone()) == first
        assert facts(q, k, v, None) != first
        assert facts(q, k, v) != first
    assert signature._known
    for name in "qkv":
        for _ in range(3):
            new = [OTHERS[other](x) if n == name else x for n, x in zip("qkv", (q, k, v), strict=True)]
            # Wishes for a gradient change nothing but whether it would be lost.
            if other in ("wants a gradient", "a parameter"):
                assert facts(*new[:2], None, new[2]) == first
                assert (signature.read(new) is None) == (other == "wants a gradient")
            else:
                assert facts(*new[:2], None, new[2]) != first
    with torch.no_grad():
        assert signature.read([q.detach().requires_grad_(), k, v]) is not None


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("door", DOORS)
def test_a_call_is_not_known_below_what_must_see_it(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = DOORS[door]
    q, k, v = tensors_of(door)
    leaf = tensors_of(door, "q")[0]
    for _ in range(2):
        call(q, k, v)
        call(leaf, k, v)
    assert known(lambda: (call(q, k, v), call(leaf, k, v))) == 2
    assert not call(q, k, v).requires_grad
    assert call(leaf, k, v).requires_grad
    with torch.no_grad():
        assert known(lambda: call(leaf, k, v)) == 0
        assert not call(leaf, k, v).requires_grad
    for state in (lambda: torch.autocast("cpu", FP16), Watching, torch.inference_mode):
        with state():
            assert known(lambda: call(q, k, v)) == 0
    # The operator below a transformation may be known.
    monkeypatch.setattr(ops, "known_calls", lambda _: None)
    assert known(lambda: torch.func.vmap(call)(q[None], k[None], v[None])) == 0
    assert known(lambda: torch.func.grad(lambda x: call(x, k, v).sum())(q)) == 0
    assert known(lambda: call(q, q, q)) == 0
    assert known(lambda: call(q, k, v)) == 1


@pytest.mark.usefixtures("fake")
def test_inputs_that_are_none_are_as_if_not_named() -> None:
    q, k, v = qkv()
    for _ in range(3):
        na.attention(q, k, v, causal=True)
    assert known(lambda: na.attention(q, k, v, causal=True, sink=None, bias=None, mask=None)) == 1
    with pytest.raises(TypeError, match="unexpected keyword argument 'sinks'"):
        na.attention(q, k, v, causal=True, sinks=None)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("door", DOORS)
def test_a_backward_pass_is_known_for_the_tensors_it_gets(door: str) -> None:
    call = DOORS[door]
    leaves = tensors_of(door, "qkv")
    dout = torch.zeros_like(leaves[0])

    def backward(out: Any, dout: Any = dout, **more: Any) -> int:
        return known(lambda: torch.autograd.grad(out, leaves, dout, **more))

    for _ in range(3):
        backward(call(*leaves))
    assert backward(call(*leaves)) == 1
    assert backward(call(*leaves), torch.zeros(1, dtype=BF16).expand(dout.shape)) == 0
    assert backward(call(*leaves), otherwise(dout)) == 0
    assert backward(call(*leaves), shifted(dout)) == 0
    out = call(*leaves)
    assert backward(out, dout.clone().requires_grad_(), create_graph=True) == 0
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: otherwise(x) if x.dim() == 4 else x):
        out = call(*leaves)
    assert backward(out) == 0
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        out = call(*leaves)
    assert backward(out) == 1
    for given, expected in ((dout, 1), (otherwise(dout), 0)):  # which is another pass, that nobody knows
        unpacked: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x, seen=unpacked: seen.append(x) or x):
            out = call(*leaves)
        assert backward(out, given) == expected
        assert len(unpacked) == 5, "checkpointing hands each tensor out once"
    out = call(*leaves)
    with torch.no_grad():
        leaves[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(out)


@pytest.mark.usefixtures("fake")
def test_operators_of_a_compiled_program_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    dout = torch.zeros_like(q)
    for _ in range(3):
        out, lse, _ = operator(q, k, v)
        operator_backward(dout, out, lse, q, k, v)
    first = operator(q, k, v), operator_backward(dout, out, lse, q, k, v)
    assert known(lambda: operator(q, k, v)) == known(lambda: operator_backward(dout, out, lse, q, k, v)) == 1
    assert known(lambda: operator(q, k, v, flags=(False, False))) == 0
    assert known(lambda: operator(q, k, v, scalars=(*SCALARS[:6], 3.0, *SCALARS[7:]))) == 0, "softcap"
    assert known(lambda: operator_backward(shifted(dout), out, lse, q, k, v)) == 0
    monkeypatch.setattr(ops, "SHORT_WAYS", {})
    monkeypatch.setattr(ops, "known_calls", lambda _: None)
    ops._backward_calls.clear()
    shapes = [[(x.shape, x.stride(), x.dtype, x.requires_grad) for x in found] for found in first]
    longer = operator(q, k, v), operator_backward(dout, out, lse, q, k, v)
    assert shapes == [[(x.shape, x.stride(), x.dtype, x.requires_grad) for x in found] for found in longer]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("count", [3, 2])
def test_passes_of_a_packed_tensor_are_known(count: int) -> None:
    tensors = [torch.zeros(2, 64, count, 4, 64, dtype=BF16)]
    if count == 2:
        tensors.insert(0, tensor(2, 64, 4, 64))
    door = na.attention_qkvpacked if count == 3 else na.attention_kvpacked
    leaves = [x.detach().requires_grad_() for x in tensors]
    dout = tensor(2, 64, 4, 64)

    def backward(out: Any, dout: Any = dout) -> int:
        return known(lambda: torch.autograd.grad(out, leaves, dout))

    for _ in range(3):
        backward(door(*leaves))
    assert known(lambda: door(*leaves)) == backward(door(*leaves)) == 1
    assert backward(door(*leaves), shifted(dout)) == 0
    assert known(lambda: door(*leaves, causal=True)) == 0
    given = (None, *tensors) if count == 3 else tuple(tensors)

    def operators() -> Any:
        with torch.no_grad():
            out, lse = packed_ops.attention_packed_forward(*given, *NO_TENSORS, *SCALARS, True)
            more = given, NO_TENSORS, SCALARS, (False, False)
            return packed_ops.attention_packed_backward(dout, None, out, lse, *[x for part in more for x in part])

    first, *_ = (operators() for _ in range(3))
    assert known(operators) == 2
    for a, b in zip(first, operators(), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.usefixtures("fake")
def test_an_operator_is_not_known_below_what_must_see_it() -> None:
    q, k, v = qkv()
    leaf = q.detach().requires_grad_()
    for _ in range(3):
        operator(q, k, v)
    assert known(lambda: operator(q, k, v)) == 1
    with torch.enable_grad():
        assert known(lambda: ops.attention_forward(leaf, k, v, *NO_TENSORS, *SCALARS, True, False)) == 0
        assert ops.attention_forward(leaf, k, v, *NO_TENSORS, *SCALARS, True, False)[0].requires_grad
    seen: list[str] = []

    class Seeing(Watching):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return super().__torch_dispatch__(function, types, args, kwargs)

    for _ in range(3):
        with Seeing():
            assert known(lambda: operator(q, k, v)) == 0
    assert seen.count("nvrtc_attn.attention_forward.default") == 3
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert type(operator(*fake)[0]).__name__ == "FakeTensor"
    assert torch.func.vmap(operator)(q[None], k[None], v[None])[0].shape == (1, *q.shape)
    assert known(lambda: operator(q, k, v)) == 1


LIKE_DEFAULTS: dict[str, list[tuple[str, Any]]] = {
    "attention": [
        ("causal", 0), ("causal", 0.0), ("return_lse", 0), ("deterministic", 0), ("softcap", False),
        ("dropout_p", False), ("softmax_scale", True), ("window_size", [None, None]),
    ],
    "sdpa": [("is_causal", 0), ("dropout_p", False), ("scale", True)],
}  # fmt: skip


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("door", DOORS)
def test_options_that_equal_those_of_a_known_call_are_asked_again(door: str) -> None:
    """1 equals True, and a table looks options up by equality."""
    call, (q, k, v) = DOORS[door], tensors_of(door)
    for more in ({}, {"softmax_scale" if door == "attention" else "scale": 1.0}):
        for _ in range(3):
            call(q, k, v, **more)
        assert known(lambda more=more: call(q, k, v, **more)) == 1
    for name, value in LIKE_DEFAULTS[door]:
        first = outcome(lambda name=name, value=value: call(q, k, v, **{name: value}))
        torch_known._known_plans.clear()
        assert outcome(lambda name=name, value=value: call(q, k, v, **{name: value})) == first, (name, value)
        for _ in range(3):
            call(q, k, v)
            call(q, k, v, **({"softmax_scale": 1.0} if door == "attention" else {"scale": 1.0}))
    assert known(lambda: call(q, k, v, **({"softmax_scale": 1} if door == "attention" else {"scale": 1}))) == 1


def outcome(function: Callable[[], Any]) -> Any:
    """Of a call: its error, or the shapes of its results."""
    try:
        found = function()
    except Exception as error:
        return type(error), str(error)
    return [x.shape for x in (found if isinstance(found, tuple) else [found])]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("door", DOORS)
def test_the_node_of_a_known_call_is_one_of_autograds(door: str) -> None:
    """It refuses a second derivative, a second pass of a freed graph, and gives gradients to hooks, as a first call's.

    ``known`` tells which calls got a node of their own class.
    """
    call = DOORS[door]
    leaves = tensors_of(door, "qkv")
    dout = torch.zeros_like(leaves[0])
    names, kinds = set(), set()
    for number in range(4):
        calls = known(lambda: kinds.add(type((out := call(*leaves)).grad_fn)) or names.add(out.grad_fn.name()))
        assert calls == (number > 0), "the third call of them all is known"
        out = call(*leaves)
        seen: list[Any] = []
        leaves[1].register_hook(seen.append)
        gradients = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert seen[0].shape == leaves[1].shape
        assert [x.shape for x in gradients] == [x.shape for x in leaves]
        assert [x.requires_grad for x in gradients] == [False] * 3
        (dv,) = torch.autograd.grad(out, leaves[2:], dout, retain_graph=True)
        assert dv.shape == leaves[2].shape
        twice = torch.autograd.grad(out, leaves, dout.clone().requires_grad_(), create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            sum(x.float().sum() for x in twice).backward()
        torch.autograd.grad(out, leaves, dout)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, leaves, dout)
        with pytest.raises(RuntimeError, match=r"shape|size"):
            call(*leaves).backward(dout[:1])
    assert len(kinds) == 2
    assert names == {"_AttentionBackward"}


@pytest.mark.usefixtures("fake")
def test_a_known_call_with_lse_gives_a_gradient_through_either_result() -> None:
    leaves = tensors_of("attention", "qkv")
    ran: list[Any] = []
    for number in range(4):
        for places in ((0,), (1,), (0, 1)):

            def both(places: tuple[int, ...] = places) -> None:
                results = na.attention(*leaves, return_lse=True)
                ran.append(torch.autograd.grad(sum(results[i].float().sum() for i in places), leaves))

            calls = known(both)
            assert number < 2 or places == (0,) or calls == 1, "the call, not its pass with a gradient of lse"
    assert all([x.shape for x in gradients] == [x.shape for x in leaves] for gradients in ran)
    out, lse = na.attention(*leaves, return_lse=True)
    assert torch.autograd.grad(lse.sum(), leaves[2:], retain_graph=True)[0].shape == leaves[2].shape
    assert out.grad_fn is lse.grad_fn


@pytest.mark.usefixtures("fake")
def test_classes_of_nodes_go_with_the_calls_that_were_known() -> None:
    leaves = tensors_of("attention", "qkv")
    for _ in range(3):
        out = na.attention(*leaves)
    ((first, *_),) = torch_known._known_plans.values()
    kind = weakref.ref(out.grad_fn._forward_cls)
    assert first.attach is not None
    torch.autograd.grad(out, leaves, torch.zeros_like(out))
    del first, out
    forget()
    gc.collect()
    assert kind() is None


@pytest.mark.usefixtures("fake")
def test_lengths_that_change_at_every_step_make_few_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original = torch_known.guard
    monkeypatch.setattr(torch_known, "guard", lambda *x: (made.append(x), original(*x))[1])
    for rows in [*range(1, 61)] * 2:
        na.attention(*qkv(rows=rows))
    assert len(made) <= 8 + 60 // 16 + 1
    assert sum(map(len, torch_known._known_plans.values())) == 8
    for _ in range(20):
        na.attention(*qkv(rows=61))
    assert known(lambda: na.attention(*qkv(rows=61))) == 1, "what stays is known in the end"


def test_kinds_of_calls_that_take_turns_all_get_guards() -> None:
    """Of one count for both, the round numbers would all be those of one."""
    full = (None,) * RECENT
    turns = [(kind, has_room((test_kinds_of_calls_that_take_turns_all_get_guards, kind), full)) for kind in "ab" * 64]
    assert {kind: sum(room for x, room in turns if x == kind) for kind in "ab"} == {"a": 4, "b": 4}
    assert has_room("a", full[1:])


def test_without_guards_of_torch_every_call_is_looked_up(fake: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_known, "guard", lambda *_: None)
    q, k, v = qkv()
    for _ in range(4):
        assert known(lambda: na.attention(q, k, v)) == 0
    assert len(fake.launches) == 4
    assert not torch_known._known_plans


def test_a_guard_that_does_not_tell_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def check(self, *_: Any) -> bool:
            return True

    assert not tell_apart(None)
    assert not tell_apart(Blind)
    with torch.inference_mode(), torch.autocast("cpu", BF16):
        assert tell_apart.__wrapped__(torch._C._dynamo.guards.TensorGuards)
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", Blind)
    assert guard(*qkv()) is None
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert guard(*qkv()) is None
