"""What a modifier becomes in one call: options and a bias as far as those say it, and the modifier that is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..base.dtypes import DTYPES
from ..base.errors import shown
from ..modifiers.canonical import BiasOperand, Bounds, Canonical, canonical
from ..modifiers.graph import POSITIONS
from ..modifiers.modifier import Modifier
from .part import Part
from .tensors import Device, TensorView, view
from .tensorview import normalised

CallOptions: TypeAlias = Any
"""`call.CallOptions`, a module above."""


class Modified(NamedTuple):
    """The arguments of a call after its modifier was taken apart."""

    whole: Modifier
    modifier: Modifier | None
    options: CallOptions
    captures: tuple[TensorView, ...]
    """Of the modifier that is left; behind them where the part begins, where it asks for that."""
    kept: tuple[int, ...]
    """Their places among those of the whole modifier."""
    bias: TensorView | None
    bias_operand: BiasOperand | None

    def trained(self, whole: frozenset[int]) -> tuple[int, ...]:
        """Those of `captures` that are among ``whole``, which counts the arrays of the whole modifier.

        Not the bias, which a mask may read, too: its gradient is that of the bias.
        """
        return tuple(i for i, place in enumerate(self.kept) if place in whole and place != self.bias_capture)

    def captured(self) -> dict[str, TensorView]:
        """`captures` by the names that messages have for them."""
        return {f"captured array {place}": x for place, x in zip(self.kept, self.captures, strict=False)}

    def gradients(
        self, views: Sequence[TensorView | None], sizes: Sequence[int]
    ) -> tuple[tuple[TensorView | None, ...], TensorView | None]:
        """Of `captures` and of the bias, whose scores have these ``sizes``; ``views`` has the whole modifier's."""
        bias = None if self.bias_operand is None else views[self.bias_capture]
        if bias is not None and self.bias_operand is not None:
            bias = as_scores(bias, self.bias_operand, sizes)
        places = (None,) * (len(self.captures) - len(self.kept))
        return (*(None if i == self.bias_capture else views[i] for i in self.kept), *places), bias

    @property
    def bias_capture(self) -> int:
        """The place of the bias among the arrays of the whole modifier, -1 without one."""
        return -1 if self.bias_operand is None else self.bias_operand.capture


def simplify(
    modifier: Modifier,
    options: CallOptions,
    tensors: Mapping[str, TensorView],
    given: Mapping[str, Any],
    stream: int | None,
    trained: frozenset[int],
    starts: Sequence[TensorView | None] = (),
) -> Modified:
    """Take the modifier of a call apart.

    Parameters
    ----------
    tensors
        The views of q, k and v.
    given
        The other inputs that were given, by name.
    trained
        Captured arrays whose gradient is wanted.
    starts
        Where the rows and the keys of a part begin, if arrays on the GPU say it.

    The positions and arrays of a part of a larger attention are those of the whole: what is left of the modifier has
    the part's place among its numbers, or its arrays, and a bias is the part of its array.

    Raises
    ------
    ValueError
        A captured array is not where q is, or has no element; lists of blocks are for other sizes; or a softcap is
        given beside a score_mod, whatever that becomes.
    """
    cap = options.softcap
    if modifier.program.score is not None and isinstance(cap, float | int | np.number) and cap > 0:
        raise ValueError(
            f"softcap: got {shown(cap)} with score_mod. Which comes first would be a guess: write "
            f"softcap * tanh(score / softcap) inside of score_mod."
        )
    where = tensors["q"].device
    views = tuple(_view(x, i, where, stream) for i, x in enumerate(modifier.captures))
    packed = given.get("cu_seqlens_q") is not None or given.get("cu_seqlens_k") is not None
    ranks = all(len(tensors[name].shape) == 4 for name in "qkv")
    part = options.part if isinstance(options.part, Part) else None  # anything else is refused later
    sizes = (0, 0, 0, 0)
    if ranks:
        b, m, h, _ = tensors["q"].shape
        sizes = b, h, m, tensors["k"].shape[1]
    possible: frozenset[int] = frozenset()
    if ranks and not packed and given.get("bias") is None:
        q = tensors["q"]
        possible = frozenset(
            i
            for i, x in enumerate(views)
            # Every element of a gradient is written, and a part of the scores has but a part of a bias.
            if x.dtype in ("float32", q.dtype) and (i not in trained or (x.dtype == "float32" and part is None))
        )
    if modifier.program.sizes and ranks:
        longest: Any = (options.max_seqlen_q, options.max_seqlen_k) if packed else sizes[2:]
        if all(isinstance(x, int | np.integer) for x in longest):  # others are refused later
            whole = part or Part()
            _, heads, rows, keys = whole.whole((*sizes[:2], *longest))
            modifier.check_sizes(heads, rows, keys, packed=packed)
    found = _parts(modifier, options, possible)
    bias = None
    if found.bias is not None:
        bias = as_scores(views[found.bias.capture], found.bias, sizes, part)
        if bias is None:  # too small, or larger than the scores: indices that are out of range, or a part of it
            found = _parts(modifier, options, frozenset())
    lengths = None
    if ranks and not packed and given.get("seqused_k") is None:  # the diagonal of a band ends where those keys end
        lengths = sizes[2:] if part is None else part.whole(sizes)[2:]
    banded = _banded(options, found.bounds, lengths)
    if banded is None:  # a band that the options cannot say here
        found = _parts(modifier, options, possible if bias is not None else frozenset(), bounds=False)
        banded = options
    if found.softcap:
        banded = banded._replace(softcap=found.softcap)
    captures = tuple(views[i] for i in found.kept)
    if ranks and 0 not in sizes:
        for place, x in zip(found.kept, captures, strict=True):
            if 0 in x.shape:
                raise ValueError(
                    f"score_mod, mask_mod: captured array {place} has shape {x.shape}: there is no element that a "
                    f"score could read. Leave it out, or give it the elements."
                )
    left = found.modifier if found.modifier is None or part is None else found.modifier.moved(part.starts())
    if left is not None and any(starts):
        arrays = {name: x for name, x in zip(POSITIONS[2:], starts, strict=True) if x is not None}
        left = left.moved_on_device(arrays)
        captures += left.captures[len(found.kept) :]
    return Modified(modifier, left, banded, captures, found.kept, bias, found.bias)


