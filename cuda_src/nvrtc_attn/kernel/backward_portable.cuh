// dk and dv of one key tile, with dq added into a float32 workspace and, when asked for, dS written as dbias.
//
// One CTA owns kBlockN keys of one (batch, key head) and loops over the query tiles that see them, of every query head that
// shares the key head. Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, on kWarpsN x kWarpsM warps over keys x
// queries: the accumulators of P^T and dS^T are then left operands of dV += P^T dO and dK += dS^T Q as they stand. A warp
// accumulates its keys and 1 / kWarpsM of the head dim: with kWarpsM = 1 (head dim <= 64) P never leaves registers, otherwise
// the warps that share keys exchange P^T and dS^T through shared memory, each starting with its own part. dq needs dS of all
// warps: dS^T goes to shared memory and kWarpsMdQ x (rest) warps compute dS K and add it with red.global.
//
// Barriers of one query tile: (1) its Q, dO and statistics have landed and the previous tile is done with; (2) kWarpsM > 1:
// the warps sharing keys have exchanged P^T and dS^T (a named barrier for each such group); (3) dS^T is complete, and single
// buffers of Q and dO are free: the next tile's loads run under the dq product.
//
// Shared memory: K, V, Q[kStages], dO[kStagesDout], P^T (kWarpsM > 1), dS^T, row_lse[2], delta[2]. The gradients of the tile
// leave through the K and V buffers. kVInRegisters: a warp keeps the V of its keys, which came through the buffers of Q.
//
// Writes every row of dk and dv in [0, len of the slot): zeros where no query sees the key. With varlen an extra, virtual
// sequence zeroes the tokens of no sequence. Split: adds to dkv_accum (zeroed by the host) instead.
//
// kStoresdQ: the tile holds all keys, so that dq of a query tile is complete and goes to its own tensor, every row of it.
// kFused: row_lse and delta are computed here, where a tile's loads begin, and delta is written for the kernel of dbias.
#pragma once
#include "../collective/gradient_accumulator.cuh"
#include "../collective/hidden_keys.cuh"
#include "../collective/packed_slots.cuh"
#include "../collective/score_gradient_transposed.cuh"
#include "../collective/tile_statistics.cuh"
#include "../collective/tile_words.cuh"
#include "../common/tile_load.cuh"
#include "../common/tile_store.cuh"
#include "dkv_convert.cuh"

namespace nvrtc_attn {

template <class Traits>
struct BackwardTiles {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kWarpsN = Traits::kWarpsNdKV;
  static constexpr int kWarpsM = Traits::kNumWarps / kWarpsN;
  static_assert(kWarpsM == Traits::kWarpsMSdP && kWarpsM * kWarpsN == Traits::kNumWarps);

  // S^T and dP^T of a warp: kRowsN keys x kRowsM queries, kChunkM queries at a time: 64 accumulator registers at most, half
  // of that in float32, whose operands take twice the registers once they are split, where dQ takes more (head dim 256), and
  // where V or a modifier takes its part.
  static constexpr bool kMoreTaken = Traits::kVInRegisters || ModifierOf<Traits>::kAny;
  static constexpr int kChunkArea = sizeof(Element) == 2 && kWarpsM <= 2 && !kMoreTaken ? 64 : 32;
  static constexpr int kRowsN = kBlockN / kWarpsN;
  static constexpr int kRowsM = kBlockM / kWarpsM;
  static constexpr int kTilesN = kRowsN / 16;
  static constexpr int kChunkM = kRowsM * kTilesN <= kChunkArea ? kRowsM : kChunkArea / kTilesN;
  static constexpr int kTilesM = kChunkM / 8;
  static_assert(kRowsN % 16 == 0 && kRowsM % 16 == 0 && kRowsM % kChunkM == 0 && kChunkM % 16 == 0);

  // dK and dV of a warp: kRowsN keys x kTilesD (kTilesDv) tiles of 8 columns. The CTA covers one of kDimSlices of the head dim.
  static constexpr int kColumnGroups = kWarpsM * Traits::kDimSlices;
  static constexpr int kTilesD = (kHeadDim / 8 + kColumnGroups - 1) / kColumnGroups;
  static constexpr int kTilesDv = (kHeadDimV / 8 + kColumnGroups - 1) / kColumnGroups;

  // dQ of a warp: kTilesMdQ x 16 queries, kPassesDq passes of kTilesDq tiles of 8 columns: 64 accumulator registers at
  // most, 32 in float32.
  static constexpr int kWarpsMdQ = Traits::kWarpsMdQ;
  static constexpr int kWarpsDdQ = Traits::kNumWarps / kWarpsMdQ;
  static constexpr int kTilesMdQ = kBlockM / kWarpsMdQ / 16;
  static constexpr bool kDq = Traits::kDqAtomic || Traits::kStoresdQ;
  static_assert(!kDq || (kBlockM % (16 * kWarpsMdQ) == 0 && kWarpsMdQ * kWarpsDdQ == Traits::kNumWarps));
  static_assert(!Traits::kStoresdQ || !(Traits::kVarlen || Traits::kMask), "every query tile that has keys is visited");
  static_assert(!Traits::kFused || (!Traits::kVarlen && Traits::kDimSlices == 1), "rows of one sequence, once");
  static constexpr int kDqGroups = kWarpsDdQ * Traits::kDimSlices;
  static constexpr int kTilesDqWarp = (kHeadDim / 8 + kDqGroups - 1) / kDqGroups;
  static constexpr int kTilesDqMax = (sizeof(Element) == 4 ? 8 : 16) / (kTilesMdQ > 0 ? kTilesMdQ : 1);
  static constexpr int kPassesDq = (kTilesDqWarp + kTilesDqMax - 1) / kTilesDqMax;
  static constexpr int kTilesDq = (kTilesDqWarp + kPassesDq - 1) / kPassesDq;

