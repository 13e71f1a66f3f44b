"""From a jaxpr, what JAX makes of a function of scalars, to the expression of a modifier. JAX is not imported.

Arrays that the function captured are its constants: what is computed with them alone is computed by JAX, in whatever
transformation is going on, and elements that it reads at traced indices become operands of the kernel.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..base.errors import TraceError
from .functions import FUNCTIONS, NEEDED, WRAPPING, quotient_towards_zero
from .graph import POSITIONS, Node, constant, detached, make, number
from .recording import Recording, is_array, kind_of_dtype

_PLAIN: Final = {
    "add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "max": "maximum", "min": "minimum", "lt": "lt",
    "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne", "and": "and", "or": "or", "xor": "xor", "not": "not",
    "neg": "neg", "abs": "abs", "sign": "sign", "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log",
    "log1p": "log1p", "sqrt": "sqrt", "rsqrt": "rsqrt", "tanh": "tanh", "logistic": "sigmoid", "sin": "sin",
    "cos": "cos", "atan": "atan", "erf": "erf", "floor": "floor", "ceil": "ceil", "pow": "pow", "shift_left": "shl",
    "shift_right_arithmetic": "shr",
}  # fmt: skip
_CALLS: Final = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint",
                 "custom_vjp_call_jaxpr", "remat2")  # fmt: skip
_NAMED: Final = {"floor_divide": "floordiv", "remainder": "mod"}
"""Functions of jax.numpy that are one operation here, of integers alone: JAX spells them out."""
_RULED: Final = ("logaddexp", "logaddexp2", "relu", "relu6")
"""Functions of JAX with a rule for where they bend, which what they compute does not say: `FUNCTIONS` have it, too."""
_SAME: Final = ("copy", "copy_p", "optimization_barrier", "reduce_precision")


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of a captured array: where it begins and how large it is, and which of its dims are still there."""

    array: Any
    starts: tuple[Node, ...]
    sizes: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in self.axes)


class _Vector(tuple[Node, ...]):
    """Numbers in a row: the indices of a gather."""

    __slots__ = ()


def expression(closed: Any, recording: Recording, inputs: Sequence[Node]) -> Node:
    """The node of the one result of a closed jaxpr whose arguments are ``inputs``.

    Raises
    ------
    TraceError
        The message names the primitive that is not possible.
    """
    (result,) = _run(closed.jaxpr, closed.consts, recording, inputs)
    return _node(result, recording)


def _run(jaxpr: Any, consts: Sequence[Any], recording: Recording, inputs: Sequence[Any]) -> list[Any]:
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= dict(zip(jaxpr.invars, inputs, strict=True))

    def value(x: Any) -> Any:
        if not hasattr(x, "val"):
            return known[x]
        return x.val.item() if hasattr(x.val, "item") else x.val

    for equation in jaxpr.eqns:
        values = [value(x) for x in equation.invars]
        if equation.primitive.name in _CALLS or any(isinstance(x, Node | _Part | _Vector) for x in values):
            found = _equation(equation, values, recording)
        else:  # of constants alone
            found = _computed(equation, values)
        known |= dict(zip(equation.outvars, found, strict=True))
    return [value(x) for x in jaxpr.outvars]


def _computed(equation: Any, values: list[Any]) -> list[Any]:
    """The results of an operation of constants, numbers where all are numbers that are known now."""
    numbers = not any(is_array(x) for x in values)
    if numbers and equation.primitive.name == "convert_element_type":
        kind = str(equation.params["new_dtype"])
        return [(bool if kind == "bool" else float if "float" in kind else int)(values[0])]
    found = equation.primitive.bind(*values, **equation.params)
    results = list(found) if equation.primitive.multiple_results else [found]
    if numbers:
        with contextlib.suppress(TypeError):  # a tracer
            return [x.item() if x.ndim == 0 else x for x in results]
    return results


def _node(x: Any, recording: Recording) -> Node:
    if isinstance(x, Node):
        return x
    if isinstance(x, _Part):
        if math.prod(x.shape) != 1:
            raise _whole(x.array)
        return recording.element(x.array, tuple(x.starts))
    if isinstance(x, _Vector):
        if len(x) != 1:
            raise TraceError("an array is made, and a modifier works on one score.")
        return x[0]
    if is_array(x) and x.ndim:
        raise _whole(x)
    return recording.element(x, ()) if is_array(x) else recording.node(x)


