"""Calls that were made before: the plan of one, found again by its signature, without describing a tensor.

What a first call checks follows from its signature, but for one thing: whether an output shares memory with another
operand depends on the addresses. That is asked again of the ranges that the operands span; where two of these meet, the
call takes the long way, which looks at the elements.

Concurrency: the tables' entries are complete when they appear; they are written under a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..front.dlpack import compact_strides
from ..front.operands import OPERANDS
from ..front.signature import Signature
from ..front.tensors import TensorView
from ..front.tensorview import span
from .plan import BackwardPlan, ForwardPlan

Span = tuple[int, int]


class Repeat(NamedTuple):
    """What a call of a known signature needs."""

    plan: ForwardPlan | BackwardPlan
    spans: tuple[Span | None, ...]
    """Bytes that each operand covers, relative to its address, in the order of the plan's operands."""
    outputs: tuple[int, ...]
    """Places of the outputs that were given."""
    made: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]
    """Shape, strides and dtype of the outputs that were not."""


_MAX_ENTRIES: Final = 4096
_repeats: dict[tuple[Any, ...], Repeat] = {}
_lock = threading.Lock()


def find(signature: Signature) -> Repeat | None:
    """The call of this signature; None where it is new, or where an output may share memory with another operand."""
    found = _repeats.get(signature.key)
    if found is not None and found.outputs and not _apart(found, signature.addresses):
        return None
    return found


def remember(
    signature: Signature,
    plan: ForwardPlan | BackwardPlan,
    given: Mapping[str, TensorView],
    made: Mapping[str, tuple[tuple[int, ...], str]],
) -> None:
    """Know a call that has passed every check: the operands ``given`` to it, and shape and dtype of those ``made``."""
    backward = isinstance(plan, BackwardPlan)
    spans: list[Span | None] = []
    outputs = []
    for place, name in enumerate(plan.OPERANDS):
        view = given.get(name)
        if view is None or 0 in view.shape:
            spans.append(None)
            continue
        first, end = span(view)
        spans.append((first - view.ptr, end - view.ptr))
        if OPERANDS[name].role(backward).startswith("out"):
            outputs.append(place)
    shapes = {name: (shape, compact_strides(shape), dtype) for name, (shape, dtype) in made.items()}
    with _lock:
        while len(_repeats) >= _MAX_ENTRIES:
            del _repeats[next(iter(_repeats))]
        _repeats[signature.key] = Repeat(plan, tuple(spans), tuple(outputs), shapes)


def _apart(known: Repeat, addresses: Sequence[int]) -> bool:
    """Whether no output's range meets that of another operand."""
    ranges = [
        (address + x[0], address + x[1], place)
        for place, (address, x) in enumerate(zip(addresses, known.spans, strict=False))
        if x is not None
    ]
    ranges.sort()
    outputs = known.outputs
    # In the order of their beginnings: the farthest end so far of anything, and of outputs.
    end = end_of_outputs = 0
    for first, last, place in ranges:
        if place in outputs:
            if first < end:
                return False
            end_of_outputs = max(end_of_outputs, last)
        elif first < end_of_outputs:
            return False
        end = max(end, last)
    return True
