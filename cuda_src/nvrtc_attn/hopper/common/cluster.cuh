// Thread blocks of a cluster: each other's shared memory and mbarriers.
#pragma once
#include "barrier.cuh"
#include "tma.cuh"

namespace nvrtc_attn {

NVRTC_ATTN_DEVICE int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks; what they wrote to shared memory before is visible after. Not for the copy engine.
NVRTC_ATTN_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The place of this block's shared address in the block `rank`.
NVRTC_ATTN_DEVICE unsigned cluster_address(unsigned address, int rank) {
  unsigned mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// An arrival at another block's mbarrier; `address` comes from cluster_address. It tells that a slot has been read, by
// products that are complete; it publishes no writes (release.cluster would wait for all of the thread's additions to
// global memory).
NVRTC_ATTN_DEVICE void arrive_remote(unsigned address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

// As Mbarrier::wait, for a barrier at which another block arrives.
NVRTC_ATTN_DEVICE void wait_remote(Mbarrier const& barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "RETRY:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra RETRY;\n"
      "DONE:\n"
      "}" ::"r"(barrier.address),
      "r"(parity)
      : "memory");
}

// As wait_remote, for room to write into: nothing that the other block has written is read, so that L1 need not be emptied,
// which takes 45 cycles. Gained 2 to 5 % at head dim 256 (H200, 2026-11-21).
NVRTC_ATTN_DEVICE void wait_for_room(Mbarrier const& barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "RETRY:\n"
      "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra RETRY;\n"
      "DONE:\n"
      "}" ::"r"(barrier.address),
      "r"(parity)
      : "memory");
}

// Shared memory of this block to another's, by the copy engine; the other's mbarrier counts the bytes.
NVRTC_ATTN_DEVICE void bulk_send(unsigned to, unsigned from, int bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// One word to another block; its mbarrier counts four bytes.
NVRTC_ATTN_DEVICE void send_word(unsigned to, int word, unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(word),
               "r"(barrier)
               : "memory");
}

// As load_box (hopper/common/tma.cuh), to the same shared address of all blocks of a cluster of two, counted by the mbarrier at the same
// address in each.
NVRTC_ATTN_DEVICE void load_box_to_both(unsigned to, TensorMap const& map, unsigned barrier, int d, int m, int h, int b,
                                        unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %8, %7;" ::"r"(to),
      "l"(reinterpret_cast<unsigned long long>(&map)), "r"(barrier), "r"(d), "r"(m), "r"(h), "r"(b), "l"(policy),
      "h"((unsigned short)3)
      : "memory");
}

}  // namespace nvrtc_attn
