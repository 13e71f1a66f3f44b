// Which query tiles a persistent thread block works on, in order. Dense: static, no counter in global memory, nothing to reset.
//
// Tiles of equal cost (no band): query tiles of a head vary fastest, so that neighbouring blocks share K and V in L2.
// With a band the cost of a tile depends on its rows. When causal it is affine in them, so the i-th longest and the i-th
// shortest tile of a head make pairs of equal cost. params.pair_rounds rounds hand out one pair a block, heads in order.
// The rest goes out tile by tile, longest first, every other round backwards: a block that had the longest tile of one
// round has the shortest of the next. The host picks the number of rounds that comes out most even.
//
// Packed: the real tiles, from a list (hopper/common/tile_list.cuh), once for every few heads. Every block takes the tile
// of its own index first and then the next that nobody has taken, which it asks for two tiles before. With kTickets dense
// ones are handed out so, too, asked for one tile before: where a fixed order would not be even, or the blocks not alone.
#pragma once
#include "../../params.cuh"
#include "../common/tile_list.cuh"
#include "../common/uniform.cuh"

namespace nvrtc_attn {

struct WorkTile {
  int m_block;
  int h;
  int b;
};

// Number i of `count` things of a head, moved on by one in every round: where `count` divides the number of blocks, a block
// would otherwise always have the same one, and with it the tile that is only partly filled, or always a full one.
NVRTC_ATTN_DEVICE int moved_on(int i, int head, int count) {
  int const sum = i + uniform_quotient(head * count, int(gridDim.x));
  return sum - uniform_quotient(sum, count) * count;
}

template <bool kBand, bool kVarlen, bool kTickets = false>
struct TileScheduler {
  using Tile = WorkTile;
  HopperForwardParams const& params;
  int round = 0;

  NVRTC_ATTN_DEVICE explicit TileScheduler(HopperForwardParams const& params_) : params(params_) {}

  // The next tile, false when there is none.
  NVRTC_ATTN_DEVICE bool next(WorkTile& tile) {
    int const t = round * int(gridDim.x) + int(blockIdx.x);
    ++round;
    if (t >= params.num_tiles) return false;
    int const head = uniform_quotient(t, params.num_m_blocks);
    tile.m_block = moved_on(t - head * params.num_m_blocks, head, params.num_m_blocks);
    tile.b = uniform_quotient(head, params.num_heads);
    tile.h = head - tile.b * params.num_heads;
    return true;
  }
};

template <>
struct TileScheduler<true, false, false> {
  using Tile = WorkTile;
  HopperForwardParams const& params;
  int step = 0;  // twice the round, plus one for the second tile of a pair

  NVRTC_ATTN_DEVICE explicit TileScheduler(HopperForwardParams const& params_) : params(params_) {}

  NVRTC_ATTN_DEVICE bool next(WorkTile& tile) {
    int const num_m_blocks = params.num_m_blocks;
    int const round = step / 2;
    int head;
    if (round < params.pair_rounds) {
      int const pair = round * int(gridDim.x) + int(blockIdx.x);
      head = uniform_quotient(pair, params.head_pairs);
      // Pairs cost the same only up to rounding. The head that the single tiles finish keeps its outermost pairs first.
      int i = pair - head * params.head_pairs;
      if (head < params.tail_first_head) i = moved_on(i, head, params.head_pairs);
      int const longest = num_m_blocks - 1 - i;
      tile.m_block = step & 1 ? i : longest;
      step += i == longest ? 2 : 1;  // the middle tile of an odd number is alone
    } else {
      // `whole` heads are left and, when `done` > 0, one before them without its outermost `done` pairs.
      int const done = params.tail_done;
      int const row = round - params.pair_rounds;
      int t = row * int(gridDim.x) + (row & 1 ? int(gridDim.x) - 1 - int(blockIdx.x) : int(blockIdx.x));
      step += 2;
      int heads = params.tail_whole_heads;
      int const outer = done * heads;  // tiles at either end that the partial head does not take part in
      int const inner = (num_m_blocks - 2 * done) * (heads + (done > 0));
      if (t >= 2 * outer + inner) return false;  // only in the last round
      int rank = 0;                              // 0: the longest
      head = params.tail_first_head + (done > 0);
      if (t >= outer + inner) {
        t -= outer + inner;
        rank = num_m_blocks - done;
      } else if (t >= outer) {
        t -= outer;
        rank = done;
        heads += done > 0;
        head -= done > 0;
      }
      int const quotient = uniform_quotient(t, heads);
      tile.m_block = num_m_blocks - 1 - (rank + quotient);
      head += t - quotient * heads;
    }
    // ptxas loses the uniformity of what the branches above merge.
    head = uniform(head);
    tile.m_block = uniform(tile.m_block);
    step = uniform(step);
    tile.b = uniform_quotient(head, params.num_heads);
    tile.h = head - tile.b * params.num_heads;
    return true;
  }
};

// A tile of packed sequences, as it is in the list: with all that must be known of its sequence, so that nobody reads lengths
// from memory between two tiles.
struct alignas(16) PackedTile {
  int b, m_block;  // b == batch: a part of the rows of no sequence, and nothing else
  int q_row0, len_q;
  int k_row0, len_k;
  int h;  // not of the list, which all heads go through
  int unused;
};

NVRTC_ATTN_DEVICE TileListOf<PackedTile> query_tile_list(HopperForwardParams const& params) {
  return {reinterpret_cast<int*>(params.softmax_partial)};
}

// Two tiles ahead of the tile that is worked on: the number of the one after the next is on its way, and the entry of the next.
// One after the other, when they are needed, they are three ways to L2 and back, a microsecond a tile.
template <bool kBand>
struct TileScheduler<kBand, true, false> {
  using Tile = PackedTile;
  HopperForwardParams const& params;
  int heads = 0;    // of a pass over the list, a divisor of all
  int in_pass = 0;  // tiles
  int next_h = -1;  // of the next tile; negative: there is none
  SpreadWords next_entry;
  int ticket;  // of the tile after it, without the first ones of all blocks; zero in all lanes but one

