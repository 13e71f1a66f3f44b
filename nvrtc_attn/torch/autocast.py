"""What ``torch.autocast`` makes of the tensors of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def is_autocast(x: torch.Tensor) -> bool:
    """Whether autocast is on for attention on the device of ``x``."""
    device = x.device.type
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def cast_for_autocast(q: Any, k: Any, v: Any, bias: Any) -> tuple[Any, Any, Any, Any]:
    """q, k, v and a floating bias as `scaled_dot_product_attention` gets them under ``torch.autocast``."""
    if not isinstance(q, torch.Tensor):
        return q, k, v, bias  # refused later
    if not is_autocast(q):
        return q, k, v, bias
    device = q.device.type
    dtype = torch.get_autocast_dtype(device)
    return _cast(q, device, dtype), _cast(k, device, dtype), _cast(v, device, dtype), _cast(bias, device, dtype)


def cast_further_for_autocast(q: Any, further: Mapping[str, Any]) -> Any:
    """``further``, where autocast is on: what may be of q's type or float32 stays in float32 or becomes as q is."""
    if not further or not isinstance(q, torch.Tensor) or not torch.is_autocast_enabled(q.device.type):
        return further
    return {
        name: x.to(q.dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float32 else x
        for name, x in further.items()
    }


def _cast(x: Any, device: str, dtype: torch.dtype) -> Any:
    """Autocast's own rule: floating tensors of its device, float64 left alone."""
    if not isinstance(x, torch.Tensor) or x.device.type != device:
        return x
    return x.to(dtype) if x.is_floating_point() and x.dtype not in (dtype, torch.float64) else x
