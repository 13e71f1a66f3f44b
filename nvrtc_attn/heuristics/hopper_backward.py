"""Backward pass of the Hopper family: which tile for which problem, or why the portable family must do it.

Workspaces: ``delta`` and ``row_lse`` are ``[B, H, rows]``, in whole query tiles (varlen: ``[H, rows]``), which the copy
engine can bring; the counter of key tiles follows. ``dq_accum``: ``collective/gradient_accumulator.cuh``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

from ..base.dtypes import DTYPES
from ..front.problem import AttentionProblem, OperandLayout, dense_layout
from ..jit.config import BackwardConfig, Features, HopperBackwardConfig
from ..modifiers.cuda import has_head_slope, sums_held, takes_registers
from ..modifiers.cuda_gradients import trains_plainly
from .common import ceil_div, choose_captured, features_of, is_aligned, is_float32, is_full_shape, packed_slots
from .hopper_backward_wide import WIDE_L2_BYTES, is_wide, reasons_against_wide, wide_config
from .hopper_common import (
    DTYPES_16BIT,
    TileList,
    begins_products,
    diagonal_bytes,
    product_width,
    reasons_against_size,
    reasons_against_target,
    score_operands,
    tile_list,
)
from .hopper_dbias import choose_dbias, dbias_layout
from .hopper_dbias import serves as serves_dbias
from .portable_backward import choose_backward as portable_plan
from .portable_backward import splits_of
from .portable_dq import choose_dbias as portable_dbias
from .sink import choose_sink
from .spec import HOPPER_BACKWARD, BackwardPlanSpec, Launch, Workspace
from .tensor_map import TensorMap, reasons_against, score_map, score_reasons_against, tensor_map
from .tile_words import BackwardWords, backward_words, bits_bytes, bits_pay, may_have_bits, with_words
from .tile_words import pays as words_pay

MIN_HEAD_DIM: Final = 40
"""Smaller ones leave half of a 64-column slab empty; the portable family has exact tiles for them."""
MIN_HEAD_DIM_BIAS: Final = 32
"""Where the copy engine moves the bias, this family takes 0.5 to 0.65 of the portable one's time from here on."""
MAX_HEAD_DIM: Final = 256
"""Beyond it dk and dv of 64 keys do not fit in a thread block's registers."""
BLOCK_N: Final = 128
NUM_STAGES: Final = 2
PREPARE_ROWS: Final = 16
"""Query rows of a thread block of ``backward_hopper_prepare``."""
TURNS_OF_TILE: Final = 2
"""What a key tile takes beside its query tiles, in those."""
TURNS_OF_PART: Final = 5
"""What a part of one takes: it adds up three query tiles' worth of dk and dv."""
MAX_PARTS: Final = 16
MIN_GAIN_OF_PARTS: Final = 16
"""In query tiles: some 45 microseconds, of which clearing and converting the sums take a part."""
MIN_GAIN_OF_FEW: Final = 3
"""The same where half of the multiprocessors are idle: 1 x 1024 x 77, 20 heads, D 64, 20 key tiles of 8 query tiles, in
4 parts 26 us and whole 35; 8 x 1024 x 77, 8 heads, D 80, in 2 parts 52 and 54 (H100)."""
MOST_OF_GROUP: Final = 200 << 20
"""Bytes of Q, dO and dq of a group's heads that key tiles may read again and again."""
MIN_WAVES_CAUSAL: Final = 3.5
MIN_WAVES_PACKED: Final = 7.5
FUSED_BAND: Final = 4096
"""Queries up to which ``fused`` pays with a band, so that tiles have 64 and not 80 of them."""
MOST_IN_FLIGHT: Final = 40 << 20
"""Bytes of Q, dO and dq of the heads that causal key tiles in work read: more than that leaves L2 in between."""
MOST_IN_FLIGHT_WHOLE: Final = 80 << 20
"""The same where heads are not split yet, and dk and dv are not added up, and of wide heads, which gain 2 to 6 %."""
MOST_IN_FLIGHT_LONG: Final = 92 << 20
"""The same of more queries than ``fused`` is for, whose split tiles have 64 instead of 80. 1 x 8192, 64 heads on 8, of
which 138 MB are in flight: in 2 or 4 blocks 0.81 of the time on an H100, 1.02 on an H200, whose memory is faster. 86 MB
(40 on 8) are not worth it; 104 (48 on 1 in 8 blocks, 1 x 6144, 96 on 8 in 2) in twice as many 0.89 and 0.96 (H100)."""
MIN_TURNS_OF_SPLIT: Final = 48
"""Query tiles of a mean key tile below which adding up dk and dv costs more than that."""
MOST_STEP: Final = 2
"""Query tiles by which a key tile begins after the one before it, at most: what it has read is still in L2 then. 1 x
32760 x 512, 40 heads: 2.68 ms, and 3.67 spread over all of them; 4 x 4096 x 300, 10 heads, D 64: 0.136 and 0.161."""
WINDOW_L2_BYTES: Final = 40 << 20
L2_BYTES: Final = 32 << 20
"""What stays in an L2 of 50 to 60 MB beside what streams through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One row of the tile table."""

    block_m: int
    """64; 128 with head dims up to 64; 80 beyond, of plain scores (``is_plain``) and without ``fused``."""
    wide: bool = False
    """Two thread blocks share a key tile (``backward_hopper_wide``)."""
    fused: bool = False
    """Idle warps of the kernel prepare the rows, instead of a kernel before it."""
    splits: int = 1
    """Thread blocks that share the query heads of a group; a divisor of their number."""
    parts: int = 1
    """Thread blocks that share the query tiles of a key tile, of all that are not ``whole``."""
    whole: int = 0
    """So many key tiles, the first ones, are one block's each. Read where ``parts`` are more than one."""
    own_code: bool = False
    """`HopperBackwardConfig.own_code`: head dims of 72 to 112."""
    keys_in_registers: bool = False
    values_in_registers: bool = False
    """`HopperBackwardConfig.values_in_registers`: head dims up to 96, as for keys."""
    heads_together: int | None = None
    """Key heads whose tiles are handed out together, instead of `head_group`."""
    step: int | None = None
    """By how many query tiles a key tile begins after the one before it, times 4096, instead of `query_step`."""
    descending: bool = False
    """`HopperBackwardConfig.descending`: of causal scores alone."""
    tile_bits: bool = False
    """`KernelConfig.tile_bits`: of a mask_mod, where P is known before dP."""
    begins_products: bool = False
    """`HopperBackwardConfig.begins_products`: of a score_mod that adds what distances decide."""


