// Attention forward on Hopper (sm_90a): tiles by the copy engine, matrix products by warp-groups, one persistent block per
// multiprocessor.
//
// Roles: warp-group 0 loads (one thread issues all copies); each of the other kGroups = kBlockM / 64 warp-groups owns 64 query
// rows. A consumer keeps the products of two key tiles in flight: while the tensor cores compute P V of tile j it does
// the softmax of tile j + 1, whose Q K^T was issued just before. With kPingPong the groups also take turns at issuing, so
// that one group's products run under the other's softmax.
// Key tiles run from the last to the first: those that need an element mask come first.
//
// Shared memory (slabs of 64 columns, see hopper/wgmma.cuh): sQ[kBlockM][kHeadDim], kNumStages x sK[kBlockN][kHeadDim],
// kNumStages x sV[kBlockN][kHeadDimV], then the mbarriers. The output goes from registers to global memory.
//
// Barriers: mbarriers full_q / empty_q, full_k / empty_k and full_v / empty_v per stage. `full` counts the bytes of the
// copies, `empty` one arrival per consumer warp. empty_q completes after the last Q K^T of a tile, so the next Q loads under
// the tail of this one. Named barriers 1 .. kGroups are the groups' turns, kGroups + 1 is all consumers.
#pragma once
#include "../collective/dropout.cuh"
#include "../collective/epilogue.cuh"
#include "../collective/seqlen.cuh"
#include "../collective/softmax.cuh"
#include "../common/fragment_load.cuh"
#include "../hopper/barrier.cuh"
#include "../hopper/scheduler.cuh"
#include "../hopper/tma.cuh"
#include "../hopper/wgmma.cuh"

namespace nvrtc_attn {

template <class Traits>
struct HopperShape {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kGroups = kBlockM / 64;
  static constexpr int kConsumers = 128 * kGroups;
  static constexpr int kTilesN = kBlockN / 8;
  static constexpr int kTilesD = Traits::kHeadDimV / 8;
  static constexpr int kStepsN = kBlockN / 16;
  static constexpr int kSlabsQ = (Traits::kHeadDim + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabsV = (Traits::kHeadDimV + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabQ = kBlockM * kSlabRowBytes;  // bytes
  static constexpr int kSlabK = kBlockN * kSlabRowBytes;
  static constexpr int kBytesQ = kSlabsQ * kSlabQ;
  static constexpr int kBytesK = kSlabsQ * kSlabK;
  static constexpr int kBytesV = kSlabsV * kSlabK;
  static constexpr int kBarriers = kBytesQ + kStages * (kBytesK + kBytesV);  // offset
  static constexpr int kSmemBytes = kBarriers + 8 * (2 + 4 * kStages);
  // 65536 registers: what the consumers need, the rest to the loading group.
  static constexpr int kRegistersConsumer = kGroups == 3 ? 160 : 232;
  static constexpr int kRegistersProducer = kGroups == 3 ? 32 : 40;

  static_assert(Traits::kNumThreads == 128 + kConsumers, "a loading warp-group and one per 64 rows");
  static_assert(kBlockM % 64 == 0 && kGroups <= 3, "one to three consumers");
  static_assert(kStages >= 2, "a consumer waits for the next K before it gives back a V");
  static_assert(kBlockN % 16 == 0 && Traits::kHeadDim % 16 == 0 && Traits::kHeadDimV % 16 == 0, "matrix product shapes");
};

template <class Shape>
struct ForwardBarriers {
  unsigned base;  // shared address
  NVRTC_ATTN_DEVICE Mbarrier full_q() const { return {base}; }
  NVRTC_ATTN_DEVICE Mbarrier empty_q() const { return {base + 8}; }
  NVRTC_ATTN_DEVICE Mbarrier full_k(int stage) const { return {base + 16 + 8 * stage}; }
  NVRTC_ATTN_DEVICE Mbarrier full_v(int stage) const { return {base + 16 + 8 * (Shape::kStages + stage)}; }
  NVRTC_ATTN_DEVICE Mbarrier empty_k(int stage) const { return {base + 16 + 8 * (2 * Shape::kStages + stage)}; }
  NVRTC_ATTN_DEVICE Mbarrier empty_v(int stage) const { return {base + 16 + 8 * (3 * Shape::kStages + stage)}; }

  NVRTC_ATTN_DEVICE void init() const {
    full_q().init(1);
    empty_q().init(4 * Shape::kGroups);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      full_k(stage).init(1);
      full_v(stage).init(1);
      empty_k(stage).init(4 * Shape::kGroups);
      empty_v(stage).init(4 * Shape::kGroups);
    }
    fence_barrier_init();
  }
};

// With kLazyMax the maximum of a tile is not computed unless a thread's sum of P reaches this: 2^14 keeps every P inside
// float16's range, 2^64 inside bfloat16's and keeps row sums and P V inside float32's.
template <class Element>
constexpr float kLazyLimit = 16384.0f;
template <>
constexpr float kLazyLimit<bfloat16_t> = 18446744073709551616.0f;

// Online softmax whose rescale of the output waits until the product that is adding to it has finished.
template <class Traits>
struct DeferredSoftmax {
  float row_max[2] = {-infinity(), -infinity()};  // of scores, in their own unit; -inf: no key yet
  float row_sum[2] = {0.0f, 0.0f};                // this thread's share
  float reference[2] = {0.0f, 0.0f};              // what probability() subtracts; finite
  float factor[2];                                // of the last raise

