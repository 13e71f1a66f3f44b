// Attention forward on Hopper (sm_90a): tiles by the copy engine, matrix products by warp-groups, one persistent block per
// multiprocessor.
//
// Roles: warp-group 0 loads (one thread issues all copies); each of the other kGroups = kBlockM / 64 warp-groups owns 64 query
// rows. A consumer keeps the products of two key tiles in flight: while the tensor cores compute P V of tile j it does
// the softmax of tile j + 1, whose Q K^T was issued just before. With kPingPong the groups also take turns at issuing, so
// that one group's products run under the other's softmax.
// Key tiles run from the last to the first: those that need an element mask come first. With kTileWords only those of which
// the byte mask leaves something; the loading warp looks them up and writes which one it is beside the slot of its K.
//
// Shared memory (slabs of 64 columns, see hopper/common/wgmma.cuh): kNumStagesQ x sQ[kBlockM][kHeadDim], kNumStages x
// sK[kBlockN][kHeadDim], kNumStages x sV[kBlockN][kHeadDimV], kNumStagesScores x bias and mask (hopper/forward/score_tile.cuh),
// kNumStagesQ x which tile it is, kTileWords: which key tile each slot of K holds, kTileBits: what a mask keeps of it,
// kBeginsProducts: what products begin with (hopper/common/begun_products.cuh),
// kMaxLogit and kLazyMax: two floats of each thread, then the mbarriers. The output goes from registers to global memory.
//
// Barriers: mbarriers full / empty for every slot of Q, K, V and of bias and mask. `full` counts the bytes of the
// copies, `empty` one arrival per consumer warp. full_q also announces the tile: the loading warp follows the schedule,
// the consumers read it. With a mask that is the same for all queries a second warp of the loading group zeroes the
// rows of V that it hides, and the consumers wait for clean_v instead of full_v. kBeginsProducts: the three other warps of the
// loading group write beside each K what its products begin with.
// Named barriers are the groups' turns, and one is all consumers. By name: hopper/forward/shape.cuh.
//
// kKeepWords: dropout's decisions are read, which a launch before this one has made (kernel/dropout_words.cuh).
//
// kSplit, few query tiles of many keys: a query tile is worked on once for each share of its key tiles, which the schedule
// counts as further query tiles, and partial results go to a workspace that combine.cuh reads.
#pragma once
#include "../collective/epilogue.cuh"
#include "../collective/seqlen.cuh"
#include "../collective/sink.cuh"
#include "../common/fragment_load.cuh"
#include "../hopper/common/barrier.cuh"
#include "../hopper/common/row_store.cuh"
#include "../hopper/common/wgmma.cuh"
#include "../hopper/forward/deferred_softmax.cuh"
#include "../hopper/forward/diagonal_warps.cuh"
#include "../hopper/forward/kept_words.cuh"
#include "../hopper/forward/load.cuh"
#include "../hopper/forward/query_rows.cuh"
#include "../hopper/forward/shape.cuh"

