// Attention forward on mma.sync, compute capability 7.5 and up: one thread block per (key split, batch, head, query tile).
//
// Roles: kNumWarps = warps_m * kWarpsN * kWarpsD. Warps along m own 16 * kTilesM query rows each. kWarpsD > 1 divides the value
// columns when the output does not fit in registers; each such warp recomputes the scores. kWarpsN > 1 divides the keys
// of every tile (decode: one row block, all warps busy) and merges the softmax states through shared memory at the end.
// Key tiles run from the last to the first, so the tiles that need an element mask come first.
//
// Shared memory: sQ[kBlockM][kHeadDim], then kNumStages times sK[kBlockN][kHeadDim], sV[kBlockN][kHeadDimV]; the
// epilogue reuses it from the start for the output tile, or for kWarpsN partial outputs in float32.
//
// Barriers, kNumStages == 1: one before Q K^T (this tile's K has landed, everyone is done with the last V) and one after it
// (V has landed, everyone is done with K); V loads during Q K^T, the next K during softmax and P V.
// kNumStages > 1: one a tile; kNumStages - 1 tiles are in flight.
#pragma once
#include "../collective/dropout.cuh"
#include "../collective/epilogue.cuh"
#include "../collective/seqlen.cuh"
#include "../collective/softmax.cuh"
#include "../common/fragment_load.cuh"
#include "../common/tile_load.cuh"

namespace nvrtc_attn {

template <class Traits>
struct ForwardShape {
  using Element = typename Traits::Element;
  static constexpr bool kLegacy = Traits::kLegacyMma;
  static constexpr int kThreads = Traits::kNumThreads;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kWarpsD = Traits::kWarpsD;
  static constexpr int kWarpsM = Traits::kNumWarps / (Traits::kWarpsN * Traits::kWarpsD);
  static constexpr int kWarpRows = kBlockM / kWarpsM;
  static constexpr int kWarpCols = kBlockN / Traits::kWarpsN;
  static constexpr int kWarpDims = Traits::kHeadDimV / Traits::kWarpsD;
  static constexpr int kTilesM = kWarpRows / 16;
  static constexpr int kTilesN = kWarpCols / 8;
  static constexpr int kTilesD = kWarpDims / 8;
  static constexpr int kStep = kStepK<Element>;
  static constexpr int kStepsQK = Traits::kHeadDim / kStep;
  static constexpr bool kHalfStepQK = Traits::kHeadDim % kStep != 0;
  static constexpr int kPairsN = kTilesN / 2;
  static constexpr int kPairsD = kTilesD / 2;
  using TileQ = SmemTile<Element, kBlockM, Traits::kHeadDim>;
  using TileK = SmemTile<Element, kBlockN, Traits::kHeadDim>;
  using TileV = SmemTile<Element, kBlockN, Traits::kHeadDimV>;
  using TileO = SmemTile<Element, kBlockM, Traits::kHeadDimV>;

  static_assert(kWarpsM * Traits::kWarpsN * Traits::kWarpsD == Traits::kNumWarps, "warps form a grid");
  static_assert(kWarpRows % 16 == 0 && kWarpsM * kWarpRows == kBlockM, "rows of a warp are whole 16-row tiles");
  static_assert(kWarpCols % 16 == 0 && Traits::kWarpsN * kWarpCols == kBlockN, "keys of a warp are pairs of 8");
  static_assert(kWarpDims % 8 == 0 && Traits::kWarpsD * kWarpDims == Traits::kHeadDimV, "value columns divide evenly");
  static_assert(kWarpsD == 1 || kWarpsD == 2 || kWarpsD == 4, "a power of two, as the swizzle's bits");
  static_assert(kWarpsD == 1 || kWarpDims % 16 == 0, "warps take 16 value columns in turn");

  // First of the 8 value columns of this warp's output tile d.
  static NVRTC_ATTN_DEVICE int column(int d, int warp_d) {
    if constexpr (sizeof(Element) == 4) return 8 * (d * kWarpsD + warp_d);
    return 16 * ((d / 2) * kWarpsD + warp_d) + 8 * (d % 2);
  }
  static_assert(Traits::kWarpsN == 1 || Traits::kWarpsD == 1, "merging warps own all value columns");
};

// Which piece of the work this thread has. Units (sequence, head, split) come in groups of `head_group`; within a group the
// query tiles run from the last, which sees the most keys under a causal mask, to the first, each for all units of the
// group. The host makes groups as large as their K and V fit in L2 when tiles differ in length, and 1 otherwise.
template <class Traits>
struct Position {
  using Shape = ForwardShape<Traits>;
  int tid, lane, warp_row0, warp_n, warp_d;
  int m_block, split, h, b;

