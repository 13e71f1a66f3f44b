"""Ranges of masks over tiles: never narrower than what the mask is, in NumPy and in the C++ text compiled for the host.

The kernel around that text runs on the host, too, its threads one after the other between barriers.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import host_cuda
import modifiers
import numpy as np
import numpy.typing as npt
import pytest
from modifiers import ModifierCase

from nvrtc_attn import heuristics
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.front.tensors import view
from nvrtc_attn.heuristics import tile_words
from nvrtc_attn.heuristics.spec import Launch
from nvrtc_attn.heuristics.tile_words import words_of
from nvrtc_attn.modifiers import cuda, cuda_tiles, cuda_values, evaluate, intervals
from nvrtc_attn.modifiers.graph import walk
from nvrtc_attn.modifiers.modifier import Modifier
from nvrtc_attn.modifiers.trace import trace

Array = npt.NDArray[Any]
SIZES = (2, 3, 150, 131)
TILES = ((16, 16), (32, 8), (7, 50), (64, 128), (1, 1))
RANDOM = 240
EXACT = (
    "causal below", "sinks and window", "documents", "causal documents", "prefix", "padding", "window of a head",
    "chunks", "blocks", "circle",
)  # fmt: skip
"""Masks of which 16 x 16 tiles with nothing are all found."""


def traced(case: ModifierCase, sizes: tuple[int, int, int, int] = SIZES) -> Modifier:
    return trace(*case.make(case.arrays(sizes, np.random.default_rng(1))))


def whole(modifier: Modifier, sizes: tuple[int, int, int, int], dtype: Any) -> Array:
    """The mask at every score."""
    mask = modifier.valued[1]
    axes = [np.arange(n).reshape([-1 if a == d else 1 for a in range(4)]) for d, n in enumerate(sizes)]
    inputs = dict(zip(("b", "h", "q", "k"), axes, strict=True))
    with np.errstate(all="ignore"):
        return np.broadcast_to(evaluate.Values(inputs, modifier.captures, np.dtype(dtype))(mask), sizes)


def of_tiles(mask: Array, rows: int, columns: int) -> tuple[Array, Array]:
    """``some`` and ``all`` of every tile, by looking."""
    at = np.arange(0, mask.shape[2], rows), np.arange(0, mask.shape[3], columns)
    some = np.logical_or.reduceat(np.logical_or.reduceat(mask, at[0], 2), at[1], 3)
    every = np.logical_and.reduceat(np.logical_and.reduceat(mask, at[0], 2), at[1], 3)
    return some, every


def decided(modifier: Modifier, sizes: tuple[int, int, int, int], rows: int, columns: int) -> tuple[Array, Array]:
    mask = modifier.valued[1]
    assert mask is not None
    return intervals.decide(
        mask, modifier.captures, batch=range(sizes[0]), heads=range(sizes[1]),
        query_starts=np.arange(0, sizes[2], rows), seqlen_q=sizes[2],
        key_starts=np.arange(0, sizes[3], columns), seqlen_k=sizes[3],
    )  # fmt: skip


def masks_of(modifier: Modifier, sizes: tuple[int, int, int, int] = SIZES) -> tuple[Array, Array]:
    return whole(modifier, sizes, np.float64), whole(modifier, sizes, np.float32)


@pytest.mark.slow(sample=["0", "1"])
@pytest.mark.parametrize("part", range(8))
def test_ranges_hold_what_random_masks_are(part: int) -> None:
    """No tile with a kept score is left out, none with a hidden one is called whole; and much is decided."""
    share = decisions = 0.0
    for seed in range(part * RANDOM // 8, (part + 1) * RANDOM // 8):
        case = modifiers.random_mask(seed)
        modifier = traced(case)
        if modifier.valued[1] is None:
            continue
        exact = masks_of(modifier)
        for rows, columns in TILES[:4] if seed % 8 else TILES:
            some, every = decided(modifier, SIZES, rows, columns)
            for mask in exact:
                kept, full = of_tiles(mask, rows, columns)
                assert not (kept & ~some).any(), case
                assert not (every & ~full).any(), case
            decisions += 1
            share += float((~some | every).mean())
    assert share / decisions > 0.1


@pytest.mark.parametrize("case", [*modifiers.sparse_cases(), *modifiers.named_cases()], ids=str)
def test_ranges_of_named_masks(case: ModifierCase) -> None:
    modifier = traced(case)
    if modifier.valued[1] is None:
        return
    exact = masks_of(modifier)[0]
    for rows, columns in TILES:
        some, every = decided(modifier, SIZES, rows, columns)
        kept, full = of_tiles(exact, rows, columns)
        assert not (kept & ~some).any()
        assert not (every & ~full).any()
        if (rows, columns) == (1, 1) and all(x.op != "call" for x in walk([modifier.valued[1]])):
            np.testing.assert_array_equal(some, exact)
            np.testing.assert_array_equal(every, exact)
    if case.name in EXACT and case in modifiers.sparse_cases():
        some, _ = decided(modifier, SIZES, 16, 16)
        np.testing.assert_array_equal(some, of_tiles(exact, 16, 16)[0])


def test_nothing_of_the_size_of_the_scores_is_made() -> None:
    """A million queries and keys with windows around documents, in tiles of 8192."""
    n = 1 << 20
    ids = np.repeat(np.arange(n >> 15), 1 << 15).astype(np.int32)
    modifier = trace(None, lambda b, h, q, k: (ids[q] == ids[k]) & (abs(q - k) < 4096))
    assert modifier.valued[1] is not None
    starts = np.arange(0, n, 8192)
    some, every = intervals.decide(
        modifier.valued[1], modifier.captures, batch=[0], heads=[0], query_starts=starts, seqlen_q=n, key_starts=starts,
        seqlen_k=n,
    )  # fmt: skip
    at = np.arange(n >> 13)
    near = (abs(at[:, None] - at) <= 1) & (at[:, None] // 4 == at // 4)
    np.testing.assert_array_equal(some[0, 0], near)
    assert not every.any()


# ------------------------------------------------------------------------------------------------ the text, on the host

PER_LIBRARY = 20
RUN = """
extern "C" void SPACE_run(void const* bytes, int B, int H, int M, int N, int rows, int columns, unsigned char* some,
                          unsigned char* all) {
  namespace x = SPACE;
  using namespace nvrtc_attn;
  x::Modified<Plain> params;
  std::memcpy(&params.modifier, bytes, sizeof(x::ModifierBlock));
  long long at = 0;
  for (int b = 0; b < B; ++b) for (int h = 0; h < H; ++h) {
    x::Modifier<float> const modifier(params.modifier, b, h);
    for (int q0 = 0; q0 < M; q0 += rows) for (int k0 = 0; k0 < N; k0 += columns, ++at) {
      x::Modifier<float>::Rows of_rows;
      x::Modifier<float>::Columns of_columns;
      of_rows.clear();
      of_columns.clear();
      int const q1 = min(q0 + rows, M), k1 = min(k0 + columns, N);
      for (int q = q0; q < q1; ++q) {  // as lanes join
        x::Modifier<float>::Rows one;
        one.clear();
        modifier.join(one, q);
        of_rows.join(one.of_lane(0));
        of_rows.join(one);
      }
      for (int k = k0; k < k1; ++k) modifier.join(of_columns, k);
      IntRange const found = modifier.keeps({q0, q1 - 1}, {k0, k1 - 1}, of_rows, of_columns);
      some[at] = found.hi != 0;
      all[at] = found.lo != 0;
    }
  }
}
"""


def library(
    texts: list[str], factory: pytest.TempPathFactory, headers: Path, body: str,
    shim: str = host_cuda.ONE_THREAD.replace("return 0; }", "return x; }"), kernel: str = "", level: str = "-O0",
    more: str = "",
) -> Any:  # fmt: skip
    lines = [shim]
    for name in ("modifier.cuh", "tile_ranges.cuh"):
        text = (headers / name).read_text(encoding="utf-8")
        lines.append(re.sub(r"#pragma.*|#include.*", "", text))
    lines.append(kernel)
    for i, source in enumerate(texts):
        own = f"namespace program{i} {{ using namespace nvrtc_attn;"
        lines.append(source.replace("namespace nvrtc_attn {", own))
        lines.append(body.replace("SPACE", f"program{i}"))
    lines.append(more)
    flags = (level, "-fPIC", "-shared", "-ffp-contract=off")
    return ctypes.CDLL(str(host_cuda.build("\n".join(lines), factory, *flags)))


def all_masks() -> list[ModifierCase]:
    named = [x for x in (*modifiers.sparse_cases(), *modifiers.named_cases()) if traced(x).valued[1] is not None]
    return [*named, *(modifiers.random_mask(1000 + seed) for seed in range(100 - len(named)))]


@pytest.mark.slow(sample=["0", "1"])  # the named ones, and the first of the random ones
@pytest.mark.parametrize("part", range(100 // PER_LIBRARY))
def test_the_text_decides_as_numpy_does(part: int, tmp_path_factory: pytest.TempPathFactory, repository: Path) -> None:
    cases = [(case, traced(case)) for case in all_masks()[part * PER_LIBRARY : (part + 1) * PER_LIBRARY]]
    cases = [(case, modifier) for case, modifier in cases if modifier.valued[1] is not None]
    assert cases
    texts = [cuda_tiles.tile_source(modifier.program) for _, modifier in cases]
    made = library(texts, tmp_path_factory, repository / "cuda_src" / "nvrtc_attn" / "collective", RUN)
    differ = total = 0
    for i, (case, modifier) in enumerate(cases):
        block = cuda_values.modifier_values(
            modifier.program, (), [view(x, "x") for x in modifier.captures], [], modifier.numbers
        ).block
        exact = masks_of(modifier)
        for rows, columns in TILES[:4]:
            some, every = decided(modifier, SIZES, rows, columns)
            ours, ours_all = np.zeros(some.shape, np.uint8), np.zeros(some.shape, np.uint8)
            getattr(made, f"program{i}_run")(
                block.ljust(8, b"\0"),
                *SIZES,
                rows,
                columns,
                *(ctypes.c_void_p(x.ctypes.data) for x in (ours, ours_all)),
            )
            for mask in exact:
                kept, full = of_tiles(mask, rows, columns)
                assert not (kept & (ours == 0)).any(), case
                assert not ((ours_all != 0) & ~full).any(), case
            differ += int(((ours != 0) != some).sum() + ((ours_all != 0) != every).sum())
            total += 2 * some.size
    assert differ <= 2e-3 * total  # of rounding


# ---------------------------------------------------------------------------------------------- the kernel, on the host

FIBERS = (
    "#include <algorithm>\n#include <cmath>\n#include <cstring>\n"
    + host_cuda.FIBERS
    + """
