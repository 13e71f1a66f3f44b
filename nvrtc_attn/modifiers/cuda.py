"""A program as C++: the text that is compiled into a kernel. What a launch passes to it is made by `cuda_values`.

The text depends on the program and on which captured arrays get a gradient, on no name, number, length or address:
equal programs have one kernel. ``cuda_src/nvrtc_attn/collective/modifier.cuh`` has what it is made of.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from .calls import definitions
from .cuda_expressions import ARITHMETIC, LEAVES, TYPES, Text, is_cheap, members_of, with_quick_quotients
from .cuda_gradients import Of, additions, adds_by_distance, adds_plainly, gradients_of, is_one, selected, sums_of_lines
from .cuda_values import block_fields
from .derivative import ZERO, derivatives
from .diagonals import diagonals, is_diagonal, takes_long
from .graph import SCORE, Node, walk
from .modifier import Program

_MAX_LIGHT: Final = 12
"""Operations of a score that the widest tiles have registers for."""
_BLOCK_BYTES: Final = re.compile(r"^// ModifierBlock: (\d+) bytes$", re.MULTILINE)
_GRADIENTS: Final = re.compile(r"^  static constexpr int k(?:Distance|Head)Gradients = (\d+);", re.MULTILINE)


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
    slope = with_quick_quotients(slopes.get(SCORE, ZERO))
    gradients = gradients_of(slopes, trained)
    if program.score is not None:
        program = replace(program, score=with_quick_quotients(program.score))
    roots = [x for x in (program.score, program.mask, slope) if x is not None]
    roots += [x for load, d in gradients for x in (d, *load.args)]
    members = members_of(roots)
    text = Text(program, members, roots)
    plainly = bool(gradients) and adds_plainly(program, slope, gradients)
    distances_train = bool(gradients) and not plainly and adds_by_distance(slope, gradients)
    block = block_fields(program, trained, ordered)
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
        "  // dS of equal distances is summed first, in the 16 bits that dq and dk have of it.",
        f"  static constexpr bool kTrainsByDistance = {str(distances_train).lower()};",
        "  // The score's derivative is 1, or the same for all scores of a head.",
        f"  static constexpr bool kUnitSlope = {str(is_one(slope)).lower()};",
        f"  static constexpr bool kHeadSlope = {str(slope.depends <= {'b', 'h'}).lower()};",
        "  ModifierBlock const& block;",
        "  int b, h;",
        *(f"  {TYPES[x.kind]} {name};" for x, name in members.items()),
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
                program.mask, Text(program, members, roots, without_branch=True), Text(program, members, roots)
            ),
        ]
    if gradients:
        lines += additions(text, gradients, ordered, plainly or distances_train)
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


def block_bytes(text: str) -> int:
    """Size of the ``ModifierBlock`` of a text."""
    found = _BLOCK_BYTES.search(text)
    if found is None:
        raise ValueError("the text of a modifier does not say how many bytes it takes")
    return int(found.group(1))


def sums_held(text: str) -> int:
    """How many sums of captured arrays' elements each warp holds in kernels with this text."""
    return sum(int(x) for x in _GRADIENTS.findall(text))


