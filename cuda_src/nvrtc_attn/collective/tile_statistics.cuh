// row_lse and delta of a query tile in the kernel that needs them, instead of a kernel before it (delta.cuh), where one thread
// block looks at a query tile. To shared memory; delta, which the kernel of dbias reads, to its workspace as well.
#pragma once
#include "../common/numbers.cuh"
#include "../params.cuh"
#include "output_rows.cuh"

namespace nvrtc_attn {

// Of one row, to shared memory and, delta alone, to the workspace.
template <class Seqlen>
NVRTC_ATTN_DEVICE void store_statistics(BackwardParams const& params, Seqlen const& seqlen, int b, int h, int m0,
                                        int row, float delta, float* row_lse, float* row_delta) {
  float lse = 0.0f;
  if (m0 + row < seqlen.len_q) {
    index_t const token = index_t(seqlen.q_row0) + m0 + row;
    index_t const at = params.lse_packed ? token : index_t(m0 + row);
    index_t const batch = params.lse_packed ? 0 : index_t(b);
    lse = params.lse[batch * params.lse_stride_b + index_t(h) * params.lse_stride_h + at * params.lse_stride_m];
    if (params.dlse != nullptr) {
      delta -=
          params.dlse[batch * params.dlse_stride_b + index_t(h) * params.dlse_stride_h + at * params.dlse_stride_m];
    }
    // Otherwise P = 0 and there is no gradient, whatever arrives through lse: 0 times NaN must not.
    bool const has_p = has_probabilities(lse);
    delta = has_p ? delta : 0.0f;
    lse = has_p ? lse : infinity();
    params.delta[index_t(seqlen.batch_index) * params.delta_stride_b + index_t(h) * params.delta_stride_h + token] =
        delta;
  }
  row_lse[row] = lse;
  row_delta[row] = delta;
}

// A query tile's, from row m0 on: kLanes threads for a row, 16 bytes at a time. Whole thread blocks call it.
template <class Traits, class Seqlen>
NVRTC_ATTN_DEVICE void make_statistics(BackwardParams const& params, Seqlen const& seqlen, int b, int h, int m0,
                                       float* row_lse, float* row_delta, int tid) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  using Rows = OutputRows<Traits>;
  constexpr int kVec = Rows::kVec, kLanes = Rows::kLanes, kChunksLane = Rows::kChunksLane;
  constexpr int kRowsPerPass = Rows::kRowsPerPass, kPasses = Rows::kPasses, kBatch = Rows::kBatch;
  int const part = tid % kLanes;
  index_t const row0 = index_t(seqlen.q_row0) + m0;
  int const rows = min(seqlen.len_q - m0, kBlockM);
  Element const* out = reinterpret_cast<Element const*>(params.out) +
                       index_t(seqlen.batch_index) * params.out_stride_b + row0 * params.out_stride_m +
                       index_t(h) * params.out_stride_h;
  Element const* dout = reinterpret_cast<Element const*>(params.dout) +
                        index_t(seqlen.batch_index) * params.dout_stride_b + row0 * params.dout_stride_m +
                        index_t(h) * params.dout_stride_h;
#pragma unroll 1
  for (int pass0 = 0; pass0 < kPasses; pass0 += kBatch) {
    float sum[kBatch];
    if constexpr (Traits::kAligned) {
      uint4 o4[kBatch][kChunksLane], g4[kBatch][kChunksLane];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        int const row = (pass0 + i) * kRowsPerPass + tid / kLanes;
#pragma unroll
        for (int x = 0; x < kChunksLane; ++x) {
          int const col = (part + x * kLanes) * kVec;
          bool const valid = row < rows && col < params.head_dim_v;
          Element const* const o = out + index_t(row) * params.out_stride_m + index_t(col) * params.out_stride_d;
          Element const* const g = dout + index_t(row) * params.dout_stride_m + index_t(col) * params.dout_stride_d;
          o4[i][x] = valid ? __ldcs(reinterpret_cast<uint4 const*>(o)) : make_uint4(0, 0, 0, 0);
          g4[i][x] = valid ? __ldg(reinterpret_cast<uint4 const*>(g)) : make_uint4(0, 0, 0, 0);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        sum[i] = 0.0f;
#pragma unroll
        for (int x = 0; x < kChunksLane; ++x) {
          Element const* const ov = reinterpret_cast<Element const*>(&o4[i][x]);
          Element const* const gv = reinterpret_cast<Element const*>(&g4[i][x]);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum[i] = fmaf(to_float(ov[e]), to_float(gv[e]), sum[i]);
        }
      }
    } else {
      int const row = pass0 * kRowsPerPass + tid / kLanes;
      sum[0] = 0.0f;
      if (row < rows) {
#pragma unroll 4
        for (int col = part; col < params.head_dim_v; col += kLanes) {
          sum[0] =
              fmaf(to_float(out[index_t(row) * params.out_stride_m + index_t(col) * params.out_stride_d]),
                   to_float(dout[index_t(row) * params.dout_stride_m + index_t(col) * params.dout_stride_d]), sum[0]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
      int const row = (pass0 + i) * kRowsPerPass + tid / kLanes;
      if (part == 0 && row < kBlockM) store_statistics(params, seqlen, b, h, m0, row, sum[i], row_lse, row_delta);
    }
  }
}

}  // namespace nvrtc_attn
