"""Measured plans: which one wins, what is remembered and for whom, and that nothing else of a call changes."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fake_driver import FakeDriver, FakeGpu, installed

from nvrtc_attn import collect_env, heuristics
from nvrtc_attn.base import log
from nvrtc_attn.base.errors import CompileError, CudaError, DeviceFaultError
from nvrtc_attn.commands import main
from nvrtc_attn.front.build import build_problem
from nvrtc_attn.front.call import CallOptions, describe_shapes
from nvrtc_attn.front.operands import BACKWARD
from nvrtc_attn.front.philox import RngState
from nvrtc_attn.front.problem import AttentionProblem, OperandLayout, dense_layout
from nvrtc_attn.front.tensors import Device, TensorView
from nvrtc_attn.heuristics import (
    MAX_CANDIDATES,
    backward_candidates,
    choose_backward,
    choose_forward,
    forward_candidates,
)
from nvrtc_attn.heuristics.spec import ForwardPlanSpec, label
from nvrtc_attn.jit.cache import kernel_cache
from nvrtc_attn.jit.config import BackwardConfig, DqConfig, HopperBackwardConfig
from nvrtc_attn.modifiers.cuda_values import ModifierValues
from nvrtc_attn.modifiers.trace import trace
from nvrtc_attn.plans import autotune, measure, plan, precompile
from nvrtc_attn.runtime import device

TARGET: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
SPILLS = 64


def problem(head_dim: int = 64, dtype: str = "bfloat16", **changes: Any) -> AttentionProblem:
    values: dict[str, Any] = {
        "dtype": dtype, "batch": 4, "seqlen_q": 2048, "seqlen_k": 2048, "num_heads": 16, "num_heads_kv": 16,
        "head_dim": head_dim, "head_dim_v": head_dim, "softmax_scale": head_dim**-0.5, **changes,
    }  # fmt: skip
    batch, heads = 1 if values.get("varlen") else values["batch"], values["num_heads"]
    tokens = [values[f"seqlen_{x}"] * (values["batch"] if values.get("varlen") else 1) for x in "qk"]
    q = dense_layout((batch, tokens[0], heads, head_dim), dtype)
    k = dense_layout((batch, tokens[1], values["num_heads_kv"], head_dim), dtype)
    layouts = {"q": q, "k": k, "v": k, "out": q, "dout": q, "dq": q, "dk": k, "dv": k}
    return AttentionProblem(**{**layouts, **values})


class FakePlan:
    workspace_bytes = 0

    def __init__(self, label: str, local_bytes: int = 0) -> None:
        self.label, self.local_bytes = label, local_bytes


class Bench:
    """Counts what is measured; ``times`` by position in the list of candidates."""

    def __init__(self) -> None:
        self.times: list[float] = [10.0, 9.0, 8.0]
        self.measured: list[list[str]] = []
        self.captured: list[Any] = []
        self.error: Exception | None = None
        self.delay_s = 0.0
        self.compiled_ahead: list[Any] = []
        """Kernels that were asked for; none is compiled, no plan here launches one."""

    def __call__(
        self, _problem: Any, _backward: bool, plans: Mapping[str, Any], _index: int, _stream: int, captured: Any
    ) -> dict[str, float]:
        self.measured.append(list(plans))
        self.captured.append(captured)
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        return dict(zip(plans, self.times + [20.0] * len(plans), strict=False))


def plan_of(spec: ForwardPlanSpec) -> FakePlan:
    return FakePlan(str(spec.launches[0].config.block_m))


def choose(
    asked: AttentionProblem | None = None, stream: int = 0, make: Callable[[Any], Any] = plan_of, index: int = 0
) -> ForwardPlanSpec:
    return autotune.choose_forward(asked or problem(), index, stream, make)


def table(asked: AttentionProblem | None = None) -> ForwardPlanSpec:
    return choose_forward(asked or problem(), **TARGET)


def candidates(asked: AttentionProblem | None = None) -> list[ForwardPlanSpec]:
    return list(forward_candidates(asked or problem(), **TARGET).values())


def forget() -> None:
    """What a new process does not know."""
    autotune._choices.clear()
    log._said.clear()


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    with installed(FakeDriver([FakeGpu(), FakeGpu()])) as driver_in_python:
        yield driver_in_python


@pytest.fixture
def bench(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    found = Bench()
    monkeypatch.setattr(measure, "times_us", found)
    monkeypatch.setattr(autotune, "request_kernels", found.compiled_ahead.extend)
    monkeypatch.setattr(autotune, "_choices", {})
    monkeypatch.setattr(autotune, "_library", lambda: ("library",))
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "1")
    return found


# -- the list of candidates ------------------------------------------------------------------------------------------

SCORES = dense_layout((4, 16, 2048, 2048), "bfloat16")
PROBLEMS = {
    "d64": problem(),
    "d64_causal": problem(window_right=0),
    "d128": problem(128),
    "d256": problem(256, window_right=0),
    "float32": problem(dtype="float32"),
    "bias": problem(bias=SCORES),
    "dropout": problem(128, dropout_p=0.1),
    "few_blocks": problem(128, batch=1, num_heads=2, num_heads_kv=2),
    "decode": problem(128, seqlen_q=1, seqlen_k=8192),
    "varlen": problem(varlen=True, seqused_k=True),
}


@pytest.mark.parametrize("backend", ["auto", "portable", "hopper", "legacy"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_candidates_begin_with_the_choice_of_the_table(name: str, backend: str) -> None:
    asked = PROBLEMS[name]
    if backend == "legacy":
        asked = dataclasses.replace(asked, dtype="float16")
    for list_them, choose_one in ((forward_candidates, choose_forward), (backward_candidates, choose_backward)):
        found: dict[str, Any] = list_them(asked, **TARGET, backend=backend)  # type: ignore[operator]
        specs = list(found.values())
        assert specs[0] == choose_one(asked, **TARGET, backend=backend)  # type: ignore[operator]
        assert 2 <= len(specs) <= MAX_CANDIDATES or (backend == "hopper" and len(specs) == 1)
        assert all(spec not in specs[:index] for index, spec in enumerate(specs))
        for spec in specs:
            assert all(launch.smem_bytes <= TARGET["smem_limit"] for launch in spec.launches)
            if backend in ("portable", "legacy"):
                assert not any("hopper" in launch.config.kernel for launch in spec.launches)


@pytest.mark.reliability(36)
def test_candidates_of_a_deterministic_problem_are_deterministic() -> None:
    found = backward_candidates(problem(deterministic=True), **TARGET)
    assert len(found) > 1
    for spec in found.values():
        configs = [launch.config for launch in spec.launches]
        if any(config.kernel == "backward_portable" for config in configs):
            assert any(isinstance(config, DqConfig) for config in configs)
            assert all(config.dq == "none" for config in configs if isinstance(config, BackwardConfig))
        else:
            assert any(isinstance(config, HopperBackwardConfig) and config.ordered for config in configs)
        assert all(dict(launch.params).get("num_splits", 1) == 1 for launch in spec.launches)


def test_splits_are_varied_where_multiprocessors_idle() -> None:
    def splits(asked: AttentionProblem) -> list[int]:
        return [spec.num_splits for spec in forward_candidates(asked, **TARGET, backend="portable").values()]

    found = splits(PROBLEMS["few_blocks"])
    assert found[0] > 1
    assert {found[0] // 2, 2 * found[0]} <= set(found)
    assert set(splits(problem())) == {1}


def test_a_label_names_the_same_choice_at_other_lengths() -> None:
    assert list(forward_candidates(problem(), **TARGET)) == list(
        forward_candidates(problem(seqlen_q=4096, seqlen_k=4000, batch=7), **TARGET)
    )


# -- which one wins --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"table": 10.0, "b": 9.9, "c": 11.0}, "table"),
        ({"table": 10.0, "b": 9.81, "c": 9.85}, "table"),
        ({"table": 10.0, "b": 9.7, "c": 9.6}, "c"),
        ({"table": 10.0}, "table"),
    ],
)
def test_the_table_loses_by_more_than_two_percent_only(times: dict[str, float], winner: str) -> None:
    assert autotune.fastest(times) == winner


class FakeClock:
    """Runs cost what they return, in microseconds."""

    def __init__(self) -> None:
        self.runs: list[list[str]] = []

    def __call__(self, runs: list[Callable[[], Any]]) -> list[float]:
        names, times = zip(*(run() for run in runs), strict=True)
        self.runs.append(list(names))
        return list(times)


def alternate(**times: float) -> tuple[dict[str, float], FakeClock]:
    clock = FakeClock()
    runs: dict[str, Any] = {name: lambda name=name, time=time: (name, time) for name, time in times.items()}
    return measure.alternate(runs, clock), clock


def test_runs_alternate_and_hopeless_ones_stop() -> None:
    found, clock = alternate(table=100.0, slow=131.0, fast=90.0, near=116.0)
    assert found == {"table": 100.0, "slow": 131.0, "fast": 90.0, "near": 116.0}
    assert clock.runs == [[name] * 2 for name in found] + [["table", "fast", "near"] * measure.MAX_ROUNDS]
    _, clock = alternate(table=200.0, fast=100.0)
    assert clock.runs[-1] == ["table", "fast"] * measure.MAX_ROUNDS, "the table's stays"


def test_measuring_is_bounded() -> None:
    found, clock = alternate(table=60e3, second=55e3, third=50e3)
    assert set(found) == {"table", "second", "third"}
    assert clock.runs[-1] == ["table", "second", "third"], "one round"
    found, clock = alternate(table=200e3, second=100e3)
    assert list(found) == ["table"]
    assert clock.runs == [["table"] * 2]


def test_candidates_that_do_not_compile_or_spill_are_left_out(bench: Bench) -> None:
    specs = candidates()

    def make(spec: ForwardPlanSpec) -> FakePlan:
        position = specs.index(spec)
        if position == 1:
            raise CompileError("refused")
        return FakePlan(str(position), local_bytes=SPILLS if position == 2 else 0)

    labels = list(forward_candidates(problem(), **TARGET))
    bench.times = [10.0, 5.0]
    assert choose(make=make) == specs[3]
    assert bench.measured == [[labels[0], *labels[3:]]]
    assert bench.compiled_ahead == [launch.config for spec in specs for launch in spec.launches if launch.grid]


def test_an_error_of_the_tables_plan_is_the_callers(bench: Bench) -> None:
    def make(_spec: ForwardPlanSpec) -> FakePlan:
        raise CompileError("no NVRTC")

    with pytest.raises(CompileError, match="no NVRTC"):
        choose(make=make)


# -- what is remembered ----------------------------------------------------------------------------------------------


def test_a_problem_is_measured_once(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert choose() == choose() == candidates()[2]
    assert len(bench.measured) == 1
    forget()
    assert choose() == candidates()[2]
    monkeypatch.delenv("NVRTC_ATTN_AUTOTUNE")
    forget()
    assert choose() == candidates()[2], "unset: what was measured is used"
    assert len(bench.measured) == 1
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    assert choose() == table()
    (entry,) = kernel_cache().entries()
    assert entry.tuned
    assert entry.metadata["times_us"][entry.metadata["choice"]] == 8.0
    assert "bfloat16" in entry.metadata["problem"]


@pytest.mark.parametrize("value", [None, "0"])
def test_without_the_variable_nothing_is_measured(
    value: str | None, bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NVRTC_ATTN_AUTOTUNE")
    if value is not None:
        monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", value)
    assert choose() == table()
    assert bench.measured == []
    assert not (tmp_path / "kernels").exists()


def test_the_tables_choice_is_remembered_too(bench: Bench) -> None:
    bench.times = [10.0, 9.9]
    assert choose() == table()
    forget()
    assert choose() == table()
    assert len(bench.measured) == 1


def test_the_first_decision_of_a_process_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspace that was asked for must fit the call: another process's result comes too late for this one."""
    monkeypatch.delenv("NVRTC_ATTN_AUTOTUNE")
    assert choose() == table()
    key = autotune.problem_key(problem(), False, device.properties(0), "auto")
    label = list(forward_candidates(problem(), **TARGET))[2]
    assert kernel_cache().put(key, {"kernel": "autotune", "choice": label}, b"")
    assert choose() == table()
    forget()
    assert choose() == candidates()[2]


