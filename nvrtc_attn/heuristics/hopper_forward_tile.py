"""A row of the tile table of the Hopper forward kernel, and what every choice of one counts by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..front.problem import AttentionProblem

KEY_TILE_OVERHEAD_COLUMNS: Final = 24
"""What a key tile costs beside its columns, in columns: no tile is worth being narrower than 80."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One row of the tile table."""

    block_m: int
    block_n: int
    num_stages: int = 2
    num_stages_q: int = 1
    ping_pong: bool = True
    half_tile: bool = False
    lazy_max: bool = False
    score_tiles: bool = False
    num_stages_scores: int = 2
    begins_products: bool = False
    """`HopperForwardConfig.begins_products`: of a score_mod that adds what distances decide."""
    packed_heads: bool = False
    tile_bits: bool = False
    min_blocks_per_sm: int = 1


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
