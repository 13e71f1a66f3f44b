// Tiles of a 16-bit bias and of its gradient for transposed scores: both live in the slots of dS.
//
// A slot is rows of queries in slabs of 64 keys, 128 bytes a row, in the copy engine's 128-byte swizzle (hopper/common/wgmma.cuh).
// The copy engine brings the bias into it, each warp takes the 16 keys that are its own, and puts dS there when it has it:
// the operand of dQ, and the gradient of the bias, which the copy engine takes away. Rows and columns beyond the tensor
// arrive as zeros and are not written. A bias of one row for all queries is one row in each slab.
#pragma once
#include "../../collective/scores.cuh"
#include "../../common/fragment_load.cuh"
#include "gradient_store.cuh"
#include "../common/tma.cuh"

namespace nvrtc_attn {

// A box of shared memory to the tensor of `map`, at column d, row m, head h, batch b; what lies outside is left out. Issued by
// one thread, after whose commit_stores and wait_stores_read the box may be overwritten.
NVRTC_ATTN_DEVICE void store_box(TensorMap const& map, unsigned from, int d, int m, int h, int b) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                   reinterpret_cast<unsigned long long>(&map)),
               "r"(from), "r"(d), "r"(m), "r"(h), "r"(b)
               : "memory");
}
NVRTC_ATTN_DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
NVRTC_ATTN_DEVICE void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Where a warp's bias lies in a slab: what a lane names for ldmatrix, and the way to the next 16 queries.
template <class Traits>
struct TransposedBias {
  using Bias = typename Traits::Bias;
  unsigned offset;
  unsigned step;

  NVRTC_ATTN_DEVICE TransposedBias(BackwardParams const& params, int warp, int lane) {
    bool const one_row = params.bias_stride_m == 0;
    // As in store_transposed: bit 0 of lane / 8 is the half of the keys, bit 1 that of the queries.
    int const row = one_row ? 0 : (lane & 7) + (lane >> 4 << 3);
    int const chunk = 2 * warp + (lane >> 3 & 1);
    offset = row * kSlabRowBytes + ((chunk ^ (row & 7)) << 4);
    step = one_row ? 0 : 16 * kSlabRowBytes;
  }

  // Raw products of 16 keys and 8 * kTiles queries -> scores.
  template <int kTiles>
  NVRTC_ATTN_DEVICE void apply(AccTile (&s)[1][kTiles], unsigned slab, ScoreMap<Traits> const& map) const {
#pragma unroll
    for (int m = 0; m < kTiles; m += 2) {
      unsigned v[4];  // [half of the queries][half of the keys]: queries 2t and 2t + 1
      ldmatrix_trans_x4(slab + offset + m / 2 * step, v[0], v[1], v[2], v[3]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        ElementPair<Bias> const b = *reinterpret_cast<ElementPair<Bias> const*>(&v[k]);
        AccTile& tile = s[0][m + k / 2];
        tile[2 * (k & 1)] = map.score(tile[2 * (k & 1)], to_float(b.x));
        tile[2 * (k & 1) + 1] = map.score(tile[2 * (k & 1) + 1], to_float(b.y));
      }
    }
  }
};

}  // namespace nvrtc_attn
