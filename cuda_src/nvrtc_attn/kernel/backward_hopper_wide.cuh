// Attention backward on Hopper (sm_90a) for head dims beyond 128: dk and dv of one key tile at a time, dq added into a
// float32 workspace.
//
// Two thread blocks (a cluster) share a tile of 128 keys. Each owns 64 of them, and dk and dv of 64 x 256 fill the
// registers of its two consumer warp-groups. dQ = dS K is what wants many keys: with 64 it would add as many bytes to
// dq_accum as Q and dO have together, and the L2 takes 3.5 TB/s of additions at best (H200), not half of what the
// products leave time for. So the blocks send each other their dS (16 bits, 8 KB), and each computes half of the
// columns of dQ from all 128 keys.
//
// With kSplit several clusters share the query heads of a key tile, and add their dk and dv into dkv_accum (dkv_convert.cuh).
//
// Roles: warp-group 0 loads (one thread issues all copies). Of the consumers group 0 computes scores, S^T = K Q^T, and
// P; group 1 computes dP^T = V dO^T and dS. P and dS go from one to the other through shared memory. Both have columns
// of dV += P^T dO and dK += dS^T Q, and of dQ, which is one query tile late (dQ'): the other block's dS has arrived by
// then. S is one query tile early (S+), so that it runs beside dS. With six slabs of dk and dv at most (kOverlapped) so
// is P (P+):
//
//   group 0: start dQ', dV, S+ -> add dQ' to dq_accum -> wait for dS -> start dK -> P+, to the other
//   group 1: start dQ', dP -> wait for P -> start dV -> dS, to both -> start dK -> add dQ' to dq_accum
//
// Additions leave by the queue that shared memory is reached through: what is read behind them is 250 to 500 cycles
// late, which under dK nobody waits for, and P is published under dK too, 700 cycles. Registers for both are missing
// with more slabs, with a mask, or with dropout and packed lengths:
//
//   group 0: P, to the other -> start dQ', dV -> add dQ' to dq_accum -> start S+ -> wait for dS -> start dK
//   group 1: start dQ', dP -> add dQ' to dq_accum -> wait for P -> start dV -> dS, to both -> start dK
//
// At head dim 256 dO has one slot, and how long it is occupied decides the time of a query tile: dP and dV follow its
// arrival at once, dQ' and S+ run while the next one is on its way.
//
// Shared memory (slabs of 64 columns, see hopper/common/wgmma.cuh): K, V, half of the columns of the other block's K,
// kNumStages x Q, kNumStagesDout x dO, 2 x dS[query][key] of both blocks, P[key][query] (twice where dS's factor is
// another thing: see hopper/wide/group_scores.cuh), row_lse and delta for each slot, which tile it is, mail, mbarriers.
//
// Barriers: mbarriers full / empty for K, V and every slot of Q and dO as in backward_hopper.cuh. full_ds counts the
// bytes that the other block sends, empty_ds the other block's consumer warps that are done with what this one has
// sent. Block 0 takes tiles from the counter and mails their numbers to block 1 (full_mail, empty_mail). The groups
// meet at named barriers: by name, hopper/backward/barriers.cuh, WideTileConsumer::NamedBarrier.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../hopper/backward/gradient_store.cuh"
#include "../hopper/backward/load.cuh"
#include "../hopper/backward/zeros.cuh"
#include "../hopper/common/cluster.cuh"
#include "../hopper/common/uniform.cuh"
#include "../hopper/wide/group_scores.cuh"
#include "../hopper/wide/products.cuh"
#include "../hopper/wide/shape.cuh"
#include "dkv_convert.cuh"

namespace nvrtc_attn {

// The thread's place among the consumers, read again: what rare code makes of it is not kept over the loops around it.
NVRTC_ATTN_DEVICE int consumer_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread - 128;
}

