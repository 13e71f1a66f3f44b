"""What the torch adapters ask of a tensor and of its device: a signature, a plain face, the current stream."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

_raw_stream: Final = torch._C._cuda_getCurrentRawStream if hasattr(torch._C, "_cuda_getCurrentRawStream") else None
_MAX_ENTRIES: Final = 4096
_table_lock = threading.Lock()


def raw_stream(device: torch.device) -> int:
    """Handle of torch's current stream on ``device``."""
    if _raw_stream is not None:
        handle: int = _raw_stream(device.index)
        return handle
    return int(torch.cuda.current_stream(device).cuda_stream)


def detached(x: Any) -> Any:
    """A tensor without its autograd history; anything else as it is, for validation to name."""
    return x.detach() if isinstance(x, torch.Tensor) else x


def resolved(x: Any) -> Any:
    """The tensor with the sign of a lazily negated view applied; anything else as it is."""
    return x.resolve_neg() if isinstance(x, torch.Tensor) else x


def signature(x: Any) -> Any:
    """What of a tensor decides the kernel: everything but the address beyond its alignment."""
    if x is None:
        return None
    try:
        return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, x.is_neg()
    except (AttributeError, RuntimeError, TypeError):
        return type(x), id(x)  # not a plain tensor: refused on the way to a plan, so nothing is remembered of it


def remember(table: dict[Any, Any], key: Any, value: Any) -> Any:
    """``value``, which a table of bounded size has from now on under ``key``."""
    with _table_lock:
        while len(table) >= _MAX_ENTRIES:
            del table[next(iter(table))]
        table[key] = value
    return value
