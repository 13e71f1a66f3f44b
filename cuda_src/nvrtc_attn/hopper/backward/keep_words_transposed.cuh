// Dropout in the backward kernel on Hopper: decisions of a tile of keys by queries, made by warps that do nothing else.
//
// The arithmetic (hopper/common/keep_words.cuh: 18 IMAD.WIDE of four cycles and 32 other instructions for a block of four decisions)
// depends on positions alone. In the consumers it would stand between two products; here the three warps of the loading
// group that load nothing and those of a fourth group run one or two query tiles ahead. 32 registers each: with the
// first product as a running sum (17 IMAD.WIDE) two blocks at a time would spill.
//
// Word [key][t] of a slot: half e has a bit for each m, the last one rightmost, that is set when the key keeps query
// 8 m + 2 t + e of the tile: what thread (g, t) of a consumer needs for its key in one load. A block decides four neighbouring
// keys of one query: a maker's lane takes four keys, one t and one e, and all m, which is half of four words.
#pragma once
#include "../common/keep_words.cuh"
#include "helpers.cuh"

namespace nvrtc_attn {

// Two blocks, one round after the other: a flag of each number of the first and then of the second is shifted into the word of
// its key. `low`: lower halves of the counters. A block is a chain of ten rounds of some 22 cycles each, and two of these
// warps a scheduler with one block at a time leave the tensor cores waiting (H200, D 64, S 2048: 0.74 ms). Left alone, ptxas
// puts all of the first block before the second; a store that never happens (`never` is zero) needs a round of both.
NVRTC_ATTN_DEVICE void add_two_blocks(PhiloxStream const& stream, unsigned long long seed, unsigned threshold,
                                      unsigned const (&low)[2], unsigned never, unsigned (&word)[4]) {
  unsigned k0 = unsigned(seed) + kPhiloxWeyl0, k1 = unsigned(seed >> 32);
  unsigned c0[2], c1[2], c2[2], c3[2];
#pragma unroll
  for (int x = 0; x < 2; ++x) multiply_wide(low[x], kPhiloxMultiplier0, c0[x], c2[x]);
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    unsigned high;
    multiply_wide(c0[x] ^ k1, kPhiloxMultiplier1, high, c1[x]);
    c0[x] = high ^ k0;
    c2[x] ^= stream.third2;
    c3[x] = stream.third3;
  }
  k1 += kPhiloxWeyl1;
#pragma unroll
  for (int round = 2; round < 10; ++round) {
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
    unsigned high0[2], low0[2], high1[2], low1[2];
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      multiply_wide(c0[x], kPhiloxMultiplier0, high0[x], low0[x]);
      multiply_wide(c2[x], kPhiloxMultiplier1, high1[x], low1[x]);
    }
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      c0[x] = high1[x] ^ c1[x] ^ k0;
      c1[x] = low1[x];
      c2[x] = round == 2 ? high0[x] ^ c3[x] : high0[x] ^ c3[x] ^ k1;  // third3 has the key
      c3[x] = low0[x];
    }
    if (round % 2 == 1) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "setp.ne.u32 p, %0, 0;\n"
          "@p st.shared.v2.b32 [%0], {%1, %2};\n"
          "}" ::"r"(never),
          "r"(c0[0]), "r"(c0[1]));
    }
  }
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    shift_flag_in(word[0], c0[x], threshold);
    shift_flag_in(word[1], c1[x], threshold);
    shift_flag_in(word[2], c2[x], threshold);
    shift_flag_in(word[3], c3[x], threshold);
  }
}

// Word c: key c of this lane; the flag of a row, eight rows from the one before, is left of the next one's. `start` is the
// position of the lane's first number in the stream; quads of neighbouring lanes have neighbouring groups of four keys.
template <int kRows>
NVRTC_ATTN_DEVICE void keep_flags_of_rows(Dropout const& dropout, unsigned long long start, unsigned never,
                                          unsigned (&word)[4]) {
  unsigned long long const counter = start >> 2;
  unsigned const step = 2 * unsigned(dropout.pitch);  // of counters, to the next row
#pragma unroll
  for (int c = 0; c < 4; ++c) word[c] = 0;
  if (__all_sync(0xffffffffu, (counter ^ (counter + (kRows - 1ull) * step + 1)) >> 32 == 0)) {
    PhiloxStream const stream(dropout.seed, unsigned(counter >> 32));
    unsigned low[2] = {unsigned(counter), unsigned(counter) + step};
#pragma unroll 1
    for (int n = 0; n < kRows / 2; ++n) {
      add_two_blocks(stream, dropout.seed, dropout.threshold, low, never, word);
      low[0] += 2 * step;
      low[1] += 2 * step;
    }
    unsigned const shift = unsigned(start) & 3;
    if (__any_sync(0xffffffffu, shift != 0)) {
      // Lengths that are no multiple of four: key c of a lane is number c + shift, and the last of them belong to the block of
      // the next four keys. Those behind the last quad nobody has: each quad makes kRows / 8 rows of them.
      int const quad = lane_id() >> 2;
      low[0] += 8 - quad + (kRows / 8 * quad - kRows) * step;
      low[1] = low[0] + step;
      unsigned last[4] = {0, 0, 0, 0};
      add_two_blocks(stream, dropout.seed, dropout.threshold, low, never, last);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        last[c] = last[c] >> (2 - kRows / 8) << (kRows - kRows / 8 * (quad + 1));
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) last[c] |= __shfl_xor_sync(0xffffffffu, last[c], offset);
        unsigned const next = __shfl_down_sync(0xffffffffu, word[c], 4);
        last[c] = quad == 7 ? last[c] : next;
      }
#pragma unroll
      for (int turn = 1; turn < 4; ++turn) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          unsigned const moved = c < 3 ? word[c + 1] : last[0];
          word[c] = turn <= shift ? moved : word[c];
        }
