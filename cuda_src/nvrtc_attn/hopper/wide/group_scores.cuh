// What the two consumer groups of the Hopper backward kernel for wide heads do with their products, in the registers of a
// transposed tile: 16 keys a warp, 64 queries.
//
// Group 0: scores -> P, the left operand of dV, and the factor of dS: P, with softcap times its derivative, negative where
// dropout has dropped it (dS = P * (Z * dP - delta) is not zero there). Group 1: dP and that factor -> dS, and dbias.
#pragma once
#include "../../collective/score_gradient_transposed.cuh"
#include "../backward/score_block.cuh"
#include "../backward/gradient_store.cuh"
#include "../common/uniform.cuh"
#include "products.cuh"

namespace nvrtc_attn {

template <class Traits>
constexpr bool kHasScoreOperands = Traits::kHasBias || Traits::kMask || Traits::kDropout;
template <class Traits>
constexpr bool kBiasElements = TransposedScoreGradient<Traits>::kBiasElements;

// The elements of a bias or mask that one thread reads, 8 queries at a time. The address walks: computed anew for every element
// it takes registers that the kernel does not have.
template <class Element>
struct ElementWalk {
  Element const* place;  // first query, first key
  index_t stride_m, stride_n;

  NVRTC_ATTN_DEVICE ElementWalk(ScoreTensor<Element const> const& tensor, int i, int j)
      : place(tensor.at(i, j)), stride_m(tensor.stride_m), stride_n(tensor.stride_n) {}

  // Of value e of the accumulator tile.
  NVRTC_ATTN_DEVICE Element const& at(int e) const { return place[(e & 1) * stride_m + 8 * (e >> 1) * stride_n]; }

  NVRTC_ATTN_DEVICE void next() { place = opaque(place + 8 * stride_m); }
};
struct NoWalk {
  NVRTC_ATTN_DEVICE void next() {}
};

// What a score needs beside its product: read, or drawn, while the product runs.
template <class Traits, bool kAny = kHasScoreOperands<Traits>>
struct WideScoreOperands {
  NVRTC_ATTN_DEVICE WideScoreOperands(BackwardParams const&, int, int, int, int, int, int, int) {}
  NVRTC_ATTN_DEVICE NoWalk walk_bias(int, int) const { return {}; }
  NVRTC_ATTN_DEVICE NoWalk walk_mask(int, int) const { return {}; }
};
template <class Traits>
struct WideScoreOperands<Traits, true> {
  using Tensors = TransposedScoreGradient<Traits>;
  using Bias = typename Traits::Bias;
  Tensors tensors;
  typename Tensors::template BiasWords<1, 8> words;
  unsigned keep = 0;  // bit 4 m + e: value e of tile m

  NVRTC_ATTN_DEVICE WideScoreOperands(BackwardParams const& params, int b, int h, int len_q, int len_k, int i0, int j0,
                                      int lane)
      : tensors(params, b, h, len_q, params.seqlen_k, len_k) {
    tensors.load_bias(words, i0, j0, lane);
    if constexpr (Traits::kDropout) {
      // Not unrolled in full: the code of Philox blocks overflows the instruction cache. Two at a time spill up to 64 bytes
      // where lengths vary or a bias is read by elements.
      constexpr int kBlocks = Traits::kVarlen || Traits::kSequsedK || kBiasElements<Traits> ? 1 : 2;
#pragma unroll kBlocks
      for (int m = 0; m < 8; ++m) keep |= keep_bits_transposed(tensors.dropout, i0 + 8 * m, j0, lane) << (4 * m);
    }
  }

  // From query i and key j on; nothing where the tensor is not read so.
  NVRTC_ATTN_DEVICE auto walk_bias(int i, int j) const {
    if constexpr (kBiasElements<Traits>) {
      return ElementWalk<Bias>(tensors.bias, i, j);
    } else {
      return NoWalk();
    }
  }
  NVRTC_ATTN_DEVICE auto walk_mask(int i, int j) const {
    if constexpr (Traits::kMask) {
      return ElementWalk<unsigned char>(tensors.mask, i, j);
    } else {
      return NoWalk();
    }
  }

