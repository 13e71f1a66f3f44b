"""xFormers: a drop-in `memory_efficient_attention`, and `FwOp`, `BwOp` for ``op=`` of xFormers' own.

xFormers' bias classes are read by their names and fields, so the functions need no xFormers; the two operators, which
are subclasses of its classes, do.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import torch

from .. import api
from ..base.hosts import check_version
from ..torch import attention
from . import refuse

__all__ = [
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]

if TYPE_CHECKING:
    FwOp: Any
    BwOp: Any

_TOP_LEFT: Final = {"causal": "top_left"}
_BOTTOM_RIGHT: Final = {"causal": "bottom_right"}
_PLAIN: Final[dict[str, Any]] = {}
# Name of the class -> causal, and whether its sequences are packed. Windows are read from the fields.
_BIASES: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "LowerTriangularMask": (_TOP_LEFT, False),
    "LowerTriangularMaskWithTensorBias": (_TOP_LEFT, False),
    "LowerTriangularFromBottomRightMask": (_BOTTOM_RIGHT, False),
    "LowerTriangularFromBottomRightLocalAttentionMask": (_BOTTOM_RIGHT, False),
    "LocalAttentionFromBottomRightMask": (_PLAIN, False),
    "BlockDiagonalMask": (_PLAIN, True),
    "BlockDiagonalCausalMask": (_TOP_LEFT, True),
    "BlockDiagonalCausalLocalAttentionMask": (_TOP_LEFT, True),
    "BlockDiagonalCausalFromBottomRightMask": (_BOTTOM_RIGHT, True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (_BOTTOM_RIGHT, True),
    "BlockDiagonalPaddedKeysMask": (_PLAIN, True),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (_BOTTOM_RIGHT, True),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (_PLAIN, True),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (_BOTTOM_RIGHT, True),
    "BlockDiagonalGappyKeysMask": (_PLAIN, True),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (_BOTTOM_RIGHT, True),
}


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """XFormers' ``memory_efficient_attention`` on this library's kernels, with gradients.

    Parameters
    ----------
    query, key, value
        ``[B, M, H, K]``; ``[B, M, K]``, one head; or ``[B, M, G, H, K]``, H query heads for each of the G key heads
        where key and value are expanded along H, and G * H heads otherwise.
    attn_bias
        None, a tensor ``[B or 1, H or 1, M or 1, N or 1]`` that is added to the scores and gets its gradient, or a
        mask of ``xformers.ops.fmha.attn_bias`` that needs no paging.
    p, scale
        Dropout probability, and the factor of ``q . k`` (default ``1 / sqrt(K)``).
    op
        Chooses one of xFormers' kernels, all of which compute the same; here it changes nothing.
    output_dtype
        None or that of query.

    Raises
    ------
    UnsupportedError
        With every reason: a mask class that is not read (the paged ones), another ``output_dtype``.
    """
    del op
    q, k, v, options = _arguments(query, key, value, attn_bias, scale, output_dtype)
    out: torch.Tensor = attention(q, k, v, dropout_p=p, **options)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def memory_efficient_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None, output_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """`memory_efficient_attention` outside of autograd."""
    with torch.no_grad():
        return memory_efficient_attention(query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype)


def memory_efficient_attention_forward_requires_grad(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None, output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) outside of autograd; lse is float32 ``[B, H, M]``, packed sequences ``[1, H, total]``."""
    del op
    _refuse_dropout(p)
    q, k, v, options = _arguments(query, key, value, attn_bias, scale, output_dtype)
    with torch.no_grad():
        out, lse = attention(q, k, v, return_lse=True, **options)
    heads = query.shape[2:-1] or (1,)
    return out.reshape(*query.shape[:-1], value.shape[-1]), lse.reshape(lse.shape[0], *heads, lse.shape[-1])


def memory_efficient_attention_backward(
    grad: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *, op: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), in the shapes of query, key and value, from what the function above returned."""
    del op
    _refuse_dropout(p)
    dq, dk, dv, _ = _gradients(grad, output, lse, query, key, value, attn_bias, 0.0, scale, None, False)
    return dq, dk, dv


def _refuse_dropout(p: float) -> None:
    if p != 0:
        reason = f"p: got {p}. Only memory_efficient_attention drops, as in xFormers: the others hold no seed."
        refuse("call of xformers", [reason])


def _refuse_lost_gradient(attn_bias: Any) -> None:
    """XFormers' autograd function returns the gradient of a bias that is a tensor, and of none inside of a mask."""
    bias = getattr(attn_bias, "_bias", None)
    if isinstance(bias, torch.Tensor) and bias.requires_grad and not isinstance(attn_bias, torch.Tensor):
        reason = (
            f"attn_bias: {type(attn_bias).__name__} with a bias that requires grad. With op=, xFormers gives it no "
            f"gradient. Call nvrtc_attn.integrations.xformers.memory_efficient_attention, or detach the bias."
        )
        refuse("call of xformers", [reason])


