"""ContextParallel inside of programs: operators of torch, whose group and layout are the name of a `ContextParallel`.

torch.compile, torch.export and dispatch modes see these; plain calls go past them. What they do they do where a program
runs, so that each rank refuses there what is wrong with its tensors, before anything is sent, and all ranks together
what differs between them: as plain calls.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ...front.call import CallOptions, plain_options
from ...front.part import Part
from ...front.philox import NO_RNG
from ...modifiers.modifier import Modifier
from ..arguments import rng_operands
from ..autocast import cast_for_autocast
from ..derivatives import no_second_derivative, setup_nothing
from ..flex_compiled import NamedArrays, traced
from ..random import checked_rng
from .autograd import keep_outputs, with_zeros
from .call import begin_call, is_compared, share_seed, shared_packing, whole_of
from .exchange import complete, same_everywhere, unsharded
from .operator_call import CAPTURES, OPTIONAL, OPTIONS, TENSORS, OperatorCall, member_of
from .strategies import Inputs, Saved, gradients_of

# ------------------------------------------------------------------------------------------------------- the door


def attention(
    name: str, q: Any, k: Any, v: Any, bias: Any, mask: Any, sink: Any, causal: Any, window_size: Any,
    softmax_scale: Any, softcap: Any, dropout_p: Any, rng: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
    max_seqlen_k: Any, seqused_k: Any, return_lse: bool, deterministic: bool | None, part: Part | None, score_mod: Any,
    mask_mod: Any, aux: Mapping[str, Any] | None,
) -> Any:  # fmt: skip
    """`ContextParallel.attention` by the operators: what torch.compile traces, so nothing here looks at memory."""
    q, k, v, bias = cast_for_autocast(q, k, v, bias)
    if aux is not None:
        if isinstance(score_mod, Modifier) or (score_mod is None and mask_mod is None):
            raise ValueError("aux: given without functions score_mod and mask_mod, which take it.")
        score_mod, mask_mod = _with_aux(score_mod, aux), _with_aux(mask_mod, aux)
    program, captures, ints, floats = traced(score_mod, mask_mod, q.device)
    grad = False
    if torch.is_grad_enabled():
        for x in (q, k, v, bias, sink, *captures):
            grad = grad or (x is not None and x.requires_grad)
    if deterministic is None:
        deterministic = grad and torch.are_deterministic_algorithms_enabled()
    window = (None, None) if window_size is None else window_size
    rest = (softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, deterministic)
    if not (_fit(causal, window, *rest) and isinstance(return_lse, bool)):
        # Numbers of other libraries; what is none is refused by name.
        read = plain_options(
            CallOptions(
                causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, return_lse,
                deterministic,
            )
        )  # fmt: skip
        causal, window, return_lse = read.causal, read.window_size, read.return_lse
        rest = (*read[2:7], read.deterministic)
    if isinstance(causal, bool):
        causal = "bottom_right" if causal else ""
    seed = offset = None
    words = (0, 0)
    if rest[2] > 0:
        seed, offset, words = rng_operands(rng, q)
        if rng is None:
            seed, _ = context_seed(seed, name, None)
    starts_q, cu_seqlens_q = _starts(cu_seqlens_q)
    starts_k, cu_seqlens_k = _starts(cu_seqlens_k)
    extents: list[int] = []
    if part is not None:
        for extent in (part.batch, part.heads, part.rows, part.keys):
            extents += (-1, -1) if extent is None else extent
        extents += (-1 if part.sm_margin is None else part.sm_margin, int(part.plan_as))  # refused where it runs
    out, lse, *_ = context_attention(
        q, k, v, bias, mask, sink, cu_seqlens_q, cu_seqlens_k, seqused_k, seed, offset, captures, *words, name,
        causal, *window, *rest, starts_q, starts_k, extents, program, ints, floats,
        grad and bias is not None and bias.requires_grad, grad and sink is not None and sink.requires_grad, grad,
        return_lse, None,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _fit(causal: Any, window: Any, scale: Any, softcap: Any, dropout_p: Any, *rest: Any) -> bool:
    """Whether options are of the kinds that operators take. Their values are looked at where the program runs."""
    if not (isinstance(causal, (bool, str)) and isinstance(window, (tuple, list)) and len(window) == 2):
        return False
    integers, flag = (*window, *rest[:-1]), rest[-1]
    return (
        all(n is None or _is_integer(n) for n in integers)
        and (scale is None or _is_real(scale))
        and _is_real(softcap)
        and _is_real(dropout_p)
        and isinstance(flag, bool)
    )


def _is_integer(x: Any) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def _is_real(x: Any) -> bool:
    return isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(x, bool)


def _starts(x: Any) -> tuple[Any, Any]:
    """cu_seqlens as integers, where they are a list or an array, or as a tensor."""
    if x is None or isinstance(x, torch.Tensor):
        return None, x
    if any(isinstance(n, float) for n in x):
        raise TypeError("cu_seqlens_q, cu_seqlens_k: a list with floating-point numbers. They are integers.")
    return [int(n) for n in x], None


def _with_aux(function: Any, aux: Mapping[str, Any]) -> Any:
    """A function of a call without its argument ``aux``."""
    if function is None:
        return None
    named = NamedArrays(aux)
    return lambda *positions: function(*positions, named)


# ------------------------------------------------------------------------------------------------------ the operators

_BACKWARD: Final = ("context_attention_backward", "context_reduce")
_done: Final[weakref.WeakKeyDictionary[Any, dict[bool, torch.Tensor]]] = weakref.WeakKeyDictionary()
"""Graph that is made -> the last result of the operators of both passes in it."""


class _InOrder(torch.library.Library):
    """Operators of which each waits for the one before it in the graph of a program, by an operand of no other use.

    Ranks must send and receive in one order, and compilers find one of their own for what does not depend on one
    another: inductor by the memory that each rank's tensors take.
    """

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        if dispatch_key != "Autograd" or not options.get("with_keyset"):
            return super().impl(op_name, fn, dispatch_key, **options)
        in_backward = (op_name if isinstance(op_name, str) else op_name._opname) in _BACKWARD

        def kernel(keyset: Any, *arguments: Any) -> Any:
            mode = get_proxy_mode()
            if mode is None:
                return fn(keyset, *arguments)
            last = _done.setdefault(mode.tracer, {})
            found = fn(keyset, *arguments[:-1], last.get(in_backward))
            last[in_backward] = found[-1]
            return found

        return super().impl(op_name, kernel, dispatch_key, **options)


_LIBRARY: Final = _InOrder("nvrtc_attn", "FRAGMENT")
_TAGS: Final = (torch.Tag.pt2_compliant_tag, *filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))
"""CUDA graphs leave these operators out: the first call of each asks all ranks, and waits for them."""
_LIBRARY.define(
    f"context_attention(Tensor q, Tensor k, Tensor v, {OPTIONS}, bool grad, bool return_lse, Tensor? after) -> "
    "(Tensor out, Tensor lse, Tensor[] kept, Tensor done)",
    tags=_TAGS,
)
_LIBRARY.define(
    "context_attention_backward(Tensor dout, Tensor? dlse, Tensor? out, Tensor? lse, Tensor[] kept, SymInt keys, "
    f"SymInt num_heads_kv, SymInt head_dim, bool[] wanted, Tensor? q, Tensor? k, Tensor? v, {OPTIONS}, "
    "Tensor? after) -> Tensor[]",
    tags=_TAGS,
)
_LIBRARY.define("context_seed(Tensor seed, str context, Tensor? after) -> Tensor[]", tags=_TAGS)
for _way in ("unshard", "reduce"):
    _LIBRARY.define(
        f"context_{_way}(Tensor x, str context, SymInt tokens, int dim, bool keys, Tensor? after) -> Tensor[]",
        tags=_TAGS,
    )
context_attention: Any = torch.ops.nvrtc_attn.context_attention.default
context_attention_backward: Any = torch.ops.nvrtc_attn.context_attention_backward.default
context_seed: Any = torch.ops.nvrtc_attn.context_seed.default
context_unshard: Any = torch.ops.nvrtc_attn.context_unshard.default
context_reduce: Any = torch.ops.nvrtc_attn.context_reduce.default
for _operator in (context_attention, context_attention_backward, context_seed, context_unshard, context_reduce):
    # A result that one rank does not use is still one that the others wait for: no compiler leaves it out.
    torch.fx.node.has_side_effect(_operator)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _run_forward(q: Any, k: Any, v: Any, *arguments: Any) -> tuple[Any, ...]:
    *options, grad, return_lse, _ = arguments
    with torch.no_grad():
        call = OperatorCall(options)
        modifier, _ = call.modifier()
        given = {"q": q, "k": k, "v": v, "bias": call.bias, "mask": call.mask, "sink": call.sink}
        strategy, whole = begin_call(
            call.member, given, call.lengths, call.options, call.rng, call.part, modifier, grad, return_lse
        )
        whole = whole._replace(may_keep=call.may_keep(strategy))
        inputs = Inputs(q, k, v, call.bias, call.mask, 0, q.shape[2], call.sink)
        out, lse, saved = strategy.forward(inputs, whole)
        kept = list(saved.kept)
        if grad and whole.packing is not None and call.lengths[0].is_cuda:
            # So that they are read once.
            kept.append(torch.tensor(whole.packing.starts, dtype=torch.int32, device="cpu"))
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse, kept, _new_done(q)


def _new_done(x: torch.Tensor) -> torch.Tensor:
    """What the next operator waits for: of integers, which have no gradient."""
    return x.new_empty(0, dtype=torch.int32)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _run_backward(
    dout: Any, dlse: Any, out: Any, lse: Any, kept: Any, keys: int, heads_kv: int, head_dim: int, wanted: Any, q: Any,
    k: Any, v: Any, *arguments: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of q, k, v, bias, sink, of each captured tensor: empty ones where there is none."""
    with torch.no_grad():
        call = OperatorCall(arguments[:-1])
        modifier, places = call.modifier()
        heads = dout.shape[2]
        strategy = call.strategy(heads, heads_kv, dout.is_cuda)
        lengths = call.lengths
        if kept and kept[-1].dtype == torch.int32:
            *kept, starts = kept
            lengths = starts, starts, None
        packing = shared_packing(call.member, strategy, lengths, call.options, heads_kv)
        state = checked_rng(call.rng, dout) if call.options.dropout_p > 0 else NO_RNG
        whole = whole_of(call.member, strategy, lengths, packing, call.options, state, call.part, modifier, dout.device)
        whole = whole._replace(may_keep=call.may_keep(strategy))
        saved = Saved(Inputs(q, k, v, call.bias, call.mask, 0, heads, call.sink), out, lse, heads_kv, kept)
        captures = () if modifier is None else modifier.captures
        of_captures = [wanted[place] for place in places]
        gradients, sums = gradients_of(strategy, saved, whole, captures, of_captures, dout, dlse)
        found = dict(zip(places, sums, strict=True))
        of_all = [
            _or_zeros(found.get(i), x, wants) for i, (x, wants) in enumerate(zip(call.captures, wanted, strict=True))
        ]
        return [*(dout.new_empty(0) if x is None else x for x in gradients), *of_all, _new_done(dout)]


