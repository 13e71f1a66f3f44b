// Rows of a query tile -> (query, head) in the Hopper forward kernel. With kPackedHeads the query heads of a key head are rows of
// one tile: row r is query q0 + r / group of head h0 + r % group, so that a tile is full where a head has few queries, and
// one pass over K and V serves all of them. Rows count from the tile's first one then, and the schedule counts key heads.
// A group that does not divide the tile leaves rows at its end, which no copy writes: zeros.
#pragma once
#include "../../collective/epilogue.cuh"
#include "../../params.cuh"

namespace nvrtc_attn {

template <bool kPackedHeads, int kBlockM>
struct QueryRows {
  // Queries of a tile.
  static NVRTC_ATTN_DEVICE int per_tile(HopperForwardParams const&) { return kBlockM; }

  int m0;  // first row, which is a query
  int h;
  int count;  // rows of the sequence

  NVRTC_ATTN_DEVICE QueryRows(HopperForwardParams const&, int m_block, int h_, int len_q)
      : m0(m_block * kBlockM), h(h_), count(len_q) {}
  NVRTC_ATTN_DEVICE int query(int row) const { return row; }
  NVRTC_ATTN_DEVICE int queries(int, int rows) const { return rows; }
  NVRTC_ATTN_DEVICE int head(int) const { return h; }
  // Where a split's partial result of a row lies (`partial_row` of collective/epilogue.cuh).
  NVRTC_ATTN_DEVICE index_t partial_row(HopperForwardParams const& params, int split, int b, int row) const {
    return ((index_t(split) * params.batch + b) * params.num_heads + h) * params.seqlen_q + row;
  }
};

template <int kBlockM>
struct QueryRows<true, kBlockM> {
  static NVRTC_ATTN_DEVICE int per_tile(HopperForwardParams const& params) { return kBlockM / params.heads_per_group; }

  static constexpr int m0 = 0;
  int group, q0, h, count;

  NVRTC_ATTN_DEVICE QueryRows(HopperForwardParams const& params, int m_block, int h_kv, int len_q)
      : group(params.heads_per_group), h(h_kv * params.heads_per_group) {
    int const queries = per_tile(params);
    q0 = m_block * queries;
    count = group * min(queries, len_q - q0);
  }
  NVRTC_ATTN_DEVICE int query(int row) const { return q0 + row / group; }
  NVRTC_ATTN_DEVICE int queries(int row, int rows) const { return query(row + rows - 1) - query(row) + 1; }
  NVRTC_ATTN_DEVICE int head(int row) const { return h + row % group; }
  // The same; here params.num_heads counts key heads.
  NVRTC_ATTN_DEVICE index_t partial_row(HopperForwardParams const& params, int split, int b, int row) const {
    int const heads = params.num_heads * group;
    return ((index_t(split) * params.batch + b) * heads + head(row)) * params.seqlen_q + query(row);
  }
};

}  // namespace nvrtc_attn
