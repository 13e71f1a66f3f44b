"""Splits of the keys that a cluster adds up, and heads as rows of a tile: the text of the headers, run on the host.

Where there is a C++ compiler `add_up_cluster` runs with all thread blocks of a cluster. CUDA threads are fibers that
take turns in random order, and the shared memory of a block whose threads have all left holds NaN: a missing barrier
shows. What is instructions of the GPU (`collective/split_cluster.cuh`) is not run here.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import host_cuda
import pytest

RUNTIME = (
    host_cuda.RUNNER
    + """
#include <cmath>
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }

static int threads_of_block;
static std::vector<Meeting> block_meetings;
static Meeting cluster_meeting;
static std::vector<std::vector<unsigned char>> shared;
static constexpr int kGuard = 64;

inline void __syncthreads() { meet(block_meetings[now / threads_of_block], threads_of_block); }
static unsigned char* own_shared() { return shared[now / threads_of_block].data(); }
static void run_cluster(int blocks, int threads, int bytes, void (*what)()) {
  threads_of_block = threads;
  block_meetings.assign(blocks, Meeting());
  cluster_meeting = Meeting();
  shared.assign(blocks, std::vector<unsigned char>(bytes + kGuard, 0xff));
  make_fibers(blocks * threads, what);
  std::vector<int> left(blocks, threads);
  for (std::vector<int> ready; !(ready = ready_fibers()).empty();) {
    for (int n = 0; n < 64 && !ready.empty(); ++n) {
      int const at = rand() % int(ready.size());
      int const which = ready[at];
      ready.erase(ready.begin() + at);
      resume(which);
      int const block = which / threads;
      if (fibers[which].done && --left[block] == 0) memset(shared[block].data(), 0xff, bytes);
    }
  }
  if (!all_are_done()) { std::printf("a thread waits for ever\\n"); exit(1); }
  for (auto& x : shared) {
    for (int i = bytes; i < bytes + kGuard; ++i) {
      if (x[i] != 0xff) { std::printf("beyond the shared memory\\n"); exit(1); }
    }
  }
}
"""
)

PRELUDE = """
namespace nvrtc_attn {
using index_t = long long;
using AccTile = float[4];
inline float infinity() { return INFINITY; }
inline int min(int a, int b) { return a < b ? a : b; }
template <class T> inline T from_float(float x) { return x; }

constexpr int kBlockM = BLOCK_M, kWarpsN = WARPS_N, kCluster = CLUSTER, kWarpsM = 4 / WARPS_N, kCount = COUNT;
constexpr int kColumns = 24;
static_assert(kBlockM == 16 * kWarpsM, "");

static float values[kCluster][kWarpsN][kBlockM][kColumns], maxima[kCluster][kWarpsN][kBlockM],
    sums[kCluster][kWarpsN][kBlockM], out[kBlockM][kColumns], lse[kBlockM];
static int writes[kBlockM][kColumns], lse_writes[kBlockM];

struct Traits {
  static constexpr int kHeadDimV = kColumns, kWarpsN = WARPS_N, kCluster = CLUSTER;
  static constexpr bool kDropout = true, kHasSink = false;
};
struct Shape {
  using Element = float;
  static constexpr int kBlockM = BLOCK_M, kThreads = 128, kTilesM = 1, kTilesD = kColumns / 8;
};
struct Params { float dropout_multiplier = 2.0f; int head_dim_v = kColumns - 3; index_t out_stride_d = 1; };
template <class T> struct ScoreMap { float ratio(float a, float b) const { return exp2f(a - b); } };
template <class T> float load_sink(Params const&, int) { return 0.0f; }
struct Softmax {
  static constexpr int kRows = 2;
  float row_max[2], row_sum[2];
  static float finite(float m) { return m == -INFINITY ? 0.0f : m; }
};
template <class T> struct Position { int tid, lane, warp_row0, warp_n, m_block, split, h; };
template <class T> struct OutputRows {
  Params const& params;
  int count;
  float* out(int i) const {
    return nvrtc_attn::out[i];
  }
  void write_lse(int i, float m, float sum, ScoreMap<T> const&) const {
    ++lse_writes[i];
    lse[i] = sum == 0.0f ? -INFINITY : m + log2f(sum);
  }
  float finish_with_sink(int, float, float, float, ScoreMap<T> const&, bool) const { return 0.0f; }
};
template <int n> struct SplitCluster {
  explicit SplitCluster(unsigned char const*) {}
  void sync() const { meet(cluster_meeting, int(fibers.size())); }
  void leave() const { sync(); }
  template <class X> X load(X const* from, int rank) const {
    X x;
    memcpy(&x, shared[rank].data() + (reinterpret_cast<unsigned char const*>(from) - own_shared()), sizeof(X));
    return x;
  }
};
"""

MAIN = """
static void thread() {
  int const tid = now % 128, split = now / 128, lane = tid % 32, warp = tid / 32;
  Position<Traits> const here{tid, lane, warp % kWarpsM * 16, warp / kWarpsM, 0, split, 0};
  Softmax softmax;
  AccTile o[1][Shape::kTilesD];
  for (int r = 0; r < 2; ++r) {
    int const row = here.warp_row0 + 8 * r + lane / 4;
    softmax.row_max[r] = maxima[split][here.warp_n][row];
    softmax.row_sum[r] = sums[split][here.warp_n][row];
    for (int d = 0; d < Shape::kTilesD; ++d) {
      for (int c = 0; c < 2; ++c) o[0][d][2 * r + c] = values[split][here.warp_n][row][8 * d + 2 * (lane % 4) + c];
    }
  }
  Params const params;
  add_up_cluster<Traits, Shape>(o, softmax, ScoreMap<Traits>(), OutputRows<Traits>{params, kCount}, own_shared(), here);
}
}  // namespace nvrtc_attn

