// dQ: one CTA owns kBlockM query rows of one (batch, head) and walks the key tiles that they see. No atomics, no workspace
// but delta: bitwise reproducible. dQ = scale * sum over key tiles of dS K, dS = P * (Z * (dO V^T) - delta).
//
// Warps form a grid of kWarpsM row groups by kWarpsD. With kWarpsD = 1 a warp keeps its dQ rows for all of the head dim and
// feeds dS to the product from its accumulators. With kWarpsD > 1 (dQ rows do not fit one warp's registers) the warps of a row
// group share the key columns of S and dP, pass dS through shared memory, and own kHeadDim / kWarpsD columns of dQ each.
//
// Two main loops:
// * resident: Q and dO stay in shared memory (kPreload: in registers), K and V tiles come in whole. K is read twice from
//   the same tile, plain for S and transposed for dQ. Shared memory: Q | dO | K x stages | V x stages | dS.
//   Two stages: one barrier a key tile, the next tile's copies overlap all of this one's work. One stage: V of the next tile
//   travels during S and dQ, K of the next tile during dP.
// * streamed (kStreamed): everything comes in slices of kSliceD columns through a ring, K's a second time for dQ. Shared memory
//   does not grow with the head dim: ring of (M slice | N slice) x stages | dS.
#pragma once
#include "../collective/hidden_keys.cuh"
#include "../collective/packed_slots.cuh"
#include "../collective/score_gradient.cuh"
#include "../common/tile_load.cuh"

namespace nvrtc_attn {

template <class Traits>
struct BackwardDq {
  using Element = typename Traits::Element;
  static constexpr bool kLegacy = Traits::kLegacyMma;
  static constexpr int kThreads = Traits::kNumThreads;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kWarpsM = Traits::kWarpsM;
  static constexpr int kWarpsD = Traits::kNumWarps / kWarpsM;
  static_assert(kWarpsM * kWarpsD == Traits::kNumWarps, "warps form a grid");
  static constexpr int kM = kBlockM / (16 * kWarpsM);
  static_assert(kM * 16 * kWarpsM == kBlockM, "a warp has whole accumulator rows");
  static constexpr int kChunkN = kWarpsD > 1 ? kBlockN / kWarpsD : Traits::kStreamed ? kBlockN : Traits::kChunkN;
  static constexpr int kN = kChunkN / 8;
  static constexpr int kChunks = kWarpsD > 1 ? 1 : kBlockN / kChunkN;
  static_assert(kChunkN % 16 == 0 && kBlockN % kChunkN == 0, "chunks are whole 16-column steps");
  // Unrolling all of a wide product costs compile time and instruction cache and gains nothing beyond eight steps; float32
  // fragments take twice the registers, and above head dim 96 there are none left to load them far ahead.
  static constexpr int kUnroll = sizeof(Element) == 2 ? 8 : Traits::kHeadDim <= 96 ? 4 : Traits::kBand ? 1 : 2;
  using Gradient = ScoreGradient<Traits, true>;
  using TileDS = SmemTile<Element, kBlockM, kBlockN>;
  using Seqlen = SeqlenInfo<Traits::kVarlen, Traits::kSequsedK>;

  BackwardParams const& params;
  Seqlen const seqlen;
  int const b, h, m0;
  int const tid, lane, warp_m, warp_d;
  Element* const smem;
  Element const *gQ, *gK, *gV, *gDO;

  static NVRTC_ATTN_DEVICE Element const* at(void const* base, index_t b, index_t stride_b, index_t h, index_t stride_h,
                                             index_t row, index_t stride_row) {
    return reinterpret_cast<Element const*>(base) + b * stride_b + h * stride_h + row * stride_row;
  }

  NVRTC_ATTN_DEVICE BackwardDq(BackwardParams const& p, Element* smem_, int b_, int h_, int m0_)
      : params(p),
        seqlen(p, b_),
        b(b_),
        h(h_),
        m0(m0_),
        tid(threadIdx.x),
        lane(tid & 31),
        warp_m((tid >> 5) / kWarpsD),
        warp_d((tid >> 5) % kWarpsD),
        smem(smem_) {
    int const hkv = h / (p.num_heads / p.num_heads_kv);
    int const e = seqlen.batch_index;
    gQ = at(p.q, e, p.q_stride_b, h, p.q_stride_h, seqlen.q_row0 + m0, p.q_stride_m);
    gDO = at(p.dout, e, p.dout_stride_b, h, p.dout_stride_h, seqlen.q_row0 + m0, p.dout_stride_m);
    gK = at(p.k, e, p.k_stride_b, hkv, p.k_stride_h, seqlen.k_row0, p.k_stride_n);
    gV = at(p.v, e, p.v_stride_b, hkv, p.v_stride_h, seqlen.k_row0, p.v_stride_n);
  }

