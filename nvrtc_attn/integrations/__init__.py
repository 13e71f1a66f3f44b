"""Adapters to model libraries, one module each. None is imported unless asked for, and none imports another.

`flash_attn`, `xformers` and `evoformer` offer the functions of these packages under their own signatures, `flax` an
``attention_fn``; `transformers`, `diffusers` and `comfyui` have a ``register()`` that makes ``"nvrtc_attn"`` a name the
library knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


def mask_reasons(name: str, mask: torch.Tensor | None) -> list[str]:
    """What stands against a mask that is neither boolean nor floating; ``name`` is the caller's argument.

    Added to the scores, ones and zeros would hide nothing. torch's attention refuses them, too.
    """
    import torch  # not above: flax's module needs none

    if mask is None or mask.dtype == torch.bool or mask.is_floating_point():
        return []
    reason = f"{name}: dtype {mask.dtype}. It is bool, True keeps the key, or floating, added to the scores."
    return [f"{reason} Of ones and zeros: {name}.bool()."]


def refuse(what: str, reasons: Sequence[str]) -> None:
    """Raise for ``what``, such as ``"call of flax"``, if there are reasons against it: with every one.

    Raises
    ------
    UnsupportedError
        ``reasons`` are not empty.
    """
    if reasons:
        raise UnsupportedError(f"nvrtc_attn does not compute this {what}.", reasons)
