"""Attention with functions of your own in PyTorch: learned relative bias, sinks and dropout in packed documents.

    python examples/torch_modifiers.py

Autograd finds the table that the function captured, and the sinks; `FlexAttention`'s functions run unchanged.
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

    target = attend(torch.randn(HEADS, longest, device=device), torch.randn(HEADS, device=device))
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
                print(f"step {step}: loss {(attend(table, sink) - target).square().mean():.5f}")


if __name__ == "__main__":
    main()
