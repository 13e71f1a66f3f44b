"""Attention over a sequence that is sharded over an axis of a mesh, inside `jax.shard_map`.

One program runs on all devices, which differ in where their rows lie. It branches on the index of the device, with the
place of each known while tracing, so that every branch is an ordinary part (`nvrtc_attn.Part`) with its own bounds; or
places are numbers on the device, of calls that are the same everywhere: how many keys the rows of a causal call see,
or where they begin in the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..base.errors import shown
from ..front import chunks as layouts
from ..front.call import CallOptions, plain_options
from ..front.chunks import Band, Chunks, Interval, band_of, chunks_of, reach
from ..front.modified import banded_options
from ..front.part import MAX_PLACED, ArrayStart, Part
from ..front.problem import Causal, WindowSize
from ..front.validation import Violations, check_window
from ..modifiers.modifier import Modifier
from .custom_call import compute, gradients_of_part
from .modifier import traced
from .partition import as_varying, varies
from .passes import ROW_START, Kind, captured, check_call, rng_words, with_modifier

STRATEGIES: Final = ("auto", "all_gather", "ulysses", "ring")
PLACES: Final = ("auto", "branches", "device")
AxisNames = str | Sequence[str]
_MOST_BRANCHES: Final = 8
"""Devices up to which a program has the calls of all of them: two each, in both passes. Tiles then follow each one's
place, as they cannot where places are known on the device alone."""


@dataclass(frozen=True, slots=True)
class _Whole:
    """The attention that all devices compute together; everything that is known while tracing."""

    kind: Kind
    axis: str
    ranks: int
    chunks_q: tuple[Chunks, ...]
    chunks_k: tuple[Chunks, ...]
    band: Band
    rows: int
    keys: int
    pieces: int
    """Of each device."""
    heads: int
    """Of the whole, which are more than a device has where another axis of the mesh shares them."""
    on_device: bool = False
    """Whether where rows lie is a number on the device."""
    counted: bool = False
    """Whether that number is how many keys they see, and not where they begin."""
    ring: bool = False
    """Whether keys go around instead of being gathered."""

    @property
    def sink_beside(self) -> bool:
        """Whether a sink is added to what calls without it give.

        No kernel reads one beside dropout of a part or beside where rows begin; and of a ring no call has all keys.
        """
        return self.ring or self.kind.options.dropout_p > 0 or (self.on_device and not self.counted)

    def numbered(self, kind: Kind) -> Kind:
        """The call of rows whose place a device knows.

        It has the first keys, as many as ``seqused_k`` says, which end where those of the last row do: a causal mask is
        aligned there, and the window is counted from it.
        """
        first, last = self.band
        assert last is not None
        return kind.changed(causal=True, window_size=(None if first is None else last - first, None), return_lse=True)

    def placed(self, kind: Kind) -> Kind:
        """The call of rows that begin where an operand of its own says, with all keys."""
        return kind.changed(part=self.part(0, (ArrayStart(), 0), (0, 0)).options.part, return_lse=True)

    def part(self, first_head: int = 0, rows: tuple[Any, int] | None = None, keys: Interval | None = None) -> Kind:
        """The call of these heads, rows and keys. Where other axes share heads, the first is that of the device's."""
        part = Part(
            heads=(first_head, self.heads),
            rows=None if rows is None else (rows[0], self.rows),
            keys=None if keys is None else (keys[0], self.keys),
        )
        return self.kind.changed(part=part, return_lse=True)