  using TileK = SmemTile<Element, kBlockN, kHeadDim>;
  using TileV = SmemTile<Element, kBlockN, kHeadDimV>;
  using TileQ = SmemTile<Element, kBlockM, kHeadDim>;
  using TileDout = SmemTile<Element, kBlockM, kHeadDimV>;
  using TileS = SmemTile<Element, kBlockN, kBlockM>;

  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kStagesDout = Traits::kNumStagesDout;
  static_assert(!(Traits::kVInSmem && Traits::kVInRegisters) && (!Traits::kVInRegisters || sizeof(Element) == 2));
  static constexpr bool kStoresP = kWarpsM > 1;
  static constexpr bool kStoresDs = kWarpsM > 1 || kDq;

  static constexpr int kOffsetV = TileK::kSize;
  static constexpr int kOffsetQ = kOffsetV + (Traits::kVInSmem ? TileV::kSize : 0);
  static constexpr int kOffsetDout = kOffsetQ + kStages * TileQ::kSize;
  static constexpr int kOffsetP = kOffsetDout + kStagesDout * TileDout::kSize;
  static constexpr int kOffsetDs = kOffsetP + (kStoresP ? TileS::kSize : 0);
  static constexpr int kElements = kOffsetDs + (kStoresDs ? TileS::kSize : 0);
  static constexpr int kStatistics = 4 * kBlockM;  // floats: row_lse[2], delta[2]
  static constexpr int kBytes = kElements * int(sizeof(Element)) + kStatistics * 4;
  static_assert(kBytes == Traits::kSmemBytes, "smem_bytes of the config and the layout of the kernel differ");
};

// Left operand straight from global memory, rows beyond `rows` and columns beyond `cols` zero.
template <class Element>
struct GlobalRows {
  Element const* base;
  index_t stride_row, stride_col;
  int row0, rows, cols;

  NVRTC_ATTN_DEVICE Element at(int row, int col) const {
    return row < rows && col < cols ? base[index_t(row) * stride_row + index_t(col) * stride_col] : Element(0.0f);
  }
  NVRTC_ATTN_DEVICE FragmentA<Element> step(int m, int k, int lane) const {
    FragmentA<Element> a;
    int const row = row0 + 16 * m + (lane >> 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const r = row + 8 * (i & 1);
      if constexpr (sizeof(Element) == 2) {
        int const col = 16 * k + 8 * (i >> 1) + 2 * (lane & 3);
        ElementPair<Element> const pair{at(r, col), at(r, col + 1)};
        a.x[i] = *reinterpret_cast<uint32_t const*>(&pair);
      } else {
        a.x[i] = __float_as_uint(at(r, 8 * k + 4 * (i >> 1) + (lane & 3)));
      }
    }
    prepare(a);
    return a;
  }
  NVRTC_ATTN_DEVICE FragmentA<Element> half_step(int m, int k, int lane) const { return step(m, k, lane); }
  NVRTC_ATTN_DEVICE GlobalRows const& of_lane(int) const { return *this; }
};

// A warp's V. A base of the CTA: where nothing is kept, it adds no member, and the machine code stays what it was.
template <class Traits, bool kKept = Traits::kVInRegisters>
struct KeptValues {};
template <class Traits>
struct KeptValues<Traits, true> {
  using Tiles = BackwardTiles<Traits>;
  RegisterRows<typename Tiles::TileV, typename Tiles::Element, Tiles::kTilesN> values_kept;
};

template <class Traits>
struct BackwardCta : BackwardTiles<Traits>, KeptValues<Traits> {
  using Tiles = BackwardTiles<Traits>;
  using typename Tiles::Element;
  using typename Tiles::TileDout;
  using typename Tiles::TileK;
  using typename Tiles::TileQ;
  using typename Tiles::TileS;
  using typename Tiles::TileV;
  using Seqlen = SeqlenInfo<Traits::kVarlen, Traits::kSequsedK>;
  static constexpr int kThreads = Traits::kNumThreads;
  static constexpr bool kLegacy = Traits::kLegacyMma;
  static constexpr int kStep = kStepK<Element>;
  // Contraction steps unrolled, the most that ptxas schedules without spilling (16-bit) or where it was fastest (float32).
  static constexpr int kUnroll = sizeof(Element) == 4 ? 2 : 8;
  static constexpr int kUnrollDq = sizeof(Element) == 4 || Tiles::kHeadDim > 128 ? 2 : Tiles::kWarpsM > 1 ? 8 : 4;

  // Warps leave out the part of a tile above the diagonal, half of the diagonal tile. Its dS^T is then not written, or zero
  // where the row blocks of dq cannot leave out the same part.
  static constexpr bool kSkipsHidden = Traits::kSkipHidden;
  static_assert(!kSkipsHidden || (Traits::kBand && !Traits::kDbiasStore), "a dbias is written above the diagonal too");
  static constexpr bool kZeroesHidden = kSkipsHidden && Tiles::kDq && Tiles::kChunkM % (16 * Tiles::kTilesMdQ) != 0;

  BackwardParams const& params;
  Seqlen const& seqlen;
  int const b, hk, n0, slice;
  int tid, lane, warp, warp_n, warp_m, column_group;  // set by identify()
  Element* const sK;
  float* const sLse;
  float* const sDelta;
  WarpTile<Tiles::kTilesN, Tiles::kTilesD> dk;
  WarpTile<Tiles::kTilesN, Tiles::kTilesDv> dv;

