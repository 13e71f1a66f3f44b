"""Ranges of values, and the range of every operation of the graph from those of its operands, in NumPy.

A range may be too wide but never too narrow. ``cuda_tiles`` writes the same rules in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .evaluate import FUNCTIONS
from .graph import Node

Array = npt.NDArray[Any]
SLACK: Final = 2.0**-15
"""Relative width that a result of floating-point numbers gets on both sides: more than all rounding of its operands'
values to float32 and of the kernels' approximate functions, exp of 80 with 8e-6 the worst."""
ABSOLUTE: Final = 1e-6
"""The same of functions whose error near 0 is absolute; tanh of 16-bit kernels has 2.4e-7."""
TINY: Final = 1e-30
"""A number this small may be 0 in a kernel."""
LARGEST: Final = 3.4e38
_INT: Final = (-(2.0**31), 2.0**31 - 1)
_MONOTONE: Final = {"exp": (-np.inf, 0), "exp2": (-np.inf, 0), "expm1": (-np.inf, 1), "log": (0.0, 1), "log2": (0.0, 1),
                    "log1p": (-1.0, 1), "sqrt": (0.0, 0), "tanh": (-np.inf, 1), "sigmoid": (-np.inf, 0),
                    "atan": (-np.inf, 1), "erf": (-np.inf, 1)}  # fmt: skip
"""Growing functions: below which number they are not defined, and whether their error is absolute."""


class Range(NamedTuple):
    """Bounds in float64, which holds every int32. NaN as ``low``: anything, not-a-number included."""

    low: Array
    high: Array


def anything(node: Node, shape: tuple[int, ...]) -> tuple[Array, Array]:
    if node.kind == "bool":
        return np.zeros(shape), np.ones(shape)
    return np.full(shape, np.nan if node.kind == "float" else -np.inf), np.full(shape, np.inf)


def of_values(values: Array, node: Node) -> Range:
    """The ranges that values are, of a float with its rounding to float32."""
    x = np.asarray(values).astype(np.float64)
    if node.kind != "float":
        return Range(x, x)
    rounded = x.astype(np.float32).astype(np.float64)
    width = np.where(rounded == x, 0.0, np.abs(x) * SLACK)
    # What operations made of b and h alone is computed in float32 by a kernel, too.
    if node.op not in ("number", "load", "param"):
        width = np.abs(x) * SLACK
    return _marked(x - width, x + width)


def _marked(low: Array, high: Array) -> Range:
    """NaN in both where it is in one."""
    bad = np.isnan(low) | np.isnan(high)
    return Range(np.where(bad, np.nan, low), np.where(bad, np.inf, high))


def combine(node: Node, args: list[Range]) -> Range:
    """The range of an operation from those of its operands."""
    if node.op == "call":
        return Range(*anything(node, np.broadcast_shapes(*(x.low.shape for x in args))))
    if node.op == "where":
        return _where(node, *args)
    if node.op in ("lt", "le", "gt", "ge", "eq", "ne"):
        return _compared(node.op, *args)
    if node.kind == "bool":
        return _logic(node.op, args)
    if node.op in ("mul", "and", "minimum", "maximum") and node.args[0] is node.args[1]:
        low, high = args[0]
        if node.op != "mul":
            return args[0]
        least = np.where((low <= 0) & (high >= 0), 0.0, np.minimum(np.abs(low), np.abs(high)))
        most = np.maximum(np.abs(low), np.abs(high))
        return _fitted(node, least * least, most * most)
    return _fitted(node, *_RULES[node.op](node, *args))


def _fitted(node: Node, low: Array, high: Array) -> Range:
    """The result of a rule: int32, or with room for rounding."""
    if node.kind == "int":
        outside = ~((low >= _INT[0]) & (high <= _INT[1]))
        return Range(np.where(outside, -np.inf, low), np.where(outside, np.inf, high))
    if node.op in ("neg", "abs", "sign", "minimum", "maximum", "floor", "ceil", "round", "trunc"):
        return _marked(low, high)
    more = ABSOLUTE if node.op in ("sin", "cos") or _MONOTONE.get(node.op, (0, 0))[1] else 0.0
    low, high = low - np.abs(low) * SLACK - more, high + np.abs(high) * SLACK + more
    low = np.where((low > 0) & (low < TINY), 0.0, low)
    high = np.where((high < 0) & (high > -TINY), 0.0, high)
    return _marked(np.where(low < -LARGEST, -np.inf, low), np.where(high > LARGEST, np.inf, high))


def _corners(function: Callable[[Array, Array], Array], a: Range, b: Range) -> tuple[Array, Array]:
    found = [function(x, y) for x in a for y in b]
    low, high = found[0], found[0]
    for x in found[1:]:
        low, high = np.minimum(low, x), np.maximum(high, x)  # NaN stays
    return low, high


