"""Launches that a plan keeps ready for addresses that come again, on a driver written in Python."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver, FakeGpu, installed, instant_compiler

from nvrtc_attn.base.errors import CudaError
from nvrtc_attn.front.operands import addresses
from nvrtc_attn.front.philox import RngState
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.modifiers.cuda_values import ModifierValues
from nvrtc_attn.modifiers.trace import traced
from nvrtc_attn.plans import plan
from nvrtc_attn.plans.plan import BackwardPlan, ForwardPlan, backward_plan, forward_plan

STREAM = 0x55
ADDRESSES = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
Seen = tuple[Any, ...]


class Recorder(FakeDriver):
    """Keeps the bytes of the params of every launch, and how often each function was called."""

    def __init__(self, sizes: dict[int, int]) -> None:
        super().__init__([FakeGpu(), FakeGpu()])
        self.sizes = sizes
        self.seen: list[Seen] = []

    def do_LaunchKernel(self, function: int, *arguments: Any) -> None:
        address = ctypes.c_void_p.from_address(arguments[-2]).value
        assert address is not None
        params = ctypes.string_at(address, self.sizes.get(arguments[6], 512))
        self.seen.append((self.stack[-1], function, *arguments[:7], arguments[7] or 0, params))

    def do_MemsetD8Async(self, *arguments: int) -> None:
        self.seen.append((self.stack[-1], "memset", *arguments))

    def do_MemsetD32Async(self, *arguments: int) -> None:
        self.seen.append((self.stack[-1], "memset32", *arguments))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recorder]:
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_kernels", {})
    monkeypatch.setattr(plan, "_MAX_READY", 8)
    with instant_compiler(tmp_path / "kernels"), installed(Recorder({})) as driver_in_python:
        assert isinstance(driver_in_python, Recorder)
        driver_in_python.stack.append(driver_in_python.context_of(0))
        yield driver_in_python


def problem(head_dim: int = 64, rows: int = 1024, **options: Any) -> AttentionProblem:
    heads = options.setdefault("num_heads", 4)
    wide = dense_layout((4, rows, heads, head_dim), "bfloat16")
    like_q = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), wide)
    return AttentionProblem(
        dtype="bfloat16", batch=4, seqlen_q=rows, seqlen_k=rows, head_dim=head_dim, head_dim_v=head_dim,
        softmax_scale=0.125, lse=dense_layout((4, heads, rows), "float32"),
        **{"return_lse": True, "num_heads_kv": 4, **like_q, **options},
    )  # fmt: skip


def fused_plan(device: int = 0) -> BackwardPlan:
    """Two launches behind a memset of counters."""
    return backward_plan(problem(num_heads=16, num_heads_kv=16), device, 0)


def numbers(base: int) -> dict[str, int]:
    return {name: base + 4096 * i for i, name in enumerate((*ADDRESSES, "max_logit"))}


def ran(fake: Recorder, made: Any, base: int, stream: int = STREAM, **more: Any) -> list[Seen]:
    fake.seen.clear()
    given = {name: x for name, x in numbers(base).items() if name in made.OPERANDS}
    made.run(stream, addresses(made.OPERANDS, given), base + (1 << 20), **more)
    return list(fake.seen)


PLANS = {
    "three launches": lambda: backward_plan(problem(72, 256), 0, 0),
    "two blocks a tile": lambda: backward_plan(problem(160, 256), 0, 0),
    "counters": fused_plan,
    "one launch": lambda: backward_plan(problem(64, 64), 0, 0),
    "forward": lambda: forward_plan(problem(128), 0, 0),
    "forward in float32": lambda: forward_plan(problem(24), 0, 0),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_ready_is_what_a_first_run_launches(name: str, fake: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    made = PLANS[name]()
    fake.sizes = {step.smem_bytes: len(step.template) for step in made._steps}
    bases = [(1 << 30) + (n << 24) for n in range(3)]
    first = {(base, stream): ran(fake, made, base, stream) for base in bases for stream in (0, STREAM)}
    assert len({str(x) for x in first.values()}) == len(first), "addresses and streams are told apart"
    assert len(first[bases[0], 0]) == len(made._steps) + len(made._zeroed)
    assert not made._ready, "what came once is not kept"
    for _ in range(2):
        assert {key: ran(fake, made, *key) for key in first} == first
    assert len(made._ready) == len(first)
    # Nothing is written or looked up any more.
    monkeypatch.setattr(type(made), "_launch_new", None)
    assert {key: ran(fake, made, *key) for key in first} == first


def test_what_is_ready_runs_in_the_context_of_the_plan(fake: Recorder) -> None:
    made = fused_plan(1)
    runs = [ran(fake, made, 1 << 30) for _ in range(4)]
    assert len(made._ready) == 1
    assert runs.count(runs[0]) == 4
    assert {x[0] for x in runs[0]} == {fake.context_of(1)}
    assert fake.stack == [fake.context_of(0)]


@pytest.mark.parametrize("what", ["dropout", "max_logit"])
def test_what_does_not_follow_from_addresses_is_never_ready(what: str, fake: Recorder) -> None:
    options: dict[str, Any] = {"dropout_p": 0.5} if what == "dropout" else {"return_max_logit": True}
    made = forward_plan(problem(**options), 0, 0)
    fake.sizes = {step.smem_bytes: len(step.template) for step in made._steps}
    found = [ran(fake, made, 1 << 30, rng=RngState(seed, 7, 0, 0)) for seed in (1, 2, 1, 2, 1)]
    assert not made._ready
    assert found[0] == found[2] == found[4]
    assert (found[0] != found[1]) == (what == "dropout")
    assert what == "dropout" or [x[1] for x in found[4]] == ["memset32", found[0][-1][1]]


def test_what_a_modifier_is_told_is_part_of_what_is_ready(fake: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = np.zeros(4, np.float32)
    program = traced(lambda score, b, h, q, k: score + slopes[h] * (q - k)).program
    made = backward_plan(problem(modifier=program, trained=(0,)), 0, 0)
    fake.sizes = {step.smem_bytes: len(step.template) for step in made._steps}
    first, *others = (
        ModifierValues(struct.pack("<QQ2i", array, gradient, 4, 1), ((gradient, 16),))
        for array, gradient in ((1 << 20, 1 << 21), (1 << 20, 1 << 22), (1 << 23, 1 << 21))
    )
    runs = {x: ran(fake, made, 1 << 30, modifier=x) for x in (first, *others)}
    assert len({str(x) for x in runs.values()}) == 3
    assert ("memset", 1 << 21, 0, 16, STREAM) in [x[1:] for x in runs[first]]
    for _ in range(3):
        assert {x: ran(fake, made, 1 << 30, modifier=x) for x in runs} == runs
    assert len(made._ready) == 3
    monkeypatch.setattr(type(made), "_launch_new", None)
    assert {x: ran(fake, made, 1 << 30, modifier=x) for x in runs} == runs


def test_so_many_are_ready_and_no_more(fake: Recorder) -> None:
    made = backward_plan(problem(72, 256), 0, 0)
    fake.sizes = {step.smem_bytes: len(step.template) for step in made._steps}
    bases = [(n + 1) << 24 for n in range(12)]
    first = [ran(fake, made, base) for base in bases]
    for _ in range(5):
        assert [ran(fake, made, base) for base in bases] == first
        assert len(made._ready) == 8, "the first eight stay: in turn, none of twelve would be found otherwise"
    before = set(made._ready)
    later = [(n + 100) << 24 for n in range(8)]
    found = [ran(fake, made, base) for base in later]
    for _ in range(40):
        assert [ran(fake, made, base) for base in later] == found
    assert len(made._ready) == 8
    assert not before & set(made._ready), "what does not come any more makes room"
    assert all(len(step.spare) <= 1 for step in made._steps)


def test_addresses_that_come_once_are_forgotten(fake: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MAX_SEEN", 16)
    made = backward_plan(problem(72, 256), 0, 0)
    for n in range(100):
        ran(fake, made, (n + 1) << 24)
        assert len(made._seen) <= 16
    assert not made._ready
    assert [len(step.spare) for step in made._steps] == [1, 1, 1]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_refused_launch_says_which(fake: Recorder, failing: int) -> None:
    made = backward_plan(problem(72, 256), 0, 0)
    first = [ran(fake, made, 1 << 30) for _ in range(3)][-1]
    name = made._steps[failing].kernel.name
    assert [step.overlaps for step in made._steps] == [False, True, True]
    fake.failures["cuLaunchKernelEx" if failing else "cuLaunchKernel"] = [0] * (failing - 1) + [1]
    with pytest.raises(CudaError, match=rf"cuLaunchKernel\({name}, grid {made._steps[failing].grid}, .*INVALID_VALUE"):
        ran(fake, made, 1 << 30)
    assert len(fake.seen) == failing
    assert ran(fake, made, 1 << 30) == first


def test_a_refused_memset_is_an_error(fake: Recorder) -> None:
    made = fused_plan()
    for _ in range(3):
        ran(fake, made, 1 << 30)
    fake.failures["cuMemsetD8Async"] = [1]
    with pytest.raises(CudaError, match="cuMemsetD8Async"):
        ran(fake, made, 1 << 30)
    assert fake.seen == []


@pytest.mark.parametrize("kind", [ForwardPlan, BackwardPlan])
def test_threads_with_the_same_addresses_launch_their_own(fake: Recorder, kind: Any, monkeypatch: Any) -> None:
    made = forward_plan(problem(128), 0, 0) if kind is ForwardPlan else fused_plan()
    mine, wrong, runs = threading.local(), [], count()

    def launch(_self: Any, *arguments: Any) -> None:
        pointer = ctypes.c_void_p.from_address(arguments[9]).value
        assert pointer is not None
        q, k = (ctypes.c_uint64 * 2).from_address(pointer)
        next(runs)
        if (q, k) != (mine.base, mine.base + 4096):
            wrong.append((q, k))

    monkeypatch.setattr(FakeDriver, "do_LaunchKernel", launch)
    monkeypatch.setattr(Recorder, "do_LaunchKernel", launch)
    monkeypatch.setattr(Recorder, "do_MemsetD8Async", lambda *_: None)
    barrier = threading.Barrier(6, timeout=60)

    def work(number: int) -> None:
        barrier.wait()
        fake.stack[:] = [fake.context_of(0)]
        for i in range(150):
            mine.base = (1 + (number + i) % 11) << 32
            given = {name: x for name, x in numbers(mine.base).items() if name in made.OPERANDS}
            made.run(STREAM, addresses(made.OPERANDS, given), mine.base + (1 << 20))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert next(runs) == 6 * 150 * len(made._steps)
    assert 0 < len(made._ready) < 8 + 6
