"""The two passes on plain torch tensors: what a call of either looks up, allocates and launches."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from .. import api
from ..base import env
from ..base.errors import shown
from ..base.tables import remember
from ..front.call import Call, CallOptions, plain_options, start_addresses
from ..front.operands import DIFFERENTIABLE, GRADIENTS, INPUTS, OPERANDS, OPTIONAL_INPUTS
from ..front.philox import RngState
from ..front.signature import are_plain
from ..front.tensors import view
from ..plans.plan import BackwardPlan, ForwardPlan, forward_plan
from ..plans.prefetch import BackwardPrefetch
from .known import NO_ADDRESSES, BackwardCalls, adopt, know, know_backward
from .tensors import (
    Made,
    address_of,
    allocator,
    current_device,
    dense,
    detached,
    empty_on_current,
    raw_stream,
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
# Calls that `check_call` has let pass.
_checked: dict[Any, bool] = {}
# Of each gradient: the place of its input, and the option that asks for it where it may be missing.
_GRADIENTS: Final = tuple(
    (place, name if OPERANDS[name].backward == "out?" else None)
    for name, place in zip(GRADIENTS, DIFFERENTIABLE_PLACES, strict=True)
)
_CU_SEQLENS_Q: Final = INPUTS.index("cu_seqlens_q")
_SEQUSED_K: Final = INPUTS.index("seqused_k")
_BYTE: Final = torch.uint8


class LazyTensors(Exception):  # noqa: N818 - nothing is wrong
    """Some of the tensors stand for others, which autograd must see: those are ``tensors``."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.tensors = tensors


