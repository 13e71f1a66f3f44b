"""Huge and NaN scores on the CPU path, and where gradients end: what tests/gpu/test_scores.py is on the GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvrtc_attn.cpu.reference import attention_backward, attention_forward, largest_lse
from nvrtc_attn.front.problem import AttentionProblem, OperandLayout, dense_layout
from nvrtc_attn.heuristics.common import features_of, maps_scores
from nvrtc_attn.heuristics.portable_forward import choose_forward
from nvrtc_attn.jit.config import Features

Array = Any
BLOCKS = {"block_m": 24, "block_n": 40}
CONSTANTS = (16.0, 200.0, 16000.0, 30000.0, 65504.0, 1e18)


def tensors(constant: float, seqlen: int = 90, head_dim: int = 64) -> tuple[Array, Array, Array]:
    """q = k constant, and v, dout; float16 where the constant allows, else float32."""
    dtype = np.float16 if constant <= 65504 else np.float32
    rng = np.random.default_rng(0)
    v, dout = (rng.standard_normal((1, seqlen, 2, head_dim)).astype(dtype) for _ in range(2))
    return np.full_like(v, constant), v, dout


@pytest.mark.reliability(27)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("constant", CONSTANTS)
def test_constant_queries_and_keys(constant: float, causal: bool) -> None:
    q, v, dout = tensors(constant)
    out, lse = attention_forward(q, q, v, causal=causal, **BLOCKS)
    count = np.arange(1, 91) if causal else np.full(90, 90)
    sums = np.cumsum(v.astype(np.float64), 1) if causal else v.astype(np.float64).sum(1, keepdims=True)
    np.testing.assert_allclose(out, np.broadcast_to(sums / count[None, :, None, None], v.shape), atol=2e-3)
    score = float(q[0, 0, 0, 0]) ** 2 * 64**0.5
    np.testing.assert_allclose(lse, np.broadcast_to(score + np.log(count), lse.shape), rtol=2.0**-18)

    dq, dk, dv, *_ = attention_backward(dout, q, q, v, out, lse, causal=causal, **BLOCKS)
    if score >= largest_lse(np.float32):
        assert not dq.any()
        assert not dk.any()
        assert not dv.any()
        return
    assert np.isfinite(dq).all()
    assert np.isfinite(dk).all()
    weights = np.tril(np.ones((90, 90))) / count[:, None] if causal else np.full((90, 90), 1 / 90)
    share = np.einsum("ij,bihd->bjhd", weights, np.abs(dout.astype(np.float64)))
    want = np.einsum("ij,bihd->bjhd", weights, dout.astype(np.float64))
    assert (np.abs(dv - want) <= (score * 2.0**-22 + 2.0**-10) * share + 1e-5).all()


def test_float64_keeps_gradients_further() -> None:
    q, v, dout = (x.astype(np.float64) for x in tensors(16000.0))
    out, lse = attention_forward(q, q, v)
    assert lse.dtype == np.float64
    assert float(lse.min()) > largest_lse(np.float32)
    dv = attention_backward(dout, q, q, v, out, lse)[2]
    np.testing.assert_allclose(dv, np.broadcast_to(dout.mean(1, keepdims=True), dv.shape), rtol=1e-5)


@pytest.mark.parametrize("factor", [0.999, 1.0, 2.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_where_gradients_end(factor: float, sign: float) -> None:
    """One score a row, just below the limit, at it and beyond: P is 1 there."""
    q, k = np.full((1, 3, 1, 1), sign * largest_lse(np.float32) * factor, np.float32), np.ones((1, 1, 1, 1), np.float32)
    v, dout = np.full((1, 1, 1, 2), 3.0, np.float32), np.ones((1, 3, 1, 2), np.float32)
    out, lse = attention_forward(q, k, v, softmax_scale=1.0)
    np.testing.assert_array_equal(out, 3.0)
    dv = attention_backward(dout, q, k, v, out, lse, softmax_scale=1.0)[2]
    np.testing.assert_array_equal(dv, 3.0 if factor < 1 else 0.0)


def test_the_device_code_has_the_same_limit(repository: Path) -> None:
    text = (repository / "cuda_src/nvrtc_attn/common/numbers.cuh").read_text()
    found = re.search(r"kLargestLse = (0x1p\d+)f", text)
    assert found
    assert float.fromhex(found[1]) == largest_lse(np.float32)


@pytest.mark.reliability(26)
@pytest.mark.parametrize("whole", [False, True])
def test_rows_of_nan(whole: bool) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 90, 2, 16)).astype(np.float32) for _ in range(3))
    clean = attention_forward(q, k, v, **BLOCKS)
    if whole:
        q[0, 37, 0] = np.nan
        rows = np.zeros((1, 2, 90), np.bool_)
        rows[0, 0, 37] = True
    else:
        k[0, 50, 1, 3] = np.nan
        rows = np.broadcast_to(np.array([False, True])[None, :, None], (1, 2, 90))
    out, lse = attention_forward(q, k, v, **BLOCKS)
    assert np.isnan(lse[rows]).all()
    assert np.isnan(out.transpose(0, 2, 1, 3)[rows]).all()
    np.testing.assert_array_equal(lse[~rows], clean[1][~rows])
    dq = attention_backward(np.ones_like(q), q, k, v, out, lse, **BLOCKS)[0]
    assert np.isnan(dq.transpose(0, 2, 1, 3)[rows]).all()


# ---------------------------------------------------------------------------------------------------------------------
# What the kernels are told


def problem(**changes: Any) -> AttentionProblem:
    values: dict[str, Any] = {
        "dtype": "bfloat16", "batch": 1, "seqlen_q": 1, "seqlen_k": 8192, "num_heads": 8, "num_heads_kv": 2,
        "head_dim": 128, "head_dim_v": 128, "softmax_scale": 0.1,
        "q": dense_layout((1, 1, 8, 128), "bfloat16"), "k": dense_layout((1, 8192, 2, 128), "bfloat16"),
        "v": dense_layout((1, 8192, 2, 128), "bfloat16"),
    }  # fmt: skip
    return AttentionProblem(**{**values, **changes})


BIAS = OperandLayout(shape=(1, 8, 1, 8192), strides=(8 * 8192, 8192, 0, 1), dtype="bfloat16")


@pytest.mark.parametrize(
    ("changes", "natural"),
    [({}, False), ({"softcap": 3.0}, True), ({"bias": BIAS}, True), ({"softmax_scale": -0.1}, True)],
)
def test_maxima_of_splits_have_the_unit_of_scores(changes: dict[str, Any], natural: bool) -> None:
    spec = choose_forward(problem(**changes), arch="sm_90", num_sms=132, smem_limit=232448, clusters=False)
    split, combine = (launch.config for launch in spec.launches)
    assert combine.kernel == "combine"
    assert maps_scores(split.features) == natural
    assert maps_scores(combine.features) == natural


@pytest.mark.parametrize(("scale", "prescale"), [(1e-30, False), (1e-44, False), (1e-46, True), (0.0, True)])
def test_a_scale_that_is_zero_in_float32_is_not_folded(scale: float, prescale: bool) -> None:
    """In the exponent it would make NaN of -inf * 0, the score of a hidden key."""
    assert features_of(problem(softmax_scale=scale)) == Features(prescale=prescale)
