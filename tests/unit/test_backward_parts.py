"""Key tiles of the Hopper backward pass in parts: every query tile of every head once, and who adds where.

Where there is a C++ compiler, the text of ``hopper/backward/schedule.cuh`` itself deals the tiles.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_cuda
import numpy as np
import pytest

from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import (
    choose_backward,
    hopper_backward,
    hopper_backward_config,
    hopper_backward_schedule,
    hopper_backward_tile,
)
from nvrtc_attn.heuristics.spec import BackwardPlanSpec
from nvrtc_attn.jit.config import HopperBackwardConfig

NUM_SMS = 132
FIELDS = (
    "batch", "num_heads_kv", "num_n_blocks", "num_tiles", "num_splits", "heads_per_group", "query_step", "head_group",
    "num_whole", "parts_apart", "num_m_blocks", "causal",
)  # fmt: skip
HOST = f"""
#include <algorithm>
#define NVRTC_ATTN_DEVICE inline
using std::max, std::min;
namespace nvrtc_attn {{
struct HopperBackwardParams {{
  int {", ".join(FIELDS)};
}};
inline int uniform_quotient(int a, int b) {{ return int(unsigned(a) / unsigned(b)); }}
%s
}}
template <bool kDown>
struct Range {{
  static constexpr bool kDescending = kDown;
  int first, count, start;
}};
// The words of tile number t: key tile, key head, batch entry, slot, then head and query tile of each turn.
template <bool kDescending>
int deal(nvrtc_attn::HopperBackwardParams const* params, int t, int block_m, int* found) {{
  nvrtc_attn::TilePart const part(*params, t);
  nvrtc_attn::KeyTile const tile = nvrtc_attn::key_tile<false, false, true>(*params, part.tile);
  Range<kDescending> range = {{params->causal ? tile.n_block * 128 / block_m : 0, 0, 0}};
  range.count = max(params->num_m_blocks - range.first, 0);
  range.start = params->causal ? range.first : min(tile.n_block * params->query_step >> 12, max(range.count - 1, 0));
  if (kDescending) range.start = range.first + max(range.count - 1, 0);
  nvrtc_attn::PartTurns turns;
  turns.find(*params, range, part, tile.h);
  int const words[] = {{tile.n_block, tile.h, tile.b, turns.slot}};
  std::copy(words, words + 4, found);
  int h = turns.h, m = turns.m;
  for (int i = 0; i < turns.left; ++i) {{
    found[4 + 2 * i] = h;
    found[5 + 2 * i] = m;
    m += kDescending ? -1 : 1;  // QueryRange::next
    if (m == range.first + range.count) m = range.first;
    if (m < range.first) m = range.start;
    if (m == range.start) ++h;
  }}
  return turns.left;
}}
extern "C" int deal_up(nvrtc_attn::HopperBackwardParams const* params, int t, int block_m, int* found) {{
  return deal<false>(params, t, block_m, found);
}}
extern "C" int deal_down(nvrtc_attn::HopperBackwardParams const* params, int t, int block_m, int* found) {{
  return deal<true>(params, t, block_m, found);
}}
"""


def problem(
    batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_kv: int, causal: bool, head_dim: int = 128, **more: Any
) -> AttentionProblem:
    wide, narrow = (
        dense_layout((batch, rows, n, head_dim), "bfloat16") for rows, n in ((seqlen_q, heads), (seqlen_k, heads_kv))
    )
    return AttentionProblem(
        dtype="bfloat16", batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=heads, num_heads_kv=heads_kv,
        head_dim=head_dim, head_dim_v=head_dim, q=wide, k=narrow, v=narrow, window_right=0 if causal else None, **more,
    )  # fmt: skip


def plan(asked: AttentionProblem, **changes: Any) -> BackwardPlanSpec:
    tile = replace(hopper_backward_tile.choose_tile(asked, NUM_SMS), splits=1, fused=False, block_m=80, **changes)
    return hopper_backward.plan_spec(asked, tile, num_sms=NUM_SMS)


@pytest.fixture(scope="module")
def header(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    text = (repository / "cuda_src/nvrtc_attn/hopper/backward/schedule.cuh").read_text()

    def declaration(begin: str, end: str) -> str:
        start = text.index(begin)
        return text[start : text.index(end, start) + len(end)]

    parts = [
        declaration("struct KeyTile {", "\n};\n"),
        declaration("template <bool kDescending", "\n}\n"),
        declaration("struct TilePart {", "\n};\n"),
        declaration("struct PartTurns {", "\n};\n"),
    ]
    # The store is an instruction of the GPU.
    lines = "\n".join(parts).split("\n  NVRTC_ATTN_DEVICE void store(")[0] + "\n};"
    return ctypes.CDLL(str(host_cuda.build(HOST % lines, tmp_path_factory, "-shared", "-fPIC")))


@pytest.mark.parametrize(
    ("shape", "parts", "whole"),
    [
        ((1, 32760, 512, 40, 40, False), 4, 0),
        ((2, 1000, 300, 3, 3, False), 7, 4),
        ((2, 700, 700, 8, 2, True), 3, 0),
        ((1, 4608, 4608, 24, 24, False), 5, 792),
        ((2, 100, 900, 4, 2, True), 11, 1),
        ((1, 200, 640, 2, 1, False), 9, 0),  # more parts than query tiles
        ((1, 500, 600, 3, 3, True), 2, 0),  # the last key tile has no query
    ],
    ids=str,
)
@pytest.mark.parametrize("order", ["up", "down"])
def test_every_query_tile_of_every_head_once(
    shape: tuple[int, int, int, int, int, bool], parts: int, whole: int, order: str, header: ctypes.CDLL
) -> None:
    asked = problem(*shape)
    spec = plan(asked, parts=parts, whole=whole)
    launch = hopper_backward.kernel_of(spec)
    given = {name: getattr(asked, name, 0) for name in FIELDS} | dict(launch.params) | {"causal": int(asked.band)}
    params = (ctypes.c_int * len(FIELDS))(*(given[name] for name in FIELDS))
    group = asked.num_heads // asked.num_heads_kv
    found = np.zeros(4 + 2 * group * given["num_m_blocks"], np.int32)
    pointer = found.ctypes.data_as(ctypes.POINTER(ctypes.c_int))
    key_tiles = asked.batch * asked.num_heads_kv * given["num_n_blocks"]
    assert given["num_tiles"] == whole + (key_tiles - whole) * parts
    turns: Counter[tuple[int, ...]] = Counter()
    slots: dict[int, list[tuple[int, ...]]] = {}
    lengths: dict[tuple[int, ...], list[int]] = {}
    for t in range(given["num_tiles"]):
        count = getattr(header, f"deal_{order}")(params, t, 80, pointer)
        tile, slot = tuple(found[:3].tolist()), int(found[3])
        assert (slot < 0) == (t < whole)
        slots.setdefault(slot, []).append(tile)
        lengths.setdefault(tile, []).append(count)
        for h, m in found[4 : 4 + 2 * count].reshape(-1, 2).tolist():
            assert h // group == tile[1]
            key = (*tile, h, m)
            turns[key] += 1
    assert set(turns.values()) == {1}
    first = [n * 128 // 80 if asked.band else 0 for n in range(given["num_n_blocks"])]
    seen = sum(max(given["num_m_blocks"] - x, 0) for x in first)
    assert len(turns) == asked.batch * asked.num_heads * seen
    # Every part has a slot of the workspace, as many apart as tiles are shared, or a tile has one for all its parts.
    shared = {slot: tiles for slot, tiles in slots.items() if slot >= 0}
    apart = bool(given["parts_apart"])
    assert apart == (not asked.band or group == 1)
    assert sorted(shared) == list(range((key_tiles - whole) * (parts if apart else 1)))
    for slot, tiles in shared.items():
        assert len(set(tiles)) == 1
        assert len(tiles) == (1 if apart else parts)
        assert tiles[0] == shared[slot % (key_tiles - whole)][0]
    assert all(max(x) - min(x) <= 1 for x in lengths.values())


def test_launches_and_workspace() -> None:
    asked = problem(1, 4608, 4608, 24, 24, False)
    usual = {launch.config.kernel for launch in plan(asked, parts=1).launches}
    assert "dkv_hopper_convert" not in usual
    spec = plan(asked, parts=5, whole=792)
    kernels = {launch.config.kernel: launch for launch in spec.launches}
    assert kernels["dkv_hopper_convert"].grid == 8 * (864 - 792)
    assert dict(kernels["dkv_hopper_convert"].params)["num_whole"] == 792
    config = kernels["backward_hopper"].config
    assert isinstance(config, HopperBackwardConfig)
    assert config.parts
    assert not config.split
    (workspace,) = (item for item in spec.workspaces if item.field == "dkv_accum")
    assert not workspace.zeroed
    assert workspace.nbytes == 4 * 72 * 5 * 128 * 256
    adding = plan(problem(1, 16384, 16384, 64, 4, True), parts=16)
    (workspace,) = (x for x in adding.workspaces if x.field == "dkv_accum")
    assert workspace.zeroed
    assert workspace.nbytes == 4 * 512 * 128 * 256


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (problem(1, 32760, 512, 40, 40, False), (9, 132)),  # 160 key tiles
        (problem(1, 32760, 257, 40, 40, False), 1),  # 120 key tiles, a multiprocessor each
        (problem(4, 4096, 300, 10, 10, False), 1),
        (problem(1, 2887, 2887, 24, 24, False), (5, 528)),  # 4.2 waves
        (problem(1, 3000, 3000, 16, 16, False), 1),  # 2.9
        (problem(1, 4608, 4608, 24, 24, False), (3, 792)),  # 6.5
        (problem(1, 32760, 32760, 12, 12, False), (7, 3036)),  # 23.3
        (problem(4, 4096, 4096, 16, 16, False), 1),  # 1 % of 15.5 waves
        (problem(1, 4096, 4096, 33, 33, False), 1),  # eight whole waves
        (problem(2, 1500, 1500, 24, 24, False), (2, 528)),  # 6.7 % of 4.4, though whole tiles would be fused
        (problem(1, 1800, 1800, 40, 40, False), 1),
        (problem(1, 1664, 1664, 24, 24, False, 96), (2, 264)),  # 2.4
        (problem(1, 2048, 2048, 8, 8, False), 1),  # 0.97
        (problem(1, 1116, 1116, 6, 6, False, 64), 2),
        (problem(4, 4096, 77, 10, 10, False), 3),  # 40 key tiles leave multiprocessors idle
        (problem(4, 4096, 77, 10, 10, False, deterministic=True), 1),
        (problem(1, 2048, 77, 4, 4, False), 11),
        (problem(8, 1024, 77, 8, 8, False), 2),
        (problem(1, 256, 77, 8, 8, False), 1),
        (problem(1, 16384, 16384, 64, 4, True), 16),  # 268 MB of Q, dO and dq for each key head
        (problem(1, 16384, 16384, 64, 4, True, window_left=4095), 1),
        (problem(1, 131072, 131072, 32, 8, True), 1),  # no head stays in L2, and the sums would take 1 GB
        (problem(4, 16384, 16384, 64, 4, True), 1),  # key tiles enough for whole groups to be balanced
        (problem(1, 8192, 8192, 64, 8, True), 1),
        (problem(1, 32760, 512, 40, 40, False, deterministic=True), 1),
        (problem(1, 4096, 4096, 4, 4, True), 2),  # 128 key tiles, of 2 to 52 query tiles
        (problem(1, 4096, 4096, 4, 4, True, 64), 2),
        (problem(1, 4096, 4096, 4, 4, True, deterministic=True), 1),
        (problem(1, 4096, 4096, 8, 4, True), 1),  # heads are split
        (problem(1, 4096, 4096, 4, 4, True, window_left=1023), 1),
        (problem(1, 1024, 1024, 16, 16, True), 1),  # adding the parts up takes more than they gain
        (problem(1, 3000, 3000, 8, 8, True), 1),  # 192 key tiles
    ],
    ids=str,
)
def test_parts_of_a_key_tile(asked: AttentionProblem, parts: int | tuple[int, int]) -> None:
    """How many, and how many key tiles before those are whole."""
    tile = hopper_backward_tile.choose_tile(asked, NUM_SMS)
    assert (tile.parts, tile.whole) == (parts if isinstance(parts, tuple) else (parts, 0))
    assert tile.parts == 1 or not (tile.fused or tile.splits > 1)


@pytest.mark.parametrize(
    ("asked", "splits"),
    [
        (problem(2, 4096, 4096, 64, 8, True), 4),  # 132 MB of rows are read at a time, with four 33 MB
        (problem(1, 4096, 4096, 128, 8, True), 8),
        (problem(4, 2048, 2048, 64, 8, True), 2),  # four would have 32 query tiles each, less than their sums take
        (problem(16, 1024, 1024, 32, 8, True), 1),
        (problem(2, 8192, 8192, 32, 8, True), 1),  # with 80 rows of queries
        (problem(2, 4096, 4096, 64, 8, False), 1),  # all key tiles of a head take as long
        (problem(1, 12288, 12288, 64, 8, True), 4),  # 138 MB are read at a time, of two blocks 69, of four 34
        (problem(1, 14336, 14336, 40, 8, True), 5),  # 86 MB
        (problem(2, 6400, 6400, 40, 10, True), 1),  # 69 MB
        (problem(1, 10000, 10000, 64, 8, True, 64), 2),  # 69 MB, and tiles of 128 rows either way
        (problem(1, 8192, 8192, 48, 8, True, 64), 1),  # 52 MB
        (problem(1, 4096, 4096, 96, 8, True, 192), 2),
        (problem(2, 4096, 4096, 16, 2, True, 256), 2),
        (problem(4, 2048, 2048, 16, 8, True, 256), 1),
    ],
    ids=str,
)
def test_splits_that_keep_what_is_read_in_l2(asked: AttentionProblem, splits: int) -> None:
    assert hopper_backward_tile.choose_tile(asked, NUM_SMS).splits == splits


@pytest.mark.parametrize(
    ("asked", "together"),
    [
        (problem(1, 4096, 4096, 96, 8, True, 192), 2),  # two heads of 32 key tiles run on 66 pairs of blocks
        (problem(2, 8192, 8192, 32, 8, True), 2),
        (problem(1, 8192, 8192, 64, 8, True), 2),
        # 3.3 heads run at a time: with two a group ends in between, three are uneven, with four the last ends 4 % late.
        (problem(1, 5120, 5120, 64, 8, True), 8),
        (problem(2, 3072, 3072, 32, 2, True), 8),  # 32 parts of heads, of which 5.5 run at a time
        (problem(1, 4096, 4096, 28, 4, True), 7),  # 28 likewise: eight would leave four for the end
        (problem(2, 4096, 4096, 64, 8, True), 4),
        (problem(1, 16384, 16384, 32, 8, True, window_left=4095), 4),
        (problem(1, 8192, 8192, 64, 8, False), 1),
    ],
    ids=str,
)
def test_heads_whose_key_tiles_are_handed_out_together(asked: AttentionProblem, together: int) -> None:
    spec = hopper_backward.plan_spec(asked, hopper_backward_tile.choose_tile(asked, NUM_SMS), num_sms=NUM_SMS)
    params = dict(hopper_backward.kernel_of(spec).params)
    assert params["head_group"] == together
    heads = params["num_tiles"] // params["num_n_blocks"]
    assert heads % together == 0


@pytest.mark.parametrize(
    ("asked", "splits", "together", "most"),
    [
        (problem(1, 8995, 8995, 40, 10, True), 2, 4, 1.02),  # five groups of two whole heads end 16 % late
        (problem(1, 12288, 12288, 24, 8, True), 1, 4, 1.02),
        (problem(1, 8192, 8192, 10, 10, True), 1, 5, 1.05),  # groups of two to four end 18 % late or more
        (problem(1, 10240, 10240, 48, 8, True), 3, 3, 1.02),
        (problem(1, 11500, 11500, 12, 2, True), 3, 3, 1.06),
        (problem(1, 2618, 2618, 16, 16, True, 256), 1, 4, 1.08),
        (problem(1, 8192, 8192, 32, 8, True), 1, 2, 1.02),  # four groups of two, as before
    ],
    ids=str,
)
def test_causal_key_tiles_end_together(asked: AttentionProblem, splits: int, together: int, most: float) -> None:
    tile = hopper_backward_tile.choose_tile(asked, NUM_SMS)
    launch = hopper_backward.kernel_of(hopper_backward.plan_spec(asked, tile, num_sms=NUM_SMS))
    params = dict(launch.params)
    assert (tile.splits, params["head_group"]) == (splits, together)
    assert isinstance(launch.config, HopperBackwardConfig)
    end, even = hopper_backward_schedule.in_turn(asked, splits, NUM_SMS // launch.config.cluster, together)
    assert even <= end <= most * even


def test_when_the_last_thread_block_ends() -> None:
    """By hand: three key tiles of one head, of 6, 4 and 2 query tiles, and two more each for the tile itself."""
    asked = problem(1, 384, 384, 1, 1, True)
    assert hopper_backward_schedule.in_turn(asked, 1, 1, 1) == (18, 18)
    assert hopper_backward_schedule.in_turn(asked, 1, 2, 1) == (10, 9)  # 8, and 6 + 4
    assert hopper_backward_schedule.in_turn(asked, 1, 3, 1) == (8, 6)
    # Two heads in two groups: 8, 6 then 4, 8 on one and 6, 4 on the other; in one group 8, 6, 4 each.
    both = problem(2, 384, 384, 1, 1, True)
    assert hopper_backward_schedule.in_turn(both, 1, 2, 1) == (20, 18)
    assert hopper_backward_schedule.in_turn(both, 1, 2, 2) == (18, 18)
    # From the top left, and 128 keys that no query sees: such a tile takes its two.
    wide = problem(1, 256, 384, 1, 1, True, bottom_right=False)
    assert hopper_backward_schedule.in_turn(wide, 1, 1, 1) == (12, 12)


def test_when_the_last_part_ends() -> None:
    """The same key tiles with three more for each part."""
    asked = problem(1, 384, 384, 1, 1, True)

    def end(parts: int, workers: int) -> float:
        return hopper_backward_schedule.end_of_parts(asked, 64, parts, workers, (2, 3))

    assert end(1, 3) == 8
    assert end(2, 1) == 12 + 6 * 3
    assert end(2, 2) == 16  # 6, 6 and 4 on one, 5, 4 and 5 on the other
    assert end(2, 6) == 6
    assert end(3, 9) == 5


def test_key_tiles_of_one_head_read_the_same_rows() -> None:
    """Spread over all of a long head's rows they would find nothing in L2 that another has read."""
    assert hopper_backward_schedule.query_step(410, 4) == hopper_backward_schedule.query_step(32, 3) == 2 << 12
    assert hopper_backward_schedule.query_step(64, 64) == 1 << 12
    assert hopper_backward_schedule.query_step(103, 64) == (103 << 12) // 64


