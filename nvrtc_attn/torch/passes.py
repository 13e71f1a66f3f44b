"""The two passes on plain torch tensors: what a call of either looks up, allocates and launches."""

from __future__ import annotations

from typing import Any, Final

import torch

from .. import api
from ..base import env
from ..base.errors import shown
from ..front.call import Call, CallOptions
from ..front.dlpack import compact_strides
from ..front.operands import DIFFERENTIABLE, GRADIENTS, INPUTS, OPERANDS, OPTIONAL_INPUTS
from ..front.philox import RngState
from ..front.tensors import view
from ..plans.plan import BackwardPlan, ForwardPlan, forward_plan
from ..plans.prefetch import BackwardPrefetch
from ..runtime import driver
from .tensors import detached, raw_stream, remember, resolved, signature

Tensors = tuple[torch.Tensor | None, ...]
"""`INPUTS` of the table of operands, in its order."""
DIFFERENTIABLE_PLACES: Final = tuple(map(INPUTS.index, DIFFERENTIABLE))
"""Of each gradient, the place of its input."""
_Dense = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides
# Everything of a call but its addresses -> plan, out and lse: the steady state is one lookup here.
_forward_plans: dict[Any, tuple[ForwardPlan, _Dense, _Dense]] = {}
_backward_plans: dict[Any, BackwardPlan] = {}
# Of each gradient: the place of its input, and the option that asks for it where it may be missing.
_GRADIENTS: Final = tuple(
    (place, name if OPERANDS[name].backward == "out?" else None)
    for name, place in zip(GRADIENTS, DIFFERENTIABLE_PLACES, strict=True)
)
_CU_SEQLENS_Q: Final = INPUTS.index("cu_seqlens_q")
_SEQUSED_K: Final = INPUTS.index("seqused_k")
_NO_ADDRESSES: Final = (0,) * len(OPTIONAL_INPUTS)


def forward(tensors: Tensors, options: CallOptions, rng: RngState, *, backward_follows: bool = False) -> Any:
    """(out, lse or None) of detached tensors, `INPUTS` in their order. The options are plain ones (`plain_options`)."""
    q, k, v = tensors[:3]
    optional = tensors[3:]
    key: Any = (options, env.raw_backend(), signature(q), signature(k), signature(v))
    given = False
    for x in optional:
        if x is not None:
            key = (*key, *map(signature, optional))
            given = True
            if (tensors[_CU_SEQLENS_Q] is not None or tensors[_SEQUSED_K] is not None) and env.debug():
                _describe(tensors, options)  # checks the lengths, which no plan knows
            break
    entry = _forward_plans.get(key)
    ahead = None
    if entry is None:
        _check_tensors(tensors)
        if is_negated(tensors):
            return forward(tuple(map(resolved, tensors)), options, rng, backward_follows=backward_follows)
        if q is not None and not q.is_cuda:
            inputs = map(detached, tensors[:3])
            result = api.attention(*inputs, **_keywords(tensors, options), rng=rng, return_lse=options.return_lse)
            return result if options.return_lse else (result, None)
        call = _describe(tensors, options)
        ahead = _backward_ahead(call) if backward_follows else None
        plan = forward_plan(
            call.with_dense(), call.device.index, call.launch_stream, meanwhile=None if ahead is None else ahead.start
        )
        entry = remember(_forward_plans, key, (plan, _dense(call.out_shape), _dense(call.lse_shape)))
    plan, out_like, lse_like = entry
    assert q is not None and k is not None and v is not None  # noqa: PT018
    device = q.device
    # `torch.empty` takes twice the time: it has more forms of a shape to tell apart.
    out = q.new_empty_strided(*out_like)
    lse = q.new_empty_strided(*lse_like, dtype=torch.float32) if options.return_lse else None
    if 0 not in out_like[0]:
        size = plan.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        addresses = [0 if x is None else x.data_ptr() for x in optional] if given else _NO_ADDRESSES
        # In the order of `FORWARD`.
        plan.run(
            raw_stream(device),
            (
                q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
                *addresses,
            ),
            0 if workspace is None else workspace.data_ptr(),
            rng if options.part is None else _of_part(rng, tensors, options),
        )  # fmt: skip
        if ahead is not None:
            ahead.start_after(plan.kernel_keys)
    return out, lse


