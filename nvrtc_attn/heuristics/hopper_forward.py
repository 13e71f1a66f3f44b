"""Forward pass of the Hopper family: its launches for a problem, or why the portable family must do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..base.dtypes import DTYPES
from ..front.problem import AttentionProblem
from ..jit.config import Features, HopperForwardConfig
from .common import MEASURED_SMS, ceil_div, is_vectorizable, packed_slots, tile_of
from .forward_combine import combine_launch
from .hopper_common import (
    DTYPES_16BIT,
    MIN_QUERY_ROWS,
    least_query_rows,
    reasons_against_size,
    reasons_against_target,
    score_operands,
)
from .hopper_forward_config import Tile, config_before, config_of, fitted_columns, smem_bytes
from .hopper_forward_dropout import keep_words_bytes, keep_words_launch
from .hopper_forward_schedule import (
    hands_out,
    heads_of_schedule,
    heads_together,
    pair_rounds,
    queries_of_tile,
    tile_costs,
    tile_list_of,
)
from .hopper_forward_splits import (
    LEAST_GAIN,
    may_split,
    most_splits,
    split_counts,
    splits_keys,
    time_us,
    with_partial_results,
)
from .hopper_forward_tile import (
    choose_tile,
    direct_tile,
    has_bias_alone,
    large_tile,
    own_tile,
    tile_with_bits,
    tile_without_bits,
)
from .hopper_forward_wide import candidates as wide_candidates
from .hopper_small import several_blocks, shared_width
from .spec import ForwardPlanSpec, Launch
from .tensor_map import TensorMap, packed_map, reasons_against, score_map, tensor_map
from .tile_words import TileBits, may_have_bits, plan_launch, words_of
from .tile_words import pays as words_pay

MAX_HEAD_DIM: Final = 256
MANY_KEYS: Final = 4096
"""From so many keys on a few query tiles may have another tile than the table's by the estimate of their time: 1 x
512 x 16384, 64 heads on 8, causal, D 128, 344 us with 128 rows and columns, 465 with 192 rows and 64 columns
(H200)."""
FEW_KEYS: Final = 512
"""Up to so many keys of 64 rows or fewer, where each of them has a multiprocessor, `slower` prefers the portable family
up to head dim 64: 1 x 35 x 32 0.97 of this one's time, but 6 x 50 x 3000 x 12 1.09 (H200)."""
LIST_WARPS: Final = 32
"""Of the thread block that lists the tiles of packed sequences: all there can be, because there is one block."""
PACKS_HEADS: Final = True
"""Whether tables and the autotuner pack heads where it pays (`packs_heads`): 16 queries of 64 heads on 8 with 4096 keys
80 us instead of 122, 64 queries of 16 heads on 4 34 instead of 43 (H200, 2026-11-22)."""


def may_pack_heads(problem: AttentionProblem) -> bool:
    """Whether the query heads of a key head can be rows of one tile: nothing but scores, a group that a tile holds.

    The copy engine brings the heads of a query as neighbours, so they must be different ones.
    """
    group = problem.num_heads // max(problem.num_heads_kv, 1)
    other = problem.varlen or score_operands(problem) or problem.further_inputs or problem.modifier is not None
    return 1 < group <= 64 and problem.q.strides[2] != 0 and not other


