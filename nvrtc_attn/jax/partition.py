"""How XLA splits a pass over the devices of a mesh: each computes its batch entries and heads, nothing is gathered.

Batch and key heads may be split, query heads with the key head that they read; of one key head, query heads too. Every
other dim is gathered first. Of an operand that all devices share (a bias with batch 1, the key head of all query heads)
each device has a part of the gradient, and they are added up.

Dropout numbers the scores of the whole (all heads of all batch entries, in this order). Those of some batch entries are
again a whole, further on in the stream: the offset is moved. Those of some heads are a part (`Part`) as well, which
counts by the heads of the whole. No kernel reads a sink beside dropout of such a part: heads are gathered then.

Inside of a `jax.shard_map` nothing is split over its manual axes, and `varies` says which arrays differ from device to
device. Axes that it leaves to XLA (``axis_names``) have no names there: `unnamed_axes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..base.log import log_once
from ..front.call import CallOptions
from ..front.operands import OPERANDS
from ..front.part import Part
from .unnamed_axes import Tiles

Operands = Sequence[tuple[str, tuple[int, ...], str]]
"""(name, shape, dtype) of each."""
_Axes = tuple[str, ...]
_BATCH: Final = "batch"
_HEADS: Final = ("num_heads", "num_heads_kv")
_NO_MESH: Final = jax.sharding.AbstractMesh((), ())


class _Sizes(NamedTuple):
    batch: int
    num_heads: int
    num_heads_kv: int
    heads_of_whole: int
    """More than ``num_heads`` where the pass itself is of some heads."""
    scores: int
    """Of one head of the whole."""
    packed: bool
    together: bool
    """Whether heads are not split."""

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], options: CallOptions) -> _Sizes:
        (batch, rows, heads, _), (_, keys, heads_kv, _) = shapes["q"], shapes["k"]
        part, packed = options.part or Part(), "cu_seqlens_q" in shapes
        if packed:
            rows, keys = options.max_seqlen_q or 0, options.max_seqlen_k or 0
        _, of_whole, rows, keys = part.whole((batch, heads, rows, keys))
        behind = any(name in OPERANDS and OPERANDS[name].behind for name in shapes)
        return cls(batch, heads, heads_kv, of_whole, rows * keys, packed, behind and options.dropout_p > 0)

    def name(self, operand: str, dim: int, size: int) -> str:
        """Which dim of the problem this is: empty if it is of size 1, where all share it or there is but one."""
        if size == 1:
            return ""
        if operand in (_BATCH, "heads"):  # their numbers
            return _BATCH if operand == _BATCH else "num_heads"
        if operand not in OPERANDS:
            return ""
        axis = OPERANDS[operand].axes[dim]
        return _BATCH if axis in ("number of sequences", "sequences") and not self.packed else axis

    def names(self, operand: str, shape: Sequence[int]) -> list[str]:
        """Those of all dims of an operand or result."""
        return [self.name(operand, dim, size) for dim, size in enumerate(shape)]

    def whole(self, dim: int) -> int:
        return (self.batch, self.num_heads)[dim]

    def can_split(self, batch: int, heads: int) -> tuple[bool, bool]:
        """Whether so many devices share each of them in equal parts, heads by whole groups."""
        groups = self.num_heads_kv if self.num_heads_kv > 1 else self.num_heads
        return self.batch % batch == 0, not self.together and groups % heads == 0


def in_shard_map(operands: Mapping[str, Any]) -> bool:
    """Whether these are a device's own arrays."""
    return any(AxisType.Manual in jax.typeof(x).sharding.mesh.axis_types for x in operands.values())


def axes_are_left_to_xla() -> bool:
    """Whether this is inside of a `jax.shard_map` that has made some axes of the mesh manual, and not all."""
    kinds = {*jax.sharding.get_abstract_mesh().axis_types}
    return AxisType.Manual in kinds and len(kinds) > 1


