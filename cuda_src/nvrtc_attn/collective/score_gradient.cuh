// From the two score-shaped products of the backward pass to dS, in registers, by one warp.
//
// A warp holds kM x kN accumulator tiles (16 x 8 each) of S = Q K^T and of dP = dO V^T, keys in KeyOrder, and turns S into dS in place:
// P = exp(softcap(scale * s) + bias - lse), dS = P * (Z * dP - delta), masked by selection.
// Rows without a valid key and rows beyond the sequence carry lse = +inf here, so their P is exactly zero.
#pragma once
#include "../common/fragment_load.cuh"
#include "../common/key_order.cuh"
#include "../params.cuh"
#include "bias.cuh"
#include "dropout.cuh"
#include "float32_products.cuh"
#include "mask.cuh"
#include "scores.cuh"
#include "seqlen.cuh"

namespace nvrtc_attn {

// Left operand of a product with both operands [row][k]: from shared memory at each step, or kept in registers.
template <class Tile, class Element, int kM>
struct SharedRows {
  Element const* tile;
  int row0;
  NVRTC_ATTN_DEVICE FragmentA<Element> step(int m, int k, int lane) const {
    return load_a<Tile>(tile, row0 + 16 * m, k, lane);
  }
  NVRTC_ATTN_DEVICE FragmentA<Element> half_step(int m, int k, int lane) const {
    return load_a_half_step<Tile>(tile, row0 + 16 * m, k, lane);
  }
  NVRTC_ATTN_DEVICE LaneRows<Tile> of_lane(int lane) const { return {lane_address_a<Tile>(tile, row0, lane)}; }
};

template <class Tile, class Element, int kM>
struct RegisterRows {
  static constexpr int kSteps = (Tile::kCols + kStepK<Element> - 1) / kStepK<Element>;
  static constexpr bool kHalf = Tile::kCols % kStepK<Element> != 0;
  FragmentA<Element> fragment[kM][kSteps];
  NVRTC_ATTN_DEVICE void load(Element const* tile, int row0, int lane) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        fragment[m][k] = kHalf && k == kSteps - 1 ? load_a_half_step<Tile>(tile, row0 + 16 * m, k, lane)
                                                  : load_a<Tile>(tile, row0 + 16 * m, k, lane);
      }
  }
  NVRTC_ATTN_DEVICE FragmentA<Element> step(int m, int k, int) const { return fragment[m][k]; }
  NVRTC_ATTN_DEVICE FragmentA<Element> half_step(int m, int k, int) const { return fragment[m][k]; }
  NVRTC_ATTN_DEVICE RegisterRows const& of_lane(int) const { return *this; }
};

// multiply_nt in single steps: 16-bit types, and float32 without tensor cores.
template <class Tile, bool kLegacy, int kUnroll, int kM, int kN, class Rows, class Element>
NVRTC_ATTN_DEVICE void multiply_nt_plain(WarpTile<kM, kN>& acc, Rows const& a, Element const* b, int col0, int lane) {
  static_assert(kN % 2 == 0, "the right operand is read 16 columns at a time");
  constexpr int kSteps = Tile::kCols / kStepK<Element>;
#pragma unroll(kUnroll)
  for (int k = 0; k < kSteps; ++k) {
    FragmentA<Element> left[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) left[m] = a.step(m, k, lane);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      FragmentB<Element> right[2];
      load_b_pair<Tile>(b, col0 + 8 * n, k, lane, right[0], right[1]);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma<Element, kLegacy>(acc[m][n], left[m], right[0]);
        mma<Element, kLegacy>(acc[m][n + 1], left[m], right[1]);
      }
    }
  }
  if constexpr (Tile::kCols % kStepK<Element> != 0) {
    FragmentA<Element> left[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) left[m] = a.half_step(m, kSteps, lane);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      FragmentB<Element> right[2];
      load_b_pair_half_step<Tile>(b, col0 + 8 * n, kSteps, lane, right[0], right[1]);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma_half_step<Element, kLegacy>(acc[m][n], left[m], right[0]);
        mma_half_step<Element, kLegacy>(acc[m][n + 1], left[m], right[1]);
      }
    }
  }
}

