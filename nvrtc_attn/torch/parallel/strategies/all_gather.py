"""Keys gathered: each rank fetches what its queries reach, and returns the gradients of that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from ....front.chunks import Chunks, Interval, common, joined, length, places, together, without
from ....front.documents import Piece
from ..exchange import Lanes, Pending, copy
from ..local import Whole, apply_sink, empty_key_gradients, hide_outside, slice_scores
from ..local import backward as backward_here
from ..local import forward as forward_here
from .strategy import (
    AHEAD,
    Gradients,
    Inputs,
    Saved,
    Tokens,
    add_dbias,
    begun_ahead,
    dsink_of_rows,
    in_groups,
    moved,
    side_by_side,
    zeros_of_bias,
)


class _Routes(NamedTuple):
    """Which keys go where, of one band."""

    have: Chunks
    """The keys that this rank has while it computes: its own, and those that its queries see."""
    first: tuple[list[list[slice]], list[list[slice]]]
    """Of each rank's row that sees the fewest keys: for each rank where the keys that it needs lie in ``have``, and
    where those that come from it do."""
    rest: tuple[list[list[slice]], list[list[slice]]]
    """The same of the other keys."""
    everything: tuple[list[list[slice]], list[list[slice]]]
    """The same of both, for who does not tell them apart."""
    early: tuple[list[list[slice]], list[list[slice]]]
    """Gradients that no row but the one that sees the most keys adds to: for each rank where those of its keys lie in
    ``have``, and where in this rank's tensors those that come from it belong."""
    late: tuple[list[list[slice]], list[list[slice]]]
    """The same of the other gradients."""
    sizes: frozenset[tuple[int, int, int]] = frozenset()
    """Keys while it computes, queries and own keys of each rank."""


