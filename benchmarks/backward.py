"""Ways to run the Hopper backward pass beside the one that is chosen now, on shapes of models.

    python benchmarks/backward.py [--only REGEX] [--compile-only] [--budget SECONDS] [--out FILE]

A line is one problem: the time of today's choice in milliseconds and TFLOP/s, then each candidate with today's time
over its own, above 1 is faster, and behind ``!`` how far its gradients are from today's where that is more than two
ways to add up the same numbers differ: the largest of ‖x - y‖ / ‖y‖ over dq, dk and dv, whose elements begin as NaN.
Inputs are standard normal. Runs alternate, each behind a clear of the L2. Candidates change the `Tile` of
`hopper_backward_config`.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from portable_limits import compile_plans

from nvrtc_attn import heuristics
from nvrtc_attn.base.errors import UnsupportedError
from nvrtc_attn.front.operands import BACKWARD, FORWARD, addresses
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import hopper_backward, hopper_backward_tile
from nvrtc_attn.heuristics.spec import BackwardPlanSpec, ForwardPlanSpec, label

TARGET: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
MOST_APART = 4e-3
"""Gradients of one problem differ by 1e-3 at most when float32 sums are added in another order and then rounded."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model's problem and its candidates."""

    name: str
    b: int = 1
    q: int
    k: int = 0
    h: int
    hkv: int = 0
    d: int
    causal: bool = False
    window: int | None = None
    packed: bool = False
    """The ``b`` sequences lie one behind the other, between cu_seqlens."""
    ways: dict[str, dict[str, Any]] = field(default_factory=dict)

    def problem(self) -> AttentionProblem:
        keys, heads_kv, dtype = self.k or self.q, self.hkv or self.h, "bfloat16"
        wide, narrow = (
            dense_layout((1, self.b * rows, heads, self.d) if self.packed else (self.b, rows, heads, self.d), dtype)
            for rows, heads in ((self.q, self.h), (keys, heads_kv))
        )
        lse = (1, self.h, self.b * self.q) if self.packed else (self.b, self.h, self.q)
        return AttentionProblem(
            dtype=dtype, batch=self.b, seqlen_q=self.q, seqlen_k=keys, num_heads=self.h, num_heads_kv=heads_kv,
            head_dim=self.d, head_dim_v=self.d, q=wide, k=narrow, v=narrow, out=wide, dout=wide, dq=wide, dk=narrow,
            dv=narrow, softmax_scale=self.d**-0.5, window_right=0 if self.causal else None, window_left=self.window,
            return_lse=True, lse=dense_layout(lse, "float32"), varlen=self.packed,
        )  # fmt: skip

    @property
    def flops(self) -> float:
        """Of five products of the scores that are kept."""
        keys = self.k or self.q
        pairs = float(self.q * keys)
        if self.causal:
            reach = keys if self.window is None else min(self.window + 1, keys)
            pairs = reach * (reach + 1) / 2 + (self.q - reach) * reach
        return 10 * self.b * self.h * pairs * self.d