int main_of_case() {
  using namespace nvrtc_attn;
  auto uniform = [] { return rand() / float(RAND_MAX); };
  for (int run = 0; run < 3; ++run) {
    for (int row = 0; row < kBlockM; ++row) {
      lse[row] = -12345.0f;
      lse_writes[row] = 0;
      for (int col = 0; col < kColumns; ++col) out[row][col] = -12345.0f;
      for (int s = 0; s < kCluster; ++s) {
        for (int w = 0; w < kWarpsN; ++w) {
          bool const none = row == 3 || rand() % 4 == 0;  // no key; row 3 has none at all
          maxima[s][w][row] = none ? -INFINITY : 40.0f * uniform() - 20.0f;
          sums[s][w][row] = none ? 0.0f : 1.0f + uniform();
          for (int col = 0; col < kColumns; ++col) values[s][w][row][col] = none ? 0.0f : uniform() - 0.5f;
        }
      }
    }
    run_cluster(kCluster, 128, 4 * kBlockM * (kWarpsN * (kColumns + 2) + 2), thread);
    for (int row = 0; row < kBlockM; ++row) {
      double top = -INFINITY, sum = 0, exact[kColumns] = {};
      for (int s = 0; s < kCluster; ++s) {
        for (int w = 0; w < kWarpsN; ++w) top = fmax(top, maxima[s][w][row]);
      }
      for (int s = 0; s < kCluster; ++s) {
        for (int w = 0; w < kWarpsN; ++w) {
          double const weight = maxima[s][w][row] == -INFINITY ? 0 : exp2(maxima[s][w][row] - top);
          sum += weight * sums[s][w][row];
          for (int col = 0; col < kColumns; ++col) exact[col] += weight * values[s][w][row][col];
        }
      }
      bool right = row < kCount ? lse_writes[row] == 1 : lse_writes[row] == 0 && lse[row] == -12345.0f;
      if (row < kCount) right = right && (sum == 0 ? lse[row] == -INFINITY : fabs(lse[row] - top - log2(sum)) < 1e-4);
      for (int col = 0; col < kColumns; ++col) {
        double const expected = row >= kCount || col >= kColumns - 3 ? -12345 : sum == 0 ? 0 : 2 * exact[col] / sum;
        right = right && fabs(out[row][col] - expected) < 1e-5;
      }
      if (!right) { std::printf("row %d\\n", row); return 1; }
    }
  }
  std::printf("right\\n");
  return 0;
}
"""


@pytest.fixture(scope="module")
def function(repository: Path) -> str:
    """The text of `add_up_cluster`."""
    text = (repository / "cuda_src/nvrtc_attn/collective/forward_output.cuh").read_text()
    start = text.index("template <class Traits, class Shape, class Softmax>\nNVRTC_ATTN_DEVICE void add_up_cluster")
    return text[start : text.index("\n}\n", start) + 3]


def printed(program: Path, *arguments: str) -> str:
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60).stdout.strip()


def run(source: str, factory: pytest.TempPathFactory, **defines: int) -> str:
    """What the program prints."""
    return printed(host_cuda.build(source, factory, "-w", *(f"-D{x.upper()}={n}" for x, n in defines.items())))


SIZES = [(16, 4, 2, 4), (16, 4, 8, 16), (16, 4, 16, 9), (32, 2, 4, 32), (32, 2, 8, 24), (64, 1, 2, 48), (64, 1, 4, 64)]
"""Rows of a tile, warps beside each other, thread blocks, rows that there are."""
BARRIERS = 4


@pytest.fixture(scope="module")
def clusters(function: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of all sizes, then of the function without each of its barriers; its argument says which."""
    found = list(re.finditer(r"(__syncthreads|cluster\.sync|cluster\.leave)\(\);", function))
    assert len(found) == BARRIERS
    texts = [(sizes, function) for sizes in SIZES]
    texts += [((16, 4, 4, 16), function[: x.start()] + function[x.end() :]) for x in found]
    source = RUNTIME
    for i, (sizes, text) in enumerate(texts):
        for name, value in zip(("BLOCK_M", "WARPS_N", "CLUSTER", "COUNT"), sizes, strict=True):
            source += f"#undef {name}\n#define {name} {value}\n"
        source += f"namespace case{i} {{\n{PRELUDE}{text}{MAIN}}}\n"
    cases = "\n".join(f"case {i}: return case{i}::main_of_case();" for i in range(len(texts)))
    source += f"int main(int, char** words) {{ switch (atoi(words[1])) {{ {cases} }} return 2; }}"
    return host_cuda.build(source, tmp_path_factory, "-w")