class AllGather(Tokens):
    """Each rank fetches the keys that its queries reach, and returns their gradients to where they came from.

    ``pipeline`` groups of key heads: one is computed while the next is on its way. With a group of one rank nothing is
    sent: that is how a rank computes what it has all keys of. Within a group the keys of the row that sees the fewest
    come first, and gradients leave when the row that sees the most is done: the other row is computed meanwhile.

    ``keep``: whether the backward pass has what the forward pass fetched; None: where that is at most half of what it
    has anyway.

    ``joint``: whether dq, dk and dv lie `side_by_side` where they can, for who sends them on.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        chunks_q: Sequence[Chunks],
        chunks_k: Sequence[Chunks],
        pipeline: int = 1,
        *,
        keep: bool | None = None,
        lanes: int = 1,
        joint: bool = False,
    ) -> None:
        super().__init__(group, rank, chunks_q, chunks_k)
        self.pipeline, self.keep, self.lanes = pipeline, keep, lanes
        self.joint = joint
        self._known: dict[Any, _Routes] = {}

    def _groups(self, x: Inputs) -> list[slice]:
        """Key heads, in as many groups as are computed one after the other."""
        count = 1 if self.size == 1 else max(min(self.pipeline, x.k.shape[2]), 1)
        return in_groups(slice(0, x.k.shape[2]), count)

    def _ordered(self, whole: Whole, rank: int) -> list[Interval]:
        """The keys that each piece of a rank's queries sees, the fewest first."""
        return sorted((piece.keys for piece in whole.pieces(self.chunks_q[rank])), key=lambda x: x[1] - x[0])

    def _routes(self, whole: Whole) -> _Routes:
        nothing: tuple[list[list[slice]], list[list[slice]]] = ([], [])
        if self.size == 1:
            return _Routes(self.chunks_k[0], *(nothing,) * 5)
        key = whole.band, whole.keys, whole.packing
        if key not in self._known:
            if len(self._known) > 64:
                self._known.clear()
            self._known[key] = self._make_routes(whole)
        return self._known[key]

    def _make_routes(self, whole: Whole) -> _Routes:
        ranks = range(self.size)
        mine = self.chunks_k[self.rank]
        seen = [self._ordered(whole, r) for r in ranks]
        needs = [joined(sorted(rows)) for rows in seen]
        have = together([needs[self.rank], mine])

        def fetched(of: Sequence[Chunks]) -> tuple[list[list[slice]], list[list[slice]]]:
            sent = [places(have, common(mine, keys)) if r != self.rank else [] for r, keys in enumerate(of)]
            own = of[self.rank]
            return sent, [places(have, common(self.chunks_k[r], own)) if r != self.rank else [] for r in ranks]

        def returned(of: Sequence[Chunks]) -> tuple[list[list[slice]], list[list[slice]]]:
            sent = [places(have, common(self.chunks_k[r], of[self.rank])) for r in ranks]
            return sent, [places(mine, common(mine, keys)) for keys in of]

        first = [joined(rows[:1]) for rows in seen]
        others = [joined(sorted(rows[:-1])) for rows in seen]
        return _Routes(
            have, fetched(first), fetched([without(x, y) for x, y in zip(needs, first, strict=True)]), fetched(needs),
            returned([without(x, y) for x, y in zip(needs, others, strict=True)]), returned(others),
            frozenset(
                (length(together([x, keys])), length(rows), length(keys))
                for x, rows, keys in zip(needs, self.chunks_q, self.chunks_k, strict=True)
            ),
        )  # fmt: skip

    def _fetches(self, x: Inputs, groups: Sequence[slice], routes: _Routes, kept: Sequence[Any]) -> Iterator[list[Any]]:
        """[memory, k, v, what to wait for before the first row, and before the others] of one group of heads at a time.

        k and v have the keys that this rank needs, in the order of the sequence; they are in ``memory``. Take all three
        out of the list and forget them before the next ones: the memory is for those.
        """
        nothing = Pending()
        if self.size == 1:
            yield from ([(), x.k[:, :, heads], x.v[:, :, heads], nothing, nothing] for heads in groups)
            return
        if kept:
            each = len(kept) // len(groups)
            for n, heads in enumerate(groups):
                memory = kept[n * each : (n + 1) * each]
                k, v = (y.transpose(0, 1) for y in _apart(memory, [y[:, :, heads] for y in (x.k, x.v)]))
                yield [memory, k, v, nothing, nothing]
            return
        own = self.chunks_k[self.rank]
        at, there = places(own, own), places(routes.have, own)

        def begin(heads: slice) -> list[Any]:
            memory, tensors = side_by_side([y[:, :, heads] for y in (x.k, x.v)], length(routes.have))
            for a, b in zip(at, there, strict=True):
                for y, z in zip((x.k, x.v), tensors, strict=True):
                    copy(z[b], y[:, a, heads].transpose(0, 1))
            # Later groups are on their way while others are computed: there is nothing to gain by halves.
            stages = (routes.first, routes.rest) if heads.start == groups[0].start else (routes.everything,)
            pending = [
                self.exchange(*([[y[s] for s in slices for y in memory] for slices in side] for side in stage))
                for stage in stages
            ]
            both = [y.transpose(0, 1) for y in tensors]
            return [memory, *both, pending[0], *pending[1:], *([nothing] * (2 - len(stages)))]

        yield from begun_ahead(groups, begin)

    def _keeps(self, x: Inputs, whole: Whole) -> bool:
        """Whether what was fetched is kept: on all ranks, or on none."""
        if not whole.may_keep:
            return False
        if self.size == 1 or self.keep is not None:
            return bool(self.keep) and self.size > 1
        of_q, of_k = (heads * (x.k.shape[3] + x.v.shape[3]) for heads in (x.q.shape[2], x.k.shape[2]))
        return all(2 * have * of_k <= rows * of_q + keys * of_k for have, rows, keys in self._routes(whole).sizes)

    def like_kept(self, x: Inputs, whole: Whole) -> list[torch.Tensor]:
        if not (whole.backward_follows and self._keeps(x, whole)):
            return []
        tokens = length(self._routes(whole).have)
        of_groups = ([y[:, :, heads] for y in (x.k, x.v)] for heads in self._groups(x))
        return [y for of_group in of_groups for y in side_by_side(of_group, tokens)[0]]

    def forward(self, x: Inputs, whole: Whole) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        groups, routes, per_head = self._groups(x), self._routes(whole), x.q.shape[2] // max(x.k.shape[2], 1)
        out = x.q.new_empty((*x.q.shape[:3], x.v.shape[3]))
        lse = x.q.new_empty((x.q.shape[0], x.q.shape[2], x.q.shape[1]), dtype=torch.float32)
        kept: list[torch.Tensor] | None = [] if whole.backward_follows and self._keeps(x, whole) else None
        rows = [(piece, at, *_seen(piece, routes.have)) for piece, at in self.rows(whole)]
        rows.sort(key=lambda row: row[2][1] - row[2][0])
        whole.prepare([piece for piece, *_ in rows], x.q.device)
        lanes = Lanes(x.q.device, self.lanes if len(groups) * len(rows) > 1 else 1)
        for n, (heads, fetched) in enumerate(zip(groups, self._fetches(x, groups, routes, ()), strict=True)):
            rest, first, v, k, fetched_memory = (fetched.pop() for _ in range(5))
            of_q = slice(heads.start * per_head, heads.stop * per_head)
            first.wait()
            for i, (piece, at, keys, where) in enumerate(rows):
                if i == 1 or len(rows) == 1:
                    rest.wait()
                beside = self.size == 1 or n + 1 < len(groups) or i + 1 < len(rows)
                with lanes.next():
                    lse[:, of_q, at] = forward_here(
                        x.q[:, at, of_q], k[:, where], v[:, where], slice_scores(x.bias, of_q, at, keys),
                        slice_scores(x.mask, of_q, at, keys), out[:, at, of_q],
                        *whole.call(moved(of_q, x.head), piece, keys, x.num_heads, beside=beside),
                    )  # fmt: skip
            rest.wait()  # of a rank without queries
            if kept is not None:
                kept += fetched_memory
            else:
                lanes.join()  # before the memory is anybody else's
            del k, v, fetched_memory
        lanes.join()
        if x.sink is not None:
            apply_sink(out, lse, x.sink)
            hide_outside(lse, whole, self.rows(whole))
        return out, lse, Saved(x, out, lse, x.k.shape[2], kept or ())

    def backward(self, saved: Saved, whole: Whole, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        x, out, lse, _, kept = saved
        groups, routes, per_head = self._groups(x), self._routes(whole), x.q.shape[2] // max(x.k.shape[2], 1)
        if self.joint and _are_joint(x, whole):
            columns = side_by_side(x[:3], x.q.shape[1])[1]
            dq, dk, dv = (y.transpose(0, 1) for y in columns)
        else:
            dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
            dk, dv = empty_key_gradients(x.k, x.v, whole)
        dbias = zeros_of_bias(x.bias, whole)
        # Those that see the most keys first: what they write of dk and dv need not be zeroed before. See `_ordered`.
        rows = [(piece, at, *_seen(piece, routes.have)) for piece, at in self.rows(whole)]
        rows.sort(key=lambda row: row[2][1] - row[2][0])
        rows.reverse()
        whole.prepare([piece for piece, *_ in rows], x.q.device)
        returning: list[Callable[[], None]] = []
        # Shares of a bias and of captured arrays are added up as they are made.
        shared = dbias is not None or any(y is not None for y in whole.daux)
        lanes = Lanes(x.q.device, self.lanes if len(rows) > 1 and not shared else 1)
        for n, (heads, fetched) in enumerate(zip(groups, self._fetches(x, groups, routes, kept), strict=True)):
            rest, first, v, k, fetched_memory = (fetched.pop() for _ in range(5))
            first.wait()
            rest.wait()
            of_q = slice(heads.start * per_head, heads.stop * per_head)
            if self.size == 1 and len(rows) == 1:
                memory, of_all = list[torch.Tensor](), [dk[:, :, heads], dv[:, :, heads]]
            else:
                memory, tensors = side_by_side([k, v], length(routes.have), torch.float32)
                of_all = [y.transpose(0, 1) for y in tensors]
            if not rows or rows[0][2][0] == rows[0][2][1]:
                for y in of_all:
                    y.zero_()
            finish_early: Callable[[], list[list[torch.Tensor]]] | None = None
            added: list[tuple[slice, list[torch.Tensor]]] = []
            for i, (piece, at, keys, where) in enumerate(rows):
                if keys[0] == keys[1]:
                    dq[:, at, of_q] = 0
                    continue
                of_row = [y[:, where] for y in of_all]
                if i == 0:
                    for y in of_all:
                        y[:, : where.start], y[:, where.stop :] = 0, 0
                beside = self.size == 1 or n + 1 < len(groups) or i > 0
                with lanes.next():
                    if i > 0:
                        of_row = [torch.empty(y.shape, dtype=torch.float32, device=y.device) for y in of_row]
                        added.append((where, of_row))
                    share = backward_here(
                        x.q[:, at, of_q], k[:, where], v[:, where], slice_scores(x.bias, of_q, at, keys),
                        slice_scores(x.mask, of_q, at, keys), out[:, at, of_q], lse[:, of_q, at], dout[:, at, of_q],
                        None if dlse is None else dlse[:, of_q, at], (dq[:, at, of_q], *of_row),
                        *whole.call(moved(of_q, x.head), piece, keys, x.num_heads, beside=beside), add=False,
                    )  # fmt: skip
                add_dbias(dbias, share, of_q, at, keys)
                if i == 0 and self.size > 1 and not lanes:
                    finish_early = self._send_back(routes.early, memory)
            if self.size > 1 and finish_early is None:
                lanes.join(1)  # another lane does not wait for this
                finish_early = self._send_back(routes.early, memory)
            lanes.join()
            for where, of_row in added:
                for y, z in zip(of_all, of_row, strict=True):
                    y[:, where] += z
            added.clear()
            if finish_early is not None:
                finish_late = self._send_back(routes.late, memory)
                results = [dk[:, :, heads], dv[:, :, heads]]
                returning.append(functools.partial(_collect, routes, finish_early, finish_late, results))
            elif memory:
                dk[:, :, heads], dv[:, :, heads] = of_all
            del k, v, fetched_memory, of_all, memory
            if len(returning) == AHEAD:
                returning.pop(0)()
        for finish in returning:
            finish()
        return Gradients(dq, dk, dv, dbias, dsink_of_rows(x, whole, out, lse, dout, dlse))

    def _send_back(
        self, route: tuple[list[list[slice]], list[list[slice]]], memory: Sequence[torch.Tensor]
    ) -> Callable[[], list[list[torch.Tensor]]]:
        """Send gradients of fetched keys to where the keys are; what waits for those that come, of each rank."""
        sent, kept = route
        sends = [[y[s] for s in slices for y in memory] if r != self.rank else [] for r, slices in enumerate(sent)]
        receives = [
            [y.new_empty((s.stop - s.start, *y.shape[1:])) for s in slices for y in memory] if r != self.rank else []
            for r, slices in enumerate(kept)
        ]
        pending = self.exchange(sends, receives)
        own = [y[s] for s in sent[self.rank] for y in memory]

        def finish() -> list[list[torch.Tensor]]:
            pending.wait()
            return [own if r == self.rank else receives[r] for r in range(self.size)]

        return finish


def _are_joint(x: Inputs, whole: Whole) -> bool:
    """Whether dq, dk and dv have the same tokens, type and head dim, so that one message is for all of them."""
    q, k, v = x[:3]
    return not whole.adds_up and q.shape[1] == k.shape[1] and q.shape[3] == v.shape[3] and q.dtype == k.dtype == v.dtype


def _collect(
    routes: _Routes,
    early: Callable[[], list[list[torch.Tensor]]],
    late: Callable[[], list[list[torch.Tensor]]],
    results: Sequence[torch.Tensor],
) -> None:
    """Add up what all ranks return of a rank's dk and dv, in the ranks' order."""
    found: list[list[tuple[slice, torch.Tensor]]] = [[] for _ in results]
    both = [(routes.early[1], early()), (routes.late[1], late())]
    for r in range(len(routes.early[1])):
        for kept, shares in both:
            for s, *parts in zip(kept[r], *_columns(shares[r], len(kept[r])), strict=True):
                for of_result, share in zip(found, _apart(parts, results), strict=True):
                    of_result.append((s, share))
    for y, of_result in zip(results, found, strict=True):
        _add_up(y.transpose(0, 1), of_result)


def _columns(shares: Sequence[torch.Tensor], places: int) -> list[Sequence[torch.Tensor]]:
    """Shares of each place one after the other, by tensor."""
    count = len(shares) // max(places, 1)
    return [shares[i::count] for i in range(count)]


def _apart(memory: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors in what `side_by_side` made."""
    if len(memory) == len(like):
        return memory
    edges = [0, *accumulate(y.shape[2] for y in like)]
    return [memory[0][:, :, a:b] for a, b in pairwise(edges)]


def _add_up(result: torch.Tensor, shares: Sequence[tuple[slice, torch.Tensor]]) -> None:
    """Write sums of float32 ``(rows, share)`` in their order to rows of ``result``, which may be of another type."""
    edges = sorted({0, result.shape[0], *(x for s, _ in shares for x in (s.start, s.stop))})
    for a, b in pairwise(edges):
        parts = [share[a - s.start : b - s.start] for s, share in shares if s.start <= a and b <= s.stop]
        if len(parts) < 2:
            result[a:b] = parts[0] if parts else 0
            continue
        total = parts[0]
        for part in parts[1:-1]:
            total = total.add_(part)
        torch.add(total, parts[-1], out=result[a:b])


def _seen(piece: Piece, have: Chunks) -> tuple[Interval, slice]:
    """The keys that a piece of the queries sees, and where they are among those that the rank has."""
    keys = piece.keys
    if keys[0] == keys[1]:
        return keys, slice(0, 0)
    return keys, places(have, [keys])[0]
