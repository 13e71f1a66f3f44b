// Which key tiles a persistent thread block of the Hopper backward kernels works on, and which query tiles go with one.
//
// Key tiles of `head_group` key heads are neighbours, those with the lowest keys (causal: the longest) first; one head a group
// without a band, so that neighbouring blocks share Q, dO and dq in L2. Every block takes the tile of its own index first
// and then the next that nobody has taken, from a counter in global memory that the kernel before this one, or the host, has
// set to zero.
// Packed: the real key tiles, from a list (hopper/backward/list_key_tiles.cuh), once for every few key heads.
// Each tile is worked on by one block in a fixed order, so dk and dv do not depend on who takes it. With kSplit a key head stands
// for num_splits virtual ones, each with a part of its query heads; their tiles add to the same dk and dv, in any order.
#pragma once
#include "../../collective/mask.cuh"
#include "../../collective/seqlen.cuh"
#include "../../params.cuh"
#include "../common/tile_list.cuh"
#include "../common/uniform.cuh"

namespace nvrtc_attn {

NVRTC_ATTN_DEVICE int* tile_counter(HopperBackwardParams const& params) {
  return reinterpret_cast<int*>(params.row_lse + params.counter_offset);
}

struct KeyTile {
  int n_block;
  int h;  // key head; kSplit: the virtual one
  int b;
};

// Tile number t < num_tiles; kDescending: those with the highest keys of a group first. kParts: t < whole_key_tiles.
template <bool kDescending, bool kSplit, bool kParts = false>
NVRTC_ATTN_DEVICE KeyTile key_tile(HopperBackwardParams const& params, int t) {
  int const group_tiles = params.head_group * params.num_n_blocks;
  int const group = uniform_quotient(t, group_tiles);
  int const rest = t - group * group_tiles;
  int const first_head = group * params.head_group;
  int const heads = min(params.head_group, (kParts ? params.batch * params.num_heads_kv
                                                   : uniform_quotient(params.num_tiles, params.num_n_blocks)) -
                                               first_head);
  int const n_block = uniform_quotient(rest, heads);
  int const head = first_head + rest - n_block * heads;
  int const heads_kv = kSplit ? params.num_heads_kv * params.num_splits : params.num_heads_kv;
  int const b = uniform_quotient(head, heads_kv);
  return {kDescending ? params.num_n_blocks - 1 - n_block : n_block, head - b * heads_kv, b};
}

// kParts: what the number t < num_tiles of some work means. The first num_whole key tiles are one block's each; of every later
// one there are num_splits parts, and those of the same place are neighbours, so that they read the same rows. dk and dv of a
// part have a slot of dkv_accum of their own (parts_apart), or are added up in that of the tile.
struct TilePart {
  int tile;   // for key_tile
  int place;  // among the parts
  int slot;   // -1 of a whole tile

  NVRTC_ATTN_DEVICE TilePart(HopperBackwardParams const& params, int t) : tile(t), place(0), slot(-1) {
    if (t < params.num_whole) return;
    int const shared = num_shared(params);
    int const part = t - params.num_whole;
    place = uniform_quotient(part, shared);
    int const of_shared = part - place * shared;
    slot = params.parts_apart ? part : of_shared;
    tile = params.num_whole + of_shared;
  }
  static NVRTC_ATTN_DEVICE int num_shared(HopperBackwardParams const& params) {
    return params.batch * params.num_heads_kv * params.num_n_blocks - params.num_whole;
  }
};

NVRTC_ATTN_DEVICE TileList key_tile_list(HopperBackwardParams const& params) { return {params.counters}; }

// Tile number t of packed sequences; a negative n_block where there are no more.
template <bool kSplit>
NVRTC_ATTN_DEVICE KeyTile packed_key_tile(HopperBackwardParams const& params, int t) {
  TileList const list = key_tile_list(params);
  int const heads_kv = kSplit ? params.num_heads_kv * params.num_splits : params.num_heads_kv;
  int const heads = uniform(list.heads());  // a divisor of all
  int const in_pass = uniform(list.count()) * heads;
  if (in_pass == 0) return {-1, 0, 0};
  int const pass = uniform_quotient(t, in_pass);
  if (pass * heads >= heads_kv) return {-1, 0, 0};
  int const rest = t - pass * in_pass;
  int const i = uniform_quotient(rest, heads);
  int2 const found = list[i];
  return {uniform(found.y), pass * heads + rest - i * heads, uniform(found.x)};
}

// The key head of a virtual one.
template <class Traits>
NVRTC_ATTN_DEVICE int key_head(HopperBackwardParams const& params, int h) {
  return Traits::kSplit ? uniform_quotient(h, params.num_splits) : h;
}

// What a tile that the consumers have read says in the place of h: its key head, or with kSplit its first query head.
template <class Traits>
NVRTC_ATTN_DEVICE int announced_first_head(HopperBackwardParams const& params, KeyTile const& tile) {
  return Traits::kSplit ? tile.h : tile.h * params.heads_per_group;
}
template <class Traits>
NVRTC_ATTN_DEVICE int announced_key_head(HopperBackwardParams const& params, KeyTile const& tile) {
  return Traits::kSplit ? uniform_quotient(tile.h, params.heads_per_group * params.num_splits) : tile.h;
}

// What was announced at a shared address, in uniform registers.
NVRTC_ATTN_DEVICE KeyTile read_key_tile(unsigned address) {
  int n_block, h, b;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(n_block), "=r"(h) : "r"(address) : "memory");
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(b) : "r"(address + 8) : "memory");
  return {uniform(n_block), uniform(h), uniform(b)};
}

