// The user's own function of a score and its position, where a kernel has one: what kernels ask of it, and what its
// generated text (nvrtc_attn/modifiers/cuda.py) is made of. Kernels without one see an empty class.
//
// The text defines Modifier<Element> with score(), slope and keeps(), and ModifierBlock, the arrays and numbers that the
// function captured, which follow the params of the kernel. Masked scores are masked as a byte mask's are.
#pragma once
#include "../common/numbers.cuh"

namespace nvrtc_attn {

// Of another thread of the warp.
NVRTC_ATTN_DEVICE int value_of_lane(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
NVRTC_ATTN_DEVICE float value_of_lane(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
NVRTC_ATTN_DEVICE bool value_of_lane(bool x, int lane) { return __shfl_sync(0xffffffffu, int(x), lane) != 0; }

// None: no member, so that what derives from it keeps its layout.
template <class Traits, class = void>
struct ModifierOf {
  static constexpr bool kScores = false;
  static constexpr bool kMasks = false;
  static constexpr bool kTrains = false;
  static constexpr bool kTrainsPlainly = false;
  static constexpr bool kTrainsByDistance = false;
  static constexpr bool kUnitSlope = true;
  static constexpr bool kHeadSlope = true;
  static constexpr bool kAny = false;
  template <class Params>
  NVRTC_ATTN_DEVICE ModifierOf(Params const&, int, int) {}
};

template <class Traits>
struct ModifierOf<Traits, cute::void_t<decltype(Traits::Modifier::kScores)>> : Traits::Modifier {
  static constexpr bool kAny = true;
  template <class Params>
  NVRTC_ATTN_DEVICE ModifierOf(Params const& params, int b, int h)
      : Traits::Modifier(static_cast<typename Traits::ModifiedParams const&>(params).modifier, b, h) {}
};

// Whether the backward pass makes P before dP is there, and dS as of scores without a modifier, times the derivative at
// most: nothing of it depends on the score or on the place in the tile. Gradients of captured arrays, if any, are sums then
// over a head's scores of what a score's place alone decides, or of dS as it is along diagonals.
template <class Modifier>
constexpr bool kPlainModifier = (!Modifier::kTrains || Modifier::kTrainsPlainly || Modifier::kTrainsByDistance) &&
                                (!Modifier::kScores || Modifier::kHeadSlope);

// -- What the text is made of.

// C's division and remainder truncate, Python's floor. 0 divides as it likes.
NVRTC_ATTN_DEVICE int floor_div(int a, int b) {
  int const q = a / b;
  return q - int((a - q * b != 0) & ((a < 0) != (b < 0)));
}
NVRTC_ATTN_DEVICE int floor_mod(int a, int b) {
  int const r = a % b;
  return r + ((r != 0) & ((r < 0) != (b < 0)) ? b : 0);
}
NVRTC_ATTN_DEVICE float floor_div(float a, float b) { return floorf(a / b); }
NVRTC_ATTN_DEVICE float floor_mod(float a, float b) { return a - floorf(a / b) * b; }
NVRTC_ATTN_DEVICE float sign_of(float x) { return float(x > 0.0f) - float(x < 0.0f); }
NVRTC_ATTN_DEVICE int sign_of(int x) { return int(x > 0) - int(x < 0); }
NVRTC_ATTN_DEVICE float smaller(float a, float b) { return a < b || a != a ? a : b; }  // NaN stays, unlike fminf's
NVRTC_ATTN_DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }
NVRTC_ATTN_DEVICE int smaller(int a, int b) { return min(a, b); }
NVRTC_ATTN_DEVICE int larger(int a, int b) { return max(a, b); }
NVRTC_ATTN_DEVICE float not_a_number() { return __uint_as_float(0x7fffffffu); }

template <class Element>
NVRTC_ATTN_DEVICE float exp_of(float x) {
  if constexpr (sizeof(Element) == 4) {
    return expf(x);
  } else {
    return fast_exp2(x * kLog2e);
  }
}
template <class Element>
NVRTC_ATTN_DEVICE float sigmoid_of(float x) {
  if constexpr (sizeof(Element) == 4) {
    return 1.0f / (1.0f + expf(-x));
  } else {
    return __fdividef(1.0f, 1.0f + fast_exp2(x * -kLog2e));  // exp2 = inf gives 0
  }
}

// Within 2 units in the last place; 0 where |b| > 2^126.
template <class Element>
NVRTC_ATTN_DEVICE float quotient(float a, float b) {
  if constexpr (sizeof(Element) == 4) {
    return a / b;
  } else {
    return __fdividef(a, b);
  }
}

// One element of a captured array. Read-only for the kernel: equal reads of a tile become one.
template <class T>
NVRTC_ATTN_DEVICE T captured(T const* at) {
  if constexpr (sizeof(T) == 2) {
    unsigned short const bits = __ldg(reinterpret_cast<unsigned short const*>(at));
    return *reinterpret_cast<T const*>(&bits);
  } else {
    return __ldg(at);
  }
}
NVRTC_ATTN_DEVICE float to_float(double x) { return float(x); }
NVRTC_ATTN_DEVICE bool within(int index, int size) { return unsigned(index) < unsigned(size); }
// Of an index that may be outside: one of an element that exists, the first where the size says that there is none (of a part
// that batch entry and head select, and which is outside itself).
NVRTC_ATTN_DEVICE unsigned nearest(int index, int size) { return min(unsigned(index), unsigned(max(size, 1) - 1)); }
// `otherwise` without a branch around what `x` was read with: behind one, each read would wait for the numbers of its address.
template <class T>
NVRTC_ATTN_DEVICE T chosen(bool is, T x, T otherwise) {
  return is ? x : otherwise;
}

// Where the sum of an element goes: a float that atomics add to in any order.
struct AtomicSum {
  using Word = float;
  static NVRTC_ATTN_DEVICE void add(float* at, float x) { add_to_global(at, x); }
};

// Or words of integers, whose sum has no order: a float is a whole number of units of 2^(8 w - 150), of 31 bits at most, in
// word w, which holds 2^32 of them. The last word says which of NaN, infinity and -infinity came.
struct ExactSum {
  using Word = unsigned long long;
  static constexpr int kDigits = 32;
  static constexpr int kWords = kDigits + 1;

  static NVRTC_ATTN_DEVICE void add(Word* at, float x) {
    unsigned const bits = __float_as_uint(x);
    unsigned const exponent = bits >> 23 & 255;
    if (exponent == 255) {
      set_bits_in_global(at + kDigits, Word((bits & 0x7fffffu) != 0 ? 1 : bits >> 31 ? 4 : 2));
    } else if ((bits & 0x7fffffffu) != 0) {
      unsigned const scale = exponent == 0 ? 1 : exponent;
      Word const units = Word((bits & 0x7fffffu) | (exponent == 0 ? 0 : 0x800000u)) << (scale & 7);
      add_to_global(at + (scale >> 3), bits >> 31 ? 0 - units : units);
    }
  }

  // Rounded once, whatever the terms were.
  static NVRTC_ATTN_DEVICE float total(Word const* at) {
    Word const odd = at[kDigits];
    if (odd != 0) {
      if ((odd & 1) != 0 || (odd & 6) == 6) return __uint_as_float(0x7fffffffu);
      return __uint_as_float((odd & 4) != 0 ? 0xff800000u : 0x7f800000u);
    }
    long long digits[kDigits];
#pragma unroll
    for (int w = 0; w < kDigits; ++w) digits[w] = (long long)at[w];
    bool const negative = carry(digits);
    if (negative) {  // its digits would cancel each other
#pragma unroll
      for (int w = 0; w < kDigits; ++w) digits[w] = -digits[w];
      carry(digits);
    }
    double sum = 0.0;
#pragma unroll
    for (int w = kDigits - 1; w >= 0; --w) sum += double(digits[w]) * unit(w);
    return float(negative ? -sum : sum);
  }

 private:
  // Digits of 8 bits but for the last, which has the sign of the number; true when that is negative.
  static NVRTC_ATTN_DEVICE bool carry(long long (&digits)[kDigits]) {
#pragma unroll
    for (int w = 0; w + 1 < kDigits; ++w) {
      digits[w + 1] += digits[w] >> 8;
      digits[w] &= 255;
    }
    return digits[kDigits - 1] < 0;
  }
  // 2^(8 w - 150)
  static NVRTC_ATTN_DEVICE double unit(int w) {
    long long const bits = (long long)(1023 + 8 * w - 150) << 52;
    return __longlong_as_double(bits);
  }
};

// A warp's sum of one element in shared memory, until another element comes: T5's bucket of far keys, which nearly all tiles
// give to. By its first lane.
template <class Sum>
struct HeldSum {
  using Word = typename Sum::Word;
  static constexpr int kBytes = 16;
  unsigned address;

  NVRTC_ATTN_DEVICE void clear() const { store(nullptr, 0.0f); }
  NVRTC_ATTN_DEVICE void add(Word* element, float x) const {
    float before;
    Word* const at = load(before);
    if (at == element) {
      x += before;
    } else if (at != nullptr) {
      Sum::add(at, before);
    }
    store(element, x);
  }
  NVRTC_ATTN_DEVICE void finish() const {
    float sum;
    Word* const at = load(sum);
    if (at != nullptr) Sum::add(at, sum);
    clear();
  }

 private:
  NVRTC_ATTN_DEVICE Word* load(float& sum) const {
    unsigned long long at, more;
    asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];" : "=l"(at), "=l"(more) : "r"(address) : "memory");
    sum = __uint_as_float(unsigned(more));
    return reinterpret_cast<Word*>(at);
  }
  NVRTC_ATTN_DEVICE void store(Word* at, float sum) const {
    asm volatile("st.shared.v2.b64 [%0], {%1, %2};" ::"r"(address), "l"(reinterpret_cast<unsigned long long>(at)),
                 "l"((unsigned long long)__float_as_uint(sum))
                 : "memory");
  }
};

// The gradient of a captured array, as a thread meets its elements: what goes to one element is summed until another one
// comes, and by the whole warp where all threads end with the same, so that few atomics meet where an array is small. Which
// terms a thread sums in which order follows from their places alone.
template <class Sum>
struct CapturedGradient {
  using Word = typename Sum::Word;
  Word* at = nullptr;
  float sum = 0.0f;

