"""PyTorch: `attention` with autograd, on torch's current stream, allocator and random generator."""

from __future__ import annotations

import threading
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.function import once_differentiable

from .. import api
from ..base import env
from ..base.errors import shown
from ..front.call import Call, CallOptions, plain_options, rng_state
from ..front.dlpack import compact_strides
from ..front.operands import (
    DIFFERENTIABLE,
    FURTHER_INPUTS,
    GRADIENTS,
    INPUTS,
    OPERANDS,
    OPTIONAL_INPUTS,
    FurtherInputs,
    check_further,
    takes_further_inputs,
)
from ..front.part import Part
from ..front.philox import NO_RNG, RngState
from ..front.problem import Causal, WindowSize
from ..front.tensors import CPU, Device, TensorView, view
from ..plans.plan import BackwardPlan, ForwardPlan, forward_plan
from ..plans.prefetch import BackwardPrefetch
from ..runtime import driver

if TYPE_CHECKING:
    from typing_extensions import Unpack

_raw_stream: Final = torch._C._cuda_getCurrentRawStream if hasattr(torch._C, "_cuda_getCurrentRawStream") else None
# What decides between the kernels and their operators, as names of this module: two look-ups less a call.
_traced_by_dynamo: Final = torch.compiler.is_dynamo_compiling
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_transformed: Final = torch._C._functorch.maybe_current_level
_autocast: Final = torch._C._is_any_autocast_enabled
_grad_enabled: Final = torch.is_grad_enabled
_deterministic: Final = torch._C._get_deterministic_algorithms
_PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter))
_MAX_ENTRIES: Final = 4096
_NO_WINDOW: Final = (None, None)
_NUMBERS: Final = frozenset((float, int))  # not bool
_generator_lock = threading.Lock()
_table_lock = threading.Lock()
Tensors = tuple[torch.Tensor | None, ...]  # `INPUTS` of the table of operands, in its order
_Dense = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides
# Everything of a call but its addresses -> plan, out and lse: the steady state is one lookup here.
_forward_plans: dict[Any, tuple[ForwardPlan, _Dense, _Dense]] = {}
_backward_plans: dict[Any, BackwardPlan] = {}
_DIFFERENTIABLE: Final = tuple(map(INPUTS.index, DIFFERENTIABLE))
_differentiable: Final = itemgetter(*_DIFFERENTIABLE)
_new_tuple: Any = tuple.__new__  # a third of the time of a named tuple's own constructor
# Of each gradient: the place of its input, and the option that asks for it where it may be missing.
_GRADIENTS: Final = tuple(
    (place, name if OPERANDS[name].backward == "out?" else None)
    for name, place in zip(GRADIENTS, _DIFFERENTIABLE, strict=True)
)
# Gradients and a None -> the gradient of each input.
_by_input: Final = itemgetter(
    *(DIFFERENTIABLE.index(name) if name in DIFFERENTIABLE else len(DIFFERENTIABLE) for name in INPUTS)
)
_CU_SEQLENS_Q: Final = INPUTS.index("cu_seqlens_q")
_NO_ADDRESSES: Final = (0,) * len(OPTIONAL_INPUTS)


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
    """`nvrtc_attn.attention` of torch tensors, differentiable in q, k, v, bias and, through a returned lse, in the lse.

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
    ):
        if ops.is_dtensor(q):
            ops.register_sharding()
        return ops.attention(
            q, k, v, bias, mask, causal, window_size, softmax_scale, softcap, dropout_p, rng, cu_seqlens_q,
            cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, return_lse, deterministic, part, further,
        )  # fmt: skip
    if _autocast():
        q, k, v, bias = ops.cast_for_autocast(q, k, v, bias)
    tensors: Tensors = (q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k)
    if further or FURTHER_INPUTS:
        tensors = (*tensors, *check_further("attention", further))
    grad = _grad_enabled() and _wants_gradient(_differentiable(tensors))
    if deterministic is None:
        deterministic = grad and _deterministic()
    dbias = grad and bias is not None and bias.requires_grad
    # The tables of plans look options up by equality, and 1 equals True: only these kinds may reach them.
    if not (
        (causal is False or causal is True or causal.__class__ is str)
        and (window_size is _NO_WINDOW or window_size is None or _is_plain_window(window_size))
        and (softmax_scale is None or softmax_scale.__class__ in _NUMBERS)
        and softcap.__class__ in _NUMBERS
        and dropout_p.__class__ in _NUMBERS
        and 0 <= dropout_p <= 1
        and (max_seqlen_q is None or max_seqlen_q.__class__ is int)
        and (max_seqlen_k is None or max_seqlen_k.__class__ is int)
        and (return_lse is False or return_lse is True)
        and (deterministic is False or deterministic is True)
        and (part is None or part.__class__ is Part)
    ):
        (
            causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, return_lse,
            deterministic, dbias, part,
        ) = plain_options(
            CallOptions(
                causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, return_lse,
                deterministic, dbias, part,
            )
        )  # fmt: skip
    state = NO_RNG
    # What is no tensor, or of another rank, is refused below.
    if dropout_p > 0 and isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.dim() == k.dim() == 4:
        if rng is not None:
            state = checked_rng(rng, q)
        elif part is not None:
            raise ValueError(
                "rng: None, but this is a part of a larger attention, whose mask it has. Pass (seed, offset)."
            )
        elif cu_seqlens_q is None:
            state = draw_rng(q, k, None)
        elif isinstance(cu_seqlens_q, torch.Tensor) and cu_seqlens_q.dim() == 1:
            state = draw_rng(q, k, (cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k))
    # Without a backward pass it does not matter how that would be: one plan for both.
    options = _new_tuple(CallOptions, (
        causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, return_lse or grad,
        deterministic and grad, dbias, part,
    ))  # fmt: skip
    if grad:
        if _is_negated(_differentiable(tensors)):
            tensors = tuple(map(resolved, tensors))
        out, lse = _Attention.apply(options, state, *tensors)
    else:
        out, lse = forward(tensors, options, state)
    return (out, lse) if return_lse else out


def _is_plain_window(window_size: Any) -> bool:
    if window_size.__class__ is not tuple or len(window_size) != 2:
        return False
    left, right = window_size
    return (left is None or left.__class__ is int) and (right is None or right.__class__ is int)


def _check_tensors(tensors: Tensors) -> None:
    for name, x in zip(INPUTS, tensors, strict=True):
        if not (isinstance(x, torch.Tensor) or (x is None and name in OPTIONAL_INPUTS)):
            raise TypeError(
                f"{name}: got {shown(x)} of type {type(x).__module__}.{type(x).__qualname__}. nvrtc_attn.torch takes "
                f"torch tensors; nvrtc_attn.attention takes those of any framework."
            )


def draw_rng(q: torch.Tensor, k: torch.Tensor, packed: tuple[int, int | None, int | None] | None) -> RngState:
    """Numbers from torch's generator of q's device, which is advanced past those of this problem."""
    if not q.is_cuda:
        return RngState(int(torch.randint(2**63 - 1, ())), 0)
    index = q.get_device()
    if torch.cuda.is_current_stream_capturing():
        seed = torch.empty((), dtype=torch.int64, device=q.device).random_()
        offset = torch.zeros((), dtype=torch.int64, device=q.device)
        return RngState(0, 0, seed.data_ptr(), offset.data_ptr(), (seed, offset))
    torch.cuda.init()
    generator = torch.cuda.default_generators[index]
    batch, rows, columns = packed or (q.shape[0], q.shape[1], k.shape[1])
    numbers = batch * q.shape[2] * (rows or 0) * (columns or 0)
    with _generator_lock:  # two threads must not draw the same numbers
        state = RngState(generator.initial_seed() & (2**64 - 1), generator.get_offset())
        generator.set_offset(state.offset + -(-numbers // 4) * 4)
    return state


def checked_rng(rng: Any, q: torch.Tensor) -> RngState:
    """``rng`` as the kernels take it; int64 tensors on q's device are read by them.

    Errors are those of `nvrtc_attn.front.call.rng_state`.
    """
    state = rng_state(rng, Device("cuda", q.get_device()) if q.is_cuda else CPU, None)
    owners = tuple([x.owner if isinstance(x, TensorView) else x for x in state.owners])
    return state._replace(owners=owners)


def rng_values(state: RngState) -> tuple[Any, Any]:
    """(seed, offset) of what `draw_rng` or `checked_rng` returned: ints, and tensors of words on the GPU."""
    seed, offset = state.owners or (None, None)
    return state.seed if seed is None else seed, state.offset if offset is None else offset


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def forward(ctx: Any, options: CallOptions, rng: RngState, *tensors: Any) -> Any:
        out, lse = forward(tensors, options, rng, backward_follows=True)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.options, ctx.rng = options, rng
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        # Without a graph of this pass there is nothing to refuse, and the wrapper takes two microseconds.
        return (_gradients_once if torch.is_grad_enabled() else _gradients)(ctx, dout, dlse)


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    """The gradient of each argument of `_Attention.forward`."""
    out, lse, *tensors = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = backward(tuple(tensors), out, lse, dout, dlse, ctx.options, ctx.rng)
    return (None, None, *_by_input((*gradients, None)))


_gradients_once: Any = once_differentiable(_gradients)  # type: ignore[no-untyped-call, unused-ignore]


def forward(tensors: Tensors, options: CallOptions, rng: RngState, *, backward_follows: bool = False) -> Any:
    """(out, lse or None) of detached tensors, `INPUTS` in their order. The options are plain ones (`plain_options`)."""
    q, k, v = tensors[:3]
    optional = tensors[3:]
    key: Any = (options, env.raw_backend(), _signature(q), _signature(k), _signature(v))
    given = False
    for x in optional:
        if x is not None:
            key = (*key, *map(_signature, optional))
            given = True
            if tensors[_CU_SEQLENS_Q] is not None and env.debug():
                _describe(tensors, options)  # checks the lengths, which no plan knows
            break
    entry = _forward_plans.get(key)
    ahead = None
    if entry is None:
        _check_tensors(tensors)
        if _is_negated(tensors):
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
        entry = _remember(_forward_plans, key, (plan, _dense(call.out_shape), _dense(call.lse_shape)))
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
    key = (options, env.raw_backend(), *map(_signature, (*tensors, out, lse, dout, dlse)))
    plan = _backward_plans.get(key)
    if plan is None:
        named = dict(zip(GRADIENTS, gradients, strict=True))
        if not q.is_cuda:
            arguments: dict[str, Any] = _keywords(tensors, options) | named | {"dlse": dlse, "rng": rng}
            api.attention_backward(dout, q.detach(), k.detach(), v.detach(), out, lse, **arguments)
            return gradients
        named |= {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
        views = {name: view(x.detach(), name) for name, x in named.items() if x is not None}
        plan = _remember(_backward_plans, key, api.plan_backward(_describe(tensors, options), views))
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


def detached(x: Any) -> Any:
    """A tensor without its autograd history; anything else as it is, for validation to name."""
    return x.detach() if isinstance(x, torch.Tensor) else x


def resolved(x: Any) -> Any:
    """The tensor with the sign of a lazily negated view applied; anything else as it is."""
    return x.resolve_neg() if isinstance(x, torch.Tensor) else x


def _is_negated(tensors: Tensors) -> bool:
    """Whether one of them is a lazily negated view."""
    for x in tensors:  # noqa: SIM110 - a generator takes longer
        if isinstance(x, torch.Tensor) and x.is_neg():
            return True
    return False


def _wants_gradient(tensors: Tensors) -> bool:
    try:
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    except AttributeError:
        pass  # not a tensor, and refused
    return False


def _signature(x: Any) -> Any:
    """What of a tensor decides the kernel: everything but the address beyond its alignment."""
    if x is None:
        return None
    try:
        return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, x.is_neg()
    except (AttributeError, RuntimeError, TypeError):
        return type(x), id(x)  # not a plain tensor: refused on the way to a plan, so nothing is remembered of it


def _dense(shape: tuple[int, ...]) -> _Dense:
    return shape, compact_strides(shape)


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """A dense tensor of x's shape, in half the time of ``torch.empty``."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _remember(table: dict[Any, Any], key: Any, value: Any) -> Any:
    with _table_lock:
        while len(table) >= _MAX_ENTRIES:
            del table[next(iter(table))]
        table[key] = value
    return value


def _ptr(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def raw_stream(device: torch.device) -> int:
    """Handle of torch's current stream on ``device``."""
    if _raw_stream is not None:
        handle: int = _raw_stream(device.index)
        return handle
    return int(torch.cuda.current_stream(device).cuda_stream)


from . import flash, ops  # noqa: E402 - these use the functions above
from .ops import register_sharding  # noqa: E402
from .sdpa import enable_sdpa, scaled_dot_product_attention  # noqa: E402

__all__ = ["attention", "enable_sdpa", "register_sharding", "scaled_dot_product_attention"]
flash.register()
