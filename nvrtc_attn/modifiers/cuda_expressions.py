"""The nodes of a program as C++ expressions: names, lines, and what of them is an instruction or takes long."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from ..base.dtypes import DTYPES
from ..base.errors import TraceError
from .calls import text_of
from .diagonals import sum_of
from .graph import COMPARISONS, FLOAT32_MAX, INPUTS, ROUNDING, Node, make, number, walk
from .modifier import Program

TYPES: Final = {"float": "float", "int": "int", "bool": "bool"}
LEAVES: Final = (*INPUTS, "number", "param")
_QUICK: Final = "quick"
"""Value of a division that need not be rounded to the nearest."""
_STEPS: Final = (*ROUNDING, *COMPARISONS, "floordiv", "mod", "int", "bool", "sign", "call")
_MAX_FACTOR: Final = 1 << 10
"""Of q, k and the literal in a position: sums of them stay below 2^24, and far below int32's end."""
_FLOAT32: Final = struct.Struct("f")
_NOTHING_GIVEN: Final[Mapping[Node, str]] = MappingProxyType({})
EXPRESSIONS: Final[dict[str, str]] = {
    "exp": "exp_of<Element>({0})", "exp2": "exp2f({0})", "expm1": "expm1f({0})", "log": "logf({0})",
    "log2": "log2f({0})", "log1p": "log1pf({0})", "sqrt": "sqrtf({0})", "rsqrt": "rsqrtf({0})",
    "tanh": "tanh_of<Element>({0})", "sigmoid": "sigmoid_of<Element>({0})", "sin": "sinf({0})", "cos": "cosf({0})",
    "atan": "atanf({0})", "erf": "erff({0})",
    "floor": "floorf({0})", "ceil": "ceilf({0})", "round": "rintf({0})", "trunc": "truncf({0})",
    "neg": "-{0}", "sign": "sign_of({0})", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}",
    "div": "{0} / {1}", "floordiv": "floor_div({0}, {1})", "mod": "floor_mod({0}, {1})",
    "minimum": "smaller({0}, {1})", "maximum": "larger({0}, {1})", "pow": "powf({0}, {1})", "lt": "{0} < {1}",
    "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "eq": "{0} == {1}", "ne": "{0} != {1}",
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "shl": "{0} << {1}", "shr": "{0} >> {1}",
    "where": "{0} ? {1} : {2}", "float": "float({0})", "int": "int({0})",
}  # fmt: skip
"""Of the operations that are one expression, whatever the kinds; `_expression` knows the others."""
ARITHMETIC: Final = frozenset(
    (
        "add",
        "sub",
        "mul",
        "neg",
        "abs",
        "minimum",
        "maximum",
        "where",
        "float",
        "number",
        "param",
        *COMPARISONS,
        *INPUTS,
    )
)
"""Operations of about one instruction, and what a thread has in registers."""
_OF_BITS: Final = frozenset(("and", "or", "xor", "not", "shl", "shr", "int", "bool"))
"""As short, of conditions and positions."""


def is_cheap(node: Node) -> bool:
    """Whether every thread had better compute it than get it from another one of its warp."""
    return node.op in ARITHMETIC or node.op in _OF_BITS or _power_of_two(node) is not None


def with_quick_quotients(root: Node) -> Node:
    """``root`` without exact divisions of what depends on the score, unless a step is made of one.

    An exact one is ten instructions and a call: 22,000 instructions and 28 s of compiling for two tanh of a quotient in
    a tile of 128 x 128, 9,900 and 3 s so. By what a head alone decides it is a product with the reciprocal.
    """
    nodes = [x for x in walk([root]) if "score" in x.depends]
    if any(_divides(x) for node in nodes if node.op in _STEPS for x in walk([node])):
        return root
    made: dict[Node, Node] = {}
    for node in walk([root]):
        args = tuple(made[x] for x in node.args)
        if not _divides(node):
            made[node] = Node(node.op, args, node.kind, node.value)
        elif node.args[1].depends <= {"b", "h"}:
            made[node] = make("mul", args[0], make("div", number(1.0), args[1]))
        else:
            made[node] = Node(node.op, args, node.kind, _QUICK)
    return made[root]


