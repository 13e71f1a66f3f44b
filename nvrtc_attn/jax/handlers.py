"""What a program of JAX does at the custom call of a pass: on a GPU it launches the plan, on the CPU it runs NumPy.

The handler of GPUs is reached through ``jax-tvm-ffi``, with XLA's memory and stream; it looks up the plan, which was
made while JAX traced (`workspace_bytes_on`). The one of the CPU platform is that of `host`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from .. import api
from ..base.forks import renew_in_child
from ..base.tables import remember
from ..front.call import Call
from ..front.operands import INPUTS, OPERANDS
from ..front.philox import RngState
from ..front.problem import dense_layout
from ..front.tensors import Device
from ..heuristics.common import orders_gradients
from ..jit.params import START_FIELDS
from ..modifiers.cuda_values import NO_MODIFIER, ModifierValues, modifier_values, ordered_bytes
from ..modifiers.modifier import Modifier
from ..plans.plan import BackwardPlan, ForwardPlan, backward_plan, forward_plan
from ..plans.run import captured_of
from .host import Memory
from .host import array as host_array
from .host import register as register_host_target
from .passes import AUX, ROW_START, Pass, describe, pass_of, view_of

TARGET: Final = "nvrtc_attn.launch"
"""The name of the handlers."""
_lock = threading.Lock()
renew_in_child(globals(), "_lock", threading.Lock)
_registered = False
_host_registered = False
_plans: dict[tuple[Pass, int], ForwardPlan | BackwardPlan] = {}
_targets: dict[tuple[tuple[int, ...], int], _Target] = {}
"""By a program's name of its pass, and the device."""
_calls: dict[Pass, Call] = {}
"""Of passes with a modifier, whose captured arrays are told apart by it."""


def _plan(bound: Pass, index: int, stream: int = 0) -> ForwardPlan | BackwardPlan:
    """The plan for a pass on a device; compiles and loads on the first call."""
    plan = _plans.get((bound, index))
    if plan is None:
        call = describe(bound, Device("cuda", index), stream)
        names = [name for name, _, _ in (*bound.operands, *bound.results) if name in OPERANDS and name not in INPUTS]
        make: Any = backward_plan if bound.kind.backward else forward_plan
        problem = call.with_dense(*names)
        if in_float32 := bound.kind.float32_results:
            shares = {name: dense_layout(shape, dtype) for name, shape, dtype in bound.results if name in in_float32}
            dense = {name: call.problem.dense_layout_of(name) for name in names if name not in shares}
            problem = call.with_outputs(**dense, **shares)
        plan = remember(_plans, (bound, index), make(problem, index, stream, captured=captured_of(call)))
    return plan


def workspace_bytes_on(bound: Pass, index: int) -> int:
    """What a pass needs on a device, whose plan this makes: compiled and loaded on the first call."""
    return _plan(bound, index).workspace_bytes + _ordered_bytes(bound)


def _ordered_bytes(bound: Pass) -> int:
    """What sums without an order need: the most of what any call of these arrays does."""
    if not (bound.kind.trained and bound.kind.options.deterministic):
        return 0
    views = [view_of(0, shape, dtype, Device("cuda", 0)) for shape, dtype in bound.captures]
    return ordered_bytes(bound.kind.trained, views)


def _values(bound: Pass, plan_bytes: int, pointers: dict[str, int], where: Device) -> ModifierValues:
    """What a launch passes to the modifier, of arrays at these addresses, with a plan that needs so much workspace."""
    call = _calls.get(bound)
    if call is None:
        call = remember(_calls, bound, describe(bound, where))
    if call.modifier is None or call.modified is None:
        return NO_MODIFIER
    captures, gradients = (
        [view_of(pointers.get(f"{prefix}{AUX}{i}", 0), *bound.captures[i], where) for i in call.modified.kept]
        for prefix in ("", "d")
    )
    words = None
    if orders_gradients(call.problem):  # behind the workspace of the plan
        words = pointers["workspace"] + plan_bytes
    # Behind those of the functions: where their q begins, if they read it and the device knows it.
    starts = [view_of(pointers[ROW_START], (), "int32", where) for _ in call.captures[len(captures) :]]
    captures, gradients = captures + starts, gradients + starts  # of which none is trained
    numbers = call.modifier.numbers
    return modifier_values(call.modifier.program, call.problem.trained, captures, gradients, numbers, words)


@functools.lru_cache(maxsize=4096)
def _dropout_base(bound: Pass) -> int:
    """Where the dropout of a part begins in that of the whole."""
    return describe(bound, Device("cuda", 0)).dropout_base


class _Target(NamedTuple):
    """What a custom call launches on a device."""

    bound: Pass
    plan: ForwardPlan | BackwardPlan
    names: tuple[str, ...]
    """Of the buffers."""
    pick: Callable[[Sequence[int]], tuple[int, ...]]
    """Addresses as the plan's ``run`` takes them, out of those of the buffers and a 0 behind."""
    constant: bool
    """Whether there is nothing but them to tell: neither random numbers nor a modifier."""