def context_parallel_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: str,
    batch_axis: AxisNames = (),
    heads_axis: AxisNames = (),
    strategy: str = "auto",
    layout: str = "zigzag",
    places: str = "auto",
    bias: Any = None,
    mask: Any = None,
    sink: Any = None,
    causal: Causal = False,
    window_size: WindowSize = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: Mapping[str, Any] | None = None,
) -> Any:
    """`nvrtc_attn.jax.attention` of this device's tokens in the whole sequence, inside `jax.shard_map`.

    Parameters
    ----------
    q : ``[B, tokens, H, K]``
    k : ``[B, tokens, Hkv, K]``
    v : ``[B, tokens, Hkv, Kv]``
        The tokens of this device, as many on each.
    axis_name
        The axis of the mesh over which the sequence is sharded.
    batch_axis, heads_axis
        The axis, or axes as in a `jax.sharding.PartitionSpec`, over which batch and heads are sharded: devices then
        have their own part of the dropout mask, and ``score_mod`` and ``mask_mod`` get the indices of the whole.
        A mesh with such axes needs them for nothing else.
    strategy
        ``"all_gather"``: each device gathers the keys. ``"ulysses"``: devices swap tokens for heads, whose number they
        divide. ``"ring"``: keys go around, and a device holds those of two devices at a time; a program has the calls
        of all pairs of them. ``"auto"``: ulysses where the devices divide the key heads, otherwise all_gather.
    layout
        Which tokens a device has: ``"zigzag"``, pieces r and 2 N - 1 - r of 2 N (equal work under a causal mask), or
        ``"contiguous"``. `nvrtc_attn.jax.parallel.zigzag` puts a whole sequence in that order.
    places
        Of ``"all_gather"``, how a program knows where its rows lie. ``"branches"``: it has the calls of all devices,
        each with the keys that they reach. ``"device"``: one call for each of its pieces, whose place is a number on
        the device, which the kernels read. ``"auto"``: branches up to 8 devices, and without rows or keys.
    bias, mask : ``[1|B, 1|H, 1|tokens, 1|Mk]``, optional
        This device's rows (or one), all keys of the whole. Only of ``"all_gather"``.
    sink : float32 ``[H]``, optional
        Of this device's heads, as in `nvrtc_attn.jax.attention`: the same on all devices of ``axis_name``.
    rng
        The same on all devices. The mask is `nvrtc_attn.dropout_keep_mask` of the whole.

    score_mod, mask_mod, aux
        The indices that they get are those of the whole, and so are the arrays that they captured, which every device
        has: arguments of `jax.shard_map` that are not sharded (``P()``), or constants. Their gradients are the whole's.

    The others are those of `nvrtc_attn.jax.attention`. Differentiable once in q, k, v, bias, sink, captured arrays and
    a returned lse; what devices return of dk and dv is added up in float32.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        While tracing, on all devices alike: they run one program. Among them tensors that are sharded over an axis
        without a name here, with dropout or functions of the batch entry and head, which then cannot be told.
    """
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "sink": sink}
    _check_names(axis_name, given)
    ranks = int(jax.lax.psum(1, axis_name))
    beside = _Beside.of(axis_name, batch_axis, heads_axis)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: got {shown(strategy)}. It is one of {STRATEGIES}.")
    if places not in PLACES:
        raise ValueError(f"places: got {shown(places)}. It is one of {PLACES}.")
    if layout not in ("zigzag", "contiguous"):
        raise ValueError(f"layout: got {shown(layout)}. It is 'zigzag' or 'contiguous'.")
    operands = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    for name, x in operands.items():
        if name != "sink" and x.ndim != 4:
            raise ValueError(f"{name}: shape {x.shape} has rank {x.ndim}. Expected rank 4.")
    if operands["k"].shape[1] != operands["v"].shape[1]:
        raise ValueError(f"k, v: shapes {operands['k'].shape} and {operands['v'].shape}. Dim 1 is the same in both.")
    for name in ("q", "k", "v"):
        if layout == "zigzag" and operands[name].shape[1] % 2:
            raise ValueError(f"{name}: {operands[name].shape[1]} tokens are no two pieces. Pass layout='contiguous'.")
    rows, keys = (operands[name].shape[1] * ranks for name in "qk")
    options = CallOptions(
        causal, window_size, softmax_scale, softcap, dropout_p, return_lse=return_lse, deterministic=deterministic
    )
    # The whole's tensors are what the options are checked against; bias and mask have this device's rows.
    shapes = {name: (x.shape, x.dtype.name) for name, x in operands.items()}
    for name, whole_length, dim in (
        ("q", rows, 1),
        ("k", keys, 1),
        ("v", keys, 1),
        ("bias", rows, 2),
        ("mask", rows, 2),
    ):
        if name in shapes and (dim == 1 or shapes[name][0][2] != 1):
            shape = list(shapes[name][0])
            if dim == 2 and shape[2] != operands["q"].shape[1]:
                raise ValueError(f"{name}: shape {tuple(shape)}, whose dim 2 must be 1 or {operands['q'].shape[1]}.")
            shape[dim] = whole_length
            shapes[name] = (tuple(shape), shapes[name][1])
    modifier = traced(score_mod, mask_mod, aux)
    batch, heads = operands["q"].shape[0], operands["q"].shape[2]
    if modifier is not None:
        beside.check_functions(modifier, varies(*operands.values()))
        modifier = beside.in_whole(modifier, batch, heads)
    check_call(shapes, options, modifier)
    banded = options if modifier is None else banded_options(modifier, options, (rows, keys))
    left, right = check_window(Violations(), banded.causal, banded.window_size)
    arrays: dict[str, Any] = {}
    if options.dropout_p > 0:
        arrays = rng_words(rng)
        beside.check_dropout(arrays, varies(*operands.values()))
        arrays |= beside.offset(arrays, batch, heads, rows * keys)
    kind = Kind(plain_options(options))
    if modifier is not None:
        kind, captures = with_modifier(kind, modifier)
        arrays |= captures
    whole = _Whole(
        kind, axis_name, ranks, chunks_of(layout, rows, ranks), chunks_of(layout, keys, ranks),
        band_of(left, right, rows, keys, banded.causal != "top_left"), rows, keys,
        2 if layout == "zigzag" else 1, heads * beside.heads_ranks,
    )  # fmt: skip
    heads_kv = operands["k"].shape[2]
    scores = "bias" in operands or "mask" in operands
    if strategy == "auto":
        strategy = "ulysses" if heads_kv % ranks == 0 and not scores else "all_gather"
    whole = replace(whole, counted=_counts_keys(whole))
    why_not = _why_no_numbers(whole)
    if places == "device" and (why_not or strategy != "all_gather"):
        raise ValueError(f"places: 'device', but {why_not or f'strategy is {strategy!r}'}. Pass 'branches' or 'auto'.")
    on_device = places == "device" or (places == "auto" and ranks > _MOST_BRANCHES and not why_not)
    whole = replace(whole, on_device=on_device and strategy == "all_gather", ring=strategy == "ring")
    axes = varies(*operands.values()) | {axis_name}
    operands = {name: as_varying(x, axes) for name, x in {**operands, **arrays}.items()}
    if strategy == "ulysses":
        if heads_kv % ranks:
            raise ValueError(f"strategy: 'ulysses' over {ranks} devices, which do not divide {heads_kv} key heads.")
        if scores:
            raise ValueError("strategy: 'ulysses' takes no bias and no mask. Pass strategy='all_gather'.")
    if not rows or not keys:
        out, lse = _of_nothing(operands)
    elif strategy == "ulysses":
        out, lse = _ulysses(whole, operands)
    else:
        out, lse = _gathered(whole, operands)
    return (out, lse) if return_lse else out


