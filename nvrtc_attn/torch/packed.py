"""Attention of q, k and v that lie in one tensor, as one projection makes them, with the gradient in one tensor too.

Views of a packed tensor are read where they are, but torch's gradient of such views is a copy: dq, dk and dv are
written, read again and put together. Here the backward pass writes them where they belong. Plain tensors take a node of
autograd, programs of torch.compile the operators of `packed_ops`.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..front.call import CallOptions, plain_options
from ..front.operands import FURTHER_INPUTS, OPTIONAL_INPUTS
from ..front.philox import NO_RNG, RngState
from ..front.problem import Causal, WindowSize
from ..front.signature import are_plain
from .arguments import operator_arguments
from .autocast import cast_for_autocast, cast_further_for_autocast
from .derivatives import apply_of, no_forward_derivative, once_only
from .eager import attention, new_tuple
from .known import Known, known_calls
from .ops import gradients_by_operator
from .packed_ops import attention_packed_forward, packed_together, views
from .passes import LazyTensors, backward, forward
from .random import random_state
from .tensors import PLAIN, is_dtensor, is_transformed

_traced_by_dynamo: Final = torch.compiler.is_dynamo_compiling
_grad_enabled: Final = torch.is_grad_enabled
_autocast: Final = torch._C._is_any_autocast_enabled
_deterministic: Final = torch._C._get_deterministic_algorithms
_PARTS: Final = {"qkv": 3, "kv": 2}
_BIAS: Final = OPTIONAL_INPUTS.index("bias")
_SINK: Final = OPTIONAL_INPUTS.index("sink")
_NONE: Final = (None,) * len(OPTIONAL_INPUTS)
_OWN: Final = frozenset((*OPTIONAL_INPUTS, "max_seqlen_q", "max_seqlen_k"))
"""Arguments beside those that are spelled out for which there is a gradient without a copy."""

# ------------------------------------------------------------------------------------------------------- the doors


def attention_qkvpacked(
    qkv: torch.Tensor,
    *,
    causal: Causal = False,
    window_size: WindowSize = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    **others: Any,
) -> Any:
    """`nvrtc_attn.torch.attention` of ``*qkv.unbind(2)``, without a copy in the gradient of qkv.

    Parameters
    ----------
    qkv : ``[B, M, 3, H, D]``
        Queries, keys and values, with as many heads each; a view of the output of one linear layer, say. Any strides.
        Packed sequences: ``[1, total, 3, H, D]`` with ``cu_seqlens_q``, ``cu_seqlens_k`` and both maximal lengths.
    others
        Every other argument of `attention`. With ``score_mod``, ``mask_mod``, ``part`` or ``return_max_logit``, and
        in torch.func, other dispatch modes and DTensors, the gradient is that of the three views, with a copy.

    Returns
    -------
    What `attention` does. The gradient of qkv is dense, and of its shape and dtype.

    Raises
    ------
    ValueError
        qkv has another rank, or its third dim is not 3.

    The other errors are those of `attention`.
    """
    options = causal, window_size, softmax_scale, softcap, dropout_p, rng, return_lse, deterministic
    return _attend(None, qkv, "qkv", options, others)


def attention_kvpacked(
    q: torch.Tensor,
    kv: torch.Tensor,
    *,
    causal: Causal = False,
    window_size: WindowSize = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    **others: Any,
) -> Any:
    """`nvrtc_attn.torch.attention` of q and ``*kv.unbind(2)``, without a copy in the gradient of kv.

    Parameters
    ----------
    q : ``[B, M, H, D]``
    kv : ``[B, N, 2, Hkv, D]``
        Keys and values; a view of the output of one linear layer, say. Any strides.
    others
        As for `attention_qkvpacked`, which also says what is returned and raised.
    """
    _check_tensor(q, "q")
    options = causal, window_size, softmax_scale, softcap, dropout_p, rng, return_lse, deterministic
    return _attend(q, kv, "kv", options, others)


def _check_tensor(x: Any, name: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}. nvrtc_attn.torch takes torch tensors.")


def _check(packed: Any, name: str) -> None:
    _check_tensor(packed, name)
    if packed.dim() != 5 or packed.shape[2] != _PARTS[name]:
        raise ValueError(
            f"{name}: shape {tuple(packed.shape)}. It is [batch, seqlen, {_PARTS[name]}, heads, head_dim]."
        )


def _attend(q: Any, packed: Any, name: str, options: tuple[Any, ...], others: dict[str, Any]) -> Any:
    _check(packed, name)
    if _traced_by_dynamo():
        if others.keys() <= _OWN and not is_dtensor(packed):
            return _by_operators(q, packed, options, others)
    elif _grad_enabled() and others.keys() <= _OWN:
        try:
            if not others and (found := _again(q, packed, options)) is not None:
                return found
            if _is_plain(q, packed, others):
                return _attend_eagerly(q, packed, options, others)
        except LazyTensors:
            pass  # autograd has to see what they stand for
    causal, window_size, softmax_scale, softcap, dropout_p, rng, return_lse, deterministic = options
    return attention(
        *views(q, packed), causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
        dropout_p=dropout_p, rng=rng, return_lse=return_lse, deterministic=deterministic, **others,
    )  # fmt: skip


def _is_plain(q: Any, packed: torch.Tensor, others: dict[str, Any]) -> bool:
    """Whether nothing has to see operators or to be refused by name, and a gradient may be asked for."""
    tensors = [x for x in (q, packed, *others.values()) if isinstance(x, torch.Tensor)]
    return (
        all(x.__class__ in PLAIN and not (x.is_meta or x.is_neg()) for x in tensors)
        and all(others.get(name) is None or isinstance(others[name], torch.Tensor) for name in OPTIONAL_INPUTS)
        and any(x.requires_grad for x in tensors)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_tracing()
        and not is_transformed()
    )


def _by_operators(q: Any, packed: Any, options: tuple[Any, ...], others: dict[str, Any]) -> Any:
    """The doors in a program of torch.compile."""
    q, packed, others = _cast_for_autocast(q, packed, others)
    causal, window_size, softmax_scale, softcap, dropout_p, rng, return_lse, deterministic = options
    bias, mask, starts_q, starts_k, seqused_k = (
        others.get(name) for name in ("bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    )
    further = {name: others[name] for name in FURTHER_INPUTS if others.get(name) is not None}
    arguments, return_lse, _ = operator_arguments(
        (), *views(q, packed), bias, mask, causal, window_size, softmax_scale, softcap, dropout_p, rng, starts_q,
        starts_k, others.get("max_seqlen_q"), others.get("max_seqlen_k"), seqused_k, return_lse, deterministic, None,
        further,
    )  # fmt: skip
    out, lse = attention_packed_forward(q, packed, *arguments[3:-1])
    return (out, lse) if return_lse else out


# ---------------------------------------------------------------------------------------------- the kernels themselves


def _again(q: Any, packed: Any, given: tuple[Any, ...]) -> Any:
    """`_attend_eagerly` of a call that was made before, without autocast; None where it was not."""
    causal, window_size, softmax_scale, softcap, dropout_p, _, return_lse, deterministic = given
    options: CallOptions = new_tuple(CallOptions, (
        causal, window_size, softmax_scale, softcap, dropout_p, None, None, return_lse,
        _deterministic() if deterministic is None else deterministic, False, False, None, False,
    ))  # fmt: skip
    try:
        recent = known_calls((options, _PARTS["qkv" if q is None else "kv"], "packed", False))
    except TypeError:  # options of kinds that no table takes
        return None
    # The guards of a known call see all that `_is_plain` asks, but for the gradient: q, k and v are detached.
    if recent is None or _autocast() or not (packed.requires_grad or (q is not None and q.requires_grad)):
        return None
    return _known(recent, q, packed, return_lse) if are_plain(options) else None


def _known(recent: tuple[Known, ...], q: Any, packed: Any, return_lse: bool) -> Any:
    parts = views(q, packed.detach())
    for known in recent:
        if known.fits(*parts) and (results := known.run(*parts)) is not None:
            return (known.attach or _node_of(known, return_lse))(results, *_inputs(q, packed))
    return None


def _cast_for_autocast(q: Any, packed: Any, others: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The tensors as autocast gives them to attention, the packed one in one piece."""
    first = packed if q is None else q
    further = {name: others[name] for name in FURTHER_INPUTS if others.get(name) is not None}
    first, rest, _, bias = cast_for_autocast(first, None if q is None else packed, None, others.get("bias"))
    others = {**others, "bias": bias, **cast_further_for_autocast(first, further)}
    return (None, first, others) if q is None else (first, rest, others)