  template <class Tile>
  NVRTC_ATTN_DEVICE void load(Element* tile, Element const* src, index_t stride_row, index_t stride_d, int rows,
                              int cols) const {
    load_tile<Tile, kThreads, Traits::kAligned, kLegacy>(tile, src, stride_row, stride_d, rows, cols, tid);
  }

  using Order = KeyOrderOf<kN>;
  template <class Tile>
  NVRTC_ATTN_DEVICE void load_keys(Element* tile, Element const* src, index_t stride_row, index_t stride_d, int rows,
                                   int cols) const {
    load_key_tile<Tile, Order, kThreads, Traits::kAligned, kLegacy>(tile, src, stride_row, stride_d, rows, cols, tid);
  }

  // Zeros in the keys of a tile from n0 on that no query sees: dQ = dS K.
  template <class Tile>
  NVRTC_ATTN_DEVICE void zero_hidden_keys(Element* tile, int n0) const {
    if constexpr (Traits::kMask) {
      HiddenKeys const hidden(params, b, h, 1);
      if (hidden.any) {
        zero_hidden_rows<Tile, kThreads>(tile, [&](int row) {
          int const j = n0 + Order::key(row);
          return j < seqlen.len_k && hidden(j);
        });
      }
    }
  }

  // The warp's dS into the shared tile, as the element type.
  template <class Tile>
  NVRTC_ATTN_DEVICE void store_ds(Element* tile, WarpTile<kM, kN> const& ds, int row0, int col0) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          Element* p = tile + Tile::offset(row0 + 16 * m + 8 * r + (lane >> 2), col0 + 8 * n + 2 * (lane & 3));
          if constexpr (sizeof(Element) == 2) {
            *reinterpret_cast<unsigned*>(p) = pack2<Element>(ds[m][n][2 * r], ds[m][n][2 * r + 1]);
          } else {
            *reinterpret_cast<float2*>(p) = make_float2(ds[m][n][2 * r], ds[m][n][2 * r + 1]);
          }
        }
  }

  // dQ tiles of this warp: accumulator tile d is columns 8 * (tile0 + d) up to `cols_end` of the head dim.
  template <int kD>
  NVRTC_ATTN_DEVICE void store_dq(WarpTile<kM, kD> const& dq, int tile0, int cols_end) const {
    Element* base = reinterpret_cast<Element*>(params.dq) + index_t(seqlen.batch_index) * params.dq_stride_b +
                    index_t(h) * params.dq_stride_h;
    int const end = min(cols_end, params.head_dim);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int const i = m0 + warp_m * 16 * kM + 16 * m + 8 * r + (lane >> 2);
        if (i >= seqlen.len_q) continue;
        Element* row = base + index_t(seqlen.q_row0 + i) * params.dq_stride_m;
#pragma unroll
        for (int d = 0; d < kD; ++d) {
          int const col = 8 * (tile0 + d) + 2 * (lane & 3);
          float const x = dq[m][d][2 * r] * params.scale, y = dq[m][d][2 * r + 1] * params.scale;
          if constexpr (Traits::kAligned) {
            if (col < end) {
              *reinterpret_cast<ElementPair<Element>*>(row + col) =
                  ElementPair<Element>{from_float<Element>(x), from_float<Element>(y)};
            }
          } else {
            if (col < end) row[index_t(col) * params.dq_stride_d] = from_float<Element>(x);
            if (col + 1 < end) row[index_t(col + 1) * params.dq_stride_d] = from_float<Element>(y);
          }
        }
      }
  }

  NVRTC_ATTN_DEVICE void run_resident() {
    using TileQ = SmemTile<Element, kBlockM, Traits::kHeadDim>;
    using TileDO = SmemTile<Element, kBlockM, Traits::kHeadDimV>;
    using TileK = SmemTile<Element, kBlockN, Traits::kHeadDim>;
    using TileV = SmemTile<Element, kBlockN, Traits::kHeadDimV>;
    static_assert(kStages == 2 || (kStages == 1 && kChunks == 1), "one stage needs dP of the whole key tile at once");
    constexpr int kTiles = Traits::kHeadDim / 8;
    constexpr int kD = kWarpsD == 1 ? kTiles : (kTiles + 2 * kWarpsD - 1) / (2 * kWarpsD) * 2;
    Element* const sQ = smem;
    Element* const sDO = sQ + TileQ::kSize;
    Element* const sK = sDO + TileDO::kSize;
    Element* const sV = sK + kStages * TileK::kSize;
    Element* const sDS = sV + kStages * TileV::kSize;

    Gradient const gradient(params, b, h, seqlen.len_q, seqlen.len_k);
    int first, last;
    gradient.positions.template key_tiles<kBlockN>(m0, kBlockM, first, last);
    auto load_k = [&](int t) {
      int const n0 = t * kBlockN;
      load_keys<TileK>(sK + (kStages == 2 ? (t & 1) * TileK::kSize : 0), gK + index_t(n0) * params.k_stride_n,
                       params.k_stride_n, params.k_stride_d, seqlen.len_k - n0, params.head_dim);
    };
    auto load_v = [&](int t) {
      int const n0 = t * kBlockN;
      load_keys<TileV>(sV + (kStages == 2 ? (t & 1) * TileV::kSize : 0), gV + index_t(n0) * params.v_stride_n,
                       params.v_stride_n, params.v_stride_d, seqlen.len_k - n0, params.head_dim_v);
    };

    int const row0 = warp_m * 16 * kM;
    int const tile0 = warp_d * kD;
    WarpTile<kM, kD> dq;
    clear(dq);
    if (first < last) {
      load<TileDO>(sDO, gDO, params.dout_stride_m, params.dout_stride_d, seqlen.len_q - m0, params.head_dim_v);
      load<TileQ>(sQ, gQ, params.q_stride_m, params.q_stride_d, seqlen.len_q - m0, params.head_dim);
      load_v(first);
      if constexpr (kStages == 1) cp_async_commit<kLegacy>();
      load_k(first);
      cp_async_commit<kLegacy>();
      RowStatistics<kM> rows;
      rows.load(params, gradient.map, seqlen, b, h, m0 + row0, lane);

      using RowsQ =
          cute::conditional_t<Traits::kPreload, RegisterRows<TileQ, Element, kM>, SharedRows<TileQ, Element, kM>>;
      using RowsDO =
          cute::conditional_t<Traits::kPreload, RegisterRows<TileDO, Element, kM>, SharedRows<TileDO, Element, kM>>;
      constexpr int kUnrollQ = Traits::kPreload ? TileQ::kCols : kUnroll;
      constexpr int kUnrollDO = Traits::kPreload ? TileDO::kCols : kUnroll;
      RowsQ q;
      RowsDO dout;
      if constexpr (Traits::kPreload) {
        cp_async_wait<kLegacy, 0>();
        __syncthreads();
        q.load(sQ, row0, lane);
        dout.load(sDO, row0, lane);
      } else {
        q.tile = sQ;
        dout.tile = sDO;
        q.row0 = dout.row0 = row0;
      }
#pragma unroll 1
      for (int t = first; t < last; ++t) {
        int const buffer = kStages == 2 ? t & 1 : 0;
        Element const* const tK = sK + buffer * TileK::kSize;
        Element const* const tV = sV + buffer * TileV::kSize;
        if constexpr (kStages == 2) {
          cp_async_wait<kLegacy, 0>();
          zero_hidden_keys<TileK>(sK + (t & 1) * TileK::kSize, t * kBlockN);
          __syncthreads();  // tile t has landed, and every warp is done with the buffers of tile t - 1
          if (t + 1 < last) {
            load_v(t + 1);
            load_k(t + 1);
          }
          cp_async_commit<kLegacy>();
        } else {
          cp_async_wait<kLegacy, 1>();
          __syncthreads();
        }
#pragma unroll 1
        for (int c = 0; c < kChunks; ++c) {
          int const col0 = kWarpsD > 1 ? warp_d * kChunkN : c * kChunkN;
          // A diagonal tile of a causal mask is half such chunks.
          if (kWarpsD == 1 && kStages == 2 &&
              !gradient.positions.sees_tile(m0 + row0, 16 * kM, t * kBlockN + col0, kChunkN))
            continue;
          WarpTile<kM, kN> dp, s;
          clear(dp);
          multiply_nt<TileV, kLegacy, kUnrollDO, false, true>(dp, dout, tV, col0, lane);
          if constexpr (kStages == 1) {
            cp_async_wait<kLegacy, 0>();
            zero_hidden_keys<TileK>(sK, t * kBlockN);
            __syncthreads();  // K has landed, V is free
            if (t + 1 < last) load_v(t + 1);
            cp_async_commit<kLegacy>();
          }
          typename Gradient::template Prefetched<kM, kN> tile;
          gradient.prefetch(tile, m0 + row0, t * kBlockN + col0, lane);
          clear(s);
          multiply_nt<TileK, kLegacy, kUnrollQ, false, true>(s, q, tK, col0, lane);
          gradient(s, dp, rows, tile, m0 + row0, t * kBlockN + col0, lane);
          if constexpr (kWarpsD == 1) {
            multiply_accumulator<TileK, kLegacy>(dq, s, tK, col0, tile0, lane);
          } else {
            store_ds<TileDS>(sDS, s, row0, col0);
            __syncthreads();
            multiply_shared<TileDS, TileK, kLegacy, kUnroll>(dq, sDS, row0, tK, tile0, lane);
          }
        }
        if constexpr (kStages == 1) {
          __syncthreads();  // K is free
          if (t + 1 < last) load_k(t + 1);
          cp_async_commit<kLegacy>();
        }
      }
    }
    store_dq(dq, tile0, Traits::kHeadDim);
  }

  NVRTC_ATTN_DEVICE void run_streamed() {
    constexpr int kSlice = Traits::kSliceD;
    using TileM = SmemTile<Element, kBlockM, kSlice>;
    using TileN = SmemTile<Element, kBlockN, kSlice>;
    constexpr int kSlicesQ = (Traits::kHeadDim + kSlice - 1) / kSlice;
    constexpr int kSlicesV = (Traits::kHeadDimV + kSlice - 1) / kSlice;
    constexpr int kOps = kSlicesV + 2 * kSlicesQ;  // of one key tile: dP, then S, then dQ
    constexpr int kD = kSlice / (8 * kWarpsD);
    static_assert(kD * 8 * kWarpsD == kSlice && (kWarpsD == 1 || kD % 2 == 0), "a slice splits evenly over the warps");
    static_assert(kStages >= 2, "the ring needs a slot to fill while another is read");
    constexpr int kSlot = TileM::kSize + TileN::kSize;
    Element* const sDS = smem + kStages * kSlot;

    Gradient const gradient(params, b, h, seqlen.len_q, seqlen.len_k);
    int first, last;
    gradient.positions.template key_tiles<kBlockN>(m0, kBlockM, first, last);
    int const row0 = warp_m * 16 * kM;
    int const col0 = kWarpsD > 1 ? warp_d * kChunkN : 0;
    float dq[kSlicesQ][kM][kD][4];
#pragma unroll
    for (int x = 0; x < kSlicesQ; ++x) clear(dq[x]);

    // The copy side runs kStages - 1 operations ahead of the compute side.
    int load_tile_index = first, load_op = 0, load_slot = 0;
    auto issue = [&]() {
      if (load_tile_index < last) {
        Element* const slot = smem + load_slot * kSlot;
        bool const is_v = load_op < kSlicesV;
        bool const again = load_op >= kSlicesV + kSlicesQ;
        int const d0 = (is_v ? load_op : load_op - (again ? kSlicesV + kSlicesQ : kSlicesV)) * kSlice;
        int const cols = (is_v ? params.head_dim_v : params.head_dim) - d0;
        int const n0 = load_tile_index * kBlockN;
        if (!again) {
          index_t const stride_d = is_v ? params.dout_stride_d : params.q_stride_d;
          load<TileM>(slot, (is_v ? gDO : gQ) + d0 * stride_d, is_v ? params.dout_stride_m : params.q_stride_m,
                      stride_d, seqlen.len_q - m0, cols);
        }
        index_t const stride_n = is_v ? params.v_stride_n : params.k_stride_n;
        index_t const stride_d = is_v ? params.v_stride_d : params.k_stride_d;
        load_keys<TileN>(slot + TileM::kSize, (is_v ? gV : gK) + n0 * stride_n + d0 * stride_d, stride_n, stride_d,
                         seqlen.len_k - n0, cols);
        if (++load_op == kOps) {
          load_op = 0;
          ++load_tile_index;
        }
        load_slot = load_slot + 1 == kStages ? 0 : load_slot + 1;
      }
      cp_async_commit<kLegacy>();
    };
    RowStatistics<kM> rows;
    if (first < last) {
      rows.load(params, gradient.map, seqlen, b, h, m0 + row0, lane);
#pragma unroll 1
      for (int i = 0; i + 1 < kStages; ++i) issue();
    }
    int slot_index = 0;
#pragma unroll 1
    for (int t = first; t < last; ++t) {
      WarpTile<kM, kN> s, dp;
      clear(s);
      clear(dp);
#pragma unroll 1
      for (int op = 0; op < kOps; ++op) {
        cp_async_wait<kLegacy, kStages - 2>();
        if (op >= kSlicesV + kSlicesQ) zero_hidden_keys<TileN>(smem + slot_index * kSlot + TileM::kSize, t * kBlockN);
        __syncthreads();  // this slot has landed; the slot read one operation ago is free; dS is visible
        issue();
        Element const* const slot = smem + slot_index * kSlot;
        Element const* const tile_n = slot + TileM::kSize;
        slot_index = slot_index + 1 == kStages ? 0 : slot_index + 1;
        SharedRows<TileM, Element, kM> const left{slot, row0};
        if (op < kSlicesV) {
          multiply_nt<TileN, kLegacy, kUnroll, false, false>(dp, left, tile_n, col0, lane);
        } else if (op < kSlicesV + kSlicesQ) {
          multiply_nt<TileN, kLegacy, kUnroll, false, false>(s, left, tile_n, col0, lane);
          if (op == kSlicesV + kSlicesQ - 1) {
            typename Gradient::template Prefetched<kM, kN> tile;
            gradient.prefetch(tile, m0 + row0, t * kBlockN + col0, lane);
            gradient(s, dp, rows, tile, m0 + row0, t * kBlockN + col0, lane);
            if constexpr (kWarpsD > 1) store_ds<TileDS>(sDS, s, row0, col0);
          }
        } else {
#pragma unroll
          for (int x = 0; x < kSlicesQ; ++x) {  // registers need a constant index
            if (op != kSlicesV + kSlicesQ + x) continue;
            if constexpr (kWarpsD == 1) {
              multiply_accumulator<TileN, kLegacy>(dq[x], s, tile_n, 0, 0, lane);
            } else {
              multiply_shared<TileDS, TileN, kLegacy, 1>(dq[x], sDS, row0, tile_n, warp_d * kD, lane);
            }
          }
        }
      }
    }
#pragma unroll
    for (int x = 0; x < kSlicesQ; ++x) store_dq(dq[x], (x * kSlice) / 8 + warp_d * kD, Traits::kHeadDim);
  }
};

