"""Which tokens each rank has, and which keys its queries reach: intervals of the whole sequence, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Any

from ..base.errors import shown

Interval = tuple[int, int]
"""``[start, stop)`` of the whole sequence."""
Chunks = tuple[Interval, ...]
"""The tokens of one rank in the order of its tensors: ascending, none of them empty."""
Band = tuple[int | None, int | None]
"""Row i sees keys from i + first to i + last, None = no bound."""


def chunks_of(layout: Any, seqlen: int, ranks: int) -> tuple[Chunks, ...]:
    """The tokens of each rank.

    ``"contiguous"`` gives rank r one piece, ``"zigzag"`` pieces r and 2 N - 1 - r of 2 N: under a causal mask all ranks
    then have the same work. Pieces differ by at most one token where ``seqlen`` does not divide. Otherwise ``layout``
    lists for each rank its (start, stop) pairs.

    Raises
    ------
    TypeError, ValueError
        Another layout, or one that does not hold every token once.
    """
    if isinstance(layout, str) and layout in ("contiguous", "zigzag"):
        pieces = ranks if layout == "contiguous" else 2 * ranks
        cuts = [seqlen * i // pieces for i in range(pieces + 1)]
        bounds = list(pairwise(cuts))
        if layout == "contiguous":
            return tuple(joined([bounds[r]]) for r in range(ranks))
        return tuple(joined([bounds[r], bounds[pieces - 1 - r]]) for r in range(ranks))
    if isinstance(layout, str) or not isinstance(layout, Sequence):
        raise TypeError(f"layout: got {shown(layout)}. It is 'zigzag', 'contiguous', or for each rank its intervals.")
    if len(layout) != ranks:
        raise ValueError(f"layout: got intervals of {len(layout)} ranks, but there are {ranks}.")
    found = []
    for r, intervals in enumerate(layout):
        try:
            mine = [(index(a), index(b)) for a, b in intervals]
        except (TypeError, ValueError):
            raise TypeError(
                f"layout: rank {r} has {shown(intervals)}. It is a list of pairs (start, stop) of integers."
            ) from None
        if any(a > b for a, b in mine) or any(x[1] > y[0] for x, y in pairwise(mine)):
            raise ValueError(f"layout: rank {r} has {shown(mine)}. Its intervals are ascending and do not overlap.")
        found.append(joined(mine))
    if (
        joined(sorted(x for mine in found for x in mine)) != (((0, seqlen),) if seqlen else ())
        or sum(map(length, found)) != seqlen
    ):
        raise ValueError(f"layout: the intervals of all ranks must hold each of {seqlen} tokens once.")
    return tuple(found)


def joined(intervals: Sequence[Interval]) -> Chunks:
    """Ascending intervals without empty ones, those that touch or overlap made one."""
    found: list[Interval] = []
    for a, b in intervals:
        if a >= b:
            continue
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], b))
        else:
            found.append((a, b))
    return tuple(found)


def length(chunks: Sequence[Interval]) -> int:
    """Number of tokens."""
    return sum(b - a for a, b in chunks)


def together(ranks: Sequence[Chunks]) -> Chunks:
    """The tokens of several ranks, in the order of the sequence."""
    return joined(sorted(x for chunks in ranks for x in chunks))


def common(a: Sequence[Interval], b: Sequence[Interval]) -> Chunks:
    """Tokens that are in both."""
    both = [(max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b]
    return joined(sorted(x for x in both if x[0] < x[1]))


def without(a: Sequence[Interval], b: Sequence[Interval]) -> Chunks:
    """Tokens of ``a`` that are not in ``b``; both are ascending and apart."""
    found = []
    for first, last in a:
        for start, stop in b:
            if start < last and stop > first:
                found.append((first, min(start, last)))
                first = min(stop, last)
        found.append((first, last))
    return joined(found)


def places(chunks: Sequence[Interval], tokens: Sequence[Interval]) -> list[slice]:
    """Where in a tensor that has ``chunks`` the intervals ``tokens`` lie, each of them within one chunk."""
    found = []
    for a, b in tokens:
        at = 0
        for first, last in chunks:
            if first <= a and b <= last:
                found.append(slice(at + a - first, at + b - first))
                break
            at += last - first
    assert len(found) == len(tokens), (chunks, tokens)
    return found


def band_of(left: int | None, right: int | None, rows: int, keys: int, bottom_right: bool) -> Band:
    """The band of a whole call, of its window."""
    shift = keys - rows if bottom_right else 0
    return None if left is None else shift - left, None if right is None else shift + right


def reach(rows: Interval, band: Band, keys: int) -> Interval:
    """The keys that any of these rows sees; empty intervals are (0, 0)."""
    first = 0 if band[0] is None else max(rows[0] + band[0], 0)
    last = keys if band[1] is None else min(rows[1] + band[1], keys)
    return (first, last) if first < last and rows[0] < rows[1] else (0, 0)


def needed(chunks: Chunks, band: Band, keys: int) -> Chunks:
    """The keys that the rows of a rank see."""
    return joined(sorted(reach(rows, band, keys) for rows in chunks))
