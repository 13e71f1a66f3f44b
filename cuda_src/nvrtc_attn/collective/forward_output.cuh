// Where a thread block of the portable forward kernel stands in the problem, and how it writes out and lse.
#pragma once
#include "epilogue.cuh"
#include "forward_operands.cuh"
#include "packed_heads.cuh"
#include "packed_slots.cuh"
#include "sink.cuh"
#include "softmax.cuh"
#include "split_cluster.cuh"

namespace nvrtc_attn {

// Which piece of the work this thread has. Units (sequence, head, split) come in groups of `head_group`; within a group the
// query tiles run from the last, which sees the most keys under a causal mask, to the first, each for all units of the
// group. The host makes groups as large as their K and V fit in L2 when tiles differ in length, and 1 otherwise.
// Packed sequences with kSlots: a unit is a head, and its tiles are those of all sequences, by slot (packed_slots.cuh).
template <class Traits>
struct Position {
  using Shape = ForwardShape<Traits>;
  // With splits or few queries the tiles of the longest sequence are few.
  static constexpr bool kSlots = Traits::kVarlen && !Traits::kSplit && !Traits::kPackedHeads;
  using Slots = PackedSlots<Traits::kBlockM>;
  int tid, lane, warp_row0, warp_n, warp_d;
  int m_block, split, h, b;  // packed heads: h is the first of the tile's
  int h_kv = 0;              // kKeysFirst with packed heads

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
    if constexpr (kSlots) {
      find_slot(params, block);
    } else if constexpr (Shape::kKeysFirst) {
      find_unit_soon(params, block);
    } else {
      find_unit(params, block);
    }
  }

 private:
  NVRTC_ATTN_DEVICE void find_slot(ForwardParams const& params, int block) {
    Slots const slots{params.cu_seqlens_q, params.batch, params.total_q};
    int const per_group = params.head_group * slots.count();
    int const group = block / per_group;
    int const in_group = block - group * per_group;
    int const units = min(params.head_group, params.num_heads - group * params.head_group);
    PackedSlot const found = slots.find_together(slots.count() - 1 - in_group / units, lane);
    m_block = found.tile;
    b = found.b;
    h = h_kv = group * params.head_group + in_group % units;
    split = 0;
  }

  // The group of units whose query tiles a block is one of, how many units it has, and the block's place.
  struct Group {
    int number, place, units;
    NVRTC_ATTN_DEVICE Group(ForwardParams const& params, int block, int num_units) {
      number = block / (params.head_group * params.num_m_blocks);
      place = block - number * params.head_group * params.num_m_blocks;
      units = min(params.head_group, num_units - number * params.head_group);
    }
  };

  NVRTC_ATTN_DEVICE void find_unit(ForwardParams const& params, int block) {
    int const num_splits = Traits::kSplit ? params.num_splits : 1;
    int const heads = Traits::kPackedHeads ? params.num_heads_kv : params.num_heads;
    int const num_units = (params.batch + (Traits::kVarlen && !Traits::kSplit)) * heads * num_splits;
    Group const group(params, block, num_units);
    m_block = params.num_m_blocks - 1 - group.place / group.units;
    block = group.number * params.head_group + group.place % group.units;
    split = block % num_splits;
    block /= num_splits;
    h = block % heads;
    b = block / heads;
    if constexpr (Traits::kPackedHeads) h *= params.num_heads / heads;
  }

  // The same with as few divisions in a row as there can be, 60 ns each, which the first tile of K waits for: one query tile
  // needs none, a cluster is a group, and a remainder is what is left, which ptxas would divide for again.
  NVRTC_ATTN_DEVICE void find_unit_soon(ForwardParams const& params, int block) {
    int const heads = Traits::kPackedHeads ? params.num_heads_kv : params.num_heads;
    m_block = split = 0;
    if constexpr (Traits::kCluster > 1) {
      split = block % Traits::kCluster;
      block /= Traits::kCluster;
      if (params.num_m_blocks > 1) {
        int const unit = block / params.num_m_blocks;
        m_block = params.num_m_blocks - 1 - (block - unit * params.num_m_blocks);
        block = unit;
      }
    } else {
      int const num_splits = Traits::kSplit ? params.num_splits : 1;
      if (params.num_m_blocks > 1) {
        int const num_units = (params.batch + (Traits::kVarlen && !Traits::kSplit)) * heads * num_splits;
        Group const group(params, block, num_units);
        int const tile = group.place / group.units;
        m_block = params.num_m_blocks - 1 - tile;
        block = group.number * params.head_group + group.place - tile * group.units;
      }
      if constexpr (Traits::kSplit) {
        int const unit = block / num_splits;
        split = block - unit * num_splits;
        block = unit;
      }
    }
    b = block / heads;
    h_kv = block - b * heads;
    h = Traits::kPackedHeads ? h_kv * (params.num_heads / heads) : h_kv;
  }
};

