// dk = scale * dk_accum and dv = dv_accum: after the dk/dv kernel that splits its query loop.
//
// One CTA per kBlockN keys of one (batch, key head). dkv_accum holds, for each (batch, key head), the dk rows padded to
// whole tiles (kHeadDim wide) and then the dv rows (kHeadDimV wide), both in 16 x 8 blocks. Packed sequences each have room
// for the longest; tokens of no sequence are the dk/dv kernel's.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../collective/seqlen.cuh"
#include "../params.cuh"

namespace nvrtc_attn {

// Floats of one (batch, key head) in dkv_accum.
template <class Traits>
NVRTC_ATTN_DEVICE index_t dkv_accum_size(BackwardParams const& params) {
  return index_t(params.num_n_blocks) * Traits::kBlockN * (Traits::kHeadDim + Traits::kHeadDimV);
}

template <class Traits>
NVRTC_ATTN_DEVICE void dkv_convert(BackwardParams const& params) {
  using Element = typename Traits::Element;
  constexpr int kThreads = Traits::kNumThreads;
  constexpr int kBlockN = Traits::kBlockN;

  int const tid = int(threadIdx.x);
  int block = int(blockIdx.x);
  int const n0 = block % params.num_n_blocks * kBlockN;
  block /= params.num_n_blocks;
  int const hk = block % params.num_heads_kv;
  int const b = block / params.num_heads_kv;
  SeqlenInfo<Traits::kVarlen, false> const seqlen(params, b);
  int const rows = seqlen.len_k_slot - n0;
  if (rows <= 0) return;
  float const* dk_accum = params.dkv_accum + index_t(block) * dkv_accum_size<Traits>(params);
  float const* dv_accum = dk_accum + index_t(params.num_n_blocks) * kBlockN * Traits::kHeadDim;
  index_t const row0 = index_t(seqlen.k_row0) + n0;
  Element* dk = reinterpret_cast<Element*>(params.dk) + index_t(seqlen.batch_index) * params.dk_stride_b +
                index_t(hk) * params.dk_stride_h + row0 * params.dk_stride_n;
  Element* dv = reinterpret_cast<Element*>(params.dv) + index_t(seqlen.batch_index) * params.dv_stride_b +
                index_t(hk) * params.dv_stride_h + row0 * params.dv_stride_n;
  convert_accumulator<Traits::kHeadDim, kBlockN, kThreads, Traits::kAligned>(dk_accum + index_t(n0) * Traits::kHeadDim,
                                                                             dk, params.dk_stride_n, params.dk_stride_d,
                                                                             rows, params.head_dim, params.scale, tid);
  convert_accumulator<Traits::kHeadDimV, kBlockN, kThreads, Traits::kAligned>(
      dv_accum + index_t(n0) * Traits::kHeadDimV, dv, params.dv_stride_n, params.dv_stride_d, rows, params.head_dim_v,
      1.0f, tid);
}

}  // namespace nvrtc_attn
