"""How the NumPy path cuts a call into work: validation, pieces, and the score blocks that both passes share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ..base.errors import UnsupportedError
from ..front.part import Part
from ..front.philox import keep_mask, threshold
from ..modifiers.evaluate import HostModifier, Values

Array = npt.NDArray[Any]
Causal = bool | Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]

_OPERAND_ELEMENTS: Final = 1 << 22  # Elements of q, k, v converted at a time, unless one key head alone has more.
LARGE_SCORE: Final = 2.0**13
"""Beyond it the rounding of a float32 sum changes a probability by 1e-3 and more."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Work of one pass over the rows: some batches (one sequence when their lengths differ) x some key heads."""

    batch: slice
    """Into the leading dim of the tensors."""
    sequence: int
    """Index b of the first sequence, for dropout."""
    q_tokens: slice
    k_tokens: slice
    kv_heads: slice

    @property
    def seqlen_q(self) -> int:
        return int(self.q_tokens.stop - self.q_tokens.start)

    @property
    def seqlen_k(self) -> int:
        return int(self.k_tokens.stop - self.k_tokens.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A validated call: what is common to forward and backward."""

    k: Array
    bias: Array | None
    mask: Array | None
    sink: Array | None
    modifier: HostModifier | None
    dtype: np.dtype[Any]
    num_heads: int
    """Of the whole attention, as max_q and max_k: what dropout's index counts by."""
    origin: tuple[int, int, int, int]
    """Batch entry, head, row and key of the whole that the call begins at."""
    shift: int | None
    """What the diagonal of a part is moved by; None: what the lengths say, and ``shift_of_used``."""
    shift_of_used: int
    group: int
    """Query heads per key head."""
    left: int | None
    right: int | None
    bottom_right: bool
    scale: float
    softcap: float
    dropout_p: float
    seed: int
    offset: int
    max_q: int
    max_k: int
    block_m: int
    block_n: int
    pieces: tuple[Piece, ...]

    @property
    def dropout(self) -> bool:
        return threshold(self.dropout_p) >= 0

    def heads(self, piece: Piece) -> slice:
        return slice(piece.kv_heads.start * self.group, piece.kv_heads.stop * self.group)

    def load_rows(self, x: Array, piece: Piece) -> Array:
        """``x[B, Mq, H, d]`` -> contiguous ``[batches, key heads, group, Mq, d]`` of a piece, in the compute dtype."""
        part = x[piece.batch, piece.q_tokens, self.heads(piece)]
        b, m, h, d = part.shape
        rows = part.reshape(b, m, h // self.group, self.group, d).transpose(0, 2, 3, 1, 4)
        converted: Array = rows.astype(self.dtype, order="C")
        return converted

    def load_keys(self, x: Array, piece: Piece) -> Array:
        """``x[B, Mk, Hkv, d]`` -> contiguous ``[batches, key heads, Mk, d]`` of the piece, in the compute dtype."""
        part = x[piece.batch, piece.k_tokens, piece.kv_heads].transpose(0, 2, 1, 3)
        converted: Array = part.astype(self.dtype, order="C")
        return converted

    def load_statistic(self, x: Array, piece: Piece) -> Array:
        """``x[B, H, Mq]`` -> ``[batches, key heads, group, Mq, 1]``."""
        part = x[piece.batch, self.heads(piece), piece.q_tokens].astype(self.dtype)
        b, h, m = part.shape
        return part.reshape(b, h // self.group, self.group, m, 1)

    def load_sink(self, piece: Piece) -> Array | None:
        """``[1, key heads, group, 1, 1]`` of the piece, in the compute dtype."""
        if self.sink is None:
            return None
        return self.sink[self.heads(piece)].astype(self.dtype).reshape(1, -1, self.group, 1, 1)

    def row_blocks(self, piece: Piece) -> Iterator[tuple[int, int]]:
        step = max(1, self.block_m // self.group)
        return ((i, min(i + step, piece.seqlen_q)) for i in range(0, piece.seqlen_q, step))

    def band(self, piece: Piece) -> tuple[float, float]:
        """(low, high) such that row i keeps the keys with ``low <= j - i <= high``."""
        shift = self.shift
        if shift is None:
            shift = piece.seqlen_k - piece.seqlen_q + self.shift_of_used if self.bottom_right else 0
        low = -math.inf if self.left is None else shift - self.left
        return low, math.inf if self.right is None else shift + self.right

    def key_blocks(self, piece: Piece, i0: int, i1: int) -> Iterator[tuple[int, int]]:
        """The key blocks that any of the rows [i0, i1) can see."""
        low, high = self.band(piece)
        first = int(max(0, i0 + low))
        last = int(min(piece.seqlen_k, i1 + high))
        return ((j, min(j + self.block_n, last)) for j in range(first, last, self.block_n))

    def scores(
        self, piece: Piece, q_rows: Array, k: Array, i0: int, i1: int, j0: int, j1: int
    ) -> tuple[Array, Array | None, Values | None]:
        """Masked scores ``[batches, key heads, group, i1 - i0, j1 - j0]``, the slope of the softcap, and the modifier's
        values, its slope among them.

        ``S = softcap(scale * q . k) + bias``, and -inf where a mask drops the key, by selection. The slope is
        ``d softcap(s) / ds = 1 - tanh(s / c)**2``. A modifier takes the place of the softcap.
        """
        product = self._product(q_rows, k[..., j0:j1, :].swapaxes(-1, -2))
        s: Array = product.reshape(*k.shape[:2], self.group, i1 - i0, j1 - j0)
        s *= self.dtype.type(self.scale)
        slope = values = None
        if self.modifier is not None:
            values = self.modifier.values(self._positions(piece, s, i0, i1, j0, j1), self.dtype)
            if self.modifier.score is not None:
                s = np.broadcast_to(values(self.modifier.score), s.shape).astype(self.dtype)  # a copy of its own
        if self.softcap:
            s /= self.dtype.type(self.softcap)
            np.tanh(s, out=s)
            slope = 1 - s * s
            s *= self.dtype.type(self.softcap)
        if self.bias is not None:
            s += self._operand_block(self.bias, piece, i0, i1, j0, j1).astype(self.dtype)
        low, high = self.band(piece)
        if j0 - (i1 - 1) < low or (j1 - 1) - i0 > high:
            distance = np.arange(j0, j1) - np.arange(i0, i1)[:, None]
            np.copyto(s, -np.inf, where=(distance < low) | (distance > high))
        if self.mask is not None:
            np.copyto(s, -np.inf, where=self._operand_block(self.mask, piece, i0, i1, j0, j1) == 0)
        if self.modifier is not None and values is not None:
            kept = None if self.modifier.mask is None else values(self.modifier.mask)
            allowed = s != -np.inf if values.outside else None  # before the mask
            if kept is not None:
                np.copyto(s, -np.inf, where=~kept)
            if allowed is not None:
                self.modifier.check(values, allowed, s != -np.inf)
        return s, slope, values

    def _product(self, q_rows: Array, k_columns: Array) -> Array:
        """``q . k``, of which large ones in float32 are sums in float64.

        Some builds of BLAS add in another order at the edge of a block: equal keys get scores that differ by units in
        the last place, and at 6e10 those are thousands, so that one of the keys takes all the probability.
        """
        product: Array = np.matmul(q_rows, k_columns)
        if self.dtype == np.float32 and product.size:
            # A NaN is not larger: it stays one in either way.
            largest = max(float(product.max()), -float(product.min())) * abs(self.scale)
            if largest > LARGE_SCORE:
                with np.errstate(over="ignore"):
                    product = np.matmul(q_rows.astype(np.float64), k_columns.astype(np.float64)).astype(np.float32)
        return product

    def _positions(self, piece: Piece, s: Array, i0: int, i1: int, j0: int, j1: int) -> dict[str, Array]:
        """What a modifier is a function of: the scores and where they are."""
        heads = self.heads(piece)
        return {
            "score": s,
            "b": np.arange(piece.sequence, piece.sequence + len(s)).reshape(-1, 1, 1, 1, 1),
            "h": np.arange(heads.start, heads.stop).reshape(1, -1, self.group, 1, 1),
            "q": np.arange(i0, i1).reshape(1, 1, 1, -1, 1),
            "k": np.arange(j0, j1).reshape(1, 1, 1, 1, -1),
        }

    def operand_index(self, x: Array, piece: Piece, i0: int, i1: int, j0: int, j1: int) -> tuple[slice, ...]:
        """The part of a broadcastable ``[1|B, 1|H, 1|Mq, 1|Mk]`` operand that belongs to a block."""
        full = (piece.batch, self.heads(piece), slice(i0, i1), slice(j0, j1))
        return tuple(slice(0, 1) if size == 1 else part for size, part in zip(x.shape, full, strict=True))

    def _operand_block(self, x: Array, piece: Piece, i0: int, i1: int, j0: int, j1: int) -> Array:
        part = x[self.operand_index(x, piece, i0, i1, j0, j1)]
        b, h, m, n = part.shape
        return part.reshape((b, 1, 1, m, n) if x.shape[1] == 1 else (b, h // self.group, self.group, m, n))

    def dropped(self, piece: Piece, batches: int, i0: int, i1: int, j0: int, j1: int) -> Array:
        """Where dropout drops a score of the block."""
        heads = self.heads(piece)
        b0, h0, first_row, first_key = self.origin
        keep = keep_mask(
            (batches, heads.stop - heads.start, i1 - i0, j1 - j0),
            self.dropout_p,
            self.seed,
            self.offset,
            origin=(b0 + piece.sequence, h0 + heads.start, first_row + i0, first_key + j0),
            num_heads=self.num_heads,
            max_seqlen_q=self.max_q,
            max_seqlen_k=self.max_k,
        )
        return ~keep.reshape(batches, -1, self.group, i1 - i0, j1 - j0)


def _packed_starts(
    cu_seqlens_q: npt.ArrayLike | None, cu_seqlens_k: npt.ArrayLike | None, q_shape: tuple[int, ...],
    k_shape: tuple[int, ...], has_scores: bool,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Where packed sequences begin and the last one ends; ``has_scores`` where the call has a bias or a mask."""
    if cu_seqlens_q is None or cu_seqlens_k is None or q_shape[0] != 1:
        raise ValueError(f"cu_seqlens_q, cu_seqlens_k: accepted are both or neither, with batch 1 (got {q_shape[0]})")
    if has_scores:
        raise UnsupportedError("bias, mask: not supported with cu_seqlens; pass padded batches instead")
    starts_q = _check_starts("cu_seqlens_q", cu_seqlens_q, q_shape[1])
    starts_k = _check_starts("cu_seqlens_k", cu_seqlens_k, k_shape[1])
    if len(starts_q) != len(starts_k):
        raise ValueError(f"cu_seqlens_k: got {len(starts_k)} values; accepted is {len(starts_q)} as in cu_seqlens_q")
    return starts_q, starts_k


def _used_lengths(seqused_k: npt.ArrayLike, slots: list[int]) -> list[int]:
    """The keys used of each sequence, of which ``slots`` has room for."""
    used = [int(n) for n in np.asarray(seqused_k)]
    if len(used) != len(slots) or any(not 0 <= n <= slot for n, slot in zip(used, slots, strict=True)):
        raise ValueError(f"seqused_k: got {used}; accepted is one length per sequence, at most {slots}")
    return used


def _packed_pieces(starts_q: list[int], starts_k: list[int], used: list[int] | None, heads: list[slice]) -> list[Piece]:
    """A piece for each packed sequence and group of key heads."""
    pieces = []
    for b, ((start_q, end_q), (start_k, end_k)) in enumerate(zip(pairwise(starts_q), pairwise(starts_k), strict=True)):
        keys = slice(start_k, end_k if used is None else start_k + used[b])
        pieces += [Piece(slice(0, 1), b, slice(start_q, end_q), keys, group) for group in heads]
    return pieces


def _padded_pieces(
    batch: int, batch_step: int, seqlen_q: int, seqlen_k: int, used: list[int] | None, heads: list[slice]
) -> list[Piece]:
    """A piece for each group of batch entries and of key heads."""
    pieces = []
    for b in range(0, batch, batch_step):
        tokens = slice(0, seqlen_q), slice(0, seqlen_k if used is None else used[b])
        pieces += [Piece(slice(b, min(b + batch_step, batch)), b, *tokens, group) for group in heads]
    return pieces


def make_plan(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: Array | None,
    sink: Array | None,
    causal: Causal,
    window_size: Window | None,
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
    seed: int,
    offset: int,
    cu_seqlens_q: npt.ArrayLike | None,
    cu_seqlens_k: npt.ArrayLike | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_k: npt.ArrayLike | None,
    part: Part | None,
    compute_dtype: npt.DTypeLike | None,
    block_m: int,
    block_n: int,
    modifier: HostModifier | None = None,
) -> Plan:
    """Check one call, and divide it into pieces of about ``block_m`` x ``block_n`` scores.

    Raises
    ------
    ValueError
        A shape, length or number that no call has.
    UnsupportedError
        A bias or mask with packed sequences.
    """
    _check_operands(q, k, v)
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_heads_kv = k.shape[1:3]
    if causal not in (False, True, "bottom_right", "top_left"):
        raise ValueError(f"causal: got {causal!r}; accepted are False, True, 'bottom_right' and 'top_left'")
    scale = (head_dim**-0.5 if head_dim else 1.0) if softmax_scale is None else float(softmax_scale)
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale: got {softmax_scale}; accepted is a finite number")
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap: got {softcap}; accepted is 0 (off) or a positive finite number")
    dtype = np.dtype(compute_dtype or (np.float64 if q.dtype == np.float64 else np.float32))
    if dtype not in (np.float32, np.float64):
        raise ValueError(f"compute_dtype: got {dtype}; accepted are float32 and float64")
    if 0 < softcap < np.finfo(dtype).tiny:  # scores are divided by it in this precision
        raise ValueError(f"softcap: got {softcap}; accepted is 0 (off) or a normal number of {dtype}")
    left, right = window_size or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    group = max(1, num_heads // num_heads_kv) if num_heads_kv else 1
    block_m, block_n = max(1, block_m), max(1, block_n)

    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    starts_q, starts_k = [0, seqlen_q], [0, seqlen_k]
    if varlen:
        has_scores = bias is not None or mask is not None
        starts_q, starts_k = _packed_starts(cu_seqlens_q, cu_seqlens_k, q.shape, k.shape, has_scores)
    lengths_q = [b - a for a, b in pairwise(starts_q)]
    lengths_k = [b - a for a, b in pairwise(starts_k)]
    for name, given, needed in (
        ("max_seqlen_q", max_seqlen_q, max(lengths_q, default=0)),
        ("max_seqlen_k", max_seqlen_k, max(lengths_k, default=0)),
    ):
        if varlen and given is not None and given < needed:
            raise ValueError(f"{name}: got {given}; accepted is at least the longest sequence, {needed}")
    for name, operand in (("bias", bias), ("mask", mask)):
        full = (batch, num_heads, seqlen_q, seqlen_k)
        if operand is not None and not _broadcasts(operand.shape, full):
            raise ValueError(f"{name}: got shape {operand.shape}; accepted is {full} with any dim replaced by 1")
    if sink is not None and sink.shape != (num_heads,):
        raise ValueError(f"sink: got shape {sink.shape}; accepted is {(num_heads,)}, one logit a query head")

    used = None if seqused_k is None else _used_lengths(seqused_k, lengths_k if varlen else lengths_k * batch)

    rows = min(max(seqlen_q, 1), max(1, block_m // group)) * group
    columns = min(max(seqlen_k, 1), block_n)
    operand_size = max(1, seqlen_k * (head_dim + v.shape[3]) + group * seqlen_q * head_dim)
    units = max(1, min(block_m * block_n // (rows * columns), _OPERAND_ELEMENTS // operand_size))
    head_step = min(units, max(1, num_heads_kv))
    batch_step = max(1, units // max(1, num_heads_kv)) if used is None and head_step >= num_heads_kv else 1
    # Key heads that no query head reads are no work: their gradients stay zero.
    busy_heads = num_heads_kv if num_heads else 0
    heads = [slice(h, min(h + head_step, busy_heads)) for h in range(0, busy_heads, head_step)]
    if varlen:
        pieces = _packed_pieces(starts_q, starts_k, used, heads)
    else:
        pieces = _padded_pieces(batch, batch_step, seqlen_q, seqlen_k, used, heads)
    longest_q = max_seqlen_q if varlen and max_seqlen_q is not None else max(lengths_q, default=0)
    longest_k = max_seqlen_k if varlen and max_seqlen_k is not None else max(lengths_k, default=0)
    bottom_right = causal != "top_left"
    whole, shift, shift_of_used = part or Part(), None, 0
    if part is not None and not varlen:
        if used is not None and bottom_right:
            shift_of_used = part.shift_of_used_keys(seqlen_q)
        else:
            shift = part.shift(seqlen_q, seqlen_k, bottom_right)
    _, all_heads, max_q, max_k = whole.whole((batch, num_heads, longest_q, longest_k))
    return Plan(
        k=k, bias=bias, mask=mask, sink=sink, modifier=modifier, dtype=dtype, num_heads=all_heads,
        origin=whole.origin(), shift=shift, shift_of_used=shift_of_used, group=group, left=left, right=right,
        bottom_right=bottom_right, scale=scale, softcap=float(softcap), dropout_p=dropout_p, seed=seed, offset=offset,
        block_m=block_m, block_n=block_n, pieces=tuple(pieces), max_q=max_q, max_k=max_k,
    )  # fmt: skip


def _check_operands(q: Array, k: Array, v: Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {x.shape}; accepted is rank 4, [batch, seqlen, heads, head_dim]")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"q, k, v: got shapes {q.shape}, {k.shape}, {v.shape}; accepted are [B, Mq, H, K], [B, Mk, Hkv, K], "
            "[B, Mk, Hkv, Kv]"
        )
    if q.shape[2] % k.shape[2] if k.shape[2] else q.shape[2]:
        raise ValueError(f"k: got {k.shape[2]} heads for {q.shape[2]} query heads; accepted is a divisor of the latter")


def _check_starts(name: str, values: npt.ArrayLike, total: int) -> list[int]:
    starts = [int(x) for x in np.asarray(values)]
    if not starts or starts[0] < 0 or starts[-1] > total or starts != sorted(starts):
        raise ValueError(f"{name}: got {starts}; accepted are non-decreasing offsets in [0, {total}]")
    return starts


def _broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    return len(shape) == len(full) and all(size in (1, want) for size, want in zip(shape, full, strict=True))
