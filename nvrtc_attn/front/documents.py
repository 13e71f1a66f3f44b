"""Packed sequences whose tokens ranks share: what a rank computes in one call, and which tokens it has. No tensors.

A rank's chunk of packed tokens is, of self-attention, at most three calls. Documents that lie in it whole are one
varlen call, whose results nobody adds to. One that began before the chunk, and one that goes on behind it, are a dense
call each, a part of that document. Each has its place in its document, so windows, dropout and the positions that
modifiers get are those of the whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from .chunks import Chunks, Interval, joined, length, reach, without


class Piece(NamedTuple):
    """Queries that are computed by one call, and all keys that they see."""

    rows: Interval
    keys: Interval
    document: int = 0
    """That of a dense call, the first of a varlen call; -1 of tokens in no document, which see nothing."""
    row: int = 0
    """Where the rows begin in their document."""
    key: int = 0
    """Where the keys begin in it."""
    lengths: tuple[int, ...] = ()
    """cu_seqlens of a varlen call, of queries and keys."""


class Packing(NamedTuple):
    """Documents packed on the token dim, whose queries and keys are the same tokens."""

    starts: tuple[int, ...]
    """cu_seqlens of the whole."""
    left: int | None
    """The window, None = unbounded; causal is a right bound of 0."""
    right: int | None

    @property
    def documents(self) -> int:
        """How many there are, empty ones included."""
        return len(self.starts) - 1

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max((b - a for a, b in pairwise(self.starts)), default=0)

    def pieces(self, chunks: Chunks) -> list[Piece]:
        """The calls of a rank with these tokens, in their order; every token is in one of them."""
        return [piece for chunk in chunks for piece in self._of_chunk(chunk)]

    def _of_chunk(self, chunk: Interval) -> list[Piece]:
        first, last = self.starts[0], self.starts[-1]
        (a, b), found = chunk, list[Piece]()
        if a < min(b, first):
            found.append(Piece((a, min(b, first)), (0, 0), -1))
        begin, end = max(a, first), min(b, last)
        if begin < end:
            found += self._of_documents(begin, end)
        if max(a, last) < b:
            found.append(Piece((max(a, last), b), (0, 0), -1))
        return found

    def _of_documents(self, a: int, b: int) -> list[Piece]:
        """Of tokens that are all in documents."""
        found = []
        document = bisect_right(self.starts, a) - 1  # the one that holds token a: empty ones before it begin there, too
        if self.starts[document] < a:
            stop = min(b, self.starts[document + 1])
            found.append(self._dense(document, a, stop))
            a, document = stop, document + 1
        if a == b:
            return found
        final = bisect_right(self.starts, b - 1) - 1
        tail = None
        if b < self.starts[final + 1]:  # its last document goes on
            tail = self._dense(final, self.starts[final], b)
            b, final = self.starts[final], final - 1
        if a < b:
            document = bisect_right(self.starts, a) - 1
            final = bisect_right(self.starts, b - 1) - 1
            if document == final:
                found.append(self._dense(document, a, b))
            else:
                of_call = (min(x, b) - a for x in self.starts[document : final + 2])
                found.append(Piece((a, b), (a, b), document, lengths=tuple(of_call)))
        return [*found, tail] if tail else found

    def _dense(self, document: int, a: int, b: int) -> Piece:
        start, size = self.starts[document], self.starts[document + 1] - self.starts[document]
        band = None if self.left is None else -self.left, self.right
        keys = reach((a - start, b - start), band, size)
        if keys[0] == keys[1]:
            return Piece((a, b), (0, 0), document, a - start)
        return Piece((a, b), (start + keys[0], start + keys[1]), document, a - start, keys[0])


_TRIED: Final = (*range(5), *(x << i for i in range(1, 16) for x in (3, 4)))
"""Numbers of documents that are cut, from the fewest: cuts are calls."""
_UNEQUAL: Final = 1.05
"""Work of the rank that has the most, in that of the mean, with which no more documents are cut."""


def shared_documents(starts: Sequence[int], seqlen: int, ranks: int) -> tuple[Chunks, ...]:
    """The tokens of each rank: as many on each, to within one, and near equal causal work, in few intervals.

    The longest documents are cut as ``"zigzag"`` cuts a sequence: each rank has two pieces of each, equal tokens and
    equal work, and two calls. The other tokens are cut once for each rank, so that all have as many in the end. As few
    documents are cut as leave no rank more than 1.05 times the mean work: none where all are short.
    """
    pairs = [(a, b) for a, b in pairwise(starts) if a < b]
    by_length = sorted(pairs, key=lambda x: (x[0] - x[1], x[0]))
    best: tuple[float, tuple[Chunks, ...]] | None = None
    for count in sorted({min(x, len(pairs)) for x in _TRIED if x < 2 * len(pairs) + 1} | {0}):
        found = _cut_longest(by_length[:count], seqlen, ranks)
        work = [_work(mine, pairs) for mine in found]
        most = max(work) * ranks / max(sum(work), 1)
        if best is None or most < best[0]:
            best = most, found
        if most <= _UNEQUAL:
            break
    assert best is not None
    return best[1]


def _cut_longest(cut: Sequence[Interval], seqlen: int, ranks: int) -> tuple[Chunks, ...]:
    """Two pieces of each of these documents on every rank, and of the other tokens what makes all ranks equal."""
    found: list[list[Interval]] = [[] for _ in range(ranks)]
    dealt = 0
    for a, b in cut:
        counts = [_dealt(dealt + b - a, r, ranks) - _dealt(dealt, r, ranks) for r in range(ranks)]
        dealt += b - a
        sizes = [n // 2 for n in counts]
        sizes += [n - n // 2 for n in reversed(counts)]
        edges = [a, *(a + n for n in accumulate(sizes))]
        for r in range(ranks):
            found[r] += [(edges[i], edges[i + 1]) for i in (r, 2 * ranks - 1 - r)]
    rest = without([(0, seqlen)], sorted(cut))
    for r in range(ranks):
        count = _dealt(seqlen, r, ranks) - length(found[r])
        while count:
            (a, b), *others = rest
            taken = min(count, b - a)
            found[r].append((a, a + taken))
            count -= taken
            rest = tuple([(a + taken, b)] * (a + taken < b) + others)
    return tuple(joined(sorted(mine)) for mine in found)


def _dealt(tokens: int, rank: int, ranks: int) -> int:
    """How many of so many tokens a rank gets where they are dealt to the ranks in turn."""
    return -((rank - tokens) // ranks)


def _work(chunks: Chunks, documents: Sequence[Interval]) -> int:
    """Scores of causal attention."""
    total, at = 0, 0
    for a, b in chunks:
        while at < len(documents) and documents[at][1] <= a:
            at += 1
        i = at
        while i < len(documents) and documents[i][0] < b:
            start, stop = documents[i]
            first, last = max(a, start) - start, min(b, stop) - start
            total += (last * (last + 1) - first * (first + 1)) // 2
            i += 1
    return total
