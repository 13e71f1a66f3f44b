// Tiles of packed sequences by number, without a table: a grid over them has no blocks for what short sequences lack.
//
// Sequence b has the slots from cu_seqlens[b] / kTile + b on: as many as it has tiles of kTile rows or one more, and one where
// it has none. The slots behind those of all sequences, one at least, and those before stand for rows of no sequence: parts of
// the virtual sequence b == batch. So there are total / kTile + batch + 1 slots, whatever the lengths are. Workspaces in
// whole tiles number their rows alike (accumulator_row0).
#pragma once
#include "../compat.cuh"

namespace nvrtc_attn {

struct PackedSlot {
  int b;
  int tile;  // of the sequence, which may be too short for it; b == batch: the part
};

template <int kTile>
struct PackedSlots {
  int const* cu_seqlens;
  int batch;
  int total;  // rows of the tensor

  NVRTC_ATTN_DEVICE int count() const { return total / kTile + batch + 1; }
  // How many of them stand for rows of no sequence.
  NVRTC_ATTN_DEVICE int parts() const {
    int const parts = cu_seqlens[0] / kTile + total / kTile - cu_seqlens[batch] / kTile + 1;
    return parts > 1 ? parts : 1;  // whatever the lengths say: it is the step of a loop
  }

  // By one thread.
  NVRTC_ATTN_DEVICE PackedSlot find(int slot) const {
    int low = -1, high = batch + 1;
    while (high - low > 1) {
      int const middle = (low + high) >> 1;
      (first(middle) <= slot ? low : high) = middle;
    }
    return slot_of(slot, low);
  }

  // By a whole warp, which reads 32 lengths at a time: one turn up to 31 sequences, two up to 1087.
  NVRTC_ATTN_DEVICE PackedSlot find_together(int slot, int lane) const {
    int low = -1, high = batch + 1;
    while (high - low > 1) {
      int const step = (high - low + 32) / 33;
      int const at = low + (lane + 1) * step;
      int const found = __popc(__ballot_sync(0xffffffffu, at < high && first(at) <= slot));
      high = low + (found + 1) * step < high ? low + (found + 1) * step : high;
      low += found * step;
    }
    return slot_of(slot, low);
  }

 private:
  NVRTC_ATTN_DEVICE int first(int b) const { return cu_seqlens[b] / kTile + b; }
  NVRTC_ATTN_DEVICE PackedSlot slot_of(int slot, int b) const {
    if (b < 0) return {batch, slot};
    return {b, slot - first(b) + (b == batch ? cu_seqlens[0] / kTile : 0)};
  }
};

}  // namespace nvrtc_attn