def _check_names(axis_name: Any, given: dict[str, Any]) -> None:
    """Refuse what is no axis, and tensors that are missing."""
    if axis_name is None or isinstance(axis_name, tuple | list):
        raise TypeError(f"axis_name: got {shown(axis_name)}. It is one axis of the mesh.")
    for name in "qkv":
        if given[name] is None:
            raise TypeError(f"{name}: got None. It is this device's tokens, [batch, tokens, heads, head_dim].")


def _of_nothing(operands: dict[str, Any]) -> tuple[Any, Any]:
    """What rows without any key have, or no rows: XLA gathers nothing that is empty."""
    (batch, tokens, heads, _), axes = operands["q"].shape, varies(*operands.values())
    out = jnp.zeros((batch, tokens, heads, operands["v"].shape[3]), operands["q"].dtype)
    sink = operands.get("sink", jnp.full(heads, -jnp.inf, np.float32)).astype(np.float32)
    lse = jnp.broadcast_to(sink[:, None], (batch, heads, tokens))
    return as_varying(out, axes), as_varying(lse, axes)


@dataclass(frozen=True, slots=True)
class _Beside:
    """The axes of the mesh that share batch and heads, beside the one that shares the sequence."""

    named: frozenset[str]
    batch: tuple[str, ...]
    heads: tuple[str, ...]

    @classmethod
    def of(cls, axis_name: str, batch_axis: AxisNames, heads_axis: AxisNames) -> _Beside:
        batch, heads = ((x,) if isinstance(x, str) else tuple(x) for x in (batch_axis, heads_axis))
        names = (axis_name, *batch, *heads)
        if len({*names}) < len(names):
            raise ValueError(
                f"axis_name, batch_axis, heads_axis: got {axis_name!r}, {batch_axis!r} and {heads_axis!r}. An axis of "
                f"the mesh shares one thing."
            )
        return cls(frozenset(names), batch, heads)

    @property
    def heads_ranks(self) -> int:
        return _size(self.heads)

    def first(self, batch: int, heads: int) -> dict[str, Any]:
        """Where the device's b and h begin in the whole, of those that are shared."""
        found = (("b", self.batch, batch), ("h", self.heads, heads))
        return {name: np.int32(size) * jax.lax.axis_index(axes) for name, axes, size in found if axes}

    def in_whole(self, modifier: Modifier, batch: int, heads: int) -> Modifier:
        """The functions with the indices of the whole; refuses lists of blocks for other heads."""
        modifier.check_sizes(heads * self.heads_ranks)
        return modifier.moved_on_device(self.first(batch, heads))

    def offset(self, arrays: Mapping[str, Any], batch: int, heads: int, scores: int) -> dict[str, Any]:
        """That of the device's dropout numbers (A8), in 32-bit words: products of 64 bits are made while tracing."""
        if not self.batch and not self.heads:
            return {}
        of_heads, of_batch = self.heads_ranks, _size(self.batch)
        firsts = [(b * batch * of_heads * heads + h * heads) * scores for b in range(of_batch) for h in range(of_heads)]
        words = jnp.asarray(np.asarray(firsts, np.uint64).view(np.uint32).reshape(-1, 2))
        low, high = words[jax.lax.axis_index((*self.batch, *self.heads))]
        if "offset" in arrays:
            before, high_before = arrays["offset"]
            low = low + before
            high = high + high_before + (low < before).astype(np.uint32)
        return {"offset": jnp.stack([low, high])}

    def check_dropout(self, arrays: Mapping[str, Any], varying: frozenset[str]) -> None:
        """Refuse devices that would drop the same scores of different batch entries or heads."""
        unknown = self._unnamed(varying - varies(*arrays.values()))
        if unknown:
            raise ValueError(
                f"rng: q, k or v are sharded over {', '.join(unknown)}, and the dropout mask would be the same there. "
                f"Pass batch_axis= or heads_axis=."
            )

    def check_functions(self, modifier: Modifier, varying: frozenset[str]) -> None:
        """Refuse functions of b or h where those are indices of the device, unless they captured what is, too."""
        program, unknown = modifier.program, self._unnamed(varying - varies(*modifier.captures))
        if unknown and any(x.depends & {"b", "h"} for x in (program.score, program.mask) if x is not None):
            raise ValueError(
                f"score_mod, mask_mod: q, k or v are sharded over {', '.join(unknown)}, and the functions would get "
                f"indices of the device, where they read b or h. Pass batch_axis= or heads_axis=."
            )

    def _unnamed(self, axes: frozenset[str]) -> list[str]:
        return sorted(repr(x) for x in axes - self.named if _size((x,)) > 1)


