"""The checks behind :func:`nvrtc_attn.front.problem.build_problem`: every rule about a call, with its message.

A message says what was given, what is accepted and why, and the nearest thing that works. Nothing here raises before
all rules were tried, except that rules about axes need tensors of the right rank.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np

from ..base.dtypes import ATTENTION_DTYPES
from ..base.errors import UnsupportedError, shown
from .operands import OPERANDS, OPTIONAL_INPUTS, dtypes_of, shape_of
from .tensorview import Device, TensorView, as_numpy

MAX_HEAD_DIM: Final = 512
"""Largest head dim of the GPU kernels: their widest tile. The CPU path has no limit."""
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


def check_dtypes(found: Violations, tensors: dict[str, TensorView]) -> None:
    """q, k, v alike and computable; the others as the kernels read them."""
    q, k, v = (tensors[name].dtype for name in "qkv")
    if q not in ATTENTION_DTYPES:
        found.unsupported(f"q: dtype {q}. Accepted: {', '.join(ATTENTION_DTYPES)}. Convert q, k and v first.")
    if not q == k == v:
        common = next((x for x in (q, k, v) if x in ATTENTION_DTYPES), None)
        advice = "" if common is None else f" Convert all to {common}." if common != q else f" Convert k and v to {q}."
        found.value(f"q, k, v: dtypes {q}, {k}, {v} differ. They must be the same.{advice}")
    for name in OPTIONAL_INPUTS:
        dtypes = dtypes_of(name, {"q": q})
        if name in tensors and tensors[name].dtype not in dtypes:
            given = tensors[name]
            advice = f"Convert it to {dtypes[0]}."
            # Converting would change the meaning: True is 1, and a score of 0 is False.
            if name == "mask" and given.dtype in ATTENTION_DTYPES:
                advice = "What is added to the scores is passed as bias=. Of ones and zeros: convert it to bool."
            elif name == "bias" and given.dtype == "bool":
                advice = "What says which keys to keep is passed as mask=."
            found.value(
                f"{name}: dtype {given.dtype} of shape {given.shape}. Accepted: {' or '.join(dtypes)}. {advice}"
            )


def check_devices(found: Violations, tensors: dict[str, TensorView]) -> None:
    """One device for everything."""
    devices: dict[Device, list[str]] = {}
    for name, tensor in tensors.items():
        devices.setdefault(tensor.device, []).append(name)
    if len(devices) > 1:
        places = "; ".join(f"{', '.join(names)} on {device}" for device, names in devices.items())
        found.value(
            f"{', '.join(tensors)}: on {len(devices)} devices ({places}). All tensors of a call are on one device. "
            f"Move them to {tensors['q'].device}."
        )


def check_ranks(found: Violations, tensors: dict[str, TensorView]) -> bool:
    """Whether q, k and v can be indexed by axis; reports every tensor of the wrong rank or of an impossible size."""
    fit = True
    for name, tensor in tensors.items():
        row = OPERANDS[name]
        expected = f"[{', '.join(f'{axis} or 1' if row.broadcast else axis for axis in row.axes)}]"
        rank = len(row.axes)
        if len(tensor.shape) != rank:
            advice = "Reshape it (batch 1 for packed sequences)." if name in ("q", "k", "v") else "Reshape it."
            if row.broadcast:
                advice = (
                    "Add dims of size 1: [seqlen_q, seqlen_k] is x[None, None], [batch, seqlen_k] x[:, None, None]."
                )
            found.value(
                f"{name}: shape {tensor.shape} has rank {len(tensor.shape)}. Expected rank {rank}, {expected}. {advice}"
            )
            fit = fit and name not in ("q", "k", "v")
        elif max(tensor.shape) > MAX_SIZE:
            found.unsupported(f"{name}: shape {tensor.shape} has a dim above {MAX_SIZE}, the kernels' 32-bit sizes.")
    return fit


def check_shapes(found: Violations, q: TensorView, k: TensorView, v: TensorView, varlen: bool) -> None:
    """How the axes of q, k and v fit together."""
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        found.value(
            f"q, k, v: batch sizes {q.shape[0]}, {k.shape[0]}, {v.shape[0]} differ (dim 0). They must be equal. "
            f"Expand k and v, a stride of 0 is accepted."
        )
    elif varlen and q.shape[0] != 1:
        found.value(
            f"q, k, v: batch size {q.shape[0]} with cu_seqlens. Packed sequences have batch 1 and all tokens on dim 1. "
            f"Reshape q, k and v to [1, tokens, heads, head_dim]."
        )
    if k.shape[1] != v.shape[1]:
        found.value(f"k, v: lengths {k.shape[1]} and {v.shape[1]} differ (dim 1). Every key has one value.")
    num_heads, num_heads_kv = q.shape[2], k.shape[2]
    if num_heads_kv != v.shape[2]:
        found.value(f"k, v: head counts {num_heads_kv} and {v.shape[2]} differ (dim 2). They must be equal.")
    if num_heads % num_heads_kv if num_heads_kv else num_heads:
        nearest = [n for n in range(1, num_heads + 1) if num_heads % n == 0 and n <= max(num_heads_kv, 1)][-1]
        found.value(
            f"k, v: {num_heads_kv} heads do not divide the {num_heads} heads of q (dim 2). Each key head serves "
            f"num_heads / num_heads_kv query heads. The nearest smaller count that does is {nearest}."
            f"{_other_layout(q, k, v)}"
        )
    if q.shape[3] != k.shape[3]:
        found.value(
            f"q, k: head dims {q.shape[3]} and {k.shape[3]} differ (dim 3). Scores are their dot products. "
            f"Only v may have another head dim."
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        head_dim = tensor.shape[3]
        if head_dim == 0:
            found.value(f"{name}: head dim 0 (dim 3 of shape {tensor.shape}). It is at least 1.")
        elif head_dim > MAX_HEAD_DIM and tensor.device.type == "cuda":
            found.unsupported(
                f"{name}: head dim {head_dim} (dim 3). The GPU kernels go up to {MAX_HEAD_DIM}, their widest tile. "
                f"Split the heads, or compute on the CPU."
            )


def _other_layout(q: TensorView, k: TensorView, v: TensorView) -> str:
    """What to do, where the shapes fit together with heads and rows exchanged: the layout of torch's function."""
    heads, heads_kv = q.shape[1], k.shape[1]
    if k.shape[:3] != v.shape[:3] or not 0 < heads_kv <= heads or heads % heads_kv:
        return ""
    if heads_kv >= k.shape[2]:  # keys of one length always divide as heads; there are more keys than heads, mostly
        return ""
    return (
        " These fit together as [batch, heads, seqlen, head_dim]: exchange dims 1 and 2, x.transpose(1, 2) in torch, "
        "x.swapaxes(1, 2) elsewhere, or call nvrtc_attn.torch.scaled_dot_product_attention, which has that layout."
    )


