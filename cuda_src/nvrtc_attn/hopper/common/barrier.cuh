// Hopper synchronisation: mbarriers in shared memory, named barriers, register reallocation between warp-groups.
#pragma once
#include "../../compat.cuh"

namespace nvrtc_attn {

// What instructions take: an address in the shared window.
NVRTC_ATTN_DEVICE unsigned shared_address(void const* p) { return unsigned(__cvta_generic_to_shared(p)); }

// A barrier that counts arrivals and, for the copy engine, bytes. A phase completes when both have come; waiting names the
// parity of the phase. A fresh barrier is in phase 0: wait(1) passes at once, wait(0) waits for the first completion.
struct Mbarrier {
  static constexpr int kBytes = 8;
  unsigned address;

  NVRTC_ATTN_DEVICE void init(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals));
  }
  NVRTC_ATTN_DEVICE void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  }
  // One arrival, and `bytes` that a bulk copy will deliver to this phase.
  NVRTC_ATTN_DEVICE void arrive_and_expect(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
  }
  // Whether the phase is complete.
  NVRTC_ATTN_DEVICE bool test(unsigned parity) const {
    unsigned done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
    return done != 0;
  }
  NVRTC_ATTN_DEVICE void wait(unsigned parity) const {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "RETRY:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra RETRY;\n"
        "DONE:\n"
        "}" ::"r"(address),
        "r"(parity)
        : "memory");
  }
};

// Makes freshly initialised mbarriers visible to the copy engine; a CTA barrier must follow.
NVRTC_ATTN_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders this thread's ordinary shared-memory writes before later reads by the tensor cores or the copy engine.
NVRTC_ATTN_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What another block has released, with all that it wrote before.
NVRTC_ATTN_DEVICE int load_acquire(int const* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Hardware barrier `id` (0 is __syncthreads) among `threads` threads; arrive does not wait.
NVRTC_ATTN_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
NVRTC_ATTN_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
NVRTC_ATTN_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
NVRTC_ATTN_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Position in a ring of kStages shared-memory slots and the parity of the barriers at that position.
template <int kStages>
struct RingPosition {
  int stage = 0;
  unsigned parity = 0;

  NVRTC_ATTN_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace nvrtc_attn
