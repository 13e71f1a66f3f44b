"""Attention, forward and backward, from any framework's tensors, on kernels compiled at run time with NVRTC.

Importing costs nothing: no framework, no CUDA library and no file is touched before the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base.errors import CacheWarning, CompileError, CudaError, DeviceFaultError, UnsupportedError
from .base.version import __version__

if TYPE_CHECKING:
    from .api import (
        attention,
        attention_backward,
        attention_forward,
        backward_workspace_bytes,
        dropout_keep_mask,
        forward_workspace_bytes,
    )
    from .front.part import Part
    from .runtime.buffers import to_device

__all__ = [
    "CacheWarning",
    "CompileError",
    "CudaError",
    "DeviceFaultError",
    "Part",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_backward",
    "attention_forward",
    "backward_workspace_bytes",
    "dropout_keep_mask",
    "forward_workspace_bytes",
    "to_device",
]

_API = ("Part", *(name for name in __all__ if name[0].islower()))


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api
    from .runtime import buffers

    value = globals()[name] = getattr(buffers if name == "to_device" else api, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
