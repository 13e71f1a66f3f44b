"""torch's `scaled_dot_product_attention`: a function of its signature, and a switch that makes torch's calls ours.

Layouts here are torch's: ``[batch, heads, seqlen, head_dim]``. What the switch takes over returns shapes, strides,
padding and Philox states of torch's own kernels, so that a backward pass of one may follow a forward pass of the other.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, Final, TypeVar

import torch
from torch._C._functorch import TransformType

from ..base.errors import UnsupportedError, shown
from ..base.forks import renew_in_child
from ..base.log import LOGGER
from ..front.call import CallOptions
from ..front.problem import Causal
from ..front.validation import refuse_scale
from .eager import GROUPED_HEADS_FIRST, HEADS_FIRST, again, attend, new_tuple
from .efficient import efficient_attention_backward, efficient_attention_forward
from .replaced import NotTakenError, PassedOnError, checked, counts, replace_kernels, why_not
from .scaled_efficient import efficient_backward, efficient_forward
from .tensors import is_dtensor

_traced_by_dynamo: Final = torch.compiler.is_dynamo_compiling
_deterministic: Final = torch._C._get_deterministic_algorithms
_transformed: Final = torch._C._functorch.maybe_current_level
_NO_WINDOW: Final = (None, None)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by these kernels, differentiable also in a float mask.

    Parameters
    ----------
    query : ``[..., H, Mq, K]``
    key, value : ``[..., Hkv, Mk, K]``, ``[..., Hkv, Mk, Kv]``
        Of rank 2 or more. Leading dims broadcast.
    attn_mask : broadcasts to ``[..., H, Mq, Mk]``, optional
        Boolean (True = keep), read as it is, or floating (dtype of query or float32), added to the scores. Neither is
        expanded, and the gradient has the mask's own shape. Also a `torch.nn.attention.bias.CausalBias`.
    is_causal
        From the top left, as in torch: ``j <= i``. May be combined with ``attn_mask``.
    enable_gqa
        Hkv may be any divisor of H; otherwise it is H or 1.

    Returns
    -------
    ``[..., H, Mq, Kv]``
        A view of memory in the order ``[..., Mq, H, Kv]``, as torch's own. Rows with no valid key are 0.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `nvrtc_attn.torch.attention`.
    """
    causal: Causal = "top_left" if is_causal else False
    layout = GROUPED_HEADS_FIRST if enable_gqa else HEADS_FIRST
    if attn_mask is None and not _traced_by_dynamo():
        options: CallOptions = new_tuple(CallOptions, (
            causal, _NO_WINDOW, scale, 0.0, dropout_p, None, None, False, _deterministic(), False, False, None, False,
        ))  # fmt: skip
        is_plain = (scale is None or scale.__class__ is float) and dropout_p.__class__ is float
        found: torch.Tensor | None = again(query, key, value, options, layout, is_plain)
        if found is not None:
            return found
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {shown(x)} of type {type(x).__name__}. A torch tensor is needed.")
    rank = query.dim()
    if rank < 2 or key.dim() != rank or value.dim() != rank:
        raise ValueError(
            f"query, key, value: ranks {rank}, {key.dim()}, {value.dim()}. They must be equal, at least 2: "
            f"[..., heads, seqlen, head_dim]."
        )
    if (fixed := _causal_variant(attn_mask, query, key, is_causal)) is not None:
        causal, attn_mask = fixed, None
    lead = query.shape[:-3]
    if rank != 4 or key.shape[0] != lead[0] or value.shape[0] != lead[0]:
        lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        query, key, value = (_rank_4(x, lead) for x in (query, key, value))
    heads, heads_kv = query.shape[1], max(key.shape[1], value.shape[1])
    if 1 in (key.shape[1], value.shape[1]) and heads_kv != 1:
        key, value = (x.expand(-1, heads_kv, -1, -1) for x in (key, value))
    if heads != heads_kv and not enable_gqa:
        if heads == 1:
            query = query.expand(-1, heads_kv, -1, -1)
        elif heads_kv != 1:
            raise ValueError(
                f"key, value: {heads_kv} heads, query has {heads}. They are equal, or 1. Pass enable_gqa=True for "
                f"groups of query heads that share a key head."
            )
    bias = mask = None
    if attn_mask is not None:
        if not isinstance(attn_mask, torch.Tensor):
            raise TypeError(f"attn_mask: got {shown(attn_mask)} of type {type(attn_mask).__name__}, no torch tensor.")
        given, attn_mask = attn_mask, _mask_of_rank_4(attn_mask, lead)
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        else:
            bias = attn_mask
    call: tuple[Any, ...] = (
        query, key, value, bias, mask, causal, _NO_WINDOW, scale, 0.0, dropout_p, None, None, None, None, None, None,
        False, None, None, {}, layout, attn_mask is None,
    )  # fmt: skip
    out: torch.Tensor
    if _traced_by_dynamo():
        out = attend(*call)
    else:
        try:
            out = attend(*call)
        except (TypeError, ValueError):
            refuse_scale(scale)
            check_sizes(query, key, value)
            if attn_mask is not None:
                _check_mask(given, attn_mask, query, key)
            raise
    return out if rank == 4 else out.reshape(*lead, *out.shape[4 - min(rank, 3) :])


