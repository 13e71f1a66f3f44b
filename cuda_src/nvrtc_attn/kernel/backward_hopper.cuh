// Attention backward on Hopper (sm_90a): dk and dv of one key tile at a time, dq added into a float32 workspace. Where one
// tile holds all keys (kOneKeyTile), dq is complete and goes to its own tensor.
//
// Roles: warp-group 0 loads (one thread issues all copies); each of the other two warp-groups owns 64 of the tile's 128 keys.
// Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are left operands of dV += P^T dO and
// dK += dS^T Q without leaving registers. dS goes to shared memory too: dQ = dS K needs all keys, so the groups meet once a
// query tile, and each computes its share of dQ (64 rows of 128, or 64 columns of 128) and adds it to dq_accum. A query tile has
// 64 rows, or 128 where both head dims are up to 64; of 80, which are no whole number of times 64, dQ^T = K^T dS^T is computed,
// 64 rows of 128.
//
// The products of a query tile are started so that the tensor cores have one to work on while the warps compute:
//   start S, dP -> P under dP -> dS, announced -> start dV -> meet under dV -> start dQ, dK -> add dQ to dq_accum under dK,
// or with kEarlyDv dV as soon as P is there, and dS under it.
// The last one takes as long as dK: red.global is the narrowest path of this kernel, and what runs beside it is free.
//
// Dropout's decisions and the order of additions in the deterministic pass are made by warps of the loading group that load
// nothing, the former with a fourth warp-group: hopper/backward/helpers.cuh. With kFused, where these have nothing to do, they
// do the work of backward_hopper_prepare instead: hopper/backward/prepare_rows.cuh.
//
// Shared memory (slabs of 64 columns, see hopper/common/wgmma.cuh): K, V, kNumStages x Q, kNumStages x dO, 2 x dS[query][key],
// row_lse and delta for each slot, which tile it is, mbarriers, what the helpers need. Everything that a tile writes leaves
// from registers, but for a dbias: with kBiasTiles the slots of dS also bring the bias and take its gradient away
// (hopper/backward/score_tile_transposed.cuh), and zeros for query tiles that no product reaches leave from a slab of zeros.
//
// Barriers: mbarriers full / empty for K, V and every slot of Q and dO. `full` counts the bytes of the copies, `empty` one
// arrival per consumer warp. full_k also announces the tile. dS is complete when both groups have arrived at the named barrier
// of its slot and of the other group, which waits there: between the two is the start of dV. Two slots of dS make one meeting a
// tile enough: who writes slot j % 2 has met the other group after its product with tile j - 2. Named barrier 1 is all consumers,
// who meet there instead with kEarlyDv.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../collective/score_gradient_transposed.cuh"
#include "../hopper/backward/load.cuh"
#include "../hopper/backward/schedule.cuh"
#include "../hopper/backward/scores.cuh"
#include "../hopper/common/barrier.cuh"
#include "../hopper/backward/gradient_store.cuh"
#include "../hopper/backward/ordered_dq.cuh"

