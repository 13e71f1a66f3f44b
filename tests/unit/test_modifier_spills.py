"""Kernels whose modifier takes more registers than there are: other tiles are tried, once, and the log says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import modifiers
import numpy as np
import pytest

from nvrtc_attn import heuristics
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import tile_words
from nvrtc_attn.modifiers.trace import trace
from nvrtc_attn.plans import plan

TARGET: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}


def modified(name: str) -> AttentionProblem:
    case = next(x for x in modifiers.named_cases() if x.name == name)
    layout = dense_layout((8, 768, 8, 64), "float16")
    return AttentionProblem(
        dtype="float16", batch=8, seqlen_q=768, seqlen_k=768, num_heads=8, num_heads_kv=8, head_dim=64, head_dim_v=64,
        q=layout, k=layout, v=layout, softmax_scale=0.125,
        modifier=trace(*case.make(case.arrays((1, 4, 9, 9), np.random.default_rng(0)))).program,
    )  # fmt: skip


def test_narrower_tiles_are_of_the_same_kernel() -> None:
    asked = modified("rows and columns")
    chosen = heuristics.choose_forward(asked, **TARGET).main.config
    others = [x.main.config for x in heuristics.narrower_forward(asked, **TARGET)]
    assert [x.block_n for x in others] == [chosen.block_n - 32, chosen.block_n - 64]
    assert {x.kernel for x in others} == {"forward_hopper"}
    asked = modified("relative bias")
    others = [x.main.config for x in heuristics.narrower_forward(asked, **TARGET)]
    assert [(x.block_m, x.block_n, x.num_stages) for x in others] == [(192, 96, 4), (192, 80, 4)]
    assert heuristics.narrower_forward(asked, **TARGET | {"arch": "sm_80"}) == []


@pytest.mark.parametrize("name", ["softcap and alibi", "head scale"])
def test_narrow_tiles_of_many_rows_have_one_of_fewer(name: str) -> None:
    asked = modified(name)
    chosen = heuristics.choose_forward(asked, **TARGET).main.config
    assert (chosen.block_m, chosen.block_n) == (192, 64)
    assert [(x.main.config.block_m, x.main.config.block_n) for x in heuristics.narrower_forward(asked, **TARGET)] == [
        (128, 64)
    ]


@pytest.mark.parametrize(
    ("spilled", "taken", "count"),
    [((24, 0, 8), 0, 2), ((48, 24), 24, 2), ((0, 8), 0, 1), ((40, 64), 40, 2), ((), 40, 0)],
)
def test_the_first_that_spills_least(spilled: tuple[int, ...], taken: int, count: int) -> None:
    """``spilled``: by the other tiles; the table's spills 40 bytes. ``count``: how many are made."""
    tried: list[int] = []

    def of(nbytes: Any) -> Any:
        tried.append(nbytes)
        return SimpleNamespace(local_bytes=nbytes)

    first: Any = SimpleNamespace(local_bytes=40)
    assert plan._least_spilled(first, spilled, of).local_bytes == taken  # type: ignore[arg-type]
    assert tried == list(spilled[:count])


@pytest.mark.parametrize("bits", [False, True])
def test_light_modifiers_keep_the_widest_tile(bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three warp-groups of 64 rows have 160 registers a thread: beside 112 scores they read no element.

    Beside 64 functions are computed, too. Tables of distances and T5's buckets are read by other warps. Beside 96 a
    mask is asked that reads none of a query or key, or any one by a launch before.
    """
    monkeypatch.setattr(tile_words, "KEEPS_BITS", bits)
    monkeypatch.setattr(tile_words, "MIN_FLOPS", 0)
    light = {"alibi", "alibi by formula", "head scale", "distance", "temperature", "prefix", "relative bias", "t5"}
    light |= {"softcap and alibi"}
    heavy = {"documents", "rows and columns"}
    rows = {}
    for name in light | heavy:
        rows[name] = heuristics.choose_forward(modified(name), **TARGET).main.config.block_m
    assert {name for name, count in rows.items() if count == 192} == (light | {"documents"} if bits else light)
