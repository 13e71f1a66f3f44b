"""The ctypes mirror of ``cuda_src/nvrtc_attn/params.cuh``.

``codegen`` turns these classes into ``static_assert`` lines, so a field that moves on one side only does not compile.
"""

from __future__ import annotations

import ctypes
from typing import Final

UNBOUNDED: Final = 0x7FFFFFFF
"""Window bound that means "no bound" (``kUnbounded`` in device code)."""

_P, _U64, _I64 = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64
_I32, _U32, _F32 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_float


def _strides(name: str, dims: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    return [(f"{name}_stride_{d}", _I64) for d in dims]


class ForwardParams(ctypes.Structure):
    """Arguments of the forward and combine kernels."""

    POINTERS: Final = (
        "q", "k", "v", "out", "lse", "bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k",
        "rng_seed_ptr", "rng_offset_ptr", "out_partial", "softmax_partial", "rng_seed", "rng_offset",
    )  # fmt: skip
    _fields_ = [
        *[(name, _P) for name in POINTERS],
        *_strides("q", "bmhd"), *_strides("k", "bnhd"), *_strides("v", "bnhd"), *_strides("out", "bmhd"),
        *_strides("lse", "bhm"), *_strides("bias", "bhmn"), *_strides("mask", "bhmn"),
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

    POINTERS: Final = (
        "q", "k", "v", "out", "dout", "lse", "dlse", "bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k",
        "rng_seed_ptr", "rng_offset_ptr", "dq", "dk", "dv", "dbias",
        "delta", "row_lse", "dq_accum", "dkv_accum", "dbias_partial", "counters",
        "rng_seed", "rng_offset",
    )  # fmt: skip
    _fields_ = [
        *[(name, _P) for name in POINTERS],
        *_strides("q", "bmhd"), *_strides("k", "bnhd"), *_strides("v", "bnhd"), *_strides("out", "bmhd"),
        *_strides("dout", "bmhd"), *_strides("dq", "bmhd"), *_strides("dk", "bnhd"), *_strides("dv", "bnhd"),
        *_strides("lse", "bhm"), *_strides("dlse", "bhm"), *_strides("delta", "bh"),
        *_strides("bias", "bhmn"), *_strides("mask", "bhmn"), *_strides("dbias", "bhmn"),
        *_strides("dq_accum", "bhm"),
        *[(name, _I32) for name in (
            "batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "head_dim", "head_dim_v",
            "total_q", "total_k", "num_m_blocks", "num_n_blocks", "lse_packed",
            "dbias_size_b", "dbias_size_h", "dbias_size_m", "dbias_size_n", "num_dbias_splits", "num_splits",
            "head_group", "window_left", "window_right", "bottom_right",
        )],
        ("scale", _F32), ("softcap", _F32), ("dropout_threshold", _U32), ("dropout_multiplier", _F32),
    ]  # fmt: skip


TENSOR_MAP_BYTES: Final = 128


class HopperForwardParams(ForwardParams):
    """Arguments of the Hopper forward kernel: ForwardParams, then its schedule and the tensor maps.

    The padding says where the compiler puts the maps, which it aligns to 64 bytes.
    """

    _fields_ = [
        *[(name, _I32) for name in (
            "num_tiles", "heads_per_group", "pair_rounds", "head_pairs", "tail_first_head", "tail_done",
            "tail_whole_heads",
        )],
        ("_padding", ctypes.c_uint8 * (-(ctypes.sizeof(ForwardParams) + 28) % 64)),
        *[
            (f"tensor_map_{name}", ctypes.c_uint64 * (TENSOR_MAP_BYTES // 8))
            for name in ("q", "k", "v", "bias", "mask")
        ],
    ]  # fmt: skip


class HopperBackwardParams(BackwardParams):
    """Arguments of the Hopper backward kernels: BackwardParams, then their schedule and the tensor maps."""

    _fields_ = [
        ("counter_offset", _I64),
        *[(name, _I32) for name in ("num_tiles", "heads_per_group", "query_step")],
        ("_padding", ctypes.c_uint8 * (-(-(-ctypes.sizeof(BackwardParams) // 8) * 8 + 20) % 64)),
        *[
            (f"tensor_map_{name}", ctypes.c_uint64 * (TENSOR_MAP_BYTES // 8))
            for name in ("q", "k", "v", "dout", "bias", "dbias")
        ],
    ]  # fmt: skip
