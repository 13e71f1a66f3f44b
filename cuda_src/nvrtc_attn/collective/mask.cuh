// Which keys a query may see by position, and which tiles that leaves.
//
// Row i of a sequence keeps key j iff i + low <= j <= i + high and j < len_k (SEMANTICS: off - left and off + right,
// off = 0 from the top left or len_k - len_q from the bottom right, signed). All arithmetic is on sequence-local indices.
#pragma once
#include "../params.cuh"

namespace nvrtc_attn {

constexpr int kFarAway = 1 << 30;  // beyond every index, small enough to add one to without overflow

NVRTC_ATTN_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <bool kBand>
struct PositionMask {
  int low = -kFarAway;
  int high = kFarAway;
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

  NVRTC_ATTN_DEVICE bool keeps(int i, int j) const {
    if constexpr (kBand) return j < len_k && j >= i + low && j <= i + high;
    return j < len_k;
  }

  // The keys that row i sees are first_key(i) <= j <= last_key(i).
  NVRTC_ATTN_DEVICE int first_key(int i) const { return kBand ? i + low : 0; }
  NVRTC_ATTN_DEVICE int last_key(int i) const { return kBand ? min(i + high, len_k - 1) : len_k - 1; }

  // Rows before this one see no key from j on.
  NVRTC_ATTN_DEVICE int first_row(int j) const { return kBand ? j - high : 0; }

  // Rows after this one do not see key j.
  NVRTC_ATTN_DEVICE int last_row(int j) const { return kBand ? j - low : len_q - 1; }

  // Key tiles [first, last) that rows [m0, m0 + rows) can see. Empty when last <= first.
  template <int kBlockN>
  NVRTC_ATTN_DEVICE void key_tiles(int m0, int rows, int& first, int& last) const {
    first = 0;
    last = ceil_div(len_k, kBlockN);
    if constexpr (kBand) {
      int const m_last = min(m0 + rows, len_q) - 1;
      first = max(m0 + low, 0) / kBlockN;
      int const end = min(m_last + high + 1, len_k);  // one past the last key that any row sees
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
      first = max(n0 - high, 0) / kBlockM;
      int const end = min(n_last - low + 1, len_q);
      last = min(last, end <= 0 ? 0 : ceil_div(end, kBlockM));
    }
  }

  // Whether every score of the tile is kept, so that the element test can be skipped.
  NVRTC_ATTN_DEVICE bool keeps_tile(int m0, int rows, int n0, int cols) const {
    bool all = n0 + cols <= len_k;
    if constexpr (kBand) all = all && n0 >= m0 + rows - 1 + low && n0 + cols - 1 <= m0 + high;
    return all;
  }
};

}  // namespace nvrtc_attn
