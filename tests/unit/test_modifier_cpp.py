"""The C++ text of modifiers, compiled for the host and run, against the same expressions in NumPy.

What CUDA has and a host compiler has not is spelled in a few lines; the text and ``collective/modifier.cuh`` are whole.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import host_cuda
import modifiers
import numpy as np
import pytest
from modifiers import ModifierCase

from nvrtc_attn.front.tensors import view
from nvrtc_attn.modifiers import cuda, cuda_values, evaluate
from nvrtc_attn.modifiers.derivative import derivatives, slope
from nvrtc_attn.modifiers.trace import trace

SIZES = (2, 4, 13, 21)
PER_LIBRARY = 16
PLAINLY = "void add_plainly"

RUN = """
extern "C" void SPACE_run(void const* bytes, float const* scores, float const* ds, int B, int H, int M, int N,
                          float* out, float* slope, float* plain, unsigned char* keep) {
  namespace x = SPACE;
  using namespace nvrtc_attn;
  x::Modified<Plain> params;
  std::memcpy(&params.modifier, bytes, sizeof(x::ModifierBlock));
  long long at = 0;
  for (int b = 0; b < B; ++b) for (int h = 0; h < H; ++h) {
    x::Modifier<float> const modifier(params.modifier, b, h);
    for (int q = 0; q < M; ++q) for (int k = 0; k < N; ++k, ++at) {
      BODY
    }
  }
}
"""


TOTAL = """
extern "C" void SPACE_total(void const* bytes) {
  namespace x = SPACE;
  x::ModifierBlock block;
  std::memcpy(&block, bytes, sizeof(block));
  x::Modifier<float>::each_gradient(block, [](nvrtc_attn::ExactSum::Word const* words, float* result, int count) {
    for (int i = 0; i < count; ++i) result[i] = nvrtc_attn::ExactSum::total(words + i * nvrtc_attn::ExactSum::kWords);
  });
}
"""
SUMS = """
extern "C" float sum_exactly(float const* x, int count) {
  unsigned long long words[nvrtc_attn::ExactSum::kWords] = {};
  for (int i = 0; i < count; ++i) nvrtc_attn::ExactSum::add(words, x[i]);
  return nvrtc_attn::ExactSum::total(words);
}
"""


BITS = """
template <bool kOfLanes>
struct Asked {
  static constexpr bool kMasks = true;
  unsigned seed;
  bool all;
  bool keeps(int q, int k) const { return all || (unsigned(q * 7919 + k * 104729) ^ seed) * 2654435761u >> 31; }
  // What a query and a key have alone; of another one than the place says, the answer is wrong. This thread is lane 0.
  struct Queries {
    static constexpr bool kShared = kOfLanes;
    int x0;
    Queries of_lane(int lane) const { return {x0 + 7919 * lane}; }
  };
  struct Keys {
    static constexpr bool kShared = kOfLanes;
    int x0;
    Keys of_lane(int lane) const { return {x0 + 104729 * lane}; }
  };
  Queries queries(int q) const { return {q * 7919}; }
  Keys keys(int k) const { return {k * 104729}; }
  bool keeps(int q, int k, Queries const& of_q, Keys const& of_k) const {
    return keeps(q, k) == (of_q.x0 == q * 7919 && of_k.x0 == k * 104729);
  }
};
template <int kM, int kN, bool kOfLanes>
bool right_one(unsigned seed, bool all, bool transposed, bool slim) {
  Asked<kOfLanes> const asked{seed, all};
  int const i = 1000 + int(seed % 64), j = 3 + int(seed % 17);
  nvrtc_attn::MaskBits<Asked<kOfLanes>, kM, kN> bits;
  if (slim) {
    if (transposed) bits.template compute_slim<true>(asked, i, j); else bits.template compute_slim<false>(asked, i, j);
  } else {
    if (transposed) bits.compute_transposed(asked, i, j); else bits.compute(asked, i, j);
  }
  bool drops = false;
  for (int m = 0; m < kM; ++m) for (int n = 0; n < kN; ++n) for (int e = 0; e < 4; ++e) {
    // As the accumulators of products lie: rows g and g + 8 of 16, two neighbours of 8 columns.
    int const row = 16 * m + 8 * (e / 2), column = 8 * n + e % 2;
    bool const keep = transposed ? asked.keeps(i + column, j + row) : asked.keeps(i + row, j + column);
    if (bits.kept(m, n, e) != keep) return false;
    drops |= !keep;
  }
  if (bits.drops() != drops) return false;
  bits.fill();
  return !bits.drops() && bits.kept(kM - 1, kN - 1, 3);
}
template <int kM, int kN>
bool right(unsigned seed, bool all, bool transposed) {
  bool found = true;
  for (int slim = 0; slim < 2; ++slim) {
    found &= right_one<kM, kN, false>(seed, all, transposed, slim);
    found &= right_one<kM, kN, true>(seed, all, transposed, slim);
  }
  return found;
}
extern "C" unsigned nearest(int index, int size) { return nvrtc_attn::nearest(index, size); }
extern "C" int bits_are_right(unsigned seed, bool all, bool transposed) {
  bool const rows = right<1, 2>(seed, all, transposed) && right<1, 6>(seed, all, transposed) &&
                    right<1, 8>(seed, all, transposed) && right<1, 12>(seed, all, transposed) &&
                    right<1, 14>(seed, all, transposed) && right<1, 16>(seed, all, transposed);
  return rows && right<2, 8>(seed, all, transposed) && right<2, 5>(seed, all, transposed);
}
"""


def library(
    programs: list[tuple[Any, tuple[int, ...]]],
    factory: pytest.TempPathFactory,
    header: Path,
    ordered: bool = False,
    more: str = "",
) -> Any:
    """A library with one function for each program, two with ``ordered``."""
    text = header.read_text(encoding="utf-8").replace("#pragma unroll", "//")
    for line in ('#include "../common/numbers.cuh"', "#pragma once"):
        text = text.replace(line, "")
    lines = [host_cuda.ONE_THREAD, text]
    for i, (program, trained) in enumerate(programs):
        space = f"program{i}"
        source = cuda.cuda_source(program, trained, ordered and bool(trained))
        own = f"namespace {space} {{ using namespace nvrtc_attn;"
        body = []
        if program.score is not None:
            body.append("out[at] = modifier.score(scores[at], q, k, slope[at]);")
            body.append("plain[at] = modifier.score(scores[at], q, k, q - q % 4, k - k % 8);")
        if program.mask is not None:
            body.append("keep[at] = modifier.keeps(q, k);")
            body.append(
                "if (modifier.keeps(q, k, modifier.queries(q), modifier.keys(k)) != bool(keep[at])) keep[at] = 2;"
            )
        if "kTrains = true" in source:
            own_type = f"{space}::Modifier<float>"
            # Of every other score the way that knows no score, where there is one.
            plainly = "if (at % 2) modifier.add_plainly(captured, ds[at], q, k); else " if PLAINLY in source else ""
            body.append(
                f"CapturedGradients<{own_type}> captured;"
                f"ElementSums<{own_type}::kKeyGradients> of_key; ElementSums<{own_type}::kQueryGradients> of_query;"
                f"{plainly}modifier.add(captured, of_key, of_query, scores[at], ds[at], q, k);"
                "captured.finish(modifier);"
                f"auto send = [](auto* element, float sum) {{ {own_type}::Sum::add(element, sum); }};"
            )
            body += [
                f"modifier.give_{x}, send);"
                for x in ("keys(of_key, k", "queries(of_query, q")
                if f"give_{x[:4]}" in source
            ]
        lines.append(source.replace("namespace nvrtc_attn {", own))
        lines.append(RUN.replace("SPACE", space).replace("BODY", "\n".join(body)))
        if ordered and trained:
            lines.append(TOTAL.replace("SPACE", space))
    lines.append(more)
    flags = ("-O0", "-fPIC", "-shared", "-ffp-contract=off")
    return ctypes.CDLL(str(host_cuda.build("\n".join(lines), factory, *flags)))


def all_cases() -> list[ModifierCase]:
    masks = [modifiers.random_mask(5000 + seed) for seed in range(16)]  # distances as floats, too
    return [*modifiers.named_cases(), *masks, *(modifiers.random_case(5000 + seed) for seed in range(74))]


@pytest.mark.slow(sample=["0-False", "1-False", "2-False", "0-True"])
@pytest.mark.parametrize(("part", "ordered"), [*((part, False) for part in range(7)), (0, True), (1, True)])
def test_the_text_computes_what_numpy_does(
    part: int, ordered: bool, tmp_path_factory: pytest.TempPathFactory, repository: Path
) -> None:
    """Score, slope, mask, and what goes to the gradients of captured arrays; ``ordered``: by way of integers."""
    found = []
    for case in all_cases()[part * PER_LIBRARY : (part + 1) * PER_LIBRARY]:
        arrays = case.arrays(SIZES, np.random.default_rng(1))
        modifier = trace(*case.make(arrays))
        found.append((case, modifier, modifier.differentiable))
    assert found
    header = repository / "cuda_src" / "nvrtc_attn" / "collective" / "modifier.cuh"
    made = library([(modifier.program, trained) for _, modifier, trained in found], tmp_path_factory, header, ordered)
    rng = np.random.default_rng(2)
    scores, ds = (rng.standard_normal(SIZES).astype(np.float32) for _ in range(2))
    axes = [np.arange(n).reshape([-1 if a == d else 1 for a in range(4)]) for d, n in enumerate(SIZES)]
    for i, (case, modifier, trained) in enumerate(found):
        gradients = [np.zeros(x.shape, np.float32) if j in trained else None for j, x in enumerate(modifier.captures)]
        words = np.zeros(cuda_values.ordered_bytes(trained, modifier.captures), np.uint8)
        place = words.ctypes.data if ordered and trained else None
        values = cuda_values.modifier_values(
            modifier.program, trained, [view(x, "x") for x in modifier.captures],
            [None if x is None else view(x, "g") for x in gradients], modifier.numbers, place,
        )  # fmt: skip
        out, slopes, plain = (np.zeros(SIZES, np.float32) for _ in range(3))
        keep = np.zeros(SIZES, np.uint8)
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (scores, ds, out, slopes, plain, keep)]
        getattr(made, f"program{i}_run")(values.block.ljust(8, b"\0"), *pointers[:2], *SIZES, *pointers[2:])

        if place is not None:
            assert values.zeroed == ((place, words.nbytes),)
            assert all(x is None or not x.any() for x in gradients)
            getattr(made, f"program{i}_total")(values.block.ljust(8, b"\0"))
        score, mask = modifier.valued
        inputs = dict(zip(("score", "b", "h", "q", "k"), (scores, *axes), strict=True))
        exact = evaluate.Values(inputs, modifier.captures, np.dtype(np.float32))
        with np.errstate(all="ignore"):
            if score is not None:
                close(case, out, exact(score))
                close(case, plain, exact(score))  # counted from where a tile begins
                close(case, slopes, exact(slope(score)))
                sums = [np.zeros(x.shape) for x in modifier.captures]
                for node, derivative in derivatives(score).items():
                    if node.op == "load":
                        index, inside = exact.indices(node)
                        parts = np.broadcast_to(ds * exact(derivative), SIZES)
                        parts = parts if inside is None else np.where(inside, parts, 0)
                        np.add.at(sums[node.value], tuple(np.broadcast_to(x, SIZES) for x in index), parts)
                for j in trained:
                    np.testing.assert_allclose(gradients[j], sums[j], rtol=1e-3, atol=1e-3, err_msg=case.name)
            if mask is not None:
                np.testing.assert_array_equal(keep, np.broadcast_to(exact(mask), SIZES), err_msg=case.name)


def test_the_text_and_numpy_agree_about_nan(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> None:
    """Beside a number, on both sides, and of a sign; and at equal operands."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rows = np.array([math.nan, 1.0, -2.0, 0.0, math.nan], np.float32)
    functions: list[Any] = [
        lambda f, s, r: f.fmax(s, r), lambda f, s, r: f.fmin(s, r), lambda f, s, r: f.fmax(r, s),
        lambda f, s, r: f.fmin(r, s), lambda f, s, r: f.maximum(s, r), lambda f, s, r: f.minimum(r, s),
        lambda f, s, r: f.sign(s), lambda f, s, r: f.sign(r) * 2.0,
    ]  # fmt: skip
    found = [trace(lambda s, b, h, q, k, f=function: f(torch, s, rows[q])) for function in functions]
    header = repository / "cuda_src" / "nvrtc_attn" / "collective" / "modifier.cuh"
    made = library([(modifier.program, ()) for modifier in found], tmp_path_factory, header)
    sizes = (1, 1, len(rows), len(rows))
    scores = np.broadcast_to(rows, sizes).copy()
    axes = [np.arange(n).reshape([-1 if a == d else 1 for a in range(4)]) for d, n in enumerate(sizes)]
    for i, (modifier, function) in enumerate(zip(found, functions, strict=True)):
        values = cuda_values.modifier_values(
            modifier.program, (), [view(x, "x") for x in modifier.captures], [None] * len(modifier.captures),
            modifier.numbers,
        )  # fmt: skip
        out, slopes, plain = (np.zeros(sizes, np.float32) for _ in range(3))
        keep = np.zeros(sizes, np.uint8)
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (scores, scores, out, slopes, plain, keep)]
        getattr(made, f"program{i}_run")(values.block.ljust(8, b"\0"), *pointers[:2], *sizes, *pointers[2:])
        inputs = dict(zip(("score", "b", "h", "q", "k"), (scores, *axes), strict=True))
        score, _ = modifier.valued
        exact = evaluate.Values(inputs, modifier.captures, np.dtype(np.float32))
        given = torch.from_numpy(scores).requires_grad_()
        wanted = function(torch, given, torch.from_numpy(rows[:, None]))
        (slope_of_torch,) = torch.autograd.grad(wanted.sum(), given) if wanted.requires_grad else (torch.zeros(sizes),)
        for ours in (out, exact(score)):
            np.testing.assert_array_equal(np.broadcast_to(ours, sizes), wanted.detach().broadcast_to(sizes), f"{i}")
        for ours in (slopes, exact(slope(score))) if i < 4 else ():  # the others divide that of equal ones
            np.testing.assert_array_equal(np.broadcast_to(ours, sizes), slope_of_torch, f"{i}")


