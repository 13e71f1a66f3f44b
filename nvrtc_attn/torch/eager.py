"""`attention` of torch tensors with autograd, on torch's current stream, allocator and random generator."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.function import once_differentiable

from ..front.call import CallOptions, plain_options
from ..front.operands import (
    FURTHER_INPUTS,
    OPTIONAL_INPUTS,
    FurtherInputs,
    check_further,
    takes_further_inputs,
)
from ..front.part import Part
from ..front.philox import NO_RNG
from ..front.problem import Causal, WindowSize
from ..front.signature import are_plain
from .ops import attention as attention_by_operators
from .ops import cast_for_autocast, cast_further_for_autocast, is_dtensor, register_sharding
from .passes import DIFFERENTIABLE_PLACES, LazyTensors, Tensors, backward, forward
from .random import checked_rng, draw_rng

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What decides between the kernels and their operators, as names of this module: two look-ups less a call.
_traced_by_dynamo: Final = torch.compiler.is_dynamo_compiling
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_transformed: Final = torch._C._functorch.maybe_current_level
_autocast: Final = torch._C._is_any_autocast_enabled
_grad_enabled: Final = torch.is_grad_enabled
_deterministic: Final = torch._C._get_deterministic_algorithms
_PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter))
_NO_WINDOW: Final = (None, None)
_differentiable: Final = itemgetter(*DIFFERENTIABLE_PLACES)
_NOTHING_FURTHER: Final = (None,) * len(FURTHER_INPUTS)
_new_tuple: Any = tuple.__new__  # a third of the time of a named tuple's own constructor
_NONE: Final = (None,) * len(OPTIONAL_INPUTS)


@takes_further_inputs
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    causal: Causal = False,
    window_size: WindowSize = _NO_WINDOW,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng: Any = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    part: Part | None = None,
    **further: Unpack[FurtherInputs],
) -> Any:
    """`nvrtc_attn.attention` of torch tensors, differentiable in q, k, v, bias, sink and, by a returned lse, in lse.

    Parameters as there, but:

    rng
        Default: torch's generator of the device, which advances by the number of scores as it does for torch's own
        memory-efficient attention; while a CUDA graph is captured, a seed that torch draws anew at every replay.
    deterministic
        Whether the backward pass is bitwise reproducible. Default: ``torch.are_deterministic_algorithms_enabled()``.

    Gradients have the shapes of their inputs; that of a broadcast bias is summed inside the kernels. Outputs and
    gradients are dense. Runs on torch's current stream and allocates from torch's allocator.
    """
    # 0.2 us for plain tensors. Dynamo knows the first of these, and traces none of the others.
    if (
        _traced_by_dynamo()
        or _dispatch_modes()
        or _transformed()
        or not (q.__class__ in _PLAIN and k.__class__ in _PLAIN and v.__class__ in _PLAIN)
        or q.is_meta
        or not (bias is None or bias.__class__ in _PLAIN)
        or not (mask is None or mask.__class__ in _PLAIN)
        or not (not further or all(x is None or x.__class__ in _PLAIN for x in further.values()))
    ):
        if is_dtensor(q):
            register_sharding()
        return attention_by_operators(
            q, k, v, bias, mask, causal, window_size, softmax_scale, softcap, dropout_p, rng, cu_seqlens_q,
            cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, return_lse, deterministic, part, further,
        )  # fmt: skip
    if _autocast():
        q, k, v, bias = cast_for_autocast(q, k, v, bias)
        further = cast_further_for_autocast(q, further)
    tensors: Tensors = (
        q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k,
        *(check_further("attention", further) if further else _NOTHING_FURTHER),
    )  # fmt: skip
    grad = _grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or _wants_gradient(_differentiable(tensors)[3:])
    )
    if deterministic is None:
        deterministic = grad and _deterministic()
    elif deterministic is True:
        deterministic = grad  # without a backward pass it does not matter how that would be: one plan for both
    dbias = grad and bias is not None and bias.requires_grad
    dsink = False
    if further:
        sink = further.get("sink")
        dsink = grad and sink is not None and sink.requires_grad
    options: CallOptions = _new_tuple(CallOptions, (
        causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k,
        grad if return_lse is False else return_lse, deterministic, dbias, dsink, part,
    ))  # fmt: skip
    # The tables of plans look options up by equality, and 1 equals True: only these kinds may reach them.
    if not (are_plain(options) and 0 <= dropout_p <= 1):
        options = plain_options(options._replace(return_lse=return_lse))
        max_seqlen_q, max_seqlen_k, dropout_p = options.max_seqlen_q, options.max_seqlen_k, options.dropout_p
        return_lse = options.return_lse
        options = options._replace(return_lse=return_lse or grad, deterministic=options.deterministic and grad)
    state = NO_RNG
    # What is no tensor, or of another rank, is refused below.
    if dropout_p > 0 and isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.dim() == k.dim() == 4:
        if rng is not None:
            state = checked_rng(rng, q)
        elif part is not None:
            raise ValueError("rng: None, but this is a part of a larger attention. Pass its (seed, offset).")
        elif cu_seqlens_q is None:
            state = draw_rng(q, k, None)
        elif isinstance(cu_seqlens_q, torch.Tensor) and cu_seqlens_q.dim() == 1:
            state = draw_rng(q, k, (cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k))
    if not grad:
        out, lse = forward(tensors, options, state)
        return (out, lse) if return_lse else out
    try:
        results = forward(tensors, options, state, backward_follows=True)
    except LazyTensors as lazy:
        tensors = lazy.tensors
        results = forward(tensors, options, state, backward_follows=True)
    # Each argument and each tensor that is kept costs 0.4 us: what is not there is left out.
    for x in tensors[3:]:
        if x is not None:
            return _attach((options, state, results, tensors, return_lse), *_differentiable(tensors))
    tensors = tensors[:3]
    return _attach((options, state, results, tensors, return_lse), *tensors)


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The node of the graph. The forward pass is done when it is made: a result is one of ours, or both."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], *_: Any) -> Any:
        options, rng, results, tensors, return_lse = call
        ctx.save_for_backward(*results, *tensors)
        ctx.call = options, rng
        ctx.set_materialize_grads(False)
        return results if return_lse else results[0]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None) -> Any:
        # Without a graph of this pass there is nothing to refuse, and the wrapper takes two microseconds.
        return (_gradients_once if torch.is_grad_enabled() else _gradients)(ctx, dout, dlse)


# Past the Python layer of `Function.apply`, which serves transformations: those get the operators. 2.5 us.
_attach: Any = super(torch.autograd.Function, _Attention).apply


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    """The gradient of each argument of `_Attention.forward`."""
    options, rng = ctx.call
    out, lse, *tensors = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    if len(tensors) == 3:
        dq, dk, dv, *_ = backward((*tensors, *_NONE), out, lse, dout, dlse, options, rng)
        return None, dq, dk, dv
    return (None, *backward(tuple(tensors), out, lse, dout, dlse, options, rng))


_gradients_once: Any = once_differentiable(_gradients)  # type: ignore[no-untyped-call, unused-ignore]


def _wants_gradient(tensors: Tensors) -> bool:
    try:
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    except AttributeError:
        pass  # not a tensor, and refused
    return False
