// Warps of the loading group of the Hopper backward kernel that compute what S^T = K Q^T begins with, ahead of the consumers, where
// a score_mod adds what the distance of query and key decides (hopper/common/begun_products.cuh). Rows of these tiles are keys.
#pragma once
#include "../common/begun_products.cuh"
#include "barriers.cuh"
#include "helpers.cuh"

namespace nvrtc_attn {

// They fill slots of Q as the loading warp does, for the query tiles of every key tile in the order of the consumers.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void compute_diagonals_beside_queries(HopperBackwardParams const& params,
                                                        BackwardBarriers<Shape> const& barriers,
                                                        HelperBarriers<Traits> const& helpers, unsigned smem) {
  using Begun = typename Shape::Begun;
  using Modifier = ModifierOf<Traits>;
  static_assert(Modifier::kAddsDiagonal, "nothing but the distance's value is added");
  unsigned const to = smem + Shape::kOffsetDiagonals;
  RingPosition<Shape::kStages> slot;
  int start = Begun::kNoStart;
  int next_h = -1, next_m = -1;  // of the tile whose diagonals go on from those before
  bool first = true;             // of a key tile
  follow_schedule<Traits>(params, helpers, [&](KeyTileWork<Traits> const& work, int h, int m, int left, QueryTile) {
    Modifier const modifier(params, work.tile.b, h);
    int const i = m * Shape::kBlockM, j = work.n0 + Shape::kBlockN - 1;
    bool const again = first || h != next_h || m != next_m;
    Begun::template compute<Shape::kDiagonalWarps>(to, start, again, slot.stage, barriers.empty_q(slot.stage),
                                                   slot.parity ^ 1, barriers.full_q(slot.stage), params.scale,
                                                   [&](int d) { return modifier.diagonal(i + d, j).x0; });
    slot.advance();
    next_h = h, next_m = m + 1;
    first = left == 1;
  });
}

}  // namespace nvrtc_attn
