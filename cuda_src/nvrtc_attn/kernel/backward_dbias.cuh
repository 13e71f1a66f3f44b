// dBias of a broadcast bias: the sum of dS = P * (Z * (dO V^T) - delta) over every dim that the bias has of size 1.
//
// An output tile is (one b or all, one h or all, kBlockM rows or all, kBlockN columns or all). Its CTA walks the score tiles
// that add to it in a fixed order, recomputes S and dP of each, and sums dS in float32 registers; a dim that is reduced inside
// the tile (kReduceM, kReduceN) is folded into one accumulator row or column. No atomics, no score-sized temporary, bitwise
// reproducible. With kSplit each CTA walks a share of the score tiles and writes float32 partial sums, which
// dbias_reduce adds in order.
//
// The CTAs are persistent (grid <= tiles): the copies of the next score tile, of the same output tile or the next, are in
// flight while one is computed. Both products contract over the head dim, so operands come in slices of kSliceD columns
// through one ring, each slot with a note that tells the compute side what it is: shared memory does not grow with the
// head dim. Its map: ring of (dO | V | Q | K slice) x stages | notes x stages | sums over warps.
#pragma once
#include "../collective/score_gradient.cuh"
#include "../common/tile_load.cuh"

namespace nvrtc_attn {

// An output tile: `at` = ((split * size_b + b) * size_h + h) * tiles_m + m) * tiles_n + n, reduced dims having size 1.
template <class Traits>
struct DbiasTile {
  int split, b, h, m, n;
  static NVRTC_ATTN_DEVICE int tiles_m(BackwardParams const& params) {
    return Traits::kReduceM ? 1 : ceil_div(params.seqlen_q, Traits::kBlockM);
  }
  static NVRTC_ATTN_DEVICE int tiles_n(BackwardParams const& params) {
    return Traits::kReduceN ? 1 : ceil_div(params.seqlen_k, Traits::kBlockN);
  }
  static NVRTC_ATTN_DEVICE int count(BackwardParams const& params) {
    return (Traits::kSplit ? params.num_dbias_splits : 1) * params.dbias_size_b * params.dbias_size_h *
           tiles_m(params) * tiles_n(params);
  }
  NVRTC_ATTN_DEVICE DbiasTile(BackwardParams const& params, int at) {
    auto take = [&at](int size) {
      int const x = at % size;
      at /= size;
      return x;
    };
    n = take(tiles_n(params));
    m = take(tiles_m(params));
    h = take(params.dbias_size_h);
    b = take(params.dbias_size_b);
    split = at;
  }
};

// The score tiles one CTA visits: those of output tiles blockIdx.x, + gridDim.x, ...; within one, its share of the reduced
// (b, h, n, m), m fastest. Score tiles that the mask drops entirely are skipped. All threads walk alike.
template <class Traits>
struct DbiasWalk {
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  BackwardParams const& params;
  int tile;        // output tile, -1 = no more
  int left;        // score tiles of this output tile still to visit, the current one included
  int b, h, m, n;  // the current score tile

  NVRTC_ATTN_DEVICE explicit DbiasWalk(BackwardParams const& p) : params(p) { start(blockIdx.x); }

  NVRTC_ATTN_DEVICE bool done() const { return tile < 0; }

  NVRTC_ATTN_DEVICE void start(int tile_) {
    tile = tile_ < DbiasTile<Traits>::count(params) ? tile_ : -1;
    left = 0;
    if (done()) return;
    DbiasTile<Traits> const out(params, tile);
    int const num_b = params.dbias_size_b == 1 ? params.batch : 1,
              num_h = params.dbias_size_h == 1 ? params.num_heads : 1;
    int const num_m = Traits::kReduceM ? ceil_div(params.seqlen_q, kBlockM) : 1;
    int const num_n = Traits::kReduceN ? ceil_div(params.seqlen_k, kBlockN) : 1;
    long long const count = (long long)num_b * num_h * num_m * num_n;
    long long rest = 0;
    left = int(count);
    if constexpr (Traits::kSplit) {
      rest = count * out.split / params.num_dbias_splits;
      left = int(count * (out.split + 1) / params.num_dbias_splits - rest);
    }
    b = out.b, h = out.h, m = out.m, n = out.n;
    if (left == 0) return;
    if constexpr (Traits::kSplit) {
      auto take = [&rest](int size) {
        int const x = int(rest % size);
        rest /= size;
        return x;
      };
      if constexpr (Traits::kReduceM) m = take(num_m);
      if constexpr (Traits::kReduceN) n = take(num_n);
      if (params.dbias_size_h == 1) h = take(num_h);
      if (params.dbias_size_b == 1) b = int(rest);
    }
    skip_dropped();
  }

