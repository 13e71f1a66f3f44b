// Words of shared memory by their address, for what has no register left.
#pragma once
#include "../../compat.cuh"

namespace nvrtc_attn {

NVRTC_ATTN_DEVICE float read_word(unsigned address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}
NVRTC_ATTN_DEVICE int2 read_pair(unsigned address) {
  int2 x;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address));
  return x;
}
NVRTC_ATTN_DEVICE void write_word(unsigned address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x));
}
NVRTC_ATTN_DEVICE void write_pair(unsigned address, int x, int y) {
  asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y));
}
// The larger of what is there and x, in one step: it is there afterwards, and is the result.
NVRTC_ATTN_DEVICE int raise_shared(unsigned address, int x) {
  int before;
  asm volatile("atom.shared.max.s32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(x));
  return max(before, x);
}

}  // namespace nvrtc_attn