def _size(axes: tuple[str, ...]) -> int:
    return int(jax.lax.psum(1, axes)) if axes else 1


def _counts_keys(whole: _Whole) -> bool:
    """Whether rows can be told by how many keys they see, to whose end a causal mask is aligned.

    Numbers of dropout and of functions count from the beginning.
    """
    options, last = whole.kind.options, whole.band[1]
    if options.dropout_p > 0 or whole.kind.program is not None:
        return False
    return whole.rows > 0 and last is not None and 0 <= last <= whole.keys - whole.rows


def _why_no_numbers(whole: _Whole) -> str:
    """Why the place of rows cannot be a number on the device; empty where it can."""
    if 0 < min(whole.rows, whole.keys) <= max(whole.rows, whole.keys) <= MAX_PLACED:
        return ""
    return f"there are {whole.rows} rows and {whole.keys} keys"


def zigzag(x: Any, devices: int, axis: int = 1, *, back: bool = False) -> Any:
    """A whole sequence in the order of the zigzag layout over so many devices, or ``back`` in its own."""
    pieces = 2 * devices
    if x.shape[axis] % pieces:
        raise ValueError(f"x: dim {axis} is {x.shape[axis]}, which does not divide by {pieces}, two pieces a device.")
    order = [piece for r in range(devices) for piece in (r, pieces - 1 - r)]
    if back:
        order = [int(i) for i in np.argsort(order)]
    parts = jnp.split(x, pieces, axis)
    return jnp.concatenate([parts[i] for i in order], axis)


def _in_order(x: Any, chunks: Sequence[Chunks], axis: int) -> Any:
    """Tokens of all devices, one device after the other, in the order of the sequence."""
    pieces, at = [], 0
    for of_rank in chunks:
        for a, b in of_rank:
            pieces.append((a, jax.lax.slice_in_dim(x, at, at + b - a, axis=axis)))
            at += b - a
    return jnp.concatenate([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], axis)


