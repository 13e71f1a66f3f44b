"""Forward pass of the portable family: which tile for which problem, and when to split keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from ..base.errors import UnsupportedError
from ..front.operands import OPERANDS, unread_by
from ..front.problem import AttentionProblem
from ..jit.config import PORTABLE_CLUSTER, Features, ForwardConfig
from .common import MEASURED_SMS, ceil_div, features_of, is_vectorizable, maps_scores, packed_slots, round_up, tile_of
from .portable_common import MEASURED_SMEM, MIN_WARPS, SMEM_RESERVED, warps_per_sm
from .spec import ForwardPlanSpec, Launch
from .tile_words import pays as words_pay
from .tile_words import plan_launch, with_words, words_of

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
"""Of K and V on the way to each multiprocessor. With fewer the memory begins to idle, see `_stream_keys`."""
SPLIT_BYTES: Final = 30 << 20
"""What splitting costs, in bytes that could have been read: 7 us of an H200, most of it the second kernel."""
DEEPER_ROWS: Final = 32
"""Up to this many rows a tile may have a third stage. Where blocks are many it takes the place of splits: 64 x 4096
keys, 32 heads on 8, D 128, 256 us without splits, 264 with two, 282 with two stages and two splits; two queries of 2048
keys 139 and 149. One block each of 32 rows, 8 queries of 8192 keys: 24.0 against 26.2 (H200, 2026-11-22)."""
DEEPEST_BYTES: Final = 80 << 10
"""Of K and V on the way to a block that is alone on its multiprocessor and has all keys."""
CHAIN_BYTES: Final = 900 << 10
CHAIN_BYTES_OF_DIM: Final = 13 << 10
"""What such a block costs a key tile at least, in bytes that all others could have read, and more of it for each column
of the head: from barrier to barrier it takes 0.43 us at D 64 and 0.64 at D 128, 33 and 52 GB/s. 8 x 2048 keys, 64 heads
on 8: D 64 22.9 us against 26.3 with eight splits, D 128 30.2 against 35.4 with two; 4 x 8192 keys take 88 us against
54.6 (H200, 2026-11-22)."""
CLUSTERS: Final = (2, 4, 8, 16)
"""Splits that a cluster of thread blocks adds up itself. `PORTABLE_CLUSTER` are the most of the table: sixteen, for
`candidates`, are slower wherever eight fill half of the GPU."""
CLUSTER_BYTES: Final = 2 << 20
"""What adding up in a cluster costs, as `SPLIT_BYTES`: sixteen tiles a block take 29.6 us in clusters of eight blocks
and 29.2 in blocks that have all keys, 64 of either (H200, 2026-11-23)."""
WIDE_BLOCK_N: Final = 128
"""Keys of a tile where blocks are few, instead of 64."""
WIDE_BYTES: Final = 96 << 10
"""Of K and V on the way to a block with tiles of 128 keys, which is alone on its multiprocessor. 8 x 2048 keys, 64
heads on 8, D 64: 20.8, 19.1 and 19.4 us with 64, 96 and 160 KB (H200, 2026-11-23)."""
ALONE: Final = 72
"""So many of those blocks read as fast as the memory allows; one reads 52 GB/s. 64 of them reach 3.5 TB/s."""
WAVE: Final = 1.1
"""What more of them read, a block on each multiprocessor and none behind it, in the bytes of many waves. 8 x 2048 keys,
64 heads on 8: 64 blocks of all keys 29.2 us, 128 in pairs 29.5; at D 64 19.1 and 19.6 (H200, 2026-11-23)."""
CLUSTER_ROOM: Final = 0.75
"""Part of the multiprocessors that clusters of four and eight have room for at once, one block each. 32 clusters of
four do not fit on 132: 4 x 8192 keys take 58.8 us, 47.8 in 32 pairs (H200, 2026-11-23)."""
WIDE_CLUSTER_SMS: Final = 128
"""Multiprocessors of a GPU of which enough lie together for sixteen blocks: a slice of one may have fewer."""
COMBINE_WARPS: Final = 4
L2_BYTES: Final = 16 << 20
"""K and V of the heads whose query tiles are interleaved under a mask, a third of the L2 of an H200 (50 MB).

