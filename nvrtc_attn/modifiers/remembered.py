"""Traces that need not be made again: functions whose text, numbers and arrays' shapes are those of an earlier call.

Tracing takes some ten times as long as looking at what a function can read: its closure, its defaults, its attributes,
the globals that it names, and the same of the functions among them. Where something else is found (an object, a module
of the user's, whose attributes may change, or an import of one), where a name asks a library for its state (whether
gradients are recorded, a default type), or the trace computed with an array instead of indexing it, nothing is
remembered.

A call that looks like a recent one is told by `again`, which asks for each thing that was found before whether it is
there, and puts nothing together: a fifth of the time.

Concurrency: the tables change by single operations that the interpreter lock makes atomic, or by `tables.remember`.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

import numpy as np

from ..base import tables
from .cuda_function import CudaFunction
from .graph import dtype_of
from .modifier import Modifier
from .recording import is_array, is_host_scalar

_MAX_TRACES: Final = 1024
_MAX_DEPTH: Final = 16
_LIBRARIES: Final = frozenset(("builtins", "cupy", "jax", "math", "numpy", "nvrtc_attn", "operator", "torch"))
"""Whose modules, types and functions are taken to stay what they are."""
_UNTOLD: Final = re.compile(
    r"__dict__|__globals__|__import__|attrgetter|eval|exec|getattr|globals|locals|methodcaller|random|vars|"
    # What libraries say of their state: modes, default types, settings, devices, ranks. Of a tensor nothing is state.
    r"\w+_enabled|\w*_autocast_\w+|\w*deterministic\w*|\w*inference_mode\w*|\w*tf32\w*|\w*_precision|"
    r"(get_)?default_\w+|current_\w+|get_num_\w+|get_rank|get_world_size|get_rng_state|initial_seed|"
    r"is_(\w+_)?(available|capturing|compiling|exporting|initialized|onnx_export|scripting|tracing)|"
    r"\w*device_count|(local_)?devices|process_\w+|backends|config|geterr"
)
"""Names of what reads more than a function's own names say, or is another number each time."""
_traces: dict[Hashable, tuple[Modifier, tuple[int, ...]]] = {}
_Check = Callable[[Any, list[Any]], bool]
"""Whether something is what it was, where arrays may be others alike: these are added to the list."""
_Seen = tuple[_Check | None, _Check | None, _Check | None, Modifier, tuple[int, ...] | None]
"""Of score_mod, mask_mod and aux, None where there was none; the trace, and which of the arrays it reads, None: all."""
_RECENT: Final = 8
_EVERY: Final = 16
_MISSING: Final = object()
_FUNCTION: Final = types.FunctionType
# Of the codes of both functions, what was seen last.
_recent: dict[Hashable, tuple[_Seen, ...]] = {}
_refused = 0


class UntoldError(Exception):
    """Something whose value cannot be told by looking at it."""


