// Shared memory -> global memory, one tile by all threads of a CTA: the counterpart of load_tile.
#pragma once
#include "smem_tile.cuh"

namespace nvrtc_attn {

// Write columns [col_begin, col_end), a begin that is a multiple of 8, of the tile's first `rows` rows. Aligned: 16-byte vectors; otherwise element by element.
template <class Tile, int kThreads, bool kAligned, class Element>
NVRTC_ATTN_DEVICE void store_tile(Element const* tile, Element* dst, index_t stride_row, index_t stride_col, int rows,
                                  int col_begin, int col_end, int tid) {
  constexpr int kVec = Tile::kVec;
  for (int c = tid; c < Tile::kRows * Tile::kChunks; c += kThreads) {
    int const row = c / Tile::kChunks;
    int const chunk = c % Tile::kChunks;
    if (row >= rows || chunk * kVec < col_begin || chunk * kVec >= col_end) continue;
    Element const* from = tile + Tile::chunk_offset(row, chunk);
    Element* to = dst + index_t(row) * stride_row + index_t(chunk * kVec) * stride_col;
    if constexpr (kAligned) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4 const*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (chunk * kVec + i < col_end) to[index_t(i) * stride_col] = from[i];
      }
    }
  }
}

}  // namespace nvrtc_attn
