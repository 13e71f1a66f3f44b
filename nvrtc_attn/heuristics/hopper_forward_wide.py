"""Rows of the Hopper forward kernel's tile table beyond head dim 128.

Most have key tiles of 64 columns and `Tile.lazy_max`: the accumulators of the output are 96 and 128 registers of a
thread, and 64 columns leave room for corrections that wait. All figures, and what lost, are in docs/experiments.md,
"Values of 129 to 192 columns" and "Head dims above 192" (H200, 2026-11-28, bfloat16).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..front.problem import AttentionProblem
from .common import ceil_div
from .hopper_common import least_work, mean_rows, score_operands
from .hopper_forward_config import Tile

OVERHEAD_COLUMNS: Final = 8
"""What a key tile of 64 or 80 columns costs beside these, in columns: 226 keys take 4 % less time in three tiles of 80
than in four of 64, 300 keys 1 % more in four than in five."""
LEAST_SAVED: Final = 1.03
"""64 columns are kept unless they are so many times the work of 80."""
FEW_KEYS: Final = 112
"""Keys that one tile holds at head dims up to 192."""


def wide_tile(problem: AttentionProblem, operands: int) -> Tile:
    """The tile of head dims 129 to 192 where no thread reads a bias or mask.

    ``operands``: 1 for dropout and 1 for a function of scores that takes registers. Over 96 and 112 columns without
    `Tile.lazy_max`: causal 1.03 to 1.07, windows 1.10 and 1.15, packed 1.08 to 1.11, ``seqused_k`` 1.02 to 1.06,
    dropout 1.04 to 1.08, mask_mod 1.07, slopes 1.07, T5 1.06 and 1.09.
    """
    if problem.head_dim_v <= 128:
        return _narrow_values(problem, operands)
    narrow = Tile(block_m=128, block_n=64, num_stages=3, lazy_max=True)
    if problem.softcap > 0 and problem.band and not (problem.varlen or problem.seqused_k):
        return Tile(block_m=128, block_n=96)  # 64 columns with `lazy_max` are 0.97 to 1.00 times as fast
    if operands > 1 or not _sees_all(problem):
        return narrow
    if problem.seqlen_k <= FEW_KEYS:
        return _of_one_key_tile(problem)
    if problem.seqlen_k > 2048 or not _is_plain(problem):
        # Over 112 columns 1.04 at 16384 keys, where 64 gain 1.02, and 1.07 at 4096 of head dim 160, where 64 gain 1.05.
        return Tile(block_m=128, block_n=96, lazy_max=True)
    return narrow if _columns(problem) == 64 else Tile(block_m=128, block_n=80, lazy_max=True)


def widest_tile(problem: AttentionProblem, operands: int) -> Tile:
    """The tile of head dims above 192; products are long enough not to need turns.

    64 columns with `Tile.lazy_max` over 80 without: causal 1.01 to 1.04, windows 1.05 and 1.10, packed 1.04 and 1.07,
    softcap 1.07 to 1.09, T5 1.14, but causal with ``seqused_k`` 0.95; causal, 80 columns with it are 0.83 to 1.01. With
    dropout, a mask_mod, or max_logit of scores that are not products alone, it would spill.
    """
    if score_operands(problem) or _has_mask_mod(problem):
        # With dropout and softcap 48 columns spill four bytes.
        return Tile(block_m=128, block_n=32 if problem.dropout_p > 0 and problem.softcap > 0 else 48, ping_pong=False)
    mapped = problem.softcap > 0 or problem.modifier is not None
    if problem.seqused_k or (mapped and problem.return_max_logit):  # 4 to 20 bytes would spill
        # 512 keys are 6.4 tiles of 80, of which the last is mostly empty: 64 are 2 % faster. 1024 are 12.8: 3 % slower.
        short = problem.window_right is not None and problem.seqlen_q <= 1024
        fits = 1.06 * 64 * ceil_div(problem.seqlen_k, 64) < 80 * ceil_div(problem.seqlen_k, 80)
        return Tile(block_m=128, block_n=48 if operands else 64 if short or fits else 80, ping_pong=False)
    columns = 64
    if _is_plain(problem) and _sees_all(problem):
        if problem.seqlen_k <= 80:
            return replace(_of_one_key_tile(problem), ping_pong=False)
        columns = _columns(problem)
    return Tile(block_m=128, block_n=columns, ping_pong=False, lazy_max=True)


def wide_score_tiles(problem: AttentionProblem) -> list[Tile]:
    """Tiles beyond head dim 128 where the copy engine brings bias and mask, the first that fits into shared memory.

    A bias, causal and not, of all queries and of one: with `Tile.lazy_max` and a third slot 1.05 to 1.10 times as fast
    as without either up to 192, 1.05 to 1.08 with `Tile.lazy_max` and turns at 256, where a mask, or max_logit, would
    spill 8 to 24 bytes (docs/experiments.md, "A bias beyond head dim 128").
    """
    lazy = Tile(block_m=128, block_n=64, num_stages=3, lazy_max=True, score_tiles=True)
    plain = Tile(block_m=128, block_n=64, score_tiles=True)
    if max(problem.head_dim, problem.head_dim_v) <= 192:
        return [lazy, replace(lazy, num_stages=2), plain]
    plain = replace(plain, ping_pong=False)
    spills = problem.mask is not None or problem.return_max_logit
    return [plain] if spills else [replace(lazy, num_stages=2), plain]


def wide_direct_tile(problem: AttentionProblem, operands: int) -> Tile:
    """The tile of head dims 129 to 192 where each thread reads its own elements of a bias or mask.

    One tile of 80 columns is 1.22 and 1.28 times as fast as two of 64 with 77 keys of a bias.
    """
    if operands > 1:
        return Tile(block_m=128, block_n=48)
    of_bias_alone = problem.mask is None and problem.modifier is None and _sees_all(problem)
    return Tile(block_m=128, block_n=80 if of_bias_alone and 64 < problem.seqlen_k <= 80 else 64)


def few_rows(problem: AttentionProblem, tile: Tile) -> Tile:
    """``tile`` of 64 rows, for query tiles that have a multiprocessor each.

    128 columns take 0.88 to 0.94 of the time of 96 and 112 without `Tile.lazy_max`, 64 of them 0.90 to 0.96 (head dims
    160 and 192); at 256 a third slot of 64 columns is 1.00 to 1.07 times as fast as two.
    """
    few = replace(tile, block_m=64, half_tile=False, ping_pong=False)
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest <= 128 or not tile.lazy_max:
        return few
    if widest > 192:
        return replace(few, num_stages=3) if tile.block_n == 64 else few
    return replace(few, block_n=128, num_stages=2) if _is_plain(problem) else few


def candidates(problem: AttentionProblem, tile: Tile) -> list[Tile]:
    """Beyond head dim 128 the widths and slots that other lengths have, of plain scores."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest <= 128 or not (tile.lazy_max and _is_plain(problem)):
        return []
    if widest > 192:
        others = [(64, 2), (80, 2)]
    else:
        others = [(64, 4), (128, 2)] if problem.head_dim_v <= 128 else [(64, 3), (80, 2), (96, 2)]
    return [replace(tile, block_n=columns, num_stages=stages) for columns, stages in others]