// One consumer warp-group: group 0 makes P, group 1 dS, and both have columns of dV, dK and dQ. Accumulators are arrays
// of the functions, not members, as in backward_hopper.cuh.
template <int kGroup, class Traits>
struct WideTileConsumer {
  using Shape = WideBackwardShape<Traits>;
  using Element = typename Shape::Element;
  using Result = ResultK<Traits>;
  using Work = KeyTileWork<Traits>;
  using Lengths = SeqlenInfo<Traits::kVarlen, Traits::kSequsedK>;
  // Whole slabs of columns: the larger part of dK to group 0, of dV to group 1.
  using OwnK = cute::conditional_t<kGroup == 0, OwnColumns<Shape::kTilesD, 0, (Shape::kSlabs + 1) / 2>,
                                   OwnColumns<Shape::kTilesD, (Shape::kSlabs + 1) / 2, Shape::kSlabs>>;
  using OwnV = cute::conditional_t<kGroup == 0, OwnColumns<Shape::kTilesDv, 0, Shape::kSlabsV / 2>,
                                   OwnColumns<Shape::kTilesDv, Shape::kSlabsV / 2, Shape::kSlabsV>>;
  using OwnDq = DqColumns<Shape, kGroup>;
  using ScoreTiles = AccTile[1][Shape::kTilesM];       // of S^T or dP^T
  using Operand = FragmentA<Element>[Shape::kStepsM];  // of P^T or dS^T, as left operand
  using DkTiles = AccTile[1][OwnK::kRegisterTiles];
  using DvTiles = AccTile[1][OwnV::kRegisterTiles];
  using DqTiles = AccTile[1][OwnDq::kTiles];
  static constexpr int kBlockM = Shape::kBlockM;
  // Rows beyond the sequence are another's, or there is no bias and mask for them.
  static constexpr bool kReadsRows = Traits::kVarlen || Traits::kHasBias || Traits::kMask;

  // Hardware barriers; 0 is __syncthreads. What both groups come to by code of their own has one for each: synccheck
  // takes one barrier at two places of the code for divergence.
  enum NamedBarrier : int {
    kProbabilities = 1,  // P is there
    kGradients = 2,      // dS is complete
    kKeysZeroed = 3,     // + group
    kOwnDsStored = 5,    // group 1 alone
    kQueriesZeroed = 6,  // + 2 * slot + group
  };

  HopperBackwardParams const& params;
  BackwardBarriers<Shape> const barriers;
  unsigned const smem;
  int const rank;
  int const tid;     // among the consumers
  int const thread;  // of the group
  int const lane;
  int const warp;
  // Operands in shared memory: K or V and Q or dO of this group's scores; rows that are contracted; dS and P.
  uint64_t const left, right, q_rows, dout_rows, ds_left, ds_transposed;
  int const dq_tile0;
  unsigned const dq_columns;
  uint64_t const k_rows, other_k_rows, p_left;
  unsigned const p_words, factor_words;  // of P and of dS's factor, this lane's
  unsigned const other_smem;

  RingPosition<2> slot;  // of dS
  RingPosition<Shape::kStages> q_slot;
  RingPosition<Shape::kStagesDout> dout_slot;
  unsigned parity = 0;  // of the key tile

