"""Results and workspaces of calls that bring none: uninitialised arrays of the framework whose arrays they bring."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from ..front.tensorview import Device


def allocate(like: Any, framework: str, shape: tuple[int, ...], dtype: str, device: Device, stream: int) -> Any:
    """An uninitialised row-major array of the framework that made ``like``, on ``device``, for work on ``stream``.

    Raises
    ------
    TypeError
        The framework is not known: the caller must pass the outputs.
    """
    if framework == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    if framework == "cupy":
        cupy = sys.modules["cupy"]
        if cupy.cuda.runtime.getDevice() == device.index:
            return cupy.empty(shape, dtype=_numpy_dtype(dtype))
        with cupy.cuda.Device(device.index):
            return cupy.empty(shape, dtype=_numpy_dtype(dtype))
    if framework == "numpy":
        return np.empty(shape, dtype=_numpy_dtype(dtype))
    if framework == "jax":
        from .buffers import DeviceBuffer, HostBuffer

        return DeviceBuffer(shape, dtype, device.index, stream) if device.type == "cuda" else HostBuffer(shape, dtype)
    raise TypeError(
        f"out: cannot allocate an output for a {type(like).__module__}.{type(like).__qualname__}. Known are torch, "
        f"CuPy, JAX and NumPy. Pass out, or all outputs to nvrtc_attn.attention_forward and attention_backward."
    )


def _numpy_dtype(dtype: str) -> Any:
    if dtype != "bfloat16":
        return np.dtype(dtype)
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError(
            "out: NumPy has no bfloat16 of its own. Install ml_dtypes, or use float16 or float32 arrays."
        ) from None
    return np.dtype(bfloat16)


@functools.cache
def _of_torch() -> tuple[Any, Any]:
    """What inductor's programs allocate with on the current GPU, and that GPU's index; None where torch lacks one.

    Several microseconds less than `torch.empty_strided`. As in `nvrtc_attn.torch.tensors`, where torch is imported.
    """
    torch = sys.modules["torch"]
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    found = getattr(guards, "_empty_strided_cuda", None), getattr(torch._C, "_cuda_getDevice", None)
    return found if None not in found else (None, None)


def allocate_again(
    framework: str, like: Any, index: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str
) -> tuple[Any, int]:
    """An uninitialised array of torch or CuPy on a GPU, and its address."""
    if framework == "torch":
        torch = sys.modules["torch"]
        empty_on_current, current_device = _of_torch()
        if empty_on_current is not None and current_device() == index:
            x = empty_on_current(shape, strides, getattr(torch, dtype))
        else:
            x = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=like.device)
        return x, x.data_ptr()
    x = allocate(like, framework, shape, dtype, Device("cuda", index), 0)
    return x, x.data.ptr


def address_of(framework: str, x: Any) -> int:
    """Of an array of torch or CuPy."""
    return int(x.data_ptr() if framework == "torch" else x.data.ptr)
