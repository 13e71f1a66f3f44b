"""Problems of the kinds of `model_cases.py` that nobody chose: the heads are further models', everything else is drawn.

``drawn(seed)`` is the same for everybody. Nothing was tuned for them: they say what a choice by the kind of a problem
is worth on the next shape of that kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from model_cases import KINDS, Case, in_turns

PER_KIND = 8

# Models' query heads, key heads (0: the same number) and head dim.
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
        heads = models[name]
        h, hkv, d = (heads[0], heads[1], heads[2]) if len(heads) == 3 else (heads[0], 0, heads[1])
        case = Case(name=f"{kind} {n}: {name}", kind=kind, h=h, hkv=hkv, d=d)
        yield replace(case, **_SHAPES[kind](case, rng))


def _length(rng: np.random.Generator, least: int, most: int) -> int:
    """Evenly over the logarithm; half of them multiples of 128, where they are long."""
    n = int(np.exp(rng.uniform(np.log(least), np.log(most))))
    step = 128 if most > 512 and rng.random() < 0.5 else 1
    return max(least, round(n / step) * step)


def _batch(rng: np.random.Generator, case: Case, tokens: int, work: float = 3e12) -> int:
    """Sequences of ``tokens``, between 1 and as many as take ``work`` operations, evenly over the logarithm."""
    most = max(1.0, work / (4.0 * tokens * tokens * case.h * case.d))
    return max(1, int(np.exp(rng.uniform(0, np.log(min(most, 256))))))


def _language(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    s = _length(rng, 512, 16384)
    return {"q": s, "b": _batch(rng, case, s), "causal": True}


def _window(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    s = _length(rng, 2048, 16384)
    window = int(rng.choice([127, 255, 511, 1023, 2047, 4095]))
    softcap = float(rng.choice([0.0, 0.0, 30.0]))
    return {"q": s, "b": _batch(rng, case, s), "causal": True, "window": (window, 0), "softcap": softcap}


def _mla(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    h = int(rng.choice([16, 32, 40, 64, 128]))
    case = replace(case, h=h, hkv=0, d=192, dv=128)
    s = _length(rng, 512, 8192)
    name = f"{case.name.split(':')[0]}: MLA of {h} heads"
    return {"name": name, "h": h, "hkv": 0, "d": 192, "dv": 128, "q": s, "b": _batch(rng, case, s), "causal": True}


def _plain(least: int, most: int) -> Any:
    def shape(case: Case, rng: np.random.Generator) -> dict[str, Any]:
        s = _length(rng, least, most)
        return {"q": s, "b": _batch(rng, case, s)}

    return shape


def _cross(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    s, k = _length(rng, 256, 16384), _length(rng, 32, 1500)
    return {"q": s, "k": k, "b": _batch(rng, case, s, 1.5e12)}


def _bias(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    if case.name.endswith(("Swin-T", "Swin-L")):
        s = int(rng.choice([49, 64, 144, 256]))
        return {"q": s, "b": int(rng.choice([64, 256, 1024, 4096])), "bias": "1hqk"}
    s = 8 * _length(rng, 16, 96)
    return {"q": s, "b": max(1, s if "triangle" in case.name else _batch(rng, case, s)), "bias": "1hqk"}


def _padding(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    s = _length(rng, 256, 2048)
    b = max(4, _batch(rng, case, s))
    lengths = tuple(int(x) for x in rng.integers(s // 8, s + 1, b))
    return {"q": s, "b": b, "padding": str(rng.choice(["left", "right"])), "lengths": lengths}


def _packed(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    number = int(rng.integers(2, 64))
    documents = np.exp(rng.normal(np.log(rng.uniform(128, 2048)), rng.uniform(0.1, 1.2), number))
    return {"packed": tuple(int(x) for x in np.clip(documents, 16, 16384)), "causal": bool(rng.random() < 0.7)}


def _decode(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    queries = int(rng.choice([1, 1, 1, 2, 4, 8, 16]))
    keys = _length(rng, 512, 32768)
    most = max(1.0, 2e9 / (4.0 * keys * case.heads_kv * case.d))
    b = int(np.exp(rng.uniform(0, np.log(min(most, 128) + 1e-9))))
    return {"q": queries, "k": keys, "b": max(1, b), "causal": queries > 1, "backward": False}


def _tiny(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    return {"q": _length(rng, 32, 512), "b": int(rng.integers(1, 5)), "causal": bool(rng.random() < 0.5)}


_SHAPES: dict[str, Any] = {
    "language": _language, "window": _window, "mla": _mla, "encoder": _plain(128, 4096), "vision": _plain(49, 1600),
    "diffusion": _plain(256, 16384), "cross": _cross, "bias": _bias, "padding": _padding, "packed": _packed,
    "decode": _decode, "tiny": _tiny,
}  # fmt: skip
