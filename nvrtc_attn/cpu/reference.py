"""Attention in NumPy, forward and backward: the path of CPU arrays and the oracle of the tests.

Query rows and key columns are visited in blocks with an online softmax (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; Dao et al., "FlashAttention", 2022), so memory grows with Mq + Mk, never with Mq * Mk.
The backward pass recomputes the scores from ``lse`` (Dao, "FlashAttention-2", 2023). Semantics are those of PyTorch's
memory-efficient attention, with its known defects corrected.

Infinities and NaN of the inputs follow IEEE arithmetic without warnings, as they do on a GPU, with one addition: a
weight that is exactly zero contributes nothing, whatever it multiplies. So poison in a masked key, or in a query row
that sees no key, reaches no output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..front.part import Part
from ..front.philox import multiplier
from ..modifiers.evaluate import HostModifier
from .blocks import Array, Causal, Piece, Plan, Window, make_plan

# Scores in flight: 256 x 512 float32 are 512 KiB, a share of L2 between the two products. Forward at head dim 64 and
# 128, sequence 2048: 128 x 256 is 18 to 30 % slower, 512 x 1024 likewise (2-core AMD EPYC, OpenBLAS, 2026-11).
BLOCK_M: Final = 256
BLOCK_N: Final = 512


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    sink: Array | None = None,
    causal: Causal = False,
    window_size: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_k: npt.ArrayLike | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: npt.ArrayLike | None = None,
    part: Part | None = None,
    result_dtype: npt.DTypeLike | None = None,
    compute_dtype: npt.DTypeLike | None = None,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
    modifier: HostModifier | None = None,
    max_logit: Array | None = None,
) -> tuple[Array, Array]:
    """Scaled dot-product attention, ``O = dropout(softmax(S)) V``.

    ``S[i, j] = softcap(softmax_scale * q_i . k_j) + bias[i, j]``, and -inf where a mask drops the key.

    Parameters
    ----------
    q : ``[B, Mq, H, K]``
    k : ``[B, Mk, Hkv, K]``
    v : ``[B, Mk, Hkv, Kv]``
        Any strides. Hkv divides H; query head h reads key head ``h // (H / Hkv)``.
    bias : ``[1|B, 1|H, 1|Mq, 1|Mk]``, optional
        Added in the compute dtype after the softcap.
    mask : ``[1|B, 1|H, 1|Mq, 1|Mk]``, optional
        Non-zero or True keeps the key.
    sink : ``[H]``, optional
        One more logit in every row of a query head, which takes probability and has no value: added to the sum of
        ``exp(S)`` as it is, without scale, softcap, mask or dropout.
    causal
        ``True`` or ``"bottom_right"`` keeps ``j <= i + Mk - Mq``, ``"top_left"`` keeps ``j <= i``.
    window_size
        (left, right) keeps ``i + off - left <= j <= i + off + right``, with off = 0 for ``causal="top_left"`` and
        Mk - Mq otherwise; ``None`` is unbounded. With ``causal``, right is at most 0.
    softmax_scale
        ``None`` is ``1 / sqrt(K)``.
    softcap
        c > 0 maps s to ``c * tanh(s / c)`` before bias and masks.
    dropout_p, seed, offset
        Keep rule of `nvrtc_attn.front.philox.keep_mask`; kept weights are multiplied by ``1 / (1 - dropout_p)``.
    cu_seqlens_q, cu_seqlens_k : ``[nb + 1]``, optional
        Sequence b is ``q[0, cu_seqlens_q[b]:cu_seqlens_q[b + 1]]``, likewise for keys; B is 1. Tokens outside every
        sequence get zeros.
    max_seqlen_q, max_seqlen_k
        Pitches of the dropout index with ``cu_seqlens``; by default the longest lengths.
    seqused_k : ``[nb]`` or ``[B]``, optional
        Only the first ``seqused_k[b]`` keys of sequence b exist; the others are not read.
    part
        Where the call lies in a larger attention, whose causal alignment, windows and dropout it then has.
    result_dtype
        Of out, which is by default that of ``q``; lse has the compute dtype.
    compute_dtype
        float32 or float64; by default float64 for float64 inputs and float32 for all others.
    block_m, block_n
        Scores in flight; the result depends on them only by rounding.
    modifier
        Maps ``softmax_scale * q_i . k_j`` before the bias, and masks. Not together with ``softcap``.
    max_logit : ``[B, H]`` (with ``cu_seqlens`` ``[nb, H]``), optional
        Written: the largest ``S[i, j]`` of each head, -inf where nothing is kept, NaN where one that is kept is NaN.

    Returns
    -------
    out : ``[B, Mq, H, Kv]``
        Rows without any key are 0.
    lse : ``[B, H, Mq]``, compute dtype
        Natural log of the sum of ``exp(S)`` and, with one, ``exp(sink)``; dropout is not part of it. Rows without any
        key are -inf, or the sink. With ``cu_seqlens``, ``[1, H, total_q]``; tokens outside every sequence are -inf.
    """
    plan = make_plan(
        q, k, v, bias, mask, sink, causal, window_size, softmax_scale, softcap, dropout_p, seed, offset, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, part, compute_dtype, block_m, block_n, modifier,
    )  # fmt: skip
    out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype if result_dtype is None else result_dtype)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf, plan.dtype)
    if max_logit is not None:
        max_logit[...] = -np.inf
    with np.errstate(all="ignore"):
        for piece in plan.pieces:
            views = out[piece.batch, piece.q_tokens], lse[piece.batch, :, piece.q_tokens]
            _forward_piece(plan, piece, q, v, *views, max_logit)
    return out, lse


def _forward_piece(
    plan: Plan, piece: Piece, q: Array, v: Array, out: Array, lse: Array, max_logit: Array | None
) -> None:
    q_piece, k, v_piece = plan.load_rows(q, piece), plan.load_keys(plan.k, piece), plan.load_keys(v, piece)
    heads, sink = plan.heads(piece), plan.load_sink(piece)
    for i0, i1 in plan.row_blocks(piece):
        q_rows = _flatten(q_piece[..., i0:i1, :])
        statistic_shape = (*q_piece.shape[:3], i1 - i0, 1)
        top = np.full(statistic_shape, -np.inf, plan.dtype)
        total = np.zeros(statistic_shape, plan.dtype)
        acc = np.zeros((*q_piece.shape[:3], i1 - i0, v_piece.shape[-1]), plan.dtype)
        for j0, j1 in plan.key_blocks(piece, i0, i1):
            p, _, _ = plan.scores(piece, q_rows, k, i0, i1, j0, j1)
            new_top = np.maximum(top, p.max(-1, keepdims=True))
            if max_logit is not None:
                so_far = max_logit[piece.sequence : piece.sequence + p.shape[0], heads]
                np.maximum(so_far, new_top.max((3, 4)).reshape(so_far.shape), out=so_far)
            base = np.where(new_top == -np.inf, 0, new_top)  # -inf - -inf would be NaN.
            np.exp(np.subtract(p, base, out=p), out=p)
            rescale = np.exp(top - base)
            total = total * rescale + p.sum(-1, keepdims=True)
            if plan.dropout:
                np.copyto(p, 0, where=plan.dropped(piece, p.shape[0], i0, i1, j0, j1))
            acc *= rescale
            acc += _weighted_sum(_flatten(p), v_piece[..., j0:j1, :]).reshape(acc.shape)
            top = new_top
        if sink is not None:
            new_top = np.maximum(top, sink)
            base = np.where(new_top == -np.inf, 0, new_top)
            rescale = np.exp(top - base)
            total = total * rescale + np.where(sink == np.inf, 1, np.exp(sink - base))
            acc *= rescale
            top = new_top
        seen = total != 0
        acc *= plan.dtype.type(multiplier(plan.dropout_p))
        np.divide(acc, total, out=acc, where=seen)  # A row without any weight accumulated exact zeros.
        out[:, i0:i1, heads] = _as_tokens(acc)
        row_lse = np.where(seen, top + np.log(total), -np.inf)
        lse[:, heads, i0:i1] = row_lse.reshape(row_lse.shape[0], -1, i1 - i0)


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    bias_grad: bool = False,
    sink_grad: bool = False,
    bias: Array | None = None,
    mask: Array | None = None,
    sink: Array | None = None,
    causal: Causal = False,
    window_size: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_k: npt.ArrayLike | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: npt.ArrayLike | None = None,
    part: Part | None = None,
    result_dtype: npt.DTypeLike | None = None,
    compute_dtype: npt.DTypeLike | None = None,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
    modifier: HostModifier | None = None,
    capture_grads: Sequence[Array | None] = (),
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Gradients of `attention_forward`, whose options must be passed unchanged.

    With Z the keep mask times ``1 / (1 - dropout_p)``, ``P = exp(S - lse)`` and ``D = rowsum(dO * O)``:
    ``dV = (P * Z)^T dO``, ``dP = Z * (dO V^T)``, ``dS = P * (dP - D + dLSE)``, ``dBias = dS`` summed over the dims
    that the bias broadcasts, ``dT = dS * softcap'``, ``dQ = softmax_scale * dT K``, ``dK = softmax_scale * dT^T Q``.
    A sink has no value, so its dP is 0: ``dSink = sum over rows of exp(sink - lse) * (dLSE - D)``.

    Parameters
    ----------
    dout, out : ``[B, Mq, H, Kv]``
    lse, dlse : ``[B, H, Mq]``
        ``dlse=None`` is zero. Rows of ``lse`` that are -inf have no key. Those that reach `largest_lse` take no part
        either: rounding ``lse`` changes their P by up to a factor of two.
    bias_grad
        Whether to return dbias.
    sink_grad
        Whether to return dsink.
    result_dtype
        Of dq, dk, dv, which are by default those of q, k, v.
    capture_grads
        For each array that the modifier captured, an array of its shape in the compute dtype to which its gradient is
        added, or None.

    Returns
    -------
    dq, dk, dv
        Shapes of q, k, v; every element is written, zeros where nothing attends.
    dbias
        Shape and dtype of ``bias``, or ``None`` without ``bias_grad``.
    dsink
        Shape and dtype of ``sink``, or ``None`` without ``sink_grad``.
    """
    plan = make_plan(
        q, k, v, bias, mask, sink, causal, window_size, softmax_scale, softcap, dropout_p, seed, offset, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, part, compute_dtype, block_m, block_n, modifier,
    )  # fmt: skip
    for name, given, shape in (
        ("dout", dout, (*q.shape[:3], v.shape[3])),
        ("out", out, (*q.shape[:3], v.shape[3])),
        ("lse", lse, (q.shape[0], q.shape[2], q.shape[1])),
        ("dlse", dlse, (q.shape[0], q.shape[2], q.shape[1])),
    ):
        if given is not None and given.shape != shape:
            raise ValueError(f"{name}: got shape {given.shape}; accepted is {shape}")
    if bias_grad and bias is None:
        raise ValueError("bias_grad: got True without a bias; pass the bias whose gradient is wanted")
    if sink_grad and sink is None:
        raise ValueError("sink_grad: got True without a sink; pass the sink whose gradient is wanted")
    dsink = np.zeros(sink.shape, np.float64) if sink_grad and sink is not None else None
    dq, dk, dv = (np.zeros(x.shape, x.dtype if result_dtype is None else result_dtype) for x in (q, k, v))
    dbias = np.zeros(bias.shape, plan.dtype) if bias_grad and bias is not None else None
    with np.errstate(all="ignore"):
        for piece in plan.pieces:
            shift = -np.sum(plan.load_rows(dout, piece) * plan.load_rows(out, piece), -1, keepdims=True)
            if dlse is not None:
                shift += plan.load_statistic(dlse, piece)
            row_lse = plan.load_statistic(lse, piece)
            # exp(S - inf) = 0: no weight in an empty row, nor in one whose weights `lse` cannot tell.
            np.copyto(row_lse, np.inf, where=np.abs(row_lse) >= largest_lse(lse.dtype))
            logit = plan.load_sink(piece)
            if dsink is not None and logit is not None:
                share = np.where(row_lse == np.inf, 0, np.exp(logit - row_lse))
                by_head = np.where(share == 0, 0, share * shift).sum((0, 3, 4), dtype=np.float64)
                dsink[plan.heads(piece)] += by_head.reshape(-1)
            rows, keys = (piece.batch, piece.q_tokens), (piece.batch, piece.k_tokens, piece.kv_heads)
            _backward_piece(plan, piece, dout, q, v, row_lse, shift, dq[rows], dk[keys], dv[keys], dbias, capture_grads)
        return (
            dq, dk, dv, None if dbias is None or bias is None else dbias.astype(bias.dtype),
            None if dsink is None or sink is None else dsink.astype(sink.dtype),
        )  # fmt: skip


