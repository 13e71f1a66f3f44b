// What a consumer warp-group does between Q K^T and P V: masked scores, online softmax, P as an operand. The policies
// are those of the portable family (collective/); what differs is when things happen, because products run beside this.
#pragma once
#include "../../collective/softmax.cuh"
#include "../../collective/tile_bits.cuh"
#include "../../common/fragment_load.cuh"
#include "../common/keep_words.cuh"
#include "query_rows.cuh"
#include "score_tile.cuh"

namespace nvrtc_attn {

// With kLazyMax the maximum of a tile is not computed unless a thread's sum of P reaches this: 2^14 keeps every P
// inside float16's range, 2^64 inside bfloat16's and keeps row sums and P V inside float32's.
template <class Element>
constexpr float kLazyLimit = 16384.0f;
template <>
constexpr float kLazyLimit<bfloat16_t> = 18446744073709551616.0f;

// kMaxLogit: maxima that raise() has anyway. With kLazyMax, where it is not asked, note() takes them, and keeps them in shared
// memory: three consumers have no register left for them at head dim 64, and four to 20 bytes of a thread would spill.
template <class Traits>
constexpr bool kNotesLargest = Traits::kMaxLogit && Traits::kLazyMax;

// The largest score that this thread has of row r. Two chains: one warp of a group runs on each scheduler, so latency is hidden
// inside the thread.
template <int kTilesN>
NVRTC_ATTN_DEVICE float own_max(AccTile const (&s)[1][kTilesN], int r) {
  float x = s[0][0][2 * r];
  float y = s[0][0][2 * r + 1];
#pragma unroll
  for (int n = 1; n < kTilesN; ++n) {
    x = fmaxf(x, s[0][n][2 * r]);
    y = fmaxf(y, s[0][n][2 * r + 1]);
  }
  return fmaxf(x, y);
}

struct NotedScores {
  unsigned smem;  // shared address: of all threads, two rows each

  NVRTC_ATTN_DEVICE unsigned address(int r) const { return smem + 8 * unsigned(thread_again()) + 4 * r; }
  NVRTC_ATTN_DEVICE float load(int r) const {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address(r)));
    return x;
  }
  NVRTC_ATTN_DEVICE void store(int r, float x) const {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address(r)), "f"(x));
  }
  NVRTC_ATTN_DEVICE void begin() const { begin({-infinity(), -infinity()}); }
  NVRTC_ATTN_DEVICE void begin(float const (&maxima)[2]) const {
    store(0, maxima[0]);
    store(1, maxima[1]);
  }

  template <int kTilesN>
  NVRTC_ATTN_DEVICE void note(AccTile const (&s)[1][kTilesN]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float const x = own_max(s, r);
      store(r, fmaxf(x, load(r)));
    }
  }
};

// Online softmax whose rescale of the output waits until the product that is adding to it has finished.
template <class Traits>
struct DeferredSoftmax : LargestScores<Traits::kMaxLogit && !Traits::kLazyMax ? 2 : 0> {
  float row_max[2] = {-infinity(), -infinity()};  // of scores, in their own unit; -inf: no key yet
  float row_sum[2] = {0.0f, 0.0f};                // this thread's share
  float reference[2] = {0.0f, 0.0f};              // what probability() subtracts; finite, or kSubtractsFirst
  float factor[2];                                // of the last raise
  // All references of the warp when one would be too large (kLargeReference): scores lose the maximum before they are
  // scaled. A flag beside them spills where a thread has 160 registers. With kLazyMax it is NaN, so that the sums of a
  // tile send it to where it is computed again; otherwise minus zero, which can be subtracted as it is.
  static constexpr unsigned kSubtractsFirst = Traits::kLazyMax ? 0x7fffffffu : 0x80000000u;

