// Gradient of a bias that batch entries or heads share, on Hopper (sm_90a): the sum of dS = P * (dP - delta) over them.
//
// A tile is 128 queries and 128 keys of one element of the bias's batch and head dims. A thread block walks the (batch,
// head) pairs that add to it, in order, computes S and dP of each again, and sums dS in float32 registers: no atomics,
// no score-sized temporary, bitwise reproducible. With kSplit each block takes a share of the pairs and writes float32
// partial sums, which dbias_reduce adds in order. The bias itself is the same for all pairs: it waits in shared memory.
//
// Roles: warp-group 0 loads (one thread issues all copies); each of the other two owns 64 of the queries. They take
// turns at starting the two products of a pair (a named barrier each): one takes exponentials while the tensor cores
// work for the other.
//
// Shared memory: a ring of slots, each the two operands of one product, Q and K or dO and V (slabs of 64 columns, see
// hopper/common/wgmma.cuh); the bias, every thread's words where it alone reads them; row_lse or delta of each slot;
// mbarriers, `full` counting bytes and `empty` one arrival per warp.
#pragma once
#include "../collective/scores.cuh"
#include "../hopper/common/barrier.cuh"
#include "../hopper/common/bulk.cuh"
#include "../hopper/common/row_store.cuh"
#include "../hopper/common/tma.cuh"
#include "../hopper/common/uniform.cuh"
#include "../hopper/common/unpack.cuh"
#include "../hopper/common/wgmma.cuh"