def _finite(*ranges: Range) -> Array:
    found = np.ones((), np.bool_)
    for x in ranges:
        found = found & np.isfinite(x.low) & np.isfinite(x.high)
    return found


def _where_else(condition: Array, values: tuple[Array, Array], node: Node) -> tuple[Array, Array]:
    """``values`` where the condition holds, else anything."""
    low, high = anything(node, ())
    return np.where(condition, values[0], low), np.where(condition, values[1], high)


def _two(function: Callable[[Array, Array], Array]) -> Callable[..., tuple[Array, Array]]:
    return lambda node, a, b: _where_else(_finite(a, b), _corners(function, a, b), node)


def _divided(node: Node, a: Range, b: Range) -> tuple[Array, Array]:
    apart = _finite(a, b) & ((b.low > 0) | (b.high < 0))
    if node.op == "div":
        return _where_else(apart, _corners(np.divide, a, b), node)
    if node.kind == "int":
        return _where_else(apart, _corners(np.floor_divide, a, b), node)
    low, high = _corners(np.divide, a, b)
    return _where_else(apart, (np.floor(low - np.abs(low) * SLACK), np.floor(high + np.abs(high) * SLACK)), node)


def _remainder(node: Node, a: Range, b: Range) -> tuple[Array, Array]:
    positive, negative = _finite(b) & (b.low > 0), _finite(b) & (b.high < 0)
    rest = node.kind == "int"
    low = np.where(positive, 0.0, b.low + rest)
    high = np.where(positive, b.high - rest, 0.0)
    if node.kind == "float":  # a - floor(a / b) * b has the rounding error of a
        error = np.maximum(np.abs(a.low), np.abs(a.high)) * SLACK + ABSOLUTE
        return _where_else((positive | negative) & _finite(a), (low - error, high + error), node)
    same = _finite(a) & (b.low == b.high) & (np.floor_divide(a.low, b.low) == np.floor_divide(a.high, b.low))
    low, high = np.where(same, np.mod(a.low, b.low), low), np.where(same, np.mod(a.high, b.low), high)
    return _where_else(positive | negative, (low, high), node)


def _power(node: Node, a: Range, b: Range) -> tuple[Array, Array]:
    low, high = _corners(np.power, a, b)
    return _where_else(_finite(a, b) & (a.low > 0), (low - np.abs(low) * SLACK, high + np.abs(high) * SLACK), node)


def _growing(node: Node, a: Range) -> tuple[Array, Array]:
    least, _ = _MONOTONE[node.op]
    strict = node.op != "sqrt"
    defined = ~np.isnan(a.low) & ((a.low > least) if strict and np.isfinite(least) else (a.low >= least))
    function = FUNCTIONS[node.op]
    return _where_else(defined, (function(a.low), function(a.high)), node)


def _rsqrt(node: Node, a: Range) -> tuple[Array, Array]:
    return _where_else(a.low > 0, (1 / np.sqrt(a.high), 1 / np.sqrt(a.low)), node)


def _periodic(node: Node, a: Range) -> tuple[Array, Array]:
    return _where_else(_finite(a), (np.asarray(-1.0), np.asarray(1.0)), node)


def _absolute(node: Node, a: Range) -> tuple[Array, Array]:
    both = (a.low <= 0) & (a.high >= 0)
    low, high = np.minimum(np.abs(a.low), np.abs(a.high)), np.maximum(np.abs(a.low), np.abs(a.high))
    return np.where(both, 0.0, low), high


def _bits(node: Node, a: Range, b: Range) -> tuple[Array, Array]:
    finite = _finite(a, b)
    points = finite & (a.low == a.high) & (b.low == b.high)
    x, y = (np.where(points, r.low, 0).astype(np.int64) for r in (a, b))
    exact = FUNCTIONS[node.op](x, y).astype(np.float64)
    if node.op == "and":
        # Of a number that is not negative no more than that number is left; 2 ** n - 1 is a remainder.
        low = np.zeros(np.broadcast_shapes(a.low.shape, b.low.shape))
        high = np.minimum(np.where(a.low >= 0, a.high, np.inf), np.where(b.low >= 0, b.high, np.inf))
        low = np.where(np.isfinite(high), low, -np.inf)
        for one, other in ((a, b), (b, a)):
            width = np.where(finite & (other.low == other.high) & (other.low >= 0), other.low + 1, 0)
            power = (width > 0) & (np.log2(np.maximum(width, 1)) % 1 == 0)
            same = power & (np.floor_divide(one.low, width) == np.floor_divide(one.high, width))
            low = np.where(same, np.mod(one.low, width), low)
            high = np.where(same, np.mod(one.high, width), high)
    else:
        most = np.maximum(a.high, b.high)
        ceiling = np.exp2(np.ceil(np.log2(np.maximum(most, 0) + 1))) - 1
        low, high = _where_else(finite & (a.low >= 0) & (b.low >= 0), (np.zeros_like(ceiling), ceiling), node)
    return np.where(points, exact, low), np.where(points, exact, high)


