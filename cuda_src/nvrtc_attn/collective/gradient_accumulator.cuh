// The float32 workspace that several CTAs add gradient tiles into, and where a row of it lies.
//
// Layout: 16 x 8 blocks, row-major over (row / 16, column / 8), 128 floats each in the order of mma accumulators, so that a
// warp adds one block with one instruction over contiguous memory. From compute capability 9.0 a lane's four values are
// neighbours (red.v4.f32: a quarter of the instructions), before that they lie 32 apart (four full-line scalar reds).
#pragma once
#include "../common/mma.cuh"

namespace nvrtc_attn {

#if __CUDA_ARCH__ >= 900
constexpr bool kVectorReduction = true;
#else
constexpr bool kVectorReduction = false;
#endif

constexpr int kAccumBlock = 128;  // floats of one 16 x 8 block

NVRTC_ATTN_DEVICE void add_block(float* block, AccTile const& c, int lane) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(block + 4 * lane), "f"(c[0]),
               "f"(c[1]), "f"(c[2]), "f"(c[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) atomicAdd(block + 32 * e + lane, c[e]);
#endif
}

// Row `row` (0..15) of one block.
NVRTC_ATTN_DEVICE void read_block_row(float const* block, int row, float (&value)[8]) {
  int const g = row & 7;
  int const half = row >> 3;
  if constexpr (kVectorReduction) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      float2 const v = *reinterpret_cast<float2 const*>(block + (4 * g + t) * 4 + 2 * half);
      value[2 * t] = v.x;
      value[2 * t + 1] = v.y;
    }
  } else {
    float4 const even = *reinterpret_cast<float4 const*>(block + 64 * half + 4 * g);
    float4 const odd = *reinterpret_cast<float4 const*>(block + 64 * half + 32 + 4 * g);
    value[0] = even.x, value[2] = even.y, value[4] = even.z, value[6] = even.w;
    value[1] = odd.x, value[3] = odd.y, value[5] = odd.z, value[7] = odd.w;
  }
}

// First row of sequence b in a workspace padded to whole tiles of kBlock rows: sequences never share a tile.
template <bool kVarlen, int kBlock>
NVRTC_ATTN_DEVICE index_t accumulator_row0(int row0, int b) {
  return kVarlen ? index_t(row0 / kBlock + b) * kBlock : 0;
}

// One tile of `rows` rows of the workspace -> gradient in its own type and layout, times `factor`.
// `accum` starts at a multiple of 16 rows; kWidth is its width. All threads of the CTA take part.
template <int kWidth, int kRows, int kThreads, bool kAligned, class Element>
NVRTC_ATTN_DEVICE void convert_accumulator(float const* accum, Element* dst, index_t stride_row, index_t stride_col,
                                           int rows, int cols, float factor, int tid) {
  constexpr int kTiles = kWidth / 8;
  // Sixteen neighbouring threads read the sixteen rows of one block (whole lines), the next sixteen the next block.
#pragma unroll 4
  for (int n = tid; n < kRows * kTiles; n += kThreads) {
    int const block = n / 16;
    int const row = block / kTiles * 16 + n % 16;
    int const col = block % kTiles * 8;
    if (row >= rows || col >= cols) continue;
    float value[8];
    read_block_row(accum + index_t(block) * kAccumBlock, n % 16, value);
    Element* to = dst + index_t(row) * stride_row + index_t(col) * stride_col;
    if constexpr (kAligned) {
      alignas(16) Element out[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] = from_float<Element>(value[i] * factor);
#pragma unroll
      for (int i = 0; i < int(sizeof(Element)) / 2; ++i) {
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<uint4 const*>(out)[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (col + i < cols) to[index_t(i) * stride_col] = from_float<Element>(value[i] * factor);
      }
    }
  }
}

// Zero the rows of one head that lie in no sequence: before cu_seqlens[0] and from cu_seqlens[batch] to `total`. `part` of
// `num_parts` CTAs share the rows.
template <int kThreads, class Element>
NVRTC_ATTN_DEVICE void zero_unused_rows(Element* head, index_t stride_row, index_t stride_col, int const* cu_seqlens,
                                        int batch, int total, int cols, int part, int num_parts, int tid) {
  int const before = cu_seqlens[0];
  int const after = cu_seqlens[batch];
  int const count = before + max(total - after, 0);
  for (int n = part; n < count; n += num_parts) {
    int const row = n < before ? n : after + (n - before);
    for (int d = tid; d < cols; d += kThreads)
      head[index_t(row) * stride_row + index_t(d) * stride_col] = Element(0.0f);
  }
}

}  // namespace nvrtc_attn
