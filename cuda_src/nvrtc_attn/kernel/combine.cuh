// Merge the partial results of split keys: with the largest score m_s of a split, its sum of exponentials l_s, and m
// the largest m_s, out = sum over splits of exp(m_s - m) l_s out_s / l, lse = m + log(l), l = sum over splits of
// exp(m_s - m) l_s. The lse of each split would not do: where m_s is the lowest finite value it has no room for
// log(l_s). For the same reason m_s comes in the unit that the kernel over splits has scores in, of which the host says
// whether it is natural (kPrescale): scaled and rounded, two large m_s would differ by another amount.
//
// A thread block has kBlockM output rows (sequence, head, query), a warp or the whole block for each: few rows of many
// splits (decoding) need the threads. A thread has four value columns; threads beyond a row of those divide the splits
// into groups. Splits are added in a fixed order, so the result does not depend on timing. Every element of out and lse is
// written here: the kernel over splits writes the workspace only, and a split without keys only (-inf, 0), so its
// out_partial is never read.
//
// Shared memory: weights[kBlockM][num_splits], rounded up to 16 bytes; a float4 of each thread. Barriers, of the threads of
// a row: weights, sums.
#pragma once
#include "../collective/epilogue.cuh"
#include "../collective/scores.cuh"
#include "../collective/seqlen.cuh"
#include "../collective/sink.cuh"
#include "../common/overlapping_launch.cuh"

namespace nvrtc_attn {

template <class Traits>
NVRTC_ATTN_DEVICE void combine(ForwardParams const& params) {
  using Element = ResultQ<Traits>;
  constexpr int kRows = Traits::kBlockM;
  constexpr int kThreads = Traits::kNumThreads / kRows;  // of a row
  constexpr int kVectors = Traits::kHeadDimV / 4;
  constexpr int kGroups = kThreads > kVectors ? kThreads / kVectors : 1;
  static_assert(kThreads == 32 || kRows == 1, "the threads of a row are a warp or the block");
  static_assert(Traits::kHeadDimV % 4 == 0, "a thread has four columns");
  wait_for_launch_ahead();
  extern __shared__ __align__(16) unsigned char smem[];
  int const tid = int(threadIdx.x) % kThreads;
  int const row_in_block = int(threadIdx.x) / kThreads;
  int const lane = tid & 31;
  float* const weights = reinterpret_cast<float*>(smem) + row_in_block * params.num_splits;
  float4* const sums = reinterpret_cast<float4*>(smem + (kRows * params.num_splits * sizeof(float) + 15) / 16 * 16) +
                       row_in_block * kThreads;
  auto sync = [] {
    if constexpr (kRows == 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  };
  int const rows_per_head = params.seqlen_q;
  int const num_rows = params.batch * params.num_heads * rows_per_head;
  int const row_blocks = (num_rows + kRows - 1) / kRows;
  if constexpr (Traits::kVarlen) {
    if (int(blockIdx.x) >= row_blocks) {  // one more block per head: tokens outside every sequence
      zero_rows_of_no_sequence<Element, Traits::kNumThreads>(params, int(blockIdx.x) - row_blocks, 0, 1,
                                                             int(threadIdx.x));
      return;
    }
  }
  int const row = int(blockIdx.x) * kRows + row_in_block;
  if (row >= num_rows) return;
  int const i = row % rows_per_head;
  int const h = row / rows_per_head % params.num_heads;
  int const b = row / rows_per_head / params.num_heads;
  SeqlenInfo<Traits::kVarlen, false> const seqlen(params, b);
  pad_lse<kThreads>(params, b, h, seqlen.len_q, i, 1, i == rows_per_head - 1, tid);
  if (i >= seqlen.len_q) return;

  index_t const split_stride = num_rows;
  float2 const* const partial = params.softmax_partial + partial_row(params, 0, b, h, i);
  ScoreMap<Traits> const map(params);
  float largest = -infinity();
  for (int s = lane; s < params.num_splits; s += 32) largest = fmaxf(largest, partial[s * split_stride].x);
#pragma unroll
  for (int delta = 16; delta > 0; delta /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, delta));
  float const reference = largest == -infinity() ? 0.0f : largest;
  float sum = 0.0f;  // which every warp adds up for itself
  for (int s = lane; s < params.num_splits; s += 32) {
    float2 const of_split = partial[s * split_stride];
    float const weight = map.ratio(of_split.x, reference) * of_split.y;
    if (tid < 32) weights[s] = weight;
    sum += weight;
  }
#pragma unroll
  for (int delta = 16; delta > 0; delta /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, delta);
  RowEnd end{};
  if constexpr (Traits::kHasSink) {  // counts once, whatever the number of splits
    end = take_sink<Traits>(largest, sum, load_sink<Traits>(params, h), map);
    sum = end.sum;
  }
  bool const empty = sum == 0.0f;  // and not its maximum: of NaN alone that is -inf too
  if (tid == 0 && params.lse != nullptr) {
    *lse_row(params, b, h, seqlen.q_row0, i) = empty              ? params.lse_empty
                                               : Traits::kHasSink ? end.top + logf(sum)
                                                                  : map.lse(largest, sum);
  }
  sync();

  float factor = empty ? 0.0f : 1.0f / sum;
  if constexpr (Traits::kHasSink) factor *= end.weight;
  float const* const out_partial = params.out_partial + partial_row(params, 0, b, h, i) * Traits::kHeadDimV;
  Element* const out = reinterpret_cast<Element*>(params.out) + index_t(seqlen.batch_index) * params.out_stride_b +
                       index_t(h) * params.out_stride_h + (index_t(seqlen.q_row0) + i) * params.out_stride_m;
  int const group = kGroups > 1 ? tid / kVectors : 0;
#pragma unroll 1
  for (int vector = tid - group * kVectors; vector < kVectors; vector += kThreads) {  // once, with several groups
    int const d = 4 * vector;
    float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (group < kGroups) {
#pragma unroll 8
      for (int s = group; s < params.num_splits; s += kGroups) {
        float const weight = weights[s];
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (weight > 0.0f) x = *reinterpret_cast<float4 const*>(out_partial + s * split_stride * Traits::kHeadDimV + d);
        acc.x += weight * x.x;
        acc.y += weight * x.y;
        acc.z += weight * x.z;
        acc.w += weight * x.w;
      }
    }
    if constexpr (kGroups > 1) {
      sums[tid] = acc;
      sync();
      if (group > 0) return;
#pragma unroll
      for (int g = 1; g < kGroups; ++g) {
        float4 const x = sums[tid + g * kVectors];
        acc.x += x.x;
        acc.y += x.y;
        acc.z += x.z;
        acc.w += x.w;
      }
    }
    float const values[4] = {acc.x, acc.y, acc.z, acc.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (d + c < params.head_dim_v)
        out[index_t(d + c) * params.out_stride_d] = from_float<Element>(factor * values[c]);
    }
  }
}

}  // namespace nvrtc_attn