  NVRTC_ATTN_DEVICE void advance() {
    step();
    skip_dropped();
  }

  NVRTC_ATTN_DEVICE int len_k() const {
    int len = params.seqlen_k;
    if constexpr (Traits::kSequsedK) len = min(max(params.seqused_k[b], 0), len);
    return len;
  }

 private:
  NVRTC_ATTN_DEVICE void step() {
    if (--left == 0) return;
    if constexpr (Traits::kReduceM) {
      if (++m * kBlockM < params.seqlen_q) return;
      m = 0;
    }
    if constexpr (Traits::kReduceN) {
      if (++n * kBlockN < params.seqlen_k) return;
      n = 0;
    }
    if (params.dbias_size_h == 1) {
      if (++h < params.num_heads) return;
      h = 0;
    }
    ++b;
  }

  NVRTC_ATTN_DEVICE void skip_dropped() {
    if constexpr (Traits::kBand || Traits::kSequsedK) {
      while (left > 0 && dropped()) step();
    }
  }

  NVRTC_ATTN_DEVICE bool dropped() const {
    PositionMask<Traits::kBand> const positions(mask_params<Traits>(params), params.seqlen_q, len_k());
    int first, last;
    positions.template key_tiles<kBlockN>(m * kBlockM, kBlockM, first, last);
    return n < first || n >= last;
  }
};

// What the compute side has to know about one ring slot; lives in shared memory beside it.
struct alignas(16) DbiasOp {
  int tile;  // output tile, -1 = no more work
  int op;    // slice of the score tile; kNothing = an output tile without score tiles
  int last;  // whether this score tile is the last of its output tile
  int b;
  int h, m, n, unused;
  static constexpr int kNothing = -1;
};

template <class Traits>
struct BackwardDbias {
  using Element = typename Traits::Element;
  static constexpr bool kLegacy = Traits::kLegacyMma;
  static constexpr int kThreads = Traits::kNumThreads;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kSlice = Traits::kSliceD;
  static constexpr int kStages = Traits::kNumStages;
  static_assert(kStages >= 2, "the ring needs a slot to fill while another is read");
  static constexpr int kWarpsM = Traits::kWarpsM;
  static constexpr int kWarpsN = Traits::kNumWarps / kWarpsM;
  static constexpr int kM = kBlockM / (16 * kWarpsM);
  static constexpr int kN = kBlockN / (8 * kWarpsN);
  static_assert(kM * 16 * kWarpsM == kBlockM && kN * 8 * kWarpsN == kBlockN && kN % 2 == 0, "warps tile the block");
  using TileM = SmemTile<Element, kBlockM, kSlice>;
  using TileN = SmemTile<Element, kBlockN, kSlice>;
  static constexpr int kSlicesQ = (Traits::kHeadDim + kSlice - 1) / kSlice;
  static constexpr int kSlicesV = (Traits::kHeadDimV + kSlice - 1) / kSlice;
  static constexpr int kOps = kSlicesQ > kSlicesV ? kSlicesQ : kSlicesV;  // slots of one score tile
  // With the whole head dim in one slot, S and dP of kChunkN columns at a time are enough; otherwise both grow slice by slice.
  static constexpr int kC = kOps == 1 ? Traits::kChunkN / 8 : kN;
  static_assert(kC % 2 == 0 && kN % kC == 0, "a warp's columns are whole chunks");
  using Order = KeyOrderOf<kC>;
  static constexpr int kOffsetV = TileM::kSize;  // a slot is dO | V | Q | K
  static constexpr int kOffsetQ = kOffsetV + TileN::kSize;
  static constexpr int kOffsetK = kOffsetQ + TileM::kSize;
  static constexpr int kSlot = kOffsetK + TileN::kSize;
  static constexpr bool kReduceM = Traits::kReduceM;
  static constexpr bool kReduceN = Traits::kReduceN;
  static constexpr int kUnroll = sizeof(Element) == 2 ? 8 : 2;
  // float32: where slices are not whole chains of S, a chain goes on from slice to slice.
  static constexpr int kStepsSlice = kSlice / kStepK<Element>;
  static constexpr bool kCarriesChain = kTerms<Element, kLegacy> == 3 && kSlicesQ > 1 && kStepsSlice % kChainSteps != 0;
  using Gradient = ScoreGradient<Traits, false>;
  // A reduced dim has one accumulator: tile index 0, and row or column 0 of the thread's pair.
  using Accumulator = float[kReduceM ? 1 : kM][kReduceN ? 1 : kN][4];
  // Where a bias column (row) is summed over warps: one line a warp row (column).
  static constexpr int kLine = kReduceM ? (kReduceN ? 1 : kBlockN) : kBlockM;
  static constexpr int kLines = kReduceM ? (kReduceN ? Traits::kNumWarps : kWarpsM) : kWarpsN;

