"""Memory of our own for callers whose arrays cannot be written: results and workspace of calls on JAX arrays.

A buffer is a DLPack producer; `to_jax` makes the JAX array that shares its memory. Two rules keep that memory alive:

* The managed struct lives in raw C memory, and its deleter only drops a Python reference: it calls neither CUDA nor
  JAX, so any thread may run it. At exit every living struct gets ``PyMem_RawFree`` itself as its deleter, which needs
  no interpreter: a framework that dies after the interpreter frees the struct, and the driver takes back the memory.
* JAX may call the deleter when the last array is gone on the host, before its GPU work is done (the memory that it
  allocates itself is reused in stream order; ours cannot be). So released memory waits in ``_retired`` until a
  computation that JAX queued later has finished, and is given back at the next allocation on that device.

Concurrency: the tables change by single operations that the interpreter lock makes atomic, or under ``_lock``.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import math
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ..base.dtypes import DTYPES
from ..base.errors import CudaError
from ..base.forks import renew_in_child
from ..front import dlpack
from ..front.tensorview import Device
from . import device, driver

OUT_OF_MEMORY: Final = 2
"""``CUDA_ERROR_OUT_OF_MEMORY``."""
# XLA on the CPU shares memory aligned to 64 bytes and copies other memory. The driver aligns to 256.
_HOST_ALIGNMENT: Final = 64

_raw_malloc: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("PyMem_RawMalloc", ctypes.pythonapi))
_raw_free: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("PyMem_RawFree", ctypes.pythonapi))
_new_capsule: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# The destructor gets a capsule whose reference count is 0: as an address, or ctypes would revive it.
_is_valid: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_get_pointer: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_inc_ref: Final = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))

_STRUCTS: Final[dict[bytes, type[Any]]] = {
    b"dltensor_versioned": dlpack.DLManagedTensorVersioned,
    b"dltensor": dlpack.DLManagedTensor,
}
# Address of a managed struct -> its capsule's name and what keeps the memory alive. Emptied by the deleter.
_exports: dict[int, tuple[bytes, object]] = {}
_retired: deque[_Retired] = deque()
_lock = threading.Lock()
renew_in_child(globals(), "_lock", threading.Lock)
# Device -> a computation of JAX, and what may be freed when it is done. Device -> a scalar of JAX to compute with.
_markers: dict[int, tuple[Any, list[_Retired]]] = {}
_scalars: dict[int, Any] = {}
_exit_hook_set = False


def _delete(address: int) -> None:
    _exports.pop(address, None)
    _raw_free(address)


def _destroy(capsule: int) -> None:
    for name in _STRUCTS:
        if _is_valid(capsule, name):  # still ours: nobody consumed it
            _delete(_get_pointer(capsule, name))


_deleter: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_destructor: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_destroy)
# Structs and capsules may outlive this module's dictionary: what they point to is never freed.
for _immortal in (_deleter, _destructor, *_STRUCTS):
    _inc_ref(_immortal)


def _release_at_exit() -> None:
    """From here on the deleter of every export is plain C."""
    free = ctypes.cast(_raw_free, ctypes.c_void_p).value
    for address, (name, _) in list(_exports.items()):
        _STRUCTS[name].from_address(address).deleter = free


class _Retired(NamedTuple):
    address: int
    device_index: int
    exported: bool


class _DeviceMemory:
    """One allocation. The last reference retires it, and frees nothing: no CUDA call on a thread that is not ours."""

    __slots__ = ("address", "device_index", "exported")

    def __init__(self, size_bytes: int, device_index: int, stream: int) -> None:
        self.address, self.device_index, self.exported = 0, device_index, False
        try:
            with driver.device_context(device_index):
                if device.properties(device_index).has_memory_pools:
                    pointer = driver.call("cuMemAllocAsync", size_bytes, stream, device=device_index)
                else:
                    pointer = driver.call("cuMemAlloc", size_bytes, device=device_index)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise CudaError(f"{size_bytes} bytes on cuda:{device_index}: {error}", error.code, error.name) from None
        self.address = int(pointer)

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            _retired.append(_Retired(self.address, self.device_index, self.exported))


def reclaim(device_index: int) -> None:
    """Give back the memory of ``device_index`` that nobody uses any more. Never waits for the GPU."""
    with _lock:
        exported: list[_Retired] = []
        for _ in range(len(_retired)):
            memory = _retired.popleft()
            if memory.device_index != device_index:
                _retired.append(memory)
            elif memory.exported:
                exported.append(memory)
            else:
                _free([memory], device_index)
        if device_index in _markers and _markers[device_index][0].is_ready():
            _free(_markers.pop(device_index)[1], device_index)
        if exported and device_index not in _markers:
            # Queued behind everything that may still read this memory: JAX computes in order on one stream per device.
            with sys.modules["jax"].ensure_compile_time_eval():  # also while a function is traced
                _markers[device_index] = (_scalars[device_index] + 1, exported)
        else:
            _retired.extend(exported)


def _free(memories: Sequence[_Retired], device_index: int) -> None:
    """Free what the GPU is done with: ``cuMemFree`` does not wait for pool memory (and does for the other kind)."""
    with driver.device_context(device_index):
        for memory in memories:
            driver.call("cuMemFree", memory.address, device=device_index)


class _Buffer:
    """What both kinds share: a row-major description, and its export."""

    device: Device
    _memory: object

    def __init__(self, shape: Sequence[int], dtype: str, ptr: int) -> None:
        self.shape, self.dtype, self.ptr = tuple(shape), dtype, ptr

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape}, {self.dtype!r}, {self.device})"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU if self.device.type == "cpu" else dlpack.CUDA), self.device.index

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Export the memory, ordered on ``stream`` after the stream that it was made for."""
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError(f"{self!r} is exported where it is, without a copy")
        self._order(stream)
        return _export(self, b"dltensor_versioned" if max_version and max_version[0] >= 1 else b"dltensor")

    def _order(self, stream: int | None) -> None:
        if stream is not None:
            raise BufferError(f"{self!r} is host memory: stream must be None, got {stream!r}")


