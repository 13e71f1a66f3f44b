// Merge the partial results of split keys: out = sum over splits of exp(lse_s - lse) * out_s, lse = log of the sum.
//
// One warp per output row (sequence, head, query), kNumWarps rows a thread block; splits are added in order, so the result
// does not depend on timing. Every element of out and lse is written here: the kernel over splits writes the workspace only,
// and a split without keys only its lse (-inf), so its out_partial is never read. No shared memory, no barriers.
#pragma once
#include "../collective/epilogue.cuh"
#include "../collective/scores.cuh"
#include "../collective/seqlen.cuh"

namespace nvrtc_attn {

template <class Traits>
NVRTC_ATTN_DEVICE void combine(ForwardParams const& params) {
  using Element = typename Traits::Element;
  int const lane = int(threadIdx.x) & 31;
  int const warp = int(threadIdx.x) >> 5;
  int const rows_per_head = params.seqlen_q;
  index_t const num_rows = index_t(params.batch) * params.num_heads * rows_per_head;
  int const row_blocks = int((num_rows + Traits::kNumWarps - 1) / Traits::kNumWarps);
  if constexpr (Traits::kVarlen) {
    if (int(blockIdx.x) >= row_blocks) {  // one more block per head: tokens outside every sequence
      zero_rows_of_no_sequence<Element, Traits::kNumThreads>(params, int(blockIdx.x) - row_blocks, 0, 1,
                                                             int(threadIdx.x));
      return;
    }
  }
  index_t const row = index_t(blockIdx.x) * Traits::kNumWarps + warp;
  if (row >= num_rows) return;
  int const i = int(row % rows_per_head);
  int const h = int(row / rows_per_head % params.num_heads);
  int const b = int(row / rows_per_head / params.num_heads);
  SeqlenInfo<Traits::kVarlen, false> const seqlen(params, b);
  pad_lse<32>(params, b, h, seqlen.len_q, i, 1, i == rows_per_head - 1, lane);
  if (i >= seqlen.len_q) return;

  index_t const split_stride = num_rows;
  float const* const lse_partial = params.lse_partial + partial_row(params, 0, b, h, i);
  float const* const out_partial = params.out_partial + partial_row(params, 0, b, h, i) * Traits::kHeadDimV;
  float max_lse = -infinity();
  for (int s = lane; s < params.num_splits; s += 32) max_lse = fmaxf(max_lse, lse_partial[s * split_stride]);
#pragma unroll
  for (int delta = 16; delta > 0; delta /= 2) max_lse = fmaxf(max_lse, __shfl_xor_sync(0xffffffffu, max_lse, delta));
  bool const empty = max_lse == -infinity();
  float const reference = empty ? 0.0f : max_lse;
  float sum = 0.0f;
  for (int s = lane; s < params.num_splits; s += 32) sum += expf(lse_partial[s * split_stride] - reference);
#pragma unroll
  for (int delta = 16; delta > 0; delta /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, delta);
  if (lane == 0 && params.lse != nullptr) {
    *lse_row(params, b, h, seqlen.q_row0, i) = empty ? params.lse_empty : max_lse + logf(sum);
  }

  float const factor = empty ? 0.0f : 1.0f / sum;
  Element* const out = reinterpret_cast<Element*>(params.out) + index_t(seqlen.batch_index) * params.out_stride_b +
                       index_t(h) * params.out_stride_h + (index_t(seqlen.q_row0) + i) * params.out_stride_m;
  for (int d = 4 * lane; d < Traits::kHeadDimV; d += 128) {
    float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int s = 0; s < params.num_splits; ++s) {
      float const lse = lse_partial[s * split_stride];
      if (lse == -infinity()) continue;
      float const weight = expf(lse - reference) * factor;
      float4 const x = *reinterpret_cast<float4 const*>(out_partial + s * split_stride * Traits::kHeadDimV + d);
      acc.x += weight * x.x;
      acc.y += weight * x.y;
      acc.z += weight * x.z;
      acc.w += weight * x.w;
    }
    float const values[4] = {acc.x, acc.y, acc.z, acc.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (d + c < params.head_dim_v) out[index_t(d + c) * params.out_stride_d] = from_float<Element>(values[c]);
    }
  }
}

}  // namespace nvrtc_attn
