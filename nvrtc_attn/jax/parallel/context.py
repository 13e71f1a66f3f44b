"""`context_parallel_attention`: what its arguments are, what it refuses, and what other axes of the mesh share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ...base.errors import shown
from ...front.call import CallOptions, plain_options
from ...front.chunks import band_of, chunks_of
from ...front.modified import banded_options
from ...front.operands import OPTIONAL_INPUTS
from ...front.part import MAX_PLACED
from ...front.problem import Causal, WindowSize
from ...front.validation import Violations, check_window
from ...modifiers.modifier import Modifier
from ..modifier import traced
from ..partition import as_varying, manual_axes, says_what_varies, varies
from ..passes import Kind, array_of, check_call, rng_words, with_modifier
from .local import Whole
from .strategies import gathered, ulysses

STRATEGIES: Final = ("auto", "all_gather", "ulysses", "ring")
PLACES: Final = ("auto", "branches", "device")
AxisNames = str | Sequence[str]
_MOST_BRANCHES: Final = 8
"""Devices up to which a program has the calls of all of them: two each, in both passes. Tiles then follow each one's
place, as they cannot where places are known on the device alone."""


def context_parallel_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: str,
    batch_axis: AxisNames | None = None,
    heads_axis: AxisNames | None = None,
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
        A mesh with such axes needs them for nothing else. ``()`` says that no axis shares it. `jax.shard_map` with
        ``check_vma=False`` tells nobody how arrays are sharded: what is needed and not named has to be said so there.
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
        This device's rows (or one), all keys of the whole. Not of ``"ulysses"``.
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
        without a name here, or that may be where JAX does not tell (``check_vma=False``), with dropout or functions of
        the batch entry or head, which then cannot be told.
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
    operands = {name: array_of(name, x) for name, x in given.items() if x is not None or name not in OPTIONAL_INPUTS}
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
    whole = Whole(
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
        out, lse = ulysses(whole, operands)
    else:
        out, lse = gathered(whole, operands)
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
    unsaid: frozenset[str]
    """Of ``"b"`` and ``"h"`` that of which the caller did not say which axes share it."""
    hidden: frozenset[str]
    """Other axes over which arrays may differ without that their types say so."""

    @classmethod
    def of(cls, axis_name: str, batch_axis: AxisNames | None, heads_axis: AxisNames | None) -> _Beside:
        batch, heads = ((x,) if isinstance(x, str) else tuple(x or ()) for x in (batch_axis, heads_axis))
        names = (axis_name, *batch, *heads)
        if len({*names}) < len(names):
            raise ValueError(
                f"axis_name, batch_axis, heads_axis: got {axis_name!r}, {batch_axis!r} and {heads_axis!r}. An axis of "
                f"the mesh shares one thing."
            )
        unsaid = frozenset(x for x, axes in (("b", batch_axis), ("h", heads_axis)) if axes is None)
        hidden = frozenset[str]() if says_what_varies(axis_name) else manual_axes() - {*names}
        return cls(frozenset(names), batch, heads, unsaid, hidden)

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
        self._check_hidden("rng", frozenset("bh"), "the dropout mask would be the same there")

    def check_functions(self, modifier: Modifier, varying: frozenset[str]) -> None:
        """Refuse functions of b or h where those are indices of the device, unless they captured what is, too."""
        functions = [x for x in (modifier.program.score, modifier.program.mask) if x is not None]
        read = frozenset("bh").intersection(frozenset[str]().union(*(x.depends for x in functions)))
        unknown = self._unnamed(varying - varies(*modifier.captures))
        if unknown and read:
            raise ValueError(
                f"score_mod, mask_mod: q, k or v are sharded over {', '.join(unknown)}, and the functions would get "
                f"indices of the device, where they read b or h. Pass batch_axis= or heads_axis=."
            )
        self._check_hidden("score_mod, mask_mod", read, "the functions would get indices of the device")

    def _check_hidden(self, names: str, needed: frozenset[str], otherwise: str) -> None:
        """Refuse what needs to know how batch or heads are shared, where neither the caller nor JAX says so."""
        unsaid, axes = needed & self.unsaid, self._unnamed(self.hidden)
        if unsaid and axes:
            wanted = " and ".join(f"{x}_axis=" for x in ("batch", "heads") if x[0] in unsaid)
            raise ValueError(
                f"{names}: under jax.shard_map(check_vma=False) nothing says whether q, k or v are sharded over "
                f"{', '.join(axes)}, and {otherwise}. Pass {wanted}: the axes, or () where none shares it."
            )

    def _unnamed(self, axes: frozenset[str]) -> list[str]:
        return sorted(repr(x) for x in axes - self.named if _size((x,)) > 1)


def _size(axes: tuple[str, ...]) -> int:
    return int(jax.lax.psum(1, axes)) if axes else 1


def _counts_keys(whole: Whole) -> bool:
    """Whether rows can be told by how many keys they see, to whose end a causal mask is aligned.

    Numbers of dropout and of functions count from the beginning.
    """
    options, last = whole.kind.options, whole.band[1]
    if options.dropout_p > 0 or whole.kind.program is not None:
        return False
    return whole.rows > 0 and last is not None and 0 <= last <= whole.keys - whole.rows


def _why_no_numbers(whole: Whole) -> str:
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
