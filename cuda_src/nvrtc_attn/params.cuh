// The bytes a kernel receives: plain structs, mirrored by nvrtc_attn/jit/params.py and checked against it by
// static_asserts in every generated entry file. Pointers come first so that a launch rewrites one block.
// Strides are in elements and 64-bit. "b" batch, "m" query row, "n" key row, "h" head, "d" head dim.
#pragma once
#include "compat.cuh"

namespace nvrtc_attn {

// Value of window_left / window_right that means "unbounded on that side".
constexpr int kUnbounded = 0x7fffffff;

// Results are of q's element type, or float32 where they are parts of a sum: out and dq (Q), dk and dv (K).
template <bool kFloat32, class Element>
struct ResultType {
  using Type = Element;
};
template <class Element>
struct ResultType<true, Element> {
  using Type = float;
};
template <class Traits>
using ResultQ = typename ResultType<Traits::kFloat32Q, typename Traits::Element>::Type;
template <class Traits>
using ResultK = typename ResultType<Traits::kFloat32K, typename Traits::Element>::Type;

struct ForwardParams {
  // -- pointers -------------------------------------------------------------------------------------
  void const* q;                  // [B, Mq, H, K] or, varlen, [1, total_q, H, K]
  void const* k;                  // [B, Mk, Hkv, K]
  void const* v;                  // [B, Mk, Hkv, Kv]
  void* out;                      // [B, Mq, H, Kv]
  float* lse;                     // null: not wanted
  void const* bias;               // broadcast dims have stride 0
  unsigned char const* mask;      // bytes, non-zero = keep; broadcast dims have stride 0
  int const* cu_seqlens_q;        // [nb + 1]
  int const* cu_seqlens_k;        // [nb + 1]
  int const* seqused_k;           // [nb]
  long long const* rng_seed_ptr;  // null: rng_seed / rng_offset below hold the values
  long long const* rng_offset_ptr;
  float* out_partial;  // split keys: [num_splits, B, H, Mq, Kv] float32
  // Split keys: [num_splits, B, H, Mq] (largest score, sum of exponentials below it). The Hopper kernel, which does not split:
  // the list of the tiles of packed sequences (hopper/common/tile_list.cuh).
  float2* softmax_partial;
  unsigned long long rng_seed;
  unsigned long long rng_offset;
  // -- strides --------------------------------------------------------------------------------------
  long long q_stride_b, q_stride_m, q_stride_h, q_stride_d;
  long long k_stride_b, k_stride_n, k_stride_h, k_stride_d;
  long long v_stride_b, v_stride_n, v_stride_h, v_stride_d;
  long long out_stride_b, out_stride_m, out_stride_h, out_stride_d;
  long long lse_stride_b, lse_stride_h, lse_stride_m;
  long long bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n;
  long long mask_stride_b, mask_stride_h, mask_stride_m, mask_stride_n;
  // -- sizes ----------------------------------------------------------------------------------------
  int batch;     // sequences: B when dense, nb when varlen
  int seqlen_q;  // Mq, or max_seqlen_q when varlen
  int seqlen_k;  // Mk, or max_seqlen_k when varlen
  int num_heads;
  int num_heads_kv;
  int head_dim;
  int head_dim_v;
  int total_q;       // rows of q's token dim (varlen: packed tokens, dense: Mq)
  int total_k;       // rows of k's token dim
  int num_m_blocks;  // ceil(seqlen_q / kBlockM)
  int num_splits;    // key splits, 1 = none
  int head_group;    // heads whose query tiles are interleaved, longest first; at least 1
  int lse_rows;      // rows of lse to write per (b, h): Mq, or the padded length of the seed's layout
  int lse_packed;    // 1: lse rows of sequence b start at cu_seqlens_q[b]
  // -- masks and scores -----------------------------------------------------------------------------
  int window_left;   // keeps j >= i + off - window_left, kUnbounded = no bound
  int window_right;  // keeps j <= i + off + window_right, kUnbounded = no bound (causal: 0)
  int bottom_right;  // off = bottom_right ? Mk_b - Mq_b : 0
  float scale;       // softmax scale
  float softcap;     // > 0 when the config has softcap
  float lse_empty;   // LSE of a row with no valid key: -inf, or 0 in the seed's layout
  // -- dropout --------------------------------------------------------------------------------------
  unsigned int dropout_threshold;  // keep iff philox word > threshold
  float dropout_multiplier;        // 1 / (1 - p)
};

// CUtensorMap: what the copy engine (TMA) knows of a tensor. Opaque, made by the driver.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// The Hopper forward kernel: the pass's own fields first.
struct HopperForwardParams : ForwardParams {
  int num_tiles;         // query tiles of all heads and batch entries (varlen: and of the virtual last sequence)
  int heads_per_group;   // num_heads / num_heads_kv
  int pair_rounds;       // the schedule with a band, see hopper/forward/scheduler.cuh
  int head_pairs;        // ceil(num_m_blocks / 2)
  int tail_first_head;   // after the pairs: the first head that is not finished,
  int tail_done;         // how many of its pairs are, and
  int tail_whole_heads;  // how many heads are not begun
  int chunk_rows;        // packed: tokens whose K and V of a key head stay in L2, and how many such chunks there are
  int num_chunks;
  int num_workers;         // packed: thread blocks that share the list of tiles
  TensorMap tensor_map_q;  // [batch][head][row][head dim], boxes of 64 columns and one tile of rows
  TensorMap tensor_map_k;
  TensorMap tensor_map_v;
  TensorMap tensor_map_bias;  // [batch][head][row][key], boxes of one slab (hopper/forward/score_tile.cuh)
  TensorMap tensor_map_mask;
};

struct BackwardParams {
  // -- pointers -------------------------------------------------------------------------------------
  void const* q;
  void const* k;
  void const* v;
  void const* out;
  void const* dout;
  float const* lse;
  float const* dlse;  // null: zero
  void const* bias;
  unsigned char const* mask;
  int const* cu_seqlens_q;
  int const* cu_seqlens_k;
  int const* seqused_k;
  long long const* rng_seed_ptr;
  long long const* rng_offset_ptr;
  void* dq;
  void* dk;
  void* dv;
  void* dbias;           // the bias's own shape; null: not wanted
  float* delta;          // workspace [B, H, Mq] (varlen: [H, total_q]): rowsum(dO * O) - dLSE
  float* row_lse;        // workspace like delta: lse, +inf where a row has no key (so that P = 0)
  float* dq_accum;       // workspace float32, layout private to the kernels that use it
  float* dkv_accum;      // workspace float32, private likewise
  float* dbias_partial;  // workspace float32 [num_dbias_splits, numel(bias)]
  int* counters;         // workspace of zeros, private likewise; Hopper, packed: the list of key tiles
  unsigned long long rng_seed;
  unsigned long long rng_offset;
  // -- strides --------------------------------------------------------------------------------------
  long long q_stride_b, q_stride_m, q_stride_h, q_stride_d;
  long long k_stride_b, k_stride_n, k_stride_h, k_stride_d;
  long long v_stride_b, v_stride_n, v_stride_h, v_stride_d;
  long long out_stride_b, out_stride_m, out_stride_h, out_stride_d;
  long long dout_stride_b, dout_stride_m, dout_stride_h, dout_stride_d;
  long long dq_stride_b, dq_stride_m, dq_stride_h, dq_stride_d;
  long long dk_stride_b, dk_stride_n, dk_stride_h, dk_stride_d;
  long long dv_stride_b, dv_stride_n, dv_stride_h, dv_stride_d;
  long long lse_stride_b, lse_stride_h, lse_stride_m;
  long long dlse_stride_b, dlse_stride_h, dlse_stride_m;
  long long delta_stride_b, delta_stride_h;
  long long bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n;
  long long mask_stride_b, mask_stride_h, mask_stride_m, mask_stride_n;
  long long dbias_stride_b, dbias_stride_h, dbias_stride_m, dbias_stride_n;  // 0 on broadcast dims
  long long dq_accum_stride_b, dq_accum_stride_h, dq_accum_stride_m;
  // -- sizes ----------------------------------------------------------------------------------------
  int batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim, head_dim_v;
  int total_q, total_k;
  int num_m_blocks;  // of the kernel that is being launched
  int num_n_blocks;
  int lse_packed;
  int dbias_size_b, dbias_size_h, dbias_size_m, dbias_size_n;  // shape of the bias passed in
  int num_dbias_splits;
  int num_splits;  // splits of the query loop of the dk/dv kernel, 1 = none
  int head_group;  // key heads whose key tiles the dk/dv kernel interleaves, longest first; at least 1
  // -- masks and scores -----------------------------------------------------------------------------
  int window_left, window_right, bottom_right;
  float scale;
  float softcap;
  // -- dropout --------------------------------------------------------------------------------------
  unsigned int dropout_threshold;
  float dropout_multiplier;
};

// The kernels of the Hopper backward pass: the pass's own fields first.
struct HopperBackwardParams : BackwardParams {
  // Where the counter of key tiles lies, in floats from row_lse (hopper/backward/schedule.cuh).
  long long counter_offset;
  int num_tiles;        // key tiles of all key heads and batch entries (packed: at most, the list says how many)
  int heads_per_group;  // num_heads / num_heads_kv
  int query_step;       // dense: by how many query tiles a key tile begins after the one before it, times 4096
  int chunk_rows;  // packed: tokens whose Q, dO and dq of a key head stay in L2, and how many such chunks there are
  int num_chunks;
  int num_workers;         // packed: thread blocks that share the list of tiles
  int num_whole;           // kParts: so many key tiles come first and are not shared
  float exponent_scale;    // scale * log2(e)
  int parts_apart;         // kParts: whether each part has a slot of dkv_accum, 0 where those of a key tile share one
  TensorMap tensor_map_q;  // [batch][head][row][head dim], boxes of 64 columns and one tile of rows
  TensorMap tensor_map_k;
  TensorMap tensor_map_v;
  TensorMap tensor_map_dout;
  TensorMap tensor_map_bias;  // [batch][head][row][key], boxes of 64 keys (hopper/backward/score_tile_transposed.cuh)
  TensorMap tensor_map_dbias;
};

// Behind the params of a kernel with kTileWords, so that those of the others lie where they lay: where the words are
// (collective/tile_words.cuh), and what kernel/tile_plan.cuh, which writes them, must know.
template <class Params>
struct WithTileWords : Params {
  // In words, from softmax_partial (forward) or counters (backward); strides of dims that words are shared over are 0.
  long long tile_words_offset;
  long long tile_words_stride_b, tile_words_stride_h, tile_words_stride_line;
  // Words by query tile beside those by key tile, which the deterministic pass counts with; of the others of the Hopper family the
  // order of key tiles (hopper/backward/line_order.cuh).
  long long tile_order_offset;
  long long tile_order_stride_b, tile_order_stride_h, tile_order_stride_line;
  int tile_plan_rows;        // queries of a tile
  int tile_plan_cols;        // keys
  int tile_plan_lines;       // lines of words of a (batch entry, head)
  int tile_plan_tiles;       // bits of a line
  int tile_plan_heads;       // with words of their own
  int tile_plan_transposed;  // 1: a line is a key tile, its bits are query tiles
};
using TiledForwardParams = WithTileWords<ForwardParams>;
using TiledHopperForwardParams = WithTileWords<HopperForwardParams>;
using TiledBackwardParams = WithTileWords<BackwardParams>;
using TiledHopperBackwardParams = WithTileWords<HopperBackwardParams>;

// The same for a part of a larger attention, whose dropout mask it has. Last, so that nothing before them moves: kernels of
// whole calls know none of these.
template <class Params>
struct PartOf : Params {
  alignas(alignof(Params)) int dropout_heads;  // of the whole; not in the padding at the end of Params
  int dropout_rows, dropout_columns;
};
using ForwardPartParams = PartOf<ForwardParams>;
using BackwardPartParams = PartOf<BackwardParams>;
using HopperForwardPartParams = PartOf<HopperForwardParams>;
using HopperBackwardPartParams = PartOf<HopperBackwardParams>;
using TiledForwardPartParams = PartOf<TiledForwardParams>;
using TiledBackwardPartParams = PartOf<TiledBackwardParams>;
using TiledHopperForwardPartParams = PartOf<TiledHopperForwardParams>;
using TiledHopperBackwardPartParams = PartOf<TiledHopperBackwardParams>;

// The same where the first row or key of the part is known on the device alone (kDeviceStarts): window_left, window_right and
// the random numbers count from row and key 0 then, as far as they lie here. Null: what the host knew is in those.
template <class Params>
struct StartsOnDevice : Params {
  alignas(alignof(Params)) int const* row_start;
  int const* key_start;

