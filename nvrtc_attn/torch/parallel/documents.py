"""Lengths of packed sequences that the host must know: read from where they are, checked, and remembered."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...base.errors import UnsupportedError, shown
from ...base.log import LOGGER
from ...front.call import CallOptions
from ...front.documents import Packing
from ...front.validation import Violations, check_lengths, check_window

_read: Any = WeakTensorKeyDictionary()
"""Tensor on a GPU -> (its version, its values), for as long as the tensor lives."""


def as_tensor(name: str, x: Any) -> torch.Tensor | None:
    """cu_seqlens as a tensor, where it is; of a list or an array one on the CPU."""
    if x is None or isinstance(x, torch.Tensor):
        return x
    return torch.from_numpy(_integers(name, x).astype(np.int32))


def _integers(name: str, x: Any) -> np.ndarray[Any, Any]:
    """A list or an array of cumulated lengths."""
    try:
        found = np.asarray(x)
    except (TypeError, ValueError):
        found = np.asarray(None)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
        raise TypeError(
            f"{name}: got {shown(x)} of type {type(x).__name__}. It is a tensor, an array or a list of integers, one "
            "more than there are sequences."
        )
    if found.max() >= 2**31:
        raise ValueError(f"{name}: got {found.max()}. Offsets are less than 2**31.")
    return found


def values_of(name: str, x: Any) -> tuple[int, ...]:
    """The values on the host. Those of a tensor on a GPU are read once, as long as torch counts no write to it.

    Writes that go past torch (kernels of others on its memory) are not counted: pass lengths on the CPU then.
    """
    if not isinstance(x, torch.Tensor):
        return tuple(int(y) for y in _integers(name, x))
    if x.device.type == "cpu":
        return tuple(int(y) for y in _integers(name, x.numpy()))
    version = None if x.is_inference() else x._version
    known = _read.get(x)
    if known is not None and version is not None and known[0] == version:
        return tuple(known[1])
    LOGGER.info(
        "%s is on %s, and ranks that share its sequences need it on the host: waiting for the GPU.", name, x.device
    )
    found = tuple(int(y) for y in _integers(name, x.cpu().numpy()))
    if version is not None:
        _read[x] = version, found
    return found


def lengths_of(name: str, x: Any, tokens: int, longest: int | None = None) -> tuple[int, ...]:
    """`values_of`, checked.

    Raises
    ------
    TypeError, ValueError
        No cumulated lengths of sequences of at most ``longest`` among so many tokens.
    """
    values = values_of(name, x)
    of_q = np.asarray(values)
    faults = check_lengths(of_q, None, None, total_q=tokens, total_k=None, max_seqlen_q=longest, max_seqlen_k=None)
    if faults:
        raise ValueError(" ".join(faults).replace("cu_seqlens_q", name))
    return values


def packing_of(starts_q: Any, starts_k: Any, options: CallOptions, tokens: int) -> Packing:
    """The documents of a call whose tokens ranks share.

    Raises
    ------
    UnsupportedError
        Queries and keys that are not the same tokens, or whose dropout index does not count by one length.
    """
    starts = lengths_of("cu_seqlens_q", starts_q, tokens, options.max_seqlen_q)
    if starts_k is not starts_q and starts != lengths_of("cu_seqlens_k", starts_k, tokens, options.max_seqlen_k):
        raise UnsupportedError(
            "cu_seqlens_k: differs from cu_seqlens_q. Sequences whose queries and keys are not the same tokens are "
            "computed by strategy 'ulysses'."
        )
    if options.dropout_p > 0 and options.max_seqlen_q != options.max_seqlen_k:
        raise UnsupportedError(
            f"max_seqlen_q, max_seqlen_k: got {options.max_seqlen_q} and {options.max_seqlen_k} with dropout, whose "
            "index counts by both. Pass one length, or strategy='ulysses'."
        )
    left, right = check_window(Violations(), options.causal, options.window_size)
    return Packing(starts, left, right)
