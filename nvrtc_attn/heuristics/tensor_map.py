"""Tensor maps: what the copy engine (TMA) of Hopper GPUs needs to know of a tensor.

`runtime.tensor_maps` encodes them for the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ..front.problem import OperandLayout

MAX_EXTENT: Final = 2**32
"""Elements of one dim of a tensor map, exclusive bound less one."""
MAX_STRIDE_BYTES: Final = 2**40
SLAB_BYTES: Final = 128
"""Width of a box: one swizzle atom. Wider tiles are several boxes (``cuda_src/nvrtc_attn/hopper/common/wgmma.cuh``)."""
MASK_SLAB_BYTES: Final = 64
"""Width of a box of a mask, whose elements are bytes (``cuda_src/nvrtc_attn/hopper/forward/score_tile.cuh``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """One tensor map of a launch.

    ``field`` of the params struct receives it, and ``pointer`` names the field that holds the tensor's address. Dims
    are (head dim, row, head, batch), innermost first; ``strides_bytes`` are those of the outer three. A box is ``box``
    columns by rows of one head, written to shared memory with the swizzle of its width in bytes (128 or 64). Of packed
    heads the dims are (head dim, head, row, batch), and a box is columns by heads by rows.
    """

    field: str
    pointer: str
    dtype: str
    dims: tuple[int, int, int, int]
    strides_bytes: tuple[int, int, int]
    box: tuple[int, ...]


def reasons_against(name: str, layout: OperandLayout, itemsize: int) -> list[str]:
    """Why the copy engine cannot read ``layout`` ([batch, row, head, head dim]); empty when it can."""
    found = []
    if layout.offset_alignment < 16:
        found.append(f"{name} starts at a multiple of {layout.offset_alignment} bytes; the copy engine needs 16")
    if layout.strides[-1] != 1 and layout.shape[-1] > 1:
        found.append(f"{name} has stride {layout.strides[-1]} in its last dim; the copy engine needs 1")
    for axis, (size, stride) in enumerate(zip(layout.shape[:-1], layout.strides[:-1], strict=True)):
        if size > 1 and (stride * itemsize % 16 or not 0 <= stride * itemsize < MAX_STRIDE_BYTES):
            found.append(
                f"{name} has stride {stride} ({stride * itemsize} bytes) in dim {axis}; the copy engine needs a "
                "multiple of 16 bytes that is not negative and below 2^40"
            )
        # The kernel turns the index of a dim of stride 0 into 0; it does so for heads and batches, not for rows.
        if size > 1 and stride == 0 and axis == 1:
            found.append(f"{name} repeats one row (stride 0 in dim 1)")
    if max(layout.shape) >= MAX_EXTENT:
        found.append(f"{name} has a dim of {max(layout.shape)} elements; the copy engine counts below 2^32")
    return found


def tensor_map(field: str, pointer: str, layout: OperandLayout, itemsize: int, rows: int) -> TensorMap:
    """The map of a [batch, row, head, head dim] operand for boxes of ``rows`` rows."""
    batch, length, heads, head_dim = layout.shape
    dims, strides = [head_dim], []
    for size, stride in ((length, layout.strides[1]), (heads, layout.strides[2]), (batch, layout.strides[0])):
        # Of a dim with one element, or repeated elements, the map holds one; its stride is never used but checked.
        single = size == 1 or stride == 0
        dims.append(1 if single else size)
        strides.append(16 if single else stride * itemsize)
    return TensorMap(
        field=field,
        pointer=pointer,
        dtype=layout.dtype,
        dims=(dims[0], dims[1], dims[2], dims[3]),
        strides_bytes=(strides[0], strides[1], strides[2]),
        box=(SLAB_BYTES // itemsize, rows),
    )


def packed_map(field: str, pointer: str, layout: OperandLayout, itemsize: int, heads: int, rows: int) -> TensorMap:
    """`tensor_map` for boxes of ``rows`` rows of ``heads`` heads, those of a row next to each other."""
    made = tensor_map(field, pointer, layout, itemsize, rows)
    (columns, length, all_heads, batch), (row, head, entry) = made.dims, made.strides_bytes
    return replace(
        made,
        dims=(columns, all_heads, length, batch),
        strides_bytes=(head, row, entry),
        box=(made.box[0], heads, rows),
    )


def score_reasons_against(name: str, layout: OperandLayout, itemsize: int) -> list[str]:
    """Why the copy engine cannot read tiles of a bias or mask ([batch, head, row, key]); empty when it can."""
    found = []
    if layout.offset_alignment < 16:
        found.append(f"{name} starts at a multiple of {layout.offset_alignment} bytes; the copy engine needs 16")
    for axis, (size, stride) in enumerate(zip(layout.shape[:-1], layout.strides[:-1], strict=True)):
        if size > 1 and (stride * itemsize % 16 or not 0 <= stride * itemsize < MAX_STRIDE_BYTES):
            found.append(
                f"{name} has stride {stride} ({stride * itemsize} bytes) in dim {axis}; the copy engine needs a "
                "multiple of 16 bytes that is not negative and below 2^40"
            )
    return found


def score_map(field: str, pointer: str, layout: OperandLayout, itemsize: int, rows: int) -> TensorMap:
    """The map of a bias or mask [batch, head, row, key]; ``rows`` of a tile, one when all queries share a row."""
    batch, heads, length, keys = layout.shape
    stride_b, stride_h, stride_m, _ = layout.strides
    turned = OperandLayout(
        shape=(batch, length, heads, keys),
        strides=(stride_b, 0 if length == 1 else stride_m, stride_h, 1),
        dtype=layout.dtype,
    )
    one_row = turned.strides[1] == 0
    made = tensor_map(field, pointer, turned, itemsize, 1 if one_row else rows)
    return replace(made, box=((MASK_SLAB_BYTES if itemsize == 1 else SLAB_BYTES) // itemsize, made.box[1]))