def _narrow_values(problem: AttentionProblem, operands: int) -> Tile:
    """Values of at most 128 columns: the output leaves the registers of head dim 128.

    128 keys with `Tile.lazy_max` take 10 % less time than 96 or 112 without. Four slots of 64 take 4 to 6 % less than
    that up to 1024 causal rows, of packed ones too, 1 % with 2048 and with windows; dense 2 to 6 % more.
    """
    plain, capped = _is_plain(problem), _is_plain(problem, or_capped=True)
    short = problem.window_left is not None or mean_rows(problem) <= 2048
    if plain and problem.band and (short or problem.seqused_k):
        return Tile(block_m=128, block_n=64, num_stages=4, lazy_max=True)
    if capped and not problem.seqused_k:
        return Tile(block_m=128, block_n=128, lazy_max=True)  # with softcap 1.08 times as fast as 96 columns
    known = not (problem.varlen or problem.seqused_k) and problem.seqlen_q >= 2048
    return Tile(block_m=128, block_n=96 if operands or (problem.band and not (known and capped)) else 112)


def _is_plain(problem: AttentionProblem, *, or_capped: bool = False) -> bool:
    """Whether scores are products alone: nothing goes with them or changes them but, ``or_capped``, a softcap."""
    more = score_operands(problem) or problem.softmax_scale <= 0 or (problem.softcap > 0 and not or_capped)
    return not (more or problem.further_inputs or problem.modifier is not None)


def _sees_all(problem: AttentionProblem) -> bool:
    """Whether every query sees every key, as far as is known without the device."""
    return not (problem.band or problem.varlen or problem.seqused_k or _has_mask_mod(problem))


def _has_mask_mod(problem: AttentionProblem) -> bool:
    return problem.modifier is not None and problem.modifier.mask is not None


def _columns(problem: AttentionProblem) -> int:
    """64 or 80, whichever leaves less of the last key tile empty."""
    return least_work(problem, (64, 80), OVERHEAD_COLUMNS, LEAST_SAVED)


def _of_one_key_tile(problem: AttentionProblem) -> Tile:
    """A key tile as wide as the keys are many, where no correction could wait: 77 of head dim 160, 1.02 over 112."""
    return Tile(block_m=128, block_n=max(64, 16 * ceil_div(problem.seqlen_k, 16)))
