// kMaxLogit with kLazyMax: the largest score of a head where the softmax asks for no maxima. (Without kLazyMax raise() has them.)
//
// P = exp2(score - reference of the row) grows with the score, so the largest P of a tile and row says whether the tile holds a
// score above the largest one so far: there is none unless P exceeds `bound`, P of that one. P is positive, so its bits are
// compared as integers, three at a time, beside the exponentials, which wait for another pipe. That is all that a tile takes
// unless it brings a new largest score, of which there are about log(tiles): then the score is found back from P.
#pragma once
#include "../../collective/scores.cuh"
#include "../common/shared_words.cuh"
#include "../common/uniform.cuh"

namespace nvrtc_attn {

// Not where a tile has rows of several heads, of which there is no one largest score, nor where registers do not suffice (half
// tiles, dropout, and lengths beside three consumers: 8 to 40 bytes of a thread would spill, or products wait for each other):
// there note() takes the maximum of every row.
template <class Traits>
constexpr bool kBoundsLargest = Traits::kMaxLogit && Traits::kLazyMax && !Traits::kPackedHeads && !Traits::kHalfTile &&
                                !Traits::kDropout && !(Traits::kVarlen && Traits::kBlockM == 192);
template <class Traits>
constexpr bool kNotesLargest = Traits::kMaxLogit && Traits::kLazyMax && !kBoundsLargest<Traits>;

struct NotedScores {
  unsigned smem;  // shared address: of all threads, two rows each

  NVRTC_ATTN_DEVICE unsigned address(int r) const { return smem + 8 * unsigned(thread_again()) + 4 * r; }
  NVRTC_ATTN_DEVICE float load(int r) const { return read_word(address(r)); }
  NVRTC_ATTN_DEVICE void begin() const {
    write_word(address(0), -infinity());
    write_word(address(1), -infinity());
  }

  template <int kTilesN>
  NVRTC_ATTN_DEVICE void note(AccTile const (&s)[1][kTilesN]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x = s[0][0][2 * r];
      float y = s[0][0][2 * r + 1];
#pragma unroll
      for (int n = 1; n < kTilesN; ++n) {
        x = fmaxf(x, s[0][n][2 * r]);
        y = fmaxf(y, s[0][n][2 * r + 1]);
      }
      write_word(address(r), fmaxf(fmaxf(x, y), load(r)));
    }
  }
};

// The largest P of two rows, as bits. NaN is above all of them.
struct LargestP {
  static constexpr bool kOneSum = true;
  int bits[2] = {0, 0};

  NVRTC_ATTN_DEVICE void take(int r, float p, float q) {
    bits[r] = max(max(bits[r], __float_as_int(p)), __float_as_int(q));  // one instruction
  }
  NVRTC_ATTN_DEVICE void take_sums(float const (&)[4]) {}
};
// The same from sums of P, which bound it.
struct LargestSum : LargestP {
  static constexpr bool kOneSum = false;
  NVRTC_ATTN_DEVICE void take(int, float, float) {}
  NVRTC_ATTN_DEVICE void take_sums(float const (&sums)[4]) {
    bits[0] = max(__float_as_int(sums[0]), __float_as_int(sums[1]));
    bits[1] = max(__float_as_int(sums[2]), __float_as_int(sums[3]));
  }
};

struct NoLargestP {
  static constexpr bool kOneSum = false;
  NVRTC_ATTN_DEVICE void take(int, float, float) {}
  NVRTC_ATTN_DEVICE void take_sums(float const (&)[4]) {}
};

// A float as an integer of the same order, and back.
NVRTC_ATTN_DEVICE int ordered_bits(int x) { return x ^ (x >> 31 & 0x7fffffff); }

// With kLazyMax the maximum of a tile is not computed unless a thread's sum of P reaches this: 2^14 keeps every P
// inside float16's range, 2^64 inside bfloat16's and keeps row sums and P V inside float32's.
template <class Element>
constexpr float kLazyLimit = 16384.0f;
template <>
constexpr float kLazyLimit<bfloat16_t> = 18446744073709551616.0f;

constexpr bool kBesideExponentials = true;

// What a warp-group knows of its head: the largest score, in shared memory for its four warps, and each thread's bounds of its
// two rows, which may lag behind what other warps have found: too low a bound only makes a warp look again. Three consumers of
// head dim 64 have no register left for them. The loading group's part of the 8 bytes a thread holds the scores: two a
// warp-group, in turn by query tile, so that one barrier a tile keeps slow warps of the last tile from fast ones of this.
template <class Traits, int kTilesN>
struct LargestOfGroup {
  using Map = ScoreMap<Traits>;
  using Seen = cute::conditional_t<kBesideExponentials, LargestP, LargestSum>;
  // No P above it, and no sum of what a thread has of a row reaches kLazyLimit.
  static constexpr float kLimit = kLazyLimit<typename Traits::Element> / (kBesideExponentials ? 4 * kTilesN : 2);
  unsigned smem;  // shared address: 8 bytes of each thread

  NVRTC_ATTN_DEVICE unsigned of_thread() const { return smem + 8 * unsigned(thread_again()); }
  NVRTC_ATTN_DEVICE unsigned of_group(unsigned turn) const {
    return smem + 8 * (unsigned(thread_again()) >> 7) + 4 * turn;
  }
  static NVRTC_ATTN_DEVICE int bits_of(float x) { return ordered_bits(__float_as_int(x)); }
  static NVRTC_ATTN_DEVICE float float_of(int bits) { return __int_as_float(ordered_bits(bits)); }