  NVRTC_ATTN_DEVICE BackwardCta(BackwardParams const& params_, Seqlen const& seqlen_, int b_, int hk_, int n0_,
                                int slice_, Element* smem)
      : params(params_),
        seqlen(seqlen_),
        b(b_),
        hk(hk_),
        n0(n0_),
        slice(slice_),
        sK(smem),
        sLse(reinterpret_cast<float*>(smem + Tiles::kElements)),
        sDelta(sLse + 2 * Tiles::kBlockM) {
    clear(dk);
    clear(dv);
    identify();
  }

  // Who this thread is. Read anew before every phase of the loop, behind an asm that the compiler cannot look through: the
  // addresses made from it are then computed where they are used (some twenty instructions) instead of being kept in
  // registers, or spilled, across the loop over query tiles.
  NVRTC_ATTN_DEVICE void identify() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    lane = tid % 32;
    warp = tid / 32;
    // Warps w and w + 4 share a scheduler: give it one of the first, which have the most to do on the diagonal, and one of
    // the last.
    if constexpr (kSkipsHidden && Traits::kNumWarps == 8) warp = warp < 4 ? warp : 11 - warp;
    warp_n = warp / Tiles::kWarpsM;
    warp_m = warp % Tiles::kWarpsM;
    column_group = slice * Tiles::kWarpsM + warp_m;
  }

  NVRTC_ATTN_DEVICE Element* sV() const { return sK + Tiles::kOffsetV; }
  NVRTC_ATTN_DEVICE Element* sQ(int stage) const {
    return sK + Tiles::kOffsetQ + (stage % Tiles::kStages) * TileQ::kSize;
  }
  NVRTC_ATTN_DEVICE Element* sDout(int stage) const {
    return sK + Tiles::kOffsetDout + (stage % Tiles::kStagesDout) * TileDout::kSize;
  }
  NVRTC_ATTN_DEVICE Element* sP() const { return sK + Tiles::kOffsetP; }
  NVRTC_ATTN_DEVICE Element* sDs() const { return sK + Tiles::kOffsetDs; }

  NVRTC_ATTN_DEVICE Element const* key_row0(void const* tensor, index_t stride_b, index_t stride_n,
                                            index_t stride_h) const {
    return reinterpret_cast<Element const*>(tensor) + index_t(seqlen.batch_index) * stride_b +
           (index_t(seqlen.k_row0) + n0) * stride_n + index_t(hk) * stride_h;
  }

  NVRTC_ATTN_DEVICE void load_keys() const {
    load_tile<TileK, kThreads, Traits::kAligned, kLegacy>(
        sK, key_row0(params.k, params.k_stride_b, params.k_stride_n, params.k_stride_h), params.k_stride_n,
        params.k_stride_d, seqlen.len_k - n0, params.head_dim, tid);
    if constexpr (Traits::kVInSmem || Traits::kVInRegisters) {
      load_tile<TileV, kThreads, Traits::kAligned, kLegacy>(
          sV(), key_row0(params.v, params.v_stride_b, params.v_stride_n, params.v_stride_h), params.v_stride_n,
          params.v_stride_d, seqlen.len_k - n0, params.head_dim_v, tid);
    }
  }

  // V to registers through the buffer that starts where Q's does.
  NVRTC_ATTN_DEVICE void keep_values() {
    static_assert(Tiles::kOffsetV == Tiles::kOffsetQ && TileV::kSize <= Tiles::kElements - Tiles::kOffsetQ);
    cp_async_commit<kLegacy>();
    cp_async_wait<kLegacy, 0>();
    __syncthreads();
    this->values_kept.load(sV(), warp_n * Tiles::kRowsN, lane);
    __syncthreads();
  }

  NVRTC_ATTN_DEVICE void load_q(int h, int m0, int stage) {
    identify();
    Element const* src = reinterpret_cast<Element const*>(params.q) + index_t(seqlen.batch_index) * params.q_stride_b +
                         (index_t(seqlen.q_row0) + m0) * params.q_stride_m + index_t(h) * params.q_stride_h;
    load_tile<TileQ, kThreads, Traits::kAligned, kLegacy>(sQ(stage), src, params.q_stride_m, params.q_stride_d,
                                                          seqlen.len_q - m0, params.head_dim, tid);
  }

  NVRTC_ATTN_DEVICE void load_dout(int h, int m0, int stage) {
    identify();
    Element const* src = reinterpret_cast<Element const*>(params.dout) +
                         index_t(seqlen.batch_index) * params.dout_stride_b +
                         (index_t(seqlen.q_row0) + m0) * params.dout_stride_m + index_t(h) * params.dout_stride_h;
    load_tile<TileDout, kThreads, Traits::kAligned, kLegacy>(
        sDout(stage), src, params.dout_stride_m, params.dout_stride_d, seqlen.len_q - m0, params.head_dim_v, tid);
  }

  // row_lse and delta of a tile. Rows beyond the sequence become zero: their Q and dO are zero too, so P = 1 there is
  // multiplied by zeros only (and edge tiles select by position anyway).
  NVRTC_ATTN_DEVICE void load_statistics(int h, int m0, int stage) const {
    if constexpr (Traits::kFused) {
      make_statistics<Traits>(params, seqlen, b, h, m0, sLse + stage * Tiles::kBlockM, sDelta + stage * Tiles::kBlockM,
                              tid);
      return;
    }
    index_t const row =
        index_t(seqlen.batch_index) * params.delta_stride_b + index_t(h) * params.delta_stride_h + seqlen.q_row0 + m0;
#pragma unroll
    for (int i = tid; i < Tiles::kBlockM; i += kThreads) {
      bool const valid = m0 + i < seqlen.len_q;
      float const* lse = params.row_lse + row + (valid ? i : 0);
      float const* delta = params.delta + row + (valid ? i : 0);
      float* to_lse = sLse + stage * Tiles::kBlockM + i;
      float* to_delta = sDelta + stage * Tiles::kBlockM + i;
      if constexpr (kLegacy) {
        *to_lse = valid ? *lse : 0.0f;
        *to_delta = valid ? *delta : 0.0f;
      } else {
        cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(*lse, *to_lse, valid);
        cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(*delta, *to_delta, valid);
      }
    }
  }

