"""The expression that a modifier is: nodes of floats, integers and booleans over a score and its position.

A node is immutable and equal to another with the same content. Floats are computed in float32 (on the CPU in the type
of the call), integers are int32, ``//`` and ``%`` floor as Python's.
"""

from __future__ import annotations

import math
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from ..base.errors import TraceError
from ..base.forks import renew_in_child

Kind = Literal["float", "int", "bool"]
_Found = TypeVar("_Found")
_RANK: Final = {"bool": 0, "int": 1, "float": 2}


class Node:
    """One operation, its operands, and the kind of number that comes out. Never changed.

    ``value`` is the number of a ``number``, (slot, number) of a ``param``, and the capture of a ``load``. Nodes with
    the same content are one object: expressions share their parts, and comparing two would else take exponential time.
    """

    __slots__ = ("__weakref__", "args", "depends", "kind", "op", "value")
    op: str
    args: tuple[Node, ...]
    kind: Kind
    value: Any
    depends: frozenset[str]
    """Which of score, b, h, q, k it depends on."""

    def __new__(cls, op: str, args: tuple[Node, ...] = (), kind: Kind = "float", value: Any = None) -> Node:
        # The node keeps its operands, and so their numbers, for as long as it is in the table.
        key = (op, kind, repr(value), tuple(map(id, args)))
        found = _nodes.get(key)
        if found is not None:
            return found
        node = object.__new__(cls)
        node.op, node.args, node.kind, node.value = op, args, kind, value
        node.depends = frozenset((op,)) if op in INPUTS else frozenset().union(*(x.depends for x in args))
        with _nodes_lock:
            return _nodes.setdefault(key, node)

    def __repr__(self) -> str:
        return f"Node({self.op!r}, {self.kind!r}, {self.value!r}, {len(self.args)} operands)"


_nodes: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()
_nodes_lock = threading.Lock()
renew_in_child(globals(), "_nodes_lock", threading.Lock)
POSITIONS: Final = ("b", "h", "q", "k")
INPUTS: Final = ("score", *POSITIONS)
FLOAT32_MAX: Final = 3.4028234663852886e38
SCORE: Final = Node("score")
POSITION_NODES: Final = tuple(Node(name, kind="int") for name in POSITIONS)

# What an operation makes of its operands' kinds.
FLOAT_UNARY: Final = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "atan",
    "erf",
)  # fmt: skip
ROUNDING: Final = ("floor", "ceil", "round", "trunc")
SAME_UNARY: Final = ("neg", "abs", "sign")
ARITHMETIC: Final = ("add", "sub", "mul", "floordiv", "mod", "minimum", "maximum")
_OF_CONDITIONS: Final = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}
"""What operations of conditions alone are, in every framework; ``abs`` and ``sign`` leave a condition as it is."""
COMPARISONS: Final = ("lt", "le", "gt", "ge", "eq", "ne")
LOGIC: Final = ("and", "or", "xor")
OPERATIONS: Final = (
    *FLOAT_UNARY, *ROUNDING, *SAME_UNARY, *ARITHMETIC, *COMPARISONS, *LOGIC, "not", "div", "pow", "shl", "shr", "where",
    "float", "int", "bool",
)  # fmt: skip
"""All but the leaves (inputs, ``number``, ``param``, and ``load``, an element of a captured array) and ``call``, of a
function that the user wrote in C++ (`cuda_function`)."""


def _least(a: Any, b: Any) -> Any:
    return a if a < b or a != a else b


def _largest(a: Any, b: Any) -> Any:
    return a if a > b or a != a else b


_FOLD: Final[dict[str, Callable[..., Any]]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "neg": operator.neg,
    "floordiv": operator.floordiv, "mod": operator.mod, "minimum": _least, "maximum": _largest, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne, "abs": abs,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "float": float, "int": int, "bool": bool,
    "shl": operator.lshift, "shr": operator.rshift, "exp": math.exp, "log": math.log, "sqrt": math.sqrt,
    "tanh": math.tanh,
}  # fmt: skip


