"""Packed sequences against the dense problem of their mean length, forward and backward, in TFLOP/s.

    python benchmarks/packed.py [--save NAME] [--mixes eleven skewed even] [--rep 60] [--stages 3]

Both are replayed from a CUDA graph: the host's share of a call is no part of the numbers. TFLOP/s count what the
lengths ask for: 4 D operations a score forward and 10 D backward, half of them when causal. ``ratio`` is packed over
dense; 0.93 and more is the goal. ``us`` are the packed problem's. ``--stages`` gives the packed forward kernel of head
dim 64 another number of slots for K and V than the tile table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measure import graph_of, in_turn, print_table, save

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.front.problem import AttentionProblem
from nvrtc_attn.heuristics import hopper_forward, hopper_forward_config, hopper_forward_tile

HEADS = 16
MIXES: dict[str, list[int]] = {
    "eleven": [64, 4096, 512, 1536, 128, 3072, 777, 2048, 1024, 256, 2500],
    "skewed": [512] * 31 + [32768] + [512] * 32,
    "even": [1024] * 64,
    "short": [200] * 400,
}
COLUMNS = ["mix", "D", "causal", "pass", "us", "packed", "dense", "ratio", "spread"]


@dataclass
class Problem:
    """Tensors of one problem, and its two passes as functions that allocate nothing."""

    lengths: Sequence[int]
    packed: bool
    head_dim: int
    causal: bool

    def __post_init__(self) -> None:
        count, longest = len(self.lengths), max(self.lengths)
        shape = (1, sum(self.lengths)) if self.packed else (count, longest)

        def tensor() -> torch.Tensor:
            return torch.randn(*shape, HEADS, self.head_dim, device="cuda", dtype=torch.bfloat16)

        self.q, self.k, self.v, self.dout = (tensor() for _ in range(4))
        self.out, self.dq, self.dk, self.dv = (torch.empty_like(self.q) for _ in range(4))
        self.lse = torch.empty(shape[0], HEADS, shape[1], device="cuda", dtype=torch.float32)
        self.options: dict[str, Any] = {"causal": self.causal}
        if self.packed:
            ends = torch.tensor([0, *self.lengths]).cumsum(0).to(device="cuda", dtype=torch.int32)
            self.options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
            self.options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        inputs = (self.q, self.k, self.v)
        sizes = (
            api.forward_workspace_bytes(*inputs, **self.options),
            api.backward_workspace_bytes(*inputs, **self.options),
        )
        self.workspaces = [torch.empty(max(size, 1), device="cuda", dtype=torch.uint8) for size in sizes]

    def forward(self) -> None:
        nvrtc_attn.attention_forward(
            self.q, self.k, self.v, self.out, lse=self.lse, workspace=self.workspaces[0], **self.options
        )

    def backward(self) -> None:
        nvrtc_attn.attention_backward(
            self.dout, self.q, self.k, self.v, self.out, self.lse, self.dq, self.dk, self.dv,
            workspace=self.workspaces[1], **self.options,
        )  # fmt: skip

    def run(self) -> None:
        self.forward()
        self.backward()

    def flops(self, backward: bool) -> float:
        pairs = sum(x * x for x in self.lengths) / (2 if self.causal else 1)
        return (10 if backward else 4) * HEADS * self.head_dim * pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--rep", type=int, default=40, help="milliseconds of a measurement")
    parser.add_argument("--save", help="name of a file in the results folder")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--stages", type=int, help="slots for K and V of packed sequences at head dim 64")
    arguments = parser.parse_args()
    if arguments.stages:
        choose_tile = hopper_forward_tile.choose_tile

        def with_stages(problem: AttentionProblem, *num_sms: int) -> hopper_forward_config.Tile:
            tile = choose_tile(problem, *num_sms)
            changed = problem.varlen and problem.head_dim <= 64
            return replace(tile, num_stages=arguments.stages) if changed else tile

        hopper_forward.choose_tile = with_stages

    cases = [(mix, d, causal) for mix in arguments.mixes for d in arguments.dims for causal in (False, True)]

    def both(case: tuple[str, int, bool]) -> tuple[Problem, Problem]:
        mix, head_dim, causal = case
        lengths = MIXES[mix]
        mean = [round(sum(lengths) / len(lengths))] * len(lengths)
        found = Problem(lengths, True, head_dim, causal), Problem(mean, False, head_dim, causal)
        for one in found:
            one.run()
        return found

    with ThreadPoolExecutor(16) as pool:  # kernels compile side by side
        problems = list(pool.map(both, cases))
    torch.cuda.synchronize()

    rows = []
    for (mix, head_dim, causal), (packed, dense) in zip(cases, problems, strict=True):
        for name in ("forward", "backward"):
            functions = {key: graph_of(getattr(x, name)).replay for key, x in (("packed", packed), ("dense", dense))}
            times = in_turn(functions, rep_ms=arguments.rep)
            rates = {
                key: one.flops(name == "backward") / times[key]["ms"] / 1e9
                for key, one in (("packed", packed), ("dense", dense))
            }
            rows.append(
                {
                    "mix": mix, "D": head_dim, "causal": causal, "pass": name, "us": 1000 * times["packed"]["ms"],
                    **rates, "ratio": rates["packed"] / rates["dense"], "spread": times["packed"]["spread"],
                }
            )  # fmt: skip
    print_table(rows, COLUMNS)
    if arguments.save:
        print(save(arguments.save, rows, arguments.results))


if __name__ == "__main__":
    main()
