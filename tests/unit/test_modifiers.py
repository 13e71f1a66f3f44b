"""Modifiers on the CPU: values against the functions themselves on float64 arrays, gradients by finite differences."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import modifiers
import numpy as np
import pytest
from modifiers import Array, ModifierCase

import nvrtc_attn
from nvrtc_attn.cpu import reference
from nvrtc_attn.modifiers import derivative, evaluate, graph
from nvrtc_attn.modifiers import functions as of_libraries
from nvrtc_attn.modifiers.evaluate import HostModifier
from nvrtc_attn.modifiers.trace import trace

SIZES = ((2, 4, 13, 21), (1, 2, 24, 17), (2, 2, 8, 8))
RANDOM = 250


def tensors(sizes: tuple[int, int, int, int], seed: int, dtype: Any = np.float32) -> tuple[Array, Array, Array, Array]:
    b, h, m, n = sizes
    rng = np.random.default_rng(seed)
    shapes = ((b, m, h, 8), (b, n, h // 2, 8), (b, n, h // 2, 8), (b, m, h, 8))
    q, k, v, dout = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v, dout


def arrays_of(case: ModifierCase, sizes: tuple[int, int, int, int], seed: int) -> dict[str, Array]:
    return case.arrays(sizes, np.random.default_rng(seed))


def all_cases() -> list[ModifierCase]:
    return [*modifiers.named_cases(), *(modifiers.random_case(seed) for seed in range(RANDOM))]


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name.split(":")[0])
def test_out_and_lse_are_those_of_the_functions_on_arrays(case: ModifierCase) -> None:
    for seed, sizes in enumerate(SIZES):
        arrays = arrays_of(case, sizes, seed)
        q, k, v, _ = tensors(sizes, seed)
        out, lse = nvrtc_attn.attention(q, k, v, return_lse=True, **functions(case, arrays))
        exact, exact_lse = modifiers.textbook(q, k, v, *case.make(arrays))
        np.testing.assert_allclose(lse, exact_lse, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(out, exact, rtol=2e-3, atol=2e-4)


def functions(case: ModifierCase, arrays: dict[str, Array]) -> dict[str, Any]:
    score_mod, mask_mod = case.make(arrays)
    return {"score_mod": score_mod, "mask_mod": mask_mod}


def loss(q: Array, k: Array, v: Array, dout: Array, dlse: Array, case: ModifierCase, arrays: dict[str, Array]) -> float:
    out, lse = modifiers.textbook(q, k, v, *case.make(arrays))
    return float((out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum())


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name.split(":")[0])
def test_gradients_are_those_of_finite_differences(case: ModifierCase) -> None:
    """In float64, along random directions: of q, k, v and of every captured array."""
    for seed, sizes in enumerate(SIZES[:2]):
        arrays = arrays_of(case, sizes, seed)
        wide = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in arrays.items()}
        q, k, v, dout = tensors(sizes, seed, np.float64)
        rng = np.random.default_rng(seed + 1)
        dlse = rng.standard_normal((q.shape[0], q.shape[2], q.shape[1]))
        traced = trace(*case.make(wide))
        modifier = HostModifier(traced, traced.captures)
        sums = [np.zeros(x.shape) if i in traced.differentiable else None for i, x in enumerate(traced.captures)]
        assert {id(x) for x, g in zip(traced.captures, sums, strict=True) if g is not None} <= {
            id(wide[name]) for name in case.trained
        }
        out, lse = reference.attention_forward(q, k, v, modifier=modifier)
        dq, dk, dv, *_ = reference.attention_backward(
            dout, q, k, v, out, lse, dlse=np.where(np.isfinite(lse), dlse, 0), modifier=modifier, capture_grads=sums
        )
        named: dict[str, tuple[Array, Array]] = {"q": (q, dq), "k": (k, dk), "v": (v, dv)}
        for x, g in zip(traced.captures, sums, strict=True):
            if g is not None:
                named[next(name for name, y in wide.items() if y is x)] = (x, g)
        for name, (x, gradient) in named.items():
            direction = rng.standard_normal(x.shape)
            step = 1e-6
            ends = []
            for sign in (1, -1):
                moved = {"q": q, "k": k, "v": v, **wide, name: x + sign * step * direction}
                ends.append(loss(moved["q"], moved["k"], moved["v"], dout, dlse, case, {n: moved[n] for n in wide}))
            slope = (ends[0] - ends[1]) / (2 * step)
            scale = np.abs(gradient * direction).sum() + 1e-3
            assert abs(slope - (gradient * direction).sum()) <= 2e-6 * scale + 1e-7 * abs(ends[0]), (case.name, name)


@pytest.mark.parametrize("name", ["alibi", "relative bias", "both", "array twice"])
def test_gradients_of_the_public_function(name: str) -> None:
    """float32 gradients of everything, every element written, against the float64 path."""
    case = next(x for x in modifiers.named_cases() if x.name == name)
    arrays = arrays_of(case, SIZES[0], 3)
    q, k, v, dout = tensors(SIZES[0], 3)
    modifier = nvrtc_attn.trace(*case.make(arrays))
    out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True)
    dq, dk, dv = (np.full_like(x, np.nan) for x in (q, k, v))
    daux = [np.full(x.shape, np.nan, np.float32) for x in modifier.captures]
    nvrtc_attn.attention_backward(dout, q, k, v, out, lse, dq, dk, dv, score_mod=modifier, daux=daux)
    wide = HostModifier(modifier, [x.astype(np.float64) for x in modifier.captures])
    sums = [np.zeros(x.shape) for x in modifier.captures]
    doubles = [x.astype(np.float64) for x in (dout, q, k, v)]
    exact = reference.attention_forward(*doubles[1:], modifier=wide)
    expected = reference.attention_backward(*doubles, *exact, modifier=wide, capture_grads=sums)
    for ours, theirs in zip((dq, dk, dv, *daux), (*expected[:3], *sums), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_the_modifier_sees_positions_within_packed_sequences() -> None:
    q, k, v, _ = tensors((1, 2, 13, 13), 0)
    cu = np.array([0, 5, 13], np.int32)
    tables = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + tables[b, j] * i

    out = nvrtc_attn.attention(
        q, k, v, score_mod=score_mod, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=8, max_seqlen_k=8
    )
    for b, (start, end) in enumerate(((0, 5), (5, 13))):
        part = [x[:, start:end] for x in (q, k, v)]
        exact, _ = modifiers.textbook(*part, lambda s, _b, h, i, j, b=b: s + tables[b, j] * i, None)
        np.testing.assert_allclose(out[:, start:end], exact, rtol=1e-4, atol=1e-4)


def test_with_bias_dropout_and_causal() -> None:
    """The order: modifier, bias, masks, then dropout of the probabilities."""
    sizes = SIZES[0]
    q, k, v, _ = tensors(sizes, 5)
    bias = np.random.default_rng(5).standard_normal((1, sizes[1], 1, sizes[3])).astype(np.float32)
    out = nvrtc_attn.attention(
        q, k, v, bias=bias, causal="top_left", dropout_p=0.3, rng=(7, 8),
        score_mod=lambda s, b, h, i, j: s * s - 0.1 * j,
    )  # fmt: skip
    keep = nvrtc_attn.dropout_keep_mask(sizes, 0.3, (7, 8)) / 0.7
    exact, _ = modifiers.textbook(
        q, k, v, lambda s, b, h, i, j: s * s - 0.1 * j, lambda b, h, i, j: j <= i, bias=bias, keep=keep
    )
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)


def test_a_row_without_a_key() -> None:
    q, k, v, dout = tensors((1, 2, 4, 4), 0)
    modifier = nvrtc_attn.trace(None, lambda b, h, i, j: i > j)
    out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True)
    assert (out[:, 0] == 0).all()
    assert (lse[..., 0] == -np.inf).all()
    assert np.isfinite(lse[..., 1:]).all()
    dq, dk, dv = (np.full_like(x, np.nan) for x in (q, k, v))
    nvrtc_attn.attention_backward(dout, q, k, v, out, lse, dq, dk, dv, score_mod=modifier)
    assert (dq[:, 0] == 0).all()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def test_a_learned_power_of_the_distance() -> None:
    """At a distance of 0 the logarithm is infinite: the gradient of the exponent was NaN."""
    q, k, v, dout = tensors(SIZES[2], 0)
    heads = q.shape[2]
    powers = np.linspace(0.5, 1.5, heads).astype(np.float32)
    modifier = trace(lambda s, b, h, i, j: s - 0.1 * abs(i - j) ** powers[h])
    out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True)
    gradients, found = [np.empty_like(x) for x in (q, k, v)], np.empty_like(powers)
    nvrtc_attn.attention_backward(dout, q, k, v, out, lse, *gradients, score_mod=modifier, daux=[found])

    def moved(step: float, head: int) -> float:
        there = powers + step * (np.arange(heads) == head)
        return float(
            (modifiers.textbook(q, k, v, lambda s, b, h, i, j: s - 0.1 * abs(i - j) ** there[h], None)[0] * dout).sum()
        )

    for head in range(heads):
        assert found[head] == pytest.approx((moved(1e-5, head) - moved(-1e-5, head)) / 2e-5, rel=1e-3, abs=1e-4)


# ------------------------------------------------------------------------------------------------------------ tracing


TABLE = np.arange(12, dtype=np.float32).reshape(3, 4)


def branch(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s if q > k else -s


def chained(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return np.where(0 < q < k, s, 0.0)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (branch, "branch on a value"),
        (chained, "branch on a value"),
        (lambda s, b, h, q, k: s + TABLE, r"captured array of shape \(3, 4\)|is used as a whole|indices of a captured"),
        (lambda s, b, h, q, k: s + TABLE[h], "1 of the 2 indices"),
        (lambda s, b, h, q, k: s + TABLE[h, 1:], "must name one element"),
        (lambda s, b, h, q, k: s + TABLE[h, k, q], "3 indices of a captured array"),
        (lambda s, b, h, q, k: s + TABLE[h, s], "floating-point number"),
        (lambda s, b, h, q, k: s + TABLE[h, 4], "out of range"),
        (lambda s, b, h, q, k: s.reshape(-1), "'reshape'"),
        (lambda s, b, h, q, k: np.sum(s), "'sum'"),
        (lambda s, b, h, q, k: np.add.reduce(s), "'add.reduce'"),
        (lambda s, b, h, q, k: [1.0, 2.0][h] * s, "needed as a Python number"),
        (lambda s, b, h, q, k: sum(range(k)) * s, "needed as a Python number"),
        (lambda s, b, h, q, k: s & 1, "compare them first"),
        (lambda s, b, h, q, k: s + 3**h, "'pow' of integers"),
        (lambda s, b, h, q, k: s + (q - k) ** 32, "'pow' of integers, but for powers up to 31"),
        (lambda s, b, h, q, k: "text", "is no number"),
        (lambda s, b, h, q, k: None, "returned None"),
        (lambda s, b, h, q: s, "is called with"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(function: Any, words: str) -> None:
    q, k, v, _ = tensors(SIZES[2], 0)
    with pytest.raises(nvrtc_attn.TraceError, match=words) as error:
        nvrtc_attn.attention(q, k, v, score_mod=function)
    assert str(error.value).startswith("score_mod: ")
    assert isinstance(error.value, ValueError)


def test_other_refusals() -> None:
    q, k, v, dout = tensors(SIZES[2], 0)

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + TABLE[0, i]

    with pytest.raises(ValueError, match="out of range"):
        nvrtc_attn.attention(q, k, v, score_mod=score_mod)
    for function in (  # the last three are an option or a bias by themselves
        lambda s, b, h, i, j: s * s,
        lambda s, b, h, i, j: s + BIAS[h, i, j],
        lambda s, b, h, i, j: np.where(i >= j, s, -np.inf),
        lambda s, b, h, i, j: 2.0 * np.tanh(s / 2.0),
    ):
        with pytest.raises(ValueError, match=r"softcap: got 2\.0 with score_mod"):
            nvrtc_attn.attention(q, k, v, score_mod=function, softcap=2.0)
    out = nvrtc_attn.attention(q, k, v, mask_mod=lambda b, h, i, j: i >= j, softcap=2.0)
    np.testing.assert_array_equal(out, nvrtc_attn.attention(q, k, v, causal="top_left", softcap=2.0))
    with pytest.raises(nvrtc_attn.TraceError, match="mask_mod: returned a floating-point number"):
        nvrtc_attn.attention(q, k, v, mask_mod=lambda b, h, i, j: 0.5 * i)
    with pytest.raises(TypeError, match="score_mod: got 3"):
        nvrtc_attn.attention(q, k, v, score_mod=3)
    with pytest.raises(ValueError, match="aux"):
        nvrtc_attn.attention(q, k, v, aux={"x": TABLE})
    modifier = nvrtc_attn.trace(lambda s, b, h, i, j: s + TABLE[0, i % 4])
    out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True)
    gradients = [np.empty_like(x) for x in (q, k, v)]
    for daux, words in (([], "0 arrays"), ([np.zeros((3, 4))], "float64"), ([np.zeros((4, 3), np.float32)], "shape")):
        with pytest.raises(ValueError, match=words):
            nvrtc_attn.attention_backward(dout, q, k, v, out, lse, *gradients, score_mod=modifier, daux=daux)
    flags = np.array([True, False] * 4)
    modifier = nvrtc_attn.trace(lambda s, b, h, i, j: np.where(flags[j], s, 0.0))
    with pytest.raises(ValueError, match="no derivative"):
        nvrtc_attn.attention_backward(
            dout, q, k, v, out, lse, *gradients, score_mod=modifier, daux=[np.zeros(8, np.float32)]
        )


def test_outputs_do_not_share_memory_with_captured_arrays() -> None:
    q, k, v, dout = tensors(SIZES[2], 0)
    memory = np.zeros(2 * q.size, np.float32)
    table = memory[:16].reshape(2, 8)
    modifier = nvrtc_attn.trace(lambda s, b, h, i, j: s + np.sin(table[h, j] * i))
    with pytest.raises(ValueError, match="out: shares memory with captured array 0"):
        nvrtc_attn.attention(q, k, v, score_mod=modifier, out=memory[8 : 8 + q.size].reshape(q.shape))
    out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True)
    gradients = [np.empty_like(x) for x in (q, k, v)]
    of_dq, of_out = (x.reshape(-1)[:16].reshape(2, 8) for x in (gradients[0], out))
    taken = (
        (table, "captured array 0"),
        (memory[8:24].reshape(2, 8), "captured array 0"),
        (of_dq, "dq"),
        (of_out, "out"),
    )
    for daux, other in taken:
        with pytest.raises(ValueError, match=rf"daux\[0\]: shares memory with {other}"):
            nvrtc_attn.attention_backward(dout, q, k, v, out, lse, *gradients, score_mod=modifier, daux=[daux])
    apart = memory[16:32].reshape(2, 8)
    nvrtc_attn.attention_backward(dout, q, k, v, out, lse, *gradients, score_mod=modifier, daux=[apart])


@pytest.mark.parametrize("number", [np.asarray(2.0, np.float32), np.float32(2.0), np.asarray(2)], ids=repr)
def test_a_number_in_an_array_stands_on_either_side(number: Any) -> None:
    q, k, v, _ = tensors(SIZES[2], 0)
    expected = nvrtc_attn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2.0)
    for function in (lambda s, b, h, i, j: s * number, lambda s, b, h, i, j: number * s):
        np.testing.assert_allclose(nvrtc_attn.attention(q, k, v, score_mod=function), expected, rtol=1e-6)
    whole = nvrtc_attn.attention(q, k, v, score_mod=lambda s, b, h, i, j: nvrtc_attn.where(i > j, s, 2.0))
    found = nvrtc_attn.attention(q, k, v, score_mod=lambda s, b, h, i, j: nvrtc_attn.where(i > j, s, number))
    np.testing.assert_allclose(found, whole, rtol=1e-6)


def test_an_index_out_of_range_at_a_masked_pair_does_not_matter() -> None:
    q, k, v, _ = tensors((1, 2, 8, 8), 0)
    table = np.arange(8, dtype=np.float32)
    out = nvrtc_attn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[i - j], causal=True)
    padded = np.concatenate([table, np.zeros(8, np.float32)])
    exact, _ = modifiers.textbook(q, k, v, lambda s, b, h, i, j: s + padded[i - j], lambda b, h, i, j: j <= i)
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)


def test_aux_arrays_are_one_more_argument() -> None:
    q, k, v, _ = tensors(SIZES[2], 0)
    slopes = np.array([0.5, -0.25], np.float32)
    out = nvrtc_attn.attention(
        q, k, v, score_mod=lambda s, b, h, i, j, aux: s + aux["slopes"][h] * j, aux={"slopes": slopes}
    )
    exact, _ = modifiers.textbook(q, k, v, lambda s, b, h, i, j: s + slopes[h] * j, None)
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)


def test_captured_numbers_and_arrays_do_not_change_the_program() -> None:
    """A function made again with other numbers and arrays has an equal program: no kernel is compiled for it."""

    def make(slope: float, width: int, table: Array) -> nvrtc_attn.Modifier:
        return nvrtc_attn.trace(
            lambda s, b, h, q, k: s + slope * abs(q - k) + table[h] * 2.5, lambda b, h, q, k: (q - k) % width == 0
        )

    first = make(0.25, 7, np.zeros(4, np.float32))
    second = make(0.75, 9, np.ones(6, np.float32))
    assert first.program == second.program
    assert hash(first.program) == hash(second.program)
    assert (first.numbers, second.numbers) == ((0.25, 7), (0.75, 9))
    assert first.program.captures == (("float32", 1),)
    assert make(0.25, 7, np.zeros(4, np.float16)).program != first.program
    assert make(0.25, 7.5, np.zeros(4, np.float32)).program != first.program  # type: ignore[arg-type]
    # 2.5 is in the text of the function.
    assert "2.5" in repr(first.program)
    assert "0.25" not in repr(first.program)


def test_a_captured_integer_exponent_is_that_of_the_text() -> None:
    """A square is the product, and the kernel, that it is where the 2 is written in the function; elsewhere, too."""

    class Far:
        def __init__(self, power: int) -> None:
            self.power = power

        def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s - abs(q - k) ** self.power * 2.0

    def far(s: Any, b: Any, h: Any, q: Any, k: Any, power: int) -> Any:
        return s - abs(q - k) ** power * 2.0

    squares = [lambda s, b, h, q, k, p=p: s - abs(q - k) ** p * 2.0 for p in (2, np.int64(2))]
    programs = [trace(x).program.score for x in (*squares, functools.partial(far, power=2), Far(2))]
    at = {"score": np.zeros(1), "q": np.array([7]), "k": np.array([2])}
    for x in (*squares, functools.partial(far, power=2), Far(2)):
        assert evaluate.Values(at, (), np.dtype(np.float64))(trace(x).valued[0]) == -50
    assert len(set(programs[:2])) == len(set(programs[2:])) == 1
    assert all("pow" not in graph.listing([x]) for x in programs)


def test_a_captured_array_is_iterated() -> None:
    """Its elements are operands, as those of an index are; of a table they are the rows."""
    taps, table = np.array([0.5, -0.25, 2.0], np.float32), np.arange(8, dtype=np.float32).reshape(2, 4)
    near = trace(lambda s, b, h, q, k: s + sum(x * (q - k == i) for i, x in enumerate(taps)))
    rows = trace(lambda s, b, h, q, k: s + sum(row[h] for row in table))
    at = {"score": np.zeros(1), "h": np.array([3]), "q": np.array([7]), "k": np.array([6])}
    assert evaluate.Values(at, near.captures, np.dtype(np.float64))(near.valued[0]) == -0.25
    assert evaluate.Values(at, rows.captures, np.dtype(np.float64))(rows.valued[0]) == 10
    assert near.captures == (taps,)
    assert near.differentiable == (0,)


def test_a_captured_index_is_an_operand() -> None:
    """The layer of a stacked table, and one that counts from the end: kernels are those of the first layer."""
    table = np.arange(5 * 4 * 19, dtype=np.float32).reshape(5, 4, 19)

    def layer(n: int) -> nvrtc_attn.Modifier:
        return nvrtc_attn.trace(lambda s, b, h, q, k: s + table[n, h, q - k + 9])

    assert len({layer(n).program for n in range(5)}) == 1
    assert len({layer(n).program for n in (-1, -3, -5)}) == 1
    at = {"score": np.zeros(1), **{name: np.array([i]) for name, i in zip("bhqk", (0, 2, 3, 1), strict=True)}}
    for n in (0, 1, 4, -1, -5):
        modifier = layer(n)
        assert evaluate.Values(at, modifier.captures, np.dtype(np.float64))(modifier.valued[0]) == table[n, 2, 11]
    for n in (5, -6):
        with pytest.raises(nvrtc_attn.TraceError, match=f"index {n} of a captured array of shape .* is out of range"):
            layer(n)


def test_constants_are_folded() -> None:
    def program(function: Any) -> Any:
        return trace(function).program.score

    assert program(lambda s, b, h, q, k: s * 1 + 0) == graph.SCORE
    assert program(lambda s, b, h, q, k: s + (q * 0 + 1 - 1) * 0.0) != graph.SCORE  # NaN and infinity survive
    assert program(lambda s, b, h, q, k: np.where(~((q > k) & False), s, 0.0)) == graph.SCORE
    assert trace(None, lambda b, h, q, k: (q > k) | True).program.mask is None
    for op in ("minimum", "maximum"):  # Python's own drop a NaN that comes second
        for a, b in ((math.nan, 1.0), (1.0, math.nan)):
            assert math.isnan(graph.make(op, graph.number(a), graph.number(b)).value)


def test_every_operation_has_values_and_a_derivative() -> None:
    """Tables that must know the same operations."""
    computed = set(graph.OPERATIONS) - {"float", "int", "bool"}
    assert set(evaluate.FUNCTIONS) == computed
    of_floats = (
        {*graph.FLOAT_UNARY, *graph.ROUNDING, *graph.SAME_UNARY, *graph.ARITHMETIC, "div", "pow", "where"}
        | {"float", "int", "bool"}
    )  # fmt: skip
    assert set(derivative.RULES) == {*of_floats, "call"}


@pytest.mark.parametrize(
    "op", [*graph.FLOAT_UNARY, *graph.SAME_UNARY, "minimum", "maximum", "mod", "pow", "div", "mul", "sub"]
)
def test_each_derivative_by_finite_differences(op: str) -> None:
    """Of the operation's own node, at points where it has one."""
    x = np.array([0.3, 0.9, 1.7, 2.4])
    other = graph.number(1.3)
    operands = (graph.SCORE,) if op in (*graph.FLOAT_UNARY, *graph.SAME_UNARY) else (graph.SCORE, other)
    for order in {operands, operands[::-1]}:
        node = graph.make(op, *order)

        def at(points: Array, node: graph.Node = node) -> Array:
            values = evaluate.Values({"score": points}, (), np.dtype(np.float64))(node)
            return np.broadcast_to(values, points.shape)

        values = evaluate.Values({"score": x}, (), np.dtype(np.float64))
        slope = np.broadcast_to(values(derivative.slope(node)), x.shape)
        np.testing.assert_allclose(slope, (at(x + 1e-6) - at(x - 1e-6)) / 2e-6, rtol=1e-6, atol=1e-8)


