// Warp-group matrix products through CuTe's architecture atoms, and the shared-memory descriptors they read.
//
// A tile in shared memory is a row of slabs, each [rows][64 columns] of a 16-bit type: 128 bytes a row, 16-byte chunk c of row
// r at chunk c ^ (r % 8) (the copy engine's 128-byte swizzle). Slabs start at multiples of 1024 bytes.
// An accumulator of 64 x kN is kN / 8 tiles of 64 x 8; warp w of the group holds rows 16 w .. 16 w + 15 of each in the layout
// of mma.sync, so everything that works on AccTile works here.
#pragma once
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <cute/arch/mma_sm90_gmma.hpp>

#include "../../common/mma.cuh"

namespace nvrtc_attn {

using MatrixMajor = cute::SM90::GMMA::Major;

constexpr int kSlabColumns = 64;
constexpr int kSlabRowBytes = 128;

// Bytes of a tile of `rows` x `cols`.
constexpr int slab_tile_bytes(int rows, int cols) {
  return (cols + kSlabColumns - 1) / kSlabColumns * rows * kSlabRowBytes;
}

template <class Element, int kN, MatrixMajor kMajorB>
struct WgmmaAtoms;
#define NVRTC_ATTN_WGMMA_ATOMS(n)                                                         \
  template <MatrixMajor kMajorB>                                                          \
  struct WgmmaAtoms<half_t, n, kMajorB> {                                                 \
    template <MatrixMajor kMajorA>                                                        \
    using SSOf = cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<kMajorA, kMajorB>;        \
    using SS = SSOf<MatrixMajor::K>;                                                      \
    using RS = cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_RS<MatrixMajor::K, kMajorB>;   \
  };                                                                                      \
  template <MatrixMajor kMajorB>                                                          \
  struct WgmmaAtoms<bfloat16_t, n, kMajorB> {                                             \
    template <MatrixMajor kMajorA>                                                        \
    using SSOf = cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<kMajorA, kMajorB>;      \
    using SS = SSOf<MatrixMajor::K>;                                                      \
    using RS = cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_RS<MatrixMajor::K, kMajorB>; \
  };
NVRTC_ATTN_WGMMA_ATOMS(16)
NVRTC_ATTN_WGMMA_ATOMS(32)
NVRTC_ATTN_WGMMA_ATOMS(48)
NVRTC_ATTN_WGMMA_ATOMS(64)
NVRTC_ATTN_WGMMA_ATOMS(80)
NVRTC_ATTN_WGMMA_ATOMS(96)
NVRTC_ATTN_WGMMA_ATOMS(112)
NVRTC_ATTN_WGMMA_ATOMS(128)
NVRTC_ATTN_WGMMA_ATOMS(144)
NVRTC_ATTN_WGMMA_ATOMS(160)
NVRTC_ATTN_WGMMA_ATOMS(176)
NVRTC_ATTN_WGMMA_ATOMS(192)
NVRTC_ATTN_WGMMA_ATOMS(208)
NVRTC_ATTN_WGMMA_ATOMS(224)
NVRTC_ATTN_WGMMA_ATOMS(240)
NVRTC_ATTN_WGMMA_ATOMS(256)
#undef NVRTC_ATTN_WGMMA_ATOMS

// Descriptor of slabs whose rows are the matrix's non-contracted index (Q and K in Q K^T): groups of 8 rows 1024 bytes apart.
// One k-step of 16 elements is 32 bytes further along the row.
NVRTC_ATTN_DEVICE uint64_t descriptor_k_major(unsigned address) {
  return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 16 | ((address & 0x3FFFF) >> 4);
}

// Descriptor of slabs whose rows are the contracted index (V in P V): groups of 8 rows 1024 bytes apart, the next 64 columns
// one slab further. One k-step of 16 rows is 2048 bytes.
NVRTC_ATTN_DEVICE uint64_t descriptor_mn_major(unsigned address, int slab_bytes) {
  return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(slab_bytes >> 4) << 16 | ((address & 0x3FFFF) >> 4);
}

template <int... kIndex>
struct IndexList {};

// IndexList<0, 1, .., kSize - 1>, kSize a multiple of 4: in steps of 4 to keep the recursion shallow.
template <int kSize, int... kIndex>
struct IndexRange : IndexRange<kSize - 4, kSize - 4, kSize - 3, kSize - 2, kSize - 1, kIndex...> {};
template <int... kIndex>
struct IndexRange<0, kIndex...> {
  using Type = IndexList<kIndex...>;
};

template <class Atom, int kTiles, int... kIndex>
NVRTC_ATTN_DEVICE void wgmma_ss(AccTile (&c)[1][kTiles], uint64_t a, uint64_t b, bool accumulate,
                                IndexList<kIndex...>) {
  Atom::fma(a, b, c[0][kIndex / 4][kIndex % 4]...,
            accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}
template <class Atom, class Fragment, int kTiles, int... kIndex>
NVRTC_ATTN_DEVICE void wgmma_rs(AccTile (&c)[1][kTiles], Fragment const& a, uint64_t b, IndexList<kIndex...>) {
  Atom::fma(a.x[0], a.x[1], a.x[2], a.x[3], b, c[0][kIndex / 4][kIndex % 4]..., cute::SM90::GMMA::ScaleOut::One);
}

// Products: start_product_.. overwrites c, start_adding_.. adds to it.

// c = A B^T, kAdds: c += A B^T: A is 64 rows of slabs of kRowsA rows, B kTiles * 8 rows of slabs of kRowsB rows, both kColumns wide.
// Starts the products; c must not be touched before wait_products.
template <class Element, int kRowsA, int kRowsB, int kColumns, bool kAdds = false, int kTiles>
NVRTC_ATTN_DEVICE void start_product_abt(AccTile (&c)[1][kTiles], uint64_t a, uint64_t b) {
  using Atom = typename WgmmaAtoms<Element, 8 * kTiles, MatrixMajor::K>::SS;
  constexpr int kStepsPerSlab = kSlabColumns / 16;
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) {
    int const slab = step / kStepsPerSlab;
    int const offset = step % kStepsPerSlab * (32 >> 4);
    wgmma_ss<Atom>(c, a + slab * (kRowsA * kSlabRowBytes >> 4) + offset,
                   b + slab * (kRowsB * kSlabRowBytes >> 4) + offset, kAdds || step != 0,
                   typename IndexRange<4 * kTiles>::Type{});
  }
}

// c += A B: A in registers, B kSteps * 16 rows of slabs, kTiles * 8 columns wide.
template <class Element, int kTiles, int kSteps>
NVRTC_ATTN_DEVICE void start_adding_ab(AccTile (&c)[1][kTiles], FragmentA<Element> const (&a)[kSteps], uint64_t b) {
  using Atom = typename WgmmaAtoms<Element, 8 * kTiles, MatrixMajor::MN>::RS;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    wgmma_rs<Atom>(c, a[step], b + step * (16 * kSlabRowBytes >> 4), typename IndexRange<4 * kTiles>::Type{});
  }
}

// The compiler may not move uses of a register across this.
template <int kTiles>
NVRTC_ATTN_DEVICE void pin_registers(AccTile (&c)[1][kTiles]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) cute::warpgroup_fence_operand(c[0][n][e]);
  }
}
template <class Element, int kSteps>
NVRTC_ATTN_DEVICE void pin_registers(FragmentA<Element> (&a)[kSteps]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) cute::warpgroup_fence_operand(a[step].x[i]);
  }
}

NVRTC_ATTN_DEVICE void begin_products() { cute::warpgroup_arrive(); }
NVRTC_ATTN_DEVICE void commit_products() { cute::warpgroup_commit_batch(); }
// Until at most kPending committed groups are unfinished.
template <int kPending>
NVRTC_ATTN_DEVICE void wait_products() {
  cute::warpgroup_wait<kPending>();
}

}  // namespace nvrtc_attn
