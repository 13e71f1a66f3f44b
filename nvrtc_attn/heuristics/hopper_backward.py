"""Backward pass of the Hopper family: its launches for a problem, or why the portable family must do it.

Workspaces: ``delta`` and ``row_lse`` are ``[B, H, rows]``, in whole query tiles (varlen: ``[H, rows]``), which the copy
engine can bring; the counter of key tiles follows. ``dq_accum``: ``collective/gradient_accumulator.cuh``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ..base.errors import UnsupportedError
from ..front.problem import AttentionProblem, OperandLayout, dense_layout
from ..jit.config import BackwardConfig, Features, HopperBackwardConfig
from .common import ceil_div, choose_captured, features_of, is_aligned, packed_slots
from .hopper_backward_config import (
    BLOCK_N,
    Tile,
    begins_early,
    can_have_bits,
    can_have_two_slots,
    config_of,
    has_plain_scores,
    hides_keys,
    is_plain,
    reads_scores,
)
from .hopper_backward_schedule import even_group, fewer_of_fused, head_group, query_step, tile_list_of
from .hopper_backward_tile import (
    can_share,
    choose_tile,
    is_packed_plainly,
    key_tiles,
    registers_of,
    two_slots_possible,
)
from .hopper_backward_wide import is_wide, reasons_against_wide
from .hopper_common import DTYPES_16BIT, reasons_against_size, reasons_against_target, score_operands
from .hopper_dbias import choose_dbias, dbias_layout
from .hopper_dbias import serves as serves_dbias
from .portable_backward import choose_backward as portable_plan
from .portable_backward import kernel_of as portable_kernel_of
from .portable_backward import splits_of
from .portable_dq import choose_dbias as portable_dbias
from .sink import choose_sink
from .spec import HOPPER_BACKWARD, BackwardPlanSpec, Launch, Workspace
from .tensor_map import TensorMap, reasons_against, score_map, tensor_map
from .tile_words import BackwardWords, backward_words

MIN_HEAD_DIM: Final = 16
"""At 8 the portable family's exact tile takes 0.94 of the time. At 16, 24 and 32 this one takes 0.63 to 0.93 of that
one's: 11 x 3079 x 20, D 32, 3.11 and 1.95 ms; 8 x 1024 x 8, D 16, 84 and 77 us; packed sequences, dropout and the
deterministic pass 0.54 to 0.9 (H200, 2026-11-29)."""
NARROW: Final = 32
"""Up to this head dim the portable family's exact tiles stay where threads do more than products: a mask of every score
takes 0.90 of the time at 16 and 1.00 at 32 (4 x 1024 x 8); functions were not measured."""
LEAST_QUERY_ROWS: Final = 33
"""The portable family has tiles of 32 rows for fewer. 56 rows and keys, 16 heads of 128: 24.9 and 13.1 us (H200)."""
LEAST_GROUP_OF_SHORT: Final = 3
"""Query heads of a key head from which on `is_ahead_of_short`; groups of two were not timed."""
MAX_HEAD_DIM: Final = 256
"""Beyond it dk and dv of 64 keys do not fit in a thread block's registers."""
PREPARE_ROWS: Final = 16
"""Query rows of a thread block of ``backward_hopper_prepare``."""


def reasons_for_portable(problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int) -> list[str]:
    """Every reason why this family cannot serve ``problem``; empty when it can."""
    found = reasons_against_target(problem, arch, "backward_hopper")
    if problem.dtype not in DTYPES_16BIT:
        return found
    for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
            found.append(f"{name} is {head_dim}; accepted are multiples of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")
    found += reasons_against_wide(problem) if is_wide(problem) else reasons_against_spills(problem)
    if max(problem.head_dim, problem.head_dim_v) <= NARROW and (problem.modifier is not None or reads_scores(problem)):
        found.append(f"a function, or a bias or mask that threads read for themselves, up to head dim {NARROW}")
    if problem.modifier is not None and is_wide(problem):
        found.append("score_mod or mask_mod beyond head dim 128, which the kernel of two thread blocks does not read")
    if problem.varlen and problem.bias is not None:
        found.append("bias with cu_seqlens")
    found += reasons_against_size(problem, LEAST_QUERY_ROWS)
    for name, operand in (("q", problem.q), ("k", problem.k), ("v", problem.v), ("dout", dout_layout(problem))):
        found += reasons_against(name, operand, 2)
    if not is_aligned(problem):
        found.append("rows of some tensor cannot be moved in 16-byte vectors")
    if not found and config_of(problem, choose_tile(problem, num_sms)).smem_bytes > smem_limit:
        found.append(f"a thread block may use {smem_limit} bytes of shared memory")
    return found


