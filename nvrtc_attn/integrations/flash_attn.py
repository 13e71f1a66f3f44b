"""flash_attn: its functions, under its signatures, on this library's kernels.

Only the module is offered: ``from nvrtc_attn.integrations.flash_attn import flash_attn_func``. It does not pretend to
be the distribution ``flash-attn``, and does not need it.

All functions take float16, bfloat16 and float32, head dims up to 512, keys and values with fewer heads, and are
differentiable in every floating-point input, in ``alibi_slopes`` and through the returned lse too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.errors import shown
from ..front.call import CallOptions
from ..front.operands import INPUTS
from ..torch import attention, attention_kvpacked, attention_qkvpacked
from ..torch.autocast import is_autocast
from ..torch.modified import needs_operator
from ..torch.passes import check_call
from ..torch.tensors import is_transformed
from . import refuse
from .alibi import alibi_of_scores, check_slopes, dense_alibi, packed_alibi, without_autocast

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn's function of the same name.

    Parameters
    ----------
    q, k, v : ``[B, M, H, D]``, ``[B, N, Hkv, D]``, ``[B, N, Hkv, Dv]``
    causal, window_size
        Aligned to the bottom right: query i sees keys from ``i + N - M - left`` to ``i + N - M + right``; -1 is no
        bound, and causal is right = 0.
    softcap
        0 is none, c is ``c * tanh(score / c)``.
    alibi_slopes : float32 ``[H]`` or ``[B, H]``
        ``-slope * |i + N - M - j|`` is added to the scores. Slopes up to 1, as ALiBi's are.
    deterministic
        A backward pass that is bitwise reproducible. Also if ``torch.are_deterministic_algorithms_enabled()``.
    return_attn_probs
        Return (out, lse, empty tensor), lse float32 ``[B, H, M]``, -inf for a row that sees no key (flash_attn: +inf).

    Raises
    ------
    UnsupportedError
        Probabilities under dropout.
    """
    if alibi_slopes is None:
        return _without_slopes(
            functools.partial(attention, q, k, v), dropout_p, softmax_scale, causal, window_size, softcap,
            deterministic, return_attn_probs,
        )  # fmt: skip
    reasons = _dropped_probabilities(return_attn_probs, dropout_p)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "softcap": softcap, "dropout_p": dropout_p,
        "deterministic": deterministic or None,
    }  # fmt: skip
    left, right = (None if bound is None or bound < 0 else bound for bound in window_size)
    check_slopes(alibi_slopes, q.shape[0], q.shape[2])
    refuse("call of flash_attn", reasons)
    slopes = alibi_slopes.float().reshape(-1, q.shape[2], 1)
    (q, k, v), outside = without_autocast(q, k, v)
    with outside:
        # A query may be before every key: no diagonal to turn at.
        if not causal and right != 0 and q.shape[1] > k.shape[1]:
            options.update(window_size=(left, right))
            out, lse = alibi_of_scores(q, k, v, slopes[..., 0], k.shape[1] - q.shape[1], options)
        else:
            out, lse = dense_alibi(q, k, v, slopes, left, 0 if causal else right, options)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def _without_slopes(
    attend: Callable[..., Any], dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Sequence[int],
    softcap: float, deterministic: bool, return_attn_probs: bool, **more: Any,
) -> Any:  # fmt: skip
    """``attend`` with the arguments under our names, and its results as flash_attn returns them."""
    refuse("call of flash_attn", _dropped_probabilities(return_attn_probs, dropout_p))
    result = attend(
        causal=causal, window_size=window_size, return_lse=bool(return_attn_probs), softmax_scale=softmax_scale,
        softcap=softcap, dropout_p=dropout_p, deterministic=deterministic or None, **more,
    )  # fmt: skip
    return (*result, result[0].new_empty(0)) if return_attn_probs else result