def _whole(x: Any) -> TraceError:
    return TraceError(
        f"a captured array of shape {tuple(x.shape)} is used as a whole. Index it with b, h, q or k: a modifier works "
        f"on one score."
    )


def _equation(equation: Any, values: list[Any], recording: Recording) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name in _CALLS:
        inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
        jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
        own = _name_in_jax(jaxpr)
        named = _NAMED.get(own)
        if named is not None and len(values) == 2 and any(isinstance(x, Node) for x in values):
            nodes = [_node(x, recording) for x in values]
            if all(x.kind == "int" for x in nodes):
                return [make(named, *nodes)]
        if own in _RULED and len(values) == len(NEEDED[own]) and any(isinstance(x, Node | _Part) for x in values):
            nodes = [_node(x, recording) for x in values]
            if all(x.kind == "float" for x in nodes):
                return [FUNCTIONS[own](*nodes)]
        if name.startswith("custom_") and not own:
            raise TraceError(
                f"{name.split('_call')[0]!r}: derivatives of a modifier are those of what it computes, and a rule of "
                f"its own would be left out. jax.lax.stop_gradient stops one."
            )
        return _run(jaxpr, consts, recording, values)
    if name in (
        "squeeze",
        "reshape",
        "slice",
        "dynamic_slice",
        "gather",
        "transpose",
        "broadcast_in_dim",
        "concatenate",
    ):
        return [_shape(name, params, values, recording, equation)]
    nodes = [_node(x, recording) for x in values]
    if name in _SAME:
        return nodes
    if name == "stop_gradient":
        return [detached(x) for x in nodes]
    if name in WRAPPING or name == "integer_pow":
        recording.check_width(nodes)
    if name in _PLAIN:
        return [make(_PLAIN[name], *nodes)]
    special = _SPECIAL.get(name)
    if special is None:
        raise TraceError(f"{name!r} is not possible in a modifier, which works on one score.")
    found = special(params, *nodes)
    return [recording.widened(found) if name == "convert_element_type" else found]


def _name_in_jax(jaxpr: Any) -> str:
    """The name of a function that is JAX's; nothing of the user's, whatever that is called.

    Where JAX's have a rule of their own, it says what their computation says, but for those in `_RULED`.
    """
    name, _, where = (getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or "").partition(" at ")
    return name if any(f"{os.sep}{home}{os.sep}_src{os.sep}" in where for home in ("jax", "jaxlib")) else ""


def _part(x: Any) -> _Part:
    if isinstance(x, _Part):
        return x
    if not is_array(x):
        raise TraceError("a number is indexed: a modifier works on one score.")
    return _Part(x, (number(0),) * x.ndim, tuple(x.shape), tuple(range(x.ndim)))


def _shape(name: str, params: Any, values: list[Any], recording: Recording, equation: Any) -> Any:
    x = values[0]
    if name == "concatenate":
        return _Vector(node for y in values for node in (y if isinstance(y, _Vector) else (_node(y, recording),)))
    if isinstance(x, Node | _Vector):
        nodes = _Vector(x if isinstance(x, _Vector) else (x,))
        shape = equation.outvars[0].aval.shape
        if math.prod(shape) != len(nodes) or name not in ("squeeze", "reshape", "broadcast_in_dim"):
            raise TraceError(f"{name!r} makes an array, and a modifier works on one score.")
        return nodes if shape else nodes[0]
    part = _part(x)
    if name == "squeeze":
        kept = [axis for i, axis in enumerate(part.axes) if i not in params["dimensions"]]
        return replace(part, axes=tuple(kept))
    if name == "transpose":
        return replace(part, axes=tuple(part.axes[i] for i in params["permutation"]))
    if name in ("reshape", "broadcast_in_dim") and math.prod(part.shape) == 1 and not equation.outvars[0].aval.shape:
        return replace(part, axes=())
    if name == "slice" and params["strides"] is None:
        return _boxed(part, [number(int(i)) for i in params["start_indices"]], [
            end - start for start, end in zip(params["start_indices"], params["limit_indices"], strict=True)
        ])  # fmt: skip
    if name == "dynamic_slice":
        starts = [_index(_node(i, recording), n) for i, n in zip(values[1:], part.shape, strict=True)]
        return _boxed(part, starts, params["slice_sizes"])
    if name == "gather":
        numbers = params["dimension_numbers"]
        index = values[1] if isinstance(values[1], _Vector) else _Vector((_node(values[1], recording),))
        if len(index) == len(numbers.start_index_map) and not numbers.operand_batching_dims:
            starts = [number(0)] * len(part.axes)
            for axis, node in zip(numbers.start_index_map, index, strict=True):
                starts[axis] = _index(node, part.shape[axis])
            box = _boxed(part, starts, params["slice_sizes"])
            kept = [axis for i, axis in enumerate(box.axes) if i not in numbers.collapsed_slice_dims]
            return replace(box, axes=tuple(kept))
    raise TraceError(f"{name!r} of a captured array: an index must name one element.")