def test_what_stays_in_registers() -> None:
    def chosen(head_dim: int, causal: bool = True, **more: Any) -> tuple[bool, bool, bool]:
        tile = hopper_backward_tile.choose_tile(problem(4, 2048, 2048, 16, 16, causal, head_dim, **more), NUM_SMS)
        return tile.own_code, tile.keys_in_registers, tile.values_in_registers

    both, values, neither = (True, True, True), (False, False, True), (False, False, False)
    assert [chosen(d) for d in (64, 72, 80, 96, 104, 128, 192)] == [values, both, both, both, *[neither] * 3]
    assert chosen(80, softcap=30.0) == chosen(64, deterministic=True) == neither
    # Packed sequences: with a band K would spill at head dim 96.
    assert [chosen(d, varlen=True) for d in (64, 72, 80, 96)] == [neither, both, both, values]
    assert chosen(96, causal=False, varlen=True) == both


def test_tiles_of_windows() -> None:
    """Idle warps prepare rows of windows that give them the time; up to head dim 64 a kernel before is faster."""

    def chosen(seqlen: int, window: int, head_dim: int = 128, **more: Any) -> tuple[bool, int, int]:
        asked = problem(2, seqlen, seqlen, 16, 16, True, head_dim, window_left=window - 1, **more)
        tile = hopper_backward_tile.choose_tile(asked, NUM_SMS)
        return tile.fused, tile.block_m, tile.key_slots

    assert chosen(7424, 512) == chosen(7424, 4096) == chosen(32768, 1024) == (True, 64, 1)
    assert chosen(7424, 128) == chosen(4096, 128) == chosen(65536, 256) == (False, 64, 2)
    assert chosen(65536, 1024) == (False, 64, 1)
    assert chosen(65536, 4096) == (False, 80, 1)
    assert chosen(7424, 128, 64) == chosen(3072, 512, 64) == (False, 128, 2)
    assert chosen(7424, 2048, 64) == (False, 128, 1)
    assert chosen(7424, 512, 96) == (True, 64, 1)


