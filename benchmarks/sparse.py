"""Masks of functions with whole tiles of nothing: time beside the kept part, and of the plan that finds the tiles.

    python benchmarks/sparse.py [--quick] [--save] [--ways] [--head-dim 64] [--pass forward] [--length N] [--dry-run]

Cases: packed documents with and without a causal mask, prefix-LM, a window with attention sinks, NATTEN, chunks;
bfloat16, 16 heads, through plans that run directly. ``kept`` is the part of 128 x 128 tiles that keep anything, ``plan
us`` the time of the launches that find them and ask the mask about undecided ones, ``plan MB`` what they write, ``all
MB`` the whole workspace (the backward pass adds up dq in float32), ``of dense`` the whole call's time over that without
a mask, ``of causal`` the speed per kept tile beside a causal call. ``--ways`` times all Hopper plans that
the autotuner would, one beside the other: with bits of undecided tiles (``tile_bits`` in the label) and without, of
several tiles. About 20 seconds of an H200 with the kernels in the cache, with ``--ways`` a minute.

``--length 1048576`` measures the window of 4096 with sinks alone (or what ``--case`` names), without the dense and the
causal call from 65536 tokens on, which take seconds each; ``kept`` is then what the plan's own rules say of each tile.
Nothing of the size of the scores is made. ``--dry-run`` needs no GPU: the kept part, and the memory of the plan that an
H100 has for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measure import in_turn, print_table, save

import nvrtc_attn as na
from nvrtc_attn.front.call import Call, CallOptions, describe, describe_shapes
from nvrtc_attn.front.operands import BACKWARD, FORWARD, addresses
from nvrtc_attn.front.philox import RngState
from nvrtc_attn.front.tensors import Device
from nvrtc_attn.heuristics import backward_candidates, choose_backward, choose_forward, forward_candidates
from nvrtc_attn.heuristics.spec import BackwardPlanSpec, ForwardPlanSpec
from nvrtc_attn.modifiers.cuda_values import NO_MODIFIER, modifier_values
from nvrtc_attn.modifiers.intervals import decide
from nvrtc_attn.plans import autotune
from nvrtc_attn.plans import plan as plans
from nvrtc_attn.plans.plan import BackwardPlan, ForwardPlan, backward_plan, forward_plan
from nvrtc_attn.runtime import device

HEADS, TILE, LENGTH = 16, 128, 8192
LONG = 65536
"""From it on neither calls that keep all of the scores, nor a mask of all pairs."""
LONG_CASE = "window 4096 and sinks"
H100: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
TIMES = ["ms", "dense ms", "causal ms", "of dense", "of causal", "plan us"]
COLUMNS = ["case", "D", "pass", "kept", *TIMES, "plan MB", "all MB"]
WAYS = ["case", "D", "pass", "plan", "ms", "of causal", "plan us"]


def documents(length: int, count: int) -> torch.Tensor:
    cuts = torch.linspace(0, length, count + 1)[1:-1].long() + 37
    return torch.bucketize(torch.arange(length), cuts, right=True).int()


def masks(length: int, where: str = "cuda") -> dict[str, Callable[..., Any]]:
    ids = documents(length, 8).to(where)
    prefix = torch.full((8,), length // 4, dtype=torch.int32, device=where)
    return {
        "documents": lambda b, h, q, k: ids[q] == ids[k],
        "causal documents": lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k),
        "prefix": lambda b, h, q, k: (k < prefix[b]) | (q >= k),
        "window and sinks": lambda b, h, q, k: (q >= k) & ((q - k < 1024) | (k < 4)),
        LONG_CASE: lambda b, h, q, k: (q >= k) & ((q - k < 4096) | (k < 4)),
        "natten 7 of 64": lambda b, h, q, k: (abs(q // 64 - k // 64) <= 3) & (abs(q % 64 - k % 64) <= 3),
        "chunks of 1024": lambda b, h, q, k: (q // 1024 == k // 1024) & (q >= k),
    }


def runner(plan: Any, tensors: dict[str, torch.Tensor], call: Call) -> Callable[[], None]:
    """A run of the plan over these tensors and what the call's function captured, which live as long as it does."""
    values = NO_MODIFIER
    if call.modifier is not None:
        values = modifier_values(call.modifier.program, (), call.captures, [], call.modifier.numbers)
    given = addresses(plan.OPERANDS, {name: x.data_ptr() for name, x in tensors.items()})
    workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device="cuda")

    def run(_alive: Any = (tensors, call)) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        plan.run(stream, given, workspace.data_ptr(), RngState(17, 40), modifier=values)

    return run


