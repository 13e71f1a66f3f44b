"""A row of the tile table of the Hopper backward kernel, and the config that it makes of a problem.

Most of it follows from what scores need beside their products (`is_plain`, `bias_as_tiles` and so on). The tile table
and the reasons against the kernel ask the same questions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ..base.dtypes import DTYPES
from ..front.problem import AttentionProblem
from ..jit.config import Features, HopperBackwardConfig
from ..modifiers.cuda import has_head_slope, sums_held
from ..modifiers.cuda_gradients import trains_plainly
from .common import ceil_div, features_of, is_full_shape
from .hopper_backward_wide import is_wide, wide_config
from .hopper_common import begins_products, diagonal_bytes, product_width, score_operands
from .hopper_dbias import dbias_layout
from .tensor_map import score_reasons_against
from .tile_words import bits_bytes, may_have_bits, with_words
from .tile_words import pays as words_pay

BLOCK_N: Final = 128
NUM_STAGES: Final = 2


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
    """Thread blocks that share the query tiles of a key tile that is not one of ``whole``."""
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
    key_slots: int = 1
    """`HopperBackwardConfig.key_slots`; 1 where another choice of the tile leaves no room or no idle warps."""
    tile_bits: bool = False
    """`KernelConfig.tile_bits`: of a mask_mod, where P is known before dP."""
    begins_products: bool = False
    """`HopperBackwardConfig.begins_products`: of a score_mod that adds what distances decide."""


def can_have_two_slots(tile: Tile) -> bool:
    """Whether warps are idle, there is room for another K and for dv, and dk and dv are those of one thread block."""
    return not (tile.fused or tile.wide or tile.splits > 1 or tile.parts > 1 or tile.block_m == 80)


def smem_bytes(config: HopperBackwardConfig) -> int:
    """Dynamic shared memory of one thread block; the map is at the head of ``backward_hopper.cuh``."""
    slabs, slabs_v, groups = ceil_div(config.head_dim, 64), ceil_div(config.head_dim_v, 64), config.block_n // 64
    rows = config.block_n * (slabs + slabs_v) + 2 * groups * config.block_m
    rows += config.block_m * config.num_stages * (slabs + slabs_v)
    if config.block_m == 80:  # dq on its way to global memory
        rows += 4 * config.block_m * config.head_dim // 128
    helpers = 0
    if config.keep_words or config.ordered or config.begins_products:
        helpers = 16 + 8 * (4 + 2 * config.num_stages) + 16 * config.keep_words * config.num_stages * config.block_n
    if config.bias_tiles and config.dbias == "store" and config.features.band:
        rows += config.block_m  # zeros
    if config.fused:  # three warps, 32 rows of out and of dout each, and mbarriers
        helpers = 3 * 2 * 32 * (2 * config.head_dim_v + 16) + 8 * 4
    if config.parts:  # which query tiles, of this part and of the next one
        helpers += 32
    if config.features.tile_words:  # how many query tiles, and which one each slot of q holds
        helpers += 16 + 8 * config.num_stages
    if config.tile_bits:
        helpers += config.num_stages * bits_bytes(config.block_n, config.block_m)
    if config.features.modifier:  # of each of the consumers' warps
        helpers += 16 * (config.block_n // 16) * sums_held(config.features.modifier)
    if config.begins_products:
        helpers += diagonal_bytes(config.block_n, config.block_m, config.num_stages)
    barriers = 4 + (6 if config.bias_tiles else 4) * config.num_stages
    if config.key_slots == 2:  # of k, and a place for dv
        rows += config.block_n * (slabs + slabs_v)
        helpers += 16
        barriers += 4
    return 128 * rows + config.num_stages * 8 * config.block_m + 16 + 8 * barriers + helpers


def uses_keep_words(problem: AttentionProblem) -> bool:
    """Whether dropout's decisions come from warps of their own; beside a bias, mask or softcap consumers make them.

    All launches then take 0.77 (D 64) to 0.81 (D 128, causal) of the time (H200, 2026-11-21; the figures are in
    docs/experiments.md, "Dropout: decisions made elsewhere").
    """
    if is_wide(problem) or problem.modifier is not None:
        return False
    return problem.dropout_p > 0 and score_operands(problem) == 1 and not problem.softcap


def reads_scores(problem: AttentionProblem) -> bool:
    """Whether every thread finds what of bias, mask and dropout each of its scores needs, beside the products."""
    return score_operands(problem) > 0 and not (
        uses_keep_words(problem) or bias_as_tiles(problem) or hides_keys(problem)
    )


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


def has_one_key_tile(problem: AttentionProblem) -> bool:
    """Whether the kernel stores dq instead of adding it up: one tile of keys, of one sequence."""
    if problem.seqlen_k > BLOCK_N or problem.varlen or is_wide(problem):
        return False
    # With a dbias that threads write, a band and head dims of 120 or 128 it would spill 8 bytes.
    by_threads = stores_dbias(problem) and not bias_as_tiles(problem)
    return not (by_threads and problem.band and min(problem.head_dim, problem.head_dim_v) > 112)


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
        key_slots=tile.key_slots if can_have_two_slots(tile) else 1,
    )
    if tile.wide:
        return wide_config(problem, config)
    if walks_words(problem):
        config = replace(with_words(config), tile_bits=tile.tile_bits)
    return replace(config, smem_bytes=smem_bytes(config))


def begins_early(config: HopperBackwardConfig) -> bool:
    """Whether the kernel's launch may overlap that of ``backward_hopper_prepare``: ``kBeginsEarly`` in load.cuh.

    It brings K, V and the first queries and then waits for the rows: 2 to 9 % less of passes up to 90 us, 0 to 2 % of
    longer ones (docs/experiments.md, "Launches that begin before the one ahead has ended"). Lists of key tiles and
    orders of additions are needed first, and fused rows have no such launch.
    """
    return config.cluster == 1 and not (
        config.fused or config.ordered or config.features.varlen or config.features.tile_words
    )


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