def _by_device(x: Any, chunks: Sequence[Chunks], axis: int) -> Any:
    """Tokens in the order of the sequence, one device after the other."""
    return jnp.concatenate([jax.lax.slice_in_dim(x, a, b, axis=axis) for of_rank in chunks for a, b in of_rank], axis)


# --------------------------------------------------------------------------------------------------------- ulysses


def _ulysses(whole: _Whole, operands: dict[str, Any]) -> tuple[Any, Any]:
    """Tokens for heads, the attention of those, and back: differentiated by JAX, as its parts are."""
    heads = operands["q"].shape[2]
    swapped = dict(operands)
    for name, chunks in (("q", whole.chunks_q), ("k", whole.chunks_k), ("v", whole.chunks_k)):
        x = jax.lax.all_to_all(operands[name], whole.axis, split_axis=2, concat_axis=1, tiled=True)
        swapped[name] = _in_order(x, chunks, 1)
    mine = heads // whole.ranks
    if "sink" in operands:
        first = jax.lax.axis_index(whole.axis) * mine
        swapped["sink"] = jax.lax.dynamic_slice_in_dim(operands["sink"], first, mine)
    # Without dropout and modifiers it does not matter which heads they are.
    matters = whole.kind.options.dropout_p > 0 or whole.kind.program is not None
    places_of = [r * mine for r in range(whole.ranks)] if matters else [0]
    branches = [partial(compute, whole.part(first)) for first in places_of]
    sink = swapped.pop("sink", None) if whole.sink_beside else None
    if len(branches) == 1:
        out, lse = branches[0](swapped)
    else:
        out, lse = jax.lax.switch(jax.lax.axis_index(whole.axis), branches, swapped)
    if sink is not None:
        with_sink, lse = _with_sink(out.astype(np.float32), lse, sink)
        out = with_sink.astype(out.dtype)
    out = jax.lax.all_to_all(_by_device(out, whole.chunks_q, 1), whole.axis, split_axis=1, concat_axis=2, tiled=True)
    lse = jax.lax.all_to_all(_by_device(lse, whole.chunks_q, 2), whole.axis, split_axis=2, concat_axis=1, tiled=True)
    return out, lse


# ------------------------------------------------------------------------------------------------------ all_gather


def _all_keys(whole: _Whole, x: Any) -> Any:
    return _in_order(jax.lax.all_gather(x, whole.axis, axis=1, tiled=True), whole.chunks_k, 1)


def _forward(whole: _Whole, operands: dict[str, Any]) -> list[Any]:
    if whole.ring:
        return _ring_forward(whole, operands)
    everything = operands | {name: _all_keys(whole, operands[name]) for name in ("k", "v")}
    if whole.on_device:
        return list(_rows_forward(whole, None, everything))
    branches = [partial(_rows_forward, whole, r) for r in range(whole.ranks)]
    out, lse = jax.lax.switch(jax.lax.axis_index(whole.axis), branches, everything)
    return [out, lse]


def _sliced(operands: dict[str, Any], at: slice, keys: Interval) -> dict[str, Any]:
    """What some rows of a device see of its operands."""
    found = dict(operands)
    found["q"] = operands["q"][:, at]
    for name in ("k", "v"):
        found[name] = operands[name][:, keys[0] : keys[1]]
    for name in ("bias", "mask"):
        if name in operands:
            x = operands[name]
            x = x if x.shape[2] == 1 else x[:, :, at]
            found[name] = x if x.shape[3] == 1 else x[..., keys[0] : keys[1]]
    return found


def _rows(whole: _Whole, rank: int) -> list[tuple[Interval, slice, Interval]]:
    """Chunks of a device's queries, where its tensors have them, and the keys that they see."""
    mine = whole.chunks_q[rank]
    found = zip(mine, layouts.places(mine, mine), strict=True)
    return [(chunk, at, reach(chunk, whole.band, whole.keys)) for chunk, at in found]