  NVRTC_ATTN_DEVICE void add(Word* element, float x) {
    if (element != at) {
      if (at != nullptr) Sum::add(at, sum);
      at = element;
      sum = 0.0f;
    }
    sum += x;
  }
  // By whole warps.
  NVRTC_ATTN_DEVICE void finish() {
    unsigned long long const address = reinterpret_cast<unsigned long long>(at);
    bool const alike = __all_sync(0xffffffffu, address == __shfl_sync(0xffffffffu, address, 0));
    if (alike) sum_of_warp();
    if (at != nullptr && (!alike || threadIdx.x % 32 == 0)) Sum::add(at, sum);
  }
  // The same of sums along diagonals, where lanes without an element have nothing, and the others may all have one: give(element,
  // sum) then, by the first lane.
  template <class Give>
  NVRTC_ATTN_DEVICE void finish_some(Give&& give) {
    unsigned const some = __ballot_sync(0xffffffffu, at != nullptr);
    if (some == 0) return;
    unsigned long long const address = reinterpret_cast<unsigned long long>(at);
    unsigned long long const of_first = __shfl_sync(0xffffffffu, address, __ffs(int(some)) - 1);
    bool const alike = __all_sync(0xffffffffu, at == nullptr || address == of_first);
    if (alike) {
      sum_of_warp();
      if (threadIdx.x % 32 == 0) give(reinterpret_cast<Word*>(of_first), sum);
    } else if (at != nullptr) {
      Sum::add(at, sum);
    }
  }

