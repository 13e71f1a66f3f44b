"""What a modifier's function is called with: objects that write down what is done to them.

They take Python's operators, NumPy's and CuPy's functions and torch's (``__torch_function__``; no framework is
imported). An array that the function captured becomes an operand of the kernel when it is indexed with one of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn

import numpy as np

from ..base.errors import TraceError, shown
from .calls import text_of
from .draws import NO_RANDOM
from .functions import FUNCTIONS, KEYWORDS, NEEDED, PARAMETERS, POWERS, WRAPPING, quotient_towards_zero
from .graph import Kind, Node, constant, detached, dtype_of, load, make, number

_KINDS: Final[dict[str, Kind]] = {
    "float16": "float", "bfloat16": "float", "float32": "float", "float64": "float", "bool": "bool", "uint8": "int",
    "int8": "int", "int16": "int", "int32": "int", "int64": "int",
}  # fmt: skip
_NARROW: Final = ("uint8", "int8", "int16")
_OPEN: Final = slice(None)
"""In the index of a captured array: a dim that is not indexed yet."""


def _grad_enabled() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.is_grad_enabled())


def is_array(x: object) -> bool:
    """Whether ``x`` is an array of some framework, no scalar of NumPy's."""
    # Modules of arrays have functions of these names.
    return isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype") and not isinstance(x, np.generic)


