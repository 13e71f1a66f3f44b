"""A call as a part of a larger attention: where it lies in the whole, and what of the whole it must know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..base.errors import shown
from .validation import MAX_SIZE, Violations, check_flag, check_integer

AXES: Final = ("batch", "heads", "rows", "keys")
_SIZES: Final = ("batch", "num_heads", "seqlen_q", "seqlen_k")
Extent = tuple[int, int]
Sizes = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Where the tensors of a call lie in a larger attention: along each axis (start, size of the whole).

    An axis that is not given is whole. Causal masks, windows and dropout are then those of the whole: row i of the call
    is its row ``rows[0] + i``, causal aligns to the bottom right corner of the whole, and `dropout_keep_mask` of the
    whole is the mask of every part. ``bias`` and ``mask`` of the call, its outputs and gradients are those of the part:
    pass the slices. ``heads`` counts query heads. The indices that ``score_mod`` and ``mask_mod`` get are those of the
    whole, and so are the arrays that they captured; gradients of those are the part's share, in arrays of whole size.

    A diagonal from the bottom right ends with the keys of the whole, with ``seqused_k`` with those that are used: then
    all keys are in the part, or causal is ``"top_left"``.

    A part of the keys gives partial results, which `nvrtc_attn.torch.parallel.merge_partials` combines;
    ``attention_backward`` with out and lse of the whole gives exact shares of the gradients, to be added up.

    Raises
    ------
    TypeError, ValueError
        An axis is no pair of integers, or its start lies outside of the whole.
    """

    batch: Extent | None = None
    heads: Extent | None = None
    rows: Extent | None = None
    keys: Extent | None = None
    sm_margin: int | None = None
    """Multiprocessors that the kernels leave to others, communication for one. Given (0 included), tiles are also
    handed out as they are asked for, so that blocks whose multiprocessor was taken first do not hold up the rest."""
    plan_as: bool = False
    """Whether the kernels are those that the whole would get, with its tiles: on compute capability 9.0 out and lse,
    and dq where the call is deterministic, are then bit for bit the whole's, if all keys that a row sees are in the
    part, its rows begin at a multiple of 128 and its keys at 0, and the table chooses the whole's kernels (not the
    autotuner, and no splits of the keys)."""

    def __post_init__(self) -> None:
        found = Violations()
        for axis in AXES:
            given = getattr(self, axis)
            if given is None:
                continue
            if isinstance(given, str | bytes) or not isinstance(given, Sequence) or len(given) != 2:
                found.kind(f"part, {axis}: got {shown(given)}. It is a pair (start, size of the whole), or None.")
                continue
            start, size = (check_integer(found, f"part, {axis}", x) for x in given)
            if start is None or size is None:
                if None in given:
                    found.kind(f"part, {axis}: got {shown(given)}. Both are integers.")
                continue
            if not 0 <= start <= size <= MAX_SIZE:
                found.value(
                    f"part, {axis}: got {shown((start, size))}. The start is from 0 to the size of the whole, and that "
                    f"at most {MAX_SIZE}."
                )
            object.__setattr__(self, axis, (start, size))
        margin = check_integer(found, "part, sm_margin", self.sm_margin)
        if margin is not None and margin < 0:
            found.value(f"part, sm_margin: got {margin}. It is at least 0.")
        check_flag(found, "part, plan_as", self.plan_as)
        found.stop()

    def origin(self) -> Sizes:
        """Index of the call's first element in the whole: batch entry, head, row, key."""
        b, h, i, j = (0 if extent is None else extent[0] for extent in map(self._extent, AXES))
        return b, h, i, j

    def starts(self) -> tuple[int | None, ...]:
        """`origin`, with None for axes that are whole."""
        return tuple(None if extent is None else extent[0] for extent in map(self._extent, AXES))

    def whole(self, sizes: Sequence[int]) -> Sizes:
        """Sizes of the whole, of those of the call."""
        b, h, i, j = (
            size if extent is None else extent[1] for extent, size in zip(map(self._extent, AXES), sizes, strict=True)
        )
        return b, h, i, j

    def _extent(self, axis: str) -> Extent | None:
        found: Extent | None = getattr(self, axis)
        return found

    def follows_used_keys(self, keys: int) -> bool:
        """Whether a bottom right corner that ends with ``seqused_k`` is in the call: all of the whole's keys are."""
        return self.keys is None or self.keys == (0, keys)

    def shift_of_used_keys(self, rows: int) -> int:
        """`shift`, beside what the call's own rows and ``seqused_k`` move the diagonal by."""
        return self.origin()[2] + rows - self.whole((0, 0, rows, 0))[2]

    def shift(self, rows: int, keys: int, bottom_right: bool) -> int:
        """What the diagonal is moved by: row i of the call is aligned to its key i + shift."""
        _, _, whole_rows, whole_keys = self.whole((0, 0, rows, keys))
        _, _, row, key = self.origin()
        return (whole_keys - whole_rows if bottom_right else 0) + row - key

    def dropout_base(self, sizes: Sequence[int]) -> int:
        """Dropout index of the call's first score in the whole (A8), beside the offset."""
        _, heads, rows, keys = self.whole(sizes)
        b, h, i, j = self.origin()
        return ((b * heads + h) * rows + i) * keys + j

    def check(self, found: Violations, sizes: Sequence[int], varlen: bool) -> None:
        """Whether a call of these sizes lies in the whole."""
        for axis, name, size in zip(AXES, _SIZES, sizes, strict=True):
            extent = self._extent(axis)
            if extent is None:
                continue
            if varlen and axis in ("rows", "keys"):
                found.unsupported(
                    f"part, {axis}: got {extent} with cu_seqlens. Packed sequences have starts of their own: a part of "
                    f"them is whole sequences (batch) and heads."
                )
            elif extent[0] + size > extent[1]:
                found.value(
                    f"part, {axis}: got {extent}, but the call has {name} {size}: it ends at {extent[0] + size}, "
                    f"behind the whole."
                )
