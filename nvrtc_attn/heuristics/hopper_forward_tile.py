"""The tile table of the Hopper forward kernel: which tile is the fastest for a problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..base.dtypes import DTYPES
from ..front.problem import AttentionProblem
from ..modifiers.cuda import computes_little, only_computes, takes_registers
from .common import MEASURED_SMS, ceil_div
from .hopper_common import SMEM_LIMIT, begins_products, least_work, mean_rows, product_width, score_operands
from .hopper_forward_config import (
    KEY_TILE_OVERHEAD_COLUMNS,
    LEAST_FIT,
    Tile,
    config_of,
    fitted_columns,
    smem_bytes,
)
from .hopper_forward_dropout import has_room, makes_words
from .hopper_forward_wide import wide_direct_tile, wide_score_tiles, wide_tile, widest_tile
from .hopper_small import are_alone, small_tile, waves_favor_128
from .tensor_map import score_reasons_against
from .tile_words import bits_pay

LEAST_GAIN_OF_SLOTS: Final = 1.01
"""The same where narrower tiles have a third slot or more: 226 and 300 keys gain 5 and 1 %, 1000 and 4000 nothing."""


def choose_tile(problem: AttentionProblem, num_sms: int = MEASURED_SMS) -> Tile:
    """The tile of ``problem``, of 64 query rows where that is faster, and where dropout's decisions are made."""
    if makes_words(problem):
        # The tile as without dropout, but for head dims 104 to 128, where that for dropout takes 0.94 to 1.00 of the
        # time: 8 x 1024 x 16, D 128, 218 and 230 us (H200).
        widest = max(problem.head_dim, problem.head_dim_v)
        plain = problem if 96 < widest <= 128 else replace(problem, dropout_p=0.0)
        tile = own_tile(plain, num_sms)
        if has_room(problem, tile.block_m, tile.block_n):
            # With a half tile and three groups ptxas serialises products (C7511).
            return replace(tile, keep_words=True, half_tile=False)
    return own_tile(problem, num_sms)