  // Accumulators (keys x queries) -> a [key][query] tile in shared memory, from key row `row` and query column `col`.
  NVRTC_ATTN_DEVICE void store_scores(Element* tile, WarpTile<Tiles::kTilesN, Tiles::kTilesM> const& c, int row,
                                      int col) const {
#pragma unroll
    for (int n = 0; n < Tiles::kTilesN; ++n)
#pragma unroll
      for (int m = 0; m < Tiles::kTilesM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Element* to = tile + TileS::offset(row + 16 * n + 8 * half + (lane >> 2), col + 8 * m + 2 * (lane & 3));
          store_pair(to, c[n][m][2 * half], c[n][m][2 * half + 1]);
        }
  }

  static NVRTC_ATTN_DEVICE void store_pair(Element* to, float x, float y) {
    if constexpr (sizeof(Element) == 2) {
      *reinterpret_cast<uint32_t*>(to) = pack2<Element>(x, y);
    } else {
      *reinterpret_cast<float2*>(to) = make_float2(x, y);
    }
  }

  // Whether this warp's share of a head dim that does not divide evenly holds any column.
  template <int kTiles, int kTilesWarp>
  NVRTC_ATTN_DEVICE bool has_columns() const {
    if constexpr (kTilesWarp * Tiles::kColumnGroups == kTiles) return true;
    return column_group * kTilesWarp < kTiles;
  }

  // acc += left * right over kSteps steps of the queries of another warp that shares these keys, from shared memory.
  template <class Tile, int kSteps, int kTilesWarp>
  NVRTC_ATTN_DEVICE void multiply_exchanged(WarpTile<Tiles::kTilesN, kTilesWarp>& acc, Element const* left,
                                            Element const* right, int first) const {
    if (!has_columns<Tile::kCols / 8, kTilesWarp>()) return;
    int const row = warp_n * Tiles::kRowsN;
    if constexpr (kTerms<Element, kLegacy> == 3) {
      multiply_shared_chain<TileS, Tile, kSteps>(acc, left, row, first, right, column_group * kTilesWarp, lane);
    } else {
#pragma unroll(kUnroll)
      for (int step = first; step < first + kSteps; ++step) {
        FragmentA<Element> a[Tiles::kTilesN];
#pragma unroll
        for (int i = 0; i < Tiles::kTilesN; ++i) a[i] = load_a<TileS>(left, row + 16 * i, step, lane);
        multiply_step<Tile, kLegacy, false>(acc, a, right, step * kStep, column_group * kTilesWarp, lane);
      }
    }
  }

  // Leading chunks of a part (kRowsM rows) of the query tile that see none of this warp's keys: above the diagonal.
  NVRTC_ATTN_DEVICE int hidden_chunks(PositionMask<Traits::kBand> const& positions, int m0, int part) const {
    if constexpr (kSkipsHidden) {
      int const rows = positions.first_row(n0 + warp_n * Tiles::kRowsN) - m0 - part * Tiles::kRowsM;
      return max(min(rows, Tiles::kRowsM), 0) / Tiles::kChunkM;
    } else {
      return 0;
    }
  }

