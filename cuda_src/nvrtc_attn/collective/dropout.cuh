// Philox4x32-10 dropout. Element t of the mask is 32-bit output number t of the stream with key `seed`:
// t = offset + ((b * H + h) * max_q + i) * max_k + j, lane t % 4 of the block with counter t / 4. Keep iff word > threshold.
// Independent of tile sizes and thread layout, so forward and backward, and every kernel family, agree bit for bit.
#pragma once
#include "../params.cuh"

namespace nvrtc_attn {

NVRTC_ATTN_DEVICE uint4 philox_block(unsigned long long seed, unsigned long long counter) {
  unsigned c0 = unsigned(counter), c1 = unsigned(counter >> 32), c2 = 0, c3 = 0;
  unsigned k0 = unsigned(seed), k1 = unsigned(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    unsigned long long const p0 = 0xD2511F53ull * c0;
    unsigned long long const p1 = 0xCD9E8D57ull * c2;
    c0 = unsigned(p1 >> 32) ^ c1 ^ k0;
    c1 = unsigned(p1);
    c2 = unsigned(p0 >> 32) ^ c3 ^ k1;
    c3 = unsigned(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

struct Dropout {
  unsigned long long seed;
  unsigned long long row0;  // stream position of (i = 0, j = 0) of this (batch, head)
  unsigned long long pitch; // max_k
  unsigned threshold;

  Dropout() = default;  // of kernels without dropout: never asked
  template <class Params>
  NVRTC_ATTN_DEVICE Dropout(Params const& params, int b, int h)
      : seed(params.rng_seed_ptr ? (unsigned long long)*params.rng_seed_ptr : params.rng_seed),
        pitch((unsigned long long)params.seqlen_k),
        threshold(params.dropout_threshold) {
    unsigned long long const offset =
        params.rng_offset_ptr ? (unsigned long long)*params.rng_offset_ptr : params.rng_offset;
    row0 = offset + ((unsigned long long)b * params.num_heads + h) * (unsigned long long)params.seqlen_q * pitch;
  }

  NVRTC_ATTN_DEVICE bool keep(unsigned long long t) const {
    uint4 const w = philox_block(seed, t >> 2);
    unsigned const lane = unsigned(t) & 3;
    unsigned const word = lane < 2 ? (lane == 0 ? w.x : w.y) : (lane == 2 ? w.z : w.w);
    return word > threshold;
  }

  // Keep bits of 16 consecutive columns (two accumulator tiles) of one row, for the four threads that share the row.
  // j0 is the first of the 16 columns (a multiple of 8); bits 0, 1: columns 2t, 2t + 1 of the first tile,
  // bits 2, 3: of the second. Must be called by whole warps.
  // When the row starts at a multiple of four, thread t computes block t of the four and the words travel by shuffle: one
  // Philox block per four scores. Otherwise every thread computes the blocks of its own columns.
  NVRTC_ATTN_DEVICE unsigned keep_bits(int i, int j0, int lane) const {
    unsigned long long const start = row0 + (unsigned long long)i * pitch + (unsigned long long)j0;
    int const t = lane & 3;
    // Alignment is the same for all rows when pitch is a multiple of four; the vote keeps the branch uniform when not.
    if (__all_sync(0xffffffffu, (start & 3) == 0)) {
      uint4 const w = philox_block(seed, (start >> 2) + t);
      unsigned const mine = unsigned(w.x > threshold) | unsigned(w.y > threshold) << 1 | unsigned(w.z > threshold) << 2 |
                            unsigned(w.w > threshold) << 3;
      unsigned const first = __shfl_sync(0xffffffffu, mine, (lane & ~3) | (t >> 1));
      unsigned const second = __shfl_sync(0xffffffffu, mine, (lane & ~3) | 2 | (t >> 1));
      int const shift = (t & 1) * 2;
      return ((first >> shift) & 3) | ((second >> shift) & 3) << 2;
    }
    unsigned bits = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      bits |= unsigned(keep(start + (unsigned long long)((n >> 1) * 8 + 2 * t + (n & 1)))) << n;
    }
    return bits;
  }
};

}  // namespace nvrtc_attn
