"""PyTorch: `attention` with autograd, on torch's current stream, allocator and random generator."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable

from .. import api
from ..base import env
from ..base.errors import shown
from ..front.call import Call, CallOptions, plain_flags, plain_options, rng_state
from ..front.dlpack import compact_strides
from ..front.problem import Causal, WindowSize, dense_layout
from ..front.tensors import CPU, Device, view
from ..plans.plan import BackwardPlan, ForwardPlan, LseLayout, forward_plan
from ..plans.prefetch import BackwardPrefetch
from ..runtime import driver

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
_OPTIONAL: Final = ("bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_NAMES: Final = ("q", "k", "v", *_OPTIONAL)
_NO_WINDOW: Final = (None, None)
_NUMBERS: Final = frozenset((float, int))  # not bool
_generator_lock = threading.Lock()
_table_lock = threading.Lock()
Tensors = tuple[torch.Tensor | None, ...]  # q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k
Options = tuple[Any, ...]  # the first fields of CallOptions, in their order
_Dense = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides
# Everything of a call but its addresses -> plan, out and lse: the steady state is one lookup here.
_forward_plans: dict[Any, tuple[ForwardPlan, _Dense, _Dense]] = {}
_backward_plans: dict[Any, BackwardPlan] = {}


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
            cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, return_lse, deterministic,
        )  # fmt: skip
    if _autocast():
        q, k, v, bias = ops.cast_for_autocast(q, k, v, bias)
    if deterministic is None:
        deterministic = _deterministic()
    options: Options = (causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k)
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
    ):
        options = plain_options(options)
        return_lse, deterministic = plain_flags(return_lse=return_lse, deterministic=deterministic)
        dropout_p, max_seqlen_q, max_seqlen_k = options[4:]
    tensors: Tensors = (q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k)
    # What is no tensor, or of another rank, is refused below.
    if dropout_p > 0 and isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.dim() == k.dim() == 4:
        if rng is not None:
            rng = checked_rng(rng, q)
        elif cu_seqlens_q is None:
            rng = draw_rng(q, k, None)
        elif isinstance(cu_seqlens_q, torch.Tensor) and cu_seqlens_q.dim() == 1:
            rng = draw_rng(q, k, (cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k))
    if _grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
    ):
        if any(isinstance(x, torch.Tensor) and x.is_neg() for x in tensors[:4]):
            tensors = (*map(resolved, tensors[:4]), *tensors[4:])
        out, lse = _Attention.apply(options, deterministic, rng, *tensors)
    else:
        out, lse = forward(tensors, options, rng, return_lse)
    return (out, lse) if return_lse else out


def _is_plain_window(window_size: Any) -> bool:
    if window_size.__class__ is not tuple or len(window_size) != 2:
        return False
    left, right = window_size
    return (left is None or left.__class__ is int) and (right is None or right.__class__ is int)


def _check_tensors(tensors: Tensors) -> None:
    for name, x in zip(_NAMES, tensors, strict=True):
        if not (isinstance(x, torch.Tensor) or (x is None and name in _OPTIONAL)):
            raise TypeError(
                f"{name}: got {shown(x)} of type {type(x).__module__}.{type(x).__qualname__}. nvrtc_attn.torch takes "
                f"torch tensors; nvrtc_attn.attention takes those of any framework."
            )


def draw_rng(q: torch.Tensor, k: torch.Tensor, packed: tuple[int, int | None, int | None] | None) -> tuple[Any, Any]:
    """(seed, offset) from torch's generator of q's device, and advance it past the numbers of this problem."""
    if not q.is_cuda:
        return int(torch.randint(2**63 - 1, ())), 0
    index = q.get_device()
    if torch.cuda.is_current_stream_capturing():
        seed = torch.empty((), dtype=torch.int64, device=q.device).random_()
        return seed, torch.zeros((), dtype=torch.int64, device=q.device)
    torch.cuda.init()
    generator = torch.cuda.default_generators[index]
    batch, rows, columns = packed or (q.shape[0], q.shape[1], k.shape[1])
    numbers = batch * q.shape[2] * (rows or 0) * (columns or 0)
    with _generator_lock:  # two threads must not draw the same numbers
        seed, offset = generator.initial_seed() & (2**64 - 1), generator.get_offset()
        generator.set_offset(offset + -(-numbers // 4) * 4)
    return seed, offset


def checked_rng(rng: Any, q: torch.Tensor) -> tuple[Any, Any]:
    """``rng`` as (seed, offset): ints in [0, 2**64), and what the kernels read, int64 tensors on q's device, as it is.

    Errors are those of `nvrtc_attn.front.call.rng_state`.
    """
    device = Device("cuda", q.get_device()) if q.is_cuda else CPU
    (*addresses, seed, offset), _ = rng_state(rng, device, None)
    given = rng if isinstance(rng, (tuple, list)) else (rng, 0)
    return given[0] if addresses[0] else seed, given[1] if addresses[1] else offset


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def forward(ctx: Any, options: Any, deterministic: bool, rng: Any, *tensors: Any) -> Any:
        out, lse = forward(tensors, options, rng, True, (deterministic, ctx.needs_input_grad[6]))
        ctx.save_for_backward(out, lse, *tensors)
        ctx.options, ctx.deterministic, ctx.rng = options, deterministic, rng
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
    with_dbias = ctx.needs_input_grad[6]
    gradients = backward(tuple(tensors), out, lse, dout, dlse, ctx.options, ctx.rng, ctx.deterministic, with_dbias)
    return (None, None, None, *gradients, None, None, None, None)


_gradients_once: Any = once_differentiable(_gradients)  # type: ignore[no-untyped-call, unused-ignore]


def forward(
    tensors: Tensors,
    options: tuple[Any, ...],
    rng: Any,
    with_lse: bool,
    backward_options: tuple[bool, bool] | None = None,
) -> Any:
    """(out, lse or None) of detached tensors; ``options`` are the fields of `CallOptions` in their order.

    ``backward_options`` (deterministic, with the bias's gradient) of a backward pass that is going to follow.
    """
    q, k, v, bias, mask, cu_q, cu_k, used = tensors
    if cu_q is not None and env.debug():
        _describe(tensors, options, with_lse)  # checks the lengths, which no plan knows
    key: Any = (with_lse, options, env.raw_backend(), _signature(q), _signature(k), _signature(v))
    if not (bias is mask is cu_q is cu_k is used is None):
        key = (*key, *map(_signature, tensors[3:]))
    entry = _forward_plans.get(key)
    ahead = None
    if entry is None:
        _check_tensors(tensors)
        if any(isinstance(x, torch.Tensor) and x.is_neg() for x in tensors):
            return forward(tuple(map(resolved, tensors)), options, rng, with_lse, backward_options)
        if q is not None and not q.is_cuda:
            inputs = map(detached, tensors[:3])
            result = api.attention(*inputs, **_keywords(tensors, options), rng=rng, return_lse=with_lse)
            return result if with_lse else (result, None)
        call = _describe(tensors, options, with_lse)
        out_like, lse_like = _dense(call.out_shape), _dense(call.lse_shape)
        layout = LseLayout(strides=lse_like[1], rows=call.problem.seqlen_q, packed=call.problem.varlen)
        ahead = None if backward_options is None else _backward_ahead(tensors, options, *backward_options)
        meanwhile = None if ahead is None else ahead.start
        plan = forward_plan(call.with_outputs(), call.device.index, layout, call.launch_stream, meanwhile=meanwhile)
        entry = _remember(_forward_plans, key, (plan, out_like, lse_like))
    plan, out_like, lse_like = entry
    assert q is not None and k is not None and v is not None  # noqa: PT018
    device = q.device
    # `torch.empty` takes twice the time: it has more forms of a shape to tell apart.
    out = torch.empty_strided(*out_like, dtype=q.dtype, device=device)
    lse = torch.empty_strided(*lse_like, dtype=torch.float32, device=device) if with_lse else None
    if 0 not in out_like[0]:
        size = plan.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        plan.run(
            raw_stream(device), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), _ptr(lse), _ptr(bias),
            _ptr(mask), _ptr(cu_q), _ptr(cu_k), _ptr(used), rng_words(rng, options[4]), _ptr(workspace),
        )  # fmt: skip
        if ahead is not None:
            ahead.start_after(plan.kernel_keys)
    return out, lse


def _backward_ahead(
    tensors: Tensors, options: tuple[Any, ...], deterministic: bool, with_dbias: bool
) -> BackwardPrefetch | None:
    """The backward pass as `backward` will plan it, if the gradient of out is dense."""
    try:
        call = _describe(tensors, (*options, True, deterministic, with_dbias))
    except (TypeError, ValueError, NotImplementedError):
        return None  # for the backward pass to say
    bias = call.bias
    dbias = dense_layout(bias.shape, bias.dtype) if with_dbias and bias is not None else None
    return BackwardPrefetch(call.with_outputs(), call.device.index, dbias)


def backward(
    tensors: Tensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None,
    options: tuple[Any, ...], rng: Any, deterministic: bool, with_dbias: bool,
) -> Any:  # fmt: skip
    """(dq, dk, dv, dbias or None), dense, of detached tensors."""
    if dout.is_cuda:
        driver.adopt_context(dout.get_device())  # autograd's thread: cuBLAS warns where nothing was current before it
    dout = dout.resolve_neg()
    dlse = None if dlse is None else dlse.resolve_neg()
    if dout.stride(-1) != 1 or 0 in dout.stride():
        # An expanded gradient (of a sum, say): one packed copy costs less than reading elements one by one.
        dout = dout.contiguous()
    q, k, v, bias, mask, cu_q, cu_k, used = tensors
    assert q is not None and k is not None and v is not None  # noqa: PT018
    dq, dk, dv = _empty_like(q), _empty_like(k), _empty_like(v)
    dbias = _empty_like(bias) if with_dbias and bias is not None else None
    everything = (*tensors, out, lse, dout, dlse)
    key = (deterministic, with_dbias, options, env.raw_backend(), *map(_signature, everything))
    plan = _backward_plans.get(key)
    if plan is None:
        if not q.is_cuda:
            api.attention_backward(
                dout, q.detach(), k.detach(), v.detach(), out, lse, dq, dk, dv, dlse=dlse, dbias=dbias, rng=rng,
                **_keywords(tensors, options),
            )  # fmt: skip
            return dq, dk, dv, dbias
        call = _describe(tensors, (*options, True, deterministic, with_dbias))
        views = {"out": out, "lse": lse, "dout": dout, "dlse": dlse, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias}
        plan = api.plan_backward(call, {n: view(x.detach(), n) for n, x in views.items() if x is not None})
        _remember(_backward_plans, key, plan)
    size = plan.workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    plan.run(
        raw_stream(q.device), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), dout.data_ptr(), lse.data_ptr(),
        dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), workspace.data_ptr(), _ptr(dlse), _ptr(bias), _ptr(dbias),
        _ptr(mask), _ptr(cu_q), _ptr(cu_k), _ptr(used), rng_words(rng, options[4]),
    )  # fmt: skip
    return dq, dk, dv, dbias


def _describe(tensors: Tensors, values: tuple[Any, ...], *more: bool) -> Call:
    options = CallOptions(**dict(zip(CallOptions.__dataclass_fields__, (*values, *more), strict=False)))
    q, k, v, *others = map(detached, tensors)
    return api.checked_call(q, k, v, **dict(zip(_OPTIONAL, others, strict=True)), options=options, stream=None)


def _keywords(tensors: Tensors, options: tuple[Any, ...]) -> dict[str, Any]:
    """The keyword arguments of the core functions."""
    return {
        **dict(zip(CallOptions.__dataclass_fields__, options, strict=False)),
        **dict(zip(_OPTIONAL, map(detached, tensors[3:]), strict=True)),
    }


def detached(x: Any) -> Any:
    """A tensor without its autograd history; anything else as it is, for validation to name."""
    return x.detach() if isinstance(x, torch.Tensor) else x


def resolved(x: Any) -> Any:
    """The tensor with the sign of a lazily negated view applied; anything else as it is."""
    return x.resolve_neg() if isinstance(x, torch.Tensor) else x


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
        return int(_raw_stream(device.index))
    return int(torch.cuda.current_stream(device).cuda_stream)


def rng_words(rng: Any, dropout_p: float) -> tuple[int, int, int, int]:
    """(seed address, offset address, seed, offset) of what `draw_rng` or `checked_rng` returned."""
    if dropout_p == 0:
        return 0, 0, 0, 0
    addresses, words = [0, 0], [0, 0]
    for i, x in enumerate(rng):
        if isinstance(x, torch.Tensor):
            addresses[i] = x.data_ptr()
        else:
            words[i] = x
    return addresses[0], addresses[1], words[0], words[1]


from . import flash, ops  # noqa: E402 - these use the functions above
from .ops import register_sharding  # noqa: E402
from .sdpa import enable_sdpa, scaled_dot_product_attention  # noqa: E402

__all__ = ["attention", "enable_sdpa", "register_sharding", "scaled_dot_product_attention"]
flash.register()
