"""Attention as operators of torch, ``nvrtc_attn::attention_forward`` and ``attention_backward``.

`nvrtc_attn.torch.attention` calls its kernels directly where tensors are plain: that costs a third of a dispatch. What
must see an operator (torch.compile, torch.export, FakeTensor and other dispatch modes, torch.func, DTensor) gets these.
They take every tensor in any layout, return dense ones, and run on the CPU too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ..base.tables import remember
from ..front.call import CallOptions, describe_shapes
from ..front.operands import GRADIENTS, INPUTS, OPTIONAL_GRADIENTS
from ..front.philox import RngState
from ..front.tensors import Device
from ..modifiers.modifier import Modifier
from .arguments import (
    BIAS,
    CAUSAL,
    CU_SEQLENS_Q,
    DROPOUT,
    OPTIONS,
    SEED_WORD,
    SIGNATURE,
    causal_word,
    no_part,
    operator_arguments,
    part_of,
    results_of,
    rng_operands,
    split,
)
from .derivatives import register_derivative
from .known import BackwardCalls, known_calls
from .passes import DIFFERENTIABLE_PLACES, backward, forward
from .random import rng_values
from .tensors import PLAIN, as_plain, is_transformed

_grad_enabled: Final = torch.is_grad_enabled

SHORT_WAYS: Final[dict[str, Callable[[tuple[Any, ...]], Any]]] = {}
"""Of each operator: its results where they need no graph, or None."""


class Operators(torch.library.Library):
    """Operators whose calls take their short way, where there is one, past the kernel that torch makes for autograd."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        short_way = SHORT_WAYS.get(op_name if isinstance(op_name, str) else op_name._opname)
        if dispatch_key != "Autograd" or short_way is None or not options.get("with_keyset"):
            return super().impl(op_name, fn, dispatch_key, **options)

        def kernel(keyset: Any, *arguments: Any) -> Any:
            if _grad_enabled() or (found := short_way(arguments)) is None:
                return fn(keyset, *arguments)
            return found

        return super().impl(op_name, kernel, dispatch_key, **options)


# Without defaults: the dispatcher drops arguments that equal theirs, and rules of sharding count on the positions.
_LIBRARY: Final = Operators("nvrtc_attn", "FRAGMENT")
_LIBRARY.define(
    f"attention_forward({SIGNATURE}, bool return_lse, bool return_max_logit) -> "
    "(Tensor out, Tensor lse, Tensor max_logit)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {SIGNATURE}, "
    f"{', '.join(f'bool {name}' for name in OPTIONAL_GRADIENTS)}) -> "
    f"({', '.join(f'Tensor {name}' for name in ('dq', 'dk', 'dv', *OPTIONAL_GRADIENTS))})",
    tags=(torch.Tag.pt2_compliant_tag,),
)
attention_forward: Any = torch.ops.nvrtc_attn.attention_forward.default
attention_backward: Any = torch.ops.nvrtc_attn.attention_backward.default

# ------------------------------------------------------------------------------------------------------- the door


def attention(*arguments: Any) -> Any:
    """`nvrtc_attn.torch.attention` by the operators, of the arguments of `operator_arguments`."""
    given, return_lse, return_max_logit = operator_arguments((), *arguments)
    return results_of(attention_forward(*given), return_lse, return_max_logit)


def gradients_by_operator(
    tensors: tuple[Any, ...], out: Any, lse: Any, dout: Any, dlse: Any, options: CallOptions, rng: RngState
) -> Any:
    """What `passes.backward` returns, by the operator, which takes tensors that stand for a batch of them."""
    if options.part is not None:
        raise no_part()
    seed, offset, words = rng_operands(rng_values(rng), tensors[0])
    wanted = [getattr(options, name) for name in OPTIONAL_GRADIENTS]
    gradients = attention_backward(
        dout, dlse, out, lse, *tensors, seed, offset, *words, causal_word(options.causal),
        *(options.window_size or (None, None)), options.softmax_scale, options.softcap, options.dropout_p,
        options.max_seqlen_q, options.max_seqlen_k, options.deterministic, None, *wanted,
    )  # fmt: skip
    given = dict(zip(OPTIONAL_GRADIENTS, wanted, strict=True))
    return [x if given.get(name, True) else None for name, x in zip(GRADIENTS, gradients, strict=True)]