As many heads as that are 5 to 10 % faster than one at a time, and half as many more are slower than one (2026-11-20).
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


_OF_TILE: Final = tuple(x.name for x in fields(Tile))


def smem_bytes(config: ForwardConfig) -> int:
    """Dynamic shared memory of one thread block; the map is at the head of ``forward_portable.cuh``."""
    if config.kernel == "combine":
        return 4 * MAX_SPLITS * config.block_m + 16 * config.num_threads
    tiles = config.block_m * config.head_dim
    tiles += config.num_stages * config.block_n * (config.head_dim + config.head_dim_v)
    if config.cluster > 1:
        epilogue = 4 * config.block_m * (config.warps_n * (config.head_dim_v + 2) + 2)
    elif config.warps_n > 1:
        epilogue = 4 * config.warps_n * config.block_m * (config.head_dim_v + 2)
    else:
        epilogue = config.itemsize * config.block_m * config.head_dim_v
    return max(config.itemsize * tiles, epilogue) + 4 * config.num_threads * config.features.max_logit


def _tiles(config: ForwardConfig, seqlen_q: int, seqlen_k: int, smem_limit: int) -> Iterator[Tile]:
    """The tile table: choices for ``config`` (whose tile fields are placeholders), best first.

    Percentages are of time: H200, 2026-11-20, bfloat16. docs/experiments.md, "Portable forward: tiles", has the times.
    """
    for tile in _tiles_by_shape(config, seqlen_q, seqlen_k, smem_limit):
        # Few keys (cross-attention to 77 tokens): a tile need not be wider than they are.
        yield replace(tile, block_n=max(16 * tile.warps_n, min(tile.block_n, round_up(seqlen_k, 16))))