def _divides(node: Node) -> bool:
    return node.op == "div" and "score" in node.depends


def members_of(roots: Sequence[Node]) -> dict[Node, str]:
    """Values of a batch entry and head that are computed once a tile: those that something else is made of."""
    ahead = {x for x in walk(roots) if x.depends <= {"b", "h"} and x.op not in LEAVES}
    used = dict.fromkeys(x for node in walk(roots) if node not in ahead for x in node.args if x in ahead)
    used |= dict.fromkeys(x for x in roots if x in ahead)
    return {x: f"head{i}" for i, x in enumerate(used)}


class Text:
    """Names and lines of a program's nodes."""

    def __init__(
        self, program: Program, members: dict[Node, str], roots: Sequence[Node], *, without_branch: bool = False
    ) -> None:
        """``without_branch``: of few reads, which then wait together; those of scores would all be in registers."""
        self._program, self._members, self._without_branch = program, members, without_branch
        self._names: dict[Node, str] = {}
        self._slices: dict[_Slice, int] = {}
        for x in walk(roots):
            part = _slice_of(x)
            if part is not None:
                self._slices.setdefault(part, len(self._slices))

    def slice_members(self) -> list[str]:
        """Of each part of an array that batch entry and head select: where it begins, and how long it is."""
        lines = []
        for part, i in self._slices.items():
            cpp = DTYPES[self._program.captures[part.capture][0]].cpp
            lines += [f"  {cpp} const* slice{i}_at;", f"  int slice{i}_size;"]
        return lines

    def slice_indices(self) -> list[Node]:
        return [x for part in self._slices for _, x in part.fixed]

    def slice_values(self) -> list[str]:
        lines = []
        for part, i in self._slices.items():
            slot, names = part.capture, [(axis, self.name(x, inside=True)) for axis, x in part.fixed]
            at = "".join(f" + (long long){x} * block.x{slot}_stride{axis}" for axis, x in names)
            inside = " & ".join(f"within({x}, block.x{slot}_size{axis})" for axis, x in names)
            lines += [
                f"    slice{i}_at = block.x{slot}_at{at};",
                f"    slice{i}_size = {inside} ? block.x{slot}_size{part.first} : 0;",
            ]
        return lines

    def name(self, node: Node, *, inside: bool = False) -> str:
        """What a node is called: a literal, an argument, a field, a member, or a local value."""
        if node.op == "number":
            return _literal(node)
        if node.op == "param":
            return f"block.n{node.value}"
        if node.op in INPUTS:
            return node.op
        if node in self._members and not inside:
            return self._members[node]
        return self._names.setdefault(node, f"v{len(self._names)}")

    def body(
        self, roots: Sequence[Node], *, inside: bool = False, given: Mapping[Node, str] = _NOTHING_GIVEN
    ) -> list[str]:
        """Lines that define ``roots``; ``inside``: the members themselves. ``given``: what other nodes are called."""
        lines = []
        done: set[Node] = {*given}
        self._names |= given
        # No recursion: a function may chain thousands of operations.
        pending = [(x, False) for x in reversed(roots)]
        while pending:
            node, ready = pending.pop()
            if node in done or node.op in LEAVES or (node in self._members and not inside):
                continue
            if not ready:
                pending.append((node, True))
                pending += [(x, False) for x in reversed(_operands(node))]
                continue
            done.add(node)
            kind = TYPES[node.kind]
            lines.append(f"    {kind} const {self.name(node, inside=inside)} = {self._expression(node, inside)};")
        return lines

    def inside(self, load: Node) -> list[str]:
        """Conditions that an element is one of its array, as far as that is not known."""
        return [f"within({self.name(x)}, block.x{load.value}_size{axis})" for axis, x in enumerate(load.args)]

    def addition(self, place: int, load: Node, what: str) -> str:
        """The line that adds ``what`` to the gradient of an element, if there is one."""
        at = " + ".join(
            (f"block.g{load.value}_at", *(
                f"(long long){self.name(x)} * block.g{load.value}_stride{axis}" for axis, x in enumerate(load.args)
            ))
        )  # fmt: skip
        inside = " & ".join(self.inside(load)) or "true"
        return f"    if ({inside}) to.x[{place}].add({at}, {what});"

    def addition_of_sum(self, place: int, load: Node) -> str:
        """The same of an element of a key, a query or the head, for all its scores at once."""
        return self.addition(place, load, f"of.x[{place}]").replace(f"to.x[{place}].add(", "give(")

    def _expression(self, node: Node, inside: bool) -> str:
        names = [self.name(x, inside=inside) for x in node.args]
        if node.op == "load":
            return self._load(node, names)
        if node.op == "call":
            return f"{text_of(node.value).symbol}({', '.join(names)})"
        if node.op == "abs":
            return f"fabsf({names[0]})" if node.kind == "float" else f"abs({names[0]})"
        if node.op == "not":
            return f"!{names[0]}" if node.kind == "bool" else f"~{names[0]}"
        if node.op == "bool":
            return f"{names[0]} != 0"
        position = _position(node)
        if position is not None:
            return self._float_of(position, inside)
        scaled = _scaled_position(node)
        if scaled is not None:
            x = self.name(scaled[0], inside=inside)
            base, offset = self._parts_of(scaled[1], inside)
            return f"fmaf({x}, {offset}, {x} * {base})"
        if node.value == _QUICK:
            return f"quotient<Element>({names[0]}, {names[1]})"
        power = _power_of_two(node)
        if power is not None:
            return f"{names[0]} >> {power}" if node.op == "floordiv" else f"{names[0]} & {2**power - 1}"
        return EXPRESSIONS[node.op].format(*(f"({x})" if x.startswith("-") else x for x in names))

    def _parts_of(self, position: _Position, inside: bool) -> tuple[str, str]:
        """The float of a position where the caller's tile begins, and what its offset in the tile adds to that."""
        base = [f"{factor} * {name}0" for name, factor in position.factors]
        base += [f"{factor} * {self.name(x, inside=inside)}" for x, factor in position.rest]
        offset = " + ".join(f"{factor} * ({name} - {name}0)" for name, factor in position.factors)
        return f"float({' + '.join([*base, str(position.constant)])})", f"float({offset})"

    def _float_of(self, position: _Position, inside: bool) -> str:
        base, offset = self._parts_of(position, inside)
        return f"fabsf({base} + {offset})" if position.magnitude else f"{base} + {offset}"

    def _load(self, node: Node, names: Sequence[str]) -> str:
        slot, part = node.value, _slice_of(node)
        start, first = f"block.x{slot}_at", f"block.x{slot}_size0"
        axes = list(range(len(names)))
        if part is not None:
            i = self._slices[part]
            start, first = f"slice{i}_at", f"slice{i}_size"
            axes = [axis for axis in axes if axis not in dict(part.fixed)]
        sizes = [first, *(f"block.x{slot}_size{axis}" for axis in axes[1:])] if axes else []
        indices = [names[axis] for axis in axes]
        if self._without_branch:
            # An element that does not exist is read where one does, and not used.
            indices = [f"nearest({x}, {size})" for x, size in zip(indices, sizes, strict=True)]
            start = start if part is None else f"({first} > 0 ? {start} : block.x{slot}_at)"
        at = "".join(f" + (long long){x} * block.x{slot}_stride{axis}" for axis, x in zip(axes, indices, strict=True))
        element = f"captured({start}{at})"
        dtype = self._program.captures[slot][0]
        element = f"to_float({element})" if node.kind == "float" else f"{TYPES[node.kind]}({element})"
        if dtype == "bool":
            element = f"captured(reinterpret_cast<unsigned char const*>({start}){at}) != 0"
        if not names:
            return element
        inside = " & ".join(f"within({names[axis]}, {size})" for axis, size in zip(axes, sizes, strict=True))
        nothing = "not_a_number()" if node.kind == "float" else "false" if node.kind == "bool" else "0"
        return (
            f"chosen({inside}, {element}, {nothing})" if self._without_branch else f"{inside} ? {element} : {nothing}"
        )


