"""What the parts of a call cost on the host, in microseconds: autograd by itself, allocation, launches, Python.

    python benchmarks/host_parts.py

Same problem and same way to measure as benchmarks/host.py. "both" is a call and its gradient by torch.autograd.grad,
"backward" the gradient alone; a second column is with torch.autograd.set_multithreading_enabled(False), which runs
nodes of the graph in the thread that asks instead of in one of the GPU's own. Launches are timed with addresses that
came before, for which a plan has them ready, and with new ones. The last rows are the median time inside of the
backward pass of our node, in whatever thread: what is beside it in "backward" is torch's.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from host import BATCHES, SHAPE, batch
from measure import print_table
from torch.nn.attention import SDPBackend, sdpa_kernel

import nvrtc_attn.torch as na
from nvrtc_attn.front.call import CallOptions
from nvrtc_attn.front.operands import INPUTS
from nvrtc_attn.front.philox import NO_RNG
from nvrtc_attn.modifiers.cuda_values import NO_MODIFIER
from nvrtc_attn.plans import plan as plans
from nvrtc_attn.runtime import driver
from nvrtc_attn.torch import known, passes, tensors


class Empty(torch.autograd.Function):
    """Nothing is kept and nothing computed: what a node of Python's costs."""

    made: ClassVar[Any] = None
    gradients: ClassVar[Any] = None

    @staticmethod
    def forward(ctx: Any, made: tuple[Any], *_: Any) -> Any:
        ctx.set_materialize_grads(False)
        return made[0]

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        return Empty.gradients


class Keeping(Empty):
    """With what a node of attention keeps."""

    @staticmethod
    def forward(ctx: Any, made: tuple[Any], *inputs: Any) -> Any:
        ctx.save_for_backward(made[0], Empty.made, *inputs)
        ctx.set_materialize_grads(False)
        return made[0]

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        ctx.saved_tensors  # noqa: B018
        return Empty.gradients


class Attribute(Keeping):
    """With an attribute of the node."""

    @staticmethod
    def forward(ctx: Any, made: tuple[Any], *inputs: Any) -> Any:
        ctx.save_for_backward(made[0], Empty.made, *inputs)
        ctx.set_materialize_grads(False)
        ctx.call = made
        return made[0]

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        ctx.saved_tensors  # noqa: B018
        ctx.call  # noqa: B018
        return Empty.gradients


class Busy(Keeping):
    """With some microseconds of Python in the backward pass."""

    calls: ClassVar[int] = 200

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        ctx.saved_tensors  # noqa: B018
        spin(Busy.calls)
        return Empty.gradients


def spin(calls: int) -> None:
    """Python that makes objects and calls functions."""
    found = []
    for number in range(calls):
        found.append((number, str(number)))


class Launching(Keeping):
    """With the launches of a backward pass, and its allocations."""

    run: ClassVar[Callable[[], Any]]

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        ctx.saved_tensors  # noqa: B018
        Launching.run()
        return Empty.gradients


