"""Parts of a larger attention on the CPU path: a loop over ranks in one process against the whole call."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import cases
import modifiers
import numpy as np
import pytest
from cases import Array, Case
from modifiers import ModifierCase

import nvrtc_attn
from nvrtc_attn import heuristics
from nvrtc_attn.front.call import CallOptions, describe, describe_shapes
from nvrtc_attn.front.part import AXES
from nvrtc_attn.front.philox import RngState
from nvrtc_attn.front.problem import dense_layout
from nvrtc_attn.front.tensors import Device

Cuts = tuple[list[slice], list[slice], list[slice], list[slice]]
PROBLEMS = 60
FULL_PROBLEMS = 2000
"""A tenth of them in every turn: all take six minutes of one core."""


def pieces(rng: np.random.Generator, size: int, most: int, step: int = 1) -> list[slice]:
    """``range(size)`` cut at random multiples of ``step``, some pieces maybe empty."""
    cuts = sorted(int(rng.integers(0, size // step + 1)) * step for _ in range(int(rng.integers(0, most))))
    return [slice(a, b) for a, b in itertools.pairwise((0, *cuts, size))]


def merged(outs: list[Array], lses: list[Array]) -> tuple[Array, Array]:
    """The combination of partial results over parts of the keys: out ``[B, M, H, D]``, lse ``[B, H, M]``."""
    lse = np.stack(lses).astype(np.float64)
    top = lse.max(0)
    weights = np.exp(lse - np.where(np.isfinite(top), top, 0))
    total = weights.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.where(total > 0, top + np.log(total), -np.inf)
        weights = np.where(total > 0, weights / total, 0)
    out = sum(w.transpose(0, 2, 1)[..., None] * x for w, x in zip(weights, outs, strict=True))
    return np.asarray(out), whole


def slice_scores(x: Array, where: tuple[slice, ...]) -> Array:
    """The part of a broadcast operand."""
    return x[tuple(slice(None) if n == 1 else s for n, s in zip(x.shape, where, strict=True))]


def run_in_parts(case: Case, arrays: dict[str, Array], cuts: Cuts) -> dict[str, Array]:
    """out, lse and the gradients of ``case`` computed part by part, partial results in float32."""
    shape = cases.shapes(case)
    sizes = (case.batch, case.num_heads, case.seqlen_q, case.seqlen_k)
    group = case.num_heads // max(case.num_heads_kv, 1)
    options: dict[str, Any] = {**cases.call_options(case), "rng": (case.seed, case.offset)}
    options.pop("deterministic", None)
    result = {name: np.zeros(shape[name], np.float64) for name in ("out", "lse", "dq", "dk", "dv")}
    if "bias" in arrays:
        result["dbias"] = np.zeros(arrays["bias"].shape, np.float64)

    def part_of(*where: slice) -> tuple[dict[str, Any], dict[str, Array], slice]:
        b, h, m, n = where
        h_kv = slice(h.start // group, h.stop // group)
        extents = {
            axis: (s.start, size)
            for axis, s, size in zip(("batch", "heads", "rows", "keys"), where, sizes, strict=True)
        }
        given = {name: slice_scores(arrays[name], where) for name in ("bias", "mask") if name in arrays}
        qkv = {"q": arrays["q"][b, m, h], "k": arrays["k"][b, n, h_kv], "v": arrays["v"][b, n, h_kv]}
        return {**options, **given, "part": nvrtc_attn.Part(**extents)}, qkv, h_kv

    batches, heads, rows, keys = cuts
    for b, h, m in itertools.product(batches, heads, rows):
        outs, lses = [], []
        for n in keys:
            keywords, x, _ = part_of(b, h, m, n)
            out = np.full((*x["q"].shape[:3], case.head_dim_v), np.nan, np.float32)
            lse = np.full((x["q"].shape[0], x["q"].shape[2], x["q"].shape[1]), np.nan, np.float32)
            if "sink" in arrays and n is keys[0]:  # one more logit of the row, not of every part of its keys
                keywords["sink"] = arrays["sink"][h]
            nvrtc_attn.attention_forward(*x.values(), out, lse=lse, **keywords)
            outs.append(out)
            lses.append(lse)
        result["out"][b, m, h], result["lse"][b, h, m] = merged(outs, lses)
    out, lse = result["out"].astype(arrays["q"].dtype), result["lse"].astype(np.float32)
    for b, h, m, n in itertools.product(*cuts):
        keywords, x, h_kv = part_of(b, h, m, n)
        gradients = {f"d{name}": np.full(y.shape, np.nan, np.float32) for name, y in x.items()}
        if "bias" in arrays:
            gradients["dbias"] = np.full(keywords["bias"].shape, np.nan, arrays["bias"].dtype)
        nvrtc_attn.attention_backward(
            arrays["dout"][b, m, h], *x.values(), out[b, m, h], lse[b, h, m], **gradients, **keywords,
            dlse=arrays["dlse"][b, h, m] if "dlse" in arrays else None,
        )  # fmt: skip
        result["dq"][b, m, h] += gradients["dq"]
        result["dk"][b, n, h_kv] += gradients["dk"]
        result["dv"][b, n, h_kv] += gradients["dv"]
        if "bias" in arrays:
            slice_scores(result["dbias"], (b, h, m, n))[...] += gradients["dbias"]
    return result


def dense_cases(seed: int, count: int) -> Iterator[tuple[Case, Cuts]]:
    """Random problems without packed sequences, and where to cut them; NumPy has no bfloat16."""
    found = 0
    for index in itertools.count():
        case = cases.random_case(seed, index, max_flops=2e6)
        if case.varlen or case.seqused_k or case.dtype == "bfloat16":
            continue
        rng = np.random.default_rng([seed, index])
        group = case.num_heads // max(case.num_heads_kv, 1)
        cuts = (
            pieces(rng, case.batch, 2), pieces(rng, case.num_heads, 3, max(group, 1)),
            pieces(rng, case.seqlen_q, 4), pieces(rng, case.seqlen_k, 4),
        )  # fmt: skip
        sink = None if case.sink is None else "float32"
        yield dataclasses.replace(case, bias_dtype="float32", sink=sink), cuts
        found += 1
        if found == count:
            return


def check(case: Case, cuts: Cuts) -> list[str]:
    """Where the parts together break the error rule (A10)."""
    arrays = cases.make_arrays(case)
    exact_in = cases.cast_inputs(case, arrays)
    exact = cases.attention_dense(case, exact_in)
    low = cases.attention_low_precision(case, exact_in)
    given = {name: x.astype(case.dtype) if name in ("q", "k", "v", "dout") else x for name, x in arrays.items()}
    for name in ("bias", "dlse", "sink"):
        if name in given:
            given[name] = given[name].astype(np.float32)
    faults = []
    for name, found in run_in_parts(case, given, cuts).items():
        if name not in exact:
            continue
        finite = np.isfinite(exact[name])
        if not np.array_equal(np.isneginf(exact[name]), np.isneginf(found)) and name == "lse":
            faults.append(f"{case}, {cuts}: rows without keys differ")
        error = np.abs(found[finite] - exact[name][finite]).max(initial=0)
        if name == "dbias":
            # One number may be the sum of many rows, whose errors are those of lse and out. Both are rounded twice as
            # often as in the whole: in every part and when these are put together.
            bound = cases.error_bound(exact[name], low[name], "float32", factor=4)
            bound += cases.summed_delta_error(case, arrays, exact)
        else:
            bound = cases.error_bound(exact[name], low[name], "float32" if name == "lse" else case.dtype)
        if not error <= bound:
            faults.append(f"{case}, {cuts}: {name} {error:.3g}, allowed {bound:.3g}")
    return faults


def test_random_problems_in_parts_are_the_whole() -> None:
    """Batch, heads, rows and keys cut at random: the parts together keep the error rule of the whole call."""
    faults = [fault for case, cuts in dense_cases(5, PROBLEMS) for fault in check(case, cuts)]
    assert not faults, "\n".join(faults[:5])


@pytest.mark.slow
@pytest.mark.parametrize("tenth", [pytest.param(i, marks=pytest.mark.turns(10, i)) for i in range(10)])
def test_many_random_problems_in_parts_are_the_whole(tenth: int) -> None:
    problems = itertools.islice(dense_cases(6, FULL_PROBLEMS), tenth, None, 10)
    faults = [fault for case, cuts in problems for fault in check(case, cuts)]
    assert not faults, "\n".join(faults[:5])


def seen(q: Array, k: Array, **options: Any) -> Array:
    """Which scores a call lets through, by values that are one hot."""
    num_keys, width = k.shape[1], max(k.shape[1], 1)  # a head dim is at least 1
    v = np.broadcast_to(np.eye(num_keys, width, dtype=np.float32)[None, :, None], (*k.shape[:3], width))
    out = nvrtc_attn.attention(q, k, v, **options)
    return np.asarray(out.transpose(0, 2, 1, 3)[..., :num_keys] != 0)


BANDS: list[dict[str, Any]] = [
    {"causal": True}, {"window_size": (2, 1)}, {"causal": True, "window_size": (3, 0)}, {"causal": "top_left"},
]  # fmt: skip


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_the_diagonal_of_parts_ends_with_the_used_keys(band: dict[str, Any]) -> None:
    """As that of each batch entry without the other keys."""
    numbers = np.random.default_rng(0)
    q, k, v = (numbers.standard_normal((3, n, 2, 8), np.float32) for n in (7, 9, 9))
    used = np.array([5, 9, 0], np.int32)
    whole = np.concatenate(
        [nvrtc_attn.attention(*(x[b, None] for x in (q, k[:, :n], v[:, :n])), **band) for b, n in enumerate(used)]
    )
    parts = [nvrtc_attn.Part(sm_margin=0), nvrtc_attn.Part(heads=(0, 4)), nvrtc_attn.Part(batch=(1, 4), keys=(0, 9))]
    for part in (None, *parts):
        found = nvrtc_attn.attention(q, k, v, seqused_k=used, part=part, **band)
        np.testing.assert_allclose(found, whole, atol=1e-6, err_msg=str(part))
    for first, last in ((0, 3), (3, 4), (4, 7)):
        part = nvrtc_attn.Part(rows=(first, 7))
        found = nvrtc_attn.attention(q[:, first:last], k, v, seqused_k=used, part=part, **band)
        np.testing.assert_allclose(found, whole[:, first:last], atol=1e-6, err_msg=str(part))


def test_a_part_of_the_keys_does_not_know_where_the_used_ones_end() -> None:
    x, used = np.ones((1, 8, 1, 8), np.float32), np.array([5], np.int32)
    part = nvrtc_attn.Part(keys=(8, 16))
    for options in ({"causal": True}, {"window_size": (2, None)}):
        with pytest.raises(nvrtc_attn.UnsupportedError, match=r"part, keys: got \(8, 16\) with seqused_k"):
            nvrtc_attn.attention(x, x, x, seqused_k=used, part=part, **options)
    for options in ({"causal": "top_left"}, {}):
        nvrtc_attn.attention(x, x, x, seqused_k=used, part=part, **options)


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_the_mask_of_parts_is_the_wholes_bit_for_bit(causal: Any) -> None:
    """Every score is kept or dropped as `dropout_keep_mask` of the whole says, and seen as the whole's window says."""
    shape, p, rng = (3, 4, 37, 53), 0.4, (7, 1234567891011)
    q, k = np.zeros((3, 37, 4, 8), np.float32), np.zeros((3, 53, 2, 8), np.float32)
    options: dict[str, Any] = {"causal": causal, "window_size": (20, 5), "dropout_p": p, "rng": rng}
    whole = seen(q, k, **options)
    keep = nvrtc_attn.dropout_keep_mask(shape, p, rng)
    assert (whole == (keep & seen(q, k, causal=causal, window_size=(20, 5)))).all()
    numbers = np.random.default_rng(3)
    for _ in range(20):
        cuts = pieces(numbers, 3, 2), pieces(numbers, 4, 2, 2), pieces(numbers, 37, 3), pieces(numbers, 53, 3)
        for b, h, m, n in itertools.product(*cuts):
            part = nvrtc_attn.Part(batch=(b.start, 3), heads=(h.start, 4), rows=(m.start, 37), keys=(n.start, 53))
            found = seen(q[b, m, h], k[b, n, h.start // 2 : h.stop // 2], **options, part=part)
            assert (found == whole[b, h, m, n]).all(), part


def test_packed_sequences_are_cut_into_sequences_and_heads() -> None:
    """The dropout mask of packed sequences counts by the whole's heads and the longest lengths."""
    lengths_q, lengths_k, p, rng = (5, 9, 3), (7, 2, 11), 0.5, (3, 99)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (lengths_q, lengths_k))
    numbers = np.random.default_rng(0)
    q, k, v = (numbers.standard_normal((1, t, 4, 8), np.float32) for t in (17, 20, 20))
    options: dict[str, Any] = {"max_seqlen_q": 9, "max_seqlen_k": 11, "dropout_p": p, "rng": rng, "causal": True}
    whole = nvrtc_attn.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    for first, heads in itertools.product((0, 1), (slice(0, 2), slice(2, 4))):
        rows, keys = slice(cu_q[first], None), slice(cu_k[first], None)
        found = nvrtc_attn.attention(
            q[:, rows, heads], k[:, keys, heads], v[:, keys, heads], cu_seqlens_q=cu_q[first:] - cu_q[first],
            cu_seqlens_k=cu_k[first:] - cu_k[first], part=nvrtc_attn.Part(batch=(first, 3), heads=(heads.start, 4)),
            **options,
        )  # fmt: skip
        np.testing.assert_allclose(found, whole[:, rows, heads], atol=1e-6)


def problem(part: nvrtc_attn.Part | None, rows: int = 16, keys: int = 32, **options: Any) -> Any:
    q, k = np.zeros((1, rows, 2, 8), np.float32), np.zeros((1, keys, 2, 8), np.float32)
    return describe(q, k, k, options=CallOptions(part=part, **options), stream=None)


def test_starts_are_no_part_of_a_plan() -> None:
    """Parts that lie alike to the diagonal share a plan; what dropout adds is in the random numbers of the launch."""
    first = problem(nvrtc_attn.Part(rows=(16, 64), keys=(0, 64)), causal=True, dropout_p=0.1)
    second = problem(nvrtc_attn.Part(rows=(32, 64), keys=(16, 64)), causal=True, dropout_p=0.1)
    assert first.problem == second.problem
    assert first.problem.dropout_pitches == (2, 64, 64)
    assert first.kernel_rng(RngState(5, 7)) == RngState(5, 7 + 16 * 64)
    assert second.kernel_rng(RngState(5, 7)) == RngState(5, 7 + 32 * 64 + 16)
    # Beside the diagonal there is nothing to mask: a kernel without a band.
    assert not problem(nvrtc_attn.Part(rows=(48, 64), keys=(0, 64)), causal=True).problem.band
    # The whole, said in words, is the whole.
    whole = problem(nvrtc_attn.Part(rows=(0, 16), keys=(0, 32)), dropout_p=0.1).problem
    assert whole.dropout_pitches is None
    assert problem(None, dropout_p=0.1).problem.dropout_pitches is None


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: nvrtc_attn.Part(rows=(5, 3)), ValueError, "part, rows"),
        (lambda: nvrtc_attn.Part(keys=(-1, 3)), ValueError, "part, keys"),
        (lambda: nvrtc_attn.Part(heads=3), TypeError, "part, heads"),  # type: ignore[arg-type]
        (lambda: nvrtc_attn.Part(batch=(0, None)), TypeError, "part, batch"),  # type: ignore[arg-type]
        (lambda: nvrtc_attn.Part(batch=(0, 1.5)), TypeError, "part, batch"),  # type: ignore[arg-type]
        (lambda: problem(nvrtc_attn.Part(rows=(8, 20))), ValueError, "ends at 24"),
        (lambda: problem((0, 4)), TypeError, "nvrtc_attn.Part or None"),  # type: ignore[arg-type]
    ],
)
def test_wrong_parts_are_refused_by_name(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make()


def test_rows_of_packed_sequences_are_no_part() -> None:
    x, cu = np.zeros((1, 8, 1, 8), np.float32), np.array([0, 8], np.int32)
    with pytest.raises(nvrtc_attn.UnsupportedError, match="part, rows"):
        nvrtc_attn.attention(
            x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=8, max_seqlen_k=8,
            part=nvrtc_attn.Part(rows=(0, 16)),
        )  # fmt: skip


MODIFIED = [*modifiers.named_cases(), *modifiers.sparse_cases(), *(modifiers.random_case(seed) for seed in range(50))]


@pytest.mark.parametrize("case", MODIFIED, ids=lambda case: case.name.split(":")[0])
def test_modifiers_of_parts_are_those_of_the_whole(case: ModifierCase) -> None:
    """Cut in every axis, with options beside: out, lse and gradients, those of captured arrays too, of the whole."""
    seed = sum(map(ord, case.name))
    rng = np.random.default_rng(seed)
    sizes = b, h, m, n = int(rng.integers(1, 3)), 4, int(rng.integers(2, 60)), int(rng.integers(2, 60))
    arrays = case.arrays(sizes, rng)
    q, k, v, dout = (
        rng.standard_normal(x).astype(np.float32) for x in ((b, m, h, 8), (b, n, 2, 8), (b, n, 2, 8), (b, m, h, 8))
    )
    # Softcaps are those of the modifier; the others say what parts have to keep beside it.
    causal, window, dropout = seed % 3 == 1, (30, 30) if seed % 4 == 1 else (None, None), 0.2 * (seed % 2)
    options: dict[str, Any] = {"causal": causal, "window_size": window, "dropout_p": dropout, "rng": (5, 6)}
    score_mod = nvrtc_attn.trace(*case.make(arrays))
    options["score_mod"] = score_mod
    cuts = pieces(rng, b, 2), [slice(0, 2), slice(2, 4)], pieces(rng, m, 4), pieces(rng, n, 3)
    whole = run_modified(q, k, v, dout, options, ([slice(0, b)], [slice(0, h)], [slice(0, m)], [slice(0, n)]), None)
    for name, x, y in zip(NAMES, run_modified(q, k, v, dout, options, cuts, whole), whole, strict=True):
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * max(np.abs(y[np.isfinite(y)]).max(initial=1), 1),
                                       err_msg=name)  # fmt: skip


