// dk and dv of the key tiles that backward_hopper works on in parts (kParts): dk is scale times the sum of what the parts have
// in dkv_accum, where each has a slot (parts_apart) or all of a tile have one.
//
// Eight CTAs a tile, of 16 keys each. A slot of dkv_accum has rows of dk (kHeadDim wide), then those of dv, in 16 x 8 blocks.
// No shared memory, no barrier. Dense problems.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../common/overlapping_launch.cuh"
#include "../hopper/backward/schedule.cuh"

namespace nvrtc_attn {

template <class Traits>
NVRTC_ATTN_DEVICE void dkv_hopper_convert(HopperBackwardParams const& params) {
  using Element = typename Traits::Element;
  constexpr int kThreads = Traits::kNumThreads;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr int kKeys = 16;
  constexpr int kOfSlot = kBlockN * (Traits::kHeadDim + Traits::kHeadDimV);
  static_assert(!Traits::kVarlen && kThreads % 32 == 0);

  wait_for_launch_ahead();
  int const shared = int(blockIdx.x) / (kBlockN / kKeys);
  int const first = int(blockIdx.x) % (kBlockN / kKeys) * kKeys;  // key of the tile
  KeyTile const tile = key_tile<false, false, true>(params, params.num_whole + shared);
  int const n0 = tile.n_block * kBlockN + first;
  int const rows = params.seqlen_k - n0;
  // Slots of the same tile are as far apart as there are such tiles (TilePart).
  float const* const accum = params.dkv_accum + index_t(shared) * kOfSlot;
  int const slots = params.parts_apart ? params.num_splits : 1;
  index_t const step = index_t(TilePart::num_shared(params)) * kOfSlot;
  Element* const dk = reinterpret_cast<Element*>(params.dk) + index_t(tile.b) * params.dk_stride_b +
                      index_t(tile.h) * params.dk_stride_h + index_t(n0) * params.dk_stride_n;
  Element* const dv = reinterpret_cast<Element*>(params.dv) + index_t(tile.b) * params.dv_stride_b +
                      index_t(tile.h) * params.dv_stride_h + index_t(n0) * params.dv_stride_n;
  int const tid = int(threadIdx.x);
  convert_accumulator<Traits::kHeadDim, kKeys, kThreads, Traits::kAligned, true>(
      accum + first * Traits::kHeadDim, dk, params.dk_stride_n, params.dk_stride_d, rows, params.head_dim, params.scale,
      tid, slots, step);
  convert_accumulator<Traits::kHeadDimV, kKeys, kThreads, Traits::kAligned, true>(
      accum + kBlockN * Traits::kHeadDim + first * Traits::kHeadDimV, dv, params.dv_stride_n, params.dv_stride_d, rows,
      params.head_dim_v, 1.0f, tid, slots, step);
}

}  // namespace nvrtc_attn
