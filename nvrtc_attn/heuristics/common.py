"""What both kernel families ask of a problem: its features, and which tensors move in whole vectors."""

from __future__ import annotations

from ctypes import c_float
from dataclasses import fields
from typing import Any, Final, TypeVar

from ..front.operands import OPERANDS
from ..front.problem import AttentionProblem, OperandLayout
from ..jit.config import BackwardConfig, Features
from ..modifiers.cuda import cuda_source
from .spec import Launch

MEASURED_SMS: Final = 132
"""Multiprocessors of the GPU that the tables were measured on (H200)."""
_Row = TypeVar("_Row")
COMPUTES_BY_DISTANCE: Final = True
"""Hopper kernels compute what distances alone decide of a score once for each distance of a tile. Part of a modifier's
text, and so of `Features.modifier`: with False kernels are those without."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


def packed_slots(rows: int, sequences: int, tile: int) -> int:
    """How many numbers tiles of packed sequences have, whatever the lengths: ``collective/packed_slots.cuh``."""
    return rows // tile + sequences + 1


def is_vectorizable(layout: OperandLayout, itemsize: int) -> bool:
    """Whether every row of the last dim is contiguous and starts and ends at a multiple of 16 bytes."""
    if layout.offset_alignment < 16 or layout.shape[-1] * itemsize % 16:
        return False
    if layout.strides[-1] != 1:
        return False
    outer = zip(layout.shape[:-1], layout.strides[:-1], strict=True)
    return all(size == 1 or stride * itemsize % 16 == 0 for size, stride in outer)


def features_of(problem: AttentionProblem, *, behind: bool = False) -> Features:
    """Policies that the kernel needs for ``problem``; ``behind``: it reads the operands whose params lie behind."""
    return Features(
        band=problem.band,
        bias=problem.bias.dtype if problem.bias is not None else None,
        mask=problem.mask is not None,
        softcap=problem.softcap > 0,
        # Folding the scale into the exponent keeps the order of scores only when it is positive, in float32.
        prescale=c_float(problem.softmax_scale).value <= 0,
        dropout=problem.dropout_p > 0,
        varlen=problem.varlen,
        seqused_k=problem.seqused_k,
        part=problem.dropout_pitches is not None or problem.device_starts,
        device_starts=problem.device_starts,
        float32_q=is_float32(problem, "out", "dq"),
        float32_k=is_float32(problem, "dk", "dv"),
        modifier=_modifier_text(problem),
        max_logit=behind and problem.return_max_logit,
        optional=" ".join(name for name in problem.further_inputs if behind or not OPERANDS[name].behind),
    )


def computes_by_distance() -> bool:
    """`COMPUTES_BY_DISTANCE`, as it is when it is asked."""
    return COMPUTES_BY_DISTANCE


def _modifier_text(problem: AttentionProblem) -> str:
    if problem.modifier is None:
        return ""
    return cuda_source(problem.modifier, problem.trained, orders_gradients(problem), COMPUTES_BY_DISTANCE)


def orders_gradients(problem: AttentionProblem) -> bool:
    """Whether gradients of captured arrays are summed in integers, which have no order of additions."""
    return problem.deterministic and bool(problem.trained)


def choose_captured(problem: AttentionProblem, *, arch: str, num_sms: int) -> list[Launch]:
    """The launch that makes the gradients of captured arrays of their words; none where atomics add to them."""
    if not orders_gradients(problem):
        return []
    features = Features(modifier=features_of(problem).modifier)
    config = BackwardConfig(
        kernel="captured_sum", arch=arch, dtype=problem.dtype, head_dim=8, head_dim_v=8, block_m=16, block_n=16,
        num_warps=4, features=features, dq="none",
    )  # fmt: skip
    return [Launch(config=config, grid=4 * num_sms, block=config.num_threads, smem_bytes=0)]


def tile_of(table: type[_Row], config: Any) -> _Row:
    """The row of a tile table, a dataclass of its own in each family, that ``config`` was made of."""
    return table(**{x.name: getattr(config, x.name) for x in fields(table)})  # type: ignore[arg-type]


def is_float32(problem: AttentionProblem, *names: str) -> bool:
    """Whether any of these results is float32 and q is not."""
    layouts = (problem.layout_of(name) for name in names)
    return problem.dtype != "float32" and any(x is not None and x.dtype == "float32" for x in layouts)


def maps_scores(features: Features) -> bool:
    """Whether kernels turn products into scores in natural units: ``kMapsScores`` in ``collective/scores.cuh``."""
    return (
        features.prescale
        or features.softcap
        or features.bias is not None
        or "static constexpr bool kScores = true;" in features.modifier
    )


def is_full_shape(problem: AttentionProblem) -> bool:
    """Whether the bias has one element per score."""
    shape = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    return problem.bias is not None and problem.bias.shape == shape


def is_aligned(problem: AttentionProblem) -> bool:
    """Whether rows of all eight tensors can be moved in 16-byte vectors; tensors without a layout are dense."""
    itemsize = 4 if problem.dtype == "float32" else 2
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return False
    operands = (problem.q, problem.k, problem.v, problem.out, problem.dout, problem.dq, problem.dk, problem.dv)
    return all(operand is None or is_vectorizable(operand, itemsize) for operand in operands)