  // S^T, dP^T -> P^T, dS^T, dV and dK of one query tile; dS^T to shared memory.
  template <class Gradient>
  NVRTC_ATTN_DEVICE void process_tile(Gradient const& gradient, int m0, int stage) {
    Element const* q = sQ(stage);
    Element const* dout = sDout(stage);
    if constexpr (sizeof(Element) == 2) identify();
    typename Gradient::Captured captured;
    int chunk = hidden_chunks(gradient.positions, m0, warp_m);
    if constexpr (kZeroesHidden) {
#pragma unroll 1
      for (int c = 0; c < chunk; ++c) {
        WarpTile<Tiles::kTilesN, Tiles::kTilesM> zero;
        clear(zero);
        store_scores(sDs(), zero, warp_n * Tiles::kRowsN, warp_m * Tiles::kRowsM + c * Tiles::kChunkM);
      }
    }
#pragma unroll 1
    for (; chunk < Tiles::kRowsM / Tiles::kChunkM; ++chunk) {
      if constexpr (sizeof(Element) == 4) identify();
      int const row = warp_n * Tiles::kRowsN;
      int const col = warp_m * Tiles::kRowsM + chunk * Tiles::kChunkM;
      WarpTile<Tiles::kTilesN, Tiles::kTilesM> s, dp;
      typename Gradient::template BiasWords<Tiles::kTilesN, Tiles::kTilesM> bias;
      clear(s);
      clear(dp);
      // The products hide the latency of the bias, where there are registers to wait in.
      constexpr bool kEarlyBias = Tiles::kWarpsM == 1 && !Traits::kDropout;
      if constexpr (kEarlyBias) gradient.load_bias(bias, m0 + col, n0 + row, lane);
      SharedRows<TileK, Element, Tiles::kTilesN> const keys{sK, row};
      multiply_nt<TileQ, kLegacy, kUnroll, true, true>(s, keys, q, col, lane);
      if constexpr (Traits::kVInSmem) {
        SharedRows<TileV, Element, Tiles::kTilesN> const values{sV(), row};
        multiply_nt<TileDout, kLegacy, kUnroll, true, true, true>(dp, values, dout, col, lane);
      } else if constexpr (Traits::kVInRegisters) {
        // Unrolled in full: registers have no index.
        multiply_nt<TileDout, kLegacy, TileV::kCols, true, true, true>(dp, this->values_kept, dout, col, lane);
      } else {
        GlobalRows<Element> const values{key_row0(params.v, params.v_stride_b, params.v_stride_n, params.v_stride_h),
                                         params.v_stride_n,
                                         params.v_stride_d,
                                         row,
                                         seqlen.len_k - n0,
                                         params.head_dim_v};
        multiply_nt<TileDout, kLegacy, 2, true, true, true>(dp, values, dout, col, lane);
      }
      if constexpr (!kEarlyBias) gradient.load_bias(bias, m0 + col, n0 + row, lane);
      gradient(s, dp, bias, sLse + (stage & 1) * Tiles::kBlockM + col, sDelta + (stage & 1) * Tiles::kBlockM + col,
               m0 + col, n0 + row, lane, captured);
      if constexpr (Tiles::kStoresP) store_scores(sP(), s, row, col);
      if constexpr (Tiles::kStoresDs) store_scores(sDs(), dp, row, col);
      if constexpr (sizeof(Element) == 2 && Tiles::kWarpsM == 1) identify();
      if (has_columns<Tiles::kHeadDimV / 8, Tiles::kTilesDv>()) {
        multiply_accumulator<TileDout, kLegacy>(dv, s, dout, col, column_group * Tiles::kTilesDv, lane);
      }
      if (has_columns<Tiles::kHeadDim / 8, Tiles::kTilesD>()) {
        multiply_accumulator<TileQ, kLegacy>(dk, dp, q, col, column_group * Tiles::kTilesD, lane);
      }
    }
    gradient.finish(captured);
    if constexpr (Tiles::kWarpsM > 1) {
      if constexpr (Tiles::kWarpsN > 1) {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + warp_n), "n"(32 * Tiles::kWarpsM) : "memory");
      } else {
        __syncthreads();
      }
      constexpr int kSteps = Tiles::kRowsM / kStep;
#pragma unroll
      for (int part = 1; part < Tiles::kWarpsM; ++part) {
        int const other = (warp_m + part) % Tiles::kWarpsM;
        int const hidden = hidden_chunks(gradient.positions, m0, other) * (Tiles::kChunkM / kStep);
        if (kSkipsHidden && hidden > 0) {
#pragma unroll 1
          for (int step = other * kSteps + hidden; step < (other + 1) * kSteps; ++step) {
            multiply_exchanged<TileDout, 1>(dv, sP(), dout, step);
            multiply_exchanged<TileQ, 1>(dk, sDs(), q, step);
          }
        } else {
          // float32: two steps at a time, whose left operands take half of the registers of four.
          constexpr int kAtOnce = kTerms<Element, kLegacy> == 3 && kSteps % 2 == 0 ? 2 : kSteps;
          if constexpr (kAtOnce == kSteps) {
            multiply_exchanged<TileDout, kSteps>(dv, sP(), dout, other * kSteps);
            multiply_exchanged<TileQ, kSteps>(dk, sDs(), q, other * kSteps);
          } else {
#pragma unroll 1
            for (int step = other * kSteps; step < (other + 1) * kSteps; step += kAtOnce) {
              multiply_exchanged<TileDout, kAtOnce>(dv, sP(), dout, step);
              multiply_exchanged<TileQ, kAtOnce>(dk, sDs(), q, step);
            }
          }
        }
      }
    }
  }

  // One contraction step of dS K: keys kStep * k and on.
  NVRTC_ATTN_DEVICE void multiply_dq(WarpTile<Tiles::kTilesMdQ, Tiles::kTilesDq>& dq, Element const* ds, int k,
                                     int row0, int tile0) const {
    FragmentA<Element> a[Tiles::kTilesMdQ];
#pragma unroll
    for (int m = 0; m < Tiles::kTilesMdQ; ++m) a[m] = load_a_trans<TileS>(ds, k * kStep, row0 + 16 * m, lane);
    multiply_step<TileK, kLegacy, false>(dq, a, sK, k * kStep, tile0, lane);
  }

  // dq_accum += dS K for the tile whose dS^T lies in shared memory; kStoresdQ: dq = scale * dS K.
  NVRTC_ATTN_DEVICE void add_dq(PositionMask<Traits::kBand> const& positions, int h, int m0) {
    identify();
    float* accum = params.dq_accum + index_t(seqlen.batch_index) * params.dq_accum_stride_b +
                   index_t(h) * params.dq_accum_stride_h +
                   (accumulator_row0<Traits::kVarlen, Tiles::kBlockM>(seqlen.q_row0, b) + m0) * Tiles::kHeadDim;
    Element const* ds = sDs();
    int const row0 = warp % Tiles::kWarpsMdQ * (16 * Tiles::kTilesMdQ);
    constexpr int kTiles = Tiles::kHeadDim / 8;
    constexpr int kSteps = Tiles::kBlockN / kStep;
    int end = kSteps;  // after the last key that a query of this warp sees
    if constexpr (kSkipsHidden) {
      end = min(positions.last_key(m0 + row0 + 16 * Tiles::kTilesMdQ - 1) - n0 + kStep, Tiles::kBlockN) / kStep;
      if (!Traits::kStoresdQ && end <= 0) return;
    }
#pragma unroll 1
    for (int pass = 0; pass < Tiles::kPassesDq; ++pass) {
      int const group = slice * Tiles::kWarpsDdQ + warp / Tiles::kWarpsMdQ;
      int const tile0 = (group * Tiles::kPassesDq + pass) * Tiles::kTilesDq;
      if (Tiles::kTilesDq * Tiles::kPassesDq * Tiles::kDqGroups > kTiles && tile0 >= kTiles) break;
      WarpTile<Tiles::kTilesMdQ, Tiles::kTilesDq> dq;
      clear(dq);
      static_assert(kTerms<Element, kLegacy> == 1 || Tiles::kBlockN / kStep <= 2 * kChainSteps, "one chain");
      if (kSkipsHidden && end < kSteps) {
#pragma unroll 1
        for (int k = 0; k < end; ++k) multiply_dq(dq, ds, k, row0, tile0);
      } else {
#pragma unroll(kUnrollDq)
        for (int k = 0; k < kSteps; ++k) multiply_dq(dq, ds, k, row0, tile0);
      }
      if constexpr (Traits::kStoresdQ) {
        store_dq(dq, h, m0, row0, tile0);
      } else {
#pragma unroll
        for (int m = 0; m < Tiles::kTilesMdQ; ++m)
#pragma unroll
          for (int d = 0; d < Tiles::kTilesDq; ++d) {
            if (kTiles % Tiles::kTilesDq != 0 && tile0 + d >= kTiles) break;
            add_block(accum + ((row0 / 16 + m) * kTiles + tile0 + d) * kAccumBlock, dq[m][d], lane);
          }
      }
    }
  }

  // Rows row0 and on of the query tile, columns 8 * tile0 and on.
  NVRTC_ATTN_DEVICE void store_dq(WarpTile<Tiles::kTilesMdQ, Tiles::kTilesDq> const& dq, int h, int m0, int row0,
                                  int tile0) const {
    Element* dst = reinterpret_cast<Element*>(params.dq) + index_t(seqlen.batch_index) * params.dq_stride_b +
                   (index_t(seqlen.q_row0) + m0) * params.dq_stride_m + index_t(h) * params.dq_stride_h;
    int const cols = min(params.head_dim, 8 * (tile0 + Tiles::kTilesDq));
#pragma unroll
    for (int m = 0; m < Tiles::kTilesMdQ; ++m)
#pragma unroll
      for (int first = 0; first < Tiles::kTilesDq; first += 4) {
        float4 c[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (first + i < Tiles::kTilesDq) {
            auto const& block = dq[m][first + i < Tiles::kTilesDq ? first + i : 0];
            c[i] = make_float4(block[0] * params.scale, block[1] * params.scale, block[2] * params.scale,
                               block[3] * params.scale);
          } else {
            c[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          }
        }
        store_blocks<Traits::kAligned>(c, dst, params.dq_stride_m, params.dq_stride_d, row0 + 16 * m, tile0 + first,
                                       seqlen.len_q - m0, cols, lane);
      }
  }

  // Zeros in dq of query rows [begin, end) of a head, which see no key.
  NVRTC_ATTN_DEVICE void zero_dq(int h, int begin, int end) const {
    Element* dst = reinterpret_cast<Element*>(params.dq) + index_t(seqlen.batch_index) * params.dq_stride_b +
                   index_t(seqlen.q_row0) * params.dq_stride_m + index_t(h) * params.dq_stride_h;
    for (int i = begin + warp; i < end; i += Traits::kNumWarps) {
      for (int col = lane; col < params.head_dim; col += 32) {
        dst[index_t(i) * params.dq_stride_m + index_t(col) * params.dq_stride_d] = from_float<Element>(0.0f);
      }
    }
  }

  // Write `acc` * factor to a tile in shared memory (each warp its keys and columns).
  template <class Tile, int kTilesWarp>
  NVRTC_ATTN_DEVICE void stage_gradient(Element* tile, WarpTile<Tiles::kTilesN, kTilesWarp> const& acc,
                                        float factor) const {
#pragma unroll
    for (int n = 0; n < Tiles::kTilesN; ++n)
#pragma unroll
      for (int d = 0; d < kTilesWarp; ++d) {
        int const column = column_group * kTilesWarp + d;
        if (kTilesWarp * Tiles::kColumnGroups != Tile::kCols / 8 && column >= Tile::kCols / 8) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int const row = warp_n * Tiles::kRowsN + 16 * n + 8 * half + (lane >> 2);
          store_pair(tile + Tile::offset(row, 8 * column + 2 * (lane & 3)), acc[n][d][2 * half] * factor,
                     acc[n][d][2 * half + 1] * factor);
        }
      }
  }

  // Split: add `acc` to the float32 workspace, `rows0` rows of which precede this tile.
  template <int kCols, int kTilesWarp>
  NVRTC_ATTN_DEVICE void add_gradient(float* accum, WarpTile<Tiles::kTilesN, kTilesWarp> const& acc) const {
#pragma unroll
    for (int n = 0; n < Tiles::kTilesN; ++n)
#pragma unroll
      for (int d = 0; d < kTilesWarp; ++d) {
        int const column = column_group * kTilesWarp + d;
        if (kTilesWarp * Tiles::kColumnGroups != kCols / 8 && column >= kCols / 8) break;
        int const row = (n0 + warp_n * Tiles::kRowsN) / 16 + n;
        add_block(accum + (index_t(row) * (kCols / 8) + column) * kAccumBlock, acc[n][d], lane);
      }
  }

  NVRTC_ATTN_DEVICE void store_gradients() {
    identify();
    if constexpr (Traits::kSplit) {
      float* accum = params.dkv_accum + index_t(dkv_accum_head<Traits>(params, b, hk)) * dkv_accum_size<Traits>(params);
      index_t const row0 = accumulator_row0<Traits::kVarlen, Tiles::kBlockN>(seqlen.k_row0, b);
      add_gradient<Tiles::kHeadDim>(accum + row0 * Tiles::kHeadDim, dk);
      add_gradient<Tiles::kHeadDimV>(accum + dkv_accum_rows<Traits>(params) * Tiles::kHeadDim + row0 * Tiles::kHeadDimV,
                                     dv);
    } else {
      int const rows = seqlen.len_k_slot - n0;
      auto* dk_dst =
          const_cast<Element*>(key_row0(params.dk, params.dk_stride_b, params.dk_stride_n, params.dk_stride_h));
      auto* dv_dst =
          const_cast<Element*>(key_row0(params.dv, params.dv_stride_b, params.dv_stride_n, params.dv_stride_h));
      // dv lies in V's buffer, or in Q's where V has none.
      static_assert(Traits::kVInSmem || TileV::kSize <= Tiles::kElements - Tiles::kOffsetQ);
      __syncthreads();  // K, V and dS are no longer read
      stage_gradient<TileK>(sK, dk, params.scale);
      stage_gradient<TileV>(sV(), dv, 1.0f);
      __syncthreads();
      constexpr int kColumns = Tiles::kWarpsM * Tiles::kTilesD * 8;
      constexpr int kColumnsV = Tiles::kWarpsM * Tiles::kTilesDv * 8;
      store_tile<TileK, kThreads, Traits::kAligned>(sK, dk_dst, params.dk_stride_n, params.dk_stride_d, rows,
                                                    slice * kColumns, min((slice + 1) * kColumns, params.head_dim),
                                                    tid);
      store_tile<TileV, kThreads, Traits::kAligned>(sV(), dv_dst, params.dv_stride_n, params.dv_stride_d, rows,
                                                    slice * kColumnsV, min((slice + 1) * kColumnsV, params.head_dim_v),
                                                    tid);
    }
  }

  // Zeros in dbias for this key tile and query rows [begin, end): the tiles that the loop skips.
  NVRTC_ATTN_DEVICE void zero_dbias(int h, int begin, int end) const {
    using DBias = typename Traits::DBias;
    ScoreTensor<DBias> const dbias(reinterpret_cast<DBias*>(params.dbias), b, h, params.dbias_stride_b,
                                   params.dbias_stride_h, params.dbias_stride_m, params.dbias_stride_n);
    int const cols = min(Tiles::kBlockN, params.seqlen_k - n0);
    for (int i = begin + warp; i < end; i += Traits::kNumWarps) {
      for (int j = lane; j < cols; j += 32) *dbias.at(i, n0 + j) = from_float<DBias>(0.0f);
    }
  }

  NVRTC_ATTN_DEVICE void run(int n_block, int split) {
    PositionMask<Traits::kBand> const positions(mask_params<Traits>(params), seqlen.len_q, seqlen.len_k);
    int const heads = params.num_heads / params.num_heads_kv;
    auto const line = [&](int h) {  // kTileWords; nothing of its address stays over the loop
      int first_key = n0;
      asm volatile("" : "+r"(first_key));
      return tile_line(params, b, h, first_key / Tiles::kBlockN);
    };
    int first_tile, last_tile;
    positions.template query_tiles<Tiles::kBlockM>(n0, Tiles::kBlockN, first_tile, last_tile);
    int const count = max(last_tile - first_tile, 0);
    if constexpr (Traits::kDbiasStore) {
      if (Traits::kTileWords && split == 0 && slice == 0) {
        for (int h = hk * heads; h < (hk + 1) * heads; ++h) {
          for (int m = 0; m * Tiles::kBlockM < seqlen.len_q; ++m) {
            if (m >= first_tile && m < last_tile && line(h).some(m)) continue;
            zero_dbias(h, m * Tiles::kBlockM, min((m + 1) * Tiles::kBlockM, seqlen.len_q));
          }
        }
      } else if (split == 0 && slice == 0) {
        for (int h = hk * heads; h < (hk + 1) * heads; ++h) {
          zero_dbias(h, 0, count > 0 ? min(first_tile * Tiles::kBlockM, seqlen.len_q) : seqlen.len_q);
          if (count > 0) zero_dbias(h, last_tile * Tiles::kBlockM, seqlen.len_q);
        }
      }
    }

    if constexpr (Traits::kStoresdQ) {
      if (split == 0 && slice == 0) {
        for (int h = hk * heads; h < (hk + 1) * heads; ++h) {
          zero_dq(h, 0, count > 0 ? min(first_tile * Tiles::kBlockM, seqlen.len_q) : seqlen.len_q);
          if (count > 0) zero_dq(h, last_tile * Tiles::kBlockM, seqlen.len_q);
        }
      }
    }

    // This CTA's part of the (query head, query tile) pairs.
    int const total = count * heads;
    int begin = 0, end = total;
    if constexpr (Traits::kSplit) {
      int const share = ceil_div(total, params.num_splits);
      begin = min(split * share, total);
      end = min(begin + share, total);
      if (begin == end) return;
    }
    int left = end - begin;
    if constexpr (Traits::kTileWords) {  // those that have something, of this part
      static_assert((Traits::kMask || ModifierOf<Traits>::kMasks) && !Traits::kVarlen, "words are of a mask");
      left = 0;
#pragma unroll 1
      for (int at = begin; at < end;) {  // a head, or what the part has of it
        int const tile = first_tile + at % count;
        int const tiles = min(last_tile - tile, end - at);
        left += line(hk * heads + at / count).count(tile, tile + tiles);
        at += tiles;
      }
      if (Traits::kSplit && left == 0) return;
    }
    if (left > 0) {
      int h = hk * heads + begin / count;
      int tile = first_tile + begin % count;
      auto const advance = [&](int& of_h, int& of_tile) {
        if constexpr (Traits::kTileWords) {  // there is one
          of_tile = line(of_h).first_from(of_tile + 1, last_tile);
#pragma unroll 1
          while (of_tile == last_tile) of_tile = line(++of_h).first_from(first_tile, last_tile);
        } else if (++of_tile == last_tile) {
          of_tile = first_tile;
          ++of_h;
        }
      };
      if constexpr (Traits::kTileWords) {
        --tile;
        advance(h, tile);
      }
      load_keys();
      if constexpr (Traits::kVInRegisters) keep_values();
      load_q(h, tile * Tiles::kBlockM, left & 1);
      load_dout(h, tile * Tiles::kBlockM, left & 1);
      load_statistics(h, tile * Tiles::kBlockM, left & 1);
      cp_async_commit<kLegacy>();
      if constexpr (Traits::kMask && Tiles::kDq) {  // dQ = dS K
        HiddenKeys const hidden(params, b, hk * heads, heads);
        if (hidden.any) {
          cp_async_wait<kLegacy, 0>();
          zero_hidden_rows<TileK, kThreads>(sK, [&](int row) { return n0 + row < seqlen.len_k && hidden(n0 + row); });
        }
      }

      constexpr bool kLoadsEarly = Tiles::kStages == 2 || Tiles::kStagesDout == 2;
#pragma unroll 1
      for (; left > 0; --left) {
        int const stage = left & 1;  // of double buffers
        int const m0 = tile * Tiles::kBlockM;
        bool const more = left > 1;
        cp_async_wait<kLegacy, 0>();
        __syncthreads();
        if (kLoadsEarly && more) {
          int next_h = h, next_tile = tile;
          advance(next_h, next_tile);
          if constexpr (Tiles::kStages == 2) load_q(next_h, next_tile * Tiles::kBlockM, stage ^ 1);
          if constexpr (Tiles::kStagesDout == 2) load_dout(next_h, next_tile * Tiles::kBlockM, stage ^ 1);
          load_statistics(next_h, next_tile * Tiles::kBlockM, stage ^ 1);
          cp_async_commit<kLegacy>();
        }
        bool whole = false;
        if constexpr (Traits::kTileWords) whole = line(h).all(tile);
        TransposedScoreGradient<Traits> const gradient(params, b, h, seqlen.len_q, slice == 0 ? params.seqlen_k : 0,
                                                       seqlen.len_k, whole);
        process_tile(gradient, m0, stage);
        int const h_done = h;
        if (!Traits::kTileWords || more) advance(h, tile);
        if constexpr (Tiles::kDq || Tiles::kStages * Tiles::kStagesDout < 4) {
          __syncthreads();
          if (more) {
            if constexpr (Tiles::kStages == 1) load_q(h, tile * Tiles::kBlockM, 0);
            if constexpr (Tiles::kStagesDout == 1) load_dout(h, tile * Tiles::kBlockM, 0);
            if constexpr (!kLoadsEarly) load_statistics(h, tile * Tiles::kBlockM, stage ^ 1);
            cp_async_commit<kLegacy>();
          }
          if constexpr (Tiles::kDq) add_dq(gradient.positions, h_done, m0);
        }
      }
    }
    store_gradients();
  }
};

