// Dropout decisions of a whole key tile in one register a row.
//
// A Philox block decides four neighbouring columns, of which an accumulator holds two in one thread and two in the
// next. So thread t of a quad computes block t of every 16 columns, and the flags of up to eight such groups travel in
// one word: a few shuffles and byte permutations a row and tile, where shuffles for every block cost a fifth of the
// kernel's time.
//
// What bounds it (H200): IMAD.WIDE takes a scheduler four cycles a warp, LOP3 and the comparisons two. The 17 products
// of a block are 68 cycles, its 19 LOP3, sums and 8 instructions for flags 58: 0.15 ms for 2^28 scores (B 4, H 16, S
// 2048) if everything else runs beside it. Alone, two warps a scheduler reach 96 cycles (with 18 products). Products on
// the FP64 units (exact: two fused multiply-adds that round towards zero and two sums, eight cycles) are slower in
// every mixture.
#pragma once
#include "../../collective/dropout.cuh"
#include "uniform.cuh"

namespace nvrtc_attn {

// A bit to the right of `word`, whether `number` is above the threshold: the carry of a sum.
NVRTC_ATTN_DEVICE void shift_flag_in(unsigned& word, unsigned number, unsigned threshold) {
  asm("{\n"
      ".reg .u32 sum;\n"
      "add.cc.u32 sum, %1, %2;\n"
      "addc.u32 %0, %0, %0;\n"
      "}"
      : "+r"(word)
      : "r"(number), "r"(~threshold));
}

// Byte c of a word belongs to this thread's columns 2t, 2t + 1, 8 + 2t, 8 + 2t + 1 of each group of 16 columns; bit
// 8 - kGroups + g of the byte to group g.
template <int kGroups>
struct KeepWords {
  unsigned word[2];  // of rows i and i + 8

  // Both pairs of group g of row r, as masks for packed 16-bit probabilities.
  NVRTC_ATTN_DEVICE void masks(int r, int g, unsigned& first, unsigned& second) const {
    unsigned const sign = word[r] << (kGroups - 1 - g);
    first = spread_signs<0x9988>(sign);
    second = spread_signs<0xBBAA>(sign);
  }

  // Every byte becomes eight copies of a byte's uppermost bit: bit 3 of a selector asks for that.
  template <unsigned kSelector>
  NVRTC_ATTN_DEVICE static unsigned spread_signs(unsigned a) {
    unsigned d;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(d) : "r"(a), "n"(kSelector));
    return d;
  }
};

// What blocks whose counters have the same upper half have in common. That half enters the first round alone, and the
// second round's product of it does not depend on the lower half; the first round's other product is of zero, and its
// product of the lower half is a sum for counters that are a constant apart. That leaves 17 products of 20.
struct PhiloxStream {
  unsigned third2;  // round 2's contribution to word 2, with its key
  unsigned third3;  // round 3's

  NVRTC_ATTN_DEVICE PhiloxStream(unsigned long long seed, unsigned upper) {
    unsigned high, low;
    multiply_wide(upper ^ unsigned(seed), kPhiloxMultiplier0, high, low);
    unsigned const k1 = unsigned(seed >> 32);
    third2 = high ^ (k1 + kPhiloxWeyl1);
    third3 = low ^ (k1 + 2 * kPhiloxWeyl1);
  }

  // The four numbers of a block. `product` is that of the lower half of its counter and the first multiplier.
  NVRTC_ATTN_DEVICE uint4 numbers(unsigned long long seed, unsigned long long product) const {
    unsigned k0 = unsigned(seed), k1 = unsigned(seed >> 32);
    unsigned high0, low0, high1, low1;
    multiply_wide(unsigned(product >> 32) ^ k1, kPhiloxMultiplier1, high1, low1);
    k0 += kPhiloxWeyl0;
    unsigned c0 = high1 ^ k0, c1 = low1, c2 = third2 ^ unsigned(product), c3;
    multiply_wide(c0, kPhiloxMultiplier0, high0, low0);
    multiply_wide(c2, kPhiloxMultiplier1, high1, low1);
    k0 += kPhiloxWeyl0;
    k1 += 2 * kPhiloxWeyl1;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ third3;
    c3 = low0;
#pragma unroll
    for (int round = 3; round < 10; ++round) {
      k0 += kPhiloxWeyl0;
      k1 += kPhiloxWeyl1;
      multiply_wide(c0, kPhiloxMultiplier0, high0, low0);
      multiply_wide(c2, kPhiloxMultiplier1, high1, low1);
      c0 = high1 ^ c1 ^ k0;
      c1 = low1;
      c2 = high0 ^ c3 ^ k1;
      c3 = low0;
    }
    return make_uint4(c0, c1, c2, c3);
  }

  // The same as four flags: bit 7 of byte c is set when number c is above the threshold.
  NVRTC_ATTN_DEVICE unsigned flags(unsigned long long seed, unsigned threshold, unsigned long long product) const {
    uint4 const n = numbers(seed, product);
    return (n.x > threshold ? 1u << 7 : 0) | (n.y > threshold ? 1u << 15 : 0) | (n.z > threshold ? 1u << 23 : 0) |
           (n.w > threshold ? 1u << 31 : 0);
  }
};

