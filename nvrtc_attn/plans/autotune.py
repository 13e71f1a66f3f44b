"""Plans chosen by measurement: candidates of the heuristics timed on the user's GPU once, the fastest remembered.

What ``NVRTC_ATTN_AUTOTUNE`` says, read when a problem is planned (the first call of a process with its shapes):

* ``1``: the remembered choice; where there is none, measure (up to 8 plans to compile, half a second of GPU time).
* unset: the remembered choice; where there is none, the built-in table's. Costs one file look-up.
* ``0``: the built-in table's choice.

A choice is an entry without payload in the cache of compiled kernels (`cache`): as private, atomic and checked as they
are, evicted and cleared with them. Its key covers the work (`problem_key`), the GPU's name and size, the backend, this
package, the headers and NVRTC. ``NVRTC_ATTN_NO_COMPILE`` and ``NVRTC_ATTN_ASSERT_CACHED`` forbid measuring, and it does
not happen on a stream that is captured: the table chooses there.

A call with a modifier is measured with the arrays that it captured: what they hold decides which tiles a mask keeps.
The key has the modifier's expressions and not the arrays, so the first arrays of a process decide for later ones. Where
a mask reads an array whose memory nobody knows yet (JAX plans while it traces), nothing is measured and the table's
choice stays for the process. Narrower tiles, of which a call with a modifier takes one where the table's spills, are
candidates, and what was measured is taken whatever it spills.

All candidates compute the same function but round in different orders, so results on two machines, or before and after
measuring, may differ in the last bits. ``deterministic=True`` is bitwise repeatable for one choice.

Concurrency: one thread a device measures, others that plan for that device meanwhile wait. Locks belong to devices,
because what is waited for on one GPU (a collective) may need the thread of another. The first decision of a process on
a problem stays: so a workspace that was asked for fits the call, and all GPUs of a kind run one plan (JAX sizes the
workspace for all of them while it traces, which is also where it measures).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from ..base import env
from ..base.dtypes import DTYPES
from ..base.errors import CompileError, CudaError, DeviceFaultError, UnsupportedError
from ..base.log import LOGGER, log_once
from ..base.version import __version__
from ..front.operands import INPUTS, OPERANDS
from ..front.problem import LIKE_Q, AttentionProblem, OperandLayout
from ..heuristics import __file__ as heuristics_file
from ..heuristics import backward_candidates, forward_candidates
from ..heuristics import choose_backward as table_backward
from ..heuristics import choose_forward as table_forward
from ..heuristics import narrower_forward as narrower_table
from ..heuristics.common import features_of, is_vectorizable
from ..heuristics.spec import BackwardPlanSpec, ForwardPlanSpec
from ..heuristics.spec import label as label_of
from ..jit import headers
from ..jit.cache import kernel_cache
from ..jit.cache_entry import TUNED
from ..jit.compile import request_kernels
from ..jit.nvrtc_library import nvrtc_build
from ..modifiers.graph import walk
from ..runtime import device, driver
from ..runtime.kernel import check_nvrtc
from . import measure

UNKNOWN_ARRAYS: Final = (
    "autotune: what the arrays of a mask_mod hold decides how long a call takes, and is not known where this one is "
    "planned: it is not measured, the table chooses"
)
MIN_GAIN: Final = 0.02
"""A candidate replaces the table's choice when it is faster by more: medians of one kernel differ by 1 % by chance."""
_MAX_CHOICES: Final = 1 << 16

_Spec = TypeVar("_Spec", ForwardPlanSpec, BackwardPlanSpec)

# Key -> label of the decision, "" for the table's.
_choices: dict[str, str] = {}
_locks: dict[int, threading.Lock] = {}