def largest_lse(dtype: npt.DTypeLike) -> float:
    """Absolute value of an LSE of ``dtype`` from which on its rounding error is a factor of P that is no longer small.

    2^22 for float32 (kLargestLse in ``common/numbers.cuh``), 2^51 for float64.
    """
    return float(2 ** (np.finfo(dtype).nmant - 1))


def _backward_piece(
    plan: Plan,
    piece: Piece,
    dout: Array,
    q: Array,
    v: Array,
    lse: Array,
    shift: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    dbias: Array | None,
    capture_grads: Sequence[Array | None],
) -> None:
    """``shift`` is dLSE - D. ``dq``, ``dk``, ``dv`` are the piece's parts of the outputs; ``dbias`` is whole."""
    q_piece, dout_piece = plan.load_rows(q, piece), plan.load_rows(dout, piece)
    k_piece, v_piece = plan.load_keys(plan.k, piece), plan.load_keys(v, piece)
    dk_acc, dv_acc = np.zeros_like(k_piece), np.zeros_like(v_piece)
    scale, keep_scale = plan.dtype.type(plan.scale), plan.dtype.type(multiplier(plan.dropout_p))
    for i0, i1 in plan.row_blocks(piece):
        q_rows, dout_rows = _flatten(q_piece[..., i0:i1, :]), _flatten(dout_piece[..., i0:i1, :])
        dq_acc = np.zeros((*q_piece.shape[:3], i1 - i0, q_piece.shape[-1]), plan.dtype)
        for j0, j1 in plan.key_blocks(piece, i0, i1):
            k, v_block = k_piece[..., j0:j1, :], v_piece[..., j0:j1, :]
            p, slope, values = plan.scores(piece, q_rows, k_piece, i0, i1, j0, j1)
            np.exp(np.subtract(p, lse[..., i0:i1, :], out=p), out=p)
            ds = _matmul(dout_rows, v_block.swapaxes(-1, -2)).reshape(p.shape)
            p_dropped = p
            if plan.dropout:
                dropped = plan.dropped(piece, p.shape[0], i0, i1, j0, j1)
                p_dropped = p * keep_scale
                ds *= keep_scale
                np.copyto(p_dropped, 0, where=dropped)
                np.copyto(ds, 0, where=dropped)
            dv_acc[..., j0:j1, :] += _weighted_sum(_flatten(p_dropped).swapaxes(-1, -2), dout_rows)
            ds += shift[..., i0:i1, :]
            ds *= p
            np.copyto(ds, 0, where=p == 0)
            if dbias is not None:
                per_head: Array = ds.reshape(len(ds), -1, i1 - i0, j1 - j0)
                reduced = tuple(axis for axis, size in enumerate(dbias.shape) if size == 1)
                dbias[plan.operand_index(dbias, piece, i0, i1, j0, j1)] += per_head.sum(reduced, keepdims=True)
            if plan.modifier is not None and values is not None and capture_grads:
                plan.modifier.add_gradients(values, ds, capture_grads)
            if plan.modifier is not None and values is not None and plan.modifier.score is not None:
                slope = values(plan.modifier.slope)
            if slope is not None:
                ds *= slope
                np.copyto(ds, 0, where=p == 0)
            dq_acc += _weighted_sum(_flatten(ds), k).reshape(dq_acc.shape)
            dk_acc[..., j0:j1, :] += _weighted_sum(_flatten(ds).swapaxes(-1, -2), q_rows)
        dq[:, i0:i1, plan.heads(piece)] = _as_tokens(dq_acc * scale)
    dk[...] = (dk_acc * scale).transpose(0, 2, 1, 3)
    dv[...] = dv_acc.transpose(0, 2, 1, 3)


def _flatten(x: Array) -> Array:
    """``[b, h, group, m, d]`` -> ``[b, h, group * m, d]``: the query heads of one key head share a product."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def _as_tokens(x: Array) -> Array:
    """``[b, h, group, m, d]`` -> ``[b, m, h * group, d]``."""
    b, h, group, m, d = x.shape
    tokens: Array = x.transpose(0, 3, 1, 2, 4).reshape(b, m, h * group, d)
    return tokens


def _matmul(a: Array, b: Array) -> Array:
    product: Array = np.matmul(a, b)
    return product


def _weighted_sum(weights: Array, x: Array) -> Array:
    """``weights @ x``, where a zero weight contributes nothing even if it meets an infinity or a NaN."""
    finite = np.isfinite(x)
    if finite.all():
        return _matmul(weights, x)
    total = _matmul(weights, np.where(finite, x, 0))
    poison = np.where(finite, 0, x)
    rows = np.flatnonzero(~finite.all(-1).reshape(-1, x.shape[-2]).all(0))
    for row in rows:
        weight = weights[..., row, None]
        total += np.where(weight != 0, weight * poison[..., row : row + 1, :], 0)
    return total
