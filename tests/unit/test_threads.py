"""Every table of the process under eight threads at once: whole answers, one of each, no errors, no growth.

Written for builds of Python without the interpreter lock, where single operations on a dict, list or deque are still
atomic, and two of them are not. With the lock, threads switch after every few bytecodes here, which finds the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import subprocess
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_driver
import numpy as np
import pytest
from fake_driver import FakeGpu, installed, instant_compiler

from nvrtc_attn.base import log
from nvrtc_attn.base.errors import CudaError, DeviceFaultError
from nvrtc_attn.front import philox, remembered, tensors
from nvrtc_attn.front.call import CallOptions, describe
from nvrtc_attn.front.operands import FORWARD
from nvrtc_attn.front.problem import AttentionProblem, OperandLayout, dense_layout
from nvrtc_attn.heuristics import tensor_map as tma
from nvrtc_attn.jit import cache, headers, nvrtc_library
from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit.params import HopperForwardParams
from nvrtc_attn.plans import autotune, plan
from nvrtc_attn.plans.plan import forward_plan
from nvrtc_attn.runtime import buffers as device_buffer
from nvrtc_attn.runtime import driver, lifetime, tensor_maps
from nvrtc_attn.runtime import kernel as module
from nvrtc_attn.runtime.buffers import DeviceBuffer

THREADS = 8


@dataclass
class FakeDriver(fake_driver.FakeDriver):
    """With memory and events that are done at once. Counts are of a Counter under a lock: the tests' own."""

    lock: Any = field(default_factory=threading.Lock)
    allocated: set[int] = field(default_factory=set)
    freed: Counter[int] = field(default_factory=Counter)
    events: set[int] = field(default_factory=set)
    destroyed: Counter[int] = field(default_factory=Counter)
    next_number: int = 1

    def number(self) -> int:
        with self.lock:
            self.next_number += 1
            return self.next_number

    def do_MemAllocAsync(self, _size: int, _stream: int) -> int:
        address = self.number() << 20
        self.allocated.add(address)
        return address

    def do_MemFree(self, address: int) -> None:
        with self.lock:
            self.freed[address] += 1

    def do_EventCreate(self, _flags: int) -> int:
        event = self.number()
        self.events.add(event)
        return event

    def do_EventRecord(self, _event: int, _stream: int) -> None:
        return None

    def do_EventQuery(self, event: int) -> None:
        assert self.destroyed[event] == 0, "an event is asked after it was destroyed"

    def do_EventDestroy(self, event: int) -> None:
        with self.lock:
            self.destroyed[event] += 1

    def do_ThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        return mode


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "hopper")
    for owner, table in ((plan, "_plans"), (plan, "_kernels"), (autotune, "_choices"), (remembered, "_problems")):
        monkeypatch.setattr(owner, table, {})
    with instant_compiler(tmp_path / "kernels"), installed(FakeDriver([FakeGpu(), FakeGpu()])) as driver:
        assert isinstance(driver, FakeDriver)
        yield driver


def hammer(work: Callable[[int], Any]) -> list[Any]:
    """``work`` of 0 .. 7 in as many threads that start together: the results; the first error is raised."""
    barrier = threading.Barrier(THREADS, timeout=60)
    results: list[Any] = [None] * THREADS
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            barrier.wait()
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def problem(length: int = 512) -> AttentionProblem:
    rows = dense_layout((2, length, 4, 64), "bfloat16")
    return AttentionProblem(
        dtype="bfloat16", batch=2, seqlen_q=length, seqlen_k=length, num_heads=4, num_heads_kv=4, head_dim=64,
        head_dim_v=64, softmax_scale=0.125, q=rows, k=rows, v=rows, out=rows,
    )  # fmt: skip


def plan_of(length: int, device: int = 0) -> plan.ForwardPlan:
    return forward_plan(problem(length), device, 0)


def test_threads_that_meet_get_one_plan_and_load_its_kernel_once(fake: FakeDriver) -> None:
    lengths = [512 + 64 * i for i in range(12)]
    made = hammer(lambda _: [plan_of(length) for length in lengths])
    assert all(one is other for found in made for one, other in zip(found, made[0], strict=True))
    loaded = Counter(fake.images)
    assert set(loaded.values()) == {1}, "an image was loaded twice"
    assert len(module._kernels) == len(fake.images)


