"""A plan binds a problem to loaded kernels: the params bytes that never change, and the launches in order.

Making a plan compiles its kernels side by side and loads them; running one takes the addresses of the operands in the
order of their table, writes them into params and launches. Plans are cached per (problem, device) and immutable but for
what they remember, so any number of threads may run the same one. What a launch is made of is in `step`.

A caching allocator hands out the same addresses step after step, and params follow from addresses alone. So the
launches of addresses that come again are kept ready, with params that nobody writes any more: what is left of a run
is one look-up and the driver's calls.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from ..base import env
from ..base.forks import renew_in_child
from ..base.log import log_once
from ..front.operands import BACKWARD, FORWARD
from ..front.philox import NO_RNG, RngState
from ..front.problem import AttentionProblem
from ..heuristics.spec import BackwardPlanSpec, ForwardPlanSpec, Launch
from ..jit.compile import compile_kernels
from ..jit.config import KernelConfig
from ..jit.params import RNG_ADDRESSES, RNG_WORDS, START_FIELDS, BackwardParams, ForwardParams
from ..modifiers.cuda_values import NO_MODIFIER, ModifierValues
from ..runtime import device, driver
from ..runtime.kernel import ClusterError, Kernel, ParamsBuffer, check_nvrtc, load_kernel, refused
from . import autotune
from .measure import Captured
from .step import Step, absent_operands, behind_params, params_of

_Plan = TypeVar("_Plan", "ForwardPlan", "BackwardPlan")
_WORKSPACE_ALIGNMENT: Final = 256
_MINUS_INFINITY: Final = 0xFF800000
"""The bits in float32."""
_MAX_LOGIT: Final = FORWARD.index("max_logit")
_POINTER: Final = struct.Struct("<Q")
_STARTS: Final = struct.Struct(f"<{len(START_FIELDS)}Q")
_NO_STARTS: Final = (0,) * len(START_FIELDS)
_MAX_READY: Final = 256
"""Sets of addresses whose launches a plan keeps ready, of 2 KB a launch: more than most models have layers."""
_MAX_SEEN: Final = 4096
"""Sets of addresses that a plan has seen once."""

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


_Key = tuple[tuple[int, ...], int, int, bytes]
"""Addresses, workspace, stream and the block of a modifier, which has the memory that is set to zero for it."""


class _Ready(NamedTuple):
    """The work of a run whose addresses and stream came before, as arguments of the driver's functions.

    A launch's are those of ``cuLaunchKernelEx`` where the plan's step overlaps.
    """

    memsets: tuple[tuple[Any, ...], ...]
    launches: tuple[tuple[Any, ...], ...]
    params: tuple[ParamsBuffer, ...]
    """That of each launch: the arguments point into it."""


class _PlanBase:
    """Loaded kernels and the workspace between them. ``workspace_bytes`` is what ``run`` needs in ``workspace``."""

    __slots__ = (
        *("_constant", "_context", "_copy", "_device", "_dropout", "_filled", "_offsets", "_pick", "_ready", "_seen"),
        *("_refused", "_steps", "_words", "_zeroed", "workspace_bytes"),
    )

    OPERANDS: ClassVar[tuple[str, ...]]
    """Names of the operands, in the order of the addresses that ``run`` takes."""
    _BACKWARD: ClassVar[bool]
    _BEHIND: ClassVar[tuple[int, ...]]
    """Places of the operands whose pointers lie behind all else."""

    def __init_subclass__(cls) -> None:
        params = BackwardParams if cls._BACKWARD else ForwardParams
        cls._BEHIND = tuple(cls.OPERANDS.index(name) for name in params.BEHIND)

    def __init__(
        self,
        spec: ForwardPlanSpec | BackwardPlanSpec,
        problem: AttentionProblem,
        device_index: int,
        stream: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        _log_slow_path("backward" if self._BACKWARD else "forward", spec)
        params = params_of(problem, self._BACKWARD)
        offsets, zeroed, end = {}, [], 0
        for buffer in spec.workspaces:
            offsets[buffer.field] = end
            if buffer.zeroed and buffer.nbytes:
                zeroed.append((end, buffer.zeroed_bytes or buffer.nbytes))
            end += -(-buffer.nbytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
            for name, value in buffer.params:
                setattr(params, name, value)
        self.workspace_bytes = end
        self._offsets, self._zeroed = tuple(offsets.values()), tuple(zeroed)
        # Elements of max_logit, which kernels only raise.
        self._filled = 0 if self._BACKWARD or not problem.return_max_logit else problem.batch * problem.num_heads
        self._dropout = problem.dropout_p > 0
        # Whether params follow from addresses and a modifier's block alone: what came before is known by these.
        self._constant = not (self._dropout or self._filled)
        self._ready: dict[_Key, _Ready] = {}
        self._seen: set[int] = set()
        self._refused = 0
        # What a launch is told: of the words at the params' begin those that some kernel of this problem looks at, the
        # others are 0. A word takes 40 ns to find and write.
        random = (*RNG_ADDRESSES, *RNG_WORDS) if self._dropout else ()
        known = (*self.OPERANDS, *offsets, *random)
        absent = absent_operands(problem)
        words = [name if name in known and name not in absent else "" for name in params.POINTERS]
        told = [name for name in words if name]
        self._pick = itemgetter(*map(known.index, told))
        self._words = struct.Struct("<" + "".join("Q" if name else "8x" for name in words))
        self._copy = struct.Struct(f"{self._words.size}s")
        launches = [launch_spec for launch_spec in spec.launches if launch_spec.grid]
        loaded = _load(launches, device_index, stream, meanwhile)
        behind = behind_params(problem, params.BEHIND)
        self._steps = tuple(
            Step(launch_spec, kernel, type(params).from_buffer_copy(params), behind, problem, told)
            for launch_spec, kernel in zip(launches, loaded, strict=True)
        )
        self._device = self._steps[0].kernel.device if self._steps else device_index
        self._context = driver.primary_context(self._device) if self._steps else 0

    @property
    def kernel_keys(self) -> tuple[str, ...]:
        """Cache key of the kernel of each launch."""
        return tuple(step.kernel.key for step in self._steps)

    @property
    def local_bytes(self) -> int:
        """Stack and spills of a thread, in the kernel that has the most."""
        return max((step.kernel.local_bytes for step in self._steps), default=0)

    def run(
        self,
        stream: int,
        addresses: tuple[int, ...],
        workspace: int = 0,
        rng: RngState = NO_RNG,
        modifier: ModifierValues = NO_MODIFIER,
    ) -> None:
        """Launch. ``addresses`` are those of ``OPERANDS``, 0 for what is not there; ``workspace`` is one, too.

        Behind them are those of a part's starts, of rows and of keys, where they lie on the device.
        """
        if not self._steps:
            return
        if driver.is_current(self._device, self._context):
            self._launch(stream, addresses, workspace, rng, modifier)
        else:
            with driver.device_context(self._device):
                self._launch(stream, addresses, workspace, rng, modifier)

    def fill(self, stream: int, addresses: tuple[int, ...]) -> None:
        """What `run` does for a problem without queries, where there is nothing else to write: max_logit is -inf."""
        with driver.device_context(self._device):
            self._fill(stream, addresses)

    def _fill(self, stream: int, addresses: tuple[int, ...]) -> None:
        to, count = addresses[_MAX_LOGIT], self._filled
        if count:
            driver.call("cuMemsetD32Async", to, _MINUS_INFINITY, count, stream, device=self._device)

    def _launch(
        self, stream: int, addresses: tuple[int, ...], workspace: int, rng: RngState, modifier: ModifierValues
    ) -> None:
        """The launches, in the plan's context."""
        key = addresses, workspace, stream, modifier.block
        ready = self._ready.get(key)
        if ready is None:
            self._launch_new(key, rng, modifier)
            return
        for arguments in ready.memsets:
            driver.call("cuMemsetD8Async", *arguments, device=self._device)
        api = driver.api()
        for step, arguments in zip(self._steps, ready.launches, strict=True):
            code = (api.cuLaunchKernelEx if step.overlaps else api.cuLaunchKernel)(*arguments)[0]
            if code != driver.SUCCESS:
                raise refused(step.kernel, step.what, int(code))

    def _launch_new(self, key: _Key, rng: RngState, modifier: ModifierValues) -> None:
        """The launches of addresses that none are ready of.

        Addresses become bytes once, which takes ten times a copy of them.
        """
        addresses, workspace, stream, _ = key
        known, starts = addresses, _NO_STARTS
        if len(addresses) > len(self.OPERANDS):
            known, starts = addresses[: len(self.OPERANDS)], addresses[len(self.OPERANDS) :]
        if self._offsets:
            known += tuple([workspace + x for x in self._offsets])
        if self._dropout:
            seed, offset, seed_address, offset_address, _ = rng
            known += (seed_address, offset_address, seed, offset)
        pointers = self._pick(known)
        packed = self._words.pack(*pointers)
        write = self._copy.pack_into
        api = driver.api()
        memsets = tuple([(workspace + start, 0, nbytes, stream) for start, nbytes in self._zeroed])
        memsets += tuple([(address, 0, nbytes, stream) for address, nbytes in modifier.zeroed])
        for arguments in memsets:
            driver.call("cuMemsetD8Async", *arguments, device=self._device)
        if self._filled:
            self._fill(stream, addresses)
        kept: list[tuple[tuple[Any, ...], ParamsBuffer]] = []
        keeps = self._constant and self._comes_again(key)
        for step in self._steps:
            try:
                params = step.spare.pop()
            except IndexError:
                params = step.new_params()
            write(params.data, 0, packed)
            if step.behind is not None:
                step.behind[0].pack_into(params.data, step.behind[1], *[addresses[place] for place in self._BEHIND])
            if step.alone:
                _POINTER.pack_into(params.data, step.alone, addresses[_MAX_LOGIT])
            if step.starts_at:
                _STARTS.pack_into(params.data, step.starts_at, *starts)
            if step.modifier_at:
                ctypes.memmove(ctypes.addressof(params.data) + step.modifier_at, modifier.block, len(modifier.block))
            if step.tensor_maps is not None:
                step.tensor_maps.write(params.data, pointers)
            told: tuple[Any, ...]
            if step.overlaps:
                told = params.config_for(stream), step.kernel.function, params.address, 0
                code = api.cuLaunchKernelEx(*told)[0]
            else:
                # The bindings make an object of every stream handle but None, which is the legacy default stream.
                told = *step.what, stream or None, params.address, 0
                code = api.cuLaunchKernel(*told)[0]
            if code != driver.SUCCESS:
                raise refused(step.kernel, step.what, int(code))
            if keeps:
                kept.append((told, params))
            else:
                step.spare.append(params)
        if keeps:
            launches, buffers = zip(*kept, strict=True)
            self._ready[key] = _Ready(memsets, launches, buffers)

    def _comes_again(self, key: _Key) -> bool:
        """Whether to keep the launches of a run: addresses that come once are not worth an entry.

        A full table is emptied after 16 times as many runs that it had no room for, not at the first: of more addresses
        than entries, in turn, none would be found otherwise.
        """
        mark = hash(key)
        if mark not in self._seen:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen.add(mark)
            return False
        if len(self._ready) >= _MAX_READY:
            self._refused += 1
            if self._refused < 16 * _MAX_READY:
                return False
            log_once(
                f"more than {_MAX_READY} sets of addresses in turn: launches are not kept ready for all of them, which "
                f"costs each of the others some microseconds on the host",
                logging.DEBUG,
            )
            self._ready.clear()
            self._refused = 0
        return True


