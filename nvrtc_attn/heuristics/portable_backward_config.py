"""A row of the tile table of the portable dk/dv kernel, the config that it makes, and its shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..jit.config import BackwardConfig, Features
from .portable_common import warps_per_sm


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One row of the tile table: serves head dims up to ``width`` (the larger of K and Kv) if shared memory allows."""

    width: int
    block_m: int
    block_n: int
    num_warps: int
    warps_n: int
    warps_m_dq: int
    num_stages: int = 1
    num_stages_dout: int = 1
    dim_slices: int = 1
    v_in_smem: bool = True
    v_in_registers: bool = False
    blocks_per_sm: int = 1
    """Wanted, and required of the GPU's shared memory for the row to be taken."""
    less_smem: bool = False
    """Only for GPUs with less shared memory than that of the table's times. They take rows with `MIN_WARPS` first."""


def smem_bytes(config: BackwardConfig) -> int:
    """Dynamic shared memory of the dk/dv kernel; the map is at the head of ``backward_portable.cuh``."""
    shares_keys = config.num_warps > config.warps_n_dkv
    scores = config.block_m * config.block_n
    elements = config.block_n * (config.head_dim + (config.head_dim_v if config.v_in_smem else 0))
    elements += config.block_m * (config.num_stages * config.head_dim + config.num_stages_dout * config.head_dim_v)
    elements += scores if shares_keys else 0
    elements += scores if shares_keys or config.dq == "atomic" or config.stores_dq else 0
    return elements * config.itemsize + 16 * config.block_m


def tile_config(
    tile: Tile,
    *,
    arch: str,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    aligned: bool,
    legacy_mma: bool,
    features: Features,
    dq: str,
    dbias_dtype: str | None,
    stores_dq: bool = False,
    fused: bool = False,
) -> BackwardConfig:
    """The dk/dv kernel on one row of the tile table."""
    config = BackwardConfig(
        kernel="backward_portable",
        arch=arch,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        num_stages_dout=tile.num_stages_dout,
        min_blocks_per_sm=tile.blocks_per_sm,
        aligned=aligned,
        legacy_mma=legacy_mma,
        features=features,
        warps_m_sdp=tile.num_warps // tile.warps_n,
        warps_n_dkv=tile.warps_n,
        warps_m_dq=tile.warps_m_dq,
        dq=dq,
        dbias="store" if dbias_dtype is not None else "none",
        dbias_dtype=dbias_dtype,
        dim_slices=tile.dim_slices,
        stores_dq=stores_dq,
        fused=fused,
        v_in_smem=tile.v_in_smem,
        v_in_registers=tile.v_in_registers,
    )
    return replace(config, smem_bytes=smem_bytes(config))


def blocks_per_sm(config: BackwardConfig, smem_limit: int) -> int:
    """Thread blocks that fit one multiprocessor, with 255 registers a thread unless the tile asks for more blocks."""
    blocks = config.min_blocks_per_sm
    return warps_per_sm(config.num_warps, config.smem_bytes, smem_limit, blocks) // config.num_warps
