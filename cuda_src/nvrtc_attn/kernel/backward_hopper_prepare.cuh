// Before backward_hopper: delta = rowsum(dO * O) - dLSE and the reference that P's exponent subtracts, both padded to whole
// query tiles so that the copy engine can bring them; zeros in dq_accum; the counter of key tiles, and those of additions, set to zero.
//
// One CTA per kRows query rows of one (batch, head); a row is read by kLanes neighbouring threads, one or two vectors of 16 bytes
// each. So few rows, because a short pass takes as long as the latencies that one thread waits for: here those of one row,
// whatever the tile. Two vectors where the row has no power of two of them, so that no more than a half of the lanes is idle in
// one of two turns: with a lane for each, and up to seven of sixteen idle, 2.3 to 3.1 TB/s were moved instead of 3.8 (H200).
// Rows without a P (has_probabilities), and padding, get an infinite reference. Rows of the workspaces: collective/
// gradient_accumulator.cuh (accumulator_row0). No shared memory, no barrier.
// Packed: a CTA for every slot's rows (collective/packed_slots.cuh), and the first one makes the list of key tiles.
// kTileWords: the first ones find the order in which key tiles are handed out (hopper/backward/line_order.cuh).
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../collective/packed_slots.cuh"
#include "../collective/scores.cuh"
#include "../collective/seqlen.cuh"
#include "../common/overlapping_launch.cuh"
#include "../hopper/backward/line_order.cuh"
#include "../hopper/backward/list_key_tiles.cuh"
#include "../hopper/backward/ordered_dq.cuh"
#include "../hopper/backward/row_statistics.cuh"

namespace nvrtc_attn {

template <class Traits>
NVRTC_ATTN_DEVICE void backward_hopper_prepare(HopperBackwardParams const& params) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kRows = 16;
  constexpr int kLanes = Traits::kNumThreads / kRows;
  constexpr int kVec = 8;
  constexpr int kEach = (Traits::kHeadDimV + kLanes * kVec - 1) / (kLanes * kVec);  // vectors of a thread
  static_assert(kBlockM % kRows == 0 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "shuffles add up a row");
  static_assert(kEach <= 2 && kLanes * kVec < 2 * Traits::kHeadDimV, "the host counts on other rows (PREPARE_ROWS)");

  let_next_launch_begin();  // which has a multiprocessor's shared memory to itself, and so waits for its blocks of this one
  int const tid = int(threadIdx.x);
  if (blockIdx.x == 0 && tid == 0) *tile_counter(params) = 0;
  int block = int(blockIdx.x);
  if constexpr (Traits::kTileWords) {
    int const lists = LineOrder(params).lists();
    if (block < lists) return order_key_tiles<Traits>(params, block);
    block -= lists;
  }
  int const parts = params.num_m_blocks * (kBlockM / kRows);
  int m0, h, b;
  if constexpr (Traits::kVarlen) {
    if (block == 0) return list_key_tiles<Traits>(params);
    constexpr int kParts = kBlockM / kRows;
    PackedSlots<kBlockM> const slots{params.cu_seqlens_q, params.batch, params.total_q};
    int const slot = (block - 1) / kParts;  // of all heads
    h = slot / slots.count();
    PackedSlot const found = slots.find_together(slot - h * slots.count(), tid % 32);
    if (found.b == params.batch || found.tile >= params.num_m_blocks) return;
    b = found.b;
    m0 = found.tile * kBlockM + (block - 1) % kParts * kRows;
  } else {
    m0 = block % parts * kRows;
    block /= parts;
    h = block % params.num_heads;
    b = block / params.num_heads;
  }
  SeqlenInfo<Traits::kVarlen, false> const seqlen(params, b);
  if (m0 / kBlockM * kBlockM >= seqlen.len_q) return;  // none of the tile's rows

  int const m = m0 + tid / kLanes;
  int const lane = tid % kLanes;
  bool const is_row = m < seqlen.len_q;
  index_t const row = index_t(seqlen.q_row0) + m;
  Element const* const out = reinterpret_cast<Element const*>(params.out) +
                             index_t(seqlen.batch_index) * params.out_stride_b + row * params.out_stride_m +
                             index_t(h) * params.out_stride_h;
  Element const* const dout = reinterpret_cast<Element const*>(params.dout) +
                              index_t(seqlen.batch_index) * params.dout_stride_b + row * params.dout_stride_m +
                              index_t(h) * params.dout_stride_h;
  uint4 o[kEach], g[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int const column = (i * kLanes + lane) * kVec;
    o[i] = g[i] = make_uint4(0u, 0u, 0u, 0u);
    if (is_row && column < params.head_dim_v) {
      o[i] = *reinterpret_cast<uint4 const*>(out + column);
      g[i] = *reinterpret_cast<uint4 const*>(dout + column);
    }
  }
  // Rows of lse and dlse: per sequence, or tokens when packed.
  RowReference const reference = load_row_reference(params, is_row && lane == 0, h, params.lse_packed ? 0 : index_t(b),
                                                    params.lse_packed ? row : index_t(m));

  index_t const first = accumulator_row0<Traits::kVarlen, kBlockM>(seqlen.q_row0, b) + m0;
  index_t const workspace =
      index_t(seqlen.batch_index) * params.delta_stride_b + index_t(h) * params.delta_stride_h + first;
  if constexpr (Traits::kOrdered) {
    if (m0 % kBlockM == 0 && tid == 0) *additions_to<kBlockM>(params, workspace) = 0;
  }
  if constexpr (!Traits::kOneKeyTile) {  // else nothing is added up
    float4* accum = reinterpret_cast<float4*>(params.dq_accum + index_t(seqlen.batch_index) * params.dq_accum_stride_b +
                                              index_t(h) * params.dq_accum_stride_h + first * Traits::kHeadDim);
#pragma unroll
    for (int n = tid; n < kRows * Traits::kHeadDim / 4; n += Traits::kNumThreads) {
      accum[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    Element const* x = reinterpret_cast<Element const*>(&o[i]);
    Element const* y = reinterpret_cast<Element const*>(&g[i]);
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum = fmaf(to_float(x[e]), to_float(y[e]), sum);
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (lane == 0) store_row_statistics<Traits>(params, sum, reference, workspace + tid / kLanes);
}

}  // namespace nvrtc_attn
