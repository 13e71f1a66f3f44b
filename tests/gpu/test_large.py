"""Sizes that break narrow integers: offsets beyond 2**31 elements by strides, and grids beyond 65535."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import nvrtc_attn.torch as na  # noqa: E402


def reference(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return ((q @ k.transpose(2, 3) / q.shape[3] ** 0.5).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.reliability(37)
@pytest.mark.parametrize("span", [2**31 - 8, 2**31, 2**31 + 512])
@pytest.mark.parametrize("axis", ["batch", "row", "head"])
def test_offsets_beyond_2_to_the_31(span: int, axis: str) -> None:
    """A small view whose last element lies ``span`` elements into one large buffer."""
    shape = (2, 2, 2, 64)
    stride = -(-span // 8) * 8
    strides = {
        "batch": (stride, 128, 64, 1), "row": (64, stride, 128, 1), "head": (64, 128, stride, 1),
    }[axis]  # fmt: skip
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    torch.manual_seed(0)
    buffer = torch.empty(size, device="cuda", dtype=torch.float16)
    tensors = []
    for _ in range(3):
        x = torch.as_strided(buffer, shape, strides)
        x.copy_(torch.randn(shape, device="cuda"))
        tensors.append(x)
    x = tensors[0].requires_grad_()
    out = na.attention(x, x, x)
    torch.testing.assert_close(out.double(), reference(x, x, x).detach(), atol=2e-3, rtol=2e-3)
    dense = x.detach().contiguous().requires_grad_()
    weights = torch.randn(shape, device="cuda", dtype=torch.float16)
    (grad,) = torch.autograd.grad(out, x, weights)
    (expected,) = torch.autograd.grad(na.attention(dense, dense, dense), dense, weights)
    torch.testing.assert_close(grad.contiguous(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.reliability(37)
def test_bias_and_dropout_counters_beyond_2_to_the_32() -> None:
    """[1, 1, 65536 + 64, 65536 + 64] scores: row offsets of the bias and the mask's counter pass 2**32."""
    m = 65536 + 64
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, m, 1, 16, device="cuda", dtype=torch.float16) for _ in range(3))
    bias = torch.zeros(1, 1, m, m, device="cuda", dtype=torch.float16)
    bias[0, 0, -1, : m // 2] = float("-inf")
    out = na.attention(q, k, v, bias=bias)
    half = reference(q[:, -1:], k[:, m // 2 :], v[:, m // 2 :])
    torch.testing.assert_close(out[:, -1:].double(), half, atol=2e-3, rtol=2e-3)
    del bias
    from nvrtc_attn.front import philox

    dropped = na.attention(q, k, v, dropout_p=0.5, rng=(5, 0))
    keep = philox.keep_mask(
        (1, 1, 1, m), 0.5, 5, 0, origin=(0, 0, m - 1, 0), num_heads=1, max_seqlen_q=m, max_seqlen_k=m
    )
    keep = torch.from_numpy(keep).cuda()
    p = (q[0, -1:, 0].double() @ k[0, :, 0].double().T / 4).softmax(-1) * keep[0, 0] * 2
    torch.testing.assert_close(dropped[0, -1:, 0].double(), p @ v[0, :, 0].double(), atol=2e-3, rtol=2e-3)


@pytest.mark.reliability(38)
@pytest.mark.parametrize(("batch", "heads"), [(65535, 1), (65536, 1), (1, 70000), (8300, 8)])
def test_batch_and_heads_beyond_65535(batch: int, heads: int) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, 3, heads, 16, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)
    )
    out = na.attention(q, k, v)
    torch.testing.assert_close(out.double(), reference(q, k, v).detach(), atol=2e-3, rtol=2e-3)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), weights)
    expected = torch.autograd.grad(reference(q, k, v), (q, k, v), weights.double())
    for mine, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), atol=4e-3, rtol=4e-3)


@pytest.mark.reliability(38)
def test_a_million_queries() -> None:
    q = torch.randn(1, 2**20, 1, 16, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1, 64, 1, 16, device="cuda", dtype=torch.float16) for _ in range(2))
    out = na.attention(q, k, v)
    torch.testing.assert_close(out[:, -64:].double(), reference(q[:, -64:], k, v), atol=2e-3, rtol=2e-3)