// acc += A B^T: A's rows from `a`, columns of the result are rows col0.. of `b`; the contraction is the tile width.
// kTransposed: of S^T and dP^T, whose float32 terms come in the order of S and dP. kFromZero: acc is zero. kApart: the small
// terms of float32 are summed apart.
template <class Tile, bool kLegacy, int kUnroll, bool kTransposed, bool kFromZero, bool kApart = false, int kM, int kN,
          class Rows, class Element>
NVRTC_ATTN_DEVICE void multiply_nt(WarpTile<kM, kN>& acc, Rows const& a, Element const* b, int col0, int lane) {
  if constexpr (kTerms<Element, kLegacy> == 3) {
    multiply_nt_chains<Tile, kUnroll, kTransposed, kFromZero, kApart>(acc, a, b, col0, lane);
  } else {
    multiply_nt_plain<Tile, kLegacy, kUnroll>(acc, a, b, col0, lane);
  }
}

// acc += left[.] * B over one contraction step: B's rows are k0.., its columns 8 * (tile0 + d) for the accumulator tiles d
// that lie inside the tile (the last warp of a split head dim may have fewer than kD).
template <class Tile, bool kLegacy, bool kPermuted, int kM, int kD, class Element>
NVRTC_ATTN_DEVICE void multiply_step(WarpTile<kM, kD>& acc, FragmentA<Element> const (&left)[kM], Element const* b,
                                     int k0, int tile0, int lane) {
  constexpr int kTiles = Tile::kCols / 8;
  if constexpr (sizeof(Element) == 2) {
#pragma unroll
    for (int d = 0; d + 1 < kD; d += 2) {
      if (kTiles % kD != 0 && tile0 + d >= kTiles) break;
      FragmentB<Element> right[2];
      if (kTiles % 2 != 0 && tile0 + d + 1 >= kTiles) {
        load_b_trans_single<Tile>(b, k0, tile0 + d, lane, right[0]);
        right[1].x[0] = right[1].x[1] = 0;
      } else {
        load_b_trans_pair<Tile>(b, k0, tile0 + d, lane, right[0], right[1]);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma<Element, kLegacy>(acc[m][d], left[m], right[0]);
        mma<Element, kLegacy>(acc[m][d + 1], left[m], right[1]);
      }
    }
    if constexpr (kD % 2 != 0) {
      if (kTiles % kD == 0 || tile0 + kD - 1 < kTiles) {
        FragmentB<Element> right;
        load_b_trans_single<Tile>(b, k0, tile0 + kD - 1, lane, right);
#pragma unroll
        for (int m = 0; m < kM; ++m) mma<Element, kLegacy>(acc[m][kD - 1], left[m], right);
      }
    }
  } else {
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      if (kTiles % kD != 0 && tile0 + d >= kTiles) break;
      FragmentB<float> right;
      load_b_trans<Tile, kPermuted>(b, k0, 8 * (tile0 + d), lane, right);
#pragma unroll
      for (int m = 0; m < kM; ++m) mma<float, kLegacy>(acc[m][d], left[m], right);
    }
  }
}

// acc += left * B with `left` taken from accumulators: its columns are rows k0.. of B.
template <class Tile, bool kLegacy, int kM, int kN, int kD, class Element>
NVRTC_ATTN_DEVICE void multiply_accumulator(WarpTile<kM, kD>& acc, WarpTile<kM, kN> const& left, Element const* b,
                                            int k0, int tile0, int lane) {
  if constexpr (kTerms<Element, kLegacy> == 3) {
    FragmentA<float> a[kN][kM];
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int m = 0; m < kM; ++m) a[n][m] = accumulator_as_a(left[m][n]);
    multiply_chains<Tile, true>(acc, a, b, k0, tile0, lane);
  } else {
    constexpr int kTilesPerStep = kStepK<Element> / 8;
#pragma unroll
    for (int n = 0; n < kN; n += kTilesPerStep) {
      FragmentA<Element> a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if constexpr (sizeof(Element) == 2) {
          a[m] = accumulator_as_a<Element>(left[m][n], left[m][n + 1]);
        } else {
          a[m] = accumulator_as_a(left[m][n]);
        }
      }
      multiply_step<Tile, kLegacy, true>(acc, a, b, k0 + 8 * n, tile0, lane);
    }
  }
}