def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` with keys and values in one tensor ``[B, N, 2, Hkv, D]``, and so their gradient."""
    _check_packed(kv, "kv", 5)
    if alibi_slopes is None:
        return _without_slopes(
            functools.partial(attention_kvpacked, q, kv), dropout_p, softmax_scale, causal, window_size, softcap,
            deterministic, return_attn_probs,
        )  # fmt: skip
    k, v = kv.unbind(-3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` with all in one tensor ``[B, M, 3, H, D]``, and so its gradient."""
    _check_packed(qkv, "qkv", 5)
    if alibi_slopes is None:
        return _without_slopes(
            functools.partial(attention_qkvpacked, qkv), dropout_p, softmax_scale, causal, window_size, softcap,
            deterministic, return_attn_probs,
        )  # fmt: skip
    q, k, v = qkv.unbind(-3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """flash_attn's function of the same name: packed sequences.

    Parameters
    ----------
    q, k, v : ``[total_q, H, D]``, ``[total_k, Hkv, D]``, ``[total_k, Hkv, Dv]``
    cu_seqlens_q, cu_seqlens_k : int32 ``[number of sequences + 1]``
        Sequence b is rows ``cu[b]`` to ``cu[b + 1]``.
    alibi_slopes : float32 ``[H]`` or ``[number of sequences, H]``
        No kernel adds a bias to packed sequences. With ``causal`` and no dropout tokens are copied into a batch of the
        longest ones, otherwise a ``score_mod`` computes the bias.
    return_attn_probs
        Return (out, lse, empty tensor), lse float32 ``[H, total_q]``.

    The others are those of `flash_attn_func`.

    Raises
    ------
    UnsupportedError
        With every reason: ``block_table``, probabilities of dropout.
    """
    reasons = _dropped_probabilities(return_attn_probs, dropout_p)
    if block_table is not None:
        reasons.append("block_table: keys in pages are not gathered. Copy them into one tensor.")
    refuse("call of flash_attn", reasons)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name}: shape {tuple(x.shape)}. Packed sequences are [total tokens, heads, head_dim].")
    if alibi_slopes is not None:
        found = _sequences_with_slopes(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, deterministic,
        )  # fmt: skip
        return (*found, q.new_empty(0)) if return_attn_probs else found[0]
    return _sequences_without_slopes(
        functools.partial(attention, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)), cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, deterministic,
        return_attn_probs,
    )  # fmt: skip


def _sequences_with_slopes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: Sequence[int], softcap: float, alibi_slopes: torch.Tensor, deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) of packed sequences under ALiBi."""
    (q, k, v), outside = without_autocast(q, k, v)
    _check_ahead(
        CallOptions(causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k),
        q=q[None], k=k[None], v=v[None], cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    check_slopes(alibi_slopes, cu_seqlens_q.shape[0] - 1, q.shape[1])
    given: dict[str, Any] = {
        "softmax_scale": softmax_scale, "softcap": softcap, "deterministic": deterministic or None,
    }  # fmt: skip
    with outside:
        nothing = max_seqlen_q == 0 or cu_seqlens_q.shape[0] < 2  # no sequence, or none with queries
        if (causal and not dropout_p) or nothing:
            return packed_alibi(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, alibi_slopes.float(), window_size,
                given,
            )  # fmt: skip
        given.update(
            causal=causal, window_size=window_size, dropout_p=dropout_p, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        )  # fmt: skip
        shift = cu_seqlens_k.diff() - cu_seqlens_q.diff()
        slopes = alibi_slopes.float().reshape(-1, q.shape[1])
        out, lse = alibi_of_scores(q[None], k[None], v[None], slopes, shift, given)
        return out[0], lse[0]


def _is_eager(*tensors: Any) -> bool:
    """Whether a call can be checked before it is made: outside of programs, dispatch modes and transformations."""
    return not (torch.compiler.is_dynamo_compiling() or needs_operator(tensors) or is_transformed())


def _check_ahead(options: CallOptions, **tensors: Any) -> None:
    """Refuse what `attention` of these would refuse, before anything else is computed or written."""
    if _is_eager(*tensors.values()):
        check_call(tuple(map(tensors.get, INPUTS)), options)


def _sequences_without_slopes(
    attend: Callable[..., Any], cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *options: Any,
) -> Any:  # fmt: skip
    """`_without_slopes` of packed sequences, whose results have no batch."""
    result = _without_slopes(
        attend, *options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    return (result[0][0], result[1][0], result[2]) if isinstance(result, tuple) else result[0]


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` with keys and values in one tensor ``[total_k, 2, Hkv, D]``, and so their gradient."""
    _check_packed(kv, "kv", 4)
    if alibi_slopes is None and q.dim() == 3:
        return _sequences_without_slopes(
            functools.partial(attention_kvpacked, q.unsqueeze(0), kv.unsqueeze(0)), cu_seqlens_q, cu_seqlens_k,
            max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, deterministic,
            return_attn_probs,
        )  # fmt: skip
    k, v = kv.unbind(-3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` with all in one tensor ``[total, 3, H, D]``, and so its gradient."""
    _check_packed(qkv, "qkv", 4)
    if alibi_slopes is None:
        return _sequences_without_slopes(
            functools.partial(attention_qkvpacked, qkv.unsqueeze(0)), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
            dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs,
        )  # fmt: skip
    q, k, v = qkv.unbind(-3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
    v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """flash_attn's function of the same name, for a cache that is one tensor; without gradients.

    Parameters
    ----------
    q : ``[B, M, H, D]``
    k_cache, v_cache : ``[B, longest, Hkv, D]``, ``[B, longest, Hkv, Dv]``
        Written to where ``k`` and ``v`` are given.
    k, v : ``[B, new, Hkv, D]``, ``[B, new, Hkv, Dv]``
        Put into the cache behind what is there, and attended to. They must fit: the lengths are not read.
    cache_seqlens : int, or int32 ``[B]``
        How many keys each batch entry has before ``k``; default: the whole cache, where ``k`` is not given.
    causal, window_size
        Aligned to the last key of each batch entry, the new ones included.
    num_splits
        Not looked at: how keys are split follows from the problem.
    return_softmax_lse
        Return (out, lse), lse float32 ``[B, H, M]``.

    Raises
    ------
    UnsupportedError
        With every reason: rotary embeddings, ``cache_batch_idx``, ``cache_leftpad``, ``block_table``, ``alibi_slopes``.
    """
    del rotary_interleaved, num_splits
    given = {
        "rotary_cos": (rotary_cos, "rotate q and k before the call."),
        "rotary_sin": (rotary_sin, "rotate q and k before the call."),
        "cache_batch_idx": (cache_batch_idx, "index the cache before the call."),
        "cache_leftpad": (cache_leftpad, "keys begin at 0. Mask them with nvrtc_attn.torch.attention instead."),
        "block_table": (block_table, "keys in pages are not gathered. Copy them into one tensor."),
        "alibi_slopes": (alibi_slopes, "positions end where the cache does. Use flash_attn_func."),
    }
    refuse("call of flash_attn", [f"{name}: {why}" for name, (x, why) in given.items() if x is not None])
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise ValueError("k, v: both are given or none, and cache_seqlens with them.")
    used = _lengths_of_cache(cache_seqlens, q, k_cache.shape[1] - (0 if k is None else k.shape[1]))
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x is not None and (x.shape[:1], x.shape[2:]) != (cache.shape[:1], cache.shape[2:]):
            raise ValueError(
                f"{name}: shape {tuple(x.shape)}, {name}_cache has {tuple(cache.shape)}. All but the lengths are equal."
            )
    if k is not None and not is_autocast(q):  # which would need the cache in another type for a check
        options = CallOptions(causal, window_size, softmax_scale, softcap)
        _check_ahead(options, q=q, k=k_cache, v=v_cache, seqused_k=used)
    with torch.no_grad():
        if k is not None and v is not None and used is not None:
            places = used[:, None] + torch.arange(k.shape[1], device=q.device)
            entries = torch.arange(q.shape[0], device=q.device)[:, None]
            k_cache[entries, places] = k
            v_cache[entries, places] = v
            used = used + k.shape[1]
        return attention(
            q, k_cache, v_cache, causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
            seqused_k=used, return_lse=bool(return_softmax_lse),
        )  # fmt: skip


def _lengths_of_cache(lengths: Any, q: torch.Tensor, most: int) -> torch.Tensor | None:
    """int32 ``[B]`` of the argument ``cache_seqlens``: checked to be in [0, most] where the host has the values."""
    if lengths is None:
        return None
    batch, room = q.shape[0], f"The cache has room for 0 to {most} keys before k."
    if not isinstance(lengths, torch.Tensor):
        try:
            length = operator.index(lengths)
        except TypeError:
            raise TypeError(
                f"cache_seqlens: got {shown(lengths)} of type {type(lengths).__name__}. It is an integer, or an int32 "
                f"tensor of shape [{batch}]."
            ) from None
        if not 0 <= length <= most:
            raise ValueError(f"cache_seqlens: got {length}. {room}")
        return torch.full((batch,), length, dtype=torch.int32, device=q.device)
    if lengths.dtype != torch.int32 or tuple(lengths.shape) != (batch,):
        raise ValueError(
            f"cache_seqlens: {lengths.dtype} of shape {tuple(lengths.shape)}. It is an integer, or an int32 tensor of "
            f"shape [{batch}]."
        )
    if lengths.device.type == "cpu" and batch and _is_eager(lengths):
        low, high = (int(x) for x in lengths.aminmax())
        if low < 0 or high > most:
            raise ValueError(f"cache_seqlens: from {low} to {high}. {room}")
    return lengths


def _check_packed(packed: torch.Tensor, name: str, rank: int) -> None:
    if packed.dim() != rank or packed.shape[-3] != len(name):
        batch = "batch, seqlen" if rank == 5 else "total tokens"
        raise ValueError(f"{name}: shape {tuple(packed.shape)}. It is [{batch}, {len(name)}, heads, head_dim].")


def _dropped_probabilities(wanted: bool, dropout_p: float) -> list[str]:
    if not wanted or not dropout_p:
        return []
    reason = "return_attn_probs: with dropout_p > 0 it asks for the M x N probabilities, which are never in memory."
    return [f"{reason} nvrtc_attn.dropout_keep_mask gives the mask of a seed."]
