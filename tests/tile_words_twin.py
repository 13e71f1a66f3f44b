"""What ``kernel/tile_plan.cuh`` writes, in NumPy: the words of a mask, by the layout of `heuristics.tile_words`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nvrtc_attn.heuristics.tile_words import WORD_TILES, LineOrder, TileWords

Array = npt.NDArray[Any]


def tile_bits(mask: Array, words: TileWords, seqlen_q: int, seqlen_k: int) -> tuple[Array, Array]:
    """``some`` and ``all``: bool ``[batch, heads, lines, tiles]`` of a mask in its broadcast form."""
    mask = np.broadcast_to(mask != 0, (*mask.shape[:2], 1 if words.one_row else seqlen_q, seqlen_k))
    rows = np.arange(0, mask.shape[2], words.rows)
    cols = np.arange(0, seqlen_k, words.cols)
    kept = np.add.reduceat(np.add.reduceat(mask.astype(np.int64), rows, axis=2), cols, axis=3)
    sizes = np.outer(np.diff([*rows, mask.shape[2]]), np.diff([*cols, seqlen_k]))
    some, all_kept = kept > 0, kept == sizes
    if words.transposed:
        shape = (*mask.shape[:2], words.lines, words.tiles)
        return tuple(np.broadcast_to(x.swapaxes(2, 3), shape) for x in (some, all_kept))  # type: ignore[return-value]
    return some, all_kept


def tile_words(mask: Array, words: TileWords, seqlen_q: int, seqlen_k: int) -> Array:
    """uint32 ``[batch, heads, lines, words, 2]``, the last dim ``some`` and ``all``; bits beyond the tiles are 0."""
    bits = np.stack(tile_bits(mask, words, seqlen_q, seqlen_k), axis=-1)
    padding = [(0, 0)] * 3 + [(0, -words.tiles % WORD_TILES), (0, 0)]
    bits = np.pad(bits, padding).reshape(*bits.shape[:3], words.words, WORD_TILES, 2)
    weights = np.uint32(1) << np.arange(WORD_TILES, dtype=np.uint32)
    packed: Array = (bits.astype(np.uint32) * weights[:, None]).sum(axis=-2, dtype=np.uint32)
    return packed


def order_in(buffer: Array, order: LineOrder) -> Array:
    """int32 ``[batch, heads, lines]`` of the mask: the lines as ``collective/line_order.cuh`` leaves them."""
    words, places = order.words, dict(order.params)
    found = np.empty((words.batch, words.heads, words.lines), np.int32)
    for b, h in np.ndindex(words.batch, words.heads):
        at = places["tile_order_offset"] + b * places["tile_order_stride_b"] + h * places["tile_order_stride_h"]
        found[b, h] = buffer[8 * at : 8 * at + 4 * words.lines].view(np.int32)
    return found


def line_order(some: Array) -> Array:
    """The same of ``some`` (`tile_bits`): from the most tiles to the least, equal lines in their order."""
    found: Array = np.argsort(-some.sum(-1), axis=-1, kind="stable")
    return found


def of_tiles(found: Array, words: TileWords) -> Array:
    """``found``, words as a kernel left them, without the bits beyond the tiles."""
    last = words.tiles % WORD_TILES
    cut = found.copy()
    if last:
        cut[..., -1, :] &= np.uint32((1 << last) - 1)
    return cut


def words_in(workspace: Any, words: TileWords) -> Array:
    """Those that a launch has left in a workspace on the GPU."""
    found = workspace[: words.nbytes].cpu().numpy().view(np.uint32)
    return of_tiles(found.reshape(words.batch, words.heads, words.lines, words.words, 2), words)
