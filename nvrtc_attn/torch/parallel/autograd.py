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
    """out and lse of a rank's rows: ``apply(strategy, whole, q, k, v, bias, mask, sink, *captures)``."""

    @staticmethod
    def forward(ctx: Any, strategy: Strategy, whole: Whole, *tensors: Any) -> Any:
        q, k, v, bias, mask, sink, *captures = tensors
        inputs = Inputs(q, k, v, bias, mask, 0, q.shape[2], sink)
        out, lse, saved = strategy.forward(inputs, whole_with(whole, captures))
        own = (q, k, v, out, lse) if strategy.needs_own else (None,) * 5
        lengths = whole.lengths or (None, None, whole.used)
        ctx.save_for_backward(*own, bias, mask, sink, *lengths, *saved.kept, *captures)
        plain = whole_with(whole, None)._replace(lengths=None, used=None)
        # Ranks send it if the call returned it, whether or not the rank's loss uses it.
        ctx.like_lse = None if lse is None or not whole.return_lse else (lse.shape, lse.dtype, lse.device)
        ctx.call = strategy, plain, len(saved.kept), (q.shape[2], k.shape[2])
        ctx.like_out = out.shape, out.dtype, out.device
        ctx.set_materialize_grads(False)
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
        q, k, v, out, lse, bias, mask, sink, *rest = every
        strategy, whole, kept, (heads, heads_kv) = ctx.call
        lengths, rest = tuple(rest[:3]), rest[3:]
        whole = whole._replace(used=lengths[2]) if lengths[0] is None else whole._replace(lengths=lengths)
        captures = tuple(rest[kept:])
        if dout is None:
            shape, dtype, device = ctx.like_out
            dout = torch.zeros(shape, dtype=dtype, device=device)
        if dlse is None and ctx.like_lse is not None:
            shape, dtype, device = ctx.like_lse
            dlse = torch.zeros(shape, dtype=dtype, device=device)
        saved = Saved(Inputs(q, k, v, bias, mask, 0, heads, sink), out, lse, heads_kv, rest[:kept])
        wanted = ctx.needs_input_grad[_CAPTURES:]
        gradients, daux = gradients_of(strategy, saved, whole, captures, wanted, dout, dlse)
        *of_inputs, dsink = gradients
        return None, None, *of_inputs, None, dsink, *daux


_CAPTURES: Final = 8
"""Where the captured tensors begin among the arguments of `Attention`."""