def _boxed(part: _Part, starts: Sequence[Node], sizes: Sequence[int]) -> _Part:
    begin, size = list(part.starts), list(part.sizes)
    for axis, start, n in zip(part.axes, starts, sizes, strict=True):
        begin[axis], size[axis] = make("add", begin[axis], start), int(n)
    return replace(part, starts=tuple(begin), sizes=tuple(size))


def _index(node: Node, size: int) -> Node:
    """An index without what JAX does to negative ones, where it is none."""
    if node.op == "where":
        condition, wrapped, plain = node.args
        if (
            condition.op == "lt"
            and condition.args[0] == plain
            and constant(condition.args[1]) == 0
            and wrapped == make("add", plain, number(size))
            and _never_negative(plain)
        ):
            return plain
    return node


def _never_negative(node: Node) -> bool:
    known = constant(node)
    if known is not None:
        return bool(known >= 0)
    if node.op in POSITIONS or node.op == "abs" or node.kind == "bool":
        return True
    if node.op == "mod":
        return (constant(node.args[1]) or 0) > 0
    if node.op == "floordiv":
        return _never_negative(node.args[0]) and (constant(node.args[1]) or 0) > 0
    if node.op == "maximum":
        return any(map(_never_negative, node.args))
    return node.op in ("add", "mul", "minimum", "int") and all(map(_never_negative, node.args))


# ----------------------------------------------------------------------------------------- primitives of their own kind


def _select(params: Any, which: Node, *cases: Node) -> Node:
    if len(cases) != 2 or which.kind != "bool":
        raise TraceError("'select_n' with other than two cases is not possible in a modifier.")
    return make("where", which, cases[1], cases[0])


def _convert(params: Any, x: Node) -> Node:
    kind = kind_of_dtype(params["new_dtype"])
    assert kind is not None
    return make(kind, x)


def _divide(params: Any, a: Node, b: Node) -> Node:
    """Of integers: towards zero, as C's."""
    if a.kind == b.kind == "float":
        return make("div", a, b)
    return quotient_towards_zero(a, b)


def _remainder(params: Any, a: Node, b: Node) -> Node:
    """With the sign of the dividend."""
    if a.kind == "float":
        return FUNCTIONS["fmod"](a, b)
    return make("mul", make("mod", make("abs", a), make("abs", b)), make("sign", a))


def _integer_power(params: Any, x: Node) -> Node:
    y = int(params["y"])
    found = number(1) if x.kind == "int" else number(1.0)
    for _ in range(abs(y)):
        found = make("mul", found, x)
    return found if y >= 0 else make("div", number(1.0), found)


def _round(params: Any, x: Node) -> Node:
    if int(params["rounding_method"]) != 1:  # TO_NEAREST_EVEN
        raise TraceError("'round' away from zero is not possible in a modifier: use jnp.round, which rounds to even.")
    return make("round", x)


_SPECIAL: Final[dict[str, Callable[..., Node]]] = {
    "select_n": _select,
    "convert_element_type": _convert,
    "div": _divide,
    "rem": _remainder,
    "integer_pow": _integer_power,
    "square": lambda params, x: make("mul", x, x),
    "clamp": lambda params, low, x, high: make("minimum", make("maximum", x, low), high),
    "round": _round,
    **{name: lambda params, *nodes, to=name: FUNCTIONS[to](*nodes) for name in ("tan", "sinh", "cosh", "erfc")},
    "is_finite": lambda params, x: FUNCTIONS["isfinite"](x),
}
