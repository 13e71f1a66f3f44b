// Where the launch that makes dropout's decisions (kernel/dropout_words.cuh) leaves them, and the forward kernel finds
// them: for every query tile, every key tile of it, and every thread of the consumers, the words of its rows i and i + 8.
//
// The decisions are integer products, which get little done beside those of matrices: a launch of its own makes 2^28 of them in
// 0.2 ms, in the consumers they took 0.27 ms (head dim 64; docs/experiments.md, "Dropout: decisions made elsewhere"). The words
// are a bit for each score of tiles of 64 or 128 keys, and up to two of others.
#pragma once
#include "../common/keep_words.cuh"

namespace nvrtc_attn {

// Of one thread and key tile.
template <bool kOneWord>
struct WordsOfThread {
  using Type = uint2;
};
template <>
struct WordsOfThread<true> {
  using Type = unsigned;
};

template <class Traits>
struct KeptWords {
  static constexpr int kThreads = 2 * Traits::kBlockM;  // of the consumers: four for two rows
  static constexpr int kGroups = Traits::kBlockN / 16;
  // Up to four groups leave the lower half of each byte free: the second row's flags lie there.
  static constexpr bool kOneWord = kGroups <= 4;
  using Words = typename WordsOfThread<kOneWord>::Type;

  Words* buffer;
  unsigned first;  // in the buffer, of the query tile: fewer than 2^32 threads' words, so that it takes one register

  // The buffer begins with the counter of tickets, where the forward kernel has that.
  NVRTC_ATTN_DEVICE KeptWords(HopperForwardParams const& params, int b, int h, int m_block)
      : buffer(reinterpret_cast<Words*>(params.softmax_partial + (Traits::kTickets ? 2 : 0))) {
    unsigned const key_tiles = unsigned(params.seqlen_k + Traits::kBlockN - 1) / Traits::kBlockN;
    unsigned const tile = unsigned((b * params.num_heads + h) * params.num_m_blocks + m_block);
    first = tile * key_tiles * kThreads;
  }

  NVRTC_ATTN_DEVICE void load(KeepWords<kGroups>& keep, int n, int thread) const {
    Words const both = __ldg(buffer + (first + unsigned(n * kThreads + thread)));
    if constexpr (kOneWord) {
      keep.word[0] = both;
      keep.word[1] = both << 4;
    } else {
      keep.word[0] = both.x;
      keep.word[1] = both.y;
    }
  }
  NVRTC_ATTN_DEVICE void store(KeepWords<kGroups> const& keep, int n, int thread) const {
    Words& to = buffer[first + unsigned(n * kThreads + thread)];
    if constexpr (kOneWord) {
      to = keep.word[0] | keep.word[1] >> 4;
    } else {
      to = make_uint2(keep.word[0], keep.word[1]);
    }
  }
};

// Of kernels that make their words themselves, or have none.
struct NoKeptWords {
  NVRTC_ATTN_DEVICE NoKeptWords(HopperForwardParams const&, int, int, int) {}
};

}  // namespace nvrtc_attn
