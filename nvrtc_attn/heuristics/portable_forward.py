"""Forward pass of the portable family: which tile for which problem, and when to split keys."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_float
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ..base.errors import UnsupportedError
from ..front.operands import unread_by
from ..front.problem import AttentionProblem, OperandLayout
from ..jit.config import Features, ForwardConfig
from .spec import ForwardPlanSpec, Launch

MAX_HEAD_DIM: Final = 512
MAX_SPLITS: Final = 256
MAX_PARTIAL_BYTES: Final = 256 << 20
"""Bound of the split-keys workspace: past it there are enough query blocks to fill any GPU without splitting."""
DECODE_ROWS: Final = 16
"""Up to this many query rows the warps of a block divide the keys instead of the rows."""
PACKED_QUERIES: Final = 64
"""Below this many queries, the heads that share a key head share a tile; from here on a head fills one of its own."""
STREAMED_KEYS: Final = 1024
"""From here on up to 64 query rows wait for K and V, and their tiles load in two stages."""
IN_FLIGHT_BYTES: Final = 30 << 10
"""Of K and V on the way to each multiprocessor, around which memory begins to idle, see `_stream_keys`."""
SPLIT_BYTES: Final = 30 << 20
"""What splitting costs, in bytes that could have been read: 7 us of an H200, most of it the second kernel.

Bringing that up early (programmatic dependent launch) gains 1 us with 2048 or 8192 keys, nothing beyond, and loses 2 us
with 256 splits.
"""
COMBINE_WARPS: Final = 4
MIN_WARPS: Final = 8
"""Warps a multiprocessor, two for each of its schedulers: one multiplies while the other waits for its operands."""
MEASURED_SMEM: Final = 227 << 10
"""Shared memory per block of the GPU that the tables were measured on. With less, tiles with `MIN_WARPS` come first."""
_REGISTERS_PER_SM: Final = 65536
_SMEM_RESERVED: Final = 1024
"""Shared memory that the driver keeps per thread block, and that a multiprocessor has more than one block may use."""
L2_BYTES: Final = 16 << 20
"""K and V of the heads whose query tiles are interleaved under a mask, a third of the L2 of an H200 (50 MB).

Causal, D 128: S4096 (2 MB a head) 0.796, 0.790, 0.782, 0.717 ms with 1, 2, 4, 8 heads, 0.823 with 12; S16384 (8 MB)
2.895, 2.635, 2.807 ms with 1, 2, 4. D 64: S4096 (1 MB) 0.913, 0.884, 0.869 with 1, 8, 16. H200, 2026-11-20.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One row of the tile table."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    min_blocks_per_sm: int = 1
    preload_q: bool = False
    warps_n: int = 1
    warps_d: int = 1


def smem_bytes(config: ForwardConfig) -> int:
    """Dynamic shared memory of one thread block; the map is at the head of ``forward_portable.cuh``."""
    if config.kernel == "combine":
        return 4 * MAX_SPLITS * config.block_m + 16 * config.num_threads
    tiles = config.block_m * config.head_dim
    tiles += config.num_stages * config.block_n * (config.head_dim + config.head_dim_v)
    if config.warps_n > 1:
        epilogue = 4 * config.warps_n * config.block_m * (config.head_dim_v + 2)
    else:
        epilogue = config.itemsize * config.block_m * config.head_dim_v
    return max(config.itemsize * tiles, epilogue)


