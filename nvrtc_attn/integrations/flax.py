"""Flax: an ``attention_fn`` for the attention layers of linen and nnx."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from ..base.hosts import check_version
from ..jax import attention
from . import refuse

__all__ = ["attention_fn"]
check_version("flax", "0.12.8", "0.12.12")


def attention_fn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
) -> Any:
    """``MultiHeadDotProductAttention(..., attention_fn=attention_fn)`` of linen, ``MultiHeadAttention`` of nnx.

    Parameters
    ----------
    query, key, value : ``[batch..., M, H, D]``, ``[batch..., N, Hkv, D]``, ``[batch..., N, Hkv, Dv]``
    bias, mask
        Broadcast to ``[batch..., H, M, N]``. A mask of numbers keeps what is not zero.
    dropout_rng, dropout_rate, deterministic
        Flax's: nothing is dropped if ``deterministic`` or at rate 0.
    dtype
        query, key and value are cast to it; default: to what they promote to.
    precision, force_fp32_for_softmax
        Scores and softmax are float32 whatever they are, and float32 products have float32's accuracy.
    is_causal
        Aligned to the first query and key.

    Raises
    ------
    UnsupportedError
        With every reason: one dropout mask for the whole batch (set ``broadcast_dropout=False``), sown weights
        (``module``), einsum functions of your own.
    """
    del precision, force_fp32_for_softmax
    dropout_p = 0.0 if deterministic else float(dropout_rate)
    reasons = []
    if dropout_p and broadcast_dropout:
        reasons.append(
            "broadcast_dropout: each element is dropped on its own. Make the layer with broadcast_dropout=False."
        )
    if module is not None:
        reasons.append("module: the attention weights that it should sow are never in memory.")
    if any(x is not None for x in (einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)):
        reasons.append(
            "einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: the products are the kernel's own."
        )
    refuse("call of flax", reasons)
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    lead = query.shape[:-3]
    q, k, v = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
    bias = None if bias is None else _folded(jnp.asarray(bias), lead)
    if bias is not None and bias.dtype not in (q.dtype, jnp.float32):
        bias = bias.astype(jnp.float32)
    keep = None if mask is None else _folded(jnp.asarray(mask), lead).astype(bool)
    out = attention(
        q, k, v, bias=bias, mask=keep, causal="top_left" if is_causal else False, dropout_p=dropout_p,
        rng=dropout_rng if dropout_p else None,
    )  # fmt: skip
    return out.reshape(*lead, *out.shape[1:])


def _folded(x: Any, lead: tuple[int, ...]) -> Any:
    """``[batch..., H, M, N]`` with the batch dims as one: 1 where all are 1, else expanded."""
    x = x.reshape((1,) * (len(lead) + 3 - x.ndim) + x.shape)
    dims = x.shape[:-3]
    if all(n == 1 for n in dims):
        return x.reshape(1, *x.shape[-3:])
    return jnp.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(math.prod(lead), *x.shape[-3:])
