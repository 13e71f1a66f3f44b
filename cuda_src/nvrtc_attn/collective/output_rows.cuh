// How a thread block reads the rows of O and dO of a query tile for delta = rowsum(dO * O): kLanes neighbouring threads for
// a row, 16 bytes at a time. The loop over it is written out in both kernels that have it: a function for a pass, inlined,
// comes out of the compiler as other code (NVRTC 13.0: 32 registers become 24, 64 become 66).
#pragma once
#include "../compat.cuh"

namespace nvrtc_attn {

template <class Traits>
struct OutputRows {
  static constexpr int kVec = Traits::kAligned ? 16 / int(sizeof(typename Traits::Element)) : 1;
  static constexpr int kChunks = Traits::kHeadDimV / kVec;
  static constexpr int kLanes = kChunks > 16 ? 32 : kChunks > 8 ? 16 : kChunks > 4 ? 8 : kChunks > 2 ? 4 : 2;
  static constexpr int kChunksLane = (kChunks + kLanes - 1) / kLanes;
  static constexpr int kRowsPerPass = Traits::kNumThreads / kLanes;
  static constexpr int kPasses = (Traits::kBlockM + kRowsPerPass - 1) / kRowsPerPass;
  // Passes whose loads are in flight together: 32 registers of data, what it takes to keep the memory busy.
  static constexpr int kBatch = !Traits::kAligned || kChunksLane >= 4 ? 1
                                : kPasses < 4 / kChunksLane           ? kPasses
                                                                      : 4 / kChunksLane;
};

}  // namespace nvrtc_attn
