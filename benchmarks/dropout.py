"""Dropout forward: decisions made in the attention kernel and by a launch before it, beside other libraries.

    python benchmarks/dropout.py [--only REGEX] [--rounds N] [--commit COMMIT]

A line is one problem in bfloat16, dropout_p 0.1: microseconds of the kernel that makes its decisions itself, of the
plan that is chosen, without dropout, and of PyTorch's three kernels with it. In turn in one process, from graphs, each
behind a clear of the L2. Both of ours draw the same mask, and their outputs are compared.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/gpu"))

import measure
import peers
import pytest
import torch
from harness import forget_plans
from measure import graph_of, in_turn, provenance
from model_cases import Case, make_inputs

import nvrtc_attn.torch as na
from nvrtc_attn.heuristics import hopper_forward_tile

# batch, tokens, heads, head_dim, causal
CASES: list[tuple[int, int, int, int, bool]] = [
    (16, 1024, 12, 64, True), (4, 4096, 16, 64, True), (2, 2048, 12, 64, True), (3, 1777, 13, 64, True),
    (32, 512, 12, 64, False), (4, 2048, 16, 64, False), (64, 256, 16, 64, False), (100, 197, 12, 64, False),
    (6, 1500, 20, 64, False), (4, 1024, 12, 64, False), (8, 1024, 16, 32, True), (8, 1024, 16, 40, False),
    (4, 2048, 16, 80, True), (8, 1024, 16, 80, False), (2, 3000, 24, 72, True), (4, 2048, 16, 96, False),
    (8, 512, 16, 96, True), (4, 2048, 16, 112, True), (4, 2048, 16, 128, True), (2, 4096, 32, 128, True),
    (8, 1024, 16, 128, False), (5, 1333, 10, 128, False), (1, 2048, 40, 128, True), (2, 2500, 8, 160, False),
    (4, 2048, 8, 192, True), (8, 512, 16, 192, False), (4, 4096, 8, 256, True), (8, 512, 8, 256, False),
    # With few decisions, or too many for the memory, the kernel makes them.
    (1, 2048, 16, 64, True), (2, 1024, 16, 64, True), (4, 512, 16, 64, True), (4, 512, 16, 128, True),
    (2, 8192, 16, 64, True),
]  # fmt: skip
OTHERS = {"flash2": peers.flash2, "cudnn": peers.cudnn, "seed": peers.seed}


def planned(call: Any, *, words: bool) -> tuple[Any, Any, bool]:
    """The output and a graph of a call, of a plan that may have a launch for decisions; whether it has."""
    rule, answers = hopper_forward_tile.has_room, [False]

    def noted(*asked: Any) -> bool:
        answers.append(words and rule(*asked))
        return answers[-1]

    with pytest.MonkeyPatch.context() as patch:
        forget_plans(patch)
        patch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
        patch.setattr(hopper_forward_tile, "has_room", noted)
        return call(), graph_of(call), answers[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="of the names of problems, as they are printed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default="", help="of the measured tree, where that is a copy without git history")
    arguments = parser.parse_args()
    measure.COMMIT = arguments.commit
    print(provenance())
    print(f"{'':26}" + "".join(x.rjust(9) for x in ("itself", "chosen", "none", *OTHERS)))
    for batch, tokens, heads, head_dim, causal in CASES:
        name = f"{batch}x{tokens}x{heads} d{head_dim}{' causal' * causal}"
        if not re.search(arguments.only, name):
            continue
        torch.manual_seed(0)
        sizes = {"b": batch, "q": tokens, "h": heads, "d": head_dim}
        case = Case(name=name, kind="encoder", causal=causal, dropout=0.1, backward=False, **sizes)
        inputs = make_inputs(case, "cuda")
        tensors = (inputs.q, inputs.k, inputs.v)
        dropped = functools.partial(na.attention, *tensors, causal=causal, dropout_p=0.1, rng=(1, 0))
        itself, graph_itself, _ = planned(dropped, words=False)
        chosen, graph_chosen, words = planned(dropped, words=True)
        far = float((itself.float() - chosen.float()).norm() / itself.float().norm())
        assert far < 0.005, f"{name}: the outputs are {far} apart"
        graphs = {"itself": graph_itself, "chosen": graph_chosen}
        graphs["none"] = graph_of(functools.partial(na.attention, *tensors, causal=causal))
        for who, peer in OTHERS.items():
            call = peer(case, inputs)
            with call.context():
                graphs[who] = graph_of(call.run)
        times = in_turn({who: graph.replay for who, graph in graphs.items()}, arguments.rounds, rep_ms=30)
        line = "".join(f"{1e3 * times[who]['ms']:9.1f}" for who in graphs)
        print(f"{name:26}{line}  {'two launches' if words else 'one'}", flush=True)


if __name__ == "__main__":
    main()
