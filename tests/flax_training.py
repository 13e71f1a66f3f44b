"""A training loop of flax: a causal layer of attention with padding learns to give the token before."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen


class Model(linen.Module):
    """Tokens to tokens; everything but the embedding in ``dtype``."""

    attention_fn: Any
    width: int
    dtype: Any

    @linen.compact
    def __call__(self, tokens: Any, mask: Any) -> Any:
        x = linen.Embed(16, self.width)(tokens) + self.param(
            "positions", linen.initializers.normal(1.0), (tokens.shape[1], self.width)
        )
        attention = linen.MultiHeadDotProductAttention(
            num_heads=4, dtype=self.dtype, attention_fn=self.attention_fn, broadcast_dropout=False
        )
        x = x + attention(linen.LayerNorm(dtype=self.dtype)(x), mask=mask)
        return linen.Dense(16, dtype=self.dtype)(linen.LayerNorm(dtype=self.dtype)(x)).astype(jnp.float32)


def losses(attention_fn: Any, length: int, width: int, steps: int, dtype: Any = jnp.float32) -> list[float]:
    """Of each step; the second of two sequences ends early."""
    tokens = jax.random.randint(jax.random.key(1), (2, length), 0, 16)
    there = jnp.arange(length)[None] < jnp.array([[length], [length - length // 3]])
    mask = linen.combine_masks(linen.make_causal_mask(tokens), linen.make_attention_mask(there, there))
    counts = there.at[:, 0].set(False)
    model = Model(attention_fn, width, dtype)
    weights = model.init(jax.random.key(0), tokens, mask)

    @jax.jit
    def step(weights: Any) -> tuple[Any, Any]:
        def loss(weights: Any) -> Any:
            chosen = jax.nn.log_softmax(model.apply(weights, tokens, mask))
            of_each = jnp.take_along_axis(chosen, jnp.roll(tokens, 1, 1)[..., None], 2)[..., 0]
            return -jnp.where(counts, of_each, 0.0).sum() / counts.sum()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradients), value

    found = []
    with jax.default_matmul_precision("highest"):  # float32 would be TF32 on a GPU
        for _ in range(steps):
            weights, value = step(weights)
            found.append(float(value))
    return found