namespace nvrtc_attn {

// s = Q K^T once more, for one warp and without the warp-group: the rare tile whose maxima must be known after all. q and k are
// shared addresses of the warp's first query row and of the key tile.
template <class Shape, int kHeadDim, class Begin>
NVRTC_ATTN_DEVICE void recompute_scores(AccTile (&s)[1][Shape::kTilesN], unsigned q, unsigned k, int lane,
                                        Begin&& begin) {
  using Element = typename Shape::Element;
#pragma unroll
  for (int n = 0; n < Shape::kTilesN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[0][n][e] = 0.0f;
  }
  begin(s);
  int const swizzle = lane & 7;  // of the rows that this lane addresses
  unsigned const q_row = q + (lane & 15) * kSlabRowBytes;
  unsigned const k_row = k + ((lane & 7) + (lane >> 4) * 8) * kSlabRowBytes;
#pragma unroll 1
  for (int step = 0; step < kHeadDim / 16; ++step) {
    int const slab = step / 4;
    int const chunk = step % 4 * 2;
    FragmentA<Element> a;
    ldmatrix_x4(q_row + slab * Shape::kSlabQ + (((chunk + (lane >> 4)) ^ swizzle) << 4), a.x[0], a.x[1], a.x[2],
                a.x[3]);
    unsigned const k_address = k_row + slab * Shape::kSlabK + (((chunk + (lane >> 3 & 1)) ^ swizzle) << 4);
#pragma unroll
    for (int pair = 0; pair < Shape::kTilesN / 2; ++pair) {
      FragmentB<Element> b[2];
      ldmatrix_x4(k_address + pair * 16 * kSlabRowBytes, b[0].x[0], b[0].x[1], b[1].x[0], b[1].x[1]);
      mma<Element, false>(s[0][2 * pair], a, b[0]);
      mma<Element, false>(s[0][2 * pair + 1], a, b[1]);
    }
  }
}

// kSplit: normalise and write one split's partial results of this warp's 16 rows, as combine.cuh reads them.
template <class Traits, int kTilesD>
NVRTC_ATTN_DEVICE void write_partial_rows(AccTile const (&o)[1][kTilesD], DeferredSoftmax<Traits> const& softmax,
                                          HopperForwardParams const& params, int split, int b,
                                          QueryRows<Traits::kPackedHeads, Traits::kBlockM> const& rows, int i,
                                          int lane) {
  int const t = lane & 3;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const row = i + 8 * r;
    bool const valid = row < rows.count;
    float const sum = softmax.row_sum[r];
    index_t const to = rows.partial_row(params, split, b, row);
    if (t == 0 && valid) params.softmax_partial[to] = make_float2(softmax.row_max[r], sum);
    store_row<float>(params.out_partial + to * Traits::kHeadDimV + 8 * t, o, r, sum == 0.0f ? 0.0f : 1.0f / sum, valid,
                     Traits::kHeadDimV, t);
  }
}

// Normalise and write out and lse of this warp's 16 rows. Whole sectors: four threads of a row write 64 bytes.
template <class Traits, int kTilesD>
NVRTC_ATTN_DEVICE void write_rows(AccTile const (&o)[1][kTilesD], DeferredSoftmax<Traits> const& softmax,
                                  ScoreMap<Traits> const& map, float sink, ForwardParams const& params, int b,
                                  QueryRows<Traits::kPackedHeads, Traits::kBlockM> const& rows, int batch_index,
                                  int q_row0, int i, int lane) {
  using Element = ResultQ<Traits>;
  int const t = lane & 3;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const row = i + 8 * r;
    bool const valid = row < rows.count;
    int const query = rows.query(row);
    int const h = rows.head(row);
    float sum = softmax.row_sum[r];
    RowEnd end{};
    if constexpr (Traits::kHasSink) {
      end = take_sink<Traits>(softmax.row_max[r], sum, sink, map);
      sum = end.sum;
    }
    bool const empty = sum == 0.0f;  // and not its maximum: of NaN alone that is -inf too
    float factor = empty ? 0.0f : (Traits::kDropout ? params.dropout_multiplier : 1.0f) / sum;
    if constexpr (Traits::kHasSink) factor *= end.weight;
    if (t == 0 && valid && params.lse != nullptr) {
      float const top = Traits::kHasSink ? end.top : softmax.row_max[r] * (map.exponent_scale * kLn2);
      float const lse = top + __logf(sum);
      *lse_row(params, b, h, q_row0, query) = empty ? params.lse_empty : lse;
    }
    Element* const to = reinterpret_cast<Element*>(params.out) + index_t(batch_index) * params.out_stride_b +
                        index_t(h) * params.out_stride_h + (index_t(q_row0) + query) * params.out_stride_m + 8 * t;
    store_row<Element>(to, o, r, factor, valid, params.head_dim_v, t);
  }
}

