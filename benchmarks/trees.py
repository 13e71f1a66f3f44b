"""Speed of two or more checkouts beside each other: the hot cells of the grid and the host's share of a call.

    python benchmarks/trees.py [name=]TREE [[name=]TREE ...] [--rounds N] [--only REGEX] [--rep-ms N] [--json FILE]

Every round runs one process for each tree, in alternating order. Medians of all processes; ``ratio`` is the first
tree's time over the last one's: above 1 the last is faster. Grid cells are bfloat16 self-attention, forward and
backward by themselves, in microseconds of the GPU; lines that begin with ``host`` are microseconds of the host for a
problem of 1 x 64 x 8 x 64, warm. Kernels are compiled first, in processes of their own, into the cache folder that
NVRTC_ATTN_CACHE_DIR names, else into one that is gone afterwards. ``--dry-run`` runs every line tiny and on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measure import REST_SECONDS, print_table


class Cell(NamedTuple):
    """One problem of plain self-attention; the gradient of ``bias`` ([1, H, S, S]) is part of its backward pass."""

    head_dim: int
    head_dim_v: int
    causal: bool
    batch: int
    seqlen: int
    heads: int
    bias: bool = False

    @property
    def name(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        what = "causal" if self.causal else "dense"
        return f"D {dims} {what} {self.batch}x{self.seqlen}x{self.heads}{' dbias' if self.bias else ''}"


CELLS = (
    *(
        Cell(d, d, causal, batch, seqlen, 2048 // d)
        for d in (64, 128, 256)
        for causal in (False, True)
        for batch, seqlen in ((4, 4096), (16, 1024))
    ),
    Cell(192, 128, True, 2, 2048, 16),
    Cell(192, 128, True, 2, 2048, 16, bias=True),
)
HOST = ("torch forward", "torch forward + backward", "attention_forward", "attention_backward")
Timer = Callable[[Callable[[], Any]], float]


def gpu_lines(cell: Cell, device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The cell's forward and backward pass, as calls that have run once."""
    import torch

    import nvrtc_attn.torch as na

    def randn(*shape: int, grad: bool = True) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=grad)

    b, s, h = cell.batch, cell.seqlen, cell.heads
    q, k, v = randn(b, s, h, cell.head_dim), randn(b, s, h, cell.head_dim), randn(b, s, h, cell.head_dim_v)
    dout = randn(b, s, h, cell.head_dim_v, grad=False)
    bias = randn(1, h, s, s) if cell.bias else None
    inputs = [q, k, v] if bias is None else [q, k, v, bias]

    def call() -> Any:
        return na.attention(q, k, v, bias=bias, causal=cell.causal)

    def forward() -> Any:
        with torch.no_grad():
            return call()

    forward()
    out = call()

    def backward() -> Any:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    assert all(bool(x.isfinite().all()) for x in (out, *backward())), cell.name
    yield f"fwd {cell.name}", forward
    yield f"bwd {cell.name}", backward