# ---------------------------------------------------------------------------------------------------- the kernels


def run_forward(*arguments: Any, known_key: Any = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel of the operator ``attention_forward``, below autograd. ``known_key`` as of `passes.forward`."""
    *arguments_, return_lse, return_max_logit = arguments
    with torch.no_grad():
        tensors, options, rng = split(tuple(arguments_), return_lse)
        options = options._replace(return_max_logit=return_max_logit)
        # Below autograd lse tells that gradients are wanted, though not whether that of a bias is.
        follows = return_lse and tensors[BIAS] is None
        out, lse, *most = forward(tensors, options, rng, backward_follows=follows, known_key=known_key)
        q = tensors[0]
        max_logit = most[0] if most else torch.empty(0, dtype=torch.float32, device=q.device)
        if not out.numel():
            out = out.new_empty(out.shape)  # strides of nothing differ
        if lse is None:
            lse = torch.empty(0, dtype=torch.float32, device=q.device)
        elif not lse.numel():
            lse = lse.new_empty(lse.shape)
    return out, lse, max_logit


def run_backward(
    dout: Any, dlse: Any, out: Any, lse: Any, *arguments: Any, known: BackwardCalls | None = None, packed: Any = None
) -> Any:
    """The kernel of the operator ``attention_backward``. ``known`` and ``packed`` as of `passes.backward`."""
    arguments_, wanted = arguments[:-OPTIONS], arguments[-OPTIONS:]
    with torch.no_grad():
        tensors, options, rng = split(arguments_, True, *wanted)
        dout, dlse, out, lse = map(as_plain, (dout, dlse, out, lse))
        gradients = backward(tensors, out, lse, dout, dlse, options, rng, known=known, packed=packed)
    return tuple(dout.new_empty(0) if x is None else x for x in gradients)


def forward_short_way(arguments: tuple[Any, ...]) -> Any:
    """What a program of torch.compile calls again and again, without a second way through the dispatcher; or None.

    Torch's own kernel for autograd and that way take 13 us of a call of 30 (a 2-core CPU, 2026-11-23).
    """
    q, k, v, *rest = arguments
    key = tuple(rest)
    try:
        recent = known_calls(key)
    except TypeError:  # symbols
        return None
    for known in recent or ():
        if known.fits(q, k, v) and (found := known.run(q, k, v)) is not None:
            out, lse = found
            nothing = out.new_empty(0, dtype=torch.float32)
            return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse, nothing
    if not (are_alone((q, k, v), rest) and rest[DROPOUT - 3] == 0 and not rest[-1]):
        return None
    return run_forward(*arguments, known_key=key)


# Everything of a call of the backward operator but its first seven tensors -> the passes that were made.
_backward_calls: dict[Any, BackwardCalls] = {}


def _backward_short_way(arguments: tuple[Any, ...]) -> Any:
    """The same of the backward operator."""
    dout, dlse, out, lse, q, k, v, *rest = arguments
    if dlse is not None:
        return None
    key = tuple(rest)
    try:
        calls = _backward_calls.get(key)
    except TypeError:
        return None
    if calls is not None:
        for known in calls.backward:
            if known.fits(q, k, v, out, lse, dout) and (found := known.run(q, k, v, out, lse, dout)) is not None:
                return (*found[1:], *(dout.new_empty(0) for _ in OPTIONAL_GRADIENTS))
    if not (are_alone((q, k, v, out, lse, dout), rest) and rest[DROPOUT - 3] == 0):
        return None
    if calls is None:
        calls = remember(_backward_calls, key, BackwardCalls())
    return run_backward(*arguments, known=calls)


def are_alone(tensors: tuple[Any, ...], rest: Sequence[Any]) -> bool:
    """Whether a call is of plain GPU tensors without optional ones, and no mode and no transformation has to see it.

    ``rest``: the arguments behind q, k and v, so that places in the signature are three less here.
    """
    return (
        all(x.__class__ in PLAIN and x.is_cuda and not x.is_neg() for x in tensors)
        and all(x is None for x in rest[: SEED_WORD - 3])
        and not torch._C._len_torch_dispatch_stack()
        and not is_transformed()
    )


SHORT_WAYS.update(attention_forward=forward_short_way, attention_backward=_backward_short_way)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention_forward", run_forward, _key)
    _LIBRARY.impl("attention_backward", run_backward, _key)


# ------------------------------------------------------------------------------------------------- shapes and types


def forward_fake(*arguments: Any, modifier: Modifier | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, _, v = arguments[:3]
    *arguments_, return_lse, return_max_logit = arguments
    validate(tuple(arguments_), modifier)
    batch, rows, heads, _ = q.shape
    out = q.new_empty((batch, rows, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, rows) if return_lse else (0,), dtype=torch.float32)
    starts = arguments[CU_SEQLENS_Q]
    sequences = batch if starts is None else starts.shape[0] - 1
    return out, lse, q.new_empty((sequences, heads) if return_max_logit else (0,), dtype=torch.float32)


def backward_fake(dout: Any, dlse: Any, out: Any, lse: Any, *arguments: Any) -> Any:
    wanted = dict(zip(OPTIONAL_GRADIENTS, arguments[-OPTIONS:], strict=True))
    validate(arguments[:-OPTIONS], None, **wanted)
    inputs = [arguments[place] for place in DIFFERENTIABLE_PLACES]
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) if wanted.get(name, True) else dout.new_empty(0)
        for name, x in zip(GRADIENTS, inputs, strict=True)
    )


torch.library.register_fake("nvrtc_attn::attention_forward", forward_fake, lib=_LIBRARY)
torch.library.register_fake("nvrtc_attn::attention_backward", backward_fake, lib=_LIBRARY)


def validate(arguments: tuple[Any, ...], modifier: Modifier | None, **gradients: bool) -> None:
    """Refuse while tracing what the kernels would refuse later; sizes that are symbols must wait."""
    given = {name: x for name, x in zip(INPUTS, arguments, strict=False) if x is not None}
    for name in ("q", "k", "v"):
        if given[name].dim() != 4:
            raise ValueError(f"{name}: shape {tuple(given[name].shape)}. Expected rank 4, [batch, seqlen, heads, dim].")
    places = {name: x.device for name, x in given.items()}
    if len(set(places.values())) > 1:
        found = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise ValueError(f"{found}: all tensors of a call are on one device. Move them to {places['q']}.")
    *scalars, part = arguments[SEED_WORD:]
    sizes = [n for x in (*given.values(), *(modifier.captures if modifier else ())) for n in x.shape]
    if not all(isinstance(n, (int, float, str, type(None))) for n in (*sizes, *scalars, *(part or ()))):
        return
    causal, left, right, scale, softcap, dropout_p, max_q, max_k, deterministic = scalars[2:]
    wanted: dict[str, Any] = {**gradients}
    options = CallOptions(
        causal=CAUSAL[causal], window_size=(left, right), softmax_scale=scale, softcap=softcap, dropout_p=dropout_p,
        max_seqlen_q=max_q, max_seqlen_k=max_k, deterministic=deterministic, return_lse=bool(gradients),
        part=part_of(part), **wanted,
    )  # fmt: skip
    operands = {n: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for n, x in given.items()}
    describe_shapes(operands, options, Device("cuda" if given["q"].is_cuda else "meta", 0), modifier=modifier)


# ------------------------------------------------------------------------------------------------------ derivatives

setup_context, derivative = register_derivative(
    _LIBRARY, attention_forward, attention_backward, tensors=SEED_WORD, flags=(True, False),
    differentiable=DIFFERENTIABLE_PLACES,
)  # fmt: skip