  NVRTC_ATTN_DEVICE WideTileConsumer(HopperBackwardParams const& params_, unsigned smem_, int rank_)
      : params(params_),
        barriers{smem_ + Shape::kOffsetBarriers},
        smem(smem_),
        rank(rank_),
        tid(int(threadIdx.x) - 128),
        thread(tid & 127),
        lane(tid & 31),
        warp(thread >> 5),
        left(descriptor_k_major(smem + (kGroup == 0 ? 0 : Shape::kOffsetV))),
        right(descriptor_k_major(smem + (kGroup == 0 ? Shape::kOffsetQ : Shape::kOffsetDout))),
        q_rows(descriptor_mn_major(smem + Shape::kOffsetQ + OwnK::kFirst * Shape::kSlab, Shape::kSlab)),
        dout_rows(descriptor_mn_major(smem + Shape::kOffsetDout + OwnV::kFirst * Shape::kSlab, Shape::kSlab)),
        ds_left(descriptor_k_major(smem + Shape::kOffsetDs)),
        ds_transposed(descriptor_mn_major(smem + Shape::kOffsetDs, Shape::kSlab)),
        dq_tile0(OwnDq::first_tile(rank)),
        dq_columns(smem + dq_tile0 / 8 * Shape::kSlab + dq_tile0 % 8 * 16),
        k_rows(descriptor_mn_major(dq_columns, Shape::kSlab)),
        other_k_rows(descriptor_mn_major(dq_columns + Shape::kOffsetOtherK - Shape::first_slab_dq(rank) * Shape::kSlab,
                                         Shape::kSlab)),
        p_left(descriptor_k_major(smem + Shape::kOffsetP)),
        p_words(smem + Shape::kOffsetP + fragment_offset(warp, lane)),
        factor_words(Shape::kTwoP ? p_words + Shape::kSlab : p_words),
        other_smem(cluster_address(smem, rank ^ 1)) {}

  // The key tiles that the loading warp announces, until it says that there are no more.
  NVRTC_ATTN_DEVICE void run() {
    while (true) {
      barriers.full_k().wait(parity);
      KeyTile const tile = read_key_tile(smem + Shape::kOffsetTile);
      if (tile.n_block < 0) break;
      if constexpr (Traits::kVarlen) {
        if (tile.b == params.batch) {  // the virtual sequence of all tokens outside the others
          release_operands();
          zero_keys_of_no_sequence<Element, Shape::kConsumers>(params, tile.h, 2 * tile.n_block + rank,
                                                               2 * key_tile_list(params).parts(), tid);
          continue;
        }
      }
      consume(Work(params, tile, tile.b));
    }
  }

 private:
  // Which query tile it is, and which was the one before: dQ is one late.
  struct Turn {
    int h, m;
    RingPosition<2> before;  // slot of dS
    int done = 0;            // query tiles
    int h_before = 0, m_before = 0;
  };

  // ---- A key tile

  NVRTC_ATTN_DEVICE void consume(Work const& work) {
    int const tiles_left = work.range.count * params.heads_per_group;
    int const n_own = work.n0 + rank * Shape::kKeys;  // first key of this block
    if constexpr (Traits::kDbiasStore) zero_dbias_beside(work, n_own, tiles_left > 0);
    DkTiles dk;
    DvTiles dv;
    clear(dk);
    clear(dv);
    if (tiles_left == 0) {
      release_operands();
      if constexpr (!Traits::kSplit) {
        store_gradients(dk, dv, work.tile, work.seqlen, n_own + 16 * warp, lane);
      }
    } else {
      multiply(dk, dv, work, n_own, tiles_left);
    }
  }

