// Philox4x32-10 dropout. Element t of the mask is 32-bit output number t of the stream with key `seed`:
// t = offset + ((b * H + h) * max_q + i) * max_k + j, lane t % 4 of the block with counter t / 4. Keep iff word > threshold.
// Independent of tile sizes and thread layout, so forward and backward, and every kernel family, agree bit for bit.
#pragma once
#include "../params.cuh"

namespace nvrtc_attn {

// As one instruction: ptxas follows the 64-bit product of the C++ expression by an addition of zero.
NVRTC_ATTN_DEVICE void multiply_wide(unsigned a, unsigned b, unsigned& high, unsigned& low) {
  unsigned long long product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  high = unsigned(product >> 32);
  low = unsigned(product);
}

constexpr unsigned kPhiloxMultiplier0 = 0xD2511F53u;
constexpr unsigned kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr unsigned kPhiloxWeyl0 = 0x9E3779B9u;  // what a round adds to the key
constexpr unsigned kPhiloxWeyl1 = 0xBB67AE85u;

NVRTC_ATTN_DEVICE uint4 philox_block(unsigned long long seed, unsigned long long counter) {
  // Positions are 64-bit and wrap, four of them share a counter: counters wrap at 2^62.
  unsigned c0 = unsigned(counter), c1 = unsigned(counter >> 32) & 0x3fffffffu, c2 = 0, c3 = 0;
  unsigned k0 = unsigned(seed), k1 = unsigned(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    unsigned high0, low0, high1, low1;
    multiply_wide(c0, kPhiloxMultiplier0, high0, low0);
    multiply_wide(c2, kPhiloxMultiplier1, high1, low1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  return make_uint4(c0, c1, c2, c3);
}

struct Dropout {
  unsigned long long seed;
  unsigned long long row0;   // stream position of (i = 0, j = 0) of this (batch, head)
  unsigned long long pitch;  // max_k
  unsigned threshold;

  Dropout() = default;  // of kernels without dropout: never asked
  template <class Params>
  NVRTC_ATTN_DEVICE Dropout(Params const& params, int b, int h)
      : seed(params.rng_seed_ptr ? (unsigned long long)*params.rng_seed_ptr : params.rng_seed),
        pitch((unsigned long long)params.seqlen_k),
        threshold(params.dropout_threshold) {
#if __CUDA_ARCH__ >= 800
    // A warp reduction leaves its result in uniform registers: the ten round keys then are computed there and not by every
    // lane again for every block, a fifth of all instructions of a kernel with dropout.
    seed = (unsigned long long)__reduce_or_sync(0xffffffffu, unsigned(seed >> 32)) << 32 |
           __reduce_or_sync(0xffffffffu, unsigned(seed));
#endif
    unsigned long long const offset =
        params.rng_offset_ptr ? (unsigned long long)*params.rng_offset_ptr : params.rng_offset;
    row0 = offset + ((unsigned long long)b * params.num_heads + h) * (unsigned long long)params.seqlen_q * pitch;
  }

  // Of a part of a larger attention: counted by the sizes of the whole. Where the offset lies on the device, the word beside
  // it has the place of the part's first score.
  template <class Params>
  NVRTC_ATTN_DEVICE Dropout(PartOf<Params> const& params, int b, int h)
      : Dropout(static_cast<Params const&>(params), 0, 0) {
    pitch = (unsigned long long)params.dropout_columns;
    if (params.rng_offset_ptr) row0 += params.rng_offset;
    row0 += ((unsigned long long)b * params.dropout_heads + h) * (unsigned long long)params.dropout_rows * pitch;
  }

  // Of one whose first row or key is known on the device alone.
  template <class Params>
  NVRTC_ATTN_DEVICE Dropout(StartsOnDevice<Params> const& params, int b, int h)
      : Dropout(static_cast<Params const&>(params), b, h) {
    row0 += (unsigned long long)params.first_row() * pitch + (unsigned long long)params.first_key();
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
  // The 16 columns lie in four Philox blocks, thread t computes block t, and the bits travel by shuffle: one block per
  // four scores. A row that does not start at a multiple of four reaches into a fifth block.
  NVRTC_ATTN_DEVICE unsigned keep_bits(int i, int j0, int lane) const {
    unsigned long long const start = row0 + (unsigned long long)i * pitch + (unsigned long long)j0;
    int const t = lane & 3;
    unsigned bits = block_bits((start >> 2) + t) << (4 * t);
    bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
    bits |= __shfl_xor_sync(0xffffffffu, bits, 2);
    unsigned const shift = unsigned(start) & 3;
    if (__any_sync(0xffffffffu, shift != 0)) bits = (bits | block_bits((start >> 2) + 4) << 16) >> shift;
    return ((bits >> (2 * t)) & 3) | ((bits >> (8 + 2 * t)) & 3) << 2;
  }

  // Keep bits of the four stream positions of one Philox block.
  NVRTC_ATTN_DEVICE unsigned block_bits(unsigned long long counter) const {
    uint4 const w = philox_block(seed, counter);
    return unsigned(w.x > threshold) | unsigned(w.y > threshold) << 1 | unsigned(w.z > threshold) << 2 |
           unsigned(w.w > threshold) << 3;
  }
};

// What a `Dropout` is made of: with the sizes of the whole where the call is a part.
template <class Traits, class Params>
NVRTC_ATTN_DEVICE auto const& dropout_params(Params const& params) {
  return part_params<Traits::kPart, Traits>(params);
}

// By how many rows one head is apart from the next in the mask, and how many heads a batch entry has there.
template <class Traits, class Params>
NVRTC_ATTN_DEVICE int dropout_rows(Params const& params) {
  if constexpr (Traits::kPart) return dropout_params<Traits>(params).dropout_rows;
  return params.seqlen_q;
}
template <class Traits, class Params>
NVRTC_ATTN_DEVICE int dropout_heads(Params const& params) {
  if constexpr (Traits::kPart) return dropout_params<Traits>(params).dropout_heads;
  return params.num_heads;
}

}  // namespace nvrtc_attn
