"""`flex_attention` and `create_block_mask` with the signatures of torch.nn.attention.flex_attention.

Functions that were written for it run unchanged: what they do to proxies is recorded, and tensors that they captured
are operands, with gradients. Nothing of the size of the scores is made, with ``torch.compile`` or without.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, Final

import torch

from ..base.errors import UnsupportedError, shown
from ..front.call import CallOptions
from ..front.operands import OPTIONAL_INPUTS
from ..front.philox import NO_RNG
from ..front.validation import refuse_scale
from ..modifiers.modifier import Modifier
from ..modifiers.trace import literals, trace, traced
from .autocast import cast_for_autocast
from .derivatives import refuse_transformed
from .flex_compiled import traced as written
from .modified import attention, modified_forward, needs_operator, plain_arguments
from .modified_known import again, know
from .ops import attention_forward
from .sdpa import check_sizes
from .sharding import register_sharding
from .tensors import is_dtensor

_ScoreMod = Callable[..., torch.Tensor]
_in_dynamo = torch.compiler.is_dynamo_compiling
_transformed: Final = torch._C._functorch.maybe_current_level
_OF_TORCH: Final = frozenset((
    "as_tuple", "full_kv_indices", "full_kv_num_blocks", "full_q_indices", "full_q_num_blocks", "kv_indices",
    "kv_num_blocks", "q_indices", "q_num_blocks", "sparsity", "to_dense", "to_string",
))  # fmt: skip
"""What `BlockMask` takes from torch's."""


@dataclass(frozen=True, slots=True)
class BlockMask:
    """A ``mask_mod`` and the sizes that it is for: no list of blocks, no memory.

    What torch's has beside these (``mask[...]``, ``sparsity()``, ``to_dense()``, ``to_string()``, ``as_tuple()``,
    ``kv_num_blocks``, ``kv_indices`` and the other lists) is that of `to_torch`, made again at each use.
    """

    mask_mod: _ScoreMod
    B: int | None
    H: int | None
    seq_lengths: tuple[int, int]
    BLOCK_SIZE: tuple[int, int] = (128, 128)
    literals: str = ""
    """Numbers in the text of ``mask_mod`` and of what it calls: compiled programs put them into the kernel's, too."""
    device: torch.device | None = None
    """Where `to_torch` makes its lists; None where torch would."""
    separate_full_blocks: bool = True
    """For `to_torch`: whether blocks that are kept whole have lists of their own."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.B or 1, self.H or 1, *self.seq_lengths

    def numel(self) -> int:
        return math.prod(self.shape)

    def to(self, device: Any) -> BlockMask:
        """The same, with another ``device``: it has no tensor of its own."""
        return replace(self, device=torch.device(device))

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The same ``mask_mod`` for other lengths, by the name that torch's has."""
        return replace(self, seq_lengths=(new_q_len, new_kv_len))

    def to_torch(self) -> Any:
        """A BlockMask of torch's for the same ``mask_mod``, which `flex_attention` takes, too.

        Calls ``mask_mod`` with tensors, and takes memory of the size of the scores: some bytes for each of the
        ``B * H * Q_LEN * KV_LEN`` pairs.
        """
        from torch.nn.attention.flex_attention import create_block_mask as create

        more = {} if self.separate_full_blocks else {"separate_full_blocks": False}  # not of every torch
        return create(
            self.mask_mod, self.B, self.H, *self.seq_lengths, device=self.device, BLOCK_SIZE=self.BLOCK_SIZE, **more
        )

    @staticmethod
    def from_kv_blocks(*args: Any, **options: Any) -> Any:
        """A BlockMask of torch's, as its ``BlockMask.from_kv_blocks`` makes it of lists of blocks."""
        from torch.nn.attention.flex_attention import BlockMask as OfTorch

        return OfTorch.from_kv_blocks(*args, **options)

    def __getitem__(self, index: Any) -> Any:
        return self.to_torch()[index]

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TORCH:
            return getattr(self.to_torch(), name)
        raise AttributeError(
            f"BlockMask has no {name!r}: it is a mask_mod and lengths. torch's own BlockMask, which flex_attention "
            f"takes, too, is to_torch(), or what torch.nn.attention.flex_attention.create_block_mask returns."
        )


