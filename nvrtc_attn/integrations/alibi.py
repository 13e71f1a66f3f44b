"""ALiBi as flash_attn defines it, on this library's kernels, without a bias of M x N elements.

With ``causal`` its term ``slope * (j - i - N + M)`` differs from ``slope * j`` by a constant of the row, which the
softmax ignores and which lse gets back afterwards. So a bias of one row is enough. Without ``causal`` the keys before
and behind the diagonal are two such calls, joined by their lse. Where neither holds (more queries than keys, packed
sequences without ``causal`` or with dropout) a ``score_mod`` computes the term.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from ..base.errors import shown
from ..torch import attention
from ..torch.autocast import cast_for_autocast, is_autocast

# The bias of a row is as large as slope * rows of its call, and lse is float32: P of the backward pass has a relative
# error of |lse| * 2**-22. Calls of so many rows keep it, for slopes up to 1, at the rounding of the input type.
_ROWS: Final = {torch.bfloat16: 8192, torch.float16: 2048, torch.float32: 128}


def check_slopes(slopes: Any, batch: int, heads: int) -> None:
    """TypeError or ValueError where slopes are no tensor, or not ``[heads]`` or ``[batch, heads]``."""
    if not isinstance(slopes, torch.Tensor):
        raise TypeError(
            f"alibi_slopes: got {shown(slopes)} of type {type(slopes).__name__}. It is a tensor, "
            f"[num_heads] or [batch, num_heads]."
        )
    if slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes: shape {tuple(slopes.shape)}. It is [num_heads] = [{heads}] or [batch, num_heads] = "
            f"[{batch}, {heads}]."
        )


def without_autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], AbstractContextManager[Any]]:
    """q, k and v as autocast gives them to attention, and where the functions below are called.

    Autocast would round the term of ALiBi to the type of q: at 4096 keys out was 6 times as far from the exact one.
    """
    if not is_autocast(q):
        return (q, k, v), nullcontext()
    q, k, v, _ = cast_for_autocast(q, k, v, None)
    return (q, k, v), torch.autocast(q.device.type, enabled=False)


def packed_alibi(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor, rows: int,
    columns: int, slopes: torch.Tensor, window_size: Sequence[int], options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) of packed sequences, causal, as a batch: queries at the end of their rows, keys at the beginning.

    So the last query of every sequence is in the last row, and the alignment to the last key in use is the sequence's.
    """
    total, device = q.shape[0], q.device
    if rows == 0 or starts_q.shape[0] < 2:  # no sequence, or none with queries
        lse = torch.full((q.shape[1], total), -torch.inf, device=device)
        return q.new_zeros((*q.shape[:2], v.shape[2])), lse
    at = starts_q[1:, None] - rows + torch.arange(rows, device=device)
    queries = q[at.clamp(0, max(total - 1, 0))]  # what stands before a sequence is computed and left out
    at = starts_k[:-1, None] + torch.arange(columns, device=device)
    keys, values = (x[at.clamp(0, max(x.shape[0] - 1, 0))] for x in (k, v))
    used = starts_k.diff()
    left = None if window_size[0] is None or window_size[0] < 0 else window_size[0]
    wide = slopes.reshape(-1, q.shape[1], 1)
    step, outs, sums = _ROWS.get(q.dtype, 128), [], []
    for start in range(0, rows, step):
        end = min(start + step, rows)
        seen = (used - (rows - end)).clamp(min=0)  # keys up to the diagonal of the last query
        distance = (torch.arange(columns, device=device) - (seen[:, None] - 1)).clamp(max=0).float()
        out, lse = attention(
            queries[:, start:end], keys, values, bias=(wide * distance[:, None])[:, :, None], causal=True,
            window_size=(left, None), seqused_k=seen, return_lse=True, **options,
        )  # fmt: skip
        behind = torch.arange(end - start - 1, -1, -1, device=device, dtype=torch.float32)
        outs.append(out)
        sums.append(lse + wide * behind)
    token = torch.arange(total, device=device)
    sequence = torch.searchsorted(starts_q[1:], token, right=True, out_int32=True).clamp(max=starts_q.shape[0] - 2)
    row = (token - starts_q[1:][sequence] + rows).clamp(0, rows - 1)
    outside = (token < starts_q[0]) | (token >= starts_q[-1])
    out = torch.cat(outs, 1)[sequence, row].masked_fill(outside[:, None, None], 0)
    lse = torch.cat(sums, 2)[sequence, :, row].masked_fill(outside[:, None], -torch.inf)
    return out, lse.transpose(0, 1)


