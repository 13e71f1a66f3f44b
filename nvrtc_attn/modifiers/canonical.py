"""What of a modifier the options of a call say already: causal, a window, a softcap, a bias.

Such a call runs the kernel that it would run with those options, whose machine code knows no modifier.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from .graph import POSITIONS, SCORE, Node, constant, make, operands_first, walk
from .modifier import Modifier

_MAX_TERMS: Final = 64  # of a sum that are looked at; a sum of sums has exponentially many
_INVERSE: Final = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Keys ``low <= k - q <= high``; None is no bound."""

    low: int | None = None
    high: int | None = None

    def within(self, other: Bounds) -> Bounds:
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        return Bounds(max(lows, default=None), min(highs, default=None))


@dataclass(frozen=True, slots=True)
class BiasOperand:
    """A captured array that is a bias: which one, and which of its dims is each of b, h, q and k (None = broadcast)."""

    capture: int
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Canonical:
    """The parts of a modifier. ``modifier`` is what is left, None when nothing is."""

    modifier: Modifier | None
    kept: tuple[int, ...]
    """Which captured arrays ``modifier`` has, by their place in the whole one."""
    bounds: Bounds
    softcap: float
    bias: BiasOperand | None


def canonical(
    modifier: Modifier, *, bounds: bool = True, softcap: bool = True, bias: frozenset[int] = frozenset()
) -> Canonical:
    """Take a modifier apart.

    Parameters
    ----------
    bounds, softcap
        Whether a band, or a softcap, may be taken out.
    bias
        The captured arrays that may become a bias.
    """
    score, mask = modifier.valued
    conditions = [] if mask is None else _conditions(mask)
    while score is not None and score.op == "where":
        condition, a, b = score.args
        if "score" in condition.depends:
            break
        if constant(b) == -math.inf:
            conditions += _conditions(condition)
            score = a
        elif constant(a) == -math.inf:
            conditions += _conditions(make("not", condition))
            score = b
        else:
            break
    found_bias = None
    if score is not None and bias:
        score, found_bias = _without_bias(score, modifier, bias)
    cap = _softcap(score) if score is not None and softcap else 0.0
    if cap or score == SCORE:
        score = None

    band = Bounds()
    left = []
    for x in dict.fromkeys(conditions):
        found = _bounds(x) if bounds else None
        if found is None:
            left.append(x)
        else:
            band = band.within(found)
    rest = None
    for x in left:
        rest = x if rest is None else make("and", rest, x)
    residual, kept = (None, ()) if score is None and rest is None else Modifier.parts(score, rest, modifier.captures)
    if residual is not None:
        residual = residual.with_captures(())  # known for as long as the trace: it must not hold arrays
    return Canonical(residual, kept, band, cap, found_bias)


def _conditions(node: Node) -> list[Node]:
    """Conditions that hold together where ``node`` does, each once."""
    found: dict[Node, None] = {}
    seen = set()
    stack = [node]
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        inner = x.args[0] if x.op == "not" else x
        if x.kind != "bool":
            found[x] = None
        elif x.op == "and":
            stack += reversed(x.args)
        elif x.op == "not" and inner.op == "or":
            stack += [make("not", y) for y in reversed(inner.args)]
        elif x.op == "not" and inner.op in _INVERSE and inner.args[0].kind != "float":
            found[make(_INVERSE[inner.op], *inner.args)] = None
        else:
            found[x] = None
    return list(found)


