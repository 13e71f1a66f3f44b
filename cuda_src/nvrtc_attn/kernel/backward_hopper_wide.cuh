// Attention backward on Hopper (sm_90a) for head dims beyond 128: dk and dv of one key tile at a time, dq added into a float32
// workspace.
//
// Two thread blocks (a cluster) share a tile of 128 keys. Each owns 64 of them, and dk and dv of 64 x 256 fill the registers of
// its two consumer warp-groups. dQ = dS K is what wants many keys: with 64 it would add as many bytes to dq_accum as Q and dO
// have together, and the L2 takes 3.5 TB/s of additions at best (H200), not half of what the products leave time for. So the
// blocks send each other their dS (16 bits, 8 KB), and each computes half of the columns of dQ from all 128 keys.
//
// Roles: warp-group 0 loads (one thread issues all copies). Of the consumers group 0 computes scores, S^T = K Q^T, and P;
// group 1 computes dP^T = V dO^T and dS. P and dS go from one to the other through shared memory. Both have columns of
// dV += P^T dO and dK += dS^T Q, and of dQ, which is one query tile late (dQ'): the other block's dS has arrived by then. S is
// one query tile early (S+), so that it runs beside dS. With six slabs of dk and dv at most (kOverlapped) so is P (P+):
//
//   group 0: start dQ', dV, S+ -> add dQ' to dq_accum -> wait for dS -> start dK -> P+, to the other
//   group 1: start dQ', dP -> wait for P -> start dV -> dS, to both -> start dK -> add dQ' to dq_accum
//
// Additions leave by the queue that shared memory is reached through: what is read behind them is 250 to 500 cycles late, which
// under dK nobody waits for, and P is published under dK too, 700 cycles. Registers for both are missing with more slabs, with a
// mask, or with dropout and packed lengths:
//
//   group 0: P, to the other -> start dQ', dV -> add dQ' to dq_accum -> start S+ -> wait for dS -> start dK
//   group 1: start dQ', dP -> add dQ' to dq_accum -> wait for P -> start dV -> dS, to both -> start dK
//
// At head dim 256 dO has one slot, and how long it is occupied decides the time of a query tile: dP and dV follow its arrival at
// once, dQ' and S+ run while the next one is on its way.
//
// Shared memory (slabs of 64 columns, see hopper/common/wgmma.cuh): K, V, half of the columns of the other block's K, kNumStages x Q,
// kNumStagesDout x dO, 2 x dS[query][key] of both blocks, P[key][query] (twice where dS's factor is another thing: see
// hopper/wide/scores.cuh), row_lse and delta for each slot, which tile it is, mail, mbarriers.
//
// Barriers: mbarriers full / empty for K, V and every slot of Q and dO as in backward_hopper.cuh. full_ds counts the bytes that
// the other block sends, empty_ds the other block's consumer warps that are done with what this one has sent. Block 0 takes tiles
// from the counter and mails their numbers to block 1 (full_mail, empty_mail). Named barriers: 1 P is there, 2 dS is complete,
// 3 and 4 rows of keys beyond the sequence are zeroed, 5 group 1 has stored its dS, 6 to 9 rows of queries are zeroed.
#pragma once
#include "../hopper/common/cluster.cuh"
#include "../hopper/common/uniform.cuh"
#include "../hopper/wide/products.cuh"
#include "../hopper/wide/scores.cuh"
#include "backward_hopper.cuh"

