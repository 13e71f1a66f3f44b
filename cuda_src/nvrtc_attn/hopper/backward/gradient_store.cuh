// What the Hopper backward kernel needs beside hopper/common/wgmma.cuh: dS^T as an operand in shared memory and its product with K,
// dK and dV to global memory.
#pragma once
#include "../../collective/gradient_accumulator.cuh"
#include "../../params.cuh"
#include "../common/row_store.cuh"
#include "../common/wgmma.cuh"

namespace nvrtc_attn {

// dS^T of a warp's 16 keys and 16 * kSteps queries -> rows of queries in a slab of 64 keys (see hopper/common/wgmma.cuh), which
// makes dS a left operand with contiguous keys. `slab` is a shared address, `warp` the warp's place in its group.
template <class Element, int kSteps>
NVRTC_ATTN_DEVICE void store_transposed(unsigned slab, FragmentA<Element> const (&ds)[kSteps], int warp, int lane) {
  // Matrix lane / 8 of a fragment: keys 0..7 or 8..15 (bit 0), queries 0..7 or 8..15 (bit 1); this lane names one query row.
  int const row = (lane & 7) + (lane >> 4 << 3);
  int const chunk = 2 * warp + (lane >> 3 & 1);
  unsigned const to = slab + row * kSlabRowBytes + ((chunk ^ (lane & 7)) << 4);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + step * 16 * kSlabRowBytes),
        "r"(ds[step].x[0]), "r"(ds[step].x[1]), "r"(ds[step].x[2]), "r"(ds[step].x[3])
        : "memory");
  }
}

// c = A B: A is 64 rows of slabs of kSlabA bytes whose columns are contracted, B kSteps * 16 rows of slabs, kTiles * 8 wide.
template <class Element, int kSlabA, int kColumns, int kTiles>
NVRTC_ATTN_DEVICE void start_product_ab(AccTile (&c)[1][kTiles], uint64_t a, uint64_t b) {
  using Atom = typename WgmmaAtoms<Element, 8 * kTiles, MatrixMajor::MN>::SS;
  constexpr int kStepsPerSlab = kSlabColumns / 16;
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) {
    wgmma_ss<Atom>(c, a + step / kStepsPerSlab * (kSlabA >> 4) + step % kStepsPerSlab * (32 >> 4),
                   b + step * (16 * kSlabRowBytes >> 4), step != 0, typename IndexRange<4 * kTiles>::Type{});
  }
}

template <class Atom, class Fragment, int kTiles, int... kIndex>
NVRTC_ATTN_DEVICE void wgmma_rs_first(AccTile (&c)[1][kTiles], Fragment const& a, uint64_t b, bool accumulate,
                                      IndexList<kIndex...>) {
  Atom::fma(a.x[0], a.x[1], a.x[2], a.x[3], b, c[0][kIndex / 4][kIndex % 4]...,
            accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// c = A B^T: A in registers, 16 * kSteps columns, B kTiles * 8 rows of slabs of kRowsB rows.
template <class Element, int kRowsB, int kTiles, int kSteps>
NVRTC_ATTN_DEVICE void start_product_rbt(AccTile (&c)[1][kTiles], FragmentA<Element> const (&a)[kSteps], uint64_t b) {
  using Atom = typename WgmmaAtoms<Element, 8 * kTiles, MatrixMajor::K>::RS;
  constexpr int kStepsPerSlab = kSlabColumns / 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    wgmma_rs_first<Atom>(c, a[step],
                         b + step / kStepsPerSlab * (kRowsB * kSlabRowBytes >> 4) + step % kStepsPerSlab * (32 >> 4),
                         step != 0, typename IndexRange<4 * kTiles>::Type{});
  }
}

// c = A^T B^T: A is kColumns rows of one slab, B kTiles * 8 rows of slabs of kSlabB bytes, kColumns wide.
template <class Element, int kSlabB, int kColumns, int kTiles>
NVRTC_ATTN_DEVICE void start_product_atbt(AccTile (&c)[1][kTiles], uint64_t a, uint64_t b) {
  using Atom = typename WgmmaAtoms<Element, 8 * kTiles, MatrixMajor::K>::template SSOf<MatrixMajor::MN>;
  constexpr int kStepsPerSlab = kSlabColumns / 16;
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) {
    wgmma_ss<Atom>(c, a + step * (16 * kSlabRowBytes >> 4),
                   b + step / kStepsPerSlab * (kSlabB >> 4) + step % kStepsPerSlab * (32 >> 4), step != 0,
                   typename IndexRange<4 * kTiles>::Type{});
  }
}

// A warp's 16 x 8 kTiles accumulators times `factor` -> rows of a gradient whose columns are contiguous and whose rows are
// aligned to 16 bytes. `to`: row 0 of the warp; rows at or beyond `rows` and columns beyond `cols` are left out.
template <class Element, int kTiles>
NVRTC_ATTN_DEVICE void store_rows(Element* to, index_t stride_row, AccTile const (&c)[1][kTiles], float factor,
                                  int rows, int cols, int lane) {
  int const t = lane & 3;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const row = (lane >> 2) + 8 * r;
    Element* const line = to + index_t(row) * stride_row + 8 * t;
    store_row<Element>(line, c, r, factor, row < rows, cols, t);
  }
}

// Where dk or dv of key `key` of a tile's sequence lies.
template <class Element, class Tile, class Lengths>
NVRTC_ATTN_DEVICE Element* key_rows(void* tensor, index_t stride_b, index_t stride_n, index_t stride_h,
                                    Tile const& tile, Lengths const& seqlen, int key) {
  return reinterpret_cast<Element*>(tensor) + index_t(seqlen.batch_index) * stride_b +
         (index_t(seqlen.k_row0) + key) * stride_n + index_t(tile.h) * stride_h;
}

// Zeros in dk and dv of key head h for the tokens that lie in no sequence: `part` of `num_parts`.
template <class Element, int kThreads>
NVRTC_ATTN_DEVICE void zero_keys_of_no_sequence(HopperBackwardParams const& params, int h, int part, int num_parts,
                                                int tid) {
  zero_unused_rows<kThreads>(reinterpret_cast<Element*>(params.dk) + index_t(h) * params.dk_stride_h,
                             params.dk_stride_n, params.dk_stride_d, params.cu_seqlens_k, params.batch, params.total_k,
                             params.head_dim, part, num_parts, tid);
  zero_unused_rows<kThreads>(reinterpret_cast<Element*>(params.dv) + index_t(h) * params.dv_stride_h,
                             params.dv_stride_n, params.dv_stride_d, params.cu_seqlens_k, params.batch, params.total_k,
                             params.head_dim_v, part, num_parts, tid);
}

}  // namespace nvrtc_attn
