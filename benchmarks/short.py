"""Plans for small work beside the one that is chosen now: short sequences, tiny problems, decoding, few tiles.

    python benchmarks/short.py [--part short,tiny,decode,pack,few,fit,step] [--only REGEX] [--compile-only] [--no-seed]
                               [--out FILE]

A line is one problem and direction: the time of today's choice in microseconds, then each candidate with today's time
over its own: above 1 is faster. ``seed`` is torch's memory-efficient kernel. Runs alternate, each behind a clear of the
L2, on plausible numbers; results are not looked at, tests/gpu/test_short.py does. Candidates of the backward pass:
``store`` keeps dq of a tile that holds all keys instead of adding it up, ``+rows`` prepares its rows in the same
kernel, ``b3`` means three blocks a multiprocessor, ``atomic`` is what the portable kernel adds up. Of decoding: ``s3``
is three stages, ``x4`` four splits with a second kernel, ``c4`` four splits as a cluster that needs none, ``128 8w``
tiles of 128 keys on 8 warps (else 64 on 4), ``q`` queries in registers; candidates that spill are left out.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from portable_limits import compile_plans

from nvrtc_attn import heuristics
from nvrtc_attn.base.errors import UnsupportedError
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import (
    hopper_backward,
    hopper_backward_config,
    hopper_backward_tile,
    hopper_dbias,
    hopper_forward,
    hopper_forward_config,
    hopper_forward_tile,
    portable_backward,
    portable_backward_config,
    portable_backward_tile,
    portable_forward,
    portable_forward_config,
    portable_forward_splits,
    portable_forward_tile,
)
from nvrtc_attn.heuristics.spec import BackwardPlanSpec, ForwardPlanSpec, label

TARGET: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
Spec = ForwardPlanSpec | BackwardPlanSpec
Tile = portable_backward_config.Tile


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One problem; ``bias`` is shared by all sequences and has a gradient."""

    part: str
    b: int
    q: int
    k: int = 0
    h: int
    hkv: int = 0
    d: int
    causal: bool = False
    bias: bool = False

    @property
    def directions(self) -> tuple[bool, ...]:
        """Whether backward, of each pass that has candidates."""
        return {"short": (False, True), "fit": (False,), "decode": (False,), "pack": (False,), "few": (False,)}.get(
            self.part, (True,)
        )

    @property
    def name(self) -> str:
        keys = f"x{self.k}" if self.k else ""
        heads = f"{self.h}/{self.hkv}" if self.hkv else f"{self.h}"
        options = "".join(f" {name}" for name in ("causal", "bias") if getattr(self, name))
        return f"{self.part} {self.b}x{self.q}{keys} H{heads} D{self.d}{options}"

    def problem(self) -> AttentionProblem:
        keys, heads_kv, dtype = self.k or self.q, self.hkv or self.h, "bfloat16"
        wide, narrow = (
            dense_layout(shape, dtype) for shape in ((self.b, self.q, self.h, self.d), (self.b, keys, heads_kv, self.d))
        )
        bias = dense_layout((1, self.h, self.q, keys), dtype) if self.bias else None
        return AttentionProblem(
            dtype=dtype, batch=self.b, seqlen_q=self.q, seqlen_k=keys, num_heads=self.h, num_heads_kv=heads_kv,
            head_dim=self.d, head_dim_v=self.d, q=wide, k=narrow, v=narrow, out=wide, dout=wide, dq=wide, dk=narrow,
            dv=narrow, softmax_scale=self.d**-0.5, window_right=0 if self.causal else None, bias=bias,
            dbias=self.bias, return_lse=True, lse=dense_layout((self.b, self.h, self.q), "float32"),
        )  # fmt: skip