def _bounds(node: Node) -> Bounds | None:
    """The band that a condition is, one that includes the diagonal; None of other conditions."""
    if node.op not in ("lt", "le", "gt", "ge") or any(x.kind != "int" for x in node.args):
        return None
    small, large = node.args if node.op in ("lt", "le") else node.args[::-1]
    strict = int(node.op in ("lt", "gt"))
    if small.op == "abs":
        inner, width = _linear(small.args[0]), _linear(large)
        if inner is None or width is None or width[:2] != (0, 0) or inner not in ((1, -1, 0), (-1, 1, 0)):
            return None
        reach = width[2] - strict
        return Bounds(-reach, reach) if reach >= 0 else None
    a, b = _linear(small), _linear(large)
    if a is None or b is None:
        return None
    q, k, c = (x - y for x, y in zip(a, b, strict=True))  # q * Q + k * K + c <= -strict
    if (q, k) == (-1, 1):
        high = -c - strict
        return Bounds(None, high) if high >= 0 else None
    if (q, k) == (1, -1):
        low = c + strict
        return Bounds(low, None) if low <= 0 else None
    return None


@functools.lru_cache(maxsize=4096)
def _linear(node: Node) -> tuple[int, int, int] | None:
    """(a, b, c) of an integer ``a q + b k + c``."""
    return operands_first(_linear_step, node) if node.kind == "int" else _linear_step(node)


@functools.lru_cache(maxsize=4096)
def _linear_step(node: Node) -> tuple[int, int, int] | None:
    known = constant(node)
    if known is not None:
        return (0, 0, known) if node.kind == "int" else None
    if node.op in ("q", "k"):
        return (1, 0, 0) if node.op == "q" else (0, 1, 0)
    if node.op not in ("add", "sub", "neg", "mul") or node.kind != "int":
        return None
    parts = [_linear_step(x) for x in node.args]
    a = parts[0]
    b = parts[-1]
    if a is None or b is None:
        return None
    if node.op == "neg":
        return -a[0], -a[1], -a[2]
    if node.op == "mul":
        factor, other = (a, b) if a[:2] == (0, 0) else (b, a)
        if factor[:2] != (0, 0):
            return None
        return factor[2] * other[0], factor[2] * other[1], factor[2] * other[2]
    sign = 1 if node.op == "add" else -1
    return a[0] + sign * b[0], a[1] + sign * b[1], a[2] + sign * b[2]


def _softcap(node: Node) -> float:
    """C of ``c * tanh(score / c)``, 0 of other expressions."""
    if node.op != "mul":
        return 0.0
    for outer, inner in (node.args, node.args[::-1]):
        cap = constant(outer)
        if cap is None or inner.op != "tanh" or not 1e-6 <= cap <= 1e30:
            continue
        x = inner.args[0]
        if x.op == "div" and x.args[0] == SCORE and constant(x.args[1]) == cap:
            return float(cap)
    return 0.0


def _terms(node: Node) -> Iterator[tuple[Node, Node]]:
    """Each term of a sum with the sum of the others."""
    if node.op != "add" or node.kind != "float":
        return
    a, b = node.args
    yield a, b
    yield b, a
    for inner, other in ((a, b), (b, a)):
        for term, rest in _terms(inner):
            yield term, make("add", rest, other)


def _without_bias(score: Node, modifier: Modifier, allowed: frozenset[int]) -> tuple[Node, BiasOperand | None]:
    for term, rest in itertools.islice(_terms(score), _MAX_TERMS):
        if term.op == "load" and term.value in allowed and "score" in rest.depends:
            dims = _dims(term.args, modifier.captures[term.value].shape)
            used_again = any(x.op == "load" and x.value == term.value for x in walk([rest]))
            if dims is not None and not used_again:
                return rest, BiasOperand(term.value, dims)
    return score, None


def _dims(index: Sequence[Node], shape: Sequence[int]) -> tuple[int | None, ...] | None:
    """Which dim of an array is indexed by each of b, h, q and k alone; None where another index is used."""
    dims: list[int | None] = [None] * len(POSITIONS)
    for axis, (node, size) in enumerate(zip(index, shape, strict=True)):
        if node.op in POSITIONS and dims[POSITIONS.index(node.op)] is None:
            dims[POSITIONS.index(node.op)] = axis
        elif constant(node) != 0 or size != 1:
            return None
    return tuple(dims)