  BackwardParams const& params;
  int const tid, lane, row0, col0;
  Element* const ring;
  DbiasOp* const ops;
  float* const sums;

  NVRTC_ATTN_DEVICE BackwardDbias(BackwardParams const& p, Element* smem)
      : params(p),
        tid(threadIdx.x),
        lane(tid & 31),
        row0((tid >> 5) / kWarpsN * 16 * kM),
        col0((tid >> 5) % kWarpsN * 8 * kN),
        ring(smem),
        ops(reinterpret_cast<DbiasOp*>(smem + kStages * kSlot)),
        sums(reinterpret_cast<float*>(ops + kStages)) {}

  // Slice `op` of the four operands of one score tile.
  NVRTC_ATTN_DEVICE void load(DbiasWalk<Traits> const& w, int op, Element* slot) const {
    int const d0 = op * kSlice;
    int const hkv = w.h / (params.num_heads / params.num_heads_kv);
    int const m0 = w.m * kBlockM, n0 = w.n * kBlockN;
    int const rows_m = params.seqlen_q - m0, rows_n = w.len_k() - n0;
    auto at = [](void const* base, index_t b, index_t stride_b, index_t h, index_t stride_h, index_t row,
                 index_t stride_row, index_t d, index_t stride_d) {
      return reinterpret_cast<Element const*>(base) + b * stride_b + h * stride_h + row * stride_row + d * stride_d;
    };
    BackwardParams const& p = params;
    if (op < kSlicesV) {
      int const cols = p.head_dim_v - d0;
      load_tile<TileM, kThreads, Traits::kAligned, kLegacy>(
          slot, at(p.dout, w.b, p.dout_stride_b, w.h, p.dout_stride_h, m0, p.dout_stride_m, d0, p.dout_stride_d),
          p.dout_stride_m, p.dout_stride_d, rows_m, cols, tid);
      load_key_tile<TileN, Order, kThreads, Traits::kAligned, kLegacy>(
          slot + kOffsetV, at(p.v, w.b, p.v_stride_b, hkv, p.v_stride_h, n0, p.v_stride_n, d0, p.v_stride_d),
          p.v_stride_n, p.v_stride_d, rows_n, cols, tid);
    }
    if (op < kSlicesQ) {
      int const cols = p.head_dim - d0;
      load_tile<TileM, kThreads, Traits::kAligned, kLegacy>(
          slot + kOffsetQ, at(p.q, w.b, p.q_stride_b, w.h, p.q_stride_h, m0, p.q_stride_m, d0, p.q_stride_d),
          p.q_stride_m, p.q_stride_d, rows_m, cols, tid);
      load_key_tile<TileN, Order, kThreads, Traits::kAligned, kLegacy>(
          slot + kOffsetK, at(p.k, w.b, p.k_stride_b, hkv, p.k_stride_h, n0, p.k_stride_n, d0, p.k_stride_d),
          p.k_stride_n, p.k_stride_d, rows_n, cols, tid);
    }
  }

  // Fill one slot and move the walk on.
  NVRTC_ATTN_DEVICE void issue(DbiasWalk<Traits>& walk, int& op, int slot) const {
    bool const none = walk.left == 0;
    if (tid == 0) {
      ops[slot] = DbiasOp{walk.tile, none ? DbiasOp::kNothing : op, 0, walk.b, walk.h, walk.m, walk.n, 0};
    }
    if (!none) {
      load(walk, op, ring + slot * kSlot);
      if (++op < kOps) return;
      op = 0;
      walk.advance();
    }
    if (walk.left == 0) {
      if (tid == 0) ops[slot].last = 1;
      if (!walk.done()) walk.start(walk.tile + gridDim.x);
    }
  }

