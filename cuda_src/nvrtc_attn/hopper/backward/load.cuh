// The map of shared memory, the mbarriers and the loading warp of the Hopper backward kernel; what they are for is at the head
// of kernel/backward_hopper.cuh.
#pragma once
#include "../../collective/gradient_accumulator.cuh"
#include "helpers.cuh"
#include "../common/bulk.cuh"
#include "prepare_rows.cuh"
#include "score_tile_transposed.cuh"
#include "../common/tma.cuh"
#include "../common/uniform.cuh"
#include "../common/wgmma.cuh"

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

  // dQ of a group: 64 query rows and all columns, or all 64 rows and one slab, or half a slab, of columns. Of 80 queries dQ^T:
  // one slab of columns, in multiples of 16 for a warp, and all queries.
  static constexpr bool kSplitRows = kBlockM == 128;
  static constexpr bool kTransposedDq = kBlockM == 80;
  // dV is started before dS is computed: figures at choose_tile; with keep words the other order has too few registers, and of
  // one key tile, often one turn of the loop, no turn before or after fills what the later start leaves.
  static constexpr bool kEarlyDv = kTransposedDq || Traits::kKeepWords || Traits::kOneKeyTile;
  static constexpr int kTilesDq = kTransposedDq ? kTilesM : kSplitRows ? kTilesD : kSlabs * 4;

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
  static constexpr int kBytes =
      kOffsetHelpers + (Traits::kFused ? PieceShape<Traits>::kBytes : HelperShape<Traits>::kBytes);
  static_assert(kBytes == Traits::kSmemBytes, "smem_bytes of the config and the layout of the kernel differ");

  static_assert(kGroups == 2 && Traits::kNumThreads == 128 + kConsumers + HelperShape<Traits>::kThreads,
                "two groups share the products of dQ");
  static_assert(kStages == 2, "slots of dS go with those of Q");
  static_assert(!(Traits::kOneKeyTile && Traits::kVarlen), "dq of tokens outside every sequence");
  static_assert(!(Traits::kOneKeyTile && Traits::kOrdered), "nothing to order");
  static_assert(!(Traits::kSplit && Traits::kOrdered), "dk and dv have no order of additions");
  static_assert(!(kBiasTiles && Traits::kKeepWords), "P waits for neither or for one of them");
  static constexpr bool kPlain =
      !(kBiasTiles || Traits::kHasBias || Traits::kMask || Traits::kDropout || Traits::kSoftcap || Traits::kVarlen ||
        Traits::kSequsedK || Traits::kOneKeyTile || Traits::kOrdered);
  static_assert(kPlain || !Traits::kFused, "registers, and the warps that prepare rows");
  static_assert(kBlockM == 64 || kTransposedDq || kBlockM == 128, "a group computes 64 rows of dQ or of dQ^T");
  static_assert(kSplitRows ? kSlabs == 1 : kTransposedDq ? kSlabs == kGroups : kSlabs <= kGroups, "columns of dQ");
  static_assert(kPlain || !kTransposedDq, "registers");
  static_assert(!(Traits::kFused && kTransposedDq), "shared memory, and a tile is no whole number of pieces");
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
    if (issuer) {
      int* const counter = Traits::kFused ? params.counters : tile_counter(params);
      taken = (Traits::kOrdered ? 0 : int(gridDim.x)) + atomicAdd(counter, 1);
    }
    return uniform(taken);
  };
  int t = Traits::kOrdered ? take_tile() : int(blockIdx.x);
  while (t < params.num_tiles) {
    KeyTile tile = key_tile<Traits::kOrdered, Traits::kSplit>(params, t);
    if constexpr (Traits::kFused) {
      wait_for_rows<Traits>(params, tile.b, tile.h);
      t = opaque(t);
      tile = key_tile<Traits::kOrdered, Traits::kSplit>(params,
                                                        t);  // computed again: nothing of it stays alive over the wait
    }
    helpers.announce(tile, parity, issuer);
    bool const is_real = !(Traits::kVarlen && tile.b == params.batch);
    SeqlenInfo<Traits::kVarlen, Traits::kSequsedK> const seqlen(params, is_real ? tile.b : 0);
    int const n0 = tile.n_block * Shape::kBlockN;
    PositionMask<Traits::kBand> const mask(params, seqlen.len_q, seqlen.len_k);
    QueryRange<Traits> const range(params, mask, tile.n_block);
    if (!is_real || range.count == 0) {
      announce(tile.n_block, Traits::kSplit ? tile.h * params.heads_per_group : tile.h, tile.b);
      if (issuer) barriers.full_k().arrive();
      barriers.empty_v().wait(parity ^ 1);
      if (issuer) barriers.full_v().arrive();
    } else {
      // Expanded (stride 0) dims have size 1 in the tensor maps.
      int const q_b = params.q_stride_b == 0 ? 0 : seqlen.batch_index;
      int const dout_b = params.dout_stride_b == 0 ? 0 : seqlen.batch_index;
      int h = tile.h * params.heads_per_group;
      int const hk = key_head<Traits>(params, tile.h);
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
            prefetch_box(params.tensor_map_k, slab * kSlabColumns, n0, params.k_stride_h == 0 ? 0 : hk,
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
                   slab * kSlabColumns, seqlen.k_row0 + n0, params.v_stride_h == 0 ? 0 : hk,
                   params.v_stride_b == 0 ? 0 : seqlen.batch_index, kEvictFirst);
        }
      }
      load_q();
      load_dout();
      announce(tile.n_block, Traits::kSplit ? h : tile.h, tile.b);
      if (issuer) {
        barriers.full_k().arrive_and_expect(Shape::kBytesK);
#pragma unroll
        for (int slab = 0; slab < Shape::kSlabs; ++slab) {
          load_box(smem + slab * Shape::kSlabK, params.tensor_map_k, barriers.full_k().address, slab * kSlabColumns,
                   seqlen.k_row0 + n0, params.k_stride_h == 0 ? 0 : hk, params.k_stride_b == 0 ? 0 : seqlen.batch_index,
                   kEvictFirst);
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
        int const first = Traits::kSplit ? read_key_tile(smem + Shape::kOffsetTile).h : tile.h * params.heads_per_group;
        for (int head = first; head < first + params.heads_per_group; ++head) {
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

}  // namespace nvrtc_attn
