"""What devices send each other: heads for tokens, all keys, or keys that go around; and the derivatives of the latter.

`ulysses` is differentiated by JAX. `gathered`, which is both other strategies, has a rule of its own: its backward pass
gathers or passes the keys again, and sends their gradients back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...front import chunks as layouts
from ...front.chunks import Chunks, Interval
from ..custom_call import compute, gradients_of_part
from ..partition import as_varying, varies
from ..passes import Kind, captured
from .local import (
    Whole,
    add_gradients,
    backward_of_rows,
    forward_of_rows,
    gradient_of_sink,
    replaced,
    rows_of,
    sliced,
    with_sink,
    without_sink,
    zeros,
)


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


def _all_keys(whole: Whole, x: Any) -> Any:
    return _in_order(jax.lax.all_gather(x, whole.axis, axis=1, tiled=True), whole.chunks_k, 1)


# --------------------------------------------------------------------------------------------------------- ulysses


def ulysses(whole: Whole, operands: dict[str, Any]) -> tuple[Any, Any]:
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
        out_with_sink, lse = with_sink(out.astype(np.float32), lse, sink)
        out = out_with_sink.astype(out.dtype)
    out = jax.lax.all_to_all(_by_device(out, whole.chunks_q, 1), whole.axis, split_axis=1, concat_axis=2, tiled=True)
    lse = jax.lax.all_to_all(_by_device(lse, whole.chunks_q, 2), whole.axis, split_axis=2, concat_axis=1, tiled=True)
    return out, lse


# ------------------------------------------------------------------------------------------------------------ ring


def _passed_on(whole: Whole, x: Any) -> Any:
    """What the device before has."""
    return jax.lax.ppermute(x, whole.axis, [(r, (r + 1) % whole.ranks) for r in range(whole.ranks)])


def _on_pairs(whole: Whole, step: int, function: Any, operands: dict[str, Any]) -> Any:
    """``function(rank, rank whose keys it has, operands)`` of this device, after so many steps."""
    branches = [partial(function, r, (r - step) % whole.ranks) for r in range(whole.ranks)]
    return jax.lax.switch(jax.lax.axis_index(whole.axis), branches, operands)


def _pairs(
    whole: Whole, kind: Kind, rank: int, source: int, operands: dict[str, Any]
) -> list[tuple[Kind, dict[str, Any], slice, Interval, slice]]:
    """Calls of a device's rows with keys of another: operands, where the rows and the keys lie, and which keys."""
    theirs = whole.chunks_k[source]
    found = []
    for chunk, at, seen in rows_of(whole, rank):
        for (a, b), there in zip(theirs, layouts.places(theirs, theirs), strict=True):
            keys = max(a, seen[0]), min(b, seen[1])
            if keys[0] >= keys[1]:
                continue
            where = slice(there.start + keys[0] - a, there.start + keys[1] - a)
            values = sliced(operands, at, keys) | {name: operands[name][:, where] for name in ("k", "v")}
            of_call = kind.changed(part=whole.part(0, chunk, keys).options.part, return_lse=True)
            found.append((of_call, values, at, keys, where))
    return found


def _pair_forward(whole: Whole, rank: int, source: int, operands: dict[str, Any]) -> tuple[Any, Any]:
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
        out = replaced(out, (slice(None), at), out[:, at] * old + out_part * new)
        lse = replaced(lse, (slice(None), slice(None), at), total)
    return out, lse


def _ring_forward(whole: Whole, operands: dict[str, Any]) -> list[Any]:
    q, axes = operands["q"], varies(*operands.values())
    batch, rows, heads, _ = q.shape
    out = as_varying(jnp.zeros((batch, rows, heads, operands["v"].shape[3]), np.float32), axes)
    lse = as_varying(jnp.full((batch, heads, rows), -jnp.inf, np.float32), axes)
    going = without_sink(operands)
    for step in range(whole.ranks):
        out, lse = _on_pairs(whole, step, partial(_pair_forward, whole), going | {"sum": out, "log": lse})
        if step + 1 < whole.ranks:
            going |= {name: _passed_on(whole, going[name]) for name in ("k", "v")}
    if "sink" in operands:
        out, lse = with_sink(out, lse, operands["sink"])
    return [out.astype(q.dtype), lse]


