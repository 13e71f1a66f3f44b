"""Tiles of the portable kernels under the shared memory of other GPUs, timed on this one.

    python benchmarks/portable_limits.py [--limit 99,163] [--pass fwd,bwd,det] [--head-dim 64,128] [--quick]

Compute capability 8.6, 8.9 and 12.x have 99 KB of shared memory per block and 100 KB per multiprocessor, 8.0 and 8.7
163 and 164. Each launch asks for as much shared memory as leaves room on a multiprocessor of this GPU for exactly the
blocks that fit there, so that no tile gains from memory that it would not have. What differs still: clocks, memory, and
matrix units that are two to four times slower beside shared memory on 8.6, 8.9 and 12.x than on an H100.

A line is one problem: the time of the tile before, which was chosen while nothing asked for 8 warps a multiprocessor,
then rows x keys of each tile, its warps (along keys x queries), slots of Q and dO, V for values in registers, and that
time over the tile's: above 1 is faster. ``*`` is what the tables choose now, BAD a wrong result (against float64, of a
problem of the same kernels whose length no tile divides). ``--out`` has registers, spills and errors besides.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nvrtc_attn.front.operands import BACKWARD, FORWARD, addresses
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import (
    portable_backward,
    portable_backward_config,
    portable_backward_tile,
    portable_dq,
    portable_forward,
    portable_forward_config,
    portable_forward_tile,
)
from nvrtc_attn.heuristics.spec import BackwardPlanSpec, ForwardPlanSpec, label
from nvrtc_attn.jit.compile import CompiledKernel, compile_kernel
from nvrtc_attn.jit.config import DqConfig, KernelConfig

Spec = ForwardPlanSpec | BackwardPlanSpec
KIB = 1024
SMS = 132
MAIN_KERNELS = ("forward_portable", "backward_portable", "backward_dq")
CHECKED_LENGTH = 1999


def f(block_m: int, block_n: int, num_warps: int, blocks: int = 1, **more: Any) -> portable_forward_config.Tile:
    return portable_forward_config.Tile(
        block_m=block_m, block_n=block_n, num_warps=num_warps, min_blocks_per_sm=blocks, **more
    )


def b(block_m: int, block_n: int, n: int, m: int, m_dq: int, stages: int = 1, stages_dout: int = 1, blocks: int = 1,
      keep_v: bool = False, slices: int = 1) -> portable_backward_config.Tile:  # fmt: skip
    """Warps are ``n`` along the keys by ``m`` along the queries."""
    return portable_backward_config.Tile(
        width=512, block_m=block_m, block_n=block_n, num_warps=n * m, warps_n=n, warps_m_dq=m_dq, num_stages=stages,
        num_stages_dout=stages_dout, blocks_per_sm=blocks, v_in_smem=not keep_v, v_in_registers=keep_v,
        dim_slices=slices,
    )  # fmt: skip


def q(block_m: int, block_n: int, warps_m: int, stages: int = 2, chunk_n: int = 32, warps_d: int = 1,
      preload: bool = False, slice_d: int = 0) -> dict[str, Any]:  # fmt: skip
    found: dict[str, Any] = {
        "block_m": block_m, "block_n": block_n, "num_warps": warps_m * warps_d, "warps_m": warps_m, "preload": preload,
        "num_stages": stages, "chunk_n": block_n if stages == 1 else min(block_n, chunk_n),
    }  # fmt: skip
    return found | ({"streamed": True, "slice_d": slice_d} if slice_d else {})


@dataclass(frozen=True)
class Cell:
    """Tiles of one pass; the first is the one before. Of ``det`` the tile is dq's, and the dk/dv kernel the table's."""

    limit: int
    which: str
    head_dims: tuple[int, int]
    tiles: tuple[Any, ...]
    dtype: str = "bfloat16"
    masks: tuple[bool, ...] = (False, True)
    """Dense, causal."""


CELLS = (
    Cell(
        99,
        "bwd",
        (64, 64),
        (
            b(64, 128, 4, 1, 2, 2, 2),
            b(64, 128, 4, 2, 4, 2, 2),
            b(64, 128, 4, 1, 2, blocks=2, keep_v=True),
            b(32, 128, 4, 1, 2, blocks=2),
            b(64, 64, 4, 1, 2, blocks=2),
            b(64, 128, 8, 1, 4, 2, 2, keep_v=True),
        ),
    ),
    Cell(
        99,
        "bwd",
        (80, 80),
        (b(64, 64, 2, 2, 2, 2), b(64, 128, 4, 2, 2), b(64, 64, 2, 4, 2, 2), b(64, 128, 8, 1, 2, 2, keep_v=True)),
    ),
    Cell(
        99,
        "bwd",
        (128, 128),
        (
            b(64, 64, 2, 2, 2, 2),
            b(64, 64, 2, 4, 2, 2),
            b(64, 64, 4, 2, 2, 2),
            b(32, 128, 4, 2, 2),
            b(64, 128, 8, 1, 2, 2, keep_v=True),
            b(64, 64, 2, 4, 2, 2, 2, keep_v=True),
        ),
    ),
    Cell(
        99,
        "bwd",
        (192, 192),
        (b(32, 32, 2, 2, 2), b(64, 64, 4, 2, 2, keep_v=True), b(32, 64, 4, 2, 2, 2), b(64, 32, 2, 4, 2)),
    ),
    Cell(
        99,
        "bwd",
        (256, 256),
        (
            b(32, 32, 2, 2, 2),
            b(32, 64, 4, 2, 2, 2, keep_v=True),
            b(32, 64, 4, 2, 2, keep_v=True),
            b(64, 32, 2, 4, 2, keep_v=True),
        ),
    ),
    Cell(99, "fwd", (128, 128), (f(128, 32, 4, 2), f(64, 64, 4, 2), f(128, 64, 8), f(128, 96, 8))),
    Cell(99, "fwd", (160, 160), (f(128, 32, 4), f(128, 64, 8), f(64, 32, 4, 2), f(128, 32, 8))),
    Cell(99, "fwd", (192, 128), (f(128, 32, 4, 2), f(128, 64, 8), f(64, 32, 4, 2), f(128, 32, 8))),
    Cell(99, "fwd", (192, 192), (f(64, 64, 4, 2), f(128, 64, 8), f(64, 32, 4, 2), f(128, 32, 8))),
    Cell(99, "fwd", (256, 256), (f(64, 64, 4, 2), f(128, 32, 8), f(64, 16, 4, 2))),
    Cell(163, "fwd", (192, 128), (f(128, 64, 4, 2), f(128, 64, 8), f(128, 32, 4, 2), f(64, 64, 4, 2))),
    Cell(163, "fwd", (256, 256), (f(64, 64, 4, 2), f(128, 64, 8), f(64, 32, 4, 2), f(64, 64, 8, warps_n=2))),
    Cell(99, "fwd", (96, 96), (f(128, 32, 4), f(64, 32, 4), f(128, 32, 8)), "float32", (False,)),
    Cell(
        99,
        "fwd",
        (128, 128),
        (f(128, 32, 4), f(128, 32, 8), f(64, 16, 4), f(64, 32, 8, warps_n=2)),
        "float32",
        (False,),
    ),
    Cell(
        99, "fwd", (128, 128), (f(64, 32, 4), f(128, 32, 8), f(64, 16, 4), f(64, 32, 8, warps_n=2)), "float32", (True,)
    ),
    Cell(
        99,
        "bwd",
        (64, 64),
        (b(64, 64, 4, 1, 2), b(64, 64, 4, 2, 4), b(64, 64, 4, 2, 2), b(32, 32, 2, 2, 2), b(32, 64, 4, 2, 2)),
        "float32",
    ),
    Cell(99, "bwd", (96, 96), (b(32, 32, 2, 2, 2), b(32, 64, 4, 2, 2)), "float32"),
    Cell(163, "bwd", (160, 160), (b(32, 32, 2, 2, 2, slices=2), b(32, 64, 4, 2, 2), b(64, 32, 2, 4, 2)), "float32"),
    Cell(99, "det", (64, 64), (q(128, 64, 4), q(128, 32, 4), q(128, 64, 4, 1), q(64, 64, 4))),
    Cell(99, "det", (128, 128), (q(128, 32, 4), q(128, 32, 8), q(64, 32, 4, 1, preload=True), q(64, 32, 4, 1))),
    Cell(99, "det", (192, 192), (q(64, 32, 4), q(64, 32, 4, 1, warps_d=2), q(64, 64, 4, slice_d=64))),
    Cell(
        99,
        "det",
        (256, 256),
        (q(64, 32, 4, 1), q(64, 64, 4, slice_d=64), q(128, 64, 8, slice_d=64), q(64, 64, 4, warps_d=2, slice_d=128)),
    ),
    Cell(163, "det", (128, 128), (q(128, 32, 4), q(128, 32, 8), q(64, 32, 4, preload=True))),
    Cell(163, "det", (192, 192), (q(64, 32, 4), q(64, 32, 4, 1), q(128, 32, 8, 1), q(64, 32, 4, warps_d=2))),
    Cell(163, "det", (256, 256), (q(64, 32, 4), q(128, 32, 8, 1), q(64, 32, 4, warps_d=2))),
)


def problem_of(cell: Cell, causal: bool, batch: int, seqlen: int, heads: int) -> AttentionProblem:
    """A problem of one cell; all tensors are dense."""
    wide, narrow = (dense_layout((batch, seqlen, heads, d), cell.dtype) for d in cell.head_dims)
    return AttentionProblem(
        dtype=cell.dtype, batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=heads, num_heads_kv=heads,
        head_dim=cell.head_dims[0], head_dim_v=cell.head_dims[1], q=wide, k=wide, v=narrow, out=narrow, dout=narrow,
        dq=wide, dk=wide, dv=narrow, softmax_scale=cell.head_dims[0] ** -0.5, return_lse=True,
        window_right=0 if causal else None, deterministic=cell.which == "det",
        lse=dense_layout((batch, heads, seqlen), "float32"),
    )  # fmt: skip


@contextlib.contextmanager
def only(cell: Cell, tile: Any) -> Iterator[None]:
    """The tables hold nothing but ``tile``."""
    if cell.which == "fwd":
        patch = mock.patch.object(portable_forward_tile, "_tiles_by_shape", return_value=[tile])
    elif cell.which == "bwd":
        never = mock.Mock(return_value=False)
        patch = mock.patch.multiple(portable_backward_tile, TILES_16BIT=(tile,), TILES_32BIT=(tile,), _spills=never)
    else:

        def candidates(base: DqConfig) -> Iterator[DqConfig]:
            yield replace(base, **tile)

        patch = mock.patch.object(portable_dq, "_dq_candidates", candidates)
    with patch:
        yield


def choose(cell: Cell, problem: AttentionProblem, arch: str) -> Spec:
    target: dict[str, Any] = {"arch": arch, "num_sms": SMS, "smem_limit": cell.limit * KIB, "num_splits": 1}
    if cell.which == "fwd":
        return portable_forward.choose_forward(problem, **target)
    return portable_backward.choose_backward(problem, **target)


def spec_of(cell: Cell, tile: Any, problem: AttentionProblem, arch: str) -> Spec:
    with only(cell, tile):
        return choose(cell, problem, arch)


def main_config(cell: Cell, spec: Spec) -> KernelConfig:
    kernel = {"fwd": "forward_portable", "bwd": "backward_portable", "det": "backward_dq"}[cell.which]
    return next(launch.config for launch in spec.launches if launch.config.kernel == kernel)


def resident(limit: int, smem_bytes: int) -> int:
    """Blocks in the shared memory of a multiprocessor of ``limit`` + 1 KB, of which each block gives 1 KB away."""
    return (limit + 1) * KIB // (smem_bytes + KIB)


def limited(spec: Spec, limit: int, smem_per_sm: int) -> Spec:
    """``spec`` with launches that hold no more blocks a multiprocessor than a GPU with ``limit`` KB does."""

    def padded(smem_bytes: int) -> int:
        return (smem_per_sm // resident(limit, smem_bytes) - KIB) // 128 * 128

    launches = tuple(
        replace(x, smem_bytes=padded(x.smem_bytes)) if x.config.kernel in MAIN_KERNELS else x for x in spec.launches
    )
    return replace(spec, launches=launches)


def compile_one(config: KernelConfig) -> CompiledKernel:
    return compile_kernel(config)


def compile_all(configs: list[KernelConfig], workers: int) -> dict[KernelConfig, CompiledKernel]:
    """Each in a process of its own, through the cache on disk."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return dict(zip(configs, pool.map(compile_one, configs), strict=True))