namespace nvrtc_attn {

template <class Traits>
struct HopperDbiasShape {
  static constexpr int kBlock = 128;  // of queries and of keys
  static constexpr int kGroups = 2;
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kWidth = Traits::kHeadDim > Traits::kHeadDimV ? Traits::kHeadDim : Traits::kHeadDimV;
  static constexpr int kSlabs = (Traits::kHeadDim + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabsV = (Traits::kHeadDimV + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlab = kBlock * kSlabRowBytes;
  static constexpr int kOperand = slab_tile_bytes(kBlock, kWidth);
  static constexpr int kSlot = 2 * kOperand;
  static constexpr int kStatistic = kBlock * 4;
  static constexpr int kOffsetBias = kStages * kSlot;
  static constexpr int kOffsetStatistics = kOffsetBias + kBlock * kBlock * int(sizeof(typename Traits::Bias));
  static constexpr int kOffsetBarriers = kOffsetStatistics + kStages * kStatistic;
  // Places of the mbarriers of the slots, that of the first.
  enum Place : int { kFull, kEmpty = kFull + kStages, kCount = kEmpty + kStages };
  static constexpr int kBytes = kOffsetBarriers + kCount * Mbarrier::kBytes;

  // Hardware barriers; 0 is __syncthreads.
  enum NamedBarrier : int { kTurnOfGroup = 1 };  // + group: it may start its products
  static_assert(kBytes == Traits::kSmemBytes, "smem_bytes of the config and the layout of the kernel differ");
  static_assert(Traits::kBlockM == kBlock && Traits::kBlockN == kBlock && Traits::kNumThreads == 128 * (1 + kGroups));
  static_assert(sizeof(typename Traits::Bias) == 2 && !Traits::kSoftcap && !Traits::kVarlen);
};

// The pairs (batch, head) that add to one tile, one after the other: none where no query sees a key.
template <class Traits>
struct DbiasPairs {
  static constexpr int kBlock = HopperDbiasShape<Traits>::kBlock;
  HopperBackwardParams const& params;
  int split, tile_b, tile_h;  // place in the bias, or 0
  int m0, n0;
  int b, h, left;

  NVRTC_ATTN_DEVICE static int count(HopperBackwardParams const& params) {
    return params.num_dbias_splits * params.dbias_size_b * params.dbias_size_h * params.num_m_blocks *
           params.num_n_blocks;
  }

  NVRTC_ATTN_DEVICE DbiasPairs(HopperBackwardParams const& p, int at) : params(p) {
    auto take = [&at](int size) {
      int const rest = uniform_quotient(at, size);
      int const x = at - rest * size;
      at = rest;
      return x;
    };
    n0 = take(p.num_n_blocks) * kBlock;
    m0 = take(p.num_m_blocks) * kBlock;
    tile_h = take(p.dbias_size_h);
    tile_b = take(p.dbias_size_b);
    split = at;
    int const heads = p.dbias_size_h == 1 ? p.num_heads : 1;
    int const pairs = heads * (p.dbias_size_b == 1 ? p.batch : 1);
    int first = 0;
    left = pairs;
    if constexpr (Traits::kSplit) {
      int const share = ceil_div(pairs, p.num_dbias_splits);
      first = min(split * share, pairs);
      left = min(share, pairs - first);
    }
    int const first_b = uniform_quotient(first, heads);
    b = tile_b + first_b;
    h = tile_h + first - first_b * heads;
    if constexpr (Traits::kBand) {
      int first_tile, last_tile;
      positions().template key_tiles<kBlock>(m0, kBlock, first_tile, last_tile);
      if (n0 < first_tile * kBlock || n0 >= last_tile * kBlock) left = 0;
    }
  }

  NVRTC_ATTN_DEVICE PositionMask<Traits::kBand> positions() const {
    return {mask_params<Traits>(params), params.seqlen_q, params.seqlen_k};
  }
  NVRTC_ATTN_DEVICE void next() {
    --left;
    if (params.dbias_size_h == 1 && ++h == params.num_heads) h = 0;
    if (params.dbias_size_h != 1 || h == 0) ++b;
  }
};

template <class Shape>
struct DbiasBarriers {
  unsigned base;  // shared address
  NVRTC_ATTN_DEVICE Mbarrier full(int stage) const { return at(Shape::kFull + stage); }
  NVRTC_ATTN_DEVICE Mbarrier empty(int stage) const { return at(Shape::kEmpty + stage); }

 private:
  NVRTC_ATTN_DEVICE Mbarrier at(int place) const { return {base + Mbarrier::kBytes * place}; }
};

template <int kSlabs>
struct SlabCount {
  static constexpr int value = kSlabs;
};

// The loading warp. All lanes follow the schedule, one issues.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void load_pairs(HopperBackwardParams const& params, DbiasBarriers<Shape> const& barriers,
                                  unsigned smem) {
  bool const issuer = threadIdx.x == 0;
  RingPosition<Shape::kStages> slot;
  for (int tile = int(blockIdx.x); tile < DbiasPairs<Traits>::count(params); tile += int(gridDim.x)) {
#pragma unroll 1
    for (DbiasPairs<Traits> pair(params, tile); pair.left > 0; pair.next()) {
      int const h_kv = uniform_quotient(pair.h, params.heads_per_group);
      // Rows of the workspaces end with a query tile of the kernel that wrote them.
      int const bytes = 4 * min(Shape::kBlock, int(params.delta_stride_h) - pair.m0);
      index_t const row = index_t(pair.b) * params.delta_stride_b + index_t(pair.h) * params.delta_stride_h + pair.m0;
      auto load = [&](auto slabs, TensorMap const& map_q, TensorMap const& map_k, int q_h, int q_b, int k_h, int k_b,
                      float const* statistic) {
        constexpr int kSlabs = decltype(slabs)::value;
        Mbarrier const full = barriers.full(slot.stage);
        barriers.empty(slot.stage).wait(slot.parity ^ 1);
        if (issuer) {
          unsigned const to = smem + slot.stage * Shape::kSlot;
          full.arrive_and_expect(2 * kSlabs * Shape::kSlab + bytes);
#pragma unroll
          for (int slab = 0; slab < kSlabs; ++slab) {
            load_box(to + slab * Shape::kSlab, map_q, full.address, slab * kSlabColumns, pair.m0, q_h, q_b, kEvictLast);
            load_box(to + Shape::kOperand + slab * Shape::kSlab, map_k, full.address, slab * kSlabColumns, pair.n0, k_h,
                     k_b, kEvictLast);
          }
          bulk_load(smem + Shape::kOffsetStatistics + slot.stage * Shape::kStatistic, statistic, bytes, full.address);
        }
        slot.advance();
      };
      // Expanded (stride 0) dims have size 1 in the tensor maps.
      load(SlabCount<Shape::kSlabs>{}, params.tensor_map_q, params.tensor_map_k, params.q_stride_h == 0 ? 0 : pair.h,
           params.q_stride_b == 0 ? 0 : pair.b, params.k_stride_h == 0 ? 0 : h_kv, params.k_stride_b == 0 ? 0 : pair.b,
           params.row_lse + row);
      load(SlabCount<Shape::kSlabsV>{}, params.tensor_map_dout, params.tensor_map_v,
           params.dout_stride_h == 0 ? 0 : pair.h, params.dout_stride_b == 0 ? 0 : pair.b,
           params.v_stride_h == 0 ? 0 : h_kv, params.v_stride_b == 0 ? 0 : pair.b, params.delta + row);
    }
  }
}

// One consumer warp-group.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void sum_pairs(HopperBackwardParams const& params, DbiasBarriers<Shape> const& barriers,
                                 unsigned smem, int group) {
  using Element = typename Traits::Element;
  using Bias = typename Traits::Bias;
  constexpr int kTiles = Shape::kBlock / 8;
  int const lane = int(threadIdx.x) & 31;
  int const row = 64 * group + 16 * (int(threadIdx.x) >> 5 & 3) + (lane >> 2);  // of the tile; the other is row + 8
  int const column = 2 * (lane & 3);
  uint64_t const rows = descriptor_k_major(smem + group * 64 * kSlabRowBytes);
  uint64_t const keys = descriptor_k_major(smem + Shape::kOperand);
  ScoreMap<Traits> const map(params);
  RingPosition<Shape::kStages> slot;
  using Position = RingPosition<Shape::kStages>;
  auto offset = [&](Position const& of) { return uint64_t(of.stage * (Shape::kSlot >> 4)); };
  auto release = [&](Position const& of) {
    if (lane == 0) barriers.empty(of.stage).arrive();
  };
  auto statistic = [&](float (&x)[2], Position const& of) {
    unsigned const from = smem + Shape::kOffsetStatistics + of.stage * Shape::kStatistic + 4 * row;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[0]) : "r"(from) : "memory");
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[1]) : "r"(from + 32) : "memory");
  };

  // Words of the bias that are this thread's own, four of each 512 bytes that its warp has a run of.
  unsigned const words = smem + Shape::kOffsetBias + (int(threadIdx.x) - 128) / 32 * (kTiles / 2 * 512) + 16 * lane;
  if (group == 1)
    named_barrier_arrive(Shape::kTurnOfGroup, 128 * Shape::kGroups);  // the first turn is the other group's

  // The bias of a tile: of word[n][k] keys column and column + 1 of tile 2 n + k / 2, query row + 8 (k % 2).
  uint32_t word[kTiles / 2][4];
  auto fetch = [&](int tile) {
    DbiasPairs<Traits> const place(params, tile);
    ScoreTensor<Bias const> const tensor(reinterpret_cast<Bias const*>(params.bias), place.tile_b, place.tile_h,
                                         params.bias_stride_b, params.bias_stride_h, params.bias_stride_m,
                                         params.bias_stride_n);
#pragma unroll
    for (int n = 0; n < kTiles / 2; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        int const query = place.m0 + row + 8 * (k & 1);
        int const key = place.n0 + column + 16 * n + 8 * (k / 2);
        auto const* const at = reinterpret_cast<unsigned short const*>(tensor.at(query, key));
        word[n][k] = 0;
        if (query < params.seqlen_q && key < params.seqlen_k) {  // an even number of keys: both or none
          word[n][k] =
              tensor.pairs ? *reinterpret_cast<uint32_t const*>(at) : at[0] | uint32_t(at[tensor.stride_n]) << 16;
        }
      }
    }
  };
  int tile = int(blockIdx.x);
  int const tiles = DbiasPairs<Traits>::count(params);
  fetch(tile);

