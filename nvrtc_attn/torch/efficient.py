"""``aten::_efficient_attention_forward`` and ``_backward``: what `nvrtc_attn.aten` hands out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch

from ..api import checked_call
from ..base import env
from ..base.errors import shown
from ..base.tables import remember
from ..front.call import Call, CallOptions
from ..front.operands import FURTHER_INPUTS, GRADIENTS, OPERANDS
from ..front.philox import NO_RNG
from ..front.problem import AttentionProblem, Causal, OperandLayout, dense_layout, layout
from ..front.signature import NUMBERS, read
from ..front.tensors import view
from ..front.validation import Violations, check_integer, refuse_scale
from ..plans.plan import BackwardPlan, ForwardPlan, backward_plan, forward_plan
from .random import as_tensor, checked_rng, draw_rng, no_state, rng_values
from .tensors import (
    Made,
    address_of,
    allocator,
    current_device,
    dense,
    detached,
    empty_on_current,
    raw_stream,
    refuses_nondeterminism,
    resolved,
)

LSE_ALIGNMENT: Final = 32
"""Rows of the log-sum-exp are padded to a multiple of this with +inf, so that ``exp(s - lse)`` is 0 there."""
_CAUSAL: Final[tuple[Causal, ...]] = (False, "top_left", "bottom_right")
_NO_FURTHER: Final = (0,) * len(FURTHER_INPUTS)
_NO_FURTHER_GRADIENTS: Final = (0,) * sum(OPERANDS[name].gradient_of in FURTHER_INPUTS for name in GRADIENTS)
_Tensors = tuple[torch.Tensor | None, ...]


class _Forward(NamedTuple):
    """What a forward call needs that was made before."""

    plan: ForwardPlan | None
    out: Made
    lse: Made
    packed: tuple[int, int, int] | None
    seqlen_q: int
    seqlen_k: int


class _Backward(NamedTuple):
    """The same of a backward call; gradients of query, key, value and bias."""

    plan: BackwardPlan
    gradients: tuple[Any, ...]


# Everything of a call but its addresses -> what it needs.
_forward_calls: dict[Any, _Forward] = {}
_backward_calls: dict[Any, _Backward] = {}


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
    tensors: _Tensors = (query, key, value, bias, cu_seqlens_q, cu_seqlens_k, seqlen_k)
    numbers = (max_seqlen_q, max_seqlen_k, custom_mask_type, window_size, scale, dropout_p)
    found = _read(tensors, numbers, compute_log_sumexp)
    known = None if found is None else _forward_calls.get(found[0])
    if found is None or known is None:
        tensors = tuple(map(_plain, tensors))
        known = _first_forward(tensors, numbers, compute_log_sumexp)
        if found is not None and known.plan is not None:
            remember(_forward_calls, found[0], known)
    places = found[1] if found is not None else list(map(address_of, tensors))
    index = query.get_device()
    # Drawn when the plan is there: where no kernel is ready, torch's own draws them.
    state = draw_rng(query, key, known.packed) if dropout_p > 0 else NO_RNG
    seed, offset = map(as_tensor, rng_values(state) if dropout_p > 0 else no_state(query.device))
    new = empty_on_current if current_device() == index else allocator(index)
    out, lse = new(*known.out), new(*known.lse)
    plan = known.plan
    if plan is None:
        lse.fill_(float("inf"))
    else:
        workspace = new((plan.workspace_bytes,), (1,), torch.uint8)
        q, k, v, bias_, starts_q, starts_k, used = places
        # In the order of `FORWARD`.
        lse_address = lse.data_ptr() if compute_log_sumexp else 0
        used = used if known.packed is not None else 0
        operands = (q, k, v, out.data_ptr(), lse_address, 0, bias_, 0, starts_q, starts_k, used, *_NO_FURTHER)
        plan.run(raw_stream(index), operands, workspace.data_ptr(), state)
    return out, lse, seed, offset, known.seqlen_q, known.seqlen_k


def _first_forward(tensors: _Tensors, numbers: tuple[Any, ...], compute_log_sumexp: bool) -> _Forward:
    """What a forward call needs, of plain tensors."""
    query: Any
    key: Any
    query, key, *_ = tensors
    call = _describe(tensors, *numbers)
    problem, max_seqlen_k = call.problem, numbers[1]
    if problem.varlen and problem.dropout_p > 0 and max_seqlen_k is None:
        raise ValueError(
            "max_seqlen_k: None, but the dropout mask of packed sequences is indexed by it. Pass the longest."
        )
    rows = -(-problem.seqlen_q // LSE_ALIGNMENT) * LSE_ALIGNMENT
    lse_shape = (problem.batch, query.shape[2], rows if compute_log_sumexp else 0)
    plan = None
    if 0 not in call.out_shape:
        padded = with_padded_lse(
            call.with_outputs(), dense_layout(lse_shape, "float32") if compute_log_sumexp else None
        )
        plan = forward_plan(padded, call.device.index, raw_stream(call.device.index))
    return _Forward(
        plan,
        dense(call.out_shape, query.dtype),
        dense(lse_shape, torch.float32),
        (problem.batch, problem.seqlen_q, problem.seqlen_k) if problem.varlen else None,
        problem.seqlen_q,
        (_integer("max_seqlen_k", max_seqlen_k) or 0) if problem.varlen else key.shape[1],
    )


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
    grad_out_, out : ``[B, Mq, H, Kv]``
        In query's dtype. No ``grad_out_`` gives no gradients.
    query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, custom_mask_type, window_size
        Those of the forward function.
    logsumexp : float32 ``[B or nb, H, at least max_seqlen_q]``
    philox_seed, philox_offset : int64, 0-dim
        Read with dropout only.
    num_splits_key
        Accepted for compatibility: the key loop is always split over thread blocks. More than 1 is refused while
        ``torch.use_deterministic_algorithms(True)`` is in force, as in torch.
    shared_storage_dqdkdv
        Return grad_q, grad_k, grad_v as slices of one ``[B, M, 3, H, K]`` tensor (needs equal shapes).

    Returns
    -------
    grad_query, grad_key, grad_value, grad_bias
        grad_bias has the shape of ``bias``, None without ``bias_requires_grad``. All None for ``grad_out_=None``.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `nvrtc_attn.attention_backward`.
    RuntimeError
        ``num_splits_key`` above 1 under deterministic algorithms.
    """
    if grad_out_ is None:
        return None, None, None, None
    deterministic = refuses_nondeterminism()
    _check_flags(bias_requires_grad=bias_requires_grad, shared_storage_dqdkdv=shared_storage_dqdkdv)
    splits = _integer("num_splits_key", num_splits_key)
    if deterministic and splits is not None and splits > 1:
        raise RuntimeError(
            f"num_splits_key: got {num_splits_key}, which makes the algorithm non-deterministic, while deterministic "
            f"algorithms are in force. Pass None or 1."
        )
    tensors: _Tensors = (query, key, value, bias, cu_seqlens_q, cu_seqlens_k, None, out, grad_out_, logsumexp)
    numbers = (max_seqlen_q, max_seqlen_k, custom_mask_type, window_size, scale, dropout_p)
    flags = (deterministic, bias_requires_grad and bias is not None, shared_storage_dqdkdv)
    found = _read(tensors, numbers, *flags)
    known = None if found is None else _backward_calls.get(found[0])
    if found is None or known is None:
        tensors = tuple(map(_plain, tensors))
        known = _first_backward(tensors, numbers, *flags)
        if found is not None:
            remember(_backward_calls, found[0], known)
    q, k, v, bias_, starts_q, starts_k, _, out_, dout, lse = found[1] if found else list(map(address_of, tensors))
    index = query.get_device()
    rng = checked_rng((philox_seed, philox_offset), query) if dropout_p > 0 else NO_RNG
    new = empty_on_current if current_device() == index else allocator(index)
    if shared_storage_dqdkdv:
        b, m, h, d = query.shape
        grads = torch.empty((b, m, 3, h, d), dtype=query.dtype, device=query.device).unbind(2)
    else:
        grads = tuple([new(*made) for made in known.gradients[:3]])
    wanted = known.gradients[3]
    grad_bias = None if wanted is None else new(*wanted)
    plan = known.plan
    workspace = new((plan.workspace_bytes,), (1,), torch.uint8)
    # In the order of `BACKWARD`.
    inputs = (q, k, v, out_, dout, lse, 0, bias_, 0, starts_q, starts_k, 0, *_NO_FURTHER)
    gradients = (*[x.data_ptr() for x in grads], address_of(grad_bias), *_NO_FURTHER_GRADIENTS)
    plan.run(raw_stream(index), inputs + gradients, workspace.data_ptr(), rng)
    return (*grads, grad_bias)


