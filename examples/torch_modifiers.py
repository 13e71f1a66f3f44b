"""Attention with functions of your own in PyTorch: learned relative bias, sinks and dropout in packed documents.

    python examples/torch_modifiers.py

Autograd finds the table that the function captured, and the sinks; `FlexAttention`'s functions run unchanged.
Before the training, out and both gradients are compared with PyTorch's own operations on whole matrices of scores.
"""

from __future__ import annotations

import sys
from typing import Any

try:
    import torch

    from nvrtc_attn.torch import attention
except ImportError as error:
    print(f'skipped: PyTorch is not installed ({error}). pip install "nvrtc-attn[torch]"')
    sys.exit(0)

LENGTHS, HEADS, HEAD_DIM = (10, 24, 14), 2, 16


def dense(q: Any, k: Any, v: Any, table: Any, sink: Any) -> Any:
    """The same attention without dropout, document by document with whole matrices of scores."""
    parts = []
    for q_, k_, v_ in zip(*(x.split(LENGTHS, dim=1) for x in (q, k, v)), strict=True):
        positions = torch.arange(q_.shape[1], device=q.device)
        distances = positions[:, None] - positions
        scores = torch.einsum("bihd,bjhd->bhij", q_, k_) / HEAD_DIM**0.5
        scores = (8 * torch.tanh(scores / 8) + table[:, distances.clamp(0)]).masked_fill(distances < 0, -torch.inf)
        column = sink[None, :, None, None].expand(*scores.shape[:3], 1)
        p = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        parts.append(torch.einsum("bhij,bjhd->bihd", p, v_))
    return torch.cat(parts, 1)


def compare(what: str, found: Any, expected: Any) -> None:
    difference = (found - expected).detach().abs().max().item()
    print(f"{what}: largest difference {difference:.1e}")
    assert difference < 1e-2


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total, longest = sum(LENGTHS), max(LENGTHS)
    q, k, v = (torch.randn(1, total, HEADS, HEAD_DIM, device=device) for _ in range(3))
    starts = torch.tensor((0, *LENGTHS), device=device).cumsum(0).to(torch.int32)

    def attend(table: Any, sink: Any, dropout_p: float = 0.0) -> Any:
        def relative(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:  # i and j count within a document
            return 8 * torch.tanh(score / 8) + table[h, i - j]

        return attention(
            q, k, v, score_mod=relative, causal=True, sink=sink, dropout_p=dropout_p, cu_seqlens_q=starts,
            cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest,
        )  # fmt: skip

    hidden = [torch.randn(shape, device=device, requires_grad=True) for shape in ((HEADS, longest), (HEADS,))]
    out, plain = attend(*hidden), dense(q, k, v, *hidden)
    compare("out of attention with table, sinks and documents, beside torch.softmax and einsum", out, plain)
    gradients = (torch.autograd.grad(x.square().sum(), hidden) for x in (out, plain))
    for name, found, expected in zip(("table", "sinks"), *gradients, strict=True):
        compare(f"gradient of the {name}, beside that of torch.softmax and einsum", found, expected)
    target = out.detach()  # of the table and the sinks that are to be learned
    table = torch.zeros(HEADS, longest, device=device, requires_grad=True)
    sink = torch.zeros(HEADS, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([table, sink], 0.05)
    for step in range(121):
        loss = (attend(table, sink, dropout_p=0.02) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            with torch.no_grad():
                error = (attend(table, sink) - target).square().mean()
                print(f"step {step} of learning the table and the sinks that made the data: loss {error:.5f}")


if __name__ == "__main__":
    main()
