"""What a condition is on whole tiles of queries and keys: nowhere true, everywhere true, or undecided, in NumPy.

Every node gets a range that holds all of its values on a tile. Nodes of queries alone, or of keys alone, that read an
array are computed at each row, or key, once, and a tile has the least and the largest; what depends on both is computed
from ranges (``interval_rules``). Nothing of the size of the scores is made, and no range is too narrow, so that an
undecided tile may be anything and a decided one is what it says. ``cuda_tiles`` writes the same in C++.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from .evaluate import Values
from .graph import Node, walk
from .interval_rules import Array, Range, anything, combine, of_values

MAX_BOX: Final = 64
"""Elements of an array that are looked at for one tile, where its index depends on both queries and keys."""


def _is_tight(node: Node) -> bool:
    """Whether the range of an integer of one position is as tight as its values, so that none need be computed."""
    if node.op in ("q", "k"):
        return True
    moving = [x for x in node.args if x.depends & {"q", "k"}]
    if node.kind != "int" or len(moving) != 1:
        return False
    return node.op in ("add", "sub", "mul", "neg") or (node.op in ("floordiv", "shr") and moving[0] is node.args[0])


class Leaves(NamedTuple):
    """The nodes of a condition whose values are computed one by one."""

    rows: tuple[Node, ...]
    columns: tuple[Node, ...]


def leaves_of(root: Node) -> Leaves:
    """The largest parts of a condition that depend on queries alone, and on keys alone, and want their values."""
    rows: dict[Node, None] = {}
    columns: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        on = node.depends & {"q", "k"}
        if not on:
            continue
        if len(on) == 1 and not _by_ranges(node):
            (rows if "q" in on else columns).setdefault(node)
        else:
            stack += reversed(node.args)
    return Leaves(tuple(rows), tuple(columns))


def _by_ranges(node: Node) -> bool:
    return all(_is_tight(x) for x in walk([node]) if x.depends & {"q", "k"})


def ranges_below(root: Node, leaves: Leaves) -> list[Node]:
    """The nodes of which ranges are computed, operands first: those above the leaves and above b and h alone."""
    known = {*leaves.rows, *leaves.columns}
    order: list[Node] = []
    done: set[Node] = set()
    stack = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            order.append(node)
        else:
            stack.append((node, True))
            if node not in known and node.depends & {"q", "k"}:
                stack += [(x, False) for x in reversed(node.args) if x not in done]
    return order


def decide(
    mask: Node,
    captures: Sequence[Array],
    *,
    batch: Sequence[int],
    heads: Sequence[int],
    query_starts: Array,
    seqlen_q: int,
    key_starts: Array,
    seqlen_k: int,
) -> tuple[Array, Array]:
    """``some`` and ``all``: bool ``[batch, heads, query tiles, key tiles]``.

    Where ``some`` is False the condition holds for no pair of the tile, where ``all`` is True for every one.

    Parameters
    ----------
    batch, heads
        Batch entries and heads that are asked about.
    query_starts, key_starts
        First query and key of each tile, ascending; the last one ends at ``seqlen_q`` or ``seqlen_k``.
    """
    b = np.asarray(batch).reshape(-1, 1, 1, 1)
    h = np.asarray(heads).reshape(1, -1, 1, 1)
    shape = (b.size, h.size, len(query_starts), len(key_starts))
    if 0 in shape or not seqlen_q or not seqlen_k:
        return np.zeros(shape, np.bool_), np.ones(shape, np.bool_)
    tiles = _Tiles(captures, b, h, query_starts, seqlen_q, key_starts, seqlen_k)
    with np.errstate(all="ignore"):
        found = tiles(mask)
    return np.broadcast_to(found.high > 0, shape), np.broadcast_to(found.low > 0, shape)


def is_inside(load: Node, captures: Sequence[Array], sizes: Sequence[int]) -> bool:
    """Whether ranges prove that an index is within its array for all of ``sizes`` batch entries, heads, rows and keys.

    Whatever is masked; the index does not depend on the score.
    """
    batch, heads, rows, keys = sizes
    if 0 in sizes:
        return True
    b, h = np.arange(batch).reshape(-1, 1, 1, 1), np.arange(heads).reshape(1, -1, 1, 1)
    tiles = _Tiles(captures, b, h, np.zeros(1, np.int64), rows, np.zeros(1, np.int64), keys)
    with np.errstate(all="ignore"):
        found = [tiles(x) for x in load.args]
    return all(
        bool(x.low.min() >= 0) and bool(x.high.max() < size)
        for x, size in zip(found, captures[load.value].shape, strict=True)
    )


class _Tiles:
    """Ranges of the nodes of one condition on all tiles."""

    def __init__(
        self, captures: Sequence[Array], b: Array, h: Array, query_starts: Array, seqlen_q: int, key_starts: Array,
        seqlen_k: int,
    ) -> None:  # fmt: skip
        self._captures = captures
        rows, keys = np.arange(seqlen_q).reshape(1, 1, -1, 1), np.arange(seqlen_k).reshape(1, 1, 1, -1)
        self._starts = {2: np.asarray(query_starts), 3: np.asarray(key_starts)}
        self._values = Values({"b": b, "h": h, "q": rows, "k": keys}, captures, np.dtype(np.float64))
        self._ends = {2: np.append(self._starts[2][1:], seqlen_q) - 1, 3: np.append(self._starts[3][1:], seqlen_k) - 1}

    def __call__(self, root: Node) -> Range:
        leaves = leaves_of(root)
        known: dict[Node, Range] = {}
        for node in ranges_below(root, leaves):
            if node in leaves.rows:
                known[node] = self._hull(node, 2)
            elif node in leaves.columns:
                known[node] = self._hull(node, 3)
            elif not node.depends & {"q", "k"}:
                known[node] = of_values(self._values(node), node)
            elif node.op in ("q", "k"):
                axis = 2 if node.op == "q" else 3
                shape = (1, 1, -1, 1) if axis == 2 else (1, 1, 1, -1)
                known[node] = Range(*(x[axis].reshape(shape).astype(np.float64) for x in (self._starts, self._ends)))
            elif node.op == "load":
                known[node] = self._box(node, [known[x] for x in node.args])
            else:
                known[node] = combine(node, [known[x] for x in node.args])
        return known[root]

    def _hull(self, node: Node, axis: int) -> Range:
        """The least and the largest value of each tile."""
        found = of_values(self._values(node), node)
        starts = self._starts[axis]
        return Range(np.minimum.reduceat(found.low, starts, axis), np.maximum.reduceat(found.high, starts, axis))

    def _box(self, node: Node, index: list[Range]) -> Range:
        """Of an element whose index depends on both: of all that it may be, where these are few."""
        array = self._captures[node.value]
        count = np.ones(())
        for x in index:
            count = count * (x.high - x.low + 1)
        few = count <= MAX_BOX
        low, high = anything(node, np.broadcast_shapes(*(x.low.shape for x in index)))
        if not few.any():
            return Range(low, high)
        sizes = [int(np.broadcast_to(x.high - x.low + 1, few.shape)[few].max(initial=1)) for x in index]
        if math.prod(sizes) > 4 * MAX_BOX:  # boxes of many forms
            return Range(low, high)
        found: Range | None = None
        for offset in np.ndindex(*sizes):
            at = [np.minimum(np.where(few, x.low, 0) + step, np.where(few, x.high, 0)).astype(np.int64)
                  for x, step in zip(index, offset, strict=True)]  # fmt: skip
            inside = np.ones((), np.bool_)
            for x, size in zip(at, array.shape, strict=True):
                inside = inside & (x >= 0) & (x < size)
            nothing = np.asarray(np.nan if node.kind == "float" else 0.0)
            if array.size:
                bounded = tuple(np.clip(x, 0, size - 1) for x, size in zip(at, array.shape, strict=True))
                values = np.where(inside, array[bounded].astype(np.float64), nothing)
            else:
                values = np.broadcast_to(nothing, inside.shape)
            one = of_values(values, node)
            found = one if found is None else Range(np.minimum(found.low, one.low), np.maximum(found.high, one.high))
        assert found is not None
        return Range(np.where(few, found.low, low), np.where(few, found.high, high))