  // Read anew from the special registers (volatile), so that the epilogue can work everything out again: kept through
  // the main loop, these values spill.
  NVRTC_ATTN_DEVICE explicit Position(ForwardParams const& params) {
    int block;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    lane = tid & 31;
    int const warp = __shfl_sync(0xffffffffu, tid >> 5, 0);  // tells ptxas that branches on it are uniform
    warp_row0 = warp % Shape::kWarpsM * Shape::kWarpRows;
    warp_n = Traits::kWarpsN > 1 ? warp / Shape::kWarpsM : 0;
    warp_d = Traits::kWarpsD > 1 ? warp / Shape::kWarpsM : 0;
    int const num_splits = Traits::kSplit ? params.num_splits : 1;
    int const num_units = (params.batch + (Traits::kVarlen && !Traits::kSplit)) * params.num_heads * num_splits;
    int const group = block / (params.head_group * params.num_m_blocks);
    int const in_group = block - group * params.head_group * params.num_m_blocks;
    int const units = min(params.head_group, num_units - group * params.head_group);
    m_block = params.num_m_blocks - 1 - in_group / units;
    block = group * params.head_group + in_group % units;
    split = block % num_splits;
    block /= num_splits;
    h = block % params.num_heads;
    b = block / params.num_heads;
  }
};

// Q fragments: in registers for the whole key loop, or read again for every tile.
template <class Shape, bool kPreload>
struct QueryOperand {
  using Fragment = FragmentA<typename Shape::Element>;
  static constexpr int kAllSteps = Shape::kStepsQK + Shape::kHalfStepQK;
  Fragment fragment[kPreload ? kAllSteps : 1][kPreload ? Shape::kTilesM : 1];
  LaneAddress<typename Shape::TileQ> address;

  NVRTC_ATTN_DEVICE Fragment read(int step, int m) const {
    Fragment a;
    if (Shape::kHalfStepQK && step == Shape::kStepsQK) {
      ldmatrix_x2(address.at(16 * m, 2 * step), a.x[0], a.x[1]);
      a.x[2] = a.x[3] = 0;
    } else {
      ldmatrix_x4(address.at(16 * m, 2 * step), a.x[0], a.x[1], a.x[2], a.x[3]);
      prepare(a);
    }
    return a;
  }

  NVRTC_ATTN_DEVICE void preload() {
    if constexpr (kPreload) {
#pragma unroll
      for (int step = 0; step < kAllSteps; ++step) {
#pragma unroll
        for (int m = 0; m < Shape::kTilesM; ++m) fragment[step][m] = read(step, m);
      }
    }
  }

  NVRTC_ATTN_DEVICE void get(Fragment (&a)[Shape::kTilesM], int step) const {
#pragma unroll
    for (int m = 0; m < Shape::kTilesM; ++m) {
      if constexpr (kPreload) {
        a[m] = fragment[step][m];
      } else {
        a[m] = read(step, m);
      }
    }
  }
};

// K fragments of 16 keys, as two right operands.
template <class Shape>
struct KeyOperand {
  using Fragment = FragmentB<typename Shape::Element>;
  LaneAddress<typename Shape::TileK> address;
  LaneAddress<typename Shape::TileK> half_address;  // of the odd half step

  NVRTC_ATTN_DEVICE KeyOperand(typename Shape::Element const* sK, int row0, int lane)
      : address(lane_address_b<typename Shape::TileK>(sK, row0, lane)) {
    if constexpr (Shape::kHalfStepQK) {
      half_address = LaneAddress<typename Shape::TileK>(sK, row0 + (lane & 15), 2 * Shape::kStepsQK);
    }
  }
  NVRTC_ATTN_DEVICE void get(Fragment (&b)[2], int step, int pair, int bytes) const {
    ldmatrix_x4(address.at(16 * pair, 2 * step) + bytes, b[0].x[0], b[0].x[1], b[1].x[0], b[1].x[1]);
    prepare(b[0]);
    prepare(b[1]);
  }
  NVRTC_ATTN_DEVICE void get_half_step(Fragment (&b)[2], int pair, int bytes) const {
    ldmatrix_x2(half_address.at(16 * pair, 0) + bytes, b[0].x[0], b[1].x[0]);
    b[0].x[1] = b[1].x[1] = 0;
  }
};

// V fragments: this warp's columns, in units of 16 (16-bit) or 8 (float32) that the kWarpsD warps take in turn.
template <class Shape>
struct ValueOperand {
  using Element = typename Shape::Element;
  using Fragment = FragmentB<Element>;
  static constexpr bool kHalf = sizeof(Element) == 2;
  static constexpr int kChunkStride = 2 * Shape::kWarpsD;
  LaneAddress<typename Shape::TileV> address;
  LaneAddress<typename Shape::TileV> odd_address;  // float32: the second key of the permuted pair

