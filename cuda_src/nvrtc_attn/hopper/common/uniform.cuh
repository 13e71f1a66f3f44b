// What the compiler is told of a value: that all lanes of a converged warp share it, so that it lives in a uniform register, or
// nothing.
#pragma once
#include "../../compat.cuh"

namespace nvrtc_attn {

NVRTC_ATTN_DEVICE int uniform(int a) { return int(__reduce_or_sync(0xffffffffu, unsigned(a))); }

// A word that is the same for all lanes.
NVRTC_ATTN_DEVICE int load_shared_uniform(unsigned address) {
  int word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return uniform(word);
}

// a / b for values that are equal in all lanes of a converged warp. A division goes through floating point, which has no uniform
// registers, and everything that follows from it would live in the few vector registers of the loading warp; the
// result of a warp reduction is uniform again.
NVRTC_ATTN_DEVICE int uniform_quotient(int a, int b) {
  return int(__reduce_or_sync(0xffffffffu, unsigned(a) / unsigned(b)));
}

// Eight words of memory in one register of a warp, word l % 8 in lane l. A warp with few registers can ask for them long before
// it needs them: only word() waits for them.
struct SpreadWords {
  int own;

  NVRTC_ATTN_DEVICE void load(void const* from) { own = static_cast<int const*>(from)[int(threadIdx.x) & 7]; }
  NVRTC_ATTN_DEVICE int word(int i) const { return uniform(__shfl_sync(0xffffffffu, own, i)); }
};

// By one lane: what a counter held before it was counted up, which only who uses it waits for. (What the compiler makes of
// atomicAdd() uses it at once.)
NVRTC_ATTN_DEVICE int count_up(int* counter) {
  int before;
  asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// `x`, of which the compiler does not keep what it has computed before.
NVRTC_ATTN_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// The thread's number, read again.
NVRTC_ATTN_DEVICE int thread_again() {
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  return tid;
}
template <class T>
NVRTC_ATTN_DEVICE T* opaque(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

}  // namespace nvrtc_attn