def banded_options(modifier: Modifier, options: CallOptions, lengths: tuple[int, int] | None) -> CallOptions:
    """``options`` with the band that a modifier of dense scores says, where they can say it.

    ``lengths``: queries and keys of the whole; None with seqused_k, with which a diagonal from the bottom right ends.
    """
    return _banded(options, _parts(modifier, options, frozenset()).bounds, lengths) or options


def _view(x: Any, place: int, where: Device, stream: int | None) -> TensorView:
    found = x if isinstance(x, TensorView) else view(x, f"captured array {place} of the modifier", stream=stream)
    if found.device != where:
        raise ValueError(
            f"score_mod, mask_mod: captured array {place}, of shape {found.shape}, is on {found.device}, but q is on "
            f"{where}. Move it there."
        )
    return found


def _parts(modifier: Modifier, options: CallOptions, bias: frozenset[int], *, bounds: bool = True) -> Canonical:
    softcap = options.softcap is None or not options.softcap
    key = (bounds, softcap, bias)
    found: Canonical | None = modifier.known.get(key)
    if found is None:
        found = modifier.known[key] = canonical(modifier, bounds=bounds, softcap=softcap, bias=bias)
    return found


def _banded(options: CallOptions, bounds: Bounds, lengths: tuple[int, int] | None) -> CallOptions | None:
    """``options`` with the band ``bounds``, which counts from the top left; None where they cannot say it."""
    if bounds == Bounds():
        return options
    causal, window = options.causal, options.window_size
    if window is not None and not (isinstance(window, tuple | list) and len(window) == 2):
        return None  # refused later
    own = bool(causal) or (window is not None and any(x is not None and x != -1 for x in window))
    aligned = (isinstance(causal, str) and causal == "top_left") or (lengths is not None and lengths[0] == lengths[1])
    if not own and not aligned:
        # Only a causal mask says that it counts from the top left.
        if bounds.high != 0:
            return None
        return options._replace(causal="top_left", window_size=(None if bounds.low is None else -bounds.low, None))
    if not aligned:
        return None
    if own:
        left, right = window if window is not None else (None, None)
        inner = Bounds(None if left is None or left == -1 else -left, None if right is None or right == -1 else right)
        bounds = bounds.within(inner)
    if (bounds.low or 0) > 0 or (bounds.high is not None and bounds.high < 0):
        return None
    return options._replace(window_size=(None if bounds.low is None else -bounds.low, bounds.high))


def as_scores(x: TensorView, operand: BiasOperand, sizes: Sequence[int], part: Part | None = None) -> TensorView | None:
    """The array as a bias ``[1|B, 1|H, 1|Mq, 1|Mk]`` of scores of these sizes; None where a dim has another size.

    An array that belongs to a part has the sizes of the whole.
    """
    whole, starts = (sizes, (0, 0, 0, 0)) if part is None else (part.whole(sizes), part.origin())
    shape, strides, first = [], [], 0
    arrays = (False,) * 4 if part is None else part.are_arrays()
    for axis, size, of_whole, start, is_array in zip(operand.dims, sizes, whole, starts, arrays, strict=True):
        if axis is not None and is_array:  # nobody here knows which part of it
            return None
        if axis is not None and (x.shape[axis] != of_whole or start + size > of_whole):
            return None
        shape.append(1 if axis is None else size)
        strides.append(0 if axis is None else x.strides[axis])
        first += 0 if axis is None else start * x.strides[axis]
    # The owner has other dims: in a tuple, so that nobody takes it for what is described here.
    layout = tuple(shape), normalised(tuple(shape), tuple(strides))
    address = x.ptr + first * DTYPES[x.dtype].itemsize if 0 not in shape else x.ptr
    return TensorView(address, *layout, x.dtype, x.device, x.readonly, (x.owner,))


def gradient_views(
    modified: Modified, given: Sequence[object], where: Device, stream: int | None
) -> tuple[TensorView | None, ...]:
    """Writable views of the gradients of the captured arrays of the whole modifier.

    Parameters
    ----------
    given
        An array or None for each.
    where
        The device of q.

    Raises
    ------
    ValueError
        Not as many, another shape, type or device, or of an array that the score has no derivative to.
    """
    arrays = modified.whole.captures
    if len(given) != len(arrays):
        raise ValueError(f"daux: {len(given)} arrays, but the modifier captured {len(arrays)}.")
    views: list[TensorView | None] = []
    for i, (x, array) in enumerate(zip(given, arrays, strict=True)):
        if x is None:
            views.append(None)
            continue
        found = view(x, f"daux[{i}]", stream=stream, writable=True)
        if i not in modified.whole.differentiable:
            raise ValueError(f"daux[{i}]: given, but the score has no derivative with respect to that captured array.")
        if (found.shape, found.dtype) != (tuple(array.shape), "float32"):
            raise ValueError(
                f"daux[{i}]: {found.dtype} of shape {found.shape}, needed is float32 of shape {tuple(array.shape)}."
            )
        if found.device != where:
            raise ValueError(f"daux[{i}]: on {found.device}, but q is on {where}. Pass an array there.")
        views.append(found)
    return tuple(views)
