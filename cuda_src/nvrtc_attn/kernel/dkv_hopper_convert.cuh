// dk = scale * dk_accum and dv = dv_accum of the key tiles that backward_hopper works on in parts (kParts).
//
// One CTA per such tile, which has a slot of dkv_accum: its rows of dk (kHeadDim wide), then those of dv, in 16 x 8 blocks. No
// shared memory, no barrier. Dense problems.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../hopper/backward/schedule.cuh"

namespace nvrtc_attn {

template <class Traits>
NVRTC_ATTN_DEVICE void dkv_hopper_convert(HopperBackwardParams const& params) {
  using Element = typename Traits::Element;
  constexpr int kThreads = Traits::kNumThreads;
  constexpr int kBlockN = Traits::kBlockN;
  static_assert(!Traits::kVarlen && kThreads % 32 == 0);

  int const slot = int(blockIdx.x);
  KeyTile const tile = key_tile<false, false, true>(params, params.num_whole + slot);
  int const n0 = tile.n_block * kBlockN;
  float const* const accum = params.dkv_accum + index_t(slot) * (kBlockN * (Traits::kHeadDim + Traits::kHeadDimV));
  Element* const dk = reinterpret_cast<Element*>(params.dk) + index_t(tile.b) * params.dk_stride_b +
                      index_t(tile.h) * params.dk_stride_h + index_t(n0) * params.dk_stride_n;
  Element* const dv = reinterpret_cast<Element*>(params.dv) + index_t(tile.b) * params.dv_stride_b +
                      index_t(tile.h) * params.dv_stride_h + index_t(n0) * params.dv_stride_n;
  int const rows = params.seqlen_k - n0;
  int const tid = int(threadIdx.x);
  convert_accumulator<Traits::kHeadDim, kBlockN, kThreads, Traits::kAligned>(
      accum, dk, params.dk_stride_n, params.dk_stride_d, rows, params.head_dim, params.scale, tid);
  convert_accumulator<Traits::kHeadDimV, kBlockN, kThreads, Traits::kAligned>(accum + kBlockN * Traits::kHeadDim, dv,
                                                                              params.dv_stride_n, params.dv_stride_d,
                                                                              rows, params.head_dim_v, 1.0f, tid);
}

}  // namespace nvrtc_attn