class DeviceBuffer(_Buffer):
    """Uninitialised row-major device memory, allocated in the order of ``stream`` and written there.

    Parameters
    ----------
    shape, dtype
        Sizes, and a name of ``dtypes.DTYPES``.
    device_index
        CUDA ordinal.
    stream
        Handle of the stream that will write the memory; it must exist as long as the buffer is exported.

    Drop it when the work that writes it is done (`lifetime.hold` sees to that). A consumer other than `to_jax` must be
    done with the memory when it calls the deleter, as DLPack asks.
    """

    def __init__(self, shape: Sequence[int], dtype: str, device_index: int, stream: int = 0) -> None:
        reclaim(device_index)
        size = max(math.prod(shape) * DTYPES[dtype].itemsize, 1)
        self._memory: _DeviceMemory = _DeviceMemory(size, device_index, stream)
        self.device, self.stream = Device("cuda", device_index), stream
        super().__init__(shape, dtype, self._memory.address)

    def _order(self, stream: int | None) -> None:
        # DLPack: None is the legacy default stream 1, -1 asks for no ordering. 0 is the driver's spelling of 1.
        consumer = 1 if stream is None else stream
        if consumer != -1 and (consumer or 1) != (self.stream or 1):
            index = self.device.index
            with driver.device_context(index):
                event = driver.record(self.stream, index)
                driver.call("cuStreamWaitEvent", consumer, event, 0, device=index)
                driver.call("cuEventDestroy", event, device=index)

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy in host memory. Waits for all work of the legacy default stream and of streams that wait for it.

        bfloat16 needs the package ``ml_dtypes``, which gives NumPy that type.
        """
        if self.dtype == "bfloat16":
            importlib.import_module("ml_dtypes")  # registers the name
        array = np.empty(self.shape, self.dtype)
        if array.nbytes:
            index = self.device.index
            with driver.device_context(index):
                driver.call("cuMemcpyDtoH", array.ctypes.data, self.ptr, array.nbytes, device=index)
        return array


def to_device(array: Any, device_index: int = 0) -> DeviceBuffer:
    """Copy a NumPy array to a GPU, for programs without a framework that has memory there.

    Parameters
    ----------
    array
        Anything that ``numpy.asarray`` takes, of a dtype that a call accepts somewhere.
    device_index
        Ordinal of the GPU.

    Returns
    -------
    DeviceBuffer
        Row-major, with ``shape`` and ``dtype``. `attention_forward`, `attention_backward` and every other consumer of
        DLPack take it as input and as output; its method ``numpy()`` copies it back.

    Raises
    ------
    TypeError
        Another dtype.
    CudaError
        There is no driver, no such GPU, or not enough memory.
    """
    array = np.asarray(array, order="C")
    if array.dtype.name not in DTYPES:
        raise TypeError(f"array: dtype {array.dtype.name}, accepted are {', '.join(DTYPES)}")
    buffer = DeviceBuffer(array.shape, array.dtype.name, device_index)
    if array.nbytes:
        with driver.device_context(device_index):
            driver.call("cuMemcpyHtoD", buffer.ptr, array.ctypes.data, array.nbytes, device=device_index)
    return buffer


class HostBuffer(_Buffer):
    """The twin of `DeviceBuffer` in host memory, for JAX arrays on the CPU."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        size = math.prod(shape) * DTYPES[dtype].itemsize
        self._memory: np.ndarray[Any, Any] = np.empty(size + _HOST_ALIGNMENT, np.uint8)
        self.device = Device("cpu", 0)
        super().__init__(shape, dtype, -(-self._memory.ctypes.data // _HOST_ALIGNMENT) * _HOST_ALIGNMENT)


def to_jax(buffer: DeviceBuffer | HostBuffer, like: Any) -> Any:
    """The `jax.Array` that shares the memory of ``buffer``, where ``like`` is; nobody may write it any more."""
    jax = sys.modules["jax"]
    array = jax.dlpack.from_dlpack(buffer)
    if isinstance(buffer, DeviceBuffer):
        index = buffer.device.index
        if index not in _scalars:
            (device,) = array.devices()
            _scalars[index] = jax.device_put(np.float32(0), device)
        buffer._memory.exported = True
    elif array.devices() != like.devices():  # JAX may count a host as several devices, DLPack does not
        array = jax.device_put(array, *like.devices())
    return array


def _export(buffer: _Buffer, name: bytes) -> Any:
    """A capsule called ``name`` over the memory of ``buffer``."""
    global _exit_hook_set
    if not _exit_hook_set:
        atexit.register(_release_at_exit)
        _exit_hook_set = True
    struct, ndim = _STRUCTS[name], len(buffer.shape)
    header = ctypes.sizeof(struct)
    address = _raw_malloc(header + 16 * ndim)
    if not address:
        raise MemoryError("no memory for a DLPack header")
    ctypes.memset(address, 0, header)
    managed = struct.from_address(address)
    if struct is dlpack.DLManagedTensorVersioned:
        managed.major, managed.minor = dlpack.MAX_VERSION
    managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p).value
    tensor = managed.dl_tensor
    tensor.data = buffer.ptr
    tensor.device.device_type, tensor.device.device_id = buffer.__dlpack_device__()
    tensor.dtype.code, tensor.dtype.bits = DTYPES[buffer.dtype].dlpack
    tensor.dtype.lanes = 1
    tensor.ndim = ndim
    sizes = (ctypes.c_int64 * ndim).from_address(address + header)
    steps = (ctypes.c_int64 * ndim).from_address(address + header + 8 * ndim)
    sizes[:], steps[:] = list(buffer.shape), list(dlpack.compact_strides(buffer.shape))
    pointer = ctypes.POINTER(ctypes.c_int64)
    tensor.shape, tensor.strides = ctypes.cast(sizes, pointer), ctypes.cast(steps, pointer)
    _exports[address] = (name, buffer._memory)
    return _new_capsule(address, name, ctypes.cast(_destructor, ctypes.c_void_p).value)
