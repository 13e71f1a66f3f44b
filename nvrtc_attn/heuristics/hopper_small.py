"""Forward tiles of 64 query rows on Hopper: of short sequences, narrow windows, and where there are few query tiles.

Between the key tiles of one query tile and those of the next a consumer computes nothing for 2 us. Several thread
blocks on a multiprocessor, each with one consumer, compute beside each other's gaps and waste less of a diagonal or of
the end of a sequence. They bring each key tile once for 64 rows, not for 192, and are slower on long sequences.
Figures: docs/experiments.md, "Hopper forward: tiles".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..front.problem import AttentionProblem
from .common import ceil_div
from .hopper_common import MIN_QUERY_ROWS, score_operands
from .hopper_forward_config import KEY_TILE_OVERHEAD_COLUMNS, Tile, fitted_columns
from .hopper_forward_schedule import key_tiles_of_rows
from .hopper_forward_wide import few_rows

BLOCKS: Final = {64: 3, 128: 2}
"""On a multiprocessor, by head dim."""
LEAST_GAIN: Final = {64: 1.03, 128: 1.06}
"""Of an estimate that is within 10 % of what was measured."""
FEW_WAVES: Final = 4
"""Tiles of 192 rows for each multiprocessor, up to which `waves_favor_128` looks at them."""
FEWEST_KEYS: Final = 256
LEAST_GAIN_OF_128: Final = 1.02
LEAST_GAIN_EVEN: Final = 1.0
"""The same up to head dim 64 where all query tiles have as much work and come in several waves: 2 x 889 x 16, of which
the estimate is 1.03, gains 1.17, 36 x 256 x 6 1.14 (1.16), 13 x 256 x 20 1.04 (1.12); 1 x 2000 x 20 would lose 0.87
(0.95). In one wave 1 x 1500 x 6 and 1 x 1408 x 1024 x 10 lost 0.98 where the estimate was 1 (H200, 2026-11-29)."""
LEAST_GAIN_MAPPED: Final = 0.96
"""The same at head dim 128 with softcap, whose arithmetic beside products of other blocks the estimate leaves out."""
_GAP_US: Final = {(192, 64): 2.0, (128, 64): 1.56, (64, 64): 2.0, (128, 128): 2.8, (64, 128): 2.43}
"""What a query tile takes beside its key tiles, by its rows and the head dim: H200."""
_KEY_TILE_US: Final = {(192, 64): 1.28, (128, 64): 1.19, (64, 64): 1.35, (128, 128): 1.24, (64, 128): 1.23}
"""A tile of 128 keys; one of 64 rows while the other thread blocks are at work."""
_SHARED: Final = {1: 0.65, 2: 0.75, 3: 1.0}
_SHARED_BAND: Final = {1: 0.62, 2: 0.68, 3: 0.85}
"""The time of a tile of 64 rows with so many thread blocks on its multiprocessor, of that with three."""
_BYTES_US: Final = 2.9e6
"""Of q, k, v and out from memory, each once, on an H100. Tiles of 64 rows gain nothing where that is the bound: a
window of 128 at head dim 128, 4 x 8192 x 16, 228 us against 208."""


def small_tile(problem: AttentionProblem, tile: Tile, num_sms: int) -> Tile | None:
    """A tile of 64 rows where it is faster than ``tile``, the table's; ``None`` elsewhere.

    One block a multiprocessor where each of these tiles has one to itself: 9 to 27 % less time at head dims 64 to 256.
    Several by an estimate, at head dim 64 and below and at 128.
    """
    if problem.modifier is not None or score_operands(problem) or tile.score_tiles:
        return None  # not measured, and with dropout 20 bytes and more would spill
    if are_alone(problem, 64, num_sms):
        return few_rows(problem, tile)
    if problem.seqlen_q <= MIN_QUERY_ROWS and not problem.varlen:
        # 34 to 64 rows at head dims 72 to 128: two blocks take 0.79 to 0.95 of the time of 128 rows, three at 32 and 64
        # 0.59 to 0.73 (H200, 2026-11-29).
        made = several_blocks if max(problem.head_dim, problem.head_dim_v) <= 128 else few_rows
        return made(problem, tile)
    widest = shared_width(problem)
    if not widest or tile.block_m == 64:
        return None
    known, faster = _measured(problem, tile, widest)
    if known.half_tile and problem.seqlen_q <= 256:
        return None  # 64 x 256 x 32 causal at head dim 64: 119 us against 109 (H100), where the estimate is 1.16
    several = several_blocks(problem, tile)
    gain = _time(problem, known, widest, num_sms) / _time(problem, several, widest, num_sms) / faster
    mapped = widest == 128 and problem.softcap > 0
    even = widest == 64 and not (problem.varlen or problem.band or are_alone(problem, 64, BLOCKS[64] * num_sms))
    least = LEAST_GAIN_MAPPED if mapped else LEAST_GAIN_EVEN if even else LEAST_GAIN[widest]
    return several if gain > least else None


def are_alone(problem: AttentionProblem, rows: int, num_sms: int) -> bool:
    """Whether every tile of so many query rows has a multiprocessor to itself; not known of packed sequences."""
    return not problem.varlen and problem.batch * problem.num_heads * ceil_div(problem.seqlen_q, rows) <= num_sms


def waves_favor_128(problem: AttentionProblem, num_sms: int) -> bool:
    """Whether 128 query rows are faster than 192 up to head dim 64, by the estimate, which is asked of few waves.

    128 took 0.87 of the time of 192 for 2 x 889 x 16 (the estimate: 0.90), 0.89 for 4 x 512 x 16 (0.89), 1.17 for 4 x
    700 x 12 (1.4), 1.09 for 5 x 384 x 40 (1.09; H200, 2026-11-29).
    """
    if problem.seqlen_k < FEWEST_KEYS or not are_alone(problem, 192, FEW_WAVES * num_sms):
        return False
    large, small = (_time_of_tiles(problem, Tile(block_m=rows, block_n=128), 64, num_sms) for rows in (192, 128))
    return LEAST_GAIN_OF_128 * small < large


def _measured(problem: AttentionProblem, tile: Tile, widest: int) -> tuple[Tile, float]:
    """The tile whose times are known here, in the place of ``tile``, and how much faster ``tile`` counts.

    Narrow tiles of large rows have none: they were 1.04 times as fast as the wide ones before, and 1.07 times at head
    dim 128 without a mask of positions.
    """
    if widest == 128 and tile.block_n <= 80:
        columns = fitted_columns(problem, 128)
        known = replace(tile, block_m=128, block_n=columns, half_tile=problem.band and problem.softcap == 0)
        return known, 1.04 if problem.band or problem.softcap > 0 else 1.07
    if tile.block_n == 64 and problem.seqlen_k > 64:
        return replace(tile, block_n=112), 1.04
    return tile, 1.0


def shared_width(problem: AttentionProblem) -> int:
    """64 or 128, the table of head dims for which several consumers on a multiprocessor may be faster; 0 for no others.

    Rows of 80 bytes are no whole sectors, and more consumers read more of them: 0.70 at head dim 40, 1.13 at 48. At 96
    0.80 to 0.86.
    """
    if problem.modifier is not None or score_operands(problem):
        return 0
    if max(problem.head_dim, problem.head_dim_v) <= 64 and problem.head_dim % 16 == problem.head_dim_v % 16 == 0:
        return 64
    return 128 if problem.head_dim == problem.head_dim_v == 128 else 0


def several_blocks(problem: AttentionProblem, tile: Tile) -> Tile:
    """Without a mask of positions tiles of 48 keys where 64 leave more of the last one empty: 96 keys 1.15 and 1.01."""
    columns, widest = 64, 64 if max(problem.head_dim, problem.head_dim_v) <= 64 else 128
    if widest == 64 and not (problem.band or problem.varlen or problem.seqused_k):
        columns = min((64, 48), key=lambda x: ceil_div(problem.seqlen_k, x) * (x + KEY_TILE_OVERHEAD_COLUMNS))
    return replace(
        tile, block_m=64, block_n=columns, num_stages=3, num_stages_q=2 if widest == 64 else 1, half_tile=False,
        ping_pong=False, lazy_max=True, min_blocks_per_sm=BLOCKS[widest],
    )  # fmt: skip


def moved_bytes(problem: AttentionProblem) -> int:
    """Of q, k, v and out, each once."""
    rows, keys = (x.shape[0] * x.shape[1] for x in (problem.q, problem.k))
    return 2 * (rows * problem.num_heads + keys * problem.num_heads_kv) * (problem.head_dim + problem.head_dim_v)


def _time(problem: AttentionProblem, tile: Tile, widest: int, num_sms: int) -> float:
    """Microseconds of the query tiles, or of what they move if that takes longer."""
    return max(_time_of_tiles(problem, tile, widest, num_sms), moved_bytes(problem) / _BYTES_US)


def _time_of_tiles(problem: AttentionProblem, tile: Tile, widest: int, num_sms: int) -> float:
    """Microseconds of the longest query tile, or of all of them on all multiprocessors."""
    rows, columns, blocks = tile.block_m, tile.block_n, tile.min_blocks_per_sm
    workers = blocks * num_sms
    tiles, key_tiles = _key_tiles(problem, rows, columns)
    of_key_tile = _KEY_TILE_US[rows, widest] * (columns + KEY_TILE_OVERHEAD_COLUMNS) / (128 + KEY_TILE_OVERHEAD_COLUMNS)
    costs = _GAP_US[rows, widest] + (key_tiles - 0.25 * tile.half_tile) * of_key_tile
    tiles *= problem.num_heads
    longest = float(np.max(costs))
    if tiles <= workers:
        shared = _SHARED_BAND if problem.band else _SHARED
        on_each = ceil_div(int(tiles), num_sms) + BLOCKS[64] - blocks
        return longest * (shared[on_each] if blocks > 1 else 1)
    if problem.varlen or problem.band:
        return max(longest, tiles * float(np.mean(costs)) / workers)
    if blocks == BLOCKS[64]:  # those of the last wave have fewer beside them
        waves, rest = divmod(int(tiles), workers)
        return longest * (waves + _SHARED.get(ceil_div(rest, num_sms), 0.0))
    return longest * ceil_div(int(tiles), workers)


def _key_tiles(problem: AttentionProblem, rows: int, columns: int) -> tuple[float, npt.NDArray[Any]]:
    """Query tiles of a head in all sequences, and the key tiles of each in one sequence.

    Of packed sequences an average: of lengths between their mean and the longest, which have most of the work.
    """
    if problem.varlen:
        mean = max(problem.q.shape[1] / max(problem.batch, 1), 1)
        length = min((mean + problem.seqlen_q) / 2, problem.seqlen_q)
        seen = length
        if problem.band:
            seen = (length + rows) / 2
            if problem.window_left is not None:
                seen = min(seen, problem.window_left + rows)
        uneven = 0.5 if rows % columns or not problem.band else 0.0
        tiles = problem.q.shape[1] / length * (length / rows + 0.5)
        return tiles, np.array([seen / columns + uneven])
    seen_by = key_tiles_of_rows(problem, rows, columns)
    return float(problem.batch * len(seen_by)), seen_by