def _gradients(
    grad: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, attn_bias: Any, p: float, scale: float | None, rng: Any, bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    q, k, v, options = _arguments(query, key, value, attn_bias, scale, None, share_heads=False)
    q, k, v = q.detach(), k.detach(), v.detach()
    out, dout = (x.detach().reshape(*q.shape[:-1], v.shape[-1]) for x in (output, grad))
    lse = lse.detach().reshape(lse.shape[0], q.shape[2], lse.shape[-1])[:, :, : q.shape[1]]
    bias = options.pop("bias", None)
    bias = None if bias is None else bias.detach()
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if bias_grad and bias is not None else None
    options.update(bias=bias, dropout_p=p, deterministic=torch.are_deterministic_algorithms_enabled())
    size = api.backward_workspace_bytes(q, k, v, dbias=dbias is not None, **options)
    workspace = torch.empty(size, dtype=torch.uint8, device=q.device) if size else None
    api.attention_backward(dout, q, k, v, out, lse, dq, dk, dv, dbias=dbias, rng=rng, workspace=workspace, **options)
    shaped = dbias if dbias is None or attn_bias is None else dbias.reshape(attn_bias.shape)
    return dq.reshape(query.shape), dk.reshape(key.shape), dv.reshape(value.shape), shaped


def _arguments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any, scale: float | None,
    output_dtype: torch.dtype | None, *, share_heads: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:  # fmt: skip
    """What `nvrtc_attn.torch.attention` takes: q, k, v of rank 4 and keyword arguments."""
    if query.dim() not in (3, 4, 5) or not query.dim() == key.dim() == value.dim():
        raise ValueError(
            f"query, key, value: ranks {query.dim()}, {key.dim()}, {value.dim()}. All are [B, M, H, K], [B, M, K] or "
            f"[B, M, G, H, K]."
        )
    reasons = []
    if output_dtype not in (None, query.dtype):
        reasons.append(f"output_dtype: got {output_dtype}. The output has the dtype of query, {query.dtype}.")
    options, bias = _mask(attn_bias, reasons)
    if bias is not None and query.dim() != bias.dim() and not (query.dim() == 3 and bias.dim() == 4):
        reasons.append(f"attn_bias: shape {tuple(bias.shape)} of rank {bias.dim()}, with query of rank {query.dim()}.")
    refuse("call of xformers", reasons)
    if query.dim() == 3:
        query, key, value = (x.unsqueeze(2) for x in (query, key, value))
        bias = bias.unsqueeze(1) if bias is not None and bias.dim() == 3 else bias
    elif query.dim() == 5:
        # Grouped heads come expanded: one key head of each group is all there is in memory.
        if (
            share_heads
            and key.shape[3] > 1
            and key.stride(3) == value.stride(3) == 0
            and key.shape[:4] == value.shape[:4]
        ):
            key, value = key[:, :, :, :1], value[:, :, :, :1]
        groups = query.shape[2:4]
        query, key, value = (x.flatten(2, 3) for x in (query, key, value))
        if bias is not None:
            sizes = bias.shape[1:3]
            if sizes not in (groups, (1, 1)) and all(n in (1, full) for n, full in zip(sizes, groups, strict=True)):
                bias = bias.expand(-1, *groups, -1, -1)  # joined, a dim that is 1 beside one that is full is neither
            bias = bias.flatten(1, 2)
    if bias is not None:
        options["bias"] = bias
    return query, key, value, {**options, "softmax_scale": scale}


def _mask(attn_bias: Any, reasons: list[str]) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Keyword arguments of a mask, and the tensor that is added to the scores."""
    if attn_bias is None:
        return {}, None
    if isinstance(attn_bias, torch.Tensor) and type(attn_bias).__name__ not in _BIASES:
        return {}, attn_bias
    kind = type(attn_bias)
    # The class itself, not one derived from it: what a subclass changes is not known.
    found = _BIASES.get(kind.__name__) if kind.__module__.partition(".")[0] == "xformers" else None
    if found is None:
        reasons.append(f"attn_bias: got {kind.__module__}.{kind.__qualname__}. Read are {', '.join(sorted(_BIASES))}.")
        return {}, None
    options, packed = dict(found[0]), found[1]
    size = getattr(attn_bias, "_window_size", None)
    if size is not None:
        options["window_size"] = (size - 1, None)
    elif hasattr(attn_bias, "window_left"):
        options["window_size"] = (attn_bias.window_left, attn_bias.window_right)
    if packed:
        queries, keys = attn_bias.q_seqinfo, attn_bias.k_seqinfo
        options.update(
            cu_seqlens_q=queries.seqstart, cu_seqlens_k=keys.seqstart, max_seqlen_q=queries.max_seqlen,
            max_seqlen_k=keys.max_seqlen,
        )  # fmt: skip
        if hasattr(keys, "seqlen"):
            # Slots of padded or gappy keys: sequence b starts at seqstart[b] and has seqlen[b] keys.
            starts, lengths = list(keys.seqstart_py), list(keys.seqlen_py)
            slots = [end - start for start, end in itertools.pairwise(starts)]
            if any(length > slot for length, slot in zip(lengths, slots, strict=True)):
                reasons.append(
                    f"attn_bias: {kind.__name__} with starts {starts} and lengths {lengths}. Sequences of keys must "
                    f"follow each other and not overlap."
                )
            options.update(seqused_k=keys.seqlen, max_seqlen_k=max(slots, default=0))
    return options, getattr(attn_bias, "_bias", None)


def _operators() -> tuple[Any, Any]:
    """Classes derived from xFormers' operators. Made when asked for: they import it."""
    from xformers.ops.fmha import attn_bias as biases
    from xformers.ops.fmha import common

    check_version("xformers", "0.0.35", "0.0.35")
    every = (type(None), torch.Tensor, *(getattr(biases, name) for name in _BIASES if hasattr(biases, name)))
    shared = {
        "SUPPORTED_ATTN_BIAS_TYPES": every,
        "OPERATOR": staticmethod(attention),
        "SUPPORTED_DEVICES": {"cuda", "cpu"},
        "SUPPORTED_DTYPES": {torch.float16, torch.bfloat16, torch.float32},
        "SUPPORTED_MAX_K": 512,
        "SUPPORTS_DROPOUT": True,
        "SUPPORTS_CUSTOM_SCALE": True,
        "SUPPORTS_DIFFERENT_VALUE_EMBED": True,
        "VARLEN_LSE_PACKED": True,
        "CUDA_MINIMUM_COMPUTE_CAPABILITY": (7, 5),
    }

    def ours(reasons: list[str], device: Any) -> list[str]:
        """Without what xFormers says of its own build, and of bfloat16 where it runs on the CPU."""
        foreign = ("build with CUDA", "bf16 is only") if device.type == "cpu" else ("build with CUDA",)
        return [reason for reason in reasons if not any(text in reason for text in foreign)]

    class Forward(common.AttentionFwOpBase):  # type: ignore[misc, unused-ignore]
        NAME = "nvrtc_attnF"
        SUPPORTS_BMGHK = True  # not backward: xFormers' own function cannot take gradients of rank 5 apart

        @classmethod
        def not_supported_reasons(cls, d: Any) -> list[str]:
            return ours(super().not_supported_reasons(d), d.query.device)

        @classmethod
        def apply(cls, inp: Any, needs_gradient: bool) -> tuple[torch.Tensor, Any]:
            if needs_gradient:
                _refuse_lost_gradient(inp.attn_bias)
            q, k, v, options = _arguments(inp.query, inp.key, inp.value, inp.attn_bias, inp.scale, inp.output_dtype)
            rng = torch.randint(2**63 - 1, (), device=q.device) if inp.p else None
            with torch.no_grad():
                out, lse = attention(q, k, v, dropout_p=inp.p, rng=rng, return_lse=True, **options)
            out = out.reshape(*inp.query.shape[:-1], inp.value.shape[-1])
            lse = lse.reshape(lse.shape[0], *inp.query.shape[2:-1], lse.shape[-1])
            if not needs_gradient:
                return out, None
            # Dropout's mask is this library's: no other operator could go backward.
            return out, common.Context(lse=lse, out=out, op_bw=Backward if inp.p else None, rng_state=rng)

    class Backward(common.AttentionBwOpBase):  # type: ignore[misc, unused-ignore]
        NAME = "nvrtc_attnB"
        SUPPORTS_ATTN_BIAS_GRAD = True

        @classmethod
        def not_supported_reasons(cls, d: Any) -> list[str]:
            return ours(super().not_supported_reasons(d), d.query.device)

        @classmethod
        def apply(cls, ctx: Any, inp: Any, grad: torch.Tensor) -> Any:
            _refuse_lost_gradient(inp.attn_bias)  # another forward operator may have let it pass
            bias_grad = isinstance(inp.attn_bias, torch.Tensor) and inp.attn_bias.requires_grad
            dq, dk, dv, db = _gradients(
                grad, ctx.out, ctx.lse, inp.query, inp.key, inp.value, inp.attn_bias, inp.p, inp.scale, ctx.rng_state,
                bias_grad,
            )  # fmt: skip
            return common.Gradients(dq=dq, dk=dk, dv=dv, db=db)

    for cls in (Forward, Backward):
        for name, value in shared.items():
            setattr(cls, name, value)
    return Forward, Backward


def __getattr__(name: str) -> Any:
    if name not in ("FwOp", "BwOp"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["FwOp"], globals()["BwOp"] = _operators()
    return globals()[name]
