"""Hugging Face transformers: ``attn_implementation="nvrtc_attn"``.

`register` adds an attention function and a mask function under that name. A model then passes its query, key and value
as they are (key and value heads not repeated), its relative position bias, softcap and attention sinks, and masks of
causal, window and padding never become ``[B, 1, M, N]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from ..base.hosts import check_version
from ..base.log import log_once
from ..front.problem import Causal
from ..torch import attention
from . import mask_reasons, refuse

NAME: Final = "nvrtc_attn"
_Window = tuple[int | None, int | None]
# Types of models that have attention of their own beside that of the interface and add its mask to the scores (BigBird
# Pegasus, GIT, Informer), or have decoders whose modules say that they are not causal (all but GIT). transformers' sdpa
# is not for them: its masks are boolean, and None where the module's word is enough.
EAGER_MASKS: Final = frozenset({"bigbird_pegasus", "git", "informer", "nllb-moe", "pegasus_x"})


def register(name: str = NAME) -> None:
    """Make ``name`` an attention implementation of every model that uses transformers' attention interface.

    Then ``AutoModel.from_pretrained(..., attn_implementation="nvrtc_attn")`` or
    ``model.set_attn_implementation("nvrtc_attn")``. Calling it again changes nothing.

    Raises
    ------
    ValueError
        ``name`` contains "flash", "sdpa", "eager" or "|", by which transformers chooses masks of other forms, its own
        function, or parts of a name.
    """
    if any(word in name for word in ("flash", "sdpa", "eager", "|")):
        raise ValueError(
            f"name: got {name!r}. transformers gives names with flash, sdpa, eager or | a meaning of theirs."
        )
    check_version("transformers", "5.23.0", "5.24.0")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


class Band(NamedTuple):
    """A mask of padding, causal and window, as `nvrtc_attn.torch.attention` takes it."""

    keys: torch.Tensor | None
    """``[B, 1, 1, N]``, True keeps the key."""
    causal: Causal
    window_size: _Window


class BandMask(torch.Tensor):  # type: ignore[misc, unused-ignore]
    """A boolean ``[B, 1, M, N]`` mask that is held as a `Band`, and fills M x N memory only if something reads it.

    Attention takes ``band``. Torch operations get the dense mask instead, and may keep a view of it to write to:
    from then on ``band`` is None and the dense mask is what counts. The last rows of a mask are one again, as Gemma 4
    takes them: reading them must not make the mask of the layers before dense, whose checkpoints it would change.
    """

    _band: Band
    _whole: BandMask | None
    _build: Callable[[], torch.Tensor]
    _dense: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        device: Any,
        band: Band,
        build: Callable[[], torch.Tensor],
        whole: BandMask | None = None,
    ) -> BandMask:
        mask: BandMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask._band, mask._whole, mask._build, mask._dense = band, whole, build, None
        return mask

    @property
    def band(self) -> Band | None:
        """What attention takes instead of the dense mask; None as soon as that was made, for a view of this, too."""
        if self._dense is not None or (self._whole is not None and self._whole.band is None):
            return None
        return self._band

    def dense(self) -> torch.Tensor:
        """The mask itself."""
        if self._dense is None:
            self._dense = self._build()
        return self._dense

    def last_rows(self, dim: int = 2, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
        """The slice, if it is a band of the same alignment: all of the dim, or its last queries; else None."""
        size = self.shape[dim]
        first, last, _ = slice(start, end).indices(size)
        band = self.band
        if band is None or step != 1 or last != size or not 0 <= first < size:
            return None
        if first and (dim % 4 != 2 or band.causal == "top_left"):
            return None
        shape = (*self.shape[:2], self.shape[2] - first, self.shape[3])
        return BandMask(shape, self.device, band, lambda: self.dense()[:, :, first:], self)

    # These read the memory of a tensor without an operation of torch, and a wrapper has none.
    def tolist(self) -> Any:
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.dense().numpy(force=force)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.dense().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.alias.default, aten.slice.Tensor) and isinstance(args[0], BandMask):
            rows = args[0].last_rows(*args[1:], **(kwargs or {}))
            if rows is not None:
                return rows

        def plain(x: Any) -> Any:
            return x.dense() if isinstance(x, BandMask) else x

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask function of transformers' ``AttentionMaskInterface``, with the arguments of its ``sdpa_mask``.

    Returns
    -------
    None
        Nothing is masked, or causal from the top left by itself and the caller allows that.
    BandMask
        Causal, a sliding window, padding, or several of these.
    torch.Tensor
        What ``sdpa_mask`` gives, for every other pattern and while a graph is traced; what ``eager_mask`` gives,
        added to the scores, for models that compute attention on their own.
    """

    def dense(make: Callable[..., Any], **skips: bool) -> torch.Tensor | None:
        mask: torch.Tensor | None = make(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, use_vmap=use_vmap,
            device=device, **skips, **kwargs,
        )  # fmt: skip
        return mask

    config = kwargs.get("config")
    if getattr(config, "model_type", None) in EAGER_MASKS or _own_attention(config):
        return dense(masking_utils.eager_mask, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "use_bidirectional_attention", None):
        # The former drop queries before the layers that share keys: without a mask, those left would be the first. The
        # latter (PaliGemma) say that they are not causal, where their mask, without token_type_ids, is.
        allow_is_causal_skip = False
    pattern = None if use_vmap or _is_traced() else _pattern(mask_function)
    if pattern is None or not isinstance(q_offset, int):
        return dense(
            masking_utils.sdpa_mask, allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        )  # fmt: skip
    causal, (left, right) = pattern
    top_left = q_offset == kv_offset
    # Query i and key j are at the positions q_offset + i and kv_offset + j.
    bottom_right = q_offset + q_length == kv_offset + kv_length
    if left is not None and left >= max(kv_length, q_length) - 1 and bottom_right:
        left = None
    if right is not None and right >= max(kv_length, q_length) - 1 and bottom_right:
        right = None
    keys = _kept_keys(attention_mask, kv_length, kv_offset)
    if keys is None and left is right is None:
        if not causal and allow_is_bidirectional_skip:
            return None
        plain = (bottom_right and q_length in (1, kv_length)) or (top_left and q_offset == 0)
        if causal and allow_is_causal_skip and plain:
            return None
    aligned: Causal = causal and ("bottom_right" if bottom_right else "top_left")
    if (causal and not (bottom_right or top_left)) or (
        not causal and (left, right) != (None, None) and not bottom_right
    ):
        mask = dense(masking_utils.sdpa_mask, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        assert mask is not None
        return mask

    def build() -> torch.Tensor:
        mask = dense(masking_utils.sdpa_mask, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        assert mask is not None
        return mask.contiguous()

    shape = (batch_size, 1, q_length, kv_length)
    return BandMask(shape, device, Band(keys, aligned, (left, right)), build)


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' ``AttentionInterface``.

    Parameters
    ----------
    query, key, value : ``[B, H, M, D]``, ``[B, Hkv, N, D]``, ``[B, Hkv, N, Dv]``
    attention_mask
        What `attention_mask` returned, or ``[B or 1, H or 1, M or 1, N]``: boolean (True keeps) or added to the scores.
        Without one, causal from the top left if ``is_causal``, by default the module's own, as in transformers' sdpa.
    position_bias : ``[B or 1, H or 1, M or 1, N]``
        Added to the scores, gets its gradient.
    s_aux : ``[H]``
        Attention sinks, one more logit a row, with gradient.
    indices : ``[B, M, K]``
        The only keys that each query sees, of those that the mask lets it see: sparse attention of DeepSeek V3.2.
        Outside of 0 to N - 1 there is none.
    block_indices : ``[B, G, M, K]``
        The same in blocks of ``module.indexer.block_size`` keys, for each of G groups of heads: MiniMax M3.

    Returns
    -------
    ``[B, M, H, Dv]`` and None: the probabilities are never in memory.

    Raises
    ------
    UnsupportedError
        With every reason: paged caches, ``head_mask``, sinks of each query, an ``attention_mask`` of integers.
    """
    reasons = [
        f"{name}: {why}"
        for name, why in (
            ("cache", "the paged cache of continuous batching is not read."),
            ("block_table", "key blocks are not gathered."),
            ("sinks", "a sink has one logit for a head (s_aux), not one for each query."),
            ("head_mask", "heads are not scaled inside of attention; multiply the output instead."),
        )
        if kwargs.get(name) is not None
    ] + mask_reasons("attention_mask", attention_mask)
    refuse("call of transformers", reasons)
    if kwargs.get("output_attentions"):
        log_once(f'attn_implementation="{NAME}" returns no attention weights; "eager" does.')
    rows = query.shape[2]
    mask = bias = None
    causal: Causal = False
    window: _Window = (None, None)
    if attention_mask is None:
        # As in transformers' sdpa function: a model that has no mask and one query decodes.
        if rows > 1 and (_is_causal(module) if is_causal is None else is_causal):
            causal = "top_left"
    elif isinstance(attention_mask, BandMask):
        # Of other lengths than it was made for, a mask is refused below, where its own shape shows.
        if attention_mask.band is None or attention_mask.shape[2:] != (rows, key.shape[2]):
            mask = attention_mask.dense()
        else:
            mask, causal, window = attention_mask.band
    elif attention_mask.dtype == torch.bool:
        mask = attention_mask
    else:
        bias = attention_mask
    for chosen, size in ((indices, 1), (block_indices, 0)):
        if chosen is not None:
            keep = _chosen_keys(chosen, size or int(module.indexer.block_size), query.shape[1], key.shape[2])
            mask = keep if mask is None else keep & mask
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if bias is not None and bias.dtype not in (query.dtype, torch.float32):
        bias = bias.to(query.dtype)
    if query.shape[0] != key.shape[0] and 1 in (query.shape[0], key.shape[0]):
        batch = max(query.shape[0], key.shape[0])  # learned queries come with batch 1
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    if s_aux is not None and s_aux.dtype not in (query.dtype, torch.float32):
        s_aux = s_aux.to(query.dtype)
    out = attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), bias=bias, mask=mask, causal=causal,
        window_size=window, softmax_scale=scaling, softcap=softcap or 0.0, dropout_p=dropout,
        sink=s_aux,
    )  # fmt: skip
    return out, None


def _chosen_keys(indices: torch.Tensor, size: int, heads: int, keys: int) -> torch.Tensor:
    """``[B, 1 or H, M, N]``, True for the keys in the blocks of ``size`` that ``indices`` name."""
    if indices.dim() == 3:
        indices = indices[:, None]
    blocks = -(-keys // size)
    # One block more, for what is no index.
    where = indices.long().masked_fill((indices < 0) | (indices >= blocks), blocks)
    keep = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool, device=indices.device)
    keep = keep.scatter(-1, where, True)[..., :blocks].repeat_interleave(size, -1)[..., :keys]
    return keep if keep.shape[1] == 1 else keep.repeat_interleave(heads // keep.shape[1], 1)


def _is_causal(module: Any) -> bool:
    """Whether a module without a mask is causal, if its model does not say so in the call.

    One that does not say it either is causal for transformers' sdpa. transformers' own without a word are encoders and
    cross attention (ALIGN, CLAP, Splinter, Mllama), which have eager attention alone, or sdpa with a mask at all times.
    """
    said = getattr(module, "is_causal", None)
    return not type(module).__module__.startswith("transformers.models.") if said is None else bool(said)


def _own_attention(config: Any) -> bool:
    """Whether the model of ``config`` does not use transformers' interface: its attention is eager under any name.

    ``from_pretrained`` and ``from_config`` give such a model the name nevertheless, and so its masks.
    """
    model = sys.modules.get(type(config).__module__.replace("configuration_", "modeling_"))
    if config is None or model is None or hasattr(model, "ALL_ATTENTION_FUNCTIONS"):
        return False
    log_once(
        f'attn_implementation="{NAME}": models of {type(config).__name__} compute attention on their own, without it.'
    )
    return True


def _is_traced() -> bool:
    return bool(torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0)


def _pattern(function: Callable[..., Any]) -> tuple[bool, _Window] | None:
    """(causal, window) of a mask function of transformers; None of any other.

    The combinations are closures: told by their qualified names and read from their cells.
    """
    if function is masking_utils.causal_mask_function:
        return True, (None, None)
    if function is masking_utils.bidirectional_mask_function:
        return False, (None, None)
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    match (function.__qualname__, cells):
        case ("and_masks.<locals>.and_mask", [tuple(parts)]):
            found = [_pattern(part) for part in parts]
            if any(part is None for part in found):
                return None
            patterns = [part for part in found if part is not None]
            lefts = [left for _, (left, _) in patterns if left is not None]
            rights = [right for _, (_, right) in patterns if right is not None]
            return any(causal for causal, _ in patterns), (min(lefts, default=None), min(rights, default=None))
        case ("sliding_window_overlay.<locals>.inner_mask", [int(size)]) if size >= 1:
            return False, (size - 1, None)
        case ("sliding_window_bidirectional_overlay.<locals>.inner_mask", [int(size)]) if size >= 0:
            return False, (size, size)
    return None


def _kept_keys(padding: torch.Tensor | None, kv_length: int, kv_offset: int) -> torch.Tensor | None:
    """``[B, 1, 1, N]`` of a padding mask over all positions, or None if it keeps every key."""
    if padding is None:
        return None
    missing = kv_offset + kv_length - padding.shape[-1]
    if missing > 0:
        padding = torch.nn.functional.pad(padding, (0, missing))
    keys = padding[:, None, None, kv_offset : kv_offset + kv_length].bool()
    # One wait for the GPU in a forward pass of the model, as transformers' sdpa has: most batches need no mask.
    if not (keys.is_cuda and torch.cuda.is_current_stream_capturing()) and bool(keys.all()):
        return None
    return keys