 private:
  NVRTC_ATTN_DEVICE void sum_of_warp() {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
};

// What a mask_mod says of a thread's accumulator tiles of scores, one bit each.
template <class Modifier, int kTilesM, int kTilesN, bool kMasks = Modifier::kMasks>
struct MaskBits {
  NVRTC_ATTN_DEVICE void compute(Modifier const&, int, int) {}
  NVRTC_ATTN_DEVICE void compute_transposed(Modifier const&, int, int) {}
  template <bool kTransposed>
  NVRTC_ATTN_DEVICE void compute_slim(Modifier const&, int, int) {}
  NVRTC_ATTN_DEVICE void fill() {}
  static NVRTC_ATTN_DEVICE bool kept(int, int, int) { return true; }
  static NVRTC_ATTN_DEVICE bool drops() { return false; }
};
template <class Modifier, int kTilesM, int kTilesN>
struct MaskBits<Modifier, kTilesM, kTilesN, true> {
  static constexpr int kColumn = 4 * kTilesM;  // bits of a column of tiles
  static constexpr int kColumns = 32 / kColumn;
  static constexpr int kWords = (kTilesN + kColumns - 1) / kColumns;
  unsigned words[kWords];

  // Columns of tiles whose values are there at a time. Four are eight columns of scores, whose reads are on the way together: masks
  // of documents take 605 us one column after the other and 398 so (H200, D 64; docs/experiments.md). All of a tile's are more
  // than there are registers. Fewer only where four do not divide it.
  static constexpr int kBatch = kTilesN % 4 == 0 ? 4 : kTilesN % 2 == 0 ? 2 : 1;
  static constexpr int kLines = 2 * kTilesM;  // rows of a thread, of every column of tiles the same

