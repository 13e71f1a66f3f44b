"""Checks of values that live in device memory, made only under ``NVRTC_ATTN_DEBUG=1`` because they synchronise."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.dtypes import DTYPES
from ..cpu.attention import check_indices
from ..front.call import Call
from ..front.tensors import TensorView
from ..front.tensorview import span
from ..front.validation import check_lengths
from ..runtime import driver


def check_device_lengths(call: Call) -> None:
    """Copy cu_seqlens and seqused_k to the host and check them as `build_problem` does for host arrays.

    Raises
    ------
    ValueError
        Decreasing or negative offsets, more tokens than the tensor has, a sequence longer than max_seqlen.
    """
    values = {
        name: _to_host(x, call.launch_stream)
        for name, x in call.inputs()
        if x is not None and name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    }
    problem = call.problem
    longest: dict[str, int | None] = {"max_seqlen_q": None, "max_seqlen_k": None}
    if problem.varlen:
        longest = {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
    faults = check_lengths(
        values.get("cu_seqlens_q"), values.get("cu_seqlens_k"), values.get("seqused_k"),
        total_q=problem.q.shape[1], total_k=problem.k.shape[1], **longest,
    )  # fmt: skip
    if faults:
        raise ValueError("\n".join(faults))


def check_device_indices(call: Call) -> None:
    """Check the indices of the arrays that functions captured, at the pairs of query and key that are kept.

    Those of a mask also where the element decides that a pair is not.

    Without a range that proves them right, all of them are computed on the CPU, which takes its time. Indices that
    depend on the score are not looked at.

    Raises
    ------
    ValueError
        One is out of range, where a kernel reads NaN, or 0 of integers.
    """
    check_indices(call, lambda x: _array(x, call.launch_stream))


def _array(x: TensorView, stream: int) -> np.ndarray[Any, Any]:
    """A copy on the host of an array of any strides, of bfloat16 its bits; waits for ``stream``."""
    dtype = np.dtype("uint16" if x.dtype == "bfloat16" else x.dtype)
    if 0 in x.shape:
        return np.empty(x.shape, dtype)
    first, end = span(x)
    memory = np.frombuffer(driver.read_memory(first, end - first, x.device.index, stream), np.uint8)
    begin = x.ptr - first
    strides = [n * DTYPES[x.dtype].itemsize for n in x.strides]
    found: np.ndarray[Any, Any] = np.ndarray(x.shape, dtype, memory, begin, strides)
    return found


def _to_host(x: TensorView, stream: int) -> np.ndarray:
    """The values of an int32 vector, which a described call has without gaps; waits for ``stream``."""
    return np.frombuffer(driver.read_memory(x.ptr, 4 * x.shape[0], x.device.index, stream), np.int32)