KINDS = (
    Kind(part="short", b=4096, q=49, h=4, d=32, bias=True),
    Kind(part="short", b=256, q=49, h=16, d=32, bias=True),
    Kind(part="short", b=8000, q=64, h=4, d=32, bias=True),
    Kind(part="short", b=2048, q=128, h=4, d=32, bias=True),
    Kind(part="short", b=1024, q=256, h=4, d=32, bias=True),
    Kind(part="short", b=1000, q=100, h=8, d=32, bias=True),
    Kind(part="tiny", b=1, q=64, h=8, d=64),
    Kind(part="tiny", b=1, q=128, h=12, d=32),
    Kind(part="tiny", b=1, q=128, h=12, d=64),
    Kind(part="tiny", b=64, q=77, h=12, d=64, causal=True),
    Kind(part="tiny", b=64, q=256, h=6, d=64, causal=True),
    Kind(part="tiny", b=4, q=256, h=16, d=72),
    Kind(part="tiny", b=4, q=256, h=8, d=160),
    Kind(part="tiny", b=1, q=1500, h=6, d=64),
    Kind(part="decode", b=64, q=1, k=4096, h=32, hkv=8, d=128),
    Kind(part="decode", b=16, q=1, k=4096, h=32, hkv=8, d=128),
    Kind(part="decode", b=8, q=1, k=2048, h=64, hkv=8, d=64),
    Kind(part="decode", b=1, q=8, k=8192, h=32, hkv=8, d=128),
    Kind(part="decode", b=64, q=2, k=2048, h=32, hkv=8, d=128),
    Kind(part="decode", b=1, q=1, k=8192, h=32, hkv=8, d=128),
    Kind(part="decode", b=8, q=1, k=2048, h=64, hkv=8, d=128),
    Kind(part="decode", b=32, q=1, k=8192, h=32, hkv=8, d=128),
    Kind(part="decode", b=4, q=4, k=8192, h=32, hkv=8, d=128),
    Kind(part="decode", b=32, q=1, k=8192, h=48, hkv=1, d=128),
    Kind(part="decode", b=8, q=1, k=4096, h=32, hkv=32, d=128),
    Kind(part="decode", b=1, q=1, k=1024, h=32, hkv=8, d=128),
    Kind(part="decode", b=2, q=1, k=16384, h=28, hkv=4, d=128),
    Kind(part="decode", b=1, q=1, k=4096, h=64, hkv=8, d=64),
    Kind(part="pack", b=16, q=16, k=4096, h=64, hkv=8, d=128),
    Kind(part="pack", b=16, q=16, k=4096, h=64, hkv=8, d=128, causal=True),
    Kind(part="pack", b=16, q=16, k=4096, h=28, hkv=4, d=128, causal=True),
    Kind(part="pack", b=16, q=64, k=2048, h=16, hkv=4, d=96),
    Kind(part="pack", b=32, q=32, k=4096, h=32, hkv=8, d=64, causal=True),
    Kind(part="pack", b=64, q=8, k=4096, h=64, hkv=4, d=128, causal=True),
    Kind(part="pack", b=4, q=100, k=2048, h=32, hkv=8, d=128, causal=True),
    Kind(part="few", b=16, q=1024, k=120, h=16, d=72),
    Kind(part="few", b=4, q=4096, k=77, h=10, d=64),
    Kind(part="few", b=64, q=256, h=16, d=64),
    Kind(part="few", b=64, q=256, h=6, d=64, causal=True),
    Kind(part="few", b=4, q=256, h=8, d=160),
    Kind(part="few", b=128, q=197, h=12, d=64),
    Kind(part="few", b=32, q=729, h=16, d=72),
    Kind(part="fit", b=128, q=197, h=12, d=64),
    Kind(part="fit", b=64, q=257, h=16, d=112),
    Kind(part="fit", b=32, q=729, h=16, d=72),
    Kind(part="fit", b=200, q=196, h=16, d=80),
    Kind(part="step", b=1, q=2048, k=8192, h=16, d=128),
    Kind(part="step", b=2, q=1024, k=8192, h=16, d=64),
)

