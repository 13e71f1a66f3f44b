// What the Hopper backward kernel does with a tile of scores and of its gradient, in registers. Tiles are transposed: rows
// are keys, a thread has keys j and j + 8 and queries 8 m + 2 t and the next.
#pragma once
#include "../../collective/mask.cuh"
#include "../../collective/scores.cuh"
#include "../../common/fragment_load.cuh"
#include "keep_words_transposed.cuh"
#include "score_tile_transposed.cuh"
#include "../common/unpack.cuh"
#include "../common/wgmma.cuh"

namespace nvrtc_attn {

// Masked scores and their gradient in registers, for problems without byte mask but one that is the same for all queries
// (kKeyMask), with a bias only as tiles: P is known before dP, so that its product can start before dP is there. With keep
// words P comes times dropout's multiplier, and delta divided by it (backward_hopper_prepare): dV takes P where it is kept,
// dS = P * kept dP - P * delta. Given: the caller's modifier, which is not asked where Traits, as ProductsBegun, have none.
template <class Traits, class Shape, class Given>
struct ScoreBlock {
  using Modifier = ModifierOf<Traits>;
  using Map = ScoreMap<Traits>;
  using Bias = TransposedBias<Traits>;
  static constexpr int kTilesM = Shape::kTilesM;
  // Whether the caller brings P's references of the first two tiles, read before S was there.
  static constexpr bool kAhead = Shape::kTransposedDq || (Traits::kVarlen && Shape::kPlainOrPacked && Traits::kBand &&
                                                          Shape::kBlockM == 128 && !Shape::kRelays);
  // Whether a hidden score has finite dP, so that dS is zero because P is. Elsewhere rows of V may be another sequence's, or
  // those of keys that nobody sees, and hold NaN; and a modifier's derivative may be anything there.
  static constexpr bool kFiniteHidden = !(Traits::kVarlen || Traits::kSequsedK || Traits::kMask || Given::kAny);
  // Whether one code for dS serves the tiles with hidden scores and those without, which is right where hidden scores have
  // finite dP: 2 to 3 % less time at 72 and 80 columns, whose K and V are in registers. Others are 0 to 2 % slower without the
  // branch, or spill 4 to 64 bytes (H200, 2026-11-30).
  static constexpr bool kZeroByP = kFiniteHidden && Traits::kKeysInRegisters && Traits::kHeadDim < 96;
  // Whether hidden keys are those behind the last one, for whose rows of K the copy engine writes zeros: all queries see
  // a thread's key or none does.
  static constexpr bool kHidesWholeKeys = kFiniteHidden && !Traits::kBand;
  using KeptScores = MaskBits<Modifier, 1, kTilesM>;
  using Along = Diagonals<Modifier, kTilesM>;
  Map const& map;
  PositionMask<Traits::kBand> const& mask;
  int j;  // this thread's first key; the other is j + 8
  int t;  // lane % 4
  Bias bias;

  // Where P's references of this thread's queries of a tile lie, and delta behind row_delta likewise.
  NVRTC_ATTN_DEVICE unsigned reference_of(int m, unsigned row_lse) const { return row_lse + 32 * m + 8 * t; }

