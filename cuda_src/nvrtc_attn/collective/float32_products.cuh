// float32 products of the backward kernels on tensor cores (3xTF32), in chains.
//
// The tensor core truncates when it adds to an accumulator: each of the three instructions of a k-step moves it about
// half a unit in the last place towards zero. So only short chains of steps are summed inside it, from zero, and chains
// are added with rounded float32 additions. docs/experiments.md, "float32 products", has the errors of all alternatives.
// * S: kChainSteps, terms in the forward kernel's order, so that S is the forward's to the bit. Truncation makes scores 2^-22
//   too small; P = exp(S - LSE) hardly feels it as long as both sides have it.
// * dP: kChainSteps. It all but cancels against delta, which is not too small. For dk and dv the small terms have an
//   accumulator of their own, so that the tensor core truncates them at their own size: with one key dS is nothing but
//   that error, and dk its sum over all queries.
// * dV, dK, and dQ of the deterministic pass: at most kChainSteps, the small terms of a chain before its large ones.
// * Other dQ: the keys of a tile, up to twice that.
#pragma once
#include "../common/fragment_load.cuh"

namespace nvrtc_attn {

// One term of c += a * b over one k-step (mma_term), of all tiles.
template <int kTerm, int kM, int kN>
NVRTC_ATTN_DEVICE void multiply_term(WarpTile<kM, kN>& c, FragmentA<float> const (&a)[kM],
                                     FragmentB<float> const (&b)[kN]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int m = 0; m < kM; ++m) mma_term<float, false, kTerm>(c[m][n], a[m], b[n]);
}

// c += a * b over one k-step, one term of all tiles after the other: an instruction waits for the one before it on the
// same tile. kTransposed: the small terms in the order of b * a. They are added to `small`, which may be c itself.
template <bool kTransposed, int kM, int kN>
NVRTC_ATTN_DEVICE void multiply_tiles(WarpTile<kM, kN>& c, WarpTile<kM, kN>& small, FragmentA<float> const (&a)[kM],
                                      FragmentB<float> const (&b)[kN]) {
  multiply_term<kTransposed ? 1 : 0>(small, a, b);
  multiply_term<kTransposed ? 0 : 1>(small, a, b);
  multiply_term<2>(c, a, b);
}

template <int kM, int kN>
NVRTC_ATTN_DEVICE void add(WarpTile<kM, kN>& acc, WarpTile<kM, kN> const& chain) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] += chain[m][n][e];
}

// The left operand of multiply_nt in shared memory, by the address of this lane's part of it.
template <class Tile>
struct LaneRows {
  LaneAddress<Tile> address;
  NVRTC_ATTN_DEVICE FragmentA<float> step(int m, int k, int) const {
    FragmentA<float> a;
    ldmatrix_x4(address.at(16 * m, 2 * k), a.x[0], a.x[1], a.x[2], a.x[3]);
    prepare(a);
    return a;
  }
};

// chain += A B^T over the k-steps [first, last), in the tensor core; small terms to `small`. Operands as in multiply_nt.
template <class Tile, int kUnroll, bool kTransposed, int kM, int kN, class Rows>
NVRTC_ATTN_DEVICE void multiply_nt_steps(WarpTile<kM, kN>& chain, WarpTile<kM, kN>& small, Rows const& a,
                                         LaneAddress<Tile> b, int first, int last, int lane) {
#pragma unroll(kUnroll)
  for (int k = first; k < last; ++k) {
    FragmentA<float> left[kM];
    FragmentB<float> right[kN];
#pragma unroll
    for (int m = 0; m < kM; ++m) left[m] = a.step(m, k, lane);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      ldmatrix_x4(b.at(8 * n, 2 * k), right[n].x[0], right[n].x[1], right[n + 1].x[0], right[n + 1].x[1]);
      prepare(right[n]);
      prepare(right[n + 1]);
    }
    multiply_tiles<kTransposed>(chain, small, left, right);
  }
}