def _or_zeros(gradient: torch.Tensor | None, x: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Of a captured tensor: zeros where no score depends on it, nothing where nobody asks."""
    if not wanted:
        return x.new_empty(0)
    return x.new_zeros(x.shape) if gradient is None else gradient


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _run_seed(seed: torch.Tensor, name: str, after: Any) -> list[torch.Tensor]:
    found, member = seed.clone(), member_of(name)
    if is_compared(member):  # ranks that were given numbers do not come here
        same_everywhere(member._groups, "attention, rng=None", {})
    share_seed(member, found)
    return [found, _new_done(seed)]


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _run_unshard(x: torch.Tensor, name: str, whole: int, dim: int, keys: bool, after: Any) -> list[torch.Tensor]:
    return [unsharded(member_of(name), x, dim, keys), _new_done(x)]


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _run_reduce(x: torch.Tensor, name: str, local: int, dim: int, keys: bool, after: Any) -> list[torch.Tensor]:
    """The rank's tokens of the sum over all ranks."""
    member = member_of(name)
    total = x.clone(memory_format=torch.contiguous_format)
    for group in member._groups:
        complete(dist.all_reduce, total, group=group)
    return [member.shard(total, dim, keys=keys), _new_done(x)]


_KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "context_attention": _run_forward, "context_attention_backward": _run_backward, "context_seed": _run_seed,
    "context_unshard": _run_unshard, "context_reduce": _run_reduce,
}  # fmt: skip
for _name, _kernel in _KERNELS.items():
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _kernel, _key)

