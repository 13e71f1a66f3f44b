"""Attention with functions of your own in NumPy: a learned relative bias in documents, trained by gradient descent.

    python examples/numpy_modifiers.py

The kernel is told where the scores come from, and gives the gradient of the table. On a GPU pass its arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import nvrtc_attn

LENGTH, HEADS, HEAD_DIM = 48, 2, 16


def main() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, LENGTH, HEADS, HEAD_DIM), dtype=np.float32) for _ in range(3))
    documents = np.repeat(np.arange(3, dtype=np.int32), LENGTH // 3)
    hidden = rng.standard_normal((HEADS, 2 * LENGTH), dtype=np.float32)  # the table that made the data
    table = np.zeros_like(hidden)

    def relative(score: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return score + aux["table"][h, i - j + LENGTH]

    def same_document(b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return (documents[i] == documents[j]) & (j <= i)

    target = nvrtc_attn.attention(q, k, v, score_mod=relative, mask_mod=same_document, aux={"table": hidden})
    modifier = nvrtc_attn.trace(relative, same_document, aux={"table": table})  # once; the table is read at each call
    wanted = [x is table for x in modifier.captures]
    for step in range(121):
        out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True)
        error = out - target
        if step % 40 == 0:
            print(f"step {step}: loss {np.square(error).mean():.5f}")
        dq, dk, dv, dtable = (np.empty_like(x) for x in (q, k, v, table))
        daux = [dtable if want else None for want in wanted]
        nvrtc_attn.attention_backward(error, q, k, v, out, lse, dq, dk, dv, score_mod=modifier, daux=daux)
        table -= 0.05 * dtable
    assert np.square(error).mean() < 0.02


if __name__ == "__main__":
    main()
