"""The node of autograd of a plain call of ContextParallel."""

from __future__ import annotations

from typing import Any, Final

import torch

from ...base.errors import UnsupportedError
from ..derivatives import once_only
from ..tensors import is_transformed
from .checks import NO_TRANSFORMATION
from .local import Whole, whole_with
from .strategies import Inputs, Saved, Strategy, gradients_of


class Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """out and lse of a rank's rows: ``apply(strategy, whole, q, k, v, bias, mask, sink, tie, *captures)``.

    ``tie`` is an empty tensor that depends on q, k and v, of strategies that save none of them: a graph of the backward
    pass leads to its inputs by what was saved, and a use of that graph is refused.
    """

    @staticmethod
    def forward(ctx: Any, strategy: Strategy, whole: Whole, *tensors: Any) -> Any:
        q, k, v, bias, mask, sink, tie, *captures = tensors
        inputs = Inputs(q, k, v, bias, mask, 0, q.shape[2], sink)
        out, lse, saved = strategy.forward(inputs, whole_with(whole, captures))
        own = (q, k, v, out, lse) if strategy.needs_own else (None,) * 5
        lengths = whole.lengths or (None, None, whole.used)
        ctx.save_for_backward(*own, bias, mask, sink, tie, *lengths, *saved.kept, *captures)
        plain = whole_with(whole, None)._replace(lengths=None, used=None)
        ctx.call = strategy, plain, len(saved.kept), (q.shape[2], k.shape[2])
        keep_outputs(ctx, out, lse if whole.return_lse else None)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        every = ctx.saved_tensors
        return once_only(lambda: Attention._gradients(ctx, every, dout, dlse), (*every, dout, dlse))

    @staticmethod
    def _gradients(
        ctx: Any, every: tuple[Any, ...], dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[Any, ...]:
        if is_transformed():
            raise UnsupportedError(NO_TRANSFORMATION)
        q, k, v, out, lse, bias, mask, sink, _, *rest = every
        strategy, whole, kept, (heads, heads_kv) = ctx.call
        lengths, rest = tuple(rest[:3]), rest[3:]
        whole = whole._replace(used=lengths[2]) if lengths[0] is None else whole._replace(lengths=lengths)
        captures = tuple(rest[kept:])
        dout, dlse = with_zeros(ctx, dout, dlse)
        saved = Saved(Inputs(q, k, v, bias, mask, 0, heads, sink), out, lse, heads_kv, rest[:kept])
        wanted = ctx.needs_input_grad[_CAPTURES:]
        gradients, daux = gradients_of(strategy, saved, whole, captures, wanted, dout, dlse)
        *of_inputs, dsink = gradients
        return None, None, *of_inputs, None, dsink, None, *daux


def keep_outputs(ctx: Any, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Leave in ``ctx`` what `with_zeros` makes gradients of; ``lse`` is None where the call does not return it."""
    ctx.like_outputs = [None if x is None else (x.shape, x.dtype, x.device) for x in (out, lse)]
    ctx.set_materialize_grads(False)


def with_zeros(ctx: Any, *gradients: torch.Tensor | None) -> list[Any]:
    """The gradients of out and lse, zeros where the rank's loss uses none: ranks send them all the same."""
    return [
        torch.zeros(like[0], dtype=like[1], device=like[2]) if x is None and like is not None else x
        for x, like in zip(gradients, ctx.like_outputs, strict=True)
    ]


_CAPTURES: Final = 9
"""Where the captured tensors begin among the arguments of `Attention`."""
