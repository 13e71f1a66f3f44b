"""What scores give to the gradients of captured arrays, as C++: by what selects an element (``Of``).

``cuda_src/nvrtc_attn/collective/modifier.cuh`` has where the sums wait, docs/kernels.md why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import IntEnum

from .cuda_expressions import Text, is_cheap, with_quick_quotients
from .derivative import ZERO, derivatives
from .diagonals import diagonals, is_diagonal
from .graph import SCORE, Node
from .modifier import Program


class Of(IntEnum):
    """What selects an element that is trained, beside batch entry and head, in the order of the text."""

    PLACE = 0
    """Query and key, or the score."""
    DISTANCE = 1
    KEY = 2
    QUERY = 3
    HEAD = 4
    """Nothing else."""


Gradients = Sequence[tuple[Node, Node]]
"""Elements of trained arrays, each with the score's derivative."""


def gradients_of(slopes: Mapping[Node, Node], trained: tuple[int, ...]) -> Gradients:
    found = [(x, with_quick_quotients(d)) for x, d in slopes.items() if x.op == "load" and x.value in trained]
    return sorted(found, key=lambda x: _selected_by(x[0]))


def _selected_by(load: Node) -> Of:
    on = load.depends - {"b", "h"}
    if is_diagonal(load):
        return Of.DISTANCE
    return {frozenset(): Of.HEAD, frozenset("k"): Of.KEY, frozenset("q"): Of.QUERY}.get(frozenset(on), Of.PLACE)


def selected(gradients: Gradients, *kinds: Of) -> Gradients:
    return [x for x in gradients if _selected_by(x[0]) in kinds]


def adds_plainly(program: Program, slope: Node, gradients: Gradients) -> bool:
    """Whether all gradients are of elements of the head, and a score's place decides how much of its ds they get.

    The kernel computes that for every score, so nothing of it may be worth computing once for a distance.
    """
    of_head = all(_selected_by(load) == Of.HEAD and "score" not in d.depends for load, d in gradients)
    if program.score is None or not of_head:
        return False
    return not diagonals([program.score, slope, *(d for _, d in gradients)], is_cheap)


def is_one(slope: Node) -> bool:
    """Whether a derivative is 1 whatever the score and its place."""
    return slope.op == "number" and slope.value == 1


def adds_by_distance(slope: Node, gradients: Gradients) -> bool:
    """Whether ds of a score is that of the product, and the distance alone decides who gets it and how much."""
    return is_one(slope) and all(
        _selected_by(load) in (Of.DISTANCE, Of.HEAD) and (d.depends <= {"b", "h"} or is_diagonal(d))
        for load, d in gradients
    )


def trains_plainly(program: Program, trained: tuple[int, ...]) -> bool:
    """Whether nothing is trained, or the text will say ``kTrainsPlainly`` or ``kTrainsByDistance``."""
    if program.score is None or not trained:
        return True
    slopes = derivatives(program.score)
    gradients = gradients_of(slopes, trained)
    score, slope = (with_quick_quotients(x) for x in (program.score, slopes.get(SCORE, ZERO)))
    plainly = adds_plainly(replace(program, score=score), slope, gradients)
    return not gradients or plainly or adds_by_distance(slope, gradients)


def additions(text: Text, gradients: Gradients, ordered: bool, plainly: bool) -> list[str]:
    """What a score's gradient ds gives to those of captured arrays; ``plainly``: also where no score is known."""
    elements = selected(gradients, Of.PLACE, Of.DISTANCE)
    of_keys, of_queries, of_heads = (selected(gradients, x) for x in (Of.KEY, Of.QUERY, Of.HEAD))
    lines = [
        "  // What a score's gradient ds gives to those of captured arrays: to elements of its place, the last of them",
        "  // of its distance, and to those of its key, its query and its head.",
        f"  static constexpr int kElementGradients = {len(elements)};",
        f"  static constexpr int kDistanceGradients = {len(selected(elements, Of.DISTANCE))};",
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
        *sums_of_lines(text, gradients),
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


def sums_of_lines(text: Text, gradients: Gradients) -> list[str]:
    """Lines that add to sums of keys, queries and heads: nothing where ds is 0, whatever the derivative is."""
    sums = {Of.KEY: "of_key", Of.QUERY: "of_query", Of.HEAD: "to.heads"}
    return [
        f"    {name}.x[{i}] += ds != 0.0f ? ds * {text.name(d)} : 0.0f;"
        for which, name in sums.items()
        for i, (_, d) in enumerate(selected(gradients, which))
    ]