@pytest.mark.parametrize("choice", ["hopper 1x1", 7, None, [], {"a": 1}])
def test_a_choice_that_is_none_is_measured_again(
    choice: object, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    key = autotune.problem_key(problem(), False, device.properties(0), "auto")
    assert kernel_cache().put(key, {"kernel": "autotune", "choice": choice}, b"")
    with caplog.at_level(logging.INFO, "nvrtc_attn"):
        assert choose() == candidates()[2]
    assert len([record for record in caplog.records if "is not a candidate" in record.message]) == 1
    assert len(bench.measured) == 1


@pytest.mark.reliability(79)
def test_a_damaged_entry_is_one_line_in_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose()
    (entry,) = kernel_cache().entries()
    entry.path.write_bytes(entry.path.read_bytes()[:-1])
    forget()
    monkeypatch.delenv("NVRTC_ATTN_AUTOTUNE")
    with caplog.at_level(logging.INFO, "nvrtc_attn"):
        assert choose() == table()
    assert [record.message for record in caplog.records if "damaged" in record.message] == [
        f"{entry.path} is damaged and not used: length {entry.size_bytes - 1}, the head says {entry.size_bytes}"
    ]
    assert kernel_cache().entries() == []


def key(asked: AttentionProblem, backward: bool = False, gpu: int = 0, backend: str = "auto") -> str:
    return autotune.problem_key(asked, backward, device.properties(gpu), backend)


def test_other_work_has_another_key(fake: FakeDriver) -> None:
    asked = problem()
    changed = [
        problem(128), problem(seqlen_k=1024), problem(dtype="float16"), problem(batch=5), problem(window_right=0),
        problem(dropout_p=0.1), problem(softcap=10.0), problem(softmax_scale=-1.0), problem(bias=SCORES),
        problem(q=OperandLayout(shape=asked.q.shape, strides=(1 << 21, 64, 1 << 17, 1), dtype="bfloat16")),
        problem(q=dataclasses.replace(asked.q, offset_alignment=2)),
    ]  # fmt: skip
    keys = {key(x) for x in (asked, *changed)} | {key(asked, backward=True), key(asked, backend="portable")}
    keys |= {key(problem(deterministic=True), backward=True)}
    assert len(keys) == len(changed) + 4
    assert all(len(x) == 64 for x in keys)


@pytest.mark.reliability(92)
@pytest.mark.parametrize("changes", [{"name": "Another GPU"}, {"num_sms": 78}, {"smem_per_block_optin": 101376}])
def test_another_gpu_has_another_key(changes: dict[str, Any]) -> None:
    with installed(FakeDriver([FakeGpu(), FakeGpu(), FakeGpu(**changes)])):
        assert key(problem()) == key(problem(), gpu=1) != key(problem(), gpu=2)


@pytest.mark.parametrize("name", ["__version__", "nvrtc_build", "headers"])
def test_another_version_has_another_key(name: str, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    autotune._library.cache_clear()
    before = key(problem())
    other: dict[str, Any] = {"__version__": "9.9.9", "nvrtc_build": lambda: "99.9 build"}
    if name == "headers":
        monkeypatch.setattr(autotune.headers, "header_digest", lambda: "0" * 64)
    else:
        monkeypatch.setattr(autotune, name, other[name])
    autotune._library.cache_clear()
    assert key(problem()) != before
    autotune._library.cache_clear()


def test_what_does_not_cost_time_is_not_in_the_key(fake: FakeDriver) -> None:
    asked = problem(dropout_p=0.1, softcap=5.0)
    padded = OperandLayout(shape=asked.q.shape, strides=(1 << 23, 1 << 12, 128, 1), dtype="bfloat16")
    same = dataclasses.replace(
        asked, dropout_p=0.5, softcap=30.0, softmax_scale=3.0, return_lse=True, out=padded, deterministic=True,
        dbias=True, dout=None, dq=dataclasses.replace(padded, offset_alignment=2),
    )  # fmt: skip
    assert key(same) == key(asked)
    one = problem(batch=1)
    strided = dataclasses.replace(one.q, strides=(12345, *one.q.strides[1:]))
    assert key(dataclasses.replace(one, q=strided)) == key(one)


def test_packed_batches_of_about_one_size_share_a_key(fake: FakeDriver) -> None:
    def packed(tokens: int, longest: int) -> AttentionProblem:
        q = dense_layout((1, tokens, 16, 64), "bfloat16")
        return problem(varlen=True, batch=6, seqlen_q=longest, seqlen_k=longest, q=q, k=q, v=q, out=q)

    assert key(packed(5000, 1800)) == key(packed(6000, 2000)) == key(packed(8192, 2048))
    assert key(packed(5000, 1800)) != key(packed(9000, 1800))


# -- when nothing is measured ----------------------------------------------------------------------------------------


@pytest.mark.reliability(61)
def test_a_captured_stream_is_not_measured_on(bench: Bench, fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    fake.capturing.add(0x77)
    with caplog.at_level(logging.INFO, "nvrtc_attn"):
        assert choose(stream=0x77) == choose(stream=0x77) == table()
    assert len(caplog.records) == 1
    assert bench.measured == []
    assert choose(stream=0x66) == candidates()[2], "measured by a later call"


@pytest.mark.parametrize("variable", ["NVRTC_ATTN_NO_COMPILE", "NVRTC_ATTN_ASSERT_CACHED"])
def test_where_nothing_may_be_compiled_nothing_is_measured(
    variable: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    assert choose() == table()
    assert bench.measured == []


def test_slow_outputs_do_not_decide_for_others(bench: Bench) -> None:
    odd = OperandLayout(shape=problem().q.shape, strides=(2048 * 1040, 1040, 65, 1), dtype="bfloat16")
    unaligned = problem(out=odd)
    assert choose(unaligned) == table(unaligned)
    assert bench.measured == []
    assert choose() == candidates()[2]
    # Then they share the choice, as far as it is possible for them.
    assert choose(unaligned) == table(unaligned) != candidates()[2]
    assert len(bench.measured) == 1
    slow_inputs = dict.fromkeys(("q", "k", "v", "out"), odd)
    choose(problem(**slow_inputs))
    assert len(bench.measured) == 2, "where the inputs are as slow it does not matter"


def test_empty_problems_are_not_measured(bench: Bench) -> None:
    for changes in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"num_heads": 0, "num_heads_kv": 0}):
        choose(problem(dtype="float16", **changes))
    assert bench.measured == []


def test_without_memory_the_table_chooses(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.error = CudaError("cuMemAllocAsync: CUDA_ERROR_OUT_OF_MEMORY (2)", 2)
    assert choose() == choose() == table()
    assert len(bench.measured) == 1, "this process does not try again"
    assert "OUT_OF_MEMORY" in caplog.text
    assert kernel_cache().entries() == []
    forget()
    bench.error = None
    assert choose() == candidates()[2]


def test_a_lost_context_is_an_error(bench: Bench) -> None:
    bench.error = DeviceFaultError("illegal address", 700)
    with pytest.raises(DeviceFaultError):
        choose()


def test_one_line_tells_the_times(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nvrtc_attn"):
        choose(problem(window_right=0))
    (record,) = caplog.records
    for part in ("forward bfloat16", "2048 x 2048", "band", "Fake GPU", "10.0 us", "8.0 us"):
        assert part in record.message


# -- modifiers -------------------------------------------------------------------------------------------------------


def captured_of(
    score: Any = None, mask: Any = None, *, address: int = 0x7000, where: Device | None = None
) -> tuple[Any, measure.Captured]:
    """The program of functions, and its arrays, all at one address."""
    traced = trace(score, mask)
    arrays = [
        TensorView(address, x.shape, dense_layout(x.shape, str(x.dtype)).strides, str(x.dtype), where or CUDA)
        for x in traced.captures
    ]
    return traced.program, measure.Captured(tuple(arrays), traced.numbers)


CUDA = Device("cuda", 0)
IDS = np.arange(2048, dtype=np.int32) // 300
TABLE = np.zeros((16, 4096), np.float32)


def documents(_b: Any, _h: Any, q: Any, k: Any) -> Any:
    return IDS[q] == IDS[k]


def relative(s: Any, _b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + TABLE[h, q - k + 2047]


def test_modifiers_are_measured_with_what_they_captured(bench: Bench) -> None:
    for score, mask in ((relative, None), (None, documents), (relative, documents)):
        program, captured = captured_of(score, mask)
        asked = problem(modifier=program)
        listed = list(autotune.all_forward_candidates(asked, **TARGET).values())
        chosen = autotune.choose_forward(asked, 0, 0, plan_of, captured=captured)
        assert chosen == listed[2] != table(asked)
        trained = problem(modifier=program, trained=(0,) if mask is None else ())
        backward = autotune.choose_backward(trained, 0, 0, plan_of, captured=captured)  # type: ignore[arg-type]
        assert (
            backward
            == list(backward_candidates(trained, **TARGET).values())[:3][-1]
            != choose_backward(trained, **TARGET)
        )
        assert autotune.expected_backward(trained, 0) == backward, "what is compiled ahead is what is chosen"
    assert len(bench.measured) == 6
    assert [x.known for x in bench.captured] == [(True,) * n for n in (1, 1, 1, 1, 2, 2)]


def test_what_a_modifier_computes_is_in_the_key(fake: FakeDriver) -> None:
    def program(score: Any = None, mask: Any = None) -> AttentionProblem:
        return problem(modifier=captured_of(score, mask)[0])

    others = [
        problem(), program(relative), program(None, documents), program(relative, documents),
        program(lambda s, b, h, q, k: 2.0 * relative(s, b, h, q, k)),
        problem(modifier=program(relative).modifier, trained=(0,)),
    ]  # fmt: skip
    assert len({key(x) for x in others}) == len(others)
    longer, wide = np.zeros((16, 9999), np.float32), np.ones((16, 4096), np.float32)
    for array in (longer, wide):
        assert key(program(lambda s, b, h, q, k, array=array: s + array[h, q - k + 2047])) == key(program(relative))
    half = np.zeros((16, 4096), np.float16)
    assert key(program(lambda s, b, h, q, k: s + half[h, q - k + 2047])) != key(program(relative)), "another kernel"
    two, three = np.float32(2.0), np.float32(3.0)
    assert key(program(lambda s, b, h, q, k: s + two * abs(q - k))) == key(
        program(lambda s, b, h, q, k: s + three * abs(q - k))
    ), "a number that is captured is no part of the text"


@pytest.mark.parametrize("backward", [False, True])
def test_warmup_measures_masks_for_jax(backward: bool, fake: FakeDriver) -> None:
    """Which describes a call without its arrays and leaves none to a bias."""
    request = precompile.Request(
        arch="sm_90a", head_dim=64, dtype="float16", seqlens=((2048, 2048),), modifier=trace(None, documents)
    )  # fmt: skip
    (tuned,) = precompile.problems(request, backward=backward)
    operands = dict.fromkeys("qkv", ((4, 2048, 16, 64), "float16"))
    called = describe_shapes(
        operands, CallOptions(), CUDA, modifier=trace(None, documents), keeps_arrays=True
    ).with_dense()  # fmt: skip
    assert key(tuned, backward) == key(called, backward)


def test_a_mask_of_unknown_arrays_is_not_measured_which_is_said_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Zeros, or ids that are all others, would be remembered for calls with documents."""
    program, unknown = captured_of(None, documents, address=0)
    asked = problem(modifier=program)
    with caplog.at_level(logging.INFO, "nvrtc_attn"):
        for seqlen in (1024, 2048):
            other = problem(seqlen_q=seqlen, seqlen_k=seqlen, modifier=program)
            assert autotune.choose_forward(other, 0, 0, plan_of, captured=unknown) == table(other)
    assert [record.getMessage() for record in caplog.records] == [autotune.UNKNOWN_ARRAYS]
    assert bench.measured == []
    _, known = captured_of(None, documents)
    assert autotune.choose_forward(asked, 0, 0, plan_of, captured=known) == table(asked), "a workspace is of that size"
    assert bench.measured == []
    # What the score alone reads decides no tile.
    program, unknown = captured_of(relative, lambda b, h, q, k: (q - k) % 7 != 3, address=0)
    asked = problem(modifier=program)
    assert autotune.choose_forward(asked, 0, 0, plan_of, captured=unknown) != table(asked)
    assert len(bench.measured) == 1


@pytest.mark.parametrize("measured", [False, True])
def test_where_the_tables_kernel_spills_narrower_ones_are_measured(
    measured: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is taken though it spills, and its kernel alone is loaded by a later process."""
    program, captured = captured_of(relative)
    asked = problem(modifier=program)
    narrower = heuristics.narrower_forward(asked, **TARGET)
    assert narrower
    listed = autotune.all_forward_candidates(asked, **TARGET)
    assert all(spec in listed.values() for spec in narrower)
    made: list[Any] = []

    class Spilling(FakePlan):
        """The narrowest does not spill; the others of this kernel do, the table's most."""

        def __init__(self, spec: Any, *_arguments: Any) -> None:
            least = {label(narrower[-1]): 0, label(narrower[0]): 8}
            super().__init__(label(spec), least.get(label(spec), 40))
            made.append(spec)

    monkeypatch.setattr(plan, "ForwardPlan", Spilling)
    monkeypatch.setattr(plan, "_plans", {})
    fast = list(listed).index(label(narrower[0]))
    bench.times = [5.0 if i == fast else 10.0 for i in range(len(listed))]
    if not measured:
        monkeypatch.delenv("NVRTC_ATTN_AUTOTUNE")
    found: Any = plan.forward_plan(asked, 0, 0, captured=captured)
    assert found.label == label(narrower[0] if measured else narrower[-1])
    assert len(bench.measured) == measured
    if measured:
        assert found.local_bytes == 8
        made.clear()
        forget()
        monkeypatch.setattr(plan, "_plans", {})
        monkeypatch.delenv("NVRTC_ATTN_AUTOTUNE")
        plan.forward_plan(asked, 0, 0)
        assert made == [narrower[0]], "remembered, without the arrays"
        monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
        monkeypatch.setattr(plan, "_plans", {})
        again: Any = plan.forward_plan(asked, 0, 0)
        assert again.label == label(narrower[-1]), "the table's rule, which does not know the choice"


@pytest.mark.parametrize("ordered", [False, True])
def test_captured_arrays_are_read_where_they_are_and_gradients_are_not(
    ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU, on the host with strides, or nowhere: then indices are in range."""
    monkeypatch.setattr(measure, "FLUSH_BYTES", 1 << 12)
    bucket, slopes, wide = np.zeros(64, np.int32), np.zeros(8, np.float32), np.arange(24, dtype=np.float32)[::-2]
    traced = trace(lambda s, b, h, q, k: (s + slopes[bucket[q]]) * wide[h] + 0.25 * k)
    places = {x.shape: i for i, x in enumerate(traced.captures)}
    on_gpu = Device("cuda", 0)
    views = {
        (64,): TensorView(0, (64,), (1,), "int32", on_gpu),
        (8,): TensorView(0x7000, (8,), (1,), "float32", on_gpu),
        (12,): TensorView(wide.ctypes.data, (12,), (-2,), "float32", Device("cpu", 0)),
    }
    arrays = tuple(views[x.shape] for x in traced.captures)
    trained = tuple(sorted((places[8,], places[12,])))
    asked = problem(
        8, batch=1, seqlen_q=8, seqlen_k=8, num_heads=2, num_heads_kv=2, modifier=traced.program, trained=trained,
        deterministic=ordered,
    )  # fmt: skip
    seen: dict[str, Any] = {}

    class Looking:
        local_bytes, workspace_bytes = 0, 1000

        def run(self, _stream: int, _addresses: Any, workspace: int, _rng: RngState, values: ModifierValues) -> None:
            pointers = struct.unpack_from("<3Q", values.block)
            integers = np.ctypeslib.as_array((ctypes.c_int32 * 64).from_address(pointers[places[64,]]))
            seen["bucket"] = integers.copy()
            seen["wide"] = [ctypes.c_float.from_address(pointers[places[12,]] - 8 * i).value for i in range(12)]
            seen["slopes"] = pointers[places[8,]]
            sums = (20 * 8 * 33,) if ordered else tuple(4 * math.prod(arrays[i].shape) for i in trained)
            assert tuple(nbytes for _, nbytes in values.zeroed) == sums
            ctypes.memset(workspace, 255, self.workspace_bytes)
            for address, nbytes in values.zeroed:
                ctypes.memset(address, 255, nbytes)  # is memory of the scratch's, beside all else
            seen["bucket after"] = integers.copy()

    with installed(MemoryDriver([FakeGpu()])) as fake:
        assert isinstance(fake, MemoryDriver)
        captured = measure.Captured(arrays, traced.numbers)
        measure.times_us(asked, True, {"table": Looking()}, 0, 5, captured)
        assert fake.memory == {}
    assert seen["slopes"] == 0x7000
    assert seen["wide"] == wide.tolist()
    assert set(seen["bucket"]) == set(range(8)), "of all elements of what it selects from"
    assert (seen["bucket after"] == seen["bucket"]).all()


# -- threads ---------------------------------------------------------------------------------------------------------


def test_one_thread_measures_and_the_others_wait(bench: Bench) -> None:
    bench.delay_s = 0.2
    found: list[ForwardPlanSpec] = []
    threads = [threading.Thread(target=lambda: found.append(choose())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [candidates()[2]] * 8
    assert len(bench.measured) == 1


def test_devices_do_not_wait_for_each_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one GPU waits for may be a collective that the thread of the other has still to start."""
    meeting = threading.Barrier(2, timeout=10)

    def both(*arguments: Any) -> dict[str, float]:
        meeting.wait()
        return bench(*arguments)

    monkeypatch.setattr(measure, "times_us", both)
    found: list[ForwardPlanSpec] = []
    threads = [threading.Thread(target=lambda i=i: found.append(choose(index=i))) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [candidates()[2]] * 2, "and decide alike"


# -- scratch memory --------------------------------------------------------------------------------------------------


class MemoryDriver(FakeDriver):
    """Device memory is host memory; every run of a plan takes 7 microseconds."""

    def __init__(self, gpus: list[FakeGpu]) -> None:
        super().__init__(gpus)
        self.memory: dict[int, Any] = {}
        self.modes: list[Any] = []
        self.alive_events = 0

    def do_MemAllocAsync(self, size: int, _stream: int) -> int:
        block = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def do_MemFree(self, address: int) -> None:
        del self.memory[address]

    def do_MemcpyHtoDAsync(self, to: int, source: int, size: int, _stream: int) -> None:
        ctypes.memmove(to, source, size)

    def do_MemcpyDtoDAsync(self, to: int, source: int, size: int, _stream: int) -> None:
        ctypes.memmove(to, source, size)

    def do_MemsetD8Async(self, *arguments: int) -> None:
        ctypes.memset(*arguments[:3])

    def do_StreamSynchronize(self, _stream: int) -> None:
        return None

    def do_EventCreate(self, _flags: int) -> int:
        self.alive_events += 1
        return self.alive_events

    def do_EventDestroy(self, _event: int) -> None:
        self.alive_events -= 1

    def do_EventRecord(self, _event: int, _stream: int) -> None:
        return None

    def do_EventElapsedTime(self, _start: int, _end: int) -> float:
        return 0.007

    def do_ThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        self.modes.append(mode)
        return "before"


class LookingPlan:
    """A plan that reads all of its inputs and overwrites its outputs, through their strides."""

    local_bytes, workspace_bytes = 0, 1000

    def __init__(self, layouts: dict[str, OperandLayout], lengths: dict[str, int]) -> None:
        self.layouts, self.lengths, self.seen = layouts, lengths, {}

    def run(self, stream: int, addresses: tuple[int, ...], workspace: int, rng: RngState) -> None:
        assert stream == 5
        assert (rng.seed_address, rng.offset_address) == (0, 0)
        arguments = dict(zip(BACKWARD, addresses, strict=True))
        types = {"bfloat16": np.uint16, "bool": np.uint8}
        for name, layout in self.layouts.items():
            itemsize = np.dtype(types.get(layout.dtype, layout.dtype)).itemsize
            assert arguments[name] % 16 == layout.offset_alignment % 16, name
            low = sum(min((n - 1) * s, 0) for n, s in zip(layout.shape, layout.strides, strict=True)) * itemsize
            high = sum(max((n - 1) * s, 0) for n, s in zip(layout.shape, layout.strides, strict=True)) * itemsize
            size = high + itemsize - low
            raw = (ctypes.c_char * size).from_address(arguments[name] + low)
            flat = np.frombuffer(raw, types.get(layout.dtype, layout.dtype))
            if name in ("dq", "dk", "dv", "dbias"):
                ctypes.memset(arguments[name] + low, 255, size)
            else:
                self.seen[name] = flat.copy()
        ctypes.memset(workspace, 255, self.workspace_bytes)
        for name, size in self.lengths.items():
            self.seen[name] = np.ctypeslib.as_array((ctypes.c_int32 * size).from_address(arguments[name])).copy()


def test_scratch_memory_has_the_layout_of_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "FLUSH_BYTES", 1 << 12)
    shape = (1, 700, 2, 8)
    statistic = OperandLayout(shape=(1, 2, 700), strides=(0, 700, 1), dtype="float32")
    backwards = OperandLayout(shape=shape, strides=(0, -16, 8, 1), dtype="bfloat16", offset_alignment=2)
    scores = OperandLayout(shape=(1, 2, 1, 300), strides=(0, 300, 0, 1), dtype="float32", offset_alignment=4)
    asked = problem(
        8, varlen=True, seqused_k=True, batch=3, seqlen_q=300, seqlen_k=300, num_heads=2, num_heads_kv=2, k=backwards,
        q=dense_layout(shape, "bfloat16"), v=dense_layout(shape, "bfloat16"), out=dense_layout(shape, "bfloat16"),
        dout=dense_layout(shape, "bfloat16"), dq=dense_layout(shape, "bfloat16"), dk=backwards,
        dv=dense_layout(shape, "bfloat16"), bias=scores, mask=dataclasses.replace(scores, dtype="bool"),
        lse=statistic, dlse=statistic, dbias_layout=scores,
    )  # fmt: skip
    layouts = {name: x for name in BACKWARD if (x := asked.layout_of(name)) is not None}
    assert len(layouts) == 13
    looking = LookingPlan(layouts, {"cu_seqlens_q": 4, "cu_seqlens_k": 4, "seqused_k": 3})
    with installed(MemoryDriver([FakeGpu()])) as fake:
        assert isinstance(fake, MemoryDriver)
        times = measure.times_us(asked, True, {"table": looking, "other": looking}, 0, 5)
        assert fake.memory == {}
        assert fake.alive_events == 0
        assert [getattr(mode, "name", mode) for mode in fake.modes] == ["CU_STREAM_CAPTURE_MODE_RELAXED", "before"]
        assert fake.stack == []
    assert times == {"table": 7.0, "other": 7.0}
    seen = looking.seen
    for name in ("q", "k", "v", "out", "dout"):
        values = (seen[name].astype(np.uint32) << 16).view(np.float32)
        assert values.size == 700 * 16, name
        assert abs(float(values.std()) - 1) < 0.05, name
    assert abs(float(seen["bias"].std()) - 1) < 0.1
    assert abs(float(seen["dlse"].std()) - 1) < 0.1
    assert set(seen["mask"]) == {0, 1}
    assert np.unique(seen["lse"]) == np.float32(np.log(300) + 0.5)
    assert seen["cu_seqlens_q"].tolist() == [0, 233, 466, 699]
    assert seen["seqused_k"].tolist() == [233] * 3


def test_scratch_memory_is_given_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "FLUSH_BYTES", 1 << 12)
    asked = problem(8, batch=1, seqlen_q=8, seqlen_k=8, num_heads=1, num_heads_kv=1)

    class Failing:
        local_bytes = workspace_bytes = 0

        def run(self, *_arguments: Any, **_named: Any) -> None:
            raise CudaError("cuLaunchKernel", 701)

    with installed(MemoryDriver([FakeGpu()])) as fake:
        assert isinstance(fake, MemoryDriver)
        with pytest.raises(CudaError, match="cuLaunchKernel"):
            measure.times_us(asked, False, {"table": Failing()}, 0, 5)
        measure.reclaim(0)
        assert fake.memory == {}
        assert fake.alive_events == 0


# -- plans, warmup and the command line ------------------------------------------------------------------------------


def test_a_plan_is_made_of_the_measured_choice(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(window_right=0)
    made: list[Any] = []

    class SpyPlan(FakePlan):
        def __init__(self, spec: Any, *_arguments: Any) -> None:
            super().__init__("spy")
            made.append(spec)

    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "ForwardPlan", SpyPlan)
    monkeypatch.setattr(plan, "BackwardPlan", SpyPlan)
    first = plan.forward_plan(asked, 0, 0)
    assert made[-1] == candidates(asked)[2]
    assert plan.forward_plan(asked, 0, 0) is first
    plan.backward_plan(asked, 0, 0)
    assert made[-1] == list(backward_candidates(asked, **TARGET).values())[2]
    assert len(bench.measured) == 2


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"varlen": True}, {"dbias": True, "batch": 1}, {"dropout": True}]
)
def test_warmup_tunes_what_a_call_looks_up(
    options: dict[str, Any], fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, AttentionProblem]] = []
    monkeypatch.setattr(plan, "forward_plan", lambda p, *_arguments, **_named: asked.append((False, p)))
    monkeypatch.setattr(plan, "backward_plan", lambda p, *_arguments, **_named: asked.append((True, p)))
    request = precompile.Request(arch="sm_90a", head_dim=64, dtype="float16", seqlens=((1024, 1024),), **options)
    assert precompile.tune([request, dataclasses.replace(request, arch="sm_80")]) == 2, "two GPUs of one kind"

    where = Device("cuda", 0)

    def tensor(*shape: int, dtype: str = "float16") -> TensorView:
        return TensorView(0, shape, dense_layout(shape, dtype).strides, dtype, where)

    batch = request.batch
    lead = (1, batch * 1024) if request.varlen else (batch, 1024)
    packed: dict[str, Any] = {}
    if request.varlen:
        lengths = tensor(batch + 1, dtype="int32")
        packed = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 1024, "max_seqlen_k": 1024}
    q = tensor(*lead, 16, 64)
    called = build_problem(
        q, q, q, causal=request.causal, dropout_p=0.2 if request.dropout else 0.0, return_lse=True, dbias=request.dbias,
        bias=tensor(1, 16, 1024, 1024) if request.dbias else None, **packed,
    )  # fmt: skip
    called = dataclasses.replace(called, **dict.fromkeys(("out", "dout", "dq", "dk", "dv"), called.q))
    for backward, tuned in asked:
        assert key(tuned, backward) == key(called, backward)