# ------------------------------------------------------------------------------------------------- shapes and types


def _forward_fake(q: Any, k: Any, v: Any, *arguments: Any) -> tuple[Any, ...]:
    """What is wrong is refused where the program runs, on every rank: here it only has results without a meaning."""
    *options, grad, return_lse, _ = arguments
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse, kept = q.new_empty(0, dtype=torch.float32), list[torch.Tensor]()
    call = OperatorCall(options)
    with contextlib.suppress(ValueError):
        call.check_shapes(q, k, v)
        strategy = call.strategy(int(q.shape[2]), int(k.shape[2]), q.is_cuda)
        if strategy.needs_own or return_lse:
            lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        if grad:
            kept = call.like_kept(strategy, q, k, v)
    return out, lse, kept, _new_done(q)


def _backward_fake(
    dout: Any, dlse: Any, out: Any, lse: Any, kept: Any, keys: Any, heads_kv: Any, head_dim: Any, wanted: Any, q: Any,
    k: Any, v: Any, *arguments: Any,
) -> list[torch.Tensor]:  # fmt: skip
    bias, _, sink, *_ = arguments
    *_, dbias, dsink, _ = arguments
    of_keys = dout.shape[0], keys, heads_kv
    found = [
        dout.new_empty((*dout.shape[:3], head_dim)),
        dout.new_empty((*of_keys, head_dim)),
        dout.new_empty((*of_keys, dout.shape[3])),
    ]
    both = [(bias, dbias), (sink, dsink), *zip(arguments[CAPTURES], wanted, strict=True)]
    for x, wants in both:
        found.append(torch.empty_like(x, memory_format=torch.contiguous_format) if wants else dout.new_empty(0))
    return [*found, _new_done(dout)]


