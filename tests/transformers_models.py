"""Tiny random models of transformers, small for the CPU, large enough for tiles on the GPU, and what they compute.

Whoever imports this is skipped where transformers is not installed.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from own_attention import torch, weighted_sum

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("transformers.masking_utils", reason="this transformers has no mask interface")
    from transformers.generation.logits_process import LogitsProcessorList  # noqa: F401  loads generation now


@dataclass(frozen=True)
class Size:
    """What a model is made of; ``spread`` is the standard deviation of its weights."""

    head_dim: int = 8
    tokens: int = 9
    window: int = 4
    image: int = 12
    experts: int = 2
    spread: float = 0.02

    @property
    def width(self) -> int:
        return 4 * self.head_dim

    @property
    def positions(self) -> int:
        return 64 if self.tokens < 32 else 2 * self.tokens

    @property
    def text(self) -> dict[str, Any]:
        """The words of a configuration that most models of text share."""
        return {
            "vocab_size": 64, "hidden_size": self.width, "intermediate_size": self.width * 3 // 2,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": self.positions,
            "initializer_range": self.spread,
        }  # fmt: skip


SMALL = Size()
# One expert: which of two a token goes to is no continuous function, and rounding decides it. Weights of 0.08 give
# scores that differ, where those of 0.02 give nearly uniform ones, whose mask alone could be seen to be wrong.
LARGE = Size(head_dim=64, tokens=150, window=64, image=48, experts=1, spread=0.08)


def llama(size: Size = SMALL) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size.text))


def gemma2(size: Size = SMALL) -> Any:
    config = transformers.Gemma2Config(
        **size.text, head_dim=size.head_dim, sliding_window=size.window, attn_logit_softcapping=2.0,
        query_pre_attn_scalar=4, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss(size: Size = SMALL) -> Any:
    config = transformers.GptOssConfig(
        **size.text, head_dim=size.head_dim, sliding_window=size.window, num_local_experts=size.experts,
        num_experts_per_tok=1, rope_scaling=None, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)  # uninitialised memory otherwise
    return model


def t5(size: Size = SMALL) -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=size.width, d_kv=size.head_dim, d_ff=size.width * 3 // 2, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(weight)
    return model


def whisper(size: Size = SMALL) -> Any:
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=size.width, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
        max_source_positions=size.tokens + 1, max_target_positions=max(32, size.tokens), pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0, init_std=size.spread,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def vit(size: Size = SMALL) -> Any:
    config = transformers.ViTConfig(
        hidden_size=size.width, num_hidden_layers=2, num_attention_heads=4, intermediate_size=size.width * 3 // 2,
        image_size=size.image, patch_size=4, initializer_range=size.spread,
    )  # fmt: skip
    return transformers.ViTModel(config, add_pooling_layer=False)


def bert(size: Size = SMALL) -> Any:
    config = transformers.BertConfig(**size.text, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertModel(config, add_pooling_layer=False)


def deepseek_v32(size: Size = SMALL) -> Any:
    """Each query sees the three keys that an indexer chooses; values are shorter than keys."""
    config = transformers.DeepseekV32Config(
        **{**size.text, "num_key_value_heads": 4}, n_routed_experts=size.experts, num_experts_per_tok=size.experts,
        moe_intermediate_size=16, first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=size.head_dim, qk_nope_head_dim=2 * size.head_dim, v_head_dim=2 * size.head_dim, index_topk=3,
        index_head_dim=2 * size.head_dim, index_n_heads=2,
    )  # fmt: skip
    return transformers.DeepseekV32ForCausalLM(config)


def minimax_m3(size: Size = SMALL) -> Any:
    """Each query sees two blocks of two keys, which are others for each key head."""
    config = transformers.MiniMaxM3VLTextConfig(
        **size.text, head_dim=size.head_dim, num_local_experts=size.experts, num_experts_per_tok=size.experts,
        index_block_size=2, index_topk_blocks=2, index_n_heads=2, index_head_dim=size.head_dim,
        dense_intermediate_size=48, shared_intermediate_size=16, layer_types=["minimax_m3_sparse"] * 2,
    )  # fmt: skip
    return transformers.MiniMaxM3VLForCausalLM(config)


def gemma4(size: Size = SMALL) -> Any:
    """The last two layers have the keys of the first two, and only the queries whose logits are asked for."""
    config = transformers.Gemma4TextConfig(
        **{**size.text, "num_hidden_layers": 4}, head_dim=size.head_dim, global_head_dim=2 * size.head_dim,
        sliding_window=size.window, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=64,
    )  # fmt: skip
    return transformers.Gemma4ForCausalLM(config)


DECODERS = {"llama": llama, "gemma2": gemma2, "gpt_oss": gpt_oss}
MODELS = {**DECODERS, "t5": t5, "whisper": whisper, "vit": vit, "bert": bert}


def tokens(rows: int = SMALL.tokens) -> tuple[Any, Any]:
    """Token ids of two sequences, the first padded on the left by a third."""
    ids = torch.randint(3, 64, (2, rows))
    keep = torch.ones_like(ids)
    keep[0, : max(3, rows // 3)] = 0
    return ids, keep


def sound(size: Size = SMALL) -> Any:
    """What Whisper's encoder takes: two frames for each of its positions."""
    return torch.randn(2, 8, 2 * (size.tokens + 1))