  // dk and dv of a tile that some query sees: every query tile of every query head in turn.
  NVRTC_ATTN_DEVICE void multiply(DkTiles& dk, DvTiles& dv, Work const& work, int n_own, int tiles_left) {
    ScoreMap<Traits> const map(params);
    WideScores<Traits, Shape> const scores{map, work.mask, n_own + 16 * warp + (lane >> 2), lane & 3};
    Turn turn{announced_first_head<Traits>(params, work.tile), work.range.start};
    zero_keys(work, n_own, turn.h);
    if constexpr (kGroup == 1) barriers.full_v().wait(parity);
    ScoreTiles s;
    [[maybe_unused]] Operand p;
    if constexpr (kGroup == 0) {
      barriers.full_q(q_slot.stage).wait(q_slot.parity);
      start_scores(s, q_slot.stage);
      wait_products<0>();
      pin_registers(s);
      if constexpr (Shape::kOverlapped) give_probabilities(s, p, scores, work, n_own, turn.h, turn.m, q_slot.stage);
    }
#pragma unroll 1
    for (; tiles_left > 0; --tiles_left) {
      int const m0 = turn.m * kBlockM;
      int const valid = Traits::kVarlen ? work.seqlen.len_q - m0 : kBlockM;
      DqTiles dq;
      uint64_t const q_tile = q_rows + q_slot.stage * (Shape::kBytesQ >> 4);
      uint64_t const dout_tile = dout_rows + dout_slot.stage * (Shape::kBytesDout >> 4);
      if constexpr (kGroup == 0) {
        // dQ of the tile before, dV, S of the next tile, dK. Between them P, with kOverlapped of the next tile.
        if (tid == 0) barriers.full_ds(slot.stage).arrive_and_expect(Shape::kSlab);
        if constexpr (!Shape::kOverlapped) give_probabilities(s, p, scores, work, n_own, turn.h, turn.m, q_slot.stage);
        start_dq(dq, turn);
        barriers.full_dout(dout_slot.stage).wait(dout_slot.parity);
        if (valid < kBlockM) {
          zero_queries<Shape::kSlabs>(smem + Shape::kOffsetQ + q_slot.stage * Shape::kBytesQ, valid);
        }
        pin_registers(p);
        start_dv(dv, [&] { start_adding_ab<Element>(dv, p, dout_tile); });
        // Of the next tile, if there is one.
        RingPosition<Shape::kStages> next = q_slot;
        next.advance();
        if constexpr (Shape::kOverlapped) {
          if (tiles_left > 1) barriers.full_q(next.stage).wait(next.parity);
          start_scores(s, next.stage);
          wait_products<2>();
          pin_registers(dq);
          add_dq(dq, work, turn);
          wait_products<1>();
        } else {
          wait_products<1>();
          pin_registers(dq);
          add_dq(dq, work, turn);
          wait_products<0>();
        }
        pin_registers(dv);
        pin_registers(p);
        release_to_both(barriers.empty_dout(dout_slot.stage));
        if constexpr (!Shape::kOverlapped) {
          if (tiles_left > 1) barriers.full_q(next.stage).wait(next.parity);
          start_scores(s, next.stage);
        }
        named_barrier_sync(kGradients, Shape::kConsumers);
        start_dk(dk, [&] {
          start_adding_atb<Element, Shape::kStepsM>(dk, ds_transposed + slot.stage * (Shape::kBytesDs >> 4), q_tile);
        });
        if constexpr (Shape::kOverlapped) {
          wait_products<1>();
          pin_registers(s);
          if (tiles_left > 1) {
            int next_h = turn.h, next_m = turn.m;
            work.range.next(next_h, next_m);
            give_probabilities(s, p, scores, work, n_own, next_h, next_m, next.stage);
          }
        }
        // Nothing stays in flight over the end of the loop: ptxas runs out of registers otherwise.
        wait_products<0>();
        pin_registers(s);
        pin_registers(dk);
      } else {
        // dQ of the tile before, dP, dV, dK. Between them dS, for both groups of both blocks.
        bool const masked =
            (kReadsRows && work.seqlen.len_q - m0 < kBlockM) || !work.mask.keeps_tile(m0, kBlockM, n_own, 64);
        start_dq(dq, turn);
        barriers.full_dout(dout_slot.stage).wait(dout_slot.parity);
        start_scores(s, dout_slot.stage);
        WideGradients<Traits> gradients(params, work.tile.b, turn.h, work.seqlen.len_q, m0, n_own + 16 * warp, lane);
        unsigned const row_delta = smem + Shape::kOffsetDelta + dout_slot.stage * Shape::kBytesStatistic;
        if constexpr (Shape::kOverlapped) gradients.read_delta(row_delta);
        wait_products<1>();
        pin_registers(dq);
        if constexpr (!Shape::kOverlapped) add_dq(dq, work, turn);
        if (valid < kBlockM) {
          wait_products<0>();
          zero_queries<Shape::kSlabsV>(smem + Shape::kOffsetDout + dout_slot.stage * Shape::kBytesDout, valid);
        }
        named_barrier_sync(kProbabilities, Shape::kConsumers);
        start_dv(dv, [&] { start_product_slab<Element>(dv, p_left, dout_tile, true); });
        gradients.read_factors(factor_words);
        if constexpr (!Shape::kOverlapped) gradients.read_delta(row_delta);
        wait_products<1>();
        pin_registers(s);
        if (tiles_left == 1) release(barriers.empty_v());
        if (masked || Traits::kMask) {
          gradients.template apply<true>(s);
        } else {
          gradients.template apply<false>(s);
        }
        Operand ds;
        pack_fragments<Element>(ds, s);
        wait_products<0>();
        pin_registers(dv);
        release_to_both(barriers.empty_dout(dout_slot.stage));
        share_ds(ds);
        barriers.full_q(q_slot.stage).wait(q_slot.parity);
        pin_registers(ds);
        start_dk(dk, [&] { start_adding_ab<Element>(dk, ds, q_tile); });
        if constexpr (Shape::kOverlapped) add_dq(dq, work, turn);
        wait_products<0>();
        pin_registers(dk);
        pin_registers(ds);
      }
      release_to_both(barriers.empty_q(q_slot.stage));
      turn.m_before = turn.m;
      turn.h_before = turn.h;
      ++turn.done;
      turn.before = slot;
      slot.advance();
      q_slot.advance();
      dout_slot.advance();
      work.range.next(turn.h, turn.m);
    }
    DqTiles dq;
    start_dq(dq, turn);
    if constexpr (Traits::kSplit) {
      add_to_workspace(dk, dv);
    } else if constexpr (Shape::kReadsAgain) {
      KeyTile const again = read_key_tile(smem + Shape::kOffsetTile);
      Lengths const lengths(params, again.b);
      int const place = consumer_thread();
      int const key = again.n_block * Traits::kBlockN + cluster_rank() * Shape::kKeys + 16 * (place >> 5 & 3);
      // The lane too with packed lengths alone: each choice spills 4 bytes in the other case.
      store_gradients(dk, dv, again, lengths, key, Traits::kVarlen ? place & 31 : lane);
    } else {
      store_gradients(dk, dv, work.tile, work.seqlen, n_own + 16 * warp, lane);
    }
    wait_products<0>();
    pin_registers(dq);
    // The next parity is read again: over the loop there is no register for it.
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(parity) : "r"(smem + Shape::kOffsetTile + 12) : "memory");
    __syncwarp();
    release(barriers.empty_k());
    add_dq(dq, work, turn);
  }

  // ---- The five products

  // Group 0: S^T = K Q^T, group 1: dP^T = V dO^T, of this block's 64 keys.
  NVRTC_ATTN_DEVICE void start_scores(ScoreTiles& s, int stage) {
    constexpr int kBytes = kGroup == 0 ? Shape::kBytesQ : Shape::kBytesDout;
    pin_registers(s);
    begin_products();
    start_product_abt<Element, 64, kBlockM, kGroup == 0 ? Traits::kHeadDim : Traits::kHeadDimV>(
        s, left, right + stage * (kBytes >> 4));
    commit_products();
  }

  // dV += P^T dO, this group's columns if it has any; `product` starts it, with P from registers or from shared memory.
  template <class Product>
  NVRTC_ATTN_DEVICE void start_dv(DvTiles& dv, Product const& product) {
    pin_registers(dv);
    begin_products();
    if constexpr (OwnV::kAny) product();
    commit_products();
  }

  // dQ = dS K of the query tile before, this group's columns, from both blocks' keys; what it makes of nothing before
  // the first tile is not used.
  NVRTC_ATTN_DEVICE void start_dq(DqTiles& dq, Turn const& turn) {
    if (turn.done > 0) barriers.full_ds(turn.before.stage).wait(turn.before.parity);
    pin_registers(dq);
    begin_products();
    uint64_t const a = ds_left + turn.before.stage * (Shape::kBytesDs >> 4);
    start_product_slab<Element>(dq, a, k_rows, false);
    start_product_slab<Element>(dq, a + (Shape::kSlab >> 4), other_k_rows, true);
    commit_products();
  }

  // dK += dS^T Q likewise.
  template <class Product>
  NVRTC_ATTN_DEVICE void start_dk(DkTiles& dk, Product const& product) {
    pin_registers(dk);
    begin_products();
    if constexpr (OwnK::kAny) product();
    commit_products();
  }

  // ---- Between the products

  // Group 0: P of query tile m of head h, whose scores are in s, in p and for the other group.
  NVRTC_ATTN_DEVICE void give_probabilities(ScoreTiles& s, Operand& p, WideScores<Traits, Shape> const& scores,
                                            Work const& work, int n_own, int h, int m, int stage) {
    int const m0 = m * kBlockM;
    bool const masked =
        (kReadsRows && work.seqlen.len_q - m0 < kBlockM) || !work.mask.keeps_tile(m0, kBlockM, n_own, 64);
    WideScoreOperands<Traits> const operands(params, work.tile.b, h, work.seqlen.len_q, work.seqlen.len_k, m0,
                                             n_own + 16 * warp, lane);
    scores.probabilities(s, p, operands, factor_words, smem + Shape::kOffsetLse + stage * Shape::kBytesStatistic, m0,
                         masked);
#pragma unroll
    for (int step = 0; step < Shape::kStepsM; ++step) give_fragment(p_words, step, p[step]);
    fence_async_proxy();
    named_barrier_arrive(kProbabilities, Shape::kConsumers);
  }

  // Group 1: dS of this block's keys, for group 0 and for the other block.
  NVRTC_ATTN_DEVICE void share_ds(Operand const& ds) {
    // The other block is done with what this one sent two tiles ago, hence so is the copy.
    wait_for_room(barriers.empty_ds(slot.stage), slot.parity ^ 1);
    unsigned const own_ds = smem + Shape::kOffsetDs + slot.stage * Shape::kBytesDs;
    store_transposed<Element>(own_ds, ds, warp, lane);
    fence_async_proxy();
    named_barrier_sync(kOwnDsStored, 128);
    named_barrier_arrive(kGradients, Shape::kConsumers);
    if (thread == 0) {
      bulk_send(other_smem + (own_ds + Shape::kSlab - smem), own_ds, Shape::kSlab,
                other_smem + (barriers.full_ds(slot.stage).address - smem));
    }
    __syncwarp();
  }

  // ---- Zeros for what is not the tile's

  // dbias of the queries before and behind those that see the tile, if any.
  NVRTC_ATTN_DEVICE void zero_dbias_beside(Work const& work, int n_own, bool any) {
    constexpr int kWarps = Shape::kConsumers / 32;
    int const len_q = work.seqlen.len_q;
    int const first = any ? work.range.first * kBlockM : len_q;
    int const last = any ? (work.range.first + work.range.count) * kBlockM : len_q;
    int const cols = min(Shape::kKeys, params.seqlen_k - n_own);
    int const h = work.tile.h;
    for (int head = h * params.heads_per_group; head < (h + 1) * params.heads_per_group; ++head) {
      zero_dbias<Traits, kWarps>(params, work.tile.b, head, n_own, cols, 0, min(first, len_q), tid);
      zero_dbias<Traits, kWarps>(params, work.tile.b, head, n_own, cols, last, len_q, tid);
    }
  }

  // Keys beyond the sequence belong to another one or to nobody: they may hold NaN, and dQ multiplies them by zero.
  // Keys that a padding mask hides likewise.
  NVRTC_ATTN_DEVICE void zero_keys(Work const& work, int n_own, int h) {
    if constexpr (Traits::kVarlen || Traits::kSequsedK || Traits::kMask) {
      int const n_other = work.n0 + (rank ^ 1) * Shape::kKeys;
      int const len_k = work.seqlen.len_k;
      bool hides = false;
      if constexpr (Traits::kMask) {
        HiddenKeys const hidden(params, work.tile.b, h, params.heads_per_group);
        hides = hidden.any;
        if (hides) {
          zero_hidden_tile_rows<64, Shape::kSlabs>(smem, hidden, n_own, len_k, 0, 64, consumer_thread(),
                                                   Shape::kConsumers);
          zero_hidden_tile_rows<64, Shape::kSlabsDq>(smem + Shape::kOffsetOtherK, hidden, n_other, len_k, 0, 64,
                                                     consumer_thread(), Shape::kConsumers);
        }
      }
      if (hides || len_k - work.n0 < Traits::kBlockN) {
        int const valid = len_k - n_own;
        int const other_valid = len_k - n_other;
        if (valid < 64)
          zero_tile_rows<64, Shape::kSlabs>(smem, max(valid, 0), 64, consumer_thread(), Shape::kConsumers);
        if (other_valid < 64) {
          zero_tile_rows<64, Shape::kSlabsDq>(smem + Shape::kOffsetOtherK, max(other_valid, 0), 64, consumer_thread(),
                                              Shape::kConsumers);
        }
        fence_async_proxy();
        meet_other_group(kKeysZeroed);
      }
    }
  }

  // Queries beyond the sequence belong to another one: dV and dK multiply them by zero, and they may hold NaN. Group 0
  // zeroes rows of Q, group 1 of dO.
  template <int kSlabs>
  NVRTC_ATTN_DEVICE void zero_queries(unsigned tile, int valid) {
    zero_tile_rows<kBlockM, kSlabs>(tile, valid, kBlockM, consumer_thread() & 127, 128);
    fence_async_proxy();
    meet_other_group(kQueriesZeroed + 2 * slot.stage);
  }

  // Before the groups meet with this barrier again one must have waited for the other elsewhere.
  NVRTC_ATTN_DEVICE void meet_other_group(int barrier) {
    named_barrier_arrive(barrier + (kGroup ^ 1), Shape::kConsumers);
    named_barrier_sync(barrier + kGroup, Shape::kConsumers);
  }

  // ---- Results

  // dQ of the query tile before, 64 queries and this group's columns, to dq_accum.
  NVRTC_ATTN_DEVICE void add_dq(DqTiles& dq, Work const& work, Turn const& turn) {
    if (turn.done == 0) return;
    if (lane == 0) arrive_remote(other_smem + (barriers.empty_ds(turn.before.stage).address - smem));
    index_t const row0 =
        accumulator_row0<Traits::kVarlen, kBlockM>(work.seqlen.q_row0, work.tile.b) + index_t(turn.m_before) * kBlockM;
    // Reading the thread's index again waits for all that is queued for shared memory, 150 to 250 cycles.
    int const row_warp = (Shape::kOverlapped ? opaque(tid) : consumer_thread()) >> 5 & 3;
    float* const to = params.dq_accum + index_t(work.seqlen.batch_index) * params.dq_accum_stride_b +
                      index_t(turn.h_before) * params.dq_accum_stride_h + row0 * Traits::kHeadDim +
                      (row_warp * Shape::kTilesD + dq_tile0) * kAccumBlock;
#pragma unroll
    for (int d = 0; d < OwnDq::kTiles; ++d) {
      if (Shape::kTilesD % 8 == 0 || dq_tile0 + d < Shape::kTilesD) {
        add_block(to + d * kAccumBlock, dq[0][d], lane);
      }
    }
  }

  // This group's columns of dk and dv of the warp's 16 keys, from `key` on.
  NVRTC_ATTN_DEVICE void store_gradients(DkTiles const& dk, DvTiles const& dv, KeyTile const& tile,
                                         Lengths const& seqlen, int key, int lane) {
    if constexpr (OwnV::kAny) {
      store_rows<Result>(
          key_rows<Result>(params.dv, params.dv_stride_b, params.dv_stride_n, params.dv_stride_h, tile, seqlen, key) +
              OwnV::kFirst * kSlabColumns,
          params.dv_stride_n, dv, Traits::kDropout ? params.dropout_multiplier : 1.0f, seqlen.len_k_slot - key,
          params.head_dim_v - OwnV::kFirst * kSlabColumns, lane);
    }
    if constexpr (OwnK::kAny) {
      store_rows<Result>(
          key_rows<Result>(params.dk, params.dk_stride_b, params.dk_stride_n, params.dk_stride_h, tile, seqlen, key) +
              OwnK::kFirst * kSlabColumns,
          params.dk_stride_n, dk, params.scale, seqlen.len_k_slot - key, params.head_dim - OwnK::kFirst * kSlabColumns,
          lane);
    }
  }

  // kSplit: this group's columns of the warp's 16 keys, beside those of the blocks that have other query heads. Which tile it
  // was is read again: over the loop there are no registers for it.
  NVRTC_ATTN_DEVICE void add_to_workspace(DkTiles const& dk, DvTiles const& dv) {
    KeyTile const tile = read_key_tile(smem + Shape::kOffsetTile);
    int const key = tile.n_block * Traits::kBlockN + rank * Shape::kKeys + 16 * warp;
    DkvAccumRow const to = dkv_accum_row<Traits>(params, tile.b, announced_key_head<Traits>(params, tile), key);
    if constexpr (OwnK::kAny) add_blocks(to.dk + OwnK::kFirst * 8 * kAccumBlock, dk, lane);
    if constexpr (OwnV::kAny) add_blocks(to.dv + OwnV::kFirst * 8 * kAccumBlock, dv, lane);
  }

  // ---- Slots given back

  NVRTC_ATTN_DEVICE void release(Mbarrier const& barrier) const {
    if (lane == 0) barrier.arrive();
  }
  NVRTC_ATTN_DEVICE void release_to_both(Mbarrier const& barrier) const {
    if (lane == 0) {
      barrier.arrive();
      arrive_remote(other_smem + (barrier.address - smem));
    }
  }

  // K and V of a tile that has no products.
  NVRTC_ATTN_DEVICE void release_operands() {
    release(barriers.empty_k());
    if constexpr (kGroup == 1) {
      barriers.full_v().wait(parity);
      release(barriers.empty_v());
    }
    parity ^= 1;
  }
};

template <class Traits>
NVRTC_ATTN_DEVICE void backward_hopper_wide(HopperBackwardParams const& params) {
  using Shape = WideBackwardShape<Traits>;
  extern __shared__ __align__(1024) unsigned char smem_pointer[];
  unsigned const smem = shared_address(smem_pointer);
  BackwardBarriers<Shape> const barriers{smem + Shape::kOffsetBarriers};
  int const rank = cluster_rank();
  if (threadIdx.x == 0) barriers.init();
  cluster_sync();
  // A broadcast tells the compiler that the role is uniform over the warp.
  int const warp_group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warp_group == 0) {
    give_registers<40>();
    if (threadIdx.x < 32) BackwardLoader<Traits, Shape>(params, barriers, smem, rank).run();
  } else if (warp_group == 1) {
    take_registers<232>();
    WideTileConsumer<0, Traits>(params, smem, rank).run();
  } else {
    take_registers<232>();
    WideTileConsumer<1, Traits>(params, smem, rank).run();
  }
  // Neither block's shared memory goes away while the other may write to it.
  cluster_sync();
}

}  // namespace nvrtc_attn
