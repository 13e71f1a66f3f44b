// Shared memory -> operand fragments. Rows and columns are those of the tile; `lane` is the lane of the warp.
//
// "a" / "b": the left operand (16 rows) and the right operand (8 or 16 columns) of one k-step.
// Plain: the contraction runs along the tile's rows' contiguous direction. "trans": it runs down the tile's rows.
#pragma once
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/util.hpp>

#include "mma.cuh"
#include "smem_tile.cuh"

namespace nvrtc_attn {

NVRTC_ATTN_DEVICE float2 load_shared_float2(unsigned address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}

NVRTC_ATTN_DEVICE cute::uint128_t const& as_vector(void const* p) {
  return *reinterpret_cast<cute::uint128_t const*>(p);
}

// Left operand, tile stored [row][k]: rows row0..row0+15, k-step `step`.
template <class Tile, class Element>
NVRTC_ATTN_DEVICE FragmentA<Element> load_a(Element const* tile, int row0, int step, int lane) {
  FragmentA<Element> a;
  cute::SM75_U32x4_LDSM_N::copy(as_vector(tile + Tile::chunk_offset(row0 + (lane & 15), 2 * step + (lane >> 4))),
                                a.x[0], a.x[1], a.x[2], a.x[3]);
  prepare(a);
  return a;
}

// The odd half step (8 elements of a 16-bit type): only x[0] and x[1] are set.
template <class Tile, class Element>
NVRTC_ATTN_DEVICE FragmentA<Element> load_a_half_step(Element const* tile, int row0, int step, int lane) {
  FragmentA<Element> a;
  a.x[2] = a.x[3] = 0;
  cute::SM75_U32x2_LDSM_N::copy(as_vector(tile + Tile::chunk_offset(row0 + (lane & 15), 2 * step)), a.x[0], a.x[1]);
  return a;
}

// Right operand, tile stored [column][k]: 16 columns from col0 as two fragments of 8.
template <class Tile, class Element>
NVRTC_ATTN_DEVICE void load_b_pair(Element const* tile, int col0, int step, int lane, FragmentB<Element>& b0,
                                   FragmentB<Element>& b1) {
  int const row = col0 + (lane & 7) + ((lane >> 4) << 3);
  cute::SM75_U32x4_LDSM_N::copy(as_vector(tile + Tile::chunk_offset(row, 2 * step + ((lane >> 3) & 1))), b0.x[0],
                                b0.x[1], b1.x[0], b1.x[1]);
  prepare(b0);
  prepare(b1);
}

template <class Tile, class Element>
NVRTC_ATTN_DEVICE void load_b_pair_half_step(Element const* tile, int col0, int step, int lane, FragmentB<Element>& b0,
                                             FragmentB<Element>& b1) {
  b0.x[1] = b1.x[1] = 0;
  cute::SM75_U32x2_LDSM_N::copy(as_vector(tile + Tile::chunk_offset(col0 + (lane & 15), 2 * step)), b0.x[0], b1.x[0]);
}

// Right operand, tile stored [k][column], 16-bit: rows k0..k0+15, 16 columns from chunk `chunk` as two fragments.
template <class Tile, class Element>
NVRTC_ATTN_DEVICE void load_b_trans_pair(Element const* tile, int k0, int chunk, int lane, FragmentB<Element>& b0,
                                         FragmentB<Element>& b1) {
  static_assert(sizeof(Element) == 2);
  cute::SM75_U16x8_LDSM_T::copy(as_vector(tile + Tile::chunk_offset(k0 + (lane & 15), chunk + (lane >> 4))), b0.x[0],
                                b0.x[1], b1.x[0], b1.x[1]);
}

// The same for the last 8 columns of a tile that is 8 modulo 16 wide.
template <class Tile, class Element>
NVRTC_ATTN_DEVICE void load_b_trans_single(Element const* tile, int k0, int chunk, int lane, FragmentB<Element>& b0) {
  static_assert(sizeof(Element) == 2);
  cute::SM75_U16x4_LDSM_T::copy(as_vector(tile + Tile::chunk_offset(k0 + (lane & 15), chunk)), b0.x[0], b0.x[1]);
}

// Right operand of float32, tile stored [k][column]: rows k0..k0+7, 8 columns from col0.
// kPermuted: contraction order of accumulator_as_a (rows 2t and 2t + 1); otherwise natural (rows t and t + 4).
template <class Tile, bool kPermuted>
NVRTC_ATTN_DEVICE void load_b_trans(float const* tile, int k0, int col0, int lane, FragmentB<float>& b) {
  int const t = lane & 3;
  int const col = col0 + (lane >> 2);
  b.x[0] = __float_as_uint(tile[Tile::offset(k0 + (kPermuted ? 2 * t : t), col)]);
  b.x[1] = __float_as_uint(tile[Tile::offset(k0 + (kPermuted ? 2 * t + 1 : t + 4), col)]);
  prepare(b);
}

// Left operand, tile stored [k][row], 16-bit: rows of the operand are tile columns row0..row0+15.
template <class Tile, class Element>
NVRTC_ATTN_DEVICE FragmentA<Element> load_a_trans(Element const* tile, int k0, int row0, int lane) {
  static_assert(sizeof(Element) == 2);
  FragmentA<Element> a;
  int const k = k0 + (lane & 7) + ((lane >> 4) << 3);
  cute::SM75_U16x8_LDSM_T::copy(as_vector(tile + Tile::chunk_offset(k, row0 / Tile::kVec + ((lane >> 3) & 1))), a.x[0],
                                a.x[1], a.x[2], a.x[3]);
  return a;
}

// Left operand of float32, tile stored [k][row], natural contraction order.
template <class Tile>
NVRTC_ATTN_DEVICE FragmentA<float> load_a_trans(float const* tile, int k0, int row0, int lane) {
  FragmentA<float> a;
  int const t = lane & 3;
  int const row = row0 + (lane >> 2);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a.x[i] = __float_as_uint(tile[Tile::offset(k0 + t + (i >> 1) * 4, row + (i & 1) * 8)]);
  }
  prepare(a);
  return a;
}

