"""The ctypes mirror of ``cuda_src/nvrtc_attn/params.cuh``, its pointers and strides from the table of operands.

``codegen`` turns these classes into ``static_assert`` lines, so a field that moves on one side only does not compile.
"""

from __future__ import annotations

import ctypes
import functools
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
    return tuple(name for name in names if OPERANDS[name].behind and not OPERANDS[name].alone)


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
START_FIELDS: Final = ("row_start", "key_start")
"""Addresses of where the rows and the keys of a part begin, 0 where the host knows it."""


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
        ("exponent_scale", _F32),
        ("parts_apart", _I32),
        ("_padding", ctypes.c_uint8 * (-(-(-ctypes.sizeof(BackwardParams) // 8) * 8 + 44) % 64)),
        *[
            (f"tensor_map_{name}", ctypes.c_uint64 * (TENSOR_MAP_BYTES // 8))
            for name in ("q", "k", "v", "dout", "bias", "dbias")
        ],
    ]  # fmt: skip


TILE_WORDS_FIELDS: Final = (
    *((f"tile_{x}_{y}", _I64) for x in ("words", "order") for y in ("offset", "stride_b", "stride_h", "stride_line")),
    *((f"tile_plan_{x}", _I32) for x in ("rows", "cols", "lines", "tiles", "heads", "transposed")),
)


def padded(base: type[ctypes.Structure], fields: Sequence[Any]) -> list[Any]:
    """``fields`` behind those of ``base``, which is aligned as its tensor maps are, and the padding at their end."""
    alignment = TENSOR_MAP_BYTES // 2 if issubclass(base, HopperForwardParams | HopperBackwardParams) else 8
    size = sum(ctypes.sizeof(kind) for _, kind in fields)
    return [*fields, ("_padding_behind", ctypes.c_uint8 * (-(ctypes.sizeof(base) + size) % alignment))]


def params_behind(
    base: type[ctypes.Structure], *, tile_words: bool = False, further: bool = False, part: bool = False,
    device_starts: bool = False,
) -> type[ctypes.Structure]:  # fmt: skip
    """``base`` with what some of its kernels read behind it, in this order, so that nothing before it moves.

    ``tile_words``: ``WithTileWords`` in ``params.cuh``; ``further``: the operands that lie behind, ``WithSink``, of a
    backward pass ``FurtherBackwardParams``; ``part``: ``PartOf``; ``device_starts``: ``StartsOnDevice`` and that. The
    class has the name of the C++ struct.

    Raises
    ------
    ValueError
        There is no such struct: no kernel reads them together.
    """
    if further and issubclass(base, BackwardParams) and (base is not BackwardParams or tile_words):
        raise ValueError(f"{base.__name__}: its kernels read no operand that lies behind{' words' * tile_words}")
    part = part or device_starts
    if further and part:
        raise ValueError(f"{base.__name__}: no kernel of a part of an attention reads operands that lie behind")
    found = _struct_behind(base, tile_words, further, part)
    return _with_starts(found) if device_starts else found


@functools.cache
def _with_starts(base: type[ctypes.Structure]) -> type[ctypes.Structure]:
    fields = padded(base, [(name, _P) for name in START_FIELDS])
    return type(base.__name__.replace("PartParams", "PlacedParams"), (base,), {"_fields_": fields})


@functools.cache
def _struct_behind(base: type[ctypes.Structure], tile_words: bool, further: bool, part: bool) -> type[ctypes.Structure]:
    if part:
        whole = _struct_behind(base, tile_words, further, False)
        fields = padded(whole, [(name, _I32) for name in PART_FIELDS])
        return type(whole.__name__.replace("Params", "PartParams"), (whole,), {"_fields_": fields})
    if not tile_words and not further:
        return base
    operands = BACKWARD if issubclass(base, BackwardParams) else FORWARD
    fields = [*(TILE_WORDS_FIELDS if tile_words else ()), *(_fields_behind(operands) if further else ())]
    name = "Further" * further + "Tiled" * tile_words + base.__name__
    return type(name, (base,), {"_fields_": padded(base, fields)})


TILE_BITS_FIELDS: Final = (*((f"tile_bits_{x}", _I64) for x in ("first", "slots", "at")), ("tile_bits_room", _I32))


@functools.cache
def with_tile_bits(base: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """``base``, that has the fields of words, with ``WithTileBits`` in ``params.cuh`` behind it."""
    return type(base.__name__, (base,), {"_fields_": padded(base, TILE_BITS_FIELDS)})


@functools.cache
def with_max_logit(base: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """``base`` with the pointer of ``WithMaxLogit`` in ``params.cuh`` behind it: that of `Operand.alone`."""
    fields = [(row.name, _P) for row in OPERANDS.values() if row.alone]
    return type(base.__name__, (base,), {"_fields_": padded(base, fields)})
