"""``aten::_efficient_attention_forward`` and ``_backward``: what `nvrtc_attn.aten` hands out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch

from ..api import checked_call
from ..base.errors import shown
from ..front.call import Call, CallOptions
from ..front.operands import GRADIENTS, addresses
from ..front.philox import NO_RNG
from ..front.problem import AttentionProblem, Causal, OperandLayout, dense_layout, layout
from ..front.tensors import view
from ..front.validation import Violations, check_integer
from ..plans.plan import backward_plan, forward_plan
from .random import as_tensor, checked_rng, draw_rng, no_state, rng_values
from .tensors import detached, raw_stream, resolved

LSE_ALIGNMENT: Final = 32
"""Rows of the log-sum-exp are padded to a multiple of this with +inf, so that ``exp(s - lse)`` is 0 there."""
_CAUSAL: Final[tuple[Causal, ...]] = (False, "top_left", "bottom_right")


def efficient_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: torch.Tensor | None = None,
    window_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """Attention as ``aten::_efficient_attention_forward`` computes it.

    Parameters
    ----------
    query : ``[B, Mq, H, K]``
    key, value : ``[B, Mk, Hkv, K]``, ``[B, Mk, Hkv, Kv]``
        float16, bfloat16 or float32, any strides; with cu_seqlens B = 1 and tokens packed on dim 1.
    bias : ``[B, H, Mq, Mk]`` or broadcast, optional
        dtype of query or float32, any strides and alignment.
    custom_mask_type
        0 none, 1 causal from the top left, 2 causal from the bottom right.
    compute_log_sumexp
        Whether to return the log-sum-exp.
    seqlen_k : int32 ``[nb]``, optional
        Keys used of each sequence; read only with cu_seqlens.
    window_size
        W > 0 keeps the last W keys up to the diagonal (only with mask types 1 and 2); None and 0 = no window.

    Returns
    -------
    output : ``[B, Mq, H, Kv]``, dense
    logsumexp : float32 ``[B or nb, H, ceil(max_seqlen_q / 32) * 32]``
        Natural log; 0 for rows with no key, +inf in the padding. Last dim 0 without ``compute_log_sumexp``.
    philox_seed, philox_offset : int64, 0-dim
        On the CPU; on the GPU while a CUDA graph is captured. Without dropout 0, on the same devices.
    max_seqlen_batch_q, max_seqlen_batch_k : int

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `nvrtc_attn.attention`.
    """
    _check_flags(compute_log_sumexp=compute_log_sumexp)
    query, key, value, bias = (_plain(x) for x in (query, key, value, bias))
    call = _describe(
        (query, key, value, bias, cu_seqlens_q, cu_seqlens_k, seqlen_k),
        (max_seqlen_q, max_seqlen_k),
        custom_mask_type,
        window_size,
        scale,
        dropout_p,
    )
    if call.problem.varlen and dropout_p > 0 and max_seqlen_k is None:
        raise ValueError(
            "max_seqlen_k: None, but the dropout mask of packed sequences is indexed by it. Pass the longest."
        )
    device = query.device
    rows = -(-call.problem.seqlen_q // LSE_ALIGNMENT) * LSE_ALIGNMENT
    lse_shape = (call.problem.batch, query.shape[2], rows if compute_log_sumexp else 0)
    plan = None
    if 0 not in call.out_shape:  # before numbers are drawn: where no kernel is ready, torch's own draws them
        problem = _padded(call.with_outputs(), dense_layout(lse_shape, "float32") if compute_log_sumexp else None)
        plan = forward_plan(problem, call.device.index, raw_stream(device))
    packed = (call.problem.batch, call.problem.seqlen_q, call.problem.seqlen_k) if call.problem.varlen else None
    state = draw_rng(query, key, packed) if dropout_p > 0 else NO_RNG
    seed, offset = map(as_tensor, rng_values(state) if dropout_p > 0 else no_state(device))
    out = torch.empty(call.out_shape, dtype=query.dtype, device=device)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=device)
    if plan is None:
        lse.fill_(float("inf"))
    else:
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
        pointers = _pointers(call) | {"out": out.data_ptr(), "lse": lse.data_ptr() if compute_log_sumexp else 0}
        plan.run(raw_stream(device), addresses(plan.OPERANDS, pointers), workspace.data_ptr(), state)
    k_length = (_integer("max_seqlen_k", max_seqlen_k) or 0) if call.problem.varlen else key.shape[1]
    return out, lse, seed, offset, call.problem.seqlen_q, k_length


def efficient_attention_backward(
    grad_out_: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: torch.Tensor,
    dropout_p: float,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    num_splits_key: int | None = None,
    window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients as ``aten::_efficient_attention_backward`` computes them.

    ``logsumexp`` and the Philox state are what the forward function returned; a state on the GPU is read by the
    kernels, so a captured forward pass and an eager backward pass mix freely.

    Parameters
    ----------
    num_splits_key
        Accepted for compatibility: the key loop is always split over thread blocks. More than 1 is refused while
        ``torch.use_deterministic_algorithms(True)`` is in force, as in torch.
    shared_storage_dqdkdv
        Return grad_q, grad_k, grad_v as slices of one ``[B, M, 3, H, K]`` tensor (needs equal shapes).

    Returns
    -------
    grad_query, grad_key, grad_value, grad_bias
        grad_bias has the shape of ``bias``, None without ``bias_requires_grad``. All None for ``grad_out_=None``.
    """
    if grad_out_ is None:
        return None, None, None, None
    deterministic = (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    _check_flags(bias_requires_grad=bias_requires_grad, shared_storage_dqdkdv=shared_storage_dqdkdv)
    splits = _integer("num_splits_key", num_splits_key)
    if deterministic and splits is not None and splits > 1:
        raise RuntimeError(
            f"num_splits_key: got {num_splits_key}, which makes the algorithm non-deterministic, while deterministic "
            f"algorithms are in force. Pass None or 1."
        )
    query, key, value, bias = (_plain(x) for x in (query, key, value, bias))
    out, grad_out_, logsumexp = (_plain(x) for x in (out, grad_out_, logsumexp))
    call = _describe(
        (query, key, value, bias, cu_seqlens_q, cu_seqlens_k, None),
        (max_seqlen_q, max_seqlen_k),
        custom_mask_type,
        window_size,
        scale,
        dropout_p,
        deterministic=deterministic,
        dbias=bias_requires_grad and bias is not None,
    )
    views = {"out": call.input_view(out, "out"), "dout": call.input_view(grad_out_, "dout", "grad_out_")}
    lse_view = view(logsumexp, "logsumexp")
    wanted = (call.problem.batch, query.shape[2], call.problem.seqlen_q)
    rows_fit = len(lse_view.shape) == 3 and lse_view.shape[:2] == wanted[:2] and lse_view.shape[2] >= wanted[2]
    if lse_view.dtype != "float32" or lse_view.device != call.device or not rows_fit:
        raise ValueError(
            f"logsumexp: got {lse_view.dtype} of shape {lse_view.shape} on {lse_view.device}. Needed is float32 of "
            f"shape {wanted}, or longer in the last dim, on {call.device}: what the forward function returned."
        )
    rng = checked_rng((philox_seed, philox_offset), query) if dropout_p > 0 else NO_RNG
    if shared_storage_dqdkdv:
        if query.shape != key.shape or key.shape != value.shape:
            raise ValueError(
                f"shared_storage_dqdkdv: needs query, key and value of one shape, got {tuple(query.shape)}, "
                f"{tuple(key.shape)}, {tuple(value.shape)}. Pass False."
            )
        b, m, h, d = query.shape
        grads = torch.empty((b, m, 3, h, d), dtype=query.dtype, device=query.device).unbind(2)
    else:
        grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    grad_bias = None
    if bias_requires_grad and bias is not None:
        grad_bias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    views |= {name: view(x, name) for name, x in zip(GRADIENTS, (*grads, grad_bias), strict=True) if x is not None}
    problem = _padded(call.with_outputs(**views), layout(lse_view))
    plan = backward_plan(problem, call.device.index, raw_stream(query.device))
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=query.device)
    pointers = _pointers(call) | {name: x.ptr for name, x in views.items()} | {"lse": lse_view.ptr}
    plan.run(raw_stream(query.device), addresses(plan.OPERANDS, pointers), workspace.data_ptr(), rng)
    return (*grads, grad_bias)