class Finding:
    """A plan that launches what finds the tiles, and asks about undecided ones, and no more."""

    def __init__(self, plan: Any) -> None:
        self._plan, self.OPERANDS, self.workspace_bytes = plan, plan.OPERANDS, plan.workspace_bytes
        names = {id(kernel): config.kernel for (config, _), kernel in plans._kernels.items()}
        self._steps = tuple(x for x in plan._steps if names[id(x.kernel)].startswith("tile_"))

    def run(self, *args: Any, **options: Any) -> None:
        steps = self._plan._steps
        self._plan._steps = self._steps
        try:
            self._plan.run(*args, **options)
        finally:
            self._plan._steps = steps


def kept_tiles(mask_mod: Callable[..., Any], length: int) -> float:
    """The part of the tiles that keep anything: of long sequences by ranges, as the plan decides."""
    if length >= LONG or not torch.cuda.is_available():
        modifier = na.trace(None, mask_mod)
        mask = modifier.valued[1]
        assert mask is not None
        captures = [x.cpu().numpy() for x in modifier.captures]
        starts, kept = np.arange(0, length, TILE), 0
        for first in range(0, length, 64 * TILE):
            end = min(first + 64 * TILE, length)
            some, _ = decide(
                mask, captures, batch=[0], heads=[0], query_starts=np.arange(first, end, TILE), seqlen_q=end,
                key_starts=starts, seqlen_k=length,
            )  # fmt: skip
            kept += int(some.sum())
        return kept / len(starts) ** 2
    q = torch.arange(length, device="cuda")
    zero = torch.zeros((), dtype=torch.int64, device="cuda")
    full = mask_mod(zero, zero, q[:, None], q[None])
    return float(full.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).any(3).any(1).float().mean())


def megabytes(spec: ForwardPlanSpec | BackwardPlanSpec) -> dict[str, float]:
    """What the plan of tiles takes, and what all workspaces take."""
    if isinstance(spec, ForwardPlanSpec):
        words = spec.tile_words_bytes
    else:  # the words of its tiles are in the workspace of its counters
        words = sum(x.nbytes for x in spec.workspaces if x.field == "counters")
    return {"plan MB": words / 1e6, "all MB": sum(x.nbytes for x in spec.workspaces) / 1e6}