_MOST_FACTORS: Final = 31
"""Of a power of an integer, which has no function of its own: those of 2 leave int32 beyond."""


def number(value: bool | int | float) -> Node:
    """A literal, which is part of the text of a kernel."""
    return Node("number", kind=kind_of(value), value=value)


def kind_of(value: bool | int | float) -> Kind:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"


def constant(node: Node) -> Any:
    """The number that a node is known to be, of a literal or of this call; None of other nodes."""
    if node.op == "number":
        return node.value
    return node.value[1] if node.op == "param" else None


def cast(node: Node, kind: Kind) -> Node:
    if node.kind == kind:
        return node
    return _fold(Node(kind, (node,), kind))


def make(op: str, *args: Node) -> Node:
    """The node of an operation, with its operands brought to one kind, simplified where literals allow it.

    Raises
    ------
    TraceError
        The operation does not exist for these kinds.
    """
    if op in FLOAT_UNARY:
        return _fold(Node(op, (cast(args[0], "float"),)))
    if op in ROUNDING:
        return args[0] if args[0].kind != "float" else Node(op, args)
    if op in SAME_UNARY:
        x = args[0]
        if x.kind == "bool":
            if op != "neg":
                return x
            x = cast(x, "int")
        return _fold(Node(op, (x,), x.kind))
    if op in ("float", "int", "bool"):
        return cast(args[0], op)  # type: ignore[arg-type]
    if op in _OF_CONDITIONS and all(x.kind == "bool" for x in args):
        return make(_OF_CONDITIONS[op], *args)
    if op in ARITHMETIC:
        return _simplified(op, *_alike(args, "int"))
    if op == "div":
        return _simplified(op, *(cast(x, "float") for x in args))
    if op in COMPARISONS:
        return _fold(Node(op, tuple(_alike(args, "bool")), "bool"))
    if op in LOGIC or op == "not":
        if any(x.kind == "float" for x in args):
            raise TraceError(f"{op!r} of floating-point numbers: compare them first.")
        same = _alike(args, "bool")
        return _simplified(op, *same)
    if op in ("shl", "shr"):
        if any(x.kind == "float" for x in args):
            raise TraceError("a shift of floating-point numbers: multiply by a power of two.")
        return _fold(Node(op, tuple(cast(x, "int") for x in args), "int"))
    if op == "where":
        condition, *values = args
        a, b = _alike(values, "bool")
        condition = condition if condition.kind == "bool" else make("ne", condition, number(0))
        if condition.op == "number":
            return a if condition.value else b
        return a if a == b else Node("where", (condition, a, b), a.kind)
    if op == "pow":
        return _power(*args)
    raise TraceError(f"{op!r} is no operation of a modifier.")


def detached(node: Node) -> Node:
    """The same number, of which nothing has a derivative: a cast of a float to what it is."""
    return Node("float", (node,)) if node.kind == "float" and node.op != "number" else node


def load(capture: int, kind: Kind, index: Sequence[Node]) -> Node:
    """An element of a captured array."""
    return Node("load", tuple(cast(x, "int") for x in index), kind, capture)


def _alike(nodes: Sequence[Node], least: Kind) -> list[Node]:
    kind = max((least, *(x.kind for x in nodes)), key=lambda x: _RANK[x])
    return [cast(x, kind) for x in nodes]


