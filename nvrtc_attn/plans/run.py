"""A described call, run: its outputs looked at, its plan found and launched on its stream; or all of it on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..front.call import Call
from ..front.operands import GRADIENTS, OPERANDS, addresses
from ..front.philox import RngState
from ..front.signature import Signature
from ..front.tensors import TensorView
from ..heuristics.common import orders_gradients
from ..modifiers.cuda_values import NO_MODIFIER, modifier_values, ordered_bytes
from ..runtime.lifetime import hold
from .measure import Captured
from .plan import BackwardPlan, ForwardPlan, backward_plan, forward_plan
from .repeats import RepeatedModifier, remember, repeated_modifier


def plan_forward(call: Call, views: Mapping[str, TensorView]) -> ForwardPlan:
    """The plan for ``call`` with the forward pass's outputs in ``views`` (no out = a dense one)."""
    return forward_plan(call.with_outputs(**views), call.device.index, call.launch_stream, captured=captured_of(call))


def plan_backward(call: Call, views: Mapping[str, TensorView]) -> BackwardPlan:
    """The plan for ``call`` with the backward pass's tensors in ``views`` (out, lse, dq, ...; missing = dense)."""
    problem = call.with_outputs(**views)
    return backward_plan(problem, call.device.index, call.launch_stream, captured=captured_of(call))


def captured_of(call: Call) -> Captured | None:
    """What the modifier of a call has, to measure plans with."""
    return None if call.modifier is None else Captured(call.captures, call.modifier.numbers)


def forward(
    call: Call,
    given: Mapping[str, Any],
    rng: Any,
    workspace: Any,
    *,
    new_workspace: Callable[[int], Any] | None = None,
    signature: Signature | None = None,
    made: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
) -> None:
    """Run the forward pass; ``given`` are the outputs, those of them in ``made`` by us."""
    views: dict[str, TensorView] = {}
    if rng is None and call.options.part is not None and call.problem.dropout_p > 0:
        raise ValueError(
            "rng: None, but dropout_p > 0 and this is a part of a larger attention, whose mask it has. Pass the "
            "(seed, offset) of the whole, the same for all parts."
        )
    for name, x in given.items():
        if x is not None or OPERANDS[name].forward == "out":
            views[name] = call.output_view(x, name, views)
    if call.on_cpu:
        from ..cpu import attention

        attention.forward(call, views, rng)
        return
    plan = plan_forward(call, views)
    if new_workspace is not None and plan.workspace_bytes:
        workspace = new_workspace(plan.workspace_bytes)
    address = call.workspace_address(workspace, plan.workspace_bytes)
    state = call.kernel_rng(rng)
    if 0 in call.out_shape:
        if "max_logit" in views:
            plan.fill(call.launch_stream, addresses(plan.OPERANDS, {"max_logit": views["max_logit"].ptr}))
    else:
        modifier = _launch(plan, call, views, address, state, (given, workspace))
        if signature is not None:
            made = made or {}
            theirs = {name: x for name, x in views.items() if name not in made}
            remember(signature, plan, {**call.tensors, **theirs}, made, modifier, call.captures)


def backward(
    call: Call,
    given: Mapping[str, Any],
    rng: Any,
    workspace: Any,
    daux: Sequence[Any] | None,
    new_workspace: Callable[[int], Any] | None,
    signature: Signature | None,
) -> None:
    """Run the backward pass; ``given`` are its further inputs and its outputs."""
    views: dict[str, TensorView] = {}
    for name, x in given.items():
        row = OPERANDS[name]
        if x is None and row.backward.endswith("?"):
            continue
        if name not in GRADIENTS:
            views[name] = call.input_view(x, name)
        elif row.gradient_of not in call.tensors:
            raise ValueError(
                f"{name}: given, but {row.gradient_of} is None. Pass the {row.gradient_of} that the forward pass used."
            )
        else:
            views[name] = call.output_view(x, name, views)
    capture_gradients, dbias = call.capture_gradients(daux, views)
    if dbias is not None:
        views["dbias"] = dbias
    if call.on_cpu:
        from ..cpu import attention

        attention.backward(call, views, rng, capture_gradients)
        return
    plan = plan_backward(call, views)
    size = plan.workspace_bytes + captured_bytes(call)
    if workspace is None and new_workspace is not None and size:
        workspace = new_workspace(size)
    address = call.workspace_address(workspace, size)
    owners = workspace, capture_gradients
    modifier = _launch(plan, call, views, address, call.kernel_rng(rng), owners, capture_gradients)
    if signature is not None:
        remember(signature, plan, {**call.tensors, **views}, {}, modifier, call.captures, capture_gradients)


def captured_bytes(call: Call) -> int:
    """What the backward pass needs behind the workspace of its plan: it depends on the sizes of captured arrays."""
    return ordered_bytes(call.problem.trained, call.captures) if orders_gradients(call.problem) else 0


def _launch(
    plan: ForwardPlan | BackwardPlan,
    call: Call,
    views: Mapping[str, TensorView],
    workspace: int,
    rng: RngState,
    owners: tuple[Any, ...],
    capture_gradients: Sequence[TensorView | None] = (),
) -> RepeatedModifier | None:
    """Run the plan. What a call with other addresses needs to know of the modifier."""
    pointers = {name: x.ptr for known in (call.tensors, views) for name, x in known.items()}
    values = NO_MODIFIER
    if call.modifier is not None:
        program, numbers = call.modifier.program, call.modifier.numbers
        words = workspace + plan.workspace_bytes if orders_gradients(call.problem) else None
        values = modifier_values(program, call.problem.trained, call.captures, capture_gradients, numbers, words)
    given = addresses(plan.OPERANDS, pointers) + call.start_addresses
    plan.run(call.launch_stream, given, workspace, rng, values)
    if call.hold_owners:
        hold(call.device.index, call.launch_stream, (call, views, owners, rng))
    return repeated_modifier(call, plan, values, workspace + plan.workspace_bytes)
