"""Into how many parts the keys of the portable forward kernel are split, and whether those are a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..front.problem import AttentionProblem
from ..jit.config import PORTABLE_CLUSTER, ForwardConfig
from .common import MEASURED_SMS, ceil_div
from .portable_common import SMEM_RESERVED
from .portable_forward_config import smem_bytes
from .portable_forward_tile import DECODE_ROWS
from .tile_words import pays as words_pay

IN_FLIGHT_BYTES: Final = 30 << 10
"""Of K and V on the way to each multiprocessor. With fewer the memory begins to idle, see `stream_keys`."""
SPLIT_BYTES: Final = 30 << 20
"""What splitting costs, in bytes that could have been read: 7 us of an H200, most of it the second kernel."""
DEEPER_ROWS: Final = 32
"""Up to this many rows a tile may have a third stage. Where blocks are many it takes the place of splits: 64 x 4096
keys, 32 heads on 8, D 128, 256 us without splits, 264 with two, 282 with two stages and two splits. At D 64 where they
are one or two to a multiprocessor: 8 x 2432, 32 heads, 51.9 us, with two stages 56.6; but 32 x 1500, 20 heads, 78.8 and
71.8. One block each of 32 rows, 8 queries of 8192 keys: 24.0 against 26.2 (H200, 2026-11-22 and 29)."""
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
ALONE_BETWEEN: Final = 90
"""The same of blocks that have all keys at head dims 65 to 127, whose rows are no whole lines of memory. 2 x 4096 keys,
32 heads: D 72 42.4 us, in pairs 36.3; D 80 38.7 and 34.6; D 96 41.5 and 38.4; 4 x 2048, 16 heads, D 112 29.4 and 28.4
(H200, 2026-11-29)."""
WAVE: Final = 1.1
"""What more of them read, a block on each multiprocessor and none behind it, in the bytes of many waves. 8 x 2048 keys,
64 heads on 8: 64 blocks of all keys 29.2 us, 128 in pairs 29.5; at D 64 19.1 and 19.6 (H200, 2026-11-23)."""
CLUSTER_ROOM: Final = 0.75
"""Part of the multiprocessors that clusters of four and eight have room for at once, one block each. 32 clusters of
four do not fit on 132: 4 x 8192 keys take 58.8 us, 47.8 in 32 pairs (H200, 2026-11-23)."""
WIDE_CLUSTER_SMS: Final = 128
"""Multiprocessors of a GPU of which enough lie together for sixteen blocks: a slice of one may have fewer."""


def splits_by_waves(blocks: int, num_key_tiles: int, slots: int, max_splits: int) -> int:
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


def resident_blocks(config: ForwardConfig, smem_limit: int, by_registers: int) -> int:
    """Blocks that share a multiprocessor: by shared memory (1 KB of each is the system's) and by registers."""
    by_smem = (smem_limit + SMEM_RESERVED) // (smem_bytes(config) + SMEM_RESERVED)
    return max(1, min(by_smem, by_registers))


def stream_keys(
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
    ahead = tile_bytes * (config.num_stages - 1)
    may_deepen = config.block_m <= DEEPER_ROWS and ahead < 64 << 10 and smem_bytes(deeper) <= smem_limit
    deepens = may_deepen and ahead >= 32 << 10
    # 81, 133 and 227 registers at D 64, 128 and 256.
    registers = min(255, 40 + 3 * config.head_dim_v // 4)
    considered = [config]
    if may_deepen and blocks > num_sms and ahead >= 16 << 10:
        considered.append(deeper)
    best, best_cost = (config, 1), 0.0
    if deepens and 0 < one_each <= most and 10 * blocks * one_each >= 9 * num_sms and not ragged:
        best = deeper, one_each
        best_cost = (ceil_div(num_key_tiles, one_each) + 0.25) * tile_bytes * blocks * one_each
        best_cost += SPLIT_BYTES + 2 * one_each * row_bytes if one_each > 1 else 0
        considered = []
    for staged in considered:
        slots = num_sms * resident_blocks(staged, smem_limit, 65536 // (staged.num_threads * registers))
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
    whole = best[1] == 1  # by the cost of a second kernel, which a cluster does without
    few = 4 * blocks <= num_sms  # blocks for half of the multiprocessors gain nothing in pairs: `WAVE`
    if not narrow or blocks >= num_sms or ragged or (whole and not (wide and few)):
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
    between = 64 < max(config.head_dim, config.head_dim_v) < 128
    # 1 x 512 keys, 96 heads on 8, D 128: 13.8 us, in pairs 11.4; 2 x 700, 64 on 8: 16.6 and 13.0 (H200, 2026-11-29).
    most = min(num_key_tiles // 2 if whole else num_key_tiles, PORTABLE_CLUSTER)
    for count in (*(() if whole else (1,)), *(x for x in CLUSTERS if clusters and x <= most)):
        staged = replace(config, split=True, cluster=count) if count > 1 else config
        room = num_sms if count <= 2 else CLUSTER_ROOM * num_sms
        if blocks * count > room or smem_bytes(staged) > smem_limit:
            continue
        alone = ALONE_BETWEEN if between and count == 1 else ALONE
        busy = max(WAVE * blocks * count, alone / MEASURED_SMS * num_sms)
        cost = (ceil_div(num_key_tiles, count) + 0.25) * tile_bytes * busy + (CLUSTER_BYTES if count > 1 else 0)
        if cost < 0.97 * best_cost:
            best, best_cost = (staged, count), cost
    return best


def may_cluster(
    problem: AttentionProblem, config: ForwardConfig, num_splits: int, smem_limit: int, num_sms: int
) -> bool:
    """Whether the blocks of ``num_splits`` splits can be a cluster: it writes results of the type of q.

    Words of tiles lie behind partial results.
    """
    fits = smem_bytes(replace(config, split=True, cluster=num_splits)) <= smem_limit
    other = problem.varlen or config.features.float32_q or words_pay(problem, config.block_n)
    enough = num_splits <= PORTABLE_CLUSTER or num_sms >= WIDE_CLUSTER_SMS
    return config.arch == "sm_90" and num_splits in CLUSTERS and enough and config.warps_d == 1 and fits and not other


def may_be_wide(problem: AttentionProblem, config: ForwardConfig) -> bool:
    """Whether tiles of `WIDE_BLOCK_N` keys were measured, and leave registers: a modifier may take any number of them.

    Words of tiles are of the tiles that the table has.
    """
    words = words_pay(problem, config.block_n) or words_pay(problem, WIDE_BLOCK_N)
    return config.arch == "sm_90" and config.itemsize == 2 and problem.modifier is None and not words
