// The gradients of captured arrays from the words that the dk/dv kernel of a deterministic backward pass added to, the last
// launch of it: sums of integers, rounded once, so that no order of additions is in them.
//
// A thread an element, as many in turn as there are. No shared memory.
#pragma once
#include <cute/layout.hpp>

#include "../collective/scores.cuh"

namespace nvrtc_attn {

template <class Traits>
NVRTC_ATTN_DEVICE void captured_sum(BackwardParams const& params) {
  auto const& block = static_cast<typename Traits::ModifiedParams const&>(params).modifier;
  int const first = int(blockIdx.x) * Traits::kNumThreads + int(threadIdx.x);
  int const step = int(gridDim.x) * Traits::kNumThreads;
  Traits::Modifier::each_gradient(block, [&](ExactSum::Word const* words, float* result, int count) {
    for (int i = first; i < count; i += step) result[i] = ExactSum::total(words + index_t(i) * ExactSum::kWords);
  });
}

}  // namespace nvrtc_attn
