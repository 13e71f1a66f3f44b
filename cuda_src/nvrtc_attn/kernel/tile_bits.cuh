// Between the launch that finds the tiles of a user's mask (kernel/tile_ranges.cuh) and an attention kernel with kTileBits: the
// bits of undecided tiles, in the layout of that kernel's threads (collective/tile_bits.cuh).
//
// Four warps ask for 16 rows each, of 64: rows of a tile are queries, of a transposed one keys. How many slots were taken is on
// the device, so that the grid is what fills it, and its blocks go on to the next rows.
#pragma once
#include "../collective/scores.cuh"  // tanh_of: the text of a modifier has its scores, too
#include "../collective/tile_bits.cuh"

namespace nvrtc_attn {

template <class Traits, class Params>
NVRTC_ATTN_DEVICE void tile_bits(Params const& params) {
  using Modifier = ModifierOf<Traits>;
  static_assert(Modifier::kMasks && Traits::kNumThreads == 128, "four warps ask what a mask keeps");
  constexpr int kRows = Traits::kBlockM;  // of the accumulators' 16 rows and 8 columns
  constexpr int kTiles = Traits::kBlockN / 8;
  constexpr int kParts = kRows / 64;
  using Bits = ThreadBits<kTiles>;
  static_assert(kRows % 64 == 0, "four warps have 64 rows");
  bool const transposed = params.tile_plan_transposed != 0;
  TileBits<Traits> const to(params);
  int const count = min(*to.counter(), to.params.tile_bits_room) * kParts;
  int const thread = int(threadIdx.x);
  int const lane = thread & 31;
  for (int unit = int(blockIdx.x); unit < count; unit += int(gridDim.x)) {
    int const i = unit / kParts;
    int const part = unit - i * kParts;
    TileSlot const name = to.slot(i);
    Modifier const modifier(params, name.b, name.h);
    int const row = kRows * name.line + 64 * part + 16 * (thread >> 5) + (lane >> 2);
    int const column = Traits::kBlockN * name.tile + 2 * (lane & 3);
    MaskBits<Modifier, 1, kTiles> bits;
    if (transposed) {
      bits.compute_transposed(modifier, column, row);
    } else {
      bits.compute(modifier, row, column);
    }
    constexpr int kBytes = 2 * kRows * Bits::kBytes;
    unsigned char* const of_tile = to.bits(i, kBytes + GroupWords<kParts>::kBytes);
    Bits::store(of_tile + (128 * part + thread) * Bits::kBytes, bits.words);
    unsigned kept = 0;
#pragma unroll
    for (int w = 0; w < Bits::kWords; ++w) kept |= bits.words[w];
    bool const none = __all_sync(0xffffffffu, kept == 0);
    if (lane == 0) of_tile[kBytes + 4 * part + (thread >> 5)] = !none;
  }
}

}  // namespace nvrtc_attn
