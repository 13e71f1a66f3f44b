"""The Hopper backward kernel for wide heads: for which problems, and its config.

Two thread blocks share a tile of 128 keys and each owns 64: dk and dv of 64 keys fill the registers of two warp-groups,
and dq, which every key tile adds to in float32, wants many keys a tile. The head of ``backward_hopper_wide.cuh`` says
why, and docs/experiments.md ("Hopper backward: wide heads") what else was tried.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..front.problem import AttentionProblem
from ..jit.config import HopperBackwardConfig
from .common import ceil_div
from .hopper_common import SMEM_LIMIT, score_operands

NARROW_HEAD_DIM: Final = 128
"""Beyond it dk and dv of 64 keys do not fit in one warp-group's registers, which ``backward_hopper`` wants."""
CLUSTER: Final = 2
WIDE_L2_BYTES: Final = 16 << 20
"""What the heads in work at a time may take of L2 (with a band): 2 heads of S 4096, 3 to 4 % faster than 1 or 3."""


def is_wide(problem: AttentionProblem) -> bool:
    """Whether this kernel serves ``problem``: it also takes widths of which one alone is beyond 64."""
    widths = (problem.head_dim, problem.head_dim_v)
    return max(widths) > NARROW_HEAD_DIM or (widths[0] > 64) != (widths[1] > 64)


def reasons_against_wide(problem: AttentionProblem) -> list[str]:
    """What this kernel cannot do and ``backward_hopper`` can."""
    found = []
    if problem.deterministic:
        found.append("deterministic: dq of wide heads is summed in the order in which thread blocks finish")
    if problem.dropout_p > 0 and problem.head_dim > 128 and problem.head_dim_v > 192:
        beside = score_operands(problem) - 1 + bool(problem.softcap) + bool(problem.varlen or problem.seqused_k)
        most = 0 if problem.head_dim <= 208 else 1
        if beside > most:
            found.append(
                f"with these head dims dropout and more than {most} of bias, mask, softcap and packed lengths, where "
                "the kernel would spill 20 to 96 bytes"
            )
    if problem.dbias and problem.softcap:
        found.append("the gradient of a bias with softcap: dS leaves the scores with the softcap's derivative in it")
    return found


def smem_bytes(config: HopperBackwardConfig) -> int:
    """Dynamic shared memory of one thread block; the map is at the head of ``backward_hopper_wide.cuh``."""
    slabs, slabs_v = ceil_div(config.head_dim, 64), ceil_div(config.head_dim_v, 64)
    stages, stages_dout = config.num_stages, config.num_stages_dout
    two_p = config.features.softcap or config.features.dropout
    # In tiles of 64 x 64: K, V, half of the other block's K, Q, dO, dS, P.
    tiles = slabs + slabs_v + ceil_div(slabs, 2) + stages * slabs + stages_dout * slabs_v + 4 + 1 + two_p
    barriers = 10 + 2 * stages + 2 * stages_dout
    return 8192 * tiles + 256 * (stages + stages_dout) + 32 + 8 * barriers


def wide_config(problem: AttentionProblem, config: HopperBackwardConfig) -> HopperBackwardConfig:
    """``config``, made for ``backward_hopper``, for this kernel, with as many slots of dout and then of q as fit."""
    features = config.features
    mapped = features.softcap or features.prescale or features.bias is not None
    wide = replace(config, kernel="backward_hopper_wide", cluster=CLUSTER, log2_lse=not mapped)
    trials = (replace(wide, num_stages=3), wide, replace(wide, num_stages_dout=1))
    fitting = next(trial for trial in trials if smem_bytes(trial) <= SMEM_LIMIT)
    return replace(fitting, smem_bytes=smem_bytes(fitting))
