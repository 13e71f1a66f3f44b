"""A call as a part of a larger attention: where it lies in the whole, and what of the whole it must know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ..base.errors import shown
from .tensors import Device, TensorView, as_numpy, view
from .validation import MAX_SIZE, Violations, check_flag, check_integer

AXES: Final = ("batch", "heads", "rows", "keys")
_SIZES: Final = ("batch", "num_heads", "seqlen_q", "seqlen_k")
Extent = tuple[int, int]
Sizes = tuple[int, int, int, int]
ARRAY_AXES: Final = ("rows", "keys")
"""Those whose start may be an array, in the order of the addresses that a launch takes behind the operands."""
MAX_PLACED: Final = 2**30
"""Largest size of the whole along such an axis: bounds and the distances between them are 32-bit."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayStart:
    """A start that an array holds. All are alike where calls are told apart: no plan knows the value.

    ``array`` is None where only a plan is wanted.
    """

    array: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayStart)

    def __hash__(self) -> int:
        return hash(ArrayStart)

    def __repr__(self) -> str:
        return "<array>"


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

    The start of rows or keys may be an array of one integer, of any library. On the GPU it is int32 on q's device, and
    the kernels read it when they run, the host never: a CUDA graph, or a compiled program, that is run again takes the
    part that the array then names. The backward pass needs what the forward pass read. A start outside of the whole is
    not noticed. Arrays on the CPU are read at each call. Kernels and their tiles are then the same for all places, so
    those that have nothing to compute, or nothing to mask, are not left out by the host. On the GPU ``seqused_k``,
    ``sink`` and ``plan_as`` are refused beside such an array, and a whole of more than 2**30 rows or keys.

    Two parts that differ in such arrays alone are equal.

    Raises
    ------
    TypeError, ValueError
        An axis is no pair of integers, or its start lies outside of the whole.
    """

    batch: Extent | None = None
    heads: Extent | None = None
    rows: tuple[Any, int] | None = None
    keys: tuple[Any, int] | None = None
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
            if _is_array(given[0]):
                self._take_array(found, axis, *given)
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

    def _take_array(self, found: Violations, axis: str, start: Any, size: object) -> None:
        if axis not in ARRAY_AXES:
            found.kind(
                f"part, {axis}: the start is an array, {shown(start)}. It is an integer: only rows and keys begin "
                f"where an array says."
            )
            return
        whole = check_integer(found, f"part, {axis}", size)
        if whole is None:
            if size is None:
                found.kind(f"part, {axis}: got the size None. It is an integer.")
        elif not 0 <= whole <= MAX_SIZE:
            found.value(f"part, {axis}: got the size {whole}. It is from 0 to {MAX_SIZE}.")
        else:
            of_array = start if isinstance(start, ArrayStart) else ArrayStart(start)
            object.__setattr__(self, axis, (of_array, whole))

    @property
    def has_arrays(self) -> bool:
        """Whether rows or keys begin where an array says."""
        rows, keys = self.rows, self.keys
        return (rows is not None and rows[0].__class__ is ArrayStart) or (
            keys is not None and keys[0].__class__ is ArrayStart
        )

    def are_arrays(self) -> tuple[bool, bool, bool, bool]:
        """Of each axis whether it begins where an array says."""
        b, h, i, j = (extent is not None and isinstance(extent[0], ArrayStart) for extent in map(self._extent, AXES))
        return b, h, i, j

    def bare(self) -> Part:
        """The same without its arrays: what tables may keep."""
        arrays = [axis for axis, is_array in zip(AXES, self.are_arrays(), strict=True) if is_array]
        extents: dict[str, Any] = {axis: (ArrayStart(), getattr(self, axis)[1]) for axis in arrays}
        return replace(self, **extents)

    def located(self, where: Device, stream: int | None) -> tuple[Part, tuple[TensorView | None, ...]]:
        """The part with what its arrays on the CPU say, and views of the others, of `ARRAY_AXES`.

        Parameters
        ----------
        where
            The device of q.
        stream
            As that of `tensors.view`.

        Raises
        ------
        TypeError, ValueError
            An array is on another device, does not hold one integer, or is on the GPU and not int32.
        """
        extents: dict[str, Any] = {}
        views: list[TensorView | None] = []
        for axis in ARRAY_AXES:
            extent = self._extent(axis)
            start = None if extent is None else extent[0]
            views.append(None)
            if extent is None or not isinstance(start, ArrayStart) or start.array is None:
                continue
            name = f"part, {axis}"
            x = view(start.array, name, stream=stream)
            on_cpu = x.device.type == "cpu"
            if any(n != 1 for n in x.shape) or not (x.dtype == "int32" or (on_cpu and "int" in x.dtype)):
                kinds = "an integer" if on_cpu else "one int32"
                raise ValueError(
                    f"{name}: got {x.dtype} of shape {x.shape}. An array of where it begins holds {kinds}."
                )
            if on_cpu:
                extents[axis] = (int(as_numpy(x).reshape(())), extent[1])
            elif x.device == where:
                extents[axis] = (ArrayStart(), extent[1])
                views[-1] = TensorView(x.ptr, (), (), x.dtype, x.device, True, (x.owner,))
            else:
                raise ValueError(f"{name}: on {x.device}, but q is on {where}. Pass it on {where}, or as an integer.")
        return replace(self, **extents), tuple(views)

    def origin(self) -> Sizes:
        """Index of the call's first element in the whole: batch entry, head, row, key. 0 where an array has it."""
        b, h, i, j = (0 if start is None else start for start in self.starts())
        return b, h, i, j

    def starts(self) -> tuple[int | None, ...]:
        """`origin`, with None for axes that are whole or begin where an array says."""
        return tuple(
            None if extent is None or isinstance(extent[0], ArrayStart) else extent[0]
            for extent in map(self._extent, AXES)
        )

    def whole(self, sizes: Sequence[int]) -> Sizes:
        """Sizes of the whole, of those of the call."""
        b, h, i, j = (
            size if extent is None else extent[1] for extent, size in zip(map(self._extent, AXES), sizes, strict=True)
        )
        return b, h, i, j

    def _extent(self, axis: str) -> tuple[Any, int] | None:
        found: tuple[Any, int] | None = getattr(self, axis)
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
            elif isinstance(extent[0], ArrayStart):
                if size > extent[1]:
                    found.value(f"part, {axis}: the whole has {extent[1]}, but the call has {name} {size}.")
            elif extent[0] + size > extent[1]:
                found.value(
                    f"part, {axis}: got {extent}, but the call has {name} {size}: it ends at {extent[0] + size}, "
                    f"behind the whole."
                )
        _, _, rows, keys = self.whole(sizes)
        if self.has_arrays and max(rows, keys) > MAX_PLACED:
            found.unsupported(
                f"part: an array says where it begins, and the whole has {rows} rows and {keys} keys. It has at most "
                f"{MAX_PLACED} of each then: pass integers (start, size)."
            )


def check_part(found: Violations, part: object) -> Part | None:
    """``part`` where it is one; None where there is none, or something else, which is noted."""
    if part is None or isinstance(part, Part):
        return part
    found.kind(f"part: got {shown(part)} of type {type(part).__name__}. It is an nvrtc_attn.Part or None.")
    return None


def _is_array(x: object) -> bool:
    """Whether ``x`` is an array of some library, and not one of NumPy's numbers."""
    return isinstance(x, ArrayStart) or (hasattr(x, "__dlpack__") and not isinstance(x, np.generic))
