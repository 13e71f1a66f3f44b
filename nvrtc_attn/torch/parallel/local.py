"""What a rank computes by itself: one part of the whole attention at a time, and the combination of partial results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ... import api
from ...base import env
from ...base.tables import remember
from ...front.call import CallOptions
from ...front.chunks import Band, Chunks, Interval, reach
from ...front.documents import Packing, Piece
from ...front.operands import BACKWARD, FORWARD, INPUTS, OPTIONAL_INPUTS
from ...front.part import Part
from ...front.philox import RngState
from ...front.tensors import view
from ...modifiers.modifier import Modifier
from ..tensors import address_of, detached, raw_stream, signature

_plans: dict[Any, Any] = {}
"""Everything of a part but its addresses -> plan, and where its dropout begins."""


class Whole(NamedTuple):
    """The attention that all ranks compute together."""

    options: CallOptions
    """Those of every part, but `CallOptions.part`."""
    rng: RngState
    rows: int
    keys: int
    band: Band
    """Row i sees keys from i + first to i + last."""
    lengths: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
    """cu_seqlens_q, cu_seqlens_k and seqused_k of packed sequences, which every rank has whole."""
    batch: Interval | None = None
    """Of a still larger attention, whose dropout mask this one has: where its batch entries lie, of how many."""
    heads: Interval | None = None
    return_lse: bool = True
    """Whether somebody asks for the lse of the rank's rows."""
    sm_margin: int | None = None
    """`Part.sm_margin` of parts that are computed beside an exchange; the others have 0 where it is not None."""
    plan_as: bool = False
    """`Part.plan_as` of every part."""
    modifier: Modifier | None = None
    """score_mod and mask_mod, whose arrays every rank has whole."""
    daux: tuple[torch.Tensor | None, ...] = ()
    """Of each captured array the float32 sum that the parts of a backward pass add their shares to, where it is
    wanted."""
    packing: Packing | None = None
    """Packed sequences whose tokens ranks share, where `lengths` is None: of those, a rank has all tokens."""
    tables: dict[tuple[int, ...], torch.Tensor] | None = None
    """On the device, of this call alone: with ``packing`` `Piece.lengths`, with ``used`` those of an interval of the
    keys. See `prepare`."""
    backward_follows: bool = True
    """Whether what the backward pass needs is kept."""
    may_keep: bool = True
    """Whether keys that were fetched may be kept. Not where how many they are is more than shapes tell, in operators:
    lengths of packed sequences and numbers of a modifier."""
    adds_up: bool = False
    """Whether dk and dv are shares that ranks add up before they are rounded."""
    used: torch.Tensor | None = None
    """seqused_k of a dense batch: of all keys, and in what `call` returns of those of the call."""

    def pieces(self, chunks: Chunks) -> list[Piece]:
        """The calls of a rank with these tokens."""
        if self.packing is not None:
            return self.packing.pieces(chunks)
        return [Piece(rows, reach(rows, self.band, self.keys)) for rows in chunks]

    def prepare(self, pieces: Sequence[Piece], device: torch.device) -> None:
        """Bring the lengths of these calls to the device, on the stream of the call, before there are lanes."""
        if self.used is not None:
            for piece in pieces:
                self.used_of(piece.keys)
        for of_call in (piece.lengths for piece in pieces if piece.lengths):
            assert self.tables is not None
            if of_call not in self.tables:
                host = torch.tensor(of_call, dtype=torch.int32, device="cpu")
                if device.type == "cuda":  # from pinned memory, so that the host waits for nothing
                    host = host.pin_memory().to(device, non_blocking=True)
                self.tables[of_call] = host

    def used_of(self, keys: Interval) -> torch.Tensor | None:
        """How many of these keys each batch entry uses."""
        if self.used is None or keys == (0, self.keys):
            return self.used
        assert self.tables is not None
        found = self.tables.get(keys)
        if found is None:
            found = self.tables[keys] = (self.used - keys[0]).clamp_(0, keys[1] - keys[0])
        return found

    def call(
        self, heads: slice, piece: Piece, keys: Interval, num_heads: int, *, beside: bool = True
    ) -> tuple[CallOptions, Whole]:
        """Options and lengths of the call of a piece and these of its keys. ``beside``: something is sent meanwhile."""
        if self.packing is None:
            options = self.part(heads, piece.rows, keys, num_heads, beside=beside)
            return options, self if self.used is None else self._replace(used=self.used_of(keys))
        first, count = self.heads or (0, num_heads)
        margin = self.sm_margin if beside or not self.sm_margin else 0
        # Dropout's index counts by the longest sequence that the caller names; all others have no use for more than is.
        by_index = self.options.dropout_p > 0
        longest = (self.options.max_seqlen_q if by_index else None) or self.packing.longest
        batch: Interval | None = None
        if piece.document >= 0 and (by_index or self.modifier is not None):
            start, total = self.batch or (0, self.packing.documents)
            batch = (start + piece.document, total)
        options = self.options._replace(max_seqlen_q=None, max_seqlen_k=None, return_lse=True, dsink=False)
        where: tuple[Interval | None, Interval | None] = (None, None)
        lengths = None
        if piece.lengths:
            assert self.tables is not None
            if not by_index:
                longest = max(b - a for a, b in pairwise(piece.lengths))
            options = options._replace(max_seqlen_q=longest, max_seqlen_k=longest)
            lengths = (self.tables[piece.lengths],) * 2
        elif keys[0] < keys[1]:
            where = (piece.row, longest), (piece.key + keys[0] - piece.keys[0], longest)
        part = _part(batch, (first + heads.start, count), *where, margin, False)
        return options._replace(part=part), self._replace(lengths=None if lengths is None else (*lengths, None))

    def part(self, heads: slice, rows: Interval, keys: Interval, num_heads: int, *, beside: bool = True) -> CallOptions:
        """The options of the part with these query heads (of ``num_heads`` here), rows and keys.

        ``beside``: something is sent meanwhile.
        """
        first, count = self.heads or (0, num_heads)
        where: tuple[Interval | None, Interval | None]
        where = (None, None) if self.lengths else ((rows[0], self.rows), (keys[0], self.keys))
        margin = self.sm_margin if beside or not self.sm_margin else 0
        part = _part(self.batch, (first + heads.start, count), *where, margin, self.plan_as)
        return self.options._replace(part=part, return_lse=True, dsink=False)


