"""Keys passed around: a rank has those of two ranks at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....front.chunks import Interval, common, length, places
from ....front.documents import Piece
from ..exchange import Pending
from ..local import (
    Whole,
    apply_sink,
    empty_partial,
    empty_share,
    hide_outside,
    merge_into,
    share_dtype,
    slice_scores,
)
from ..local import backward as backward_here
from ..local import forward as forward_here
from .strategy import Gradients, Inputs, Saved, Tokens, add_dbias, dsink_of_rows, moved, zeros_of_bias


class Ring(Tokens):
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
                    *whole.call(moved(heads, x.head), piece, keys, x.num_heads),
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
        dbias = zeros_of_bias(x.bias, whole)
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
                    *whole.call(moved(heads, x.head), piece, keys, x.num_heads), add=n > 0,
                )  # fmt: skip
                if not begins:
                    dq[:, at] += share
                elif not direct:
                    dq[:, at] = share
                add_dbias(dbias, of_bias, heads, at, keys)
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
        return Gradients(dq.to(x.q.dtype), dk, dv, dbias, dsink_of_rows(x, whole, out, lse, dout, dlse))


def _cut(intervals: Sequence[Interval], at: Sequence[Interval]) -> list[Interval]:
    """The intervals in pieces, each of them within one of ``at``."""
    return sorted((max(a, c), min(b, d)) for a, b in intervals for c, d in at if max(a, c) < min(b, d))
