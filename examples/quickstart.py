"""First run: attention on the CPU, a kernel compiled without a GPU, and everything on the GPU where there is one.

python examples/quickstart.py [--arch sm_90] [--head-dim 64] [--seqlen 2048]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import nvrtc_attn

Gradients = tuple[Any, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90", help="compile target, for example sm_80")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=2048, help="sequence length of the CPU run")
    options = parser.parse_args()

    report = json.loads(command_line("doctor", "--json").stdout)
    on_cpu(options.seqlen, options.head_dim)
    if not compile_for(options.arch, options.head_dim, report):
        return 1
    return on_gpu(options.head_dim, report)


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line of the library: ``doctor`` says what is there, ``warmup`` compiles ahead."""
    return subprocess.run([sys.executable, "-m", "nvrtc_attn", *arguments], capture_output=True, text=True, check=False)


# ------------------------------------------------------------------------------------------------------- 1. the CPU


def on_cpu(seqlen: int, head_dim: int) -> None:
    print("1. NumPy arrays, on the CPU")
    heads = 4
    q, k, v, dout = random_inputs(1, seqlen, heads, head_dim, np.float32)
    tracemalloc.start()
    start = time.perf_counter()
    run(q, k, v, dout)
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    matrix = heads * seqlen * seqlen * 4
    print(f"   q, k, v [1, {seqlen}, {heads}, {head_dim}] float32, causal: forward and backward in {seconds:.2f} s")
    print(f"   {peak / 2**20:.0f} MiB at the peak; the matrix of scores, never built, has {matrix / 2**20:.0f} MiB")

    q, k, v, dout = random_inputs(2, 77, 3, 24, np.float32)
    check("against a dense computation in float64", run(q, k, v, dout), dense(q, k, v, dout), np.float32)


def run(q: Any, k: Any, v: Any, dout: Any) -> Gradients:
    """The library: out, dq, dk, dv of causal attention on NumPy arrays."""
    out, lse = nvrtc_attn.attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    nvrtc_attn.attention_backward(dout, q, k, v, out, lse, dq, dk, dv, causal=True)
    return out, dq, dk, dv


