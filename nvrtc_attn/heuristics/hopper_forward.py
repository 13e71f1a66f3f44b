"""Forward pass of the Hopper family: which tile for which problem, or why the portable family must do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..base.dtypes import DTYPES
from ..front.problem import AttentionProblem
from ..jit.config import Features, HopperForwardConfig
from ..modifiers.cuda import computes_little, takes_registers
from .common import MEASURED_SMS, ceil_div, features_of, is_vectorizable, packed_slots, tile_of
from .hopper_common import (
    DTYPES_16BIT,
    MIN_QUERY_ROWS,
    SMEM_LIMIT,
    TileList,
    begins_products,
    diagonal_bytes,
    product_width,
    reasons_against_size,
    reasons_against_target,
    score_operands,
    tile_list,
)
from .hopper_forward_tile import KEY_TILE_OVERHEAD_COLUMNS, Tile, key_tiles_of_rows
from .hopper_small import moved_bytes, several_blocks, shared_width, small_tile
from .spec import ForwardPlanSpec, Launch
from .tensor_map import TensorMap, packed_map, reasons_against, score_map, score_reasons_against, tensor_map
from .tile_words import TileBits, bits_bytes, bits_pay, may_have_bits, plan_launch, with_words, words_of
from .tile_words import pays as words_pay

Array: TypeAlias = npt.NDArray[Any]

MAX_HEAD_DIM: Final = 256
L2_BYTES: Final = 40 << 20
"""What stays in an L2 of 50 to 60 MB beside queries and outputs."""
BLOCKS_SHARING_A_HEAD: Final = 8
LIST_WARPS: Final = 32
"""Of the thread block that lists the tiles of packed sequences: all there can be, because there is one block."""
HANDED_OUT_FLOPS: Final = {"bias": 1.2e8, "uneven": 4e8, "window": 2e8, "even": 1e9, "wide": 4e9}
MIN_TILES_HANDED_OUT: Final = 7
"""From where query tiles are handed out (`hands_out`): work of a multiprocessor, tiles of a block where they differ."""
TILE_OVERHEAD_COLUMNS: Final = 128.0
"""What a query tile costs beside its key tiles (first product and last one alone, output), in columns of keys: H200,
2026-11, from lengths 512 to 16384."""

FITS_KEYS: Final = True
"""Whether plain scores of few keys get a tile of which less stays empty (`fitted_columns`): 112 keys take 8 to 9 % less
time for 197 and 196 of them, 96 keys 14 % less for 257 (H200, 2026-11-22; part ``fit`` of ``benchmarks/short.py``)."""
LEAST_FIT: Final = 1.04
"""What a narrower tile must gain by `fitted_columns`: it costs the third slot for K and V at head dim 64."""
PACKS_HEADS: Final = True
"""Whether tables and the autotuner pack heads where it pays (`packs_heads`): 16 queries of 64 heads on 8 with 4096 keys
80 us instead of 122, 64 queries of 16 heads on 4 34 instead of 43 (H200, 2026-11-22)."""


def smem_bytes(config: HopperForwardConfig) -> int:
    """Dynamic shared memory of one thread block; the map is at the head of ``forward_hopper.cuh``."""
    slabs_q, slabs_v = ceil_div(config.head_dim, 64), ceil_div(config.head_dim_v, 64)
    rows = config.num_stages_q * config.block_m * slabs_q + config.num_stages * config.block_n * (slabs_q + slabs_v)
    scores = _score_bytes(config)
    barriers = 16 * config.num_stages_scores if scores else 0
    barriers += 8 * config.num_stages if config.features.mask else 0
    barriers += 16 * config.features.tile_words
    barriers += config.num_stages * bits_bytes(config.block_m, config.block_n) * config.tile_bits
    if config.begins_products:
        barriers += diagonal_bytes(config.block_m, config.block_n, config.num_stages)
    barriers += 8 * config.num_threads * (config.features.max_logit and config.lazy_max)  # noted maxima
    announced = (32 if config.features.varlen else 16) * config.num_stages_q
    return 128 * rows + scores + announced + 16 * config.num_stages_q + 32 * config.num_stages + barriers


def _score_bytes(config: HopperForwardConfig) -> int:
    """Shared memory of bias and mask tiles; ``cuda_src/nvrtc_attn/hopper/forward/score_tile.cuh``."""
    if not config.score_tiles:
        return 0
    bias = config.features.bias
    row = (DTYPES[bias].itemsize if bias else 0) + int(config.features.mask)
    return config.num_stages_scores * config.block_m * config.block_n * row


def choose_tile(problem: AttentionProblem, num_sms: int = MEASURED_SMS) -> Tile:
    """The tile of ``problem``: of 64 query rows where that is faster, else by the table."""
    tile = large_tile(problem, num_sms)
    return small_tile(problem, tile, num_sms) or tile


def large_tile(problem: AttentionProblem, num_sms: int = MEASURED_SMS) -> Tile:
    """The tile table, and whether a launch of its own asks a mask_mod about undecided tiles.

    Without bits where tiles of a float32 bias leave them no shared memory.
    """
    if bits_pay(problem, 128):
        tile = tile_with_bits(problem, num_sms)
        if smem_bytes(config_of(problem, tile)) <= SMEM_LIMIT:
            return tile
    return replace(tile_without_bits(problem, num_sms), begins_products=begins_products(problem))


def tile_with_bits(problem: AttentionProblem, num_sms: int) -> Tile:
    """The tile where the kernel reads what a mask keeps, so that what it computes does not matter."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest <= 64 and has_mask_alone(problem) and _rows_of_narrow(problem, num_sms) == 192:
        return Tile(block_m=192, block_n=fitted_columns(problem, 96), num_stages_q=2, lazy_max=True, tile_bits=True)
    return replace(tile_without_bits(problem, num_sms), half_tile=False, tile_bits=True)