def test_a_full_table_of_plans_stays_full_and_right(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MAX_PLANS", 4)

    def work(number: int) -> None:
        for i in range(40):
            length = 512 + 64 * ((i * (number + 1)) % 7)
            key_lengths = {key[1].seqlen_q for key in list(plan._plans)}
            assert key_lengths <= {512 + 64 * j for j in range(7)}
            found = plan_of(length, number % 2)
            assert found._steps[0].kernel.device == number % 2

    hammer(work)
    assert len(plan._plans) <= 4


def test_launches_of_one_plan_have_their_own_params(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan_of(512)
    wrong: list[int] = []
    mine = threading.local()

    def launch(_self: Any, *arguments: Any) -> None:
        pointer = ctypes.c_void_p.from_address(arguments[9]).value
        assert pointer is not None
        seen = HopperForwardParams.from_buffer_copy(ctypes.string_at(pointer, ctypes.sizeof(HopperForwardParams)))
        if seen.q != mine.base or seen.v != mine.base + 2:
            wrong.append(seen.q)

    monkeypatch.setattr(FakeDriver, "do_LaunchKernel", launch)

    def work(number: int) -> None:
        for i in range(100):
            mine.base = (number + 1) << 32 | i << 12
            made.run(0, tuple(mine.base + i if i < 4 else 0 for i in range(len(FORWARD))))

    hammer(work)
    assert not wrong
    assert len(made._steps[0].spare) <= THREADS


def test_tensor_maps_are_those_of_the_address(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "_REMEMBERED", 8)
    query = OperandLayout(shape=(2, 512, 4, 64), strides=(512 * 256, 256, 64, 1), dtype="bfloat16")
    pointers = HopperForwardParams.POINTERS
    encoder = tensor_maps.TensorMapEncoder(
        [tma.tensor_map("tensor_map_q", "q", query, 2, 128)], HopperForwardParams, pointers
    )
    offset = HopperForwardParams.tensor_map_q.offset

    def work(number: int) -> None:
        buffer = (ctypes.c_char * ctypes.sizeof(HopperForwardParams))()
        for i in range(200):
            address = 0x1000 * (1 + (number * 7 + i) % 24)
            encoder.write(buffer, [address] * len(pointers))
            assert int.from_bytes(buffer.raw[offset : offset + 8], "little") == address

    hammer(work)
    assert len(encoder._slots[0][3]) < 8 + THREADS


def test_one_key_is_compiled_once(fake: FakeDriver) -> None:
    compiled: list[str] = []
    run = compiler.run_nvrtc  # the instant one, which is put away before `monkeypatch` would put it back

    def counted(source: str, *more: Any) -> Any:
        compiled.append(source)
        return run(source, *more)

    sources = [f"// kernel {i}" for i in range(10)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "run_nvrtc", counted)
        found = hammer(lambda number: [compiler.compile_source(s, "sm_90").code for s in sources[number % 2 :]])
    assert Counter(compiled) == dict.fromkeys(sources, 1)
    assert all(codes[-9:] == found[0][-9:] for codes in found)


def test_equal_calls_are_one_problem_and_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_problems", {})
    monkeypatch.setattr(remembered, "_MAX_PROBLEMS", 5)
    arrays = [np.zeros((1, 8 + i, 2, 16), np.float16) for i in range(9)]

    def work(number: int) -> None:
        for i in range(60):
            q = arrays[(i * (number + 1)) % 9]
            described = describe(
                q, q, q, bias=None, mask=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None,
                options=CallOptions(causal=bool(i & 1)), stream=None,
            )  # fmt: skip
            assert described.problem.seqlen_q == q.shape[1]
            assert described.problem.window_right == (0 if i & 1 else None)

    hammer(work)
    assert len(remembered._problems) <= 5


def test_choices_are_bounded_and_the_first_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_choices", {})
    monkeypatch.setattr(autotune, "_MAX_CHOICES", 3)
    hammer(lambda number: [autotune._keep(f"{number} {i}", "label") for i in range(500)])
    assert len(autotune._choices) < 3 + THREADS

    class ChangedMeanwhile(dict[str, str]):
        changed = True

        def __iter__(self) -> Iterator[str]:
            if self.changed:
                self.changed = False
                raise RuntimeError("dictionary changed size during iteration")
            return super().__iter__()

    monkeypatch.setattr(autotune, "_choices", ChangedMeanwhile(a="1", b="2", c="3"))
    assert autotune._keep("d", "4") == "4"
    assert list(autotune._choices) == ["b", "c", "d"]
    monkeypatch.setattr(autotune, "_MAX_CHOICES", 100)
    for i in range(20):
        assert len(set(hammer(lambda number, i=i: autotune._keep(f"one {i}", str(number))))) == 1


def test_a_message_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: Counter[str] = Counter()

    class Count(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said[record.getMessage()] += 1

    class SlowSet(set[str]):
        """Between the question and the answer, other threads ask too."""

        def __contains__(self, message: object) -> bool:
            known = super().__contains__(message)
            threading.Event().wait(1e-4)
            return known

    monkeypatch.setattr(log, "_said", SlowSet())
    handler = Count()
    log.LOGGER.addHandler(handler)
    try:
        hammer(lambda _: [log.log_once(f"message {i}") for i in range(20)])
    finally:
        log.LOGGER.removeHandler(handler)
    assert said == {f"message {i}": 1 for i in range(20)}


def test_messages_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(log, "_MAX_SAID", 10)
    for i in range(100):
        log.log_once(f"message {i}")
    assert 0 < len(log._said) <= 10


def test_held_memory_is_released_once_and_its_events_are_destroyed(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetime, "_pending", type(lifetime._pending)())
    released: Counter[int] = Counter()

    class Owner:
        def __init__(self, number: int) -> None:
            self.number = number

        def __del__(self) -> None:
            released[self.number] += 1

    def work(number: int) -> None:
        for i in range(50):
            lifetime.hold(0, 7, (Owner(number * 1000 + i),))

    hammer(work)
    lifetime.hold(0, 7, ())
    gc.collect()
    assert set(released.values()) == {1}
    assert len(released) == 50 * THREADS
    assert set(fake.destroyed.values()) == {1}
    assert set(fake.destroyed) == fake.events


@pytest.mark.parametrize("trouble", ["work goes on", "its context is lost"])
def test_memory_of_one_gpu_does_not_wait_for_another(
    trouble: str, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetime, "_pending", type(lifetime._pending)())
    released = []

    class Owner:
        def __del__(self) -> None:
            released.append(1)

    fake.failures["cuEventQuery"] = [600] * 3  # CUDA_ERROR_NOT_READY
    lifetime.hold(0, 7, (object(),))
    lifetime.hold(1, 7, (Owner(),))
    assert not released, "neither is done"
    if trouble == "its context is lost":
        fake.failures["cuEventQuery"] = []
        driver._faults[0] = CudaError("an earlier fault", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    else:
        fake.failures["cuEventQuery"] = [600, 0]
    lifetime.hold(1, 7, ())
    gc.collect()
    assert released == [1]
    with pytest.raises(DeviceFaultError) if driver._faults else contextlib.nullcontext():
        lifetime.hold(0, 7, ())


def test_device_memory_is_freed_once(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_markers", "_scalars"):
        monkeypatch.setattr(device_buffer, table, {})
    gc.collect()
    device_buffer._retired.clear()

    def work(number: int) -> None:
        for _ in range(50):
            DeviceBuffer((16,), "float32", number % 2)

    hammer(work)
    gc.collect()
    for device in (0, 1):
        device_buffer.reclaim(device)
    assert set(fake.freed.values()) == {1}
    assert set(fake.freed) == fake.allocated
    assert not device_buffer._retired


def test_exports_are_freed_by_whoever_is_last() -> None:
    before = len(device_buffer._exports)

    def work(number: int) -> None:
        for i in range(50):
            buffer = device_buffer.HostBuffer((64,), "float32")
            array = np.from_dlpack(buffer)
            array[:] = number * 1000 + i
            del buffer
            assert np.all(array == number * 1000 + i)

    hammer(work)
    gc.collect()
    assert len(device_buffer._exports) == before


def test_headers_are_digested_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "#include <nvrtc_attn/kernel/forward_portable.cuh>"
    try:
        expected = (headers.header_digest(), headers.Snapshot().digest(source))
    except Exception as error:
        pytest.skip(f"no headers: {error}")
    monkeypatch.setattr(headers, "_file_digests", {})
    monkeypatch.setattr(headers, "_own_headers", {})
    monkeypatch.setattr(headers, "_cuda_roots", {})
    monkeypatch.setattr(nvrtc_library, "_nvrtc", None)
    monkeypatch.setattr(nvrtc_library, "_builds", {})
    build = nvrtc_library.nvrtc_build()
    found = hammer(lambda _: (headers.header_digest(), headers.Snapshot().digest(source), nvrtc_library.nvrtc_build()))
    assert set(found) == {(*expected, build)}


def test_views_and_small_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensors, "_handlers", {})
    monkeypatch.setattr(tensors, "_dtype_names", {})
    monkeypatch.setattr(cache, "_caches", {})
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path))
    philox.threshold.cache_clear()

    def work(number: int) -> Any:
        names = []
        for dtype in (np.float16, np.float32, np.bool_, np.int32) * 5:
            names.append(tensors.view(np.zeros((2, 3), dtype), "x").dtype)
        return tuple(names), tuple(philox.threshold(i / 50) for i in range(50)), id(cache.kernel_cache())

    assert len(set(hammer(work))) == 1


def test_the_import_leaves_the_interpreter_lock_off() -> None:
    """Nothing of ours is compiled code; what it imports (NumPy, cuda-bindings) says so of itself."""
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("this Python has an interpreter lock")
    code = (
        "import sys; before = sys._is_gil_enabled(); import numpy; numpy_keeps = sys._is_gil_enabled() == before;"
        "import nvrtc_attn, nvrtc_attn.plans.plan, nvrtc_attn.jit.compile, nvrtc_attn.runtime.buffers;"
        "assert not numpy_keeps or sys._is_gil_enabled() == before, 'importing nvrtc_attn took the lock'"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
