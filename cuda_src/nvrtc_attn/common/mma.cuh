// Warp-level matrix products on mma.sync through CuTe's architecture atoms.
//
// One k-step is 32 bytes of the contraction: 16 elements of a 16-bit type, 8 of float32. An accumulator tile is 16 x 8:
// thread (g = lane / 4, t = lane % 4) holds rows g and g + 8, columns 2t and 2t + 1, as c[0], c[1] (row g), c[2], c[3].
// float32 operands are split into two tf32 parts and multiplied three times (3xTF32): float32 accuracy, not tf32's.
#pragma once
#include <cute/arch/mma_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "numbers.cuh"

namespace nvrtc_attn {

using AccTile = float[4];

// Accumulators of a warp: kM x kN tiles.
template <int kM, int kN>
using WarpTile = float[kM][kN][4];

template <int kM, int kN>
NVRTC_ATTN_DEVICE void clear(WarpTile<kM, kN>& tile) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[m][n][i] = 0.0f;
}

template <class Element>
constexpr int kStepK = 32 / int(sizeof(Element));

// Operand fragments of one k-step, as loaded and ready to multiply.
template <class Element>
struct FragmentA {
  uint32_t x[4];
};
template <class Element>
struct FragmentB {  // 8 columns
  uint32_t x[2];
};
template <>
struct FragmentA<float> {
  uint32_t x[4];    // high tf32 parts
  uint32_t low[4];  // what the high parts miss
};
template <>
struct FragmentB<float> {
  uint32_t x[2];
  uint32_t low[2];
};

// value = high + low up to 2^-22 of value; both are tf32 numbers in float32 registers.
NVRTC_ATTN_DEVICE void split_tf32(uint32_t value, uint32_t& high, uint32_t& low) {
#if __CUDA_ARCH__ < 800
  high = value;  // no tf32 there: multiply_fma takes the number whole
  low = 0;
#else
  // Round to nearest, ties away, as cvt.rna.tf32 does, without its care for NaN and inf (two instructions instead of four):
  // low is NaN for both.
  high = (value + 0x1000u) & 0xffffe000u;
  // The tensor core reads the upper 19 bits only: the low part needs no rounding of its own (2^-21 relative to it).
  low = __float_as_uint(__uint_as_float(value) - __uint_as_float(high));
#endif
}

// Turn raw 32-bit words into a fragment that mma() accepts (a no-op for 16-bit types).
template <class Element>
NVRTC_ATTN_DEVICE void prepare(FragmentA<Element>& a) {
  if constexpr (sizeof(Element) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(a.x[i], a.x[i], a.low[i]);
  }
}
template <class Element>
NVRTC_ATTN_DEVICE void prepare(FragmentB<Element>& b) {
  if constexpr (sizeof(Element) == 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) split_tf32(b.x[i], b.x[i], b.low[i]);
  }
}

// The m16n8k8 product of float32 fragments on the FMA units, for GPUs whose tensor cores have no tf32 (before 8.0): every
// thread collects the operands of its four results by shuffle. Exact float32 inputs, high + low is the original number.
NVRTC_ATTN_DEVICE void multiply_fma(AccTile& c, FragmentA<float> const& a, FragmentB<float> const& b) {
  int const lane = threadIdx.x & 31;
  float av[4], bv[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) av[i] = __uint_as_float(a.x[i]) + __uint_as_float(a.low[i]);
#pragma unroll
  for (int i = 0; i < 2; ++i) bv[i] = __uint_as_float(b.x[i]) + __uint_as_float(b.low[i]);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    int const row_lane = (lane & ~3) | (k & 3);        // holds column k of this thread's rows
    int const col_lane = ((lane & 3) << 3) | (k & 3);  // holds row k of column 2t; column 2t + 1 is four lanes on
    float const upper = __shfl_sync(0xffffffffu, av[k >> 2 << 1], row_lane);
    float const lower = __shfl_sync(0xffffffffu, av[(k >> 2 << 1) + 1], row_lane);
    float const left = __shfl_sync(0xffffffffu, bv[k >> 2], col_lane);
    float const right = __shfl_sync(0xffffffffu, bv[k >> 2], col_lane + 4);
    c[0] = fmaf(upper, left, c[0]);
    c[1] = fmaf(upper, right, c[1]);
    c[2] = fmaf(lower, left, c[2]);
    c[3] = fmaf(lower, right, c[3]);
  }
}

// float32: at most this many k-steps are summed inside the tensor core, which truncates when it adds to an accumulator,
// before a rounded float32 addition. Q K^T of the forward and of the backward kernels have the same chains: the latter
// make P from their scores and the LSE of the former.
constexpr int kChainSteps = 4;

