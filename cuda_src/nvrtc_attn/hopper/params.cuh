// The bytes that the Hopper forward kernel receives; mirrored by nvrtc_attn/params.py.
#pragma once
#include "../params.cuh"
#include "tma.cuh"

namespace nvrtc_attn {

struct HopperForwardParams : ForwardParams {
  int num_tiles;      // query tiles of all heads and batch entries (varlen: and of the virtual last sequence)
  int section_heads;  // heads whose K and V fit L2 together
  TensorMap tensor_map_q;  // [batch][head][row][head dim], boxes of 64 columns and one tile of rows
  TensorMap tensor_map_k;
  TensorMap tensor_map_v;
};

}  // namespace nvrtc_attn
