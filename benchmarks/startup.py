"""Start-up of two checkouts beside each other, in fresh processes, in turn.

    python benchmarks/startup.py [name=]TREE [[name=]TREE ...] [--rounds N] [--head-dim D] [--json FILE]

Every round and tree: one process with an empty cache (import, first forward pass, first backward pass; both together
are the first training step), then a second process with the cache that the first one left. Medians, in milliseconds;
``ratio`` is the last tree's over the first one's. The problem is causal self-attention in bfloat16 through
nvrtc_attn.torch. CUDA, torch's kernels and torch's backward machinery are warmed before the clock starts, so that the
numbers are those of nvrtc_attn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from measure import print_table

CHILD = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch
def randn(**more):
    return torch.randn(2, 512, 4, int(sys.argv[2]), device="cuda", dtype=torch.bfloat16, **more)
q, k, v, dout = randn(requires_grad=True), randn(requires_grad=True), randn(requires_grad=True), randn()
(q * k + v).backward(dout)  # the engine, its threads and its memory
torch.cuda.synchronize()
times = [time.perf_counter()]
def tick():
    torch.cuda.synchronize()
    times.append(time.perf_counter())
import nvrtc_attn
tick()
import nvrtc_attn.torch as na
tick()
out = na.attention(q, k, v, causal=True)
tick()
out.backward(dout)
tick()
out = na.attention(q, k, v, causal=True)
out.backward(dout)
tick()
assert nvrtc_attn.__file__.startswith(sys.argv[1]), nvrtc_attn.__file__
assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))
print(*(1e3 * (b - a) for a, b in zip(times, times[1:])))
"""
NAMES = ("import nvrtc_attn", "import nvrtc_attn.torch", "forward", "backward", "a step after it")


def measure(tree: Path, head_dim: int, cache: str) -> dict[str, float]:
    """Milliseconds of each part of one fresh process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVRTC_ATTN_")}
    command = [sys.executable, "-c", CHILD, str(tree), str(head_dim)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**environment, "NVRTC_ATTN_CACHE_DIR": cache}, cwd="/"
    )
    if done.returncode != 0:
        raise SystemExit(f"{tree}:\n{done.stderr}")
    times = dict(zip(NAMES, map(float, done.stdout.split()), strict=True))
    times["training step"] = times["forward"] + times["backward"]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="[name=]TREE", help="checkouts, the one to compare with first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--json", type=Path, help="where to write every number")
    arguments = parser.parse_args()
    trees: dict[str, Path] = {}
    for text in arguments.trees:
        name, _, path = text.rpartition("=")
        tree = Path(path).resolve()
        trees[name or tree.name] = tree
    found: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
    measure(next(iter(trees.values())), arguments.head_dim, tempfile.mkdtemp())  # files into the page cache
    for number in range(arguments.rounds):
        order = list(trees.items())
        for name, tree in order if number % 2 == 0 else order[::-1]:
            with tempfile.TemporaryDirectory() as cache:
                for when in ("cold", "second process"):
                    for part, milliseconds in measure(tree, arguments.head_dim, cache).items():
                        found[name].setdefault(f"{when}: {part}", []).append(milliseconds)
    first, *_, last = trees
    rows = []
    for part in found[first]:
        row: dict[str, object] = {"ms": part, **{name: median(times[part]) for name, times in found.items()}}
        rows.append({**row, "ratio": median(found[last][part]) / median(found[first][part])})
    print_table(rows, ["ms", *trees, "ratio"])
    if arguments.json:
        arguments.json.write_text(json.dumps({"head_dim": arguments.head_dim, "milliseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
