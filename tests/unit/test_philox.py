"""Dropout's numbers: known answers of Philox4x32-10, the keep threshold word by word, and the state a call accepts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nvrtc_attn.front import philox

WORD_MAX = 2**32 - 1
PROBABILITIES = (
    0.0,
    1e-12,
    2.0**-33,
    1e-9,
    1e-6,
    0.1,
    0.25,
    1 / 3,
    0.5,
    0.7,
    0.9,
    0.999,
    1 - 2.0**-24,
    1 - 2.0**-30,
    1.0,
)


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers, straight from the paper's definition."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & WORD_MAX, (p0 >> 32) ^ c[3] ^ k[1], p0 & WORD_MAX]
        k = [(k[0] + 0x9E3779B9) & WORD_MAX, (k[1] + 0xBB67AE85) & WORD_MAX]
    return c


def scalar_word(seed: int, t: int) -> int:
    t %= 2**64
    return scalar_philox([t // 4 & WORD_MAX, t // 4 >> 32, 0, 0], [seed & WORD_MAX, seed >> 32])[t % 4]


def scalar_uniform(word: int) -> np.float32:
    """Each operation exact in float64, then rounded to float32 once, as the device does it."""
    converted = np.float32(float(word))
    return np.float32(float(converted) * 2.0**-32 + 2.0**-33)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD_MAX] * 4, (WORD_MAX, WORD_MAX), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers(counter: list[int], key: tuple[int, int], expected: list[int]) -> None:
    # Random123's kat_vectors.
    assert philox.philox4x32(counter, key).tolist() == expected
    assert scalar_philox(counter, list(key)) == expected


@pytest.mark.parametrize("seed", [0, 1, 0x123456789ABCDEF0, 2**64 - 1])
@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 2**32 - 2, 2**34 - 3, 2**63 + 1, 2**64 - 5])
def test_words_are_numbered_outputs(seed: int, start: int) -> None:
    # The last start wraps to output number 0.
    assert philox.words(seed, start, 11).tolist() == [scalar_word(seed, start + n) for n in range(11)]


def test_words_in_many_chunks_equal_one_run() -> None:
    starts = np.arange(5, 5 + 97 * 1001, 97, dtype=np.uint64)
    runs = philox.word_runs(7, starts, 97)
    assert np.array_equal(runs.ravel(), philox.words(7, 5, 97 * 1001))
    assert philox.word_runs(7, starts, 0).shape == (1001, 0)
    assert philox.words(7, 5, 0).shape == (0,)


def test_uniform_rounds_as_the_device() -> None:
    rng = np.random.default_rng(0)
    edges = [2**n + d for n in range(33) for d in range(-300, 301) if 0 <= 2**n + d <= WORD_MAX]
    words = np.array(edges + rng.integers(0, 2**32, 5000).tolist(), np.uint32)
    assert philox.uniform(words).tolist() == [scalar_uniform(int(w)) for w in words]
    assert philox.uniform(0) == 2.0**-33
    assert philox.uniform(WORD_MAX) == 1.0


@pytest.mark.reliability(18, 33)
@pytest.mark.parametrize("p", PROBABILITIES)
def test_threshold_is_the_float_comparison(p: float) -> None:
    limit = philox.threshold(p)
    assert -1 <= limit <= WORD_MAX
    rng = np.random.default_rng(1)
    near = [limit + d for d in range(-300, 301)]
    centre = int(float(np.float32(p)) * 2**32)
    near += [centre + d for d in range(-300, 301)] + [0, 1, WORD_MAX - 1, WORD_MAX]
    words = [w for w in near if 0 <= w <= WORD_MAX] + rng.integers(0, 2**32, 2000).tolist()
    for word in words:
        assert (word > limit) == bool(scalar_uniform(word) > np.float32(p)), (word, limit)


@pytest.mark.reliability(18)
def test_threshold_ends_and_refusals() -> None:
    assert philox.threshold(0.0) == -1
    assert philox.threshold(1e-12) == -1  # Below the smallest uniform, 2**-33.
    assert philox.threshold(1.0) == WORD_MAX
    for p in (-0.1, 1.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"dropout_p: got {p}; accepted"):
            philox.threshold(p)
        with pytest.raises(ValueError, match=rf"dropout_p: got {p}; accepted"):
            philox.multiplier(p)


def test_multiplier() -> None:
    assert philox.multiplier(0.0) == 1.0
    assert philox.multiplier(1.0) == 0.0
    assert philox.multiplier(0.1) == float(np.float32(1 / 0.9))
    assert philox.multiplier(0.999) == float(np.float32(1 / (1 - 0.999)))


@pytest.mark.reliability(33)
@pytest.mark.parametrize(("seed", "offset"), [(5, 0), (2**63, 2**33 + 1), (2**64 - 1, 2**64 - 50)])
def test_keep_mask_by_definition(seed: int, offset: int) -> None:
    batch, heads, seqlen_q, seqlen_k = 2, 3, 5, 7
    mask = philox.keep_mask((batch, heads, seqlen_q, seqlen_k), 0.4, seed, offset)
    for (b, h, i, j), keep in np.ndenumerate(mask):
        t = offset + ((b * heads + h) * seqlen_q + i) * seqlen_k + j
        assert keep == (scalar_uniform(scalar_word(seed, t)) > np.float32(0.4))


@pytest.mark.reliability(33, 34)
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 2**64 - 40_000])
def test_keep_mask_blocks_equal_the_whole(offset: int) -> None:
    shape = (3, 4, 61, 83)
    whole = philox.keep_mask(shape, 0.3, 99, offset)
    pitches = {"num_heads": shape[1], "max_seqlen_q": shape[2], "max_seqlen_k": shape[3]}
    rng = np.random.default_rng(offset % 1000)
    for _ in range(40):
        first = tuple(int(rng.integers(0, n)) for n in shape)
        size = tuple(int(rng.integers(0, n - f + 1)) for n, f in zip(shape, first, strict=True))
        block = philox.keep_mask(size, 0.3, 99, offset, origin=first, **pitches)
        assert np.array_equal(block, whole[tuple(slice(f, f + s) for f, s in zip(first, size, strict=True))])


@pytest.mark.reliability(37)
def test_keep_mask_index_is_64_bit() -> None:
    # Row 2**31 of a matrix with 2**31 + 7 columns: the index needs 63 bits.
    pitch, i, j = 2**31 + 7, 2**31, 2**31 - 3
    block = philox.keep_mask((1, 1, 1, 9), 0.5, 3, 5, origin=(0, 0, i, j), max_seqlen_q=2**31 + 1, max_seqlen_k=pitch)
    expected = [scalar_uniform(scalar_word(3, 5 + i * pitch + j + n)) > 0.5 for n in range(9)]
    assert block.ravel().tolist() == expected


@pytest.mark.reliability(33)
def test_keep_mask_at_the_boundary_word() -> None:
    # Below 2**23 every word has a uniform of its own, so p can sit exactly on a word and one step under it.
    words = philox.words(5, 0, 8192)
    small = np.flatnonzero(words < 2**23)
    assert small.size >= 4
    for index in small:
        word = int(words[index])
        for p, kept in ((float(philox.uniform(word)), False), (float(philox.uniform(word - 1)), True)):
            assert philox.keep_mask((1, 1, 1, 8192), p, 5)[0, 0, 0, index] == kept


@pytest.mark.reliability(33)
@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_dropped_fraction_within_four_sigma(p: float) -> None:
    mask = philox.keep_mask((2, 4, 200, 300), p, 2024, 17)
    sigma = math.sqrt(p * (1 - p) / mask.size)
    assert abs((1 - mask.mean()) - p) < 4 * sigma


@pytest.mark.reliability(18)
def test_keep_mask_ends() -> None:
    assert philox.keep_mask((1, 1, 3, 4), 0.0, 0).all()
    assert not philox.keep_mask((1, 1, 3, 4), 1.0, 0).any()
    assert philox.keep_mask((1, 0, 3, 4), 0.5, 0).shape == (1, 0, 3, 4)


@pytest.mark.reliability(19)
def test_rng_states_accepted() -> None:
    for seed in (0, 2**63, 2**64 - 1, np.int64(5), np.uint64(2**64 - 1)):
        assert philox.normalise_rng(seed)[:2] == (int(seed), 0)
        assert philox.normalise_rng((seed, 2**64 - 1))[:2] == (int(seed), 2**64 - 1)
    drawn = [philox.normalise_rng(None) for _ in range(4)]
    assert len(set(drawn)) == 4
    assert all(0 <= state.seed < 2**64 and state.offset == 0 for state in drawn)


@pytest.mark.reliability(19)
@pytest.mark.parametrize("value", [-1, 2**64, -(2**63)])
def test_rng_states_out_of_range(value: int) -> None:
    with pytest.raises(ValueError, match=rf"rng seed: got {value}; accepted"):
        philox.normalise_rng(value)
    with pytest.raises(ValueError, match=rf"rng offset: got {value}; accepted"):
        philox.normalise_rng((1, value))
    with pytest.raises(ValueError, match=rf"^seed: got {value}; accepted"):
        philox.keep_mask((1, 1, 1, 1), 0.5, value)
    with pytest.raises(ValueError, match=rf"^offset: got {value}; accepted"):
        philox.keep_mask((1, 1, 1, 1), 0.5, 0, value)


@pytest.mark.reliability(19)
@pytest.mark.parametrize("value", [1.0, "1", True, (1,), (1, 2, 3), (1, None)])
def test_rng_states_of_the_wrong_kind(value: object) -> None:
    with pytest.raises(TypeError, match="rng"):
        philox.normalise_rng(value)  # type: ignore[arg-type]
