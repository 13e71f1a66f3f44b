"""How ranks share an attention: keys gathered (`AllGather`), passed around (`Ring`), heads for tokens (`Ulysses`).

Each is made for the tokens of the ranks of one group and has `forward` and `backward` of a rank's tensors. q, out, dq
and their like hold the tokens of ``chunks_q``, k, v, dk and dv those of ``chunks_k``; bias and mask have the rank's
rows (or one) and all keys (or one).

What travels is stored with its tokens first: the tokens of a rank are then contiguous, are received where they are
wanted and sent from where they are. Exchanges begin two groups of heads ahead of the kernels and no further: so much of
what was fetched is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from ...front.chunks import Chunks, Interval, common, length, needed, places, reach, together
from .exchange import Pending, exchange
from .local import Whole, apply_sink, empty_partial, empty_share, merge_into, sink_gradient, slice_scores
from .local import backward as backward_here
from .local import forward as forward_here

Saved = tuple[Any, ...]
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


class Gradients(NamedTuple):
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None
    dsink: torch.Tensor | None = None
    """Float32, the share of the rank's rows."""


class Strategy(Protocol):
    def forward(self, x: Inputs, whole: Whole) -> tuple[torch.Tensor, torch.Tensor | None, Saved]:
        """Return out and lse (where it is asked for) of the rank's rows, and what `backward` needs."""

    def backward(
        self, saved: tuple[Any, ...], whole: Whole, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        """Gradients of the rank's tensors; of a bias with one row the rank's share, to be added up over the ranks."""


class _Tokens:
    """The tokens of the ranks of a group, and this rank's."""

    def __init__(self, group: Any, rank: int, chunks_q: Sequence[Chunks], chunks_k: Sequence[Chunks]) -> None:
        self.group, self.rank, self.size = group, rank, len(chunks_q)
        self.chunks_q, self.chunks_k = tuple(chunks_q), tuple(chunks_k)

    def rows(self) -> list[tuple[Interval, slice]]:
        """Chunks of this rank's queries, and where its tensors have them."""
        mine = self.chunks_q[self.rank]
        return list(zip(mine, places(mine, mine), strict=True))


class _Routes(NamedTuple):
    """Which keys go where, of one band."""

    have: Chunks
    """The keys that this rank's queries see."""
    sent: list[list[slice]]
    """For each rank where the keys that it needs lie in this rank's tensors."""
    received: list[list[slice]]
    """For each rank where those that come from it lie in ``have``."""


class AllGather(_Tokens):
    """Each rank fetches the keys that its queries reach, and returns their gradients to where they came from.

    ``pipeline`` groups of key heads: one is computed while the next is on its way. With a group of one rank nothing is
    sent: that is how a rank computes what it has all keys of.
    """

    def __init__(
        self, group: Any, rank: int, chunks_q: Sequence[Chunks], chunks_k: Sequence[Chunks], pipeline: int = 1
    ) -> None:
        super().__init__(group, rank, chunks_q, chunks_k)
        self.pipeline = pipeline

    def _groups(self, x: Inputs) -> list[slice]:
        """Key heads, in as many groups as are computed one after the other."""
        count = 1 if self.size == 1 else max(min(self.pipeline, x.k.shape[2]), 1)
        return _cuts(slice(0, x.k.shape[2]), count)

    def _routes(self, whole: Whole) -> _Routes:
        if self.size == 1:
            return _Routes(self.chunks_k[0], [], [])
        mine, have = self.chunks_k[self.rank], needed(self.chunks_q[self.rank], whole.band, whole.keys)
        return _Routes(
            have,
            [places(mine, common(mine, needed(rows, whole.band, whole.keys))) for rows in self.chunks_q],
            [places(have, _cut(common(theirs, have), have)) for theirs in self.chunks_k],
        )

    def _fetches(self, x: Inputs, groups: Sequence[slice], routes: _Routes) -> Iterator[list[torch.Tensor]]:
        """[k, v] of the keys that this rank needs, in the order of the sequence, of one group of heads at a time.

        Take both out of the list and forget them before the next ones: the memory is for those.
        """
        if self.size == 1:
            yield from ([x.k[:, :, heads], x.v[:, :, heads]] for heads in groups)
            return

        def begin(heads: slice) -> tuple[Pending, list[torch.Tensor]]:
            theirs = [y[:, :, heads].transpose(0, 1) for y in (x.k, x.v)]
            gathered = [y.new_empty((length(routes.have), *y.shape[1:])) for y in theirs]
            pieces = _Pieces(theirs)
            sends = [[y for s in slices for y in pieces.at(s)] for slices in routes.sent]
            receives = [[y[s] for s in slices for y in gathered] for slices in routes.received]
            return exchange(self.group, sends, receives), gathered

        for pending, gathered in _begun_ahead(groups, begin):
            pending.wait()
            gathered[:] = [y.transpose(0, 1) for y in gathered]
            yield gathered

    def forward(self, x: Inputs, whole: Whole) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        groups, routes, per_head = self._groups(x), self._routes(whole), x.q.shape[2] // max(x.k.shape[2], 1)
        out = x.q.new_empty((*x.q.shape[:3], x.v.shape[3]))
        lse = x.q.new_empty((x.q.shape[0], x.q.shape[2], x.q.shape[1]), dtype=torch.float32)
        for heads, fetched in zip(groups, self._fetches(x, groups, routes), strict=True):
            v, k = fetched.pop(), fetched.pop()
            of_q = slice(heads.start * per_head, heads.stop * per_head)
            for chunk, at in self.rows():
                keys, where = _seen(chunk, whole, routes.have)
                lse[:, of_q, at] = forward_here(
                    x.q[:, at, of_q], k[:, where], v[:, where], slice_scores(x.bias, of_q, at, keys),
                    slice_scores(x.mask, of_q, at, keys), out[:, at, of_q],
                    whole.part(_moved(of_q, x.head), chunk, keys, x.num_heads), whole,
                )  # fmt: skip
            del k, v
        if x.sink is not None:
            apply_sink(out, lse, x.sink)
        return out, lse, (*x, out, lse)

    def backward(
        self, saved: tuple[Any, ...], whole: Whole, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        x, (out, lse) = Inputs(*saved[:-2]), saved[-2:]
        groups, routes, per_head = self._groups(x), self._routes(whole), x.q.shape[2] // max(x.k.shape[2], 1)
        dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
        dk, dv = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x.k, x.v))
        dbias = _zeros_of_bias(x.bias, whole)
        # Those that see the most keys first: what they write of dk and dv need not be zeroed before.
        rows = [(chunk, at, *_seen(chunk, whole, routes.have)) for chunk, at in self.rows()]
        rows.sort(key=lambda row: row[2][0] - row[2][1])
        returning: list[Callable[[], None]] = []
        for heads, fetched in zip(groups, self._fetches(x, groups, routes), strict=True):
            v, k = fetched.pop(), fetched.pop()
            of_q = slice(heads.start * per_head, heads.stop * per_head)
            if self.size == 1 and len(rows) == 1:
                of_all = [dk[:, :, heads], dv[:, :, heads]]
            else:
                of_all = [
                    torch.empty_like(y.transpose(0, 1), dtype=torch.float32, memory_format=torch.contiguous_format)
                    .transpose(0, 1) for y in (k, v)
                ]  # fmt: skip
            written: Interval = (0, 0)
            for chunk, at, keys, where in rows:
                if keys[0] == keys[1]:
                    dq[:, at, of_q] = 0
                    continue
                add = written != (0, 0)
                if not add:
                    written = where.start, where.stop
                    for y in of_all:
                        y[:, : where.start], y[:, where.stop :] = 0, 0
                share = backward_here(
                    x.q[:, at, of_q], k[:, where], v[:, where], slice_scores(x.bias, of_q, at, keys),
                    slice_scores(x.mask, of_q, at, keys), out[:, at, of_q], lse[:, of_q, at], dout[:, at, of_q],
                    None if dlse is None else dlse[:, of_q, at], (dq[:, at, of_q], *(y[:, where] for y in of_all)),
                    whole.part(_moved(of_q, x.head), chunk, keys, x.num_heads), whole, add=add,
                )  # fmt: skip
                _add_dbias(dbias, share, of_q, at, keys)
            if written == (0, 0):
                for y in of_all:
                    y.zero_()
            if self.size > 1:
                returning.append(self._return(routes, of_all, [dk[:, :, heads], dv[:, :, heads]]))
            elif len(rows) != 1:
                dk[:, :, heads], dv[:, :, heads] = of_all
            del k, v, of_all
            if len(returning) == AHEAD:
                returning.pop(0)()
        for finish in returning:
            finish()
        return Gradients(dq, dk, dv, _dbias_like(dbias, x.bias), _dsink(x, whole, out, lse, dout, dlse))

    def _return(
        self, routes: _Routes, of_all: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        """Send gradients of fetched keys to where the keys are; what adds up those that come, in the ranks' order."""
        by_token = [y.transpose(0, 1) for y in of_all]
        own = [y[s] for s in routes.received[self.rank] for y in by_token]
        sends: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        receives: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        for r in range(self.size):
            if r == self.rank:
                continue
            sends[r] = [y[s] for s in routes.received[r] for y in by_token]
            receives[r] = [y.new_empty((s.stop - s.start, *y.shape[1:])) for s in routes.sent[r] for y in by_token]
        pending = exchange(self.group, sends, receives)

        def finish() -> None:
            pending.wait()
            shares = [own if r == self.rank else receives[r] for r in range(self.size)]
            for n, y in enumerate(results):
                _add_up(y.transpose(0, 1), [(s, z) for r in range(self.size)
                                            for s, z in zip(routes.sent[r], shares[r][n::2], strict=True)])  # fmt: skip

        return finish


class Ring(_Tokens):
    """Keys go around the ranks: two shares of them at a time on each, however long the sequence.

    Partial results are combined in float32; dk and dv travel with their keys, in float32.
    """

    def _pairs(self, whole: Whole, source: int) -> list[tuple[Interval, slice, Interval, slice]]:
        """Chunks of this rank's queries with the keys of rank ``source`` that they see, and where both lie."""
        theirs = self.chunks_k[source]
        found = []
        for chunk, at in self.rows():
            for keys in common([reach(chunk, whole.band, whole.keys)], theirs):
                for piece in _cut([keys], theirs):
                    found.append((chunk, at, piece, places(theirs, [piece])[0]))
        return found

    def _pass_on(self, source: int, *tensors: torch.Tensor) -> tuple[Pending, list[torch.Tensor]]:
        """Send what is of rank ``source`` to the next rank, and receive what the one before has."""
        sends: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        receives: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        tokens = length(self.chunks_k[(source - 1) % self.size])
        coming = [x.new_empty((x.shape[0], tokens, *x.shape[2:])) for x in tensors]
        sends[(self.rank + 1) % self.size] = list(tensors)
        receives[(self.rank - 1) % self.size] = coming
        return exchange(self.group, sends, receives), coming

    def forward(self, x: Inputs, whole: Whole) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        out = x.q.new_zeros((*x.q.shape[:3], x.v.shape[3]), dtype=torch.float32)
        lse = x.q.new_full((x.q.shape[0], x.q.shape[2], x.q.shape[1]), -torch.inf, dtype=torch.float32)
        k, v, heads = x.k, x.v, slice(0, x.q.shape[2])
        for step in range(self.size):
            source = (self.rank - step) % self.size
            under_way = self._pass_on(source, k, v) if step + 1 < self.size else None
            for chunk, at, keys, where in self._pairs(whole, source):
                out_part = empty_partial(x.q[:, at], x.v.shape[3])
                lse_part = forward_here(
                    x.q[:, at], k[:, where], v[:, where], slice_scores(x.bias, heads, at, keys),
                    slice_scores(x.mask, heads, at, keys), out_part,
                    whole.part(_moved(heads, x.head), chunk, keys, x.num_heads), whole,
                )  # fmt: skip
                merge_into(out[:, at], lse[:, :, at], out_part, lse_part)
            if under_way is not None:
                pending, (k, v) = under_way
                pending.wait()
        if x.sink is not None:
            apply_sink(out, lse, x.sink)
        result = out.to(x.q.dtype)
        return result, lse, (*x, result, lse)

    def backward(
        self, saved: tuple[Any, ...], whole: Whole, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        x, (out, lse) = Inputs(*saved[:-2]), saved[-2:]
        dq = torch.zeros(x.q.shape, dtype=torch.float32, device=x.q.device)
        dbias = _zeros_of_bias(x.bias, whole)
        k, v, heads = x.k, x.v, slice(0, x.q.shape[2])
        travelling: tuple[Pending, list[torch.Tensor]] | None = None  # dk and dv of the keys that come next
        for step in range(self.size):
            source = (self.rank - step) % self.size
            under_way = self._pass_on(source, k, v) if step + 1 < self.size else None
            dk, dv = (torch.zeros(y.shape, dtype=torch.float32, device=y.device) for y in (k, v))
            for chunk, at, keys, where in self._pairs(whole, source):
                share = empty_share(x.q[:, at], whole.options)
                of_bias = backward_here(
                    x.q[:, at], k[:, where], v[:, where], slice_scores(x.bias, heads, at, keys),
                    slice_scores(x.mask, heads, at, keys), out[:, at], lse[:, :, at], dout[:, at],
                    None if dlse is None else dlse[:, :, at], (share, dk[:, where], dv[:, where]),
                    whole.part(_moved(heads, x.head), chunk, keys, x.num_heads), whole, add=True,
                )  # fmt: skip
                dq[:, at] += share
                _add_dbias(dbias, of_bias, heads, at, keys)
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
        if travelling is not None:
            pending, (dk, dv) = travelling
            pending.wait()
        return Gradients(
            dq.to(x.q.dtype), dk.to(x.k.dtype), dv.to(x.v.dtype), _dbias_like(dbias, x.bias),
            _dsink(x, whole, out, lse, dout, dlse),
        )  # fmt: skip


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

    def __init__(
        self, group: Any, rank: int, chunks_q: Sequence[Chunks], chunks_k: Sequence[Chunks], inside: Strategy,
        pipeline: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(group, rank, chunks_q, chunks_k)
        self.inside, self.pipeline = inside, pipeline
        self.all_q, self.all_k = together(self.chunks_q), together(self.chunks_k)

    @staticmethod
    def why_not(num_heads: int, num_heads_kv: int, ranks: int) -> str:
        """Why the heads cannot be shared among so many ranks; empty when they can."""
        if num_heads % ranks:
            return f"{num_heads} query heads do not divide by {ranks} ranks"
        if num_heads_kv % ranks and ranks % max(num_heads_kv, 1):
            return f"neither of {num_heads_kv} key heads and {ranks} ranks divides the other"
        return ""

    def _groups(self, num_heads: int, num_heads_kv: int) -> list[list[_Heads]]:
        """For each group the heads of each rank. Ranks may share a key head, which is then their only one."""
        per_head = num_heads // max(num_heads_kv, 1)
        of_ranks = []
        for r in range(self.size):
            of_q, of_k = _share(num_heads, r, self.size), _share(num_heads_kv, r, self.size)
            if num_heads_kv % self.size:
                of_ranks.append([_Heads(of_q, of_k)])
                continue
            cuts = _cuts(of_k, max(min(self.pipeline, of_k.stop - of_k.start), 1))
            of_ranks.append([_Heads(slice(s.start * per_head, s.stop * per_head), s) for s in cuts])
        return [list(group) for group in zip(*of_ranks, strict=True)]

    def _to_heads(
        self, heads: Sequence[_Heads], *given: tuple[torch.Tensor, int, bool]
    ) -> tuple[Pending, list[torch.Tensor]]:
        """Swap tensors ``(x, dim of the tokens, whether of keys)``, whose heads are ``3 - dim``, or 1 for all ranks."""
        sends: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        receives: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        found = []
        for x, dim, of_keys in given:
            chunks, both = (self.chunks_k, self.all_k) if of_keys else (self.chunks_q, self.all_q)
            mine = heads[self.rank].of(x, 3 - dim, of_keys).movedim(dim, 0)
            whole = mine.new_empty((length(both), *mine.shape[1:]))
            for r in range(self.size):
                # One message a chunk, as many as the other side has.
                theirs = heads[r].of(x, 3 - dim, of_keys).movedim(dim, 0)
                own = chunks[self.rank]
                sends[r] += [theirs[s] for s in places(own, own)]
                receives[r] += [whole[s] for s in places(both, chunks[r])]
            found.append(whole.movedim(0, dim))
        return exchange(self.group, sends, receives), found

    def _to_tokens(
        self, heads: Sequence[_Heads], *given: tuple[torch.Tensor, torch.Tensor, int, bool, bool]
    ) -> Callable[[], None]:
        """The way back of ``(x, result, dim of the tokens, whether of keys, whether shared)``; what ends it.

        What ranks return of heads that they share is added to the result, in their order.
        """
        sends: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        receives: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        # Per rank: what comes from it, and where it goes.
        coming: list[list[tuple[torch.Tensor, torch.Tensor, bool]]] = [[] for _ in range(self.size)]
        for x, result, dim, of_keys, adds in given:
            chunks, both = (self.chunks_k, self.all_k) if of_keys else (self.chunks_q, self.all_q)
            by_token = x.movedim(dim, 0)
            for r in range(self.size):
                to = heads[r].of(result, 3 - dim, of_keys).movedim(dim, 0)
                own = chunks[self.rank]
                for s, at in zip(places(own, own), places(both, own), strict=True):
                    from_me = r == self.rank
                    piece = by_token[at] if from_me else x.new_empty((s.stop - s.start, *to.shape[1:]))
                    coming[r].append((piece, to[s], adds))
                    if not from_me:
                        receives[r].append(piece)
                if r != self.rank:
                    sends[r] += [by_token[at] for at in places(both, chunks[r])]
        pending = exchange(self.group, sends, receives)

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
        saved: list[Any] = [x.q.shape[2], x.k.shape[2], None if x.bias is None else tuple(x.bias.shape)]
        leaving: list[Callable[[], None]] = []

        def begin(heads: Sequence[_Heads]) -> tuple[Pending, list[torch.Tensor]]:
            scores = [(y, 2, False) for y in (x.bias, x.mask) if y is not None and y.shape[2] != 1]
            return self._to_heads(heads, (x.q, 1, False), (x.k, 1, True), (x.v, 1, True), *scores)

        for heads, (pending, (q, k, v, *scores)) in zip(groups, _begun_ahead(groups, begin), strict=True):
            pending.wait()
            bias, mask = (
                y if y is None else heads[self.rank].of(y, 1, False) if y.shape[2] == 1 else scores.pop(0)
                for y in (x.bias, x.mask)
            )
            sink = None if x.sink is None else x.sink[heads[self.rank].q]
            inputs = Inputs(q, k, v, bias, mask, x.head + heads[self.rank].q.start, x.num_heads, sink)
            of_heads, lse_of_heads, of_inside = self.inside.forward(inputs, whole)
            saved += [len(of_inside), *of_inside]
            back = [(of_heads, out, 1, False, False)]
            if lse is not None and lse_of_heads is not None:
                back.append((lse_of_heads, lse, 2, False, False))
            leaving.append(self._to_tokens(heads, *back))
            if len(leaving) == AHEAD:
                leaving.pop(0)()
        for finish in leaving:
            finish()
        return out, lse, tuple(saved)

    def backward(
        self, saved: tuple[Any, ...], whole: Whole, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        num_heads, num_heads_kv, bias_shape, *rest = saved
        groups = self._groups(num_heads, num_heads_kv)
        insides = []
        while rest:
            insides.append(tuple(rest[1 : 1 + rest[0]]))
            rest = rest[1 + rest[0] :]
        q, k, v, bias, *_ = insides[0]
        tokens_k = length(self.chunks_k[self.rank])
        dq = dout.new_empty((*dout.shape[:3], q.shape[3]))
        shared = bool(num_heads_kv % self.size)  # key heads, whose gradients are then sums
        kind = torch.float32 if shared else dout.dtype
        make = dout.new_zeros if shared else dout.new_empty
        dk, dv = (make((y.shape[0], tokens_k, num_heads_kv, y.shape[3]), dtype=kind) for y in (k, v))
        wants = whole.options.dbias and bias_shape is not None
        dbias = torch.zeros(bias_shape, dtype=torch.float32, device=dout.device) if wants else None
        dsink = torch.zeros(num_heads, dtype=torch.float32, device=dout.device) if whole.options.dsink else None
        leaving: list[Callable[[], None]] = []

        def begin(heads: Sequence[_Heads]) -> tuple[Pending, list[torch.Tensor]]:
            return self._to_heads(heads, (dout, 1, False), *([] if dlse is None else [(dlse, 2, False)]))

        for heads, inside, (pending, (of_out, *of_lse)) in zip(
            groups, insides, _begun_ahead(groups, begin), strict=True
        ):
            pending.wait()
            found = self.inside.backward(inside, whole, of_out, of_lse[0] if of_lse else None)
            back = [
                (found.dq, dq, 1, False, False), (found.dk.to(kind), dk, 1, True, shared),
                (found.dv.to(kind), dv, 1, True, shared),
            ]  # fmt: skip
            if dsink is not None and found.dsink is not None:
                dsink[heads[self.rank].q] = found.dsink
            if dbias is not None and found.dbias is not None:
                if dbias.shape[2] == 1:
                    share = heads[self.rank].of(dbias, 1, False)
                    share += found.dbias
                else:
                    back.append((found.dbias.float(), dbias, 2, False, True))
            leaving.append(self._to_tokens(heads, *back))
            if len(leaving) == AHEAD:
                leaving.pop(0)()
        for finish in leaving:
            finish()
        dbias = dbias if dbias is None or bias is None else dbias.to(bias.dtype)
        return Gradients(dq, dk.to(dout.dtype), dv.to(dout.dtype), dbias, dsink)


def _begun_ahead(groups: Sequence[Any], begin: Callable[[Any], Any]) -> Iterator[Any]:
    """``begin`` of each group, called `AHEAD` groups before its result is asked for."""
    under_way: list[Any] = []
    for group in groups:
        under_way.append(begin(group))
        if len(under_way) == AHEAD:
            yield under_way.pop(0)
    yield from under_way


class _Pieces:
    """Parts of some tensors, the same ones for the same place: what several ranks get is made once."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._known = tensors, dict[tuple[int, int], list[torch.Tensor]]()

    def at(self, s: slice) -> list[torch.Tensor]:
        key = s.start, s.stop
        if key not in self._known:
            self._known[key] = [x[s] for x in self._tensors]
        return self._known[key]


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
    return slice(count * rank // ranks, max(-(-count * (rank + 1) // ranks), 1))


def _moved(heads: slice, by: int) -> slice:
    return slice(heads.start + by, heads.stop + by)


def _cut(intervals: Sequence[Interval], at: Sequence[Interval]) -> list[Interval]:
    """The intervals in pieces, each of them within one of ``at``."""
    return sorted((max(a, c), min(b, d)) for a, b in intervals for c, d in at if max(a, c) < min(b, d))


def _seen(chunk: Interval, whole: Whole, have: Chunks) -> tuple[Interval, slice]:
    """The keys that a chunk of queries sees, and where they are among those that the rank has."""
    keys = reach(chunk, whole.band, whole.keys)
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


def _dbias_like(dbias: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if dbias is None or bias is None else dbias.to(bias.dtype)
