// kKeySlots == 2: dk and dv leave the Hopper backward kernel through shared memory. The consumers put dv of a key tile in a
// place of its own and dk in the slot that held its keys, and go on to the next key tile, whose keys are in the other slot;
// the idle warps of the loading group store both to global memory, whole rows at a time, and give the slots back.
#pragma once
#include "gradient_store.cuh"
#include "helpers.cuh"
#include "shape.cuh"

namespace nvrtc_attn {

// A warp's 16 x 8 kTiles accumulators times `factor` -> rows `row0` to `row0` + 15 of slabs of kSlab bytes.
template <class Element, int kSlab, int kTiles>
NVRTC_ATTN_DEVICE void store_to_slabs(unsigned to, AccTile const (&c)[1][kTiles], float factor, int row0, int lane) {
  static_assert(kTiles % 2 == 0, "four matrices an instruction");
  // Matrix lane / 8: rows 0..7 or 8..15 (bit 0), this chunk of 8 columns or the next one (bit 1); this lane names one row.
  unsigned const row = to + (row0 + (lane & 15)) * kSlabRowBytes;
#pragma unroll
  for (int d = 0; d < kTiles; d += 2) {
    int const chunk = d % 8 + (lane >> 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row + d / 8 * kSlab +
                                                                                          ((chunk ^ (lane & 7)) << 4)),
                 "r"(pack2<Element>(c[0][d][0] * factor, c[0][d][1] * factor)),
                 "r"(pack2<Element>(c[0][d][2] * factor, c[0][d][3] * factor)),
                 "r"(pack2<Element>(c[0][d + 1][0] * factor, c[0][d + 1][1] * factor)),
                 "r"(pack2<Element>(c[0][d + 1][2] * factor, c[0][d + 1][3] * factor))
                 : "memory");
  }
}

// Rows of slabs of kSlab bytes -> `rows` rows of a gradient from `to` on, by the warps of the relay: whole rows of kChunks
// chunks of 8 columns, of which `cols` columns exist.
template <class Element, int kSlab, int kChunks, int kWarps>
NVRTC_ATTN_DEVICE void store_from_slabs(Element* to, index_t stride_row, unsigned from, int rows, int cols, int warp,
                                        int lane) {
#pragma unroll 4
  for (int i = 32 * warp + lane; i < rows * kChunks; i += 32 * kWarps) {
    int const row = i / kChunks, chunk = i % kChunks;
    uint4 const words =
        load_shared_uint4(from + chunk / 8 * kSlab + row * kSlabRowBytes + ((chunk % 8 ^ (row & 7)) << 4));
    if (8 * chunk < cols) *reinterpret_cast<uint4*>(to + index_t(row) * stride_row + 8 * chunk) = words;
  }
}

// By warp `warp` of the relay.
template <class Traits, class Barriers>
NVRTC_ATTN_DEVICE void relay_gradients(HopperBackwardParams const& params, Barriers const& barriers, unsigned smem,
                                       int warp) {
  using Shape = HopperBackwardShape<Traits>;
  using Result = ResultK<Traits>;
  constexpr int kWarps = Shape::kRelayWarps;
  for (unsigned turn = 0;; turn = (turn + 1) & 3) {
    int const slot = int(turn & 1);
    barriers.full_k(slot).wait(turn >> 1);
    KeyTile const tile = read_key_tile(smem + Shape::kOffsetTile + 16 * slot);
    if (tile.n_block < 0) return;
    barriers.full_relay().wait(turn & 1);
    if (!(Traits::kVarlen && tile.b == params.batch)) {
      SeqlenInfo<Traits::kVarlen, Traits::kSequsedK> const seqlen(params, tile.b);
      int const n0 = tile.n_block * Shape::kBlockN;
      int const rows = min(seqlen.len_k_slot - n0, Shape::kBlockN);
      store_from_slabs<Result, Shape::kSlabK, Shape::kTilesDv, kWarps>(
          key_rows<Result>(params.dv, params.dv_stride_b, params.dv_stride_n, params.dv_stride_h, tile, seqlen, n0),
          params.dv_stride_n, smem + Shape::kOffsetRelay, rows, params.head_dim_v, warp, lane_id());
      store_from_slabs<Result, Shape::kSlabK, Shape::kTilesD, kWarps>(
          key_rows<Result>(params.dk, params.dk_stride_b, params.dk_stride_n, params.dk_stride_h, tile, seqlen, n0),
          params.dk_stride_n, smem + slot * Shape::kBytesK, rows, params.head_dim, warp, lane_id());
    }
    fence_async_proxy();  // the slot of K is the copy engine's again
    __syncwarp();
    if (lane_id() == 0) {
      barriers.empty_relay().arrive();
      barriers.empty_k(slot).arrive();
    }
  }
}

}  // namespace nvrtc_attn
