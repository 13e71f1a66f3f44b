"""Splits of the keys of the Hopper forward kernel, where its query tiles leave multiprocessors idle.

A split computes a share of the key tiles of a query tile, and a second kernel merges the shares. Speculative decoding
of many heads on one, a chunk of a long prompt and cross-attention from few queries have a handful of query tiles and
many keys. The portable family splits keys too, at less than half of the speed of the warp-group products.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..front.problem import AttentionProblem
from .common import ceil_div
from .forward_combine import MAX_PARTIAL_BYTES
from .hopper_common import score_operands
from .hopper_forward_config import Tile
from .hopper_forward_schedule import back_and_forth, heads_of_schedule, key_tiles_of_rows, queries_of_tile

SPLITS_KEYS: Final = True
"""Whether tables and the autotuner split keys."""
MAX_SPLITS: Final = 64
MIN_KEYS: Final = 256
"""Of a share, below which its fixed costs are all there is."""
MAX_WAVES: Final = 3
"""Query tiles of each multiprocessor, from which on the last round of whole tiles leaves too little to gain."""
WAVES_OF_SPLITS: Final = 6
LEAST_GAIN: Final = 1.05
"""Of the estimate."""
_WIDTHS: Final = (64, 128, 256)
_KEY_US: Final = {64: (0.0064, 0.0075, 0.0129), 128: (0.0087, 0.0098, 0.0196), 192: (0.0100, 0.0126, 0.0126)}
"""A key of a query tile alone on its multiprocessor, in tiles of 128 keys, by rows and head dim (`_WIDTHS`)."""
_NARROW_COLUMNS: Final = 16
"""What a key tile costs beside its columns, in columns."""
_BUSY: Final = 0.1
"""What all of that takes more where every multiprocessor is at work."""
_LAUNCH_US: Final = 4.0
_GAP_US: Final = 2.0
"""What a query tile takes beside its keys."""
_COMBINE_US: Final = 5.0
_PARTIAL_BYTES_US: Final = 2.5e6
"""Partial results that all multiprocessors write, or read, in a microsecond."""
_KEY_BYTES_US: Final = 4e6
"""Keys and values that they read from memory."""
_BESIDE_MEMORY: Final = 0.25
"""Of the shorter one of reading keys and computing with them, what the longer one does not hide."""


def may_split(problem: AttentionProblem) -> bool:
    """Whether the kernel has splits for ``problem``: nothing but scores, and no counter of tiles beside its results."""
    other = problem.varlen or score_operands(problem) or problem.further_inputs or problem.modifier is not None
    return not (other or problem.return_max_logit or problem.sm_margin is not None)


def time_us(problem: AttentionProblem, tile: Tile, num_splits: int, num_sms: int) -> float:
    """Estimate of the forward pass with ``tile``, which has a multiprocessor to itself, and so many splits.

    Within a sixth of what was measured of 19 problems (docs/experiments.md, "Few query tiles, many keys").
    """
    heads = problem.batch * heads_of_schedule(problem, tile)
    shares = _shares(problem, tile, num_splits)
    busy = 1 + _BUSY * min(heads * len(shares) / num_sms, 1)
    units = np.repeat((shares * tile.block_n * _key_us(problem, tile) * busy + _GAP_US)[::-1], heads)
    longest = float(np.max(back_and_forth(units, num_sms)))
    keys = 2 * problem.batch * problem.num_heads_kv * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    reading = keys / _KEY_BYTES_US + _GAP_US
    time = _LAUNCH_US + max(longest, reading) + _BESIDE_MEMORY * min(longest, reading)
    if num_splits > 1:
        rows = num_splits * problem.batch * problem.num_heads * problem.seqlen_q
        at_once = min(heads * len(shares), num_sms) * tile.block_m
        time += _COMBINE_US + 4 * problem.head_dim_v * (rows + at_once) / _PARTIAL_BYTES_US
    return time


def splits_keys(problem: AttentionProblem, tile: Tile, num_sms: int) -> bool:
    """Whether splits are looked at: query tiles are few, and have a multiprocessor to themselves."""
    if not (SPLITS_KEYS and may_split(problem)) or tile.min_blocks_per_sm > 1:
        return False
    return _query_tiles(problem, tile) <= MAX_WAVES * num_sms


def with_partial_results(problem: AttentionProblem, tile: Tile) -> Tile:
    """``tile`` as splits have it: with a half tile ptxas would serialise products (C7511), and with 128 columns spill.

    4 to 80 bytes of 192 rows at head dim 64, 4 of 64 rows beyond head dim 128 with lengths on the device.
    """
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    narrower = tile.block_m == 192 or (tile.block_m == 64 and wide and problem.seqused_k)
    return replace(tile, half_tile=False, block_n=min(tile.block_n, 112) if narrower else tile.block_n)


def most_splits(problem: AttentionProblem, tile: Tile) -> int:
    """Splits that leave a share `MIN_KEYS`, and the workspace its bound."""
    of_split = 4 * problem.batch * problem.num_heads * problem.seqlen_q * (problem.head_dim_v + 2)
    by_keys = problem.seqlen_k // max(MIN_KEYS, tile.block_n)
    return max(min(MAX_SPLITS, by_keys, MAX_PARTIAL_BYTES // max(of_split, 1)), 1)


def split_counts(problem: AttentionProblem, tile: Tile, num_sms: int) -> list[int]:
    """Numbers of splits that may be the fastest: those that fill one to `WAVES_OF_SPLITS` waves, and no more."""
    most, tiles = most_splits(problem, tile), max(_query_tiles(problem, tile), 1)
    counts = {min(waves * num_sms // tiles, most) for waves in range(1, WAVES_OF_SPLITS + 1)}
    return sorted(x for x in counts if x > 1)


def _query_tiles(problem: AttentionProblem, tile: Tile) -> int:
    heads = problem.batch * heads_of_schedule(problem, tile)
    return heads * ceil_div(problem.seqlen_q, queries_of_tile(problem, tile))


def _key_us(problem: AttentionProblem, tile: Tile) -> float:
    widest = max(problem.head_dim, problem.head_dim_v)
    columns = (1 + _NARROW_COLUMNS / tile.block_n) / (1 + _NARROW_COLUMNS / 128)
    return columns * float(np.interp(widest, _WIDTHS, _KEY_US[tile.block_m]))


def _shares(problem: AttentionProblem, tile: Tile, num_splits: int) -> npt.NDArray[np.float64]:
    """Key tiles of each query tile and split, as the schedule counts them."""
    seen = key_tiles_of_rows(problem, queries_of_tile(problem, tile), tile.block_n)
    share = -(-seen // num_splits)
    split = np.arange(num_splits)
    shares: npt.NDArray[np.float64] = np.clip(seen[:, None] - split * share[:, None], 0, share[:, None]).astype(float)
    return shares.reshape(-1)
