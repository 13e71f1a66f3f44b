"""Our own memory for immutable frameworks: export, ownership, stream order, and what happens at exit."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_driver
import numpy as np
import pytest
from child_environment import python_path

import nvrtc_attn
from nvrtc_attn.front import tensors
from nvrtc_attn.runtime import buffers as device_buffer
from nvrtc_attn.runtime.buffers import DeviceBuffer, HostBuffer


@dataclass
class FakeDriver(fake_driver.FakeDriver):
    """With memory and events. ``log`` is everything in order."""

    pools: bool = True
    memory: dict[int, bytes] = field(default_factory=dict)
    log: list[tuple[Any, ...]] = field(default_factory=list)

    def do_DeviceGetAttribute(self, which: Any, index: int) -> int:
        if which.name.endswith("MEMORY_POOLS_SUPPORTED"):
            return int(self.pools)
        return super().do_DeviceGetAttribute(which, index)

    def do_MemAllocAsync(self, size: int, stream: int) -> int:
        self.log.append(("alloc", size, stream))
        return 0x7000_0000_0000 + 0x10000 * len(self.log)

    def do_MemAlloc(self, size: int) -> int:
        return self.do_MemAllocAsync(size, -1)

    def do_MemFree(self, address: int) -> None:
        assert self.stack, "a context is current"
        self.log.append(("free", address))

    def do_MemcpyHtoD(self, address: int, source: int, size: int) -> None:
        assert self.stack, "a context is current"
        self.memory[address] = ctypes.string_at(source, size)

    def do_MemcpyDtoH(self, target: int, address: int, size: int) -> None:
        assert self.stack, "a context is current"
        ctypes.memmove(target, self.memory[address], size)

    def do_EventCreate(self, _flags: int) -> int:
        return 77

    def do_EventRecord(self, event: int, stream: int) -> None:
        self.log.append(("record", event, stream))

    def do_StreamWaitEvent(self, stream: int, event: int, _flags: int) -> None:
        self.log.append(("wait", stream, event))

    def do_EventDestroy(self, event: int) -> None:
        self.log.append(("destroy", event))

    @property
    def freed(self) -> list[int]:
        return [entry[1] for entry in self.log if entry[0] == "free"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    for table in ("_markers", "_scalars"):
        monkeypatch.setattr(device_buffer, table, {})
    gc.collect()
    device_buffer._retired.clear()
    with fake_driver.installed(FakeDriver()) as driver:
        assert isinstance(driver, FakeDriver)
        yield driver
        gc.collect()
        device_buffer._retired.clear()


@pytest.mark.parametrize("dtype", ["float16", "float32", "uint8", "int32"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (7,), (), (0, 5)])
def test_host_buffer_is_shared_with_numpy(shape: tuple[int, ...], dtype: str) -> None:
    buffer = HostBuffer(shape, dtype)
    array = np.from_dlpack(buffer)
    assert (array.shape, array.dtype.name) == (shape, dtype)
    view = tensors.view(buffer, "out", writable=True)
    assert (view.shape, view.dtype, view.readonly) == (shape, dtype, False)
    tensors.as_numpy(view)[...] = 3
    assert np.all(array == 3)
    assert buffer.ptr % 64 == 0


def test_bfloat16_goes_through_dlpack() -> None:
    view = tensors.view(HostBuffer((3, 2), "bfloat16"), "out", writable=True)
    assert (view.dtype, view.strides) == ("bfloat16", (2, 1))


@pytest.mark.reliability(48)
def test_memory_lives_as_long_as_its_last_consumer() -> None:
    before = len(device_buffer._exports)
    buffer = HostBuffer((1000,), "float32")
    first, second = np.from_dlpack(buffer), np.from_dlpack(buffer)
    first[:] = 5
    del buffer, first
    gc.collect()
    assert len(device_buffer._exports) == before + 1
    HostBuffer((1000,), "float32")  # would take the same place in a pool
    assert np.all(second == 5)
    del second
    gc.collect()
    assert len(device_buffer._exports) == before


def test_capsule_is_consumed_once_and_an_unused_one_frees_its_struct() -> None:
    before = len(device_buffer._exports)
    buffer = HostBuffer((4,), "float32")
    capsule = buffer.__dlpack__(max_version=(1, 0))
    view = tensors.view(capsule, "q")
    with pytest.raises(ValueError, match="consumed multiple times"):
        tensors.view(capsule, "q")
    del view, capsule
    unused = buffer.__dlpack__()
    assert len(device_buffer._exports) == before + 1
    del unused
    assert len(device_buffer._exports) == before


@pytest.mark.parametrize(("asked", "name"), [(None, b'"dltensor"'), ((0, 8), b'"dltensor"'), ((1, 1), b"_versioned")])
def test_version_is_what_the_consumer_knows(asked: tuple[int, int] | None, name: bytes) -> None:
    assert name in repr(HostBuffer((4,), "float32").__dlpack__(max_version=asked)).encode()


def test_refusals() -> None:
    buffer = HostBuffer((4,), "float32")
    for options in ({"copy": True}, {"dl_device": (2, 0)}, {"stream": 1}):
        with pytest.raises(BufferError):
            buffer.__dlpack__(**options)  # type: ignore[arg-type]
    assert buffer.__dlpack__(copy=False, dl_device=(1, 0)) is not None


def test_any_thread_may_drop_the_last_reference() -> None:
    before = len(device_buffer._exports)
    arrays = [np.from_dlpack(HostBuffer((10,), "float32")) for _ in range(100)]
    threads = [threading.Thread(target=lambda part: part.clear(), args=([a],)) for a in arrays]
    arrays.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del threads, thread
    gc.collect()
    assert len(device_buffer._exports) == before


@pytest.mark.parametrize("consumer", ["numpy", "jax"])
def test_exit_with_living_exports(consumer: str, repository: Path) -> None:
    """The consumer, here in C++ statics and in a module that dies last, may call the deleter after the interpreter."""
    if consumer == "jax":
        pytest.importorskip("jax", reason="jax is not installed")
    code = f"""
        import {consumer} as framework, numpy as np, sys, threading
        from nvrtc_attn.runtime.buffers import HostBuffer
        from_dlpack = framework.from_dlpack if framework is np else framework.dlpack.from_dlpack
        framework.kept = [from_dlpack(HostBuffer((100,), "float32")) for _ in range(50)]
        sys.kept = [HostBuffer((5,), "float32").__dlpack__() for _ in range(50)]
        cycle = [HostBuffer((5,), "float32").__dlpack__()]
        cycle.append(cycle)
        print("done")
    """
    environment = {**os.environ, "PYTHONPATH": python_path(repository), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_at_exit_the_deleter_is_plain_c() -> None:
    array = np.from_dlpack(HostBuffer((4,), "float32"))
    address, (name, _) = list(device_buffer._exports.items())[-1]
    struct = device_buffer._STRUCTS[name]
    before = struct.from_address(address).deleter
    device_buffer._release_at_exit()
    after = struct.from_address(address).deleter
    struct.from_address(address).deleter = before  # this process goes on
    assert array.shape == (4,)
    assert after not in (before, 0, None)


@pytest.mark.parametrize("pools", [True, False])
def test_device_memory_is_allocated_in_stream_order(fake: FakeDriver, pools: bool) -> None:
    fake.pools = pools
    buffer = DeviceBuffer((2, 3), "float32", 0, 0x55)
    assert fake.log == [("alloc", 24, 0x55 if pools else -1)]
    assert buffer.__dlpack_device__() == (2, 0)
    view = tensors.view(buffer, "out", stream=0x55, writable=True)
    assert (view.ptr, view.device, view.strides) == (buffer.ptr, tensors.Device("cuda", 0), (3, 1))
    assert len(fake.log) == 1  # the same stream: nothing to order
    assert fake.stack == []


@pytest.mark.reliability(46, 47)
@pytest.mark.parametrize(
    ("own", "asked", "waits"),
    [(0x55, 0x66, 0x66), (0x55, None, 1), (0x55, 2, 2), (0x55, -1, None), (0x55, 0x55, None), (0, 1, None), (0, 7, 7)],
)
def test_consumer_waits_for_the_writer(fake: FakeDriver, own: int, asked: int | None, waits: int | None) -> None:
    buffer = DeviceBuffer((8,), "float16", 0, own)
    buffer.__dlpack__(stream=asked)
    expected = [] if waits is None else [("record", 77, own), ("wait", waits, 77), ("destroy", 77)]
    assert fake.log[1:] == expected


def test_empty_buffer_has_an_address(fake: FakeDriver) -> None:
    assert DeviceBuffer((0, 8), "float16", 0).ptr
    assert fake.log == [("alloc", 1, 0)]


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "bool"])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_an_array_goes_to_the_device_and_back(fake: FakeDriver, shape: tuple[int, ...], dtype: str) -> None:
    array = np.arange(6).astype(dtype)[: int(np.prod(shape))].reshape(shape)
    buffer = nvrtc_attn.to_device(array)
    assert (buffer.shape, buffer.dtype, buffer.__dlpack_device__()) == (shape, dtype, (2, 0))
    back = buffer.numpy()
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    assert fake.stack == []


def test_what_goes_to_the_device_is_row_major(fake: FakeDriver) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    np.testing.assert_array_equal(nvrtc_attn.to_device(array).numpy(), array)
    fake.gpus.append(fake_driver.FakeGpu())
    assert nvrtc_attn.to_device(array, 1).__dlpack_device__() == (2, 1)


def test_bfloat16_comes_back_with_ml_dtypes(fake: FakeDriver) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes gives NumPy bfloat16")
    array = np.arange(8, dtype=np.float32).astype(ml_dtypes.bfloat16)
    back = nvrtc_attn.to_device(array).numpy()
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


def test_a_dtype_that_no_call_accepts_stays_on_the_host(fake: FakeDriver) -> None:
    with pytest.raises(TypeError, match="array: dtype complex64, accepted are float16, bfloat16"):
        nvrtc_attn.to_device(np.zeros(3, np.complex64))
    assert fake.log == []


def test_dropping_frees_at_the_next_allocation_only(fake: FakeDriver) -> None:
    """The last reference may go on any thread, at any time: no driver call is made there."""
    buffer = DeviceBuffer((8,), "float16", 0)
    address = buffer.ptr
    del buffer
    assert fake.freed == []
    DeviceBuffer((8,), "float16", 0)
    assert fake.freed == [address]


def test_other_devices_keep_their_memory(fake: FakeDriver) -> None:
    fake.gpus.append(fake_driver.FakeGpu())
    address = DeviceBuffer((8,), "float16", 1).ptr
    device_buffer.reclaim(0)
    assert fake.freed == []
    device_buffer.reclaim(1)
    assert fake.freed == [address]


class Scalar:
    """A JAX array as far as `reclaim` looks: adding queues work, which is done when the test says so."""

    def __init__(self) -> None:
        self.ready = False
        self.queued: list[Scalar] = []

    def __add__(self, _other: int) -> Scalar:
        self.queued.append(Scalar())
        return self.queued[-1]

    def is_ready(self) -> bool:
        return self.ready

    def devices(self) -> list[str]:
        return ["gpu"]


@pytest.mark.reliability(48)
def test_memory_given_to_jax_is_freed_behind_the_work_of_jax(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    scalar, arrays = Scalar(), []

    def from_dlpack(buffer: DeviceBuffer) -> Any:
        arrays.append(tensors.view(buffer, "x"))
        return scalar

    jax = types.SimpleNamespace(
        dlpack=types.SimpleNamespace(from_dlpack=from_dlpack),
        device_put=lambda _value, _device: scalar,
        ensure_compile_time_eval=lambda: threading.Lock(),
        Array=Scalar,
    )
    monkeypatch.setitem(sys.modules, "jax", jax)  # type: ignore[arg-type]
    buffer = DeviceBuffer((8,), "float16", 0)
    address = buffer.ptr
    assert device_buffer.to_jax(buffer, scalar) is scalar
    del buffer
    device_buffer.reclaim(0)
    assert not scalar.queued  # the array lives
    arrays.clear()
    device_buffer.reclaim(0)
    assert len(scalar.queued) == 1
    device_buffer.reclaim(0)
    assert len(scalar.queued) == 1
    assert fake.freed == []
    scalar.queued[0].ready = True
    device_buffer.reclaim(0)
    assert fake.freed == [address]
    assert not device_buffer._retired
