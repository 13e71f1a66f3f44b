// From S^T = K Q^T and dP^T = V dO^T to P^T (times the dropout mask) and dS^T, in registers, by one warp.
//
// Rows of the accumulators are keys, columns are queries, so that P^T and dS^T are at once the left operands of
// dV = P^T dO and dK = dS^T Q. Thread (g, t) holds keys g and g + 8 and queries 2t and 2t + 1 of each 16 x 8 tile.
// P = exp(softcap(scale * s) + bias - lse), dS = P * (Z * dP - delta), masked by selection (never by a product).
#pragma once
#include "score_gradient.cuh"

namespace nvrtc_attn {

// Keep bits of one transposed 16 x 8 accumulator tile (16 keys from j0, 8 queries from i0): bit e for value e of the tile.
// Thread (g, t) draws Philox block t of the four that hold query i0 + g's keys: one block per thread and tile, and a fifth
// where rows do not start at multiples of four. Must be called by whole warps.
NVRTC_ATTN_DEVICE unsigned keep_bits_transposed(Dropout const& dropout, int i0, int j0, int lane) {
  int const g = lane >> 2;
  int const t = lane & 3;
  unsigned long long const start = dropout.row0 + (unsigned long long)(i0 + g) * dropout.pitch + unsigned(j0);
  unsigned row = dropout.block_bits((start >> 2) + t) << (4 * t);
  row |= __shfl_xor_sync(0xffffffffu, row, 1);
  row |= __shfl_xor_sync(0xffffffffu, row, 2);
  unsigned const shift = unsigned(start) & 3;
  if (__any_sync(0xffffffffu, shift != 0)) row = (row | dropout.block_bits((start >> 2) + 4) << 16) >> shift;
  unsigned const even = __shfl_sync(0xffffffffu, row, 8 * t) >> g;  // query 2t: bit 0 for key g, bit 8 for key g + 8
  unsigned const odd = __shfl_sync(0xffffffffu, row, 8 * t + 4) >> g;
  return (even & 1) | (odd & 1) << 1 | (even >> 6 & 4) | (odd >> 5 & 8);
}

// Blocks that have the same scores, each with a slice of the head dim.
template <class Traits, class = void>
constexpr int kDimSlicesOf = 1;
template <class Traits>
constexpr int kDimSlicesOf<Traits, cute::void_t<decltype(Traits::kDimSlices)>> = Traits::kDimSlices;

// kGives: what captured arrays get is added here, score by score or along diagonals; else the caller does that (Modifier::
// kTrainsByDistance).
template <class Traits, bool kGives = true>
struct TransposedScoreGradient : ModifierOf<Traits> {
  using Modifier = ModifierOf<Traits>;
  static constexpr bool kTrains = Modifier::kTrains && kGives;
  using Captured = CapturedGradients<Modifier>;
  using Bias = typename Traits::Bias;
  using DBias = typename Traits::DBias;
  using DropoutPolicy = cute::conditional_t<Traits::kDropout, Dropout, NoDropout>;

  PositionMask<Traits::kBand> positions;
  ScoreTensor<Bias const> bias;
  ScoreTensor<unsigned char const> mask;
  ScoreTensor<DBias> dbias;
  DropoutPolicy dropout;
  ScoreMap<Traits> map;
  float multiplier;  // of kept probabilities: 1 / (1 - p)
  // Columns to write: all keys of the tensor, also those that seqused_k leaves out. None where another block has the same
  // scores, and gives what bias and captured arrays get.
  int dbias_cols;
  bool whole;  // kTileWords: no mask but that of positions hides anything of the tile

  NVRTC_ATTN_DEVICE TransposedScoreGradient(BackwardParams const& params, int b, int h, int len_q, int dbias_cols_,
                                            int len_k, bool whole_ = false)
      : Modifier(params, b, h),
        positions(mask_params<Traits>(params), len_q, len_k),
        bias(reinterpret_cast<Bias const*>(params.bias), b, h, params.bias_stride_b, params.bias_stride_h,
             params.bias_stride_m, params.bias_stride_n),
        mask(params.mask, b, h, params.mask_stride_b, params.mask_stride_h, params.mask_stride_m, params.mask_stride_n),
        dbias(reinterpret_cast<DBias*>(params.dbias), b, h, params.dbias_stride_b, params.dbias_stride_h,
              params.dbias_stride_m, params.dbias_stride_n),
        dropout(dropout_params<Traits>(params), b, h),
        map(params),
        multiplier(params.dropout_multiplier),
        dbias_cols(dbias_cols_),
        whole(whole_) {}

