"""The two passes with a modifier, on detached torch tensors: what makes their results, and the calls of the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import api
from ..front.call import CallOptions
from ..front.operands import GRADIENTS, INPUTS
from ..front.philox import RngState
from ..modifiers.modifier import Modifier
from .passes import DIFFERENTIABLE_PLACES, keywords


def forward(
    tensors: Sequence[Any], modifier: Modifier | None, options: CallOptions, rng: RngState
) -> tuple[torch.Tensor, ...]:
    """out, lse and max_logit if asked for, by the core; ``tensors`` are `INPUTS`, then the captured ones, detached."""
    inputs, captures = tuple(tensors[: len(INPUTS)]), tuple(tensors[len(INPUTS) :])
    found: tuple[torch.Tensor, ...] = api.attention(
        *inputs[:3], **keywords(inputs, options), rng=rng, return_lse=True, return_max_logit=options.return_max_logit,
        score_mod=modifier and modifier.with_captures(captures),
    )  # fmt: skip
    return found


def gradients(
    tensors: tuple[Any, ...], out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor | None,
    dlse: torch.Tensor | None, options: CallOptions, rng: RngState, modifier: Modifier | None, wanted: Sequence[bool],
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:  # fmt: skip
    """The backward pass with a modifier, of detached tensors or where no graph is made: in programs and beside them.

    Parameters
    ----------
    tensors
        `INPUTS` in their order.
    dout, out : ``[B, L, H, Ev]``
    dlse, lse : float32 ``[B, H, L]``, dlse None where nothing depends on the lse
    modifier
        With its arrays.
    wanted
        Of each array, whether its gradient is asked for.

    Returns
    -------
    gradients
        Of `GRADIENTS`, contiguous, of the types of their inputs; None of those that the options do not ask for.
    sums
        Of each array its gradient in float32; None of one that has none, or whose gradient nobody asks for.
    """
    arrays = () if modifier is None else modifier.captures
    trained = [i for i in (() if modifier is None else modifier.differentiable) if wanted[i]]
    sums = [
        torch.empty(x.shape, dtype=torch.float32, device=out.device) if i in trained else None
        for i, x in enumerate(arrays)
    ]
    found = [
        dense_like(tensors[place]) if tensors[place] is not None and getattr(options, name, True) else None
        for name, place in zip(GRADIENTS, DIFFERENTIABLE_PLACES, strict=True)
    ]
    dout = torch.zeros_like(out) if dout is None else dout
    if dout.stride(-1) != 1 or 0 in dout.stride():
        dout = dout.contiguous()
    operands: Mapping[str, Any] = {
        **dict(zip(INPUTS, tensors, strict=True)), **dict(zip(GRADIENTS, found, strict=True)), "out": out, "lse": lse,
        "dout": dout.resolve_neg(), "dlse": None if dlse is None else dlse.contiguous(),
    }  # fmt: skip
    options = options._replace(return_lse=True)
    api.backward_allocating(operands, options, rng, modifier, sums if trained else None)
    return found, sums


def dense_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