def _new_target(key: tuple[int, ...], buffers: Sequence[Any], index: int, stream: int) -> _Target:
    bound = pass_of(key, lambda: [(tuple(x.shape), str(x.dtype)) for x in buffers])
    names = (*(name for name, _, _ in (*bound.operands, *bound.results)), "workspace")
    plan = _plan(bound, index, stream)
    given, needed = buffers[-1].shape[0], plan.workspace_bytes + _ordered_bytes(bound)
    if given < needed:  # a plan that was made again under other settings
        raise RuntimeError(
            f"this program was compiled with {given} bytes of workspace, and its kernels now need {needed}: call "
            "jax.clear_caches() and trace nvrtc_attn.jax.attention again"
        )
    wanted: tuple[str, ...] = plan.OPERANDS
    if ROW_START in names:
        wanted += START_FIELDS
    pick = itemgetter(*(names.index(name) if name in names else len(names) for name in wanted))
    constant = bound.kind.options.dropout_p == 0 and bound.kind.program is None
    return remember(_targets, (key, index), _Target(bound, plan, names, pick, constant))


def _launch(*arguments: Any) -> None:
    """The handler of the custom call: operands, results, workspace, the name of the pass; then XLA's stream."""
    *buffers, name, stream = arguments
    key, index = tuple(name.shape)[1:], buffers[0].device.index
    target = _targets.get((key, index)) or _new_target(key, buffers, index, stream)
    addresses = [x.data_ptr() or 0 for x in buffers]
    workspace = addresses[-1]
    addresses.append(0)
    if target.constant:
        target.plan.run(stream, target.pick(addresses), workspace)
        return
    bound = target.bound
    pointers = dict(zip(target.names, addresses, strict=False))
    rng = RngState(0, 0, pointers.get("seed", 0), pointers.get("offset", 0))
    if bound.kind.options.part is not None and bound.kind.options.dropout_p > 0:
        rng = rng.moved(_dropout_base(bound))
    more: tuple[ModifierValues, ...] = ()
    if bound.kind.program is not None:
        more = (_values(bound, target.plan.workspace_bytes, pointers, Device("cuda", index)),)
    target.plan.run(stream, target.pick(addresses), workspace, rng, *more)


def _run_host(operands: Sequence[Memory], results: Sequence[Memory]) -> None:
    """The custom call on the CPU platform: the same operands and results."""
    *results, _, (_, (_, *key), _) = results
    bound = pass_of(tuple(key), lambda: [(shape, dtype) for _, shape, dtype in operands])
    _on_cpu(bound, *map(host_array, operands), into=list(map(host_array, results)))


def _on_cpu(bound: Pass, *arrays: Any, into: Sequence[Any]) -> None:
    """The pass in NumPy."""
    values: dict[str, Any] = {name: x for (name, _, _), x in zip(bound.operands, arrays, strict=True)}
    results: dict[str, Any] = {name: x for (name, _, _), x in zip(bound.results, into, strict=True)}
    words = [values.pop(name, None) for name in ("seed", "offset")]
    rng = tuple(0 if x is None else int(x.view(np.uint64)[0]) for x in words)
    run: Any = api.attention_backward if bound.kind.backward else api.attention_forward
    options = bound.kind.options
    if ROW_START in values and options.part is not None and options.part.rows is not None:
        options = options._replace(part=replace(options.part, rows=(values.pop(ROW_START), options.part.rows[1])))
    modified: dict[str, Any] = {}
    if bound.kind.program is not None:
        captures = tuple(values.pop(f"{AUX}{i}") for i in range(len(bound.captures)))
        modified["score_mod"] = Modifier(bound.kind.program, captures, bound.kind.numbers)
        if bound.kind.backward:
            modified["daux"] = [results.pop(f"d{AUX}{i}", None) for i in range(len(captures))]
    run(**values, **options.arguments(), **results, **modified, rng=rng)


def local_devices() -> list[int]:
    """CUDA ordinals of the GPUs that JAX may run on."""
    return [found.local_hardware_id for found in jax.local_devices(backend="gpu")]


def register_host() -> None:
    global _host_registered
    with _lock:
        if not _host_registered:
            register_host_target(TARGET, _run_host)
            _host_registered = True


def register_target() -> None:
    global _registered
    with _lock:
        if not _registered:
            try:
                import jax_tvm_ffi  # imports torch where that is installed: only when a GPU is used
            except ImportError as error:
                raise ImportError(
                    "nvrtc_attn.jax.attention launches on GPUs through jax-tvm-ffi (Python 3.11 or later), which is "
                    f'not installed: pip install "nvrtc-attn[jax]" ({error})'
                ) from error
            # Not for CUDA graphs: a plan of another device may have to be loaded at its first launch.
            jax_tvm_ffi.register_ffi_target(TARGET, _launch, ["args", "rets", "ctx.stream"], platform="gpu")
            _registered = True
