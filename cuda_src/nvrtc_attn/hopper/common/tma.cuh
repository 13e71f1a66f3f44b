// The bulk tensor copy engine: tiles from global to shared memory through a tensor map made on the host.
#pragma once
#include "../../params.cuh"

namespace nvrtc_attn {

// L2 eviction priorities, as createpolicy makes them for whole accesses.
constexpr unsigned long long kEvictNormal = 0x1000000000000000ull;
constexpr unsigned long long kEvictFirst = 0x12F0000000000000ull;
constexpr unsigned long long kEvictLast = 0x14F0000000000000ull;

NVRTC_ATTN_DEVICE void prefetch_tensor_map(TensorMap const& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<unsigned long long>(&map)) : "memory");
}

// Bring the box at column d, row m, head h, batch b into L2. Issued by one thread; nobody waits for it.
NVRTC_ATTN_DEVICE void prefetch_box(TensorMap const& map, int d, int m, int h, int b) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(
                   reinterpret_cast<unsigned long long>(&map)),
               "r"(d), "r"(m), "r"(h), "r"(b)
               : "memory");
}

// Copy the box at column d, row m, head h, batch b to shared address `to`; elements outside the tensor arrive as zeros
// and count as bytes too. Issued by one thread; completion is counted by the mbarrier at `barrier`.
NVRTC_ATTN_DEVICE void load_box(unsigned to, TensorMap const& map, unsigned barrier, int d, int m, int h, int b,
                                unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(reinterpret_cast<unsigned long long>(&map)), "r"(barrier), "r"(d), "r"(m), "r"(h), "r"(b), "l"(policy)
      : "memory");
}

}  // namespace nvrtc_attn
