"""FlexAttention's documented examples, as functions over captured tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import flex_attention as theirs

B, H, M, N, E = 2, 4, 24, 24, 8
EXAMPLES: dict[str, Any] = {}
TABLE = torch.linspace(-1, 1, 2 * M * H).reshape(2 * M, H)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENTS = torch.tensor([0] * 7 + [1] * 9 + [2] * 8)
OFFSETS = torch.tensor([0, 7, 16, 24])
PREFIX = torch.tensor([5, 11])
BUCKETS = (torch.arange(M)[:, None] - torch.arange(N)[None]).abs().clamp(max=6)


def example(function: Any) -> Any:
    EXAMPLES[function.__name__] = function
    return function


@example
def noop(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score


@example
def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    bias = SLOPES[h] * (kv_idx - q_idx)
    return score + bias


@example
def alibi_formula(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    scale = torch.exp2(-((h + 1) * 8.0 / H))
    return score + (kv_idx - q_idx) * scale


@example
def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (q_idx - kv_idx)


@example
def relative_table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[q_idx - kv_idx + M, h]


@example
def swin(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[BUCKETS[q_idx, kv_idx], h]


@example
def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 20.0 * torch.tanh(score / 20.0)


@example
def causal_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


@example
def methods(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    far = (q_idx - kv_idx).abs().clamp(min=1).to(torch.float32).log()
    return score.masked_fill(kv_idx % 5 == 4, -1e4) - far.sigmoid() * 0.5 - torch.ones_like(far)


@example
def two_arrays(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    same = DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]
    return torch.where(same & (kv_idx - OFFSETS[DOCUMENTS[kv_idx]] < 6), score * SLOPES[h], score - 3)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def sliding(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 6)


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= PREFIX[b]


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def natten(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    width, half = 6, 1
    q_x, q_y = q_idx // width, q_idx % width
    kv_x, kv_y = kv_idx // width, kv_idx % width
    center_x = q_x.clamp(half, 4 - 1 - half)
    center_y = q_y.clamp(half, width - 1 - half)
    return ((center_x - kv_x).abs() <= half) & ((center_y - kv_y).abs() <= half)


def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.logical_and((q_idx - kv_idx) % 2 == 0, torch.abs(q_idx - kv_idx) <= 8)


MASKS = {
    "causal": causal, "sliding": sliding, "prefix_lm": theirs.or_masks(prefix, causal), "document": document,
    "document_causal": theirs.and_masks(document, causal), "natten": natten, "dilated": dilated,
}  # fmt: skip


def tensors(dtype: Any = torch.float32, heads: int = H) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, M, E), (B, heads, N, E), (B, heads, N, E))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)  # type: ignore[return-value]
