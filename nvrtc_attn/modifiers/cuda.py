"""A program as C++: the text that is compiled into a kernel, and the bytes that a launch passes to it.

The text depends on the program and on which captured arrays get a gradient, on no name, number, length or address:
equal programs have one kernel. ``cuda_src/nvrtc_attn/collective/modifier.cuh`` has what it is made of.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ..base.dtypes import DTYPES
from ..base.errors import TraceError, UnsupportedError
from .derivative import ZERO, derivatives
from .graph import INPUTS, SCORE, Node, walk
from .modifier import Program

_TYPES: Final = {"float": "float", "int": "int", "bool": "bool"}
_LEAVES: Final = (*INPUTS, "number", "param")
_FLOAT32_MAX: Final = 3.4028234663852886e38
_FLOAT32: Final = struct.Struct("f")
_BLOCK_BYTES: Final = re.compile(r"^// ModifierBlock: (\d+) bytes$", re.MULTILINE)

EXPRESSIONS: Final[dict[str, str]] = {
    "exp": "exp_of<Element>({0})", "exp2": "exp2f({0})", "expm1": "expm1f({0})", "log": "logf({0})",
    "log2": "log2f({0})", "log1p": "log1pf({0})", "sqrt": "sqrtf({0})", "rsqrt": "rsqrtf({0})",
    "tanh": "tanh_of<Element>({0})", "sigmoid": "sigmoid_of<Element>({0})", "sin": "sinf({0})", "cos": "cosf({0})",
    "erf": "erff({0})", "floor": "floorf({0})", "ceil": "ceilf({0})", "round": "rintf({0})", "trunc": "truncf({0})",
    "neg": "-{0}", "sign": "sign_of({0})", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}",
    "div": "{0} / {1}", "floordiv": "floor_div({0}, {1})", "mod": "floor_mod({0}, {1})",
    "minimum": "smaller({0}, {1})", "maximum": "larger({0}, {1})", "pow": "powf({0}, {1})", "lt": "{0} < {1}",
    "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "eq": "{0} == {1}", "ne": "{0} != {1}",
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "shl": "{0} << {1}", "shr": "{0} >> {1}",
    "where": "{0} ? {1} : {2}", "float": "float({0})", "int": "int({0})",
}  # fmt: skip
"""Of the operations that are one expression, whatever the kinds; `_expression` knows the others."""


@functools.lru_cache(maxsize=1024)
def cuda_source(program: Program, trained: tuple[int, ...] = ()) -> str:
    """The definitions of ``ModifierBlock`` and ``Modifier`` for a program.

    Parameters
    ----------
    trained
        The captured arrays whose gradients the kernel adds up.

    Raises
    ------
    TraceError
        A literal that int32 does not hold.
    """
    slopes = {} if program.score is None else derivatives(program.score)
    slope = slopes.get(SCORE, ZERO)
    gradients = [(x, d) for x, d in slopes.items() if x.op == "load" and x.value in trained]
    roots = [x for x in (program.score, program.mask, slope) if x is not None]
    roots += [x for load, d in gradients for x in (d, *load.args)]
    members = _members(roots)
    text = _Text(program, members)
    block = _block_fields(program, trained)
    block = block or [("long long", "nothing_at")]  # C++ has no struct of 0 bytes
    size = 8 * -(-sum(8 if name.endswith("_at") else 4 for _, name in block) // 8)
    lines = [
        f"// ModifierBlock: {size} bytes",
        "namespace nvrtc_attn {",
        "struct alignas(8) ModifierBlock {",
        *(f"  {kind} {name};" for kind, name in block),
        "};",
        "template <class Params>",
        "struct Modified : Params {",
        "  alignas(alignof(Params)) ModifierBlock modifier;  // not in the padding at the end of Params",
        "};",
        "template <class Element>",
        "struct Modifier {",
        f"  static constexpr bool kScores = {str(program.score is not None).lower()};",
        f"  static constexpr bool kMasks = {str(program.mask is not None).lower()};",
        f"  static constexpr bool kTrains = {str(bool(gradients)).lower()};",
        "  ModifierBlock const& block;",
        "  int b, h;",
        *(f"  {_TYPES[x.kind]} {name};" for x, name in members.items()),
        "  NVRTC_ATTN_DEVICE Modifier(ModifierBlock const& block_, int b_, int h_) : block(block_), b(b_), h(h_) {",
        *text.body(list(members), inside=True),
        *(f"    {name} = {text.name(x, inside=True)};" for x, name in members.items()),
        "  }",
    ]
    if program.score is not None:
        lines += [
            "  NVRTC_ATTN_DEVICE float score(float score, int q, int k) const {",
            *text.body([program.score]),
            f"    return {text.name(program.score)};",
            "  }",
            "  NVRTC_ATTN_DEVICE float score(float score, int q, int k, float& slope) const {",
            *text.body([program.score, slope]),
            f"    slope = {text.name(slope)};",
            f"    return {text.name(program.score)};",
            "  }",
        ]
    if program.mask is not None:
        lines += [
            "  NVRTC_ATTN_DEVICE bool keeps(int q, int k) const {",
            *text.body([program.mask]),
            f"    return {text.name(program.mask)};",
            "  }",
        ]
    if gradients:
        lines += [
            "  // What a score's gradient ds gives to those of the captured arrays.",
            f"  using Gradients = CapturedGradient[{len(gradients)}];",
            "  NVRTC_ATTN_DEVICE void add(Gradients& gradients, float score, float ds, int q, int k) const {",
            *text.body([x for load, d in gradients for x in (d, *load.args)]),
        ]
        for place, (load, d) in enumerate(gradients):
            at = " + ".join(
                (f"block.g{load.value}_at", *(
                    f"(long long){text.name(x)} * block.g{load.value}_stride{axis}" for axis, x in enumerate(load.args)
                ))
            )  # fmt: skip
            inside = " & ".join(text.inside(load)) or "true"
            lines.append(f"    if ({inside}) gradients[{place}].add({at}, ds * {text.name(d)});")
        lines.append("  }")
    return "\n".join([*lines, "};", "}  // namespace nvrtc_attn", ""])


def block_bytes(text: str) -> int:
    """Size of the ``ModifierBlock`` of a text."""
    found = _BLOCK_BYTES.search(text)
    if found is None:
        raise ValueError("the text of a modifier does not say how many bytes it takes")
    return int(found.group(1))


class ModifierValues(NamedTuple):
    """What a launch passes to a modifier: the bytes of its ``ModifierBlock``, and memory to set to zero before."""

    block: bytes
    zeroed: tuple[tuple[int, int], ...]
    """(address, bytes) of the gradients that the kernel adds to."""


NO_MODIFIER: Final = ModifierValues(b"", ())


def modifier_values(
    program: Program,
    trained: tuple[int, ...],
    captures: Sequence[Any],
    gradients: Sequence[Any],
    numbers: Sequence[float],
) -> ModifierValues:
    """The values of one call. ``captures`` and ``gradients`` are views of device memory.

    Raises
    ------
    UnsupportedError
        A dim or a stride of a captured array does not fit int32.
    ValueError
        A gradient is not dense.
    """
    zeroed = []
    for i in trained:
        size = math.prod(gradients[i].shape)
        span = 1 + sum((n - 1) * abs(x) for n, x in zip(gradients[i].shape, gradients[i].strides, strict=True))
        if size and (span != size or min(gradients[i].strides, default=0) < 0):
            raise ValueError(f"daux: strides {gradients[i].strides} leave gaps, and a gradient on the GPU is dense.")
        zeroed.append((gradients[i].ptr, 4 * size))
    values: list[Any] = [*(x.ptr for x in captures), *(gradients[i].ptr for i in trained)]
    for x in (*captures, *(gradients[i] for i in trained)):
        if any(abs(stride) >= 2**31 for stride in (*x.strides, *x.shape)):
            raise UnsupportedError(
                f"a captured array of shape {x.shape} has strides {x.strides}, and kernels read int32 ones: copy it"
            )
    for x in captures:
        values += (*x.shape, *x.strides)
    for i in trained:
        values += gradients[i].strides
    values += numbers
    data = _packer(program, trained).pack(*values)
    return ModifierValues(data.ljust(-(-len(data) // 8) * 8, b"\0"), tuple(x for x in zeroed if x[1]))


@functools.lru_cache(maxsize=1024)
def _packer(program: Program, trained: tuple[int, ...]) -> struct.Struct:
    letters = {"float": "f", "int": "i"}
    codes = ["Q" if name.endswith("_at") else letters[kind] for kind, name in _block_fields(program, trained)]
    return struct.Struct("<" + "".join(codes))


def _block_fields(program: Program, trained: tuple[int, ...]) -> list[tuple[str, str]]:
    """(type, name) of each field: pointers, sizes and strides of arrays, strides of gradients, numbers."""
    fields = [(f"{DTYPES[dtype].cpp} const*", f"x{i}_at") for i, (dtype, _) in enumerate(program.captures)]
    fields += [("float*", f"g{i}_at") for i in trained]
    for i, (_, rank) in enumerate(program.captures):
        fields += [("int", f"x{i}_size{axis}") for axis in range(rank)]
        fields += [("int", f"x{i}_stride{axis}") for axis in range(rank)]
    for i in trained:
        fields += [("int", f"g{i}_stride{axis}") for axis in range(program.captures[i][1])]
    return fields + [(kind, f"n{i}") for i, kind in enumerate(program.numbers)]


def _members(roots: Sequence[Node]) -> dict[Node, str]:
    """Values of a batch entry and head that are computed once a tile: those that something else is made of."""
    ahead = {x for x in walk(roots) if x.depends <= {"b", "h"} and x.op not in _LEAVES}
    used = dict.fromkeys(x for node in walk(roots) if node not in ahead for x in node.args if x in ahead)
    used |= dict.fromkeys(x for x in roots if x in ahead)
    return {x: f"head{i}" for i, x in enumerate(used)}


class _Text:
    """Names and lines of a program's nodes."""

    def __init__(self, program: Program, members: dict[Node, str]) -> None:
        self._program, self._members = program, members
        self._names: dict[Node, str] = {}

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

    def body(self, roots: Sequence[Node], *, inside: bool = False) -> list[str]:
        """Lines that define ``roots``; ``inside``: the members themselves."""
        lines = []
        pending = list(dict.fromkeys(roots))
        done: set[Node] = set()

        def define(node: Node) -> None:
            if node in done or node.op in _LEAVES or (node in self._members and not inside):
                return
            done.add(node)
            for x in node.args:
                define(x)
            kind = _TYPES[node.kind]
            lines.append(f"    {kind} const {self.name(node, inside=inside)} = {self._expression(node, inside)};")

        for node in pending:
            define(node)
        return lines

    def inside(self, load: Node) -> list[str]:
        """Conditions that an element is one of its array, as far as that is not known."""
        return [f"within({self.name(x)}, block.x{load.value}_size{axis})" for axis, x in enumerate(load.args)]

    def _expression(self, node: Node, inside: bool) -> str:
        names = [self.name(x, inside=inside) for x in node.args]
        if node.op == "load":
            return self._load(node, names)
        if node.op == "abs":
            return f"fabsf({names[0]})" if node.kind == "float" else f"abs({names[0]})"
        if node.op == "not":
            return f"!{names[0]}" if node.kind == "bool" else f"~{names[0]}"
        if node.op == "bool":
            return f"{names[0]} != 0"
        power = _power_of_two(node)
        if power is not None:
            return f"{names[0]} >> {power}" if node.op == "floordiv" else f"{names[0]} & {2**power - 1}"
        return EXPRESSIONS[node.op].format(*(f"({x})" if x.startswith("-") else x for x in names))

    def _load(self, node: Node, names: Sequence[str]) -> str:
        slot = node.value
        at = "".join(f" + (long long){x} * block.x{slot}_stride{axis}" for axis, x in enumerate(names))
        element = f"captured(block.x{slot}_at{at})"
        dtype = self._program.captures[slot][0]
        element = f"to_float({element})" if node.kind == "float" else f"{_TYPES[node.kind]}({element})"
        if dtype == "bool":
            element = f"captured(reinterpret_cast<unsigned char const*>(block.x{slot}_at){at}) != 0"
        if not names:
            return element
        inside = " & ".join(f"within({x}, block.x{slot}_size{axis})" for axis, x in enumerate(names))
        nothing = "not_a_number()" if node.kind == "float" else "false" if node.kind == "bool" else "0"
        return f"{inside} ? {element} : {nothing}"


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
    if abs(value) > _FLOAT32_MAX:
        return "infinity()" if value > 0 else "-infinity()"
    return f"{_FLOAT32.unpack(_FLOAT32.pack(value))[0].hex()}f"
