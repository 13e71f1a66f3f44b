"""Which thread block of the Hopper forward kernel has which query tile: in a fixed order, or by asking for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..front.problem import AttentionProblem
from ..jit.config import HopperForwardConfig
from .common import ceil_div
from .hopper_common import TileList, tile_list
from .hopper_forward_config import Tile, may_hand_out

Array: TypeAlias = npt.NDArray[Any]
L2_BYTES: Final = 40 << 20
"""What stays in an L2 of 50 to 60 MB beside queries and outputs."""
BLOCKS_SHARING_A_HEAD: Final = 8
HANDED_OUT_FLOPS: Final = {"bias": 1.2e8, "uneven": 4e8, "window": 2e8, "even": 1e9, "wide": 4e9}
MIN_TILES_HANDED_OUT: Final = 7
"""From where query tiles are handed out (`hands_out`): work of a multiprocessor, tiles of a block where they differ."""
TILE_OVERHEAD_COLUMNS: Final = 128.0
"""What a query tile costs beside its key tiles (first product and last one alone, output), in columns of keys: H200,
2026-11, from lengths 512 to 16384."""


def queries_of_tile(problem: AttentionProblem, tile: Tile) -> int:
    """How many queries ``tile`` has: its rows, unless they are several heads'."""
    return tile.block_m // (problem.num_heads // problem.num_heads_kv) if tile.packed_heads else tile.block_m


def heads_of_schedule(problem: AttentionProblem, tile: Tile) -> int:
    """Heads of a sequence as the schedule counts them: key heads, where their query heads are rows of one tile."""
    return problem.num_heads_kv if tile.packed_heads else problem.num_heads