// acc += A B^T over the tile width, in chains. kFromZero: acc is zero, so the first chain goes there. kApart: the small
// terms are summed apart from the large ones.
template <class Tile, int kUnroll, bool kTransposed, bool kFromZero, bool kApart, int kM, int kN, class Rows>
NVRTC_ATTN_DEVICE void multiply_nt_chains(WarpTile<kM, kN>& acc, Rows const& a, float const* b, int col0, int lane) {
  constexpr int kSteps = Tile::kCols / kStepK<float>;
  auto const& left = a.of_lane(lane);
  LaneAddress<Tile> const right = lane_address_b<Tile>(b, col0, lane);
  constexpr int kFirst = !kFromZero ? 0 : kChainSteps < kSteps ? kChainSteps : kSteps;
  WarpTile<kM, kN> apart;
  if constexpr (kApart) clear(apart);
  if constexpr (kFromZero) {
    auto& small = kApart ? apart : acc;
    multiply_nt_steps<Tile, kUnroll, kTransposed>(acc, small, left, right, 0, kFirst, lane);
  }
  if constexpr (kFirst < kSteps) {
#pragma unroll 1
    for (int k = kFirst; k < kSteps; k += kChainSteps) {
      WarpTile<kM, kN> chain;
      clear(chain);
      int const count = kSteps % kChainSteps == 0 || kSteps - k >= kChainSteps ? kChainSteps : kSteps % kChainSteps;
      auto& small = kApart ? apart : chain;
      multiply_nt_steps<Tile, kUnroll, kTransposed>(chain, small, left, right, k, k + count, lane);
      add(acc, chain);
    }
  }
  if constexpr (kApart) add(acc, apart);
}

// acc += A B^T over the slice whose first step is `step` of the contraction: chains of kChainSteps go on from slice to
// slice in `chain`, which is added where the next begins. The caller adds the last.
template <class Tile, bool kTransposed, int kM, int kN, class Rows>
NVRTC_ATTN_DEVICE void multiply_nt_carried(WarpTile<kM, kN>& acc, WarpTile<kM, kN>& chain, Rows const& a,
                                           float const* b, int col0, int step, int lane) {
  auto const& left = a.of_lane(lane);
  LaneAddress<Tile> const right = lane_address_b<Tile>(b, col0, lane);
#pragma unroll 1
  for (int k = 0; k < Tile::kCols / kStepK<float>; ++k) {
    if ((step + k) % kChainSteps == 0) {
      add(acc, chain);
      clear(chain);
    }
    multiply_nt_steps<Tile, 1, kTransposed>(chain, chain, left, right, k, k + 1, lane);
  }
}

// acc += sum over steps of a[step] * B, one chain for each output tile. B's rows are k0.., its columns 8 * (tile0 + d)
// for the accumulator tiles d that lie inside the tile. kPermuted: contraction order of accumulator_as_a.
template <class Tile, bool kPermuted, int kSteps, int kM, int kD>
NVRTC_ATTN_DEVICE void multiply_chains(WarpTile<kM, kD>& acc, FragmentA<float> const (&a)[kSteps][kM], float const* b,
                                       int k0, int tile0, int lane) {
  static_assert(kSteps <= kChainSteps);
  constexpr int kTiles = Tile::kCols / 8;
  constexpr int kGroup = 2;  // output tiles whose chains are under way; 4 is no faster and spills at head dim 128
  TransposedColumns<Tile, kPermuted, kD> const columns(b, k0, tile0, lane);
#pragma unroll
  for (int d0 = 0; d0 < kD; d0 += kGroup) {
    constexpr bool kPartial = kTiles % kD != 0;
    if (kPartial && tile0 + d0 >= kTiles) break;
    WarpTile<kM, kGroup> chain;
    clear(chain);
    // The small terms of all steps before the large ones: the tensor core then truncates them at their own size.
#pragma unroll
    for (int large = 0; large < 2; ++large) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        FragmentB<float> right[kGroup];
#pragma unroll
        for (int x = 0; x < kGroup; ++x) {
          right[x] = FragmentB<float>{};
          if (d0 + x < kD && !(kPartial && tile0 + d0 + x >= kTiles)) columns.load(right[x], step, d0 + x);
        }
        if (large) {
          multiply_term<2>(chain, a[step], right);
        } else {
          multiply_term<0>(chain, a[step], right);
          multiply_term<1>(chain, a[step], right);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int x = 0; x < kGroup; ++x)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (d0 + x < kD) acc[m][d0 + x][e] += chain[m][x][e];
  }
}

}  // namespace nvrtc_attn
