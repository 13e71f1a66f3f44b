"""Attention as operators of torch, ``nvrtc_attn::attention_forward`` and ``attention_backward``.

`nvrtc_attn.torch.attention` calls its kernels directly where tensors are plain: that costs a third of a dispatch. What
must see an operator (torch.compile, torch.export, FakeTensor and other dispatch modes, torch.func, DTensor) gets these.
They take every tensor in any layout, return dense ones, and run on the CPU too.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ..base.errors import UnsupportedError, shown
from ..base.tables import remember
from ..front.call import CallOptions, describe_shapes, plain_options
from ..front.operands import DIFFERENTIABLE, GRADIENTS, INPUTS, OPERANDS, OPTIONAL_GRADIENTS, check_further
from ..front.part import Part
from ..front.philox import NO_RNG, RngState
from ..front.problem import Causal, WindowSize
from ..front.tensors import Device
from ..modifiers.modifier import Modifier
from .passes import BackwardCalls, backward, forward, known_calls
from .random import checked_rng, rng_values

_SEED: Final = len(INPUTS)  # positions in the signature: the inputs of the table of operands, then the random numbers
_SEED_WORD, _DROPOUT = _SEED + 2, _SEED + 9
_BIAS: Final = INPUTS.index("bias")
_CU_SEQLENS_Q: Final = INPUTS.index("cu_seqlens_q")
_FLAGS: Final = 2  # behind the signature: return_lse and return_max_logit
_BATCHLESS: Final = tuple(place for place, name in enumerate(INPUTS) if OPERANDS[name].axes[0] != "batch")
_DIFFERENTIABLE: Final = tuple(map(INPUTS.index, DIFFERENTIABLE))
_OPTIONS: Final = len(OPTIONAL_GRADIENTS)
SIGNATURE: Final = (
    ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in INPUTS)
    + ", Tensor? seed, Tensor? offset, SymInt seed_word, SymInt offset_word, str causal, "
    "SymInt? window_left, SymInt? window_right, float? softmax_scale, float softcap, float dropout_p, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool deterministic"
)


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
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_grad_enabled: Final = torch.is_grad_enabled
_forward_ad: Any = torch.autograd.forward_ad
_functorch_level: Final = torch._C._functorch.maybe_current_level
_includes_key: Final = torch._C._dispatch_tls_is_dispatch_key_included
_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")

# ------------------------------------------------------------------------------------------------------- the door


def attention(*arguments: Any) -> Any:
    """`nvrtc_attn.torch.attention` by the operators, of the arguments of `operator_arguments`."""
    given, return_lse, return_max_logit = operator_arguments((), *arguments)
    return results_of(attention_forward(*given), return_lse, return_max_logit)


def results_of(found: Any, return_lse: bool, return_max_logit: bool) -> Any:
    """What the caller of an operator gets of its three results."""
    out, lse, max_logit = found
    results = (out, *([lse] if return_lse else ()), *([max_logit.detach()] if return_max_logit else ()))
    return results if len(results) > 1 else out


def operator_arguments(
    captures: Sequence[Any], q: Any, k: Any, v: Any, bias: Any, mask: Any, causal: Causal, window_size: WindowSize,
    softmax_scale: Any, softcap: Any, dropout_p: Any, rng: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: Any, max_seqlen_k: Any, seqused_k: Any, return_lse: bool, deterministic: bool | None,
    part: Part | None, further: Mapping[str, Any], return_max_logit: bool = False,
) -> tuple[tuple[Any, ...], bool, bool]:  # fmt: skip
    """The arguments of the operator that `nvrtc_attn.torch.attention` is, return_lse and return_max_logit.

    torch.compile traces this, so nothing here looks at memory. ``captures`` are those of a modifier.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if part is not None:
        raise _no_part()
    tensors = (q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k, *check_further("attention", further))
    for name, x in zip(INPUTS, tensors, strict=True):
        if not (isinstance(x, torch.Tensor) or (x is None and name not in ("q", "k", "v"))):
            raise TypeError(
                f"{name}: got {shown(x)} of type {type(x).__name__}. nvrtc_attn.torch takes torch tensors; "
                f"nvrtc_attn.attention takes those of any framework."
            )
    if not _in_dynamo() and any(x.is_nested for x in (q, k, v)):
        raise UnsupportedError(
            "q, k, v: nested tensors. Pass their values with batch 1, x.values()[None], and their offsets() as int32 "
            "in cu_seqlens_q and cu_seqlens_k, with max_seqlen_q and max_seqlen_k. On a GPU torch's own "
            "scaled_dot_product_attention takes them under nvrtc_attn.torch.enable_sdpa()."
        )
    options = (causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k)
    flags = (return_lse, deterministic, return_max_logit)
    if not (_are_plain(*options) and all(isinstance(x, bool) for x in flags)):
        # Numbers of other libraries; whatever is none is refused by name.
        read = plain_options(CallOptions(*options, return_lse, deterministic, return_max_logit=return_max_logit))
        causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k = read[:7]
        return_lse, deterministic, return_max_logit = read.return_lse, read.deterministic, read.return_max_logit
    word = _causal_word(causal)
    left, right = (None, None) if window_size is None else window_size
    q, k, v, bias = cast_for_autocast(q, k, v, bias)
    more = check_further("attention", cast_further_for_autocast(q, further))
    seed = offset = None
    words = (0, 0)
    if dropout_p > 0:
        seed, offset, words = rng_operands(rng, q)
    if not _in_dynamo():
        refuse_tangents(q, k, v, bias, *more, *captures)
    with_lse = return_lse or (torch.is_grad_enabled() and _any_requires_grad(q, k, v, bias, *more, *captures))
    arguments = (
        q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k, *more, seed, offset, *words, word, left, right,
        softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, deterministic, with_lse, return_max_logit,
    )  # fmt: skip
    return arguments, return_lse, return_max_logit


