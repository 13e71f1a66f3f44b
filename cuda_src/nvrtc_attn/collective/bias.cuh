// Additive bias and boolean mask: where one (batch, head) starts, and the element reads. Broadcast dims have stride 0.
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

// Columns j and j + 1 (j even) of row i as floats; columns at or beyond len_k, rows at or beyond len_q give zero.
template <class Element>
NVRTC_ATTN_DEVICE float2 load_score_pair(ScoreTensor<Element const> const& t, int i, int j, int len_q, int len_k) {
  float2 r = make_float2(0.0f, 0.0f);
  if (i >= len_q || j >= len_k) return r;
  Element const* p = t.at(i, j);
  if (t.pairs && j + 1 < len_k) {
    ElementPair<Element> const v = *reinterpret_cast<ElementPair<Element> const*>(p);
    return make_float2(to_float(v.x), to_float(v.y));
  }
  r.x = to_float(p[0]);
  if (j + 1 < len_k) r.y = to_float(p[t.stride_n]);
  return r;
}

// The same two positions of a byte mask: bit 0 for column j, bit 1 for column j + 1, set = keep.
NVRTC_ATTN_DEVICE unsigned load_mask_pair(ScoreTensor<unsigned char const> const& t, int i, int j, int len_q,
                                          int len_k) {
  if (i >= len_q || j >= len_k) return 0;
  unsigned char const* p = t.at(i, j);
  if (t.pairs && j + 1 < len_k) {
    unsigned const both = *reinterpret_cast<unsigned short const*>(p);
    return unsigned((both & 0xff) != 0) | unsigned((both & 0xff00) != 0) << 1;
  }
  unsigned keep = p[0] != 0;
  if (j + 1 < len_k) keep |= unsigned(p[t.stride_n] != 0) << 1;
  return keep;
}

// Write two neighbouring columns of a gradient, skipping what lies outside.
template <class Element>
NVRTC_ATTN_DEVICE void store_score_pair(ScoreTensor<Element> const& t, int i, int j, int len_q, int len_k, float x,
                                        float y) {
  if (i >= len_q || j >= len_k) return;
  Element* p = t.at(i, j);
  if (t.pairs && j + 1 < len_k) {
    *reinterpret_cast<ElementPair<Element>*>(p) = ElementPair<Element>{from_float<Element>(x), from_float<Element>(y)};
    return;
  }
  p[0] = from_float<Element>(x);
  if (j + 1 < len_k) p[t.stride_n] = from_float<Element>(y);
}

}  // namespace nvrtc_attn