def packed(sequences: int, length: int, heads: int, head_dim: int, **more: Any) -> AttentionProblem:
    tokens = dense_layout((1, sequences * length, heads, head_dim), "bfloat16")
    asked = problem(sequences, length, length, heads, heads, False, head_dim, varlen=True, **more)
    return replace(asked, q=tokens, k=tokens, v=tokens)


@pytest.mark.parametrize(
    ("asked", "fused", "block_m", "slots"),
    [
        (problem(128, 197, 197, 12, 12, False, 64), False, 128, 2),
        (problem(128, 190, 190, 12, 12, True, 64), False, 64, 2),
        (problem(64, 300, 300, 12, 12, True, 64), False, 64, 2),
        (problem(48, 350, 350, 12, 12, False, 64), True, 128, 1),
        (problem(32, 512, 512, 16, 16, False, 64), True, 128, 1),
        (problem(32, 512, 512, 32, 8, True, 64), False, 128, 2),
        (problem(32, 512, 512, 32, 8, True), False, 64, 1),
        (problem(16, 1024, 1024, 32, 8, True, 64), True, 128, 1),
        (problem(4, 8192, 8192, 16, 16, False, 64), False, 128, 1),
        (problem(32, 512, 512, 16, 16, True), True, 64, 1),
        (packed(200, 197, 12, 64), False, 128, 2),
        (packed(20, 1500, 16, 96), False, 64, 2),
        (packed(64, 1024, 16, 128), False, 64, 1),
        (packed(100, 300, 12, 128), False, 64, 2),
        (packed(100, 300, 12, 128, deterministic=True), False, 64, 1),
        (problem(128, 197, 197, 12, 12, False, 64, softcap=30.0), False, 64, 1),
        (problem(128, 100, 100, 12, 12, False, 64), False, 128, 1),  # one key tile
    ],
    ids=str,
)
def test_two_slots_of_keys(asked: AttentionProblem, fused: bool, block_m: int, slots: int) -> None:
    """Where key tiles have few turns, and idle warps nothing else to do."""
    tile = hopper_backward_tile.choose_tile(asked, NUM_SMS)
    assert (tile.fused, tile.block_m, tile.key_slots) == (fused, block_m, slots)
    config = hopper_backward.kernel_of(hopper_backward.plan_spec(asked, tile, num_sms=NUM_SMS)).config
    assert config.key_slots == slots
    assert config.smem_bytes <= 232448


