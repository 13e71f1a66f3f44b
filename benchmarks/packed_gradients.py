"""Training on q, k and v from one linear layer: what it costs to put their gradients together, and not to.

    python benchmarks/packed_gradients.py [--rounds N] [--only REGEX]

A line is one problem: microseconds of a forward and a backward pass by autograd with a gradient of the packed tensor,
of torch's SDPA (the faster one of flash attention and cuDNN) and of `attention`, both of views, and of
`attention_qkvpacked`; then how much faster the last one is than SDPA and than views. Each is captured in a CUDA graph
as well (second line), which leaves the host's share out: small problems are bound by it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F  # noqa: N812
from measure import graph_of, in_turn, provenance
from torch.nn.attention import SDPBackend, sdpa_kernel

import nvrtc_attn.torch as na

# Name -> batch, rows, heads, head_dim, causal.
CASES: dict[str, tuple[int, int, int, int, bool]] = {
    "GPT-2 small": (8, 1024, 12, 64, True),
    "GPT-2 XL 2k": (4, 2048, 25, 64, True),
    "ViT-B/16": (64, 197, 12, 64, False),
    "ViT-g/14": (16, 257, 16, 88, False),
    "BERT large": (16, 512, 16, 64, False),
    "Llama 7B 4k": (1, 4096, 32, 128, True),
    "DiT-XL/2": (32, 256, 16, 72, False),
}


def ways(qkv: torch.Tensor, causal: bool) -> dict[str, Callable[[], Any]]:
    """What is compared, each a forward and a backward pass."""
    dout = torch.randn_like(qkv[:, :, 0])

    def sdpa() -> Any:
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
        return torch.autograd.grad(out, qkv, dout)

    return {
        "flash": sdpa,
        "cudnn": sdpa,
        "views": lambda: torch.autograd.grad(na.attention(*qkv.unbind(2), causal=causal), qkv, dout),
        "packed": lambda: torch.autograd.grad(na.attention_qkvpacked(qkv, causal=causal), qkv, dout),
    }


BACKENDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "cudnn": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
}


def captured(way: str, run: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of ``run``. What was captured has chosen its backend."""
    with BACKENDS.get(way, nullcontext)():
        replay: Callable[[], Any] = graph_of(run).replay
    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    print(provenance())
    print(f"{'':16}{'':8}{'SDPA':>10}{'views':>10}{'packed':>10}{'of SDPA':>10}{'of views':>10}")
    for name, (batch, rows, heads, dim, causal) in CASES.items():
        if not re.search(arguments.only, name):
            continue
        qkv = torch.randn(batch, rows, 3, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        eager = ways(qkv, causal)
        replayed = {way: captured(way, run) for way, run in eager.items()}
        for kind, calls in (("eager", eager), ("graph", replayed)):
            found = in_turn(calls, arguments.rounds, contexts=BACKENDS)
            flash, cudnn, views, packed = (1000 * found[way]["ms"] for way in eager)
            rival = min(flash, cudnn)
            print(f"{name:16}{kind:8}{rival:10.1f}{views:10.1f}{packed:10.1f}", end="")
            print(f"{rival / packed:10.3f}{views / packed:10.3f}", flush=True)


if __name__ == "__main__":
    main()