  // Take in the maxima of one tile; true when the output must be multiplied by `factor`. Uniform over the warp.
  template <int kTilesN>
  NVRTC_ATTN_DEVICE bool raise(AccTile const (&s)[1][kTilesN], ScoreMap<Traits> const& map) {
    float tile_max[2];
    bool any = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tile_max[r] = quad_max(own_max(s, r));
      any |= (tile_max[r] - row_max[r]) * map.exponent_scale > kRescaleThreshold;  // false for -inf - -inf
    }
    this->take(tile_max);
    if (!__any_sync(0xffffffffu, any)) return false;
    bool large = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float const new_max = fmaxf(row_max[r], tile_max[r]);
      // Of the maxima, not of rounded references: P of earlier tiles is relative to the maximum, either way.
      factor[r] = map.ratio(row_max[r], finite(new_max));
      reference[r] = map.reference(finite(new_max));
      large |= fabsf(reference[r]) > kLargeReference;
      row_max[r] = new_max;
      row_sum[r] *= factor[r];
    }
    if constexpr (!ScoreMap<Traits>::kSubtracts) {
      if constexpr (!Traits::kLazyMax) reference[0] += 0.0f;  // a maximum of minus zero would say so too
      if (__any_sync(0xffffffffu, large)) reference[0] = reference[1] = __uint_as_float(kSubtractsFirst);
    }
    return true;
  }
  static NVRTC_ATTN_DEVICE float finite(float m) { return m == -infinity() ? 0.0f : m; }

  // What probability() subtracts from a tile of scores, which may have lost the maximum already. After raise().
  template <int kTilesN>
  NVRTC_ATTN_DEVICE float2 references(AccTile (&s)[1][kTilesN]) const {
    if constexpr (!ScoreMap<Traits>::kSubtracts) {
      if (__float_as_uint(reference[0]) == kSubtractsFirst) {
        float const m[2] = {finite(row_max[0]), finite(row_max[1])};
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[0][n][e] -= m[e >> 1];
        }
        if constexpr (Traits::kLazyMax) return make_float2(0.0f, 0.0f);
      }
    }
    return make_float2(reference[0], reference[1]);
  }

  NVRTC_ATTN_DEVICE void add(float2 sums) {
    row_sum[0] += sums.x;
    row_sum[1] += sums.y;
  }

  // Whether every row of the warp has seen a key, so that its reference means something.
  NVRTC_ATTN_DEVICE bool settled() const {
    return !__any_sync(0xffffffffu, row_max[0] == -infinity() || row_max[1] == -infinity());
  }

  // Whether this thread has a score of a row that had none, which probability() needs a reference for. (NaN: sums will tell.)
  template <int kTilesN>
  NVRTC_ATTN_DEVICE bool begins_row(AccTile const (&s)[1][kTilesN]) const {
    bool begins = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) begins |= row_max[r] == -infinity() && own_max(s, r) > -infinity();
    return begins;
  }

  // Reduce the sums over the quad: after the last tile.
  NVRTC_ATTN_DEVICE void finish() {
    row_sum[0] = quad_sum(row_sum[0]);
    row_sum[1] = quad_sum(row_sum[1]);
  }

  template <int kTilesD>
  NVRTC_ATTN_DEVICE void rescale(AccTile (&o)[1][kTilesD]) const {
#pragma unroll
    for (int d = 0; d < kTilesD; ++d) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][d][e] *= factor[e >> 1];
    }
  }
};

// Bias and mask that the copy engine cannot read: raw values of one tile's scores, as this thread holds them, read
// before the wait for Q K^T, which hides them.
template <class Element, bool kEnabled, int kTilesN>
struct ContiguousScores {
  static constexpr int kN = kEnabled ? kTilesN : 1;
  ElementPair<Element> value[kN][2];

  NVRTC_ATTN_DEVICE void load(ScoreTensor<Element const> const& t, int i, int j, int len_q, int len_k) {
    if constexpr (kEnabled) {
      Element const* const rows[2] = {t.at(i, j), t.at(i + 8, j)};
      if (__all_sync(0xffffffffu, t.pairs && i + 8 < len_q && j + 8 * kTilesN - 7 < len_k)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int n = 0; n < kN; ++n) value[n][r] = *reinterpret_cast<ElementPair<Element> const*>(rows[r] + 8 * n);
        }
      } else {
        // The host sends only operands whose keys are contiguous: two addresses and immediate offsets.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          int const columns = i + 8 * r < len_q ? len_k - j : 0;
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            value[n][r] = ElementPair<Element>{};
            if (8 * n < columns) value[n][r].x = rows[r][8 * n];
            if (8 * n + 1 < columns) value[n][r].y = rows[r][8 * n + 1];
          }
        }
      }
    }
  }
  // Of value e of accumulator tile n; anything where it is not enabled.
  NVRTC_ATTN_DEVICE Element at(int n, int e) const {
    ElementPair<Element> const& pair = value[kEnabled ? n : 0][e >> 1];
    return e & 1 ? pair.y : pair.x;
  }
};

