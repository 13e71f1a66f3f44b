// A GPU's threads, one warp instruction at a time: state, the order of warps, and what a kernel must not do.
//
// A warp executes an instruction for all lanes that stand at it. Where lanes part, those furthest behind in the text go
// first, and who comes to where others stand goes on with them. Warps take turns in random order (`Machine::seed`), and
// what the hardware does behind a program's back (bulk copies, cp.async) happens at once or as late as is allowed, by
// chance: a wait that is missing shows.
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace simulator {

constexpr int kLanes = 32;
constexpr uint32_t kAll = ~0u;
constexpr int kSlotBytes = 4 * kLanes;  // a 64-bit register takes two slots
constexpr uint32_t kSmemBase = 1024;    // of a block's own shared memory, so that no address is 0
constexpr int kRankShift = 24;          // shared::cluster: the rank of a block in its cluster, plus 1, above this bit
constexpr uint64_t kGenericShared = 1ull << 62, kGenericLocal = 1ull << 61;
constexpr uint32_t kUnwritten = 0x7fedbeefu;  // registers and shared memory before anything is written: NaN in float32

struct Warp;
struct Instr;
enum Result { kNext, kStall };
using Handler = Result (*)(Warp&, Instr const&, uint32_t lanes);
enum Kind : uint8_t { kOrdinary, kBranch, kExit };
// Which lanes must have come: any, all that live, or those of the operand that names the members.
enum Together : uint8_t { kAlone, kAligned, kMembers };

struct Op {
  std::string name;
  Handler run;
  Together together;
};

inline std::vector<Op>& table() {
  static std::vector<Op> ops;
  return ops;
}
struct Register {
  Register(char const* name, Handler run, Together together = kAlone) { table().push_back({name, run, together}); }
};
#define SIMULATOR_JOIN2(a, b) a##b
#define SIMULATOR_JOIN(a, b) SIMULATOR_JOIN2(a, b)
#define OP(...) static Register const SIMULATOR_JOIN(register_, __COUNTER__)(__VA_ARGS__)
#define BODY [](Warp& w, Instr const& i, uint32_t lanes)->Result

struct Instr {
  Handler run = nullptr;
  Kind kind = kOrdinary;
  Together together = kAlone;
  bool negated = false;
  int guard = -1;  // a predicate
  int target = 0;  // of a branch
  int line = 0;    // of the text
  int const* x = nullptr;
  int count = 0;
};

struct TensorMap {
  int element_bytes, rank;
  uint64_t dims[5], strides[5];  // strides in bytes; that of the first is the element's size
  uint32_t box[5], steps[5];
  int swizzle_bits;  // 16-byte chunks that are exchanged: 0, 1, 2 or 3 bits of their number
  bool nan_fill;
};

struct Program {
  std::vector<Instr> code;
  std::vector<int> pool;
  std::vector<uint64_t> constants;  // (slot, width in slots, value) thrice
  int slots = 0, predicates = 0;
  int special[16];  // slots of special registers, -1 where they are not read
  int static_smem = 0, local_bytes = 0;
  int cluster = 1;
};
enum Special { kTidX, kCtaidX, kNctaidX, kNtidX, kClusterRank, kClusterSize, kLaneId, kWarpId, kSmId, kZero };

struct Block;
struct Machine;

struct Group {
  int pc;
  uint32_t lanes;
  bool stalled = false;  // until the warp is asked again
  bool waiting = false;  // for lanes of the warp that are elsewhere
};

struct Copy {  // of cp.async
  uint8_t* to;
  uint8_t const* from;
  int bytes, valid;
};
// An operand of wgmma in shared memory: what its rows were, to be seen unchanged when it is waited for. Its rows are rows
// of the result (A) or columns (B).
struct Checked {
  std::function<std::vector<uint64_t>()> rows;
  std::vector<uint64_t> were;
  bool is_a;
  int line;
  int const* registers;  // of the result
  int count;
};
struct BulkStore {
  int lane;
  std::function<void()> work;
};

struct Warp {
  Block* block = nullptr;
  Machine* machine = nullptr;
  int index = 0;
  std::vector<uint32_t> cells;
  std::vector<uint32_t> predicates;
  std::vector<Group> groups;
  uint32_t alive = kAll;
  uint32_t carry = 0;
  std::vector<uint8_t> local;
  std::vector<Copy> open_copies;
  std::deque<std::vector<Copy>> copy_groups;
  std::vector<Checked> open_wgmma;
  std::deque<std::vector<Checked>> wgmma_groups;  // that nobody of the warp group has waited for
  int wgmma_committed = 0;
  std::vector<BulkStore> open_stores;
  std::deque<std::vector<BulkStore>> store_groups[kLanes];
  int cluster_generation = 0;
  int barrier_generation[16];
  bool at_barrier = false;

  template <class T>
  T* reg(int slot) {
    return reinterpret_cast<T*>(cells.data() + size_t(slot) * kLanes);
  }
};

struct Barrier {
  int arrived = 0, generation = 0;
};

struct Cluster;
struct Block {
  Cluster* cluster = nullptr;
  int rank = 0, index = 0;
  std::vector<uint8_t> smem;
  std::vector<Warp> warps;
  Barrier barriers[16];
  bool waited = false;  // for the launch ahead
  int threads() const { return int(warps.size()) * kLanes; }
};
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  Barrier barrier;
  int living = 0;  // threads
};

