"""Any framework's tensor -> :class:`TensorView`: an address, a layout, and an owner that keeps the memory alive.

torch, CuPy and NumPy are read through their own attributes (a few microseconds less per tensor than DLPack); every
other producer, and a bare capsule, through DLPack. No framework is imported: one that was never imported cannot have
made the tensor.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..base.dtypes import DTYPES
from ..base.errors import shown
from . import dlpack
from .operands import OPERANDS
from .tensorview import (
    CPU,
    Device,
    TensorView,
    as_numpy,
    bfloat16_to_float32,
    check_layout,
    float32_to_bfloat16,
    may_overlap,
    normalised,
)

__all__ = [
    "CPU",
    "Device",
    "TensorView",
    "as_numpy",
    "bfloat16_to_float32",
    "current_stream",
    "float32_to_bfloat16",
    "framework_of",
    "may_overlap",
    "stream_handle",
    "view",
]

_Handler = Callable[[Any, str, "int | None", bool], TensorView]
# Exact type -> how to read it. Filled when a framework's array type is first seen.
_handlers: dict[type, _Handler] = {}
_cuda_devices: dict[int, Device] = {}


def _no_driver(address: int) -> int:
    raise RuntimeError(
        f"managed memory at {address:#x}: `import nvrtc_attn.api` connects the driver, which knows its GPU"
    )


_device_of: Callable[[int], int] = _no_driver


def connect_driver(device_of: Callable[[int], int]) -> None:
    """Let ``device_of`` say which GPU managed memory belongs to: the driver knows, and nothing in here imports CUDA."""
    global _device_of
    _device_of = device_of


def view(x: object, name: str, *, stream: int | None = None, writable: bool = False) -> TensorView:
    """Describe ``x`` without copying it.

    Parameters
    ----------
    x
        ``torch.Tensor``, ``cupy.ndarray``, ``numpy.ndarray``, any object with ``__dlpack__`` and
        ``__dlpack_device__``, or an unconsumed DLPack capsule.
    name
        The argument's name, for messages.
    stream
        Handle of the CUDA stream that will use the memory; it is ordered after the work that the producer has queued
        (torch and CuPy: on their current stream, and at no cost if that is the same stream). 0 and 1 are the legacy
        default stream, 2 the per-thread one, -1 means no ordering (CUDA-graph capture). ``None``: torch and CuPy
        tensors are not ordered, other producers against the legacy default stream. A bare capsule carries no stream.
    writable
        The memory will be written: refuse read-only memory, copies made for the export, and layouts in which two
        elements share an address.

    Raises
    ------
    TypeError
        ``x`` is no tensor, or one without memory of its own (tracer, proxy, sparse, masked).
    ValueError
        Gradient-requiring torch tensor, foreign device, not writable, consumed or bad capsule.
    UnsupportedError
        Unknown element type.
    """
    handler = _handlers.get(type(x))
    if handler is None:
        handler = _handler_of(x, name)
    return handler(x, name, stream, writable)


def framework_of(x: object) -> str:
    """``"torch"``, ``"cupy"``, ``"jax"``, ``"numpy"``, or ``"dlpack"`` for everything else."""
    if isinstance(x, np.ndarray):
        return "numpy"
    for module, cls in (("torch", "Tensor"), ("cupy", "ndarray"), ("jax", "Array")):
        if _is_instance(x, module, cls):
            return module
    return "dlpack"


def current_stream(framework: str, device_index: int) -> int:
    """Handle of the stream on which ``framework`` queues its work now; 0, the legacy default stream, if it has none."""
    if framework == "torch":
        return int(_torch().current_raw_stream(device_index))
    if framework == "cupy":
        cupy = sys.modules["cupy"]
        if cupy.cuda.runtime.getDevice() == device_index:  # what the context manager takes a microsecond for
            return int(cupy.cuda.get_current_stream().ptr)
        with cupy.cuda.Device(device_index):
            return int(cupy.cuda.get_current_stream().ptr)
    return 0


def stream_handle(stream: object, name: str = "stream") -> int:
    """The handle of an int, of a torch or CuPy stream, or of any object with ``__cuda_stream__``."""
    handle: Any = None
    if hasattr(stream, "__cuda_stream__"):
        handle = stream.__cuda_stream__()[1]
    else:
        for attribute in ("cuda_stream", "ptr"):
            if handle is None and isinstance(getattr(stream, attribute, None), int):
                handle = getattr(stream, attribute)
    try:
        if isinstance(stream, bool | np.bool_):
            raise TypeError
        handle = operator.index(stream if handle is None else handle)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a torch tensor of several elements
        raise TypeError(
            f"{name}: got {shown(stream)} of type {type(stream).__name__}. Pass a torch or CuPy stream, an object with "
            f"__cuda_stream__, or the integer handle."
        ) from None
    if not -1 <= handle < 2**64:
        raise ValueError(
            f"{name}: got {shown(handle)}. A stream handle is at least 0 and 64-bit, and -1 means no ordering."
        )
    return int(handle)


# ---------------------------------------------------------------------------------------------------- frameworks


def _handler_of(x: object, name: str) -> _Handler:
    """Which framework made ``x``. Only exact array types are remembered, so user classes are not kept alive."""
    cls = type(x)
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(
                f"{name}: got a numpy.ma.MaskedArray. Its mask would be ignored. Pass {name}.filled(value), and the "
                f"mask as mask=."
            )
        _handlers[np.ndarray] = _view_numpy
        return _view_numpy
    if _is_instance(x, "torch", "Tensor"):
        torch = sys.modules["torch"]
        if cls is not torch.Tensor and cls is not torch.nn.Parameter:
            raise TypeError(
                f"{name}: got {cls.__module__}.{cls.__qualname__}, a subclass of torch.Tensor. Only plain tensors have "
                f"memory that can be passed to a kernel (FakeTensor, DTensor and others do not). Pass the plain "
                f"tensor: {name}.to_local() of a DTensor, {name}.as_subclass(torch.Tensor) of one with storage."
            )
        _handlers[cls] = _view_torch
        return _view_torch
    if _is_instance(x, "cupy", "ndarray"):
        _handlers[cls] = _view_cupy
        return _view_cupy
    jax = sys.modules.get("jax")
    tracer = getattr(getattr(jax, "core", None), "Tracer", None)
    if tracer is not None and isinstance(x, tracer):
        raise TypeError(
            f"{name}: got a JAX tracer ({cls.__name__}). Inside jax.jit, jax.grad and jax.vmap an array has no memory "
            f"yet. Call nvrtc_attn.jax.attention there, or pass concrete arrays outside the transformation."
        )
    if dlpack.is_capsule(x):
        return _view_capsule
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _view_dlpack
    row = OPERANDS.get(name)
    dtype = ", dtype=numpy.int32" if row is not None and row.is_lengths else ""
    raise TypeError(
        f"{name}: got {shown(x)} of type {cls.__name__}. A tensor is needed: "
        f"torch, CuPy, JAX, NumPy, or any object with __dlpack__ and __dlpack_device__. Convert it, for example with "
        f"numpy.asarray(x{dtype}). See help(nvrtc_attn.attention)."
    )


class _Torch:
    """What the torch path looks up once: a dictionary hit on a ``torch.dtype`` is an identity hash."""

    def __init__(self, torch: Any) -> None:
        self.module = torch
        self.dtypes: dict[Any, str] = {
            getattr(torch, name): name for name in DTYPES if getattr(torch, name, None) is not None
        }
        self.is_hip = getattr(torch.version, "hip", None) is not None
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # 0.1 us instead of 1 us
        self.current_raw_stream: Callable[[int], int] = raw or (lambda i: int(torch.cuda.current_stream(i).cuda_stream))


_torch_state: _Torch | None = None


def _torch() -> _Torch:
    global _torch_state
    if _torch_state is None or _torch_state.module is not sys.modules.get("torch"):
        _torch_state = _Torch(sys.modules["torch"])
    return _torch_state


def _view_torch(t: Any, name: str, stream: int | None, writable: bool) -> TensorView:
    torch = _torch_state or _torch()
    if t.requires_grad and torch.module.is_grad_enabled():
        raise ValueError(
            f"{name}: requires_grad is True, and this function records no gradient. Pass {name}.detach(), call "
            f"it under torch.no_grad(), or use nvrtc_attn.torch.attention, which is differentiable."
        )
    dtype = torch.dtypes.get(t.dtype)
    if dtype is None:
        raise dlpack.unsupported_dtype(name, str(t.dtype))
    try:
        if t.is_neg():  # x.conj().imag: the memory holds the values with the other sign
            if writable:
                raise ValueError(
                    f"{name}: the tensor is a lazily negated view, its memory holds -{name}. It cannot be written in "
                    f"place. Pass {name}.resolve_neg(), or a fresh tensor."
                )
            t = t.resolve_neg()
        ptr, shape, strides = t.data_ptr(), tuple(t.shape), t.stride()
    except RuntimeError as error:
        raise TypeError(
            f"{name}: this torch tensor has no memory that a kernel can read (layout {t.layout}, device {t.device}): "
            f"{str(error).splitlines()[0].rstrip('.')}. Pass a plain strided tensor: .to_dense() of a sparse "
            f"one, .values() of a nested one, and no tensor inside torch.func transformations."
        ) from error
    if t.is_cuda and not torch.is_hip:
        index = t.get_device()
        device = _cuda_devices.get(index) or _cuda_device(index)
        if stream is not None:
            _order_torch(torch, index, stream)
    elif t.is_cpu:
        device = CPU
    else:
        where = f"{t.device} of a ROCm build of torch" if torch.is_hip else str(t.device)
        raise _foreign_device(name, where)
    if 1 in shape:
        strides = normalised(shape, strides)
    result = TensorView(ptr, shape, strides, dtype, device, False, t)
    return check_layout(result, name, writable) if writable or ptr & 7 else result


def _order_torch(torch: _Torch, index: int, stream: int) -> None:
    """Make ``stream`` wait for torch's current stream, what ``__dlpack__(stream=)`` would do."""
    current = torch.current_raw_stream(index)
    if stream == -1 or (stream or 1) == (current or 1):
        return
    cuda = torch.module.cuda
    with cuda.device(index):
        # torch takes odd handles for stream numbers of its own pool; 0 is its spelling of the legacy stream 1.
        waiting = cuda.ExternalStream(0 if stream == 1 else stream, device=index)
        waiting.wait_stream(cuda.current_stream(index))