def check_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse sizes by the dims of torch's layout; what a later check refuses has those of another."""
    heads, heads_kv, heads_v = query.shape[1], key.shape[1], value.shape[1]
    length, length_v = key.shape[2], value.shape[2]
    layout = "of [..., heads, seqlen, head_dim]"
    if heads_kv != heads_v:
        raise ValueError(
            f"key, value: head counts {heads_kv} and {heads_v} differ (dim -3 {layout}). They must be equal, or one of "
            f"them 1."
        )
    if heads_kv and heads % heads_kv:
        raise ValueError(
            f"key, value: {heads_kv} heads do not divide the {heads} heads of query (dim -3 {layout}). Each key head "
            f"serves as many query heads."
        )
    if length != length_v:
        raise ValueError(
            f"key, value: lengths {length} and {length_v} differ (dim -2 {layout}). Every key has one value."
        )


def _check_mask(given: torch.Tensor, full: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    """Refuse a mask by the name and the shape of the caller's; ``full`` is the same of rank 4."""
    if full.dtype != torch.bool and not full.is_floating_point():
        raise TypeError(
            f"attn_mask: dtype {given.dtype}. It is bool, True keeps the key, or floating, added to the scores. "
            f"Of ones and zeros: attn_mask.bool()."
        )
    is_cast = torch.is_autocast_enabled(query.device.type)
    if full.is_floating_point() and full.dtype not in (query.dtype, torch.float32) and not is_cast:
        raise ValueError(
            f"attn_mask: dtype {given.dtype}. It is bool, float32 or that of query, {query.dtype}. Convert it."
        )
    wanted = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if all(size == 1 or size == limit for size, limit in zip(full.shape, wanted, strict=True)):
        return
    raise ValueError(
        f"attn_mask: shape {tuple(given.shape)} does not broadcast to [batch, heads, seqlen_q, seqlen_k] = "
        f"{list(wanted)}. Of padding, [batch, seqlen_k], pass attn_mask[:, None, None]; of [batch, seqlen_q, seqlen_k] "
        f"attn_mask[:, None]."
    )


def _causal_variant(attn_mask: Any, query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> Causal | None:
    """Where the diagonal of a `CausalBias` ends, beside ``is_causal``; None of other masks."""
    bias = sys.modules.get("torch.nn.attention.bias")
    if bias is None or not isinstance(attn_mask, bias.CausalBias):
        return None
    lengths = query.shape[-2], key.shape[-2]
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != lengths:
        raise ValueError(
            f"attn_mask: a causal bias for {attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys, but query "
            f"and key have {lengths[0]} and {lengths[1]} (dim -2). Make one for them."
        )
    if attn_mask.variant != bias.CausalVariant.LOWER_RIGHT:
        return "top_left"
    # Where both hold, ``is_causal`` hides all that the bias does, unless there are fewer keys than queries.
    return "top_left" if is_causal and lengths[1] >= lengths[0] else "bottom_right"


def _rank_4(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """``[batch, heads, seqlen, head_dim]`` of any rank, leading dims broadcast to ``lead``."""
    while x.dim() < 4:
        x = x[None]
    if len(lead) == 0:
        return x
    x = x.expand(*lead, *x.shape[-3:])
    return x if len(lead) == 1 else x.flatten(0, -4)


def _mask_of_rank_4(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """``[1|B, 1|H, 1|Mq, 1|Mk]``, a view wherever the batch dims allow it."""
    while x.dim() < 4:
        x = x[None]
    if x.dim() == 4 and len(lead) < 2:
        return x
    if all(n == 1 for n in x.shape[:-3]):
        return x.flatten(0, -4)
    return x.expand(*lead, *x.shape[-3:]).flatten(0, -4)


# ----------------------------------------------------------------------------------------------------------- the switch

_lock = threading.RLock()
renew_in_child(globals(), "_lock", threading.RLock)
_levels: Counter[str] = Counter()
_libraries: dict[str, torch.library.Library] = {}
_EFFICIENT: Final = "efficient"
_ALL: Final = "all"
_CACHE_TAG: Final = "+nvrtc_attn.sdpa"
_SUSPENDED: Final = (isgeneratorfunction, iscoroutinefunction, isasyncgenfunction)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def report() -> dict[str, Any]:
    """What the switch is set to, and how many calls it took and left to torch, by operator and reason."""
    with _lock:
        return {"enabled": sorted(_libraries), **counts()}


class enable_sdpa:  # noqa: N801 - it is called like a function, as torch.no_grad is
    """Make torch's own calls of attention run on these kernels, on CUDA, until `disable` or the end of ``with``.

    As a decorator, ``@enable_sdpa()``, while the function runs.

    Takes over the operators of memory-efficient attention, forward and backward, that
    `torch.nn.functional.scaled_dot_product_attention` chooses for masks, biases, float32 and head dims that flash
    attention refuses, and those of jagged nested tensors. What it cannot serve goes to torch's kernel, is logged once
    a reason, and counted in `report` and in ``nvrtc_attn.collect_env.collect()["sdpa"]``.

    Parameters
    ----------
    all
        Also take every call of ``scaled_dot_product_attention`` itself, whatever torch would choose for it: without a
        mask, with grouped heads, with head dims of any size. Masks and biases are then read unexpanded. Programs that
        torch.compile made before keep the kernels they were made with.

    Raises
    ------
    UnsupportedError
        torch is older than 2.9.1, which cannot give back the kernels that are replaced.

    Notes
    -----
    A switch of the process, not of the thread; calls nest. Under efficient attention as torch has it, boolean masks
    come as floating ones and biases expanded, with a gradient of full size: ``all=True`` or
    `nvrtc_attn.torch.scaled_dot_product_attention` avoid both.
    """

    def __init__(self, *given: object, all: bool = False, _keys: tuple[str, ...] = ("CUDA",)) -> None:  # noqa: A002
        if given:
            what = ", ".join(map(repr, given))
            raise TypeError(
                f"enable_sdpa() takes no argument without a name: {what} was given. It switches on; to switch off, "
                "keep what it returns and call its disable(), or use it in a `with` statement. all=True takes "
                "every call of scaled_dot_product_attention."
            )
        if not hasattr(torch.library, "get_kernel"):
            raise UnsupportedError(
                f"enable_sdpa: torch {torch.__version__} cannot give back a kernel that is replaced.",
                ["torch.library.get_kernel is missing, which torch has since 2.9.1"],
            )
        self._mine = [_EFFICIENT, _ALL] if all else [_EFFICIENT]
        self._keys = _keys
        self._again = partial(type(self), all=all, _keys=_keys)
        self._times_on = 0
        self._blocks: list[bool] = []
        """Of each ``with`` that has begun, whether its end switches off: not after `disable`."""
        self._switch_on()
        LOGGER.info("scaled_dot_product_attention of torch: %s calls run on nvrtc_attn", "all" if all else "some")

    def _switch_on(self) -> None:
        with _lock:
            self._times_on += 1
            for level in self._mine:
                _levels[level] += 1
                if _levels[level] == 1:
                    _libraries[level] = _install(level, self._keys)

    def _switch_off(self) -> None:
        with _lock:
            self._times_on -= 1
            for level in self._mine:
                _levels[level] -= 1
                if _levels[level] == 0:
                    _uninstall(level)

    def disable(self) -> None:
        """Give torch its kernels back, unless another switch is still on. A ``with`` of this one switches on again."""
        with _lock:
            while self._times_on:
                self._switch_off()
            self._blocks = [False] * len(self._blocks)

    def __call__(self, function: _Function) -> _Function:
        """Decorate ``function``: the switch is off again at once, and on while the function runs."""
        if not callable(function) or any(kind(function) for kind in _SUSPENDED):
            raise TypeError(
                f"enable_sdpa(): as a decorator it got {shown(function)} of type {type(function).__name__}. It takes a "
                f"function that is done when it returns; in generators and coroutines write a `with` statement."
            )
        self.disable()

        @wraps(function)
        def inner(*arguments: Any, **options: Any) -> Any:
            with self._again():
                return function(*arguments, **options)

        return inner  # type: ignore[return-value]

    def __enter__(self) -> enable_sdpa:
        with _lock:
            if self._times_on == sum(self._blocks):  # not the first one, which has what `__init__` switched on
                self._switch_on()
            self._blocks.append(True)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            if self._blocks.pop():
                self._switch_off()


def _install(level: str, keys: tuple[str, ...]) -> torch.library.Library:
    functions: dict[tuple[str, str], Callable[..., Any]] = {}
    for key in keys:
        if level == _EFFICIENT:
            functions |= {(name, key): function for name, function in _OPERATORS.items()}
        else:
            name = "scaled_dot_product_attention"
            functions |= {(name, key): _composite_below, (name, f"Autograd{key}"): _composite}
            functions[name, "FuncTorchDynamicLayerFrontMode"] = partial(_composite_transformed, keys)
    library = replace_kernels(functions)
    _forget_kernels(level)
    if level == _ALL:
        _tag_caches(lambda tag: tag + _CACHE_TAG)
    return library


def _uninstall(level: str) -> None:
    _libraries.pop(level)._destroy()
    _forget_kernels(level)
    if level == _ALL:
        _tag_caches(lambda tag: tag.replace(_CACHE_TAG, ""))


def _forget_kernels(level: str) -> None:
    """torch.compile traces with Python's dispatcher, which remembers for each operator where its keys led.

    It is not told of kernels that come or go: a call traced before the switch would be traced as then for ever.
    """
    for name in _OPERATORS if level == _EFFICIENT else ("scaled_dot_product_attention",):
        getattr(torch.ops.aten, name).default._dispatch_cache.clear()


def _tag_caches(change: Callable[[str], str]) -> None:
    """torch.compile caches programs by their calls, which are the same with and without the switch."""
    config: Any = getattr(torch.compiler, "config", None)
    if hasattr(config, "cache_key_tag"):
        config.cache_key_tag = change(config.cache_key_tag)


def _composite(query: Any, key: Any, value: Any, *more: Any, **options: Any) -> torch.Tensor:
    if _transformed() is not None:  # left to torch by `_composite_transformed`
        raise PassedOnError
    return _served(query, key, value, *more, **options)


def _composite_transformed(keys: tuple[str, ...], *arguments: Any, **options: Any) -> torch.Tensor:
    """Above the transformations of torch.func, whatever the device: on the way down torch allows no function of ours.

    ``keys`` are those of the devices that the switch is for.
    """
    if arguments[0].device.type.upper() not in keys:
        raise PassedOnError
    kinds = {layer.key() for layer in torch._C._functorch.get_interpreter_stack() or ()}
    others = kinds - {TransformType.Grad, TransformType.Vmap}
    if others:
        raise NotTakenError(f"{' and '.join(sorted(x.name for x in others))} of torch.func")
    return _served(*arguments, **options)


def _served(query: Any, key: Any, value: Any, *more: Any, **options: Any) -> torch.Tensor:
    reason = why_not(query, key, value, options.get("attn_mask", more[0] if more else None))
    if reason is None and any(x.__class__ is not torch.Tensor and _shards_tokens(x) for x in (query, key, value)):
        reason = "a DTensor whose tokens are sharded, as of torch's context_parallel, whose steps come one by one"
    if reason is not None:
        raise NotTakenError(reason)
    return scaled_dot_product_attention(query, key, value, *more, **options)


def _shards_tokens(x: Any) -> bool:
    """Whether ranks have tokens of a DTensor.

    Of torch's `context_parallel` those are in an order of its own, in which a mask means nothing but in its own ring.
    """
    return is_dtensor(x) and any(place.is_shard(dim) for place in x.placements for dim in (x.ndim - 2, -2))


def _composite_below(*arguments: Any, **options: Any) -> torch.Tensor:
    """Below autograd, in inference mode for one: whoever called records gradients, or nobody does."""
    with torch.no_grad():
        return _composite(*arguments, **options)


# Jagged nested tensors call the second pair.
_OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "_scaled_dot_product_efficient_attention": checked(efficient_forward, 0, 3),
    "_scaled_dot_product_efficient_attention_backward": checked(efficient_backward, 1, 4),
    "_efficient_attention_forward": efficient_attention_forward,
    "_efficient_attention_backward": efficient_attention_backward,
}
