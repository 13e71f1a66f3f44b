// Dropout in the forward kernel on Hopper: decisions of a key tile, made by warps that do nothing else.
//
// The arithmetic (hopper/common/keep_words.cuh) depends on positions alone. In the consumers it stands between two products,
// where two warps a scheduler do not hide its ten dependent rounds: 3.3 us for 128 x 128 scores at head dim 64, of which the
// products take 1.2. Here the three warps of the loading group that load nothing and those of a fourth group run up to four
// key tiles ahead, as in the backward kernel (hopper/backward/keep_words_transposed.cuh).
//
// A slot has the two words of every consumer thread, [warp][lane], as KeepMaker makes them for its rows. Words of one warp are a
// unit, which the makers take in turn, on from one key tile to the next.
#pragma once
#include "../../collective/mask.cuh"
#include "../../collective/seqlen.cuh"
#include "../common/keep_words.cuh"
#include "scheduler.cuh"
#include "shape.cuh"

namespace nvrtc_attn {

// Warp `maker` of Shape::kMakers.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void make_keep_words(HopperForwardParams const& params, ForwardBarriers<Shape> const& barriers,
                                       unsigned smem, int maker) {
  int const lane = int(threadIdx.x) & 31;
  RingPosition<Shape::kStagesKeep> slot;
  int unit = maker;  // this warp's next, counted from the first of the key tile
  TileScheduler<Traits::kBand, false> scheduler(params);
  WorkTile tile;
  while (scheduler.next(tile)) {
    SeqlenInfo<false, Traits::kSequsedK> const seqlen(params, tile.b);
    int const m0 = tile.m_block * Shape::kBlockM;
    if (m0 >= seqlen.len_q) continue;
    PositionMask<Traits::kBand> const mask(params, seqlen.len_q, seqlen.len_k);
    int first, last;
    mask.template key_tiles<Shape::kBlockN>(m0, Shape::kBlockM, first, last);
    Dropout const dropout(dropout_params<Traits>(params), tile.b, tile.h);
#pragma unroll 1
    for (int n = last - 1; n >= first; --n) {
#pragma unroll 1
      for (; unit < Shape::kKeepUnits; unit += Shape::kMakers) {
        barriers.empty_keep(slot.stage).wait(slot.parity ^ 1);
        int const group_row = m0 + 64 * (unit / 4);
        int const columns = seqlen.len_q > group_row ? mask.end_key(group_row + 63) : 0;
        if (n * Shape::kBlockN < columns) {  // otherwise the group sees nothing of the tile
          KeepMaker<Shape::kStepsN> words(dropout, m0 + 16 * unit + (lane >> 2), n * Shape::kBlockN, lane);
          KeepWords<Shape::kStepsN> keep;
          if (words.one_upper_half) {
#pragma unroll 2
            for (int g = 0; g < Shape::kStepsN; ++g) words.add(dropout.seed);
            keep = words.template finish<false>();
          } else {
            keep = words.words_of_any();
          }
          asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(smem + Shape::kOffsetKeep +
                                                                slot.stage * Shape::kBytesKeep + 256 * unit + 8 * lane),
                       "r"(keep.word[0]), "r"(keep.word[1])
                       : "memory");
        }
        __syncwarp();
        if (lane == 0) barriers.full_keep(slot.stage).arrive();
      }
      unit -= Shape::kKeepUnits;
      slot.advance();
    }
  }
}

}  // namespace nvrtc_attn
