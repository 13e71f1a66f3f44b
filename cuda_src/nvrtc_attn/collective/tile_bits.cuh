// What a mask keeps of tiles that its ranges leave undecided, one bit a score: evaluated once for all heads and batch entries
// that the mask does not tell apart, by the launch between the one that finds the tiles (kernel/tile_ranges.cuh) and the
// attention kernel. Kernels with kTileBits.
//
// Undecided tiles have slots in a buffer, as many as the host made room for; whatever has none is asked by the attention kernel
// itself. Which tile has which slot differs from run to run, its bits do not. In the buffer of words, all of its
// params in bytes: two counters of which the second is that of slots (zero before the launch), words, for each word the slot of
// its first undecided tile, for each slot which tile it is, and its bits: the words of MaskBits of each thread of
// the attention kernel that has scores of the tile, one thread after the other, and a word for each warp-group, with a
// byte for each of its warps: whether any of its bits is set (GroupWords).
#pragma once
#include <cute/util/type_traits.hpp>
#include "modifier.cuh"
#include "tile_words.cuh"

namespace nvrtc_attn {

struct alignas(16) TileSlot {
  int line, tile, h, b;  // as in words: of the mask, and transposed tiles have key tiles as lines
};

// The bits of a thread as they lie in memory. `kTiles`: accumulator tiles of eight columns, 16 rows.
template <int kTiles>
struct ThreadBits {
  static constexpr int kWords = (kTiles + 7) / 8;
  static constexpr int kVector = kWords == 3 ? 4 : kWords;  // one access
  static constexpr int kBytes = 4 * kVector;
  static_assert(kVector <= 4, "one access");

  static NVRTC_ATTN_DEVICE void store(unsigned char* to, unsigned const (&words)[kWords]) {
    unsigned x[kVector] = {};
#pragma unroll
    for (int w = 0; w < kWords; ++w) x[w] = words[w];
    if constexpr (kVector == 1) {
      *reinterpret_cast<unsigned*>(to) = x[0];
    } else if constexpr (kVector == 2) {
      *reinterpret_cast<TileWord*>(to) = {x[0], x[1]};
    } else {
      *reinterpret_cast<SixteenBytes*>(to) = {x[0], x[1], x[2], x[3]};
    }
  }
  // From shared memory.
  static NVRTC_ATTN_DEVICE void load(unsigned (&words)[kWords], unsigned from) {
    if constexpr (kVector == 1) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[0]) : "r"(from) : "memory");
    } else if constexpr (kVector == 2) {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
    } else {
      unsigned last;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(last)
                   : "r"(from)
                   : "memory");
      if constexpr (kWords == 4) words[3] = last;
    }
  }
};

// Behind the bits of a tile of kGroups warp-groups.
template <int kGroups>
struct GroupWords {
  static constexpr int kBytes = 16;  // what the copy engine moves is a multiple of it
  static_assert(4 * kGroups <= kBytes, "a word each");
};

// What a consumer knows of a tile before its scores are there.
struct TileWithBits {
  bool whole;
  bool held;    // its bits are in shared memory
  bool hidden;  // and say that this warp-group has nothing to do

  NVRTC_ATTN_DEVICE TileWithBits(bool whole_ = false) : whole(whole_), held(false), hidden(false) {}
  NVRTC_ATTN_DEVICE operator bool() const { return whole; }
};
// And where this thread's are.
struct TileAndBits : TileWithBits {
  unsigned bits;
};

template <class Traits>
struct TileBits {
  unsigned char* buffer;
  typename Traits::TileBitsParams const& params;

  template <class Params>
  NVRTC_ATTN_DEVICE explicit TileBits(Params const& params_)
      : buffer(reinterpret_cast<unsigned char*>(tile_word_buffer(params_))),
        params(static_cast<typename Traits::TileBitsParams const&>(params_)) {}

  NVRTC_ATTN_DEVICE int* counter() const { return reinterpret_cast<int*>(buffer) + 1; }
  // Beside the word `at`.
  NVRTC_ATTN_DEVICE int& first(TileWord const* at) const {
    index_t const place = at - (tile_word_buffer(params) + params.tile_words_offset);
    return reinterpret_cast<int*>(buffer + params.tile_bits_first)[place];
  }
  NVRTC_ATTN_DEVICE TileSlot& slot(int i) const {
    return reinterpret_cast<TileSlot*>(buffer + params.tile_bits_slots)[i];
  }
  // `nbytes`: of a tile.
  NVRTC_ATTN_DEVICE unsigned char* bits(int i, int nbytes) const {
    return buffer + params.tile_bits_at + index_t(i) * nbytes;
  }

  // The slot of a tile of a line, negative where it has none.
  NVRTC_ATTN_DEVICE int slot_of(TileLine const& line, int tile) const {
    TileWord const* const at = line.words + (tile >> 5);
    unsigned const open = at->some & ~at->all;
    if ((open >> (tile & 31) & 1) == 0) return -1;
    int const i = first(at) + __popc(open & ((1u << (tile & 31)) - 1));
    return i < params.tile_bits_room ? i : -1;
  }
};

// By a warp, of the tiles of a word, one a lane: slots for those that are undecided.
template <class Traits, class Params>
NVRTC_ATTN_DEVICE void take_slots(Params const& params, TileWord const* at, unsigned open, TileSlot const& name,
                                  int lane) {
  TileBits<Traits> const to(params);
  int first = 0;
  if (lane == 0) {
    if (open != 0) first = atomicAdd(to.counter(), __popc(open));
    to.first(at) = first;
  }
  first = __shfl_sync(0xffffffffu, first, 0);
  int const i = first + __popc(open & ((1u << lane) - 1));
  if ((open >> lane & 1) != 0 && i < to.params.tile_bits_room) to.slot(i) = name;
}

}  // namespace nvrtc_attn