  // Raw products -> P, as an operand too where that is wanted early.
  NVRTC_ATTN_DEVICE void probabilities(AccTile (&s)[1][kTilesM],
                                       FragmentA<typename Shape::Element> (&p)[Shape::kStepsM],
                                       float2 const (&ahead)[kAhead ? 2 : 1], unsigned row_lse, int m0, bool masked,
                                       unsigned bias_slab, unsigned hidden, Given const& modifier,
                                       KeptScores const& kept, Along const& along) const {
    // Before the mask, by whose keys the bias may be anything.
    if constexpr (Shape::kBiasTiles) bias.apply(s, bias_slab, map);
    if constexpr (kReadsDiagonals<Modifier>) {
      int const i0 = m0 + 2 * t;
      along.each([&](int m, int e, auto const& diagonal) {
        float& x = s[0][m][e];
        x = modifier.score(x * map.scale, i0 + 8 * m + (e & 1), j + 8 * (e >> 1), diagonal, i0, j);
      });
    } else if constexpr (Modifier::kScores) {
      int const i0 = m0 + 2 * t;
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[0][m][e] = modifier.score(s[0][m][e] * map.scale, i0 + 8 * m + (e & 1), j + 8 * (e >> 1), i0, j);
        }
      }
    }
    if constexpr (Modifier::kMasks) {
      if (masked) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[0][m][e] = masked_score(s[0][m][e], kept.kept(0, m, e));
        }
      }
    }
    if (kHidesWholeKeys && masked) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        bool const hides = j + 8 * r >= mask.len_k;
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) s[0][m][e] = hides ? -infinity() : s[0][m][e];
        }
      }
    } else if (masked) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Visible seen = mask.rows_of(j + 8 * r, m0 + 2 * t);
        if constexpr (Traits::kKeyMask) {
          if (hidden >> r & 1) seen.last = -1;
        }
        replace_hidden(s, r, -infinity(), seen);
      }
    }
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      float2 const lse = kAhead && m < 2 ? ahead[m & 1] : load_shared_float2(reference_of(m, row_lse));
      float const reference[2] = {lse.x, lse.y};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float y = s[0][m][e];
        if constexpr (!Shape::kBiasTiles && !Modifier::kScores) {
          y = map.score(s[0][m][e], 0.0f);
          // A masked score stays -inf, whatever the map makes of it.
          if constexpr (ScoreMap<Traits>::kMapped) y = masked_score(y, s[0][m][e] != -infinity());
        }
        s[0][m][e] = map.probability(y, reference[e & 1]);
        // Here, and not behind the wait for the product that runs meanwhile.
        if constexpr (!Shape::kEarlyDv) asm volatile("" : "+f"(s[0][m][e]));
      }
      if constexpr (Shape::kEarlyDv) {
        p[m / 2].x[m % 2 * 2] = pack2<typename Shape::Element>(s[0][m][0], s[0][m][1]);
        p[m / 2].x[m % 2 * 2 + 1] = pack2<typename Shape::Element>(s[0][m][2], s[0][m][3]);
      }
    }
  }

  // Where dV is started early, dS takes P from a copy of its 16 bits if there are no registers for all of it in float32:
  // those that a product in flight reads must be left alone.
  static constexpr bool kPacked = Shape::kEarlyDv && (kTilesM > 8 || Traits::kKeepWords);
  struct KeptP {
    uint32_t x[kPacked ? kTilesM : 1][2];
  };
  NVRTC_ATTN_DEVICE void keep(KeptP& kept, FragmentA<typename Shape::Element> const (&p)[Shape::kStepsM]) const {
    if constexpr (kPacked) {
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
          asm volatile("mov.b32 %0, %1;" : "=r"(kept.x[m][r]) : "r"(p[m / 2].x[m % 2 * 2 + r]));
      }
    }
  }

  // p becomes what dV takes, without what dropout drops; the other keeps it, negative.
  NVRTC_ATTN_DEVICE void keep(KeptP& kept, FragmentA<typename Shape::Element> (&p)[Shape::kStepsM],
                              TransposedKeepWords const& words) const {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        words.template mark<typename Shape::Element, kTilesM>(kept.x[m][r], p[m / 2].x[m % 2 * 2 + r], m, r);
    }
  }

  // P, dP -> dS in place of dP.
  template <bool kMasked>
  NVRTC_ATTN_DEVICE void gradients(AccTile (&s)[1][kTilesM], KeptP const& kept, AccTile (&dp)[1][kTilesM],
                                   unsigned row_delta, int m0, Given const& modifier,
                                   CapturedGradients<Modifier>& captured) const {
    float slope = 1.0f;
    if constexpr (Modifier::kScores && !Modifier::kUnitSlope) slope = modifier.head_slope();
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      if constexpr (kPacked) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float2 const both = unpack_pair_here<typename Shape::Element>(kept.x[m][r]);
          s[0][m][2 * r] = both.x;
          s[0][m][2 * r + 1] = both.y;
        }
      }
      float2 const both_delta = load_shared_float2(reference_of(m, row_delta));
      float const delta[2] = {both_delta.x, both_delta.y};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float ds;
        if constexpr (Traits::kKeepWords) {
          ds = fmaf(fmaxf(s[0][m][e], 0.0f), dp[0][m][e], -(fabsf(s[0][m][e]) * delta[e & 1]));
        } else {
          ds = s[0][m][e] * (dp[0][m][e] - delta[e & 1]);
        }
        if constexpr (Modifier::kTrainsPlainly) {
          int const i0 = m0 + 2 * t;
          ds = masked_gradient(ds, !kMasked || s[0][m][e] != 0.0f);
          modifier.add_plainly(captured, ds, i0 + 8 * m + (e & 1), j + 8 * (e >> 1), i0, j);
        }
        if constexpr (Modifier::kScores && !Modifier::kUnitSlope) ds *= slope;
        if constexpr (kHidesWholeKeys) {
          dp[0][m][e] = masked_gradient(ds, !kMasked || j + 8 * (e >> 1) < mask.len_k);
        } else {
          dp[0][m][e] = masked_gradient(ds, !kMasked || s[0][m][e] != 0.0f);
        }
      }
    }
  }
};

template <class Element, int kTiles>
NVRTC_ATTN_DEVICE void pack_fragments(FragmentA<Element> (&a)[kTiles / 2], AccTile const (&c)[1][kTiles]) {
#pragma unroll
  for (int step = 0; step < kTiles / 2; ++step) a[step] = accumulator_as_a<Element>(c[0][2 * step], c[0][2 * step + 1]);
}

}  // namespace nvrtc_attn