// c += a * b over one k-step. float32: c is a chain.
template <class Element, bool kLegacy>
NVRTC_ATTN_DEVICE void mma(AccTile& c, FragmentA<Element> const& a, FragmentB<Element> const& b) {
  if constexpr (sizeof(Element) == 4 && kLegacy) {
    multiply_fma(c, a, b);
  } else if constexpr (sizeof(Element) == 4) {
    using Atom = cute::SM80_16x8x8_F32TF32TF32F32_TN;
    Atom::fma(c[0], c[1], c[2], c[3], a.low[0], a.low[1], a.low[2], a.low[3], b.x[0], b.x[1], c[0], c[1], c[2], c[3]);
    Atom::fma(c[0], c[1], c[2], c[3], a.x[0], a.x[1], a.x[2], a.x[3], b.low[0], b.low[1], c[0], c[1], c[2], c[3]);
    Atom::fma(c[0], c[1], c[2], c[3], a.x[0], a.x[1], a.x[2], a.x[3], b.x[0], b.x[1], c[0], c[1], c[2], c[3]);
  } else if constexpr (kLegacy) {
    using Atom = cute::SM75_16x8x8_F32F16F16F32_TN;
    Atom::fma(c[0], c[1], c[2], c[3], a.x[0], a.x[1], b.x[0], c[0], c[1], c[2], c[3]);
    Atom::fma(c[0], c[1], c[2], c[3], a.x[2], a.x[3], b.x[1], c[0], c[1], c[2], c[3]);
  } else if constexpr (cute::is_same_v<Element, half_t>) {
    using Atom = cute::SM80_16x8x16_F32F16F16F32_TN;
    Atom::fma(c[0], c[1], c[2], c[3], a.x[0], a.x[1], a.x[2], a.x[3], b.x[0], b.x[1], c[0], c[1], c[2], c[3]);
  } else {
    using Atom = cute::SM80_16x8x16_F32BF16BF16F32_TN;
    Atom::fma(c[0], c[1], c[2], c[3], a.x[0], a.x[1], a.x[2], a.x[3], b.x[0], b.x[1], c[0], c[1], c[2], c[3]);
  }
}

// One of the kTerms<Element> instructions whose sum, in order, is c += a * b over one k-step. For loops that put those of
// several tiles next to each other, since each waits for the one before it on the same tile, and that keep chains of
// float32 steps short and sum them from zero: the tensor core truncates when it adds to an accumulator.
template <class Element, bool kLegacy>
constexpr int kTerms = sizeof(Element) == 4 && !kLegacy ? 3 : 1;

template <class Element, bool kLegacy, int kTerm>
NVRTC_ATTN_DEVICE void mma_term(AccTile& c, FragmentA<Element> const& a, FragmentB<Element> const& b) {
  static_assert(kTerm < kTerms<Element, kLegacy>);
  if constexpr (kTerms<Element, kLegacy> == 3) {
    uint32_t const(&x)[4] = kTerm == 0 ? a.low : a.x;
    uint32_t const(&y)[2] = kTerm == 1 ? b.low : b.x;
    cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(c[0], c[1], c[2], c[3], x[0], x[1], x[2], x[3], y[0], y[1], c[0], c[1],
                                             c[2], c[3]);
  } else {
    mma<Element, kLegacy>(c, a, b);
  }
}

// c += a * b over the first 8 elements of a k-step: the odd half step of a head dim that is 8 modulo 16.
template <class Element, bool kLegacy>
NVRTC_ATTN_DEVICE void mma_half_step(AccTile& c, FragmentA<Element> const& a, FragmentB<Element> const& b) {
  static_assert(sizeof(Element) == 2, "float32 steps are 8 wide already");
  if constexpr (kLegacy) {
    using Atom = cute::SM75_16x8x8_F32F16F16F32_TN;
    Atom::fma(c[0], c[1], c[2], c[3], a.x[0], a.x[1], b.x[0], c[0], c[1], c[2], c[3]);
  } else if constexpr (cute::is_same_v<Element, half_t>) {
    using Atom = cute::SM80_16x8x8_F32F16F16F32_TN;
    Atom::fma(c[0], c[1], c[2], c[3], a.x[0], a.x[1], b.x[0], c[0], c[1], c[2], c[3]);
  } else {
    using Atom = cute::SM80_16x8x8_F32BF16BF16F32_TN;
    Atom::fma(c[0], c[1], c[2], c[3], a.x[0], a.x[1], b.x[0], c[0], c[1], c[2], c[3]);
  }
}

// An accumulator row block as the left operand of the next product: columns become the contraction.
// 16-bit: two 16 x 8 tiles make one k-step in natural order. float32: one tile makes one k-step whose contraction index is
// permuted (column 2t -> t, 2t + 1 -> t + 4), so the right operand must be read with load_b_trans_permuted.
template <class Element>
NVRTC_ATTN_DEVICE FragmentA<Element> accumulator_as_a(AccTile const& first, AccTile const& second) {
  static_assert(sizeof(Element) == 2, "float32 takes one tile a step");
  FragmentA<Element> a;
  a.x[0] = pack2<Element>(first[0], first[1]);
  a.x[1] = pack2<Element>(first[2], first[3]);
  a.x[2] = pack2<Element>(second[0], second[1]);
  a.x[3] = pack2<Element>(second[2], second[3]);
  return a;
}
NVRTC_ATTN_DEVICE FragmentA<float> accumulator_as_a(AccTile const& tile) {
  FragmentA<float> a;
  a.x[0] = __float_as_uint(tile[0]);
  a.x[1] = __float_as_uint(tile[2]);
  a.x[2] = __float_as_uint(tile[1]);
  a.x[3] = __float_as_uint(tile[3]);
  prepare(a);
  return a;
}

}  // namespace nvrtc_attn
