// Attention backward on Hopper (sm_90a): dk and dv of one key tile at a time, dq added into a float32 workspace. Where one
// tile holds all keys (kOneKeyTile), dq is complete and goes to its own tensor. With kSplit several thread blocks share the
// query heads of a key tile, and add their dk and dv into dkv_accum (kernel/dkv_convert.cuh). With kParts they share the
// query tiles of some of the key tiles (kernel/dkv_hopper_convert.cuh).
//
// Roles: warp-group 0 loads (one thread issues all copies); each of the other two warp-groups owns 64 of the tile's 128
// keys. Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are left operands of dV +=
// P^T dO and dK += dS^T Q without leaving registers. dS goes to shared memory too: dQ = dS K needs all keys, so the
// groups meet once a query tile, and each computes its share of dQ (64 rows of 128, or 64 columns of 128) and adds it
// to dq_accum. A query tile has 64 rows, or 128 where both head dims are up to 64; of 80, which are no whole number of
// times 64, dQ^T = K^T dS^T is computed, 64 rows of 128.
//
// The products of a query tile are started so that the tensor cores have one to work on while the warps compute:
//   start S, dP -> P under dP -> dS, announced -> start dV -> meet under dV -> start dQ, dK -> add dQ to dq_accum under dK,
// or with kEarlyDv dV as soon as P is there, and dS under it. The last one takes as long as dK: red.global is the
// narrowest path of this kernel, and what runs beside it is free.
//
// Dropout's decisions and the order of additions in the deterministic pass are made by warps of the loading group that
// load nothing, the former with a fourth warp-group: hopper/backward/helpers.cuh. With kFused, where these have nothing
// to do, they do the work of backward_hopper_prepare instead: hopper/backward/prepare_rows.cuh. With kBeginsProducts they
// compute what S^T begins with, ahead of the consumers: hopper/backward/diagonal_warps.cuh.
//
// Shared memory (slabs of 64 columns, see hopper/common/wgmma.cuh): K, V, kNumStages x Q, kNumStages x dO, 2 x
// dS[query][key], of 80 queries dq, row_lse and delta for each slot, which tile it is, what products begin with, mbarriers,
// what the helpers need. Everything that a tile writes leaves from registers, with three exceptions. dq of 80 queries is
// added by the copy engine: hopper/backward/bulk_additions.cuh. With kKeySlots == 2 dk and dv leave through shared memory,
// by the idle warps of the loading group: hopper/backward/relay.cuh. With kBiasTiles the slots of dS also bring the bias and
// take its gradient away (hopper/backward/score_tile_transposed.cuh), and zeros for query tiles that no product reaches leave
// from a slab of zeros.
//
// Barriers: mbarriers full / empty for K, V and every slot of Q and dO. `full` counts the bytes of the copies, `empty`
// one arrival per consumer warp. full_k also announces the tile. With kBeginsProducts full_q also counts one arrival for
// each warp that computes diagonals. dS is complete when both groups have arrived at the named barrier of its slot and of
// the other group, which waits there: between the two is the start of dV. Two slots of dS make one meeting a tile enough:
// who writes slot j % 2 has met the other group after its product with tile j - 2. With kEarlyDv all consumers meet at
// one barrier instead. With two slots of K full_relay counts one arrival per consumer warp, dk and dv being in shared memory;
// the warps that store them give back the slot of K (empty_k) and the place of dv (empty_relay), one arrival each. By name:
// hopper/backward/barriers.cuh, KeyTileConsumer::NamedBarrier.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../collective/score_gradient_transposed.cuh"
#include "../hopper/backward/bulk_additions.cuh"
#include "../hopper/backward/diagonal_warps.cuh"
#include "../hopper/backward/gradient_store.cuh"
#include "../hopper/backward/load.cuh"
#include "../hopper/backward/ordered_dq.cuh"
#include "../hopper/backward/relay.cuh"
#include "../hopper/backward/score_block.cuh"
#include "../hopper/backward/shape.cuh"
#include "../hopper/backward/tile_diagonals.cuh"
#include "../hopper/backward/zeros.cuh"
#include "../hopper/common/barrier.cuh"
#include "dkv_convert.cuh"

