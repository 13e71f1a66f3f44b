// Warps that neither load nor multiply, in the backward kernel on Hopper: the loading group's last one orders the additions to
// dq (hopper/backward/ordered_dq.cuh), its others and those of a fourth group make dropout's decisions
// (hopper/backward/keep_words_transposed.cuh), or its others compute what products begin with (hopper/backward/diagonal_warps.cuh).
//
// They follow the schedule of the loading warp, which announces a key tile to them as soon as it has all copies of the tile
// before under way, one or two query tiles before the consumers come to it.
//
// Shared memory of theirs: which tile it is (16 bytes), barriers, kNumStages x a slot of keep words.
#pragma once
#include "../common/barrier.cuh"
#include "kept_queries.cuh"
#include "schedule.cuh"

namespace nvrtc_attn {

template <class Traits>
struct HelperShape {
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kThreads = Traits::kKeepWords ? 128 : 0;                       // of the fourth group
  static constexpr int kMakers = !Traits::kKeepWords ? 0 : Traits::kOrdered ? 6 : 7;  // that group is the first four
  static constexpr int kDiagonalWarps = !Traits::kBeginsProducts ? 0 : Traits::kOrdered ? 2 : 3;
  static constexpr int kWarps = kMakers + kDiagonalWarps + (Traits::kOrdered ? 1 : 0);
  static constexpr int kKeepUnits = 8;                        // arrivals that complete a slot of keep words
  static constexpr int kBytesKeep = Traits::kBlockN * 4 * 4;  // a slot: a word for each key and lane % 4
  static constexpr int kOffsetBarriers = 16;
  // Places of the mbarriers; of what has slots, that of the first.
  enum Place : int {
    kFullTile,
    kEmptyTile,
    kTurn,
    kAdded,
    kFullKeep,
    kEmptyKeep = kFullKeep + kStages,
    kCount = kEmptyKeep + kStages
  };
  static constexpr int kOffsetKeep = kOffsetBarriers + kCount * Mbarrier::kBytes;
  static constexpr int kBytes = kWarps == 0 ? 0 : kOffsetKeep + (Traits::kKeepWords ? kStages * kBytesKeep : 0);
};

template <class Traits>
struct HelperBarriers {
  using Shape = HelperShape<Traits>;
  unsigned base;  // shared address of the region
  NVRTC_ATTN_DEVICE Mbarrier full_tile() const { return at(Shape::kFullTile); }
  NVRTC_ATTN_DEVICE Mbarrier empty_tile() const { return at(Shape::kEmptyTile); }
  NVRTC_ATTN_DEVICE Mbarrier turn() const { return at(Shape::kTurn); }    // dq of a query tile may be added
  NVRTC_ATTN_DEVICE Mbarrier added() const { return at(Shape::kAdded); }  // it has been
  NVRTC_ATTN_DEVICE Mbarrier full_keep(int stage) const { return at(Shape::kFullKeep + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_keep(int stage) const { return at(Shape::kEmptyKeep + stage); }
  NVRTC_ATTN_DEVICE unsigned keep(int stage) const { return base + Shape::kOffsetKeep + stage * Shape::kBytesKeep; }

  NVRTC_ATTN_DEVICE void init(int consumer_warps) const {
    if constexpr (Shape::kWarps > 0) {
      full_tile().init(1);
      empty_tile().init(Shape::kWarps);
      turn().init(1);
      added().init(consumer_warps);
      for (int stage = 0; stage < Shape::kStages; ++stage) {
        full_keep(stage).init(Shape::kKeepUnits);
        empty_keep(stage).init(consumer_warps);
      }
    }
  }

  // By the loading warp, for key tile number `count` of this thread block (negative n_block: the last).
  NVRTC_ATTN_DEVICE void announce(KeyTile const& tile, unsigned parity, bool issuer) const {
    if constexpr (Shape::kWarps > 0) {
      empty_tile().wait(parity ^ 1);
      if (issuer) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(base), "r"(tile.n_block), "r"(tile.h),
                     "r"(tile.b), "r"(0)
                     : "memory");
        full_tile().arrive();
      }
    }
  }

 private:
  NVRTC_ATTN_DEVICE Mbarrier at(int place) const { return {base + Shape::kOffsetBarriers + Mbarrier::kBytes * place}; }
};

struct QueryTile {
  int h, m;
};

// Read where it is needed: these warps have 24 or 32 registers.
NVRTC_ATTN_DEVICE int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Calls action(work, h, m, left, next) for every query tile m of every key tile, in the order of the consumers, by one warp.
// `left` counts down to 1 at the last one of a key tile; kTileWords: `next` is the one after, if there is one, looked for by the
// whole warp.
template <class Traits, class Action>
NVRTC_ATTN_DEVICE void follow_schedule(HopperBackwardParams const& params, HelperBarriers<Traits> const& barriers,
                                       Action&& action) {
  for (unsigned parity = 0;; parity ^= 1) {
    barriers.full_tile().wait(parity);
    KeyTile const tile = read_key_tile(barriers.base);
    __syncwarp();
    if (lane_id() == 0) barriers.empty_tile().arrive();
    if (tile.n_block < 0) return;
    if (Traits::kVarlen && tile.b == params.batch) continue;
    KeyTileWork<Traits> const work(params, tile, tile.b);
    int h = tile.h * params.heads_per_group;
    int m = work.range.start;
    if constexpr (Traits::kTileWords) {
      KeptQueries<Traits> const kept{params, work};
      int in_head = 0;
      int left = kept.total(h);
      if (left > 0) kept.begin(h, m, in_head);
#pragma unroll 1
      for (; left > 0; --left) {
        QueryTile next{h, m};
        if (left > 1) kept.next(next.h, next.m, in_head);
        action(work, h, m, left, next);
        h = next.h;
        m = next.m;
      }
    } else {
#pragma unroll 1
      for (int left = work.range.count * params.heads_per_group; left > 0; --left) {
        action(work, h, m, left, QueryTile{});
        work.range.next(h, m);
      }
    }
  }
}

}  // namespace nvrtc_attn
