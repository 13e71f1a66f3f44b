// The loading warp of the Hopper forward kernel, and the warp beside it that zeroes hidden values; what is loaded, and when, is at the
// head of kernel/forward_hopper.cuh.
#pragma once
#include "../../collective/hidden_keys.cuh"
#include "../../collective/key_share.cuh"
#include "../../collective/mask.cuh"
#include "../../collective/seqlen.cuh"
#include "../../collective/tile_bits.cuh"
#include "../../collective/tile_words.cuh"
#include "../common/bulk.cuh"
#include "../common/tma.cuh"
#include "../common/uniform.cuh"
#include "query_rows.cuh"
#include "scheduler.cuh"
#include "shape.cuh"

namespace nvrtc_attn {

// What the loading warp announced, in uniform registers.
template <class Traits>
NVRTC_ATTN_DEVICE void read_tile(unsigned address, WorkTile& tile) {
  int m_block, h, b;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(m_block), "=r"(h) : "r"(address) : "memory");
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(b) : "r"(address + 8) : "memory");
  tile = {uniform(m_block), uniform(h), uniform(b)};
}
// Packed: with the lengths of its sequence, which the consumers need not read then. Where dropout's keys fill the uniform
// registers they are not uniform: they would spill 76 bytes at head dim 192.
template <class Traits>
NVRTC_ATTN_DEVICE void read_tile(unsigned address, PackedTile& tile) {
  auto kept = [](int x) { return Traits::kDropout ? x : uniform(x); };
  WorkTile name;
  read_tile<Traits>(address, name);
  int q_row0, len_q, len_k;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(q_row0), "=r"(len_q) : "r"(address + 16) : "memory");
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(len_k) : "r"(address + 24) : "memory");
  tile = {name.b, name.m_block, kept(q_row0), kept(len_q), 0, kept(len_k), name.h};
}
// The query tile whose Q is in a slot, once it is there; a negative m_block says that there are no more.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE auto announced_tile(ForwardBarriers<Shape> const& barriers, unsigned smem,
                                      RingPosition<Shape::kStagesQ> const& slot) {
  barriers.full_q(slot.stage).wait(slot.parity);
  typename TileScheduler<Traits::kBand, Traits::kVarlen>::Tile tile;
  read_tile<Traits>(smem + Shape::kOffsetTiles + Shape::kBytesTile * slot.stage, tile);
  return tile;
}

// The lengths of the sequence of a tile.
template <class Traits>
NVRTC_ATTN_DEVICE SeqlenInfo<false, Traits::kSequsedK> seqlen_of(HopperForwardParams const& params,
                                                                 WorkTile const& tile) {
  return SeqlenInfo<false, Traits::kSequsedK>(params, tile.b);
}
template <class Traits>
NVRTC_ATTN_DEVICE SeqlenInfo<true, Traits::kSequsedK> seqlen_of(HopperForwardParams const&, PackedTile const& tile) {
  return SeqlenInfo<true, Traits::kSequsedK>(tile.q_row0, tile.len_q, tile.k_row0, tile.len_k);
}

// kTileWords: the key tile that a slot of K holds, as the loading warp writes it beside the slot.
struct SlotTile {
  static constexpr int kLast = 1 << 30;  // no key tile comes after it
  static constexpr int kWhole = 1 << 29;
  static constexpr int kHeld = int(0x80000000u);  // kTileBits: what a mask keeps of it lies beside the slot
  int word;

  NVRTC_ATTN_DEVICE int n() const { return word & (kWhole - 1); }
  NVRTC_ATTN_DEVICE bool is_last() const { return (word & kLast) != 0; }
  NVRTC_ATTN_DEVICE bool is_whole() const { return (word & kWhole) != 0; }  // the byte mask hides nothing of it
  NVRTC_ATTN_DEVICE bool is_held() const { return (word & kHeld) != 0; }
};
NVRTC_ATTN_DEVICE SlotTile read_slot_tile(unsigned address) { return {load_shared_uniform(address)}; }
// Of what the loading warp announced: whether the query tile has a key tile.
NVRTC_ATTN_DEVICE bool read_has_keys(unsigned address) { return load_shared_uniform(address + 12) != 0; }
// kSplit: which share of the key tiles it is.
NVRTC_ATTN_DEVICE int read_split(unsigned address) { return load_shared_uniform(address + 12); }