def _pair_backward(whole: Whole, kind: Kind, rank: int, source: int, operands: dict[str, Any]) -> dict[str, Any]:
    """Gradients so far, whose names begin with ``sum``, with the shares of some more keys."""
    total = {name[3:]: x for name, x in operands.items() if name.startswith("sum")}
    given = {name: x for name, x in operands.items() if not name.startswith("sum")}
    for of_call, values, at, keys, where in _pairs(whole, kind, rank, source, given):
        for name, dim in (("out", 1), ("dout", 1), ("lse", 2), ("dlse", 2)):
            if name in given:
                values[name] = given[name][:, at] if dim == 1 else given[name][:, :, at]
        add_gradients(total, gradients_of_part(of_call, values), at, keys, where)
    return total


def _ring_gradients(whole: Whole, kind: Kind, operands: dict[str, Any]) -> dict[str, Any]:
    """As `backward_of_rows`, but dk and dv of this device's keys."""
    kind = replace(kind, float32_q=not kind.options.deterministic)
    total, going = zeros(kind, operands), without_sink(operands)
    of_sink, kind = total.pop("sink", None), kind.changed(dsink=False)
    for step in range(whole.ranks):
        sums = {f"sum{name}": x for name, x in total.items()}
        total = _on_pairs(whole, step, partial(_pair_backward, whole, kind), going | sums)
        # Gradients travel with their keys, and after the last step home.
        total |= {name: _passed_on(whole, total[name]) for name in ("k", "v")}
        if step + 1 < whole.ranks:
            going |= {name: _passed_on(whole, going[name]) for name in ("k", "v")}
    if of_sink is not None:  # once for all keys
        total["sink"] = of_sink + gradient_of_sink(operands)
    return total


# ------------------------------------------------------------------------------------------------- differentiation


def _primal(whole: Whole, operands: dict[str, Any]) -> list[Any]:
    return _forward(whole, operands)


def _forward(whole: Whole, operands: dict[str, Any]) -> list[Any]:
    if whole.ring:
        return _ring_forward(whole, operands)
    everything = operands | {name: _all_keys(whole, operands[name]) for name in ("k", "v")}
    if whole.on_device:
        return list(forward_of_rows(whole, None, everything))
    branches = [partial(forward_of_rows, whole, r) for r in range(whole.ranks)]
    out, lse = jax.lax.switch(jax.lax.axis_index(whole.axis), branches, everything)
    return [out, lse]


def _forward_rule(whole: Whole, operands: dict[str, Any]) -> Any:
    values = {name: x.value for name, x in operands.items()}
    # A structure may tell what a value cannot.
    asked = {name: () if name in operands and operands[name].perturbed else None for name in ("bias", "sink")}
    wants = {i: () if operands[name].perturbed else None for i, name in captured(whole.kind).items()}
    out, lse = _forward(whole, values)
    return [out, lse], (values, out, lse, asked, wants)


def _backward_rule(whole: Whole, residuals: Any, cotangents: Any) -> Any:
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
        gradients = backward_of_rows(whole, kind, None, operands)
    else:
        branches = [partial(backward_of_rows, whole, kind, r) for r in range(whole.ranks)]
        gradients = jax.lax.switch(jax.lax.axis_index(whole.axis), branches, operands)
    for name in () if whole.ring else ("k", "v"):  # in float32, to where the keys are
        shares = _by_device(gradients[name], whole.chunks_k, 1)
        gradients[name] = jax.lax.psum_scatter(shares, whole.axis, scatter_dimension=1, tiled=True)
    found = {name: gradients[name].astype(x.dtype) if name in gradients else None for name, x in values.items()}
    return (found,)


_differentiable: Any = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_differentiable.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
gathered: Any = jax.jit(_differentiable, static_argnums=0)  # `jax.shard_map` refuses symbolic_zeros outside of one
