// Raw products q.k -> scores -> probabilities: the one place for scale, softcap and its derivative, bias and byte mask,
// for both kernel families, forward and backward, scores by rows and transposed ones. Position masks are mask.cuh's.
//
// Two modes, chosen at compile time by kMapsScores<Traits>:
// * folded (no softcap, no bias, positive scale): the accumulator stays s = q.k and the scale rides in the exponent,
//   P = exp2(s * exponent_scale - m * exponent_scale) with exponent_scale = scale * log2(e): one FFMA a score.
// * mapped: the accumulator becomes s = softcap(scale * q.k) + bias in natural units and exponent_scale = log2(e), with
//   the user's score_mod, if there is one, in the place of the softcap. Such
//   scores are subtracted before they are scaled, P = exp2((s - m) * log2(e)): a row of finite but huge negative bias
//   (finfo.min, the common way to write a mask) must not overflow to -inf, it is an ordinary softmax.
// Masked scores are replaced by -inf, never added to, so that NaN and inf in masked keys do not survive.
#pragma once
#include "../common/numbers.cuh"
#include "bias.cuh"
#include "mask.cuh"
#include "modifier.cuh"

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
constexpr bool kMapsScores = Traits::kSoftcap || Traits::kHasBias || Traits::kPrescale || ModifierOf<Traits>::kScores;

// The scores of a modifier taken as products are, one operation less: by the Hopper forward kernel (that alone has kLazyMax),
// which looks for large references anyway, and by the backward one where lse comes times log2(e).
template <class Traits, class = void>
constexpr bool kLooksForLarge = false;
template <class Traits>
constexpr bool kLooksForLarge<Traits, cute::void_t<decltype(Traits::kLazyMax)>> = !Traits::kHasBias;
template <class Traits, class = void>
constexpr bool kReadsLog2Lse = false;
template <class Traits>
constexpr bool kReadsLog2Lse<Traits, cute::void_t<decltype(Traits::kLog2Lse)>> = Traits::kLog2Lse;
template <class Traits>
constexpr bool kFoldsModified = ModifierOf<Traits>::kScores && (kLooksForLarge<Traits> || kReadsLog2Lse<Traits>);

template <class Traits>
struct ScoreMap {
  static constexpr bool kMapped = kMapsScores<Traits>;
  static constexpr bool kSubtracts = kMapped && !kFoldsModified<Traits>;  // before it scales
  float scale;  // mapped: what a raw product is multiplied by (with softcap: scale / softcap)
  float softcap;
  float exponent_scale;  // what P's exponent multiplies scores by: base 2

  template <class Params>
  NVRTC_ATTN_DEVICE explicit ScoreMap(Params const& params)
      : scale(params.scale), softcap(params.softcap), exponent_scale(kMapped ? kLog2e : params.scale * kLog2e) {
    // Finite, or a product of zero would be NaN with a cap that small.
    if constexpr (Traits::kSoftcap) scale = fminf(fmaxf(params.scale / params.softcap, -kLargest), kLargest);
  }

  // One raw product and its bias -> score. `tanh_value` is what slope() wants to know.
  NVRTC_ATTN_DEVICE float score(float s, float bias, float& tanh_value) const {
    float y = kMapped ? s * scale : s;
    tanh_value = 0.0f;
    if constexpr (Traits::kSoftcap) {
      tanh_value = tanh_of<typename Traits::Element>(y);
      y = softcap * tanh_value;
    }
    if constexpr (Traits::kHasBias) y += bias;
    return y;
  }
  NVRTC_ATTN_DEVICE float score(float s, float bias) const {
    float unused;
    return score(s, bias, unused);
  }

  // The same where a modifier takes the place of the softcap, and its derivative for the backward pass. (i0, j0): where the
  // tile begins, from which the compiler knows the distance.
  NVRTC_ATTN_DEVICE float modified(ModifierOf<Traits> const& modifier, float s, float bias, int i, int j, int i0,
                                   int j0) const {
    float y = s;
    if constexpr (kMapped) y = s * scale;
    if constexpr (ModifierOf<Traits>::kScores) y = modifier.score(y, i, j, i0, j0);
    if constexpr (Traits::kHasBias) y += bias;
    return y;
  }
  NVRTC_ATTN_DEVICE float modified(ModifierOf<Traits> const& modifier, float s, float bias, int i, int j, int i0,
                                   int j0, float& slope) const {
    float y = s;
    slope = 1.0f;
    if constexpr (kMapped) y = s * scale;
    if constexpr (ModifierOf<Traits>::kScores) y = modifier.score(y, i, j, slope, i0, j0);
    if constexpr (Traits::kHasBias) y += bias;
    return y;
  }