def _after_fork_in_child() -> None:
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def choose_forward(
    problem: AttentionProblem,
    device_index: int,
    stream: int,
    plan_of: Callable[[ForwardPlanSpec], Any],
    tune: bool | None = None,
    captured: measure.Captured | None = None,
) -> ForwardPlanSpec:
    """The plan of the forward pass on a device: measured, remembered, or from the table.

    Parameters
    ----------
    stream
        Where to measure, behind what is queued there.
    plan_of
        Makes the runnable plan of a candidate (`plan.ForwardPlan`).
    tune
        As `env.autotune`, which is the default.
    captured
        What the problem's modifier has in this call.

    Raises
    ------
    UnsupportedError
        No kernel serves the problem.
    """
    clusters = device.has_clusters(device_index)
    table = functools.partial(table_forward, clusters=clusters)
    candidates = functools.partial(all_forward_candidates, clusters=clusters)
    return _choose(problem, False, table, candidates, device_index, stream, plan_of, tune, captured)


def choose_backward(
    problem: AttentionProblem,
    device_index: int,
    stream: int,
    plan_of: Callable[[BackwardPlanSpec], Any],
    tune: bool | None = None,
    captured: measure.Captured | None = None,
) -> BackwardPlanSpec:
    """The plan of the backward pass, as `choose_forward`."""
    return _choose(problem, True, table_backward, backward_candidates, device_index, stream, plan_of, tune, captured)


def all_forward_candidates(
    problem: AttentionProblem, *, clusters: bool = True, **target: Any
) -> dict[str, ForwardPlanSpec]:
    """`forward_candidates`, and with a modifier the narrower tiles that are taken where the table's spills."""
    found = forward_candidates(problem, **target, clusters=clusters)
    if problem.modifier is not None and problem.plan_as is None:
        for spec in narrower_table(problem, **target):
            found.setdefault(label_of(spec), spec)
    return found


def is_measured(problem: AttentionProblem, spec: ForwardPlanSpec, device_index: int, tune: bool | None = None) -> bool:
    """Whether `choose_forward` chose ``spec`` because it was measured to be the fastest: no other is to be tried."""
    if (env.autotune() if tune is None else tune) is False or problem.plan_as is not None:
        return False
    key = problem_key(problem, False, device.properties(device_index), env.backend())
    return _choices.get(key) == label_of(spec)


def narrower_forward(problem: AttentionProblem, device_index: int) -> list[ForwardPlanSpec]:
    """What else to try where the kernel of `choose_forward` spills registers and was not measured."""
    return narrower_table(problem, **_target(device.properties(device_index)))


def expected_backward(problem: AttentionProblem, device_index: int) -> BackwardPlanSpec:
    """The plan that `choose_backward` takes unless it measures. Decides nothing and asks the driver for nothing new.

    Raises
    ------
    UnsupportedError
        No kernel serves the problem.
    """
    props = device.properties(device_index)
    target = _target(props)
    label = ""
    if env.autotune() is not False and problem.plan_as is None:
        key = problem_key(problem, True, props, target["backend"])
        label = _choices.get(key, "") or _remembered(key, lambda: backward_candidates(problem, **target))
    chosen = backward_candidates(problem, **target).get(label) if label else None
    return table_backward(problem, **target) if chosen is None else chosen


def _target(props: device.DeviceProperties) -> dict[str, Any]:
    """What the heuristics know of a device."""
    return {
        "arch": props.arch,
        "num_sms": props.num_sms,
        "smem_limit": props.smem_per_block_optin,
        "backend": env.backend(),
    }


def _choose(
    problem: AttentionProblem,
    backward: bool,
    choose: Callable[..., _Spec],
    list_candidates: Callable[..., dict[str, _Spec]],
    device_index: int,
    stream: int,
    plan_of: Callable[[_Spec], Any],
    tune: bool | None,
    captured: measure.Captured | None,
) -> _Spec:
    props = device.properties(device_index)
    target = _target(props)
    tune = env.autotune() if tune is None else tune
    if tune is False or problem.plan_as is not None:
        return choose(problem, **target)

    @functools.cache
    def candidates() -> dict[str, _Spec]:
        return list_candidates(problem, **target)

    key = problem_key(problem, backward, props, target["backend"])
    label = _choices.get(key)
    if label is None:
        label = _remembered(key, candidates)
        if not label and tune and not env.no_compile() and not env.assert_cached():
            if not _may_measure(problem, backward, device_index, stream):
                return choose(problem, **target)  # and not kept: a later call may measure
            if _has_arrays_of_mask(problem, captured):
                with _locks.setdefault(device_index, threading.Lock()):
                    label = _choices.get(key)
                    if label is None:
                        label = _remembered(key, candidates)  # by another process, while this thread waited
                        if not label:
                            label = _tune(problem, backward, key, candidates(), plan_of, props, stream, captured)
                        label = _keep(key, label)
            else:  # kept: a workspace may be sized by this plan for a call that has the arrays
                log_once(UNKNOWN_ARRAYS, logging.INFO)
        label = _keep(key, label)
    # A choice that was kept for other outputs need not be possible for these.
    chosen = candidates().get(label) if label else None
    return choose(problem, **target) if chosen is None else chosen


