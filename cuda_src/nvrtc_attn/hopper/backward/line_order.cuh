// The key tiles of a mask with words (collective/tile_words.cuh) in the order in which they are handed out: those that the
// most query tiles see first, so that the last ones of a pass are short. Equal ones keep their order; a list for every (batch
// entry, query head) that the mask tells apart.
//
// A thread block of backward_hopper_prepare makes a list, behind the launch that writes the words, and the loading warps read it.
// Where it lies is in tile_order_offset and the strides beside it of WithTileWords, which mean something else in the
// deterministic pass. 0: there is none, and key tiles come as they lie.
#pragma once
#include "../../collective/mask.cuh"
#include "../../collective/tile_words.cuh"

namespace nvrtc_attn {

constexpr int kMostOrderedLines = 1024;

struct LineOrder {
  WithTileWords<HopperBackwardParams> const& params;

  NVRTC_ATTN_DEVICE explicit LineOrder(HopperBackwardParams const& params_) : params(tiled(params_)) {}

  NVRTC_ATTN_DEVICE bool exists() const { return params.tile_order_offset > 0; }
  // Of a list, key tiles by their ranks.
  NVRTC_ATTN_DEVICE int* list(int b, int h) const {
    return reinterpret_cast<int*>(tile_word_buffer(params) + params.tile_order_offset +
                                  index_t(b) * params.tile_order_stride_b + index_t(h) * params.tile_order_stride_h);
  }
  NVRTC_ATTN_DEVICE int heads() const { return params.tile_order_stride_h == 0 ? 1 : params.num_heads; }
  NVRTC_ATTN_DEVICE int lists() const {
    return exists() ? heads() * (params.tile_order_stride_b == 0 ? 1 : params.batch) : 0;
  }
};

// Makes list number i, by all threads of a block.
template <class Traits>
NVRTC_ATTN_DEVICE void order_key_tiles(HopperBackwardParams const& params, int i) {
  __shared__ int query_tiles[kMostOrderedLines];
  LineOrder const order(params);
  int const b = i / order.heads();
  int const h = i - b * order.heads();
  int const lines = params.num_n_blocks;
  PositionMask<Traits::kBand> const mask(params, params.seqlen_q, params.seqlen_k);
  for (int line = int(threadIdx.x); line < lines; line += Traits::kNumThreads) {
    int first, last;
    mask.template query_tiles<Traits::kBlockM>(line * Traits::kBlockN, Traits::kBlockN, first, last);
    query_tiles[line] = tile_line(params, b, h, line).count(first, last);
  }
  __syncthreads();
  int* const list = order.list(b, h);
  for (int line = int(threadIdx.x); line < lines; line += Traits::kNumThreads) {
    int const own = query_tiles[line];
    int rank = 0;
    for (int other = 0; other < lines; ++other) {
      rank += query_tiles[other] > own || (query_tiles[other] == own && other < line);
    }
    list[rank] = line;
  }
}

}  // namespace nvrtc_attn