def _resized(x: Any, dim: int, size: Any) -> list[torch.Tensor]:
    return [x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :])), _new_done(x)]


torch.library.register_fake("nvrtc_attn::context_attention", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("nvrtc_attn::context_attention_backward", _backward_fake, lib=_LIBRARY)
torch.library.register_fake(
    "nvrtc_attn::context_seed", lambda seed, name, after: [torch.empty_like(seed), _new_done(seed)], lib=_LIBRARY
)
for _name in ("context_unshard", "context_reduce"):
    torch.library.register_fake(
        f"nvrtc_attn::{_name}", lambda x, name, size, dim, keys, after: _resized(x, dim, size), lib=_LIBRARY
    )

# ------------------------------------------------------------------------------------------------------ derivatives


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v = inputs[:3]
    out, lse, kept, _ = output
    optional, captures, scalars = inputs[3:TENSORS], inputs[TENSORS], inputs[TENSORS + 1 :]
    ctx.grad = scalars[-3]
    if not ctx.grad:
        return
    own = (q, k, v, out, lse)
    with contextlib.suppress(ValueError):  # where the program runs
        if not OperatorCall(inputs[3:-3]).strategy(int(q.shape[2]), int(k.shape[2]), q.is_cuda).needs_own:
            own = (None,) * 5
    ctx.save_for_backward(*own, *optional, *captures, *kept)
    ctx.rest, ctx.count, ctx.sizes = scalars, len(captures), (k.shape[1], k.shape[2], q.shape[3])
    keep_outputs(ctx, out, lse if scalars[-2] else None)


def _derivative(ctx: Any, dout: Any, dlse: Any, *_: Any) -> tuple[Any, ...]:
    """The gradient of every argument of `context_attention`."""
    if not ctx.grad:
        raise RuntimeError("nvrtc_attn::context_attention was traced where no gradient was wanted.")
    needed = ctx.needs_input_grad
    none = [None] * ctx.count
    no_more = [x if x == [] else None for x in ctx.rest]  # torch takes an empty list for one of tensors
    if dout is None and dlse is None:
        return (*(None,) * TENSORS, none, *no_more)
    q, k, v, out, lse, *others = ctx.saved_tensors
    optional, others = others[: len(OPTIONAL)], others[len(OPTIONAL) :]
    captures, kept = others[: ctx.count], others[ctx.count :]
    dout, dlse = with_zeros(ctx, dout, dlse)
    wanted = [
        bool(wants) and x.is_floating_point() for x, wants in zip(captures, list(needed[TENSORS] or none), strict=True)
    ]
    flags = [bool(needed[3 + OPTIONAL.index(name)]) for name in ("bias", "sink")]
    dq, dk, dv, dbias, dsink, *found, _ = context_attention_backward(
        dout, dlse, out, lse, kept, *ctx.sizes, wanted, q, k, v, *optional, captures, *ctx.rest[:-5], *flags, None
    )
    of_optional: list[Any] = [None] * len(OPTIONAL)
    for name, gradient, wants in zip(("bias", "sink"), (dbias, dsink), flags, strict=True):
        of_optional[OPTIONAL.index(name)] = gradient if wants else None
    of_captures = [x if wants else None for x, wants in zip(found, wanted, strict=True)]
    return (dq, dk, dv, *of_optional, of_captures, *no_more)


def _setup_unshard(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, name, _, dim, keys, _ = inputs
    ctx.rest = name, x.shape[dim], dim, keys


def _other_way(way: Any) -> Callable[..., Any]:
    """What the ranks make of the whole and what they have of it are each other's derivatives."""

    def derivative(ctx: Any, gradients: Sequence[torch.Tensor]) -> Any:
        found, _ = way(gradients[0], *ctx.rest, None)
        return found, None, None, None, None, None

    return derivative


torch.library.register_autograd(
    "nvrtc_attn::context_attention", _derivative, setup_context=_setup_context, lib=_LIBRARY
)
torch.library.register_autograd(
    "nvrtc_attn::context_attention_backward", no_second_derivative, setup_context=setup_nothing, lib=_LIBRARY
)
torch.library.register_autograd(
    "nvrtc_attn::context_unshard", _other_way(context_reduce), setup_context=_setup_unshard, lib=_LIBRARY
)
torch.library.register_autograd(
    "nvrtc_attn::context_reduce", _other_way(context_unshard), setup_context=_setup_unshard, lib=_LIBRARY
)
torch.library.register_autograd(
    "nvrtc_attn::context_seed", lambda ctx, *_: (None, None, None), setup_context=setup_nothing, lib=_LIBRARY
)
