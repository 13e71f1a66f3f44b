"""Launches that begin before the one ahead of them has ended: which they are, and what the driver is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver, FakeGpu, installed, instant_compiler

from nvrtc_attn.front.operands import addresses
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import choose_backward
from nvrtc_attn.heuristics.hopper_backward import smem_that_spreads
from nvrtc_attn.plans import plan
from nvrtc_attn.plans.plan import BackwardPlan, backward_plan

PREPARE, MAIN, WIDE, CONVERT = "backward_hopper_prepare", "backward_hopper", "backward_hopper_wide", "dq_convert"


@pytest.fixture
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    """With the version of the driver that the test names."""
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_kernels", {})
    driver = FakeDriver([FakeGpu()], version=getattr(request, "param", 13000))
    with instant_compiler(tmp_path / "kernels"), installed(driver):
        driver.stack.append(driver.context_of(0))
        yield driver


def problem(rows: int, head_dim: int, heads: int = 4, heads_kv: int = 4, batch: int = 4, **more: Any) -> Any:
    packed = more.get("varlen", False)
    lead = (1, batch * rows) if packed else (batch, rows)
    q, k = (dense_layout((*lead, n, head_dim), "bfloat16") for n in (heads, heads_kv))
    lse = dense_layout((1, heads, batch * rows) if packed else (batch, heads, rows), "float32")
    return AttentionProblem(
        dtype="bfloat16", batch=batch, seqlen_q=rows, seqlen_k=rows, num_heads=heads, num_heads_kv=heads_kv,
        head_dim=head_dim, head_dim_v=head_dim, softmax_scale=0.125, lse=lse,
        **dict.fromkeys(("q", "out", "dout", "dq"), q), **dict.fromkeys(("k", "v", "dk", "dv"), k), **more,
    )  # fmt: skip


def overlapping(asked: AttentionProblem) -> list[tuple[str, bool]]:
    spec = choose_backward(asked, arch="sm_90", num_sms=132, smem_limit=232448, backend="hopper")
    return [(launch.config.kernel, launch.overlaps) for launch in spec.launches]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        pytest.param(problem(256, 72), [(PREPARE, False), (MAIN, True), (CONVERT, True)], id="rows before"),
        pytest.param(problem(1024, 64, 16, 16), [(MAIN, False), (CONVERT, True)], id="fused"),
        pytest.param(problem(100, 64), [(PREPARE, False), (MAIN, True)], id="one key tile"),
        pytest.param(problem(256, 160), [(PREPARE, False), (WIDE, False), (CONVERT, True)], id="two blocks a tile"),
        pytest.param(
            problem(256, 72, deterministic=True), [(PREPARE, False), (MAIN, False), (CONVERT, True)], id="ordered"
        ),
        pytest.param(
            problem(256, 64, varlen=True), [(PREPARE, False), (MAIN, False), (CONVERT, True)], id="list of key tiles"
        ),
        pytest.param(
            problem(2048, 128, 16, 1, batch=1, window_right=0),
            [(PREPARE, False), (MAIN, True), ("dkv_convert", True), (CONVERT, True)],
            id="heads that blocks share",
        ),
    ],
)
def test_which_launches_overlap(asked: AttentionProblem, expected: list[tuple[str, bool]]) -> None:
    """Never the first: what is ahead of it is not ours."""
    assert overlapping(asked) == expected


def run(made: BackwardPlan, base: int, stream: int) -> None:
    names = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
    given = {name: base + 4096 * i for i, name in enumerate(names)}
    made.run(stream, addresses(made.OPERANDS, given), base + (1 << 20))


def test_what_the_driver_is_told(fake: FakeDriver) -> None:
    """Grid, block, memory and stream of the launch itself, whichever ran before; launches that are ready, too."""
    made = backward_plan(problem(256, 72), 0, 0)
    for stream in (0, 0x55, 0, 0x66, 0, 0x55):
        fake.calls.clear()
        fake.launches.clear()
        run(made, 1 << 30, stream)
        launched = [name for name in fake.calls if name.startswith("cuLaunch")]
        assert launched == ["cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchKernelEx"]
        assert [what[1:8] for what in fake.launches] == [step.what[:-1] for step in made._steps]
        assert [what[8:10] for what in fake.launches] == [(step.smem_bytes, stream) for step in made._steps]
    assert made._ready, "the last ones were"


@pytest.mark.parametrize("fake", [12020], indirect=True, ids=["CUDA 12.2"])
def test_a_driver_that_cannot_capture_them_launches_one_behind_the_other(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "check_nvrtc", lambda: None)  # that of these tests is of CUDA 13
    made = backward_plan(problem(256, 72), 0, 0)
    for _ in range(3):
        run(made, 1 << 30, 0x55)
    assert fake.calls.count("cuLaunchKernel") == 9
    assert "cuLaunchKernelEx" not in fake.calls


@pytest.mark.parametrize("grid", [1, 132, 133, 208, 264, 700, 900])
def test_shared_memory_that_spreads_blocks(grid: int) -> None:
    """A multiprocessor of 228 KB has room for its share and not for one block more, each with 1 KB for the system."""
    share = -(-grid // 132)
    nbytes = smem_that_spreads(grid, 132, 232448)
    assert nbytes <= 232448, "what a block may ask for"
    assert share * (nbytes + 1024) <= 228 * 1024 < (share + 1) * (nbytes + 1024)


def test_so_many_blocks_that_threads_are_the_limit_need_none() -> None:
    assert smem_that_spreads(7 * 132 + 1, 132, 232448) == 0