def tile_without_bits(problem: AttentionProblem, num_sms: int) -> Tile:
    """The tile table. Each row says why it is what it is; all figures, and what lost, are in docs/experiments.md.

    There, under "Hopper forward: tiles": H200, 2026-11-20 and 21, bfloat16, TFLOP/s of the launch alone.
    """
    widest = max(ceil_div(problem.head_dim, 64), ceil_div(problem.head_dim_v, 64)) * 64
    tile = _score_tile(problem, widest)
    if tile is not None:
        return tile
    operands = score_operands(problem)
    # Bias and mask that every thread reads for itself wait in registers, which come out of the tile.
    direct = problem.bias is not None or problem.mask is not None
    lazy = operands < 2
    # Half of a diagonal tile saved is 4 to 10 % up to 1024 rows; later its second product only costs registers.
    diagonal = problem.window_right is not None and not (problem.varlen or problem.seqused_k)
    begins = begins_products(problem)
    mapped = problem.softcap > 0 or problem.softmax_scale <= 0 or (problem.modifier is not None and not begins)
    if widest <= 64 and has_light_mask(problem) and _rows_of_narrow(problem, num_sms) == 192:
        return Tile(block_m=192, block_n=fitted_columns(problem, 96), num_stages_q=2, lazy_max=True)
    if problem.modifier is not None and not begins and takes_registers(problem.modifier):
        operands += 1  # what it reads waits in registers, too
    if widest <= 64:
        if direct:
            wide = problem.bias is not None and problem.bias.dtype != "float32" and lazy
            return Tile(block_m=128, block_n=128 if wide else 112 if lazy else 80, num_stages_q=2, lazy_max=lazy)
        if operands:
            # Wider key tiles make more decisions beside each product: 128 columns take 8 % less time than 96.
            lengths = problem.varlen or problem.seqused_k
            return Tile(block_m=128, block_n=112 if lengths else 128, num_stages_q=2, lazy_max=True)
        # Three consumers of 64 rows read each key tile once: 573 at 4096, against 464 with two. Lengths on the device
        # take registers, and so do scores that are more than products. With few keys (cross-attention to 77 tokens) a
        # tile is no wider than they are, which saves a sixth of the time.
        rows = _rows_of_narrow(problem, num_sms)
        lengths = problem.varlen or problem.seqused_k
        wide = rows == 192 and _long_documents(problem)
        # Products that begin with a value would spill 52 to 60 bytes of a thread with 128 columns.
        columns = 112 if rows == 192 and (lengths or mapped or begins) and not wide else 128
        if not lengths:
            columns = min(columns, max(32, ceil_div(problem.seqlen_k, 16) * 16))
        # A third slot for K and V brings the keys of the next query tile in time, 3 to 6 % up to 2048. With it and a
        # half tile ptxas serialises the products (C7511, 14 % slower), as it does with a half tile and mapped scores.
        columns = fitted_columns(problem, columns)
        third = rows == 192 and columns == (112 if begins else 128) and not lengths and not problem.band
        return Tile(
            block_m=rows,
            block_n=columns,
            num_stages=3 if third else 2,
            num_stages_q=2,
            half_tile=(diagonal and not mapped and problem.seqlen_q <= 2048 and columns == 128)
            or (wide and problem.band),
            lazy_max=True,
        )
    if widest <= 128:
        if direct:
            return Tile(block_m=128, block_n=96 if lazy else 64, num_stages_q=2, lazy_max=lazy)
        if (between := _tile_between(problem, num_sms)) is not None:
            return between
        # A second slot for Q hides the load of the next query tile and still leaves room for 128 keys: 708 at 4096,
        # against 667 with 176 keys and one slot. A third slot for K and V in its place is 5 % slower at 1024.
        # With max_logit ptxas serialises the products of a half tile (C7511).
        half = diagonal and problem.seqlen_q <= 1024 and not (operands or mapped or problem.return_max_logit)
        # With dropout and 80 columns of output, of all widths, ptxas spills 32 bytes at 128 keys.
        columns = 112 if operands and ceil_div(problem.head_dim_v, 16) == 5 else fitted_columns(problem, 128)
        return Tile(block_m=128, block_n=columns, num_stages_q=2, half_tile=half, lazy_max=True)
    if widest <= 192:
        if direct:
            return Tile(block_m=128, block_n=64 if lazy else 48)
        # Where values are narrow the output leaves the registers of head dim 128: 128 keys with `lazy_max` take 10 %
        # less time than 96 or 112 without. With values of 192 columns wider causal tiles are 2 % faster at 4096.
        plain = not (operands or mapped or problem.further_inputs or problem.modifier is not None)
        if plain and problem.head_dim_v <= 128 and not problem.seqused_k:
            return Tile(block_m=128, block_n=128, lazy_max=True)
        short = problem.varlen or problem.seqused_k or problem.seqlen_q < 2048
        return Tile(block_m=128, block_n=96 if operands or (problem.band and (short or not plain)) else 112)
    # The 128 accumulator registers of the output leave none for lazy_max (3 % slower at 4096), and the products are
    # long enough not to need turns. Shorter key tiles waste less on the diagonal, 8 % at 512.
    short = problem.window_right is not None and problem.seqlen_q <= 1024
    if operands:
        # With dropout and softcap 48 columns spill four bytes.
        return Tile(block_m=128, block_n=32 if problem.dropout_p > 0 and problem.softcap > 0 else 48, ping_pong=False)
    # 512 keys are 6.4 tiles of 80, of which the last is mostly empty: 64 are 2 % faster. 1024 are 12.8: 3 % slower.
    fits = 1.06 * 64 * ceil_div(problem.seqlen_k, 64) < 80 * ceil_div(problem.seqlen_k, 80)
    return Tile(block_m=128, block_n=64 if short or fits else 80, ping_pong=False)