SMALL = Tile(width=64, block_m=64, block_n=64, num_warps=4, warps_n=4, warps_m_dq=4)
SMALL_DQ2 = replace(SMALL, warps_m_dq=2)
WIDE = Tile(width=64, block_m=128, block_n=128, num_warps=4, warps_n=4, warps_m_dq=2, blocks_per_sm=2)
FLAT = replace(WIDE, block_m=64)
TILES: dict[str, Tile] = {
    "64x64b3": replace(SMALL, blocks_per_sm=3),
    "64x64b2": replace(SMALL, blocks_per_sm=2),
    "64x64b3dq2": replace(SMALL_DQ2, blocks_per_sm=3),
    "128x128b2": WIDE,
    "64x128b2": FLAT,
    "64x256b1": portable_backward_tile.TILES_256_KEYS[0],
}
WAYS: dict[str, dict[str, bool]] = {
    "atomic": {},
    "store": {"stores_dq": True},
    "store+rows": {"stores_dq": True, "fused": True},
}


def backward_plans(kind: Kind, problem: AttentionProblem) -> Iterator[tuple[str, Callable[[], Spec]]]:
    """Names and makers of the candidates; a maker may find that there is no such plan."""
    if kind.part == "step":
        yield "step 0", lambda: with_step(heuristics.choose_backward(problem, **TARGET), 0)
        return
    longest = max(problem.seqlen_q, problem.seqlen_k)
    for name, tile in TILES.items():
        if tile.block_n < longest or (name != "128x128b2" and tile.block_n >= max(2 * longest, 128)):
            continue
        ways = WAYS
        if name not in ("64x64b3", "128x128b2"):
            ways = {way: WAYS[way] for way in WAYS if way == "store+rows" or (way == "store" and tile.block_n == 256)}
        for what, options in ways.items():
            yield f"{name} {what}", lambda tile=tile, options=options: portable_backward_plan(problem, tile, options)
    yield "portable table", lambda: portable_backward.choose_backward(problem, **TARGET)
    yield "hopper", lambda: hopper_backward_plan(problem)
    if kind.part == "tiny" and hopper_backward_config.is_plain(problem):
        yield "hopper fused", lambda: hopper_fused_plan(problem)
    if kind.bias and longest > 64:
        yield "hopper, portable dbias", lambda: hopper_backward_plan(problem, portable_dbias=True)


def portable_backward_plan(problem: AttentionProblem, tile: Tile, options: dict[str, bool]) -> Spec:
    with mock.patch.multiple(portable_backward_tile, TILES_16BIT=(tile,), TILES_SHORT=(), TILES_256_KEYS=()):
        return portable_backward.choose_backward(problem, **TARGET, **options)


def hopper_backward_plan(problem: AttentionProblem, portable_dbias: bool = False) -> Spec:
    serves = mock.Mock(side_effect=lambda p: not portable_dbias and serves_dbias(p))
    with mock.patch.object(hopper_dbias, "serves", serves):
        found = hopper_backward.choose_backward(problem, **TARGET)
    if isinstance(found, list):
        raise UnsupportedError("no Hopper plan", found)
    return found


def hopper_fused_plan(problem: AttentionProblem) -> Spec:
    """A launch less and a memset more."""
    tile = hopper_backward_tile.choose_tile(problem, TARGET["num_sms"])
    tile = replace(tile, fused=True, block_m=64 if tile.block_m == 80 else tile.block_m)
    if hopper_backward_config.config_of(problem, tile).smem_bytes > TARGET["smem_limit"]:
        raise UnsupportedError("no fused plan", ["too much shared memory"])
    return hopper_backward.plan_spec(problem, tile, num_sms=TARGET["num_sms"])


def queued(spec: Spec) -> str:
    """What the host queues for a run: a call of the driver's each, which takes as long as a small kernel."""
    memsets = sum(x.zeroed for x in spec.workspaces)
    return f"{len(spec.launches)} launches" + (f", {memsets} memsets" if memsets else "")


serves_dbias = hopper_dbias.serves


def with_step(spec: BackwardPlanSpec, step: int) -> BackwardPlanSpec:
    """All key tiles of a head begin at the same row, as they did with fewer query than key tiles."""
    launches = tuple(
        replace(x, params=tuple((name, step if name == "query_step" else value) for name, value in x.params))
        for x in spec.launches
    )
    return replace(spec, launches=launches)