  // (i, j): of the thread's first score.
  NVRTC_ATTN_DEVICE void compute(Modifier const& modifier, int i, int j) {
    typename Modifier::Queries lines[kLines];
#pragma unroll
    for (int r = 0; r < kLines; ++r) lines[r] = modifier.queries(i + 8 * r);
    ask<typename Modifier::Keys>([&](int column) { return modifier.keys(j + column); },
                                 [&](int r, int column, typename Modifier::Keys const& keys) {
                                   return modifier.keeps(i + 8 * r, j + column, lines[r], keys);
                                 });
  }
  // Of transposed tiles, whose rows are keys.
  NVRTC_ATTN_DEVICE void compute_transposed(Modifier const& modifier, int i, int j) {
    typename Modifier::Keys lines[kLines];
#pragma unroll
    for (int r = 0; r < kLines; ++r) lines[r] = modifier.keys(j + 8 * r);
    ask<typename Modifier::Queries>([&](int column) { return modifier.queries(i + column); },
                                    [&](int r, int column, typename Modifier::Queries const& queries) {
                                      return modifier.keeps(i + column, j + 8 * r, queries, lines[r]);
                                    });
  }

  // Columns count from the thread's first. What is read of them is shared by the warp: eight threads have the same ones. One
  // tile of 128 x 128 takes 9.3 us where each reads its own when it needs it, 2.8 eight at a time (documents, H200, 2026-11-23).
  template <class Values, class Read, class Keeps>
  NVRTC_ATTN_DEVICE void ask(Read&& read, Keeps&& keeps) {
    constexpr int kHeld = Values::kShared ? (8 * kTilesN + 31) / 32 : 1;
    Values held[kHeld];
    int lane = 0;
    if constexpr (Values::kShared) {
      lane = int(threadIdx.x) & 31;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) held[i] = read(32 * i + lane - 2 * (lane & 3));
    }
    auto batch = [&](int n0) {
      Values values[2 * kBatch];
#pragma unroll
      for (int c = 0; c < 2 * kBatch; ++c) {
        int const column = 8 * (n0 + c / 2) + c % 2;
        if constexpr (Values::kShared) {
          values[c] = held[column / 32].of_lane(column % 32 + 2 * (lane & 3));
        } else {
          values[c] = read(column);
        }
      }
      unsigned bits = 0;
#pragma unroll
      for (int c = 0; c < 2 * kBatch; ++c) {
#pragma unroll
        for (int r = 0; r < kLines; ++r) {
          unsigned const bit = unsigned(keeps(r, 8 * (n0 + c / 2) + c % 2, values[c]));
          bits |= bit << (c / 2 * kColumn + 2 * r + c % 2);
        }
      }
      return bits;
    };
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      unsigned word = 0;
      if constexpr (Values::kShared) {
#pragma unroll
        for (int n0 = 0; n0 < columns(w); n0 += kBatch) word |= batch(w * kColumns + n0) << (n0 * kColumn);
      } else {
#pragma unroll 1
        for (int n0 = 0; n0 < columns(w); n0 += kBatch) word |= batch(w * kColumns + n0) << (n0 * kColumn);
      }
      words[w] = word;
    }
  }
  // The same with few registers: one column after the other. For kernels that have most tiles' bits from memory (kTileBits).
  template <bool kTransposed>
  NVRTC_ATTN_DEVICE void compute_slim(Modifier const& modifier, int i, int j) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      unsigned word = 0;
#pragma unroll 1
      for (int n = 0; n < columns(w); ++n) {
        unsigned bits = 0;
#pragma unroll
        for (int r = 0; r < kLines; ++r) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            int const row = 8 * r;
            int const column = 8 * (w * kColumns + n) + c;
            bool const keeps = kTransposed ? modifier.keeps(i + column, j + row) : modifier.keeps(i + row, j + column);
            bits |= unsigned(keeps) << (2 * r + c);
          }
        }
        word |= bits << (n * kColumn);
      }
      words[w] = word;
    }
  }
  NVRTC_ATTN_DEVICE void fill() {
#pragma unroll
    for (unsigned& word : words) word = ~0u;
  }
  NVRTC_ATTN_DEVICE bool kept(int m, int n, int e) const {
    int const w = n / kColumns;
    return words[w] >> (n % kColumns * kColumn + 4 * m + e) & 1;
  }
  // Whether any score is dropped.
  NVRTC_ATTN_DEVICE bool drops() const {
    bool all = true;
#pragma unroll
    for (int w = 0; w < kWords; ++w) all &= ~words[w] << (32 - columns(w) * kColumn) == 0;
    return !all;
  }
  // Of word w.
  static constexpr NVRTC_ATTN_DEVICE int columns(int w) {
    return kTilesN - w * kColumns < kColumns ? kTilesN - w * kColumns : kColumns;
  }
};

