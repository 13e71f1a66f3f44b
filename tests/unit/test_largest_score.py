"""The largest score of a head by bounds of P: the text of ``hopper/forward/largest_score.cuh``, run on the host.

Where there is a C++ compiler a warp-group of 128 threads goes through query tiles of one head after the other, as the
kernel does (`forward_hopper.cuh`): CUDA threads are fibers that take turns in random order, so that a missing barrier
shows. The exponentials and the softmax are plain C++ here; what is tested is that no larger score is ever left out.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import host_cuda
import pytest

HEADER = Path(__file__).parents[2] / "cuda_src/nvrtc_attn/hopper/forward/largest_score.cuh"

PRELUDE = (
    """
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
"""
    + host_cuda.FIBERS
    + """
namespace cute { template <bool b, class X, class Y> using conditional_t = std::conditional_t<b, X, Y>; }
inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float a, float b) { return a / b; }
template <class Merge> int merged(int value, Merge merge) {
  int const warp = threadIdx.x / 32;
  exchanged[warp][threadIdx.x % 32] = value;
  meet(warp_meetings[warp], 32);
  int found = exchanged[warp][0];
  for (int lane = 1; lane < 32; ++lane) found = merge(found, exchanged[warp][lane]);
  meet(warp_meetings[warp], 32);
  return found;
}
inline int __reduce_max_sync(unsigned, int x) { return merged(x, [](int a, int b) { return std::max(a, b); }); }
inline bool __any_sync(unsigned, bool x) { return merged(x, [](int a, int b) { return a | b; }) != 0; }
namespace nvrtc_attn {
using std::max, std::min;
using AccTile = float[4];
struct bfloat16_t {};
inline float infinity() { return std::numeric_limits<float>::infinity(); }
inline int opaque(int x) { return x; }
inline int thread_again() { return threadIdx.x; }
static float words[512];
inline float read_word(unsigned at) { return words[at / 4]; }
inline void write_word(unsigned at, float x) { words[at / 4] = x; }
inline int2 read_pair(unsigned at) { return {__float_as_int(words[at / 4]), __float_as_int(words[at / 4 + 1])}; }
inline void write_pair(unsigned at, int x, int y) {
  words[at / 4] = __int_as_float(x);
  words[at / 4 + 1] = __int_as_float(y);
}
inline int raise_shared(unsigned at, int x) {
  int const y = max(__float_as_int(words[at / 4]), x);
  words[at / 4] = __int_as_float(y);
  return y;
}
template <class Traits> struct ScoreMap {
  static constexpr bool kSubtracts = Traits::kSubtracts;
  float exponent_scale;
  float reference(float m) const { return kSubtracts ? m : m * exponent_scale; }
  float probability(float s, float reference) const {
    return kSubtracts ? exp2f((s - reference) * exponent_scale) : exp2f(fmaf(s, exponent_scale, -reference));
  }
};
"""
)

MAIN = """
constexpr int kTilesN = 4, kKeys = 8 * kTilesN, kTiles = 12, kHeads = 5, kRows = 64;

template <class Element_, bool kSubtracts_> struct Traits {
  using Element = Element_;
  static constexpr bool kSubtracts = kSubtracts_;
  static constexpr bool kMaxLogit = true, kLazyMax = true, kPackedHeads = false, kHalfTile = false, kDropout = false;
  static constexpr bool kVarlen = false;
  static constexpr int kBlockM = 128;
};
struct Softmax {
  float row_max[2] = {-infinity(), -infinity()}, reference[2] = {0, 0};
  bool settled() const { return !__any_sync(~0u, row_max[0] == -infinity() || row_max[1] == -infinity()); }
  // As DeferredSoftmax::raise(), of which the threshold is what counts.
  template <class Map> void raise(AccTile const (&s)[1][kTilesN], Map const& map) {
    float top[2] = {-infinity(), -infinity()};
    for (int n = 0; n < kTilesN; ++n) {
      for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], s[0][n][e]);
    }
    bool any = false;
    for (int r = 0; r < 2; ++r) {
      for (int delta = 1; delta < 4; delta *= 2) {
        top[r] = fmaxf(top[r], __int_as_float(__shfl_sync(~0u, __float_as_int(top[r]), threadIdx.x % 32 ^ delta)));
      }
      any |= (top[r] - row_max[r]) * map.exponent_scale > 8.0f;
    }
    if (!__any_sync(~0u, any)) return;
    for (int r = 0; r < 2; ++r) {
      row_max[r] = fmaxf(row_max[r], top[r]);
      reference[r] = map.reference(row_max[r] == -infinity() ? 0.0f : row_max[r]);
    }
  }
};

