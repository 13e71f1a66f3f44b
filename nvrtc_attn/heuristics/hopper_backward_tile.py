"""The tile table of the Hopper backward kernel, and how many thread blocks share a key tile."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from ..front.problem import AttentionProblem
from ..modifiers.cuda import takes_registers
from .common import ceil_div, is_float32
from .hopper_backward_config import (
    BLOCK_N,
    Tile,
    begins_in_products,
    bias_as_tiles,
    can_have_bits,
    can_have_two_slots,
    has_one_key_tile,
    has_plain_scores,
    hides_keys,
    is_plain,
    modifies_plainly,
    reads_scores,
    stores_dbias,
    walks_words,
)
from .hopper_backward_schedule import (
    L2_BYTES,
    MOST_TILES_IN_TURN,
    TURNS_OF_PART,
    TURNS_OF_TILE,
    end_of_parts,
    even_group,
    head_bytes,
    head_group,
    in_turn,
    is_causal,
    row_bytes,
)
from .hopper_backward_wide import is_wide
from .hopper_common import mean_keys, mean_rows, product_width, score_operands
from .tile_words import bits_pay

TURNS_OF_NARROW_PART: Final = 3
"""The same of tiles of 128 queries, for `by_turns`: 13 documents of 897 tokens on average, 14 heads on 2, D 64, take
476 us whole and 380 in 7 blocks a group; 29 of 220, 9 on 3, 72 whole and 89 in 3 (H200, 2026-11-29)."""
MAX_PARTS: Final = 16
TURNS_OF_HALF: Final = 2.3
TURNS_OF_HALVES: Final = 7.5
LEAST_TURNS_OF_HALVES: Final = 2.5
TURNS_OF_NARROW_HALF: Final = 2.8
TURNS_OF_NARROW_HALVES: Final = 1.3
"""What `parts_of_few` counts with: for a part, and for adding up those of all key tiles, of as many as there are
multiprocessors, and at least; up to head dim 64 of any number."""
TURNS_OF_PART_APART: Final = 3.4
"""What a part takes that `choose_parts` makes, its share of the launch that adds them up included."""
TURNS_OF_EACH_PART: Final = 0.3
"""More of it for each of the parts of a key tile, which that launch reads."""
MIN_GAIN_OF_PARTS: Final = 2.0
"""In query tiles, about 2.4 us each: 1 x 1116 x 6, D 64, whole 36 us, in 2 parts 31 (H200, 2026-11-30)."""
LEAST_GAIN_OF_PARTS: Final = 0.015
LEAST_GAIN_OF_PARTS_FUSED: Final = 0.06
"""The same of the time of all key tiles, and where whole ones would be ``fused``, which parts cannot be."""
MOST_OF_GROUP: Final = 200 << 20
"""Bytes of Q, dO and dq of a group's heads that key tiles may read again and again."""
MIN_WAVES_CAUSAL: Final = 3.5
MIN_WAVES_PACKED: Final = 7.5
FUSED_BAND: Final = 4096
"""Queries up to which ``fused`` pays with a band, so that tiles have 64 and not 80 of them."""
FUSED_WINDOW: Final = 32768
"""The same with a window. Time of a kernel before over that of ``fused``: 1 x 65536 x 8, window 512, D 128, 0.90; 1 x
32768 x 16, window 1024, 1.01 (H200, 2026-11-29)."""
LEAST_WINDOW_FUSED: Final = 257
"""Keys of a window from which on idle warps prepare rows as fast as consumers use them. The same ratio, D 128: 1 x 7424
x 32, 128 keys 0.91, 256 0.97; 2 x 7424 x 16, 512 1.03, 1024 1.04 (H200, 2026-11-29)."""
LEAST_FUSED_NARROW: Final = 257
"""Queries from which on ``fused`` pays up to head dim 64, where other kernels have two slots of K. The same ratio: 64 x
256 x 12 0.88, causal 0.95; 32 x 512 x 16 1.04, 1.05 (H200, 2026-11-29)."""
SHORT: Final = 512
"""Queries up to which `fused_pays` looks at empty rows and at groups of heads."""
WINDOW_OF_80: Final = 2049
"""Keys of a window from which on tiles of 80 queries are as fast as those of 64. Time of 64 over that of 80, 1 x 14336
x 16: 128 keys 0.93, 512 0.94, 2048 0.99, 4096 1.00 (H200, 2026-11-29)."""
MOST_TURNS_OF_TWO_SLOTS: Final = {96: 12, 128: 7}
"""Query tiles of a mean key tile, of all heads of its group, up to which two slots of K pay, by the wider head dim."""
MIN_WAVES_FUSED: Final = {64: 2.0, 128: 3.0}
"""Key tiles of a multiprocessor from which on ``fused`` pays, by the queries of a tile. Its time over that without:
16 x 197 x 12 of D 64 (2.9 tiles) 1.04, 5 x 256 x 40 (3.0) 0.97, 3 x 400 x 40 (3.6) 0.95; 4 x 363 x 24 of D 96 (2.2)
0.96."""
MIN_WAVES_FUSED_BAND: Final = 4.0
"""The same with a band: D 64, 4 x 363 x 32 (2.9) 1.08, 20 x 150 x 12 (3.6) 1.08; D 128, 5 x 380 x 24 (2.7) 1.05."""
LEAST_GAIN_OF_64: Final = {80: 1.04, 128: 1.1}
LEAST_GAIN_OF_64_FUSED: Final = 1.2
"""How many times fewer rows tiles of 64 must have than those of 80 and 128 queries, for `fewer_empty`."""
MOST_IN_FLIGHT: Final = 40 << 20
"""Bytes of Q, dO and dq of the heads that causal key tiles in work read: more than that leaves L2 in between."""
MOST_IN_FLIGHT_WHOLE: Final = 80 << 20
"""The same where heads are not split yet, and dk and dv are not added up, and of wide heads, which gain 2 to 6 %."""
MOST_IN_FLIGHT_NARROW: Final = 60 << 20
"""`MOST_IN_FLIGHT_WHOLE` of more than 4096 queries up to head dim 64, whose split tiles have as many queries: 69 MB (1
x 10000, 64 on 8) in two and four blocks 0.99 and 0.97 of the time, 52 (1 x 8192, 48 on 8) 1.015 (H200, 2026-11-29)."""
MOST_IN_FLIGHT_PACKED: Final = 92 << 20
"""The limit of packed sequences, split or not; docs/experiments.md, "Packed sequences: key tiles by sequences"."""
MIN_TURNS_OF_SPLIT: Final = 48
"""Query tiles of a mean key tile below which adding up dk and dv costs more than that."""
FEW_TURNS: Final = 12
"""Query tiles of a mean key tile below which splits are chosen by `by_turns`."""
LEAST_GAIN_OF_SPLIT: Final = 1.04
"""Of the time of whole groups over that of more blocks a group, for `end_together`: split ones have smaller tiles."""
TURNS_OF_WIDE_PART: Final = 4
TURNS_OF_LAUNCHES: Final = 3
"""Clearing the sums of dk and dv, and the launch that converts them."""
LATE_PART: Final = 0.4
"""Of the longest tile, which is not the first that is handed out in every group of heads."""
TURNS_OF_DENSE_PART: Final = 4
LATE_DENSE_PART: Final = 0.6
"""`TURNS_OF_PART` and `LATE_PART` for `by_turns`, of dense problems. Time with 5 and 0.4 over time with these, causal,
D 128: 3 x 283, 24 on 8 (1 and 3 blocks) 1.06; 2 x 400, 32 on 8 (2, 4) 1.09; 5 x 330, 16 on 4 (2, 4) 1.03; 4 x 250, 40
on 8 (1, 5) 1.03; 2 x 129, 48 on 8 (6, 3) 1.03 (H200, 2026-11-30)."""


