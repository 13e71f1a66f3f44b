"""JAX: `attention` inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``, and `dot_product_attention` as jax.nn has it.

`context_parallel_attention` is that of a sequence which devices share, inside ``jax.shard_map``.
"""

from ..base.errors import missing
from ..base.hosts import check_version

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("jax", error) from None

from .custom_call import attention
from .parallel import context_parallel_attention
from .sdpa import dot_product_attention

__all__ = ["attention", "context_parallel_attention", "dot_product_attention"]
check_version("jax", "0.10.2", "0.12.0")
