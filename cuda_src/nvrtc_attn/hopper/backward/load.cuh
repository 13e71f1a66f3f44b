// The loading warp of the two Hopper backward kernels; what is loaded, and when, is at the heads of
// kernel/backward_hopper.cuh and kernel/backward_hopper_wide.cuh.
#pragma once
#include "../../collective/gradient_accumulator.cuh"
#include "../../collective/tile_bits.cuh"
#include "../../common/overlapping_launch.cuh"
#include "../common/bulk.cuh"
#include "../common/cluster.cuh"
#include "../common/tma.cuh"
#include "../common/uniform.cuh"
#include "../common/wgmma.cuh"
#include "barriers.cuh"
#include "helpers.cuh"
#include "kept_queries.cuh"
#include "line_order.cuh"
#include "prepare_rows.cuh"
#include "schedule.cuh"
#include "score_tile_transposed.cuh"

namespace nvrtc_attn {

// kTileBits: with the head that is named beside a slot of Q.
constexpr int kHeldBits = int(0x80000000u);

// All lanes follow the schedule, one issues. With two blocks a key tile each brings its own half of the keys, and half
// of the rows of every query tile to both.
template <class Traits, class Shape>
struct BackwardLoader {
  static constexpr bool kPair = Shape::kBlocks == 2;
  static constexpr bool kRelays = Shape::kRelays;
  static constexpr bool kByWork = Traits::kTileWords && !Traits::kOrdered;  // key tiles in the order of their work
  // The launch overlaps that of backward_hopper_prepare (begins_early in nvrtc_attn/heuristics/hopper_backward_config.py), of whose
  // results all but row_lse, delta and the counter of key tiles are read by consumers alone, behind these.
  static constexpr bool kBeginsEarly =
      !(kPair || Traits::kFused || Traits::kVarlen || Traits::kTileWords || Traits::kOrdered);
  // An order of its own for the first turn would spill 24 to 72 bytes here; with two slots K comes first anyway.
  static constexpr bool kWaitsInTurn =
      kBeginsEarly && (kRelays || (Traits::kParts && Traits::kBand) || ModifierOf<Traits>::kAny);
  using Work = KeyTileWork<Traits>;

  HopperBackwardParams const& params;
  BackwardBarriers<Shape> const& barriers;
  unsigned const smem;
  int const rank;  // of the block among those that share a key tile
  bool const issuer = threadIdx.x == 0;
  RingPosition<Shape::kStages> q_slot;
  RingPosition<Shape::kStagesDout> dout_slot;
  unsigned parity = 0;  // of the key tile
  unsigned round = 0;   // kRelays: parity of the slot of K
  PartTurns turns;      // kParts: of the key tile

  NVRTC_ATTN_DEVICE BackwardLoader(HopperBackwardParams const& params_, BackwardBarriers<Shape> const& barriers_,
                                   unsigned smem_, int rank_)
      : params(params_), barriers(barriers_), smem(smem_), rank(rank_) {}