def choose_tile(problem: AttentionProblem, num_sms: int) -> Tile:
    """The tile of ``problem`` on ``num_sms`` multiprocessors."""
    tile = tile_of_queries(problem, num_sms)
    return replace(tile, key_slots=2 if two_slots_pay(problem, tile) else 1)


def tile_of_queries(problem: AttentionProblem, num_sms: int) -> Tile:
    """The tile table; what lost is in docs/experiments.md, "Hopper backward: tiles" (H200, 2026-11-21).

    128 queries fit in registers up to head dim 64 only. Beyond it 80 with plain scores read 7.5 % less shared memory
    than 64 and are up to 9 % faster. ``fused`` saves a launch, 2 to 12 % up to 2048 queries (4096 with a band), but
    with two key tiles a multiprocessor or fewer all of them wait for their rows at once. V in registers is 1 to 4 %
    faster up to head dim 96, and at 72 and 80 columns dQ's products without padding 1 to 3 % more (2026-11-22).
    """
    if is_wide(problem):
        # The figures of this one: hopper_backward_wide.py.
        return Tile(block_m=64, wide=True, splits=choose_splits(problem, num_sms))
    bits = can_have_bits(problem) and bits_pay(problem, BLOCK_N)
    # What a score needs beside its product takes the registers of half of the queries.
    plain = not reads_scores(problem)
    if problem.modifier is not None:
        plain = modifies_plainly(problem) and not takes_registers(problem.modifier)
        # What a mask_mod keeps takes two registers of 128 queries: 64 spare what asking takes.
        plain = plain or (bits and problem.modifier.score is None)
    begins = begins_in_products(problem)
    block_m = most_queries(problem) if (plain or begins) and not problem.softcap else 64
    tile = Tile(block_m=block_m, splits=choose_splits(problem, num_sms), tile_bits=bits, begins_products=begins)
    if not is_plain(problem):
        if is_packed_plainly(problem):
            registers = registers_of(problem) if max(problem.head_dim, problem.head_dim_v) > 64 else {}
            # From the last row down, as dense ones: 0 to 3 % less time of nine in ten (H200, 2026-11-29).
            return replace(tile, descending=is_causal(problem), **registers)
        parts, whole = choose_parts(problem, block_m, num_sms, LEAST_GAIN_OF_PARTS)
        return replace(tile, parts=parts, whole=whole, splits=1) if parts > 1 else tile
    fused = fused_pays(problem, block_m, tile.splits * key_tiles(problem) / num_sms)
    widths = [product_width(x) for x in (problem.head_dim, problem.head_dim_v)]
    # Blocks of dq of 80 queries are turned round in 16 bits.
    transposed = min(widths) == 128 and not is_float32(problem, "dq")
    least_gain = LEAST_GAIN_OF_PARTS_FUSED if fused else LEAST_GAIN_OF_PARTS
    parts, whole = choose_parts(problem, 80 if transposed else block_m, num_sms, least_gain)
    fused, splits = fused and parts == 1, 1 if parts > 1 else tile.splits
    transposed = transposed and not fused
    # Rows from the last one down, where key tiles do not begin with preparing them: 2 to 4 % less time; whole heads of
    # 80 to 128 columns gain nothing or lose 5 %. docs/experiments.md, "Hopper backward: who has which key tile, when".
    descending = is_causal(problem) and not fused and (max(widths) <= 64 or splits > 1 or parts > 1)
    tile = replace(
        tile, fused=fused, splits=splits, parts=parts, whole=whole, descending=descending, **registers_of(problem)
    )
    # Of heads that are split 64 are 5 % faster with a window, but 80 of long causal ones 1.3 to 3.3 %: 1 x 6144 and
    # 2 x 8192, 64 heads on 8, 1 x 7717, 32 on 4, 1 x 8192, 32 on 2, 48 on 1 (H200, 2026-11-30).
    whole_heads = splits == 1 or (is_causal(problem) and problem.seqlen_q > FUSED_BAND)
    few_keys = problem.window_left is not None and window_of(problem) < WINDOW_OF_80
    wide = 80 if transposed and whole_heads and not few_keys else block_m
    return replace(tile, block_m=fewer_empty(problem, wide, fused) if parts == 1 or problem.band else wide)


