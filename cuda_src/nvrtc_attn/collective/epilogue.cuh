// What every kernel that writes `out` and `lse` shares: row addresses, padding rows of lse, tokens of no sequence.
#pragma once
#include "../common/mma.cuh"
#include "../params.cuh"

namespace nvrtc_attn {

// Whether rows of out can be written in 16-byte vectors: a property of the caller's tensor, so a run-time test.
template <class Element>
NVRTC_ATTN_DEVICE bool out_is_vectorizable(ForwardParams const& params) {
  constexpr unsigned long long kMask = 15;
  unsigned long long const bits = reinterpret_cast<unsigned long long>(params.out) |
                                  (unsigned long long)(params.out_stride_b | params.out_stride_m | params.out_stride_h |
                                                       (long long)params.head_dim_v) *
                                      sizeof(Element);
  return params.out_stride_d == 1 && (bits & kMask) == 0;
}

// lse of row i of sequence b, head h. Packed: rows are tokens.
NVRTC_ATTN_DEVICE float* lse_row(ForwardParams const& params, int b, int h, int q_row0, int i) {
  index_t const row = params.lse_packed ? index_t(q_row0) + i : index_t(i);
  return params.lse + (params.lse_packed ? 0 : index_t(b) * params.lse_stride_b) + index_t(h) * params.lse_stride_h +
         row * params.lse_stride_m;
}

// Rows of lse that belong to no query, [len_q, lse_rows), hold +inf so that exp(s - lse) is zero there. The block of query
// rows [m0, m0 + rows) writes its own, the last block of a sequence all that follow as well.
template <int kThreads>
NVRTC_ATTN_DEVICE void pad_lse(ForwardParams const& params, int b, int h, int len_q, int m0, int rows, bool last,
                               int tid) {
  if (params.lse == nullptr || params.lse_packed) return;
  int const end = last ? params.lse_rows : min(m0 + rows, params.lse_rows);
  for (int i = max(m0, len_q) + tid; i < end; i += kThreads) {
    *lse_row(params, b, h, 0, i) = __uint_as_float(0x7f800000u);
  }
}

// Zero the rows of head h that lie in no sequence: before cu_seqlens_q[0] and from cu_seqlens_q[batch] on. `part` of
// `num_parts` thread blocks share the rows.
template <class Element, int kThreads>
NVRTC_ATTN_DEVICE void zero_rows_of_no_sequence(ForwardParams const& params, int h, int part, int num_parts, int tid) {
  int const before = params.cu_seqlens_q[0];
  int const after = params.cu_seqlens_q[params.batch];
  int const count = before + max(params.total_q - after, 0);
  Element* const out = reinterpret_cast<Element*>(params.out) + index_t(h) * params.out_stride_h;
  for (int n = part; n < count; n += num_parts) {
    int const row = n < before ? n : after + (n - before);
    for (int d = tid; d < params.head_dim_v; d += kThreads) {
      out[index_t(row) * params.out_stride_m + index_t(d) * params.out_stride_d] = from_float<Element>(0.0f);
    }
    if (tid == 0 && params.lse != nullptr && params.lse_packed) *lse_row(params, 0, h, row, 0) = params.lse_empty;
  }
}

// First element of one split's partial output row (float32, kHeadDimV columns) and its lse.
NVRTC_ATTN_DEVICE index_t partial_row(ForwardParams const& params, int split, int b, int h, int i) {
  return ((index_t(split) * params.batch + b) * params.num_heads + h) * params.seqlen_q + i;
}

}  // namespace nvrtc_attn
