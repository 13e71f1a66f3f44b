"""Running a plan, on a driver written in Python: workspace, contexts, threads."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dlpack_producer import BOGUS_POINTER, Producer
from fake_driver import FakeDriver, FakeGpu, installed, instant_compiler

from nvrtc_attn import api
from nvrtc_attn.front.operands import addresses
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.jit.params import BackwardParams, ForwardParams
from nvrtc_attn.plans import plan
from nvrtc_attn.plans.plan import BackwardPlan, backward_plan

ADDRESSES = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "hopper")
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_kernels", {})
    with instant_compiler(tmp_path / "kernels"):
        yield


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    with installed(FakeDriver([FakeGpu(), FakeGpu()])) as driver_in_python:
        yield driver_in_python


def fused_plan(device: int = 0) -> BackwardPlan:
    """Two launches, the first with tensor maps, after a memset of its counters."""
    rows = dense_layout((4, 1024, 16, 64), "bfloat16")
    problem = AttentionProblem(
        dtype="bfloat16", batch=4, seqlen_q=1024, seqlen_k=1024, num_heads=16, num_heads_kv=16, head_dim=64,
        head_dim_v=64, softmax_scale=0.125, **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), rows),
        lse=dense_layout((4, 16, 1024), "float32"),
    )  # fmt: skip
    return backward_plan(problem, device, 0)


def params_of(launched: tuple[Any, ...]) -> BackwardParams:
    """The params that a launch of the fake driver points at."""
    pointer = ctypes.c_void_p.from_address(launched[9]).value
    assert pointer is not None
    return BackwardParams.from_buffer_copy(ctypes.string_at(pointer, ctypes.sizeof(BackwardParams)))


def run(made: BackwardPlan, base: int) -> None:
    numbers = {name: base + 4096 * i for i, name in enumerate(ADDRESSES)}
    made.run(0x55, addresses(made.OPERANDS, numbers), base + (1 << 20))


def test_counters_are_zeroed_before_the_launches_in_the_context_of_the_plan(fake: FakeDriver) -> None:
    made = fused_plan(1)
    fake.stack[:] = [fake.context_of(0)]
    fake.calls.clear()
    run(made, 1 << 30)
    assert fake.stack == [fake.context_of(0)]
    work = [name for name in fake.calls if name.startswith(("cuMemset", "cuLaunch"))]
    assert work == ["cuMemsetD8Async", "cuLaunchKernel", "cuLaunchKernelEx"]
    ((context, address, value, nbytes, stream),) = fake.memsets
    assert (context, value, nbytes, stream) == (fake.context_of(1), 0, 4 * (2 + 4 * 16), 0x55)
    assert params_of(fake.launches[0][1:]).counters == address
    assert (1 << 30) + (1 << 20) <= address <= (1 << 30) + (1 << 20) + made.workspace_bytes - nbytes
    assert {launched[0] for launched in fake.launches} == {fake.context_of(1)}


def test_a_run_in_the_right_context_asks_for_it_once(fake: FakeDriver) -> None:
    made = fused_plan()
    fake.stack[:] = [fake.context_of(0)]
    run(made, 1 << 30)  # encodes the tensor maps
    fake.calls.clear()
    run(made, 1 << 30)
    assert fake.calls == ["cuCtxGetCurrent", "cuMemsetD8Async", "cuLaunchKernel", "cuLaunchKernelEx"]


def test_threads_that_run_one_plan_do_not_see_each_others_addresses(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fused_plan()
    seen: list[tuple[int, int, int]] = []
    inside, most = [0], [0]

    def slow(_self: FakeDriver, *arguments: Any) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        first = params_of(arguments)
        time.sleep(0.002)  # another thread runs, as it may while the real driver copies
        again = params_of(arguments)
        inside[0] -= 1
        assert bytes(first) == bytes(again)
        seen.append((first.q, first.dv, first.counters))

    monkeypatch.setattr(FakeDriver, "do_LaunchKernel", slow)
    barrier = threading.Barrier(8)

    def work(base: int) -> None:
        barrier.wait()
        for _ in range(5):
            run(made, base)

    bases = [(number + 1) << 30 for number in range(8)]
    threads = [threading.Thread(target=work, args=(base,)) for base in bases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] > 1, "the launches overlapped"
    offset = {counters - q for q, _, counters in seen}
    assert len(offset) == 1
    assert sorted(q for q, _, _ in seen) == sorted(bases * 10)
    assert {dv - q for q, dv, _ in seen} == {4096 * ADDRESSES.index("dv")}


def test_a_lost_device_is_refused_before_anything_is_written(fake: FakeDriver) -> None:
    made = fused_plan()
    fake.failures["cuLaunchKernel"] = [700]
    with pytest.raises(Exception, match="700"):
        run(made, 1 << 30)
    fake.calls.clear()
    with pytest.raises(Exception, match="unusable since an earlier fault"):
        run(made, 1 << 30)
    assert fake.calls == []


@pytest.mark.reliability(12)
def test_negative_strides_reach_the_kernel(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """F7: no copy. The copy engine cannot count downwards; the portable kernels count in signed 64-bit steps."""
    monkeypatch.delenv("NVRTC_ATTN_BACKEND")

    def call(reverse: bool) -> tuple[str, ForwardParams]:
        strides = (256 * 2 * 64, 2 * 64, 64, 1)
        reversed_ = {"strides": (strides[0], -strides[1], strides[2], 1), "byte_offset": 2 * 255 * strides[1]}
        options: dict[str, Any] = reversed_ if reverse else {"strides": strides}
        places = [BOGUS_POINTER + (i << 24) for i in range(4)]
        q, k, v, out = (Producer((4, 256, 2, 64), data=place, **options) for place in places)
        api.attention_forward(q, k, v, out)
        launched = fake.launches[-1]
        name = next(c.kernel for (c, _), kernel in plan._kernels.items() if kernel.function == launched[1])
        pointer = ctypes.c_void_p.from_address(launched[10]).value
        assert pointer is not None
        return name, ForwardParams.from_buffer_copy(ctypes.string_at(pointer, ctypes.sizeof(ForwardParams)))

    monkeypatch.setattr("nvrtc_attn.plans.run.hold", lambda *_: None)
    name, params = call(reverse=False)
    assert (name, params.q_stride_m) == ("forward_hopper", 128)
    name, params = call(reverse=True)
    assert (name, params.q_stride_m, params.k_stride_n, params.out_stride_m) == ("forward_portable", -128, -128, -128)
    assert params.q == BOGUS_POINTER + 2 * 255 * 128


def test_sizes_of_workspaces_follow_the_layouts_of_what_is_written(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call with outputs that other kernels write was refused a workspace of the size that had been asked for."""
    monkeypatch.delenv("NVRTC_ATTN_BACKEND")
    monkeypatch.setattr("nvrtc_attn.plans.run.hold", lambda *_: None)
    shape, strides = (2, 200, 8, 128), (200 * 1024, 1024, 128, 1)
    places = iter(range(BOGUS_POINTER, BOGUS_POINTER + (1 << 42), 1 << 32))

    def new(shape: tuple[int, ...] = shape, dtype: tuple[int, int] = (4, 16), **more: Any) -> Producer:
        return Producer(shape, dtype=dtype, data=next(places), **more)

    def backwards() -> Producer:
        return new(strides=(strides[0], -strides[1], *strides[2:]), byte_offset=2 * 199 * strides[1])

    q, k, v, dout, lse = new(), new(), new(), new(), new((2, 8, 200), (2, 32))
    found: dict[str, set[int]] = {"forward": set(), "backward": set()}
    for written in (new, lambda: new(dtype=(2, 32)), backwards):
        given = {"out": written()}
        size = api.forward_workspace_bytes(q, k, v, **given)
        found["forward"].add(size)
        api.attention_forward(q, k, v, **given, workspace=new((size,), (1, 8)))
        out, gradients = new(), {name: written() for name in ("dq", "dk", "dv")}
        size = api.backward_workspace_bytes(q, k, v, dout=dout, out=out, **gradients)
        found["backward"].add(size)
        api.attention_backward(dout, q, k, v, out, lse, **gradients, workspace=new((size,), (1, 8)))
        with pytest.raises(ValueError, match=f"workspace: {size - 1} bytes, needed are {size}"):
            api.attention_backward(dout, q, k, v, out, lse, **gradients, workspace=new((size - 1,), (1, 8)))
    assert len(found["backward"]) > 1, "some need more"
    with pytest.raises(ValueError, match="dq: shares memory with q"):
        api.backward_workspace_bytes(q, k, v, dq=q)
