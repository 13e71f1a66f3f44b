// float32 products whose partial sums leave the tensor cores every few steps.
//
// Tensor cores add with truncation: an accumulator that stays in them for n steps drifts by up to n * 2^-23 of its size, in
// one direction. 512 columns or 2,000 queries are 200 to 750 such additions (3xTF32 takes three a step): more than float32
// arithmetic loses. Summing groups of at most kGroupSteps steps and adding the groups with rounded additions keeps the
// drift below 24 * 2^-23, for one FADD per 24 or 12 products.
#pragma once
#include "score_gradient.cuh"

namespace nvrtc_attn {

constexpr int kGroupSteps = 8;

// acc += A B^T over the tile width: multiply_nt in groups.
template <class Tile, int kM, int kN, class Rows>
NVRTC_ATTN_DEVICE void multiply_nt_grouped(WarpTile<kM, kN>& acc, Rows const& a, float const* b, int col0, int lane) {
  constexpr int kSteps = Tile::kCols / kStepK<float>;
#pragma unroll 1
  for (int first = 0; first < kSteps; first += kGroupSteps) {
    WarpTile<kM, kN> part;
    clear(part);
#pragma unroll 2
    for (int k = first; k < min(first + kGroupSteps, kSteps); ++k) {
      FragmentA<float> left[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) left[m] = a.step(m, k, lane);
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        FragmentB<float> right[2];
        load_b_pair<Tile>(b, col0 + 8 * n, k, lane, right[0], right[1]);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma<float, false>(part[m][n], left[m], right[0]);
          mma<float, false>(part[m][n + 1], left[m], right[1]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][n][i] += part[m][n][i];
  }
}

// acc += left * B over kSteps contraction steps from row k0 of B on; columns 8 * (tile0 + d) as in multiply_step.
template <class Tile, bool kPermuted, int kSteps, int kM, int kD>
NVRTC_ATTN_DEVICE void multiply_group(WarpTile<kM, kD>& acc, FragmentA<float> const (&left)[kSteps][kM], float const* b,
                                      int k0, int tile0, int lane) {
  constexpr int kTiles = Tile::kCols / 8;
#pragma unroll
  for (int d = 0; d < kD; ++d) {
    if (kTiles % kD != 0 && tile0 + d >= kTiles) break;
    WarpTile<kM, 1> part;
    clear(part);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      FragmentB<float> right;
      load_b_trans<Tile, kPermuted>(b, k0 + kStepK<float> * step, 8 * (tile0 + d), lane, right);
#pragma unroll
      for (int m = 0; m < kM; ++m) mma<float, false>(part[m][0], left[step][m], right);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][d][i] += part[m][0][i];
  }
}

// acc += left * B with `left` taken from accumulators: multiply_accumulator in groups of kGroup steps.
template <class Tile, int kGroup, int kM, int kN, int kD>
NVRTC_ATTN_DEVICE void multiply_accumulator_grouped(WarpTile<kM, kD>& acc, WarpTile<kM, kN> const& left, float const* b,
                                                    int k0, int tile0, int lane) {
  static_assert(kN % kGroup == 0);
#pragma unroll
  for (int n = 0; n < kN; n += kGroup) {
    FragmentA<float> a[kGroup][kM];
#pragma unroll
    for (int step = 0; step < kGroup; ++step)
#pragma unroll
      for (int m = 0; m < kM; ++m) a[step][m] = accumulator_as_a(left[m][n + step]);
    multiply_group<Tile, true>(acc, a, b, k0 + 8 * n, tile0, lane);
  }
}

}  // namespace nvrtc_attn