@pytest.mark.parametrize("number", range(len(SIZES)), ids=[str(x) for x in SIZES])
def test_blocks_of_a_cluster_add_up(number: int, clusters: Path) -> None:
    """Rows without a key, in one block or in all, and rows that there are not; lse is written once."""
    assert printed(clusters, str(number)) == "right"


@pytest.mark.parametrize("number", range(BARRIERS))
def test_every_barrier_is_needed(number: int, clusters: Path) -> None:
    """What the test above would say of the function without one of them."""
    assert re.match("row|a thread waits|beyond", printed(clusters, str(len(SIZES) + number)))


UNITS = """
#include <cstdio>
#include <set>
#include <tuple>
#include <vector>
#define NVRTC_ATTN_DEVICE inline
inline int min(int a, int b) { return a < b ? a : b; }
struct ForwardParams { int batch, num_heads, num_heads_kv, num_splits, num_m_blocks, head_group; };
struct Traits {
  static constexpr bool kSplit = true, kPackedHeads = PACKED, kVarlen = false;
  static constexpr int kCluster = CLUSTER;
};
struct Position {
  int m_block, split, h, b, h_kv;
"""
UNITS_MAIN = """
};
int main() {
  std::vector<int> const all{1, 2, 4, 8, 16}, own{CLUSTER};
  for (int splits : CLUSTER > 1 ? own : all) {
    for (int num_m_blocks : {1, 3}) {
      for (int head_group : {splits, 1, 4 * splits}) {
        if (CLUSTER > 1 && head_group != splits) continue;
        ForwardParams const params{3, 8, 2, splits, num_m_blocks, head_group};
        int const heads = PACKED ? 2 : 8;
        std::set<std::tuple<int, int, int>> seen;
        for (int block = 0; block < 3 * heads * splits * num_m_blocks; ++block) {
          Position here, first, slow;
          here.find_unit_soon(params, block);
          slow.find_unit(params, block);
          if (here.split != slow.split || here.m_block != slow.m_block) return 5;
          if (here.h != slow.h || here.b != slow.b) return 5;
          if (here.h_kv != here.h / (PACKED ? 4 : 1)) return 6;
          if (head_group != splits) continue;
          first.find_unit_soon(params, block / splits * splits);
          if (here.split != block % splits) return 1;  // its rank in the cluster
          if (here.m_block != first.m_block || here.h != first.h || here.b != first.b) return 2;
          if (here.b >= 3 || here.h >= 8 || here.m_block < 0 || here.m_block >= num_m_blocks) return 3;
          seen.insert({here.m_block, here.h, here.b});
        }
        if (head_group == splits && int(seen.size()) != 3 * heads * num_m_blocks) return 4;
      }
    }
  }
  std::printf("right\\n");
}
"""


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("packed", [0, 1])
def test_a_cluster_is_the_splits_of_one_query_tile(
    packed: int, cluster: int, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With as many units in a group as splits; their rank in the cluster is the split's number.

    What is found soon, and of splits without a cluster, is what the function of all other kernels finds.
    """
    text = (repository / "cuda_src/nvrtc_attn/collective/forward_output.cuh").read_text()
    functions = ""
    places = [(f"NVRTC_ATTN_DEVICE void {name}(", "}") for name in ("find_unit", "find_unit_soon")]
    for first, last in (("struct Group", "};"), *places):
        start = text.index(f"  {first}")
        functions += text[start : text.index(f"\n  {last}\n", start) + len(last) + 4]
    assert run(UNITS + functions + UNITS_MAIN, tmp_path_factory, packed=packed, cluster=cluster) == "right"


ROWS = """
#include <cstdio>
#include <vector>
#define NVRTC_ATTN_DEVICE inline
namespace nvrtc_attn {
using index_t = long long;
struct HopperForwardParams { int heads_per_group, batch, num_heads, seqlen_q; };
inline int min(int a, int b) { return a < b ? a : b; }
"""
ROWS_MAIN = """
int main() {
  using namespace nvrtc_attn;
  constexpr int kBlockM = BLOCK_M;
  using Rows = QueryRows<true, kBlockM>;
  for (int group = 2; group <= 64; ++group) {
    int const queries = Rows::per_tile({group});
    for (int len_q : {1, 2, 5, queries, queries + 1, 3 * queries - 1, 200}) {
      HopperForwardParams const params{group, 2, 3, len_q};  // num_heads counts key heads
      for (int h_kv = 0; h_kv < 3; ++h_kv) {
        std::vector<int> seen(len_q * group, 0);
        for (int m_block = 0; m_block * queries < len_q; ++m_block) {
          Rows const rows(params, m_block, h_kv, len_q);
          if (rows.count > kBlockM) return 1;
          for (int row = 0; row < rows.count; ++row) {
            int const head = rows.head(row) - h_kv * group;
            if (head < 0 || head >= group || rows.query(row) < 0 || rows.query(row) >= len_q) return 2;
            ++seen[rows.query(row) * group + head];
            // Partial results: [splits, batch, heads, queries].
            int const place = ((5 * 2 + 1) * 3 * group + rows.head(row)) * len_q + rows.query(row);
            if (rows.partial_row(params, 5, 1, row) != place) return 6;
            // As the box of the copy engine has them: heads first, then queries from the tile's first one.
            if (rows.query(row) != m_block * queries + row / group) return 3;
          }
          for (int row = 0; row + 64 <= kBlockM; row += 64) {
            int const last = rows.query(row) + rows.queries(row, 64) - 1;
            for (int i = row; i < row + 64; ++i) {
              if (rows.query(i) < rows.query(row) || rows.query(i) > last) return 4;
            }
          }
        }
        for (int n : seen) {
          if (n != 1) return 5;
        }
      }
    }
  }
  std::printf("right\\n");
}
"""


@pytest.mark.parametrize("block_m", [128, 192])
def test_every_query_of_every_head_is_one_row(
    block_m: int, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = (repository / "cuda_src/nvrtc_attn/hopper/forward/query_rows.cuh").read_text()
    text = text[text.index("template <bool kPackedHeads") :]
    assert run(ROWS + text + ROWS_MAIN, tmp_path_factory, block_m=block_m) == "right"
