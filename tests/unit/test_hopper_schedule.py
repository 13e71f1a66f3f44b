"""The schedules of the Hopper forward kernel: every query tile once, and as much work for every thread block.

`dealt` is the kernel's schedule in Python, so that these tests run everywhere; where there is a C++ compiler, the text
of ``hopper/forward/scheduler.cuh`` itself is compiled for the host and must deal the same tiles in the same order.
"""

from __future__ import annotations

import ctypes
import dataclasses
import heapq
from collections import Counter
from pathlib import Path
from typing import Any

import host_cuda
import numpy as np
import pytest

from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import (
    hopper_backward,
    hopper_backward_schedule,
    hopper_backward_tile,
    hopper_forward,
    hopper_forward_schedule,
    hopper_forward_tile,
)
from nvrtc_attn.heuristics.spec import Launch

NUM_SMS = 132


def problem(batch: int, seqlen: int, heads: int, head_dim: int, causal: bool) -> AttentionProblem:
    layout = dense_layout((batch, seqlen, heads, head_dim), "bfloat16")
    return AttentionProblem(
        dtype="bfloat16", batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=heads, num_heads_kv=heads,
        head_dim=head_dim, head_dim_v=head_dim, q=layout, k=layout, v=layout, window_right=0 if causal else None,
    )  # fmt: skip


def moved_on(i: int, head: int, count: int, width: int) -> int:
    return (i + head * count // width) % count


def launch_of(asked: AttentionProblem, hand_out: bool) -> Launch:
    """The launch of ``asked`` whose tiles are handed out, or have a fixed order, whatever is chosen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_forward, "hands_out", lambda *_: hand_out)
        spec = hopper_forward.plan_spec(asked, hopper_forward_tile.choose_tile(asked), num_sms=NUM_SMS)
    (launch,) = spec.launches
    assert launch.config.tickets == hand_out
    return launch


def handed_out(asked: AttentionProblem) -> list[tuple[int, int]]:
    """(head of all heads, query tile) in the order in which thread blocks get them when they ask."""
    p = dict(launch_of(asked, True).params)
    blocks, heads = p["num_m_blocks"], asked.batch * asked.num_heads
    if not asked.band:
        return [(head, m) for head in range(heads) for m in range(blocks)]
    starts = range(0, heads, p["head_group"])
    passes = [range(first, min(first + p["head_group"], heads)) for first in starts]
    return [(head, m) for together in passes for m in reversed(range(blocks)) for head in together]


def dealt(asked: AttentionProblem) -> list[list[tuple[int, int]]]:
    """(head of all heads, query tile) of each thread block in order: ``hopper/forward/scheduler.cuh`` in Python."""
    launch = launch_of(asked, False)
    p, width = dict(launch.params), launch.grid
    blocks = p["num_m_blocks"]
    found: list[list[tuple[int, int]]] = [[] for _ in range(width)]
    if not asked.band:
        for t in range(p["num_tiles"]):
            head, i = divmod(t, blocks)
            found[t % width].append((head, moved_on(i, head, blocks, width)))
        return found
    for t in range(p["pair_rounds"] * width):
        head, i = divmod(t, p["head_pairs"])
        if head < p["tail_first_head"]:
            i = moved_on(i, head, p["head_pairs"], width)
        found[t % width] += [(head, m) for m in dict.fromkeys((blocks - 1 - i, i))]
    done, whole, first = p["tail_done"], p["tail_whole_heads"], p["tail_first_head"]
    outer, inner = done * whole, (blocks - 2 * done) * (whole + (done > 0))
    for t in range(2 * outer + inner):
        rank, heads, head, rest = 0, whole, first + (done > 0), t
        if t >= outer + inner:
            rank, rest = blocks - done, t - outer - inner
        elif t >= outer:
            rank, rest, heads, head = done, t - outer, whole + (done > 0), first
        row, column = divmod(t, width)
        block = width - 1 - column if row % 2 else column
        found[block].append((head + rest % heads, blocks - 1 - rank - rest // heads))
    return found


PARAMETERS = (
    "num_m_blocks", "num_heads", "num_tiles", "pair_rounds", "head_pairs", "tail_first_head", "tail_done",
    "tail_whole_heads", "head_group", "batch",
)  # fmt: skip
HOST = f"""
#define NVRTC_ATTN_DEVICE inline
struct {{ int x; }} gridDim, blockIdx;
namespace nvrtc_attn {{
struct HopperForwardParams {{
  int {", ".join(PARAMETERS)};
  int* softmax_partial;
}};
struct int2 {{ int x, y; }};
template <class Entry>
struct TileListOf {{  // of packed sequences: tests/unit/test_tile_list.py
  int* words;
  int* counter() const {{ return words; }}
  int count() const {{ return 0; }}
  int heads() const {{ return 1; }}
  Entry& operator[](int) const;
}};
struct SpreadWords {{
  void load(void const*) {{}}
  int word(int) const {{ return 0; }}
}};
inline int count_up(int* counter) {{ return (*counter)++; }}
inline int min(int a, int b) {{ return a < b ? a : b; }}
inline int uniform(int a) {{ return a; }}
inline int uniform_quotient(int a, int b) {{ return int(unsigned(a) / unsigned(b)); }}
}}
%s
template <bool kBand>
int hand_out(nvrtc_attn::HopperForwardParams params, int most, int* found) {{
  int counter = 0;
  params.softmax_partial = &counter;
  nvrtc_attn::TileScheduler<kBand, false, true> scheduler{{params}};
  scheduler.begin(true);
  nvrtc_attn::WorkTile tile;
  int count = 0;
  for (; scheduler.next(tile) && count < most; ++count) {{
    found[2 * count] = tile.b * params.num_heads + tile.h;
    found[2 * count + 1] = tile.m_block;
    scheduler.look_ahead(true);
  }}
  return count;
}}
template <bool kBand>
int deal(nvrtc_attn::HopperForwardParams const& params, int most, int* found) {{
  nvrtc_attn::TileScheduler<kBand, false> scheduler{{params}};
  nvrtc_attn::WorkTile tile;
  int count = 0;
  for (; scheduler.next(tile) && count < most; ++count) {{
    found[2 * count] = tile.b * params.num_heads + tile.h;
    found[2 * count + 1] = tile.m_block;
  }}
  return count;
}}
extern "C" int deal(nvrtc_attn::HopperForwardParams const* params, int band, int width, int block, int most,
                    int* found) {{
  gridDim.x = width;
  blockIdx.x = block;
  return band ? deal<true>(*params, most, found) : deal<false>(*params, most, found);
}}
extern "C" int hand_out(nvrtc_attn::HopperForwardParams const* params, int band, int most, int* found) {{
  gridDim.x = 1;
  blockIdx.x = 0;
  return band ? hand_out<true>(*params, most, found) : hand_out<false>(*params, most, found);
}}
"""
"""The header between what it includes and a function that asks for one thread block's tiles."""


@pytest.fixture(scope="module")
def header(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """``hopper/forward/scheduler.cuh`` as a library of the host."""
    text = (repository / "cuda_src/nvrtc_attn/hopper/forward/scheduler.cuh").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("#include", "#pragma once"))]
    return ctypes.CDLL(str(host_cuda.build(HOST % "\n".join(lines), tmp_path_factory, "-shared", "-fPIC")))


