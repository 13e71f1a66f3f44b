"""Cubin -> ``Kernel``, once per (device, key): load, shared-memory limit, recovery from a rejected image.

``cuLibraryLoadData`` does not depend on a context and loads lazily; ``cuFuncLoad`` brings the image onto the device
now, so that a first launch inside a graph capture has nothing left to load. Nothing is ever unloaded: a library in a
captured graph must outlive it, and the kernels of a process are few.

Concurrency: one lock per (device, key). The table is read without a lock.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

from ..base.errors import CudaError, UnsupportedError
from ..jit import compile as compiler
from ..jit import headers
from ..jit.codegen import ENTRY_NAME
from ..jit.compile import CompiledKernel
from . import driver


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A kernel on one device, ready to launch. Sizes in bytes."""

    key: str
    name: str
    device: int
    context: int
    """Handle of the device's primary context, which ``function`` belongs to."""
    function: Any
    """``CUfunction``."""
    library: Any
    """``CUlibrary``."""
    smem_bytes: int
    """Most dynamic shared memory that a launch may ask for."""
    num_regs: int
    local_bytes: int
    """Stack and spills, per thread."""
    static_smem_bytes: int
    max_threads: int


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


def find_kernel(key: str, device: int) -> Kernel | None:
    """The loaded kernel, without loading it: for callers that must not load, for example during a graph capture."""
    return _kernels.get((device, key))


def load_kernel(compiled: CompiledKernel, device_index: int, *, smem_bytes: int) -> Kernel:
    """Load ``compiled`` on ``device_index`` and allow launches with up to ``smem_bytes`` of dynamic shared memory.

    The limit is set once, at load: changing it between launches races with them and may synchronise.

    Raises
    ------
    UnsupportedError
        The device has less shared memory than ``smem_bytes`` and the kernel's static part.
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
    made, have = headers.nvrtc().version, driver.driver_version()
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
    module = driver.api()
    library = driver.call("cuLibraryLoadData", compiled.code, [], [], 0, [], [], 0, device=device)
    handle = driver.call("cuLibraryGetKernel", library, ENTRY_NAME.encode(), device=device)
    function = driver.call("cuKernelGetFunction", handle, device=device)
    attributes = module.CUfunction_attribute

    def attribute(name: str) -> int:
        which = getattr(attributes, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(driver.call("cuFuncGetAttribute", which, function, device=device))

    static = attribute("SHARED_SIZE_BYTES")
    handle_of_device = driver.call("cuDeviceGet", device)
    limit = int(
        driver.call(
            "cuDeviceGetAttribute",
            module.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            handle_of_device,
        )
    )
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
    driver.call("cuFuncLoad", function, device=device)
    return Kernel(
        key=compiled.key,
        name=_name(compiled),
        device=device,
        context=driver.primary_context(device),
        function=function,
        library=library,
        smem_bytes=smem_bytes,
        num_regs=attribute("NUM_REGS"),
        local_bytes=attribute("LOCAL_SIZE_BYTES"),
        static_smem_bytes=static,
        max_threads=attribute("MAX_THREADS_PER_BLOCK"),
    )


def _name(compiled: CompiledKernel) -> str:
    return compiled.config.kernel if compiled.config is not None else ENTRY_NAME
