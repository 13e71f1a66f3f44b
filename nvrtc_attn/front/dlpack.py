"""DLPack from the consumer's side: a capsule in, a checked description and an owner of its memory out.

A capsule holds a ``DLManagedTensor`` (name ``dltensor``) or a ``DLManagedTensorVersioned`` (``dltensor_versioned``).
The consumer takes it by renaming it to ``used_...`` and from then on owes the producer exactly one call of the
deleter. The two structs order their fields differently, so the capsule *name* decides how memory is read, never a
guess. Everything is checked before the rename: a refused capsule that the user passed in stays usable elsewhere.

Format: https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ..base.dtypes import ATTENTION_DTYPES, FROM_DLPACK
from ..base.errors import UnsupportedError
from .operands import OPERANDS

CPU: Final = 1
CUDA: Final = 2
CUDA_MANAGED: Final = 13
DEVICE_NAMES: Final = {
    1: "kDLCPU", 2: "kDLCUDA", 3: "kDLCUDAHost", 4: "kDLOpenCL", 7: "kDLVulkan", 8: "kDLMetal", 9: "kDLVPI",
    10: "kDLROCM", 11: "kDLROCMHost", 12: "kDLExtDev", 13: "kDLCUDAManaged", 14: "kDLOneAPI", 15: "kDLWebGPU",
    16: "kDLHexagon", 17: "kDLMAIA", 18: "kDLTrn",
}  # fmt: skip
_CODE_NAMES: Final = {
    0: "int", 1: "uint", 2: "float", 3: "opaque handle", 4: "bfloat", 5: "complex", 6: "bool", 7: "float8_e3m4",
    8: "float8_e4m3", 9: "float8_e4m3b11fnuz", 10: "float8_e4m3fn", 11: "float8_e4m3fnuz", 12: "float8_e5m2",
    13: "float8_e5m2fnuz", 14: "float8_e8m0fnu", 15: "float6_e2m3fn", 16: "float6_e3m2fn", 17: "float4_e2m1fn",
}  # fmt: skip

MAX_VERSION: Final = (1, 0)
FLAG_READ_ONLY: Final = 1
FLAG_IS_COPIED: Final = 2
# DLPack sets no limit. NumPy stops at 64 and torch at 64; a larger number means a corrupt header.
_MAX_NDIM: Final = 64


class DLDevice(ctypes.Structure):
    """Where the memory is."""

    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class DLDataType(ctypes.Structure):
    """Element type: family code, bits and vector lanes."""

    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    """The description common to both managed structs."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    """What a ``dltensor`` capsule points to."""

    _fields_ = [("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    """What a ``dltensor_versioned`` capsule points to. Only ``version`` and ``deleter`` are fixed for every major."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    ]


# Prototypes of our own: setting argtypes on ctypes.pythonapi would change them for every library in the process.
# PYFUNCTYPE keeps the GIL, which deleters written against the CPython API expect.
_is_valid: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_get_pointer: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)
_inc_ref: Final = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))
_DELETER: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _Kind(NamedTuple):
    name: bytes
    used: bytes
    struct: type[Any]


_KINDS: Final = (
    _Kind(b"dltensor_versioned", b"used_dltensor_versioned", DLManagedTensorVersioned),
    _Kind(b"dltensor", b"used_dltensor", DLManagedTensor),
)
# A capsule keeps the address of its name, and may be destroyed after this module: these bytes are never freed.
for _kind in _KINDS:
    _inc_ref(_kind.used)


class Owner:
    """Keeps the memory of a consumed capsule alive; the deleter runs once, when this object dies."""

    __slots__ = ("__weakref__",)