class Facts:
    """What two functions can read, and ``aux``: ``key`` without the content of arrays, and the ``arrays``."""

    def __init__(self, score_mod: Any, mask_mod: Any, aux: Any) -> None:
        self.arrays: list[Any] = []
        self.given = score_mod, mask_mod, aux
        self._open: list[Any] = []
        self._calls_itself = False
        functions = self._of(score_mod, 0), self._of(mask_mod, 0)
        if type(aux) is dict:  # whose own arrays are operands, but none in a container of it
            more: Hashable = tuple((self._of(name, 1), self._of(x, 1, is_array(x))) for name, x in aux.items())
        else:
            more = self._of(aux, 0, operands=False)
        self.key: Hashable = (*functions, more)
        # A function that calls itself is traced with operands at its first call alone.
        if self._calls_itself and any(map(is_plain_array, self.arrays)):
            raise UntoldError

    def _of(self, x: Any, depth: int, operands: bool = True) -> Hashable:
        """``operands``: whether a trace has an operand in the place of a plain array here, so that its content is free.

        torch's tensors are operands everywhere.
        """
        if depth > _MAX_DEPTH:
            raise UntoldError
        if x is None or type(x) in (bool, int, str):
            return type(x), x
        if type(x) is float or isinstance(x, np.generic):
            return type(x), repr(x)  # tells -0.0 from 0.0
        if type(x) in (tuple, list):
            return type(x), tuple(self._of(y, depth + 1, operands) for y in x)
        if type(x) is dict:
            return dict, tuple((self._of(name, depth + 1), self._of(y, depth + 1, operands)) for name, y in x.items())
        if type(x) is CudaFunction:
            return x
        if isinstance(x, types.FunctionType):
            if not _is_function_of_library(x):
                return self._of_function(x, depth, operands)
            if _is_untold(x.__name__):
                raise UntoldError
            return x
        if isinstance(x, types.ModuleType | type | types.BuiltinFunctionType | np.ufunc):
            home = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None) or "builtins"
            # A method belongs to an object, which may change.
            stays = not isinstance(x, types.BuiltinFunctionType) or isinstance(
                x.__self__, types.ModuleType | type | types.NoneType
            )
            if stays and _is_of_library(home) and not any(map(_is_untold, x.__name__.split("."))):
                return x
            raise UntoldError
        # A class of the user's that torch's functions take may have any attributes.
        told = operands if is_plain_array(x) else type(x).__module__.split(".")[0] == "torch"
        if told and is_array(x) and not is_host_scalar(x):
            return self._of_array(x, depth)
        raise UntoldError

    def _of_array(self, x: Any, depth: int) -> Hashable:
        place = next((i for i, y in enumerate(self.arrays) if y is x), None)
        if place is not None:
            return "array", place
        self.arrays.append(x)
        facts = "array", type(x), dtype_of(x), tuple(x.shape)
        if is_plain_array(x):  # of which a trace reads no more
            return facts
        return (*facts, x.requires_grad, x.device, self._of(x.__dict__, depth + 1, operands=False))

    def _of_function(self, x: types.FunctionType, depth: int, operands: bool) -> Hashable:
        if any(x is y for y in self._open):
            self._calls_itself = True
            return "itself", [y is x for y in self._open].index(True)
        names = _names_of(x.__code__)
        if x.__kwdefaults__ or names is None:
            raise UntoldError
        self._open.append(x)
        facts: list[Hashable] = [x.__code__, self._of(x.__dict__, depth + 1, operands=False)]
        for cell in x.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                raise UntoldError from None
            facts.append(self._of(content, depth + 1, operands))
        facts += [self._of(y, depth + 1, operands) for y in x.__defaults__ or ()]
        known = x.__globals__
        for name in names:
            if name in known:
                y = known[name]
                # As `trace` does: of globals, arrays become operands, and those of functions of the same file.
                traced = operands and (is_plain_array(y) or getattr(y, "__globals__", None) is known)
                facts.append((name, self._of(y, depth + 1, traced)))
            else:
                facts.append(name)
        self._open.pop()
        return tuple(facts)


def is_plain_array(x: object) -> bool:
    """Whether ``x`` is an array that torch's functions do not take: a trace has a `Captured` in its place."""
    return not isinstance(x, type) and is_array(x) and not hasattr(x, "__torch_function__")


def _is_of_library(name: str) -> bool:
    return name.split(".")[0].lstrip("_") in _LIBRARIES


def _is_function_of_library(x: types.FunctionType) -> bool:
    """Whether ``x`` stays what it is: what a decorator of a library makes of the user's function has a closure."""
    return not x.__closure__ and _is_of_library(x.__globals__.get("__name__", ""))


def _is_untold(name: str) -> bool:
    return _UNTOLD.fullmatch(name) is not None


@functools.lru_cache(maxsize=_MAX_TRACES)
def _names_of(code: types.CodeType) -> tuple[str, ...] | None:
    """The names in a function and in those that it makes; None where they do not tell all that it reads."""
    names = frozenset(names_in(code))
    if any(map(_is_untold, names)) or not all(map(_is_of_library, _imports(code))):
        return None
    return tuple(sorted(names))