def measure(
    batch: int, length: int, head_dim: int, backward: bool, names: list[str], ways: bool = False
) -> list[dict[str, Any]]:
    rows = torch.randn(5, batch, length, HEADS, head_dim, device="cuda").bfloat16()
    gradients = torch.empty(3, batch, length, HEADS, head_dim, device="cuda", dtype=torch.bfloat16)
    tensors = dict(zip(("q", "k", "v", "out", "dout"), rows, strict=True))
    tensors |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    tensors["lse"] = torch.zeros(batch, HEADS, length, device="cuda")
    make, choose = (backward_plan, choose_backward) if backward else (forward_plan, choose_forward)
    target, stream = autotune._target(device.properties(0)), torch.cuda.current_stream().cuda_stream
    names_of = BACKWARD if backward else FORWARD
    given = {name: x for name, x in tensors.items() if name in names_of}

    def described(modifier: Any, **options: Any) -> tuple[Any, Call]:
        call = describe(*rows[:3], options=CallOptions(**options), stream=None, modifier=modifier)
        layout, lse = call.problem.q, call.problem.dense_layout_of("lse")
        return call.problem.with_layouts(out=layout, dout=layout, dq=layout, dk=layout, dv=layout, lse=lse), call

    def of(modifier: Any, **options: Any) -> tuple[Any, dict[str, torch.Tensor], Call]:
        asked, call = described(modifier, **options)
        return make(asked, 0, stream, tune=False), given, call

    def candidates(modifier: Any) -> dict[str, tuple[Any, dict[str, torch.Tensor], Call]]:
        asked, call = described(modifier)
        if backward:
            specs: Any = backward_candidates(asked, **target)
        else:
            specs = forward_candidates(asked, **target)
        plan_of: Any = BackwardPlan if backward else ForwardPlan
        hopper = {label: spec for label, spec in specs.items() if label.startswith("hopper")}
        return {label: (plan_of(spec, asked, 0, stream), given, call) for label, spec in hopper.items()}

    found = []
    for name, mask_mod in chosen(length, names).items():
        modifier = na.trace(None, mask_mod)
        if ways:
            found += compared(f"{batch}x{length} {name}", mask_mod, length, candidates(modifier), of(None, causal=True))
            continue
        asked, call = described(modifier)
        plan = make(asked, 0, stream, tune=False)
        calls = {"ours": runner(plan, given, call)}
        if length < LONG:
            calls |= {"dense": runner(*of(None)), "causal": runner(*of(None, causal=True))}
        if call.modifier is not None and call.modifier.program.mask is not None:  # its first launch finds the tiles
            calls["plan"] = runner(Finding(plan), given, call)
        times = {key: x["ms"] for key, x in in_turn(calls, rep_ms=30).items()}
        kept = kept_tiles(mask_mod, length)
        causal = (length // TILE + 1) / 2 / (length // TILE)
        found.append({
            "case": f"{batch}x{length} {name}", "D": head_dim, "pass": "backward" if backward else "forward",
            "kept": kept, "ms": times["ours"], "dense ms": times.get("dense"), "causal ms": times.get("causal"),
            "of dense": times["ours"] / times["dense"] if "dense" in times else None,
            "of causal": times["causal"] / causal * kept / times["ours"] if "causal" in times else None,
            "plan us": 1e3 * times["plan"] if "plan" in times else None,
            **megabytes(choose(asked, **target)),
        })  # fmt: skip
    return found


def chosen(length: int, names: list[str], where: str = "cuda") -> dict[str, Callable[..., Any]]:
    """The masks of these names; of none, all, but for long sequences and `LONG_CASE`, which is theirs."""
    all_of_them = masks(length, where)
    wanted = names or ([LONG_CASE] if length >= LONG else [x for x in all_of_them if x != LONG_CASE])
    return {name: mask_mod for name, mask_mod in all_of_them.items() if name in wanted}


_kept: dict[tuple[str, int], float] = {}


def planned(batch: int, length: int, head_dim: int, backward: bool, names: list[str]) -> list[dict[str, Any]]:
    """What is known without a GPU."""
    operand = (batch, length, HEADS, head_dim), "bfloat16"
    found = []
    for name, mask_mod in chosen(length, names, "cpu").items():
        if (name, length) not in _kept:
            _kept[name, length] = kept_tiles(mask_mod, length)
        modifier = na.trace(None, mask_mod)
        call = describe_shapes(dict.fromkeys("qkv", operand), CallOptions(), Device("cuda", 0), modifier=modifier)
        layout, lse = call.problem.q, call.problem.dense_layout_of("lse")
        problem = call.problem.with_layouts(out=layout, dout=layout, dq=layout, dk=layout, dv=layout, lse=lse)
        spec: Any = choose_backward(problem, **H100) if backward else choose_forward(problem, **H100)
        found.append({
            "case": f"{batch}x{length} {name}", "D": head_dim, "pass": "backward" if backward else "forward",
            "kept": _kept[name, length], **megabytes(spec),
        })  # fmt: skip
    return found


def compared(
    case: str, mask_mod: Callable[..., Any], length: int, plans_of: dict[str, Any], causal: Any
) -> list[dict[str, Any]]:
    """Every plan of a mask beside a causal call, in turn."""
    calls = {"causal": runner(*causal)}
    for label, (plan, given, call) in plans_of.items():
        calls[label] = runner(plan, given, call)
        calls[f"finding {label}"] = runner(Finding(plan), given, call)
    times = {key: x["ms"] for key, x in in_turn(calls, rep_ms=30).items()}
    kept, part = kept_tiles(mask_mod, length), (length // TILE + 1) / 2 / (length // TILE)
    first = next(iter(plans_of.values()))
    of = {
        "case": case,
        "D": first[2].problem.head_dim,
        "pass": "backward" if "dout" in first[0].OPERANDS else "forward",
    }
    return [
        of | {"plan": label, "ms": times[label], "of causal": times["causal"] / part * kept / times[label],
              "plan us": 1e3 * times[f"finding {label}"]}
        for label in plans_of
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--ways", action="store_true", help="every plan that the autotuner would try")
    parser.add_argument("--head-dim", type=int, action="append", help="64 and 128 if not given")
    parser.add_argument("--pass", dest="passes", choices=("forward", "backward"), action="append")
    parser.add_argument("--case", action="append", help="one of the masks by its name")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence, a multiple of 128")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: kept parts and memory of plans")
    options = parser.parse_args(arguments)
    if options.length % TILE or options.length < TILE:
        parser.error(f"--length: {options.length}, needed is a multiple of {TILE}")
    batch = max(1, 2 * LENGTH // options.length)
    names = ["documents", "causal documents", "prefix", "natten 7 of 64"] if options.quick else options.case or []
    columns = WAYS if options.ways else COLUMNS
    rows = []
    for head_dim in options.head_dim or (64, 128):
        for name in options.passes or ("forward", "backward"):
            size = batch, options.length, head_dim, name == "backward", names
            found = planned(*size) if options.dry_run else measure(*size, options.ways)
            print_table(found, columns)
            rows += found
    print_table(rows, columns)
    if options.save:
        print(save("sparse", rows))


if __name__ == "__main__":
    main()
