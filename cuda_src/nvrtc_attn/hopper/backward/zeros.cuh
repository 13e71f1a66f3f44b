// Zeros that the Hopper backward kernels write: over rows of a tile that no sequence has or a mask hides, so that NaN in
// them reaches no product, and where no product reaches dbias.
#pragma once
#include "../../collective/bias.cuh"
#include "../../collective/hidden_keys.cuh"
#include "../../common/numbers.cuh"
#include "../../params.cuh"
#include "../common/wgmma.cuh"

namespace nvrtc_attn {

// Rows [first, end) of a tile in shared memory become zero; `threads` threads take part. The caller fences.
template <int kRows, int kSlabs>
NVRTC_ATTN_DEVICE void zero_tile_rows(unsigned tile, int first, int end, int tid, int threads) {
  int const count = (end - first) * 8 * kSlabs;
  for (int c = tid; c < count; c += threads) {
    int const row = first + c / (8 * kSlabs);
    int const chunk = c % (8 * kSlabs);
    unsigned const to = tile + chunk / 8 * (kRows * kSlabRowBytes) + row * kSlabRowBytes + chunk % 8 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }
}

// Likewise the rows from `first` on that a padding mask hides: dQ = dS K. Row 0 of the tile is key n0.
template <int kRows, int kSlabs>
NVRTC_ATTN_DEVICE void zero_hidden_tile_rows(unsigned tile, HiddenKeys const& hidden, int n0, int len_k, int first,
                                             int end, int tid, int threads) {
#pragma unroll 1
  for (int row = first + tid / 8; row < min(end, len_k - n0); row += threads / 8) {
    if (hidden(n0 + row)) zero_tile_rows<kRows, kSlabs>(tile, row, row + 1, tid % 8, 8);
  }
}

// Zeros in dbias for keys [n0, n0 + cols) and queries [begin, end) of query head h: what no product reaches.
template <class Traits, int kWarps>
NVRTC_ATTN_DEVICE void zero_dbias(HopperBackwardParams const& params, int b, int h, int n0, int cols, int begin,
                                  int end, int tid) {
  using DBias = typename Traits::DBias;
  ScoreTensor<DBias> const dbias(reinterpret_cast<DBias*>(params.dbias), b, h, params.dbias_stride_b,
                                 params.dbias_stride_h, params.dbias_stride_m, params.dbias_stride_n);
  for (int i = begin + tid / 32; i < end; i += kWarps) {
    for (int j = n0 + tid % 32; j < n0 + cols; j += 32) *dbias.at(i, j) = from_float<DBias>(0.0f);
  }
}

}  // namespace nvrtc_attn
