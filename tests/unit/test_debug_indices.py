"""Under ``NVRTC_ATTN_DEBUG``, indices of arrays that functions captured: here the device's memory is the host's."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.cpu import reference
from nvrtc_attn.front.call import CallOptions
from nvrtc_attn.plans import debug

M, N, H = 12, 15, 4
RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((2, M, H, 8), dtype=np.float32), RNG.standard_normal((2, N, H, 8), dtype=np.float32)


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug.driver, "read_memory", lambda at, size, device, stream: ctypes.string_at(at, size))


def table(*shape: int, dtype: str = "float32") -> Any:
    return RNG.integers(0, 3, shape).astype(dtype)


def check(score_mod: Any = None, mask_mod: Any = None, q: Any = Q, k: Any = K, **given: Any) -> None:
    names = ("mask", "bias", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    operands = {name: given.pop(name) for name in names if name in given}
    modifier = nvrtc_attn.trace(score_mod, mask_mod)
    call = api.describe(q, k, k, **operands, options=CallOptions(**given), stream=None, modifier=modifier)
    debug.check_device_indices(call)


DISTANCES, SHORT, HOLES = table(H, M + N), table(H, 16), table(H, M + N)[:, ::2]
IDS, FAR = np.arange(N) // 4, np.array([0, 1, 2, 99] * 4, np.int32)
HALF = table(H, N, dtype="float16")


def test_ranges_prove_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed then: of any length it takes no time."""
    monkeypatch.setattr(reference, "attention_forward", None)
    check(lambda s, b, h, q, k: s + DISTANCES[h, q - k + N])
    check(
        lambda s, b, h, q, k: s + DISTANCES[h, np.minimum(abs(q - k), 3)] * HALF[h, k], lambda b, h, q, k: IDS[q] == 1
    )
    check(lambda s, b, h, q, k: s + HOLES[h, (q - k + N) // 2])


def test_pairs_that_masks_hide_are_not_looked_at() -> None:
    def near(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + SHORT[h, q - k]

    check(near, lambda b, h, q, k: q >= k)
    check(near, causal="top_left")
    check(near, causal="top_left", mask=table(2, 1, 1, N, dtype="bool"))
    check(near, mask=np.tril(np.ones((1, 1, M, N), np.bool_)))
    for more in ({}, {"causal": "bottom_right"}, {"window_size": (None, 1)}):
        with pytest.raises(ValueError, match=r"captured array of shape \(4, 16\) is out of range"):
            check(near, **more)


@pytest.mark.parametrize("value", [2**31, 2**40 + 1, -(2**31) - 1])
def test_integers_beyond_those_of_kernels_are_refused(value: int) -> None:
    """On the CPU always: its answer would not be the GPU's, which takes the lower half."""
    ids = np.arange(N) // 4
    check(mask_mod=lambda b, h, q, k: ids[q] == ids[k])
    ids[3] = value

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[q] == ids[k]

    with pytest.raises(ValueError, match=f"int64 holds {value}: integers .* are int32"):
        check(mask_mod=same)
    with pytest.raises(ValueError, match=f"int64 holds {value}: integers .* are int32"):
        nvrtc_attn.attention(Q, K, K, mask_mod=same)


def test_arrays_of_any_layout() -> None:
    turned, backwards = table(N, 5).T, table(9)[::-1]
    check(lambda s, b, h, q, k: s + turned[h, k] * backwards[q % 9])
    with pytest.raises(ValueError, match=r"shape \(5, 15\) is out of range"):
        check(lambda s, b, h, q, k: s + turned[h + 2, k] * backwards[q % 9])
    with pytest.raises(ValueError, match=r"shape \(9,\) is out of range"):
        check(lambda s, b, h, q, k: s * 0.5, lambda b, h, q, k: ~(backwards[q - 1] < 0))


def test_indices_of_indices() -> None:
    small = table(3)
    with pytest.raises(ValueError, match=r"shape \(3,\) is out of range"):
        check(lambda s, b, h, q, k: s + small[FAR[q]])
    check(lambda s, b, h, q, k: s + small[FAR[q]], lambda b, h, q, k: q % 4 != 3)


def test_what_depends_on_the_score_is_not_looked_at() -> None:
    small = table(3)
    check(lambda s, b, h, q, k: s + small[(s * 100).astype(np.int32)])


def test_packed_sequences_have_their_own_positions() -> None:
    small = table(6)
    x = K.reshape(1, 2 * N, H, 8)
    starts = np.array([0, 6, 12, 17, 2 * N], np.int32)
    packed: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 13, "max_seqlen_k": 13}
    with pytest.raises(ValueError, match=r"shape \(6,\) is out of range"):
        check(lambda s, b, h, q, k: s + small[k], q=x, k=x, **packed)
    check(lambda s, b, h, q, k: s + small[k], lambda b, h, q, k: (b < 3) | (k < 6), q=x, k=x, **packed)


def test_parts_have_positions_of_the_whole() -> None:
    rows = table(M + 1)
    part = nvrtc_attn.Part(rows=(2, M + 2))
    with pytest.raises(ValueError, match=r"shape \(13,\) is out of range"):
        check(lambda s, b, h, q, k: s + rows[q], part=part)
    check(lambda s, b, h, q, k: s + rows[q - 2], part=part)


NAMES, ALL = np.arange(N) > 3, np.ones(N, np.bool_)
UNGUARDED = [
    lambda b, h, q, k: NAMES[k + 1],  # of the last key, which reads as False
    lambda b, h, q, k: NAMES[k + 1] & ALL[k],
    lambda b, h, q, k: ~NAMES[k + 1],
    lambda b, h, q, k: (k < 3) | NAMES[k + 1],
    lambda b, h, q, k: IDS[k + 1] > 2,
    lambda b, h, q, k: ALL[IDS[k + 1]] & NAMES[k],  # an index of an index
    lambda b, h, q, k: np.where(NAMES[k + 1], k < 3, k > 3),
    lambda b, h, q, k: np.where(k > 3, NAMES[k + 1], True),
    lambda b, h, q, k: (NAMES[k + 1] | (q > 3)) & ALL[k],
]
GUARDED = [
    lambda b, h, q, k: (k < N - 1) & NAMES[k + 1],
    lambda b, h, q, k: NAMES[k + 1] & (k < N - 1),
    lambda b, h, q, k: NAMES[k + 1] & (IDS[k] < 3),  # by another array
    lambda b, h, q, k: (k < N - 1) & (NAMES[k + 1] | (q > 3)),
    lambda b, h, q, k: np.where(k < N - 1, NAMES[k + 1], False),
    lambda b, h, q, k: np.where(k == N - 1, False, NAMES[k + 1] | (IDS[k] == 1)),
    lambda b, h, q, k: (q < k) | NAMES[k],
]


@pytest.mark.parametrize("door", ["cpu", "debug"])
def test_an_element_that_is_not_there_hides_no_pair(door: str) -> None:
    def call(mask_mod: Any, **more: Any) -> None:
        if door == "debug":
            check(None, mask_mod, **more)
        else:
            nvrtc_attn.attention(Q, K, K, mask_mod=mask_mod, **more)

    for mask_mod in UNGUARDED:
        with pytest.raises(ValueError, match=r"mask_mod: .* captured array of shape \(15,\) is out of range"):
            call(mask_mod)
    for mask_mod in GUARDED:
        call(mask_mod)
    # Keys that the other conditions of the call hide may be beyond it.
    call(UNGUARDED[0], causal="top_left")
    call(UNGUARDED[0], mask=np.arange(N).reshape(1, 1, 1, N) < N - 1)
    call(UNGUARDED[0], seqused_k=np.array([N - 1, 3], np.int32))
    with pytest.raises(ValueError, match="out of range"):
        call(UNGUARDED[0], seqused_k=np.array([N - 1, N], np.int32))