def window_of(problem: AttentionProblem) -> int:
    """Keys that a query sees at most: those of a window, or all."""
    if problem.window_left is None:
        return problem.seqlen_k
    right = problem.seqlen_k if problem.window_right is None else problem.window_right
    return min(problem.window_left + 1 + right, problem.seqlen_k)


def fused_pays(problem: AttentionProblem, block_m: int, waves: float) -> bool:
    """Whether ``fused`` takes less time than a kernel before, with ``waves`` key tiles a multiprocessor.

    Short causal key tiles of grouped heads begin with rows of too many heads: 32 x 512, 32 on 8, 0.91 (D 64) and 0.94
    of the speed, but 16 x 1024 1.03, 1.02. Up to head dim 64 a kernel before, with two slots of K, is faster with
    windows (4 x 3072 x 16, 128 keys 1.14, 512 1.04), for few queries, and where 64 leave fewer rows empty than 128
    (64 x 300 x 12 1.00, causal 1.07; H200, 2026-11-29).
    """
    least = MIN_WAVES_FUSED_BAND if problem.band else MIN_WAVES_FUSED[block_m]
    if waves <= least or problem.seqlen_q > 2 * problem.seqlen_k:
        return False
    narrow, window = max(problem.head_dim, problem.head_dim_v) <= 64, problem.window_left is not None
    short = problem.seqlen_q <= SHORT
    if narrow and (window or problem.seqlen_q < LEAST_FUSED_NARROW):
        return False
    if narrow and short and fewer_empty(problem, 128, False) == 64:
        return False
    if short and is_causal(problem) and problem.num_heads > problem.num_heads_kv:
        return False
    if window:
        return window_of(problem) >= LEAST_WINDOW_FUSED and problem.seqlen_q <= FUSED_WINDOW
    return problem.seqlen_q <= (FUSED_BAND if problem.band else 2048)


