// Gradients of captured arrays whose elements the distance of query and key selects (T5's buckets, a table of distances), where dS
// is what they get: sums of dS along its diagonals, made of the tile that lies in shared memory for dQ, by products with zeros
// and ones. Terms have dS's 16 bits, as those of dq and dk have.
#pragma once
#include "../../collective/modifier.cuh"
#include "../../common/fragment_load.cuh"
#include "../../common/mma.cuh"
#include "../common/wgmma.cuh"

namespace nvrtc_attn {

// Of kRows queries by 128 keys, in blocks of 8 x 8: block (a, c) is of queries 8 a.. and keys 8 c... Column c of the sheared
// tile has blocks (a, (a + c) % 16), in whose row g the diagonals from 8 c - g on begin, or those from 8 (c - 16) - g on where
// a + c is 16 or more. A product of 16 x 16 by 16 x 8 adds two such blocks row by row: to its rows 0..7 or, of the latter
// kind, to rows 8..15. Each of the eight consumer warps has two columns, so that no product is of zeros alone.
//
// With the next kRows queries a diagonal is kRows / 8 columns further on, modulo 16 and then 8..15 for 0..7: a warp's columns move
// with it, so that sums go on over tiles, and what few instructions are for a tile: the kernel has none to spare
// (docs/experiments.md, "Gradients of captured arrays").
//
// NaN or infinity in dS reaches all diagonals of its block, as 0 times it; dq and dk of its row and column have it anyway.
template <class Element, int kRows>
struct TileDiagonals {
  static_assert(kRows % 16 == 0 && kRows <= 128);
  static constexpr int kShift = kRows / 8;
  AccTile sums
      [2];  // of columns `column` and the next: value e has row g, or 8 + g from 2 on, and column 2 t + e % 2 of a block
  int column;  // even

  NVRTC_ATTN_DEVICE void begin(int warp) {
    column = 2 * warp;
#pragma unroll
    for (AccTile& sum : sums) {
#pragma unroll
      for (float& x : sum) x = 0.0f;
    }
  }

  // `tile`: shared address of two slabs of 64 keys, the second `slab_bytes` behind the first. By all eight warps.
  NVRTC_ATTN_DEVICE void add(unsigned tile, unsigned slab_bytes, int lane) {
    constexpr uint32_t kOne = cute::is_same_v<Element, half_t> ? 0x3c00u : 0x3f80u;
    uint32_t const own = lane >> 3 == (lane & 3) ? kOne << (lane << 2 & 16) : 0u;  // of eight rows the g-th
    // Matrix lane / 8 of a load: block a or a + 1 (bit 0) of the first or second column (bit 1).
    int const from = column + (lane >> 4) + (lane >> 3 & 1);
    unsigned const row = tile + (lane & 15) * kSlabRowBytes;
#pragma unroll
    for (int a = 0; a < kShift; a += 2) {
      int const block = (from + a) & 15;
      FragmentB<Element> blocks[2];
      ldmatrix_trans_x4(row + a * 8 * kSlabRowBytes + (block >> 3) * slab_bytes + (((block ^ lane) & 7) << 4),
                        blocks[0].x[0], blocks[0].x[1], blocks[1].x[0], blocks[1].x[1]);
      // Whether they are beyond the last key block: of the second column, block a + 1 is so one step sooner.
      bool const beyond = column + a >= 16;
      bool const next_beyond = column + a >= 14;
      uint32_t const low = beyond ? 0u : own, high = beyond ? own : 0u;
      uint32_t const next_low = next_beyond ? 0u : own, next_high = next_beyond ? own : 0u;
      mma<Element, false>(sums[0], FragmentA<Element>{{low, high, low, high}}, blocks[0]);
      mma<Element, false>(sums[1], FragmentA<Element>{{low, high, next_low, next_high}}, blocks[1]);
    }
  }

  // Whether no later query tile adds to the first half of the sums, of `column` and the next.
  NVRTC_ATTN_DEVICE bool complete() const { return column + kShift >= 16; }
  // The second half in place of the first.
  NVRTC_ATTN_DEVICE void leave_first() {
    column -= 16;
#pragma unroll
    for (AccTile& sum : sums) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[e] = sum[2 + e];
        sum[2 + e] = 0.0f;
      }
    }
  }
  // To the next query tile.
  NVRTC_ATTN_DEVICE void advance() { column += kShift; }

  // give(distance, sum) of the diagonals of the first half: key less query, from the tile's first of both. By whole warps.
  template <class Give>
  NVRTC_ATTN_DEVICE void each(int lane, Give&& give) const {
    int const g = lane >> 2;
    int const t = lane & 3;
    // [0] of the column before the first, [1] of the first, [2] of the second.
    float v[3];
#pragma unroll
    for (int x = 0; x < 3; ++x) {
      v[x] = 0.0f;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float const before = x < 2 ? sums[x][e] : 0.0f;
        float const own = x > 0 ? sums[x - 1][e] : 0.0f;
        v[x] += turned_to_diagonals(before, own, lane, e);
      }
    }
    // Over the quad: lane 0 keeps the first, lane 2 the last, lanes 1 and 3 the one between.
    bool const upper = t & 2;
    bool const odd = t & 1;
    float const outer = (upper ? v[2] : v[0]) + __shfl_xor_sync(0xffffffffu, upper ? v[0] : v[2], 2);
    float const inner = v[1] + __shfl_xor_sync(0xffffffffu, v[1], 2);
    float const sum = (odd ? inner : outer) + __shfl_xor_sync(0xffffffffu, odd ? outer : inner, 1);
    if (t != 3) give(8 * (column + t - 1) + g, sum);
  }
};

}  // namespace nvrtc_attn