  NVRTC_ATTN_DEVICE long long first_row() const { return row_start ? __ldg(row_start) : 0; }
  NVRTC_ATTN_DEVICE long long first_key() const { return key_start ? __ldg(key_start) : 0; }
};
using ForwardPlacedParams = StartsOnDevice<ForwardPartParams>;
using BackwardPlacedParams = StartsOnDevice<BackwardPartParams>;
using HopperForwardPlacedParams = StartsOnDevice<HopperForwardPartParams>;
using HopperBackwardPlacedParams = StartsOnDevice<HopperBackwardPartParams>;
using TiledForwardPlacedParams = StartsOnDevice<TiledForwardPartParams>;
using TiledBackwardPlacedParams = StartsOnDevice<TiledBackwardPartParams>;
using TiledHopperForwardPlacedParams = StartsOnDevice<TiledHopperForwardPartParams>;
using TiledHopperBackwardPlacedParams = StartsOnDevice<TiledHopperBackwardPartParams>;

// What a mask of positions or of dropout is made of: with the place of the part where the kernel has it.
template <bool kHasPlace, class Traits, class Params>
NVRTC_ATTN_DEVICE auto const& part_params(Params const& params) {
  if constexpr (kHasPlace) {
    return static_cast<typename Traits::PartParams const&>(params);
  } else {
    return params;
  }
}

// Behind the params of a kernel with a sink, and behind the words of tiles where it has those too.
template <class Params>
struct WithSink : Params {
  void const* sink;  // [H], one more logit a row
  long long sink_stride_h;
  int sink_float32;  // otherwise of q's element type
};
using FurtherForwardParams = WithSink<ForwardParams>;
using FurtherHopperForwardParams = WithSink<HopperForwardParams>;
using FurtherTiledForwardParams = WithSink<TiledForwardParams>;
using FurtherTiledHopperForwardParams = WithSink<TiledHopperForwardParams>;

// Behind all else but what a modifier captured, of kernels with kMaxLogit; not in padding, as in PartOf.
template <class Params>
struct WithMaxLogit : Params {
  alignas(alignof(Params)) float* max_logit;  // [batch, num_heads], -inf before the launch
};

// The same of kernels with kTileBits: where the bits of undecided tiles are (collective/tile_bits.cuh), in bytes from the buffer
// of words.
template <class Params>
struct WithTileBits : Params {
  alignas(alignof(Params)) long long tile_bits_first;  // [words]: the slot of the first undecided tile of each word
  long long tile_bits_slots;                           // [room]: which tile has the slot
  long long tile_bits_at;                              // [room]: its bits
  int tile_bits_room;                                  // slots; tiles beyond them are not in the buffer
};

struct FurtherBackwardParams : BackwardParams {
  void const* sink;
  void* dsink;  // [H], of the sink's element type
  long long sink_stride_h, dsink_stride_h;
  int sink_float32;
};

}  // namespace nvrtc_attn
