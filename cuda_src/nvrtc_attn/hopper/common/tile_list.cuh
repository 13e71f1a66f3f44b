// The tiles that packed sequences really have, in the order in which a persistent kernel works on them. One thread block makes
// the list before that kernel, from the lengths on the device (make_tile_list).
//
// Order: sequences that lie in the same `chunk_rows` rows, whose other operand stays in L2, are neighbours, the chunk with the
// longest tile first. In a chunk the longest tiles come first, by `Cost`: with kByTile each tile for itself, otherwise
// whole sequences, whose tiles stay in their order (kDescending: the last one first). Tiles of about the same length keep no
// order. Sorted by counting, in kListBuckets classes of all chunks together.
// Behind them come the parts of the rows of no sequence, b == batch, if there are such rows.
//
// The kernel goes through the list once for every `heads` heads: as many as stay in L2, or more where otherwise one pass would
// be shorter than the longest tile, which would end alone.
//
// In memory (int): the counter of tiles taken, set to 0; how many tiles there are; how many parts; heads; an entry of each,
// (b, tile) and what else the kernel wants to know of it. At most one tile for every slot (collective/packed_slots.cuh), so
// that the host knows how much room they take.
#pragma once
#include "../../collective/packed_slots.cuh"

namespace nvrtc_attn {

constexpr int kListBuckets = 2048;
constexpr int kListChunks = 128;  // at most

template <class Entry>
struct TileListOf {
  int* words;

  NVRTC_ATTN_DEVICE int* counter() const { return words; }
  NVRTC_ATTN_DEVICE int count() const { return words[1]; }
  NVRTC_ATTN_DEVICE int parts() const { return words[2]; }
  NVRTC_ATTN_DEVICE int heads() const { return words[3]; }
  NVRTC_ATTN_DEVICE Entry& operator[](int i) const { return reinterpret_cast<Entry*>(words + 4)[i]; }

