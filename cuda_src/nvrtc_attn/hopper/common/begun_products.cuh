// A score_mod that adds what the distance of query and key decides (T5's buckets, a table of distances), as the accumulators that
// Q K^T is added to: scores take no operation more. Warps of the loading group compute the values, one for each diagonal of a
// tile, ahead of the consumers (diagonal_warps.cuh of hopper/forward and hopper/backward).
//
// Diagonal d of a tile is that of d = column - row + kRows - 1, the first column and the last row first: columns are keys in the
// forward pass, queries in the backward pass. Of the n-th eight columns thread (g, t) of a warp whose first row is w has the
// values of rows g and g + 8, columns 2 t and 2 t + 1: diagonals 8 a + o, 8 a + o + 1 and eight less of each, with
// a = n + (kRows - w) / 8 - 1 and o = 2 t - g + 7. Of each eight columns two values are new to the thread: 8 bytes, at place
// `a` of a row for each of the 14 `o`. Lanes that read at a time have neighbouring rows, whose pitch puts them in other banks.
//
// The tile after, which has the next columns of the same rows, the lower ones or with kAscending the higher ones, differs by the
// diagonals of kColumns / 8 places at one end: it begins so many places further down or up in the rows, and only those are new.
// At the end of a row it begins at the other end with all of its diagonals, and so does a tile of other rows wherever there is
// room. Tiles that consumers may still read, one for each slot of the columns' operand, fit beside it.
#pragma once
#include "../../collective/modifier.cuh"
#include "barrier.cuh"
#include "uniform.cuh"
#include "wgmma.cuh"

namespace nvrtc_attn {

// The traits of those to whom scores are products that began so.
template <class Traits>
struct ProductsBegun : Traits {
  using Modifier = void;
};

// What a product begins with, so that `scale` times the sum has `value` added to it. A finite value stays finite.
NVRTC_ATTN_DEVICE float unscaled(float value, float scale) {
  float const x = __fdividef(value, scale);
  return fabsf(value) <= kLargest ? fminf(fmaxf(x, -kLargest), kLargest) : x;
}

template <int kRows, int kColumns, int kSlots, bool kAscending>
struct BegunProducts {
  static constexpr int kOffsets = 14;
  static constexpr int kPlaces = (kRows + kColumns) / 8;  // of a tile in a row
  static constexpr int kNewPlaces = kColumns / 8;         // of those not the tile before's
  static constexpr int kRowPlaces = (kSlots + 1) * kPlaces;
  static constexpr int kPitch = kRowPlaces | 1;
  static constexpr int kOffsetStarts = kOffsets * kPitch * 8;  // where the tile of each slot begins
  static constexpr int kBytes = kOffsetStarts + 16;
  static constexpr int kPairs = kRows + kColumns - 2;  // of neighbouring diagonals
  // Those that the tile before does not have. Descending, six more: the last eight places share pairs with the next ones.
  static constexpr int kFirstNewPair = kAscending ? kRows - 2 : 0;
  static constexpr int kNewPairs = kAscending ? kColumns : kColumns + 6;
  static_assert(kRows % 16 == 0 && kColumns % 8 == 0 && kSlots <= 4, "whole eights, words of starts");

  // Where tiles begin, of which there was none yet.
  static constexpr int kNoStart = kRowPlaces;
  // Whether the tile after the one that begins at `start` has new diagonals alone to be computed, if it is the next one.
  static NVRTC_ATTN_DEVICE bool goes_on(int start) {
    return kAscending ? start + kNewPlaces + kPlaces <= kRowPlaces : start >= kNewPlaces;
  }
  // Where it begins; `all`: with all diagonals.
  static NVRTC_ATTN_DEVICE int next_start(int start, bool all) {
    int const places = all ? kPlaces : kNewPlaces;
    if constexpr (kAscending) {
      start += places;
      return start + kPlaces > kRowPlaces ? 0 : start;
    } else {
      start -= places;
      return start < 0 ? kRowPlaces - kPlaces : start;
    }
  }

