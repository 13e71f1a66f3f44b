// Which key tiles a persistent thread block of the Hopper backward kernel works on.
//
// Key tiles of `head_group` key heads are neighbours, those with the lowest keys (causal: the longest) first; one head a group
// without a band, so that neighbouring blocks share Q, dO and dq in L2. Every block takes the tile of its own index first
// and then the next that nobody has taken, from a counter in global memory that the kernel before this one has set to zero.
// Each tile is worked on by one block in a fixed order, so dk and dv do not depend on who takes it.
#pragma once
#include "../params.cuh"
#include "uniform.cuh"

namespace nvrtc_attn {

NVRTC_ATTN_DEVICE int* tile_counter(HopperBackwardParams const& params) {
  return reinterpret_cast<int*>(params.row_lse + params.counter_offset);
}

struct KeyTile {
  int n_block;
  int h;  // key head
  int b;
};

// Tile number t < num_tiles; kDescending: those with the highest keys of a group first.
template <bool kDescending>
NVRTC_ATTN_DEVICE KeyTile key_tile(HopperBackwardParams const& params, int t) {
  int const group_tiles = params.head_group * params.num_n_blocks;
  int const group = uniform_quotient(t, group_tiles);
  int const rest = t - group * group_tiles;
  int const first_head = group * params.head_group;
  int const heads = min(params.head_group, uniform_quotient(params.num_tiles, params.num_n_blocks) - first_head);
  int const n_block = uniform_quotient(rest, heads);
  int const head = first_head + rest - n_block * heads;
  int const b = uniform_quotient(head, params.num_heads_kv);
  return {kDescending ? params.num_n_blocks - 1 - n_block : n_block, head - b * params.num_heads_kv, b};
}

// What was announced at a shared address, in uniform registers.
NVRTC_ATTN_DEVICE KeyTile read_key_tile(unsigned address) {
  int n_block, h, b;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(n_block), "=r"(h) : "r"(address) : "memory");
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(b) : "r"(address + 8) : "memory");
  return {uniform(n_block), uniform(h), uniform(b)};
}

}  // namespace nvrtc_attn
