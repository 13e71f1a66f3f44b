// Global memory -> shared memory, one tile by all threads of a CTA.
//
// Rows at or beyond `rows` and columns at or beyond `cols` become zero, so the tile is always fully written.
// Aligned: 16-byte cp.async (plain vector loads before compute capability 8.0). Otherwise element by element with any
// stride, written as whole chunks: correct for every layout, several times slower.
#pragma once
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/util.hpp>

#include "smem_tile.cuh"

namespace nvrtc_attn {

template <bool kLegacy>
NVRTC_ATTN_DEVICE void cp_async_commit() {
  if constexpr (!kLegacy) cute::cp_async_fence();
}

// Wait until at most kPending of this thread's commit groups are in flight.
template <bool kLegacy, int kPending>
NVRTC_ATTN_DEVICE void cp_async_wait() {
  if constexpr (!kLegacy) cute::cp_async_wait<kPending>();
}

// One thread's part of a tile: chunk column `chunk`, rows row0, row0 + kRowsPerPass, ...
template <class Tile, int kRowsPerPass, bool kAligned, bool kLegacy, class Element>
NVRTC_ATTN_DEVICE void load_tile_column(Element* tile, Element const* src, index_t stride_row, index_t stride_col,
                                        int rows, int cols, int chunk, int row0) {
  constexpr int kVec = Tile::kVec;
  Element const* src_chunk = src + index_t(row0) * stride_row + index_t(chunk * kVec) * stride_col;
  constexpr int kPasses = (Tile::kRows + kRowsPerPass - 1) / kRowsPerPass;
  if constexpr (kAligned && !kLegacy) {
    // A tile that lies inside the tensor needs neither predicates nor address selection: 3 instructions a chunk, not 9.
    if (rows >= Tile::kRows && cols >= Tile::kCols) {
      index_t const step = index_t(kRowsPerPass) * stride_row;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        if ((pass + 1) * kRowsPerPass > Tile::kRows && row0 + pass * kRowsPerPass >= Tile::kRows) break;
        cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(
            *reinterpret_cast<cute::uint128_t const*>(src_chunk),
            *reinterpret_cast<cute::uint128_t*>(tile + Tile::chunk_offset(row0 + pass * kRowsPerPass, chunk)));
        src_chunk += step;
      }
      return;
    }
  }
  // Edge tiles go round a loop: unrolled, their addresses would take the registers of the main loop. Plain loads are
  // unrolled by four, since each waits for its data before the store.
#pragma unroll(kAligned && !kLegacy ? 1 : kAligned ? 4 : 2)
  for (int row = row0; row < Tile::kRows; row += kRowsPerPass, src_chunk += index_t(kRowsPerPass) * stride_row) {
    Element* dst = tile + Tile::chunk_offset(row, chunk);
    if constexpr (kAligned) {
      bool const valid = row < rows && chunk * kVec < cols;
      if constexpr (kLegacy) {
        uint4 value = make_uint4(0, 0, 0, 0);
        if (valid) value = *reinterpret_cast<uint4 const*>(src_chunk);
        *reinterpret_cast<uint4*>(dst) = value;
      } else {
        Element const* const safe = valid ? src_chunk : src;  // never hand out an address outside the tensor
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*reinterpret_cast<cute::uint128_t const*>(safe),
                                                                     *reinterpret_cast<cute::uint128_t*>(dst), valid);
      }
    } else {
      alignas(16) Element value[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        bool const valid = row < rows && chunk * kVec + i < cols;
        value[i] = valid ? src_chunk[index_t(i) * stride_col] : Element(0.0f);
      }
      *reinterpret_cast<uint4*>(dst) = *reinterpret_cast<uint4 const*>(value);
    }
  }
}

template <class Tile, int kThreads, bool kAligned, bool kLegacy, class Element>
NVRTC_ATTN_DEVICE void load_tile(Element* tile, Element const* src, index_t stride_row, index_t stride_col, int rows,
                                 int cols, int tid) {
  constexpr int kChunks = Tile::kChunks;
  if constexpr (kChunks <= kThreads) {
    // A thread keeps one chunk column and walks down the rows; threads beyond a whole number of rows sit out.
    constexpr int kRowsPerPass = kThreads / kChunks;
    int const row0 = tid / kChunks;
    if (kThreads % kChunks != 0 && row0 >= kRowsPerPass) return;
    load_tile_column<Tile, kRowsPerPass, kAligned, kLegacy>(tile, src, stride_row, stride_col, rows, cols,
                                                            tid % kChunks, row0);
  } else {
    for (int chunk = tid; chunk < kChunks; chunk += kThreads) {
      load_tile_column<Tile, 1, kAligned, kLegacy>(tile, src, stride_row, stride_col, rows, cols, chunk, 0);
    }
  }
}

// Zeros in the rows of a loaded tile that `hidden` names, by the threads that have loaded them: between a thread's wait
// for its own copies and the barrier that shows them to others.
template <class Tile, int kThreads, class Element, class Hidden>
NVRTC_ATTN_DEVICE void zero_hidden_rows(Element* tile, Hidden&& hidden) {
  // Read again: over a main loop there is no register for it.
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  constexpr int kRowsPerPass = kThreads / Tile::kChunks > 0 ? kThreads / Tile::kChunks : 1;
  int const row0 = tid / Tile::kChunks;
  if (Tile::kChunks <= kThreads && kThreads % Tile::kChunks != 0 && row0 >= kRowsPerPass) return;
  constexpr int kBatch = 4;  // whose answers, a byte of the mask each, are on the way together
#pragma unroll 1
  for (int row = row0; row < Tile::kRows; row += kBatch * kRowsPerPass) {
    bool zero[kBatch];
#pragma unroll
    for (int x = 0; x < kBatch; ++x) {
      zero[x] = row + x * kRowsPerPass < Tile::kRows && hidden(row + x * kRowsPerPass);
    }
#pragma unroll
    for (int x = 0; x < kBatch; ++x) {
      if (!zero[x]) continue;
      for (int chunk = tid % Tile::kChunks; chunk < Tile::kChunks; chunk += kThreads) {
        *reinterpret_cast<uint4*>(tile + Tile::chunk_offset(row + x * kRowsPerPass, chunk)) = make_uint4(0, 0, 0, 0);
        if constexpr (Tile::kChunks <= kThreads) break;
      }
    }
  }
}

