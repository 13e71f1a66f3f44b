"""Kernels of the backward pass compiled while the forward pass gets ready, on a driver and a compiler in Python."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver, FakeGpu, installed

from nvrtc_attn import heuristics
from nvrtc_attn.base.errors import CompileError
from nvrtc_attn.front.call import CallOptions
from nvrtc_attn.front.operands import INPUTS
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit.codegen import entry_source
from nvrtc_attn.plans import plan, prefetch
from nvrtc_attn.plans.plan import backward_plan, forward_plan
from nvrtc_attn.plans.prefetch import BackwardPrefetch

ROWS = dense_layout((4, 1024, 16, 64), "bfloat16")
PROBLEM = AttentionProblem(
    dtype="bfloat16", batch=4, seqlen_q=1024, seqlen_k=1024, num_heads=16, num_heads_kv=16, head_dim=64,
    head_dim_v=64, softmax_scale=0.125, return_lse=True,
    **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), ROWS),
    lse=dense_layout((4, 16, 1024), "float32"),
)  # fmt: skip


class Compiler:
    """Writes down what it is asked for, and may be told to wait or to fail."""

    def __init__(self) -> None:
        self.urgent: dict[str, bool] = {}
        self.order: list[str] = []
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.error = ""

    def __call__(self, source: str, arch: str, options: tuple[str, ...], ticket: Any) -> tuple[bytes, str]:
        self.urgent[source] = ticket.urgent
        self.order.append(source)
        assert self.may_finish.wait(30)
        if self.error:
            raise CompileError(self.error, "", source, options)
        return b"code", ""


@pytest.fixture(autouse=True)
def fake_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    for name in ("NVRTC_ATTN_ASSERT_CACHED", "NVRTC_ATTN_NO_COMPILE", "NVRTC_ATTN_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "hopper")
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path / "kernels"))
    for module, name, empty in ((plan, "_plans", {}), (plan, "_kernels", {}), (prefetch, "_done", set())):
        monkeypatch.setattr(module, name, empty)
    made = Compiler()
    monkeypatch.setattr(compiler, "run_nvrtc", made)
    compiler._memory.clear()
    with installed(FakeDriver([FakeGpu()])):
        yield made
    made.may_finish.set()
    settle()
    compiler._memory.clear()


def settle() -> None:
    """Wait for everything in the background."""
    names = ("nvrtc_attn prefetch", "nvrtc_attn compile")
    while threads := [thread for thread in threading.enumerate() if thread.name in names]:
        threads[0].join(30)
    assert compiler._flights == {}


def sources(kind: str, problem: AttentionProblem = PROBLEM) -> set[str]:
    choose = getattr(heuristics, f"choose_{kind}")
    spec = choose(problem, arch="sm_90", num_sms=132, smem_limit=232448, backend="hopper")
    return {entry_source(launch.config) for launch in spec.launches if launch.grid}


def test_the_backward_kernels_compile_while_the_forward_one_does(fake_compiler: Compiler) -> None:
    fake_compiler.may_finish.clear()
    ahead = BackwardPrefetch(PROBLEM, 0)
    thread = threading.Thread(target=forward_plan, args=(PROBLEM, 0, 0), kwargs={"meanwhile": ahead.start})
    thread.start()
    wanted = sources("forward") | sources("backward")
    end = time.monotonic() + 30
    while set(fake_compiler.order) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    assert set(fake_compiler.order) == wanted
    assert thread.is_alive(), "the forward pass is not there yet"
    assert {source for source, urgent in fake_compiler.urgent.items() if urgent} == sources("forward")
    assert set(fake_compiler.order[: len(sources("forward"))]) == sources("forward"), "and is asked for first"
    fake_compiler.may_finish.set()
    thread.join(30)
    settle()
    before = len(fake_compiler.order)
    backward_plan(PROBLEM, 0, 0)
    assert len(fake_compiler.order) == before, "what the backward pass needs is what was compiled"


@pytest.mark.parametrize(
    "changes",
    [
        {"window_right": 0},
        {"deterministic": True},
        {"softcap": 30.0},
        {"dropout_p": 0.1},
        {"bias": dense_layout((1, 16, 1024, 1024), "bfloat16"), "dbias": True},
    ],
    ids=str,
)
def test_the_guess_is_what_the_backward_pass_plans(changes: dict[str, Any], fake_compiler: Compiler) -> None:
    problem = replace(PROBLEM, **changes, dbias_layout=changes.get("bias"))
    BackwardPrefetch(problem, 0).start()
    settle()
    before = len(fake_compiler.order)
    assert before > 0
    backward_plan(problem, 0, 0)
    assert len(fake_compiler.order) == before


def test_without_a_compile_meanwhile_is_not_called(fake_compiler: Compiler) -> None:
    forward_plan(PROBLEM, 0, 0)
    plan._plans.clear()
    plan._kernels.clear()
    compiler._memory.clear()  # as in a second process
    forward_plan(PROBLEM, 0, 0, meanwhile=lambda: pytest.fail("there was nothing to wait for"))


def test_a_failure_stays_silent_until_the_backward_pass_asks(
    fake_compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fake_compiler.error = "refused"
    BackwardPrefetch(PROBLEM, 0).start()
    settle()
    assert fake_compiler.order
    assert caplog.records == []
    with pytest.raises(CompileError, match="refused"):
        backward_plan(PROBLEM, 0, 0)
    fake_compiler.error = ""
    backward_plan(PROBLEM, 0, 0)


def test_a_problem_without_a_backward_kernel_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    BackwardPrefetch(replace(PROBLEM, head_dim=4096), 0).start()
    settle()
    assert caplog.records == []


@pytest.mark.reliability(93)
@pytest.mark.parametrize("variable", ["NVRTC_ATTN_NO_COMPILE", "NVRTC_ATTN_ASSERT_CACHED", "NVRTC_ATTN_AUTOTUNE"])
def test_nothing_is_guessed_where_that_is_forbidden(
    variable: str, fake_compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, "1")
    BackwardPrefetch(PROBLEM, 0).start()
    settle()
    assert fake_compiler.order == []
    assert not (tmp_path / "kernels").exists()


def test_shapes_that_share_forward_kernels_are_guessed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[AttentionProblem] = []
    monkeypatch.setattr(BackwardPrefetch, "_work", lambda self: started.append(self._problem))
    for batch in (1, 2, 3):
        BackwardPrefetch(replace(PROBLEM, batch=batch), 0).start_after(("key",))
    BackwardPrefetch(replace(PROBLEM, deterministic=True), 0).start_after(("key",))
    settle()
    assert [(p.batch, p.deterministic) for p in started] == [(1, False), (4, True)]


@pytest.mark.parametrize("with_bias", [False, True])
def test_torch_guesses_what_its_backward_pass_plans(with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors, because only their layouts matter: the guess is the problem that `plan_backward` makes."""
    torch = pytest.importorskip("torch")
    from nvrtc_attn import api
    from nvrtc_attn.front.tensors import view
    from nvrtc_attn.torch import passes

    q, k, v = (torch.zeros(2, 40, h, 64).transpose(1, 2).contiguous().transpose(1, 2) for h in (4, 2, 2))
    bias = torch.zeros(1, 4, 40, 40) if with_bias else None
    tensors = (q, k, v, bias, *(None for _ in INPUTS[4:]))
    options = CallOptions(causal=True, return_lse=True, deterministic=True, dbias=with_bias)
    call = passes._describe(tensors, options)
    guess = BackwardPrefetch(call.with_dense(), 0)
    made: list[AttentionProblem] = []
    monkeypatch.setattr("nvrtc_attn.plans.run.backward_plan", lambda problem, *_, **_named: made.append(problem))
    names = {"out": torch.zeros(2, 40, 4, 64), "dout": torch.zeros(2, 40, 4, 64), "lse": torch.zeros(2, 4, 40)}
    names |= {"dq": torch.zeros(2, 40, 4, 64), "dk": torch.zeros(2, 40, 2, 64), "dv": torch.zeros(2, 40, 2, 64)}
    names |= {"dbias": torch.zeros(1, 4, 40, 40)} if with_bias else {}
    api.plan_backward(call, {name: view(x, name) for name, x in names.items()})
    assert made == [guess._problem]