namespace nvrtc_attn {

template <class Traits>
struct WideBackwardShape {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kKeys = Traits::kBlockN / 2;  // of one block
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kStagesDout = Traits::kNumStagesDout;
  static constexpr int kConsumers = 256;
  static constexpr int kTilesM = kBlockM / 8;
  static constexpr int kStepsM = kBlockM / 16;
  static constexpr int kTilesD = kHeadDim / 8;
  static constexpr int kTilesDv = kHeadDimV / 8;
  static constexpr int kSlabs = (kHeadDim + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabsV = (kHeadDimV + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabsDq = (kSlabs + 1) / 2;  // that one block reads for its half of dQ's columns
  static constexpr int kSlab = 64 * kSlabRowBytes;
  static constexpr int kBytesQ = kSlabs * kSlab;
  static constexpr int kBytesDout = kSlabsV * kSlab;
  static constexpr int kBytesK = kSlabs * kSlab;
  static constexpr int kBytesV = kSlabsV * kSlab;
  static constexpr int kBytesOtherK = kSlabsDq * kSlab;
  static constexpr int kBytesDs = 2 * kSlab;  // this block's keys, the other's
  static constexpr int kBytesStatistic = kBlockM * 4;
  // dV's operand and dS's factor are two things when the score has a derivative or some of P is dropped.
  static constexpr bool kTwoP = Traits::kSoftcap || Traits::kDropout;
  // The order of a turn that wants scores, P and dQ in registers at the same time: see above.
  static constexpr bool kOverlapped = kSlabs + kSlabsV <= 6 && !Traits::kMask && !(Traits::kDropout && Traits::kVarlen);
  // Registers are short: what only the end of a key tile needs is read again.
  static constexpr bool kReadsAgain = kSlabs + kSlabsV > 6 && (Traits::kDropout || Traits::kVarlen);
  // The group that has a whole slab of dQ where there are three; with a mask the other choice spills 16 to 20 bytes.
  static constexpr int kWholeSlabGroup = Traits::kMask ? 0 : 1;

  static constexpr int kOffsetV = kBytesK;
  static constexpr int kOffsetOtherK = kOffsetV + kBytesV;
  static constexpr int kOffsetQ = kOffsetOtherK + kBytesOtherK;
  static constexpr int kOffsetDout = kOffsetQ + kStages * kBytesQ;
  static constexpr int kOffsetDs = kOffsetDout + kStagesDout * kBytesDout;
  static constexpr int kOffsetP = kOffsetDs + 2 * kBytesDs;
  static constexpr int kOffsetLse = kOffsetP + (kTwoP ? 2 : 1) * kSlab;
  static constexpr int kOffsetDelta = kOffsetLse + kStages * kBytesStatistic;
  static constexpr int kOffsetTile = kOffsetDelta + kStagesDout * kBytesStatistic;
  static constexpr int kOffsetMail = kOffsetTile + 16;
  static constexpr int kOffsetBarriers = kOffsetMail + 16;
  static constexpr int kBytes = kOffsetBarriers + 8 * (10 + 2 * kStages + 2 * kStagesDout);
  static_assert(kBytes == Traits::kSmemBytes, "smem_bytes of the config and the layout of the kernel differ");

  static_assert(kBlockM == 64 && kKeys == 64, "a product has 64 rows");
  static_assert(Traits::kNumThreads == 128 + kConsumers, "two consumer groups");
  static_assert(kStages >= 2, "S of a query tile runs before dK of the one before it");
  static_assert(kSlabs <= 4 && kSlabsV <= 4, "dk and dv fill the registers");
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "matrix product shapes");
};

// Columns of one gradient that a consumer group owns, whole slabs.
template <int kTiles, int kFirstSlab, int kEndSlab>
struct OwnColumns {
  static constexpr int kFirst = kFirstSlab;
  static constexpr int kCount = (kTiles < 8 * kEndSlab ? kTiles : 8 * kEndSlab) - 8 * kFirstSlab;  // tiles of 8
  static constexpr bool kAny = kEndSlab > kFirstSlab;
  static constexpr int kRegisterTiles = kAny ? kCount : 2;
};

// Columns of dQ that a consumer group computes, all in one slab: a quarter, but of three slabs one group of each block has a whole
// one and the other half of the middle one, so that no product is thrown away. Group 0 has the larger products of dK and S: the
// whole slab there is 3 % slower (D 192, value 128, causal).
template <class Shape, int kGroup>
struct DqColumns {
  static constexpr bool kWhole = Shape::kSlabs == 3 && kGroup == Shape::kWholeSlabGroup;
  static constexpr int kTiles = Shape::kSlabs == 3 ? (kWhole ? 8 : 4) : 2 * Shape::kSlabs;
  static NVRTC_ATTN_DEVICE int first_tile(int rank) {
    if constexpr (Shape::kSlabs == 3) return kWhole ? 16 * rank : 8 + 4 * rank;
    return (2 * rank + kGroup) * kTiles;
  }
  // Of the slabs that the block has of the other's K.
  static NVRTC_ATTN_DEVICE int first_slab(int rank) { return rank * (Shape::kSlabs - Shape::kSlabsDq); }
};

template <class Shape>
struct WideBackwardBarriers {
  unsigned base;  // shared address
  static constexpr int kSlots = Shape::kStages;
  static constexpr int kSlotsDout = Shape::kStagesDout;
  NVRTC_ATTN_DEVICE Mbarrier at(int i) const { return {base + 8 * i}; }
  NVRTC_ATTN_DEVICE Mbarrier full_k() const { return at(0); }
  NVRTC_ATTN_DEVICE Mbarrier empty_k() const { return at(1); }
  NVRTC_ATTN_DEVICE Mbarrier full_v() const { return at(2); }
  NVRTC_ATTN_DEVICE Mbarrier empty_v() const { return at(3); }
  NVRTC_ATTN_DEVICE Mbarrier full_mail() const { return at(4); }
  NVRTC_ATTN_DEVICE Mbarrier empty_mail() const { return at(5); }
  NVRTC_ATTN_DEVICE Mbarrier full_ds(int slot) const { return at(6 + slot); }
  NVRTC_ATTN_DEVICE Mbarrier empty_ds(int slot) const { return at(8 + slot); }
  NVRTC_ATTN_DEVICE Mbarrier full_q(int stage) const { return at(10 + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_q(int stage) const { return at(10 + kSlots + stage); }
  NVRTC_ATTN_DEVICE Mbarrier full_dout(int stage) const { return at(10 + 2 * kSlots + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_dout(int stage) const { return at(10 + 2 * kSlots + kSlotsDout + stage); }

  NVRTC_ATTN_DEVICE void init() const {
    constexpr int kWarps = Shape::kConsumers / 32;
    full_k().init(1);
    full_v().init(1);
    empty_k().init(kWarps);
    empty_v().init(kWarps / 2);  // group 1 alone reads V
    full_mail().init(1);
    empty_mail().init(1);
    for (int slot = 0; slot < 2; ++slot) {
      full_ds(slot).init(1);
      empty_ds(slot).init(kWarps);
    }
    for (int stage = 0; stage < kSlots; ++stage) {
      full_q(stage).init(1);
      empty_q(stage).init(2 * kWarps);  // of both blocks
    }
    for (int stage = 0; stage < kSlotsDout; ++stage) {
      full_dout(stage).init(1);
      empty_dout(stage).init(2 * kWarps);
    }
    fence_barrier_init();
  }
};

// The loading warp. All lanes follow the schedule, one issues.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void load_wide_operands(HopperBackwardParams const& params,
                                          WideBackwardBarriers<Shape> const& barriers, unsigned smem, int rank) {
  bool const issuer = threadIdx.x == 0;
  if (issuer) {
    prefetch_tensor_map(params.tensor_map_q);
    prefetch_tensor_map(params.tensor_map_k);
    prefetch_tensor_map(params.tensor_map_v);
    prefetch_tensor_map(params.tensor_map_dout);
  }
  RingPosition<Shape::kStages> q_slot;
  RingPosition<Shape::kStagesDout> dout_slot;
  unsigned parity = 0;
  auto announce = [&](int n_block, int h, int b) {
    barriers.empty_k().wait(parity ^ 1);
    if (issuer) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem + Shape::kOffsetTile), "r"(n_block), "r"(h),
                   "r"(b), "r"(parity ^ 1)
                   : "memory");
    }
  };
  int t = int(blockIdx.x) / 2;
  while (t < params.num_tiles) {
    KeyTile const tile = key_tile<false, false>(params, t);
    bool const is_real = !(Traits::kVarlen && tile.b == params.batch);
    SeqlenInfo<Traits::kVarlen, Traits::kSequsedK> const seqlen(params, is_real ? tile.b : 0);
    PositionMask<Traits::kBand> const mask(params, seqlen.len_q, seqlen.len_k);
    QueryRange<Traits> const range(params, mask, tile.n_block);
    if (!is_real || range.count == 0) {
      announce(tile.n_block, tile.h, tile.b);
      if (issuer) barriers.full_k().arrive();
      barriers.empty_v().wait(parity ^ 1);
      if (issuer) barriers.full_v().arrive();
    } else {
      // Expanded (stride 0) dims have size 1 in the tensor maps.
      int const q_b = params.q_stride_b == 0 ? 0 : seqlen.batch_index;
      int const dout_b = params.dout_stride_b == 0 ? 0 : seqlen.batch_index;
      int h = tile.h * params.heads_per_group;
      int m = range.start;
      // Of the statistics, in floats: both workspaces have the same strides.
      index_t const sequence = index_t(seqlen.batch_index) * params.delta_stride_b +
                               accumulator_row0<Traits::kVarlen, Shape::kBlockM>(seqlen.q_row0, tile.b);
      // Both blocks read the same queries: each brings half of the rows, to both.
      int const q_row = seqlen.q_row0 + rank * Shape::kBlockM / 2;
      auto load_q = [&] {
        int const s = q_slot.stage;
        Mbarrier const full = barriers.full_q(s);
        wait_remote(barriers.empty_q(s), q_slot.parity ^ 1);
        if (issuer) {
          full.arrive_and_expect(Shape::kBytesQ + Shape::kBytesStatistic);
#pragma unroll
          for (int slab = 0; slab < Shape::kSlabs; ++slab) {
            load_box_to_both(
                smem + Shape::kOffsetQ + s * Shape::kBytesQ + slab * Shape::kSlab + rank * Shape::kSlab / 2,
                params.tensor_map_q, full.address, slab * kSlabColumns, q_row + m * Shape::kBlockM,
                params.q_stride_h == 0 ? 0 : h, q_b, kEvictLast);
          }
          bulk_load(smem + Shape::kOffsetLse + s * Shape::kBytesStatistic,
                    params.row_lse + (sequence + index_t(h) * params.delta_stride_h + m * Shape::kBlockM),
                    Shape::kBytesStatistic, full.address);
        }
        q_slot.advance();
      };
      auto load_dout = [&] {
        int const s = dout_slot.stage;
        Mbarrier const full = barriers.full_dout(s);
        wait_remote(barriers.empty_dout(s), dout_slot.parity ^ 1);
        if (issuer) {
          full.arrive_and_expect(Shape::kBytesDout + Shape::kBytesStatistic);
#pragma unroll
          for (int slab = 0; slab < Shape::kSlabsV; ++slab) {
            load_box_to_both(
                smem + Shape::kOffsetDout + s * Shape::kBytesDout + slab * Shape::kSlab + rank * Shape::kSlab / 2,
                params.tensor_map_dout, full.address, slab * kSlabColumns, q_row + m * Shape::kBlockM,
                params.dout_stride_h == 0 ? 0 : h, dout_b, kEvictLast);
          }
          bulk_load(smem + Shape::kOffsetDelta + s * Shape::kBytesStatistic,
                    params.delta + (sequence + index_t(h) * params.delta_stride_h + m * Shape::kBlockM),
                    Shape::kBytesStatistic, full.address);
        }
        dout_slot.advance();
      };
      int const k_row = seqlen.k_row0 + tile.n_block * Traits::kBlockN + rank * Shape::kKeys;
      // Slots become free in this order at the end of the tile before.
      barriers.empty_v().wait(parity ^ 1);
      if (issuer) {
        barriers.full_v().arrive_and_expect(Shape::kBytesV);
#pragma unroll
        for (int slab = 0; slab < Shape::kSlabsV; ++slab) {
          load_box(smem + Shape::kOffsetV + slab * Shape::kSlab, params.tensor_map_v, barriers.full_v().address,
                   slab * kSlabColumns, k_row, params.v_stride_h == 0 ? 0 : tile.h,
                   params.v_stride_b == 0 ? 0 : seqlen.batch_index, kEvictFirst);
        }
      }
      load_q();
      load_dout();
      announce(tile.n_block, tile.h, tile.b);
      if (issuer) {
        int const k_h = params.k_stride_h == 0 ? 0 : tile.h;
        int const k_b = params.k_stride_b == 0 ? 0 : seqlen.batch_index;
        barriers.full_k().arrive_and_expect(Shape::kBytesK + Shape::kBytesOtherK);
#pragma unroll
        for (int slab = 0; slab < Shape::kSlabs; ++slab) {
          load_box(smem + slab * Shape::kSlab, params.tensor_map_k, barriers.full_k().address, slab * kSlabColumns,
                   k_row, k_h, k_b, kEvictFirst);
        }
#pragma unroll
        for (int slab = 0; slab < Shape::kSlabsDq; ++slab) {
          load_box(smem + Shape::kOffsetOtherK + slab * Shape::kSlab, params.tensor_map_k, barriers.full_k().address,
                   (DqColumns<Shape, 0>::first_slab(rank) + slab) * kSlabColumns,
                   k_row + (rank == 0 ? Shape::kKeys : -Shape::kKeys), k_h, k_b, kEvictFirst);
        }
      }
#pragma unroll 1
      for (int left = range.count * params.heads_per_group - 1; left > 0; --left) {
        range.next(h, m);
        load_q();
        load_dout();
      }
    }
    int taken = 0;
    if (rank == 0) {
      if (issuer) taken = int(gridDim.x) / 2 + atomicAdd(tile_counter(params), 1);
      wait_remote(barriers.empty_mail(), parity ^ 1);
      if (issuer) {
        send_word(cluster_address(smem + Shape::kOffsetMail, 1), taken,
                  cluster_address(barriers.full_mail().address, 1));
      }
    } else {
      if (issuer) barriers.full_mail().arrive_and_expect(4);
      wait_remote(barriers.full_mail(), parity);
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(taken) : "r"(smem + Shape::kOffsetMail) : "memory");
      __syncwarp();
      if (issuer) arrive_remote(cluster_address(barriers.empty_mail().address, 0));
    }
    parity ^= 1;
    t = uniform(taken);
  }
  announce(-1, 0, 0);
  if (issuer) barriers.full_k().arrive();
}

// The thread's place among the consumers, read again: what rare code makes of it is not kept over the loops around it.
NVRTC_ATTN_DEVICE int consumer_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread - 128;
}