def _tiles_by_shape(config: ForwardConfig, seqlen_q: int, seqlen_k: int, smem_limit: int) -> Iterator[Tile]:
    features = config.features
    dim, dim_v = config.head_dim, config.head_dim_v
    fast_loads = config.aligned and not config.legacy_mma
    less_smem = smem_limit < MEASURED_SMEM
    if dim_v > 256:
        # A row's output does not fit in one warp's registers: 2 or 4 warps share it and recompute its scores. Key tiles
        # of 32, in one or two stages, take 19 to 22 % longer; 32 rows on 4 warps a row take more than twice as long.
        if config.itemsize == 2:
            yield Tile(block_m=64, block_n=64, num_warps=8, warps_d=2)
            yield Tile(block_m=64, block_n=32, num_warps=8, warps_d=2)
            yield Tile(block_m=32, block_n=32, num_warps=4, warps_d=2)  # float32 spills up to 416 bytes here
        yield Tile(block_m=32, block_n=16, num_warps=4, warps_d=2)
        yield Tile(block_m=16, block_n=16, num_warps=4, warps_d=4)
        return
    if seqlen_q <= DECODE_ROWS:
        # One query reads K and V at 4.4 TB/s, which is all there is; one stage takes 3 % longer, 128 columns 1 %.
        yield Tile(block_m=16, block_n=64, num_warps=4, num_stages=2, warps_n=4)
        yield Tile(block_m=16, block_n=64, num_warps=4, warps_n=4)
        yield Tile(block_m=16, block_n=32, num_warps=2, warps_n=2)
        yield Tile(block_m=16, block_n=16, num_warps=1)
        return
    if fast_loads and config.itemsize == 2 and seqlen_q <= 64 and seqlen_k >= STREAMED_KEYS:
        # One tile that takes all rows reads K and V once: 4230 GB/s with 32 rows and 4085 with 64, where two tiles of
        # half the rows reach 3170 and 3080. More warps are 1 to 5 % slower, one stage 8 %.
        if seqlen_q <= 32:
            yield Tile(block_m=32, block_n=64, num_warps=4, num_stages=2, warps_n=2)
        elif max(dim, dim_v) <= 128 and smem_limit >= 128 << 10:
            yield Tile(block_m=64, block_n=64, num_warps=4, num_stages=2)
    if config.itemsize == 4:
        # 128 rows of plain scores take 6 to 7 % less time than 64; with any policy they spill. At head dim 128 a block
        # of 256 rows on 8 warps is 3 % faster still, but leaves room for no second one on the multiprocessor.
        others = replace(features, max_logit=False)
        plain = others == Features() or (dim_v <= 64 and others == Features(band=True))
        if fast_loads and seqlen_q > 64 and plain:
            if dim_v <= 64 and dim <= 128:
                yield Tile(block_m=128, block_n=32, num_warps=4, min_blocks_per_sm=2)
            elif dim_v <= 128:
                yield Tile(block_m=128, block_n=32, num_warps=4)
        if not (features.max_logit and dim_v > 128 and config.arch in ("sm_100", "sm_103", "sm_110")):  # 80 bytes spill
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
        reads_scores = features.bias is not None or features.mask or bool(features.modifier)
        if dim_v <= 64 and dim <= 64 and not (reads_scores or features.softcap or features.prescale):
            # 351 TFLOP/s at head dim 64, 6 % more than 128 x 64 in three blocks. With softcap or a bias 128 columns
            # spill, and for 12.x with a band, too.
            block_n = 96 if features.band and config.arch in ("sm_120", "sm_121") else 128
            if features.max_logit and features.varlen:
                block_n = min(block_n, 112)  # 20 bytes spill with 128 for 8.x
            yield Tile(block_m=128, block_n=block_n, num_warps=4, min_blocks_per_sm=2)
        elif dim_v <= 64 or (dim_v <= 128 and not reads_scores):
            # 409 TFLOP/s at head dim 128, where a second stage is 3 % slower and 256 rows on 8 warps 7 %. With a bias
            # at head dim 64 it takes 11 % less time than 64 x 64.
            block_n = 64
            if dim_v > 64:
                # 100 KB a multiprocessor holds two blocks only with 32 keys; for 10.x ptxas spills 76 bytes with 64.
                block_n = 32 if smem_limit < 128 << 10 else 64 if config.arch in ("sm_80", "sm_87", "sm_90") else 48
                if features.max_logit and (config.packed_heads or features.softcap or features.prescale):
                    block_n = min(block_n, 32 if block_n == 48 else 48)  # 4 to 16 bytes spill with 16 columns more
            yield Tile(block_m=128, block_n=block_n, num_warps=4, min_blocks_per_sm=2)
            if less_smem and block_n > 32 and dim > 128:  # two blocks of D 192 and 128 in 164 KB
                yield Tile(block_m=128, block_n=32, num_warps=4, min_blocks_per_sm=2)
        elif dim_v <= (128 if reads_scores else 160):
            # Head dim 160 reaches 364 TFLOP/s, 64 x 64 305. With a bias at head dim 128 it takes 8 % less time.
            yield Tile(block_m=128, block_n=32, num_warps=4)
    if fast_loads:
        # As fast as 128 x 64 on 8 warps at head dim 256 (312 TFLOP/s), and two blocks hide each other's waits. With
        # dropout its registers suffice: 5 % less time than 128 x 64.
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
    if problem.varlen and not packs_heads(problem):  # heads whose tiles of all sequences are interleaved
        rows = max(problem.k.shape[1], 1)
        bytes_per_head = max(config.itemsize * rows * (config.head_dim + config.head_dim_v), 1)
        return max(1, min(problem.num_heads, L2_BYTES // bytes_per_head))
    return max(1, min(problem.batch * problem.num_heads, L2_BYTES // bytes_per_head))


def packs_heads(problem: AttentionProblem) -> bool:
    """Whether the query heads of a key head are rows of one tile. A modifier is computed for one head a tile."""
    if problem.modifier is not None:
        return False
    return 0 < problem.num_heads_kv < problem.num_heads and problem.seqlen_q < PACKED_QUERIES


def _num_splits(blocks: int, num_key_tiles: int, slots: int, max_splits: int) -> int:
    """Splits of the keys that minimise waves times key tiles per block; ``slots`` blocks run at once.

    In units of one key tile (2.8 us at D 128), a block costs its tiles plus 3 for prologue and epilogue, and splitting
    6 more for the partial results and the second kernel (H200, 2026-11-20; docs/experiments.md, "Portable forward:
    splits of the keys").
    """
    best, best_cost = 1, ceil_div(blocks, slots) * (num_key_tiles + 3)
    for splits in range(2, min(max_splits, num_key_tiles // 2) + 1):
        cost = ceil_div(blocks * splits, slots) * (ceil_div(num_key_tiles, splits) + 3) + 6
        if cost < 0.95 * best_cost:
            best, best_cost = splits, cost
    return best


def _resident(config: ForwardConfig, smem_limit: int, by_registers: int) -> int:
    """Blocks that share a multiprocessor: by shared memory (1 KB of each is the system's) and by registers."""
    by_smem = (smem_limit + SMEM_RESERVED) // (smem_bytes(config) + SMEM_RESERVED)
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
    wide: bool = False,
    clusters: bool = False,
) -> tuple[ForwardConfig, int]:
    """``config`` and its splits of the keys for few query rows, whose time is that of reading K and V.

    Blocks that run together share the memory's bandwidth, if they are enough to keep it busy, which those of the last
    wave may not be. Ragged lengths are taken to end in such a wave, one block long. The times that this model was
    fitted to are in docs/experiments.md, "Portable forward: splits of the keys".

    Parameters
    ----------
    blocks
        Their number without splits.
    row_bytes
        What one split writes and the second kernel reads.
    ragged
        Several sequences have lengths on the device.
    wide
        Tiles of `WIDE_BLOCK_N` keys may be taken where blocks are few.
    clusters
        Of those, splits may be a cluster: then the config says so.
    """
    tile_bytes = config.itemsize * config.block_n * (config.head_dim + config.head_dim_v)
    most = min(max_splits, max(num_key_tiles // 2, 1))

    # One block on nearly every multiprocessor and a third stage keep the memory as busy as two blocks each, with half
    # the splits: 1 to 7 % less time (same page). With 64 KB a stage (D 256) two stages suffice, with 16 KB (D 64) three
    # would not.
    one_each = num_sms // max(blocks, 1)
    deeper = replace(config, num_stages=config.num_stages + 1)
    deepens = (
        config.block_m <= DEEPER_ROWS
        and 32 << 10 <= tile_bytes * (config.num_stages - 1) < 64 << 10
        and smem_bytes(deeper) <= smem_limit
    )
    # 81, 133 and 227 registers at D 64, 128 and 256.
    registers = min(255, 40 + 3 * config.head_dim_v // 4)
    considered = [config]
    if deepens and blocks > num_sms:
        considered.append(deeper)
    best, best_cost = (config, 1), 0.0
    if deepens and 0 < one_each <= most and 10 * blocks * one_each >= 9 * num_sms and not ragged:
        best = deeper, one_each
        best_cost = (ceil_div(num_key_tiles, one_each) + 0.25) * tile_bytes * blocks * one_each
        best_cost += SPLIT_BYTES + 2 * one_each * row_bytes if one_each > 1 else 0
        considered = []
    for staged in considered:
        slots = num_sms * _resident(staged, smem_limit, 65536 // (staged.num_threads * registers))
        busy = num_sms * IN_FLIGHT_BYTES / (tile_bytes * (staged.num_stages - 1))
        for splits in range(1, most + 1):
            waves, rest = divmod(blocks * splits, slots)
            together = blocks * splits + busy
            if not ragged:
                together = waves * slots + ((rest**4 + busy**4) ** 0.25 if rest else 0)
            cost = (ceil_div(num_key_tiles, splits) + 0.25) * tile_bytes * together  # a block starts and ends, too
            if splits > 1:
                cost += SPLIT_BYTES + 2 * splits * row_bytes
            if not best_cost or cost < 0.99 * best_cost:
                best, best_cost = (staged, splits), cost
    # Fewer blocks than multiprocessors and not many keys: one block walks through all of them in less time than the
    # second kernel takes, if what it asks for ahead is as much as its way from tile to tile is long.
    deepest = replace(config, num_stages=1 + ceil_div(DEEPEST_BYTES, tile_bytes))
    narrow = config.block_m <= DEEPER_ROWS and max(config.head_dim, config.head_dim_v) <= 128
    if not narrow or best[1] == 1 or blocks >= num_sms or ragged:
        return best
    if not wide:
        chain = CHAIN_BYTES + CHAIN_BYTES_OF_DIM * config.head_dim_v
        if config.block_m <= DECODE_ROWS and smem_bytes(deepest) <= smem_limit:
            cost = (num_key_tiles + 0.25) * max(tile_bytes * blocks, chain)
            if cost < 0.97 * best_cost:
                best, best_cost = (deepest, 1), cost
        return best
    # The same on a GPU where it was measured, and as clusters: 6 to 10 % less time than tiles of 64 keys.
    warps = 4 if config.block_m <= DECODE_ROWS else 8
    tile_bytes = config.itemsize * WIDE_BLOCK_N * (config.head_dim + config.head_dim_v)
    stages = 1 + ceil_div(WIDE_BYTES, tile_bytes)
    config = replace(config, block_n=WIDE_BLOCK_N, num_warps=warps, warps_n=4, num_stages=stages)
    num_key_tiles = ceil_div(num_key_tiles, 2)
    for count in (1, *(x for x in CLUSTERS if clusters and x <= min(num_key_tiles, PORTABLE_CLUSTER))):
        staged = replace(config, split=True, cluster=count) if count > 1 else config
        room = num_sms if count <= 2 else CLUSTER_ROOM * num_sms
        if blocks * count > room or smem_bytes(staged) > smem_limit:
            continue
        busy = max(WAVE * blocks * count, ALONE / MEASURED_SMS * num_sms)
        cost = (ceil_div(num_key_tiles, count) + 0.25) * tile_bytes * busy + (CLUSTER_BYTES if count > 1 else 0)
        if cost < 0.97 * best_cost:
            best, best_cost = (staged, count), cost
    return best


def choose_forward(
    problem: AttentionProblem,
    *,
    arch: str,
    num_sms: int,
    smem_limit: int,
    legacy_mma: bool = False,
    rank: int = 0,
    num_splits: int | None = None,
    clustered: bool | None = None,
    clusters: bool = True,
    like: Any = None,
) -> ForwardPlanSpec:
    """Kernels of the forward pass; see ``heuristics.choose_forward``.

    ``rank`` takes a later row of the table among those that fit (the last, where there are fewer), ``num_splits``
    another number of splits, ``clustered`` adds those up in clusters where it can: for `candidates`. ``clusters`` is
    false of a device that launches none. ``like`` is a config whose tile is taken.

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

    packs = packs_heads(problem) if like is None else like.packed_heads
    group = problem.num_heads // problem.num_heads_kv if packs else 1
    rows = problem.seqlen_q * group  # of one (batch, head) that the tiles divide
    heads = problem.batch * problem.num_heads // group
    itemsize = 4 if problem.dtype == "float32" else 2
    warps_d_unit = 64 if problem.head_dim_v > 256 else 8
    base = ForwardConfig(
        kernel="forward_portable",
        arch=arch,
        dtype=problem.dtype,
        head_dim=round_up(problem.head_dim, 8),
        head_dim_v=round_up(problem.head_dim_v, warps_d_unit),
        block_m=16,
        block_n=16,
        num_warps=1,
        aligned=all(is_vectorizable(x, itemsize) for x in (problem.q, problem.k, problem.v)),
        legacy_mma=legacy_mma,
        # Of split keys every split writes its own; `combine` does not know of it.
        features=replace(features_of(problem), max_logit=problem.return_max_logit),
        packed_heads=group > 1,
    )
    tiles = _tiles(base, rows, problem.seqlen_k, smem_limit) if like is None else [tile_of(Tile, like)]
    candidates = [_with_tile(base, tile) for tile in tiles]
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
    num_m_blocks = max(ceil_div(rows, config.block_m), int(problem.varlen))
    num_rows = heads * rows
    row_bytes = 4 * num_rows * (config.head_dim_v + 1)
    num_key_tiles = ceil_div(problem.seqlen_k, config.block_n)
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
            wide=_may_be_wide(problem, config),
            clusters=clusters and clustered is None and _may_cluster(problem, config, 2, smem_limit, num_sms),
        )
    else:
        by_registers = 3 if config.block_m <= DECODE_ROWS else config.min_blocks_per_sm
        slots = num_sms * _resident(config, smem_limit, by_registers)
        num_splits = _num_splits(heads * num_m_blocks, num_key_tiles, slots, max_splits)
    forced = clusters and clustered and _may_cluster(problem, config, num_splits, smem_limit, num_sms)
    if config.cluster > 1 or forced:
        config = _with_sink(problem, replace(config, split=True, cluster=num_splits))
        params = (("num_m_blocks", num_m_blocks), ("num_splits", num_splits), ("head_group", num_splits))
        grid = heads * num_splits * num_m_blocks
        launch = Launch(
            config=config, grid=grid, block=config.num_threads, smem_bytes=smem_bytes(config), params=params
        )
        return ForwardPlanSpec(launches=(launch,))
    plans: tuple[Launch, ...] = ()
    words_params: tuple[tuple[str, int], ...] = ()
    splits = num_splits > 1 or config.features.float32_q
    words_bytes, softmax_bytes = 0, 8 * num_splits * num_rows if splits else 0
    if words_pay(problem, config.block_n) and _has_lines(problem, config, num_m_blocks):
        config = with_words(config)
        words = words_of(problem, problem.seqlen_q if config.packed_heads else config.block_m, config.block_n)
        plans, words_params = (plan_launch(problem, words, config, softmax_bytes),), words.params(softmax_bytes)
        words_bytes = words.nbytes
    if num_splits == 1 and not config.features.float32_q:
        units = heads + (problem.num_heads // group if problem.varlen else 0)
        grid = units * num_m_blocks
        if problem.varlen and group == 1:
            grid = problem.num_heads * packed_slots(problem.q.shape[1], problem.batch, config.block_m)
        config = _with_sink(problem, config)
        launch = Launch(
            config=config,
            grid=grid,
            block=config.num_threads,
            smem_bytes=smem_bytes(config),
            params=(
                ("num_m_blocks", num_m_blocks),
                ("num_splits", 1),
                ("head_group", _head_group(problem, config)),
                *words_params,
            ),
        )
        return ForwardPlanSpec(launches=(*plans, launch), tile_words_bytes=words_bytes)

    # Float32 results come from float32 partial ones, even of a single split: one more kernel converts anyway.
    split_config = replace(config, split=True, features=replace(config.features, float32_q=False))
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
        features=Features(
            varlen=problem.varlen,
            prescale=maps_scores(config.features),
            float32_q=config.features.float32_q,
            optional=" ".join(name for name in problem.further_inputs if OPERANDS[name].behind),
        ),
    )
    return ForwardPlanSpec(
        launches=(
            *plans,
            Launch(
                config=split_config,
                grid=heads * num_splits * num_m_blocks,
                block=config.num_threads,
                smem_bytes=smem_bytes(split_config),
                params=(("num_m_blocks", num_m_blocks), ("num_splits", num_splits), ("head_group", 1), *words_params),
            ),
            Launch(
                config=combine_config,
                grid=ceil_div(num_rows, combine_config.block_m) + (problem.num_heads if problem.varlen else 0),
                block=combine_config.num_threads,
                smem_bytes=smem_bytes(combine_config),
                params=(("num_m_blocks", num_m_blocks), ("num_splits", num_splits)),
            ),
        ),
        num_splits=num_splits,
        out_partial_bytes=4 * num_splits * num_rows * config.head_dim_v,
        softmax_partial_bytes=softmax_bytes,
        tile_words_bytes=words_bytes,
    )


def _may_cluster(
    problem: AttentionProblem, config: ForwardConfig, num_splits: int, smem_limit: int, num_sms: int
) -> bool:
    """Whether the blocks of ``num_splits`` splits can be a cluster: it writes results of the type of q.

    Words of tiles lie behind partial results.
    """
    fits = smem_bytes(replace(config, split=True, cluster=num_splits)) <= smem_limit
    other = problem.varlen or config.features.float32_q or words_pay(problem, config.block_n)
    enough = num_splits <= PORTABLE_CLUSTER or num_sms >= WIDE_CLUSTER_SMS
    return config.arch == "sm_90" and num_splits in CLUSTERS and enough and config.warps_d == 1 and fits and not other


def _may_be_wide(problem: AttentionProblem, config: ForwardConfig) -> bool:
    """Whether tiles of `WIDE_BLOCK_N` keys were measured, and leave registers: a modifier may take any number of them.

    Words of tiles are of the tiles that the table has.
    """
    words = words_pay(problem, config.block_n) or words_pay(problem, WIDE_BLOCK_N)
    return config.arch == "sm_90" and config.itemsize == 2 and problem.modifier is None and not words


def _with_sink(problem: AttentionProblem, config: ForwardConfig) -> ForwardConfig:
    """``config`` that reads what lies behind the params. A sink comes after the last key tile: no other tile but one.

    For 10.x and 11.0 ptxas spills the loop's counter with 128 columns, which no problem with words of tiles has.
    """
    optional = features_of(problem, behind=True).optional
    if optional and config.block_n == 128 and config.arch in ("sm_100", "sm_103", "sm_110"):
        config = replace(config, block_n=112)
    return replace(config, features=replace(config.features, optional=optional))


def _has_lines(problem: AttentionProblem, config: ForwardConfig, num_m_blocks: int) -> bool:
    """Whether a tile of queries has one line of words. Rows of packed heads are queries of several heads."""
    if not config.packed_heads:
        return True
    assert problem.mask is not None
    _, heads, rows, _ = problem.mask.shape
    return heads == 1 and (rows == 1 or num_m_blocks == 1)


def _with_tile(config: ForwardConfig, tile: Tile) -> ForwardConfig:
    return replace(config, **{name: getattr(tile, name) for name in _OF_TILE})


def candidates(problem: AttentionProblem, **target: Any) -> list[ForwardPlanSpec]:
    """The first rows of the tile table that fit, then the first row with half and with twice its splits.

    ``target`` are the arguments of `choose_forward`. Splits are varied where there are some, or where one block each
    leaves half of the multiprocessors idle.
    """
    first = choose_forward(problem, **target)
    found = [first, *(choose_forward(problem, **target, rank=rank) for rank in (1, 2))]
    splits = dict(first.main.params)["num_splits"]
    clusters = target.get("clusters", True)
    if splits > 1 or 2 * first.main.grid <= target["num_sms"]:
        found += [choose_forward(problem, **target, num_splits=count) for count in (splits // 2, 2 * splits) if count]
        counts = [x for x in CLUSTERS if splits <= 2 * x <= 4 * splits] if clusters else []
        found += [choose_forward(problem, **target, num_splits=count, clustered=True) for count in counts]
    return found
