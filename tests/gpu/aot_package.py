"""Compile a layer into an AOTInductor package, load it and compare: `aot_package.py DIRECTORY attention|torch DEVICE`.

A process of its own, because a fault in torch's loader ends it. ``torch`` is a layer without attention of ours, which
says whose fault that is. ``cpu`` as the device tries this program where there is no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[:0] = [*map(str, Path(__file__).resolve().parents[1:3])]  # tests, and the package where it is not installed

from test_torch_ops import Block  # noqa: E402


def main() -> None:
    # Otherwise torch compiles and runs a program for each kind of the host's vector instructions; none is needed.
    torch._inductor.config.cpp.vec_isa_ok = False
    directory, what, device = sys.argv[1:]
    layer = (Block() if what == "attention" else torch.nn.Linear(256, 256)).to(device).eval()
    x = torch.randn(2, 128, 256, device=device)
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(directory, f"{what}.pt2")))
        loaded = torch._inductor.aoti_load_package(path)
        torch.testing.assert_close(loaded(x), layer(x), atol=1e-4, rtol=1e-4)
    print("equal", flush=True)


if __name__ == "__main__":
    main()