// Whether a score_mod has parts that the distance of query and key decides (nvrtc_attn/modifiers/diagonals.py), and how many
// gradients of captured arrays are summed along diagonals.
template <class Modifier, class = void>
constexpr bool kReadsDiagonals = false;
template <class Modifier>
constexpr bool kReadsDiagonals<Modifier, cute::void_t<typename Modifier::Diagonal>> = true;
template <class Modifier, class = void>
constexpr int kSummedAlong = 0;
template <class Modifier>
constexpr int kSummedAlong<Modifier, cute::void_t<decltype(Modifier::kSummedAlong)>> = Modifier::kSummedAlong;

// Of 16 lines and 8 * kTiles columns of scores, a warp's: lines are queries and columns keys, or transposed. Thread (g, t) has
// lines g and g + 8, columns 2 t and 2 t + 1 of each tile of 8, so diagonals 8 a + 2 t + c - g, where `a` is the tile less
// the line's half: 2 (kTiles + 1) for 4 kTiles scores. Lane (g, t) computes diagonals 8 (3 m + t - 2) + g from the first
// line and column, and of all three `a` of an m every thread finds its own in one lane: a shuffle each.
template <class Modifier, int kTiles, bool kReads = kReadsDiagonals<Modifier>>
struct Diagonals {
  NVRTC_ATTN_DEVICE void compute(Modifier const&, int, int) {}
  NVRTC_ATTN_DEVICE void compute_transposed(Modifier const&, int, int) {}
};
template <class Modifier, int kTiles>
struct Diagonals<Modifier, kTiles, true> {
  using Diagonal = typename Modifier::Diagonal;
  static constexpr int kHeld = kTiles / 3 + 1;
  Diagonal held[kHeld];

  // (i, j): of the warp's first score.
  NVRTC_ATTN_DEVICE void compute(Modifier const& modifier, int i, int j) {
#pragma unroll
    for (int m = 0; m < kHeld; ++m) held[m] = modifier.diagonal(i, j + offset(m));
  }
  NVRTC_ATTN_DEVICE void compute_transposed(Modifier const& modifier, int i, int j) {
#pragma unroll
    for (int m = 0; m < kHeld; ++m) held[m] = modifier.diagonal(i + offset(m), j);
  }
  static NVRTC_ATTN_DEVICE int offset(int m) {
    int const lane = lane_again();
    return 8 * (3 * m + (lane & 3) - 2) + (lane >> 2);
  }

