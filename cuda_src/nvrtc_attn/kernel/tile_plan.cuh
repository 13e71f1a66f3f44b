// Before an attention kernel with kTileWords: which tiles of a byte mask keep a score, and which keep all of them.
//
// A warp reads one tile and a thread block writes the word of 32 tiles (collective/tile_words.cuh): grid is words a line x
// lines x heads x batch entries of the mask in its broadcast form. Of a mask with one row for all queries a line of key
// tiles is one for all queries too, and transposed lines are all ones or all zeros: blocks of one warp, which writes a
// whole line. Reading a tile ends when both kinds of bytes were seen, so that a mask with one byte for every score costs
// a read of its empty and full tiles alone, which the attention kernel then need not read.
#pragma once
#include "../collective/mask.cuh"
#include "../collective/tile_words.cuh"

namespace nvrtc_attn {

template <class Traits, class Params>
NVRTC_ATTN_DEVICE void tile_plan(Params const& params) {
  static_assert(Traits::kNumThreads == 1024, "a warp for each bit of a word");
  extern __shared__ __align__(16) unsigned char smem[];
  unsigned* const contents = reinterpret_cast<unsigned*>(smem);  // of the 32 tiles
  int const lane = int(threadIdx.x) & 31;
  int const warp = int(threadIdx.x) >> 5;
  bool const transposed = params.tile_plan_transposed != 0;
  bool const one_warp = blockDim.x == 32;
  int const words = (params.tile_plan_tiles + 31) / 32;
  int block = int(blockIdx.x);
  int word = 0;
  if (!one_warp) {
    word = block % words;
    block /= words;
  }
  int const line = block % params.tile_plan_lines;
  block /= params.tile_plan_lines;
  int const h = block % params.tile_plan_heads;
  int const b = block / params.tile_plan_heads;
  TileWord* const to = tile_word_buffer(params) + params.tile_words_offset + index_t(b) * params.tile_words_stride_b +
                       index_t(h) * params.tile_words_stride_h + index_t(line) * params.tile_words_stride_line;
  int const tile = 32 * word + warp;
  int const m0 = (transposed ? tile : line) * params.tile_plan_rows;
  int const n0 = (transposed ? line : tile) * params.tile_plan_cols;
  unsigned const found =
      tile_contents(params.mask + index_t(b) * params.mask_stride_b + index_t(h) * params.mask_stride_h +
                        index_t(m0) * params.mask_stride_m + index_t(n0) * params.mask_stride_n,
                    params.mask_stride_m, params.mask_stride_n, min(params.tile_plan_rows, params.seqlen_q - m0),
                    min(params.tile_plan_cols, params.seqlen_k - n0), lane, 32, [](unsigned x) {
                      return unsigned(__any_sync(0xffffffffu, x & kSomeKept) ? kSomeKept : 0) |
                             unsigned(__any_sync(0xffffffffu, x & kSomeDropped) ? kSomeDropped : 0);
                    });
  if (one_warp) {
    TileWord const all{found & kSomeKept ? 0xffffffffu : 0, found == kSomeKept ? 0xffffffffu : 0};
    for (int w = lane; w < words; w += 32) to[w] = all;
    return;
  }
  if (lane == 0) contents[warp] = found;
  __syncthreads();
  if (warp == 0) {
    unsigned const of_tile = contents[lane];
    unsigned const some = __ballot_sync(0xffffffffu, of_tile & kSomeKept);
    unsigned const all = __ballot_sync(0xffffffffu, of_tile == kSomeKept);
    if (lane == 0) to[word] = {some, all};
  }
}

}  // namespace nvrtc_attn
