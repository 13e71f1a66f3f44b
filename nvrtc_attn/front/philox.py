"""Dropout's random numbers: Philox4x32-10 in NumPy, the keep rule, and the RNG state a call accepts.

The generator is that of J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11), with the key
schedule and the output order of cuRAND. One 32-bit output belongs to one score element, so a mask depends on
(seed, offset, index) and on nothing else: neither tile sizes, nor the GPU, nor the framework.
"""

from __future__ import annotations

from functools import lru_cache
from secrets import randbits
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.errors import shown

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]

_WORD_MASK: Final = 0xFFFFFFFF
_INDEX_MASK: Final = 0xFFFFFFFFFFFFFFFF
_COUNTER_MASK: Final = 0x3FFFFFFFFFFFFFFF  # Four outputs share a counter, so 64-bit indices wrap 62-bit counters.
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_INCREMENTS: Final = (0x9E3779B9, 0xBB67AE85)  # Golden ratio and sqrt(3) - 1.
_ROUNDS: Final = 10
_CHUNK: Final = 1 << 13  # Counters in flight: the six 64-bit temporaries of a round then fit a 512 KiB L2.
_LOW: Final = np.uint64(_WORD_MASK)
_SHIFT: Final = np.uint64(32)


class RngState(NamedTuple):
    """Where a dropout stream starts: the Philox key ``seed`` and the index ``offset`` of its first number.

    A word that lies on the GPU has its address here, which a kernel reads, and 0 for its value; ``owners``, of seed and
    offset where there are any, keep the memory alive.
    """

    seed: int
    offset: int
    seed_address: int = 0
    offset_address: int = 0
    owners: tuple[Any, ...] = ()

    def moved(self, by: int) -> RngState:
        """The stream from ``by`` numbers on. An offset on the GPU stays there: kernels of parts add up both words."""
        return self._replace(offset=(self.offset + by) & _INDEX_MASK) if by else self


NO_RNG: Final = RngState(0, 0)
"""That of a call without dropout."""


def normalise_rng(rng: int | np.integer[Any] | tuple[int, int] | None) -> RngState:
    """Turn the ``rng`` argument of the public functions into an `RngState`.

    Parameters
    ----------
    rng
        ``None``, a seed, or a pair (seed, offset). Seed and offset lie in [0, 2**64 - 1]. ``None`` draws a fresh
        seed from the operating system at each call, so a caller who needs the same mask again (the backward pass
        does) must keep the returned state. A seed alone starts at offset 0.

    Raises
    ------
    TypeError
        Not an integer, nor a pair of integers.
    ValueError
        Out of range. A signed 64-bit holder of a seed above 2**63 is read as unsigned by ``seed & (2**64 - 1)``.
    """
    if rng is None:
        return RngState(randbits(64), 0)
    if isinstance(rng, (tuple, list)):
        if len(rng) != 2:
            raise TypeError(f"rng: got {len(rng)} values; accepted are None, a seed, or a pair (seed, offset)")
        return RngState(check_word("rng seed", rng[0]), check_word("rng offset", rng[1]))
    return RngState(check_word("rng seed", rng), 0)