// load_tile() for a main loop that walks over tiles from the last to the first: a thread keeps the address of its next
// chunk and walks down through the rows of one tile after the other, so a tile costs three instructions a chunk and
// nothing else (load_tile() works its addresses out anew, some 40 instructions more).
template <class Tile, int kThreads, bool kAligned, bool kLegacy, class Element>
struct DescendingTileLoader {
  // A thread has one chunk column; with more chunks a row than threads, every kThreads-th one.
  static constexpr int kRowsPerPass = kThreads / Tile::kChunks > 0 ? kThreads / Tile::kChunks : 1;
  static constexpr int kColumns = (Tile::kChunks + kThreads - 1) / kThreads;
  static constexpr int kPasses = (Tile::kRows + kRowsPerPass - 1) / kRowsPerPass;
  static constexpr int kOverhang = kPasses * kRowsPerPass - Tile::kRows;  // rows of the first pass beyond the tile
  static constexpr int kElementBytes = int(sizeof(Element));
  Element const* source;  // this thread's chunk of the first pass, that with the highest rows, of the next tile

  // `last_tile` is the first row of the tile that is loaded first.
  NVRTC_ATTN_DEVICE DescendingTileLoader(Element const* last_tile, index_t stride_row, index_t stride_col, int tid) {
    int const row0 = tid / Tile::kChunks;
    int const chunk = tid % Tile::kChunks;
    source = last_tile + index_t(row0 + (kPasses - 1) * kRowsPerPass) * stride_row +
             index_t(chunk * Tile::kVec) * stride_col;
  }

  // Leave out so many tiles.
  NVRTC_ATTN_DEVICE void skip(int tiles, index_t stride_row) { source -= index_t(tiles) * Tile::kRows * stride_row; }

  // Load one tile into the stage that starts `bytes` after `tile`. `rows` and `cols` as in load_tile().
  NVRTC_ATTN_DEVICE void load(Element* tile, int bytes, index_t stride_row, index_t stride_col, int rows, int cols) {
    // Read again, so that what follows from it is worked out for each tile and takes no register in between.
    int tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    int const row0 = tid / Tile::kChunks;
    int const chunk = tid % Tile::kChunks;
    uint32_t const destination =
        cute::cast_smem_ptr_to_uint(tile) + bytes + kElementBytes * Tile::chunk_offset(row0, chunk);
    if (kColumns == 1 && kThreads % Tile::kChunks != 0 && row0 >= kRowsPerPass) return;
    index_t const step = index_t(kRowsPerPass) * stride_row;
    if constexpr (kAligned && !kLegacy) {
      if (rows >= Tile::kRows && cols >= Tile::kCols) {
#pragma unroll
        for (int pass = kPasses - 1; pass >= 0; --pass) {
          int const row = row0 + pass * kRowsPerPass;
          uint32_t to;
          static_assert(kColumns == 1 || kThreads % 8 == 0, "the swizzle does not see the columns of a thread");
          if constexpr (kRowsPerPass % 8 == 0 || (kRowsPerPass & (kRowsPerPass - 1)) == 0) {
            // The swizzle sees the row modulo eight, in which a pass adds bits of its own: a constant xor and distance.
            int const swizzle = Tile::swizzle(pass * kRowsPerPass);
            to = (destination ^ uint32_t(16 * swizzle)) + pass * kRowsPerPass * Tile::kCols * kElementBytes;
          } else {
            to = cute::cast_smem_ptr_to_uint(tile) + bytes + kElementBytes * Tile::chunk_offset(row, chunk);
          }
          if ((pass + 1) * kRowsPerPass <= Tile::kRows || row < Tile::kRows) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              if (kColumns > 1 && chunk + c * kThreads >= Tile::kChunks) break;
              asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to + 16 * c * kThreads),
                           "l"(source + c * kThreads * Tile::kVec));
            }
          }
          source -= step;
        }
      } else {
#pragma unroll 1
        for (int row = row0 + (kPasses - 1) * kRowsPerPass; row >= 0; row -= kRowsPerPass, source -= step) {
          if (kOverhang > 0 && row >= Tile::kRows) continue;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            int const column = chunk + c * kThreads;
            if (kColumns > 1 && column >= Tile::kChunks) break;
            uint32_t const to =
                cute::cast_smem_ptr_to_uint(tile) + kElementBytes * Tile::chunk_offset(row, column) + bytes;
            // No byte is read when the size is zero, so the address may lie outside the tensor.
            int const size = row < rows && column * Tile::kVec < cols ? 16 : 0;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                         "l"(source + c * kThreads * Tile::kVec), "r"(size));
          }
        }
      }
    } else {
      Element const* const first_row =
          source - index_t(row0 + (kPasses - 1) * kRowsPerPass) * stride_row - index_t(chunk * Tile::kVec) * stride_col;
      load_tile<Tile, kThreads, kAligned, kLegacy>(tile + bytes / kElementBytes, first_row, stride_row, stride_col,
                                                   rows, cols, tid);
      source -= kPasses * step;
    }
    if constexpr (kOverhang > 0) source += kOverhang * stride_row;
  }
};

}  // namespace nvrtc_attn
