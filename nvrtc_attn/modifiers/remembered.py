"""Traces that need not be made again: functions whose text, numbers and arrays' shapes are those of an earlier call.

Tracing takes some ten times as long as looking at what a function can read: its closure, its defaults, the globals that
it names, and the same of the functions among them. Where something else is found (an object, a module of the user's,
whose attributes may change), or the trace computed with an array instead of indexing it, nothing is remembered.

A call that looks like a recent one is told by `again`, which asks for each thing that was found before whether it is
there, and puts nothing together: a fifth of the time.

Concurrency: the tables change by single operations that the interpreter lock makes atomic, or by `tables.remember`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterator
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
_Check = Callable[[Any, list[Any]], bool]
"""Whether something is what it was, where arrays may be others alike: these are added to the list."""
_Seen = tuple[_Check | None, _Check | None, _Check | None, Modifier, tuple[int, ...]]
"""Of score_mod, mask_mod and aux, None where there was none; the trace, and which of the arrays it reads."""
_RECENT: Final = 8
_EVERY: Final = 16
_MISSING: Final = object()
# Of the codes of both functions, what was seen last.
_recent: dict[Hashable, tuple[_Seen, ...]] = {}
_refused = 0


class UntoldError(Exception):
    """Something whose value cannot be told by looking at it."""


class Facts:
    """What two functions can read, and ``aux``: ``key`` without the content of arrays, and the ``arrays``."""

    def __init__(self, *given: Any) -> None:
        self.arrays: list[Any] = []
        self.given = given
        self._open: list[Any] = []
        self.key: Hashable = tuple(self._of(x, 0) for x in given)

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


def facts_of(score_mod: Any, mask_mod: Any, aux: Any = None) -> Facts | None:
    """What the functions can read, None where that cannot be told."""
    try:
        return Facts(score_mod, mask_mod, aux)
    except UntoldError:
        return None


def find(facts: Facts) -> Modifier | None:
    """The trace of an earlier call, over the arrays of this one."""
    found = _traces.get(facts.key)
    if found is None:
        return None
    modifier, places = found
    _watch(facts, modifier, places)
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


# ------------------------------------------------------------------------------------------------- what was seen last


def again(score_mod: Any, mask_mod: Any, aux: Any = None) -> Modifier | None:
    """`find` of functions that read what those of a recent call did, None of others."""
    found = look(score_mod, mask_mod, aux)
    return None if found is None else found[0].with_captures(found[1])


def look(score_mod: Any, mask_mod: Any, aux: Any = None) -> tuple[Modifier, tuple[Any, ...]] | None:
    """`again`, of whose result the arrays are beside the modifier: putting these together takes as long as finding."""
    function = types.FunctionType
    codes = (
        score_mod.__code__ if score_mod.__class__ is function else None,
        mask_mod.__code__ if mask_mod.__class__ is function else None,
    )
    for score, mask, more, modifier, places in _recent.get(codes, ()):
        arrays: list[Any] = []
        if (
            (score_mod is None if score is None else score(score_mod, arrays))
            and (mask_mod is None if mask is None else mask(mask_mod, arrays))
            and (aux is None if more is None else more(aux, arrays))
        ):
            return modifier, tuple([arrays[place] for place in places])
    return None


def _watch(facts: Facts, modifier: Modifier, places: tuple[int, ...]) -> None:
    """Let `again` find a trace: at its second call. A number that is another one at every step leaves others alone."""
    global _refused
    key = tuple([x.__code__ if type(x) is types.FunctionType else None for x in facts.given[:2]])
    recent = _recent.get(key, ())
    if len(recent) >= _RECENT:
        _refused += 1
        if _refused % _EVERY:
            return
    arrays: list[Any] = []
    try:
        score, mask, aux = (None if x is None else _check_of(x, arrays, ()) for x in facts.given)
    except UntoldError:
        return
    tables.remember(_recent, key, ((score, mask, aux, modifier, places), *recent[: _RECENT - 1]), _MAX_TRACES)


def _check_of(x: Any, arrays: list[Any], open_functions: tuple[Any, ...]) -> _Check:
    """Of what `Facts` can tell, but scalars of NumPy's, and functions that call themselves."""
    cls = type(x)
    if x is None or cls in (bool, int, float, str):
        # Zeros have signs, and a NaN is not equal to itself: those are looked at by `Facts`.
        return lambda y, _: y is x or (y.__class__ is cls and y == x and bool(y))
    if cls in (tuple, list):
        return _check_of_elements(x, arrays, open_functions)
    if cls is dict:
        names, elements = list(x), _check_of_elements(list(x.values()), arrays, open_functions)
        if not all(type(name) is str for name in names):
            raise UntoldError
        return lambda y, seen: y.__class__ is dict and list(y) == names and elements(list(y.values()), seen)
    if isinstance(x, types.FunctionType):
        return _check_of_function(x, arrays, open_functions)
    if isinstance(x, types.ModuleType | type | types.BuiltinFunctionType | np.ufunc):
        return lambda y, _: y is x
    if is_array(x):
        return _check_of_array(x, arrays)
    raise UntoldError


def _check_of_array(x: Any, arrays: list[Any]) -> _Check:
    cls, shape, dtype = type(x), x.shape, x.dtype
    place = next((i for i, y in enumerate(arrays) if y is x), None)
    if place is not None:
        return lambda y, seen: y is seen[place]
    arrays.append(x)

    def is_like(y: Any, seen: list[Any]) -> bool:
        if y.__class__ is not cls or y.shape != shape or y.dtype != dtype or (not shape and is_host_scalar(y)):
            return False
        for other in seen:
            if y is other:
                return False
        seen.append(y)
        return True

    return is_like


def _check_of_elements(x: Any, arrays: list[Any], open_functions: tuple[Any, ...]) -> _Check:
    cls, checks = type(x), [_check_of(y, arrays, open_functions) for y in x]

    def are_like(y: Any, seen: list[Any]) -> bool:
        return (
            y.__class__ is cls
            and len(y) == len(checks)
            and all(check(element, seen) for check, element in zip(checks, y, strict=True))
        )

    return are_like


def _check_of_function(x: types.FunctionType, arrays: list[Any], open_functions: tuple[Any, ...]) -> _Check:
    """Of a function without arguments that are given by name alone, in the order of `Facts`, which numbers arrays."""
    if any(x is y for y in open_functions):
        raise UntoldError
    open_functions = (*open_functions, x)
    code = x.__code__
    cells = [_check_of(cell.cell_contents, arrays, open_functions) for cell in x.__closure__ or ()]
    defaults = None if x.__defaults__ is None else _check_of(x.__defaults__, arrays, open_functions)
    names = [(name, x.__globals__.get(name, _MISSING)) for name in sorted(set(_names(code)))]
    others = [(name, _is_missing if y is _MISSING else _check_of(y, arrays, open_functions)) for name, y in names]

    def is_like(y: Any, seen: list[Any]) -> bool:
        if y.__class__ is not types.FunctionType or y.__code__ is not code or y.__kwdefaults__:
            return False
        if cells:
            try:
                for check, cell in zip(cells, y.__closure__ or (), strict=True):
                    if not check(cell.cell_contents, seen):
                        return False
            except ValueError:  # a cell that is not filled
                return False
        if not (y.__defaults__ is None if defaults is None else defaults(y.__defaults__, seen)):
            return False
        known = y.__globals__
        for name, check in others:  # noqa: SIM110 - a generator takes as long as all the rest
            if not check(known.get(name, _MISSING), seen):
                return False
        return True

    return is_like


def _is_missing(y: Any, _: list[Any]) -> bool:
    return y is _MISSING