namespace nvrtc_attn {

// kRelays: from the first slot of K to that of the key tile, in units of the operands. No member of other kernels, whose
// registers it would change.
struct SlotOfKeys {
  uint64_t k_slot = 0;
};
struct NoSlotOfKeys {};

// One consumer warp-group, which owns 64 of a tile's 128 keys. kOwn is its number where it has code of its own (kOwnCode), so
// that its product of dQ is no wider than what is left of the columns, else -1. Accumulators are arrays of the functions, not members:
// the compiler splits the struct into registers before it unrolls the loops over them, or not at all (up to 128 bytes
// of spills).
template <class Traits, int kOwn = -1>
struct KeyTileConsumer : cute::conditional_t<HopperBackwardShape<Traits>::kRelays, SlotOfKeys, NoSlotOfKeys> {
  using Shape = HopperBackwardShape<Traits>;
  using Element = typename Shape::Element;
  using Result = ResultK<Traits>;
  using Work = KeyTileWork<Traits>;
  // kBeginsProducts: scores are products that begin with what the modifier adds.
  static constexpr bool kBegins = Traits::kBeginsProducts;
  static constexpr bool kRelays = Shape::kRelays;
  using Modifier = ModifierOf<Traits>;
  using Scores = ScoreBlock<cute::conditional_t<kBegins, ProductsBegun<Traits>, Traits>, Shape, Modifier>;
  using Probabilities = FragmentA<Element>[Shape::kStepsM];  // of P^T or dS^T, as left operand
  using ScoreTiles = AccTile[1][Shape::kTilesM];             // of S^T or dP^T
  static constexpr int kTilesDq = kOwn < 1 ? Shape::kTilesDq : Shape::kTilesD - Shape::kTilesDq;
  using DqTiles = AccTile[1][kTilesDq];
  using DkTiles = AccTile[1][Shape::kTilesD];
  using DvTiles = AccTile[1][Shape::kTilesDv];
  using Keys = FragmentA<Element>[Traits::kKeysInRegisters ? Traits::kHeadDim / 16 : 1];  // K and V, as left operands
  using Values = FragmentA<Element>[Traits::kValuesInRegisters ? Traits::kHeadDimV / 16 : 1];
  static constexpr int kBlockM = Shape::kBlockM;
  // P and dS of a tile at once, by the code of the portable family, once both products are there: what needs more registers
  // than the other order leaves.
  static constexpr bool kRich = (Traits::kHasBias && !Shape::kBiasTiles) || (Traits::kMask && !Traits::kKeyMask) ||
                                (Traits::kDropout && !Traits::kKeepWords) || Traits::kSoftcap ||
                                (Modifier::kAny && !kPlainModifier<Modifier>);
  static constexpr bool kByDiagonals = Modifier::kTrainsByDistance;  // what captured arrays get
  using Diagonals = cute::conditional_t<kByDiagonals, TileDiagonals<Element, Shape::kBlockM>, NoScores>;
  static_assert(!(kByDiagonals && Traits::kDescending), "sums of diagonals go on with the queries");
  static_assert(!(kRich && Traits::kTileBits), "scores that are asked one by one");
  static_assert(!kBegins || (!kRich && !Modifier::kMasks && !Modifier::kTrainsPlainly), "all of it is in the products");
  static_assert(!(kRich && Traits::kLog2Lse), "the code of the portable family reads lse as it is");
  static constexpr bool kLengthsOnDevice = Traits::kVarlen || Traits::kSequsedK;
  // dv is stored under the last product, which saves 2 to 3 us a key tile; takes registers.
  static constexpr bool kEarlyStore = !(Traits::kSplit || kRelays) && !(kLengthsOnDevice && Traits::kKeepWords);

  // Hardware barriers; 0 is __syncthreads.
  enum NamedBarrier : int {
    kAllConsumers = 1,
    kOwnGroup = 2,               // + group
    kDsOfGroup = kOwnGroup + 2,  // + 2 * slot + group: its half of dS is there; even, so that ^ 1 is the other group's
  };

  HopperBackwardParams const& params;
  BackwardBarriers<Shape> const barriers;
  HelperBarriers<Traits> const helpers;
  unsigned char* const smem_pointer;
  unsigned const smem;
  int const group;
  int const tid;  // among the consumers
  int const lane;
  int const warp;  // of the group
  // Operands in shared memory: rows of this group's keys, rows of queries, and those whose rows are contracted.
  uint64_t const k_left, v_left, q_right, dout_right, q_rows, dout_rows, ds_operand, k_rows;

  RingPosition<Shape::kStages> slot;  // of Q, dO and dS, and of keep words
  unsigned parity = 0;                // of the key tile; kRelays: its number modulo 4, of which bit 0 is the slot of K

  NVRTC_ATTN_DEVICE KeyTileConsumer(HopperBackwardParams const& params_, unsigned char* smem_pointer_, unsigned smem_,
                                    int group_)
      : params(params_),
        barriers{smem_ + Shape::kOffsetBarriers},
        helpers{smem_ + Shape::kOffsetHelpers},
        smem_pointer(smem_pointer_),
        smem(smem_),
        group(group_),
        tid(int(threadIdx.x) - 128),
        lane(tid & 31),
        warp(tid >> 5 & 3),
        k_left(descriptor_k_major(smem + group * 64 * kSlabRowBytes)),
        v_left(descriptor_k_major(smem + Shape::kOffsetV + group * 64 * kSlabRowBytes)),
        q_right(descriptor_k_major(smem + Shape::kOffsetQ)),
        dout_right(descriptor_k_major(smem + Shape::kOffsetDout)),
        q_rows(descriptor_mn_major(smem + Shape::kOffsetQ, Shape::kSlabQ)),
        dout_rows(descriptor_mn_major(smem + Shape::kOffsetDout, Shape::kSlabQ)),
        ds_operand(descriptor_k_major(smem + Shape::kOffsetDs + (Shape::kSplitRows ? group * 64 * kSlabRowBytes : 0))),
        k_rows(descriptor_mn_major(
            smem + (Shape::kSplitRows ? 0 : group * (Shape::kSlabs == 1 ? kSlabRowBytes / 2 : Shape::kSlabK)),
            Shape::kSlabK)) {}

  // The key tiles that the loading warp announces, until it says that there are no more.
  NVRTC_ATTN_DEVICE void run() {
    CapturedGradients<Modifier>::clear_held(held_sums());
    while (true) {
      unsigned announced = smem + Shape::kOffsetTile;
      if constexpr (kRelays) {
        barriers.full_k(slot_k()).wait(parity >> 1);
        announced += 16 * slot_k();
      } else {
        barriers.full_k().wait(parity);
      }
      KeyTile const tile = read_key_tile(announced);
      if (tile.n_block < 0) {
        if constexpr (Shape::kTransposedDq) wait_bulk_adds();
        break;
      }
      if constexpr (Traits::kVarlen) {
        if (tile.b == params.batch) {  // the virtual sequence of all tokens outside the others
          release_operands();
          if constexpr (kRelays) {
            barriers.empty_relay().wait(parity_v() ^ 1);
            give_to_relay();
          }
          zero_keys_of_no_sequence<Element, Shape::kConsumers>(params, announced_key_head<Traits>(params, tile),
                                                               tile.n_block, key_tile_list(params).parts(), tid);
          continue;
        }
      }
      consume(Work(params, tile, tile.b));
    }
  }

