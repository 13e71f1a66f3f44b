// Warps of the loading group of the Hopper forward kernel that compute what S = Q K^T begins with, ahead of the consumers, where a
// score_mod adds what the distance of query and key decides (hopper/common/begun_products.cuh). Rows of these tiles are queries.
#pragma once
#include "../common/begun_products.cuh"
#include "load.cuh"

namespace nvrtc_attn {

// They read which query tile it is, and give its slot back, as consumers do, and fill slots of K as the loading warp does.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void compute_diagonals_beside_keys(HopperForwardParams const& params,
                                                     ForwardBarriers<Shape> const& barriers, unsigned smem) {
  using Begun = typename Shape::Begun;
  using Modifier = ModifierOf<Traits>;
  static_assert(Modifier::kAddsDiagonal, "nothing but the distance's value is added");
  RingPosition<Shape::kStagesQ> q_slot;
  RingPosition<Shape::kStages> k_slot;
  int start = Begun::kNoStart;
  while (true) {
    auto const tile = announced_tile<Traits>(barriers, smem, q_slot);
    if (tile.m_block < 0) break;
    __syncwarp();  // all lanes have read
    if (lane_again() == 0) barriers.empty_q(q_slot.stage).arrive();
    q_slot.advance();
    if constexpr (Traits::kVarlen) {
      if (tile.b == params.batch) continue;
    }
    auto const seqlen = seqlen_of<Traits>(params, tile);
    int const m0 = tile.m_block * Shape::kBlockM;
    if (m0 >= seqlen.len_q) continue;
    PositionMask<Traits::kBand> const mask(mask_params<Traits>(params), seqlen.len_q, seqlen.len_k);
    int first, last;
    mask.template key_tiles<Shape::kBlockN>(m0, Shape::kBlockM, first, last);
    Modifier const modifier(params, tile.b, tile.h);
    int const i = m0 + Shape::kBlockM - 1;
#pragma unroll 1
    for (int n = last - 1; n >= first; --n) {
      int const j = n * Shape::kBlockN;
      Begun::template compute<Shape::kDiagonalWarps>(smem + Shape::kOffsetDiagonals, start, n == last - 1, k_slot.stage,
                                                     barriers.empty_k(k_slot.stage), k_slot.parity ^ 1,
                                                     barriers.full_k(k_slot.stage), params.scale,
                                                     [&](int d) { return modifier.diagonal(i, j + d).x0; });
      k_slot.advance();
    }
  }
}

}  // namespace nvrtc_attn
