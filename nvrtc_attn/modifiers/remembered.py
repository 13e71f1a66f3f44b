"""Traces that need not be made again: functions whose text, numbers and arrays' shapes are those of an earlier call.

Tracing takes some ten times as long as looking at what a function can read: its closure, its defaults, the globals that
it names, and the same of the functions among them. Where something else is found (an object, a module of the user's,
whose attributes may change), or the trace computed with an array instead of indexing it, nothing is remembered.

Concurrency: the table changes by single operations that the interpreter lock makes atomic, or by `tables.remember`.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterator
from typing import Any, Final

import numpy as np

from ..base import tables
from .graph import dtype_of
from .modifier import Modifier
from .proxy import is_array, is_host_scalar

_MAX_TRACES: Final = 1024
_MAX_DEPTH: Final = 16
_LIBRARIES: Final = frozenset(("builtins", "cupy", "jax", "math", "numpy", "nvrtc_attn", "operator", "torch"))
"""Whose modules, types and functions are taken to stay what they are."""
_traces: dict[Hashable, tuple[Modifier, tuple[int, ...]]] = {}


class UntoldError(Exception):
    """Something whose value cannot be told by looking at it."""


class Facts:
    """What functions can read: ``key`` without the content of arrays, and the ``arrays``."""

    def __init__(self, *functions: Any) -> None:
        self.arrays: list[Any] = []
        self._open: list[Any] = []
        self.key: Hashable = tuple(self._of(x, 0) for x in functions)

    def _of(self, x: Any, depth: int) -> Hashable:
        if depth > _MAX_DEPTH:
            raise UntoldError
        if x is None or type(x) in (bool, int, str):
            return type(x), x
        if isinstance(x, float | np.generic):
            return type(x), repr(x)  # tells -0.0 from 0.0
        if type(x) in (tuple, list):
            return type(x), tuple(self._of(y, depth + 1) for y in x)
        if type(x) is dict:
            return dict, tuple((self._of(name, depth + 1), self._of(y, depth + 1)) for name, y in x.items())
        if isinstance(x, types.FunctionType):
            return self._of_function(x, depth)
        if isinstance(x, types.ModuleType | type | types.BuiltinFunctionType | np.ufunc):
            home = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None) or "builtins"
            if home.split(".")[0].lstrip("_") in _LIBRARIES:
                return x
            raise UntoldError
        if is_array(x) and not is_host_scalar(x):
            return self._of_array(x)
        raise UntoldError

    def _of_array(self, x: Any) -> Hashable:
        place = next((i for i, y in enumerate(self.arrays) if y is x), None)
        if place is None:
            place = len(self.arrays)
            self.arrays.append(x)
        return "array", place, type(x), dtype_of(x), tuple(x.shape)

    def _of_function(self, x: types.FunctionType, depth: int) -> Hashable:
        if any(x is y for y in self._open):
            return "itself", [y is x for y in self._open].index(True)
        if x.__kwdefaults__:
            raise UntoldError
        self._open.append(x)
        facts: list[Hashable] = [x.__code__]
        for cell in x.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                raise UntoldError from None
            facts.append(self._of(content, depth + 1))
        facts += [self._of(y, depth + 1) for y in x.__defaults__ or ()]
        for name in sorted(set(_names(x.__code__))):
            facts.append((name, self._of(x.__globals__[name], depth + 1)) if name in x.__globals__ else name)
        self._open.pop()
        return tuple(facts)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _names(x)


def facts_of(*functions: Any) -> Facts | None:
    """What the functions can read, None where that cannot be told."""
    try:
        return Facts(*functions)
    except UntoldError:
        return None


def find(facts: Facts) -> Modifier | None:
    """The trace of an earlier call, over the arrays of this one."""
    found = _traces.get(facts.key)
    if found is None:
        return None
    modifier, places = found
    return modifier.with_captures(tuple(facts.arrays[i] for i in places))


def remember(facts: Facts, modifier: Modifier) -> None:
    """Keep a trace, without its arrays, unless it has some that ``facts`` do not know."""
    places = []
    for x in modifier.captures:
        place = next((i for i, y in enumerate(facts.arrays) if y is x), None)
        if place is None:
            return
        places.append(place)
    tables.remember(_traces, facts.key, (modifier.with_captures(()), tuple(places)), _MAX_TRACES)
