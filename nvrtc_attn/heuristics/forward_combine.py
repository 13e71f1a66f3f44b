"""The launch that merges partial results of split keys, of both families: `cuda_src/nvrtc_attn/kernel/combine.cuh`."""

from __future__ import annotations

from typing import Final

from ..front.operands import OPERANDS
from ..front.problem import AttentionProblem
from ..jit.config import Features, ForwardConfig, HopperForwardConfig
from .common import ceil_div, maps_scores
from .portable_forward_config import smem_bytes
from .spec import Launch

COMBINE_WARPS: Final = 4
MAX_PARTIAL_BYTES: Final = 256 << 20
"""Bound of the split-keys workspace: past it there are enough query blocks to fill any GPU without splitting."""


def combine_launch(
    problem: AttentionProblem,
    config: ForwardConfig | HopperForwardConfig,
    *,
    arch: str,
    num_splits: int,
    num_m_blocks: int,
    num_sms: int,
) -> Launch:
    """Merges what ``num_splits`` splits of a kernel with ``config`` wrote; ``arch`` is that of the portable family."""
    num_rows = problem.batch * problem.num_heads * problem.seqlen_q
    many = num_rows >= 8 * num_sms
    combine = ForwardConfig(
        kernel="combine",
        arch=arch,
        dtype=problem.dtype,
        head_dim=config.head_dim_v,
        head_dim_v=config.head_dim_v,
        block_m=COMBINE_WARPS if many else 1,
        block_n=16,
        num_warps=COMBINE_WARPS if many else 2 * COMBINE_WARPS,
        legacy_mma=config.legacy_mma,
        # Scores that the kernel over splits maps are in natural units, others in those of q.k: kMapsScores.
        features=Features(
            varlen=problem.varlen,
            prescale=maps_scores(config.features),
            float32_q=config.features.float32_q,
            optional=" ".join(name for name in problem.further_inputs if OPERANDS[name].behind),
        ),
    )
    return Launch(
        config=combine,
        grid=ceil_div(num_rows, combine.block_m) + (problem.num_heads if problem.varlen else 0),
        block=combine.num_threads,
        smem_bytes=smem_bytes(combine),
        params=(("num_m_blocks", num_m_blocks), ("num_splits", num_splits)),
        overlaps=True,
    )
