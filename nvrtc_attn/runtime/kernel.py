"""Cubin -> `Kernel`, once per (device, key), and its launches: a by-value parameter struct, a one-dimensional grid.

``cuLibraryLoadData`` does not depend on a context and loads lazily; ``cuFuncLoad`` brings the image onto the device
now, so that a first launch inside a graph capture has nothing left to load. Nothing is ever unloaded: a library in a
captured graph must outlive it, and the kernels of a process are few.

A launch goes through ``cuLaunchKernel``: ``cuLaunchKernelEx`` needs a mutable config object per thread and is no
faster (binding overhead 0.30 against 0.26 + 0.05 microseconds). One that begins before the launch ahead of it has ended
needs that function, and its config lies beside the params.

Concurrency: one lock per (device, key). The table is read without a lock.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from typing import Any, Final

from ..base.errors import CompileError, CudaError, UnsupportedError
from ..jit import compile as compiler
from ..jit import nvrtc_library
from ..jit.codegen import ENTRY_NAME
from ..jit.compile import CompiledKernel
from ..jit.config import PORTABLE_CLUSTER, ForwardConfig
from . import device as devices
from . import driver

MAX_GRID: Final = 2**31 - 1
OVERLAPS_SINCE: Final = (12, 3)
"""The first driver that captures launches that overlap into CUDA graphs."""
_Slot = ctypes.c_void_p * 1


class ClusterError(UnsupportedError):
    """The device has no room for a cluster of thread blocks: a small slice of a GPU may have none."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A kernel on one device, ready to launch. Sizes in bytes."""

    key: str
    name: str
    device: int
    function: Any
    """``CUfunction`` of the device's primary context."""
    smem_bytes: int
    """Most dynamic shared memory that a launch may ask for."""
    local_bytes: int
    """Stack and spills, per thread."""


_kernels: dict[tuple[int, str], Kernel] = {}
_locks: dict[tuple[int, str], threading.Lock] = {}
_locks_guard = threading.Lock()


def _after_fork_in_child() -> None:
    global _locks_guard
    _locks_guard = threading.Lock()
    _locks.clear()
    _kernels.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def check_nvrtc() -> None:
    """Refuse to compile what the driver could not load: a cubin needs a driver of NVRTC's major version or later.

    Raises
    ------
    CompileError
        NVRTC is missing, or of a later major version than the driver.
    """
    needed, have = nvrtc_library.nvrtc().version, driver.driver_version()
    if have[0] < needed[0]:
        raise CompileError(
            f"NVRTC {needed[0]}.{needed[1]} makes code for drivers of CUDA {needed[0]} or later, and the installed "
            f'driver supports CUDA {have[0]}.{have[1]}: pip install "nvrtc-attn[cu{have[0]}]" in a new environment, or '
            "update the driver; see `python -m nvrtc_attn doctor`"
        )


def load_kernel(compiled: CompiledKernel, device_index: int, *, smem_bytes: int) -> Kernel:
    """Load ``compiled`` on ``device_index`` and allow launches with up to ``smem_bytes`` of dynamic shared memory.

    The limit is set once, at load: changing it between launches races with them and may synchronise.

    Raises
    ------
    UnsupportedError
        The device has less shared memory than ``smem_bytes`` and the kernel's static part, or (`ClusterError`) no room
        for a cluster of its thread blocks.
    CudaError
        The driver refused the image (after one recompile, when it came from the cache), or the call.
    """
    slot = (device_index, compiled.key)
    kernel = _kernels.get(slot)
    if kernel is not None and kernel.smem_bytes >= smem_bytes:
        driver.api()  # raises in a forked child
        return kernel
    with _locks_guard:
        lock = _locks.setdefault(slot, threading.Lock())
    with lock:
        kernel = _kernels.get(slot)
        if kernel is None or kernel.smem_bytes < smem_bytes:
            with driver.device_context(device_index) as context, driver.beside_captures():
                kernel = _load(compiled, context.device, smem_bytes)
            _kernels[slot] = kernel
    return kernel


