"""A GPU in this process: the driver of tests/fake_driver.py, whose launches are executed by `machine.cpp`.

Kernels are what NVRTC makes of them up to PTX; registers, shared memory and tensor maps are as the hardware's. What it
shows: wrong indices, masks, layouts, missing waits and barriers, deadlocks, memory that is read before it is written,
blocks that end without having waited for the launch that theirs overlaps.
What it cannot show: what ptxas makes of the PTX, races between two generic accesses, fences, speed.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib
import os
import re
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_driver
import host_cuda
import numpy as np
import pytest
from dlpack_producer import Producer
from fake_driver import FakeDriver, FakeGpu

from nvrtc_attn.base import env
from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit import headers, nvrtc_call, nvrtc_library, nvrtc_worker

from . import ptx

real: Any = importlib.import_module("cuda.bindings.driver")
HERE = Path(__file__).parent
PARTS = ("machine.hpp", "arithmetic.hpp", "memory.hpp", "tensor.hpp", "machine.cpp")
FLAGS = ("-O3", "-ffp-contract=off", "-fPIC", "-shared")
"""Products and sums are rounded one by one, as the PTX says."""
MOST_INSTRUCTIONS = 400_000_000
"""Of warps, in a launch: more is taken for a loop without an end. About 10 seconds."""
_SWIZZLE_BITS = {"NONE": 0, "32B": 1, "64B": 2, "128B": 3}
_ELEMENT_BYTES = {"UINT8": 1, "FLOAT16": 2, "BFLOAT16": 2, "FLOAT32": 4}


class SimulationError(Exception):
    """A kernel did what it must not."""


@functools.cache
def _library(path: Path) -> Any:
    machine = ctypes.CDLL(str(path))
    machine.make_program.restype = ctypes.c_void_p
    machine.free_program.argtypes = [ctypes.c_void_p]
    machine.launch.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
        ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int,
    ]  # fmt: skip
    machine.add_region.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    machine.remove_region.argtypes = [ctypes.c_uint64]
    machine.add_map.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
    return machine


def build_machine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The machine's library; skips where there is no C++ compiler."""
    source = "\n".join((HERE / name).read_text() for name in PARTS)
    flags = (*FLAGS, "-march=x86-64-v3") if "avx2" in _cpu() else FLAGS
    return _library(host_cuda.build(source, tmp_path_factory, *flags))


def _cpu() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------------------ compiling


class _PtxWorker:
    """A process that makes PTX, for as long as this one lives: NVRTC is loaded once, and headers are read once.

    Concurrency: one request at a time; who else compiles waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, fields: list[bytes]) -> tuple[int, bytes]:
        """(status, PTX or log)."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                precompiled = env.pch_dir()
                command = [
                    sys.executable, "-I", "-S", str(HERE / "ptx_worker.py"), str(Path(nvrtc_worker.__file__).parent),
                    "" if precompiled is None else str(precompiled),
                ]  # fmt: skip
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
                atexit.register(self._end, self._process)
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                nvrtc_worker.send(self._process.stdin.fileno(), fields)
                status, text = nvrtc_worker.receive(self._process.stdout.fileno())
            except (EOFError, BrokenPipeError) as error:
                raise SimulationError(f"the compiler's process ended: exit code {self._process.wait()}") from error
            return int(status), text

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """It removes its precompiled headers when its input ends."""
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)


_ptx_worker = _PtxWorker()


def compile_to_ptx(source: str, arch: str, options: tuple[str, ...], *_: Any) -> tuple[bytes, str]:
    """What the compiler of the package gives, but PTX: about 1.5 seconds, where ptxas takes three times as long.

    With ``NVRTC_ATTN_PCH_DIR`` it takes half of that from the third kernel with the same headers on.
    """
    virtual = arch.replace("sm_", "compute_")
    kept = [option for option in options if not option.startswith("--gpu-architecture")]
    roots = [f"--include-path={os.path.abspath(root)}" for root in headers.include_roots()]
    fields = [
        os.path.abspath(nvrtc_library.nvrtc().path), nvrtc_call.PROGRAM_NAME, source, f"--gpu-architecture={virtual}",
        *kept,
        *roots,
    ]  # fmt: skip
    status, text = _ptx_worker.ask([os.fsencode(field) for field in fields])
    if status:
        raise SimulationError(text.decode()[-4000:])
    return text, ""


# ------------------------------------------------------------------------------------------------------------ launching


