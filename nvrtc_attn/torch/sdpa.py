"""torch's `scaled_dot_product_attention`: a function of its signature, and a switch that makes torch's calls ours.

Layouts here are torch's: ``[batch, heads, seqlen, head_dim]``. What the switch takes over returns shapes, strides,
padding and Philox states of torch's own kernels, so that a backward pass of one may follow a forward pass of the other.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch

from .. import api
from ..base import env
from ..base.errors import CudaError, UnsupportedError, shown
from ..base.log import LOGGER, log_once
from ..front.call import Call, CallOptions
from ..front.operands import addresses
from ..front.philox import NO_RNG
from ..front.problem import AttentionProblem, Causal, OperandLayout, dense_layout, layout
from ..front.tensors import view
from ..front.validation import MAX_HEAD_DIM
from ..plans.plan import backward_plan, forward_plan
from ..runtime import driver
from . import _remember, _signature, attention, checked_rng, detached, draw_rng, raw_stream, resolved, rng_values

LSE_ALIGNMENT: Final = 32
"""Rows of the log-sum-exp are padded to a multiple of this with +inf, so that ``exp(s - lse)`` is 0 there."""
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by these kernels, differentiable also in a float mask.

    Parameters
    ----------
    query : ``[..., H, Mq, K]``
    key, value : ``[..., Hkv, Mk, K]``, ``[..., Hkv, Mk, Kv]``
        Of rank 2 or more. Leading dims broadcast.
    attn_mask : broadcasts to ``[..., H, Mq, Mk]``, optional
        Boolean (True = keep), read as it is, or floating (dtype of query or float32), added to the scores. Neither is
        expanded, and the gradient has the mask's own shape. Also a `torch.nn.attention.bias.CausalBias`.
    is_causal
        From the top left, as in torch: ``j <= i``. May be combined with ``attn_mask``.
    enable_gqa
        Hkv may be any divisor of H; otherwise it is H or 1.

    Returns
    -------
    ``[..., H, Mq, Kv]``
        A view of memory in the order ``[..., Mq, H, Kv]``, as torch's own. Rows with no valid key are 0.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `nvrtc_attn.torch.attention`.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {shown(x)} of type {type(x).__name__}. A torch tensor is needed.")
    rank = query.dim()
    if rank < 2 or key.dim() != rank or value.dim() != rank:
        raise ValueError(
            f"query, key, value: ranks {rank}, {key.dim()}, {value.dim()}. They must be equal, at least 2: "
            f"[..., heads, seqlen, head_dim]."
        )
    causal: Causal = "top_left" if is_causal else False
    if (fixed := _causal_variant(attn_mask)) is not None:
        causal, attn_mask = fixed, None
    lead = query.shape[:-3]
    if rank != 4 or key.shape[0] != lead[0] or value.shape[0] != lead[0]:
        lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        query, key, value = (_rank_4(x, lead) for x in (query, key, value))
    heads, heads_kv = query.shape[1], max(key.shape[1], value.shape[1])
    if 1 in (key.shape[1], value.shape[1]) and heads_kv != 1:
        key, value = (x.expand(-1, heads_kv, -1, -1) for x in (key, value))
    if heads != heads_kv and not enable_gqa:
        if heads == 1:
            query = query.expand(-1, heads_kv, -1, -1)
        elif heads_kv != 1:
            raise ValueError(
                f"key, value: {heads_kv} heads, query has {heads}. They are equal, or 1. Pass enable_gqa=True for "
                f"groups of query heads that share a key head."
            )
    bias = mask = None
    if attn_mask is not None:
        if not isinstance(attn_mask, torch.Tensor):
            raise TypeError(f"attn_mask: got {shown(attn_mask)} of type {type(attn_mask).__name__}, no torch tensor.")
        attn_mask = _mask_of_rank_4(attn_mask, lead)
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        else:
            bias = attn_mask
    out = attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), bias=bias, mask=mask, causal=causal,
        softmax_scale=scale, dropout_p=dropout_p,
    ).transpose(1, 2)  # fmt: skip
    return out if rank == 4 else out.reshape(*lead, *out.shape[4 - min(rank, 3) :])


def _causal_variant(attn_mask: Any) -> Causal | None:
    bias = sys.modules.get("torch.nn.attention.bias")
    if bias is None or not isinstance(attn_mask, bias.CausalBias):
        return None
    return "bottom_right" if attn_mask.variant == bias.CausalVariant.LOWER_RIGHT else "top_left"


def _rank_4(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """``[batch, heads, seqlen, head_dim]`` of any rank, leading dims broadcast to ``lead``."""
    while x.dim() < 4:
        x = x[None]
    if len(lead) == 0:
        return x
    x = x.expand(*lead, *x.shape[-3:])
    return x if len(lead) == 1 else x.flatten(0, -4)


def _mask_of_rank_4(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """``[1|B, 1|H, 1|Mq, 1|Mk]``, a view wherever the batch dims allow it."""
    while x.dim() < 4:
        x = x[None]
    if x.dim() == 4 and len(lead) < 2:
        return x
    if all(n == 1 for n in x.shape[:-3]):
        return x.flatten(0, -4)
    return x.expand(*lead, *x.shape[-3:]).flatten(0, -4)


# --------------------------------------------------------------------------------------------------- torch's operators


class NotTakenError(Exception):
    """A call that torch's own kernel must serve."""


