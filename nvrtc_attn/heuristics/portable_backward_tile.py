"""The tile table of the portable dk/dv kernel, and which row of it serves a problem."""

from __future__ import annotations

from typing import Final

from ..base.errors import UnsupportedError
from ..front.problem import AttentionProblem
from ..jit.config import BackwardConfig
from .common import features_of, is_aligned, is_float32
from .portable_backward_config import Tile, blocks_per_sm, tile_config
from .portable_common import MEASURED_SMEM, MIN_WARPS, warps_per_sm

DECODE_ROWS: Final = 32
"""Up to this many query rows the loop is one tile, most of a large one would be padding."""
MAX_SHORT_KEYS: Final = 256

# In order of preference within a width. A warp accumulates block_n / warps_n keys x (K + Kv) / (warps_m * dim_slices)
# columns: 128 registers a thread at most with 16-bit operands, 64 in float32 (split operands need the rest). Large
# tiles add to dq less often: 128 x 128 is 3 to 4 % faster than 64 x 128 (H200, 2026-11-20). Rows with less_smem hold 8
# warps in 99 or 163 KB, spill nothing on 8.0, 8.6, 8.9 and 12.0 (`_spills`), and are 1.1 to 1.9 times as fast there as
# what came before. docs/experiments.md, "Portable backward: tiles", has all times.
TILES_16BIT: Final = (
    Tile(width=64, block_m=128, block_n=128, num_warps=4, warps_n=4, warps_m_dq=2, blocks_per_sm=2),
    Tile(width=64, block_m=64, block_n=128, num_warps=4, warps_n=4, warps_m_dq=2, num_stages=2, num_stages_dout=2,
         blocks_per_sm=2),
    Tile(width=64, block_m=64, block_n=128, num_warps=4, warps_n=4, warps_m_dq=2, num_stages=2, num_stages_dout=2),
    Tile(width=64, block_m=64, block_n=128, num_warps=4, warps_n=4, warps_m_dq=2, v_in_smem=False, v_in_registers=True,
         blocks_per_sm=2, less_smem=True),
    Tile(width=64, block_m=64, block_n=64, num_warps=4, warps_n=4, warps_m_dq=2),
    Tile(width=128, block_m=128, block_n=128, num_warps=8, warps_n=4, warps_m_dq=4),
    Tile(width=128, block_m=64, block_n=128, num_warps=8, warps_n=4, warps_m_dq=2, num_stages=2, num_stages_dout=2),
    Tile(width=128, block_m=64, block_n=64, num_warps=4, warps_n=2, warps_m_dq=2, num_stages=2),
    Tile(width=128, block_m=64, block_n=128, num_warps=8, warps_n=4, warps_m_dq=2, less_smem=True),
    Tile(width=128, block_m=64, block_n=128, num_warps=8, warps_n=8, warps_m_dq=2, num_stages=2, v_in_smem=False,
         v_in_registers=True, less_smem=True),
    Tile(width=128, block_m=64, block_n=64, num_warps=8, warps_n=2, warps_m_dq=2, num_stages=2, less_smem=True),
    Tile(width=128, block_m=32, block_n=64, num_warps=4, warps_n=2, warps_m_dq=2),
    Tile(width=256, block_m=128, block_n=64, num_warps=8, warps_n=2, warps_m_dq=4),
    Tile(width=256, block_m=64, block_n=64, num_warps=8, warps_n=2, warps_m_dq=2),
    Tile(width=256, block_m=64, block_n=64, num_warps=8, warps_n=4, warps_m_dq=2, v_in_smem=False, v_in_registers=True,
         less_smem=True),
    Tile(width=256, block_m=32, block_n=64, num_warps=8, warps_n=4, warps_m_dq=2, v_in_smem=False, v_in_registers=True,
         less_smem=True),
    Tile(width=256, block_m=64, block_n=32, num_warps=8, warps_n=2, warps_m_dq=2, v_in_smem=False, v_in_registers=True,
         less_smem=True),
    Tile(width=256, block_m=32, block_n=32, num_warps=4, warps_n=2, warps_m_dq=2),
    Tile(width=256, block_m=32, block_n=16, num_warps=2, warps_n=1, warps_m_dq=2),
    Tile(width=512, block_m=64, block_n=32, num_warps=8, warps_n=2, warps_m_dq=2),
    Tile(width=512, block_m=32, block_n=32, num_warps=4, warps_n=2, warps_m_dq=2, dim_slices=2),
    Tile(width=512, block_m=16, block_n=32, num_warps=2, warps_n=2, warps_m_dq=1, dim_slices=4),
    Tile(width=512, block_m=16, block_n=16, num_warps=1, warps_n=1, warps_m_dq=1, dim_slices=4, v_in_smem=False),
)  # fmt: skip
TILES_32BIT: Final = (
    Tile(width=64, block_m=64, block_n=64, num_warps=4, warps_n=4, warps_m_dq=2),
    Tile(width=128, block_m=64, block_n=64, num_warps=8, warps_n=4, warps_m_dq=2),
    Tile(width=128, block_m=32, block_n=64, num_warps=8, warps_n=4, warps_m_dq=2, less_smem=True),
    Tile(width=128, block_m=32, block_n=32, num_warps=4, warps_n=2, warps_m_dq=2),
    Tile(width=160, block_m=64, block_n=32, num_warps=8, warps_n=2, warps_m_dq=2, less_smem=True),
    Tile(width=256, block_m=32, block_n=32, num_warps=4, warps_n=2, warps_m_dq=2, dim_slices=2),
    Tile(width=256, block_m=16, block_n=32, num_warps=2, warps_n=2, warps_m_dq=1, dim_slices=4),
    Tile(width=512, block_m=32, block_n=16, num_warps=2, warps_n=1, warps_m_dq=2, dim_slices=4),
    Tile(width=512, block_m=16, block_n=16, num_warps=1, warps_n=1, warps_m_dq=1, dim_slices=8),
    Tile(width=512, block_m=16, block_n=16, num_warps=1, warps_n=1, warps_m_dq=1, dim_slices=8, v_in_smem=False),
)  # fmt: skip

