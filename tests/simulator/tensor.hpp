// Matrix instructions: ldmatrix, stmatrix, movmatrix, mma.sync, wgmma.
namespace simulator {

// address (3), trans, matrices (of 8 x 8 of 16 bits), registers
inline uint16_t* matrix_row(Warp& w, Instr const& i, int matrix, int row) {
  return reinterpret_cast<uint16_t*>(shared_at(w, address_of(w, i.x, matrix * 8 + row), 16));
}
OP(
    "ldmatrix",
    BODY {
      for (int n = 0; n < i.x[4]; ++n) {
        uint16_t m[8][8];
        for (int row = 0; row < 8; ++row) std::memcpy(m[row], matrix_row(w, i, n, row), 16);
        each(lanes, [&](int l) {
          int const a = l / 4, b = 2 * (l % 4);
          w.reg<u32>(i.x[5 + n])[l] = i.x[3] ? m[b][a] | u32(m[b + 1][a]) << 16 : m[a][b] | u32(m[a][b + 1]) << 16;
        });
      }
      return kNext;
    },
    kAligned);
OP(
    "stmatrix",
    BODY {
      for (int n = 0; n < i.x[4]; ++n) {
        uint16_t m[8][8];
        each(lanes, [&](int l) {
          int const a = l / 4, b = 2 * (l % 4);
          u32 const x = w.reg<u32>(i.x[5 + n])[l];
          (i.x[3] ? m[b][a] : m[a][b]) = uint16_t(x);
          (i.x[3] ? m[b + 1][a] : m[a][b + 1]) = uint16_t(x >> 16);
        });
        for (int row = 0; row < 8; ++row) std::memcpy(matrix_row(w, i, n, row), m[row], 16);
      }
      return kNext;
    },
    kAligned);
OP(
    "movmatrix",
    BODY {
      uint16_t m[8][8];
      each(lanes, [&](int l) {
        u32 const x = w.reg<u32>(i.x[1])[l];
        m[l / 4][2 * (l % 4)] = uint16_t(x);
        m[l / 4][2 * (l % 4) + 1] = uint16_t(x >> 16);
      });
      each(lanes, [&](int l) { w.reg<u32>(i.x[0])[l] = m[2 * (l % 4)][l / 4] | u32(m[2 * (l % 4) + 1][l / 4]) << 16; });
      return kNext;
    },
    kAligned);

enum Element { kBf16, kF16, kTf32 };
inline f32 element(int type, u32 x) {
  return type == kBf16 ? from_bf16(x & 0xffff) : type == kF16 ? from_f16(x & 0xffff) : from_bits(x & ~0x1fffu);
}

constexpr int kMaxN = 256;
// C [16, n] += A [16, k] B [k, n], the sum over k first.
inline void multiply(f32 const (*a)[16], f32 const (*b)[kMaxN], f32 (*c)[kMaxN], int n, int k) {
  for (int row = 0; row < 16; ++row) {
    f32 sum[kMaxN];
    for (int j = 0; j < n; ++j) sum[j] = a[row][0] * b[0][j];
    for (int kk = 1; kk < k; ++kk) {
      f32 const x = a[row][kk];
      for (int j = 0; j < n; ++j) sum[j] += x * b[kk][j];
    }
    for (int j = 0; j < n; ++j) c[row][j] += sum[j];
  }
}

inline void fragment_a(Warp& w, int type, int const* slots, int k, f32 (*a)[16]) {
  for (int l = 0; l < kLanes; ++l) {
    for (int n = 0; n < (type == kTf32 ? k / 2 : k / 4); ++n) {
      u32 const x = w.reg<u32>(slots[n])[l];
      int const row = l / 4 + 8 * (n % 2);
      if (type == kTf32) {
        a[row][l % 4 + 4 * (n / 2)] = element(type, x);
      } else {
        int const column = 2 * (l % 4) + 8 * (n / 2);
        a[row][column] = element(type, x);
        a[row][column + 1] = element(type, x >> 16);
      }
    }
  }
}

// type, k, registers of d (4), a, b, c (4)
OP(
    "mma",
    BODY {
      int const type = i.x[0], k = i.x[1];
      int const count_a = type == kTf32 ? k / 2 : k / 4, count_b = count_a / 2;
      int const *d = i.x + 2, *sa = d + 4, *sb = sa + count_a, *sc = sb + count_b;
      f32 a[16][16], b[16][kMaxN], c[16][kMaxN];
      fragment_a(w, type, sa, k, a);
      each(lanes, [&](int l) {
        for (int n = 0; n < count_b; ++n) {
          u32 const x = w.reg<u32>(sb[n])[l];
          if (type == kTf32) {
            b[l % 4 + 4 * n][l / 4] = element(type, x);
          } else {
            b[2 * (l % 4) + 8 * n][l / 4] = element(type, x);
            b[2 * (l % 4) + 8 * n + 1][l / 4] = element(type, x >> 16);
          }
        }
        for (int n = 0; n < 4; ++n) c[l / 4 + 8 * (n / 2)][2 * (l % 4) + n % 2] = w.reg<f32>(sc[n])[l];
      });
      multiply(a, b, c, 8, k);
      each(lanes, [&](int l) {
        for (int n = 0; n < 4; ++n) w.reg<f32>(d[n])[l] = c[l / 4 + 8 * (n / 2)][2 * (l % 4) + n % 2];
      });
      return kNext;
    },
    kAligned);

// A matrix in shared memory that a descriptor of wgmma names: rows of M or N, 16 bits an element.
struct Described {
  u64 start, leading, stride;
  int bits;         // of the swizzle
  bool rows_first;  // M or N is what is contiguous
  explicit Described(u64 x, bool rows_first)
      : start((x & 0x3fff) << 4),
        leading((x >> 16 & 0x3fff) << 4),
        stride((x >> 32 & 0x3fff) << 4),
        bits(int((4 - (x >> 62)) & 3)),
        rows_first(rows_first) {
    if (x >> 49 & 7) fail("a descriptor with a base offset");
  }
  u64 at(int row, int k) const {
    u64 offset;
    int const width = 8 << bits;  // elements of a row of the swizzle's pattern
    if (bits == 0) {
      // Core matrices of 8 rows of 16 bytes.
      offset = rows_first ? u64(row / 8) * stride + u64(k / 8) * leading + u64(k % 8 * 16 + row % 8 * 2)
                          : u64(row / 8) * stride + u64(k / 8) * leading + u64(row % 8 * 16 + k % 8 * 2);
    } else if (rows_first) {
      offset = u64(row / width) * leading + u64(k / 8) * stride + u64(k % 8 * 2 * width + row % width * 2);
    } else {
      offset = u64(row / 8) * stride + u64(row % 8 * 2 * width + k * 2);
    }
    return swizzled(start + offset, bits);
  }
};

inline void elements(int type, uint16_t const* from, f32* to, int step) {
  for (int e = 0; e < 8; ++e) to[e * step] = type == kBf16 ? from_bf16(from[e]) : from_f16(from[e]);
}

inline u64 mixed(u64 sum, u64 x) { return (sum ^ x) * 0x9e3779b97f4a7c15ull + (sum >> 29); }

// The 16 columns of `rows` rows from `first` on, 8 elements that lie side by side at a time, and of each row, or 8 rows
// where they are what lies side by side, a number that says whether it has changed.
template <class F>
inline std::vector<u64> read_described(Warp& w, Described const& x, int first, int rows, F f) {
  std::vector<u64> sums(size_t(x.rows_first ? rows / 8 : rows));
  auto const chunk = [&](int row, int k) {
    uint8_t const* from = shared_at(w, x.at(first + row, k), 16);
    uint16_t values[8];
    std::memcpy(values, from, 16);
    u64 words[2];
    std::memcpy(words, from, 16);
    u64& sum = sums[size_t(x.rows_first ? row / 8 : row)];
    sum = mixed(mixed(sum, words[0]), words[1]);
    f(row, k, values);
  };
  if (x.rows_first) {
    for (int k = 0; k < 16; ++k) {
      for (int row = 0; row < rows; row += 8) chunk(row, k);
    }
  } else {
    for (int row = 0; row < rows; ++row) {
      for (int k = 0; k < 16; k += 8) chunk(row, k);
    }
  }
  return sums;
}

inline void nothing(int, int, uint16_t const*) {}

// type, n, A in registers, transposed A, transposed B, scale D: predicate or -1 and the constant, scale of A, of B,
// registers of d (n / 2), a (4) or the slot of its descriptor, the slot of B's descriptor
OP(
    "wgmma",
    BODY {
      int const type = i.x[0], n = i.x[1];
      bool const from_registers = i.x[2] != 0;
      int const *d = i.x + 9, *sa = d + n / 2, *sb = sa + (from_registers ? 4 : 1);
      f32 a[16][16], b[16][kMaxN], c[16][kMaxN];
      bool const keeps = i.x[5] >= 0 ? w.predicates[size_t(i.x[5])] & 1 : i.x[6] != 0;
      if (from_registers) {
        fragment_a(w, type, sa, 16, a);
      } else {
        Described const x(w.reg<u64>(*sa)[0], i.x[3] != 0);
        int const first = w.index % 4 * 16;
        auto sums = read_described(w, x, first, 16, [&](int r, int k, uint16_t const* values) {
          elements(type, values, &a[r][k], x.rows_first ? 16 : 1);
        });
        w.open_wgmma.push_back({[&w, x, first] { return read_described(w, x, first, 16, nothing); }, std::move(sums),
                                true, i.line, d, n / 2});
      }
      Described const y(w.reg<u64>(*sb)[0], i.x[4] != 0);
      auto sums = read_described(w, y, 0, n, [&](int r, int k, uint16_t const* values) {
        elements(type, values, &b[k][r], y.rows_first ? 1 : kMaxN);
      });
      w.open_wgmma.push_back(
          {[&w, y, n] { return read_described(w, y, 0, n, nothing); }, std::move(sums), false, i.line, d, n / 2});
      if (i.x[7] != 1)
        for (auto& row : a)
          for (f32& x : row) x = -x;
      if (i.x[8] != 1)
        for (auto& row : b)
          for (int j = 0; j < n; ++j) row[j] = -row[j];
      auto const each_d = [&](auto f) {
        for (int l = 0; l < kLanes; ++l) {
          for (int r = 0; r < n / 2; ++r)
            f(w.reg<f32>(d[r])[l], c[l / 4 + 8 * (r / 2 % 2)][r / 4 * 8 + 2 * (l % 4) + r % 2]);
        }
      };
      each_d([&](f32& in_register, f32& in_matrix) { in_matrix = keeps ? in_register : 0.0f; });
      multiply(a, b, c, n, 16);
      each_d([&](f32& in_register, f32& in_matrix) { in_register = in_matrix; });
      return (void)lanes, kNext;
    },
    kAligned);
OP(
    "wgmma.commit",
    BODY {
      w.wgmma_groups.push_back(std::move(w.open_wgmma));
      w.open_wgmma.clear();
      ++w.wgmma_committed;
      return (void)i, (void)lanes, kNext;
    },
    kAligned);
// The four warps of a warp group execute a wgmma together: who has waited for one knows that it is done for all.
OP(
    "wgmma.wait",
    BODY {
      int const done = w.wgmma_committed - i.x[0];
      Warp* const group = &w.block->warps[size_t(w.index / 4 * 4)];
      for (int n = 0; n < 4; ++n) {
        if (group[n].wgmma_committed < done) return kStall;
      }
      for (int n = 0; n < 4; ++n) {
        Warp& other = group[n];
        for (; other.wgmma_committed - int(other.wgmma_groups.size()) < done; other.wgmma_groups.pop_front()) {
          for (Checked const& operand : other.wgmma_groups.front()) {
            auto const now = operand.rows();
            if (now == operand.were) continue;
            // Nothing is wrong where the result is not used, so that is what shows it.
            int const of_one = (operand.is_a ? 16 : 2 * operand.count) / int(now.size());
            for (int r = 0; r < operand.count; ++r) {
              for (int l = 0; l < kLanes; ++l) {
                int const row = l / 4 + 8 * (r / 2 % 2), column = r / 4 * 8 + 2 * (l % 4) + r % 2;
                size_t const which = size_t((operand.is_a ? row : column) / of_one);
                if (now[which] != operand.were[which]) other.reg<f32>(operand.registers[r])[l] = NAN;
              }
            }
            std::string const note = "shared memory changed before the wgmma of line " + std::to_string(operand.line) +
                                     " was waited for: what comes of it is NaN\n";
            if (w.machine->notes.find(note) == std::string::npos) w.machine->notes += note;
          }
        }
      }
      return (void)lanes, kNext;
    },
    kAligned);

}  // namespace simulator
