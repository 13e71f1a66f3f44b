"""Backward pass of the portable family: delta, the dk/dv kernel, conversions; which tile, and when to split queries.

Workspaces are float32, aligned to 16 bytes: ``_workspaces`` says what each holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from ..base.errors import UnsupportedError
from ..front.operands import unread_by
from ..front.problem import AttentionProblem, OperandLayout
from ..jit.config import BackwardConfig, Features
from .common import choose_captured, features_of, is_aligned, is_float32, is_full_shape, packed_slots
from .portable_common import MEASURED_SMEM, MIN_WARPS, warps_per_sm
from .sink import choose_sink
from .spec import BackwardPlanSpec, Launch, Workspace
from .tile_words import backward_words, with_words
from .tile_words import pays as words_pay

MAX_HEAD_DIM: Final = 512
MAX_SPLITS: Final = 32
MIN_TILES_PER_SPLIT: Final = 4
"""Query tiles that a split must have left: fewer do not pay for adding dk and dv in float32 and converting them."""
DECODE_ROWS: Final = 32
"""Up to this many query rows the loop is one tile, most of a large one would be padding."""
SKIP_HIDDEN_ROWS: Final = 768
"""Up to this many query rows under a key tile its part above the diagonal is worth leaving out."""

SHORT_TOKENS: Final = 64
"""Up to this many queries and keys a tile of 64 x 64 that stores dq is the first choice, whatever the family, at head
dims up to 64: 1.9 times as fast as the Hopper kernel, whose tile stays three quarters empty (8000 x 64, H4 D 32 with a
gradient of the bias; H200, 2026-11-22), and 2.7 to 3.1 times as fast as adding dq up (256 and 4096 x 49)."""
ONE_TILE_TOKENS: Final = 128
"""Up to this many the family stores dq where its tile holds all keys: 1.2 times as fast as adding it up (1000 x 100, H8
D 32). The Hopper kernel, where there is one, takes 0.64 to 0.79 of its time, and stays."""
MAX_SHORT_KEYS: Final = 256


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
    """Only for GPUs with less shared memory than that of the times below. They take rows with `MIN_WARPS` first."""


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


def smem_bytes(config: BackwardConfig) -> int:
    """Dynamic shared memory of the dk/dv kernel; the map is at the head of ``backward_portable.cuh``."""
    shares_keys = config.num_warps > config.warps_n_dkv
    scores = config.block_m * config.block_n
    elements = config.block_n * (config.head_dim + (config.head_dim_v if config.v_in_smem else 0))
    elements += config.block_m * (config.num_stages * config.head_dim + config.num_stages_dout * config.head_dim_v)
    elements += scores if shares_keys else 0
    elements += scores if shares_keys or config.dq == "atomic" or config.stores_dq else 0
    return elements * config.itemsize + 16 * config.block_m


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
    config = _choose_config(
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
    slots = num_sms * max(_blocks_per_sm(config, smem_limit), 1)  # thread blocks that run at once
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
    workspaces = list(_workspaces(problem, config, num_n_blocks))
    words_params: tuple[tuple[str, int], ...] = ()
    # Wider heads have no registers left to walk words with: 8 bytes of spills for 8.6 at head dim 256.
    narrow = max(problem.head_dim, problem.head_dim_v) <= 128
    if narrow and not stores_dq and words_pay(problem, config.block_n):
        config = with_words(config)
        words = backward_words(problem, config)
        launches, words_params = [*words.launches], words.params
        workspaces.append(words.workspace)
    if not fused:
        launches.append(_delta(problem, config, num_m_blocks))
    main = _dkv(problem, config, num_n_blocks, num_splits, slots)
    launches.append(replace(main, params=(*main.params, *words_params)))
    if splits:
        launches.append(_dkv_convert(problem, replace(config, features=features), num_n_blocks))
    if stores_dq:
        pass
    elif problem.deterministic:
        launches.append(choose_dq(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit, legacy_mma=legacy_mma))
    else:
        launches.append(_dq_convert(problem, replace(config, features=features), num_m_blocks))
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


def may_store_dq(problem: AttentionProblem) -> bool:
    """Whether one tile can hold all keys, and dq need not be added up: then every row of it is written by one block.

    Rows of a masked problem may be left out where nothing is kept, tokens of no packed sequence belong to no tile,
    other operands may have kernels that read what ``delta`` prepares, and a float32 dq of 16-bit operands is written by
    the kernel that converts the sums.
    """
    others = problem.varlen or problem.mask is not None or problem.further_inputs or is_float32(problem, "dq")
    return 0 < problem.seqlen_k <= MAX_SHORT_KEYS and problem.seqlen_q > 0 and not others


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
        if main.grid > target["num_sms"] * max(_blocks_per_sm(main.config, target["smem_limit"]), 1):
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


def _choose_config(
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
        if config.smem_bytes <= smem_limit and tile.blocks_per_sm <= _blocks_per_sm(config, smem_limit):
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


def _blocks_per_sm(config: BackwardConfig, smem_limit: int) -> int:
    """Thread blocks that fit one multiprocessor, with 255 registers a thread unless the tile asks for more blocks."""
    blocks = config.min_blocks_per_sm
    return warps_per_sm(config.num_warps, config.smem_bytes, smem_limit, blocks) // config.num_warps


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
    tiles = min(num_n_blocks * problem.batch, _tiles(problem, problem.k, num_n_blocks, config.block_n))
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


def _tiles(problem: AttentionProblem, operand: OperandLayout, num_blocks: int, block: int) -> int:
    """Tiles of ``block`` rows of all sequences: ``num_blocks`` each or, packed, the slots of what the tensor holds."""
    return packed_slots(operand.shape[1], problem.batch, block) if problem.varlen else problem.batch * num_blocks


def _delta(problem: AttentionProblem, config: BackwardConfig, num_m_blocks: int) -> Launch:
    delta = _plain(config, "delta")
    grid = problem.num_heads * _tiles(problem, problem.q, num_m_blocks, config.block_m)
    return Launch(
        config=delta, grid=grid, block=delta.num_threads, smem_bytes=0, params=(("num_m_blocks", num_m_blocks),)
    )


def _head_group(problem: AttentionProblem, num_n_blocks: int, slots: int) -> int:
    """Key heads whose key tiles are interleaved, those with the most work under a causal mask first.

    Two waves of thread blocks: fewer heads leave long tiles for the end (2 to 5 % slower), all of them do not fit in L2
    (8 %), because dq, Q and dO of a head are used again by each of its key tiles. Without a band all tiles are alike.
    """
    return max(2 * slots // max(num_n_blocks, 1), 1) if problem.band else 1


def _dkv(problem: AttentionProblem, config: BackwardConfig, num_n_blocks: int, num_splits: int, slots: int) -> Launch:
    tiles = _tiles(problem, problem.k, num_n_blocks, config.block_n)
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


def _dkv_convert(problem: AttentionProblem, config: BackwardConfig, num_n_blocks: int) -> Launch:
    convert = _plain(config, "dkv_convert", Features(float32_k=config.features.float32_k))
    grid = problem.num_heads_kv * _tiles(problem, problem.k, num_n_blocks, config.block_n)
    return Launch(
        config=convert, grid=grid, block=convert.num_threads, smem_bytes=0, params=(("num_n_blocks", num_n_blocks),)
    )


def _dq_convert(problem: AttentionProblem, config: BackwardConfig, num_m_blocks: int) -> Launch:
    convert = _plain(config, "dq_convert", Features(float32_q=config.features.float32_q))
    grid = problem.num_heads * _tiles(problem, problem.q, num_m_blocks, config.block_m)
    return Launch(
        config=convert, grid=grid, block=convert.num_threads, smem_bytes=0, params=(("num_m_blocks", num_m_blocks),)
    )


def _workspaces(problem: AttentionProblem, config: BackwardConfig, num_n_blocks: int) -> Iterator[Workspace]:
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
        rows = _tiles(problem, problem.k, num_n_blocks, config.block_n) * config.block_n
        nbytes = 4 * problem.num_heads_kv * rows * (config.head_dim + config.head_dim_v)
        yield Workspace(field="dkv_accum", nbytes=nbytes, zeroed=True)
