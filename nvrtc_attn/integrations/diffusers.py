"""Hugging Face diffusers: the attention backend ``"nvrtc_attn"``, and a processor for the U-Nets without backends."""

from __future__ import annotations

from typing import Any, Final

import torch
from diffusers.models import attention_dispatch

from ..base.hosts import check_version
from ..torch import attention
from . import mask_reasons, refuse

__all__ = ["AttnProcessor", "register"]

NAME: Final = "nvrtc_attn"


def register() -> None:
    """Make ``"nvrtc_attn"`` an attention backend: ``model.set_attention_backend("nvrtc_attn")``.

    diffusers has no public way to add one: a member is added to its enumeration of names. Calling it again changes
    nothing. Models whose attention does not go through the backends (the U-Nets of Stable Diffusion) keep their own;
    for them there is `AttnProcessor`.
    """
    check_version("diffusers", "0.42.1", "0.42.1")
    names = attention_dispatch.AttentionBackendName
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_, member._sort_order_ = NAME.upper(), NAME, len(names._member_names_)
        member.__objclass__ = names
        setattr(names, NAME.upper(), member)
        names._member_map_[NAME.upper()] = names._value2member_map_[NAME] = member
        names._member_names_.append(NAME.upper())
    attention_dispatch._AttentionBackendRegistry.register(
        names(NAME), constraints=[attention_dispatch._check_device, attention_dispatch._check_shape]
    )(backend)


def backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """What diffusers calls: query, key, value are ``[B, M, H, D]``, ``[B, N, Hkv, D]``, ``[B, N, Hkv, Dv]``.

    ``attn_mask`` broadcasts to ``[B, H, M, N]``, except that ``[B, N]`` is one row of keys for each sequence; boolean
    (True keeps the key) or added to the scores, with gradient. Causal is from the top left, as in torch. With
    ``return_lse``, (out, lse ``[B, M, H]``).

    Raises
    ------
    UnsupportedError
        Context parallelism (``_parallel_config``); an ``attn_mask`` of integers.
    """
    del enable_gqa  # fewer key than query heads are taken as they are
    reasons = mask_reasons("attn_mask", attn_mask)
    if _parallel_config is not None:
        reasons.append(
            "_parallel_config: the parts of a sequence on several GPUs are not joined. Use the native backend."
        )
    refuse("call of diffusers", reasons)
    bias = mask = None
    if attn_mask is not None:
        if attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        else:
            bias = attn_mask if attn_mask.dtype in (query.dtype, torch.float32) else attn_mask.to(query.dtype)
    result = attention(
        query, key, value, bias=bias, mask=mask, causal="top_left" if is_causal else False, softmax_scale=scale,
        dropout_p=dropout_p, return_lse=bool(return_lse),
    )  # fmt: skip
    return (result[0], result[1].transpose(1, 2)) if return_lse else result


class AttnProcessor:
    """A processor of diffusers' ``Attention`` blocks: ``unet.set_attn_processor(AttnProcessor())``.

    For self and cross attention of Stable Diffusion's U-Nets and autoencoders. Blocks with added keys and values
    (``add_k_proj``) raise UnsupportedError.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalise, project, attend, project, and add what came in where the block says so."""
        if getattr(attn, "add_k_proj", None) is not None:
            reason = "add_k_proj: added keys and values are not projected. Leave this block its own processor."
            refuse("block of diffusers", [reason])
        residual = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        image = hidden_states.shape if hidden_states.dim() == 4 else None
        if image is not None:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            context = attn.norm_encoder_hidden_states(encoder_hidden_states)
        batch, length = context.shape[:2]
        query, key, value = (
            x.unflatten(-1, (attn.heads, -1))
            for x in (attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context))
        )
        if attn.norm_q is not None:
            query = attn.norm_q(query.transpose(1, 2)).transpose(1, 2)
        if attn.norm_k is not None:
            key = attn.norm_k(key.transpose(1, 2)).transpose(1, 2)
        if attention_mask is not None:
            attention_mask = attn.prepare_attention_mask(attention_mask, length, batch)
            attention_mask = attention_mask.unflatten(0, (batch, attn.heads))
        out = backend(query, key, value, attention_mask, scale=attn.scale).flatten(2)
        out = attn.to_out[1](attn.to_out[0](out))
        if image is not None:
            out = out.transpose(1, 2).reshape(image)
        if attn.residual_connection:
            out = out + residual
        result: torch.Tensor = out / attn.rescale_output_factor
        return result
