"""Other attention kernels on the problems of `model_cases.py`: what each can do, and how it is called at its best.

``seed`` is torch's memory-efficient kernel, ``flash2`` and ``cudnn`` its other two; ``fa3`` is FlashAttention-3,
forward and backward, from the operator library of the xformers 0.0.34 wheel: the folder ``$FA3_DIR`` holds it as
fa3_C.so (xformers/flash_attn_3/_C.so in the wheel) beside libcudart.so.12 (nvidia-cuda-runtime-cu12); ``fa4`` is the
package flash-attn-4. A kernel that cannot do a case raises, and is a dash.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from model_cases import Case, Inputs, keep_of, options_of
from torch.nn.attention import SDPBackend, sdpa_kernel

logging.getLogger("torch.nested._internal.sdpa").setLevel(logging.ERROR)  # a page for each case that it cannot do


@dataclass(frozen=True, kw_only=True)
class Call:
    """One kernel on one case. Leaves and ``dout`` have its own layout, so that no change of layout is timed."""

    run: Callable[[], Any]
    leaves: tuple[Any, ...]
    """q, k, v and, where it has a gradient, the bias."""
    dout: Any
    view: Callable[[Any], Any] = lambda x: x
    """Its layout of out and of gradients of q, k and v as [B, S, H, D]."""
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Entered around all runs, no part of their time."""


class CannotError(Exception):
    """What a kernel has no argument for."""


def refuse(case: Case, *features: str) -> None:
    """Raise if the case has one of ``features``, fields of it."""
    for feature in features:
        if getattr(case, feature):
            raise CannotError(f"no {feature}")


def leaf(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad)


def leaves_of(inputs: Inputs, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(leaf(change(x.detach()).requires_grad_(x.requires_grad)) for x in (inputs.q, inputs.k, inputs.v))


def ours(case: Case, inputs: Inputs) -> Call:
    import nvrtc_attn.torch as na

    leaves = (inputs.q, inputs.k, inputs.v)
    options = options_of(case, inputs)
    more = () if inputs.bias is None else (inputs.bias,)
    return Call(run=lambda: na.attention(*leaves, **options), leaves=(*leaves, *more), dout=inputs.dout)


def plain_math(case: Case, inputs: Inputs) -> Call:
    """The definition in float32 with all scores in memory; for tiny cases, to see that the others are right."""
    leaves = (inputs.q, inputs.k, inputs.v) if inputs.bias is None else (inputs.q, inputs.k, inputs.v, inputs.bias)
    keep = keep_of(case, inputs)
    refuse(case, "dropout")

    def run() -> Any:
        group = case.h // case.heads_kv
        q, k, v = (x.float().transpose(1, 2) for x in leaves[:3])
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) * (case.d**-0.5 if case.scale is None else case.scale)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if inputs.bias is not None:
            scores = scores + leaves[3].float()
        if keep is not None:
            scores = scores.masked_fill(~keep, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).to(inputs.q.dtype)

    return Call(run=run, leaves=leaves, dout=inputs.dout)


def sdpa(backend: SDPBackend, case: Case, inputs: Inputs) -> Call:
    """`scaled_dot_product_attention`, on nested tensors for packed documents."""
    refuse(case, "window", "softcap")
    context = functools.partial(sdpa_kernel, [backend])
    options: dict[str, Any] = {"dropout_p": case.dropout, "scale": case.scale, "is_causal": case.causal}
    if case.hkv:
        options["enable_gqa"] = True
    if inputs.cu is not None:
        return nested(case, inputs, options, context)
    leaves: tuple[Any, ...] = leaves_of(inputs, lambda x: x.transpose(1, 2))
    mask: Any = None
    if inputs.bias is not None:
        leaves = (*leaves, leaf(inputs.bias))
        mask = leaves[3].expand(case.b, case.h, case.q, case.seqlen_k)
    elif inputs.mask is not None or (case.causal and case.q != case.seqlen_k):
        mask, options["is_causal"] = keep_of(case, inputs), False
    return Call(
        run=lambda: F.scaled_dot_product_attention(*leaves[:3], attn_mask=mask, **options),
        leaves=leaves, dout=inputs.dout.transpose(1, 2), view=lambda x: x.transpose(1, 2), context=context,
    )  # fmt: skip


def nested(case: Case, inputs: Inputs, options: dict[str, Any], context: Any) -> Call:
    """Packed documents as jagged tensors of [documents, H, length, D]."""

    def jagged(x: Any) -> Any:
        found = torch.nested.nested_tensor_from_jagged(
            x[0], inputs.cu, min_seqlen=min(case.packed), max_seqlen=max(case.packed)
        )
        return found.transpose(1, 2)

    leaves = leaves_of(inputs, jagged)
    return Call(
        run=lambda: F.scaled_dot_product_attention(*leaves, **options),
        leaves=leaves, dout=jagged(inputs.dout), view=lambda x: x.transpose(1, 2).values()[None], context=context,
    )  # fmt: skip