 private:
  // ---- A key tile

  NVRTC_ATTN_DEVICE void consume(Work const& work) {
    int left = work.range.count * params.heads_per_group;
    if constexpr (Traits::kTileWords) left = load_shared_uniform(smem + Shape::kOffsetCount);
    if constexpr (Traits::kParts) left = load_shared_uniform(turns_of_part(parity));
    if constexpr (Traits::kDbiasStore && !Shape::kBiasTiles) zero_dbias_beside(work, left > 0);
    if constexpr (kRelays) {
      this->k_slot = uint64_t(uniform(slot_k()) * (Shape::kBytesK >> 4));  // for uniform registers, as the others
    }
    DkTiles dk;
    DvTiles dv;
    clear(dk);
    clear(dv);
    if (left == 0) {
      release_operands();
    } else {
      multiply(dk, dv, work, left);
    }
    int part = -1;  // kParts: the slot of the workspace, if the tile is shared
    if constexpr (Traits::kParts) part = load_shared_uniform(turns_of_part(parity ^ 1) + 12);
    if constexpr (Traits::kSplit) {
      if (left > 0) add_to_workspace(dk, dv);
    } else if constexpr (kRelays) {
      barriers.empty_relay().wait(parity_v() ^ 1);
      relay_rows(smem + Shape::kOffsetRelay, dv, 1.0f);
      named_barrier_sync(kAllConsumers, Shape::kConsumers);  // the other group's last product with K is complete
      relay_rows(smem_k(), dk, params.scale);
      give_to_relay();
    } else if (part < 0) {
      store_dk(dk, work);
      if ((Traits::kTileWords || Traits::kParts ? left : work.range.count) == 0 || !kEarlyStore) store_dv(dv, work);
    } else if (left > 0 || params.parts_apart) {  // zeros of a part without query tiles
      put_part(dk, dv, part);
    }
  }

