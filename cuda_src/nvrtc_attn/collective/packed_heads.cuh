// Rows of a query tile -> (query, head). With packed heads, the heads that share a key head are rows of one tile:
// row r is query r / group of head r % group, so one pass over K and V serves them all. Otherwise rows are queries.
//
// Row numbers (tile bounds, loops, "inside") stay those of the tile; positions (masks, dropout) and addresses take the pair.
#pragma once
#include "../common/tile_load.cuh"
#include "bias.cuh"

namespace nvrtc_attn {

template <bool kPacked>
struct RowMap {
  int group = 1;  // query heads of a key head, the rows of one query

  NVRTC_ATTN_DEVICE explicit RowMap(ForwardParams const& params) {
    if constexpr (kPacked) group = params.num_heads / params.num_heads_kv;
  }

  NVRTC_ATTN_DEVICE int query(int row) const { return kPacked ? row / group : row; }
  NVRTC_ATTN_DEVICE int head(int row) const { return kPacked ? row % group : 0; }
  // How many queries lie in rows [row, row + rows).
  NVRTC_ATTN_DEVICE int queries(int row, int rows) const {
    return kPacked ? query(row + rows - 1) - query(row) + 1 : rows;
  }
  // Rows of a sequence of this many queries.
  NVRTC_ATTN_DEVICE int rows(int queries) const { return kPacked ? queries * group : queries; }
};

// ScoreTensor of the tile's first head, by row of the tile.
template <class Element, bool kPacked>
struct RowScores {
  ScoreTensor<Element> tensor;
  RowMap<kPacked> map;
  index_t stride_h;
  bool pairs;

  NVRTC_ATTN_DEVICE RowScores(ScoreTensor<Element> const& tensor_, RowMap<kPacked> const& map_, index_t stride_h_)
      : tensor(tensor_), map(map_), stride_h(stride_h_), pairs(tensor_.pairs && (!kPacked || stride_h_ % 2 == 0)) {}

  NVRTC_ATTN_DEVICE Element* at(int row, int j) const {
    Element* const p = tensor.at(map.query(row), j);
    return kPacked ? p + index_t(map.head(row)) * stride_h : p;
  }
};

// load_tile() where every row has its own address; `row_address` is asked for rows below `rows` only, which is positive.
template <class Tile, int kThreads, bool kAligned, bool kLegacy, class Element, class RowAddress>
NVRTC_ATTN_DEVICE void load_rows(Element* tile, RowAddress row_address, index_t stride_col, int rows, int cols,
                                 int tid) {
#pragma unroll 1
  for (int n = tid; n < Tile::kRows * Tile::kChunks; n += kThreads) {
    int const row = n / Tile::kChunks;
    load_tile_column<Tile, Tile::kRows, kAligned, kLegacy>(tile, row_address(min(row, rows - 1)), 0, stride_col, rows,
                                                           cols, n % Tile::kChunks, row);
  }
}

}  // namespace nvrtc_attn
