"""``jax.nn.dot_product_attention``'s signature over `nvrtc_attn.jax.attention`."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base.errors import UnsupportedError, shown
from ..front.problem import Causal
from ..front.validation import refuse_scale
from .custom_call import attention


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """``jax.nn.dot_product_attention`` on this library's kernels, differentiable in query, key, value and bias.

    Parameters
    ----------
    query, key, value : ``[B, T, N, H]``, ``[B, S, K, H]``, ``[B, S, K, Hv]``, or all without B
        K divides N.
    bias, mask
        Broadcast to ``[B, N, T, S]``, leading dims may be missing. ``mask`` is boolean, True keeps the key. Neither is
        expanded, and the gradient of a bias is summed in the kernel.
    is_causal, local_window_size
        Aligned to the first query and key: ``j <= i``, and ``i - left <= j <= i + right``; one number is both bounds.
    query_seq_lengths, key_value_seq_lengths : int32 ``[B]``
        Queries beyond are 0, keys beyond take no part.
    scale
        A number. Default ``1 / sqrt(H)``. One that JAX traces, learned perhaps, is multiplied into query, in its type.
    return_residual
        Return (out, lse ``[B, T, N]`` in the dtype of key).

    Raises
    ------
    UnsupportedError
        ``implementation`` is given: there is one here.

    Notes
    -----
    A row that sees no key is 0 (its lse -inf); jax.nn gives the mean of all values.
    """
    if implementation is not None:
        raise UnsupportedError(
            "nvrtc_attn does not compute this call of jax.nn.",
            [f"implementation: got {implementation!r}. Leave it out, or call jax.nn.dot_product_attention."],
        )
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    if query.ndim not in (3, 4) or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"query, key, value: ranks {query.ndim}, {key.ndim}, {value.ndim}. All are [batch, length, heads, "
            f"head_dim], or all without the batch."
        )
    if isinstance(scale, jax.Array | np.ndarray) and scale.size == 1:
        if isinstance(scale, jax.core.Tracer):
            factor = scale.reshape(()).astype(np.float32)
            query, scale = (query.astype(np.float32) * factor).astype(query.dtype), 1.0
        else:
            scale = float(scale.reshape(()))
    refuse_scale(scale)
    lead = query.ndim == 3
    q, k, v = (x[None] if lead else x for x in (query, key, value))
    batch, rows, columns = q.shape[0], q.shape[1], k.shape[1]
    if bias is not None:
        bias = _rank_4("bias", bias)
        bias = bias if bias.dtype in (q.dtype, np.float32) else bias.astype(np.float32)
    if mask is not None:
        mask = _rank_4("mask", mask)
        if mask.dtype != np.bool_:
            raise ValueError(f"mask: dtype {mask.dtype}. It is bool, True keeps the key; what is added goes to bias.")
    causal: Causal = "top_left" if is_causal else False
    window: tuple[int | None, int | None] = (None, None)
    if local_window_size is not None:
        left, right = _window(local_window_size)
        shift = 0 if is_causal else columns - rows  # without causal, windows are aligned to the last query and key
        if left + shift >= 0 and right - shift >= 0:
            window = (left + shift, right - shift)
        else:
            distance = np.arange(rows)[:, None] - np.arange(columns)
            mask = _both(mask, jnp.asarray((distance <= left) & (distance >= -right))[None, None])
    used = None
    if key_value_seq_lengths is not None:
        lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
        if causal or window == (None, None):
            used = jnp.clip(lengths, 0, columns)
        else:  # seqused_k would align the window to the last key in use
            mask = _both(mask, (jnp.arange(columns)[None] < lengths[:, None])[:, None, None])
    result = attention(
        q, k, v, bias=bias, mask=mask, causal=causal, window_size=window, softmax_scale=scale,
        seqused_k=used, return_lse=bool(return_residual),
    )  # fmt: skip
    out, lse = result if return_residual else (result, None)
    if query_seq_lengths is not None:
        lengths = _lengths("query_seq_lengths", query_seq_lengths, batch)
        seen = jnp.arange(rows)[None] < lengths[:, None]
        out = jnp.where(seen[:, :, None, None], out, 0)
        lse = lse if lse is None else jnp.where(seen[:, None], lse, -jnp.inf)
    out = out[0] if lead else out
    if lse is None:
        return out
    residual = jax.lax.stop_gradient(lse.swapaxes(1, 2).astype(k.dtype))  # as in jax.nn
    return out, residual[0] if lead else residual


def _window(x: Any) -> tuple[int, int]:
    try:
        left, right = (operator.index(n) for n in (x if isinstance(x, (tuple, list)) else (x, x)))
    except (TypeError, ValueError):  # no integer, not two, a tracer
        raise TypeError(f"local_window_size: got {shown(x)}. It is an integer or two, left and right.") from None
    return left, right


def _rank_4(name: str, x: Any) -> Any:
    x = jnp.asarray(x)
    if x.ndim > 4:
        raise ValueError(f"{name}: shape {x.shape}. It broadcasts to [batch, heads, queries, keys].")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _lengths(name: str, x: Any, batch: int) -> jax.Array:
    x = jnp.asarray(x)
    if x.shape != (batch,) or x.dtype != np.int32:
        raise ValueError(f"{name}: {x.dtype} of shape {x.shape}. It is int32 [{batch}].")
    return x


def _both(mask: Any, other: jax.Array) -> jax.Array:
    return other if mask is None else jnp.logical_and(mask, other)
