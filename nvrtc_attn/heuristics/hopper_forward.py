"""Forward pass of the Hopper family: which tile for which problem, or why the portable family must do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..config import HopperForwardConfig
from ..problem import AttentionProblem
from ..tma import reasons_against, tensor_map
from .plan import ForwardPlanSpec, Launch
from .portable_forward import features_of, is_vectorizable

Array: TypeAlias = npt.NDArray[Any]

MAX_HEAD_DIM: Final = 256
MIN_QUERY_ROWS: Final = 64
"""Fewer rows leave most of a 128-row tile empty: the portable family's small tiles and key splits serve them."""
BARRIER_BYTES: Final = 8
TILE_OVERHEAD_COLUMNS: Final = 128.0
"""What a query tile costs beside its key tiles (first product and last one alone, output), in columns of keys: H200,
2026-11, from lengths 512 to 16384."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One row of the tile table."""

    block_m: int
    block_n: int
    num_stages: int = 2
    ping_pong: bool = True
    lazy_max: bool = False
    poly_exp: int = 0


def smem_bytes(config: HopperForwardConfig) -> int:
    """Dynamic shared memory of one thread block; the map is at the head of ``forward_hopper.cuh``."""
    slabs_q, slabs_v = _ceil_div(config.head_dim, 64), _ceil_div(config.head_dim_v, 64)
    rows = config.block_m * slabs_q + config.num_stages * config.block_n * (slabs_q + slabs_v)
    return 128 * rows + BARRIER_BYTES * (2 + 4 * config.num_stages)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def choose_tile(problem: AttentionProblem) -> Tile:
    """The tile table."""
    widest = max(_ceil_div(problem.head_dim, 64), _ceil_div(problem.head_dim_v, 64)) * 64
    if widest <= 64:
        return Tile(block_m=192, block_n=128)
    if widest <= 128:
        return Tile(block_m=128, block_n=128 if problem.band else 176)
    if widest <= 192:
        return Tile(block_m=128, block_n=96 if problem.band else 112)
    return Tile(block_m=128, block_n=80, ping_pong=False)


def reasons_for_portable(problem: AttentionProblem, *, arch: str, smem_limit: int) -> list[str]:
    """Every reason why this family cannot serve ``problem``; empty when it can."""
    found = []
    if arch not in ("sm_90", "sm_90a"):
        found.append(f"the target is {arch}; warp-group matrix products exist on sm_90a alone")
    if problem.dtype not in ("float16", "bfloat16"):
        found.append(f"dtype is {problem.dtype}; accepted are float16 and bfloat16")
        return found
    for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if head_dim > MAX_HEAD_DIM or head_dim % 8:
            found.append(f"{name} is {head_dim}; accepted are multiples of 8 up to {MAX_HEAD_DIM}")
    if problem.seqlen_q < MIN_QUERY_ROWS:
        found.append(f"seqlen_q is {problem.seqlen_q}; fewer than {MIN_QUERY_ROWS} rows do not fill a tile")
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads):
        found.append("a dim is empty")
    for name in ("q", "k", "v"):
        found += reasons_against(name, getattr(problem, name), 2)
    if problem.out is not None and not is_vectorizable(problem.out, 2):
        found.append("rows of out cannot be written in 16-byte vectors")
    if not found and smem_bytes(config_of(problem, choose_tile(problem))) > smem_limit:
        found.append(f"a thread block may use {smem_limit} bytes of shared memory")
    return found


def config_of(problem: AttentionProblem, tile: Tile) -> HopperForwardConfig:
    """The config of ``problem`` with ``tile``."""
    return HopperForwardConfig(
        kernel="forward_hopper",
        arch="sm_90a",
        dtype=problem.dtype,
        # Products step over 16 columns; what lies beyond the tensor's head dim arrives as zeros.
        head_dim=_ceil_div(problem.head_dim, 16) * 16,
        head_dim_v=_ceil_div(problem.head_dim_v, 16) * 16,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=4 + tile.block_m // 16,
        num_stages=tile.num_stages,
        features=features_of(problem),
        ping_pong=tile.ping_pong,
        lazy_max=tile.lazy_max,
        poly_exp=tile.poly_exp,
    )


