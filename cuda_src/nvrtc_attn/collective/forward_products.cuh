// The two matrix products of the portable forward kernel, Q K^T and P V, and the probabilities between them.
#pragma once
#include "dropout.cuh"
#include "forward_operands.cuh"
#include "packed_heads.cuh"
#include "softmax.cuh"

namespace nvrtc_attn {

template <class Shape, int kCols>
NVRTC_ATTN_DEVICE void clear(AccTile (&c)[Shape::kTilesM][kCols]) {
#pragma unroll
  for (int m = 0; m < Shape::kTilesM; ++m) {
#pragma unroll
    for (int n = 0; n < kCols; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c[m][n][e] = 0.0f;
    }
  }
}

// c[.][col], c[.][col + 1] += a * b.
template <class Shape, int kCols>
NVRTC_ATTN_DEVICE void multiply_pair(AccTile (&c)[Shape::kTilesM][kCols], int col,
                                     FragmentA<typename Shape::Element> const (&a)[Shape::kTilesM],
                                     FragmentB<typename Shape::Element> const (&b)[2]) {
  using Element = typename Shape::Element;
  constexpr bool kLegacy = Shape::kLegacy;
#pragma unroll
  for (int m = 0; m < Shape::kTilesM; ++m) {
    mma_term<Element, kLegacy, 0>(c[m][col], a[m], b[0]);
    mma_term<Element, kLegacy, 0>(c[m][col + 1], a[m], b[1]);
  }
  if constexpr (kTerms<Element, kLegacy> == 3) {
#pragma unroll
    for (int m = 0; m < Shape::kTilesM; ++m) {
      mma_term<Element, kLegacy, 1>(c[m][col], a[m], b[0]);
      mma_term<Element, kLegacy, 1>(c[m][col + 1], a[m], b[1]);
    }
#pragma unroll
    for (int m = 0; m < Shape::kTilesM; ++m) {
      mma_term<Element, kLegacy, 2>(c[m][col], a[m], b[0]);
      mma_term<Element, kLegacy, 2>(c[m][col + 1], a[m], b[1]);
    }
  }
}

// s += Q K^T over the k-steps [kFirst, kLast). Fragments of the next pair of key columns are read while the current pair
// multiplies.
template <class Shape, int kFirst, int kLast, class Query>
NVRTC_ATTN_DEVICE void multiply_qk_steps(AccTile (&s)[Shape::kTilesM][Shape::kTilesN], Query const& query,
                                         KeyOperand<Shape> const& key, int stage_bytes) {
  using Element = typename Shape::Element;
  FragmentA<Element> a[Shape::kTilesM];
  FragmentB<Element> b[2][2];
  key.get(b[0], kFirst, 0, stage_bytes);
#pragma unroll
  for (int step = kFirst; step < kLast; ++step) {
    query.get(a, step);
#pragma unroll
    for (int pair = 0; pair < Shape::kPairsN; ++pair) {
      int const now = ((step - kFirst) * Shape::kPairsN + pair) & 1;
      if (pair + 1 < Shape::kPairsN) {
        key.get(b[now ^ 1], step, pair + 1, stage_bytes);
      } else if (step + 1 < kLast) {
        key.get(b[now ^ 1], step + 1, 0, stage_bytes);
      }
      multiply_pair<Shape>(s, 2 * pair, a, b[now]);
    }
  }
}

// s += Q K^T over the k-steps from kFirst on, in chains.
template <class Shape, int kFirst, class Query>
NVRTC_ATTN_DEVICE void add_qk_chains(AccTile (&s)[Shape::kTilesM][Shape::kTilesN], Query const& query,
                                     KeyOperand<Shape> const& key, int stage_bytes) {
  if constexpr (kFirst < Shape::kStepsQK) {
    constexpr int kLast = kFirst + kChainSteps < Shape::kStepsQK ? kFirst + kChainSteps : Shape::kStepsQK;
    AccTile chain[Shape::kTilesM][Shape::kTilesN];
    clear<Shape>(chain);
    multiply_qk_steps<Shape, kFirst, kLast>(chain, query, key, stage_bytes);
#pragma unroll
    for (int m = 0; m < Shape::kTilesM; ++m) {
#pragma unroll
      for (int n = 0; n < Shape::kTilesN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] += chain[m][n][e];
      }
    }
    add_qk_chains<Shape, kLast>(s, query, key, stage_bytes);
  }
}

// s = Q K^T for this warp's rows and keys.
template <class Shape, class Query>
NVRTC_ATTN_DEVICE void multiply_qk(AccTile (&s)[Shape::kTilesM][Shape::kTilesN], Query const& query,
                                   KeyOperand<Shape> const& key, int stage_bytes) {
  using Element = typename Shape::Element;
  clear<Shape>(s);
  if constexpr (sizeof(Element) == 4) {
    constexpr int kLast = kChainSteps < Shape::kStepsQK ? kChainSteps : Shape::kStepsQK;
    multiply_qk_steps<Shape, 0, kLast>(s, query, key, stage_bytes);
    add_qk_chains<Shape, kLast>(s, query, key, stage_bytes);
  } else if constexpr (Shape::kStepsQK > 0) {
    multiply_qk_steps<Shape, 0, Shape::kStepsQK>(s, query, key, stage_bytes);
  }
  if constexpr (Shape::kHalfStepQK) {
    FragmentA<Element> a[Shape::kTilesM];
    query.get(a, Shape::kStepsQK);
#pragma unroll
    for (int pair = 0; pair < Shape::kPairsN; ++pair) {
      FragmentB<Element> b[2];
      key.get_half_step(b, pair, stage_bytes);
#pragma unroll
      for (int m = 0; m < Shape::kTilesM; ++m) {
        mma_half_step<Element, Shape::kLegacy>(s[m][2 * pair], a[m], b[0]);
        mma_half_step<Element, Shape::kLegacy>(s[m][2 * pair + 1], a[m], b[1]);
      }
    }
  }
}

