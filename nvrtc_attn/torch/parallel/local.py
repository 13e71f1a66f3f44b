"""What a rank computes by itself: one part of the whole attention at a time, and the combination of partial results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ... import api
from ...front.call import CallOptions
from ...front.operands import OPTIONAL_INPUTS
from ...front.part import Part
from ...front.philox import RngState
from .. import passes
from .layouts import Band, Interval


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

    def part(self, heads: slice, rows: Interval, keys: Interval, num_heads: int) -> CallOptions:
        """The options of the part with these query heads (of ``num_heads`` here), rows and keys."""
        first, count = self.heads or (0, num_heads)
        part = Part(batch=self.batch, heads=(first + heads.start, count))
        if self.lengths is None:
            part = replace(part, rows=(rows[0], self.rows), keys=(keys[0], self.keys))
        return self.options._replace(part=part, return_lse=True)


def slice_scores(x: torch.Tensor | None, heads: slice, rows: slice, keys: Interval) -> torch.Tensor | None:
    """The part of a bias or mask that may be broadcast."""
    if x is None:
        return None
    found = x
    for dim, where in ((1, heads), (2, rows), (3, slice(*keys))):
        if x.shape[dim] != 1:
            found = found.narrow(dim, where.start, where.stop - where.start)
    return found


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, mask: torch.Tensor | None,
    options: CallOptions, whole: Whole, *, partial: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Out and lse of one part. ``partial`` results are float32 where there is a kernel for it."""
    if partial and q.dtype != torch.float32 and not q.is_cuda:
        out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=torch.float32)
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        named = _optional(bias, mask, whole)
        api.attention_forward(q, k, v, out, lse=lse, **named, rng=whole.rng, **options.arguments())
        return out, lse
    tensors = (q, k, v, *_optional(bias, mask, whole).values())
    found: tuple[torch.Tensor, torch.Tensor] = passes.forward(tensors, options, whole.rng)
    return found


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, mask: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    options: CallOptions, whole: Whole,
) -> Any:  # fmt: skip
    """The shares dq, dk, dv and dbias of one part, float32 where there is a kernel for it; dbias None if not asked."""
    if q.dtype != torch.float32 and not q.is_cuda:
        dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if options.dbias else None
        api.attention_backward(
            dout, q, k, v, out, lse, dq, dk, dv, dlse=dlse, dbias=dbias, **_optional(bias, mask, whole), rng=whole.rng,
            deterministic=options.deterministic, **options.arguments(),
        )  # fmt: skip
        return dq, dk, dv, dbias
    tensors = (q, k, v, *_optional(bias, mask, whole).values())
    return passes.backward(tensors, out, lse, dout, dlse, options, whole.rng)


def _optional(bias: Any, mask: Any, whole: Whole) -> dict[str, Any]:
    """The optional inputs by name, in the order of the table."""
    given = {"bias": bias, "mask": mask}
    given |= dict(zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), whole.lengths or (), strict=False))
    return {name: given.get(name) for name in OPTIONAL_INPUTS}


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