def test_a_tile_without_idle_warps_has_one_slot_of_keys() -> None:
    """Candidates change a tile that has two: what they change may take the room or the warps."""
    asked = problem(128, 197, 197, 12, 12, False, 64)
    tile = hopper_backward_tile.choose_tile(asked, NUM_SMS)
    for changes in ({"fused": True}, {"parts": 2}, {"splits": 2}, {"block_m": 80}):
        other = replace(tile, **changes)
        assert tile.key_slots == 2
        assert hopper_backward_config.config_of(asked, other).key_slots == 1
    made = hopper_backward.candidates(asked, arch="sm_90", num_sms=NUM_SMS, smem_limit=232448)
    configs = [hopper_backward.kernel_of(spec).config for spec in made]
    assert {(x.block_m, x.fused, x.key_slots) for x in configs} >= {
        (128, False, 2), (128, False, 1), (64, False, 2), (64, False, 1), (128, True, 1)
    }  # fmt: skip
    assert len(configs) == len(set(configs))


def test_queries_of_a_tile_of_split_heads() -> None:
    def chosen(batch: int, heads: int, heads_kv: int, rows: int = 8192) -> tuple[int, int]:
        tile = hopper_backward_tile.choose_tile(problem(batch, rows, rows, heads, heads_kv, True), NUM_SMS)
        return tile.splits, tile.block_m

    assert chosen(2, 32, 8) == (1, 80)
    assert chosen(1, 40, 8) == (5, 80)  # 86 MB in flight otherwise
    assert chosen(1, 64, 8) == (4, 80)  # 138
    assert chosen(1, 48, 1) == (24, 80)
    assert chosen(1, 32, 2) == (8, 80)
    assert chosen(1, 28, 4, 4096) == (7, 64)


@pytest.mark.parametrize("keys", [77, 300])
def test_few_key_tiles_in_parts_are_no_work_for_the_portable_family(keys: int) -> None:
    """4 x 4096 x 77, 10 heads: 70 us, the portable family that splits the queries in six 137 (H100)."""
    asked = problem(1, 4096, keys, 4, 4, False)
    target = {"arch": "sm_90", "num_sms": NUM_SMS, "smem_limit": 232448}
    chosen = choose_backward(asked, **target)
    assert "backward_hopper" in {launch.config.kernel for launch in chosen.launches}