// Turns scores into probabilities, one pair of score tiles (16 keys) at a time.
template <class Traits, class Shape, class Softmax>
struct Probabilities {
  Softmax& softmax;
  ScoreMap<Traits> const& map;
  Dropout const& dropout;
  RowMap<Traits::kPackedHeads> const& row_map;
  int seqlen_q;     // which a head is apart from the next in the stream of dropout, in rows
  int i, n0, lane;  // row of this thread, first key of the warp's part of the tile
  float reference[Softmax::kRows];

  // s[m][2 * pair], s[m][2 * pair + 1] for all m: add to the row sums, then drop.
  NVRTC_ATTN_DEVICE void compute(AccTile (&s)[Shape::kTilesM][Shape::kTilesN], int pair) {
#pragma unroll
    for (int m = 0; m < Shape::kTilesM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unsigned keep = 0;
        if constexpr (Traits::kDropout) {
          int const row = i + 16 * m + 8 * r;
          keep = dropout.keep_bits(row_map.query(row) + row_map.head(row) * seqlen_q, n0 + 16 * pair, lane);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float& x = s[m][2 * pair + c / 2][2 * r + c % 2];
          float const p = map.probability(x, reference[2 * m + r]);
          softmax.row_sum[2 * m + r] += p;
          x = Traits::kDropout && !((keep >> c) & 1) ? 0.0f : p;  // the multiplier waits for the normalisation
        }
      }
    }
  }
};

// o += P V for 16-bit types: P one k-step at a time, so that exponentials and matrix products overlap.
template <class Shape, class P>
NVRTC_ATTN_DEVICE void multiply_pv(AccTile (&o)[Shape::kTilesM][Shape::kTilesD],
                                   AccTile (&s)[Shape::kTilesM][Shape::kTilesN], P& probabilities,
                                   ValueOperand<Shape> const& value, int stage_bytes) {
  using Element = typename Shape::Element;
#pragma unroll
  for (int step = 0; step < Shape::kPairsN; ++step) {
    FragmentA<Element> a[Shape::kTilesM];
    FragmentB<Element> b[2][2];
    probabilities.compute(s, step);
#pragma unroll
    for (int m = 0; m < Shape::kTilesM; ++m) a[m] = accumulator_as_a<Element>(s[m][2 * step], s[m][2 * step + 1]);
    if constexpr (Shape::kPairsD > 0) value.get_pair(b[0], step, 0, stage_bytes);
#pragma unroll
    for (int pair = 0; pair < Shape::kPairsD; ++pair) {
      int const now = pair & 1;
      if (pair + 1 < Shape::kPairsD) value.get_pair(b[now ^ 1], step, pair + 1, stage_bytes);
      multiply_pair<Shape>(o, 2 * pair, a, b[now]);
    }
    if constexpr (Shape::kTilesD % 2 != 0) {
      value.get_last(b[0][0], step, stage_bytes);
#pragma unroll
      for (int m = 0; m < Shape::kTilesM; ++m) mma<Element, Shape::kLegacy>(o[m][Shape::kTilesD - 1], a[m], b[0][0]);
    }
  }
}

// o += P V for float32: the keys of a tile are one chain per output tile, summed from zero in the tensor core.
template <class Shape, class P>
NVRTC_ATTN_DEVICE void multiply_pv_chains(AccTile (&o)[Shape::kTilesM][Shape::kTilesD],
                                          AccTile (&s)[Shape::kTilesM][Shape::kTilesN], P& probabilities,
                                          ValueOperand<Shape> const& value, int stage_bytes) {
  constexpr int kChain = Shape::kTilesN < kChainSteps ? Shape::kTilesN : kChainSteps;
#pragma unroll
  for (int first = 0; first < Shape::kTilesN; first += kChain) {
    FragmentA<float> a[kChain][Shape::kTilesM];
#pragma unroll
    for (int step = 0; step < kChain; ++step) {
      if (first + step >= Shape::kTilesN) break;
      if ((first + step) % 2 == 0) probabilities.compute(s, (first + step) / 2);
#pragma unroll
      for (int m = 0; m < Shape::kTilesM; ++m) a[step][m] = accumulator_as_a(s[m][first + step]);
    }
#pragma unroll
    for (int d = 0; d < Shape::kTilesD; d += 2) {
      AccTile chain[Shape::kTilesM][2];
      clear<Shape>(chain);
#pragma unroll
      for (int step = 0; step < kChain; ++step) {
        if (first + step >= Shape::kTilesN) break;
        FragmentB<float> b[2];
        value.get_permuted(b[0], first + step, d, stage_bytes);
        if (d + 1 < Shape::kTilesD) {
          value.get_permuted(b[1], first + step, d + 1, stage_bytes);
          multiply_pair<Shape>(chain, 0, a[step], b);
        } else {
          AccTile(&last)[Shape::kTilesM][2] = chain;
#pragma unroll
          for (int m = 0; m < Shape::kTilesM; ++m) {
            mma_term<float, Shape::kLegacy, 0>(last[m][0], a[step][m], b[0]);
            if constexpr (!Shape::kLegacy) {
              mma_term<float, Shape::kLegacy, 1>(last[m][0], a[step][m], b[0]);
              mma_term<float, Shape::kLegacy, 2>(last[m][0], a[step][m], b[0]);
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < Shape::kTilesM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          o[m][d][e] += chain[m][0][e];
          if (d + 1 < Shape::kTilesD) o[m][d + 1][e] += chain[m][1][e];
        }
      }
    }
  }
}

}  // namespace nvrtc_attn
