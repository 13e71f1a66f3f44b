"""A row of the tile table of the Hopper forward kernel, and the config that it makes of a problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ..base.dtypes import DTYPES
from ..front.problem import AttentionProblem
from ..jit.config import Features, HopperForwardConfig
from .common import ceil_div, features_of
from .hopper_common import diagonal_bytes, least_work, product_width, score_operands
from .tile_words import bits_bytes, with_words
from .tile_words import pays as words_pay

KEY_TILE_OVERHEAD_COLUMNS: Final = 24
"""What a key tile costs beside its columns, in columns: no tile is worth being narrower than 80."""

FITS_KEYS: Final = True
"""Whether plain scores of few keys get a tile of which less stays empty (`fitted_columns`): 112 keys take 8 to 9 % less
time for 197 and 196 of them, 96 keys 14 % less for 257 (H200, 2026-11-22; part ``fit`` of ``benchmarks/short.py``)."""
LEAST_FIT: Final = 1.04
"""What a narrower tile must gain by `fitted_columns`, and one of a bias."""


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
    keep_words: bool = False
    min_blocks_per_sm: int = 1


def fitted_columns(problem: AttentionProblem, columns: int, fits: bool | None = None) -> int:
    """The width of a key tile, at most ``columns``, with the least work for all keys: 197 are two tiles of 112.

    Where no mask of positions or lengths on the device decide what is in a tile.
    """
    fits = FITS_KEYS if fits is None else fits
    if not fits or columns <= 80 or score_operands(problem):
        return columns
    return least_work(problem, range(columns, 79, -16), KEY_TILE_OVERHEAD_COLUMNS, LEAST_FIT)


def smem_bytes(config: HopperForwardConfig) -> int:
    """Dynamic shared memory of one thread block; the map is at the head of ``forward_hopper.cuh``."""
    slabs_q, slabs_v = ceil_div(config.head_dim, 64), ceil_div(config.head_dim_v, 64)
    rows = config.num_stages_q * config.block_m * slabs_q + config.num_stages * config.block_n * (slabs_q + slabs_v)
    scores = _score_bytes(config)
    barriers = 16 * config.num_stages_scores if scores else 0
    barriers += 8 * config.num_stages if config.features.mask else 0
    barriers += 16 * config.features.tile_words
    barriers += config.num_stages * bits_bytes(config.block_m, config.block_n) * config.tile_bits
    if config.begins_products:
        barriers += diagonal_bytes(config.block_m, config.block_n, config.num_stages)
    barriers += 8 * config.num_threads * (config.features.max_logit and config.lazy_max)  # noted maxima
    announced = (32 if config.features.varlen else 16) * config.num_stages_q
    return 128 * rows + scores + announced + 16 * config.num_stages_q + 32 * config.num_stages + barriers


def _score_bytes(config: HopperForwardConfig) -> int:
    """Shared memory of bias and mask tiles; ``cuda_src/nvrtc_attn/hopper/forward/score_tile.cuh``."""
    if not config.score_tiles:
        return 0
    bias = config.features.bias
    row = (DTYPES[bias].itemsize if bias else 0) + int(config.features.mask)
    return config.num_stages_scores * config.block_m * config.block_n * row


def config_of(problem: AttentionProblem, tile: Tile) -> HopperForwardConfig:
    """The config of ``problem`` with ``tile``."""
    config = HopperForwardConfig(
        kernel="forward_hopper",
        arch="sm_90a",
        dtype=problem.dtype,
        head_dim=product_width(problem.head_dim),
        head_dim_v=product_width(problem.head_dim_v),
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=4 + tile.block_m // 16,
        num_stages=tile.num_stages,
        num_stages_q=tile.num_stages_q,
        features=features_of(problem, behind=True),
        ping_pong=tile.ping_pong,
        half_tile=tile.half_tile,
        lazy_max=tile.lazy_max,
        score_tiles=tile.score_tiles,
        begins_products=tile.begins_products,
        num_stages_scores=tile.num_stages_scores,
        packed_heads=tile.packed_heads,
        keep_words=tile.keep_words,
        min_blocks_per_sm=tile.min_blocks_per_sm,
    )
    if words_pay(problem, tile.block_n):
        # What a function leaves of query tiles differs, and a fixed order can give one block all of the long ones.
        return replace(with_words(config), tickets=may_hand_out(problem), tile_bits=tile.tile_bits)
    return replace(config, tickets=may_hand_out(problem) and problem.sm_margin is not None)


def config_before(
    config: HopperForwardConfig, kernel: str, *, num_warps: int, features: Features, tickets: bool = False
) -> HopperForwardConfig:
    """Of ``kernel``, which prepares the tiles of a kernel of ``config`` and computes no score.

    Many problems share it: it has no head dim and no element type, and of ``features`` what it depends on.
    """
    return HopperForwardConfig(
        kernel=kernel,
        arch=config.arch,
        dtype="bfloat16",
        head_dim=64,
        head_dim_v=64,
        block_m=config.block_m,
        block_n=config.block_n,
        num_warps=num_warps,
        features=features,
        tickets=tickets,
    )


def may_hand_out(problem: AttentionProblem) -> bool:
    """Tiles of packed sequences are handed out anyway, and beside a byte mask a second warp follows the schedule."""
    return not (problem.varlen or problem.mask)
