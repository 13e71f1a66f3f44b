"""Gradient of a bias that batch entries or heads share, on Hopper: ``backward_hopper_dbias`` and when it can."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Final

from ..front.problem import AttentionProblem, OperandLayout, dense_layout
from ..jit.config import HopperDbiasConfig
from .common import ceil_div, features_of, is_vectorizable
from .hopper_backward_wide import is_wide
from .hopper_common import SMEM_LIMIT, product_width, score_operands
from .portable_dq import MAX_PARTIAL_BYTES, dbias_reduce
from .spec import Launch, Workspace
from .tensor_map import tensor_map

BLOCK: Final = 128
"""Queries and keys of a tile. Fewer would ask more of L2 than it gives: at 128 and head dim 64 a pair is 64 KiB for
2048 cycles of products, 32 bytes a cycle and multiprocessor."""
TILE_OVERHEAD: Final = 1
"""What a tile costs beside its pairs (bias, output), in pairs."""


def serves(problem: AttentionProblem) -> bool:
    """Whether the kernel can make dbias; q, k, v, dout and head dims are those of ``backward_hopper``."""
    bias = problem.bias
    if bias is None or is_wide(problem) or problem.modifier is not None:
        return False
    if bias.dtype != problem.dtype or score_operands(problem) > 1 or problem.softcap:
        return False
    if bias.shape[2:] != (problem.seqlen_q, problem.seqlen_k):
        return False
    # Rows of dbias are written in 16-byte vectors.
    return problem.seqlen_k % 8 == 0 and is_vectorizable(dbias_layout(problem), 2)


def dbias_layout(problem: AttentionProblem) -> OperandLayout:
    """The layout of dbias, dense where the problem names none."""
    assert problem.bias is not None
    return problem.dbias_layout or dense_layout(problem.bias.shape, problem.bias.dtype)


def smem_bytes(config: HopperDbiasConfig) -> int:
    """Dynamic shared memory of one thread block; the map is at the head of ``backward_hopper_dbias.cuh``."""
    return _BIAS_BYTES + config.num_stages * _stage_bytes(config.head_dim, config.head_dim_v)


_BIAS_BYTES: Final = 2 * BLOCK * BLOCK


def _stage_bytes(head_dim: int, head_dim_v: int) -> int:
    """A slot of the ring with its row of statistics and its two barriers."""
    return 2 * 128 * BLOCK * ceil_div(max(head_dim, head_dim_v), 64) + 4 * BLOCK + 16


def choose_splits(tiles: int, pairs: int, num_sms: int, numel: int) -> int:
    """Shares of the pairs of a tile: the shortest time of the busiest multiprocessor, and the fewest shares of that."""
    most = min(pairs, max(MAX_PARTIAL_BYTES // (4 * numel), 1))
    costs = {n: ceil_div(tiles * n, num_sms) * (ceil_div(pairs, n) + TILE_OVERHEAD) for n in range(1, most + 1)}
    splits = min(costs, key=lambda n: (costs[n], n))
    # No share is empty, and summing partial results is a launch more.
    splits = ceil_div(pairs, ceil_div(pairs, splits))
    return splits if costs[splits] + 2 < costs[1] else 1


def choose_dbias(
    problem: AttentionProblem, dout: OperandLayout, *, arch: str, num_sms: int
) -> tuple[tuple[Launch, ...], Workspace]:
    """Launches behind ``backward_hopper_prepare``, whose statistics they read, and their workspace."""
    assert problem.bias is not None
    shape = problem.bias.shape
    config = HopperDbiasConfig(
        kernel="backward_hopper_dbias", arch="sm_90a", dtype=problem.dtype, head_dim=product_width(problem.head_dim),
        head_dim_v=product_width(problem.head_dim_v), block_m=BLOCK, block_n=BLOCK, num_warps=12,
        num_stages=(SMEM_LIMIT - _BIAS_BYTES) // _stage_bytes(problem.head_dim, problem.head_dim_v),
        features=features_of(problem), dbias_dtype=problem.bias.dtype,
    )  # fmt: skip
    num_m_blocks, num_n_blocks = ceil_div(problem.seqlen_q, BLOCK), ceil_div(problem.seqlen_k, BLOCK)
    tiles = shape[0] * shape[1] * num_m_blocks * num_n_blocks
    pairs = problem.batch * problem.num_heads // (shape[0] * shape[1])
    splits = choose_splits(tiles, pairs, num_sms, prod(shape))
    config = replace(config, split=splits > 1, smem_bytes=smem_bytes(config))
    launches = [
        Launch(
            config=config,
            grid=min(tiles * splits, num_sms),
            block=config.num_threads,
            smem_bytes=config.smem_bytes,
            params=(
                ("num_m_blocks", num_m_blocks),
                ("num_n_blocks", num_n_blocks),
                ("heads_per_group", problem.num_heads // problem.num_heads_kv),
            ),
            tensor_maps=(
                tensor_map("tensor_map_q", "q", problem.q, 2, BLOCK),
                tensor_map("tensor_map_k", "k", problem.k, 2, BLOCK),
                tensor_map("tensor_map_v", "v", problem.v, 2, BLOCK),
                tensor_map("tensor_map_dout", "dout", dout, 2, BLOCK),
            ),
        )
    ]
    if splits > 1:
        launches.append(dbias_reduce(problem, arch=arch, num_sms=num_sms))
    nbytes = 4 * splits * prod(shape) if splits > 1 else 0
    return tuple(launches), Workspace(field="dbias_partial", nbytes=nbytes, params=(("num_dbias_splits", splits),))