# Ahead of the others where one tile holds all keys of a short sequence and dq is stored (`may_store_dq`). There a block
# does little between its loads and its stores, and more blocks hide them: 168 registers a thread, without spills. Two
# blocks take 21 to 26 % longer at head dim 32, warps that share rows of dq 2 to 3 % (H200, 2026-11-22).
TILES_SHORT: Final = (
    Tile(width=32, block_m=64, block_n=64, num_warps=4, warps_n=4, warps_m_dq=4, blocks_per_sm=3),
    Tile(width=64, block_m=64, block_n=64, num_warps=4, warps_n=4, warps_m_dq=4, blocks_per_sm=2),
)
# Behind the others, for more than 128 keys; two blocks a multiprocessor spill 548 bytes.
TILES_256_KEYS: Final = (Tile(width=64, block_m=64, block_n=256, num_warps=8, warps_n=8, warps_m_dq=4),)


def _spills(config: BackwardConfig) -> bool:
    """Whether ptxas (CUDA 13.0) spills this variant of a row: then the next row is taken.

    128 x 128 at D 128: 4 to 48 bytes with most modifiers. The others are rows with V in registers.

    64 x 128 at D 128: 8 bytes with a bias or a mask. 32 x 64 at D 256: 8 bytes without additions to dq or with stores
    of dbias, and for 12.x 8 to 64 with most features, at D 240 with none.
    """
    features = config.features
    reads_scores = features.bias is not None or features.mask
    if features.modifier and config.block_m == 128 and config.block_n == 128 and config.num_warps == 8:
        return True
    if not config.v_in_registers or config.num_warps < 8:
        return False
    if config.warps_n_dkv == 8:
        return reads_scores
    if config.block_m == 32:
        return config.dq == "none" or config.dbias == "store" or config.arch in ("sm_120", "sm_121")
    return False


