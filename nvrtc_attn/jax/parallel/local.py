"""What a device computes by itself: calls of its rows with the keys that it has, and the sum of their gradients.

`Whole` is the attention of all devices and makes the calls that are parts of it. A sink that no kernel reads is added
to what its calls give.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...front import chunks as layouts
from ...front.chunks import Band, Chunks, Interval, reach
from ...front.part import ArrayStart, Part
from ..custom_call import compute, gradients_of_part
from ..partition import as_varying, varies
from ..passes import ROW_START, Kind, captured


@dataclass(frozen=True, slots=True)
class Whole:
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


def sliced(operands: dict[str, Any], at: slice, keys: Interval) -> dict[str, Any]:
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


def rows_of(whole: Whole, rank: int) -> list[tuple[Interval, slice, Interval]]:
    """Chunks of a device's queries, where its tensors have them, and the keys that they see."""
    mine = whole.chunks_q[rank]
    found = zip(mine, layouts.places(mine, mine), strict=True)
    return [(chunk, at, reach(chunk, whole.band, whole.keys)) for chunk, at in found]


def _calls(
    whole: Whole, kind: Kind, rank: int | None, operands: dict[str, Any]
) -> list[tuple[Kind, dict[str, Any], slice, Interval]]:
    """The calls of a device, or of any one: with their operands, where its tensors have the rows, and their keys."""
    if rank is not None:
        return [
            (kind.changed(part=whole.part(0, chunk, keys).options.part), sliced(operands, at, keys), at, keys)
            for chunk, at, keys in rows_of(whole, rank)
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
        values = sliced(operands, at, keys) | {name: as_varying(x, axes) for name, x in place.items()}
        found.append((whole.numbered(kind) if whole.counted else whole.placed(kind), values, at, keys))
    return found


def forward_of_rows(whole: Whole, rank: int | None, operands: dict[str, Any]) -> tuple[Any, Any]:
    """Out and lse of a device's rows: of the device ``rank``, or of any where their place is a number on the device."""
    kind, sink = whole.kind.changed(return_lse=True), None
    if "sink" in operands and whole.sink_beside:
        sink, kind = operands["sink"], replace(kind, float32_q=True)
        operands = without_sink(operands)
    parts = [compute(of_call, values) for of_call, values, *_ in _calls(whole, kind, rank, operands)]
    outs, lses = zip(*parts, strict=True)
    out, lse = jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)
    if sink is None:
        return out, lse
    out, lse = with_sink(out, lse, sink)
    return out.astype(operands["q"].dtype), lse


def backward_of_rows(whole: Whole, kind: Kind, rank: int | None, operands: dict[str, Any]) -> dict[str, Any]:
    """Gradients of a device's operands in float32: of k, v for all keys, of one-row biases and captures its share."""
    total = zeros(kind, operands)
    if "sink" in operands and whole.sink_beside:
        of_sink = {"sink": total.pop("sink") + gradient_of_sink(operands)} if "sink" in total else {}
        return backward_of_rows(whole, kind.changed(dsink=False), rank, without_sink(operands)) | of_sink
    for of_call, values, at, keys in _calls(whole, kind, rank, operands):
        if keys[0] == keys[1]:
            if "sink" in total and "dlse" in operands:  # whose lse the sink is alone
                total["sink"] += operands["dlse"][:, :, at].sum((0, 2))
            continue
        for name, dim in (("out", 1), ("dout", 1), ("lse", 2), ("dlse", 2)):
            if name in operands:
                values[name] = operands[name][:, at] if dim == 1 else operands[name][:, :, at]
        add_gradients(total, gradients_of_part(of_call, values), at, keys, slice(*keys))
    return total


def zeros(kind: Kind, operands: dict[str, Any]) -> dict[str, Any]:
    """Of the gradients that a backward pass adds up, in float32."""
    asked = (name for name in ("bias", "sink") if getattr(kind.options, f"d{name}"))
    names = ("q", "k", "v", *asked, *(captured(kind)[i] for i in kind.trained))
    axes = varies(*operands.values())
    return {name: as_varying(jnp.zeros(operands[name].shape, np.float32), axes) for name in names}


def add_gradients(total: dict[str, Any], gradients: dict[str, Any], at: slice, keys: Interval, where: slice) -> None:
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
        total[name] = replaced(x, place, x[place] + gradients[name].astype(np.float32))


def replaced(x: Any, place: tuple[slice, ...], part: Any) -> Any:
    """``x`` with ``part`` at ``place``.

    As ``x.at[place].set(part)``, whose indices are an array without elements where ``place`` is all of ``x``: with that
    as a constant beside a `jax.shard_map`, XLA dies in its pass for sharding (JAX 0.11.2, any platform).
    """
    if part.shape == x.shape:
        return part
    starts = [at.indices(size)[0] for at, size in zip(place, x.shape, strict=False)]
    return jax.lax.dynamic_update_slice(x, part, [*starts, *[0] * (x.ndim - len(starts))])


def without_sink(operands: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in operands.items() if name != "sink"}


def with_sink(out: Any, lse: Any, sink: Any) -> tuple[Any, Any]:
    """Out in float32 and lse with one more logit of each head, which has no value."""
    total = jnp.logaddexp(lse, sink.astype(np.float32)[:, None])
    return out * _share(lse, total).swapaxes(1, 2)[..., None], total


def _share(x: Any, total: Any) -> Any:
    """``exp(x - total)``, 0 where both are -inf."""
    return jnp.where(jnp.isneginf(x), 0, jnp.exp(x - jnp.where(jnp.isneginf(total), 0, total)))


def gradient_of_sink(operands: dict[str, Any]) -> Any:
    """The gradient of a sink: d lse / d sink is its share, d out / d sink that times -out."""
    out, dout = (operands[name].astype(np.float32) for name in ("out", "dout"))
    shift = operands.get("dlse", 0) - (out * dout).sum(-1).swapaxes(1, 2)
    share = _share(operands["sink"].astype(np.float32)[:, None], operands["lse"])
    return (share * shift).sum((0, 2))
