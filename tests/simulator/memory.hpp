// Loads, stores, atomics, cp.async, barriers of blocks and clusters, mbarriers and bulk copies.
namespace simulator {

// space, bytes of an element, 1 if signed + 2 if registers have 64 bits, elements, address (3), registers
OP(
    "ld", BODY {
      int const space = i.x[0], bytes = i.x[1], count = i.x[3];
      each(lanes, [&](int l) {
        uint8_t const* from = memory_at(w, space, address_of(w, i.x + 4, l), l, bytes * count);
        for (int n = 0; n < count; ++n) {
          u64 value = 0;
          std::memcpy(&value, from + n * bytes, size_t(bytes));
          if (i.x[2] & 1 && bytes < 8 && value >> (8 * bytes - 1)) value |= ~0ull << (8 * bytes);
          int const slot = i.x[7 + n];
          if (slot < 0) continue;
          if (i.x[2] & 2) {
            w.reg<u64>(slot)[l] = value;
          } else {
            w.reg<u32>(slot)[l] = u32(value);
          }
        }
      });
      return kNext;
    });
OP(
    "st", BODY {
      int const space = i.x[0], bytes = i.x[1], count = i.x[3];
      each(lanes, [&](int l) {
        uint8_t* to = memory_at(w, space, address_of(w, i.x + 4, l), l, bytes * count);
        for (int n = 0; n < count; ++n) {
          u64 const value = i.x[2] & 2 ? w.reg<u64>(i.x[7 + n])[l] : w.reg<u32>(i.x[7 + n])[l];
          std::memcpy(to + n * bytes, &value, size_t(bytes));
        }
      });
      return kNext;
    });

// d (or -1), space, address (3), count of elements, operands
template <class T, class F>
inline Result atomic(Warp& w, Instr const& i, uint32_t lanes, F f) {
  using Word = typename Cell<T>::Word;
  int const count = i.x[5];
  each(lanes, [&](int l) {
    uint8_t* at = memory_at(w, i.x[1], address_of(w, i.x + 2, l), l, int(sizeof(T)) * count);
    for (int n = 0; n < count; ++n) {
      T old;
      std::memcpy(&old, at + size_t(n) * sizeof(T), sizeof(T));
      T const operand = Cell<T>::get(w.reg<Word>(i.x[6 + n])[l]);
      T const value = T(f(old, operand, l));
      std::memcpy(at + size_t(n) * sizeof(T), &value, sizeof(T));
      if (i.x[0] >= 0) w.reg<Word>(i.x[0])[l] = Cell<T>::put(old);
    }
  });
  return kNext;
}
#define ATOMIC(NAME, T, EXPRESSION) \
  OP("atom." NAME, BODY { return atomic<T>(w, i, lanes, [](T a, T b, int) { return T(EXPRESSION); }); })
#define ATOMICS(T)                                   \
  ATOMIC("add." #T, T, a + b);                       \
  ATOMIC("min." #T, T, std::min(a, b));              \
  ATOMIC("max." #T, T, std::max(a, b));              \
  ATOMIC("inc." #T, T, a >= b ? 0 : a + 1);          \
  ATOMIC("dec." #T, T, a == 0 || a > b ? b : a - 1); \
  ATOMIC("exch." #T, T, b);
ATOMICS(s32)
ATOMICS(u32)
ATOMICS(s64)
ATOMICS(u64)
ATOMIC("exch.b32", u32, b);
ATOMIC("exch.b64", u64, b);
ATOMIC("or.b32", u32, a | b);
ATOMIC("and.b32", u32, a& b);
ATOMIC("xor.b32", u32, a ^ b);
ATOMIC("or.b64", u64, a | b);
ATOMIC("and.b64", u64, a& b);
ATOMIC("add.f32", f32, a + b);
ATOMIC("add.f64", f64, a + b);
template <class T>
inline Result compare_and_swap(Warp& w, Instr const& i, uint32_t lanes) {  // d, space, address (3), 1, expected, new
  return atomic<T>(w, i, lanes, [&](T a, T b, int l) { return a == b ? w.reg<T>(i.x[7])[l] : a; });
}
OP("atom.cas.b32", BODY { return compare_and_swap<u32>(w, i, lanes); });
OP("atom.cas.b64", BODY { return compare_and_swap<u64>(w, i, lanes); });
template <class From, class To>
inline Result add_halves(Warp& w, Instr const& i, uint32_t lanes, From from, To to) {
  return atomic<u32>(w, i, lanes, [&](u32 a, u32 b, int) {
    return halves(a, b, 0, from, to, [](f32 x, f32 y, f32) { return x + y; });
  });
}
OP("atom.add.bf16x2", BODY { return add_halves(w, i, lanes, from_bf16, to_bf16); });
OP("atom.add.f16x2", BODY { return add_halves(w, i, lanes, from_f16, to_f16); });

// ----------------------------------------------------------------------------------------------------------- cp.async
inline void copy_now(Copy const& copy) {
  std::memcpy(copy.to, copy.from, size_t(copy.valid));
  std::memset(copy.to + copy.valid, 0, size_t(copy.bytes - copy.valid));
}
// to (3), from (3), bytes, slot of the bytes that exist or -1
OP(
    "cp.async", BODY {
      each(lanes, [&](int l) {
        int const bytes = i.x[6];
        int const valid = i.x[7] < 0 ? bytes : int(w.reg<u32>(i.x[7])[l]);
        if (valid > bytes) fail("cp.async of more than its size");
        uint8_t* to = shared_at(w, address_of(w, i.x, l), bytes);
        u64 const from = address_of(w, i.x + 3, l);
        Copy const copy{to, valid ? global_at(from, bytes) : nullptr, bytes, valid};
        // Until it is waited for, the memory is neither what it was nor what it will be.
        if (w.machine->chance()) std::memset(to, 0xff, size_t(bytes));
        w.open_copies.push_back(copy);
      });
      return kNext;
    });
OP(
    "cp.async.commit", BODY {
      w.copy_groups.push_back(std::move(w.open_copies));
      w.open_copies.clear();
      return (void)i, (void)lanes, kNext;
    });
OP(
    "cp.async.wait", BODY {
      for (; int(w.copy_groups.size()) > i.x[0]; w.copy_groups.pop_front()) {
        for (Copy const& copy : w.copy_groups.front()) copy_now(copy);
      }
      return (void)lanes, kNext;
    });
OP(
    "cp.async.wait_all", BODY {
      for (; !w.copy_groups.empty(); w.copy_groups.pop_front()) {
        for (Copy const& copy : w.copy_groups.front()) copy_now(copy);
      }
      for (Copy const& copy : w.open_copies) copy_now(copy);
      w.open_copies.clear();
      return (void)i, (void)lanes, kNext;
    });

// ----------------------------------------------------------------------------------------------- barriers of a block
// which (slot), threads (slot or -1)
inline int expected_threads(Warp& w, Instr const& i, int lane) {
  if (i.x[1] >= 0) return int(w.reg<u32>(i.x[1])[lane]);
  int alive = 0;
  for (Warp& other : w.block->warps) alive += other.alive ? kLanes : 0;
  return alive;
}
inline void arrive(Barrier& barrier, int threads, int expected) {
  barrier.arrived += threads;
  if (barrier.arrived > expected) fail("more threads at a barrier than it waits for");
  if (barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
}
OP(
    "bar.arrive",
    BODY {
      int const lane = __builtin_ctz(lanes);
      arrive(w.block->barriers[w.reg<u32>(i.x[0])[lane] & 15], kLanes, expected_threads(w, i, lane));
      return kNext;
    },
    kAligned);
OP(
    "bar.sync",
    BODY {
      int const lane = __builtin_ctz(lanes);
      Barrier& barrier = w.block->barriers[w.reg<u32>(i.x[0])[lane] & 15];
      int& since = w.barrier_generation[w.reg<u32>(i.x[0])[lane] & 15];
      if (w.at_barrier) {
        if (barrier.generation == since) return kStall;
        w.at_barrier = false;
        return kNext;
      }
      since = barrier.generation;
      arrive(barrier, kLanes, expected_threads(w, i, lane));
      if (barrier.generation != since) return kNext;
      w.at_barrier = true;
      return kStall;
    },
    kAligned);
OP(
    "barrier.cluster.arrive",
    BODY {
      Cluster& cluster = *w.block->cluster;
      w.cluster_generation = cluster.barrier.generation;
      arrive(cluster.barrier, __builtin_popcount(lanes), cluster.living);
      return (void)i, kNext;
    },
    kAligned);
OP(
    "barrier.cluster.wait",
    BODY {
      return (void)i, (void)lanes, w.block->cluster->barrier.generation == w.cluster_generation ? kStall : kNext;
    },
    kAligned);
OP(
    "mapa", BODY {
      each(lanes, [&](int l) {
        u32 const a = w.reg<u32>(i.x[1])[l], offset = a & ((1u << kRankShift) - 1);
        w.reg<u32>(i.x[0])[l] = offset | (w.reg<u32>(i.x[2])[l] + 1) << kRankShift;
      });
      return kNext;
    });

// ---------------------------------------------------------------------------------------------------------- mbarriers
struct Mbarrier {
  uint64_t pending : 20, expected : 20, phase : 1, set_up : 1;
  int64_t bytes : 22;  // that are to come
};
static_assert(sizeof(Mbarrier) == 8, "");

template <class F>
inline void with_mbarrier(uint8_t* at, F f) {
  Mbarrier x;
  std::memcpy(&x, at, 8);
  if (!x.set_up) fail("an mbarrier that was not initialised");
  f(x);
  if (x.pending == 0 && x.bytes == 0) {
    x.phase ^= 1;
    x.pending = x.expected;
  }
  std::memcpy(at, &x, 8);
}
OP(
    "mbarrier.init", BODY {
      each(lanes, [&](int l) {
        u32 const count = w.reg<u32>(i.x[3])[l];
        Mbarrier const x{count, count, 0, 1, 0};
        std::memcpy(shared_at(w, address_of(w, i.x, l), 8), &x, 8);
      });
      return kNext;
    });
OP(
    "mbarrier.inval", BODY {
      each(lanes, [&](int l) { std::memset(shared_at(w, address_of(w, i.x, l), 8), 0xff, 8); });
      return kNext;
    });
// address (3), bytes that are expected (slot or -1), arrivals (slot or -1; -2 for none)
OP(
    "mbarrier.arrive", BODY {
      each(lanes, [&](int l) {
        with_mbarrier(shared_at(w, address_of(w, i.x, l), 8), [&](Mbarrier& x) {
          if (i.x[3] >= 0) x.bytes += int(w.reg<u32>(i.x[3])[l]);
          u32 const count = i.x[4] == -2 ? 0 : i.x[4] == -1 ? 1 : w.reg<u32>(i.x[4])[l];
          if (count > x.pending) fail("more arrivals at an mbarrier than it waits for");
          x.pending -= count;
        });
      });
      return kNext;
    });
// p, address (3), parity (slot); whether it may be answered with no
inline bool has_passed(Warp& w, Instr const& i, int l) {
  Mbarrier x;
  std::memcpy(&x, shared_at(w, address_of(w, i.x + 1, l), 8), 8);
  if (!x.set_up) fail("an mbarrier that was not initialised");
  return x.phase != (w.reg<u32>(i.x[4])[l] & 1);
}
OP(
    "mbarrier.try_wait", BODY {
      uint32_t passed = 0;
      each(lanes, [&](int l) { passed |= uint32_t(has_passed(w, i, l)) << l; });
      if (passed == lanes) return logic(w, i, lanes, kAll);
      // Hardware gives up after some time, too.
      return w.machine->random() % 8 ? kStall : logic(w, i, lanes, passed);
    });
OP(
    "mbarrier.test_wait", BODY {
      uint32_t passed = 0;
      each(lanes, [&](int l) { passed |= uint32_t(has_passed(w, i, l)) << l; });
      return logic(w, i, lanes, passed);
    });
inline void complete(uint8_t* mbarrier, int bytes) {
  with_mbarrier(mbarrier, [&](Mbarrier& x) { x.bytes -= bytes; });
}

// -------------------------------------------------------------------------------------------------------- bulk copies
inline TensorMap const& map_at(Warp& w, u64 address, uint8_t*& data) {
  u64 words[2];
  std::memcpy(words, global_at(address & ~kGenericShared, 64), 16);
  auto const found = w.machine->maps.find(words[1]);
  if (found == w.machine->maps.end()) fail("a tensor map that was never encoded");
  data = reinterpret_cast<uint8_t*>(words[0]);
  return found->second;
}

inline u64 swizzled(u64 address, int bits) { return address ^ ((address >> 7 & ((1u << bits) - 1)) << 4); }

// Calls f(element of the box in shared memory, element in global memory or null) for runs of the first dimension.
template <class F>
inline void for_rows(TensorMap const& map, uint8_t* data, int const* at, F f) {
  u64 rows = 1;
  for (int d = 1; d < map.rank; ++d) rows *= map.box[d];
  for (u64 row = 0; row < rows; ++row) {
    u64 rest = row;
    uint8_t* place = data;
    bool inside = true;
    for (int d = 1; d < map.rank; ++d) {
      int64_t const c = at[d] + int64_t(rest % map.box[d]);
      rest /= map.box[d];
      inside = inside && c >= 0 && c < int64_t(map.dims[d]);
      place += c * int64_t(map.strides[d]);
    }
    f(row, inside ? place : nullptr);
  }
}
inline int box_bytes(TensorMap const& map) {
  int bytes = map.element_bytes;
  for (int d = 0; d < map.rank; ++d) bytes *= int(map.box[d]);
  return bytes;
}

// Elements of a row come in pieces of 16 bytes, since that is what a swizzle moves.
template <class F>
inline void for_pieces(TensorMap const& map, uint8_t* data, int const* at, u64 smem, F f) {
  int const row_bytes = int(map.box[0]) * map.element_bytes;
  for_rows(map, data, at, [&](u64 row, uint8_t* place) {
    for (int b = 0; b < row_bytes; b += map.element_bytes) {
      int64_t const c = at[0] + b / map.element_bytes;
      bool const inside = place != nullptr && c >= 0 && c < int64_t(map.dims[0]);
      f(swizzled(smem + row * u64(row_bytes) + u64(b), map.swizzle_bits),
        inside ? global_at(u64(reinterpret_cast<uintptr_t>(place)) + u64(c * map.element_bytes), map.element_bytes)
               : nullptr);
    }
  });
}

inline void check_box(TensorMap const& map, u64 smem) {
  if (smem % (map.swizzle_bits ? 128u << map.swizzle_bits : 128u) && smem % 128) fail("bulk tensor copy: alignment");
}

// rank, map (3), smem (3), mbarrier (3), blocks of the cluster (slot or -1), coordinates
OP(
    "bulk.tensor.load", BODY {
      each(lanes, [&](int l) {
        Machine& machine = *w.machine;
        uint8_t* data;
        TensorMap const& map = map_at(w, address_of(w, i.x + 1, l), data);
        if (map.rank != i.x[0]) fail("a tensor map of another rank");
        u64 const smem = address_of(w, i.x + 4, l), mbarrier = address_of(w, i.x + 7, l);
        check_box(map, smem);
        std::vector<int> at;
        for (int d = 0; d < map.rank; ++d) at.push_back(int(w.reg<u32>(i.x[11 + d])[l]));
        u32 const blocks = i.x[10] < 0 ? 0 : w.reg<u32>(i.x[10])[l] & 0xffff;
        auto const into = [&w, &map, &machine, data, at](u64 to, u64 who) {
          int const bytes = box_bytes(map);
          shared_at(w, to, 1);
          shared_at(w, to + u64(bytes) - 1, 1);
          auto const fill = [&w, &map, data, at, to, bytes, who] {
            for_pieces(map, data, at.data(), to, [&](u64 place, uint8_t const* from) {
              uint8_t* target = shared_at(w, place, map.element_bytes);
              if (from) {
                std::memcpy(target, from, size_t(map.element_bytes));
              } else {
                std::memset(target, map.nan_fill ? 0xff : 0, size_t(map.element_bytes));
              }
            });
            complete(shared_at(w, who, 8), bytes);
          };
          machine.later(fill);
        };
        if (i.x[10] < 0) {
          into(smem, mbarrier);
        } else {
          u64 const mask = (1u << kRankShift) - 1;
          each(blocks, [&](int rank) {
            u64 const window = u64(rank + 1) << kRankShift;
            into(window | (smem & mask), window | (mbarrier & mask));
          });
        }
      });
      return kNext;
    });

inline void store_later(Warp& w, int lane, std::function<void()> work) {
  w.open_stores.push_back({lane, std::move(work)});
}
// rank, map (3), smem (3), whether it adds, coordinates
OP(
    "bulk.tensor.store", BODY {
      each(lanes, [&](int l) {
        uint8_t* data;
        TensorMap const& map = map_at(w, address_of(w, i.x + 1, l), data);
        if (map.rank != i.x[0]) fail("a tensor map of another rank");
        u64 const smem = address_of(w, i.x + 4, l);
        check_box(map, smem);
        std::vector<int> at;
        for (int d = 0; d < map.rank; ++d) at.push_back(int(w.reg<u32>(i.x[8 + d])[l]));
        bool const adds = i.x[7] != 0;
        store_later(w, l, [&w, &map, data, at, smem, adds] {
          for_pieces(map, data, at.data(), smem, [&](u64 place, uint8_t* to) {
            if (!to) return;
            uint8_t const* from = shared_at(w, place, map.element_bytes);
            if (adds) {
              if (map.element_bytes != 4) fail("a bulk tensor addition of other than float32");
              f32 a, b;
              std::memcpy(&a, to, 4);
              std::memcpy(&b, from, 4);
              a += b;
              std::memcpy(to, &a, 4);
            } else {
              std::memcpy(to, from, size_t(map.element_bytes));
            }
          });
        });
      });
      return kNext;
    });
// smem (3), from: whether it is shared, address (3), bytes (slot), mbarrier (3)
OP(
    "bulk.load", BODY {
      each(lanes, [&](int l) {
        u64 const to = address_of(w, i.x, l), from = address_of(w, i.x + 4, l), who = address_of(w, i.x + 8, l);
        int const bytes = int(w.reg<u32>(i.x[7])[l]);
        if (bytes % 16 || to % 16 || from % 16) fail("a bulk copy of no multiple of 16 bytes");
        uint8_t* target = shared_at(w, to, 1);
        shared_at(w, to + u64(bytes) - 1, 1);
        uint8_t const* source = i.x[3] ? shared_at(w, from, 1) : global_at(from, 16);
        if (!i.x[3]) global_at(from + u64(bytes) - 16, 16);
        uint8_t* mbarrier = shared_at(w, who, 8);
        w.machine->later([=] {
          std::memcpy(target, source, size_t(bytes));
          complete(mbarrier, bytes);
        });
      });
      return kNext;
    });
// to (3), smem (3), bytes (slot), whether it adds float32
OP(
    "bulk.store", BODY {
      each(lanes, [&](int l) {
        u64 const to = address_of(w, i.x, l), from = address_of(w, i.x + 3, l);
        int const bytes = int(w.reg<u32>(i.x[6])[l]);
        if (bytes % 16 || to % 16 || from % 16) fail("a bulk copy of no multiple of 16 bytes");
        uint8_t const* source = shared_at(w, from, 1);
        shared_at(w, from + u64(bytes) - 1, 1);
        uint8_t* target = global_at(to, 16);
        global_at(to + u64(bytes) - 16, 16);
        bool const adds = i.x[7] != 0;
        store_later(w, l, [=] {
          if (!adds) {
            std::memcpy(target, source, size_t(bytes));
            return;
          }
          for (int b = 0; b < bytes; b += 4) {
            f32 x, y;
            std::memcpy(&x, target + b, 4);
            std::memcpy(&y, source + b, 4);
            x += y;
            std::memcpy(target + b, &x, 4);
          }
        });
      });
      return kNext;
    });
OP(
    "bulk.commit", BODY {
      each(lanes, [&](int l) {
        std::vector<BulkStore> own, others;
        for (BulkStore& store : w.open_stores) (store.lane == l ? own : others).push_back(std::move(store));
        w.open_stores = std::move(others);
        w.store_groups[l].push_back(std::move(own));
      });
      return (void)i, kNext;
    });
OP(
    "bulk.wait", BODY {
      each(lanes, [&](int l) {
        for (auto& groups = w.store_groups[l]; int(groups.size()) > i.x[0]; groups.pop_front()) {
          for (BulkStore& store : groups.front()) store.work();
        }
      });
      return kNext;
    });
// address (3), mbarrier (3), bytes of an element, values
OP(
    "st.async", BODY {
      each(lanes, [&](int l) {
        int const bytes = i.x[6], count = i.count - 7;
        uint8_t* to = shared_at(w, address_of(w, i.x, l), bytes * count);
        uint8_t* mbarrier = shared_at(w, address_of(w, i.x + 3, l), 8);
        std::vector<uint8_t> values(size_t(bytes * count));
        for (int n = 0; n < count; ++n) {
          u64 const value = bytes == 8 ? w.reg<u64>(i.x[7 + n])[l] : w.reg<u32>(i.x[7 + n])[l];
          std::memcpy(&values[size_t(n * bytes)], &value, size_t(bytes));
        }
        w.machine->later([=] {
          std::memcpy(to, values.data(), values.size());
          complete(mbarrier, int(values.size()));
        });
      });
      return kNext;
    });

}  // namespace simulator