def split(*pairs: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Splits of the query heads and heads handed out together."""
    return {f"s{s} hg{h}": {"splits": s, "heads_together": h} for s, h in pairs}


def parts(*pairs: tuple[int, int], **more: Any) -> dict[str, dict[str, Any]]:
    """Parts of a key tile's query tiles and key tiles before that are whole."""
    name = "".join(f" {key[0]}{value}" for key, value in more.items())
    return {f"p{p}{f' w{w}' if w else ''}{name}": {"parts": p, "whole": w, "splits": 1, **more} for p, w in pairs}


def step(*tiles: float, **more: Any) -> dict[str, dict[str, Any]]:
    name = "".join(f" {key[0]}{value}" for key, value in more.items())
    return {f"step {x:g}{name}": {"step": int(4096 * x), **more} for x in tiles}


def apart(*pairs: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Rows prepared by a kernel before, as `split`; 80 rows where heads are not split."""
    changes = {"fused": False}
    return {
        f"apart {name}": way | changes | {"block_m": 80 if way["splits"] == 1 else 64}
        for name, way in split(*pairs).items()
    } | {
        f"apart 64 {name}": way | changes | {"block_m": 64} for name, way in split(*pairs).items() if way["splits"] == 1
    }


def of_memory(group: int) -> dict[str, dict[str, Any]]:
    """Splits and parts of groups of so many heads, up and down: what differs is how much is read again from memory."""
    down = {"descending": True}
    ways = {
        f"{name} {'down' if order['descending'] else 'up'}": way | order | {"block_m": 80 if way["splits"] == 1 else 64}
        for order in ({"descending": False}, down)
        for name, way in split(*((s, g) for s in (1, 2, 4, 8, 16) for g in (1, 2, 4) if group % s == 0)).items()
    }
    for order in ({"descending": False}, down):
        for name, way in (parts((group, 0), heads_together=1) | parts((group, 0), heads_together=2)).items():
            ways[f"{name} {'down' if order['descending'] else 'up'}"] = way | order | {"block_m": 80}
    return ways


OWN = {"own": {"own_code": True}, "v": {"values_in_registers": True}}
KV: dict[str, Any] = {"keys_in_registers": True, "values_in_registers": True}
OWN |= {"own v": OWN["own"] | OWN["v"], "own kv": OWN["own"] | KV}
ORDER: dict[str, Any] = {"up": {"descending": False}, "down": {"descending": True}}
TOGETHER: dict[str, Any] = {f"hg{x}": {"heads_together": x} for x in (4, 8, 16, 32)}
CASES = (
    Case(
        name="Wan 2.1 14B, text",
        q=32760,
        k=512,
        h=40,
        d=128,
        ways=step(0, 1, 2, 4) | parts((2, 0), (3, 0), (4, 0), (9, 0), (9, 132), step=4096) | parts((4, 0), step=8192),
    ),
    Case(name="SDXL, text", b=4, q=4096, k=77, h=10, d=64, ways=parts((2, 0), (3, 0), (6, 0), (9, 0))),
    Case(name="Stable Diffusion 1.5, text", b=4, q=4096, k=77, h=8, d=40, ways=parts((4, 0), (8, 0))),
    Case(name="Wan 2.1 14B, image tokens", q=32760, k=257, h=40, d=128, ways=step(1) | parts((6, 0), step=4096)),
    Case(name="SDXL, text of 3 tiles", b=4, q=4096, k=300, h=10, d=64, ways=step(1, 2) | parts((2, 0), (4, 0))),
    Case(
        name="Nemotron",
        q=4096,
        h=96,
        hkv=8,
        d=192,
        causal=True,
        ways={f"hg{x}": {"heads_together": x} for x in (1, 2, 4, 8)}
        | split((2, 1), (2, 2), (3, 2), (4, 2), (4, 4), (6, 2), (6, 4), (12, 4)),
    ),
    Case(
        name="D 256, heads 16 on 2",
        b=2,
        q=4096,
        h=16,
        hkv=2,
        d=256,
        causal=True,
        ways=split((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2)),
    ),
    Case(name="D 256, heads 16 on 8", b=4, q=2048, h=16, hkv=8, d=256, causal=True, ways=split((1, 4), (2, 2), (2, 4))),
    Case(
        name="Llama 3.1 70B, 2048",
        b=4,
        q=2048,
        h=64,
        hkv=8,
        d=128,
        causal=True,
        ways=split((1, 4), (1, 8), (2, 4), (2, 8), (4, 8), (8, 8), (8, 16)),
    ),
    Case(
        name="Llama 3.2 1B",
        b=4,
        q=4096,
        h=32,
        hkv=8,
        d=64,
        causal=True,
        ways=split((1, 4), (1, 8), (2, 4), (2, 8), (4, 8), (4, 16)),
    ),
    Case(name="Falcon 7B", b=2, q=2048, h=71, hkv=1, d=64, causal=True, ways=split((1, 1), (71, 8), (71, 16))),
    Case(
        name="GLM-4 9B, 3072",
        b=2,
        q=3072,
        h=32,
        hkv=2,
        d=128,
        causal=True,
        ways=split((1, 1), (2, 4), (4, 4), (8, 4), (8, 8), (16, 8)),
    ),
    Case(name="DeepSeek-V2 like", b=2, q=8192, h=16, d=192, causal=True, ways={"hg2": {"heads_together": 2}}),
    Case(name="Phi-3 mini", b=2, q=4096, h=32, d=96, causal=True, ways=OWN),
    Case(name="Phi-2", b=4, q=2048, h=32, d=80, causal=True, ways=OWN),
    Case(
        name="Llama 3.1 8B",
        b=2,
        q=8192,
        h=32,
        hkv=8,
        d=128,
        causal=True,
        ways=split((1, 1), (1, 2), (1, 4), (2, 1), (2, 4), (4, 2), (4, 4))
        | parts((2, 0), (4, 0), heads_together=2)
        | {"64 rows": {"block_m": 64}},
    ),
    Case(
        name="Llama 3.1 70B",
        q=8192,
        h=64,
        hkv=8,
        d=128,
        causal=True,
        ways=split((1, 2), (2, 2), (4, 4), (8, 2), (8, 4)) | parts((8, 0), heads_together=2) | apart((1, 1), (1, 4)),
    ),
    Case(
        name="Qwen3 32B",
        b=2,
        q=4096,
        h=64,
        hkv=8,
        d=128,
        causal=True,
        ways=split((1, 1), (1, 2), (1, 8), (1, 16), (2, 1), (2, 2), (2, 4), (4, 2), (4, 4), (8, 4), (8, 8))
        | parts((4, 0), (8, 0), heads_together=4, fused=False, block_m=80)
        | parts((8, 0), heads_together=1, fused=False, block_m=80)
        | apart((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 4)),
    ),
    Case(
        name="Llama 3.1 405B",
        q=4096,
        h=128,
        hkv=8,
        d=128,
        causal=True,
        ways=split((1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (4, 2), (4, 4), (8, 4), (16, 4), (16, 8))
        | parts((4, 0), (16, 0), heads_together=4, fused=False, block_m=80)
        | parts((16, 0), heads_together=1, fused=False, block_m=80)
        | apart((1, 4), (1, 8), (2, 4), (4, 4), (8, 4)),
    ),
    Case(
        name="Qwen2.5 7B",
        q=4096,
        h=28,
        hkv=4,
        d=128,
        causal=True,
        ways=split((1, 1), (1, 4), (7, 2), (7, 4), (7, 7), (7, 14)) | apart((1, 4), (7, 4), (7, 8)),
    ),
    Case(
        name="Llama 2 13B",
        b=2,
        q=4096,
        h=40,
        d=128,
        causal=True,
        ways=split((1, 1), (1, 2), (1, 4), (1, 5), (1, 8), (1, 10), (1, 16)) | apart((1, 2), (1, 5), (1, 8)),
    ),
    Case(
        name="Qwen3 235B",
        q=16384,
        h=64,
        hkv=4,
        d=128,
        causal=True,
        ways=split((1, 1), (2, 1), (4, 2), (8, 1), (16, 1), (16, 2)) | parts((16, 0), heads_together=1),
    ),
    Case(
        name="StarCoder",
        q=8192,
        h=48,
        hkv=1,
        d=128,
        causal=True,
        ways=split((8, 2), (16, 2), (16, 4), (24, 4), (48, 2), (48, 4)),
    ),
    Case(
        name="Mistral, window",
        q=16384,
        h=32,
        hkv=8,
        d=128,
        causal=True,
        window=4095,
        ways=split((1, 1), (1, 4), (2, 1), (2, 4), (4, 1), (4, 4)) | {"64 rows": {"block_m": 64}},
    ),
    Case(
        name="Llama 3.1 8B, documents",
        b=16,
        q=1024,
        h=32,
        hkv=8,
        d=128,
        causal=True,
        packed=True,
        ways={"s1": {"splits": 1}, "s4": {"splits": 4}},
    ),
    Case(
        name="Llama 3.1 8B, 1024",
        b=16,
        q=1024,
        h=32,
        hkv=8,
        d=128,
        causal=True,
        ways={"s1": {"splits": 1}, "s4": {"splits": 4}, "s1 apart": {"splits": 1, "fused": False, "block_m": 80}},
    ),
    Case(
        name="FLUX.1",
        q=4608,
        h=24,
        d=128,
        ways=parts((1, 0), (2, 792), (5, 792), (7, 792)) | step(0, 1, 3) | {"64 rows": {"block_m": 64}},
    ),
    # Whole key tiles, and parts of those that do not fill the last wave of 132 thread blocks.
    *(
        Case(
            name=f"last wave {b}x{q} H{h} D{d}",
            b=b,
            q=q,
            h=h,
            d=d,
            ways=parts((1, 0), *((p, whole) for p in (2, 3, 4, 8)), fused=False),
        )
        for b, q, h, d, whole in (
            (1, 2887, 24, 128, 528),
            (1, 2304, 24, 128, 396),
            (1, 6144, 10, 128, 396),
            (2, 8192, 16, 128, 1980),
            (1, 3300, 16, 64, 396),
            (2, 2560, 20, 64, 792),
            (1, 4300, 16, 72, 528),
            (1, 2500, 16, 80, 264),
            (1, 1664, 24, 96, 264),
            (1, 3000, 16, 128, 264),
        )
    ),
    # Causal key tiles, of which the last ends late: heads handed out together, and blocks that share a group of them.
    *(
        Case(name=f"ends {b}x{q} H{h}/{hkv} D{d}", b=b, q=q, h=h, hkv=hkv, d=d, causal=True, ways=split(*ways))
        for b, q, h, hkv, d, ways in (
            (1, 8995, 40, 10, 128, ((1, 2), (1, 5), (2, 2), (2, 4), (4, 4))),
            (1, 8192, 10, 10, 128, ((1, 2), (1, 4), (1, 5))),
            (1, 12288, 24, 8, 128, ((1, 2), (1, 4), (3, 2))),
            (2, 5376, 32, 4, 128, ((4, 2), (4, 4), (8, 4))),
            (1, 2618, 16, 16, 256, ((1, 2), (1, 4), (1, 8))),
        )
    ),
    Case(name="Wan 2.1 1.3B", q=32760, h=12, d=128, ways=parts((3, 3036), (2, 3072)) | step(0, 1, 3)),
    Case(
        name="Stable Diffusion 3",
        b=2,
        q=4429,
        h=24,
        d=64,
        ways={"v": OWN["v"], "fused": {"fused": True}} | parts((4, 1584)) | step(0, 0.5, 2),
    ),
    Case(name="ModernBERT", b=4, q=8192, h=12, d=64, ways={"v": OWN["v"]} | step(0, 0.5, 2)),
    Case(name="GPT-2", b=16, q=1024, h=12, d=64, causal=True, ways={"v": OWN["v"]}),
    Case(name="S 512", b=8, q=512, h=16, d=128, ways={"apart": {"block_m": 80, "fused": False}}),
    *(
        Case(name=f"order {b}x{q} H{h} D{d}", b=b, q=q, h=h, hkv=hkv, d=d, causal=True, ways=ORDER)
        for b, q, h, hkv, d in (
            (2, 8192, 32, 0, 64),
            (1, 16384, 32, 0, 64),
            (4, 8192, 16, 4, 64),
            (2, 8192, 16, 0, 128),
            (1, 16384, 16, 0, 128),
            (2, 8192, 32, 8, 128),
            (1, 8192, 64, 8, 128),
        )
    ),
    *(
        Case(name=f"memory {b}x{q} H{h}/{hkv}", b=b, q=q, h=h, hkv=hkv, d=128, causal=True, ways=of_memory(h // hkv))
        for b, q, h, hkv in (
            (1, 8192, 64, 8),
            (1, 8192, 48, 1),
            (1, 8192, 32, 2),
            (2, 8192, 32, 8),
            (1, 16384, 32, 8),
            (1, 16384, 64, 8),
            (1, 6144, 96, 8),
            (1, 8192, 40, 8),
        )
    ),
    *(
        Case(
            name=f"few {b}x{q}x{k or q} H{h} D{d}",
            b=b,
            q=q,
            k=k,
            h=h,
            d=d,
            ways=parts(*((x, 0) for x in (1, 2, 3, 4, 5, 8))),
        )
        for b, q, k, h, d in (
            (1, 4096, 0, 1, 64),
            (1, 4096, 0, 2, 128),
            (1, 8192, 300, 8, 64),
            (4, 4096, 77, 8, 40),
            (2, 4096, 77, 20, 64),
            (1, 1024, 77, 20, 64),
            (1, 4096, 120, 16, 72),
            (8, 1024, 77, 8, 80),
            (1, 2048, 77, 4, 128),
        )
    ),
    *(
        Case(name=f"together {b}x{q} H{h} D{d}", b=b, q=q, h=h, d=d, causal=True, ways=TOGETHER)
        for b, q, h, d in (
            (32, 512, 32, 64),
            (16, 1024, 32, 64),
            (16, 1024, 12, 64),
            (8, 2048, 32, 64),
            (4, 4096, 32, 64),
            (32, 512, 16, 128),
            (16, 1024, 16, 128),
        )
    ),
)


def plans_of(case: Case) -> dict[str, BackwardPlanSpec]:
    """Today's choice as ``today``, then the candidates that differ from it and from each other."""
    problem = case.problem()
    found = {"today": heuristics.choose_backward(problem, **TARGET)}
    tile = hopper_backward_tile.choose_tile(problem, TARGET["num_sms"])
    if case.name.startswith("few"):
        found["portable"] = heuristics.choose_backward(problem, **TARGET, backend="portable")
    for name, changes in case.ways.items():
        spec = hopper_backward.plan_spec(problem, replace(tile, **changes), num_sms=TARGET["num_sms"])
        if spec not in found.values():
            found[name] = spec
    return found


class Gradients:
    """Inputs of one problem, and what plans make of them."""

    def __init__(self, case: Case) -> None:
        import torch

        from nvrtc_attn.plans.plan import ForwardPlan

        self.problem, self.torch = case.problem(), torch
        self.stream = torch.cuda.current_stream().cuda_stream
        generator = torch.Generator("cuda").manual_seed(0)

        def randn(shape: tuple[int, ...]) -> Any:
            return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

        p = self.problem
        shapes = {"q": p.q.shape, "k": p.k.shape, "v": p.v.shape, "dout": p.q.shape}
        self.tensors: dict[str, Any] = {name: randn(shape) for name, shape in shapes.items()}
        self.tensors["out"] = torch.full_like(self.tensors["q"], math.nan)
        assert p.lse is not None
        self.tensors["lse"] = torch.empty(p.lse.shape, device="cuda")
        if p.varlen:
            for name, longest in (("cu_seqlens_q", p.seqlen_q), ("cu_seqlens_k", p.seqlen_k)):
                self.tensors[name] = torch.arange(p.batch + 1, device="cuda", dtype=torch.int32) * longest
        self.run(ForwardPlan(heuristics.choose_forward(p, **TARGET), p, 0, self.stream), FORWARD, {})

    def run(self, plan: Any, names: Any, outputs: dict[str, Any]) -> None:
        workspace = self.torch.full((plan.workspace_bytes // 4 + 64,), math.nan, device="cuda")
        pointers = {name: x.data_ptr() for name, x in (self.tensors | outputs).items() if name in names}
        plan.run(self.stream, addresses(names, pointers), workspace.data_ptr())

    def of(self, plan: Any) -> dict[str, Any]:
        outputs = {name: self.torch.full_like(self.tensors[name[1]], math.nan) for name in ("dq", "dk", "dv")}
        self.run(plan, BACKWARD, outputs)
        return outputs

    def apart(self, found: dict[str, Any], expected: dict[str, Any]) -> float:
        """Not finite where something was not written."""
        worst = 0.0
        for name, y in expected.items():
            difference = float((found[name].float() - y.float()).norm() / y.float().norm())
            worst = difference if not difference <= worst else worst
        return worst


def measure(case: Case, specs: dict[str, BackwardPlanSpec], budget: float) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of a run of each plan, and how far its gradients are from those of the first."""
    import torch

    from nvrtc_attn.plans import measure as plans_measure
    from nvrtc_attn.plans.plan import BackwardPlan

    gradients = Gradients(case)
    problem, stream = gradients.problem, gradients.stream
    plans = {name: BackwardPlan(spec, problem, 0, stream) for name, spec in specs.items()}
    expected = gradients.of(plans["today"])
    apart = {name: gradients.apart(gradients.of(plan), expected) for name, plan in plans.items()}
    del gradients, expected
    torch.cuda.empty_cache()
    with mock.patch.object(plans_measure, "BUDGET_S", budget), mock.patch.object(plans_measure, "MAX_ROUNDS", 15):
        return plans_measure.times_us(problem, True, plans, 0, stream), apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression in a problem's name")
    parser.add_argument("--ways", default="", help="regular expression in a candidate's name")
    parser.add_argument("--compile-only", action="store_true", help="registers and spills, without a GPU")
    parser.add_argument("--budget", type=float, default=0.7, help="seconds of GPU time for a problem")
    parser.add_argument("--out", type=Path, help="file for the lines")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16))
    arguments = parser.parse_args()
    begin = time.perf_counter()
    work = []
    for case in CASES:
        if re.search(arguments.only, case.name):
            specs = plans_of(case)
            work.append((case, {x: y for x, y in specs.items() if x == "today" or re.search(arguments.ways, x)}))
    plans: list[ForwardPlanSpec | BackwardPlanSpec] = [spec for _, specs in work for spec in specs.values()]
    if not arguments.compile_only:
        plans += [heuristics.choose_forward(case.problem(), **TARGET) for case, _ in work]
    compiled = compile_plans(plans, arguments.workers)
    for config, kernel in compiled.items():
        if kernel.spill_bytes or re.search("C75[01]", kernel.log):
            print(f"{kernel.spill_bytes} bytes of spills: {config}\n{kernel.log}")
    lines = []
    for case, specs in work:
        if arguments.compile_only:
            print(f"{case.name}: today {label(specs['today'])}")
            for name, spec in specs.items():
                kernels = [(x.config.kernel, compiled[x.config]) for x in spec.launches]
                print(f"  {name:16}", " ".join(f"{n}:{c.num_regs}/{c.spill_bytes}" for n, c in kernels), flush=True)
            continue
        try:
            times, apart = measure(case, specs, arguments.budget)
        except (RuntimeError, UnsupportedError) as error:
            lines.append(f"{case.name}: {error}")
            print(lines[-1], flush=True)
            continue
        today = times["today"]
        found = []
        for name in specs:
            bad = "" if apart[name] <= MOST_APART else f" ! {apart[name]:.1e}"
            if name != "today" or bad:
                found.append(f"{name} {today / times.get(name, math.nan):.3f}{bad}")
        lines.append(
            f"{case.name}: today {today / 1e3:.3f} ms {case.flops / today / 1e6:.0f} TFLOP/s "
            f"({label(specs['today'])}) | {' | '.join(found)}"
        )
        print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
