// What the Hopper backward kernels read of a query row beside its operands: delta, and the reference of P's exponent.
#pragma once
#include "../../common/numbers.cuh"
#include "../../params.cuh"

namespace nvrtc_attn {

// What the forward pass and the caller say of a row.
struct RowReference {
  float lse;   // infinite: no key, or padding (`is_row` false)
  float dlse;  // gradient that arrives through lse
};

NVRTC_ATTN_DEVICE RowReference load_row_reference(HopperBackwardParams const& params, bool is_row, int h, index_t batch,
                                                  index_t row) {
  RowReference reference = {infinity(), 0.0f};
  if (is_row) {
    if (params.dlse != nullptr) {
      reference.dlse =
          params.dlse[batch * params.dlse_stride_b + index_t(h) * params.dlse_stride_h + row * params.dlse_stride_m];
    }
    reference.lse =
        params.lse[batch * params.lse_stride_b + index_t(h) * params.lse_stride_h + row * params.lse_stride_m];
  }
  return reference;
}

// `sum` is rowsum(dO * O) of row `row` of the workspace. A row whose P cannot be made again gets an infinite reference.
template <class Traits>
NVRTC_ATTN_DEVICE void store_row_statistics(HopperBackwardParams const& params, float sum, RowReference const& row_of,
                                            index_t row) {
  sum -= row_of.dlse;
  // Otherwise P = 0 and there is no gradient, whatever arrives through lse: 0 times NaN must not.
  bool const has_p = has_probabilities(row_of.lse);
  float reference = Traits::kLog2Lse ? row_of.lse * kLog2e : row_of.lse;
  if constexpr (Traits::kKeepWords) {
    // P times dropout's multiplier, and so P * delta unchanged. Where nothing is kept there is none.
    float const multiplier = params.dropout_multiplier == 0.0f ? 1.0f : params.dropout_multiplier;
    reference -= Traits::kLog2Lse ? log2f(multiplier) : logf(multiplier);
    sum /= multiplier;
  }
  params.delta[row] = has_p ? sum : 0.0f;
  params.row_lse[row] = has_p ? reference : infinity();
}

}  // namespace nvrtc_attn
