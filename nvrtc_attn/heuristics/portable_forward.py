"""Forward pass of the portable family: its launches for a problem, and the plans that are measured instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ..base.errors import UnsupportedError
from ..front.operands import unread_by
from ..front.problem import AttentionProblem
from ..jit.config import ForwardConfig
from .common import ceil_div, features_of, is_vectorizable, packed_slots, round_up, tile_of
from .forward_combine import MAX_PARTIAL_BYTES, combine_launch
from .portable_common import MEASURED_SMEM, MIN_WARPS, warps_per_sm
from .portable_forward_config import MAX_SPLITS, Tile, smem_bytes, with_tile
from .portable_forward_splits import CLUSTERS, may_be_wide, may_cluster, resident_blocks, splits_by_waves, stream_keys
from .portable_forward_tile import DECODE_ROWS, tiles_for
from .spec import ForwardPlanSpec, Launch
from .tile_words import pays as words_pay
from .tile_words import plan_launch, with_words, words_of

MAX_HEAD_DIM: Final = 512
PACKED_QUERIES: Final = 64
"""Below this many queries, the heads that share a key head share a tile; from here on a head fills one of its own."""
L2_BYTES: Final = 16 << 20
"""K and V of the heads whose query tiles are interleaved under a mask, a third of the L2 of an H200 (50 MB).

