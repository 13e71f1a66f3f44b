"""Tiny random models of transformers with images, sound or two stacks, and the arguments of their calls, by name.

Whoever imports this is skipped where transformers is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from own_attention import torch
from transformers_models import SMALL, image, tokens, transformers

TEXT = {**SMALL.text, "head_dim": SMALL.head_dim, "initializer_range": 0.2}
BERT = {
    **{word: x for word, x in TEXT.items() if word not in ("num_key_value_heads", "head_dim")},
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 12,
    "patch_size": 4, "num_channels": 3, "initializer_range": 0.2,
}  # fmt: skip
STACKS = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "init_std": 0.2, "forced_eos_token_id": None,
}  # fmt: skip
SOUND = {
    **BERT, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer", "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
PICTURE = 60  # the token that stands for a part of an image


class Family(NamedTuple):
    """How to make a model, and what it is called with, without and with padding on either side."""

    make: Callable[[], Any]
    given: Callable[[], dict[str, Any]]
    padded: bool = False
    """Whether it takes an ``attention_mask`` of the tokens in ``input_ids``."""
    generates: bool = False


def model_of(name: str, kind: str = "Model", **words: Any) -> Callable[[], Any]:
    """A function that makes the model ``name`` of a configuration with these words."""
    return lambda: getattr(transformers, name + kind)(getattr(transformers, name + "Config")(**words))


def text() -> dict[str, Any]:
    return {"input_ids": tokens()[0] % 55 + 3}


def two_texts() -> dict[str, Any]:
    return {**text(), "decoder_input_ids": tokens(5)[0], "use_cache": False}


def pixels() -> dict[str, Any]:
    return {"pixel_values": image()}


def wave() -> dict[str, Any]:
    keep = torch.ones(2, 1600, dtype=torch.int64)
    keep[0, 1000:] = 0
    return {"input_values": torch.randn(2, 1600), "attention_mask": keep}


def text_and_image(parts: int, size: int = 8, axes: int = 4, **more: Any) -> Callable[[], dict[str, Any]]:
    """Tokens of which ``parts`` stand for the image; some models take several images a sequence (``axes=5``)."""

    def given() -> dict[str, Any]:
        ids = text()["input_ids"]
        ids[:, 3 : 3 + parts] = PICTURE
        x = torch.randn(2, 3, size, size)
        made = {word: make(ids) for word, make in more.items()}
        return {"input_ids": ids, "pixel_values": x if axes == 4 else x[:, None], **made}

    return given


def packed_images() -> dict[str, Any]:
    """Two images of other sizes in one row of patches, as Qwen's vision models have them."""
    ids = torch.randint(5, 58, (2, 12))
    ids[0, 3:8] = torch.tensor([62, *[PICTURE] * 4])
    ids[1, 4:7] = torch.tensor([62, *[PICTURE] * 2])
    return {
        "input_ids": ids, "pixel_values": torch.randn(24, 96), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]]),
        "mm_token_type_ids": (ids == PICTURE).int(),
    }  # fmt: skip


def tiles() -> dict[str, Any]:
    """One image of one tile, one of two, which tokens see from the third on."""
    seen = torch.zeros(2, SMALL.tokens, 1, 2, dtype=torch.int64)
    seen[:, 3:] = 1
    seen[0, :, :, 1] = 0
    return {
        **text(), "pixel_values": torch.randn(2, 1, 2, 3, 16, 16), "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 1]]]), "cross_attention_mask": seen,
    }  # fmt: skip


def qwen(name: str, **vision: Any) -> Family:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "in_channels": 3, **vision,
    }  # fmt: skip
    make = model_of(
        name, "ForConditionalGeneration", text_config={**TEXT, "rope_parameters": rope}, vision_config=vision,
        image_token_id=PICTURE, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63,
    )  # fmt: skip
    return Family(make, packed_images, padded=True, generates=True)


