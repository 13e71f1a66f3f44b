"""A program as C++: the text that is compiled into a kernel, and the bytes that a launch passes to it.

The text depends on the program and on which captured arrays get a gradient, on no name, number, length or address:
equal programs have one kernel. ``cuda_src/nvrtc_attn/collective/modifier.cuh`` has what it is made of.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ..base.dtypes import DTYPES
from ..base.errors import TraceError, UnsupportedError
from .calls import definitions, text_of
from .derivative import ZERO, derivatives
from .diagonals import diagonals, is_diagonal, sum_of, takes_long
from .graph import COMPARISONS, FLOAT32_MAX, INPUTS, ROUNDING, SCORE, Node, make, number, walk
from .modifier import Program

_TYPES: Final = {"float": "float", "int": "int", "bool": "bool"}
_LEAVES: Final = (*INPUTS, "number", "param")
_WORD_BYTES: Final = 8 * 33
"""Of the sum of one element: ``ExactSum::kWords`` in ``collective/modifier.cuh``."""
MAX_ORDERED_BYTES: Final = 1 << 30
_QUICK: Final = "quick"
"""Value of a division that need not be rounded to the nearest."""
_STEPS: Final = (*ROUNDING, *COMPARISONS, "floordiv", "mod", "int", "bool", "sign", "call")
_MAX_LIGHT: Final = 12
"""Operations of a score that the widest tiles have registers for."""
_MAX_FACTOR: Final = 1 << 10
"""Of q, k and the literal in a position: sums of them stay below 2^24, and far below int32's end."""
_FLOAT32: Final = struct.Struct("f")
_NOTHING_GIVEN: Final[Mapping[Node, str]] = MappingProxyType({})
_BLOCK_BYTES: Final = re.compile(r"^// ModifierBlock: (\d+) bytes$", re.MULTILINE)
_GRADIENTS: Final = re.compile(r"^  static constexpr int k(?:Distance|Head)Gradients = (\d+);", re.MULTILINE)

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


