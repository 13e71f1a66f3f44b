// The four threads that hold a row of an accumulator tile trade words: 16 contiguous bytes for each instead of four pieces.
#pragma once
#include "../compat.cuh"

namespace nvrtc_attn {

// Thread t of a quad gives word k to thread k and receives its own from all four, in order: a 4 x 4 transpose.
NVRTC_ATTN_DEVICE uint4 transpose_quad(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3, int t) {
  bool const odd = t & 1;
  bool const upper = t & 2;
  // Neighbours: an even thread keeps words 0 and 2, an odd one 1 and 3.
  uint32_t const got0 = __shfl_xor_sync(0xffffffffu, odd ? w0 : w1, 1);
  uint32_t const got1 = __shfl_xor_sync(0xffffffffu, odd ? w2 : w3, 1);
  uint32_t const a0 = odd ? got0 : w0, a1 = odd ? w1 : got0;  // the lower half's word of the pair's two threads
  uint32_t const b0 = odd ? got1 : w2, b1 = odd ? w3 : got1;
  uint32_t const far0 = __shfl_xor_sync(0xffffffffu, upper ? a0 : b0, 2);
  uint32_t const far1 = __shfl_xor_sync(0xffffffffu, upper ? a1 : b1, 2);
  return upper ? make_uint4(far0, far1, b0, b1) : make_uint4(a0, a1, far0, far1);
}

}  // namespace nvrtc_attn