def test_the_tables_of_functions_name_operations() -> None:
    assert set(of_libraries._ALIASES.values()) <= set(graph.OPERATIONS)


# ------------------------------------------------------------------------------------------------ canonical modifiers


BIAS = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)
ROWS = np.random.default_rng(0).standard_normal((2, 12)).astype(np.float32)


def described(m: int = 8, n: int = 8, **arguments: Any) -> Any:
    from nvrtc_attn.front.call import CallOptions, describe

    score_mod, mask_mod = arguments.pop("score_mod", None), arguments.pop("mask_mod", None)
    bias = arguments.pop("bias", None)
    q, k, v, _ = tensors((1, 2, m, n), 0)
    modifier = None if score_mod is None and mask_mod is None else trace(score_mod, mask_mod)
    return describe(q, k, v, options=CallOptions(**arguments), stream=None, modifier=modifier, bias=bias)


WIDTH, CAP = 3, 30.0
CANONICAL = [
    ({"mask_mod": lambda b, h, q, k: q >= k}, {"causal": True}),
    ({"mask_mod": lambda b, h, q, k: k <= q}, {"causal": "top_left"}),
    ({"mask_mod": lambda b, h, q, k: q - k >= 0}, {"causal": True}),
    ({"mask_mod": lambda b, h, q, k: k < q + 1}, {"causal": True}),
    ({"mask_mod": lambda b, h, q, k: ~(k > q)}, {"causal": True}),
    ({"mask_mod": lambda b, h, q, k: ~((k > q) | (q - k > WIDTH))}, {"causal": True, "window_size": (WIDTH, None)}),
    ({"mask_mod": lambda b, h, q, k: (q >= k) & (q - k <= WIDTH)}, {"causal": True, "window_size": (WIDTH, None)}),
    ({"mask_mod": lambda b, h, q, k: abs(q - k) <= WIDTH}, {"window_size": (WIDTH, WIDTH)}),
    ({"mask_mod": lambda b, h, q, k: abs(q - k) < WIDTH}, {"window_size": (WIDTH - 1, WIDTH - 1)}),
    ({"mask_mod": lambda b, h, q, k: 2 * q - q > k - WIDTH}, {"window_size": (None, WIDTH - 1)}),
    (
        {"mask_mod": lambda b, h, q, k: k <= q + WIDTH, "causal": True, "window_size": (5, None)},
        {"causal": True, "window_size": (5, None)},
    ),
    ({"score_mod": lambda s, b, h, q, k: CAP * np.tanh(s / CAP)}, {"softcap": CAP}),
    ({"score_mod": lambda s, b, h, q, k: np.tanh(s / 20) * 20}, {"softcap": 20.0}),
    ({"score_mod": lambda s, b, h, q, k: np.where(q >= k, s, -np.inf)}, {"causal": True}),
    ({"score_mod": lambda s, b, h, q, k: np.where(q < k, -np.inf, s)}, {"causal": True}),
    ({"score_mod": lambda s, b, h, q, k: s + BIAS[h, q, k]}, {"bias": BIAS[None]}),
    ({"score_mod": lambda s, b, h, q, k: BIAS[h, k, q] + s}, {"bias": BIAS[None].swapaxes(2, 3)}),
    (
        {"score_mod": lambda s, b, h, q, k: np.where(q >= k, CAP * np.tanh(s / CAP) + BIAS[h, q, k], -np.inf)},
        {"bias": BIAS[None], "causal": True, "softcap": CAP},
    ),
]