def test_warmup_tunes_modifiers_with_the_arrays_of_the_module(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass with the gradients that it has in a call, and what the arrays hold."""
    asked: list[tuple[AttentionProblem, Any]] = []

    def note(p: AttentionProblem, *_arguments: Any, captured: Any, **_named: Any) -> None:
        asked.append((p, captured))

    monkeypatch.setattr(plan, "forward_plan", note)
    monkeypatch.setattr(plan, "backward_plan", note)
    modifier = trace(relative, documents)
    request = precompile.Request(
        arch="sm_90a", head_dim=64, dtype="float16", seqlens=((2048, 2048),), modifier=modifier
    )  # fmt: skip
    assert precompile.tune([request]) == 2
    (forward, of_forward), (backward, of_backward) = asked
    assert (forward.trained, len(backward.trained)) == ((), 1)
    assert forward.modifier == backward.modifier == modifier.program
    for captured in (of_forward, of_backward):
        assert [x.ptr for x in captured.arrays] == [x.ctypes.data for x in modifier.captures]
        assert captured.known == (True, True)
    configs = precompile.configs([dataclasses.replace(request, num_sms=132)], candidates=True)
    for spec in autotune.all_forward_candidates(forward, **TARGET).values():
        assert {launch.config for launch in spec.launches} <= set(configs)


def test_warmup_compiles_the_kernels_of_every_candidate() -> None:
    request = precompile.Request(arch="sm_90a", head_dim=64, dtype="bfloat16", seqlens=((2048, 2048),), num_sms=132)
    few, many = precompile.configs([request]), precompile.configs([request], candidates=True)
    assert set(few) < set(many)
    for spec in candidates():
        assert {launch.config for launch in spec.launches} <= set(many)
    assert len(many) == len(set(many))


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, arguments)


def test_warmup_tune_needs_a_gpu_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "collect", lambda: {"gpus": []})
    result = invoke("warmup", "--tune", "--arch", "sm_90")
    assert result.exit_code == 1
    assert "there is no GPU here" in result.output
    monkeypatch.setattr(collect_env, "collect", lambda: {"gpus": [{"compute_capability": "9.0"}]})
    result = invoke("warmup", "--tune", "--arch", "sm_80")
    assert result.exit_code == 1
    assert "not on sm_80" in result.output


def test_warmup_tune_shows_what_it_measures(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "collect", lambda: {"gpus": [{"compute_capability": "9.0"}]})
    monkeypatch.setattr(precompile, "compile_configs", lambda kernels, jobs: iter(()))
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "ForwardPlan", lambda spec, *_arguments: FakePlan("forward"))
    monkeypatch.delenv("NVRTC_ATTN_AUTOTUNE")
    options = ("--tune", "--forward-only", "--head-dim", "64", "--dtype", "float16", "--causal", "--seqlen", "2048")
    result = invoke("warmup", *options)
    assert result.exit_code == 0, result.output
    assert "autotune: forward float16, batch 4, lengths 2048 x 2048" in result.output
    assert "1 passes; 1 choices in the cache" in result.output
    listing = invoke("cache", "list").output
    assert "autotune Fake GPU: forward float16" in listing
    assert "1 entries" in listing
    assert "1 are choices of autotune" in listing
    problems: list[str] = []
    assert collect_env._cache({}, problems)["tuned"] == 1
    assert invoke("cache", "clear").output.strip() == "1 entries deleted"
    assert collect_env._cache({}, problems)["tuned"] == 0
