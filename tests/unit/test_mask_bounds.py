"""Every bound that `collective/mask.cuh` gives is what its rule says, by counting, for the rule and for a changed one.

The file is compiled for the host: it asks for nothing of CUDA.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import changed_rule
import host_cuda
import pytest

PREFIX = 4

PRELUDE = """
#include <cstdio>
#include <initializer_list>
#define NVRTC_ATTN_DEVICE inline
namespace nvrtc_attn {
constexpr int kUnbounded = 0x7fffffff;
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
template <class Params>
struct StartsOnDevice : Params {
  int row, key;
  long long first_row() const { return row; }
  long long first_key() const { return key; }
};
template <bool kHasPlace, class Traits, class Params>
Params const& part_params(Params const& params) { return params; }
}  // namespace nvrtc_attn
"""

MAIN = """
using namespace nvrtc_attn;
struct Params {
  int window_left, window_right, bottom_right;
};
long checks = 0;
void check(bool right, char const* what, Params p, int len_q, int len_k, int x, int y) {
  ++checks;
  if (right) return;
  std::printf("%s of (%d, %d): left %d right %d bottom_right %d lengths %d %d\\n", what, x, y, p.window_left,
              p.window_right, p.bottom_right, len_q, len_k);
}

template <bool kBand>
void check_all(PositionMask<kBand> const& mask, Params p, int len_q, int len_k) {
  int const off = p.bottom_right ? len_k - len_q : 0;
  auto sees = [&](int i, int j) {  // a row and a key, whether there are such or not
    if (!kBand) return true;
    bool const early = p.window_left != kUnbounded && j < i + off - p.window_left;
    bool const late = p.window_right != kUnbounded && j > i + off + p.window_right && j >= kPrefix;
    return !early && !late;
  };
  auto right = [&](bool is, char const* what, int x, int y) { check(is, what, p, len_q, len_k, x, y); };
  constexpr int kM = 3, kN = 2;
  int const rows = len_q + 4, keys = len_k + 4;
  for (int i = 0; i < rows; ++i) {
    int end = 0;
    for (int j = 0; j < keys; ++j) {
      bool const kept = j < len_k && sees(i, j);
      right(mask.keeps(i, j) == kept, "keeps", i, j);
      for (int j0 = 0; j0 <= j; ++j0) {
        right(mask.keys_of(i, j0).contains(j - j0) == kept, "keys_of", i, j);
        bool const above = !mask.has_first_keys() || mask.keys_from_first(i, j0).contains(j - j0);
        right((above && mask.keys_below_end(i, j0).contains(j - j0)) == kept, "keys_below_end", i, j);
      }
      for (int i0 = 0; i0 <= i; ++i0) {
        right(mask.rows_of(j, i0).contains(i - i0) == (kept && i < len_q), "rows_of", i, j);
      }
      if (kept) end = j + 1;
    }
    if (end > 0) right(mask.end_key(i) == end, "end_key", i, end);
  }
  for (int m0 = 0; m0 < len_q; m0 += kM) {
    right(mask.has_rows(m0, kM) == (m0 + kM <= len_q), "has_rows", m0, 0);
    int first, last, first_seen = keys, last_seen = -1, last_tile = -1;
    mask.template key_tiles<kN>(m0, kM, first, last);
    for (int n0 = 0; n0 < keys; n0 += kN) {
      bool all = true, any = false;
      for (int i = m0; i < m0 + kM; ++i) {
        for (int j = n0; j < n0 + kN; ++j) {
          all = all && j < len_k && sees(i, j);
          any = any || sees(i, j);
          if (i < len_q && j < len_k && sees(i, j)) first_seen = min(first_seen, n0 / kN), last_seen = n0 / kN;
        }
      }
      right(mask.keeps_tile(m0, kM, n0, kN) == all, "keeps_tile", m0, n0);
      right(mask.sees_tile(m0, kM, n0, kN) == any, "sees_tile", m0, n0);
      int begin, end;
      mask.template query_tiles<kM>(n0, kN, begin, end);
      if (begin <= m0 / kM && m0 / kM < end) last_tile = n0 / kN;
    }
    if (last_seen >= 0) {
      right(first == first_seen && last == last_seen + 1, "key_tiles", first, last);
    } else {
      right(last <= first + 1, "key_tiles", first, last);  // one that begins before the end of the keys
    }
    if (last_tile >= 0) {
      right((mask.template last_key_tile<kM, kN>(m0)) == last_tile, "last_key_tile", m0, last_tile);
    }
  }
  for (int n0 = 0; n0 < keys; n0 += kN) {
    int first, last, first_seen = rows, last_seen = -1;
    mask.template query_tiles<kM>(n0, kN, first, last);
    for (int i = 0; i < ceil_div(len_q, kM) * kM; ++i) {  // the last tile counts as a whole one
      for (int j = n0; j < min(n0 + kN, len_k); ++j) {
        if (sees(i, j)) first_seen = min(first_seen, i / kM), last_seen = i / kM;
      }
    }
    if (last_seen >= 0) {
      right(first == first_seen && last == last_seen + 1, "query_tiles", first, last);
    } else {
      right(last <= first, "query_tiles", first, last);
    }
  }
}

int main() {
  int const bounds[] = {kUnbounded, 0, 1, 3, 6};
  for (int len_q = 1; len_q < 12; ++len_q) {
    for (int len_k = 0; len_k < 12; ++len_k) {
      for (int left : bounds) {
        for (int right : bounds) {
          for (int corner : {0, 1}) {
            Params const p = {left, right, corner};
            check_all(PositionMask<true>(p, len_q, len_k), p, len_q, len_k);
          }
          for (int row : {0, 4, 17, 1 << 29}) {  // of a part, that a device places before, on or behind the diagonal
            for (int key : {0, 5, 19, 1 << 29}) {
              Params p = {left, right, 0};
              StartsOnDevice<Params> const placed = {p, row, key};
              if (left != kUnbounded) p.window_left -= row - key;
              if (right != kUnbounded) p.window_right += row - key;
              check_all(PositionMask<true>(placed, len_q, len_k), p, len_q, len_k);
            }
          }
        }
      }
      Params const p = {kUnbounded, kUnbounded, 0};
      check_all(PositionMask<false>(p, len_q, len_k), p, len_q, len_k);
    }
  }
  std::printf("%ld checks\\n", checks);
}
"""


@pytest.mark.parametrize("prefix", [0, PREFIX])
def test_bounds_are_what_the_rule_says(prefix: int, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = (repository / "cuda_src" / changed_rule.PLACE).read_text(encoding="utf-8")
    includes = [line for line in text.splitlines() if line.startswith("#include")]
    assert includes == ['#include "../params.cuh"']
    text = changed_rule.changed_text(text, changed_rule.changes(prefix) if prefix else {})
    text = text.replace(includes[0], "").replace("#pragma once", "")
    program = host_cuda.build(f"{PRELUDE}constexpr int kPrefix = {prefix};\n{text}{MAIN}", tmp_path_factory)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    wrong = done.stdout.splitlines()[:-1]
    assert not wrong, "\n".join(wrong[:20])
    assert int(done.stdout.split()[-2]) > 100_000