def key_tiles_of_rows(problem: AttentionProblem, rows: int, columns: int) -> npt.NDArray[Any]:
    """How many tiles of so many ``columns`` of keys each query tile of ``rows`` sees, of one sequence that is dense."""
    first = np.arange(0, problem.seqlen_q, rows)
    last = np.minimum(first + rows, problem.seqlen_q) - 1
    offset = problem.seqlen_k - problem.seqlen_q if problem.bottom_right else 0
    low, high = np.zeros_like(first), np.full_like(first, problem.seqlen_k)
    if problem.window_left is not None:
        low = np.clip(first + offset - problem.window_left, 0, problem.seqlen_k)
    if problem.window_right is not None:
        high = np.clip(last + offset + problem.window_right + 1, 0, problem.seqlen_k)
    seen: npt.NDArray[Any] = np.maximum(-(-high // columns) - low // columns, 0)
    return seen


def tile_costs(problem: AttentionProblem, tile: Tile) -> Array:
    """Key tiles that each query tile sees, plus what a query tile costs beside them."""
    rows = queries_of_tile(problem, tile)
    key_tiles = key_tiles_of_rows(problem, rows, tile.block_n)
    there = np.minimum(problem.seqlen_q - np.arange(0, problem.seqlen_q, rows), rows)
    # Warp-groups without rows do not compute, but those beside them gain little more than a half.
    filled = np.maximum(there / rows, 0.5)
    costs: Array = key_tiles * filled + TILE_OVERHEAD_COLUMNS / tile.block_n
    return costs


def pair_rounds(costs: Array, all_heads: int, width: int, head_bytes: int) -> int:
    """Rounds of the schedule in ``hopper/forward/scheduler.cuh`` that hand out pairs.

    The choice whose largest sum is smallest, among those whose single tiles keep their K and V in L2: because they fit,
    or because enough blocks walk through the same head at the same time.
    """
    num_m_blocks = len(costs)
    head_pairs = (num_m_blocks + 1) // 2
    most = all_heads * head_pairs // width
    by_rank = costs[::-1]
    pairs = by_rank[:head_pairs] + costs[:head_pairs]
    if num_m_blocks % 2:
        pairs[-1] /= 2  # the middle tile is alone
    best, best_sum = most, float("inf")
    turn = np.arange(all_heads) * head_pairs // width  # by which the pairs of a head are moved on
    for rounds in range(most, max(most - 4, -1), -1):
        first, done = divmod(rounds * width, head_pairs)
        partial = int(done > 0)
        whole = all_heads - first - partial
        tail_heads = whole + partial
        if rounds < most and tail_heads * head_bytes > L2_BYTES and width < BLOCKS_SHARING_A_HEAD * tail_heads:
            break
        sums: Array = np.zeros(width)
        if rounds:
            head, pair = np.divmod(np.arange(rounds * width), head_pairs)
            moved = (pair + np.where(head < first, turn[head], 0)) % head_pairs
            sums = pairs[moved].reshape(rounds, width).sum(0)
        ranks = np.arange(num_m_blocks)
        heads = np.where((ranks >= done) & (ranks < num_m_blocks - done), tail_heads, whole)
        sums = sums + back_and_forth(np.repeat(by_rank, heads), width)
        largest = float(np.max(sums))
        if largest < 0.998 * best_sum:
            best, best_sum = rounds, largest
    return best


def back_and_forth(units: Array, width: int) -> Array:
    """The sum that each of ``width`` thread blocks has of ``units``, handed out a round forwards, a round backwards."""
    padded = np.concatenate([units, np.zeros(-len(units) % (2 * width))])
    both = padded.reshape(-1, 2, width)
    sums: Array = both[:, 0].sum(0) + both[:, 1, ::-1].sum(0)
    return sums


def order_is_open(problem: AttentionProblem, tile: Tile | HopperForwardConfig) -> bool:
    """Whether the work of ``problem`` decides between a fixed order and tiles that are asked for."""
    return not tile.packed_heads and may_hand_out(problem)


def hands_out(problem: AttentionProblem, tile: Tile, costs: Array, num_sms: int) -> bool:
    """Whether thread blocks ask for their tiles, of `tile_costs` ``costs``, instead of a fixed order.

    In a fixed order a call takes 1.4 to 2 times as long while communication holds a multiprocessor, whose tiles wait
    for another; tiles that are asked for take at most 1.25 times. Alone those take 0.85 to 1.01 of the time of calls
    of 0.1 ms whose tiles differ, or of 0.06 ms with a bias, 1.00 to 1.01 of 0.2 ms otherwise, and lose where calls are
    shorter or heads wide (docs/experiments.md, "Hopper forward: tiles that are asked for").
    """
    if not order_is_open(problem, tile):
        return False
    heads = problem.batch * problem.num_heads
    per_sm = heads * float(costs.sum()) / num_sms  # key tiles
    flops = per_sm * tile.block_m * tile.block_n * 2 * (problem.head_dim + problem.head_dim_v)
    wide = max(problem.head_dim, problem.head_dim_v) > 192
    if problem.bias is not None and not (wide and problem.band):
        return flops >= HANDED_OUT_FLOPS["bias"]
    if wide:
        return flops >= HANDED_OUT_FLOPS["wide"]
    if not (problem.band or problem.seqused_k):
        return flops >= HANDED_OUT_FLOPS["even"]
    windowed = problem.window_left is not None and problem.window_right is not None
    several = heads * len(costs) >= MIN_TILES_HANDED_OUT * tile.min_blocks_per_sm * num_sms
    return several and flops >= HANDED_OUT_FLOPS["window" if windowed else "uneven"]


def either_order(problem: AttentionProblem, config: HopperForwardConfig) -> tuple[HopperForwardConfig, ...]:
    """``config``, of a plan of ``problem``, and the kernel that more or fewer sequences like these would have."""
    if config.features.tile_words or not order_is_open(problem, config):
        return (config,)
    return config, replace(config, tickets=not config.tickets)


def heads_together(all_heads: int, num_m_blocks: int, grid: int) -> int:
    """Heads whose tiles are handed out together, the longest first.

    With few, long tiles begin when little is left beside them; with many, K and V leave L2 between two tiles of a head,
    unless many blocks walk through the same head. Two tiles for every block with up to eight tiles a head, four up to
    48, then eight took the least time at lengths of 512 to 32768 (docs/experiments.md).
    """
    tiles_of_block = 2 if num_m_blocks <= 8 else 4 if num_m_blocks <= 48 else 8
    passes = max(1, round(all_heads * num_m_blocks / (tiles_of_block * grid)))
    return ceil_div(all_heads, passes)


def tile_list_of(problem: AttentionProblem, tile: Tile) -> TileList:
    """The list of the query tiles of packed sequences."""
    return tile_list(
        problem.q.shape[1],
        problem.batch,
        tile.block_m,
        heads=problem.num_heads_kv,
        resident_rows=problem.k.shape[1],
        l2_rows=L2_BYTES // (2 * (problem.head_dim + problem.head_dim_v)),
        entry_bytes=32,
    )