def _attend_eagerly(q: Any, packed: Any, given: tuple[Any, ...], others: dict[str, Any]) -> Any:
    """As `eager.attend`, with a gradient. LazyTensors: nothing was computed."""
    causal, window_size, softmax_scale, softcap, dropout_p, rng, return_lse, deterministic = given
    autocast: Any = _autocast() and torch.get_autocast_dtype("cuda")
    if autocast:
        q, packed, others = _cast_for_autocast(q, packed, others)
    parts = views(q, packed.detach())
    optional = tuple(map(others.get, OPTIONAL_INPUTS)) if others else _NONE
    max_seqlen_q, max_seqlen_k = others.get("max_seqlen_q"), others.get("max_seqlen_k")
    if deterministic is None:
        deterministic = _deterministic()
    bias, sink = optional[_BIAS], optional[_SINK]
    options: CallOptions = new_tuple(CallOptions, (
        causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, return_lse, deterministic,
        bias is not None and bias.requires_grad, sink is not None and sink.requires_grad, None, False,
    ))  # fmt: skip
    if not (are_plain(options) and 0 <= dropout_p <= 1):
        options = plain_options(options)
    return_lse = options.return_lse
    key = None
    if optional == _NONE and options.dropout_p == 0:
        key = options, _PARTS["qkv" if q is None else "kv"], "packed", autocast
        recent = known_calls(key)
        if recent is not None and (found := _known(recent, q, packed, return_lse)) is not None:
            return found
    if not return_lse:
        options = options._replace(return_lse=True)
    state = NO_RNG
    if options.dropout_p > 0:
        state = random_state(
            rng, None, parts[0], parts[1], others.get("cu_seqlens_q"), options.max_seqlen_q, options.max_seqlen_k,
            backward_follows=True,
        )  # fmt: skip
    results = forward((*parts, *optional), options, state, backward_follows=True, known_key=key)
    return _attach((options, state, results, optional, return_lse), *_inputs(q, packed), bias, sink)


