"""The operators under transformations of torch.func: their batching rules, and nodes that any number of levels see."""

from __future__ import annotations

from typing import Any, Final

import torch

from ..front.operands import INPUTS, OPERANDS, OPTIONAL_GRADIENTS
from .arguments import BATCHLESS, BIAS, DROPOUT, OPTIONS
from .derivatives import no_forward_derivative, no_second_derivative, refuse_tangents, setup_nothing
from .ops import attention_backward, attention_forward, derivative, setup_context

_LIBRARY: Final = torch.library.Library("nvrtc_attn", "FRAGMENT")

# ------------------------------------------------------------------------------------------------------------- vmap


def _forward_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    return _vmap(attention_forward, 0, info.batch_size, in_dims, arguments, (False,) * OPTIONS)


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    return _vmap(attention_backward, 4, info.batch_size, in_dims, arguments, arguments[-OPTIONS:])


def _vmap(
    op: Any, first: int, size: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...], wanted: tuple[bool, ...]
) -> tuple[Any, Any]:
    """Fold the mapped axis into the batch where that computes the same, otherwise loop.

    ``first`` arguments come before those of `SIGNATURE`. ``wanted`` are the optional gradients: one without a batch
    (of a sink) is of each element of the mapped axis by itself.
    """
    refuse_tangents(*arguments)
    dbias = wanted[OPTIONAL_GRADIENTS.index("dbias")]
    moved = [x.movedim(d, 0) if d is not None else x for x, d in zip(arguments, in_dims, strict=True)]
    mapped = [d is not None for d in in_dims]
    q, bias = first, first + BIAS
    batch = moved[q].shape[mapped[q]]
    shared_bias = dbias and moved[bias].shape[mapped[bias]] != batch
    summed = {OPERANDS[name].gradient_of for name, wants in zip(OPTIONAL_GRADIENTS, wanted, strict=True) if wants}
    one_by_one = shared_bias or any(
        moved[first + place] is not None
        and (OPERANDS[INPUTS[place]].is_lengths or mapped[first + place] or INPUTS[place] in summed)
        for place in BATCHLESS
    )
    if one_by_one or moved[first + DROPOUT] > 0:
        results = [
            op(*(x[i] if is_mapped else x for x, is_mapped in zip(moved, mapped, strict=True))) for i in range(size)
        ]
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])
    folded = []
    for index, (x, is_mapped) in enumerate(zip(moved, mapped, strict=True)):
        if not isinstance(x, torch.Tensor) or index - first in BATCHLESS:
            folded.append(x)
            continue
        shape = x.shape[is_mapped:]
        if not is_mapped and index in (bias, bias + 1) and shape[0] == 1 and not dbias:
            folded.append(x)  # broadcast over the longer batch as well
            continue
        wide = (x if is_mapped else x[None]).expand(size, batch, *shape[1:])
        folded.append(wide.reshape(size * batch, *shape[1:]))
    outputs = op(*folded)
    # What is absent is an empty vector without a batch.
    return (
        tuple(x.unflatten(0, (size, batch)) if x.dim() > 1 else x.expand(size, *x.shape) for x in outputs),
        (0,) * len(outputs),
    )


# ------------------------------------------------------------------------------------------------------------ nodes


class _Transformed(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The forward operator under transformations of torch.func, any number of them within one another.

    torch refuses the derivative that `torch.library` generates under them.
    """

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return attention_forward(*arguments)

    setup_context = staticmethod(setup_context)
    backward = staticmethod(derivative)
    jvp = staticmethod(no_forward_derivative)
    vmap = staticmethod(_forward_vmap)


class _Gradient(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The backward operator under transformations of torch.func."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return attention_backward(*arguments)

    setup_context = staticmethod(setup_nothing)
    backward = staticmethod(no_second_derivative)
    jvp = staticmethod(no_forward_derivative)
    vmap = staticmethod(_backward_vmap)


def _transformed_forward(*arguments: Any) -> Any:
    """The operator above all transformations. Their tensors hide whether a level further out needs the lse."""
    *arguments_, return_lse, return_max_logit = arguments
    out, lse, max_logit = _Transformed.apply(*arguments_, True, return_max_logit)
    return out, lse if return_lse else lse.new_empty(0), max_logit


def _transformed_backward(*arguments: Any) -> Any:
    return _Gradient.apply(*arguments)


# The key that comes before any other while a transformation is on: also for an operator in a program of torch.compile.
_LIBRARY.impl("attention_forward", _transformed_forward, "FuncTorchDynamicLayerFrontMode")
_LIBRARY.impl("attention_backward", _transformed_backward, "FuncTorchDynamicLayerFrontMode")