namespace nvrtc_attn {

// One consumer warp-group.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void consume_key_tiles(HopperBackwardParams const& params, BackwardBarriers<Shape> const& barriers,
                                         unsigned char* smem_pointer, unsigned smem, int group) {
  using Element = typename Shape::Element;
  constexpr int kBlockM = Shape::kBlockM;
  // P and dS of a tile at once, by the code of the portable family, once both products are there: what needs more registers
  // than the other loop leaves.
  constexpr bool kRich = (Traits::kHasBias && !Shape::kBiasTiles) || Traits::kMask ||
                         (Traits::kDropout && !Traits::kKeepWords) || Traits::kSoftcap;
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
  uint64_t const ds_operand =
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
    auto store_dk = [&] {
      int const key = n0 + 64 * group + 16 * warp;
      store_rows<Element>(reinterpret_cast<Element*>(params.dk) + index_t(seqlen.batch_index) * params.dk_stride_b +
                              (index_t(seqlen.k_row0) + key) * params.dk_stride_n +
                              index_t(tile.h) * params.dk_stride_h,
                          params.dk_stride_n, dk, params.scale, seqlen.len_k_slot - key, params.head_dim, lane);
    };
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
      if constexpr (Traits::kMask) {
        HiddenKeys const hidden(params, tile.b, h, params.heads_per_group);
        if (hidden.any) {
          zero_hidden_tile_rows<Shape::kBlockN, Shape::kSlabs>(smem, hidden, n0, seqlen.len_k, 64 * group,
                                                               64 * group + 64, tid & 127, 128);
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
        uint64_t const ds = ds_operand + slot.stage * (Shape::kBytesDs >> 4);
        if constexpr (Shape::kTransposedDq) {
          start_product_transposed<Element, Shape::kSlabQ, Shape::kBlockN>(dq, k_rows, ds);
        } else {
          start_product_shared<Element, Shape::kSlabQ, Shape::kBlockN>(dq, ds, k_rows);
        }
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
      auto dq_rows = [&](int head, int m0) {
        int const row_block = (Shape::kSplitRows ? 4 * group : 0) + warp;
        int const tile0 = Shape::kSplitRows ? 0 : group * Shape::kTilesDq;
        return params.dq_accum + index_t(seqlen.batch_index) * params.dq_accum_stride_b +
               index_t(head) * params.dq_accum_stride_h +
               (accumulator_row0<Traits::kVarlen, kBlockM>(seqlen.q_row0, tile.b) + m0) * Traits::kHeadDim +
               (Shape::kTransposedDq ? (4 * group + warp) * Shape::kTilesDq : row_block * Shape::kTilesD + tile0) *
                   kAccumBlock;
      };
      auto add_dq_to = [&](auto& dq, float* to) {
        // Not of columns that dq does not have.
        int tiles = min(Shape::kTilesDq, Shape::kTilesD - (Shape::kSplitRows ? 0 : group * Shape::kTilesDq));
        if constexpr (Shape::kTransposedDq) {
          tiles = 64 * group + 16 * warp < Traits::kHeadDim ? Shape::kTilesDq : 0;
        }
        constexpr bool kAll = Shape::kTilesD == (Shape::kTransposedDq ? 16 : 2 * Shape::kTilesDq);
#pragma unroll
        for (int d = 0; d < Shape::kTilesDq; ++d) {
          if (Shape::kSplitRows || kAll || d < tiles) add_block(to + d * kAccumBlock, dq[0][d], lane);
        }
      };
      auto add_dq = [&](auto& dq, int head, int m0) {
        if constexpr (Traits::kOrdered) helpers.turn().wait(slot.stage);  // one phase a query tile, two slots
        if constexpr (Traits::kOneKeyTile) {
          int const row_block = (Shape::kSplitRows ? 4 * group : 0) + warp;
          int const tile0 = Shape::kSplitRows ? 0 : group * Shape::kTilesDq;
          int const row = m0 + 16 * row_block;
          store_rows<Element>(reinterpret_cast<Element*>(params.dq) + index_t(tile.b) * params.dq_stride_b +
                                  index_t(row) * params.dq_stride_m + index_t(head) * params.dq_stride_h + 8 * tile0,
                              params.dq_stride_m, dq, params.scale, seqlen.len_q - row, params.head_dim - 8 * tile0,
                              lane);
          return;
        }
        add_dq_to(dq, dq_rows(head, m0));
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
          constexpr bool kNarrow = Shape::kSlabs == 1 && Shape::kSlabsV == 1;
          constexpr int kRead = int(Traits::kHasBias && Traits::kMask) + int(Traits::kDropout);
          constexpr int kChunk = kNarrow ? 8 >> kRead : Traits::kDropout ? 4 : 2;
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
          if constexpr (Shape::kEarlyDv) {
            zero_tail(m0);
            start_dv(p);
          }
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
          typename ScoreBlock<Traits, Shape>::KeptP kept;
          if constexpr (Shape::kEarlyDv) {
            zero_tail(m0);  // before there are two of P
            if constexpr (Traits::kKeepWords) {
              scores.keep(kept, p, words);
            } else {
              scores.keep(kept, p);
            }
            start_dv(p);
            wait_products<1>();
          } else {
            wait_products<0>();
          }
          pin_registers(dp);
          if (masked) {
            scores.template gradients<true>(s, kept, dp, statistics(Shape::kOffsetDelta));
          } else {
            scores.template gradients<false>(s, kept, dp, statistics(Shape::kOffsetDelta));
          }
          // In 16 bits no earlier: S, dP, dK, dV and it would take all registers there are.
          if constexpr (!Shape::kEarlyDv) pack_fragments<Element>(p, s);
        }
        if (left == 1) release(barriers.empty_v());
        pack_fragments<Element>(ds, dp);
        if constexpr (!Shape::kEarlyDv) zero_tail(m0);
        share_ds(ds);
        if constexpr (Shape::kEarlyDv) {
          named_barrier_sync(1, Shape::kConsumers);
        } else {
          int const meeting = 4 + 2 * slot.stage + (tid >> 7);  // of `tid`: uniform registers are scarcer
          named_barrier_arrive(meeting, Shape::kConsumers);
          start_dv(p);
          named_barrier_sync(meeting ^ 1, Shape::kConsumers);
        }
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

    store_dk();
    int const key = n0 + 64 * group + 16 * warp;
    index_t const row = index_t(seqlen.k_row0) + key;
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
    if constexpr (Traits::kFused) init_pieces<Traits>(smem + Shape::kOffsetHelpers);
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
    } else if constexpr (Traits::kFused) {
      prepare_rows<Traits>(params, smem + Shape::kOffsetHelpers, int(threadIdx.x) & 31);
    } else if constexpr (Traits::kKeepWords) {
      make_keep_words<Traits, QueryRange<Traits>>(params, helpers, warp < 4 ? warp + 3 : warp - 12);
    }
  } else {
    take_registers<Traits::kKeepWords ? 224 : 240>();
    consume_key_tiles<Traits>(params, barriers, smem_pointer, smem, warp_group - 1);
  }
}

}  // namespace nvrtc_attn