def image(size: Size = SMALL) -> Any:
    return torch.randn(2, 3, size.image, size.image)


def inputs(name: str, size: Size) -> tuple[dict[str, Any], Any]:
    """Arguments of a model's call, and which rows of its output count (None: all)."""
    if name == "vit":
        return {"pixel_values": image(size)}, None
    ids, keep = tokens(size.tokens)
    if name == "whisper":
        return {"input_features": sound(size), "decoder_input_ids": ids[:, : size.tokens // 2]}, None
    if name == "t5":
        return {"input_ids": ids, "attention_mask": keep, "decoder_input_ids": ids[:, : size.tokens // 2]}, None
    return {"input_ids": ids, "attention_mask": keep}, keep


def results(model: Any, implementation: str, keep: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The output of the rows that count, and the gradients of all weights, by name."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    result = model(**given)
    out = result[next(name for name in ("logits", "last_hidden_state", "pred_masks") if name in result)]
    out = out if keep is None else out[keep.bool()]
    weighted_sum(out).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **gradients}


def generated(model: Any, arguments: dict[str, Any], count: int, **more: Any) -> list[Any]:
    """The tokens that the model generates, ``count`` of them, with eager attention and with ours."""
    outputs = []
    for implementation in ("eager", "nvrtc_attn"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            outputs.append(
                model.generate(
                    **arguments,
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    disable_compile=True,
                    **more,
                )
            )
    return outputs


def check_generate(name: str, cache: str, rows: int, size: Size = SMALL, device: str = "cpu") -> None:
    """Greedy and beam search over a cache, "dynamic" or "static", give the tokens of eager attention."""
    if name == "whisper" and cache == "static":
        pytest.skip("Whisper's generate makes its own caches")
    model = MODELS[name](size).eval().to(device)
    ids, keep = (x.to(device) for x in tokens(rows))
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": keep}
    if name == "whisper":
        arguments = {"input_features": sound(size).to(device), "language": None}
    kind = None if cache == "dynamic" else cache
    for beams in (1, 2):
        eager, ours = generated(model, arguments, 8, num_beams=beams, cache_implementation=kind)
        torch.testing.assert_close(ours, eager, atol=0, rtol=0)


def continued(model: Any, implementation: str, ids: Any, keep: Any, cached: int) -> Any:
    """The logits of the tokens behind the first ``cached`` ones, whose keys come from a cache."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        first = model(input_ids=ids[:, :cached], attention_mask=keep[:, :cached], use_cache=True)
        rest = model(input_ids=ids[:, cached:], attention_mask=keep, past_key_values=first.past_key_values)
    return rest.logits


def trainer_losses(
    implementation: str, folder: Path, size: Size = SMALL, steps: int = 2, **options: Any
) -> list[float]:
    """What Hugging Face's Trainer logs of a Llama's steps; sequences are padded."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**size.text)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    ids, _ = tokens(size.tokens)
    keep = torch.ones_like(ids)
    keep[0, -(size.tokens // 3) :] = 0  # behind: no label is predicted from a row that sees no key
    rows = [
        {"input_ids": row, "attention_mask": mask, "labels": row.where(mask.bool(), -100)}
        for row, mask in zip(ids, keep, strict=True)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / implementation), max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