def check_word(name: str, value: object) -> int:
    """An integer in [0, 2**64 - 1], of Python or NumPy."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"{name}: got {shown(value)} of type {type(value).__name__}; accepted is an int in [0, 2**64 - 1]"
        )
    if not 0 <= int(value) <= _INDEX_MASK:
        raise ValueError(f"{name}: got {shown(int(value))}; accepted is an int in [0, 2**64 - 1]")
    return int(value)


def philox4x32(counter: npt.ArrayLike, key: tuple[int, int]) -> UInt32Array:
    """Philox4x32-10 of many counters under one key.

    Parameters
    ----------
    counter : array of unsigned integers, ``[..., 4]``
        128-bit counters as four 32-bit words, least significant first.
    key
        Two 32-bit words.

    Returns
    -------
    uint32 array, ``[..., 4]``
    """
    words = np.asarray(counter, dtype=np.uint64)
    c0, c1, c2, c3 = (words[..., lane] for lane in range(4))
    return _philox(c0, c1, c2, c3, key)


def _philox(c0: UInt64Array, c1: UInt64Array, c2: UInt64Array, c3: UInt64Array, key: tuple[int, int]) -> UInt32Array:
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0), product1 & _LOW
        c2, c3 = (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1), product0 & _LOW
        k0 = (k0 + _KEY_INCREMENTS[0]) & _WORD_MASK
        k1 = (k1 + _KEY_INCREMENTS[1]) & _WORD_MASK
    out = np.empty((*np.broadcast_shapes(c0.shape, c2.shape), 4), np.uint32)
    for lane, word in enumerate((c0, c1, c2, c3)):
        out[..., lane] = word
    return out


def word_runs(seed: int, starts: UInt64Array, count: int) -> UInt32Array:
    """``count`` consecutive outputs from each start: element ``[..., n]`` is output number ``starts[...] + n``.

    Output number t is lane ``t % 4`` of the block with counter ``(t // 4, 0)`` and key ``seed``, low words first:
    what ``curand_init(seed, 0, t)`` followed by ``curand`` returns. Indices wrap at 2**64.
    """
    starts = np.asarray(starts, np.uint64)
    flat = starts.reshape(-1)
    out = np.empty((flat.size, count), np.uint32)
    if not out.size:
        return out.reshape(*starts.shape, count)
    key = (seed & _WORD_MASK, (seed >> 32) & _WORD_MASK)
    lanes = flat & np.uint64(3)
    zero = np.zeros((), np.uint64)
    for lane in range(4):  # Rows that start at the same lane read their blocks at the same shift.
        rows = np.flatnonzero(lanes == np.uint64(lane))
        if not rows.size:
            continue
        num_blocks = (lane + count + 3) // 4
        steps: UInt64Array = np.arange(num_blocks, dtype=np.uint64)
        for part in np.array_split(rows, min(rows.size, -(-rows.size * num_blocks // _CHUNK))):
            counters = ((flat[part, None] >> np.uint64(2)) + steps) & np.uint64(_COUNTER_MASK)
            blocks = _philox(counters & _LOW, counters >> _SHIFT, zero, zero, key)
            out[part] = blocks.reshape(part.size, num_blocks * 4)[:, lane : lane + count]
    return out.reshape(*starts.shape, count)


def words(seed: int, start: int, count: int) -> UInt32Array:
    """Outputs number ``start``, ..., ``start + count - 1`` of the stream of ``seed``; see `word_runs`."""
    return word_runs(seed, np.array(start & _INDEX_MASK, np.uint64), count)


def uniform(word: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """``word * 2**-32 + 2**-33`` in float32, in (0, 1], exactly as ``curand_uniform`` rounds it.

    The conversion of the 32-bit word rounds once, the product by a power of two is exact, the sum rounds once; a
    fused multiply-add gives the same bits.
    """
    converted = np.asarray(word, np.uint32).astype(np.float32)
    scaled: npt.NDArray[np.float32] = converted * np.float32(2.0**-32) + np.float32(2.0**-33)
    return scaled


def _check_probability(p: float) -> float:
    if not 0.0 <= p <= 1.0:  # NaN fails as well.
        raise ValueError(f"dropout_p: got {shown(p)}; accepted is a number in [0, 1]")
    return float(p)


@lru_cache(maxsize=256)
def threshold(p: float) -> int:
    """The largest word that ``p`` drops: ``word > threshold(p)`` iff ``uniform(word) > float32(p)``, for every word.

    Returns -1 when every word is kept (p = 0, and any p below 2**-33) and 2**32 - 1 when none is (p = 1). `uniform`
    is monotone, so the boundary is found by bisection.
    """
    limit = np.float32(_check_probability(p))
    low, high = -1, _WORD_MASK  # uniform(low) <= limit (vacuous at -1) and every word above high is kept.
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if uniform(middle) <= limit else (low, middle - 1)
    return low


def multiplier(p: float) -> float:
    """``1 / (1 - p)``, computed in float64, rounded to float32; 0 for p = 1, where nothing is kept."""
    _check_probability(p)
    return 0.0 if p == 1 else float(np.float32(1.0 / (1.0 - float(p))))


def keep_mask(
    shape: tuple[int, int, int, int],
    p: float,
    seed: int,
    offset: int = 0,
    *,
    origin: tuple[int, int, int, int] = (0, 0, 0, 0),
    num_heads: int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> BoolArray:
    """The dropout keep mask of a problem, or of a block of it.

    Element (b, h, i, j) uses output number ``t = offset + ((b * H + h) * max_q + i) * max_k + j`` (mod 2**64) and is
    kept iff ``uniform(t) > p``. For dense problems this is the mask of PyTorch's memory-efficient attention, bit for
    bit (``aten::_fill_mem_eff_dropout_mask_``).

    Parameters
    ----------
    shape
        ``(B, H, Mq, Mk)`` of the mask, or of the block.
    p
        Probability of dropping, in [0, 1].
    seed, offset
        In [0, 2**64 - 1].
    origin
        (b, h, i, j) of the block's first element.
    num_heads, max_seqlen_q, max_seqlen_k
        Pitches H, max_q, max_k of the whole problem; by default those of ``shape``. Varlen problems pass their
        maximum lengths.

    Returns
    -------
    bool array of ``shape``, True = kept
    """
    seed, offset = check_word("seed", seed), check_word("offset", offset)
    limit = threshold(p)
    if limit < 0:
        return np.ones(shape, np.bool_)
    if limit == _WORD_MASK:
        return np.zeros(shape, np.bool_)
    pitches: list[int] = [
        given if given is not None else default
        for given, default in zip((num_heads, max_seqlen_q, max_seqlen_k), shape[1:], strict=True)
    ]
    index: Any = np.zeros((), np.uint64)
    for axis in range(3):
        first = origin[axis]
        steps = np.arange(first, first + shape[axis], dtype=np.uint64).reshape(-1, *(1,) * (2 - axis))
        index = index * np.uint64(0 if axis == 0 else pitches[axis - 1]) + steps
    starts = index * np.uint64(pitches[2]) + np.array((offset + origin[3]) & _INDEX_MASK, np.uint64)
    keep: BoolArray = word_runs(seed, starts, shape[3]) > np.uint32(limit)
    return keep
