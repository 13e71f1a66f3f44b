"""Checks of values that live in device memory, made only under ``NVRTC_ATTN_DEBUG=1`` because they synchronise."""

from __future__ import annotations

import numpy as np

from ..front.call import Call
from ..front.problem import check_lengths
from ..front.tensors import TensorView
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


def _to_host(x: TensorView, stream: int) -> np.ndarray:
    """The values of an int32 vector, which a described call has without gaps; waits for ``stream``."""
    return np.frombuffer(driver.read_memory(x.ptr, 4 * x.shape[0], x.device.index, stream), np.int32)
