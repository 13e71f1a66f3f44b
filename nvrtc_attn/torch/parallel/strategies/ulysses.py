"""Heads for tokens: each rank computes its heads of the tokens of all ranks of a group, by another strategy inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from ....front.chunks import Chunks, length, places, together
from ..exchange import Pending, contiguous, copy, copy_slices
from ..local import Whole
from .strategy import (
    AHEAD,
    Gradients,
    Inputs,
    Saved,
    Strategy,
    Tokens,
    begun_ahead,
    in_groups,
    memory_of_columns,
    side_by_side,
    zeros_of_bias,
)


class _Heads(NamedTuple):
    """Heads that a rank works on, one group of them."""

    q: slice
    k: slice

    def of(self, x: torch.Tensor, dim: int, of_keys: bool) -> torch.Tensor:
        """Those of x; all of one that has a single one for all."""
        at = self.k if of_keys else self.q
        return x if x.shape[dim] == 1 and not of_keys else x.narrow(dim, at.start, at.stop - at.start)


class Ulysses(Tokens):
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
        self._others = [r for r in range(self.size) if r != rank]
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
            cuts = in_groups(of_k, max(min(self.pipeline, of_k.stop - of_k.start), 1))
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
        beside: list[tuple[torch.Tensor, Chunks, torch.Tensor, Chunks]] = []  # what is copied meanwhile
        found = list[torch.Tensor]()
        if joint:
            own = self.chunks_q[self.rank]
            mine = [heads[self.rank].of(x, 2, of_keys) for x, of_keys in joint]
            memory, columns = side_by_side(mine, length(self.all_q))
            beside += [(y, self.all_q, x.transpose(0, 1), own) for y, x in zip(columns, mine, strict=True)]
            for r in self._others:
                gone = [heads[r].of(x, 2, of_keys) for x, of_keys in joint]
                (theirs,), parts = side_by_side(gone, length(own))
                for part, x in zip(parts, gone, strict=True):
                    copy(part, x.transpose(0, 1))
                sends[r] = [theirs[s] for s in places(own, own)]
                receives[r] = [memory[0][s] for s in places(self.all_q, self.chunks_q[r])]
            found = memory
        for x, dim, of_keys in given:
            chunks, both = (self.chunks_k, self.all_k) if of_keys else (self.chunks_q, self.all_q)
            own = chunks[self.rank]
            part = heads[self.rank].of(x, 3 - dim, of_keys).movedim(dim, 0)
            whole = part.new_empty((length(both), *part.shape[1:]))
            beside.append((whole, both, part, own))
            for r in self._others:
                # One message a chunk, as many as the other side has.
                theirs = contiguous(heads[r].of(x, 3 - dim, of_keys).movedim(dim, 0))
                sends[r] += [theirs[s] for s in places(own, own)]
                receives[r] += [whole[s] for s in places(both, chunks[r])]
            found.append(whole)
        pending = self.exchange(sends, receives)
        for to, has, x, of_own in beside:
            copy_slices(to, places(has, of_own), x, places(of_own, of_own))
        return pending, found

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
                memory = side_by_side(like, rows)[0]
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
        beside: list[tuple[torch.Tensor, Chunks, torch.Tensor, Chunks]] = []  # what is copied meanwhile
        if joint:
            own = self.chunks_q[self.rank]
            by_token = [x.transpose(0, 1) for x, _, _ in joint]
            memory = memory_of_columns(by_token)
            if memory is None:
                (memory,), parts = side_by_side([x for x, _, _ in joint], length(self.all_q))
                for part, x in zip(parts, by_token, strict=True):
                    copy(part, x)
            for r in range(self.size):
                results = [heads[r].of(result, 2, of_keys) for _, result, of_keys in joint]
                if r == self.rank:
                    beside += [(y.transpose(0, 1), own, x, self.all_q) for x, y in zip(by_token, results, strict=True)]
                    continue
                (received,), parts = side_by_side(results, length(own), memory.dtype)
                coming[r] += [(x, y.transpose(0, 1), False) for x, y in zip(parts, results, strict=True)]
                receives[r] += [received[s] for s in places(own, own)]
                sends[r] += [memory[at] for at in places(self.all_q, self.chunks_q[r])]
        for x, result, dim, of_keys, adds in given:
            chunks, both = (self.chunks_k, self.all_k) if of_keys else (self.chunks_q, self.all_q)
            of_tokens, own = x.movedim(dim, 0), chunks[self.rank]
            for r in range(self.size):
                to = heads[r].of(result, 3 - dim, of_keys).movedim(dim, 0)
                if r != self.rank:
                    piece = x.new_empty((length(own), *to.shape[1:]))
                    coming[r].append((piece, to, adds))
                    receives[r] += [piece[s] for s in places(own, own)]
                    sends[r] += [of_tokens[at] for at in places(both, chunks[r])]
                elif adds:
                    both_places = zip(places(both, own), places(own, own), strict=True)
                    coming[r] += [(of_tokens[at], to[s], True) for at, s in both_places]
                else:
                    beside.append((to, own, of_tokens, both))
        pending = self.exchange(sends, receives)
        for to, own, x, has in beside:
            copy_slices(to, places(own, own), x, places(has, own))

        def finish() -> None:
            pending.wait()
            for piece, to, adds in chain(*coming):
                if adds:
                    to += piece
                else:
                    copy(to, piece)

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

        for heads, (pending, memory) in zip(groups, begun_ahead(groups, begin), strict=True):
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
        dbias = zeros_of_bias(x.bias, whole)
        dsink = torch.zeros(num_heads, dtype=torch.float32, device=dout.device) if whole.options.dsink else None
        leaving: list[Callable[[], None]] = []

        def begin(heads: Sequence[_Heads]) -> tuple[Pending, list[torch.Tensor]]:
            return self._to_heads(heads, (), (dout, 1, False), *([] if dlse is None else [(dlse, 2, False)]))

        for heads, inside, (pending, (of_out, *of_lse)) in zip(
            groups, insides, begun_ahead(groups, begin), strict=True
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


def _share(count: int, rank: int, ranks: int) -> slice:
    """Which of ``count`` heads a rank works on. Ranks may share a key head."""
    return slice(count * rank // ranks, -(-count * (rank + 1) // ranks))