// Varlen: rows of the token dim that belong to no sequence become zero; part `m` of `parts` takes its share.
template <class Traits>
NVRTC_ATTN_DEVICE void zero_dq_outside(BackwardParams const& params, int h, int m, int parts) {
  using Element = typename Traits::Element;
  int const before = params.cu_seqlens_q[0];
  int const end = params.cu_seqlens_q[params.batch];
  int const rows = before + params.total_q - end;
  for (int r = m; r < rows; r += parts) {
    int const row = r < before ? r : end + r - before;
    Element* p =
        reinterpret_cast<Element*>(params.dq) + index_t(row) * params.dq_stride_m + index_t(h) * params.dq_stride_h;
    for (int d = threadIdx.x; d < params.head_dim; d += Traits::kNumThreads) {
      p[index_t(d) * params.dq_stride_d] = from_float<Element>(0.0f);
    }
  }
}

// Grid: batch * num_heads * num_m_blocks; packed num_heads * slots (collective/packed_slots.cuh).
template <class Traits>
NVRTC_ATTN_DEVICE void backward_dq(BackwardParams const& params) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  int const bh = blockIdx.x / params.num_m_blocks;
  int m = blockIdx.x % params.num_m_blocks;
  int b = bh / params.num_heads;
  int h = bh % params.num_heads;
  if constexpr (Traits::kVarlen) {
    PackedSlots<Traits::kBlockM> const slots{params.cu_seqlens_q, params.batch, params.total_q};
    h = blockIdx.x / slots.count();
    PackedSlot const found = slots.find_together(blockIdx.x - h * slots.count(), threadIdx.x % 32);
    m = found.tile;
    b = found.b;
    if (b == params.batch) {
      zero_dq_outside<Traits>(params, h, m, slots.parts());
      return;
    }
    if (m >= params.num_m_blocks || m * Traits::kBlockM >= params.cu_seqlens_q[b + 1] - params.cu_seqlens_q[b]) return;
  }
  if constexpr (Traits::kBand) {
    // Rows near the end see the most keys under a causal mask: start them first so that the last wave is short.
    if constexpr (!Traits::kVarlen) {
      if (PositionMask<true>::last_rows_see_most(params)) m = params.num_m_blocks - 1 - m;
    }
  }
  BackwardDq<Traits> cta(params, reinterpret_cast<typename Traits::Element*>(smem_bytes), b, h, m * Traits::kBlockM);
  if constexpr (Traits::kStreamed) {
    cta.run_streamed();
  } else {
    cta.run_resident();
  }
}

}  // namespace nvrtc_attn
