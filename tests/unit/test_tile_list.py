"""The list of tiles of packed sequences: every real tile once, long ones first, and what a kernel makes of it.

Where there is a C++ compiler the text of the headers, from the lengths to the tile that a thread block takes, is
compiled for the host: CUDA threads are fibers that take turns in random order, so that a missing barrier shows.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import host_cuda
import numpy as np
import pytest

from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import hopper_backward, hopper_backward_schedule, hopper_common, hopper_forward
from nvrtc_attn.heuristics.common import ceil_div, packed_slots

BUCKETS = 2048
LEVELS, CHUNKS = 64, 16
"""Of the list by sequences: ``kSequenceLevels``, ``kSequenceChunks``."""
LAST_KEY_TILES = 0.5
"""``kLastKeyTiles``."""
INTS = (
    "batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "total_q", "total_k", "num_m_blocks",
    "num_n_blocks", "num_splits", "head_group", "lse_packed", "window_left", "window_right", "bottom_right",
    "num_tiles", "heads_per_group", "chunk_rows", "num_chunks", "num_workers", "pair_rounds", "head_pairs",
    "tail_first_head", "tail_done", "tail_whole_heads", "query_step", "counter_offset", "num_whole",
    "parts_apart",
)  # fmt: skip
HEADERS = (
    "collective/mask.cuh", "collective/seqlen.cuh", "collective/packed_slots.cuh", "hopper/common/tile_list.cuh",
    "hopper/forward/scheduler.cuh", "kernel/packed_tiles.cuh", "hopper/backward/schedule.cuh",
    "hopper/backward/list_key_tiles.cuh",
)  # fmt: skip

PRELUDE = (
    host_cuda.FIBERS
    + """
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int atomicAdd(int* at, int by) {
  int const before = *at;
  *at += by;
  return before;
}
inline int atomicMin(int* at, int by) {
  int const before = *at;
  if (by < before) *at = by;
  return before;
}
inline int atomicMax(int* at, int by) {
  int const before = *at;
  if (by > before) *at = by;
  return before;
}
inline float atomicAdd(float* at, float by) { return *at += by; }
namespace nvrtc_attn {
using index_t = long long;
constexpr int kUnbounded = 0x7fffffff;
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline int uniform(int a) { return a; }
inline int uniform_quotient(int a, int b) { return int(unsigned(a) / unsigned(b)); }
struct SpreadWords {
  int own[8];
  void load(void const* from) { std::memcpy(own, from, sizeof(own)); }
  int word(int i) const { return own[i]; }
};
inline int count_up(int* counter) { return atomicAdd(counter, 1); }
struct Params {
  int const* cu_seqlens_q;
  int const* cu_seqlens_k;
  int const* seqused_k;
  float* lse;
  float* row_lse;
  int* softmax_partial;
  int* counters;
  int @INTS@;
};
struct HopperForwardParams : Params {};
struct HopperBackwardParams : Params {};
template <class Params>
struct StartsOnDevice : Params {
  long long first_row() const { return 0; }
  long long first_key() const { return 0; }
};
template <bool kHasPlace, class Traits, class Params>
Params const& part_params(Params const& params) { return params; }
}  // namespace nvrtc_attn
"""
)

MAIN = """
using namespace nvrtc_attn;
template <bool kBand_, bool kSequsedK_, bool kOrdered_, bool kSplit_>
struct Traits {
  static constexpr bool kVarlen = true, kBand = kBand_, kSequsedK = kSequsedK_, kOrdered = kOrdered_;
  static constexpr bool kDescending = false, kDeviceStarts = false;
  static constexpr bool kSplit = kSplit_, kOneKeyTile = false, kBiasTiles = false, kDbiasStore = false;
  static constexpr int kBlockM = @BLOCK_M@, kBlockN = 128, kNumThreads = @THREADS@;
};

