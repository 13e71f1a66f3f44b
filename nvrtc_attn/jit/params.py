"""The ctypes mirror of ``cuda_src/nvrtc_attn/params.cuh``, its pointers and strides from the table of operands.

``codegen`` turns these classes into ``static_assert`` lines, so a field that moves on one side only does not compile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from ..front.operands import BACKWARD, FORWARD, OPERANDS

UNBOUNDED: Final = 0x7FFFFFFF
"""Window bound that means "no bound" (``kUnbounded`` in device code)."""

_P, _U64, _I64 = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64
_I32, _U32, _F32 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_float


FORWARD_WORKSPACES: Final = ("out_partial", "softmax_partial")
BACKWARD_WORKSPACES: Final = ("delta", "row_lse", "dq_accum", "dkv_accum", "dbias_partial", "counters")
RNG_ADDRESSES: Final = ("rng_seed_ptr", "rng_offset_ptr")
RNG_WORDS: Final = ("rng_seed", "rng_offset")


def inputs_first(names: Sequence[str], backward: bool) -> int:
    """How many of the operands of a pass lie before the addresses of the random numbers: all up to the last input."""
    return max(i for i, name in enumerate(names) if OPERANDS[name].role(backward).startswith("in")) + 1


def _pointers(names: Sequence[str], backward: bool, workspaces: tuple[str, ...]) -> tuple[str, ...]:
    first = inputs_first(names, backward)
    return (
        *_in_front(names[:first]), *RNG_ADDRESSES, *_in_front(names[first:]), *workspaces, *RNG_WORDS,
    )  # fmt: skip


def _in_front(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not OPERANDS[name].behind)


def _behind(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if OPERANDS[name].behind)


def _strides(name: str, dims: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    return [(f"{name}_stride_{d}", _I64) for d in dims]


def _operand_strides(names: Sequence[str], ends: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    """Strides of the operands whose last dim is one of ``ends``."""
    rows = [row for name in _in_front(names) if (row := OPERANDS[name]).strides and row.strides[-1] in ends]
    return [field for row in rows for field in _strides(row.name, row.strides)]


def _fields_behind(names: Sequence[str]) -> Any:
    """Pointers, strides, and for each input whether its elements are float32 (otherwise they are those of q)."""
    rows = [OPERANDS[name] for name in _behind(names)]
    strides = [field for row in rows for field in _strides(row.name, row.strides)]
    kinds = [(f"{row.name}_float32", _I32) for row in rows if not row.gradient_of]
    return [*((row.name, _P) for row in rows), *strides, *kinds]


class ForwardParams(ctypes.Structure):
    """Arguments of the forward and combine kernels."""

    POINTERS: Final = _pointers(FORWARD, False, FORWARD_WORKSPACES)
    BEHIND: Final = _behind(FORWARD)
    _fields_ = [
        *[(name, _P) for name in POINTERS],
        # Of tensors like q, of lse, of tensors like the scores, of others.
        *_operand_strides(FORWARD, "d"), *_operand_strides(FORWARD, "m"), *_operand_strides(FORWARD, "n"),
        *_operand_strides(FORWARD, "bh"),
        *[(name, _I32) for name in (
            "batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "head_dim", "head_dim_v",
            "total_q", "total_k", "num_m_blocks", "num_splits", "head_group", "lse_rows", "lse_packed",
            "window_left", "window_right", "bottom_right",
        )],
        ("scale", _F32), ("softcap", _F32), ("lse_empty", _F32),
        ("dropout_threshold", _U32), ("dropout_multiplier", _F32),
    ]  # fmt: skip


class BackwardParams(ctypes.Structure):
    """Arguments of every backward kernel: delta, dk/dv, dq, dbias and the conversions."""

    POINTERS: Final = _pointers(BACKWARD, True, BACKWARD_WORKSPACES)
    BEHIND: Final = _behind(BACKWARD)
    _fields_ = [
        *[(name, _P) for name in POINTERS],
        *_operand_strides(BACKWARD, "d"), *_operand_strides(BACKWARD, "m"), *_strides("delta", "bh"),
        *_operand_strides(BACKWARD, "n"), *_operand_strides(BACKWARD, "bh"), *_strides("dq_accum", "bhm"),
        *[(name, _I32) for name in (
            "batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "head_dim", "head_dim_v",
            "total_q", "total_k", "num_m_blocks", "num_n_blocks", "lse_packed",
            "dbias_size_b", "dbias_size_h", "dbias_size_m", "dbias_size_n", "num_dbias_splits", "num_splits",
            "head_group", "window_left", "window_right", "bottom_right",
        )],
        ("scale", _F32), ("softcap", _F32), ("dropout_threshold", _U32), ("dropout_multiplier", _F32),
    ]  # fmt: skip


TENSOR_MAP_BYTES: Final = 128
PART_FIELDS: Final = ("dropout_heads", "dropout_rows", "dropout_columns")
"""Sizes of the attention that a call is a part of, which the index of dropout counts by."""


class HopperForwardParams(ForwardParams):
    """Arguments of the Hopper forward kernel: ForwardParams, then its schedule and the tensor maps.

    The padding says where the compiler puts the maps, which it aligns to 64 bytes.
    """

    _fields_ = [
        *[(name, _I32) for name in (
            "num_tiles", "heads_per_group", "pair_rounds", "head_pairs", "tail_first_head", "tail_done",
            "tail_whole_heads", "chunk_rows", "num_chunks", "num_workers",
        )],
        ("_padding", ctypes.c_uint8 * (-(ctypes.sizeof(ForwardParams) + 40) % 64)),
        *[
            (f"tensor_map_{name}", ctypes.c_uint64 * (TENSOR_MAP_BYTES // 8))
            for name in ("q", "k", "v", "bias", "mask")
        ],
    ]  # fmt: skip


class HopperBackwardParams(BackwardParams):
    """Arguments of the Hopper backward kernels: BackwardParams, then their schedule and the tensor maps."""

    _fields_ = [
        ("counter_offset", _I64),
        *[(name, _I32) for name in (
            "num_tiles", "heads_per_group", "query_step", "chunk_rows", "num_chunks", "num_workers", "num_whole",
        )],
        ("_padding", ctypes.c_uint8 * (-(-(-ctypes.sizeof(BackwardParams) // 8) * 8 + 36) % 64)),
        *[
            (f"tensor_map_{name}", ctypes.c_uint64 * (TENSOR_MAP_BYTES // 8))
            for name in ("q", "k", "v", "dout", "bias", "dbias")
        ],
    ]  # fmt: skip


def _tile_words(base: type[ctypes.Structure], behind: Sequence[Any] = ()) -> list[Any]:
    """Fields of ``WithTileWords`` behind those of ``base``, then ``behind``, and the padding to its alignment."""
    words = [
        (f"tile_{x}_{y}", _I64) for x in ("words", "order") for y in ("offset", "stride_b", "stride_h", "stride_line")
    ]
    plan = [(f"tile_plan_{x}", _I32) for x in ("rows", "cols", "lines", "tiles", "heads", "transposed")]
    return padded(base, [*words, *plan, *behind])


def padded(base: type[ctypes.Structure], fields: Sequence[Any]) -> list[Any]:
    """``fields`` behind those of ``base``, which is aligned as its tensor maps are, and the padding at their end."""
    alignment = TENSOR_MAP_BYTES // 2 if issubclass(base, HopperForwardParams | HopperBackwardParams) else 8
    size = sum(ctypes.sizeof(kind) for _, kind in fields)
    return [*fields, ("_padding_behind", ctypes.c_uint8 * (-(ctypes.sizeof(base) + size) % alignment))]


class TiledForwardParams(ForwardParams):
    """Arguments of a portable forward kernel that walks words of tiles, and of the kernel that writes them."""

    _fields_ = _tile_words(ForwardParams)


class TiledHopperForwardParams(HopperForwardParams):
    """Arguments of the Hopper forward kernel that walks words of tiles."""

    _fields_ = _tile_words(HopperForwardParams)


class TiledBackwardParams(BackwardParams):
    """Arguments of a portable backward kernel that walks words of tiles, and of the kernel that writes them."""

    _fields_ = _tile_words(BackwardParams)


class TiledHopperBackwardParams(HopperBackwardParams):
    """Arguments of the Hopper backward kernel that walks words of tiles."""

    _fields_ = _tile_words(HopperBackwardParams)


WITH_TILE_WORDS: Final[dict[type[ctypes.Structure], type[ctypes.Structure]]] = {
    tiled.__mro__[1]: tiled
    for tiled in (TiledForwardParams, TiledHopperForwardParams, TiledBackwardParams, TiledHopperBackwardParams)
}


def _part_of(base: type[ctypes.Structure], alignment: int) -> type[ctypes.Structure]:
    """``base`` with the sizes of the whole behind it: ``PartOf`` in ``params.cuh``."""
    end = ctypes.sizeof(base) + 4 * len(PART_FIELDS)
    fields: list[tuple[str, type]] = [(name, _I32) for name in PART_FIELDS]
    padding = -end % alignment  # tensor maps align the whole struct
    if padding:
        fields.append(("_end", ctypes.c_uint8 * padding))
    return type(base.__name__.replace("Params", "PartParams"), (base,), {"_fields_": fields})


PART_PARAMS: Final[dict[type[ctypes.Structure], type[ctypes.Structure]]] = {
    base: _part_of(base, TENSOR_MAP_BYTES // 2 if issubclass(base, HopperForwardParams | HopperBackwardParams) else 8)
    for base in (*WITH_TILE_WORDS, *WITH_TILE_WORDS.values())
}
"""The params of a kernel with dropout of a part of a larger attention, by those of the same kernel of a whole one."""


class FurtherForwardParams(ForwardParams):
    """Arguments of a portable forward kernel, or `combine`, that reads the operands which lie behind."""

    _fields_ = padded(ForwardParams, _fields_behind(FORWARD))


class FurtherHopperForwardParams(HopperForwardParams):
    """Arguments of the Hopper forward kernel that reads them."""

    _fields_ = padded(HopperForwardParams, _fields_behind(FORWARD))


class FurtherTiledForwardParams(ForwardParams):
    """Arguments of a portable forward kernel that walks words of tiles and reads them."""

    _fields_ = _tile_words(ForwardParams, _fields_behind(FORWARD))


class FurtherTiledHopperForwardParams(HopperForwardParams):
    """Arguments of the Hopper forward kernel that does both."""

    _fields_ = _tile_words(HopperForwardParams, _fields_behind(FORWARD))


class FurtherBackwardParams(BackwardParams):
    """Arguments of the kernel that sums the gradient of a sink."""

    _fields_ = padded(BackwardParams, _fields_behind(BACKWARD))


WITH_SINK: Final[dict[type[ctypes.Structure], type[ctypes.Structure]]] = {
    ForwardParams: FurtherForwardParams,
    HopperForwardParams: FurtherHopperForwardParams,
    TiledForwardParams: FurtherTiledForwardParams,
    TiledHopperForwardParams: FurtherTiledHopperForwardParams,
    BackwardParams: FurtherBackwardParams,
}
