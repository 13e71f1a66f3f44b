"""``aten::_scaled_dot_product_efficient_attention`` and its backward pass: ``[batch, heads, seqlen, head_dim]``.

Shapes, strides, padding and Philox states are those of torch's own kernels, so that a backward pass of one may follow a
forward pass of the other.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import api
from ..base import env
from ..base.tables import remember
from ..front.call import Call, CallOptions
from ..front.operands import addresses
from ..front.philox import NO_RNG
from ..front.problem import Causal, dense_layout, layout
from ..front.tensors import view
from ..plans.plan import backward_plan, forward_plan
from ..runtime import driver
from .efficient import LSE_ALIGNMENT, with_padded_lse
from .random import as_tensor, checked_rng, draw_rng, no_state, rng_values
from .tensors import detached, raw_stream, refuses_nondeterminism, resolved, signature

_forward_plans: dict[Any, Any] = {}
_backward_plans: dict[Any, Any] = {}


def _collapsed(bias: torch.Tensor | None) -> torch.Tensor | None:
    """A bias that was expanded, as it was before: kernels then read it once a tile."""
    if bias is None or 0 not in bias.stride():
        return bias
    sizes = [1 if step == 0 else n for n, step in zip(bias.shape, bias.stride(), strict=True)]
    return bias.as_strided(sizes, bias.stride()) if 0 not in bias.shape else bias


def _describe(q: Any, k: Any, v: Any, bias: Any, options: CallOptions) -> Call:
    q, k, v, bias = map(detached, (q, k, v, bias))
    return api.checked_call(
        q, k, v, bias=bias, mask=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, options=options,
        stream=None,
    )  # fmt: skip


def _heads_last(x: torch.Tensor) -> torch.Tensor:
    """``[batch, seqlen, heads, head_dim]``, what is in memory."""
    return (x.resolve_neg() if x.is_neg() else x).transpose(1, 2)


def _options(is_causal: bool, scale: float | None, dropout_p: float, return_lse: bool, **more: Any) -> CallOptions:
    causal: Causal = "top_left" if is_causal else False
    return CallOptions(causal=causal, softmax_scale=scale, dropout_p=dropout_p, return_lse=return_lse, **more)


def _keywords(options: CallOptions) -> dict[str, Any]:
    """Of the core functions, on the CPU."""
    names = ("causal", "softmax_scale", "dropout_p")
    return {name: getattr(options, name) for name in names}


def _pointers(**tensors: torch.Tensor | None) -> dict[str, int]:
    return {name: x.data_ptr() for name, x in tensors.items() if x is not None}


def efficient_forward(
    query: Any, key: Any, value: Any, attn_bias: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What ``aten::_scaled_dot_product_efficient_attention`` computes, in its shapes and strides."""
    q, k, v = map(_heads_last, (query, key, value))
    bias = _collapsed(resolved(attn_bias))
    device = q.device
    batch, length, heads, _ = q.shape
    rows = -(-length // LSE_ALIGNMENT) * LSE_ALIGNMENT
    options = (compute_log_sumexp, dropout_p, is_causal, scale, env.raw_backend())
    key_ = (*options, *map(signature, (q, k, v, bias)))
    plan = _forward_plans.get(key_) if q.is_cuda else None
    call = None
    if plan is None:
        call = _describe(q, k, v, bias, _options(is_causal, scale, dropout_p, compute_log_sumexp))
    out = torch.empty((batch, length, heads, v.shape[3]), dtype=q.dtype, device=device)
    lse = torch.empty((batch, heads, rows if compute_log_sumexp else 0), dtype=torch.float32, device=device)
    if plan is None and q.is_cuda and out.numel():
        assert call is not None
        problem = with_padded_lse(
            call.with_outputs(), dense_layout(tuple(lse.shape), "float32") if compute_log_sumexp else None
        )
        plan = remember(_forward_plans, key_, forward_plan(problem, call.device.index, raw_stream(device.index)))
    state, words = NO_RNG, (0, 0)
    if dropout_p > 0:
        state = draw_rng(q, k, None)
        words = rng_values(state)
    elif q.is_cuda:
        words = no_state(device)
    if not out.numel():
        lse.fill_(float("inf"))
    elif plan is None:  # on the CPU
        assert call is not None
        lse.fill_(float("inf"))
        sums = lse[..., :length] if compute_log_sumexp else None
        q, k, v, bias = map(detached, (q, k, v, bias))
        api.attention_forward(q, k, v, out, lse=sums, bias=bias, rng=state, **_keywords(call.options))
        if sums is not None:
            sums.masked_fill_(sums == float("-inf"), 0.0)
    else:
        size = plan.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        pointers = _pointers(q=q, k=k, v=v, out=out, lse=lse if compute_log_sumexp else None, bias=bias)
        address = 0 if workspace is None else workspace.data_ptr()
        plan.run(raw_stream(device.index), addresses(plan.OPERANDS, pointers), address, state)
    seed, offset = map(as_tensor, words)
    return out.transpose(1, 2), lse, seed, offset


def efficient_backward(
    grad_out_: Any, query: Any, key: Any, value: Any, attn_bias: Any, out: Any, logsumexp: Any, philox_seed: Any,
    philox_offset: Any, dropout_p: float, grad_input_mask: list[bool], is_causal: bool = False, *,
    scale: float | None = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """What ``aten::_scaled_dot_product_efficient_attention_backward`` computes, in its shapes and strides."""
    if grad_out_ is None:
        return None, None, None, None
    if grad_out_.is_cuda:
        driver.adopt_context(grad_out_.get_device())
    q, k, v, out, dout = map(_heads_last, (query, key, value, out, grad_out_))
    lse = logsumexp
    with_dbias = attn_bias is not None and bool(grad_input_mask[3])
    bias = resolved(attn_bias)
    bias = bias if with_dbias else _collapsed(bias)
    if dout.stride(-1) != 1 or 0 in dout.stride():
        dout = dout.contiguous()  # an expanded gradient: one packed copy costs less than elements one by one
    device, length = q.device, q.shape[1]
    deterministic = refuses_nondeterminism()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
    dbias = None
    if with_dbias:
        # As torch's kernel has it, and programs compiled by inductor assert: rows of a multiple of 16 elements.
        columns = attn_bias.shape[-1]
        padded = (*attn_bias.shape[:-1], -(-columns // 16) * 16)
        dbias = torch.empty(padded, dtype=attn_bias.dtype, device=device)[..., :columns]
    everything = (q, k, v, bias, out, lse, dout, dbias)
    key_ = (dropout_p, is_causal, scale, deterministic, env.raw_backend(), *map(signature, everything))
    plan = _backward_plans.get(key_) if q.is_cuda else None
    rng = checked_rng((philox_seed, philox_offset), q) if dropout_p > 0 else NO_RNG
    if plan is None:
        options = _options(is_causal, scale, dropout_p, True, deterministic=deterministic, dbias=dbias is not None)
        call = _describe(q, k, v, bias, options)
        if not q.is_cuda:
            dout, q, k, v, out, sums, bias = map(detached, (dout, q, k, v, out, lse[..., :length], bias))
            api.attention_backward(
                dout, q, k, v, out, sums, dq, dk, dv, dbias=dbias, bias=bias, rng=rng,
                **_keywords(call.options),
            )  # fmt: skip
            return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dbias
        named = {"out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias}
        views = {name: view(detached(x), name) for name, x in named.items() if x is not None}
        problem = with_padded_lse(call.with_outputs(**views), layout(view(detached(lse), "logsumexp")))
        plan = remember(_backward_plans, key_, backward_plan(problem, call.device.index, raw_stream(device.index)))
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    pointers = _pointers(q=q, k=k, v=v, out=out, dout=dout, lse=lse, bias=bias, dq=dq, dk=dk, dv=dv, dbias=dbias)
    plan.run(raw_stream(device.index), addresses(plan.OPERANDS, pointers), workspace.data_ptr(), rng)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dbias