def whole_with(whole: Whole, captures: Sequence[torch.Tensor] | None, trained: Sequence[bool] | None = None) -> Whole:
    """``whole`` with these captured arrays, or none; and memory for the gradients of those that ``trained`` names."""
    if whole.modifier is None:
        return whole
    modifier = whole.modifier.with_captures(tuple(captures or ()))
    daux: tuple[torch.Tensor | None, ...] = (None,) * len(modifier.captures)
    if trained is not None:
        daux = tuple(
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) if wanted and i in modifier.differentiable
            else None for i, (x, wanted) in enumerate(zip(modifier.captures, trained, strict=True))
        )  # fmt: skip
    return whole._replace(modifier=modifier, daux=daux)


@functools.lru_cache(maxsize=4096)
def _part(
    batch: Interval | None, heads: Interval, rows: Interval | None, keys: Interval | None, sm_margin: int | None,
    plan_as: bool,
) -> Part:  # fmt: skip
    return Part(batch=batch, heads=heads, rows=rows, keys=keys, sm_margin=sm_margin, plan_as=plan_as)


def slice_scores(x: torch.Tensor | None, heads: slice, rows: slice, keys: Interval) -> torch.Tensor | None:
    """The part of a bias or mask that may be broadcast."""
    if x is None:
        return None
    found = x
    for dim, where in ((1, heads), (2, rows), (3, slice(*keys))):
        if x.shape[dim] != 1:
            found = found.narrow(dim, where.start, where.stop - where.start)
    return found


