// Dropout's decisions of a forward pass, made before the Hopper kernel with kKeepWords runs, which reads them
// (hopper/forward/kept_words.cuh). No kernel of the backward pass reads them: there, warps beside the consumers keep up.
//
// A thread block has 64 query rows, a warp 16 of them, and chunk_rows key tiles, the rows that see the most keys first. Of the
// key tiles that the forward kernel visits for a query tile, those of which no row of a warp sees anything are zeros: the
// probabilities there are.
//
// 2^28 decisions take 195 us on an H200, at 1.98 GHz. The pipe that multiplies is busy for 0.87 of that.
#pragma once
#include "../collective/mask.cuh"
#include "../collective/seqlen.cuh"
#include "../hopper/forward/kept_words.cuh"

namespace nvrtc_attn {

// All groups of a tile, as KeepMaker::add() adds them, with two instructions a flag instead of nearly three: bits are
// shifted in from the right, the last group's first.
template <int kGroups>
NVRTC_ATTN_DEVICE void add_all_groups(KeepMaker<kGroups>& maker, unsigned long long seed, unsigned threshold) {
  constexpr unsigned long long kStep = 4 * (unsigned long long)kPhiloxMultiplier0;
  unsigned word[2][4] = {};
  unsigned long long product[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) product[r] = maker.product[r] + (kGroups - 1) * kStep;
#pragma unroll 2
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint4 const n = maker.stream.numbers(seed, product[r]);
      product[r] -= kStep;
      shift_flag_in(word[r][0], n.x, threshold);
      shift_flag_in(word[r][1], n.y, threshold);
      shift_flag_in(word[r][2], n.z, threshold);
      shift_flag_in(word[r][3], n.w, threshold);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    maker.product[r] += kGroups * kStep;
    maker.word[r] =
        __byte_perm(__byte_perm(word[r][0], word[r][1], 0x0040), __byte_perm(word[r][2], word[r][3], 0x0040), 0x5410)
        << (8 - kGroups);
  }
}

template <class Traits>
NVRTC_ATTN_DEVICE void dropout_words(HopperForwardParams const& params) {
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr int kGroups = kBlockN / 16;
  static_assert(Traits::kDropout && !Traits::kVarlen && Traits::kNumThreads == 128, "64 rows of a whole sequence");
  int const blocks_of_rows = params.batch * params.num_heads * params.num_chunks;
  int const rank = uniform_quotient(int(blockIdx.x), blocks_of_rows);
  int const unit = int(blockIdx.x) - rank * blocks_of_rows;
  int const head = uniform_quotient(unit, params.num_chunks);
  int const chunk = unit - head * params.num_chunks;
  int const b = uniform_quotient(head, params.num_heads);
  int const h = head - b * params.num_heads;
  bool const last_first = PositionMask<Traits::kBand>::last_rows_see_most(params);
  int const rows = last_first ? params.num_m_blocks * (kBlockM / 64) - 1 - rank : rank;
  int const m_block = rows / (kBlockM / 64);
  SeqlenInfo<false, Traits::kSequsedK> const seqlen(params, b);
  PositionMask<Traits::kBand> const mask(mask_params<Traits>(params), seqlen.len_q, seqlen.len_k);
  int first, last;
  mask.template key_tiles<kBlockN>(m_block * kBlockM, kBlockM, first, last);
  first = max(first, chunk * params.chunk_rows);
  last = min(last, (chunk + 1) * params.chunk_rows);
  if (first >= last) return;

  int const lane = int(threadIdx.x) & 31;
  int const row0 = rows * 64 + 16 * uniform(int(threadIdx.x) >> 5);
  int seen_first, seen_last;
  mask.template key_tiles<kBlockN>(row0, 16, seen_first, seen_last);
  if (row0 >= seqlen.len_q) seen_last = 0;

  Dropout const dropout(dropout_params<Traits>(params), b, h);
  KeptWords<Traits> const kept(params, b, h, m_block);
  int const thread = (rows - m_block * (kBlockM / 64)) * 128 + int(threadIdx.x);
  for (int n = first; n < last; ++n) {
    if (n < seen_first || n >= seen_last) kept.store(KeepWords<kGroups>{}, n, thread);
  }
  int n = max(first, seen_first);
  last = min(last, seen_last);
  if (n >= last) return;
  // What a tile leaves in the maker is where the next one begins.
  int const i = row0 + (lane >> 2);
  KeepMaker<kGroups> maker(dropout, i, n * kBlockN, lane);
  unsigned long long const end = maker.counter(1) + 4 * (kGroups * params.chunk_rows + 1);
  bool const one_upper_half = __all_sync(0xffffffffu, (maker.counter(0) ^ end) >> 32 == 0);
#pragma unroll 1
  for (; n < last; ++n) {
    KeepWords<kGroups> keep;
    if (one_upper_half) {
      add_all_groups(maker, dropout.seed, dropout.threshold);
      keep = maker.template finish<false>();
      if constexpr (KeptWords<Traits>::kOneWord) {
        // Of rows that begin amid a block finish() leaves something where the other row's flags go.
#pragma unroll
        for (int r = 0; r < 2; ++r) keep.word[r] &= 0x01010101u * (0xffu << (8 - kGroups) & 0xffu);
      }
    } else {
      keep = KeepMaker<kGroups>(dropout, i, n * kBlockN, lane).words_of_any();
    }
    kept.store(keep, n, thread);
  }
}

}  // namespace nvrtc_attn