  NVRTC_ATTN_DEVICE explicit TileScheduler(HopperForwardParams const& params_) : params(params_) {}

  // First of all, by all lanes.
  NVRTC_ATTN_DEVICE void begin(bool issuer) {
    take(issuer);
    heads = uniform(query_tile_list(params).heads());
    in_pass = uniform(query_tile_list(params).count()) * heads;
    look_up(int(blockIdx.x));
  }

  NVRTC_ATTN_DEVICE bool next(PackedTile& tile) const {
    if (next_h < 0) return false;
    tile = {next_entry.word(0),
            next_entry.word(1),
            next_entry.word(2),
            next_entry.word(3),
            next_entry.word(4),
            next_entry.word(5),
            next_h};
    return true;
  }

  // Once for every tile that next() has given, by all lanes.
  NVRTC_ATTN_DEVICE void look_ahead(bool issuer) {
    look_up(int(gridDim.x) + uniform(ticket));
    take(issuer);
  }

 private:
  NVRTC_ATTN_DEVICE void look_up(int t) {
    next_h = -1;
    if (in_pass > 0) {
      int const pass = uniform_quotient(t, in_pass);
      int const rest = t - pass * in_pass;
      int const i = uniform_quotient(rest, heads);
      if (pass * heads < params.num_heads) {
        next_h = pass * heads + rest - i * heads;
        next_entry.load(&query_tile_list(params)[i]);
      }
    }
    next_h = uniform(next_h);  // ptxas loses that of what branches merge
  }
  NVRTC_ATTN_DEVICE void take(bool issuer) {
    ticket = 0;
    if (issuer) ticket = count_up(query_tile_list(params).counter());
  }
};

// Dense: a block that started late, because others had its multiprocessor, takes fewer tiles. The host has set the counter to
// zero. Head after head; with a band params.head_group heads together, the longest tiles of all of them first, so that
// nothing but short ones is left when the first block finds no more.
template <bool kBand>
struct TileScheduler<kBand, false, true> {
  using Tile = WorkTile;
  HopperForwardParams const& params;
  int number = int(blockIdx.x);  // of the next tile; zero in all lanes but one, unless it is the first

  NVRTC_ATTN_DEVICE explicit TileScheduler(HopperForwardParams const& params_) : params(params_) {}

  NVRTC_ATTN_DEVICE void begin(bool) {}

  NVRTC_ATTN_DEVICE bool next(WorkTile& tile) {
    int const t = uniform(number);
    if (t >= params.num_tiles) return false;
    int head;
    if constexpr (kBand) {
      int const in_pass = params.head_group * params.num_m_blocks;
      int const first = uniform_quotient(t, in_pass) * params.head_group;
      int const rest = t - first * params.num_m_blocks;
      int const heads = min(params.head_group, params.batch * params.num_heads - first);  // fewer at the end
      int const rank = uniform_quotient(rest, heads);
      tile.m_block = params.num_m_blocks - 1 - rank;
      head = first + rest - rank * heads;
    } else {
      head = uniform_quotient(t, params.num_m_blocks);
      tile.m_block = t - head * params.num_m_blocks;
    }
    tile.b = uniform_quotient(head, params.num_heads);
    tile.h = head - tile.b * params.num_heads;
    return true;
  }

  // Once for every tile that next() has given, by all lanes: the answer takes its time.
  NVRTC_ATTN_DEVICE void look_ahead(bool issuer) {
    number = 0;
    if (issuer) number = int(gridDim.x) + count_up(query_tile_list(params).counter());
  }
};

}  // namespace nvrtc_attn
