"""How ranks share an attention: keys gathered (`AllGather`), passed around (`Ring`), heads for tokens (`Ulysses`).

Each is made for the tokens of the ranks of one group and has `forward` and `backward` of a rank's tensors. q, out, dq
and their like hold the tokens of ``chunks_q``, k, v, dk and dv those of ``chunks_k``; bias and mask have the rank's
rows (or one) and all keys (or one).

What travels is stored with its tokens first: the tokens of a rank are then contiguous, are received where they are
wanted and sent from where they are. Exchanges begin two groups of heads ahead of the kernels and no further: so much of
what was fetched is in memory at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch

from ...front.chunks import Chunks, Interval, common, joined, length, places, together, without
from ...front.documents import Piece
from ..tensors import resolved
from .exchange import Lanes, Pending, exchange
from .local import (
    Whole,
    apply_sink,
    empty_key_gradients,
    empty_partial,
    empty_share,
    hide_outside,
    merge_into,
    share_dtype,
    sink_gradient,
    slice_scores,
    whole_with,
)
from .local import backward as backward_here
from .local import forward as forward_here

AHEAD = 2
"""Groups of heads whose exchange has begun before the kernels of the first of them."""


class Inputs(NamedTuple):
    """The tensors of a rank, and which of the whole's heads they have: ``q.shape[2]`` query heads from ``head``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    head: int
    num_heads: int
    sink: torch.Tensor | None = None


class Saved(NamedTuple):
    """What the backward pass needs. Where a strategy is not `Strategy.needs_own`, q, k, v, out and lse may be None."""

    x: Any
    """`Inputs`."""
    out: Any
    lse: Any
    num_heads_kv: int
    kept: Sequence[torch.Tensor] = ()
    """What was made beside: each of them has memory of its own, shared neither among them nor with others."""


class Gradients(NamedTuple):
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None
    """Float32."""
    dsink: torch.Tensor | None = None
    """Float32, the share of the rank's rows."""