  NVRTC_ATTN_DEVICE void run() {
    DbiasWalk<Traits> walk(params);
    int op = 0, slot = 0;
    Accumulator sum;
    clear(sum);
    WarpTile<kM, kC> s, dp;
    WarpTile<kM, kCarriesChain ? kC : 1> chain;
#pragma unroll 1
    for (int turn = 0;; ++turn) {
      // The slot filled kStages - 1 turns ago has landed; the one computed a turn ago is free, and is the one to fill.
      cp_async_wait<kLegacy, kStages - 2>();
      __syncthreads();
      issue(walk, op, slot);
      cp_async_commit<kLegacy>();
      slot = slot + 1 == kStages ? 0 : slot + 1;
      if (turn < kStages - 1) continue;

      DbiasOp const& now = ops[slot];
      if (now.tile < 0) break;
      if (now.op != DbiasOp::kNothing) {
        Element const* const full = ring + slot * kSlot;
        SharedRows<TileM, Element, kM> const dout{full, row0}, q{full + kOffsetQ, row0};
        int const i0 = now.m * kBlockM + row0, j0 = now.n * kBlockN + col0;
        if constexpr (kOps == 1) {
          SeqlenInfo<false, Traits::kSequsedK> const seqlen(params, now.b);
          Gradient const gradient(params, now.b, now.h, seqlen.len_q, seqlen.len_k);
          RowStatistics<kM> rows;
          rows.load(params, gradient.map, seqlen, now.b, now.h, i0, lane);
#pragma unroll
          for (int c = 0; c < kN; c += kC) {
            typename Gradient::template Prefetched<kM, kC> tile;
            gradient.prefetch(tile, i0, j0 + 8 * c, lane);
            clear(dp);
            clear(s);
            multiply_nt<TileN, kLegacy, kUnroll, false, true>(dp, dout, full + kOffsetV, col0 + 8 * c, lane);
            multiply_nt<TileN, kLegacy, kUnroll, false, true>(s, q, full + kOffsetK, col0 + 8 * c, lane);
            gradient(s, dp, rows, tile, i0, j0 + 8 * c, lane);
            drop_rows_beyond(s, i0, seqlen.len_q, lane);
            add(sum, s, c);
          }
        } else {
          // Cleared where they start, not where they ended: registers are shortest while copies are issued.
          if (now.op == 0) {
            clear(dp);
            clear(s);
            if constexpr (kCarriesChain) clear(chain);
          }
          if (now.op < kSlicesV) {
            multiply_nt<TileN, kLegacy, kUnroll, false, false>(dp, dout, full + kOffsetV, col0, lane);
          }
          if (now.op < kSlicesQ) {
            if constexpr (kCarriesChain) {
              multiply_nt_carried<TileN, false>(s, chain, q, full + kOffsetK, col0, now.op * kStepsSlice, lane);
            } else {
              multiply_nt<TileN, kLegacy, kUnroll, false, false>(s, q, full + kOffsetK, col0, lane);
            }
          }
          if (now.op < kOps - 1) continue;
          if constexpr (kCarriesChain) nvrtc_attn::add(s, chain);
          SeqlenInfo<false, Traits::kSequsedK> const seqlen(params, now.b);
          Gradient const gradient(params, now.b, now.h, seqlen.len_q, seqlen.len_k);
          typename Gradient::template Prefetched<kM, kC> tile;
          gradient.prefetch(tile, i0, j0, lane);
          RowStatistics<kM> rows;
          rows.load(params, gradient.map, seqlen, now.b, now.h, i0, lane);
          gradient(s, dp, rows, tile, i0, j0, lane);
          drop_rows_beyond(s, i0, seqlen.len_q, lane);
          add(sum, s, 0);
        }
      }
      if (now.last) {
        store(DbiasTile<Traits>(params, now.tile), sum);
        clear(sum);
      }
    }
  }

  // Rows beyond the sequence have P = exp(S - inf) = 0; but a modifier reads beyond its arrays there, and where S is NaN,
  // P is NaN, too. Without a sum over rows nothing is stored of them.
  template <int kColumns>
  static NVRTC_ATTN_DEVICE void drop_rows_beyond(WarpTile<kM, kColumns>& ds, int i0, int len_q, int lane) {
    if constexpr (kReduceM && Gradient::Modifier::kScores) {
      if (i0 + 16 * kM <= len_q) return;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (i0 + 16 * m + 8 * (e >> 1) + (lane >> 2) >= len_q) ds[m][n][e] = 0.0f;
          }
    }
  }

