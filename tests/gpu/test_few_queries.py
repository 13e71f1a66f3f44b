"""Decoding: heads that share a key head are rows of one tile, and keys are split."""

from __future__ import annotations

from typing import Any

import pytest
from harness import DEVICE, torch

import nvrtc_attn.torch as na
from nvrtc_attn import api
from nvrtc_attn import attention_forward as forward


def tensors(batch: int, queries: int, keys: int, dtype: Any = None) -> tuple[Any, Any, Any]:
    """q of 8 heads, k and v of 2, head dim 128."""
    dtype = dtype or torch.bfloat16
    q = torch.randn(batch, queries, 8, 128, device=DEVICE, dtype=dtype)
    k, v = (torch.randn(batch, keys, 2, 128, device=DEVICE, dtype=dtype) for _ in range(2))
    return q, k, v


@pytest.mark.reliability(11)
@pytest.mark.parametrize("queries", [1, 6])
def test_heads_with_stride_zero(queries: int) -> None:
    q, k, v = tensors(2, queries, 3001)
    for shared in ((q[:, :, :1].expand_as(q), k, v), (q, k[:, :, :1].expand_as(k), v[:, :, 1:].expand_as(v))):
        assert torch.equal(na.attention(*shared), na.attention(*(x.contiguous() for x in shared)))


@pytest.mark.parametrize(("queries", "keys"), [(1, 8192), (4, 8192), (1, 700)])
def test_packed_heads_are_what_each_head_is_alone(queries: int, keys: int) -> None:
    q, k, v = tensors(3, queries, keys)
    out, lse = na.attention(q, k, v, causal=True, return_lse=True)
    for head in range(8):
        key_head = slice(head // 4, head // 4 + 1)
        parts = q[:, :, head : head + 1], k[:, :, key_head], v[:, :, key_head]
        alone = na.attention(*parts, causal=True, return_lse=True)
        torch.testing.assert_close(out[:, :, head : head + 1], alone[0], atol=5e-4, rtol=1e-2)
        torch.testing.assert_close(lse[:, head : head + 1], alone[1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.usefixtures("split_keys")
def test_lowest_finite_bias_in_keys_of_unequal_splits(queries: int) -> None:
    """All scores of a row are the lowest finite number: an ordinary softmax, the mean of v; its lse is that number."""
    q, k, v = tensors(2, queries, 5003)
    lowest = torch.finfo(torch.bfloat16).min
    bias = torch.full((2, 8, queries, 5003), lowest, device=DEVICE, dtype=torch.bfloat16)
    bias[1, :, :, :77] = float("-inf")
    out, lse = na.attention(q, k, v, bias=bias, return_lse=True)
    for batch, first in ((0, 0), (1, 77)):
        mean = v[batch, first:].double().mean(0).repeat_interleave(4, 0)
        torch.testing.assert_close(out[batch].double(), mean.expand_as(out[batch]), atol=2e-4, rtol=1e-2)
    torch.testing.assert_close(lse, torch.full_like(lse, lowest))


@pytest.mark.reliability(61)
def test_split_keys_in_a_graph_and_back_to_back() -> None:
    sets = [tensors(1, 1, 16384) for _ in range(3)]
    size = api.forward_workspace_bytes(*sets[0])
    assert size > 0, "the keys are to be split"
    expected, found = ([torch.full_like(s[0], float("nan")) for s in sets] for _ in range(2))
    for (q, k, v), out in zip(sets, expected, strict=True):
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
        forward(q, k, v, out, workspace=workspace)
        torch.cuda.synchronize()
        reference = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2).double() for x in (q, k, v)), enable_gqa=True
        )
        torch.testing.assert_close(out.double(), reference.transpose(1, 2), atol=2e-4, rtol=1e-2)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for (q, k, v), out in zip(sets, found, strict=True):
            workspace.fill_(255)
            forward(q, k, v, out, workspace=workspace)
    for _ in range(20):
        for out in found:
            out.fill_(float("nan"))
        graph.replay()
        for out, exact in zip(found, expected, strict=True):
            assert torch.equal(out, exact)
    for n in range(300):
        (q, k, v), out = sets[n % 3], found[n % 3]
        forward(q, k, v, out, workspace=workspace)
        if n % 3 == 2:
            assert all(map(torch.equal, found, expected))
