// Which query tiles a persistent thread block works on, in order. Static: tile t of a round goes to block t.
//
// Tiles of equal cost (no band): query tiles of a head vary fastest, so that neighbouring blocks share K and V in L2.
// With a band the cost of a tile depends on its rows: heads are taken in sections whose K and V fit L2, inside a section the
// last query tiles (the longest, when causal) come first, and every other round runs backwards, which evens out the
// sums: a block that had the longest tile of one round has the shortest of the next.
#pragma once
#include "../params.cuh"

namespace nvrtc_attn {

struct WorkTile {
  int m_block;
  int h;
  int b;
};

template <bool kBand>
struct TileScheduler {
  int num_tiles;
  int num_m_blocks;
  int num_heads;
  int section_heads;
  int all_heads;  // of all batch entries
  int round = 0;

  NVRTC_ATTN_DEVICE explicit TileScheduler(HopperForwardParams const& params)
      : num_tiles(params.num_tiles),
        num_m_blocks(params.num_m_blocks),
        num_heads(params.num_heads),
        section_heads(params.section_heads),
        all_heads(params.num_tiles / params.num_m_blocks) {}

  // The next tile, false when there is none.
  NVRTC_ATTN_DEVICE bool next(WorkTile& tile) {
    int const width = int(gridDim.x);
    int const position = kBand && (round & 1) ? width - 1 - int(blockIdx.x) : int(blockIdx.x);
    int const t = round * width + position;
    ++round;
    if (t >= num_tiles) return false;  // only in the last round
    int head;
    if constexpr (kBand) {
      int const section = t / (section_heads * num_m_blocks);
      int const first = section * section_heads;
      int const heads = min(section_heads, all_heads - first);
      int const rest = t - first * num_m_blocks;
      tile.m_block = num_m_blocks - 1 - rest / heads;
      head = first + rest % heads;
    } else {
      tile.m_block = t % num_m_blocks;
      head = t / num_m_blocks;
    }
    tile.b = head / num_heads;
    tile.h = head - tile.b * num_heads;
    return true;
  }
};

}  // namespace nvrtc_attn