def check_optional(found: Violations, tensors: dict[str, TensorView], varlen: bool) -> None:
    """Shapes of the optional operands against those of q, k and v; lengths of packed sequences are `check_varlen`'s."""
    required = {name: tensors[name].shape for name in "qkv"}
    for name, tensor in tensors.items():
        row = OPERANDS[name]
        if name in required or row.is_lengths:
            continue
        if row.broadcast and varlen:
            found.unsupported(
                f"{name}: shape {tensor.shape} with cu_seqlens. No kernel reads a {name} for packed sequences. "
                f"Pad to a dense batch, or use causal= and window_size=."
            )
        elif len(tensor.shape) == len(row.axes):
            full = shape_of(name, required)
            if row.broadcast:
                if any(size not in (1, limit) for size, limit in zip(tensor.shape, full, strict=True)):
                    found.value(
                        f"{name}: shape {tensor.shape} does not broadcast to [{', '.join(row.axes)}] = {list(full)}. "
                        f"Each dim is full or 1. Slice or unsqueeze it, no need to expand it."
                        f"{_exchanged(tensor, required)}"
                    )
            elif tensor.shape != full:
                found.value(f"{name}: shape {tensor.shape}. Needed is [{', '.join(row.axes)}] = {list(full)}.")
            elif row.dense:
                _check_dense_vector(found, name, tensor)


def _exchanged(tensor: TensorView, required: dict[str, tuple[int, ...]]) -> str:
    """What to do, where a mask or bias fits to q and k with heads and rows exchanged."""
    (batch, heads, rows, _), keys = required["q"], required["k"][2]
    if any(size not in (1, limit) for size, limit in zip(tensor.shape, (batch, heads, rows, keys), strict=True)):
        return ""
    return (
        f" It fits if q, k and v are [batch, heads, seqlen, head_dim]. Here they are read as [batch, seqlen, heads, "
        f"head_dim], so their heads are {rows}: exchange their dims 1 and 2."
    )


