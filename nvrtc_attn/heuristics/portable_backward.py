"""Backward pass of the portable family: its launches in order, splits of the queries, and the plans for few tokens."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Final

from ..base.errors import UnsupportedError
from ..front.operands import unread_by
from ..front.problem import AttentionProblem
from ..jit.config import BackwardConfig
from .common import choose_captured, is_float32, is_full_shape
from .portable_backward_config import blocks_per_sm
from .portable_backward_launches import (
    delta_launch,
    dkv_convert_launch,
    dkv_launch,
    dq_convert_launch,
    num_tiles,
    workspaces_of,
)
from .portable_backward_tile import choose_config, may_store_dq
from .sink import choose_sink
from .spec import BackwardPlanSpec, Launch, Workspace
from .tile_words import backward_words, with_words
from .tile_words import pays as words_pay

MAX_HEAD_DIM: Final = 512
MAX_SPLITS: Final = 32
MIN_TILES_PER_SPLIT: Final = 4
"""Query tiles that a split must have left: fewer do not pay for adding dk and dv in float32 and converting them."""
SKIP_HIDDEN_ROWS: Final = 768
"""Up to this many query rows under a key tile its part above the diagonal is worth leaving out."""

SHORT_TOKENS: Final = 64
"""Up to this many queries and keys a tile of 64 x 64 that stores dq is the first choice, whatever the family, at head
dims up to 64: 1.9 times as fast as the Hopper kernel, whose tile stays three quarters empty (8000 x 64, H4 D 32 with a
gradient of the bias; H200, 2026-11-22), and 2.7 to 3.1 times as fast as adding dq up (256 and 4096 x 49)."""
ONE_TILE_TOKENS: Final = 128
"""Up to this many the family stores dq where its tile holds all keys: 1.2 times as fast as adding it up (1000 x 100, H8
D 32). The Hopper kernel, where there is one, takes 0.64 to 0.79 of its time, and stays."""


def choose_backward(
    problem: AttentionProblem,
    *,
    arch: str,
    num_sms: int,
    smem_limit: int,
    legacy_mma: bool = False,
    rank: int = 0,
    num_splits: int | None = None,
    stores_dq: bool = False,
    fused: bool = False,
) -> BackwardPlanSpec:
    """Launches and workspaces of the backward pass.

    ``rank`` takes a later row of the table among those that fit (the last, where there are fewer), ``num_splits``
    another number of splits, ``stores_dq`` only rows whose tile holds all keys (`may_store_dq`), ``fused`` no launch
    before the kernel: for `candidates`.

    Raises
    ------
    UnsupportedError
        No kernel serves the problem; carries every reason.
    """
    from .portable_dq import choose_dbias, choose_dq

    _check_supported(problem, legacy_mma)
    # Broadcast dims of the bias are summed by a kernel of their own; a full-shape gradient is one store per score.
    stores_dbias = problem.dbias and problem.bias is not None and is_full_shape(problem)
    config = choose_config(
        problem,
        arch=arch,
        smem_limit=smem_limit,
        legacy_mma=legacy_mma,
        dq="none" if problem.deterministic or stores_dq else "atomic",
        dbias_dtype=problem.bias.dtype if stores_dbias and problem.bias is not None else None,
        rank=rank,
        stores_dq=stores_dq,
        fused=fused,
    )
    # A varlen problem whose sequences are all empty still has tokens to zero.
    num_m_blocks = max(-(-problem.seqlen_q // config.block_m), int(problem.varlen))
    num_n_blocks = max(-(-problem.seqlen_k // config.block_n), int(problem.varlen))
    slots = num_sms * max(blocks_per_sm(config, smem_limit), 1)  # thread blocks that run at once
    if num_splits is None:
        num_splits = _choose_splits(problem, config, slots, num_m_blocks, num_n_blocks)
    # Float32 results come from the float32 workspace, which other kernels convert: this one is that of 16-bit results.
    features, config = (
        config.features,
        replace(config, features=replace(config.features, float32_q=False, float32_k=False)),
    )
    splits = num_splits > 1 or features.float32_k
    config = replace(config, split=splits, skip_hidden=_skips_hidden(problem, config))

    launches: list[Launch] = []
    workspaces = list(workspaces_of(problem, config, num_n_blocks))
    words_params: tuple[tuple[str, int], ...] = ()
    # Wider heads have no registers left to walk words with: 8 bytes of spills for 8.6 at head dim 256.
    narrow = max(problem.head_dim, problem.head_dim_v) <= 128
    if narrow and not stores_dq and words_pay(problem, config.block_n):
        config = with_words(config)
        words = backward_words(problem, config)
        launches, words_params = [*words.launches], words.params
        workspaces.append(words.workspace)
    if not fused:
        launches.append(delta_launch(problem, config, num_m_blocks))
    main = dkv_launch(problem, config, num_n_blocks, num_splits, slots)
    launches.append(replace(main, params=(*main.params, *words_params)))
    if splits:
        launches.append(dkv_convert_launch(problem, replace(config, features=features), num_n_blocks))
    if stores_dq:
        pass
    elif problem.deterministic:
        launches.append(choose_dq(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit, legacy_mma=legacy_mma))
    else:
        launches.append(dq_convert_launch(problem, replace(config, features=features), num_m_blocks))
    if problem.dbias and not stores_dbias:
        dbias_launches, num_dbias_splits, partial_bytes = choose_dbias(
            problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit, legacy_mma=legacy_mma
        )
        launches += dbias_launches
        workspaces.append(
            Workspace(field="dbias_partial", nbytes=partial_bytes, params=(("num_dbias_splits", num_dbias_splits),))
        )
    launches += choose_captured(problem, arch=arch, num_sms=num_sms)
    launches += choose_sink(problem, arch=arch, block_m=config.block_m, padded=False)
    return BackwardPlanSpec(launches=tuple(launches), workspaces=tuple(workspaces))


def kernel_of(spec: BackwardPlanSpec) -> Launch:
    """The launch of the dk/dv kernel."""
    return next(launch for launch in spec.launches if launch.config.kernel == "backward_portable")


def short_plan(problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int) -> BackwardPlanSpec | None:
    """The plan for short sequences that is ahead of every family's, `SHORT_TOKENS`; None where there is none."""
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if longest > SHORT_TOKENS or max(problem.head_dim, problem.head_dim_v) > 64 or not may_store_dq(problem):
        return None
    return _storing_plan(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit)