// The words of a line, read by a warp: 32 of them, each lane another one, from the last downwards, so that a search is a ballot.
template <class Traits>
struct KeptTiles {
  struct NoSlots {};
  struct FirstSlot {
    int i;
  };
  int top;  // the word of lane 0
  unsigned some, all;
  cute::conditional_t<Traits::kTileBits, FirstSlot, NoSlots> first;  // of the word's undecided tiles

  NVRTC_ATTN_DEVICE void load(HopperForwardParams const& params, TileLine const& line, int end) {
    top = (end - 1) >> 5;
    int const word = top - (int(threadIdx.x) & 31);
    some = all = 0;
    if (word >= 0) {
      TileWord const x = line.words[word];
      some = x.some;
      all = x.all;
      if constexpr (Traits::kTileBits) first.i = TileBits<Traits>(params).first(line.words + word);
    }
  }

  // The last tile before `end` that has something, negative where there is none. `end` is never more than it was before.
  NVRTC_ATTN_DEVICE int last_before(HopperForwardParams const& params, TileLine const& line, int end) {
    int const lane = int(threadIdx.x) & 31;
#pragma unroll 1
    while (true) {
      int const lane_of_end = top - ((end - 1) >> 5);
      unsigned bits = lane < lane_of_end ? 0u : some;
      if (lane == lane_of_end) bits &= 0xffffffffu >> (31 - ((end - 1) & 31));
      if (unsigned const lanes = __ballot_sync(0xffffffffu, bits != 0)) {
        int const found = __ffs(int(lanes)) - 1;
        return uniform(32 * (top - found) + 31 - __clz(int(__shfl_sync(0xffffffffu, bits, found))));
      }
      if (top < 32) return -1;
      end = 32 * (top - 31);
      load(params, line, end);
    }
  }

  NVRTC_ATTN_DEVICE bool all_of(int tile) const {
    return uniform(int(__shfl_sync(0xffffffffu, all, top - (tile >> 5)) >> (tile & 31) & 1u)) != 0;
  }

  // The slot of a tile's bits, negative where it has none.
  NVRTC_ATTN_DEVICE int slot_of(HopperForwardParams const& params, int tile) const {
    int const lane = top - (tile >> 5);
    unsigned const open = __shfl_sync(0xffffffffu, some & ~all, lane);
    int const i = __shfl_sync(0xffffffffu, first.i, lane) + __popc(open & ((1u << (tile & 31)) - 1));
    bool const has = (open >> (tile & 31) & 1) != 0 && i < TileBits<Traits>(params).params.tile_bits_room;
    return uniform(has ? i : -1);
  }
};

// The loading warp. All lanes follow the schedule, one issues.
template <class Traits>
struct ForwardLoader {
  using Shape = HopperShape<Traits>;
  using Scores = typename Shape::Scores;
  using Scheduler = TileScheduler<Traits::kBand, Traits::kVarlen, Traits::kTickets>;
  using Tile = typename Scheduler::Tile;

  HopperForwardParams const& params;
  ForwardBarriers<Shape> const& barriers;
  unsigned const smem;
  unsigned const sK = smem + Shape::kOffsetK;
  unsigned const sV = smem + Shape::kOffsetV;
  bool const issuer = threadIdx.x == 0;
  RingPosition<Shape::kStages> k_slot, v_slot;
  RingPosition<Shape::kStagesQ> q_slot;
  RingPosition<Shape::kStagesScores> score_slot;
  struct NoBits {};
  struct SlotOfBits {
    int slot;
  };
  cute::conditional_t<Traits::kTileBits, SlotOfBits, NoBits> bits;  // of the key tile that is loaded next

  NVRTC_ATTN_DEVICE ForwardLoader(HopperForwardParams const& params_, ForwardBarriers<Shape> const& barriers_,
                                  unsigned smem_)
      : params(params_), barriers(barriers_), smem(smem_) {}

