"""Attention sinks on the GPU; named cases run in test_cases.py, random ones in test_sweep.py and the fuzz campaign."""

from __future__ import annotations

from typing import Any

import cases
import pytest
from harness import DEVICE, backend, check, families, torch

import nvrtc_attn.torch as na


def tensors(rows: int, keys: int, heads: int = 8, heads_kv: int = 2, head_dim: int = 64, batch: int = 2) -> Any:
    torch.manual_seed(0)
    shapes = (rows, heads), (keys, heads_kv), (keys, heads_kv)
    return [torch.randn(batch, n, h, head_dim, device=DEVICE, dtype=torch.bfloat16) for n, h in shapes]


def textbook(q: Any, k: Any, v: Any, sink: Any) -> Any:
    """(out, lse) in float64: the sink is one more column of the scores."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    column = sink.double()[None, :, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, column], -1)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., :-1], v), scores.logsumexp(-1)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.usefixtures("split_keys")
def test_split_keys_count_the_sink_once(rows: int) -> None:
    q, k, v = tensors(rows, 16384)
    sink = torch.linspace(0, 14, 8, device=DEVICE)
    out, lse = na.attention(q, k, v, sink=sink, return_lse=True)
    expected, expected_lse = textbook(q, k, v, sink)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sinks_of_any_size_beside_large_scores(head_dim: int) -> None:
    """Scores of thousands with sinks far above, at and far below them; a sink alone is no overflow."""
    q, k, v = tensors(200, 300, head_dim=head_dim)
    q, k = (x * (12000 / head_dim**0.5) ** 0.5 for x in (q, k))
    top = float(textbook(q, k, v, torch.full((8,), -1e30, device=DEVICE))[1].max())
    sink = torch.tensor([-1e30, -100, 0, top - 1, top, top + 2, 1e5, 3e38], device=DEVICE)
    expected, expected_lse = textbook(q, k, v, sink)
    for family in families(cases.make_case("large", dtype="bfloat16")):
        with backend(family):
            out, lse = na.attention(q, k, v, sink=sink, return_lse=True)
        torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=3e-2)
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_dsink_is_bitwise_reproducible(head_dim: int, dropout_p: float) -> None:
    """Whatever the order of the additions to dq, dk and dv."""
    q, k, v = tensors(1000, 1000, head_dim=head_dim)
    sink = torch.randn(8, device=DEVICE, requires_grad=True)
    dout = torch.randn_like(q)
    for family in families(cases.make_case("repeat", dtype="bfloat16")):
        with backend(family):
            out = na.attention(q, k, v, sink=sink, causal=True, dropout_p=dropout_p, rng=(1, 2))
            first, *more = [torch.autograd.grad(out, sink, dout, retain_graph=True)[0] for _ in range(30)]
            assert all(torch.equal(first, x) for x in more)
            assert bool((first != 0).all())


def test_many_packed_sequences() -> None:
    """More than a warp has lanes, some of them empty: rows of the workspace are in whole tiles on Hopper."""
    lengths = tuple((n * 37 % 90, 3 + n * 53 % 130) for n in range(300))
    for fields in ({"causal": True}, {"dropout_p": 0.1}, {"head_dim": 192}):
        check(cases.make_case("many", seqlens=lengths, sink="float32", dlse=True, dtype="bfloat16", **fields))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # of torch
def test_compiled_by_inductor() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(512, 512))
    sink = torch.randn(8, device=DEVICE, requires_grad=True)

    def loss(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return na.attention(q, k, v, sink=sink.tanh(), causal=True, window_size=(127, 0)).float().square().sum()

    expected = torch.autograd.grad(loss(q, k, v, sink), (q, k, v, sink))
    compiled = torch.compile(loss, fullgraph=True)
    for found, want in zip(torch.autograd.grad(compiled(q, k, v, sink), (q, k, v, sink)), expected, strict=True):
        torch.testing.assert_close(found, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rows", [1, 512])
def test_in_a_graph(rows: int) -> None:
    """The sink is read anew at every replay."""
    q, k, v = tensors(rows, 8192)
    sink = torch.zeros(8, device=DEVICE)
    na.attention(q, k, v, sink=sink)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = na.attention(q, k, v, sink=sink)
    for value in (0.0, 5.0, float("-inf")):
        sink.fill_(value)
        graph.replay()
        assert torch.equal(out, na.attention(q, k, v, sink=sink))


def test_other_frameworks_take_it_by_dlpack() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    from nvrtc_attn import cupy as adapter

    q, k, v = tensors(100, 100)
    q, k, v = (x.half() for x in (q, k, v))
    sink = torch.randn(8, device=DEVICE, requires_grad=True)
    arrays = [cupy.from_dlpack(x.detach()) for x in (q, k, v)]
    out, lse = adapter.attention(*arrays, sink=cupy.from_dlpack(sink.detach()), return_lse=True)
    expected = na.attention(q, k, v, sink=sink)
    assert torch.equal(torch.from_dlpack(out), expected)
    dout = torch.randn_like(q)
    *_, dsink = adapter.attention_backward(
        cupy.from_dlpack(dout), *arrays, out, lse, sink=cupy.from_dlpack(sink.detach())
    )
    assert torch.equal(torch.from_dlpack(dsink), torch.autograd.grad(expected, sink, dout)[0])
