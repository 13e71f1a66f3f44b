// The list of the key tiles of packed sequences, before the Hopper backward kernels, by a thread block of
// backward_hopper_prepare.
//
// Without a band all key tiles of a sequence have the same queries, and in the deterministic pass they wait for each other:
// both have the order of hopper/common/tile_list.cuh. With a band they come by sequences: whole ones first, the longest
// first, those of about the same length as they lie in memory. Key tiles that are in work at the same time then read the
// same queries and add to the same rows of dq, which are in L2 as long as that. The shortest sequences come last tile by tile,
// those that the most query tiles see first, so that the thread blocks end together: as many sequences as have work for all
// thread blocks while one of them ends half a tile of the sequence before. Before, the key
// tiles of as many sequences as fit in 32 MB came that way: 61 documents of 117 to 2396 tokens (16 heads of D 128, causal,
// H200) waited 1.9 us a key tile for K and took 1221 us, and take 1068.
#pragma once
#include "schedule.cuh"

namespace nvrtc_attn {

constexpr int kSequenceLevels = 64;  // of lengths
constexpr int kSequenceChunks = 16;  // of the rows, at most
constexpr int kSequenceBuckets = kSequenceLevels * kSequenceChunks;
constexpr int kSequenceKeys = 512;  // of so many sequences the bucket is kept
// What comes tile by tile, in tiles as long as the longest of them, for each thread block.
constexpr float kLastKeyTiles = 0.5f;

// With a band. query_tiles(b, n_block) says how many see a key tile.
template <int kThreads, int kTile, class QueryTiles>
NVRTC_ATTN_DEVICE void list_by_sequences(TileList const& list, TileListShape const& shape,
                                         PackedSlots<kTile> const& slots, QueryTiles const& query_tiles, int tid) {
  constexpr int kEach = kSequenceBuckets / kThreads;
  constexpr int kLanes = 8;  // of a sequence
  static_assert(kSequenceBuckets % kThreads == 0 && kThreads % 32 == 0, "a whole number of buckets for each thread");
  __shared__ int buckets[kSequenceBuckets];  // how many tiles, then where the next one goes
  __shared__ float works[kSequenceBuckets];  // what they cost; later `buckets` of the last tiles
  __shared__ unsigned short keys[kSequenceKeys];
  __shared__ int int_sums[kThreads / 32];
  __shared__ float float_sums[kThreads / 32];
  __shared__ int longest;     // query tiles of a key tile
  __shared__ int first_last;  // bucket from which on tiles come one by one
  __shared__ int bulk_tiles;  // in the buckets before
  int* const last = reinterpret_cast<int*>(works);
  int const lane = tid % kLanes;
  int const capacity = slots.count();
  float const level_of_cost = float(kSequenceLevels) / float(shape.most_cost + 1);

  auto put = [&](int at, int b, int tile) {
    if (at < capacity) list[at] = make_int2(b, tile);  // always, if the lengths are what they must be
  };
  // Calls action(b, tiles) for every sequence, and for none as b == batch, by neighbouring threads and by all at once.
  auto each_sequence = [&](auto&& action) {
    for (int b0 = tid / 32 * (32 / kLanes); b0 < slots.batch; b0 += kThreads / kLanes) {
      int const b = min(b0 + tid % 32 / kLanes, slots.batch);
      int const rows = b < slots.batch ? slots.cu_seqlens[b + 1] - slots.cu_seqlens[b] : 0;
      action(b, min(rows > 0 ? (rows + kTile - 1) / kTile : 0, shape.max_tiles));
    }
  };
  // A sequence's bucket, and what its tiles cost.
  auto find_key = [&](int b, int tiles, int& most, float& work) {
    most = 0;
    work = 0.0f;
    for (int tile = lane; tile < tiles; tile += kLanes) {
      int const cost = query_tiles(b, tile);
      most = max(most, cost);
      work += float(cost + 1);
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
      work += __shfl_xor_sync(0xffffffffu, work, offset);
    }
    int const level = min(int(float(most) * level_of_cost), kSequenceLevels - 1);
    int const chunk = min(shape.cu_seqlens[b] / shape.chunk_rows, min(shape.num_chunks, kSequenceChunks) - 1);
    return (kSequenceLevels - 1 - level) * kSequenceChunks + chunk;
  };
  auto key_of = [&](int b, int tiles) {
    int key = b < kSequenceKeys ? keys[b] : 0;
    if (slots.batch > kSequenceKeys) {
      int most;
      float work;
      int const found = find_key(b, tiles, most, work);
      if (b >= kSequenceKeys) key = found;
    }
    return key;
  };

  // How many tiles and how much work there is in each bucket.
  for (int i = tid; i < kSequenceBuckets; i += kThreads) buckets[i] = 0, works[i] = 0.0f;
  if (tid == 0) longest = first_last = 0;
  __syncthreads();
  each_sequence([&](int b, int tiles) {
    int most;
    float work;
    int const key = find_key(b, tiles, most, work);
    if (tiles == 0 || lane != 0) return;
    if (b < kSequenceKeys) keys[b] = static_cast<unsigned short>(key);
    atomicAdd(&buckets[key], tiles);
    atomicAdd(&works[key], work);
    atomicMax(&longest, most);
  });
  __syncthreads();

  // How many heads share a pass, and from where on there is enough work for tiles one by one.
  float own_work = 0.0f, work_before;
  for (int i = tid * kEach; i < (tid + 1) * kEach; ++i) own_work += works[i];
  float const work = sum_before<kThreads>(own_work, work_before, float_sums, tid);
  int const heads = shape.heads_of_pass(work, float(longest + 1));
  auto longest_of = [&](int bucket) { return float(kSequenceLevels - bucket / kSequenceChunks) / level_of_cost; };
  float behind = work - work_before;
  for (int i = tid * kEach; i < (tid + 1) * kEach; ++i) {
    bool const suffices = behind * float(heads) >= kLastKeyTiles * longest_of(i) * float(shape.workers);
    if (buckets[i] > 0 && suffices) atomicMax(&first_last, i);
    behind -= works[i];
  }

  // Where each bucket begins.
  int sum = 0, next;
  for (int i = tid * kEach; i < (tid + 1) * kEach; ++i) sum += buckets[i];
  int const tiles_of_all = sum_before<kThreads>(sum, next, int_sums, tid);
  for (int i = tid * kEach; i < (tid + 1) * kEach; ++i) {
    int const tiles = buckets[i];
    buckets[i] = next;
    if (i == first_last) bulk_tiles = next;
    next += tiles;
    last[i] = 0;
  }
  __syncthreads();

  // Whole sequences, and how many of the last tiles have how many query tiles.
  float const class_of_cost = float(kSequenceBuckets) / (longest_of(first_last) + 1.0f);
  auto class_of = [&](int b, int tile) {
    int const from_below = min(int(float(query_tiles(b, tile)) * class_of_cost), kSequenceBuckets - 1);
    return kSequenceBuckets - 1 - from_below;
  };
  each_sequence([&](int b, int tiles) {
    int const key = key_of(b, tiles);
    bool const whole = key < first_last;
    int first = whole && lane == 0 && tiles > 0 ? atomicAdd(&buckets[key], tiles) : 0;
    first = __shfl_sync(0xffffffffu, first, tid % 32 / kLanes * kLanes);
    bool const from_end = tiles > 0 && query_tiles(b, 0) < query_tiles(b, tiles - 1);
    for (int tile = lane; tile < tiles; tile += kLanes) {
      if (whole) {
        put(first + tile, b, from_end ? tiles - 1 - tile : tile);
      } else {
        atomicAdd(&last[class_of(b, tile)], 1);
      }
    }
  });
  __syncthreads();
  sum = 0;
  for (int i = tid * kEach; i < (tid + 1) * kEach; ++i) sum += last[i];
  sum_before<kThreads>(sum, next, int_sums, tid);
  next += bulk_tiles;
  for (int i = tid * kEach; i < (tid + 1) * kEach; ++i) {
    int const tiles = last[i];
    last[i] = next;
    next += tiles;
  }
  __syncthreads();
  each_sequence([&](int b, int tiles) {
    if (key_of(b, tiles) < first_last) return;
    for (int tile = lane; tile < tiles; tile += kLanes) put(atomicAdd(&last[class_of(b, tile)], 1), b, tile);
  });
  list.template finish<kThreads>(slots, tiles_of_all, heads, tid, put);
}

// In the deterministic pass those of a sequence stay together, the highest keys first (hopper/backward/ordered_dq.cuh).
template <class Traits>
NVRTC_ATTN_DEVICE void list_key_tiles(HopperBackwardParams const& params) {
  constexpr int kBlockN = Traits::kBlockN;
  auto query_tiles = [&](int b, int n_block) {
    SeqlenInfo<true, Traits::kSequsedK> const seqlen(params, b);
    PositionMask<Traits::kBand> const mask(params, seqlen.len_q, seqlen.len_k);
    int first, last;
    mask.template query_tiles<Traits::kBlockM>(n_block * kBlockN, kBlockN, first, last);
    return max(last - first, 0);
  };
  TileListShape const shape = {params.num_n_blocks,
                               false,  // no tile without keys
                               params.cu_seqlens_q,
                               params.chunk_rows,
                               params.num_chunks,
                               params.num_m_blocks,
                               params.num_heads_kv * params.num_splits,
                               params.head_group,
                               1,
                               params.num_workers};
  PackedSlots<kBlockN> const slots{params.cu_seqlens_k, params.batch, params.total_k};
  if constexpr (Traits::kBand && !Traits::kOrdered) {
    list_by_sequences<Traits::kNumThreads>(key_tile_list(params), shape, slots, query_tiles, int(threadIdx.x));
  } else {
    make_tile_list<Traits::kNumThreads, kBlockN, false, Traits::kOrdered>(key_tile_list(params), shape, slots,
                                                                          query_tiles, int(threadIdx.x));
  }
}

}  // namespace nvrtc_attn