  // Take in the maxima of one tile; true when the output must be multiplied by `factor`. Uniform over the warp.
  template <int kTilesN>
  NVRTC_ATTN_DEVICE bool raise(AccTile const (&s)[1][kTilesN], ScoreMap<Traits> const& map) {
    float tile_max[2];
    bool any = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Two chains a row: one warp of a group runs on each scheduler, so latency is hidden inside the thread.
      float x = s[0][0][2 * r];
      float y = s[0][0][2 * r + 1];
#pragma unroll
      for (int n = 1; n < kTilesN; ++n) {
        x = fmaxf(x, s[0][n][2 * r]);
        y = fmaxf(y, s[0][n][2 * r + 1]);
      }
      tile_max[r] = quad_max(fmaxf(x, y));
      any |= (tile_max[r] - row_max[r]) * map.exponent_scale > kRescaleThreshold;  // false for -inf - -inf
    }
    if (!__any_sync(0xffffffffu, any)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float const new_max = fmaxf(row_max[r], tile_max[r]);
      reference[r] = new_max == -infinity() ? 0.0f : map.reference(new_max);
      factor[r] = map.probability(row_max[r], reference[r]);
      row_max[r] = new_max;
      row_sum[r] *= factor[r];
    }
    return true;
  }

  NVRTC_ATTN_DEVICE void add(float2 sums) {
    row_sum[0] += sums.x;
    row_sum[1] += sums.y;
  }

  // Whether every row of the warp has seen a key, so that its reference means something.
  NVRTC_ATTN_DEVICE bool settled() const {
    return !__any_sync(0xffffffffu, row_max[0] == -infinity() || row_max[1] == -infinity());
  }

  // Reduce the sums over the quad: after the last tile.
  NVRTC_ATTN_DEVICE void finish() {
    row_sum[0] = quad_sum(row_sum[0]);
    row_sum[1] = quad_sum(row_sum[1]);
  }

  template <int kTilesD>
  NVRTC_ATTN_DEVICE void rescale(AccTile (&o)[1][kTilesD]) const {
#pragma unroll
    for (int d = 0; d < kTilesD; ++d) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][d][e] *= factor[e >> 1];
    }
  }
};

