"""ComfyUI: an attention function for its registry, and an override for one model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ..base.errors import UnsupportedError
from ..base.log import log_once
from ..torch import attention
from . import mask_reasons, refuse

__all__ = ["attention_nvrtc", "override", "patch", "register"]

NAME: Final = "nvrtc_attn"
# What ComfyUI hands to every attention function and what changes no result of this one.
_IGNORED: Final = frozenset(("transformer_options", "low_precision_attention", "enable_gqa", "_inside_attn_wrapper"))


def attention_nvrtc(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    *,
    scale: float | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """An attention function of ComfyUI.

    Parameters
    ----------
    q, k, v : ``[B, M, heads * D]``, ``[B, N, Hkv * D]``, ``[B, N, Hkv * Dv]``
        With ``skip_reshape`` ``[B, H, M, D]``, ``[B, Hkv, N, D]``, ``[B, Hkv, N, Dv]``.
    mask : ``[M, N]``, ``[B, M, N]`` or ``[B, H, M, N]``, each dim full or 1
        Boolean (True keeps the key) or added to the scores.
    attn_precision
        Scores are float32 whatever it is.
    skip_output_reshape
        Return ``[B, H, M, Dv]`` instead of ``[B, M, heads * Dv]``.

    Raises
    ------
    UnsupportedError
        An option that is not known here; a mask of integers.
    """
    del attn_precision
    unknown = sorted(name for name, value in kwargs.items() if name not in _IGNORED and value is not None)
    reasons = [*(f"{name}: an option that is not known" for name in unknown), *mask_reasons("mask", mask)]
    refuse("call of ComfyUI", reasons)
    if skip_reshape:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    else:
        q = q.unflatten(-1, (heads, -1))
        k = k.unflatten(-1, (-1, q.shape[-1]))
        v = v.unflatten(-1, (k.shape[2], -1))
    bias = keep = None
    if mask is not None:
        if mask.dim() == 2:
            mask = mask[None]
        if mask.dim() == 3:
            mask = mask[:, None]
        if mask.dtype == torch.bool:
            keep = mask
        else:
            bias = mask if mask.dtype in (q.dtype, torch.float32) else mask.to(q.dtype)
    out: torch.Tensor = attention(q, k, v, bias=bias, mask=keep, softmax_scale=scale)
    return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)


def override(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """What ComfyUI calls instead of its ``function``; calls that are not served go there, with one line logged."""
    try:
        return attention_nvrtc(*args, **kwargs)
    except UnsupportedError as error:
        log_once(f"ComfyUI's own attention computes calls that nvrtc_attn does not take: {error}")
        return function(*args, **kwargs)


def patch(model: Any) -> Any:
    """A clone of a ComfyUI model (a ``ModelPatcher``) whose attention goes through `override`."""
    clone = model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    options["optimized_attention_override"] = override
    return clone


def register() -> None:
    """Add ``"nvrtc_attn"`` to ComfyUI's attention functions. Calling it again changes nothing."""
    from comfy.ldm.modules import attention as registry

    if NAME not in registry.REGISTERED_ATTENTION_FUNCTIONS:
        registry.register_attention_function(NAME, attention_nvrtc)
