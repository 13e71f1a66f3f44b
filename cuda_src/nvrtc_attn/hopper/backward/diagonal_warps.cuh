// Warps of the loading group of the Hopper backward kernel that compute what S^T = K Q^T begins with, ahead of the consumers, where
// a score_mod adds what the distance of query and key decides (hopper/common/begun_products.cuh). Rows of these tiles are keys.
#pragma once
#include "../common/begun_products.cuh"
#include "barriers.cuh"
#include "helpers.cuh"

namespace nvrtc_attn {

// They fill slots of Q as the loading warp does, for the query tiles of every key tile in the order of the consumers.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void compute_diagonals(HopperBackwardParams const& params, BackwardBarriers<Shape> const& barriers,
                                         HelperBarriers<Traits> const& helpers, unsigned smem) {
  using Begun = typename Shape::Begun;
  using Modifier = ModifierOf<Traits>;
  static_assert(Modifier::kAddsDiagonal, "nothing but the distance's value is added");
  constexpr int kStep = 31 * Shape::kDiagonalWarps;
  // Values that a lane has of each tile are computed before its slot is free, where most of their time is waiting for memory.
  constexpr int kAhead = (Begun::kNewPairs - 1) / kStep + 1;
  auto first_pair = [] { return 31 * ((thread_again() >> 5) - 1) + lane_again(); };
  unsigned const to = smem + Shape::kOffsetDiagonals;
  RingPosition<Shape::kStages> slot;
  int start = Begun::kNoStart;
  int next_h = -1, next_m = -1;  // of the tile whose diagonals go on from those before
  bool first = true;             // of a key tile
  follow_schedule<Traits>(params, helpers, [&](KeyTileWork<Traits> const& work, int h, int m, int left, QueryTile) {
    Modifier const modifier(params, work.tile.b, h);
    int const i = m * Shape::kBlockM, j = work.n0 + Shape::kBlockN - 1;
    float value[kAhead];
#pragma unroll
    for (int x = 0; x < kAhead; ++x) {
      value[x] = modifier.diagonal(i + Begun::kFirstNewPair + first_pair() + x * kStep, j).x0;
    }
    bool const all = first || h != next_h || m != next_m || !Begun::goes_on(start);
    start = Begun::next_start(start, all);
    barriers.empty_q(slot.stage).wait(slot.parity ^ 1);
    if (all) {
#pragma unroll 1
      for (int d = first_pair(); d - lane_again() < Begun::kPairs; d += kStep) {
        Begun::template store_values<false>(to, start, d, modifier.diagonal(i + d, j).x0, params.scale);
      }
    } else {
#pragma unroll
      for (int x = 0; x < kAhead; ++x) {
        Begun::template store_values<true>(to, start, Begun::kFirstNewPair + first_pair() + x * kStep, value[x],
                                           params.scale);
      }
    }
    if (threadIdx.x == 32) Begun::store_start(to, slot.stage, start);
    __syncwarp();
    if (lane_id() == 0) barriers.full_q(slot.stage).arrive();
    slot.advance();
    next_h = h, next_m = m + 1;
    first = left == 1;
  });
}

}  // namespace nvrtc_attn
