// The order in which the keys of a tile lie in shared memory, chosen for what is as wide as the scores.
//
// In a row of accumulator tiles a thread owns columns 2t and 2t + 1 of each: were keys in their natural order, bias, mask and
// bias gradient would move four bytes at a time, 16 of each row in a place. The order of keys is free as long as K and V share it
// and nothing outside a tile sees it, so a group of kGroup tiles (8 kGroup keys) is stored such that the thread's columns are
// 2 kGroup consecutive keys: one 16-byte access of 16-bit values for kGroup = 4, and whole Philox blocks for dropout.
#pragma once
#include "tile_load.cuh"

namespace nvrtc_attn {

template <int kGroup>
struct KeyOrder {
  static constexpr int kKeys = 8 * kGroup;  // of a group
  static constexpr int kRun = 2 * kGroup;   // consecutive keys of one thread

  // Which key of the tile row `row` holds. Bits are moved, never mixed: key(x + y) = key(x) + key(y) for x, y that
  // share no bit.
  static constexpr NVRTC_ATTN_DEVICE int key(int row) {
    int const in = row % kKeys;
    return row - in + in % 8 / 2 * kRun + in / 8 * 2 + in % 2;
  }

  // Key of column e (0 or 1) of thread t = lane % 4 in accumulator tile n, relative to the first tile of the warp.
  static constexpr NVRTC_ATTN_DEVICE int key(int n, int t, int e) {
    return n / kGroup * kKeys + t * kRun + n % kGroup * 2 + e;
  }
};

// The widest order that a warp's kTiles accumulator tiles allow.
template <int kTiles>
using KeyOrderOf = KeyOrder<kTiles % 4 == 0 ? 4 : 2>;

// load_tile() with the rows in `Order`.
template <class Tile, class Order, int kThreads, bool kAligned, bool kLegacy, class Element>
NVRTC_ATTN_DEVICE void load_key_tile(Element* tile, Element const* src, index_t stride_row, index_t stride_col,
                                     int rows, int cols, int tid) {
  static_assert(Tile::kRows % Order::kKeys == 0, "key tiles are whole groups");
  static_assert(Tile::kChunks <= kThreads, "a tile row has at most one chunk per thread");
  constexpr int kVec = Tile::kVec;
  constexpr int kRowsPerPass = kThreads / Tile::kChunks;
  constexpr int kPasses = (Tile::kRows + kRowsPerPass - 1) / kRowsPerPass;
  constexpr bool kDisjoint = (kRowsPerPass & (kRowsPerPass - 1)) == 0;  // row0 and pass * kRowsPerPass share no bit
  int const chunk = tid % Tile::kChunks;
  int const row0 = tid / Tile::kChunks;
  if (kThreads % Tile::kChunks != 0 && row0 >= kRowsPerPass) return;
  Element const* const column = src + index_t(chunk * kVec) * stride_col;
  if constexpr (kAligned && !kLegacy) {
    if (rows >= Tile::kRows && cols >= Tile::kCols) {
      Element const* const first = column + index_t(Order::key(row0)) * stride_row;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        int const row = row0 + pass * kRowsPerPass;
        if ((pass + 1) * kRowsPerPass > Tile::kRows && row >= Tile::kRows) break;
        Element const* const from = kDisjoint ? first + index_t(Order::key(pass * kRowsPerPass)) * stride_row
                                              : column + index_t(Order::key(row)) * stride_row;
        cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(
            *reinterpret_cast<cute::uint128_t const*>(from),
            *reinterpret_cast<cute::uint128_t*>(tile + Tile::chunk_offset(row, chunk)));
      }
      return;
    }
  }
#pragma unroll(kAligned && !kLegacy ? 1 : kAligned ? 4 : 2)
  for (int row = row0; row < Tile::kRows; row += kRowsPerPass) {
    int const key = Order::key(row);
    Element const* const from = column + index_t(key) * stride_row;
    Element* const dst = tile + Tile::chunk_offset(row, chunk);
    if constexpr (kAligned) {
      bool const valid = key < rows && chunk * kVec < cols;
      if constexpr (kLegacy) {
        uint4 value = make_uint4(0, 0, 0, 0);
        if (valid) value = *reinterpret_cast<uint4 const*>(from);
        *reinterpret_cast<uint4*>(dst) = value;
      } else {
        Element const* const safe = valid ? from : src;  // never hand out an address outside the tensor
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*reinterpret_cast<cute::uint128_t const*>(safe),
                                                                     *reinterpret_cast<cute::uint128_t*>(dst), valid);
      }
    } else {
      alignas(16) Element value[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        bool const valid = key < rows && chunk * kVec + i < cols;
        value[i] = valid ? from[index_t(i) * stride_col] : Element(0.0f);
      }
      *reinterpret_cast<uint4*>(dst) = *reinterpret_cast<uint4 const*>(value);
    }
  }
}

}  // namespace nvrtc_attn