static float scores[kHeads][kTiles][kRows][kKeys], found[kHeads][4];
static int count[kHeads], looks, redos;
static Meeting group_meeting;

template <class T> void thread(float exponent_scale) {
  using Group = LargestOfGroup<T, kTilesN>;
  ScoreMap<T> const map{exponent_scale};
  Group const group{0};
  int const tid = threadIdx.x, row = (tid >> 5 & 3) * 16 + (tid >> 2 & 7);
  group.forget(0);
  for (int h = 0; h < kHeads; ++h) {
    unsigned const turn = h & 1;
    meet(group_meeting, 128);
    group.forget(turn ^ 1);
    Softmax softmax;
    bool settled = false;
    for (int tile = 0; tile < kTiles; ++tile) {
      AccTile s[1][kTilesN];
      auto load = [&] {
        for (int n = 0; n < kTilesN; ++n) {
          for (int e = 0; e < 4; ++e) s[0][n][e] = scores[h][tile][row + 8 * (e / 2)][8 * n + 2 * (tid & 3) + e % 2];
        }
      };
      float sums[4];
      typename Group::Seen most;
      auto exponentiate = [&] {
        most = {};
        for (float& x : sums) x = 0.0f;
        for (int n = 0; n < kTilesN; ++n) {
          for (int e = 0; e < 4; ++e) sums[e] += s[0][n][e] = map.probability(s[0][n][e], softmax.reference[e / 2]);
          most.take(0, s[0][n][0], s[0][n][1]);
          most.take(1, s[0][n][2], s[0][n][3]);
        }
        most.take_sums(sums);
      };
      load();
      if (tile == 0) {
        softmax.raise(s, map);
        settled = softmax.settled();
        group.begin(softmax, map, row, count[h], turn);
        continue;
      }
      exponentiate();
      constexpr float limit = kLazyLimit<typename T::Element>;
      bool const small = sums[0] + sums[1] < limit && sums[2] + sums[3] < limit;
      bool const larger = __any_sync(~0u, group.exceeds(most, group.bounds()));
      bool const redo = __any_sync(~0u, !settled || !small);
      if (redo && !larger) { std::printf("a tile to be computed again has not been noticed\\n"); exit(1); }
      if (redo) {
        redos += (tid & 31) == 0;
        load();
        softmax.raise(s, map);
        settled = softmax.settled();
        exponentiate();
        group.forget_bounds();
      }
      if (larger) group.look(s, softmax, map, turn);
      looks += larger && (tid & 31) == 0;
    }
    if ((tid & 31) == 0) found[h][tid >> 5 & 3] = group.found(turn);
  }
}
template <class T> void run(float exponent_scale) {
  group_meeting = Meeting();
  for (Meeting& x : warp_meetings) x = Meeting();
  for (float& x : words) x = __int_as_float(0x7fc00000);
  looks = redos = 0;
  make_fibers(128, [=] { thread<T>(exponent_scale); });
  for (std::vector<int> ready; !(ready = ready_fibers()).empty();) {
    int const which = ready[rand() % ready.size()];
    threadIdx.x = 128 + which;
    resume(which);
  }
  if (!all_are_done()) { std::printf("a thread waits for ever\\n"); exit(1); }
}
static float uniform() { return (rand() + 0.5f) / (RAND_MAX + 1.0f); }
static float normal() { return sqrtf(-2 * logf(uniform())) * cosf(6.2831853f * uniform()); }
}  // namespace nvrtc_attn