  NVRTC_ATTN_DEVICE void run() {
    if (issuer) {
      prefetch_tensor_map(params.tensor_map_q);
      prefetch_tensor_map(params.tensor_map_k);
      prefetch_tensor_map(params.tensor_map_v);
      prefetch_tensor_map(params.tensor_map_dout);
      if constexpr (Shape::kBiasTiles) prefetch_tensor_map(params.tensor_map_bias);
      if constexpr (Shape::kStoresTiles) prefetch_tensor_map(params.tensor_map_dbias);
    }
    // Ordered additions: a block that runs must not wait for one that does not, so that even the first tile is taken.
    int t = Traits::kOrdered ? take_tile() : int(blockIdx.x) / Shape::kBlocks;
    while (Traits::kVarlen || t < params.num_tiles) {
      KeyTile tile;
      if constexpr (Traits::kVarlen) {
        tile = packed_key_tile<Traits::kSplit>(params, t);
        if (tile.n_block < 0) break;
      } else {
        tile = tile_of(t);
      }
      if constexpr (Traits::kFused) {
        wait_for_rows<Traits>(params, tile.b, tile.h);
        t = opaque(t);
        // Computed again: nothing of it stays alive over the wait.
        tile = tile_of(t);
      }
      announce_to_helpers(tile);
      bool const is_real = !(Traits::kVarlen && tile.b == params.batch);
      Work const work(params, tile, is_real ? tile.b : 0);
      int left = work.range.count;
      if constexpr (Traits::kTileWords) left = KeptQueries<Traits>{params, work}.total(tile.h * params.heads_per_group);
      if constexpr (Traits::kParts) {
        turns.find(params, work.range, TilePart(params, t), tile.h);
        left = turns.left;
      }
      if (!is_real || left == 0) {
        announce(tile, tile.h * params.heads_per_group, 0);
        if (issuer) full_k().arrive();
        barriers.empty_v().wait(parity ^ 1);
        if (issuer) barriers.full_v().arrive();
        if (kBeginsEarly && issuer) wait_for_launch_ahead();
      } else {
        load(work, left, kBeginsEarly && !kWaitsInTurn && t == int(blockIdx.x));
      }
      if constexpr (Shape::kBytesZeros > 0) {
        if (issuer && is_real) store_zeros(work);
      }
      t = take_tile();
      if constexpr (kRelays) round ^= parity;
      parity ^= 1;
    }
    // The conversion of dq: not earlier, or all of its blocks would go to the multiprocessors that are idle first.
    if (issuer) let_next_launch_begin();
    announce_to_helpers({-1, 0, 0});
    announce({-1, 0, 0}, 0, 0);
    if (issuer) full_k().arrive();
    if constexpr (Shape::kBytesZeros > 0) wait_stores_read();  // before the block's shared memory becomes another's
  }

 private:
  // Where the next query tile is, and of the key tile what its copies need.
  struct Queries {
    int q_b, dout_b;  // expanded (stride 0) dims have size 1 in the tensor maps
    int h, m;
    index_t statistics;  // first float of the sequence: both workspaces have the same strides
    int row0;            // of the rows that this block brings

    NVRTC_ATTN_DEVICE Queries(HopperBackwardParams const& params, Work const& work, int rank)
        : q_b(params.q_stride_b == 0 ? 0 : work.seqlen.batch_index),
          dout_b(params.dout_stride_b == 0 ? 0 : work.seqlen.batch_index),
          h(work.tile.h * params.heads_per_group),
          m(work.range.start),
          statistics(index_t(work.seqlen.batch_index) * params.delta_stride_b +
                     accumulator_row0<Traits::kVarlen, Shape::kBlockM>(work.seqlen.q_row0, work.tile.b)),
          row0(work.seqlen.q_row0 + rank * (Shape::kBlockM / Shape::kBlocks)) {}
  };

  NVRTC_ATTN_DEVICE KeyTile tile_of(int t) const {
    if constexpr (Traits::kParts) {
      return key_tile<false, false, true>(params, TilePart(params, t).tile);
    } else {
      KeyTile tile = key_tile<Traits::kOrdered, Traits::kSplit>(params, t);
      if constexpr (kByWork) {
        LineOrder const order(params);
        if (order.exists()) tile.n_block = uniform(order.list(tile.b, tile.h * params.heads_per_group)[tile.n_block]);
      }
      return tile;
    }
  }

