"""Attention of torch tensors with a modifier, and its gradients: a node of autograd, and an operator each way.

Plain tensors take the node, which calls the core. Programs of torch.compile, FakeTensor and other dispatch modes get
the operators, which have those of `ops` for an example: the same arguments, then the functions as text
(`modifiers.text`), the tensors that they captured, and their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ..front.call import CallOptions, plain_options
from ..front.operands import DIFFERENTIABLE, GRADIENTS, INPUTS, OPTIONAL_GRADIENTS, OPTIONAL_INPUTS, check_further
from ..front.philox import NO_RNG, RngState
from ..front.signature import are_plain
from ..modifiers.modifier import Modifier
from ..modifiers.text import read_text
from ..modifiers.trace import no_functions, trace, traced
from .arguments import SEED_WORD, SIGNATURE, operator_arguments, results_of, split
from .autocast import cast_for_autocast, cast_further_for_autocast
from .derivatives import once_only, refuse_transformed, register_derivative
from .flex_compiled import traced as written
from .modified_known import again, know
from .modified_passes import dense_like, forward, gradients
from .ops import forward_fake
from .passes import DIFFERENTIABLE_PLACES
from .random import random_state
from .sharding import register_sharding
from .tensors import as_plain, captured_on, detached, is_dtensor, is_transformed

_in_dynamo: Final = torch.compiler.is_dynamo_compiling
_transformed: Final = torch._C._functorch.maybe_current_level
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_traced_by_jit: Final = torch._C._is_tracing
_PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter))
_NONE: Final = (None,) * len(OPTIONAL_INPUTS)
_ANY_SIZE: Final = 2**31 - 1


def attend(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, causal: Any, window_size: Any, softmax_scale: Any, softcap: Any,
    dropout_p: Any, rng: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    seqused_k: Any, return_lse: Any, deterministic: Any, part: Any, further: Any, return_max_logit: Any,
    score_mod: Any, mask_mod: Any, aux: Any,
) -> Any:  # fmt: skip
    """`nvrtc_attn.torch.attention` with functions of scores."""
    if score_mod is None and mask_mod is None:
        raise no_functions()
    asked: Any = None  # told by equality, of a call without further tensors and without dropout
    if (
        not _in_dynamo()
        and not further
        and bias is None and mask is None and cu_seqlens_q is None and cu_seqlens_k is None and seqused_k is None
        and deterministic is None and part is None and return_max_logit is False
    ):  # fmt: skip
        options = CallOptions(
            causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, return_lse
        )
        if are_plain(options) and dropout_p == 0:
            asked = options
    if asked is not None:
        found = again(q, k, v, score_mod, mask_mod, aux, asked, return_lse)
        if found is not None:
            return found
    given: Any = (
        q, k, v, bias, mask, causal, window_size, softmax_scale, softcap, dropout_p, rng, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, seqused_k, return_lse, deterministic, part, further, return_max_logit,
    )  # fmt: skip
    if _in_dynamo():
        arguments, with_lse, with_max_logit = _with_functions(given, score_mod, mask_mod, aux)
        return results_of(modified_forward(*arguments), with_lse, with_max_logit)
    if _transformed() is not None:
        refuse_transformed()
    return _outside_of_dynamo(given, score_mod, mask_mod, aux, asked)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_of_dynamo(given: Any, score_mod: Any, mask_mod: Any, aux: Any, asked: Any) -> Any:
    """Dynamo, where it gave a program up, must not follow the tracer."""
    starts_q, starts_k, used = given[11], given[12], given[15]
    if needs_operator((*given[:5], starts_q, starts_k, used, *given[-2].values())):
        return _by_operator(given, trace(score_mod, mask_mod, aux=aux))
    modifier = traced(score_mod, mask_mod, aux=aux)
    if needs_operator(modifier.captures):
        return _by_operator(given, trace(score_mod, mask_mod, aux=aux))
    q = given[0]
    if asked is not None and isinstance(q, torch.Tensor) and q.is_cuda:
        q, k, v, _ = cast_for_autocast(q, given[1], given[2], None)
        know(q, k, v, score_mod, mask_mod, aux, asked, asked.return_lse, asked, heads_first=False)
    return _attend_plain(modifier, *given)


def _by_operator(given: Any, modifier: Modifier) -> Any:
    if is_dtensor(given[0]):
        register_sharding()
    arguments, return_lse, return_max_logit = _with_functions(given, modifier, None, None)
    return results_of(modified_forward(*arguments), return_lse, return_max_logit)


def needs_operator(tensors: Sequence[Any]) -> bool:
    """Whether a dispatch mode, a subclass of torch's tensors, or torch.jit.trace must see the call."""
    return (
        bool(_dispatch_modes())
        or _traced_by_jit()
        or any(x.__class__ not in _PLAIN or x.is_meta for x in tensors if isinstance(x, torch.Tensor))
    )


