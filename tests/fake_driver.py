"""A CUDA driver in Python: what `nvrtc_attn.runtime` calls, with faults on request."""

from __future__ import annotations

import ctypes
import importlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.runtime import device, driver
from nvrtc_attn.runtime import kernel as module

real: Any = importlib.import_module("cuda.bindings.driver")


@dataclass
class FakeGpu:
    compute_capability: tuple[int, int] = (9, 0)
    smem_per_block_optin: int = 232448
    num_sms: int = 132
    name: str = "Fake GPU"
    clusters: int = 16
    """That have room at once."""


@dataclass
class FakeDriver:
    """Stands in for ``cuda.bindings.driver``; the enumerations and handle types are the real ones."""

    gpus: list[FakeGpu] = field(default_factory=lambda: [FakeGpu()])
    version: int = 13000
    calls: list[str] = field(default_factory=list)
    failures: dict[str, list[int]] = field(default_factory=dict)
    """Status codes of the next calls, by function; 0 lets one call pass."""
    capturing: set[int] = field(default_factory=set)
    images: list[tuple[int, bytes]] = field(default_factory=list)
    """(device, code) of every library that was loaded."""
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    attributes_set: list[tuple[int, int]] = field(default_factory=list)
    memsets: list[tuple[int, ...]] = field(default_factory=list)
    tensor_maps: list[tuple[Any, ...]] = field(default_factory=list)
    """Arguments of every tensor map that was encoded; here a map is its address and then a number."""
    static_smem: int = 0
    modes: list[str] = field(default_factory=list)
    """Capture modes that threads were switched to, and back."""
    local: threading.local = field(default_factory=threading.local)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and not name.startswith("cuuint"):
            return self._function(name)
        return getattr(real, name)

    def _function(self, name: str) -> Any:
        implementation = getattr(type(self), "do_" + name[2:])

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            queue = self.failures.get(name)
            code = queue.pop(0) if queue else 0
            if code:
                return (real.CUresult(code), None)
            answer = implementation(self, *arguments)
            status = (real.CUresult.CUDA_SUCCESS,)
            return status if answer is None else (*status, answer)

        return call

    @property
    def stack(self) -> list[int]:
        if not hasattr(self.local, "stack"):
            self.local.stack = []
        found: list[int] = self.local.stack
        return found

    @staticmethod
    def context_of(index: int) -> int:
        return 0x1000 + index

    def do_DriverGetVersion(self) -> int:
        return self.version

    def do_DeviceGetCount(self) -> int:
        return len(self.gpus)

    def do_DeviceGet(self, index: int) -> int:
        return index

    def do_DeviceGetName(self, _size: int, index: int) -> bytes:
        return self.gpus[index].name.encode() + b"\0\0"

    def do_DeviceTotalMem(self, _index: int) -> int:
        return 1 << 36

    def do_DeviceGetAttribute(self, which: Any, index: int) -> int:
        gpu = self.gpus[index]
        values = {
            "COMPUTE_CAPABILITY_MAJOR": gpu.compute_capability[0],
            "COMPUTE_CAPABILITY_MINOR": gpu.compute_capability[1],
            "MULTIPROCESSOR_COUNT": gpu.num_sms,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": gpu.smem_per_block_optin,
        }
        return values.get(which.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 1024)

    def do_DevicePrimaryCtxRetain(self, index: int) -> int:
        return self.context_of(index)

    def do_CtxGetCurrent(self) -> int:
        return self.stack[-1] if self.stack else 0

    def do_CtxPushCurrent(self, context: Any) -> None:
        self.stack.append(int(context))

    def do_CtxPopCurrent(self) -> int:
        return self.stack.pop()

    def do_CtxSetCurrent(self, context: Any) -> None:
        self.stack[:] = [int(context)]

    def do_LibraryLoadData(self, code: bytes, *_options: Any) -> int:
        self.images.append((self.stack[-1] - 0x1000, code))
        return len(self.images)

    def do_LibraryGetKernel(self, library: int, name: bytes) -> int:
        assert name == b"attention_entry"
        return library

    def do_KernelGetFunction(self, kernel: int) -> int:
        return kernel

    def do_FuncGetAttribute(self, which: Any, _function: int) -> int:
        return self.static_smem if which.name == "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES" else 0

    def do_FuncSetAttribute(self, function: int, which: Any, value: int) -> None:
        assert which.name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        self.attributes_set.append((function, value))

    def do_OccupancyMaxActiveClusters(self, _function: int, config: Any) -> int:
        assert config.numAttrs == 0
        assert config.gridDimX in (2, 4, 8, 16)
        return self.gpus[self.stack[-1] - 0x1000].clusters

    def do_FuncLoad(self, _function: int) -> None:
        return None

    def do_LaunchKernel(self, *arguments: Any) -> None:
        *what, stream, params, extra = arguments
        assert all(n > 0 for n in what[1:7]), "CUDA has no empty grids and blocks"
        self.launches.append((self.stack[-1], *what, stream or 0, params, extra))

    def do_LaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> None:
        """A launch that overlaps the one ahead: in this driver it begins behind it."""
        (attribute,) = config.attrs
        assert attribute.id.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        stream = int(config.hStream) or None
        self.do_LaunchKernel(function, *grid, *block, config.sharedMemBytes, stream, params, extra)

    def do_TensorMapEncodeTiled(self, *arguments: Any) -> Any:
        assert all(int(n) > 0 for n in arguments[3]), "CUDA has no tensor maps with an empty dim"
        self.tensor_maps.append(arguments)
        encoded = real.CUtensorMap()
        ctypes.memmove(int(encoded.getPtr()), struct.pack("<2Q", arguments[2], len(self.tensor_maps)), 16)
        return encoded

    def do_TensorMapReplaceAddress(self, encoded: Any, address: int) -> None:
        ctypes.memmove(int(encoded.getPtr()), struct.pack("<Q", address), 8)

    def do_StreamIsCapturing(self, stream: Any) -> int:
        return int(int(stream) in self.capturing)

    def do_ThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        self.modes.append(getattr(mode, "name", mode))
        before = getattr(self.local, "mode", "the thread's own")
        self.local.mode = mode
        return before

    def do_PointerGetAttribute(self, _which: Any, address: int) -> int:
        return address >> 40

    def do_MemsetD8Async(self, *arguments: int) -> None:
        self.memsets.append((self.stack[-1], *arguments))

    def do_MemsetD32Async(self, *arguments: int) -> None:
        assert arguments[2] > 0
        self.memsets.append((self.stack[-1], *arguments))

    def do_GetErrorName(self, code: Any) -> bytes:
        return code.name.encode()

    def do_GetErrorString(self, code: Any) -> bytes:
        return f"text of {int(code)}".encode()


