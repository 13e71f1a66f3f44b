// What Python calls.
using namespace simulator;

extern "C" {

int find_op(char const* name) {
  static std::unordered_map<std::string, int> known;
  if (known.empty()) {
    for (size_t n = 0; n < table().size(); ++n) known[table()[n].name] = int(n);
  }
  auto const found = known.find(name);
  return found == known.end() ? -1 : found->second;
}

// An instruction is seven numbers: op (-1 branch, -2 exit), guard, negated, target, line, first operand, operands.
Program* make_program(int const* code, int instructions, int const* pool, int pool_size, uint64_t const* constants,
                      int constant_count, int const* special, int const* sizes) {
  auto* program = new Program;
  program->pool.assign(pool, pool + pool_size);
  program->constants.assign(constants, constants + 3 * constant_count);
  std::copy(special, special + 16, program->special);
  program->slots = sizes[0] + 4;  // and those of `shuffle_apart`
  program->predicates = sizes[1] + 1;
  program->static_smem = sizes[2];
  program->local_bytes = sizes[3];
  program->cluster = sizes[4];
  for (int n = 0; n < instructions; ++n, code += 7) {
    Instr i;
    if (code[0] >= 0) {
      Op const& op = table()[size_t(code[0])];
      i.run = op.run;
      i.together = op.together;
    } else {
      i.kind = code[0] == -1 ? kBranch : kExit;
    }
    i.guard = code[1];
    i.negated = code[2] != 0;
    i.target = code[3];
    i.line = code[4];
    i.x = program->pool.data() + code[5];
    i.count = code[6];
    program->code.push_back(i);
  }
  return program;
}
void free_program(Program* program) { delete program; }

static std::unordered_map<uint64_t, TensorMap> maps;

void add_region(uint64_t begin, uint64_t end) { regions()[end] = begin; }
void remove_region(uint64_t end) { regions().erase(end); }

// rank, element bytes, swizzle bits, NaN, dims (5), strides (5), box (5), steps (5)
void add_map(uint64_t id, uint64_t const* x) {
  TensorMap map{};
  map.rank = int(x[0]);
  map.element_bytes = int(x[1]);
  map.swizzle_bits = int(x[2]);
  map.nan_fill = x[3] != 0;
  for (int d = 0; d < 5; ++d) {
    map.dims[d] = x[4 + d];
    map.strides[d] = x[9 + d];
    map.box[d] = uint32_t(x[14 + d]);
    map.steps[d] = uint32_t(x[19 + d]);
  }
  maps[id] = map;
}

// 0 and what is to be noted in `message`, or -1 and the reason. `executed`: instructions of warps.
int launch(Program const* program, int grid, int threads, int dynamic_smem, int resident, void* params, int param_bytes,
           uint64_t seed, uint64_t limit, uint64_t* executed, char* message, int message_size) {
  Machine machine{*program, std::mt19937_64(seed),         grid, threads, dynamic_smem,
                  resident, static_cast<uint8_t*>(params), maps, limit};
  uint64_t const begin = uint64_t(reinterpret_cast<uintptr_t>(params));
  params_region = {begin, begin + uint64_t(param_bytes)};
  try {
    *executed = run_grid(machine);
    std::snprintf(message, size_t(message_size), "%s", machine.notes.c_str());
    return 0;
  } catch (std::exception const& error) {
    std::snprintf(message, size_t(message_size), "%s%s", error.what(), where(machine).c_str());
    return -1;
  }
}
}
