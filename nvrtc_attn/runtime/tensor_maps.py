"""Tensor maps as the driver encodes them, and the bytes of each that go into a launch's params.

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
from functools import cache
from typing import Any, Final

from ..base.dtypes import DTYPES
from ..heuristics.tensor_map import TensorMap
from . import driver

MAP_BYTES: Final = 128
_MAP: Final = struct.Struct(f"{MAP_BYTES}s")
_REMEMBERED: Final = 1024
"""Addresses a map is kept for, 0.2 MB a plan: more than the activations of a deep model."""


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
        [module.cuuint32_t(size) for size in (*item.box, 1, 1)[: len(item.dims)]],
        [module.cuuint32_t(1)] * len(item.dims),
        module.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        # A mask's boxes are 64 bytes wide, all others 128.
        swizzles.CU_TENSOR_MAP_SWIZZLE_64B if DTYPES[item.dtype].itemsize == 1 else swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        module.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        module.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
    )
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)