// This thread's lane, and its first row in a warp-group whose rows begin at `row0`, worked out from the thread's number
// wherever they are used, so that nothing of them lives in a register between: packed, three groups have 160 registers a
// thread, and of 128 keys 28 to 48 bytes would spill.
struct LaneAgain {
  NVRTC_ATTN_DEVICE operator int() const { return thread_again() & 31; }
};
struct RowAgain {
  int row0;
  NVRTC_ATTN_DEVICE operator int() const {
    int const tid = thread_again();
    return row0 + (tid >> 5 & 3) * 16 + (tid >> 2 & 7);
  }
};

// What turns a tile of raw products into masked scores, and scores into probabilities.
template <class Traits>
struct ScoreTile : ModifierOf<Traits> {
  using Modifier = ModifierOf<Traits>;
  using Bias = typename Traits::Bias;
  ScoreMap<Traits> const& map;
  PositionMask<Traits::kBand> const& mask;
  ScoreTensor<Bias const> const& bias;
  ScoreTensor<unsigned char const> const& byte_mask;
  Dropout const& dropout;
  int row0;  // first row of the warp-group
  static constexpr bool kPlaceAgain =
      (Traits::kVarlen || (Traits::kMaxLogit && !Traits::kBand) || (Traits::kBeginsProducts && Traits::kBand)) &&
      Traits::kBlockM == 192;
  using Row = cute::conditional_t<kPlaceAgain, RowAgain, int>;
  using Lane = cute::conditional_t<kPlaceAgain, LaneAgain, int>;
  Row i;  // this thread's first row; the other is i + 8
  Lane lane;

  ScoreTileAccess<Traits> const& tiles;
  QueryRows<Traits::kPackedHeads, Traits::kBlockM> const& rows;

  // Whether a tile of which the byte mask hides nothing is taken without it. Where threads hold what they read of bias and mask
  // there are no registers for two ways: up to 334 bytes of spills.
  static constexpr bool kWhole = Traits::kTileWords && Traits::kScoreTiles;

  // What a mask_mod says is asked while the product runs: beside scores there are no registers for what it reads.
  template <int kTilesN>
  struct Operands : MaskBits<Modifier, 1, kTilesN>, Diagonals<Modifier, kTilesN> {
    unsigned tile;  // kScoreTiles: the slot's shared address
    ContiguousScores<Bias, Traits::kHasBias && !Traits::kScoreTiles, kTilesN> bias;
    ContiguousScores<unsigned char, Traits::kMask && !Traits::kScoreTiles, kTilesN> byte_mask;
  };

  template <int kTilesN, class Known = bool>
  NVRTC_ATTN_DEVICE void load(Operands<kTilesN>& operands, int n0, Known whole = false) const {
    int const j0 = n0 + 2 * (lane & 3);
    operands.bias.load(bias, i, j0, mask.len_q, mask.len_k);
    if constexpr (Modifier::kMasks) {
      if (Traits::kTileWords && whole) {
        operands.fill();
      } else if constexpr (Traits::kTileBits) {
        if (whole.held) {
          ThreadBits<kTilesN>::load(operands.words, whole.bits);
        } else {
          operands.template compute_slim<false>(*this, i, j0);
        }
      } else {
        operands.MaskBits<Modifier, 1, kTilesN>::compute(*this, i, j0);
      }
    }
    if constexpr (kReadsDiagonals<Modifier>) {
      operands.Diagonals<Modifier, kTilesN>::compute(*this, i - (lane >> 2), n0);
    }
    if (kWhole && whole) return;
    operands.byte_mask.load(byte_mask, i, j0, mask.len_q, mask.len_k);
  }