// kTileWords: which key tile a slot of K holds, once it is there. `first` becomes n at the last tile, and less than n before, so
// that n > first says that there are more, as where tiles are counted down.
template <class Shape>
NVRTC_ATTN_DEVICE void read_kept_tile(unsigned smem, int stage, int& n, int& first, typename Shape::KnownTile& whole,
                                      int group) {
  SlotTile const slot = read_slot_tile(smem + Shape::kOffsetKeyTiles + 4 * stage);
  n = slot.n();
  first = slot.is_last() ? n : n - 1;
  whole = slot.is_whole();
  if constexpr (Shape::kTileBits) {
    whole.held = slot.is_held();
    int const words = Shape::kOffsetBits + stage * Shape::kBytesBits + Shape::kOffsetGroupWords;
    whole.hidden = slot.is_held() && load_shared_uniform(smem + words + 4 * group) == 0;
  }
}

// kTileWords, before n is counted down: it becomes one more than the next key tile, which is in slot `stage`, if there is one.
// (Another way to count than the loop's own, and kernels without words get other machine code.)
template <class Shape>
NVRTC_ATTN_DEVICE void look_ahead(unsigned smem, int stage, int& n, int& first, typename Shape::KnownTile& whole,
                                  int group) {
  if constexpr (Shape::kTileWords) {
    if (n > first) {
      read_kept_tile<Shape>(smem, stage, n, first, whole, group);
      ++n;
    }
  }
}

// kTileBits: and where this thread's bits of the tile in slot `stage` are.
template <class Shape>
NVRTC_ATTN_DEVICE auto with_bits(unsigned smem, int stage, typename Shape::KnownTile const& whole) {
  if constexpr (Shape::kTileBits) {
    int const thread = thread_again() - 128;
    return TileAndBits{whole, smem + Shape::kOffsetBits + stage * Shape::kBytesBits + thread * Shape::Bits::kBytes};
  } else {
    return whole;
  }
}

