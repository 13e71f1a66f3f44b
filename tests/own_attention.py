"""Results of whole models, judged by those of the same model with its own attention in float32.

Whoever imports this is skipped where torch is not installed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

# Of the largest element of a tensor: what may be lost where the model's own attention happens to lose nothing.
_FLOOR = {torch.float32: 5e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
CANCELLING = 0.25
"""A floor for gradients beside keys and values that are much the same: the backward pass takes rowsum(dO * O) of
rounded rows, one error for all keys of a row, where attention with P in memory has one of its own for each. Cross
attention of Whisper on noise in bfloat16: up to 0.17 of the largest gradient, and 0.03 in eager attention."""


def in_dtype(model: Any, given: Mapping[str, Any], dtype: Any, device: str = "cuda") -> tuple[Any, dict[str, Any]]:
    """A copy of the model with weights of a dtype, and its arguments. Buffers (frequencies of positions) stay."""
    made = copy.deepcopy(model).to(dtype).to(device)
    for module, original in zip(made.modules(), model.modules(), strict=True):
        for name, x in original._buffers.items():
            if x is not None and x.is_floating_point():
                module._buffers[name] = x.to(device)
    moved = {
        name: x.to(device, dtype if x.is_floating_point() else None) if isinstance(x, torch.Tensor) else x
        for name, x in given.items()
    }
    return made, moved


def check_beside_float32(
    ours: Mapping[str, Any], same: Mapping[str, Any], exact: Mapping[str, Any], dtype: Any, floor: float | None = None
) -> float:
    """No tensor is further from ``exact`` than four times what the model's own attention in ``dtype`` is.

    Returns the largest difference of ``out``. Four, not two as for a kernel alone: later layers amplify errors.
    float64 is no truth here: masks of float64 are infinite in the float32 of the models' own softmax.
    """
    assert ours.keys() == same.keys() == exact.keys()
    largest = max(float(x.abs().max()) for name, x in exact.items() if name != "out")
    floor = _FLOOR[dtype] if floor is None else floor
    lines = []
    for name, truth in exact.items():
        wanted, theirs, found = (x.detach().double() for x in (truth, same[name], ours[name]))
        assert found.shape == wanted.shape, name
        scale = max(float(wanted.abs().max()), 1e-2 * largest)  # gradients of biases of keys are 0 but for rounding
        allowed = 4 * float((theirs - wanted).abs().max()) + floor * scale
        error = float((found - wanted).abs().max())
        if not error <= allowed:  # NaN is not
            lines.append(f"{name}: max error {error:.3e}, allowed {allowed:.3e}")
    assert not lines, "\n".join(lines)
    return float((ours["out"].double() - exact["out"].double()).abs().max())


def weighted_sum(out: Any) -> Any:
    """A number to derive. Its weights change from element to element: a layer norm would hide slow ones."""
    weight = torch.sin(torch.arange(out.numel(), dtype=torch.float64))
    return (out * weight.to(out.device, out.dtype).view(out.shape)).sum()