struct Event {
  uint64_t due, order;
  std::function<void()> work;
  bool operator<(Event const& other) const { return due != other.due ? due > other.due : order > other.order; }
};

struct Machine {
  Program const& program;
  std::mt19937_64 random;
  int grid, threads, dynamic_smem, resident;
  uint8_t* params;
  std::unordered_map<uint64_t, TensorMap> const& maps;
  uint64_t limit;  // instructions of warps
  std::priority_queue<Event> events;
  uint64_t now = 0, ordered = 0;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::unique_ptr<Cluster>> spare;  // that have ended: their registers are used again as they are
  Instr const* at = nullptr;                    // for messages
  std::string notes;
  Warp* who = nullptr;
  int waited = 0;  // blocks that have waited for the launch ahead

  bool chance() { return random() & 1; }
  void later(std::function<void()> work) {
    if (random() % 4 == 0) return work();
    events.push({now + random() % 3000, ordered++, std::move(work)});
  }
  bool happen(bool all) {  // events whose time has come; the next one, if nothing else can
    bool any = false;
    while (!events.empty() && (events.top().due <= now || (all && !any))) {
      auto work = events.top().work;
      now = std::max(now, events.top().due);
      events.pop();
      work();
      any = true;
    }
    return any;
  }
};

[[noreturn]] inline void fail(std::string const& text) { throw std::runtime_error(text); }

// ------------------------------------------------------------------------------------------------------------- memory

inline uint8_t* shared_at(Warp& w, uint64_t address, int bytes) {
  uint32_t const rank = uint32_t(address) >> kRankShift;
  Block* block = w.block;
  if (rank > 0) {
    if (rank > block->cluster->blocks.size()) fail("shared::cluster address of no block of the cluster");
    block = block->cluster->blocks[rank - 1].get();
  }
  uint64_t const offset = (address & ((1u << kRankShift) - 1)) - uint64_t(kSmemBase);
  if (address >> 32 || offset + uint64_t(bytes) > block->smem.size() || offset > block->smem.size()) {
    fail("shared memory " + std::to_string(int64_t(offset)) + " of " + std::to_string(block->smem.size()) + " bytes");
  }
  if (address % uint64_t(std::min(bytes, 16))) fail("shared memory at an address that is no multiple of its size");
  return block->smem.data() + offset;
}

// Memory that kernels may read and write: end of a region -> its begin. Everything, while it is empty.
inline std::map<uint64_t, uint64_t>& regions() {
  static std::map<uint64_t, uint64_t> known;
  return known;
}
inline std::pair<uint64_t, uint64_t> params_region;

inline uint8_t* global_at(uint64_t address, int bytes) {
  if (address < 1 << 16 || address >> 48) fail("global memory at " + std::to_string(address));
  bool const of_params = address >= params_region.first && address < params_region.second;
  if (!regions().empty() && !of_params) {
    auto const found = regions().upper_bound(address);
    if (found == regions().end() || address < found->second || address + uint64_t(bytes) > found->first) {
      fail("global memory that nobody allocated, at " + std::to_string(address));
    }
  }
  if (address % uint64_t(std::min(bytes, 16))) fail("global memory at an address that is no multiple of its size");
  return reinterpret_cast<uint8_t*>(address);
}

enum Space { kGlobal, kShared, kParam, kLocal, kGeneric };

