// dq of a query tile leaves a warp of the Hopper backward kernel through shared memory, where the copy engine takes it and adds it
// to dq_accum while the warp goes on. With dV started later and two references of P read ahead, a pass with tiles of 80 queries
// takes 0 to 5 % less; tiles of 64 and 128 lose up to 4 %. docs/experiments.md, "Hopper backward: dq by the copy engine".
#pragma once
#include "../../collective/gradient_accumulator.cuh"
#include "../common/barrier.cuh"
#include "score_tile_transposed.cuh"

namespace nvrtc_attn {

// Floats in shared memory, added to those in global memory; multiples of 16 bytes. Issued by one thread.
NVRTC_ATTN_DEVICE void start_bulk_add(float* to, unsigned from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// Until all that this thread has started is in global memory.
NVRTC_ATTN_DEVICE void wait_bulk_adds() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// A warp's blocks of dq_accum, which lie side by side there and at `staging`. That place is the warp's own: lane 0 starts the
// copies, and waits until the last one has been read.
template <int kTiles>
NVRTC_ATTN_DEVICE void add_blocks_in_bulk(float* to, unsigned staging, AccTile const (&dq)[1][kTiles], int lane) {
  if (lane == 0) wait_stores_read();
  __syncwarp();
#pragma unroll
  for (int d = 0; d < kTiles; ++d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(staging + 16 * lane + d * kAccumBlock * 4),
                 "f"(dq[0][d][0]), "f"(dq[0][d][1]), "f"(dq[0][d][2]), "f"(dq[0][d][3])
                 : "memory");
  }
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
    start_bulk_add(to, staging, kTiles * kAccumBlock * 4);
    commit_stores();
  }
}

}  // namespace nvrtc_attn
