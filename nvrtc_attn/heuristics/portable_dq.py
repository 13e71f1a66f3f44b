"""Tiles of the kernels that make dq and dbias without atomics: backward_dq, backward_dbias, dbias_reduce."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Final

from ..base.dtypes import DTYPES
from ..front.problem import AttentionProblem, OperandLayout
from ..jit.config import DbiasConfig, DqConfig, KernelConfig
from .common import ceil_div, features_of, is_vectorizable, packed_slots
from .portable_common import MEASURED_SMEM, MIN_WARPS, warps_per_sm
from .spec import Launch

MAX_PARTIAL_BYTES: Final = 256 << 20
"""Bound of the dbias partial sums. A bias that large has output tiles enough to fill any GPU without a split."""
_OP_BYTES: Final = 32
"""A ring slot's note, ``DbiasOp`` in ``backward_dbias.cuh``."""
_REDUCE_WARPS: Final = 8


def smem_bytes(config: KernelConfig) -> int:
    """Dynamic shared memory of one thread block; the maps are at the heads of the kernels' files."""
    rows = config.block_m + config.block_n
    if isinstance(config, DqConfig):
        ds = config.block_m * config.block_n if config.num_warps > config.warps_m else 0
        if config.streamed:
            return config.itemsize * (config.num_stages * rows * config.slice_d + ds)
        rows = config.block_m + config.num_stages * config.block_n
        return config.itemsize * (rows * (config.head_dim + config.head_dim_v) + ds)
    assert isinstance(config, DbiasConfig)
    if config.kernel == "dbias_reduce":
        return 0
    line = config.block_n if config.reduce_m else config.block_m
    sums = 4 * line * config.num_warps if config.reduce_m or config.reduce_n else 0
    return config.num_stages * (2 * config.itemsize * rows * config.slice_d + _OP_BYTES) + sums


def _tile_dim(head_dim: int) -> int:
    return 8 * ceil_div(head_dim, 8)


def _aligned(problem: AttentionProblem, *written: OperandLayout | None) -> bool:
    itemsize = DTYPES[problem.dtype].itemsize
    operands = (problem.q, problem.k, problem.v, problem.dout, *written)
    return all(operand is None or is_vectorizable(operand, itemsize) for operand in operands)


def _vector_scores(problem: AttentionProblem) -> bool:
    """Whether rows of bias and mask are whole 16-byte vectors (mask: 8-byte), each of eight columns or four."""
    for operand in (problem.bias, problem.mask):
        if operand is None:
            continue
        itemsize = DTYPES[operand.dtype].itemsize
        vector = min(8 * itemsize, 16)
        outer = zip(operand.shape[:-1], operand.strides[:-1], strict=True)
        if operand.shape[-1] % 8 or operand.strides[-1] != 1 or operand.offset_alignment < vector:
            return False
        if any(size > 1 and stride * itemsize % vector for size, stride in outer):
            return False
    return True