class ForwardPlan(_PlanBase):
    """The forward pass of one problem on one device."""

    __slots__ = ()
    OPERANDS = FORWARD
    _BACKWARD = False


class BackwardPlan(_PlanBase):
    """The backward pass of one problem on one device."""

    __slots__ = ()
    OPERANDS = BACKWARD
    _BACKWARD = True


def forward_plan(
    problem: AttentionProblem,
    device_index: int,
    stream: int,
    *,
    tune: bool | None = None,
    meanwhile: Callable[[], None] | None = None,
    captured: Captured | None = None,
) -> ForwardPlan:
    """The cached plan for ``problem``; compiles and loads on the first call, which a capturing ``stream`` refuses.

    The problem has the layouts of what is written (`AttentionProblem.with_layouts`). ``tune`` is what `env.autotune`
    says by default. ``meanwhile`` is called while a kernel compiles, if one has to. ``captured`` is what a
    modifier has in this call, to measure with.
    """

    def of(spec: ForwardPlanSpec) -> ForwardPlan:
        return ForwardPlan(spec, problem, device_index, stream, meanwhile)

    def make() -> ForwardPlan:
        try:
            spec = autotune.choose_forward(problem, device_index, stream, of, tune, captured)
            plan = of(spec)
        except ClusterError as error:
            log_once(f"{error}: splits of the keys have a second kernel there", logging.INFO)
            device.no_clusters(device_index)
            spec = autotune.choose_forward(problem, device_index, stream, of, tune, captured)
            plan = of(spec)
        if problem.modifier is None or not plan.local_bytes:
            return plan
        if autotune.is_measured(problem, spec, device_index, tune):
            return plan
        return _least_spilled(plan, autotune.narrower_forward(problem, device_index), of)

    return _cached(("forward", problem, device_index, env.backend()), make)


