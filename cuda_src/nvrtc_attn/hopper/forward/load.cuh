// The loading warp of the Hopper forward kernel, and the warp beside it that zeroes hidden values; what is loaded, and
// when, is at the head of kernel/forward_hopper.cuh.
#pragma once
#include "../../collective/hidden_keys.cuh"
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
    Tile tile;
    while (scheduler.next(tile)) {
      bool loads = !(Traits::kVarlen && tile.b == params.batch);
      auto const seqlen = seqlen_of<Traits>(params, tile);
      int const queries = QueryRows<Traits::kPackedHeads, Shape::kBlockM>::per_tile(params);
      int const m0 = tile.m_block * queries;
      PositionMask<Traits::kBand> const mask(params, seqlen.len_q, seqlen.len_k);
      int first, last;
      mask.template key_tiles<Shape::kBlockN>(m0, queries, first, last);
      loads = loads && m0 < seqlen.len_q && first < last;
      if constexpr (Traits::kTileWords) {
        last = uniform(tile_line(params, tile.b, tile.h, tile.m_block).last_before(last)) + 1;
        loads = loads && first < last;
      }
      if (!loads) {
        if constexpr (Traits::kVarlen || Traits::kTickets) scheduler.look_ahead(issuer);
        announce(tile);
        if (issuer) barriers.full_q(q_slot.stage).arrive();
        q_slot.advance();
        continue;
      }
      Source const from(params, tile, seqlen.batch_index, seqlen.q_row0 + m0, seqlen.k_row0, m0);
      if constexpr (Traits::kTileWords) {
        if constexpr (Traits::kTickets) scheduler.look_ahead(issuer);
        load_kept(from, tile, first, last - 1);
        continue;
      }
      // In the order of use: a consumer asks for the K of the next tile before the V of this one.
      load_k(from, last - 1);
      announce(tile);
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
    tile = {};
    tile.m_block = -1;
    announce(tile);
    if (issuer) barriers.full_q(q_slot.stage).arrive();
  }

 private:
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

  // The same, of the key tiles that the words keep, n the last of them.
  NVRTC_ATTN_DEVICE void load_kept(Source const& from, Tile const& tile, int first, int n) {
    TileLine const line = tile_line(params, tile.b, tile.h, tile.m_block);
    auto name_k = [&](int next) {  // beside the slot that load_k() has yet to fill
      SlotTile name{n | (next < first ? SlotTile::kLast : 0) | (line.all(n) ? SlotTile::kWhole : 0)};
      if constexpr (Traits::kTileBits) name.word |= note_bits(line, n);
      barriers.empty_k(k_slot.stage).wait(k_slot.parity ^ 1);
      if (issuer) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + Shape::kOffsetKeyTiles + 4 * k_slot.stage), "r"(name.word)
                     : "memory");
      }
      return name.is_whole();
    };
    int next = uniform(line.last_before(n));
    bool whole = name_k(next);
    load_k(from, n);
    announce(tile, 1);
    load_q(from);
    load_scores(from, n, whole);
#pragma unroll 1
    while (next >= first) {
      int const before = n;
      n = next;
      next = uniform(line.last_before(n));
      whole = name_k(next);
      load_k(from, n);
      load_scores(from, n, whole);
      load_v(from, before);
    }
    load_v(from, n);
  }

  // kTileBits: where what the mask keeps of a key tile is, for load_k(), and what is said of it beside the slot.
  NVRTC_ATTN_DEVICE int note_bits(TileLine const& line, int n) {
    if constexpr (Traits::kTileBits) {
      bits.slot = uniform(TileBits<Traits>(params).slot_of(line, n));
      return bits.slot >= 0 ? SlotTile::kHeld : 0;
    }
    return 0;
  }

  // Which tile it is travels in front of the barrier that its queries complete. kTileWords: and whether it has any keys. Packed:
  // and the lengths of its sequence.
  NVRTC_ATTN_DEVICE void announce(Tile const& tile, int has_keys = 0) {
    unsigned const to = smem + Shape::kOffsetTiles + Shape::kBytesTile * q_slot.stage;
    barriers.empty_q(q_slot.stage).wait(q_slot.parity ^ 1);
    if (issuer) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(tile.m_block), "r"(tile.h), "r"(tile.b),
                   "r"(has_keys)
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
    PositionMask<Traits::kBand> const mask(params, seqlen.len_q, seqlen.len_k);
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