def seed(case: Case, inputs: Inputs) -> Call:
    """Through its own operator where SDPA has no argument: packed documents, windows, causal from the bottom right."""
    if not (case.window or case.packed or (case.causal and case.q != case.seqlen_k)):
        return sdpa(SDPBackend.EFFICIENT_ATTENTION, case, inputs)
    refuse(case, "hkv", "softcap", "bias", "padding", "block")
    if case.window and not case.causal:
        raise CannotError("no window without causal")
    leaves = leaves_of(inputs, lambda x: x)
    longest = max(case.packed) if case.packed else None

    def run() -> Any:
        return torch.ops.aten._efficient_attention_forward(
            *leaves, None, inputs.cu, inputs.cu, longest, longest, 0.0, 2 if case.causal else 0,
            torch.is_grad_enabled() and case.backward, scale=case.scale,
            window_size=case.window[0] + 1 if case.window else None,
        )[0]  # fmt: skip

    return Call(run=run, leaves=leaves, dout=inputs.dout)


def flash2(case: Case, inputs: Inputs) -> Call:
    """Through its own operator where SDPA has no argument."""
    if not (case.window or case.packed or (case.causal and case.q != case.seqlen_k)):
        return sdpa(SDPBackend.FLASH_ATTENTION, case, inputs)
    refuse(case, "softcap", "bias", "padding", "block")
    leaves = leaves_of(inputs, (lambda x: x[0]) if case.packed else (lambda x: x))
    longest = max(case.packed) if case.packed else 0
    left, right = case.window or (None, None)

    def run() -> Any:
        return torch.ops.aten._flash_attention_forward(
            *leaves, inputs.cu, inputs.cu, longest or case.q, longest or case.seqlen_k, 0.0, case.causal, False,
            scale=case.scale, window_size_left=left, window_size_right=right,
        )[0]  # fmt: skip

    return unpacked_call(run, leaves, inputs)


def cudnn(case: Case, inputs: Inputs) -> Call:
    return sdpa(SDPBackend.CUDNN_ATTENTION, case, inputs)


def unpacked_call(run: Callable[[], Any], leaves: tuple[Any, ...], inputs: Inputs) -> Call:
    """Of a kernel that takes [B, S, H, D], or [T, H, D] of packed documents."""
    if inputs.cu is None:
        return Call(run=run, leaves=leaves, dout=inputs.dout)
    return Call(run=run, leaves=leaves, dout=inputs.dout[0], view=lambda x: x[None])


def fa3(case: Case, inputs: Inputs) -> Call:
    """`num_splits` is left to its heuristic where there are few queries, as its function for a cache of keys does."""
    refuse(case, "bias", "block", "dropout")
    if case.padding:
        raise CannotError("no mask")
    operators = fa3_operators()
    leaves = leaves_of(inputs, (lambda x: x[0]) if case.packed else (lambda x: x))
    longest = max(case.packed) if case.packed else None
    left, right = case.window or (-1, -1)
    scale = case.d**-0.5 if case.scale is None else case.scale
    common = (scale, case.causal, left, right)
    splits = 0 if case.kind == "decode" else 1

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            # Not given: new keys, out, their boundaries, lengths in use, pages, rotary embeddings, scales of float8.
            out, lse, *_ = operators.fwd(
                q, k, v, None, None, None, None, inputs.cu, inputs.cu, None, None, None, longest, longest,
                *[None] * 6, *[None] * 3, *common, 0, case.softcap, True, None, splits, None, 0,
            )  # fmt: skip
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            q, k, v, out, lse = ctx.saved_tensors
            gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            operators.bwd(
                dout, q, k, v, out, lse, *gradients, inputs.cu, inputs.cu, None, None, longest, longest, *common,
                case.softcap, False, 0,
            )  # fmt: skip
            return gradients

    return unpacked_call(lambda: Attention.apply(*leaves), leaves, inputs)


@functools.cache
def fa3_operators() -> Any:
    folder = Path(os.environ["FA3_DIR"])
    ctypes.CDLL(str(folder / "libcudart.so.12"))
    torch.ops.load_library(str(folder / "fa3_C.so"))
    return torch.ops.flash_attn_3


def fa4(case: Case, inputs: Inputs) -> Call:
    refuse(case, "bias", "padding", "block", "dropout")
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options: dict[str, Any] = {"causal": case.causal, "softmax_scale": case.scale, "softcap": case.softcap}
    if case.window:
        options["window_size"] = case.window
    if case.kind == "decode":
        options["num_splits"] = 0  # its heuristic
    leaves = leaves_of(inputs, (lambda x: x[0]) if case.packed else (lambda x: x))
    function = flash_attn_func
    if case.packed:
        longest = max(case.packed)
        options |= {"cu_seqlens_q": inputs.cu, "cu_seqlens_k": inputs.cu}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        function = flash_attn_varlen_func

    def run() -> Any:
        result = function(*leaves, **options)
        return result[0] if isinstance(result, tuple) else result

    return unpacked_call(run, leaves, inputs)


PEERS: dict[str, Callable[[Case, Inputs], Call]] = {
    "seed": seed, "flash2": flash2, "cudnn": cudnn, "fa3": fa3, "fa4": fa4,
}  # fmt: skip


def installed() -> list[str]:
    """Names of the peers that this machine has."""
    found = ["seed", "flash2", "cudnn"]
    if os.environ.get("FA3_DIR"):
        found.append("fa3")
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        if importlib.util.find_spec("flash_attn.cute"):
            found.append("fa4")
    return found
