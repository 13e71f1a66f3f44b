// dk = scale * dk_accum and dv = dv_accum: after the dk/dv kernel that splits its query loop.
//
// One CTA per kBlockN keys of one (batch, key head). dkv_accum holds, for each (batch, key head), the dk rows padded to
// whole tiles (kHeadDim wide) and then the dv rows (kHeadDimV wide), both in 16 x 8 blocks. Packed: for each key head the rows
// of all sequences, each from a tile of its own on (accumulator_row0); tokens of no sequence are the dk/dv kernel's.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../collective/packed_slots.cuh"
#include "../collective/seqlen.cuh"
#include "../common/overlapping_launch.cuh"
#include "../params.cuh"

namespace nvrtc_attn {

// Rows of dk, and of dv, of one (batch, key head) in dkv_accum.
template <class Traits>
NVRTC_ATTN_DEVICE index_t dkv_accum_rows(BackwardParams const& params) {
  using Slots = PackedSlots<Traits::kBlockN>;
  int const tiles = Traits::kVarlen ? Slots{nullptr, params.batch, params.total_k}.count() : params.num_n_blocks;
  return index_t(tiles) * Traits::kBlockN;
}
// Floats of one (batch, key head).
template <class Traits>
NVRTC_ATTN_DEVICE index_t dkv_accum_size(BackwardParams const& params) {
  return dkv_accum_rows<Traits>(params) * (Traits::kHeadDim + Traits::kHeadDimV);
}
// The (batch, key head) as a number, and the row of the sequence's first key.
template <class Traits>
NVRTC_ATTN_DEVICE int dkv_accum_head(BackwardParams const& params, int b, int hk) {
  return Traits::kVarlen ? hk : b * params.num_heads_kv + hk;
}
template <class Traits>
NVRTC_ATTN_DEVICE index_t dkv_accum_row0(BackwardParams const& params, int b) {
  if constexpr (Traits::kVarlen) return accumulator_row0<true, Traits::kBlockN>(params.cu_seqlens_k[b], b);
  return 0;
}

// Where in dkv_accum dk and dv of key `key` of sequence b lie, of key head hk.
struct DkvAccumRow {
  float* dk;
  float* dv;
};
template <class Traits>
NVRTC_ATTN_DEVICE DkvAccumRow dkv_accum_row(BackwardParams const& params, int b, int hk, int key) {
  index_t const rows = dkv_accum_rows<Traits>(params);
  index_t const row = dkv_accum_row0<Traits>(params, b) + key;
  float* const accum =
      params.dkv_accum + index_t(dkv_accum_head<Traits>(params, b, hk)) * dkv_accum_size<Traits>(params);
  return {accum + row * Traits::kHeadDim, accum + rows * Traits::kHeadDim + row * Traits::kHeadDimV};
}

template <class Traits>
NVRTC_ATTN_DEVICE void dkv_convert(BackwardParams const& params) {
  using Element = ResultK<Traits>;
  constexpr int kThreads = Traits::kNumThreads;
  constexpr int kBlockN = Traits::kBlockN;

  wait_for_launch_ahead();
  int const tid = int(threadIdx.x);
  int block = int(blockIdx.x);
  int n0, hk, b;
  if constexpr (Traits::kVarlen) {
    PackedSlots<kBlockN> const slots{params.cu_seqlens_k, params.batch, params.total_k};
    hk = block / slots.count();
    PackedSlot const found = slots.find_together(block - hk * slots.count(), tid % 32);
    if (found.b == params.batch || found.tile >= params.num_n_blocks) return;
    n0 = found.tile * kBlockN;
    b = found.b;
    block = hk;
  } else {
    n0 = block % params.num_n_blocks * kBlockN;
    block /= params.num_n_blocks;
    hk = block % params.num_heads_kv;
    b = block / params.num_heads_kv;
  }
  SeqlenInfo<Traits::kVarlen, false> const seqlen(params, b);
  int const rows = seqlen.len_k_slot - n0;
  if (rows <= 0) return;
  index_t const accum_row = dkv_accum_row0<Traits>(params, b) + n0;
  float const* dk_accum = params.dkv_accum + index_t(block) * dkv_accum_size<Traits>(params);
  float const* dv_accum = dk_accum + dkv_accum_rows<Traits>(params) * Traits::kHeadDim;
  index_t const row0 = index_t(seqlen.k_row0) + n0;
  Element* dk = reinterpret_cast<Element*>(params.dk) + index_t(seqlen.batch_index) * params.dk_stride_b +
                index_t(hk) * params.dk_stride_h + row0 * params.dk_stride_n;
  Element* dv = reinterpret_cast<Element*>(params.dv) + index_t(seqlen.batch_index) * params.dv_stride_b +
                index_t(hk) * params.dv_stride_h + row0 * params.dv_stride_n;
  convert_accumulator<Traits::kHeadDim, kBlockN, kThreads, Traits::kAligned>(dk_accum + accum_row * Traits::kHeadDim,
                                                                             dk, params.dk_stride_n, params.dk_stride_d,
                                                                             rows, params.head_dim, params.scale, tid);
  convert_accumulator<Traits::kHeadDimV, kBlockN, kThreads, Traits::kAligned>(
      dv_accum + accum_row * Traits::kHeadDimV, dv, params.dv_stride_n, params.dv_stride_d, rows, params.head_dim_v,
      1.0f, tid);
}

}  // namespace nvrtc_attn