@pytest.mark.parametrize(("given", "means"), CANONICAL, ids=map(str, range(len(CANONICAL))))
def test_a_modifier_that_options_can_say_is_the_call_with_those_options(
    given: dict[str, Any], means: dict[str, Any]
) -> None:
    """Also the problem is equal up to the way of saying "top left", and so are the kernels and the numbers."""
    from nvrtc_attn.heuristics.common import features_of

    ours, theirs = described(**given), described(**means)
    assert ours.modifier is None
    assert features_of(ours.problem) == features_of(theirs.problem)
    for name in ("window_left", "window_right", "softcap", "bias", "modifier"):
        assert getattr(ours.problem, name) == getattr(theirs.problem, name), name
    q, k, v, _ = tensors((1, 2, 8, 8), 0)
    np.testing.assert_array_equal(nvrtc_attn.attention(q, k, v, **given), nvrtc_attn.attention(q, k, v, **means))


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({"mask_mod": lambda b, h, q, k: q >= k}, (8, 12)),
        ({"mask_mod": lambda b, h, q, k: q - k <= WIDTH}, (8, 12)),
        ({"mask_mod": lambda b, h, q, k: q > k}, (8, 8)),
        ({"mask_mod": lambda b, h, q, k: (q >= k) & (k % 2 == 0)}, (8, 8)),
        ({"mask_mod": lambda b, h, q, k: q >= k, "causal": True}, (8, 12)),
        ({"mask_mod": lambda b, h, q, k: q >= k, "causal": "top_left", "window_size": (2, None)}, (8, 12)),
        ({"score_mod": lambda s, b, h, q, k: s + ROWS[h, k]}, (8, 12)),
        ({"score_mod": lambda s, b, h, q, k: s + ROWS[h, q]}, (8, 12)),
        ({"score_mod": lambda s, b, h, q, k: np.sin(s) + ROWS[h, k]}, (8, 12)),
        ({"score_mod": lambda s, b, h, q, k: s * ROWS[h, k] + ROWS[h, k]}, (8, 12)),
        ({"score_mod": lambda s, b, h, q, k: s + BIAS[h, q, k] + ROWS[h, k]}, (8, 8)),
        ({"score_mod": lambda s, b, h, q, k: np.where(s > 0, s, -np.inf)}, (8, 8)),
    ],
    ids=map(str, range(12)),
)
def test_what_is_left_of_a_modifier_gives_the_same_numbers(given: dict[str, Any], lengths: tuple[int, int]) -> None:
    q, k, v, _ = tensors((1, 2, *lengths), 0)
    out = nvrtc_attn.attention(q, k, v, **given)
    causal = given.get("causal", False)
    left = given.get("window_size", (None, None))[0]
    off = lengths[1] - lengths[0] if causal is True else 0

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        keep = given["mask_mod"](b, h, i, j) if "mask_mod" in given else j >= 0
        keep = keep & (j <= i + off) if causal else keep
        return keep if left is None else keep & (j >= i + off - left)

    exact, _ = modifiers.textbook(q, k, v, given.get("score_mod"), mask)
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)


