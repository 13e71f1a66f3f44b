// Keys that a mask hides from every query of a thread block: a padding mask, [B, 1, 1, Mk], or one of a single query.
//
// Their scores are dropped by selection, but products go on with whole tiles: 0 * NaN of a hidden row of V would be an
// output, of a hidden row of K part of dQ. So such rows become zero in shared memory. Rows that only some queries do
// not see cannot.
#pragma once
#include "../params.cuh"

namespace nvrtc_attn {

struct HiddenKeys {
  unsigned char const* keep;  // of key 0
  index_t stride;
  bool any;  // whether the mask is one for all queries, the same in all threads

  // Of `heads` query heads from h on.
  template <class Params>
  NVRTC_ATTN_DEVICE HiddenKeys(Params const& params, int b, int h, int heads)
      : keep(params.mask + index_t(b) * params.mask_stride_b + index_t(h) * params.mask_stride_h),
        stride(params.mask_stride_n),
        any(params.mask_stride_m == 0 && (heads == 1 || params.mask_stride_h == 0)) {}

  NVRTC_ATTN_DEVICE bool operator()(int j) const { return keep[index_t(j) * stride] == 0; }
};

}  // namespace nvrtc_attn