  // All copies of one key tile, in the order in which slots become free at the end of the tile before: K last, or first where
  // it has two slots. `early`: the block's first tile, while rows are still being prepared.
  NVRTC_ATTN_DEVICE void load(Work const& work, int kept_queries, bool early) {
    Queries queries(params, work, rank);
    int const hk = key_head<Traits>(params, work.tile.h);
    if constexpr (Shape::kBiasTiles) prefetch(work, queries, hk);
    int const row = work.seqlen.k_row0 + work.n0 + rank * Shape::kKeys;
    KeptQueries<Traits> const kept{params, work};
    int in_head = 0;
    if constexpr (Traits::kTileWords) kept.begin(queries.h, queries.m, in_head);
    if constexpr (Traits::kParts) queries.h = turns.h, queries.m = turns.m;
    if (kBeginsEarly && !kWaitsInTurn && early) {
      load_before_rows(work, queries, row, hk, kept_queries);
    } else {
      if constexpr (kRelays) {
        announce(work.tile, Traits::kTileWords ? work.tile.h * params.heads_per_group : queries.h, kept_queries);
        if (issuer) load_k(work, row, hk);
      }
      barriers.empty_v().wait(parity ^ 1);
      if (issuer) load_v(work, row, hk);
      load_q(work, queries);
      load_dout(queries);
      if constexpr (!kRelays) {
        announce(work.tile, Traits::kTileWords ? work.tile.h * params.heads_per_group : queries.h, kept_queries);
        if (issuer) load_k(work, row, hk);
      }
    }
    int const total = Traits::kTileWords || Traits::kParts ? kept_queries : work.range.count * params.heads_per_group;
#pragma unroll 1
    for (int left = total - 1; left > 0; --left) {
      if constexpr (Traits::kTileWords) {
        kept.next(queries.h, queries.m, in_head);
      } else {
        work.range.next(queries.h, queries.m);
      }
      load_q(work, queries);
      load_dout(queries);
    }
  }

  // The first turn of a block, whose slots are all empty: what S needs first, and behind the wait what rows are prepared for.
  NVRTC_ATTN_DEVICE void load_before_rows(Work const& work, Queries const& queries, int row, int hk, int kept_queries) {
    announce(work.tile, queries.h, kept_queries);
    if (issuer) {
      Mbarrier const full_q = barriers.full_q(0), full_dout = barriers.full_dout(0);
      load_k(work, row, hk);
      full_q.arrive_and_expect(Shape::kBytesQ + Shape::kBytesStatistic);
      load_rows<Shape::kSlabs>(smem + Shape::kOffsetQ, params.tensor_map_q, full_q, queries, params.q_stride_h,
                               queries.q_b);
      if constexpr (Shape::kBiasTiles) load_bias(work, queries);
      load_v(work, row, hk);
      full_dout.arrive_and_expect(Shape::kBytesDout + Shape::kBytesStatistic);
      load_rows<Shape::kSlabsV>(smem + Shape::kOffsetDout, params.tensor_map_dout, full_dout, queries,
                                params.dout_stride_h, queries.dout_b);
      wait_for_launch_ahead();
      load_statistic(smem + Shape::kOffsetLse, params.row_lse, full_q, queries);
      load_statistic(smem + Shape::kOffsetDelta, params.delta, full_dout, queries);
    }
    q_slot.advance();
    dout_slot.advance();
  }

  // Of this key tile. A branch, here and where K goes, instead of a slot that is zero: with that ptxas gave other registers to
  // kernels with one slot, and thirteen tests of tests/compile found 4 to 52 more bytes spilled.
  NVRTC_ATTN_DEVICE Mbarrier full_k() const {
    if constexpr (kRelays) return barriers.full_k(int(parity));
    return barriers.full_k();
  }

  // ---- The four operands, and bias tiles

  // V of this block's keys, from token `row` on.
  NVRTC_ATTN_DEVICE void load_v(Work const& work, int row, int hk) {
    barriers.full_v().arrive_and_expect(Shape::kBytesV);
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabsV; ++slab) {
      load_box(smem + Shape::kOffsetV + slab * Shape::kSlabK, params.tensor_map_v, barriers.full_v().address,
               slab * kSlabColumns, row, params.v_stride_h == 0 ? 0 : hk,
               params.v_stride_b == 0 ? 0 : work.seqlen.batch_index, kEvictFirst);
    }
  }

