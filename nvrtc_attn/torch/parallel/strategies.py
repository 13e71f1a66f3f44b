"""How ranks share an attention: keys gathered (`AllGather`), passed around (`Ring`), heads for tokens (`Ulysses`).

Each is made for the tokens of the ranks of one group and has `forward` and `backward` of a rank's tensors. q, out, dq
and their like hold the tokens of ``chunks_q``, k, v, dk and dv those of ``chunks_k``; bias and mask have the rank's
rows (or one) and all keys (or one).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from .exchange import Pending, exchange
from .layouts import Chunks, Interval, common, length, needed, places, reach, together
from .local import Whole, merge_into, slice_scores
from .local import backward as backward_here
from .local import forward as forward_here

Saved = tuple[Any, ...]


class Inputs(NamedTuple):
    """The tensors of a rank, and which of the whole's heads they have: ``q.shape[2]`` query heads from ``head``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    head: int
    num_heads: int


class Gradients(NamedTuple):
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None


class Strategy(Protocol):
    def forward(self, x: Inputs, whole: Whole) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        """Return out and lse of the rank's rows, and what `backward` needs."""

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
        count = max(min(self.pipeline, x.k.shape[2]), 1)
        cuts = [x.k.shape[2] * i // count for i in range(count + 1)]
        return [slice(a, b) for a, b in pairwise(cuts)]

    def _sent(self, whole: Whole) -> list[list[slice]]:
        """For each rank where the keys lie, in this rank's tensors, that it needs of them."""
        mine = self.chunks_k[self.rank]
        return [places(mine, common(mine, needed(rows, whole.band, whole.keys))) for rows in self.chunks_q]

    def _received(self, whole: Whole, wanted: Chunks) -> list[list[slice]]:
        """For each rank where in the fetched keys those lie that come from it."""
        return [places(wanted, _cut(common(theirs, wanted), wanted)) for theirs in self.chunks_k]

    def _fetch(self, x: Inputs, whole: Whole, heads: slice) -> Pending:
        sends = [[y[:, s, heads] for s in slices for y in (x.k, x.v)] for slices in self._sent(whole)]
        wanted = needed(self.chunks_q[self.rank], whole.band, whole.keys)
        batch, count = x.k.shape[0], heads.stop - heads.start
        shapes = [
            [(batch, s.stop - s.start, count, d) for s in slices for d in (x.k.shape[3], x.v.shape[3])]
            for slices in self._received(whole, wanted)
        ]
        if not any(sends):
            sends[0].append(x.k[:0])  # something to say dtype and device by
        return exchange(self.group, sends, shapes)

    def _gathered(
        self, x: Inputs, whole: Whole, heads: slice, pending: Pending | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v of the keys that this rank needs, in the order of the sequence."""
        if pending is None:
            return x.k[:, :, heads], x.v[:, :, heads]
        wanted = needed(self.chunks_q[self.rank], whole.band, whole.keys)
        count = heads.stop - heads.start
        k = x.k.new_empty((x.k.shape[0], length(wanted), count, x.k.shape[3]))
        v = x.v.new_empty((x.v.shape[0], length(wanted), count, x.v.shape[3]))
        for slices, tensors in zip(self._received(whole, wanted), pending.wait(), strict=True):
            for i, s in enumerate(slices):
                k[:, s], v[:, s] = tensors[2 * i], tensors[2 * i + 1]
        return k, v

    def _fetches(self, x: Inputs, whole: Whole, groups: Sequence[slice]) -> list[Pending | None]:
        if self.size == 1:
            return [None] * len(groups)
        return [self._fetch(x, whole, heads) for heads in groups]

    def _have(self, whole: Whole) -> Chunks:
        """The keys of what `_gathered` returns."""
        return self.chunks_k[0] if self.size == 1 else needed(self.chunks_q[self.rank], whole.band, whole.keys)

    def forward(self, x: Inputs, whole: Whole) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        groups, have, per_head = self._groups(x), self._have(whole), x.q.shape[2] // max(x.k.shape[2], 1)
        pending = self._fetches(x, whole, groups)
        rows = self.rows()
        out = lse = None
        if len(rows) != 1 or len(groups) != 1:
            out = x.q.new_zeros((*x.q.shape[:3], x.v.shape[3]))
            lse = x.q.new_full((x.q.shape[0], x.q.shape[2], x.q.shape[1]), -torch.inf, dtype=torch.float32)
        for heads, under_way in zip(groups, pending, strict=True):
            k, v = self._gathered(x, whole, heads, under_way)
            of_q = slice(heads.start * per_head, heads.stop * per_head)
            for chunk, at in rows:
                keys, where = _seen(chunk, whole, have)
                out_part, lse_part = forward_here(
                    x.q[:, at, of_q], k[:, where], v[:, where], slice_scores(x.bias, of_q, at, keys),
                    slice_scores(x.mask, of_q, at, keys),
                    whole.part(_moved(of_q, x.head), chunk, keys, x.num_heads), whole,
                )  # fmt: skip
                if out is None or lse is None:
                    out, lse = out_part, lse_part
                else:
                    out[:, at, of_q], lse[:, of_q, at] = out_part, lse_part
        assert out is not None and lse is not None  # noqa: PT018
        return out, lse, (*x, out, lse)

    def backward(
        self, saved: tuple[Any, ...], whole: Whole, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        x, (out, lse) = Inputs(*saved[:-2]), saved[-2:]
        groups, have, per_head = self._groups(x), self._have(whole), x.q.shape[2] // max(x.k.shape[2], 1)
        pending = self._fetches(x, whole, groups)
        dq = torch.zeros_like(x.q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(y.shape, dtype=torch.float32, device=y.device) for y in (x.k, x.v))
        dbias = _zeros_of_bias(x.bias, whole)
        returning: list[tuple[slice, Pending]] = []
        for heads, under_way in zip(groups, pending, strict=True):
            k, v = self._gathered(x, whole, heads, under_way)
            of_q = slice(heads.start * per_head, heads.stop * per_head)
            dk_all, dv_all = (torch.zeros(y.shape, dtype=torch.float32, device=y.device) for y in (k, v))
            for chunk, at in self.rows():
                keys, where = _seen(chunk, whole, have)
                if keys[0] == keys[1]:
                    continue
                gradients = backward_here(
                    x.q[:, at, of_q], k[:, where], v[:, where], slice_scores(x.bias, of_q, at, keys),
                    slice_scores(x.mask, of_q, at, keys), out[:, at, of_q], lse[:, of_q, at], dout[:, at, of_q],
                    None if dlse is None else dlse[:, of_q, at],
                    whole.part(_moved(of_q, x.head), chunk, keys, x.num_heads), whole,
                )  # fmt: skip
                dq[:, at, of_q] = gradients[0]
                dk_all[:, where] += gradients[1]
                dv_all[:, where] += gradients[2]
                _add_dbias(dbias, gradients[3], of_q, at, keys)
            if self.size == 1:
                dk[:, :, heads], dv[:, :, heads] = dk_all, dv_all
            else:
                returning.append((heads, self._return(whole, have, dk_all, dv_all)))
        # Added up in the order of the ranks: the same bits every time.
        for heads, back in returning:
            for slices, tensors in zip(self._sent(whole), back.wait(), strict=True):
                for i, s in enumerate(slices):
                    dk[:, s, heads] += tensors[2 * i]
                    dv[:, s, heads] += tensors[2 * i + 1]
        return Gradients(dq, dk.to(x.k.dtype), dv.to(x.v.dtype), _dbias_like(dbias, x.bias))

    def _return(self, whole: Whole, have: Chunks, dk: torch.Tensor, dv: torch.Tensor) -> Pending:
        """Send the gradients of fetched keys to the ranks that have the keys."""
        sends = [[y[:, s] for s in slices for y in (dk, dv)] for slices in self._received(whole, have)]
        shapes = [
            [(y.shape[0], s.stop - s.start, *y.shape[2:]) for s in slices for y in (dk, dv)]
            for slices in self._sent(whole)
        ]
        if not any(sends):
            sends[0].append(dk[:0])
        return exchange(self.group, sends, shapes)


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

    def _pass_on(self, source: int, *tensors: torch.Tensor) -> Pending:
        """Send what is of rank ``source`` to the next rank, and receive what the one before has."""
        sends: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        shapes: list[list[tuple[int, ...]]] = [[] for _ in range(self.size)]
        sends[(self.rank + 1) % self.size] = list(tensors)
        tokens = length(self.chunks_k[(source - 1) % self.size])
        shapes[(self.rank - 1) % self.size] = [(x.shape[0], tokens, *x.shape[2:]) for x in tensors]
        return exchange(self.group, sends, shapes)

    def _taken(self, pending: Pending) -> list[torch.Tensor]:
        return pending.wait()[(self.rank - 1) % self.size]

    def forward(self, x: Inputs, whole: Whole) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        out = x.q.new_zeros((*x.q.shape[:3], x.v.shape[3]), dtype=torch.float32)
        lse = x.q.new_full((x.q.shape[0], x.q.shape[2], x.q.shape[1]), -torch.inf, dtype=torch.float32)
        k, v, heads = x.k, x.v, slice(0, x.q.shape[2])
        for step in range(self.size):
            source = (self.rank - step) % self.size
            coming = self._pass_on(source, k, v) if step + 1 < self.size else None
            for chunk, at, keys, where in self._pairs(whole, source):
                out_part, lse_part = forward_here(
                    x.q[:, at], k[:, where], v[:, where], slice_scores(x.bias, heads, at, keys),
                    slice_scores(x.mask, heads, at, keys),
                    whole.part(_moved(heads, x.head), chunk, keys, x.num_heads), whole, partial=True,
                )  # fmt: skip
                merge_into(out[:, at], lse[:, :, at], out_part, lse_part)
            if coming is not None:
                k, v = self._taken(coming)
        result = out.to(x.q.dtype)
        return result, lse, (*x, result, lse)

    def backward(
        self, saved: tuple[Any, ...], whole: Whole, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        x, (out, lse) = Inputs(*saved[:-2]), saved[-2:]
        dq = torch.zeros(x.q.shape, dtype=torch.float32, device=x.q.device)
        dbias = _zeros_of_bias(x.bias, whole)
        k, v, heads = x.k, x.v, slice(0, x.q.shape[2])
        travelling: Pending | None = None  # dk and dv of the keys that come next
        for step in range(self.size):
            source = (self.rank - step) % self.size
            coming = self._pass_on(source, k, v) if step + 1 < self.size else None
            dk, dv = (torch.zeros(y.shape, dtype=torch.float32, device=y.device) for y in (k, v))
            for chunk, at, keys, where in self._pairs(whole, source):
                gradients = backward_here(
                    x.q[:, at], k[:, where], v[:, where], slice_scores(x.bias, heads, at, keys),
                    slice_scores(x.mask, heads, at, keys), out[:, at], lse[:, :, at], dout[:, at],
                    None if dlse is None else dlse[:, :, at],
                    whole.part(_moved(heads, x.head), chunk, keys, x.num_heads), whole,
                )  # fmt: skip
                dq[:, at] += gradients[0]
                dk[:, where] += gradients[1]
                dv[:, where] += gradients[2]
                _add_dbias(dbias, gradients[3], heads, at, keys)
            if travelling is not None:
                for mine, theirs in zip((dk, dv), self._taken(travelling), strict=True):
                    mine += theirs
            if self.size > 1:  # after the last step the gradients go home
                travelling = self._pass_on(source, dk, dv)
            if coming is not None:
                k, v = self._taken(coming)
        if travelling is not None:
            dk, dv = self._taken(travelling)
        return Gradients(dq.to(x.q.dtype), dk.to(x.k.dtype), dv.to(x.v.dtype), _dbias_like(dbias, x.bias))


class Ulysses(_Tokens):
    """Ranks of a group swap tokens for heads: each then has the tokens of all of them and its share of the heads.

    ``inside`` computes the attention of those tokens, with other groups where the sequence is longer than this one's.
    """

    def __init__(
        self, group: Any, rank: int, chunks_q: Sequence[Chunks], chunks_k: Sequence[Chunks], inside: Strategy
    ) -> None:
        super().__init__(group, rank, chunks_q, chunks_k)
        self.inside = inside
        self.all_q, self.all_k = together(self.chunks_q), together(self.chunks_k)

    @staticmethod
    def why_not(num_heads: int, num_heads_kv: int, ranks: int) -> str:
        """Why the heads cannot be shared among so many ranks; empty when they can."""
        if num_heads % ranks:
            return f"{num_heads} query heads do not divide by {ranks} ranks"
        if num_heads_kv % ranks and ranks % max(num_heads_kv, 1):
            return f"neither of {num_heads_kv} key heads and {ranks} ranks divides the other"
        return ""

    def _heads(self, count: int, rank: int) -> slice:
        """Which of ``count`` heads, of q or of k, a rank works on. Ranks may share a key head."""
        return slice(count * rank // self.size, max(-(-count * (rank + 1) // self.size), 1))

    def _to_heads(self, *given: tuple[torch.Tensor, int, bool]) -> Pending:
        """Swap tensors ``(x, dim of the tokens, whether of keys)``, whose heads are ``3 - dim``, or 1 for all ranks."""
        sends, shapes = [], []
        for r in range(self.size):
            sends.append([_of_heads(x, 3 - dim, self._heads(x.shape[3 - dim], r)) for x, dim, _ in given])
            of_rank = []
            for x, dim, of_keys in given:
                tokens = length((self.chunks_k if of_keys else self.chunks_q)[r])
                shape = list(_of_heads(x, 3 - dim, self._heads(x.shape[3 - dim], self.rank)).shape)
                shape[dim] = tokens
                of_rank.append(tuple(shape))
            shapes.append(of_rank)
        return exchange(self.group, sends, shapes)

    def _in_order(self, parts: Sequence[torch.Tensor], dim: int, of_keys: bool) -> torch.Tensor:
        """The tokens of all ranks in the order of the sequence."""
        chunks, both = (self.chunks_k, self.all_k) if of_keys else (self.chunks_q, self.all_q)
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[dim] = length(both)
        found = parts[0].new_empty(shape)
        for part, theirs in zip(parts, chunks, strict=True):
            for source, at in zip(places(theirs, theirs), places(both, theirs), strict=True):
                found.narrow(dim, at.start, at.stop - at.start).copy_(
                    part.narrow(dim, source.start, source.stop - source.start)
                )
        return found

    def _swapped(self, *given: tuple[torch.Tensor, int, bool]) -> list[torch.Tensor]:
        received = self._to_heads(*given).wait()
        return [
            self._in_order([tensors[i] for tensors in received], dim, of_keys)
            for i, (_, dim, of_keys) in enumerate(given)
        ]

    def _to_tokens(self, *given: tuple[torch.Tensor, int, bool, int]) -> list[torch.Tensor]:
        """The way back of tensors ``(x, dim of the tokens, whether of keys, heads of the result)``.

        Where ranks share heads what they return is added up, in their order.
        """
        sends: list[list[torch.Tensor]] = []
        shapes: list[list[tuple[int, ...]]] = []
        for r in range(self.size):
            of_rank, theirs_shapes = [], []
            for x, dim, of_keys, count in given:
                chunks, both = (self.chunks_k, self.all_k) if of_keys else (self.chunks_q, self.all_q)
                of_rank.append(
                    torch.cat([x[_at(dim, s)] for s in places(both, chunks[r])] or [x[_at(dim, slice(0, 0))]], dim)
                )
                shape = list(x.shape)
                heads = slice(0, 1) if count == 1 else self._heads(count, r)
                shape[dim], shape[3 - dim] = length(chunks[self.rank]), heads.stop - heads.start
                theirs_shapes.append(tuple(shape))
            sends.append(of_rank)
            shapes.append(theirs_shapes)
        received = exchange(self.group, sends, shapes).wait()
        found = []
        for i, (x, dim, of_keys, count) in enumerate(given):
            shape = list(x.shape)
            shape[dim], shape[3 - dim] = length((self.chunks_k if of_keys else self.chunks_q)[self.rank]), count
            total = x.new_zeros(shape)
            for r, tensors in enumerate(received):
                heads = slice(0, 1) if count == 1 else self._heads(count, r)
                total[_at(3 - dim, heads)] += tensors[i]
            found.append(total)
        return found

    def _scores(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """Bias or mask of this rank's heads and all rows."""
        if x is None:
            return None
        if x.shape[2] == 1:
            return _of_heads(x, 1, self._heads(x.shape[1], self.rank))
        return self._swapped((x, 2, False))[0]

    def forward(self, x: Inputs, whole: Whole) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        q, k, v = self._swapped((x.q, 1, False), (x.k, 1, True), (x.v, 1, True))
        bias, mask = self._scores(x.bias), self._scores(x.mask)
        head = x.head + self._heads(x.q.shape[2], self.rank).start
        out, lse, saved = self.inside.forward(Inputs(q, k, v, bias, mask, head, x.num_heads), whole)
        (out,) = self._to_tokens((out, 1, False, x.q.shape[2]))
        (lse,) = self._to_tokens((lse.unsqueeze(-1), 2, False, x.q.shape[2]))
        bias_shape = None if x.bias is None else tuple(x.bias.shape)
        return out, lse.squeeze(-1), (x.q.shape[2], x.k.shape[2], bias_shape, *saved)

    def backward(
        self, saved: tuple[Any, ...], whole: Whole, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        num_heads, num_heads_kv, bias_shape, *inside = saved
        (dout,) = self._swapped((dout, 1, False))
        if dlse is not None:
            dlse = self._swapped((dlse.unsqueeze(-1), 2, False))[0].squeeze(-1)
        dq, dk, dv, dbias = self.inside.backward(tuple(inside), whole, dout, dlse)
        if num_heads_kv < self.size:  # shares of a key head are added up
            dk, dv = dk.float(), dv.float()
        (dq,) = self._to_tokens((dq, 1, False, num_heads))
        back_k, back_v = self._to_tokens((dk, 1, True, num_heads_kv), (dv, 1, True, num_heads_kv))
        if dbias is not None and bias_shape is not None:
            dtype = dbias.dtype
            if bias_shape[2] == 1:
                share = dbias.new_zeros(bias_shape)
                _of_heads(share, 1, self._heads(bias_shape[1], self.rank))[...] = dbias
                dbias = share
            else:
                dbias = self._to_tokens((dbias.float(), 2, False, bias_shape[1]))[0].to(dtype)
        return Gradients(dq, back_k.to(dout.dtype), back_v.to(dout.dtype), dbias)


def _of_heads(x: torch.Tensor, dim: int, heads: slice) -> torch.Tensor:
    """These heads of x; all of one that has a single one for all."""
    return x if x.shape[dim] == 1 else x.narrow(dim, heads.start, heads.stop - heads.start)


def _at(dim: int, where: slice) -> tuple[slice, ...]:
    return (*(slice(None),) * dim, where)


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


def _dbias_like(dbias: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if dbias is None or bias is None else dbias.to(bias.dtype)