def why_not(query: Any, key: Any, value: Any, bias: Any) -> str | None:
    """What keeps a call from these kernels, before anything is looked at closely."""
    for x in (query, key, value, bias):
        if x is not None and (x.is_nested or x.layout != torch.strided):
            return "a nested or sparse tensor"
    if query.dtype not in _DTYPES:
        return f"dtype {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        return "query, key and value of different dtypes"
    if query.is_cuda and max(query.shape[-1], value.shape[-1]) > MAX_HEAD_DIM:
        return f"a head dim above {MAX_HEAD_DIM}"
    if bias is not None and bias.dtype not in (query.dtype, torch.float32, torch.bool):
        return f"a mask of {bias.dtype} for {query.dtype}"
    return None


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


def _padded(problem: AttentionProblem, lse: OperandLayout | None) -> AttentionProblem:
    """The problem with the log-sum-exp of memory-efficient attention."""
    return replace(problem, lse=lse, lse_padded=True)


def _pointers(**tensors: torch.Tensor | None) -> dict[str, int]:
    return {name: x.data_ptr() for name, x in tensors.items() if x is not None}


def no_state(device: torch.device) -> tuple[Any, Any]:
    """Zeros where the seed has its words: on the GPU while a graph is captured, which then holds one fill of both."""
    if not torch.cuda.is_current_stream_capturing():
        return 0, 0
    seed, offset = torch.zeros(2, dtype=torch.int64, device=device).unbind()
    return seed, offset


def as_tensor(word: Any) -> torch.Tensor:
    """The seed's form of a Philox word: int64, unsigned values above 2**63 wrapped."""
    if isinstance(word, torch.Tensor):
        return word
    return torch.tensor(word - 2**64 if word >= 2**63 else word, dtype=torch.int64)