def forward_plans(kind: Kind, problem: AttentionProblem) -> Iterator[tuple[str, Callable[[], Spec]]]:
    if kind.part == "decode":
        yield from decode_plans(problem)
        return
    if kind.part == "few":
        yield from few_key_plans(problem)
        return
    if kind.part == "pack":
        yield "packed", lambda: packed_heads_plan(problem)
        for stages in (2, 3):
            tile = replace(hopper_forward.packed_heads_tile(problem), block_n=64, num_stages=stages + 1)
            yield f"packed 64 keys s{stages + 1}", lambda t=tile: hopper_forward.plan_spec(problem, t, num_sms=132)
        yield "portable table", lambda: portable_forward.choose_forward(problem, **TARGET)
        yield "hopper", lambda: hopper_forward_plan(problem)
        return
    if kind.part == "fit":
        tile = hopper_forward_tile.choose_tile(problem, TARGET["num_sms"])
        for columns in (96, 112):
            narrow = replace(tile, block_n=columns, num_stages=2, half_tile=False)
            yield f"{columns} keys", lambda tile=narrow: hopper_forward.plan_spec(problem, tile, num_sms=132)
        return
    tile = portable_forward_config.Tile(block_m=64, block_n=64, num_warps=4, min_blocks_per_sm=3)  # more of them spill
    yield "64x64b3", lambda: portable_forward_plan(problem, tile, 1)
    yield "portable table", lambda: portable_forward.choose_forward(problem, **TARGET)
    yield "hopper", lambda: hopper_forward_plan(problem)


def decode_tiles(rows: int, dim: int) -> dict[str, portable_forward_config.Tile]:
    """Tiles for so many query rows of a key head, by name: keys, warps where they are not four, stages."""
    tile = portable_forward_config.Tile
    if rows <= 16:
        base = {
            "": tile(block_m=16, block_n=64, num_warps=4, warps_n=4),
            "q ": tile(block_m=16, block_n=64, num_warps=4, warps_n=4, preload_q=True),
            "128 8w ": tile(block_m=16, block_n=128, num_warps=8, warps_n=8),
            "128 ": tile(block_m=16, block_n=128, num_warps=4, warps_n=4),
            "32 2w ": tile(block_m=16, block_n=32, num_warps=2, warps_n=2),
        }
    elif rows <= 32:
        base = {
            "": tile(block_m=32, block_n=64, num_warps=4, warps_n=2),
            "64 8w ": tile(block_m=32, block_n=64, num_warps=8, warps_n=4),
            "128 8w ": tile(block_m=32, block_n=128, num_warps=8, warps_n=4),
            "64 2w ": tile(block_m=32, block_n=64, num_warps=2, warps_n=1),
        }
    else:
        base = {
            "": tile(block_m=64, block_n=64, num_warps=4),
            "q ": tile(block_m=64, block_n=64, num_warps=4, preload_q=True),
            "64 8w ": tile(block_m=64, block_n=64, num_warps=8, warps_n=2),
            "32 ": tile(block_m=64, block_n=32, num_warps=4),
            "128 8w ": tile(block_m=64, block_n=128, num_warps=8, warps_n=2),
        }
        if rows <= 48:
            base["48 rows "] = tile(block_m=48, block_n=64, num_warps=3)
            base["48 rows 128 6w "] = tile(block_m=48, block_n=128, num_warps=6, warps_n=2)
    found = {}
    for name, one in base.items():
        for stages in (2, 3, 4, 6, 8, 12) if not name else (2, 3, 4, 6):
            ahead = 4 * one.block_n * dim * (stages - 1)  # bytes of K and V, of 16 bits
            least, most = (32, 96) if one.block_n == 32 else (32 if not name else 64, 200)
            if least << 10 <= ahead <= most << 10:
                found[f"{name}s{stages}"] = replace(one, num_stages=stages)
    return found


