// Attention forward on mma.sync, compute capability 7.5 and up: one thread block per (key split, batch, head, query tile).
//
// Roles: kNumWarps = warps_m * kWarpsN * kWarpsD. Warps along m own 16 * kTilesM query rows each. kWarpsD > 1 divides the value
// columns when the output does not fit in registers; each such warp recomputes the scores. kWarpsN > 1 divides the keys
// of every tile (decode: one row block, all warps busy) and merges the softmax states through shared memory at the end.
// kSplit: blocks divide the keys of a query tile and leave partial results for `combine`, or, with kCluster > 1, are a cluster and
// add them up through each other's shared memory.
// Key tiles run from the last to the first, so the tiles that need an element mask come first. With kTileWords only those of
// which the byte mask, or the user's, leaves something: all threads read the same words.
//
// Shared memory: sQ[kBlockM][kHeadDim], then kNumStages times sK[kBlockN][kHeadDim], sV[kBlockN][kHeadDimV]; the
// epilogue reuses it from the start for the output tile, or for kWarpsN partial outputs in float32. Before all with kMaxLogit
// the largest scores, a float of each thread.
//
// Barriers, kNumStages == 1: one before Q K^T (this tile's K has landed, everyone is done with the last V) and one after it
// (V has landed, everyone is done with K); V loads during Q K^T (the first V with the first K), the next K during P V.
// kNumStages > 1: one a tile; kNumStages - 1 tiles are in flight.
#pragma once
#include "../collective/forward_output.cuh"
#include "../collective/forward_products.cuh"
#include "../collective/hidden_keys.cuh"
#include "../collective/key_share.cuh"
#include "../collective/seqlen.cuh"
#include "../collective/tile_words.cuh"