// All (b, head, tile) in the order in which they are taken.
extern "C" int forward(HopperForwardParams const* params, int band, int used, int most, int* found) {
  blockIdx.x = 0;
  gridDim.x = 1;
  run_block(@THREADS@, [=] {
    if (band && used) packed_tiles<Traits<true, true, false, false>>(*params);
    if (band && !used) packed_tiles<Traits<true, false, false, false>>(*params);
    if (!band && used) packed_tiles<Traits<false, true, false, false>>(*params);
    if (!band && !used) packed_tiles<Traits<false, false, false, false>>(*params);
  });
  TileScheduler<false, true> scheduler(*params);
  scheduler.begin(true);
  PackedTile tile;
  int count = 0;
  for (; count < most && scheduler.next(tile); scheduler.look_ahead(true)) {
    if (tile.b < params->batch) {  // its lengths
      int const* const q = params->cu_seqlens_q + tile.b;
      int const* const k = params->cu_seqlens_k + tile.b;
      int const len_k = used ? max(min(params->seqused_k[tile.b], k[1] - k[0]), 0) : k[1] - k[0];
      if (tile.q_row0 != q[0] || tile.len_q != q[1] - q[0] || tile.k_row0 != k[0] || tile.len_k != len_k) abort();
    }
    found[3 * count] = tile.b;
    found[3 * count + 1] = tile.h;
    found[3 * count + 2] = tile.m_block;
    ++count;
  }
  return count;
}

template <class T>
int backward_of(HopperBackwardParams const& params, int most, int* found) {
  run_block(@THREADS@, [&] { list_key_tiles<T>(params); });
  int count = 0;
  for (; count < most; ++count) {
    KeyTile const tile = packed_key_tile<T::kSplit>(params, count);
    if (tile.n_block < 0) break;
    found[3 * count] = tile.b;
    found[3 * count + 1] = tile.h;
    found[3 * count + 2] = tile.n_block;
  }
  return count;
}
extern "C" int backward(HopperBackwardParams const* p, int band, int ordered, int most, int* found) {
  if (ordered) {
    return band ? backward_of<Traits<true, false, true, false>>(*p, most, found)
                : backward_of<Traits<false, false, true, false>>(*p, most, found);
  }
  return band ? backward_of<Traits<true, false, false, true>>(*p, most, found)
              : backward_of<Traits<false, false, false, true>>(*p, most, found);
}

// (b, tile) of every slot, by a thread and by a warp.
extern "C" int slots(int const* cu_seqlens, int batch, int total, int* found, int* parts) {
  PackedSlots<@BLOCK_M@> const slots{cu_seqlens, batch, total};
  *parts = slots.parts();
  for (int i = 0; i < slots.count(); ++i) {
    PackedSlot const one = slots.find(i);
    found[2 * i] = one.b;
    found[2 * i + 1] = one.tile;
    if (batch > 64 && i % 16 != batch % 16) continue;
    run_block(32, [=] {
      PackedSlot const other = slots.find_together(i, threadIdx.x);
      if (other.b != one.b || other.tile != one.tile) abort();
    });
  }
  return slots.count();
}
"""
UNBOUNDED = 0x7FFFFFFF
BLOCK_M = 64


@pytest.fixture(scope="module")
def headers(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The device's text as a library of the host."""
    text = ""
    for name in HEADERS:
        source = (repository / "cuda_src/nvrtc_attn" / name).read_text()
        if name.endswith("backward/schedule.cuh"):  # what reads shared memory is not for the host
            source = re.sub(r"NVRTC_ATTN_DEVICE KeyTile read_key_tile.*?\n}\n", "", source, flags=re.DOTALL)
        text += "".join(f"{x}\n" for x in source.splitlines() if not x.startswith(("#include", "#pragma once")))
    source = PRELUDE + text + MAIN
    for name, value in (("INTS", ", ".join(INTS)), ("BLOCK_M", str(BLOCK_M)), ("THREADS", "128")):
        source = source.replace(f"@{name}@", value)
    return ctypes.CDLL(str(host_cuda.build(source, tmp_path_factory, "-shared", "-fPIC")))


def structure() -> type[ctypes.Structure]:
    pointers = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "lse", "row_lse", "softmax_partial", "counters")
    fields = [(name, ctypes.c_void_p) for name in pointers] + [(name, ctypes.c_int) for name in INTS]
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


PARAMS = structure()