def check_gradients(modifier: Any) -> list[Any]:
    """Compare those of q, k, v and the captured arrays with the float64 reference's; returns its own of the arrays."""
    q, k, v, dout = tensors((2, 2, 8, 8), 0)
    out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True)
    gradients = [np.full_like(x, np.nan) for x in (q, k, v)]
    daux = [np.full(x.shape, np.nan, np.float32) for x in modifier.captures]
    nvrtc_attn.attention_backward(dout, q, k, v, out, lse, *gradients, score_mod=modifier, daux=daux)
    wide = HostModifier(modifier, [x.astype(np.float64) for x in modifier.captures])
    sums = [np.zeros(x.shape) for x in modifier.captures]
    doubles = [x.astype(np.float64) for x in (dout, q, k, v)]
    exact = reference.attention_forward(*doubles[1:], modifier=wide)
    expected = reference.attention_backward(*doubles, *exact, modifier=wide, capture_grads=sums)
    for ours, theirs in zip((*gradients, *daux), (*expected[:3], *sums), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    return sums


def test_the_gradient_of_an_array_that_became_a_bias() -> None:
    check_gradients(trace(lambda s, b, h, i, j: np.sin(s) * ROWS[0, 3] + BIAS[h, j, i]))


@pytest.mark.parametrize("way", ["score", "mask", "both"])
def test_the_gradient_of_a_bias_that_decides_a_mask_too(way: str) -> None:
    """It is that of the bias; what is left of the modifier reads the array, and no score of it depends on that."""

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        added = s + BIAS[h, i, j]
        return added if way == "mask" else np.where(BIAS[h, i, j] > -0.5, added, -np.inf)

    modifier = trace(score_mod, None if way == "score" else lambda b, h, i, j: BIAS[h, i, j] < 1.0)
    assert np.abs(check_gradients(modifier)[0]).max() > 0.1


# ----------------------------------------------------------------------------------------------------------- remembered


def remembered(*functions: Any) -> bool:
    """Whether the second of two equal calls finds the trace of the first."""
    from nvrtc_attn.modifiers import remembered as table

    before = len(table._traces)
    trace(*functions)
    facts = table.facts_of(*functions, None) if len(functions) == 1 else table.facts_of(*functions)
    found = facts is not None and table.find(facts) is not None
    assert found or len(table._traces) == before
    return found


def test_a_trace_is_remembered_by_all_that_the_function_reads() -> None:
    """Numbers, shapes, aliases and captured functions; arrays are those of the call."""

    def make(slope: Any, x: Array, y: Array, inner: Any = abs) -> Any:
        return lambda s, b, h, q, k: s + slope * x[h] + y[h] * inner(q - k)

    one, two = np.ones(4, np.float32), np.arange(4, dtype=np.float32)
    assert remembered(make(0.5, one, two))
    again = trace(make(0.5, two, one))
    assert [id(x) for x in again.captures] == [id(two), id(one)]
    assert trace(make(0.75, one, two)).numbers == (0.75,)
    assert trace(make(2, one, two)).program.numbers == ("int",)
    assert len(trace(make(0.5, one, one)).captures) == 1
    assert trace(make(0.5, one.astype(np.float64), two)).program.captures[0][0] == "float64"
    assert trace(make(0.5, one, two, lambda x: x * x)).program != again.program
    assert remembered(make(0.5, one, two, lambda x: x * x))
    q, k, v, _ = tensors((1, 4, 8, 8), 0)
    for x in (one, two, 3 * two):
        out = nvrtc_attn.attention(q, k, v, score_mod=make(0.5, x, two))
        exact, _ = modifiers.textbook(q, k, v, make(0.5, x, two), None)
        np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)


