"""Torch's own guards: whether tensors are like others is one question in C++ (0.3 us for three), not thirty in Python.

No framework is imported: whoever has tensors of torch has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable
from typing import Any, Final

from ..base.tables import remember

RECENT: Final = 8
"""How many kinds of calls are known at once where they differ in their tensors alone."""
_EVERY: Final = 16
_refused: dict[Hashable, int] = {}
"""How many calls of a kind were not made known for want of room."""


def guard(*tensors: Any) -> Callable[..., bool] | None:
    """A function that says whether torch tensors are plain ones like these, in a thread in the same state.

    That of torch.compile's programs: exact type, dispatch keys (those that the thread adds or hides included), element
    type, device, ``requires_grad``, shape and strides. Neither addresses, nor in every torch whether the thread records
    gradients. None where torch has no guards that tell these apart, and for tensors that are one object, which they
    never take.
    """
    if len({id(x) for x in tensors}) < len(tensors) or not tell_apart(guards_of_torch()):
        return None
    check: Callable[..., bool] = guards_of_torch()(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def has_room(kind: Hashable, recent: tuple[Any, ...]) -> bool:
    """Whether one more call of ``kind`` may be known beside ``recent``, its others.

    Lengths that change at every step must not make a guard at every step. Each kind counts its own: of one count, kinds
    that take turns would reach the round number at the same one for ever.
    """
    if len(recent) < RECENT:
        return True
    return remember(_refused, kind, _refused.get(kind, 0) + 1) % _EVERY == 0


def guards_of_torch() -> Any:
    """The class, which is none of torch's public ones; None in a torch without it."""
    dynamo = getattr(sys.modules["torch"]._C, "_dynamo", None)
    return getattr(getattr(dynamo, "guards", None), "TensorGuards", None)


@functools.cache
def tell_apart(guards: Any) -> bool:
    """Whether guards of this class see all that `guard` says."""
    torch = sys.modules["torch"]
    if guards is None:
        return False

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            x, y = (torch.zeros(2, 4, 4, 8, dtype=torch.float16, device="cpu") for _ in range(2))
            others = (
                x.float(), x[:1], x.transpose(1, 2), x[:, :, :1].expand(x.shape), x.bfloat16(), x.flatten(2),
                x.to("meta"), x.detach().requires_grad_(), torch._neg_view(x), torch.nn.Parameter(x), None,
            )  # fmt: skip
            fits = guards(y, x, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            told = fits(y, x) and fits(y, torch.empty_like(x)) and not any(fits(y, other) for other in others)
            with torch.autocast("cpu", torch.bfloat16):
                told = told and not fits(y, x)
            with torch.no_grad():
                told = told and fits(y, x)
            with Watching():
                told = told and not fits(y, x)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool(told)
