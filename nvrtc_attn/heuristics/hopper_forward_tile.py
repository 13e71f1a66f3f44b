"""A row of the tile table of the Hopper forward kernel."""

from __future__ import annotations

from dataclasses import dataclass


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
    packed_heads: bool = False
    tile_bits: bool = False
    min_blocks_per_sm: int = 1