// One consumer warp-group.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void consume_tiles(HopperForwardParams const& params, ForwardBarriers<Shape> const& barriers,
                                     unsigned char* smem_pointer, unsigned smem, int group) {
  using Element = typename Shape::Element;
  using Bias = typename Traits::Bias;
  constexpr int kBlockN = Shape::kBlockN;
  int const tid = int(threadIdx.x) - 128;
  int const lane = tid & 31;
  int const warp_row0 = 64 * group + 16 * ((tid >> 5) & 3);
  unsigned const sK = smem + Shape::kOffsetK;
  unsigned const sV = smem + Shape::kOffsetV;
  uint64_t const q_operand = descriptor_k_major(smem + group * 64 * kSlabRowBytes);
  uint64_t const k_operand = descriptor_k_major(sK);
  uint64_t const v_operand = descriptor_mn_major(sV, Shape::kSlabK);

  // Turns: the last group lets the first one start.
  constexpr bool kTurns = Traits::kPingPong && Shape::kGroups > 1;
  auto wait_turn = [&] {
    if constexpr (kTurns) named_barrier_sync(Shape::kTurnOfGroup + group, Shape::kTurnThreads);
  };
  auto pass_turn = [&] {
    if constexpr (kTurns) {
      named_barrier_arrive(Shape::kTurnOfGroup + (group + 1 == Shape::kGroups ? 0 : group + 1), Shape::kTurnThreads);
    }
  };
  if (kTurns && group == Shape::kGroups - 1) pass_turn();

  RingPosition<Shape::kStages> k_slot, v_slot;
  RingPosition<Shape::kStagesQ> q_slot;
  RingPosition<Shape::kStagesScores> score_slot;
  ScoreTileAccess<Traits> const tiles(params, warp_row0, lane);
  auto release = [&](Mbarrier const& barrier) {
    if (lane == 0) barrier.arrive();
  };
  auto await_v = [&] {
    if (Traits::kMask && params.mask_stride_m == 0) {
      barriers.clean_v(v_slot.stage).wait(v_slot.parity);
    } else {
      barriers.full_v(v_slot.stage).wait(v_slot.parity);
    }
  };
  // kBeginsProducts: what the product with the K of a slot is added to.
  auto begin_scores = [&](auto& s, int stage) {
    if constexpr (Traits::kBeginsProducts) {
      Shape::Begun::load(s, smem + Shape::kOffsetDiagonals, stage, 16 * int((thread_again() - 128) >> 5));
    }
  };
  auto start_scores = [&](auto& s) {  // of as many keys as s has columns
    pin_registers(s);
    begin_products();
    start_product_abt<Element, Shape::kBlockM, kBlockN, Traits::kHeadDim, Traits::kBeginsProducts>(
        s, q_operand + q_slot.stage * (Shape::kBytesQ >> 4), k_operand + k_slot.stage * (Shape::kBytesK >> 4));
    commit_products();
  };
  // Bias and mask of the tile whose product is running: their slot, once they are there.
  auto await_scores = [&](auto& operands) {
    if constexpr (Shape::kStagesScores > 0) {
      barriers.full_scores(score_slot.stage).wait(score_slot.parity);
      operands.tile = smem + Shape::kOffsetScores + score_slot.stage * Shape::Scores::kBytes;
    }
  };
  auto release_scores = [&] {
    if constexpr (Shape::kStagesScores > 0) {
      __syncwarp();  // all lanes have read
      release(barriers.empty_scores(score_slot.stage));
      score_slot.advance();
    }
  };
  // Only kLazyMax computes a tile again from its queries: otherwise the last Q K^T is the end of them, and the next ones can
  // come into a single slot. D 256, S 16384, causal: 1346 against 1370 us. A second slot leaves time without that.
  constexpr bool kReleaseEarly = !Traits::kLazyMax && Shape::kStagesQ == 1 && !Traits::kTileBits;
  auto release_q = [&] {
    release(barriers.empty_q(q_slot.stage));
    q_slot.advance();
  };

  while (true) {
    auto const tile = announced_tile<Traits>(barriers, smem, q_slot);
    if (tile.m_block < 0) break;
    if constexpr (Traits::kVarlen) {
      if (tile.b == params.batch) {  // the virtual sequence of all tokens outside the others
        release_q();
        zero_rows_of_no_sequence<Element, Shape::kConsumers>(params, tile.h, tile.m_block,
                                                             query_tile_list(params).parts(), tid);
        continue;
      }
    }
    int split = 0;
    if constexpr (Traits::kSplit) split = read_split(smem + Shape::kOffsetTiles + Shape::kBytesTile * q_slot.stage);
    auto const seqlen = seqlen_of<Traits>(params, tile);
    int const len_q = seqlen.len_q;
    using Rows = QueryRows<Traits::kPackedHeads, Shape::kBlockM>;
    Rows const rows(params, tile.m_block, tile.h, len_q);
    int const m0 = rows.m0;
    bool const last_tile = Traits::kVarlen ? m0 + Shape::kBlockM >= len_q : tile.m_block == params.num_m_blocks - 1;
    if constexpr (Traits::kSplit) {
      // combine.cuh writes lse, and pads it.
    } else if constexpr (Traits::kPackedHeads) {
      for (int h = rows.h; last_tile && h < rows.h + rows.group; ++h) {
        pad_lse<Shape::kConsumers>(params, tile.b, h, len_q, 0, 0, true, tid);
      }
    } else {
      pad_lse<Shape::kConsumers>(params, tile.b, tile.h, len_q, m0, Shape::kBlockM, last_tile, tid);
    }
    if (m0 >= len_q) {
      release_q();
      continue;
    }
    PositionMask<Traits::kBand> const mask(mask_params<Traits>(params), len_q, seqlen.len_k);
    int first, last;
    mask.template key_tiles<kBlockN>(rows.query(m0), Rows::per_tile(params), first, last);
    if constexpr (Traits::kSplit) take_share(first, last, split, params.num_splits);
    if constexpr (Traits::kTileWords) {
      if (!read_has_keys(smem + Shape::kOffsetTiles + Shape::kBytesTile * q_slot.stage)) last = first;
    }

    ScoreMap<Traits> const map(params);
    Dropout const dropout = Traits::kDropout ? Dropout(dropout_params<Traits>(params), tile.b, tile.h) : Dropout();
    ScoreTensor<Bias const> const bias(reinterpret_cast<Bias const*>(params.bias), tile.b, tile.h, params.bias_stride_b,
                                       params.bias_stride_h, params.bias_stride_m, params.bias_stride_n);
    ScoreTensor<unsigned char const> const byte_mask(params.mask, tile.b, tile.h, params.mask_stride_b,
                                                     params.mask_stride_h, params.mask_stride_m, params.mask_stride_n);
    int const i = m0 + warp_row0 + (lane >> 2);
    typename ScoreTile<Traits>::Row row;
    typename ScoreTile<Traits>::Lane thread_lane;
    if constexpr (ScoreTile<Traits>::kPlaceAgain) {
      row = {m0 + 64 * group};
    } else {
      row = i;
      thread_lane = lane;
    }
    ScoreTile<Traits> const scores{ModifierOf<Traits>(params, tile.b, tile.h),
                                   map,
                                   mask,
                                   bias,
                                   byte_mask,
                                   dropout,
                                   m0 + 64 * group,
                                   row,
                                   thread_lane,
                                   tiles,
                                   rows};

    using Kept = cute::conditional_t<Traits::kKeepWords, KeptWords<Traits>, NoKeptWords>;
    Kept const kept(params, tile.b, tile.h, tile.m_block);
    DeferredSoftmax<Traits> softmax;
    NotedScores const noted{smem + Shape::kOffsetNoted};
    if constexpr (kNotesLargest<Traits>) noted.begin();
    float sink = 0.0f;
    AccTile o[1][Shape::kTilesD];
#pragma unroll
    for (int d = 0; d < Shape::kTilesD; ++d) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][d][e] = 0.0f;
    }
    if (first < last) {
      AccTile s[1][Shape::kTilesN];
      FragmentA<Element> p[Shape::kStepsN];

      int n = last - 1;
      typename Shape::KnownTile whole = false;
      if constexpr (Traits::kTileWords) {
        barriers.full_k(k_slot.stage).wait(k_slot.parity);
        read_kept_tile<Shape>(smem, k_slot.stage, n, first, whole, group);
      }
      if constexpr (Traits::kVarlen || Traits::kSequsedK) {
        // Rows of V beyond the sequence belong to another one or to nobody: they may hold NaN, which 0 * NaN would spread.
        // (Beyond the tensor the copy engine delivers zeros.)
        int const valid_rows = seqlen.len_k - n * kBlockN;
        if (valid_rows < kBlockN) {
          await_v();
          unsigned char* const tile_v = smem_pointer + (sV - smem) + v_slot.stage * Shape::kBytesV;
          for (int c = tid; c < Shape::kSlabsV * (kBlockN - valid_rows) * 8; c += Shape::kConsumers) {
            int const row = valid_rows + c / (8 * Shape::kSlabsV);
            int const chunk = c % (8 * Shape::kSlabsV);
            *reinterpret_cast<uint4*>(tile_v + (chunk / 8) * Shape::kSlabK + row * kSlabRowBytes + chunk % 8 * 16) =
                make_uint4(0, 0, 0, 0);
          }
          fence_async_proxy();
          named_barrier_sync(Shape::kAllConsumers, Shape::kConsumers);
        }
      }
      // Tiles of which this group sees nothing, above its diagonal or because it has no rows: let them pass. One is always
      // computed, so that all groups take equal turns. kTileBits: those of which the bits say so, wherever they are; what is in
      // flight ends before them. Documents, D 64: 244 to 231 us, a neighbourhood, D 128: 205 to 175.
      int const group_row = m0 + 64 * group;
      int const columns = rows.count > group_row ? mask.end_key(rows.query(group_row + 63)) : 0;  // that the group sees
      // (Kernels without bits have their conditions in the loops themselves: behind a lambda they get other machine code.)
      bool begun = false;
      auto hidden = [&] {
        if constexpr (Traits::kTileBits) return whole.hidden;
        return false;
      };
      auto passes = [&] { return n >= first + (begun ? 0 : 1) && (hidden() || n * kBlockN >= columns); };
      do {
#pragma unroll 1
        for (; Traits::kTileBits ? passes() : n > first && n * kBlockN >= columns; --n) {
          barriers.full_k(k_slot.stage).wait(k_slot.parity);
          release(barriers.empty_k(k_slot.stage));
          k_slot.advance();
          await_v();
          release(barriers.empty_v(v_slot.stage));
          v_slot.advance();
          if constexpr (Shape::kStagesScores > 0) {
            barriers.full_scores(score_slot.stage).wait(score_slot.parity);
            release_scores();
          }
          wait_turn();
          pass_turn();
          if constexpr (Traits::kTileWords) {
            if (!Traits::kTileBits || n > first) barriers.full_k(k_slot.stage).wait(k_slot.parity);
            look_ahead<Shape>(smem, k_slot.stage, n, first, whole, group);
          }
        }
        if (Traits::kTileBits && n < first) break;

        barriers.full_k(k_slot.stage).wait(k_slot.parity);
        constexpr bool kKeepAhead = Traits::kDropout && !(ScoreTile<Traits>::kKeepBeside || Traits::kKeepWords);
        KeepWords<Shape::kStepsN> keep;
        auto first_tile = [&](auto& s) {
          typename ScoreTile<Traits>::template Operands<sizeof(s) / sizeof(AccTile)> operands;
          begin_scores(s, k_slot.stage);
          if (Traits::kTileBits && begun) wait_turn();
          start_scores(s);
          if (Traits::kTileBits && begun) pass_turn();
          if constexpr (kKeepAhead) keep = keep_words<Shape::kStepsN>(dropout, i, n * kBlockN, lane);
          if constexpr (Traits::kKeepWords) kept.load(keep, n, thread_again() - 128);
          scores.load(operands, n * kBlockN, with_bits<Shape>(smem, k_slot.stage, whole));
          await_scores(operands);
          wait_products<0>();
          pin_registers(s);
          if constexpr (Traits::kTileBits) __syncwarp();  // all lanes have read
          release(barriers.empty_k(k_slot.stage));
          k_slot.advance();
          if (kReleaseEarly && n == first) release_q();
          scores.finish(s, operands, n * kBlockN, whole);
          release_scores();
          // Either is right: row_max is the first tile's own maximum. NVRTC 13.5 makes products wait (C7511) for the one, and for
          // what it derives from n below.
          constexpr bool kBegins = kNewerNvrtc && !Traits::kTileBits;
          if constexpr (kNotesLargest<Traits> && !kBegins) noted.note(s);
          bool const raised = softmax.raise(s, map);
          if constexpr (Traits::kTileBits) {
            if (raised && begun) softmax.rescale(o);
          }
          if constexpr (kNotesLargest<Traits> && kBegins) noted.begin(softmax.row_max);
          softmax.add(scores.exponentiate(s, softmax.references(s), n * kBlockN, keep));
        };
        // On the diagonal every other group sees at most half of the tile.
        int const diagonal = kNewerNvrtc && kNotesLargest<Traits> ? opaque(n) : n;
        if (Traits::kHalfTile && columns - diagonal * kBlockN <= Shape::kHalfN) {
          first_tile(reinterpret_cast<AccTile(&)[1][Shape::kHalfN / 8]>(s));
#pragma unroll
          for (int tile_n = Shape::kHalfN / 8; tile_n < Shape::kTilesN; ++tile_n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[0][tile_n][e] = 0.0f;
          }
        } else {
          first_tile(s);
        }
        begun = true;
        pack_probabilities<Traits>(p, s, keep);
        bool settled = softmax.settled();
        // Whole tiles may be hidden from a row that has no key yet: they leave it as it is.
        constexpr bool kHides = Traits::kMask || ScoreTile<Traits>::Modifier::kMasks;
        // Three groups have 160 registers a thread each. NVRTC 13.5 carries what it has derived from n in both shapes of the first
        // tile into the loop, runs out of them and makes one product wait for the other (C7511); at head dim 96 it does so with two
        // groups, too. Of two groups NVRTC 13.0 does that if n is hidden, and 13.5 where there is a sink.
        constexpr bool kHidesTile = Shape::kGroups == 3 || (kNewerNvrtc && !Traits::kHasSink);
        if constexpr (Traits::kHalfTile && kHidesTile) n = opaque(n);

        if (n > first) barriers.full_k(k_slot.stage).wait(k_slot.parity);
        look_ahead<Shape>(smem, k_slot.stage, n, first, whole, group);
#pragma unroll 1
        for (--n; Traits::kTileBits ? n >= first && !hidden() : n >= first; --n) {
          begin_scores(s, k_slot.stage);
          wait_turn();
          start_scores(s);
          await_v();
          pin_registers(o);
          pin_registers(p);
          begin_products();
          start_adding_ab<Element>(o, p, v_operand + v_slot.stage * (Shape::kBytesV >> 4));
          commit_products();
          pass_turn();
          typename ScoreTile<Traits>::template Operands<Shape::kTilesN> operands;
          if constexpr (kKeepAhead) keep = keep_words<Shape::kStepsN>(dropout, i, n * kBlockN, lane);
          if constexpr (Traits::kKeepWords) kept.load(keep, n, thread_again() - 128);
          scores.load(operands, n * kBlockN, with_bits<Shape>(smem, k_slot.stage, whole));
          await_scores(operands);

          wait_products<1>();
          pin_registers(s);
          int const k_stage = k_slot.stage;
          k_slot.advance();
          if (kReleaseEarly && n == first) release_q();
          bool raised = false;
          bool redo = false;
          float2 sums;
          if constexpr (Traits::kLazyMax) {
            // Probabilities against the old maximum are exact as long as nothing overflows, and their sums tell.
            scores.finish(s, operands, n * kBlockN, whole);
            if constexpr (kNotesLargest<Traits>) noted.note(s);
            bool const begins = !settled && (!kHides || softmax.begins_row(s));
            sums = scores.exponentiate(s, make_float2(softmax.reference[0], softmax.reference[1]), n * kBlockN, keep);
            redo = __any_sync(0xffffffffu, begins || !(sums.x < kLazyLimit<Element> && sums.y < kLazyLimit<Element>));
            if (!redo) {
              release(barriers.empty_k(k_stage));
              release_scores();
            }
          } else {
            if constexpr (Traits::kTileBits) __syncwarp();
            release(barriers.empty_k(k_stage));
            scores.finish(s, operands, n * kBlockN, whole);
            release_scores();
            raised = softmax.raise(s, map);
            sums = scores.exponentiate(s, softmax.references(s), n * kBlockN, keep);
          }

          // ptxas moves a wait for products ahead of independent arithmetic, and the softmax would run after P V instead of
          // beside it. It does not move it over the loop of an mbarrier wait: this one is for the next tile's keys.
          pin_registers(s);
          if (n > first) barriers.full_k(k_slot.stage).wait(k_slot.parity);
          wait_products<0>();
          pin_registers(o);
          pin_registers(p);
          release(barriers.empty_v(v_slot.stage));
          v_slot.advance();
          if constexpr (Traits::kLazyMax) {
            if (redo) {
              int n0 = n * kBlockN;
              asm volatile(""
                           : "+r"(n0));  // or the compiler keeps the mask's comparisons from above, a register for each
              int const row_of_warp =
                  ScoreTile<Traits>::kPlaceAgain ? 64 * group + (thread_again() >> 5 & 3) * 16 : warp_row0;
              unsigned const q_tile = smem + q_slot.stage * Shape::kBytesQ + row_of_warp * kSlabRowBytes;
              recompute_scores<Shape, Traits::kHeadDim>(s, q_tile, sK + k_stage * Shape::kBytesK, thread_lane,
                                                        [&](auto& s) { begin_scores(s, k_stage); });
              if constexpr (!Traits::kTileBits) release(barriers.empty_k(k_stage));
              scores.load(operands, n0, with_bits<Shape>(smem, k_stage, whole));
              if constexpr (Traits::kTileBits) {
                __syncwarp();
                release(barriers.empty_k(k_stage));
              }
              scores.finish(s, operands, n0, whole);
              release_scores();
              raised = softmax.raise(s, map);
              settled = softmax.settled();
              sums = scores.exponentiate(s, softmax.references(s));
            }
          }
          softmax.add(sums);
          if (raised) softmax.rescale(o);
          pack_probabilities<Traits>(p, s, keep);
          look_ahead<Shape>(smem, k_slot.stage, n, first, whole, group);
        }
        if constexpr (!kReleaseEarly && !Traits::kTileBits) release_q();

        await_v();
        pin_registers(o);
        pin_registers(p);
        begin_products();
        start_adding_ab<Element>(o, p, v_operand + v_slot.stage * (Shape::kBytesV >> 4));
        commit_products();
        sink = load_sink<Traits>(params, tile.h);  // beside the last product
        if constexpr (!Traits::kTileBits) softmax.finish();
        wait_products<0>();
        pin_registers(o);
        release(barriers.empty_v(v_slot.stage));
        v_slot.advance();
      } while (Traits::kTileBits && n >= first);
      if constexpr (Traits::kTileBits) {
        release_q();
        softmax.finish();
      }
    } else {
      release_q();
      sink = load_sink<Traits>(params, tile.h);
    }
    if constexpr (Traits::kMaxLogit) {
      float largest[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (kNotesLargest<Traits>) {
          largest[r] = noted.load(r);
        } else {
          largest[r] = softmax.of_row(r);
        }
      }
      raise_max_logit<Traits, 2>(
          params, largest, softmax.row_sum, tile.b, rows.count, [&](int r) { return row + 8 * r; },
          [&](int of_row) { return rows.head(of_row); }, thread_lane);
    }
    if constexpr (Traits::kSplit) {
      write_partial_rows<Traits>(o, softmax, params, split, tile.b, rows, row, thread_lane);
    } else {
      write_rows<Traits>(o, softmax, map, sink, params, tile.b, rows, seqlen.batch_index, seqlen.q_row0, row,
                         thread_lane);
    }
  }
}