As many heads as that are 5 to 10 % faster than one at a time, and half as many more are slower than one (2026-11-20).
"""


def _head_group(problem: AttentionProblem, config: ForwardConfig) -> int:
    """Heads whose query tiles are interleaved, the longest tiles first; 1 keeps the tiles of a head together."""
    if not problem.band:
        return 1
    bytes_per_head = max(config.itemsize * problem.seqlen_k * (config.head_dim + config.head_dim_v), 1)
    if problem.varlen and not packs_heads(problem):  # heads whose tiles of all sequences are interleaved
        rows = max(problem.k.shape[1], 1)
        bytes_per_head = max(config.itemsize * rows * (config.head_dim + config.head_dim_v), 1)
        return max(1, min(problem.num_heads, L2_BYTES // bytes_per_head))
    return max(1, min(problem.batch * problem.num_heads, L2_BYTES // bytes_per_head))


def packs_heads(problem: AttentionProblem) -> bool:
    """Whether the query heads of a key head are rows of one tile. A modifier is computed for one head a tile."""
    if problem.modifier is not None:
        return False
    return 0 < problem.num_heads_kv < problem.num_heads and problem.seqlen_q < PACKED_QUERIES


def choose_forward(
    problem: AttentionProblem,
    *,
    arch: str,
    num_sms: int,
    smem_limit: int,
    legacy_mma: bool = False,
    rank: int = 0,
    num_splits: int | None = None,
    clustered: bool | None = None,
    clusters: bool = True,
    like: Any = None,
) -> ForwardPlanSpec:
    """Kernels of the forward pass; see ``heuristics.choose_forward``.

    ``rank`` takes a later row of the table among those that fit (the last, where there are fewer), ``num_splits``
    another number of splits, ``clustered`` adds those up in clusters where it can: for `candidates`. ``clusters`` is
    false of a device that launches none. ``like`` is a config whose tile is taken.

    Raises
    ------
    UnsupportedError
        With every reason why no kernel serves the problem.
    """
    reasons = []
    for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if head_dim > MAX_HEAD_DIM:
            reasons.append(f"{name} is {head_dim}; kernels exist up to {MAX_HEAD_DIM}")
    if legacy_mma and problem.dtype != "float16":
        reasons.append(f"dtype is {problem.dtype}; compute capability 7.5 has matrix instructions for float16 only")
    reasons += unread_by("forward_portable", problem.further_inputs)
    if reasons:
        raise UnsupportedError(f"no forward kernel on {arch} for this problem", reasons)

    packs = packs_heads(problem) if like is None else like.packed_heads
    group = problem.num_heads // problem.num_heads_kv if packs else 1
    rows = problem.seqlen_q * group  # of one (batch, head) that the tiles divide
    heads = problem.batch * problem.num_heads // group
    itemsize = 4 if problem.dtype == "float32" else 2
    warps_d_unit = 64 if problem.head_dim_v > 256 else 8
    base = ForwardConfig(
        kernel="forward_portable",
        arch=arch,
        dtype=problem.dtype,
        head_dim=round_up(problem.head_dim, 8),
        head_dim_v=round_up(problem.head_dim_v, warps_d_unit),
        block_m=16,
        block_n=16,
        num_warps=1,
        aligned=all(is_vectorizable(x, itemsize) for x in (problem.q, problem.k, problem.v)),
        legacy_mma=legacy_mma,
        # Of split keys every split writes its own; `combine` does not know of it.
        features=replace(features_of(problem), max_logit=problem.return_max_logit),
        packed_heads=group > 1,
    )
    tiles = tiles_for(base, rows, problem.seqlen_k, smem_limit) if like is None else [tile_of(Tile, like)]
    candidates = [with_tile(base, tile) for tile in tiles]
    fitting = [c for c in candidates if smem_bytes(c) <= smem_limit]
    if rows > PACKED_QUERIES and smem_limit < MEASURED_SMEM and not legacy_mma:
        fitting.sort(key=lambda c: warps_per_sm(c.num_warps, smem_bytes(c), smem_limit) < MIN_WARPS)
    if not fitting:
        least = min(smem_bytes(c) for c in candidates)
        reason = (
            f"the smallest tile of {problem.dtype} with head_dim {problem.head_dim} and head_dim_v "
            f"{problem.head_dim_v} needs {least} bytes of shared memory; a block gets {smem_limit}"
        )
        raise UnsupportedError(f"no forward kernel on {arch} for this problem", [reason])
    config = fitting[min(rank, len(fitting) - 1)]

    # A varlen problem whose sequences are all empty still has tokens to zero.
    num_m_blocks = max(ceil_div(rows, config.block_m), int(problem.varlen))
    num_rows = heads * rows
    row_bytes = 4 * num_rows * (config.head_dim_v + 1)
    num_key_tiles = ceil_div(problem.seqlen_k, config.block_n)
    max_splits = min(MAX_SPLITS, MAX_PARTIAL_BYTES // row_bytes) if row_bytes else 1
    if num_splits is not None:
        num_splits = max(1, min(num_splits, max_splits, num_key_tiles // 2))
    elif config.num_stages > 1 and config.aligned and not legacy_mma:
        config, num_splits = stream_keys(
            config,
            heads * num_m_blocks,
            num_key_tiles,
            num_sms=num_sms,
            smem_limit=smem_limit,
            row_bytes=row_bytes,
            max_splits=max_splits,
            ragged=problem.batch > 1 and (problem.varlen or problem.seqused_k),
            wide=may_be_wide(problem, config),
            clusters=clusters and clustered is None and may_cluster(problem, config, 2, smem_limit, num_sms),
        )
    else:
        by_registers = 3 if config.block_m <= DECODE_ROWS else config.min_blocks_per_sm
        slots = num_sms * resident_blocks(config, smem_limit, by_registers)
        num_splits = splits_by_waves(heads * num_m_blocks, num_key_tiles, slots, max_splits)
    forced = clusters and clustered and may_cluster(problem, config, num_splits, smem_limit, num_sms)
    if config.cluster > 1 or forced:
        config = _with_sink(problem, replace(config, split=True, cluster=num_splits))
        params = (("num_m_blocks", num_m_blocks), ("num_splits", num_splits), ("head_group", num_splits))
        grid = heads * num_splits * num_m_blocks
        launch = Launch(
            config=config, grid=grid, block=config.num_threads, smem_bytes=smem_bytes(config), params=params
        )
        return ForwardPlanSpec(launches=(launch,))
    plans: tuple[Launch, ...] = ()
    words_params: tuple[tuple[str, int], ...] = ()
    splits = num_splits > 1 or config.features.float32_q
    words_bytes, softmax_bytes = 0, 8 * num_splits * num_rows if splits else 0
    if words_pay(problem, config.block_n) and _has_lines(problem, config, num_m_blocks):
        config = with_words(config)
        words = words_of(problem, problem.seqlen_q if config.packed_heads else config.block_m, config.block_n)
        plans, words_params = (plan_launch(problem, words, config, softmax_bytes),), words.params(softmax_bytes)
        words_bytes = words.nbytes
    if num_splits == 1 and not config.features.float32_q:
        units = heads + (problem.num_heads // group if problem.varlen else 0)
        grid = units * num_m_blocks
        if problem.varlen and group == 1:
            grid = problem.num_heads * packed_slots(problem.q.shape[1], problem.batch, config.block_m)
        config = _with_sink(problem, config)
        launch = Launch(
            config=config,
            grid=grid,
            block=config.num_threads,
            smem_bytes=smem_bytes(config),
            params=(
                ("num_m_blocks", num_m_blocks),
                ("num_splits", 1),
                ("head_group", _head_group(problem, config)),
                *words_params,
            ),
        )
        return ForwardPlanSpec(launches=(*plans, launch), tile_words_bytes=words_bytes)

    # Float32 results come from float32 partial ones, even of a single split: one more kernel converts anyway.
    split_config = replace(config, split=True, features=replace(config.features, float32_q=False))
    combine = combine_launch(
        problem, config, arch=arch, num_splits=num_splits, num_m_blocks=num_m_blocks, num_sms=num_sms
    )
    return ForwardPlanSpec(
        launches=(
            *plans,
            Launch(
                config=split_config,
                grid=heads * num_splits * num_m_blocks,
                block=config.num_threads,
                smem_bytes=smem_bytes(split_config),
                params=(("num_m_blocks", num_m_blocks), ("num_splits", num_splits), ("head_group", 1), *words_params),
            ),
            combine,
        ),
        num_splits=num_splits,
        out_partial_bytes=4 * num_splits * num_rows * config.head_dim_v,
        softmax_partial_bytes=softmax_bytes,
        tile_words_bytes=words_bytes,
    )


def _with_sink(problem: AttentionProblem, config: ForwardConfig) -> ForwardConfig:
    """``config`` that reads what lies behind the params. A sink comes after the last key tile: no other tile but one.

    For 10.x and 11.0 ptxas spills the loop's counter with 128 columns, which no problem with words of tiles has.
    """
    optional = features_of(problem, behind=True).optional
    if optional and config.block_n == 128 and config.arch in ("sm_100", "sm_103", "sm_110"):
        config = replace(config, block_n=112)
    return replace(config, features=replace(config.features, optional=optional))


def _has_lines(problem: AttentionProblem, config: ForwardConfig, num_m_blocks: int) -> bool:
    """Whether a tile of queries has one line of words. Rows of packed heads are queries of several heads."""
    if not config.packed_heads:
        return True
    assert problem.mask is not None
    _, heads, rows, _ = problem.mask.shape
    return heads == 1 and (rows == 1 or num_m_blocks == 1)


def candidates(problem: AttentionProblem, **target: Any) -> list[ForwardPlanSpec]:
    """The first rows of the tile table that fit, then the first row with half and with twice its splits.

    ``target`` are the arguments of `choose_forward`. Splits are varied where there are some, or where one block each
    leaves half of the multiprocessors idle.
    """
    first = choose_forward(problem, **target)
    found = [first, *(choose_forward(problem, **target, rank=rank) for rank in (1, 2))]
    splits = dict(first.main.params)["num_splits"]
    clusters = target.get("clusters", True)
    if splits > 1 or 2 * first.main.grid <= target["num_sms"]:
        found += [choose_forward(problem, **target, num_splits=count) for count in (splits // 2, 2 * splits) if count]
        counts = [x for x in CLUSTERS if splits <= 2 * x <= 4 * splits] if clusters else []
        found += [choose_forward(problem, **target, num_splits=count, clustered=True) for count in counts]
    return found
