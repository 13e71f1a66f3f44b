"""What the backward pass has: products that begin with what a score_mod adds, families, blocks that share heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nvrtc_attn import UnsupportedError
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import choose_backward, hopper_backward_config, hopper_backward_tile
from nvrtc_attn.modifiers.trace import trace

TABLE = np.zeros((2, 64), np.float32)
ROWS = np.zeros(2048, np.float32)


def problem(score: Any, *, trained: bool = False, head_dim: int = 64, **changes: Any) -> AttentionProblem:
    traced = trace(score)
    layout = dense_layout((4, 2048, 16, head_dim), "bfloat16")
    values: dict[str, Any] = {
        "dtype": "bfloat16", "batch": 4, "seqlen_q": 2048, "seqlen_k": 2048, "num_heads": 16, "num_heads_kv": 16,
        "head_dim": head_dim, "head_dim_v": head_dim, "q": layout, "k": layout, "v": layout,
        "softmax_scale": head_dim**-0.5, "modifier": traced.program,
        "trained": traced.differentiable if trained else (),
    }  # fmt: skip
    return AttentionProblem(**{**values, **changes})


def added(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + TABLE[h, q - k + 32]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window_right": 0},
        {"varlen": True, "batch": 1},
        {"deterministic": True},
        {"trained": True},
        {"trained": True, "deterministic": True},
    ],
)
def test_products_begin_with_what_distances_add(changes: dict[str, Any]) -> None:
    asked = problem(added, **changes)
    tile = hopper_backward_tile.choose_tile(asked, 132)
    assert tile.begins_products
    assert tile.block_m == 128
    assert (tile.fused, tile.parts, tile.descending) == (False, 1, False)
    assert hopper_backward_config.smem_bytes(hopper_backward_config.config_of(asked, tile)) <= 232448


@pytest.mark.parametrize(
    ("score", "changes"),
    [
        (added, {"head_dim": 128}),
        (added, {"softcap": 20.0}),
        (added, {"dropout_p": 0.1}),
        (added, {"mask": dense_layout((4, 1, 1, 2048), "bool")}),
        (added, {"softmax_scale": 1e-30}),
        (lambda s, b, h, q, k: s * TABLE[h, q - k + 32], {}),
        (lambda s, b, h, q, k: s + TABLE[h, q + k], {}),
        # A row's element is no distance's: the gradient of the table is none of dS along diagonals.
        (lambda s, b, h, q, k: s + TABLE[h, q - k + 32] * ROWS[q], {"trained": True}),
    ],
)
def test_other_scores_do_not(score: Any, changes: dict[str, Any]) -> None:
    assert not hopper_backward_tile.choose_tile(problem(score, **changes), 132).begins_products


@pytest.mark.parametrize("seqlen", [200, 2048])
def test_a_family_that_does_not_serve_is_not_compared(seqlen: int) -> None:
    """Few key tiles are compared with the portable family, which has no deterministic dq in float32."""
    layout, dq = (dense_layout((1, seqlen, 4, 64), dtype) for dtype in ("bfloat16", "float32"))
    asked = AttentionProblem(
        dtype="bfloat16", batch=1, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=4, num_heads_kv=4, head_dim=64,
        head_dim_v=64, q=layout, k=layout, v=layout, dq=dq, deterministic=True,
    )  # fmt: skip
    target = {"num_sms": 132, "smem_limit": 232448}
    assert choose_backward(asked, arch="sm_90", **target).launches[-2].config.arch == "sm_90a"
    with pytest.raises(UnsupportedError, match="dq: float32 of 16-bit queries, and deterministic"):
        choose_backward(asked, arch="sm_80", **target)


@pytest.mark.parametrize(
    ("documents", "mean", "heads", "heads_kv", "changes", "blocks"),
    [
        (10, 3040, 96, 8, {}, 3),
        (40, 2187, 36, 4, {}, 3),
        (10, 1591, 48, 1, {}, 12),
        (50, 564, 32, 4, {}, 1),
        (49, 1982, 40, 10, {}, 1),
        (10, 3040, 96, 8, {"window_right": None}, 1),
        (10, 3040, 96, 8, {"deterministic": True}, 1),
    ],
)
def test_blocks_share_the_heads_of_packed_groups(
    documents: int, mean: int, heads: int, heads_kv: int, changes: dict[str, Any], blocks: int
) -> None:
    """Where key tiles of long documents would come to read different heads of their groups, more than stay in L2."""
    q, k = (dense_layout((1, documents * mean, n, 128), "bfloat16") for n in (heads, heads_kv))
    values: dict[str, Any] = {
        "dtype": "bfloat16", "batch": documents, "seqlen_q": 3 * mean, "seqlen_k": 3 * mean, "num_heads": heads,
        "num_heads_kv": heads_kv, "head_dim": 128, "head_dim_v": 128, "q": q, "k": k, "v": k, "varlen": True,
        "window_right": 0,
    }  # fmt: skip
    assert hopper_backward_tile.choose_tile(AttentionProblem(**{**values, **changes}), 132).splits == blocks


def grouped(batch: int, seqlen: int, heads: int, heads_kv: int, head_dim: int, **changes: Any) -> AttentionProblem:
    """A dense causal problem of ``heads`` on ``heads_kv``."""
    q, k = (dense_layout((batch, seqlen, n, head_dim), "bfloat16") for n in (heads, heads_kv))
    values: dict[str, Any] = {
        "dtype": "bfloat16", "batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen, "num_heads": heads,
        "num_heads_kv": heads_kv, "head_dim": head_dim, "head_dim_v": head_dim, "q": q, "k": k, "v": k,
        "window_right": 0,
    }  # fmt: skip
    return AttentionProblem(**{**values, **changes})


@pytest.mark.parametrize(
    ("asked", "arch", "kernel"),
    [
        (grouped(3, 52, 14, 2, 64), "sm_90", "backward_hopper"),
        (grouped(3, 52, 14, 2, 64, window_right=None), "sm_90", "backward_hopper"),
        (grouped(3, 52, 14, 2, 64), "sm_80", "backward_portable"),
        (grouped(3, 52, 14, 2, 64, softcap=20.0), "sm_90", "backward_portable"),
        (grouped(3, 24, 14, 2, 64), "sm_90", "backward_portable"),  # fewer rows than the Hopper kernel serves
        (grouped(3, 52, 4, 2, 64), "sm_90", "backward_portable"),
        (grouped(300, 64, 8, 2, 64), "sm_90", "backward_portable"),
    ],
)
def test_few_blocks_do_not_take_the_heads_of_short_groups_in_turn(
    asked: AttentionProblem, arch: str, kernel: str
) -> None:
    found = choose_backward(asked, arch=arch, num_sms=132, smem_limit=232448)
    assert kernel in [launch.config.kernel for launch in found.launches]


def test_a_short_plan_stays_where_the_hopper_kernel_serves_nothing() -> None:
    """It stores dq; the portable family's other plans add it up."""
    found = choose_backward(grouped(3, 24, 14, 2, 64), arch="sm_90", num_sms=132, smem_limit=232448)
    assert [launch.config.kernel for launch in found.launches] == ["backward_portable"]


@pytest.mark.parametrize(
    ("asked", "blocks"),
    [
        (grouped(3, 283, 24, 8, 128), 3),
        (grouped(2, 400, 32, 8, 128), 4),
        (grouped(5, 330, 16, 4, 128), 4),
        (grouped(4, 250, 40, 8, 128), 5),
        (grouped(2, 129, 48, 8, 128), 3),
        (grouped(16, 256, 32, 8, 128), 1),
        (grouped(2, 261, 24, 8, 128, window_right=None), 1),
    ],
)
def test_blocks_share_groups_of_few_short_key_tiles(asked: AttentionProblem, blocks: int) -> None:
    """As few as measured best: more keep multiprocessors busy, and add dk and dv up."""
    assert hopper_backward_tile.choose_tile(asked, 132).splits == blocks