class Settings:
    width = 3


def test_what_may_change_unseen_is_traced_anew() -> None:
    """Attributes of the user's objects, and results of computing with an array."""
    settings = Settings()
    table = np.arange(8, dtype=np.float32)

    def by_class(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k) % Settings.width == 0

    def by_object(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k) % settings.width == 0

    def by_part(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[2:][h]

    assert not remembered(None, by_class)
    assert not remembered(None, by_object)
    assert not remembered(by_part)
    before = trace(None, by_object).numbers
    settings.width = 5
    assert (before, trace(None, by_object).numbers) == ((3,), (5,))


def test_what_is_remembered_holds_no_array() -> None:
    import gc
    import weakref

    q, k, v, _ = tensors((1, 2, 8, 8), 0)

    def call() -> Any:
        table = np.ones(16, np.float32)

        def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return np.sin(s) + table[q] * k

        nvrtc_attn.attention(q, k, v, score_mod=score_mod)
        assert remembered(score_mod)
        return weakref.ref(table)

    watched = call()
    gc.collect()
    assert watched() is None


def test_expressions_that_share_their_parts_take_no_exponential_time() -> None:
    """2**60 paths lead through this one: it is traced twice, derived, written, compared and shown."""
    from nvrtc_attn.modifiers.cuda import cuda_source

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(60):
            s = s * s + 0.5 * np.tanh(s)
        for _ in range(60):
            s = s + s
        return s

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        x, kept = q, k >= 0
        for _ in range(60):
            x = x + x
            kept = (kept & (q > 2)) & (kept & (x < k))
        return kept

    first, second = (trace(lambda *x: score_mod(*x), lambda *x: mask_mod(*x)) for _ in range(2))
    assert first.program == second.program
    assert len(repr(first.program)) < 40000
    assert cuda_source(first.program) == cuda_source(second.program)
    q, k, v, _ = tensors((1, 2, 4, 4), 0)
    nvrtc_attn.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)