  NVRTC_ATTN_DEVICE ValueOperand(Element const* sV, int row0, int warp_d, int lane) {
    if constexpr (kHalf) {
      address = lane_address_b_trans<typename Shape::TileV>(sV, row0, 2 * warp_d, lane);
    } else {
      int const key = row0 + 2 * (lane & 3);
      int const column = lane >> 2;
      address = LaneAddress<typename Shape::TileV>(sV, key, 2 * warp_d + (column >> 2)).moved(4 * (column & 3));
      odd_address = LaneAddress<typename Shape::TileV>(sV, key + 1, 2 * warp_d + (column >> 2)).moved(4 * (column & 3));
    }
  }
  // 16 keys from 16 * step, 16 columns.
  NVRTC_ATTN_DEVICE void get_pair(Fragment (&b)[2], int step, int pair, int bytes) const {
    ldmatrix_trans_x4(address.at(16 * step, kChunkStride * pair) + bytes, b[0].x[0], b[0].x[1], b[1].x[0], b[1].x[1]);
  }
  NVRTC_ATTN_DEVICE void get_last(Fragment& b, int step, int bytes) const {
    ldmatrix_trans_x2(address.at(16 * step, kChunkStride * Shape::kPairsD) + bytes, b.x[0], b.x[1]);
  }
  // 8 keys from 8 * step, 8 columns.
  NVRTC_ATTN_DEVICE void get_permuted(Fragment& b, int step, int d, int bytes) const {
    b.x[0] = load_shared(address.at(8 * step, kChunkStride * d) + bytes);
    b.x[1] = load_shared(odd_address.at(8 * step, kChunkStride * d) + bytes);
    prepare(b);
  }
};

// s = Q K^T for this warp's rows and keys. Fragments of the next pair of key columns are read while
// the current pair multiplies.
template <class Shape, class Query>
NVRTC_ATTN_DEVICE void multiply_qk(AccTile (&s)[Shape::kTilesM][Shape::kTilesN], Query const& query,
                                   KeyOperand<Shape> const& key, int stage_bytes) {
  using Element = typename Shape::Element;
#pragma unroll
  for (int m = 0; m < Shape::kTilesM; ++m) {
#pragma unroll
    for (int n = 0; n < Shape::kTilesN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] = 0.0f;
    }
  }
  FragmentA<Element> a[Shape::kTilesM];
  FragmentB<Element> b[2][2];
  if constexpr (Shape::kStepsQK > 0) key.get(b[0], 0, 0, stage_bytes);
#pragma unroll
  for (int step = 0; step < Shape::kStepsQK; ++step) {
    query.get(a, step);
#pragma unroll
    for (int pair = 0; pair < Shape::kPairsN; ++pair) {
      int const now = (step * Shape::kPairsN + pair) & 1;
      if (pair + 1 < Shape::kPairsN) {
        key.get(b[now ^ 1], step, pair + 1, stage_bytes);
      } else if (step + 1 < Shape::kStepsQK) {
        key.get(b[now ^ 1], step + 1, 0, stage_bytes);
      }
#pragma unroll
      for (int m = 0; m < Shape::kTilesM; ++m) {
        mma<Element, Shape::kLegacy>(s[m][2 * pair], a[m], b[now][0]);
        mma<Element, Shape::kLegacy>(s[m][2 * pair + 1], a[m], b[now][1]);
      }
    }
  }
  if constexpr (Shape::kHalfStepQK) {
    query.get(a, Shape::kStepsQK);
#pragma unroll
    for (int pair = 0; pair < Shape::kPairsN; ++pair) {
      key.get_half_step(b[0], pair, stage_bytes);
#pragma unroll
      for (int m = 0; m < Shape::kTilesM; ++m) {
        mma_half_step<Element, Shape::kLegacy>(s[m][2 * pair], a[m], b[0][0]);
        mma_half_step<Element, Shape::kLegacy>(s[m][2 * pair + 1], a[m], b[0][1]);
      }
    }
  }
}

// -inf for what the position mask drops; i and j are this thread's first row and column.
template <class Shape, bool kBand>
NVRTC_ATTN_DEVICE void apply_position_mask(AccTile (&s)[Shape::kTilesM][Shape::kTilesN], PositionMask<kBand> const& mask,
                                           int i, int j) {
#pragma unroll
  for (int r = 0; r < 2 * Shape::kTilesM; ++r) {
    int const first = mask.first_key(i + 8 * r) - j;
    int const last = mask.last_key(i + 8 * r) - j;
#pragma unroll
    for (int n = 0; n < Shape::kTilesN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * n + e > last || (kBand && 8 * n + e < first)) s[r / 2][n][2 * (r % 2) + e] = -infinity();
      }
    }
  }
}