  // A bias that is read after the modifier.
  static NVRTC_ATTN_DEVICE float biased(float y, float bias) { return y + bias; }

  // The derivative of the score with respect to scale * q.k: of the softcap, 1 - tanh^2.
  static NVRTC_ATTN_DEVICE float slope(float tanh_value) {
    return Traits::kSoftcap ? 1.0f - tanh_value * tanh_value : 1.0f;
  }

  // P's exponent for a score and a reference (row maximum, or LSE in natural units divided by the unit of scores).
  // `reference` is reference(m): computed once a row.
  NVRTC_ATTN_DEVICE float reference(float m) const { return kSubtracts ? m : m * exponent_scale; }
  NVRTC_ATTN_DEVICE float probability(float s, float reference) const {
    if constexpr (kSubtracts) return fast_exp2((s - reference) * exponent_scale);
    return fast_exp2(fmaf(s, exponent_scale, -reference));
  }
  // P(a) / P(b) of two scores, b finite: exact where products with the scale are too large to be told apart.
  NVRTC_ATTN_DEVICE float ratio(float a, float b) const { return fast_exp2((a - b) * exponent_scale); }
  // LSE (natural units) of a row with a key: `m` is the maximum that P is relative to, `sum` that of P.
  NVRTC_ATTN_DEVICE float lse(float m, float sum) const { return m * (exponent_scale * kLn2) + logf(sum); }
  // The same reference from an LSE (natural units). P of rows without keys, or whose P cannot be made again, is 0;
  // kUsable: their LSE is infinity() already.
  template <bool kUsable = false>
  static NVRTC_ATTN_DEVICE float reference_of_lse(float lse) {
    float const usable = kUsable || has_probabilities(lse) ? lse : infinity();
    return kSubtracts ? usable : usable * kLog2e;
  }
};

// A score that a mask drops becomes -inf, whatever it was; never by adding to it, which a NaN would survive.
NVRTC_ATTN_DEVICE float masked_score(float score, bool kept) { return kept ? score : -infinity(); }

// Likewise P and the gradient of such a score become zero: dP of it, which they multiply, may be NaN.
NVRTC_ATTN_DEVICE float masked_gradient(float ds, bool kept) { return kept ? ds : 0.0f; }

// One raw product -> score, of what bias and byte mask hold for it, where the kernel has them.
template <class Traits, class Bias, class Byte>
NVRTC_ATTN_DEVICE float finish_score(ScoreMap<Traits> const& map, float s, Bias const& bias, Byte const& byte) {
  float y = s;
  if constexpr (Traits::kHasBias) {
    y = map.score(s, to_float(bias));
  } else {
    y = map.score(s, 0.0f);
  }
  if constexpr (Traits::kMask) y = masked_score(y, byte != 0);
  return y;
}

// The same of a score that a modifier has made already.
template <class Traits, class Bias, class Byte>
NVRTC_ATTN_DEVICE float finish_modified(float y, Bias const& bias, Byte const& byte) {
  if constexpr (Traits::kHasBias) y += to_float(bias);
  if constexpr (Traits::kMask) y = masked_score(y, byte != 0);
  return y;
}

// The same with a modifier, for the score of row i and key j of the tile from (i0, j0) on, which its mask keeps or not.
// Softcap comes with a mask_mod alone.
template <class Traits, class Bias, class Byte>
NVRTC_ATTN_DEVICE float finish_score(ScoreMap<Traits> const& map, ModifierOf<Traits> const& modifier, float s,
                                     Bias const& bias, Byte const& byte, int i, int j, int i0, int j0, bool kept) {
  float y = s;
  if constexpr (ModifierOf<Traits>::kScores) {
    float x = 0.0f;
    if constexpr (Traits::kHasBias) x = to_float(bias);
    y = map.modified(modifier, s, x, i, j, i0, j0);
    if constexpr (Traits::kMask) y = masked_score(y, byte != 0);
  } else {
    y = finish_score(map, s, bias, byte);
  }
  if constexpr (ModifierOf<Traits>::kMasks) y = masked_score(y, kept);
  return y;
}

}  // namespace nvrtc_attn
