"""PyTorch: `attention` with autograd, torch's own names of it, and the operators that torch.compile sees."""

from ..base.errors import missing
from ..base.hosts import check_version
from ..base.log import log_once

try:
    import torch as _torch
except ModuleNotFoundError as error:
    raise missing("torch", error) from None

from . import flash
from . import flops as _flops  # noqa: F401 - it registers formulas
from . import transformed as _transformed  # noqa: F401 - it registers rules of torch.func
from .eager import attention
from .flex import BlockMask, create_block_mask, flex_attention
from .packed import attention_kvpacked, attention_qkvpacked
from .sdpa import enable_sdpa, scaled_dot_product_attention
from .sharding import register_sharding

__all__ = [
    "BlockMask",
    "attention",
    "attention_kvpacked",
    "attention_qkvpacked",
    "create_block_mask",
    "enable_sdpa",
    "flex_attention",
    "register_sharding",
    "scaled_dot_product_attention",
]
# Whatever computes with torch's tensors imports this: the switch, the registry's name, ContextParallel, integrations.
check_version("torch", "2.11.0", "2.13.0")
flash.register()
# torch.compile does not trace a logger: it calls this while it traces, and the line is said then.
_torch.compiler.assume_constant_result(log_once)