def manual_axes() -> frozenset[str]:
    """The axes of the mesh that the `jax.shard_map` around here has made manual."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Manual)


def of_types(run: Callable[[dict[str, Any]], Any], operands: dict[str, Any], results: Sequence[str]) -> Any:
    """``run(operands)``, also of arrays whose types say how they are split, as those of `jax.make_mesh` do.

    Types of the results are then those of q: batch, rows and heads are split as there. In between XLA decides, as it
    does of arrays without such types; gradients have the types of what they are gradients of.
    """
    types = [jax.typeof(x).sharding for x in operands.values()]
    mesh = next((x.mesh for x in types if AxisType.Explicit in x.mesh.axis_types), None)
    if mesh is None:
        return run(operands)
    spec = (*jax.typeof(operands["q"]).sharding.spec, None, None, None)
    of_q = {"batch": spec[0], "sequences": spec[0], "seqlen_q": spec[1], "num_heads": spec[2]}
    if "cu_seqlens_q" in operands:
        of_q["sequences"] = None
    specs = [PartitionSpec(*(of_q.get(axis) for axis in OPERANDS[name].axes)) for name in results]
    axes = tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
    return jax.sharding.auto_axes(run, axes=axes, out_sharding=[NamedSharding(mesh, x) for x in specs])(operands)


def varies(*arrays: Any) -> frozenset[str]:
    """The manual axes of ``jax.shard_map`` over which one of the arrays differs from device to device."""
    types = [jax.typeof(x) for x in arrays if isinstance(x, jax.core.Tracer)]
    # Since jax 0.10 in a type of its own.
    return frozenset[str]().union(
        *(x.manual_axis_type.varying if hasattr(x, "manual_axis_type") else getattr(x, "vma", ()) for x in types)
    )


def says_what_varies(axis: str) -> bool:
    """Whether types say so here, inside of a `jax.shard_map` over this axis: with ``check_vma=False`` they do not."""
    return axis in varies(jax.lax.axis_index(axis))


def as_varying(x: Any, axes: frozenset[str]) -> Any:
    """``x`` as an array that may differ over these axes as well."""
    missing = tuple(axes - varies(x))
    if not missing:
        return x
    return jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)


def equally_varying(operands: dict[str, Any]) -> dict[str, Any]:
    """All operands as different as the most different one: the gradient of one that was the same is summed then."""
    axes = varies(*operands.values())
    return {name: as_varying(x, axes) for name, x in operands.items()} if axes else operands


def partitioned(
    run: Callable[..., Any],
    operands: Operands,
    results: Operands,
    options: CallOptions,
    *,
    functions: bool,
) -> Any:
    """``run({}, *operands)`` as XLA may split it.

    ``run`` gives ``results`` of whatever part its operands are. Its first argument has what a part needs to know of its
    place in the whole: ``offset``, in the dropout's stream, as words, and of how many ``heads`` it has some, if it has
    not all of them; with ``functions`` of the scores ``b`` and ``h``, the first batch entry and the first head.
    """
    names = [name for name, _, _ in operands]
    sizes = _Sizes.of({name: shape for name, shape, _ in operands}, options)
    (batch, heads), dropout = (sizes.batch, sizes.num_heads), options.dropout_p > 0
    if 0 in (batch, heads):
        return lambda *arrays: run({}, *arrays)
    # Where axes have no names, devices read in a part of these arrays which one is theirs.
    asks = (dropout or functions) and axes_are_left_to_xla()
    numbers: Operands = [(_BATCH, (batch,), "int32"), ("heads", (heads,), "int32")] if asks else []
    given = [*operands, *numbers]

    def split_of(mesh: Any, arguments: Sequence[Any]) -> _Split:
        sharding = arguments[names.index("q")].sharding
        if hasattr(sharding, "spec"):
            return _Split.of_axes(mesh, sharding, sizes)
        return _Split.of_tiles(Tiles.of(sharding), sizes, results, knows=asks or not (dropout or functions))

    def partition(mesh: Any, arguments: Sequence[Any], outcome: Any) -> Any:
        split = split_of(mesh, arguments)

        def part(*arrays: Any) -> Any:
            place: dict[str, Any] = {}
            firsts = [x[0] for x in arrays[len(operands) :]]
            if dropout and max(split.counts) > 1:
                start = arrays[names.index("offset")] if "offset" in names else jnp.zeros(2, np.uint32)
                place["offset"] = split.offset(start, firsts)
            if dropout and split.counts[1] > 1:
                place["heads"] = sizes.heads_of_whole
            if functions and max(split.counts) > 1:
                place = place | {name: split.first(dim, firsts) for dim, name in enumerate("bh")}
            found = run(place, *arrays[: len(operands)])
            return [split.total(x, *result[:2]) for x, result in zip(found, results, strict=True)]

        def apart(*arrays: Any) -> Any:
            # XLA asks while it compiles, under the mesh of `jax.set_mesh` if there is one. Operations on arrays of its
            # type say how they are split, which nobody reads any more: XLA then finds no "Sharding" to call.
            with jax.sharding.use_abstract_mesh(_NO_MESH):
                return part(*arrays)

        return mesh, apart, split.shardings(results), tuple(split.shardings(given))

    def infer(mesh: Any, arguments: Sequence[Any], outcome: Any) -> Any:
        return split_of(mesh, arguments).shardings(results)

    def whole(*arrays: Any) -> Any:
        return run({}, *arrays[: len(operands)])

    call = custom_partitioning(whole)
    call.def_partition(partition, infer, sharding_rule=_rule(given, results, sizes))
    return lambda *arrays: call(*arrays, *(jnp.arange(shape[0], dtype=np.int32) for _, shape, _ in numbers))


class _Split(NamedTuple):
    """How many devices share batch and heads, and which ones: by names of axes or, where they have none, by tiles."""

    sizes: _Sizes
    counts: tuple[int, int]
    mesh: Any = None
    axes: tuple[_Axes, _Axes] = ((), ())
    tiles: Tiles | None = None

    @classmethod
    def of_axes(cls, mesh: Any, sharding: Any, sizes: _Sizes) -> _Split:
        """The axes of the mesh over batch and over heads, of q's sharding; none where they do not divide."""
        spec = (*sharding.spec, None, None, None)
        batch, heads = _axes(spec[0]), _axes(spec[2])
        divides = sizes.can_split(_count(mesh, batch), _count(mesh, heads))
        axes = (batch if divides[0] else (), heads if divides[1] else ())
        return cls(sizes, (_count(mesh, axes[0]), _count(mesh, axes[1])), mesh, axes)

    @classmethod
    def of_tiles(cls, tiles: Tiles, sizes: _Sizes, results: Operands, *, knows: bool) -> _Split:
        """Those that divide, and of which no result is a sum over devices: no device can ask for it without a name.

        ``knows``: whether devices know their place, if they need to.
        """
        if tiles.partly_manual:
            log_once("XLA names axes that jax.shard_map has made manual: batch and heads are gathered over all others.")
        batch, heads = tiles.devices.shape[:2]
        divides = sizes.can_split(batch, heads) if knows else (False, False)
        own = [{*sizes.names(name, shape)} for name, shape, _ in results]
        kept = (divides[0] and all(_BATCH in x for x in own), divides[1] and all(x & {*_HEADS} for x in own))
        if any(
            count > 1 and may and not keeps for count, may, keeps in zip((batch, heads), divides, kept, strict=True)
        ):
            log_once(
                "q is split over an axis of the mesh that jax.shard_map leaves to XLA, and gradients are sums over it: "
                "it is gathered, and devices of that axis compute the same. Make the axis manual (axis_names)."
            )
        tiles = tiles.kept(*kept)
        return cls(sizes, (tiles.devices.shape[0], tiles.devices.shape[1]), tiles=tiles)

    def place(self, dim: int, firsts: Sequence[Any]) -> Any:
        """Which part of batch (dim 0) or heads (1) this device has; ``firsts``: its first of each, without names."""
        if self.counts[dim] == 1:
            return 0
        if self.tiles is None:
            return jax.lax.axis_index(self.axes[dim])
        return firsts[dim] // (self.sizes.whole(dim) // self.counts[dim])

    def first(self, dim: int, firsts: Sequence[Any]) -> Any:
        """The first index that a device has of batch or heads."""
        return jnp.asarray(self.place(dim, firsts) * (self.sizes.whole(dim) // self.counts[dim]), np.int32)

    def offset(self, start: Any, firsts: Sequence[Any]) -> Any:
        """``start`` and the scores of the whole that lie before this device's first one, as words."""
        sizes, (parts, parts_of_heads) = self.sizes, self.counts
        entries, heads = sizes.batch // parts, sizes.num_heads // parts_of_heads
        before = [
            (b * entries * sizes.heads_of_whole + h * heads) * sizes.scores
            for b in range(parts)
            for h in range(parts_of_heads)
        ]
        index = self.place(0, firsts) * parts_of_heads + self.place(1, firsts)
        low, high = jnp.asarray(np.stack([words_of(x) for x in before]))[index]
        total = start[0] + low
        return jnp.stack([total, start[1] + high + (total < low).astype(np.uint32)])

    def shardings(self, these: Operands) -> list[Any]:
        return [self._sharding(name, shape) for name, shape, _ in these]

    def _sharding(self, name: str, shape: Sequence[int]) -> Any:
        dims = self.sizes.names(name, shape)
        if self.tiles is None:
            of_axes = [(self.axes[0] if x == _BATCH else self.axes[1] if x in _HEADS else ()) or None for x in dims]
            return NamedSharding(self.mesh, PartitionSpec(*of_axes))
        heads = next((dim for dim, x in enumerate(dims) if x in _HEADS), None)
        return self.tiles.sharding(len(shape), dims.index(_BATCH) if _BATCH in dims else None, heads)

    def total(self, x: Any, name: str, shape: Sequence[int]) -> Any:
        """A result, over the devices that share it."""
        dims = {*self.sizes.names(name, shape)}
        axes = (*(() if _BATCH in dims else self.axes[0]), *(() if dims & {*_HEADS} else self.axes[1]))
        return jax.lax.psum(x.astype(np.float32), axes).astype(x.dtype) if axes else x


def _rule(operands: Operands, results: Operands, sizes: _Sizes) -> SdyShardingRule:
    """The same for Shardy: factors of the dims, and which of them must not be split."""
    group = sizes.num_heads // sizes.num_heads_kv
    kept: dict[str, None] = {}  # in the order of their first mention, which Shardy asks for
    factors: dict[str, int] = {}
    count = 0

    def factor(name: str, dim: int, size: int) -> Any:
        nonlocal count
        axis = sizes.name(name, dim, size)
        if axis == _BATCH:
            return "b"
        if axis in _HEADS and not sizes.together:
            if sizes.num_heads_kv == 1 or group == 1 or axis == "num_heads_kv":
                return "h"
            factors["g"] = group  # that of h is the whole dim of k
            kept.setdefault("g")
            return CompoundFactor("h", "g")
        count += 1
        name = f"n{count}"
        if size > 1:
            kept.setdefault(name)
        return name

    mappings = [
        ArrayMapping(*(factor(name, dim, size) for dim, size in enumerate(shape)))
        for name, shape, _ in (*operands, *results)
    ]
    split = len(operands)
    return SdyShardingRule(
        tuple(mappings[:split]), tuple(mappings[split:]), need_replication_factors=tuple(kept), **factors
    )


def _axes(entry: Any) -> _Axes:
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, (tuple, list)) else ()


def _count(mesh: Any, axes: _Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def words_of(number: int) -> np.ndarray[Any, Any]:
    """``number`` modulo 2^64 as ``uint32[2]``, low word first."""
    return np.asarray([number % 2**32, number // 2**32 % 2**32], np.uint32)
