"""What the choices of the Hopper family's forward and backward pass have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ..base.architectures import ARCHITECTURES
from ..front.operands import unread_by
from ..front.problem import AttentionProblem, OperandLayout
from ..modifiers.cuda import adds_distance
from .common import ceil_div, computes_by_distance, packed_slots

SMEM_LIMIT: Final = ARCHITECTURES["sm_90a"].smem_per_block_optin
"""Bytes of shared memory that a block may use on the only GPUs that the family runs on."""
DTYPES_16BIT: Final = ("float16", "bfloat16")
MIN_QUERY_ROWS: Final = 64
"""Fewer rows leave most of a tile empty: the portable family's small tiles and key splits serve them."""
LEAST_PLAIN_ROWS: Final = 33
LEAST_SCALE: Final = 2.0**-20
"""Of softmax_scale where products begin with a value that is divided by it (`begins_products`): a smaller one may make
that larger than float32 holds."""
LIST_CHUNKS: Final = 128
"""Chunks of packed sequences, at most: ``kListChunks`` in ``cuda_src/nvrtc_attn/hopper/common/tile_list.cuh``."""


def product_width(head_dim: int) -> int:
    """Products step over 16 columns; what lies beyond the tensor's head dim arrives as zeros."""
    return ceil_div(head_dim, 16) * 16


def score_operands(problem: AttentionProblem) -> int:
    """How many of bias, mask and dropout a score needs."""
    return (problem.bias is not None) + (problem.mask is not None) + (problem.dropout_p > 0)


def least_query_rows(problem: AttentionProblem) -> int:
    """Query rows from which on this family has a forward tile for ``problem``.

    Plain scores of 33 to 63 rows take 0.66 to 0.93 of the portable family's time (4 x 55 x 16, D 256, 11.4 and 9.7 us;
    30 x 60 x 500 x 16, D 96, 56 and 37; H200, 2026-11-29); others were not measured.
    """
    plain = not (problem.varlen or score_operands(problem)) and problem.modifier is None
    return LEAST_PLAIN_ROWS if plain else MIN_QUERY_ROWS


def mean_rows(problem: AttentionProblem) -> int:
    """Query rows of a sequence, of packed ones on average."""
    return _mean(problem, problem.seqlen_q, problem.q)


def mean_keys(problem: AttentionProblem) -> int:
    """Keys of a sequence, of packed ones on average."""
    return _mean(problem, problem.seqlen_k, problem.k)


def _mean(problem: AttentionProblem, longest: int, operand: OperandLayout) -> int:
    if not problem.varlen:
        return longest
    return min(longest, max(ceil_div(operand.shape[1], max(problem.batch, 1)), 1))


def least_work(problem: AttentionProblem, widths: Iterable[int], overhead: int, least: float = 1.0) -> int:
    """The width of a key tile, of ``widths``, with the least work for all keys.

    A tile costs its columns and ``overhead`` more; the first width is left for one that has ``least`` times less work.
    The first, too, where positions or lengths on the device decide.
    """
    first, *others = widths
    if problem.band or problem.varlen or problem.seqused_k:
        return first

    def cost(width: int) -> int:
        return ceil_div(problem.seqlen_k, width) * (width + overhead)

    best = min((first, *others), key=cost)
    return best if least * cost(best) <= cost(first) else first


def begins_products(problem: AttentionProblem) -> bool:
    """Whether the accumulators of Q K^T begin with what a score_mod adds: that does nothing else to scores.

    Beyond head dim 128 there is no shared memory for the values.
    """
    program = problem.modifier
    if not computes_by_distance() or program is None or program.mask is not None or not adds_distance(program):
        return False
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    return not (score_operands(problem) or wide or problem.softcap or problem.softmax_scale < LEAST_SCALE)


def diagonal_bytes(rows: int, columns: int, slots: int) -> int:
    """Shared memory of what products begin with: ``cuda_src/nvrtc_attn/hopper/common/begun_products.cuh``."""
    places = (slots + 1) * (rows + columns) // 8
    return 14 * 8 * (places | 1) + 16


def reasons_against_target(problem: AttentionProblem, arch: str, family: str) -> list[str]:
    """Why no kernel of the family serves the GPU, the element type or an optional operand."""
    found = []
    if arch not in ("sm_90", "sm_90a"):
        found.append(f"the target is {arch}; warp-group matrix products exist on sm_90a alone")
    if problem.dtype not in DTYPES_16BIT:
        found.append(f"dtype is {problem.dtype}; accepted are float16 and bfloat16")
    return found + unread_by(family, problem.further_inputs)


def reasons_against_size(problem: AttentionProblem, least: int = MIN_QUERY_ROWS) -> list[str]:
    """Why no kernel of the family serves so few rows, fewer than ``least``."""
    found = []
    if problem.seqlen_q < least:
        found.append(f"seqlen_q is {problem.seqlen_q}; fewer than {least} rows do not fill a tile")
    # Packed tensors may have no tokens under any bounds of the lengths, and a tensor map no empty dim.
    tokens = problem.q.shape[1], problem.k.shape[1]
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads, *tokens):
        found.append("a dim is empty")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TileList:
    """The list of the tiles of packed sequences, ``cuda_src/nvrtc_attn/hopper/common/tile_list.cuh``."""

    tiles: int
    """At most so many, whatever the lengths are."""
    chunk_rows: int
    """Rows of a chunk, whose operands stay in L2 for one key head."""
    num_chunks: int
    heads: int
    """Key heads whose tiles are handed out together, at least."""
    entry_bytes: int = 8
    """What the list says of a tile: which it is, and in the forward pass all about its sequence."""

    @property
    def nbytes(self) -> int:
        return 16 + self.entry_bytes * self.tiles


def tile_list(
    rows: int, sequences: int, tile: int, *, heads: int, resident_rows: int, l2_rows: int, entry_bytes: int = 8
) -> TileList:
    """The list of tiles of ``tile`` of ``rows`` tokens.

    ``resident_rows`` are the tokens of the other operand, of which ``l2_rows`` of one key head stay in L2. Where more
    heads fit, they share a pass over the list, so that the longest tiles of all of them come first.
    """
    chunk_rows = max(l2_rows, ceil_div(resident_rows, LIST_CHUNKS), 1)
    fitting = chunk_rows // max(resident_rows, 1)
    return TileList(
        tiles=packed_slots(rows, sequences, tile),
        chunk_rows=chunk_rows,
        num_chunks=max(ceil_div(resident_rows, chunk_rows), 1),
        heads=max(x for x in range(1, heads + 1) if heads % x == 0 and (x == 1 or x <= fitting)),
        entry_bytes=entry_bytes,
    )
