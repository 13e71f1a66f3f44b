"""What `return_max_logit` costs: the same call with and without it, in turn in one process.

    python benchmarks/max_logit.py [--rounds N] [--only REGEX] [--deviation S]...

A line is one problem and standard deviation of its scores: microseconds without, with, and their ratio, of which the
target is 1.02. How often a tile of keys brings a new largest score depends on the scores. Time of the GPU from
`triton.testing.do_bench`, which clears the L2 before each run; a memset of a few bytes is part of the second one.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from measure import in_turn, provenance

import nvrtc_attn.torch as na

# Name -> batch, rows, keys, heads, heads_kv, head_dim, options.
CASES: dict[str, tuple[int, int, int, int, int, int, dict[str, Any]]] = {
    "D64 4k": (4, 4096, 4096, 16, 16, 64, {}),
    "D64 4k causal": (4, 4096, 4096, 16, 16, 64, {"causal": True}),
    "D64 1k causal": (16, 1024, 1024, 16, 16, 64, {"causal": True}),
    "D128 4k": (2, 4096, 4096, 16, 16, 128, {}),
    "D128 4k causal 32/8": (2, 4096, 4096, 32, 8, 128, {"causal": True}),
    "D128 512 causal": (32, 512, 512, 16, 16, 128, {"causal": True}),
    "D128 8k window": (1, 8192, 8192, 32, 8, 128, {"causal": True, "window_size": (1023, 0)}),
    "D192/128 4k causal (MLA)": (2, 4096, 4096, 16, 16, 192, {"causal": True}),
    "D256 4k causal": (2, 4096, 4096, 8, 8, 256, {"causal": True}),
    "D128 decode": (64, 1, 4096, 32, 8, 128, {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--deviation", type=float, action="append", help="of scores (0.1, 1 and 3)")
    arguments = parser.parse_args()
    print(provenance())
    for name, (batch, rows, keys, heads, heads_kv, dim, options) in CASES.items():
        if not re.search(arguments.only, name):
            continue
        dim_v = 128 if "MLA" in name else dim
        shapes = (rows, heads, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v)
        for deviation in arguments.deviation or (0.1, 1.0, 3.0):
            q, k, v = (torch.randn(batch, n, h, d, device="cuda", dtype=torch.bfloat16) for n, h, d in shapes)
            q *= deviation

            def run(wanted: bool, tensors: Any = (q, k, v), options: dict[str, Any] = options) -> Any:
                return na.attention(*tensors, **options, return_lse=True, return_max_logit=wanted)

            times = in_turn({"without": lambda: run(False), "with": lambda: run(True)}, arguments.rounds)
            plain, asked = (1000 * times[x]["ms"] for x in ("without", "with"))
            print(f"{name:26} {deviation:5.1f} {plain:9.1f} {asked:9.1f} {asked / plain:7.3f}", flush=True)


if __name__ == "__main__":
    main()
