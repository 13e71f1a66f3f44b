"""A DLPack producer made by hand: any header, right or wrong, and a count of the deleter calls. Needs no framework."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

from nvrtc_attn.front.dlpack import DLManagedTensor, DLManagedTensorVersioned, DLTensor

BOGUS_POINTER = 0x7F00_0000_0000
"""A plausible device address that nothing may dereference."""

_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

# Address of a managed struct -> (the struct, what it points to, its producer). Emptied by the deleter.
_alive: dict[int, tuple[Any, Any, Any, Producer]] = {}


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _deleter(address: int) -> None:
    entry = _alive.pop(address)
    producer = entry[3]
    producer.deleted += 1
    producer.freed.append(entry[:3])  # what is read once more must look as it did, and call this again


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destructor(capsule: int) -> None:
    """What every real producer does: an unconsumed capsule frees its memory."""
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid(capsule, name):
            _deleter(_get_pointer(capsule, name))


class Producer:
    """``version=None`` makes legacy capsules; ``data`` is an address; ``strides=None`` exports NULL."""

    def __init__(
        self,
        shape: tuple[int, ...] = (2, 3),
        *,
        strides: tuple[int, ...] | None = None,
        dtype: tuple[int, int] = (2, 16),
        lanes: int = 1,
        device: tuple[int, int] = (2, 0),
        data: int | None = BOGUS_POINTER,
        byte_offset: int = 0,
        version: tuple[int, int] | None = (1, 0),
        flags: int = 0,
        knows_max_version: bool = True,
        deleter: bool = True,
        ndim: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        self.__dict__.update({key: value for key, value in locals().items() if key != "self"})
        self.deleted = 0
        self.freed: deque[Any] = deque(maxlen=4)
        self.requests: list[dict[str, Any]] = []

    @property
    def exported(self) -> int:
        """Capsules whose memory is still held."""
        return sum(entry[3] is self for entry in _alive.values())

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        self.requests.append(options)
        if "max_version" in options and not self.knows_max_version:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        if self.error is not None:
            raise self.error
        return self.capsule()

    def capsule(self) -> Any:
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        strides = None if self.strides is None else (ctypes.c_int64 * len(self.strides))(*self.strides)
        managed: Any = DLManagedTensor() if self.version is None else DLManagedTensorVersioned()
        if self.version is not None:
            managed.major, managed.minor = self.version
            managed.flags = self.flags
        tensor: DLTensor = managed.dl_tensor
        tensor.data, tensor.byte_offset = self.data, self.byte_offset
        tensor.device.device_type, tensor.device.device_id = self.device
        tensor.ndim = len(self.shape) if self.ndim is None else self.ndim
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = *self.dtype, self.lanes
        pointer = ctypes.POINTER(ctypes.c_int64)
        tensor.shape = ctypes.cast(shape, pointer) if self.shape else None
        tensor.strides = ctypes.cast(strides, pointer) if strides is not None else None
        address = ctypes.addressof(managed)
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        if self.deleter:
            managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
            _alive[address] = (managed, shape, strides, self)
        else:
            self.kept = (managed, shape, strides)
        # PyCapsule keeps the pointer of the name: this literal lives as long as the module.
        return _new(address, name, ctypes.cast(_destructor, ctypes.c_void_p) if self.deleter else None)
