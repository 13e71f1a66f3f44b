"""Query tiles that thread blocks ask for, beside a fixed order: alone, and while other kernels hold multiprocessors.

    python benchmarks/handed_out.py [--held N]... [--only REGEX]

A line is one forward problem: microseconds in a fixed order, then the time of tiles that are asked for, as part of it,
alone (0) and with N multiprocessors held by thread blocks that wait, as communication does; then which of the two is
chosen. In turn in one process, graphs of several calls, the memset of the counter included. Needs CuPy.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/gpu"))

import cupy
import pytest
import torch
from harness import forget_plans
from measure import graph_of, provenance

import nvrtc_attn.torch as na
from nvrtc_attn.heuristics import hopper_forward, hopper_forward_schedule

CAUSAL = {"causal": True}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# batch, rows and keys, heads, heads_kv, head_dim, options; "lengths": keys of a quarter to all, "bias": its shape.
CASES: list[tuple[int, int, int, int, int, dict[str, Any]]] = [
    *((16384 // s, s, 2048 // d, 2048 // d, d, CAUSAL) for d in (64, 128, 256) for s in LENGTHS),
    (8, 2048, 12, 12, 64, CAUSAL), (2, 2048, 71, 1, 64, CAUSAL), (4, 2048, 16, 8, 80, CAUSAL),
    (2, 4096, 32, 32, 96, CAUSAL), (2, 2048, 32, 8, 128, CAUSAL), (2, 8192, 32, 8, 128, CAUSAL),
    (1, 8192, 64, 8, 128, CAUSAL), (1, 4096, 96, 8, 192, CAUSAL), (4, 1024, 12, 12, 64, CAUSAL),
    (1, 4096, 8, 8, 64, CAUSAL), (1, 2048, 32, 8, 128, CAUSAL),
    (1, 16384, 32, 8, 128, {"window_size": (4096, 0)}), (1, 16384, 32, 16, 128, {"window_size": (1024, 0)}),
    (2, 8192, 64, 8, 64, {"window_size": (128, 0)}), (4, 8192, 12, 12, 64, {"window_size": (64, 64)}),
    (4, 4096, 4, 1, 256, {"window_size": (512, 0)}),
    (4, 2048, 16, 16, 128, {}), (1, 16384, 16, 16, 128, {}), (1, 4608, 24, 24, 128, {}), (4, 4096, 10, 10, 64, {}),
    (16, 1500, 20, 20, 64, {}), (32, 512, 16, 16, 64, {}), (128, 256, 16, 16, 64, {}), (2, 2048, 16, 16, 128, {}),
    (4, 4096, 8, 8, 256, {}), (16, 1024, 8, 8, 256, {}),
    (32, 1024, 16, 16, 64, {"lengths": True}), (4, 2048, 32, 8, 128, {**CAUSAL, "lengths": True}),
    (4, 4096, 16, 16, 128, {**CAUSAL, "dropout_p": 0.1, "rng": (1, 0)}),
    (2, 2048, 16, 16, 128, {**CAUSAL, "bias": (1, 16, 2048, 2048)}),
    (4, 2048, 12, 12, 64, {**CAUSAL, "bias": (1, 12, 2048, 2048)}),
    (1, 8192, 16, 16, 128, {**CAUSAL, "bias": (1, 16, 1, 8192)}),
    (16, 512, 16, 16, 64, {"bias": (1, 16, 512, 512)}), (32, 1024, 16, 16, 64, {"bias": (32, 1, 1, 1024)}),
    (4, 2048, 16, 16, 128, {"bias": (1, 16, 2048, 2048)}), (512, 256, 4, 4, 32, {"bias": (1, 4, 256, 256)}),
    (768, 384, 4, 4, 32, {"bias": (1, 4, 384, 384)}), (4, 2048, 8, 8, 256, {"bias": (1, 8, 2048, 2048)}),
]  # fmt: skip
WAITING = r"""
extern "C" __global__ void wait(volatile int* flag, long long cycles) {
  extern __shared__ char room[];
  room[threadIdx.x] = 0;
  long long const begun = clock64();
  if (threadIdx.x == 0) {
    while (*flag == 0 && clock64() - begun < cycles) __nanosleep(2000);
  }
  __syncthreads();
}"""


class Holders:
    """Thread blocks with most of a multiprocessor's shared memory, until they are let go."""

    BYTES = 200 * 1024

    def __init__(self) -> None:
        self._kernel = cupy.RawKernel(WAITING, "wait")
        self._kernel.max_dynamic_shared_size_bytes = self.BYTES
        self._memory = cupy.cuda.alloc_pinned_memory(64)
        self._flag = ctypes.c_int.from_address(self._memory.ptr)
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def begin(self, number: int) -> None:
        self._flag.value = 0
        if number:
            arguments = (cupy.uint64(self._memory.ptr), cupy.int64(10**9))
            with self._stream:
                self._kernel((number,), (512,), arguments, shared_mem=self.BYTES)
            time.sleep(0.0005)

    def end(self, number: int) -> bool:
        """Lets them go; whether they were still there."""
        there = not number or not self._stream.done
        self._flag.value = 1
        torch.cuda.synchronize()
        return there


