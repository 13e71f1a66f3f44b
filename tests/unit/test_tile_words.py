"""Words of tiles: the twin of the plan, the device code that walks them, compiled for the host, and when they pay."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import host_cuda
import numpy as np
import pytest
from tile_words_twin import of_tiles, tile_words

from nvrtc_attn import heuristics
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import (
    hopper_backward,
    hopper_backward_tile,
    hopper_forward,
    hopper_forward_tile,
    portable_backward,
)
from nvrtc_attn.heuristics.spec import BackwardPlanSpec, ForwardPlanSpec
from nvrtc_attn.heuristics.tile_words import MIN_FLOPS, ORDERED_LINES, TileWords, line_order_of, pays, words_of
from nvrtc_attn.jit.codegen import params_class

TARGET: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
FORMS = tuple(itertools.product((True, False), repeat=4))
"""Whether each dim of a mask is full."""


def problem(
    mask: tuple[bool, ...] | None = (True, False, False, True), batch: int = 4, seqlen_q: int = 2048,
    seqlen_k: int = 2048, num_heads: int = 16, num_heads_kv: int = 16, head_dim: int = 64, **more: Any,
) -> AttentionProblem:  # fmt: skip
    dtype = more.get("dtype", "bfloat16")
    rows, keys = (batch, seqlen_q, num_heads, head_dim), (batch, seqlen_k, num_heads_kv, head_dim)
    values: dict[str, Any] = {
        "dtype": dtype, "batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "num_heads": num_heads,
        "num_heads_kv": num_heads_kv, "head_dim": head_dim, "head_dim_v": head_dim,
        "q": dense_layout(rows, dtype), "k": dense_layout(keys, dtype), "v": dense_layout(keys, dtype),
    }  # fmt: skip
    if mask is not None:
        sizes = (batch, num_heads, seqlen_q, seqlen_k)
        values["mask"] = dense_layout(tuple(n if full else 1 for n, full in zip(sizes, mask, strict=True)), "bool")
    return AttentionProblem(**{**values, **more})


# ------------------------------------------------------------------------------------------------- the twin of the plan


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_twin_is_what_counting_says(form: tuple[bool, ...], transposed: bool) -> None:
    """Every tile of random masks, looked up by strides as a kernel does."""
    rng = np.random.default_rng([*form, transposed])
    for rows, cols, seqlen_q, seqlen_k in ((3, 2, 10, 71), (4, 16, 4, 33), (5, 3, 170, 7), (8, 8, 1, 1)):
        asked = problem(form, batch=2, num_heads=3, num_heads_kv=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        assert asked.mask is not None
        words = words_of(asked, rows, cols, transposed=transposed)
        density = rng.choice([0.02, 0.5, 0.98])
        mask = (rng.random(asked.mask.shape) < density) * rng.integers(1, 256, asked.mask.shape, np.uint8)
        made = tile_words(mask, words, seqlen_q, seqlen_k)
        assert made.nbytes == words.nbytes
        memory = made.reshape(-1, 2)
        full = np.broadcast_to(mask != 0, (2, 3, seqlen_q, seqlen_k))
        for b, h, m, n in itertools.product(
            range(2), range(3), range(-(-seqlen_q // rows)), range(-(-seqlen_k // cols))
        ):
            line, tile = (n, m) if transposed else (m, n)
            at = np.dot((b, h, line), words.strides) + tile // 32
            scores = full[b, h, m * rows : (m + 1) * rows, n * cols : (n + 1) * cols]
            assert bool(memory[at, 0] >> (tile % 32) & 1) == scores.any()
            assert bool(memory[at, 1] >> (tile % 32) & 1) == scores.all()


def test_bits_beyond_the_tiles_are_cut() -> None:
    words = words_of(problem(seqlen_k=5 * 128), 128, 128)
    found = np.full((4, 1, 1, 1, 2), 0xFFFFFFFF, np.uint32)
    assert (of_tiles(found, words) == 0b11111).all()


# -------------------------------------------------------------------------------------------- device code on the host

PRELUDE = """
#include <cstdio>
#include <cstdlib>
#include <vector>
#define NVRTC_ATTN_DEVICE inline
namespace nvrtc_attn {
using index_t = long long;
template <class Params>
struct WithTileWords : Params {
  long long tile_words_offset, tile_words_stride_b, tile_words_stride_h, tile_words_stride_line;
  long long tile_order_offset, tile_order_stride_b, tile_order_stride_h, tile_order_stride_line;
};
struct ForwardParams { void* softmax_partial; };
struct BackwardParams { int* counters; int heads_per_group; };
using HopperBackwardParams = BackwardParams;
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int uniform(int x) { return x; }
}  // namespace nvrtc_attn
"""
WORK = """
namespace nvrtc_attn {
template <class Traits>
struct KeyTileWork {
  struct { int b, n_block; } tile;
  struct { int first, count, start; } range;
};
"""
MAIN = """
}  // namespace nvrtc_attn
using namespace nvrtc_attn;
long checks = 0;
void check(bool right, char const* what, int x, int y) {
  ++checks;
  if (!right) std::printf("%s of (%d, %d)\\n", what, x, y);
}