class Packed:
    """Random sequences, with the params of a launch."""

    def __init__(self, rng: random.Random, *, batch: int, longest: int, heads_kv: int, group: int = 1) -> None:
        def lengths() -> list[int]:
            kinds = (lambda: rng.randint(0, longest), lambda: 0, lambda: 1, lambda: BLOCK_M * rng.randint(0, 3))
            kind = rng.choice(kinds)
            return [(kind if rng.random() < 0.5 else rng.choice(kinds))() for _ in range(batch)]

        self.batch, self.heads_kv, self.heads = batch, heads_kv, heads_kv * group
        self.len_q = lengths()
        self.len_k = self.len_q if rng.random() < 0.5 else lengths()
        self.used = [rng.randint(-1, x + 1) for x in self.len_k]
        self.lead = [rng.choice((0, 0, 3, 200)) for _ in range(2)]
        tail = [rng.choice((0, 0, 5, 300)) for _ in range(2)]
        self.cu = [
            np.cumsum([lead, *x], dtype=np.int32) for lead, x in zip(self.lead, (self.len_q, self.len_k), strict=True)
        ]
        self.total = [int(cu[-1]) + extra for cu, extra in zip(self.cu, tail, strict=True)]
        self.most = [max(x, default=0) for x in (self.len_q, self.len_k)]

    def params(self, **values: int) -> Any:
        p = PARAMS()
        p.cu_seqlens_q, p.cu_seqlens_k = (x.ctypes.data for x in self.cu)
        self.used_array = np.array(self.used, np.int32)
        p.seqused_k = self.used_array.ctypes.data
        sizes = {
            "batch": self.batch, "seqlen_q": self.most[0], "seqlen_k": self.most[1], "num_heads": self.heads,
            "num_heads_kv": self.heads_kv, "total_q": self.total[0], "total_k": self.total[1],
            "num_m_blocks": max(ceil_div(self.most[0], BLOCK_M), 1),
            "num_n_blocks": max(ceil_div(self.most[1], 128), 1),
            "num_splits": 1, "lse_packed": 1, "window_left": UNBOUNDED, "window_right": UNBOUNDED, "bottom_right": 1,
        }  # fmt: skip
        for name, value in {**sizes, **values}.items():
            setattr(p, name, value)
        return p


