"""What a modifier's function is called with: objects that write down what is done to them.

They take Python's operators, NumPy's and CuPy's functions and torch's (``__torch_function__``; no framework is
imported). An array that the function captured becomes an operand of the kernel when it is indexed with one of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

from ..base.errors import TraceError, shown
from .calls import text_of
from .draws import NO_RANDOM
from .functions import FUNCTIONS, PARAMETERS, POWERS, WRAPPING, arguments_of, quotient_towards_zero
from .graph import Kind, Node, detached, make
from .recording import (
    Recorded,
    Recording,
    dtype_of_kind,
    for_sizes,
    is_array,
    kind_of_dtype,
    names_element,
    recording_of,
)

_OPEN: Final = slice(None)
"""In the index of a captured array: a dim that is not indexed yet."""


def indexed(recording: Recording, array: Any, before: tuple[Any, ...], index: Any) -> Any:
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
        return Captured(recording, array, tuple(whole))
    return Proxy(recording, recording.element(array, tuple(whole)))


class Captured(Recorded):
    """A captured array, or a part of one that needs further indices."""

    __slots__ = ("_array", "_index")

    def __init__(self, recording: Recording, array: Any, index: tuple[Any, ...] = ()) -> None:
        super().__init__(recording)
        self._array, self._index = array, index

    def __getitem__(self, index: Any) -> Any:
        whole = (*self._index, *(index if isinstance(index, tuple) else (index,)))
        if names_element(self._array, whole) or any(isinstance(x, Proxy | Captured) for x in whole):
            return indexed(self._recording, self._array, self._index, index)
        self._recording.computed = True
        return Captured(self._recording, self._array[index])  # no proxy in it: done once, by the framework

    def as_node(self) -> Node:
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


class Proxy(Recorded):
    """A number that is known when the kernel runs."""

    __slots__ = ("node",)

    def __init__(self, recording: Recording, node: Node) -> None:
        super().__init__(recording)
        self.node = node

    def as_node(self) -> Node:
        return self.node

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


def _unary(op: str, x: Proxy) -> Proxy:
    if op in WRAPPING:
        x._recording.check_width((x.node,))
    return Proxy(x._recording, make(op, x.node))


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
    setattr(Proxy, f"__{_name}__", lambda self, op=_op: _unary(op, self))
# A partly indexed array takes part in arithmetic only to be refused, and one without dims as its element.
for _name in (*(f"__{x}__" for x in _OPERATORS), *(f"__r{x}__" for x in _OPERATORS), "__lt__", "__le__", "__gt__",
              "__ge__", "__eq__", "__ne__", "__neg__", "__abs__", "__invert__"):  # fmt: skip
    setattr(
        Captured,
        _name,
        lambda self, *other, name=_name: getattr(Proxy(self._recording, self.as_node()), name)(*other),
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


def of_method(name: str, x: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of the function that a method of ``x`` is: ``x`` comes first, but for ``x.where(condition, b)``."""
    if name != "where":
        return (x, *args), kwargs
    if len(args) == 2:
        return (args[0], x, args[1]), kwargs
    return tuple(args), {**kwargs, "input": x}


def _method(x: Proxy, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Proxy:
    """A method of a tensor."""
    return _call(x._recording, name, *of_method(name, x, args, kwargs))


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
    given = arguments_of(name, args, kwargs)
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
        if isinstance(target, Proxy):
            kind: Kind | None = target.node.kind
        else:  # of an array its dtype is meant
            kind = kind_of_dtype(target.dtype if isinstance(target, Captured) or is_array(target) else target)
        if kind is not None:
            node = make(kind, node)
    return Proxy(recording, recording.widened(node) if rest else node)


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
    if name == "where" and hasattr(func, "__objclass__"):  # torch.Tensor.where of a tensor, with a proxy's condition
        args, kwargs = of_method(name, args[0], args[1:], kwargs)
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
        return array[index] if isinstance(array, Proxy | Captured) else indexed(recording, array, (), index)
    if name.startswith("__") and name.endswith("__"):
        plain = name[2:-2]
        if plain.startswith("r") and plain[1:] in _OPERATORS:
            plain, args = plain[1:], (args[1], args[0])
        name = plain if plain in FUNCTIONS else _OPERATORS.get(plain, plain)
    return _call(recording, name.rstrip("_") if name in ("where_", "clamp_") else name, args, kwargs)


def _embedded(recording: Recording, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A row of a table, of torch's ``embedding`` and ``nn.Embedding``: to be indexed further."""
    options = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = {**dict(zip(("input", "weight", *options), args, strict=False)), **kwargs}
    for name in ("padding_idx", "max_norm", "scale_grad_by_freq"):
        if given.get(name) is not None and given[name] is not False:
            raise TraceError(f"'embedding' with {name} is not possible in a modifier: index its weight, weight[i, h].")
    return indexed(recording, given["weight"], (), given["input"])


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
