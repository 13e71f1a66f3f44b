"""A plan binds a problem to loaded kernels: the params bytes that never change, and the launches in order.

Making a plan compiles its kernels side by side and loads them; running one copies its params template, writes the
pointers and launches. Plans are cached per (problem, device) and immutable, so any number of threads may run the same
one.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeVar

from ..base import env
from ..base.log import log_once
from ..front import philox
from ..front.problem import AttentionProblem, OperandLayout
from ..heuristics.spec import BackwardPlanSpec, ForwardPlanSpec, Launch
from ..jit.codegen import params_class
from ..jit.compile import compile_kernels
from ..jit.config import KernelConfig
from ..jit.params import UNBOUNDED, BackwardParams, ForwardParams
from ..runtime import driver
from ..runtime.kernel import Kernel, ParamsBuffer, check_nvrtc, launch, load_kernel
from ..runtime.tensor_maps import TensorMapEncoder
from . import autotune

_Plan = TypeVar("_Plan", "ForwardPlan", "BackwardPlan")
_WORKSPACE_ALIGNMENT: Final = 256


@dataclass(frozen=True, slots=True)
class LseLayout:
    """Where log-sum-exp values go. ``strides`` are (batch, head, row) in elements.

    ``packed``: varlen rows of sequence b start at ``cu_seqlens_q[b]``; otherwise at ``b * strides[0]``. ``rows`` beyond
    a sequence's length are written as +inf. ``empty`` is the value of a row with no valid key.
    """

    strides: tuple[int, ...]
    rows: int
    packed: bool
    empty: float = float("-inf")


class _Step:
    """One launch with its own copy of the params."""

    __slots__ = ("block", "grid", "kernel", "smem_bytes", "spare", "template", "tensor_maps")

    def __init__(self, spec: Launch, kernel: Kernel, params: ForwardParams | BackwardParams) -> None:
        pointers, struct_type = type(params).POINTERS, params_class(spec.config)
        values: Any = params
        if struct_type is not type(params):  # a struct that begins with the pass's own
            values = struct_type.from_buffer_copy(bytes(params).ljust(ctypes.sizeof(struct_type), b"\0"))
        self.tensor_maps = TensorMapEncoder(spec.tensor_maps, struct_type, pointers) if spec.tensor_maps else None
        for name, value in spec.params:
            setattr(values, name, value)
        self.grid, self.block, self.smem_bytes = spec.grid, spec.block, spec.smem_bytes
        self.kernel = kernel
        self.template = bytes(values)
        self.spare: list[ParamsBuffer] = []  # as many as threads have run this at once

    def run(self, pointers: struct.Struct, addresses: tuple[int, ...], stream: int) -> None:
        try:
            params = self.spare.pop()
        except IndexError:
            params = ParamsBuffer(self.template)
        pointers.pack_into(params.data, 0, *addresses)
        if self.tensor_maps is not None:
            self.tensor_maps.write(params.data, addresses)
        launch(self.kernel, self.grid, self.block, self.smem_bytes, params, stream)
        self.spare.append(params)


# Plans of many shapes share a kernel: a new shape must not pay for generating and hashing its source again.
_kernels: dict[tuple[KernelConfig, int], Kernel] = {}


def _load(
    launches: Sequence[Launch], device_index: int, stream: int, meanwhile: Callable[[], None] | None
) -> list[Kernel]:
    """The kernel of each launch. Those that are not loaded compile side by side."""
    found = [_kernels.get((spec.config, device_index)) for spec in launches]
    missing = [
        spec
        for spec, kernel in zip(launches, found, strict=True)
        if kernel is None or kernel.smem_bytes < spec.smem_bytes
    ]
    if missing:
        with driver.device_context(device_index):  # a thread of autograd's has none of its own yet
            driver.refuse_capture(stream, f"kernel {missing[0].config.kernel}")
        check_nvrtc()
        compiled = compile_kernels([spec.config for spec in missing], meanwhile)
        for spec, image in zip(missing, compiled, strict=True):
            _kernels[spec.config, device_index] = load_kernel(image, device_index, smem_bytes=spec.smem_bytes)
    return [_kernels[spec.config, device_index] for spec in launches]


def _log_slow_path(pass_name: str, spec: ForwardPlanSpec | BackwardPlanSpec) -> None:
    """Say once a pass that a layout is read by the element, which nothing else shows but the time."""
    if any(not launch.config.aligned for launch in spec.launches):
        log_once(
            f"{pass_name}: a tensor is read or written one element at a time, which can cost several times the run "
            "time. For 16-byte accesses the head dim must be a multiple of 8 and have stride 1, and addresses and "
            "other strides must be multiples of 16 bytes."
        )


class _PlanBase:
    """Loaded kernels and the workspace between them. ``workspace_bytes`` is what ``run`` needs in ``workspace``."""

    __slots__ = ("_offsets", "_steps", "_zeroed", "workspace_bytes")

    def __init__(
        self,
        spec: ForwardPlanSpec | BackwardPlanSpec,
        device_index: int,
        params: ForwardParams | BackwardParams,
        stream: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        _log_slow_path("forward" if isinstance(spec, ForwardPlanSpec) else "backward", spec)
        offsets, zeroed, end = {}, [], 0
        for buffer in spec.workspaces:
            offsets[buffer.field] = end
            if buffer.zeroed and buffer.nbytes:
                zeroed.append((end, buffer.nbytes))
            end += -(-buffer.nbytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
            for name, value in buffer.params:
                setattr(params, name, value)
        self.workspace_bytes = end
        # A buffer that the plan does not use has offset 0: its pointer is never followed.
        self._offsets = tuple(offsets.get(name, 0) for name in self._BUFFERS)
        self._zeroed = tuple(zeroed)
        launches = [launch_spec for launch_spec in spec.launches if launch_spec.grid]
        loaded = _load(launches, device_index, stream, meanwhile)
        self._steps = tuple(
            _Step(launch_spec, kernel, type(params).from_buffer_copy(params))
            for launch_spec, kernel in zip(launches, loaded, strict=True)
        )

    @property
    def kernel_keys(self) -> tuple[str, ...]:
        """Cache key of the kernel of each launch."""
        return tuple(step.kernel.key for step in self._steps)

    @property
    def local_bytes(self) -> int:
        """Stack and spills of a thread, in the kernel that has the most."""
        return max((step.kernel.local_bytes for step in self._steps), default=0)

    _BUFFERS: ClassVar[tuple[str, ...]]
    _POINTERS: ClassVar[struct.Struct]

    def _run(self, stream: int, workspace: int, addresses: tuple[int, ...]) -> None:
        if not self._steps:
            return
        device = self._steps[0].kernel.device
        with driver.device_context(device):
            for offset, nbytes in self._zeroed:
                driver.call("cuMemsetD8Async", workspace + offset, 0, nbytes, stream, device=device)
            for step in self._steps:
                step.run(self._POINTERS, addresses, stream)


class ForwardPlan(_PlanBase):
    """The forward pass of one problem on one device."""

    __slots__ = ()
    _BUFFERS = ("out_partial", "softmax_partial")
    _POINTERS = struct.Struct(f"<{len(ForwardParams.POINTERS)}Q")

    def __init__(
        self,
        spec: ForwardPlanSpec,
        problem: AttentionProblem,
        device_index: int,
        lse: LseLayout,
        stream: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(spec, device_index, _forward_params(problem, lse), stream, meanwhile)

    def run(
        self,
        stream: int,
        q: int,
        k: int,
        v: int,
        out: int,
        lse: int = 0,
        bias: int = 0,
        mask: int = 0,
        cu_seqlens_q: int = 0,
        cu_seqlens_k: int = 0,
        seqused_k: int = 0,
        rng: tuple[int, int, int, int] = (0, 0, 0, 0),
        workspace: int = 0,
    ) -> None:
        """Launch. Arguments are device addresses; ``rng`` is (seed address, offset address, seed, offset)."""
        out_partial, softmax_partial = self._offsets
        self._run(stream, workspace, (
            q, k, v, out, lse, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k,
            rng[0], rng[1], workspace + out_partial, workspace + softmax_partial, rng[2], rng[3],
        ))  # fmt: skip


class BackwardPlan(_PlanBase):
    """The backward pass of one problem on one device."""

    __slots__ = ()
    _BUFFERS = ("delta", "row_lse", "dq_accum", "dkv_accum", "dbias_partial", "counters")
    _POINTERS = struct.Struct(f"<{len(BackwardParams.POINTERS)}Q")

    def __init__(
        self,
        spec: BackwardPlanSpec,
        problem: AttentionProblem,
        device_index: int,
        lse: LseLayout,
        dlse: LseLayout | None,
        dbias: OperandLayout | None,
        stream: int,
    ) -> None:
        super().__init__(spec, device_index, _backward_params(problem, lse, dlse, dbias), stream)

    def run(
        self,
        stream: int,
        q: int,
        k: int,
        v: int,
        out: int,
        dout: int,
        lse: int,
        dq: int,
        dk: int,
        dv: int,
        workspace: int,
        dlse: int = 0,
        bias: int = 0,
        dbias: int = 0,
        mask: int = 0,
        cu_seqlens_q: int = 0,
        cu_seqlens_k: int = 0,
        seqused_k: int = 0,
        rng: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> None:
        """Launch. Arguments as in `ForwardPlan.run`."""
        delta, row_lse, dq_accum, dkv_accum, dbias_partial, counters = self._offsets
        self._run(stream, workspace, (
            q, k, v, out, dout, lse, dlse, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k, rng[0], rng[1],
            dq, dk, dv, dbias, workspace + delta, workspace + row_lse, workspace + dq_accum, workspace + dkv_accum,
            workspace + dbias_partial, workspace + counters, rng[2], rng[3],
        ))  # fmt: skip


def forward_plan(
    problem: AttentionProblem,
    device_index: int,
    lse: LseLayout,
    stream: int,
    *,
    tune: bool | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> ForwardPlan:
    """The cached plan for ``problem``; compiles and loads on the first call, which a capturing ``stream`` refuses.

    ``tune`` is what `env.autotune` says by default. ``meanwhile`` is called while a kernel compiles, if one has to.
    """
    key = ("forward", problem, device_index, lse, env.backend())

    def make() -> ForwardPlan:
        def of(spec: ForwardPlanSpec) -> ForwardPlan:
            return ForwardPlan(spec, problem, device_index, lse, stream, meanwhile)

        extra = {"lse": _statistic(problem, lse)} if any(lse.strides) else {}
        return of(autotune.choose_forward(problem, device_index, stream, of, extra, tune))

    return _cached(key, make)


def backward_plan(
    problem: AttentionProblem,
    device_index: int,
    lse: LseLayout,
    dlse: LseLayout | None,
    dbias: OperandLayout | None,
    stream: int,
    *,
    tune: bool | None = None,
) -> BackwardPlan:
    """The cached plan for the backward pass of ``problem``; as `forward_plan`."""
    key = ("backward", problem, device_index, lse, dlse, dbias, env.backend())

    def make() -> BackwardPlan:
        asked = replace(problem, dbias_layout=dbias)

        def of(spec: BackwardPlanSpec) -> BackwardPlan:
            return BackwardPlan(spec, asked, device_index, lse, dlse, dbias, stream)

        extra = {"lse": _statistic(problem, lse)}
        if dlse is not None:
            extra["dlse"] = _statistic(problem, dlse)
        if dbias is not None:
            extra["dbias"] = dbias
        return of(autotune.choose_backward(asked, device_index, stream, of, extra, tune))

    return _cached(key, make)


def _statistic(problem: AttentionProblem, lse: LseLayout) -> OperandLayout:
    """``lse`` as an operand with a shape."""
    batch, rows = (1, problem.q.shape[1]) if lse.packed else (problem.batch, lse.rows)
    return OperandLayout(shape=(batch, problem.num_heads, rows), strides=tuple(lse.strides), dtype="float32")


# Plans are a few kilobytes each; a training job with ever-changing lengths would still grow without a bound.
_MAX_PLANS: Final = 4096
_plans: dict[Hashable, Any] = {}
_plans_lock = threading.Lock()


def _cached(key: Hashable, make: Callable[[], _Plan]) -> _Plan:
    plan: _Plan | None = _plans.get(key)
    if plan is None:
        # Two threads may make the same plan; compiling and loading underneath happen once.
        plan = make()
        with _plans_lock:
            while len(_plans) >= _MAX_PLANS:
                del _plans[next(iter(_plans))]
            plan = _plans.setdefault(key, plan)
    return plan


def _set_strides(params: ctypes.Structure, name: str, dims: str, strides: Sequence[int]) -> None:
    for dim, stride in zip(dims, strides, strict=True):
        setattr(params, f"{name}_stride_{dim}", stride)


def _set_common(params: Any, problem: AttentionProblem, lse: LseLayout) -> None:
    _set_strides(params, "q", "bmhd", problem.q.strides)
    _set_strides(params, "k", "bnhd", problem.k.strides)
    _set_strides(params, "v", "bnhd", problem.v.strides)
    assert problem.out is not None
    _set_strides(params, "out", "bmhd", problem.out.strides)
    _set_strides(params, "lse", "bhm", lse.strides)
    for name, operand in (("bias", problem.bias), ("mask", problem.mask)):
        if operand is not None:
            _set_strides(params, name, "bhmn", broadcast_strides(operand))
    for name in ("batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "head_dim", "head_dim_v"):
        setattr(params, name, getattr(problem, name))
    params.total_q, params.total_k = problem.q.shape[1], problem.k.shape[1]
    params.lse_packed = lse.packed
    params.window_left = UNBOUNDED if problem.window_left is None else problem.window_left
    params.window_right = UNBOUNDED if problem.window_right is None else problem.window_right
    params.bottom_right = problem.bottom_right
    params.scale, params.softcap = problem.softmax_scale, problem.softcap
    if problem.dropout_p > 0:
        params.dropout_threshold = philox.threshold(problem.dropout_p)
        params.dropout_multiplier = philox.multiplier(problem.dropout_p)


def broadcast_strides(operand: OperandLayout) -> tuple[int, ...]:
    """Strides with which a kernel walks a broadcast operand: 0 on dims of size 1."""
    return tuple(0 if size == 1 else stride for size, stride in zip(operand.shape, operand.strides, strict=True))


def _forward_params(problem: AttentionProblem, lse: LseLayout) -> ForwardParams:
    params = ForwardParams()
    _set_common(params, problem, lse)
    params.lse_rows, params.lse_empty = lse.rows, lse.empty
    return params


def _backward_params(
    problem: AttentionProblem, lse: LseLayout, dlse: LseLayout | None, dbias: OperandLayout | None
) -> BackwardParams:
    params = BackwardParams()
    _set_common(params, problem, lse)
    for name, dims in (("dout", "bmhd"), ("dq", "bmhd"), ("dk", "bnhd"), ("dv", "bnhd")):
        operand = getattr(problem, name)
        _set_strides(params, name, dims, operand.strides)
    if dlse is not None:
        _set_strides(params, "dlse", "bhm", dlse.strides)
    if dbias is not None:
        _set_strides(params, "dbias", "bhmn", broadcast_strides(dbias))
        for dim, size in zip("bhmn", dbias.shape, strict=True):
            setattr(params, f"dbias_size_{dim}", size)
    params.num_splits = 1
    return params
