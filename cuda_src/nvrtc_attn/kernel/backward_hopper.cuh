// Attention backward on Hopper (sm_90a): dk and dv of one key tile at a time, dq added into a float32 workspace. Where one
// tile holds all keys (kOneKeyTile), dq is complete and goes to its own tensor.
//
// Roles: warp-group 0 loads (one thread issues all copies); each of the other two warp-groups owns 64 of the tile's 128 keys.
// Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are left operands of dV += P^T dO and
// dK += dS^T Q without leaving registers. dS goes to shared memory too: dQ = dS K needs all keys, so the groups meet once a
// query tile, and each computes its share of dQ (64 rows of 128, or 64 columns of 128) and adds it to dq_accum.
//
// The products of a query tile are started so that the tensor cores have one to work on while the warps compute:
//   start S, dP -> P under dP -> start dV -> dS under dV -> meet -> start dQ, dK -> add dQ to dq_accum under dK.
// The last one takes as long as dK: red.global is the narrowest path of this kernel, and what runs beside it is free.
//
// Dropout's decisions and the order of additions in the deterministic pass are made by warps of the loading group that load
// nothing, the former with a fourth warp-group: hopper/backward_helpers.cuh.
//
// Shared memory (slabs of 64 columns, see hopper/wgmma.cuh): K, V, kNumStages x Q, kNumStages x dO, 2 x dS[query][key],
// row_lse and delta for each slot, which tile it is, mbarriers, what the helpers need. Everything that a tile writes leaves
// from registers, but for a dbias: with kBiasTiles the slots of dS also bring the bias and take its gradient away
// (hopper/score_tile_transposed.cuh), and zeros for query tiles that no product reaches leave from a slab of zeros.
//
// Barriers: mbarriers full / empty for K, V and every slot of Q and dO. `full` counts the bytes of the copies, `empty` one
// arrival per consumer warp. full_k also announces the tile. Named barrier 1 is all consumers: dS is complete. Two slots of
// dS make one meeting a tile enough: who writes slot j % 2 has met the other group after its product with tile j - 2.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../collective/score_gradient_transposed.cuh"
#include "../hopper/backward_schedule.cuh"
#include "../hopper/backward_scores.cuh"
#include "../hopper/barrier.cuh"
#include "../hopper/bulk.cuh"
#include "../hopper/gradient_store.cuh"
#include "../hopper/ordered_dq.cuh"
#include "../hopper/tma.cuh"