def _calls(
    whole: _Whole, kind: Kind, rank: int | None, operands: dict[str, Any]
) -> list[tuple[Kind, dict[str, Any], slice, Interval]]:
    """The calls of a device, or of any one: with their operands, where its tensors have the rows, and their keys."""
    if rank is not None:
        return [
            (kind.changed(part=whole.part(0, chunk, keys).options.part), _sliced(operands, at, keys), at, keys)
            for chunk, at, keys in _rows(whole, rank)
        ]
    size = whole.rows // whole.ranks // whole.pieces
    # Pieces side by side are one chunk, as the last device's of a zigzag are: here each is one as on the others.
    starts = [[i for chunk in chunks for i in range(*chunk, size)] for chunks in whole.chunks_q]
    mine = jnp.asarray(starts, np.int32)[jax.lax.axis_index(whole.axis)]
    axes, last, keys = varies(*operands.values()), whole.band[1] or 0, (0, whole.keys)
    found = []
    for i in range(whole.pieces):
        at = slice(i * size, (i + 1) * size)
        if whole.counted:
            place = {"seqused_k": jnp.broadcast_to(mine[i] + (size + last), operands["q"].shape[:1])}
        else:
            place = {ROW_START: mine[i].reshape(1)}
        values = _sliced(operands, at, keys) | {name: as_varying(x, axes) for name, x in place.items()}
        found.append((whole.numbered(kind) if whole.counted else whole.placed(kind), values, at, keys))
    return found


def _rows_forward(whole: _Whole, rank: int | None, operands: dict[str, Any]) -> tuple[Any, Any]:
    kind, sink = whole.kind.changed(return_lse=True), None
    if "sink" in operands and whole.sink_beside:
        sink, kind = operands["sink"], replace(kind, float32_q=True)
        operands = _without_sink(operands)
    parts = [compute(of_call, values) for of_call, values, *_ in _calls(whole, kind, rank, operands)]
    outs, lses = zip(*parts, strict=True)
    out, lse = jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)
    if sink is None:
        return out, lse
    out, lse = _with_sink(out, lse, sink)
    return out.astype(operands["q"].dtype), lse


def _without_sink(operands: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in operands.items() if name != "sink"}


def _with_sink(out: Any, lse: Any, sink: Any) -> tuple[Any, Any]:
    """Out in float32 and lse with one more logit of each head, which has no value."""
    total = jnp.logaddexp(lse, sink.astype(np.float32)[:, None])
    return out * _share(lse, total).swapaxes(1, 2)[..., None], total


def _share(x: Any, total: Any) -> Any:
    """``exp(x - total)``, 0 where both are -inf."""
    return jnp.where(jnp.isneginf(x), 0, jnp.exp(x - jnp.where(jnp.isneginf(total), 0, total)))


def _of_sink(operands: dict[str, Any]) -> Any:
    """The gradient of a sink: d lse / d sink is its share, d out / d sink that times -out."""
    out, dout = (operands[name].astype(np.float32) for name in ("out", "dout"))
    shift = operands.get("dlse", 0) - (out * dout).sum(-1).swapaxes(1, 2)
    share = _share(operands["sink"].astype(np.float32)[:, None], operands["lse"])
    return (share * shift).sum((0, 2))


def _zeros(kind: Kind, operands: dict[str, Any]) -> dict[str, Any]:
    """Of the gradients that a backward pass adds up, in float32."""
    asked = (name for name in ("bias", "sink") if getattr(kind.options, f"d{name}"))
    names = ("q", "k", "v", *asked, *(captured(kind)[i] for i in kind.trained))
    axes = varies(*operands.values())
    return {name: as_varying(jnp.zeros(operands[name].shape, np.float32), axes) for name in names}


def _replaced(x: Any, place: tuple[slice, ...], part: Any) -> Any:
    """``x`` with ``part`` at ``place``.

    As ``x.at[place].set(part)``, whose indices are an array without elements where ``place`` is all of ``x``: with that
    as a constant beside a `jax.shard_map`, XLA dies in its pass for sharding (JAX 0.11.2, any platform).
    """
    if part.shape == x.shape:
        return part
    starts = [at.indices(size)[0] for at, size in zip(place, x.shape, strict=False)]
    return jax.lax.dynamic_update_slice(x, part, [*starts, *[0] * (x.ndim - len(starts))])


def _add(total: dict[str, Any], gradients: dict[str, Any], at: slice, keys: Interval, where: slice) -> None:
    """Add the gradients of one call, of these rows and keys. ``where`` the tensors of k and v have those."""
    everywhere = slice(None)
    for name, x in total.items():
        place: tuple[slice, ...] = ()  # captured arrays are the whole's
        if name == "q":
            place = (everywhere, at)
        elif name in ("k", "v"):
            place = (everywhere, where)
        elif name == "bias":
            of_rows = everywhere if x.shape[2] == 1 else at
            place = (everywhere, everywhere, of_rows, everywhere if x.shape[3] == 1 else slice(*keys))
        total[name] = _replaced(x, place, x[place] + gradients[name].astype(np.float32))