def _planned(make: Callable[[], Any], device: torch.device) -> Any:
    """What ``make`` makes; torch's kernel where that would have to load one while a CUDA graph is captured."""
    try:
        return make()
    except CudaError:
        if driver.is_capturing(raw_stream(device)):
            raise NotTakenError("the first call of its kind came while a CUDA graph was captured") from None
        raise


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
    key_ = (*options, *map(_signature, (q, k, v, bias)))
    plan = _forward_plans.get(key_) if q.is_cuda else None
    call = None
    if plan is None:
        call = _describe(q, k, v, bias, _options(is_causal, scale, dropout_p, compute_log_sumexp))
    out = torch.empty((batch, length, heads, v.shape[3]), dtype=q.dtype, device=device)
    lse = torch.empty((batch, heads, rows if compute_log_sumexp else 0), dtype=torch.float32, device=device)
    if plan is None and q.is_cuda and out.numel():

        def make() -> Any:
            assert call is not None
            sums = dense_layout(tuple(lse.shape), "float32") if compute_log_sumexp else None
            return forward_plan(_padded(call.with_outputs(), sums), call.device.index, raw_stream(device))

        plan = _remember(_forward_plans, key_, _planned(make, device))
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
        plan.run(raw_stream(device), addresses(plan.OPERANDS, pointers), address, state)
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
    deterministic = (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
    dbias = None
    if with_dbias:
        # As torch's kernel has it, and programs compiled by inductor assert: rows of a multiple of 16 elements.
        columns = attn_bias.shape[-1]
        padded = (*attn_bias.shape[:-1], -(-columns // 16) * 16)
        dbias = torch.empty(padded, dtype=attn_bias.dtype, device=device)[..., :columns]
    everything = (q, k, v, bias, out, lse, dout, dbias)
    key_ = (dropout_p, is_causal, scale, deterministic, env.raw_backend(), *map(_signature, everything))
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

        def make() -> Any:
            named = {"out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias}
            views = {name: view(detached(x), name) for name, x in named.items() if x is not None}
            problem = _padded(call.with_outputs(**views), layout(view(detached(lse), "logsumexp")))
            return backward_plan(problem, call.device.index, raw_stream(device))

        plan = _remember(_backward_plans, key_, _planned(make, device))
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    pointers = _pointers(q=q, k=k, v=v, out=out, dout=dout, lse=lse, bias=bias, dq=dq, dk=dk, dv=dv, dbias=dbias)
    plan.run(raw_stream(device), addresses(plan.OPERANDS, pointers), workspace.data_ptr(), rng)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dbias


# ----------------------------------------------------------------------------------------------------------- the switch

_lock = threading.RLock()
_levels: Counter[str] = Counter()
_libraries: dict[str, torch.library.Library] = {}
_taken: Counter[str] = Counter()
_left: Counter[str] = Counter()
_EFFICIENT: Final = "efficient"
_ALL: Final = "all"
_CACHE_TAG: Final = "+nvrtc_attn.sdpa"


def report() -> dict[str, Any]:
    """What the switch is set to, and how many calls it took and left to torch, by operator and reason."""
    with _lock:
        return {"enabled": sorted(_libraries), "taken": dict(_taken), "left_to_torch": dict(_left)}


class enable_sdpa:  # noqa: N801 - it is called like a function, as torch.no_grad is
    """Make torch's own calls of attention run on these kernels, on CUDA, until `disable` or the end of ``with``.

    Takes over the operators of memory-efficient attention, forward and backward, that
    `torch.nn.functional.scaled_dot_product_attention` chooses for masks, biases, float32 and head dims that flash
    attention refuses, and those of jagged nested tensors. What it cannot serve goes to torch's kernel, is logged once
    a reason, and counted in `report` and in ``nvrtc_attn.collect_env.collect()["sdpa"]``.

    Parameters
    ----------
    all
        Also take every call of ``scaled_dot_product_attention`` itself, whatever torch would choose for it: without a
        mask, with grouped heads, with head dims of any size. Masks and biases are then read unexpanded. Programs that
        torch.compile made before keep the kernels they were made with.

    Raises
    ------
    UnsupportedError
        torch is older than 2.9.1, which cannot give back the kernels that are replaced.

    Notes
    -----
    A switch of the process, not of the thread; calls nest. Under efficient attention as torch has it, boolean masks
    come as floating ones and biases expanded, with a gradient of full size: ``all=True`` or
    `nvrtc_attn.torch.scaled_dot_product_attention` avoid both.
    """

    def __init__(self, *, all: bool = False, _keys: tuple[str, ...] = ("CUDA",)) -> None:  # noqa: A002
        if not hasattr(torch.library, "get_kernel"):
            raise UnsupportedError(
                f"enable_sdpa: torch {torch.__version__} cannot give back a kernel that is replaced.",
                ["torch.library.get_kernel is missing, which torch has since 2.9.1"],
            )
        self._mine = [_EFFICIENT, _ALL] if all else [_EFFICIENT]
        with _lock:
            for level in self._mine:
                _levels[level] += 1
                if _levels[level] == 1:
                    _libraries[level] = _install(level, _keys)
        LOGGER.info("scaled_dot_product_attention of torch: %s calls run on nvrtc_attn", "all" if all else "some")

    def disable(self) -> None:
        """Give torch its kernels back, unless another switch is still on."""
        with _lock:
            for level in self._mine:
                _levels[level] -= 1
                if _levels[level] == 0:
                    _uninstall(level)
            self._mine = []

    def __enter__(self) -> enable_sdpa:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()


def _install(level: str, keys: tuple[str, ...]) -> torch.library.Library:
    # By name: it is built on this package, so nothing in here may import it.
    importlib.import_module("nvrtc_attn.aten")
    functions: dict[tuple[str, str], Callable[..., Any]] = {}
    for key in keys:
        if level == _EFFICIENT:
            functions |= {(name, key): function for name, function in OPERATORS.items()}
        else:
            name = "scaled_dot_product_attention"
            functions |= {(name, key): _composite_below, (name, f"Autograd{key}"): _composite}
    library = replace_kernels(functions)
    if level == _ALL:
        _tag_caches(lambda tag: tag + _CACHE_TAG)
    return library


def replace_kernels(functions: dict[tuple[str, str], Callable[..., Any]]) -> torch.library.Library:
    """Put functions in front of the kernels that torch has for operators of aten, by (name, dispatch key).

    A function raises `NotTakenError`, or an error about its arguments, for what the kernel behind it is to serve.
    Destroying the library that is returned gives torch its kernels back.
    """
    # All of torch's before the first of ours: that of a composite operator depends on which keys have one.
    calls = {where: _taking(*where, function) for where, function in functions.items()}
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel of torch is replaced: it is what was asked for
        for (name, key), call in calls.items():
            library.impl(name, call, key, with_keyset=True)
    return library


def _uninstall(level: str) -> None:
    _libraries.pop(level)._destroy()
    if level == _ALL:
        _tag_caches(lambda tag: tag.replace(_CACHE_TAG, ""))


def _tag_caches(change: Callable[[str], str]) -> None:
    """torch.compile caches programs by their calls, which are the same with and without the switch."""
    config: Any = getattr(torch.compiler, "config", None)
    if hasattr(config, "cache_key_tag"):
        config.cache_key_tag = change(config.cache_key_tag)


def _taking(name: str, key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in front of the kernel that torch has for ``name`` and ``key``."""
    try:
        original: Any = torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        original = None  # torch was built without it

    def call(keyset: Any, *arguments: Any, **options: Any) -> Any:
        try:
            result = function(*arguments, **options)
        except (NotTakenError, UnsupportedError, TypeError, ValueError) as error:
            if original is None:
                raise
            reason = f"{name}: {str(error).splitlines()[0]}"
            with _lock:
                _left[reason] += 1
            log_once(f"left to torch's own kernel: {reason}", logging.WARNING)
            return original.call_boxed(keyset, *arguments, **options)
        with _lock:
            _taken[name] += 1
        return result

    return call


def _checked(function: Callable[..., Any], first: int, bias: int) -> Callable[..., Any]:
    """``function`` where `why_not` has nothing against query, key, value (from ``first`` on) and the bias."""

    def call(*arguments: Any, **options: Any) -> Any:
        query, key, value = arguments[first : first + 3]
        reason = why_not(query, key, value, arguments[bias])
        if reason is not None:
            raise NotTakenError(reason)
        return function(*arguments, **options)

    return call


def _composite(query: Any, key: Any, value: Any, *more: Any, **options: Any) -> torch.Tensor:
    reason = why_not(query, key, value, options.get("attn_mask", more[0] if more else None))
    if reason is not None:
        raise NotTakenError(reason)
    return scaled_dot_product_attention(query, key, value, *more, **options)


def _composite_below(*arguments: Any, **options: Any) -> torch.Tensor:
    """Below autograd, in inference mode for one: whoever called records gradients, or nobody does."""
    with torch.no_grad():
        return _composite(*arguments, **options)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "_scaled_dot_product_efficient_attention": _checked(efficient_forward, 0, 3),
    "_scaled_dot_product_efficient_attention_backward": _checked(efficient_backward, 1, 4),
}
"""What `enable_sdpa` takes over. `nvrtc_attn.aten` adds its own, which jagged nested tensors call."""