// 2^x on the FMA units, for x <= 127: the MUFU unit makes 16 exponentials a cycle and multiprocessor, which at head dim 64 is
// as long as both matrix products take. 2^round(x) comes from the exponent bits, the rest from a cubic whose relative error
// of 7.5e-5 is a fraction of what rounding P to 16 bits adds. Below 2^-126 the result is some tiny positive number; NaN stays.
NVRTC_ATTN_DEVICE float polynomial_exp2(float x) {
  asm("max.NaN.f32 %0, %0, 0fC2FC0000;" : "+f"(x));  // -126
  constexpr float kRound = 12582912.0f + 127.0f;     // adding it leaves round(x) + 127 in the low bits
  float const shifted = x + kRound;
  float const f = x - (shifted - kRound);
  float const p = fmaf(fmaf(fmaf(0.0551716691f, f, 0.242611122f), f, 0.693260985f), f, 0.999928074f);
  return p * __uint_as_float(__float_as_uint(shifted) << 23);
}

// Which of the score columns' exponentials are polynomials: kEighths of every eight tiles of 8 columns, spread evenly.
template <int kEighths>
constexpr bool is_polynomial(int n) {
  return n * kEighths % 8 < kEighths;
}

// What turns a tile of raw products into masked scores, and scores into probabilities.
template <class Traits>
struct ScoreTile {
  using Bias = typename Traits::Bias;
  ScoreMap<Traits> const& map;
  PositionMask<Traits::kBand> const& mask;
  ScoreTensor<Bias const> const& bias;
  ScoreTensor<unsigned char const> const& byte_mask;
  Dropout const& dropout;
  int row0;  // first row of the warp-group
  int i;     // this thread's first row; the other is i + 8
  int lane;

  template <int kTilesN>
  NVRTC_ATTN_DEVICE void finish(AccTile (&s)[1][kTilesN], int n0) const {
    int const j0 = n0 + 2 * (lane & 3);
    if constexpr (kMapsScores<Traits> || Traits::kMask) {
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
        map_scores<Traits>(s[0][n], map);
        if constexpr (Traits::kHasBias) add_bias(s[0][n], bias, i, j0 + 8 * n, mask.len_q, mask.len_k);
        if constexpr (Traits::kMask) apply_byte_mask(s[0][n], byte_mask, i, j0 + 8 * n, mask.len_q, mask.len_k);
      }
    }
    if (!mask.keeps_tile(row0, 64, n0, 8 * kTilesN)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Columns of this tile, counted from the thread's first, that the row keeps: [low, high).
        int high = mask.len_k - j0;
        if constexpr (Traits::kBand) high = min(high, i + 8 * r + mask.high + 1 - j0);
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          if (8 * n >= high) s[0][n][2 * r] = -infinity();
          if (8 * n + 1 >= high) s[0][n][2 * r + 1] = -infinity();
        }
        if constexpr (Traits::kBand) {
          if (mask.low > -kFarAway) {
            int const low = i + 8 * r + mask.low - j0;
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) {
              if (8 * n < low) s[0][n][2 * r] = -infinity();
              if (8 * n + 1 < low) s[0][n][2 * r + 1] = -infinity();
            }
          }
        }
      }
    }
  }

  // s -> P in place; this thread's sums of P before dropout.
  template <int kTilesN>
  NVRTC_ATTN_DEVICE float2 exponentiate(AccTile (&s)[1][kTilesN], DeferredSoftmax<Traits> const& softmax, int n0) const {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float const reference = softmax.reference[e >> 1];
        float p;
        if (is_polynomial<Traits::kPolyExp>(n)) {
          float const x = s[0][n][e];
          p = polynomial_exp2(kMapsScores<Traits> ? (x - reference) * map.exponent_scale
                                                  : fmaf(x, map.exponent_scale, -reference));
        } else {
          p = map.probability(s[0][n][e], reference);
        }
        sum[e] += p;
        s[0][n][e] = p;
      }
    }
    if constexpr (Traits::kDropout) {
#pragma unroll
      for (int pair = 0; pair < kTilesN / 2; ++pair) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          unsigned const keep = dropout.keep_bits(i + 8 * r, n0 + 16 * pair, lane);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float& p = s[0][2 * pair + (c >> 1)][2 * r + (c & 1)];
            p = (keep >> c) & 1 ? p : 0.0f;  // the multiplier waits for the normalisation
          }
        }
      }
    }
    return make_float2(sum[0] + sum[1], sum[2] + sum[3]);
  }
};