class Recording:
    """One trace: what was captured, and which numbers are literals of the function's text."""

    def __init__(self, literals: frozenset[tuple[str, Any]]) -> None:
        self.captures: list[Any] = []
        self.computed = False
        """Whether the function computed with an array instead of indexing it: the result is that of its content now."""
        self.sizes: list[tuple[int, int, int]] = []
        """`Program.sizes`."""
        self._by_id: dict[int, int] = {}
        self._literals = literals
        self._slots = 0
        self._grad_enabled = _grad_enabled()

    def check_gradients(self) -> None:
        """Refuse what is done while torch records no gradients: its derivative is not that of what it computes.

        Raises
        ------
        TraceError
            In ``torch.no_grad()``, and in an ``autograd.Function``, whose backward nobody would call.
        """
        if self._grad_enabled and not _grad_enabled():
            raise TraceError(
                "gradients are switched off inside of the function, by torch.no_grad() or in an autograd.Function of "
                "its own, whose backward would not be called. x.detach() stops the gradient of one number."
            )

    def node(self, x: Any, *, index: bool = False) -> Node:
        """The node of anything that an operator may meet, or the index of an array, where no number simplifies.

        Raises
        ------
        TraceError
            It is no number and no array of one element.
        """
        if isinstance(x, Node):
            return x
        if isinstance(x, Proxy):
            return x.node
        if isinstance(x, Captured):
            return x.element()
        if isinstance(x, np.generic) or is_host_scalar(x):
            x = x.item()
        if isinstance(x, bool | int | float):
            # What is no literal, and not one of the numbers that simplify, is given at run time: no recompile.
            simplifies = isinstance(x, bool) or (x in (0, 1, -1) and not index)
            if simplifies or (type(x).__name__, x) in self._literals or not _ordinary(x):
                return number(x)
            self._slots += 1
            return Node("param", kind="int" if isinstance(x, int) else "float", value=(self._slots - 1, x))
        if is_array(x):
            if x.ndim == 0:
                return self.element(x, ())
            raise TraceError(
                f"a captured array of shape {tuple(x.shape)} is used as a whole. Index it with b, h, q or k: a "
                f"modifier works on one score."
            )
        raise TraceError(f"{shown(x)} of type {type(x).__name__} is no number and no array.")

    def exponent(self, x: Any) -> Node:
        """The node of an exponent. An integer belongs to the text of a kernel, which multiplies that often."""
        node = self.node(x)
        return number(constant(node)) if node.op == "param" and node.kind == "int" else node

    def element(self, array: Any, index: tuple[Any, ...]) -> Node:
        """An element of a captured array; ``index`` is complete."""
        name = dtype_of(array)
        if name not in _KINDS:
            raise TraceError(f"a captured array has dtype {name}; accepted are {', '.join(_KINDS)}.")
        nodes = []
        for size, x in zip(array.shape, index, strict=True):
            node = self.node(x, index=True)
            if node.kind == "float":
                raise TraceError("a captured array is indexed with a floating-point number: convert it to an integer.")
            known = constant(node)
            if known is not None:
                if not -size <= known < size:
                    raise TraceError(
                        f"index {known} of a captured array of shape {tuple(array.shape)} is out of range."
                    )
                if known < 0:  # a number of this call is one of every other call, too: of another layer, say
                    node = make("add", node, number(size))
            nodes.append(node)
        slot = self._by_id.get(id(array))
        if slot is None:
            slot = self._by_id[id(array)] = len(self.captures)
            self.captures.append(array)
        return load(slot, _KINDS[name], nodes)

    def index(self, array: Any, before: tuple[Any, ...], index: Any) -> Any:
        """``array[before][index]`` where a proxy is among the indices; ``before`` has `_OPEN` for dims without one."""
        given = index if isinstance(index, tuple) else (index,)
        whole = list(before or (_OPEN,) * array.ndim)
        left = [axis for axis, x in enumerate(whole) if x is _OPEN]
        if any(x is Ellipsis for x in given):
            at = [x is Ellipsis for x in given].index(True)
            given = (*given[:at], *((_OPEN,) * (len(left) - len(given) + 1)), *given[at + 1 :])
        for x in given:
            if x is None or x is Ellipsis or (isinstance(x, slice) and x != _OPEN):
                raise TraceError(f"index {shown(x)} of a captured array: an index must name one element.")
        if len(given) > len(left):
            raise TraceError(f"{len(given)} indices of a captured array of shape {tuple(array.shape)}.")
        for axis, x in zip(left, given, strict=False):
            whole[axis] = _OPEN if isinstance(x, slice) else x
        if _OPEN in [x for x in whole if isinstance(x, slice)]:
            return Captured(self, array, tuple(whole))
        return Proxy(self, self.element(array, tuple(whole)))

    def unary(self, op: str, x: Node) -> Proxy:
        if op in WRAPPING:
            self.check_width((x,))
        return Proxy(self, make(op, x))

    def check_width(self, nodes: Iterable[Node]) -> None:
        """Refuse what wraps around in arrays of 8 and 16 bits, and does not in the int32 of a modifier."""
        kinds = [x for x in nodes if x.kind != "bool"]
        narrow = [x for x in kinds if self._is_narrow(x)]
        if narrow and all(x in narrow or (x.kind == "int" and constant(x) is not None) for x in kinds):
            raise TraceError(
                "arithmetic of elements of 8 or 16 bits wraps around at their ends, and a modifier computes in int32: "
                "convert them first, by .int() or .astype(np.int32), one of them here or the array outside."
            )

    def widened(self, node: Node) -> Node:
        """What was converted to int32: arithmetic of it is that of int32 in every library."""
        return Node("int", (node,), "int") if self._is_narrow(node) else node

    def _is_narrow(self, node: Node) -> bool:
        if node.op == "load":
            return dtype_of(self.captures[node.value]) in _NARROW
        if node.op == "where":
            return any(map(self._is_narrow, node.args[1:]))
        return node.op in ("minimum", "maximum") and any(map(self._is_narrow, node.args))


def is_host_scalar(x: Any) -> bool:
    """Whether ``x`` is a number in a tensor on the CPU that wants no gradient: read now, without waiting for a GPU."""
    if not is_array(x) or x.ndim:
        return False
    return isinstance(x, np.ndarray) or (
        str(getattr(x, "device", "")) == "cpu" and getattr(x, "requires_grad", True) is False
    )


def _ordinary(x: float) -> bool:
    """Whether a number can be told to a kernel: finite, and an integer that int32 holds."""
    return -(2**31) <= x < 2**31 if isinstance(x, int) else abs(x) <= 3.4e38


def names_element(array: Any, index: Any) -> bool:
    """Whether an index of plain integers is complete: the element is then an operand, too, and may have a gradient."""
    whole = index if isinstance(index, tuple) else (index,)
    return len(whole) == array.ndim and all(type(x) is int or isinstance(x, np.integer) for x in whole)