#pragma unroll
        for (int c = 0; c < 3; ++c) last[c] = turn <= shift ? last[c + 1] : last[c];
      }
    }
  } else {
    // A counter's upper half changes within these rows: once in 2^34 scores.
#pragma unroll 1
    for (int m = 0; m < kRows; ++m) {
      unsigned long long const first = start + m * 4ull * step;
#pragma unroll
      for (int c = 0; c < 4; ++c) word[c] = word[c] << 1 | (dropout.keep(first + c) ? 1 : 0);
    }
  }
}

// Warp `maker` of HelperShape::kMakers. A query tile is kKeepUnits units, 32 keys and one e each, which the makers take in turn.
template <class Traits>
NVRTC_ATTN_DEVICE void make_keep_words(HopperBackwardParams const& params, HelperBarriers<Traits> const& barriers,
                                       int maker) {
  using Shape = HelperShape<Traits>;
  static_assert(Traits::kBlockN == 128, "units of a tile");
  Dropout const dropout(dropout_params<Traits>(params), 0, 0);  // its row0: that of the first head
  RingPosition<Shape::kStages> slot;
  int unit = maker;  // this warp's next, counted from the first of the query tile
  follow_schedule<Traits>(params, barriers, [&](KeyTileWork<Traits> const& work, int h, int m, int, QueryTile) {
    barriers.empty_keep(slot.stage).wait(slot.parity ^ 1);
#pragma unroll 1
    for (; unit < Shape::kKeepUnits; unit += Shape::kMakers) {
      int const keys = unit / 2 * 32;
      int const e = unit & 1;
      unsigned long long const row = ((unsigned long long)work.tile.b * dropout_heads<Traits>(params) + h) *
                                         (unsigned long long)dropout_rows<Traits>(params) +
                                     unsigned(m * Traits::kBlockM + 2 * (lane_id() & 3) + e);
      unsigned word[4];
      keep_flags_of_rows<Traits::kBlockM / 8>(
          dropout, dropout.row0 + row * dropout.pitch + unsigned(work.tile.n_block * 128 + keys + (lane_id() & ~3)),
          unsigned(params.num_heads) >> 31, word);
      int const lane = lane_id();
      unsigned const to = barriers.keep(slot.stage) + ((keys + (lane & ~3)) * 4 + (lane & 3)) * 4 + 2 * e;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(to + 16 * c), "h"((unsigned short)word[c]) : "memory");
      }
      __syncwarp();
      if (lane_id() == 0) barriers.full_keep(slot.stage).arrive();
    }
    unit -= Shape::kKeepUnits;
    slot.advance();
  });
}

// This thread's two words: of the keys of its accumulators' rows. `warp_keys`: the first key of the warp, of the tile.
struct TransposedKeepWords {
  unsigned word[2];

  NVRTC_ATTN_DEVICE void load(unsigned slot, int warp_keys, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word[r]) : "r"(slot + (4 * (warp_keys + 8 * r) + lane) * 4));
    }
  }

  // Packed P of tile m of kTilesM and of key r: `kept` has a sign where dropout drops, p is zero there.
  template <class Element, int kTilesM>
  NVRTC_ATTN_DEVICE void mark(uint32_t& kept, uint32_t& p, int m, int r) const {
    // p | ~flags & signs
    asm volatile("lop3.b32 %0, %1, %2, 0x80008000, 0xf2;" : "=r"(kept) : "r"(p), "r"(word[r] << (16 - kTilesM + m)));
    if constexpr (cute::is_same_v<Element, half_t>) {
      asm volatile("max.NaN.f16x2 %0, %1, %2;" : "=r"(p) : "r"(kept), "r"(0));
    } else {
      asm volatile("max.NaN.bf16x2 %0, %1, %2;" : "=r"(p) : "r"(kept), "r"(0));
    }
  }
};

}  // namespace nvrtc_attn