def arguments(asked: AttentionProblem, launch: Launch) -> tuple[Any, Any, Any]:
    """The parameters as the library takes them, room for one tile more than there are, and its address."""
    values = {"num_heads": asked.num_heads, "batch": asked.batch, **dict(launch.params)}
    params = (ctypes.c_int * (len(PARAMETERS) + 2))(*(values.get(name, 0) for name in PARAMETERS))
    found = np.empty((values["num_m_blocks"] * asked.batch * asked.num_heads + 1, 2), dtype=np.int32)
    return params, found, found.ctypes.data_as(ctypes.POINTER(ctypes.c_int))


def dealt_by(header: ctypes.CDLL, asked: AttentionProblem) -> list[list[tuple[int, int]]]:
    """What `dealt` returns, by the kernel's own code."""
    launch = launch_of(asked, False)
    params, found, pointer = arguments(asked, launch)
    most = len(found)
    tiles = []
    for block in range(launch.grid):
        count = header.deal(params, int(asked.band), launch.grid, block, most, pointer)
        tiles.append(list(map(tuple, found[:count].tolist())))
    return tiles


GRID = [(16384 // s, s, 2048 // d, d) for d in (64, 128, 256) for s in (512, 1024, 2048, 4096, 8192, 16384)]
SHAPES = [*GRID, (1, 2048, 8, 64), (3, 1000, 7, 64), (61, 200, 4, 64), (5, 3000, 16, 128), (2, 77, 3, 128)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_is_dealt_once(shape: tuple[int, int, int, int], causal: bool) -> None:
    asked = problem(*shape, causal)
    blocks = -(-asked.seqlen_q // hopper_forward_tile.choose_tile(asked).block_m)
    count = Counter(tile for tiles in dealt(asked) for tile in tiles)
    heads = asked.batch * asked.num_heads
    assert count == Counter({(head, m): 1 for head in range(heads) for m in range(blocks)})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_deals_the_same(header: ctypes.CDLL, shape: tuple[int, int, int, int], causal: bool) -> None:
    asked = problem(*shape, causal)
    assert dealt_by(header, asked) == dealt(asked)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_hands_out_every_tile_once(
    header: ctypes.CDLL, shape: tuple[int, int, int, int], causal: bool
) -> None:
    asked = problem(*shape, causal)
    params, found, pointer = arguments(asked, launch_of(asked, True))
    count = header.hand_out(params, int(causal), len(found), pointer)
    order = handed_out(asked)
    assert list(map(tuple, found[:count].tolist())) == order
    assert len(set(order)) == len(order) == len(found) - 1


@pytest.mark.parametrize("shape", GRID, ids=str)
def test_handed_out_work_is_even(shape: tuple[int, int, int, int]) -> None:
    """Also where multiprocessors are taken from the start: their share goes to the others."""
    asked = problem(*shape, True)
    costs = hopper_forward_schedule.tile_costs(asked, hopper_forward_tile.choose_tile(asked))
    order = handed_out(asked)
    grid = launch_of(asked, True).grid
    for blocks in (grid, grid - grid // 8):
        free = [0.0] * blocks  # when each has done its tiles
        for _, m in order:
            heapq.heapreplace(free, free[0] + costs[m])
        assert max(free) < 1.09 * sum(costs[m] for _, m in order) / blocks


def chosen(asked: AttentionProblem) -> bool:
    """Whether its tiles are handed out."""
    spec = hopper_forward.plan_spec(asked, hopper_forward_tile.choose_tile(asked), num_sms=NUM_SMS)
    return spec.launches[-1].config.tickets  # type: ignore[union-attr, return-value]


LARGE = problem(8, 4096, 12, 64, True)
SMALL = problem(16, 512, 16, 64, False)
WIDE = problem(4, 2048, 16, 256, True)
WINDOWED = dataclasses.replace(problem(4, 8192, 12, 64, True), window_left=64, window_right=64)
LENGTHS = dataclasses.replace(problem(16, 1024, 16, 64, False), seqused_k=True)


@pytest.mark.parametrize(
    ("asked", "handed_out"),
    [
        (problem(8, 2048, 12, 64, True), True), (problem(2, 8192, 16, 128, True), True),
        (problem(4, 4096, 16, 128, False), True), (problem(1, 16384, 8, 256, True), True),
        (problem(4, 1024, 12, 64, True), False), (problem(2, 2048, 16, 128, False), False),
        (WIDE, False),
        (WINDOWED, True), (dataclasses.replace(WINDOWED, batch=1, seqlen_q=2048), False),
        (LENGTHS, True), (dataclasses.replace(LENGTHS, seqused_k=False), False),
        (LARGE, True), (dataclasses.replace(LARGE, bias=dense_layout((1, 12, 4096, 4096), "bfloat16")), True),
        (dataclasses.replace(SMALL, bias=dense_layout((1, 16, 512, 512), "bfloat16")), True), (SMALL, False),
        (dataclasses.replace(SMALL, batch=4, bias=dense_layout((1, 16, 512, 512), "bfloat16")), False),
        (dataclasses.replace(WIDE, bias=dense_layout((1, 16, 2048, 2048), "bfloat16")), False),
        (dataclasses.replace(LARGE, mask=dense_layout((8, 1, 1, 4096), "uint8")), False),
    ],
)  # fmt: skip
def test_what_is_handed_out(asked: AttentionProblem, handed_out: bool) -> None:
    """By the work of a multiprocessor and whether tiles differ; small calls and biases have a fixed order."""
    assert chosen(asked) == handed_out


def test_what_is_handed_out_has_a_counter_of_zeros() -> None:
    asked = problem(8, 2048, 12, 64, True)
    spec = hopper_forward.plan_spec(asked, hopper_forward_tile.choose_tile(asked), num_sms=NUM_SMS)
    assert spec.ticket_bytes == 4
    fixed = dataclasses.replace(asked, batch=1)
    assert hopper_forward.plan_spec(fixed, hopper_forward_tile.choose_tile(fixed), num_sms=NUM_SMS).ticket_bytes == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_work_is_even(shape: tuple[int, int, int, int], causal: bool) -> None:
    # 132 blocks are 12 times 11: where the query tiles of a head divide that, a block would always have the same one.
    asked = problem(*shape, causal)
    costs = hopper_forward_schedule.tile_costs(asked, hopper_forward_tile.choose_tile(asked))
    sums = [sum(costs[m] for _, m in tiles) for tiles in dealt(asked)]
    # No block can have less than a whole number of full tiles.
    best = max(sum(sums) / len(sums), 0 if causal else costs.max() * (shape[0] * shape[2] * len(costs) // NUM_SMS))
    assert max(sums) < 1.06 * best + (0 if causal else costs.max())
    if shape[3] == 64 and shape[1] == 1024 and not causal:  # a sixth of the tiles has one row block of three
        assert max(sums) < 0.94 * costs.max() * max(map(len, dealt(asked)))


@pytest.mark.parametrize(("rows", "keys"), [(16, 64), (8, 8), (32, 16), (48, 32), (1, 5), (5, 3), (410, 1024)])
def test_key_tiles_begin_at_rows_of_their_own(rows: int, keys: int) -> None:
    """Evenly, also with fewer query than key tiles: the rule is in ``hopper/backward/schedule.cuh``."""
    step = hopper_backward_schedule.query_step(rows, keys)
    starts = [min(n * step >> 12, rows - 1) for n in range(keys)]
    assert max(n * step for n in range(keys)) < 2**31
    together = [starts.count(row) for row in set(starts)]
    assert max(together) <= -(-keys // rows) + 1, "of those that begin at one row"
    assert len(together) >= min(rows, keys) * 0.9
    if rows % keys == 0:
        assert starts == [n * (rows // keys) for n in range(keys)]


def test_first_rows_fit_in_32_bits() -> None:
    rows = (1 << 19) - 1
    assert (rows - 1) * hopper_backward_schedule.query_step(rows, rows) < 2**31
    assert hopper_backward_schedule.query_step(1 << 19, 1 << 19) == 0


def test_plan_hands_the_step_to_the_kernel() -> None:
    few = dataclasses.replace(
        problem(1, 2048, 8, 128, False), seqlen_k=8192, k=dense_layout((1, 8192, 8, 128), "bfloat16"),
        v=dense_layout((1, 8192, 8, 128), "bfloat16"),
    )  # fmt: skip
    spec = hopper_backward.plan_spec(few, hopper_backward_tile.choose_tile(few, NUM_SMS), num_sms=NUM_SMS)
    main = hopper_backward.kernel_of(spec)
    params = dict(main.params)
    assert params["num_m_blocks"] < params["num_n_blocks"]
    assert (
        params["query_step"] == hopper_backward_schedule.query_step(params["num_m_blocks"], params["num_n_blocks"]) > 0
    )


@pytest.mark.parametrize(("num_sms", "rows"), [(132, 128), (114, 192), (90, 64), (78, 128)])
def test_tile_follows_the_multiprocessors_of_the_gpu(num_sms: int, rows: int) -> None:
    """By what the last wave leaves idle: 128 tiles of 128 rows, 96 of 192, or 256 of 64, three on a multiprocessor."""
    asked = problem(2, 1024, 8, 64, False)
    assert hopper_forward_tile.choose_tile(asked, num_sms).block_m == rows
    found = hopper_forward.choose_forward(asked, arch="sm_90", num_sms=num_sms, smem_limit=232448)
    assert not isinstance(found, list)
    assert found.launches[0].config.block_m == rows
    plans = hopper_forward.candidates(asked, arch="sm_90", num_sms=num_sms, smem_limit=232448)
    assert plans[0] == found


def test_key_tiles_of_which_less_stays_empty() -> None:
    """By the columns that are computed, and only where nothing else decides them."""

    def columns(seqlen: int, head_dim: int = 64, causal: bool = False) -> int:
        return hopper_forward_tile.large_tile(problem(64, seqlen, 12, head_dim, causal)).block_n

    lengths = (196, 197, 257, 577, 729, 1024, 4096)
    assert [columns(n) for n in lengths] == [112, 112, 96, 128, 128, 128, 128]
    assert [columns(n, 112) for n in lengths] == [80, 80, 80, 80, 64, 64, 80]
    assert columns(197, causal=True) == 128
    assert [columns(n, 160) for n in lengths] == [80, 80, 64, 64, 64, 64, 96]
    for n in range(129, 1200):
        width = columns(n)
        computed = -(-n // width) * width
        assert computed <= -(-n // 128) * 128, n


def test_the_fitting_tile_is_a_candidate() -> None:
    asked = problem(64, 197, 12, 64, False)
    plans = hopper_forward.candidates(asked, arch="sm_90", num_sms=NUM_SMS, smem_limit=232448)
    assert [spec.launches[0].config.block_n for spec in plans].count(112) == 1
    assert len({spec.launches[0].config for spec in plans}) == len(plans)
