// Raw products q.k -> scores, shared by forward and backward: scale, softcap, bias, position mask and byte mask.
//
// Two modes, chosen at compile time by kMapsScores<Traits>:
// * folded (no softcap, no bias, positive scale): the accumulator stays s = q.k and the scale rides in the exponent,
//   P = exp2(s * exponent_scale - m * exponent_scale) with exponent_scale = scale * log2(e): one FFMA a score.
// * mapped: the accumulator becomes s = softcap(scale * q.k) + bias in natural units and exponent_scale = log2(e). Such
//   scores are subtracted before they are scaled, P = exp2((s - m) * log2(e)): a row of finite but huge negative bias
//   (finfo.min, the common way to write a mask) must not overflow to -inf, it is an ordinary softmax.
// Masked scores are replaced by -inf, never added to, so that NaN and inf in masked keys do not survive.
#pragma once
#include "../common/numbers.cuh"
#include "bias.cuh"
#include "mask.cuh"

namespace nvrtc_attn {

// tanh with float32 accuracy for float32 inputs and with absolute error 2^-22 for 16-bit ones (two MUFU instructions).
// tanh.approx.f32 is not an option: its 5e-4 times a cap of 50 shifts scores by 0.025.
template <class Element>
NVRTC_ATTN_DEVICE float tanh_of(float x) {
  if constexpr (sizeof(Element) == 4) {
    return tanhf(x);
  } else {
    return 1.0f - __fdividef(2.0f, fast_exp2(x * (2.0f * kLog2e)) + 1.0f);  // exp2 = inf gives 1, 0 gives -1
  }
}

// Folded scores whose reference in base 2 exceeds this have the row maximum subtracted before they are scaled. The
// rounding error of a larger reference, a factor that the tiles of a row need not share, would exceed 2^-12 in the
// exponent; at 2^24 it is a factor of 2 and from 2^31 on an overflow. Scores get there with float16 inputs near 100,
// and are rare enough for a branch.
constexpr float kLargeReference = 0x1p13f;

template <class Traits>
constexpr bool kMapsScores = Traits::kSoftcap || Traits::kHasBias || Traits::kPrescale;

template <class Traits>
struct ScoreMap {
  static constexpr bool kMapped = kMapsScores<Traits>;
  float scale;  // mapped: what a raw product is multiplied by (with softcap: scale / softcap)
  float softcap;
  float exponent_scale;  // what P's exponent multiplies scores by: base 2

  template <class Params>
  NVRTC_ATTN_DEVICE explicit ScoreMap(Params const& params)
      : scale(params.scale), softcap(params.softcap), exponent_scale(kMapped ? kLog2e : params.scale * kLog2e) {
    // Finite, or a product of zero would be NaN with a cap that small.
    if constexpr (Traits::kSoftcap) scale = fminf(fmaxf(params.scale / params.softcap, -kLargest), kLargest);
  }

  // One raw product -> score before bias. `tanh_value` is tanh(scale * s / softcap), whose 1 - tanh^2 the backward needs.
  NVRTC_ATTN_DEVICE float map(float s, float& tanh_value) const {
    if constexpr (Traits::kSoftcap) {
      tanh_value = tanh_of<typename Traits::Element>(s * scale);
      return softcap * tanh_value;
    } else {
      tanh_value = 0.0f;
      return kMapped ? s * scale : s;
    }
  }
  NVRTC_ATTN_DEVICE float map(float s) const {
    float unused;
    return map(s, unused);
  }

  // P's exponent for a score and a reference (row maximum, or LSE in natural units divided by the unit of scores).
  // `reference` is reference(m): computed once a row.
  NVRTC_ATTN_DEVICE float reference(float m) const { return kMapped ? m : m * exponent_scale; }
  NVRTC_ATTN_DEVICE float probability(float s, float reference) const {
    if constexpr (kMapped) return fast_exp2((s - reference) * exponent_scale);
    return fast_exp2(fmaf(s, exponent_scale, -reference));
  }
  // P(a) / P(b) of two scores, b finite: exact where products with the scale are too large to be told apart.
  NVRTC_ATTN_DEVICE float ratio(float a, float b) const { return fast_exp2((a - b) * exponent_scale); }
  // LSE (natural units) of a row with a key: `m` is the maximum that P is relative to, `sum` that of P.
  NVRTC_ATTN_DEVICE float lse(float m, float sum) const { return m * (exponent_scale * kLn2) + logf(sum); }
  // The same reference from an LSE (natural units). P of rows without keys, or whose P cannot be made again, is 0.
  NVRTC_ATTN_DEVICE float reference_of_lse(float lse) const {
    float const usable = has_probabilities(lse) ? lse : infinity();
    return kMapped ? usable : usable * kLog2e;
  }
};

// Map the four raw products of one accumulator tile (no bias, no mask).
template <class Traits>
NVRTC_ATTN_DEVICE void map_scores(AccTile& c, ScoreMap<Traits> const& map) {
  if constexpr (ScoreMap<Traits>::kMapped) {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[e] = map.map(c[e]);
  }
}

// Add the bias: the tile's rows are i and i + 8, its columns j and j + 1 (j even).
template <class Bias>
NVRTC_ATTN_DEVICE void add_bias(AccTile& c, ScoreTensor<Bias const> const& bias, int i, int j, int len_q, int len_k) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float2 const b = load_score_pair(bias, i + 8 * r, j, len_q, len_k);
    c[2 * r] += b.x;
    c[2 * r + 1] += b.y;
  }
}

// -inf for what the position mask drops.
template <bool kBand>
NVRTC_ATTN_DEVICE void apply_position_mask(AccTile& c, PositionMask<kBand> const& mask, int i, int j) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (!mask.keeps(i + 8 * (e >> 1), j + (e & 1))) c[e] = -infinity();
  }
}

// -inf for what the byte mask drops.
NVRTC_ATTN_DEVICE void apply_byte_mask(AccTile& c, ScoreTensor<unsigned char const> const& mask, int i, int j,
                                       int len_q, int len_k) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    unsigned const keep = load_mask_pair(mask, i + 8 * r, j, len_q, len_k);
    if (!(keep & 1)) c[2 * r] = -infinity();
    if (!(keep & 2)) c[2 * r + 1] = -infinity();
  }
}

}  // namespace nvrtc_attn