def _rows_backward(whole: _Whole, kind: Kind, rank: int | None, operands: dict[str, Any]) -> dict[str, Any]:
    """Gradients of a device's operands in float32: of k, v for all keys, of one-row biases and captures its share."""
    total = _zeros(kind, operands)
    if "sink" in operands and whole.sink_beside:
        of_sink = {"sink": total.pop("sink") + _of_sink(operands)} if "sink" in total else {}
        return _rows_backward(whole, kind.changed(dsink=False), rank, _without_sink(operands)) | of_sink
    for of_call, values, at, keys in _calls(whole, kind, rank, operands):
        if keys[0] == keys[1]:
            if "sink" in total and "dlse" in operands:  # whose lse the sink is alone
                total["sink"] += operands["dlse"][:, :, at].sum((0, 2))
            continue
        for name, dim in (("out", 1), ("dout", 1), ("lse", 2), ("dlse", 2)):
            if name in operands:
                values[name] = operands[name][:, at] if dim == 1 else operands[name][:, :, at]
        _add(total, gradients_of_part(of_call, values), at, keys, slice(*keys))
    return total


# ------------------------------------------------------------------------------------------------------------- ring


def _passed_on(whole: _Whole, x: Any) -> Any:
    """What the device before has."""
    return jax.lax.ppermute(x, whole.axis, [(r, (r + 1) % whole.ranks) for r in range(whole.ranks)])


def _on_pairs(whole: _Whole, step: int, function: Any, operands: dict[str, Any]) -> Any:
    """``function(rank, rank whose keys it has, operands)`` of this device, after so many steps."""
    branches = [partial(function, r, (r - step) % whole.ranks) for r in range(whole.ranks)]
    return jax.lax.switch(jax.lax.axis_index(whole.axis), branches, operands)


def _pairs(
    whole: _Whole, kind: Kind, rank: int, source: int, operands: dict[str, Any]
) -> list[tuple[Kind, dict[str, Any], slice, Interval, slice]]:
    """Calls of a device's rows with keys of another: operands, where the rows and the keys lie, and which keys."""
    theirs = whole.chunks_k[source]
    found = []
    for chunk, at, seen in _rows(whole, rank):
        for (a, b), there in zip(theirs, layouts.places(theirs, theirs), strict=True):
            keys = max(a, seen[0]), min(b, seen[1])
            if keys[0] >= keys[1]:
                continue
            where = slice(there.start + keys[0] - a, there.start + keys[1] - a)
            values = _sliced(operands, at, keys) | {name: operands[name][:, where] for name in ("k", "v")}
            of_call = kind.changed(part=whole.part(0, chunk, keys).options.part, return_lse=True)
            found.append((of_call, values, at, keys, where))
    return found


def _pair_forward(whole: _Whole, rank: int, source: int, operands: dict[str, Any]) -> tuple[Any, Any]:
    """Out so far and its lse, ``sum`` and ``log`` of the operands, with some more keys."""
    out, lse = operands["sum"], operands["log"]
    kind = replace(whole.kind, float32_q=True)
    given = {name: x for name, x in operands.items() if name not in ("sum", "log")}
    for of_call, values, at, *_ in _pairs(whole, kind, rank, source, given):
        out_part, lse_part = compute(of_call, values)
        before = lse[:, :, at]
        total = jnp.logaddexp(before, lse_part)
        finite = jnp.where(jnp.isneginf(total), 0, total)  # -inf - -inf would be NaN
        old, new = (jnp.exp(x - finite).swapaxes(1, 2)[..., None] for x in (before, lse_part))
        out = _replaced(out, (slice(None), at), out[:, at] * old + out_part * new)
        lse = _replaced(lse, (slice(None), slice(None), at), total)
    return out, lse


def _ring_forward(whole: _Whole, operands: dict[str, Any]) -> list[Any]:
    q, axes = operands["q"], varies(*operands.values())
    batch, rows, heads, _ = q.shape
    out = as_varying(jnp.zeros((batch, rows, heads, operands["v"].shape[3]), np.float32), axes)
    lse = as_varying(jnp.full((batch, heads, rows), -jnp.inf, np.float32), axes)
    going = _without_sink(operands)
    for step in range(whole.ranks):
        out, lse = _on_pairs(whole, step, partial(_pair_forward, whole), going | {"sum": out, "log": lse})
        if step + 1 < whole.ranks:
            going |= {name: _passed_on(whole, going[name]) for name in ("k", "v")}
    if "sink" in operands:
        out, lse = _with_sink(out, lse, operands["sink"])
    return [out.astype(q.dtype), lse]