def may_store_dq(problem: AttentionProblem) -> bool:
    """Whether one tile can hold all keys, and dq need not be added up: then every row of it is written by one block.

    Rows of a masked problem may be left out where nothing is kept, tokens of no packed sequence belong to no tile,
    other operands may have kernels that read what ``delta`` prepares, and a float32 dq of 16-bit operands is written by
    the kernel that converts the sums.
    """
    others = problem.varlen or problem.mask is not None or problem.further_inputs or is_float32(problem, "dq")
    return 0 < problem.seqlen_k <= MAX_SHORT_KEYS and problem.seqlen_q > 0 and not others


def choose_config(
    problem: AttentionProblem,
    *,
    arch: str,
    smem_limit: int,
    legacy_mma: bool,
    dq: str,
    dbias_dtype: str | None,
    rank: int,
    stores_dq: bool,
    fused: bool,
) -> BackwardConfig:
    """The first row of the table that serves ``problem`` and fits, or the one ``rank`` rows behind it."""
    head_dim, head_dim_v = (-(-d // 8) * 8 for d in (problem.head_dim, problem.head_dim_v))
    tiles: tuple[Tile, ...] = TILES_32BIT if problem.dtype == "float32" else TILES_16BIT
    if legacy_mma:
        smem_limit = min(smem_limit, 64 << 10)  # what a GPU that needs these instructions has
    reasons, fitting = [], []
    prefers_warps = smem_limit < MEASURED_SMEM and not legacy_mma and problem.seqlen_q > DECODE_ROWS
    if stores_dq and problem.dtype != "float32":
        tiles = TILES_SHORT + tiles + TILES_256_KEYS
    for tile in _in_order(tiles, problem.seqlen_q):
        if tile.less_smem and not prefers_warps:
            continue
        if tile.width < max(head_dim, head_dim_v):
            continue
        if stores_dq and (tile.block_n < problem.seqlen_k or not may_store_dq(problem)):
            continue
        if fused and (tile.dim_slices > 1 or problem.varlen):
            continue
        if legacy_mma and tile.num_stages * tile.num_stages_dout > 1:
            continue  # without cp.async a second buffer hides nothing
        config = tile_config(
            tile,
            arch=arch,
            dtype=problem.dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            aligned=is_aligned(problem),
            legacy_mma=legacy_mma,
            features=features_of(problem),
            dq=dq,
            dbias_dtype=dbias_dtype,
            stores_dq=stores_dq,
            fused=fused,
        )
        if _spills(config):
            continue
        if config.smem_bytes <= smem_limit and tile.blocks_per_sm <= blocks_per_sm(config, smem_limit):
            fitting.append(config)
            continue
        reasons.append(
            f"tile {tile.block_m} x {tile.block_n} at head dims {head_dim}, {head_dim_v}: {config.smem_bytes} bytes of "
            f"shared memory, {tile.blocks_per_sm} blocks per multiprocessor - {arch} has {smem_limit} per block"
        )
    if prefers_warps:
        fitting.sort(key=lambda c: warps_per_sm(c.num_warps, c.smem_bytes, smem_limit) < MIN_WARPS)
    if fitting:
        return fitting[min(rank, len(fitting) - 1)]
    raise UnsupportedError("no tile of the dk/dv kernel fits", reasons)


def _in_order(tiles: tuple[Tile, ...], seqlen_q: int) -> tuple[Tile, ...]:
    """Tiles in order of preference: for a few query rows (decoding), those with the fewest rows first."""
    if seqlen_q > DECODE_ROWS:
        return tiles
    return tuple(sorted(tiles, key=lambda tile: tile.block_m if tile.dim_slices == 1 else tile.block_m + 128))
