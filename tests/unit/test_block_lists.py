"""`nvrtc_attn.block_mask`: lists of blocks as a mask, and what is wrong with lists."""

from __future__ import annotations

from typing import Any

import modifiers
import numpy as np
import pytest

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.front.call import CallOptions
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


OTHER_SIZES = [
    ({"rows": M + 30}, f"for {M} queries, but the call has {M + 30}"),
    ({"rows": M - 1}, f"for {M} queries, but the call has {M - 1}"),  # as many blocks
    ({"keys": N + 1}, f"for {N} keys, but the call has {N + 1}"),
    ({"heads": 4}, "for 2 heads, but q has 4"),
    ({"heads": 1}, "for 2 heads, but q has 1"),
]
DOORS = ["core", "backward", "traced", "torch", "operator", "compiled"]


def called(door: str, mask_mod: Any, rows: int = M, keys: int = N, heads: int = 2, batch: int = 2) -> Any:
    q, k = (np.ones((batch, n, heads, 8), np.float32) for n in (rows, keys))
    if door in ("core", "traced"):
        modifier = {"score_mod": nvrtc_attn.trace(None, mask_mod)} if door == "traced" else {"mask_mod": mask_mod}
        return nvrtc_attn.attention(q, k, k, **modifier)
    if door == "backward":
        gradients = [np.empty_like(x) for x in (q, k, k)]
        lse = np.zeros((batch, heads, rows), np.float32)
        return nvrtc_attn.attention_backward(q, q, k, k, q, lse, *gradients, mask_mod=mask_mod)
    torch = pytest.importorskip("torch")
    from nvrtc_attn.torch import attention

    given = [torch.from_numpy(x) for x in (q, k, k)]
    if door == "torch":
        return attention(*given, mask_mod=mask_mod)
    if door == "operator":
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return attention(*map(mode.from_tensor, given), mask_mod=mask_mod)
    torch._dynamo.reset()
    program = torch.compile(attention, backend="aot_eager", fullgraph=True)
    return program(*given, mask_mod=mask_mod)


def lists(door: str, indptr: Any = INDPTR, **more: Any) -> Any:
    """The mask of the lists, of arrays of the door's framework, and below another function."""
    given: tuple[Any, Any] = (indptr, INDICES)
    if door in ("torch", "operator", "compiled"):
        given = tuple(map(pytest.importorskip("torch").from_numpy, given))
    blocks = nvrtc_attn.block_mask(*given, (16, 13), M, N, **more)
    return lambda b, h, q, k: (k != 3) & blocks(b, h, q, k)


@pytest.mark.parametrize("door", DOORS)
def test_calls_of_other_sizes_are_refused(door: str) -> None:
    for sizes, message in OTHER_SIZES:
        with pytest.raises(Exception, match=message) as raised:
            called(door, lists(door), **sizes)
        assert isinstance(raised.value, ValueError) or door == "compiled"
    called(door, lists(door))
    called(door, lists(door, INDPTR[0]), heads=4, batch=3)  # one head's lists, for all


def test_sizes_of_lists_that_are_inside_of_others() -> None:
    """Two masks in one function: the call has to be of the sizes of both."""
    longer = nvrtc_attn.block_mask(np.array([0, 1]), np.array([0]), 128, M + 1, N)
    both = nvrtc_attn.block_mask(INDPTR, INDICES, (16, 13), M, N, mask_mod=longer)
    for rows in (M, M + 1):
        with pytest.raises(ValueError, match="queries, but the call has"):
            called("core", both, rows=rows)


def test_lists_and_packed_sequences_and_parts() -> None:
    """Sequences may be shorter, and of a part it is the whole that counts."""
    mask_mod = lists("core")
    starts_q, starts_k = np.array([0, 20, 20 + M], np.int32), np.array([0, 11, 11 + N], np.int32)
    q, k = (np.ones((1, n, 2, 8), np.float32) for n in (20 + M, 11 + N))
    packed = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "mask_mod": mask_mod}
    nvrtc_attn.attention(q, k, k, **packed, max_seqlen_q=M, max_seqlen_k=N)
    with pytest.raises(ValueError, match="keys, but the call has 60 in the longest sequence"):
        nvrtc_attn.attention(q, k, k, **packed, max_seqlen_q=M, max_seqlen_k=60)
    q, k = q[:, :30, :1], k[:, :N, :1]
    part = nvrtc_attn.Part(heads=(1, 2), rows=(10, M))
    out = nvrtc_attn.attention(q, k, k, mask_mod=mask_mod, part=part)
    assert out.shape == q.shape
    with pytest.raises(ValueError, match="queries, but the call has 71"):
        nvrtc_attn.attention(q, k, k, mask_mod=mask_mod, part=nvrtc_attn.Part(heads=(1, 2), rows=(10, M + 1)))


def test_the_sizes_are_in_the_key_of_a_call_and_not_in_that_of_a_kernel() -> None:
    made = [nvrtc_attn.trace(None, nvrtc_attn.block_mask(INDPTR, INDICES, (16, 13), rows, N)) for rows in (M, M - 1)]
    assert made[0].program != made[1].program  # what a repeated call is found by, in `front.signature`
    kernels = []
    for modifier, rows in zip(made, (M, M - 1), strict=True):
        q, k = (np.ones((1, n, 2, 8), np.float32) for n in (rows, N))
        call = api.describe(q, k, k, options=CallOptions(), stream=None, modifier=modifier)
        kernels.append(call.problem.modifier)
    assert kernels[0] is not None
    assert kernels[0] == kernels[1]


def test_lists_are_a_function_of_tensors_too() -> None:
    """Which torch's own functions call, in its programs, too."""
    torch = pytest.importorskip("torch")
    mask_mod = nvrtc_attn.block_mask(torch.from_numpy(INDPTR), torch.from_numpy(INDICES), (16, 13), M, N)
    h, q, k = torch.arange(2)[:, None, None], torch.arange(M)[:, None], torch.arange(N)
    torch._dynamo.reset()
    program = torch.compile(lambda h, q, k: mask_mod(0, h, q, k), backend="eager", fullgraph=True)
    for call in (program, lambda h, q, k: mask_mod(0, h, q, k)):
        np.testing.assert_array_equal(call(h, q, k).numpy(), dense()[0])