def dense(*arrays: Any) -> Gradients:
    """The same in float64 with the whole matrix: what the library must agree with."""
    q, k, v, dout = (x.astype(np.float64).swapaxes(1, 2) for x in arrays)
    scale = 1 / np.sqrt(q.shape[-1])
    scores = scale * q @ k.swapaxes(2, 3)
    scores[..., np.triu(np.ones(scores.shape[2:], bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ v.swapaxes(2, 3)
    ds = scale * p * (dp - (dp * p).sum(-1, keepdims=True))
    results = (p @ v, ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout)
    return tuple(x.swapaxes(1, 2) for x in results)


def random_inputs(batch: int, seqlen: int, heads: int, head_dim: int, dtype: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((batch, seqlen, heads, head_dim)).astype(dtype) for _ in range(4)]


def check(what: str, found: Gradients, expected: Gradients, dtype: Any) -> None:
    """Errors relative to the largest value, and the bound: the inputs' rounding, amplified by the backward pass."""
    bound = {np.float32: 2e-5, np.float16: 1e-2}[dtype]
    errors = [abs(np.asarray(a, np.float64) - b).max() / abs(b).max() for a, b in zip(found, expected, strict=True)]
    shown = ", ".join(f"{name} {error:.1e}" for name, error in zip(("out", "dq", "dk", "dv"), errors, strict=True))
    print(f"   {what}: relative error {shown}")
    if not max(errors) <= bound:
        raise SystemExit(f"   FAILED: larger than {bound}")


# -------------------------------------------------------------------------------------- 2. a kernel, without a GPU


def compile_for(arch: str, head_dim: int, report: Any) -> bool:
    nvrtc = report.get("nvrtc")
    how = f"compiled with NVRTC {nvrtc['version']}" if nvrtc else "without NVRTC: none was found"
    print(f"\n2. Kernels for {arch}, {how} (needs no GPU; the disk cache keeps them)")
    what = ("--arch", arch, "--head-dim", str(head_dim), "--dtype", "float16", "--causal", "--seqlen", "4096")
    start = time.perf_counter()
    done = command_line("warmup", *what, "--forward-only")
    print("   " + (done.stdout.rstrip() or done.stderr.rstrip()).replace("\n", "\n   "))
    if done.returncode:
        if done.stdout.strip() and done.stderr.strip():  # the table, and why
            print("   " + done.stderr.strip().replace("\n", "\n   "))
        print(f"   FAILED: python -m nvrtc_attn warmup {' '.join(what)} --forward-only")
        return False
    print(f"   in {time.perf_counter() - start:.1f} s")
    return True


# ------------------------------------------------------------------------------------------------------- 3. the GPU


@dataclass
class Framework:
    """Where device memory comes from: the framework that is installed, or the driver itself."""

    name: str
    upload: Callable[[Any], Any]
    download: Callable[[Any], Any]  # waits for the work that was queued before


def on_gpu(head_dim: int, report: Any) -> int:
    print("\n3. On the GPU")
    if not report.get("gpus"):
        print("   skipped: " + "; ".join(report["problems"] or ["the driver reports no GPU"]))
        return 0
    gpu = report["gpus"][0]
    framework = find_framework()
    print(f"   {gpu['name']}, compute capability {gpu['compute_capability']}, memory by {framework.name}")

    arrays = random_inputs(2, 500, 4, head_dim, np.float16)
    out, dq, dk, dv, _ = run_on_gpu(framework, *arrays)
    found = tuple(framework.download(x) for x in (out, dq, dk, dv))
    check("float16 against float64", found, dense(*arrays), np.float16)

    batch, seqlen, heads = 4, 4096, 16
    _, _, _, _, repeat = run_on_gpu(framework, *random_inputs(batch, seqlen, heads, head_dim, np.float16))
    flops = 4 * batch * heads * seqlen * seqlen * head_dim / 2  # causal: half of the scores
    for which, amount in (("forward", flops), ("backward", 2.5 * flops)):
        seconds = repeat(which)
        speed = f"{1e3 * seconds:.2f} ms, {amount / seconds / 1e12:.0f} TFLOP/s"
        print(f"   [{batch}, {seqlen}, {heads}, {head_dim}] {which}: {speed}")
    return 0


def run_on_gpu(framework: Framework, *arrays: Any) -> tuple[Any, Any, Any, Any, Callable[[str], float]]:
    """The low-level calls: outputs and workspace are ours, here filled with NaN to show that all of it is written."""
    q, k, v, dout = map(framework.upload, arrays)
    out, dq, dk, dv = (framework.upload(np.full_like(arrays[0], np.nan)) for _ in range(4))
    batch, seqlen, heads, _ = arrays[0].shape
    lse = framework.upload(np.full((batch, heads, seqlen), np.nan, np.float32))
    sizes = (f(q, k, v, causal=True) for f in (nvrtc_attn.forward_workspace_bytes, nvrtc_attn.backward_workspace_bytes))
    size = max(1, *sizes)
    workspace = framework.upload(np.zeros(size, np.uint8))
    nothing = framework.upload(np.zeros(1, np.float32))

    def forward() -> None:
        nvrtc_attn.attention_forward(q, k, v, out, lse=lse, causal=True, workspace=workspace)

    def backward() -> None:
        nvrtc_attn.attention_backward(dout, q, k, v, out, lse, dq, dk, dv, causal=True, workspace=workspace)

    def repeat(which: str, times: int = 20) -> float:
        call = forward if which == "forward" else backward
        call()
        framework.download(nothing)
        start = time.perf_counter()
        for _ in range(times):
            call()
        framework.download(nothing)
        return (time.perf_counter() - start) / times

    forward()
    backward()
    return out, dq, dk, dv, repeat


def find_framework() -> Framework:
    try:
        import torch

        if torch.cuda.is_available():
            return Framework("torch", lambda a: torch.from_numpy(a).cuda(), lambda x: x.cpu().numpy())
    except ImportError:
        pass
    try:
        import cupy

        return Framework("CuPy", cupy.asarray, cupy.asnumpy)
    except ImportError:
        return Framework("nvrtc_attn", nvrtc_attn.to_device, lambda x: x.numpy())


if __name__ == "__main__":
    sys.exit(main())
