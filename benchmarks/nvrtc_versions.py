"""Kernels of two versions of NVRTC, timed against each other on one GPU.

    python benchmarks/nvrtc_versions.py compile DIRECTORY     # once with each NVRTC installed; needs no GPU
    python benchmarks/nvrtc_versions.py time DIRECTORY        # on the GPU; needs neither of them

The first writes the grid's kernels (the shapes of `attention.py --part grid`) as DIRECTORY/<version>/*.cubin. The
second runs each pass with the kernels of both versions in turn, behind a clear of more memory than L2 holds, and prints
the medians. Passes whose kernels have the same instructions in both are only named. About 40 s on an H200.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nvrtc_attn.front.problem import AttentionProblem
from nvrtc_attn.heuristics import choose_backward, choose_forward
from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit import nvrtc_library
from nvrtc_attn.jit.config import KernelConfig
from nvrtc_attn.plans import measure, plan, precompile
from nvrtc_attn.plans.plan import BackwardPlan, ForwardPlan
from nvrtc_attn.runtime import device

LENGTHS = ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))
TARGET: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448, "backend": "auto"}
REPEATS = 5
LIMIT = 0.02
"""What the two may differ by."""


def cells() -> Iterator[tuple[str, AttentionProblem]]:
    """(name, problem with its outputs) of the grid in bfloat16, and with dropout at 4096 tokens."""
    shapes = [(d, b, s, causal, False) for d in (64, 128, 256) for causal in (False, True) for b, s in LENGTHS]
    shapes += [(d, 4, 4096, causal, True) for d in (64, 128) for causal in (False, True)]
    for d, b, s, causal, dropout in shapes:
        request = precompile.Request(
            arch="sm_90", dtype="bfloat16", head_dim=d, batch=b, num_heads=2048 // d, seqlens=((s, s),), causal=causal,
            dropout=dropout,
        )  # fmt: skip
        (problem,) = precompile.problems(request)
        name = f"D {d:<3} {'causal' if causal else 'dense '} {b}x{s}x{2048 // d}{' dropout' if dropout else ''}"
        yield name, problem


def file_name(config: KernelConfig) -> str:
    return f"{config.kernel}-{hashlib.sha256(repr(config).encode()).hexdigest()[:16]}.cubin"


def instructions(code: bytes) -> bytes:
    """The executable sections of a cubin: what runs, without names, versions and notes."""
    (table,) = struct.unpack_from("<Q", code, 40)
    entry_size, entries = struct.unpack_from("<HH", code, 58)
    found = b""
    for i in range(entries):
        flags, _, offset, size = struct.unpack_from("<4Q", code, table + i * entry_size + 8)
        if flags & 4:
            found += code[offset : offset + size]
    return found


def compile_grid(directory: Path) -> None:
    version = ".".join(map(str, nvrtc_library.nvrtc().version))
    target = directory / version
    target.mkdir(parents=True, exist_ok=True)
    configs = {
        launch.config: None
        for _, problem in cells()
        for spec in (choose_forward(problem, **TARGET), choose_backward(problem, **TARGET))
        for launch in spec.launches
    }
    rows = {}
    for config in configs:
        kernel = compiler.compile_kernel(config)
        (target / file_name(config)).write_bytes(kernel.code)
        count = len(instructions(kernel.code)) // 16
        rows[file_name(config)] = [kernel.num_regs, kernel.spill_bytes, count]
        print(f"{version} {config.kernel:<24} {kernel.num_regs} registers, {kernel.spill_bytes} spilled, {count}")
    (target / "kernels.json").write_text(json.dumps(rows, indent=1))


def time_grid(directory: Path) -> int:
    versions = sorted((p.name for p in directory.iterdir() if p.is_dir()), key=lambda v: tuple(map(int, v.split("."))))
    if len(versions) != 2:
        raise SystemExit(f"{directory} has kernels of {versions or 'no version'}: compile with two")
    version = ""

    def cubin(config: KernelConfig) -> compiler.CompiledKernel:
        code = (directory / version / file_name(config)).read_bytes()
        return compiler.CompiledKernel(code, f"{version} {file_name(config)}", "", 0.0, False, config)

    def cubins(configs: Sequence[KernelConfig], _meanwhile: Any) -> Iterator[compiler.CompiledKernel]:
        return map(cubin, configs)

    plan.compile_kernels = cubins  # type: ignore[attr-defined]
    props = device.properties(0)
    print(f"{props.name}, {props.num_sms} multiprocessors; microseconds with NVRTC {versions[0]} and {versions[1]}")
    same, worst = [], 1.0
    for name, problem in cells():
        for backward in (False, True):
            spec: Any = (choose_backward if backward else choose_forward)(problem, **TARGET)
            kernels = [file_name(launch.config) for launch in spec.launches]
            label = f"{name} {'backward' if backward else 'forward'}"
            streams = [[instructions((directory / v / k).read_bytes()) for k in kernels] for v in versions]
            if streams[0] == streams[1]:
                same.append(label)
                continue
            made: dict[str, Any] = {}
            for version in versions:
                plan._kernels.clear()
                make: Any = BackwardPlan if backward else ForwardPlan
                made[version] = make(spec, problem, 0, 0)
            times: dict[str, list[float]] = {v: [] for v in versions}
            for turn in range(REPEATS):
                order = versions if turn % 2 == 0 else versions[::-1]
                for v, us in measure.times_us(problem, backward, {v: made[v] for v in order}, 0, 0).items():
                    times[v].append(us)
            first, second = (median(times[v]) for v in versions)
            ratio = second / first
            worst = max(worst, ratio, 1 / ratio)
            flag = "  <-- more than 2 %" if abs(ratio - 1) > LIMIT else ""
            print(f"{label:<46} {first:9.1f} {second:9.1f}  {ratio:.3f}{flag}", flush=True)
    print(f"same instructions, not timed: {len(same)}")
    for label in same:
        print(f"  {label}")
    print(f"largest ratio {worst:.3f}: {'ok' if worst <= 1 + LIMIT else 'MORE THAN 2 %'}")
    return int(worst > 1 + LIMIT)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("compile", "time"))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "time":
        return time_grid(arguments.directory)
    compile_grid(arguments.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
