"""What the functions of NumPy and torch are made of: names and parameters of theirs, operations of `graph`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..base.errors import TraceError
from .graph import ARITHMETIC, FLOAT32_MAX, FLOAT_UNARY, ROUNDING, SAME_UNARY, Node, constant, make, number

_0: Final = number(0.0)
_1: Final = number(1.0)
_WHOLE_1: Final = number(1)
_MINUS_1: Final = number(-1.0)
_SLOPE: Final = number(0.01)
_LARGEST: Final = number(FLOAT32_MAX)
_SMALLEST: Final = number(-FLOAT32_MAX)


def _f(x: float) -> Node:
    return number(float(x))


def _below_0(x: Node) -> Node:
    """Where the sign is negative, that of -0.0 too."""
    below = make("lt", x, number(0))
    return make("or", below, make("lt", make("div", _1, x), _0)) if x.kind == "float" else below


def _product(*factors: Node) -> Node:
    first, *rest = factors
    for x in rest:
        first = make("mul", first, x)
    return first


def clamp(x: Node, low: Node | None = None, high: Node | None = None) -> Node:
    if low is not None:
        x = make("maximum", x, low)
    return x if high is None else make("minimum", x, high)


def _softplus(x: Node, beta: Node = _1, threshold: Node | None = None) -> Node:
    """Beyond ``threshold`` torch returns x, which this is there up to rounding."""
    scaled = make("mul", x, beta)
    return make("div", _logaddexp(scaled, _0), beta)


def _rounded(x: Node, decimals: Node | None = None) -> Node:
    if decimals is not None and constant(decimals) != 0:
        raise TraceError("'round' to decimals is not possible in a modifier: multiply, round and divide.")
    return make("round", x)


def quotient_towards_zero(x: Node, b: Node) -> Node:
    """Of integers, as C's."""
    quotient = make("floordiv", make("abs", x), make("abs", b))
    return make("mul", quotient, make("mul", make("sign", x), make("sign", b)))


def _fmod(x: Node, b: Node) -> Node:
    """With the sign of the dividend, as C's."""
    size = make("abs", b)
    below = make("neg", make("mod", make("neg", x), size))
    return make("where", make("lt", x, number(0)), below, make("mod", x, size))


def _logaddexp(x: Node, b: Node, base: str = "exp", log1p: float = 1.0) -> Node:
    """Where both are equal, minimum and maximum have the derivative of their first operand: half of each is left."""
    difference = make("sub", x, b)
    nearest = make("minimum", make("neg", difference), difference)
    larger = make("maximum", x, b)
    grown = make("add", larger, make("mul", make("log1p", make(base, nearest)), _f(log1p)))
    both_infinite = make("and", make("eq", x, b), make("eq", make("abs", larger), _f(math.inf)))
    return make("where", both_infinite, larger, grown)


def _beside_nan(comparison: str) -> Callable[[Node, Node], Node]:
    """The larger or smaller of two, the other one of a NaN. torch gives the gradient of equal ones to the first."""

    def function(x: Node, b: Node) -> Node:
        known = constant(b)
        absent = make("ne", b, b) if b.kind == "float" and (known is None or known != known) else number(False)
        return make("where", make("or", make(comparison, x, b), absent), x, b)

    return function


def _hypot(x: Node, b: Node) -> Node:
    """At 0 the derivative is 0, where that of the root is infinite."""
    x, b = make("float", x), make("float", b)  # the product of two conditions is one
    squares = make("add", make("mul", x, x), make("mul", b, b))
    nothing = make("eq", squares, number(0))
    return make("where", nothing, _0, make("sqrt", make("where", nothing, _1, squares)))


def _saturated(x: Node, low: Node = _MINUS_1, high: Node = _1) -> Node:
    """`clamp` without a derivative at the bounds, as torch's activations are."""
    return make("minimum", high, make("maximum", low, x))


def _gelu(x: Node) -> Node:
    return _product(x, _f(0.5), make("add", _1, make("erf", make("mul", x, _f(math.sqrt(0.5))))))


def _gelu_tanh(x: Node) -> Node:
    inner = make("mul", _f(math.sqrt(2 / math.pi)), make("add", x, _product(_f(0.044715), x, x, x)))
    return _product(x, _f(0.5), make("add", _1, make("tanh", inner)))


def _elu(x: Node, alpha: Node = _1) -> Node:
    # Of the smaller one: what is not chosen has a derivative, too, and times 0 an infinite one is NaN.
    grown = make("mul", alpha, make("expm1", make("minimum", x, _0)))
    return make("where", make("gt", x, number(0)), x, grown)