// P as the left operand of P V.
template <class Element, int kTilesN>
NVRTC_ATTN_DEVICE void pack_probabilities(FragmentA<Element> (&p)[kTilesN / 2], AccTile const (&s)[1][kTilesN]) {
#pragma unroll
  for (int step = 0; step < kTilesN / 2; ++step) p[step] = accumulator_as_a<Element>(s[0][2 * step], s[0][2 * step + 1]);
}

// s = Q K^T once more, for one warp and without the warp-group: the rare tile whose maxima must be known after all. q and k are
// shared addresses of the warp's first query row and of the key tile.
template <class Shape, int kHeadDim>
NVRTC_ATTN_DEVICE void recompute_scores(AccTile (&s)[1][Shape::kTilesN], unsigned q, unsigned k, int lane) {
  using Element = typename Shape::Element;
#pragma unroll
  for (int n = 0; n < Shape::kTilesN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[0][n][e] = 0.0f;
  }
  int const swizzle = lane & 7;  // of the rows that this lane addresses
  unsigned const q_row = q + (lane & 15) * kSlabRowBytes;
  unsigned const k_row = k + ((lane & 7) + (lane >> 4) * 8) * kSlabRowBytes;
#pragma unroll 1
  for (int step = 0; step < kHeadDim / 16; ++step) {
    int const slab = step / 4;
    int const chunk = step % 4 * 2;
    FragmentA<Element> a;
    ldmatrix_x4(q_row + slab * Shape::kSlabQ + (((chunk + (lane >> 4)) ^ swizzle) << 4), a.x[0], a.x[1], a.x[2], a.x[3]);
    unsigned const k_address = k_row + slab * Shape::kSlabK + (((chunk + (lane >> 3 & 1)) ^ swizzle) << 4);
#pragma unroll
    for (int pair = 0; pair < Shape::kTilesN / 2; ++pair) {
      FragmentB<Element> b[2];
      ldmatrix_x4(k_address + pair * 16 * kSlabRowBytes, b[0].x[0], b[0].x[1], b[1].x[0], b[1].x[1]);
      mma<Element, false>(s[0][2 * pair], a, b[0]);
      mma<Element, false>(s[0][2 * pair + 1], a, b[1]);
    }
  }
}

// Thread t of a quad gives word k to thread k and receives its own from all four, in order: a 4 x 4 transpose.
NVRTC_ATTN_DEVICE uint4 transpose_quad(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3, int t) {
  bool const odd = t & 1;
  bool const upper = t & 2;
  // Neighbours: an even thread keeps words 0 and 2, an odd one 1 and 3.
  uint32_t const got0 = __shfl_xor_sync(0xffffffffu, odd ? w0 : w1, 1);
  uint32_t const got1 = __shfl_xor_sync(0xffffffffu, odd ? w2 : w3, 1);
  uint32_t const a0 = odd ? got0 : w0, a1 = odd ? w1 : got0;  // the lower half's word of the pair's two threads
  uint32_t const b0 = odd ? got1 : w2, b1 = odd ? w3 : got1;
  uint32_t const far0 = __shfl_xor_sync(0xffffffffu, upper ? a0 : b0, 2);
  uint32_t const far1 = __shfl_xor_sync(0xffffffffu, upper ? a1 : b1, 2);
  return upper ? make_uint4(far0, far1, b0, b1) : make_uint4(a0, a1, far0, far1);
}