def smem_bytes(config: HopperBackwardConfig) -> int:
    """Dynamic shared memory of one thread block; the map is at the head of ``backward_hopper.cuh``."""
    slabs, slabs_v, groups = ceil_div(config.head_dim, 64), ceil_div(config.head_dim_v, 64), config.block_n // 64
    rows = config.block_n * (slabs + slabs_v) + 2 * groups * config.block_m
    rows += config.block_m * config.num_stages * (slabs + slabs_v)
    helpers = 0
    if config.keep_words or config.ordered or config.begins_products:
        helpers = 16 + 8 * (4 + 2 * config.num_stages) + 16 * config.keep_words * config.num_stages * config.block_n
    if config.bias_tiles and config.dbias == "store" and config.features.band:
        rows += config.block_m  # zeros
    if config.fused:  # three warps, 32 rows of out and of dout each, and mbarriers
        helpers = 3 * 2 * 32 * (2 * config.head_dim_v + 16) + 8 * 4
    if config.parts:  # which query tiles
        helpers += 16
    if config.features.tile_words:  # how many query tiles, and which one each slot of q holds
        helpers += 16 + 8 * config.num_stages
    if config.tile_bits:
        helpers += config.num_stages * bits_bytes(config.block_n, config.block_m)
    if config.features.modifier:  # of each of the consumers' warps
        helpers += 16 * (config.block_n // 16) * sums_held(config.features.modifier)
    if config.begins_products:
        helpers += diagonal_bytes(config.block_n, config.block_m, config.num_stages)
    barriers = 4 + (6 if config.bias_tiles else 4) * config.num_stages
    return 128 * rows + config.num_stages * 8 * config.block_m + 16 + 8 * barriers + helpers


def uses_keep_words(problem: AttentionProblem) -> bool:
    """Whether dropout's decisions come from warps of their own; beside a bias, mask or softcap consumers make them.

    All launches then take 0.77 (D 64) to 0.81 (D 128, causal) of the time (H200, 2026-11-21; the figures are in
    docs/experiments.md, "Dropout: decisions made elsewhere").
    """
    if is_wide(problem) or problem.modifier is not None:
        return False
    return problem.dropout_p > 0 and score_operands(problem) == 1 and not problem.softcap


def choose_tile(problem: AttentionProblem, num_sms: int) -> Tile:
    """The tile table; what lost is in docs/experiments.md, "Hopper backward: tiles" (H200, 2026-11-21).

    128 queries fit in registers up to head dim 64 only. Beyond it 80 with plain scores read 7.5 % less shared memory
    than 64 and are 1 to 4 % faster. ``fused`` saves a launch, 2 to 12 % up to 2048 queries (4096 with a band), but
    with two key tiles a multiprocessor or fewer all of them wait for their rows at once. V in registers is 1 to 4 %
    faster up to head dim 96, and at 72 and 80 columns dQ's products without padding 1 to 3 % more (2026-11-22).
    """
    if is_wide(problem):
        # The figures of this one: hopper_backward_wide.py.
        return Tile(block_m=64, wide=True, splits=choose_splits(problem, num_sms))
    bits = can_have_bits(problem) and bits_pay(problem, BLOCK_N)
    # What a score needs beside its product takes the registers of half of the queries.
    plain = score_operands(problem) == 0 or uses_keep_words(problem) or bias_as_tiles(problem) or hides_keys(problem)
    if problem.modifier is not None:
        plain = modifies_plainly(problem) and not takes_registers(problem.modifier)
        # What a mask_mod keeps takes two registers of 128 queries: 64 spare what asking takes.
        plain = plain or (bits and problem.modifier.score is None)
    begins = begins_in_products(problem)
    block_m = most_queries(problem) if (plain or begins) and not problem.softcap else 64
    tile = Tile(block_m=block_m, splits=choose_splits(problem, num_sms), tile_bits=bits, begins_products=begins)
    if not is_plain(problem):
        parts = choose_parts(problem, block_m, num_sms)
        return replace(tile, parts=parts, splits=1) if parts > 1 else tile
    longest = FUSED_BAND if problem.band else 2048
    waves = tile.splits * key_tiles(problem) / num_sms
    fused = waves > 2 and problem.seqlen_q <= min(longest, 2 * problem.seqlen_k)
    widths = [product_width(x) for x in (problem.head_dim, problem.head_dim_v)]
    # Blocks of dq of 80 queries are turned round in 16 bits.
    transposed = min(widths) == 128 and not fused and not is_float32(problem, "dq")
    parts = choose_parts(problem, 80 if transposed else block_m, num_sms)
    splits = 1 if parts > 1 else tile.splits
    # Rows from the last one down, where key tiles do not begin with preparing them: 2 to 4 % less time; whole heads of
    # 80 to 128 columns gain nothing or lose 5 %. docs/experiments.md, "Hopper backward: who has which key tile, when".
    descending = is_causal(problem) and not fused and (max(widths) <= 64 or splits > 1 or parts > 1)
    tile = replace(tile, fused=fused, splits=splits, parts=parts, descending=descending, **registers_of(problem))
    # Of heads that are split 64 are 5 % faster: 2 x 8192 and 1 x 16384 with a window, 32 heads on 8 in two.
    return replace(tile, block_m=80) if transposed and splits == 1 else tile


def most_queries(problem: AttentionProblem) -> int:
    """Queries of the largest tile of plain scores that may be ``fused``."""
    return 128 if max(problem.head_dim, problem.head_dim_v) <= 64 else 64


def registers_of(problem: AttentionProblem) -> dict[str, bool]:
    """What of a tile of plain scores stays in registers, and whether consumers have code of their own."""
    widths = [product_width(x) for x in (problem.head_dim, problem.head_dim_v)]
    # A scale that is not positive is one operand more: 8 bytes would spill at head dim 64.
    return {"own_code": widths[0] == 80, "values_in_registers": max(widths) <= 96 and problem.softmax_scale > 0}


def key_tiles(problem: AttentionProblem) -> int:
    """Key tiles of all key heads and sequences; of packed ones what the tensor can hold."""
    tiles = problem.batch * ceil_div(problem.seqlen_k, BLOCK_N)
    if problem.varlen:
        tiles = min(tiles, problem.k.shape[1] // BLOCK_N + problem.batch)
    return problem.num_heads_kv * tiles


def tile_list_of(problem: AttentionProblem, splits: int) -> TileList:
    """The list of the key tiles of packed sequences."""
    group = problem.num_heads // problem.num_heads_kv // splits
    l2_bytes = WIDE_L2_BYTES if is_wide(problem) else L2_BYTES
    return tile_list(
        problem.k.shape[1],
        problem.batch,
        BLOCK_N,
        heads=problem.num_heads_kv * splits,
        resident_rows=problem.q.shape[1],
        l2_rows=l2_bytes // (group * (2 * problem.head_dim_v + 6 * problem.head_dim)),
    )


def choose_splits(problem: AttentionProblem, num_sms: int) -> int:
    """Thread blocks that share the query heads of a group: as few as keep multiprocessors busy and their rows in L2.

    Causal tiles have unequal work: four a multiprocessor, of packed sequences, whose longest are not known, eight.
    Time with as few over time with twice as many, 32 heads on 8: 0.93 (16 x 1024), 0.93 (2 x 8192), 0.83 (packed 16 x
    1024). Where tiles drift over the heads of a group (`keep_in_l2`) 4 and 8 instead of 1 and 2 take 0.90 and 0.89
    of the time; docs/experiments.md, "Hopper backward: who has which key tile, when".
    """
    if problem.deterministic or not problem.num_heads_kv:
        return 1
    if is_wide(problem):
        # Of other scores clusters do not share the query heads of a tile.
        return keep_in_l2(problem, 1, num_sms) if has_plain_scores(problem) else 1
    if bias_as_tiles(problem) and stores_dbias(problem):
        return 1  # the loading warp, which writes its zeros, has no register for both
    group = problem.num_heads // problem.num_heads_kv
    for splits in range(1, group):
        waves = splits * key_tiles(problem) / num_sms
        enough = MIN_WAVES_PACKED if problem.varlen else MIN_WAVES_CAUSAL
        if group % splits == 0 and (waves >= enough or (not problem.band and waves >= 0.95 * math.ceil(waves))):
            return keep_in_l2(problem, splits, num_sms)
    return group


def is_causal(problem: AttentionProblem) -> bool:
    """Whether queries see all keys up to a diagonal: key tiles of a head then have different numbers of query tiles.

    With a window all but a few have the same number.
    """
    return problem.window_left is None and problem.window_right is not None


def keep_in_l2(problem: AttentionProblem, splits: int, num_sms: int) -> int:
    """``splits``, or more: until what key tiles in work read at a time stays in L2, or a split would have few tiles.

    Causal key tiles of a head have different numbers of query tiles, so that blocks come to read different heads of
    their groups. Longer sequences than ``fused`` is for gain less, and lose the tiles of 80 queries.
    Query tiles are counted as those of plain scores, where others may have tiles of fewer queries.
    """
    bytes_of_head = head_bytes(problem)
    if not is_causal(problem) or problem.varlen or bytes_of_head > L2_BYTES:
        return splits
    long = problem.seqlen_q > FUSED_BAND
    group = problem.num_heads // problem.num_heads_kv
    tiles_of_head = ceil_div(problem.seqlen_k, BLOCK_N)
    turns = ceil_div(problem.seqlen_q, most_queries(problem)) / 2  # of a mean key tile and one query head
    workers = num_sms // 2 if is_wide(problem) else num_sms
    for more in range(splits, group + 1):
        if group % more:
            continue
        heads = min(workers / tiles_of_head, problem.batch * problem.num_heads_kv * splits)
        most = MOST_IN_FLIGHT_WHOLE if splits == 1 or is_wide(problem) else MOST_IN_FLIGHT
        if long:
            most = MOST_IN_FLIGHT_LONG
        in_flight = heads * (group // splits) * bytes_of_head
        if in_flight <= most or group // more * turns < MIN_TURNS_OF_SPLIT:
            break
        splits = more
    return splits


def can_share(problem: AttentionProblem) -> bool:
    """Whether thread blocks can share the query tiles of a key tile: registers suffice, and lengths alone say which."""
    on_device = problem.varlen or problem.seqused_k or problem.deterministic
    scores = score_operands(problem) == 0 or (hides_keys(problem) and not walks_words(problem))
    return scores and not (problem.softcap or on_device or is_wide(problem))


def choose_parts(problem: AttentionProblem, block_m: int, num_sms: int) -> int:
    """Parts of a key tile's query tiles, each a thread block's: those with which the last wave ends first.

    Few key tiles and many queries (text cross-attention): 160 key tiles of 410 query tiles in 1, 2, 3, 4, 9 parts take
    2.68, 2.32, 2.15, 2.08, 2.09 ms on 132 multiprocessors (H200), 40 of 32 in 2, 3, 6 parts 83, 70, 75 us, the portable
    family 137 (H100). Grouped heads far too large for L2 have a query head a part: 0.92 (1 x 16384, 64 on 4, causal).
    """
    group = problem.num_heads // max(problem.num_heads_kv, 1)
    tiles = key_tiles(problem)
    short = has_one_key_tile(problem) and has_plain_scores(problem) and not (problem.deterministic or problem.band)
    if not (is_plain(problem) or short) or not tiles or is_float32(problem, "dk", "dv"):  # parts write the type of k
        return 1
    if problem.band:
        bytes_of_head = head_bytes(problem)
        drifts = is_causal(problem) and group * bytes_of_head > MOST_OF_GROUP and bytes_of_head <= L2_BYTES
        return group if drifts and num_sms <= 2 * tiles <= 16 * num_sms else 1
    turns = ceil_div(problem.seqlen_q, block_m)
    if group > 1:  # heads are split
        return 1

    def time(parts: int) -> int:
        beside = TURNS_OF_PART if parts > 1 else TURNS_OF_TILE
        return ceil_div(tiles * parts, num_sms) * (ceil_div(turns, parts) + beside)

    parts = min(range(1, MAX_PARTS + 1), key=time)
    least = MIN_GAIN_OF_FEW if 2 * tiles <= num_sms else max(MIN_GAIN_OF_PARTS, time(1) // 8)
    return parts if time(1) - time(parts) >= least else 1


def is_plain(problem: AttentionProblem) -> bool:
    """Whether ``fused`` and 80 queries are possible: registers suffice, and idle warps have no other work.

    Lengths on the device take registers too. With one key tile there are no zeros to prepare, and an order of
    additions needs the warp itself. With a bias as tiles ``fused`` gains nothing (docs/experiments.md).
    """
    summed = problem.seqlen_k > BLOCK_N and not problem.deterministic and not is_wide(problem)
    return summed and has_plain_scores(problem)


def has_plain_scores(problem: AttentionProblem) -> bool:
    """Whether scores are products alone, with no operand, softcap or modifier, and no lengths are on the device."""
    on_device = problem.varlen or problem.seqused_k
    return score_operands(problem) == 0 and not (problem.softcap or on_device or problem.modifier)


def modifies_plainly(problem: AttentionProblem) -> bool:
    """Whether P is known before dP is there, and dS times one factor of the head: ``kPlainModifier`` without more."""
    program = problem.modifier
    if program is None or problem.softcap or score_operands(problem):
        return False
    return has_head_slope(program) and trains_plainly(program, problem.trained)


def begins_in_products(problem: AttentionProblem) -> bool:
    """`begins_products` of the backward pass, where gradients of captured arrays leave scores what they are.

    Up to head dim 64: 4 x 4096, 16 heads, 0.80 to 0.82 of the speed without a function where 0.71 and 0.76 were. At 128
    0.91, 0.92 before: there is time for what each warp finds itself (H100, 2026-11-27; docs/experiments.md).
    """
    narrow = max(problem.head_dim, problem.head_dim_v) <= 64
    return narrow and begins_products(problem) and modifies_plainly(problem)


def bias_as_tiles(problem: AttentionProblem) -> bool:
    """Whether the copy engine moves the bias and, where it is wanted and has its shape, the gradient of it.

    Both are in the slots of dS, so they have its type, and no softcap stands between dS and the gradient. With a mask
    or dropout, P waits for both products, and every thread reads its own.
    """
    bias = problem.bias
    if bias is None or is_wide(problem) or problem.modifier is not None:
        return False
    if score_operands(problem) > 1 or problem.softcap or bias.dtype != problem.dtype:
        return False
    if problem.softmax_scale <= 0 and max(problem.head_dim, problem.head_dim_v) > 64:
        return False  # spills 8 bytes
    moved = [bias]
    if stores_dbias(problem):
        moved.append(dbias_layout(problem))
    for layout in moved:
        if layout.shape[-1] != problem.seqlen_k or (layout.shape[-1] > 1 and layout.strides[-1] != 1):
            return False
        if score_reasons_against("bias", layout, DTYPES[layout.dtype].itemsize):
            return False
    return True


def stores_dbias(problem: AttentionProblem) -> bool:
    """Whether dbias is one value a score; broadcast dims are summed by another kernel."""
    return problem.dbias and is_full_shape(problem)


def reasons_for_portable(problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int) -> list[str]:
    """Every reason why this family cannot serve ``problem``; empty when it can."""
    found = reasons_against_target(problem, arch, "backward_hopper")
    if problem.dtype not in DTYPES_16BIT:
        return found
    least = MIN_HEAD_DIM_BIAS if bias_as_tiles(problem) else MIN_HEAD_DIM
    for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if not least <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
            found.append(f"{name} is {head_dim}; accepted are multiples of 8 from {least} to {MAX_HEAD_DIM}")
    found += reasons_against_wide(problem) if is_wide(problem) else reasons_against_spills(problem)
    if problem.modifier is not None and is_wide(problem):
        found.append("score_mod or mask_mod beyond head dim 128, which the kernel of two thread blocks does not read")
    if problem.varlen and problem.bias is not None:
        found.append("bias with cu_seqlens")
    found += reasons_against_size(problem)
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


def has_one_key_tile(problem: AttentionProblem) -> bool:
    """Whether the kernel stores dq instead of adding it up: one tile of keys, of one sequence."""
    if problem.seqlen_k > BLOCK_N or problem.varlen or is_wide(problem):
        return False
    # With a dbias that threads write, a band and head dims of 120 or 128 it would spill 8 bytes.
    by_threads = stores_dbias(problem) and not bias_as_tiles(problem)
    return not (by_threads and problem.band and min(problem.head_dim, problem.head_dim_v) > 112)


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
    portable = portable_plan(problem, arch="sm_90", num_sms=num_sms, smem_limit=smem_limit)
    splits = splits_of(portable)
    if splits <= 2:
        return []
    return [f"{tiles} key tiles leave most of {num_sms} multiprocessors idle; queries split in {splits} fill more"]


def kernel_of(spec: BackwardPlanSpec) -> Launch:
    """The launch of the dk/dv kernel."""
    return next(launch for launch in spec.launches if launch.config.kernel in HOPPER_BACKWARD)


def dout_layout(problem: AttentionProblem) -> OperandLayout:
    """The layout of dout, dense where the problem names none."""
    return problem.dout or dense_layout((*problem.q.shape[:3], problem.head_dim_v), problem.dtype)


def config_of(problem: AttentionProblem, tile: Tile) -> HopperBackwardConfig:
    """The config of the dk/dv kernel of ``problem`` with ``tile``."""
    features = features_of(problem)
    features = replace(  # of what this kernel itself stores
        features,
        float32_q=features.float32_q and has_one_key_tile(problem),
        float32_k=features.float32_k and tile.splits == 1,
    )
    keep_words = uses_keep_words(problem)
    one_key_tile = has_one_key_tile(problem)
    config = HopperBackwardConfig(
        kernel="backward_hopper",
        arch="sm_90a",
        dtype=problem.dtype,
        head_dim=product_width(problem.head_dim),
        head_dim_v=product_width(problem.head_dim_v),
        block_m=tile.block_m,
        block_n=BLOCK_N,
        num_warps=4 + BLOCK_N // 16 + 4 * keep_words,
        num_stages=NUM_STAGES,
        features=features,
        log2_lse=reads_log2_lse(problem, features),
        one_key_tile=one_key_tile,
        dbias="store" if stores_dbias(problem) else "none",
        dbias_dtype=problem.bias.dtype if stores_dbias(problem) and problem.bias is not None else None,
        bias_tiles=bias_as_tiles(problem),
        keep_words=keep_words,
        key_mask=hides_keys(problem),
        ordered=problem.deterministic and not one_key_tile,
        fused=tile.fused,
        split=tile.splits > 1,
        parts=tile.parts > 1,
        # Not of 80 queries, whose dQ is computed transposed and takes the registers.
        own_code=tile.own_code and tile.block_m == 64,
        keys_in_registers=tile.keys_in_registers and tile.block_m == 64,
        values_in_registers=tile.values_in_registers and tile.block_m != 80,
        descending=tile.descending,
        begins_products=tile.begins_products,
    )
    if tile.wide:
        return wide_config(problem, config)
    if walks_words(problem):
        config = replace(with_words(config), tile_bits=tile.tile_bits)
    return replace(config, smem_bytes=smem_bytes(config))


def reads_log2_lse(problem: AttentionProblem, features: Features) -> bool:
    """Whether P's exponent is one fused operation: of products, and of what a plain modifier makes of them."""
    if problem.modifier is not None and problem.modifier.score is not None:
        return modifies_plainly(problem)
    if features.softcap or features.prescale:
        return False
    if problem.modifier is not None:
        return modifies_plainly(problem)
    return score_operands(problem) == 0 or uses_keep_words(problem) or hides_keys(problem)


def hides_keys(problem: AttentionProblem) -> bool:
    """Whether the mask, alone, is the same for all queries of a key head: [B, 1, 1, Mk], padding.

    A score then needs no byte of it, and P is known before dP, as without a mask.
    """
    if problem.mask is None or score_operands(problem) > 1 or problem.softcap or is_wide(problem):
        return False
    if problem.modifier is not None:
        return False
    _, heads, rows, _ = problem.mask.shape
    return rows == 1 and (heads == 1 or problem.num_heads == problem.num_heads_kv)


def walks_words(problem: AttentionProblem) -> bool:
    """Whether the kernel leaves out tiles that a mask hides; the two blocks of a wide tile compute all of them."""
    return not is_wide(problem) and not has_one_key_tile(problem) and words_pay(problem, BLOCK_N)


def can_have_bits(problem: AttentionProblem) -> bool:
    """Whether the kernel can read what a mask_mod keeps of undecided tiles: it asks about a whole tile at once."""
    return walks_words(problem) and modifies_plainly(problem) and may_have_bits(problem)


def prepare_warps(head_dim_v: int) -> int:
    """Warps of ``backward_hopper_prepare``: a thread for every eight columns of a row, a power of two of them."""
    vectors = ceil_div(head_dim_v, 8)
    return PREPARE_ROWS * (1 << (vectors - 1).bit_length()) // 32


def head_bytes(problem: AttentionProblem) -> int:
    """Q, dO and dq of a query head."""
    return problem.seqlen_q * (2 * problem.head_dim_v + 6 * problem.head_dim)


def head_group(problem: AttentionProblem, splits: int, workers: int, *, by_work: bool = False) -> int:
    """Key heads whose key tiles are handed out together, longest first: as many as stay in L2.

    1 without a band, unless ``by_work``: key tiles come in the order of what a mask leaves of them.

    With a band no fewer than run at the same time, or a group's longest tiles begin when nothing is left beside them:
    4096, 96 heads on 8, D 192, 2 instead of 1 take 0.89 of the time; 2 x 3072, 32 on 2 in eight splits, 8 instead of 4
    0.95. In the deterministic pass neighbouring key tiles of a head wait for each other: other heads come between.
    """
    if not (problem.band or by_work or problem.deterministic):
        return 1
    heads = problem.batch * problem.num_heads_kv * splits
    per_head = head_bytes(problem)
    l2_bytes = WIDE_L2_BYTES if is_wide(problem) else L2_BYTES
    fitting = l2_bytes // max(per_head * (problem.num_heads // problem.num_heads_kv // splits), 1)
    together = max(1, min(heads, fitting))
    if problem.deterministic or together == heads:
        return together
    if problem.window_left is not None and problem.window_right is not None:
        # Tiles of the same length walk through the heads of a group side by side: of each only the window is in L2.
        row = per_head // max(problem.seqlen_q, 1)
        window = problem.window_left + problem.window_right + 1
        fitting = (WINDOW_L2_BYTES - workers * BLOCK_N * row) // (window * row)
        running = min(8, 1 << max(fitting, 1).bit_length() - 1)
        even = next((x for x in range(running, together, -1) if heads % x == 0), together)
        return max(together, even)
    running_heads = workers / ceil_div(problem.seqlen_k, BLOCK_N)
    if together < 0.95 * running_heads:
        least = math.ceil(0.95 * running_heads)
        return next((x for x in range(least, min(2 * least, heads)) if heads % x == 0), min(least, heads))
    # All groups of one size: 28 heads in 4 groups of 7, not of 8, 0.93.
    return next((x for x in range(together, together // 2, -1) if heads % x == 0), together)


def fewer_of_fused(problem: AttentionProblem, together: int) -> int:
    """``together`` of `head_group`, or fewer where key tiles wait at the start until rows of their heads are prepared.

    16 instead of 32 to 256 heads up to 1024 keys: 0.94 to 0.96 of the time at head dim 64, 0.97 and 0.99 at 128; beyond
    1024, at head dim 64, 8 instead of 16 and 32: 0.98 to 1.00. Grouped heads have 8 and fewer (H200, 2026-11-24).
    """
    short = ceil_div(problem.seqlen_k, BLOCK_N) <= 8
    if not is_causal(problem) or problem.num_heads != problem.num_heads_kv:
        return together
    if not short and max(problem.head_dim, problem.head_dim_v) > 64:
        return together
    heads, most = problem.batch * problem.num_heads, 16 if short else 8
    if together <= most:
        return together
    return next((x for x in range(most, most // 2, -1) if heads % x == 0), most)


def query_step(num_m_blocks: int, num_n_blocks: int) -> int:
    """By how many query tiles a key tile begins after the one before it, times 4096: evenly over all of them, up to 2.

    Zero where the first rows of the last key tiles would not fit in 32 bits: 2^25 queries.
    """
    return min((num_m_blocks << 12) // num_n_blocks, MOST_STEP << 12) if num_m_blocks < 1 << 19 else 0


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
    if tile.heads_together is not None and not varlen:
        group = tile.heads_together
    shared = num_tiles - tile.whole if config.parts else 0
    num_tiles += shared * (tile.parts - 1)
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
    switches = {name: getattr(config, name) for name in ("log2_lse", "one_key_tile", "keep_words", "ordered")}
    prepare = HopperBackwardConfig(
        kernel="backward_hopper_prepare",
        **switches,
        **(shape | {"num_warps": prepare_warps(config.head_dim_v), "features": masked}),
        # Not more registers than those of dense problems need (40), for the sake of the one that makes the list.
        min_blocks_per_sm=48 // prepare_warps(config.head_dim_v) if varlen else 1,
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
        )
    )
    if config.split:
        features = Features(varlen=problem.varlen, float32_k=results.float32_k)
        convert_dkv = BackwardConfig(
            kernel="dkv_convert", **(shape | {"num_warps": 4, "block_m": 64, "features": features})
        )
        launches.append(
            Launch(
                config=convert_dkv,
                grid=key_tiles_of_head * problem.num_heads_kv,
                block=convert_dkv.num_threads,
                smem_bytes=0,
                params=(("num_n_blocks", num_n_blocks),),
            )
        )
    if shared:
        convert_parts = HopperBackwardConfig(kernel="dkv_hopper_convert", **shape)
        launches.append(
            Launch(config=convert_parts, grid=shared, block=convert_parts.num_threads, smem_bytes=0, params=schedule)
        )
        nbytes = 4 * shared * BLOCK_N * (config.head_dim + config.head_dim_v)
        workspaces.append(Workspace(field="dkv_accum", nbytes=nbytes, zeroed=True))
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
                smem_bytes=0,
                params=m_params,
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
        if tile.values_in_registers and max(problem.head_dim, problem.head_dim_v) > 64:
            tiles[replace(tile, own_code=True, keys_in_registers=True)] = None
    elif problem.varlen and not (score_operands(problem) or problem.softcap or problem.deterministic or tile.wide):
        tiles[replace(tile, **registers_of(problem))] = None
    if can_have_bits(problem):
        tiles[replace(tile, tile_bits=not tile.tile_bits)] = None
    if tile.splits > 1:
        tiles[replace(tile, splits=1)] = None
    # Parts where no table has them: one key tile, or so few that the multiprocessors are not half full.
    few = 4 * key_tiles(problem) <= 3 * num_sms and problem.seqlen_q >= 1024
    if few and tile.parts == tile.splits == 1 and can_share(problem) and not problem.band:
        tiles[replace(tile, parts=num_sms // max(key_tiles(problem), 1))] = None
    return [plan_spec(problem, x, num_sms=num_sms, smem_limit=smem_limit) for x in tiles]
