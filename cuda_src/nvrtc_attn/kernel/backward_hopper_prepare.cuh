// Before backward_hopper: delta = rowsum(dO * O) - dLSE and the reference that P's exponent subtracts, both padded to whole
// query tiles so that the copy engine can bring them; zeros in dq_accum; the counter of key tiles, and those of additions, set to zero.
//
// One CTA per kBlockM query rows of one (batch, head); a row is read by kLanes neighbouring threads, 16 bytes at a time.
// Rows without a key, and padding, get an infinite reference: their P is zero. Rows of the workspaces: collective/
// gradient_accumulator.cuh (accumulator_row0). No shared memory, no barrier.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../collective/scores.cuh"
#include "../collective/seqlen.cuh"
#include "../hopper/ordered_dq.cuh"
#include "../hopper/row_statistics.cuh"

namespace nvrtc_attn {

template <class Traits>
NVRTC_ATTN_DEVICE void backward_hopper_prepare(HopperBackwardParams const& params) {
  using Element = typename Traits::Element;
  constexpr int kThreads = Traits::kNumThreads;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kVec = 8;
  constexpr int kChunks = (Traits::kHeadDimV + kVec - 1) / kVec;
  constexpr int kLanes = kChunks > 8 ? 16 : kChunks > 4 ? 8 : 4;
  constexpr int kRowsPerPass = kThreads / kLanes;
  constexpr int kSteps = (kChunks + kLanes - 1) / kLanes;
  static_assert(kBlockM % kRowsPerPass == 0, "a tile is a whole number of passes");

  int const tid = int(threadIdx.x);
  if (blockIdx.x == 0 && tid == 0) *tile_counter(params) = 0;
  int block = int(blockIdx.x);
  int const m_block = block % params.num_m_blocks;
  block /= params.num_m_blocks;
  int const h = block % params.num_heads;
  int const b = block / params.num_heads;
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
  index_t const first = accumulator_row0<Traits::kVarlen, kBlockM>(seqlen.q_row0, b) + m0;
  index_t const workspace =
      index_t(seqlen.batch_index) * params.delta_stride_b + index_t(h) * params.delta_stride_h + first;
  // Rows of lse and dlse: per sequence, or tokens when packed.
  index_t const lse_row = params.lse_packed ? row0 : index_t(m0);
  index_t const lse_batch = params.lse_packed ? 0 : index_t(b);
  int const rows = seqlen.len_q - m0;
  int const lane = tid % kLanes;
  if constexpr (Traits::kOrdered) {
    if (tid == 0) *additions_to<kBlockM>(params, workspace) = 0;
  }

#pragma unroll
  for (int pass = 0; pass < kBlockM / kRowsPerPass; ++pass) {
    int const row = pass * kRowsPerPass + tid / kLanes;
    float sum = 0.0f;
    if (row < rows) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        int const column = (lane + step * kLanes) * kVec;
        if (column >= params.head_dim_v) break;
        uint4 const o4 = *reinterpret_cast<uint4 const*>(out + index_t(row) * params.out_stride_m + column);
        uint4 const g4 = *reinterpret_cast<uint4 const*>(dout + index_t(row) * params.dout_stride_m + column);
        Element const* o = reinterpret_cast<Element const*>(&o4);
        Element const* g = reinterpret_cast<Element const*>(&g4);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum = fmaf(to_float(o[i]), to_float(g[i]), sum);
      }
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) store_row_statistics<Traits>(params, sum, row < rows, row, h, lse_batch, lse_row, workspace);
  }

  if constexpr (Traits::kOneKeyTile) return;  // nothing is added up
  float4* accum = reinterpret_cast<float4*>(params.dq_accum + index_t(seqlen.batch_index) * params.dq_accum_stride_b +
                                            index_t(h) * params.dq_accum_stride_h + first * Traits::kHeadDim);
#pragma unroll 8
  for (int n = tid; n < kBlockM * Traits::kHeadDim / 4; n += kThreads) accum[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

}  // namespace nvrtc_attn
