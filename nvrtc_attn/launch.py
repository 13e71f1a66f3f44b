"""One kernel launch: a by-value parameter struct, a one-dimensional grid, nothing else.

The launch goes through ``cuLaunchKernel``: ``cuLaunchKernelEx`` needs a mutable config object per thread and is no
faster (binding overhead 0.30 against 0.26 + 0.05 microseconds), and launch attributes are not used.
"""

from __future__ import annotations

import ctypes
from typing import Final, TypeAlias

from . import driver
from .errors import CudaError
from .module import Kernel

MAX_GRID: Final = 2**31 - 1
Params: TypeAlias = "ctypes.Structure | ctypes.Array[ctypes.c_char]"
_Slot = ctypes.c_void_p * 1


def launch(kernel: Kernel, grid: int, block: int, smem_bytes: int, params: Params, stream: int) -> None:
    """Start ``kernel`` on ``grid`` blocks of ``block`` threads, asynchronously on ``stream``.

    ``params`` holds the bytes of the kernel's struct; the driver copies them before this returns. The current context
    of the thread is left as it was.

    Raises
    ------
    ValueError
        ``grid`` is not in 1..2**31-1.
    CudaError
        The driver refused the launch. A ``DeviceFaultError`` tells of earlier work that failed.
    """
    if not 0 < grid <= MAX_GRID:
        raise ValueError(f"grid={grid} blocks: the driver accepts 1 to 2**31 - 1; split the batch")
    module = driver.api()
    if kernel.device in driver._faults:
        driver.check_device(kernel.device)
    slot = _Slot(ctypes.addressof(params))
    address = ctypes.addressof(slot)
    answer = module.cuCtxGetCurrent()
    if int(answer[1]) == kernel.context:
        code = module.cuLaunchKernel(kernel.function, grid, 1, 1, block, 1, 1, smem_bytes, stream, address, 0)[0]
    else:
        with driver.device_context(kernel.device):
            code = module.cuLaunchKernel(kernel.function, grid, 1, 1, block, 1, 1, smem_bytes, stream, address, 0)[0]
    if code != driver.SUCCESS:
        raise _refused(kernel, grid, block, smem_bytes, int(code))


def _refused(kernel: Kernel, grid: int, block: int, smem_bytes: int, code: int) -> CudaError:
    what = f"cuLaunchKernel({kernel.name}, grid {grid}, block {block}, {smem_bytes} bytes of shared memory)"
    return driver.failure(what, code, kernel.device)


def memset_async(address: int, value: int, size_bytes: int, stream: int, device: int | None = None) -> None:
    """Set device memory to the byte ``value``, asynchronously on ``stream``.

    ``device`` is the ordinal that owns the memory; without it the driver is asked, which takes a microsecond more.
    """
    if size_bytes == 0:
        return
    if device is None:
        attribute = driver.api().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        device = int(driver.call("cuPointerGetAttribute", attribute, address))
    with driver.device_context(device):
        driver.call("cuMemsetD8Async", address, value, size_bytes, stream, device=device)
