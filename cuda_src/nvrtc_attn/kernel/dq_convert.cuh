// dq = scale * dq_accum, from the private float32 layout (collective/gradient_accumulator.cuh) to dq's type and strides.
//
// One CTA per kBlockM query rows of one (batch, head). With varlen an extra, virtual sequence zeroes dq of the tokens that
// belong to no sequence, so every element of dq is written. No shared memory, no barrier.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../collective/packed_slots.cuh"
#include "../collective/seqlen.cuh"
#include "../common/overlapping_launch.cuh"
#include "../params.cuh"

namespace nvrtc_attn {

template <class Traits>
NVRTC_ATTN_DEVICE void dq_convert(BackwardParams const& params) {
  using Element = ResultQ<Traits>;
  constexpr int kThreads = Traits::kNumThreads;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kWidth = Traits::kHeadDim;

  int const tid = int(threadIdx.x);
  int block = int(gridDim.x - 1 - blockIdx.x);  // the tiles that were added to last are still in L2
  int m_block, h, b;
  PackedSlots<kBlockM> const slots{params.cu_seqlens_q, params.batch, params.total_q};
  if constexpr (Traits::kVarlen) {
    h = block / slots.count();
    PackedSlot const found = slots.find_together(block - h * slots.count(), tid % 32);
    m_block = found.tile;
    b = found.b;
  } else {
    m_block = block % params.num_m_blocks;
    block /= params.num_m_blocks;
    h = block % params.num_heads;
    b = block / params.num_heads;
  }
  wait_for_launch_ahead();
  Element* const head = reinterpret_cast<Element*>(params.dq) + index_t(h) * params.dq_stride_h;
  if constexpr (Traits::kVarlen) {
    if (b == params.batch) {
      zero_unused_rows<kThreads>(head, params.dq_stride_m, params.dq_stride_d, params.cu_seqlens_q, params.batch,
                                 params.total_q, params.head_dim, m_block, slots.parts(), tid);
      return;
    }
    if (m_block >= params.num_m_blocks) return;
  }
  SeqlenInfo<Traits::kVarlen, false> const seqlen(params, b);
  int const m0 = m_block * kBlockM;
  if (m0 >= seqlen.len_q) return;
  index_t const first = accumulator_row0<Traits::kVarlen, kBlockM>(seqlen.q_row0, b) + m0;
  float const* accum = params.dq_accum + index_t(seqlen.batch_index) * params.dq_accum_stride_b +
                       index_t(h) * params.dq_accum_stride_h + first * kWidth;
  Element* dst =
      head + index_t(seqlen.batch_index) * params.dq_stride_b + (index_t(seqlen.q_row0) + m0) * params.dq_stride_m;
  if constexpr (Traits::kTransposedBlocks) {
    static_assert(Traits::kAligned && sizeof(Element) == 2, "a family of kernels with 16-bit operands alone");
    convert_transposed<kWidth, kBlockM, kThreads>(accum, dst, params.dq_stride_m, seqlen.len_q - m0, params.head_dim,
                                                  params.scale, tid);
  } else {
    convert_accumulator<kWidth, kBlockM, kThreads, Traits::kAligned>(
        accum, dst, params.dq_stride_m, params.dq_stride_d, seqlen.len_q - m0, params.head_dim, params.scale, tid);
  }
}

}  // namespace nvrtc_attn