def host_lines(device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    import nvrtc_attn
    import nvrtc_attn.torch as na

    def randn(grad: bool) -> torch.Tensor:
        return torch.randn(1, 64, 8, 64, device=device, dtype=torch.bfloat16, requires_grad=grad)

    plain, graph, dout = [randn(False) for _ in "qkv"], [randn(True) for _ in "qkv"], randn(False)
    out, gradients = torch.empty_like(dout), [torch.empty_like(dout) for _ in "qkv"]
    lse = torch.empty(1, 8, 64, device=device)

    def workspace(size: int) -> Any:
        return torch.empty(size, device=device, dtype=torch.uint8) if size else None

    scratch = workspace(nvrtc_attn.forward_workspace_bytes(*plain, lse=lse) if device != "cpu" else 0)
    scratch_backward = workspace(nvrtc_attn.backward_workspace_bytes(*plain) if device != "cpu" else 0)

    def torch_both() -> Any:
        return torch.autograd.grad(na.attention(*graph), graph, dout)

    calls: tuple[Callable[[], Any], ...] = (
        lambda: na.attention(*plain),
        torch_both,
        lambda: nvrtc_attn.attention_forward(*plain, out, lse=lse, workspace=scratch),
        lambda: nvrtc_attn.attention_backward(dout, *plain, out, lse, *gradients, workspace=scratch_backward),
    )
    calls[2]()  # what the last one reads
    for name, call in zip(HOST, calls, strict=True):
        call()
        yield f"host {name}", call


def host_us(call: Callable[[], Any], calls: int, synchronize: Callable[[], Any]) -> float:
    """Microseconds of the host in one call: the best of five batches that do not fill the launch queue."""
    best = float("inf")
    for _ in range(5):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    synchronize()
    return 1e6 * best


def child(arguments: argparse.Namespace) -> None:
    """Time (or, with ``--compile``, only run) the lines of one tree and print them as JSON."""
    tree = str(arguments.trees[0])
    sys.path.insert(0, tree)
    import torch

    import nvrtc_attn

    assert nvrtc_attn.__file__.startswith(tree), nvrtc_attn.__file__
    pattern = re.compile(arguments.only)
    device = "cpu" if arguments.dry_run else "cuda"
    cells = CELLS
    if arguments.dry_run:
        cells = tuple(cell._replace(batch=1, seqlen=8, heads=2) for cell in CELLS)
    if arguments.compile is not None:
        cells = tuple(cell for cell in cells if cell.head_dim == arguments.compile)
    cells = tuple(cell for cell in cells if any(pattern.search(f"{x} {cell.name}") for x in ("fwd", "bwd")))
    times: dict[str, list[float]] = {}
    synchronize: Callable[[], Any] = (lambda: None) if arguments.dry_run else torch.cuda.synchronize
    if arguments.compile in (None, 64):
        for name, call in host_lines(device):
            if arguments.compile is None and pattern.search(name):
                times[name] = [host_us(call, 2 if arguments.dry_run else 200, synchronize)]
    for cell in cells:
        for name, call in gpu_lines(cell, device):
            if arguments.compile is None and pattern.search(name):
                times[name] = [1e3 * timed_ms(call, arguments) for _ in range(2)]
        if not arguments.dry_run:
            torch.cuda.empty_cache()
    print(json.dumps(times))


def timed_ms(call: Callable[[], Any], arguments: argparse.Namespace) -> float:
    if arguments.dry_run:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    from triton.testing import do_bench

    time.sleep(REST_SECONDS)
    return float(do_bench(call, warmup=10, rep=arguments.rep_ms, return_mode="median"))


def start(tree: Path, cache: str, options: list[str]) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVRTC_ATTN_")}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *options, str(tree)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**environment, "NVRTC_ATTN_CACHE_DIR": cache}, cwd="/"
    )


def finish(process: subprocess.Popen[str]) -> dict[str, list[float]]:
    output = process.communicate()[0]
    if process.returncode != 0:
        raise SystemExit(f"{process.args} ended with status {process.returncode}")
    found: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    return found


def named_trees(texts: list[str]) -> dict[str, Path]:
    """Checkouts by name; the folder's name where none is given."""
    trees: dict[str, Path] = {}
    for text in texts:
        name, _, path = text.rpartition("=")
        tree = Path(path).resolve()
        if not (tree / "nvrtc_attn" / "__init__.py").is_file():
            raise SystemExit(f"{tree} is no checkout of nvrtc_attn")
        name = name or tree.name
        if name in trees:
            raise SystemExit(f"two trees of the name {name}: write NAME=TREE")
        trees[name] = tree
    return trees


def commit_of(tree: Path) -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=tree)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def compare(trees: dict[str, Path], cache: str, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Every time of each tree by line, after the kernels of all of them were compiled."""
    options = ["--only", arguments.only, "--rep-ms", str(arguments.rep_ms)]
    if arguments.dry_run:
        options.append("--dry-run")
    else:
        begin = time.perf_counter()
        head_dims = sorted({cell.head_dim for cell in CELLS})
        compiling = [start(tree, cache, [*options, "--compile", str(d)]) for tree in trees.values() for d in head_dims]
        for process in compiling:
            finish(process)
        print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
    for number in range(arguments.rounds):
        order = list(trees.items())
        for name, tree in order if number % 2 == 0 else order[::-1]:
            begin = time.perf_counter()
            for line, times in finish(start(tree, cache, options)).items():
                found[name].setdefault(line, []).extend(times)
            print(f"round {number + 1} of {name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return found


def table(found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """A row a line: medians of each tree, in microseconds, and the first tree's over the last one's."""
    first, *_, last = found if len(found) > 1 else [*found, *found]
    rows = []
    for line in found[first]:
        row: dict[str, Any] = {"us": line, **{name: median(times[line]) for name, times in found.items()}}
        rows.append({**row, "ratio": row[first] / row[last]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="[name=]TREE", help="checkouts, the one to compare with first")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="regular expression that a line's name must contain")
    parser.add_argument("--rep-ms", type=int, default=60, help="GPU time of one measurement of a cell")
    parser.add_argument("--json", type=Path, help="where to write every number")
    parser.add_argument("--dry-run", action="store_true", help="every line once, tiny, on the CPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    trees = named_trees(arguments.trees)
    with tempfile.TemporaryDirectory() as temporary:
        cache = os.environ.get("NVRTC_ATTN_CACHE_DIR", temporary)
        found = compare(trees, cache, arguments)
    print_table(table(found), ["us", *trees, "ratio"])
    if arguments.json:
        commits = {name: commit_of(tree) for name, tree in trees.items()}
        arguments.json.write_text(json.dumps({"commits": commits, "microseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
