// Which of a key tile's query tiles a mask leaves anything of, in the Hopper backward kernel.
#pragma once
#include "../../collective/tile_words.cuh"
#include "schedule.cuh"

namespace nvrtc_attn {

// kTileWords: those of a key tile's query tiles that have something, of every query head of the group in turn, as
// QueryRange goes through all of them. Uniform over the warp.
template <class Traits>
struct KeptQueries {
  HopperBackwardParams const& params;
  KeyTileWork<Traits> const& work;

  NVRTC_ATTN_DEVICE int end() const { return work.range.first + work.range.count; }
  NVRTC_ATTN_DEVICE TileLine line(int h) const { return tile_line(params, work.tile.b, h, work.tile.n_block); }
  NVRTC_ATTN_DEVICE int of_head(int h) const { return uniform(line(h).count(work.range.first, end())); }
  NVRTC_ATTN_DEVICE int total(int first_head) const {
    int sum = 0;
#pragma unroll 1
    for (int h = first_head; h < first_head + params.heads_per_group; ++h) sum += of_head(h);
    return sum;
  }
  // The first one from `m` on, or round from the beginning: of a head that has one.
  NVRTC_ATTN_DEVICE int from(int h, int m) const {
    int found = line(h).first_from(m, end());
    if (found >= end()) found = line(h).first_from(work.range.first, end());
    return uniform(found);
  }
  // To the first one of all, from head h on; there is one.
  NVRTC_ATTN_DEVICE void begin(int& h, int& m, int& in_head) const {
    for (in_head = of_head(h); in_head == 0; in_head = of_head(++h)) {
    }
    m = from(h, work.range.start);
  }
  // To the next; there is one. `in_head`: how many of the head's are left, this one included.
  NVRTC_ATTN_DEVICE void next(int& h, int& m, int& in_head) const {
    if (--in_head == 0) {
      ++h;
      begin(h, m, in_head);
    } else {
      m = from(h, m + 1);
    }
  }
};

}  // namespace nvrtc_attn
