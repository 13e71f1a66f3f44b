"""Other tiles of the Hopper forward kernel beside the one that is chosen, on shapes of models that are behind.

    python benchmarks/forward_tiles.py [--part packed,mla,between,rows] [--only REGEX] [--rep 12] [--compile-only]
                                       [--save NAME] [--workers 16]

A line is one problem: microseconds of today's choice, then each candidate with today's time over its own: above 1 is
faster. Runs are replays of CUDA graphs in turn. Every candidate writes over NaN, and its output and LSE must be today's
but for rounding: ``WRONG`` and exit code 1 otherwise. ``list`` is the launch that lists the tiles of packed sequences,
alone, in microseconds. ``--compile-only`` prints registers and spilled bytes and needs no GPU. The part ``rows`` has
tiles of 64 rows (`hopper_small`) beside the table's ("large") and the portable kernel.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measure import graph_of, in_turn, save
from model_cases import spread
from portable_limits import compile_plans

from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import (
    choose_forward,
    hopper_forward,
    hopper_forward_config,
    hopper_forward_tile,
    hopper_small,
)
from nvrtc_attn.heuristics.spec import ForwardPlanSpec, label

NUM_SMS, SMEM_LIMIT = 132, 232448
SKEWED = (64, 128, 4096, 256, 777, 2048, 512, 1024, 96, 3000, 1500)
TOLERANCE = 0.01
"""Relative to the norm: two orders of summation in bfloat16 differ by 0.003."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One problem: dense, or packed with ``lengths``."""

    part: str
    b: int = 1
    q: int = 0
    k: int = 0
    h: int
    hkv: int = 0
    d: int
    dv: int = 0
    causal: bool = False
    window: int | None = None
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        size = f"{self.b}x{self.q}" + (f"x{self.k}" if self.k else "")
        if self.lengths:
            size = f"{len(self.lengths)} docs {min(self.lengths)}-{max(self.lengths)}"
        heads = f"{self.h}/{self.hkv}" if self.hkv else f"{self.h}"
        return f"{self.part} {size} H{heads} D{self.d}{f'/{self.dv}' if self.dv else ''}{' causal' * self.causal}" + (
            f" window {self.window}" if self.window else ""
        )

    def problem(self) -> AttentionProblem:
        dtype, heads_kv, dv = "bfloat16", self.hkv or self.h, self.dv or self.d
        batch, rows = self.b, (self.q, self.k or self.q)
        if self.lengths:
            batch, rows = 1, (sum(self.lengths),) * 2
        wide, narrow, values, out = (
            dense_layout(shape, dtype)
            for shape in (
                (batch, rows[0], self.h, self.d),
                (batch, rows[1], heads_kv, self.d),
                (batch, rows[1], heads_kv, dv),
                (batch, rows[0], self.h, dv),
            )
        )
        longest = (max(self.lengths),) * 2 if self.lengths else rows
        return AttentionProblem(
            dtype=dtype, batch=len(self.lengths) or batch, seqlen_q=longest[0], seqlen_k=longest[1], num_heads=self.h,
            num_heads_kv=heads_kv, head_dim=self.d, head_dim_v=dv, q=wide, k=narrow, v=values, out=out,
            varlen=bool(self.lengths), softmax_scale=self.d**-0.5, window_right=0 if self.causal else None,
            window_left=self.window,
            return_lse=True, lse=dense_layout((batch, self.h, rows[0]), "float32"),
        )  # fmt: skip


def kinds() -> Iterator[Kind]:
    for d in (64, 128):
        for causal in (False, True):
            yield Kind(part="packed", lengths=(1024,) * 64, h=16, d=d, causal=causal)
    yield Kind(part="packed", lengths=SKEWED, h=16, d=64, causal=True)
    yield Kind(part="packed", lengths=spread(32, 512, 64), h=12, d=64)
    yield Kind(part="packed", lengths=spread(64, 1024, 48), h=16, d=72)
    yield Kind(part="mla", b=2, q=8192, h=16, d=192, dv=128, causal=True)
    yield Kind(part="mla", b=1, q=4096, h=128, d=192, dv=128, causal=True)
    yield Kind(part="mla", b=2, q=4096, h=16, d=192, dv=128)
    yield Kind(part="between", b=1, q=4096, h=96, hkv=8, d=192, causal=True)
    yield Kind(part="between", b=32, q=729, h=16, d=72)
    yield Kind(part="between", b=16, q=1024, h=16, d=72)
    yield Kind(part="between", b=16, q=1024, k=120, h=16, d=72)
    yield Kind(part="text", b=16, q=1024, k=120, h=16, d=72)
    yield Kind(part="text", b=4, q=4096, k=77, h=10, d=64)
    yield Kind(part="text", b=8, q=2048, k=300, h=16, d=72)
    yield Kind(part="text", b=2, q=4096, k=226, h=48, d=64)
    yield Kind(part="text", b=4, q=1024, k=77, h=20, d=128)
    yield Kind(part="between", b=8, q=1024, h=8, d=80)
    yield Kind(part="between", b=4, q=2048, h=32, d=80, causal=True)
    yield Kind(part="between", b=2, q=4096, h=32, d=96, causal=True)
    yield Kind(part="between", b=4, q=4096, h=16, d=96)
    yield Kind(part="between", b=16, q=64, k=2048, h=16, hkv=4, d=96)
    yield from rows()


