"""Attention, forward and backward, from any framework's tensors, on kernels compiled at run time with NVRTC.

Importing costs nothing: no framework, no CUDA library and no file is touched before the first call.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from .base.errors import CacheWarning, CompileError, CudaError, DeviceFaultError, TraceError, UnsupportedError
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
    from .modifiers.blocks import block_mask
    from .modifiers.cuda_function import cuda_function
    from .modifiers.modifier import Modifier
    from .modifiers.proxy import where
    from .modifiers.trace import trace
    from .runtime.buffers import to_device

__all__ = [
    "CacheWarning",
    "CompileError",
    "CudaError",
    "DeviceFaultError",
    "Modifier",
    "Part",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_backward",
    "attention_forward",
    "backward_workspace_bytes",
    "block_mask",
    "cuda_function",
    "dropout_keep_mask",
    "forward_workspace_bytes",
    "to_device",
    "trace",
    "where",
]

_MODULES = {
    "to_device": "runtime.buffers",
    "block_mask": "modifiers.blocks",
    "cuda_function": "modifiers.cuda_function",
    "Modifier": "modifiers.modifier",
    "Part": "front.part",
    "trace": "modifiers.trace",
    "where": "modifiers.proxy",
}
_DOORS = ("aten", "cupy", "integrations", "jax", "torch")
"""Public modules that are imported on request, each with its framework."""
_API = (*(name for name in __all__ if name[0].islower()), "Modifier", "Part")


def __getattr__(name: str) -> Any:
    if name not in _API:
        request = f". It is a module of its own: import {__name__}.{name}" if name in _DOORS else ""
        message = f"module {__name__!r} has no attribute {name!r}{request}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])  # Python says which name is meant
    from importlib import import_module

    module = import_module(f".{_MODULES.get(name, 'api')}", __name__)
    if name == "attention":
        module.connect_jax(lambda: import_module(".jax.repeated", __name__).attend)
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    """What a user may want: not the names that this file needs, nor the inside of the package."""
    return sorted({*__all__, *_DOORS, *(name for name in globals() if name.startswith("__"))})
