// Deterministic dq: the key tiles of a query tile add to it one after the other, always in the same order.
//
// Each query tile has a counter in global memory, of the key tiles that have added to it. The last warp of the loading group
// waits until that is what it must be, lets the consumers add, waits until all of them have, and counts on. The consumers
// so see two barriers in shared memory and no latency of L2. A warp that counts on must have everything that the consumers'
// warps sent before performed at gpu scope: their arrival at the barrier releases it to that warp, whose fence includes it.
//
// Order: tiles of the highest keys are handed out first and add first. A tile waits for tiles alone that have been handed out
// before, so that the one that was handed out first of all unfinished ones never waits: no block needs another one to be
// resident. With that order a band keeps nobody waiting: a tile begins at the first query tile that sees its keys, the one
// after it (of lower keys) at an earlier query tile, and comes to the same one later. The other order, longest tiles
// first, would have each tile wait for the one before from the first query tile on.
#pragma once
#include "../../collective/gradient_accumulator.cuh"
#include "helpers.cuh"

namespace nvrtc_attn {

// Of the query tile whose statistics begin at float `first` of the workspace; behind the counter of key tiles.
template <int kBlockM>
NVRTC_ATTN_DEVICE int* additions_to(HopperBackwardParams const& params, index_t first) {
  return tile_counter(params) + 1 + first / kBlockM;
}

// How many key tiles add to queries [m0, m0 + kBlockM) before tile n_block does.
template <class Traits>
NVRTC_ATTN_DEVICE int additions_before(PositionMask<Traits::kBand> const& mask, int m0, int n_block) {
  return mask.template last_key_tile<Traits::kBlockM, Traits::kBlockN>(m0) - n_block;
}

// While the consumers work on one query tile the turn for the next one is awaited already: a fence and the way to L2 and back
// take as long as a query tile does at head dim 128.
template <class Traits>
NVRTC_ATTN_DEVICE void order_additions(HopperBackwardParams const& params, HelperBarriers<Traits> const& barriers) {
  unsigned parity = 0;
  bool announced = false;  // the turn of this query tile
  follow_schedule<Traits>(
      params, barriers, [&](KeyTileWork<Traits> const& work, int h, int m, int left, QueryTile next) {
        if (lane_id() == 0) {
          auto counter = [&](int head, int query_tile) {
            return additions_to<Traits::kBlockM>(
                params, index_t(work.seqlen.batch_index) * params.delta_stride_b +
                            index_t(head) * params.delta_stride_h +
                            accumulator_row0<Traits::kVarlen, Traits::kBlockM>(work.seqlen.q_row0, work.tile.b) +
                            query_tile * Traits::kBlockM);
          };
          auto before = [&](int head, int query_tile) {
            if constexpr (Traits::kTileWords) {
              int const last =
                  work.mask.template last_key_tile<Traits::kBlockM, Traits::kBlockN>(query_tile * Traits::kBlockM);
              return tile_order_line(params, work.tile.b, head, query_tile).count(work.tile.n_block + 1, last + 1);
            }
            return additions_before<Traits>(work.mask, query_tile * Traits::kBlockM, work.tile.n_block);
          };
          if (!announced) {
            int const* const at = counter(h, m);
            while (load_acquire(at) != before(h, m)) {
            }
            barriers.turn().arrive();
          }
          announced = false;
          if (left > 1) {
            int next_h = h, next_m = m;
            if constexpr (Traits::kTileWords) {
              next_h = next.h;
              next_m = next.m;
            } else {
              work.range.next(next_h, next_m);
            }
            int const* const at = counter(next_h, next_m);
            int const wanted = before(next_h, next_m);
            while (!barriers.added().test(parity)) announced = announced || load_acquire(at) == wanted;
          } else {
            barriers.added().wait(parity);
          }
          if (announced) barriers.turn().arrive();
          asm volatile("fence.acq_rel.gpu;" ::: "memory");
          asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(counter(h, m)), "r"(before(h, m) + 1) : "memory");
        }
        __syncwarp();
        parity ^= 1;
      });
}

}  // namespace nvrtc_attn
