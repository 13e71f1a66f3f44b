"""Attention of q, k and v in one tensor as operators of torch, for programs of torch.compile.

They take the arguments of those of `ops`, with one tensor in the place of k and v or of all three, and run what those
run.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..base.tables import remember
from ..front.operands import OPTIONAL_GRADIENTS, OPTIONAL_INPUTS
from .arguments import DROPOUT, SEED_WORD, SIGNATURE
from .derivatives import register_derivative
from .known import BackwardCalls
from .ops import (
    SHORT_WAYS,
    Operators,
    are_alone,
    attention_backward,
    attention_forward,
    backward_fake,
    forward_fake,
    forward_short_way,
    run_backward,
    run_forward,
)

_LIBRARY: Final = Operators("nvrtc_attn", "FRAGMENT")
_BEHIND: Final = SIGNATURE.split(", ", 3)[3]
_LIBRARY.define(
    f"attention_packed_forward(Tensor? q, Tensor packed, {_BEHIND}, bool return_lse) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "attention_packed_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor? q, Tensor packed, "
    f"{_BEHIND}, {', '.join(f'bool {name}' for name in OPTIONAL_GRADIENTS)}) -> "
    f"({', '.join(f'Tensor {name}' for name in ('dq', 'dpacked', *OPTIONAL_GRADIENTS))})",
    tags=(torch.Tag.pt2_compliant_tag,),
)
attention_packed_forward: Any = torch.ops.nvrtc_attn.attention_packed_forward.default
attention_packed_backward: Any = torch.ops.nvrtc_attn.attention_packed_backward.default


def views(q: Any, packed: torch.Tensor) -> tuple[Any, Any, Any]:
    """q, k and v; q is None where it lies beside them."""
    parts = packed.unbind(-3)
    return parts if q is None else (q, *parts)


def packed_together(with_q: bool, dq: Any, dk: Any, dv: Any) -> tuple[Any, ...]:
    """Gradients of the inputs of a node, from those of its parts."""
    return (torch.stack((dq, dk, dv), -3),) if with_q else (dq, torch.stack((dk, dv), -3))


def _run_forward(q: Any, packed: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, _ = run_forward(*views(q, packed), *rest, False)
    return out, lse


def _short_forward(arguments: tuple[Any, ...]) -> Any:
    q, packed, *rest = arguments
    found = forward_short_way((*views(q, packed), *rest, False))
    return found and found[:2]


# Everything of a call of the backward operator but its first six tensors -> the passes that were made.
_backward_calls: dict[Any, BackwardCalls] = {}


def _run_backward(
    dout: Any, dlse: Any, out: Any, lse: Any, q: Any, packed: Any, *rest: Any, known: BackwardCalls | None = None
) -> tuple[torch.Tensor, ...]:
    made = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    dq, _, _, *optional = run_backward(dout, dlse, out, lse, *views(q, packed), *rest, known=known, packed=made)
    return dout.new_empty(0) if q is None else dq, made, *optional


def _short_backward(arguments: tuple[Any, ...]) -> Any:
    dout, dlse, out, lse, q, packed, *rest = arguments
    if dlse is not None:
        return None
    key = (q is None, *rest)
    try:
        calls = _backward_calls.get(key)
    except TypeError:  # symbols
        return None
    parts = views(q, packed)
    if calls is not None:
        for known in calls.backward:
            if known.fits(*parts, out, lse, dout) and (found := known.run(*parts, out, lse, dout)) is not None:
                nothing = [dout.new_empty(0) for _ in range(5 - len(found))]
                return (nothing[0], *found[1:], *nothing[1:]) if q is None else (*found[1:], *nothing)
    if not (are_alone((*parts, out, lse, dout), rest) and rest[DROPOUT - 3] == 0):
        return None
    if calls is None:
        calls = remember(_backward_calls, key, BackwardCalls())
    return _run_backward(*arguments, known=calls)


SHORT_WAYS.update(attention_packed_forward=_short_forward, attention_packed_backward=_short_backward)


def _unpacked_forward(q: Any, packed: Any, *rest: Any) -> Any:
    """By the operators of three tensors, which transformations know."""
    out, lse, _ = attention_forward(*views(q, packed), *rest, False)
    return out, lse


def _unpacked_backward(dout: Any, dlse: Any, out: Any, lse: Any, q: Any, packed: Any, *rest: Any) -> Any:
    dq, dk, dv, *optional = attention_backward(dout, dlse, out, lse, *views(q, packed), *rest)
    found = packed_together(q is None, dq, dk, dv)
    return (*((dout.new_empty(0),) if q is None else ()), *found, *optional)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention_packed_forward", _run_forward, _key)
    _LIBRARY.impl("attention_packed_backward", _run_backward, _key)
_LIBRARY.impl("attention_packed_forward", _unpacked_forward, "FuncTorchDynamicLayerFrontMode")
_LIBRARY.impl("attention_packed_backward", _unpacked_backward, "FuncTorchDynamicLayerFrontMode")


def _forward_fake(q: Any, packed: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, _ = forward_fake(*views(q, packed), *rest, False)
    return out, lse


def _backward_fake(dout: Any, dlse: Any, out: Any, lse: Any, q: Any, packed: Any, *rest: Any) -> Any:
    dq, _, _, *optional = backward_fake(dout, dlse, out, lse, *views(q, packed), *rest)
    return (
        dout.new_empty(0) if q is None else dq,
        torch.empty_like(packed, memory_format=torch.contiguous_format),
        *optional,
    )


torch.library.register_fake("nvrtc_attn::attention_packed_forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("nvrtc_attn::attention_packed_backward", _backward_fake, lib=_LIBRARY)
register_derivative(
    _LIBRARY, attention_packed_forward, attention_packed_backward, tensors=SEED_WORD - 1, flags=(True,),
    differentiable=(0, 1, *(2 + OPTIONAL_INPUTS.index(name) for name in ("bias", "sink"))),
)  # fmt: skip