def _pair_backward(whole: _Whole, kind: Kind, rank: int, source: int, operands: dict[str, Any]) -> dict[str, Any]:
    """Gradients so far, whose names begin with ``sum``, with the shares of some more keys."""
    total = {name[3:]: x for name, x in operands.items() if name.startswith("sum")}
    given = {name: x for name, x in operands.items() if not name.startswith("sum")}
    for of_call, values, at, keys, where in _pairs(whole, kind, rank, source, given):
        for name, dim in (("out", 1), ("dout", 1), ("lse", 2), ("dlse", 2)):
            if name in given:
                values[name] = given[name][:, at] if dim == 1 else given[name][:, :, at]
        _add(total, gradients_of_part(of_call, values), at, keys, where)
    return total


def _ring_gradients(whole: _Whole, kind: Kind, operands: dict[str, Any]) -> dict[str, Any]:
    """As `_rows_backward`, but dk and dv of this device's keys."""
    kind = replace(kind, float32_q=not kind.options.deterministic)
    total, going = _zeros(kind, operands), _without_sink(operands)
    of_sink, kind = total.pop("sink", None), kind.changed(dsink=False)
    for step in range(whole.ranks):
        sums = {f"sum{name}": x for name, x in total.items()}
        total = _on_pairs(whole, step, partial(_pair_backward, whole, kind), going | sums)
        # Gradients travel with their keys, and after the last step home.
        total |= {name: _passed_on(whole, total[name]) for name in ("k", "v")}
        if step + 1 < whole.ranks:
            going |= {name: _passed_on(whole, going[name]) for name in ("k", "v")}
    if of_sink is not None:  # once for all keys
        total["sink"] = of_sink + _of_sink(operands)
    return total


# ------------------------------------------------------------------------------------------------- differentiation


def _primal(whole: _Whole, operands: dict[str, Any]) -> list[Any]:
    return _forward(whole, operands)


def _forward_rule(whole: _Whole, operands: dict[str, Any]) -> Any:
    values = {name: x.value for name, x in operands.items()}
    # A structure may tell what a value cannot.
    asked = {name: () if name in operands and operands[name].perturbed else None for name in ("bias", "sink")}
    wants = {i: () if operands[name].perturbed else None for i, name in captured(whole.kind).items()}
    out, lse = _forward(whole, values)
    return [out, lse], (values, out, lse, asked, wants)


def _backward_rule(whole: _Whole, residuals: Any, cotangents: Any) -> Any:
    values, out, lse, asked, wants = residuals
    zero = jax.custom_derivatives.SymbolicZero
    dout, dlse = cotangents
    operands = values | {"out": out, "lse": lse}
    operands["dout"] = jnp.zeros_like(out) if isinstance(dout, zero) else dout
    if not isinstance(dlse, zero):
        operands["dlse"] = dlse
    if not whole.ring:
        operands |= {name: _all_keys(whole, values[name]) for name in ("k", "v")}
    axes = varies(*operands.values())
    operands = {name: as_varying(x, axes) for name, x in operands.items()}
    optional = {f"d{name}": x is not None for name, x in asked.items()}
    kind = whole.kind.changed(return_lse=True, **optional).backwards()
    kind = replace(kind, trained=tuple(i for i, x in wants.items() if x is not None))
    if whole.ring:
        gradients = _ring_gradients(whole, kind, operands)
    elif whole.on_device:
        gradients = _rows_backward(whole, kind, None, operands)
    else:
        branches = [partial(_rows_backward, whole, kind, r) for r in range(whole.ranks)]
        gradients = jax.lax.switch(jax.lax.axis_index(whole.axis), branches, operands)
    for name in () if whole.ring else ("k", "v"):  # in float32, to where the keys are
        shares = _by_device(gradients[name], whole.chunks_k, 1)
        gradients[name] = jax.lax.psum_scatter(shares, whole.axis, scatter_dimension=1, tiled=True)
    found = {name: gradients[name].astype(x.dtype) if name in gradients else None for name, x in values.items()}
    return (found,)


_differentiable: Any = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_differentiable.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
_gathered: Any = jax.jit(_differentiable, static_argnums=0)  # `jax.shard_map` refuses symbolic_zeros outside of one