def _keep(key: str, label: str) -> str:
    while len(_choices) >= _MAX_CHOICES:
        with contextlib.suppress(RuntimeError, StopIteration):  # another thread adds or removes at the same time
            _choices.pop(next(iter(_choices)), None)
    return _choices.setdefault(key, label)


def _may_measure(problem: AttentionProblem, backward: bool, device_index: int, stream: int) -> bool:
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k, *problem.q.shape, *problem.k.shape):
        return False
    slow_inputs = not all(_is_fast(x) for x in (problem.q, problem.k, problem.v))
    outputs = [name for name in LIKE_Q if OPERANDS[name].role(backward)]
    if not slow_inputs and not all(_is_fast(problem.layout_of(name)) for name in outputs):
        return False  # slow stores must not decide for calls with other outputs, which share the choice
    with driver.device_context(device_index):
        capturing = driver.is_capturing(stream)
    if capturing:
        log_once("autotune: nothing is measured on a captured stream; the table chooses", logging.INFO)
    return not capturing


def _has_arrays_of_mask(problem: AttentionProblem, captured: measure.Captured | None) -> bool:
    """Whether the memory of the arrays is known whose content decides which tiles are computed.

    Numbers that are made up could hide all of them, or none, and what is measured so would be remembered for good.
    """
    if problem.modifier is None:
        return True
    if captured is None:
        return False
    mask = problem.modifier.mask
    read = set() if mask is None else {x.value for x in walk([mask]) if x.op == "load"}
    return all(captured.known[i] for i in read)


def _is_fast(x: OperandLayout | None) -> bool:
    return x is None or is_vectorizable(x, DTYPES[x.dtype].itemsize)


# ------------------------------------------------------------------------------------------------ what is remembered


def problem_key(problem: AttentionProblem, backward: bool, props: device.DeviceProperties, backend: str) -> str:
    """Cache key of a choice, 64 hexadecimal digits."""
    where = (props.name, props.compute_capability, props.num_sms, props.smem_per_block_optin, backend)
    # The expressions, and the text that is made of them: neither has numbers, sizes or contents of arrays.
    modifier = (features_of(problem).modifier,) if problem.modifier is not None else ()
    text = repr((TUNED, _library(), where, backward, _essence(problem, backward), *modifier))
    return hashlib.sha256(text.encode(), usedforsecurity=False).hexdigest()


@functools.cache
def _library() -> tuple[str, ...]:
    """What decides which candidates there are and how fast. Of this process: not looked at again."""
    tables = hashlib.sha256(usedforsecurity=False)
    for path in sorted(Path(heuristics_file).parent.glob("*.py")):
        tables.update(path.read_bytes())
    return __version__, tables.hexdigest(), headers.header_digest(), nvrtc_build()


def _essence(problem: AttentionProblem, backward: bool) -> AttentionProblem:
    """``problem`` without what does not matter to the choice, so that equal work finds one.

    Values of scalars are dropped, not whether they are there. Layouts of outputs are dropped: the query for the size of
    the workspace does not know them. Sizes of packed sequences, which change at every step, are rounded up to a power
    of two.
    """

    def essence(name: str, x: OperandLayout) -> OperandLayout:
        strides = tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.strides, strict=True))
        packed = problem.varlen and OPERANDS[name].strides.endswith("d")
        shape = (x.shape[0], _round_up(x.shape[1]), *x.shape[2:]) if packed else x.shape
        return dataclasses.replace(x, shape=shape, strides=strides)

    inputs = {name: essence(name, x) for name in INPUTS if (x := problem.layout_of(name)) is not None}
    changes: dict[str, Any] = {}
    if problem.varlen:
        changes |= {name: _round_up(getattr(problem, name)) for name in ("batch", "seqlen_q", "seqlen_k")}
    return dataclasses.replace(
        problem.only(inputs),
        **changes,
        lse_padded=False,
        softmax_scale=1.0 if problem.softmax_scale > 0 else -1.0,
        softcap=float(problem.softcap > 0),
        dropout_p=0.5 if problem.dropout_p > 0 else 0.0,
        return_lse=False,
        return_max_logit=False,
        deterministic=problem.deterministic and backward,
        dbias=problem.dbias and backward,
        dsink=False,
    )