def compile_plans(
    specs: Iterable[ForwardPlanSpec | BackwardPlanSpec], workers: int
) -> dict[KernelConfig, CompiledKernel]:
    """All kernels of these plans, each once; prints how many, and how long it took."""
    begin = time.perf_counter()
    configs = dict.fromkeys(launch.config for spec in specs for launch in spec.launches)
    compiled = compile_all(list(configs), workers)
    print(f"{len(configs)} kernels compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    return compiled


def warps_per_sm(limit: int, config: KernelConfig, smem_bytes: int, num_regs: int) -> int:
    registers = 256 * math.ceil(32 * num_regs / 256)  # of a warp
    by_registers = 65536 // registers // config.num_warps
    return config.num_warps * min(resident(limit, smem_bytes), by_registers, 48 // config.num_warps)


class Reference:
    """Inputs of one problem and its float64 results for one batch entry and head."""

    def __init__(self, problem: AttentionProblem, causal: bool) -> None:
        import torch

        dtype = getattr(torch, problem.dtype)
        generator = torch.Generator("cuda").manual_seed(0)

        def randn(dim: int) -> torch.Tensor:
            shape = (problem.batch, problem.seqlen_q, problem.num_heads, dim)
            return torch.randn(shape, device="cuda", generator=generator).to(dtype)

        d, dv = problem.head_dim, problem.head_dim_v
        self.problem = problem
        self.q, self.k, self.v, self.dout = randn(d), randn(d), randn(dv), randn(dv)
        parts = [x[-1, :, -1].double() for x in (self.q, self.k, self.v, self.dout)]
        q64, k64, v64, dout64 = parts
        scores = q64 @ k64.T * problem.softmax_scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        p = scores.softmax(-1)
        out = p @ v64
        ds = p * (dout64 @ v64.T - (dout64 * out).sum(-1, keepdim=True)) * problem.softmax_scale
        self.expected = {"out": out, "dq": ds @ k64, "dk": ds.T @ q64, "dv": p.T @ dout64}
        self.out = torch.empty_like(self.v)
        self.lse = torch.empty((problem.batch, problem.num_heads, problem.seqlen_q), device="cuda")

    def error(self, run: Any, backward: bool, workspace_bytes: int) -> float:
        """Largest relative error (Frobenius norm) of a plan's outputs, which begin as NaN."""
        import torch

        workspace = torch.full((workspace_bytes // 4 + 64,), math.nan, device="cuda")
        arguments: dict[str, Any] = {name: getattr(self, name) for name in ("q", "k", "v", "out", "lse")}
        outputs = {"out": self.out}
        if backward:
            outputs = {name: torch.full_like(getattr(self, name[1]), math.nan) for name in ("dq", "dk", "dv")}
            arguments |= {"dout": self.dout, **outputs}
        else:
            self.out.fill_(math.nan)
        pointers = {name: x.data_ptr() for name, x in arguments.items()}
        where = addresses(BACKWARD if backward else FORWARD, pointers)
        run(torch.cuda.current_stream().cuda_stream, where, workspace.data_ptr())
        found = [(x[-1, :, -1].double(), self.expected[name]) for name, x in outputs.items()]
        return max(float((x - y).norm() / y.norm()) for x, y in found)


def measure_cell(
    cell: Cell, causal: bool, quick: bool, arch: str, compiled: dict[KernelConfig, CompiledKernel], smem_per_sm: int
) -> tuple[list[str], str]:
    """A line for each tile, and a short one for all of them."""
    import torch

    from nvrtc_attn.plans import measure
    from nvrtc_attn.plans.plan import BackwardPlan, ForwardPlan

    backward = cell.which != "fwd"
    stream = torch.cuda.current_stream().cuda_stream

    def plan_of(spec: Spec, problem: AttentionProblem) -> Any:
        made: Any = ForwardPlan if isinstance(spec, ForwardPlanSpec) else BackwardPlan
        return made(spec, problem, 0, stream)

    small = problem_of(cell, causal, 1, CHECKED_LENGTH, 16)
    large = problem_of(cell, causal, *(1 if quick else 4, 4096, 16))
    reference = Reference(small, causal)
    forward = replace(cell, which="fwd")
    plan = plan_of(choose(forward, replace(small, deterministic=False), arch), small)
    reference.error(plan.run, False, plan.workspace_bytes)  # fills out and lse
    plans, errors, names = {}, [], []
    for tile in cell.tiles:
        spec = limited(spec_of(cell, tile, small, arch), cell.limit, smem_per_sm)
        plan = plan_of(spec, small)
        errors.append(reference.error(plan.run, backward, plan.workspace_bytes))
        spec = limited(spec_of(cell, tile, large, arch), cell.limit, smem_per_sm)
        names.append(name_of(cell, spec))
        plans[names[-1]] = plan_of(spec, large)
    times = measure.times_us(large, backward, plans, 0, stream)
    now = name_of(cell, choose(cell, large, arch))
    lines = []
    brief = [f"{describe(cell, causal)} {times[names[0]] / 1e3:7.3f} ms"]
    for tile, name, error in zip(cell.tiles, names, errors, strict=True):
        time_us = times.get(name, math.nan)
        bad = "" if error < (1e-2 if cell.dtype == "bfloat16" else 1e-4) else " BAD"
        ratio = times[names[0]] / time_us
        which = f"{' before' if tile is cell.tiles[0] else ''}{' chosen' if name == now else ''}"
        lines.append(
            f"{describe(cell, causal)} {name:58} {numbers_of(cell, tile, large, arch, compiled)} {time_us / 1e3:7.3f} "
            f"{ratio:5.2f} {error:.1e}{bad}{which}"
        )
        brief.append(f"{'*' if name == now else ''}{short(cell, tile)} {ratio:.2f}{bad}")
    return lines, " | ".join(brief)


def describe(cell: Cell, causal: bool) -> str:
    head_dims = "/".join(str(d) for d in dict.fromkeys(cell.head_dims))
    dtype = {"bfloat16": "bf16", "float32": "f32"}[cell.dtype]
    return f"{cell.limit:3} {cell.which} {dtype:4} {head_dims:>7} {'causal' if causal else 'dense':6}"


def numbers_of(
    cell: Cell, tile: Any, problem: AttentionProblem, arch: str, compiled: dict[KernelConfig, CompiledKernel]
) -> str:
    """Warps a multiprocessor, registers, bytes of spills and of shared memory."""
    spec = spec_of(cell, tile, problem, arch)
    config = main_config(cell, spec)
    smem = next(x.smem_bytes for x in spec.launches if x.config == config)
    kernel = compiled[config]
    warps = warps_per_sm(cell.limit, config, smem, kernel.num_regs or 255)
    return f"{warps:2} {kernel.num_regs:3} {kernel.spill_bytes:3} {smem:6}"


def short(cell: Cell, tile: Any) -> str:
    """Rows, keys, warps, and what else tells the tiles of a cell apart."""
    if cell.which == "fwd":
        return f"{tile.block_m}x{tile.block_n}w{tile.num_warps}{'n' if tile.warps_n > 1 else ''}"
    if cell.which == "bwd":
        warps = f"w{tile.warps_n}x{tile.num_warps // tile.warps_n}"
        return (
            f"{tile.block_m}x{tile.block_n}{warps}q{tile.num_stages}o{tile.num_stages_dout}"
            f"{'V' if tile.v_in_registers else ''}"
        )
    return (
        f"{tile['block_m']}x{tile['block_n']}w{tile['warps_m']}x{tile['num_warps'] // tile['warps_m']}"
        f"s{tile['num_stages']}{'p' if tile['preload'] else ''}{'r' if 'streamed' in tile else ''}"
    )


def name_of(cell: Cell, spec: Spec) -> str:
    """As `label`, without the word that all have in common."""
    if cell.which != "det":
        words = label(spec).removeprefix("portable ")
        return words.replace("num_", "").replace("min_blocks_per_sm", "blocks").replace("no v_in_smem v_in", "v_in")
    config = main_config(cell, spec)
    assert isinstance(config, DqConfig)
    names = ("num_warps", "warps_m", "num_stages", "chunk_n", "preload", "streamed")
    parts = [f"{name.removeprefix('num_')}={int(getattr(config, name))}" for name in names if getattr(config, name)]
    return " ".join([f"{config.block_m}x{config.block_n}", *parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="99,163", help="KB of shared memory per block")
    parser.add_argument("--pass", dest="which", default="fwd,bwd,det", help="det: the deterministic backward pass")
    parser.add_argument("--head-dim", default="", help="only these head dims of q")
    parser.add_argument("--quick", action="store_true", help="batch 1 instead of 4, and causal only")
    parser.add_argument("--arch", default="sm_90", help="compile target; another than the GPU's needs --compile-only")
    parser.add_argument("--compile-only", action="store_true", help="registers and spills, without a GPU")
    parser.add_argument("--out", type=Path, help="file for all numbers of each tile")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16))
    arguments = parser.parse_args()
    limits = {int(x) for x in arguments.limit.split(",")}
    passes = set(arguments.which.split(","))
    head_dims = {int(x) for x in arguments.head_dim.split(",") if x}
    cells = [
        c for c in CELLS
        if c.limit in limits and c.which in passes and (not head_dims or c.head_dims[0] in head_dims)
    ]  # fmt: skip
    start = time.perf_counter()
    plans: list[ForwardPlanSpec | BackwardPlanSpec] = []
    masks = (True,) if arguments.quick else (False, True)
    for cell in cells:
        for causal in (mask for mask in masks if mask in cell.masks):
            small = problem_of(cell, causal, 1, CHECKED_LENGTH, 16)
            large = problem_of(cell, causal, 1 if arguments.quick else 4, 4096, 16)
            plans.append(choose(replace(cell, which="fwd"), replace(small, deterministic=False), arguments.arch))
            for tile in cell.tiles:
                of_both = [spec_of(cell, tile, p, arguments.arch) for p in (small, large)]
                if main_config(cell, of_both[0]) != main_config(cell, of_both[1]):
                    raise SystemExit(f"not checked with the kernel that is timed: {cell}")
                plans += of_both
    compiled = compile_plans(plans, arguments.workers)
    head = f" KB pass type       D mask   {'tile':58} wp reg spl   smem      ms ratio error"
    table = [head]
    for cell in cells:
        for causal in (mask for mask in masks if mask in cell.masks):
            if arguments.compile_only:
                problem = problem_of(cell, causal, 4, 4096, 16)
                for tile in cell.tiles:
                    name = name_of(cell, spec_of(cell, tile, problem, arguments.arch))
                    numbers = numbers_of(cell, tile, problem, arguments.arch, compiled)
                    print(f"{describe(cell, causal)} {name:58} {numbers}")
                continue
            import torch

            smem_per_sm = torch.cuda.get_device_properties(0).shared_memory_per_multiprocessor
            lines, brief = measure_cell(cell, causal, arguments.quick, arguments.arch, compiled, smem_per_sm)
            table += lines
            print(brief, flush=True)
    if arguments.out is not None:
        arguments.out.write_text("\n".join(table) + "\n")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