// Where one output row goes: out and lse, or one split's partial results.
template <class Traits>
struct OutputRows {
  using Element = typename Traits::Element;
  ForwardParams const& params;
  RowMap<Traits::kPackedHeads> row_map;
  int split, b, h, batch_index, q_row0;
  int count;  // rows of the sequence
  bool vectors;

  NVRTC_ATTN_DEVICE Element* out(int i) const {
    return reinterpret_cast<Element*>(params.out) + index_t(batch_index) * params.out_stride_b +
           index_t(h + row_map.head(i)) * params.out_stride_h +
           (index_t(q_row0) + row_map.query(i)) * params.out_stride_m;
  }
  NVRTC_ATTN_DEVICE float* partial(int i) const {
    return params.out_partial +
           partial_row(params, split, b, h + row_map.head(i), row_map.query(i)) * Traits::kHeadDimV;
  }
  // What output row i is multiplied by, but for dropout's multiplier; writes its lse where `writes`.
  // `sink`: of the tile's first head, which is the only one without packed heads.
  NVRTC_ATTN_DEVICE float finish_with_sink(int i, float row_max, float row_sum, float sink, ScoreMap<Traits> const& map,
                                           bool writes) const {
    static_assert(!ForwardShape<Traits>::kPartials, "a sink counts once, in combine");
    int const head = h + row_map.head(i);
    if constexpr (Traits::kPackedHeads) sink = load_sink<Traits>(params, head);
    RowEnd const end = take_sink<Traits>(row_max, row_sum, sink, map);
    bool const empty = end.sum == 0.0f;
    if (writes && params.lse != nullptr) {
      *lse_row(params, b, head, q_row0, row_map.query(i)) = empty ? params.lse_empty : end.top + logf(end.sum);
    }
    return empty ? 0.0f : end.weight / end.sum;
  }
  NVRTC_ATTN_DEVICE void write_lse(int i, float row_max, float row_sum, ScoreMap<Traits> const& map) const {
    if constexpr (ForwardShape<Traits>::kPartials) {
      params.softmax_partial[partial_row(params, split, b, h + row_map.head(i), row_map.query(i))] =
          make_float2(row_max, row_sum);
    } else if (params.lse != nullptr) {
      bool const empty = row_sum == 0.0f;  // and not its maximum: of NaN alone that is -inf too
      *lse_row(params, b, h + row_map.head(i), q_row0, row_map.query(i)) =
          empty ? params.lse_empty : map.lse(row_max, row_sum);
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
  float const sink = load_sink<Traits>(rows.params, here.h);
#pragma unroll
  for (int r = 0; r < Softmax::kRows; ++r) {
    int const row = here.warp_row0 + 16 * (r / 2) + 8 * (r % 2) + g;
    bool const valid = m0 + row < rows.count;
    float const sum = softmax.row_sum[r];
    float factor = sum == 0.0f ? 0.0f : multiplier / sum;
    if constexpr (Traits::kHasSink) {
      bool const writes = t == 0 && here.warp_d == 0 && valid;
      factor = multiplier * rows.finish_with_sink(m0 + row, softmax.row_max[r], sum, sink, map, writes);
    } else {
      if (t == 0 && here.warp_d == 0 && valid) rows.write_lse(m0 + row, softmax.row_max[r], sum, map);
    }
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
      if (m0 + row >= rows.count) break;  // rows only grow
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
  float* const sMax = reinterpret_cast<float*>(smem);           // [kWarpsN][kBlockM]
  float* const sSum = sMax + Traits::kWarpsN * Shape::kBlockM;  // [kWarpsN][kBlockM]
  float* const sO = sSum + Traits::kWarpsN * Shape::kBlockM;    // [kWarpsN][kBlockM][kColumns]
  float const sink = load_sink<Traits>(rows.params, here.h);
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
    float factor;
    if constexpr (Traits::kHasSink) {
      bool const writes = t == 0 && here.warp_n == 0 && m0 + row < rows.count;
      factor = multiplier * rows.finish_with_sink(m0 + row, row_max, sum, sink, map, writes);
      factor *= map.ratio(softmax.row_max[r], finite_max);
    } else {
      if (t == 0 && here.warp_n == 0 && m0 + row < rows.count) rows.write_lse(m0 + row, row_max, sum, map);
      factor = sum == 0.0f ? 0.0f : multiplier / sum * map.ratio(softmax.row_max[r], finite_max);
    }
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
    if (m0 + row >= rows.count) break;  // rows only grow
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

// Splits of the keys as the blocks of a cluster, one launch instead of two. Every block adds up what its warps have of the same
// rows, in the order of the warps. Behind a barrier of the cluster it writes its share of the tile, kThreads times four columns of
// a row in turn with the other blocks, as the sum of what all blocks have there, in the order of the splits.
//
// Shared memory, from the start: sMax, sSum[kWarpsN][kBlockM], sO[kWarpsN][kBlockM][kHeadDimV], of which the first warp's part
// becomes the block's sum, and sRow[kBlockM], the block's maximum and sum of every row. Rows beyond the last are not read or
// written, but for sMax and sSum: with few heads in a group they are most of the tile.
template <class Traits, class Shape, class Softmax>
NVRTC_ATTN_DEVICE void add_up_cluster(AccTile (&o)[Shape::kTilesM][Shape::kTilesD], Softmax const& softmax,
                                      ScoreMap<Traits> const& map, OutputRows<Traits> const& rows, unsigned char* smem,
                                      Position<Traits> const& here) {
  using Element = typename Shape::Element;
  constexpr int kColumns = Traits::kHeadDimV;
  constexpr int kWarps = Traits::kWarpsN;
  int const g = here.lane >> 2;
  int const t = here.lane & 3;
  int const m0 = here.m_block * Shape::kBlockM;
  int const valid = rows.count - m0;
  float* const sMax = reinterpret_cast<float*>(smem);
  float* const sSum = sMax + kWarps * Shape::kBlockM;
  float* const sO = sSum + kWarps * Shape::kBlockM;
  float2* const sRow = reinterpret_cast<float2*>(sO + kWarps * Shape::kBlockM * kColumns);
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
    if (row >= valid) continue;
    float row_max = -infinity();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) row_max = fmaxf(row_max, sMax[w * Shape::kBlockM + row]);
    float const finite_max = Softmax::finite(row_max);
    if (t == 0 && here.warp_n == 0) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        sum += sSum[w * Shape::kBlockM + row] * map.ratio(sMax[w * Shape::kBlockM + row], finite_max);
      }
      sRow[row] = make_float2(row_max, sum);
    }
    float const factor = map.ratio(softmax.row_max[r], finite_max);
#pragma unroll
    for (int d = 0; d < Shape::kTilesD; ++d) {
      *reinterpret_cast<float2*>(sO + (here.warp_n * Shape::kBlockM + row) * kColumns + 8 * d + 2 * t) =
          make_float2(o[r / 2][d][2 * (r % 2)] * factor, o[r / 2][d][2 * (r % 2) + 1] * factor);
    }
  }
  constexpr int kVectors = Shape::kBlockM * kColumns / 4;  // four columns each
  if constexpr (kWarps > 1) {
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < (kVectors + Shape::kThreads - 1) / Shape::kThreads; ++i) {
      int const n = i * Shape::kThreads + here.tid;
      if (n >= min(valid * (kColumns / 4), kVectors)) break;
      float4 x = reinterpret_cast<float4 const*>(sO)[n];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        float4 const v = reinterpret_cast<float4 const*>(sO)[w * kVectors + n];
        x.x += v.x, x.y += v.y, x.z += v.z, x.w += v.w;
      }
      reinterpret_cast<float4*>(sO)[n] = x;
    }
  }
  SplitCluster<Traits::kCluster> const cluster(smem);
  cluster.sync();
  float const multiplier = Traits::kDropout ? rows.params.dropout_multiplier : 1.0f;
