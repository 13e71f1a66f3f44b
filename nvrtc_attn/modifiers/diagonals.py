"""What an expression has of the distance of query and key alone: a learned table of distances, T5's buckets.

A tile of scores has few distances: 16 rows and 128 columns have 143. What takes long of them is computed once for each
by the warp, not for every score, and the gradient of an element that a distance selects is summed along its diagonal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from .graph import COMPARISONS, INPUTS, Node, operands_first, walk

_NO_OPERATION = (*INPUTS, "number", "param")


@functools.lru_cache(maxsize=4096)
def sum_of(node: Node) -> dict[Node | None, int] | None:
    """The terms of an integer with their factors, under None the literal one; None where it is no such sum."""
    return operands_first(_sum_step, node) if node.kind == "int" else _sum_step(node)


@functools.lru_cache(maxsize=4096)
def _sum_step(node: Node) -> dict[Node | None, int] | None:
    if node.op == "number":  # a float may be infinite, and what it is compared with is no sum of integers
        return {None: int(node.value)} if node.kind == "int" else None
    if node.op in ("q", "k") or node.depends <= {"b", "h"}:
        return {node: 1}
    if node.kind != "int" or node.op not in ("add", "sub", "neg", "mul"):
        return None
    parts = [_sum_step(x) for x in node.args]
    a, b = parts[0], parts[-1]
    if a is None or b is None:
        return None
    if node.op == "neg":
        return {x: -n for x, n in a.items()}
    if node.op == "mul":
        factor, other = (a, b) if set(a) == {None} else (b, a)
        return {x: n * factor[None] for x, n in other.items()} if set(factor) == {None} else None
    sign = 1 if node.op == "add" else -1
    return {x: a.get(x, 0) + sign * b.get(x, 0) for x in [*a, *(y for y in b if y not in a)]}


def _difference(a: Node, b: Node) -> dict[Node | None, int] | None:
    """What decides a comparison of two such sums, which may have a position each."""
    terms, others = sum_of(a), sum_of(b)
    if terms is None or others is None:
        return None
    return {x: terms.get(x, 0) - others.get(x, 0) for x in [*terms, *others]}


@functools.lru_cache(maxsize=4096)
def is_diagonal(node: Node) -> bool:
    """Whether it depends on query and key, through their distance alone, whatever else but the score."""
    on = node.depends & {"score", "q", "k"}
    if "score" in on or not on:
        return False
    terms = _difference(*node.args) if node.op in COMPARISONS else sum_of(node)
    if terms is not None:
        factors = {x.op: n for x, n in terms.items() if x is not None and x.op in ("q", "k")}
        return factors.get("q", 0) == -factors.get("k", 0) != 0
    return node.op not in _NO_OPERATION and all(is_diagonal(x) for x in node.args if x.depends & {"q", "k"})


def diagonals(roots: Sequence[Node], cheap: Callable[[Node], bool]) -> tuple[Node, ...]:
    """The largest parts of ``roots`` that distances have, but for those that are made of ``cheap`` operations."""
    found: dict[Node, None] = {}
    stack, seen = list(reversed(roots)), set()
    while stack:
        node = stack.pop()
        if node in seen or not node.depends & {"q", "k"}:
            continue
        seen.add(node)
        if not is_diagonal(node):
            stack += reversed(node.args)
        elif takes_long(node, cheap):
            found.setdefault(node)
    return tuple(found)


def takes_long(node: Node, cheap: Callable[[Node], bool]) -> bool:
    """Whether an operation that a distance is needed for is not ``cheap``."""
    return not all(cheap(x) for x in walk([node]) if x.depends & {"q", "k"})