def rows() -> Iterator[Kind]:
    """Short sequences, narrow windows, few query tiles."""
    for d, h in ((64, 32), (128, 16)):
        for causal in (False, True):
            for b, q in ((64, 256), (32, 512), (16, 1024), (8, 2048), (4, 4096)):
                yield Kind(part="rows", b=b, q=q, h=h, d=d, causal=causal)
        yield Kind(part="rows", b=4, q=8192, h=h, d=d, causal=True, window=127)
        yield Kind(part="rows", b=2, q=16384, h=h, d=d, causal=True, window=1023)
        yield Kind(part="rows", lengths=spread(32, 512, 64), h=12, d=d)
        yield Kind(part="rows", lengths=spread(32, 512, 64), h=12, d=d, causal=True)
        yield Kind(part="rows", lengths=(1024,) * 64, h=16, d=d, causal=True)
        yield Kind(part="rows", b=128, q=197, h=12, d=d)
    yield Kind(part="rows", b=1024, q=64, h=8, d=64)
    yield Kind(part="rows", b=64, q=77, h=12, d=64, causal=True)
    yield Kind(part="rows", b=64, q=96, h=12, d=64)
    yield Kind(part="rows", b=256, q=256, h=4, d=32)
    yield Kind(part="rows", b=4, q=4096, k=77, h=10, d=64)
    # One tile a multiprocessor.
    yield Kind(part="rows", b=1, q=1024, h=8, d=64)
    yield Kind(part="rows", b=1, q=512, k=4096, h=16, d=64)
    yield Kind(part="rows", b=1, q=256, k=4096, h=16, d=128)
    yield Kind(part="rows", b=1, q=2048, h=4, d=128)
    yield Kind(part="rows", b=4, q=256, h=8, d=160)
    yield Kind(part="rows", b=1, q=1024, h=8, d=256, causal=True)


