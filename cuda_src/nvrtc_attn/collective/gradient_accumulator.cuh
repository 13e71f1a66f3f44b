// The float32 workspace that several CTAs add gradient tiles into, and where a row of it lies.
//
// Layout: 16 x 8 blocks, row-major over (row / 16, column / 8), 128 floats each in the order of mma accumulators, so that a
// warp adds one block with one instruction over contiguous memory. From compute capability 9.0 a lane's four values are
// neighbours (red.v4.f32: a quarter of the instructions), before that they lie 32 apart (four full-line scalar reds). Query
// tiles of 80 rows have transposed blocks (convert_transposed).
#pragma once
#include "../common/numbers.cuh"
#include "../common/quad_transpose.cuh"

namespace nvrtc_attn {

#if __CUDA_ARCH__ >= 900
constexpr bool kVectorReduction = true;
#else
constexpr bool kVectorReduction = false;
#endif

constexpr int kAccumBlock = 128;  // floats of one 16 x 8 block

NVRTC_ATTN_DEVICE void add_block(float* block, float const (&c)[4], int lane) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(block + 4 * lane), "f"(c[0]),
               "f"(c[1]), "f"(c[2]), "f"(c[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) atomicAdd(block + 32 * e + lane, c[e]);
#endif
}

// One row of blocks.
template <int kTiles>
NVRTC_ATTN_DEVICE void add_blocks(float* row, float const (&c)[1][kTiles][4], int lane) {
#pragma unroll
  for (int d = 0; d < kTiles; ++d) add_block(row + d * kAccumBlock, c[0][d], lane);
}

// The same, alone in its place.
template <int kTiles>
NVRTC_ATTN_DEVICE void put_blocks(float* row, float const (&c)[1][kTiles][4], int lane) {
  static_assert(kVectorReduction, "the order of a block's floats");
#pragma unroll
  for (int d = 0; d < kTiles; ++d) {
    reinterpret_cast<float4*>(row + d * kAccumBlock)[lane] =
        make_float4(c[0][d][0], c[0][d][1], c[0][d][2], c[0][d][3]);
  }
}

// This lane's four values of one block. That they are read this once is no hint for vectors: with it the conversion takes 1.05
// to 1.07 of the time (H200, 2026-11-29).
NVRTC_ATTN_DEVICE float4 read_block(float const* block, int lane) {
  if constexpr (kVectorReduction) return reinterpret_cast<float4 const*>(block)[lane];
  return make_float4(__ldcs(block + lane), __ldcs(block + 32 + lane), __ldcs(block + 64 + lane),
                     __ldcs(block + 96 + lane));
}

// First row of sequence b in a workspace padded to whole tiles of kBlock rows: sequences never share a tile.
template <bool kVarlen, int kBlock>
NVRTC_ATTN_DEVICE index_t accumulator_row0(int row0, int b) {
  return kVarlen ? index_t(row0 / kBlock + b) * kBlock : 0;
}

// Four neighbouring 16 x 8 blocks of a gradient, in a warp's registers in the order of mma accumulators -> rows row0 and on,
// columns 8 * tile0 and on of `dst`, up to `rows` and `cols`. Quads exchange words so that a lane has eight columns of a row.
template <bool kAligned, class Element>
NVRTC_ATTN_DEVICE void store_blocks(float4 const (&c)[4], Element* dst, index_t stride_row, index_t stride_col,
                                    int row0, int tile0, int rows, int cols, int lane) {
  int const g = lane >> 2;
  int const t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const row = row0 + 8 * half + g;
    Element* const to = dst + index_t(row) * stride_row;
    if constexpr (kAligned && sizeof(Element) == 2) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = half == 0 ? pack2<Element>(c[i].x, c[i].y) : pack2<Element>(c[i].z, c[i].w);
      }
      uint4 const words = transpose_quad(w[0], w[1], w[2], w[3], t);
      int const col = 8 * (tile0 + t);
      if (row < rows && col < cols) {
        *reinterpret_cast<uint4*>(to + index_t(col) * stride_col) = words;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float const x = half == 0 ? c[i].x : c[i].z;
        float const y = half == 0 ? c[i].y : c[i].w;
        int const col = 8 * (tile0 + i) + 2 * t;
        if (row >= rows) continue;
        if constexpr (kAligned) {
          if (col < cols) *reinterpret_cast<float2*>(to + index_t(col) * stride_col) = make_float2(x, y);
        } else {
          if (col < cols) to[index_t(col) * stride_col] = from_float<Element>(x);
          if (col + 1 < cols) to[index_t(col + 1) * stride_col] = from_float<Element>(y);
        }
      }
    }
  }
}

