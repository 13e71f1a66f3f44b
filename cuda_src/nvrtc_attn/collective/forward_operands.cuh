// How the portable forward kernel divides a tile among warps, and the operands of its two products as they are read from
// shared memory (Q, K, V) and from global memory (bias, mask).
#pragma once
#include "../common/fragment_load.cuh"
#include "bias.cuh"

namespace nvrtc_attn {

template <class Traits>
struct ForwardShape {
  using Element = typename Traits::Element;
  static constexpr bool kLegacy = Traits::kLegacyMma;
  static constexpr int kThreads = Traits::kNumThreads;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kStages = Traits::kNumStages;
  // Splits of the keys leave partial results for `combine`, unless their blocks are a cluster and add them up themselves.
  static constexpr bool kPartials = Traits::kSplit && Traits::kCluster == 1;
  // Few rows wait for K and V: their first tiles are asked for before all that their addresses do not take.
  static constexpr bool kKeysFirst = kStages > 1 && Traits::kAligned && !kLegacy;
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
  static_assert(Traits::kCluster == 1 || (Traits::kSplit && !Traits::kVarlen && kWarpsD == 1),
                "blocks of one query tile");
  static_assert(kWarpsD == 1 || kWarpDims % 16 == 0, "warps take 16 value columns in turn");

  // First of the 8 value columns of this warp's output tile d.
  static NVRTC_ATTN_DEVICE int column(int d, int warp_d) {
    if constexpr (sizeof(Element) == 4) return 8 * (d * kWarpsD + warp_d);
    return 16 * ((d / 2) * kWarpsD + warp_d) + 8 * (d % 2);
  }
  static_assert(Traits::kWarpsN == 1 || Traits::kWarpsD == 1, "merging warps own all value columns");
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

// Raw bias or mask values of this thread's scores, read ahead of Q K^T so that the matrix product hides their latency.
template <class Element, bool kEnabled, int kTilesM, int kTilesN>
struct ScoreOperand {
  static constexpr int kM = kEnabled ? kTilesM : 1;
  static constexpr int kN = kEnabled ? kTilesN : 1;
  ElementPair<Element> value[kM][kN][2];

  template <class Tensor>
  NVRTC_ATTN_DEVICE void load(Tensor const& t, int i, int j, int len_q, int len_k) {
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
  NVRTC_ATTN_DEVICE void fill(Element x) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) value[m][n][0] = value[m][n][1] = ElementPair<Element>{x, x};
    }
  }
  // Of value e of accumulator tile (m, n); anything where it is not enabled.
  NVRTC_ATTN_DEVICE Element at(int m, int n, int e) const {
    ElementPair<Element> const& pair = value[kEnabled ? m : 0][kEnabled ? n : 0][e >> 1];
    return e & 1 ? pair.y : pair.x;
  }
};

}  // namespace nvrtc_attn