  // The 16-bit bias of a warp tile before it is used: word [n][m][half] holds query i0 + 8 m + g and keys 2t, 2t + 1 of the 8
  // from j0 + 16 n + 8 half on. Four bytes a load and the registers' own transpose (movmatrix) instead of a load a score.
  static constexpr bool kBiasWords = Traits::kHasBias && sizeof(Bias) == 2;
  static constexpr bool kBiasElements = Traits::kHasBias && !kBiasWords;  // read one at a time
  static constexpr bool kDbiasWords = Traits::kDbiasStore && sizeof(DBias) == 2;
  template <int kN, int kM>
  struct BiasWords {
    uint32_t x[kBiasWords ? kN : 1][kBiasWords ? kM : 1][2];
  };

  // Before the products, so that their time covers the loads' latency.
  template <int kN, int kM>
  NVRTC_ATTN_DEVICE void load_bias(BiasWords<kN, kM>& words, int i0, int j0, int lane) const {
    if constexpr (kBiasWords) {
      int const i = i0 + (lane >> 2);
      int const j = j0 + 2 * (lane & 3);
      bool const vector = bias.pairs && positions.has_rows(i0, 8 * kM) && j0 + 16 * kN <= positions.len_k;
      Bias const* row = bias.at(i, j);
#pragma unroll
      for (int m = 0; m < kM; ++m, row += 8 * bias.stride_m)
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            int const key = 16 * n + 8 * half;
            uint32_t& word = words.x[n][m][half];
            if (vector) {
              word = *reinterpret_cast<uint32_t const*>(row + key);
            } else {
              bool const valid = i + 8 * m < positions.len_q;
              Bias const* at = row + key * bias.stride_n;
              ElementPair<Bias> pair{Bias(0.0f), Bias(0.0f)};
              if (valid && j + key < positions.len_k) pair.x = at[0];
              if (valid && j + key + 1 < positions.len_k) pair.y = at[bias.stride_n];
              word = *reinterpret_cast<uint32_t const*>(&pair);
            }
          }
    }
  }

  // Of 16 keys and 16 queries at a time, what distances decide is found once for each distance.
  template <int kN, int kM>
  static constexpr bool kAlong = kReadsDiagonals<Modifier> && kN == 1 && kM == 2;
  template <int kN, int kM>
  using Along = Diagonals<Modifier, kM, kAlong<kN, kM>>;
  template <int kN, int kM>
  NVRTC_ATTN_DEVICE void operator()(WarpTile<kN, kM>& s, WarpTile<kN, kM>& dp, BiasWords<kN, kM> const& words,
                                    float const* row_lse, float const* row_delta, int i0, int j0, int lane,
                                    Captured& captured) const {
    Along<kN, kM> along;
    along.compute_transposed(*this, i0, j0);
    (*this)(s, dp, words, row_lse, row_delta, i0, j0, lane, along, captured);
  }

  // s becomes P^T (times Z), dp becomes dS^T (of scale * q.k). (i0, j0): sequence-local position of the warp tile; row_lse
  // and row_delta: shared memory, of queries i0 and on.
  template <int kN, int kM>
  NVRTC_ATTN_DEVICE void operator()(WarpTile<kN, kM>& s, WarpTile<kN, kM>& dp, BiasWords<kN, kM> const& words,
                                    float const* row_lse, float const* row_delta, int i0, int j0, int lane,
                                    Along<kN, kM> const& along, Captured& captured) const {
    // Four bits a tile. A loop, not unrolled in full: the code of 16 Philox blocks overflows the instruction cache.
    unsigned keep = 0;
    if constexpr (Traits::kDropout) {
      static_assert(kN * kM <= 8);
#pragma unroll 2
      for (int tile = 0; tile < kN * kM; ++tile) {
        keep |= keep_bits_transposed(dropout, i0 + tile / kN * 8, j0 + tile % kN * 16, lane) << (4 * tile);
      }
    }
    if (positions.has_rows(i0, 8 * kM) && positions.keeps_tile(i0, 8 * kM, j0, 16 * kN)) {
      if (Traits::kTileWords && whole) {
        apply<false, false>(s, dp, words, keep, row_lse, row_delta, i0, j0, lane, along, captured);
        return;
      }
      apply<false>(s, dp, words, keep, row_lse, row_delta, i0, j0, lane, along, captured);
    } else {
      apply<true>(s, dp, words, keep, row_lse, row_delta, i0, j0, lane, along, captured);
    }
  }