  // take(tile, e, diagonal) of every score, by diagonals. By whole warps.
  template <class Take>
  NVRTC_ATTN_DEVICE void each(Take&& take) const {
    int const lane = lane_again();
#pragma unroll
    for (int a = -1; a < kTiles; ++a) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        Diagonal const diagonal = at(a, c, lane);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (a + r >= 0 && a + r < kTiles) take(a + r, 2 * r + c, diagonal);
        }
      }
    }
  }
  NVRTC_ATTN_DEVICE Diagonal at(int a, int c, int lane) const {
    int const u = 2 * (lane & 3) + c - (lane >> 2);  // -7 to 7; below 0 it is u + 8 of the `a` before
    int const m = (a + 1) / 3;
    return held[m].of_lane(4 * (u & 7) - int(u < 0) + (a + 2 - 3 * m));
  }
};

// A thread's own six of 16 x 16 scores.
template <class Modifier, bool kReads>
struct DiagonalsOfSquare {
  template <class Along>
  NVRTC_ATTN_DEVICE explicit DiagonalsOfSquare(Along const&) {}
};
template <class Modifier>
struct DiagonalsOfSquare<Modifier, true> {
  typename Modifier::Diagonal x[3][2];

  NVRTC_ATTN_DEVICE explicit DiagonalsOfSquare(Diagonals<Modifier, 2, true> const& along) {
    int const lane = lane_again();
#pragma unroll
    for (int a = -1; a < 2; ++a) {
#pragma unroll
      for (int c = 0; c < 2; ++c) x[a + 1][c] = along.at(a, c, lane);
    }
  }
  // Of value e of tile m.
  NVRTC_ATTN_DEVICE typename Modifier::Diagonal const& at(int m, int e) const { return x[m - (e >> 1) + 1][e & 1]; }
};

// Column c of two of a thread's row g is of diagonal u = 2 t + c - g of its eight columns, or u + 8 of the eight before. What comes
// to lane (g, t), one of four that stand for diagonal g, of column c: `own` values are of these eight columns. By whole warps.
NVRTC_ATTN_DEVICE float turned_to_diagonals(float before, float own, int lane, int c) {
  int const t = lane & 3;
  int const u = 2 * t + c - (lane >> 2);
  return value_of_lane(u < 0 ? before : own, 4 * (u & 7) + t);
}

// Sums of 16 x 16 scores along their diagonals: first of a thread's own, then of the warp, by lanes as above.
template <class Modifier, bool kSums = (0 < kSummedAlong<Modifier>)>
struct DiagonalSums {};
template <class Modifier>
struct DiagonalSums<Modifier, true> {
  static constexpr int kCount = kSummedAlong<Modifier>;
  float sums[3][2][kCount];

  NVRTC_ATTN_DEVICE void clear() {
#pragma unroll
    for (auto& tile : sums) {
#pragma unroll
      for (auto& column : tile) {
#pragma unroll
        for (float& sum : column) sum = 0.0f;
      }
    }
  }
  // Of the diagonal of value e of tile m.
  NVRTC_ATTN_DEVICE float (&at(int m, int e)) [kCount] { return sums[m - (e >> 1) + 1][e & 1]; }

  // In a fixed order: who had them is turned to the lanes that stand for their diagonals, then quads add up.
  NVRTC_ATTN_DEVICE void fold(float (&total)[kCount]) const {
    int const lane = lane_again();
    int const t = lane & 3;
#pragma unroll
    for (int p = 0; p < kCount; ++p) {
      float v[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        v[x] = 0.0f;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float const before = x < 3 ? sums[x][c][p] : 0.0f;
          float const own = x > 0 ? sums[x - 1][c][p] : 0.0f;
          v[x] += turned_to_diagonals(before, own, lane, c);
        }
      }
      float keep[2];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float const send = t & 2 ? v[x] : v[x + 2];
        keep[x] = (t & 2 ? v[x + 2] : v[x]) + __shfl_xor_sync(0xffffffffu, send, 2);
      }
      float const send = t & 1 ? keep[0] : keep[1];
      total[p] = (t & 1 ? keep[1] : keep[0]) + __shfl_xor_sync(0xffffffffu, send, 1);
    }
  }
};

