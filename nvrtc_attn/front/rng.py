"""The state of the generator as callers give it, a number or a tensor, and as the kernels take it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.errors import shown
from . import philox
from .philox import RngState
from .tensors import Device, as_numpy, view


def rng_state(rng: Any, where: Device, producer_stream: int | None) -> RngState:
    """``rng`` of the public functions as the kernels take it.

    Values on the CPU are read now, values on the GPU ``where`` by the kernel. Signed 64-bit holders are read as
    unsigned. One value instead of a pair is the seed, of offset 0.

    Raises
    ------
    TypeError, ValueError
        Anything but None, an int, a tensor that holds one int64 on the CPU or on ``where``, or a pair of these.
    """
    if isinstance(rng, RngState):
        return rng
    if rng is None:
        return philox.normalise_rng(None)
    if not isinstance(rng, (tuple, list)) or len(rng) != 2:
        numbers: Any = rng if isinstance(rng, (int, np.integer, tuple, list)) else None
        rng = (rng, 0) if numbers is None else philox.normalise_rng(numbers)[:2]
    words, addresses = [0, 0], [0, 0]
    owners: list[Any] = [None, None]
    for index, (x, name) in enumerate(zip(rng, ("rng seed", "rng offset"), strict=True)):
        if isinstance(x, (int, np.integer)):
            words[index] = philox.check_word(name, x)
            continue
        if not hasattr(x, "__dlpack__"):
            raise TypeError(
                f"{name}: got {shown(x)} of type {type(x).__name__}. rng is None, a seed or a pair (seed, offset), "
                f"each an int, or a tensor that holds one int64. Of a generator, pass a number that it draws."
            )
        word = view(x, name, stream=producer_stream)
        if word.dtype not in ("int64", "uint64") or any(n != 1 for n in word.shape):
            raise ValueError(
                f"{name}: got {word.dtype} of shape {word.shape}. A tensor must hold one int64: pass that, or an int."
            )
        if word.device.type == "cpu":
            words[index] = int(as_numpy(word).reshape(())) & (2**64 - 1)
        elif word.device == where:
            addresses[index] = word.ptr
            owners[index] = word
        else:
            raise ValueError(f"{name}: on {word.device}, but q is on {where}. Pass it on {where}, or as an int.")
    return RngState(words[0], words[1], addresses[0], addresses[1], tuple(owners))