def empty_partial(q: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    """Memory for the out of some of the keys."""
    return torch.empty((*q.shape[:3], head_dim_v), dtype=torch.float32, device=q.device)


def empty_key_gradients(k: torch.Tensor, v: torch.Tensor, whole: Whole) -> list[torch.Tensor]:
    """Memory for the dk and dv of a strategy."""
    return [
        torch.empty(x.shape, dtype=torch.float32 if whole.adds_up else x.dtype, device=x.device) for x in (k, v)
    ]  # fmt: skip


def share_dtype(q: torch.Tensor, options: CallOptions) -> torch.dtype:
    """The type of the dq of some of the keys: float32 where there is a kernel for it."""
    return q.dtype if q.is_cuda and options.deterministic else torch.float32


def empty_share(q: torch.Tensor, options: CallOptions) -> torch.Tensor:
    """Memory for the dq of some of the keys."""
    return torch.empty(q.shape, dtype=share_dtype(q, options), device=q.device)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, mask: torch.Tensor | None,
    out: torch.Tensor, options: CallOptions, whole: Whole,
) -> torch.Tensor:  # fmt: skip
    """Write out of one part to ``out``, which may be a part of a larger tensor, and return its lse."""
    if _converts(out, q, whole):
        found = torch.empty(out.shape, dtype=q.dtype, device=q.device)
        lse_of_found = forward(q, k, v, bias, mask, found, options, whole)
        out.copy_(found)
        return lse_of_found
    named = _optional(bias, mask, whole)
    if not q.is_cuda or whole.modifier is not None:
        lse: torch.Tensor
        arguments = {name: detached(x) for name, x in named.items()} | options.arguments()
        _, lse = api.attention(
            detached(q), detached(k), detached(v), rng=whole.rng, out=out, return_lse=True, score_mod=whole.modifier,
            **arguments,
        )  # fmt: skip
        return lse
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    named |= {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    if out.numel():
        _run(api.plan_forward, FORWARD, named, options, whole.rng)
    return lse


def _converts(result: torch.Tensor, q: torch.Tensor, whole: Whole) -> bool:
    """Whether a result is converted: those of packed sequences are whole, and no kernel writes them in float32."""
    return whole.lengths is not None and result.dtype != q.dtype


def _run(make: Callable[..., Any], order: Sequence[str], named: dict[str, Any], options: CallOptions, rng: Any) -> None:
    """Launch a pass of a part on the current stream; planned once for these shapes, strides and options.

    The public functions look at every tensor anew, which takes longer than the kernel of a short part.
    """
    operands = [named.get(name) for name in order]
    key = (order, *map(signature, operands), options, env.raw_backend())
    known = _plans.get(key)
    if known is None:
        inputs = {name: detached(x) for name, x in named.items() if name in INPUTS}
        call = api.checked_call(**inputs, options=options, stream=None)
        views = {name: view(x.detach(), name) for name, x in named.items() if x is not None and name not in INPUTS}
        known = remember(_plans, key, (make(call, views), call.dropout_base))
    plan, base = known
    index = named["q"].get_device()
    workspace = None
    if plan.workspace_bytes:
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=named["q"].device)
    plan.run(
        raw_stream(index), tuple(map(address_of, operands)), 0 if workspace is None else workspace.data_ptr(),
        rng.moved(base) if options.dropout_p > 0 else rng,
    )  # fmt: skip


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, mask: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    gradients: tuple[torch.Tensor, ...], options: CallOptions, whole: Whole, *, add: bool,
) -> torch.Tensor | None:  # fmt: skip
    """The shares of one part of dq, dk and dv: dq is written, dk and dv likewise or, with ``add``, added to.

    ``gradients`` may be parts of larger tensors, and of the type of q or float32. Returns dbias where the options ask
    for it. What captured arrays get is added to `Whole.daux`.
    """
    dq, dk, dv = gradients
    of_q, of_k, of_v = (
        torch.empty(x.shape, dtype=q.dtype, device=q.device) if _converts(x, q, whole)
        else torch.empty(x.shape, dtype=torch.float32, device=q.device) if add and x is not dq else x
        for x in gradients
    )  # fmt: skip
    dbias = None
    if options.dbias and bias is not None:
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    named = {**_optional(bias, mask, whole), "dlse": dlse, "dbias": dbias, "q": q, "k": k, "v": v, "out": out}
    named |= {"dout": dout, "lse": lse, "dq": of_q, "dk": of_k, "dv": of_v}
    if q.is_cuda and whole.modifier is None:
        _run(api.plan_backward, BACKWARD, named, options, whole.rng)
    else:
        daux = [None if x is None else torch.empty_like(x) for x in whole.daux]
        api.run_backward(
            tuple(detached(named.get(name)) for name in BACKWARD), options, whole.rng, None, None, whole.modifier,
            daux=daux if any(x is not None for x in daux) else None, new_workspace=_new_bytes(q.device),
        )  # fmt: skip
        for total, of_part in zip(whole.daux, daux, strict=True):
            if total is not None:
                total += of_part
    for to, found in ((dq, of_q), (dk, of_k), (dv, of_v)):
        if add and to is not dq:
            to += found
        elif found is not to:
            to.copy_(found)
    return dbias