def check_varlen(
    found: Violations,
    tensors: dict[str, TensorView],
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    varlen: bool,
    ranks_fit: bool,
) -> tuple[int, int, int]:
    """Number of sequences and the longest query and key sequence of a packed problem."""
    given: dict[str, object] = {"q": max_seqlen_q, "k": max_seqlen_k}
    longest = {side: check_integer(found, f"max_seqlen_{side}", value) for side, value in given.items()}
    if not varlen:
        _check_padded(found, tensors, longest, ranks_fit)
        return 0, 0, 0

    totals = {side: tensors[side].shape[1] if ranks_fit else None for side in "qk"}
    counts = _check_starts(found, tensors, given, longest)
    if len(set(counts.values())) > 1:
        q_len, k_len = (tensors[name].shape[0] for name in counts)
        found.value(
            f"cu_seqlens_q, cu_seqlens_k: lengths {q_len} and {k_len} differ. Both have one element more than there "
            f"are sequences."
        )
    batch = next(iter(counts.values()), 0)
    seqused_k = tensors.get("seqused_k")
    if seqused_k is not None and len(seqused_k.shape) == 1 and counts:
        if seqused_k.shape[0] != batch:
            found.value(f"seqused_k: shape {seqused_k.shape}. There are {batch} sequences, one element for each.")
        else:
            _check_dense_vector(found, "seqused_k", seqused_k)
    # Host values only: reading device memory would wait for the GPU.
    host = {
        name: as_numpy(x)
        for name, x in tensors.items()
        if OPERANDS[name].is_lengths and (x.device.type, x.dtype, len(x.shape)) == ("cpu", "int32", 1)
    }
    for fault in check_lengths(
        host.get("cu_seqlens_q"),
        host.get("cu_seqlens_k"),
        host.get("seqused_k"),
        total_q=totals["q"],
        total_k=totals["k"],
        max_seqlen_q=longest["q"],
        max_seqlen_k=longest["k"],
    ):
        found.value(fault)
    return batch, longest["q"] or 0, longest["k"] or 0


def _check_padded(
    found: Violations, tensors: dict[str, TensorView], longest: dict[str, int | None], ranks_fit: bool
) -> None:
    """The lengths of a call whose sequences are not packed: ``seqused_k`` alone."""
    for side, length in longest.items():
        if length is not None:
            found.value(
                f"max_seqlen_{side}: got {shown(length)} without cu_seqlens. Dense lengths come from the shapes. "
                f"Remove it."
            )
    if "seqused_k" in tensors and ranks_fit:
        used, (batch, columns) = tensors["seqused_k"], tensors["k"].shape[:2]
        if used.shape[0] != batch:
            found.value(f"seqused_k: shape {used.shape}. The batch is {batch}, one element for each entry.")
        else:
            _check_dense_vector(found, "seqused_k", used)
            values = as_numpy(used) if (used.device.type, used.dtype) == ("cpu", "int32") else None
            for fault in check_lengths(
                None, None, values, total_q=None, total_k=columns, max_seqlen_q=None, max_seqlen_k=None
            ):
                found.value(fault)


def _check_starts(
    found: Violations, tensors: dict[str, TensorView], given: dict[str, object], longest: dict[str, int | None]
) -> dict[str, int]:
    """Check ``cu_seqlens`` and the longest sequences; the number of sequences by the name of the array that says it."""
    counts: dict[str, int] = {}
    for side in "qk":
        name = f"cu_seqlens_{side}"
        if name not in tensors:
            found.value(f"{name}: got None with cu_seqlens_{'k' if side == 'q' else 'q'}. Both are needed, or none.")
            continue
        cu_seqlens = tensors[name]
        length = longest[side]
        if length is None:
            if given[side] is None:  # otherwise its kind was refused above
                found.value(
                    f"max_seqlen_{side}: got None with {name}. It sizes the launch, and reading it from the device "
                    f"would wait for the GPU. Pass the longest sequence, or a bound of it."
                )
        elif not 0 <= length < 2**31:
            # A loose bound (the model's longest sequence) is what callers have: no limit but the kernels' int32.
            found.value(
                f"max_seqlen_{side}: got {shown(length)}. It is the longest sequence, or a bound of it, and less than "
                f"2**31."
            )
        if len(cu_seqlens.shape) == 1:
            counts[name] = cu_seqlens.shape[0] - 1
            if counts[name] < 0:
                found.value(f"{name}: shape (0,). It has one element more than there are sequences, at least one.")
            _check_dense_vector(found, name, cu_seqlens)
    return counts


def _check_dense_vector(found: Violations, name: str, tensor: TensorView) -> None:
    if tensor.shape[0] > 1 and tensor.strides[0] != 1:
        found.value(
            f"{name}: stride {tensor.strides[0]} of shape {tensor.shape}. The kernels read it as a dense vector. "
            f"Copy it, for example with .contiguous()."
        )


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