def _first_backward(
    tensors: _Tensors, numbers: tuple[Any, ...], deterministic: bool, dbias: bool, shared: bool
) -> _Backward:
    """What a backward call needs, of plain tensors."""
    query: Any
    key: Any
    value: Any
    query, key, value, bias, *_, out, dout, logsumexp = tensors
    call = _describe(tensors[:7], *numbers, deterministic=deterministic, dbias=dbias)
    views: dict[str, Any] = {"out": call.input_view(out, "out"), "dout": call.input_view(dout, "dout", "grad_out_")}
    lse_view = view(logsumexp, "logsumexp")
    wanted = (call.problem.batch, query.shape[2], call.problem.seqlen_q)
    rows_fit = len(lse_view.shape) == 3 and lse_view.shape[:2] == wanted[:2] and lse_view.shape[2] >= wanted[2]
    if lse_view.dtype != "float32" or lse_view.device != call.device or not rows_fit:
        raise ValueError(
            f"logsumexp: got {lse_view.dtype} of shape {lse_view.shape} on {lse_view.device}. Needed is float32 of "
            f"shape {wanted}, or longer in the last dim, on {call.device}: what the forward function returned."
        )
    made: list[Any] = [dense(x.shape, x.dtype) for x in (query, key, value)]
    if shared:
        if query.shape != key.shape or key.shape != value.shape:
            raise ValueError(
                f"shared_storage_dqdkdv: needs query, key and value of one shape, got {tuple(query.shape)}, "
                f"{tuple(key.shape)}, {tuple(value.shape)}. Pass False."
            )
        b, m, h, d = query.shape
        slices = torch.empty((b, m, 3, h, d), dtype=query.dtype, device=query.device).unbind(2)
        views |= {name: view(x, name) for name, x in zip(GRADIENTS, slices, strict=False)}
    made.append(None)
    if dbias and bias is not None:
        made[3] = dense(bias.shape, bias.dtype)
        views["dbias"] = call.problem.dense_layout_of("dbias")
    problem = with_padded_lse(call.with_outputs(**views), layout(lse_view))
    return _Backward(backward_plan(problem, call.device.index, raw_stream(call.device.index)), tuple(made))