def timed(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    best = dict.fromkeys(functions, float("inf"))
    for number in range(BATCHES + 1):
        for name, function in functions.items():
            microseconds = batch(function)
            if number:
                best[name] = min(best[name], microseconds)
    return best


def main() -> None:
    leaves = [torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    q, k, v = plain = [x.detach() for x in leaves]
    dout = torch.randn_like(q)
    heads_first = [x.detach().transpose(1, 2).requires_grad_() for x in leaves]
    dout_first = dout.transpose(1, 2)
    Empty.made = torch.empty(1, 8, 64, device="cuda")
    Empty.gradients = (None, *(torch.empty_like(q) for _ in range(3)))
    index = q.get_device()
    new = tensors.empty_on_current
    made = tuple(q.shape), q.stride(), q.dtype

    class Scaled(torch.nn.Module):  # one kernel and one node of C++
        def forward(self, x: Any) -> Any:
            return torch.sin(x)

    sin = Scaled()
    functions: dict[str, Callable[[], Any]] = {}

    def differentiable(name: str, call: Callable[..., Any], inputs: Any, gradient: Any) -> None:
        for _ in range(3):
            out = call(*inputs)
        functions[f"{name}: with gradient"] = lambda: call(*inputs)
        functions[f"{name}: backward"] = lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)
        functions[f"{name}: both"] = lambda: torch.autograd.grad(call(*inputs), inputs, gradient)

    def seed(*inputs: Any) -> Any:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            return F.scaled_dot_product_attention(*inputs)

    node: Any
    for node in (Empty, Keeping, Attribute, Busy, Launching):
        apply = super(torch.autograd.Function, node).apply
        differentiable(node.__name__, lambda *x, _apply=apply: _apply((new(*made),), *x), leaves, dout)
    differentiable("sin", sin, leaves[:1], dout)
    differentiable("ours", na.attention, leaves, dout)
    differentiable("ours, as torch's", na.scaled_dot_product_attention, heads_first, dout_first)
    differentiable("seed, with its context", seed, heads_first, dout_first)

    # The launches of the two passes by themselves, then of one with three kernels.
    options = CallOptions(return_lse=True)
    inputs = (q, k, v, *(None,) * (len(INPUTS) - 3))
    out, lse = passes.forward(inputs, options, NO_RNG)
    found = plans_of(q, k, v, out, lse, dout)
    for name, (plan, arguments) in found.items():
        functions |= runs_of(name, plan, arguments)
    backward_plan, backward_arguments = found["BackwardPlan"]
    rows_of_dit = [torch.randn(4, 256, 16, 72, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    more = (*rows_of_dit[:3], *inputs[3:])
    out_of_dit, lse_of_dit = passes.forward(more, options, NO_RNG)
    plan, arguments = plans_of(*rows_of_dit[:3], out_of_dit, lse_of_dit, rows_of_dit[3])["BackwardPlan"]
    functions |= runs_of("BackwardPlan of DiT", plan, arguments)

    def run_backward() -> None:
        _ = [new(*made) for _ in range(3)]
        new((backward_plan.workspace_bytes,), (1,), torch.uint8)
        backward_plan.run(tensors.raw_stream(index), *backward_arguments[1:])

    Launching.run = run_backward  # type: ignore[method-assign]
    functions |= {
        "Launching's work": run_backward,
        "Busy's work": lambda: spin(Busy.calls),
        "passes.forward": lambda: passes.forward(inputs, options, NO_RNG),
        "passes.backward": lambda: passes.backward(inputs, out, lse, dout, None, options, NO_RNG),
        "empty_on_current": lambda: new(*made),
        "current_device": tensors.current_device,
        "raw_stream": lambda: tensors.raw_stream(index),
        "is_current": lambda: driver.is_current(index, backward_plan._context),
        "data_ptr": q.data_ptr,
        "shape": lambda: q.shape,
        "nothing": lambda: None,
        "seed, operator": lambda: torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, False),
    }
    guards = torch._C._dynamo.guards.TensorGuards(*plain, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    functions["TensorGuards.check of three"] = lambda: guards.check(*plain)
    first = timed(functions)
    with torch.autograd.set_multithreading_enabled(False):
        second = timed({name: x for name, x in functions.items() if ": " in name})
    gc.disable()
    third = timed({name: x for name, x in functions.items() if "both" in name})
    gc.enable()
    rows = [
        {"what": name, "us": first[name], "one thread": second.get(name), "no gc": third.get(name)}
        for name in functions
    ]
    rows += inside(leaves, dout)
    print_table(rows, ["what", "us", "one thread", "no gc"])


def plans_of(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> dict[str, tuple[Any, ...]]:
    """The plans of the two passes by the name of their class, and the arguments of a run of each."""
    found: dict[str, tuple[Any, ...]] = {}
    original = plans._PlanBase.run

    def spy(plan: Any, *arguments: Any) -> None:
        found[type(plan).__name__] = (plan, (*arguments, *defaults[len(arguments) :]))
        original(plan, *arguments)

    defaults = (0, (), 0, NO_RNG, NO_MODIFIER)
    options = CallOptions(return_lse=True)
    inputs = (q, k, v, *(None,) * (len(INPUTS) - 3))
    plans._PlanBase.run = spy  # type: ignore[method-assign]
    try:
        _KEPT.append(passes.forward(inputs, options, NO_RNG))
        _KEPT.append(passes.backward(inputs, out, lse, dout, None, options, NO_RNG))
    finally:
        plans._PlanBase.run = original  # type: ignore[method-assign]
    return found


_KEPT: list[Any] = []
"""Whose addresses the runs have."""


def runs_of(name: str, plan: Any, arguments: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """A run whose launches are ready, and one whose params are written."""
    what = f"{name}.run, {len(plan._steps)} launches, {len(plan._zeroed)} memsets"
    stream, addresses, workspace, rng, modifier = arguments
    key = addresses, workspace, stream, modifier.block
    return {
        f"{what}, known addresses": lambda: plan.run(*arguments),
        f"{what}, new addresses": lambda: plan._launch_new(key, rng, modifier),
    }


def inside(leaves: Any, dout: Any) -> list[dict[str, Any]]:
    """The median time in the backward pass of a known call, from its tensors to its last launch."""
    times: list[int] = []
    original = known.KnownBackward.run

    def timed_run(*arguments: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            return original(*arguments)
        finally:
            times.append(time.perf_counter_ns() - start)

    def median_of(call: Callable[[], Any]) -> float:
        times.clear()
        for _ in range(5):
            batch(call)
        return statistics.median(times) / 1e3

    out = na.attention(*leaves)
    calls: dict[str, Callable[[], Any]] = {
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        "both": lambda: torch.autograd.grad(na.attention(*leaves), leaves, dout),
    }
    found = []
    known.KnownBackward.run = timed_run  # type: ignore[method-assign]
    try:
        for name, call in calls.items():
            row = {"what": f"inside of ours: {name}", "us": median_of(call)}
            with torch.autograd.set_multithreading_enabled(False):
                row["one thread"] = median_of(call)
            found.append(row)
    finally:
        known.KnownBackward.run = original  # type: ignore[method-assign]
    return found


if __name__ == "__main__":
    main()