def decode_plans(problem: AttentionProblem) -> Iterator[tuple[str, Callable[[], Spec]]]:
    """Every tile with all keys, with splits and a second kernel, and as clusters, where they fill the GPU."""
    rows = problem.seqlen_q * problem.num_heads // problem.num_heads_kv
    blocks = problem.batch * problem.num_heads_kv
    for name, tile in decode_tiles(rows, problem.head_dim).items():
        if blocks >= 30:
            yield f"{name} x1", lambda t=tile: portable_forward_plan(problem, t, 1)
        for splits in (2, 3, 4, 6, 8, 12, 16, 24, 32):
            with_second = ("s2", "s3", "128 8w s2", "128 8w s3", "64 8w s3", "32 s3", "32 s4")
            if 100 <= blocks * splits <= (400 if tile.block_n == 32 else 280) and name in with_second:
                yield f"{name} x{splits}", lambda t=tile, n=splits: portable_forward_plan(problem, t, n)
        for splits in portable_forward_splits.CLUSTERS:
            if 60 <= blocks * splits <= (280 if "w" in name or "q" in name else 530):
                yield f"{name} c{splits}", lambda t=tile, n=splits: portable_forward_plan(problem, t, n, True)


def portable_forward_plan(
    problem: AttentionProblem, tile: portable_forward_config.Tile, splits: int, clustered: bool = False
) -> Spec:
    with mock.patch.object(portable_forward_tile, "_tiles_by_shape", return_value=[tile]):
        return portable_forward.choose_forward(problem, **TARGET, num_splits=splits, clustered=clustered)


def few_key_plans(problem: AttentionProblem) -> Iterator[tuple[str, Callable[[], Spec]]]:
    """More slots for what the next query tile needs, and other tiles: one or two key tiles hide little."""
    tile = hopper_forward_tile.choose_tile(problem, TARGET["num_sms"])
    for stages_q, stages in ((2, 3), (2, 4), (3, 2), (3, 3)):
        more = replace(tile, num_stages=stages, num_stages_q=stages_q, half_tile=False)
        smem = hopper_forward_config.smem_bytes(hopper_forward_config.config_of(problem, more))
        if smem * tile.min_blocks_per_sm <= TARGET["smem_limit"]:
            yield f"q{stages_q} s{stages}", lambda t=more: hopper_forward.plan_spec(problem, t, num_sms=132)
    for name, other in (
        ("no turns", replace(tile, ping_pong=False)),
        ("64 keys", replace(tile, block_n=64, num_stages=3, half_tile=False)),
        ("192 rows", replace(tile, block_m=192, num_stages=2, half_tile=False, min_blocks_per_sm=1)),
    ):
        if max(problem.head_dim, problem.head_dim_v) <= 64 or other.block_m != 192:
            yield name, lambda t=other: hopper_forward.plan_spec(problem, t, num_sms=132)
    yield "portable table", lambda: portable_forward.choose_forward(problem, **TARGET)


def packed_heads_plan(problem: AttentionProblem) -> Spec:
    found = hopper_forward.packed_heads_plan(problem, **TARGET)
    if isinstance(found, list):
        raise UnsupportedError("no packed plan", found)
    return found


def hopper_forward_plan(problem: AttentionProblem) -> Spec:
    found = hopper_forward.choose_forward(problem, **TARGET)
    if isinstance(found, list):
        raise UnsupportedError("no Hopper plan", found)
    return found


def plans_of(kind: Kind, backward: bool) -> dict[str, Spec]:
    """Today's choice as ``today``, then the candidates that exist and differ from it and from each other."""
    problem = kind.problem()
    choose = heuristics.choose_backward if backward else heuristics.choose_forward
    found: dict[str, Spec] = {"today": choose(problem, **TARGET)}
    for name, make in (backward_plans if backward else forward_plans)(kind, problem):
        try:
            spec = make()
        except UnsupportedError:
            continue
        if spec not in found.values():
            found[name] = spec
    return found