def _leaky_relu(x: Node, negative_slope: Node = _SLOPE) -> Node:
    return make("where", make("gt", x, number(0)), x, make("mul", negative_slope, x))


def _nan_to_num(x: Node, nan: Node = _0, posinf: Node = _LARGEST, neginf: Node = _SMALLEST) -> Node:
    if x.kind != "float":
        return x
    found = make("where", make("ne", x, x), nan, x)
    found = make("where", make("eq", x, _f(math.inf)), posinf, found)
    return make("where", make("eq", x, _f(-math.inf)), neginf, found)


def _sinh(x: Node) -> Node:
    return make("mul", _f(0.5), make("sub", make("expm1", x), make("expm1", make("neg", x))))


def _hardsigmoid(x: Node) -> Node:
    return make("div", _saturated(make("add", x, _f(3)), _0, _f(6)), _f(6))


KEYWORDS: Final = {
    "input": "x", "self": "x", "a": "x", "x1": "x", "other": "b", "x2": "b", "y": "b", "exponent": "b",
    "a_min": "low", "a_max": "high", "min": "low", "max": "high", "min_val": "low", "max_val": "high",
    "mask": "condition",
}  # fmt: skip
"""What the frameworks call the parameters of `FUNCTIONS`."""
FUNCTIONS: Final[dict[str, Callable[..., Node]]] = {
    "where": lambda condition, x, b: make("where", condition, x, b),
    "masked_fill": lambda x, condition, value: make("where", condition, value, x),
    "round": _rounded,
    "around": _rounded,
    "clamp": clamp,
    "clip": clamp,
    "clamp_min": lambda x, low: clamp(x, low),
    "clamp_max": lambda x, high: clamp(x, None, high),
    "relu": lambda x: make("maximum", number(0), x),
    "relu6": lambda x: _saturated(x, number(0), number(6)),
    "hardtanh": _saturated,
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda x: make("mul", x, _hardsigmoid(x)),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: make("mul", x, make("sigmoid", x)),
    "mish": lambda x: make("mul", x, make("tanh", _softplus(x))),
    "softplus": _softplus,
    "softsign": lambda x: make("div", x, make("add", _1, make("abs", x))),
    "tanhshrink": lambda x: make("sub", x, make("tanh", x)),
    "log_sigmoid": lambda x: make("neg", _softplus(make("neg", x))),
    "threshold": lambda x, threshold, value: make("where", make("le", x, threshold), value, x),
    "square": lambda x: make("pow", x, number(2)),
    "reciprocal": lambda x: make("div", _1, x),
    "rsub": lambda x, b: make("sub", b, x),
    "fmod": _fmod,
    "fmax": _beside_nan("ge"),
    "fmin": _beside_nan("le"),
    "frac": lambda x: make("sub", x, make("trunc", x)),
    "tan": lambda x: make("div", make("sin", x), make("cos", x)),
    "sinh": _sinh,
    "cosh": lambda x: make("mul", _f(0.5), make("add", make("exp", x), make("exp", make("neg", x)))),
    "log10": lambda x: make("mul", make("log2", x), _f(math.log10(2))),
    "erfc": lambda x: make("sub", _1, make("erf", x)),
    "hypot": _hypot,
    "lerp": lambda x, end, weight: make("add", x, make("mul", weight, make("sub", end, x))),
    "addcmul": lambda x, tensor1, tensor2, value=_WHOLE_1: make("add", x, _product(value, tensor1, tensor2)),
    "addcdiv": lambda x, tensor1, tensor2, value=_WHOLE_1: make(
        "add", x, make("mul", value, make("div", tensor1, tensor2))
    ),
    "logaddexp": _logaddexp,
    "logaddexp2": lambda x, b: _logaddexp(x, b, "exp2", 1 / math.log(2)),
    "copysign": lambda x, b: make("where", _below_0(b), make("neg", make("abs", x)), make("abs", make("float", x))),
    "isnan": lambda x: make("ne", x, x) if x.kind == "float" else number(False),
    "isinf": lambda x: make("eq", make("abs", x), _f(math.inf)) if x.kind == "float" else number(False),
    "isfinite": lambda x: make("lt", make("abs", x), _f(math.inf)) if x.kind == "float" else number(True),
    "nan_to_num": _nan_to_num,
    "float": lambda x: make("float", x), "half": lambda x: make("float", x), "bfloat16": lambda x: make("float", x),
    "double": lambda x: make("float", x),
    "int": lambda x: make("int", x), "long": lambda x: make("int", x), "bool": lambda x: make("bool", x),
    "logical_not": lambda x: make("not", make("bool", x)),
}  # fmt: skip
for _name in ("and", "or", "xor"):
    FUNCTIONS[f"logical_{_name}"] = lambda x, b, op=_name: make(op, make("bool", x), make("bool", b))
