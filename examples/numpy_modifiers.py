"""Attention with functions of your own in NumPy: a learned relative bias in documents, trained by gradient descent.

    python examples/numpy_modifiers.py

The kernel is told where the scores come from, and gives the gradient of the table. On a GPU pass its arrays.
Before the training, out and that gradient are compared with NumPy's own operations on whole matrices of scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import nvrtc_attn

LENGTH, HEADS, HEAD_DIM = 48, 2, 16


def dense(dout: Any, q: Any, k: Any, v: Any, table: Any, visible: Any) -> tuple[Any, Any]:
    """(out, gradient of the table) with whole matrices of scores."""
    distances = np.arange(LENGTH)[:, None] - np.arange(LENGTH) + LENGTH
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(HEAD_DIM) + table[:, distances]
    exponentials = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    p = exponentials / exponentials.sum(-1, keepdims=True)
    dp = np.einsum("bihd,bjhd->bhij", dout, v)
    dtable = np.zeros_like(table)
    np.add.at(dtable, (slice(None), distances), (p * (dp - (p * dp).sum(-1, keepdims=True))).sum(0))
    return np.einsum("bhij,bjhd->bihd", p, v), dtable


def compare(what: str, found: Any, expected: Any) -> None:
    difference = np.abs(found - expected).max()
    print(f"{what}: largest difference {difference:.1e}")
    assert difference < 1e-2


def main() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, LENGTH, HEADS, HEAD_DIM), dtype=np.float32) for _ in range(3))
    documents = np.repeat(np.arange(3, dtype=np.int32), LENGTH // 3)
    hidden = rng.standard_normal((HEADS, 2 * LENGTH), dtype=np.float32)  # the table that made the data
    table = 0.1 * rng.standard_normal(hidden.shape, dtype=np.float32)

    def relative(score: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return score + aux["table"][h, i - j + LENGTH]

    def same_document(b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return (documents[i] == documents[j]) & (j <= i)

    target = nvrtc_attn.attention(q, k, v, score_mod=relative, mask_mod=same_document, aux={"table": hidden})
    modifier = nvrtc_attn.trace(relative, same_document, aux={"table": table})  # once; the table is read at each call
    wanted = [x is table for x in modifier.captures]
    visible = (documents[:, None] == documents) & np.tri(LENGTH, dtype=bool)
    for step in range(121):
        out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True)
        error = out - target
        dq, dk, dv, dtable = (np.empty_like(x) for x in (q, k, v, table))
        daux = [dtable if want else None for want in wanted]
        nvrtc_attn.attention_backward(error, q, k, v, out, lse, dq, dk, dv, score_mod=modifier, daux=daux)
        if step == 0:
            plain_out, plain_dtable = dense(error, q, k, v, table, visible)
            compare("out of attention with table and documents, beside softmax and matmul of NumPy", out, plain_out)
            compare("gradient of the table, beside that of softmax and matmul of NumPy", dtable, plain_dtable)
        if step % 40 == 0:
            print(f"step {step} of learning the table that made the data: loss {np.square(error).mean():.5f}")
        table -= 0.05 * dtable
    assert np.square(error).mean() < 0.02


if __name__ == "__main__":
    main()
