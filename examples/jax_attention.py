"""Attention inside jax.jit and jax.grad: a learned bias, dropout with a JAX key, jax.vmap. On a GPU, or on the CPU.

python examples/jax_attention.py
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

HEADS, HEAD_DIM, SEQLEN = 4, 16, 32


def model(parameters: dict[str, Any], x: Any, key: Any = None) -> Any:
    """One attention layer with a learned bias per head and pair of positions; dropout while a key is given."""
    q, k, v = (x[:, :, None] * parameters[name] for name in ("q", "k", "v"))
    out = attention(q, k, v, bias=parameters["bias"], causal=True, dropout_p=0.0 if key is None else 0.1, rng=key)
    return jnp.einsum("bmhd,hd->bm", out, parameters["out"])


def loss(parameters: dict[str, Any], x: Any, y: Any, key: Any) -> Any:
    return ((model(parameters, x, key) - y) ** 2).mean()


@jax.jit
def step(parameters: dict[str, Any], x: Any, y: Any, key: Any, rate: float) -> Any:
    value, gradient = jax.value_and_grad(loss)(parameters, x, y, key)
    return value, jax.tree.map(lambda p, g: p - rate * jnp.sign(g), parameters, gradient)


def train() -> None:
    """Learn to copy the value four positions back, which only the bias can express: the scores know no positions."""
    keys = iter(jax.random.split(jax.random.key(0), 500))
    shape = (HEADS, HEAD_DIM)
    parameters = {name: 0.3 * jax.random.normal(next(keys), shape) for name in ("q", "k", "v", "out")}
    parameters["bias"] = jnp.zeros((1, HEADS, SEQLEN, SEQLEN))
    first, last, steps = 0.0, 0.0, 200
    for i in range(steps):
        x = jax.random.normal(next(keys), (16, SEQLEN, 1))
        y = jnp.pad(x[:, :-4, 0], ((0, 0), (4, 0)))
        value, parameters = step(parameters, x, y, next(keys), 0.1 * (1 - i / steps))
        last = float(value)
        first = first or last
    print(f"on {jax.devices()[0]}: loss {first:.3f} -> {last:.3f} after {steps} steps; bias {parameters['bias'].shape}")
    assert last < 0.5 * first


def mapped() -> None:
    """Code written for one example: vmap folds its axis into the batch of one call."""
    q, k, v = jax.random.normal(jax.random.key(1), (3, 8, SEQLEN, HEADS, HEAD_DIM), jnp.bfloat16)
    one = lambda q, k, v: attention(q[None], k[None], v[None])[0]  # noqa: E731
    out = jax.jit(jax.vmap(one))(q, k, v)
    print(f"vmap: {out.shape} {out.dtype}, equal to the batched call: {bool((out == attention(q, k, v)).all())}")


if __name__ == "__main__":
    train()
    mapped()