// Normalise and write out and lse of this warp's 16 rows. Whole sectors: four threads of a row write 64 bytes.
template <class Traits, int kTilesD>
NVRTC_ATTN_DEVICE void write_rows(AccTile const (&o)[1][kTilesD], DeferredSoftmax<Traits> const& softmax,
                                  ScoreMap<Traits> const& map, ForwardParams const& params, int b, int h, int batch_index,
                                  int q_row0, int len_q, int i, int lane) {
  using Element = typename Traits::Element;
  int const t = lane & 3;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int const row = i + 8 * r;
    bool const valid = row < len_q;
    float const sum = softmax.row_sum[r];
    bool const empty = softmax.row_max[r] == -infinity();
    float const factor = empty ? 0.0f : (Traits::kDropout ? params.dropout_multiplier : 1.0f) / sum;
    if (t == 0 && valid && params.lse != nullptr) {
      float const lse = softmax.row_max[r] * (map.exponent_scale * kLn2) + __logf(sum);
      *lse_row(params, b, h, q_row0, row) = empty ? params.lse_empty : lse;
    }
    Element* const to = reinterpret_cast<Element*>(params.out) + index_t(batch_index) * params.out_stride_b +
                        index_t(h) * params.out_stride_h + (index_t(q_row0) + row) * params.out_stride_m + 8 * t;
#pragma unroll
    for (int d = 0; d < kTilesD; d += 4) {
      uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (d + k < kTilesD) w[k] = pack2<Element>(o[0][d + k][2 * r] * factor, o[0][d + k][2 * r + 1] * factor);
      }
      uint4 const words = transpose_quad(w[0], w[1], w[2], w[3], t);
      if (valid && 8 * (d + t) < params.head_dim_v) *reinterpret_cast<uint4*>(to + 8 * d) = words;
    }
  }
}

// The loading warp. All lanes follow the schedule, one issues.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void load_tiles(HopperForwardParams const& params, ForwardBarriers<Shape> const& barriers, unsigned smem) {
  bool const issuer = threadIdx.x == 0;
  if (issuer) {
    prefetch_tensor_map(params.tensor_map_q);
    prefetch_tensor_map(params.tensor_map_k);
    prefetch_tensor_map(params.tensor_map_v);
  }
  unsigned const sK = smem + Shape::kBytesQ;
  unsigned const sV = sK + Shape::kStages * Shape::kBytesK;
  RingPosition<Shape::kStages> k_slot, v_slot;
  unsigned q_parity = 0;
  TileScheduler<Traits::kBand> scheduler(params);
  WorkTile tile;
  while (scheduler.next(tile)) {
    if (Traits::kVarlen && tile.b == params.batch) continue;
    SeqlenInfo<Traits::kVarlen, Traits::kSequsedK> const seqlen(params, tile.b);
    int const m0 = tile.m_block * Shape::kBlockM;
    if (m0 >= seqlen.len_q) continue;
    PositionMask<Traits::kBand> const mask(params, seqlen.len_q, seqlen.len_k);
    int first, last;
    mask.template key_tiles<Shape::kBlockN>(m0, Shape::kBlockM, first, last);
    if (first >= last) continue;
    // Expanded (stride 0) dims have size 1 in the tensor maps.
    int const h_kv = uniform_quotient(tile.h, params.heads_per_group);
    int const q_h = params.q_stride_h == 0 ? 0 : tile.h;
    int const q_b = params.q_stride_b == 0 ? 0 : seqlen.batch_index;
    int const k_h = params.k_stride_h == 0 ? 0 : h_kv;
    int const k_b = params.k_stride_b == 0 ? 0 : seqlen.batch_index;
    int const v_h = params.v_stride_h == 0 ? 0 : h_kv;
    int const v_b = params.v_stride_b == 0 ? 0 : seqlen.batch_index;
    auto load_k = [&](int n) {
      Mbarrier const full = barriers.full_k(k_slot.stage);
      barriers.empty_k(k_slot.stage).wait(k_slot.parity ^ 1);
      if (issuer) {
        full.arrive_and_expect(Shape::kBytesK);
#pragma unroll
        for (int slab = 0; slab < Shape::kSlabsQ; ++slab) {
          load_box(sK + k_slot.stage * Shape::kBytesK + slab * Shape::kSlabK, params.tensor_map_k, full.address,
                   slab * kSlabColumns, seqlen.k_row0 + n * Shape::kBlockN, k_h, k_b, kEvictLast);
        }
      }
      k_slot.advance();
    };
    auto load_v = [&](int n) {
      Mbarrier const full = barriers.full_v(v_slot.stage);
      barriers.empty_v(v_slot.stage).wait(v_slot.parity ^ 1);
      if (issuer) {
        full.arrive_and_expect(Shape::kBytesV);
#pragma unroll
        for (int slab = 0; slab < Shape::kSlabsV; ++slab) {
          load_box(sV + v_slot.stage * Shape::kBytesV + slab * Shape::kSlabK, params.tensor_map_v, full.address,
                   slab * kSlabColumns, seqlen.k_row0 + n * Shape::kBlockN, v_h, v_b, kEvictLast);
        }
      }
      v_slot.advance();
    };
    // In the order of use: a consumer asks for the K of the next tile before the V of this one.
    load_k(last - 1);
    barriers.empty_q().wait(q_parity ^ 1);
    if (issuer) {
      barriers.full_q().arrive_and_expect(Shape::kBytesQ);
#pragma unroll
      for (int slab = 0; slab < Shape::kSlabsQ; ++slab) {
        load_box(smem + slab * Shape::kSlabQ, params.tensor_map_q, barriers.full_q().address, slab * kSlabColumns,
                 seqlen.q_row0 + m0, q_h, q_b, kEvictFirst);
      }
    }
    q_parity ^= 1;
#pragma unroll 1
    for (int n = last - 2; n >= first; --n) {
      load_k(n);
      load_v(n + 1);
    }
    load_v(first);
  }
}

