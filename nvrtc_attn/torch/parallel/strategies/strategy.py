"""What a strategy of ContextParallel is, what it takes and returns, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch

from ....front.chunks import Chunks, Interval, places
from ....front.documents import Piece
from ...tensors import resolved
from ..exchange import Pending, exchange
from ..local import Whole, sink_gradient, slice_scores, whole_with

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


class Tokens:
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


def begun_ahead(groups: Sequence[Any], begin: Callable[[Any], Any]) -> Iterator[Any]:
    """``begin`` of each group, called `AHEAD` groups before its result is asked for."""
    under_way: list[Any] = []
    for group in groups:
        under_way.append(begin(group))
        if len(under_way) == AHEAD:
            yield under_way.pop(0)
    yield from under_way


def in_groups(heads: slice, count: int) -> list[slice]:
    """Heads in as many groups."""
    size = heads.stop - heads.start
    edges = [heads.start + size * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def moved(heads: slice, by: int) -> slice:
    return slice(heads.start + by, heads.stop + by)


def side_by_side(
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


def memory_of_columns(columns: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The one tensor whose columns these are, where they lie `side_by_side`, of the strides of its tokens."""
    first, heads = columns[0], 0
    for y in columns:
        at = first.data_ptr() + heads * first.stride(2) * first.element_size()
        alike = y.dtype == first.dtype and y.stride() == first.stride() and y.data_ptr() == at
        if not alike or y.shape[:2] != first.shape[:2] or y.shape[3] != first.shape[3]:
            return None
        heads += y.shape[2]
    if first.stride(1) != heads * first.stride(2):  # not all columns
        return None
    return first.as_strided((*first.shape[:2], heads, first.shape[3]), first.stride())


def zeros_of_bias(bias: torch.Tensor | None, whole: Whole) -> torch.Tensor | None:
    if bias is None or not whole.options.dbias:
        return None
    return torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)


def add_dbias(dbias: torch.Tensor | None, share: Any, heads: slice, rows: slice, keys: Interval) -> None:
    if dbias is not None:
        part = slice_scores(dbias, heads, rows, keys)
        assert part is not None
        part += share


def dsink_of_rows(
    x: Inputs, whole: Whole, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor | None:
    return sink_gradient(out, lse, dout, dlse, x.sink) if x.sink is not None and whole.options.dsink else None
