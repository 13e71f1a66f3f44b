"""Tiny random models of diffusers, with the inputs of a call.

Whoever imports this is skipped where diffusers is not installed.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from own_attention import torch, weighted_sum

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    attention_dispatch = pytest.importorskip(
        "diffusers.models.attention_dispatch", reason="this diffusers has no attention backends"
    )
    attention_processor = pytest.importorskip("diffusers.models.attention_processor")
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel


def flux(head_dim: int = 16, image: int = 16, text: int = 6) -> tuple[Any, dict[str, Any]]:
    """One double and one single block, whose attention goes through diffusers' backends."""
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=head_dim,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(head_dim // 4, head_dim // 4, head_dim // 2),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, image, 4), "encoder_hidden_states": torch.randn(1, text, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]), "img_ids": torch.rand(image, 3),
        "txt_ids": torch.zeros(text, 3),
    }  # fmt: skip
    return model, inputs


def unet(masked: bool, channels: tuple[int, int] = (8, 16), size: int = 8) -> tuple[Any, dict[str, Any]]:
    """Self and cross attention of Stable Diffusion, whose blocks have processors; with a mask of the text's tokens."""
    model = UNet2DConditionModel(
        sample_size=size, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=channels,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=12, attention_head_dim=2, norm_num_groups=4,
    )  # fmt: skip
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[1, 3:] = False
    inputs = {
        "sample": torch.randn(2, 4, size, size), "timestep": 3, "encoder_hidden_states": torch.randn(2, 5, 12),
        "encoder_attention_mask": keep if masked else None,
    }  # fmt: skip
    return model, inputs


def results(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The output, and the gradients of all weights, by name."""
    model.zero_grad()
    out = model(**inputs).sample
    weighted_sum(out).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **gradients}
