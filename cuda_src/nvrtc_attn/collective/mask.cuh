// Which keys a query may see by its position: the one place that knows, for both kernel families, forward and backward,
// scores by rows and transposed ones.
//
// Row i of a sequence sees key j iff i + low <= j <= i + high and j < len_k; low and high are off - left and off + right,
// off = 0 from the top left or len_k - len_q from the bottom right, signed (docs/guide/semantics.md). Indices are
// counted within the sequence.
//
// The rule is four functions: first_key and last_key of a row, first_row and last_row of a key. None of them decreases
// as its argument grows, and they say the same thing: for rows and keys that there are, j <= last_key(i) iff
// i >= first_row(j), and j >= first_key(i) iff i <= last_row(j). All else here follows from them and from the lengths.
// Kernels ask for what they need, tiles to visit, tiles without a hidden score, the part of a tile that a row or a key
// sees, and compute no bound.
#pragma once
#include "../params.cuh"

namespace nvrtc_attn {

constexpr int kFarAway = 1 << 30;  // beyond every index, small enough to add one to without overflow
constexpr int kMostOfTile = 512;   // rows or keys

NVRTC_ATTN_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What a row sees of some keys, or a key of some rows, as numbers counted from where its owner began to count.
struct Visible {
  int first = -2147483647 - 1;  // a bound that is known when compiling costs no instruction
  int last = 2147483647;
  NVRTC_ATTN_DEVICE bool contains(int x) const { return !(x > last || x < first); }
};
// The same bounded on one side.
struct VisibleBelow {
  int end;
  NVRTC_ATTN_DEVICE bool contains(int x) const { return x < end; }
};
struct VisibleFrom {
  int first;
  NVRTC_ATTN_DEVICE bool contains(int x) const { return x >= first; }
};

template <bool kBand>
class PositionMask {
  int low = -kFarAway;
  int high = kFarAway;

 public:
  int len_q;
  int len_k;

  template <class Params>
  NVRTC_ATTN_DEVICE PositionMask(Params const& params, int len_q_, int len_k_) : len_q(len_q_), len_k(len_k_) {
    if constexpr (kBand) {
      int const off = params.bottom_right ? len_k - len_q : 0;
      if (params.window_left != kUnbounded) low = max(off - params.window_left, -kFarAway);
      if (params.window_right != kUnbounded) high = min(off + params.window_right, kFarAway);
    }
  }

  // Of a part whose first row or key is known on the device alone: its row 0 lies at its key `off`. Bounds that are far from
  // rows and keys become nearer ones, or none, which say the same of them, and of those that a tile has behind the last.
  template <class Params>
  NVRTC_ATTN_DEVICE PositionMask(StartsOnDevice<Params> const& params, int len_q_, int len_k_)
      : len_q(len_q_), len_k(len_k_) {
    if constexpr (kBand) {
      long long const off = params.first_row() - params.first_key();
      if (params.window_left != kUnbounded) {
        long long const first = off - params.window_left;
        if (first > -(long long)len_q - kMostOfTile) low = int(min(first, (long long)len_k + kMostOfTile));
      }
      if (params.window_right != kUnbounded) {
        long long const last = off + params.window_right;
        if (last < (long long)len_k + kMostOfTile) high = int(max(last, -(long long)len_q - kMostOfTile));
      }
    }
  }

  // -- The rule, with kBand: any number may come out, the lengths are not looked at. Without, every row sees every key.
  NVRTC_ATTN_DEVICE int first_key(int i) const { return kBand ? i + low : -kFarAway; }
  NVRTC_ATTN_DEVICE int last_key(int i) const { return kBand ? i + high : kFarAway; }
  NVRTC_ATTN_DEVICE int first_row(int j) const { return kBand ? j - high : -kFarAway; }
  NVRTC_ATTN_DEVICE int last_row(int j) const { return kBand ? j - low : kFarAway; }

  // Whether a row may not see keys before its first one, which a kernel need not look at otherwise.
  NVRTC_ATTN_DEVICE bool has_first_keys() const { return kBand && low > -kFarAway; }

  // Whether the last rows see the most keys, so that a schedule had better begin with them.
  template <class Params>
  static NVRTC_ATTN_DEVICE bool last_rows_see_most(Params const& params) {
    return kBand && params.window_right != kUnbounded;
  }
  // -- What follows.

  NVRTC_ATTN_DEVICE bool keeps(int i, int j) const {
    if constexpr (kBand) return j < len_k && j >= first_key(i) && j <= last_key(i);
    return j < len_k;
  }

  // One past the last key that row i, or any before it, sees.
  NVRTC_ATTN_DEVICE int end_key(int i) const { return kBand ? min(last_key(i) + 1, len_k) : len_k; }

