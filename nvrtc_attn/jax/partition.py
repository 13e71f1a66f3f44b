"""How XLA splits a pass over the devices of a mesh: each computes its batch entries and heads, nothing is gathered.

Batch and key heads may be split, query heads with the key head that they read; of one key head, query heads too. Every
other dim is gathered first. Of an operand that all devices share (a bias with batch 1, the key head of all query heads)
each device has a part of the gradient, and they are added up.

Dropout numbers the scores of the whole (all heads of all batch entries, in this order). Those of some batch entries are
again a whole, further on in the stream: the offset is moved. Those of some heads are not, so that heads are gathered.

Inside `jax.shard_map` nothing is split, and `varies` says which arrays differ from device to device.
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

from ..front.operands import OPERANDS

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
    scores: int
    """Of one batch entry, all heads."""
    packed: bool

    def name(self, operand: str, dim: int, size: int) -> str:
        """Which dim of the problem this is: empty if it is of size 1, where all share it or there is but one."""
        if operand not in OPERANDS or size == 1:
            return ""
        axis = OPERANDS[operand].axes[dim]
        return _BATCH if axis in ("number of sequences", "sequences") and not self.packed else axis


def in_shard_map(operands: Mapping[str, Any]) -> bool:
    """Whether these are a device's own arrays."""
    return any(AxisType.Manual in jax.typeof(x).sharding.mesh.axis_types for x in operands.values())


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


def partitioned(run: Callable[..., Any], operands: Operands, results: Operands, dropout: bool, functions: bool) -> Any:
    """``run({}, *operands)`` as XLA may split it.

    ``run`` gives ``results`` of whatever part its operands are. Its first argument has what a part needs to know of its
    place in the whole: ``offset``, in the dropout's stream, as words; with ``functions`` of the scores ``b`` and ``h``,
    the first batch entry and the first head.
    """
    names = [name for name, _, _ in operands]
    shapes = {name: shape for name, shape, _ in operands}
    (batch, rows, heads, _), columns = shapes["q"], shapes["k"][1]
    sizes = _Sizes(batch, heads, shapes["k"][2], heads * rows * columns, "cu_seqlens_q" in shapes)
    if 0 in (batch, heads):
        return lambda *arrays: run({}, *arrays)

    def partition(mesh: Any, arguments: Sequence[Any], outcome: Any) -> Any:
        axes = _split(mesh, arguments[names.index("q")].sharding, sizes, dropout)

        def part(*arrays: Any) -> Any:
            place: dict[str, Any] = {}
            if dropout and axes[0]:
                start = arrays[names.index("offset")] if "offset" in shapes else jnp.zeros(2, np.uint32)
                place["offset"] = _moved(start, mesh, axes[0], sizes)
            if functions and any(axes):
                place |= {"b": _first(mesh, axes[0], batch), "h": _first(mesh, axes[1], heads)}
            found = run(place, *arrays)
            return [_total(x, _shared_over(*result[:2], sizes, axes)) for x, result in zip(found, results, strict=True)]

        def apart(*arrays: Any) -> Any:
            # XLA asks while it compiles, under the mesh of `jax.set_mesh` if there is one. Operations on arrays of its
            # type say how they are split, which nobody reads any more: XLA then finds no "Sharding" to call.
            with jax.sharding.use_abstract_mesh(_NO_MESH):
                return part(*arrays)

        def shardings(these: Operands) -> list[Any]:
            return [NamedSharding(mesh, _spec(name, shape, sizes, axes)) for name, shape, _ in these]

        return mesh, apart, shardings(results), tuple(shardings(operands))

    def infer(mesh: Any, arguments: Sequence[Any], outcome: Any) -> Any:
        axes = _split(mesh, arguments[names.index("q")].sharding, sizes, dropout)
        return [NamedSharding(mesh, _spec(name, shape, sizes, axes)) for name, shape, _ in results]

    def whole(*arrays: Any) -> Any:
        return run({}, *arrays)

    call = custom_partitioning(whole)
    call.def_partition(partition, infer, sharding_rule=_rule(operands, results, sizes, dropout))
    return call


def _rule(operands: Operands, results: Operands, sizes: _Sizes, dropout: bool) -> SdyShardingRule:
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
        if axis in _HEADS and not dropout:
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


def _split(mesh: Any, sharding: Any, sizes: _Sizes, dropout: bool) -> tuple[_Axes, _Axes]:
    """The axes of the mesh over batch and over heads, of q's sharding; none where they do not divide."""
    spec = (*getattr(sharding, "spec", ()), None, None, None)
    batch, heads = _axes(spec[0]), _axes(spec[2])
    if sizes.batch % _count(mesh, batch):
        batch = ()
    whole_groups = sizes.num_heads_kv if sizes.num_heads_kv > 1 else sizes.num_heads
    if dropout or whole_groups % _count(mesh, heads):
        heads = ()
    return batch, heads


def _axes(entry: Any) -> _Axes:
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, (tuple, list)) else ()


def _count(mesh: Any, axes: _Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _spec(name: str, shape: Sequence[int], sizes: _Sizes, axes: tuple[_Axes, _Axes]) -> PartitionSpec:
    entries: list[Any] = []
    for dim, size in enumerate(shape):
        axis = sizes.name(name, dim, size)
        entries.append((axes[0] if axis == _BATCH else axes[1] if axis in _HEADS else ()) or None)
    return PartitionSpec(*entries)


def _shared_over(name: str, shape: Sequence[int], sizes: _Sizes, axes: tuple[_Axes, _Axes]) -> _Axes:
    """The axes whose devices share this result."""
    dims = {sizes.name(name, dim, size) for dim, size in enumerate(shape)}
    return (*(() if _BATCH in dims else axes[0]), *(() if dims & set(_HEADS) else axes[1]))


def _total(x: Any, axes: _Axes) -> Any:
    return jax.lax.psum(x.astype(np.float32), axes).astype(x.dtype) if axes else x


def _first(mesh: Any, axes: _Axes, size: int) -> Any:
    """The first index that a device has of a dim of ``size`` that is split over these axes."""
    first = jax.lax.axis_index(axes) * (size // _count(mesh, axes)) if axes else 0
    return jnp.asarray(first, np.int32)


def words_of(number: int) -> np.ndarray[Any, Any]:
    """``number`` modulo 2^64 as ``uint32[2]``, low word first."""
    return np.asarray([number % 2**32, number // 2**32 % 2**32], np.uint32)


def _moved(start: Any, mesh: Any, axes: _Axes, sizes: _Sizes) -> Any:
    """``start`` and the scores of the batch entries before those of this device, as words."""
    devices = _count(mesh, axes)
    before = np.stack([words_of(index * (sizes.batch // devices) * sizes.scores) for index in range(devices)])
    low, high = jnp.asarray(before)[jax.lax.axis_index(axes)]
    total = start[0] + low
    return jnp.stack([total, start[1] + high + (total < low).astype(np.uint32)])