def _describe(
    tensors: tuple[torch.Tensor | None, ...],
    max_seqlens: tuple[int | None, int | None],
    custom_mask_type: int,
    window_size: int | None,
    scale: float | None,
    dropout_p: float,
    **more: Any,
) -> Call:
    query, key, value, bias, cu_seqlens_q, cu_seqlens_k, seqlen_k = tensors
    names = ("query", "key", "value", "bias", "cu_seqlens_q", "cu_seqlens_k", "seqlen_k")
    for index, (name, x) in enumerate(zip(names, tensors, strict=True)):
        if not (isinstance(x, torch.Tensor) or (x is None and index > 2)):
            raise TypeError(f"{name}: got {shown(x)} of type {type(x).__name__}. A torch tensor is needed.")
    mask_type = _integer("custom_mask_type", custom_mask_type)
    if mask_type not in (0, 1, 2):
        raise ValueError(
            f"custom_mask_type: got {shown(custom_mask_type)}; 0 none, 1 causal top left, 2 causal bottom right."
        )
    window: tuple[int | None, int | None] = (None, None)
    width = _integer("window_size", window_size)
    if width:
        if width < 0 or mask_type == 0:
            raise ValueError(
                f"window_size: got {shown(width)} with custom_mask_type {mask_type}; it is at least 0, and needs "
                f"type 1 or 2."
            )
        window = (width - 1, 0)
    assert query is not None and key is not None  # noqa: PT018
    if not query.is_cuda:
        raise ValueError(
            f"query: on {query.device}. These entry points stand in for CUDA operators: use nvrtc_attn.attention."
        )
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    max_q, max_k = max_seqlens
    options: dict[str, Any] = {}
    if varlen:
        # The seed needs no longest key length in the forward pass; every sequence fits in all tokens.
        tokens = key.shape[1] if key.dim() == 4 else None
        options = {"max_seqlen_q": max_q, "max_seqlen_k": _integer("max_seqlen_k", max_k) or tokens}
    return checked_call(
        query, key, value, bias=bias, mask=None, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqlen_k if varlen else None,
        options=CallOptions(
            causal=_CAUSAL[mask_type], window_size=window, softmax_scale=scale, dropout_p=dropout_p,
            **options, **more,
        ),
        stream=None,
    )  # fmt: skip


def _integer(name: str, value: object) -> int | None:
    found = Violations()
    number = check_integer(found, name, value)
    found.stop()
    return number


def _check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {shown(flag)} of type {type(flag).__name__}. It is True or False.")


def _plain(x: Any) -> Any:
    """Without autograd history, and with the sign of a lazily negated view applied; anything else as it is."""
    return resolved(detached(x))


def _padded(problem: AttentionProblem, lse: OperandLayout | None) -> AttentionProblem:
    """The problem with the seed's log-sum-exp."""
    return replace(problem, lse=lse, lse_padded=True)


def _pointers(call: Call) -> dict[str, int]:
    """Addresses of the inputs."""
    return {name: x.ptr for name, x in call.tensors.items()}