// Both groups come here, each by code of its own, and wait at a barrier of its own (`id` + kGroup): synccheck takes one barrier
// at two places of the code for divergence. Before they meet with this id again one must have waited for the other elsewhere.
template <int kGroup, int kConsumers>
NVRTC_ATTN_DEVICE void meet_other_group(int id) {
  named_barrier_arrive(id + (kGroup ^ 1), kConsumers);
  named_barrier_sync(id + kGroup, kConsumers);
}

// One consumer warp-group.
template <int kGroup, class Traits, class Shape>
NVRTC_ATTN_DEVICE void consume_wide_tiles(HopperBackwardParams const& params,
                                          WideBackwardBarriers<Shape> const& barriers, unsigned smem, int rank) {
  using Element = typename Shape::Element;
  constexpr int kBlockM = Shape::kBlockM;
  // Whole slabs of columns: the larger part of dK to group 0, of dV to group 1.
  using OwnK = cute::conditional_t<kGroup == 0, OwnColumns<Shape::kTilesD, 0, (Shape::kSlabs + 1) / 2>,
                                   OwnColumns<Shape::kTilesD, (Shape::kSlabs + 1) / 2, Shape::kSlabs>>;
  using OwnV = cute::conditional_t<kGroup == 0, OwnColumns<Shape::kTilesDv, 0, Shape::kSlabsV / 2>,
                                   OwnColumns<Shape::kTilesDv, Shape::kSlabsV / 2, Shape::kSlabsV>>;
  // Rows beyond the sequence are another's, or there is no bias and mask for them.
  constexpr bool kReadsRows = Traits::kVarlen || Traits::kHasBias || Traits::kMask;
  int const tid = int(threadIdx.x) - 128;
  int const thread = tid & 127;  // of the group
  int const lane = tid & 31;
  int const warp = thread >> 5;
  uint64_t const left = descriptor_k_major(smem + (kGroup == 0 ? 0 : Shape::kOffsetV));  // K or V
  uint64_t const right = descriptor_k_major(smem + (kGroup == 0 ? Shape::kOffsetQ : Shape::kOffsetDout));
  uint64_t const q_rows = descriptor_mn_major(smem + Shape::kOffsetQ + OwnK::kFirst * Shape::kSlab, Shape::kSlab);
  uint64_t const dout_rows = descriptor_mn_major(smem + Shape::kOffsetDout + OwnV::kFirst * Shape::kSlab, Shape::kSlab);
  uint64_t const ds_left = descriptor_k_major(smem + Shape::kOffsetDs);
  uint64_t const ds_transposed = descriptor_mn_major(smem + Shape::kOffsetDs, Shape::kSlab);
  using OwnDq = DqColumns<Shape, kGroup>;
  int const dq_tile0 = OwnDq::first_tile(rank);
  unsigned const dq_columns = smem + dq_tile0 / 8 * Shape::kSlab + dq_tile0 % 8 * 16;
  uint64_t const k_rows = descriptor_mn_major(dq_columns, Shape::kSlab);
  uint64_t const other_k_rows =
      descriptor_mn_major(dq_columns + Shape::kOffsetOtherK - OwnDq::first_slab(rank) * Shape::kSlab, Shape::kSlab);
  uint64_t const p_left = descriptor_k_major(smem + Shape::kOffsetP);
  unsigned const p_words = smem + Shape::kOffsetP + fragment_offset(warp, lane);
  unsigned const factor_words = Shape::kTwoP ? p_words + Shape::kSlab : p_words;
  unsigned const other_smem = cluster_address(smem, rank ^ 1);

  RingPosition<2> slot;  // of dS
  RingPosition<Shape::kStages> q_slot;
  RingPosition<Shape::kStagesDout> dout_slot;
  unsigned parity = 0;
  auto release = [&](Mbarrier const& barrier) {
    if (lane == 0) barrier.arrive();
  };
  auto release_to_both = [&](Mbarrier const& barrier) {
    if (lane == 0) {
      barrier.arrive();
      arrive_remote(other_smem + (barrier.address - smem));
    }
  };

  while (true) {
    barriers.full_k().wait(parity);
    KeyTile const tile = read_key_tile(smem + Shape::kOffsetTile);
    if (tile.n_block < 0) break;
    int const n0 = tile.n_block * Traits::kBlockN;
    int const n_own = n0 + rank * Shape::kKeys;
    if constexpr (Traits::kVarlen) {
      if (tile.b == params.batch) {  // the virtual sequence of all tokens outside the others
        release(barriers.empty_k());
        if constexpr (kGroup == 1) {
          barriers.full_v().wait(parity);
          release(barriers.empty_v());
        }
        parity ^= 1;
        int const part = 2 * tile.n_block + rank;
        zero_unused_rows<Shape::kConsumers>(
            reinterpret_cast<Element*>(params.dk) + index_t(tile.h) * params.dk_stride_h, params.dk_stride_n,
            params.dk_stride_d, params.cu_seqlens_k, params.batch, params.total_k, params.head_dim, part,
            2 * params.num_n_blocks, tid);
        zero_unused_rows<Shape::kConsumers>(
            reinterpret_cast<Element*>(params.dv) + index_t(tile.h) * params.dv_stride_h, params.dv_stride_n,
            params.dv_stride_d, params.cu_seqlens_k, params.batch, params.total_k, params.head_dim_v, part,
            2 * params.num_n_blocks, tid);
        continue;
      }
    }
    SeqlenInfo<Traits::kVarlen, Traits::kSequsedK> const seqlen(params, tile.b);
    PositionMask<Traits::kBand> const mask(params, seqlen.len_q, seqlen.len_k);
    QueryRange<Traits> const range(params, mask, tile.n_block);
    int tiles_left = range.count * params.heads_per_group;

    if constexpr (Traits::kDbiasStore) {
      // What no product reaches.
      int const first = tiles_left > 0 ? range.first * kBlockM : seqlen.len_q;
      int const last = tiles_left > 0 ? (range.first + range.count) * kBlockM : seqlen.len_q;
      int const cols = min(Shape::kKeys, params.seqlen_k - n_own);
      for (int head = tile.h * params.heads_per_group; head < (tile.h + 1) * params.heads_per_group; ++head) {
        constexpr int kWarps = Shape::kConsumers / 32;
        zero_dbias<Traits, kWarps>(params, tile.b, head, n_own, cols, 0, min(first, seqlen.len_q), tid);
        zero_dbias<Traits, kWarps>(params, tile.b, head, n_own, cols, last, seqlen.len_q, tid);
      }
    }

    AccTile dk[1][OwnK::kRegisterTiles], dv[1][OwnV::kRegisterTiles];
    clear(dk);
    clear(dv);
    using Lengths = SeqlenInfo<Traits::kVarlen, Traits::kSequsedK>;
    auto store_gradients = [&](KeyTile const& of, Lengths const& lengths, int key, int lane) {
      if constexpr (OwnV::kAny) {
        store_rows<Element>(reinterpret_cast<Element*>(params.dv) + index_t(lengths.batch_index) * params.dv_stride_b +
                                (index_t(lengths.k_row0) + key) * params.dv_stride_n +
                                index_t(of.h) * params.dv_stride_h + OwnV::kFirst * kSlabColumns,
                            params.dv_stride_n, dv, Traits::kDropout ? params.dropout_multiplier : 1.0f,
                            lengths.len_k_slot - key, params.head_dim_v - OwnV::kFirst * kSlabColumns, lane);
      }
      if constexpr (OwnK::kAny) {
        store_rows<Element>(reinterpret_cast<Element*>(params.dk) + index_t(lengths.batch_index) * params.dk_stride_b +
                                (index_t(lengths.k_row0) + key) * params.dk_stride_n +
                                index_t(of.h) * params.dk_stride_h + OwnK::kFirst * kSlabColumns,
                            params.dk_stride_n, dk, params.scale, lengths.len_k_slot - key,
                            params.head_dim - OwnK::kFirst * kSlabColumns, lane);
      }
    };
    if (tiles_left == 0) {
      release(barriers.empty_k());
      if constexpr (kGroup == 1) {
        barriers.full_v().wait(parity);
        release(barriers.empty_v());
      }
      parity ^= 1;
      store_gradients(tile, seqlen, n_own + 16 * warp, lane);
      continue;
    }

    ScoreMap<Traits> const map(params);
    WideScores<Traits, Shape> const scores{map, mask, n_own + 16 * warp + (lane >> 2), lane & 3};
    int m = range.start;
    int h = tile.h * params.heads_per_group;
    if constexpr (Traits::kVarlen || Traits::kSequsedK || Traits::kMask) {
      // Keys beyond the sequence belong to another one or to nobody: they may hold NaN, and dQ multiplies them by zero.
      // Keys that a padding mask hides likewise.
      bool hides = false;
      if constexpr (Traits::kMask) {
        HiddenKeys const hidden(params, tile.b, h, params.heads_per_group);
        hides = hidden.any;
        if (hides) {
          zero_hidden_tile_rows<64, Shape::kSlabs>(smem, hidden, n_own, seqlen.len_k, 0, 64, consumer_thread(),
                                                   Shape::kConsumers);
          zero_hidden_tile_rows<64, Shape::kSlabsDq>(smem + Shape::kOffsetOtherK, hidden,
                                                     n0 + (rank ^ 1) * Shape::kKeys, seqlen.len_k, 0, 64,
                                                     consumer_thread(), Shape::kConsumers);
        }
      }
      if (hides || seqlen.len_k - n0 < Traits::kBlockN) {
        int const valid = seqlen.len_k - n_own;
        int const other_valid = seqlen.len_k - (n0 + (rank ^ 1) * Shape::kKeys);
        if (valid < 64)
          zero_tile_rows<64, Shape::kSlabs>(smem, max(valid, 0), 64, consumer_thread(), Shape::kConsumers);
        if (other_valid < 64) {
          zero_tile_rows<64, Shape::kSlabsDq>(smem + Shape::kOffsetOtherK, max(other_valid, 0), 64, consumer_thread(),
                                              Shape::kConsumers);
        }
        fence_async_proxy();
        meet_other_group<kGroup, Shape::kConsumers>(3);
      }
    }
    if constexpr (kGroup == 1) barriers.full_v().wait(parity);

    // Of this tile and, with `before`, of the query tile before.
    RingPosition<2> before;
    int done = 0;  // query tiles
    int m_before = 0, h_before = 0;
    auto start_scores = [&](auto& s, int stage) {  // group 0: S, group 1: dP
      constexpr int kBytes = kGroup == 0 ? Shape::kBytesQ : Shape::kBytesDout;
      pin_registers(s);
      begin_products();
      start_product_abt<Element, 64, kBlockM, kGroup == 0 ? Traits::kHeadDim : Traits::kHeadDimV>(
          s, left, right + stage * (kBytes >> 4));
      commit_products();
    };
    auto start_dk = [&](auto const& product) {
      pin_registers(dk);
      begin_products();
      if constexpr (OwnK::kAny) product();
      commit_products();
    };
    // Of the query tile before; what it makes of nothing before the first tile is not used.
    auto start_dq = [&](auto& dq) {
      if (done > 0) barriers.full_ds(before.stage).wait(before.parity);
      pin_registers(dq);
      begin_products();
      uint64_t const a = ds_left + before.stage * (Shape::kBytesDs >> 4);
      start_product_slab<Element>(dq, a, k_rows, false);
      start_product_slab<Element>(dq, a + (Shape::kSlab >> 4), other_k_rows, true);
      commit_products();
    };
    auto start_dv = [&](auto const& product) {
      pin_registers(dv);
      begin_products();
      if constexpr (OwnV::kAny) product();
      commit_products();
    };
    // dq of 64 queries and this group's columns.
    auto add_dq = [&](auto& dq) {
      if (done == 0) return;
      if (lane == 0) arrive_remote(other_smem + (barriers.empty_ds(before.stage).address - smem));
      index_t const row0 =
          accumulator_row0<Traits::kVarlen, kBlockM>(seqlen.q_row0, tile.b) + index_t(m_before) * kBlockM;
      // Reading the thread's index again waits for all that is queued for shared memory, 150 to 250 cycles.
      int const row_warp = (Shape::kOverlapped ? opaque(tid) : consumer_thread()) >> 5 & 3;
      float* const to = params.dq_accum + index_t(seqlen.batch_index) * params.dq_accum_stride_b +
                        index_t(h_before) * params.dq_accum_stride_h + row0 * Traits::kHeadDim +
                        (row_warp * Shape::kTilesD + dq_tile0) * kAccumBlock;
#pragma unroll
      for (int d = 0; d < OwnDq::kTiles; ++d) {
        if (Shape::kTilesD % 8 == 0 || dq_tile0 + d < Shape::kTilesD) {
          add_block(to + d * kAccumBlock, dq[0][d], lane);
        }
      }
    };
    auto end_tile = [&] {
      m_before = m;
      h_before = h;
      ++done;
      before = slot;
      slot.advance();
      q_slot.advance();
      dout_slot.advance();
      range.next(h, m);
    };

    AccTile s[1][Shape::kTilesM];
    [[maybe_unused]] FragmentA<Element> p[Shape::kStepsM];
    // Group 0: P of query tile m of head h, whose scores are in s, in p and for the other group.
    [[maybe_unused]] auto give_probabilities = [&](int h, int m, int stage) {
      int const m0 = m * kBlockM;
      bool const masked = (kReadsRows && seqlen.len_q - m0 < kBlockM) || !mask.keeps_tile(m0, kBlockM, n_own, 64);
      WideScoreOperands<Traits> const operands(params, tile.b, h, seqlen.len_q, seqlen.len_k, m0, n_own + 16 * warp,
                                               lane);
      scores.probabilities(s, p, operands, factor_words, smem + Shape::kOffsetLse + stage * Shape::kBytesStatistic, m0,
                           masked);
#pragma unroll
      for (int step = 0; step < Shape::kStepsM; ++step) give_fragment(p_words, step, p[step]);
      fence_async_proxy();
      named_barrier_arrive(1, Shape::kConsumers);
    };
    if constexpr (kGroup == 0) {
      barriers.full_q(q_slot.stage).wait(q_slot.parity);
      start_scores(s, q_slot.stage);
      wait_products<0>();
      pin_registers(s);
      if constexpr (Shape::kOverlapped) give_probabilities(h, m, q_slot.stage);
    }
#pragma unroll 1
    for (; tiles_left > 0; --tiles_left) {
      int const m0 = m * kBlockM;
      int const valid = Traits::kVarlen ? seqlen.len_q - m0 : kBlockM;
      AccTile dq[1][OwnDq::kTiles];
      uint64_t const q_tile = q_rows + q_slot.stage * (Shape::kBytesQ >> 4);
      uint64_t const dout_tile = dout_rows + dout_slot.stage * (Shape::kBytesDout >> 4);
      if constexpr (kGroup == 0) {
        if (tid == 0) barriers.full_ds(slot.stage).arrive_and_expect(Shape::kSlab);
        if constexpr (!Shape::kOverlapped) give_probabilities(h, m, q_slot.stage);
        start_dq(dq);
        barriers.full_dout(dout_slot.stage).wait(dout_slot.parity);
        if (valid < kBlockM) {
          // Queries beyond the sequence belong to another one: dV and dK multiply them by zero, and they may hold NaN.
          zero_tile_rows<kBlockM, Shape::kSlabs>(smem + Shape::kOffsetQ + q_slot.stage * Shape::kBytesQ, valid, kBlockM,
                                                 consumer_thread() & 127, 128);
          fence_async_proxy();
          meet_other_group<kGroup, Shape::kConsumers>(6 + 2 * slot.stage);
        }
        pin_registers(p);
        start_dv([&] { start_product_ab<Element>(dv, p, dout_tile); });
        // Of the next tile, if there is one.
        RingPosition<Shape::kStages> next = q_slot;
        next.advance();
        if constexpr (Shape::kOverlapped) {
          if (tiles_left > 1) barriers.full_q(next.stage).wait(next.parity);
          start_scores(s, next.stage);
          wait_products<2>();
          pin_registers(dq);
          add_dq(dq);
          wait_products<1>();
        } else {
          wait_products<1>();
          pin_registers(dq);
          add_dq(dq);
          wait_products<0>();
        }
        pin_registers(dv);
        pin_registers(p);
        release_to_both(barriers.empty_dout(dout_slot.stage));
        if constexpr (!Shape::kOverlapped) {
          if (tiles_left > 1) barriers.full_q(next.stage).wait(next.parity);
          start_scores(s, next.stage);
        }
        named_barrier_sync(2, Shape::kConsumers);
        start_dk([&] {
          start_product_transposed<Element, Shape::kStepsM>(dk, ds_transposed + slot.stage * (Shape::kBytesDs >> 4),
                                                            q_tile);
        });
        if constexpr (Shape::kOverlapped) {
          wait_products<1>();
          pin_registers(s);
          if (tiles_left > 1) {
            int next_h = h, next_m = m;
            range.next(next_h, next_m);
            give_probabilities(next_h, next_m, next.stage);
          }
        }
        // Nothing stays in flight over the end of the loop: ptxas runs out of registers otherwise.
        wait_products<0>();
        pin_registers(s);
        pin_registers(dk);
      } else {
        bool const masked = (kReadsRows && seqlen.len_q - m0 < kBlockM) || !mask.keeps_tile(m0, kBlockM, n_own, 64);
        start_dq(dq);
        barriers.full_dout(dout_slot.stage).wait(dout_slot.parity);
        start_scores(s, dout_slot.stage);
        WideGradients<Traits> gradients(params, tile.b, h, seqlen.len_q, m0, n_own + 16 * warp, lane);
        unsigned const row_delta = smem + Shape::kOffsetDelta + dout_slot.stage * Shape::kBytesStatistic;
        if constexpr (Shape::kOverlapped) gradients.read_delta(row_delta);
        wait_products<1>();
        pin_registers(dq);
        if constexpr (!Shape::kOverlapped) add_dq(dq);
        if (valid < kBlockM) {
          wait_products<0>();
          zero_tile_rows<kBlockM, Shape::kSlabsV>(smem + Shape::kOffsetDout + dout_slot.stage * Shape::kBytesDout,
                                                  valid, kBlockM, consumer_thread() & 127, 128);
          fence_async_proxy();
          meet_other_group<kGroup, Shape::kConsumers>(6 + 2 * slot.stage);
        }
        named_barrier_sync(1, Shape::kConsumers);
        start_dv([&] { start_product_slab<Element>(dv, p_left, dout_tile, true); });
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
        FragmentA<Element> ds[Shape::kStepsM];
        pack_fragments<Element>(ds, s);
        wait_products<0>();
        pin_registers(dv);
        release_to_both(barriers.empty_dout(dout_slot.stage));
        // The other block is done with what this one sent two tiles ago, hence so is the copy.
        wait_for_room(barriers.empty_ds(slot.stage), slot.parity ^ 1);
        unsigned const own_ds = smem + Shape::kOffsetDs + slot.stage * Shape::kBytesDs;
        store_transposed<Element>(own_ds, ds, warp, lane);
        fence_async_proxy();
        named_barrier_sync(5, 128);
        named_barrier_arrive(2, Shape::kConsumers);
        if (thread == 0) {
          bulk_send(other_smem + (own_ds + Shape::kSlab - smem), own_ds, Shape::kSlab,
                    other_smem + (barriers.full_ds(slot.stage).address - smem));
        }
        __syncwarp();
        barriers.full_q(q_slot.stage).wait(q_slot.parity);
        pin_registers(ds);
        start_dk([&] { start_product_ab<Element>(dk, ds, q_tile); });
        if constexpr (Shape::kOverlapped) add_dq(dq);
        wait_products<0>();
        pin_registers(dk);
        pin_registers(ds);
      }
      release_to_both(barriers.empty_q(q_slot.stage));
      end_tile();
    }
    AccTile dq[1][OwnDq::kTiles];
    start_dq(dq);
    if constexpr (Shape::kReadsAgain) {
      KeyTile const again = read_key_tile(smem + Shape::kOffsetTile);
      Lengths const lengths(params, again.b);
      int const place = consumer_thread();
      int const key = again.n_block * Traits::kBlockN + cluster_rank() * Shape::kKeys + 16 * (place >> 5 & 3);
      // The lane too with packed lengths alone: each choice spills 4 bytes in the other case.
      store_gradients(again, lengths, key, Traits::kVarlen ? place & 31 : lane);
    } else {
      store_gradients(tile, seqlen, n_own + 16 * warp, lane);
    }
    wait_products<0>();
    pin_registers(dq);
    // Read again: over the loop there is no register for it.
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(parity) : "r"(smem + Shape::kOffsetTile + 12) : "memory");
    __syncwarp();
    release(barriers.empty_k());
    add_dq(dq);
  }
}

template <class Traits>
NVRTC_ATTN_DEVICE void backward_hopper_wide(HopperBackwardParams const& params) {
  using Shape = WideBackwardShape<Traits>;
  extern __shared__ __align__(1024) unsigned char smem_pointer[];
  unsigned const smem = shared_address(smem_pointer);
  WideBackwardBarriers<Shape> const barriers{smem + Shape::kOffsetBarriers};
  int const rank = cluster_rank();
  if (threadIdx.x == 0) barriers.init();
  cluster_sync();
  // A broadcast tells the compiler that the role is uniform over the warp.
  int const warp_group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warp_group == 0) {
    give_registers<40>();
    if (threadIdx.x < 32) load_wide_operands<Traits>(params, barriers, smem, rank);
  } else if (warp_group == 1) {
    take_registers<232>();
    consume_wide_tiles<0, Traits>(params, barriers, smem, rank);
  } else {
    take_registers<232>();
    consume_wide_tiles<1, Traits>(params, barriers, smem, rank);
  }
  // Neither block's shared memory goes away while the other may write to it.
  cluster_sync();
}

}  // namespace nvrtc_attn