// Raw bias or mask values of this thread's scores, read ahead of Q K^T so that the matrix product hides their latency.
template <class Element, bool kEnabled, int kTilesM, int kTilesN>
struct ScoreOperand {
  static constexpr int kM = kEnabled ? kTilesM : 1;
  static constexpr int kN = kEnabled ? kTilesN : 1;
  ElementPair<Element> value[kM][kN][2];

  NVRTC_ATTN_DEVICE void load(ScoreTensor<Element const> const& t, int i, int j, int len_q, int len_k) {
    // Whole warp: all rows and columns of the tile lie inside and pairs are vectors.
    bool const inside = t.pairs && i + 16 * (kTilesM - 1) + 8 < len_q && j + 8 * (kTilesN - 1) + 1 < len_k;
    if (__all_sync(0xffffffffu, inside)) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          Element const* row = t.at(i + 16 * m + 8 * r, j);
#pragma unroll
          for (int n = 0; n < kN; ++n) value[m][n][r] = *reinterpret_cast<ElementPair<Element> const*>(row + 8 * n);
        }
      }
    } else {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            int const row = i + 16 * m + 8 * r;
            int const col = j + 8 * n;
            value[m][n][r] = ElementPair<Element>{};
            if (row < len_q && col < len_k) value[m][n][r].x = *t.at(row, col);
            if (row < len_q && col + 1 < len_k) value[m][n][r].y = *t.at(row, col + 1);
          }
        }
      }
    }
  }
};

// o += P V, with P computed from the scores one k-step at a time so that exponentials and matrix products overlap.
template <class Traits, class Shape, class Softmax>
NVRTC_ATTN_DEVICE void multiply_pv(AccTile (&o)[Shape::kTilesM][Shape::kTilesD], AccTile (&s)[Shape::kTilesM][Shape::kTilesN],
                                   Softmax& softmax, ScoreMap<Traits> const& map, Dropout const& dropout, int i, int n0,
                                   ValueOperand<Shape> const& value, int stage_bytes, int lane) {
  using Element = typename Shape::Element;
  constexpr bool kHalf = sizeof(Element) == 2;
  constexpr int kTilesPerStep = kHalf ? 2 : 1;
  unsigned keep[Shape::kTilesM][2];
  float reference[Softmax::kRows];
  softmax.get_references(s, map, reference);
#pragma unroll
  for (int step = 0; step < Shape::kTilesN / kTilesPerStep; ++step) {
    FragmentA<Element> a[Shape::kTilesM];
    if constexpr (Traits::kDropout) {
      if ((step * kTilesPerStep) % 2 == 0) {
#pragma unroll
        for (int m = 0; m < Shape::kTilesM; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) keep[m][r] = 
                dropout.keep_bits(i + 16 * m + 8 * r, n0 + step * kTilesPerStep * 8, lane);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < Shape::kTilesM; ++m) {
#pragma unroll
      for (int t = 0; t < kTilesPerStep; ++t) {
        AccTile& c = s[m][step * kTilesPerStep + t];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float const p = map.probability(c[e], reference[2 * m + (e >> 1)]);
          softmax.row_sum[2 * m + (e >> 1)] += p;
          c[e] = p;
          if constexpr (Traits::kDropout) {
            int const bit = 2 * ((step * kTilesPerStep + t) & 1) + (e & 1);
            c[e] = (keep[m][e >> 1] >> bit) & 1 ? p : 0.0f;  // the multiplier waits for the normalisation
          }
        }
      }
      if constexpr (kHalf) {
        a[m] = accumulator_as_a<Element>(s[m][2 * step], s[m][2 * step + 1]);
      } else {
        a[m] = accumulator_as_a(s[m][step]);
      }
    }
    if constexpr (kHalf) {
      FragmentB<Element> b[2][2];
      if constexpr (Shape::kPairsD > 0) value.get_pair(b[0], step, 0, stage_bytes);
#pragma unroll
      for (int pair = 0; pair < Shape::kPairsD; ++pair) {
        int const now = pair & 1;
        if (pair + 1 < Shape::kPairsD) value.get_pair(b[now ^ 1], step, pair + 1, stage_bytes);
#pragma unroll
        for (int m = 0; m < Shape::kTilesM; ++m) {
          mma<Element, Shape::kLegacy>(o[m][2 * pair], a[m], b[now][0]);
          mma<Element, Shape::kLegacy>(o[m][2 * pair + 1], a[m], b[now][1]);
        }
      }
      if constexpr (Shape::kTilesD % 2 != 0) {
        value.get_last(b[0][0], step, stage_bytes);
#pragma unroll
        for (int m = 0; m < Shape::kTilesM; ++m) mma<Element, Shape::kLegacy>(o[m][Shape::kTilesD - 1], a[m], b[0][0]);
      }
    } else {
      FragmentB<float> b[2];
      value.get_permuted(b[0], step, 0, stage_bytes);
#pragma unroll
      for (int d = 0; d < Shape::kTilesD; ++d) {
        if (d + 1 < Shape::kTilesD) value.get_permuted(b[(d + 1) & 1], step, d + 1, stage_bytes);
#pragma unroll
        for (int m = 0; m < Shape::kTilesM; ++m) mma<Element, Shape::kLegacy>(o[m][d], a[m], b[d & 1]);
      }
    }
  }
}

