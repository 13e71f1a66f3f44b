"""Loading and launching, on a driver written in Python: contexts, recovery, faults, forks, captures."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver, FakeGpu, installed, instant_compiler

from nvrtc_attn.base.errors import CompileError, CudaError, DeviceFaultError, NotReadyError, UnsupportedError
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit import nvrtc_library
from nvrtc_attn.jit.cache import kernel_cache
from nvrtc_attn.jit.compile import CompiledKernel, compile_kernel, compile_source
from nvrtc_attn.jit.config import ForwardConfig
from nvrtc_attn.jit.params import ForwardParams
from nvrtc_attn.plans import autotune, plan
from nvrtc_attn.runtime import device, driver
from nvrtc_attn.runtime.kernel import MAX_GRID, Kernel, ParamsBuffer, check_nvrtc, launch, load_kernel

# Some tests fork, and the test runner may have threads of its own.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

CONFIG = ForwardConfig(
    kernel="forward_portable", arch="sm_90", dtype="float16", head_dim=64, head_dim_v=64, block_m=128, block_n=64,
    num_warps=4,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _instant_compiler(tmp_path: Path) -> Iterator[None]:
    with instant_compiler(tmp_path / "kernels"):
        yield


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    with installed(FakeDriver([FakeGpu((9, 0)), FakeGpu((8, 0), 166912)])) as driver_in_python:
        yield driver_in_python


def load(index: int = 0, smem_bytes: int = 65536) -> Kernel:
    return load_kernel(compile_kernel(CONFIG), index, smem_bytes=smem_bytes)


def go(kernel: Kernel, **changes: Any) -> None:
    arguments = {"grid": 10, "block": 128, "smem_bytes": 65536, "params": ForwardParams(), "stream": 0, **changes}
    grid, block, smem_bytes, params, stream = arguments.values()
    with driver.device_context(kernel.device):
        launch(kernel, grid, block, smem_bytes, ParamsBuffer(bytes(params)), stream)


def test_a_kernel_is_loaded_once_and_ready_for_a_capture(fake: FakeDriver) -> None:
    kernel = load()
    assert fake.images == [(0, b"sm_90 image 0")]
    assert fake.attributes_set == [(1, 65536)]
    assert fake.calls.index("cuFuncLoad") > fake.calls.index("cuKernelGetFunction"), (
        "loaded now, not at the first launch"
    )
    assert (kernel.smem_bytes, kernel.device, kernel.name) == (65536, 0, "forward_portable")
    fake.calls.clear()
    assert load() is kernel
    assert fake.calls == []


def test_a_launch_passes_one_struct_by_value(fake: FakeDriver) -> None:
    params = ForwardParams(q=0x1234)
    kernel = load()
    go(kernel, grid=MAX_GRID, params=params, stream=0x77)
    ((context, function, *numbers, stream, address, extra),) = fake.launches
    assert (context, function, numbers) == (fake.context_of(0), 1, [MAX_GRID, 1, 1, 128, 1, 1, 65536])
    assert (stream, extra) == (0x77, 0)
    assert isinstance(address, int)


@pytest.mark.parametrize("grid", [0, -1, 2**31])
def test_grids_that_the_driver_cannot_run_are_refused(grid: int, fake: FakeDriver) -> None:
    kernel = load()
    with pytest.raises(ValueError, match=f"grid={grid} .*2\\*\\*31 - 1"):
        go(kernel, grid=grid)
    assert fake.launches == []


@pytest.mark.reliability(92)
def test_two_architectures_in_one_process(fake: FakeDriver) -> None:
    kernels = []
    for index in (0, 1):
        config = dataclasses.replace(CONFIG, arch=device.properties(index).arch)
        kernels.append(load_kernel(compile_kernel(config), index, smem_bytes=65536))
    assert [(index, code[:5]) for index, code in fake.images] == [(0, b"sm_90"), (1, b"sm_80")]
    assert kernels[0].key != kernels[1].key
    assert len(kernel_cache().entries()) == 2
    for _ in range(3):
        for kernel in kernels:
            go(kernel)
    assert [call[:2] for call in fake.launches] == [(fake.context_of(0), 1), (fake.context_of(1), 2)] * 3


@pytest.mark.reliability(92)
def test_one_key_on_two_devices_is_loaded_on_each(fake: FakeDriver) -> None:
    assert [load(index).device for index in (0, 1)] == [0, 1]
    assert [index for index, _ in fake.images] == [0, 1]


def test_threads_load_once(fake: FakeDriver) -> None:
    compiled = compile_kernel(CONFIG)
    barrier = threading.Barrier(16)
    kernels = []

    def run() -> None:
        barrier.wait()
        kernels.append(load_kernel(compiled, 0, smem_bytes=1000))

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, kernels))) == 1
    assert len(kernels) == 16
    assert len(fake.images) == 1


def test_shared_memory_is_set_once_and_only_ever_raised(fake: FakeDriver) -> None:
    assert load(smem_bytes=1000) is load(smem_bytes=500)
    larger = load(smem_bytes=2000)
    assert larger.smem_bytes == 2000
    assert [value for _, value in fake.attributes_set] == [1000, 2000]


@pytest.mark.reliability(69)
def test_shared_memory_above_the_limit_names_both_numbers() -> None:
    with installed(FakeDriver([FakeGpu((8, 6), 101376)], static_smem=512)) as fake:
        with pytest.raises(UnsupportedError) as caught:
            load(smem_bytes=101376)
        assert "101888" in str(caught.value)
        assert "101376" in str(caught.value)
        assert fake.attributes_set == []


# -- contexts ------------------------------------------------------------------------------------------------------


def test_the_current_context_is_left_as_it_was(fake: FakeDriver) -> None:
    kernel = load(1)
    assert fake.stack == [], "a fresh thread has none, before and after"
    go(kernel)
    assert fake.stack == []
    for current in (fake.context_of(0), 0x9999):
        fake.stack[:] = [current]
        go(kernel)
        assert fake.stack == [current]
        fake.failures["cuLaunchKernel"] = [1]
        with pytest.raises(CudaError):
            go(kernel)
        assert fake.stack == [current]
    assert {call[0] for call in fake.launches} == {fake.context_of(1)}


def test_a_launch_in_the_right_context_makes_two_driver_calls(fake: FakeDriver) -> None:
    kernel = load()
    fake.stack[:] = [fake.context_of(0)]
    fake.calls.clear()
    go(kernel)
    assert fake.calls == ["cuCtxGetCurrent", "cuLaunchKernel"]


def test_contexts_are_retained_once_and_never_reset(fake: FakeDriver) -> None:
    for _ in range(3):
        go(load(0))
        go(load(1))
    assert fake.calls.count("cuDevicePrimaryCtxRetain") == 2
    assert not any("Reset" in name or "Create" in name or "Release" in name for name in fake.calls)


# -- images that the driver refuses ----------------------------------------------------------------------------------


@pytest.fixture
def from_disk() -> CompiledKernel:
    compile_kernel(CONFIG)
    compiler._memory.clear()
    compiled = compile_kernel(CONFIG)
    assert compiled.cached
    return compiled


@pytest.mark.reliability(78)
@pytest.mark.parametrize("code", [200, 209, 218])
def test_a_cached_image_that_the_driver_refuses_is_rebuilt_once(
    code: int, from_disk: CompiledKernel, fake: FakeDriver
) -> None:
    fake.failures["cuLibraryLoadData"] = [code]
    kernel = load_kernel(from_disk, 0, smem_bytes=0)
    assert fake.images == [(0, b"sm_90 image 1")]
    assert kernel.key == from_disk.key
    assert len(kernel_cache().entries()) == 1
    compiler._memory.clear()
    assert compile_kernel(CONFIG).code == b"sm_90 image 1", "the entry was replaced"


@pytest.mark.reliability(78)
def test_an_image_that_is_refused_twice_is_an_error(from_disk: CompiledKernel, fake: FakeDriver) -> None:
    fake.failures["cuLibraryLoadData"] = [200, 200]
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_IMAGE") as caught:
        load_kernel(from_disk, 0, smem_bytes=0)
    assert caught.value.code == 200
    assert fake.images == []


def test_a_fresh_image_that_is_refused_is_an_error_at_once(fake: FakeDriver) -> None:
    fake.failures["cuLibraryLoadData"] = [209]
    compiled = compile_kernel(CONFIG)
    with pytest.raises(CudaError):
        load_kernel(compiled, 0, smem_bytes=0)
    assert fake.calls.count("cuLibraryLoadData") == 1


@pytest.mark.parametrize("cached", [False, True])
def test_a_refusal_says_when_nvrtc_is_newer_than_the_driver(
    cached: bool, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    compiled = request.getfixturevalue("from_disk") if cached else compile_kernel(CONFIG)
    monkeypatch.setattr(nvrtc_library, "_nvrtc", nvrtc_library.Nvrtc((13, 5), nvrtc_library.nvrtc().path))
    for version, advice in ((13000, 'pip install "nvidia-cuda-nvrtc==13.0.*"'), (13050, None)):
        fake.version = version
        fake.failures["cuLibraryLoadData"] = [200, 200]
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_IMAGE") as caught:
            load_kernel(compiled, 0, smem_bytes=0)
        assert caught.value.code == 200
        assert ("is newer than the driver" in str(caught.value)) == (advice is not None)
        assert advice is None or advice in str(caught.value)


@pytest.mark.reliability(66)
@pytest.mark.parametrize(
    ("nvrtc", "version", "fits"), [((13, 0), 12040, False), ((13, 5), 13000, True), ((12, 9), 13000, True)]
)
def test_a_driver_of_an_earlier_major_version_than_nvrtc_is_refused(
    nvrtc: tuple[int, int], version: int, fits: bool, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc_library, "_nvrtc", nvrtc_library.Nvrtc(nvrtc, nvrtc_library.nvrtc().path))
    fake.version = version
    if fits:
        check_nvrtc()
        return
    with pytest.raises(CompileError) as caught:
        check_nvrtc()
    for part in ("13.0", "12.4", 'pip install "nvrtc-attn[cu12]"', "doctor"):
        assert part in str(caught.value)


@pytest.mark.parametrize("tune", [False, True])
@pytest.mark.reliability(66)
def test_a_plan_refuses_such_a_driver_before_anything_is_compiled(
    tune: bool, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = dense_layout((4, 1024, 16, 64), "bfloat16")
    problem = AttentionProblem(
        dtype="bfloat16", batch=4, seqlen_q=1024, seqlen_k=1024, num_heads=16, num_heads_kv=16, head_dim=64,
        head_dim_v=64, q=rows, k=rows, v=rows, out=rows,
    )  # fmt: skip
    monkeypatch.setattr(nvrtc_library, "_nvrtc", nvrtc_library.Nvrtc((13, 0), nvrtc_library.nvrtc().path))
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_kernels", {})
    fake.version = 12040
    for module in (compiler, autotune):
        monkeypatch.setattr(module, "request_kernels", lambda _: pytest.fail("compiles in the background"))
    monkeypatch.setattr(compiler, "run_nvrtc", lambda *_: pytest.fail("compiles"))
    with pytest.raises(CompileError, match=r"nvrtc-attn\[cu12\]"):
        plan.forward_plan(problem, 0, 0, tune=tune)


def test_running_out_of_memory_does_not_cost_the_entry(from_disk: CompiledKernel, fake: FakeDriver) -> None:
    fake.failures["cuLibraryLoadData"] = [2]
    with pytest.raises(CudaError) as caught:
        load_kernel(from_disk, 0, smem_bytes=0)
    assert caught.value.code == 2
    assert len(kernel_cache().entries()) == 1
    assert load_kernel(from_disk, 0, smem_bytes=0).function == 1, "the next call works"


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.reliability(64, 65)
@pytest.mark.parametrize("code", [700, 702, 714, 715, 716, 717, 718, 719])
def test_a_fault_is_kept_and_later_calls_fail_with_it(code: int, fake: FakeDriver) -> None:
    kernel, other = load(0), load(1)
    fake.failures["cuLaunchKernel"] = [code]
    with pytest.raises(DeviceFaultError, match="Raised by work that ran earlier") as first:
        go(kernel)
    assert first.value.code == code
    fake.calls.clear()
    for call in (lambda: go(kernel), lambda: load_kernel(compile_source("// x", "sm_90"), 0, smem_bytes=0)):
        with pytest.raises(DeviceFaultError) as later:
            call()
        assert later.value.code == code
        assert first.value.name in str(later.value)
        assert "estart the process" in str(later.value)
    assert "cuLaunchKernel" not in fake.calls, "fails before the driver is asked"
    go(other)  # the other device is not affected


@pytest.mark.parametrize("code", [1, 2, 701, 720])
def test_other_errors_are_not_remembered(code: int, fake: FakeDriver) -> None:
    kernel = load()
    fake.failures["cuLaunchKernel"] = [code]
    with pytest.raises(CudaError) as caught:
        go(kernel)
    assert not isinstance(caught.value, DeviceFaultError)
    for part in ("forward_portable", "grid 10", f"({code})", f"text of {code}"):
        assert part in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).code == code
    go(kernel)
    assert len(fake.launches) == 1


def test_an_error_code_of_a_newer_driver_is_an_error(fake: FakeDriver) -> None:
    error = driver.failure("cuSomething", 12345, 0)
    assert (error.code, error.name) == (12345, "CUDA_ERROR_12345")


# -- captures and forks ----------------------------------------------------------------------------------------------


@pytest.mark.reliability(61)
def test_a_capture_without_warm_up_is_refused_before_anything_is_touched(fake: FakeDriver) -> None:
    fake.capturing.add(0x77)
    assert not driver.is_capturing(0x66)
    driver.refuse_capture(0x66, "the forward kernel")
    fake.calls.clear()
    with pytest.raises(NotReadyError, match="call warmup first") as caught:
        driver.refuse_capture(0x77, "the forward kernel")
    assert isinstance(caught.value, CudaError)
    assert "the forward kernel" in str(caught.value)
    assert set(fake.calls) == {"cuStreamIsCapturing"}, "a query that a capture allows"


@pytest.mark.reliability(61)
def test_the_legacy_stream_counts_as_captured_beside_a_capture(fake: FakeDriver) -> None:
    fake.failures["cuStreamIsCapturing"] = [906]
    assert driver.is_capturing(0)


@pytest.mark.reliability(62)
@pytest.mark.parametrize("fault", [0, 2])
def test_a_load_does_not_disturb_what_another_thread_captures(fault: int, fake: FakeDriver) -> None:
    """In the global mode a capture anywhere refuses a load everywhere, unless the loading thread is relaxed."""
    modes: list[tuple[str, list[str]]] = []
    do_load = FakeDriver.do_LibraryLoadData

    def watch(self: FakeDriver, *arguments: Any) -> int:
        modes.append(("load", list(self.modes)))
        return do_load(self, *arguments)

    fake.failures["cuLibraryLoadData"] = [fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeDriver, "do_LibraryLoadData", watch)
        if fault:
            with pytest.raises(CudaError):
                load()
        else:
            load()
    assert fake.modes == ["CU_STREAM_CAPTURE_MODE_RELAXED", "the thread's own"], "and the mode is given back"
    assert modes == ([] if fault else [("load", ["CU_STREAM_CAPTURE_MODE_RELAXED"])])


def in_child(call: Any) -> str:
    """What ``call`` returns or raises in a fork of this process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send(str(call()))
        except Exception as error:
            sender.send(f"{type(error).__name__}: {error}")

    child = context.Process(target=run)
    child.start()
    assert receiver.poll(30), "the child hangs"
    text: str = receiver.recv()
    child.join(30)
    assert child.exitcode == 0
    return text