def reasons_against_spills(problem: AttentionProblem) -> list[str]:
    """What the kernel cannot do beyond head dim 64 without spilling registers (NVRTC 13.0: 8 to 28 bytes)."""
    if max(problem.head_dim, problem.head_dim_v) <= 64:
        return []
    found = []
    if problem.modifier is not None and (score_operands(problem) or problem.softcap):
        found.append("score_mod or mask_mod beside bias, mask, dropout or softcap beyond head dim 64 likewise")
    if score_operands(problem) > 1:
        found.append("two of bias, mask and dropout beyond head dim 64, where the kernel would spill registers")
    if problem.dropout_p > 0 and problem.softcap:
        found.append("softcap and dropout beyond head dim 64, where the kernel would spill registers")
    per_score = problem.mask and not hides_keys(problem)
    if problem.deterministic and (per_score or (problem.bias and problem.bias.dtype == "float32")):
        found.append("deterministic, with a mask or a float32 bias beyond head dim 64: it would spill registers")
    return found


def is_ahead_of_short(problem: AttentionProblem, num_sms: int) -> bool:
    """Whether this family is ahead of ``portable_backward.short_plan``, whose blocks take a group's heads in turn.

    That one's time over this one's: 3 x 52, 14 heads on 2, 44 us and 2.46, 2 x 64, 32 on 4, D 32, 1.53, 32 x 64, 8 on
    1, 1.41, 64 x 50, 14 on 2, 1.16, 4 x 40, 9 on 3, 1.11; with more blocks than multiprocessors 300 x 64, 8 on 2, 0.76,
    100 x 49, 28 on 4, 0.67 (causal, H200, 2026-11-30).
    """
    few = problem.batch * problem.num_heads_kv <= num_sms
    return few and has_plain_scores(problem) and problem.num_heads >= LEAST_GROUP_OF_SHORT * problem.num_heads_kv


def slower(problem: AttentionProblem, spec: BackwardPlanSpec, *, num_sms: int, smem_limit: int) -> list[str]:
    """Why the portable family is faster than the plan ``spec``; empty when it is not.

    Where multiprocessors are busy this family takes 0.45 to 0.9 of its time in every case measured (H200, 2026-11-21).
    But with thread blocks for less than half of the multiprocessors, whose queries `choose_parts` does not share, a
    portable kernel that splits them in more than two keeps more at work (docs/experiments.md, "Few key tiles").
    """
    main = kernel_of(spec)
    tiles = dict(main.params)["num_tiles"]
    assert isinstance(main.config, HopperBackwardConfig)
    if 2 * main.grid >= num_sms or main.config.parts:
        return []
    try:
        portable = portable_plan(problem, arch="sm_90", num_sms=num_sms, smem_limit=smem_limit)
    except UnsupportedError:
        return []  # there is no other plan to be slower than
    splits = splits_of(portable)
    # Query heads of a group may be what both split, and then this family is 1.5 to 2.2 times as fast.
    if splits <= 2 or portable_kernel_of(portable).grid <= 2 * main.grid:
        return []
    return [f"{tiles} key tiles leave most of {num_sms} multiprocessors idle; queries split in {splits} fill more"]


def kernel_of(spec: BackwardPlanSpec) -> Launch:
    """The launch of the dk/dv kernel."""
    return next(launch for launch in spec.launches if launch.config.kernel in HOPPER_BACKWARD)


def dout_layout(problem: AttentionProblem) -> OperandLayout:
    """The layout of dout, dense where the problem names none."""
    return problem.dout or dense_layout((*problem.q.shape[:3], problem.head_dim_v), problem.dtype)


def prepare_warps(head_dim_v: int) -> int:
    """Warps of ``backward_hopper_prepare``: a thread for eight columns of a row, or 16 of what is no power of two."""
    vectors = ceil_div(head_dim_v, 8)
    return PREPARE_ROWS * (1 << vectors.bit_length() - 1) // 32


