"""A described piece of memory: :class:`TensorView`, the layout rules it obeys, and its NumPy face on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from ..base.dtypes import DTYPES

# NumPy's exact overlap search is exponential in the worst case: beyond this many candidates two layouts overlap.
_OVERLAP_WORK: Any = 100_000  # Any: some stubs of NumPy allow only its two special values


class Device(NamedTuple):
    """``type`` is ``"cpu"`` or ``"cuda"``; ``index`` is the CUDA ordinal, 0 for the CPU."""

    type: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody searches a device with

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"


CPU: Final = Device("cpu", 0)


@dataclass(frozen=True, slots=True)
class TensorView:
    """Memory that belongs to someone else, described.

    ``ptr`` is the address of element 0. ``strides`` are elements, negative where a dim is reversed, and 0 for every dim
    of size 1 (frameworks report arbitrary values there). ``owner`` keeps the memory alive. ``readonly`` memory is never
    handed out for writing.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device
    readonly: bool = False
    owner: object = field(default=None, repr=False, compare=False)


def as_numpy(view: TensorView) -> np.ndarray[Any, Any]:
    """A NumPy array over CPU memory, without a copy; read-only where the view is.

    bfloat16 comes as ``ml_dtypes.bfloat16`` when that package is installed, otherwise as its bits in ``uint16``
    (:func:`bfloat16_to_float32` and :func:`float32_to_bfloat16` convert).
    """
    if view.device.type != "cpu":
        raise TypeError(f"as_numpy: the memory is on {view.device}. Only CPU memory can be read from the host.")
    if isinstance(view.owner, np.ndarray) and view.owner.shape == view.shape and view.owner.dtype.name == view.dtype:
        array = view.owner
    else:
        storage = "uint16" if view.dtype == "bfloat16" else view.dtype
        array = np.asarray(_ArrayInterface(view, np.dtype(storage).str))
        if view.dtype == "bfloat16":
            ml_dtypes = _ml_dtypes_bfloat16()
            array = array if ml_dtypes is None else array.view(ml_dtypes)
    if view.readonly and array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def bfloat16_to_float32(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Exact: the bits of a bfloat16 are the upper half of a float32."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round to nearest even; returns the bits in ``uint16``. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # Rounding could carry a NaN's payload into the exponent: set the quiet bit instead.
    return np.where(np.isnan(values), (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded)


def may_overlap(a: TensorView, b: TensorView) -> bool:
    """Whether an element of ``a`` shares a byte with one of ``b``; exact except for pathological layouts (True)."""
    if a.device != b.device or 0 in a.shape or 0 in b.shape:
        return False
    (first_a, end_a), (first_b, end_b) = span(a), span(b)
    if end_a <= first_b or end_b <= first_a:
        return False
    # NumPy solves the interleaved case (slices of one packed buffer) from addresses alone: nothing is dereferenced.
    left, right = (np.asarray(_ArrayInterface(x, f"|V{DTYPES[x.dtype].itemsize}")) for x in (a, b))
    try:
        return bool(np.shares_memory(left, right, max_work=_OVERLAP_WORK))
    except Exception as error:
        if type(error).__name__ != "TooHardError":  # numpy.TooHardError before 1.25, numpy.exceptions since
            raise
        return True


def check_layout(v: TensorView, name: str, writable: bool) -> TensorView:
    if 0 in v.shape:
        return v
    itemsize = DTYPES[v.dtype].itemsize
    if v.ptr % itemsize and v.device.type == "cuda":
        raise ValueError(
            f"{name}: address {v.ptr:#x} is not a multiple of {itemsize} bytes, the size of {v.dtype}. GPUs cannot "
            f"load elements across that boundary. Copy it to memory of its own."
        )
    if writable:
        # Sorted by stride, each dim must step over everything that the smaller ones reach.
        reach = 0
        for stride, size in sorted((abs(s), n) for s, n in zip(v.strides, v.shape, strict=True) if n > 1):
            if stride <= reach:
                raise ValueError(
                    f"{name}: strides {v.strides} (elements) of shape {v.shape} let elements share or interleave "
                    f"addresses, stride {stride} of a dim of size {size} does not step over the {reach + 1} below it. "
                    f"An output needs an address per element: expanded tensors cannot be written. Pass a fresh tensor."
                )
            reach += stride * (size - 1)
    return v


def normalised(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    if 1 not in shape:
        return strides
    return tuple([0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)])


def span(v: TensorView) -> tuple[int, int]:
    """Lowest address of an element, and the end of the highest."""
    reach = [stride * (size - 1) for stride, size in zip(v.strides, v.shape, strict=True)]
    itemsize = DTYPES[v.dtype].itemsize
    first = v.ptr + itemsize * sum(x for x in reach if x < 0)
    return first, v.ptr + itemsize * (1 + sum(x for x in reach if x > 0))


def _ml_dtypes_bfloat16() -> np.dtype[Any] | None:
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return None
    dtype: np.dtype[Any] = np.dtype(bfloat16)
    return dtype


class _ArrayInterface:
    """NumPy's own protocol over a view; the array that NumPy makes of it keeps this object, hence the owner."""

    def __init__(self, view: TensorView, typestr: str) -> None:
        self.view = view
        itemsize = int(typestr[2:])
        # A tensor without elements may have no address, which NumPy refuses: any address does.
        self.__array_interface__ = {
            "version": 3,
            "data": (view.ptr or 1, view.readonly),
            "shape": view.shape,
            "strides": tuple(stride * itemsize for stride in view.strides),
            "typestr": typestr,
        }
