"""How DTensor shards the operators."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

from ..front.operands import INPUTS, OPERANDS, OPTIONAL_GRADIENTS
from .arguments import BATCHLESS, CU_SEQLENS_Q, DROPOUT, FLAGS, OPTIONS, SEED
from .ops import attention_backward, attention_forward

_sharding_registered = False


def register_sharding() -> None:
    """Teach DTensor the operators: batch and heads can be sharded, where dropout is off.

    Done by itself at the first eager call with a DTensor, and by ``import nvrtc_attn.torch`` where
    ``torch.distributed.tensor`` was imported before. Call it where neither comes before a compiled program.
    """
    global _sharding_registered
    if _sharding_registered:
        return
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding as register

    def placements(arguments: tuple[Any, ...], dim: int | None) -> list[Any]:
        """Of the arguments of `SIGNATURE`, for a mesh axis over dim 0 (batch) or 2 (heads) of q; None replicates."""
        result: list[Any] = []
        for index, x in enumerate(arguments):
            if not hasattr(x, "tensor_meta"):
                result.append(None)
            elif index < SEED and INPUTS[index] == "seqused_k" and dim == 0 and arguments[CU_SEQLENS_Q] is None:
                result.append(Shard(0))  # a length for each batch entry
            elif dim is None or index >= SEED or (index in BATCHLESS and INPUTS[index] != "sink"):
                result.append(Replicate())
            elif INPUTS[index] == "sink":  # one of each head
                result.append(Shard(0) if dim == 2 else Replicate())
            elif index < 3:
                result.append(Shard(dim))
            else:  # bias and mask, [batch, heads, rows, keys], each full or 1
                axis = 0 if dim == 0 else 1
                result.append(Shard(axis) if x.tensor_meta.shape[axis] > 1 else Replicate())
        return result

    def axes(arguments: tuple[Any, ...]) -> list[int | None]:
        if arguments[DROPOUT] > 0:
            return [None]  # its mask is counted over all heads of all batches
        is_packed = arguments[CU_SEQLENS_Q] is not None  # then sequences lie along dim 1
        result: list[int | None] = [None] if is_packed else [None, 0]
        heads = arguments[1].tensor_meta.shape[2]
        sizes = arguments[0].mesh.shape
        products = (math.prod(x) for n in range(1, len(sizes) + 1) for x in itertools.combinations(sizes, n))
        # Any mesh axes may come to share the heads: a query head must stay with its key head.
        if heads and all(heads % product == 0 for product in products if product <= heads) and min(sizes) <= heads:
            result.append(2)
        return result

    def forward_rule(*arguments: Any) -> Any:
        rules = []
        for dim in axes(arguments):
            # Of a result that is there; max_logit of packed sequences is [sequences, heads], and those are not split.
            of_heads = {None: Replicate(), 0: Shard(0), 2: Shard(1)}[dim]
            lse, max_logit = (of_heads if wanted else Replicate() for wanted in arguments[-FLAGS:])
            out = Replicate() if dim is None else Shard(dim)
            rules.append(([out, lse, max_logit], placements(arguments, dim)))
        return rules

    def backward_rule(*arguments: Any) -> Any:
        from torch.distributed.tensor import Partial

        rules = []
        rest = arguments[4:]
        for dim in axes(rest):
            like_q = Replicate() if dim is None else Shard(dim)
            lse = {None: Replicate(), 0: Shard(0), 2: Shard(1)}[dim]
            inputs = placements(rest, dim)
            optional: list[Any] = []
            for name, wanted in zip(OPTIONAL_GRADIENTS, arguments[-OPTIONS:], strict=True):
                given = inputs[INPUTS.index(OPERANDS[name].gradient_of)]
                is_summed = wanted and dim is not None and not isinstance(given, Shard)
                optional.append(Partial() if is_summed else given if wanted else Replicate())
            before = [like_q, None if arguments[1] is None else lse, like_q, lse]
            rules.append(([like_q, like_q, like_q, *optional], [*before, *inputs]))
        return rules

    register(attention_forward)(forward_rule)
    register(attention_backward)(backward_rule)
    _sharding_registered = True


if "torch.distributed.tensor" in sys.modules:
    register_sharding()