void check_line(int tiles, double density) {
  std::vector<TileWord> words((tiles + 31) / 32);
  for (TileWord& w : words) w = {unsigned(rand()) * 2u + 1u, unsigned(rand())};  // bits beyond the tiles are anything
  std::vector<bool> some(tiles), all(tiles);
  for (int t = 0; t < tiles; ++t) {
    some[t] = rand() < density * RAND_MAX, all[t] = some[t] && rand() % 2;
    unsigned const bit = 1u << t % 32;
    words[t / 32].some = (words[t / 32].some & ~bit) | (some[t] ? bit : 0);
    words[t / 32].all = (words[t / 32].all & ~bit) | (all[t] ? bit : 0);
  }
  TileLine const line{words.data()};
  for (int t = 0; t < tiles; ++t) check(line.some(t) == some[t] && line.all(t) == all[t], "bit", t, tiles);
  for (int end = 0; end <= tiles; ++end) {
    int before = end - 1;
    while (before >= 0 && !some[before]) --before;
    check(line.last_before(end) == before, "last_before", end, tiles);
    for (int begin = 0; begin <= end + 1; ++begin) {
      int from = begin, count = 0;
      while (from < end && !some[from]) ++from;
      for (int t = begin; t < end; ++t) count += some[t];
      check(line.first_from(begin, end) == (begin < end ? from : end), "first_from", begin, end);
      check(line.count(begin, end) == count, "count", begin, end);
    }
  }
}

void check_contents(int rows, int cols, int pitch, int column_pitch, int offset, double kept) {
  std::vector<unsigned char> memory(rows * pitch + cols * column_pitch + 64);
  unsigned char* base = memory.data();
  while (reinterpret_cast<unsigned long long>(base) % 16) ++base;
  base += offset;
  unsigned expected = 0;
  for (int r = 0; r < (pitch ? rows : 1); ++r)
    for (int c = 0; c < (column_pitch ? cols : 1); ++c) {
      bool const keep = rand() < kept * RAND_MAX;
      base[r * pitch + c * column_pitch] = keep ? 1 + rand() % 255 : 0;
      expected |= keep ? kSomeKept : kSomeDropped;
    }
  if (rows <= 0 || cols <= 0) expected = 0;
  auto const same = [](unsigned x) { return x; };
  check(tile_contents(base, pitch, column_pitch, rows, cols, 0, 1, same) == expected, "contents", rows, cols);
  unsigned of_lanes = 0;
  for (int lane = 0; lane < 32; ++lane) {
    of_lanes |= tile_contents(base, pitch, column_pitch, rows, cols, lane, 32, same);
  }
  check(of_lanes == expected, "contents of lanes", rows, cols);
}