inline uint8_t* memory_at(Warp& w, int space, uint64_t address, int lane, int bytes) {
  if (space == kGeneric) {
    space = address & kGenericShared ? kShared : address & kGenericLocal ? kLocal : kGlobal;
    address &= ~(kGenericShared | kGenericLocal);
  }
  if (space == kShared) return shared_at(w, address, bytes);
  if (space == kLocal) {
    size_t const size = w.local.size() / kLanes;
    if (address + uint64_t(bytes) > size) fail("local memory out of bounds");
    return w.local.data() + lane * size + address;
  }
  return global_at(address, bytes);
}

// An address operand is three numbers: a slot (or -1), whether it is 64 bits wide, and what is added.
inline uint64_t address_of(Warp& w, int const* x, int lane) {
  uint64_t const base = x[0] < 0 ? 0 : x[1] ? w.reg<uint64_t>(x[0])[lane] : w.reg<uint32_t>(x[0])[lane];
  uint64_t const sum = base + uint64_t(int64_t(x[2]));
  return x[1] || x[0] < 0 ? sum : uint32_t(sum);
}

template <class F>
inline void each(uint32_t lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f(__builtin_ctz(lanes));
}

// ---------------------------------------------------------------------------------------------------------- the order

inline void merge(Warp& w) {
  auto& groups = w.groups;
  for (size_t a = 0; a < groups.size(); ++a) {
    for (size_t b = groups.size() - 1; b > a; --b) {
      if (groups[a].pc != groups[b].pc) continue;
      groups[a].lanes |= groups[b].lanes;
      groups[a].stalled = groups[a].waiting = false;
      groups.erase(groups.begin() + long(b));
    }
  }
}

// The group that goes on, or -1: the one furthest behind that can.
inline int choose(Warp& w) {
  merge(w);
  int best = -1;
  for (size_t g = 0; g < w.groups.size(); ++g) {
    if (w.groups[g].stalled || w.groups[g].waiting) continue;
    if (best < 0 || w.groups[g].pc < w.groups[size_t(best)].pc) best = int(g);
  }
  return best;
}

inline int meets_at(Warp& w, int g) {  // where the group comes to another one next
  int found = INT_MAX, pc = w.groups[size_t(g)].pc;
  for (size_t other = 0; other < w.groups.size(); ++other) {
    if (int(other) != g && w.groups[other].pc > pc) found = std::min(found, w.groups[other].pc);
  }
  return found;
}

inline void check_exit(Warp& w, uint32_t lanes) {
  each(lanes, [&](int lane) {
    if (!w.store_groups[lane].empty()) fail("a thread ends before its bulk stores have read shared memory");
  });
  for (auto& group : w.wgmma_groups) {
    if (!group.empty()) fail("a warp ends before its wgmma are done");
  }
}

// Shuffles of the same kind and members are one, wherever the lanes are: NVVM makes two of one before a branch. Whether
// there were such.
inline bool shuffle_apart(Warp& w) {
  Program const& program = w.machine->program;
  constexpr int kOperands = 6;  // d, p (or -1), a, b, c, members
  int const scratch[] = {program.slots - 4, program.predicates - 1, program.slots - 3, program.slots - 2,
                         program.slots - 1};
  for (Group const& first : w.groups) {
    Instr const& i = program.code[size_t(first.pc)];
    auto const members = [&](Group const& group) {
      return w.reg<uint32_t>(program.code[size_t(group.pc)].x[kOperands - 1])[__builtin_ctz(group.lanes)];
    };
    if (i.together != kMembers || i.count != kOperands) continue;
    uint32_t there = 0;
    std::vector<Group*> all;
    for (Group& group : w.groups) {
      Instr const& other = program.code[size_t(group.pc)];
      if (other.run != i.run || other.guard >= 0 || members(group) != members(first)) continue;
      there |= group.lanes;
      all.push_back(&group);
    }
    if (uint32_t const need = w.alive & members(first); (there & need) != need) continue;
    auto const copy = [&](int to, int from, uint32_t lanes) {
      each(lanes, [&](int l) { w.reg<uint32_t>(to)[l] = w.reg<uint32_t>(from)[l]; });
    };
    for (Group const* group : all) {
      for (int n = 2; n < 5; ++n) copy(scratch[n], program.code[size_t(group->pc)].x[n], group->lanes);
    }
    Instr together = i;
    int const x[kOperands] = {scratch[0], scratch[1], scratch[2], scratch[3], scratch[4], i.x[kOperands - 1]};
    together.x = x;
    w.machine->at = &i;
    i.run(w, together, there);
    ++w.machine->now;
    for (Group* group : all) {
      Instr const& its = program.code[size_t(group->pc)];
      copy(its.x[0], scratch[0], group->lanes);
      if (its.x[1] >= 0) {
        uint32_t& p = w.predicates[size_t(its.x[1])];
        p = (p & ~group->lanes) | (w.predicates[size_t(scratch[1])] & group->lanes);
      }
      ++group->pc;
      group->waiting = false;
    }
    return true;
  }
  return false;
}

