"""Speed of nvrtc_attn beside torch's own attention kernels, on one GPU, in one process.

    python benchmarks/attention.py [--out DIRECTORY] [--part grid,features,sizes,few,start,host] [--quick]

``seed`` is SDPA's memory-efficient kernel, ``flash2`` and ``cudnn`` its other two; ``fa3`` and ``fa4`` take part where
they are installed (`peers.py`). Shapes of published models are in `models.py`. TFLOP/s are 4 B H Mq Mk D / time forward
(halved when causal) and 2.5 times that backward. Ratios are times of the other over ours: above 1 is faster than it.
``NVRTC_ATTN_BACKEND`` chooses the kernel family of ours and names the files.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import host
import measure as measure_module
import peers
import torch
import torch.nn.functional as F  # noqa: N812
from measure import in_turn, print_table, save
from model_cases import Case, Inputs
from plot import plot
from torch.nn.attention import SDPBackend, sdpa_kernel

import nvrtc_attn.torch as na

BACKENDS = {
    "seed": SDPBackend.EFFICIENT_ATTENTION,
    "flash2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
Pair = tuple[Callable[[], Any], Callable[[], Any]]


def randn(*shape: int, dtype: torch.dtype, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)


def timed_pair(call: Callable[[], Any], grads: tuple[Any, ...], dout: Any) -> Pair:
    """(forward, backward) of ``call``, the first without a graph; both run once, so what ``call`` cannot do raises."""

    def forward() -> Any:
        with torch.no_grad():
            return call()

    forward()
    out = call()

    def backward() -> Any:
        return torch.autograd.grad(out, grads, dout, retain_graph=True)

    backward()
    return forward, backward


def sdpa(backend: SDPBackend, q: Any, k: Any, v: Any, dout: Any, grads: tuple[Any, ...], **options: Any) -> Pair:
    """(forward, backward) of one SDPA backend on [B, S, H, D] tensors; raises if it cannot. To run within `context`."""
    qt, kt, vt, dt = (x.transpose(1, 2) for x in (q, k, v, dout))
    options.setdefault("enable_gqa", q.shape[2] != k.shape[2])
    with sdpa_kernel([backend]):
        return timed_pair(lambda: F.scaled_dot_product_attention(qt, kt, vt, **options), grads, dt)


def context(name: str) -> AbstractContextManager[Any]:
    """What is around the runs of a provider, and no part of their time."""
    return sdpa_kernel([BACKENDS[name]]) if name in BACKENDS else nullcontext()


def flash_package(name: str, q: Any, k: Any, v: Any, dout: Any, grads: tuple[Any, ...], *, is_causal: bool) -> Pair:
    """(forward, backward) of FlashAttention-3 or -4."""
    b, s, h, d = q.shape
    case = Case(name=name, kind="language", b=b, q=s, h=h, hkv=k.shape[2], d=d, causal=is_causal)
    inputs = Inputs(q=q, k=k, v=v, dout=dout, bias=None, mask=None, cu=None, seen=None)
    call = peers.PEERS[name](case, inputs)
    return timed_pair(call.run, call.leaves, call.dout)


def installed_peers() -> dict[str, Callable[..., Pair]]:
    return {name: partial(flash_package, name) for name in peers.installed() if name not in BACKENDS}


def ours(q: Any, k: Any, v: Any, dout: Any, grads: tuple[Any, ...], **options: Any) -> Pair:
    return timed_pair(lambda: na.attention(q, k, v, **options), grads, dout)


def measure(row: dict[str, Any], pairs: dict[str, Callable[[], Pair]], flops: float, rep_ms: int) -> dict[str, Any]:
    """Add ``name.fwd`` and ``name.bwd`` (milliseconds), TFLOP/s of ours and the ratios to ``row``."""
    functions: dict[str, Callable[[], Any]] = {}
    for name, make in pairs.items():
        try:
            functions[f"{name}.fwd"], functions[f"{name}.bwd"] = make()
        except Exception as error:  # a peer that cannot do the case is a dash, ours is an error
            if name == "ours":
                raise
            row.setdefault("skipped", {})[name] = str(error).splitlines()[0][:120]
    times = in_turn(functions, rep_ms=rep_ms, contexts={key: partial(context, key[:-4]) for key in functions})
    for key, value in times.items():
        row[key] = value["ms"]
        row[f"{key}.spread"] = value["spread"]
    for which, factor in (("fwd", 1.0), ("bwd", 2.5)):
        row[f"tflops.{which}"] = factor * flops / row[f"ours.{which}"] * 1e-9
        ratios = {n: row[f"{n}.{which}"] / row[f"ours.{which}"] for n in pairs if n != "ours" and f"{n}.{which}" in row}
        row.update({f"{which}/{name}": ratio for name, ratio in ratios.items()})
        row[f"{which}/best"] = min(ratios.values(), default=None)
    return row


def measure_shape(
    row: dict[str, Any],
    b: int,
    s: int,
    h: int,
    h_kv: int,
    d: int,
    dtype: torch.dtype,
    causal: bool,
    backends: tuple[str, ...],
    rep_ms: int,
) -> dict[str, Any]:
    """``row`` with the times of plain self-attention: ours, torch's ``backends`` and every installed peer."""
    q, k, v = randn(b, s, h, d, dtype=dtype), randn(b, s, h_kv, d, dtype=dtype), randn(b, s, h_kv, d, dtype=dtype)
    dout = randn(b, s, h, d, dtype=dtype, grad=False)
    grads = (q, k, v)
    pairs: dict[str, Callable[[], Pair]] = {
        name: partial(sdpa, BACKENDS[name], q, k, v, dout, grads, is_causal=causal) for name in backends
    }
    for name, make in installed_peers().items():
        pairs[name] = partial(make, q, k, v, dout, grads, is_causal=causal)
    pairs["ours"] = partial(ours, q, k, v, dout, grads, causal=causal)
    return measure(row, pairs, 4.0 * b * h * s * s * d / (2 if causal else 1), rep_ms)