def _least_spilled(
    plan: ForwardPlan, others: Sequence[ForwardPlanSpec], of: Callable[[ForwardPlanSpec], ForwardPlan]
) -> ForwardPlan:
    """``plan``, whose kernel spills what a modifier reads, or the first of ``others`` that spills less, if any.

    Which one it is depends on the text of the modifier alone, so that a warm cache has all that is asked for.
    """
    first = plan.local_bytes
    for spec in others:
        other = of(spec)
        if other.local_bytes < plan.local_bytes:
            plan = other
        if not plan.local_bytes:
            break
    log_once(
        f"a modifier takes more registers than there are: {first} bytes of a thread spilled, {plan.local_bytes} with "
        "the tile that is used",
        logging.INFO,
    )
    return plan


def backward_plan(
    problem: AttentionProblem,
    device_index: int,
    stream: int,
    *,
    tune: bool | None = None,
    captured: Captured | None = None,
) -> BackwardPlan:
    """The cached plan for the backward pass of ``problem``; as `forward_plan`."""

    def of(spec: BackwardPlanSpec) -> BackwardPlan:
        return BackwardPlan(spec, problem, device_index, stream)

    return _cached(
        ("backward", problem, device_index, env.backend()),
        lambda: of(autotune.choose_backward(problem, device_index, stream, of, tune, captured)),
    )


# Plans are a few kilobytes each; a training job with ever-changing lengths would still grow without a bound.
_MAX_PLANS: Final = 4096
_plans: dict[Hashable, Any] = {}
_plans_lock = threading.Lock()
renew_in_child(globals(), "_plans_lock", threading.Lock)


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
