// A row-major tile in shared memory, addressed in 16-byte chunks and swizzled so that eight consecutive rows of
// one chunk column fall into eight different bank groups (what ldmatrix reads and what cp.async writes).
#pragma once
#include <cute/layout.hpp>

#include "../compat.cuh"

namespace nvrtc_attn {

template <class Element, int kRows_, int kCols_>
struct SmemTile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kVec = 16 / int(sizeof(Element));  // elements of one chunk
  static_assert(kCols % kVec == 0, "a tile row is a whole number of 16-byte chunks");
  static constexpr int kChunks = kCols / kVec;
  // With a row pitch of kChunks chunks, rows r and r + 8/2^bits share a bank group: xor-ing that many bits of the
  // row into the chunk separates them. An odd pitch needs none.
  static constexpr int kSwizzleBits = kChunks % 8 == 0 ? 3 : kChunks % 4 == 0 ? 2 : kChunks % 2 == 0 ? 1 : 0;
  static constexpr int kSwizzleShift = 3 - kSwizzleBits;
  static constexpr int kSwizzleMask = (1 << kSwizzleBits) - 1;
  static constexpr int kSize = kRows * kCols;  // elements
  static constexpr int kBytes = kSize * int(sizeof(Element));
  using Layout =
      cute::Layout<cute::Shape<cute::Int<kRows>, cute::Int<kCols>>, cute::Stride<cute::Int<kCols>, cute::_1>>;

  static NVRTC_ATTN_DEVICE int swizzle(int row) { return (row >> kSwizzleShift) & kSwizzleMask; }

  // Offset in elements of chunk `chunk` of row `row`.
  static NVRTC_ATTN_DEVICE int chunk_offset(int row, int chunk) { return Layout{}(row, (chunk ^ swizzle(row)) * kVec); }

  // Offset in elements of one element.
  static NVRTC_ATTN_DEVICE int offset(int row, int col) { return chunk_offset(row, col / kVec) + col % kVec; }
};

}  // namespace nvrtc_attn