  // By all threads of the block that makes it: the parts of the rows of no sequence, behind `tiles` real ones, by
  // put(place, b, part), and what stands in front of the entries.
  template <int kThreads, int kTile, class Put>
  NVRTC_ATTN_DEVICE void finish(PackedSlots<kTile> const& slots, int tiles, int heads, int tid, Put const& put) const {
    bool const any_outside = slots.cu_seqlens[0] > 0 || slots.cu_seqlens[slots.batch] < slots.total;
    int const num_parts = any_outside ? slots.parts() : 0;
    for (int part = tid; part < num_parts; part += kThreads) put(tiles + part, slots.batch, part);
    if (tid == 0) {
      words[0] = 0;
      words[1] = min(tiles + num_parts, slots.count());
      words[2] = max(num_parts, 1);
      words[3] = heads;
    }
  }
};
using TileList = TileListOf<int2>;

// Exclusive sums over buckets, of which thread tid has some in a row with the sum `own`: `before` is that of the buckets before
// its own ones. Returns the sum of all. `warp_sums` has room for one of each warp.
template <int kThreads, class Number>
NVRTC_ATTN_DEVICE Number sum_before(Number own, Number& before, Number* warp_sums, int tid) {
  int const lane = tid % 32;
  Number up_to = own;
  for (int distance = 1; distance < 32; distance *= 2) {
    Number const other = __shfl_up_sync(0xffffffffu, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  if (lane == 31) warp_sums[tid / 32] = up_to;
  __syncthreads();
  Number all = lane < kThreads / 32 ? warp_sums[lane] : Number(0);
  Number ahead = lane < tid / 32 ? all : Number(0);
#pragma unroll 1  // unrolled, backward_hopper_prepare would spill 8 bytes
  for (int offset = 16; offset > 0; offset /= 2) {
    all += __shfl_xor_sync(0xffffffffu, all, offset);
    ahead += __shfl_xor_sync(0xffffffffu, ahead, offset);
  }
  before = up_to - own + ahead;
  __syncthreads();
  return all;
}

// An entry that says no more than which tile it is.
struct NameOfTile {
  NVRTC_ATTN_DEVICE int2 operator()(int b, int tile) const { return make_int2(b, tile); }
};

struct TileListShape {
  int max_tiles;          // of a sequence: what the caller says of the longest
  bool keep_empty;        // sequences without rows have a tile as well
  int const* cu_seqlens;  // of the rows that chunks are made of
  int chunk_rows;
  int num_chunks;
  int most_cost;
  int heads_kv;   // key heads
  int heads_fit;  // a divisor of them: how many stay in L2
  int group;      // heads of the list's tiles for each key head
  int workers;    // thread blocks that share the list

  // Key heads that share a pass, a divisor of all: as many more than stay in L2 as give all blocks work beside its longest tile.
  NVRTC_ATTN_DEVICE int heads_of_pass(float work_of_head, float longest) const {
    float const enough = 1.25f * longest * float(workers);
    int heads = heads_fit;
    while (heads < heads_kv && (heads_kv % heads != 0 || work_of_head * float(heads * group) < enough)) ++heads;
    return heads;
  }
};

template <int kThreads, int kTile, bool kByTile, bool kDescending, class Entry, class Cost,
          class MakeEntry = NameOfTile>
NVRTC_ATTN_DEVICE void make_tile_list(TileListOf<Entry> const& list, TileListShape const& shape,
                                      PackedSlots<kTile> const& slots, Cost const& cost, int tid,
                                      MakeEntry const& entry = MakeEntry()) {
  constexpr int kEach = kListBuckets / kThreads;
  static_assert(kListBuckets % kThreads == 0 && kThreads % 32 == 0, "a whole number of buckets for each thread");
  __shared__ int buckets[kListBuckets];  // how many tiles, then where the next one goes
  __shared__ int costliest[kListChunks];
  __shared__ int chunks[kListChunks];  // in their order
  __shared__ int warp_sums[kThreads / 32];
  __shared__ float work;  // of all tiles, in classes
  int const lane = tid % 32;
  int const capacity = slots.count();
  int const classes = kListBuckets / shape.num_chunks;
  float const class_of_cost = float(classes) / float(shape.most_cost + 1);

  auto num_tiles = [&](int b) {
    int const rows = slots.cu_seqlens[b + 1] - slots.cu_seqlens[b];
    int const least = shape.keep_empty ? 1 : 0;
    int const tiles = rows > 0 ? (rows + kTile - 1) / kTile : 0;
    return min(max(tiles, least), shape.max_tiles);
  };
  auto bucket_of = [&](int b, int tile) {
    int const chunk = min(shape.cu_seqlens[b] / shape.chunk_rows, shape.num_chunks - 1);
    int const from_below = min(int(float(cost(b, tile)) * class_of_cost), classes - 1);
    return &buckets[chunk * classes + classes - 1 - from_below];
  };
  auto put = [&](int at, int b, int tile) {
    if (at < capacity) list[at] = entry(b, tile);  // always, if the lengths are what they must be
  };
  // Calls action(b, tile) for every tile, by any thread.
  auto each_tile = [&](auto&& action) {
    for (int slot = tid; slot < capacity; slot += kThreads) {
      PackedSlot const found = slots.find(slot);
      if (found.b < slots.batch && found.tile < num_tiles(found.b)) action(found.b, found.tile);
    }
  };

  // How many tiles of each class.
  for (int i = tid; i < kListBuckets; i += kThreads) buckets[i] = 0;
  for (int c = tid; c < shape.num_chunks; c += kThreads) costliest[c] = classes;
  if (tid == 0) work = 0.0f;
  __syncthreads();
  if constexpr (kByTile) {
    each_tile([&](int b, int tile) { atomicAdd(bucket_of(b, tile), 1); });
  } else {
    for (int b = tid; b < slots.batch; b += kThreads) {
      if (int const tiles = num_tiles(b)) atomicAdd(bucket_of(b, 0), tiles);
    }
  }
  __syncthreads();

  // Chunks by their first class that is not empty.
  for (int i = tid; i < classes * shape.num_chunks; i += kThreads) {
    if (buckets[i] > 0) atomicMin(&costliest[i / classes], i % classes);
  }
  __syncthreads();
  for (int c = tid; c < shape.num_chunks; c += kThreads) {
    int rank = 0;
    for (int other = 0; other < shape.num_chunks; ++other) {
      rank += costliest[other] < costliest[c] || (costliest[other] == costliest[c] && other < c);
    }
    chunks[rank] = c;
  }
  __syncthreads();

  // Where each class begins: an exclusive sum in the order of chunks.
  auto in_order = [&](int i) -> int& {
    int const chunk = i / classes;
    // What num_chunks does not divide are classes of nothing, behind the last chunk.
    return buckets[chunk < shape.num_chunks ? chunks[chunk] * classes + i - chunk * classes : i];
  };
  int sum = 0;
  float own_work = 0.0f;
  for (int i = tid * kEach; i < (tid + 1) * kEach; ++i) {
    int const tiles = in_order(i);
    sum += tiles;
    own_work += float(tiles) * float(classes - i % classes);
  }
  if (own_work > 0.0f) atomicAdd(&work, own_work);
  int next;
  int const tiles_of_all = sum_before<kThreads>(sum, next, warp_sums, tid);
  for (int i = tid * kEach; i < (tid + 1) * kEach; ++i) {
    int& bucket = in_order(i);
    int const tiles = bucket;
    bucket = next;
    next += tiles;
  }
  __syncthreads();

  if constexpr (kByTile) {
    each_tile([&](int b, int tile) { put(atomicAdd(bucket_of(b, tile), 1), b, tile); });
  } else {
    // A warp writes the tiles of up to 32 sequences, one sequence after the other: of as few as there are warps for.
    constexpr int kWarps = kThreads / 32;
    int const each = min(32, (slots.batch + kWarps - 1) / kWarps);
    for (int b0 = tid / 32 * each; b0 < slots.batch; b0 += kWarps * each) {
      int const own = b0 + lane;
      int const own_tiles = lane < each && own < slots.batch ? num_tiles(own) : 0;
      int const own_first = own_tiles > 0 ? atomicAdd(bucket_of(own, 0), own_tiles) : 0;
      for (int i = 0; i < each; ++i) {
        int const tiles = __shfl_sync(0xffffffffu, own_tiles, i);
        int const first = __shfl_sync(0xffffffffu, own_first, i);
        for (int tile = lane; tile < tiles; tile += 32) {
          put(first + tile, b0 + i, kDescending ? tiles - 1 - tile : tile);
        }
      }
    }
  }
  float const longest = float(classes - costliest[chunks[0]]);
  int const heads = shape.heads_of_pass(work, longest);
  list.template finish<kThreads>(slots, tiles_of_all, heads * shape.group, tid, put);
}

}  // namespace nvrtc_attn