#pragma unroll 1
  while (tile < tiles) {
    DbiasPairs<Traits> pair(params, tile);
#pragma unroll
    for (int n = 0; n < kTiles / 2; ++n) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(words + n * 512), "r"(word[n][0]), "r"(word[n][1]),
                   "r"(word[n][2]), "r"(word[n][3])
                   : "memory");
    }
    AccTile sum[1][kTiles];
    clear(sum);

#pragma unroll 1
    for (; pair.left > 0; pair.next()) {
      bool masked = false;
      Visible seen[2];  // keys of the tile that the two rows see, counted from this thread's first
      if constexpr (Traits::kBand) {
        auto const mask = pair.positions();
        masked = !mask.keeps_tile(pair.m0 + 64 * group, 64, pair.n0, Shape::kBlock);
#pragma unroll
        for (int r = 0; r < 2; ++r) seen[r] = mask.keys_of(pair.m0 + row + 8 * r, pair.n0 + column);
      }

      AccTile s[1][kTiles], dp[1][kTiles];
      auto const first = slot;
      barriers.full(slot.stage).wait(slot.parity);
      slot.advance();
      barriers.full(slot.stage).wait(slot.parity);
      named_barrier_sync(Shape::kTurnOfGroup + group, 128 * Shape::kGroups);
      pin_registers(s);
      begin_products();
      start_product_abt<Element, Shape::kBlock, Shape::kBlock, Traits::kHeadDim>(s, rows + offset(first),
                                                                                 keys + offset(first));
      commit_products();
      pin_registers(dp);
      begin_products();
      start_product_abt<Element, Shape::kBlock, Shape::kBlock, Traits::kHeadDimV>(dp, rows + offset(slot),
                                                                                  keys + offset(slot));
      commit_products();
      named_barrier_arrive(Shape::kTurnOfGroup + (1 - group), 128 * Shape::kGroups);
      float reference[2], delta[2];
      statistic(reference, first);
      statistic(delta, slot);
      wait_products<1>();
      pin_registers(s);
      release(first);
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        uint32_t word[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                     : "r"(words + n / 2 * 512)
                     : "memory");
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float2 const b = unpack_pair_here<Bias>(word[k]);
          float* const at = &s[0][n + k / 2][2 * (k & 1)];
          at[0] = map.probability(map.score(at[0], b.x), reference[k & 1]);
          at[1] = map.probability(map.score(at[1], b.y), reference[k & 1]);
        }
      }
      if (masked) {
#pragma unroll
        for (int r = 0; r < 2; ++r) replace_hidden(s, r, 0.0f, seen[r]);
      }
      // Passes at once. ptxas moves a wait for products up to the one before, but not over this loop: P is made under dP.
      barriers.full(slot.stage).wait(slot.parity);
      wait_products<0>();
      pin_registers(dp);
      release(slot);
      slot.advance();
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float const p = s[0][n][e];
          float x = dp[0][n][e] - delta[e >> 1];
          if constexpr (Traits::kBand) x = masked_gradient(x, p != 0.0f);
          sum[0][n][e] = fmaf(p, x, sum[0][n][e]);
        }
      }
    }

    DbiasPairs<Traits> const place(params, tile);  // made again: over the loop there is no register for it
    tile += int(gridDim.x);
    fetch(min(tile, tiles - 1));  // under the stores; without a branch, over which the words before would live
    int const i = place.m0 + row;
    int const cols = params.seqlen_k - place.n0;
    if constexpr (Traits::kSplit) {
      index_t const size_m = params.dbias_size_m, size_n = params.dbias_size_n;
      index_t const plane =
          index_t(place.split * params.dbias_size_b + place.tile_b) * params.dbias_size_h + place.tile_h;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* const line = params.dbias_partial + (plane * size_m + i + 8 * r) * size_n + place.n0 + column;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          // dbias has rows of whole 16-byte vectors: an even number of columns.
          if (i + 8 * r < params.seqlen_q && 8 * n + column < cols) {
            *reinterpret_cast<float2*>(line + 8 * n) = make_float2(sum[0][n][2 * r], sum[0][n][2 * r + 1]);
          }
        }
      }
    } else {
      using DBias = typename Traits::DBias;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        DBias* const line = reinterpret_cast<DBias*>(params.dbias) + index_t(place.tile_b) * params.dbias_stride_b +
                            index_t(place.tile_h) * params.dbias_stride_h + index_t(i + 8 * r) * params.dbias_stride_m +
                            place.n0 + 4 * column;
        store_row<DBias>(line, sum, r, 1.0f, i + 8 * r < params.seqlen_q, cols, lane & 3);
      }
    }
  }
}

// Grid: at most the number of tiles times num_dbias_splits.
template <class Traits>
NVRTC_ATTN_DEVICE void backward_hopper_dbias(HopperBackwardParams const& params) {
  using Shape = HopperDbiasShape<Traits>;
  extern __shared__ __align__(1024) unsigned char smem_pointer[];
  unsigned const smem = shared_address(smem_pointer);
  DbiasBarriers<Shape> const barriers{smem + Shape::kOffsetBarriers};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      barriers.full(stage).init(1);
      barriers.empty(stage).init(4 * Shape::kGroups);
    }
    fence_barrier_init();
  }
  __syncthreads();
  // A broadcast tells the compiler that the role is uniform over the warp.
  int const warp_group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warp_group == 0) {
    give_registers<24>();
    if (threadIdx.x < 32) load_pairs<Traits>(params, barriers, smem);
  } else {
    take_registers<240>();
    sum_pairs<Traits>(params, barriers, smem, warp_group - 1);
  }
}

}  // namespace nvrtc_attn
