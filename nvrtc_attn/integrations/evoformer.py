"""Triangle attention and Evoformer attention, with the signatures of cuEquivariance and DeepSpeed4Science.

Both add a pair bias that all rows of the alignment (or of the pair matrix) share. The kernels read it in that shape and
sum its gradient over the rows while they compute, so nothing has the size of all rows' scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ..base.errors import UnsupportedError
from ..base.log import log_once
from ..torch import attention

__all__ = ["DS4Sci_EvoformerAttention", "triangle_attention"]

HIDDEN: Final = -1e4
"""A bias of at most this hides a key: ``exp`` of it is 0 beside any key that scores within 9,900 of it."""


def triangle_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """``cuequivariance_torch.triangle_attention``.

    Parameters
    ----------
    q, k, v : ``[B, N, H, Q, D]``, ``[B, N, H, K, D]``, ``[B, N, H, K, D]``, or without B
    bias : ``[B, 1, H, Q, K]``, or without B
        Added to the scores of all N rows, gets its gradient. dtype of q or float32; another becomes float32.
    mask : ``[B, N, 1, 1, K]``, or without B
        Non-zero keeps the key. A row without keys is 0 and gives no gradient (cuEquivariance: the mean of v).
    scale
        Default ``1 / sqrt(D)``.

    Returns
    -------
    Shape of q, dtype of q.

    Raises
    ------
    UnsupportedError
        ``return_aux``, whose row maxima no kernel writes; ``kv_lengths``.
    """
    reasons = []
    if return_aux:
        reasons.append("return_aux: the maximum of each row is not written.")
    if kv_lengths is not None:
        reasons.append("kv_lengths: not read. Pass the mask.")
    _refuse(reasons, "triangle_attention of cuequivariance_torch")
    ranks = [x.dim() for x in (q, k, v, bias) if x is not None]
    if len(set(ranks)) > 1 or ranks[0] not in (4, 5) or (mask is not None and mask.dim() != ranks[0]):
        raise ValueError(
            f"q, k, v, bias, mask: ranks {ranks}{'' if mask is None else f' and {mask.dim()}'}. All are 5, or all 4 "
            f"without the batch."
        )
    if q.dim() == 4:
        return _triangle(q, k, v, bias, mask, scale)
    rows = [
        _triangle(q[b], k[b], v[b], bias[b], None if mask is None else mask[b], scale) for b in range(q.shape[0])
    ]  # fmt: skip
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows) if rows else torch.empty_like(q)


def _triangle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """One batch element: N is the batch of the kernels, and the bias broadcasts over it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = bias if bias.dtype in (q.dtype, torch.float32) else bias.float()
    keep = None if mask is None else mask.bool()
    out: torch.Tensor = attention(q, k, v, bias=bias, mask=keep, softmax_scale=scale)
    return out.transpose(1, 2)


def DS4Sci_EvoformerAttention(  # noqa: N802  DeepSpeed's name
    Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, biases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """``deepspeed.ops.deepspeed4science.DS4Sci_EvoformerAttention``.

    Parameters
    ----------
    Q, K, V : ``[B, N, L, H, D]``
    biases : up to two
        ``[B, N, 1, 1, L]``, by which the mask is given, and ``[B, 1, H, L, L]``, the pair bias. Both are added to the
        scores and get gradients. None stands for no bias.

    Returns
    -------
    ``[B, N, L, H, D]``

    Notes
    -----
    Where both are given, the first is read as a mask if it needs no gradient and holds nothing but 0 and values of at
    most -10,000; finding out waits for the GPU once. A row of it without keys is 0 and gives no gradient (DeepSpeed:
    the mean of V, as all keys are hidden alike). Otherwise, and while a CUDA graph is captured, the two are added up,
    in ``[N, H, L, L]`` memory, with one line logged.
    """
    if Q.dim() != 5:
        raise ValueError(f"Q: shape {tuple(Q.shape)}. It is [batch, rows, length, heads, head_dim].")
    batch, rows, length, heads, _ = Q.shape
    shapes = ((batch, rows, 1, 1, length), (batch, 1, heads, length, length))
    given: list[torch.Tensor | None] = [*biases, None, None][:2]
    if len(biases) > 2 or any(x is not None and x.shape != shape for x, shape in zip(given, shapes, strict=True)):
        raise ValueError(
            f"biases: shapes {[None if x is None else tuple(x.shape) for x in biases]}. They are {list(shapes)}, in "
            f"this order; None stands for one that is missing."
        )
    outs = [
        _evoformer(Q[b], K[b], V[b], *(None if x is None else x[b] for x in given))
        for b in range(batch)
    ]  # fmt: skip
    return outs[0].unsqueeze(0) if batch == 1 else torch.stack(outs) if outs else torch.empty_like(Q)


def _evoformer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_bias: torch.Tensor | None, pair_bias: torch.Tensor | None
) -> torch.Tensor:
    keep: torch.Tensor | None = None
    bias = row_bias if pair_bias is None else pair_bias
    if row_bias is not None and pair_bias is not None:
        keep = _as_mask(row_bias)
        if keep is None:
            log_once(
                "DS4Sci_EvoformerAttention: the first bias is no mask (0, or at most -10,000, without a gradient), so "
                "the two biases are added up, which takes memory for the scores of every row."
            )
            bias = row_bias + pair_bias
    if bias is not None and bias.dtype not in (q.dtype, torch.float32):
        bias = bias.float()
    out: torch.Tensor = attention(q, k, v, bias=bias, mask=keep)
    return out


def _as_mask(bias: torch.Tensor) -> torch.Tensor | None:
    """True where the bias is 0, if it is at most `HIDDEN` everywhere else and no gradient of it is wanted."""
    if (
        bias.requires_grad
        or torch.compiler.is_compiling()
        or (bias.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return None
    keep = bias == 0
    return keep if bool((keep | (bias <= HIDDEN)).all()) else None


def _refuse(reasons: list[str], function: Any) -> None:
    if reasons:
        raise UnsupportedError(f"nvrtc_attn does not compute this call of {function}.", reasons)