def _read(tensors: _Tensors, numbers: tuple[Any, ...], *flags: bool) -> tuple[Any, list[int]] | None:
    """The key of a call, and the addresses of its tensors; None for a call that is to be described."""
    max_seqlen_q, max_seqlen_k, mask_type, window_size, scale, dropout_p = numbers
    if not (
        mask_type.__class__ is int
        and (max_seqlen_q is None or max_seqlen_q.__class__ is int)
        and (max_seqlen_k is None or max_seqlen_k.__class__ is int)
        and (window_size is None or window_size.__class__ is int)
        and (scale is None or scale.__class__ in NUMBERS)
        and dropout_p.__class__ in NUMBERS
    ) or (tensors[4] is not None and env.debug()):
        return None
    found = read(tensors, detached=True)
    return None if found is None else ((numbers, flags, env.raw_backend(), found[1]), found[2])


def _describe(
    tensors: tuple[torch.Tensor | None, ...],
    max_q: int | None,
    max_k: int | None,
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
    refuse_scale(scale)
    assert query is not None and key is not None  # noqa: PT018
    if not query.is_cuda:
        raise ValueError(
            f"query: on {query.device}. These entry points stand in for CUDA operators: use nvrtc_attn.attention."
        )
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
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


def with_padded_lse(problem: AttentionProblem, lse: OperandLayout | None) -> AttentionProblem:
    """The problem with the log-sum-exp of memory-efficient attention, in rows of a multiple of `LSE_ALIGNMENT`."""
    return replace(problem, lse=lse, lse_padded=True)
