"""In which order the Hopper backward kernel works on key tiles, and where in its queries each of them begins.

What is in work at a time reads the same query heads, as far as these stay in L2; which thread blocks share a key tile
is a choice of the tile (``hopper_backward_tile.py``).
"""

from __future__ import annotations

import functools
import heapq
import math
from dataclasses import replace
from typing import Final

from ..front.problem import AttentionProblem
from .common import ceil_div
from .hopper_backward_config import BLOCK_N
from .hopper_backward_wide import WIDE_L2_BYTES, is_wide
from .hopper_common import TileList, tile_list

MOST_STEP: Final = 2
"""Query tiles by which a key tile begins after the one before it, at most: what it has read is still in L2 then. 1 x
32760 x 512, 40 heads: 2.68 ms, and 3.67 spread over all of them; 4 x 4096 x 300, 10 heads, D 64: 0.136 and 0.161."""
WINDOW_L2_BYTES: Final = 40 << 20
L2_BYTES: Final = 32 << 20
"""What stays in an L2 of 50 to 60 MB beside what streams through."""
TURNS_OF_TILE: Final = 2
"""What a key tile takes beside its query tiles, in those."""
TURNS_OF_PART: Final = 5
"""What a part of one takes that adds up three query tiles' worth of dk and dv."""
MOST_TILES_IN_TURN: Final = 2048
"""Key tiles up to which `in_turn` follows them: 0.4 to 0.5 ms of the host for an order (one core of an Intel Xeon)."""
EVEN: Final = 1.02
"""Times the work of all thread blocks by which an order may end later without another being looked for."""
SEQUENCE_CHUNKS: Final = 16
"""``kSequenceChunks`` in ``cuda_src/nvrtc_attn/hopper/backward/list_key_tiles.cuh``."""


def tile_list_of(problem: AttentionProblem, splits: int) -> TileList:
    """The list of the key tiles of packed sequences.

    With a band they come by sequences, but not in the deterministic pass, in which they wait for each other.
    """
    group = problem.num_heads // problem.num_heads_kv // splits
    l2_bytes = WIDE_L2_BYTES if is_wide(problem) else L2_BYTES
    listed = tile_list(
        problem.k.shape[1],
        problem.batch,
        BLOCK_N,
        heads=problem.num_heads_kv * splits,
        resident_rows=problem.q.shape[1],
        l2_rows=l2_bytes // (group * row_bytes(problem)),
    )
    return by_sequences(listed, problem.q.shape[1]) if problem.band and not problem.deterministic else listed


def by_sequences(listed: TileList, rows: int) -> TileList:
    """``listed`` with chunks of ``rows`` queries that tell sequences of about the same length apart."""
    chunk_rows = max(ceil_div(rows, SEQUENCE_CHUNKS), 1)
    return replace(listed, chunk_rows=chunk_rows, num_chunks=max(ceil_div(rows, chunk_rows), 1))


def is_causal(problem: AttentionProblem) -> bool:
    """Whether queries see all keys up to a diagonal: key tiles of a head then have different numbers of query tiles.

    With a window all but a few have the same number.
    """
    return problem.window_left is None and problem.window_right is not None


def row_bytes(problem: AttentionProblem) -> int:
    """Q, dO and dq of a query and a head."""
    return 2 * problem.head_dim_v + 6 * problem.head_dim


def head_bytes(problem: AttentionProblem) -> int:
    """Of all queries of a head."""
    return problem.seqlen_q * row_bytes(problem)


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
        row = row_bytes(problem)
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


def even_group(problem: AttentionProblem, splits: int, workers: int, together: int) -> int:
    """``together`` of `head_group`, or another half to twice as many with which a causal pass ends earlier.

    Tiles of a group that begin long end short, so that pairs of groups are even and an odd one is left over.
    """
    heads = problem.batch * problem.num_heads_kv * splits
    if not is_causal(problem) or heads * ceil_div(problem.seqlen_k, BLOCK_N) > MOST_TILES_IN_TURN:
        return together
    usual, even = in_turn(problem, splits, workers, together)
    if usual <= EVEN * even:
        return together
    others = range(max(together // 2, 1), min(2 * together, heads) + 1)
    best = min(others, key=lambda x: (in_turn(problem, splits, workers, x)[0], abs(x - together)))
    return best if in_turn(problem, splits, workers, best)[0] * EVEN <= usual else together


def in_turn(problem: AttentionProblem, splits: int, workers: int, together: int) -> tuple[float, float]:
    """When the last thread block of a causal pass ends, and when all would if their work were the same.

    In tiles of 64 queries. Every block takes the next key tile when it is done with one.
    """
    heads = problem.batch * problem.num_heads_kv * splits
    assert problem.window_right is not None
    behind = problem.window_right + (problem.seqlen_k - problem.seqlen_q if problem.bottom_right else 0)
    of_tile = problem.num_heads // problem.num_heads_kv // splits
    beside = TURNS_OF_TILE if splits == 1 else TURNS_OF_PART
    return _in_turn(problem.seqlen_q, problem.seqlen_k, behind, of_tile, beside, heads, together, workers)


@functools.lru_cache(4096)
def _in_turn(
    rows: int, keys: int, behind: int, heads_of_tile: int, beside: int, heads: int, together: int, workers: int
) -> tuple[float, float]:
    """`in_turn` by numbers: query 0 sees key ``behind``."""
    seen = (rows - max(n * BLOCK_N - behind, 0) for n in range(ceil_div(keys, BLOCK_N)))
    times = [heads_of_tile * max(x, 0) / 64 + beside for x in seen]
    whole, rest = divmod(heads, together)
    tiles = [x for x in times for _ in range(together)] * whole + [x for x in times for _ in range(rest)]
    return _last_end(tiles, workers), sum(tiles) / workers


def end_of_parts(
    problem: AttentionProblem, block_m: int, parts: int, workers: int, beside: tuple[float, float]
) -> float:
    """As the first of `in_turn`, where every query head has key tiles of its own and each of them is in ``parts``.

    In tiles of ``block_m`` queries; ``beside`` is what a whole tile and a part take beside them.
    """
    assert problem.window_right is not None
    behind = problem.window_right + (problem.seqlen_k - problem.seqlen_q if problem.bottom_right else 0)
    heads = problem.batch * problem.num_heads
    key_tiles = ceil_div(problem.seqlen_k, BLOCK_N)
    seen = (problem.seqlen_q - max(n * BLOCK_N - behind, 0) for n in range(key_tiles))
    turns = [ceil_div(max(x, 0), block_m) for x in seen]
    more = beside[parts > 1]
    times = [(p + 1) * x // parts - p * x // parts + more for p in range(parts) for x in turns]
    return _last_end([x for x in times for _ in range(heads)], workers)


def _last_end(times: list[float], workers: int) -> float:
    """When the last of ``workers`` ends, each of which takes the next of ``times`` when it is done with one."""
    ends = times[:workers]
    heapq.heapify(ends)
    for time in times[workers:]:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


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