def _with_functions(given: Any, score_mod: Any, mask_mod: Any, aux: Any) -> Any:
    """The arguments of `modified_forward`, return_lse and return_max_logit."""
    text, captures, ints, floats = written(score_mod, mask_mod, given[0].device, aux=aux)
    arguments, return_lse, return_max_logit = operator_arguments(captures, *given)
    return (*arguments, captures, text, ints, floats), return_lse, return_max_logit


def _attend_plain(
    modifier: Modifier, q: Any, k: Any, v: Any, bias: Any, mask: Any, causal: Any, window_size: Any,
    softmax_scale: Any, softcap: Any, dropout_p: Any, rng: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: Any, max_seqlen_k: Any, seqused_k: Any, return_lse: Any, deterministic: Any, part: Any, further: Any,
    return_max_logit: Any,
) -> Any:  # fmt: skip
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    q, k, v, bias = cast_for_autocast(q, k, v, bias)
    more = check_further("attention", cast_further_for_autocast(q, further))
    tensors = q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k, *more
    options = CallOptions(
        causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, return_lse, deterministic,
        part=part, return_max_logit=return_max_logit,
    )  # fmt: skip
    if not (are_plain(options) and 0 <= dropout_p <= 1):
        options = plain_options(options)
    state = NO_RNG
    if options.dropout_p > 0:
        follows = torch.is_grad_enabled() and any(
            getattr(x, "requires_grad", False) for x in (*tensors, *modifier.captures)
        )
        state = random_state(
            rng, part, q, k, cu_seqlens_q, options.max_seqlen_q, options.max_seqlen_k, backward_follows=follows
        )  # fmt: skip
    out, lse, *max_logit = attention(tensors, modifier, options, state)
    results = (out, *([lse] if options.return_lse else ()), *max_logit)
    return results if len(results) > 1 else out


def attention(
    tensors: tuple[Any, ...], modifier: Modifier | None, options: CallOptions, rng: RngState
) -> tuple[torch.Tensor, ...]:
    """(out, lse), and max_logit where the options ask for it, with a node of autograd.

    ``tensors`` are `INPUTS` in their order. Whatever the options say, lse is returned.
    """
    arrays: tuple[Any, ...] = ()
    if modifier is not None:
        where = tensors[0].device if isinstance(tensors[0], torch.Tensor) else None
        arrays = captured_on(modifier.captures, where)
    found: tuple[torch.Tensor, ...] = _Modified.apply(modifier, options, rng, *tensors, *arrays)
    return found