  // dk and dv of a tile that some query sees: every query tile of every query head in turn.
  NVRTC_ATTN_DEVICE void multiply(DkTiles& dk, DvTiles& dv, Work const& work, int left) {
    int const n_group = work.n0 + 64 * group;  // first key of the group
    typename Scores::Map map(params);
    // One product less between the wait for S and P: 0.5 to 2 % less time packed, and 1.3 to 1.9 % where tiles of 128 queries
    // are ``fused``; others are 0 to 0.9 % slower, for what ptxas then does elsewhere (H200, 2026-11-29).
    constexpr bool kGivenScale = Shape::kPlainOrPacked && (Traits::kVarlen || (Traits::kFused && kBlockM == 128));
    if constexpr (kGivenScale && !Scores::Map::kMapped) map.exponent_scale = params.exponent_scale;
    Scores const scores{map, work.mask, n_group + 16 * warp + (lane >> 2), lane & 3,
                        typename Scores::Bias(params, warp, lane)};
    int m = work.range.start;
    int h = announced_first_head<Traits>(params, work.tile);
    if constexpr (Traits::kParts) {
      m = load_shared_uniform(turns_of_part(parity) + 4);
      h = load_shared_uniform(turns_of_part(parity) + 8);
    }
    Modifier modifier(params, work.tile.b, h);
    zero_keys(work, h);
    unsigned hidden = 0;  // kKeyMask: which of this thread's keys are
    bool any_hidden = false;
    if constexpr (Traits::kKeyMask) {
      HiddenKeys const keys(params, work.tile.b, h, 1);
      int const j = n_group + 16 * warp + (lane >> 2);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (j + 8 * r < work.seqlen.len_k && keys(j + 8 * r)) hidden |= 1u << r;
      }
      any_hidden = __any_sync(0xffffffffu, hidden != 0);
    }
    Keys k;
    if constexpr (Traits::kKeysInRegisters) load_own_keys(k, smem_k());
    barriers.full_v().wait(parity_v());
    Values v;
    if constexpr (Traits::kValuesInRegisters) load_own_keys(v, smem + Shape::kOffsetV);
    bool stored = false;
    Diagonals diagonals;  // kByDiagonals: of this head's query tiles up to next_m, which is not one of them
    int next_m = m;
    if constexpr (kByDiagonals) diagonals.begin(tid >> 5);
#pragma unroll 1
    for (; left > 0; --left) {
      bool whole = false;
      if constexpr (Traits::kTileWords) {
        barriers.full_q(slot.stage).wait(slot.parity);
        read_query_tile(h, m, whole);
      }
      bool held = false;  // kTileBits: what the mask keeps of the tile is beside the slot
      if constexpr (Traits::kTileBits) {
        held = h < 0;
        h &= ~kHeldBits;
      }
      int const m0 = m * kBlockM;
      if constexpr (kByDiagonals) {
        if (h != modifier.h || m != next_m) {
          give_rest(diagonals, modifier, work, next_m);
          diagonals.begin(tid >> 5);
        }
      }
      if constexpr (Modifier::kAny && (!kRich || kByDiagonals)) {
        if (h != modifier.h) modifier.move_to(work.tile.b, h);
      }
      Probabilities p, ds;
      ScoreTiles s, dp;
      CapturedGradients<typename Scores::Modifier> captured;  // of kRich another
      zero_queries<true>(work, m0);
      // S, and dP beside P.
      if constexpr (!Traits::kTileWords) barriers.full_q(slot.stage).wait(slot.parity);
      if constexpr (kBegins) Shape::Begun::load(s, smem + Shape::kOffsetDiagonals, slot.stage, 16 * warp_again());
      start_s(s, k);
      barriers.full_dout(slot.stage).wait(slot.parity);
      start_dp(dp, v);
      if constexpr (Shape::kStoresTiles) {
        if (stored) release_stored();
      }
      if constexpr (kRich) {
        // What distances decide of the first chunk, while the products run.
        Along along;
        if constexpr (kReadsDiagonals<Modifier> && kReadsAhead) {
          along.compute_transposed(Modifier(params, work.tile.b, h), m0, n_group + 16 * warp);
        }
        wait_products<0>();
        pin_registers(s);
        pin_registers(dp);
        make_p_and_ds(s, dp, along, work, h, m0, n_group, whole);
        pack_fragments<Element>(p, s);
        if constexpr (Shape::kEarlyDv) {
          zero_queries<false>(work, m0);
          start_dv(dv, p);
        }
      } else {
        TransposedKeepWords words;
        if constexpr (Traits::kKeepWords) load_keep_words(words);
        bool masked = ((Traits::kVarlen || Modifier::kAny) && m0 + kBlockM > work.seqlen.len_q) ||
                      !work.mask.keeps_tile(m0, kBlockM, n_group, 64) || (Traits::kKeyMask && any_hidden);
        typename Scores::KeptScores kept_scores;
        if constexpr (Modifier::kMasks) {
          if (Traits::kTileWords && whole) {
            kept_scores.fill();
          } else if constexpr (Traits::kTileBits) {
            if (held) {
              Shape::Bits::load(kept_scores.words,
                                smem + Shape::kOffsetBits + slot.stage * Shape::kBytesBits + tid * Shape::Bits::kBytes);
            } else {
              kept_scores.template compute_slim<true>(modifier, m0 + 2 * scores.t, scores.j);
            }
          } else {
            kept_scores.compute_transposed(modifier, m0 + 2 * scores.t, scores.j);
          }
          masked = __any_sync(0xffffffffu, masked || kept_scores.drops());
        }
        typename Scores::Along along;
        if constexpr (!kBegins) along.compute_transposed(modifier, m0, scores.j - (lane >> 2));
        // The first references of P, while S runs: 0.5 to 1.5 % less time of long sequences; others lose (H200, 2026-11-29).
        float2 ahead[Scores::kAhead ? 2 : 1];
        if constexpr (Scores::kAhead) {
#pragma unroll
          for (int m = 0; m < 2; ++m)
            ahead[m] = load_shared_float2(scores.reference_of(m, statistics(Shape::kOffsetLse)));
        }
        wait_products<1>();
        pin_registers(s);
        if constexpr (Shape::kBiasTiles) barriers.full_bias(slot.stage).wait(slot.parity);
        scores.probabilities(s, p, ahead, statistics(Shape::kOffsetLse), m0, masked, ds_slab(), hidden, modifier,
                             kept_scores, along);
        typename Scores::KeptP kept;
        if constexpr (Shape::kEarlyDv) {
          zero_queries<false>(work, m0);  // before there are two of P
          if constexpr (Traits::kKeepWords) {
            scores.keep(kept, p, words);
          } else {
            scores.keep(kept, p);
          }
          start_dv(dv, p);
          wait_products<1>();
        } else {
          wait_products<0>();
        }
        pin_registers(dp);
        if (masked && !Scores::kZeroByP) {
          scores.template gradients<true>(s, kept, dp, statistics(Shape::kOffsetDelta), m0, modifier, captured);
        } else {
          scores.template gradients<false>(s, kept, dp, statistics(Shape::kOffsetDelta), m0, modifier, captured);
        }
        // In 16 bits no earlier: S, dP, dK, dV and it would take all registers there are.
        if constexpr (!Shape::kEarlyDv) pack_fragments<Element>(p, s);
      }
      // dV and the meeting of the groups, each of which has half of dS.
      if (left == 1) release(barriers.empty_v());
      pack_fragments<Element>(ds, dp);
      if constexpr (!Shape::kEarlyDv) zero_queries<false>(work, m0);
      share_ds(ds);
      if constexpr (Shape::kEarlyDv) {
        named_barrier_sync(kAllConsumers, Shape::kConsumers);
      } else {
        int const meeting = kDsOfGroup + 2 * slot.stage + (tid >> 7);  // of `tid`: uniform registers are scarcer
        named_barrier_arrive(meeting, Shape::kConsumers);
        start_dv(dv, p);
        named_barrier_sync(meeting ^ 1, Shape::kConsumers);
      }
      // dQ, and dK beside its additions.
      if constexpr (kByDiagonals) {
        diagonals.add(ds_slab() - group * Shape::kSlabQ, Shape::kSlabQ, lane);
        if (diagonals.complete()) give_diagonals(diagonals, modifier, work, m);
        diagonals.advance();
        next_m = m + 1;
      }
      DqTiles dq;
      start_dq(dq);
      start_dk(dk, ds);
      if constexpr (!kRich && !kByDiagonals && !kBegins) captured.finish(modifier, held_sums());
      if constexpr (Shape::kStoresTiles) {
        if ((tid & 127) == 0) {
          store_box(params.tensor_map_dbias, ds_slab(), n_group, m0, h, work.tile.b);
          commit_stores();
        }
      }
      wait_products<1>();
      pin_registers(dq);
      pin_registers(dv);
      pin_registers(p);
      release(barriers.empty_dout(slot.stage));
      if (!(Traits::kSplit || kRelays) && left == 1) release_k();
      add_dq(dq, work, h, m0);
      if (kEarlyStore && left == 1) {
        if (!Traits::kParts || load_shared_uniform(turns_of_part(parity ^ 1) + 12) < 0) store_dv(dv, work);
      }
      if constexpr (!Traits::kTileWords) work.range.next(h, m);
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
    if constexpr (kByDiagonals) give_rest(diagonals, modifier, work, next_m);
    CapturedGradients<Modifier>::finish_held(held_sums());
  }

  // ---- The five products, in the order in which they start

