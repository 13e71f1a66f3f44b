"""Measured plans on the GPU: every candidate is right, nothing of the caller's changes, and the choice is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cases
import pytest
from child_environment import python_path
from harness import Run, failures, forget_plans, oracle
from test_modifiers import check as check_modifier
from test_modifiers import named

torch = pytest.importorskip("torch", reason="torch is not installed")

import nvrtc_attn  # noqa: E402 - after the skip
from nvrtc_attn.heuristics import MAX_CANDIDATES  # noqa: E402
from nvrtc_attn.jit.cache import KernelCache  # noqa: E402
from nvrtc_attn.plans import autotune, measure  # noqa: E402

CASES = {
    case.name: case
    for case in (
        cases.make_case("tune-causal", dtype="bfloat16", seqlen_q=300, seqlen_k=333, num_heads=4, causal=True),
        cases.make_case("tune-dropout", head_dim=128, num_heads=4, num_heads_kv=2, dropout_p=0.1, deterministic=True),
        cases.make_case("tune-bias", bias="1hqk", mask="b11k", layout="bhmk", seqlen_q=128, seqlen_k=256),
        cases.make_case("tune-packed", seqlens=((100, 203), (257, 90)), tail=(3, 5), seqused_k=(150, 90)),
        cases.make_case("tune-decode", seqlen_q=1, seqlen_k=2000, head_dim=128, batch=3, layout="padded_rows"),
    )
}


class Measured:
    """What `measure.times_us` was asked and found."""

    def __init__(self) -> None:
        self.labels: list[list[str]] = []

    def __call__(self, *arguments: Any) -> dict[str, float]:
        times = TIMES_US(*arguments)
        self.labels.append(list(times))
        assert all(0 < time < 1e6 for time in times.values())
        return times


TIMES_US = measure.times_us


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measured:
    """Plans are made anew and measured; choices go to a cache that ends with the test."""
    found = Measured()
    choices = KernelCache(tmp_path / "choices", 1 << 20)
    monkeypatch.setattr(measure, "times_us", found)
    monkeypatch.setattr(autotune, "kernel_cache", lambda: choices)
    monkeypatch.setattr(autotune, "_choices", {})
    forget_plans(monkeypatch)
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "1")
    monkeypatch.delenv("NVRTC_ATTN_ASSERT_CACHED", raising=False)
    return found


def take(position: int) -> Callable[[Mapping[str, float]], str]:
    return lambda times: list(times)[min(position, len(times) - 1)]


@pytest.fixture
def positions(measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
    """Of candidates, one after another: a call in the loop is measured anew and takes the candidate there."""

    def walk() -> Iterator[int]:
        for position in range(MAX_CANDIDATES):
            monkeypatch.setattr(autotune, "fastest", take(position))
            monkeypatch.setattr(autotune, "_choices", {})
            forget_plans(monkeypatch)
            choices = KernelCache(tmp_path / f"choices{position}", 1 << 20)
            monkeypatch.setattr(autotune, "kernel_cache", lambda choices=choices: choices)
            measured.labels.clear()
            yield position
            assert 1 <= len(measured.labels) <= 2, "one measurement a pass, shared with the query for the workspace"
            if position >= max(len(labels) for labels in measured.labels) - 1:
                break
        assert position > 0, "there was something to choose"

    return walk()


@pytest.mark.reliability(36)
@pytest.mark.parametrize("name", CASES)
def test_every_candidate_is_right(name: str, measured: Measured, positions: Iterator[int]) -> None:
    case = CASES[name]
    run = Run(case)
    before = {name: x.clone() for name, x in run.inputs.items()}
    guard = torch.full((1 << 20,), 77, dtype=torch.uint8, device="cuda")
    exact, low = oracle(case, run.arrays)
    lines = []
    for position in positions:
        forward = run.forward()
        found = failures(case, forward, exact, low, run.arrays)
        backward = run.backward(forward)
        found += failures(case, backward, exact, low, run.arrays)
        if case.deterministic:
            again = run.backward(forward)
            found += [x for x in backward if not torch.equal(backward[x], again[x])]
        taken = [labels[min(position, len(labels) - 1)] for labels in measured.labels]
        lines += [f"{taken}: {line}" for line in found]
    assert not lines, "\n".join(lines)
    assert all(torch.equal(_bits(x), _bits(before[name])) for name, x in run.inputs.items())
    assert bool((guard == 77).all())


@pytest.mark.parametrize("name", ["relative bias", "documents", "softcap and alibi"])
def test_every_candidate_of_a_modifier_is_right(name: str, positions: Iterator[int]) -> None:
    """Measured with the arrays that the call captured; gradients of learned ones are among what is checked."""
    for _ in positions:
        check_modifier(named(name), (2, 4, 200, 176), "bfloat16", 64)


def _bits(x: Any) -> Any:
    return x.contiguous().view(torch.uint8)


def tensors(batch: int = 2, seqlen: int = 320) -> list[Any]:
    return [torch.randn(batch, seqlen, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3)]


def sdpa(q: Any, k: Any, v: Any) -> Any:
    heads_first = (x.float().transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)


def close(out: Any, q: Any, k: Any, v: Any) -> bool:
    return bool((out.float() - sdpa(q, k, v)).abs().max() < 2e-3)


def test_scratch_memory_goes_back(measured: Measured) -> None:
    x = tensors()
    nvrtc_attn.attention(*x)  # loads what is loaded once
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for batch in (3, 4, 5):
        out = nvrtc_attn.attention(*(y := tensors(batch)))
        assert close(out, *y)
    torch.cuda.synchronize()
    assert len(measured.labels) == 4
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other workers take memory of the same GPU
        assert free - torch.cuda.mem_get_info()[0] < measure.FLUSH_BYTES // 2


def test_another_stream(measured: Measured) -> None:
    x = tensors()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = nvrtc_attn.attention(*x)
    stream.synchronize()
    assert close(out, *x)
    assert len(measured.labels) == 1


@pytest.mark.reliability(61)
def test_a_capture_measures_nothing(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are loaded, the plan is not made: the capture gets the table's choice."""
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    nvrtc_attn.attention(*tensors(2))
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "1")
    x = tensors(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nvrtc_attn.attention(*x)
    assert measured.labels == []
    graph.replay()
    torch.cuda.synchronize()
    assert close(out, *x)


@pytest.mark.reliability(61)
def test_a_measured_plan_is_captured(measured: Measured) -> None:
    x = tensors(3)
    nvrtc_attn.attention(*x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nvrtc_attn.attention(*x)
    assert len(measured.labels) == 1
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert close(out, *x)


@pytest.mark.reliability(61)
def test_measuring_leaves_the_capture_of_another_thread_alone(measured: Measured) -> None:
    nvrtc_attn.attention(*tensors(4))  # loads the kernels of all candidates: loading is not what is tested here
    x = tensors(5)
    stream = torch.cuda.Stream()
    errors: list[Exception] = []

    def make_plan() -> None:
        try:
            nvrtc_attn.forward_workspace_bytes(*x, stream=stream)
        except Exception as error:
            errors.append(error)

    y = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # capture_error_mode is "global": what other threads do may break it
        z = y + 1
        thread = threading.Thread(target=make_plan)
        thread.start()
        thread.join()
        z = z * 2
    assert errors == []
    assert len(measured.labels) == 2
    graph.replay()
    torch.cuda.synchronize()
    assert bool((z == 4).all())
    assert close(nvrtc_attn.attention(*x), *x)
    assert len(measured.labels) == 2


def test_jax_measures_while_it_traces(measured: Measured) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed: no launch from inside jit")
    from nvrtc_attn.jax import attention

    x = [y.cpu().numpy() for y in tensors(7)]
    step = jax.jit(jax.value_and_grad(lambda q, k, v: attention(q, k, v).astype("float32").sum()))
    step.lower(*x)
    assert len(measured.labels) == 2
    total, dq = step(*x)
    out = nvrtc_attn.attention(*x)  # on the CPU
    assert abs(float(total) - float(out.astype("float32").sum())) < 5
    assert bool((abs(dq.astype("float32")) < 1e3).all())
    assert len(measured.labels) == 2


SCRIPT = """
import json, logging
import torch, nvrtc_attn
from nvrtc_attn.plans import autotune, measure
calls, times_us = [], measure.times_us
measure.times_us = lambda *arguments: calls.append(1) or times_us(*arguments)
autotune.fastest = lambda times: list(times)[1]
torch.manual_seed(0)
q, k, v = (torch.randn(2, 320, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3))
out = nvrtc_attn.attention(q, k, v)
print(json.dumps([len(calls), list(autotune._choices.values()), out.float().cpu().sum().item()]))
"""


def test_a_second_process_uses_the_choice(tmp_path: Path) -> None:
    def process(value: str) -> list[Any]:
        names = [name for name in os.environ if name != "NVRTC_ATTN_ASSERT_CACHED"]
        environment = {name: os.environ[name] for name in names}
        root = Path(__file__).resolve().parents[2]
        environment |= {
            "NVRTC_ATTN_CACHE_DIR": str(tmp_path),
            "NVRTC_ATTN_AUTOTUNE": value,
            "PYTHONPATH": python_path(root),
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=True
        )
        found: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    tmp_path.chmod(0o700)
    calls, (label,), total = process("1")
    assert calls == 1
    assert process("1") == [0, [label], total]
    assert process("") == [0, [label], total]
    assert process("0")[:2] == [0, []]