#pragma unroll 1
  for (int n = here.split * Shape::kThreads + here.tid; n < kVectors; n += Traits::kCluster * Shape::kThreads) {
    int const row = n / (kColumns / 4);
    int const col = n % (kColumns / 4) * 4;
    if (row >= valid) break;                      // rows only grow
    if (col >= rows.params.head_dim_v) continue;  // what is loaded is used, see leave()
    float2 of_split[Traits::kCluster];
    float4 x[Traits::kCluster];
#pragma unroll
    for (int s = 0; s < Traits::kCluster; ++s) of_split[s] = cluster.load(sRow + row, s);
#pragma unroll
    for (int s = 0; s < Traits::kCluster; ++s) x[s] = cluster.load(reinterpret_cast<float4 const*>(sO) + n, s);
    float row_max = -infinity();
#pragma unroll
    for (int s = 0; s < Traits::kCluster; ++s) row_max = fmaxf(row_max, of_split[s].x);
    float const finite_max = Softmax::finite(row_max);
    float sum = 0.0f;
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < Traits::kCluster; ++s) {
      float const weight = map.ratio(of_split[s].x, finite_max);
      sum += weight * of_split[s].y;
      acc[0] += weight * x[s].x, acc[1] += weight * x[s].y, acc[2] += weight * x[s].z, acc[3] += weight * x[s].w;
    }
    float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    if constexpr (Traits::kHasSink) {
      factor = rows.finish_with_sink(m0 + row, row_max, sum, load_sink<Traits>(rows.params, here.h), map, col == 0);
    } else {
      if (col == 0) rows.write_lse(m0 + row, row_max, sum, map);
    }
    factor *= multiplier;
    Element* const to = rows.out(m0 + row) + index_t(col) * rows.params.out_stride_d;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (col + c < rows.params.head_dim_v)
        to[index_t(c) * rows.params.out_stride_d] = from_float<Element>(factor * acc[c]);
    }
  }
  cluster.leave();
}

}  // namespace nvrtc_attn