  // sum += dS of the warp's accumulator tiles n0, n0 + 1, ...
  static NVRTC_ATTN_DEVICE void add(Accumulator& sum, WarpTile<kM, kC> const& ds, int n0) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kC; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[kReduceM ? 0 : m][kReduceN ? 0 : n0 + n][folded(e)] += ds[m][n][e];
  }

  static constexpr NVRTC_ATTN_DEVICE int folded(int e) { return (kReduceM ? 0 : e & 2) + (kReduceN ? 0 : e & 1); }

  // Where the output tile's (b, h) starts, in the bias gradient or in this split's partial sums.
  using Out = cute::conditional_t<Traits::kSplit, float, typename Traits::DBias>;
  NVRTC_ATTN_DEVICE ScoreTensor<Out> output(DbiasTile<Traits> const& t) const {
    if constexpr (Traits::kSplit) {
      index_t const size_m = params.dbias_size_m, size_n = params.dbias_size_n;
      return {params.dbias_partial,
              t.split * params.dbias_size_b + t.b,
              t.h,
              params.dbias_size_h * size_m * size_n,
              size_m * size_n,
              size_n,
              1};
    } else {
      return {reinterpret_cast<Out*>(params.dbias),
              t.b,
              t.h,
              params.dbias_stride_b,
              params.dbias_stride_h,
              params.dbias_stride_m,
              params.dbias_stride_n};
    }
  }

  NVRTC_ATTN_DEVICE void store(DbiasTile<Traits> const& t, Accumulator& sum) const {
    ScoreTensor<Out> const out = output(t);
    int const m0 = t.m * kBlockM, n0 = t.n * kBlockN;
    if constexpr (!kReduceM && !kReduceN) {
      bool const vectors = ScoreRun<Out, Order::kRun>::allowed(out, params.seqlen_k);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          int const i = m0 + row0 + 16 * m + 8 * r + (lane >> 2);
          if (i >= params.seqlen_q) continue;
          Out* const row = out.base + i * out.stride_m;
#pragma unroll
          for (int group = 0; group < kN; group += Order::kKeys / 8) {
            int const j = n0 + col0 + Order::key(group, lane & 3, 0);
            ScoreRun<Out, Order::kRun> run;
#pragma unroll
            for (int x = 0; x < Order::kRun; ++x) run.x[x] = from_float<Out>(sum[m][group + x / 2][2 * r + x % 2]);
            if (vectors) {
              if (j < params.seqlen_k) *reinterpret_cast<ScoreRun<Out, Order::kRun>*>(row + j) = run;
            } else {
#pragma unroll
              for (int x = 0; x < Order::kRun; ++x) {
                if (j + x < params.seqlen_k) row[(j + x) * out.stride_n] = run.x[x];
              }
            }
          }
        }
    } else {
      // Within the warp: rows live on lane / 4, columns on lane % 4.
      constexpr int kSumM = kReduceM ? 1 : kM, kSumN = kReduceN ? 1 : kN;
      int const warp = tid >> 5;
      int const line = kReduceM ? (kReduceN ? warp : warp / kWarpsN) : warp % kWarpsN;
      bool const writes = (!kReduceM || lane < 4) && (!kReduceN || (lane & 3) == 0);
      __syncthreads();  // the sums of the previous output tile have been read
#pragma unroll
      for (int m = 0; m < kSumM; ++m)
#pragma unroll
        for (int n = 0; n < kSumN; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (folded(e) != e) continue;
            float x = sum[m][n][e];
#pragma unroll
            for (int apart = kReduceN ? 1 : 4; apart < (kReduceM ? 32 : 4); apart *= 2) {
              x += __shfl_xor_sync(0xffffffffu, x, apart);
            }
            int const at = kReduceM ? (kReduceN ? 0 : col0 + Order::key(n, lane & 3, e))
                                    : row0 + 16 * m + 4 * e + (lane >> 2);  // e is 0 or 2: row + 0 or + 8
            if (writes) sums[line * kLine + at] = x;
          }
      __syncthreads();
      for (int at = tid; at < kLine; at += kThreads) {
        float total = 0.0f;
#pragma unroll
        for (int x = 0; x < kLines; ++x) total += sums[x * kLine + at];
        int const i = kReduceM ? 0 : m0 + at;
        int const j = kReduceN ? 0 : kReduceM ? n0 + at : 0;
        if (i < params.dbias_size_m && j < params.dbias_size_n) *out.at(i, j) = from_float<Out>(total);
      }
    }
  }
};

// Grid: at most the number of output tiles times num_dbias_splits.
template <class Traits>
NVRTC_ATTN_DEVICE void backward_dbias(BackwardParams const& params) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  BackwardDbias<Traits>(params, reinterpret_cast<typename Traits::Element*>(smem_bytes)).run();
}

}  // namespace nvrtc_attn