class Description(NamedTuple):
    """One tensor as its producer describes it. ``ptr`` includes the byte offset; ``strides`` are elements."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device_type: int
    device_id: int
    readonly: bool
    copied: bool


def is_capsule(x: object) -> bool:
    """Whether ``x`` is a DLPack capsule, consumed or not."""
    return any(_is_valid(x, name) for kind in _KINDS for name in (kind.name, kind.used))


def device_name(device_type: int) -> str:
    """The DLPack spelling of a device type, for messages."""
    return f"{DEVICE_NAMES.get(device_type, 'unknown')} ({device_type})"


def producer_stream(stream: int | None) -> int:
    """The value for ``__dlpack__(stream=)``: DLPack forbids 0, and spells the legacy default stream 1."""
    return stream or 1


def request_device(x: Any, name: str) -> tuple[int, int]:
    """``x.__dlpack_device__()`` as two plain integers."""
    try:
        device_type, device_id = x.__dlpack_device__()
        return int(device_type), int(device_id)
    except Exception as error:
        raise _export_error(x, name, "__dlpack_device__", error) from error


def request_capsule(x: Any, name: str, device_type: int, stream: int | None, *, knows_no_order: bool = True) -> Any:
    """A fresh capsule from ``x.__dlpack__``: versioned where the producer can, legacy where it cannot.

    ``stream`` is passed only for CUDA memory (the protocol reserves it to devices that have streams) and never as
    ``None``, whose meaning differs between releases of the same producer. The one exception is a producer that takes
    -1 for a handle (``knows_no_order=False``): it gets no stream, so that it waits on the host if it must.
    """
    options: dict[str, Any] = {}
    if device_type in (CUDA, CUDA_MANAGED) and (knows_no_order or stream != -1):
        options["stream"] = producer_stream(stream)
    try:
        try:
            capsule = x.__dlpack__(max_version=MAX_VERSION, **options)
        except TypeError:
            # Producers older than DLPack 1.0 do not know max_version. If the TypeError had another reason, this
            # call meets it again.
            capsule = x.__dlpack__(**options)
    except Exception as error:
        raise _export_error(x, name, "__dlpack__", error) from error
    if not is_capsule(capsule):
        raise TypeError(
            f"{name}: {_type_name(x)}.__dlpack__() returned {_type_name(capsule)}, not a DLPack capsule. Proxies and "
            f"symbolic tensors own no memory. Pass the array that they stand for."
        )
    return capsule


def describe(capsule: object, name: str) -> Description:
    """Read and check an unconsumed capsule without taking it.

    Raises
    ------
    ValueError
        The capsule was consumed before, its major version is not 1 (its deleter is called), or it is malformed.
    UnsupportedError
        Its element type is not one of ``dtypes.DTYPES``.
    """
    kind = _kind_of(capsule)
    if kind is None:
        raise ValueError(
            f"{name}: this DLPack capsule was already consumed. A capsule cannot be consumed multiple times, because "
            f"its memory has one owner. Pass the array itself, or export a new capsule."
        )
    address = _get_pointer(capsule, kind.name)
    managed = kind.struct.from_address(address)
    flags = 0
    if kind.struct is DLManagedTensorVersioned:
        if managed.major != MAX_VERSION[0]:
            found = f"{managed.major}.{managed.minor}"
            discard(capsule)
            raise ValueError(
                f"{name}: the producer sent DLPack version {found} although {MAX_VERSION[0]}.{MAX_VERSION[1]} was the "
                f"maximum asked for. The layout of another major version is unknown here. Update the producer, or "
                f"convert with numpy, torch or cupy first."
            )
        flags = managed.flags
    tensor = managed.dl_tensor

    ndim = tensor.ndim
    if not 0 <= ndim <= _MAX_NDIM or (ndim and not tensor.shape):
        raise ValueError(f"{name}: malformed DLPack tensor, ndim is {ndim} (0 to {_MAX_NDIM}, with a shape array).")
    shape = tuple(tensor.shape[:ndim]) if ndim else ()
    if any(size < 0 for size in shape):
        raise ValueError(f"{name}: malformed DLPack tensor, shape is {shape}: sizes are at least 0.")
    # NULL strides mean row-major and compact (allowed up to DLPack 1.1).
    strides = tuple(tensor.strides[:ndim]) if ndim and tensor.strides else compact_strides(shape)
    data = tensor.data or 0
    if not data and math.prod(shape):
        raise ValueError(f"{name}: malformed DLPack tensor, shape {shape} without memory (data is NULL).")
    return Description(
        ptr=data + tensor.byte_offset if data else 0,
        shape=shape,
        strides=strides,
        dtype=_dtype_name(tensor.dtype, name),
        device_type=tensor.device.device_type,
        device_id=tensor.device.device_id,
        readonly=bool(flags & FLAG_READ_ONLY),
        copied=bool(flags & FLAG_IS_COPIED),
    )


def take(capsule: object) -> Owner:
    """Consume the capsule: from here the returned owner decides when the producer's deleter runs.

    The finalizer is armed before the rename and looks at the name when it runs, so an interrupt between the two
    statements neither leaks nor frees twice.
    """
    kind = _kind_of(capsule)
    if kind is None:
        raise ValueError("this DLPack capsule was already consumed and cannot be consumed multiple times")
    owner = Owner()
    # At interpreter exit the operating system takes the memory back; a deleter of a half-dismantled framework, or of
    # one whose CUDA context is gone, must not run then.
    weakref.finalize(owner, _release, capsule, kind).atexit = False
    _set_name(capsule, kind.used)
    return owner


def discard(capsule: object) -> None:
    """Consume the capsule and call its deleter now. Does nothing to a consumed capsule.

    Leaving a refused capsule to the garbage collector would tie the memory to the traceback of the error.
    """
    kind = _kind_of(capsule)
    if kind is not None:
        _set_name(capsule, kind.used)
        _release(capsule, kind)


def compact_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a tensor without gaps."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# Operands that may have a type that attention is not computed in.
_NOT_COMPUTED_WITH: Final = {
    row.name: " and ".join("the dtype of q," if dtype == "q" else dtype for dtype in row.dtypes)
    for row in OPERANDS.values()
    if not set(row.dtypes) <= set(OPERANDS)
} | {"rng seed": "int64", "rng offset": "int64"}


def unsupported_dtype(name: str, found: str) -> ValueError:
    """The one refusal of an element type that the package does not know, of the kind that a known one gets."""
    if name in _NOT_COMPUTED_WITH:
        return ValueError(f"{name}: dtype {found}. Accepted: {_NOT_COMPUTED_WITH[name]}. Convert it first.")
    return UnsupportedError(
        f"{name}: dtype {found} is not supported. Accepted: {', '.join(ATTENTION_DTYPES)} for q, k, v and their "
        f"gradients; those of q or float32 for bias; bool and uint8 for mask; int32 for cu_seqlens and seqused_k; "
        f"int64 for random state. Convert it first. See help(nvrtc_attn.attention)."
    )


def _dtype_name(dtype: DLDataType, name: str) -> str:
    known = FROM_DLPACK.get((dtype.code, dtype.bits))
    if known is None or dtype.lanes != 1:
        family = _CODE_NAMES.get(dtype.code, "unknown family")
        lanes = f", {dtype.lanes} lanes" if dtype.lanes != 1 else ""
        raise unsupported_dtype(name, f"{family} (DLPack code {dtype.code}, {dtype.bits} bits{lanes})")
    return known


def _kind_of(capsule: object) -> _Kind | None:
    for kind in _KINDS:
        if _is_valid(capsule, kind.name):
            return kind
    return None


def _release(capsule: object, kind: _Kind) -> None:
    """Pay the one deleter call. A capsule without the used name still belongs to its own destructor."""
    if not _is_valid(capsule, kind.used):
        return
    address = _get_pointer(capsule, kind.used)
    deleter = kind.struct.from_address(address).deleter
    if deleter:
        call: Callable[[int], None] = _DELETER(deleter)
        call(address)


def _export_error(x: object, name: str, method: str, error: Exception) -> Exception:
    return ValueError(
        f"{name}: {_type_name(x)}.{method}() failed with {type(error).__name__}: {error}. The memory of this object "
        f"cannot be shared as it is. Pass a plain, strided array on one device."
    )


def _type_name(x: object) -> str:
    cls = type(x)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