def changes(kind: Kind) -> Iterator[dict[str, Any]]:
    """What a candidate has other than the chosen tile."""
    if kind.part == "rows":
        problem = kind.problem()
        large = hopper_forward_tile.large_tile(problem, NUM_SMS)
        yield asdict(large)
        yield asdict(replace(large, block_m=64, half_tile=False, ping_pong=False))
        if hopper_small.shared_width(problem):
            yield asdict(hopper_small.several_blocks(problem, large))
    elif kind.part == "text":  # few keys: several consumers on a multiprocessor compute beside each other's gaps
        shared = {"block_m": 64, "num_stages_q": 1, "ping_pong": False, "lazy_max": True}
        for columns, stages, blocks in ((64, 2, 2), (64, 3, 2), (80, 2, 2), (128, 2, 2), (48, 2, 3), (64, 2, 3)):
            if kind.d <= 64 or blocks == 2:
                yield shared | {"block_n": columns, "num_stages": stages, "min_blocks_per_sm": blocks}
        for lazy in (False, True):
            yield {"block_m": 192, "block_n": 128, "lazy_max": lazy}
    elif kind.part == "mla":
        for columns in (96, 112, 128):
            for lazy in (False, True):
                yield {"block_n": columns, "lazy_max": lazy}
    elif kind.d == 192:
        for columns in (96, 112):
            yield {"block_n": columns}
    elif kind.lengths and kind.d <= 128:
        if kind.d <= 64:
            for stages in (2, 3):
                yield {"block_m": 192, "block_n": 128, "num_stages": stages}
                yield {"block_m": 192, "block_n": 112, "num_stages": stages}
            yield {"block_m": 128, "block_n": 128}
        if kind.causal:
            for half in (False, True):
                yield {"half_tile": half, "block_n": 128}
    if 64 < kind.d <= 96:
        for columns in (112, 96, 80):
            yield {"block_m": 192, "block_n": columns}
        for columns in (112, 128):
            yield {"block_m": 128, "block_n": columns}
        if kind.k:
            yield {"block_m": 128, "block_n": min(-(-kind.k // 16) * 16, 128)}


def specs_of(kind: Kind) -> dict[str, ForwardPlanSpec]:
    """Today's choice as ``today``, then the candidates that fit and differ from it and from each other."""
    problem = kind.problem()
    tile = hopper_forward_tile.choose_tile(problem, NUM_SMS)
    found = {"today": hopper_forward.plan_spec(problem, tile, num_sms=NUM_SMS)}
    for change in changes(kind):
        other = replace(tile, **({"half_tile": False} | change))
        # CUDA takes 1 KB of shared memory for each further block of a multiprocessor.
        room = SMEM_LIMIT // other.min_blocks_per_sm - 1024 * (other.min_blocks_per_sm - 1)
        if hopper_forward_config.smem_bytes(hopper_forward_config.config_of(problem, other)) > room:
            continue
        spec = hopper_forward.plan_spec(problem, other, num_sms=NUM_SMS)
        if spec not in found.values():
            words = [f"{other.block_m}x{other.block_n}"]
            shown = {k: v for k, v in change.items() if not k.startswith("block") and v != getattr(tile, k)}
            words += [f"{k}={v}" for k, v in shown.items()]
            found[" ".join(words)] = spec
    if kind.part == "rows":
        target = {"arch": "sm_90a", "num_sms": NUM_SMS, "smem_limit": SMEM_LIMIT}
        spec = choose_forward(problem, **target, backend="portable")
        found |= {"portable": spec} if spec not in found.values() else {}
    return found


class Runs:
    """Tensors of one problem, and its plans as functions that run over them."""

    def __init__(self, kind: Kind, specs: dict[str, ForwardPlanSpec]) -> None:
        import torch

        from nvrtc_attn.front.philox import RngState
        from nvrtc_attn.plans.plan import ForwardPlan

        problem = kind.problem()

        def randn(shape: tuple[int, ...]) -> Any:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        tensors = {name: randn(problem.shape_of(name)) for name in ("q", "k", "v", "out")}
        tensors["lse"] = torch.empty(problem.shape_of("lse"), device="cuda")
        if kind.lengths:
            ends = torch.tensor([0, *kind.lengths]).cumsum(0).to(device="cuda", dtype=torch.int32)
            tensors |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        self.tensors = tensors
        addresses = tuple(tensors[x].data_ptr() if x in tensors else 0 for x in ForwardPlan.OPERANDS)
        self.functions: dict[str, Callable[[], None]] = {}
        if kind.lengths:
            specs = {**specs, "list": replace(specs["today"], launches=specs["today"].launches[:1])}
        for name, spec in specs.items():
            plan = ForwardPlan(spec, problem, 0, torch.cuda.current_stream().cuda_stream)
            workspace = torch.empty(max(plan.workspace_bytes, 1), device="cuda", dtype=torch.uint8)
            self.functions[name] = graph_of(
                lambda plan=plan, workspace=workspace: plan.run(
                    torch.cuda.current_stream().cuda_stream, addresses, workspace.data_ptr(), RngState(17, 40)
                )
            ).replay

    def results(self, name: str) -> tuple[Any, Any]:
        import torch

        for output in ("out", "lse"):
            self.tensors[output].fill_(torch.nan)
        self.functions[name]()
        torch.cuda.synchronize()
        return self.tensors["out"].double(), self.tensors["lse"].double()

    def wrong(self) -> list[str]:
        """Names of candidates whose results are not today's."""
        expected = self.results("today")
        found = []
        for name in self.functions:
            if name not in ("today", "list"):
                errors = [float((x - y).norm() / y.norm()) for x, y in zip(self.results(name), expected, strict=True)]
                if not max(errors) < TOLERANCE:
                    found.append(f"{name} {errors}")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="packed,mla,between")
    parser.add_argument("--only", default="", help="regular expression in a problem's name")
    parser.add_argument("--rep", type=int, default=12, help="milliseconds of a measurement")
    parser.add_argument("--compile-only", action="store_true", help="registers and spills, without a GPU")
    parser.add_argument("--save", help="name of a file in the results folder")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16))
    arguments = parser.parse_args()
    begin = time.perf_counter()
    work = [
        (kind, specs_of(kind))
        for kind in kinds()
        if kind.part in arguments.part.split(",") and re.search(arguments.only, kind.name)
    ]
    compiled = compile_plans((spec for _, specs in work for spec in specs.values()), arguments.workers)
    rows: list[dict[str, Any]] = []
    failed = False
    for kind, specs in work:
        if arguments.compile_only:
            print(f"{kind.name}: today {label(specs['today'])}")
            for name, spec in specs.items():
                kernel = compiled[spec.main.config]
                serial = " serialised (C7511)" if "C7511" in kernel.log else ""
                print(f"  {name:32} {kernel.num_regs} registers, spills {kernel.spill_bytes}{serial}", flush=True)
            continue
        runs = Runs(kind, specs)
        wrong = runs.wrong()
        times = {name: 1000 * t["ms"] for name, t in in_turn(runs.functions, rep_ms=arguments.rep).items()}
        listing = f", list {times.pop('list'):.1f}" if "list" in times else ""
        found = [f"{name} {times['today'] / us:.3f}" for name, us in times.items() if name != "today"]
        found += [f"WRONG {x}" for x in wrong]
        failed |= bool(wrong)
        print(
            f"{kind.name}: {times['today']:.1f} us{listing} ({label(specs['today'])}) | {' | '.join(found)}", flush=True
        )
        rows.append({"problem": kind.name, "us": times, "wrong": wrong})
    if arguments.save:
        print(save(arguments.save, rows, arguments.results))
    print(f"{time.perf_counter() - begin:.0f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
