// Two packed 16-bit values as floats.
#pragma once
#include "../../common/mma.cuh"

namespace nvrtc_attn {

template <class Element>
NVRTC_ATTN_DEVICE float2 unpack_pair(uint32_t both);
template <>
NVRTC_ATTN_DEVICE float2 unpack_pair<half_t>(uint32_t both) {
  return __half22float2(*reinterpret_cast<__half2 const*>(&both));
}
template <>
NVRTC_ATTN_DEVICE float2 unpack_pair<bfloat16_t>(uint32_t both) {
  return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
}

// The same where it stands (volatile), for values that stay packed until they are used: not before a wait or a loop in
// front of it, or the floats would take registers meanwhile.
template <class Element>
NVRTC_ATTN_DEVICE float2 unpack_pair_here(uint32_t both) {
  float2 result;
  if constexpr (cute::is_same_v<Element, half_t>) {
    asm volatile(
        "{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(result.x), "=f"(result.y)
        : "r"(both));
  } else {
    asm volatile("shl.b32 %0, %1, 16;" : "=f"(result.x) : "r"(both));
    asm volatile("and.b32 %0, %1, 0xffff0000;" : "=f"(result.y) : "r"(both));
  }
  return result;
}

}  // namespace nvrtc_attn
