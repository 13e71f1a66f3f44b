"""Compile a layer into an AOTInductor package, load it and compare: `aot_package.py DIRECTORY attention|torch DEVICE`.

A process of its own, because a fault in torch's loader ends it. ``torch`` is a layer without attention of ours, which
says whose fault that is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import nvrtc_attn.torch as na


class Layer(torch.nn.Module):
    """Projections around attention, or alone."""

    def __init__(self, what: str, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.has_attention = heads, what == "attention"
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        found = na.attention(q, k, v, causal=True) if self.has_attention else q * k + v
        return x + self.out(found.flatten(2))


def main() -> None:
    directory, what, device = sys.argv[1:]
    torch.manual_seed(0)
    layer, x = Layer(what).to(device).eval(), torch.randn(2, 128, 256, device=device)
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(directory, f"{what}.pt2")))
        loaded = torch._inductor.aoti_load_package(path)
        torch.testing.assert_close(loaded(x), layer(x), atol=1e-4, rtol=1e-4)
    print("equal", flush=True)


if __name__ == "__main__":
    main()