class _Slice(NamedTuple):
    """The part of an array that indices of batch entry and head alone select, which is found once a tile."""

    capture: int
    fixed: tuple[tuple[int, Node], ...]
    first: int
    """The first axis that another index belongs to."""


@functools.lru_cache(maxsize=4096)
def _slice_of(node: Node) -> _Slice | None:
    """The part that an element is read of; None of other nodes, and where no index or every one selects it."""
    if node.op != "load" or node.depends <= {"b", "h"}:
        return None
    own = [axis for axis, x in enumerate(node.args) if not x.depends <= {"b", "h"}]
    index = tuple((axis, x) for axis, x in enumerate(node.args) if axis not in own)
    return _Slice(node.value, index, own[0]) if index else None


class _Position(NamedTuple):
    """An integer that is a sum of multiples of q and k, as a float: below 2^24 both of its parts are exact."""

    factors: tuple[tuple[str, int], ...]
    rest: tuple[tuple[Node, int], ...]
    """What depends on neither, with its factors."""
    constant: int
    magnitude: bool
    """Its absolute value is meant."""


@functools.lru_cache(maxsize=4096)
def _position(node: Node) -> _Position | None:
    """The position that a float is; None of other nodes.

    Its value is known but for a constant where a tile begins, so that no element of a tile converts an integer.
    """
    if node.op != "float" or node.args[0].kind != "int":
        return None
    inner = node.args[0]
    magnitude = inner.op == "abs"
    found = sum_of(inner.args[0] if magnitude else inner)
    if found is None:
        return None
    terms = dict(found)
    constant = terms.pop(None, 0)
    factors = tuple((x.op, n) for x, n in terms.items() if x is not None and x.op in ("q", "k") and n)
    rest = tuple((x, n) for x, n in terms.items() if x is not None and x.op not in ("q", "k"))
    if not factors or any(abs(n) > _MAX_FACTOR for n in (constant, *terms.values())):
        return None
    return _Position(factors, rest, constant, magnitude)