def _view_cupy(x: Any, name: str, stream: int | None, writable: bool) -> TensorView:
    cupy = sys.modules["cupy"]
    if cupy.cuda.runtime.is_hip:
        raise _foreign_device(name, f"device {x.device.id} of a ROCm build of CuPy")
    dtype = _numpy_dtype_name(x.dtype, name)
    index = int(x.device.id)
    if stream is not None and stream != -1 and (stream or 1) != (current_stream("cupy", index) or 1):
        with cupy.cuda.Device(index):
            event = cupy.cuda.get_current_stream().record()
            _cupy_stream(cupy, 0 if stream == 1 else stream).wait_event(event)
    shape = tuple(x.shape)
    strides = _element_strides(shape, x.strides, DTYPES[dtype].itemsize, name)
    result = TensorView(int(x.data.ptr), shape, strides, dtype, _cuda_device(index), False, x)
    return check_layout(result, name, writable)


def _cupy_stream(cupy: Any, handle: int) -> Any:
    """CuPy's object for a stream that it did not make."""
    from_external = getattr(getattr(cupy.cuda, "Stream", None), "from_external", None)
    if from_external is None:  # before CuPy 14
        return cupy.cuda.ExternalStream(handle)
    return from_external(_StreamHandle(handle))


class _StreamHandle:
    """A stream handle behind the ``__cuda_stream__`` protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _view_numpy(x: np.ndarray[Any, Any], name: str, stream: int | None, writable: bool) -> TensorView:
    if type(x) is not np.ndarray:  # a subclass computes as it likes, for one with units or with a matrix's product
        x = np.asarray(x)
    dtype = _numpy_dtype_name(x.dtype, name)
    strides = _element_strides(x.shape, x.strides, x.itemsize, name)
    readonly = not x.flags.writeable
    if readonly and writable:
        raise _readonly(name, "the NumPy array is read-only (flags.writeable is False)")
    # x.ctypes.data is the same address for four times the time.
    result = TensorView(x.__array_interface__["data"][0], x.shape, strides, dtype, CPU, readonly, x)
    return check_layout(result, name, writable)


def _view_capsule(capsule: object, name: str, stream: int | None, writable: bool) -> TensorView:
    """A capsule that the user exported: refused without being consumed, so that it stays usable elsewhere."""
    result = _described(dlpack.describe(capsule, name), name, writable)
    object.__setattr__(result, "owner", dlpack.take(capsule))
    return result


def _view_dlpack(x: Any, name: str, stream: int | None, writable: bool) -> TensorView:
    immutable = _is_instance(x, "jax", "Array")
    if immutable and writable:
        raise _readonly(name, "JAX arrays are immutable, and may be cached elsewhere")
    # Asked first: a producer must not be sent a stream that its device does not have.
    device_type, device_id = dlpack.request_device(x, name)
    if device_type not in (dlpack.CPU, dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise _foreign_device(name, f"{dlpack.device_name(device_type)} device {device_id}")
    # JAX takes every number for the handle of a stream, -1 too.
    capsule = dlpack.request_capsule(x, name, device_type, stream, knows_no_order=not immutable)
    try:
        result = _described(dlpack.describe(capsule, name), name, writable, immutable=immutable)
    except BaseException:
        dlpack.discard(capsule)
        raise
    # Not within the try: an interrupt in there leaves the capsule to its own destructor, or to an owner that the
    # traceback keeps, and a handler would free it a second time.
    object.__setattr__(result, "owner", dlpack.take(capsule))
    return result


def _described(d: dlpack.Description, name: str, writable: bool, *, immutable: bool = False) -> TensorView:
    if writable and d.readonly:
        raise _readonly(name, "its producer exports read-only memory (DLPack flag READ_ONLY)")
    if writable and d.copied:
        raise ValueError(
            f"{name}: the producer made a copy to export it (DLPack flag IS_COPIED). What is written there would never "
            f"arrive. Pass an array on its own device in a layout that it can share."
        )
    device = _device(d.device_type, d.device_id, d.ptr, name)
    result = TensorView(d.ptr, d.shape, normalised(d.shape, d.strides), d.dtype, device, d.readonly or immutable)
    return check_layout(result, name, writable)


# ------------------------------------------------------------------------------------------------ shared checks


def _element_strides(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, name: str) -> tuple[int, ...]:
    strides = normalised(shape, tuple(strides))
    if any(stride % itemsize for stride in strides):
        raise ValueError(
            f"{name}: strides {strides} (bytes) are not multiples of the {itemsize}-byte element, as in a field of a "
            f"record array. Elements are addressed by whole steps. Copy it: numpy.ascontiguousarray({name})."
        )
    return tuple([stride // itemsize for stride in strides])


# NumPy puts a dtype's name together each time: four microseconds of a call.
_dtype_names: dict[Any, str] = {}


def _numpy_dtype_name(dtype: Any, name: str) -> str:
    known = _dtype_names.get(dtype)
    if known is None:
        known = str(dtype.name)
        if known not in DTYPES or not dtype.isnative:
            raise dlpack.unsupported_dtype(name, f"{known}{'' if dtype.isnative else ' in foreign byte order'}")
        _dtype_names[dtype] = known
    return known


def _readonly(name: str, reason: str) -> ValueError:
    return ValueError(f"{name}: {reason}. An output is written in place. Pass a writable array, for example a copy.")


def _foreign_device(name: str, where: str) -> ValueError:
    return ValueError(
        f"{name}: the memory is on {where}. Accepted: CPU memory (computed on the CPU), memory of an NVIDIA GPU, and "
        f"CUDA managed memory. Copy it to one of these. Run `python -m nvrtc_attn doctor` to see the GPUs."
    )


def _device(device_type: int, device_id: int, ptr: int, name: str) -> Device:
    if device_type == dlpack.CPU:
        return CPU
    if device_type == dlpack.CUDA:
        return _cuda_device(device_id)
    if device_type == dlpack.CUDA_MANAGED:
        # Producers may export managed memory as device 0 whatever GPU it was allocated for.
        return _cuda_device(_device_of(ptr) if ptr else device_id)
    raise _foreign_device(name, f"{dlpack.device_name(device_type)} device {device_id}")


def _cuda_device(index: int) -> Device:
    device = _cuda_devices.get(index)
    if device is None:
        device = _cuda_devices[index] = Device("cuda", index)
    return device


def _is_instance(x: object, module: str, cls: str) -> bool:
    """``isinstance`` against a class of a framework that may not be loaded."""
    found = getattr(sys.modules.get(module), cls, None)
    return isinstance(found, type) and isinstance(x, found)