def has_light_mask(problem: AttentionProblem) -> bool:
    """Whether a mask_mod, and nothing else, goes with the scores, and reads and computes little of a key.

    Three consumers of 64 rows then have registers for it with 96 keys, with 128 they spill 4 to 16 bytes. 2 x 8192, 16
    heads, D 64, us with 192 x 96 and 128 x 128: prefix-LM 644 and 808, window and first keys 227 and 241, a
    neighbourhood 213 and 278, chunks 176 and 155; documents, which read an array, 451 and 385 (H200, 2026-11-23).
    """
    mask = None if problem.modifier is None else problem.modifier.mask
    return mask is not None and has_mask_alone(problem) and computes_little(mask)


def has_mask_alone(problem: AttentionProblem) -> bool:
    """Whether a mask_mod, and nothing else, goes with the scores."""
    program = problem.modifier
    if program is None or program.score is not None or program.mask is None:
        return False
    other = score_operands(problem) or problem.softcap or problem.softmax_scale <= 0 or problem.further_inputs
    return not (other or problem.varlen or problem.seqused_k)


def may_pack_heads(problem: AttentionProblem) -> bool:
    """Whether the query heads of a key head can be rows of one tile: nothing but scores, a group that a tile holds.

    The copy engine brings the heads of a query as neighbours, so they must be different ones.
    """
    group = problem.num_heads // max(problem.num_heads_kv, 1)
    other = problem.varlen or score_operands(problem) or problem.further_inputs or problem.modifier is not None
    return 1 < group <= 64 and problem.q.strides[2] != 0 and not other


