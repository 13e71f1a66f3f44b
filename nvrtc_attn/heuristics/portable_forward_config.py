"""A row of the tile table of the portable forward kernel, the config that it makes, and its shared memory."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

from ..jit.config import ForwardConfig

MAX_SPLITS: Final = 256


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


def with_tile(config: ForwardConfig, tile: Tile) -> ForwardConfig:
    return replace(config, **{name: getattr(tile, name) for name in _OF_TILE})
