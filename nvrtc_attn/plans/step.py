"""A step of a plan: one launch, its kernel, and what its params are before any address is known, by the problem."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..front import philox
from ..front.operands import BACKWARD, FORWARD, OPERANDS
from ..front.problem import AttentionProblem, OperandLayout
from ..heuristics.spec import Launch
from ..jit.codegen import params_class
from ..jit.params import PART_FIELDS, UNBOUNDED, BackwardParams, ForwardParams, HopperBackwardParams
from ..runtime.kernel import Kernel, ParamsBuffer, can_overlap, what_to_launch
from ..runtime.tensor_maps import TensorMapEncoder

LOG2_E: Final = ctypes.c_float(math.log2(math.e)).value
"""``kLog2e`` in ``cuda_src/nvrtc_attn/common/numbers.cuh``, in float32 as there."""


class Step:
    """One launch with its own copy of the params."""

    __slots__ = (
        *("alone", "behind", "grid", "kernel", "modifier_at", "overlaps", "smem_bytes", "spare", "starts_at"),
        *("template", "tensor_maps", "what"),
    )

    def __init__(
        self,
        spec: Launch,
        kernel: Kernel,
        params: ForwardParams | BackwardParams,
        behind: Mapping[str, int],
        problem: AttentionProblem,
        pointers: Sequence[str],
    ) -> None:
        struct_type = params_class(spec.config)
        values: Any = params
        if struct_type is not type(params):  # a struct that begins with the pass's own
            values = struct_type.from_buffer_copy(bytes(params).ljust(ctypes.sizeof(struct_type), b"\0"))
        self.behind: tuple[struct.Struct, int] | None = None
        if params.BEHIND and hasattr(values, params.BEHIND[0]):
            self.behind = struct.Struct(f"<{len(params.BEHIND)}Q"), getattr(struct_type, params.BEHIND[0]).offset
            for name, value in behind.items():
                setattr(values, name, value)
        # Where the address of the largest scores lies; 0 for a kernel that writes none.
        self.alone = struct_type.max_logit.offset if spec.config.features.max_logit else 0
        self.tensor_maps = TensorMapEncoder(spec.tensor_maps, struct_type, pointers) if spec.tensor_maps else None
        # Where what a modifier captured begins; 0 for a kernel that has none.
        self.modifier_at = struct_type.modifier.offset if spec.config.features.modifier else 0
        of_part = (
            zip(PART_FIELDS, problem.dropout_pitches or (0, 0, 0), strict=True) if spec.config.features.part else ()
        )
        # Where the addresses of a part's starts lie; 0 for a kernel that reads none.
        self.starts_at = struct_type.row_start.offset if spec.config.features.device_starts else 0
        for name, value in (*spec.params, *of_part):
            setattr(values, name, value)
        if isinstance(values, HopperBackwardParams):
            values.exponent_scale = values.scale * LOG2_E  # exact until it is stored, so rounded as on the device
        self.kernel, self.grid, self.smem_bytes = kernel, spec.grid, spec.smem_bytes
        self.what = what_to_launch(kernel, spec.grid, spec.block, spec.smem_bytes)
        self.overlaps = spec.overlaps and can_overlap(kernel.device)
        self.template = bytes(values)
        self.spare: list[ParamsBuffer] = []  # as many as threads have run this at once

    def new_params(self) -> ParamsBuffer:
        """A buffer for one launch at a time."""
        return ParamsBuffer(self.template, self.what if self.overlaps else None)


def params_of(problem: AttentionProblem, backward: bool) -> ForwardParams | BackwardParams:
    """The params of a pass, as far as they follow from the problem."""
    params: Any = BackwardParams() if backward else ForwardParams()
    for name in BACKWARD if backward else FORWARD:
        row, operand = OPERANDS[name], problem.layout_of(name)
        if operand is not None and row.strides and not row.behind:
            strides = _broadcast_strides(operand) if row.broadcast else operand.strides
            for dim, stride in zip(row.strides, strides, strict=True):
                setattr(params, f"{name}_stride_{dim}", stride)
    for name in ("batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "head_dim", "head_dim_v"):
        setattr(params, name, getattr(problem, name))
    params.total_q, params.total_k = problem.q.shape[1], problem.k.shape[1]
    params.lse_packed = problem.varlen and not problem.lse_padded
    params.window_left = UNBOUNDED if problem.window_left is None else problem.window_left
    params.window_right = UNBOUNDED if problem.window_right is None else problem.window_right
    params.bottom_right = problem.bottom_right
    params.scale, params.softcap = problem.softmax_scale, problem.softcap
    if problem.dropout_p > 0:
        params.dropout_threshold = philox.threshold(problem.dropout_p)
        params.dropout_multiplier = philox.multiplier(problem.dropout_p)
    if not backward:
        padded = problem.lse if problem.lse_padded else None
        params.lse_rows = problem.seqlen_q if padded is None else padded.shape[-1]
        params.lse_empty = 0.0 if problem.lse_padded else -math.inf
        return params  # type: ignore[no-any-return]
    if problem.dbias_layout is not None:
        for dim, size in zip("bhmn", problem.dbias_layout.shape, strict=True):
            setattr(params, f"dbias_size_{dim}", size)
    params.num_splits = 1
    return params  # type: ignore[no-any-return]


def absent_operands(problem: AttentionProblem) -> set[str]:
    """Operands that no kernel of this problem looks at, and whose addresses are 0 in its calls."""
    found = set() if problem.varlen else {"cu_seqlens_q", "cu_seqlens_k"}
    if not problem.seqused_k:
        found.add("seqused_k")
    if problem.mask is None:
        found.add("mask")
    return found if problem.bias is not None else found | {"bias", "dbias"}


def behind_params(problem: AttentionProblem, names: Sequence[str]) -> dict[str, int]:
    """The params of the operands that lie behind, other than their addresses."""
    found: dict[str, int] = {}
    for name in names:
        operand = problem.layout_of(name)
        if operand is not None:
            strides = zip(OPERANDS[name].strides, operand.strides, strict=True)
            found |= {f"{name}_stride_{dim}": stride for dim, stride in strides}
            if not OPERANDS[name].gradient_of:
                found[f"{name}_float32"] = int(operand.dtype == "float32")
    return found


def _broadcast_strides(operand: OperandLayout) -> tuple[int, ...]:
    """Strides with which a kernel walks a broadcast operand: 0 on dims of size 1."""
    return tuple(0 if size == 1 else stride for size, stride in zip(operand.shape, operand.strides, strict=True))