@pytest.mark.reliability(74)
def test_use_then_fork_is_refused_in_the_child_without_a_driver_call(fake: FakeDriver) -> None:
    kernel = load()

    def driver_calls(call: Any) -> str:
        fake.calls.clear()
        try:
            call()
        except CudaError as error:
            return f"{len(fake.calls)} {error}"
        return "no error"

    for call in (lambda: go(kernel), load, lambda: device.properties(1), lambda: driver.is_capturing(0)):
        text = in_child(lambda call=call: driver_calls(call))
        assert text.startswith("0 this process was forked after"), text
        assert "spawn" in text
    go(kernel)  # the parent goes on


@pytest.mark.reliability(74)
def test_fork_then_use_works_while_the_parent_holds_every_lock() -> None:
    def use() -> int:
        with installed(FakeDriver()) as fake:
            go(load())
            return len(fake.launches)

    with driver._lock, compiler._lock, device._lock:
        assert in_child(use) == "1"


@pytest.mark.reliability(74)
def test_a_child_may_compile(fake: FakeDriver) -> None:
    load()
    assert in_child(lambda: compile_source("// in a child", "sm_80").code).startswith("b'sm_80 image")


def test_the_parameter_bytes_stay_in_place_during_the_call(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    params = ForwardParams(q=0xABCD, scale=0.5)
    kernel = load()
    copies = []

    def copy(_self: FakeDriver, *arguments: Any) -> None:
        slot = ctypes.c_void_p.from_address(arguments[9]).value
        assert slot is not None
        copies.append(ForwardParams.from_buffer_copy(ctypes.string_at(slot, ctypes.sizeof(ForwardParams))))

    monkeypatch.setattr(FakeDriver, "do_LaunchKernel", copy)
    go(kernel, params=params)
    assert [(c.q, c.scale) for c in copies] == [(0xABCD, 0.5)]


@pytest.mark.parametrize("used", [False, True])
def test_the_version_of_the_driver_is_known_without_a_gpu(
    used: bool, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor` shows it where ``cuInit`` fails because no device is visible."""
    if not used:
        import cuda.bindings

        monkeypatch.setattr(driver, "_api", None)
        monkeypatch.setattr(cuda.bindings, "driver", fake)
        fake.failures["cuInit"] = [100]
    fake.version = 12090
    assert driver.driver_version() == (12, 9)
    assert fake.calls == ["cuDriverGetVersion"]


def test_memory_is_read_after_the_work_of_its_stream(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ctypes.create_string_buffer(b"twelve bytes", 12)

    def synchronize(_self: FakeDriver, stream: int) -> None:
        assert stream == 0x77
        source.value = b"TWELVE"

    monkeypatch.setattr(FakeDriver, "do_StreamSynchronize", synchronize, raising=False)
    monkeypatch.setattr(FakeDriver, "do_MemcpyDtoH", lambda _self, *a: ctypes.memmove(*a) and None, raising=False)
    assert driver.read_memory(ctypes.addressof(source), 6, 1, 0x77) == b"TWELVE"
    assert fake.stack == []
    fake.calls.clear()
    assert driver.read_memory(0, 0, 1, 0x77) == b""
    assert fake.calls == []


def test_managed_memory_belongs_to_the_gpu_that_the_driver_says(fake: FakeDriver) -> None:
    assert driver.device_of((1 << 40) + 16) == 1
    fake.failures["cuPointerGetAttribute"] = [1]
    with pytest.raises(CudaError, match="cuPointerGetAttribute"):
        driver.device_of(16)
