"""The two passes on plain torch tensors: what a call of either looks up, allocates and launches."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

from .. import api
from ..base import env
from ..base.errors import shown
from ..front.call import Call, CallOptions
from ..front.operands import DIFFERENTIABLE, GRADIENTS, INPUTS, OPERANDS, OPTIONAL_INPUTS
from ..front.philox import RngState
from ..front.tensors import view
from ..plans.plan import BackwardPlan, ForwardPlan, forward_plan
from ..plans.prefetch import BackwardPrefetch
from ..runtime import driver
from .tensors import (
    Made,
    address_of,
    allocator,
    current_device,
    dense,
    detached,
    empty_on_current,
    raw_stream,
    remember,
    resolved,
    signature,
)

Tensors = tuple[torch.Tensor | None, ...]
"""`INPUTS` of the table of operands, in its order."""
DIFFERENTIABLE_PLACES: Final = tuple(map(INPUTS.index, DIFFERENTIABLE))
"""Of each gradient, the place of its input."""
# Everything of a call but its addresses -> plan, out and lse: the steady state is one lookup here.
_forward_plans: dict[Any, tuple[ForwardPlan, Made, Made]] = {}
# The same -> plan, and each gradient or None.
_backward_plans: dict[Any, tuple[BackwardPlan, list[Made | None]]] = {}
# Of each gradient: the place of its input, and the option that asks for it where it may be missing.
_GRADIENTS: Final = tuple(
    (place, name if OPERANDS[name].backward == "out?" else None)
    for name, place in zip(GRADIENTS, DIFFERENTIABLE_PLACES, strict=True)
)
_CU_SEQLENS_Q: Final = INPUTS.index("cu_seqlens_q")
_SEQUSED_K: Final = INPUTS.index("seqused_k")
_NO_ADDRESSES: Final = (0,) * len(OPTIONAL_INPUTS)
_BYTE: Final = torch.uint8
_adopted = threading.local()


class LazyTensors(Exception):  # noqa: N818 - nothing is wrong
    """Some of the tensors stand for others, which autograd must see: those are ``tensors``."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.tensors = tensors


def forward(tensors: Tensors, options: CallOptions, rng: RngState, *, backward_follows: bool = False) -> Any:
    """(out, lse or None) of detached tensors, `INPUTS` in their order. The options are plain ones (`plain_options`).

    Raises
    ------
    LazyTensors
        If a backward pass follows: call again with its tensors.
    """
    q: Any
    k: Any
    v: Any
    q, k, v = tensors[:3]
    optional = tensors[3:]
    given = False
    for x in optional:
        if x is not None:
            given = True
            break
    try:
        # One flat key: what of the tensors decides the kernels is everything but the addresses beyond their alignment.
        q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
        index = q.get_device()
        key: Any = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            index, k.get_device(), v.get_device(),
            (q_address | k_address | v_address) & 15 and (q_address & 15, k_address & 15, v_address & 15),
            q.is_neg() or k.is_neg() or v.is_neg(), options, env.raw_backend(),
        )  # fmt: skip
        if given:
            key = (*key, *map(signature, optional))
        entry = _forward_plans.get(key)
    except (AttributeError, RuntimeError, TypeError):
        key = entry = None  # no plain tensors: refused on the way to a plan, and nothing is remembered of them
    if entry is None:
        return _first_forward(tensors, options, rng, backward_follows, key)
    if given and (tensors[_CU_SEQLENS_Q] is not None or tensors[_SEQUSED_K] is not None) and env.debug():
        _describe(tensors, options)  # checks the lengths, which no plan knows
    plan, out_made, lse_made = entry
    new = empty_on_current if current_device() == index else allocator(index)
    shape, strides, dtype = out_made
    out = new(shape, strides, dtype)
    if options.return_lse:
        lse = new(*lse_made)
        lse_address = lse.data_ptr()
    else:
        lse, lse_address = None, 0
    if 0 not in shape:
        size = plan.workspace_bytes
        workspace = new((size,), (1,), _BYTE) if size else None
        # In the order of `FORWARD`.
        addresses = (q_address, k_address, v_address, out.data_ptr(), lse_address)
        plan.run(
            raw_stream(index),
            addresses + (tuple(map(address_of, optional)) if given else _NO_ADDRESSES),
            0 if workspace is None else workspace.data_ptr(),
            rng if options.part is None else _of_part(rng, tensors, options),
        )
    return out, lse


def _first_forward(tensors: Tensors, options: CallOptions, rng: RngState, backward_follows: bool, key: Any) -> Any:
    """`forward` of what no plan is known for, or never will be."""
    _check_tensors(tensors)
    plain = tuple(map(resolved, tensors))
    if any(x is not y for x, y in zip(plain, tensors, strict=True)):
        if backward_follows:
            raise LazyTensors(plain)
        return forward(plain, options, rng)
    q: Any = tensors[0]
    if not q.is_cuda:
        inputs = map(detached, tensors[:3])
        result = api.attention(*inputs, **_keywords(tensors, options), rng=rng, return_lse=options.return_lse)
        return result if options.return_lse else (result, None)
    call = _describe(tensors, options)
    ahead = BackwardPrefetch(call.with_dense(), call.device.index) if backward_follows else None
    plan = forward_plan(
        call.with_dense(), call.device.index, call.launch_stream, meanwhile=None if ahead is None else ahead.start
    )
    remember(_forward_plans, key, (plan, dense(call.out_shape, q.dtype), dense(call.lse_shape, torch.float32)))
    result = forward(tensors, options, rng)
    if ahead is not None and 0 not in call.out_shape:
        ahead.start_after(plan.kernel_keys)
    return result