// The same loads for main loops. A lane's address is computed once; every other fragment of the tile is that address with
// a compile-time xor (the swizzled chunk bits) and a compile-time offset, so one LOP3 a k-step instead of six instructions
// a fragment. Holds because rows move by multiples of 8, which the swizzle does not see, and because a tile and a row of
// it start at a multiple of the swizzled span.
template <class Tile>
struct LaneAddress {
  uint32_t base;  // shared-memory address in bytes

  LaneAddress() = default;
  // Chunk `chunk` of row `row`. What is added later must not carry into the bits of `chunk`.
  template <class Element>
  NVRTC_ATTN_DEVICE LaneAddress(Element const* tile, int row, int chunk) {
    int const swizzled = (chunk & ~Tile::kSwizzleMask) | ((chunk ^ Tile::swizzle(row)) & Tile::kSwizzleMask);
    base = cute::cast_smem_ptr_to_uint(tile) + 16 * (row * Tile::kChunks + swizzled);
  }
  NVRTC_ATTN_DEVICE uint32_t at(int row_offset, int chunk_offset) const {
    return (base ^ uint32_t(16 * (chunk_offset & Tile::kSwizzleMask))) +
           16 * (row_offset * Tile::kChunks + (chunk_offset & ~Tile::kSwizzleMask));
  }
  NVRTC_ATTN_DEVICE LaneAddress moved(int bytes) const {  // to another tile of the same shape
    LaneAddress other;
    other.base = base + bytes;
    return other;
  }
};

// Where a lane starts for each kind of fragment; add row and chunk offsets with at().
template <class Tile, class Element>
NVRTC_ATTN_DEVICE LaneAddress<Tile> lane_address_a(Element const* tile, int row0, int lane) {
  return LaneAddress<Tile>(tile, row0 + (lane & 15), lane >> 4);
}
template <class Tile, class Element>
NVRTC_ATTN_DEVICE LaneAddress<Tile> lane_address_b(Element const* tile, int row0, int lane) {
  return LaneAddress<Tile>(tile, row0 + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}
template <class Tile, class Element>
NVRTC_ATTN_DEVICE LaneAddress<Tile> lane_address_b_trans(Element const* tile, int row0, int chunk0, int lane) {
  return LaneAddress<Tile>(tile, row0 + (lane & 15), chunk0 + (lane >> 4));
}

NVRTC_ATTN_DEVICE void ldmatrix_x4(uint32_t address, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3) {
  asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address));
}
NVRTC_ATTN_DEVICE void ldmatrix_x2(uint32_t address, uint32_t& r0, uint32_t& r1) {
  asm volatile("ldmatrix.sync.aligned.x2.m8n8.shared.b16 {%0, %1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(address));
}
NVRTC_ATTN_DEVICE void ldmatrix_trans_x4(uint32_t address, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3) {
  asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address));
}
NVRTC_ATTN_DEVICE void ldmatrix_trans_x2(uint32_t address, uint32_t& r0, uint32_t& r1) {
  asm volatile("ldmatrix.sync.aligned.x2.trans.m8n8.shared.b16 {%0, %1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(address));
}
NVRTC_ATTN_DEVICE uint32_t load_shared(uint32_t address) {
  return *static_cast<uint32_t const*>(__cvta_shared_to_generic(address));
}

// load_b_trans for main loops: columns 8 * (tile0 + d), d < kD, of rows k0 + 8 * step. The address of a column is made once,
// steps are immediate offsets.
template <class Tile, bool kPermuted, int kD>
struct TransposedColumns {
  // With shares that are whole swizzle spans the place of column d is known at compile time relative to that of tile0.
  static constexpr bool kWholeSpans = 2 * kD % (Tile::kSwizzleMask + 1) == 0;
  LaneAddress<Tile> even, odd;  // the two rows of a fragment
  int chunk0;

  NVRTC_ATTN_DEVICE TransposedColumns(float const* tile, int k0, int tile0, int lane) {
    int const t = lane & 3;
    int const column = lane >> 2;
    int const chunk = (kWholeSpans ? 2 * tile0 : 0) + (column >> 2);
    chunk0 = kWholeSpans ? 0 : 2 * tile0;
    even = LaneAddress<Tile>(tile, k0 + (kPermuted ? 2 * t : t), chunk).moved(4 * (column & 3));
    odd = LaneAddress<Tile>(tile, k0 + (kPermuted ? 2 * t + 1 : t + 4), chunk).moved(4 * (column & 3));
  }
  NVRTC_ATTN_DEVICE void load(FragmentB<float>& b, int step, int d) const {
    b.x[0] = load_shared(even.at(8 * step, chunk0 + 2 * d));
    b.x[1] = load_shared(odd.at(8 * step, chunk0 + 2 * d));
    prepare(b);
  }
};

}  // namespace nvrtc_attn