// Where one output row goes: out and lse, or one split's partial results.
template <class Traits>
struct OutputRows {
  using Element = typename Traits::Element;
  ForwardParams const& params;
  int split, b, h, batch_index, q_row0, len_q;
  bool vectors;

  NVRTC_ATTN_DEVICE Element* out(int i) const {
    return reinterpret_cast<Element*>(params.out) + index_t(batch_index) * params.out_stride_b +
           index_t(h) * params.out_stride_h + (index_t(q_row0) + i) * params.out_stride_m;
  }
  NVRTC_ATTN_DEVICE float* partial(int i) const {
    return params.out_partial + partial_row(params, split, b, h, i) * Traits::kHeadDimV;
  }
  NVRTC_ATTN_DEVICE void write_lse(int i, float row_max, float row_sum, ScoreMap<Traits> const& map) const {
    bool const empty = row_max == -infinity();
    float const lse = row_max * (map.exponent_scale * kLn2) + logf(row_sum);
    if constexpr (Traits::kSplit) {
      params.lse_partial[partial_row(params, split, b, h, i)] = empty ? -infinity() : lse;
    } else if (params.lse != nullptr) {
      *lse_row(params, b, h, q_row0, i) = empty ? params.lse_empty : lse;
    }
  }
  // 16 bytes of row i, columns d..: one store when the caller's tensor allows it.
  NVRTC_ATTN_DEVICE void write_chunk(int i, int d, Element const* from) const {
    constexpr int kVec = 16 / int(sizeof(Element));
    Element* const to = out(i) + index_t(d) * params.out_stride_d;
    if (vectors) {
      if (d < params.head_dim_v) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4 const*>(from);
    } else {
#pragma unroll
      for (int c = 0; c < kVec; ++c) {
        if (d + c < params.head_dim_v) to[index_t(c) * params.out_stride_d] = from[c];
      }
    }
  }
};

// Write out the warp's rows: o is not yet normalised, softmax is finished.
template <class Traits, class Shape, class Softmax>
NVRTC_ATTN_DEVICE void write_output(AccTile (&o)[Shape::kTilesM][Shape::kTilesD], Softmax const& softmax,
                                    ScoreMap<Traits> const& map, OutputRows<Traits> const& rows, unsigned char* smem,
                                    Position<Traits> const& here) {
  using Element = typename Shape::Element;
  using TileO = typename Shape::TileO;
  int const g = here.lane >> 2;
  int const t = here.lane & 3;
  int const m0 = here.m_block * Shape::kBlockM;
  float const multiplier = Traits::kDropout ? rows.params.dropout_multiplier : 1.0f;
  Element* const sO = reinterpret_cast<Element*>(smem);
#pragma unroll
  for (int r = 0; r < Softmax::kRows; ++r) {
    int const row = here.warp_row0 + 16 * (r / 2) + 8 * (r % 2) + g;
    bool const valid = m0 + row < rows.len_q;
    float const sum = softmax.row_sum[r];
    float const factor = sum == 0.0f ? 0.0f : multiplier / sum;
    if (t == 0 && here.warp_d == 0 && valid) rows.write_lse(m0 + row, softmax.row_max[r], sum, map);
    float* const partial = Traits::kSplit ? rows.partial(m0 + row) + 2 * t : nullptr;
#pragma unroll
    for (int d = 0; d < Shape::kTilesD; ++d) {
      float const x = o[r / 2][d][2 * (r % 2)] * factor;
      float const y = o[r / 2][d][2 * (r % 2) + 1] * factor;
      if constexpr (Traits::kSplit) {
        if (valid) *reinterpret_cast<float2*>(partial + Shape::column(d, here.warp_d)) = make_float2(x, y);
      } else {
        Element* const to = sO + TileO::offset(row, Shape::column(d, here.warp_d) + 2 * t);
        if constexpr (sizeof(Element) == 2) {
          *reinterpret_cast<uint32_t*>(to) = pack2<Element>(x, y);
        } else {
          *reinterpret_cast<float2*>(to) = make_float2(x, y);
        }
      }
    }
  }
  if constexpr (!Traits::kSplit) {
    __syncthreads();
#pragma unroll 1
    for (int n = here.tid; n < Shape::kBlockM * TileO::kChunks; n += Shape::kThreads) {
      int const row = n / TileO::kChunks;
      int const chunk = n % TileO::kChunks;
      if (m0 + row >= rows.len_q) break;  // rows only grow
      rows.write_chunk(m0 + row, chunk * TileO::kVec, sO + TileO::chunk_offset(row, chunk));
    }
  }
}