  // By the kWarps warps behind the first one of the loading group: the tile after the one that begins at `start`, into a slot
  // as soon as it is free. `again`: it does not go on from that one. `value`: of diagonal d, which may wait for memory.
  template <int kWarps, class Value>
  static NVRTC_ATTN_DEVICE void compute(unsigned smem, int& start, bool again, int slot, Mbarrier empty,
                                        unsigned parity, Mbarrier full, float scale, Value&& value) {
    // T5's buckets need all of 32 registers: what a thread is, is asked again.
    constexpr int kStep = 31 * kWarps;
    auto first_pair = [] { return 31 * ((thread_again() >> 5) - 1) + lane_again(); };
    // Those that a lane has of most tiles, before the slot is free: most of their time is waiting for memory.
    constexpr int kAhead = (kNewPairs - 1) / kStep + 1;
    float ahead[kAhead];
#pragma unroll
    for (int x = 0; x < kAhead; ++x) ahead[x] = value(kFirstNewPair + first_pair() + x * kStep);
    bool const all = again || !goes_on(start);
    start = next_start(start, all);
    empty.wait(parity);
    if (all) {
#pragma unroll 1
      for (int d = first_pair(); d - lane_again() < kPairs; d += kStep) {
        store_values<false>(smem, start, d, value(d), scale);
      }
    } else {
#pragma unroll
      for (int x = 0; x < kAhead; ++x) {
        store_values<true>(smem, start, kFirstNewPair + first_pair() + x * kStep, ahead[x], scale);
      }
    }
    if (threadIdx.x == 32) store_start(smem, slot, start);
    __syncwarp();
    if (lane_again() == 0) full.arrive();
  }

  // This thread's accumulators of the tile in a slot, in the warp whose first row in the tile is `warp_row0`.
  template <int kTilesN>
  static NVRTC_ATTN_DEVICE void load(AccTile (&s)[1][kTilesN], unsigned smem, int slot, int warp_row0) {
    int const lane = lane_again();
    int const o = 2 * (lane & 3) - (lane >> 2) + 7;
    int const a = load_shared_uniform(smem + kOffsetStarts + 4 * slot) + (kRows - warp_row0) / 8 - 1;
    unsigned const from = smem + 8 * unsigned(o * kPitch + a - 1);
    load_pair(s[0][0][2], s[0][0][3], from);
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
      AccTile& v = s[0][n];
      load_pair(v[0], v[1], from + 8 * (n + 1));
      if (n + 1 < kTilesN) {
        s[0][n + 1][2] = v[0];
        s[0][n + 1][3] = v[1];
      }
    }
  }

 private:
  // (x, y) of diagonals d and d + 1 of the tile that begins at `start`; kNew: of those that are not the tile before's.
  template <bool kNew>
  static NVRTC_ATTN_DEVICE void store(unsigned smem, int start, int d, float x, float y) {
    int const o = d & 7, a = d >> 3;
    unsigned const to = smem + 8 * unsigned(o * kPitch + start + a);
    if (!kNew || kAscending || a < kNewPlaces) store_pair(to, x, y);
    if (o + 8 < kOffsets && a > 0) store_pair(to + 8 * (8 * kPitch - 1), x, y);
  }
  static NVRTC_ATTN_DEVICE void store_start(unsigned smem, int slot, int start) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + kOffsetStarts + 4 * slot), "r"(start) : "memory");
  }

  // Diagonals d, one a lane, of whole warps: the last lane only says what comes after the one before it. `value`: of d.
  template <bool kNew>
  static NVRTC_ATTN_DEVICE void store_values(unsigned smem, int start, int d, float value, float scale) {
    float const own = unscaled(value, scale);
    float const next = __shfl_down_sync(0xffffffffu, own, 1);
    if (lane_again() < 31 && d < (kNew ? kFirstNewPair + kNewPairs : kPairs)) {
      store<kNew>(smem, start, d, own, next);
    }
  }

  static NVRTC_ATTN_DEVICE void store_pair(unsigned to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
  }
  static NVRTC_ATTN_DEVICE void load_pair(float& x, float& y, unsigned from) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(from));
  }
};

}  // namespace nvrtc_attn
