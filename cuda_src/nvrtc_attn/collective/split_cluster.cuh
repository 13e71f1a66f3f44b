// The thread blocks of a cluster (compute capability 9.0 and up), one for each split of the keys of a query tile, and what
// they read of each other's shared memory.
#pragma once
#include "../compat.cuh"

namespace nvrtc_attn {

template <int kBlocks>
struct SplitCluster {
  unsigned base;
  unsigned char const* smem;

  NVRTC_ATTN_DEVICE explicit SplitCluster(unsigned char const* smem_)
      : base(unsigned(__cvta_generic_to_shared(smem_))), smem(smem_) {}

  // All threads of all blocks; what they wrote to shared memory before is visible after.
  NVRTC_ATTN_DEVICE void sync() const {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  }
  // Nobody leaves while another reads from its shared memory. A thread must have used what it has loaded, in a store, so
  // that no load is on its way. Nothing is made visible: a release would wait until the results are in memory.
  NVRTC_ATTN_DEVICE void leave() const {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
  }
  // What block `rank` has where this one has `from`, in dynamic shared memory.
  NVRTC_ATTN_DEVICE float2 load(float2 const* from, int rank) const {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.x), "=f"(x.y)
                 : "r"(address(from, rank))
                 : "memory");
    return x;
  }
  NVRTC_ATTN_DEVICE float4 load(float4 const* from, int rank) const {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address(from, rank))
                 : "memory");
    return x;
  }

 private:
  NVRTC_ATTN_DEVICE unsigned address(void const* from, int rank) const {
    unsigned const own = base + unsigned(reinterpret_cast<unsigned char const*>(from) - smem);
    unsigned mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(own), "r"(rank));
    return mapped;
  }
};

}  // namespace nvrtc_attn