def _power(base: Node, exponent: Node) -> Node:
    of_integers = base.kind != "float" and exponent.kind != "float"
    most = _MOST_FACTORS if of_integers else 4
    if exponent.op == "number" and float(exponent.value).is_integer() and 0 <= exponent.value <= most:
        result = number(1) if base.kind != "float" else number(1.0)
        for _ in range(int(exponent.value)):
            result = make("mul", result, base)
        return result if exponent.kind != "float" else cast(result, "float")
    if of_integers and base.op == "number" and base.value == 2 and exponent.op != "number":
        return make("where", make("lt", exponent, number(0)), number(0), make("shl", number(1), exponent))
    if of_integers:
        raise TraceError(
            f"'pow' of integers, but for powers up to {_MOST_FACTORS} and those of 2: make the base a float, as in "
            f"3.0 ** x."
        )
    base, exponent = cast(base, "float"), cast(exponent, "float")
    if base.op == "number" and base.value == 2:
        return make("exp2", exponent)
    return _fold(Node("pow", (base, exponent)))


def _simplified(op: str, *args: Node) -> Node:
    kind = args[0].kind
    if len(args) == 2 and not all(x.op == "number" for x in args):
        a, b = args
        first = a.value if a.op == "number" else None
        second = b.value if b.op == "number" else None
        if kind == "bool":  # of and, or, xor
            for known, other in ((first, b), (second, a)):
                if known is not None and op == "and":
                    return other if known else number(False)
                if known is not None and op == "or":
                    return number(True) if known else other
        elif (op == "add" and first == 0) or (op == "mul" and first == 1):
            return b
        elif (op in ("add", "sub") and second == 0) or (op in ("mul", "div") and second == 1):
            return a
    if op == "not":
        if args[0].op == "not":
            return args[0].args[0]
        if kind == "bool" and args[0].op == "number":
            return number(not args[0].value)
    return _fold(Node(op, args, kind))


def _fold(node: Node) -> Node:
    """The literal that an operation on literals is, where it is one."""
    compute = _FOLD.get(node.op)
    if compute is None or not all(x.op == "number" for x in node.args):
        return node
    try:
        value = compute(*(x.value for x in node.args))
    except (ArithmeticError, ValueError):
        return node
    convert: Callable[[Any], Any] = {"float": float, "int": int, "bool": bool}[node.kind]
    return number(convert(value))


def walk(roots: Sequence[Node]) -> Iterator[Node]:
    """Every node below ``roots`` once, operands before what uses them, in an order that only the graph decides."""
    done: set[Node] = set()
    stack = [(x, False) for x in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            yield node
        else:
            stack.append((node, True))
            stack += [(x, False) for x in reversed(node.args) if x not in done]


def operands_first(step: Callable[[Node], _Found], node: Node) -> _Found:
    """``step(node)``, after ``step`` of all that it is made of.

    A ``step`` that remembers, and asks for itself of the operands, then recurses once down the longest chain.
    """
    for x in walk(node.args):
        step(x)
    return step(node)


def rebuilt(root: Node, value_of: Callable[[Node], Any]) -> Node:
    """``root`` with other values of its nodes."""
    made: dict[Node, Node] = {}
    for node in walk([root]):
        made[node] = Node(node.op, tuple(made[x] for x in node.args), node.kind, value_of(node))
    return made[root]


def substituted(root: Node, places: Mapping[Node, Node]) -> Node:
    """``root`` with other nodes in the places of some of its leaves."""
    made: dict[Node, Node] = {}
    for node in walk([root]):
        made[node] = places.get(node) or Node(node.op, tuple(made[x] for x in node.args), node.kind, node.value)
    return made[root]


def listing(roots: Sequence[Node]) -> str:
    """All nodes below ``roots`` in order, one after the other: equal for equal expressions, in any process."""
    places: dict[Node, int] = {}
    lines = []
    for node in walk(roots):
        places[node] = len(places)
        value = "" if node.value is None else f" {node.value!r}"
        lines.append(f"{node.op}:{node.kind}{value}({' '.join(str(places[x]) for x in node.args)})")
    return "; ".join([*lines, " ".join(str(places[x]) for x in roots)])


def dtype_of(array: Any) -> str:
    """The name of an array's dtype, of any framework."""
    return str(array.dtype).replace("torch.", "")
