"""Repeated calls, which find their plan by a key: values, the current stream, the device of the tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import forget_plans

torch = pytest.importorskip("torch", reason="torch is not installed")

import nvrtc_attn  # noqa: E402
import nvrtc_attn.torch as na  # noqa: E402
from nvrtc_attn import aten  # noqa: E402
from nvrtc_attn.front.operands import INPUTS  # noqa: E402
from nvrtc_attn.plans import plan  # noqa: E402
from nvrtc_attn.torch import known, ops, tensors  # noqa: E402

pytestmark = pytest.mark.gpu
NONE = (None,) * 5


def make(device: str = "cuda", seed: int = 0) -> list[Any]:
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(2, 96, 4, 64, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(4)]


def torch_forward(q: Any, k: Any, v: Any, _: Any) -> list[Any]:
    return [na.attention(q, k, v, causal=True)]


def torch_both(q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = na.attention(*leaves, causal=True, deterministic=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def sdpa_forward(q: Any, k: Any, v: Any, _: Any) -> list[Any]:
    out = na.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return [out.transpose(1, 2)]


def sdpa_both(q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    out = na.scaled_dot_product_attention(*leaves, is_causal=True)
    gradients = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
    return [x.detach().transpose(1, 2) for x in (out, *gradients)]


def core_forward(q: Any, k: Any, v: Any, _: Any) -> list[Any]:
    return list(nvrtc_attn.attention(q, k, v, causal=True, return_lse=True))


def core_both(q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
    out, lse = torch.empty_like(q), torch.empty(2, 4, 96, device=q.device)
    nvrtc_attn.attention_forward(q, k, v, out, lse=lse, causal=True)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    workspace = torch.empty(1 << 24, dtype=torch.uint8, device=q.device)
    nvrtc_attn.attention_backward(
        dout, q, k, v, out, lse, *gradients, causal=True, deterministic=True, workspace=workspace
    )
    return [out, lse, *gradients]


def aten_both(q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
    out, lse, seed, offset, *_ = aten.efficient_attention_forward(q, k, v, *NONE, 0.0, 2, True)
    gradients = aten.efficient_attention_backward(
        dout, q, k, v, None, out, None, None, 96, 96, lse, 0.0, seed, offset, 2, False
    )
    return [out, lse, *gradients[:3]]


def compiled_both(q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
    """The operators, as programs of torch.compile call them."""
    no_tensors = (None,) * (len(INPUTS) - 1)
    more = (*no_tensors, 0, 0, "bottom_right", None, None, None, 0.0, 0.0, None, None, True, None)
    with torch.no_grad():
        out, lse, _ = ops.attention_forward(q, k, v, *more, True, False)
        return [out, lse, *ops.attention_backward(dout, None, out, lse, q, k, v, *more, False, False)[:3]]


FUNCTIONS = [torch_forward, torch_both, sdpa_forward, sdpa_both, core_forward, core_both, aten_both, compiled_both]


def same(found: list[Any], expected: list[Any]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), atol=2e-2, rtol=2e-2)


def fresh(function: Callable[..., list[Any]], values: list[Any]) -> list[Any]:
    """Of tensors that no key has seen: the same values in other strides."""
    return function(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in values))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_repeated_calls_compute_with_their_own_tensors(function: Callable[..., list[Any]]) -> None:
    for seed in range(4):
        values = make(seed=seed)
        same(function(*values), fresh(function, values))
        if function is not core_both:  # which allocates by itself
            same(function(*(x[:1] for x in values)), [x[:1] for x in function(*values)])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_repeated_calls_follow_the_current_stream(function: Callable[..., list[Any]]) -> None:
    """Work on another stream than the captured one would break the capture, or be missing in the replay."""
    values = make()
    for _ in range(4):
        function(*values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function(*values)
    for x, y in zip(values, make(seed=1), strict=True):
        x.copy_(y)
    graph.replay()
    same(found, fresh(function, values))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_repeated_calls_run_on_the_gpu_of_their_tensors(function: Callable[..., list[Any]]) -> None:
    first, second = make("cuda:0"), make("cuda:1")
    for current in (0, 1, 0, 1, 0):
        with torch.cuda.device(current):
            for values in (first, second):
                found = function(*values)
                assert {x.device for x in found} == {values[0].device}
                same([x.cpu() for x in found], [x.cpu() for x in fresh(function, values)])
            assert torch.cuda.current_device() == current


@pytest.mark.parametrize(
    ("function", "expected"), [(torch_forward, 1), (torch_both, 2), (sdpa_both, 2), (compiled_both, 2)]
)
def test_a_warm_call_is_known_whole(
    function: Callable[..., list[Any]], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guards of this torch tell tensors of a GPU apart, in autograd's thread too."""
    forget_plans(monkeypatch)  # other tests have made calls of `fresh` strides
    ran: list[str] = []
    for kind in (known.Known, known.KnownBackward):
        original = kind.run
        monkeypatch.setattr(kind, "run", lambda *x, _run=original: (ran.append(_run.__qualname__), _run(*x))[1])
    values = make()
    for _ in range(5):
        ran.clear()
        found = function(*values)
    assert len(ran) == expected
    same(found, fresh(function, values))
    assert len(ran) == expected, "other strides are another call"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_that_comes_again_is_read_anew(function: Callable[..., list[Any]]) -> None:
    """Launches of the same addresses are ready from the third time on; the values there are others each time."""
    values = make()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for seed in range(12):
        for x, y in zip(values, make(seed=seed), strict=True):
            x.copy_(y)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[seed % 2]):
            found = function(*values)
        torch.cuda.synchronize()
        same(found, fresh(function, values))
        del found
    assert any(made._ready for made in plan._plans.values())


def test_outputs_are_allocated_as_inductor_allocates() -> None:
    """Without it a call takes two microseconds more; a torch that lost it should be known."""
    x = tensors.empty_on_current((2, 3), (3, 1), torch.float16)
    assert (x.shape, x.stride(), x.dtype, x.get_device()) == ((2, 3), (3, 1), torch.float16, tensors.current_device())