def _dq_candidates(base: DqConfig) -> Iterator[DqConfig]:
    """The dq tile table, best first; no variant spills. docs/experiments.md, "Deterministic dq", has the times."""
    widest = max(base.head_dim, base.head_dim_v)
    features = base.features
    policies = sum((features.bias is not None, features.mask, features.dropout, features.softcap))
    stages = 1 if base.legacy_mma else 2  # without cp.async a second stage hides nothing

    def tile(
        block_m: int, block_n: int, warps_m: int, *, chunk_n: int = 32, warps_d: int = 1, num_stages: int = stages,
        preload: bool = False,
    ) -> DqConfig:  # fmt: skip
        return replace(
            base, block_m=block_m, block_n=block_n, num_warps=warps_m * warps_d, warps_m=warps_m, preload=preload,
            chunk_n=block_n if num_stages == 1 else min(block_n, chunk_n), num_stages=num_stages,
        )  # fmt: skip

    if base.itemsize == 4:
        # 3xTF32 keeps two registers for a word of an operand.
        if widest <= 64 and policies == 0 and not base.legacy_mma:
            yield tile(128, 32, 4, chunk_n=16)  # two row blocks a warp, 7 % less time than one
        if widest <= 128:
            if policies == 0 and widest > 64:
                yield tile(128, 32, 8, num_stages=1)  # 22 % less time than 64 rows and two stages
            yield tile(64, 32, 4, chunk_n=16)
            yield tile(64, 16, 4)
    elif widest <= 64 and policies < 2 and not base.legacy_mma:
        # Two row blocks a warp halve the reads of K and V from shared memory. There are registers for q and dout, which
        # save 6 %, only in the plainest variant.
        yield tile(128, 64, 4, preload=policies == 0 and not features.band)
    if base.itemsize == 2 and widest <= 128:
        if not base.legacy_mma and policies == 0 and (widest <= 96 or not features.band):
            yield tile(128, 32, 4)  # 12 % less time than one row block a warp
        if not base.legacy_mma and policies == 0:
            yield tile(64, 32, 4, preload=True)
        if not base.legacy_mma:
            yield tile(64, 64, 4)
        yield tile(64, 32, 4)
        if not base.legacy_mma:  # 8 warps in 99 KB; 64 rows on 4 warps take 7 % less time than 128 on 8
            if policies == 0:
                yield tile(64, 32, 4, num_stages=1, preload=True)
            yield tile(128, 32, 8)
    elif base.itemsize == 2 and widest <= 256:
        if widest > 192:
            yield tile(128, 32, 8)  # 192 KiB: the q and dout tiles are half of it, so eight warps share them
        yield tile(64, 32, 4)
        yield tile(64, 32, 4, num_stages=1)
        if not base.legacy_mma:  # 8 warps where shared memory has room for one block
            yield tile(128, 32, 8, num_stages=1)
        # From head dim 160, 99 KB hold 4 warps of these. Tiles with 8 were 6 to 17 % slower.
    elif base.itemsize == 2:
        # dq rows need two warps. S and dP are shared, not recomputed: a round trip of dS through shared memory costs
        # 1/16 of the products. A quarter less time than streamed operands.
        yield tile(64, 32, 4, warps_d=2, num_stages=1)
    warps_d = 2 if widest > 256 or base.itemsize == 4 else 1
    for slice_bytes, block_n, num_stages in ((256, 64, 3), (128, 64, 2), (128, 32, 2)):
        config = tile(64, block_n, 4, warps_d=warps_d, num_stages=num_stages)
        yield replace(config, streamed=True, slice_d=slice_bytes // base.itemsize)


def choose_dq(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int, legacy_mma: bool = False
) -> Launch:
    """The deterministic dq kernel. It needs ``delta`` and nothing else in the workspace.

    Parameters
    ----------
    num_sms, smem_limit
        Multiprocessors, and bytes of shared memory that one block may ask for.
    legacy_mma
        Use the instruction set of compute capability 7.5.
    """
    base = DqConfig(
        kernel="backward_dq", arch=arch, dtype=problem.dtype, head_dim=_tile_dim(problem.head_dim),
        head_dim_v=_tile_dim(problem.head_dim_v), block_m=64, block_n=32, num_warps=4, warps_m=4, chunk_n=32,
        aligned=_aligned(problem, problem.dq), legacy_mma=legacy_mma, features=features_of(problem),
        vector_scores=_vector_scores(problem),
    )  # fmt: skip
    fitting = [c for c in _dq_candidates(base) if smem_bytes(c) <= smem_limit]
    if base.itemsize == 2 and smem_limit < MEASURED_SMEM and not legacy_mma:
        # Streamed operands are read again for each slice: more warps do not make up for it.
        fitting.sort(key=lambda c: c.streamed or warps_per_sm(c.num_warps, smem_bytes(c), smem_limit) < MIN_WARPS)
    config = fitting[0]
    num_m_blocks = ceil_div(problem.seqlen_q, config.block_m)
    tiles = problem.batch * num_m_blocks
    if problem.varlen:
        num_m_blocks = max(num_m_blocks, 1)
        tiles = packed_slots(problem.q.shape[1], problem.batch, config.block_m)
    return Launch(
        config=config, grid=problem.num_heads * tiles, block=config.num_threads,
        smem_bytes=smem_bytes(config), params=(("num_m_blocks", num_m_blocks),),
    )  # fmt: skip


def _slice_of(head_dim: int, itemsize: int) -> int:
    """Columns of a ring slot: the fewest slices of at most 144 bytes whose sum exceeds ``head_dim`` least.

    Three blocks of two 64 KiB stages fill a 227 KiB multiprocessor; wider slices leave room for two blocks only.
    """
    widest = 144 // itemsize // 8 * 8
    counts = range(ceil_div(head_dim, widest), ceil_div(head_dim, widest) + 2)
    return min((n * _tile_dim(ceil_div(head_dim, n)), n, _tile_dim(ceil_div(head_dim, n))) for n in counts)[2]


def _dbias_candidates(base: DbiasConfig) -> Iterator[DbiasConfig]:
    """The dbias tile table, best first; ``min_blocks_per_sm`` blocks have to fit a multiprocessor.

    Warps of 32 x 32 scores (dS, S, dP take 96 registers) in blocks of four, three to a multiprocessor: 168 registers a
    thread. Two blocks take 22 % longer, wider tiles 6 to 43 % (H200, 2026-11; docs/experiments.md, "Bias gradient").
    """
    features = base.features
    # These need more registers than a third of a multiprocessor has.
    heavy = features.mask or features.dropout or features.softcap or base.itemsize == 4
    heavy = heavy or (features.bias == "float32" and not base.vector_scores)
    most = 2 if heavy or base.legacy_mma else 3
    half = _tile_dim(ceil_div(base.slice_d, 2))
    for slice_d, min_blocks in [
        *((s, n) for s in (base.slice_d, half) for n in range(most, 1, -1)),
        (base.slice_d, 1),
        (half, 1),
    ]:
        yield replace(base, slice_d=slice_d, min_blocks_per_sm=min_blocks)


def _dbias_splits(tiles: int, reduced: int, slots: int, numel: int) -> int:
    """Shares of the reduced score tiles such that every slot has work and the partial sums stay small."""
    if tiles == 0 or tiles >= slots:
        return 1
    # A share under 4 score tiles pays more for its prologue and its partial sums than it gains.
    most = min(ceil_div(reduced, 4), max(MAX_PARTIAL_BYTES // (4 * numel), 1))
    splits = max(min(ceil_div(slots, tiles), most), 1)
    return ceil_div(reduced, ceil_div(reduced, splits)) if reduced else 1


def choose_dbias(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int, legacy_mma: bool = False
) -> tuple[tuple[Launch, ...], int, int]:
    """Kernels of the gradient of ``problem.bias``, for every shape of it; arguments as in `choose_dq`.

    Returns
    -------
    launches
        In launch order; empty for a bias without elements.
    num_dbias_splits
        For the params.
    partial_bytes
        Size of ``dbias_partial``, 0 without a split.
    """
    assert problem.bias is not None
    assert not problem.varlen
    shape = problem.bias.shape
    numel = prod(shape)
    if numel == 0:
        return (), 1, 0
    itemsize = DTYPES[problem.dtype].itemsize
    head_dims = _tile_dim(problem.head_dim), _tile_dim(problem.head_dim_v)
    reduce_m = shape[2] == 1 and problem.seqlen_q != 1
    reduce_n = shape[3] == 1 and problem.seqlen_k != 1
    base = DbiasConfig(
        kernel="backward_dbias", arch=arch, dtype=problem.dtype, head_dim=head_dims[0], head_dim_v=head_dims[1],
        block_m=64, block_n=64, num_warps=4, warps_m=2, num_stages=2, slice_d=_slice_of(max(head_dims), itemsize),
        reduce_m=reduce_m, reduce_n=reduce_n, dbias_dtype=problem.bias.dtype, aligned=_aligned(problem),
        legacy_mma=legacy_mma, features=features_of(problem), vector_scores=_vector_scores(problem),
    )  # fmt: skip
    # A multiprocessor has 1 KiB more than one block may use, and reserves 1 KiB for each block.
    config = next(
        c for c in _dbias_candidates(base) if c.min_blocks_per_sm * (smem_bytes(c) + 1024) <= smem_limit + 1024
    )
    num_m, num_n = ceil_div(problem.seqlen_q, config.block_m), ceil_div(problem.seqlen_k, config.block_n)
    tiles = shape[0] * shape[1] * (1 if reduce_m else num_m) * (1 if reduce_n else num_n)
    reduced = (problem.batch if shape[0] == 1 else 1) * (problem.num_heads if shape[1] == 1 else 1)
    reduced *= (num_m if reduce_m else 1) * (num_n if reduce_n else 1)
    slots = num_sms * config.min_blocks_per_sm
    splits = _dbias_splits(tiles, reduced, slots, numel)
    config = replace(config, split=splits > 1)
    launches = [
        Launch(config=config, grid=min(tiles * splits, slots), block=config.num_threads, smem_bytes=smem_bytes(config))
    ]
    if splits > 1:
        launches.append(dbias_reduce(problem, arch=arch, num_sms=num_sms, legacy_mma=legacy_mma))
    return tuple(launches), splits, 4 * splits * numel if splits > 1 else 0


def dbias_reduce(problem: AttentionProblem, *, arch: str, num_sms: int, legacy_mma: bool = False) -> Launch:
    """The sum of the partial results of a split dbias."""
    assert problem.bias is not None
    # Nothing of the problem but the bias's element type: one compile serves all.
    config = DbiasConfig(
        kernel="dbias_reduce", arch=arch, dtype=problem.dtype, head_dim=8, head_dim_v=8, block_m=16, block_n=16,
        num_warps=_REDUCE_WARPS, dbias_dtype=problem.bias.dtype, legacy_mma=legacy_mma,
    )  # fmt: skip
    grid = min(ceil_div(prod(problem.bias.shape), 32), 32 * num_sms)
    return Launch(config=config, grid=grid, block=config.num_threads, smem_bytes=0)