// What scores give to elements that their key selects, or their query, or the head alone (a slope of ALiBi, a temperature): one
// sum for each gradient of the kind, in a thread's registers.
template <int kCount>
struct ElementSums {
  float x[kCount];
  NVRTC_ATTN_DEVICE ElementSums() {
#pragma unroll
    for (float& sum : x) sum = 0.0f;
  }
  // Over the lanes that differ in bits `first` to `last` of their number.
  NVRTC_ATTN_DEVICE void sum_over_lanes(int first, int last) {
#pragma unroll
    for (float& sum : x) {
#pragma unroll
      for (int bit = first; bit <= last; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    }
  }
};
template <>
struct ElementSums<0> {
  NVRTC_ATTN_DEVICE void sum_over_lanes(int, int) {}
};
template <class Modifier, bool kTrains = Modifier::kTrains>
constexpr int kKeyGradientsOf = 0;
template <class Modifier>
constexpr int kKeyGradientsOf<Modifier, true> = Modifier::kKeyGradients;
template <class Modifier, bool kTrains = Modifier::kTrains>
constexpr int kQueryGradientsOf = 0;
template <class Modifier>
constexpr int kQueryGradientsOf<Modifier, true> = Modifier::kQueryGradients;

// What the scores of a tile give to captured arrays, where there are some to train. Few addresses are met by all multiprocessors
// (16 slopes lie in 64 bytes), and L2 adds to one at a time: so nothing is sent that can wait.
template <class Modifier, bool kTrains = Modifier::kTrains>
struct CapturedGradients {
  static constexpr bool kElements = false;
  static constexpr int kBytesHeld = 0;
  NVRTC_ATTN_DEVICE void finish(Modifier const&) {}
  NVRTC_ATTN_DEVICE void finish(Modifier const&, unsigned) {}
  static NVRTC_ATTN_DEVICE void clear_held(unsigned) {}
  static NVRTC_ATTN_DEVICE void finish_held(unsigned) {}
};
template <class Modifier>
struct CapturedGradients<Modifier, true> {
  using Held = HeldSum<typename Modifier::Sum>;
  static constexpr bool kElements = Modifier::kElementGradients > 0;  // not of the head alone
  // Of elements that a distance or the head selects: the others' sums are seldom a whole warp's.
  static constexpr int kFirstHeld = Modifier::kElementGradients - Modifier::kDistanceGradients;
  static constexpr int kHeld = Modifier::kDistanceGradients + Modifier::kHeadGradients;
  static constexpr int kBytesHeld = kHeld * Held::kBytes;  // of a warp
  typename Modifier::Gradients x;
  ElementSums<Modifier::kHeadGradients> heads;

  // By whole warps. `held`: shared address of what the warp holds.
  NVRTC_ATTN_DEVICE void finish(Modifier const& modifier, unsigned held) {
    finish_each(modifier, [&](int i, auto* element, float sum) { Held{held + i * Held::kBytes}.add(element, sum); });
  }
  // Without shared memory to hold a sum in.
  NVRTC_ATTN_DEVICE void finish(Modifier const& modifier) {
    finish_each(modifier, [](int, auto* element, float sum) { send(element, sum); });
  }
  // Straight to the gradient.
  template <class Element>
  static NVRTC_ATTN_DEVICE void send(Element* element, float sum) {
    Modifier::Sum::add(element, sum);
  }
  static NVRTC_ATTN_DEVICE void clear_held(unsigned held) {
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) Held{held + i * Held::kBytes}.clear();
  }
  static NVRTC_ATTN_DEVICE void finish_held(unsigned held) {
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) Held{held + i * Held::kBytes}.finish();
  }

 private:
  // give(i, element, sum), by the first lane: sum i of those that can be held.
  template <class Give>
  NVRTC_ATTN_DEVICE void finish_each(Modifier const& modifier, Give&& give) {
    if constexpr (kElements) {
#pragma unroll
      for (int i = 0; i < Modifier::kElementGradients; ++i) {
        if (i < kFirstHeld) {
          x[i].finish();
        } else {
          x[i].finish_some([&](auto* element, float sum) { give(i - kFirstHeld, element, sum); });
        }
      }
    }
    if constexpr (Modifier::kHeadGradients > 0) {
      heads.sum_over_lanes(1, 16);
      int i = Modifier::kDistanceGradients;
      if (threadIdx.x % 32 == 0) {
        modifier.give_heads(heads, [&](auto* element, float sum) { give(i++, element, sum); });
      }
    }
  }
};

}  // namespace nvrtc_attn