@contextmanager
def installed(fake: FakeDriver) -> Iterator[FakeDriver]:
    """Make ``fake`` the driver of the package, with empty tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_api", fake)
        patch.setattr(driver, "_contexts", {})
        patch.setattr(driver, "_faults", {})
        patch.setattr(device, "_properties", {})
        patch.setattr(device, "_without_clusters", set())
        patch.setattr(module, "_kernels", {})
        patch.setattr(module, "_locks", {})
        yield fake


@contextmanager
def instant_compiler(cache: Path) -> Iterator[None]:
    """A compiler that takes no time and numbers its results, and an empty cache, ``cache``."""
    counter = iter(range(10**6))

    def run(_source: str, arch: str, *_: Any) -> tuple[bytes, str]:
        return f"{arch} image {next(counter)}".encode(), ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVRTC_ATTN_CACHE_DIR", str(cache))
        patch.delenv("NVRTC_ATTN_ASSERT_CACHED", raising=False)
        patch.setattr(compiler, "run_nvrtc", run)
        compiler._memory.clear()
        yield
        compiler._memory.clear()


@contextmanager
def launching(monkeypatch: pytest.MonkeyPatch, cache: Path, gpu: FakeGpu | None = None) -> Iterator[FakeDriver]:
    """``gpu``, or an H100, on which calls of the public functions launch: no plan is known, nothing is kept."""
    monkeypatch.setattr("nvrtc_attn.plans.plan._plans", {})
    monkeypatch.setattr("nvrtc_attn.plans.plan._kernels", {})
    monkeypatch.setattr("nvrtc_attn.plans.run.hold", lambda *_: None)
    with instant_compiler(cache), installed(FakeDriver([gpu or FakeGpu()])) as driver_in_python:
        yield driver_in_python
