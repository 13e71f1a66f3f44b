// dsink[h] = -sum over rows of exp(sink - lse) * delta, delta = rowsum(dO * O) - dLSE: a sink has no value, so its dP is 0.
// Behind the kernels that make delta and row_lse (delta, backward_hopper_prepare, backward_hopper with kFused).
//
// One CTA a head. A thread adds up rows kNumThreads apart, then the CTA adds the threads, all in a fixed order: bitwise
// reproducible. Rows without P have row_lse = +inf and count nothing. Dropout's multiplier, which delta and row_lse may
// have lost (row_statistics.cuh), cancels. Shared memory: a float of each warp; one barrier.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../collective/sink.cuh"

namespace nvrtc_attn {

template <class Traits>
NVRTC_ATTN_DEVICE void sink_gradient(BackwardParams const& params) {
  constexpr int kThreads = Traits::kNumThreads;
  __shared__ float sums[Traits::kNumWarps];
  int const tid = int(threadIdx.x);
  int const h = int(blockIdx.x);
  float const sink = load_sink<Traits>(params, h);
  float const* const delta = params.delta + index_t(h) * params.delta_stride_h;
  float const* const row_lse = params.row_lse + index_t(h) * params.delta_stride_h;

  float sum = 0.0f;
  auto add = [&](index_t row) {
    float const lse = row_lse[row];
    float const exponent = Traits::kLog2Lse ? fmaf(sink, kLog2e, -lse) : (sink - lse) * kLog2e;
    float const share = exp2f(exponent);
    sum -= lse == infinity() ? 0.0f : share * delta[row];
  };
  if constexpr (Traits::kVarlen) {
    int const first = params.cu_seqlens_q[0];
    int const end = params.cu_seqlens_q[params.batch];
#pragma unroll 4
    for (int token = first + tid; token < end; token += kThreads) {
      index_t row = token;
      if constexpr (Traits::kPadded) {
        int b = 0;  // the last sequence that begins at or before this token
        for (int after = params.batch; after - b > 1;) {
          int const middle = b + (after - b) / 2;
          if (params.cu_seqlens_q[middle] <= token) {
            b = middle;
          } else {
            after = middle;
          }
        }
        int const row0 = params.cu_seqlens_q[b];
        row = accumulator_row0<true, Traits::kBlockM>(row0, b) + (token - row0);
      }
      add(row);
    }
  } else {
    index_t const rows = index_t(params.batch) * params.seqlen_q;
#pragma unroll 4
    for (index_t n = tid; n < rows; n += kThreads) {
      index_t const b = n / params.seqlen_q;
      add(b * params.delta_stride_b + (n - b * params.seqlen_q));
    }
  }

#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (tid % 32 == 0) sums[tid / 32] = sum;
  __syncthreads();
  if (tid > 0) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < Traits::kNumWarps; ++w) total += sums[w];
  auto const& with = with_sink<Traits>(params);
  index_t const at = index_t(h) * with.dsink_stride_h;
  if (with.sink_float32) {
    reinterpret_cast<float*>(with.dsink)[at] = total;
  } else {
    reinterpret_cast<typename Traits::Element*>(with.dsink)[at] = from_float<typename Traits::Element>(total);
  }
}

}  // namespace nvrtc_attn
