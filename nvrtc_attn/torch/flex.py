"""`flex_attention` and `create_block_mask` with the signatures of torch.nn.attention.flex_attention.

Functions that were written for it run unchanged: what they do to proxies is recorded, and tensors that they captured
are operands, with gradients. Nothing of the size of the scores is made, with ``torch.compile`` or without.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any, Final

import torch

from .. import api
from ..base.errors import shown
from ..front.call import CallOptions
from ..modifiers.modifier import Modifier
from ..modifiers.trace import literals, traced
from .flex_compiled import attention as attention_by_operator
from .flex_compiled import backward
from .flex_known import again, know
from .ops import cast_for_autocast, once_only

_ScoreMod = Callable[..., torch.Tensor]
_in_dynamo = torch.compiler.is_dynamo_compiling


@dataclass(frozen=True, slots=True)
class BlockMask:
    """A ``mask_mod`` and the sizes that it is for: no list of blocks, no memory."""

    mask_mod: _ScoreMod
    B: int | None
    H: int | None
    seq_lengths: tuple[int, int]
    BLOCK_SIZE: tuple[int, int] = (128, 128)
    literals: str = ""
    """Numbers in the text of ``mask_mod`` and of what it calls: compiled programs put them into the kernel's, too."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.B or 1, self.H or 1, *self.seq_lengths

    def to(self, device: Any) -> BlockMask:
        """The same: it has no tensor of its own."""
        return self


def create_block_mask(
    mask_mod: _ScoreMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
) -> BlockMask:
    """What `flex_attention` takes as ``block_mask``.

    Takes no memory and no time on the GPU: ``mask_mod`` is compiled into the kernel. ``device``, ``BLOCK_SIZE`` and
    ``_compile`` are accepted for the sake of the signature.

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
    return BlockMask(mask_mod, B, H, (Q_LEN, KV_LEN), (sizes[0], sizes[1]), numbers)


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

    Returns
    -------
    out : ``[B, Hq, L, Ev]``, or (out, lse)

    Raises
    ------
    TraceError
        The message names the operation that is not possible.
    ValueError
        A mask for other lengths, heads or another device, lists of blocks that name one twice or one that does not
        exist, or head counts that differ without ``enable_gqa``.
    """
    ours = not _in_dynamo() and (block_mask is None or block_mask.__class__ is BlockMask)
    if ours:
        found = again(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)
        if found is not None:
            return found
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, needed is [batch, heads, length, head_dim].")
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
        numbers = getattr(block_mask, "literals", "")
        out, lse = attention_by_operator(q, k, v, score_mod, mask_mod, numbers, scale)
    else:
        if ours and query.is_cuda:  # for the next call, where an earlier one has launches of this kind
            know(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)
        out, lse = _eager(q, k, v, score_mod, mask_mod, scale)
    out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eager(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any, scale: float | None) -> Any:
    """(out, lse), of q, k and v in ``[B, L, H, E]``. Dynamo, where it gave a program up, must not follow the tracer."""
    modifier = None if score_mod is None and mask_mod is None else traced(score_mod, mask_mod)
    options = CallOptions(softmax_scale=scale, return_lse=True)
    captures = () if modifier is None else tuple(torch.as_tensor(x, device=q.device) for x in modifier.captures)
    return _FlexAttention.apply(modifier, options, q, k, v, *captures)


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


class _FlexAttention(torch.autograd.Function):
    """Inputs: the modifier and the options, q, k, v in ``[B, L, H, E]``, the captured tensors."""

    @staticmethod
    def forward(
        ctx: Any, modifier: Modifier | None, options: CallOptions, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        detached = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in tensors)
        q, k, v = detached[:3]
        inner = None if modifier is None else modifier.with_captures(detached[3:])
        out, lse = api.attention(q, k, v, score_mod=inner, softmax_scale=options.softmax_scale, return_lse=True)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.modifier, ctx.options = modifier, options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor | None) -> Any:
        saved = ctx.saved_tensors
        return once_only(lambda: _FlexAttention._gradients(ctx, saved, dout, dlse), (*saved[:-2], dout, dlse))

    @staticmethod
    def _gradients(ctx: Any, saved: tuple[Any, ...], dout: torch.Tensor, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = saved
        q, k, v = (x.detach() for x in tensors[:3])
        captures = tuple(x.detach() for x in tensors[3:])
        modifier = None if ctx.modifier is None else ctx.modifier.with_captures(captures)
        gradients, sums = backward(
            dout, dlse, out, lse, q, k, v, modifier, ctx.needs_input_grad[5:], ctx.options.softmax_scale,
            torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        of_captures = [None if x is None else x.to(y.dtype) for x, y in zip(sums, captures, strict=True)]
        return None, None, *gradients, *of_captures
