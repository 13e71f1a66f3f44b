// Before an attention kernel with kTileWords: which tiles a user's mask keeps a score of, and which it keeps all of, from
// the ranges of what it is made of (collective/tile_ranges.cuh). No score is looked at.
//
// A thread block writes one word of 32 lines (collective/tile_words.cuh): grid is words a line x groups of 32 lines x heads x
// batch entries that the mask tells apart. First its warps find, for 32 tiles of queries and 32 of keys, the least and the
// largest of what the mask reads of a query, or a key, alone: 64 tiles of loads for 1024 decisions. Then a thread decides
// about a tile, and a warp's votes are a word. With kTileBits undecided tiles have slots, for the launch that comes next.
#pragma once
#include "../collective/tile_bits.cuh"
#include "../collective/tile_ranges.cuh"
#include "../collective/tile_words.cuh"

namespace nvrtc_attn {

template <class Traits, class Params>
NVRTC_ATTN_DEVICE void tile_ranges(Params const& params) {
  using Modifier = ModifierOf<Traits>;
  static_assert(Modifier::kMasks, "ranges are of a mask");
  constexpr int kTiles = 32;  // of each side
  __shared__ typename Modifier::Rows all_rows[kTiles];
  __shared__ typename Modifier::Columns all_columns[kTiles];
  int const lane = int(threadIdx.x) & 31;
  int const warp = int(threadIdx.x) >> 5;
  bool const transposed = params.tile_plan_transposed != 0;
  int const words = (params.tile_plan_tiles + kTiles - 1) / kTiles;
  int const groups = (params.tile_plan_lines + kTiles - 1) / kTiles;
  int block = int(blockIdx.x);
  int const word = block % words;
  block /= words;
  int const group = block % groups;
  block /= groups;
  int const h = block % params.tile_plan_heads;
  int const b = block / params.tile_plan_heads;
  Modifier const modifier(params, b, h);

  int const row_tile0 = kTiles * (transposed ? word : group);
  int const column_tile0 = kTiles * (transposed ? group : word);
  for (int i = warp; i < kTiles; i += Traits::kNumWarps) {
    typename Modifier::Rows rows;
    rows.clear();
    int const q0 = (row_tile0 + i) * params.tile_plan_rows;
    int const q1 = min(q0 + params.tile_plan_rows, params.seqlen_q);
    for (int q = q0 + lane; q < q1; q += 32) modifier.join(rows, q);
    typename Modifier::Columns columns;
    columns.clear();
    int const k0 = (column_tile0 + i) * params.tile_plan_cols;
    int const k1 = min(k0 + params.tile_plan_cols, params.seqlen_k);
    for (int k = k0 + lane; k < k1; k += 32) modifier.join(columns, k);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      rows.join(rows.of_lane(offset));
      columns.join(columns.of_lane(offset));
    }
    if (lane == 0) {
      all_rows[i] = rows;
      all_columns[i] = columns;
    }
  }
  __syncthreads();

  for (int i = warp; i < kTiles; i += Traits::kNumWarps) {
    int const line = kTiles * group + i;
    if (line >= params.tile_plan_lines) break;
    int const tile = kTiles * word + lane;
    int const row = transposed ? lane : i;
    int const column = transposed ? i : lane;
    int const q0 = (row_tile0 + row) * params.tile_plan_rows;
    int const k0 = (column_tile0 + column) * params.tile_plan_cols;
    IntRange found{0, 0};
    if (tile < params.tile_plan_tiles) {
      IntRange const queries{q0, min(q0 + params.tile_plan_rows, params.seqlen_q) - 1};
      IntRange const keys{k0, min(k0 + params.tile_plan_cols, params.seqlen_k) - 1};
      found = modifier.keeps(queries, keys, all_rows[row], all_columns[column]);
    }
    unsigned const some = __ballot_sync(0xffffffffu, found.hi != 0);
    unsigned const all = __ballot_sync(0xffffffffu, !Traits::kMask && found.lo != 0);  // a byte mask may hide more
    TileWord* const to = tile_word_buffer(params) + params.tile_words_offset + index_t(b) * params.tile_words_stride_b +
                         index_t(h) * params.tile_words_stride_h + index_t(line) * params.tile_words_stride_line;
    if (lane == 0) to[word] = {some, all};
    if constexpr (Traits::kTileBits) take_slots<Traits>(params, to + word, some & ~all, {line, tile, h, b}, lane);
  }
}

}  // namespace nvrtc_attn