// float32: acc += left * B over kSteps steps from `step` on, one chain; `left` as in multiply_shared.
template <class LeftTile, class Tile, int kSteps, int kM, int kD>
NVRTC_ATTN_DEVICE void multiply_shared_chain(WarpTile<kM, kD>& acc, float const* left, int row0, int step,
                                             float const* b, int tile0, int lane) {
  FragmentA<float> a[kSteps][kM];
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int m = 0; m < kM; ++m) a[k][m] = load_a<LeftTile>(left, row0 + 16 * m, step + k, lane);
  multiply_chains<Tile, false>(acc, a, b, step * kStepK<float>, tile0, lane);
}

// acc += left * B with `left` rows row0.. of a shared-memory tile [row][k].
template <class LeftTile, class Tile, bool kLegacy, int kUnroll, int kM, int kD, class Element>
NVRTC_ATTN_DEVICE void multiply_shared(WarpTile<kM, kD>& acc, Element const* left, int row0, Element const* b,
                                       int tile0, int lane) {
  constexpr int kSteps = LeftTile::kCols / kStepK<Element>;
  static_assert(LeftTile::kCols % kStepK<Element> == 0, "key tiles are whole steps");
  if constexpr (kTerms<Element, kLegacy> == 3) {
    constexpr int kChain = kSteps % kChainSteps == 0 ? kChainSteps : 2;
    static_assert(kSteps % kChain == 0);
#pragma unroll 1
    for (int k = 0; k < kSteps; k += kChain) {
      multiply_shared_chain<LeftTile, Tile, kChain>(acc, left, row0, k, b, tile0, lane);
    }
  } else {
#pragma unroll(kUnroll)
    for (int k = 0; k < kSteps; ++k) {
      FragmentA<Element> a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) a[m] = load_a<LeftTile>(left, row0 + 16 * m, k, lane);
      multiply_step<Tile, kLegacy, false>(acc, a, b, k * kStepK<Element>, tile0, lane);
    }
  }
}

// What P's exponent subtracts (ScoreMap::reference_of_lse) and delta, of the rows a thread holds: rows
// row0 + 16 m + 8 r + lane / 4.
template <int kM>
struct RowStatistics {
  float reference[kM][2];
  float delta[kM][2];

  template <class Map, class Seqlen>
  NVRTC_ATTN_DEVICE void load(BackwardParams const& params, Map const& map, Seqlen const& seqlen, int b, int h,
                              int row0, int lane) {
    float const* lse =
        params.lse + index_t(h) * params.lse_stride_h +
        (params.lse_packed ? index_t(seqlen.q_row0) * params.lse_stride_m : index_t(b) * params.lse_stride_b);
    float const* d = params.delta + index_t(seqlen.batch_index) * params.delta_stride_b +
                     index_t(h) * params.delta_stride_h + seqlen.q_row0;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int const i = row0 + 16 * m + 8 * r + (lane >> 2);
        bool const valid = i < seqlen.len_q;
        reference[m][r] = map.reference_of_lse(valid ? lse[index_t(i) * params.lse_stride_m] : infinity());
        delta[m][r] = valid ? d[i] : 0.0f;
      }
  }
};

// kCount neighbouring elements of a score-shaped tensor, moved in vectors of up to 16 bytes.
template <class Element, int kCount>
struct alignas(kCount * sizeof(Element) < 16 ? kCount * sizeof(Element) : 16) ScoreRun {
  Element x[kCount];

  // Whether every run that starts at a multiple of kCount columns can be moved whole, in a tensor of `cols` columns.
  static NVRTC_ATTN_DEVICE bool allowed(ScoreTensor<Element> const& t, int cols) {
    unsigned long long const address =
        reinterpret_cast<unsigned long long>(t.base) | (unsigned long long)t.stride_m * sizeof(Element);
    return t.stride_n == 1 && address % alignof(ScoreRun) == 0 && cols % kCount == 0;
  }
};

// The bias or byte mask under one thread's accumulator tiles, read ahead of its use and kept as it comes. Reads beyond the
// sequence are clamped into it: those scores are dropped by position or by lse = +inf, so only the address matters. A tile
// that has work has at least one row and one key.
// kVectors: known at compile time that runs can be moved whole.
template <class Element, bool kVectors, int kM, int kN>
struct ScoreRuns {
  using Order = KeyOrderOf<kN>;
  static constexpr int kRuns = 8 * kN / Order::kKeys;
  ScoreRun<Element, Order::kRun> run[kM][2][kRuns];

