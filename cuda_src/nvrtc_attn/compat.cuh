// The only file that knows which compiler reads it. Under NVRTC there is no host pass and no standard library;
// fixed-width integers come from libcu++.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if defined(__CUDACC_RTC__)
#include <cuda/std/cstdint>

using cuda::std::int32_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;

#else
#include <cstdint>
#endif

#define NVRTC_ATTN_DEVICE __device__ __forceinline__

namespace nvrtc_attn {

using half_t = __half;
using bfloat16_t = __nv_bfloat16;
using index_t = long long;  // every offset into global memory

// NVRTC 13.0, with which kernels are tuned, and later ones (13.5 was looked at) allocate registers differently. Whoever asks
// says what would spill, or which products would wait for each other, without asking.
constexpr bool kNewerNvrtc = __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ > 1300;

}  // namespace nvrtc_attn