def cast_for_autocast(q: Any, k: Any, v: Any, bias: Any) -> tuple[Any, Any, Any, Any]:
    """q, k, v and a floating bias as `scaled_dot_product_attention` gets them under ``torch.autocast``."""
    if not isinstance(q, torch.Tensor):
        return q, k, v, bias  # refused later
    device = q.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v, bias
    dtype = torch.get_autocast_dtype(device)
    return _cast(q, device, dtype), _cast(k, device, dtype), _cast(v, device, dtype), _cast(bias, device, dtype)


def cast_further_for_autocast(q: Any, further: Mapping[str, Any]) -> Any:
    """``further``, where autocast is on: what may be of q's type or float32 stays in float32 or becomes as q is."""
    if not further or not isinstance(q, torch.Tensor) or not torch.is_autocast_enabled(q.device.type):
        return further
    return {
        name: x.to(q.dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float32 else x
        for name, x in further.items()
    }


def _cast(x: Any, device: str, dtype: torch.dtype) -> Any:
    """Autocast's own rule: floating tensors of its device, float64 left alone."""
    if not isinstance(x, torch.Tensor) or x.device.type != device:
        return x
    return x.to(dtype) if x.is_floating_point() and x.dtype not in (dtype, torch.float64) else x


def _no_part() -> UnsupportedError:
    return UnsupportedError(
        "part: the operators of torch do not take it, and torch.compile, torch.export, torch.func, dispatch modes "
        "and tensor subclasses need them. Call outside of these."
    )


def refuse_tangents(*tensors: Any) -> None:
    """Refuse dual tensors of `torch.autograd.forward_ad`: nothing here would carry their tangents on."""
    if _forward_ad._current_level < 0 or _functorch_level() is not None:  # the operators refuse it below those
        return
    if any(isinstance(x, torch.Tensor) and _forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        no_forward_derivative()


def is_transformed() -> bool:
    """Whether tensors may stand for batches or levels of others: in torch.func, and where autograd has its own vmap.

    The latter is for a batch of gradients: `is_grads_batched`, and `torch.autograd.functional` with `vectorize`.
    """
    return _functorch_level() is not None or _includes_key(_VMAP_MODE)


def _in_dynamo() -> bool:
    return bool(torch.compiler.is_dynamo_compiling())


def _any_requires_grad(*tensors: Any) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _are_plain(
    causal: Any, window: Any, scale: Any, softcap: Any, dropout_p: Any, max_seqlen_q: Any, max_seqlen_k: Any
) -> bool:
    """Whether options are of Python's types, or symbols for them."""
    if not (isinstance(causal, bool) or (isinstance(causal, str) and causal in ("top_left", "bottom_right"))):
        return False
    if window is not None:
        if not (isinstance(window, (tuple, list)) and len(window) == 2):
            return False
        for bound in window:
            if not (bound is None or (_is_number(bound, False) and bound >= -1)):
                return False
    if not (scale is None or _is_number(scale, True)):
        return False
    if not (_is_number(softcap, True) and _is_number(dropout_p, True) and 0 <= dropout_p <= 1 and softcap >= 0):
        return False
    return all(n is None or _is_number(n, False) for n in (max_seqlen_q, max_seqlen_k))


def _is_number(x: Any, real: bool) -> bool:
    if isinstance(x, bool):
        return False
    return isinstance(x, (int, torch.SymInt)) or (real and isinstance(x, (float, torch.SymFloat)))


def rng_operands(rng: Any, q: Any) -> tuple[Any, Any, tuple[Any, Any]]:
    """Seed and offset as tensors, or as signed 64-bit words where they are integers."""
    if rng is None:
        if is_dtensor(q):
            raise UnsupportedError(
                "rng: None, with dropout of DTensors. Every rank would draw a mask of its own: pass rng=(seed, offset) "
                "as integers, the same on all ranks."
            )
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=q.device), None, (0, 0)
    pair = rng if isinstance(rng, (tuple, list)) and len(rng) == 2 else (rng, 0)
    if not all(isinstance(x, torch.Tensor) or _is_number(x, False) for x in pair):
        pair = rng_values(checked_rng(rng, q))
    tensors: list[Any] = [None, None]
    words: list[Any] = [0, 0]
    for index, x in enumerate(pair):
        if isinstance(x, torch.Tensor):
            tensors[index] = x
        elif not 0 <= x < 2**64:
            raise ValueError(f"rng: got {shown(x)}. Seed and offset are in [0, 2**64).")
        else:
            words[index] = x - 2**64 if x >= 2**63 else x
    return tensors[0], tensors[1], (words[0], words[1])


def gradients_by_operator(
    tensors: tuple[Any, ...], out: Any, lse: Any, dout: Any, dlse: Any, options: CallOptions, rng: RngState
) -> Any:
    """What `passes.backward` returns, by the operator, which takes tensors that stand for a batch of them."""
    if options.part is not None:
        raise _no_part()
    seed, offset, words = rng_operands(rng_values(rng), tensors[0])
    wanted = [getattr(options, name) for name in OPTIONAL_GRADIENTS]
    gradients = attention_backward(
        dout, dlse, out, lse, *tensors, seed, offset, *words, _causal_word(options.causal),
        *(options.window_size or (None, None)), options.softmax_scale, options.softcap, options.dropout_p,
        options.max_seqlen_q, options.max_seqlen_k, options.deterministic, *wanted,
    )  # fmt: skip
    given = dict(zip(OPTIONAL_GRADIENTS, wanted, strict=True))
    return [x if given.get(name, True) else None for name, x in zip(GRADIENTS, gradients, strict=True)]


# ---------------------------------------------------------------------------------------------------- the kernels


def split(arguments: tuple[Any, ...], return_lse: bool, *gradients: bool) -> tuple[Any, CallOptions, Any]:
    """(tensors, options, state of the dropout) as the eager functions take them, of the arguments in `SIGNATURE`."""
    *tensors, seed, offset = map(_as_plain, arguments[:_SEED_WORD])
    seed_word, offset_word, causal, left, right, scale, softcap, dropout_p, max_q, max_k = arguments[_SEED_WORD:-1]
    wanted: Any = gradients
    options = CallOptions(
        _CAUSAL[causal], (left, right), scale, softcap, dropout_p, max_q, max_k, return_lse, arguments[-1], *wanted
    )
    state = NO_RNG
    if dropout_p > 0:
        words = (seed_word & (2**64 - 1), offset_word & (2**64 - 1))
        pair = tuple(word if x is None else x for x, word in zip((seed, offset), words, strict=True))
        state = checked_rng(pair, tensors[0])
    return tuple(tensors), options, state


_CAUSAL: Final[dict[str, Causal]] = {"": False, "bottom_right": True, "top_left": "top_left"}


def _causal_word(causal: Causal) -> str:
    return causal if isinstance(causal, str) else "bottom_right" if causal else ""


def _as_plain(x: torch.Tensor | None) -> Any:
    return x if x is None or x.__class__ in _PLAIN else x.as_subclass(torch.Tensor)


def run_forward(*arguments: Any, known_key: Any = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel of the operator ``attention_forward``, below autograd. ``known_key`` as of `passes.forward`."""
    *arguments_, return_lse, return_max_logit = arguments
    with torch.no_grad():
        tensors, options, rng = split(tuple(arguments_), return_lse)
        options = options._replace(return_max_logit=return_max_logit)
        # Below autograd lse tells that gradients are wanted, though not whether that of a bias is.
        follows = return_lse and tensors[_BIAS] is None
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
    arguments_, wanted = arguments[:-_OPTIONS], arguments[-_OPTIONS:]
    with torch.no_grad():
        tensors, options, rng = split(arguments_, True, *wanted)
        dout, dlse, out, lse = map(_as_plain, (dout, dlse, out, lse))
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
    if not (are_alone((q, k, v), rest) and rest[_DROPOUT - 3] == 0 and not rest[-1]):
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
    if not (are_alone((q, k, v, out, lse, dout), rest) and rest[_DROPOUT - 3] == 0):
        return None
    if calls is None:
        calls = remember(_backward_calls, key, BackwardCalls())
    return run_backward(*arguments, known=calls)


def are_alone(tensors: tuple[Any, ...], rest: Sequence[Any]) -> bool:
    """Whether a call is of plain GPU tensors without optional ones, and no mode and no transformation has to see it.

    ``rest``: the arguments behind q, k and v, so that places in the signature are three less here.
    """
    return (
        all(x.__class__ in _PLAIN and x.is_cuda and not x.is_neg() for x in tensors)
        and all(x is None for x in rest[: _SEED_WORD - 3])
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
    _validate(tuple(arguments_), modifier)
    batch, rows, heads, _ = q.shape
    out = q.new_empty((batch, rows, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, rows) if return_lse else (0,), dtype=torch.float32)
    starts = arguments[_CU_SEQLENS_Q]
    sequences = batch if starts is None else starts.shape[0] - 1
    return out, lse, q.new_empty((sequences, heads) if return_max_logit else (0,), dtype=torch.float32)


def backward_fake(dout: Any, dlse: Any, out: Any, lse: Any, *arguments: Any) -> Any:
    wanted = dict(zip(OPTIONAL_GRADIENTS, arguments[-_OPTIONS:], strict=True))
    _validate(arguments[:-_OPTIONS], None, **wanted)
    inputs = [arguments[place] for place in _DIFFERENTIABLE]
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) if wanted.get(name, True) else dout.new_empty(0)
        for name, x in zip(GRADIENTS, inputs, strict=True)
    )


torch.library.register_fake("nvrtc_attn::attention_forward", forward_fake, lib=_LIBRARY)
torch.library.register_fake("nvrtc_attn::attention_backward", backward_fake, lib=_LIBRARY)


def _validate(arguments: tuple[Any, ...], modifier: Modifier | None, **gradients: bool) -> None:
    """Refuse while tracing what the kernels would refuse later; sizes that are symbols must wait."""
    given = {name: x for name, x in zip(INPUTS, arguments, strict=False) if x is not None}
    for name in ("q", "k", "v"):
        if given[name].dim() != 4:
            raise ValueError(f"{name}: shape {tuple(given[name].shape)}. Expected rank 4, [batch, seqlen, heads, dim].")
    places = {name: x.device for name, x in given.items()}
    if len(set(places.values())) > 1:
        found = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise ValueError(f"{found}: all tensors of a call are on one device. Move them to {places['q']}.")
    scalars = arguments[_SEED_WORD:]
    sizes = [n for x in (*given.values(), *(modifier.captures if modifier else ())) for n in x.shape]
    if not all(isinstance(n, (int, float, str, type(None))) for n in (*sizes, *scalars)):
        return
    causal, left, right, scale, softcap, dropout_p, max_q, max_k, deterministic = scalars[2:]
    wanted: dict[str, Any] = {**gradients}
    options = CallOptions(
        causal=_CAUSAL[causal], window_size=(left, right), softmax_scale=scale, softcap=softcap, dropout_p=dropout_p,
        max_seqlen_q=max_q, max_seqlen_k=max_k, deterministic=deterministic, return_lse=bool(gradients), **wanted,
    )  # fmt: skip
    operands = {n: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for n, x in given.items()}
    describe_shapes(operands, options, Device("cuda" if given["q"].is_cuda else "meta", 0), modifier=modifier)


# ------------------------------------------------------------------------------------------------------ derivatives


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, seed, offset = inputs[:_SEED_WORD]
    ctx.save_for_backward(*output[:2], *tensors, seed, offset)
    ctx.scalars = inputs[_SEED_WORD:-_FLAGS]
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, dout: Any, dlse: Any, _: Any) -> tuple[Any, ...]:
    """The gradient of every argument of the forward operator. Nobody gets one through max_logit."""
    out, lse, *tensors = ctx.saved_tensors
    arguments = (*tensors, *ctx.scalars)
    none = (None,) * (len(arguments) + _FLAGS)
    if dout is None and dlse is None:
        return none
    if lse.numel() == 0 and out.numel() != 0:  # traced where no gradient was wanted
        out, lse, _ = attention_forward(*arguments, True, False)
    dout = torch.zeros_like(out) if dout is None else dout
    needed = [bool(ctx.needs_input_grad[place]) for place in _DIFFERENTIABLE]
    gradients = attention_backward(dout, dlse, out, lse, *arguments, *needed[-_OPTIONS:])
    found: list[Any] = list(none)
    for place, gradient, is_needed in zip(_DIFFERENTIABLE, gradients, needed, strict=True):
        found[place] = gradient if is_needed else None
    return tuple(found)


def setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The gradient has no derivative, so nothing is kept for it."""


def no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        "trying to differentiate twice a function that was marked with once_differentiable: nvrtc_attn has no second "
        "derivatives. Compute this part with torch.nn.functional.scaled_dot_product_attention and its math backend."
    )


def no_forward_derivative(*_: Any) -> Any:
    raise UnsupportedError(
        "q, k, v, bias: forward-mode derivatives (torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad) are not "
        "computed. Use torch.func.vjp or jacrev, or torch.nn.functional.scaled_dot_product_attention and its math "
        "backend."
    )


def apply_of(function: Any) -> Any:
    """``apply`` of an autograd function, past two Python layers.

    That of `Function.apply` serves transformations, which get the operators: 2.5 us. That of a node asks whether it has
    a ``backward`` or a ``vjp``, in autograd's thread: 0.8 us, and more there.
    """
    node = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = function.backward
    return super(torch.autograd.Function, function).apply


class _OnceOnly(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The first ``count`` tensors as they are, with a node that depends on all of them and has no derivative."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> Any:
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return no_second_derivative(ctx, *gradients)


def once_only(compute: Callable[[], tuple[Any, ...]], made_of: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients that ``compute`` makes of tensors. Where a graph of that pass is asked for, a use of it is refused.

    `torch.autograd.function.once_differentiable` ties gradients to those that came in alone, and to no input: a penalty
    on the gradients (`create_graph=True`) silently had none.
    """
    with torch.no_grad():
        gradients = compute()
    if not _grad_enabled():
        return gradients
    return tuple(_OnceOnly.apply(len(gradients), *gradients, *made_of))


torch.library.register_autograd(
    "nvrtc_attn::attention_forward", _derivative, setup_context=_setup_context, lib=_LIBRARY
)
torch.library.register_autograd(
    "nvrtc_attn::attention_backward", no_second_derivative, setup_context=setup_nothing, lib=_LIBRARY
)


# ------------------------------------------------------------------------------------------------------------- vmap


def _forward_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    return _vmap(attention_forward, 0, info.batch_size, in_dims, arguments, (False,) * _OPTIONS)


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    return _vmap(attention_backward, 4, info.batch_size, in_dims, arguments, arguments[-_OPTIONS:])


def _vmap(
    op: Any, first: int, size: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...], wanted: tuple[bool, ...]
) -> tuple[Any, Any]:
    """Fold the mapped axis into the batch where that computes the same, otherwise loop.

    ``first`` arguments come before those of `SIGNATURE`. ``wanted`` are the optional gradients: one without a batch
    (of a sink) is of each element of the mapped axis by itself.
    """
    refuse_tangents(*arguments)
    dbias = wanted[OPTIONAL_GRADIENTS.index("dbias")]
    moved = [x.movedim(d, 0) if d is not None else x for x, d in zip(arguments, in_dims, strict=True)]
    mapped = [d is not None for d in in_dims]
    q, bias = first, first + _BIAS
    batch = moved[q].shape[mapped[q]]
    shared_bias = dbias and moved[bias].shape[mapped[bias]] != batch
    summed = {OPERANDS[name].gradient_of for name, wants in zip(OPTIONAL_GRADIENTS, wanted, strict=True) if wants}
    one_by_one = shared_bias or any(
        moved[first + place] is not None
        and (OPERANDS[INPUTS[place]].is_lengths or mapped[first + place] or INPUTS[place] in summed)
        for place in _BATCHLESS
    )
    if one_by_one or moved[first + _DROPOUT] > 0:
        results = [
            op(*(x[i] if is_mapped else x for x, is_mapped in zip(moved, mapped, strict=True))) for i in range(size)
        ]
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])
    folded = []
    for index, (x, is_mapped) in enumerate(zip(moved, mapped, strict=True)):
        if not isinstance(x, torch.Tensor) or index - first in _BATCHLESS:
            folded.append(x)
            continue
        shape = x.shape[is_mapped:]
        if not is_mapped and index in (bias, bias + 1) and shape[0] == 1 and not dbias:
            folded.append(x)  # broadcast over the longer batch as well
            continue
        wide = (x if is_mapped else x[None]).expand(size, batch, *shape[1:])
        folded.append(wide.reshape(size * batch, *shape[1:]))
    outputs = op(*folded)
    # What is absent is an empty vector without a batch.
    return (
        tuple(x.unflatten(0, (size, batch)) if x.dim() > 1 else x.expand(size, *x.shape) for x in outputs),
        (0,) * len(outputs),
    )


class _Transformed(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The forward operator under transformations of torch.func, any number of them within one another.

    torch refuses the derivative that `torch.library` generates under them.
    """

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return attention_forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _setup_context(ctx, inputs, output)

    backward = staticmethod(_derivative)
    jvp = staticmethod(no_forward_derivative)
    vmap = staticmethod(_forward_vmap)


class _Gradient(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The backward operator under transformations of torch.func."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing to keep."""

    backward = staticmethod(no_second_derivative)
    jvp = staticmethod(no_forward_derivative)
    vmap = staticmethod(_backward_vmap)


def _transformed_forward(*arguments: Any) -> Any:
    """The operator above all transformations. Their tensors hide whether a level further out needs the lse."""
    *arguments_, return_lse, return_max_logit = arguments
    out, lse, max_logit = _Transformed.apply(*arguments_, True, return_max_logit)
    return out, lse if return_lse else lse.new_empty(0), max_logit


def _transformed_backward(*arguments: Any) -> Any:
    return _Gradient.apply(*arguments)


# The key that comes before any other while a transformation is on: also for an operator in a program of torch.compile.
_LIBRARY.impl("attention_forward", _transformed_forward, "FuncTorchDynamicLayerFrontMode")
_LIBRARY.impl("attention_backward", _transformed_backward, "FuncTorchDynamicLayerFrontMode")


# ---------------------------------------------------------------------------------------------------------- DTensor

_sharding_registered = False


def is_dtensor(x: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, getattr(module, "DTensor", ()))


def register_sharding() -> None:
    """Teach DTensor the operators: batch and heads can be sharded, where dropout is off.

    Done by itself at the first eager call with a DTensor, and by ``import nvrtc_attn.torch`` where
    ``torch.distributed.tensor`` was imported before. Call it where neither comes before a compiled program.
    """
    global _sharding_registered
    if _sharding_registered:
        return
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding as register

    def placements(arguments: tuple[Any, ...], dim: int | None) -> list[Any]:
        """Of the arguments of `SIGNATURE`, for a mesh axis over dim 0 (batch) or 2 (heads) of q; None replicates."""
        result: list[Any] = []
        for index, x in enumerate(arguments):
            if not hasattr(x, "tensor_meta"):
                result.append(None)
            elif index < _SEED and INPUTS[index] == "seqused_k" and dim == 0 and arguments[_CU_SEQLENS_Q] is None:
                result.append(Shard(0))  # a length for each batch entry
            elif dim is None or index >= _SEED or (index in _BATCHLESS and INPUTS[index] != "sink"):
                result.append(Replicate())
            elif INPUTS[index] == "sink":  # one of each head
                result.append(Shard(0) if dim == 2 else Replicate())
            elif index < 3:
                result.append(Shard(dim))
            else:  # bias and mask, [batch, heads, rows, keys], each full or 1
                axis = 0 if dim == 0 else 1
                result.append(Shard(axis) if x.tensor_meta.shape[axis] > 1 else Replicate())
        return result

    def axes(arguments: tuple[Any, ...]) -> list[int | None]:
        if arguments[_DROPOUT] > 0:
            return [None]  # its mask is counted over all heads of all batches
        is_packed = arguments[_CU_SEQLENS_Q] is not None  # then sequences lie along dim 1
        result: list[int | None] = [None] if is_packed else [None, 0]
        heads = arguments[1].tensor_meta.shape[2]
        sizes = arguments[0].mesh.shape
        products = (math.prod(x) for n in range(1, len(sizes) + 1) for x in itertools.combinations(sizes, n))
        # Any mesh axes may come to share the heads: a query head must stay with its key head.
        if heads and all(heads % product == 0 for product in products if product <= heads) and min(sizes) <= heads:
            result.append(2)
        return result

    def forward_rule(*arguments: Any) -> Any:
        rules = []
        for dim in axes(arguments):
            # Of a result that is there; max_logit of packed sequences is [sequences, heads], and those are not split.
            of_heads = {None: Replicate(), 0: Shard(0), 2: Shard(1)}[dim]
            lse, max_logit = (of_heads if wanted else Replicate() for wanted in arguments[-_FLAGS:])
            out = Replicate() if dim is None else Shard(dim)
            rules.append(([out, lse, max_logit], placements(arguments, dim)))
        return rules

    def backward_rule(*arguments: Any) -> Any:
        from torch.distributed.tensor import Partial

        rules = []
        rest = arguments[4:]
        for dim in axes(rest):
            like_q = Replicate() if dim is None else Shard(dim)
            lse = {None: Replicate(), 0: Shard(0), 2: Shard(1)}[dim]
            inputs = placements(rest, dim)
            optional: list[Any] = []
            for name, wanted in zip(OPTIONAL_GRADIENTS, arguments[-_OPTIONS:], strict=True):
                given = inputs[INPUTS.index(OPERANDS[name].gradient_of)]
                is_summed = wanted and dim is not None and not isinstance(given, Shard)
                optional.append(Partial() if is_summed else given if wanted else Replicate())
            before = [like_q, None if arguments[1] is None else lse, like_q, lse]
            rules.append(([like_q, like_q, like_q, *optional], [*before, *inputs]))
        return rules

    register(attention_forward)(forward_rule)
    register(attention_backward)(backward_rule)
    _sharding_registered = True


if "torch.distributed.tensor" in sys.modules:
    register_sharding()