def _round_up(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 1 else size


def _remembered(key: str, candidates: Callable[[], Mapping[str, object]]) -> str:
    cache = kernel_cache()
    entry = cache.get(key) if cache.may_have(key) else None
    if entry is None:
        return ""
    choice = entry.metadata.get("choice")
    if isinstance(choice, str) and choice in candidates():
        return choice
    log_once(f"autotune: the remembered choice {choice!r} is not a candidate; it is not used", logging.INFO)
    return ""


# ------------------------------------------------------------------------------------------------ measuring


def _tune(
    problem: AttentionProblem,
    backward: bool,
    key: str,
    candidates: Mapping[str, _Spec],
    plan_of: Callable[[_Spec], Any],
    props: device.DeviceProperties,
    stream: int,
    captured: measure.Captured | None,
) -> str:
    """Measure, log, remember; empty where nothing could be measured."""
    what = describe(problem, backward)
    plans = _plans(candidates, plan_of)
    if len(plans) < 2:
        return ""
    try:
        times = measure.times_us(problem, backward, plans, props.index, stream, captured)
    except DeviceFaultError:
        raise
    except CudaError as error:  # most likely memory
        LOGGER.warning("autotune: %s: not measured, the table chooses: %s", what, error)
        return ""
    label = fastest(times)
    shown = ", ".join(f"{name}: {time:.1f} us" for name, time in times.items())
    LOGGER.info("autotune: %s on %s: %s (%s)", what, props.name, label, shown)
    metadata = {"kernel": TUNED, "arch": props.name, "problem": what, "choice": label, "times_us": times}
    kernel_cache().put(key, metadata, b"")
    return label


def fastest(times: Mapping[str, float]) -> str:
    """The name with the least time, unless the first one, the table's, is within `MIN_GAIN` of it."""
    table = next(iter(times))
    best = min(times, key=lambda name: times[name])
    return best if times[best] < (1 - MIN_GAIN) * times[table] else table


def _plans(candidates: Mapping[str, _Spec], plan_of: Callable[[_Spec], Any]) -> dict[str, Any]:
    """Runnable plans: the table's, and others that compile, load and spill no more than it does."""
    plans: dict[str, Any] = {}
    check_nvrtc()
    # Side by side; the loop waits for each and says what it thinks of those that fail.
    request_kernels([launch.config for spec in candidates.values() for launch in spec.launches if launch.grid])
    for label, spec in candidates.items():
        try:
            plan = plan_of(spec)
        except (CompileError, CudaError, UnsupportedError) as error:
            if not plans or isinstance(error, DeviceFaultError):
                raise
            LOGGER.debug("autotune: %s is left out: %s", label, error)
            continue
        if not plans or plan.local_bytes <= next(iter(plans.values())).local_bytes:
            plans[label] = plan
        else:
            LOGGER.debug("autotune: %s is left out: it spills registers", label)
    return plans


def describe(problem: AttentionProblem, backward: bool) -> str:
    """The work in one line, for people."""
    p = problem
    features = features_of(p)
    switches = [name for name in features.__slots__ if getattr(features, name)]
    switches += ["deterministic"] * (p.deterministic and backward)
    return " ".join(
        (
            f"{'backward' if backward else 'forward'} {p.dtype}, batch {p.batch}, lengths {p.seqlen_q} x {p.seqlen_k},",
            f"heads {p.num_heads} / {p.num_heads_kv}, head dims {p.head_dim}, {p.head_dim_v}",
            *switches,
        )
    )