class _Modified(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Inputs: the modifier, the options, the random numbers, `INPUTS`, the captured tensors."""

    @staticmethod
    def forward(
        ctx: Any, modifier: Modifier | None, options: CallOptions, rng: RngState, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        found = forward(tuple(map(detached, tensors)), modifier, options, rng)
        ctx.save_for_backward(*tensors, *found[:2])
        ctx.mark_non_differentiable(*found[2:])
        ctx.set_materialize_grads(False)
        ctx.call = modifier, options, rng
        return found

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> Any:
        if is_transformed():
            refuse_transformed()
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        if dout is None and dlse is None:
            return (None,) * (3 + len(needed))
        return once_only(lambda: _gradients_of_node(ctx.call, saved, needed, dout, dlse), (*saved[:-2], dout, dlse))

    jvp = staticmethod(lambda *_: refuse_transformed())


def _gradients_of_node(call: Any, saved: tuple[Any, ...], needed: Sequence[bool], dout: Any, dlse: Any) -> Any:
    modifier, options, rng = call
    *tensors, out, lse = map(detached, saved)
    inputs, captures = tuple(tensors[: len(INPUTS)]), tuple(tensors[len(INPUTS) :])
    wanted = dict(zip(INPUTS, needed, strict=False))
    options = options._replace(**{name: wanted[name[1:]] for name in OPTIONAL_GRADIENTS}, return_max_logit=False)
    found, sums = gradients(
        inputs, out, lse, dout, dlse, options, rng, modifier and modifier.with_captures(captures), needed[len(INPUTS) :]
    )
    places = dict(zip(DIFFERENTIABLE, found, strict=True))
    of_captures = [None if x is None else x.to(y.dtype) for x, y in zip(sums, captures, strict=True)]
    return None, None, None, *[places.get(name) for name in INPUTS], *of_captures


# ------------------------------------------------------------------------------------------------------ the operators

_OF_MODIFIER: Final = "Tensor[] captures, str program, SymInt[] ints, float[] floats"
_BEHIND: Final = 4
"""Arguments of `_OF_MODIFIER`."""
_LIBRARY: Final = torch.library.Library("nvrtc_attn", "FRAGMENT")
_LIBRARY.define(
    f"modified_forward({SIGNATURE}, bool return_lse, bool return_max_logit, {_OF_MODIFIER}) -> "
    "(Tensor out, Tensor lse, Tensor max_logit)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    f"modified_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {SIGNATURE}, "
    f"{', '.join(f'bool {name}' for name in OPTIONAL_GRADIENTS)}, {_OF_MODIFIER}, bool[] wanted) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
modified_forward: Any = torch.ops.nvrtc_attn.modified_forward.default
modified_backward: Any = torch.ops.nvrtc_attn.modified_backward.default


def plain_arguments(q: Any, k: Any, v: Any, softmax_scale: float | None, deterministic: bool) -> tuple[Any, ...]:
    """Those of `modified_forward` before the modifier's, of q, k and v alone, with an lse."""
    no_dropout = None, None, 0, 0
    return (
        q, k, v, *_NONE, *no_dropout, "", None, None, softmax_scale, 0.0, 0.0, None, None, deterministic, None, True,
        False,
    )  # fmt: skip


def _modifier(captures: Any, program: str, ints: Any, floats: Any) -> tuple[Modifier | None, tuple[int, ...]]:
    if not program:
        return None, ()
    captures = tuple(map(as_plain, captures))
    facts = tuple([(x.shape, x.dtype) for x in captures])
    modifier, places = read_text(program, tuple(ints), tuple(floats), facts)
    return modifier.with_captures(tuple([captures[i] for i in places])), places


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *given, return_lse, return_max_logit = arguments[:-_BEHIND]
    with torch.no_grad():
        tensors, options, rng = split(tuple(given), return_lse)
        options = options._replace(return_max_logit=return_max_logit)
        modifier, _ = _modifier(*arguments[-_BEHIND:])
        captures = () if modifier is None else modifier.captures
        out, lse, *most = forward((*tensors, *captures), modifier, options, rng)
        nothing = out.new_empty(0, dtype=torch.float32)
    return out, lse if return_lse else nothing, most[0] if most else out.new_empty(0, dtype=torch.float32)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_backward(dout: Any, dlse: Any, out: Any, lse: Any, *arguments: Any) -> list[torch.Tensor]:
    """`GRADIENTS`, then that of each captured tensor: empty ones of those that are not asked for."""
    *given, captures, program, ints, floats, wanted = arguments
    count = len(OPTIONAL_GRADIENTS)
    with torch.no_grad():
        tensors, options, rng = split(tuple(given[:-count]), True, *given[-count:])
        modifier, places = _modifier(captures, program, ints, floats)
        wanted_of_modifier = [wanted[place] for place in places]
        found, sums = gradients(tensors, out, lse, dout, dlse, options, rng, modifier, wanted_of_modifier)
        of_captures = {place: x for place, x in zip(places, sums, strict=True) if x is not None}
        results = [dout.new_empty(0) if x is None else x for x in found]
        for i, x in enumerate(captures):
            if i in of_captures:
                results.append(of_captures[i].to(x.dtype))
            else:  # no score depends on it, or nobody asks
                results.append(x.new_zeros(x.shape) if wanted[i] else x.new_empty(0))
    return results


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("modified_forward", _run_forward, _key)
    _LIBRARY.impl("modified_backward", _run_backward, _key)
# The key that comes before any other while a transformation is on, and that of a batch of gradients.
_LIBRARY.impl("modified_forward", refuse_transformed, "FuncTorchDynamicLayerFrontMode")
_LIBRARY.impl("modified_backward", refuse_transformed, "Batched")


def _forward_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Also refuses what a modifier cannot do, while the program is traced."""
    captures, program, ints, floats = arguments[-_BEHIND:]
    modifier = None
    if program:
        # Symbols stand for any number here.
        known_ints = tuple([x if type(x) is int else 2 for x in ints])
        known_floats = tuple([x if type(x) is float else 2.0 for x in floats])
        shapes = tuple([(tuple([n if type(n) is int else _ANY_SIZE for n in x.shape]), x.dtype) for x in captures])
        modifier, places = read_text(program, known_ints, known_floats, shapes)
        modifier = modifier.with_captures(tuple([captures[i] for i in places]))
    return forward_fake(*arguments[:-_BEHIND], modifier=modifier)


def _backward_fake(dout: Any, dlse: Any, out: Any, lse: Any, *arguments: Any) -> list[torch.Tensor]:
    *given, captures, _, _, _, wanted = arguments
    count = len(OPTIONAL_GRADIENTS)
    options = dict(zip(OPTIONAL_GRADIENTS, given[-count:], strict=True))
    inputs = [given[place] for place in DIFFERENTIABLE_PLACES]
    found = [
        dense_like(x) if options.get(name, True) else dout.new_empty(0)
        for name, x in zip(GRADIENTS, inputs, strict=True)
    ]
    return found + [dense_like(x) if wants else x.new_empty(0) for x, wants in zip(captures, wanted, strict=True)]


torch.library.register_fake("nvrtc_attn::modified_forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("nvrtc_attn::modified_backward", _backward_fake, lib=_LIBRARY)
register_derivative(
    _LIBRARY, modified_forward, modified_backward, tensors=SEED_WORD, flags=(True, False),
    differentiable=DIFFERENTIABLE_PLACES, behind=_BEHIND,
)  # fmt: skip