using std::abs;
namespace cute { template <class...> using void_t = void; }
"""
    + host_cuda.NUMBERS
    + """
namespace nvrtc_attn {
using index_t = long long;
using std::min; using std::max;
constexpr float kLog2e = 1.4426950408889634f;
inline float infinity() { return __uint_as_float(0x7f800000u); }
inline float fast_exp2(float x) { return exp2f(x); }
inline float to_float(float x) { return x; }
inline int lane_again() { return threadIdx.x % 32; }
template <class Element> float tanh_of(float x) { return tanhf(x); }
struct TileWord;
struct PlanParams {
  TileWord* words;
  long long tile_words_offset, tile_words_stride_b, tile_words_stride_h, tile_words_stride_line;
  int tile_plan_rows, tile_plan_cols, tile_plan_lines, tile_plan_tiles, tile_plan_heads, tile_plan_transposed;
  int seqlen_q, seqlen_k;
};
inline TileWord* tile_word_buffer(PlanParams const& params) { return params.words; }
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int atomicAdd(int* at, int x) { return (*at += x) - x; }
"""
)
FIELDS = (
    ("words", ctypes.c_void_p),
    *((f"tile_words_{x}", ctypes.c_int64) for x in ("offset", "stride_b", "stride_h", "stride_line")),
    *((f"tile_plan_{x}", ctypes.c_int32) for x in ("rows", "cols", "lines", "tiles", "heads", "transposed")),
    ("seqlen_q", ctypes.c_int32), ("seqlen_k", ctypes.c_int32),
)  # fmt: skip
RUN_KERNEL = """
namespace nvrtc_attn {
struct TraitsOfSPACE {
  using Modifier = SPACE::Modifier<float>;
  using ModifiedParams = SPACE::Modified<PlanParams>;
  static constexpr bool kMask = false;
  static constexpr bool kTileBits = false;
  static constexpr int kNumWarps = 2;
};
}
extern "C" void SPACE_run(void const* bytes, void const* fields, int grid) {
  static SPACE::Modified<nvrtc_attn::PlanParams> params;
  std::memcpy(&params.modifier, bytes, sizeof(params.modifier));
  std::memcpy(static_cast<nvrtc_attn::PlanParams*>(&params), fields, sizeof(nvrtc_attn::PlanParams));
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    nvrtc_attn::PlanParams const& own = params;
    run_block(64, [&] { nvrtc_attn::tile_ranges<nvrtc_attn::TraitsOfSPACE>(own); });
  }
}
"""


class PlanParams(ctypes.Structure):
    _fields_ = FIELDS


TARGET: dict[str, Any] = {"arch": "sm_90", "num_sms": 8, "smem_limit": 232448}  # few: no splits of the keys


def problem(modifier: Modifier, sizes: tuple[int, int, int, int], **more: Any) -> AttentionProblem:
    b, h, m, n = sizes
    rows, keys = (dense_layout((b, length, h, 64), "bfloat16") for length in (m, n))
    return AttentionProblem(
        dtype="bfloat16", batch=b, seqlen_q=m, seqlen_k=n, num_heads=h, num_heads_kv=h, head_dim=64, head_dim_v=64,
        q=rows, k=keys, v=keys, modifier=modifier.program, softmax_scale=0.125, **more,
    )  # fmt: skip


def test_the_kernel_writes_the_words_that_the_attention_kernel_reads(
    tmp_path_factory: pytest.TempPathFactory, repository: Path
) -> None:
    """Of both passes, at lengths that are no multiple of anything, by the launch that the heuristics make."""
    sizes = (2, 2, 2100, 2500)
    names = ("sinks and window", "causal documents", "prefix", "padding", "window of a head", "blocks")
    cases = [x for x in modifiers.sparse_cases() if x.name in names]
    assert len(cases) == len(names)
    headers = repository / "cuda_src" / "nvrtc_attn"
    traces = [traced(case, sizes) for case in cases]
    kernel = kernels_text(headers)
    made = library(
        [cuda_tiles.tile_source(x.program) for x in traces],
        tmp_path_factory,
        headers / "collective",
        RUN_KERNEL,
        FIBERS,
        kernel,
        level="-O1",
    )
    for i, (case, modifier) in enumerate(zip(cases, traces, strict=True)):
        asked = problem(modifier, sizes)
        block = cuda_values.modifier_values(
            modifier.program, (), [view(x, "x") for x in modifier.captures], [], modifier.numbers
        ).block.ljust(8, b"\0")
        for backward in (False, True):
            choose = heuristics.choose_backward if backward else heuristics.choose_forward
            spec = choose(asked, **TARGET, backend="portable")
            plan = spec.launches[0]
            main = next(x for x in spec.launches if x.config.kernel.endswith("ward_portable"))
            assert plan.config.kernel == "tile_ranges"
            assert main.config.features.tile_words
            words = words_of(asked, main.config.block_m, main.config.block_n, transposed=backward)
            (buffer,) = (x for x in spec.workspaces if x.field in ("softmax_partial", "counters"))
            assert buffer.nbytes == words.nbytes
            memory = np.zeros((words.nbytes // 8, 2), np.uint32)
            run_plan(getattr(made, f"program{i}_run"), plan, block, memory, sizes)
            some, every = decided(modifier, sizes, words.rows, words.cols)
            if case.name == "padding" and not backward:
                assert words.lines == 1
            read = dict(main.params)
            strides = [read[f"tile_words_stride_{x}"] for x in ("b", "h", "line")]
            for (b, h, m, n), keeps in np.ndenumerate(some):
                line, tile = (n, m) if backward else (m, n)
                at = np.dot((b, h, line), strides) + tile // 32
                assert bool(memory[at, 0] >> (tile % 32) & 1) == keeps, (case, b, h, m, n)
                assert bool(memory[at, 1] >> (tile % 32) & 1) == every[b, h, m, n], (case, b, h, m, n)


def kernels_text(headers: Path) -> str:
    """The kernels of both launches, and what they need of words and params."""

    def text(name: str) -> str:
        return re.sub(r"#pragma.*|#include.*", "", (headers / name).read_text(encoding="utf-8"))

    def struct(name: str, start: str) -> str:
        found = re.search(rf"^{start}.*?^}};$", text(name), re.MULTILINE | re.DOTALL)
        assert found is not None, start
        return found.group(0)

    words = [struct("collective/tile_words.cuh", f"struct {x}") for x in ("alignas.8. TileWord", "TileLine")]
    words.append(struct("collective/tile_words.cuh", "struct alignas.16. SixteenBytes"))
    params = struct("params.cuh", r"template <class Params>\nstruct WithTileBits")
    lines = ["namespace nvrtc_attn {", *words, params, "}", text("collective/tile_bits.cuh")]
    return "\n".join([*lines, text("kernel/tile_ranges.cuh"), text("kernel/tile_bits.cuh")])


def run_plan(function: Any, plan: Launch, block: bytes, memory: Array, sizes: tuple[int, int, int, int]) -> None:
    params = PlanParams(words=memory.ctypes.data, seqlen_q=sizes[2], seqlen_k=sizes[3])
    for name, value in plan.params:
        if hasattr(params, name):
            setattr(params, name, value)
    function(block, ctypes.byref(params), plan.grid)


def test_a_byte_mask_beside_it_is_read_in_every_tile() -> None:
    modifier = traced(modifiers.sparse_cases()[0])
    beside = problem(modifier, (2, 8, 2048, 2048), mask=dense_layout((2, 1, 1, 2048), "bool"))
    spec = heuristics.choose_forward(beside, **TARGET, backend="portable")
    assert spec.launches[0].config.kernel == "tile_ranges"
    assert spec.launches[0].config.features.mask  # says so to the kernel, which sets no `all` then


def test_the_block_is_that_of_the_attention_kernel() -> None:
    """One block of bytes is passed to both: their structs are the same text."""
    for case in (*modifiers.sparse_cases(), modifiers.random_case(3), modifiers.named_cases()[-1]):
        modifier = traced(case)
        if modifier.program.mask is None:
            continue
        for trained, ordered in (((), False), (modifier.differentiable, False), (modifier.differentiable, True)):
            texts = [x(modifier.program, trained, ordered) for x in (cuda.cuda_source, cuda_tiles.tile_source)]
            assert len({x.partition("template <class Element>")[0] for x in texts}) == 1
            assert cuda.block_bytes(texts[0]) == cuda.block_bytes(texts[1])


# -------------------------------------------------------------------------------- bits of undecided tiles, on the host

RUN_BITS = """
namespace nvrtc_attn {
struct RangesOfSPACE {
  using Modifier = SPACE::Modifier<float>;
  using TileBitsParams = WithTileBits<PlanParams>;
  using ModifiedParams = SPACE::Modified<TileBitsParams>;
  static constexpr bool kMask = false;
  static constexpr bool kTileBits = true;
  static constexpr int kNumWarps = 2;
};
template <int kM, int kN>
struct BitsOfSPACE {
  using Modifier = keepsSPACE::Modifier<float>;
  using TileBitsParams = WithTileBits<PlanParams>;
  using ModifiedParams = keepsSPACE::Modified<TileBitsParams>;
  static constexpr int kBlockM = kM, kBlockN = kN, kNumThreads = 128;
};
}
template <int kM, int kN>
void SPACE_ask(void const* bytes, nvrtc_attn::WithTileBits<nvrtc_attn::PlanParams> const& given, int grid) {
  using Traits = nvrtc_attn::BitsOfSPACE<kM, kN>;
  static typename Traits::ModifiedParams params;
  std::memcpy(static_cast<void*>(&params.modifier), bytes, sizeof(params.modifier));
  static_cast<nvrtc_attn::WithTileBits<nvrtc_attn::PlanParams>&>(params) = given;
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    nvrtc_attn::PlanParams const& own = params;
    run_block(128, [&] { nvrtc_attn::tile_bits<Traits>(own); });
  }
}
// Both launches. `grid`: of the first; the second has 3 blocks.
extern "C" void SPACE_both(void const* bytes, nvrtc_attn::WithTileBits<nvrtc_attn::PlanParams> const* given, int grid,
                           int rows, int columns) {
  static SPACE::Modified<nvrtc_attn::WithTileBits<nvrtc_attn::PlanParams>> params;
  std::memcpy(static_cast<void*>(&params.modifier), bytes, sizeof(params.modifier));
  static_cast<nvrtc_attn::WithTileBits<nvrtc_attn::PlanParams>&>(params) = *given;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    nvrtc_attn::PlanParams const& own = params;
    run_block(64, [&] { nvrtc_attn::tile_ranges<nvrtc_attn::RangesOfSPACE>(own); });
  }
  if (rows == 192 && columns == 96) SPACE_ask<192, 96>(bytes, *given, 3);
  else if (rows == 128 && columns == 128) SPACE_ask<128, 128>(bytes, *given, 3);
  else if (rows == 128 && columns == 64) SPACE_ask<128, 64>(bytes, *given, 3);
  else abort();
}
// What a thread of the attention kernel finds of a tile: its slot, and the words there. -1: none.
extern "C" int SPACE_slot(nvrtc_attn::WithTileBits<nvrtc_attn::PlanParams> const* given, long long word, int tile) {
  SPACE::Modified<nvrtc_attn::WithTileBits<nvrtc_attn::PlanParams>> params{};
  static_cast<nvrtc_attn::WithTileBits<nvrtc_attn::PlanParams>&>(params) = *given;
  nvrtc_attn::PlanParams const& own = params;
  nvrtc_attn::TileLine const line{given->words + word};
  return nvrtc_attn::TileBits<nvrtc_attn::RangesOfSPACE>(own).slot_of(line, tile);
}
"""


class BitsParams(PlanParams):
    _fields_ = (
        *((f"tile_bits_{x}", ctypes.c_int64) for x in ("first", "slots", "at")), ("tile_bits_room", ctypes.c_int32),
    )  # fmt: skip


def unpacked(words: Array, rows: int, columns: int) -> Array:
    """The scores of a tile, of accumulators, from the words of all threads: ``[rows, columns]``."""
    thread, n, e = np.ogrid[: 2 * rows, : columns // 8, :4]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (e // 2)
    column = 8 * n + 2 * (thread % 4) + e % 2
    found = np.zeros((rows, columns), bool)
    found[row, column] = words[thread, n // 8] >> (n % 8 * 4 + e).astype(np.uint32) & 1
    return found


@pytest.mark.slow
@pytest.mark.turns(3)
def test_bits_of_undecided_tiles_are_where_the_attention_kernel_reads_them(
    tmp_path_factory: pytest.TempPathFactory, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both passes, by the launches that the heuristics make; with room for all tiles, and for a few."""
    sizes = (2, 16, 1100, 1300)
    names = ("causal documents", "prefix of documents", "prefix", "padding", "window of a head", "natten")
    cases = [x for x in modifiers.sparse_cases() if x.name in names]
    assert len(cases) == len(names)
    headers = repository / "cuda_src" / "nvrtc_attn"
    traces = [traced(case, sizes) for case in cases]
    keeps = [
        cuda.cuda_source(x.program).replace(
            "namespace nvrtc_attn {", f"namespace keepsprogram{i} {{ using namespace nvrtc_attn;"
        )
        for i, x in enumerate(traces)
    ]
    kernel = kernels_text(headers) + "\n".join(keeps)
    sources = [cuda_tiles.tile_source(x.program) for x in traces]
    made = library(sources, tmp_path_factory, headers / "collective", RUN_BITS, FIBERS, kernel, level="-O1")
    monkeypatch.setattr(tile_words, "MIN_FLOPS", 0)
    monkeypatch.setattr(tile_words, "MIN_SHARERS", 1)
    overflowed = 0
    for i, (case, modifier) in enumerate(zip(cases, traces, strict=True)):
        asked = problem(modifier, sizes)
        block = cuda_values.modifier_values(
            modifier.program, (), [view(x, "x") for x in modifier.captures], [], modifier.numbers
        ).block.ljust(8, b"\0")
        mask = masks_of(modifier, sizes)[1]
        for backward in (False, True):
            for room in (64 << 20, 9 * tile_words.bits_bytes(192, 96)):
                monkeypatch.setattr(tile_words, "MAX_BIT_BYTES", room)
                monkeypatch.setattr(tile_words, "is_same_everywhere", lambda mask: True)
                choose = heuristics.choose_backward if backward else heuristics.choose_forward
                spec = choose(asked, **TARGET, backend="hopper")
                plan, asking = spec.launches[:2]
                main = next(x for x in spec.launches if x.config.kernel.endswith("ward_hopper"))
                assert [x.config.tile_bits for x in (plan, asking, main)] == [True] * 3
                words = words_of(asked, main.config.block_m, main.config.block_n, transposed=backward)
                rows, columns = asking.config.block_m, asking.config.block_n
                assert (rows, columns) == ((words.cols, words.rows) if backward else (words.rows, words.cols))
                (buffer,) = (x for x in spec.workspaces if x.field in ("softmax_partial", "counters"))
                memory = np.full(buffer.nbytes + 256, 255, np.uint8)
                shift = -memory.ctypes.data % 128
                memory = memory[shift : shift + buffer.nbytes + 64]
                assert buffer.zeroed
                memory[: buffer.zeroed_bytes] = 0
                params = BitsParams(words=memory.ctypes.data, seqlen_q=sizes[2], seqlen_k=sizes[3])
                for name, value in plan.params:
                    setattr(params, name, value)
                assert {x for x in plan.params if x[0].startswith("tile_bits")} <= {*main.params}
                assert asking.params == plan.params
                getattr(made, f"program{i}_both")(block, ctypes.byref(params), plan.grid, rows, columns)
                assert (memory[buffer.nbytes :] == 255).all()  # nothing behind the end
                some, every = decided(modifier, sizes, words.rows, words.cols)
                slots: dict[int, tuple[int, ...]] = {}
                for at, keep in np.ndenumerate(some):
                    b, h, m, n = at
                    line, tile = (n, m) if backward else (m, n)
                    strides = [getattr(params, f"tile_words_stride_{x}") for x in ("b", "h", "line")]
                    word = params.tile_words_offset + int(np.dot((b, h, line), strides))
                    slot = getattr(made, f"program{i}_slot")(ctypes.byref(params), ctypes.c_longlong(word), tile)
                    if not keep or every[at]:
                        assert slot == -1, (case, at)
                        continue
                    if slot == -1:
                        assert room < 1 << 20, (case, at)
                        overflowed += 1
                        continue
                    owner = (*(int(x) for x in np.minimum(at, (words.batch - 1, words.heads - 1, 99, 99))),)
                    owner = (*owner[:2], 0, n) if words.one_row and not backward else owner
                    assert slots.setdefault(slot, owner) == owner, (case, at)
                    assert slot < params.tile_bits_room
                    begin = params.tile_bits_at + slot * tile_words.bits_bytes(rows, columns)
                    end = begin + 2 * rows * 4 * -(-columns // 64)
                    kept = unpacked(memory[begin:end].view(np.uint32).reshape(2 * rows, -1), rows, columns)
                    of_warps = memory[end : end + rows // 16] != 0
                    assert np.array_equal(of_warps, kept.reshape(rows // 16, -1).any(1)), (case, at)
                    q0, k0 = m * words.rows, n * words.cols
                    exact = mask[b, h, q0 : q0 + words.rows, k0 : k0 + words.cols]
                    kept = (kept.T if backward else kept)[: exact.shape[0], : exact.shape[1]]
                    assert np.array_equal(kept, exact), (case, at)
                assert slots
    assert overflowed > 0


def test_bits_pay_where_heads_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a group count; not of a mask of each head, beside a byte mask, or rounded without room for all."""
    cases = {x.name: traced(x, (2, 16, 4096, 4096)) for x in modifiers.sparse_cases()}
    sizes = (2, 16, 4096, 4096)

    def pay(name: str, sizes: tuple[int, int, int, int] = sizes, **more: Any) -> bool:
        return tile_words.bits_pay(problem(cases[name], sizes, **more), 128)

    assert pay("documents")
    assert pay("prefix")  # 16 heads of each batch entry
    assert not pay("window of a head")  # two batch entries share
    assert pay("window of a head", (4, 4, 8192, 4096))
    assert not pay("documents", (1, 2, 8192, 8192))
    assert not pay("documents", mask=dense_layout((2, 1, 1, 4096), "bool"))
    assert pay("circle")
    assert not pay("circle", (1, 16, 1 << 16, 1 << 16))
    assert pay("documents", (1, 16, 1 << 16, 1 << 16))
    words = words_of(problem(cases["documents"], (1, 16, 1 << 20, 1 << 20)), 192, 96)
    bits = tile_words.TileBits(words=words, behind=16 + words.nbytes)
    assert bits.end < 110 << 20
    monkeypatch.setattr(tile_words, "KEEPS_BITS", False)
    assert not pay("documents")


def test_plans_with_and_without_bits_are_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    modifier = traced(next(x for x in modifiers.sparse_cases() if x.name == "documents"), (2, 16, 4096, 4096))
    asked = problem(modifier, (2, 16, 4096, 4096))
    target = TARGET | {"num_sms": 132}
    for candidates, choose in (
        (heuristics.forward_candidates, heuristics.choose_forward),
        (heuristics.backward_candidates, heuristics.choose_backward),
    ):
        found = candidates(asked, **target)
        for kept in (True, False):
            monkeypatch.setattr(tile_words, "KEEPS_BITS", kept)
            assert any("tile_bits" in x for x in found)
            assert any("tile_bits" not in x and x.startswith("hopper") for x in found)
            chosen = choose(asked, **target, backend="hopper")
            assert any(x.config.tile_bits for x in chosen.launches) == kept
            assert len([x for x in chosen.launches if x.config.kernel == "tile_bits"]) == kept
