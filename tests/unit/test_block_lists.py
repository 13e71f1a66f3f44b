"""`nvrtc_attn.block_mask`: lists of blocks as a mask, and what is wrong with lists."""

from __future__ import annotations

from typing import Any

import modifiers
import numpy as np
import pytest

import nvrtc_attn
from nvrtc_attn.modifiers import intervals

M, N = 70, 50
INDPTR = np.array([[0, 2, 3, 3, 5, 6], [1, 2, 2, 3, 3, 5]])
INDICES = np.array([0, 2, 1, 0, 3, 2], np.int32)
"""Blocks of 16 queries and 13 keys of two heads, which share a list of indices."""


def dense() -> Any:
    kept = np.zeros((1, 2, M, N), bool)
    for h, row in np.ndindex(2, 5):
        for block in INDICES[INDPTR[h, row] : INDPTR[h, row + 1]]:
            kept[0, h, 16 * row : 16 * row + 16, 13 * block : 13 * block + 13] = True
    return kept


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_attention_sees_the_listed_blocks(framework: str) -> None:
    given: tuple[Any, Any] = (INDPTR, INDICES)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        given = tuple(map(torch.from_numpy, given))
    mask_mod = nvrtc_attn.block_mask(*given, (16, 13), M, N, mask_mod=lambda b, h, q, k: k % 5 != 2)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 2, 8)).astype(np.float32) for n in (M, N, N))
    ours = nvrtc_attn.attention(q, k, v, mask_mod=mask_mod)
    kept = dense() & (np.arange(N) % 5 != 2)
    exact, _ = modifiers.textbook(q, k, v, None, lambda b, h, i, j: kept)
    np.testing.assert_allclose(ours, exact, atol=1e-5)


def test_tiles_of_unlisted_blocks_are_empty() -> None:
    traced = nvrtc_attn.trace(None, nvrtc_attn.block_mask(INDPTR, INDICES, (16, 13), M, N))
    assert traced.valued[1] is not None
    some, every = intervals.decide(
        traced.valued[1], traced.captures, batch=[0], heads=[0, 1], query_starts=np.arange(0, M, 16), seqlen_q=M,
        key_starts=np.arange(0, N, 13), seqlen_k=N,
    )  # fmt: skip
    exact = dense()[:, :, ::16, ::13]
    np.testing.assert_array_equal(some, exact)
    np.testing.assert_array_equal(every, exact)


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 1, 2], [0, 1], r"needed is \[6\]"),
        ([0, 2, 2, 2, 2, 2], [1, 0], "unsorted"),
        ([0, 2, 2, 2, 2, 2], [1, 1], "twice"),
        ([0, 1, 1, 1, 1, 1], [4], "beyond the 4"),
        ([0, 1, 1, 1, 1, 1], [-1], "beyond the 4"),
        ([0, 2, 1, 1, 1, 1], [0, 1], "ascend"),
        ([0, 1, 1, 1, 1, 9], [0, 1], "ascend"),
        ([0, 1, 1, 1, 1, 1], [0.0], "integers"),
    ],
)
def test_lists_that_make_no_sense(indptr: list[int], indices: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nvrtc_attn.block_mask(np.array(indptr), np.array(indices), (16, 13), M, N)
