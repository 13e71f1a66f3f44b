// Bulk copies of contiguous memory by the copy engine: no tensor map, addresses and sizes in multiples of 16 bytes.
#pragma once
#include "../../compat.cuh"

namespace nvrtc_attn {

// Global to shared memory; the bytes are counted by the mbarrier at `barrier`. Issued by one thread.
NVRTC_ATTN_DEVICE void bulk_load(unsigned to, void const* from, int bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace nvrtc_attn
