"""Problems of the kinds of `model_cases.py` that nobody chose: the heads are further models', everything else is drawn.

``drawn(seed)`` is the same for everybody. Nothing was tuned for them: they say what a choice by the kind of a problem
is worth on the next shape of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from model_cases import KINDS, Case, in_turns

PER_KIND = 8
Shape = Callable[[Case, np.random.Generator], Case]
"""What is drawn of a kind for a case that has its heads."""

# Query heads, key heads (0: the same number) and head dim of models; of the tables below heads and head dim.
LANGUAGE = {
    "Llama 3.2 3B": (24, 8, 128), "Qwen2.5 14B": (40, 8, 128), "Phi-4": (40, 10, 128), "Yi 6B": (32, 4, 128),
    "StarCoder2 7B": (36, 4, 128), "Qwen2.5 1.5B": (12, 2, 128), "Qwen2.5 0.5B": (14, 2, 64), "SmolLM 135M": (9, 3, 64),
    "OPT 1.3B": (32, 0, 64), "GPT-2 XL": (25, 0, 64), "Gemma 2B": (8, 1, 256), "Gemma 7B": (16, 0, 256),
    "StableLM 3B": (32, 0, 80), "GPT-NeoX 20B": (64, 0, 96), "DBRX": (48, 8, 128), "GPT-3": (96, 0, 128),
    "Command R+": (96, 8, 128), "MPT 7B": (32, 0, 128), "Granite 34B": (48, 1, 128), "OLMo 1B": (16, 0, 128),
}  # fmt: skip
ENCODER = {
    "BERT large": (16, 64), "RoBERTa base": (12, 64), "DeBERTa V3 small": (6, 64), "E5 Mistral": (32, 128),
    "ESM-2 650M": (20, 64), "ESM-2 3B": (40, 64), "ESM-2 150M": (20, 32), "Wav2Vec 2 large": (16, 64),
    "Whisper small": (12, 64), "Conformer": (8, 32),
}  # fmt: skip
VISION = {
    "ViT-L/14": (16, 64), "ViT-H/14": (16, 80), "ViT-G/14": (16, 104), "ViT-22B": (48, 128), "DeiT small": (6, 64),
    "SigLIP So400m": (16, 72), "InternViT 6B": (25, 128), "BEiT-3": (16, 64), "Hiera": (8, 96), "EVA-02 L": (16, 112),
}  # fmt: skip
DIFFUSION = {
    "Stable Diffusion 2.1": (10, 64), "Stable Diffusion 1.5": (8, 40), "DiT-XL/2": (16, 72), "Hunyuan Video": (24, 128),
    "Sana": (20, 112), "Mochi": (24, 128), "AuraFlow": (12, 256), "Lumina": (24, 96), "PixArt-sigma": (16, 72),
    "LTX-Video": (32, 64),
}  # fmt: skip
BIASED = {
    "Boltz, triangle attention": (4, 32), "ESMFold, triangle attention": (8, 32), "RoseTTAFold": (8, 64),
    "Swin-T": (3, 32), "Swin-L": (6, 32), "T5 large": (16, 64), "UL2": (16, 128), "Uni-Fold": (8, 16),
}  # fmt: skip


def drawn(seed: int) -> tuple[Case, ...]:
    """``PER_KIND`` problems of each kind, no two of a kind with the heads of one model."""
    rng = np.random.default_rng(seed)
    return tuple(in_turns(case for kind in KINDS for case in _kind(kind, rng)))


def _kind(kind: str, rng: np.random.Generator) -> Iterable[Case]:
    models = {
        "encoder": ENCODER, "vision": VISION, "diffusion": DIFFUSION, "cross": DIFFUSION | ENCODER, "bias": BIASED,
        "padding": ENCODER,
    }.get(kind, LANGUAGE)  # fmt: skip
    for n, which in enumerate(rng.permutation(len(models))[:PER_KIND]):
        name = list(models)[which]
        h, *hkv, d = models[name]
        yield _SHAPES[kind](Case(name=f"{kind} {n}: {name}", kind=kind, h=h, hkv=sum(hkv), d=d), rng)


def _length(rng: np.random.Generator, least: int, most: int) -> int:
    """Evenly over the logarithm; half of them multiples of 128, where they are long."""
    n = int(np.exp(rng.uniform(np.log(least), np.log(most))))
    step = 128 if most > 512 and rng.random() < 0.5 else 1
    return max(least, round(n / step) * step)


def _some(rng: np.random.Generator, most: float) -> int:
    """Sequences, between 1 and ``most``, evenly over the logarithm."""
    return max(1, int(np.exp(rng.uniform(0, np.log(most)))))


def _with_batch(case: Case, rng: np.random.Generator, work: float = 3e12) -> Case:
    """``case`` with up to 256 sequences: no more than take ``work`` operations where keys are as many as queries."""
    return replace(case, b=_some(rng, min(max(1.0, work / (4.0 * case.q * case.q * case.h * case.d)), 256)))


def _language(case: Case, rng: np.random.Generator) -> Case:
    return _with_batch(replace(case, q=_length(rng, 512, 16384), causal=True), rng)


def _window(case: Case, rng: np.random.Generator) -> Case:
    s = _length(rng, 2048, 16384)
    window = int(rng.choice([127, 255, 511, 1023, 2047, 4095]))
    softcap = float(rng.choice([0.0, 0.0, 30.0]))
    return _with_batch(replace(case, q=s, causal=True, window=(window, 0), softcap=softcap), rng)


def _mla(case: Case, rng: np.random.Generator) -> Case:
    h = int(rng.choice([16, 32, 40, 64, 128]))
    name = f"{case.name.split(':')[0]}: MLA of {h} heads"
    case = replace(case, name=name, h=h, hkv=0, d=192, dv=128)
    return _with_batch(replace(case, q=_length(rng, 512, 8192), causal=True), rng)


def _plain(least: int, most: int) -> Shape:
    return lambda case, rng: _with_batch(replace(case, q=_length(rng, least, most)), rng)


def _cross(case: Case, rng: np.random.Generator) -> Case:
    return _with_batch(replace(case, q=_length(rng, 256, 16384), k=_length(rng, 32, 1500)), rng, 1.5e12)


def _bias(case: Case, rng: np.random.Generator) -> Case:
    case = replace(case, bias="1hqk")
    if "Swin" in case.name:
        return replace(case, q=int(rng.choice([49, 64, 144, 256])), b=int(rng.choice([64, 256, 1024, 4096])))
    case = replace(case, q=8 * _length(rng, 16, 96))
    return replace(case, b=case.q) if "triangle" in case.name else _with_batch(case, rng)


def _padding(case: Case, rng: np.random.Generator) -> Case:
    case = _with_batch(replace(case, q=_length(rng, 256, 2048)), rng)
    b = max(4, case.b)
    lengths = tuple(int(x) for x in rng.integers(case.q // 8, case.q + 1, b))
    return replace(case, b=b, lengths=lengths, padding=str(rng.choice(["left", "right"])))


def _packed(case: Case, rng: np.random.Generator) -> Case:
    number = int(rng.integers(2, 64))
    documents = np.exp(rng.normal(np.log(rng.uniform(128, 2048)), rng.uniform(0.1, 1.2), number))
    packed = tuple(int(x) for x in np.clip(documents, 16, 16384))
    return replace(case, packed=packed, causal=bool(rng.random() < 0.7))


def _decode(case: Case, rng: np.random.Generator) -> Case:
    """Of at most 128 sequences and 2 GB of keys and values."""
    queries = int(rng.choice([1, 1, 1, 2, 4, 8, 16]))
    keys = _length(rng, 512, 32768)
    b = _some(rng, min(max(1.0, 2e9 / (4.0 * keys * case.heads_kv * case.d)), 128) + 1e-9)
    return replace(case, q=queries, k=keys, b=b, causal=queries > 1, backward=False)


def _tiny(case: Case, rng: np.random.Generator) -> Case:
    return replace(case, q=_length(rng, 32, 512), b=int(rng.integers(1, 5)), causal=bool(rng.random() < 0.5))


_SHAPES: dict[str, Shape] = {
    "language": _language, "window": _window, "mla": _mla, "encoder": _plain(128, 4096), "vision": _plain(49, 1600),
    "diffusion": _plain(256, 16384), "cross": _cross, "bias": _bias, "padding": _padding, "packed": _packed,
    "decode": _decode, "tiny": _tiny,
}  # fmt: skip