def warps_per_sm(num_warps: int, smem_bytes: int, smem_limit: int) -> int:
    """Warps of thread blocks of ``num_warps`` with ``smem_bytes`` and 255 registers a thread on one multiprocessor."""
    by_smem = (smem_limit + _SMEM_RESERVED) // (smem_bytes + _SMEM_RESERVED)
    return num_warps * min(by_smem, _REGISTERS_PER_SM // (256 * 32 * num_warps))


def is_vectorizable(layout: OperandLayout, itemsize: int) -> bool:
    """Whether every row of the last dim is contiguous and starts and ends at a multiple of 16 bytes."""
    if layout.offset_alignment < 16 or layout.shape[-1] * itemsize % 16:
        return False
    if layout.strides[-1] != 1:
        return False
    outer = zip(layout.shape[:-1], layout.strides[:-1], strict=True)
    return all(size == 1 or stride * itemsize % 16 == 0 for size, stride in outer)


def features_of(problem: AttentionProblem) -> Features:
    """Policies that the kernel needs for ``problem``."""
    return Features(
        band=problem.band,
        bias=problem.bias.dtype if problem.bias is not None else None,
        mask=problem.mask is not None,
        softcap=problem.softcap > 0,
        # Folding the scale into the exponent keeps the order of scores only when it is positive, in float32.
        prescale=c_float(problem.softmax_scale).value <= 0,
        dropout=problem.dropout_p > 0,
        varlen=problem.varlen,
        seqused_k=problem.seqused_k,
        optional=" ".join(problem.further_inputs),
    )


def maps_scores(features: Features) -> bool:
    """Whether kernels turn products into scores in natural units: ``kMapsScores`` in ``collective/scores.cuh``."""
    return features.prescale or features.softcap or features.bias is not None


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(value: int, multiple: int) -> int:
    return _ceil_div(value, multiple) * multiple


def _tiles(config: ForwardConfig, seqlen_q: int, seqlen_k: int, smem_limit: int) -> Iterator[Tile]:
    """The tile table: choices for ``config`` (whose tile fields are placeholders), best first.

    Times are those of one NVIDIA H200, 2026-11-20, bfloat16 unless stated, against the tile that lost.
    """
    for tile in _tiles_by_shape(config, seqlen_q, seqlen_k, smem_limit):
        # Few keys (cross-attention to 77 tokens): a tile need not be wider than they are.
        yield replace(tile, block_n=max(16 * tile.warps_n, min(tile.block_n, _round_up(seqlen_k, 16))))


def _tiles_by_shape(config: ForwardConfig, seqlen_q: int, seqlen_k: int, smem_limit: int) -> Iterator[Tile]:
    features = config.features
    dim, dim_v = config.head_dim, config.head_dim_v
    fast_loads = config.aligned and not config.legacy_mma
    less_smem = smem_limit < MEASURED_SMEM
    if dim_v > 256:
        # A row's output does not fit in one warp's registers: 2 or 4 warps share it and recompute its scores.
        # D 512, B2 S4096 H1: 0.329 ms; block_n 32: 0.403; 2 stages of 32: 0.392; block_m 32 with warps_d 4: 0.731.
        if config.itemsize == 2:
            yield Tile(block_m=64, block_n=64, num_warps=8, warps_d=2)
            yield Tile(block_m=64, block_n=32, num_warps=8, warps_d=2)
            yield Tile(block_m=32, block_n=32, num_warps=4, warps_d=2)  # float32 spills up to 416 bytes here
        yield Tile(block_m=32, block_n=16, num_warps=4, warps_d=2)
        yield Tile(block_m=16, block_n=16, num_warps=4, warps_d=4)
        return
    if seqlen_q <= DECODE_ROWS:
        # Mq 1, 8192 keys, B32 H32, D 128: 0.967 ms = 4.4 TB/s, all there is; 1 stage: 0.996, block_n 128: 0.975.
        yield Tile(block_m=16, block_n=64, num_warps=4, num_stages=2, warps_n=4)
        yield Tile(block_m=16, block_n=64, num_warps=4, warps_n=4)
        yield Tile(block_m=16, block_n=32, num_warps=2, warps_n=2)
        yield Tile(block_m=16, block_n=16, num_warps=1)
        return
    if fast_loads and config.itemsize == 2 and seqlen_q <= 64 and seqlen_k >= STREAMED_KEYS:
        # 8192 keys, B32 H32/8, D 128, GB/s of K and V. 32 rows: 4230; 8 warps: 4200; a tile of 64: 4160; two of 16:
        # 3170. 64 rows: 4085; 1 stage: 3770; 8 warps: 3890; two tiles of 32: 3080.
        if seqlen_q <= 32:
            yield Tile(block_m=32, block_n=64, num_warps=4, num_stages=2, warps_n=2)
        elif max(dim, dim_v) <= 128 and smem_limit >= 128 << 10:
            yield Tile(block_m=64, block_n=64, num_warps=4, num_stages=2)
    if config.itemsize == 4:
        # D 64, B4 S2048 H16: 1.057 ms; 64 x 64: 1.127. D 128: 2.09 ms; 64 x 32: 2.25; 128 x 16: 2.25; 256 x 32 with
        # 8 warps: 2.03, but on one block a multiprocessor. With any policy 128 rows spill.
        if (
            fast_loads
            and seqlen_q > 64
            and (features == Features() or (dim_v <= 64 and features == Features(band=True)))
        ):
            if dim_v <= 64 and dim <= 128:
                yield Tile(block_m=128, block_n=32, num_warps=4, min_blocks_per_sm=2)
            elif dim_v <= 128:
                yield Tile(block_m=128, block_n=32, num_warps=4)
        yield Tile(block_m=64, block_n=32, num_warps=4)
        if fast_loads and less_smem:  # 8 warps where shared memory has room for one block
            yield Tile(block_m=128, block_n=32, num_warps=8)
        yield Tile(block_m=64, block_n=16, num_warps=4)
        if fast_loads and less_smem:
            yield Tile(block_m=64, block_n=32, num_warps=8, warps_n=2)
        yield Tile(block_m=32, block_n=16, num_warps=2)
        yield Tile(block_m=16, block_n=16, num_warps=1)
        return
    if fast_loads and seqlen_q > 64 and not features.dropout:
        reads_scores = features.bias is not None or features.mask
        if dim_v <= 64 and dim <= 64 and not (reads_scores or features.softcap or features.prescale):
            # D 64, B4 S4096 H32: 351 TFLOP/s; 128 x 64: 331 with 3 blocks, 320 with 2; 256 x 128 with 8 warps: 318.
            # D 40 (float16): 232; 128 x 64: 203. With softcap or a bias 128 columns spill, for 12.x with a band, too.
            block_n = 96 if features.band and config.arch in ("sm_120", "sm_121") else 128
            yield Tile(block_m=128, block_n=block_n, num_warps=4, min_blocks_per_sm=2)
        elif dim_v <= 64 or (dim_v <= 128 and not reads_scores):
            # D 128, B4 S4096 H16: 409 TFLOP/s; 2 stages: 396; 128 x 32: 343; 64 x 64: 315; 128 x 128 with 8 warps: 320,
            # 256 x 64 with 8 warps: 379. D 80: 305, 128 x 128: 288. D 192 and 128: 339, 64 x 64: 266.
            # Bias, D 64, B4 S2048 H16: 0.421 ms; 64 x 64: 0.472; 128 x 64 with 8 warps: 0.632.
            block_n = 64
            if dim_v > 64:
                # 100 KB a multiprocessor holds two blocks only with 32 keys; for 10.x ptxas spills 76 bytes with 64.
                block_n = 32 if smem_limit < 128 << 10 else 64 if config.arch in ("sm_80", "sm_87", "sm_90") else 48
            yield Tile(block_m=128, block_n=block_n, num_warps=4, min_blocks_per_sm=2)
            if less_smem and block_n > 32 and dim > 128:  # two blocks of D 192 and 128 in 164 KB
                yield Tile(block_m=128, block_n=32, num_warps=4, min_blocks_per_sm=2)
        elif dim_v <= (128 if reads_scores else 160):
            # D 160, B2 S4096 H16: 364 TFLOP/s; 64 x 64: 305; 128 x 64 with 8 warps: 271.
            # Bias, D 128, B4 S2048 H16: 0.661 ms; 64 x 64: 0.715; 128 x 64 with 8 warps: 0.799.
            yield Tile(block_m=128, block_n=32, num_warps=4)
    if fast_loads:
        # D 256, B4 S4096 H8: 312 TFLOP/s; 128 x 64 with 8 warps: 311; 64 x 32 with 2 stages: 288. D 192: 324.
        # Dropout, D 64, B4 S2048 H16: 0.567 ms; 128 x 64: 0.599; 128 x 128: 0.705.
        yield Tile(block_m=64, block_n=64, num_warps=4, min_blocks_per_sm=2)
        if less_smem and max(dim, dim_v) > 128:  # 8 warps where shared memory has room for one block
            yield Tile(block_m=128, block_n=64, num_warps=8)
            yield Tile(block_m=128, block_n=32, num_warps=8)
    yield Tile(block_m=64, block_n=64 if max(dim, dim_v) <= 128 else 32, num_warps=4)
    yield Tile(block_m=64, block_n=32, num_warps=4)
    yield Tile(block_m=32, block_n=32, num_warps=2)
    yield Tile(block_m=16, block_n=16, num_warps=1)


def _head_group(problem: AttentionProblem, config: ForwardConfig) -> int:
    """Heads whose query tiles are interleaved, the longest tiles first; 1 keeps the tiles of a head together."""
    if not problem.band:
        return 1
    bytes_per_head = max(config.itemsize * problem.seqlen_k * (config.head_dim + config.head_dim_v), 1)
    return max(1, min(problem.batch * problem.num_heads, L2_BYTES // bytes_per_head))


def packs_heads(problem: AttentionProblem) -> bool:
    """Whether the query heads of a key head are rows of one tile."""
    return 0 < problem.num_heads_kv < problem.num_heads and problem.seqlen_q < PACKED_QUERIES


def _num_splits(blocks: int, num_key_tiles: int, slots: int, max_splits: int) -> int:
    """Splits of the keys that minimise waves times key tiles per block; ``slots`` blocks run at once.

    In units of one key tile (2.8 us at D 128), a block costs its tiles plus 3 for prologue and epilogue, and splitting
    6 more for the partial results and the second kernel: Mq 512, 8192 keys, H8: 228, 123, 72, 61 us with 1, 2, 4, 8
    splits; Mq = Mk = 2048, H4: 65, 46, 42, 51 us (H200, 2026-11-20).
    """
    best, best_cost = 1, _ceil_div(blocks, slots) * (num_key_tiles + 3)
    for splits in range(2, min(max_splits, num_key_tiles // 2) + 1):
        cost = _ceil_div(blocks * splits, slots) * (_ceil_div(num_key_tiles, splits) + 3) + 6
        if cost < 0.95 * best_cost:
            best, best_cost = splits, cost
    return best


def _resident(config: ForwardConfig, smem_limit: int, by_registers: int) -> int:
    """Blocks that share a multiprocessor: by shared memory (1 KB of each is the system's) and by registers."""
    by_smem = (smem_limit + _SMEM_RESERVED) // (smem_bytes(config) + _SMEM_RESERVED)
    return max(1, min(by_smem, by_registers))


def _stream_keys(
    config: ForwardConfig,
    blocks: int,
    num_key_tiles: int,
    *,
    num_sms: int,
    smem_limit: int,
    row_bytes: int,
    max_splits: int,
    ragged: bool,
) -> tuple[ForwardConfig, int]:
    """``config`` and its splits of the keys for few query rows, whose time is that of reading K and V.

    ``blocks`` is their number without splits, ``row_bytes`` what one split writes and the second kernel reads. With
    ``ragged``, several sequences have lengths on the device.

    Blocks that run together share the memory's bandwidth, if they are enough to keep it busy, which those of the last
    wave may not be. Ragged lengths are taken to end in such a wave, one block long. In us, H200, 2026-11-21, H32/8 at D
    128, 8192 keys, B32: 252, 273, 261, 264, 264 with 1, 2, 3, 4, 6 splits; 32768 keys, B4: 145, 136, 130, 127, 129 with
    4, 5, 6, 8, 12; H64/8 at D 64, B4: 77, 70, 68, 81 with 8, 12, 16, 24; lengths 512 to 8192, B32: 170, 151, 151, 154
    with 1, 4, 8, 16.
    """
    tile_bytes = config.itemsize * config.block_n * (config.head_dim + config.head_dim_v)
    most = min(max_splits, max(num_key_tiles // 2, 1))

    # One block on nearly every multiprocessor and a third stage to keep the memory busy: half the splits of two blocks
    # each. D 128, H32/8: 32768 keys, B1: 37 us, with twice the blocks 39; B4: 126 and 127; H64/8, 8192 keys, B16, where
    # it spares the splitting: 124 and 133. With 64 KB a stage two stages do (D 256), with 16 KB (D 64) three would not.
    one_each = num_sms // max(blocks, 1)
    deeper = replace(config, num_stages=config.num_stages + 1)
    if (
        0 < one_each <= most
        and 10 * blocks * one_each >= 9 * num_sms
        and not ragged
        and config.block_m <= DECODE_ROWS
        and 32 << 10 <= tile_bytes * (config.num_stages - 1) < 64 << 10
        and smem_bytes(deeper) <= smem_limit
    ):
        return deeper, one_each

    # 81, 133 and 227 registers at D 64, 128 and 256.
    registers = min(255, 40 + 3 * config.head_dim_v // 4)
    slots = num_sms * _resident(config, smem_limit, 65536 // (config.num_threads * registers))
    busy = num_sms * IN_FLIGHT_BYTES / (tile_bytes * (config.num_stages - 1))
    best, best_cost = 1, 0.0
    for splits in range(1, most + 1):
        waves, rest = divmod(blocks * splits, slots)
        together = blocks * splits + busy
        if not ragged:
            together = waves * slots + ((rest**4 + busy**4) ** 0.25 if rest else 0)
        cost = (_ceil_div(num_key_tiles, splits) + 0.25) * tile_bytes * together  # a block starts and ends, too
        if splits > 1:
            cost += SPLIT_BYTES + 2 * splits * row_bytes
        if splits == 1 or cost < 0.99 * best_cost:
            best, best_cost = splits, cost
    return config, best


def choose_forward(
    problem: AttentionProblem,
    *,
    arch: str,
    num_sms: int,
    smem_limit: int,
    legacy_mma: bool = False,
    rank: int = 0,
    num_splits: int | None = None,
) -> ForwardPlanSpec:
    """Kernels of the forward pass; see ``heuristics.choose_forward``.

    ``rank`` takes a later row of the table among those that fit (the last, where there are fewer), ``num_splits``
    another number of splits: both for `candidates`.

    Raises
    ------
    UnsupportedError
        With every reason why no kernel serves the problem.
    """
    reasons = []
    for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if head_dim > MAX_HEAD_DIM:
            reasons.append(f"{name} is {head_dim}; kernels exist up to {MAX_HEAD_DIM}")
    if legacy_mma and problem.dtype != "float16":
        reasons.append(f"dtype is {problem.dtype}; compute capability 7.5 has matrix instructions for float16 only")
    reasons += unread_by("forward_portable", problem.further_inputs)
    if reasons:
        raise UnsupportedError(f"no forward kernel on {arch} for this problem", reasons)

    group = problem.num_heads // problem.num_heads_kv if packs_heads(problem) else 1
    rows = problem.seqlen_q * group  # of one (batch, head) that the tiles divide
    heads = problem.batch * problem.num_heads // group
    itemsize = 4 if problem.dtype == "float32" else 2
    warps_d_unit = 64 if problem.head_dim_v > 256 else 8
    base = ForwardConfig(
        kernel="forward_portable",
        arch=arch,
        dtype=problem.dtype,
        head_dim=_round_up(problem.head_dim, 8),
        head_dim_v=_round_up(problem.head_dim_v, warps_d_unit),
        block_m=16,
        block_n=16,
        num_warps=1,
        aligned=all(is_vectorizable(x, itemsize) for x in (problem.q, problem.k, problem.v)),
        legacy_mma=legacy_mma,
        features=features_of(problem),
        packed_heads=group > 1,
    )
    candidates = [_with_tile(base, tile) for tile in _tiles(base, rows, problem.seqlen_k, smem_limit)]
    fitting = [c for c in candidates if smem_bytes(c) <= smem_limit]
    if rows > PACKED_QUERIES and smem_limit < MEASURED_SMEM and not legacy_mma:
        fitting.sort(key=lambda c: warps_per_sm(c.num_warps, smem_bytes(c), smem_limit) < MIN_WARPS)
    if not fitting:
        least = min(smem_bytes(c) for c in candidates)
        reason = (
            f"the smallest tile of {problem.dtype} with head_dim {problem.head_dim} and head_dim_v "
            f"{problem.head_dim_v} needs {least} bytes of shared memory; a block gets {smem_limit}"
        )
        raise UnsupportedError(f"no forward kernel on {arch} for this problem", [reason])
    config = fitting[min(rank, len(fitting) - 1)]

    # A varlen problem whose sequences are all empty still has tokens to zero.
    num_m_blocks = max(_ceil_div(rows, config.block_m), int(problem.varlen))
    num_rows = heads * rows
    row_bytes = 4 * num_rows * (config.head_dim_v + 1)
    num_key_tiles = _ceil_div(problem.seqlen_k, config.block_n)
    max_splits = min(MAX_SPLITS, MAX_PARTIAL_BYTES // row_bytes) if row_bytes else 1
    if num_splits is not None:
        num_splits = max(1, min(num_splits, max_splits, num_key_tiles // 2))
    elif config.num_stages > 1 and config.aligned and not legacy_mma:
        config, num_splits = _stream_keys(
            config,
            heads * num_m_blocks,
            num_key_tiles,
            num_sms=num_sms,
            smem_limit=smem_limit,
            row_bytes=row_bytes,
            max_splits=max_splits,
            ragged=problem.batch > 1 and (problem.varlen or problem.seqused_k),
        )
    else:
        by_registers = 3 if config.block_m <= DECODE_ROWS else config.min_blocks_per_sm
        slots = num_sms * _resident(config, smem_limit, by_registers)
        num_splits = _num_splits(heads * num_m_blocks, num_key_tiles, slots, max_splits)
    if num_splits == 1:
        virtual_heads = problem.num_heads // group if problem.varlen else 0
        launch = Launch(
            config=config,
            grid=(heads + virtual_heads) * num_m_blocks,
            block=config.num_threads,
            smem_bytes=smem_bytes(config),
            params=(("num_m_blocks", num_m_blocks), ("num_splits", 1), ("head_group", _head_group(problem, config))),
        )
        return ForwardPlanSpec(launches=(launch,))

    split_config = replace(config, split=True)
    combine_config = ForwardConfig(
        kernel="combine",
        arch=arch,
        dtype=problem.dtype,
        head_dim=config.head_dim_v,
        head_dim_v=config.head_dim_v,
        block_m=COMBINE_WARPS if num_rows >= 8 * num_sms else 1,
        block_n=16,
        num_warps=COMBINE_WARPS if num_rows >= 8 * num_sms else 2 * COMBINE_WARPS,
        legacy_mma=legacy_mma,
        # Scores that the kernel over splits maps are in natural units, others in those of q.k: kMapsScores.
        features=Features(varlen=problem.varlen, prescale=maps_scores(config.features)),
    )
    return ForwardPlanSpec(
        launches=(
            Launch(
                config=split_config,
                grid=heads * num_splits * num_m_blocks,
                block=config.num_threads,
                smem_bytes=smem_bytes(split_config),
                params=(("num_m_blocks", num_m_blocks), ("num_splits", num_splits), ("head_group", 1)),
            ),
            Launch(
                config=combine_config,
                grid=_ceil_div(num_rows, combine_config.block_m) + (problem.num_heads if problem.varlen else 0),
                block=combine_config.num_threads,
                smem_bytes=smem_bytes(combine_config),
                params=(("num_m_blocks", num_m_blocks), ("num_splits", num_splits)),
            ),
        ),
        num_splits=num_splits,
        out_partial_bytes=4 * num_splits * num_rows * config.head_dim_v,
        softmax_partial_bytes=8 * num_splits * num_rows,
    )


def _with_tile(config: ForwardConfig, tile: Tile) -> ForwardConfig:
    return replace(config, **asdict(tile))


def candidates(problem: AttentionProblem, **target: Any) -> list[ForwardPlanSpec]:
    """The first rows of the tile table that fit, then the first row with half and with twice its splits.

    ``target`` are the arguments of `choose_forward`. Splits are varied where there are some, or where one block each
    leaves half of the multiprocessors idle.
    """
    first = choose_forward(problem, **target)
    found = [first, *(choose_forward(problem, **target, rank=rank) for rank in (1, 2))]
    if first.num_splits > 1 or 2 * first.launches[0].grid <= target["num_sms"]:
        splits = (first.num_splits // 2, 2 * first.num_splits)
        found += [choose_forward(problem, **target, num_splits=count) for count in splits if count]
    return found