NAMES = ("out", "lse", "dq", "dk", "dv", "daux")


def run_modified(
    q: Array, k: Array, v: Array, dout: Array, options: dict[str, Any], cuts: Cuts, known: Any
) -> tuple[Array, ...]:
    """out, lse, dq, dk, dv and the gradients of captured arrays one behind the other, of parts put together."""
    sizes = (*q.shape[:1], q.shape[2], q.shape[1], k.shape[1])
    modifier = options["score_mod"]
    out, lse = np.zeros(q.shape), np.zeros((*q.shape[:1], q.shape[2], q.shape[1]))
    grads = [np.zeros(x.shape) for x in (q, k, v)]
    daux = [np.zeros(x.shape) if i in modifier.differentiable else None for i, x in enumerate(modifier.captures)]

    def part_of(where: tuple[slice, ...]) -> tuple[dict[str, Any], tuple[Array, ...], slice]:
        b, h, m, n = where
        h_kv = slice(h.start // 2, h.stop // 2)
        extents = {axis: (s.start, x) for axis, s, x in zip(AXES, where, sizes, strict=True) if s.stop - s.start < x}
        part = nvrtc_attn.Part(**extents) if known is not None else None
        return {**options, "part": part}, (q[b, m, h], k[b, n, h_kv], v[b, n, h_kv]), h_kv

    for b, h, m in itertools.product(*cuts[:3]):
        parts = []
        for n in cuts[3]:
            keywords, x, _ = part_of((b, h, m, n))
            parts.append(nvrtc_attn.attention(*x, return_lse=True, **keywords))
        outs, lses = zip(*parts, strict=True)
        out[b, m, h], lse[b, h, m] = merged(list(outs), list(lses))
    out, lse = out.astype(np.float32), lse.astype(np.float32)
    out_of, lse_of = (out, lse) if known is None else known[:2]  # what is compared is the backward pass alone
    for b, h, m, n in itertools.product(*cuts):
        keywords, x, h_kv = part_of((b, h, m, n))
        shares = [np.full(y.shape, np.nan, np.float32) for y in x]
        more = [None if y is None else np.full(y.shape, np.nan, np.float32) for y in daux]
        nvrtc_attn.attention_backward(
            dout[b, m, h], *x, out_of[b, m, h], lse_of[b, h, m], *shares, daux=more or None, **keywords
        )
        for total, share, at in zip(grads, shares, ((b, m, h), (b, n, h_kv), (b, n, h_kv)), strict=True):
            total[at] += share
        for of_array, of_part in zip(daux, more, strict=True):
            if of_array is not None:
                of_array += of_part
    return out, lse, *grads, np.concatenate([np.zeros(1), *(x.ravel() for x in daux if x is not None)])


def test_parts_of_a_modifier_are_one_kernel() -> None:
    """Where a part begins is a number of the call: the problem, which decides the kernel, is that of every part."""
    q, k = np.zeros((1, 16, 4, 64), np.float16), np.zeros((1, 32, 4, 64), np.float16)
    slopes, full = np.zeros(8, np.float32), np.zeros((8, 64, 96), np.float16)

    def of(part: nvrtc_attn.Part | None) -> Any:
        modifier = nvrtc_attn.trace(lambda s, b, h, q, k: s + slopes[h] * (k - q) + full[h, q, k])
        return describe(q, k, k, options=CallOptions(part=part), stream=None, modifier=modifier)

    places = [(0, 0, 0), (4, 16, 32), (1, 48, 64)]
    calls = [of(nvrtc_attn.Part(heads=(h, 8), rows=(m, 64), keys=(n, 96))) for h, m, n in places]
    assert len({x.problem for x in calls}) == 1
    assert [x.modifier.numbers for x in calls] == places
    # An array that is the whole's bias is the part's, from where the part begins.
    assert [x.tensors["bias"].ptr - full.ctypes.data for x in calls] == [
        2 * ((h * 64 + m) * 96 + n) for h, m, n in places
    ]
    assert calls[0].tensors["bias"].shape == (1, 4, 16, 32)


def test_bounds_of_a_modifier_are_those_of_the_whole() -> None:
    """A band is the options', counted from the whole's corner: no part has a kernel with a mask of its own for it."""
    q, k = np.zeros((1, 16, 4, 64), np.float16), np.zeros((1, 32, 4, 64), np.float16)
    call = describe(
        q, k, k, options=CallOptions(part=nvrtc_attn.Part(rows=(48, 64), keys=(32, 64))), stream=None,
        modifier=nvrtc_attn.trace(None, lambda b, h, q, k: (q >= k) & (q - k < 20)),
    )  # fmt: skip
    assert call.modifier is None
    assert (call.problem.window_left, call.problem.window_right) == (19 - 16, 16)


def test_float32_results_that_no_gpu_kernel_writes_are_refused() -> None:
    """Before a launch: of dk and dv one alone, and a dq in a fixed order by the portable kernels."""
    x = np.zeros((1, 128, 2, 64), np.float16)
    half = describe(x, x, x, options=CallOptions(), stream=None).problem
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
    single = dense_layout(x.shape, "float32")
    with pytest.raises(nvrtc_attn.UnsupportedError, match="both alike"):
        heuristics.choose_backward(half.with_layouts(dv=single), **target)
    ordered = describe(x, x, x, options=CallOptions(deterministic=True), stream=None).problem
    heuristics.choose_backward(ordered.with_layouts(dq=single), **target, backend="hopper")
    with pytest.raises(nvrtc_attn.UnsupportedError, match="deterministic"):
        heuristics.choose_backward(ordered.with_layouts(dq=single), **{**target, "arch": "sm_89"})


@pytest.mark.parametrize("wrong", [-1, 1.5, "2"])
def test_wrong_margins_are_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="sm_margin"):
        nvrtc_attn.Part(sm_margin=wrong)