def forward(
    tensors: Tensors, options: CallOptions, rng: RngState, *, backward_follows: bool = False, heads_first: bool = False,
    known_key: Any = None,
) -> Any:  # fmt: skip
    """(out, lse or None) of detached tensors, `INPUTS` in their order, and max_logit where the options ask for it.

    The options are plain ones (`plain_options`).

    ``heads_first``: q, k, v and out are ``[batch, heads, seqlen, head_dim]``, and out is in memory as it is otherwise.
    ``known_key``: where `known_calls` may have the call from now on.

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
    asked = options
    starts: tuple[int, ...] = ()
    if options.part is not None and options.part.has_arrays:
        options, starts = _located(q, options)
    try:
        q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
        index = q.get_device()
        # One flat key: what of the tensors decides the kernels is everything but the addresses beyond their alignment.
        key: Any = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            index, k.get_device(), v.get_device(),
            (q_address | k_address | v_address) & 15 and (q_address & 15, k_address & 15, v_address & 15),
            q.is_neg() or k.is_neg() or v.is_neg(), heads_first, options, env.raw_backend(),
        )  # fmt: skip
        if given:
            key = (*key, *map(signature, optional))
        entry = _forward_plans.get(key)
    except (AttributeError, RuntimeError, TypeError):
        key = entry = None  # no plain tensors: refused on the way to a plan, and nothing is remembered of them
    if entry is None:
        return _first_forward(tensors, asked, rng, backward_follows, heads_first, key)
    if known_key is not None and not (q_address | k_address | v_address) & 15:
        know(known_key, q, k, v, entry, options, index, backward_follows)
    if given and (tensors[_CU_SEQLENS_Q] is not None or tensors[_SEQUSED_K] is not None) and env.debug():
        _describe(tensors, options, heads_first)  # checks the lengths, which no plan knows
    plan, out_made, lse_made = entry
    new = empty_on_current if current_device() == index else allocator(index)
    shape, strides, dtype = out_made
    out = new(shape, strides, dtype)
    if options.return_lse:
        lse = new(*lse_made)
        lse_address = lse.data_ptr()
    else:
        lse, lse_address = None, 0
    max_logit, max_logit_address = None, 0
    if options.return_max_logit:
        max_logit = new(*_made_max_logit(tensors))
        max_logit_address = max_logit.data_ptr()
        if 0 in shape:
            max_logit.fill_(-math.inf)
    if 0 not in shape:
        size = plan.workspace_bytes
        workspace = new((size,), (1,), _BYTE) if size else None
        # In the order of `FORWARD`.
        addresses = (q_address, k_address, v_address, out.data_ptr(), lse_address, max_logit_address)
        plan.run(
            raw_stream(index),
            addresses + (tuple(map(address_of, optional)) if given else NO_ADDRESSES) + starts,
            0 if workspace is None else workspace.data_ptr(),
            rng if options.part is None else _of_part(rng, tensors, options, heads_first),
        )
    return (out, lse, max_logit) if options.return_max_logit else (out, lse)


def _made_max_logit(tensors: Tensors) -> Made:
    """Shape, strides and element type: a row for each batch entry, or sequence."""
    q: Any = tensors[0]
    starts = tensors[_CU_SEQLENS_Q]
    shape = (q.shape[0] if starts is None else starts.shape[0] - 1, q.shape[2])
    return dense(shape, torch.float32)


def _first_forward(
    tensors: Tensors, options: CallOptions, rng: RngState, backward_follows: bool, heads_first: bool, key: Any
) -> Any:
    """`forward` of what no plan is known for, or never will be."""
    _check_tensors(tensors)
    plain = tuple(map(resolved, tensors))
    if any(x is not y for x, y in zip(plain, tensors, strict=True)):
        if backward_follows:
            raise LazyTensors(plain)
        return forward(plain, options, rng, heads_first=heads_first)
    q: Any = tensors[0]
    if not q.is_cuda:
        inputs = _rows_first(tensors[:3], heads_first)
        found = api.attention(
            *inputs, **keywords(tensors, options), rng=rng, return_lse=options.return_lse,
            return_max_logit=options.return_max_logit,
        )  # fmt: skip
        out, *more = found if isinstance(found, tuple) else (found,)
        lse = more.pop(0) if options.return_lse else None
        if heads_first:  # no view, which autograd would not let anybody write to
            strides = [out.stride(i) for i in (0, 2, 1, 3)]
            out = out.new_empty(0).set_(out.untyped_storage(), out.storage_offset(), out.transpose(1, 2).shape, strides)
        return out, lse, *more
    call = _describe(tensors, options, heads_first)
    ahead = BackwardPrefetch(call.with_dense(), call.device.index) if backward_follows else None
    plan = forward_plan(
        call.with_dense(), call.device.index, call.launch_stream, meanwhile=None if ahead is None else ahead.start
    )
    out_made = dense(call.out_shape, q.dtype, heads_first=heads_first)
    remember(_forward_plans, key, (plan, out_made, dense(call.lse_shape, torch.float32)))
    result = forward(tensors, options, rng, heads_first=heads_first)
    if ahead is not None and 0 not in call.out_shape:
        ahead.start_after(plan.kernel_keys)
    return result


def backward(
    tensors: Tensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    options: CallOptions, rng: RngState, *, heads_first: bool = False, known: BackwardCalls | None = None,
    packed: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Gradients in the order of `GRADIENTS`, dense, of detached tensors; None for one that the options do not want.

    ``heads_first`` as in `forward`; also of dout and of the gradients. ``known`` is the forward call, if it is one.
    ``packed``, ``[batch, seqlen, 2 or 3, heads, head_dim]``, is where dk and dv, or all three, are written to.
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
    asked = options
    starts: tuple[int, ...] = ()
    if options.part is not None and options.part.has_arrays:
        options, starts = _located(q, options)
    strides = dout.stride()
    if strides[-1] != 1 or 0 in strides:
        # An expanded gradient (of a sum, say): one packed copy costs less than reading elements one by one.
        dout = dout.resolve_neg().contiguous()
        strides = dout.stride()
    negated = q.is_neg() or k.is_neg() or v.is_neg() or out.is_neg() or dout.is_neg()
    if negated or (dlse is not None and dlse.is_neg()):
        everything = map(resolved, (*tensors, out, lse, dout, dlse))
        *inputs, out, lse, dout, dlse = everything
        return backward(tuple(inputs), out, lse, dout, dlse, asked, rng, heads_first=heads_first, packed=packed)
    into = () if packed is None else packed.unbind(-3)
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
        dlse if dlse is None else signature(dlse), heads_first, options, env.raw_backend(),
        into and tuple(map(signature, into)),
    )  # fmt: skip
    if given:
        key = (*key, *map(signature, optional))
    entry = _backward_plans.get(key)
    if entry is None:
        if not dout.is_cuda:
            return _backward_on_cpu(tensors, out, lse, dout, dlse, asked, rng, heads_first, into)
        entry = _first_backward(tensors, out, lse, dout, dlse, options, heads_first, key, into)
    elif known is not None and not (aligned or given or dlse is not None):
        know_backward(known, q, k, v, out, lse, dout, entry, index, packed)
    adopt(index)
    plan, made = entry
    new = empty_on_current if current_device() == index else allocator(index)
    gradients = [x if x is None else new(*x) for x in made]
    if into:
        gradients[3 - len(into) : 3] = into
    workspace = new((plan.workspace_bytes,), (1,), _BYTE)
    # In the order of `BACKWARD`.
    plan.run(
        raw_stream(index),
        (
            q_address, k_address, v_address, out_address, dout_address, lse_address, address_of(dlse),
            *(map(address_of, optional) if given else NO_ADDRESSES), *map(address_of, gradients), *starts,
        ),
        workspace.data_ptr(),
        rng if options.part is None else _of_part(rng, tensors, options, heads_first),
    )  # fmt: skip
    return gradients


# ---------------------------------------------------------------------------------------------------- the first time


def _located(q: Any, options: CallOptions) -> tuple[CallOptions, tuple[int, ...]]:
    """Options that tables may keep, and the addresses of where their part begins, as `Call.start_addresses`."""
    assert options.part is not None
    part, starts = options.part.located(view(q.detach(), "q").device, None)
    return options._replace(part=part), start_addresses(starts)


def _of_part(rng: RngState, tensors: Tensors, options: CallOptions, heads_first: bool) -> RngState:
    """The random numbers of the part's first score on; the same as `Call.kernel_rng`."""
    return rng.moved(_describe(tensors, options, heads_first).dropout_base) if options.dropout_p > 0 else rng


