// Conversions between element types and float32, and the few constants and functions of a score. Nothing of CuTe: kernels
// that only move and convert compile in 0.1 s instead of 0.6.
#pragma once
#include "../compat.cuh"

namespace nvrtc_attn {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLargest = 3.40282347e38f;  // of finite float32

NVRTC_ATTN_DEVICE float infinity() { return __uint_as_float(0x7f800000u); }

// Whether the backward pass can make P of this LSE again. Not of -inf, a row without a key, or +inf, padding; nor from
// 2^22 on, where what float32 rounds off it is a factor of P up to 2, then more than any P: such a row has no gradient
// instead of one that may be anything up to infinity. It can of NaN: that is P too.
constexpr float kLargestLse = 0x1p22f;
NVRTC_ATTN_DEVICE bool has_probabilities(float lse) { return !(fabsf(lse) >= kLargestLse); }

// 2^x with one MUFU instruction; exp2f() spends three more on denormal results, which are zero here.
NVRTC_ATTN_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class Element>
NVRTC_ATTN_DEVICE uint32_t pack2(float x, float y);
template <>
NVRTC_ATTN_DEVICE uint32_t pack2<half_t>(float x, float y) {
  __half2 const v = __floats2half2_rn(x, y);
  return *reinterpret_cast<uint32_t const*>(&v);
}
template <>
NVRTC_ATTN_DEVICE uint32_t pack2<bfloat16_t>(float x, float y) {
  __nv_bfloat162 const v = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<uint32_t const*>(&v);
}

NVRTC_ATTN_DEVICE float to_float(half_t x) { return __half2float(x); }
NVRTC_ATTN_DEVICE float to_float(bfloat16_t x) { return __bfloat162float(x); }
NVRTC_ATTN_DEVICE float to_float(float x) { return x; }
template <class Element>
NVRTC_ATTN_DEVICE Element from_float(float x);
template <>
NVRTC_ATTN_DEVICE half_t from_float<half_t>(float x) {
  return __float2half_rn(x);
}
template <>
NVRTC_ATTN_DEVICE bfloat16_t from_float<bfloat16_t>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
NVRTC_ATTN_DEVICE float from_float<float>(float x) {
  return x;
}

// Additions to global memory that nobody waits for. Of a pointer that the compiler does not know to be one of global memory,
// atomicAdd is an atomic that returns, and code for shared memory beside it.
NVRTC_ATTN_DEVICE void add_to_global(float* at, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at), "f"(x));
}
NVRTC_ATTN_DEVICE void add_to_global(unsigned long long* at, unsigned long long x) {
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(at), "l"(x));
}
NVRTC_ATTN_DEVICE void set_bits_in_global(unsigned long long* at, unsigned long long x) {
  asm volatile("red.global.or.b64 [%0], %1;" ::"l"(at), "l"(x));
}

// Worked out here, whatever the compiler knows of it: nothing that is made of it lives in a register from elsewhere.
NVRTC_ATTN_DEVICE int lane_again() {
  int tid = int(threadIdx.x);
  asm volatile("" : "+r"(tid));
  return tid & 31;
}

}  // namespace nvrtc_attn