def test_a_part_with_dropout_needs_the_numbers_of_the_whole() -> None:
    x = np.zeros((1, 8, 1, 8), np.float32)
    with pytest.raises(ValueError, match="rng: None"):
        nvrtc_attn.attention(x, x, x, dropout_p=0.5, part=nvrtc_attn.Part(rows=(0, 16)))


def planned(part: nvrtc_attn.Part | None, rows: int, keys: int, heads: int = 32, dim: int = 128, **options: Any) -> Any:
    """The configs of both passes of the main kernels on an H200, and their grids."""
    shapes = {name: ((1, n, h, dim), "bfloat16") for name, n, h in (("q", rows, heads), ("k", keys, heads // 4))}
    shapes["v"] = shapes["k"]
    call = describe_shapes(shapes, CallOptions(return_lse=True, part=part, **options), Device("cuda", 0))
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
    forward = heuristics.choose_forward(call.with_dense(), **target).main
    backward = heuristics.choose_backward(call.with_dense(), **target).launches
    main = next((x for x in backward if x.config.kernel.startswith("backward")), backward[0])
    return forward.config, main.config


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("rows", "keys", "heads"), [((1024, 4096), (0, 4096), 32), ((3840, 4096), (0, 4096), 4), ((0, 4096), (0, 4096), 4)]
)
def test_parts_are_planned_as_the_whole(rows: Any, keys: Any, heads: int, dim: int) -> None:
    """The tiles of the whole, where a part's own sizes would choose others; its own grid and schedule."""
    options = {"causal": True, "deterministic": True}
    whole = planned(None, 4096, 4096, dim=dim, **options)
    count = min(1024, rows[1] - rows[0])
    seen = rows[0] + count
    extents: dict[str, Any] = {"heads": (32 - heads, 32), "rows": rows, "keys": keys}
    like = planned(nvrtc_attn.Part(**extents, plan_as=True), count, seen, heads, dim, **options)
    forward = {x: getattr(like[0], x) for x in TILE if x != "half_tile"}
    assert forward == {x: getattr(whole[0], x) for x in forward}
    assert like[1].kernel == whole[1].kernel
    assert like[1].block_m == whole[1].block_m


def test_plans_as_the_whole_differ_from_those_of_the_sizes() -> None:
    """What `plan_as` is for: 1,024 of 4,096 rows have another tile by themselves."""
    extents: dict[str, Any] = {"rows": (0, 4096), "keys": (0, 4096)}
    alone, like = (planned(nvrtc_attn.Part(**extents, plan_as=x), 1024, 1024, causal=True)[0] for x in (False, True))
    assert (alone.half_tile, like.half_tile) == (True, False)


def test_portable_kernels_are_planned_as_the_wholes_too() -> None:
    shapes = dict.fromkeys("qkv", ((1, 40, 32, 64), "float16"))
    target: dict[str, Any] = {"arch": "sm_89", "num_sms": 128, "smem_limit": 101376}
    found = {}
    for plan_as in (False, True):
        part = nvrtc_attn.Part(rows=(0, 4096), keys=(0, 4096), plan_as=plan_as)
        call = describe_shapes(shapes, CallOptions(part=part), Device("cuda", 0))
        found[plan_as] = heuristics.choose_forward(call.with_dense(), **target).main.config
    shapes = dict.fromkeys("qkv", ((1, 4096, 32, 64), "float16"))
    whole = heuristics.choose_forward(describe_shapes(shapes, CallOptions(), Device("cuda", 0)).with_dense(), **target)
    assert found[True] == whole.main.config != found[False]


def test_a_part_has_the_cluster_of_the_whole() -> None:
    """Half of the heads of a decoding step, on a device that has clusters and on one that has none."""
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}

    def decode(heads: int, part: nvrtc_attn.Part | None, **changes: Any) -> Any:
        shapes = {"q": ((1, 1, heads, 128), "bfloat16")}
        shapes |= dict.fromkeys("kv", ((1, 8192, heads // 4, 128), "bfloat16"))
        call = describe_shapes(shapes, CallOptions(part=part), Device("cuda", 0))
        return heuristics.choose_forward(call.with_dense(), **target, **changes)

    like, alone = (nvrtc_attn.Part(heads=(0, 64), plan_as=x) for x in (True, False))
    whole, part, other = decode(64, None), decode(8, like), decode(8, alone)
    assert part.main.config == whole.main.config != other.main.config
    assert part.main.config.cluster > 1
    assert dict(part.main.params)["num_splits"] == part.main.config.cluster
    assert len(part.launches) == 1
    whole, part = decode(64, None, clusters=False), decode(8, like, clusters=False)
    assert [x.config.kernel for x in part.launches] == [x.config.kernel for x in whole.launches]
    assert part.num_splits == whole.num_splits > 1


TILE = ("kernel", "block_m", "block_n", "num_stages", "lazy_max", "half_tile", "ping_pong", "packed_heads")


def test_a_wrong_plan_as_is_refused() -> None:
    with pytest.raises(TypeError, match="plan_as"):
        nvrtc_attn.Part(plan_as=16384)  # type: ignore[arg-type]
