"""PyTorch: `attention` with autograd, torch's own names of it, and the operators that torch.compile sees."""

from ..base.errors import missing

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("torch", error) from None

from . import flash
from .eager import attention
from .flex import BlockMask, create_block_mask, flex_attention
from .ops import register_sharding
from .sdpa import enable_sdpa, scaled_dot_product_attention

__all__ = [
    "BlockMask",
    "attention",
    "create_block_mask",
    "enable_sdpa",
    "flex_attention",
    "register_sharding",
    "scaled_dot_product_attention",
]
flash.register()
