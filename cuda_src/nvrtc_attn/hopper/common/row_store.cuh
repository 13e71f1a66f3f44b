// Accumulators of a warp-group to global memory, whole sectors: four threads of a row write 64 bytes, 32 of float32.
#pragma once
#include "../../common/mma.cuh"
#include "../../common/quad_transpose.cuh"

namespace nvrtc_attn {

// Row r (0: lane / 4, 1: eight further) times `factor` to `line`, which is this thread's first chunk of 8 columns; t = lane % 4.
// Rows that are not `valid` and columns at or beyond `cols` are left out. Called by whole quads.
template <class Element, int kTiles>
NVRTC_ATTN_DEVICE void store_row(Element* line, AccTile const (&c)[1][kTiles], int r, float factor, bool valid,
                                 int cols, int t) {
  if constexpr (sizeof(Element) == 4) {
    Element* const pair = line - 8 * t + 2 * t;
#pragma unroll
    for (int d = 0; d < kTiles; ++d) {
      if (valid && 8 * d < cols) {
        *reinterpret_cast<float2*>(pair + 8 * d) = make_float2(c[0][d][2 * r] * factor, c[0][d][2 * r + 1] * factor);
      }
    }
  } else {
#pragma unroll
    for (int d = 0; d < kTiles; d += 4) {
      uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (d + k < kTiles) w[k] = pack2<Element>(c[0][d + k][2 * r] * factor, c[0][d + k][2 * r + 1] * factor);
      }
      uint4 const words = transpose_quad(w[0], w[1], w[2], w[3], t);
      if (valid && 8 * (d + t) < cols) *reinterpret_cast<uint4*>(line + 8 * d) = words;
    }
  }
}

}  // namespace nvrtc_attn
