"""Attention on NumPy arrays (computed on the CPU): a bias with its gradient, dropout, packed sequences.

python examples/numpy_attention.py
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

import nvrtc_attn

rng = np.random.default_rng(0)


def random(*shape: int) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


def bias_gradient() -> None:
    """A learned bias shared by the batch: its gradient arrives summed over the batch, in the shape of the bias."""
    q, k, v, dout = (random(2, 100, 8, 32) for _ in range(4))
    bias = random(1, 8, 100, 100)
    out, lse = nvrtc_attn.attention(q, k, v, bias=bias, return_lse=True)
    dq, dk, dv, dbias = (np.empty_like(x) for x in (q, k, v, bias))
    nvrtc_attn.attention_backward(dout, q, k, v, out, lse, dq, dk, dv, bias=bias, dbias=dbias)

    # The derivative of sum(out * dout) along a random direction, by differences.
    direction, step = random(*bias.shape), 1e-2
    plus, minus = (
        float((nvrtc_attn.attention(q, k, v, bias=bias + sign * step * direction) * dout).sum(dtype=np.float64))
        for sign in (1, -1)
    )
    expected, found = (plus - minus) / (2 * step), float((dbias * direction).sum(dtype=np.float64))
    print(f"bias {bias.shape}: directional derivative {found:.4f}, by differences {expected:.4f}")
    assert abs(found - expected) < 1e-2 * abs(expected) + 1e-2


def dropout() -> None:
    """The mask is a function of (seed, offset) alone, so a second call, on any device, drops the same elements."""
    q, k, v = (random(1, 64, 2, 16) for _ in range(3))
    first, second = (nvrtc_attn.attention(q, k, v, dropout_p=0.25, rng=(1234, 0)) for _ in range(2))
    keep = nvrtc_attn.dropout_keep_mask((1, 2, 64, 64), 0.25, (1234, 0))
    print(f"dropout 0.25: {1 - keep.mean():.3f} of the weights dropped, repeatable: {np.array_equal(first, second)}")
    assert np.array_equal(first, second)


def packed_sequences() -> None:
    """Three sentences of different length in one call, without padding."""
    lengths = [17, 50, 5]
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = (random(1, sum(lengths), 4, 32) for _ in range(3))
    out = nvrtc_attn.attention(
        q, k, v, causal=True, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=50, max_seqlen_k=50
    )
    for first, last in pairwise(offsets):
        alone = nvrtc_attn.attention(*(x[:, first:last] for x in (q, k, v)), causal=True)
        assert np.allclose(out[:, first:last], alone, atol=1e-6)
    print(f"packed sequences of {lengths} tokens: equal to one call each")


if __name__ == "__main__":
    bias_gradient()
    dropout()
    packed_sequences()