// One consumer warp-group.
template <class Traits, class Shape>
NVRTC_ATTN_DEVICE void consume_tiles(HopperForwardParams const& params, ForwardBarriers<Shape> const& barriers,
                                     unsigned char* smem_pointer, unsigned smem, int group) {
  using Element = typename Shape::Element;
  using Bias = typename Traits::Bias;
  constexpr int kBlockN = Shape::kBlockN;
  int const tid = int(threadIdx.x) - 128;
  int const lane = tid & 31;
  int const warp_row0 = 64 * group + 16 * ((tid >> 5) & 3);
  unsigned const sK = smem + Shape::kBytesQ;
  unsigned const sV = sK + Shape::kStages * Shape::kBytesK;
  uint64_t const q_operand = descriptor_k_major(smem + group * 64 * kSlabRowBytes);
  uint64_t const k_operand = descriptor_k_major(sK);
  uint64_t const v_operand = descriptor_mn_major(sV, Shape::kSlabK);

  // Turns: the last group lets the first one start.
  constexpr bool kTurns = Traits::kPingPong && Shape::kGroups > 1;
  auto wait_turn = [&] {
    if constexpr (kTurns) named_barrier_sync(1 + group, 256);
  };
  auto pass_turn = [&] {
    if constexpr (kTurns) named_barrier_arrive(1 + (group + 1 == Shape::kGroups ? 0 : group + 1), 256);
  };
  if (kTurns && group == Shape::kGroups - 1) pass_turn();

  RingPosition<Shape::kStages> k_slot, v_slot;
  auto release = [&](Mbarrier const& barrier) {
    if (lane == 0) barrier.arrive();
  };
  auto start_scores = [&](AccTile(&s)[1][Shape::kTilesN]) {
    pin_registers(s);
    begin_products();
    start_product_abt<Element, Shape::kBlockM, Traits::kHeadDim>(s, q_operand,
                                                                 k_operand + k_slot.stage * (Shape::kBytesK >> 4));
    commit_products();
  };

  unsigned q_parity = 0;
  TileScheduler<Traits::kBand> scheduler(params);
  WorkTile tile;
  while (scheduler.next(tile)) {
    if constexpr (Traits::kVarlen) {
      if (tile.b == params.batch) {  // the virtual sequence of all tokens outside the others
        zero_rows_of_no_sequence<Element, Shape::kConsumers>(params, tile.h, tile.m_block, params.num_m_blocks, tid);
        continue;
      }
    }
    SeqlenInfo<Traits::kVarlen, Traits::kSequsedK> const seqlen(params, tile.b);
    int const len_q = seqlen.len_q;
    int const m0 = tile.m_block * Shape::kBlockM;
    pad_lse<Shape::kConsumers>(params, tile.b, tile.h, len_q, m0, Shape::kBlockM, tile.m_block == params.num_m_blocks - 1,
                               tid);
    if (m0 >= len_q) continue;
    PositionMask<Traits::kBand> const mask(params, len_q, seqlen.len_k);
    int first, last;
    mask.template key_tiles<kBlockN>(m0, Shape::kBlockM, first, last);

    ScoreMap<Traits> const map(params);
    Dropout const dropout = Traits::kDropout ? Dropout(params, tile.b, tile.h) : Dropout();
    ScoreTensor<Bias const> const bias(reinterpret_cast<Bias const*>(params.bias), tile.b, tile.h, params.bias_stride_b,
                                       params.bias_stride_h, params.bias_stride_m, params.bias_stride_n);
    ScoreTensor<unsigned char const> const byte_mask(params.mask, tile.b, tile.h, params.mask_stride_b,
                                                     params.mask_stride_h, params.mask_stride_m, params.mask_stride_n);
    int const i = m0 + warp_row0 + (lane >> 2);
    ScoreTile<Traits> const scores{map, mask, bias, byte_mask, dropout, m0 + 64 * group, i, lane};

    DeferredSoftmax<Traits> softmax;
    AccTile o[1][Shape::kTilesD];
#pragma unroll
    for (int d = 0; d < Shape::kTilesD; ++d) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][d][e] = 0.0f;
    }
    if (first < last) {
      AccTile s[1][Shape::kTilesN];
      FragmentA<Element> p[Shape::kStepsN];

      int n = last - 1;
      if constexpr (Traits::kVarlen || Traits::kSequsedK) {
        // Rows of V beyond the sequence belong to another one or to nobody: they may hold NaN, which 0 * NaN would spread.
        // (Beyond the tensor the copy engine delivers zeros.)
        int const valid_rows = seqlen.len_k - n * kBlockN;
        if (valid_rows < kBlockN) {
          barriers.full_v(v_slot.stage).wait(v_slot.parity);
          unsigned char* const tile_v = smem_pointer + (sV - smem) + v_slot.stage * Shape::kBytesV;
          for (int c = tid; c < Shape::kSlabsV * (kBlockN - valid_rows) * 8; c += Shape::kConsumers) {
            int const row = valid_rows + c / (8 * Shape::kSlabsV);
            int const chunk = c % (8 * Shape::kSlabsV);
            *reinterpret_cast<uint4*>(tile_v + (chunk / 8) * Shape::kSlabK + row * kSlabRowBytes + chunk % 8 * 16) =
                make_uint4(0, 0, 0, 0);
          }
          fence_async_proxy();
          named_barrier_sync(Shape::kGroups + 1, Shape::kConsumers);
        }
      }
      if constexpr (Traits::kBand) {
        // Tiles above this group's diagonal: let them pass. One is always computed, so that all groups take equal turns.
        int const visible = (m0 + 64 * group + 63 + mask.high) / kBlockN;
#pragma unroll 1
        for (; n > first && n > visible; --n) {
          barriers.full_k(k_slot.stage).wait(k_slot.parity);
          release(barriers.empty_k(k_slot.stage));
          k_slot.advance();
          barriers.full_v(v_slot.stage).wait(v_slot.parity);
          release(barriers.empty_v(v_slot.stage));
          v_slot.advance();
          wait_turn();
          pass_turn();
        }
      }

      barriers.full_q().wait(q_parity);
      q_parity ^= 1;
      barriers.full_k(k_slot.stage).wait(k_slot.parity);
      start_scores(s);
      wait_products<0>();
      pin_registers(s);
      release(barriers.empty_k(k_slot.stage));
      k_slot.advance();
      scores.finish(s, n * kBlockN);
      softmax.raise(s, map);
      softmax.add(scores.exponentiate(s, softmax, n * kBlockN));
      pack_probabilities<Element>(p, s);
      bool settled = softmax.settled();

      if (n > first) barriers.full_k(k_slot.stage).wait(k_slot.parity);
#pragma unroll 1
      for (--n; n >= first; --n) {
        wait_turn();
        start_scores(s);
        barriers.full_v(v_slot.stage).wait(v_slot.parity);
        pin_registers(o);
        pin_registers(p);
        begin_products();
        start_product_ab<Element>(o, p, v_operand + v_slot.stage * (Shape::kBytesV >> 4));
        commit_products();
        pass_turn();

        wait_products<1>();
        pin_registers(s);
        int const k_stage = k_slot.stage;
        k_slot.advance();
        bool raised = false;
        bool redo = false;
        float2 sums;
        if constexpr (Traits::kLazyMax) {
          // Probabilities against the old maximum are exact as long as nothing overflows, and their sums tell.
          scores.finish(s, n * kBlockN);
          sums = scores.exponentiate(s, softmax, n * kBlockN);
          redo = __any_sync(0xffffffffu, !settled || !(sums.x < kLazyLimit<Element> && sums.y < kLazyLimit<Element>));
          if (!redo) release(barriers.empty_k(k_stage));
        } else {
          release(barriers.empty_k(k_stage));
          scores.finish(s, n * kBlockN);
          raised = softmax.raise(s, map);
          sums = scores.exponentiate(s, softmax, n * kBlockN);
        }

        // ptxas moves a wait for products ahead of independent arithmetic, and the softmax would run after P V instead of
        // beside it. It does not move it over the loop of an mbarrier wait: this one is for the next tile's keys.
        pin_registers(s);
        if (n > first) barriers.full_k(k_slot.stage).wait(k_slot.parity);
        wait_products<0>();
        pin_registers(o);
        pin_registers(p);
        release(barriers.empty_v(v_slot.stage));
        v_slot.advance();
        if constexpr (Traits::kLazyMax) {
          if (redo) {
            int n0 = n * kBlockN;
            asm volatile("" : "+r"(n0));  // or the compiler keeps the mask's comparisons from above, a register for each
            recompute_scores<Shape, Traits::kHeadDim>(s, smem + warp_row0 * kSlabRowBytes, sK + k_stage * Shape::kBytesK, lane);
            release(barriers.empty_k(k_stage));
            scores.finish(s, n0);
            raised = softmax.raise(s, map);
            settled = softmax.settled();
            sums = scores.exponentiate(s, softmax, n0);
          }
        }
        softmax.add(sums);
        if (raised) softmax.rescale(o);
        pack_probabilities<Element>(p, s);
      }
      release(barriers.empty_q());

      barriers.full_v(v_slot.stage).wait(v_slot.parity);
      pin_registers(o);
      pin_registers(p);
      begin_products();
      start_product_ab<Element>(o, p, v_operand + v_slot.stage * (Shape::kBytesV >> 4));
      commit_products();
      softmax.finish();
      wait_products<0>();
      pin_registers(o);
      release(barriers.empty_v(v_slot.stage));
      v_slot.advance();
    }
    write_rows<Traits>(o, softmax, map, params, tile.b, tile.h, seqlen.batch_index, seqlen.q_row0, len_q, i, lane);
  }
}

template <class Traits>
NVRTC_ATTN_DEVICE void forward_hopper(HopperForwardParams const& params) {
  using Shape = HopperShape<Traits>;
  extern __shared__ __align__(1024) unsigned char smem_pointer[];
  unsigned const smem = shared_address(smem_pointer);
  ForwardBarriers<Shape> const barriers{smem + Shape::kBarriers};
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  // A broadcast tells the compiler that the role is uniform over the warp.
  int const warp_group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warp_group == 0) {
    give_registers<Shape::kRegistersProducer>();
    if (threadIdx.x < 32) load_tiles<Traits>(params, barriers, smem);
  } else {
    take_registers<Shape::kRegistersConsumer>();
    consume_tiles<Traits>(params, barriers, smem_pointer, smem, warp_group - 1);
  }
}

}  // namespace nvrtc_attn