def test_a_captured_array_without_elements_is_refused() -> None:
    """No index is one of its; where there is no score either, nothing is read."""
    q = np.zeros((1, 4, 2, 8), np.float32)
    for empty in (np.zeros(0, np.int32), np.zeros((2, 0), np.float32)):

        def mask(b: Any, h: Any, i: Any, k: Any, empty: Any = empty) -> Any:
            return k < (empty[b] if empty.ndim == 1 else empty[h, i])

        with pytest.raises(ValueError, match=r"captured array 0 has shape \(.*0.*\): there is no element"):
            nvrtc_attn.attention(q, q, q, mask_mod=mask)
        assert nvrtc_attn.attention(q[:0], q[:0], q[:0], mask_mod=mask).shape == (0, 4, 2, 8)


BANDS: dict[str, tuple[Any, Any]] = {
    "causal": (None, lambda b, h, q, k: k <= q),
    "window": (None, lambda b, h, q, k: abs(q - k) <= 2),
    "causal, of a score": (lambda s, b, h, q, k: nvrtc_attn.where(k <= q, s, -float("inf")), None),
}


@pytest.mark.parametrize("beside", [{}, {"causal": True}, {"window_size": (3, 1)}], ids=str)
@pytest.mark.parametrize("name", BANDS)
def test_a_band_of_positions_stays_where_it_is_beside_used_keys(name: str, beside: dict[str, Any]) -> None:
    """Options' own bands end with the used keys, a function's counts from the first."""
    sizes = (3, 2, 8, 8)
    q, k, v, _ = tensors(sizes, 0)
    used = np.array([5, 8, 2], np.int32)
    score, mask = BANDS[name]
    found = nvrtc_attn.attention(q, k, v, score_mod=score, mask_mod=mask, seqused_k=used, **beside)
    i, j = np.indices(sizes[2:])
    keeps = {"window": abs(i - j) <= 2}.get(name, j <= i)
    for b, n in enumerate(used):
        x = (x[b, None, :size] for x, size in ((q, 8), (k, n), (v, n)))
        expected = nvrtc_attn.attention(*x, mask=keeps[None, None, :, :n], **beside)
        np.testing.assert_allclose(found[b, None], expected, atol=1e-6, err_msg=str(n))