class Captured:
    """A captured array, or a part of one that needs further indices."""

    __slots__ = ("_array", "_index", "_recording")

    def __init__(self, recording: Recording, array: Any, index: tuple[Any, ...] = ()) -> None:
        self._recording, self._array, self._index = recording, array, index

    def __getitem__(self, index: Any) -> Any:
        whole = (*self._index, *(index if isinstance(index, tuple) else (index,)))
        if names_element(self._array, whole) or any(isinstance(x, Proxy | Captured) for x in whole):
            return self._recording.index(self._array, self._index, index)
        self._recording.computed = True
        return Captured(self._recording, self._array[index])  # no proxy in it: done once, by the framework

    def element(self) -> Node:
        if self._array.ndim:
            given = len(self._index) - len(self.shape) if self._index else 0
            raise TraceError(
                f"{given} of the {self._array.ndim} indices of a captured array of shape "
                f"{tuple(self._array.shape)} are given. Index every dim: a modifier works on one score."
            )
        return self._recording.element(self._array, ())

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = tuple(self._array.shape)
        return tuple(n for n, x in zip(sizes, self._index, strict=True) if x is _OPEN) if self._index else sizes

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self._array.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> NoReturn:
        raise TraceError(f"{name!r} of a captured array: compute it before, outside of the function.")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch_function(func, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _call(self._recording, ufunc.__name__, inputs, kwargs)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return _of_cupy(self._recording, kernel, args, kwargs)


class Proxy:
    """A number that is known when the kernel runs."""

    __slots__ = ("_recording", "node")

    def __init__(self, recording: Recording, node: Node) -> None:
        self._recording, self.node = recording, node

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return lambda *args, **kwargs: _method(self, name, args, kwargs)
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "dtype":  # for torch.finfo(score.dtype).min, x.to(score.dtype)
            return dtype_of_kind(self.node.kind)
        if name == "device":  # to make a number on: `x.new_ones((), device=x.device)`
            return None
        raise TraceError(f"{name!r} is not possible in a modifier, which works on one score.")

    def __bool__(self) -> NoReturn:
        raise TraceError(
            "a branch on a value that is known only when the kernel runs (if, while, and, or, not, chained "
            "comparisons). Use where(condition, a, b), and &, |, ~ between conditions."
        )

    def _concrete(self, *_: object) -> NoReturn:
        raise TraceError(
            "a value that is known only when the kernel runs is needed as a Python number (int(), float(), range(), "
            "functions of math, an index of a list or of an array that was made inside of the function). Functions of "
            "NumPy and torch take it: numpy.tanh for math.tanh."
        )

    __int__ = __float__ = __index__ = __complex__ = __round__ = _concrete

    def __len__(self) -> NoReturn:
        raise TraceError("len() of a number: a modifier works on one score.")

    def __iter__(self) -> NoReturn:
        raise TraceError("iteration over a number: a modifier works on one score.")

    def __getitem__(self, index: Any) -> NoReturn:
        raise TraceError("an index into a number: a modifier works on one score.")

    def __hash__(self) -> int:
        return id(self)

    def __pos__(self) -> Proxy:
        return self

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch_function(func, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            raise TraceError(f"'{ufunc.__name__}.{method}' is a shape operation: a modifier works on one score.")
        return _call(self._recording, ufunc.__name__, inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _call(self._recording, func.__name__, args, kwargs)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return _of_cupy(self._recording, kernel, args, kwargs)


def _binary(op: str, reflected: bool) -> Callable[[Proxy, Any], Proxy]:
    def method(self: Proxy, other: Any) -> Proxy:
        recording = self._recording
        recording.check_gradients()
        a, b = self.node, recording.exponent(other) if op == "pow" and not reflected else recording.node(other)
        if op in WRAPPING:
            recording.check_width((a, b))
        return Proxy(recording, make(op, b, a) if reflected else make(op, a, b))

    return method


_OPERATORS: Final = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv", "mod": "mod", "pow": "pow",
    "and": "and", "or": "or", "xor": "xor", "lshift": "shl", "rshift": "shr",
}  # fmt: skip
for _name, _op in _OPERATORS.items():
    setattr(Proxy, f"__{_name}__", _binary(_op, False))
    setattr(Proxy, f"__r{_name}__", _binary(_op, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Proxy, f"__{_name}__", _binary(_name, False))
for _name, _op in (("neg", "neg"), ("abs", "abs"), ("invert", "not")):
    setattr(Proxy, f"__{_name}__", lambda self, op=_op: self._recording.unary(op, self.node))
# A partly indexed array takes part in arithmetic only to be refused, and one without dims as its element.
for _name in (*(f"__{x}__" for x in _OPERATORS), *(f"__r{x}__" for x in _OPERATORS), "__lt__", "__le__", "__gt__",
              "__ge__", "__eq__", "__ne__", "__neg__", "__abs__", "__invert__"):  # fmt: skip
    setattr(
        Captured,
        _name,
        lambda self, *other, name=_name: getattr(Proxy(self._recording, self.element()), name)(*other),
    )


# ----------------------------------------------------------------------------------------- functions of the frameworks


_FILLED: Final = {"zeros": 0, "ones": 1}
METHODS: Final = frozenset(
    {
        *FUNCTIONS,
        "new_zeros",
        "new_ones",
        "new_full",
        "to",
        "type",
        "astype",
        "type_as",
        "clone",
        "contiguous",
        "detach",
        "item",
    }
)
_UNCHANGED: Final = ("clone", "contiguous")
_DETACHED: Final = ("detach", "stop_gradient")
_RANDOM: Final = ("rand", "bernoulli", "dropout", "normal", "poisson", "multinomial")
_SHAPES: Final = (
    "sum", "mean", "prod", "amax", "amin", "max", "min", "softmax", "log_softmax", "logsumexp", "cumsum", "sort",
    "argmax", "argmin", "reshape", "view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "flatten", "stack",
    "cat", "concatenate", "matmul", "dot", "einsum", "gather", "index_select", "norm", "all", "any", "size", "dim",
)  # fmt: skip


def _method(x: Proxy, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Proxy:
    """A method of a tensor, whose name means the function of that name with the tensor first, but for ``where``."""
    if name == "where":
        if len(args) == 2:
            return _call(x._recording, name, (args[0], x, args[1]), kwargs)
        return _call(x._recording, name, args, {**kwargs, "input": x})
    return _call(x._recording, name, (x, *args), kwargs)


def _call(recording: Recording, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Proxy:
    """The function ``name`` of a framework."""
    recording.check_gradients()
    if name in _UNCHANGED:
        return Proxy(recording, recording.node(args[0]))
    if name in _DETACHED:
        return Proxy(recording, detached(recording.node(args[0])))
    if name.startswith("new_") or name.endswith("_like"):
        return _filled(recording, name, args, kwargs)
    if name in ("to", "type", "astype", "type_as"):
        return _converted(recording, args, kwargs)
    if name in ("max", "min") and len(args) == 2 and isinstance(args[1], Proxy | Captured):
        name = f"{name}imum"
    if name == "gelu" and kwargs.get("approximate") == "tanh":
        name = "gelu_tanh"
    function = FUNCTIONS.get(name)
    if function is None:
        reason = "it is no function of one score"
        if any(word in name for word in _RANDOM):
            reason = NO_RANDOM
        elif name in _SHAPES:
            reason = "it changes or reduces a shape, and a modifier works on one score"
        raise TraceError(f"{name!r} is not possible in a modifier: {reason}.")
    given = _arguments(name, args, kwargs)
    rounding = given.pop("rounding_mode", None)
    alpha = None if "alpha" in PARAMETERS[name] else given.pop("alpha", None)
    if alpha is not None:
        scaled = "x" if name == "rsub" else "b"
        given[scaled] = _call(recording, "mul", (given[scaled], alpha), {})
    is_power = name in POWERS
    nodes = {key: recording.exponent(x) if is_power and key == "b" else recording.node(x) for key, x in given.items()}
    if name in WRAPPING:
        recording.check_width(nodes.values())
    if rounding == "trunc" and all(x.kind != "float" for x in nodes.values()):
        return Proxy(recording, quotient_towards_zero(**nodes))
    found = Proxy(recording, recording.widened(function(**nodes)) if name in ("int", "long") else function(**nodes))
    if rounding == "floor":
        return _call(recording, "floor_divide", (given["x"], given["b"]), {})
    return found if rounding is None else _call(recording, "trunc", (found,), {})


_PREFIXES_OF_CUPY: Final = ("cupyx_scipy_special_", "cupyx_", "cupy_")


def _of_cupy(recording: Recording, kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Proxy:
    """A function of CuPy's, which asks its arguments for a method: ``kernel.name`` is ``cupy_tanh``, say."""
    name = str(getattr(kernel, "name", ""))
    for prefix in _PREFIXES_OF_CUPY:
        if name.startswith(prefix):
            return _call(recording, name.removeprefix(prefix), args, kwargs)
    raise TraceError(
        f"{name!r}, a kernel of CuPy's, is not possible in a modifier. nvrtc_attn.cuda_function makes an operation of "
        f"CUDA C++."
    )


def _arguments(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
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


def _filled(recording: Recording, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Proxy:
    """A number of the kind of a proxy: ``x.new_ones(())``, ``zeros_like(x)`` and so on."""
    what = name.removeprefix("new_").removesuffix("_like")
    x, *rest = args
    shape = () if name.endswith("_like") else rest.pop(0) if rest else kwargs.get("size", ())
    if what not in (*_FILLED, "full") or not isinstance(shape, tuple | list) or len(shape) > 0:
        reason = NO_RANDOM
        if not any(word in name for word in _RANDOM):
            reason = "it makes an array, and a modifier works on one score"
        raise TraceError(f"{name!r} is not possible in a modifier: {reason}.")
    value = _FILLED.get(what, rest[0] if rest else kwargs.get("fill_value", 0))
    filled = Proxy(recording, make(recording.node(x).kind, recording.node(value)))
    dtype = kwargs.get("dtype")
    return filled if dtype is None else _converted(recording, (filled, dtype), {})


def _converted(recording: Recording, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Proxy:
    x, *rest = (*args, *kwargs.values())
    node = recording.node(x)
    for target in rest:
        kind = target.node.kind if isinstance(target, Proxy) else kind_of_dtype(target)
        if kind is not None:
            node = make(kind, node)
    return Proxy(recording, recording.widened(node) if rest else node)


def dtype_of_kind(kind: Kind) -> Any:
    """The type that numbers of a kind are computed in: torch's where torch is there, otherwise NumPy's."""
    name = {"float": "float32", "int": "int32", "bool": "bool"}[kind]
    torch = sys.modules.get("torch")
    return np.dtype(name) if torch is None else getattr(torch, name)


def kind_of_dtype(target: Any) -> Kind | None:
    """The kind of number that a dtype of any framework, or its name, stands for; None of a device and of flags.

    Raises
    ------
    TraceError
        Integers of another width than those of a modifier, which would wrap around elsewhere.
    """
    if target is None or isinstance(target, bool):
        return None
    name = str(target).removeprefix("torch.")
    if name not in _KINDS:
        with contextlib.suppress(TypeError):
            name = np.dtype(name if type(target).__module__ == "torch" else target).name
    if name.startswith(("float", "int", "uint", "complex")) and (name not in _KINDS or name in _NARROW):
        raise TraceError(f"a number is converted to {name}: what a modifier computes with is float32, int32 or bool.")
    return _KINDS.get(name)


_INDEXING: Final = ("__getitem__", "getitem")
REPLAYED: Final = "cuda_function"
"""The name of the call of a `cuda_function` in the script of a compiled program."""
SIZED: Final = "for_sizes"
"""The same of `for_sizes`."""
_READ_ONLY: Final = ("__get__",)


def torch_function(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A call of torch with a proxy, or with an array of proxies as its index, among its arguments."""
    recording = recording_of((*args, *kwargs.values()))
    name = getattr(func, "__name__", str(func))
    if recording is None:
        return func(*args, **kwargs)
    if name in _READ_ONLY:
        attribute = getattr(getattr(func, "__self__", None), "__name__", "?")
        raise TraceError(f"{attribute!r} is not possible in a modifier, which works on one score.")
    return called_by_name(recording, name, args, kwargs)


def called_by_name(recording: Recording, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The function of torch, or of Python's operators, that has a name."""
    if name == REPLAYED:
        return called(recording, bytes.fromhex(args[0]).decode(), args[1:])
    if name == SIZED:
        return for_sizes(*args)
    if name == "embedding":
        return _embedded(recording, args, kwargs)
    if name in _INDEXING:
        array, index = args
        return array[index] if isinstance(array, Proxy | Captured) else recording.index(array, (), index)
    if name.startswith("__") and name.endswith("__"):
        plain = name[2:-2]
        if plain.startswith("r") and plain[1:] in _OPERATORS:
            return _call(recording, _OPERATORS[plain[1:]], (args[1], args[0]), {})
        name = _OPERATORS.get(plain, plain)
    return _call(recording, name.rstrip("_") if name in ("where_", "clamp_") else name, args, kwargs)


def _embedded(recording: Recording, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A row of a table, of torch's ``embedding`` and ``nn.Embedding``: to be indexed further."""
    options = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = {**dict(zip(("input", "weight", *options), args, strict=False)), **kwargs}
    for name in ("padding_idx", "max_norm", "scale_grad_by_freq"):
        if given.get(name) is not None and given[name] is not False:
            raise TraceError(f"'embedding' with {name} is not possible in a modifier: index its weight, weight[i, h].")
    return recording.index(given["weight"], (), given["input"])


def called(recording: Recording, value: str, args: tuple[Any, ...]) -> Proxy:
    """The call of a function with anything that an operator may meet."""
    recording.check_gradients()
    text = text_of(value)
    if len(args) != len(text.parameters):
        raise TraceError(f"{text.name!r} takes {len(text.parameters)} arguments, and got {len(args)}.")
    nodes = []
    for (kind, name), x in zip(text.parameters, args, strict=True):
        node = recording.node(x)
        if node.kind == "float" and kind != "float":
            raise TraceError(f"{name!r} of {text.name!r} is {kind}, and got a floating-point number: convert it.")
        nodes.append(make(kind, node))
    return Proxy(recording, Node("call", tuple(nodes), text.kind, value))


def for_sizes(x: Any, sizes: str) -> Any:
    """``x``, in a trace that is for calls of these ``sizes`` alone: heads, queries and keys, 1 head for any number.

    They are a string, which programs of torch.compile take for what it is, where a number may become a symbol.
    """
    write = getattr(type(x), "written_sizes", None)  # of a program that torch.compile traces
    if write is not None:
        return write(x, sizes)
    recording = recording_of((x,))
    if recording is None and type(x).__module__.startswith("jax"):  # a tracer; Dynamo follows no more than this
        recording = _following.get()
    if recording is not None:
        heads, rows, keys = map(int, sizes.split())
        recording.sizes.append((heads, rows, keys))
    return x


# The recording of a trace that another tracer makes, whose objects know of none.
_following: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("following", default=None)


@contextlib.contextmanager
def followed(recording: Recording) -> Iterator[None]:
    """While JAX traces a function for a recording."""
    token = _following.set(recording)
    try:
        yield
    finally:
        _following.reset(token)


def recording_of(args: Any) -> Recording | None:
    """The recording that a proxy among the arguments belongs to."""
    for x in args:
        if isinstance(x, Proxy | Captured):
            return x._recording
        if isinstance(x, tuple | list):
            found = recording_of(x)
            if found is not None:
                return found
    return None


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where ``condition`` holds, else ``b``: for functions of a score that import no array library.

    In a ``score_mod`` or ``mask_mod`` each of the three is a number or an element of an array; ``numpy.where``,
    ``torch.where`` and ``jax.numpy.where`` do the same there. Outside of one they are plain Python values.
    """
    recording = recording_of((condition, a, b))
    if recording is None:
        for x in (condition, a, b):
            write = getattr(type(x), "written_where", None)  # of a program that torch.compile traces
            if write is not None:
                return write(x, condition, a, b)
        return a if operator.truth(condition) else b
    return _call(recording, "where", (condition, a, b), {})
