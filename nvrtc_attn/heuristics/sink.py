"""The launch that sums the gradient of a sink, the last of a backward pass of either family."""

from __future__ import annotations

from ..front.problem import AttentionProblem
from ..jit.config import Features, SinkConfig
from .spec import Launch

WARPS = 32
"""One thread block sums the rows of a head, 4 bytes of LSE and of delta each: its loads are all that takes time."""


def choose_sink(
    problem: AttentionProblem, *, arch: str, block_m: int, padded: bool, log2_lse: bool = False
) -> list[Launch]:
    """The launch, or none where the gradient is not wanted.

    ``block_m``, ``padded`` and ``log2_lse`` describe the workspaces ``delta`` and ``row_lse`` (`SinkConfig`).
    """
    if not problem.dsink:
        return []
    padded = padded and problem.varlen  # dense rows lie at the same place either way
    config = SinkConfig(
        kernel="sink_gradient",
        arch=arch,
        dtype=problem.dtype,
        head_dim=8,
        head_dim_v=8,
        block_m=block_m if padded else 16,
        block_n=16,
        num_warps=WARPS,
        features=Features(varlen=problem.varlen, optional="sink"),
        padded=padded,
        log2_lse=log2_lse,
    )
    return [Launch(config=config, grid=problem.num_heads, block=config.num_threads, smem_bytes=0)]
