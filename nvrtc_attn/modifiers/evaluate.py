"""An expression in NumPy: what calls on host memory compute, and the oracle of the tests."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .calls import on_host
from .derivative import ZERO, derivatives
from .graph import INPUTS, SCORE, Node, walk
from .modifier import Modifier

Array = npt.NDArray[Any]

_erf: Final = np.vectorize(math.erf, otypes=[np.float64])

FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log1p": np.log1p,
    "sqrt": np.sqrt, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "atan": np.arctan, "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint, "trunc": np.trunc, "neg": np.negative, "abs": np.abs, "add": np.add,
    "sub": np.subtract, "mul": np.multiply, "div": np.divide, "floordiv": np.floor_divide, "mod": np.mod,
    "minimum": np.minimum, "maximum": np.maximum, "pow": np.power, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "shl": np.left_shift, "shr": np.right_shift,
    "where": np.where,
    "sign": lambda x: np.subtract(x > 0, x < 0, dtype=x.dtype),  # 0 of NaN, as torch's and the kernels'
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "erf": lambda x: _erf(x).astype(x.dtype),
}  # fmt: skip


class Values:
    """The values of nodes at some scores and positions, each computed once.

    Parameters
    ----------
    inputs
        Arrays for ``score``, ``b``, ``h``, ``q`` and ``k`` that broadcast together, as far as the nodes need them.
    captures
        The captured arrays, in order.
    dtype
        What floats are computed in.

    An element beyond a captured array is NaN, or 0 of an array of integers, and `outside` tells where that was.
    """

    def __init__(self, inputs: Mapping[str, Array], captures: Sequence[Array], dtype: np.dtype[Any]) -> None:
        self._inputs, self._captures, self._dtype = inputs, captures, dtype
        self._known: dict[Node, Array] = {}
        self.outside: list[tuple[Node, Array]] = []
        """Loads with an index beyond their array, and where it is."""

    def __call__(self, root: Node) -> Array:
        """The values of ``root``, of a shape that broadcasts to that of the inputs."""
        for node in walk([root]):
            if node not in self._known:
                self._known[node] = self._compute(node)
        return self._known[root]

    def undecided(self, root: Node) -> Array | None:
        """Where the value of ``root`` depends on an element beyond its array (None = nowhere).

        It does not where a condition beside it is false (``&``), true (``|``), or selects something else (``where``).
        """
        outside = dict(self.outside)
        found: dict[Node, Array] = {}
        for node in walk([root]):
            self(node)
            args = [found.get(x) for x in node.args]
            values = [self._known[x] for x in node.args]
            there = [x for x in (*args, outside.get(node)) if x is not None]
            if not there:
                continue
            if node.op in ("and", "or") and node.kind == "bool":
                decisive = node.op == "or"
                decided = [
                    (x == decisive) if u is None else (x == decisive) & ~u for x, u in zip(values, args, strict=True)
                ]
                here = functools.reduce(np.logical_or, there) & ~np.logical_or(*decided)
            elif node.op == "where":
                condition, a, b = (np.False_ if x is None else x for x in args)
                here = condition | np.where(values[0], a, b)
            else:
                here = functools.reduce(np.logical_or, there)
            if here.any():
                found[node] = here
        return found.get(root)

    def indices(self, load: Node) -> tuple[tuple[Array, ...], Array | None]:
        """The indices of a load, brought into the array, and where that was not needed (None = everywhere)."""
        inside: Array | None = None
        found = []
        for size, node in zip(self._captures[load.value].shape, load.args, strict=True):
            index = self(node)
            valid = (index >= 0) & (index < size)
            if not valid.all():
                inside = valid if inside is None else inside & valid
                index = np.clip(index, 0, max(size - 1, 0))
            found.append(index)
        return tuple(found), inside

    def _compute(self, node: Node) -> Array:
        if node.op in INPUTS:
            return self._inputs[node.op]
        if node.op in ("number", "param"):
            value = node.value if node.op == "number" else node.value[1]
            return np.asarray(value, self._type_of(node))
        if node.op == "load":
            return self._load(node)
        if node.op in ("float", "int", "bool"):
            return self._known[node.args[0]].astype(self._type_of(node))
        args = [self._known[x] for x in node.args]
        if node.op == "call":
            return np.asarray(on_host(node.value)(*args)).astype(self._type_of(node))
        result: Array = np.asarray(FUNCTIONS[node.op](*args))
        return result

    def _load(self, node: Node) -> Array:
        array = self._captures[node.value]
        index, inside = self.indices(node)
        if not array.size:
            values = np.zeros(np.broadcast_shapes(*(x.shape for x in index)), self._type_of(node))
        else:
            values = np.asarray(array[index]).astype(self._type_of(node))
        if inside is not None:
            self.outside.append((node, ~inside))
            nothing = np.nan if node.kind == "float" else 0
            values = np.where(inside, values, np.asarray(nothing, values.dtype))
        return values

    def _type_of(self, node: Node) -> np.dtype[Any]:
        return {"float": self._dtype, "int": np.dtype(np.int64), "bool": np.dtype(np.bool_)}[node.kind]


class HostModifier:
    """A modifier whose arrays are in host memory.

    Parameters
    ----------
    modifier
        Its own arrays are not looked at.
    captures
        NumPy arrays for them, in their order.
    """

    def __init__(self, modifier: Modifier, captures: Sequence[Array]) -> None:
        self.score, self.mask = modifier.valued
        self.captures = tuple(captures)
        self._slopes = {} if self.score is None else derivatives(self.score)

    def values(self, inputs: Mapping[str, Array], dtype: np.dtype[Any]) -> Values:
        return Values(inputs, self.captures, dtype)

    @property
    def slope(self) -> Node:
        """The derivative of the score, with respect to what it takes the place of."""
        return self._slopes.get(SCORE, ZERO)

    def add_gradients(self, values: Values, ds: Array, gradients: Sequence[Array | None]) -> None:
        """Add what scores with gradients ``ds`` give to those of the captured arrays, where one is wanted."""
        for node, derivative in self._slopes.items():
            gradient = gradients[node.value] if node.op == "load" else None
            if gradient is None:
                continue
            parts = np.where(ds == 0, 0, ds * values(derivative))
            index, inside = values.indices(node)
            if inside is not None:
                parts = np.where(inside, parts, 0)
            if not index:
                gradient += parts.sum()
            elif gradient.size:
                _scatter(gradient, index, parts)

    def check(self, values: Values, allowed: Array, kept: Array) -> None:
        """Refuse an index beyond a captured array: at a score that counts, and where the mask hides one because of it.

        Parameters
        ----------
        allowed
            Pairs of query and key that everything but the mask leaves.
        kept
            Those that the mask leaves, too.
        """
        undecided = None if self.mask is None else values.undecided(self.mask)
        hidden = None if undecided is None else undecided & allowed
        if hidden is not None and hidden.any() and self.mask is not None:
            of_mask = set(walk([self.mask]))
            shapes = [
                self.captures[node.value].shape
                for node, outside in values.outside
                if node in of_mask and (outside & hidden).any()
            ]
            raise ValueError(
                f"mask_mod: an index of the captured array of shape {shapes[0]} is out of range, and the element "
                f"decides whether a pair of query and key is kept. Indices count from 0, also below it: none is "
                f"negative."
            )
        for node, outside in values.outside:
            if (outside & kept).any():
                raise ValueError(
                    f"score_mod, mask_mod: an index of the captured array of shape {self.captures[node.value].shape} "
                    f"is out of range for a pair of query and key that the masks keep. Indices count from 0, also "
                    f"below it: none is negative."
                )


def _scatter(gradient: Array, index: Sequence[Array], parts: Array) -> None:
    """``gradient[index] += parts``, an element that is met several times included.

    Axes of ``parts`` that no index varies along are summed before, which leaves most modifiers little to scatter.
    """
    shape = np.broadcast_shapes(*(x.shape for x in index))
    shape = (1,) * (parts.ndim - len(shape)) + shape
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    parts = parts.sum(axes, keepdims=True)
    flat = np.ravel_multi_index(tuple(np.broadcast_to(x, parts.shape) for x in index), gradient.shape)
    sums = np.bincount(flat.reshape(-1), parts.reshape(-1).astype(np.float64), gradient.size)
    gradient += sums.reshape(gradient.shape).astype(gradient.dtype)