def seen_by(name: str, parts: int, vision: str | None, text: str | None, axes: int = 4, **words: Any) -> Family:
    """A decoder with the tower ``vision`` for its images; None is the tower or the decoder that ``name`` has itself."""
    types = ({"model_type": x} if x else {} for x in (vision, text))
    make = model_of(
        name, "ForConditionalGeneration", vision_config={**VISION, "image_size": 8, **next(types)},
        text_config={**TEXT, **next(types), "sliding_window": None}, **words,
    )  # fmt: skip
    return Family(make, text_and_image(parts, axes=axes), padded=True, generates=True)


def two_stacks(name: str, kind: str = "ForConditionalGeneration", **words: Any) -> Family:
    return Family(model_of(name, kind, **{**STACKS, **words}), two_texts, padded=True, generates=True)


def t5gemma() -> Family:
    stack = {**TEXT, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    return two_stacks(
        "T5Gemma", encoder=dict(stack), decoder={**stack, "cross_attention_hidden_size": 32}, dropout_rate=0.0
    )


def speech() -> dict[str, Any]:
    keep = torch.ones(2, 40, dtype=torch.int64)
    keep[0, 25:] = 0
    return {
        "input_features": torch.randn(2, 40, 8), "attention_mask": keep, "decoder_input_ids": tokens(5)[0],
        "use_cache": False,
    }  # fmt: skip


MOONSHINE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
    "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "initializer_range": 0.2,
}  # fmt: skip
PERCEIVER = {
    "hidden_size": 32, "resampler_n_latents": 3, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
MLLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4, "intermediate_size": 48,
    "image_size": 16, "patch_size": 4, "max_num_tiles": 2, "vision_output_dim": 64, "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
}  # fmt: skip
SAM = {
    "vision_config": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 12, "patch_size": 4,
        "output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48, "num_pos_feats": 8,
    },
    "prompt_encoder_config": {
        "hidden_size": 16, "image_size": 12, "patch_size": 4, "mask_input_channels": 4, "image_embedding_size": 3,
    },
    "mask_decoder_config": {
        "hidden_size": 16, "mlp_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "iou_head_hidden_dim": 16, "attention_downsample_rate": 1,
    },
}  # fmt: skip
FAMILIES = {
    **{
        name: Family(model_of(name, **VISION), pixels)
        for name in ("DeiT", "Dinov2", "Dinov2WithRegisters", "IJepa", "CLIPVision", "SiglipVision")
    },
    "BEiT": Family(model_of("Beit", **VISION, use_relative_position_bias=True), pixels),
    "DINOv3": Family(model_of("DINOv3ViT", **VISION, num_register_tokens=2), pixels),
    "Segformer": Family(
        model_of(
            "Segformer", depths=[1, 1], hidden_sizes=[16, 32], num_attention_heads=[2, 4], sr_ratios=[2, 1],
            num_encoder_blocks=2, patch_sizes=[7, 3], strides=[2, 2], mlp_ratios=[2, 2],
        ),
        pixels,
    ),
    "Swin": Family(
        model_of("Swin", image_size=12, patch_size=2, embed_dim=16, depths=[2], num_heads=[2], window_size=4), pixels
    ),
    "SAM": Family(
        model_of("Sam", **SAM),
        lambda: {**pixels(), "input_points": torch.rand(2, 1, 2, 2) * 12, "multimask_output": False},
    ),
    **{name: Family(model_of(name, **SOUND), wave) for name in ("Wav2Vec2", "Hubert", "Data2VecAudio", "UniSpeech")},
    "Speech2Text": Family(
        model_of(
            "Speech2Text", "ForConditionalGeneration", **STACKS, input_feat_per_channel=8, conv_channels=16,
            max_source_positions=64, max_target_positions=64,
        ),
        speech, generates=True,
    ),
    "Moonshine": Family(
        model_of("Moonshine", "ForConditionalGeneration", **MOONSHINE),
        lambda: {"input_values": torch.randn(2, 4000), "decoder_input_ids": tokens(5)[0], "use_cache": False},
        generates=True,
    ),
    "Qwen2-VL": qwen("Qwen2VL", embed_dim=32, mlp_ratio=2),
    "Qwen2.5-VL": qwen(
        "Qwen2_5_VL", intermediate_size=48, out_hidden_size=32, window_size=8, fullatt_block_indexes=[1]
    ),
    "Qwen3-VL": qwen(
        "Qwen3VL", intermediate_size=48, out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0]
    ),
    "LLaVA": seen_by(
        "Llava", 4, "clip_vision_model", "llama", image_token_index=PICTURE, vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    ),
    "PaliGemma": seen_by("PaliGemma", 4, "siglip_vision_model", "gemma", image_token_index=PICTURE, projection_dim=32),
    "Idefics2": seen_by(
        "Idefics2", 3, None, "mistral", axes=5, image_token_id=PICTURE, perceiver_config=PERCEIVER
    ),
    "Idefics3": seen_by("Idefics3", 1, None, "llama", axes=5, image_token_id=PICTURE, scale_factor=2),
    "SmolVLM": seen_by("SmolVLM", 1, None, "llama", axes=5, image_token_id=PICTURE, scale_factor=2),
    "Gemma 3": Family(
        model_of(
            "Gemma3", "ForConditionalGeneration", vision_config={**VISION, "image_size": 8},
            text_config={**TEXT, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
            image_token_index=PICTURE, mm_tokens_per_image=4,
        ),
        text_and_image(4, token_type_ids=lambda ids: (ids == PICTURE).long()), padded=True, generates=True,
    ),
    "InternVL": Family(
        model_of(
            "InternVL", "ForConditionalGeneration", text_config={**TEXT, "model_type": "qwen2"},
            vision_config={**VISION, "image_size": [8, 8], "patch_size": [4, 4]}, image_token_id=PICTURE,
            downsample_ratio=0.5,
        ),
        text_and_image(1), padded=True, generates=True,
    ),
    "Mllama": Family(
        model_of(
            "Mllama", "ForConditionalGeneration", vision_config=MLLAMA, image_token_index=63,
            text_config={**TEXT, "cross_attention_layers": [1]},
        ),
        tiles, padded=True,
    ),
    "BART": two_stacks("Bart"),
    "mBART": two_stacks("MBart"),
    "Pegasus": two_stacks("Pegasus"),
    "M2M100": two_stacks("M2M100"),
    "Marian": two_stacks("Marian", "MTModel"),
    "T5Gemma": t5gemma(),
    # Models whose modules do not say what eager attention does.
    "Pegasus-X": two_stacks("PegasusX", num_global_tokens=2, block_size=4),
    "BigBird-Pegasus": two_stacks("BigBirdPegasus", attention_type="original_full"),
    "NLLB-MoE": two_stacks(
        "NllbMoe", num_experts=2, expert_capacity=64, encoder_sparse_step=2, decoder_sparse_step=2
    ),
    "Gemma, bidirectional": Family(model_of("Gemma", **TEXT, use_bidirectional_attention=True), text, padded=True),
    **{
        name: Family(model_of(name, **BERT), text, padded=True)
        for name in ("Roberta", "XLMRoberta", "Electra", "Splinter", "MarkupLM", "LayoutLM", "ClapText", "AlignText")
    },
    "ModernBERT": Family(
        model_of("ModernBert", **BERT, local_attention=4, global_attn_every_n_layers=2), text, padded=True
    ),
}  # fmt: skip
OWN_ATTENTION = {
    "Bloom": model_of("Bloom", vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2),
    "MPT": model_of("Mpt", vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, initializer_range=0.2),
    **{name: model_of(name, **BERT) for name in ("MegatronBert", "RemBert", "MPNet", "ConvBert", "Tapas")},
    "LUKE": model_of("Luke", **BERT, entity_vocab_size=4, entity_emb_size=8),
    "MVP": model_of("Mvp", **STACKS),
}
