"""Attention problems of published models: shapes, masks and biases, and the tensors of one.

A case's name begins with the model that it is from. ``CASES`` was written down before any kernel was tuned for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

KINDS = (
    "language", "window", "mla", "encoder", "vision", "diffusion", "cross", "bias", "padding", "packed", "decode",
    "tiny",
)  # fmt: skip
"""What a case can be chosen by, in the order of the report."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem: ``b`` sequences of ``q`` queries and ``k`` keys with ``h`` and ``hkv`` heads of ``d`` and ``dv``.

    0 for ``k``, ``hkv`` or ``dv`` means the same as for queries, heads and ``d``. A bias is ``"1hqk"``, say: a 1 is a
    dim of size 1, and its gradient is part of the backward pass. Of ``packed`` documents ``b`` and ``q`` are not used.
    """

    name: str
    kind: str
    b: int = 1
    q: int = 0
    k: int = 0
    h: int
    hkv: int = 0
    d: int
    dv: int = 0
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] | None = None
    """Keys to the left and right of the query's own that it sees; with ``causal`` the second is 0."""
    softcap: float = 0.0
    scale: float | None = None
    dropout: float = 0.0
    bias: str = ""
    padding: str = ""
    """``left`` or ``right``: which end of the keys is hidden, a mask of [B, 1, 1, Mk] with ``lengths`` kept."""
    lengths: tuple[int, ...] = ()
    block: int = 0
    """Not 0: queries see the keys of their own block, a mask of [1, 1, Mq, Mk]."""
    packed: tuple[int, ...] = ()
    backward: bool = True

    @property
    def seqlen_k(self) -> int:
        return self.k or self.q

    @property
    def heads_kv(self) -> int:
        return self.hkv or self.h

    @property
    def head_dim_v(self) -> int:
        return self.dv or self.d

    @property
    def shape(self) -> str:
        """For the table: batch x queries (x keys), heads (/ key heads), head dim (/ v's)."""
        if self.packed:
            where = f"{len(self.packed)} docs {min(self.packed)}-{max(self.packed)}"
        else:
            where = f"{self.b}x{self.q}" + (f"x{self.k}" if self.k else "")
        heads = f"{self.h}" + (f"/{self.hkv}" if self.hkv else "")
        return f"{where} H{heads} D{self.d}" + (f"/{self.dv}" if self.dv else "")

    def kept(self) -> list[np.ndarray[Any, Any]]:
        """For each sequence the number of keys that every query sees."""
        found = []
        for n in range(len(self.packed) or self.b):
            rows, keys = (self.packed[n],) * 2 if self.packed else (self.q, self.seqlen_k)
            last = np.arange(rows) + (keys - rows)  # the query's own key
            left, right = self.window or (keys + rows, keys + rows)
            low = np.clip(last - left, 0, keys)
            high = np.clip(last + (0 if self.causal else right) + 1, 0, keys)
            if self.block:
                own = np.arange(rows) // self.block * self.block
                low, high = np.maximum(low, own), np.minimum(high, own + self.block)
            if self.padding == "left":
                low = np.maximum(low, keys - self.lengths[n])
            elif self.padding == "right":
                high = np.minimum(high, self.lengths[n])
            found.append(np.maximum(high - low, 0))
        return found

    def flops(self) -> float:
        """Of the forward pass: two products over the scores that are kept."""
        return 2.0 * self.h * (self.d + self.head_dim_v) * float(sum(rows.sum() for rows in self.kept()))

    def tiny(self) -> Case:
        """The same kind of problem with few tokens and heads, for the CPU."""
        longest = max(self.q, self.seqlen_k, *(self.packed or (1,)))
        share = min(1.0, 40 / longest)

        def fewer(n: int, least: int = 1) -> int:
            return max(least, round(n * share)) if n > 16 else n

        b = min(self.b, 3)
        heads_kv = min(self.heads_kv, 2)
        return replace(
            self, b=b, q=fewer(self.q, 4), k=fewer(self.k, 4), h=heads_kv * min(self.h // self.heads_kv, 4),
            hkv=heads_kv if self.hkv else 0, window=self.window and (fewer(self.window[0]), fewer(self.window[1])),
            lengths=tuple(map(fewer, self.lengths[:b])), block=fewer(self.block),
            packed=tuple(map(fewer, self.packed[:5])),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of a case: [B, S, H, D], packed documents [1, T, H, D]; q, k, v and bias are leaves that want gradients.

    ``mask`` is the padding's or the blocks' alone; ``cu`` are the boundaries of packed documents.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    cu: torch.Tensor | None
    seen: torch.Tensor | None
    """[B, Mq]: rows that have a key, None where all have. ``dout`` is 0 in the others."""


def make_inputs(case: Case, device: str) -> Inputs:
    import torch

    dtype = getattr(torch, case.dtype)

    def randn(*shape: int, grad: bool = True) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=grad and case.backward)

    b, rows, keys = (1, sum(case.packed), sum(case.packed)) if case.packed else (case.b, case.q, case.seqlen_k)
    q, k = randn(b, rows, case.h, case.d), randn(b, keys, case.heads_kv, case.d)
    v, dout = randn(b, keys, case.heads_kv, case.head_dim_v), randn(b, rows, case.h, case.head_dim_v, grad=False)
    bias = None
    if case.bias:
        sizes = {"b": b, "h": case.h, "q": rows, "k": keys, "1": 1}
        bias = randn(*(sizes[letter] for letter in case.bias))
    seen = None
    if case.padding and case.causal:
        seen = torch.from_numpy(np.stack(case.kept()) > 0).to(device)
        dout *= seen[:, :, None, None]
    cu = None
    if case.packed:
        cu = torch.tensor([0, *np.cumsum(case.packed)], dtype=torch.int32, device=device)
    return Inputs(q=q, k=k, v=v, dout=dout, bias=bias, mask=mask_of(case, device), cu=cu, seen=seen)


def mask_of(case: Case, device: str) -> torch.Tensor | None:
    """True where a key takes part: [B, 1, 1, Mk] of padding, [1, 1, Mq, Mk] of blocks."""
    import torch

    key = torch.arange(case.seqlen_k, device=device)
    if case.padding:
        lengths = torch.tensor(case.lengths, device=device)[:, None]
        kept = key < lengths if case.padding == "right" else key >= case.seqlen_k - lengths
        return kept[:, None, None, :]
    if case.block:
        row = torch.arange(case.q, device=device)[:, None]
        return (row // case.block == key // case.block)[None, None]
    return None


def keep_of(case: Case, inputs: Inputs) -> torch.Tensor | None:
    """Everything that hides keys as one mask, [B|1, 1, Mq, Mk], None if nothing does; of packed documents, too.

    A row without a key sees its own, as transformers does it, because some kernels return NaN for such rows.
    """
    import torch

    if not (case.causal or case.window or case.packed or inputs.mask is not None):
        return None
    device = inputs.q.device
    rows, keys = inputs.q.shape[1], inputs.k.shape[1]
    own = torch.arange(rows, device=device)[:, None] + (keys - rows)
    key = torch.arange(keys, device=device)
    left, right = case.window or (keys + rows, keys + rows)
    keep = ((key >= own - left) & (key <= own + (0 if case.causal else right)))[None, None]
    if inputs.cu is not None:
        document = torch.bucketize(key, inputs.cu[1:], right=True)
        keep = keep & (document[:, None] == document)
    if inputs.mask is not None:
        keep = keep & inputs.mask
    if inputs.seen is not None:
        keep = keep | ((key == own) & ~inputs.seen[:, None, :, None])
    return keep


def options_of(case: Case, inputs: Inputs) -> dict[str, Any]:
    """Keyword arguments of `nvrtc_attn.torch.attention`."""
    options: dict[str, Any] = {"causal": case.causal}
    if case.window:
        options["window_size"] = (case.window[0], None if case.causal else case.window[1])
    if case.softcap:
        options["softcap"] = case.softcap
    if case.scale is not None:
        options["softmax_scale"] = case.scale
    if case.dropout:
        options["dropout_p"] = case.dropout
    if inputs.bias is not None:
        options["bias"] = inputs.bias
    if inputs.mask is not None:
        options["mask"] = inputs.mask
    if inputs.cu is not None:
        longest = max(case.packed)
        options |= {"cu_seqlens_q": inputs.cu, "cu_seqlens_k": inputs.cu}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return options


def spread(least: int, most: int, number: int) -> tuple[int, ...]:
    """``number`` lengths, evenly from ``least`` to ``most``, in a mixed but fixed order."""
    lengths = np.linspace(least, most, number).round().astype(int)
    return tuple(int(x) for x in np.random.default_rng(0).permutation(lengths))


def cases() -> Iterable[Case]:
    def language(name: str, b: int, s: int, h: int, hkv: int = 0, d: int = 128, **more: Any) -> Case:
        return Case(**({"kind": "language", "causal": True} | more), name=name, b=b, q=s, h=h, hkv=hkv, d=d)

    yield language("GPT-2 small, training", 16, 1024, 12, d=64)
    yield language("GPT-2 small with dropout, training", 16, 1024, 12, d=64, dropout=0.1)
    yield language("GPT-J 6B, training", 4, 2048, 16, d=256)
    yield language("Phi-2, training", 4, 2048, 32, d=80)
    yield language("Phi-3 mini, training", 2, 4096, 32, d=96)
    yield language("Llama 2 13B, training", 2, 4096, 40)
    yield language("Llama 3.2 1B, training", 4, 4096, 32, 8, 64)
    yield language("Llama 3.1 8B, training", 2, 8192, 32, 8)
    yield language("Llama 3.1 70B, training", 1, 8192, 64, 8)
    yield language("Llama 3.1 405B, training", 1, 4096, 128, 8)
    yield language("Qwen2.5 7B, training", 1, 4096, 28, 4)
    yield language("Qwen3 0.6B, training", 8, 2048, 16, 8)
    yield language("Qwen3 32B, training", 2, 4096, 64, 8)
    yield language("Qwen3 235B, training", 1, 16384, 64, 4)
    yield language("GLM-4 9B, training", 1, 8192, 32, 2)
    yield language("Falcon 7B, training", 2, 2048, 71, 1, 64)
    yield language("StarCoder, training", 1, 8192, 48, 1)
    yield language("Nemotron-4 340B, training", 1, 4096, 96, 8, 192)
    yield language("Mixtral 8x22B, prefill", 1, 32768, 48, 8, backward=False)
    yield language("Llama 3.1 8B, prefill", 1, 2048, 32, 8, backward=False)

    yield language("Mistral 7B, window 4096", 1, 16384, 32, 8, window=(4095, 0), kind="window")
    yield language("Gemma 2 9B, softcap", 1, 8192, 16, 8, 256, softcap=50.0, kind="window")
    yield language(
        "Gemma 2 27B, softcap and window 4096", 1, 8192, 32, 16, window=(4095, 0), softcap=50.0, kind="window"
    )
    yield language("Gemma 3 27B, window 1024", 1, 16384, 32, 16, window=(1023, 0), kind="window")
    yield language("Gemma 3 1B, window 512", 4, 4096, 4, 1, 256, window=(511, 0), kind="window")
    yield language("gpt-oss 20B, window 128", 2, 8192, 64, 8, 64, window=(127, 0), kind="window")

    yield language("DeepSeek-V3, MLA training", 1, 4096, 128, d=192, dv=128, kind="mla")
    yield language("DeepSeek-V2 Lite, MLA training", 2, 8192, 16, d=192, dv=128, kind="mla")

    def encoder(name: str, b: int, s: int, h: int, d: int = 64, **more: Any) -> Case:
        return Case(**({"kind": "encoder"} | more), name=name, b=b, q=s, h=h, d=d)

    yield encoder("BERT base", 32, 512, 12)
    yield encoder("XLM-R large", 64, 256, 16)
    yield encoder("ModernBERT base, global", 4, 8192, 12)
    yield encoder("ModernBERT base, window 128", 4, 8192, 12, window=(64, 64))
    yield encoder("Whisper large v3, encoder", 16, 1500, 20)

    yield encoder("ViT-B/16", 128, 197, 12, kind="vision")
    yield encoder("CLIP ViT-L/14 336", 64, 577, 16, kind="vision")
    yield encoder("SigLIP So400m/14 384", 32, 729, 16, 72, kind="vision")
    yield encoder("DINOv2 ViT-g/14 518", 16, 1370, 24, kind="vision")
    yield encoder("SAM ViT-H, windows", 200, 196, 16, 80, kind="vision")
    yield encoder("EVA-02 CLIP-E/14", 64, 257, 16, 112, kind="vision")

    def diffusion(name: str, b: int, s: int, h: int, d: int, **more: Any) -> Case:
        return Case(**({"kind": "diffusion"} | more), name=name, b=b, q=s, h=h, d=d)

    yield diffusion("Stable Diffusion 1.5, 64 x 64", 4, 4096, 8, 40, dtype="float16")
    yield diffusion("Stable Diffusion 1.5, 32 x 32", 8, 1024, 8, 80, dtype="float16")
    yield diffusion("Stable Diffusion, VAE", 2, 4096, 1, 512, dtype="float16")
    yield diffusion("SDXL, 64 x 64", 4, 4096, 10, 64, dtype="float16")
    yield diffusion("Stable Diffusion 3 medium", 2, 4429, 24, 64)
    yield diffusion("FLUX.1", 1, 4608, 24, 128)
    yield diffusion("PixArt-alpha 512", 16, 1024, 16, 72)
    yield diffusion("CogVideoX 5B", 1, 17776, 48, 64, backward=False)
    yield diffusion("Wan 2.1 1.3B, 480p", 1, 32760, 12, 128)

    yield diffusion("SDXL, text", 4, 4096, 10, 64, k=77, dtype="float16", kind="cross")
    yield diffusion("PixArt-alpha 512, text", 16, 1024, 16, 72, k=120, kind="cross")
    yield diffusion("Wan 2.1 14B, text", 1, 32760, 40, 128, k=512, kind="cross")
    yield encoder("Whisper large v3, decoder on audio", 16, 448, 20, k=1500, kind="cross")
    yield encoder("Idefics2, resampler", 16, 64, 16, 96, k=2048, hkv=4, kind="cross")

    def biased(name: str, b: int, s: int, h: int, d: int = 32, **more: Any) -> Case:
        return Case(kind="bias", name=name, b=b, q=s, h=h, d=d, bias="1hqk", **more)

    yield biased("AlphaFold 2, triangle attention", 256, 256, 4)
    yield biased("AlphaFold 3, triangle attention", 384, 384, 4)
    yield biased("AlphaFold 2, rows of the MSA", 128, 256, 8)
    yield biased("Evoformer of OpenFold, crop of 128", 512, 128, 8)
    yield biased("Swin-B, stage 1", 4096, 49, 4)
    yield biased("Swin-B, stage 3", 256, 49, 16)
    yield biased("Swin V2-B, windows of 16", 1024, 256, 4)
    yield biased("T5 base, encoder", 16, 512, 12, 64, scale=1.0)

    lengths = spread(256, 1024, 32)
    yield encoder("BERT large, right padding", 32, 1024, 16, padding="right", lengths=lengths, kind="padding")
    yield encoder("BGE-M3, left padding", 32, 1024, 16, padding="left", lengths=lengths, kind="padding")
    yield language(
        "Llama 3.1 8B, left padding", 16, 2048, 32, 8, padding="left", lengths=spread(300, 2048, 16), kind="padding"
    )
    yield encoder(
        "NLLB 3.3B, padded source", 32, 256, 16, 128, k=1024, padding="right", lengths=lengths, kind="padding"
    )
    yield encoder("Qwen2.5-VL, four images", 1, 4096, 16, 80, block=1024, kind="padding")

    def packed(name: str, documents: tuple[int, ...], h: int, hkv: int = 0, d: int = 128, causal: bool = True) -> Case:
        return Case(kind="packed", name=name, packed=documents, h=h, hkv=hkv, d=d, causal=causal)

    skewed = (64, 128, 4096, 256, 777, 2048, 512, 1024, 96, 3000, 1500)
    yield packed("Llama 3.1 8B, even documents", (1024,) * 16, 32, 8)
    yield packed("Pythia 410M, skewed documents", skewed, 16, d=64)
    yield packed("Pythia 1.4B, skewed documents", skewed, 16)
    yield packed("Llama 3.1 8B, one long document", (32768, *(512,) * 63), 32, 8)
    yield packed("ModernBERT base, unpadded", spread(32, 512, 64), 12, d=64, causal=False)
    yield packed("SigLIP 2 NaFlex, images", spread(64, 1024, 48), 16, d=72, causal=False)

    def decode(name: str, b: int, keys: int, h: int, hkv: int = 0, d: int = 128, queries: int = 1) -> Case:
        return Case(
            kind="decode", name=name, b=b, q=queries, k=keys, h=h, hkv=hkv, d=d, causal=queries > 1, backward=False
        )

    yield decode("Llama 3.1 8B, decode 1", 1, 8192, 32, 8)
    yield decode("Llama 3.1 8B, decode 16", 16, 4096, 32, 8)
    yield decode("Llama 3.1 8B, decode 64", 64, 4096, 32, 8)
    yield decode("Llama 2 7B, decode 8", 8, 4096, 32)
    yield decode("Llama 3.1 70B, decode 8", 8, 2048, 64, 8)
    yield decode("gpt-oss 20B, decode 8", 8, 2048, 64, 8, 64)
    yield decode("StarCoder, decode 32", 32, 8192, 48, 1)
    yield decode("Llama 3.1 8B, speculative 4 x 4", 4, 8192, 32, 8, queries=4)
    yield decode("Llama 3.1 8B, speculative 1 x 8", 1, 8192, 32, 8, queries=8)
    yield decode("Llama 3.1 8B, speculative 64 x 2", 64, 2048, 32, 8, queries=2)
    yield decode("Qwen3 32B, speculative 16 x 16", 16, 4096, 64, 8, queries=16)

    yield language("nanoGPT on characters", 64, 256, 6, d=64, kind="tiny")
    yield language("CLIP text encoder", 64, 77, 12, d=64, kind="tiny")
    yield encoder("MiniLM, one sentence", 1, 128, 12, 32, kind="tiny")
    yield encoder("DiT-XL/2 256", 4, 256, 16, 72, kind="tiny")
    yield diffusion("Stable Diffusion 1.5, 16 x 16", 4, 256, 8, 160, dtype="float16", kind="tiny")
    yield encoder("Whisper tiny, encoder", 1, 1500, 6, kind="tiny")


CASES = tuple(cases())


def in_turns(chosen: Iterable[Case]) -> list[Case]:
    """One case of each kind after the other, so that a run that is cut short has seen every kind."""
    kinds: dict[str, list[Case]] = {kind: [] for kind in KINDS}
    for case in chosen:
        kinds[case.kind].append(case)
    number = max(map(len, kinds.values()), default=0)
    return [group[n] for n in range(number) for group in kinds.values() if n < len(group)]
