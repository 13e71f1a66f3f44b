// Attention sinks: one more logit in every row of a query head. It takes probability and has no value, so it only joins the
// row's sum, once, behind the last key tile (with split keys in `combine`): P_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(sink)).
#pragma once
#include "../common/numbers.cuh"
#include "../params.cuh"

namespace nvrtc_attn {

template <class Traits>
struct ScoreMap;  // scores.cuh

// The params of a kernel with a sink, which its entry has passed on as those of its pass.
template <class Traits, class Params>
NVRTC_ATTN_DEVICE auto const& with_sink(Params const& params) {
  if constexpr (Traits::kTileWords) {
    return static_cast<WithSink<WithTileWords<Params>> const&>(params);
  } else {
    return static_cast<WithSink<Params> const&>(params);
  }
}
template <class Traits>
NVRTC_ATTN_DEVICE FurtherBackwardParams const& with_sink(BackwardParams const& params) {
  return static_cast<FurtherBackwardParams const&>(params);
}

// The sink of query head h, in natural units; 0 where the kernel has none.
template <class Traits, class Params>
NVRTC_ATTN_DEVICE float load_sink(Params const& params, int h) {
  if constexpr (Traits::kHasSink) {
    auto const& with = with_sink<Traits>(params);
    index_t const at = index_t(h) * with.sink_stride_h;
    if (with.sink_float32) return reinterpret_cast<float const*>(with.sink)[at];
    return to_float(reinterpret_cast<typename Traits::Element const*>(with.sink)[at]);
  }
  return 0.0f;
}

// The end of a row: what its sums are multiplied by to be relative to `top` (natural units), and the sum of its
// exponentials, then, the sink's with them. Zero: a row of no key, without a sink or with one of -inf.
struct RowEnd {
  float top, weight, sum;
};

// `row_max` (in the unit of scores) and `sum` are those of the keys. The larger of both is the new reference, so nothing
// overflows. A NaN, of a score or of the sink, stays one.
template <class Traits>
NVRTC_ATTN_DEVICE RowEnd take_sink(float row_max, float sum, float sink, ScoreMap<Traits> const& map) {
  float const top = row_max * (map.exponent_scale * kLn2);
  float smaller = fast_exp2(-fabsf(sink - top) * kLog2e);  // of both exponentials, relative to the larger
  if (sink == -infinity()) smaller = 0.0f;                 // so may top be
  return sink > top ? RowEnd{sink, smaller, sum * smaller + 1.0f} : RowEnd{top, 1.0f, sum + smaller};
}

}  // namespace nvrtc_attn