  NVRTC_ATTN_DEVICE void run() {
    if (issuer) {
      prefetch_tensor_map(params.tensor_map_q);
      prefetch_tensor_map(params.tensor_map_k);
      prefetch_tensor_map(params.tensor_map_v);
      if constexpr (Scores::kSlabsBias > 0) prefetch_tensor_map(params.tensor_map_bias);
      if constexpr (Scores::kSlabsMask > 0) prefetch_tensor_map(params.tensor_map_mask);
    }
    Scheduler scheduler(params);
    if constexpr (Traits::kVarlen || Traits::kTickets) scheduler.begin(issuer);
    if constexpr (Traits::kTileWords) {
      load_all_kept(scheduler);
    } else {
      Tile tile;
      while (scheduler.next(tile)) {
        int split = 0;
        if constexpr (Traits::kSplit) {  // the schedule counts every query tile once for each split
          int const unit = tile.m_block;
          tile.m_block = uniform_quotient(unit, params.num_splits);
          split = unit - tile.m_block * params.num_splits;
        }
        bool loads = !(Traits::kVarlen && tile.b == params.batch);
        auto const seqlen = seqlen_of<Traits>(params, tile);
        int const queries = QueryRows<Traits::kPackedHeads, Shape::kBlockM>::per_tile(params);
        int const m0 = tile.m_block * queries;
        PositionMask<Traits::kBand> const mask(mask_params<Traits>(params), seqlen.len_q, seqlen.len_k);
        int first, last;
        mask.template key_tiles<Shape::kBlockN>(m0, queries, first, last);
        if constexpr (Traits::kSplit) take_share(first, last, split, params.num_splits);
        loads = loads && m0 < seqlen.len_q && first < last;
        if (!loads) {
          if constexpr (Traits::kVarlen || Traits::kTickets) scheduler.look_ahead(issuer);
          announce(tile, split);
          if (issuer) barriers.full_q(q_slot.stage).arrive();
          q_slot.advance();
          continue;
        }
        Source const from(params, tile, seqlen.batch_index, seqlen.q_row0 + m0, seqlen.k_row0, m0);
        // In the order of use: a consumer asks for the K of the next tile before the V of this one.
        load_k(from, last - 1);
        announce(tile, split);
        load_q(from);
        load_scores(from, last - 1);
        if constexpr (Traits::kVarlen || Traits::kTickets) scheduler.look_ahead(issuer);
#pragma unroll 1
        for (int n = last - 2; n >= first; --n) {
          load_k(from, n);
          load_scores(from, n);
          load_v(from, n + 1);
        }
        load_v(from, first);
      }
      announce_end(tile);
    }
  }

 private:
  NVRTC_ATTN_DEVICE void announce_end(Tile& tile) {
    tile = {};
    tile.m_block = -1;
    announce(tile);
    if (issuer) barriers.full_q(q_slot.stage).arrive();
  }

  // Where the operands of a query tile lie. Expanded (stride 0) dims have size 1 in the tensor maps.
  struct Source {
    int h, b;  // of the scores
    int q_h, q_b, k_h, k_b, v_h, v_b;
    int q_row, k_row0, m0;

    NVRTC_ATTN_DEVICE Source(HopperForwardParams const& params, Tile const& tile, int batch_index, int q_row_,
                             int k_row0_, int m0_)
        : h(tile.h), b(tile.b), q_row(q_row_), k_row0(k_row0_), m0(m0_) {
      int const h_kv = Traits::kPackedHeads ? tile.h : uniform_quotient(tile.h, params.heads_per_group);
      q_h = params.q_stride_h == 0 ? 0 : Traits::kPackedHeads ? tile.h * params.heads_per_group : tile.h;
      q_b = params.q_stride_b == 0 ? 0 : batch_index;
      k_h = params.k_stride_h == 0 ? 0 : h_kv;
      k_b = params.k_stride_b == 0 ? 0 : batch_index;
      v_h = params.v_stride_h == 0 ? 0 : h_kv;
      v_b = params.v_stride_b == 0 ? 0 : batch_index;
    }
  };

  // kTileWords: a query tile, the key tiles that the position mask leaves it, and their words.
  struct KeptWork {
    Tile tile;
    int first, last;
    KeptTiles<Traits> kept;