// kWarpsN > 1: add up the warps' outputs of the same rows, in warp order, and write them.
template <class Traits, class Shape, class Softmax>
NVRTC_ATTN_DEVICE void merge_and_write_output(AccTile (&o)[Shape::kTilesM][Shape::kTilesD], Softmax const& softmax,
                                              ScoreMap<Traits> const& map, OutputRows<Traits> const& rows,
                                              unsigned char* smem, Position<Traits> const& here) {
  using Element = typename Shape::Element;
  constexpr int kColumns = Traits::kHeadDimV;
  int const g = here.lane >> 2;
  int const t = here.lane & 3;
  int const m0 = here.m_block * Shape::kBlockM;
  float const multiplier = Traits::kDropout ? rows.params.dropout_multiplier : 1.0f;
  float* const sMax = reinterpret_cast<float*>(smem);                 // [kWarpsN][kBlockM]
  float* const sSum = sMax + Traits::kWarpsN * Shape::kBlockM;        // [kWarpsN][kBlockM]
  float* const sO = sSum + Traits::kWarpsN * Shape::kBlockM;          // [kWarpsN][kBlockM][kColumns]
#pragma unroll
  for (int r = 0; r < Softmax::kRows; ++r) {
    int const row = here.warp_row0 + 16 * (r / 2) + 8 * (r % 2) + g;
    if (t == 0) {
      sMax[here.warp_n * Shape::kBlockM + row] = softmax.row_max[r];
      sSum[here.warp_n * Shape::kBlockM + row] = softmax.row_sum[r];
    }
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < Softmax::kRows; ++r) {
    int const row = here.warp_row0 + 16 * (r / 2) + 8 * (r % 2) + g;
    float row_max = -infinity();
#pragma unroll
    for (int w = 0; w < Traits::kWarpsN; ++w) row_max = fmaxf(row_max, sMax[w * Shape::kBlockM + row]);
    float const finite_max = Softmax::finite(row_max);
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < Traits::kWarpsN; ++w) {
      sum += sSum[w * Shape::kBlockM + row] * map.ratio(sMax[w * Shape::kBlockM + row], finite_max);
    }
    if (t == 0 && here.warp_n == 0 && m0 + row < rows.len_q) rows.write_lse(m0 + row, row_max, sum, map);
    float const factor = sum == 0.0f ? 0.0f : multiplier / sum * map.ratio(softmax.row_max[r], finite_max);
#pragma unroll
    for (int d = 0; d < Shape::kTilesD; ++d) {
      *reinterpret_cast<float2*>(sO + (here.warp_n * Shape::kBlockM + row) * kColumns + 8 * d + 2 * t) =
          make_float2(o[r / 2][d][2 * (r % 2)] * factor, o[r / 2][d][2 * (r % 2) + 1] * factor);
    }
  }
  __syncthreads();
  for (int n = here.tid; n < Shape::kBlockM * kColumns / 4; n += Shape::kThreads) {
    int const row = n / (kColumns / 4);
    int const col = n % (kColumns / 4) * 4;
    if (m0 + row >= rows.len_q) break;  // rows only grow
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < Traits::kWarpsN; ++w) {
      float4 const v = *reinterpret_cast<float4 const*>(sO + (w * Shape::kBlockM + row) * kColumns + col);
      x[0] += v.x, x[1] += v.y, x[2] += v.z, x[3] += v.w;
    }
    if constexpr (Traits::kSplit) {
      *reinterpret_cast<float4*>(rows.partial(m0 + row) + col) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      Element* const to = rows.out(m0 + row) + index_t(col) * rows.params.out_stride_d;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (col + c < rows.params.head_dim_v) to[index_t(c) * rows.params.out_stride_d] = from_float<Element>(x[c]);
      }
    }
  }
}

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

  extern __shared__ __align__(128) unsigned char smem[];
  Element* const sQ = reinterpret_cast<Element*>(smem);
  Element* const sK = sQ + Shape::TileQ::kSize;
  Element* const sV = sK + kStages * Shape::TileK::kSize;

  Position<Traits> const here(params);
  int const tid = here.tid;
  int const lane = here.lane;
  int const b = here.b;
  int const h = here.h;
  int const m0 = here.m_block * kBlockM;
  if constexpr (Traits::kVarlen) {
    if (b == params.batch) {  // the virtual sequence of all tokens outside the others; combine does it with split keys
      if constexpr (!Traits::kSplit) {
        zero_rows_of_no_sequence<Element, kThreads>(params, h, here.m_block, params.num_m_blocks, tid);
      }
      return;
    }
  }
  SeqlenInfo<Traits::kVarlen, Traits::kSequsedK> const seqlen(params, b);
  int const len_q = seqlen.len_q;
  int const len_k = seqlen.len_k;
  if constexpr (!Traits::kSplit) {
    pad_lse<kThreads>(params, b, h, len_q, m0, kBlockM, here.m_block == params.num_m_blocks - 1, tid);
  }
  if (m0 >= len_q) return;

  // This warp's part of the tile.
  int const warp_row0 = here.warp_row0;
  int const warp_col0 = here.warp_n * Shape::kWarpCols;

  PositionMask<Traits::kBand> const mask(params, len_q, len_k);
  int first, last;
  mask.template key_tiles<kBlockN>(m0, kBlockM, first, last);
  if constexpr (Traits::kSplit) {
    int const share = ceil_div(max(last - first, 0), params.num_splits);
    first += here.split * share;
    last = min(last, first + share);
  }

  int const h_kv = h / (params.num_heads / params.num_heads_kv);
  Element const* const gQ = reinterpret_cast<Element const*>(params.q) + index_t(seqlen.batch_index) * params.q_stride_b +
                            (index_t(seqlen.q_row0) + m0) * params.q_stride_m + index_t(h) * params.q_stride_h;
  Element const* const gK = reinterpret_cast<Element const*>(params.k) + index_t(seqlen.batch_index) * params.k_stride_b +
                            index_t(seqlen.k_row0) * params.k_stride_n + index_t(h_kv) * params.k_stride_h;
  Element const* const gV = reinterpret_cast<Element const*>(params.v) + index_t(seqlen.batch_index) * params.v_stride_b +
                            index_t(seqlen.k_row0) * params.v_stride_n + index_t(h_kv) * params.v_stride_h;
  auto load_q = [&]() {
    load_tile<typename Shape::TileQ, kThreads, Traits::kAligned, kLegacy>(sQ, gQ, params.q_stride_m, params.q_stride_d,
                                                                          len_q - m0, params.head_dim, tid);
  };
  // Key tiles are loaded strictly from the last to the first.
  using LoadK = DescendingTileLoader<typename Shape::TileK, kThreads, Traits::kAligned, kLegacy, Element>;
  using LoadV = DescendingTileLoader<typename Shape::TileV, kThreads, Traits::kAligned, kLegacy, Element>;
  LoadK loader_k(sK, gK + index_t(last - 1) * kBlockN * params.k_stride_n, params.k_stride_n, params.k_stride_d, tid);
  LoadV loader_v(sV, gV + index_t(last - 1) * kBlockN * params.v_stride_n, params.v_stride_n, params.v_stride_d, tid);
  auto load_k = [&](int tile, int stage) {
    loader_k.load(sK, stage * Shape::TileK::kBytes, params.k_stride_n, params.k_stride_d, len_k - tile * kBlockN,
                  params.head_dim, tid);
  };
  auto load_v = [&](int tile, int stage) {
    loader_v.load(sV, stage * Shape::TileV::kBytes, params.v_stride_n, params.v_stride_d, len_k - tile * kBlockN,
                  params.head_dim_v, tid);
  };

  ScoreMap<Traits> const map(params);
  OnlineSoftmax<Traits, Shape::kTilesM> softmax;
  AccTile o[Shape::kTilesM][Shape::kTilesD];
