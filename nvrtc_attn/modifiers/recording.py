"""One trace of a modifier's function: what it captured, and the node of everything that it computes with.

Arrays and dtypes are those of any framework; none is imported. What the function is called with is in `proxy`.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from ..base.errors import TraceError, shown
from .graph import Kind, Node, constant, dtype_of, load, make, number

_KINDS: Final[dict[str, Kind]] = {
    "float16": "float", "bfloat16": "float", "float32": "float", "float64": "float", "bool": "bool", "uint8": "int",
    "int8": "int", "int16": "int", "int32": "int", "int64": "int",
}  # fmt: skip
_NARROW: Final = ("uint8", "int8", "int16")


def _grad_enabled() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.is_grad_enabled())


def is_array(x: object) -> bool:
    """Whether ``x`` is an array of some framework, no scalar of NumPy's."""
    # Modules of arrays have functions of these names.
    return isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype") and not isinstance(x, np.generic)


class Recorded:
    """What a traced function is called with and makes of it: a number, or a captured array that needs indices."""

    __slots__ = ("_recording",)

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def as_node(self) -> Node:
        """The number that it is. A captured array is one where it has no dims."""
        raise NotImplementedError


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
        if isinstance(x, Recorded):
            return x.as_node()
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


def names_element(array: Any, index: Any) -> bool:
    """Whether an index of plain integers is complete: the element is then an operand, too, and may have a gradient."""
    whole = index if isinstance(index, tuple) else (index,)
    return len(whole) == array.ndim and all(type(x) is int or isinstance(x, np.integer) for x in whole)


def _ordinary(x: float) -> bool:
    """Whether a number can be told to a kernel: finite, and an integer that int32 holds."""
    return -(2**31) <= x < 2**31 if isinstance(x, int) else abs(x) <= 3.4e38


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


def recording_of(args: Any) -> Recording | None:
    """The recording that a proxy among the arguments belongs to."""
    for x in args:
        if isinstance(x, Recorded):
            return x._recording
        if isinstance(x, tuple | list):
            found = recording_of(x)
            if found is not None:
                return found
    return None


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
