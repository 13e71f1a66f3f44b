// What the three idle warps of the loading warp-group do in the Hopper backward kernel with kFused: the work of
// backward_hopper_prepare, so that it need not run before. Dense problems without dropout, whose rows are query rows.
//
// Delta, the reference of P's exponent and zeros in dq_accum, 32 query rows at a time and one a lane, in the order in which
// key tiles ask for them. Pieces are handed out by a counter, so that only blocks that run own any, and these warps wait
// for nobody: whoever waits for a row is served, however many of the grid's blocks are resident.
//
// `ready` of a head counts its finished pieces. A lane adds to it, with release, what its whole warp has stored; a loading warp
// acquires it and fences, because the copy engine reads the statistics, before it issues the first copy of a key tile.
// Consumers add to dq_accum after the barriers of those copies, and so after the zeros.
//
// Counters (int, zeroed by the host before every launch): key tiles handed out, pieces handed out, `ready` [batch][head].
#pragma once
#include "../common/bulk.cuh"
#include "../common/uniform.cuh"
#include "helpers.cuh"
#include "row_statistics.cuh"

namespace nvrtc_attn {

constexpr int kPieceRows = 32;  // one a lane

NVRTC_ATTN_DEVICE int* ready_counter(HopperBackwardParams const& params, int head) {
  return params.counters + 2 + head;
}

// Rows of O, then of dO, in shared memory: a buffer and an mbarrier for each of the warps.
template <class Traits>
struct PieceShape {
  static constexpr int kWarps = 3;
  static constexpr int kPitch = Traits::kHeadDimV * 2 + 16;  // of a row: no bank conflicts
  static constexpr int kBytesOperand = kPieceRows * kPitch;
  static constexpr int kBytesPiece = 2 * kBytesOperand;
  static constexpr int kOffsetBarriers = kWarps * kBytesPiece;
  static constexpr int kBytes = kOffsetBarriers + (kWarps + 1) * Mbarrier::kBytes;  // a multiple of 16
  static constexpr int kPiecesPerTile = Traits::kBlockM / kPieceRows;
};

template <class Traits>
NVRTC_ATTN_DEVICE Mbarrier full_piece(unsigned pieces, int warp) {
  return {pieces + PieceShape<Traits>::kOffsetBarriers + Mbarrier::kBytes * warp};
}

template <class Traits>
NVRTC_ATTN_DEVICE void init_pieces(unsigned pieces) {
  for (int warp = 0; warp < PieceShape<Traits>::kWarps; ++warp) full_piece<Traits>(pieces, warp).init(1);
}

// The loading warp, before it brings statistics of the query heads of key head (b, h).
template <class Traits>
NVRTC_ATTN_DEVICE void wait_for_rows(HopperBackwardParams const& params, int b, int h) {
  int const pieces = params.num_m_blocks * PieceShape<Traits>::kPiecesPerTile;
  int const* const ready = ready_counter(params, b * params.num_heads + h * params.heads_per_group);
  for (int i = lane_id(); i < params.heads_per_group; i += 32) {
    while (load_acquire(ready + i) < pieces) __nanosleep(100);
  }
  __syncwarp();
  // What ordinary stores of any block have written is read by the copy engine, for which this thread asks.
  asm volatile("fence.proxy.async;" ::: "memory");
}

struct Piece {
  int b, h, m0;
};
template <class Traits>
NVRTC_ATTN_DEVICE Piece piece_of(HopperBackwardParams const& params, int n) {
  int const per_head = params.num_m_blocks * PieceShape<Traits>::kPiecesPerTile;
  int const head = uniform_quotient(n, per_head);
  int const b = uniform_quotient(head, params.num_heads);
  return {b, head - b * params.num_heads, (n - head * per_head) * kPieceRows};
}

template <class Traits>
NVRTC_ATTN_DEVICE void load_piece(HopperBackwardParams const& params, unsigned buffer, Mbarrier const& full, int n,
                                  int lane) {
  using Element = typename Traits::Element;
  using Shape = PieceShape<Traits>;
  Piece const piece = piece_of<Traits>(params, n);
  int const rows = min(max(params.seqlen_q - piece.m0, 0), kPieceRows);
  int const bytes = params.head_dim_v * 2;
  if (lane == 0) full.arrive_and_expect(2 * rows * bytes);
  __syncwarp();
  if (lane < rows) {
    index_t const row = piece.m0 + lane;
    unsigned const to = buffer + lane * Shape::kPitch;
    bulk_load(to,
              reinterpret_cast<Element const*>(params.out) + index_t(piece.b) * params.out_stride_b +
                  row * params.out_stride_m + index_t(piece.h) * params.out_stride_h,
              bytes, full.address);
    bulk_load(to + Shape::kBytesOperand,
              reinterpret_cast<Element const*>(params.dout) + index_t(piece.b) * params.dout_stride_b +
                  row * params.dout_stride_m + index_t(piece.h) * params.dout_stride_h,
              bytes, full.address);
  }
}

NVRTC_ATTN_DEVICE uint4 load_shared_uint4(unsigned address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

template <class Element>
NVRTC_ATTN_DEVICE float dot2(uint32_t a, uint32_t b, float sum) {
  Element const* x = reinterpret_cast<Element const*>(&a);
  Element const* y = reinterpret_cast<Element const*>(&b);
  return fmaf(to_float(x[1]), to_float(y[1]), fmaf(to_float(x[0]), to_float(y[0]), sum));
}

template <class Traits>
NVRTC_ATTN_DEVICE void finish_piece(HopperBackwardParams const& params, unsigned row_in_smem, int n, int lane) {
  using Element = typename Traits::Element;
  using Shape = PieceShape<Traits>;
  Piece const piece = piece_of<Traits>(params, n);
  float sum = 0.0f;
  int const chunks = params.head_dim_v / 8;
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    uint4 const o = load_shared_uint4(row_in_smem + 16 * c);
    uint4 const g = load_shared_uint4(row_in_smem + Shape::kBytesOperand + 16 * c);
    sum = dot2<Element>(o.x, g.x, sum);
    sum = dot2<Element>(o.y, g.y, sum);
    sum = dot2<Element>(o.z, g.z, sum);
    sum = dot2<Element>(o.w, g.w, sum);
  }
  // Rows beyond the last one are padding: what their lanes have summed is not used.
  bool const is_row = lane < params.seqlen_q - piece.m0;
  RowReference const reference =
      load_row_reference(params, is_row, piece.h, params.lse_packed ? 0 : piece.b, index_t(piece.m0) + lane);
  store_row_statistics<Traits>(
      params, sum, reference,
      index_t(piece.b) * params.delta_stride_b + index_t(piece.h) * params.delta_stride_h + piece.m0 + lane);
  float4* accum =
      reinterpret_cast<float4*>(params.dq_accum + index_t(piece.b) * params.dq_accum_stride_b +
                                index_t(piece.h) * params.dq_accum_stride_h + index_t(piece.m0) * Traits::kHeadDim) +
      opaque(lane);  // or NVRTC 13.5 keeps its offset over the loop over pieces, in 8 bytes of local memory
#pragma unroll 4
  for (int i = 0; i < kPieceRows * Traits::kHeadDim / 128; ++i) accum[32 * i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  __syncwarp();
  if (lane == 0) {
    asm volatile(
        "red.release.gpu.global.add.s32 [%0], 1;" ::"l"(ready_counter(params, piece.b * params.num_heads + piece.h))
        : "memory");
  }
}

// One of the three warps; `pieces_in_smem` is the shared address of the buffers.
template <class Traits>
NVRTC_ATTN_DEVICE void prepare_rows(HopperBackwardParams const& params, unsigned pieces_in_smem, int lane) {
  int const pieces = params.batch * params.num_heads * params.num_m_blocks * PieceShape<Traits>::kPiecesPerTile;
  // From the thread's index each time: over the loop there are no registers for more.
  auto warp = [] {
    int tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid / 32 - 1;
  };
  auto buffer = [&] { return pieces_in_smem + warp() * PieceShape<Traits>::kBytesPiece; };
  auto full = [&] { return full_piece<Traits>(pieces_in_smem, warp()); };
  auto take = [&] {
    int taken = 0;
    if (lane == 0) {
      // Of this lane's number, zero, read again: the address is not worth two registers over the loop.
      taken = atomicAdd(params.counters + 1 + lane_id(), 1);
    }
    return uniform(taken);
  };
  unsigned parity = 0;
  int n = take();
#pragma unroll 1
  while (n < pieces) {
    load_piece<Traits>(params, buffer(), full(), n, lane);
    int const next = take();
    full().wait(parity);
    finish_piece<Traits>(params, buffer() + lane * PieceShape<Traits>::kPitch, n, lane);
    __syncwarp();
    parity ^= 1;
    n = next;
  }
}

}  // namespace nvrtc_attn
