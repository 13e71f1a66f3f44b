"""The tile table of the portable forward kernel: which tiles are the fastest for a problem, best first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from ..jit.config import Features, ForwardConfig
from .common import round_up
from .portable_common import MEASURED_SMEM
from .portable_forward_config import Tile

DECODE_ROWS: Final = 16
"""Up to this many query rows the warps of a block divide the keys instead of the rows."""
STREAMED_KEYS: Final = 1024
"""From here on up to 64 query rows wait for K and V, and their tiles load in two stages."""


def tiles_for(config: ForwardConfig, seqlen_q: int, seqlen_k: int, smem_limit: int) -> Iterator[Tile]:
    """The tile table: choices for ``config`` (whose tile fields are placeholders), best first.

    Percentages are of time: H200, 2026-11-20, bfloat16. docs/experiments.md, "Portable forward: tiles", has the times.
    """
    for tile in _tiles_by_shape(config, seqlen_q, seqlen_k, smem_limit):
        # Few keys (cross-attention to 77 tokens): a tile need not be wider than they are.
        yield replace(tile, block_n=max(16 * tile.warps_n, min(tile.block_n, round_up(seqlen_k, 16))))


def _tiles_by_shape(config: ForwardConfig, seqlen_q: int, seqlen_k: int, smem_limit: int) -> Iterator[Tile]:
    features = config.features
    dim, dim_v = config.head_dim, config.head_dim_v
    fast_loads = config.aligned and not config.legacy_mma
    less_smem = smem_limit < MEASURED_SMEM
    if dim_v > 256:
        # A row's output does not fit in one warp's registers: 2 or 4 warps share it and recompute its scores. Key tiles
        # of 32, in one or two stages, take 19 to 22 % longer; 32 rows on 4 warps a row take more than twice as long.
        if config.itemsize == 2:
            yield Tile(block_m=64, block_n=64, num_warps=8, warps_d=2)
            yield Tile(block_m=64, block_n=32, num_warps=8, warps_d=2)
            yield Tile(block_m=32, block_n=32, num_warps=4, warps_d=2)  # float32 spills up to 416 bytes here
        yield Tile(block_m=32, block_n=16, num_warps=4, warps_d=2)
        yield Tile(block_m=16, block_n=16, num_warps=4, warps_d=4)
        return
    if seqlen_q <= DECODE_ROWS:
        # One query reads K and V at 4.4 TB/s, which is all there is; one stage takes 3 % longer, 128 columns 1 %.
        yield Tile(block_m=16, block_n=64, num_warps=4, num_stages=2, warps_n=4)
        yield Tile(block_m=16, block_n=64, num_warps=4, warps_n=4)
        yield Tile(block_m=16, block_n=32, num_warps=2, warps_n=2)
        yield Tile(block_m=16, block_n=16, num_warps=1)
        return
    if fast_loads and config.itemsize == 2 and seqlen_q <= 64 and seqlen_k >= STREAMED_KEYS:
        # One tile that takes all rows reads K and V once: 4230 GB/s with 32 rows and 4085 with 64, where two tiles of
        # half the rows reach 3170 and 3080. More warps are 1 to 5 % slower, one stage 8 %.
        if seqlen_q <= 32:
            yield Tile(block_m=32, block_n=64, num_warps=4, num_stages=2, warps_n=2)
        elif max(dim, dim_v) <= 128 and smem_limit >= 128 << 10:
            yield Tile(block_m=64, block_n=64, num_warps=4, num_stages=2)
    if config.itemsize == 4:
        # 128 rows of plain scores take 6 to 7 % less time than 64; with any policy they spill. At head dim 128 a block
        # of 256 rows on 8 warps is 3 % faster still, but leaves room for no second one on the multiprocessor.
        others = replace(features, max_logit=False)
        plain = others == Features() or (dim_v <= 64 and others == Features(band=True))
        if fast_loads and seqlen_q > 64 and plain:
            if dim_v <= 64 and dim <= 128:
                yield Tile(block_m=128, block_n=32, num_warps=4, min_blocks_per_sm=2)
            elif dim_v <= 128:
                yield Tile(block_m=128, block_n=32, num_warps=4)
        if not (features.max_logit and dim_v > 128 and config.arch in ("sm_100", "sm_103", "sm_110")):  # 80 bytes spill
            yield Tile(block_m=64, block_n=32, num_warps=4)
        if fast_loads and less_smem:  # 8 warps where shared memory has room for one block
            yield Tile(block_m=128, block_n=32, num_warps=8)
        yield Tile(block_m=64, block_n=16, num_warps=4)
        if fast_loads and less_smem:
            yield Tile(block_m=64, block_n=32, num_warps=8, warps_n=2)
        yield Tile(block_m=32, block_n=16, num_warps=2)
        yield Tile(block_m=16, block_n=16, num_warps=1)
        return
    if fast_loads and seqlen_q > 64 and not features.dropout:
        reads_scores = features.bias is not None or features.mask or bool(features.modifier)
        if dim_v <= 64 and dim <= 64 and not (reads_scores or features.softcap or features.prescale):
            # 351 TFLOP/s at head dim 64, 6 % more than 128 x 64 in three blocks. With softcap or a bias 128 columns
            # spill, and for 12.x with a band, too.
            block_n = 96 if features.band and config.arch in ("sm_120", "sm_121") else 128
            if features.max_logit and features.varlen:
                block_n = min(block_n, 112)  # 20 bytes spill with 128 for 8.x
            yield Tile(block_m=128, block_n=block_n, num_warps=4, min_blocks_per_sm=2)
        elif dim_v <= 64 or (dim_v <= 128 and not reads_scores):
            # 409 TFLOP/s at head dim 128, where a second stage is 3 % slower and 256 rows on 8 warps 7 %. With a bias
            # at head dim 64 it takes 11 % less time than 64 x 64.
            block_n = 64
            if dim_v > 64:
                # 100 KB a multiprocessor holds two blocks only with 32 keys; for 10.x ptxas spills 76 bytes with 64.
                block_n = 32 if smem_limit < 128 << 10 else 64 if config.arch in ("sm_80", "sm_87", "sm_90") else 48
                if features.max_logit and (config.packed_heads or features.softcap or features.prescale):
                    block_n = min(block_n, 32 if block_n == 48 else 48)  # 4 to 16 bytes spill with 16 columns more
            yield Tile(block_m=128, block_n=block_n, num_warps=4, min_blocks_per_sm=2)
            if less_smem and block_n > 32 and dim > 128:  # two blocks of D 192 and 128 in 164 KB
                yield Tile(block_m=128, block_n=32, num_warps=4, min_blocks_per_sm=2)
        elif dim_v <= (128 if reads_scores else 160):
            # Head dim 160 reaches 364 TFLOP/s, 64 x 64 305. With a bias at head dim 128 it takes 8 % less time.
            yield Tile(block_m=128, block_n=32, num_warps=4)
    if fast_loads:
        # As fast as 128 x 64 on 8 warps at head dim 256 (312 TFLOP/s), and two blocks hide each other's waits. With
        # dropout its registers suffice: 5 % less time than 128 x 64.
        yield Tile(block_m=64, block_n=64, num_warps=4, min_blocks_per_sm=2)
        if less_smem and max(dim, dim_v) > 128:  # 8 warps where shared memory has room for one block
            yield Tile(block_m=128, block_n=64, num_warps=8)
            yield Tile(block_m=128, block_n=32, num_warps=8)
    yield Tile(block_m=64, block_n=64 if max(dim, dim_v) <= 128 else 32, num_warps=4)
    yield Tile(block_m=64, block_n=32, num_warps=4)
    yield Tile(block_m=32, block_n=32, num_warps=2)
    yield Tile(block_m=16, block_n=16, num_warps=1)
