"""The rules about the options of a call and about values of lengths, and the one exception that all rules end in.

A message says what was given, what is accepted and why, and the nearest thing that works. Nothing here raises before
all rules were tried, those about tensors (``operand_checks``) among them.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np

from ..base.errors import UnsupportedError, shown

FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
FLOAT32_TINY: Final = float(np.finfo(np.float32).tiny)
"""Smallest normal number. Kernels divide the scale by the softcap: below this the quotient is no number any more."""
MAX_SCALE: Final = FLOAT32_MAX * math.log(2)
"""Kernels work in base 2 and multiply the scale by ``log2(e)``, in float32."""
# Sizes and windows are 32-bit in the kernels' parameters (strides and offsets are 64-bit).
MAX_SIZE: Final = 2**31 - 1
_CAUSAL: Final = (False, True, "bottom_right", "top_left")
# The names of a softmax scale -> what the function that calls it so calls q.
_SCALED: Final = {"softmax_scale": "q", "scale": "query"}
_POINTER: Final = "See help(nvrtc_attn.attention)."


class Violations:
    """Everything that is wrong with a call, in the order of the checks."""

    def __init__(self) -> None:
        self.found: list[tuple[type[Exception], str]] = []

    def kind(self, message: str) -> None:
        self.found.append((TypeError, message))

    def value(self, message: str) -> None:
        self.found.append((ValueError, message))

    def unsupported(self, message: str) -> None:
        self.found.append((UnsupportedError, message))

    def stop(self) -> None:
        """Raise one exception for everything found so far: the strongest kind, every message."""
        if not self.found:
            return
        messages = [message for _, message in self.found]
        for kind in (TypeError, ValueError):
            if any(error is kind for error, _ in self.found):
                text = messages[0] if len(messages) == 1 else "\n  - ".join(["invalid arguments:", *messages])
                raise kind(f"{text}\n{_POINTER}")
        raise UnsupportedError(f"no kernel computes this attention. {_POINTER}", messages)


def check_lengths(
    cu_seqlens_q: np.ndarray[Any, Any] | None,
    cu_seqlens_k: np.ndarray[Any, Any] | None,
    seqused_k: np.ndarray[Any, Any] | None,
    *,
    total_q: int | None,
    total_k: int | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> list[str]:
    """What is wrong with the values of packed lengths, in host memory; ``None`` skips the rules that need it.

    A first value above 0 and a last one below the number of tokens are right: tokens outside every sequence get zeros.
    """
    faults: list[str] = []
    for side, offsets, total, longest in (
        ("q", cu_seqlens_q, total_q, max_seqlen_q),
        ("k", cu_seqlens_k, total_k, max_seqlen_k),
    ):
        if offsets is None or not offsets.size:
            continue
        name = f"cu_seqlens_{side}"
        values = offsets.astype(np.int64)
        lengths = np.diff(values)
        if values[0] < 0:
            faults.append(f"{name}: element 0 is {values[0]}. Offsets count tokens from 0.")
        if (lengths < 0).any():
            at = int(np.argmax(lengths < 0))
            faults.append(
                f"{name}: decreases from {values[at]} to {values[at + 1]} at element {at + 1}. It is the cumulative "
                f"sum of the lengths, with a leading 0."
            )
        if total is not None and values[-1] > total:
            faults.append(f"{name}: its last element is {values[-1]}, but there are {total} tokens (dim 1 of {side}).")
        if longest is not None and lengths.size and lengths.max() > longest:
            faults.append(
                f"max_seqlen_{side}: got {longest}, but sequence {int(np.argmax(lengths))} of {name} has "
                f"{lengths.max()} tokens. Pass at least {lengths.max()}."
            )
    if seqused_k is not None:
        used = seqused_k.astype(np.int64)
        slots, bounded_by = None, ""
        if cu_seqlens_k is not None and cu_seqlens_k.size == used.size + 1:
            slots, bounded_by = np.diff(cu_seqlens_k.astype(np.int64)), "the length of sequence {} in cu_seqlens_k"
        elif cu_seqlens_k is None and total_k is not None:
            slots, bounded_by = np.full(used.size, total_k), "the keys of batch entry {}"
        wrong = (used < 0) if slots is None else (used < 0) | (used > slots)
        if wrong.any():
            at = int(np.argmax(wrong))
            bound = "" if slots is None else f" and at most {slots[at]}, {bounded_by.format(at)}"
            faults.append(f"seqused_k: element {at} is {used[at]}. It is at least 0{bound}.")
    return faults


def check_window(found: Violations, causal: object, window_size: object) -> tuple[int | None, int | None]:
    """The bounds of the band, ``None`` = unbounded; causal is a right bound of 0."""
    if not isinstance(causal, bool | np.bool_ | str):
        found.kind(
            f"causal: got {shown(causal)} of type {type(causal).__name__}. Accepted: {', '.join(map(repr, _CAUSAL))}."
        )
    elif isinstance(causal, str) and causal not in _CAUSAL:
        found.value(f"causal: got {shown(causal)}. Accepted: {', '.join(map(repr, _CAUSAL))} (True is 'bottom_right').")
    bounds: list[int | None] = [None, None]
    if window_size is not None:
        if isinstance(window_size, str | bytes | bytearray) or not isinstance(window_size, Sequence):
            found.kind(
                f"window_size: got {shown(window_size)} of type {type(window_size).__name__}. It is a pair "
                f"(left, right), each an integer or None. The last W keys of a causal problem are (W - 1, 0)."
            )
        elif len(window_size) != 2:
            found.value(
                f"window_size: got {shown(window_size)}. It is a pair (left, right); (None, None) is no window."
            )
        else:
            for i, side in enumerate(("left", "right")):
                bound = check_integer(found, f"window_size {side}", window_size[i])
                if bound is not None and bound < -1:
                    found.value(
                        f"window_size: got {shown(tuple(window_size))}, {side} bound {shown(bound)}. A bound is at "
                        f"least 0, and None or -1 means unbounded."
                    )
                bounds[i] = None if bound == -1 else bound
    left, right = bounds
    if isinstance(causal, str) or causal is True or (isinstance(causal, np.bool_) and causal):
        right = 0 if right is None else min(right, 0)
    return left, right


def check_flag(found: Violations, name: str, flag: object) -> bool:
    """A ``bool`` of Python or NumPy, as Python's."""
    if not isinstance(flag, bool | np.bool_):
        found.kind(f"{name}: got {shown(flag)} of type {type(flag).__name__}. It is True or False.")
        return False
    return bool(flag)


