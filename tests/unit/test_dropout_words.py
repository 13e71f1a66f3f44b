"""When a launch of its own makes dropout's decisions for the Hopper forward kernel, and what it is."""

from __future__ import annotations

from typing import Any

import pytest

from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import choose_forward, forward_candidates
from nvrtc_attn.heuristics.hopper_forward_dropout import (
    BLOCKS,
    CHUNK_COLUMNS,
    FREE_BYTES,
    has_room,
    keep_words_bytes,
    makes_words,
)
from nvrtc_attn.heuristics.spec import ForwardPlanSpec, label

GPU: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
CAUSAL = {"window_right": 0}


def problem(batch: int, rows: int, heads: int, head_dim: int, **changes: Any) -> AttentionProblem:
    keys = changes.get("seqlen_k", rows)
    heads_kv = changes.get("num_heads_kv", heads)
    values: dict[str, Any] = {
        "dtype": "bfloat16", "batch": batch, "seqlen_q": rows, "seqlen_k": keys, "num_heads": heads,
        "num_heads_kv": heads_kv, "head_dim": head_dim, "head_dim_v": head_dim, "dropout_p": 0.1,
        "q": dense_layout((batch, rows, heads, head_dim), "bfloat16"),
        "k": dense_layout((batch, keys, heads_kv, head_dim), "bfloat16"),
        "v": dense_layout((batch, keys, heads_kv, head_dim), "bfloat16"),
    }  # fmt: skip
    return AttentionProblem(**{**values, **changes})


def plan(asked: AttentionProblem) -> ForwardPlanSpec:
    spec = choose_forward(asked, **GPU)
    assert isinstance(spec, ForwardPlanSpec)
    return spec


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (problem(16, 1024, 12, 64, **CAUSAL), True),
        (problem(4, 2048, 16, 128), True),
        (problem(4, 2048, 16, 128, dropout_p=0.0), False),
        # Few decisions: measured on an H200.
        (problem(1, 2048, 16, 64, **CAUSAL), False),
        (problem(2, 1024, 16, 64, **CAUSAL), False),
        (problem(8, 512, 16, 96, **CAUSAL), True),
        (problem(4, 512, 16, 128, **CAUSAL), False),
        # Of a window no more decisions are needed than it has scores.
        (problem(16, 4096, 12, 64, window_left=50, **CAUSAL), True),
        (problem(4, 4096, 12, 64, window_left=50, **CAUSAL), False),
        # Whoever finds whole tiles that a mask hides makes the decisions of the others alone.
        (problem(16, 1024, 12, 64, mask=dense_layout((16, 1, 1, 1024), "bool")), False),
        (problem(64, 192, 24, 64, mask=dense_layout((64, 1, 1, 192), "bool")), True),
        (problem(64, 1024, 12, 64, varlen=True), False),
    ],
)
def test_many_decisions_have_a_launch_of_their_own(asked: AttentionProblem, words: bool) -> None:
    spec = plan(asked)
    kernels = [launch.config.kernel for launch in spec.launches]
    assert ("dropout_words" in kernels) is words
    assert ("keep_words" in label(spec)) is words
    if words:
        assert kernels == ["dropout_words", "forward_hopper"]


def test_other_gpus_have_no_such_launch() -> None:
    spec = choose_forward(problem(16, 1024, 12, 64), arch="sm_80", num_sms=108, smem_limit=166912)
    assert "dropout_words" not in [launch.config.kernel for launch in spec.launches]


def test_a_head_dim_that_the_family_cannot_serve_is_asked_about_all_the_same() -> None:
    """The family looks at the tile before it says what it cannot do."""
    bias = dense_layout((1, 6, 1, 1), "float32")
    spec = plan(problem(1, 27, 6, 512, bias=bias))
    assert spec.main.config.kernel == "forward_portable"


@pytest.mark.parametrize(
    "asked",
    [
        problem(16, 1024, 12, 64, **CAUSAL),
        problem(4, 2050, 16, 64),
        problem(3, 1111, 24, 80, seqlen_k=777),
        problem(4, 2048, 16, 128, num_heads_kv=4, **CAUSAL),
        problem(2, 2500, 8, 160),
    ],
)
def test_the_launch_has_a_block_for_all_rows_and_keys(asked: AttentionProblem) -> None:
    making, main = plan(asked).launches
    params = dict(making.params)
    config = making.config
    rows = params["num_m_blocks"] * config.block_m // 64
    assert rows * 64 >= asked.seqlen_q
    assert params["num_m_blocks"] == dict(main.params)["num_m_blocks"]
    assert making.grid == asked.batch * asked.num_heads * rows * params["num_chunks"]
    assert params["num_chunks"] * params["chunk_rows"] * config.block_n >= asked.seqlen_k
    assert (params["num_chunks"] - 1) * params["chunk_rows"] * config.block_n < asked.seqlen_k
    assert params["chunk_rows"] * config.block_n <= CHUNK_COLUMNS
    assert making.grid >= BLOCKS * 132 or params["chunk_rows"] == 1 or params["num_chunks"] == 1
    assert (config.block_m, config.block_n) == (main.config.block_m, main.config.block_n)


def test_a_bit_for_each_score() -> None:
    """Two words of four threads for two rows of tiles of 128 keys, one up to 64 keys: 128 and 64 bits of a row."""
    asked = problem(2, 512, 4, 64)
    scores = 2 * 4 * 512 * 512
    assert keep_words_bytes(asked, 128, 128) == keep_words_bytes(asked, 64, 64) == scores // 8
    assert keep_words_bytes(asked, 128, 80) == 2 * 4 * 512 * 7 * 16
    (buffer,) = plan(problem(4, 2048, 16, 64)).workspaces
    assert (buffer.field, buffer.nbytes) == ("softmax_partial", 16 * 64 * 11 * 192 * 16)


def test_behind_the_counter_of_tickets() -> None:
    asked = problem(4, 4096, 16, 64, **CAUSAL)
    spec = plan(asked)
    making, main = (launch.config for launch in spec.launches)
    (buffer,) = spec.workspaces
    assert main.tickets
    assert making.tickets
    assert (buffer.zeroed, buffer.zeroed_bytes) == (True, 16)
    assert buffer.nbytes == 16 + keep_words_bytes(asked, main.block_m, main.block_n)


@pytest.mark.parametrize(("head_dim", "most"), [(64, 4096), (128, 8192)])
def test_no_more_memory_than_the_tensors_take(head_dim: int, most: int) -> None:
    for keys, room in ((most, True), (2 * most, False)):
        asked = problem(4, keys, 16, head_dim)
        assert makes_words(asked)
        assert has_room(asked, 192, 128) is room
        assert (plan(asked).launches[0].config.kernel == "dropout_words") is room
        assert keep_words_bytes(asked, 192, 128) > FREE_BYTES
    few_rows = problem(1, 512, 8, head_dim, seqlen_k=65536)
    assert has_room(few_rows, 128, 128)  # 34 MB


def test_no_more_than_the_kernels_count() -> None:
    """A thread's words of all key tiles have numbers of 32 bits, one word each up to 64 keys."""
    for batch, room in ((2048, True), (3072, False)):
        asked = problem(batch, 1024, 64, 64)
        assert (keep_words_bytes(asked, 64, 64) // 4 <= 2**32) is room
        assert has_room(asked, 64, 64) is room


def test_the_autotuner_tries_both() -> None:
    found = forward_candidates(problem(16, 1024, 12, 64, **CAUSAL), **GPU)
    words = [any(launch.config.kernel == "dropout_words" for launch in spec.launches) for spec in found.values()]
    assert words[0]
    assert not all(words)