def backward(
    tensors: Tensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    options: CallOptions, rng: RngState,
) -> Any:  # fmt: skip
    """Gradients in the order of `GRADIENTS`, dense, of detached tensors; None for one that the options do not want."""
    q: Any
    k: Any
    v: Any
    q, k, v = tensors[:3]
    optional = tensors[3:]
    given = False
    for x in optional:
        if x is not None:
            given = True
            break
    strides = dout.stride()
    if strides[-1] != 1 or 0 in strides:
        # An expanded gradient (of a sum, say): one packed copy costs less than reading elements one by one.
        dout = dout.resolve_neg().contiguous()
        strides = dout.stride()
    negated = q.is_neg() or k.is_neg() or v.is_neg() or out.is_neg() or dout.is_neg()
    if negated or (dlse is not None and dlse.is_neg()):
        everything = map(resolved, (*tensors, out, lse, dout, dlse))
        *inputs, out, lse, dout, dlse = everything
        return backward(tuple(inputs), out, lse, dout, dlse, options, rng)
    q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
    out_address, lse_address, dout_address = out.data_ptr(), lse.data_ptr(), dout.data_ptr()
    index = dout.get_device()
    aligned = (q_address | k_address | v_address | out_address | lse_address | dout_address) & 15
    key: Any = (
        q.shape, k.shape, v.shape, out.shape, lse.shape, dout.shape,
        q.stride(), k.stride(), v.stride(), out.stride(), lse.stride(), strides,
        q.dtype, k.dtype, v.dtype, out.dtype, lse.dtype, dout.dtype,
        q.get_device(), k.get_device(), v.get_device(), out.get_device(), lse.get_device(), index,
        aligned and (q_address & 15, k_address & 15, v_address & 15, out_address & 15, lse_address & 15,
                     dout_address & 15),
        dlse if dlse is None else signature(dlse), options, env.raw_backend(),
    )  # fmt: skip
    if given:
        key = (*key, *map(signature, optional))
    entry = _backward_plans.get(key)
    if entry is None:
        if not dout.is_cuda:
            return _backward_on_cpu(tensors, out, lse, dout, dlse, options, rng)
        entry = _first_backward(tensors, out, lse, dout, dlse, options, key)
    try:
        adopted = _adopted.devices
    except AttributeError:
        adopted = _adopted.devices = set()
    if index >= 0 and index not in adopted:
        driver.adopt_context(index)  # autograd's thread: cuBLAS warns where nothing was current before it
        adopted.add(index)
    plan, made = entry
    new = empty_on_current if current_device() == index else allocator(index)
    gradients = [x if x is None else new(*x) for x in made]
    workspace = new((plan.workspace_bytes,), (1,), _BYTE)
    # In the order of `BACKWARD`.
    plan.run(
        raw_stream(index),
        (
            q_address, k_address, v_address, out_address, dout_address, lse_address, address_of(dlse),
            *(map(address_of, optional) if given else _NO_ADDRESSES), *map(address_of, gradients),
        ),
        workspace.data_ptr(),
        rng if options.part is None else _of_part(rng, tensors, options),
    )  # fmt: skip
    return gradients


def _of_part(rng: RngState, tensors: Tensors, options: CallOptions) -> RngState:
    """The random numbers of the part's first score on; the same as `Call.kernel_rng`."""
    return rng.moved(_describe(tensors, options).dropout_base) if options.dropout_p > 0 else rng


def _first_backward(
    tensors: Tensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    options: CallOptions, key: Any,
) -> Any:  # fmt: skip
    """The entry of `_backward_plans` for a call that has none."""
    call = _describe(tensors, options)
    named = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    views: dict[str, Any] = {name: view(x.detach(), name) for name, x in named.items() if x is not None}
    made: list[Made | None] = []
    for name, (place, option) in zip(GRADIENTS, _GRADIENTS, strict=True):
        x = tensors[place]
        wanted = x is not None and (option is None or getattr(options, option))
        made.append(dense(x.shape, x.dtype) if x is not None and wanted else None)
        if wanted:
            views[name] = call.problem.dense_layout_of(name)
    return remember(_backward_plans, key, (api.plan_backward(call, views), made))


def _backward_on_cpu(
    tensors: Tensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    options: CallOptions, rng: RngState,
) -> Any:  # fmt: skip
    gradients = [
        torch.empty_like(tensors[place], memory_format=torch.contiguous_format)
        if option is None or getattr(options, option)
        else None
        for place, option in _GRADIENTS
    ]
    named = dict(zip(GRADIENTS, gradients, strict=True))
    arguments: dict[str, Any] = _keywords(tensors, options) | named | {"dlse": dlse, "rng": rng}
    q, k, v = map(detached, tensors[:3])
    api.attention_backward(dout, q, k, v, out, lse, **arguments)
    return gradients


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