def cost(
    length: int, other: int, first: int, rows: int, tile: int, *, causal: bool, of_keys: bool, left: int = UNBOUNDED
) -> int:
    """Tiles of the other operand that see a tile of rows ``[first, first + rows)``; causal from the bottom right.

    ``left``: of keys, how many before its diagonal a query sees.
    """
    if not length or not other:
        return 0
    low, high = 0, other
    last = min(first + rows, length) - 1
    if causal and of_keys:  # the first row that sees key j is j - off
        low = max(first - (length - other), 0)
    elif left != UNBOUNDED:
        high = max(min(last + left - (length - other) + 1, other), 0)
    elif causal:
        high = max(min(last + other - length + 1, other), 0)
    return max(ceil_div(high, tile) - low // tile, 0) if high else 0


class BySequences:
    """A list by sequences, of key tiles with the ``costs`` of each sequence.

    Each sequence's bucket, which of them end the work tile by tile, and how many heads share a pass.
    """

    def __init__(
        self, costs: list[list[int]], chunks: list[int], most: int, *, fit: int, heads_kv: int, workers: int
    ) -> None:
        scale = np.float32(LEVELS) / np.float32(most + 1)
        levels = [min(int(np.float32(max(x, default=0)) * scale), LEVELS - 1) for x in costs]
        self.keys = [(LEVELS - 1 - x) * CHUNKS + chunk for x, chunk in zip(levels, chunks, strict=True)]
        works = np.zeros(LEVELS * CHUNKS)
        for key, values in zip(self.keys, costs, strict=True):
            works[key] += sum(values) + len(values)
        longest = max((max(x, default=0) for x in costs), default=0)
        self.heads = fit
        while self.heads < heads_kv and (
            heads_kv % self.heads or works.sum() * self.heads < 1.25 * (longest + 1) * workers
        ):
            self.heads += 1
        longest_of = (LEVELS - np.arange(LEVELS * CHUNKS) // CHUNKS) / scale
        behind = works[::-1].cumsum()[::-1] * self.heads
        enough = (works > 0) & (behind >= LAST_KEY_TILES * longest_of * workers)
        self.first_last = int(max(np.flatnonzero(enough), default=0))
        self.step = (float(longest_of[self.first_last]) + 1) / (LEVELS * CHUNKS)

    def check(self, found: list[tuple[int, int]], costs: list[list[int]]) -> None:
        """``found``: (sequence, tile) of all tiles of one head."""
        last = [(b, n) for b, n in found if self.keys[b] >= self.first_last]
        whole = found[: len(found) - len(last)]
        assert found == whole + last, "tiles one by one end the work"
        values = [costs[b][n] for b, n in last]
        assert all(later < earlier + self.step + 1e-3 for earlier, later in itertools.pairwise(values))
        runs = [(b, [n for _, n in run]) for b, run in itertools.groupby(whole, key=lambda x: x[0])]
        assert len({b for b, _ in runs}) == len(runs), "tiles of a sequence are neighbours"
        keys = [self.keys[b] for b, _ in runs]
        assert keys == sorted(keys)
        for b, run in runs:
            assert run == sorted(run, reverse=costs[b][0] < costs[b][-1])


def check_order(found: list[tuple[int, int, int]], expected: Counter[tuple[int, int, int]], batch: int) -> None:
    real = Counter(x for x in found if x[0] < batch)
    assert real == expected


@pytest.mark.parametrize("seed", range(24))
def test_every_query_tile_is_taken_once_and_long_ones_first(headers: ctypes.CDLL, seed: int) -> None:
    rng = random.Random(seed)
    batch = rng.choice((1, 2, 7, 31, 32, 33, 150))
    packed = Packed(rng, batch=batch, longest=rng.choice((100, 1000, 2500)), heads_kv=rng.choice((1, 2, 3)), group=2)
    causal, used, padded = (rng.random() < 0.5 for _ in range(3))
    shape = hopper_common.tile_list(
        packed.total[0], batch, BLOCK_M, heads=packed.heads_kv, resident_rows=packed.total[1],
        l2_rows=rng.choice((10**6, packed.total[1], 1000)), entry_bytes=32,
    )  # fmt: skip
    memory = np.full(shape.nbytes // 4 + 64, -7, np.int32)
    p = packed.params(
        chunk_rows=shape.chunk_rows, num_chunks=shape.num_chunks, head_group=shape.heads, heads_per_group=2,
        num_workers=rng.choice((1, 20)), lse_packed=not padded,
        window_right=0 if causal else UNBOUNDED,
    )  # fmt: skip
    p.softmax_partial = memory.ctypes.data
    lse = np.empty(1, np.float32)
    p.lse = lse.ctypes.data if padded or rng.random() < 0.5 else 0
    most = shape.tiles * packed.heads + 1
    out = np.empty((most, 3), np.int32)
    count = headers.forward(
        ctypes.byref(p), int(causal), int(used), most, out.ctypes.data_as(ctypes.POINTER(ctypes.c_int))
    )
    found = [(b, h, m) for b, h, m in out[:count].tolist()]
    assert (memory[shape.nbytes // 4 :] == -7).all(), "written behind the list"

    tiles = {b: ceil_div(packed.len_q[b], BLOCK_M) or int(padded) for b in range(batch)}
    check_order(found, Counter((b, h, m) for b in tiles for m in range(tiles[b]) for h in range(packed.heads)), batch)
    outside = [x for x in found if x[0] == batch]
    rows = packed.total[0] - sum(packed.len_q)
    parts = memory[2]
    assert Counter(outside) == Counter((batch, h, x) for x in range(parts if rows else 0) for h in range(packed.heads))

    # For each head: in a chunk no tile is much longer than the one before it.
    keys = [min(max(u, 0), n) if used else n for u, n in zip(packed.used, packed.len_k, strict=True)]
    classes = BUCKETS // shape.num_chunks
    step = (ceil_div(packed.most[1], 128) + 1) / classes
    for head in range(packed.heads):
        costs: dict[int, list[int]] = {}
        for b, h, m in found:
            if h == head and b < batch:
                chunk = min(int(packed.cu[1][b]) // shape.chunk_rows, shape.num_chunks - 1)
                value = cost(packed.len_q[b], keys[b], m * BLOCK_M, BLOCK_M, 128, causal=causal, of_keys=False)
                costs.setdefault(chunk, []).append(value)
        for values in costs.values():
            assert all(later < earlier + step + 1 for earlier, later in itertools.pairwise(values))
        longest = [max(values) for values in costs.values()]
        assert all(later < earlier + step + 1 for earlier, later in itertools.pairwise(longest))


@pytest.mark.parametrize("seed", range(60))
def test_every_key_tile_is_taken_once(headers: ctypes.CDLL, seed: int) -> None:
    rng = random.Random(100 + seed)
    batch = rng.choice((1, 3, 31, 40, 130, 700))
    splits, ordered, causal = rng.choice((1, 2)), rng.random() < 0.4, rng.random() < 0.5
    splits = 1 if ordered else splits
    window_left = UNBOUNDED if causal or rng.random() < 0.3 else rng.choice((0, 100, 700))
    band = causal or window_left != UNBOUNDED
    packed = Packed(rng, batch=batch, longest=rng.choice((100, 1000, 2500)), heads_kv=rng.choice((1, 2, 5)), group=2)
    shape = hopper_common.tile_list(
        packed.total[1], batch, 128, heads=packed.heads_kv * splits, resident_rows=packed.total[0],
        l2_rows=rng.choice((10**6, 1000)),
    )  # fmt: skip
    if band and not ordered:
        shape = hopper_backward_schedule.by_sequences(shape, packed.total[0])
    memory = np.full(shape.nbytes // 4 + 64, -7, np.int32)
    p = packed.params(
        chunk_rows=shape.chunk_rows, num_chunks=shape.num_chunks, head_group=shape.heads, num_splits=splits,
        num_workers=rng.choice((1, 5, 20)),
        window_right=0 if causal else UNBOUNDED, window_left=window_left,
    )  # fmt: skip
    p.counters = memory.ctypes.data
    heads = packed.heads_kv * splits
    most = shape.tiles * heads + 1
    out = np.empty((most, 3), np.int32)
    count = headers.backward(
        ctypes.byref(p), int(band), int(ordered), most, out.ctypes.data_as(ctypes.POINTER(ctypes.c_int))
    )
    found = [(b, h, n) for b, h, n in out[:count].tolist()]
    assert (memory[shape.nbytes // 4 :] == -7).all(), "written behind the list"
    tiles = [ceil_div(x, 128) for x in packed.len_k]
    check_order(found, Counter((b, h, n) for b, x in enumerate(tiles) for n in range(x) for h in range(heads)), batch)
    if ordered:  # a tile waits for those of higher keys, which must have been taken before
        left = {(b, h): x for b, x in enumerate(tiles) for h in range(heads)}
        for b, h, n in found:
            if b < batch:
                left[b, h] -= 1
                assert n == left[b, h]
    if not band or ordered:
        return
    costs = [
        [
            cost(packed.len_k[b], packed.len_q[b], n * 128, 128, BLOCK_M, causal=causal, of_keys=True, left=window_left)
            for n in range(x)
        ]
        for b, x in enumerate(tiles)
    ]
    order = BySequences(
        costs, [min(int(x) // shape.chunk_rows, shape.num_chunks - 1) for x in packed.cu[0][:-1]],
        max(ceil_div(packed.most[0], BLOCK_M), 1), fit=shape.heads, heads_kv=heads, workers=p.num_workers,
    )  # fmt: skip
    assert memory[3] == order.heads
    for head in range(heads):
        own = [(b, n) for b, h, n in found if h == head and b < batch]
        order.check(own, costs)


@pytest.mark.parametrize("batch", [0, 1, 31, 32, 33, 400, 1086, 1087])
def test_slots_cover_every_tile(headers: ctypes.CDLL, batch: int) -> None:
    rng = random.Random(batch)
    packed = Packed(rng, batch=batch, longest=300 if batch < 100 else 20, heads_kv=1)
    cu, total = packed.cu[0], packed.total[0]
    count = packed_slots(total, batch, BLOCK_M)
    out, parts = np.empty((count, 2), np.int32), ctypes.c_int()
    pointer = [x.ctypes.data_as(ctypes.POINTER(ctypes.c_int)) for x in (cu, out)]
    assert headers.slots(pointer[0], batch, total, pointer[1], ctypes.byref(parts)) == count
    found = Counter((b, x) for b, x in out.tolist())
    assert max(found.values()) == 1
    for b, length in enumerate(packed.len_q):
        own = sorted(x for other, x in found if other == b)
        assert own == list(range(len(own)))
        assert max(ceil_div(length, BLOCK_M), 1) <= len(own) <= ceil_div(length, BLOCK_M) + 1
    assert sorted(x for b, x in found if b == batch) == list(range(parts.value))


def problem(lengths: list[int], heads: int, head_dim: int, *, causal: bool) -> AttentionProblem:
    layout = dense_layout((1, sum(lengths), heads, head_dim), "bfloat16")
    return AttentionProblem(
        dtype="bfloat16", batch=len(lengths), seqlen_q=max(lengths), seqlen_k=max(lengths), num_heads=heads,
        num_heads_kv=heads, head_dim=head_dim, head_dim_v=head_dim, q=layout, k=layout, v=layout, varlen=True,
        window_right=0 if causal else None,
    )  # fmt: skip


MIXES = {
    "even": [1024] * 64,
    "skewed": [32768] + [512] * 63,
    "skewed-last": [512] * 63 + [32768],
    "eleven": [64, 128, 4096, 1000, 2000, 300, 512, 3000, 777, 2048, 1500],
    "documents": [100 + 37 * x % 2300 for x in range(61)],
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mix", MIXES)
def test_work_is_even(headers: ctypes.CDLL, mix: str, head_dim: int, causal: bool) -> None:
    """The multiprocessor with the most work has little more than its share when each takes the next tile."""
    lengths, heads = MIXES[mix], 16
    asked = problem(lengths, heads, head_dim, causal=causal)
    tiles = hopper_backward_schedule.tile_list_of(asked, 1)
    cu = np.cumsum([0, *lengths], dtype=np.int32)
    memory = np.zeros(tiles.nbytes // 4, np.int32)
    p = PARAMS()
    p.cu_seqlens_q = p.cu_seqlens_k = cu.ctypes.data
    p.counters = memory.ctypes.data
    values = {
        "batch": len(lengths), "seqlen_q": max(lengths), "seqlen_k": max(lengths), "num_heads": heads,
        "num_heads_kv": heads, "total_q": int(cu[-1]), "total_k": int(cu[-1]),
        "num_m_blocks": ceil_div(max(lengths), BLOCK_M), "num_n_blocks": ceil_div(max(lengths), 128), "num_splits": 1,
        "window_left": UNBOUNDED, "window_right": 0 if causal else UNBOUNDED, "bottom_right": 1,
        "head_group": tiles.heads, "num_workers": 132, "chunk_rows": tiles.chunk_rows, "num_chunks": tiles.num_chunks,
    }  # fmt: skip
    for name, value in values.items():
        setattr(p, name, value)
    most = tiles.tiles * heads + 1
    out = np.empty((most, 3), np.int32)
    count = headers.backward(ctypes.byref(p), int(causal), 0, most, out.ctypes.data_as(ctypes.POINTER(ctypes.c_int)))
    busy = np.zeros(132)
    total = 0.0
    for b, _, n in out[:count].tolist():
        work = 1.0 + cost(lengths[b], lengths[b], n * 128, 128, BLOCK_M, causal=causal, of_keys=True)
        busy[np.argmin(busy)] += work
        total += work
    # Without a band the tiles of the longest sequence are all alike: the last may be one multiprocessor's alone.
    allowed = {"even": 1.03, "skewed": 1.03, "skewed-last": 1.04, "eleven": 1.04, "documents": 1.02}[mix]
    assert busy.max() <= allowed * total / 132
    if causal:
        costs = [
            [cost(x, x, n * 128, 128, BLOCK_M, causal=True, of_keys=True) for n in range(ceil_div(x, 128))]
            for x in lengths
        ]
        order = BySequences(
            costs, [int(x) // tiles.chunk_rows for x in cu[:-1]], values["num_m_blocks"], fit=tiles.heads,
            heads_kv=heads, workers=132,
        )  # fmt: skip
        assert order.heads == memory[3]
        order.check([(b, n) for b, h, n in out[:count].tolist() if h == 0], costs)


def test_the_grid_holds_the_real_tiles() -> None:
    """Of one long sequence among short ones: a few tiles more than there are, not the longest for each."""
    asked = problem(MIXES["skewed"], 16, 128, causal=True)
    forward = hopper_forward.choose_forward(asked, arch="sm_90", num_sms=132, smem_limit=232448)
    assert not isinstance(forward, list)
    assert [x.config.kernel for x in forward.launches] == ["packed_tiles", "forward_hopper"]
    real = sum(ceil_div(x, forward.launches[1].config.block_m) for x in MIXES["skewed"])
    assert forward.workspaces[0].nbytes < 16 + 32 * (real + 2 * 64)
    backward = hopper_backward.choose_backward(asked, arch="sm_90", num_sms=132, smem_limit=232448)
    assert not isinstance(backward, list)
    block_m = backward.launches[1].config.block_m
    real = sum(ceil_div(x, block_m) for x in MIXES["skewed"])
    parts = block_m // hopper_backward.PREPARE_ROWS
    assert backward.launches[0].grid <= 16 * (real + 65) * parts + 1
    assert backward.launches[2].grid <= 16 * (real + 65)
