"""Tensor maps: what the copy engine (TMA) of Hopper GPUs needs to know of a tensor, encoded by the driver.

A map holds an address. Of each map of a plan the driver encodes one (10 microseconds through the bindings); another
address is put into a copy of it (2 microseconds), and the 128 bytes are remembered per address, because a caching
allocator hands out the same addresses again and again.

Concurrency: the memory of a ``TensorMapEncoder`` is a dict whose entries are complete when they appear; two threads may
make the map of the same address, with equal results.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from . import driver
from .dtypes import DTYPES
from .problem import OperandLayout

MAX_EXTENT: Final = 2**32
"""Elements of one dim of a tensor map, exclusive bound less one."""
MAX_STRIDE_BYTES: Final = 2**40
SLAB_BYTES: Final = 128
"""Width of a box: one swizzle atom. Wider tiles are several boxes (``cuda_src/nvrtc_attn/hopper/wgmma.cuh``)."""
MASK_SLAB_BYTES: Final = 64
"""Width of a box of a mask, whose elements are bytes (``cuda_src/nvrtc_attn/hopper/score_tile.cuh``)."""
MAP_BYTES: Final = 128
_MAP: Final = struct.Struct(f"{MAP_BYTES}s")
_REMEMBERED: Final = 1024
"""Addresses a map is kept for, 0.2 MB a plan: more than the activations of a deep model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """One tensor map of a launch.

    ``field`` is the member of the params struct that receives it and ``pointer`` the pointer field that holds the
    tensor's address. Dims are (head dim, row, head, batch), innermost first; ``strides_bytes`` are those of the outer
    three. A box is ``box`` columns by rows of one head, written to shared memory with the swizzle of its width in bytes
    (128 or 64).
    """

    field: str
    pointer: str
    dtype: str
    dims: tuple[int, int, int, int]
    strides_bytes: tuple[int, int, int]
    box: tuple[int, int]


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


class TensorMapEncoder:
    """The maps of one launch: ``write`` puts them into its params."""

    __slots__ = ("_slots",)

    def __init__(self, maps: Sequence[TensorMap], params: type[ctypes.Structure], pointers: Sequence[str]) -> None:
        remembered: list[tuple[TensorMap, int, int, dict[int, bytes]]] = []
        for item in maps:
            remembered.append((item, getattr(params, item.field).offset, pointers.index(item.pointer), {}))
        self._slots = tuple(remembered)

    def write(self, params: Any, pointers: Sequence[int]) -> None:
        """Put the maps for the addresses in ``pointers`` into the buffer ``params``."""
        for item, offset, index, known in self._slots:
            address = pointers[index]
            data = known.get(address)
            if data is None:
                data = _moved(known, address) or encode(item, address)
                if len(known) >= _REMEMBERED:
                    known.clear()
                known[address] = data
            _MAP.pack_into(params, offset, data)  # ten times as fast as assigning to a slice


def _moved(known: dict[int, bytes], address: int) -> bytes | None:
    """Some map of ``known`` with another address; ``None`` where there is none yet."""
    try:
        data = next(iter(known.values()), None)
    except RuntimeError:  # another thread has just added one
        data = None
    if data is None:
        return None
    moved = driver.api().CUtensorMap()
    where = int(moved.getPtr())
    ctypes.memmove(where, data, MAP_BYTES)
    driver.call("cuTensorMapReplaceAddress", moved, address)
    return ctypes.string_at(where, MAP_BYTES)


@cache
def _enums() -> tuple[Any, dict[str, Any]]:
    module = driver.api()
    types = module.CUtensorMapDataType
    return module, {
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float32": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        "bool": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "uint8": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }


def encode(item: TensorMap, address: int) -> bytes:
    """The 128 bytes of ``item`` for a tensor at ``address``.

    Raises
    ------
    CudaError
        The driver refused the map.
    """
    module, types = _enums()
    swizzles = module.CUtensorMapSwizzle
    encoded = driver.call(
        "cuTensorMapEncodeTiled",
        types[item.dtype],
        len(item.dims),
        address,
        [module.cuuint64_t(size) for size in item.dims],
        [module.cuuint64_t(stride) for stride in item.strides_bytes],
        [module.cuuint32_t(size) for size in (*item.box, 1, 1)],
        [module.cuuint32_t(1)] * len(item.dims),
        module.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        # A mask's boxes are 64 bytes wide, all others 128.
        swizzles.CU_TENSOR_MAP_SWIZZLE_64B if DTYPES[item.dtype].itemsize == 1 else swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        module.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        module.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
    )
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)