def _load(compiled: CompiledKernel, device: int, smem_bytes: int) -> Kernel:
    try:
        return _load_image(compiled, device, smem_bytes)
    except CudaError as error:
        if error.code not in driver.IMAGE_CODES:
            raise
        if not compiled.cached or compiled.config is None:
            raise _explained(error) from None
    # A damaged entry that still passes its checksum was damaged before it was written, or is for another GPU.
    compiler.discard(compiled.key)
    try:
        return _load_image(compiler.compile_kernel(compiled.config), device, smem_bytes)
    except CudaError as error:
        if error.code not in driver.IMAGE_CODES:
            raise
        raise _explained(error) from None


def _explained(error: CudaError) -> CudaError:
    """The driver's refusal of a fresh image, with what to do about it where NVRTC is newer than the driver.

    Machine code runs on every driver of its CUDA major; only what a later minor adds to the file's format can stop it.
    """
    made, have = nvrtc_library.nvrtc().version, driver.driver_version()
    if have >= made:
        return error
    supported = f"{have[0]}.{have[1]}"
    return CudaError(
        f"{error}. NVRTC {made[0]}.{made[1]} is newer than the driver, which supports CUDA {supported}: update the "
        f'driver, or pip install "nvidia-cuda-nvrtc=={supported}.*" "nvidia-cuda-runtime=={supported}.*"',
        error.code,
        error.name,
    )