def create_block_mask(
    mask_mod: _ScoreMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """What `flex_attention` takes as ``block_mask``.

    Takes no memory and no time on the GPU: ``mask_mod`` is compiled into the kernel. The other arguments of torch's
    change no result of `flex_attention`. ``device``, ``BLOCK_SIZE`` and ``separate_full_blocks`` are for the lists of
    `BlockMask.to_torch`; ``_compile``, ``compute_dq_write_order`` and ``dq_kv_order`` steer torch's own kernels, and
    are ignored.

    Parameters
    ----------
    mask_mod
        ``mask_mod(b, h, q_idx, kv_idx)`` returns whether the key is kept.
    B, H
        Batch entries and heads that it tells apart; None where it does not.
    Q_LEN, KV_LEN
        Lengths that it is for.

    Raises
    ------
    TraceError
        The message names the operation that is not possible.
    """
    numbers = ""
    if not _in_dynamo():
        traced(None, mask_mod)
        numbers = ",".join({json.dumps(x): None for _, x in literals(mask_mod) if abs(x) < math.inf})
    sizes = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    where = None if device is None else torch.device(device)
    return BlockMask(mask_mod, B, H, (Q_LEN, KV_LEN), (sizes[0], sizes[1]), numbers, where, separate_full_blocks)


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: _ScoreMod | Modifier | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Attention with the user's own ``score_mod`` and ``mask_mod``, as torch.nn.attention.flex_attention's.

    Differentiable in query, key, value and in every floating-point tensor that ``score_mod`` captured, also through the
    log-sum-exp. ``torch.autocast`` casts query, key and value, as it does for `scaled_dot_product_attention`.

    Parameters
    ----------
    query : ``[B, Hq, L, E]``
    key : ``[1|B, Hkv, S, E]``
    value : ``[1|B, Hkv, S, Ev]``
    score_mod
        ``score_mod(score, b, h, q_idx, kv_idx)``, or what `nvrtc_attn.trace` made of functions.
    block_mask
        What `create_block_mask` returned, or a BlockMask of torch's. The latter is read by its blocks as well, as its
        lists need not be those of its ``mask_mod``: the former is faster. Its lists are checked and turned into a
        table once, which waits for the GPU, and again after they were written to; at every call, where inference mode
        made them, whose tensors do not tell of writes.
    scale
        Default ``1 / sqrt(E)``.
    enable_gqa
        Allow Hkv to be a divisor of Hq.
    return_lse
        Return (out, lse), lse float32 ``[B, Hq, L]`` in natural units.
    kernel_options
        Ignored.
    return_aux
        An AuxRequest of torch's: return (out, AuxOutput), in place of ``return_lse``. Of its parts only ``lse`` can be
        asked for.

    Returns
    -------
    out : ``[B, Hq, L, Ev]``, or (out, lse), or (out, AuxOutput)

    Raises
    ------
    TraceError
        The message names the operation that is not possible.
    UnsupportedError
        ``max_scores`` of ``return_aux``, and every transformation of ``torch.func``.
    ValueError
        A mask for other lengths, heads or another device, lists of blocks that name one twice or one that does not
        exist, batches that do not fit, or head counts that differ without ``enable_gqa``.
    """
    if return_aux is not None:
        aux_output = _aux_output(return_aux, return_lse)
        out, lse = flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, True)
        return out, aux_output(lse if return_aux.lse else None)
    function: Any = None
    asked: Any = None  # told by equality, of a mask of ours or none
    if not _in_dynamo() and (
        (scale is None or scale.__class__ is float)
        and (enable_gqa is False or enable_gqa is True)
        and (return_lse is False or return_lse is True)
    ):
        if block_mask is None:
            asked = None, scale, enable_gqa
        elif block_mask.__class__ is BlockMask:
            function = block_mask.mask_mod
            asked = (block_mask.B, block_mask.H, block_mask.seq_lengths), scale, enable_gqa
    if asked is not None:
        found = again(query, key, value, score_mod, function, None, asked, return_lse)
        if found is not None:
            return found
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {shown(x)} of type {type(x).__name__}. A torch tensor is needed.")
        if x.dim() != 4:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, needed is [batch, heads, length, head_dim].")
        if x.shape[0] not in (1, query.shape[0]):
            raise ValueError(f"{name}: batch {x.shape[0]}, needed is that of query, {query.shape[0]}, or 1.")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query, key: {query.shape[1]} and {key.shape[1]} heads. Pass enable_gqa=True for heads that share keys."
        )
    query, key, value, _ = cast_for_autocast(query, key, value, None)
    batch = query.shape[0]
    q, k, v = (x.expand(batch, -1, -1, -1).transpose(1, 2) for x in (query, key, value))
    if block_mask is not None and isinstance(score_mod, Modifier):
        raise ValueError("block_mask: given with a traced modifier. Trace score_mod and mask_mod together.")
    mask_mod = None if block_mask is None else _mask_mod_of(block_mask, query, key)
    if _in_dynamo():
        text, tensors, *numbers = written(score_mod, mask_mod, q.device, getattr(block_mask, "literals", ""))
        out, lse = _by_operator(q, k, v, text, tensors, numbers, scale)
    else:
        if _transformed() is not None:
            refuse_transformed()
        if asked is not None and query.is_cuda:  # for the next call, where an earlier one has launches of this kind
            options = CallOptions(softmax_scale=scale)
            know(query, key, value, score_mod, function, None, asked, return_lse, options, heads_first=True)
        out, lse = _eager(q, k, v, score_mod, mask_mod, scale)
    out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _aux_output(return_aux: Any, return_lse: bool) -> Any:
    """The class of what ``return_aux`` asks for: torch's AuxOutput."""
    from torch.nn.attention.flex_attention import AuxOutput

    if return_lse:
        raise ValueError("return_lse, return_aux: both are given. Pass return_aux=AuxRequest(lse=True) alone.")
    if return_aux.max_scores:
        raise UnsupportedError(
            "return_aux: max_scores, the largest score of each row, is not computed. Pass AuxRequest(lse=True); the "
            "largest score of each head is return_max_logit of nvrtc_attn.attention."
        )
    return AuxOutput


def _by_operator(q: Any, k: Any, v: Any, text: str, tensors: list[Any], numbers: Any, scale: float | None) -> Any:
    """(out, lse) by an operator; ``text``, ``tensors`` and ``numbers`` are those of `flex_compiled.traced`."""
    arguments = plain_arguments(q, k, v, scale, torch.are_deterministic_algorithms_enabled())
    if not text:
        out, lse, _ = attention_forward(*arguments)
    else:
        out, lse, _ = modified_forward(*arguments, tensors, text, *numbers)
    return out, lse


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eager(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any, scale: float | None) -> Any:
    """(out, lse), of q, k and v in ``[B, L, H, E]``. Dynamo, where it gave a program up, must not follow the tracer."""
    has_functions = score_mod is not None or mask_mod is not None
    seen = needs_operator((q, k, v))
    modifier = traced(score_mod, mask_mod) if has_functions and not seen else None
    if seen or (modifier is not None and needs_operator(modifier.captures)):
        if is_dtensor(q):
            register_sharding()
        text, tensors, *numbers = written(trace(score_mod, mask_mod) if has_functions else None, None, q.device)
        return _by_operator(q, k, v, text, tensors, numbers, scale)
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = CallOptions(softmax_scale=scale, return_lse=True, deterministic=deterministic)
    try:
        return attention((q, k, v, *(None,) * len(OPTIONAL_INPUTS)), modifier, options, NO_RNG)
    except (TypeError, ValueError):
        refuse_scale(scale)
        check_sizes(*[x.transpose(1, 2) for x in (q, k, v)])
        raise


def _mask_mod_of(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> _ScoreMod:
    if not hasattr(block_mask, "seq_lengths"):
        raise TypeError(
            f"block_mask: got {shown(block_mask)} of type {type(block_mask).__name__}. It is what create_block_mask "
            f"makes of a mask_mod: create_block_mask(mask_mod, None, None, {query.shape[2]}, {key.shape[2]})."
        )
    lengths = tuple(block_mask.seq_lengths)
    wanted = (query.shape[2], key.shape[2])
    if lengths != wanted:
        raise ValueError(
            f"block_mask: it is for lengths {lengths}, but query and key have {wanted}. Make one for them."
        )
    for name, size, whole in zip("BH", block_mask.shape, query.shape, strict=False):
        if size not in (1, whole):
            raise ValueError(f"block_mask: its {name} is {size}, but query has {whole}.")
    if isinstance(block_mask, BlockMask):
        return block_mask.mask_mod
    if block_mask.kv_indices.device != query.device:
        raise ValueError(
            f"block_mask: its lists are on {block_mask.kv_indices.device}, but query is on {query.device}. Move it "
            f"there: block_mask.to(query.device)."
        )
    return _of_blocks(block_mask)


_LISTS: Final = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
# The lists, which stay alive so that others are not taken for them, and what was read of them.
_Tables = tuple[list[Any], tuple[Any, ...], torch.Tensor, torch.Tensor | None]
_tables: weakref.WeakKeyDictionary[Any, _Tables] = weakref.WeakKeyDictionary()


def _tables_of(block_mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Which blocks the lists name, partial and full: checked, and made once for what the lists hold now."""
    lists = [getattr(block_mask, name) for name in _LISTS]
    if _in_dynamo():  # part of the program: not checked, and made at each run
        columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
        tables = [
            None if count is None else _table(count, index, columns)[..., :columns] != 0
            for count, index in zip(lists[::2], lists[1::2], strict=True)
        ]
        assert tables[0] is not None
        return tables[0], tables[1]
    tells_of_writes = not any(x is not None and x.is_inference() for x in lists)
    versions = [None if x is None else x._version for x in lists] if tells_of_writes else []
    facts = tuple(block_mask.seq_lengths), tuple(block_mask.BLOCK_SIZE), versions
    known = _tables.get(block_mask) if tells_of_writes else None
    if known is not None and known[1] == facts and all(map(is_, known[0], lists)):
        return known[2], known[3]
    counts, indices, full_counts, full_indices = lists
    rows, columns = (-(-n // size) for n, size in zip(block_mask.seq_lengths, block_mask.BLOCK_SIZE, strict=True))
    found = []
    for name, count, index in (("kv", counts, indices), ("full_kv", full_counts, full_indices)):
        if count is None:
            continue
        if tuple(index.shape[:-1]) != tuple(count.shape) or count.shape[-1] != rows or index.shape[-1] > columns:
            raise ValueError(
                f"block_mask: {name}_num_blocks has shape {tuple(count.shape)} and {name}_indices "
                f"{tuple(index.shape)}, needed for lengths {tuple(block_mask.seq_lengths)} in blocks of "
                f"{tuple(block_mask.BLOCK_SIZE)} are [B, H, {rows}] and [B, H, {rows}, at most {columns}]."
            )
        if count.shape != counts.shape:
            raise ValueError(
                f"block_mask: full_kv_num_blocks has shape {tuple(count.shape)}, needed is that of kv_num_blocks, "
                f"{tuple(counts.shape)}."
            )
        found.append(_table(count, index, columns))
    times = found[0] + found[1] if len(found) == 2 else found[0]
    named = counts.sum() + (0 if full_counts is None else full_counts.sum())
    wrong = torch.stack([(times[..., :columns] > 1).any(), times[..., :columns].sum() != named])
    if not (wrong.is_cuda and torch.cuda.is_current_stream_capturing()):
        twice, beyond = wrong.tolist()
        if twice or beyond:
            raise ValueError(
                "block_mask: its lists name a block "
                + ("twice, as partial and as full or in one list" if twice else f"beyond the {columns} of a row")
                + ". Each block of a row is listed once at most, and counts are those of the lists."
            )
    partial, *rest = (x[..., :columns] != 0 for x in found)
    full = rest[0] if rest else None
    if tells_of_writes:
        _tables[block_mask] = (lists, facts, partial, full)
    return partial, full


def _of_blocks(block_mask: Any) -> _ScoreMod:
    """The mask that a BlockMask of torch's is: whole blocks, and blocks that its function decides about."""
    partial, full = _tables_of(block_mask)
    rows, columns = block_mask.BLOCK_SIZE
    one_batch, one_head = partial.shape[0] == 1, partial.shape[1] == 1
    inner = block_mask.mask_mod

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        at = (0 if one_batch else b, 0 if one_head else h, q // rows, k // columns)
        kept = partial[at] & inner(b, h, q, k)
        return kept if full is None else kept | full[at]

    return mask_mod


def _table(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """How often a list names each block: ``[B, H, row blocks, columns + 1]``, the last of indices beyond the others."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    at = torch.where(listed & (indices >= 0) & (indices < columns), indices, columns).long()
    table = torch.zeros((*counts.shape, columns + 1), dtype=torch.int32, device=indices.device)
    table.scatter_add_(-1, at, torch.ones_like(at, dtype=torch.int32))
    return table
