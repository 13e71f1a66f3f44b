// A score_mod that adds what the distance of query and key decides (T5's buckets, a table of distances), as the accumulators that
// Q K^T is added to: scores take no operation more. Warps of the loading group compute the values, one for each diagonal of a
// tile, ahead of the consumers (DiagonalWarps in load.cuh).
//
// Diagonal d of a tile is that of d = key - query + kBlockM - 1, the first key and the last query first. Of the n-th eight keys
// thread (g, t) of a warp whose first row is w has the values of rows g and g + 8, columns 2 t and 2 t + 1: diagonals
// 8 a + o, 8 a + o + 1 and eight less of each, with a = n + (kBlockM - w) / 8 - 1 and o = 2 t - g + 7. Those are 16 bytes, in
// a row for each of the 14 `o`. Eight lanes that read at a time have neighbouring rows, whose pitch puts them in other banks.
//
// The next key tile of the same queries has kBlockN lower diagonals and otherwise the same: it begins kBlockN / 8 places further
// down in the rows, and only those are new. At the end of a row it begins at the top again, with all of its diagonals, and so
// does another query tile wherever there is room. Tiles that consumers may still read, one for each slot of K, fit beside it.
#pragma once
#include "../../collective/modifier.cuh"
#include "../common/uniform.cuh"
#include "../common/wgmma.cuh"

namespace nvrtc_attn {

// The traits of those to whom scores are products that began so.
template <class Traits>
struct ProductsBegun : Traits {
  using Modifier = void;
};

// What a product begins with, so that `scale` times the sum has `value` added to it. A finite value stays finite.
NVRTC_ATTN_DEVICE float unscaled(float value, float scale) {
  float const x = __fdividef(value, scale);
  return fabsf(value) <= kLargest ? fminf(fmaxf(x, -kLargest), kLargest) : x;
}

template <int kBlockM, int kBlockN, int kStages>
struct BegunProducts {
  static constexpr int kOffsets = 14;
  static constexpr int kPlaces = (kBlockM + kBlockN) / 8;  // of a tile in a row
  static constexpr int kNewPlaces = kBlockN / 8;           // of those not the tile before's
  static constexpr int kRowPlaces = (kStages + 1) * kPlaces;
  static constexpr int kPitch = (kRowPlaces + 1) | 1;
  static constexpr int kOffsetStarts = kOffsets * kPitch * 16;  // where the tile of each slot of K begins
  static constexpr int kBytes = kOffsetStarts + 16;
  static constexpr int kPairs = kBlockM + kBlockN - 2;  // of neighbouring diagonals
  static constexpr int kNewPairs = kBlockN + 6;
  static_assert(kBlockM % 16 == 0 && kBlockN % 8 == 0 && kStages <= 4, "whole eights, words of starts");

  // (x, y) of diagonals d and d + 1 of the tile that begins at `start`; kNew: of those that are not the tile before's.
  template <bool kNew>
  static NVRTC_ATTN_DEVICE void store(unsigned smem, int start, int d, float x, float y) {
    int const o = d & 7, a = d >> 3;
    unsigned const to = smem + 16 * unsigned(o * kPitch + start + a);
    if (!kNew || a < kNewPlaces) store_pair(to, x, y);
    if (o + 8 < kOffsets && a > 0) store_pair(to + 16 * (8 * kPitch - 1), x, y);
  }
  static NVRTC_ATTN_DEVICE void store_start(unsigned smem, int stage, int start) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + kOffsetStarts + 4 * stage), "r"(start) : "memory");
  }

  // This thread's accumulators of the tile in a slot of K, in the warp whose first row in the tile is `warp_row0`.
  template <int kTilesN>
  static NVRTC_ATTN_DEVICE void load(AccTile (&s)[1][kTilesN], unsigned smem, int stage, int warp_row0) {
    int const lane = lane_again();
    int const o = 2 * (lane & 3) - (lane >> 2) + 7;
    int const a = load_shared_uniform(smem + kOffsetStarts + 4 * stage) + (kBlockM - warp_row0) / 8 - 1;
    unsigned const from = smem + 16 * unsigned(o * kPitch + a);
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
      AccTile& v = s[0][n];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                   : "r"(from + 16 * n));
    }
  }

 private:
  // As those of the first row in their eight keys, and of the other row in the next.
  static NVRTC_ATTN_DEVICE void store_pair(unsigned to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
    asm volatile("st.shared.v2.f32 [%0 + 24], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
  }
};

}  // namespace nvrtc_attn
