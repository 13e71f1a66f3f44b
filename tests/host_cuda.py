"""What CUDA has and a host compiler has not, for tests that compile the text of device headers and run it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

FLAGS = ("-std=c++17", "-O1", "-U_FORTIFY_SOURCE")
"""Where it is on, a jump from one fiber's stack to another's ends the program."""


def session_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the whole session, which all workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def build(source: str, tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Path:
    """What the host's compiler makes of ``source``, a program or with ``-shared`` a library: once in a session.

    Skips where there is no compiler.
    """
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler for the host")
    folder = session_root(tmp_path_factory) / "host"
    folder.mkdir(mode=0o700, exist_ok=True)
    flags = (*FLAGS, *flags)
    target = folder / hashlib.sha256("\0".join((source, *flags)).encode()).hexdigest()[:24]
    text = target.with_suffix(".cpp")
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            text.write_text(source, encoding="utf-8")
            made = target.with_suffix(".new")
            command = [compiler, *flags, "-o", str(made), str(text)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[:4000]
            made.rename(target)
    return target


NUMBERS = """
template <class T> T __ldg(T const* at) { return *at; }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline double __longlong_as_double(long long x) { double y; std::memcpy(&y, &x, 8); return y; }
template <class T> void atomicAdd(T* at, T x) { *at += x; }
template <class T> void atomicOr(T* at, T x) { *at |= x; }
namespace nvrtc_attn {
template <class T> void add_to_global(T* at, T x) { *at += x; }
template <class T> void set_bits_in_global(T* at, T x) { *at |= x; }
}
"""
"""What CUDA has of numbers and of memory, for one thread at a time."""

OF_MODIFIERS = """
namespace nvrtc_attn {
constexpr float kLog2e = 1.4426950408889634f;
inline float infinity() { return __uint_as_float(0x7f800000u); }
inline float fast_exp2(float x) { return exp2f(x); }
inline float to_float(float x) { return x; }
inline int lane_again() { return threadIdx.x % 32; }
template <class Element> float tanh_of(float x) { return tanhf(x); }
}
struct Plain { int nothing; };
"""
"""What the text of a modifier has of other headers."""

ONE_THREAD = (
    """
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#define NVRTC_ATTN_DEVICE inline
using std::min; using std::max; using std::abs;
namespace cute { template <class...> using void_t = void; }
struct Thread { int x; }; static Thread threadIdx{0};
"""
    + NUMBERS
    + """
template <class T> T __shfl_sync(unsigned, T x, int) { return x; }
template <class T> T __shfl_xor_sync(unsigned, T x, int) { return 0; }
inline bool __all_sync(unsigned, bool x) { return x; }
inline unsigned __ballot_sync(unsigned, bool x) { return x; }
inline int __ffs(int x) { return __builtin_ffs(x); }
"""
    + OF_MODIFIERS
)
"""For text of one thread, `modifier.cuh` and what is made for it: numbers, and a warp of one lane."""

RUNNER = """
#include <setjmp.h>
#include <ucontext.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#define NVRTC_ATTN_DEVICE inline
struct Meeting { int arrived = 0, generation = 0; };
struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it waits; to jump is no call of the system, as swapcontext is
  bool begun = false, done = false;
  Meeting* waits_for = nullptr;
  int generation = 0;
};
static std::vector<Fiber> fibers;
static std::vector<char> stacks;
static jmp_buf scheduler;
static int now;  // the fiber that runs
static std::function<void()> body;
static void fiber_main() {
  body();
  fibers[now].done = true;
  _longjmp(scheduler, 1);
}
static void resume(int which) {
  Fiber& x = fibers[now = which];
  x.waits_for = nullptr;
  if (_setjmp(scheduler) != 0) return;
  if (x.begun) _longjmp(x.place, 1);
  x.begun = true;
  setcontext(&x.context);
}
static void meet(Meeting& at, int threads) {
  Fiber& own = fibers[now];
  if (++at.arrived == threads) {
    at.arrived = 0;
    ++at.generation;
    return;
  }
  own.waits_for = &at;
  own.generation = at.generation;
  if (_setjmp(own.place) == 0) _longjmp(scheduler, 1);
}
static void make_fibers(int threads, std::function<void()> what) {
  body = what;
  fibers = std::vector<Fiber>(threads);
  stacks.resize(fibers.size() << 16);
  for (Fiber& x : fibers) {
    getcontext(&x.context);
    x.context.uc_stack.ss_sp = stacks.data() + ((&x - fibers.data()) << 16);
    x.context.uc_stack.ss_size = 1 << 16;
    makecontext(&x.context, fiber_main, 0);
  }
}
static std::vector<int> ready_fibers() {
  std::vector<int> ready;
  for (int i = 0; i < int(fibers.size()); ++i) {
    Fiber& x = fibers[i];
    if (!x.done && (x.waits_for == nullptr || x.waits_for->generation != x.generation)) ready.push_back(i);
  }
  return ready;
}
static bool all_are_done() {
  for (Fiber& x : fibers) {
    if (!x.done) return false;
  }
  return true;
}
"""
"""Threads as fibers: each is a CUDA thread that runs until it meets others. Who runs them chooses the order."""

FIBERS = (
    RUNNER
    + """
#define __shared__ static
#define asm(...)
#define volatile
struct int2 { int x, y; };
inline int2 make_int2(int x, int y) { return {x, y}; }
struct Index { int x; };
static Index threadIdx, blockIdx, gridDim;

static Meeting block_meeting, warp_meetings[64];
static int exchanged[64][32];
static void run_block(int threads, std::function<void()> what) {
  make_fibers(threads, what);
  for (std::vector<int> ready; !(ready = ready_fibers()).empty();) {
    threadIdx.x = ready[rand() % ready.size()];
    resume(threadIdx.x);
  }
  if (!all_are_done()) abort();
}
inline void __syncthreads() { meet(block_meeting, int(fibers.size())); }
inline int exchange(int value, int from) {
  int const warp = threadIdx.x / 32;
  exchanged[warp][threadIdx.x % 32] = value;
  meet(warp_meetings[warp], 32);
  int const found = exchanged[warp][from];
  meet(warp_meetings[warp], 32);
  return found;
}
inline int __shfl_sync(unsigned, int value, int from) { return exchange(value, from); }
inline float __shfl_sync(unsigned, float value, int from) {
  int bits;
  std::memcpy(&bits, &value, 4);
  bits = exchange(bits, from);
  std::memcpy(&value, &bits, 4);
  return value;
}
template <class T> T __shfl_up_sync(unsigned, T value, int by) {
  int const lane = threadIdx.x % 32;
  return __shfl_sync(0, value, lane >= by ? lane - by : lane);
}
template <class T> T __shfl_xor_sync(unsigned, T value, int by) {
  return __shfl_sync(0, value, int(threadIdx.x % 32) ^ by);
}
inline unsigned long long __shfl_sync(unsigned, unsigned long long value, int from) {
  unsigned const low = unsigned(exchange(int(value), from));
  return (unsigned long long)(unsigned(exchange(int(value >> 32), from))) << 32 | low;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __ballot_sync(unsigned, bool value) {
  unsigned found = 0;
  for (int lane = 0; lane < 32; ++lane) found |= unsigned(exchange(value, lane)) << lane;
  return found;
}
inline bool __all_sync(unsigned, bool value) { return __ballot_sync(0, value) == 0xffffffffu; }
"""
)
"""For text of whole thread blocks: threads are fibers that take turns in random order, so that a missing
barrier shows."""