def own_tile(problem: AttentionProblem, num_sms: int) -> Tile:
    """The tile where the kernel makes dropout's decisions itself, or there are none."""
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
        columns = fitted_columns(problem, 96)
        # A third slot: documents 229 to 224 us, a neighbourhood 138 to 130, a prefix 651 to 655 (2 x 8192 x 16, H200).
        return Tile(block_m=192, block_n=columns, num_stages=3, num_stages_q=2, lazy_max=True, tile_bits=True)
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
    lengths = problem.varlen or problem.seqused_k
    # Half of a diagonal tile saved is 4 to 10 % up to 1024 rows; later its second product only costs registers.
    diagonal = problem.window_right is not None and not lengths
    begins = begins_products(problem)
    mapped = problem.softcap > 0 or problem.softmax_scale <= 0 or (problem.modifier is not None and not begins)
    if widest <= 64 and has_light_mask(problem) and _rows_of_narrow(problem, num_sms) == 192:
        return Tile(block_m=192, block_n=fitted_columns(problem, 96), num_stages=3, num_stages_q=2, lazy_max=True)
    if problem.modifier is not None and not begins and takes_registers(problem.modifier):
        fits = widest <= 64 and not operands and not lengths and only_computes(problem.modifier)
        if fits and _rows_of_narrow(problem, num_sms) == 192:
            # 64 columns leave registers for a function. Softcap and slopes: 632 to 606 us (4 x 4096 x 16, causal).
            return Tile(block_m=192, block_n=64, num_stages=4, num_stages_q=2, lazy_max=True)
        operands += 1
    if widest <= 64:
        if direct:
            large = has_bias_alone(problem) and _gain_of_rows(problem, num_sms) <= 1.13
            return direct_tile(problem, 192 if large else 128)
        if operands:
            # Wider key tiles make more decisions beside each product: 128 columns take 8 % less time than 96. With 17
            # to 32 columns of output, of all widths, ptxas spills 32 bytes at 128 keys.
            spills = ceil_div(problem.head_dim_v, 16) == 2 or 16 < max(problem.head_dim, problem.head_dim_v) <= 32
            columns = 112 if lengths or spills else 128
            return Tile(block_m=128, block_n=columns, num_stages_q=2, lazy_max=True)
        # Three consumers of 64 rows read each key tile once: 573 at 4096, against 464 with two. Lengths on the device
        # take registers, and so do scores that are more than products. With few keys (cross-attention to 77 tokens) a
        # tile is no wider than they are, which saves a sixth of the time.
        rows = _rows_of_narrow(problem, num_sms)
        even = begins and not (lengths or problem.band)  # query tiles have as much work each, and come in waves
        if even and _gain_of_rows(problem, num_sms) > 1.13:
            rows = 128  # T5 and a table, 8 x 1024 x 12: 0.89 of the time; 8 x 512 x 12: 0.82; 16 x 512 x 16: 1.00
        wide = rows == 192 and _long_documents(problem)
        # Products that begin with a value would spill 52 to 60 bytes of a thread with 128 columns.
        columns = 112 if rows == 192 and (lengths or mapped or begins) and not wide else 128
        if not lengths:
            columns = min(columns, max(32, ceil_div(problem.seqlen_k, 16) * 16))
        columns = fitted_columns(problem, columns)
        stages = 2
        if even and rows == 128:
            stages = _slots(problem, columns, 4)  # 8 x 512 x 12 takes 31 us with two, 28 with four
        if rows == 192 and not lengths:
            columns, stages = _narrow_columns(problem, columns, mapped=mapped, begins=begins)
        return Tile(
            block_m=rows,
            block_n=columns,
            num_stages=stages,
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
        if not operands and (narrow := _narrow_tile(problem, num_sms)) is not None:
            return narrow
        half = diagonal and problem.seqlen_q <= 1024 and not (operands or mapped or problem.return_max_logit)
        # With dropout and 80 columns of output, of all widths, ptxas spills 32 bytes at 128 keys.
        columns = 112 if operands and ceil_div(problem.head_dim_v, 16) == 5 else fitted_columns(problem, 128)
        return Tile(block_m=128, block_n=columns, num_stages_q=2, half_tile=half, lazy_max=True)
    if widest <= 192:
        return wide_direct_tile(problem, operands) if direct else wide_tile(problem, operands)
    return widest_tile(problem, operands)


def _has_score(problem: AttentionProblem) -> bool:
    """Whether there is a score_mod."""
    return problem.modifier is not None and problem.modifier.score is not None


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


def has_bias_alone(problem: AttentionProblem) -> bool:
    """Whether a 16-bit bias, and nothing else, goes with the scores of whole sequences."""
    other = problem.varlen or problem.seqused_k or problem.band or problem.softcap > 0 or problem.softmax_scale <= 0
    further = problem.return_max_logit or problem.further_inputs or problem.modifier is not None
    narrow = problem.bias is not None and problem.bias.dtype != "float32"
    return narrow and score_operands(problem) == 1 and not (other or further)


def direct_tile(problem: AttentionProblem, rows: int) -> Tile:
    """The tile where every thread reads its own bias and mask, up to head dim 64; of 192 rows for a bias alone.

    Where as many rows are computed, 192 take 0.84 to 1.02 of the time of 128 (257 keys are the loss), where fewer are,
    for 129 to 192 rows, 0.71 to 0.81; with an eighth more 0.88 to 1.02. Of 128 rows 49 keys take 26 % less time in a
    tile of 64 columns, 197 in two of 112 6 % less (H200).
    """
    if rows == 192:
        widths = (64,) if product_width(problem.head_dim_v) == 48 else (80, 64)  # there 80 columns spill 8 bytes
        columns = least_work(problem, widths, KEY_TILE_OVERHEAD_COLUMNS)
        return _with_slots(problem, 192, columns, 3 if columns == 64 else 2)
    if score_operands(problem) > 1:
        return Tile(block_m=128, block_n=80, num_stages_q=2)
    widest = 128 if problem.bias is not None and problem.bias.dtype != "float32" else 112
    columns = least_work(problem, range(widest, 63, -16), KEY_TILE_OVERHEAD_COLUMNS, LEAST_FIT)
    return Tile(block_m=128, block_n=columns, num_stages_q=2, lazy_max=True)


def _slots(problem: AttentionProblem, columns: int, most: int) -> int:
    """Slots of K and V: no more than there are key tiles, two at least.

    The keys of the next query tile come while the last ones of this one are computed. 2 x 4096 x 226 with 30 heads of
    96 takes 57 us with three and 83 with two; 120 keys in two tiles of 64 take 3 % more time with four than with two.
    """
    if problem.varlen:
        return most
    return min(most, max(2, ceil_div(problem.seqlen_k, columns)))


def _narrow_columns(problem: AttentionProblem, columns: int, *, mapped: bool, begins: bool) -> tuple[int, int]:
    """Columns of a key tile and slots for K and V at head dim 64, with three consumers and lengths that are known.

    Scores with arithmetic of their own take less time with 64 columns than with 112: softcap 11 % if causal, 5 % else
    (4 x 2048 x 16), a scale of each head 5 %, slopes 18 % at 1024 and 1 % at 4096. Products that begin with a value
    take 3 to 5 % less with a fourth slot. Causal, a third one saves 2 to 4 % up to 2048, 0.5 % later. Few keys: 226 are
    three tiles of 80 rather than two of 128, 5 %.
    """
    if problem.softcap > 0 or (_has_score(problem) and not begins):
        columns = min(columns, 64)
        return columns, _slots(problem, columns, 4)
    if problem.modifier is not None and not begins:
        return columns, 2
    if mapped:
        return columns, 3
    if begins:
        return columns, 2 if problem.band else 4
    if problem.band and problem.return_max_logit:
        return columns, 2  # with a half tile ptxas would serialise the products (C7511)
    columns = least_work(problem, range(columns, min(columns, 80) - 1, -16), 12, LEAST_GAIN_OF_SLOTS)
    return columns, _slots(problem, columns, 4 if columns <= 80 and not problem.band else 3)


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


def _gain_of_rows(problem: AttentionProblem, num_sms: int) -> float:
    """The rows that a multiprocessor has most with tiles of 192, over those with tiles of 128."""
    rows, heads = mean_rows(problem), problem.batch * problem.num_heads

    def most(block_m: int) -> int:
        return ceil_div(heads * ceil_div(rows, block_m), num_sms) * block_m

    return most(192) / max(most(128), 1)  # 0 without rows


def _with_slots(problem: AttentionProblem, rows: int, columns: int, most: int) -> Tile:
    """A tile with as many slots for K and V as there is room for, and use."""
    for slots in range(_slots(problem, columns, most), 2, -1):
        tile = Tile(block_m=rows, block_n=columns, num_stages=slots, num_stages_q=2, lazy_max=True)
        if smem_bytes(config_of(problem, tile)) <= SMEM_LIMIT:
            return tile
    return Tile(block_m=rows, block_n=columns, num_stages_q=2, lazy_max=True)


def _narrow_tile(problem: AttentionProblem, num_sms: int) -> Tile | None:
    """Key tiles of 64 columns up to head dim 128, where they are faster; ``None`` elsewhere.

    Softcap: 0.94 of the time of 128 x 128 with 192 rows, 0.95 with 128 (2 x 4096 x 16, causal). Causal with up to 512
    rows: 0.92 to 0.99, with 192 rows unless these stay empty (H200).
    """
    known = not (problem.varlen or problem.seqused_k or problem.further_inputs or problem.return_max_logit)
    if not known or problem.modifier is not None or problem.softmax_scale <= 0:
        return None
    if problem.softcap > 0:
        return _with_slots(problem, 192 if _gain_of_rows(problem, num_sms) <= 1.13 else 128, 64, 3)
    if problem.window_right is None or problem.seqlen_q > 512:
        return None
    rows = 192 if 8 * 192 * ceil_div(problem.seqlen_q, 192) <= 9 * 128 * ceil_div(problem.seqlen_q, 128) else 128
    return _with_slots(problem, rows, 64, 4)


def _tile_between(problem: AttentionProblem, num_sms: int) -> Tile | None:
    """Head dims 65 to 120, and 128 with up to 1024 keys: mostly three consumers, and key tiles of 64 to 96 columns.

    192 rows take 0.79 of the time of as many rows at head dims 72 and 104, whose rows begin amid a sector, and 0.86 to
    0.93 at 80 to 120, unless they stay empty or need more waves. More slots for narrower key tiles gain 3 to 7 % from
    700 keys on, 10 to 45 % with 200 to 500. ``None`` for the tile of 128. Figures: docs/experiments.md, "Slots of K and
    V".
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    if problem.seqused_k or score_operands(problem) or (widest > 120 and (problem.varlen or problem.seqlen_k > 1024)):
        return None
    if problem.softmax_scale <= 0 or problem.further_inputs or problem.modifier is not None:
        return None
    # Tiles of 64 rows with a multiprocessor each, which are made of this one, were not measured with more slots.
    alone = are_alone(problem, 64, num_sms)
    if widest > 96 and alone:
        return None
    if problem.band or problem.softcap > 0:
        return _band_between(problem, num_sms) if widest <= 120 else None
    wide = 88 < widest <= 96 and problem.seqlen_k >= 2048
    rows = 192
    if _gain_of_rows(problem, num_sms) > (1.25 if problem.head_dim % 16 else 1.08 if wide else 1.13):
        if problem.seqlen_k >= 2048 or alone:
            return None
        rows = 128
    elif wide:
        return Tile(block_m=192, block_n=96, num_stages_q=2, lazy_max=True)
    columns = 80 if problem.varlen or (widest > 96 and problem.seqlen_k > 1024) else least_work(problem, (80, 64), 4)
    return _with_slots(problem, rows, columns, 4 if columns == 64 else 3)


def _band_between(problem: AttentionProblem, num_sms: int) -> Tile | None:
    """Causal, windows and softcap at head dims 65 to 120, with 64 columns.

    Over 128 x 128: head dim 72 1.13 to 1.4 with 192 rows; 80 and 96 from 1025 rows on 1.03 to 1.13, with softcap 1.03;
    112 and 120 from 1024 on 1.03 and 1.17, packed 1.14. Up to 512 rows 128 of them: 1.05 to 1.08, beyond head dim 96
    `_narrow_tile`. Between, a half tile is as fast.
    """
    rows, widest = mean_rows(problem), max(problem.head_dim, problem.head_dim_v)
    if widest > 96 and rows <= 512 and not problem.varlen:
        return None
    if problem.head_dim % 16:
        most = 1.3
    elif widest > 96:
        most = 1.13
    else:
        most = 1.1 if rows > 1024 else 0.0
    if _gain_of_rows(problem, num_sms) <= most:
        return _with_slots(problem, 192, 64, 4)
    if widest > 96:
        return None
    return _with_slots(problem, 128, 64, 4) if problem.varlen or rows <= 512 else None


def _rows_of_narrow(problem: AttentionProblem, num_sms: int) -> int:
    """Query rows of a tile at head dim 64: 192 are faster by what the table above says, unless they stay empty.

    Or unless every smaller tile has a multiprocessor to itself: 128 small tiles take 13 % less time than 88 large ones.
    """
    rows = mean_rows(problem)
    if are_alone(problem, 128, num_sms):
        return 128
    # A half tile or a window and a sink: 128 registers a thread are too few, and ptxas serialises the products (C7511).
    if problem.band and problem.further_inputs and not problem.varlen:
        return 128
    # Scores that are more than products and max_logit: 8 to 108 bytes of a thread would spill.
    mapped = problem.softcap > 0 or problem.softmax_scale <= 0 or problem.modifier is not None
    if problem.return_max_logit and mapped:
        return 128
    even = not (problem.varlen or problem.band or problem.seqused_k or score_operands(problem) or mapped)
    if even and waves_favor_128(problem, num_sms):
        return 128
    return 192 if 464 * ceil_div(rows, 192) * 192 <= 573 * ceil_div(rows, 128) * 128 else 128


def _score_tile(problem: AttentionProblem, widest: int) -> Tile | None:
    """The tile when the copy engine brings bias and mask; ``None`` when it does not."""
    if (problem.bias is None and problem.mask is None) or score_reasons(problem):
        return None
    if problem.head_dim_v > 192 and problem.dropout_p > 0:
        return None  # spills registers
    if widest > 128:
        tiles = wide_score_tiles(problem)
    else:
        # Wide key tiles first, with a second slot for Q where it fits. At head dim 64 they take 20 % less time than 64
        # columns and 35 % less than threads that read their own bias; at 128 a second slot for Q is worth less than
        # 128 columns, and one slot for the bias is the worst (docs/experiments.md).
        shared = Tile(block_m=128, block_n=64, num_stages_q=2, lazy_max=True, score_tiles=True)
        tiles = [replace(shared, block_n=128), replace(shared, block_n=128, num_stages_q=1), shared]
        # 144 keys are two tiles of 128 or three of 64, which take 13 % less time with a third slot.
        if widest <= 64 and least_work(problem, (128, 64), KEY_TILE_OVERHEAD_COLUMNS, LEAST_FIT) == 64:
            tiles.insert(0, replace(shared, num_stages=3))
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