namespace nvrtc_attn {

template <class Traits>
struct HopperBackwardShape {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kGroups = kBlockN / 64;
  static constexpr int kConsumers = 128 * kGroups;
  static constexpr int kTilesM = kBlockM / 8;
  static constexpr int kStepsM = kBlockM / 16;
  static constexpr int kTilesD = kHeadDim / 8;
  static constexpr int kTilesDv = kHeadDimV / 8;
  static constexpr int kSlabs = (kHeadDim + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabsV = (kHeadDimV + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabQ = kBlockM * kSlabRowBytes;
  static constexpr int kSlabK = kBlockN * kSlabRowBytes;
  static constexpr int kBytesQ = kSlabs * kSlabQ;
  static constexpr int kBytesDout = kSlabsV * kSlabQ;
  static constexpr int kBytesK = kSlabs * kSlabK;
  static constexpr int kBytesV = kSlabsV * kSlabK;
  static constexpr int kBytesDs = kGroups * kSlabQ;
  static constexpr int kBytesStatistic = kBlockM * 4;
  static constexpr bool kBiasTiles = Traits::kBiasTiles;
  static constexpr bool kStoresTiles = kBiasTiles && Traits::kDbiasStore;
  static constexpr int kBytesZeros = kStoresTiles && Traits::kBand ? kSlabQ : 0;

  // dQ of a group: 64 query rows and all columns, or all 64 rows and one slab, or half a slab, of columns.
  static constexpr bool kSplitRows = kBlockM == 128;
  static constexpr int kTilesDq = kSplitRows ? kTilesD : kSlabs * 4;

  static constexpr int kOffsetV = kBytesK;
  static constexpr int kOffsetQ = kOffsetV + kBytesV;
  static constexpr int kOffsetDout = kOffsetQ + kStages * kBytesQ;
  static constexpr int kOffsetDs = kOffsetDout + kStages * kBytesDout;
  static constexpr int kOffsetZeros = kOffsetDs + 2 * kBytesDs;
  static constexpr int kOffsetLse = kOffsetZeros + kBytesZeros;
  static constexpr int kOffsetDelta = kOffsetLse + kStages * kBytesStatistic;
  static constexpr int kOffsetTile = kOffsetDelta + kStages * kBytesStatistic;
  static constexpr int kOffsetBarriers = kOffsetTile + 16;
  static constexpr int kOffsetHelpers = kOffsetBarriers + 8 * (4 + (kBiasTiles ? 6 : 4) * kStages);
  static constexpr int kBytes = kOffsetHelpers + HelperShape<Traits>::kBytes;
  static_assert(kBytes == Traits::kSmemBytes, "smem_bytes of the config and the layout of the kernel differ");

  static_assert(kGroups == 2 && Traits::kNumThreads == 128 + kConsumers + HelperShape<Traits>::kThreads,
                "two groups share the products of dQ");
  static_assert(kStages == 2, "slots of dS go with those of Q");
  static_assert(!(Traits::kOneKeyTile && Traits::kVarlen), "dq of tokens outside every sequence");
  static_assert(!(Traits::kOneKeyTile && Traits::kOrdered), "nothing to order");
  static_assert(!(kBiasTiles && Traits::kKeepWords), "P waits for neither or for one of them");
  static_assert(kBlockM == 64 || kBlockM == 128, "a group computes 64 rows of dQ");
  static_assert(kSplitRows ? kSlabs == 1 : kSlabs <= kGroups, "columns of dQ");
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "matrix product shapes");
  static_assert(!kBiasTiles || (sizeof(typename Traits::Bias) == 2 && !Traits::kSoftcap && !Traits::kVarlen),
                "what the tiles of bias and dS have in common");
};

template <class Shape>
struct BackwardBarriers {
  unsigned base;  // shared address
  NVRTC_ATTN_DEVICE Mbarrier at(int i) const { return {base + 8 * i}; }
  NVRTC_ATTN_DEVICE Mbarrier full_k() const { return at(0); }
  NVRTC_ATTN_DEVICE Mbarrier empty_k() const { return at(1); }
  NVRTC_ATTN_DEVICE Mbarrier full_v() const { return at(2); }
  NVRTC_ATTN_DEVICE Mbarrier empty_v() const { return at(3); }
  NVRTC_ATTN_DEVICE Mbarrier full_q(int stage) const { return at(4 + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_q(int stage) const { return at(4 + Shape::kStages + stage); }
  NVRTC_ATTN_DEVICE Mbarrier full_dout(int stage) const { return at(4 + 2 * Shape::kStages + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_dout(int stage) const { return at(4 + 3 * Shape::kStages + stage); }
  NVRTC_ATTN_DEVICE Mbarrier full_bias(int stage) const { return at(4 + 4 * Shape::kStages + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty_bias(int stage) const { return at(4 + 5 * Shape::kStages + stage); }

  NVRTC_ATTN_DEVICE void init() const {
    constexpr int kWarps = 4 * Shape::kGroups;
    full_k().init(1);
    full_v().init(1);
    empty_k().init(kWarps);
    empty_v().init(kWarps);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      full_q(stage).init(1);
      empty_q(stage).init(kWarps);
    }
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      full_dout(stage).init(1);
      empty_dout(stage).init(kWarps);
    }
    if constexpr (Shape::kBiasTiles) {
      for (int stage = 0; stage < Shape::kStages; ++stage) {
        full_bias(stage).init(1);
        empty_bias(stage).init(kWarps);
      }
    }
    fence_barrier_init();
  }
};

// The loading warp. All lanes follow the schedule, one issues.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void load_operands(HopperBackwardParams const& params, BackwardBarriers<Shape> const& barriers,
                                     unsigned smem) {
  bool const issuer = threadIdx.x == 0;
  if (issuer) {
    prefetch_tensor_map(params.tensor_map_q);
    prefetch_tensor_map(params.tensor_map_k);
    prefetch_tensor_map(params.tensor_map_v);
    prefetch_tensor_map(params.tensor_map_dout);
    if constexpr (Shape::kBiasTiles) prefetch_tensor_map(params.tensor_map_bias);
    if constexpr (Shape::kStoresTiles) prefetch_tensor_map(params.tensor_map_dbias);
  }
  RingPosition<Shape::kStages> q_slot;
  RingPosition<Shape::kStages> dout_slot;
  unsigned parity = 0;
  HelperBarriers<Traits> const helpers{smem + Shape::kOffsetHelpers};
  auto announce = [&](int n_block, int h, int b) {
    barriers.empty_k().wait(parity ^ 1);
    if (issuer) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem + Shape::kOffsetTile), "r"(n_block), "r"(h),
                   "r"(b), "r"(parity ^ 1)
                   : "memory");
    }
  };
  // Ordered additions: a block that runs must not wait for one that does not, so that even the first tile is taken.
  auto take_tile = [&] {
    int taken = 0;
    if (issuer) taken = (Traits::kOrdered ? 0 : int(gridDim.x)) + atomicAdd(tile_counter(params), 1);
    return uniform(taken);
  };
  int t = Traits::kOrdered ? take_tile() : int(blockIdx.x);
  while (t < params.num_tiles) {
    KeyTile const tile = key_tile<Traits::kOrdered>(params, t);
    helpers.announce(tile, parity, issuer);
    bool const is_real = !(Traits::kVarlen && tile.b == params.batch);
    SeqlenInfo<Traits::kVarlen, Traits::kSequsedK> const seqlen(params, is_real ? tile.b : 0);
    int const n0 = tile.n_block * Shape::kBlockN;
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
      auto prefetch_bias = [&](int h, int m) {
#pragma unroll
        for (int slab = 0; slab < Shape::kGroups; ++slab) {
          prefetch_box(params.tensor_map_bias, n0 + slab * kSlabColumns,
                       params.bias_stride_m == 0 ? 0 : m * Shape::kBlockM, params.bias_stride_h == 0 ? 0 : h,
                       params.bias_stride_b == 0 ? 0 : seqlen.batch_index);
        }
      };
      auto load_q = [&] {
        int const s = q_slot.stage;
        Mbarrier const full = barriers.full_q(s);
        barriers.empty_q(s).wait(q_slot.parity ^ 1);
        if (issuer) {
          full.arrive_and_expect(Shape::kBytesQ + Shape::kBytesStatistic);
#pragma unroll
          for (int slab = 0; slab < Shape::kSlabs; ++slab) {
            load_box(smem + Shape::kOffsetQ + s * Shape::kBytesQ + slab * Shape::kSlabQ, params.tensor_map_q,
                     full.address, slab * kSlabColumns, seqlen.q_row0 + m * Shape::kBlockM,
                     params.q_stride_h == 0 ? 0 : h, q_b, kEvictLast);
          }
          bulk_load(smem + Shape::kOffsetLse + s * Shape::kBytesStatistic,
                    params.row_lse + (sequence + index_t(h) * params.delta_stride_h + m * Shape::kBlockM),
                    Shape::kBytesStatistic, full.address);
        }
        if constexpr (Shape::kBiasTiles) {
          barriers.empty_bias(s).wait(q_slot.parity ^ 1);
          if (issuer) {
            Mbarrier const full_bias = barriers.full_bias(s);
            full_bias.arrive_and_expect(params.bias_stride_m == 0 ? Shape::kGroups * kSlabRowBytes : Shape::kBytesDs);
#pragma unroll
            for (int slab = 0; slab < Shape::kGroups; ++slab) {
              load_box(smem + Shape::kOffsetDs + s * Shape::kBytesDs + slab * Shape::kSlabQ, params.tensor_map_bias,
                       full_bias.address, n0 + slab * kSlabColumns, params.bias_stride_m == 0 ? 0 : m * Shape::kBlockM,
                       params.bias_stride_h == 0 ? 0 : h, params.bias_stride_b == 0 ? 0 : seqlen.batch_index,
                       kEvictFirst);
            }
          }
        }
        q_slot.advance();
      };
      auto load_dout = [&] {
        int const s = dout_slot.stage;
        Mbarrier const full = barriers.full_dout(s);
        barriers.empty_dout(s).wait(dout_slot.parity ^ 1);
        if (issuer) {
          full.arrive_and_expect(Shape::kBytesDout + Shape::kBytesStatistic);
#pragma unroll
          for (int slab = 0; slab < Shape::kSlabsV; ++slab) {
            load_box(smem + Shape::kOffsetDout + s * Shape::kBytesDout + slab * Shape::kSlabQ, params.tensor_map_dout,
                     full.address, slab * kSlabColumns, seqlen.q_row0 + m * Shape::kBlockM,
                     params.dout_stride_h == 0 ? 0 : h, dout_b, kEvictLast);
          }
          bulk_load(smem + Shape::kOffsetDelta + s * Shape::kBytesStatistic,
                    params.delta + (sequence + index_t(h) * params.delta_stride_h + m * Shape::kBlockM),
                    Shape::kBytesStatistic, full.address);
        }
        dout_slot.advance();
      };
      if constexpr (Shape::kBiasTiles) {
        // Into L2 while the slots are still another tile's: what nobody has read yet would be waited for. With two query tiles
        // to a key tile that is 3.6 % of the time; with sixteen it costs 1.3 %.
        if (issuer && range.count <= 4) {
#pragma unroll
          for (int slab = 0; slab < Shape::kSlabs; ++slab) {
            prefetch_box(params.tensor_map_k, slab * kSlabColumns, n0, params.k_stride_h == 0 ? 0 : tile.h,
                         params.k_stride_b == 0 ? 0 : seqlen.batch_index);
          }
          int next_h = h, next_m = m;
          for (int left = min(range.count, 2); left > 0; --left) {
            prefetch_bias(next_h, next_m);
            range.next(next_h, next_m);
          }
        }
      }
      // Slots become free in this order at the end of the tile before.
      barriers.empty_v().wait(parity ^ 1);
      if (issuer) {
        barriers.full_v().arrive_and_expect(Shape::kBytesV);
#pragma unroll
        for (int slab = 0; slab < Shape::kSlabsV; ++slab) {
          load_box(smem + Shape::kOffsetV + slab * Shape::kSlabK, params.tensor_map_v, barriers.full_v().address,
                   slab * kSlabColumns, seqlen.k_row0 + n0, params.v_stride_h == 0 ? 0 : tile.h,
                   params.v_stride_b == 0 ? 0 : seqlen.batch_index, kEvictFirst);
        }
      }
      load_q();
      load_dout();
      announce(tile.n_block, tile.h, tile.b);
      if (issuer) {
        barriers.full_k().arrive_and_expect(Shape::kBytesK);
#pragma unroll
        for (int slab = 0; slab < Shape::kSlabs; ++slab) {
          load_box(smem + slab * Shape::kSlabK, params.tensor_map_k, barriers.full_k().address, slab * kSlabColumns,
                   seqlen.k_row0 + n0, params.k_stride_h == 0 ? 0 : tile.h,
                   params.k_stride_b == 0 ? 0 : seqlen.batch_index, kEvictFirst);
        }
      }
#pragma unroll 1
      for (int left = range.count * params.heads_per_group - 1; left > 0; --left) {
        range.next(h, m);
        load_q();
        load_dout();
      }
    }
    if constexpr (Shape::kBytesZeros > 0) {
      // Query tiles of every head that no product reaches.
      if (issuer && is_real) {
        for (int head = tile.h * params.heads_per_group; head < (tile.h + 1) * params.heads_per_group; ++head) {
          for (int m = 0; m < params.num_m_blocks; ++m) {
            if (m >= range.first && m < range.first + range.count) continue;
#pragma unroll
            for (int slab = 0; slab < Shape::kGroups; ++slab) {
              store_box(params.tensor_map_dbias, smem + Shape::kOffsetZeros, n0 + slab * kSlabColumns,
                        m * Shape::kBlockM, head, tile.b);
            }
          }
        }
        commit_stores();
      }
    }
    parity ^= 1;
    t = take_tile();
  }
  helpers.announce({-1, 0, 0}, parity, issuer);
  announce(-1, 0, 0);
  if (issuer) barriers.full_k().arrive();
  if constexpr (Shape::kBytesZeros > 0) wait_stores_read();  // before the block's shared memory becomes another's
}

// One consumer warp-group.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void consume_key_tiles(HopperBackwardParams const& params, BackwardBarriers<Shape> const& barriers,
                                         unsigned char* smem_pointer, unsigned smem, int group) {
  using Element = typename Shape::Element;
  constexpr int kBlockM = Shape::kBlockM;
  // P and dS of a tile at once, by the code of the portable family, once both products are there: what needs more registers
  // than the other loop leaves.
  constexpr bool kRich = (Traits::kHasBias && !Shape::kBiasTiles) || Traits::kMask ||
                         (Traits::kDropout && !Traits::kKeepWords) || (kBlockM == 64 && Traits::kSoftcap);
  constexpr bool kLengthsOnDevice = Traits::kVarlen || Traits::kSequsedK;
  // Of dv, under the last product; takes registers.
  constexpr bool kEarlyStore = !kLengthsOnDevice || (kBlockM == 128 && !Traits::kKeepWords);
  int const tid = int(threadIdx.x) - 128;
  int const lane = tid & 31;
  int const warp = tid >> 5 & 3;  // of the group
  uint64_t const k_left = descriptor_k_major(smem + group * 64 * kSlabRowBytes);
  uint64_t const v_left = descriptor_k_major(smem + Shape::kOffsetV + group * 64 * kSlabRowBytes);
  uint64_t const q_right = descriptor_k_major(smem + Shape::kOffsetQ);
  uint64_t const dout_right = descriptor_k_major(smem + Shape::kOffsetDout);
  uint64_t const q_rows = descriptor_mn_major(smem + Shape::kOffsetQ, Shape::kSlabQ);
  uint64_t const dout_rows = descriptor_mn_major(smem + Shape::kOffsetDout, Shape::kSlabQ);
  uint64_t const ds_left =
      descriptor_k_major(smem + Shape::kOffsetDs + (Shape::kSplitRows ? group * 64 * kSlabRowBytes : 0));
  uint64_t const k_rows = descriptor_mn_major(
      smem + (Shape::kSplitRows ? 0 : group * (Shape::kSlabs == 1 ? kSlabRowBytes / 2 : Shape::kSlabK)), Shape::kSlabK);

  RingPosition<Shape::kStages> slot;  // of Q, dO and dS, and of keep words
  HelperBarriers<Traits> const helpers{smem + Shape::kOffsetHelpers};
  unsigned parity = 0;
  auto release = [&](Mbarrier const& barrier) {
    if (lane == 0) barrier.arrive();
  };

  while (true) {
    barriers.full_k().wait(parity);
    KeyTile const tile = read_key_tile(smem + Shape::kOffsetTile);
    if (tile.n_block < 0) break;
    int const n0 = tile.n_block * Shape::kBlockN;
    if constexpr (Traits::kVarlen) {
      if (tile.b == params.batch) {  // the virtual sequence of all tokens outside the others
        barriers.full_v().wait(parity);
        parity ^= 1;
        release(barriers.empty_k());
        release(barriers.empty_v());
        zero_unused_rows<Shape::kConsumers>(
            reinterpret_cast<Element*>(params.dk) + index_t(tile.h) * params.dk_stride_h, params.dk_stride_n,
            params.dk_stride_d, params.cu_seqlens_k, params.batch, params.total_k, params.head_dim, tile.n_block,
            params.num_n_blocks, tid);
        zero_unused_rows<Shape::kConsumers>(
            reinterpret_cast<Element*>(params.dv) + index_t(tile.h) * params.dv_stride_h, params.dv_stride_n,
            params.dv_stride_d, params.cu_seqlens_k, params.batch, params.total_k, params.head_dim_v, tile.n_block,
            params.num_n_blocks, tid);
        continue;
      }
    }
    SeqlenInfo<Traits::kVarlen, Traits::kSequsedK> const seqlen(params, tile.b);
    PositionMask<Traits::kBand> const mask(params, seqlen.len_q, seqlen.len_k);
    QueryRange<Traits> const range(params, mask, tile.n_block);
    int left = range.count * params.heads_per_group;
    if constexpr (Traits::kDbiasStore && !Shape::kBiasTiles) {
      int const first = left > 0 ? range.first * kBlockM : seqlen.len_q;
      int const last = (range.first + range.count) * kBlockM;
      int const cols = min(Shape::kBlockN, params.seqlen_k - n0);
      for (int head = tile.h * params.heads_per_group; head < (tile.h + 1) * params.heads_per_group; ++head) {
        zero_dbias<Traits, Shape::kConsumers / 32>(params, tile.b, head, n0, cols, 0, min(first, seqlen.len_q), tid);
        if (left > 0) {
          zero_dbias<Traits, Shape::kConsumers / 32>(params, tile.b, head, n0, cols, last, seqlen.len_q, tid);
        }
      }
    }

    AccTile dk[1][Shape::kTilesD], dv[1][Shape::kTilesDv];
    clear(dk);
    clear(dv);
    if (left == 0) {
      barriers.full_v().wait(parity);
      parity ^= 1;
      release(barriers.empty_k());
      release(barriers.empty_v());
    } else {
      int const n_group = n0 + 64 * group;  // first key of the group
      ScoreMap<Traits> const map(params);
      ScoreBlock<Traits, Shape> const scores{map, mask, n_group + 16 * warp + (lane >> 2), lane & 3,
                                             TransposedBias<Traits>(params, warp, lane)};
      int m = range.start;
      int h = tile.h * params.heads_per_group;
      if constexpr (Traits::kVarlen || Traits::kSequsedK) {
        // Keys beyond the sequence belong to another one or to nobody: they may hold NaN, and dQ multiplies them by zero.
        int const valid = max(seqlen.len_k - n0, 0);
        if (valid < Shape::kBlockN) {
          zero_tile_rows<Shape::kBlockN, Shape::kSlabs>(smem, max(valid, 64 * group), 64 * group + 64, tid & 127, 128);
          fence_async_proxy();
          named_barrier_sync(2 + group, 128);
        }
      }
      barriers.full_v().wait(parity);
      auto start_s = [&](auto& s) {
        pin_registers(s);
        begin_products();
        start_product_abt<Element, Shape::kBlockN, kBlockM, Traits::kHeadDim>(
            s, k_left, q_right + slot.stage * (Shape::kBytesQ >> 4));
        commit_products();
      };
      auto start_dp = [&](auto& dp) {
        pin_registers(dp);
        begin_products();
        start_product_abt<Element, Shape::kBlockN, kBlockM, Traits::kHeadDimV>(
            dp, v_left, dout_right + slot.stage * (Shape::kBytesDout >> 4));
        commit_products();
      };
      auto start_dv = [&](auto& p) {
        pin_registers(dv);
        pin_registers(p);
        begin_products();
        start_product_ab<Element>(dv, p, dout_rows + slot.stage * (Shape::kBytesDout >> 4));
        commit_products();
      };
      auto start_dk = [&](auto& ds) {
        pin_registers(dk);
        pin_registers(ds);
        begin_products();
        start_product_ab<Element>(dk, ds, q_rows + slot.stage * (Shape::kBytesQ >> 4));
        commit_products();
      };
      auto start_dq = [&](auto& dq) {
        pin_registers(dq);
        begin_products();
        start_product_shared<Element, Shape::kSlabQ, Shape::kBlockN>(dq, ds_left + slot.stage * (Shape::kBytesDs >> 4),
                                                                     k_rows);
        commit_products();
      };
      auto ds_slab = [&] { return smem + Shape::kOffsetDs + slot.stage * Shape::kBytesDs + group * Shape::kSlabQ; };
      // Of this group's keys, for the products of both groups with K.
      auto share_ds = [&](auto const& ds) {
        store_transposed<Element>(ds_slab(), ds, warp, lane);
        fence_async_proxy();
      };
      auto statistics = [&](int offset) { return smem + offset + slot.stage * Shape::kBytesStatistic; };
      auto release_k = [&] {
        // Read again: over the loop there is no register for it.
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(parity) : "r"(smem + Shape::kOffsetTile + 12) : "memory");
        __syncwarp();
        release(barriers.empty_k());
      };
      auto zero_tail = [&](int m0) {
        // Queries beyond the sequence belong to another one: dV and dK multiply them by zero, and they may hold NaN.
        if constexpr (Traits::kVarlen) {
          int const valid = seqlen.len_q - m0;
          if (valid < kBlockM) {
            zero_tile_rows<kBlockM, Shape::kSlabs>(smem + Shape::kOffsetQ + slot.stage * Shape::kBytesQ, valid, kBlockM,
                                                   tid, Shape::kConsumers);
            zero_tile_rows<kBlockM, Shape::kSlabsV>(smem + Shape::kOffsetDout + slot.stage * Shape::kBytesDout, valid,
                                                    kBlockM, tid, Shape::kConsumers);
            fence_async_proxy();
            named_barrier_sync(1, Shape::kConsumers);
          }
        }
      };
      auto add_dq = [&](auto& dq, int head, int m0) {
        if constexpr (Traits::kOrdered) helpers.turn().wait(slot.stage);  // one phase a query tile, two slots
        int const row_block = (Shape::kSplitRows ? 4 * group : 0) + warp;
        int const tile0 = Shape::kSplitRows ? 0 : group * Shape::kTilesDq;
        if constexpr (Traits::kOneKeyTile) {
          int const row = m0 + 16 * row_block;
          store_rows<Element>(reinterpret_cast<Element*>(params.dq) + index_t(tile.b) * params.dq_stride_b +
                                  index_t(row) * params.dq_stride_m + index_t(head) * params.dq_stride_h + 8 * tile0,
                              params.dq_stride_m, dq, params.scale, seqlen.len_q - row, params.head_dim - 8 * tile0,
                              lane);
          return;
        }
        float* const to = params.dq_accum + index_t(seqlen.batch_index) * params.dq_accum_stride_b +
                          index_t(head) * params.dq_accum_stride_h +
                          (accumulator_row0<Traits::kVarlen, kBlockM>(seqlen.q_row0, tile.b) + m0) * Traits::kHeadDim +
                          (row_block * Shape::kTilesD + tile0) * kAccumBlock;
        int const tiles = min(Shape::kTilesDq, Shape::kTilesD - tile0);
#pragma unroll
        for (int d = 0; d < Shape::kTilesDq; ++d) {
          if (Shape::kSplitRows || Shape::kTilesD == 2 * Shape::kTilesDq || d < tiles) {
            add_block(to + d * kAccumBlock, dq[0][d], lane);
          }
        }
        if constexpr (Traits::kOrdered) {
          __syncwarp();
          release(helpers.added());
        }
      };
      auto store_dv = [&] {
        int const key = n_group + 16 * warp;
        store_rows<Element>(reinterpret_cast<Element*>(params.dv) + index_t(seqlen.batch_index) * params.dv_stride_b +
                                (index_t(seqlen.k_row0) + key) * params.dv_stride_n +
                                index_t(tile.h) * params.dv_stride_h,
                            params.dv_stride_n, dv, 1.0f, seqlen.len_k_slot - key, params.head_dim_v, lane);
      };

      bool stored = false;
      auto release_stored = [&] {
        if (warp == 0) {
          wait_stores_read();
          release(barriers.empty_bias(slot.stage ^ 1));
        }
      };
#pragma unroll 1
      for (; left > 0; --left) {
        int const m0 = m * kBlockM;
        FragmentA<Element> p[Shape::kStepsM], ds[Shape::kStepsM];
        AccTile s[1][Shape::kTilesM], dp[1][Shape::kTilesM];
        barriers.full_q(slot.stage).wait(slot.parity);
        start_s(s);
        barriers.full_dout(slot.stage).wait(slot.parity);
        start_dp(dp);
        if constexpr (Shape::kStoresTiles) {
          if (stored) release_stored();
        }
        if constexpr (kRich) {
          wait_products<0>();
          pin_registers(s);
          pin_registers(dp);
          // As many queries at a time as leave registers for what they read: bias words or mask bytes, Philox blocks.
          constexpr bool kAll = Traits::kHasBias && Traits::kMask && Traits::kSoftcap;
          constexpr int kChunk = Traits::kDropout || kAll ? 4 : Shape::kSlabs == 1 && Shape::kSlabsV == 1 ? 8 : 2;
          TransposedScoreGradient<Traits> const gradient(params, tile.b, h, seqlen.len_q, params.seqlen_k,
                                                         seqlen.len_k);
          float const* const lse =
              reinterpret_cast<float const*>(smem_pointer + (statistics(Shape::kOffsetLse) - smem));
          float const* const delta =
              reinterpret_cast<float const*>(smem_pointer + (statistics(Shape::kOffsetDelta) - smem));
#pragma unroll
          for (int c = 0; c < Shape::kTilesM / kChunk; ++c) {
            auto& s_chunk = reinterpret_cast<WarpTile<1, kChunk>&>(s[0][c * kChunk]);
            auto& dp_chunk = reinterpret_cast<WarpTile<1, kChunk>&>(dp[0][c * kChunk]);
            typename TransposedScoreGradient<Traits>::template BiasWords<1, kChunk> bias;
            int const i0 = m0 + 8 * kChunk * c;
            gradient.load_bias(bias, i0, n_group + 16 * warp, lane);
            gradient(s_chunk, dp_chunk, bias, lse + 8 * kChunk * c, delta + 8 * kChunk * c, i0, n_group + 16 * warp,
                     lane);
          }
          pack_fragments<Element>(p, s);
          zero_tail(m0);
          start_dv(p);
        } else {
          TransposedKeepWords words;
          if constexpr (Traits::kKeepWords) {
            helpers.full_keep(slot.stage).wait(slot.parity);
            words.load(helpers.keep(slot.stage), 64 * group + 16 * warp, lane);
            __syncwarp();
            release(helpers.empty_keep(slot.stage));
          }
          bool const masked =
              (Traits::kVarlen && m0 + kBlockM > seqlen.len_q) || !mask.keeps_tile(m0, kBlockM, n_group, 64);
          wait_products<1>();
          pin_registers(s);
          if constexpr (Shape::kBiasTiles) barriers.full_bias(slot.stage).wait(slot.parity);
          scores.probabilities(s, p, statistics(Shape::kOffsetLse), m0, masked, ds_slab());
          zero_tail(m0);
          typename ScoreBlock<Traits, Shape>::KeptP kept;
          if constexpr (Traits::kKeepWords) {
            scores.keep(kept, p, words);
          } else {
            scores.keep(kept, p);
          }
          start_dv(p);
          wait_products<1>();
          pin_registers(dp);
          if (masked) {
            scores.template gradients<true>(s, kept, dp, statistics(Shape::kOffsetDelta));
          } else {
            scores.template gradients<false>(s, kept, dp, statistics(Shape::kOffsetDelta));
          }
        }
        if (left == 1) release(barriers.empty_v());
        pack_fragments<Element>(ds, dp);
        share_ds(ds);
        named_barrier_sync(1, Shape::kConsumers);
        AccTile dq[1][Shape::kTilesDq];
        start_dq(dq);
        start_dk(ds);
        if constexpr (Shape::kStoresTiles) {
          if ((tid & 127) == 0) {
            store_box(params.tensor_map_dbias, ds_slab(), n_group, m0, h, tile.b);
            commit_stores();
          }
        }
        wait_products<1>();
        pin_registers(dq);
        pin_registers(dv);
        pin_registers(p);
        release(barriers.empty_dout(slot.stage));
        if (left == 1) release_k();
        add_dq(dq, h, m0);
        if (kEarlyStore && left == 1) store_dv();
        range.next(h, m);
        // Nothing stays in flight over the end of the loop: ptxas runs out of registers otherwise.
        wait_products<0>();
        pin_registers(dk);
        pin_registers(ds);
        release(barriers.empty_q(slot.stage));
        if constexpr (Shape::kStoresTiles) {
          if (warp != 0) release(barriers.empty_bias(slot.stage));
          stored = true;
        } else if constexpr (Shape::kBiasTiles) {
          release(barriers.empty_bias(slot.stage));
        }
        slot.advance();
      }
      if constexpr (Shape::kStoresTiles) release_stored();
    }

    int const key = n0 + 64 * group + 16 * warp;
    index_t const row = index_t(seqlen.k_row0) + key;
    store_rows<Element>(reinterpret_cast<Element*>(params.dk) + index_t(seqlen.batch_index) * params.dk_stride_b +
                            row * params.dk_stride_n + index_t(tile.h) * params.dk_stride_h,
                        params.dk_stride_n, dk, params.scale, seqlen.len_k_slot - key, params.head_dim, lane);
    if (range.count == 0 || !kEarlyStore) {
      store_rows<Element>(reinterpret_cast<Element*>(params.dv) + index_t(seqlen.batch_index) * params.dv_stride_b +
                              row * params.dv_stride_n + index_t(tile.h) * params.dv_stride_h,
                          params.dv_stride_n, dv, 1.0f, seqlen.len_k_slot - key, params.head_dim_v, lane);
    }
  }
}