// One tile of `rows` rows of the workspace -> gradient in its own type and layout, times `factor`.
// `accum` starts at a multiple of 16 rows; kWidth is its width. All threads of the CTA take part. kSum: of `count` such tiles,
// `step` floats apart, the sum.
template <int kWidth, int kRows, int kThreads, bool kAligned, bool kSum = false, class Element>
NVRTC_ATTN_DEVICE void convert_accumulator(float const* accum, Element* dst, index_t stride_row, index_t stride_col,
                                           int rows, int cols, float factor, int tid, int count = 1, index_t step = 0) {
  static_assert(kRows % 16 == 0 && kThreads % 32 == 0);
  constexpr int kTiles = kWidth / 8;
  constexpr int kGroups = (kTiles + 3) / 4;
  constexpr int kPasses = (kRows / 16 * kGroups + kThreads / 32 - 1) / (kThreads / 32);
  int const lane = tid % 32;
  // A warp takes four neighbouring blocks at a time, 2 KiB. Two turns unrolled: enough bytes in flight.
#pragma unroll 2
  for (int pass = 0; pass < kPasses; ++pass) {
    int const n = pass * (kThreads / 32) + tid / 32;
    int const row0 = n / kGroups * 16;
    int const tile0 = n % kGroups * 4;
    if (row0 >= min(rows, kRows)) break;
    float const* block = accum + index_t(n / kGroups * kTiles + tile0) * kAccumBlock;
    float4 c[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      c[i] = kTiles % 4 == 0 || tile0 + i < kTiles ? read_block(block + i * kAccumBlock, lane)
                                                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if constexpr (!kSum) c[i].x *= factor, c[i].y *= factor, c[i].z *= factor, c[i].w *= factor;
    }
    if constexpr (kSum) {
#pragma unroll 2
      for (int tile = 1; tile < count; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (kTiles % 4 != 0 && tile0 + i >= kTiles) continue;
          float4 const more = read_block(block + tile * step + i * kAccumBlock, lane);
          c[i].x += more.x, c[i].y += more.y, c[i].z += more.z, c[i].w += more.w;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i].x *= factor, c[i].y *= factor, c[i].z *= factor, c[i].w *= factor;
    }
    store_blocks<kAligned>(c, dst, stride_row, stride_col, row0, tile0, rows, cols, lane);
  }
}

// Of 8 x 8 elements of 16 bits, a row in each quad.
NVRTC_ATTN_DEVICE uint32_t transpose_matrix(uint32_t word) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(word));
  return word;
}

// The same from transposed blocks, 16 columns x 8 rows, row-major over (column / 16, row / 8): a gradient of 16-bit type whose
// rows are aligned to 16 bytes. `accum` starts at a multiple of kRows rows.
template <int kWidth, int kRows, int kThreads, class Element>
NVRTC_ATTN_DEVICE void convert_transposed(float const* accum, Element* dst, index_t stride_row, int rows, int cols,
                                          float factor, int tid) {
  static_assert(kRows % 8 == 0 && kThreads % 32 == 0);
  constexpr int kTiles = kWidth / 16;
  constexpr int kUnits = kRows / 8 * ((kTiles + 1) / 2);
  int const lane = tid % 32;
  int const g = lane >> 2;
  int const t = lane & 3;
  // A warp takes 8 rows of 32 columns at a time, the one behind it the next columns: rows one after the other take 1.05 of the
  // time (H200). Words turned round hold two columns of row g, and quads exchange them.
#pragma unroll 3
  for (int n = tid / 32; n < kUnits; n += kThreads / 32) {
    int const row_tile = n / ((kTiles + 1) / 2);
    int const tile0 = n % ((kTiles + 1) / 2) * 2;
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float4 c = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (kTiles % 2 == 0 || tile0 + i < kTiles) {
        c = read_block(accum + ((tile0 + i) * (kRows / 8) + row_tile) * kAccumBlock, lane);
      }
      w[2 * i] = transpose_matrix(pack2<Element>(c.x * factor, c.y * factor));
      w[2 * i + 1] = transpose_matrix(pack2<Element>(c.z * factor, c.w * factor));
    }
    uint4 const words = transpose_quad(w[0], w[1], w[2], w[3], t);
    int const row = 8 * row_tile + g;
    int const col = 16 * tile0 + 8 * t;
    if (row < rows && col < cols) {
      *reinterpret_cast<uint4*>(dst + index_t(row) * stride_row + col) = words;
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