def check_integer(found: Violations, name: str, value: object) -> int | None:
    """An integer of any library (also a tensor with one integer, which is read), or ``None``."""
    if value is None:
        return None
    try:
        if isinstance(value, bool | np.bool_) or str(getattr(value, "dtype", "")).endswith("bool"):
            raise TypeError
        return operator.index(cast("Any", value))
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements, of torch
        found.kind(f"{name}: got {shown(value)} of type {type(value).__name__}. It is an integer or None.")
        return None


def check_shape(found: Violations, shape: object) -> tuple[int, int, int, int]:
    """``shape`` of a problem's scores, as integers."""
    names = ("batch", "num_heads", "seqlen_q", "seqlen_k")
    if isinstance(shape, str | bytes | bytearray) or not isinstance(shape, Sequence):
        found.kind(f"shape: got {shown(shape)} of type {type(shape).__name__}. It is a tuple ({', '.join(names)}).")
        return 0, 0, 0, 0
    if len(shape) != 4:
        found.value(f"shape: got {shown(shape)}. It is a tuple of four, ({', '.join(names)}).")
        return 0, 0, 0, 0
    sizes = []
    for name, given in zip(names, shape, strict=True):
        if given is None:
            found.kind(f"shape: {name} is None. It is an integer.")
        size = check_integer(found, f"shape, {name}", given) or 0
        if not 0 <= size <= MAX_SIZE:
            found.value(f"shape: {name} is {shown(size)}. It is from 0 to {MAX_SIZE}.")
        sizes.append(size)
    return sizes[0], sizes[1], sizes[2], sizes[3]


def check_real(found: Violations, name: str, value: object, low: float, high: float, accepted: str) -> float | None:
    """A number in ``[low, high]``; ``None`` where that means the default."""
    if value is None and name != "dropout_p":
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        advice = ""
        if name in _SCALED and hasattr(value, "dtype"):
            advice = f" One that is computed or learned: multiply {_SCALED[name]} by it, and pass {name}=1.0."
        found.kind(
            f"{name}: got {shown(value)} of type {type(value).__name__}. It is a Python or NumPy real number.{advice}"
        )
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction beyond float64
        number = -math.inf if cast("Any", value) < 0 else math.inf
    if not low <= number <= high:  # NaN too
        found.value(f"{name}: got {shown(value)}. It is {accepted}.")
        return None
    return number


def refuse_scale(scale: object) -> None:
    """Refuse a softmax scale that no call takes, by the name that functions of other libraries' signatures give it.

    Raises
    ------
    TypeError
        It is no real number of Python or NumPy.
    ValueError
        It is not finite in float32.
    """
    found = Violations()
    _check_scale(found, "scale", scale)
    found.stop()


def _check_scale(found: Violations, name: str, scale: object) -> float | None:
    accepted = f"finite in float32, at most {MAX_SCALE:.3g} in magnitude"
    return check_real(found, name, scale, -MAX_SCALE, MAX_SCALE, accepted)


def check_scale_and_softcap(
    found: Violations, softmax_scale: object, softcap: object, head_dim: int
) -> tuple[float, float]:
    """Both as the kernels get them, in float32: a scale that rounds to 0 there is 0, a softcap is a normal number."""
    scale = _check_scale(found, "softmax_scale", softmax_scale)
    if scale is None:
        scale = 1.0 / math.sqrt(max(head_dim, 1))
    elif abs(scale) <= 2.0**-150:
        scale = 0.0
    accepted = f"0 (none), or positive and a normal number of float32, from {FLOAT32_TINY:.3g} to {FLOAT32_MAX:.3g}"
    cap = check_real(found, "softcap", softcap, 0.0, FLOAT32_MAX, accepted) or 0.0
    if 0 < cap < FLOAT32_TINY:
        found.value(f"softcap: got {shown(softcap)}. It is {accepted}.")
    elif cap and abs(scale) / cap > FLOAT32_MAX:
        found.value(
            f"softcap: got {shown(softcap)} with softmax_scale {scale:.3g}. Their quotient, {abs(scale) / cap:.3g}, "
            f"must be finite in float32. Scores are at most the softcap: one so small makes all of them equal."
        )
    return scale, cap