def packs_heads(problem: AttentionProblem) -> bool:
    """Whether it pays: more rows than the portable family's tiles for decoding take, or a quarter fewer tiles."""
    if not PACKS_HEADS or not may_pack_heads(problem):
        return False
    group = problem.num_heads // problem.num_heads_kv
    if problem.seqlen_q < MIN_QUERY_ROWS:
        return problem.seqlen_q * group > 64
    alone, packed = group * ceil_div(problem.seqlen_q, 128), ceil_div(problem.seqlen_q, 128 // group)
    return 4 * packed <= 3 * alone


def rows_of_heads(problem: AttentionProblem) -> AttentionProblem:
    """``problem`` with the heads of a group as further rows, for choices that look at no position."""
    group = problem.num_heads // problem.num_heads_kv
    return replace(problem, seqlen_q=problem.seqlen_q * group, num_heads=problem.num_heads_kv)


def packed_heads_tile(problem: AttentionProblem, num_sms: int = MEASURED_SMS) -> Tile:
    """The tile with packed heads: that of as many rows of one head, without a half tile (its bounds are rows)."""
    return replace(large_tile(rows_of_heads(problem), num_sms), half_tile=False, packed_heads=True)


def fitted_columns(problem: AttentionProblem, columns: int, fits: bool | None = None) -> int:
    """The width of a key tile, at most ``columns``, with the least work for all keys: 197 are two tiles of 112.

    Where no mask of positions or lengths on the device decide what is in a tile.
    """
    fits = FITS_KEYS if fits is None else fits
    if not fits or columns <= 80 or problem.band or problem.varlen or problem.seqused_k or score_operands(problem):
        return columns

    def cost(width: int) -> int:
        return ceil_div(problem.seqlen_k, width) * (width + KEY_TILE_OVERHEAD_COLUMNS)

    best = min(range(columns, 79, -16), key=cost)
    return best if LEAST_FIT * cost(best) <= cost(columns) else columns


def _long_documents(problem: AttentionProblem) -> bool:
    """Whether packed sequences have key tiles as wide as dense ones, with a half tile if causal: 9 to 27 % less time.

    From a mean of 512 keys on; of 272 (64 documents of 32 to 512) wide tiles stay empty too often, 2 % slower.
    """
    if not problem.varlen or problem.window_left is not None:
        return False
    other = problem.seqused_k or problem.softcap > 0 or problem.softmax_scale <= 0
    if other or problem.further_inputs or problem.modifier is not None:
        return False
    return problem.k.shape[1] >= 512 * problem.batch


def _tile_between(problem: AttentionProblem, num_sms: int) -> Tile | None:
    """Three consumers at head dims 65 to 96 as well, with 96 or 80 keys; ``None`` where two are faster.

    Without a band, 192 rows take 0.79 of the time of as many rows at head dim 72, whose rows begin amid a sector, and
    0.91 to 0.93 at 80 and 96, unless they stay empty or need more waves. Causal they are slower (0.96 at head dim 80).
    """
    if max(problem.head_dim, problem.head_dim_v) > 96 or problem.band or problem.seqused_k or score_operands(problem):
        return None
    mapped = problem.softcap > 0 or problem.softmax_scale <= 0
    if mapped or problem.further_inputs or problem.modifier is not None:
        return None
    rows, heads = problem.seqlen_q, problem.batch * problem.num_heads
    if problem.varlen:
        rows = min(rows, max(ceil_div(problem.q.shape[1], max(problem.batch, 1)), 1))

    def time(block_m: int) -> int:
        return ceil_div(heads * ceil_div(rows, block_m), num_sms) * block_m

    gain = 1.2 if problem.head_dim % 16 else 1.08
    if time(192) > gain * time(128):
        return None
    columns = min((96, 80), key=lambda x: ceil_div(problem.seqlen_k, x) * (x + KEY_TILE_OVERHEAD_COLUMNS))
    return Tile(block_m=192, block_n=columns, num_stages_q=2, lazy_max=True)


def _rows_of_narrow(problem: AttentionProblem, num_sms: int) -> int:
    """Query rows of a tile at head dim 64: 192 are faster by what the table above says, unless they stay empty.

    Or unless every smaller tile has a multiprocessor to itself: 128 small tiles take 13 % less time than 88 large ones.
    """
    rows = problem.seqlen_q
    if problem.varlen:  # those of a sequence on average
        rows = min(rows, max(ceil_div(problem.q.shape[1], max(problem.batch, 1)), 1))
    if not problem.varlen and problem.batch * problem.num_heads * ceil_div(rows, 128) <= num_sms:
        return 128
    # A half tile or a window and a sink: 128 registers a thread are too few, and ptxas serialises the products (C7511).
    if problem.band and problem.further_inputs and not problem.varlen:
        return 128
    # Scores that are more than products and max_logit: 8 to 108 bytes of a thread would spill.
    mapped = problem.softcap > 0 or problem.softmax_scale <= 0 or problem.modifier is not None
    if problem.return_max_logit and mapped:
        return 128
    return 192 if 464 * ceil_div(rows, 192) * 192 <= 573 * ceil_div(rows, 128) * 128 else 128


def _score_tile(problem: AttentionProblem, widest: int) -> Tile | None:
    """The tile when the copy engine brings bias and mask; ``None`` when it does not."""
    if (problem.bias is None and problem.mask is None) or score_reasons(problem):
        return None
    if problem.head_dim_v > 192 and problem.dropout_p > 0:
        return None  # spills registers
    tiles = [Tile(block_m=128, block_n=64, ping_pong=widest <= 192, score_tiles=True)]
    if widest <= 128:
        # Wide key tiles first, with a second slot for Q where it fits. At head dim 64 they take 20 % less time than 64
        # columns and 35 % less than threads that read their own bias; at 128 a second slot for Q is worth less than
        # 128 columns, and one slot for the bias is the worst (docs/experiments.md).
        shared = Tile(block_m=128, block_n=64, num_stages_q=2, lazy_max=True, score_tiles=True)
        tiles = [replace(shared, block_n=128), replace(shared, block_n=128, num_stages_q=1), shared]
    return next((tile for tile in tiles if smem_bytes(config_of(problem, tile)) <= SMEM_LIMIT), None)


def score_reasons(problem: AttentionProblem) -> list[str]:
    """Why the copy engine cannot bring bias and mask; empty when it can, or when there is neither."""
    found = []
    for name, operand in (("bias", problem.bias), ("mask", problem.mask)):
        if operand is not None:
            found += score_reasons_against(name, operand, DTYPES[operand.dtype].itemsize)
    if found or not problem.varlen:
        return found
    return ["rows of bias and mask are not those of packed queries"]


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
    found += reasons_against_size(problem)
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


def config_of(problem: AttentionProblem, tile: Tile) -> HopperForwardConfig:
    """The config of ``problem`` with ``tile``."""
    config = HopperForwardConfig(
        kernel="forward_hopper",
        arch="sm_90a",
        dtype=problem.dtype,
        head_dim=product_width(problem.head_dim),
        head_dim_v=product_width(problem.head_dim_v),
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=4 + tile.block_m // 16,
        num_stages=tile.num_stages,
        num_stages_q=tile.num_stages_q,
        features=features_of(problem, behind=True),
        ping_pong=tile.ping_pong,
        half_tile=tile.half_tile,
        lazy_max=tile.lazy_max,
        score_tiles=tile.score_tiles,
        begins_products=tile.begins_products,
        num_stages_scores=tile.num_stages_scores,
        packed_heads=tile.packed_heads,
        min_blocks_per_sm=tile.min_blocks_per_sm,
    )
    if words_pay(problem, tile.block_n):
        # What a function leaves of query tiles differs, and a fixed order can give one block all of the long ones.
        return replace(with_words(config), tickets=may_hand_out(problem), tile_bits=tile.tile_bits)
    return replace(config, tickets=may_hand_out(problem) and problem.sm_margin is not None)


def may_hand_out(problem: AttentionProblem) -> bool:
    """Tiles of packed sequences are handed out anyway, and beside a byte mask a second warp follows the schedule."""
    return not (problem.varlen or problem.mask)


def queries_of_tile(problem: AttentionProblem, tile: Tile) -> int:
    """How many queries ``tile`` has: its rows, unless they are several heads'."""
    return tile.block_m // (problem.num_heads // problem.num_heads_kv) if tile.packed_heads else tile.block_m


def tile_costs(problem: AttentionProblem, tile: Tile) -> Array:
    """Key tiles that each query tile sees, plus what a query tile costs beside them."""
    rows = queries_of_tile(problem, tile)
    key_tiles = key_tiles_of_rows(problem, rows, tile.block_n)
    there = np.minimum(problem.seqlen_q - np.arange(0, problem.seqlen_q, rows), rows)
    # Warp-groups without rows do not compute, but those beside them gain little more than a half.
    filled = np.maximum(there / rows, 0.5)
    costs: Array = key_tiles * filled + TILE_OVERHEAD_COLUMNS / tile.block_n
    return costs


def pair_rounds(costs: Array, all_heads: int, width: int, head_bytes: int) -> int:
    """Rounds of the schedule in ``hopper/forward/scheduler.cuh`` that hand out pairs.

    The choice whose largest sum is smallest, among those whose single tiles keep their K and V in L2: because they fit,
    or because enough blocks walk through the same head at the same time.
    """
    num_m_blocks = len(costs)
    head_pairs = (num_m_blocks + 1) // 2
    most = all_heads * head_pairs // width
    by_rank = costs[::-1]
    pairs = by_rank[:head_pairs] + costs[:head_pairs]
    if num_m_blocks % 2:
        pairs[-1] /= 2  # the middle tile is alone
    best, best_sum = most, float("inf")
    turn = np.arange(all_heads) * head_pairs // width  # by which the pairs of a head are moved on
    for rounds in range(most, max(most - 4, -1), -1):
        first, done = divmod(rounds * width, head_pairs)
        partial = int(done > 0)
        whole = all_heads - first - partial
        tail_heads = whole + partial
        if rounds < most and tail_heads * head_bytes > L2_BYTES and width < BLOCKS_SHARING_A_HEAD * tail_heads:
            break
        sums: Array = np.zeros(width)
        if rounds:
            head, pair = np.divmod(np.arange(rounds * width), head_pairs)
            moved = (pair + np.where(head < first, turn[head], 0)) % head_pairs
            sums = pairs[moved].reshape(rounds, width).sum(0)
        ranks = np.arange(num_m_blocks)
        heads = np.where((ranks >= done) & (ranks < num_m_blocks - done), tail_heads, whole)
        singles = np.repeat(by_rank, heads)
        padded = np.concatenate([singles, np.zeros(-len(singles) % (2 * width))])
        both: Array = padded.reshape(-1, 2, width)  # a round forwards and a round backwards
        sums = sums + both[:, 0].sum(0) + both[:, 1, ::-1].sum(0)
        largest = float(np.max(sums))
        if largest < 0.998 * best_sum:
            best, best_sum = rounds, largest
    return best


def order_is_open(problem: AttentionProblem, tile: Tile | HopperForwardConfig) -> bool:
    """Whether the work of ``problem`` decides between a fixed order and tiles that are asked for."""
    return not tile.packed_heads and may_hand_out(problem)


def hands_out(problem: AttentionProblem, tile: Tile, costs: Array, num_sms: int) -> bool:
    """Whether thread blocks ask for their tiles, of `tile_costs` ``costs``, instead of a fixed order.

    In a fixed order a call takes 1.4 to 2 times as long while communication holds a multiprocessor, whose tiles wait
    for another; tiles that are asked for take at most 1.25 times. Alone those take 0.85 to 1.01 of the time of calls
    of 0.1 ms whose tiles differ, or of 0.06 ms with a bias, 1.00 to 1.01 of 0.2 ms otherwise, and lose where calls are
    shorter or heads wide (docs/experiments.md, "Hopper forward: tiles that are asked for").
    """
    if not order_is_open(problem, tile):
        return False
    heads = problem.batch * problem.num_heads
    per_sm = heads * float(costs.sum()) / num_sms  # key tiles
    flops = per_sm * tile.block_m * tile.block_n * 2 * (problem.head_dim + problem.head_dim_v)
    wide = max(problem.head_dim, problem.head_dim_v) > 192
    if problem.bias is not None and not (wide and problem.band):
        return flops >= HANDED_OUT_FLOPS["bias"]
    if wide:
        return flops >= HANDED_OUT_FLOPS["wide"]
    if not (problem.band or problem.seqused_k):
        return flops >= HANDED_OUT_FLOPS["even"]
    windowed = problem.window_left is not None and problem.window_right is not None
    several = heads * len(costs) >= MIN_TILES_HANDED_OUT * tile.min_blocks_per_sm * num_sms
    return several and flops >= HANDED_OUT_FLOPS["window" if windowed else "uneven"]


def either_order(problem: AttentionProblem, config: HopperForwardConfig) -> tuple[HopperForwardConfig, ...]:
    """``config``, of a plan of ``problem``, and the kernel that more or fewer sequences like these would have."""
    if config.features.tile_words or not order_is_open(problem, config):
        return (config,)
    return config, replace(config, tickets=not config.tickets)


def heads_together(all_heads: int, num_m_blocks: int, grid: int) -> int:
    """Heads whose tiles are handed out together, the longest first.

    With few, long tiles begin when little is left beside them; with many, K and V leave L2 between two tiles of a head,
    unless many blocks walk through the same head. Two tiles for every block with up to eight tiles a head, four up to
    48, then eight took the least time at lengths of 512 to 32768 (docs/experiments.md).
    """
    tiles_of_block = 2 if num_m_blocks <= 8 else 4 if num_m_blocks <= 48 else 8
    passes = max(1, round(all_heads * num_m_blocks / (tiles_of_block * grid)))
    return ceil_div(all_heads, passes)


def tile_list_of(problem: AttentionProblem, tile: Tile) -> TileList:
    """The list of the query tiles of packed sequences."""
    return tile_list(
        problem.q.shape[1],
        problem.batch,
        tile.block_m,
        heads=problem.num_heads_kv,
        resident_rows=problem.k.shape[1],
        l2_rows=L2_BYTES // (2 * (problem.head_dim + problem.head_dim_v)),
        entry_bytes=32,
    )


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
    # Of the other kernel's config what the list depends on, so that many problems share it.
    features = Features(band=problem.band, varlen=True, seqused_k=problem.seqused_k)
    making = HopperForwardConfig(
        kernel="packed_tiles",
        arch=config.arch,
        dtype="bfloat16",
        head_dim=64,
        head_dim_v=64,
        block_m=config.block_m,
        block_n=config.block_n,
        num_warps=LIST_WARPS,
        features=features,
    )
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


def plan_spec(problem: AttentionProblem, tile: Tile, *, num_sms: int) -> ForwardPlanSpec:
    """The launch of ``problem`` with ``tile``."""
    if problem.varlen:
        return _packed_plan_spec(problem, tile, num_sms=num_sms)
    config = config_of(problem, tile)
    num_m_blocks = max(ceil_div(problem.seqlen_q, queries_of_tile(problem, tile)), 1)
    heads = problem.num_heads_kv if tile.packed_heads else problem.num_heads  # that the schedule counts
    all_heads = problem.batch * heads
    num_tiles = all_heads * num_m_blocks
    grid = min(tile.min_blocks_per_sm * num_sms, num_tiles)
    costs = tile_costs(problem, tile)
    if hands_out(problem, tile, costs, num_sms):
        config = replace(config, tickets=True)
    group = heads // problem.num_heads_kv
    head_bytes = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v) // group
    fixed = problem.band and not config.tickets
    rounds = pair_rounds(costs, all_heads, grid, head_bytes) if fixed else 0
    head_pairs = ceil_div(num_m_blocks, 2)
    first_head, done = divmod(rounds * grid, head_pairs)
    words = words_of(problem, tile.block_m, tile.block_n) if config.features.tile_words else None
    ticket_bytes = (16 if words else 4) * config.tickets  # words behind the counter begin at a multiple of 8
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
    return ForwardPlanSpec(
        tile_words_bytes=words_bytes,
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
                    ("num_splits", 1),
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
        ),
    )


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
    several = launch.config.min_blocks_per_sm > 1 and moved_bytes(problem) < L2_BYTES
    if (
        not (packed or several)
        and problem.seqlen_q <= MIN_QUERY_ROWS
        and max(problem.head_dim, problem.head_dim_v) <= 64
    ):
        # 64 rows and keys at head dim 64: the portable kernel takes 18 us, this one 25, with several blocks 15. From
        # memory, 1024 x 64 x 8 on an H100, 101, 111 and 109.
        return [f"{problem.seqlen_q} query rows fill half a tile"]
    tiles = dict(launch.params)["num_tiles"]
    if tiles <= num_sms and not problem.varlen:
        # A tile alone on its multiprocessor takes 10.7 ns a key (D up to 128), whereas the portable kernel splits the
        # keys and reaches 280 TFLOP/s. A causal mask does not halve the time of the split, because its longest blocks
        # see all of their keys. The times behind this are in docs/experiments.md, "Few query tiles, many keys".
        widest = max(problem.head_dim, problem.head_dim_v)
        scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
        flops = 2 * scores * (problem.head_dim + problem.head_dim_v)
        hopper_us = 4 + 0.0107 * problem.seqlen_k * max(1, widest / 128)
        if small:
            hopper_us = 6 + (0.0075 if widest <= 64 else 0.0095 * max(1, widest / 160)) * problem.seqlen_k
        portable_us = 12 + flops / 280e6
        if portable_us < hopper_us and problem.window_left is None:
            return [f"{tiles} query tiles leave most of {num_sms} multiprocessors idle; split keys fill them"]
    return []