// Up to `budget` instructions; how many were executed.
inline int run_warp(Warp& w, int budget) {
  Machine& machine = *w.machine;
  machine.who = &w;
  for (Group& group : w.groups) group.stalled = false;
  int executed = 0;
  while (executed < budget && w.alive) {
    int const g = choose(w);
    if (g < 0) {
      bool const stuck = std::all_of(w.groups.begin(), w.groups.end(), [](Group const& x) { return x.waiting; });
      if (!stuck) return executed;
      if (!shuffle_apart(w)) fail("lanes of a warp wait for others that never come");
      ++executed;
      continue;
    }
    int const meeting = meets_at(w, g);
    while (executed < budget) {
      Group& group = w.groups[size_t(g)];
      if (group.pc == meeting) break;
      Instr const& i = machine.program.code[size_t(group.pc)];
      machine.at = &i;
      if (i.together != kAlone) {
        uint32_t need = w.alive;
        if (i.together == kMembers) need &= w.reg<uint32_t>(i.x[i.count - 1])[__builtin_ctz(group.lanes)];
        if ((group.lanes & need) != need) {
          group.waiting = true;
          break;
        }
      }
      uint32_t lanes = group.lanes;
      if (i.guard >= 0) lanes &= i.negated ? ~w.predicates[size_t(i.guard)] : w.predicates[size_t(i.guard)];
      ++machine.now;
      ++executed;
      if (i.kind == kOrdinary) {
        if (lanes && i.run(w, i, lanes) == kStall) {
          group.stalled = true;
          --executed;
          break;
        }
        ++group.pc;
        continue;
      }
      if (i.kind == kExit) {
        check_exit(w, lanes);
        w.alive &= ~lanes;
        w.block->cluster->living -= __builtin_popcount(lanes);
        group.lanes &= ~lanes;
        ++group.pc;
        if (!group.lanes) w.groups.erase(w.groups.begin() + g);
        for (Group& other : w.groups) other.waiting = false;  // who has ended is not waited for
        break;
      }
      if (lanes == group.lanes) {
        group.pc = i.target;
      } else if (lanes == 0) {
        ++group.pc;
        continue;
      } else {
        group.lanes &= ~lanes;
        ++group.pc;
        w.groups.push_back({i.target, lanes});
      }
      break;
    }
  }
  return executed;
}

inline std::string where(Machine const& machine) {
  if (machine.who == nullptr || machine.at == nullptr) return "";
  Warp const& w = *machine.who;
  return ": block " + std::to_string(w.block->index) + ", warp " + std::to_string(w.index) + ", line " +
         std::to_string(machine.at->line) + " of the PTX";
}

inline std::string states(Machine& machine) {
  std::string text;
  for (auto& cluster : machine.clusters) {
    for (auto& block : cluster->blocks) {
      for (Warp& w : block->warps) {
        for (Group& group : w.groups) {
          if (!w.alive) continue;
          char line[120];
          std::snprintf(line, sizeof line, "\nblock %d warp %d lanes %08x at line %d%s", block->index, w.index,
                        group.lanes, machine.program.code[size_t(group.pc)].line,
                        group.waiting ? " for other lanes" : "");
          text += line;
        }
      }
    }
  }
  return text.substr(0, 6000);
}