// The work of one key tile: `count` query tiles from `first` on, of every query head of the group. They begin at `start` and
// go round, so that thread blocks that work on the same head at the same time add to different rows of dq. kDescending: from
// the last one down, so that causal key tiles that begin together read the same rows until each comes to its diagonal.
template <class Traits>
struct QueryRange {
  static constexpr bool kDescending = Traits::kDescending;
  int first, count, start;
  NVRTC_ATTN_DEVICE QueryRange(HopperBackwardParams const& params, PositionMask<Traits::kBand> const& mask,
                               int n_block) {
    int last;
    mask.template query_tiles<Traits::kBlockM>(n_block * Traits::kBlockN, Traits::kBlockN, first, last);
    if constexpr (Traits::kOneKeyTile) {  // dq of rows that see nothing is written too
      first = 0;
      last = ceil_div(mask.len_q, Traits::kBlockM);
    }
    count = max(last - first, 0);
    start = first;
    // With tiles of bias and dbias neighbouring blocks had better be at the same rows of those: 0.7 % at S 2048, 1.6 % at 256.
    constexpr bool kTogether =
        Traits::kBand || Traits::kVarlen || Traits::kOrdered || (Traits::kBiasTiles && Traits::kDbiasStore);
    if constexpr (!kTogether) start = min(n_block * params.query_step >> 12, max(count - 1, 0));
    if constexpr (kDescending) start = first + max(count - 1, 0);
    // Packed: as if there were as many queries as keys, and round again where there are fewer. With kSplit it spills 4 bytes.
    if constexpr (Traits::kVarlen && !Traits::kBand && !Traits::kOrdered && !Traits::kSplit) {
      int const place = n_block * (Traits::kBlockN / Traits::kBlockM);
      start = place - uniform_quotient(place, max(count, 1)) * count;
    }
  }
  NVRTC_ATTN_DEVICE void next(int& h, int& m) const {
    if constexpr (kDescending) {
      if (m-- == first) {
        m = start;
        ++h;
      }
    } else {
      if (++m == first + count) m = first;
      if (m == start) ++h;
    }
  }
};

// kParts: how many query tiles a part has, those of all query heads in a row, which is its first, and its slot of dkv_accum. The
// loading warp finds them and tells the consumers. No part has two more than another.
struct PartTurns {
  int left = 0, m = 0, h = 0, slot = -1;

  template <class Range>
  NVRTC_ATTN_DEVICE void find(HopperBackwardParams const& params, Range const& range, TilePart const& part, int hk) {
    int const parts = part.slot < 0 ? 1 : params.num_splits;
    int const total = range.count * params.heads_per_group;
    int const begin = uniform_quotient(part.place * total, parts);
    int const head = uniform_quotient(begin, max(range.count, 1));
    left = uniform_quotient((part.place + 1) * total, parts) - begin;
    if constexpr (Range::kDescending) {
      m = range.start - (begin - head * range.count);
    } else {
      int const turned = begin - head * range.count + (range.start - range.first);
      m = range.first + (turned < range.count ? turned : turned - range.count);
    }
    h = hk * params.heads_per_group + head;
    slot = part.slot;
  }
  NVRTC_ATTN_DEVICE void store(unsigned address) const {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(left), "r"(m), "r"(h), "r"(slot)
                 : "memory");
  }
};

// A key tile with the sequence that it belongs to (`b`) and the query tiles that see it.
template <class Traits>
struct KeyTileWork {
  KeyTile tile;
  int n0;  // first key
  SeqlenInfo<Traits::kVarlen, Traits::kSequsedK> seqlen;
  PositionMask<Traits::kBand> mask;
  QueryRange<Traits> range;

  NVRTC_ATTN_DEVICE KeyTileWork(HopperBackwardParams const& params, KeyTile const& tile_, int b)
      : tile(tile_),
        n0(tile.n_block * Traits::kBlockN),
        seqlen(params, b),
        mask(mask_params<Traits>(params), seqlen.len_q, seqlen.len_k),
        range(params, mask, tile.n_block) {}
};

}  // namespace nvrtc_attn