// The words of rows i and i + 8 and the kGroups * 16 columns from n0 (a multiple of 16), made group by group so that
// they can be made between other things. Called by whole warps.
template <int kGroups>
struct KeepMaker {
  static_assert(kGroups <= 8, "a bit of each byte for every 16 columns");
  Dropout const& dropout;
  int i;
  int n0;
  int lane;
  PhiloxStream stream;
  unsigned long long product[2];  // of the lower half of the counter of this thread's next block in each row
  unsigned word[2];
  unsigned shift[2];  // numbers before the row's first in its first block
  bool one_upper_half;

  // NVRTC 13.5 keeps the counters of row starts over the loop over tiles, 4 to 60 bytes of them in local memory, unless the
  // row is hidden: 8 to 16 instructions of 6000 more. NVRTC 13.0 does not.
  NVRTC_ATTN_DEVICE KeepMaker(Dropout const& dropout_, int i_, int n0_, int lane_)
      : dropout(dropout_),
        i(kNewerNvrtc ? opaque(i_) : i_),
        n0(n0_),
        lane(lane_),
        stream(dropout.seed, unsigned(counter(0) >> 32)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      product[r] = (unsigned long long)unsigned(counter(r) + (lane & 3)) * kPhiloxMultiplier0;
      shift[r] = unsigned(start(r)) & 3;
      word[r] = 0;
    }
    unsigned long long const end = counter(1) + 4 * (kGroups + 1);
    one_upper_half = __all_sync(0xffffffffu, (counter(0) ^ end) >> 32 == 0);
  }

  NVRTC_ATTN_DEVICE unsigned long long start(int r) const {
    return dropout.row0 + (unsigned long long)(i + 8 * r) * dropout.pitch + unsigned(n0);
  }
  NVRTC_ATTN_DEVICE unsigned long long counter(int r) const { return start(r) >> 2; }

  // Whether every row starts with a block.
  NVRTC_ATTN_DEVICE bool aligned() const { return __all_sync(0xffffffffu, (shift[0] | shift[1]) == 0); }

  // The next group.
  NVRTC_ATTN_DEVICE void add(unsigned long long seed) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      word[r] = word[r] >> 1 | stream.flags(seed, dropout.threshold, product[r]);
      product[r] += 4 * (unsigned long long)kPhiloxMultiplier0;
    }
  }

  // After all groups: from the thread that made a flag to the thread that has the column.
  template <bool kAligned>
  NVRTC_ATTN_DEVICE KeepWords<kGroups> finish() const {
    int const t = lane & 3;
    KeepWords<kGroups> keep;
    if (kAligned || aligned()) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unsigned const first = __shfl_sync(0xffffffffu, word[r], t >> 1, 4);
        unsigned const second = __shfl_sync(0xffffffffu, word[r], 2 + (t >> 1), 4);
        keep.word[r] = __byte_perm(first, second, t & 1 ? 0x7632 : 0x5410);
      }
    } else {
      // Lengths that are no multiple of four: column x of a group is number x + shift,
      // and the last ones belong to the next group's first block, which the first thread of the quad has.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unsigned const last = stream.flags(dropout.seed, dropout.threshold,
                                           product[r] - (unsigned long long)unsigned(t) * kPhiloxMultiplier0);
        unsigned const next = __shfl_sync(0xffffffffu, (word[r] >> 1 & 0x7f7f7f7fu) | last, 0, 4);
        unsigned bytes[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          unsigned const x = 2 * t + (c & 1) + (c >> 1) * 8 + shift[r];
          unsigned const same = __shfl_sync(0xffffffffu, word[r], int(x >> 2 & 3), 4);
          bytes[c] = (x >= 16 ? next : same) >> ((x & 3) * 8);
        }
        keep.word[r] =
            __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040), __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
      }
    }
    return keep;
  }

  // The same for any tile, more slowly: where a counter's upper half changes within it, once in 2^34 scores.
  NVRTC_ATTN_DEVICE KeepWords<kGroups> words_of_any() const {
    KeepWords<kGroups> keep;
    keep.word[0] = keep.word[1] = 0;
#pragma unroll 1
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll 1
      for (int r = 0; r < 2; ++r) {
        unsigned const bits = dropout.keep_bits(i + 8 * r, n0 + 16 * g, lane);
        unsigned const flags = (bits & 1) << 7 | (bits & 2) << 14 | (bits & 4) << 21 | (bits & 8) << 28;
        if (r == 0) {
          keep.word[0] = keep.word[0] >> 1 | flags;
        } else {
          keep.word[1] = keep.word[1] >> 1 | flags;
        }
      }
    }
    return keep;
  }
};

// All at once, in a loop, for kernels whose output leaves no registers to do anything beside it.
template <int kGroups>
NVRTC_ATTN_DEVICE KeepWords<kGroups> keep_words(Dropout const& dropout, int i, int n0, int lane) {
  asm volatile("" : "+r"(i), "+r"(lane));  // what follows from them is made again for every tile
  KeepMaker<kGroups> maker(dropout, i, n0, lane);
  if (!maker.one_upper_half || !maker.aligned()) return maker.words_of_any();
#pragma unroll 1
  for (int g = 0; g < kGroups; ++g) {
    unsigned long long seed = dropout.seed;
    asm volatile("" : "+l"(seed));  // or the round keys live in twenty registers beside the loop
    maker.add(seed);
  }
  return maker.template finish<true>();
}

}  // namespace nvrtc_attn