int main(int, char** given) {
  using namespace nvrtc_attn;
  srand(1);
  std::string const name = given[1];
  float const scale = 0.125f;
  for (int round = 0; round < 4; ++round) {
    for (int h = 0; h < kHeads; ++h) {
      count[h] = h % 2 ? 64 : 37;
      float const size = kHeads - h;  // larger scores first: none of another head may stay
      for (int tile = 0; tile < kTiles; ++tile) {
        for (int i = 0; i < kRows; ++i) {
          for (int j = 0; j < kKeys; ++j) {
            float x = normal() * size;
            if (name == "random") x *= 1.0f;
            if (name == "tiny") x = 3.0f + 1e-3f * x;
            if (name == "wide") x *= 8.0f;
            if (name == "constant") x = 3.25f * size;
            if (name == "steps") x = 0.37f * (tile / 3) - size;
            if (name == "growing") x = 0.25f * x + 11.0f * tile;
            if (name == "negative") x = x - 4000.0f;
            if (name == "last") x = tile == kTiles - 1 && i == 21 && j == 9 ? 500.0f * size : x;
            if (name == "one_more") x = tile == kTiles - 1 && i == 36 && j == 31 ? 6.0f * size : fminf(x, 5.9f * size);
            if (name == "masked" && (uniform() < 0.7f || tile < 2 || i == 3)) x = -infinity();
            if (name == "late" && tile < kTiles / 2 - i % 4) x = -infinity();
            if (name == "hidden") x = -infinity();
            if (i >= count[h]) x = name == "hidden" ? 5.0f : x + 40.0f;  // what does not exist
            scores[h][tile][i][j] = x;
          }
        }
      }
    }
    if (round == 0) run<Traits<float, false>>(scale * 1.442695f);
    if (round == 1) run<Traits<bfloat16_t, false>>(scale * 1.442695f);
    if (round == 2) run<Traits<float, true>>(1.442695f);
    if (round == 3) run<Traits<bfloat16_t, false>>(1.442695f);
    for (int h = 0; h < kHeads; ++h) {
      float want = -infinity(), got = -infinity();
      for (auto& tile : scores[h]) {
        for (int i = 0; i < count[h]; ++i) {
          for (float x : tile[i]) want = fmaxf(want, x);
        }
      }
      // Every warp says what it has found, of which the largest counts; none may say more than there is.
      bool fine = true;
      float const unit = round < 2 ? 1 / scale : 1.0f;
      for (float x : found[h]) {
        got = fmaxf(got, x);
        fine &= x == x && (x <= want || x - want <= 1e-6f * (fabsf(want) + unit));
      }
      fine &= got == want || fabsf(got - want) <= 1e-6f * (fabsf(want) + unit);
      if (!fine) { std::printf("round %d head %d: %.9g instead of %.9g\\n", round, h, got, want); return 1; }
    }
    std::printf("%d %d\\n", looks, redos);
  }
}
"""
CASES = (
    "random", "tiny", "wide", "constant", "steps", "growing", "negative", "last", "one_more", "masked", "late",
    "hidden",
)  # fmt: skip


def program(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = re.sub(r"^#(include|pragma).*\n", "", text, flags=re.MULTILINE)
    assert kept.rstrip().endswith("}  // namespace nvrtc_attn")
    kept = kept[kept.index("namespace nvrtc_attn {") + 22 : kept.rindex("}  // namespace nvrtc_attn")]
    return host_cuda.build(PRELUDE + kept + MAIN, tmp_path_factory)


@pytest.mark.parametrize("name", CASES)
def test_no_larger_score_is_left_out(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    done = subprocess.run(
        [program(HEADER.read_text(), tmp_path_factory), name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    looks, redos = zip(*(map(int, line.split()) for line in done.stdout.splitlines()), strict=True)
    if name == "constant":  # nothing that is new, nothing to look at
        assert set(looks) == {0}
    if name == "random":  # of 220 tiles of a warp
        assert max(looks[:2]) < 30
        assert set(redos[:2]) == {0}
    if name in ("growing", "last"):
        assert min(redos[0], redos[2]) > 0


# What one would leave out -> the case that shows it.
MUTATIONS = {
    "p.bits[0] > bounds.x || p.bits[1] > bounds.y": ("p.bits[0] > bounds.x", "random"),
    "if (exists(old.y) && p.bits[1] > old.y)": ("if (false)", "random"),
    "map.probability(score, softmax.reference[r])": ("2.0f * map.probability(score, softmax.reference[r])", "tiny"),
    "return settled ? min(most, limit) : -1;": ("return min(most, limit);", "late"),
    "exists(old.x) && p.bits[0]": ("p.bits[0]", "random"),
    "write_word(of_group(turn), __int_as_float": ("(void)(__int_as_float", "constant"),
    "min(most, limit)": ("most", "last"),
}


@pytest.mark.parametrize("place", MUTATIONS)
def test_each_part_is_needed(place: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = HEADER.read_text()
    assert text.count(place) == 1, place
    instead, name = MUTATIONS[place]
    changed = program(text.replace(place, instead), tmp_path_factory)
    assert subprocess.run([changed, name], capture_output=True, check=False).returncode != 0
