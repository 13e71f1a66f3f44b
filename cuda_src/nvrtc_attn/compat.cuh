// The only file that knows which compiler reads it. Under NVRTC there is no host pass and no standard library;
// fixed-width integers and limits come from the compiler's built-ins.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if defined(__CUDACC_RTC__)
#define NVRTC_ATTN_DEVICE __device__ __forceinline__
#else
#include <cstdint>
#define NVRTC_ATTN_DEVICE __device__ __forceinline__
#endif

namespace nvrtc_attn {

using half_t = __half;
using bfloat16_t = __nv_bfloat16;
using index_t = long long;  // every offset into global memory

}  // namespace nvrtc_attn
