"""What a call writes: the checks of outputs and workspace that the caller brought."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.dtypes import DTYPES
from .problem import dense_layout
from .tensors import Device, TensorView, may_overlap, view


def output_view(
    x: object,
    name: str,
    shape: Sequence[int],
    dtype: str,
    device: Device,
    inputs: Sequence[tuple[str, TensorView | None]],
    *,
    stream: int | None,
) -> TensorView:
    """A writable view of ``x`` that has the expected shape, dtype and device and shares no memory with ``inputs``."""
    result = view(x, name, stream=stream, writable=True)
    faults = []
    if result.shape != tuple(shape):
        faults.append(f"{name}: shape {result.shape}, needed is {tuple(shape)}")
    if result.dtype != dtype:
        faults.append(f"{name}: dtype {result.dtype}, needed is {dtype}")
    if result.device != device:
        faults.append(f"{name}: on {result.device}, needed is {device}, where q is")
    if faults:
        raise ValueError("; ".join(faults) + ". Pass an array made for it, or let the function allocate.")
    for other_name, other in inputs:
        if other is not None and may_overlap(result, other):
            raise ValueError(
                f"{name}: shares memory with {other_name}. A kernel would read what it has already overwritten. Pass "
                f"memory of its own."
            )
    return result


def workspace_address(x: object, needed_bytes: int, device: Device, *, stream: int | None) -> int:
    """Address of a caller's workspace of at least ``needed_bytes``, contiguous, of any dtype; 0 when none is needed."""
    if needed_bytes == 0:
        return 0
    if x is None:
        raise ValueError(
            f"workspace: None, but this call needs {needed_bytes} bytes on {device}. Pass a uint8 array of the size "
            f"that forward_workspace_bytes or backward_workspace_bytes reports."
        )
    result = view(x, "workspace", stream=stream, writable=True)
    size = DTYPES[result.dtype].itemsize
    for n in result.shape:
        size *= n
    faults = []
    if result.strides != dense_layout(result.shape, result.dtype).strides:
        faults.append(f"workspace: strides {result.strides} of shape {result.shape} leave gaps, it must be dense")
    if size < needed_bytes:
        faults.append(f"workspace: {size} bytes, needed are {needed_bytes}")
    if result.device != device:
        faults.append(f"workspace: on {result.device}, needed is {device}")
    if result.ptr % 16:
        faults.append(f"workspace: address {result.ptr:#x} is not a multiple of 16 bytes")
    if faults:
        raise ValueError("; ".join(faults) + ".")
    return result.ptr