def time_of(graph: torch.cuda.CUDAGraph, holders: Holders, held: int) -> float:
    """Milliseconds of a replay behind another one."""
    time.sleep(0.002)
    torch.cuda.synchronize()
    holders.begin(held)
    graph.replay()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    assert holders.end(held), "the thread blocks that hold multiprocessors have ended before the calls"
    return float(begun.elapsed_time(ended))


def planned(call: Any, hand_out: bool, number: int) -> tuple[Any, torch.cuda.CUDAGraph, bool]:
    """The output and a graph of ``number`` calls whose plan hands tiles out, or not; whether it would by itself."""
    rule, answers = hopper_forward_schedule.hands_out, []

    def forced(*asked: Any) -> bool:
        answers.append(rule(*asked))
        return hand_out

    with pytest.MonkeyPatch.context() as patch:
        forget_plans(patch)
        patch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
        patch.setattr(hopper_forward, "hands_out", forced)
        out = call()
        return out, graph_of(call, number), answers[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", type=int, action="append", help="multiprocessors (1 and 8)")
    parser.add_argument("--only", default="", help="of the names of problems, as they are printed")
    arguments = parser.parse_args()
    print(provenance())
    holders = Holders()
    for batch, rows, heads, heads_kv, head_dim, options in CASES:
        name = f"{batch}x{rows}x{heads}/{heads_kv} d{head_dim} {options or ''}"
        if not re.search(arguments.only, name):
            continue
        shapes = (heads, head_dim), (heads_kv, head_dim), (heads_kv, head_dim)
        tensors = [torch.randn(batch, rows, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        settings = {x: y for x, y in options.items() if x not in ("lengths", "bias")}
        if "lengths" in options:
            order = torch.randperm(batch, device="cuda")
            settings["seqused_k"] = torch.linspace(rows // 4, rows, batch, device="cuda").int()[order]
        if "bias" in options:
            settings["bias"] = torch.randn(options["bias"], device="cuda", dtype=torch.bfloat16)
        call = functools.partial(na.attention, *tensors, **settings)
        keys = min(rows, 2 * sum(options["window_size"])) if "window_size" in options else rows
        number = int(max(3, min(20, 2e12 / (4 * batch * rows * keys * heads * head_dim))))  # some 4 ms
        fixed, fixed_graph, _ = planned(call, False, number)
        asked, asked_graph, chosen = planned(call, True, number)
        assert torch.equal(fixed, asked), name
        line = [f"{name:64}"]
        for held in (0, *(arguments.held or (1, 8))):
            times: list[list[float]] = [[], []]
            for _ in range(9):
                for graph, found in zip((fixed_graph, asked_graph), times, strict=True):
                    found.append(time_of(graph, holders, held))
            before, after = map(statistics.median, times)
            line.append(f"{held}: {1e3 * before / number:7.1f} {after / before:.3f} ")
        print(*line, "handed out" if chosen else "fixed", flush=True)


if __name__ == "__main__":
    main()
