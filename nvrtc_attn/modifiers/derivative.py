"""Derivatives of an expression, as expressions: with respect to the score and to every element it loads.

Where a function has a kink its derivative is one of the two sides', at a tie of minimum and maximum that of the first
operand. Steps (rounding, ``//``, comparisons, casts of integers) have none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Final

from ..base.errors import UnsupportedError
from .calls import derivative_rule, text_of
from .graph import SCORE, Node, make, number, walk

_Rule = Callable[[Node, Node], tuple[Node | None, ...]]
"""From a node and the derivative with respect to it to those with respect to its operands."""

ZERO: Final = number(0.0)


def _f(value: float) -> Node:
    return number(float(value))


def _unary(of: Callable[[Node, Node], Node]) -> _Rule:
    """The rule of a function of one operand, whose derivative is ``of(node, operand)``."""
    return lambda node, d: (make("mul", d, of(node, node.args[0])),)


def _where(node: Node, d: Node) -> tuple[Node | None, ...]:
    condition = node.args[0]
    return None, make("where", condition, d, ZERO), make("where", condition, ZERO, d)


def _extreme(comparison: str) -> _Rule:
    def rule(node: Node, d: Node) -> tuple[Node | None, ...]:
        first = make(comparison, *node.args)
        return make("where", first, d, ZERO), make("where", first, ZERO, d)

    return rule


def _power(node: Node, d: Node) -> tuple[Node | None, ...]:
    base, exponent = node.args
    below = make("pow", base, make("sub", exponent, _f(1)))
    of_base = make("mul", d, make("mul", exponent, below))
    if exponent.op in ("number", "param"):
        return of_base, None
    # The power of 0 stays what it is, and its logarithm is infinite: the product of both would be NaN.
    grown = make("mul", node, make("log", base))
    return of_base, make("mul", d, make("where", make("eq", base, _f(0)), ZERO, grown))


def _none(node: Node, d: Node) -> tuple[Node | None, ...]:
    return (None,) * len(node.args)


RULES: Final[dict[str, _Rule]] = {
    "add": lambda node, d: (d, d),
    "sub": lambda node, d: (d, make("neg", d)),
    "mul": lambda node, d: (make("mul", d, node.args[1]), make("mul", d, node.args[0])),
    "div": lambda node, d: (
        make("div", d, node.args[1]),
        make("neg", make("div", make("mul", d, node), node.args[1])),
    ),
    "neg": lambda node, d: (make("neg", d),),
    "mod": lambda node, d: (d, make("neg", make("mul", d, make("floor", make("div", *node.args))))),
    "minimum": _extreme("le"),
    "maximum": _extreme("ge"),
    "where": _where,
    "pow": _power,
    "abs": _unary(lambda node, x: make("sign", x)),
    "exp": _unary(lambda node, x: node),
    "exp2": _unary(lambda node, x: make("mul", node, _f(math.log(2)))),
    "expm1": _unary(lambda node, x: make("add", node, _f(1))),
    "log": _unary(lambda node, x: make("div", _f(1), x)),
    "log2": _unary(lambda node, x: make("div", _f(1 / math.log(2)), x)),
    "log1p": _unary(lambda node, x: make("div", _f(1), make("add", x, _f(1)))),
    "sqrt": _unary(lambda node, x: make("div", _f(0.5), node)),
    "rsqrt": _unary(lambda node, x: make("div", make("mul", _f(-0.5), node), x)),
    "tanh": _unary(lambda node, x: make("sub", _f(1), make("mul", node, node))),
    "sigmoid": _unary(lambda node, x: make("mul", node, make("sub", _f(1), node))),
    "sin": _unary(lambda node, x: make("cos", x)),
    "cos": _unary(lambda node, x: make("neg", make("sin", x))),
    "atan": _unary(lambda node, x: make("div", _f(1), make("add", _f(1), make("mul", x, x)))),
    "call": derivative_rule,
    "erf": _unary(lambda node, x: make("mul", _f(2 / math.sqrt(math.pi)), make("exp", make("neg", make("mul", x, x))))),
    **dict.fromkeys(("floor", "ceil", "round", "trunc", "sign", "floordiv", "float", "int", "bool"), _none),
}
"""Of the operations that give floats; the others have no derivative."""


def derivatives(root: Node) -> dict[Node, Node]:
    """D root / d node, for the score and for every element of a floating-point array that ``root`` depends on.

    A zero derivative is left out.
    """
    order = []
    matters: set[Node] = set()  # a derivative with respect to it is wanted, or leads to one that is
    for x in walk([root]):
        if x == SCORE or (x.op == "load" and x.kind == "float") or not matters.isdisjoint(x.args):
            matters.add(x)
        if x.kind == "float":
            order.append(x)
    found: dict[Node, Node] = {root: _f(1)}
    for node in reversed(order):
        d = found.get(node)
        if d is None or node.op in ("score", "load", "number", "param"):
            continue
        for operand, part in zip(node.args, RULES[node.op](node, d), strict=True):
            if part is None or operand.kind != "float" or operand not in matters:
                continue
            found[operand] = make("add", found[operand], part) if operand in found else part
    return {x: d for x, d in found.items() if x == SCORE or x.op == "load"}


def slope(root: Node) -> Node:
    """D root / d score."""
    return derivatives(root).get(SCORE, ZERO)


@functools.lru_cache(maxsize=1024)
def missing_derivatives(score: Node, trained: tuple[int, ...]) -> tuple[str, ...]:
    """The derivatives that a backward pass needs and nobody wrote: with respect to the score, and trained arrays."""
    wanted = [d for x, d in derivatives(score).items() if x == SCORE or x.value in trained]
    return tuple(
        dict.fromkeys(text_of(x.value).name for x in walk(wanted) if x.op == "call" and text_of(x.value).body is None)
    )


def check_derivatives(score: Node | None, trained: tuple[int, ...]) -> None:
    """Refuse a backward pass without the derivatives that it needs.

    Raises
    ------
    UnsupportedError
        The message names them.
    """
    missing = () if score is None else missing_derivatives(score, trained)
    if missing:
        raise UnsupportedError(
            f"score_mod: {', '.join(missing)} is needed for the backward pass, and nvrtc_attn.cuda_function got no "
            f"such body. Pass it in derivatives=."
        )
