// Which key tiles a split has, where several thread blocks share those of a query tile: in both families.
#pragma once
#include "mask.cuh"

namespace nvrtc_attn {

// Key tiles [first, last) -> those of one of `num_splits` shares; the last shares may have fewer tiles, or none.
NVRTC_ATTN_DEVICE void take_share(int& first, int& last, int split, int num_splits) {
  int const share = ceil_div(max(last - first, 0), num_splits);
  first += split * share;
  last = min(last, first + share);
}

}  // namespace nvrtc_attn