    // False when there is none. The words are on their way.
    NVRTC_ATTN_DEVICE bool next(HopperForwardParams const& params, Scheduler& scheduler) {
      if (!scheduler.next(tile)) return false;
      auto const seqlen = seqlen_of<Traits>(params, tile);
      int const queries = QueryRows<Traits::kPackedHeads, Shape::kBlockM>::per_tile(params);
      PositionMask<Traits::kBand> const mask(mask_params<Traits>(params), seqlen.len_q, seqlen.len_k);
      mask.template key_tiles<Shape::kBlockN>(tile.m_block * queries, queries, first, last);
      kept.load(params, line(params), last);
      return true;
    }
    NVRTC_ATTN_DEVICE TileLine line(HopperForwardParams const& params) const {
      return tile_line(params, tile.b, tile.h, tile.m_block);
    }
    NVRTC_ATTN_DEVICE int last_before(HopperForwardParams const& params, int end) {
      return kept.last_before(params, line(params), end);
    }
  };

  // The same, of the key tiles that the words keep. What the next query tile is, and its words, are asked for while there is
  // time: one after the other before its first copy they were 2 us in which the consumers had nothing to do.
  NVRTC_ATTN_DEVICE void load_all_kept(Scheduler& scheduler) {
    KeptWork work, next_work;
    bool more = work.next(params, scheduler);
    while (more) {
      if constexpr (Traits::kTickets) scheduler.look_ahead(issuer);
      int const queries = QueryRows<Traits::kPackedHeads, Shape::kBlockM>::per_tile(params);
      auto const seqlen = seqlen_of<Traits>(params, work.tile);
      int const m0 = work.tile.m_block * queries;
      Source const from(params, work.tile, seqlen.batch_index, seqlen.q_row0 + m0, seqlen.k_row0, m0);
      int n = work.last_before(params, work.last);
      bool const any = n >= work.first;
      int next = -1;
      if (any) {
        next = work.last_before(params, n);
        bool const whole = name_k(work, n, next);
        load_k(from, n);
        announce(work.tile, 1);
        load_q(from);
        load_scores(from, n, whole);
      } else {
        announce(work.tile);
        if (issuer) barriers.full_q(q_slot.stage).arrive();
        q_slot.advance();
      }
      bool asked = false;
#pragma unroll 1
      while (true) {
        bool const goes_on = next >= work.first;
        if (goes_on) {
          int const before = n;
          n = next;
          next = work.last_before(params, n);
          bool const whole = name_k(work, n, next);
          load_k(from, n);
          load_scores(from, n, whole);
          load_v(from, before);
        }
        if (!asked) more = next_work.next(params, scheduler);
        asked = true;
        if (!goes_on) break;
      }
      if (any) load_v(from, n);
      work = next_work;
    }
    announce_end(work.tile);
  }