  NVRTC_ATTN_DEVICE void load(ScoreTensor<Element const> const& t, int i0, int j0, int len_q, int cols, int lane) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int j = j0 + Order::kRun * (lane & 3);
        asm volatile(
            ""
            : "+r"(j));  // recompute the offsets for each row: hoisting them costs more registers than it saves
        Element const* const row = t.base + index_t(min(i0 + 16 * m + 8 * r + (lane >> 2), len_q - 1)) * t.stride_m;
#pragma unroll
        for (int x = 0; x < kRuns; ++x, j += Order::kKeys) {
          if constexpr (kVectors) {
            run[m][r][x] = *reinterpret_cast<ScoreRun<Element, Order::kRun> const*>(row + min(j, cols - Order::kRun));
          } else {
#pragma unroll
            for (int e = 0; e < Order::kRun; ++e) run[m][r][x].x[e] = row[index_t(min(j + e, cols - 1)) * t.stride_n];
          }
        }
      }
  }

  NVRTC_ATTN_DEVICE float value(int m, int r, int n, int e) const {
    return to_float(run[m][r][8 * n / Order::kKeys].x[key_in_run(n, e)]);
  }
  NVRTC_ATTN_DEVICE bool is_set(int m, int r, int n, int e) const {
    return run[m][r][8 * n / Order::kKeys].x[key_in_run(n, e)] != 0;
  }
  static constexpr NVRTC_ATTN_DEVICE int key_in_run(int n, int e) { return 2 * n % Order::kRun + e; }
};

struct NoScores {};

struct NoDropout {
  template <class Params>
  NVRTC_ATTN_DEVICE NoDropout(Params const&, int, int) {}
};

// Everything that maps S and dP of one (batch, head) to dS. kSoftcapDerivative: return the gradient of scale * q.k (what
// dq and dk need); otherwise the gradient of the bias, which is added after the softcap.
template <class Traits, bool kSoftcapDerivative>
struct ScoreGradient : ModifierOf<Traits> {
  using Modifier = ModifierOf<Traits>;
  using Bias = typename Traits::Bias;
  using DropoutPolicy = cute::conditional_t<Traits::kDropout, Dropout, NoDropout>;

  PositionMask<Traits::kBand> positions;
  ScoreTensor<Bias const> bias;
  ScoreTensor<unsigned char const> mask;
  DropoutPolicy dropout;
  ScoreMap<Traits> map;
  float multiplier;  // of kept probabilities: 1 / (1 - p)
  int cols;          // of bias and mask: more than positions.len_k with seqused_k

  NVRTC_ATTN_DEVICE ScoreGradient(BackwardParams const& params, int b, int h, int len_q, int len_k)
      : Modifier(params, b, h),
        positions(mask_params<Traits>(params), len_q, len_k),
        bias(reinterpret_cast<Bias const*>(params.bias), b, h, params.bias_stride_b, params.bias_stride_h,
             params.bias_stride_m, params.bias_stride_n),
        mask(params.mask, b, h, params.mask_stride_b, params.mask_stride_h, params.mask_stride_m, params.mask_stride_n),
        dropout(dropout_params<Traits>(params), b, h),
        map(params),
        multiplier(params.dropout_multiplier),
        cols(params.seqlen_k) {}

  // What operator() needs from global memory: load it before the product whose result it is combined with.
  template <int kM, int kN>
  struct Prefetched {
    cute::conditional_t<Traits::kHasBias, ScoreRuns<Bias, Traits::kVectorScores, kM, kN>, NoScores> bias;
    cute::conditional_t<Traits::kMask, ScoreRuns<unsigned char, Traits::kVectorScores, kM, kN>, NoScores> mask;
  };
  template <int kM, int kN>
  NVRTC_ATTN_DEVICE void prefetch(Prefetched<kM, kN>& tile, int i0, int j0, int lane) const {
    if constexpr (Traits::kHasBias) tile.bias.load(bias, i0, j0, positions.len_q, cols, lane);
    if constexpr (Traits::kMask) tile.mask.load(mask, i0, j0, positions.len_q, cols, lane);
  }