def tile_costs(problem: AttentionProblem, tile: Tile) -> Array:
    """Key tiles that each query tile sees, plus what a query tile costs beside them."""
    first_row = np.arange(0, problem.seqlen_q, tile.block_m)
    last_row = np.minimum(first_row + tile.block_m, problem.seqlen_q) - 1
    offset = problem.seqlen_k - problem.seqlen_q if problem.bottom_right else 0
    low, high = np.zeros_like(first_row), np.full_like(first_row, problem.seqlen_k)
    if problem.window_left is not None:
        low = np.clip(first_row + offset - problem.window_left, 0, problem.seqlen_k)
    if problem.window_right is not None:
        high = np.clip(last_row + offset + problem.window_right + 1, 0, problem.seqlen_k)
    key_tiles = np.maximum(-(-high // tile.block_n) - low // tile.block_n, 0)
    return key_tiles + TILE_OVERHEAD_COLUMNS / tile.block_n


def pair_rounds(costs: Array, all_heads: int, width: int) -> int:
    """Rounds of the schedule in ``hopper/scheduler.cuh`` that hand out pairs: the choice with the smallest largest sum."""
    num_m_blocks = len(costs)
    head_pairs = (num_m_blocks + 1) // 2
    most = all_heads * head_pairs // width
    by_rank = costs[::-1]
    pairs = by_rank[:head_pairs] + costs[:head_pairs]
    if num_m_blocks % 2:
        pairs[-1] /= 2  # the middle tile is alone
    best, best_sum = 0, float("inf")
    # More than three rounds of single tiles gain nothing and cost locality.
    for rounds in range(most, max(most - 4, -1), -1):
        first, done = divmod(rounds * width, head_pairs)
        partial = int(done > 0)
        whole = all_heads - first - partial
        sums = np.zeros(width)
        if rounds:
            sums += pairs[np.arange(rounds * width) % head_pairs].reshape(rounds, width).sum(0)
        ranks = np.arange(num_m_blocks)
        heads = np.where((ranks >= done) & (ranks < num_m_blocks - done), whole + partial, whole)
        singles = np.repeat(by_rank, heads)
        singles = np.concatenate([singles, np.zeros(-len(singles) % (2 * width))]).reshape(-1, 2, width)
        sums += singles[:, 0].sum(0) + singles[:, 1, ::-1].sum(0)
        if sums.max() < 0.998 * best_sum:
            best, best_sum = rounds, float(sums.max())
    return best


def plan_spec(problem: AttentionProblem, tile: Tile, *, num_sms: int) -> ForwardPlanSpec:
    """The launch of ``problem`` with ``tile``."""
    config = config_of(problem, tile)
    num_m_blocks = max(_ceil_div(problem.seqlen_q, tile.block_m), 1)
    all_heads = (problem.batch + int(problem.varlen)) * problem.num_heads
    num_tiles = all_heads * num_m_blocks
    grid = min(num_sms, num_tiles)
    # The model is for sequences of one length; scheduling costs of 10^5 tiles take 1 ms.
    rounds = pair_rounds(tile_costs(problem, tile), all_heads, grid) if problem.band else 0
    head_pairs = _ceil_div(num_m_blocks, 2)
    first_head, done = divmod(rounds * grid, head_pairs)
    return ForwardPlanSpec(
        launches=(
            Launch(
                config=config,
                grid=grid,
                block=config.num_threads,
                smem_bytes=smem_bytes(config),
                params=(
                    ("num_m_blocks", num_m_blocks),
                    ("num_splits", 1),
                    ("num_tiles", num_tiles),
                    ("heads_per_group", problem.num_heads // problem.num_heads_kv),
                    ("pair_rounds", rounds),
                    ("head_pairs", head_pairs),
                    ("tail_first_head", first_head),
                    ("tail_done", done),
                    ("tail_whole_heads", all_heads - first_head - int(done > 0)),
                ),
                tensor_maps=(
                    tensor_map("tensor_map_q", "q", problem.q, 2, tile.block_m),
                    tensor_map("tensor_map_k", "k", problem.k, 2, tile.block_n),
                    tensor_map("tensor_map_v", "v", problem.v, 2, tile.block_n),
                ),
            ),
        )
    )


def choose_forward(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int
) -> ForwardPlanSpec | list[str]:
    """The plan of the forward pass, or every reason why the portable family has to serve ``problem``."""
    reasons = reasons_for_portable(problem, arch=arch, smem_limit=smem_limit)
    return reasons or plan_spec(problem, choose_tile(problem), num_sms=num_sms)