def _imports(code: types.CodeType) -> Iterator[str]:
    """The modules that a function imports when it is called, in a relative import a name that no library has."""
    steps = [x for x in dis.get_instructions(code) if x.opname != "EXTENDED_ARG"]
    for i, x in enumerate(steps):
        if x.opname == "IMPORT_NAME":  # behind its level and the names of a from
            yield x.argval if steps[i - 2].argval == 0 else ""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _imports(inner)


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function and in those that it makes."""
    yield from code.co_names
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from names_in(x)


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
    codes = (
        score_mod.__code__ if score_mod.__class__ is _FUNCTION else None,
        mask_mod.__code__ if mask_mod.__class__ is _FUNCTION else None,
    )
    for score, mask, more, modifier, places in _recent.get(codes, ()):
        arrays: list[Any] = []
        if (
            (score_mod is None if score is None else score(score_mod, arrays))
            and (mask_mod is None if mask is None else mask(mask_mod, arrays))
            and (aux is None if more is None else more(aux, arrays))
        ):
            return modifier, tuple(arrays) if places is None else tuple([arrays[place] for place in places])
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
    read = None if places == tuple(range(len(arrays))) else places
    tables.remember(_recent, key, ((score, mask, aux, modifier, read), *recent[: _RECENT - 1]), _MAX_TRACES)


def _check_of(x: Any, arrays: list[Any], open_functions: tuple[Any, ...]) -> _Check:
    """Of what `Facts` can tell, but scalars of NumPy's, and functions that call themselves."""
    cls = type(x)
    if cls is CudaFunction:
        return lambda y, _: y is x
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
    if isinstance(x, types.FunctionType) and not _is_function_of_library(x):
        return _check_of_function(x, arrays, open_functions)
    if isinstance(x, types.FunctionType | types.ModuleType | type | types.BuiltinFunctionType | np.ufunc):
        return lambda y, _: y is x
    if is_array(x):
        return _check_of_array(x, arrays, open_functions)
    raise UntoldError


def _check_of_array(x: Any, arrays: list[Any], open_functions: tuple[Any, ...]) -> _Check:
    cls, shape, dtype = type(x), x.shape, x.dtype
    place = next((i for i, y in enumerate(arrays) if y is x), None)
    if place is not None:
        return lambda y, seen: y is seen[place]
    arrays.append(x)
    has_more = not is_plain_array(x)
    requires_grad, device = (x.requires_grad, x.device) if has_more else (None, None)
    attributes = _check_of_attributes(x, arrays, open_functions) if has_more else None

    def is_like(y: Any, seen: list[Any]) -> bool:
        if y.__class__ is not cls or y.shape != shape or y.dtype != dtype or (not shape and is_host_scalar(y)):
            return False
        for other in seen:
            if y is other:
                return False
        seen.append(y)
        if not has_more:
            return True
        if y.requires_grad is not requires_grad or y.device != device:
            return False
        return not y.__dict__ if attributes is None else attributes(y.__dict__, seen)

    return is_like


def _check_of_attributes(x: Any, arrays: list[Any], open_functions: tuple[Any, ...]) -> _Check | None:
    """Of the attributes that the user gave to a function or a tensor; None where there are none, as nearly always."""
    return _check_of(x.__dict__, arrays, open_functions) if x.__dict__ else None


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
    attributes = _check_of_attributes(x, arrays, open_functions)
    cells = [_check_of(cell.cell_contents, arrays, open_functions) for cell in x.__closure__ or ()]
    defaults = None if x.__defaults__ is None else _check_of(x.__defaults__, arrays, open_functions)
    names = [(name, x.__globals__.get(name, _MISSING)) for name in _names_of(code) or ()]
    others = [(name, _is_missing if y is _MISSING else _check_of(y, arrays, open_functions)) for name, y in names]

    def is_like(y: Any, seen: list[Any]) -> bool:
        if y.__class__ is not _FUNCTION or y.__code__ is not code or y.__kwdefaults__:
            return False
        if not (not y.__dict__ if attributes is None else attributes(y.__dict__, seen)):
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
