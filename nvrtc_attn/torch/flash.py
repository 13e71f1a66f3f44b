"""The name ``"nvrtc_attn"`` in torch's registry of flash attention (torch 2.10 or later).

``torch.nn.attention.activate_flash_attention_impl("nvrtc_attn")`` makes flash attention these kernels wherever torch
chooses it, packed sequences included. torch's conditions for that choice stay: no mask, 16 bits, head dims up to 256.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ..front.operands import INPUTS, OPTIONAL_GRADIENTS
from .ops import run_backward, run_forward
from .replaced import NotTakenError, replace_kernels, why_not
from .tensors import refuses_nondeterminism

NAME: Final = "nvrtc_attn"
_NO_OPTIONAL_GRADIENTS: Final = (False,) * len(OPTIONAL_GRADIENTS)


class Handle:
    """What torch's registry keeps while the name is active."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library = library

    def remove(self) -> None:
        """Give torch its kernels back."""
        self._library._destroy()


def register() -> None:
    """Add the name to torch's registry; nothing is activated. Done by ``import nvrtc_attn.torch``."""
    add: Any = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if add is not None:
        add(NAME, register_fn=activate)


def activate(*, _key: str = "CUDA") -> Handle:
    """Replace torch's kernels of flash attention; what these cannot serve stays with torch's."""
    functions: dict[str, Callable[..., Any]] = {
        "_scaled_dot_product_flash_attention": _scaled_forward,
        "_scaled_dot_product_flash_attention_backward": _scaled_backward,
        "_flash_attention_forward": _forward,
        "_flash_attention_backward": _backward,
    }
    return Handle(replace_kernels({(name, _key): function for name, function in functions.items()}))


def _arguments(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any, used: Any, is_causal: bool, scale: Any,
    window: tuple[Any, Any],
) -> tuple[Any, ...]:  # fmt: skip
    """What the operators take; q, k and v are ``[batch, seqlen, heads, head_dim]``."""
    reason = why_not(q, k, v, None)
    if reason is not None:
        raise NotTakenError(reason)
    longest = (max_q, max_k) if cu_q is not None else (None, None)
    deterministic = refuses_nondeterminism()
    causal = "bottom_right" if is_causal else ""  # flash attention's; torch asks for it with equal lengths only
    inputs = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_k": used}
    return (*map(inputs.get, INPUTS), None, None, 0, 0, causal, *window, scale, 0.0, 0.0, *longest, deterministic, None)


def _refuse(dropout_p: float, **others: Any) -> None:
    """Its masks of dropout are others than ours, and a backward pass may follow that is torch's."""
    if dropout_p > 0:
        raise NotTakenError("dropout of flash attention")
    for name, value in others.items():
        if value is not None and value is not False:
            raise NotTakenError(name)


def _like(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``made`` in the strides that torch's kernels give: those of the input, which compiled programs assert."""
    wanted = torch.empty_like(like)
    return made if made.stride() == wanted.stride() else wanted.copy_(made)


def _nothing_drawn(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """State of the generator, as torch has it without dropout, and the mask for debugging."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return state, torch.zeros((), dtype=torch.uint64, device=q.device), torch.empty(0, dtype=q.dtype, device=q.device)


def _scaled_forward(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """``aten::_scaled_dot_product_flash_attention``, ``[batch, heads, seqlen, head_dim]``."""
    _refuse(dropout_p, return_debug_mask=return_debug_mask)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    arguments = _arguments(q, k, v, None, None, None, None, None, is_causal, scale, (None, None))
    out, lse, _ = run_forward(*arguments, True, False)
    return _like(out.transpose(1, 2), query), lse, None, None, query.shape[2], key.shape[2], *_nothing_drawn(query)


def _scaled_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any, cum_seq_k: Any,
    max_q: Any, max_k: Any, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _refuse(dropout_p)
    q, k, v, out, dout = (x.transpose(1, 2) for x in (query, key, value, out, grad_out))
    arguments = _arguments(q, k, v, None, None, None, None, None, is_causal, scale, (None, None))
    gradients = run_backward(dout, None, out, logsumexp, *arguments, *_NO_OPTIONAL_GRADIENTS)
    pairs = zip(gradients[:3], (query, key, value), strict=True)
    return tuple(_like(gradient.transpose(1, 2), x) for gradient, x in pairs)


def _forward(
    query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: Any, max_k: Any, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: float | None = None, window_size_left: Any = None,
    window_size_right: Any = None, seqused_k: Any = None, alibi_slopes: Any = None, **others: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """``aten::_flash_attention_forward``: ``[batch, seqlen, heads, head_dim]``, packed without the batch."""
    _refuse(dropout_p, return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes, **others)
    q, k, v = (x if cum_seq_q is None else x[None] for x in (query, key, value))
    window = (window_size_left, window_size_right)
    arguments = _arguments(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, is_causal, scale, window)
    out, lse, _ = run_forward(*arguments, True, False)
    if cum_seq_q is not None:
        out, lse = out[0], lse[0]
    return _like(out, query), lse, *_nothing_drawn(query)


def _backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any, cum_seq_k: Any,
    max_q: Any, max_k: Any, dropout_p: float, is_causal: bool, rng_state: Any, unused: Any, *,
    scale: float | None = None, window_size_left: Any = None, window_size_right: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    _refuse(dropout_p)
    inputs = (query, key, value, out, grad_out, logsumexp)
    q, k, v, o, dout, lse = inputs if cum_seq_q is None else (x[None] for x in inputs)
    window = (window_size_left, window_size_right)
    arguments = _arguments(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, None, is_causal, scale, window)
    gradients = run_backward(dout, None, o, lse, *arguments, *_NO_OPTIONAL_GRADIENTS)[:3]
    if cum_seq_q is not None:
        gradients = tuple(x[0] for x in gradients)
    return tuple(_like(gradient, x) for gradient, x in zip(gradients, (query, key, value), strict=True))
