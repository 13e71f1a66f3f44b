"""`attention` of torch tensors with autograd, on torch's current stream, allocator and random generator."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from ..front.call import CallOptions, plain_options
from ..front.operands import (
    FURTHER_INPUTS,
    OPTIONAL_INPUTS,
    FurtherInputs,
    check_further,
    takes_further_inputs,
)
from ..front.part import Part
from ..front.philox import NO_RNG, RngState
from ..front.problem import Causal, WindowSize
from ..front.signature import are_plain
from .autocast import cast_for_autocast, cast_further_for_autocast
from .derivatives import apply_of, no_forward_derivative, once_only, refuse_tangents
from .known import Known, known_calls
from .modified import attend as attend_modified
from .ops import attention as attention_by_operators
from .ops import gradients_by_operator
from .passes import DIFFERENTIABLE_PLACES, LazyTensors, Tensors, backward, forward
from .random import random_state
from .sharding import register_sharding
from .tensors import is_dtensor, is_transformed

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What decides between the kernels and their operators, as names of this module: two look-ups less a call.
_traced_by_dynamo: Final = torch.compiler.is_dynamo_compiling
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_traced_by_jit: Final = torch._C._is_tracing  # torch.jit.trace, which records operators and no launches
_transformed: Final = torch._C._functorch.maybe_current_level
_autocast: Final = torch._C._is_any_autocast_enabled
_autocast_dtype: Final = torch.get_autocast_dtype
_grad_enabled: Final = torch.is_grad_enabled
_deterministic: Final = torch._C._get_deterministic_algorithms
_forward_ad: Any = torch.autograd.forward_ad
_PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter))
_NO_WINDOW: Final = (None, None)
_differentiable: Final = itemgetter(*DIFFERENTIABLE_PLACES)
_NOTHING_FURTHER: Final = (None,) * len(FURTHER_INPUTS)
new_tuple: Any = tuple.__new__  # a third of the time of a named tuple's own constructor
_NONE: Final = (None,) * len(OPTIONAL_INPUTS)
ROWS_FIRST, HEADS_FIRST, GROUPED_HEADS_FIRST = range(3)
"""``[batch, seqlen, heads, head_dim]``, and with heads before rows; calls of one layout are not found by another."""


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
    return_max_logit: bool = False,
    deterministic: bool | None = None,
    part: Part | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: Mapping[str, Any] | None = None,
    **further: Unpack[FurtherInputs],
) -> Any:
    """`nvrtc_attn.attention` of torch tensors, differentiable in q, k, v, bias, sink and, by a returned lse, in lse.

    Also in every floating-point tensor that ``score_mod`` captured, and in those of ``aux``. Parameters as there,
    without ``out`` and ``stream``; but:

    rng
        Default: torch's generator of the device, which advances by the number of scores as it does for torch's own
        memory-efficient attention; while a CUDA graph is captured, a seed that torch draws anew at every replay.
    deterministic
        Whether the backward pass is bitwise reproducible. Default: ``torch.are_deterministic_algorithms_enabled()``.

    Gradients have the shapes of their inputs; that of a broadcast bias is summed inside the kernels. Outputs and
    gradients are dense. Runs on torch's current stream and allocates from torch's allocator.
    """
    if score_mod is not None or mask_mod is not None or aux is not None:
        return attend_modified(
            q, k, v, bias, mask, causal, window_size, softmax_scale, softcap, dropout_p, rng, cu_seqlens_q,
            cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, return_lse, deterministic, part, further,
            return_max_logit, score_mod, mask_mod, aux,
        )  # fmt: skip
    if further:  # one that is None is as none, but a name that there is not must be seen
        given: Any = {name: x for name, x in further.items() if x is not None or name not in FURTHER_INPUTS}
        further = given
    alone = (
        bias is None and mask is None and cu_seqlens_q is None and cu_seqlens_k is None and seqused_k is None
        and not further and part is None
    )  # fmt: skip
    # Dynamo knows what it is asked here, and traces nothing behind it.
    if alone and return_max_logit is False and not _traced_by_dynamo():
        options = new_tuple(CallOptions, (
            causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, return_lse,
            _deterministic() if deterministic is None else deterministic, False, False, None, False,
        ))  # fmt: skip
        is_plain = (
            (causal is False or causal is True)
            and window_size is _NO_WINDOW
            and (softmax_scale is None or softmax_scale.__class__ is float)
            and softcap.__class__ is float
            and dropout_p.__class__ is float
            and max_seqlen_q is None
            and max_seqlen_k is None
            and (return_lse is False or return_lse is True)
            and (deterministic is None or deterministic is False or deterministic is True)
        )
        found = again(q, k, v, options, ROWS_FIRST, is_plain)
        if found is not None:
            return found
    return attend(
        q, k, v, bias, mask, causal, window_size, softmax_scale, softcap, dropout_p, rng, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, seqused_k, return_lse, deterministic, part, further, ROWS_FIRST, alone,
        return_max_logit,
    )  # fmt: skip


def again(q: Any, k: Any, v: Any, options: CallOptions, layout: int, is_plain: bool) -> Any:
    """`attend` of q, k and v alone, where such a call was made before; None where it was not.

    ``is_plain``: the options are surely those of `are_plain`, which asks them all.
    """
    try:
        recent = known_calls((options, layout, _grad_enabled(), _autocast() and _autocast_dtype("cuda")))
    except TypeError:  # options of kinds that no table takes
        return None
    # A table looks options up by equality, and 1 equals True.
    if recent is None or not (is_plain or are_plain(options)):
        return None
    for known in recent:
        if known.fits(q, k, v):
            results = known.run(q, k, v)
            if results is None:
                continue
            if known.grad:
                return (known.attach or _node_of(known, options.return_lse, layout))(results, q, k, v)
            if _forward_ad._current_level >= 0:
                return None
            return results if options.return_lse else results[0]
    return None


def attend(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, causal: Any, window_size: Any, softmax_scale: Any, softcap: Any,
    dropout_p: Any, rng: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    seqused_k: Any, return_lse: Any, deterministic: Any, part: Any, further: Any, layout: int, alone: bool,
    return_max_logit: Any = False,
) -> Any:  # fmt: skip
    """`attention` of any tensors, q, k and v ``alone`` or with others; laid out, as out is, as ``layout`` says."""
    # 0.2 us for plain tensors. Dynamo knows the first of these, and traces none of the others.
    if (
        _traced_by_dynamo()
        or _dispatch_modes()
        or _traced_by_jit()
        or _transformed()
        or not (q.__class__ in _PLAIN and k.__class__ in _PLAIN and v.__class__ in _PLAIN)
        or q.is_meta
        or not (bias is None or bias.__class__ in _PLAIN)
        or not (mask is None or mask.__class__ in _PLAIN)
        or not (cu_seqlens_q is None or cu_seqlens_q.__class__ in _PLAIN)
        or not (cu_seqlens_k is None or cu_seqlens_k.__class__ in _PLAIN)
        or not (seqused_k is None or seqused_k.__class__ in _PLAIN)
        or not (not further or all(x is None or x.__class__ in _PLAIN for x in further.values()))
    ):
        if is_dtensor(q):
            register_sharding()
        if layout:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        found = attention_by_operators(
            q, k, v, bias, mask, causal, window_size, softmax_scale, softcap, dropout_p, rng, cu_seqlens_q,
            cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, return_lse, deterministic, part, further,
            return_max_logit,
        )  # fmt: skip
        return found.transpose(1, 2) if layout else found
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
        deterministic = _deterministic()
    dbias = grad and bias is not None and bias.requires_grad
    dsink = False
    if further:
        sink = further.get("sink")
        dsink = grad and sink is not None and sink.requires_grad
    options: CallOptions = new_tuple(CallOptions, (
        causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, return_lse, deterministic,
        dbias, dsink, part, return_max_logit,
    ))  # fmt: skip
    # The tables of plans look options up by equality, and 1 equals True: only these kinds may reach them.
    if not (are_plain(options) and 0 <= dropout_p <= 1):
        options = plain_options(options)
        max_seqlen_q, max_seqlen_k, dropout_p = options.max_seqlen_q, options.max_seqlen_k, options.dropout_p
        return_lse, return_max_logit = options.return_lse, options.return_max_logit
    known_key = None
    if alone and dropout_p == 0 and not return_max_logit:
        known_key = options, layout, _grad_enabled(), _autocast() and _autocast_dtype("cuda")
    # A backward pass needs the lse. Without one it does not matter how it would be: one plan for both.
    if options.return_lse is not (return_lse or grad) or (options.deterministic and not grad):
        options = new_tuple(
            CallOptions, (*options[:7], return_lse or grad, options.deterministic and grad, *options[9:])
        )
    state = NO_RNG
    if dropout_p > 0:
        state = random_state(
            rng, part, q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k, backward_follows=grad
        )  # fmt: skip
    heads_first = layout != ROWS_FIRST
    if not grad:
        if _forward_ad._current_level >= 0:
            refuse_tangents(*_differentiable(tensors))
        out, lse, *max_logit = forward(tensors, options, state, heads_first=heads_first, known_key=known_key)
        if max_logit:
            return (out, lse, *max_logit) if return_lse else (out, *max_logit)
        return (out, lse) if return_lse else out
    try:
        results = forward(
            tensors, options, state, backward_follows=True, heads_first=heads_first, known_key=known_key
        )  # fmt: skip
    except LazyTensors as lazy:
        tensors = lazy.tensors
        results = forward(tensors, options, state, backward_follows=True, heads_first=heads_first)
    max_logit = ()
    if return_max_logit:  # of no use to the backward pass, and without a gradient
        *results, max_logit = results
        results, max_logit = tuple(results), (max_logit,)
        options = options._replace(return_max_logit=False)
    # Each argument and each tensor that is kept costs 0.4 us: what is not there is left out.
    for x in tensors[3:]:
        if x is not None:
            call = options, state, results, tensors, return_lse, layout
            return _beside(_attach(call, *_differentiable(tensors)), max_logit)
    tensors = tensors[:3]
    return _beside(_attach((options, state, results, tensors, return_lse, layout), *tensors), max_logit)


def _beside(found: Any, more: tuple[torch.Tensor, ...]) -> Any:
    """Results with gradients, one or two, and then one without."""
    if not more:
        return found
    return (*found, *more) if isinstance(found, tuple) else (found, *more)


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The node of the graph. The forward pass is done when it is made: a result is one of ours, or both."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], *_: Any) -> Any:
        options, rng, results, tensors, return_lse, layout = call
        ctx.save_for_backward(*results, *tensors)
        ctx.call = options, rng, layout
        if return_lse:
            ctx.set_materialize_grads(False)
            return results
        return results[0]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None) -> Any:
        if _grad_enabled():  # a graph of this pass is asked for: a use of it is refused
            return _gradients_once(ctx, ctx.call, dout, dlse)
        return _gradients(ctx, ctx.call, dout, dlse)

    jvp = staticmethod(no_forward_derivative)


_attach: Any = apply_of(_Attention)


def _node_of(known: Known, return_lse: bool, layout: int) -> Any:
    """What `_attach` is, of the results, q, k and v of a known call.

    A class of its own says which call it is: an attribute of each node takes 2.5 us to set, find and free. It has the
    name of the other one, as ``grad_fn`` shows it, and lines of it: a function for both would be one more call.
    """
    call = known.options, NO_RNG, layout

    class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
        @staticmethod
        def forward(ctx: Any, results: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> Any:
            ctx.save_for_backward(*results, *tensors)
            if return_lse:
                ctx.set_materialize_grads(False)
                return results
            return results[0]

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None) -> Any:
            if _grad_enabled():
                return _gradients_once(ctx, call, dout, dlse, known)
            saved = ctx.saved_tensors
            if dlse is None:
                out, lse, q, k, v = saved
                for later in known.backward:
                    if later.fits(q, k, v, out, lse, dout) and (found := later.run(q, k, v, out, lse, dout)):
                        return found
            return _gradients(ctx, call, dout, dlse, known, saved)

        jvp = staticmethod(no_forward_derivative)

    known.attach = apply_of(_Attention)
    return known.attach


def _gradients(
    ctx: Any, call: tuple[CallOptions, RngState, int], dout: torch.Tensor | None, dlse: torch.Tensor | None,
    known: Known | None = None, saved: Any = None,
) -> Any:  # fmt: skip
    """The gradient of each argument of the node's ``forward``.

    Parameters
    ----------
    call
        Options, state of the random numbers, and layout of the forward pass.
    known
        The call, where it was made before: it remembers this pass for later ones.
    saved
        What `ctx` saved, if it was asked: checkpointing hands each tensor out once.
    """
    options, rng, layout = call
    heads_first = layout != ROWS_FIRST
    out, lse, *tensors = ctx.saved_tensors if saved is None else saved
    dout = torch.zeros_like(out) if dout is None else dout
    if is_transformed():  # a batch of gradients at once
        return None, *_gradients_of_batch(tensors, out, lse, dout, dlse, options, rng, heads_first)
    if len(tensors) == 3:
        dq, dk, dv, *_ = backward(
            (*tensors, *_NONE), out, lse, dout, dlse, options, rng, heads_first=heads_first, known=known
        )
        return None, dq, dk, dv
    return (None, *backward(tuple(tensors), out, lse, dout, dlse, options, rng, heads_first=heads_first))


def _gradients_of_batch(
    tensors: list[Any], out: Any, lse: Any, dout: Any, dlse: Any, options: CallOptions, rng: RngState, heads_first: bool
) -> list[Any]:
    """The gradient of each tensor that the node was given, those of tensors without memory."""
    q, k, v, *optional = tensors
    if heads_first:
        q, k, v, out, dout = [x.transpose(1, 2) for x in (q, k, v, out, dout)]
    gradients: list[Any] = gradients_by_operator((q, k, v, *(optional or _NONE)), out, lse, dout, dlse, options, rng)
    if heads_first:
        gradients[:3] = [x.transpose(1, 2) for x in gradients[:3]]
    return gradients if optional else gradients[:3]


def _gradients_once(
    ctx: Any, call: tuple[CallOptions, RngState, int], dout: torch.Tensor | None, dlse: torch.Tensor | None,
    known: Known | None = None,
) -> Any:  # fmt: skip
    saved = ctx.saved_tensors
    if is_transformed():  # the operator refuses a second derivative itself
        return _gradients(ctx, call, dout, dlse, known, saved)
    return once_only(lambda: _gradients(ctx, call, dout, dlse, known, saved), (*saved[2:], dout, dlse))


def _wants_gradient(tensors: Tensors) -> bool:
    try:
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    except AttributeError:
        pass  # not a tensor, and refused
    return False
