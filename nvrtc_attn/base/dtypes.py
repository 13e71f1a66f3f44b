"""The one table of element types: names, sizes, DLPack codes and C++ spellings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    ``name`` is the NumPy spelling, ``itemsize`` is in bytes, ``dlpack`` is the ``(code, bits)`` pair of
    the DLPack header and ``cpp`` the type that device code uses for it.
    """

    name: str
    itemsize: int
    dlpack: tuple[int, int]
    cpp: str


DTYPES: Final[dict[str, DType]] = {
    d.name: d
    for d in (
        DType("float16", 2, (2, 16), "nvrtc_attn::half_t"),
        DType("bfloat16", 2, (4, 16), "nvrtc_attn::bfloat16_t"),
        DType("float32", 4, (2, 32), "float"),
        DType("float64", 8, (2, 64), "double"),
        DType("bool", 1, (6, 8), "bool"),
        DType("uint8", 1, (1, 8), "unsigned char"),
        DType("int8", 1, (0, 8), "signed char"),
        DType("int16", 2, (0, 16), "short"),
        DType("int32", 4, (0, 32), "int"),
        DType("int64", 8, (0, 64), "long long"),
        DType("uint64", 8, (1, 64), "unsigned long long"),
    )
}

# What attention computes in. Everything else in the table is an index, a mask or a reference type.
ATTENTION_DTYPES: Final = ("float16", "bfloat16", "float32")
FROM_DLPACK: Final[dict[tuple[int, int], str]] = {d.dlpack: d.name for d in DTYPES.values()}