#pragma unroll
  for (int m = 0; m < Shape::kTilesM; ++m) {
#pragma unroll
    for (int d = 0; d < Shape::kTilesD; ++d) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[m][d][e] = 0.0f;
    }
  }
  // This thread's first row and column of a tile of scores.
  int const i0 = m0 + warp_row0 + (lane >> 2);
  int const j0 = warp_col0 + 2 * (lane & 3);
  Dropout const dropout = Traits::kDropout ? Dropout(params, b, h) : Dropout();
  ScoreTensor<Bias const> const bias(reinterpret_cast<Bias const*>(params.bias), b, h, params.bias_stride_b,
                                     params.bias_stride_h, params.bias_stride_m, params.bias_stride_n);
  ScoreTensor<unsigned char const> const byte_mask(params.mask, b, h, params.mask_stride_b, params.mask_stride_h,
                                                   params.mask_stride_m, params.mask_stride_n);

  if (first < last) {
    load_q();
    QueryOperand<Shape, Traits::kPreloadQ> query;
    query.address = lane_address_a<typename Shape::TileQ>(sQ, warp_row0, lane);
    KeyOperand<Shape> const key(sK, warp_col0, lane);
    ValueOperand<Shape> const value(sV, warp_col0, here.warp_d, lane);
    if constexpr (kStages == 1) {
      load_k(last - 1, 0);
      cp_async_commit<kLegacy>();
    } else {
#pragma unroll
      for (int stage = 0; stage < kStages - 1; ++stage) {
        if (last - 1 - stage >= first) {
          load_k(last - 1 - stage, stage);
          load_v(last - 1 - stage, stage);
        }
        cp_async_commit<kLegacy>();
      }
    }
    if constexpr (Traits::kPreloadQ) {
      cp_async_wait<kLegacy, kStages == 1 ? 0 : kStages - 2>();
      __syncthreads();
      query.preload();
    }

    int stage = 0;  // the one that holds the current tile
    for (int tile = last - 1; tile >= first; --tile) {
      int const n0 = tile * kBlockN;
      // Tiles that this warp's rows see nothing of (above the diagonal of a causal block) need no work, only barriers.
      bool visible = true;
      if constexpr (Traits::kBand) {
        int const row = m0 + warp_row0;
        visible = n0 + warp_col0 <= row + Shape::kWarpRows - 1 + mask.high && n0 + warp_col0 + Shape::kWarpCols > row + mask.low;
      }

      cp_async_wait<kLegacy, kStages == 1 ? 0 : kStages - 2>();
      __syncthreads();
      if constexpr (kStages == 1) {
        load_v(tile, 0);
      } else {
        int const next = tile - (kStages - 1);
        if (next >= first) {
          int const next_stage = stage == 0 ? kStages - 1 : stage - 1;
          load_k(next, next_stage);
          load_v(next, next_stage);
        }
      }
      cp_async_commit<kLegacy>();

      AccTile s[Shape::kTilesM][Shape::kTilesN];
      if (visible) {
        ScoreOperand<Bias, Traits::kHasBias, Shape::kTilesM, Shape::kTilesN> bias_tile;
        ScoreOperand<unsigned char, Traits::kMask, Shape::kTilesM, Shape::kTilesN> mask_tile;
        if constexpr (Traits::kHasBias) bias_tile.load(bias, i0, n0 + j0, len_q, len_k);
        if constexpr (Traits::kMask) mask_tile.load(byte_mask, i0, n0 + j0, len_q, len_k);
        multiply_qk<Shape>(s, query, key, stage * Shape::TileK::kBytes);
#pragma unroll
        for (int m = 0; m < Shape::kTilesM; ++m) {
#pragma unroll
          for (int n = 0; n < Shape::kTilesN; ++n) {
            map_scores<Traits>(s[m][n], map);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              if constexpr (Traits::kHasBias) {
                s[m][n][e] += to_float(e & 1 ? bias_tile.value[m][n][e >> 1].y : bias_tile.value[m][n][e >> 1].x);
              }
              if constexpr (Traits::kMask) {
                if (!(e & 1 ? mask_tile.value[m][n][e >> 1].y : mask_tile.value[m][n][e >> 1].x)) s[m][n][e] = -infinity();
              }
            }
          }
        }
        if (!mask.keeps_tile(m0 + warp_row0, Shape::kWarpRows, n0 + warp_col0, Shape::kWarpCols)) {
          apply_position_mask<Shape>(s, mask, i0, n0 + j0);
        }
      }

      if constexpr (kStages == 1) {
        cp_async_wait<kLegacy, 0>();
        __syncthreads();
        if (tile > first) load_k(tile - 1, 0);
        cp_async_commit<kLegacy>();
      }
      if (visible) {
        softmax.update(s, o, map);
        multiply_pv<Traits, Shape>(o, s, softmax, map, dropout, i0, n0 + warp_col0, value, stage * Shape::TileV::kBytes,
                                   lane);
      }
      if constexpr (kStages > 1) stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    cp_async_wait<kLegacy, 0>();
    __syncthreads();  // the epilogue overwrites the tiles
  }

  softmax.finish();
  Position<Traits> const there(params);
  SeqlenInfo<Traits::kVarlen, false> const rows_of(params, there.b);
  OutputRows<Traits> const rows{params,         there.split,    there.b, there.h, rows_of.batch_index,
                                rows_of.q_row0, rows_of.len_q, out_is_vectorizable<Element>(params)};
  if constexpr (Traits::kWarpsN > 1) {
    merge_and_write_output<Traits, Shape>(o, softmax, map, rows, smem, there);
  } else {
    write_output<Traits, Shape>(o, softmax, map, rows, smem, there);
  }
}

}  // namespace nvrtc_attn
