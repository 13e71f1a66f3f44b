// Which tiles of scores have anything to compute, one bit a tile, and which need no element mask: what kernels with
// kTileWords walk, for both families, forward and backward.
//
// A line of words belongs to a (batch entry, head, query tile), its bits are key tiles; in the backward pass to a (batch
// entry, head, key tile), its bits are query tiles. Tile t is bit t % 32 of word t / 32. A stride of 0 shares words. Bits
// beyond the tiles may be anything. Whoever writes the words (kernel/tile_plan.cuh does, from a byte mask) must set
// `some` where any score of the tile may be kept; `all` promises that the byte mask hides none of the scores that there are.
// The position mask stays the kernel's own: it asks for tiles in a range and tests edges as without words.
#pragma once
#include "../params.cuh"

namespace nvrtc_attn {

struct alignas(8) TileWord {
  unsigned some;
  unsigned all;
};

struct TileLine {
  TileWord const* words;

  NVRTC_ATTN_DEVICE bool some(int tile) const { return words[tile >> 5].some >> (tile & 31) & 1; }
  NVRTC_ATTN_DEVICE bool all(int tile) const { return words[tile >> 5].all >> (tile & 31) & 1; }

  // The last tile before `end` that has something, -1 where there is none.
  NVRTC_ATTN_DEVICE int last_before(int end) const {
    if (end <= 0) return -1;
    int w = (end - 1) >> 5;
    unsigned bits = words[w].some & (0xffffffffu >> (31 - ((end - 1) & 31)));
#pragma unroll 1
    while (bits == 0 && w > 0) bits = words[--w].some;
    return 32 * w + 31 - __clz(int(bits));  // of no bits, in word 0: -1
  }

  // The first one in [begin, end), `end` where there is none.
  NVRTC_ATTN_DEVICE int first_from(int begin, int end) const {
    if (begin >= end) return end;
    int w = begin >> 5;
    unsigned bits = words[w].some & (0xffffffffu << (begin & 31));
#pragma unroll 1
    while (bits == 0 && 32 * (w + 1) < end) bits = words[++w].some;
    int const tile = 32 * w + __ffs(int(bits)) - 1;
    return bits == 0 || tile > end ? end : tile;
  }

  // How many there are in [begin, end).
  NVRTC_ATTN_DEVICE int count(int begin, int end) const {
    if (begin >= end) return 0;
    int const last = (end - 1) >> 5;
    int sum = 0;
#pragma unroll 1
    for (int w = begin >> 5; w <= last; ++w) {
      unsigned bits = words[w].some;
      if (w == begin >> 5) bits &= 0xffffffffu << (begin & 31);
      if (w == last) bits &= 0xffffffffu >> (31 - ((end - 1) & 31));
      sum += __popc(bits);
    }
    return sum;
  }
};

NVRTC_ATTN_DEVICE TileWord* tile_word_buffer(ForwardParams const& params) {
  return reinterpret_cast<TileWord*>(params.softmax_partial);
}
NVRTC_ATTN_DEVICE TileWord* tile_word_buffer(BackwardParams const& params) {
  return reinterpret_cast<TileWord*>(params.counters);
}

// The params of a kernel with kTileWords, which it was handed as those of its family.
template <class Params>
NVRTC_ATTN_DEVICE WithTileWords<Params> const& tiled(Params const& params) {
  return static_cast<WithTileWords<Params> const&>(params);
}

template <class Params>
NVRTC_ATTN_DEVICE TileLine tile_line(Params const& params, int b, int h, int line) {
  auto const& p = tiled(params);
  return {tile_word_buffer(params) + p.tile_words_offset + index_t(b) * p.tile_words_stride_b +
          index_t(h) * p.tile_words_stride_h + index_t(line) * p.tile_words_stride_line};
}

// By query tile, in a backward kernel.
template <class Params>
NVRTC_ATTN_DEVICE TileLine tile_order_line(Params const& params, int b, int h, int query_tile) {
  auto const& p = tiled(params);
  return {tile_word_buffer(params) + p.tile_order_offset + index_t(b) * p.tile_order_stride_b +
          index_t(h) * p.tile_order_stride_h + index_t(query_tile) * p.tile_order_stride_line};
}

// What a tile of a byte mask holds: kSomeKept, kSomeDropped, both or, of no scores, neither.
constexpr unsigned kSomeKept = 1;
constexpr unsigned kSomeDropped = 2;

// Of four bytes. Non-zero is kept.
NVRTC_ATTN_DEVICE unsigned contents_of(unsigned bytes) {
  bool const has_zero = ((bytes - 0x01010101u) & ~bytes & 0x80808080u) != 0;
  return (bytes != 0 ? kSomeKept : 0) | (has_zero ? kSomeDropped : 0);
}

struct alignas(16) SixteenBytes {
  unsigned x, y, z, w;
};

// Contents of rows x cols bytes from `base` on, read by `lanes` threads, 16 bytes at a time where they are aligned, until both
// kinds have been seen. vote(found) is the union over the threads.
template <class Vote>
NVRTC_ATTN_DEVICE unsigned tile_contents(unsigned char const* base, index_t stride_m, index_t stride_n, int rows,
                                         int cols, int lane, int lanes, Vote&& vote) {
  constexpr int kAtOnce = 4;  // loads under way: 2 KB a warp
  if (stride_m == 0) rows = rows < 1 ? rows : 1;
  if (stride_n == 0) cols = cols < 1 ? cols : 1;
  if (rows <= 0 || cols <= 0) return 0;
  bool const vectors =
      stride_n == 1 && stride_m % 16 == 0 && reinterpret_cast<unsigned long long>(base) % 16 == 0 && cols % 16 == 0;
  int const width = vectors ? 16 : 1;
  int const chunks = cols / width;  // of a row
  int const total = rows * chunks;
  unsigned found = 0;
#pragma unroll 1
  for (int c0 = lane; c0 - lane < total; c0 += lanes * kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const c = c0 + i * lanes;
      if (c < total) {
        int const row = c / chunks;
        unsigned char const* const at = base + index_t(row) * stride_m + index_t((c - row * chunks) * width) * stride_n;
        if (vectors) {
          SixteenBytes const bytes = *reinterpret_cast<SixteenBytes const*>(at);
          found |= contents_of(bytes.x) | contents_of(bytes.y) | contents_of(bytes.z) | contents_of(bytes.w);
        } else {
          found |= *at != 0 ? kSomeKept : kSomeDropped;
        }
      }
    }
    found = vote(found);
    if (found == (kSomeKept | kSomeDropped)) break;
  }
  return found;
}

}  // namespace nvrtc_attn