def _first_backward(
    tensors: Tensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    options: CallOptions, heads_first: bool, key: Any, into: tuple[torch.Tensor, ...],
) -> Any:  # fmt: skip
    """The entry of `_backward_plans` for a call that has none."""
    call = _describe(tensors, options, heads_first)
    out, dout = _rows_first((out, dout), heads_first)
    named = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    views: dict[str, Any] = {name: view(x.detach(), name) for name, x in named.items() if x is not None}
    made: list[Made | None] = []
    there = dict(zip(("dq", "dk", "dv")[3 - len(into) :], into, strict=True))
    for name, (place, option) in zip(GRADIENTS, _GRADIENTS, strict=True):
        x = tensors[place]
        wanted = x is not None and (option is None or getattr(options, option))
        made.append(None)
        if name in there:
            views[name] = view(there[name], name)
        elif x is not None and wanted:
            views[name] = layout = call.problem.dense_layout_of(name)
            made[-1] = dense(layout.shape, x.dtype, heads_first=heads_first and name in ("dq", "dk", "dv"))
    return remember(_backward_plans, key, (api.plan_backward(call, views), made))


def _backward_on_cpu(
    tensors: Tensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    options: CallOptions, rng: RngState, heads_first: bool, into: tuple[torch.Tensor, ...],
) -> Any:  # fmt: skip
    q, k, v, out, dout = _rows_first((*tensors[:3], out, dout), heads_first)
    tensors = (q, k, v, *tensors[3:])
    gradients = [
        torch.empty_like(tensors[place], memory_format=torch.contiguous_format)
        if option is None or getattr(options, option)
        else None
        for place, option in _GRADIENTS
    ]
    if into:
        gradients[3 - len(into) : 3] = into
    named = dict(zip(GRADIENTS, gradients, strict=True))
    arguments: dict[str, Any] = keywords(tensors, options) | named | {"dlse": dlse, "rng": rng}
    api.attention_backward(dout, q, k, v, out, lse, **arguments)
    if heads_first:
        gradients[:3] = [x.transpose(1, 2) for x in gradients[:3] if x is not None]
    return gradients


def _rows_first(tensors: Tensors, heads_first: bool) -> Any:
    """The tensors without their autograd history, ``[batch, seqlen, heads, head_dim]``."""
    found = map(detached, tensors)
    return [x.transpose(1, 2) for x in found] if heads_first else list(found)


def _describe(tensors: Tensors, options: CallOptions, heads_first: bool = False) -> Call:
    q, k, v = _rows_first(tensors[:3], heads_first)
    others = map(detached, tensors[3:])
    return api.checked_call(q, k, v, **dict(zip(OPTIONAL_INPUTS, others, strict=True)), options=options, stream=None)


def check_call(tensors: Tensors, options: CallOptions) -> None:
    """Refuse what `forward` of the same arguments would refuse, and compute nothing.

    For a function that makes other calls of its own one, whose errors would name other arguments. Only of plain tensors
    outside of programs of torch.compile, dispatch modes and transformations.
    """
    _check_tensors(tensors)
    if not are_plain(options):
        options = plain_options(options)
    q: Any = tensors[0]
    # On the host, and under NVRTC_ATTN_DEBUG on the GPU, the values of lengths are checked, too, and no key has them.
    reads_lengths = not q.is_cuda or env.debug()
    key = None if reads_lengths else (options, *map(signature, tensors))
    if key is not None and key in _checked:
        return
    _describe(tuple(map(resolved, tensors)), options)
    if key is not None:
        remember(_checked, key, True)


def keywords(tensors: Tensors, options: CallOptions) -> dict[str, Any]:
    """The keyword arguments of the core functions."""
    return options.arguments() | dict(zip(OPTIONAL_INPUTS, map(detached, tensors[3:]), strict=True))


def _check_tensors(tensors: Tensors) -> None:
    for name, x in zip(INPUTS, tensors, strict=True):
        if not (isinstance(x, torch.Tensor) or (x is None and name in OPTIONAL_INPUTS)):
            raise TypeError(
                f"{name}: got {shown(x)} of type {type(x).__module__}.{type(x).__qualname__}. nvrtc_attn.torch takes "
                f"torch tensors; nvrtc_attn.attention takes those of any framework."
            )
