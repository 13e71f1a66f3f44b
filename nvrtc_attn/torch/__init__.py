"""PyTorch: `attention` with autograd, torch's own names of it, and the operators that torch.compile sees."""

from . import flash
from .eager import attention
from .ops import register_sharding
from .sdpa import enable_sdpa, scaled_dot_product_attention

__all__ = ["attention", "enable_sdpa", "register_sharding", "scaled_dot_product_attention"]
flash.register()
