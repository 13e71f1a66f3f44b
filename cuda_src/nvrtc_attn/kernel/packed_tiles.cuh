// Before forward_hopper on packed sequences: the list of their query tiles (hopper/common/tile_list.cuh), by one thread block.
#pragma once
#include "../collective/mask.cuh"
#include "../collective/seqlen.cuh"
#include "../hopper/forward/scheduler.cuh"

namespace nvrtc_attn {

template <class Traits>
NVRTC_ATTN_DEVICE void packed_tiles(HopperForwardParams const& params) {
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kBlockN = Traits::kBlockN;
  auto key_tiles = [&](int b, int m_block) {
    SeqlenInfo<true, Traits::kSequsedK> const seqlen(params, b);
    if (seqlen.len_q <= 0) return 0;
    PositionMask<Traits::kBand> const mask(params, seqlen.len_q, seqlen.len_k);
    int first, last;
    mask.template key_tiles<kBlockN>(m_block * kBlockM, kBlockM, first, last);
    return max(last - first, 0);
  };
  TileListShape const shape = {params.num_m_blocks,
                               params.lse != nullptr && !params.lse_packed,  // its rows are padded, pad_lse()
                               params.cu_seqlens_k,
                               params.chunk_rows,
                               params.num_chunks,
                               ceil_div(params.seqlen_k, kBlockN),
                               params.num_heads_kv,
                               params.head_group,
                               params.heads_per_group,
                               params.num_workers};
  make_tile_list<Traits::kNumThreads, kBlockM, Traits::kBand, false>(
      query_tile_list(params), shape, PackedSlots<kBlockM>{params.cu_seqlens_q, params.batch, params.total_q},
      key_tiles, int(threadIdx.x), [&](int b, int m_block) {
        PackedTile tile = {b, m_block};
        if (b < params.batch) {
          SeqlenInfo<true, Traits::kSequsedK> const seqlen(params, b);
          tile = {b, m_block, seqlen.q_row0, seqlen.len_q, seqlen.k_row0, seqlen.len_k};
        }
        return tile;
      });
}

}  // namespace nvrtc_attn