@pytest.mark.parametrize("name", ["random", "numpy.random"])
@pytest.mark.parametrize("place", ["score_mod", "mask_mod"])
def test_random_numbers_are_refused(name: str, place: str) -> None:
    draw = {"random": random.random, "numpy.random": np.random.rand}[name]
    functions = {
        "score_mod": lambda s, b, h, q, k: s + draw(),
        "mask_mod": lambda b, h, q, k: k > 3 * draw(),
    }
    for _ in range(2):  # nothing is remembered
        with pytest.raises(nvrtc_attn.TraceError, match=f"random numbers of '{name}' are drawn"):
            nvrtc_attn.trace(**{place: functions[place]})


def test_numbers_that_are_drawn_before_or_elsewhere_are_not_refused() -> None:
    drawn = np.random.default_rng(0).random(4)
    nvrtc_attn.trace(lambda s, b, h, q, k: s + drawn[h])
    calls = []

    def disturbed(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        """Another thread draws, during the first attempts."""
        calls.append(0)
        if len(calls) < 3:
            thread = threading.Thread(target=random.random)
            thread.start()
            thread.join()
        return s + drawn[h]

    nvrtc_attn.trace(disturbed)
    assert len(calls) == 3


WAYS = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy, "copy": copy.copy}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_traced_modifier_can_be_copied(way: Callable[[Any], Any]) -> None:
    """With a model that keeps it: `copy.deepcopy` of weights that are averaged, `torch.save`, workers."""
    sizes = SIZES[0]
    q, k, v, _ = tensors(sizes, 0)
    for case in all_cases()[::7]:
        traced = trace(*case.make(arrays_of(case, sizes, 0)))
        made = way(traced)
        assert made.program == traced.program
        assert hash(made.program) == hash(traced.program)
        assert (made.numbers, made.text) == (traced.numbers, traced.text)
        for one, other in zip(made.captures, traced.captures, strict=True):
            np.testing.assert_array_equal(one, other)
        out, again = (nvrtc_attn.attention(q, k, v, score_mod=x) for x in (traced, made))
        np.testing.assert_array_equal(out, again)


def test_a_copy_of_a_traced_modifier_has_arrays_of_its_own() -> None:
    """Those of the object that is copied with it, where that has the same array."""
    slopes = np.ones(4, np.float32)
    model = {"slopes": slopes, "modifier": trace(lambda s, b, h, q, k: s + slopes[h] * (q - k))}
    copied = copy.deepcopy(model)
    assert copied["modifier"].captures[0] is copied["slopes"] is not slopes


def test_a_deep_expression_can_be_copied() -> None:
    def deep(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for i in range(3000):
            s = s + (q * i - k)
        return s

    traced = trace(deep)
    assert pickle.loads(pickle.dumps(traced)).program == traced.program


def test_a_traced_modifier_is_no_mask_mod() -> None:
    traced = trace(None, lambda b, h, q, k: q >= k)
    q, k, v, _ = tensors(SIZES[0], 0)
    with pytest.raises(nvrtc_attn.TraceError, match=r"mask_mod: .* Pass it as score_mod=\."):
        nvrtc_attn.attention(q, k, v, mask_mod=traced)
