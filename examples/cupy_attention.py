"""Attention on CuPy arrays: a bias with its gradient, dropout, packed sequences, another stream. Needs a GPU.

python examples/cupy_attention.py
"""

from __future__ import annotations

import sys
from typing import Any

try:
    import cupy

    devices = cupy.cuda.runtime.getDeviceCount()
except ImportError as error:
    print(f'skipped: CuPy is not installed ({error}). pip install "nvrtc-attn[cupy]"')
    sys.exit(0)
except Exception as error:  # CuPy's own error where there is no driver
    print(f"skipped: no GPU ({error})")
    sys.exit(0)

import numpy as np

import nvrtc_attn
from nvrtc_attn.cupy import attention, attention_backward


def random(*shape: int) -> Any:
    return cupy.random.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16)


def error(found: Any, expected: Any) -> float:
    """Largest difference relative to the largest value."""
    expected = np.asarray(expected, np.float64)
    return float(abs(cupy.asnumpy(found).astype(np.float64) - expected).max() / abs(expected).max())


def gradients() -> None:
    """Forward and backward with a bias and dropout, against the same call on NumPy arrays, which the CPU computes."""
    q, k, v, dout = (random(2, 200, 4, 64) for _ in range(4))
    bias = random(1, 4, 200, 200)
    options = {"causal": True, "dropout_p": 0.1, "rng": (42, 0)}
    out, lse = attention(q, k, v, bias=bias, return_lse=True, **options)
    results = attention_backward(dout, q, k, v, out, lse, bias=bias, **options)

    host = [cupy.asnumpy(x).astype(np.float32) for x in (q, k, v, bias)]
    reference, reference_lse = nvrtc_attn.attention(*host[:3], bias=host[3], return_lse=True, **options)
    expected = [np.empty_like(x) for x in host]
    nvrtc_attn.attention_backward(
        cupy.asnumpy(dout).astype(np.float32), *host[:3], reference, reference_lse, *expected[:3],
        bias=host[3], dbias=expected[3], **options,
    )  # fmt: skip
    errors = {"out": error(out, reference)}
    errors |= {name: error(x, y) for name, x, y in zip(("dq", "dk", "dv", "dbias"), results, expected, strict=True)}
    print("relative error against the CPU:", ", ".join(f"{name} {value:.1e}" for name, value in errors.items()))
    assert max(errors.values()) < 1e-2


def packed_sequences() -> None:
    lengths = [300, 17, 129]
    offsets = cupy.cumsum(cupy.asarray([0, *lengths])).astype(cupy.int32)
    q, k, v = (random(1, sum(lengths), 8, 64) for _ in range(3))
    out = attention(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=300, max_seqlen_k=300)
    first = attention(*(x[:, :300] for x in (q, k, v)))
    print(f"packed sequences of {lengths} tokens: the first differs by {error(out[:, :300], cupy.asnumpy(first)):.1e}")


def other_stream() -> None:
    """Work runs on CuPy's current stream; nothing here waits for another one."""
    q, k, v = (random(1, 1024, 8, 128) for _ in range(3))
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = attention(q, k, v, window_size=(128, 0))
        stream.synchronize()
    print(f"sliding window on a stream of its own: {out.shape} {out.dtype}")


if __name__ == "__main__":
    if devices == 0:
        print("skipped: no GPU")
        sys.exit(0)
    gradients()
    packed_sequences()
    other_stream()