template <class Traits>
NVRTC_ATTN_DEVICE void backward_hopper(HopperBackwardParams const& params) {
  using Shape = HopperBackwardShape<Traits>;
  extern __shared__ __align__(1024) unsigned char smem_pointer[];
  unsigned const smem = shared_address(smem_pointer);
  BackwardBarriers<Shape> const barriers{smem + Shape::kOffsetBarriers};
  HelperBarriers<Traits> const helpers{smem + Shape::kOffsetHelpers};
  if (threadIdx.x == 0) {
    helpers.init(Shape::kConsumers / 32);
    barriers.init();
  }
  if constexpr (Shape::kBytesZeros > 0) {
    for (int i = int(threadIdx.x) * 16; i < Shape::kBytesZeros; i += Traits::kNumThreads * 16) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(smem + Shape::kOffsetZeros + i), "r"(0) : "memory");
    }
    fence_async_proxy();
  }
  __syncthreads();
  // A broadcast tells the compiler that the role is uniform over the warp.
  int const warp_group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warp_group == 0 || warp_group > Shape::kGroups) {
    give_registers<Traits::kKeepWords ? 32 : 24>();
    int const warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
    if (warp == 0) {
      load_operands<Traits>(params, barriers, smem);
    } else if (Traits::kOrdered && warp == 3) {
      if constexpr (Traits::kOrdered) order_additions<Traits, QueryRange<Traits>>(params, helpers);
    } else if constexpr (Traits::kKeepWords) {
      make_keep_words<Traits, QueryRange<Traits>>(params, helpers, warp < 4 ? warp + 3 : warp - 12);
    }
  } else {
    take_registers<Traits::kKeepWords ? 224 : 240>();
    consume_key_tiles<Traits>(params, barriers, smem_pointer, smem, warp_group - 1);
  }
}

}  // namespace nvrtc_attn