@functools.lru_cache(maxsize=1024)
def cuda_source(
    program: Program, trained: tuple[int, ...] = (), ordered: bool = False, by_distance: bool = True
) -> str:
    """The definitions of ``ModifierBlock`` and ``Modifier`` for a program.

    Parameters
    ----------
    trained
        The captured arrays whose gradients the kernel adds up.
    ordered
        In words of integers (``ExactSum``), which ``kernel/captured_sum.cuh`` makes the gradients of.
    by_distance
        What distances alone decide is computed once for each distance of a tile (``diagonals``), where that pays.

    Raises
    ------
    TraceError
        A literal that int32 does not hold.
    """
    slopes = {} if program.score is None else derivatives(program.score)
    slope = _with_quick_quotients(slopes.get(SCORE, ZERO))
    gradients = _gradients(slopes, trained)
    if program.score is not None:
        program = replace(program, score=_with_quick_quotients(program.score))
    roots = [x for x in (program.score, program.mask, slope) if x is not None]
    roots += [x for load, d in gradients for x in (d, *load.args)]
    members = _members(roots)
    text = _Text(program, members, roots)
    plainly = bool(gradients) and _adds_plainly(program, slope, gradients)
    distances_train = bool(gradients) and not plainly and _adds_by_distance(program, slope, gradients)
    block = _block_fields(program, trained, ordered)
    block = block or [("long long", "nothing_at")]  # C++ has no struct of 0 bytes
    size = 8 * -(-sum(8 if name.endswith("_at") else 4 for _, name in block) // 8)
    lines = [
        f"// ModifierBlock: {size} bytes",
        "namespace nvrtc_attn {",
        *definitions(roots),
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
        "  // What a score gives to gradients is known without it, and is of elements that the head alone selects.",
        f"  static constexpr bool kTrainsPlainly = {str(plainly).lower()};",
        "  // What gradients get is known of the sum of ds over scores of the same distance, as it is for dq and dk.",
        f"  static constexpr bool kTrainsByDistance = {str(distances_train).lower()};",
        "  // The score's derivative is 1, or the same for all scores of a head.",
        f"  static constexpr bool kUnitSlope = {str(slope.op == 'number' and slope.value == 1).lower()};",
        f"  static constexpr bool kHeadSlope = {str(slope.depends <= {'b', 'h'}).lower()};",
        "  ModifierBlock const& block;",
        "  int b, h;",
        *(f"  {_TYPES[x.kind]} {name};" for x, name in members.items()),
        *text.slice_members(),
        "  NVRTC_ATTN_DEVICE Modifier(ModifierBlock const& block_, int b_, int h_) : block(block_) {",
        "    move_to(b_, h_);",
        "  }",
        "  NVRTC_ATTN_DEVICE void move_to(int b_, int h_) {",
        "    b = b_, h = h_;",
        *text.body([*members, *text.slice_indices()], inside=True),
        *(f"    {name} = {text.name(x, inside=True)};" for x, name in members.items()),
        *text.slice_values(),
        "  }",
    ]
    if program.score is not None:
        lines += [
            "  // (q0, k0): where the caller's offsets begin, which it knows when it is compiled.",
            "  NVRTC_ATTN_DEVICE float score(float score, int q, int k, int q0 = 0, int k0 = 0) const {",
            *text.body([program.score]),
            f"    return {text.name(program.score)};",
            "  }",
            "  NVRTC_ATTN_DEVICE float score(float score, int q, int k, float& slope, int q0 = 0, int k0 = 0) const {",
            *text.body([program.score, slope]),
            f"    slope = {text.name(slope)};",
            f"    return {text.name(program.score)};",
            "  }",
        ]
    if program.score is not None and slope.depends <= {"b", "h"}:
        lines += [
            "  NVRTC_ATTN_DEVICE float head_slope() const {",
            *text.body([slope]),
            f"    return {text.name(slope)};",
            "  }",
        ]
    if program.mask is not None:
        lines += [
            "  NVRTC_ATTN_DEVICE bool keeps(int q, int k, int q0 = 0, int k0 = 0) const {",
            *text.body([program.mask]),
            f"    return {text.name(program.mask)};",
            "  }",
            *_mask_in_parts(
                program.mask, _Text(program, members, roots, without_branch=True), _Text(program, members, roots)
            ),
        ]
    if gradients:
        lines += _additions(text, gradients, ordered, plainly or distances_train)
    if by_distance and program.score is not None:
        lines += _along_diagonals(program, members, roots, slope, gradients)
    if ordered:
        lines += [
            "  template <class Take>",
            "  static NVRTC_ATTN_DEVICE void each_gradient(ModifierBlock const& block, Take&& take) {",
            *(f"    take(block.g{i}_at, block.r{i}_at, block.g{i}_count);" for i in trained),
            "  }",
        ]
    return "\n".join([*lines, "};", "}  // namespace nvrtc_attn", ""])


class _Of(IntEnum):
    """What selects an element that is trained, beside batch entry and head, in the order of the text."""

    PLACE = 0
    """Query and key, or the score."""
    DISTANCE = 1
    KEY = 2
    QUERY = 3
    HEAD = 4
    """Nothing else."""


_Gradients = Sequence[tuple[Node, Node]]
"""Elements of trained arrays, each with the score's derivative."""


def _gradients(slopes: Mapping[Node, Node], trained: tuple[int, ...]) -> _Gradients:
    found = [(x, _with_quick_quotients(d)) for x, d in slopes.items() if x.op == "load" and x.value in trained]
    return sorted(found, key=lambda x: _selected_by(x[0]))


def _selected_by(load: Node) -> _Of:
    on = load.depends - {"b", "h"}
    if is_diagonal(load):
        return _Of.DISTANCE
    return {frozenset(): _Of.HEAD, frozenset("k"): _Of.KEY, frozenset("q"): _Of.QUERY}.get(frozenset(on), _Of.PLACE)


def _selected(gradients: _Gradients, *kinds: _Of) -> _Gradients:
    return [x for x in gradients if _selected_by(x[0]) in kinds]


def _adds_plainly(program: Program, slope: Node, gradients: _Gradients) -> bool:
    """Whether all gradients are of elements of the head, and a score's place decides how much of its ds they get.

    The kernel computes that for every score, so nothing of it may be worth computing once for a distance.
    """
    of_head = all(_selected_by(load) == _Of.HEAD and "score" not in d.depends for load, d in gradients)
    if program.score is None or not of_head:
        return False
    return not diagonals([program.score, slope, *(d for _, d in gradients)], _is_cheap)


def _adds_by_distance(program: Program, slope: Node, gradients: _Gradients) -> bool:
    """Whether ds of a score is that of the product, and the distance alone decides who gets it and how much."""
    if program.score is None or slope.op != "number" or slope.value != 1:
        return False
    return all(
        _selected_by(load) in (_Of.DISTANCE, _Of.HEAD) and (d.depends <= {"b", "h"} or is_diagonal(d))
        for load, d in gradients
    )


def trains_plainly(program: Program, trained: tuple[int, ...]) -> bool:
    """Whether nothing is trained, or the text will say ``kTrainsPlainly`` or ``kTrainsByDistance``."""
    if program.score is None or not trained:
        return True
    slopes = derivatives(program.score)
    gradients = _gradients(slopes, trained)
    score, slope = (_with_quick_quotients(x) for x in (program.score, slopes.get(SCORE, ZERO)))
    program = replace(program, score=score)
    return not gradients or any(x(program, slope, gradients) for x in (_adds_plainly, _adds_by_distance))


def _additions(text: _Text, gradients: _Gradients, ordered: bool, plainly: bool) -> list[str]:
    """What a score's gradient ds gives to those of captured arrays; ``plainly``: also where no score is known."""
    elements = _selected(gradients, _Of.PLACE, _Of.DISTANCE)
    of_keys, of_queries, of_heads = (_selected(gradients, x) for x in (_Of.KEY, _Of.QUERY, _Of.HEAD))
    lines = [
        "  // What a score's gradient ds gives to those of captured arrays: to elements of its place, the last of them",
        "  // of its distance, and to those of its key, its query and its head.",
        f"  static constexpr int kElementGradients = {len(elements)};",
        f"  static constexpr int kDistanceGradients = {len(_selected(elements, _Of.DISTANCE))};",
        f"  static constexpr int kKeyGradients = {len(of_keys)};",
        f"  static constexpr int kQueryGradients = {len(of_queries)};",
        f"  static constexpr int kHeadGradients = {len(of_heads)};",
        f"  using Sum = {'ExactSum' if ordered else 'AtomicSum'};",
        f"  using Gradients = CapturedGradient<Sum>[{len(elements)}];" if elements else "  struct Gradients {};",
        "  template <class To>",
        "  NVRTC_ATTN_DEVICE void add(To& to, ElementSums<kKeyGradients>& of_key,",
        "                             ElementSums<kQueryGradients>& of_query, float score, float ds, int q, int k,",
        "                             int q0 = 0, int k0 = 0) const {",
        *text.body([d for _, d in gradients] + [x for load, _ in elements for x in load.args]),
        *(text.addition(place, load, f"ds * {text.name(d)}") for place, (load, d) in enumerate(elements)),
        *_sums_of_lines(text, gradients),
        "  }",
    ]
    if plainly:
        lines += [
            "  template <class To>",
            "  NVRTC_ATTN_DEVICE void add_plainly(To& to, float ds, int q, int k, int q0 = 0, int k0 = 0) const {",
            "    ElementSums<0> none;",
            "    add(to, none, none, 0.0f, ds, q, k, q0, k0);",
            "  }",
        ]
    for what, which, arguments in (
        ("heads", of_heads, "ElementSums<kHeadGradients> const& of"),
        ("keys", of_keys, "ElementSums<kKeyGradients> const& of, int k"),
        ("queries", of_queries, "ElementSums<kQueryGradients> const& of, int q"),
    ):
        if which:
            lines += [
                "  template <class Give>",
                f"  NVRTC_ATTN_DEVICE void give_{what}({arguments}, Give&& give) const {{",
                *text.body([x for load, _ in which for x in load.args]),
                *(text.addition_of_sum(i, load) for i, (load, _) in enumerate(which)),
                "  }",
            ]
    return lines


def _sums_of_lines(text: _Text, gradients: _Gradients) -> list[str]:
    """Lines that add to sums of keys, queries and heads: nothing where ds is 0, whatever the derivative is."""
    sums = {_Of.KEY: "of_key", _Of.QUERY: "of_query", _Of.HEAD: "to.heads"}
    return [
        f"    {name}.x[{i}] += ds != 0.0f ? ds * {text.name(d)} : 0.0f;"
        for which, name in sums.items()
        for i, (_, d) in enumerate(_selected(gradients, which))
    ]


def block_bytes(text: str) -> int:
    """Size of the ``ModifierBlock`` of a text."""
    found = _BLOCK_BYTES.search(text)
    if found is None:
        raise ValueError("the text of a modifier does not say how many bytes it takes")
    return int(found.group(1))


def sums_held(text: str) -> int:
    """How many sums of captured arrays' elements each warp holds in kernels with this text."""
    return sum(int(x) for x in _GRADIENTS.findall(text))


class ModifierValues(NamedTuple):
    """What a launch passes to a modifier: the bytes of its ``ModifierBlock``, and memory to set to zero before."""

    block: bytes
    zeroed: tuple[tuple[int, int], ...]
    """(address, bytes) of the gradients that the kernel adds to."""


NO_MODIFIER: Final = ModifierValues(b"", ())


def ordered_bytes(trained: tuple[int, ...], captures: Sequence[Any]) -> int:
    """Memory for the sums of gradients that are to have no order of additions.

    Raises
    ------
    UnsupportedError
        It is more than `MAX_ORDERED_BYTES`.
    """
    nbytes: int = sum(_WORD_BYTES * math.prod(captures[i].shape) for i in trained)
    if nbytes > MAX_ORDERED_BYTES:
        raise UnsupportedError(
            f"deterministic: the gradients of captured arrays of {nbytes // _WORD_BYTES} elements take {nbytes} bytes "
            f"of sums without an order, and {MAX_ORDERED_BYTES} are allowed. An array that is added and indexed with "
            "b, h, q and k alone is a bias, whose gradient takes none."
        )
    return nbytes


def modifier_values(
    program: Program,
    trained: tuple[int, ...],
    captures: Sequence[Any],
    gradients: Sequence[Any],
    numbers: Sequence[float],
    words: int | None = None,
) -> ModifierValues:
    """The values of one call. ``captures`` and ``gradients`` are views of device memory.

    ``words`` is the address of `ordered_bytes` of memory for sums that have no order; None: atomics add to gradients.

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
    values: list[Any] = [x.ptr for x in captures]
    results = [gradients[i].ptr for i in trained]
    counts = [nbytes // 4 for _, nbytes in zeroed]
    if words is None:
        values += results
    else:
        places = [words + _WORD_BYTES * sum(counts[:n]) for n in range(len(counts))]
        values += [*places, *results]
        zeroed = [(words, _WORD_BYTES * sum(counts))]
    for x in (*captures, *(gradients[i] for i in trained)):
        if any(abs(stride) >= 2**31 for stride in (*x.strides, *x.shape)):
            raise UnsupportedError(
                f"a captured array of shape {x.shape} has strides {x.strides}, and kernels read int32 ones: copy it"
            )
    for x in captures:
        values += (*x.shape, *x.strides)
    for i in trained:
        values += gradients[i].strides if words is None else [_WORD_BYTES // 8 * x for x in gradients[i].strides]
    if words is not None:
        values += counts
    values += numbers
    data = _packer(program, trained, words is not None).pack(*values)
    return ModifierValues(data.ljust(-(-len(data) // 8) * 8, b"\0"), tuple(x for x in zeroed if x[1]))


@functools.lru_cache(maxsize=1024)
def _packer(program: Program, trained: tuple[int, ...], ordered: bool) -> struct.Struct:
    letters = {"float": "f", "int": "i"}
    codes = ["Q" if name.endswith("_at") else letters[kind] for kind, name in _block_fields(program, trained, ordered)]
    return struct.Struct("<" + "".join(codes))


def _block_fields(program: Program, trained: tuple[int, ...], ordered: bool) -> list[tuple[str, str]]:
    """(type, name) of each field: pointers, sizes and strides of arrays, strides of gradients, numbers."""
    fields = [(f"{DTYPES[dtype].cpp} const*", f"x{i}_at") for i, (dtype, _) in enumerate(program.captures)]
    fields += [("ExactSum::Word*" if ordered else "float*", f"g{i}_at") for i in trained]
    fields += [("float*", f"r{i}_at") for i in trained if ordered]
    for i, (_, rank) in enumerate(program.captures):
        fields += [("int", f"x{i}_size{axis}") for axis in range(rank)]
        fields += [("int", f"x{i}_stride{axis}") for axis in range(rank)]
    for i in trained:
        fields += [("int", f"g{i}_stride{axis}") for axis in range(program.captures[i][1])]
    fields += [("int", f"g{i}_count") for i in trained if ordered]
    return fields + [(kind, f"n{i}") for i, kind in enumerate(program.numbers)]


def _mask_in_parts(mask: Node, of_one: _Text, of_both: _Text) -> list[str]:
    """`keeps` of what a query and a key have alone: read and computed once for a row or column of a tile of scores."""
    lines: list[str] = []
    names: dict[Node, str] = {}
    for kind, values, position in (("Queries", "queries", "q"), ("Keys", "keys", "k")):
        alone = _alone(mask, position)
        names |= {x: f"of_{position}.x{i}" for i, x in enumerate(alone)}
        lines += [
            f"  struct {kind} {{",
            f"    static constexpr bool kShared = {str(not all(map(_is_cheap, walk(alone)))).lower()};",
            *(f"    {_TYPES[x.kind]} x{i};" for i, x in enumerate(alone)),
            f"    NVRTC_ATTN_DEVICE {kind} of_lane(int lane) const {{",
            f"      return {{{', '.join(f'value_of_lane(x{i}, lane)' for i in range(len(alone)))}}};",
            "    }",
            "  };",
            f"  NVRTC_ATTN_DEVICE {kind} {values}(int {position}, int {position}0 = 0) const {{",
            *of_one.body(alone),
            f"    return {{{', '.join(of_one.name(x) for x in alone)}}};",
            "  }",
        ]
    return [
        *lines,
        "  NVRTC_ATTN_DEVICE bool keeps(int q, int k, Queries const& of_q, Keys const& of_k, int q0 = 0,",
        "                               int k0 = 0) const {",
        *of_both.body([mask], given=names),
        f"    return {names.get(mask) or of_both.name(mask)};",
        "  }",
    ]


def _along_diagonals(
    program: Program,
    members: dict[Node, str],
    roots: Sequence[Node],
    slope: Node,
    gradients: Sequence[tuple[Node, Node]],
) -> list[str]:
    """What distances alone decide of a score, its slope and what it gives to gradients; nothing where that is cheap."""
    assert program.score is not None
    values = diagonals([program.score, slope, *(d for _, d in gradients)], _is_cheap)
    if not values:
        return []
    others = _selected(gradients, _Of.PLACE)
    summed = [(len(others) + i, *x) for i, x in enumerate(_selected(gradients, _Of.DISTANCE))]
    # Found with the values, and kept by the lane that has them: the places of what is summed.
    indices = [x for _, load, _ in summed for x in load.args if is_diagonal(x) and takes_long(x, _is_cheap)]
    indices = [x for x in dict.fromkeys(indices) if x not in values]
    names = {x: f"of.x{i}" for i, x in enumerate(values)} | {x: f"of.y{i}" for i, x in enumerate(indices)}
    of_one, of_score, of_slope, of_sums, of_ends = (_Text(program, members, roots) for _ in range(5))
    parts = [*(f"value_of_lane(x{i}, lane)" for i in range(len(values))), *(f"y{i}" for i in range(len(indices)))]
    lines = [
        "  // What the distance of query and key decides. Lanes hold one diagonal each; y: of the own alone.",
        "  struct Diagonal {",
        *(f"    {_TYPES[x.kind]} {names[x][3:]};" for x in (*values, *indices)),
        "    NVRTC_ATTN_DEVICE Diagonal of_lane(int lane) const {",
        f"      return {{{', '.join(parts)}}};",
        "    }",
        "  };",
        "  NVRTC_ATTN_DEVICE Diagonal diagonal(int q, int k, int q0 = 0, int k0 = 0) const {",
        *of_one.body([*values, *indices]),
        f"    return {{{', '.join(of_one.name(x) for x in (*values, *indices))}}};",
        "  }",
        "  NVRTC_ATTN_DEVICE float score(float score, int q, int k, Diagonal const& of, int q0 = 0,",
        "                                int k0 = 0) const {",
        *of_score.body([program.score], given=names),
        f"    return {of_score.name(program.score)};",
        "  }",
        "  NVRTC_ATTN_DEVICE float score(float score, int q, int k, float& slope, Diagonal const& of, int q0 = 0,",
        "                                int k0 = 0) const {",
        *of_slope.body([program.score, slope], given=names),
        f"    slope = {of_slope.name(slope)};",
        f"    return {of_slope.name(program.score)};",
        "  }",
    ]
    if not summed:
        return lines
    needed = [d for _, d in gradients] + [x for load, _ in others for x in load.args]
    return [
        *lines,
        "  // A score's part of the sums along its diagonal; what those give to elements, by the lane that has them.",
        f"  static constexpr int kSummedAlong = {len(summed)};",
        "  template <class To>",
        "  NVRTC_ATTN_DEVICE void add(To& to, ElementSums<kKeyGradients>& of_key,",
        "                             ElementSums<kQueryGradients>& of_query, float (&sums)[kSummedAlong],",
        "                             float score, float ds, int q, int k, Diagonal const& of, int q0 = 0,",
        "                             int k0 = 0) const {",
        *of_sums.body(needed, given=names),
        *(f"    sums[{i}] += ds != 0.0f ? ds * {of_sums.name(d)} : 0.0f;" if d.op != "number" else
          f"    sums[{i}] += ds * {of_sums.name(d)};" for i, (_, _, d) in enumerate(summed)),
        *(of_sums.addition(place, load, f"ds * {of_sums.name(d)}").replace("if (", "if (ds != 0.0f && ", 1)
          for place, (load, d) in enumerate(others)),
        *_sums_of_lines(of_sums, gradients),
        "  }",
        "  template <class To>",
        "  NVRTC_ATTN_DEVICE void give(To& to, float const (&sums)[kSummedAlong], int q, int k,",
        "                              Diagonal const& of, int q0 = 0, int k0 = 0) const {",
        *of_ends.body([x for _, load, _ in summed for x in load.args], given=names),
        *(of_ends.addition(place, load, f"sums[{i}]").replace("if (", f"if (sums[{i}] != 0.0f && ", 1)
          for i, (place, load, _) in enumerate(summed)),
        "  }",
    ]  # fmt: skip


def _is_cheap(node: Node) -> bool:
    """Whether every thread had better compute it than get it from another one of its warp."""
    return node.op in _ARITHMETIC or node.op in _OF_BITS or _power_of_two(node) is not None


def _alone(root: Node, position: str) -> tuple[Node, ...]:
    """The largest parts of a condition that depend on queries ("q") or keys ("k") alone, not the position itself."""
    found: dict[Node, None] = {}
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        on = node.depends & {"q", "k"}
        if node in seen or node.op in _LEAVES or position not in on:
            continue
        seen.add(node)
        if len(on) == 1:
            found.setdefault(node)
        else:
            stack += reversed(node.args)
    return tuple(found)


def _with_quick_quotients(root: Node) -> Node:
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


def _members(roots: Sequence[Node]) -> dict[Node, str]:
    """Values of a batch entry and head that are computed once a tile: those that something else is made of."""
    ahead = {x for x in walk(roots) if x.depends <= {"b", "h"} and x.op not in _LEAVES}
    used = dict.fromkeys(x for node in walk(roots) if node not in ahead for x in node.args if x in ahead)
    used |= dict.fromkeys(x for x in roots if x in ahead)
    return {x: f"head{i}" for i, x in enumerate(used)}


class _Text:
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
            if node in done or node.op in _LEAVES or (node in self._members and not inside):
                continue
            if not ready:
                pending.append((node, True))
                pending += [(x, False) for x in reversed(_operands(node))]
                continue
            done.add(node)
            kind = _TYPES[node.kind]
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
        element = f"to_float({element})" if node.kind == "float" else f"{_TYPES[node.kind]}({element})"
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


@functools.lru_cache(maxsize=1024)
def has_head_slope(program: Program) -> bool:
    """Whether the score's derivative is the same for all scores of a head, as ``kHeadSlope`` in the text."""
    return program.score is None or derivatives(program.score).get(SCORE, ZERO).depends <= {"b", "h"}


def computes_little(mask: Node) -> bool:
    """Whether a condition reads no element for a query or key, and computes nothing that takes long."""
    return all(_is_cheap(x) for x in walk([mask]) if x.depends & {"q", "k"})


_ARITHMETIC: Final = frozenset(
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


def takes_registers(program: Program) -> bool:
    """Whether a score takes registers beside its own: a mask, an element that is read, a function, many operations."""
    if program.mask is not None or program.score is None:
        return True
    own = [x for x in walk([program.score]) if not x.depends <= {"b", "h"}]
    return len(own) > _MAX_LIGHT or any(x.op not in _ARITHMETIC for x in own)


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
