"""The NumPy path: against the textbook, against finite differences of itself, and at the edges of the contract."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import cases
import numpy as np
import pytest

from nvrtc_attn.base.errors import UnsupportedError
from nvrtc_attn.cpu.reference import attention_backward, attention_forward
from nvrtc_attn.front import philox

Arrays = dict[str, Any]
SMALL_BLOCKS = {"block_m": 24, "block_n": 40}

NAMED = [case for case in cases.named_cases() if case.flops < 40e6]
RANDOM = cases.random_cases(seed=20, count=120, max_flops=8e6)


def run(case: cases.Case, arrays: Arrays, **options: Any) -> Arrays:
    """Forward and backward; results under the names of `cases.attention_dense`."""
    options = {**cases.reference_options(case, arrays), **options}
    q, k, v = (arrays[name] for name in "qkv")
    out, lse = attention_forward(q, k, v, **options)
    gradients = attention_backward(
        arrays["dout"], q, k, v, out, lse, dlse=arrays.get("dlse"), bias_grad=case.bias_grad,
        sink_grad=case.sink is not None, **options,
    )  # fmt: skip
    named = zip(("out", "lse", "dq", "dk", "dv", "dbias", "dsink"), (out, lse, *gradients), strict=True)
    return {name: x for name, x in named if x is not None}


def exact_inputs(case: cases.Case) -> Arrays:
    return cases.cast_inputs(case, cases.make_arrays(case), np.float64)


def assert_same(actual: Arrays, expected: Arrays, tolerance: float = 1e-11) -> None:
    assert set(actual) == set(expected)
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape, name
        finite = np.isfinite(want)
        assert np.array_equal(got[~finite], want[~finite]), name
        scale = max(1.0, np.abs(want[finite]).max(initial=0))
        error = np.abs(got[finite] - want[finite]).max(initial=0)
        assert error <= tolerance * scale, f"{name}: error {error}, scale {scale}"


def assert_bitwise(actual: Arrays, expected: Arrays) -> None:
    assert set(actual) == set(expected)
    for name, want in expected.items():
        assert actual[name].tobytes() == want.tobytes(), name


# ---------------------------------------------------------------------------------------------------------------------
# Against the textbook


@pytest.mark.reliability(5, 15, 16, 17, 21)
@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_named_case_equals_the_textbook(case: cases.Case) -> None:
    arrays = exact_inputs(case)
    assert_same(run(case, arrays), cases.attention_dense(case, arrays))


@pytest.mark.reliability(32)
@pytest.mark.parametrize("case", RANDOM, ids=lambda case: case.name)
def test_random_case_in_small_blocks_equals_the_textbook(case: cases.Case) -> None:
    arrays = exact_inputs(case)
    assert_same(run(case, arrays, **SMALL_BLOCKS), cases.attention_dense(case, arrays))


@pytest.mark.parametrize("blocks", [(1, 1), (7, 1000), (1000, 7), (10_000, 10_000)])
def test_blocks_change_nothing_but_rounding(blocks: tuple[int, int]) -> None:
    case = cases.make_case(
        "blocks", seqlen_q=37, seqlen_k=41, head_dim=8, num_heads=4, num_heads_kv=2, causal=True, dropout_p=0.3,
        bias="1hqk", mask="b1qk", window_size=(20, 0), dlse=True, offset=3,
    )  # fmt: skip
    arrays = exact_inputs(case)
    assert_same(run(case, arrays, block_m=blocks[0], block_n=blocks[1]), run(case, arrays), 1e-13)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["basic-float32", "everything", "gqa-8-2-True", "softcap", "dropout-0.5", "varlen-everything", "bias-11qk"]
)
def test_float32_path_obeys_the_error_rule(name: str, precision: str) -> None:
    (case,) = (dataclasses.replace(c, dtype=precision) for c in cases.named_cases() if c.name == name)
    arrays = cases.make_arrays(case)
    exact = cases.attention_dense(case, cases.cast_inputs(case, arrays))
    single = cases.cast_inputs(case, arrays, np.float32)
    actual, low = run(case, single), cases.attention_low_precision(case, single)
    for key, truth in exact.items():
        assert actual[key].dtype == np.float32
        got = actual[key] if key == "lse" else cases.round_to(actual[key], precision)
        finite = np.isfinite(truth)
        # lse stays in float32 in every precision.
        error = np.abs(got[finite] - truth[finite]).max(initial=0)
        assert error <= cases.error_bound(truth, low[key], "float32" if key == "lse" else precision), key


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, "bfloat16"])
def test_results_have_the_input_dtype(dtype: Any) -> None:
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    case = cases.make_case("dtype", seqlen_q=9, seqlen_k=12, head_dim=8, bias="1hqk", dlse=True)
    arrays = cases.make_arrays(case)
    cast = {name: x.astype(dtype) if name in ("q", "k", "v", "dout") else x for name, x in arrays.items()}
    results = run(case, cast)
    statistic = np.float64 if dtype == np.float64 else np.float32
    assert {name: x.dtype for name, x in results.items()} == {
        **dict.fromkeys(("out", "dq", "dk", "dv"), np.dtype(dtype)),
        "lse": statistic,
        "dbias": np.float32,
    }
    widened = {name: x.astype(np.float64) for name, x in cast.items()}
    exact = cases.attention_dense(case, widened)
    for name, want in exact.items():
        np.testing.assert_allclose(results[name].astype(np.float64), want, rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Against finite differences


def gradient_cases() -> Iterator[cases.Case]:
    sizes = {"seqlen_q": 5, "seqlen_k": 7, "head_dim": 3, "head_dim_v": 4, "num_heads": 4, "num_heads_kv": 2}
    everything = {"softcap": 1.5, "softmax_scale": 0.7, "dropout_p": 0.3, "dlse": True, "mask": "bhqk"}
    for causal in (False, True, "top_left"):
        yield cases.make_case(f"causal-{causal}", **sizes, causal=causal, dlse=True)
        tall = {**sizes, "seqlen_q": 8, "seqlen_k": 4}
        yield cases.make_case(f"causal-tall-{causal}", **tall, causal=causal, dlse=True)
        yield cases.make_case(f"window-{causal}", **sizes, causal=causal, window_size=(2, 1))
        name = f"everything-{causal}"
        yield cases.make_case(name, **sizes, **everything, causal=causal, window_size=(4, 1), bias="bhqk")
    for name, fields in {
        "scale": {"softmax_scale": -0.4},
        "softcap": {"softcap": 0.8},
        "mask": {"mask": "1h1k"},
        "mask-empty": {"mask": "bhqk", "mask_empty": True, "dlse": True},
        "dropout": {"dropout_p": 0.4, "offset": 5},
        "sink": {"sink": "float32", "dlse": True},
        "sink-empty-rows": {"sink": "float32", "mask": "bhqk", "mask_empty": True, "dlse": True, "dropout_p": 0.3},
        "mqa": {"num_heads": 3, "num_heads_kv": 1},
    }.items():
        yield cases.make_case(name, **{**sizes, **fields})
    for spec in cases.BIAS_SHAPES:
        yield cases.make_case(f"bias-{spec}", **sizes, bias=spec, softcap=1.2, causal=True, dropout_p=0.2, dlse=True)
    lengths, used = ((5, 7), (3, 2), (0, 4), (4, 0), (2, 6)), (6, 1, 4, 0, 6)
    varlen = {"num_heads": 2, "num_heads_kv": 1, "head_dim": 3, "seqlens": lengths, "tail": (2, 1), "dlse": True}
    for causal in (False, True, "top_left"):
        yield cases.make_case(f"varlen-{causal}", **varlen, causal=causal)
        yield cases.make_case(f"varlen-sink-{causal}", **varlen, causal=causal, sink="float32")
        yield cases.make_case(
            f"varlen-everything-{causal}", **varlen, causal=causal, seqused_k=used, softcap=1.1, dropout_p=0.25,
            window_size=(3, 1), head_dim_v=2,
        )  # fmt: skip


@pytest.mark.slow(
    sample=[case.name for case in gradient_cases() if case.bias is None or case.name in ("bias-1hqk", "bias-b11k")]
)
@pytest.mark.reliability(32)
@pytest.mark.parametrize("case", list(gradient_cases()), ids=lambda case: case.name)
@pytest.mark.turns(3)
def test_gradients_equal_finite_differences(case: cases.Case) -> None:
    # d/dt loss(x + t u) at 0, central, with loss = <dout, out> + <dlse, lse>: error O(step^2) + O(eps / step).
    arrays = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in cases.make_arrays(case).items()}
    blocks = {"block_m": 4, "block_n": 3}
    results = run(case, arrays, **blocks)
    reached = np.isfinite(results["lse"])

    def loss(name: str, x: Any) -> float:
        moved = {**arrays, name: x}
        out, lse = attention_forward(
            moved["q"], moved["k"], moved["v"], **cases.reference_options(case, moved), **blocks
        )
        total = float((out * arrays["dout"]).sum())
        return total + float((lse[reached] * arrays["dlse"][reached]).sum()) if case.dlse else total

    rng = np.random.default_rng(7)
    step = 1e-5
    for name in ("q", "k", "v", "bias", "sink"):
        if name not in arrays:
            continue
        gradient = results["d" + name]
        for _ in range(6):
            direction = rng.standard_normal(arrays[name].shape)
            ahead, behind = (loss(name, arrays[name] + sign * step * direction) for sign in (1, -1))
            want = (ahead - behind) / (2 * step)
            assert float((gradient * direction).sum()) == pytest.approx(want, rel=1e-6, abs=1e-7), name


@pytest.mark.reliability(32)
def test_every_single_gradient_equals_its_finite_difference() -> None:
    # Directions can hide an element whose gradient is misplaced among equals; here each element moves alone.
    case = cases.make_case(
        "element-wise", batch=1, seqlen_q=4, seqlen_k=5, head_dim=2, num_heads=2, num_heads_kv=1, causal=True,
        bias="1h1k", softcap=1.3, dropout_p=0.2, dlse=True, window_size=(3, 0), sink="float32",
    )  # fmt: skip
    arrays = {name: x.astype(np.float64) for name, x in cases.make_arrays(case).items()}
    results = run(case, arrays)
    step = 1e-5
    for name in ("q", "k", "v", "bias", "sink"):
        for index in np.ndindex(arrays[name].shape):
            losses = []
            for sign in (1, -1):
                moved = {**arrays, name: arrays[name].copy()}
                moved[name][index] += sign * step
                out, lse = attention_forward(moved["q"], moved["k"], moved["v"], **cases.reference_options(case, moved))
                losses.append(float((out * arrays["dout"]).sum() + (lse * arrays["dlse"]).sum()))
            want = (losses[0] - losses[1]) / (2 * step)
            assert results["d" + name][index] == pytest.approx(want, rel=1e-6, abs=1e-8), (name, index)


# ---------------------------------------------------------------------------------------------------------------------
# Rows without keys, poison, special values


def assert_rows_empty(results: Arrays, rows: Any) -> None:
    """``rows``: bool, along the query dim."""
    assert not results["out"][:, rows].any()
    assert (results["lse"][:, :, rows] == -np.inf).all()
    assert not results["dq"][:, rows].any()
    for name, x in results.items():
        assert not np.isnan(x).any(), name


@pytest.mark.reliability(15)
@pytest.mark.parametrize("compute_dtype", [np.float32, np.float64])
def test_causal_rows_above_the_first_key(compute_dtype: Any) -> None:
    case = cases.make_case("tall", seqlen_q=50, seqlen_k=20, head_dim=16, causal=True, dlse=True, bias="bhqk")
    results = run(case, cases.make_arrays(case), compute_dtype=compute_dtype, **SMALL_BLOCKS)
    assert_rows_empty(results, np.arange(50) < 30)
    assert not results["dbias"][:, :, :30].any()
    assert np.isfinite(results["lse"][:, :, 30:]).all()


@pytest.mark.reliability(16)
@pytest.mark.parametrize(
    ("causal", "window", "empty"),
    [
        (False, (4, 0), np.arange(50) < 30),
        (True, (3, 7), np.arange(50) < 30),
        ("top_left", (2, 0), np.arange(50) > 21),
        (False, (0, -1), np.ones(50, bool)),  # An inverted window holds nothing.
    ],
)
def test_window_that_excludes_every_key(causal: Any, window: tuple[int, int], empty: Any) -> None:
    case = cases.make_case(
        "window", seqlen_q=50, seqlen_k=20, head_dim=16, causal=causal, window_size=window, dlse=True
    )
    results = run(case, cases.make_arrays(case), **SMALL_BLOCKS)
    assert_rows_empty(results, empty)
    assert np.isfinite(results["lse"][:, :, ~empty]).all()


@pytest.mark.reliability(21)
@pytest.mark.parametrize("how", ["mask", "bias"])
def test_rows_masked_everywhere(how: str) -> None:
    case = cases.make_case("masked", seqlen_q=30, seqlen_k=70, head_dim=16, dlse=True, **{how: "bhqk"})
    arrays = cases.make_arrays(case)
    empty = np.arange(30) % 3 == 1
    arrays[how][:, :, empty] = False if how == "mask" else -np.inf
    results = run(case, arrays, **SMALL_BLOCKS)
    assert_rows_empty(results, empty)
    if how == "bias":
        assert not results["dbias"][:, :, empty].any()
        # A prefix of -inf (a whole key block) followed by finite scores is not an empty row.
        arrays["bias"][:, :, 0, :60] = -np.inf
        assert np.isfinite(run(case, arrays, **SMALL_BLOCKS)["out"][:, 0]).all()


@pytest.mark.reliability(21)
def test_rows_without_keys_shed_poison() -> None:
    # Padding rows often hold rubbish: with no key, neither q nor dout of such a row may reach dk, dv or dbias.
    case = cases.make_case("rubbish", seqlen_q=30, seqlen_k=70, head_dim=16, mask="b1qk", bias="11qk", dlse=True)
    clean = cases.make_arrays(case)
    clean["mask"][:, :, 10:15] = False
    poisoned = {name: x.copy() for name, x in clean.items()}
    poisoned["q"][:, 10:15] = np.nan
    poisoned["dout"][:, 10:15] = np.inf
    poisoned["dlse"][:, :, 10:15] = np.nan
    assert_bitwise(run(case, poisoned, **SMALL_BLOCKS), run(case, clean, **SMALL_BLOCKS))


@pytest.mark.reliability(26)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fields", [{}, {"softcap": 2.0}, {"dropout_p": 0.3}, {"num_heads": 4, "num_heads_kv": 2}])
def test_poison_in_a_masked_key(poison: float, fields: dict[str, Any]) -> None:
    case = cases.make_case("poison", seqlen_q=30, seqlen_k=70, head_dim=16, mask="b11k", dlse=True, **fields)
    clean = cases.make_arrays(case)
    clean["mask"][:, :, :, [3, 41, 69]] = False
    poisoned = {name: x.copy() for name, x in clean.items()}
    for name in ("k", "v"):
        poisoned[name][:, [3, 41, 69]] = poison
    expected, actual = run(case, clean, **SMALL_BLOCKS), run(case, poisoned, **SMALL_BLOCKS)
    assert_bitwise(actual, expected)
    assert not actual["dk"][:, [3, 41, 69]].any()
    assert not actual["dv"][:, [3, 41, 69]].any()


@pytest.mark.reliability(26)
def test_poison_behind_the_diagonal_stays_in_the_rows_that_see_it() -> None:
    case = cases.make_case("late poison", seqlen_q=64, seqlen_k=64, head_dim=16, causal=True)
    clean = cases.make_arrays(case)
    poisoned = {name: x.copy() for name, x in clean.items()}
    poisoned["k"][:, 40], poisoned["v"][:, 40] = np.nan, np.nan
    expected, actual = run(case, clean), run(case, poisoned)
    assert np.array_equal(actual["out"][:, :40], expected["out"][:, :40])
    assert np.array_equal(actual["dq"][:, :40], expected["dq"][:, :40])
    assert np.isnan(actual["out"][:, 40:]).all()


@pytest.mark.reliability(26)
def test_a_visible_poison_is_not_hidden() -> None:
    case = cases.make_case("visible", seqlen_q=8, seqlen_k=8, head_dim=8)
    arrays = cases.make_arrays(case)
    arrays["v"][0, 5, 0, 2] = np.nan
    out = run(case, arrays)["out"]
    assert np.isnan(out[0, :, 0, 2]).all()
    assert np.isfinite(np.delete(out[0, :, 0], 2, axis=-1)).all()
    assert np.isfinite(out[:, :, 1]).all()


@pytest.mark.reliability(26)
def test_keys_behind_seqused_and_tokens_outside_are_not_read() -> None:
    case = next(case for case in cases.named_cases() if case.name == "varlen-everything")
    clean = cases.make_arrays(case)
    poisoned = {name: x.copy() for name, x in clean.items()}
    starts = clean["cu_seqlens_k"].tolist()
    for start, stop, used in zip(starts, [*starts[1:-1], None], case.seqused_k, strict=False):
        for name in ("k", "v"):
            poisoned[name][0, start + used : stop] = np.nan
    total_q = int(clean["cu_seqlens_q"][-1])
    for name in ("q", "dout"):
        poisoned[name][0, total_q:] = np.nan
    expected, actual = run(case, clean), run(case, poisoned)
    assert_bitwise(actual, expected)
    assert total_q < case_rows(clean)
    assert_rows_empty(actual, np.arange(case_rows(clean)) >= total_q)


def case_rows(arrays: Arrays) -> int:
    return int(arrays["q"].shape[1])


@pytest.mark.reliability(17)
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-30, 5.0])
def test_unusual_scales(scale: float) -> None:
    case = cases.make_case("scale", seqlen_q=20, seqlen_k=31, head_dim=8, softmax_scale=scale, dlse=True)
    arrays = exact_inputs(case)
    results = run(case, arrays)
    assert_same(results, cases.attention_dense(case, arrays))
    if scale == 0.0:
        np.testing.assert_allclose(
            results["out"], np.broadcast_to(arrays["v"].mean(1, keepdims=True), results["out"].shape)
        )
        np.testing.assert_allclose(results["lse"], math.log(31))
        assert not results["dq"].any()


@pytest.mark.reliability(17)
@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_scale_must_be_finite(scale: float) -> None:
    x = np.ones((1, 2, 1, 4), np.float32)
    with pytest.raises(ValueError, match=rf"softmax_scale: got {scale}; accepted"):
        attention_forward(x, x, x, softmax_scale=scale)


@pytest.mark.reliability(18)
@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_dropout_must_be_a_probability(p: float) -> None:
    x = np.ones((1, 2, 1, 4), np.float32)
    with pytest.raises(ValueError, match=rf"dropout_p: got {p}; accepted"):
        attention_forward(x, x, x, dropout_p=p)


@pytest.mark.reliability(18)
def test_dropout_of_everything() -> None:
    case = cases.make_case("all dropped", seqlen_q=9, seqlen_k=20, head_dim=8, dropout_p=1.0, dlse=True)
    arrays = exact_inputs(case)
    results = run(case, arrays)
    assert not results["out"].any()
    assert not results["dv"].any()
    kept = run(dataclasses.replace(case, dropout_p=0.0), arrays)
    assert np.array_equal(results["lse"], kept["lse"])
    assert results["dq"].any()  # Through lse.


@pytest.mark.reliability(25)
def test_one_object_as_q_k_and_v() -> None:
    case = cases.make_case("self", seqlen_q=33, seqlen_k=33, head_dim=16, causal=True)
    arrays = exact_inputs(case)
    shared = {**arrays, "k": arrays["q"], "v": arrays["q"]}
    apart = {name: x.copy() for name, x in shared.items()}
    assert_bitwise(run(case, shared), run(case, apart))
    assert_same(run(case, shared), cases.attention_dense(case, apart))


@pytest.mark.reliability(27)
def test_largest_float16_values() -> None:
    case = cases.make_case("largest", seqlen_q=9, seqlen_k=20, head_dim=64)
    arrays = {name: np.sign(x).astype(np.float16) * np.float16(65504) for name, x in cases.make_arrays(case).items()}
    results = run(case, arrays)
    assert np.isfinite(results["out"]).all()
    assert np.isfinite(results["lse"]).all()
    exact = cases.attention_dense(case, {name: x.astype(np.float64) for name, x in arrays.items()})
    np.testing.assert_allclose(results["lse"], exact["lse"], rtol=1e-6)


@pytest.mark.reliability(30)
@pytest.mark.parametrize("kind", ["subnormal", "zero", "constant"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_degenerate_inputs(kind: str, dtype: Any) -> None:
    case = cases.make_case(
        kind, dtype=np.dtype(dtype).name, seqlen_q=40, seqlen_k=50, head_dim=16, causal=True, dlse=True, bias="1h1k"
    )
    arrays = cases.make_arrays(case)
    for name in ("q", "k", "v", "dout", "bias"):
        if kind == "subnormal":
            arrays[name] = (arrays[name] * float(np.finfo(dtype).smallest_normal) / 8).astype(np.float32)
        else:
            arrays[name] = np.full_like(arrays[name], 0.0 if kind == "zero" else 0.75)
    exact = cases.attention_dense(case, cases.cast_inputs(case, arrays))
    single = cases.cast_inputs(case, arrays, np.float32)
    actual, low = run(case, single, **SMALL_BLOCKS), cases.attention_low_precision(case, single)
    for name, truth in exact.items():
        got = actual[name] if name == "lse" else cases.round_to(actual[name], case.dtype)
        bound = cases.error_bound(truth, low[name], "float32" if name == "lse" else case.dtype)
        assert np.abs(got - truth).max() <= bound, name


@pytest.mark.reliability(14)
@pytest.mark.parametrize(
    "fields",
    [
        {"batch": 0},
        {"seqlen_q": 0},
        {"seqlen_k": 0},
        {"num_heads": 0},
        {"num_heads": 0, "num_heads_kv": 3},
        {"head_dim": 0, "head_dim_v": 8},
        {"head_dim_v": 0},
    ],
    ids=str,
)
def test_zero_sizes(fields: dict[str, int]) -> None:
    case = cases.make_case(
        "zero", **{"seqlen_q": 5, "seqlen_k": 6, "head_dim": 8, **fields}, bias="1hqk", mask="b1qk", dlse=True
    )
    arrays = cases.make_arrays(case)
    results = run(case, arrays)
    for name, x in results.items():
        assert x.shape == cases.shapes(case)[name]
        assert not np.isnan(x).any()
    if case.seqlen_k == 0:
        assert_rows_empty(results, np.ones(case.seqlen_q, bool))
    if case.head_dim == 0:  # Scores are the bias alone.
        assert np.isfinite(results["lse"]).all()


# ---------------------------------------------------------------------------------------------------------------------
# Dropout, varlen, strides, memory, refusals


@pytest.mark.reliability(33)
@pytest.mark.parametrize("blocks", [{}, SMALL_BLOCKS], ids=["whole", "small"])
def test_the_mask_used_is_the_mask_exported(blocks: dict[str, int]) -> None:
    size, p = 64, 0.3
    case = cases.make_case(
        "mask", num_heads=4, num_heads_kv=2, seqlen_q=size, seqlen_k=size, head_dim=8, head_dim_v=size, dropout_p=p,
        seed=2**63 + 1, offset=4 * 10**9 + 3, bias="bhqk",
    )  # fmt: skip
    arrays = exact_inputs(case)
    keep = philox.keep_mask((2, 4, size, size), p, case.seed, case.offset)
    sigma = math.sqrt(p * (1 - p) / keep.size)
    assert abs((1 - keep.mean()) - p) < 4 * sigma
    # Forward: with V the identity, out is P * Z itself. Backward: with dO the identity, dV is (P * Z)^T, and
    # dBias + P * D is P * Z * dP, where dP is V^T.
    identity = np.eye(size)
    arrays["v"] = np.broadcast_to(identity[None, :, None], arrays["v"].shape)
    out = run(case, arrays, **blocks)["out"]
    assert np.array_equal(out.transpose(0, 2, 1, 3) != 0, keep)
    arrays["dout"] = np.broadcast_to(identity[None, :, None], arrays["dout"].shape)
    arrays["v"] = np.random.default_rng(0).standard_normal(arrays["v"].shape) + 10
    single = dataclasses.replace(case, num_heads_kv=4)
    for name in ("k", "v"):
        arrays[name] = np.repeat(arrays[name], 2, axis=2)
    results = run(single, arrays, **blocks)
    assert np.array_equal(results["dv"].transpose(0, 2, 3, 1) != 0, keep)
    undropped = dataclasses.replace(single, dropout_p=0.0)
    weights = run(undropped, {**arrays, "v": np.broadcast_to(identity[None, :, None], arrays["v"].shape)})["out"]
    weights = weights.transpose(0, 2, 1, 3)
    delta = (arrays["dout"] * results["out"]).sum(-1).transpose(0, 2, 1)[..., None]
    through = (results["dbias"] + weights * delta) / weights
    np.testing.assert_array_equal(np.abs(through) > 1e-6, keep)


@pytest.mark.reliability(33, 34)
def test_varlen_dropout_index() -> None:
    # t = offset + ((b*H + h) * max_q + i) * max_k + j with the maximum lengths, whatever the sequence's own.
    lengths = ((5, 9), (8, 3), (2, 12))
    case = cases.make_case(
        "varlen mask", seqlens=lengths, num_heads=2, head_dim=4, head_dim_v=12, dropout_p=0.5, offset=11
    )
    arrays = exact_inputs(case)
    for pitches in ({}, {"max_seqlen_q": 20, "max_seqlen_k": 31}):
        max_q, max_k = pitches.get("max_seqlen_q", 8), pitches.get("max_seqlen_k", 12)
        arrays["v"] = np.concatenate([np.eye(n, 12) for _, n in lengths])[None, :, None].repeat(2, axis=2)
        out = run(case, arrays, **pitches)["out"]
        keep = philox.keep_mask((3, 2, max_q, max_k), 0.5, case.seed, case.offset)
        start = 0
        for b, (m, n) in enumerate(lengths):
            block = out[0, start : start + m].transpose(1, 0, 2)
            assert np.array_equal(block[..., :n] != 0, keep[b, :, :m, :n])
            start += m


def test_varlen_equals_separate_calls() -> None:
    case = next(c for c in cases.named_cases() if c.name == "varlen-seqused-True")
    arrays = exact_inputs(case)
    whole = run(case, arrays, **SMALL_BLOCKS)
    starts = {name: np.cumsum([0, *(pair[n] for pair in case.seqlens)]) for n, name in enumerate("qk")}
    written = {name: np.zeros(x.shape[1], bool) for name, x in whole.items() if name != "lse"}
    for b, (m, _) in enumerate(case.seqlens):
        rows = slice(starts["q"][b], starts["q"][b] + m)
        keys = slice(starts["k"][b], starts["k"][b] + case.seqused_k[b])
        part = {name: arrays[name][:, keys if name in "kv" else rows] for name in ("q", "k", "v", "dout")}
        part["dlse"] = arrays["dlse"][:, :, rows]
        alone = cases.make_case("alone", seqlen_q=m, seqlen_k=case.seqused_k[b], causal=True, batch=1)
        expected = run(alone, part)
        assert_same({"lse": whole["lse"][:, :, rows]}, {"lse": expected["lse"]}, 1e-13)
        for name, done in written.items():
            tokens = keys if name in ("dk", "dv") else rows
            assert_same({name: whole[name][:, tokens]}, {name: expected[name]}, 1e-12)
            done[tokens] = True
    for name, done in written.items():
        assert not whole[name][:, ~done].any(), name


def test_seqused_without_packing_equals_a_mask() -> None:
    case = cases.make_case("used", batch=3, seqlen_q=20, seqlen_k=30, head_dim=8, mask="b11k", dlse=True)
    arrays = exact_inputs(case)
    used = np.array([30, 0, 13], np.int32)
    arrays["mask"] = np.arange(30) < used[:, None, None, None]
    masked = run(case, arrays)
    del arrays["mask"]
    assert_same(run(case, arrays, seqused_k=used), masked, 1e-13)


@pytest.mark.reliability(8, 9, 10, 11, 39, 40)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_any_strides(layout: str) -> None:
    case = cases.make_case(
        "strides", layout=layout, dtype="float32", seqlen_q=23, seqlen_k=31, head_dim=16, num_heads=4, num_heads_kv=2,
        bias="bhqk", mask="b1qk", dlse=True, dropout_p=0.2,
    )  # fmt: skip
    for seed in range(4 if layout == "random" else 1):
        arrays = cases.make_arrays(case)
        rng = np.random.default_rng(seed)
        placed = {name: cases.place(x, cases.placement(name, x.shape, layout, rng)) for name, x in arrays.items()}
        assert_bitwise(run(case, placed), run(case, arrays))


def test_reversed_strides() -> None:
    case = cases.make_case("reversed", dtype="float32", seqlen_q=23, seqlen_k=31, head_dim=16, causal=True)
    arrays = cases.make_arrays(case)
    reverse = (slice(None), slice(None, None, -1), slice(None), slice(None, None, -1))
    turned = {name: np.ascontiguousarray(x[reverse])[reverse] for name, x in arrays.items()}
    assert_bitwise(run(case, turned), run(case, arrays))


@pytest.mark.parametrize(
    "fields",
    [{}, {"causal": True, "dropout_p": 0.1}, {"num_heads": 8, "num_heads_kv": 1, "seqlen_q": 1500, "seqlen_k": 1500}],
    ids=str,
)
def test_memory_does_not_grow_with_the_score_matrix(fields: dict[str, Any]) -> None:
    sizes = {"num_heads": 1, "seqlen_q": 3000, "seqlen_k": 3000, **fields}
    case = cases.make_case("memory", **sizes, batch=1, head_dim=16)
    arrays = cases.make_arrays(case)
    matrix_bytes = case.num_heads * case.seqlen_q * case.seqlen_k * 4
    tracemalloc.start()
    try:
        run(case, arrays)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < matrix_bytes / 2
    assert peak < 16 * 2**20


def test_memory_does_not_grow_with_the_number_of_heads() -> None:
    case = cases.make_case("wide", batch=4, num_heads=64, seqlen_q=256, seqlen_k=512, head_dim=4)
    arrays = cases.make_arrays(case)
    results_bytes = sum(x.nbytes for x in run(case, arrays).values())
    tracemalloc.start()
    try:
        run(case, arrays)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - results_bytes < 16 * 2**20  # One pass over all heads would hold 134 MB of scores.


def test_many_short_heads_share_passes() -> None:
    case = cases.make_case("short", batch=300, num_heads=10, num_heads_kv=5, seqlen_q=3, seqlen_k=5, head_dim=8)
    arrays = exact_inputs(case)
    assert_same(run(case, arrays), cases.attention_dense(case, arrays))


@pytest.mark.reliability(6, 7, 20)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": np.ones((2, 3, 4))}, ValueError, r"q: got shape \(2, 3, 4\); accepted is rank 4"),
        ({"k": np.ones((1, 6, 4, 8)), "v": np.ones((1, 6, 4, 8))}, ValueError, "k: got 4 heads for 9 query heads"),
        ({"v": np.ones((1, 7, 3, 8))}, ValueError, r"got shapes .*\(1, 7, 3, 8\)"),
        ({"mask": np.ones((1, 9, 5, 7), bool)}, ValueError, r"mask: got .*7\); accepted is \(1, 9, 5, 6\)"),
        ({"bias": np.ones((5, 6))}, ValueError, r"bias: got shape \(5, 6\); accepted is \(1, 9, 5, 6\)"),
        ({"causal": "diagonal"}, ValueError, "causal: got 'diagonal'"),
        ({"softcap": -1.0}, ValueError, "softcap: got -1.0"),
        ({"softcap": 1e-46, "compute_dtype": np.float32}, ValueError, "softcap: got 1e-46"),
        ({"compute_dtype": np.float16}, ValueError, "compute_dtype: got float16"),
        ({"cu_seqlens_q": [0, 5]}, ValueError, "cu_seqlens_q, cu_seqlens_k: accepted are both or neither"),
        ({"cu_seqlens_q": [0, 6], "cu_seqlens_k": [0, 6]}, ValueError, r"cu_seqlens_q: got \[0, 6\]"),
        ({"cu_seqlens_q": [0, 3, 2], "cu_seqlens_k": [0, 3, 6]}, ValueError, r"cu_seqlens_q: got \[0, 3, 2\]"),
        ({"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 3, 6]}, ValueError, "cu_seqlens_k: got 3 values; accepted is 2"),
        ({"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 6], "max_seqlen_k": 4}, ValueError, "max_seqlen_k: got 4"),
        ({"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 6], "seqused_k": [7]}, ValueError, r"seqused_k: got \[7\]"),
        ({"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 6], "bias": np.ones((1, 1, 5, 6))}, UnsupportedError, "bias"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(change: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {"q": np.ones((1, 5, 9, 8)), "k": np.ones((1, 6, 3, 8)), "v": np.ones((1, 6, 3, 8)), **change}
    with pytest.raises(error, match=message):
        attention_forward(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_backward_refusals() -> None:
    x, lse = np.ones((1, 5, 2, 8)), np.ones((1, 2, 5))
    with pytest.raises(ValueError, match="bias_grad: got True without a bias"):
        attention_backward(x, x, x, x, x, lse, bias_grad=True)
    for position, name in enumerate(("dout", "out", "lse", "dlse")):
        operands = [x, x, lse, lse]
        operands[position] = operands[position][:, :1]
        with pytest.raises(ValueError, match=f"^{name}: got shape"):
            attention_backward(operands[0], x, x, x, operands[1], operands[2], dlse=operands[3])


def test_lse_zero_marks_empty_rows_too() -> None:
    # The seed-compatible entry points report 0 instead of -inf for a row without keys.
    case = cases.make_case("seed lse", seqlen_q=40, seqlen_k=15, head_dim=8, causal=True)
    arrays = exact_inputs(case)
    q, k, v = (arrays[name] for name in "qkv")
    out, lse = attention_forward(q, k, v, causal=True)
    zeroed = np.where(lse == -np.inf, 0, lse)
    first, second = (attention_backward(arrays["dout"], q, k, v, out, x, causal=True) for x in (lse, zeroed))
    for name, a, b in zip(("dq", "dk", "dv"), first[:3], second[:3], strict=True):
        assert np.array_equal(a, b), name
