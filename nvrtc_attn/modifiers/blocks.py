"""Lists of blocks as a mask: which blocks of keys each block of queries sees."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .recording import for_sizes


def block_mask(
    indptr: Any, indices: Any, block: int | tuple[int, int], seqlen_q: int, seqlen_k: int, *, mask_mod: Any = None
) -> Callable[..., Any]:
    """A ``mask_mod`` of lists of blocks, for every function that takes one.

    Blocks that are not listed take no time; of those that are, ``mask_mod`` decides about each pair.

    Parameters
    ----------
    indptr : ``[row blocks + 1]`` or ``[heads, row blocks + 1]``
        Where the list of each row of blocks begins in ``indices``, which ends where the next one begins.
    indices : ``[number of blocks]``
        Blocks of keys, ascending in each list. Both are copied to the host, and checked, once, now.
    block
        Queries and keys of a block; one number for both.
    seqlen_q, seqlen_k
        Lengths that the lists are for. A call of other ones is refused, as is one of other heads than ``indptr`` has
        lists for, unless it has one for all; packed sequences may be shorter.
    mask_mod
        ``mask_mod(b, h, q, k)``; None keeps all of the listed blocks.

    Returns
    -------
    mask_mod
        It captured a boolean table of the framework and on the device of ``indices``.

    Raises
    ------
    ValueError
        Lists that are unsorted, that name a block twice or one that does not exist, or that are for other lengths.
    """
    rows, columns = (block, block) if isinstance(block, int) else block
    if min(rows, columns) < 1:
        raise ValueError(f"block: got {block}. Blocks have at least one query and one key.")
    starts, listed = _on_host("indptr", indptr), _on_host("indices", indices)
    count_q, count_k = -(-seqlen_q // rows), -(-seqlen_k // columns)
    if starts.ndim not in (1, 2) or starts.shape[-1] != count_q + 1:
        raise ValueError(
            f"indptr: shape {starts.shape}, needed is [{count_q + 1}] or [heads, {count_q + 1}]: {seqlen_q} queries in "
            f"blocks of {rows}."
        )
    if listed.ndim != 1:
        raise ValueError(f"indices: shape {listed.shape}, needed is one dim.")
    lists = starts.reshape(-1, count_q + 1)
    if (lists < 0).any() or (np.diff(lists) < 0).any() or (lists > listed.size).any():
        raise ValueError(f"indptr: its values ascend, between 0 and the {listed.size} indices.")
    if ((listed < 0) | (listed >= count_k)).any():
        raise ValueError(f"indices: a block beyond the {count_k} of {seqlen_k} keys in blocks of {columns}.")
    table = np.zeros((len(lists), count_q, count_k), np.bool_)
    for h, row in np.ndindex(len(lists), count_q):
        own = listed[lists[h, row] : lists[h, row + 1]]
        if (np.diff(own) <= 0).any():
            raise ValueError(f"indices: the list of row {row} is unsorted, or names a block twice: {own.tolist()[:8]}.")
        table[h, row, own] = True
    blocks = _like(table, indices)
    by_head = len(lists) > 1
    sizes = f"{len(lists)} {seqlen_q} {seqlen_k}"

    def of_blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
        kept = for_sizes(blocks[h if by_head else 0, q // rows, k // columns], sizes)
        return kept if mask_mod is None else kept & mask_mod(b, h, q, k)

    return of_blocks


def _on_host(name: str, x: Any) -> npt.NDArray[np.int64]:
    if hasattr(x, "detach"):  # torch
        x = x.detach().cpu()
    elif hasattr(x, "get") and not isinstance(x, dict):  # CuPy
        x = x.get()
    found = np.asarray(x)
    if found.dtype.kind not in "iu":
        raise ValueError(f"{name}: elements of type {found.dtype}, needed are integers.")
    return found.astype(np.int64)


def _like(table: npt.NDArray[np.bool_], x: Any) -> Any:
    """The table as an array of the framework, and on the device, of ``x``."""
    home = type(x).__module__.split(".")[0]
    if home == "torch":
        return sys.modules["torch"].from_numpy(table).to(x.device)
    if home == "cupy":
        cupy = sys.modules["cupy"]
        with x.device:
            return cupy.asarray(table)
    if home in ("jax", "jaxlib"):
        return sys.modules["jax"].numpy.asarray(table)
    return table