template <class Traits>
NVRTC_ATTN_DEVICE void backward_portable(BackwardParams const& params) {
  using Element = typename Traits::Element;
  extern __shared__ __align__(128) unsigned char smem[];

  // Slices and splits of a key tile are neighbours, then the key tiles of head_group (batch, key head) pairs, which share Q,
  // dO and dq of a head in L2. In a group the first key tiles, which have the most work under a causal mask, come first for
  // all heads. The last group takes the heads that make no group of their own: begun last, a long tile would end last.
  int block = int(blockIdx.x);
  int const slice = block % Traits::kDimSlices;
  block /= Traits::kDimSlices;
  int split = 0;
  if constexpr (Traits::kSplit) {
    split = block % params.num_splits;
    block /= params.num_splits;
  }
  // Packed: tiles of all sequences in their order instead of those of one (batch, key head).
  PackedSlots<Traits::kBlockN> const slots{params.cu_seqlens_k, params.batch, params.total_k};
  int const heads = Traits::kVarlen ? params.num_heads_kv : params.num_heads_kv * params.batch;
  int const tiles = Traits::kVarlen ? slots.count() : params.num_n_blocks;
  int const groups = max(heads / params.head_group, 1);
  int const group = min(block / (params.head_group * tiles), groups - 1);
  int const first_head = group * params.head_group;
  int const in_group = block - first_head * tiles;
  int const group_size = group == groups - 1 ? heads - first_head : params.head_group;
  int n_block = in_group / group_size;
  int const head = first_head + in_group % group_size;
  int const hk = Traits::kVarlen ? head : head % params.num_heads_kv;
  int b = Traits::kVarlen ? 0 : head / params.num_heads_kv;
  if constexpr (Traits::kVarlen) {
    PackedSlot const found = slots.find_together(n_block, int(threadIdx.x) % 32);
    n_block = found.tile;
    b = found.b;
    if (b == params.batch) {
      if (slice != 0 || split != 0) return;
      zero_unused_rows<Traits::kNumThreads>(reinterpret_cast<Element*>(params.dk) + index_t(hk) * params.dk_stride_h,
                                            params.dk_stride_n, params.dk_stride_d, params.cu_seqlens_k, params.batch,
                                            params.total_k, params.head_dim, n_block, slots.parts(), int(threadIdx.x));
      zero_unused_rows<Traits::kNumThreads>(reinterpret_cast<Element*>(params.dv) + index_t(hk) * params.dv_stride_h,
                                            params.dv_stride_n, params.dv_stride_d, params.cu_seqlens_k, params.batch,
                                            params.total_k, params.head_dim_v, n_block, slots.parts(),
                                            int(threadIdx.x));
      return;
    }
    if (n_block >= params.num_n_blocks) return;
  }
  SeqlenInfo<Traits::kVarlen, Traits::kSequsedK> const seqlen(params, b);
  int const n0 = n_block * Traits::kBlockN;
  if (n0 >= seqlen.len_k_slot) return;
  BackwardCta<Traits> cta(params, seqlen, b, hk, n0, slice, reinterpret_cast<Element*>(smem));
  cta.run(n_block, split);
}

}  // namespace nvrtc_attn
