"""Attention with functions of your own in JAX: a learned relative bias in packed documents, trained under jax.jit.

    python examples/jax_modifiers.py

The table is a tracer while the function is traced: it is an operand of the kernel, and jax.grad gives its gradient.
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

    target = attend(hidden)

    @jax.jit
    def step(table: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda x: jnp.square(attend(x) - target).mean())(table)
        return table - 40.0 * gradient, loss

    table = jnp.zeros_like(hidden)
    for number in range(121):
        table, loss = step(table)
        if number % 40 == 0:
            print(f"step {number}: loss {loss:.5f}")


if __name__ == "__main__":
    main()