  // S^T = K Q^T: 64 keys, all queries of the tile.
  NVRTC_ATTN_DEVICE void start_s(ScoreTiles& s, Keys& k) {
    pin_registers(s);
    uint64_t const q = q_right + slot.stage * (Shape::kBytesQ >> 4);
    uint64_t k_own = k_left;
    if constexpr (kRelays) k_own += this->k_slot;
    if constexpr (Traits::kKeysInRegisters) {
      pin_registers(k);
      begin_products();
      start_product_rbt<Element, kBlockM>(s, k, q);
    } else {
      begin_products();
      start_product_abt<Element, Shape::kBlockN, kBlockM, Traits::kHeadDim, kBegins>(s, k_own, q);
    }
    commit_products();
  }

  // dP^T = V dO^T.
  NVRTC_ATTN_DEVICE void start_dp(ScoreTiles& dp, Values& v) {
    pin_registers(dp);
    uint64_t const dout = dout_right + slot.stage * (Shape::kBytesDout >> 4);
    if constexpr (Traits::kValuesInRegisters) {
      pin_registers(v);
      begin_products();
      start_product_rbt<Element, kBlockM>(dp, v, dout);
    } else {
      begin_products();
      start_product_abt<Element, Shape::kBlockN, kBlockM, Traits::kHeadDimV>(dp, v_left, dout);
    }
    commit_products();
  }

  // K or V of this warp's keys, once a key tile: 16 keys by 16 columns a fragment.
  template <int kSteps>
  NVRTC_ATTN_DEVICE void load_own_keys(FragmentA<Element> (&a)[kSteps], unsigned tile) const {
    int const row = 64 * group + 16 * warp + (lane & 15);
    unsigned const from = tile + row * kSlabRowBytes;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      int const chunk = 2 * (step % 4) + (lane >> 4);
      ldmatrix_x4(from + step / 4 * Shape::kSlabK + ((chunk ^ (row & 7)) << 4), a[step].x[0], a[step].x[1],
                  a[step].x[2], a[step].x[3]);
    }
  }

  // dV += P^T dO: P^T from registers, which must be left alone until the product is complete.
  NVRTC_ATTN_DEVICE void start_dv(DvTiles& dv, Probabilities& p) {
    pin_registers(dv);
    pin_registers(p);
    begin_products();
    start_adding_ab<Element>(dv, p, dout_rows + slot.stage * (Shape::kBytesDout >> 4));
    commit_products();
  }

  // dQ = dS K, or dQ^T = K^T dS^T: this group's share of it, from all keys.
  NVRTC_ATTN_DEVICE void start_dq(DqTiles& dq) {
    pin_registers(dq);
    begin_products();
    uint64_t const ds = ds_operand + slot.stage * (Shape::kBytesDs >> 4);
    uint64_t k_all = k_rows;
    if constexpr (kRelays) k_all += this->k_slot;
    if constexpr (Shape::kTransposedDq) {
      start_product_atbt<Element, Shape::kSlabQ, Shape::kBlockN>(dq, k_all, ds);
    } else {
      start_product_ab<Element, Shape::kSlabQ, Shape::kBlockN>(dq, ds, k_all);
    }
    commit_products();
  }

  // dK += dS^T Q: dS^T from registers.
  NVRTC_ATTN_DEVICE void start_dk(DkTiles& dk, Probabilities& ds) {
    pin_registers(dk);
    pin_registers(ds);
    begin_products();
    start_adding_ab<Element>(dk, ds, q_rows + slot.stage * (Shape::kBytesQ >> 4));
    commit_products();
  }

  // ---- Between the products: P and dS of a tile

  // kRich: as many queries at a time, in tiles of 8, as leave registers for what they read: bias words or mask bytes, Philox
  // blocks. 16 are as many as a warp has keys, and sums along diagonals are of squares.
  static constexpr bool kNarrow = Shape::kSlabs == 1 && Shape::kSlabsV == 1;
  static constexpr int kRead = int(Traits::kHasBias && Traits::kMask) + int(Traits::kDropout);
  static constexpr int kChunk = kReadsDiagonals<Modifier> ? 2 : kNarrow ? 8 >> kRead : Traits::kDropout ? 4 : 2;
  using Gradient = TransposedScoreGradient<Traits, !kByDiagonals>;
  using Along = typename Gradient::template Along<1, kChunk>;
  // What distances decide of a chunk is found before it is needed; in the ordered pass that spills 8 bytes.
  static constexpr bool kReadsAhead = !Traits::kOrdered;

  // P from S, and dS from dP, in their places (kRich).
  NVRTC_ATTN_DEVICE void make_p_and_ds(ScoreTiles& s, ScoreTiles& dp, Along& along, Work const& work, int h, int m0,
                                       int n_group, bool whole) {
    Gradient const gradient(params, work.tile.b, h, work.seqlen.len_q, params.seqlen_k, work.seqlen.len_k, whole);
    CapturedGradients<Modifier> captured;
    float const* const lse = reinterpret_cast<float const*>(smem_pointer + (statistics(Shape::kOffsetLse) - smem));
    float const* const delta = reinterpret_cast<float const*>(smem_pointer + (statistics(Shape::kOffsetDelta) - smem));
#pragma unroll
    for (int c = 0; c < Shape::kTilesM / kChunk; ++c) {
      auto& s_chunk = reinterpret_cast<WarpTile<1, kChunk>&>(s[0][c * kChunk]);
      auto& dp_chunk = reinterpret_cast<WarpTile<1, kChunk>&>(dp[0][c * kChunk]);
      typename Gradient::template BiasWords<1, kChunk> bias;
      int const i0 = m0 + 8 * kChunk * c;
      gradient.load_bias(bias, i0, n_group + 16 * warp, lane);
      Along own = along;
      if constexpr (!kReadsAhead) {
        own.compute_transposed(gradient, i0, n_group + 16 * warp);
      } else if (c + 1 < Shape::kTilesM / kChunk) {
        along.compute_transposed(gradient, i0 + 8 * kChunk, n_group + 16 * warp);
      }
      gradient(s_chunk, dp_chunk, bias, lse + 8 * kChunk * c, delta + 8 * kChunk * c, i0, n_group + 16 * warp, lane,
               own, captured);
    }
    if constexpr (!kByDiagonals) captured.finish(gradient, held_sums());
  }