  // Before a query tile's turn comes, when nobody is in the last one that had it.
  NVRTC_ATTN_DEVICE void forget(unsigned turn) const {
    if ((thread_again() & 127) == 0) write_word(of_group(turn), __int_as_float(bits_of(-infinity())));
  }
  // The largest score of all that this warp has seen, and perhaps of what others have.
  NVRTC_ATTN_DEVICE float found(unsigned turn) const { return float_of(__float_as_int(read_word(of_group(turn)))); }

  NVRTC_ATTN_DEVICE int2 bounds() const { return read_pair(of_thread()); }

  // Whether this thread must look at a tile: its sums may be beyond what kLazyMax allows, or a score may be the largest.
  static NVRTC_ATTN_DEVICE bool exceeds(LargestP const& p, int2 bounds) {
    return p.bits[0] > bounds.x || p.bits[1] > bounds.y;
  }

  // After the first tile, by which rows have their maxima; `count` of all rows exist.
  template <class Softmax>
  NVRTC_ATTN_DEVICE void begin(Softmax const& softmax, Map const& map, int row, int count, unsigned turn) const {
    int2 const old =
        make_int2(opaque(row) < opaque(count) ? -1 : kNoRow, opaque(row) + 8 < opaque(count) ? -1 : kNoRow);
    float const x = exists(old.x) ? softmax.row_max[0] : -infinity();
    float const y = exists(old.y) ? softmax.row_max[1] : -infinity();
    set_bounds(share(fmaxf(x, y), turn), softmax, map, old, {});
  }

  // The softmax may have other references from now on, of which the bounds say nothing.
  NVRTC_ATTN_DEVICE void forget_bounds() const {
    int2 const old = bounds();
    write_pair(of_thread(), exists(old.x) ? -1 : kNoRow, exists(old.y) ? -1 : kNoRow);
  }

  // A tile `s` of P of which exceeds() was true in some lane, and whose sums are what they should be. It asks s again: when the
  // last product has read its P there are registers, which there are not beside it.
  template <class Softmax>
  NVRTC_ATTN_DEVICE void look(AccTile const (&s)[1][kTilesN], Softmax const& softmax, Map const& map,
                              unsigned turn) const {
    LargestP p;
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
      p.take(0, s[0][n][0], s[0][n][1]);
      p.take(1, s[0][n][2], s[0][n][3]);
    }
    int2 const old = bounds();
    float largest = -infinity();  // and NaN, of rows without a key and of NaN, leaves it so
    if (exists(old.x) && p.bits[0] > old.x) largest = fmaxf(largest, score_of(p.bits[0], 0, softmax, map));
    if (exists(old.y) && p.bits[1] > old.y) largest = fmaxf(largest, score_of(p.bits[1], 1, softmax, map));
    set_bounds(share(largest, turn), softmax, map, old, p);
  }

 private:
  // By all lanes: the largest score of the warp-group so far, this warp's included.
  NVRTC_ATTN_DEVICE float share(float largest, unsigned turn) const {
    int most = __reduce_max_sync(0xffffffffu, bits_of(largest));
    if ((thread_again() & 31) == 0) most = raise_shared(of_group(turn), most);
    return float_of(__shfl_sync(0xffffffffu, most, 0));
  }

  // Rows beyond the sequence have bounds of their own, by which they are known without a register.
  static constexpr int kNoRow = -2;
  static NVRTC_ATTN_DEVICE int no_row() { return __float_as_int(kLimit) + 1; }
  static NVRTC_ATTN_DEVICE bool exists(int old) { return old != kNoRow && old != no_row(); }

  // What P may be without a score larger than `score`, nor than those of P seen. NaN, where references are too large, is no bound.
  template <class Softmax>
  NVRTC_ATTN_DEVICE void set_bounds(float score, Softmax const& softmax, Map const& map, int2 old,
                                    LargestP const& seen) const {
    bool const settled = softmax.settled();
    int const limit = __float_as_int(kLimit);
    auto bound = [&](int r, int old) {
      // P of a score that was found back from P may be smaller than that, by its rounding.
      int const most = max(__float_as_int(map.probability(score, softmax.reference[r])), seen.bits[r]);
      if (!exists(old)) return settled ? limit + 1 : kNoRow;
      return settled ? min(most, limit) : -1;  // -1: look at every tile
    };
    write_pair(of_thread(), bound(0, old.x), bound(1, old.y));
  }

  // The score that P of a row comes from, to the rounding of P's exponent, which is its distance from the row's maximum.
  template <class Softmax>
  static NVRTC_ATTN_DEVICE float score_of(int bits, int r, Softmax const& softmax, Map const& map) {
    float const m = softmax.row_max[r];
    float rounding = Map::kSubtracts ? 0.0f : fmaf(-m, map.exponent_scale, softmax.reference[r]);
    if (rounding != rounding) rounding = 0.0f;  // kSubtractsFirst
    return m + __fdividef(__log2f(__int_as_float(bits)) + rounding, map.exponent_scale);
  }
};

}  // namespace nvrtc_attn