def _mask_in_parts(mask: Node, of_one: Text, of_both: Text) -> list[str]:
    """`keeps` of what a query and a key have alone: read and computed once for a row or column of a tile of scores."""
    lines: list[str] = []
    names: dict[Node, str] = {}
    for kind, values, position in (("Queries", "queries", "q"), ("Keys", "keys", "k")):
        alone = _alone(mask, position)
        names |= {x: f"of_{position}.x{i}" for i, x in enumerate(alone)}
        lines += [
            f"  struct {kind} {{",
            f"    static constexpr bool kShared = {str(not all(map(is_cheap, walk(alone)))).lower()};",
            *(f"    {TYPES[x.kind]} x{i};" for i, x in enumerate(alone)),
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


def _adds_value(score: Node) -> bool:
    """Whether a score is the product's and one float that its distance decides, no more."""
    values = diagonals([score], is_cheap)
    return len(values) == 1 and values[0].kind == "float" and score.op == "add" and set(score.args) == {SCORE, *values}


def _along_diagonals(
    program: Program,
    members: dict[Node, str],
    roots: Sequence[Node],
    slope: Node,
    gradients: Sequence[tuple[Node, Node]],
) -> list[str]:
    """What distances alone decide of a score, its slope and what it gives to gradients; nothing where that is cheap."""
    assert program.score is not None
    values = diagonals([program.score, slope, *(d for _, d in gradients)], is_cheap)
    if not values:
        return []
    others = selected(gradients, Of.PLACE)
    summed = [(len(others) + i, *x) for i, x in enumerate(selected(gradients, Of.DISTANCE))]
    # Found with the values, and kept by the lane that has them: the places of what is summed.
    indices = [x for _, load, _ in summed for x in load.args if is_diagonal(x) and takes_long(x, is_cheap)]
    indices = [x for x in dict.fromkeys(indices) if x not in values]
    names = {x: f"of.x{i}" for i, x in enumerate(values)} | {x: f"of.y{i}" for i, x in enumerate(indices)}
    of_one, of_score, of_slope, of_sums, of_ends = (Text(program, members, roots) for _ in range(5))
    parts = [*(f"value_of_lane(x{i}, lane)" for i in range(len(values))), *(f"y{i}" for i in range(len(indices)))]
    lines = [
        "  // What the distance of query and key decides. Lanes hold one diagonal each; y: of the own alone.",
        "  struct Diagonal {",
        *(f"    {TYPES[x.kind]} {names[x][3:]};" for x in (*values, *indices)),
        "    NVRTC_ATTN_DEVICE Diagonal of_lane(int lane) const {",
        f"      return {{{', '.join(parts)}}};",
        "    }",
        "  };",
        "  // A score is the product and x0, no more.",
        f"  static constexpr bool kAddsDiagonal = {str(_adds_value(program.score)).lower()};",
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
        *sums_of_lines(of_sums, gradients),
        "  }",
        "  template <class To>",
        "  NVRTC_ATTN_DEVICE void give(To& to, float const (&sums)[kSummedAlong], int q, int k,",
        "                              Diagonal const& of, int q0 = 0, int k0 = 0) const {",
        *of_ends.body([x for _, load, _ in summed for x in load.args], given=names),
        *(of_ends.addition(place, load, f"sums[{i}]").replace("if (", f"if (sums[{i}] != 0.0f && ", 1)
          for i, (place, load, _) in enumerate(summed)),
        "  }",
    ]  # fmt: skip


def _alone(root: Node, position: str) -> tuple[Node, ...]:
    """The largest parts of a condition that depend on queries ("q") or keys ("k") alone, not the position itself."""
    found: dict[Node, None] = {}
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        on = node.depends & {"q", "k"}
        if node in seen or node.op in LEAVES or position not in on:
            continue
        seen.add(node)
        if len(on) == 1:
            found.setdefault(node)
        else:
            stack += reversed(node.args)
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def has_head_slope(program: Program) -> bool:
    """Whether the score's derivative is the same for all scores of a head, as ``kHeadSlope`` in the text."""
    return program.score is None or derivatives(program.score).get(SCORE, ZERO).depends <= {"b", "h"}


def computes_little(mask: Node) -> bool:
    """Whether a condition reads no element for a query or key, and computes nothing that takes long."""
    return all(is_cheap(x) for x in walk([mask]) if x.depends & {"q", "k"})


def takes_registers(program: Program) -> bool:
    """Whether a score takes registers beside its own: a mask, an element that is read, a function, many operations."""
    if program.mask is not None or program.score is None:
        return True
    own = [x for x in walk([program.score]) if not x.depends <= {"b", "h"}]
    return len(own) > _MAX_LIGHT or any(x.op not in ARITHMETIC for x in own)


def only_computes(program: Program) -> bool:
    """Whether there is a score without a mask, and it reads no element for a query or key."""
    if program.mask is not None or program.score is None:
        return False
    return not any(x.op == "load" and x.depends & {"q", "k"} for x in walk([program.score]))


@functools.lru_cache(maxsize=1024)
def adds_distance(program: Program) -> bool:
    """Whether a score_mod adds what the distance of query and key decides, and does nothing else: ``kAddsDiagonal``."""
    return program.score is not None and _adds_value(with_quick_quotients(program.score))
