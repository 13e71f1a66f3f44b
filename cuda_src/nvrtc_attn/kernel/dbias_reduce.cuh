// The second half of a split dBias: sum the float32 partials [num_dbias_splits, numel(bias)] in a fixed order and write
// the bias's own element type and strides. Few partials: a thread owns an element. Many: a CTA owns 32 consecutive elements;
// warp w adds partials w, w + warps, ..., then the first warp adds the warps' sums in order.
#pragma once
#include "../common/mma.cuh"
#include "../params.cuh"

namespace nvrtc_attn {

// Grid: ceil(numel / 32), or less: CTAs stride over the elements.
template <class Traits>
NVRTC_ATTN_DEVICE void dbias_reduce(BackwardParams const& params) {
  using DBias = typename Traits::DBias;
  __shared__ float sums[Traits::kNumWarps][32];
  int const warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  long long const size_h = params.dbias_size_h, size_m = params.dbias_size_m, size_n = params.dbias_size_n;
  long long const numel = params.dbias_size_b * size_h * size_m * size_n;
  auto write = [&](long long at, float total) {
    long long const row = at / size_n, head = row / size_m;
    reinterpret_cast<DBias*>(
        params.dbias)[(head / size_h) * params.dbias_stride_b + (head % size_h) * params.dbias_stride_h +
                      (row % size_m) * params.dbias_stride_m + (at % size_n) * params.dbias_stride_n] =
        from_float<DBias>(total);
  };
  if (params.num_dbias_splits <= Traits::kNumWarps) {
    for (long long at = blockIdx.x * (long long)Traits::kNumThreads + threadIdx.x; at < numel;
         at += gridDim.x * (long long)Traits::kNumThreads) {
      float total = 0.0f;
#pragma unroll 4
      for (int split = 0; split < params.num_dbias_splits; ++split) total += params.dbias_partial[split * numel + at];
      write(at, total);
    }
    return;
  }
  for (long long start = blockIdx.x * 32ll; start < numel; start += gridDim.x * 32ll) {
    long long const at = start + lane;
    float sum = 0.0f;
    if (at < numel) {
#pragma unroll 4
      for (int split = warp; split < params.num_dbias_splits; split += Traits::kNumWarps) {
        sum += params.dbias_partial[split * numel + at];
      }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && at < numel) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < Traits::kNumWarps; ++w) total += sums[w][lane];
      write(at, total);
    }
    __syncthreads();
  }
}

}  // namespace nvrtc_attn