  // The keys that row i sees, counted from key j0.
  NVRTC_ATTN_DEVICE Visible keys_of(int i, int j0) const {
    Visible seen;
    seen.last = (kBand ? min(last_key(i), len_k - 1) : len_k - 1) - j0;
    if constexpr (kBand) seen.first = first_key(i) - j0;
    return seen;
  }
  // The same in two parts, for a loop that leaves out the second one where !has_first_keys().
  NVRTC_ATTN_DEVICE VisibleBelow keys_below_end(int i, int j0) const {
    int const end = len_k - j0;
    return {kBand ? min(end, last_key(i) + 1 - j0) : end};
  }
  NVRTC_ATTN_DEVICE VisibleFrom keys_from_first(int i, int j0) const { return {first_key(i) - j0}; }

  // The rows that see key j, counted from row i0, which is none of those before: none where there is no such key.
  NVRTC_ATTN_DEVICE Visible rows_of(int j, int i0) const {
    Visible seen;
    seen.last = len_q - 1 - i0;
    if constexpr (kBand) {
      seen.last = min(seen.last, last_row(j) - i0);
      seen.first = first_row(j) - i0;
    }
    if (j >= len_k) seen.last = -1;
    return seen;
  }

  // Key tiles [first, last) that rows [m0, m0 + rows) can see. Empty when last <= first.
  template <int kBlockN>
  NVRTC_ATTN_DEVICE void key_tiles(int m0, int rows, int& first, int& last) const {
    first = 0;
    last = ceil_div(len_k, kBlockN);
    if constexpr (kBand) {
      first = max(first_key(m0), 0) / kBlockN;
      int const end = end_key(min(m0 + rows, len_q) - 1);
      last = end <= 0 ? 0 : ceil_div(end, kBlockN);
    }
  }

  // Query tiles [first, last) that see keys [n0, n0 + cols).
  template <int kBlockM>
  NVRTC_ATTN_DEVICE void query_tiles(int n0, int cols, int& first, int& last) const {
    first = 0;
    last = n0 < len_k ? ceil_div(len_q, kBlockM) : 0;
    if constexpr (kBand) {
      int const n_last = min(n0 + cols, len_k) - 1;
      first = max(first_row(n0), 0) / kBlockM;
      int const end = min(last_row(n_last) + 1, len_q);
      last = min(last, end <= 0 ? 0 : ceil_div(end, kBlockM));
    }
  }

  // The last key tile n whose query_tiles<kBlockM>(n * kBlockN, kBlockN) include the one from row m0 on.
  template <int kBlockM, int kBlockN>
  NVRTC_ATTN_DEVICE int last_key_tile(int m0) const {
    int last = ceil_div(len_k, kBlockN) - 1;
    if constexpr (kBand) last = min(last, last_key(m0 + kBlockM - 1) / kBlockN);
    return last;
  }

  // Whether the sequence has all of these rows: to ask beside keeps_tile() where there is something to read behind them.
  NVRTC_ATTN_DEVICE bool has_rows(int m0, int rows) const { return m0 + rows <= len_q; }

  // Whether every score of the tile, of rows that there are, is kept, so that the element test can be skipped.
  NVRTC_ATTN_DEVICE bool keeps_tile(int m0, int rows, int n0, int cols) const {
    bool all = n0 + cols <= len_k;
    if constexpr (kBand) all = all && n0 >= first_key(m0 + rows - 1) && n0 + cols - 1 <= last_key(m0);
    return all;
  }

  // Whether any score of the tile can be kept: otherwise there is nothing to compute.
  NVRTC_ATTN_DEVICE bool sees_tile(int m0, int rows, int n0, int cols) const {
    if constexpr (kBand) return n0 <= last_key(m0 + rows - 1) && n0 + cols > first_key(m0);
    return true;
  }
};

// What a `PositionMask` is made of: with the place of the part where the device has it.
template <class Traits, class Params>
NVRTC_ATTN_DEVICE auto const& mask_params(Params const& params) {
  return part_params<Traits::kDeviceStarts, Traits>(params);
}

// `value` for the scores that the mask hides in line r of a thread's accumulator tiles, s[r / 2][.][2 * (r % 2) + e]: a
// row that sees `seen` of the keys 8 n + e, or a transposed tile's key that is seen by those of such rows.
template <int kTilesM, int kTilesN, class Seen>
NVRTC_ATTN_DEVICE void replace_hidden(float (&s)[kTilesM][kTilesN][4], int r, float value, Seen const& seen) {
#pragma unroll
  for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = s[r / 2][n][2 * (r % 2) + e];
      x = seen.contains(8 * n + e) ? x : value;
    }
  }
}

}  // namespace nvrtc_attn