def _new_bytes(device: torch.device) -> Callable[[int], torch.Tensor]:
    return lambda size: torch.empty(size, dtype=torch.uint8, device=device)


def _optional(bias: Any, mask: Any, whole: Whole) -> dict[str, Any]:
    """The optional inputs by name, in the order of the table."""
    given = {"bias": bias, "mask": mask}
    lengths = whole.lengths or (None, None, whole.used)
    given |= dict(zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), lengths, strict=True))
    return {name: given.get(name) for name in OPTIONAL_INPUTS}


def apply_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> None:
    """Let the sink ``[H]`` take its share of every row, in place: of results over all keys, once.

    No kernel has to know of it, in which calls of a row it would count more than once.
    """
    total = torch.logaddexp(lse, sink.float()[None, :, None])
    out.mul_(_weight(lse, total.masked_fill(total == -torch.inf, 0.0)))
    lse.copy_(total)


def hide_outside(lse: torch.Tensor, whole: Whole, rows: Sequence[tuple[Piece, slice]]) -> None:
    """Let rows of tokens in no document see nothing, the sink neither, in place: as one call has it."""
    if whole.lengths is not None:  # of all tokens, whose places the host does not know
        starts, at = whole.lengths[0], torch.arange(lse.shape[2], device=lse.device)
        lse.masked_fill_((at < starts[0]) | (at >= starts[-1]), -torch.inf)
    for piece, at in rows:
        if piece.document < 0:
            lse[:, :, at] = -torch.inf


def sink_gradient(
    out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None, sink: torch.Tensor
) -> torch.Tensor:
    """``dsink[h] = -sum over rows of exp(sink[h] - lse) * (rowsum(dout * out) - dlse)``, float32, of these rows."""
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    taken = torch.exp(sink.float()[None, :, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    return -(taken * delta).sum((0, 2))


def merge_into(out: torch.Tensor, lse: torch.Tensor, out_part: torch.Tensor, lse_part: torch.Tensor) -> None:
    """Combine float32 ``out [B, M, H, D]`` and ``lse [B, H, M]`` with those of other keys, in place.

    ``out = sum_p exp(lse_p - lse) out_p`` with ``lse = log(sum_p exp(lse_p))``: what the softmax over all keys gives.
    Rows without a key in either have out 0 and lse -inf.
    """
    total = torch.logaddexp(lse, lse_part)
    hidden = total == -torch.inf  # -inf - -inf would be NaN
    total_or_zero = total.masked_fill(hidden, 0.0)
    out.mul_(_weight(lse, total_or_zero))
    out.addcmul_(out_part.float(), _weight(lse_part, total_or_zero))
    lse.copy_(total)


def _weight(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.exp(lse - total).transpose(1, 2).unsqueeze(-1)


def merge_partials(outs: Any, lses: Any, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the results of parts of the keys: out ``[B, Mq, H, Kv]`` and lse ``[B, H, Mq]`` of all of them.

    Parameters
    ----------
    outs, lses
        One of each for every part, as `nvrtc_attn.attention` returns them with ``part=`` and ``return_lse=True``.
    dtype
        Of out; by default that of the first part. The sum is taken in float32.
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs, lses: got {len(outs)} and {len(lses)}. There is one of each for every part.")
    out, lse = outs[0].to(torch.float32, copy=True), lses[0].clone()
    for out_part, lse_part in zip(outs[1:], lses[1:], strict=True):
        merge_into(out, lse, out_part, lse_part)
    return out.to(outs[0].dtype if dtype is None else dtype), lse