  // s becomes dS. (i0, j0): sequence-local position of the warp tile.
  template <int kM, int kN>
  NVRTC_ATTN_DEVICE void operator()(WarpTile<kM, kN>& s, WarpTile<kM, kN> const& dp, RowStatistics<kM> const& rows,
                                    Prefetched<kM, kN> const& tile, int i0, int j0, int lane) const {
    if (positions.keeps_tile(i0, 16 * kM, j0, 8 * kN)) {
      apply<false>(s, dp, rows, tile, i0, j0, lane);
    } else {
      apply<true>(s, dp, rows, tile, i0, j0, lane);
    }
  }

 private:
  // Keep bits of kCount consecutive keys from j (a multiple of four) of row i.
  template <int kCount>
  NVRTC_ATTN_DEVICE unsigned keep_bits(int i, int j) const {
    unsigned long long const start = dropout.row0 + (unsigned long long)i * dropout.pitch + (unsigned long long)j;
    unsigned bits = 0;
#pragma unroll
    for (int x = 0; x < kCount / 4; ++x) bits |= keep_bits_of_block((start >> 2) + x) << (4 * x);
    unsigned const skipped = unsigned(start) & 3;
    // A row pitch that is no multiple of four starts rows inside a block.
    if (skipped != 0) bits = (bits | keep_bits_of_block((start >> 2) + kCount / 4) << kCount) >> skipped;
    return bits;
  }
  NVRTC_ATTN_DEVICE unsigned keep_bits_of_block(unsigned long long counter) const {
    uint4 const w = philox_block(dropout.seed, counter);
    unsigned const least = dropout.threshold;
    return unsigned(w.x > least) | unsigned(w.y > least) << 1 | unsigned(w.z > least) << 2 | unsigned(w.w > least) << 3;
  }

  template <bool kCheckPosition, int kM, int kN>
  NVRTC_ATTN_DEVICE void apply(WarpTile<kM, kN>& s, WarpTile<kM, kN> const& dp, RowStatistics<kM> const& rows,
                               Prefetched<kM, kN> const& tile, int i0, int j0, int lane) const {
    using Order = KeyOrderOf<kN>;
    constexpr int kGroup = Order::kKeys / 8;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int const i = i0 + 16 * m + 8 * r + (lane >> 2);
        Visible const visible = positions.keys_of(i, 0);
#pragma unroll
        for (int group = 0; group < kN; group += kGroup) {
          int const j = j0 + Order::key(group, lane & 3, 0);
          unsigned keep = 0;
          if constexpr (Traits::kDropout) keep = keep_bits<Order::kRun>(i, j);
#pragma unroll
          for (int at = 0; at < Order::kRun; ++at) {
            int const n = group + at / 2, e = at % 2;
            float& x = s[m][n][2 * r + e];
            float bias = 0.0f;
            if constexpr (Traits::kHasBias) bias = tile.bias.value(m, r, n, e);
            float tanh_value, modifier_slope, y;
            if constexpr (Modifier::kScores) {
              y = map.modified(*this, x, bias, i, j + at, i0 + (lane >> 2), j0 + Order::key(0, lane & 3, 0),
                               modifier_slope);
            } else {
              y = map.score(x, bias, tanh_value);
            }
            float const p = map.probability(y, rows.reference[m][r]);
            float g = dp[m][n][2 * r + e];
            if constexpr (Traits::kDropout) g = keep >> at & 1 ? g * multiplier : 0.0f;
            g = p * (g - rows.delta[m][r]);
            if constexpr (Traits::kSoftcap && kSoftcapDerivative) g *= map.slope(tanh_value);
            if constexpr (Modifier::kScores && kSoftcapDerivative) g = g != 0.0f ? g * modifier_slope : 0.0f;
            bool kept = true;
            if constexpr (kCheckPosition) kept = visible.contains(j + at);
            if constexpr (Traits::kMask) kept = kept && tile.mask.is_set(m, r, n, e);
            if constexpr (Modifier::kMasks) kept = kept && this->keeps(i, j + at);
            x = masked_gradient(g, kept);
          }
        }
      }
  }
};

}  // namespace nvrtc_attn