template <class Traits>
NVRTC_ATTN_DEVICE void forward_hopper(HopperForwardParams const& params) {
  using Shape = HopperShape<Traits>;
  extern __shared__ __align__(1024) unsigned char smem_pointer[];
  unsigned const smem = shared_address(smem_pointer);
  ForwardBarriers<Shape> const barriers{smem + Shape::kOffsetBarriers};
  if (threadIdx.x == 0) barriers.init();
  if constexpr (Traits::kPackedHeads) {
    // Rows of Q that no copy writes, where a group does not divide the tile.
    int const used = QueryRows<true, Shape::kBlockM>::per_tile(params) * params.heads_per_group;
    int const chunks = (Shape::kBlockM - used) * (kSlabRowBytes / 16);
    for (int n = int(threadIdx.x); n < Shape::kStagesQ * Shape::kSlabsQ * chunks; n += Traits::kNumThreads) {
      int const slab = n / chunks;
      reinterpret_cast<uint4*>(smem_pointer + slab * Shape::kSlabQ + used * kSlabRowBytes)[n - slab * chunks] =
          make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
  }
  __syncthreads();
  // A broadcast tells the compiler that the role is uniform over the warp.
  int const warp_group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warp_group == 0) {
    give_registers<Shape::kRegistersProducer>();
    if (threadIdx.x < 32) {
      ForwardLoader<Traits>(params, barriers, smem).run();
    } else if constexpr (Traits::kBeginsProducts) {
      compute_diagonals_beside_keys<Traits>(params, barriers, smem);
    } else if constexpr (Traits::kMask) {
      if (threadIdx.x < 64 && params.mask_stride_m == 0) zero_hidden_values<Traits>(params, barriers, smem);
    }
  } else {
    take_registers<Shape::kRegistersConsumer>();
    using Consumer = cute::conditional_t<Traits::kBeginsProducts, ProductsBegun<Traits>, Traits>;
    consume_tiles<Consumer>(params, barriers, smem_pointer, smem, warp_group - 1);
  }
}

}  // namespace nvrtc_attn