def _shifted(node: Node, a: Range, b: Range) -> tuple[Array, Array]:
    usable = _finite(a, b) & (b.low >= 0) & (b.high <= 31)
    factor = Range(np.exp2(np.where(usable, b.low, 0)), np.exp2(np.where(usable, b.high, 0)))
    function = np.multiply if node.op == "shl" else np.floor_divide
    return _where_else(usable, _corners(function, a, factor), node)


def _least(node: Node, a: Range, b: Range) -> tuple[Array, Array]:
    function = np.minimum if node.op == "minimum" else np.maximum
    low, high = function(a.low, b.low), function(a.high, b.high)
    return low, high


def _to_int(node: Node, a: Range) -> tuple[Array, Array]:
    low, high = (np.trunc(x) for x in a) if node.args[0].kind == "float" else a
    return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(low), np.inf, high)


def _both(function: Callable[[Any], Any]) -> Callable[..., tuple[Array, Array]]:
    return lambda node, a: (function(a.low), function(a.high))


_RULES: Final[Mapping[str, Callable[..., tuple[Array, Array]]]] = {
    "add": lambda node, a, b: _where_else(_finite(a, b), (a.low + b.low, a.high + b.high), node),
    "sub": lambda node, a, b: _where_else(_finite(a, b), (a.low - b.high, a.high - b.low), node),
    "mul": _two(np.multiply),
    "div": _divided,
    "floordiv": _divided,
    "mod": _remainder,
    "minimum": _least,
    "maximum": _least,
    "pow": _power,
    "rsqrt": _rsqrt,
    "sin": _periodic,
    "cos": _periodic,
    "neg": lambda node, a: (-a.high, -a.low),
    "abs": _absolute,
    "sign": _both(np.sign),
    "floor": _both(np.floor),
    "ceil": _both(np.ceil),
    "round": _both(np.rint),
    "trunc": _both(np.trunc),
    "and": _bits,
    "or": _bits,
    "xor": _bits,
    "not": lambda node, a: (-a.high - 1, -a.low - 1),
    "shl": _shifted,
    "shr": _shifted,
    "float": lambda node, a: (a.low, a.high),
    "int": _to_int,
    **dict.fromkeys(_MONOTONE, _growing),
}


def _compared(op: str, a: Range, b: Range) -> Range:
    if op in ("gt", "ge"):
        op, a, b = ("lt" if op == "gt" else "le"), b, a
    unknown = np.isnan(a.low) | np.isnan(b.low)
    if op in ("eq", "ne"):
        never = (a.high < b.low) | (b.high < a.low)
        always = (a.low == a.high) & (b.low == b.high) & (a.low == b.low) & np.isfinite(a.low)
        if op == "ne":
            never, always = always, never
    elif op == "lt":
        always, never = a.high < b.low, a.low >= b.high
    else:
        always, never = a.high <= b.low, a.low > b.high
    return Range((always & ~unknown).astype(np.float64), (~(never & ~unknown)).astype(np.float64))


def _logic(op: str, args: list[Range]) -> Range:
    a, b = args[0], args[-1]
    if op == "not":
        return Range(1 - a.high, 1 - a.low)
    if op == "and":
        return Range(np.minimum(a.low, b.low), np.minimum(a.high, b.high))
    if op == "or":
        return Range(np.maximum(a.low, b.low), np.maximum(a.high, b.high))
    if op == "xor":
        known = (a.low == a.high) & (b.low == b.high)
        differ = (a.low != b.low).astype(np.float64)
        return Range(np.where(known, differ, 0.0), np.where(known, differ, 1.0))
    assert op == "bool"
    unknown = np.isnan(a.low)
    zero, only_zero = (a.low <= 0) & (a.high >= 0), (a.low == 0) & (a.high == 0)
    return Range((~zero & ~unknown).astype(np.float64), (~only_zero | unknown).astype(np.float64))


def _where(node: Node, condition: Range, a: Range, b: Range) -> Range:
    low = np.where(condition.low > 0, a.low, np.where(condition.high > 0, np.minimum(a.low, b.low), b.low))
    high = np.where(condition.low > 0, a.high, np.where(condition.high > 0, np.maximum(a.high, b.high), b.high))
    return _marked(low, high)
