// What the Hopper backward kernels read of a query row beside its operands: delta, and the reference of P's exponent.
#pragma once
#include "../common/numbers.cuh"
#include "../params.cuh"

namespace nvrtc_attn {

// `sum` is rowsum(dO * O) of row `row` of a tile whose workspace begins at `workspace` and whose rows of lse and dlse begin at
// `lse_row`. Rows without a key, and padding (`is_row` false), get an infinite reference: their P is zero.
template <class Traits>
NVRTC_ATTN_DEVICE void store_row_statistics(HopperBackwardParams const& params, float sum, bool is_row, int row, int h,
                                            index_t lse_batch, index_t lse_row, index_t workspace) {
  float lse = infinity();
  if (is_row) {
    if (params.dlse != nullptr) {
      sum -= params.dlse[lse_batch * params.dlse_stride_b + index_t(h) * params.dlse_stride_h +
                         (lse_row + row) * params.dlse_stride_m];
    }
    lse = params.lse[lse_batch * params.lse_stride_b + index_t(h) * params.lse_stride_h +
                     (lse_row + row) * params.lse_stride_m];
  }
  bool const has_key = fabsf(lse) != infinity();
  // A row without a key has P = 0 and no gradient, whatever arrives through its lse: 0 times NaN must not.
  float reference = Traits::kLog2Lse ? lse * kLog2e : lse;
  if constexpr (Traits::kKeepWords) {
    // P times dropout's multiplier, and so P * delta unchanged. Where nothing is kept there is none.
    float const multiplier = params.dropout_multiplier == 0.0f ? 1.0f : params.dropout_multiplier;
    reference -= Traits::kLog2Lse ? log2f(multiplier) : logf(multiplier);
    sum /= multiplier;
  }
  params.delta[workspace + row] = has_key ? sum : 0.0f;
  params.row_lse[workspace + row] = has_key ? reference : infinity();
}

}  // namespace nvrtc_attn