  // The bias of tile m, as the accumulators lie.
  NVRTC_ATTN_DEVICE void unpack_bias(float (&to)[4], int m) const {
    if constexpr (Tensors::kBiasWords) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t word;
        cute::SM75_U32x1_MOVM_T::copy(words.x[0][m][half], word);
        ElementPair<Bias> const pair = *reinterpret_cast<ElementPair<Bias> const*>(&word);
        to[2 * half] = to_float(pair.x);
        to[2 * half + 1] = to_float(pair.y);
      }
    }
  }
};

template <class Traits, class Shape>
struct WideScores {
  using Element = typename Shape::Element;
  static constexpr int kTilesM = Shape::kTilesM;
  ScoreMap<Traits> const& map;
  PositionMask<Traits::kBand> const& mask;
  int j;  // this thread's first key; the other is j + 8
  int t;  // lane % 4

  // Raw products -> P as operand of dV, and at `factor`, where it is another thing, what dS multiplies.
  NVRTC_ATTN_DEVICE void probabilities(AccTile (&s)[1][kTilesM], FragmentA<Element> (&p)[Shape::kStepsM],
                                       WideScoreOperands<Traits> const& operands, unsigned factor, unsigned row_lse,
                                       int m0, bool masked) const {
    if (masked) {
#pragma unroll
      for (int r = 0; r < 2; ++r) replace_hidden(s, r, -infinity(), mask.rows_of(j + 8 * r, m0 + 2 * t));
    }
    auto bias_walk = operands.walk_bias(m0 + 2 * t, j);
    auto mask_walk = operands.walk_mask(m0 + 2 * t, j);
#pragma unroll
    for (int step = 0; step < Shape::kStepsM; ++step) {
      FragmentA<Element> slope;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const m = 2 * step + half;
        float2 const lse = load_shared_float2(row_lse + 32 * m + 8 * t);
        float const reference[2] = {lse.x, lse.y};
        float bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if constexpr (Traits::kHasBias) operands.unpack_bias(bias, m);
        float probability[4], product[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // A masked score stays -inf, whatever bias and map make of it.
          bool kept = s[0][m][e] != -infinity();
          if constexpr (kBiasElements<Traits>) {
            if (kept) bias[e] = to_float(bias_walk.at(e));
          }
          float tanh_value;
          float y = map.score(s[0][m][e], bias[e], tanh_value);
          if constexpr (Traits::kMask) {
            if (kept) kept = mask_walk.at(e) != 0;
          }
          if constexpr (ScoreMap<Traits>::kMapped || Traits::kMask) y = masked_score(y, kept);
          probability[e] = map.probability(y, reference[e & 1]);
          // q.k of a score that the byte mask drops may be NaN, and zero times its slope would be too.
          if constexpr (Traits::kSoftcap && Traits::kMask) tanh_value = masked_gradient(tanh_value, kept);
          product[e] = probability[e] * map.slope(tanh_value);
          if constexpr (Traits::kDropout) {
            bool const stays = operands.keep >> (4 * m + e) & 1;
            probability[e] = stays ? probability[e] : 0.0f;
            product[e] = stays ? product[e] : -product[e];
          }
        }
        bias_walk.next();
        mask_walk.next();
        p[step].x[2 * half] = pack2<Element>(probability[0], probability[1]);
        p[step].x[2 * half + 1] = pack2<Element>(probability[2], probability[3]);
        if constexpr (Shape::kTwoP) {
          slope.x[2 * half] = pack2<Element>(product[0], product[1]);
          slope.x[2 * half + 1] = pack2<Element>(product[2], product[3]);
        }
      }
      if constexpr (Shape::kTwoP) give_fragment(factor, step, slope);
    }
  }
};