namespace nvrtc_attn {

template <class Traits>
NVRTC_ATTN_DEVICE void forward_portable(ForwardParams const& params) {
  using Shape = ForwardShape<Traits>;
  using Element = typename Shape::Element;
  using Bias = typename Traits::Bias;
  constexpr int kBlockM = Shape::kBlockM;
  constexpr int kBlockN = Shape::kBlockN;
  constexpr int kStages = Shape::kStages;
  constexpr int kThreads = Shape::kThreads;
  constexpr bool kLegacy = Shape::kLegacy;
  constexpr bool kKeysFirst = Shape::kKeysFirst;

  extern __shared__ __align__(128) unsigned char smem_begin[];
  unsigned char* const smem = smem_begin + (Traits::kMaxLogit ? int(sizeof(float)) * kThreads : 0);
  Element* const sQ = reinterpret_cast<Element*>(smem);
  Element* const sK = sQ + Shape::TileQ::kSize;
  Element* const sV = sK + kStages * Shape::TileK::kSize;

  Position<Traits> const here(params);
  int const tid = here.tid;
  int const lane = here.lane;
  int const b = here.b;
  int const h = here.h;
  int const m0 = here.m_block * kBlockM;
  RowMap<Traits::kPackedHeads> const row_map(params);
  if constexpr (Traits::kVarlen) {
    if (b == params.batch) {  // the virtual sequence of all tokens outside the others; combine does it with split keys
      if constexpr (!Traits::kSplit) {
        using Slots = typename Position<Traits>::Slots;
        int const parts =
            Position<Traits>::kSlots ? Slots{params.cu_seqlens_q, b, params.total_q}.parts() : params.num_m_blocks;
        for (int g = 0; g < row_map.group; ++g) {
          zero_rows_of_no_sequence<Element, kThreads>(params, h + g, here.m_block, parts, tid);
        }
      }
      return;
    }
  }
  SeqlenInfo<Traits::kVarlen, Traits::kSequsedK> const seqlen(params, b);
  int const num_rows = row_map.rows(seqlen.len_q);
  int const len_k = seqlen.len_k;
  auto pad_rows = [&]() {
    if constexpr (!Shape::kPartials) {
      bool const last_block = Position<Traits>::kSlots
                                  ? m0 + kBlockM >= num_rows
                                  : here.m_block == params.num_m_blocks - 1 && (!Traits::kSplit || here.split == 0);
      if constexpr (!Traits::kPackedHeads) {
        pad_lse<kThreads>(params, b, h, seqlen.len_q, m0, kBlockM, last_block, tid);
      } else if (last_block) {
        for (int g = 0; g < row_map.group; ++g) pad_lse<kThreads>(params, b, h + g, seqlen.len_q, 0, 0, true, tid);
      }
    }
  };
  auto no_rows = [&]() { return m0 >= num_rows || (Position<Traits>::kSlots && here.m_block >= params.num_m_blocks); };
  // A block without rows of the sequence has rows to pad, too, so it ends behind that.
  if constexpr (!kKeysFirst || Shape::kPartials) {
    pad_rows();
    if (no_rows()) return;
  }

  // This warp's part of the tile.
  int const warp_row0 = here.warp_row0;
  int const warp_col0 = here.warp_n * Shape::kWarpCols;

  PositionMask<Traits::kBand> const mask(mask_params<Traits>(params), seqlen.len_q, len_k);
  int first, last;
  mask.template key_tiles<kBlockN>(row_map.query(m0), row_map.queries(m0, kBlockM), first, last);
  if constexpr (Traits::kSplit) {
    int const num_splits = Traits::kCluster > 1 ? Traits::kCluster : params.num_splits;
    take_share(first, last, here.split, num_splits);
  }
  TileLine kept{};
  if constexpr (Traits::kTileWords) {
    static_assert((Traits::kMask || ModifierOf<Traits>::kMasks) && !Traits::kVarlen, "words are of a mask");
    kept = tile_line(params, b, h, here.m_block);
    last = kept.last_before(last) + 1;
  }
  auto tile_before = [&](int tile) {
    if constexpr (Traits::kTileWords) {
      return kept.last_before(tile);
    } else {
      return tile - 1;
    }
  };
  if constexpr (Shape::kPartials) {
    if (first >= last) {  // fewer key tiles than splits, or keys that are not in use: the partial output is never read
      for (int row = m0 + tid; row < min(m0 + kBlockM, num_rows); row += kThreads) {
        params.softmax_partial[partial_row(params, here.split, b, h + row_map.head(row), row_map.query(row))] =
            make_float2(-infinity(), 0.0f);
      }
      return;
    }
  }

  int h_kv = here.h_kv;
  if constexpr (!Traits::kPackedHeads || !kKeysFirst) h_kv = h / (params.num_heads / params.num_heads_kv);
  Element const* const gQ =
      reinterpret_cast<Element const*>(params.q) + index_t(seqlen.batch_index) * params.q_stride_b +
      (index_t(seqlen.q_row0) + (Traits::kPackedHeads ? 0 : m0)) * params.q_stride_m + index_t(h) * params.q_stride_h;
  Element const* const gK = reinterpret_cast<Element const*>(params.k) +
                            index_t(seqlen.batch_index) * params.k_stride_b +
                            index_t(seqlen.k_row0) * params.k_stride_n + index_t(h_kv) * params.k_stride_h;
  Element const* const gV = reinterpret_cast<Element const*>(params.v) +
                            index_t(seqlen.batch_index) * params.v_stride_b +
                            index_t(seqlen.k_row0) * params.v_stride_n + index_t(h_kv) * params.v_stride_h;
  auto load_q = [&]() {
    using TileQ = typename Shape::TileQ;
    if constexpr (Traits::kPackedHeads) {
      auto row_address = [&](int row) {
        return gQ + index_t(row_map.query(m0 + row)) * params.q_stride_m +
               index_t(row_map.head(m0 + row)) * params.q_stride_h;
      };
      load_rows<TileQ, kThreads, Traits::kAligned, kLegacy>(sQ, row_address, params.q_stride_d, num_rows - m0,
                                                            params.head_dim, tid);
    } else {
      load_tile<TileQ, kThreads, Traits::kAligned, kLegacy>(sQ, gQ, params.q_stride_m, params.q_stride_d, num_rows - m0,
                                                            params.head_dim, tid);
    }
  };
  // Key tiles are loaded strictly from the last to the first.
  using LoadK = DescendingTileLoader<typename Shape::TileK, kThreads, Traits::kAligned, kLegacy, Element>;
  using LoadV = DescendingTileLoader<typename Shape::TileV, kThreads, Traits::kAligned, kLegacy, Element>;
  LoadK loader_k(gK + index_t(last - 1) * kBlockN * params.k_stride_n, params.k_stride_n, params.k_stride_d, tid);
  LoadV loader_v(gV + index_t(last - 1) * kBlockN * params.v_stride_n, params.v_stride_n, params.v_stride_d, tid);
  auto load_k = [&](int tile, int stage) {
    loader_k.load(sK, stage * Shape::TileK::kBytes, params.k_stride_n, params.k_stride_d, len_k - tile * kBlockN,
                  params.head_dim);
  };
  auto load_v = [&](int tile, int stage) {
    loader_v.load(sV, stage * Shape::TileV::kBytes, params.v_stride_n, params.v_stride_d, len_k - tile * kBlockN,
                  params.head_dim_v);
  };

  // kTileWords: tiles between the one that was loaded last and the next.
  auto skip_k = [&](int tile, int next) { loader_k.skip(tile - 1 - next, params.k_stride_n); };
  auto skip_v = [&](int tile, int next) { loader_v.skip(tile - 1 - next, params.v_stride_n); };
  int ahead = last - 1;  // kTileWords, kStages > 1: the next tile to load
  auto skip_to_next = [&] {
    int const loaded = ahead;
    ahead = tile_before(loaded);
    skip_k(loaded, ahead);
    skip_v(loaded, ahead);
  };
  // One of the first kStages - 1 tiles, whose stage is its place among them.
  auto load_first = [&](int stage) {
    int const tile = Traits::kTileWords ? ahead : last - 1 - stage;
    if (tile >= first) {
      load_k(tile, stage);
      load_v(tile, stage);
      if constexpr (Traits::kTileWords) skip_to_next();
    }
  };
  // The loads before all else: nobody waits for the padding, which is stores.
  if constexpr (kKeysFirst) {
    if (first < last && !no_rows()) {
#pragma unroll 1  // five of them are 20 KB of instructions that run once
      for (int stage = 0; stage < kStages - 1; ++stage) {
        load_first(stage);
        if (stage == 0) load_q();
        cp_async_commit<kLegacy>();
      }
    }
    pad_rows();
    if (!Shape::kPartials && no_rows()) return;
  }

  ScoreMap<Traits> const map(params);
  OnlineSoftmax<Traits, Shape::kTilesM> softmax;
  AccTile o[Shape::kTilesM][Shape::kTilesD];
  clear<Shape>(o);
  // This thread's first row and column of a tile of scores.
  int const i0 = m0 + warp_row0 + (lane >> 2);
  int const j0 = warp_col0 + 2 * (lane & 3);
  ModifierOf<Traits> const modifier(params, b, h);
  static_assert(!ModifierOf<Traits>::kAny || !Traits::kPackedHeads, "a modifier knows one head a tile");
  Dropout const dropout = Traits::kDropout ? Dropout(dropout_params<Traits>(params), b, h) : Dropout();
  RowScores<Bias const, Traits::kPackedHeads> const bias(
      {reinterpret_cast<Bias const*>(params.bias), b, h, params.bias_stride_b, params.bias_stride_h,
       params.bias_stride_m, params.bias_stride_n},
      row_map, params.bias_stride_h);
  RowScores<unsigned char const, Traits::kPackedHeads> const byte_mask(
      {params.mask, b, h, params.mask_stride_b, params.mask_stride_h, params.mask_stride_m, params.mask_stride_n},
      row_map, params.mask_stride_h);

  // Of the tile from key n0 on, whose V this thread's own copies have brought.
  auto zero_hidden_v = [&](int n0, int stage) {
    if constexpr (Traits::kMask) {
      HiddenKeys const hidden(params, b, h, row_map.group);
      if (hidden.any) {
        zero_hidden_rows<typename Shape::TileV, kThreads>(
            sV + stage * Shape::TileV::kSize, [&](int row) { return n0 + row < len_k && hidden(n0 + row); });
      }
    }
  };

  if (first < last) {
    if constexpr (!kKeysFirst) load_q();
    QueryOperand<Shape, Traits::kPreloadQ> query;
    query.address = lane_address_a<typename Shape::TileQ>(sQ, warp_row0, lane);
    KeyOperand<Shape> const key(sK, warp_col0, lane);
    ValueOperand<Shape> const value(sV, warp_col0, here.warp_d, lane);
    if constexpr (kStages == 1) {
      load_k(last - 1, 0);
      cp_async_commit<kLegacy>();
      load_v(last - 1, 0);
      cp_async_commit<kLegacy>();
    } else if constexpr (!kKeysFirst) {
#pragma unroll
      for (int stage = 0; stage < kStages - 1; ++stage) {
        if constexpr (Traits::kTileWords) {
          load_first(stage);
        } else if (last - 1 - stage >= first) {  // through load_first() one kernel of 7.5 gets other machine code
          load_k(last - 1 - stage, stage);
          load_v(last - 1 - stage, stage);
        }
        cp_async_commit<kLegacy>();
      }
    }
    if constexpr (Traits::kPreloadQ) {
      cp_async_wait<kLegacy, kStages == 1 ? 1 : kStages - 2>();
      __syncthreads();
      query.preload();
    }

    int stage = 0;      // the one that holds the current tile
    bool has_v = true;  // kStages == 1: V of the first tile was loaded ahead
    for (int tile = last - 1, next = 0; tile >= first; tile = Traits::kTileWords ? next : tile - 1) {
      bool whole = false;  // no mask but that of positions hides anything
      if constexpr (Traits::kTileWords) whole = kept.all(tile);
      int const n0 = tile * kBlockN;
      // Tiles that this warp's rows see nothing of (above the diagonal of a causal block) need no work, only barriers.
      bool visible = true;
      int const query0 = row_map.query(m0 + warp_row0);
      int const queries = row_map.queries(m0 + warp_row0, Shape::kWarpRows);
      if constexpr (Traits::kBand) visible = mask.sees_tile(query0, queries, n0 + warp_col0, Shape::kWarpCols);

      cp_async_wait<kLegacy, kStages == 1 ? 1 : kStages - 2>();
      if (kStages > 1 && !whole) zero_hidden_v(n0, stage);
      __syncthreads();
      if constexpr (kStages == 1) {
        if (!has_v) load_v(tile, 0);
        has_v = false;
      } else {
        int const later = Traits::kTileWords ? ahead : tile - (kStages - 1);
        if (later >= first) {
          int const next_stage = stage == 0 ? kStages - 1 : stage - 1;
          load_k(later, next_stage);
          load_v(later, next_stage);
          if constexpr (Traits::kTileWords) skip_to_next();
        }
      }
      cp_async_commit<kLegacy>();

      AccTile s[Shape::kTilesM][Shape::kTilesN];
      if (visible) {
        ScoreOperand<Bias, Traits::kHasBias, Shape::kTilesM, Shape::kTilesN> bias_tile;
        ScoreOperand<unsigned char, Traits::kMask, Shape::kTilesM, Shape::kTilesN> mask_tile;
        if constexpr (Traits::kHasBias) bias_tile.load(bias, i0, n0 + j0, num_rows, len_k);
        if constexpr (Traits::kMask) {
          if (whole) {
            mask_tile.fill(1);
          } else {
            mask_tile.load(byte_mask, i0, n0 + j0, num_rows, len_k);
          }
        }
        // A mask_mod is asked before there are scores: its operands and they do not fit in registers together.
        MaskBits<ModifierOf<Traits>, Shape::kTilesM, Shape::kTilesN> mask_bits;
        if (Traits::kTileWords && whole) {
          mask_bits.fill();
        } else {
          mask_bits.compute(modifier, i0, n0 + j0);
        }
        multiply_qk<Shape>(s, query, key, stage * Shape::TileK::kBytes);
#pragma unroll
        for (int m = 0; m < Shape::kTilesM; ++m) {
#pragma unroll
          for (int n = 0; n < Shape::kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float& x = s[m][n][e];
              if constexpr (ModifierOf<Traits>::kAny) {
                x = finish_score(map, modifier, x, bias_tile.at(m, n, e), mask_tile.at(m, n, e),
                                 i0 + 16 * m + 8 * (e / 2), n0 + j0 + 8 * n + e % 2, i0, n0 + j0,
                                 mask_bits.kept(m, n, e));
              } else {
                x = finish_score(map, x, bias_tile.at(m, n, e), mask_tile.at(m, n, e));
              }
            }
          }
        }
        if (!mask.keeps_tile(query0, queries, n0 + warp_col0, Shape::kWarpCols)) {
#pragma unroll
          for (int r = 0; r < 2 * Shape::kTilesM; ++r) {
            replace_hidden(s, r, -infinity(), mask.keys_of(row_map.query(i0 + 8 * r), n0 + j0));
          }
        }
      }

      if constexpr (kStages == 1) {
        cp_async_wait<kLegacy, 0>();
        if (!whole) zero_hidden_v(n0, 0);
        __syncthreads();
        if constexpr (Traits::kTileWords) {
          next = tile_before(tile);
          skip_k(tile, next);
          if (next >= first) load_k(next, 0);
        } else {
          if (tile > first) load_k(tile - 1, 0);
        }
        cp_async_commit<kLegacy>();
        cp_async_commit<kLegacy>();  // empty: the wait for K leaves one group, which is V the first time
      }
      if (visible) {
        softmax.update(s, o, map);
        Probabilities<Traits, Shape, OnlineSoftmax<Traits, Shape::kTilesM>> p{
            softmax, map, dropout, row_map, dropout_rows<Traits>(params), i0, n0 + warp_col0, lane};
        softmax.get_references(s, map, p.reference);
        if constexpr (sizeof(Element) == 4) {
          multiply_pv_chains<Shape>(o, s, p, value, stage * Shape::TileV::kBytes);
        } else {
          multiply_pv<Shape>(o, s, p, value, stage * Shape::TileV::kBytes);
        }
      }
      if constexpr (kStages > 1) stage = stage + 1 == kStages ? 0 : stage + 1;
      if constexpr (Traits::kTileWords) {
        if constexpr (kStages == 1) {
          skip_v(tile, next);
        } else {
          next = tile_before(tile);
        }
      }
    }
    cp_async_wait<kLegacy, 0>();
    __syncthreads();  // the epilogue overwrites the tiles
  }