def choose_first(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int, legacy_mma: bool = False
) -> BackwardPlanSpec:
    """The family's first choice: `choose_backward`, with dq stored where its tile holds all keys."""
    target: dict[str, Any] = {"arch": arch, "num_sms": num_sms, "smem_limit": smem_limit}
    plan = choose_backward(problem, **target, legacy_mma=legacy_mma)
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if longest <= ONE_TILE_TOKENS and may_store_dq(problem) and not legacy_mma:
        stored = _storing_plan(problem, **target)
        if stored is not None and _tile_of(stored) == _tile_of(plan):
            return stored
    return plan


def _storing_plan(problem: AttentionProblem, **target: Any) -> BackwardPlanSpec | None:
    """The plan that stores dq, None where no tile holds all keys.

    With at most one wave of thread blocks nothing hides a launch, and the kernel prepares its own rows: 1 x 64 and 1 x
    128 tokens take 10 to 15 % less time so, 768 to 32000 blocks 3 to 17 % more (H200, 2026-11-22).
    """
    try:
        plan = choose_backward(problem, **target, stores_dq=True)
        main = kernel_of(plan)
        assert isinstance(main.config, BackwardConfig)
        if main.grid > target["num_sms"] * max(blocks_per_sm(main.config, target["smem_limit"]), 1):
            return plan
        fused = choose_backward(problem, **target, stores_dq=True, fused=True)
    except UnsupportedError:
        return None
    return fused if _tile_of(fused) == _tile_of(plan) else plan


