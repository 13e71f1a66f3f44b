"""Which strategy a ContextParallel takes for tensors with so many heads, in how many groups, beside which margin."""

from __future__ import annotations

from typing import Any, Final

import torch.distributed as dist

from ...front.chunks import together
from .strategies import AllGather, Ring, Strategy, Ulysses

_MOST_GROUPS: Final = 4
_KEY_TILE: Final = 128
_MULTIPROCESSORS: Final = 132
_MARGIN: Final = 8
"""With one group of all_gather: 7.03 ms instead of 7.16 at 16k tokens on two H200, 32/8 heads. With two groups of
ulysses it takes 2 % longer."""
_TOKENS_OF_LANES: Final = 1 << 15
"""Tokens a rank: two lanes take 104.4 ms instead of 107.0 at 64k tokens on two H200, 7.41 instead of 7.03 at 16k."""
_KEYS_OF_GROUP: Final = 8 << 16
"""Of all heads, which all_gather fetches at once: 107.3 ms at 64k, 108.2 in three groups. Beyond, memory counts."""
_WAVES: Final = 8
"""Key tiles a multiprocessor that a group of heads keeps: with fewer, causal ones of unequal work leave multiprocessors
idle in the backward pass, and its kernel splits the queries of a key tile instead."""


def make_strategy(cp: Any, heads: int, heads_kv: int, on_gpu: bool, packed: bool) -> Strategy:
    """Who computes what for a `ContextParallel`, of tensors with so many heads."""
    name, groups, size, rank = cp.strategy, cp._groups, cp.size, cp.rank
    whole_q, whole_k = [together(cp.chunks_q)], [together(cp.chunks_k)]
    everything = AllGather(None, 0, whole_q, whole_k, joint=size > 1)
    if isinstance(name, tuple):
        outer, inner = groups
        width = dist.get_world_size(inner)
        why_not = Ulysses.why_not(heads, heads_kv, width)
        if why_not:
            raise ValueError(f"strategy: ulysses over {width} ranks, but {why_not}.")
        rows = [slice(i * width, (i + 1) * width) for i in range(size // width)]
        over_q, over_k = ([together(x[s]) for s in rows] for x in (cp.chunks_q, cp.chunks_k))
        beyond: Strategy = (
            Ring(outer, rank // width, over_q, over_k)
            if name[1] == "ring"
            else AllGather(
                outer,
                rank // width,
                over_q,
                over_k,
                _groups_for(cp, on_gpu, -(-heads_kv // width)),
                keep=cp._keep,
                lanes=cp._lanes or 1,
                joint=True,
            )
        )
        mine = rows[rank // width]
        # Groups of all_gather are on their way between nodes: cut once more, they would wait for one another.
        pipeline = cp._pipeline or 1 if name[1] == "ring" else 1
        return Ulysses(inner, rank % width, cp.chunks_q[mine], cp.chunks_k[mine], beyond, pipeline)
    if size == 1:
        return everything
    why_not = Ulysses.why_not(heads, heads_kv, size)
    if name == "ulysses" and why_not:
        raise ValueError(f"strategy: 'ulysses' over {size} ranks, but {why_not}. Use 'all_gather' or 'auto'.")
    divides = heads_kv % size == 0 and not why_not
    if name == "ulysses" or (name == "auto" and divides and (packed or swaps(heads, heads_kv, size))):
        return Ulysses(groups[0], rank, cp.chunks_q, cp.chunks_k, everything, _groups_for(cp, on_gpu, heads_kv // size))
    if name == "ring":
        return Ring(groups[0], rank, cp.chunks_q, cp.chunks_k)
    pipeline = _groups_for(cp, on_gpu, heads_kv)
    if not cp._pipeline and heads_kv * cp.seqlen_k <= _KEYS_OF_GROUP:
        pipeline = 1
    lanes = cp._lanes or (2 if cp.seqlen >= _TOKENS_OF_LANES * size else 1)
    return AllGather(groups[0], rank, cp.chunks_q, cp.chunks_k, pipeline, keep=cp._keep, lanes=lanes)


def margin_of(cp: Any, strategy: Strategy) -> int:
    """Multiprocessors that kernels beside an exchange leave free."""
    given: int | None = cp._sm_margin
    if given is not None:
        return given
    return _MARGIN if isinstance(strategy, AllGather) and strategy.pipeline == 1 else 0


def _groups_for(cp: Any, on_gpu: bool, heads_kv: int) -> int:
    """In how many groups of so many key heads a rank works."""
    if cp._pipeline or not on_gpu:
        return cp._pipeline or 1
    return groups_of(heads_kv, cp.seqlen_k)


def swaps(num_heads: int, num_heads_kv: int, ranks: int) -> bool:
    """Whether ``"auto"`` swaps tokens for heads where the heads divide: what a rank receives then is less.

    That is q, k, v, out and their gradients of 1 / N of the heads, instead of all heads of k, v and their float32
    gradients. 32 query and 8 key heads on 2 GPUs at 16k tokens: 0.85 of the ideal with ulysses, 0.88 with all_gather.
    """
    return 3 * ranks * num_heads_kv > 2 * (num_heads + num_heads_kv)


def groups_of(heads_kv: int, keys: int) -> int:
    """Groups of key heads that are worth it: see ``pipeline`` of `ContextParallel`. The same number on all ranks."""
    tiles = heads_kv * -(-keys // _KEY_TILE)
    return max(1, min(_MOST_GROUPS, tiles // (_WAVES * _MULTIPROCESSORS)))
