"""Speed of nvrtc_attn beside torch's own attention kernels, on one GPU, in one process.

    python benchmarks/attention.py [--out DIRECTORY] [--part grid,features,sizes,few,start,host] [--quick]

``seed`` is SDPA's memory-efficient kernel, ``flash2`` and ``cudnn`` its other two; ``fa3`` and ``fa4`` take part where
they are installed (`peers.py`). Cases are timed as those of `models.py`, which has the shapes of published models:
passes below 0.6 ms from CUDA graphs. TFLOP/s are 4 B H Mq Mk D / time forward, of a causal problem those of the scores
that it keeps, and 2.5 times that backward. Ratios are times of the other over ours: above 1 is faster than it.
``NVRTC_ATTN_BACKEND`` chooses the kernel family of ours and names the files.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import host
import measure as measure_module
import peers
import torch
from measure import in_turn, print_table, save
from model_cases import Case, make_inputs
from models import measure_case
from plot import plot

ROUNDS = 3


def plain(group: str, b: int, s: int, h: int, d: int, hkv: int = 0, dtype: str = "bfloat16") -> tuple[Case, Case]:
    """Self-attention of every score, and causal."""
    dense = Case(name=group, kind="language", b=b, q=s, h=h, hkv=hkv, d=d, dtype=dtype)
    return dense, replace(dense, causal=True)


def grid_cases(quick: bool) -> list[Case]:
    lengths = (1024, 4096, 16384) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    found = [x for d, h in ((64, 32), (128, 16), (256, 8)) for s in lengths for x in plain("grid", 16384 // s, s, h, d)]
    return sorted(found, key=lambda x: (x.d, x.causal, x.q))


def few_cases() -> list[Case]:
    """Too few heads to fill the GPU more than once."""
    shapes = ((1024, 16, 64), (4096, 4, 64), (1024, 16, 128), (2048, 8, 128), (4096, 4, 128), (4096, 8, 128))
    return [x for s, h, d in shapes for x in plain("few heads", 1, s, h, d)]


def size_cases() -> list[Case]:
    """Lengths that are no power of two, key heads that are shared, float16."""
    pairs = [
        *(
            plain("ragged", 16384 // s, s, 2048 // d, d)
            for d in (64, 128)
            for s in (1000, 1024, 3000, 3072, 5000, 5120)
        ),
        *(plain("key heads shared", b, s, 32, 128, hkv=8) for b, s in ((4, 4096), (1, 16384))),
        *(plain("float16", 4, 4096, 2048 // d, d, dtype="float16") for d in (64, 128, 256)),
    ]
    return [case for pair in pairs for case in pair]


def feature_cases() -> list[Case]:
    def case(name: str, b: int, s: int, h: int, d: int, dtype: str = "bfloat16", **more: Any) -> Case:
        return Case(**{"name": name, "kind": "language", "b": b, "q": s, "h": h, "d": d, "dtype": dtype, **more})

    decode: dict[str, Any] = {"kind": "decode", "k": 8192}
    return [
        case("fp32 d64 s2048", 4, 2048, 16, 64, "float32"),
        case("fp32 d128 s2048", 4, 2048, 16, 128, "float32"),
        case("bias full+grad d64 s2048", 4, 2048, 16, 64, bias="bhqk"),
        case("bias 1hqk+grad d64 s2048", 4, 2048, 16, 64, bias="1hqk"),
        case("bias full+grad d32 256x256x8", 256, 256, 8, 32, bias="bhqk"),
        case("dropout .1 d64 s2048", 4, 2048, 16, 64, dropout=0.1),
        case("dropout .1 d128 causal s4096", 4, 4096, 16, 128, dropout=0.1, causal=True),
        case("d80 s2048", 4, 2048, 16, 80),
        case("d40 s4096", 4, 4096, 8, 40, "float16"),
        case("d96 s2048", 4, 2048, 16, 96),
        case("d512 2x4096x1", 2, 4096, 1, 512),
        case("d192 dv128 causal", 2, 4096, 16, 192, causal=True, dv=128),
        case("cross 4096x77 d64", 8, 4096, 16, 64, "float16", k=77),
        case("short 128 d64", 256, 128, 12, 64, "float16"),
        case("gqa 32/8 d128 causal s4096", 4, 4096, 32, 128, causal=True, hkv=8),
        case("ragged s3000 d128", 4, 3000, 16, 128),
        case("decode 1x8192 d128", 32, 1, 32, 128, **decode),
        case("decode gqa 32/8", 32, 1, 32, 128, hkv=8, **decode),
    ]


def timed(case: Case, rep_ms: int) -> dict[str, Any]:
    return measure_case(case, peers.installed(), "cuda", ROUNDS, rep_ms)


def shapes(cases: list[Case], rep_ms: int) -> Iterator[dict[str, Any]]:
    """A row of each of `plain`."""
    for case in cases:
        row = {"group": case.name, "D": case.d, "causal": case.causal, "BxSxH": f"{case.b}x{case.q}x{case.h}"}
        yield row | {"Hkv": case.heads_kv} | timed(case, rep_ms)
        torch.cuda.empty_cache()


def features(rep_ms: int) -> Iterator[dict[str, Any]]:
    for case in feature_cases():
        row = timed(case, rep_ms)
        if "GB/s" in row:
            row["of copy"] = row["GB/s"] / copy_gb_per_s()
        row |= {f"peak_mb.{name}": peak_mb(case, name) for name in ("ours", "seed") if f"{name}.bwd" in row}
        yield row
        torch.cuda.empty_cache()


def copy_gb_per_s() -> float:
    """Bandwidth of a copy of 2 GB on the GPU, bytes read and bytes written."""
    source = torch.empty(2 * 10**9, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    ms = in_turn({"copy": lambda: target.copy_(source)})["copy"]["ms"]
    return 1e-6 * 2 * source.nbytes / ms


def peak_mb(case: Case, name: str) -> float:
    """Peak of torch's allocator in one forward and backward pass, above what was allocated before, in 10^6 bytes."""
    inputs = make_inputs(case, "cuda")
    call = (peers.ours if name == "ours" else peers.PEERS[name])(case, inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with call.context():
        torch.autograd.grad(call.run(), call.leaves, call.dout)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


_SECOND_PROCESS = """
import time, torch
q = torch.randn(2, 256, 4, {d}, device="cuda", dtype=torch.bfloat16, requires_grad={grad})
torch.cuda.synchronize()
t = time.perf_counter()
import nvrtc_attn.torch as na
t1 = time.perf_counter()
out = na.attention(q, q, q, causal=True)
torch.cuda.synchronize()
t2 = time.perf_counter()
if q.requires_grad:
    out.sum().backward()
    torch.cuda.synchronize()
t3 = time.perf_counter()
print(1e3 * (t1 - t), 1e3 * (t2 - t1), 1e3 * (t3 - t2))
"""


def start_up() -> list[dict[str, Any]]:
    """Import, cold compile, first call of a second process with a warm disk cache. Repeated calls: host.py."""
    rows = []
    code = "import time; t = time.perf_counter(); import nvrtc_attn; print(1e3 * (time.perf_counter() - t))"
    rows.append({"what": "import nvrtc_attn, ms", "value": min(float(child(code)) for _ in range(5))})
    for d in (64, 128):
        with tempfile.TemporaryDirectory() as cache:
            cold = child(_SECOND_PROCESS.format(d=d, grad=True), NVRTC_ATTN_CACHE_DIR=cache).split()
            rows.append({"what": f"first forward, cold cache, D {d}, ms", "value": float(cold[1])})
            rows.append({"what": f"first backward, cold cache, D {d}, ms (all its kernels)", "value": float(cold[2])})
            warm = [child(_SECOND_PROCESS.format(d=d, grad=True), NVRTC_ATTN_CACHE_DIR=cache).split() for _ in range(3)]
            rows.append({"what": f"first forward, second process, D {d}, ms", "value": min(float(w[1]) for w in warm)})
            rows.append({"what": f"first backward, second process, D {d}, ms", "value": min(float(w[2]) for w in warm)})
    return rows


def child(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout


def ratio_columns() -> list[str]:
    names = (*peers.installed(), "best")
    return ["tflops.fwd", "tflops.bwd", *(f"{which}/{name}" for name in names for which in ("fwd", "bwd"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=None, help="directory for JSON and plots, default benchmarks/results"
    )
    parts = "grid,features,sizes,few,start,host"
    parser.add_argument("--part", default=parts, help=f"comma-separated, default {parts}")
    parser.add_argument("--quick", action="store_true", help="three lengths instead of six, shorter timing")
    parser.add_argument("--commit", default="", help="of the measured tree, where that is a copy without git history")
    arguments = parser.parse_args()
    measure_module.COMMIT = arguments.commit
    torch.manual_seed(0)
    rep_ms = 30 if arguments.quick else 60
    parts = arguments.part.split(",")
    backend = os.environ.get("NVRTC_ATTN_BACKEND", "auto")
    if "start" in parts:
        rows = start_up()
        print_table(rows, ["what", "value"])
        save(f"start_{backend}", rows, arguments.out)
    if "host" in parts:
        rows = host.rows()
        print_table(rows, host.columns())
        save(f"host_{backend}", rows, arguments.out)
    if "features" in parts:
        rows = list(features(rep_ms))
        columns = ["case", "ours.fwd", "ours.bwd", *ratio_columns(), "GB/s", "of copy", "peak_mb.ours", "peak_mb.seed"]
        print_table(rows, columns)
        save(f"features_{backend}", rows, arguments.out)
    for part, cases in (("sizes", size_cases()), ("few", few_cases())):
        if part in parts:
            rows = list(shapes(cases, rep_ms))
            print_table(rows, ["group", "D", "causal", "BxSxH", "Hkv", *ratio_columns()])
            save(f"{part}_{backend}", rows, arguments.out)
    if "grid" in parts:
        rows = []
        for row in shapes(grid_cases(arguments.quick), rep_ms):
            rows.append(row)
            path = save(f"grid_{backend}", rows, arguments.out)  # what there is, should the time be cut off
            best = " and ".join(f"{row[f'{which}/best']:.2f}" for which in ("fwd", "bwd"))
            print(f"D {row['D']} {'causal' if row['causal'] else 'dense'} {row['BxSxH']}: {best}", flush=True)
        print_table(rows, ["D", "causal", "BxSxH", *ratio_columns()])
        plot(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
