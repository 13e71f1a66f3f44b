"""From the functions of a call to its `Modifier`: an expression, the arrays it reads, the numbers it was given."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from ..base.errors import TraceError, shown
from .draws import NO_RANDOM, draws, without_draws
from .graph import INPUTS, Node, cast, number
from .modifier import Modifier, written
from .proxy import Captured, Proxy, indexed, torch_function
from .recording import Recording, is_array, names_element, recording_of
from .remembered import again, facts_of, find, is_plain_array, names_in, remember

_MAX_DEPTH: Final = 16


def trace(
    score_mod: Any = None,
    mask_mod: Any = None,
    *,
    aux: Mapping[str, Any] | None = None,
) -> Modifier:
    """Trace the functions of a call once, to be used any number of times.

    Parameters
    ----------
    score_mod
        ``score_mod(score, b, h, q, k)`` returns what takes the place of ``score = softmax_scale * q . k``.
    mask_mod
        ``mask_mod(b, h, q, k)`` returns whether query q sees key k.
    aux
        Arrays by name, which both functions then take as one more argument and index: ``aux["slopes"][h]``. Arrays that
        a function captures by itself need no mention.

    Returns
    -------
    Modifier
        ``score_mod=`` of any call takes it. Arrays are operands: their content, and that of a captured number, may
        change from call to call without a new kernel.

    Raises
    ------
    TraceError
        The message names the operation that is not possible.
    """
    modifier = traced(score_mod, mask_mod, aux=aux)
    if not modifier.text:
        object.__setattr__(modifier, "text", written(modifier.program))
    return modifier


def traced(score_mod: Any = None, mask_mod: Any = None, *, aux: Mapping[str, Any] | None = None) -> Modifier:
    """`trace` of the functions of a call, without the text."""
    if isinstance(score_mod, Modifier):
        if mask_mod is not None or aux is not None:
            raise TraceError("score_mod: a traced modifier has its mask_mod and its arrays already.")
        return score_mod
    if isinstance(mask_mod, Modifier):
        raise TraceError("mask_mod: got what trace returned, which may have a score_mod, too. Pass it as score_mod=.")
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if not (function is None or callable(function)):
            raise TypeError(f"{name}: got {shown(function)} of type {type(function).__name__}. It is a function.")
    known = again(score_mod, mask_mod, aux)
    if known is not None:
        return known
    facts = facts_of(score_mod, mask_mod, aux)
    found = None if facts is None else find(facts)
    if found is not None:
        return found
    recording, modifier = without_draws(lambda: _traced(score_mod, mask_mod, aux))
    if facts is not None and not recording.computed:
        remember(facts, modifier)
    return modifier


def no_functions() -> ValueError:
    """The refusal of ``aux`` in a call without functions, of which there is no modifier."""
    return ValueError("aux: given without score_mod and mask_mod, whose functions take it.")


def _traced(score_mod: Any, mask_mod: Any, aux: Mapping[str, Any] | None) -> tuple[Recording, Modifier]:
    recording = Recording(frozenset(literals(score_mod)) | frozenset(literals(mask_mod)))
    inputs = {name: Proxy(recording, Node(name, kind="float" if name == "score" else "int")) for name in INPUTS}
    positions = tuple(inputs[name] for name in INPUTS[1:])
    more = () if aux is None else (_Aux(recording, aux),)
    score = mask = None
    with _torch_mode(recording):
        if score_mod is not None:
            score = _called(recording, "score_mod", score_mod, (inputs["score"], *positions, *more))
        if mask_mod is not None:
            mask = _called(recording, "mask_mod", mask_mod, (*positions, *more))
    return recording, modifier_of(score, mask, recording)


def modifier_of(score: Node | None, mask: Node | None, recording: Recording) -> Modifier:
    """The modifier of what ``score_mod`` and ``mask_mod`` returned; None where there is no such function."""
    if mask is not None:
        if mask.kind == "float":
            raise TraceError("mask_mod: returned a floating-point number. It returns whether the key is kept.")
        mask = cast(mask, "bool")
    if mask == number(True):
        mask = None
    score = None if score is None else cast(score, "float")
    return Modifier.of(score, mask, tuple(recording.captures), tuple(dict.fromkeys(recording.sizes)))


class _Aux:
    """The arrays of ``aux``, by name as items and as attributes."""

    def __init__(self, recording: Recording, arrays: Mapping[str, Any]) -> None:
        self._arrays = {name: Captured(recording, x) if is_array(x) else x for name, x in arrays.items()}

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self._arrays[name]
        except KeyError:
            raise AttributeError(name) from None


def _called(recording: Recording, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Node:
    try:
        result = _with_captures(function, recording, 0)(*args)
        if result is None:
            raise TraceError("returned None. It returns what it computes: is there a return statement?")
        return recording.node(result)
    except TraceError as error:
        raise TraceError(f"{name}: {error.args[0]}") from None
    except TypeError as error:
        if "positional argument" in str(error):
            names = (*INPUTS, "aux") if name == "score_mod" else (*INPUTS[1:], "aux")
            raise TraceError(f"{name}: {error}. It is called with ({', '.join(names[: len(args)])}).") from None
        raise
    except IndexError as error:
        if "valid indices" in str(error):  # of NumPy, which asks an index for no Python number
            raise TraceError(
                f"{name}: an array that was made inside of the function is indexed. Make it outside, so that it is "
                f"captured, and index it with b, h, q or k."
            ) from None
        raise


# ------------------------------------------------------------------------- what a function captured, and its literals


def _with_captures(x: Any, recording: Recording, depth: int) -> Any:
    """The function with the arrays that it and the functions it uses captured as operands, in containers, too.

    torch's tensors stay as they are: `_torch_mode` sees what is done to them.
    """
    if is_plain_array(x):
        return Captured(recording, x)
    if depth > _MAX_DEPTH:
        return x

    def replaced(value: Any) -> Any:
        return _with_captures(value, recording, depth + 1)

    if type(x) is dict:
        items = {name: replaced(value) for name, value in x.items()}
        return items if any(items[name] is not x[name] for name in x) else x
    if type(x) in (list, tuple):
        elements = [replaced(value) for value in x]
        return type(x)(elements) if any(a is not b for a, b in zip(elements, x, strict=True)) else x
    if not isinstance(x, types.FunctionType):
        return x

    changed = False
    cells = []
    for cell in x.__closure__ or ():
        try:
            before = cell.cell_contents
        except ValueError:  # not filled yet: a function that calls itself
            cells.append(cell)
            continue
        after = before if before is x else replaced(before)
        changed |= after is not before
        cells.append(cell if after is before else types.CellType(after))
    values = x.__globals__
    for name in names_in(x.__code__):
        before = x.__globals__.get(name)
        # Other functions of the same file may read arrays, too; those of a library do not.
        if before is x or not (is_plain_array(before) or getattr(before, "__globals__", None) is x.__globals__):
            continue
        after = replaced(before)
        if after is not before:
            values = dict(values) if values is x.__globals__ else values
            values[name] = after
            changed = True
    defaults = tuple(map(replaced, x.__defaults__ or ()))
    changed |= any(a is not b for a, b in zip(defaults, x.__defaults__ or (), strict=True))
    if not changed:
        return x
    result = types.FunctionType(x.__code__, values, x.__name__, defaults or None, tuple(cells) or None)
    result.__kwdefaults__ = x.__kwdefaults__
    result.__dict__.update(x.__dict__)
    return result


def numbers_of(code: types.CodeType) -> Iterator[int | float]:
    """Numbers in the text of a function and of those that it makes."""
    codes = [code]
    while codes:
        for x in codes.pop().co_consts:
            if isinstance(x, types.CodeType):
                codes.append(x)
            elif isinstance(x, int | float):
                yield x


def literals(function: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Numbers in the text of a function and of those that it captured: they belong to the kernel's text, too."""
    if depth > _MAX_DEPTH or not isinstance(function, types.FunctionType):
        return
    for x in numbers_of(function.__code__):
        yield type(x).__name__, x
        yield type(x).__name__, -x  # a negative literal may be a positive one that is negated
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            inner = cell.cell_contents
            for x in inner if isinstance(inner, tuple | list) else (inner,):
                if x is not function:
                    yield from literals(x, depth + 1)
    for name in names_in(function.__code__):
        other = function.__globals__.get(name)
        if other is not function and getattr(other, "__globals__", None) is function.__globals__:
            yield from literals(other, depth + 1)


@contextlib.contextmanager
def _torch_mode(recording: Recording) -> Iterator[None]:
    """While torch is there, see the indexing of its tensors, which asks no argument but the tensor for its meaning."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with _mode_class(torch)(recording):
        yield


_modes: dict[Any, Any] = {}


def _mode_class(torch: Any) -> Any:
    if torch not in _modes:

        class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
            def __init__(self, recording: Recording) -> None:
                super().__init__()
                self._recording = recording

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if recording_of((*args, *kwargs.values())) is None:
                    if getattr(func, "__name__", "") == "__getitem__" and names_element(*args):
                        return indexed(self._recording, args[0], (), args[1])
                    own = getattr(func, "__name__", "")
                    if draws(own, kwargs):
                        raise TraceError(f"{own!r} is not possible in a modifier: {NO_RANDOM}.")
                    name = getattr(getattr(func, "__self__", None), "__name__", "")
                    # Attributes that `remembered.Facts` looks at are those of every call that finds the trace.
                    self._recording.computed |= name not in ("shape", "dtype", "device", "ndim", "requires_grad")
                    return func(*args, **kwargs)
                return torch_function(func, args, kwargs)

        _modes[torch] = Mode
    return _modes[torch]