def dense_alibi(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, left: int | None, right: int | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) under ``-slope * |i + N - M - j|``; slopes are ``[1 or B, H, 1]``."""
    rows = q.shape[1]
    out, lse = _causal_alibi(q, k, v, slopes, k.shape[1] - rows, left, options)
    if right == 0 or rows < 2:
        return out, lse
    # Keys behind the diagonal: turned around they are those before it. With i' = M - 2 - i and j' = N - 1 - j,
    # j > i + N - M is j' <= i', at the distance i' - j' + 1. The last query has none.
    turned = (q.flip(1)[:, 1:], k.flip(1), v.flip(1))
    behind, behind_lse = _causal_alibi(*turned, slopes, 0, None if right is None else right - 1, options)
    behind = torch.nn.functional.pad(behind.flip(1), (0, 0, 0, 0, 0, 1))
    behind_lse = torch.nn.functional.pad((behind_lse - slopes).flip(2), (0, 1), value=-torch.inf)
    # Every query sees the key on its diagonal, so lse is finite and this is exact for a part that is empty.
    difference = behind_lse - lse
    share = torch.sigmoid(difference).transpose(1, 2)[..., None]
    joined = (out.float() + share * (behind.float() - out.float())).to(out.dtype)
    return joined, lse + torch.nn.functional.softplus(difference)


def alibi_of_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, shift: int | torch.Tensor,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) under ``-slope * |i + shift - j|``; slopes are ``[1 or B, H]``, shift of all or of each sequence.

    A softcap is taken before, in the same function: the kernels' own would come after it.
    """
    options = dict(options)
    softcap = options.pop("softcap")
    own = slopes.shape[0] > 1

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        capped = softcap * torch.tanh(score / softcap) if softcap else score
        behind = i + (shift[b] if isinstance(shift, torch.Tensor) else shift) - j
        return capped - (slopes[b, h] if own else slopes[0, h]) * abs(behind)

    result: tuple[torch.Tensor, torch.Tensor] = attention(q, k, v, score_mod=score_mod, return_lse=True, **options)
    return result


def _causal_alibi(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, shift: int, left: int | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) of keys ``i + shift - left <= j <= i + shift`` under ``slope * (j - i - shift)``."""
    rows, step = q.shape[1], _ROWS.get(q.dtype, 128)
    outs, sums = [], []
    for start in range(0, max(rows, 1), step):
        end = min(start + step, rows)
        last = max(end + shift, 0)
        first = 0 if left is None else min(max(start + shift - left, 0), last)
        # The slice of keys ends at the diagonal of the last query: aligned to the bottom right.
        distance = torch.arange(first - last + 1, 1, device=q.device, dtype=torch.float32)
        out, lse = attention(
            q[:, start:end], k[:, first:last], v[:, first:last], bias=(slopes * distance)[:, :, None], causal=True,
            window_size=(left, None), return_lse=True, **options,
        )  # fmt: skip
        behind = torch.arange(end - start - 1, -1, -1, device=q.device, dtype=torch.float32)
        outs.append(out)
        sums.append(lse + slopes * behind)
    return (outs[0], sums[0]) if len(outs) == 1 else (torch.cat(outs, 1), torch.cat(sums, 2))