// dP -> dS.
template <class Traits>
struct WideGradients {
  using Element = typename Traits::Element;
  using DBias = typename Traits::DBias;
  BackwardParams const& params;
  int b, h, len_q;
  int i0, j0;  // of the warp's tile
  int lane;
  FragmentA<Element> factors[4];
  float delta[8][2];

  NVRTC_ATTN_DEVICE WideGradients(BackwardParams const& params_, int b_, int h_, int len_q_, int i0_, int j0_,
                                  int lane_)
      : params(params_), b(b_), h(h_), len_q(len_q_), i0(i0_), j0(j0_), lane(lane_) {}

  // What group 0 has left for this thread. Read while dP is on its way: in the loop below, where every read waits for the one
  // before it, it took 900 of a tile's 4300 cycles (H200, 2026-11-21, D 256).
  NVRTC_ATTN_DEVICE void read_factors(unsigned factor) {
#pragma unroll
    for (int step = 0; step < 4; ++step) factors[step] = get_fragment<Element>(factor, step);
  }
  NVRTC_ATTN_DEVICE void read_delta(unsigned row_delta) {
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      float2 const both = load_shared_float2(row_delta + 32 * m + 8 * (lane & 3));
      delta[m][0] = both.x;
      delta[m][1] = both.y;
    }
  }

  // kMasked: a factor may be zero where dP is anything.
  template <bool kMasked, int kTilesM>
  NVRTC_ATTN_DEVICE void apply(AccTile (&dp)[1][kTilesM]) const {
#pragma unroll
    for (int step = 0; step < kTilesM / 2; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const m = 2 * step + half;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float2 const both = unpack_pair_here<Element>(factors[step].x[2 * half + r]);
          float const weight[2] = {both.x, both.y};
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = dp[0][m][2 * r + e];
            float ds = weight[e] * (x - delta[m][e]);
            if constexpr (Traits::kDropout) {
              bool const dropped = __float_as_int(weight[e]) < 0;
              ds = weight[e] * (dropped ? delta[m][e] : fmaf(x, params.dropout_multiplier, -delta[m][e]));
            }
            x = masked_gradient(ds, !kMasked || weight[e] != 0.0f);
          }
        }
        if constexpr (Traits::kDbiasStore) store_dbias(dp[0][m], i0 + 8 * m);
      }
    }
  }

 private:
  // One tile of 16 keys and 8 queries from i on.
  NVRTC_ATTN_DEVICE void store_dbias(AccTile const& value, int i) const {
    int const g = lane >> 2;
    int const t = lane & 3;
    ScoreTensor<DBias> const dbias(reinterpret_cast<DBias*>(params.dbias), b, h, params.dbias_stride_b,
                                   params.dbias_stride_h, params.dbias_stride_m, params.dbias_stride_n);
    if constexpr (sizeof(DBias) == 2) {
      // After the registers' own transpose a thread has two neighbouring keys of one query.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t word;
        cute::SM75_U32x1_MOVM_T::copy(pack2<DBias>(value[2 * half], value[2 * half + 1]), word);
        int const key = j0 + 2 * t + 8 * half;
        if (i + g >= len_q) continue;
        DBias* to = dbias.at(i + g, key);
        if (dbias.pairs && key + 1 < params.seqlen_k) {
          *reinterpret_cast<uint32_t*>(to) = word;
        } else {
          ElementPair<DBias> const pair = *reinterpret_cast<ElementPair<DBias> const*>(&word);
          if (key < params.seqlen_k) to[0] = pair.x;
          if (key + 1 < params.seqlen_k) to[dbias.stride_n] = pair.y;
        }
      }
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const query = i + 2 * t + (e & 1);
        int const key = j0 + g + 8 * (e >> 1);
        if (query < len_q && key < params.seqlen_k) *dbias.at(query, key) = from_float<DBias>(value[e]);
      }
    }
  }
};

}  // namespace nvrtc_attn