def choose_forward(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int
) -> ForwardPlanSpec | list[str]:
    """The plan of the forward pass, or every reason why the portable family has to serve ``problem``."""
    if packs_heads(problem):
        found = packed_heads_plan(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit)
        if not isinstance(found, list):
            return found
    reasons = reasons_for_portable(problem, arch=arch, smem_limit=smem_limit)
    return reasons or plan_spec(problem, choose_tile(problem, num_sms), num_sms=num_sms)


def plan_like(
    config: HopperForwardConfig, problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int
) -> ForwardPlanSpec | list[str]:
    """The plan of a part with the tile of the whole's ``config``, or every reason against it."""
    tile = tile_of(Tile, config)
    if problem.window_right is None:
        tile = replace(tile, half_tile=False)  # there is no diagonal: what it leaves out adds zeros
    if tile.packed_heads and not may_pack_heads(problem):
        return ["the heads of a group cannot be rows of a tile"]
    rows = rows_of_heads(problem) if tile.packed_heads else problem
    return reasons_for_portable(rows, arch=arch, smem_limit=smem_limit) or plan_spec(problem, tile, num_sms=num_sms)


def narrower(problem: AttentionProblem, *, num_sms: int) -> list[ForwardPlanSpec]:
    """Plans with fewer keys a tile than the table's: fewer scores of a thread wait for what a modifier reads."""
    tile = choose_tile(problem, num_sms)
    step = 64 if tile.score_tiles else 32  # scores come in slabs of 64 columns
    columns = [n for n in (tile.block_n - step, tile.block_n - 2 * step) if n >= 48]
    return [plan_spec(problem, replace(tile, block_n=n, half_tile=False), num_sms=num_sms) for n in columns]


def packed_heads_plan(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int
) -> ForwardPlanSpec | list[str]:
    """The plan with packed heads, of a problem that `may_pack_heads`, or every reason against it."""
    reasons = reasons_for_portable(rows_of_heads(problem), arch=arch, smem_limit=smem_limit)
    return reasons or plan_spec(problem, packed_heads_tile(problem, num_sms), num_sms=num_sms)


def _other_rows(problem: AttentionProblem, tile: Tile) -> list[Tile]:
    """At head dims 65 to 96 the other number of rows: which is faster depends on lengths and waves."""
    widest, mapped = max(problem.head_dim, problem.head_dim_v), problem.softcap > 0 or problem.softmax_scale <= 0
    other = problem.seqused_k or mapped or problem.further_inputs or problem.modifier is not None
    if not 64 < widest <= 96 or score_operands(problem) or other:
        return []
    if tile.block_m == 192:
        return [replace(tile, block_m=128, block_n=128)]
    return [replace(tile, block_m=192, block_n=96, half_tile=False)]


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
    return [*plans[:1], *packed, *plans[1:]]