def _load_image(compiled: CompiledKernel, device: int, smem_bytes: int) -> Kernel:
    attributes = driver.api().CUfunction_attribute
    library = driver.call("cuLibraryLoadData", compiled.code, [], [], 0, [], [], 0, device=device)
    handle = driver.call("cuLibraryGetKernel", library, ENTRY_NAME.encode(), device=device)
    function = driver.call("cuKernelGetFunction", handle, device=device)

    def attribute(name: str) -> int:
        which = getattr(attributes, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(driver.call("cuFuncGetAttribute", which, function, device=device))

    static = attribute("SHARED_SIZE_BYTES")
    limit = devices.properties(device).smem_per_block_optin
    if static + smem_bytes > limit:
        raise UnsupportedError(
            f"{_name(compiled)} needs {static + smem_bytes} bytes of shared memory per block, cuda:{device} has {limit}"
        )
    driver.call(
        "cuFuncSetAttribute",
        function,
        attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        smem_bytes,
        device=device,
    )
    if getattr(compiled.config, "cluster", 1) > PORTABLE_CLUSTER:
        allowed = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        driver.call("cuFuncSetAttribute", function, allowed, 1, device=device)
    driver.call("cuFuncLoad", function, device=device)
    config = compiled.config
    # There is another form of such a plan, and the driver would refuse the launch.
    if (
        isinstance(config, ForwardConfig)
        and config.cluster > 1
        and not clusters_at_once(function, config, smem_bytes, device)
    ):
        raise ClusterError(
            f"cuda:{device} has no room for {config.cluster} thread blocks of {smem_bytes} bytes as a cluster"
        )
    return Kernel(
        key=compiled.key,
        name=_name(compiled),
        device=device,
        function=function,
        smem_bytes=smem_bytes,
        local_bytes=attribute("LOCAL_SIZE_BYTES"),
    )


def clusters_at_once(function: Any, config: ForwardConfig, smem_bytes: int, device: int) -> int:
    """How many clusters of ``function``, a kernel of ``config``, can be on the device at once."""
    launch_config = driver.api().CUlaunchConfig()  # the size of a cluster is the kernel's own
    launch_config.gridDimX, launch_config.gridDimY, launch_config.gridDimZ = config.cluster, 1, 1
    launch_config.blockDimX, launch_config.blockDimY, launch_config.blockDimZ = config.num_threads, 1, 1
    launch_config.sharedMemBytes = smem_bytes
    return int(driver.call("cuOccupancyMaxActiveClusters", function, launch_config, device=device))


def _name(compiled: CompiledKernel) -> str:
    return compiled.config.kernel if compiled.config is not None else ENTRY_NAME


class ParamsBuffer:
    """Host memory of one launch's params, and the driver's list of arguments, which points at it.

    ``data`` begins as ``template``. The driver copies it during a launch: one buffer serves one launch after another,
    but not two threads at once. With ``overlapping``, the `what_to_launch` of a launch that overlaps the one ahead, it
    has the config of that, too.
    """

    __slots__ = ("_config", "_slot", "address", "data")

    def __init__(self, template: bytes, overlapping: tuple[Any, ...] | None = None) -> None:
        self.data = ctypes.create_string_buffer(template, len(template))
        self._slot = _Slot(ctypes.addressof(self.data))
        self.address = ctypes.addressof(self._slot)
        self._config: Any = None if overlapping is None else _overlapping_config(overlapping)

    def config_for(self, stream: int) -> Any:
        """The config for ``cuLaunchKernelEx``: this object's own, which the driver reads during the launch."""
        self._config.hStream = driver.api().CUstream(stream)
        return self._config


def can_overlap(device: int) -> bool:
    """Whether ``device`` and the driver take launches that begin before the one ahead has ended, in captures too."""
    return driver.driver_version() >= OVERLAPS_SINCE and devices.properties(device).compute_capability >= (9, 0)


def _overlapping_config(what: tuple[Any, ...]) -> Any:
    """``what`` of `what_to_launch` for a launch that begins early: programmatic stream serialization."""
    api = driver.api()
    config, attribute, value = api.CUlaunchConfig(), api.CUlaunchAttribute(), api.CUlaunchAttributeValue()
    _, config.gridDimX, config.gridDimY, config.gridDimZ, *block, config.sharedMemBytes = what
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    value.programmaticStreamSerializationAllowed = 1
    attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value = value
    config.attrs, config.numAttrs = [attribute], 1
    return config


def launch(kernel: Kernel, grid: int, block: int, smem_bytes: int, params: ParamsBuffer, stream: int) -> None:
    """Start ``kernel`` on ``grid`` blocks of ``block`` threads, asynchronously on ``stream``.

    The kernel's context is current (`driver.device_context`). The driver copies ``params`` before this returns.

    Raises
    ------
    ValueError
        As `what_to_launch`.
    CudaError
        The driver refused the launch. A ``DeviceFaultError`` tells of earlier work that failed.
    """
    what = what_to_launch(kernel, grid, block, smem_bytes)
    # The bindings make an object of every stream handle but None, which is the legacy default stream.
    code = driver.api().cuLaunchKernel(*what, stream or None, params.address, 0)[0]
    if code != driver.SUCCESS:
        raise refused(kernel, what, int(code))


def what_to_launch(kernel: Kernel, grid: int, block: int, smem_bytes: int) -> tuple[Any, ...]:
    """The arguments of ``cuLaunchKernel`` before the stream.

    Raises
    ------
    ValueError
        ``grid`` is not in 1..2**31-1.
    """
    if not 0 < grid <= MAX_GRID:
        raise ValueError(f"grid={grid} blocks: the driver accepts 1 to 2**31 - 1; split the batch")
    return kernel.function, grid, 1, 1, block, 1, 1, smem_bytes


def refused(kernel: Kernel, what: tuple[Any, ...], code: int) -> CudaError:
    """The exception for a launch of `what_to_launch` that the driver refused."""
    _, grid, _, _, block, _, _, smem_bytes = what
    text = f"cuLaunchKernel({kernel.name}, grid {grid}, block {block}, {smem_bytes} bytes of shared memory)"
    return driver.failure(text, code, kernel.device)
