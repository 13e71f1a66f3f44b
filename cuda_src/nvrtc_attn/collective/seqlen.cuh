// Where one sequence lies: first row and length of its queries and keys, dense or packed.
#pragma once
#include "../params.cuh"

namespace nvrtc_attn {

template <bool kVarlen, bool kSequsedK>
struct SeqlenInfo {
  int q_row0;  // first row on the token dim (0 when dense)
  int k_row0;
  int len_q;
  int len_k;        // keys that take part
  int len_k_slot;   // keys that belong to the sequence: >= len_k with seqused_k
  int batch_index;  // index for batch strides (0 when varlen: one packed batch entry)

  // Packed, of what a list of tiles says: what a caller must not ask then is len_k_slot.
  NVRTC_ATTN_DEVICE SeqlenInfo(int q_row0_, int len_q_, int k_row0_, int len_k_)
      : q_row0(q_row0_), k_row0(k_row0_), len_q(len_q_), len_k(len_k_), len_k_slot(len_k_), batch_index(0) {
    static_assert(kVarlen, "dense lengths are those of the params");
  }
  template <class Params>
  NVRTC_ATTN_DEVICE SeqlenInfo(Params const& params, int b) {
    if constexpr (kVarlen) {
      q_row0 = params.cu_seqlens_q[b];
      len_q = params.cu_seqlens_q[b + 1] - q_row0;
      k_row0 = params.cu_seqlens_k[b];
      len_k_slot = params.cu_seqlens_k[b + 1] - k_row0;
      batch_index = 0;
    } else {
      q_row0 = k_row0 = 0;
      len_q = params.seqlen_q;
      len_k_slot = params.seqlen_k;
      batch_index = b;
    }
    len_k = len_k_slot;
    if constexpr (kSequsedK) {
      int const used = params.seqused_k[b];
      len_k = used < 0 ? 0 : used < len_k_slot ? used : len_k_slot;
    }
  }
};

}  // namespace nvrtc_attn