void check_walk(int heads, int tiles, int first, int count, int start, double density) {
  WithTileWords<BackwardParams> params{};
  int const words = (tiles + 31) / 32;
  std::vector<TileWord> memory(3 * heads * words);
  std::vector<int> expected;
  int const n_block = 2;
  params.heads_per_group = heads;
  params.counters = reinterpret_cast<int*>(memory.data());
  params.tile_words_stride_h = 3 * words, params.tile_words_stride_line = words;
  for (TileWord& w : memory) w = {unsigned(rand()), 0};
  for (int h = 0; h < heads; ++h) {
    auto bit = [&](int m) -> unsigned& { return memory[(3 * h + n_block) * words + m / 32].some; };
    for (int m = 0; m < tiles; ++m) {
      bit(m) &= ~(1u << m % 32);
      if (rand() < density * RAND_MAX) bit(m) |= 1u << m % 32;
    }
    for (int i = 0; i < count; ++i) {
      int const m = first + (start - first + i) % count;
      if (bit(m) >> m % 32 & 1) expected.push_back(h * tiles + m);
    }
  }
  KeyTileWork<int> const work{{0, n_block}, {first, count, start}};
  KeptQueries<int> const kept{params, work};
  int h = 0, m = 0, in_head = 0;
  int const total = kept.total(0);
  check(total == int(expected.size()), "total", total, int(expected.size()));
  if (total > 0) kept.begin(h, m, in_head);
  for (int i = 0; i < total; ++i) {
    check(h * tiles + m == expected[i], "walk", h, m);
    if (i + 1 < total) kept.next(h, m, in_head);
  }
}