def plan_spec(
    problem: AttentionProblem, tile: Tile, *, num_sms: int, arch: str = "sm_90", smem_limit: int = 232448
) -> BackwardPlanSpec:
    """The launches of ``problem`` with ``tile``; ``arch`` and ``smem_limit`` are for kernels of the portable family."""
    config = config_of(problem, tile)
    varlen = int(problem.varlen)
    num_m_blocks = ceil_div(problem.seqlen_q, config.block_m)
    num_n_blocks = max(ceil_div(problem.seqlen_k, config.block_n), 1)
    entries = 1 if varlen else problem.batch
    # Varlen: each sequence begins in a tile of its own.
    tiles = packed_slots(problem.q.shape[1], problem.batch, config.block_m) if varlen else num_m_blocks
    key_tiles_of_head = entries * num_n_blocks
    words: BackwardWords | None = None
    by_work = config.features.tile_words and not (config.ordered or config.fused)
    if config.features.tile_words:
        words = backward_words(problem, config, ordered=config.ordered, by_work=by_work, num_sms=num_sms)
    order = words.order if words else None
    listed, group = None, head_group(problem, tile.splits, num_sms // config.cluster, by_work=order is not None)
    if varlen:
        listed = tile_list_of(problem, tile.splits)
        key_tiles_of_head, group = listed.tiles, listed.heads
    num_tiles = problem.num_heads_kv * key_tiles_of_head * tile.splits
    if tile.fused and problem.band:
        group = fewer_of_fused(problem, group)
    elif not (varlen or order or config.ordered or config.parts):
        group = even_group(problem, tile.splits, num_sms // config.cluster, group)
    if tile.heads_together is not None and not varlen:
        group = tile.heads_together
    shared = num_tiles - tile.whole if config.parts else 0
    num_tiles += shared * (tile.parts - 1)
    apart = shared > 0 and has_parts_apart(problem)
    workers = min(num_sms // config.cluster, num_tiles)  # thread blocks, or pairs of them
    rows = tiles * config.block_m
    statistics = entries * problem.num_heads * rows
    schedule = (
        ("num_n_blocks", num_n_blocks),
        ("num_tiles", num_tiles),
        ("num_splits", tile.splits * tile.parts),
        ("heads_per_group", problem.num_heads // problem.num_heads_kv // tile.splits),
        ("query_step", query_step(num_m_blocks, num_n_blocks) if tile.step is None else tile.step),
        ("head_group", group),
        ("chunk_rows", listed.chunk_rows if listed else 0),
        ("num_chunks", listed.num_chunks if listed else 0),
        ("num_workers", workers if listed else 0),
        ("num_whole", tile.whole),
        ("parts_apart", int(apart)),
        ("counter_offset", statistics),
    )
    # The kernels beside it read only the shape of its tiles.
    shape: dict[str, Any] = {
        name: getattr(config, name) for name in ("arch", "dtype", "head_dim", "head_dim_v", "block_m", "block_n")
    }
    shape |= {"num_warps": 8, "features": Features(varlen=problem.varlen)}
    # The list of key tiles depends on the mask, too.
    masked = Features(varlen=True, band=problem.band, seqused_k=problem.seqused_k) if varlen else Features()
    if by_work:  # whether there is an order or not: one kernel for all lengths
        masked = Features(band=problem.band, tile_words=True)
    warps = prepare_warps(config.head_dim_v)
    two_vectors = PREPARE_ROWS * config.head_dim_v > 32 * warps * 8
    switches = {name: getattr(config, name) for name in ("log2_lse", "one_key_tile", "keep_words", "ordered")}
    prepare = HopperBackwardConfig(
        kernel="backward_hopper_prepare",
        **switches,
        **(shape | {"num_warps": warps, "features": masked}),
        # Not more registers than those of dense problems need (40, of two vectors a thread 54), for the sake of the one
        # that makes the list.
        min_blocks_per_sm=(36 if two_vectors else 48) // warps if varlen else 1,
    )
    results = features_of(problem)
    convert = BackwardConfig(
        kernel="dq_convert",
        transposed_blocks=config.block_m == 80,
        **(shape | {"features": Features(varlen=problem.varlen, float32_q=results.float32_q)}),
    )
    m_params: tuple[tuple[str, int], ...] = (("num_m_blocks", num_m_blocks),)
    launches = [*words.launches] if words else []
    workspaces = [words.workspace] if words else []
    words_params = words.params if words else ()
    if not config.fused:
        lists = varlen + (order.lists if order else 0)  # thread blocks that make lists of key tiles
        launches.append(
            Launch(
                config=prepare,
                grid=entries * tiles * (config.block_m // PREPARE_ROWS) * problem.num_heads + lists,
                block=prepare.num_threads,
                smem_bytes=0,
                params=(*m_params, *schedule, *(words_params if by_work else ())),
            )
        )
    launches.append(
        Launch(
            config=config,
            grid=config.cluster * workers,
            block=config.num_threads,
            smem_bytes=config.smem_bytes,
            params=(*m_params, *schedule, *words_params, *(words.bits_params if words else ())),
            tensor_maps=(
                tensor_map("tensor_map_q", "q", problem.q, 2, config.block_m // config.cluster),
                tensor_map("tensor_map_k", "k", problem.k, 2, config.block_n // config.cluster),
                tensor_map("tensor_map_v", "v", problem.v, 2, config.block_n // config.cluster),
                tensor_map("tensor_map_dout", "dout", dout_layout(problem), 2, config.block_m // config.cluster),
                *_bias_maps(problem, config),
            ),
            overlaps=begins_early(config),
        )
    )
    if config.split:
        features = Features(varlen=problem.varlen, float32_k=results.float32_k)
        # Small problems have fewer key tiles than there are multiprocessors: 3 x 362, 12 heads on 2, takes 51 us with 4
        # warps a tile and 46 with 16 (all launches, H200); 1 x 8192, 64 heads on 8, takes as long.
        convert_dkv = BackwardConfig(
            kernel="dkv_convert", **(shape | {"num_warps": 16, "block_m": 64, "features": features})
        )
        launches.append(
            Launch(
                config=convert_dkv,
                grid=key_tiles_of_head * problem.num_heads_kv,
                block=convert_dkv.num_threads,
                smem_bytes=0,
                params=(("num_n_blocks", num_n_blocks),),
                overlaps=True,
            )
        )
    if shared:
        convert_parts = HopperBackwardConfig(kernel="dkv_hopper_convert", **(shape | {"num_warps": 4}))
        launches.append(
            Launch(
                config=convert_parts,
                grid=shared * (BLOCK_N // 16),
                block=convert_parts.num_threads,
                smem_bytes=0,
                params=schedule,
                overlaps=True,
            )
        )
        nbytes = 4 * shared * (tile.parts if apart else 1) * BLOCK_N * (config.head_dim + config.head_dim_v)
        workspaces.append(Workspace(field="dkv_accum", nbytes=nbytes, zeroed=not apart))
    head = rows * config.head_dim
    workspaces += [
        Workspace(
            field="delta",
            nbytes=4 * statistics,
            params=(("delta_stride_b", problem.num_heads * rows), ("delta_stride_h", rows)),
        ),
        # Behind it the counter of key tiles, and one for each query tile.
        Workspace(field="row_lse", nbytes=4 * (statistics + 1 + config.ordered * statistics // config.block_m)),
    ]
    if not config.one_key_tile:
        launches.append(
            Launch(
                config=convert,
                grid=entries * tiles * problem.num_heads,
                block=convert.num_threads,
                smem_bytes=smem_that_spreads(entries * tiles * problem.num_heads, num_sms, smem_limit),
                params=m_params,
                overlaps=True,
            )
        )
        workspaces.append(
            Workspace(
                field="dq_accum",
                nbytes=4 * entries * problem.num_heads * head,
                params=(
                    ("dq_accum_stride_b", problem.num_heads * head),
                    ("dq_accum_stride_h", head),
                    ("dq_accum_stride_m", config.head_dim),
                ),
            )
        )
    if config.split:
        numel = problem.num_heads_kv * key_tiles_of_head * BLOCK_N * (config.head_dim + config.head_dim_v)
        workspaces.append(Workspace(field="dkv_accum", nbytes=4 * numel, zeroed=True))
    if listed:
        workspaces.append(Workspace(field="counters", nbytes=listed.nbytes))
    if config.fused:  # key tiles and pieces of rows that were handed out, finished pieces of each head
        heads = problem.batch * problem.num_heads
        workspaces.append(Workspace(field="counters", nbytes=4 * (2 + heads), zeroed=True))
    if problem.dbias and config.dbias == "none":
        # Broadcast dims of the bias are summed by a kernel of their own, or where it cannot by the portable family's.
        if serves_dbias(problem):
            more, partial = choose_dbias(problem, dout_layout(problem), arch=arch, num_sms=num_sms)
        else:
            more, splits, nbytes = portable_dbias(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit)
            partial = Workspace(field="dbias_partial", nbytes=nbytes, params=(("num_dbias_splits", splits),))
        launches += more
        workspaces.append(partial)
    launches += choose_captured(problem, arch="sm_90a", num_sms=num_sms)
    launches += choose_sink(problem, arch="sm_90a", block_m=config.block_m, padded=True, log2_lse=config.log2_lse)
    return BackwardPlanSpec(launches=tuple(launches), workspaces=tuple(workspaces))


def smem_that_spreads(grid: int, num_sms: int, smem_limit: int) -> int:
    """Shared memory that nobody uses, so that a multiprocessor takes its share of ``grid`` blocks and no more.

    Those of a launch that begins early would all go to the multiprocessors that are idle first: 1 x 1024, 16 heads,
    D 128, 53.8 us without and 52.0 with it, D 64 35.8 and 34.0 (H200, 2026-11-30).
    """
    share = ceil_div(grid, num_sms)
    # From 8 blocks of 8 warps on threads are the limit. 1 KB a block is the system's, allocations are of 128 bytes.
    return 0 if share >= 8 else (smem_limit // share - 1024) // 128 * 128


def has_parts_apart(problem: AttentionProblem) -> bool:
    """Whether dk and dv of every part of a key tile have a slot of the workspace: stored, and nothing to clear before.

    Time of adding them up over that: 1 x 4379 x 744 x 24, D 128, 4 parts 1.033, 1 x 2000 x 4, 2 parts 1.05 (H200,
    2026-11-30). Not where grouped heads far too large for L2 have so many parts that these would take 0.5 GB.
    """
    return not problem.band or problem.num_heads == problem.num_heads_kv


def _bias_maps(problem: AttentionProblem, config: HopperBackwardConfig) -> list[TensorMap]:
    """Maps of bias and dbias, where they move as tiles."""
    if not config.bias_tiles:
        return []
    assert problem.bias is not None
    maps = [score_map("tensor_map_bias", "bias", problem.bias, 2, config.block_m)]
    if config.dbias == "store":
        maps.append(score_map("tensor_map_dbias", "dbias", dbias_layout(problem), 2, config.block_m))
    return maps


def choose_backward(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int
) -> BackwardPlanSpec | list[str]:
    """The plan of the backward pass, or every reason why the portable family has to serve ``problem``."""
    reasons = reasons_for_portable(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit)
    if reasons:
        return reasons
    return plan_spec(problem, choose_tile(problem, num_sms), num_sms=num_sms, arch="sm_90", smem_limit=smem_limit)


def plan_like(
    config: HopperBackwardConfig, problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int
) -> BackwardPlanSpec | list[str]:
    """The plan of a part with as many queries a tile as the whole's ``config``, or every reason against it."""
    reasons = reasons_for_portable(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit)
    if reasons:
        return reasons
    tile = choose_tile(problem, num_sms)
    if tile.block_m != config.block_m and config.block_m == 64:
        tile = replace(tile, block_m=64)
    return plan_spec(problem, tile, num_sms=num_sms, arch="sm_90", smem_limit=smem_limit)


def candidates(problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int) -> list[BackwardPlanSpec]:
    """Plans with the table's tile, other sizes, rows prepared the other way, the other loop; none without one."""
    if reasons_for_portable(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit):
        return []
    tile = choose_tile(problem, num_sms)
    tiles = dict.fromkeys((tile, replace(tile, block_m=64)))
    if is_plain(problem):
        fused_size = 64 if tile.block_m == 80 else tile.block_m
        tiles[replace(tile, block_m=fused_size, fused=not tile.fused)] = None
        if max(problem.head_dim, problem.head_dim_v) > 64:
            tiles[replace(tile, block_m=80, fused=False)] = None
        if tile.keys_in_registers:
            tiles[replace(tile, **registers_of(problem, keys=False))] = None
    elif tile.values_in_registers:
        tiles[replace(tile, own_code=False, keys_in_registers=False, values_in_registers=False)] = None
    elif is_packed_plainly(problem):
        tiles[replace(tile, **registers_of(problem))] = None
    if can_have_bits(problem):
        tiles[replace(tile, tile_bits=not tile.tile_bits)] = None
    if two_slots_possible(problem):
        # Also of the tile whose rows a kernel before prepares.
        for other in list(tiles):
            if can_have_two_slots(other):
                tiles[replace(other, key_slots=3 - other.key_slots)] = None
    if tile.splits > 1:
        tiles[replace(tile, splits=1)] = None
    if tile.whole:
        tiles[replace(tile, parts=1, whole=0)] = None
    # Parts where no table has them: one key tile, or so few that the multiprocessors are not half full.
    few = 4 * key_tiles(problem) <= 3 * num_sms and problem.seqlen_q >= 1024
    if few and tile.parts == tile.splits == 1 and can_share(problem) and not problem.band:
        tiles[replace(tile, parts=num_sms // max(key_tiles(problem), 1))] = None
    return [plan_spec(problem, x, num_sms=num_sms, smem_limit=smem_limit) for x in tiles]