  softmax.finish();
  Position<Traits> const there(params);
  SeqlenInfo<Traits::kVarlen, false> const rows_of(params, there.b);
  OutputRows<Traits> const rows{params,
                                row_map,
                                there.split,
                                there.b,
                                there.h,
                                rows_of.batch_index,
                                rows_of.q_row0,
                                row_map.rows(rows_of.len_q),
                                out_is_vectorizable<Element>(params)};
  if constexpr (Traits::kMaxLogit) {
    constexpr int kRows = OnlineSoftmax<Traits, Shape::kTilesM>::kRows;
    int const row0 = there.m_block * kBlockM + there.warp_row0 + (there.lane >> 2);
    if (there.warp_d == 0) {  // others have the same scores
      float largest[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) largest[r] = softmax.of_row(r);
      raise_max_logit<Traits, kRows>(
          params, largest, softmax.row_sum, there.b, rows.count,
          [&](int r) { return row0 + 16 * (r / 2) + 8 * (r % 2); },
          [&](int row) { return there.h + row_map.head(row); }, there.lane);
    }
  }
  if constexpr (Traits::kCluster > 1) {
    add_up_cluster<Traits, Shape>(o, softmax, map, rows, smem, there);
  } else if constexpr (Traits::kWarpsN > 1) {
    merge_and_write_output<Traits, Shape>(o, softmax, map, rows, smem, there);
  } else {
    write_output<Traits, Shape>(o, softmax, map, rows, smem, there);
  }
}

}  // namespace nvrtc_attn