def _backward_ahead(call: Call) -> BackwardPrefetch | None:
    """The backward pass of a call as `backward` will plan it, if the gradient of out is dense."""
    return BackwardPrefetch(call.with_dense(), call.device.index)


def backward(
    tensors: Tensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    options: CallOptions, rng: RngState,
) -> Any:  # fmt: skip
    """Gradients in the order of `GRADIENTS`, dense, of detached tensors; None for one that the options do not want."""
    if dout.is_cuda:
        driver.adopt_context(dout.get_device())  # autograd's thread: cuBLAS warns where nothing was current before it
    dout = dout.resolve_neg()
    dlse = None if dlse is None else dlse.resolve_neg()
    if dout.stride(-1) != 1 or 0 in dout.stride():
        # An expanded gradient (of a sum, say): one packed copy costs less than reading elements one by one.
        dout = dout.contiguous()
    q, k, v = tensors[:3]
    assert q is not None and k is not None and v is not None  # noqa: PT018
    gradients = [
        _empty_like(tensors[place]) if option is None or getattr(options, option) else None
        for place, option in _GRADIENTS
    ]
    key = (options, env.raw_backend(), *map(signature, (*tensors, out, lse, dout, dlse)))
    plan = _backward_plans.get(key)
    if plan is None:
        named = dict(zip(GRADIENTS, gradients, strict=True))
        if not q.is_cuda:
            arguments: dict[str, Any] = _keywords(tensors, options) | named | {"dlse": dlse, "rng": rng}
            api.attention_backward(dout, q.detach(), k.detach(), v.detach(), out, lse, **arguments)
            return gradients
        named |= {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
        views = {name: view(x.detach(), name) for name, x in named.items() if x is not None}
        plan = remember(_backward_plans, key, api.plan_backward(_describe(tensors, options), views))
    size = plan.workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    # In the order of `BACKWARD`.
    plan.run(
        raw_stream(q.device),
        (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), dout.data_ptr(), lse.data_ptr(), _ptr(dlse),
            *map(_ptr, tensors[3:]), *map(_ptr, gradients),
        ),
        workspace.data_ptr(),
        rng if options.part is None else _of_part(rng, tensors, options),
    )  # fmt: skip
    return gradients


def _of_part(rng: RngState, tensors: Tensors, options: CallOptions) -> RngState:
    """The random numbers of the part's first score on; the same as `Call.kernel_rng`."""
    return rng.moved(_describe(tensors, options).dropout_base) if options.dropout_p > 0 else rng


def _describe(tensors: Tensors, options: CallOptions) -> Call:
    q, k, v, *others = map(detached, tensors)
    return api.checked_call(q, k, v, **dict(zip(OPTIONAL_INPUTS, others, strict=True)), options=options, stream=None)


def _keywords(tensors: Tensors, options: CallOptions) -> dict[str, Any]:
    """The keyword arguments of the core functions."""
    return options.arguments() | dict(zip(OPTIONAL_INPUTS, map(detached, tensors[3:]), strict=True))


def _check_tensors(tensors: Tensors) -> None:
    for name, x in zip(INPUTS, tensors, strict=True):
        if not (isinstance(x, torch.Tensor) or (x is None and name in OPTIONAL_INPUTS)):
            raise TypeError(
                f"{name}: got {shown(x)} of type {type(x).__module__}.{type(x).__qualname__}. nvrtc_attn.torch takes "
                f"torch tensors; nvrtc_attn.attention takes those of any framework."
            )


def is_negated(tensors: Tensors) -> bool:
    """Whether one of them is a lazily negated view."""
    for x in tensors:  # noqa: SIM110 - a generator takes longer
        if isinstance(x, torch.Tensor) and x.is_neg():
            return True
    return False


def _dense(shape: tuple[int, ...]) -> _Dense:
    return shape, compact_strides(shape)


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """A dense tensor of x's shape, in half the time of ``torch.empty``."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _ptr(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
