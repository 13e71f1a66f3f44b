// What the Hopper backward kernel for wide heads needs beside hopper/common/wgmma.cuh and hopper/backward/gradient_store.cuh: products whose left
// operand is one slab in shared memory, and P from one warp-group to the other.
#pragma once
#include "../common/wgmma.cuh"

namespace nvrtc_attn {

// c += A^T B: A is kSteps * 16 rows of one slab, B as many rows of slabs, kTiles * 8 wide.
template <class Element, int kSteps, int kTiles>
NVRTC_ATTN_DEVICE void start_adding_atb(AccTile (&c)[1][kTiles], uint64_t a, uint64_t b) {
  using Atom = typename WgmmaAtoms<Element, 8 * kTiles, MatrixMajor::MN>::template SSOf<MatrixMajor::MN>;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    wgmma_ss<Atom>(c, a + step * (16 * kSlabRowBytes >> 4), b + step * (16 * kSlabRowBytes >> 4), true,
                   typename IndexRange<4 * kTiles>::Type{});
  }
}

// c (+)= A B: A is 64 rows of one slab, B 64 rows of slabs.
template <class Element, int kTiles>
NVRTC_ATTN_DEVICE void start_product_slab(AccTile (&c)[1][kTiles], uint64_t a, uint64_t b, bool accumulate) {
  using Atom = typename WgmmaAtoms<Element, 8 * kTiles, MatrixMajor::MN>::SS;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    wgmma_ss<Atom>(c, a + step * (32 >> 4), b + step * (16 * kSlabRowBytes >> 4), accumulate || step != 0,
                   typename IndexRange<4 * kTiles>::Type{});
  }
}

// P^T of a warp's 16 rows and 16 columns a step, as left operand in one slab: from one warp-group's registers to the other's, and
// to the tensor cores. The place of this lane's row of step 0; further steps are exclusive-or'ed in.
NVRTC_ATTN_DEVICE unsigned fragment_offset(int warp, int lane) {
  int const row = 16 * warp + (lane & 15);
  return row * kSlabRowBytes + (((lane >> 4) ^ (row & 7)) << 4);
}
template <class Element>
NVRTC_ATTN_DEVICE void give_fragment(unsigned lane_address, int step, FragmentA<Element> const& a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(lane_address ^ (step << 5)),
               "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3])
               : "memory");
}
template <class Element>
NVRTC_ATTN_DEVICE FragmentA<Element> get_fragment(unsigned lane_address, int step) {
  FragmentA<Element> a;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a.x[0]), "=r"(a.x[1]), "=r"(a.x[2]), "=r"(a.x[3])
               : "r"(lane_address ^ (step << 5))
               : "memory");
  return a;
}

}  // namespace nvrtc_attn
