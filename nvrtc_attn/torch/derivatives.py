"""Derivatives: an operator's by another one, what nodes of autograd share, and the refusal of those that there are not.

The nodes of eager calls are classes of their modules (`eager`, `packed`, `modified`, `modified_known`): there one more
call of Python's is seen in the time of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ..base.errors import UnsupportedError
from ..front.operands import OPTIONAL_GRADIENTS

_grad_enabled: Final = torch.is_grad_enabled
_forward_ad: Any = torch.autograd.forward_ad
_functorch_level: Final = torch._C._functorch.maybe_current_level


def register_derivative(
    library: torch.library.Library, forward: Any, backward: Any, *, tensors: int, flags: tuple[bool, ...],
    differentiable: Sequence[int], behind: int = 0,
) -> tuple[Callable[..., None], Callable[..., tuple[Any, ...]]]:  # fmt: skip
    """Make one operator the derivative of another, and refuse the derivative of that.

    Parameters
    ----------
    forward
        Takes tensors, scalars and ``flags``, and behind them, where it takes functions of scores, a list of the tensors
        that they captured, and what they are. Returns out, lse, and what has no gradient.
    backward
        Takes dout, dlse, out and lse; the same tensors and scalars; of each of `OPTIONAL_GRADIENTS` whether it is asked
        for; what is behind, and of each captured tensor whether its gradient is asked for. Returns the gradients of
        ``differentiable``, then those of the captured tensors, of any values where nobody asks.
    tensors
        How many arguments come before the scalars: tensors, or None.
    flags
        Those with which ``forward`` returns lse.
    differentiable
        Places of the arguments that may have a gradient, those of `OPTIONAL_GRADIENTS` last.
    behind
        How many arguments there are behind the flags.

    Returns
    -------
    ``setup_context`` and ``backward`` of an autograd function that is the forward operator.
    """
    optional = len(OPTIONAL_GRADIENTS)
    end = len(forward._schema.arguments) - behind
    scalars_end = end - len(flags)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        captures = inputs[end] if behind else ()
        ctx.save_for_backward(*output[:2], *inputs[:tensors], *captures)
        ctx.others = inputs[tensors:scalars_end], inputs[end + 1 :]
        ctx.set_materialize_grads(False)

    def derivative(ctx: Any, dout: Any, dlse: Any, *_: Any) -> tuple[Any, ...]:
        """The gradient of every argument of the forward operator."""
        out, lse, *saved = ctx.saved_tensors
        scalars, functions = ctx.others
        arguments, captures = (*saved[:tensors], *scalars), saved[tensors:]
        more: tuple[Any, ...] = (captures, *functions) if behind else ()
        found: list[Any] = [None] * end
        if behind:  # torch takes an empty list for one of tensors
            found += [[None] * len(captures), *[x if x == [] else None for x in functions]]
        if dout is None and dlse is None:
            return tuple(found)
        if lse.numel() == 0 and out.numel() != 0:  # traced where no gradient was wanted
            out, lse, *_ = forward(*arguments, *flags, *more)
        dout = torch.zeros_like(out) if dout is None else dout
        needed = [bool(ctx.needs_input_grad[place]) for place in differentiable]
        if behind:
            asked = zip(captures, ctx.needs_input_grad[end], strict=True)
            more = (*more, [bool(wants) and x.is_floating_point() for x, wants in asked])
        gradients = backward(dout, dlse, out, lse, *arguments, *needed[-optional:], *more)
        for place, gradient, is_needed in zip(differentiable, gradients, needed, strict=not behind):
            found[place] = gradient if is_needed else None
        if behind:
            for i, (gradient, wants) in enumerate(zip(gradients[len(differentiable) :], more[-1], strict=True)):
                found[end][i] = gradient if wants else None
        return tuple(found)

    torch.library.register_autograd(forward, derivative, setup_context=setup_context, lib=library)
    torch.library.register_autograd(backward, no_second_derivative, setup_context=setup_nothing, lib=library)
    return setup_context, derivative


def setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The gradient has no derivative, so nothing is kept for it."""


def no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        "trying to differentiate twice a function that was marked with once_differentiable: nvrtc_attn has no second "
        "derivatives. Compute this part with torch.nn.functional.scaled_dot_product_attention and its math backend."
    )


def no_forward_derivative(*_: Any) -> Any:
    raise UnsupportedError(
        "q, k, v, bias: forward-mode derivatives (torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad) are not "
        "computed. Use torch.func.vjp or jacrev, or torch.nn.functional.scaled_dot_product_attention and its math "
        "backend."
    )


def refuse_transformed(*_: Any) -> Any:
    """Refuse what the nodes and operators of calls with functions do not do."""
    raise UnsupportedError(
        "flex_attention, or attention with score_mod or mask_mod: transformations of torch.func (grad, vjp, vmap, jvp, "
        "jacrev, hessian), batches of gradients (is_grads_batched, vectorize) and forward-mode derivatives are not "
        "computed. Use backward() or torch.autograd.grad for one gradient at a time, put the dim that vmap maps into "
        "the batch, or call nvrtc_attn.torch.attention without functions of scores, where all of these but "
        "forward-mode derivatives work."
    )


def refuse_tangents(*tensors: Any) -> None:
    """Refuse dual tensors of `torch.autograd.forward_ad`: nothing here would carry their tangents on."""
    if _forward_ad._current_level < 0 or _functorch_level() is not None:  # the operators refuse it below those
        return
    if any(isinstance(x, torch.Tensor) and _forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        no_forward_derivative()


# ------------------------------------------------------------------------------------------------ nodes of autograd


def apply_of(function: Any) -> Any:
    """``apply`` of an autograd function, past two Python layers.

    That of `Function.apply` serves transformations, which get the operators: 2.5 us. That of a node asks whether it has
    a ``backward`` or a ``vjp``, in autograd's thread: 0.8 us, and more there.
    """
    node = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = function.backward
    return super(torch.autograd.Function, function).apply


class _OnceOnly(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The first ``count`` tensors as they are, with a node that depends on all of them and has no derivative."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> Any:
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return no_second_derivative(ctx, *gradients)


def once_only(compute: Callable[[], tuple[Any, ...]], made_of: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients that ``compute`` makes of tensors. Where a graph of that pass is asked for, a use of it is refused.

    `torch.autograd.function.once_differentiable` ties gradients to those that came in alone, and to no input: a penalty
    on the gradients (`create_graph=True`) silently had none.
    """
    with torch.no_grad():
        gradients = compute()
    if not _grad_enabled():
        return gradients
    return tuple(_OnceOnly.apply(len(gradients), *gradients, *made_of))
