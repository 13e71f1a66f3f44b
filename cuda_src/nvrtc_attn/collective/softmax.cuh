// Online softmax over key tiles: running row maximum and row sum, and when the accumulated output must be rescaled.
//
// A thread holds kTilesM pairs of rows (g and g + 8 of each 16-row tile); the four threads of a quad share a row. The maximum
// is reduced over the quad for every key tile, the sum only once at the end.
#pragma once
#include "max_logit.cuh"
#include "scores.cuh"

namespace nvrtc_attn {

// The running maximum is raised only when it would grow by more than this many powers of two. Until then P may exceed one,
// by at most 2^8: exact in float32 sums, far below float16's 65504, and the final division is by the same reference.
// Rescaling the output costs kTilesD * 4 multiplications per row pair and key tile, a tenth of the loop; on random scores
// it happens once or twice a row block instead of in two thirds of all tiles.
constexpr float kRescaleThreshold = 8.0f;

NVRTC_ATTN_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
NVRTC_ATTN_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <class Traits, int kTilesM>
struct OnlineSoftmax : LargestScoresInSmem<Traits::kMaxLogit ? 2 * kTilesM : 0> {
  static constexpr int kRows = 2 * kTilesM;
  float row_max[kRows];  // of scores, in their own unit; -inf: no key yet
  float row_sum[kRows];  // this thread's share

  NVRTC_ATTN_DEVICE OnlineSoftmax() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -infinity();
      row_sum[r] = 0.0f;
    }
  }

  // What probability() subtracts for row r; finite. Not kept: registers are scarce during Q K^T, where it is not needed.
  NVRTC_ATTN_DEVICE float reference(int r, ScoreMap<Traits> const& map) const {
    return map.reference(finite(row_max[r]));
  }
  static NVRTC_ATTN_DEVICE float finite(float m) { return m == -infinity() ? 0.0f : m; }

  // Take in the maxima of one tile of scores s[kTilesM][kTilesN]; multiplies o[kTilesM][kTilesD] when the reference moves.
  template <int kTilesN, int kTilesD>
  NVRTC_ATTN_DEVICE void update(AccTile (&s)[kTilesM][kTilesN], AccTile (&o)[kTilesM][kTilesD],
                                ScoreMap<Traits> const& map) {
    float tile_max[kRows];
    bool raise = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x = fmaxf(s[r / 2][0][2 * (r % 2)], s[r / 2][0][2 * (r % 2) + 1]);
#pragma unroll
      for (int n = 1; n < kTilesN; ++n) x = fmaxf(x, fmaxf(s[r / 2][n][2 * (r % 2)], s[r / 2][n][2 * (r % 2) + 1]));
      tile_max[r] = quad_max(x);
      raise |= (tile_max[r] - row_max[r]) * map.exponent_scale > kRescaleThreshold;  // false for -inf - -inf
    }
    this->take(tile_max);
    if (!__any_sync(0xffffffffu, raise)) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float const new_max = fmaxf(row_max[r], tile_max[r]);
      float const factor = map.ratio(row_max[r], finite(new_max));
      row_max[r] = new_max;
      row_sum[r] *= factor;
#pragma unroll
      for (int d = 0; d < kTilesD; ++d) {
        o[r / 2][d][2 * (r % 2)] *= factor;
        o[r / 2][d][2 * (r % 2) + 1] *= factor;
      }
    }
  }

  // What probability() subtracts in this tile, whose scores have lost the maximum already where a reference is too
  // large to be subtracted after scaling (kLargeReference). Called between update() and the first probability().
  template <int kTilesN>
  NVRTC_ATTN_DEVICE void get_references(AccTile (&s)[kTilesM][kTilesN], ScoreMap<Traits> const& map,
                                        float (&result)[kRows]) const {
    bool huge = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      result[r] = reference(r, map);
      huge |= fabsf(result[r]) > kLargeReference;
    }
    if constexpr (!ScoreMap<Traits>::kMapped) {
      if (!__any_sync(0xffffffffu, huge)) return;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float const m = finite(row_max[r]);
        result[r] = 0.0f;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          s[r / 2][n][2 * (r % 2)] -= m;
          s[r / 2][n][2 * (r % 2) + 1] -= m;
        }
      }
    }
  }

  // Reduce the sums over the quad: after the last tile.
  NVRTC_ATTN_DEVICE void finish() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_sum[r] = quad_sum(row_sum[r]);
  }
};

}  // namespace nvrtc_attn