@functools.lru_cache(maxsize=4096)
def _scaled_position(node: Node) -> tuple[Node, _Position] | None:
    """The factor and the position of a product such as ALiBi's: one fused addition a score, and a product a tile."""
    if node.op != "mul" or node.kind != "float":
        return None
    for factor, other in (node.args, node.args[::-1]):
        position = _position(other)
        if position is not None and not position.magnitude and not factor.depends & {"score", "k"}:
            return factor, position
    return None


def _operands(node: Node) -> tuple[Node, ...]:
    """The nodes that the expression of ``node`` names."""
    scaled, position = _scaled_position(node), _position(node)
    if scaled is not None:
        return scaled[0], *(x for x, _ in scaled[1].rest)
    if position is not None:
        return tuple(x for x, _ in position.rest)
    part = _slice_of(node)
    return node.args if part is None else tuple(x for axis, x in enumerate(node.args) if axis not in dict(part.fixed))


def _power_of_two(node: Node) -> int | None:
    if node.op not in ("floordiv", "mod") or node.kind != "int" or node.args[1].op != "number":
        return None
    value = node.args[1].value
    return value.bit_length() - 1 if value > 0 and value & (value - 1) == 0 else None


def _literal(node: Node) -> str:
    value = node.value
    if node.kind == "bool":
        return str(bool(value)).lower()
    if node.kind == "int":
        if not -(2**31) < value < 2**31:
            raise TraceError(f"the integer {value} does not fit int32.")
        return str(value)
    if math.isnan(value):
        return "not_a_number()"
    if abs(value) > FLOAT32_MAX:
        return "infinity()" if value > 0 else "-infinity()"
    return f"{_FLOAT32.unpack(_FLOAT32.pack(value))[0].hex()}f"
