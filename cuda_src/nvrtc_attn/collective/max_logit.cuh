// The largest score of every head, which training with QK-clip asks for: as scores are behind scale, softcap or score_mod, and
// bias, among those that no mask hides, without sink and dropout. The row maxima of the softmax do not say it, because they lag
// behind (kRescaleThreshold, kLazyMax), so each thread keeps the true ones beside them, and a warp one atomic a tile of queries.
#pragma once
#include "scores.cuh"

namespace nvrtc_attn {

// Read anew: it shall not take a register of a loop.
NVRTC_ATTN_DEVICE int thread_of_block() {
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  return tid;
}

// The largest score so far of each row of a quad, in the unit of scores: thread t of it has row t, in one register.
// No rows: nobody asks.
template <int kRows>
struct LargestScores {
  static_assert(kRows <= 4, "a row for each thread");
  float largest = -infinity();

  // Of a tile, for all of the quad.
  NVRTC_ATTN_DEVICE void take(float const (&tile_max)[kRows]) { largest = fmaxf(largest, own(tile_max)); }
  // Of row r, or -inf: another thread has it.
  NVRTC_ATTN_DEVICE float of_row(int r) const { return (thread_of_block() & 3) == r ? largest : -infinity(); }

 protected:
  static NVRTC_ATTN_DEVICE float own(float const (&tile_max)[kRows]) {
    int const t = thread_of_block() & 3;
    float x = tile_max[0];  // also of threads without a row, which nobody asks
#pragma unroll
    for (int r = 1; r < kRows; ++r) x = t == r ? tile_max[r] : x;
    return x;
  }
};
template <>
struct LargestScores<0> {
  template <class TileMax>
  NVRTC_ATTN_DEVICE void take(TileMax const&) {}
};

// The same at the beginning of dynamic shared memory, 4 bytes a thread: where that one register would spill.
template <int kRows>
struct LargestScoresInSmem : LargestScores<kRows> {
  NVRTC_ATTN_DEVICE LargestScoresInSmem() { *at() = -infinity(); }
  NVRTC_ATTN_DEVICE void take(float const (&tile_max)[kRows]) {
    float const x = LargestScores<kRows>::own(tile_max);
    *at() = fmaxf(*at(), x);
  }
  NVRTC_ATTN_DEVICE float of_row(int r) const { return (thread_of_block() & 3) == r ? *at() : -infinity(); }

 private:
  static NVRTC_ATTN_DEVICE float* at() {
    extern __shared__ __align__(128) unsigned char smem_begin[];
    return reinterpret_cast<float*>(smem_begin) + thread_of_block();
  }
};
template <>
struct LargestScoresInSmem<0> : LargestScores<0> {};

// *to = max(*to, x), by bits: those of numbers that are not negative grow with them as signed integers, those of negative
// ones shrink as they grow, and as unsigned integers are above all others. A NaN, written as 0x7fffffff, is above infinity and stays.
NVRTC_ATTN_DEVICE void atomic_max(float* to, float x) {
  if (x == -infinity()) return;
  int const bits = x != x ? 0x7fffffff : __float_as_int(x + 0.0f);  // minus zero is zero
  if (bits >= 0) {
    atomicMax(reinterpret_cast<int*>(to), bits);
  } else {
    atomicMin(reinterpret_cast<unsigned*>(to), unsigned(bits));
  }
}

// Raise what the heads have so far by this warp's rows of sequence b, of which `row(r)` is number r and `count` exist, with
// heads `head(row)`. `sums` are those of P, reduced: they tell of a NaN, which maxima leave out.
template <class Traits, int kRows, class Row, class Head>
NVRTC_ATTN_DEVICE void raise_max_logit(ForwardParams const& params, float const (&largest)[kRows],
                                       float const (&sums)[kRows], int b, int count, Row row, Head head, int lane) {
  auto const& with = static_cast<typename Traits::MaxLogitParams const&>(params);
  float* const to = with.max_logit + index_t(b) * params.num_heads;
  float const unit = ScoreMap<Traits>::kMapped ? 1.0f : params.scale;
  float const unknown = __int_as_float(0x7fffffff);
  float most = -infinity();
  bool nan = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (row(r) >= count) continue;
    float const x = largest[r] * unit;
    bool const is_nan = sums[r] != sums[r];
    if constexpr (Traits::kPackedHeads) {
      atomic_max(to + head(row(r)), is_nan && x < infinity() ? unknown : x);
    } else {
      most = fmaxf(most, x);
      nan |= is_nan;
    }
  }
  if constexpr (!Traits::kPackedHeads) {
#pragma unroll
    for (int delta = 16; delta > 0; delta /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, delta));
    if (__any_sync(0xffffffffu, nan) && most < infinity()) most = unknown;
    if (lane == 0) atomic_max(to + head(0), most);
  }
}

}  // namespace nvrtc_attn