# Names of NumPy, torch and of methods that mean one operation.
_ALIASES: Final[dict[str, str]] = {
    **{name: name for name in (
        *FLOAT_UNARY, *ROUNDING, *SAME_UNARY, *ARITHMETIC, "div", "lt", "le", "gt", "ge", "eq", "ne", "pow",
    )},
    "absolute": "abs", "fabs": "abs", "negative": "neg", "rint": "round", "subtract": "sub", "multiply": "mul",
    "divide": "div", "true_divide": "div", "truediv": "div", "floor_divide": "floordiv", "floordiv": "floordiv",
    "remainder": "mod", "power": "pow", "float_power": "pow", "less": "lt", "less_equal": "le", "greater": "gt",
    "greater_equal": "ge", "equal": "eq", "not_equal": "ne", "bitwise_and": "and", "bitwise_or": "or",
    "bitwise_xor": "xor", "bitwise_not": "not", "invert": "not", "left_shift": "shl", "right_shift": "shr",
    "bitwise_left_shift": "shl", "bitwise_right_shift": "shr", "lshift": "shl", "rshift": "shr", "and": "and",
    "or": "or", "xor": "xor", "special_expit": "sigmoid",
    "special_erf": "erf", "special_exp2": "exp2", "special_log1p": "log1p", "special_expm1": "expm1",
    "arctan": "atan", "sgn": "sign", "fix": "trunc",
}  # fmt: skip
for _name, _op in _ALIASES.items():
    if _op in (*FLOAT_UNARY, *ROUNDING, *SAME_UNARY, "not"):
        FUNCTIONS.setdefault(_name, lambda x, op=_op: make(op, x))
    else:
        FUNCTIONS.setdefault(_name, lambda x, b, op=_op: make(op, x, b))
for _name, _same in (("special_erfc", "erfc"), ("_threshold", "threshold")):
    FUNCTIONS[_name] = FUNCTIONS[_same]
POWERS: Final = frozenset(name for name, op in _ALIASES.items() if op == "pow")
"""Functions with an exponent."""
_SIGNATURES: Final = {
    name: [x for x in inspect.signature(function).parameters.values() if x.name not in ("op", "base", "log1p")]
    for name, function in FUNCTIONS.items()
}
PARAMETERS: Final = {name: tuple(x.name for x in parameters) for name, parameters in _SIGNATURES.items()}
"""Of each function, in their order."""
NEEDED: Final = {
    name: tuple(x.name for x in parameters if x.default is inspect.Parameter.empty)
    for name, parameters in _SIGNATURES.items()
}
"""Those that have no default."""
_WRAPPING: Final = ("add", "sub", "mul", "neg", "abs", "not", "pow", "shl", "square", "rsub", "addcmul", "lerp")
WRAPPING: Final = frozenset((*_WRAPPING, *(name for name, op in _ALIASES.items() if op in _WRAPPING)))
"""Functions, and operations, whose result an integer of 8 or 16 bits may not hold."""


def arguments_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of `PARAMETERS`, and those of torch's options that mean something.

    Raises
    ------
    TraceError
        There are too many, one is given twice or missing, or it is an option that would be left out.
    """
    names = PARAMETERS[name]
    given = dict(zip(names, args, strict=False))
    wrong = len(args) > len(names)
    for key, x in kwargs.items():
        place = key if key in names else KEYWORDS.get(key, key)
        if place not in names:
            if x is None or x is False:
                continue  # out=None, inplace=False
            if name.startswith("gelu") and key == "approximate" and x in ("none", "tanh"):
                continue
            known = (key == "alpha" and name in ("add", "sub", "subtract", "rsub")) or (
                key == "rounding_mode" and name in ("div", "divide") and x in ("floor", "trunc")
            )
            wrong |= not known
        elif given.get(place) is not None:
            wrong = True
        given[place] = x
    given = {key: x for key, x in given.items() if x is not None}
    if wrong or any(x not in given for x in NEEDED[name]):
        raise TraceError(
            f"{name!r} with {len(args)} arguments and {sorted(kwargs) or 'no'} options is not possible in a modifier; "
            f"it takes {', '.join(names)}."
        )
    return given