  // Says which key tile is in the slot that load_k() has yet to fill; `next` comes after it. Whether it is whole.
  NVRTC_ATTN_DEVICE bool name_k(KeptWork const& work, int n, int next) {
    SlotTile name{n | (next < work.first ? SlotTile::kLast : 0) | (work.kept.all_of(n) ? SlotTile::kWhole : 0)};
    if constexpr (Traits::kTileBits) {
      bits.slot = work.kept.slot_of(params, n);
      if (bits.slot >= 0) name.word |= SlotTile::kHeld;
    }
    barriers.empty_k(k_slot.stage).wait(k_slot.parity ^ 1);
    if (issuer) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + Shape::kOffsetKeyTiles + 4 * k_slot.stage), "r"(name.word)
                   : "memory");
    }
    return name.is_whole();
  }

  // Which tile it is travels in front of the barrier that its queries complete. `more`: with kTileWords whether it has any keys,
  // with kSplit which share of them. Packed: and the lengths of its sequence.
  NVRTC_ATTN_DEVICE void announce(Tile const& tile, int more = 0) {
    unsigned const to = smem + Shape::kOffsetTiles + Shape::kBytesTile * q_slot.stage;
    barriers.empty_q(q_slot.stage).wait(q_slot.parity ^ 1);
    if (issuer) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(tile.m_block), "r"(tile.h), "r"(tile.b),
                   "r"(more)
                   : "memory");
      if constexpr (Traits::kVarlen) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %3};" ::"r"(to + 16), "r"(tile.q_row0), "r"(tile.len_q),
                     "r"(tile.len_k)
                     : "memory");
      }
    }
  }

  // The queries, into the slot that announce() has found empty.
  NVRTC_ATTN_DEVICE void load_q(Source const& from) {
    if (issuer) {
      Mbarrier const full = barriers.full_q(q_slot.stage);
      int bytes = Shape::kBytesQ;
      if constexpr (Traits::kPackedHeads) {
        int const group = params.heads_per_group;
        bytes = Shape::kSlabsQ * kSlabRowBytes * (Shape::kBlockM / group * group);
      }
      full.arrive_and_expect(bytes);
#pragma unroll
      for (int slab = 0; slab < Shape::kSlabsQ; ++slab) {
        // kPackedHeads: the heads of a query lie next to each other in the box.
        int const inner = Traits::kPackedHeads ? from.q_h : from.q_row;
        int const outer = Traits::kPackedHeads ? from.q_row : from.q_h;
        load_box(smem + q_slot.stage * Shape::kBytesQ + slab * Shape::kSlabQ, params.tensor_map_q, full.address,
                 slab * kSlabColumns, inner, outer, from.q_b, kEvictFirst);
      }
    }
    q_slot.advance();
  }

  // kTileBits: and what the mask keeps of the tile, where that has a slot.
  NVRTC_ATTN_DEVICE void load_k(Source const& from, int n) {
    Mbarrier const full = barriers.full_k(k_slot.stage);
    barriers.empty_k(k_slot.stage).wait(k_slot.parity ^ 1);
    if (issuer) {
      if constexpr (Traits::kTileBits) {
        bool const held = bits.slot >= 0;
        full.arrive_and_expect(Shape::kBytesK + (held ? Shape::kBytesBits : 0));
        if (held) {
          bulk_load(smem + Shape::kOffsetBits + k_slot.stage * Shape::kBytesBits,
                    TileBits<Traits>(params).bits(bits.slot, Shape::kBytesBits), Shape::kBytesBits, full.address);
        }
      } else {
        full.arrive_and_expect(Shape::kBytesK);
      }
#pragma unroll
      for (int slab = 0; slab < Shape::kSlabsQ; ++slab) {
        load_box(sK + k_slot.stage * Shape::kBytesK + slab * Shape::kSlabK, params.tensor_map_k, full.address,
                 slab * kSlabColumns, from.k_row0 + n * Shape::kBlockN, from.k_h, from.k_b, kEvictLast);
      }
    }
    k_slot.advance();
  }

  NVRTC_ATTN_DEVICE void load_v(Source const& from, int n) {
    Mbarrier const full = barriers.full_v(v_slot.stage);
    barriers.empty_v(v_slot.stage).wait(v_slot.parity ^ 1);
    if (issuer) {
      full.arrive_and_expect(Shape::kBytesV);
#pragma unroll
      for (int slab = 0; slab < Shape::kSlabsV; ++slab) {
        load_box(sV + v_slot.stage * Shape::kBytesV + slab * Shape::kSlabK, params.tensor_map_v, full.address,
                 slab * kSlabColumns, from.k_row0 + n * Shape::kBlockN, from.v_h, from.v_b, kEvictLast);
      }
    }
    v_slot.advance();
  }

  // Bias and mask, the latter not of a whole tile.
  NVRTC_ATTN_DEVICE void load_scores(Source const& from, int n, bool whole = false) {
    if constexpr (Shape::kStagesScores > 0) {
      Mbarrier const full = barriers.full_scores(score_slot.stage);
      unsigned const slot = smem + Shape::kOffsetScores + score_slot.stage * Scores::kBytes;
      barriers.empty_scores(score_slot.stage).wait(score_slot.parity ^ 1);
      if (issuer) {
        int const rows_bias = params.bias_stride_m == 0 ? 1 : Shape::kBlockM;
        int rows_mask = params.mask_stride_m == 0 ? 1 : Shape::kBlockM;
        if (Traits::kTileWords && whole) rows_mask = 0;
        full.arrive_and_expect(Scores::kSlabsBias * 128 * rows_bias + Scores::kSlabsMask * 64 * rows_mask);
#pragma unroll
        for (int slab = 0; slab < Scores::kSlabsBias; ++slab) {
          bool const shared = params.bias_stride_b == 0 || params.bias_stride_h == 0 || params.bias_stride_m == 0;
          load_box(slot + slab * Scores::kSlabBias, params.tensor_map_bias, full.address,
                   n * Shape::kBlockN + slab * Scores::kColumnsBias, params.bias_stride_m == 0 ? 0 : from.m0,
                   params.bias_stride_h == 0 ? 0 : from.h, params.bias_stride_b == 0 ? 0 : from.b,
                   shared ? kEvictLast : kEvictFirst);
        }
#pragma unroll
        for (int slab = 0; slab < Scores::kSlabsMask; ++slab) {
          if (Traits::kTileWords && whole) break;
          load_box(slot + Scores::kOffsetMask + slab * Scores::kSlabMask, params.tensor_map_mask, full.address,
                   n * Shape::kBlockN + slab * Scores::kColumnsMask, params.mask_stride_m == 0 ? 0 : from.m0,
                   params.mask_stride_h == 0 ? 0 : from.h, params.mask_stride_b == 0 ? 0 : from.b, kEvictNormal);
        }
      }
      score_slot.advance();
    }
  }
};