  // K likewise, and the columns of the other block's keys that this one's part of dQ needs.
  NVRTC_ATTN_DEVICE void load_k(Work const& work, int row, int hk) {
    int const h = params.k_stride_h == 0 ? 0 : hk;
    int const b = params.k_stride_b == 0 ? 0 : work.seqlen.batch_index;
    int bytes = Shape::kBytesK;
    if constexpr (kPair) bytes += Shape::kBytesOtherK;
    full_k().arrive_and_expect(bytes);
    unsigned to = smem;
    if constexpr (kRelays) to += parity * Shape::kBytesK;
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
      load_box(to + slab * Shape::kSlabK, params.tensor_map_k, full_k().address, slab * kSlabColumns, row, h, b,
               kEvictFirst);
    }
    if constexpr (kPair) {
#pragma unroll
      for (int slab = 0; slab < Shape::kSlabsDq; ++slab) {
        load_box(smem + Shape::kOffsetOtherK + slab * Shape::kSlabK, params.tensor_map_k, barriers.full_k().address,
                 (Shape::first_slab_dq(rank) + slab) * kSlabColumns, row + (rank == 0 ? Shape::kKeys : -Shape::kKeys),
                 h, b, kEvictFirst);
      }
    }
  }

  // Q and row_lse of the next query tile, and its bias.
  NVRTC_ATTN_DEVICE void load_q(Work const& work, Queries const& queries) {
    int const s = q_slot.stage;
    Mbarrier const full = barriers.full_q(s);
    wait_until_empty(barriers.empty_q(s), q_slot.parity);
    int bits_slot = -1;  // kTileBits
    if constexpr (Traits::kTileWords) bits_slot = name_query_tile(work, queries);
    if (issuer) {
      if constexpr (Traits::kTileBits) {
        bool const held = bits_slot >= 0;
        full.arrive_and_expect(Shape::kBytesQ + Shape::kBytesStatistic + (held ? Shape::kBytesBits : 0));
        if (held) {
          bulk_load(smem + Shape::kOffsetBits + s * Shape::kBytesBits,
                    TileBits<Traits>(params).bits(bits_slot, Shape::kBytesBits), Shape::kBytesBits, full.address);
        }
      } else {
        full.arrive_and_expect(Shape::kBytesQ + Shape::kBytesStatistic);
      }
      load_rows<Shape::kSlabs>(smem + Shape::kOffsetQ + s * Shape::kBytesQ, params.tensor_map_q, full, queries,
                               params.q_stride_h, queries.q_b);
      if constexpr (kWaitsInTurn) wait_for_launch_ahead();
      load_statistic(smem + Shape::kOffsetLse + s * Shape::kBytesStatistic, params.row_lse, full, queries);
    }
    if constexpr (Shape::kBiasTiles) {
      wait_until_empty(barriers.empty_bias(s), q_slot.parity);
      if (issuer) load_bias(work, queries);
    }
    q_slot.advance();
  }

  // Beside the slot of Q, in front of the barrier that its copies complete: head, and query tile, negative (- 1 - m) where the
  // byte mask hides nothing of the tile. kTileBits: the head with kHeldBits where what the mask keeps of the tile has a slot,
  // which is returned.
  NVRTC_ATTN_DEVICE int name_query_tile(Work const& work, Queries const& queries) {
    TileLine const line = KeptQueries<Traits>{params, work}.line(queries.h);
    bool const whole = line.all(queries.m);
    int head = queries.h;
    int bits_slot = -1;
    if constexpr (Traits::kTileBits) {
      bits_slot = uniform(TileBits<Traits>(params).slot_of(line, queries.m));
      if (bits_slot >= 0) head |= kHeldBits;
    }
    if (issuer) {
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(smem + Shape::kOffsetQueryTiles + 8 * q_slot.stage),
                   "r"(head), "r"(whole ? -1 - queries.m : queries.m)
                   : "memory");
    }
    return bits_slot;
  }

  // dO and delta.
  NVRTC_ATTN_DEVICE void load_dout(Queries const& queries) {
    int const s = dout_slot.stage;
    Mbarrier const full = barriers.full_dout(s);
    wait_until_empty(barriers.empty_dout(s), dout_slot.parity);
    if (issuer) {
      full.arrive_and_expect(Shape::kBytesDout + Shape::kBytesStatistic);
      load_rows<Shape::kSlabsV>(smem + Shape::kOffsetDout + s * Shape::kBytesDout, params.tensor_map_dout, full,
                                queries, params.dout_stride_h, queries.dout_b);
      load_statistic(smem + Shape::kOffsetDelta + s * Shape::kBytesStatistic, params.delta, full, queries);
    }
    dout_slot.advance();
  }

  // A tile of the bias, into the slot of dS.
  NVRTC_ATTN_DEVICE void load_bias(Work const& work, Queries const& queries) {
    int const s = q_slot.stage;
    Mbarrier const full = barriers.full_bias(s);
    full.arrive_and_expect(params.bias_stride_m == 0 ? Shape::kGroups * kSlabRowBytes : Shape::kBytesDs);
#pragma unroll
    for (int slab = 0; slab < Shape::kGroups; ++slab) {
      load_box(smem + Shape::kOffsetDs + s * Shape::kBytesDs + slab * Shape::kSlabQ, params.tensor_map_bias,
               full.address, work.n0 + slab * kSlabColumns, params.bias_stride_m == 0 ? 0 : queries.m * Shape::kBlockM,
               params.bias_stride_h == 0 ? 0 : queries.h, params.bias_stride_b == 0 ? 0 : work.seqlen.batch_index,
               kEvictFirst);
    }
  }

  // Rows of Q or dO of a query tile. Two blocks read the same queries: each brings its half of the rows, to both.
  template <int kSlabs>
  NVRTC_ATTN_DEVICE void load_rows(unsigned to, TensorMap const& map, Mbarrier const& full, Queries const& queries,
                                   index_t stride_h, int b) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      int const row = queries.row0 + queries.m * Shape::kBlockM;
      int const h = stride_h == 0 ? 0 : queries.h;
      if constexpr (kPair) {
        load_box_to_both(to + slab * Shape::kSlabQ + rank * Shape::kSlabQ / 2, map, full.address, slab * kSlabColumns,
                         row, h, b, kEvictLast);
      } else {
        load_box(to + slab * Shape::kSlabQ, map, full.address, slab * kSlabColumns, row, h, b, kEvictLast);
      }
    }
  }
  NVRTC_ATTN_DEVICE void load_statistic(unsigned to, float const* from, Mbarrier const& full, Queries const& queries) {
    bulk_load(to, from + (queries.statistics + index_t(queries.h) * params.delta_stride_h + queries.m * Shape::kBlockM),
              Shape::kBytesStatistic, full.address);
  }
  // A slot that warps of both blocks read is waited for otherwise. `of`: the parity of the position that is to be
  // filled.
  NVRTC_ATTN_DEVICE void wait_until_empty(Mbarrier const& empty, unsigned of) {
    if constexpr (kPair) {
      wait_remote(empty, of ^ 1);
    } else {
      empty.wait(of ^ 1);
    }
  }

  // K and the first tiles of the bias into L2 while the slots are still another tile's: what nobody has read yet would be waited
  // for. With two query tiles to a key tile that is 3.6 % of the time; with sixteen it costs 1.3 %.
  NVRTC_ATTN_DEVICE void prefetch(Work const& work, Queries const& queries, int hk) {
    if (!issuer || work.range.count > 4) return;
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {
      prefetch_box(params.tensor_map_k, slab * kSlabColumns, work.n0, params.k_stride_h == 0 ? 0 : hk,
                   params.k_stride_b == 0 ? 0 : work.seqlen.batch_index);
    }
    int h = queries.h, m = queries.m;
    for (int left = min(work.range.count, 2); left > 0; --left) {
#pragma unroll
      for (int slab = 0; slab < Shape::kGroups; ++slab) {
        prefetch_box(params.tensor_map_bias, work.n0 + slab * kSlabColumns,
                     params.bias_stride_m == 0 ? 0 : m * Shape::kBlockM, params.bias_stride_h == 0 ? 0 : h,
                     params.bias_stride_b == 0 ? 0 : work.seqlen.batch_index);
      }
      work.range.next(h, m);
    }
  }

  // Zeros in dbias for query tiles of every head that no product reaches.
  NVRTC_ATTN_DEVICE void store_zeros(Work const& work) {
    int const first = work.tile.h * params.heads_per_group;
    for (int head = first; head < first + params.heads_per_group; ++head) {
      for (int m = 0; m < params.num_m_blocks; ++m) {
        if (m >= work.range.first && m < work.range.first + work.range.count) continue;
#pragma unroll
        for (int slab = 0; slab < Shape::kGroups; ++slab) {
          store_box(params.tensor_map_dbias, smem + Shape::kOffsetZeros, work.n0 + slab * kSlabColumns,
                    m * Shape::kBlockM, head, work.tile.b);
        }
      }
    }
    commit_stores();
  }

  // ---- Which tile it is

  // The next key tile that nobody has taken. Of two blocks, block 0 takes it and mails its number to block 1.
  NVRTC_ATTN_DEVICE int take_tile() {
    int taken = 0;
    if (!kPair || rank == 0) {
      if (issuer) {
        int* const counter = Traits::kFused ? params.counters : tile_counter(params);
        taken = (Traits::kOrdered ? 0 : int(gridDim.x) / Shape::kBlocks) + atomicAdd(counter, 1);
      }
      if constexpr (kPair) {
        wait_remote(barriers.empty_mail(), parity ^ 1);
        if (issuer) {
          send_word(cluster_address(smem + Shape::kOffsetMail, 1), taken,
                    cluster_address(barriers.full_mail().address, 1));
        }
      }
    } else if constexpr (kPair) {
      if (issuer) barriers.full_mail().arrive_and_expect(4);
      wait_remote(barriers.full_mail(), parity);
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(taken) : "r"(smem + Shape::kOffsetMail) : "memory");
      __syncwarp();
      if (issuer) arrive_remote(cluster_address(barriers.empty_mail().address, 0));
    }
    return uniform(taken);
  }

  // To the consumers, in front of the barrier that the tile's keys complete; a negative n_block ends their work. The fourth
  // word is the parity of the tile after. kSplit: the second is the first query head. kTileWords: `left` query tiles. kParts: which ones.
  NVRTC_ATTN_DEVICE void announce(KeyTile const& tile, int first_head, int left) {
    unsigned to = smem + Shape::kOffsetTile;
    if constexpr (kRelays) {
      barriers.empty_k(int(parity)).wait(round ^ 1);
      to += 16 * parity;
    } else {
      barriers.empty_k().wait(parity ^ 1);
    }
    if (issuer) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(tile.n_block),
                   "r"(Traits::kSplit ? first_head : tile.h), "r"(tile.b), "r"(parity ^ 1)
                   : "memory");
      if constexpr (Traits::kTileWords) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + Shape::kOffsetCount), "r"(left) : "memory");
      }
      if constexpr (Traits::kParts) turns.store(smem + Shape::kOffsetCount + 16 * parity);
    }
  }
  NVRTC_ATTN_DEVICE void announce_to_helpers(KeyTile const& tile) {
    if constexpr (!kPair) HelperBarriers<Traits>{smem + Shape::kOffsetHelpers}.announce(tile, parity, issuer);
  }
};

}  // namespace nvrtc_attn