def close(case: ModifierCase, ours: Any, exact: Any) -> None:
    np.testing.assert_allclose(ours, np.broadcast_to(exact, SIZES), rtol=2e-4, atol=2e-5, err_msg=case.name)


def test_sums_of_integers_are_exact_whatever_the_order(
    tmp_path_factory: pytest.TempPathFactory, repository: Path
) -> None:
    """Of numbers of any size, subnormal ones and cancelling ones; NaN and infinities as in sums of floats."""
    header = repository / "cuda_src" / "nvrtc_attn" / "collective" / "modifier.cuh"
    made = library([], tmp_path_factory, header, more=SUMS)
    made.sum_exactly.restype = ctypes.c_float

    def total(x: Any) -> np.float32:
        given = np.ascontiguousarray(x, np.float32)
        return np.float32(made.sum_exactly(ctypes.c_void_p(given.ctypes.data), given.size))

    rng = np.random.default_rng(0)
    for seed in range(200):
        reach = (3, 30, 126)[seed % 3]
        x = np.ldexp(rng.standard_normal(rng.integers(1, 300)), rng.integers(-reach, reach, 1)).astype(np.float32)
        x = np.concatenate([x, np.ldexp(rng.standard_normal(50), rng.integers(-reach, 100, 50)).astype(np.float32)])
        if seed % 4 == 0:
            x = np.concatenate([x, -x, np.float32([1e-40, 3e-42])])
        exact = np.float32(math.fsum(x.astype(np.float64)))
        found = [total(rng.permutation(x)) for _ in range(3)]
        assert found[0] == found[1] == found[2]
        assert abs(found[0] - exact) <= np.spacing(abs(exact)), (found, exact)
    assert total([]) == 0.0
    assert total([2**-149] * 3) == np.float32(3 * 2.0**-149)
    assert total([np.inf, 1.0]) == np.inf
    assert total([-np.inf, 1.0]) == -np.inf
    assert np.isnan(total([np.inf, -np.inf]))
    assert np.isnan(total([np.nan, np.inf]))
    assert total([3e38, 3e38]) == np.inf
    assert total([3e38, 3e38, -3e38]) == np.float32(3e38)


def test_the_bits_of_a_mask_are_those_of_its_scores(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> None:
    """Of tiles of any width, as rows and transposed; and whether any score is dropped."""
    header = repository / "cuda_src" / "nvrtc_attn" / "collective" / "modifier.cuh"
    made = library([], tmp_path_factory, header, more=BITS)
    for seed in range(300):
        assert made.bits_are_right(seed, seed % 5 == 0, seed % 2 == 1), seed
    # An element that is read without being used exists, in a part of no elements that of its beginning.
    assert [made.nearest(i, 4) for i in (0, 3, 4, 2**31 - 1, -1, -(2**31))] == [0, 3, 3, 3, 3, 3]
    assert [made.nearest(i, 0) for i in (0, 7, -1)] == [0, 0, 0]