def _inputs(q: Any, packed: Any) -> tuple[Any, ...]:
    """What a node of the graph is given."""
    return (packed,) if q is None else (q, packed)


class _PackedAttention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The node of the graph, of q, if it has memory of its own, the packed tensor, bias and sink."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], *inputs: Any) -> Any:
        options, state, results, optional, return_lse = call
        ctx.save_for_backward(*results, *optional, *inputs[:-2])
        ctx.call = options, state
        if return_lse:
            ctx.set_materialize_grads(False)
            return results
        return results[0]

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> Any:
        return _gradients(ctx.call, ctx.saved_tensors, dout, dlse)

    jvp = staticmethod(no_forward_derivative)


_attach: Any = apply_of(_PackedAttention)


def _node_of(known: Known, return_lse: bool) -> Any:
    """What `_attach` is, of the results and inputs of a known call, as in `eager`."""
    call = known.options, NO_RNG

    class _PackedAttention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
        @staticmethod
        def forward(ctx: Any, results: tuple[torch.Tensor, ...], *inputs: torch.Tensor) -> Any:
            ctx.save_for_backward(*results, *inputs)
            if return_lse:
                ctx.set_materialize_grads(False)
                return results
            return results[0]

        @staticmethod
        def backward(ctx: Any, dout: Any, dlse: Any = None) -> Any:
            out, lse, *inputs = saved = ctx.saved_tensors
            if dlse is None and dout is not None and not _grad_enabled():
                parts = views(inputs[0] if len(inputs) > 1 else None, inputs[-1])
                for later in known.backward:
                    if later.fits(*parts, out, lse, dout) and (found := later.run(*parts, out, lse, dout)):
                        return found
            return _gradients(call, (out, lse, *_NONE, *saved[2:]), dout, dlse, known)[: len(inputs) + 1]

        jvp = staticmethod(no_forward_derivative)

    known.attach = apply_of(_PackedAttention)
    return known.attach


def _gradients(
    call: tuple[CallOptions, RngState], saved: tuple[Any, ...], dout: Any, dlse: Any, known: Known | None = None
) -> tuple[Any, ...]:
    """The gradient of each argument of the node's ``forward``, those of bias and sink last.

    ``saved``: out, lse, `OPTIONAL_INPUTS`, q if it has memory of its own, and the packed tensor.
    """
    if _grad_enabled() and not is_transformed():  # a graph of this pass is asked for: a use of it is refused
        return once_only(lambda: _gradients(call, saved, dout, dlse, known), (*saved[2:], dout, dlse))
    options, state = call
    out, lse, *rest = saved
    optional, inputs = tuple(rest[: len(_NONE)]), rest[len(_NONE) :]
    q, packed = (None, *inputs) if len(inputs) == 1 else inputs
    dout = torch.zeros_like(out) if dout is None else dout
    parts = views(q, packed)
    if is_transformed():  # a batch of gradients at once
        dq, dk, dv, dbias, dsink = gradients_by_operator((*parts, *optional), out, lse, dout, dlse, options, state)
        return None, *packed_together(q is None, dq, dk, dv), dbias, dsink
    made = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    dq, _, _, dbias, dsink = backward(
        (*parts, *optional), out, lse, dout, dlse, options, state, known=known, packed=made
    )
    return (None, made, dbias, dsink) if q is None else (None, dq, made, dbias, dsink)
