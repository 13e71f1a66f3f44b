// Where the bias, its gradient or the byte mask of one (batch, head) lies. Broadcast dims have stride 0. How a kernel
// reads it is its own affair (forward_operands.cuh, score_gradient.cuh, hopper/); what it does to a score is scores.cuh's.
#pragma once
#include "../common/mma.cuh"
#include "../params.cuh"

namespace nvrtc_attn {

// The bias (or its gradient, or a byte mask) of one (batch, head).
template <class Element>
struct ScoreTensor {
  Element* base;
  index_t stride_m;
  index_t stride_n;
  bool pairs;  // two neighbouring columns (an even one first) can be moved as one vector

  NVRTC_ATTN_DEVICE ScoreTensor(Element* tensor, int b, int h, index_t stride_b, index_t stride_h, index_t stride_m_,
                                index_t stride_n_)
      : base(tensor + index_t(b) * stride_b + index_t(h) * stride_h), stride_m(stride_m_), stride_n(stride_n_) {
    pairs =
        stride_n == 1 && stride_m % 2 == 0 && reinterpret_cast<unsigned long long>(base) % (2 * sizeof(Element)) == 0;
  }

  NVRTC_ATTN_DEVICE Element* at(int i, int j) const { return base + index_t(i) * stride_m + index_t(j) * stride_n; }
};

template <class Element>
struct alignas(2 * sizeof(Element)) ElementPair {
  Element x, y;
};

}  // namespace nvrtc_attn