def grid(quick: bool, rep_ms: int) -> Iterator[dict[str, Any]]:
    for d, h in ((64, 32), (128, 16), (256, 8)):
        for causal in (False, True):
            for b, s in (
                ((16, 1024), (4, 4096), (1, 16384))
                if quick
                else ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))
            ):
                row = {"D": d, "causal": causal, "BxSxH": f"{b}x{s}x{h}"}
                yield measure_shape(row, b, s, h, h, d, torch.bfloat16, causal, tuple(BACKENDS), rep_ms)


SizeCases = list[tuple[str, int, int, int, int, int, torch.dtype]]
"""(group, batch, length, heads, key heads, head dim, dtype)"""


def few_cases() -> SizeCases:
    """Too few heads to fill the GPU more than once; in the shorter ones the host takes as long as the GPU."""
    shapes = ((1024, 16, 64), (4096, 4, 64), (1024, 16, 128), (2048, 8, 128), (4096, 4, 128), (4096, 8, 128))
    return [("few heads", 1, s, h, h, d, torch.bfloat16) for s, h, d in shapes]


def size_cases() -> SizeCases:
    """Lengths that are no power of two, key heads that are shared, float16."""
    bf, hf = torch.bfloat16, torch.float16
    ragged = [
        ("ragged", 16384 // s, s, 2048 // d, 2048 // d, d, bf)
        for d in (64, 128)
        for s in (1000, 1024, 3000, 3072, 5000, 5120)
    ]
    shared = [("key heads shared", 4, 4096, 32, 8, 128, bf), ("key heads shared", 1, 16384, 32, 8, 128, bf)]
    half = [("float16", 4, 4096, 2048 // d, 2048 // d, d, hf) for d in (64, 128, 256)]
    return ragged + shared + half


def sizes(cases: SizeCases, rep_ms: int) -> list[dict[str, Any]]:
    rows = []
    for group, b, s, h, h_kv, d, dtype in cases:
        for causal in (False, True):
            row = {"group": group, "D": d, "causal": causal, "BxSxH": f"{b}x{s}x{h}", "Hkv": h_kv}
            rows.append(measure_shape(row, b, s, h, h_kv, d, dtype, causal, ("flash2", "cudnn"), rep_ms))
    return rows


def feature_cases() -> list[dict[str, Any]]:
    bf, hf, fp = torch.bfloat16, torch.float16, torch.float32

    def case(name: str, b: int, s: int, h: int, d: int, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
        return {"name": name, "b": b, "s": s, "h": h, "d": d, "dtype": dtype, **more}

    return [
        case("fp32 d64 s2048", 4, 2048, 16, 64, fp),
        case("fp32 d128 s2048", 4, 2048, 16, 128, fp),
        case("bias full+grad d64 s2048", 4, 2048, 16, 64, bf, bias="full"),
        case("bias 1hqk+grad d64 s2048", 4, 2048, 16, 64, bf, bias="broadcast"),
        case("bias full+grad d32 256x256x8", 256, 256, 8, 32, bf, bias="full"),
        case("dropout .1 d64 s2048", 4, 2048, 16, 64, bf, dropout=0.1),
        case("dropout .1 d128 causal s4096", 4, 4096, 16, 128, bf, dropout=0.1, causal=True),
        case("d80 s2048", 4, 2048, 16, 80, bf),
        case("d40 s4096", 4, 4096, 8, 40, hf),
        case("d96 s2048", 4, 2048, 16, 96, bf),
        case("d512 2x4096x1", 2, 4096, 1, 512, bf),
        case("d192 dv128 causal", 2, 4096, 16, 192, bf, causal=True, dv=128),
        case("cross 4096x77 d64", 8, 4096, 16, 64, hf, sk=77),
        case("short 128 d64", 256, 128, 12, 64, hf),
        case("gqa 32/8 d128 causal s4096", 4, 4096, 32, 128, bf, causal=True, hkv=8),
        case("ragged s3000 d128", 4, 3000, 16, 128, bf),
        case("decode 1x8192 d128", 32, 1, 32, 128, bf, sk=8192),
        case("decode gqa 32/8", 32, 1, 32, 128, bf, sk=8192, hkv=8),
    ]


def features(rep_ms: int) -> list[dict[str, Any]]:
    rows = []
    for c in feature_cases():
        b, s, h, d, dtype = (c[x] for x in ("b", "s", "h", "d", "dtype"))
        sk, dv, hkv, causal, p = (
            c.get("sk", s),
            c.get("dv", d),
            c.get("hkv", h),
            c.get("causal", False),
            c.get("dropout", 0.0),
        )
        q, k, v = randn(b, s, h, d, dtype=dtype), randn(b, sk, hkv, d, dtype=dtype), randn(b, sk, hkv, dv, dtype=dtype)
        dout = randn(b, s, h, dv, dtype=dtype, grad=False)
        grads: tuple[Any, ...] = (q, k, v)
        bias = mask = None
        if c.get("bias"):
            bias = randn(b if c["bias"] == "full" else 1, h, s, sk, dtype=dtype)
            mask = bias.expand(b, h, s, sk)
            grads = (q, k, v, bias)
        pairs: dict[str, Callable[[], Pair]] = {
            name: partial(sdpa, be, q, k, v, dout, grads, attn_mask=mask, dropout_p=p, is_causal=causal)
            for name, be in BACKENDS.items()
        }
        pairs["ours"] = partial(ours, q, k, v, dout, grads, bias=bias, dropout_p=p, causal=causal)
        flops = 2.0 * b * h * s * sk * (d + dv) / (2 if causal else 1)
        row = measure({"case": c["name"]}, pairs, flops, rep_ms)
        if s == 1:  # decoding reads K and V and computes little
            row["GB/s"] = 1e-6 * (k.nbytes + v.nbytes) / row["ours.fwd"]
            row["of copy"] = row["GB/s"] / copy_gb_per_s()
        row["peak_mb.ours"] = peak_mb(pairs["ours"])
        if "seed.bwd" in row:
            row["peak_mb.seed"] = peak_mb(pairs["seed"])
        rows.append(row)
        del pairs
        torch.cuda.empty_cache()
    return rows


def copy_gb_per_s() -> float:
    """Bandwidth of a copy of 2 GB on the GPU, bytes read and bytes written."""
    source = torch.empty(2 * 10**9, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    ms = in_turn({"copy": lambda: target.copy_(source)})["copy"]["ms"]
    return 1e-6 * 2 * source.nbytes / ms


def peak_mb(make: Callable[[], Pair]) -> float:
    """Peak of torch's allocator in one forward and backward pass, above what was allocated before, in 10^6 bytes."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    make()[1]()
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


def ratio_columns(names: tuple[str, ...]) -> list[str]:
    peers = (*names, *installed_peers(), "best")
    return ["tflops.fwd", "tflops.bwd", *(f"{which}/{name}" for name in peers for which in ("fwd", "bwd"))]


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
        rows = features(rep_ms)
        columns = [
            "case",
            "ours.fwd",
            "ours.bwd",
            "tflops.fwd",
            "tflops.bwd",
            "fwd/seed",
            "bwd/seed",
            "fwd/flash2",
            "bwd/flash2",
            "fwd/cudnn",
            "bwd/cudnn",
            "GB/s",
            "of copy",
            "peak_mb.ours",
            "peak_mb.seed",
        ]
        print_table(rows, columns)
        save(f"features_{backend}", rows, arguments.out)
    for part, cases in (("sizes", size_cases()), ("few", few_cases())):
        if part in parts:
            rows = sizes(cases, rep_ms)
            print_table(rows, ["group", "D", "causal", "BxSxH", "Hkv", *ratio_columns(("flash2", "cudnn"))])
            save(f"{part}_{backend}", rows, arguments.out)
    if "grid" in parts:
        rows = []
        for row in grid(arguments.quick, rep_ms):
            rows.append(row)
            path = save(f"grid_{backend}", rows, arguments.out)  # what there is, should the time be cut off
            best = " and ".join(f"{row[f'{which}/best']:.2f}" for which in ("fwd", "bwd"))
            print(f"D {row['D']} {'causal' if row['causal'] else 'dense'} {row['BxSxH']}: {best}", flush=True)
        print_table(rows, ["D", "causal", "BxSxH", *ratio_columns(("seed", "flash2", "cudnn"))])
        plot(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
