"""The case generator: it covers what it claims, replays, and its strides and rounding are what they say."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cases
import numpy as np
import pytest

NAMED = cases.named_cases()
RANDOM = cases.random_cases(seed=3, count=400)

FEATURES: dict[str, Callable[[cases.Case], bool]] = {
    "float16": lambda c: c.dtype == "float16",
    "bfloat16": lambda c: c.dtype == "bfloat16",
    "float32": lambda c: c.dtype == "float32",
    "gqa": lambda c: 1 < c.num_heads_kv < c.num_heads,
    "mqa": lambda c: c.num_heads_kv == 1 < c.num_heads,
    "other value width": lambda c: c.head_dim != c.head_dim_v,
    "odd head dim": lambda c: c.head_dim % 8 != 0,
    "head dim above 256": lambda c: c.head_dim > 256,
    "bottom right": lambda c: c.causal is True and c.seqlen_q != c.seqlen_k,
    "top left": lambda c: c.causal == "top_left" and c.seqlen_q != c.seqlen_k,
    "tall causal": lambda c: c.causal is True and c.seqlen_q > c.seqlen_k,
    "window": lambda c: not c.causal and c.window_size != (None, None),
    "causal window": lambda c: bool(c.causal) and c.window_size != (None, None),
    "broadcast bias": lambda c: c.bias is not None and "1" in c.bias,
    "whole bias": lambda c: c.bias == "bhqk",
    "float32 bias": lambda c: c.bias is not None and c.bias_dtype == "float32" and c.dtype != "float32",
    "mask": lambda c: c.mask is not None and not c.mask_empty,
    "mask with empty rows": lambda c: c.mask_empty,
    "softcap": lambda c: c.softcap > 0,
    "dropout": lambda c: 0 < c.dropout_p < 1,
    "varlen": lambda c: c.varlen and not c.seqused_k,
    "seqused": lambda c: bool(c.seqused_k),
    "tail tokens": lambda c: c.tail != (0, 0),
    "empty sequence": lambda c: any(0 in pair for pair in c.seqlens),
    "dlse": lambda c: c.dlse,
    "sink": lambda c: c.sink is not None,
    "16-bit sink": lambda c: c.sink == "same" and c.dtype != "float32",
    "deterministic": lambda c: c.deterministic,
    "scale": lambda c: c.softmax_scale is not None,
    **{layout: lambda c, layout=layout: c.layout == layout for layout in cases.LAYOUTS},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_both_lists_cover_the_feature(feature: str) -> None:
    assert any(map(FEATURES[feature], NAMED))
    assert sum(map(FEATURES[feature], RANDOM)) >= 4


def test_named_cases_hold_the_promised_sizes() -> None:
    names = [case.name for case in NAMED]
    assert len(set(names)) == len(names)
    assert {case.head_dim for case in NAMED} >= set(cases.HEAD_DIMS)
    assert {(case.seqlen_q, case.seqlen_k) for case in NAMED} >= set(cases.LENGTHS)
    assert {case.bias for case in NAMED} >= set(cases.BIAS_SHAPES)
    assert len(set(cases.BIAS_SHAPES)) == 16
    assert {"empty-batch", "empty-queries", "empty-keys", "empty-heads"} <= set(names)


def test_random_cases_replay_and_stay_small() -> None:
    assert cases.random_cases(3, 400) == RANDOM
    assert cases.random_case(3, 17) == RANDOM[17]
    assert cases.random_cases(4, 400) != RANDOM
    flops = [case.flops for case in RANDOM]
    assert np.median(flops) < 20e6
    assert max(flops) < 200e6
    for case in RANDOM:
        assert case.num_heads % case.num_heads_kv == 0
        if case.varlen:
            assert case.batch == len(case.seqlens)
            assert case.seqlen_q == max(m for m, _ in case.seqlens)
            assert case.seqlen_k == max(n for _, n in case.seqlens)
            assert len(case.seqused_k) in (0, case.batch)


@pytest.mark.parametrize("case", NAMED + RANDOM[:50], ids=lambda case: case.name)
def test_arrays_have_the_announced_shapes_and_replay(case: cases.Case) -> None:
    if case.flops > 300e6:
        case = dataclasses.replace(case, head_dim=8, head_dim_v=8)
    arrays, shapes = cases.make_arrays(case), cases.shapes(case)
    again = cases.make_arrays(case)
    for name, x in arrays.items():
        assert np.array_equal(x, again[name])
        if name in shapes:
            assert x.shape == shapes[name]
            assert x.dtype == (np.bool_ if name == "mask" else np.float32)
            assert x.flags.c_contiguous
        else:
            assert x.dtype == np.int32
    assert ("bias" in arrays) == (case.bias is not None)
    assert ("dlse" in arrays) == case.dlse
    if case.varlen:
        assert arrays["cu_seqlens_k"][-1] + case.tail[1] == arrays["k"].shape[1]


@pytest.mark.reliability(39)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize(
    ("name", "shape"), [("q", (3, 5, 2, 8)), ("v", (1, 7, 1, 3)), ("lse", (2, 3, 5)), ("bias", (1, 2, 1, 9))]
)
def test_placements_hold_the_data_and_nothing_else(layout: str, name: str, shape: tuple[int, ...]) -> None:
    for seed in range(20 if layout == "random" else 1):
        where = cases.placement(name, shape, layout, np.random.default_rng(seed))
        indices = where.offset + np.tensordot(where.strides, np.indices(shape), 1)
        assert indices.min() == where.offset
        assert indices.max() == where.size - 1
        aliased = layout == "expanded" and name == "v"
        assert np.unique(indices).size == indices.size or (aliased and where.strides[0] == 0)
        x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        if aliased:
            x[:] = x[:1]
        assert np.array_equal(cases.place(x, where), x)


def test_layouts_are_what_they_are_called() -> None:
    shape = (2, 5, 3, 8)
    strides = {layout: cases.placement("k", shape, layout).strides for layout in cases.LAYOUTS}
    assert strides["contiguous"] == (120, 24, 8, 1)
    assert strides["bhmk"] == (120, 8, 40, 1)
    assert strides["packed"] == (360, 72, 8, 1)
    assert cases.placement("k", shape, "packed").offset == 24
    assert strides["padded_rows"] == (150, 30, 10, 1)
    assert strides["last_strided"] == (240, 48, 16, 2)
    assert cases.placement("k", shape, "unaligned").offset == 1
    assert strides["expanded"] == (0, 24, 8, 1)
    drawn = {cases.placement("k", shape, "random", np.random.default_rng(n)).strides for n in range(10)}
    assert len(drawn) > 5
    with pytest.raises(ValueError, match="layout: got 'diagonal'"):
        cases.placement("k", shape, "diagonal")


def test_rounding_to_bfloat16() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(20_000) * 10.0 ** rng.integers(-38, 38, 20_000)).astype(np.float32)
    ties = (np.arange(1, 2001, dtype=np.uint32) * 0x8000 + 0x3F800000).view(np.float32)
    x = np.concatenate([x, ties, np.array([0.0, -0.0, np.inf, -np.inf, np.finfo(np.float32).max], np.float32)])
    rounded = cases.round_to(x, "bfloat16")
    assert not (rounded.view(np.uint32) & 0xFFFF).any()
    below = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    with np.errstate(over="ignore"):
        above = (below.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    finite = np.isfinite(x) & np.isfinite(above)
    wide, low, high = (a[finite].astype(np.float64) for a in (x, below, above))
    nearest = np.where(np.abs(wide - low) < np.abs(high - wide), low, high)
    tie = np.abs(wide - low) == np.abs(high - wide)
    even = np.where((below[finite].view(np.uint32) >> 16) & 1, high, low)
    assert np.array_equal(rounded[finite], np.where(tie, even, nearest).astype(np.float32))
    assert tie.sum() >= 900
    assert np.isnan(cases.round_to(np.array([np.nan]), "bfloat16")).all()
    assert cases.round_to(np.array([np.finfo(np.float32).max]), "bfloat16") == np.inf


@pytest.mark.reliability(31)
def test_the_error_rule_separates_precisions() -> None:
    # The rule must accept the math in its own precision and reject the math in the next lower one.
    case = next(case for case in NAMED if case.name == "basic-float16")
    for dtype, lower in (("float32", "float16"), ("float16", "bfloat16")):
        case = dataclasses.replace(case, dtype=dtype)
        arrays = cases.cast_inputs(case, cases.make_arrays(case))
        exact, low, worse = (cases.attention_dense(case, arrays, p) for p in ("float64", dtype, lower))
        for name, truth in exact.items():
            if name == "lse":
                continue
            bound = cases.error_bound(truth, low[name], dtype)
            assert np.abs(low[name] - truth).max() <= bound
            assert np.abs(worse[name] - truth).max() > bound, (name, dtype)


@pytest.mark.reliability(31)
def test_breaches_of_the_error_rule_are_named() -> None:
    case = next(case for case in NAMED if case.name == "basic-float16")
    arrays = cases.make_arrays(case)
    rounded = cases.cast_inputs(case, arrays)
    exact, low = (cases.attention_dense(case, rounded, precision) for precision in ("float64", "float16"))
    assert cases.breaches(case, exact, exact, low, arrays) == []

    def breach(name: str, wrong: float) -> list[str]:
        changed = exact[name].astype(np.float64)
        changed.flat[changed.size // 2] = wrong
        return cases.breaches(case, {**exact, name: changed}, exact, low, arrays)

    for name in exact:
        for wrong, line in ((9.0, "max error"), (np.nan, "1 elements"), (np.inf, "1 elements")):
            (found,) = breach(name, wrong)
            assert found.startswith(f"{name}: {line}")
    exact["lse"][..., 0] = -np.inf  # a row without keys
    assert cases.breaches(case, exact, exact, low, arrays) == []
    (found,) = cases.breaches(case, {"lse": np.zeros_like(exact["lse"])}, exact, low, arrays)
    assert found == "lse: infinities differ from the oracle's"


@pytest.mark.reliability(103)
def test_importing_the_cases_imports_no_framework() -> None:
    here = Path(cases.__file__).parent
    code = "import sys, cases; assert not {'torch', 'jax', 'cupy', 'cuda'} & set(sys.modules), sorted(sys.modules)"
    paths = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]; "
    subprocess.run([sys.executable, "-c", paths + code], check=True, timeout=60)
