"""A CPU target of XLA's foreign function interface in Python, by `ctypes`.

`jax.pure_callback` is no way to the NumPy path: it copies its operands to a device inside the callback, on the threads
that wait for the callback, and hangs once those are all taken (two devices on two cores). It cannot be partitioned
either: below `custom_partitioning` its number means nothing, and XLA crashes. This one uses XLA's own memory.

The structs are those of ``xla/ffi/api/c_api.h``, versions 0.1 to 0.3 of which have the same fields here. Each says its
own size: another one is refused instead of read.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np

_OLDEST: Final = (0, 1)
"""The version of an XLA that asks for metadata without naming its own, as that of jaxlib 0.7.2 does."""
_METADATA: Final = 1
_EXECUTE: Final = 3
_INVALID_ARGUMENT: Final = 3
_INTERNAL: Final = 13


class _Base(ctypes.Structure):
    _fields_: ClassVar[Any] = (("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p))


class _Version(_Base):
    _fields_: ClassVar[Any] = (("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Metadata(ctypes.Structure):
    _fields_: ClassVar[Any] = (("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32))


class _Extension(ctypes.Structure):
    _fields_: ClassVar[Any] = (
        ("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )  # fmt: skip


class _Buffer(_Base):
    _fields_: ClassVar[Any] = (
        ("dtype", ctypes.c_int), ("data", ctypes.c_void_p), ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )  # fmt: skip


class _Buffers(_Base):
    _fields_: ClassVar[Any] = (
        ("size", ctypes.c_int64), ("types", ctypes.c_void_p), ("items", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )  # fmt: skip


class _ErrorArguments(_Base):
    _fields_: ClassVar[Any] = (("message", ctypes.c_char_p), ("code", ctypes.c_int))


class _Api(_Base):
    _fields_: ClassVar[Any] = (
        ("version", _Version), ("internal", ctypes.c_void_p),
        ("create_error", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))),
    )  # fmt: skip


class _Frame(_Base):
    _fields_: ClassVar[Any] = (
        ("api", ctypes.POINTER(_Api)), ("context", ctypes.c_void_p), ("stage", ctypes.c_int),
        ("arguments", _Buffers), ("results", _Buffers),
    )  # fmt: skip


Memory = tuple[int, tuple[int, ...], str]
"""Address, shape and element type of one buffer."""
_DTYPES: Final = {
    1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 8: "uint32", 9: "uint64", 10: "float16",
    11: "float32", 12: "float64", 16: "bfloat16",
}  # fmt: skip
_Handler: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
_handlers: list[Any] = []  # XLA keeps their addresses for good


def register(target: str, run: Callable[[Sequence[Memory], Sequence[Memory]], None]) -> None:
    """Let custom calls of ``target`` on the CPU platform be ``run`` of their operands and results.

    It runs on a thread of XLA. What it raises is the error of the program.
    """

    def handle(frame: Any) -> int | None:
        try:
            if frame.contents.extension:
                extension = ctypes.cast(frame.contents.extension, ctypes.POINTER(_Extension)).contents
                if extension.type == _METADATA:
                    metadata, api = extension.metadata.contents, frame.contents.api
                    version = (api.contents.version.major, api.contents.version.minor) if api else _OLDEST
                    metadata.version.major, metadata.version.minor = version
                    metadata.traits = 0
                    return None
            if frame.contents.stage == _EXECUTE:
                run(_memory(frame.contents.arguments), _memory(frame.contents.results))
        except BaseException as error:  # nothing may leave a C function
            return _xla_error(frame, error)
        return None

    handler = _Handler(handle)
    _handlers.append(handler)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")


def array(memory: Memory) -> np.ndarray[Any, Any]:
    """The NumPy array in XLA's memory; valid while the custom call runs."""
    address, shape, name = memory
    dtype = jnp.dtype(name)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size == 0:
        return np.empty(shape, dtype)
    buffer: Any = (ctypes.c_char * size).from_address(address)  # NumPy's stubs take no arrays of ctypes
    return np.frombuffer(buffer, dtype).reshape(shape)


def _memory(buffers: Any) -> list[Memory]:
    if buffers.struct_size != ctypes.sizeof(_Buffers):
        raise RuntimeError(_changed("XLA_FFI_Args", buffers.struct_size, _Buffers))
    found: list[Memory] = []
    for index in range(buffers.size):
        buffer = buffers.items[index].contents
        if buffer.struct_size != ctypes.sizeof(_Buffer):
            raise RuntimeError(_changed("XLA_FFI_Buffer", buffer.struct_size, _Buffer))
        if buffer.dtype not in _DTYPES:
            known = ", ".join(f"{code} ({name})" for code, name in _DTYPES.items())
            raise RuntimeError(f"buffer {index}: element type {buffer.dtype} of XLA's. It is one of {known}.")
        found.append((buffer.data or 0, tuple(buffer.dims[: buffer.rank]), _DTYPES[buffer.dtype]))
    return found


def _changed(name: str, size: int, known: Any) -> str:
    return (
        f"jaxlib {jax.lib.__version__} has another foreign function interface: {name} takes {size} bytes, known are "
        f"{ctypes.sizeof(known)}. Use one that nvrtc_attn was tested with: docs/integrations has their versions."
    )


def _xla_error(frame: Any, error: BaseException) -> int:
    code = _INTERNAL
    if isinstance(error, (TypeError, ValueError)):  # what was passed is refused, in words for who passed it
        text, code = f"{type(error).__name__}: {error}", _INVALID_ARGUMENT
    elif isinstance(error, RuntimeError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception(error))
    arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text.encode(), code)
    return int(frame.contents.api.contents.create_error(ctypes.byref(arguments)) or 0)