inline void start_warp(Machine& machine, Block& block, Warp& w, int index) {
  Program const& program = machine.program;
  w.block = &block;
  w.machine = &machine;
  w.index = index;
  w.groups = {{0, kAll}};
  w.alive = kAll;
  w.at_barrier = false;
  w.open_copies.clear();
  w.copy_groups.clear();
  w.open_wgmma.clear();
  w.wgmma_groups.clear();
  w.wgmma_committed = 0;
  w.open_stores.clear();
  w.local.assign(size_t(program.local_bytes) * kLanes, 0xee);
  bool const is_new = w.cells.empty();
  if (is_new) {
    w.cells.assign(size_t(program.slots) * kLanes, kUnwritten);
    w.predicates.assign(size_t(program.predicates), uint32_t(machine.random()));
  }
  for (size_t c = 0; is_new && c < program.constants.size(); c += 3) {
    int const slot = int(program.constants[c]);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (program.constants[c + 1] == 2) {
        w.reg<uint64_t>(slot)[lane] = program.constants[c + 2];
      } else {
        w.reg<uint32_t>(slot)[lane] = uint32_t(program.constants[c + 2]);
      }
    }
  }
  auto const set = [&](Special which, auto value) {
    int const slot = program.special[which];
    for (int lane = 0; slot >= 0 && lane < kLanes; ++lane) w.reg<uint32_t>(slot)[lane] = uint32_t(value(lane));
  };
  set(kTidX, [&](int lane) { return index * kLanes + lane; });
  set(kCtaidX, [&](int) { return block.index; });
  set(kNctaidX, [&](int) { return machine.grid; });
  set(kNtidX, [&](int) { return machine.threads; });
  set(kClusterRank, [&](int) { return block.rank; });
  set(kClusterSize, [&](int) { return program.cluster; });
  set(kLaneId, [&](int lane) { return lane; });
  set(kWarpId, [&](int) { return index; });
  set(kSmId, [&](int) { return block.index % machine.resident; });
  set(kZero, [&](int) { return 0; });
}

inline std::unique_ptr<Cluster> start_cluster(Machine& machine, int first) {
  int const size = machine.program.cluster;
  std::unique_ptr<Cluster> cluster;
  if (machine.spare.empty()) {
    cluster = std::make_unique<Cluster>();
    for (int rank = 0; rank < size; ++rank) cluster->blocks.push_back(std::make_unique<Block>());
  } else {
    cluster = std::move(machine.spare.back());
    machine.spare.pop_back();
  }
  cluster->living = size * machine.threads;
  cluster->barrier = Barrier();
  for (int rank = 0; rank < size; ++rank) {
    auto& block = cluster->blocks[size_t(rank)];
    block->cluster = cluster.get();
    block->rank = rank;
    block->index = first + rank;
    block->waited = false;
    std::fill(block->barriers, block->barriers + 16, Barrier());
    size_t const bytes = size_t(machine.program.static_smem + machine.dynamic_smem);
    block->smem.resize(bytes);
    for (size_t at = 0; at + 4 <= bytes; at += 4) std::memcpy(&block->smem[at], &kUnwritten, 4);
    block->warps.resize(size_t(machine.threads / kLanes));
  }
  for (auto& block : cluster->blocks) {
    for (size_t index = 0; index < block->warps.size(); ++index) {
      start_warp(machine, *block, block->warps[index], int(index));
    }
  }
  return cluster;
}

// The whole grid; instructions of warps that were executed.
inline uint64_t run_grid(Machine& machine) {
  int const size = machine.program.cluster;
  int next = 0;
  if (machine.grid % size) fail("a grid that is no multiple of its cluster");
  if (machine.threads % kLanes) fail("a block with a part of a warp");
  uint64_t total = 0;
  std::vector<Warp*> ready;
  auto const fill = [&] {
    auto& clusters = machine.clusters;
    for (auto& cluster : clusters) {
      if (cluster->living == 0) machine.spare.push_back(std::move(cluster));
    }
    clusters.erase(std::remove_if(clusters.begin(), clusters.end(), [](auto& x) { return x == nullptr; }),
                   clusters.end());
    while (next < machine.grid && int(clusters.size()) * size < std::max(machine.resident, size)) {
      clusters.push_back(start_cluster(machine, next));
      next += size;
    }
    ready.clear();
    for (auto& cluster : clusters) {
      for (auto& block : cluster->blocks) {
        for (Warp& w : block->warps) {
          if (w.alive) ready.push_back(&w);
        }
      }
    }
  };
  for (fill(); !machine.clusters.empty(); fill()) {
    std::shuffle(ready.begin(), ready.end(), machine.random);
    uint64_t round = 0;
    for (Warp* w : ready) {
      if (w->alive) round += uint64_t(run_warp(*w, 1 + int(machine.random() % 400)));
      if (machine.happen(false)) ++round;
    }
    total += round;
    if (total > machine.limit) fail("no end after " + std::to_string(total) + " instructions" + states(machine));
    if (round == 0 && !machine.happen(true)) fail("deadlock" + states(machine));
  }
  machine.who = nullptr;
  while (machine.happen(true)) {
  }
  if (machine.waited && machine.waited < machine.grid) {
    fail(std::to_string(machine.grid - machine.waited) + " blocks ended without a wait for the launch ahead");
  }
  return total;
}

}  // namespace simulator
