// Before the backward kernels: delta = rowsum(dO * O) - dLSE, row_lse (LSE with +inf for rows that have no P, see
// has_probabilities), and zeros in this tile's part of dq_accum when dq is accumulated there.
//
// One CTA per kBlockM query rows of one (batch, head); a row is read by kLanes neighbouring threads, 16 bytes at a time.
// No shared memory, no barrier. Writes every row of every sequence, nothing for tokens of no sequence.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../collective/output_rows.cuh"
#include "../collective/packed_slots.cuh"
#include "../collective/seqlen.cuh"
#include "../common/numbers.cuh"
#include "../params.cuh"

namespace nvrtc_attn {

template <class Traits>
NVRTC_ATTN_DEVICE void delta(BackwardParams const& params) {
  using Element = typename Traits::Element;
  constexpr int kThreads = Traits::kNumThreads;
  constexpr int kBlockM = Traits::kBlockM;
  using Rows = OutputRows<Traits>;
  constexpr int kVec = Rows::kVec, kLanes = Rows::kLanes, kChunksLane = Rows::kChunksLane;
  constexpr int kRowsPerPass = Rows::kRowsPerPass, kPasses = Rows::kPasses, kBatch = Rows::kBatch;

  int const tid = int(threadIdx.x);
  int block = int(blockIdx.x);
  int m_block, h, b;
  if constexpr (Traits::kVarlen) {
    PackedSlots<kBlockM> const slots{params.cu_seqlens_q, params.batch, params.total_q};
    h = block / slots.count();
    PackedSlot const found = slots.find_together(block - h * slots.count(), tid % 32);
    m_block = found.tile;
    b = found.b;
    if (b == params.batch || m_block >= params.num_m_blocks) return;
  } else {
    m_block = block % params.num_m_blocks;
    block /= params.num_m_blocks;
    h = block % params.num_heads;
    b = block / params.num_heads;
  }
  SeqlenInfo<Traits::kVarlen, false> const seqlen(params, b);
  int const m0 = m_block * kBlockM;
  if (m0 >= seqlen.len_q) return;

  index_t const row0 = index_t(seqlen.q_row0) + m0;
  Element const* out = reinterpret_cast<Element const*>(params.out) +
                       index_t(seqlen.batch_index) * params.out_stride_b + row0 * params.out_stride_m +
                       index_t(h) * params.out_stride_h;
  Element const* dout = reinterpret_cast<Element const*>(params.dout) +
                        index_t(seqlen.batch_index) * params.dout_stride_b + row0 * params.dout_stride_m +
                        index_t(h) * params.dout_stride_h;
  index_t const workspace =
      index_t(seqlen.batch_index) * params.delta_stride_b + index_t(h) * params.delta_stride_h + row0;
  // Rows of lse and dlse: per sequence, or tokens when packed.
  index_t const lse_row = params.lse_packed ? row0 : index_t(m0);
  index_t const lse_batch = params.lse_packed ? 0 : index_t(b);
  int const rows = min(seqlen.len_q - m0, kBlockM);
  int const lane = tid % kLanes;

  // First the stores that wait for nothing.
  if constexpr (Traits::kDqAtomic) {
    constexpr int kWidth = Traits::kHeadDim;
    index_t const first = accumulator_row0<Traits::kVarlen, kBlockM>(seqlen.q_row0, b) + m0;
    float4* accum = reinterpret_cast<float4*>(params.dq_accum + index_t(seqlen.batch_index) * params.dq_accum_stride_b +
                                              index_t(h) * params.dq_accum_stride_h + first * kWidth);
#pragma unroll 8
    for (int n = tid; n < kBlockM * kWidth / 4; n += kThreads) accum[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

#pragma unroll 1
  for (int pass0 = 0; pass0 < kPasses; pass0 += kBatch) {
    float sum[kBatch];
    if constexpr (Traits::kAligned) {
      uint4 o4[kBatch][kChunksLane], g4[kBatch][kChunksLane];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        int const row = (pass0 + i) * kRowsPerPass + tid / kLanes;
        Element const* const o = out + index_t(row) * params.out_stride_m;
        Element const* const g = dout + index_t(row) * params.dout_stride_m;
#pragma unroll
        for (int x = 0; x < kChunksLane; ++x) {
          int const col = (lane + x * kLanes) * kVec;
          bool const valid = row < rows && col < params.head_dim_v;
          o4[i][x] = valid ? __ldcs(reinterpret_cast<uint4 const*>(o + index_t(col) * params.out_stride_d))
                           : make_uint4(0, 0, 0, 0);
          g4[i][x] = valid ? __ldg(reinterpret_cast<uint4 const*>(g + index_t(col) * params.dout_stride_d))
                           : make_uint4(0, 0, 0, 0);
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
        for (int col = lane; col < params.head_dim_v; col += kLanes) {
          sum[0] =
              fmaf(to_float(out[index_t(row) * params.out_stride_m + index_t(col) * params.out_stride_d]),
                   to_float(dout[index_t(row) * params.dout_stride_m + index_t(col) * params.dout_stride_d]), sum[0]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const row = (pass0 + i) * kRowsPerPass + tid / kLanes;
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
      if (lane == 0 && row < rows) {
        float const lse = params.lse[lse_batch * params.lse_stride_b + index_t(h) * params.lse_stride_h +
                                     (lse_row + row) * params.lse_stride_m];
        bool const has_p = has_probabilities(lse);
        if (params.dlse != nullptr) {
          sum[i] -= params.dlse[lse_batch * params.dlse_stride_b + index_t(h) * params.dlse_stride_h +
                                (lse_row + row) * params.dlse_stride_m];
        }
        // Otherwise P = 0 and there is no gradient, whatever arrives through lse: 0 times NaN must not.
        params.delta[workspace + row] = has_p ? sum[i] : 0.0f;
        params.row_lse[workspace + row] = has_p ? lse : infinity();
      }
    }
  }
}

}  // namespace nvrtc_attn
