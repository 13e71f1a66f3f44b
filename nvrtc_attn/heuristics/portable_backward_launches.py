"""Launches and workspaces of the portable backward pass, once its tile and its splits are known.

Workspaces are float32, aligned to 16 bytes: `workspaces_of` says what each holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..front.problem import AttentionProblem, OperandLayout
from ..jit.config import BackwardConfig, Features
from .common import packed_slots
from .spec import Launch, Workspace


def _plain(config: BackwardConfig, kernel: str, features: Features = Features()) -> BackwardConfig:  # noqa: B008
    """Config of a kernel without products: only what it reads, so that problems share it."""
    return BackwardConfig(
        kernel=kernel,
        arch=config.arch,
        dtype=config.dtype,
        head_dim=config.head_dim,
        head_dim_v=config.head_dim_v,
        block_m=config.block_m,
        block_n=config.block_n,
        num_warps=8 if config.block_m >= 128 else 4,
        aligned=config.aligned,
        features=replace(features, varlen=config.features.varlen),
        dq=config.dq,
    )


def num_tiles(problem: AttentionProblem, operand: OperandLayout, num_blocks: int, block: int) -> int:
    """Tiles of ``block`` rows of all sequences: ``num_blocks`` each or, packed, the slots of what the tensor holds."""
    return packed_slots(operand.shape[1], problem.batch, block) if problem.varlen else problem.batch * num_blocks


def delta_launch(problem: AttentionProblem, config: BackwardConfig, num_m_blocks: int) -> Launch:
    delta = _plain(config, "delta")
    grid = problem.num_heads * num_tiles(problem, problem.q, num_m_blocks, config.block_m)
    return Launch(
        config=delta, grid=grid, block=delta.num_threads, smem_bytes=0, params=(("num_m_blocks", num_m_blocks),)
    )


def _head_group(problem: AttentionProblem, num_n_blocks: int, slots: int) -> int:
    """Key heads whose key tiles are interleaved, those with the most work under a causal mask first.

    Two waves of thread blocks: fewer heads leave long tiles for the end (2 to 5 % slower), all of them do not fit in L2
    (8 %), because dq, Q and dO of a head are used again by each of its key tiles. Without a band all tiles are alike.
    """
    return max(2 * slots // max(num_n_blocks, 1), 1) if problem.band else 1


def dkv_launch(
    problem: AttentionProblem, config: BackwardConfig, num_n_blocks: int, num_splits: int, slots: int
) -> Launch:
    tiles = num_tiles(problem, problem.k, num_n_blocks, config.block_n)
    grid = problem.num_heads_kv * tiles * num_splits * config.dim_slices
    return Launch(
        config=config,
        grid=grid,
        block=config.num_threads,
        smem_bytes=config.smem_bytes,
        params=(
            ("num_n_blocks", num_n_blocks),
            ("num_splits", num_splits),
            ("head_group", _head_group(problem, tiles if problem.varlen else num_n_blocks, slots)),
        ),
    )


def dkv_convert_launch(problem: AttentionProblem, config: BackwardConfig, num_n_blocks: int) -> Launch:
    convert = _plain(config, "dkv_convert", Features(float32_k=config.features.float32_k))
    grid = problem.num_heads_kv * num_tiles(problem, problem.k, num_n_blocks, config.block_n)
    params = (("num_n_blocks", num_n_blocks),)
    return Launch(config=convert, grid=grid, block=convert.num_threads, smem_bytes=0, params=params, overlaps=True)


def dq_convert_launch(problem: AttentionProblem, config: BackwardConfig, num_m_blocks: int) -> Launch:
    convert = _plain(config, "dq_convert", Features(float32_q=config.features.float32_q))
    grid = problem.num_heads * num_tiles(problem, problem.q, num_m_blocks, config.block_m)
    params = (("num_m_blocks", num_m_blocks),)
    return Launch(config=convert, grid=grid, block=convert.num_threads, smem_bytes=0, params=params, overlaps=True)


def workspaces_of(problem: AttentionProblem, config: BackwardConfig, num_n_blocks: int) -> Iterator[Workspace]:
    heads = problem.num_heads
    entries = 1 if problem.varlen else problem.batch
    rows = problem.q.shape[1] if problem.varlen else problem.seqlen_q
    # [B, H, Mq] dense, [H, total_q] varlen; written by the delta kernel.
    strides = (("delta_stride_b", heads * rows), ("delta_stride_h", rows))
    yield Workspace(field="delta", nbytes=4 * entries * heads * rows, params=strides)
    if not config.fused:
        yield Workspace(field="row_lse", nbytes=4 * entries * heads * rows)
    if config.dq == "atomic":
        # Per (batch, head) the query rows in whole tiles, in 16 x 8 blocks (collective/gradient_accumulator.cuh); the
        # delta kernel zeroes it. Varlen: sequence b begins in a tile of its own, cu_seqlens_q[b] // block_m + b.
        tiles = rows // config.block_m + problem.batch + 1 if problem.varlen else -(-rows // config.block_m)
        head = tiles * config.block_m * config.head_dim
        yield Workspace(
            field="dq_accum",
            nbytes=4 * entries * heads * head,
            params=(
                ("dq_accum_stride_b", heads * head),
                ("dq_accum_stride_h", head),
                ("dq_accum_stride_m", config.head_dim),
            ),
        )
    if config.split:
        # Per (batch, key head) the rows of dk and then those of dv, in whole tiles.
        rows = num_tiles(problem, problem.k, num_n_blocks, config.block_n) * config.block_n
        nbytes = 4 * problem.num_heads_kv * rows * (config.head_dim + config.head_dim_v)
        yield Workspace(field="dkv_accum", nbytes=nbytes, zeroed=True)