  // Which of the consumers' warps this is, asked again: over the loop there is no register for it.
  static NVRTC_ATTN_DEVICE int warp_again() { return (thread_again() - 128) >> 5; }

  // What this warp holds for elements of captured arrays, over a key tile. Found anew: over the loop there is no register for it.
  NVRTC_ATTN_DEVICE unsigned held_sums() const {
    constexpr int kBytes = CapturedGradients<Modifier>::kBytesHeld;
    return kBytes == 0 ? 0u : smem + Shape::kOffsetHeld + warp_again() * kBytes;
  }

  // kByDiagonals: the first half of the sums goes to captured arrays; their diagonals are those of query tile m.
  NVRTC_ATTN_DEVICE void give_diagonals(Diagonals& diagonals, Modifier const& modifier, Work const& work, int m) {
    CapturedGradients<Modifier> captured;
    diagonals.each(lane, [&](int distance, float sum) {
      if (sum != 0.0f) modifier.add_plainly(captured, sum, m * kBlockM, work.n0 + distance);
    });
    captured.finish(modifier, held_sums());
    diagonals.leave_first();
  }
  // All sums, of the tiles before m, after which another head or place comes.
  NVRTC_ATTN_DEVICE void give_rest(Diagonals& diagonals, Modifier const& modifier, Work const& work, int m) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) give_diagonals(diagonals, modifier, work, m);
  }

  // kTileWords: what the slot of Q holds, and whether the byte mask hides nothing of it.
  NVRTC_ATTN_DEVICE void read_query_tile(int& h, int& m, bool& whole) const {
    unsigned const from = smem + Shape::kOffsetQueryTiles + 2 * int(sizeof(int)) * slot.stage;
    h = load_shared_uniform(from);
    m = load_shared_uniform(from + 4);
    whole = m < 0;
    if (whole) m = -1 - m;
  }

  NVRTC_ATTN_DEVICE void load_keep_words(TransposedKeepWords& words) {
    helpers.full_keep(slot.stage).wait(slot.parity);
    words.load(helpers.keep(slot.stage), 64 * group + 16 * warp, lane);
    __syncwarp();
    release(helpers.empty_keep(slot.stage));
  }

  // This group's keys of dS^T, for the products of both groups with K.
  NVRTC_ATTN_DEVICE void share_ds(Probabilities const& ds) {
    store_transposed<Element>(ds_slab(), ds, warp, lane);
    fence_async_proxy();
  }
  NVRTC_ATTN_DEVICE unsigned ds_slab() const {
    return smem + Shape::kOffsetDs + slot.stage * Shape::kBytesDs + group * Shape::kSlabQ;
  }

  // Of the query tile in the slot: its row_lse or delta.
  NVRTC_ATTN_DEVICE unsigned statistics(int offset) const {
    return smem + offset + slot.stage * Shape::kBytesStatistic;
  }

  // ---- Zeros for what is not the tile's

  // dbias of the queries before and behind those that see the tile, if any. kTileWords: of every query tile without products.
  NVRTC_ATTN_DEVICE void zero_dbias_beside(Work const& work, bool any) {
    constexpr int kWarps = Shape::kConsumers / 32;
    int const len_q = work.seqlen.len_q;
    if constexpr (Traits::kTileWords) {
      KeptQueries<Traits> const kept{params, work};
      int const first_head = announced_first_head<Traits>(params, work.tile);
      int const cols = min(Shape::kBlockN, params.seqlen_k - work.n0);
      for (int head = first_head; head < first_head + params.heads_per_group; ++head) {
        for (int m = 0; m * kBlockM < len_q; ++m) {
          bool const runs = m >= work.range.first && m < kept.end() && kept.line(head).some(m);
          if (runs) continue;
          zero_dbias<Traits, kWarps>(params, work.tile.b, head, work.n0, cols, m * kBlockM,
                                     min((m + 1) * kBlockM, len_q), tid);
        }
      }
      return;
    }
    int const first = any ? work.range.first * kBlockM : len_q;
    int const last = (work.range.first + work.range.count) * kBlockM;
    int const cols = min(Shape::kBlockN, params.seqlen_k - work.n0);
    int const first_head = announced_first_head<Traits>(params, work.tile);
    for (int head = first_head; head < first_head + params.heads_per_group; ++head) {
      zero_dbias<Traits, kWarps>(params, work.tile.b, head, work.n0, cols, 0, min(first, len_q), tid);
      if (any) zero_dbias<Traits, kWarps>(params, work.tile.b, head, work.n0, cols, last, len_q, tid);
    }
  }

  // Keys beyond the sequence belong to another one or to nobody: they may hold NaN, and dQ multiplies them by zero.
  // Keys that a padding mask hides likewise.
  NVRTC_ATTN_DEVICE void zero_keys(Work const& work, int h) {
    if constexpr (kLengthsOnDevice) {
      int const valid = max(work.seqlen.len_k - work.n0, 0);
      if (valid < Shape::kBlockN) {
        zero_tile_rows<Shape::kBlockN, Shape::kSlabs>(smem_k(), max(valid, 64 * group), 64 * group + 64, tid & 127,
                                                      128);
        fence_async_proxy();
        named_barrier_sync(kOwnGroup + group, 128);
      }
    }
    if constexpr (Traits::kMask) {
      HiddenKeys const hidden(params, work.tile.b, h, params.heads_per_group);
      if (hidden.any) {
        zero_hidden_tile_rows<Shape::kBlockN, Shape::kSlabs>(smem, hidden, work.n0, work.seqlen.len_k, 64 * group,
                                                             64 * group + 64, tid & 127, 128);
        fence_async_proxy();
        named_barrier_sync(kOwnGroup + group, 128);
      }
    }
  }

  // Queries beyond the sequence belong to another one: dV and dK multiply them by zero, and they may hold NaN. Before the
  // products begin (kFirst) where scores are products alone: a branch between dS and its stores kept ptxas from moving one among
  // the others, 0.4 to 1.4 % of the time at head dim 128, 1.6 to 3.8 % at 64 (H200, 2026-11-29). Other kernels would spill.
  template <bool kFirst>
  NVRTC_ATTN_DEVICE void zero_queries(Work const& work, int m0) {
    if constexpr (Traits::kVarlen && kFirst == Shape::kPlainOrPacked) {
      int const valid = work.seqlen.len_q - m0;
      if (valid < kBlockM) {
        if constexpr (kFirst) {
          barriers.full_q(slot.stage).wait(slot.parity);
          barriers.full_dout(slot.stage).wait(slot.parity);
        }
        zero_tile_rows<kBlockM, Shape::kSlabs>(smem + Shape::kOffsetQ + slot.stage * Shape::kBytesQ, valid, kBlockM,
                                               tid, Shape::kConsumers);
        zero_tile_rows<kBlockM, Shape::kSlabsV>(smem + Shape::kOffsetDout + slot.stage * Shape::kBytesDout, valid,
                                                kBlockM, tid, Shape::kConsumers);
        fence_async_proxy();
        named_barrier_sync(kAllConsumers, Shape::kConsumers);
      }
    }
  }

  // ---- Results

  // This group's share of dQ of a query tile: added to dq_accum, or dq itself where one key tile is all.
  NVRTC_ATTN_DEVICE void add_dq(DqTiles& dq, Work const& work, int head, int m0) {
    if constexpr (Traits::kOrdered) helpers.turn().wait(slot.stage);  // one phase a query tile, two slots
    int const row_block = (Shape::kSplitRows ? 4 * group : 0) + warp;
    int const tile0 = Shape::kSplitRows ? 0 : group * Shape::kTilesDq;
    if constexpr (Traits::kOneKeyTile) {
      int const row = m0 + 16 * row_block;
      using Result = ResultQ<Traits>;
      store_rows<Result>(reinterpret_cast<Result*>(params.dq) + index_t(work.tile.b) * params.dq_stride_b +
                             index_t(row) * params.dq_stride_m + index_t(head) * params.dq_stride_h + 8 * tile0,
                         params.dq_stride_m, dq, params.scale, work.seqlen.len_q - row, params.head_dim - 8 * tile0,
                         lane);
      return;
    }
    int const block = Shape::kTransposedDq ? (4 * group + warp) * Shape::kTilesDq : row_block * Shape::kTilesD + tile0;
    float* const to =
        params.dq_accum + index_t(work.seqlen.batch_index) * params.dq_accum_stride_b +
        index_t(head) * params.dq_accum_stride_h +
        (accumulator_row0<Traits::kVarlen, kBlockM>(work.seqlen.q_row0, work.tile.b) + m0) * Traits::kHeadDim +
        block * kAccumBlock;
    // Not of columns that dq does not have.
    if constexpr (Shape::kTransposedDq) {
      if (Traits::kHeadDim == 128 || 64 * group + 16 * warp < Traits::kHeadDim) {
        add_blocks_in_bulk(to, smem + Shape::kOffsetDq + block * kAccumBlock * 4, dq, lane);
      }
    } else {
      int const tiles = min(Shape::kTilesDq, Shape::kTilesD - (Shape::kSplitRows ? 0 : group * Shape::kTilesDq));
      constexpr bool kAll = kOwn >= 0 || Shape::kSplitRows || Shape::kTilesD == 2 * Shape::kTilesDq;
#pragma unroll
      for (int d = 0; d < kTilesDq; ++d) {
        if (kAll || d < tiles) add_block(to + d * kAccumBlock, dq[0][d], lane);
      }
    }
    if constexpr (Traits::kOrdered) {
      __syncwarp();
      release(helpers.added());
    }
  }

  NVRTC_ATTN_DEVICE void store_dk(DkTiles const& dk, Work const& work) {
    int const key = work.n0 + 64 * group + 16 * warp;
    store_rows<Result>(key_rows<Result>(params.dk, params.dk_stride_b, params.dk_stride_n, params.dk_stride_h,
                                        work.tile, work.seqlen, key),
                       params.dk_stride_n, dk, params.scale, work.seqlen.len_k_slot - key, params.head_dim, lane);
  }
  NVRTC_ATTN_DEVICE void store_dv(DvTiles const& dv, Work const& work) {
    int const key = work.n0 + 64 * group + 16 * warp;
    store_rows<Result>(key_rows<Result>(params.dv, params.dv_stride_b, params.dv_stride_n, params.dv_stride_h,
                                        work.tile, work.seqlen, key),
                       params.dv_stride_n, dv, 1.0f, work.seqlen.len_k_slot - key, params.head_dim_v, lane);
  }

  // kSplit: this warp's 16 keys. Which tile it was is read again, and K released behind that: over the loop there are no
  // registers for it.
  NVRTC_ATTN_DEVICE void add_to_workspace(DkTiles const& dk, DvTiles const& dv) {
    KeyTile const tile = read_key_tile(smem + Shape::kOffsetTile);
    release_k();
    int const key = tile.n_block * Shape::kBlockN + 64 * group + 16 * warp;
    DkvAccumRow const to = dkv_accum_row<Traits>(params, tile.b, announced_key_head<Traits>(params, tile), key);
    add_blocks(to.dk, dk, lane);
    add_blocks(to.dv, dv, lane);
  }

  // kParts: this warp's 16 keys, added to slot `part` of the workspace, or alone in it (kernel/dkv_hopper_convert.cuh).
  NVRTC_ATTN_DEVICE void put_part(DkTiles const& dk, DvTiles const& dv, int part) {
    int const row = 64 * group + 16 * warp;
    float* const accum = params.dkv_accum + index_t(part) * (Shape::kBlockN * (Traits::kHeadDim + Traits::kHeadDimV));
    float* const to_dk = accum + row * Traits::kHeadDim;
    float* const to_dv = accum + Shape::kBlockN * Traits::kHeadDim + row * Traits::kHeadDimV;
    if (params.parts_apart) {
      put_blocks(to_dk, dk, lane);
      put_blocks(to_dv, dv, lane);
    } else {
      add_blocks(to_dk, dk, lane);
      add_blocks(to_dv, dv, lane);
    }
  }
  // What was announced of the part (PartTurns): there until the tile after the next one is announced.
  NVRTC_ATTN_DEVICE unsigned turns_of_part(unsigned parity_of_tile) const {
    return smem + Shape::kOffsetCount + 16 * parity_of_tile;
  }

  // ---- Slots given back

  NVRTC_ATTN_DEVICE void release(Mbarrier const& barrier) const {
    if (lane == 0) barrier.arrive();
  }

  // K and V of a tile that has no products.
  NVRTC_ATTN_DEVICE void release_operands() {
    barriers.full_v().wait(parity_v());
    if constexpr (!kRelays) {
      parity ^= 1;
      release(barriers.empty_k());
    }
    release(barriers.empty_v());
  }

  NVRTC_ATTN_DEVICE void release_k() {
    // The next parity is read again: over the loop there is no register for it.
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(parity) : "r"(smem + Shape::kOffsetTile + 12) : "memory");
    __syncwarp();
    release(barriers.empty_k());
  }

  // ---- kRelays: dk and dv to warps that store them (hopper/backward/relay.cuh)

  NVRTC_ATTN_DEVICE int slot_k() const { return int(parity & 1); }
  // Branches, as in BackwardLoader::full_k.
  NVRTC_ATTN_DEVICE unsigned smem_k() const {
    if constexpr (kRelays) return smem + slot_k() * Shape::kBytesK;
    return smem;
  }
  NVRTC_ATTN_DEVICE unsigned parity_v() const {
    if constexpr (kRelays) return parity & 1;
    return parity;
  }

  // This warp's 16 rows of a gradient.
  template <int kTiles>
  NVRTC_ATTN_DEVICE void relay_rows(unsigned to, AccTile const (&c)[1][kTiles], float factor) const {
    store_to_slabs<Element, Shape::kSlabK>(to, c, factor, 64 * group + 16 * warp, lane);
  }
  // The key tile is done. Its number is counted: were it read again, as in release_k, no operand would be in uniform registers.
  NVRTC_ATTN_DEVICE void give_to_relay() {
    parity = (parity + 1) & 3;
    __syncwarp();
    release(barriers.full_relay());
  }

  // The slot of dS of the query tile before: its gradient of the bias has left.
  NVRTC_ATTN_DEVICE void release_stored() {
    if (warp == 0) {
      wait_stores_read();
      release(barriers.empty_bias(slot.stage ^ 1));
    }
  }
};

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
  constexpr bool kCounts = Traits::kOrdered && Traits::kTileWords;  // the warp that orders additions reads words
  constexpr int kRegistersConsumer = Traits::kKeepWords || kCounts ? 224 : Traits::kBeginsProducts ? 232 : 240;
  constexpr int kRegistersLoader = Traits::kKeepWords ? 32 : kCounts ? 56 : Traits::kBeginsProducts ? 40 : 24;
  constexpr int kOtherGroups = Traits::kNumThreads / 128 - Shape::kGroups;
  // A group that asks for more than the block was launched with would wait for ever.
  static_assert(Shape::kGroups * kRegistersConsumer + kOtherGroups * kRegistersLoader <=
                    65536 / Traits::kNumThreads / 8 * 8 * (Shape::kGroups + kOtherGroups),
                "registers of the block");
  if (warp_group == 0 || warp_group > Shape::kGroups) {
    give_registers<kRegistersLoader>();
    int const warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
    if (warp == 0) {
      BackwardLoader<Traits, Shape>(params, barriers, smem, 0).run();
    } else if (Traits::kOrdered && warp == 3) {
      if constexpr (Traits::kOrdered) order_additions<Traits>(params, helpers);
    } else if constexpr (Traits::kBeginsProducts) {
      compute_diagonals_beside_queries<Traits>(params, barriers, helpers, smem);
    } else if constexpr (Shape::kRelays) {
      relay_gradients<Traits>(params, barriers, smem, warp - 1);
    } else if constexpr (Traits::kFused) {
      prepare_rows<Traits>(params, smem + Shape::kOffsetHelpers, int(threadIdx.x) & 31);
    } else if constexpr (Traits::kKeepWords) {
      make_keep_words<Traits>(params, helpers, warp < 4 ? warp + 3 : warp - 12);
    }
  } else if constexpr (Traits::kOwnCode) {
    if (warp_group == 1) {
      take_registers<kRegistersConsumer>();
      KeyTileConsumer<Traits, 0>(params, smem_pointer, smem, 0).run();
    } else {
      take_registers<kRegistersConsumer>();
      KeyTileConsumer<Traits, 1>(params, smem_pointer, smem, 1).run();
    }
  } else {
    take_registers<kRegistersConsumer>();
    KeyTileConsumer<Traits>(params, smem_pointer, smem, warp_group - 1).run();
  }
}

}  // namespace nvrtc_attn
