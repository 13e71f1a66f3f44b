"""Modifiers as text, for graphs that keep no Python objects: programs of torch.compile and of torch.export.

There are two kinds of text, both JSON. `modifier.written` is the graph of a `Program`, node by node. A *script* is a
list of calls, which a tracer that cannot make nodes wrote down; here they are made again, with the proxies of `trace`,
so that both ways lead to one graph, and to one kernel. Numbers are in neither: they are given beside the text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..base.errors import TraceError
from .functions import POWERS
from .graph import INPUTS, Node, number
from .modifier import Modifier, read_program
from .proxy import Proxy, called_by_name
from .recording import Recording
from .trace import modifier_of

_WHOLE: Final = {":": slice(None), "...": Ellipsis}
"""Words of an index that stands for no element."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayFacts:
    """What a trace asks of a captured array."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)


def read_text(
    text: str, ints: tuple[int, ...], floats: tuple[float, ...], arrays: tuple[tuple[tuple[int, ...], Any], ...]
) -> tuple[Modifier, tuple[int, ...]]:
    """The modifier of a text, without its arrays, and which of the arrays it has.

    Parameters
    ----------
    text
        Of either kind.
    ints, floats
        The numbers of this call.
    arrays
        Shape and dtype of each captured array; a dtype is that of the framework, or its name.

    Raises
    ------
    TraceError
        What a script does is not possible in a modifier.
    """
    # Zeros of both signs are equal, and a literal has the one that it was written with.
    return _read_text(text, ints, floats, arrays, 0 in floats and repr(floats))


@functools.lru_cache(maxsize=4096)
def _read_text(
    text: str, ints: tuple[int, ...], floats: tuple[float, ...], arrays: tuple[tuple[tuple[int, ...], Any], ...],
    signs: str | bool,
) -> tuple[Modifier, tuple[int, ...]]:  # fmt: skip
    if text.startswith("{"):
        program = read_program(text)
        left = {"int": iter(ints), "float": iter(floats)}
        numbers = tuple(next(left[kind]) for kind in program.numbers)
        return Modifier(program, (), numbers), tuple(range(len(program.captures)))
    literals, functions = json.loads(text)
    recording = Recording(frozenset((type(x).__name__, y) for x in literals for y in (x, -x)))
    facts = [ArrayFacts(*x) for x in arrays]
    places = {id(x): i for i, x in enumerate(facts)}
    given = {"i": ints, "f": floats, "@": facts}
    found = {name: _replayed(recording, name, lines, result, given) for name, lines, result in functions}
    modifier = modifier_of(found.get("score_mod"), found.get("mask_mod"), recording)
    return modifier.with_captures(()), tuple(places[id(x)] for x in modifier.captures)


def _replayed(
    recording: Recording, function: str, lines: Sequence[Any], result: Any, operands: Mapping[str, Any]
) -> Node:
    """The calls of one function, made again. A word is an operand: its first letter says of which list."""
    inputs = [Proxy(recording, Node(name, kind="float" if name == "score" else "int")) for name in INPUTS]
    made: list[Any] = []
    lists = {**operands, "$": inputs, "%": made}

    def operand(x: Any) -> Any:
        if isinstance(x, list):
            return tuple([operand(y) for y in x])
        if not isinstance(x, str):
            return x
        if x in _WHOLE:
            return _WHOLE[x]
        return x[1:] if x[0] == "'" else lists[x[0]][int(x[1:])]

    try:
        for name, args, options in lines:
            kwargs = {key: operand(x) for key, x in options.items()}
            given = operand(args)
            if name == "refused":
                raise TraceError(given[0])
            if name.strip("_") in POWERS and len(given) == 2 and type(given[1]) in (int, float):
                given = given[0], number(given[1])  # a square is a product, wherever its 2 was written
            made.append(called_by_name(recording, name, given, kwargs))
        return recording.node(operand(result))
    except TraceError as error:
        raise TraceError(f"{function}: {error.args[0]}") from None