def seed_us(kind: Kind, backward: bool) -> float | None:
    """Microseconds of torch's memory-efficient kernel, None where it has none."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from triton.testing import do_bench

    def randn(rows: int, heads: int) -> torch.Tensor:
        shape = (kind.b, rows, heads, kind.d)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    keys, heads_kv = kind.k or kind.q, kind.hkv or kind.h
    q, k, v = randn(kind.q, kind.h), randn(keys, heads_kv), randn(keys, heads_kv)
    leaves, mask = [q, k, v], None
    if kind.bias:
        leaves.append(torch.randn(1, kind.h, kind.q, keys, device="cuda", dtype=torch.bfloat16, requires_grad=True))
        mask = leaves[3].expand(kind.b, kind.h, kind.q, keys)
    try:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):

            def forward() -> torch.Tensor:
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=kind.causal, enable_gqa=kind.h != heads_kv
                )

            if not backward:
                with torch.no_grad():
                    return 1e3 * float(do_bench(forward, warmup=5, rep=20, return_mode="median"))
            out = forward()
            dout = torch.randn_like(out)
            backward_call = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)  # noqa: E731
            return 1e3 * float(do_bench(backward_call, warmup=5, rep=20, return_mode="median"))
    except RuntimeError:
        return None


def measure(kind: Kind, backward: bool, specs: dict[str, Spec]) -> dict[str, float]:
    """Microseconds of a run of each plan."""
    import torch

    from nvrtc_attn.plans import measure as plans_measure
    from nvrtc_attn.plans.plan import BackwardPlan, ForwardPlan

    stream = torch.cuda.current_stream().cuda_stream
    problem = kind.problem()
    made: Any = BackwardPlan if backward else ForwardPlan
    plans = {name: made(spec, problem, 0, stream) for name, spec in specs.items()}
    return plans_measure.times_us(problem, backward, plans, 0, stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="short,tiny,decode,pack,few,fit,step")
    parser.add_argument("--only", default="", help="regular expression in a problem's name")
    parser.add_argument("--compile-only", action="store_true", help="registers and spills, without a GPU")
    parser.add_argument("--no-seed", action="store_true")
    parser.add_argument("--out", type=Path, help="file for the lines")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16))
    arguments = parser.parse_args()
    begin = time.perf_counter()
    kinds = [x for x in KINDS if x.part in arguments.part.split(",") and re.search(arguments.only, x.name)]
    work = [(kind, backward, plans_of(kind, backward)) for kind in kinds for backward in kind.directions]
    compiled = compile_plans((spec for _, _, specs in work for spec in specs.values()), arguments.workers)
    serialised = [config for config, kernel in compiled.items() if "C7511" in kernel.log]
    spilled = {config for config, kernel in compiled.items() if kernel.spill_bytes}
    for config in serialised:
        print(f"ptxas serialises the products of {config}")
    lines = []
    for kind, backward, specs in work:
        head = f"{'bwd' if backward else 'fwd'} {kind.name}"
        if arguments.compile_only:
            print(f"{head}: today {label(specs['today'])}")
            for name, spec in specs.items():
                kernels = [(x.config.kernel, compiled[x.config]) for x in spec.launches]
                print(f"  {name:22}", " ".join(f"{n}:{c.num_regs}/{c.spill_bytes}" for n, c in kernels), flush=True)
            continue
        fit = {name: x for name, x in specs.items() if not spilled.intersection(y.config for y in x.launches)}
        times = measure(kind, backward, {"today": specs["today"], **fit})
        host = {name: f" ({queued(spec)})" if kind.part == "tiny" else "" for name, spec in specs.items()}
        parts = [f"{name} {times['today'] / us:.2f}{host[name]}" for name, us in times.items() if name != "today"]
        if not arguments.no_seed and (seed := seed_us(kind, backward)) is not None:
            parts.insert(0, f"seed {times['today'] / seed:.2f}")
        lines.append(
            f"{head}: today {times['today']:.1f} us ({label(specs['today'])}){host['today']} | {' | '.join(parts)}"
        )
        print(lines[-1], flush=True)
    for config in spilled:
        print(f"{compiled[config].spill_bytes} bytes spilled by {config}")
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