class Kernel:
    """A program of the machine, its params and variables."""

    def __init__(self, machine: Any, text: str) -> None:
        self.machine = machine
        self.text = text
        program = ptx.read(text, lambda name: machine.find_op(name.encode()))
        size = re.search(r"\.param [^\n]*?\[(\d+)\]", text)
        self.param_bytes = int(size[1]) if size else 0
        self._params = ctypes.create_string_buffer(self.param_bytes + 128)
        self.params = -(-ctypes.addressof(self._params) // 64) * 64
        self._data = [ctypes.create_string_buffer(data, len(data)) for data in program.data.values()]
        constants = []
        for slot, width, value in zip(*[iter(program.constants)] * 3, strict=True):
            if width == 3:  # the address of a variable
                width, value = 2, ctypes.addressof(self._data[value])
            elif width == 4:  # of the params
                width, value = 2, self.params
            constants += [slot, width, value]
        arrays = [
            (ctypes.c_int * len(program.code))(*program.code), (ctypes.c_int * len(program.pool))(*program.pool),
            (ctypes.c_uint64 * len(constants))(*constants), (ctypes.c_int * 16)(*program.special),
            (ctypes.c_int * 5)(*program.sizes),
        ]  # fmt: skip
        self.static_smem = program.sizes[2]
        self.handle = machine.make_program(
            arrays[0], len(program.code) // 7, arrays[1], len(program.pool), arrays[2], len(constants) // 3, arrays[3],
            arrays[4],
        )  # fmt: skip

        weakref.finalize(self, machine.free_program, self.handle)
        self.notes = ""
        """Of the last launch: what is suspicious, and wrong if a result shows it."""

    def launch(self, grid: int, block: int, smem: int, resident: int, params: int, seed: int) -> int:
        """Run it; how many instructions warps executed.

        Raises
        ------
        SimulationError
            With the line of the PTX, where the kernel did what it must not.
        """
        ctypes.memmove(self.params, params, self.param_bytes)
        executed, message = ctypes.c_uint64(), ctypes.create_string_buffer(8192)
        status = self.machine.launch(
            self.handle, grid, block, smem, resident, self.params, self.param_bytes, seed, MOST_INSTRUCTIONS,
            ctypes.byref(executed), message, len(message),
        )  # fmt: skip
        if status:
            said = message.value.decode()
            found = re.search(r"line (\d+) of the PTX", said)
            shown = self.text.splitlines()[int(found[1]) - 3 : int(found[1]) + 1] if found else []
            raise SimulationError("\n".join([said, *shown]))
        self.notes = message.value.decode()
        return executed.value


class DeviceArray(Producer):
    """A NumPy array in memory of the GPU, by DLPack. ``code``: DLPack's of its type; bfloat16 is uint16 with code 4.

    While one exists, kernels may read and write memory of such arrays only.
    """

    def __init__(self, machine: Any, x: np.ndarray[Any, Any], code: int) -> None:
        size = x.itemsize
        self.array = x
        assert all(stride % size == 0 and stride >= 0 for stride in x.strides)
        extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)) + size if x.size else 0
        super().__init__(
            x.shape, strides=tuple(stride // size for stride in x.strides), dtype=(code, 8 * size), data=x.ctypes.data
        )
        if extent:
            machine.add_region(x.ctypes.data, x.ctypes.data + extent)
            weakref.finalize(self, machine.remove_region, x.ctypes.data + extent)


@dataclass
class SimulatedGpu(FakeDriver):
    """The driver of GPUs that execute."""

    machine: Any = None
    resident: int = 6
    """Blocks that run side by side, however many multiprocessors the plans are told of."""
    seed: int = 0
    kernels: dict[int, Kernel] = field(default_factory=dict)
    launched: list[tuple[str, int]] = field(default_factory=list)
    """Kernel's image (its digest) and instructions of every launch."""
    notes: list[str] = field(default_factory=list)
    allocated: dict[int, DeviceArray] = field(default_factory=dict)
    """What the package allocated itself, by address."""
    lock: Any = field(default_factory=threading.RLock)

    def kernel(self, function: int) -> Kernel:
        if function not in self.kernels:
            self.kernels[function] = Kernel(self.machine, self.images[function - 1][1].decode())
        return self.kernels[function]

    def do_LaunchKernel(self, *arguments: Any) -> None:
        with self.lock:
            function, grid, _, _, block, _, _, smem, _stream, params, _extra = arguments
            kernel = self.kernel(int(function))
            address = ctypes.c_void_p.from_address(params).value
            assert address is not None
            self.seed += 1
            executed = kernel.launch(grid, block, smem, self.resident, address, self.seed)
            self.notes += kernel.notes.splitlines()
            self.launched.append((hashlib.sha256(self.images[int(function) - 1][1]).hexdigest()[:12], executed))

    def do_LaunchKernelEx(self, config: Any, function: int, params: int, extra: int) -> None:
        text = self.kernel(int(function)).text  # that all of its blocks wait is what the machine looks at
        assert "griddepcontrol.wait" in text, "a launch that overlaps the one ahead, of a kernel that does not wait"
        super().do_LaunchKernelEx(config, function, params, extra)

    def do_FuncGetAttribute(self, which: Any, function: int) -> int:
        return self.kernel(int(function)).static_smem if which.name == "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES" else 0

    def do_TensorMapEncodeTiled(self, *arguments: Any) -> Any:
        kind, rank, address, dims, strides, box, steps, _interleave, swizzle, _promotion, fill = arguments
        size = _ELEMENT_BYTES[kind.name.removeprefix("CU_TENSOR_MAP_DATA_TYPE_")]

        def five(values: Any, first: tuple[int, ...] = ()) -> list[int]:
            numbers = [*first, *map(int, values)]
            return numbers + [1] * (5 - len(numbers))

        dims, box = five(dims), five(box)
        strides = five(strides, (size,))
        assert all(stride % 16 == 0 for stride in strides[1:rank])
        assert address % 16 == 0
        assert all(0 < extent <= 256 for extent in box[:rank])
        assert five(steps) == [1] * 5
        bits = _SWIZZLE_BITS[swizzle.name.rsplit("_", 1)[1]]
        assert bits == 0 or box[0] * size <= 8 << (bits + 1)
        numbers = [rank, size, bits, int("NAN" in fill.name), *dims, *strides, *box, *five(steps)]
        self.tensor_maps.append(arguments)
        which = len(self.tensor_maps)
        self.machine.add_map(which, (ctypes.c_uint64 * 24)(*numbers))
        encoded = real.CUtensorMap()
        ctypes.memmove(int(encoded.getPtr()), struct.pack("<2Q", address, which), 16)
        return encoded

    def do_PointerGetAttribute(self, _which: Any, _address: int) -> int:
        return 0

    def do_MemAllocAsync(self, size: int, _stream: int) -> int:
        """Of the alignment that the driver gives; every byte is 255."""
        storage = np.full(size + 512, 255, np.uint8)
        start = -storage.ctypes.data % 512
        array = DeviceArray(self.machine, storage[start : start + size], 1)
        self.allocated[array.array.ctypes.data] = array
        return int(array.array.ctypes.data)

    def do_MemFree(self, address: int) -> None:
        del self.allocated[address]

    def do_MemcpyHtoDAsync(self, to: int, source: int, nbytes: int, _stream: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def do_MemcpyDtoDAsync(self, to: int, source: int, nbytes: int, _stream: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def do_StreamSynchronize(self, _stream: int) -> None:
        return None

    def do_EventCreate(self, _flags: int) -> int:
        return 1

    def do_EventDestroy(self, _event: int) -> None:
        return None

    def do_EventRecord(self, _event: int, _stream: int) -> None:
        return None

    def do_EventElapsedTime(self, _start: int, _end: int) -> float:
        return 0.01

    def do_ThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        return mode

    def do_MemsetD8Async(self, address: int, value: int, nbytes: int, _stream: int) -> None:
        ctypes.memset(address, value, nbytes)

    def do_MemsetD32Async(self, address: int, value: int, count: int, _stream: int) -> None:
        ctypes.memmove(address, struct.pack("<I", value) * count, 4 * count)


@contextmanager
def simulated(machine: Any, gpu: FakeGpu | None = None) -> Iterator[SimulatedGpu]:
    """One GPU for the calls of the package. PTX is kept beside the cache of kernels, whose keys it shares."""
    driver = SimulatedGpu([gpu or FakeGpu()], machine=machine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVRTC_ATTN_CACHE_DIR", os.path.join(os.environ["NVRTC_ATTN_CACHE_DIR"], "ptx"))
        patch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
        patch.setattr(compiler, "run_nvrtc", compile_to_ptx)
        patch.setattr("nvrtc_attn.plans.plan._plans", {})
        patch.setattr("nvrtc_attn.plans.plan._kernels", {})
        patch.setattr("nvrtc_attn.plans.repeats._repeats", {})
        patch.setattr("nvrtc_attn.plans.run.hold", lambda *_: None)
        patch.setattr(compiler, "_memory", type(compiler._memory)())
        with fake_driver.installed(driver):
            yield driver
