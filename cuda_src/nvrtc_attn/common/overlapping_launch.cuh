// Launches of one pass that begin before the one ahead of them has ended (programmatic dependent launch, compute capability 9.0
// on). The host asks for it (Launch.overlaps in nvrtc_attn/heuristics/spec.py); of another launch both functions do nothing.
//
// Every thread block of a launch that overlaps waits, even one that reads nothing: a launch that ends without having waited lets
// the launch behind it run beside the one ahead.
#pragma once
#include "../compat.cuh"

namespace nvrtc_attn {

// The next launch may begin once a thread of every block has been here, or the block has ended.
NVRTC_ATTN_DEVICE void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the launch ahead has ended, and what it wrote is there for all threads that hear of it from this one.
NVRTC_ATTN_DEVICE void wait_for_launch_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace nvrtc_attn
