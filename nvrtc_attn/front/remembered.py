"""The problems of calls, remembered by what validation looks at."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from ..base.tables import remember
from ..modifiers.modifier import Program
from .build import build_problem
from .operands import INPUTS, OPERANDS
from .part import Part
from .problem import AttentionProblem
from .tensors import TensorView

CallOptions: TypeAlias = Any
"""`call.CallOptions`, a module above."""
TracedProgram: TypeAlias = tuple[Program | None, tuple[int, ...]]
"""What was traced, and which of its arrays get gradients."""
NO_PROGRAM: Final[TracedProgram] = (None, ())

_MAX_PROBLEMS: Final = 4096
_problems: dict[Hashable, AttentionProblem] = {}


def problem_of(
    tensors: Mapping[str, TensorView],
    options: CallOptions,
    program: TracedProgram = NO_PROGRAM,
) -> AttentionProblem:
    """`build_problem` of a call, remembered by what it looks at: validation takes as long as all else of a call."""
    key = _problem_key(tensors, options, program)
    problem = None if key is None else _problems.get(key)
    if problem is None:
        problem = new_problem(tensors, options, program)
        if key is not None:
            remember(_problems, key, problem, _MAX_PROBLEMS)
    return problem


def new_problem(
    tensors: Mapping[str, TensorView],
    options: CallOptions,
    program: TracedProgram = NO_PROGRAM,
) -> AttentionProblem:
    """`build_problem` of a call, made anew."""
    arguments: dict[str, Any] = {**tensors, **options._asdict()}  # tensors and options have the names of its arguments
    return build_problem(**arguments, modifier=program[0], trained=program[1])


_LENGTHS: Final = frozenset(name for name in INPUTS if OPERANDS[name].is_lengths)


def _problem_key(
    tensors: Mapping[str, TensorView],
    options: CallOptions,
    program: TracedProgram = NO_PROGRAM,
) -> Hashable:
    """None where the outcome depends on more: on lengths in host memory, or on options that are not told by a hash.

    Types of options are part of it, because 1 equals True and 1.0 and is accepted for neither.
    """
    window = options.window_size
    kinds = tuple(map(type, options)), tuple(map(type, window)) if isinstance(window, tuple) else ()
    if not hash_tells(*kinds):
        return None
    facts: list[Hashable] = []
    for name, x in tensors.items():
        if name in _LENGTHS and x.device.type == "cpu":
            return None
        facts.append((name, x.shape, x.strides, x.dtype, x.device, x.ptr & 15))
    return (*facts, options, kinds, program)


@functools.lru_cache(maxsize=1024)
def hash_tells(options: tuple[type, ...], bounds: tuple[type, ...]) -> bool:
    """Whether values of these types, and of a window's bounds, can be hashed and are equal only if they mean the same.

    A list cannot, and a tensor is hashed by its identity: a table would grow by an entry a call.
    """
    scalars = (bool, int, float, str, type(None), np.bool_, np.number)
    return all(kind in (tuple, Part) or issubclass(kind, scalars) for kind in options) and all(
        issubclass(kind, scalars) for kind in bounds
    )