class Strategy(Protocol):
    @property
    def needs_own(self) -> bool:
        """Whether the backward pass needs q, k, v, out and lse of the rank's own tokens."""

    def forward(self, x: Inputs, whole: Whole) -> tuple[torch.Tensor, torch.Tensor | None, Saved]:
        """Return out and lse (where it is asked for) of the rank's rows, and what `backward` needs."""

    def like_kept(self, x: Inputs, whole: Whole) -> list[torch.Tensor]:
        """Tensors of the shapes and types of `Saved.kept`, without their values: for a program that is traced."""

    def backward(self, saved: Saved, whole: Whole, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        """Gradients of the rank's tensors; of a bias with one row the rank's share, to be added up over the ranks."""


class _Tokens:
    """The tokens of the ranks of a group, and this rank's."""

    needs_own = True

    def __init__(self, group: Any, rank: int, chunks_q: Sequence[Chunks], chunks_k: Sequence[Chunks]) -> None:
        self.group, self.rank, self.size = group, rank, len(chunks_q)
        self.chunks_q, self.chunks_k = tuple(chunks_q), tuple(chunks_k)

    def exchange(self, sends: Sequence[Sequence[torch.Tensor]], receives: Sequence[Sequence[torch.Tensor]]) -> Pending:
        """`exchange` with the other ranks of the group."""
        return exchange(self.group, sends, receives)

    def rows(self, whole: Whole) -> list[tuple[Piece, slice]]:
        """What this rank computes in one call each, and where its tensors have the queries."""
        mine = self.chunks_q[self.rank]
        pieces = whole.pieces(mine)
        return list(zip(pieces, places(mine, [piece.rows for piece in pieces]), strict=True))


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


class AllGather(_Tokens):
    """Each rank fetches the keys that its queries reach, and returns their gradients to where they came from.

    ``pipeline`` groups of key heads: one is computed while the next is on its way. With a group of one rank nothing is
    sent: that is how a rank computes what it has all keys of. Within a group the keys of the row that sees the fewest
    come first, and gradients leave when the row that sees the most is done: the other row is computed meanwhile.

    ``keep``: whether the backward pass has what the forward pass fetched; None: where that is at most half of what it
    has anyway.
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
    ) -> None:
        super().__init__(group, rank, chunks_q, chunks_k)
        self.pipeline, self.keep, self.lanes = pipeline, keep, lanes
        self._known: dict[Any, _Routes] = {}

    def _groups(self, x: Inputs) -> list[slice]:
        """Key heads, in as many groups as are computed one after the other."""
        count = 1 if self.size == 1 else max(min(self.pipeline, x.k.shape[2]), 1)
        return _cuts(slice(0, x.k.shape[2]), count)

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
            memory, tensors = _side_by_side([y[:, :, heads] for y in (x.k, x.v)], length(routes.have))
            for a, b in zip(at, there, strict=True):
                for y, z in zip((x.k, x.v), tensors, strict=True):
                    z[b].copy_(y[:, a, heads].transpose(0, 1))
            # Later groups are on their way while others are computed: there is nothing to gain by halves.
            stages = (routes.first, routes.rest) if heads.start == groups[0].start else (routes.everything,)
            pending = [
                self.exchange(*([[y[s] for s in slices for y in memory] for slices in side] for side in stage))
                for stage in stages
            ]
            both = [y.transpose(0, 1) for y in tensors]
            return [memory, *both, pending[0], *pending[1:], *([nothing] * (2 - len(stages)))]

        yield from _begun_ahead(groups, begin)

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
        return [y for of_group in of_groups for y in _side_by_side(of_group, tokens)[0]]

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
                        *whole.call(_moved(of_q, x.head), piece, keys, x.num_heads, beside=beside),
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
        dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
        dk, dv = empty_key_gradients(x.k, x.v, whole)
        dbias = _zeros_of_bias(x.bias, whole)
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
                memory, tensors = _side_by_side([k, v], length(routes.have), torch.float32)
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
                        *whole.call(_moved(of_q, x.head), piece, keys, x.num_heads, beside=beside), add=False,
                    )  # fmt: skip
                _add_dbias(dbias, share, of_q, at, keys)
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
        return Gradients(dq, dk, dv, dbias, _dsink(x, whole, out, lse, dout, dlse))

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


def _side_by_side(
    like: Sequence[torch.Tensor], tokens: int, dtype: torch.dtype | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Memory for tensors like these with their tokens first, and the tensors in it.

    Those of one head dim are one tensor, so that a message or an addition is for all of them.
    """
    if any(y.shape[3] != like[0].shape[3] for y in like):
        found = [y.new_empty((tokens, y.shape[0], *y.shape[2:]), dtype=dtype or y.dtype) for y in like]
        return found, found
    edges = [0, *accumulate(y.shape[2] for y in like)]
    first = like[0]
    memory = first.new_empty((tokens, first.shape[0], edges[-1], first.shape[3]), dtype=dtype or first.dtype)
    return [memory], [memory[:, :, a:b] for a, b in pairwise(edges)]


def _apart(memory: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors in what `_side_by_side` made."""
    if len(memory) == len(like):
        return memory
    edges = [0, *accumulate(y.shape[2] for y in like)]
    return [memory[0][:, :, a:b] for a, b in pairwise(edges)]


class Ring(_Tokens):
    """Keys go around the ranks: two shares of them at a time on each, however long the sequence.

    Partial results are combined in float32; dk and dv travel with their keys, in float32.
    """

    def _pairs(self, whole: Whole, source: int) -> list[tuple[Piece, slice, Interval, slice]]:
        """Pieces of this rank's queries with the keys of rank ``source`` that they see, and where both lie.

        Of packed sequences, keys of other ranks are seen by dense pieces alone: those of a varlen call are its rows.
        """
        theirs = self.chunks_k[source]
        found = []
        for piece, at in self.rows(whole):
            for keys in common([piece.keys], theirs):
                for of_chunk in _cut([keys], theirs):
                    found.append((piece, at, of_chunk, places(theirs, [of_chunk])[0]))
        return found

    def _pass_on(self, source: int, *tensors: torch.Tensor) -> tuple[Pending, list[torch.Tensor]]:
        """Send what is of rank ``source`` to the next rank, and receive what the one before has."""
        sends: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        receives: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        tokens = length(self.chunks_k[(source - 1) % self.size])
        coming = [x.new_empty((x.shape[0], tokens, *x.shape[2:])) for x in tensors]
        sends[(self.rank + 1) % self.size] = list(tensors)
        receives[(self.rank - 1) % self.size] = coming
        return self.exchange(sends, receives), coming

    def forward(self, x: Inputs, whole: Whole) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        out = x.q.new_empty((*x.q.shape[:3], x.v.shape[3]), dtype=torch.float32)
        lse = x.q.new_empty((x.q.shape[0], x.q.shape[2], x.q.shape[1]), dtype=torch.float32)
        k, v, heads = x.k, x.v, slice(0, x.q.shape[2])
        left = dict(self.rows(whole))  # pieces that nothing was computed of yet: the first result is no sum
        whole.prepare(list(left), x.q.device)
        for step in range(self.size):
            source = (self.rank - step) % self.size
            under_way = self._pass_on(source, k, v) if step + 1 < self.size else None
            for piece, at, keys, where in self._pairs(whole, source):
                begins = left.pop(piece, None) is not None
                out_part = out[:, at] if begins else empty_partial(x.q[:, at], x.v.shape[3])
                lse_part = forward_here(
                    x.q[:, at], k[:, where], v[:, where], slice_scores(x.bias, heads, at, keys),
                    slice_scores(x.mask, heads, at, keys), out_part,
                    *whole.call(_moved(heads, x.head), piece, keys, x.num_heads),
                )  # fmt: skip
                if begins:
                    lse[:, :, at] = lse_part
                else:
                    merge_into(out[:, at], lse[:, :, at], out_part, lse_part)
            if under_way is not None:
                pending, (k, v) = under_way
                pending.wait()
        for at in left.values():
            out[:, at], lse[:, :, at] = 0, -torch.inf
        if x.sink is not None:
            apply_sink(out, lse, x.sink)
            hide_outside(lse, whole, self.rows(whole))
        result = out.to(x.q.dtype)
        return result, lse, Saved(x, result, lse, x.k.shape[2])

    def like_kept(self, x: Inputs, whole: Whole) -> list[torch.Tensor]:
        return []

    def backward(self, saved: Saved, whole: Whole, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        x, out, lse = saved[:3]
        dq = torch.empty(x.q.shape, dtype=torch.float32, device=x.q.device)
        dbias = _zeros_of_bias(x.bias, whole)
        k, v, heads = x.k, x.v, slice(0, x.q.shape[2])
        left = dict(self.rows(whole))  # pieces whose dq nothing was written of yet
        whole.prepare(list(left), x.q.device)
        travelling: tuple[Pending, list[torch.Tensor]] | None = None  # dk and dv of the keys that come next
        for step in range(self.size):
            source = (self.rank - step) % self.size
            under_way = self._pass_on(source, k, v) if step + 1 < self.size else None
            dk, dv = (torch.empty(y.shape, dtype=torch.float32, device=y.device) for y in (k, v))
            # Those of the most keys first: what they write of dk and dv need not be zeroed before.
            pairs = sorted(self._pairs(whole, source), key=lambda pair: pair[2][0] - pair[2][1])
            for n, (piece, at, keys, where) in enumerate(pairs):
                if n == 0:
                    for y in (dk, dv):
                        y[:, : where.start], y[:, where.stop :] = 0, 0
                begins = left.pop(piece, None) is not None
                direct = begins and share_dtype(x.q, whole.options) == dq.dtype
                share = dq[:, at] if direct else empty_share(x.q[:, at], whole.options)
                of_bias = backward_here(
                    x.q[:, at], k[:, where], v[:, where], slice_scores(x.bias, heads, at, keys),
                    slice_scores(x.mask, heads, at, keys), out[:, at], lse[:, :, at], dout[:, at],
                    None if dlse is None else dlse[:, :, at],
                    (share, dk[:, where], dv[:, where]),
                    *whole.call(_moved(heads, x.head), piece, keys, x.num_heads), add=n > 0,
                )  # fmt: skip
                if not begins:
                    dq[:, at] += share
                elif not direct:
                    dq[:, at] = share
                _add_dbias(dbias, of_bias, heads, at, keys)
            if not pairs:
                dk.zero_()
                dv.zero_()
            if travelling is not None:
                pending, theirs = travelling
                pending.wait()
                for mine, other in zip((dk, dv), theirs, strict=True):
                    mine += other
            if self.size > 1:  # after the last step the gradients go home
                travelling = self._pass_on(source, dk, dv)
            if under_way is not None:
                pending, (k, v) = under_way
                pending.wait()
        for at in left.values():
            dq[:, at] = 0
        if travelling is not None:
            pending, (dk, dv) = travelling
            pending.wait()
        if not whole.adds_up:
            dk, dv = dk.to(x.k.dtype), dv.to(x.v.dtype)
        return Gradients(dq.to(x.q.dtype), dk, dv, dbias, _dsink(x, whole, out, lse, dout, dlse))


class _Heads(NamedTuple):
    """Heads that a rank works on, one group of them."""

    q: slice
    k: slice

    def of(self, x: torch.Tensor, dim: int, of_keys: bool) -> torch.Tensor:
        """Those of x; all of one that has a single one for all."""
        at = self.k if of_keys else self.q
        return x if x.shape[dim] == 1 and not of_keys else x.narrow(dim, at.start, at.stop - at.start)


class Ulysses(_Tokens):
    """Ranks of a group swap tokens for heads: each then has the tokens of all of them and its share of the heads.

    ``inside`` computes the attention of those tokens, with other groups where the sequence is longer than this one's.
    Each rank's heads are computed in ``pipeline`` groups: tokens of the next one come and results of the one before
    leave meanwhile.
    """

    needs_own = False  # the heads that it works on are kept instead

    def __init__(
        self, group: Any, rank: int, chunks_q: Sequence[Chunks], chunks_k: Sequence[Chunks], inside: Strategy,
        pipeline: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(group, rank, chunks_q, chunks_k)
        self.inside, self.pipeline = inside, pipeline
        self.all_q, self.all_k = together(self.chunks_q), together(self.chunks_k)
        self.has_one_query = any(length(chunks) == 1 for chunks in self.chunks_q)

    def _with_rows(self, x: Inputs) -> Inputs:
        """Bias and mask with a row for each of the rank's queries, where some rank of the group has a single query.

        That rank cannot tell a row of its own from one for all, so every rank swaps rows then.
        """
        if not self.has_one_query:
            return x
        rows = length(self.chunks_q[self.rank])
        bias, mask = (y if y is None else y.expand(-1, -1, rows, -1) for y in (x.bias, x.mask))
        return x._replace(bias=bias, mask=mask)

    def _swaps(self, scores: torch.Tensor | None) -> bool:
        """Whether the ranks swap the rows of a bias or mask: not where one is for all."""
        return scores is not None and (self.has_one_query or scores.shape[2] != 1)

    @staticmethod
    def why_not(num_heads: int, num_heads_kv: int, ranks: int) -> str:
        """Why the heads cannot be shared among so many ranks; empty when they can."""
        if not num_heads_kv:
            return "there are no key heads"
        if num_heads % ranks:
            return f"{num_heads} query heads do not divide by {ranks} ranks"
        if num_heads_kv % ranks and ranks % num_heads_kv:
            return f"neither of {num_heads_kv} key heads and {ranks} ranks divides the other"
        return ""

    def _groups(self, num_heads: int, num_heads_kv: int) -> list[list[_Heads]]:
        """For each group the heads of each rank. Ranks may share a key head, which is then their only one."""
        per_head = num_heads // num_heads_kv
        of_ranks = []
        for r in range(self.size):
            of_q, of_k = _share(num_heads, r, self.size), _share(num_heads_kv, r, self.size)
            if num_heads_kv % self.size:
                of_ranks.append([_Heads(of_q, of_k)])
                continue
            cuts = _cuts(of_k, max(min(self.pipeline, of_k.stop - of_k.start), 1))
            of_ranks.append([_Heads(slice(s.start * per_head, s.stop * per_head), s) for s in cuts])
        return [list(group) for group in zip(*of_ranks, strict=True)]

    def _joins(self, *tensors: torch.Tensor) -> bool:
        """Whether tensors of queries and of keys have their tokens at the same places: one message is for all then."""
        return self.chunks_q == self.chunks_k and all(x.shape[3] == tensors[0].shape[3] for x in tensors)

    def _to_heads(
        self,
        heads: Sequence[_Heads],
        joint: Sequence[tuple[torch.Tensor, bool]],
        *given: tuple[torch.Tensor, int, bool],
    ) -> tuple[Pending, list[torch.Tensor]]:
        """Swap tensors ``(x, dim of the tokens, whether of keys)``, whose heads are ``3 - dim``, or 1 for all ranks.

        Those of ``joint`` (x, whether of keys) have their tokens on dim 1 and go together. What comes has its tokens
        first, and those of ``joint`` are one tensor, their heads one behind the other.
        """
        sends: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        receives: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        found = []
        if joint:
            own = self.chunks_q[self.rank]
            mine = [heads[self.rank].of(x, 2, of_keys) for x, of_keys in joint]
            memory, columns = _side_by_side(mine, length(self.all_q))
            for r in range(self.size):
                if r == self.rank:
                    sends[r] = [x.transpose(0, 1)[s] for s in places(own, own) for x in mine]
                    receives[r] = [x[s] for s in places(self.all_q, own) for x in columns]
                    continue
                theirs = torch.cat([heads[r].of(x, 2, of_keys).transpose(0, 1) for x, of_keys in joint], 2)
                sends[r] = [theirs[s] for s in places(own, own)]
                receives[r] = [memory[0][s] for s in places(self.all_q, self.chunks_q[r])]
            found = memory
        for x, dim, of_keys in given:
            chunks, both = (self.chunks_k, self.all_k) if of_keys else (self.chunks_q, self.all_q)
            part = heads[self.rank].of(x, 3 - dim, of_keys).movedim(dim, 0)
            whole = part.new_empty((length(both), *part.shape[1:]))
            for r in range(self.size):
                # One message a chunk, as many as the other side has.
                theirs = heads[r].of(x, 3 - dim, of_keys).movedim(dim, 0)
                own = chunks[self.rank]
                sends[r] += [theirs[s] for s in places(own, own)]
                receives[r] += [whole[s] for s in places(both, chunks[r])]
            found.append(whole)
        return self.exchange(sends, receives), found

    def _inputs(self, x: Inputs, heads: _Heads, memory: Sequence[torch.Tensor]) -> Inputs:
        """The tensors of this rank's heads of all tokens, in what `_to_heads` brought of q, k, v, bias and mask."""
        rest = list(memory)
        of_q, of_k = (s.stop - s.start for s in heads)
        if rest[0].shape[2] != of_q:
            q, k, v = rest.pop(0).transpose(0, 1).split([of_q, of_k, of_k], 2)
        else:
            q, k, v = (rest.pop(0).transpose(0, 1) for _ in range(3))
        bias, mask = (
            y if y is None else rest.pop(0).movedim(0, 2) if self._swaps(y) else heads.of(y, 1, False)
            for y in (x.bias, x.mask)
        )
        sink = None if x.sink is None else x.sink[heads.q]
        return Inputs(q, k, v, bias, mask, x.head + heads.q.start, x.num_heads, sink)

    def like_kept(self, x: Inputs, whole: Whole) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        if not whole.backward_follows:
            return found
        x = self._with_rows(x)
        rows, keys = length(self.all_q), length(self.all_k)
        for of_ranks in self._groups(x.q.shape[2], x.k.shape[2]):
            heads = of_ranks[self.rank]
            like = [x.q[:, :, heads.q], x.k[:, :, heads.k], x.v[:, :, heads.k]]
            if self._joins(x.q, x.v):
                memory = _side_by_side(like, rows)[0]
            else:
                memory = [
                    y.new_empty((n, y.shape[0], *y.shape[2:])) for y, n in zip(like, (rows, keys, keys), strict=True)
                ]
            for y in (x.bias, x.mask):
                if y is not None and self._swaps(y):
                    part = heads.of(y, 1, False)
                    memory.append(y.new_empty((rows, *part.shape[:2], part.shape[3])))
            inside = self._inputs(x, heads, memory)
            batch, _, of_q, _ = inside.q.shape
            out = x.q.new_empty((batch, rows, of_q, x.v.shape[3]))
            lse = x.q.new_empty((batch, of_q, rows), dtype=torch.float32)
            found += [*memory, out, lse, *self.inside.like_kept(inside, whole)]
        return found

    def _to_tokens(
        self,
        heads: Sequence[_Heads],
        joint: Sequence[tuple[torch.Tensor, torch.Tensor, bool]],
        *given: tuple[torch.Tensor, torch.Tensor, int, bool, bool],
    ) -> Callable[[], None]:
        """The way back of ``(x, result, dim of the tokens, whether of keys, whether shared)``; what ends it.

        What ranks return of heads that they share is added to the result, in their order. Those of ``joint``
        (x, result, whether of keys) have their tokens on dim 1, no shared heads, and go together.
        """
        sends: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        receives: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        # Per rank: what comes from it, and where it goes.
        coming: list[list[tuple[torch.Tensor, torch.Tensor, bool]]] = [[] for _ in range(self.size)]
        for r in range(self.size) if joint else ():
            own, by_token = self.chunks_q[self.rank], [x.transpose(0, 1) for x, _, _ in joint]
            results = [heads[r].of(result, 2, of_keys).transpose(0, 1) for _, result, of_keys in joint]
            for s, at in zip(places(own, own), places(self.all_q, own), strict=True):
                pieces = [x[at] for x in by_token]
                if r != self.rank:
                    like = [x[s].transpose(0, 1) for x in results]
                    memory, pieces = _side_by_side(like, s.stop - s.start, by_token[0].dtype)
                    receives[r] += memory
                coming[r] += [(x, y[s], False) for x, y in zip(pieces, results, strict=True)]
            if r != self.rank:
                sends[r] = [
                    torch.cat([x[at] for x in by_token], 2) for at in places(self.all_q, self.chunks_q[r])
                ]  # fmt: skip
        for x, result, dim, of_keys, adds in given:
            chunks, both = (self.chunks_k, self.all_k) if of_keys else (self.chunks_q, self.all_q)
            of_tokens = x.movedim(dim, 0)
            for r in range(self.size):
                to = heads[r].of(result, 3 - dim, of_keys).movedim(dim, 0)
                own = chunks[self.rank]
                for s, at in zip(places(own, own), places(both, own), strict=True):
                    from_me = r == self.rank
                    piece = of_tokens[at] if from_me else x.new_empty((s.stop - s.start, *to.shape[1:]))
                    coming[r].append((piece, to[s], adds))
                    if not from_me:
                        receives[r].append(piece)
                if r != self.rank:
                    sends[r] += [of_tokens[at] for at in places(both, chunks[r])]
        pending = self.exchange(sends, receives)

        def finish() -> None:
            pending.wait()
            for of_rank in coming:
                for piece, to, adds in of_rank:
                    if adds:
                        to += piece
                    else:
                        to.copy_(piece)

        return finish

    def forward(self, x: Inputs, whole: Whole) -> tuple[torch.Tensor, torch.Tensor | None, Saved]:
        groups = self._groups(x.q.shape[2], x.k.shape[2])
        out = x.q.new_empty((*x.q.shape[:3], x.v.shape[3]))
        lse = None
        if whole.return_lse:
            lse = x.q.new_empty((x.q.shape[0], x.q.shape[2], x.q.shape[1]), dtype=torch.float32)
        kept: list[torch.Tensor] = []
        rows = self._with_rows(x)
        leaving: list[Callable[[], None]] = []

        def begin(heads: Sequence[_Heads]) -> tuple[Pending, list[torch.Tensor]]:
            scores = [(y, 2, False) for y in (rows.bias, rows.mask) if self._swaps(y)]
            if self._joins(x.q, x.v):
                return self._to_heads(heads, ((x.q, False), (x.k, True), (x.v, True)), *scores)
            return self._to_heads(heads, (), (x.q, 1, False), (x.k, 1, True), (x.v, 1, True), *scores)

        for heads, (pending, memory) in zip(groups, _begun_ahead(groups, begin), strict=True):
            pending.wait()
            of_heads, lse_of_heads, of_inside = self.inside.forward(self._inputs(rows, heads[self.rank], memory), whole)
            assert lse_of_heads is not None
            if whole.backward_follows:
                kept += [*memory, of_heads, lse_of_heads, *of_inside.kept]
            back = [(of_heads, out, 1, False, False)]
            if lse is not None:
                back.append((lse_of_heads, lse, 2, False, False))
            leaving.append(self._to_tokens(heads, (), *back))
            if len(leaving) == AHEAD:
                leaving.pop(0)()
        for finish in leaving:
            finish()
        return out, lse, Saved(x, out, lse, x.k.shape[2], kept)

    def backward(self, saved: Saved, whole: Whole, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        x, num_heads, num_heads_kv = self._with_rows(saved.x), dout.shape[2], saved.num_heads_kv
        groups = self._groups(num_heads, num_heads_kv)
        each = len(saved.kept) // len(groups)
        insides = [self._saved(x, groups[n], saved.kept[n * each : (n + 1) * each]) for n in range(len(groups))]
        q, k, v = insides[0].x[:3]
        tokens_k = length(self.chunks_k[self.rank])
        dq = dout.new_empty((*dout.shape[:3], q.shape[3]))
        shared = bool(num_heads_kv % self.size)  # key heads, whose gradients are then sums
        whole = whole._replace(adds_up=shared)
        kind = torch.float32 if shared else dout.dtype
        make = dout.new_zeros if shared else dout.new_empty
        dk, dv = (make((y.shape[0], tokens_k, num_heads_kv, y.shape[3]), dtype=kind) for y in (k, v))
        dbias = _zeros_of_bias(x.bias, whole)
        dsink = torch.zeros(num_heads, dtype=torch.float32, device=dout.device) if whole.options.dsink else None
        leaving: list[Callable[[], None]] = []

        def begin(heads: Sequence[_Heads]) -> tuple[Pending, list[torch.Tensor]]:
            return self._to_heads(heads, (), (dout, 1, False), *([] if dlse is None else [(dlse, 2, False)]))

        for heads, inside, (pending, (of_out, *of_lse)) in zip(
            groups, insides, _begun_ahead(groups, begin), strict=True
        ):
            pending.wait()
            of_heads = of_lse[0].movedim(0, 2) if of_lse else None
            found = self.inside.backward(inside, whole, of_out.transpose(0, 1), of_heads)
            joint: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
            back: list[tuple[torch.Tensor, torch.Tensor, int, bool, bool]] = []
            if not shared and self._joins(dq, dv):
                joint = [(found.dq, dq, False), (found.dk, dk, True), (found.dv, dv, True)]
            else:
                back = [
                    (found.dq, dq, 1, False, False), (found.dk, dk, 1, True, shared), (found.dv, dv, 1, True, shared),
                ]  # fmt: skip
            if dsink is not None and found.dsink is not None:
                dsink[heads[self.rank].q] = found.dsink
            if dbias is not None and found.dbias is not None:
                if self._swaps(x.bias):
                    back.append((found.dbias, dbias, 2, False, True))
                else:
                    share = heads[self.rank].of(dbias, 1, False)
                    share += found.dbias
            leaving.append(self._to_tokens(heads, joint, *back))
            if len(leaving) == AHEAD:
                leaving.pop(0)()
        for finish in leaving:
            finish()
        if dbias is not None:
            dbias = dbias.sum_to_size(saved.x.bias.shape)
        return Gradients(dq, dk.to(dout.dtype), dv.to(dout.dtype), dbias, dsink)

    def _saved(self, x: Inputs, of_ranks: Sequence[_Heads], kept: Sequence[torch.Tensor]) -> Saved:
        """What is saved inside, of what is kept of one group of heads."""
        heads = of_ranks[self.rank]
        count = sum(map(self._swaps, (x.bias, x.mask))) + (1 if kept[0].shape[2] != heads.q.stop - heads.q.start else 3)
        memory, (out, lse, *of_inside) = kept[:count], kept[count:]
        inside = self._inputs(x, heads, memory)
        return Saved(inside, out, lse, inside.k.shape[2], of_inside)


def has_all_tokens(strategy: Strategy) -> bool:
    """Whether each rank computes its heads of all tokens."""
    inside = strategy.inside if isinstance(strategy, Ulysses) else strategy
    return isinstance(inside, AllGather) and inside.size == 1


def passes_keys(strategy: Strategy) -> bool:
    """Whether a rank computes with some of the keys that its queries see at a time."""
    inside = strategy.inside if isinstance(strategy, Ulysses) else strategy
    return isinstance(inside, Ring) and inside.size > 1


def gradients_of(
    strategy: Strategy, saved: Saved, whole: Whole, captures: Sequence[torch.Tensor], wanted: Sequence[bool],
    dout: torch.Tensor, dlse: torch.Tensor | None,
) -> tuple[Gradients, list[torch.Tensor | None]]:  # fmt: skip
    """`Strategy.backward`, and the gradients of the arrays that the modifier captured, where they are ``wanted``.

    They and those of bias and sink have the types of their tensors.
    """
    own = whole_with(whole, captures, wanted)
    found = strategy.backward(saved, own, resolved(dout).contiguous(), resolved(dlse))
    if found.dbias is not None:
        found = found._replace(dbias=found.dbias.to(saved.x.bias.dtype))
    if found.dsink is not None:
        found = found._replace(dsink=found.dsink.to(saved.x.sink.dtype))
    return found, [None if x is None else x.to(y.dtype) for x, y in zip(own.daux, captures, strict=True)]


def _begun_ahead(groups: Sequence[Any], begin: Callable[[Any], Any]) -> Iterator[Any]:
    """``begin`` of each group, called `AHEAD` groups before its result is asked for."""
    under_way: list[Any] = []
    for group in groups:
        under_way.append(begin(group))
        if len(under_way) == AHEAD:
            yield under_way.pop(0)
    yield from under_way


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


def _cuts(heads: slice, count: int) -> list[slice]:
    """Heads in as many groups."""
    size = heads.stop - heads.start
    edges = [heads.start + size * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def _share(count: int, rank: int, ranks: int) -> slice:
    """Which of ``count`` heads a rank works on. Ranks may share a key head."""
    return slice(count * rank // ranks, -(-count * (rank + 1) // ranks))


def _moved(heads: slice, by: int) -> slice:
    return slice(heads.start + by, heads.stop + by)


def _cut(intervals: Sequence[Interval], at: Sequence[Interval]) -> list[Interval]:
    """The intervals in pieces, each of them within one of ``at``."""
    return sorted((max(a, c), min(b, d)) for a, b in intervals for c, d in at if max(a, c) < min(b, d))


def _seen(piece: Piece, have: Chunks) -> tuple[Interval, slice]:
    """The keys that a piece of the queries sees, and where they are among those that the rank has."""
    keys = piece.keys
    if keys[0] == keys[1]:
        return keys, slice(0, 0)
    return keys, places(have, [keys])[0]


def _zeros_of_bias(bias: torch.Tensor | None, whole: Whole) -> torch.Tensor | None:
    if bias is None or not whole.options.dbias:
        return None
    return torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)


def _add_dbias(dbias: torch.Tensor | None, share: Any, heads: slice, rows: slice, keys: Interval) -> None:
    if dbias is not None:
        part = slice_scores(dbias, heads, rows, keys)
        assert part is not None
        part += share


def _dsink(
    x: Inputs, whole: Whole, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor | None:
    return sink_gradient(out, lse, dout, dlse, x.sink) if x.sink is not None and whole.options.dsink else None