def packs_heads(problem: AttentionProblem) -> bool:
    """Whether it pays: more rows than the portable family's tiles for decoding take, or a quarter fewer tiles.

    Or half as many rows of many keys, in splits: 8 x 16384 keys of one head, 64 query heads, D 128, 41.8 and 35.8 us,
    15 x 19411, 48 heads, 60.9 and 59.7, 1 x 19411 17.8 and 15.9; 40 heads, D 64, 41.4 and 39.5 (H200, 2026-11-29).
    """
    if not PACKS_HEADS or not may_pack_heads(problem):
        return False
    group = problem.num_heads // problem.num_heads_kv
    if problem.seqlen_q < MIN_QUERY_ROWS:
        rows = rows_of_heads(problem).seqlen_q
        narrow = max(problem.head_dim, problem.head_dim_v) <= 128
        return rows > 64 or (rows > 32 and problem.seqlen_k >= MANY_KEYS and narrow)
    alone, packed = group * ceil_div(problem.seqlen_q, 128), ceil_div(problem.seqlen_q, 128 // group)
    return 4 * packed <= 3 * alone


def rows_of_heads(problem: AttentionProblem) -> AttentionProblem:
    """``problem`` with the heads of a group as further rows, for choices that look at no position."""
    group = problem.num_heads // problem.num_heads_kv
    return replace(problem, seqlen_q=problem.seqlen_q * group, num_heads=problem.num_heads_kv)


def packed_heads_tile(problem: AttentionProblem, num_sms: int = MEASURED_SMS) -> Tile:
    """The tile with packed heads: that of as many rows of one head, without a half tile (its bounds are rows)."""
    rows = rows_of_heads(problem)
    if rows.seqlen_q <= 64 and max(problem.head_dim, problem.head_dim_v) <= 128:
        return Tile(
            block_m=64, block_n=64, num_stages=4, num_stages_q=2, ping_pong=False, lazy_max=True, packed_heads=True
        )
    return replace(large_tile(rows, num_sms), half_tile=False, packed_heads=True)


def reasons_for_portable(problem: AttentionProblem, *, arch: str, smem_limit: int) -> list[str]:
    """Every reason why this family cannot serve ``problem``; empty when it can."""
    found = reasons_against_target(problem, arch, "forward_hopper")
    if problem.dtype not in DTYPES_16BIT:
        return found
    for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if head_dim > MAX_HEAD_DIM or head_dim % 8:
            found.append(f"{name} is {head_dim}; accepted are multiples of 8 up to {MAX_HEAD_DIM}")
    if problem.head_dim_v > 192 and score_operands(problem) > 1 and not choose_tile(problem).score_tiles:
        found.append(
            f"head_dim_v is {problem.head_dim_v}; with two of bias, mask and dropout the kernel would spill registers"
        )
    if problem.head_dim_v > 192 and problem.dropout_p > 0 and (problem.varlen or problem.seqused_k):
        found.append(f"head_dim_v is {problem.head_dim_v}; with dropout and lengths on the device likewise")
    if problem.modifier is not None and score_operands(problem) and max(problem.head_dim, problem.head_dim_v) > 128:
        found.append("score_mod or mask_mod beside bias, mask or dropout beyond head dim 128: it would spill registers")
    tiles = problem.batch * (ceil_div(problem.seqlen_q, 64) + 1)
    if problem.varlen:
        tiles = packed_slots(problem.q.shape[1], problem.batch, 64)
    if (tiles + 1) * problem.num_heads >= 2**31:
        found.append("there are 2^31 query tiles")
    found += reasons_against_size(problem, least_query_rows(problem))
    for name in ("q", "k", "v"):
        found += reasons_against(name, getattr(problem, name), 2)
    for name, operand in (("bias", problem.bias), ("mask", problem.mask)):
        if operand is not None and (operand.shape[-1] == 1 < problem.seqlen_k or operand.strides[-1] != 1):
            found.append(f"{name} has stride {operand.strides[-1]} along the keys; its rows must be contiguous")
    if problem.out is not None and not is_vectorizable(problem.out, 2):
        found.append("rows of out cannot be written in 16-byte vectors")
    if not found and smem_bytes(config_of(problem, choose_tile(problem))) > smem_limit:
        found.append(f"a thread block may use {smem_limit} bytes of shared memory")
    return found


def _packed_plan_spec(problem: AttentionProblem, tile: Tile, *, num_sms: int) -> ForwardPlanSpec:
    """The launches for packed sequences: one makes the list of tiles, the other works on them."""
    config, tiles = config_of(problem, tile), tile_list_of(problem, tile)
    group = problem.num_heads // problem.num_heads_kv
    grid = min(tile.min_blocks_per_sm * num_sms, problem.num_heads * tiles.tiles)
    params = (
        ("num_m_blocks", max(ceil_div(problem.seqlen_q, tile.block_m), 1)),
        ("num_splits", 1),
        ("num_tiles", problem.num_heads * tiles.tiles),  # at most
        ("heads_per_group", group),
        ("head_group", tiles.heads),
        ("chunk_rows", tiles.chunk_rows),
        ("num_chunks", tiles.num_chunks),
        ("num_workers", grid),
    )
    features = Features(band=problem.band, varlen=True, seqused_k=problem.seqused_k)
    making = config_before(config, "packed_tiles", num_warps=LIST_WARPS, features=features)
    return ForwardPlanSpec(
        launches=(
            Launch(config=making, grid=1, block=making.num_threads, smem_bytes=0, params=params),
            Launch(
                config=config,
                grid=grid,
                block=config.num_threads,
                smem_bytes=smem_bytes(config),
                params=params,
                tensor_maps=_operand_maps(problem, tile),
            ),
        ),
        tile_list_bytes=tiles.nbytes,
    )


def plan_spec(problem: AttentionProblem, tile: Tile, *, num_sms: int, num_splits: int = 1) -> ForwardPlanSpec:
    """The launches of ``problem`` with ``tile``; several ``num_splits`` of one that `may_split`."""
    if problem.varlen:
        return _packed_plan_spec(problem, tile, num_sms=num_sms)
    config = whole = config_of(problem, tile)
    split = num_splits > 1
    if split:  # float32 results are what is merged
        config = replace(whole, split=True, features=replace(whole.features, float32_q=False))
    # The schedule counts a query tile once for each split.
    num_m_blocks = max(ceil_div(problem.seqlen_q, queries_of_tile(problem, tile)), 1) * num_splits
    heads = heads_of_schedule(problem, tile)
    all_heads = problem.batch * heads
    num_tiles = all_heads * num_m_blocks
    grid = min(tile.min_blocks_per_sm * num_sms, num_tiles)
    costs = tile_costs(problem, tile)
    if not split and hands_out(problem, tile, costs, num_sms):
        config = replace(config, tickets=True)
    group = heads // problem.num_heads_kv
    head_bytes = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v) // group
    fixed = problem.band and not (config.tickets or split)
    rounds = pair_rounds(costs, all_heads, grid, head_bytes) if fixed else 0
    head_pairs = ceil_div(num_m_blocks, 2)
    first_head, done = divmod(rounds * grid, head_pairs)
    words = words_of(problem, tile.block_m, tile.block_n) if config.features.tile_words else None
    # Words behind the counter begin at a multiple of 8.
    ticket_bytes = (16 if words or config.keep_words else 4) * config.tickets
    finding: tuple[Launch, ...] = ()
    words_bytes = 0
    words_params: tuple[tuple[str, int], ...] = ()
    if words:
        bits = TileBits(words=words, behind=ticket_bytes + words.nbytes) if config.tile_bits else None
        words_bytes = bits.end - ticket_bytes if bits else words.nbytes
        words_params = (*words.params(ticket_bytes), *(bits.params if bits else ()))
        finding = (plan_launch(problem, words, config, ticket_bytes, bits),)
        if bits:
            finding = (*finding, bits.launch(problem, config, finding[0], num_sms))
    kept_bytes = 0
    if config.keep_words:
        kept_bytes = keep_words_bytes(problem, tile.block_m, tile.block_n)
        finding = (keep_words_launch(problem, config, num_m_blocks, num_sms),)
    merging: tuple[Launch, ...] = ()
    partial_rows = 0
    if split:
        partial_rows = num_splits * problem.batch * problem.num_heads * problem.seqlen_q
        counts = {"num_splits": num_splits, "num_m_blocks": num_m_blocks, "num_sms": num_sms}
        merging = (combine_launch(problem, whole, arch="sm_90", **counts),)
    return ForwardPlanSpec(
        num_splits=num_splits,
        out_partial_bytes=4 * partial_rows * config.head_dim_v,
        softmax_partial_bytes=8 * partial_rows,
        tile_words_bytes=words_bytes,
        keep_words_bytes=kept_bytes,
        ticket_bytes=ticket_bytes,
        launches=(
            *finding,
            Launch(
                config=config,
                grid=grid,
                block=config.num_threads,
                smem_bytes=smem_bytes(config),
                params=(
                    ("num_m_blocks", num_m_blocks),
                    ("num_splits", num_splits),
                    ("num_tiles", num_tiles),
                    ("num_heads", heads),
                    ("heads_per_group", problem.num_heads // problem.num_heads_kv),
                    ("head_group", heads_together(all_heads, num_m_blocks, grid) if problem.band and not words else 1),
                    ("pair_rounds", rounds),
                    ("head_pairs", head_pairs),
                    ("tail_first_head", first_head),
                    ("tail_done", done),
                    ("tail_whole_heads", all_heads - first_head - int(done > 0)),
                    *words_params,
                ),
                tensor_maps=(*_operand_maps(problem, tile), *_score_maps(problem, tile)),
            ),
            *merging,
        ),
    )


def plan_of_few_decisions(problem: AttentionProblem, *, num_sms: int) -> ForwardPlanSpec:
    """The plan of ``problem`` with dropout whose kernel makes the decisions itself, as with fewer sequences."""
    return plan_spec(problem, own_tile(problem, num_sms), num_sms=num_sms)


def fastest_plan(problem: AttentionProblem, tile: Tile, *, num_sms: int) -> ForwardPlanSpec:
    """The plan with ``tile``, or with splits of the keys where those are faster.

    A tile of 64 rows that is alone on its multiprocessor makes way for a larger one: with splits there are enough. With
    few query tiles a diagonal is a small part of the keys, and a tile without one may be faster, whole as well.
    """
    if not splits_keys(problem, tile, num_sms):
        return plan_spec(problem, tile, num_sms=num_sms)
    dense = replace(problem, window_left=None, window_right=None)
    if tile.packed_heads:
        tiles = [tile, packed_heads_tile(dense, num_sms)]
    else:
        tiles = [tile, large_tile(problem, num_sms), large_tile(dense, num_sms)]
    many = problem.seqlen_k >= MANY_KEYS
    times = {(x, 1): time_us(problem, x, 1, num_sms) for x in tiles if many or x == tile}
    for x in dict.fromkeys(with_partial_results(problem, x) for x in tiles):
        times |= {(x, n): time_us(problem, x, n, num_sms) for n in split_counts(problem, x, num_sms)}
    best, count = min(times, key=lambda x: times[x])
    if LEAST_GAIN * times[best, count] > times[tile, 1]:
        best, count = tile, 1
    return plan_spec(problem, best, num_sms=num_sms, num_splits=count)


def _operand_maps(problem: AttentionProblem, tile: Tile) -> tuple[TensorMap, ...]:
    queries = tensor_map("tensor_map_q", "q", problem.q, 2, tile.block_m)
    if tile.packed_heads:
        group = problem.num_heads // problem.num_heads_kv
        queries = packed_map("tensor_map_q", "q", problem.q, 2, group, tile.block_m // group)
    return (
        queries,
        tensor_map("tensor_map_k", "k", problem.k, 2, tile.block_n),
        tensor_map("tensor_map_v", "v", problem.v, 2, tile.block_n),
    )


def _score_maps(problem: AttentionProblem, tile: Tile) -> list[TensorMap]:
    """Maps of bias and mask, when they come as tiles."""
    if not tile.score_tiles:
        return []
    return [
        score_map(f"tensor_map_{name}", name, operand, DTYPES[operand.dtype].itemsize, tile.block_m)
        for name, operand in (("bias", problem.bias), ("mask", problem.mask))
        if operand is not None
    ]


def slower(problem: AttentionProblem, spec: ForwardPlanSpec, *, num_sms: int) -> list[str]:
    """Why the portable family is faster than the plan ``spec``; empty when it is not."""
    launch = spec.main
    assert isinstance(launch.config, HopperForwardConfig)
    packed, small = launch.config.packed_heads, launch.config.block_m == 64
    several = launch.config.min_blocks_per_sm > 1
    if (
        not (packed or several)
        and problem.seqlen_q <= MIN_QUERY_ROWS
        and problem.seqlen_k <= FEW_KEYS
        and max(problem.head_dim, problem.head_dim_v) <= 64
    ):
        # 64 rows and keys at head dim 64: the portable kernel takes 18 us, this one 25, with several blocks 15. From
        # memory, 1000 x 64 x 8 and 400 x 49 x 12, those take 79 and 41 us, the portable kernel 90 and 59 (H200).
        return [f"{problem.seqlen_q} query rows fill half a tile"]
    tiles = dict(launch.params)["num_tiles"] // spec.num_splits
    if (tiles <= num_sms or spec.num_splits > 1) and not problem.varlen:
        # A tile alone on its multiprocessor takes 10.7 ns a key (D up to 128), whereas the portable kernel splits the
        # keys and reaches 280 TFLOP/s. A causal mask does not halve the time of the split, because its longest blocks
        # see all of their keys. The times behind this are in docs/experiments.md, "Few query tiles, many keys".
        widest = max(problem.head_dim, problem.head_dim_v)
        scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
        flops = 2 * scores * (problem.head_dim + problem.head_dim_v)
        portable_us = 12 + flops / 280e6
        if may_split(problem) and not several:
            # Of tiles with empty rows 197 x 2048 x 12, D 64, takes 22 us, 300 x 5000 x 16, D 72, 51.
            hopper_us = time_us(problem, tile_of(Tile, launch.config), spec.num_splits, num_sms)
            rows = (rows_of_heads(problem) if packed else problem).seqlen_q
            portable_us = 14 + flops * ceil_div(rows, 128) * 128 / rows / 260e6
        elif small:
            hopper_us = 6 + (0.0075 if widest <= 64 else 0.0095 * max(1, widest / 160)) * problem.seqlen_k
        else:
            hopper_us = 4 + 0.0107 * problem.seqlen_k * max(1, widest / 128)
        if portable_us < hopper_us and problem.window_left is None:
            return [f"{tiles} query tiles leave most of {num_sms} multiprocessors idle; split keys fill them"]
    return []


def choose_forward(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int
) -> ForwardPlanSpec | list[str]:
    """The plan of the forward pass, or every reason why the portable family has to serve ``problem``."""
    if packs_heads(problem):
        found = packed_heads_plan(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit)
        if not isinstance(found, list) and (found.num_splits > 1 or rows_of_heads(problem).seqlen_q > 64):
            return found
    reasons = reasons_for_portable(problem, arch=arch, smem_limit=smem_limit)
    return reasons or fastest_plan(problem, choose_tile(problem, num_sms), num_sms=num_sms)


def plan_like(
    like: ForwardPlanSpec, problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int
) -> ForwardPlanSpec | list[str]:
    """The plan of a part with the tile and the splits of the whole's plan ``like``, or every reason against it."""
    if like.num_splits > 1 and not may_split(problem):
        return ["partial results of its keys cannot be merged"]
    tile = tile_of(Tile, like.main.config)
    if problem.window_right is None:
        tile = replace(tile, half_tile=False)  # there is no diagonal: what it leaves out adds zeros
    if tile.packed_heads and not may_pack_heads(problem):
        return ["the heads of a group cannot be rows of a tile"]
    rows = rows_of_heads(problem) if tile.packed_heads else problem
    return reasons_for_portable(rows, arch=arch, smem_limit=smem_limit) or plan_spec(
        problem, tile, num_sms=num_sms, num_splits=like.num_splits
    )


def narrower(problem: AttentionProblem, *, num_sms: int) -> list[ForwardPlanSpec]:
    """Plans with fewer keys a tile than the table's: fewer scores of a thread wait for what a modifier reads."""
    tile = choose_tile(problem, num_sms)
    if tile.block_m == 192 and tile.block_n <= 64:  # fewer rows leave a thread 240 registers instead of 160
        return [plan_spec(problem, replace(tile, block_m=128), num_sms=num_sms)]
    # Scores come in slabs of 64 columns. A learned table at head dim 64: 96 columns take 2 % less time than 80.
    small_steps = tile.block_m == 192 or max(problem.head_dim, problem.head_dim_v) > 192
    step = 64 if tile.score_tiles else 16 if small_steps else 32
    columns = [n for n in (tile.block_n - step, tile.block_n - 2 * step) if n >= 48]
    return [plan_spec(problem, replace(tile, block_n=n, half_tile=False), num_sms=num_sms) for n in columns]


def packed_heads_plan(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int
) -> ForwardPlanSpec | list[str]:
    """The plan with packed heads, of a problem that `may_pack_heads`, or every reason against it."""
    reasons = reasons_for_portable(rows_of_heads(problem), arch=arch, smem_limit=smem_limit)
    return reasons or fastest_plan(problem, packed_heads_tile(problem, num_sms), num_sms=num_sms)


def _other_rows(problem: AttentionProblem, tile: Tile) -> list[Tile]:
    """At head dims 65 to 96 the other number of rows: which is faster depends on lengths and waves."""
    widest, mapped = max(problem.head_dim, problem.head_dim_v), problem.softcap > 0 or problem.softmax_scale <= 0
    other = problem.seqused_k or mapped or problem.further_inputs or problem.modifier is not None
    if not 64 < widest <= 96 or score_operands(problem) or other:
        return []
    if tile.block_m == 192:
        return [replace(tile, block_m=128, block_n=128, num_stages=2)]
    return [replace(tile, block_m=192, block_n=64, num_stages=4, half_tile=False)]


def candidates(problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int) -> list[ForwardPlanSpec]:
    """The table's plan and some whose tile differs from it as rows of the table differ; none where it has no plan."""
    packed: list[ForwardPlanSpec] = []
    if PACKS_HEADS and may_pack_heads(problem) and problem.seqlen_q * problem.num_heads > 64 * problem.num_heads_kv:
        found = packed_heads_plan(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit)
        packed = [] if isinstance(found, list) else [found]
    if reasons_for_portable(problem, arch=arch, smem_limit=smem_limit):
        return packed
    chosen, tile = choose_tile(problem, num_sms), large_tile(problem, num_sms)
    tiles = [chosen, tile]
    if shared_width(problem):
        tiles.append(several_blocks(problem, tile))
    if tile.tile_bits and not tile.score_tiles:
        # Of a neighbourhood 0.91 and 0.89 of the time, of a prefix 1.05 and 1.14.
        narrow = max(problem.head_dim, problem.head_dim_v) <= 64
        if score_operands(problem) == 0 and max(problem.head_dim, problem.head_dim_v) <= 128:
            few = replace(tile, block_m=64, block_n=128 if narrow else 64, num_stages=2, num_stages_q=1 + narrow)
            tiles.append(replace(few, ping_pong=False, min_blocks_per_sm=2))
    if tile.tile_bits:
        tiles.append(tile_without_bits(problem, num_sms))
        if tile.block_m == 192:
            tiles += [replace(tile, block_m=128, block_n=128), replace(tile, block_n=112)]
    elif may_have_bits(problem) and words_pay(problem, tile.block_n):
        tiles.append(tile_with_bits(problem, num_sms))
    lengths = problem.varlen or problem.seqused_k
    if score_operands(problem) == 0 and max(problem.head_dim, problem.head_dim_v) <= 64 and tile.block_n >= 112:
        rows, columns = (128, 128) if tile.block_m == 192 else (192, 112 if lengths or tile.begins_products else 128)
        tiles.append(replace(tile, block_m=rows, block_n=columns, half_tile=False))
    if problem.varlen and tile.block_m == 192 and tile.num_stages == 2:
        # The keys of the next query tile come in time, as of dense ones. Not with a half tile, as above.
        tiles.append(replace(tile, num_stages=3, half_tile=False))
    diagonal = problem.window_right is not None and score_operands(problem) == 0 and not lengths
    if tile.half_tile or (diagonal and tile.block_n == 128 and not tile.tile_bits):
        tiles.append(replace(tile, half_tile=not tile.half_tile))
    if tile.score_tiles and tile.num_stages_q == 2:
        tiles.append(replace(tile, num_stages_q=1))
    tiles += _other_rows(problem, tile)
    tiles += wide_candidates(problem, tile)
    if max(problem.head_dim, problem.head_dim_v) <= 64 and has_bias_alone(problem) and not tile.score_tiles:
        tiles.append(direct_tile(problem, 128 if tile.block_m == 192 else 192))
    fitted = fitted_columns(problem, tile.block_n, fits=True) if max(problem.head_dim, problem.head_dim_v) <= 128 else 0
    if 0 < fitted < tile.block_n:
        tiles.append(replace(tile, block_n=fitted, num_stages=2))
    # Tiles of 96 keys, not 112, which are slower in four of five cases and spill with dropout. Scores come in slabs
    # of 64 columns.
    step = 64 if tile.score_tiles else 32
    columns = (tile.block_n - 1) // step * step
    if columns >= 64:
        tiles.append(replace(tile, block_n=columns, half_tile=False))
    tiles = list(dict.fromkeys(tiles))
    fitting = [x for x in tiles if smem_bytes(config_of(problem, x)) <= smem_limit]
    plans = [plan_spec(problem, x, num_sms=num_sms) for x in fitting]
    return [*plans[:1], *packed, *_other_splits(problem, chosen, num_sms=num_sms), *plans[1:]]


def _other_splits(problem: AttentionProblem, tile: Tile, *, num_sms: int) -> list[ForwardPlanSpec]:
    """Where keys are split, half as many splits and twice as many."""
    found = fastest_plan(problem, tile, num_sms=num_sms)
    if found.num_splits == 1:
        return []
    of_split = tile_of(Tile, found.main.config)
    counts = [x for x in (found.num_splits // 2, 2 * found.num_splits) if 1 < x <= most_splits(problem, of_split)]
    return [plan_spec(problem, of_split, num_sms=num_sms, num_splits=x) for x in counts]
