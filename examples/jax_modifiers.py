"""Attention with functions of your own in JAX: a learned relative bias in packed documents, trained under jax.jit.

    python examples/jax_modifiers.py

The table is a tracer while the function is traced: it is an operand of the kernel, and jax.grad gives its gradient.
Before the training, out and that gradient are compared with JAX's own operations on whole matrices of scores.
"""

from __future__ import annotations

import sys
from typing import Any

try:
    import jax
    import jax.numpy as jnp

    from nvrtc_attn.jax import attention
except ImportError as error:
    print(f'skipped: JAX is not installed ({error}). pip install "nvrtc-attn[jax]"')
    sys.exit(0)

LENGTH, HEADS, HEAD_DIM = 48, 2, 16


def dense(q: Any, k: Any, v: Any, table: Any, visible: Any) -> Any:
    """The same attention with whole matrices of scores."""
    distances = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH) + LENGTH
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") / HEAD_DIM**0.5 + table[:, distances]
    p = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    return jnp.einsum("bhij,bjhd->bihd", p, v, precision="highest")


def compare(what: str, found: Any, expected: Any) -> None:
    difference = float(jnp.abs(found - expected).max())
    print(f"{what}: largest difference {difference:.1e}")
    assert difference < 1e-2


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (1, LENGTH, HEADS, HEAD_DIM)) for key in keys[:3])
    documents = jnp.arange(LENGTH) // (LENGTH // 3)
    hidden = jax.random.normal(keys[3], (HEADS, 2 * LENGTH))  # the table that made the data

    def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (documents[i] == documents[j]) & (j <= i)

    def attend(table: Any) -> Any:
        return attention(
            q, k, v, mask_mod=same_document, score_mod=lambda score, b, h, i, j: score + table[h, i - j + LENGTH]
        )

    visible = (documents[:, None] == documents) & jnp.tri(LENGTH, dtype=bool)
    target = attend(hidden)
    compare(
        "out of attention with table and documents, beside jax.nn.softmax and einsum",
        target, dense(q, k, v, hidden, visible),
    )  # fmt: skip
    compare(
        "gradient of the table, beside that of jax.nn.softmax and einsum",
        jax.grad(lambda x: jnp.square(attend(x)).sum())(hidden),
        jax.grad(lambda x: jnp.square(dense(q, k, v, x, visible)).sum())(hidden),
    )

    @jax.jit
    def step(table: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda x: jnp.square(attend(x) - target).mean())(table)
        return table - 40.0 * gradient, loss

    table = jnp.zeros_like(hidden)
    for number in range(121):
        table, loss = step(table)
        if number % 40 == 0:
            print(f"step {number} of learning the table that made the data: loss {loss:.5f}")


if __name__ == "__main__":
    main()