int main() {
  double const densities[] = {0.0, 0.02, 0.3, 0.9, 1.0};
  for (int tiles : {1, 2, 31, 32, 33, 63, 64, 65, 100})
    for (double density : densities)
      for (int i = 0; i < 4; ++i) check_line(tiles, density);
  for (int rows : {0, 1, 3, 16, 64})
    for (int cols : {0, 1, 7, 16, 64, 112, 128})
      for (int kept : {0, 1, 50, 99, 100})
        for (int i = 0; i < 4; ++i) {
          check_contents(rows, cols, 128, 1, 0, kept / 100.0);
          check_contents(rows, cols, 128 + i, 1, i, kept / 100.0);
          check_contents(rows, cols, 0, 1, i == 0 ? 0 : 3, kept / 100.0);
          check_contents(rows, cols, 1, 0, i, kept / 100.0);
          check_contents(rows, cols, 3 * 128, 3, i, kept / 100.0);
        }
  for (int heads : {1, 2, 5})
    for (int tiles : {1, 5, 40, 70})
      for (double density : densities)
        for (int i = 0; i < 8; ++i) {
          int const first = rand() % tiles, count = 1 + rand() % (tiles - first);
          check_walk(heads, tiles, first, count, first + rand() % count, density);
          check_walk(heads, tiles, 0, tiles, 0, density);
        }
  std::printf("%ld checks\\n", checks);
}
"""


def test_device_code_finds_every_tile(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """`TileLine`, `tile_contents` and the round walk `KeptQueries`, beside loops over bits and bytes."""
    sources = repository / "cuda_src" / "nvrtc_attn"
    words = (sources / "collective" / "tile_words.cuh").read_text(encoding="utf-8")
    words = words.replace("#pragma once", "").replace('#include "../params.cuh"', "")
    schedule = (sources / "hopper" / "backward" / "kept_queries.cuh").read_text(encoding="utf-8")
    walk = re.search(r"template <class Traits>\nstruct KeptQueries \{.*?\n\};\n", schedule, re.DOTALL)
    assert walk
    program = host_cuda.build(PRELUDE + words + WORK + walk.group() + MAIN, tmp_path_factory)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=120)
    wrong = done.stdout.splitlines()[:-1]
    assert not wrong, "\n".join(wrong[:20])
    assert int(done.stdout.split()[-2]) > 100_000


# ------------------------------------------------------------------------------------------------------- when they pay


def test_short_small_and_packed_problems_read_the_mask_alone() -> None:
    assert pays(problem(), 128)
    assert not pays(problem(None), 128)
    assert not pays(problem(seqlen_k=384, seqlen_q=8192), 128), "three key tiles"
    assert pays(problem(seqlen_k=385, seqlen_q=8192), 128)
    assert not pays(problem(batch=1, num_heads=4, num_heads_kv=4, seqlen_q=512, seqlen_k=512), 64), "a few microseconds"
    assert not pays(problem(varlen=True), 128)
    assert MIN_FLOPS < 4 * 16 * 2048 * 2048 * 2 * 128
    assert pays(problem(batch=32, seqlen_q=1, num_heads=32, num_heads_kv=8, head_dim=128, seqlen_k=8192), 64)
    assert not pays(problem(batch=1, seqlen_q=1, num_heads=32, num_heads_kv=8, head_dim=128, seqlen_k=4096), 64)


def main_of(spec: ForwardPlanSpec | BackwardPlanSpec) -> Any:
    kernels = ("forward_portable", "forward_hopper", "backward_portable", "backward_hopper")
    return next(launch for launch in spec.launches if launch.config.kernel in kernels)


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("form", [(True, False, False, True), (False, False, True, True), (True, True, True, True)])
@pytest.mark.parametrize("keys", [2100, 8300])
def test_plan_comes_first_and_agrees_with_the_kernel(
    keys: int, form: tuple[bool, ...], backward: bool, backend: str
) -> None:
    asked = problem(form, seqlen_q=2000, seqlen_k=keys)
    choose = heuristics.choose_backward if backward else heuristics.choose_forward
    spec = choose(asked, **TARGET, backend=backend)
    main, plan = main_of(spec), spec.launches[0]
    assert plan.config.kernel == "tile_plan"
    assert main.config.kernel.endswith(backend)
    assert main.config.features.tile_words
    words = words_of(asked, main.config.block_m, main.config.block_n, transposed=backward)
    ours, read = dict(plan.params), dict(main.params)
    order = line_order_of(words, words.nbytes) if backward and backend == "hopper" else None
    makers = [x for x in spec.launches if x.config.kernel == "backward_hopper_prepare"]
    assert bool(makers) == (backward and backend == "hopper")
    assert (order is not None) == (bool(makers) and keys > 8000)
    for maker in makers:
        rows = asked.batch * asked.num_heads * -(-asked.seqlen_q // main.config.block_m) * main.config.block_m
        assert maker.grid == rows // 16 + (order.lists if order else 0)
        for name, value in dict(maker.params).items():
            assert not name.startswith("tile_") or value == read[name], name
    assert read.get("tile_order_offset", 0) * 8 >= words.nbytes * bool(order)
    assert bool(read.get("tile_order_offset")) == bool(order)
    walking = [launch for launch in spec.launches if launch.config.features.tile_words]
    assert walking == [plan, *makers, main]
    for name in ("offset", "stride_b", "stride_h", "stride_line"):
        assert ours[f"tile_words_{name}"] == read[f"tile_words_{name}"], name
    assert (ours["tile_plan_rows"], ours["tile_plan_cols"]) == (main.config.block_m, main.config.block_n)
    assert ours["tile_plan_transposed"] == backward
    (buffer,) = (x for x in spec.workspaces if x.field in ("softmax_partial", "counters"))
    assert buffer.nbytes == (order.end if order else words.nbytes)
    assert not buffer.zeroed
    assert plan.grid == words.batch * words.heads * words.lines * (1 if plan.block == 32 else words.words)
    assert (plan.block == 32) == (backward and not form[2])
    fields = {name for base in params_class(main.config).__mro__ for name, *_ in getattr(base, "_fields_", ())}
    assert {name for name, _ in (*plan.params, *main.params)} <= fields


def test_deterministic_pass_has_words_by_query_tile_too() -> None:
    asked = problem((False, True, True, True), deterministic=True)
    spec = hopper_backward.choose_backward(asked, **TARGET)
    assert not isinstance(spec, list), spec
    plans = [launch for launch in spec.launches if launch.config.kernel == "tile_plan"]
    assert [dict(launch.params)["tile_plan_transposed"] for launch in plans] == [1, 0]
    read = dict(main_of(spec).params)
    by_key = words_of(asked, 64, 128, transposed=True)
    assert read["tile_order_offset"] == dict(plans[1].params)["tile_words_offset"] == by_key.nbytes // 8
    assert read["tile_order_stride_line"] == words_of(asked, 64, 128).words
    (buffer,) = (x for x in spec.workspaces if x.field == "counters")
    assert buffer.nbytes == by_key.nbytes + words_of(asked, 64, 128).nbytes


def test_words_lie_behind_partial_results() -> None:
    asked = problem(
        (True, False, False, True), batch=8, seqlen_q=1, num_heads=32, num_heads_kv=8, head_dim=128, seqlen_k=8192
    )
    spec = heuristics.choose_forward(asked, **TARGET)
    assert spec.num_splits > 1
    assert [launch.config.kernel for launch in spec.launches] == ["tile_plan", "forward_portable", "combine"]
    assert [launch.config.features.tile_words for launch in spec.launches] == [True, True, False]
    assert dict(spec.main.params)["tile_words_offset"] * 8 == spec.softmax_partial_bytes
    (buffer,) = (x for x in spec.workspaces if x.field == "softmax_partial")
    assert buffer.nbytes == spec.softmax_partial_bytes + 8 * 8 * (8192 // 64 // 32)


def test_packed_heads_need_a_mask_that_they_share() -> None:
    """Rows of a tile are several heads of a query: a line of words is one of all of them, or there is none."""
    few: dict[str, Any] = {
        "batch": 32,
        "seqlen_q": 4,
        "num_heads": 32,
        "num_heads_kv": 8,
        "head_dim": 128,
        "seqlen_k": 8192,
    }
    shared = heuristics.choose_forward(problem((True, False, True, True), **few), **TARGET)
    assert shared.launches[0].config.kernel == "tile_plan"
    assert dict(shared.launches[0].params)["tile_plan_rows"] == 4
    apart = heuristics.choose_forward(problem((True, True, True, True), **few), **TARGET)
    assert not apart.main.config.features.tile_words


def test_candidates_and_the_families_comparison_see_past_the_plan() -> None:
    asked = problem()
    assert (
        hopper_forward.slower(
            asked, hopper_forward.plan_spec(asked, hopper_forward_tile.choose_tile(asked), num_sms=132), num_sms=132
        )
        == []
    )
    for found in (heuristics.forward_candidates(asked, **TARGET), heuristics.backward_candidates(asked, **TARGET)):
        assert len(found) > 1
        assert all(spec.launches[0].config.kernel == "tile_plan" for spec in found.values())
    assert portable_backward.splits_of(portable_backward.choose_backward(asked, **TARGET)) >= 1
    few = dataclasses.replace(asked, batch=1)
    assert hopper_backward.choose_backward(few, **TARGET)


@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("batch", [1, 3])
def test_lists_of_an_order_lie_behind_each_other(batch: int, heads: int) -> None:
    words = TileWords(
        batch=batch, heads=heads, lines=65, tiles=70, rows=128, cols=128, transposed=True, one_row=False
    )  # fmt: skip
    order = line_order_of(words, 1001)
    assert order is not None
    read = dict(order.params)
    begins = {
        8 * (read["tile_order_offset"] + b * read["tile_order_stride_b"] + h * read["tile_order_stride_h"])
        for b in range(batch)
        for h in range(heads)
    }
    assert len(begins) == order.lists == batch * heads
    assert min(begins) >= 1001
    assert all(b - a >= 4 * 65 for a, b in itertools.pairwise([*sorted(begins), order.end]))


def test_what_has_an_order() -> None:
    words = TileWords(batch=2, heads=1, lines=64, tiles=70, rows=128, cols=128, transposed=True, one_row=False)
    assert line_order_of(words, 0) is not None
    assert line_order_of(dataclasses.replace(words, lines=63), 0) is None
    assert line_order_of(dataclasses.replace(words, lines=1024), 0) is not None
    assert line_order_of(dataclasses.replace(words, lines=1025), 0) is None


def test_the_kernel_has_room_for_an_order(repository: Path) -> None:
    text = (repository / "cuda_src/nvrtc_attn/hopper/backward/line_order.cuh").read_text()
    assert f"kMostOrderedLines = {ORDERED_LINES.stop - 1};" in text


@pytest.mark.parametrize(("seqlen", "together"), [(4096, 1), (8192, 6)])
def test_heads_go_together_where_key_tiles_have_an_order(seqlen: int, together: int) -> None:
    """As many as with a band: else the longest tiles of the last head begin when little is left beside them."""
    asked = problem(
        (True, False, False, True), seqlen_q=seqlen, seqlen_k=seqlen, num_heads=12, num_heads_kv=12, batch=1
    )
    main = main_of(hopper_backward.plan_spec(asked, hopper_backward_tile.choose_tile(asked, 132), num_sms=132))
    assert main.config.features.tile_words
    assert dict(main.params)["head_group"] == together
