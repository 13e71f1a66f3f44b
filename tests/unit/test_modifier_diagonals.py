"""What distances of query and key decide: which parts of an expression those are, and what warps make of them.

The warps are fibers of the host: the text of a modifier and ``collective/modifier.cuh`` are whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_cuda
import modifiers
import numpy as np
import pytest

from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.front.tensors import view
from nvrtc_attn.heuristics import choose_backward, choose_forward, common
from nvrtc_attn.modifiers import cuda, cuda_expressions, cuda_values, evaluate
from nvrtc_attn.modifiers.derivative import derivatives
from nvrtc_attn.modifiers.diagonals import diagonals
from nvrtc_attn.modifiers.trace import trace

TABLE = np.random.default_rng(0).standard_normal((3, 41)).astype(np.float32)
HALF = TABLE.astype(np.float16)
ROWS = np.random.default_rng(1).standard_normal(400).astype(np.float32)


def bucket(distance: Any) -> Any:
    size = abs(distance)
    far = 8 + (np.log(np.maximum(size, 1) / 8) / np.log(16.0) * 8).astype(np.int32)
    return np.where(size < 8, size, np.minimum(far, 15)) + np.where(distance > 0, 16, 0)


Function = Callable[..., Any]
SCORES: dict[str, tuple[Function, int]] = {
    "relative": (lambda s, b, h, q, k: s + TABLE[h, q - k + 20], 1),
    "half": (lambda s, b, h, q, k: s + HALF[h, q - k + 20], 1),
    "clipped": (lambda s, b, h, q, k: s + TABLE[h, np.minimum(np.maximum(k - q, -20), 20) + 20], 1),
    "t5": (lambda s, b, h, q, k: s + TABLE[h, bucket(k - q)], 1),
    "t5 by order": (lambda s, b, h, q, k: s + TABLE[h, np.where(k > q, 20, 0) + np.minimum(abs(q - k), 20)], 1),
    "factor": (lambda s, b, h, q, k: s * np.tanh(TABLE[h, 2 * q - 2 * k + 3]) + 0.1 * (k - q), 1),
    "one element": (lambda s, b, h, q, k: s + TABLE[h, abs(q - k) * 0 + 7], 1),
    "two tables": (lambda s, b, h, q, k: s * TABLE[h, q - k + 20] + TABLE[1, abs(q - k) + b] * ROWS[q % 400], 2),
    "a row beside": (lambda s, b, h, q, k: s + TABLE[h, q - k + 20] * ROWS[q % 400], 1),
    "transcendental": (lambda s, b, h, q, k: s - np.exp(-0.01 * abs(q - k)), 1),
}
"""Scores, and how many of their parts distances decide."""


@pytest.mark.parametrize("name", SCORES)
def test_parts_that_distances_decide(name: str) -> None:
    score, count = SCORES[name]
    program = trace(score).program
    assert len(diagonals([program.score], cuda_expressions.is_cheap)) == count
    text = cuda.cuda_source(program)
    assert "struct Diagonal {" in text
    assert "struct Diagonal {" not in cuda.cuda_source(program, by_distance=False)


@pytest.mark.parametrize("name", ["alibi", "distance", "head scale", "swin", "rows and columns", "documents", "prefix"])
def test_other_modifiers_have_none(name: str) -> None:
    """Cheap arithmetic, and what reads rows, columns or a matrix: their text is what it was."""
    case = next(x for x in modifiers.named_cases() if x.name == name)
    modifier = trace(*case.make(case.arrays((2, 4, 8, 8), np.random.default_rng(0))))
    args = modifier.program, modifier.differentiable
    assert "iagonal" not in cuda.cuda_source(*args)
    assert cuda.cuda_source(*args) == cuda.cuda_source(*args, by_distance=False)


def test_positions_that_differ_by_no_distance() -> None:
    for score in (
        lambda s, b, h, q, k: s + TABLE[h, q + k],
        lambda s, b, h, q, k: s + TABLE[h, 2 * q - k],
        lambda s, b, h, q, k: s + TABLE[h, q // 2 - k // 2],
        lambda s, b, h, q, k: s + TABLE[h, q - q],
        lambda s, b, h, q, k: s + TABLE[h, np.where(2 * k > q, 1, 0)],
        lambda s, b, h, q, k: np.tanh(s + q - k),
    ):
        assert diagonals([trace(score).program.score], cuda_expressions.is_cheap) == ()
    # What is left to a row is not the distance's.
    (part,) = diagonals([trace(lambda s, b, h, q, k: s + TABLE[h, q - k] * q).program.score], cuda_expressions.is_cheap)
    assert part.op == "load"


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 1.5])
def test_a_distance_is_compared_with_any_number(number: float) -> None:
    """As `nan_to_num` and `logaddexp` do: what is no integer is no sum of integers either."""
    score = trace(lambda s, b, h, q, k: np.where(np.exp(0.1 * (q - k)) == number, s, s + TABLE[h, q - k + 20]))
    assert len(diagonals([score.program.score], cuda_expressions.is_cheap)) == 2
    assert "struct Diagonal {" in cuda.cuda_source(score.program)


def test_a_part_of_a_larger_attention_has_the_same_distances() -> None:
    moved = trace(SCORES["relative"][0]).moved({"q": 5, "k": 3, "b": 0, "h": 1})
    (part,) = diagonals([moved.program.score], cuda_expressions.is_cheap)
    assert part.op == "load"


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = dense_layout((8, 768, 8, 64), "float16")
    asked = AttentionProblem(
        dtype="float16", batch=8, seqlen_q=768, seqlen_k=768, num_heads=8, num_heads_kv=8, head_dim=64, head_dim_v=64,
        q=layout, k=layout, v=layout, softmax_scale=0.125, modifier=trace(SCORES["relative"][0]).program, trained=(0,),
    )  # fmt: skip
    for choose in (choose_forward, choose_backward):
        texts = []
        for on in (True, False):
            monkeypatch.setattr(common, "COMPUTES_BY_DISTANCE", on)
            launches = choose(asked, arch="sm_90", num_sms=132, smem_limit=232448).launches
            texts.append({x.config.features.modifier for x in launches} - {""})
        assert ["iagonal" in "".join(x) for x in texts] == [True, False]


PRELUDE = (
    "#include <algorithm>\n#include <cmath>\n#include <type_traits>\nusing std::min; using std::max; using std::abs;\n"
    "namespace cute { template <class...> using void_t = void; }\n"
    + host_cuda.FIBERS
    + host_cuda.NUMBERS
    + host_cuda.OF_MODIFIERS
)
WARP = """
extern "C" void SPACE_scores(void const* bytes, int b, int h, int i0, int j0, bool transposed, float const* products,
                             float* along, float* each, float* slopes, int* visits) {
  namespace x = SPACE;
  static x::ModifierBlock block;
  std::memcpy(&block, bytes, sizeof(block));
  run_block(32, [=] {
    int const g = threadIdx.x / 4, t = threadIdx.x % 4;
    x::Modifier<float> const modifier(block, b, h);
    Diagonals<x::Modifier<float>, TILES> diagonals;
    if (transposed) diagonals.compute_transposed(modifier, i0, j0); else diagonals.compute(modifier, i0, j0);
    diagonals.each([&](int n, int e, auto const& diagonal) {
      int const line = g + 8 * (e / 2), column = 8 * n + 2 * t + e % 2, at = line * 8 * TILES + column;
      int const q = i0 + (transposed ? column : line), k = j0 + (transposed ? line : column);
      int const q0 = i0 + (transposed ? 2 * t : g), k0 = j0 + (transposed ? g : 2 * t);
      float slope;
      along[at] = modifier.score(products[at], q, k, slope, diagonal, q0, k0);
      if (!same(along[at], modifier.score(products[at], q, k, diagonal, q0, k0))) along[at] = 12345.0f;
      each[at] = modifier.score(products[at], q, k, slopes[at], q0, k0);
      if (!same(slope, slopes[at])) along[at] = 54321.0f;
      ++visits[at];
    });
  });
}
"""
SUMS = """
extern "C" void SPACE_sums(void const* bytes, int b, int h, int i0, int j0, float const* products, float const* ds) {
  namespace x = SPACE;
  static x::ModifierBlock block;
  std::memcpy(&block, bytes, sizeof(block));
  run_block(32, [=] {
    using Modifier = x::Modifier<float>;
    int const g = threadIdx.x / 4, t = threadIdx.x % 4;
    Modifier const modifier(block, b, h);
    Diagonals<Modifier, 2> along;
    along.compute_transposed(modifier, i0, j0);
    DiagonalsOfSquare<Modifier, true> const diagonals(along);
    DiagonalSums<Modifier> sums;
    sums.clear();
    CapturedGradients<Modifier> gradients;
    for (int m = 0; m < 2; ++m) for (int e = 0; e < 4; ++e) {
      int const q = 8 * m + 2 * t + e % 2, k = g + 8 * (e / 2);
      ElementSums<Modifier::kKeyGradients> of_key;
      ElementSums<Modifier::kQueryGradients> of_query;
      modifier.add(gradients, of_key, of_query, sums.at(m, e), products[k * 16 + q], ds[k * 16 + q], i0 + q, j0 + k,
                   diagonals.at(m, e), i0 + 2 * t, j0 + g);
      auto const send = [](auto* element, float sum) { Modifier::Sum::add(element, sum); };
      LINES
    }
    float total[kSummedAlong<Modifier>];
    sums.fold(total);
    modifier.give(gradients, total, i0 + along.offset(0), j0, along.held[0]);
    gradients.finish(modifier);
  });
}
extern "C" void SPACE_total(void const* bytes) {
  namespace x = SPACE;
  x::ModifierBlock block;
  std::memcpy(&block, bytes, sizeof(block));
  TOTAL
}
"""
TOTAL = """x::Modifier<float>::each_gradient(block, [](ExactSum::Word const* words, float* result, int count) {
    for (int i = 0; i < count; ++i) result[i] = ExactSum::total(words + i * ExactSum::kWords);
  });"""
PLACES = ((0, 0), (7, 3), (64, 60), (3, 130), (300, 0))
TILES = (2, 5, 14, 16)


def library(programs: list[Any], factory: pytest.TempPathFactory, repository: Path) -> Any:
    header = repository / "cuda_src" / "nvrtc_attn" / "collective" / "modifier.cuh"
    text = header.read_text(encoding="utf-8").replace("#pragma unroll", "//")
    for line in ('#include "../common/numbers.cuh"', "#pragma once"):
        text = text.replace(line, "")
    same = "inline bool same(float a, float b) { return a == b || (a != a && b != b); }\nusing namespace nvrtc_attn;\n"
    lines = [PRELUDE, text, same]
    for space, source in programs:
        lines.append(source.replace("namespace nvrtc_attn {", f"namespace {space} {{ using namespace nvrtc_attn;"))
        for tiles in TILES:
            lines.append(WARP.replace("SPACE_scores", f"{space}_{tiles}").replace("SPACE", space)
                         .replace("TILES", str(tiles)))  # fmt: skip
        if "kSummedAlong" in source:
            total = TOTAL if "each_gradient" in source else ""
            lines_of = {
                "keys": "modifier.give_keys(of_key, j0 + k, send);",
                "queries": "modifier.give_queries(of_query, i0 + q, send);",
            }
            given = "".join(line for what, line in lines_of.items() if f"give_{what}" in source)
            lines.append(SUMS.replace("SPACE", space).replace("TOTAL", total).replace("LINES", given))
    flags = ("-O0", "-fPIC", "-shared", "-ffp-contract=off")
    return ctypes.CDLL(str(host_cuda.build("\n".join(lines), factory, *flags)))


def pointer(x: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data)


@pytest.mark.parametrize("name", [name for name in SCORES if name != "half"])  # the host has no such type
@pytest.mark.parametrize("ordered", [False, True])
def test_a_warp_has_what_each_score_would_have(
    name: str, ordered: bool, tmp_path_factory: pytest.TempPathFactory, repository: Path
) -> None:
    """Every score once, in tiles of any width, transposed or not, with elements out of range; and the gradients."""
    modifier = trace(SCORES[name][0])
    trained = modifier.differentiable
    ordered = ordered and bool(trained)
    source = cuda.cuda_source(modifier.program, trained, ordered)
    made = library([("own", source)], tmp_path_factory, repository)
    rng = np.random.default_rng(3)
    gradients = [np.zeros(x.shape, np.float32) if i in trained else None for i, x in enumerate(modifier.captures)]
    words = np.zeros(cuda_values.ordered_bytes(trained, modifier.captures), np.uint8)
    values = cuda_values.modifier_values(
        modifier.program, trained, [view(x, "x") for x in modifier.captures],
        [None if x is None else view(x, "g") for x in gradients], modifier.numbers,
        words.ctypes.data if ordered else None,
    )  # fmt: skip
    block = values.block.ljust(8, b"\0")
    for tiles in TILES:
        for i0, j0 in PLACES:
            for transposed in (False, True):
                shape = (16, 8 * tiles)
                products = rng.standard_normal(shape).astype(np.float32)
                along, each, slopes = (np.zeros(shape, np.float32) for _ in range(3))
                visits = np.zeros(shape, np.int32)
                getattr(made, f"own_{tiles}")(
                    block, 1, 2, i0, j0, transposed, *map(pointer, (products, along, each, slopes, visits))
                )
                assert (visits == 1).all()
                np.testing.assert_array_equal(along, each)
    if not hasattr(made, "own_sums"):
        assert not trained
        return
    expected = [np.zeros(x.shape) for x in modifier.captures]
    for i0, j0 in PLACES * 2:
        products, ds = (rng.standard_normal((16, 16)).astype(np.float32) for _ in range(2))
        k, q = np.meshgrid(j0 + np.arange(16), i0 + np.arange(16), indexing="ij")
        inputs = {"score": products, "b": np.int64(1), "h": np.int64(2), "q": q, "k": k}
        exact = evaluate.Values(inputs, modifier.captures, np.dtype(np.float32))
        ds[rng.random(ds.shape) < 0.1] = 0.0
        with np.errstate(all="ignore"):
            for node, derivative in derivatives(modifier.valued[0]).items():
                if node.op == "load":
                    index, inside = exact.indices(node)
                    parts = np.broadcast_to(ds * exact(derivative), ds.shape)
                    # A derivative that is not a number comes with a score that is none, which has no gradient but that.
                    parts = np.where(ds == 0, 0, parts)
                    parts = parts if inside is None else np.where(inside, parts, 0)
                    np.add.at(expected[node.value], tuple(np.broadcast_to(x, ds.shape) for x in index), parts)
        made.own_sums(block, 1, 2, i0, j0, pointer(products), pointer(ds))
    if ordered:
        assert all(x is None or not x.any() for x in gradients)
        made.own_total(block)
    for i in trained:
        np.testing.assert_allclose(gradients[i], expected[i], rtol=1e-4, atol=1e-4)
        assert np.nan_to_num(gradients[i]).any()