// A warp of the loading group, where a mask is the same for all queries: zeros in the rows of V that it hides, of every
// tile before the consumers take it. Ahead of them as the copies are, so that nobody waits for it.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void zero_hidden_values(HopperForwardParams const& params, ForwardBarriers<Shape> const& barriers,
                                          unsigned smem) {
  constexpr int kWords = (Shape::kBlockN + 31) / 32;
  int const lane = int(threadIdx.x) & 31;
  RingPosition<Shape::kStages> slot;
  TileScheduler<Traits::kBand, false> scheduler(params);
  WorkTile tile;
  while (scheduler.next(tile)) {
    SeqlenInfo<false, Traits::kSequsedK> const seqlen(params, tile.b);
    PositionMask<Traits::kBand> const mask(mask_params<Traits>(params), seqlen.len_q, seqlen.len_k);
    int first, last;
    mask.template key_tiles<Shape::kBlockN>(tile.m_block * Shape::kBlockM, Shape::kBlockM, first, last);
    HiddenKeys const hidden(params, tile.b, tile.h, 1);
    auto before = [&](int n) {
      if constexpr (Traits::kTileWords) {
        return uniform(tile_line(params, tile.b, tile.h, tile.m_block).last_before(n));
      } else {
        return n - 1;
      }
    };
#pragma unroll 1
    for (int n = before(last); n >= first; n = before(n)) {
      unsigned words[kWords];
      bool reads = true;
      if constexpr (Traits::kTileWords) reads = !tile_line(params, tile.b, tile.h, tile.m_block).all(n);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        int const row = 32 * w + lane;
        int const j = n * Shape::kBlockN + row;
        words[w] = __ballot_sync(0xffffffffu, reads && row < Shape::kBlockN && j < seqlen.len_k && hidden(j));
      }
      barriers.full_v(slot.stage).wait(slot.parity);
      unsigned const tile_v = smem + Shape::kOffsetV + slot.stage * Shape::kBytesV + lane * 16;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        // Four rows of a slab at a time, a chunk of 16 bytes a lane.
#pragma unroll 1
        for (int row = 0; words[w] != 0; row += 4, words[w] >>= 4) {
          if (words[w] >> (lane >> 3) & 1) {
#pragma unroll
            for (int slab = 0; slab < Shape::kSlabsV; ++slab) {
              asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile_v + slab * Shape::kSlabK +
                                                                            (32 * w + row) * kSlabRowBytes),
                           "r"(0)
                           : "memory");
            }
          }
        }
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barriers.clean_v(slot.stage).arrive();
      slot.advance();
    }
  }
}

}  // namespace nvrtc_attn
