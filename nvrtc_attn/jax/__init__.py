"""JAX: `attention` inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``, and `dot_product_attention` as jax.nn has it."""

from .custom_call import attention
from .sdpa import dot_product_attention

__all__ = ["attention", "dot_product_attention"]