  template <int kTilesN>
  NVRTC_ATTN_DEVICE void finish(AccTile (&s)[1][kTilesN], Operands<kTilesN> const& operands, int n0,
                                bool whole = false) const {
    int column = 0;
    if constexpr (!kPlaceAgain) column = n0 + 2 * (lane & 3);
    if constexpr (kReadsDiagonals<Modifier>) {
      int const j0 = n0 + 2 * (lane & 3);
      operands.each([&](int n, int e, typename Modifier::Diagonal const& diagonal) {
        float& x = s[0][n][e];
        x = this->score(x * map.scale, i + 8 * (e / 2), j0 + 8 * n + e % 2, diagonal, i, j0);
      });
    } else if constexpr (Modifier::kScores) {
      modify(s, n0 + 2 * (lane & 3));
    }
    if (kWhole && whole) {
      if constexpr (Traits::kScoreTiles) tiles.template apply<false>(s, map, operands.tile);
    } else if constexpr (Traits::kScoreTiles) {
      tiles.apply(s, map, operands.tile);
    } else {
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[0][n][e];
          if constexpr (Modifier::kScores) {
            x = finish_modified<Traits>(x, operands.bias.at(n, e), operands.byte_mask.at(n, e));
          } else {
            x = finish_score(map, x, operands.bias.at(n, e), operands.byte_mask.at(n, e));
          }
        }
      }
    }
    if constexpr (Modifier::kMasks) {
      if (__any_sync(0xffffffffu, operands.drops())) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[0][n][e] = masked_score(s[0][n][e], operands.kept(0, n, e));
        }
      }
    }
    if (!mask.keeps_tile(rows.query(row0), rows.queries(row0, 64), n0, 8 * kTilesN)) {
      int const j0 = kPlaceAgain ? n0 + 2 * (lane & 3) : column;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int const query = rows.query(i + 8 * r);
        replace_hidden(s, r, -infinity(), mask.keys_below_end(query, j0));
        if (mask.has_first_keys()) replace_hidden(s, r, -infinity(), mask.keys_from_first(query, j0));
      }
    }
  }

  // Products -> what the score_mod makes of them, before bias and masks.
  template <int kTilesN>
  NVRTC_ATTN_DEVICE void modify(AccTile (&s)[1][kTilesN], int j0) const {
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[0][n][e];
        x = this->score(x * map.scale, i + 8 * (e / 2), j0 + 8 * n + e % 2, i, j0);
      }
    }
  }

  // s -> P in place; this thread's sums of P, which dropout does not change. beside() is called before every two tiles.
  template <int kTilesN, class Beside>
  NVRTC_ATTN_DEVICE float2 exponentiate(AccTile (&s)[1][kTilesN], float2 reference, Beside&& beside) const {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
      if (n % 2 == 0) beside();
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float const p = map.probability(s[0][n][e], e < 2 ? reference.x : reference.y);
        sum[e] += p;
        s[0][n][e] = p;
      }
    }
    return make_float2(sum[0] + sum[1], sum[2] + sum[3]);
  }
  template <int kTilesN>
  NVRTC_ATTN_DEVICE float2 exponentiate(AccTile (&s)[1][kTilesN], float2 reference) const {
    return exponentiate(s, reference, [] {});
  }

  // The same, and what dropout keeps of the tile from n0: its integer arithmetic runs beside that of the exponentials
  // on other pipes. One after the other they would take the sum of their times, with two warps a scheduler.
  template <int kTilesN, int kGroups>
  NVRTC_ATTN_DEVICE float2 exponentiate(AccTile (&s)[1][kTilesN], float2 reference, int n0,
                                        KeepWords<kGroups>& keep) const {
    if constexpr (Traits::kDropout && kKeepBeside) {
      KeepMaker<kGroups> maker(dropout, i, n0, lane);
      if (maker.one_upper_half) {
        float2 const sums = exponentiate(s, reference, [&] { maker.add(dropout.seed); });
        keep = maker.template finish<false>();
        return sums;
      }
      keep = maker.words_of_any();
    }
    return exponentiate(s, reference);
  }
  // Registers must suffice for both.
  static constexpr bool kKeepBeside = !Traits::kKeepWords && Traits::kHeadDimV <= 128 && !Traits::kSoftcap &&
                                      !Traits::kHasBias && !Traits::kMask && !Modifier::kAny;
};

// P as the left operand of P V, what dropout drops as zeros; its multiplier waits for the normalisation.
template <class Traits, int kTilesN>
NVRTC_ATTN_DEVICE void pack_probabilities(FragmentA<typename Traits::Element> (&p)[kTilesN / 2],
                                          AccTile const (&s)[1][kTilesN], KeepWords<kTilesN / 2> const& keep) {
#pragma unroll
  for (int step = 0; step < kTilesN / 2; ++step) {
    p[step] = accumulator_as_a<typename Traits::Element>(s[0][2 * step], s[0][2 * step + 1]);
    if constexpr (Traits::kDropout) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unsigned first, second;
        keep.masks(r, step, first, second);
        p[step].x[r] &= first;
        p[step].x[2 + r] &= second;
      }
    }
  }
}

}  // namespace nvrtc_attn
