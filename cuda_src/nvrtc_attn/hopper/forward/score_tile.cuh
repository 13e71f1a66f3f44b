// Bias and mask as tiles in shared memory, brought by the copy engine in step with the keys.
//
// A slot holds kBlockM rows of the bias as slabs of 128 bytes a row (64 columns of a 16-bit type, 32 of float32) and
// then of the mask as slabs of 64 bytes a row (64 columns), in the copy engine's swizzle of that width: chunk c of row
// r at chunk c ^ (r % 8), and c ^ (r / 2 % 4). A bias or mask of one row for all queries is one row in each slab.
#pragma once
#include "../../collective/scores.cuh"
#include "../../common/fragment_load.cuh"
#include "../common/unpack.cuh"

namespace nvrtc_attn {

template <class Traits>
struct ScoreTileShape {
  using Bias = typename Traits::Bias;
  static constexpr int kColumnsBias = 128 / int(sizeof(Bias));  // of a slab
  static constexpr int kColumnsMask = 64;
  static constexpr int kSlabsBias = Traits::kScoreTiles && Traits::kHasBias ? Traits::kBlockN / kColumnsBias : 0;
  static constexpr int kSlabsMask = Traits::kScoreTiles && Traits::kMask ? Traits::kBlockN / kColumnsMask : 0;
  static constexpr int kSlabBias = Traits::kBlockM * 128;
  static constexpr int kSlabMask = Traits::kBlockM * 64;
  static constexpr int kOffsetMask = kSlabsBias * kSlabBias;
  static constexpr int kBytes = kOffsetMask + kSlabsMask * kSlabMask;
  static constexpr int kStages = kBytes > 0 ? Traits::kNumStagesScores : 0;
  static_assert(kBytes == 0 || Traits::kBlockN % 64 == 0, "whole slabs");
  // As with K: who waits for the V of a tile before releasing this tile's slot (groups that see nothing of it, all
  // where V's tail is zeroed) waits for a copy that comes after the one of the next tile's scores.
  static_assert(kBytes == 0 || kStages >= 2, "the next tile's copy must not wait for this one's release");
};

NVRTC_ATTN_DEVICE unsigned load_shared_u16(unsigned address) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}

// Where this thread's values lie in a slot: its first row, chunk 0 of the first slab.
template <class Traits>
struct ScoreTileAccess {
  using Shape = ScoreTileShape<Traits>;
  using Bias = typename Traits::Bias;
  unsigned bias;
  unsigned bias_next;  // from row i to row i + 8
  unsigned byte_mask;
  unsigned byte_mask_next;

  ScoreTileAccess() = default;
  NVRTC_ATTN_DEVICE ScoreTileAccess(ForwardParams const& params, int warp_row0, int lane) {
    int const t = lane & 3;
    if constexpr (Shape::kSlabsBias > 0) {
      bool const one_row = params.bias_stride_m == 0;
      bias_next = one_row ? 0 : 8 * 128;
      if constexpr (sizeof(Bias) == 2) {
        // ldmatrix: lane l addresses row l % 8 of the chunk that lanes of matrix l / 8 receive.
        unsigned const row = one_row ? 0 : warp_row0 + (lane & 7);
        bias = row * 128 + (((lane >> 3) ^ (row & 7)) << 4);
      } else {
        unsigned const row = one_row ? 0 : warp_row0 + (lane >> 2);
        bias = row * 128 + (((t >> 1) ^ (row & 7)) << 4) + (t & 1) * 8;
      }
    }
    if constexpr (Shape::kSlabsMask > 0) {
      bool const one_row = params.mask_stride_m == 0;
      byte_mask_next = one_row ? 0 : 8 * 64;
      unsigned const row = one_row ? 0 : warp_row0 + (lane >> 2);
      byte_mask = Shape::kOffsetMask + row * 64 + ((row >> 1 & 3) << 4) + 2 * t;
    }
  }

  // A modifier has made its scores already.
  static NVRTC_ATTN_DEVICE float score(ScoreMap<Traits> const& map, float s, float bias) {
    if constexpr (ModifierOf<Traits>::kScores) {
      return s + bias;
    } else {
      return map.score(s, bias);
    }
  }

  // Raw products -> scores with bias, -inf where the mask drops. `slot` is the slot's address, a multiple of 1024.
  template <bool kReadsMask = true, int kTilesN>
  NVRTC_ATTN_DEVICE void apply(AccTile (&s)[1][kTilesN], ScoreMap<Traits> const& map, unsigned slot) const {
#pragma unroll
    for (int n = 0; n < kTilesN; n += 4) {
      if constexpr (Shape::kSlabsBias == 0) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[0][n + k][e] = score(map, s[0][n + k][e], 0.0f);
        }
      } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if constexpr (sizeof(Bias) == 2) {
            unsigned v[4];
            ldmatrix_x4((slot + n / 8 * Shape::kSlabBias + bias + r * bias_next) ^ (n % 8 << 4), v[0], v[1], v[2],
                        v[3]);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              float2 const b = unpack_pair<Bias>(v[k]);
              s[0][n + k][2 * r] = score(map, s[0][n + k][2 * r], b.x);
              s[0][n + k][2 * r + 1] = score(map, s[0][n + k][2 * r + 1], b.y);
            }
          } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              float2 const b =
                  load_shared_float2((slot + n / 4 * Shape::kSlabBias + bias + r * bias_next) ^ (2 * k << 4));
              s[0][n + k][2 * r] = score(map, s[0][n + k][2 * r], b.x);
              s[0][n + k][2 * r + 1] = score(map, s[0][n + k][2 * r + 1], b.y);
            }
          }
        }
      }
      if constexpr (kReadsMask && Shape::kSlabsMask > 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            unsigned const chunk = (n + k) % 8 / 2;
            unsigned const keep = load_shared_u16(
                ((slot + n / 8 * Shape::kSlabMask + byte_mask + r * byte_mask_next) ^ (chunk << 4)) + k % 2 * 8);
            s[0][n + k][2 * r] = masked_score(s[0][n + k][2 * r], keep & 0xff);
            s[0][n + k][2 * r + 1] = masked_score(s[0][n + k][2 * r + 1], keep & 0xff00);
          }
        }
      }
    }
  }
};

}  // namespace nvrtc_attn