def _tile_of(spec: BackwardPlanSpec) -> tuple[int, int, int]:
    config = kernel_of(spec).config
    return config.block_m, config.block_n, config.num_warps


def _check_supported(problem: AttentionProblem, legacy_mma: bool) -> None:
    reasons = []
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        reasons.append(
            f"head_dim: q has {problem.head_dim} and v {problem.head_dim_v} - the largest backward tile is "
            f"{MAX_HEAD_DIM} - split the heads into parts of at most {MAX_HEAD_DIM}"
        )
    if legacy_mma and problem.dtype == "bfloat16":
        reasons.append("dtype: bfloat16 - compute capability 7.5 has no bfloat16 arithmetic - convert to float16")
    if problem.varlen and problem.bias is not None:
        reasons.append("bias: given with cu_seqlens - packed sequences share no key index - run the batch padded")
    reasons += unread_by("backward_portable", problem.further_inputs)
    if problem.deterministic and is_float32(problem, "dq"):
        reasons.append("dq: float32 of 16-bit queries, and deterministic, whose kernel writes the type of q")
    if reasons:
        raise UnsupportedError("no kernel of the portable family computes this backward pass", reasons)


def splits_of(spec: BackwardPlanSpec) -> int:
    """Parts of the query loop of the dk/dv kernel."""
    return dict(kernel_of(spec).params)["num_splits"]


def candidates(problem: AttentionProblem, **target: Any) -> list[BackwardPlanSpec]:
    """The first rows of the tile table that fit, then the first row with half and with twice its splits, if any.

    Before them, where one tile holds all keys, the plans that store dq. ``target`` are the arguments of
    `choose_backward`.
    """
    first = choose_backward(problem, **target)
    found = []
    if may_store_dq(problem):
        with contextlib.suppress(UnsupportedError):  # no tile of this head dim holds all keys
            found += [choose_backward(problem, **target, stores_dq=True, fused=fused) for fused in (True, False)]
    found += [first, *(choose_backward(problem, **target, rank=rank) for rank in (1, 2))]
    num_splits = splits_of(first)
    if num_splits > 1:
        splits = (num_splits // 2, min(2 * num_splits, MAX_SPLITS))
        found += [choose_backward(problem, **target, num_splits=count) for count in splits]
    return found


def _choose_splits(
    problem: AttentionProblem,
    config: BackwardConfig,
    slots: int,
    num_m_blocks: int,
    num_n_blocks: int,
) -> int:
    """Parts of the query loop: more than one where key tiles alone leave multiprocessors idle."""
    if problem.deterministic:
        return 1
    tiles = min(num_n_blocks * problem.batch, num_tiles(problem, problem.k, num_n_blocks, config.block_n))
    blocks = tiles * problem.num_heads_kv * config.dim_slices
    if blocks == 0:
        return 1
    tiles = num_m_blocks * (problem.num_heads // problem.num_heads_kv)
    return max(1, min(slots // blocks, tiles // MIN_TILES_PER_SPLIT, MAX_SPLITS))


def _skips_hidden(problem: AttentionProblem, config: BackwardConfig) -> bool:
    """Whether diagonal tiles are so large a part that leaving out half of their work pays for the branches.

    At S 1024 it saves 2 to 4 % of a causal backward pass, at S 4096 it costs up to 2 % (H200, 2026-11-21). Dropout's
    keep bits fill the registers, and it costs 4 to 9 % even at S 1024. With V in registers and 32 rows it spills.
    """
    if config.v_in_registers and config.block_m == 32:
        return False
    if config.dtype == "float32" or config.dbias == "store" or problem.dropout_p > 0 or problem.window_right is None:
        return False
    rows = problem.seqlen_q // 2  # that see a key tile, on average
    if problem.window_left is not None:
        rows = min(rows, problem.window_left + problem.window_right)
    return rows <= SKIP_HIDDEN_ROWS