  // Of the tiles since `captured` was made. By whole warps; not of a block whose scores another one has, too.
  NVRTC_ATTN_DEVICE void finish(Captured& captured) const {
    if (kDimSlicesOf<Traits> == 1 || dbias_cols > 0) captured.finish(*this);
  }

 private:
  // One transposed 16 x 8 tile of 16-bit dbias: this thread writes query i, keys j, j + 1 and j + 8, j + 9.
  NVRTC_ATTN_DEVICE void store_dbias(float const (&value)[4], int i, int j) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t word;
      cute::SM75_U32x1_MOVM_T::copy(pack2<DBias>(value[2 * half], value[2 * half + 1]), word);
      int const key = j + 8 * half;
      if (i >= positions.len_q) continue;
      DBias* to = dbias.at(i, key);
      if (dbias.pairs && key + 1 < dbias_cols) {
        *reinterpret_cast<uint32_t*>(to) = word;
      } else {
        ElementPair<DBias> const pair = *reinterpret_cast<ElementPair<DBias> const*>(&word);
        if (key < dbias_cols) to[0] = pair.x;
        if (key + 1 < dbias_cols) to[dbias.stride_n] = pair.y;
      }
    }
  }

  template <bool kCheckPosition, bool kSelects = Traits::kMask || Modifier::kMasks, int kN, int kM>
  NVRTC_ATTN_DEVICE void apply(WarpTile<kN, kM>& s, WarpTile<kN, kM>& dp, BiasWords<kN, kM> const& words,
                               unsigned keep_bits, float const* row_lse, float const* row_delta, int i0, int j0,
                               int lane, Along<kN, kM> const& along, Captured& captured) const {
    constexpr bool kSums = kTrains && kAlong<kN, kM> && (0 < kSummedAlong<Modifier>);
    constexpr bool kNoElements = kTrains && !Captured::kElements;  // no branch a score
    constexpr bool kReadsMask = kSelects && Traits::kMask;         // also where positions need no test
    constexpr bool kAsksMask = kSelects && Modifier::kMasks;
    int const g = lane >> 2;
    int const t = lane & 3;
    DiagonalSums<Modifier, kSums> sums;
    ElementSums<kKeyGradientsOf<Modifier>> of_keys[kN][2];
    if constexpr (kSums) sums.clear();
    DiagonalsOfSquare<Modifier, kAlong<kN, kM>> const diagonals(along);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      int const i = i0 + 8 * m + 2 * t;
      float2 const lse = *reinterpret_cast<float2 const*>(row_lse + 8 * m + 2 * t);
      float2 const row_d = *reinterpret_cast<float2 const*>(row_delta + 8 * m + 2 * t);
      using Map = ScoreMap<Traits>;
      float const reference[2] = {Map::template reference_of_lse<true>(lse.x),
                                  Map::template reference_of_lse<true>(lse.y)};
      float const delta[2] = {row_d.x, row_d.y};
      ElementSums<kQueryGradientsOf<Modifier>> of_queries[2];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        unsigned const keep = keep_bits >> (4 * (m * kN + n));
        float tile_bias[4];  // as the accumulators: query e % 2, key half e / 2
        if constexpr (kBiasWords) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t word;
            cute::SM75_U32x1_MOVM_T::copy(words.x[n][m][half], word);
            ElementPair<Bias> const pair = *reinterpret_cast<ElementPair<Bias> const*>(&word);
            tile_bias[2 * half] = to_float(pair.x);
            tile_bias[2 * half + 1] = to_float(pair.y);
          }
        }
        float tile_dbias[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int const ie = i + (e & 1);
          int const j = j0 + 16 * n + g + 8 * (e >> 1);
          float y, tanh_value, modifier_slope;
          if constexpr (kAlong<kN, kM>) {
            y = this->score(s[n][m][e] * map.scale, ie, j, modifier_slope, diagonals.at(m, e), i0 + 2 * t, j0 + g);
          } else if constexpr (Modifier::kScores) {
            y = map.modified(*this, s[n][m][e], 0.0f, ie, j, i0 + 2 * t, j0 + g, modifier_slope);
          } else if constexpr (!Traits::kHasBias) {
            y = map.score(s[n][m][e], 0.0f, tanh_value);
          }
          bool kept = true;
          if constexpr (kCheckPosition) kept = ie < positions.len_q && positions.keeps(ie, j);
          if constexpr (Traits::kHasBias) {
            if constexpr (kBiasElements) tile_bias[e] = !kCheckPosition || kept ? to_float(*bias.at(ie, j)) : 0.0f;
            if constexpr (Modifier::kScores) {
              y = map.biased(y, tile_bias[e]);
            } else {
              y = map.score(s[n][m][e], tile_bias[e], tanh_value);
            }
          }
          if constexpr (kReadsMask) {
            if (!kCheckPosition || kept) kept = *mask.at(ie, j) != 0;
          }
          if constexpr (kAsksMask) kept = kept && this->keeps(ie, j);
          float p = map.probability(y, reference[e & 1]);
          float z_dp = dp[n][m][e];
          if constexpr (Traits::kDropout) z_dp = (keep >> e & 1) ? z_dp * multiplier : 0.0f;
          float ds = p * (z_dp - delta[e & 1]);
          if constexpr (kCheckPosition || kSelects) {
            p = masked_gradient(p, kept);
            ds = masked_gradient(ds, kept);
          }
          tile_dbias[e] = ds;
          if constexpr (Traits::kDbiasStore && !kDbiasWords) {
            if (j < dbias_cols && (!kCheckPosition || ie < positions.len_q)) *dbias.at(ie, j) = from_float<DBias>(ds);
          }
          if constexpr (Traits::kDropout) p = (keep >> e & 1) ? p * multiplier : 0.0f;
          if constexpr (Traits::kSoftcap) {
            float slope = map.slope(tanh_value);
            // q.k of a score that is not kept may be NaN: zero times its slope would be too.
            if constexpr (kCheckPosition || kSelects) slope = masked_gradient(slope, kept);
            ds *= slope;
          }
          if constexpr (Modifier::kScores) {
            // Likewise of a score that is -inf by the modifier: no gradient, whatever its derivative is.
            if constexpr (kSums) {
              if (kDimSlicesOf<Traits> == 1 || dbias_cols > 0)
                this->add(captured, of_keys[n][e >> 1], of_queries[e & 1], sums.at(m, e), s[n][m][e] * map.scale, ds,
                          ie, j, diagonals.at(m, e), i0 + 2 * t, j0 + g);
            } else if constexpr (kNoElements) {
              this->add(captured, of_keys[n][e >> 1], of_queries[e & 1], s[n][m][e] * map.scale, ds, ie, j, i0 + 2 * t,
                        j0 + g);
            } else if constexpr (kTrains) {
              if (ds != 0.0f && dbias_cols > 0)
                this->add(captured, of_keys[n][e >> 1], of_queries[e & 1], s[n][m][e] * map.scale, ds, ie, j,
                          i0 + 2 * t, j0 + g);
            }
            ds = ds != 0.0f ? ds * modifier_slope : 0.0f;
          }
          s[n][m][e] = p;
          dp[n][m][e] = ds;
        }
        if constexpr (kDbiasWords) store_dbias(tile_dbias, i0 + 8 * m + g, j0 + 16 * n + 2 * t);
      }
      if constexpr (kQueryGradientsOf<Modifier> > 0) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          of_queries[c].sum_over_lanes(4, 16);
          if (g == 0 && dbias_cols > 0)
            this->give_queries(of_queries[c], i + c, Captured::template send<typename Modifier::Sum::Word>);
        }
      }
    }
    if constexpr (kKeyGradientsOf<Modifier> > 0) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          of_keys[n][r].sum_over_lanes(1, 2);
          if (t == 0 && dbias_cols > 0)
            this->give_keys(of_keys[n][r], j0 + 16 * n + g + 8 * r,
                            Captured::template send<typename Modifier::Sum::Word>);
        }
      }
    }
    if constexpr (kSums) {
      float total[kSummedAlong<Modifier>];
      sums.fold(total);
      // By the lane that stands for the diagonal.
      this->give(captured, total, i0 + along.offset(0), j0, along.held[0]);
    }
  }
};

}  // namespace nvrtc_attn