def two_slots_possible(problem: AttentionProblem) -> bool:
    """Whether a kernel of whole key tiles can have two slots of K: idle warps store dk and dv, in 16 bits."""
    return (is_plain(problem) or is_packed_plainly(problem)) and not is_float32(problem, "dk", "dv")


def two_slots_pay(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether K of the next key tile has a slot of its own, and dk and dv leave by idle warps.

    Time of one slot over that of two: D 64, 200 x 197 packed 1.12, 64 x 256 1.17, 32 x 512 1.06, 16 x 1024 1.03, 4 x
    4096 1.00; D 72 to 96, packed 1.02 to 1.05, 2 x 8192 causal 0.98; D 128, windows of 128 and 256 1.02, packed 100 x
    300 1.02, 64 x 1024 0.99. docs/experiments.md, "Hopper backward: two slots of K" (H200, 2026-11-29).
    """
    if not two_slots_possible(problem) or not can_have_two_slots(tile):
        return False
    width = max(product_width(x) for x in (problem.head_dim, problem.head_dim_v))
    if problem.varlen and 64 < width <= 96:
        return True
    turns = problem.num_heads // max(problem.num_heads_kv, 1) * turns_of_head(problem)[0]
    return turns <= next(most for limit, most in MOST_TURNS_OF_TWO_SLOTS.items() if width <= limit)


def fewer_empty(problem: AttentionProblem, block_m: int, fused: bool) -> int:
    """Queries of a tile: ``block_m``, or 64 where so many fewer rows of tiles stay empty.

    Over 80 queries: 3 x 247 x 32, D 128, 1.13, causal 1.20; 1 x 896 x 32 1.04; 200 to 450 queries of which 64 leave as
    many empty 0.95 to 1.02. Over 128: 3 x 300 x 24, D 64, 1.06, causal 1.09; 4 x 500 x 16 0.96; ``fused`` 64 x 190 x 12
    1.15, but 100 x 286 x 20 1.00 and 28 x 522 x 40 0.97 (H200, 2026-11-29).
    """
    if block_m == 64:
        return block_m
    least = LEAST_GAIN_OF_64_FUSED if fused else LEAST_GAIN_OF_64[block_m]
    rows, narrow = (ceil_div(problem.seqlen_q, n) * n for n in (block_m, 64))
    return 64 if least * narrow < rows else block_m


def is_packed_plainly(problem: AttentionProblem) -> bool:
    """Whether nothing but lengths and positions decides the scores of packed sequences."""
    other = score_operands(problem) or problem.softcap or problem.modifier is not None
    return problem.varlen and not (other or problem.seqused_k or problem.deterministic or is_wide(problem))


def most_queries(problem: AttentionProblem) -> int:
    """Queries of the largest tile of plain scores that may be ``fused``."""
    return 128 if max(problem.head_dim, problem.head_dim_v) <= 64 else 64


def registers_of(problem: AttentionProblem, *, keys: bool = True) -> dict[str, bool]:
    """What of a tile of plain scores stays in registers, and whether consumers have code of their own.

    K beside V from 65 columns on, with a dQ of no more columns than there are: 1 to 6 % less time at head dims 72 to 96
    (4 x 4096 x 16, D 96 2.05 and 1.97 ms, D 80 1.83 and 1.74), packed ones 1 to 7 % (H200, 2026-11-29).
    """
    widths = [product_width(x) for x in (problem.head_dim, problem.head_dim_v)]
    # A scale that is not positive is one operand more: 8 bytes would spill at head dim 64.
    values = max(widths) <= 96 and problem.softmax_scale > 0
    # Of packed sequences with a band 12 bytes would spill at head dim 96.
    keys = keys and values and widths[0] > 64 and not (problem.varlen and problem.band and min(widths) == 96)
    return {"own_code": widths[0] == 80 or keys, "values_in_registers": values, "keys_in_registers": keys}


def key_tiles(problem: AttentionProblem) -> int:
    """Key tiles of all key heads and sequences; of packed ones what the tensor can hold."""
    tiles = problem.batch * ceil_div(problem.seqlen_k, BLOCK_N)
    if problem.varlen:
        tiles = min(tiles, problem.k.shape[1] // BLOCK_N + problem.batch)
    return problem.num_heads_kv * tiles


def choose_splits(problem: AttentionProblem, num_sms: int) -> int:
    """Thread blocks that share the query heads of a group: as few as keep multiprocessors busy and their rows in L2.

    Causal tiles have unequal work: four a multiprocessor, of packed sequences, whose longest are not known, eight.
    Time with as few over time with twice as many, 32 heads on 8: 0.93 (16 x 1024), 0.93 (2 x 8192), 0.83 (packed 16 x
    1024). Where tiles drift over the heads of a group (`keep_in_l2`) 4 and 8 instead of 1 and 2 take 0.90 and 0.89
    of the time; docs/experiments.md, "Hopper backward: who has which key tile, when". Few turns: `by_turns`.
    """
    if problem.deterministic or not problem.num_heads_kv:
        return 1
    if is_wide(problem):
        # Of other scores clusters do not share the query heads of a tile.
        if not has_plain_scores(problem):
            return 1
        splits = keep_in_l2(problem, 1, num_sms)
        few = 2 * splits * key_tiles(problem) < MIN_WAVES_CAUSAL * num_sms
        return by_turns(problem, num_sms // 2) if few else splits
    if bias_as_tiles(problem) and stores_dbias(problem):
        return 1  # the loading warp, which writes its zeros, has no register for both
    group = problem.num_heads // problem.num_heads_kv
    splits = group
    for fewer in range(1, group):
        waves = fewer * key_tiles(problem) / num_sms
        enough = MIN_WAVES_PACKED if problem.varlen else MIN_WAVES_CAUSAL
        if group % fewer == 0 and (waves >= enough or (not problem.band and waves >= 0.95 * math.ceil(waves))):
            splits = end_together(problem, keep_in_l2(problem, fewer, num_sms), num_sms)
            break
    few = splits > 1 and group // splits * turns_of_head(problem)[0] < FEW_TURNS
    return by_turns(problem, num_sms) if few else splits


def turns_of_head(problem: AttentionProblem) -> tuple[float, int]:
    """Query tiles of one head that see a key tile: on average, and the most of any sequence."""
    block_m = 64 if is_wide(problem) else most_queries(problem)
    mean, most = float(ceil_div(mean_rows(problem), block_m)), ceil_div(problem.seqlen_q, block_m)
    if problem.window_left is not None:
        right = problem.seqlen_q if problem.window_right is None else problem.window_right
        window = problem.window_left + BLOCK_N + right
        mean, most = min(mean, window / block_m + 1), min(most, ceil_div(window, block_m) + 1)
    elif problem.window_right is not None:  # a key tile less of the queries each
        mean = max(mean - (ceil_div(mean_keys(problem), BLOCK_N) - 1) / 2 * BLOCK_N / block_m, 1.0)
    return mean, most


def by_turns(problem: AttentionProblem, workers: int) -> int:
    """Thread blocks that share the query heads of a group where key tiles have few turns, by an estimate of the time.

    In turns: what a tile takes beside them, all tiles on all ``workers``, and a part of the longest, which may begin
    late; of those within 3 % the most. Adding dk and dv up takes as long as several query tiles: 2 x 261, 24 heads on
    8, in 3 blocks each 61.6 us, whole 50.4; packed 30 x 200, 12 on 2, in 6 blocks 170, whole 113. But a whole group of
    few wide tiles is one long wave: 1 x 4096, 8 on 1, D 256, 1174 us, in 8 blocks 377 (H200, 2026-11-29).
    """
    group, tiles = problem.num_heads // problem.num_heads_kv, key_tiles(problem)
    mean, most = turns_of_head(problem)
    uneven = problem.varlen or is_causal(problem)
    narrow = max(problem.head_dim, problem.head_dim_v) <= 64
    beside, launches, late = TURNS_OF_NARROW_PART if narrow else TURNS_OF_PART, TURNS_OF_LAUNCHES, LATE_PART
    if is_wide(problem):
        beside, launches = TURNS_OF_WIDE_PART, 0
    elif not problem.varlen:
        beside, late = min(beside, TURNS_OF_DENSE_PART), LATE_DENSE_PART

    def time(splits: int) -> float:
        heads = group // splits
        own = TURNS_OF_TILE if splits == 1 else beside
        if uneven:
            all_tiles = tiles * splits * (heads * mean + own) / workers
            found = max(heads * most + own, all_tiles + late * heads * most)
        else:
            found = ceil_div(tiles * splits, workers) * (heads * mean + own)
        return found + (launches if splits > 1 else 0)

    divisors = [x for x in range(1, group + 1) if group % x == 0]
    least = min(map(time, divisors))
    return max(x for x in divisors if time(x) <= 1.03 * least)


def keep_in_l2(problem: AttentionProblem, splits: int, num_sms: int) -> int:
    """``splits``, or more: until what key tiles in work read at a time stays in L2, or a split would have few tiles.

    Causal key tiles of a head have different numbers of query tiles, so that blocks come to read different heads of
    their groups. Query tiles are counted as those of plain scores. 86 MB in five blocks a group (1 x 14336, 40 heads
    on 8) take 0.98 of the time, 69 of two blocks (1 x 12288, 64 on 8) in four 0.97; 69 whole (2 x 6400, 40 on 10) gain
    nothing (D 128, H200, 2026-11-29). Packed sequences count as so many of their mean length; wide ones not measured.
    """
    if not is_causal(problem) or (problem.varlen and is_wide(problem)):
        return splits
    rows = mean_rows(problem)
    bytes_of_head = rows * row_bytes(problem)
    if bytes_of_head > L2_BYTES:
        return splits
    group = problem.num_heads // problem.num_heads_kv
    tiles_of_head = ceil_div(mean_keys(problem), BLOCK_N)
    turns = ceil_div(rows, most_queries(problem)) / 2  # of a mean key tile and one query head
    workers = num_sms // 2 if is_wide(problem) else num_sms
    for more in range(splits, group + 1):
        if group % more:
            continue
        heads = min(workers / tiles_of_head, problem.batch * problem.num_heads_kv * splits)
        in_flight = heads * (group // splits) * bytes_of_head
        if in_flight <= most_in_flight(problem, splits) or group // more * turns < MIN_TURNS_OF_SPLIT:
            break
        splits = more
    return splits


def end_together(problem: AttentionProblem, splits: int, num_sms: int) -> int:
    """``splits``, or more: where the longest causal key tiles of the last group of heads would run alone.

    1 x 8995, 40 heads on 10, is five groups of two heads: 3.81 ms. In two blocks a group of heads, five groups of four
    of these, 3.43 (H200, 2026-11-30).
    """
    group = problem.num_heads // problem.num_heads_kv
    if not is_causal(problem) or problem.varlen or splits * key_tiles(problem) > MOST_TILES_IN_TURN:
        return splits

    def time(count: int) -> float:
        together = even_group(problem, count, num_sms, head_group(problem, count, num_sms))
        return in_turn(problem, count, num_sms, together)[0]

    found = time(splits)
    turns = ceil_div(problem.seqlen_q, most_queries(problem)) / 2  # of a mean key tile and one query head
    for more in range(splits + 1, group + 1):
        if group % more or more * key_tiles(problem) > MOST_TILES_IN_TURN or group // more * turns < MIN_TURNS_OF_SPLIT:
            continue
        if LEAST_GAIN_OF_SPLIT * time(more) <= found:
            return more
    return splits


def most_in_flight(problem: AttentionProblem, splits: int) -> int:
    """Bytes of Q, dO and dq that key tiles in work may read, with ``splits`` thread blocks a group."""
    if problem.varlen:
        return MOST_IN_FLIGHT_PACKED
    if splits > 1 and not is_wide(problem):
        return MOST_IN_FLIGHT
    long = problem.seqlen_q > FUSED_BAND
    return MOST_IN_FLIGHT_NARROW if long and most_queries(problem) == 128 else MOST_IN_FLIGHT_WHOLE


def can_share(problem: AttentionProblem) -> bool:
    """Whether thread blocks can share the query tiles of a key tile: registers suffice, and lengths alone say which."""
    on_device = problem.varlen or problem.seqused_k or problem.deterministic
    scores = score_operands(problem) == 0 or (hides_keys(problem) and not walks_words(problem))
    return scores and not (problem.softcap or on_device or is_wide(problem))


def choose_parts(problem: AttentionProblem, block_m: int, num_sms: int, least_gain: float) -> tuple[int, int]:
    """Parts of a key tile's query tiles, each a thread block's, and how many key tiles before those stay whole.

    Those that do not fill the last wave are shared, if it ends earlier by ``least_gain`` of all waves: 1 x 2887 x 24, D
    128, 4.2 waves, 1.12 times as fast, 1 x 3300 x 16, D 64, 3.2, 1.17, 1 x 8000 x 24, D 128, 11.5, 1.03, 1 x 2500 x
    16, D 80, 2.4, 1.13; docs/experiments.md, "Hopper backward: the last key tiles in parts" (H200, 2026-11-30).
    Grouped heads far too large for L2 have a query head a part: 0.92 of the time (1 x 16384, 64 on 4, causal).
    """
    group = problem.num_heads // max(problem.num_heads_kv, 1)
    tiles = key_tiles(problem)
    short = has_one_key_tile(problem) and has_plain_scores(problem) and not (problem.deterministic or problem.band)
    if not (is_plain(problem) or short) or not tiles or is_float32(problem, "dk", "dv"):  # parts write the type of k
        return 1, 0
    if problem.band:
        if is_causal(problem) and group == 1 and tiles <= num_sms:
            return parts_of_few(problem, block_m, num_sms), 0
        bytes_of_head = head_bytes(problem)
        drifts = is_causal(problem) and group * bytes_of_head > MOST_OF_GROUP and bytes_of_head <= L2_BYTES
        return (group if drifts and num_sms <= 2 * tiles <= 16 * num_sms else 1), 0
    if group > 1:  # heads are split
        return 1, 0
    turns, whole = ceil_div(problem.seqlen_q, block_m), tiles // num_sms * num_sms
    of_waves = whole // num_sms * (turns + TURNS_OF_TILE)
    if whole == tiles:
        return 1, 0

    def time(parts: int) -> float:
        beside = TURNS_OF_PART_APART + TURNS_OF_EACH_PART * parts if parts > 1 else TURNS_OF_TILE
        return of_waves + ceil_div((tiles - whole) * parts, num_sms) * (ceil_div(turns, parts) + beside)

    most = min(MAX_PARTS, turns, 2 * num_sms // (tiles - whole))
    parts = min(range(1, most + 1), key=time)
    return (parts, whole) if time(1) - time(parts) >= max(MIN_GAIN_OF_PARTS, least_gain * time(1)) else (1, 0)


def parts_of_few(problem: AttentionProblem, block_m: int, num_sms: int) -> int:
    """1 or 2 parts of each key tile of a causal pass whose whole ones could have a block each: long ones end last.

    By an estimate in query tiles. Time whole over time in 2 parts, D 128: 1 x 1024 x 16 0.83, 1 x 2048 x 8 1.06, 1 x
    768 x 8 1.17, 1 x 4096 x 4 1.31, 1 x 8192 x 2 1.55; D 72, 1 x 2048 x 6 1.33; D 64, 1 x 512 x 16 0.97, 1 x 1024 x 12
    1.06, 1 x 4096 x 4 1.39. In 3 parts 0.72 to 1.24; only the longest tiles in parts 0.79 to 1.47; 144 to 256 tiles
    0.82 to 0.97 (H200, 2026-11-30).
    """
    beside, launch = TURNS_OF_HALF, max(TURNS_OF_HALVES * key_tiles(problem) / num_sms, LEAST_TURNS_OF_HALVES)
    if max(problem.head_dim, problem.head_dim_v) <= 64:
        beside, launch = TURNS_OF_NARROW_HALF, TURNS_OF_NARROW_HALVES
    whole, halves = (end_of_parts(problem, block_m, n, num_sms, (TURNS_OF_TILE, beside)) for n in (1, 2))
    return 2 if halves + launch <= whole else 1
