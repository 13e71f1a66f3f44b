"""Tiles of the Hopper forward kernel, forced where the table would not choose them: right on all that they serve."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import modifiers
import numpy as np
import pytest
from harness import Run, failures, forget_plans, oracle, torch

import nvrtc_attn
from nvrtc_attn.front.call import CallOptions, describe
from nvrtc_attn.front.problem import AttentionProblem
from nvrtc_attn.heuristics import hopper_forward, hopper_forward_config, hopper_forward_tile

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the Hopper kernels need compute capability 9.0",
)
Options = dict[str, Any]
TAILS: Options = {"batch": 3, "seqlen_q": 333, "seqlen_k": 411, "num_heads": 4, "num_heads_kv": 2}
MANY: Options = {"batch": 5, "seqlen_q": 1100, "seqlen_k": 1000, "num_heads": 8}
PACKED: Options = {
    "seqlens": ((700, 700), (0, 300), (300, 0), (1, 5), (513, 1025), (1025, 513), (128, 128), (64, 640)),
    "num_heads": 4, "num_heads_kv": 2, "lead": (3, 200), "tail": (9, 5),
}  # fmt: skip
USED = (650, 5, 0, 0, 1000, 513, 100, 640)


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the table answer with these switches, for plans made from here on."""
    choose_tile = hopper_forward_tile.large_tile
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "hopper")

    def forced(**switches: Any) -> None:
        def tile(problem: AttentionProblem, *num_sms: int) -> hopper_forward_config.Tile:
            return dataclasses.replace(choose_tile(problem, *num_sms), **{"num_stages": 2, **switches})

        forget_plans(monkeypatch)
        monkeypatch.setattr(hopper_forward, "choose_tile", tile)

    return forced


def check_forward(case: cases.Case) -> None:
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    found = failures(case, run.forward(), exact, low, run.arrays)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "columns", "slots"),
    [
        (72, 112, 2),
        (72, 96, 2),
        (72, 64, 4),
        (80, 112, 2),
        (80, 80, 3),
        (80, 64, 4),
        (96, 96, 2),
        (96, 80, 3),
        (96, 64, 4),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (200, 30), "dtype": "float16"}, {"softmax_scale": 5.0}],
    ids=str,
)
def test_192_rows_between_head_dims(
    head_dim: int, columns: int, slots: int, options: Options, packed: bool, force: Any
) -> None:
    force(block_m=192, block_n=columns, num_stages=slots, num_stages_q=2, half_tile=False)
    shape = PACKED if packed else TAILS
    check_forward(cases.make_case("between", **{"dtype": "bfloat16", "head_dim": head_dim, **shape, **options}))


@pytest.mark.parametrize("slots", [3, 4])
@pytest.mark.parametrize("rows", [128, 192])
@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 128, "causal": True},
        {"head_dim": 128, "causal": "top_left", "dtype": "float16"},
        {"head_dim": 128, "causal": True, "softcap": 20.0},
        {"head_dim": 96, "softcap": 20.0, "window_size": (100, 300)},
        {"head_dim": 64, "causal": True, "softcap": 20.0},
        {"head_dim": 64, "softmax_scale": -0.1},
        {"head_dim": 48, "causal": True},
    ],
    ids=str,
)
def test_slots_of_narrow_key_tiles(rows: int, slots: int, options: Options, force: Any) -> None:
    """More slots than a query tile has key tiles, and fewer."""
    force(block_m=rows, block_n=64, num_stages=slots, num_stages_q=2, half_tile=False)
    for shape in (TAILS, MANY, {**TAILS, "seqlen_k": 70}):
        check_forward(cases.make_case("slots", **{"dtype": "bfloat16", **shape, **options}))


@pytest.mark.parametrize("half_tile", [False, True])
@pytest.mark.parametrize("slots", [3, 4])
def test_slots_of_wide_causal_tiles(slots: int, half_tile: bool, force: Any) -> None:
    force(block_m=192, block_n=128, num_stages=slots, num_stages_q=2, half_tile=half_tile)
    for shape in (TAILS, MANY):
        check_forward(cases.make_case("slots", dtype="bfloat16", head_dim=64, causal=True, **shape))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("columns", [112, 128])
@pytest.mark.parametrize(
    "options",
    [
        {**TAILS},
        {**MANY, "causal": True},
        {**TAILS, "causal": "top_left", "dtype": "float16"},
        {**TAILS, "softmax_scale": 4.0, "causal": True},
        {**PACKED, "causal": True},
        {**PACKED, "seqused_k": USED},
    ],
    ids=str,
)
def test_wide_key_tiles_where_values_are_narrow(columns: int, lazy: bool, options: Options, force: Any) -> None:
    force(block_n=columns, lazy_max=lazy)
    check_forward(cases.make_case("mla", **{"dtype": "bfloat16", "head_dim": 192, "head_dim_v": 128, **options}))


@pytest.mark.parametrize(
    "options",
    [
        {**TAILS},
        {**MANY, "causal": True},
        {**TAILS, "causal": "top_left", "dtype": "float16"},
        {**TAILS, "softmax_scale": 4.0, "dtype": "float16"},
        {**TAILS, "softmax_scale": 30.0, "causal": True},
        {**MANY, "window_size": (127, 0), "softcap": 20.0},
        {**TAILS, "softmax_scale": -0.3},
        {**TAILS, "seqlen_k": 70},
        {**PACKED, "causal": True},
        {**PACKED, "seqused_k": USED},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "tile"),
    [
        (192, 192, {"block_n": 64, "num_stages": 3}),
        (160, 160, {"block_n": 64, "num_stages": 3}),
        (192, 192, {"block_n": 80}),
        (144, 144, {"block_n": 96}),
        (192, 128, {"block_n": 64, "num_stages": 4}),
        (256, 256, {"block_n": 64, "ping_pong": False}),
        (224, 224, {"block_n": 80, "ping_pong": False}),
        (192, 192, {"block_m": 64, "block_n": 128, "ping_pong": False}),
        (256, 256, {"block_m": 64, "block_n": 64, "num_stages": 3, "ping_pong": False}),
    ],
    ids=str,
)
def test_corrections_that_wait_beyond_head_dim_128(
    head_dim: int, head_dim_v: int, tile: Options, options: Options, force: Any
) -> None:
    """With scales of 4 and 30 the largest score of a row grows far enough that tiles are computed again."""
    force(**tile, lazy_max=True)
    check_forward(
        cases.make_case("wide", **{"dtype": "bfloat16", "head_dim": head_dim, "head_dim_v": head_dim_v, **options})
    )


@pytest.mark.parametrize(
    "tile",
    [
        {"block_m": 192, "block_n": 112, "num_stages": 3},
        {"block_m": 128, "block_n": 128, "half_tile": True},
        {"block_m": 192, "block_n": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"seqused_k": USED}], ids=["", "used"])
def test_packed_causal(head_dim: int, tile: Options, options: Options, force: Any) -> None:
    if head_dim == 128 and tile["block_m"] == 192:
        pytest.skip("192 rows do not fit")
    force(**tile)
    check_forward(cases.make_case("packed", dtype="bfloat16", head_dim=head_dim, causal=True, **PACKED, **options))


SEVERAL: dict[str, Options] = {
    "three": {"num_stages": 3, "num_stages_q": 2, "lazy_max": True, "min_blocks_per_sm": 3},
    "two": {"num_stages": 3, "num_stages_q": 1, "lazy_max": True, "min_blocks_per_sm": 2},
    "one": {},
}
"""Thread blocks of one consumer on a multiprocessor, as `hopper_small` has them."""


@pytest.mark.parametrize(
    "options",
    [
        {**TAILS},
        {**MANY, "causal": True},
        {**MANY, "causal": "top_left", "dtype": "float16"},
        {**MANY, "window_size": (127, 0), "softcap": 20.0},
        {**TAILS, "softmax_scale": -0.3, "causal": True},
        {**TAILS, "seqused_k": (411, 0, 77), "causal": True},
        {**PACKED},
        {**PACKED, "causal": True, "softcap": 9.0},
        {**PACKED, "window_size": (100, 0)},
        {**PACKED, "seqused_k": USED},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("blocks", "head_dim", "columns"),
    [
        ("three", 64, 64), ("three", 64, 48), ("three", 32, 64), ("three", 48, 64), ("three", 16, 64),
        ("two", 128, 64), ("one", 64, 128), ("one", 80, 112), ("one", 128, 128), ("one", 160, 128), ("one", 256, 64),
    ],
)  # fmt: skip
def test_64_rows(blocks: str, head_dim: int, columns: int, options: Options, force: Any) -> None:
    force(block_m=64, block_n=columns, half_tile=False, ping_pong=False, **SEVERAL[blocks])
    check_forward(cases.make_case("rows", **{"dtype": "bfloat16", "head_dim": head_dim, **options}))


@pytest.mark.parametrize("mask", ["documents", "natten", "causal documents"])
@pytest.mark.parametrize(("head_dim", "columns"), [(64, 128), (128, 64)])
def test_64_rows_of_a_mask_mod(mask: str, head_dim: int, columns: int, force: Any) -> None:
    """Two thread blocks with bits of undecided tiles, which the autotuner tries."""
    large = hopper_forward_tile.large_tile
    sizes, heads_kv = (2, 4, 1900, 1700), 2
    rng = np.random.default_rng(3)
    case = next(x for x in modifiers.sparse_cases() if x.name == mask)
    arrays = case.arrays(sizes, rng)
    q, k, v = (
        torch.from_numpy(rng.standard_normal((sizes[0], rows, heads, head_dim))).cuda().half()
        for rows, heads in ((sizes[2], sizes[1]), (sizes[3], heads_kv), (sizes[3], heads_kv))
    )
    exact, lse = modifiers.textbook(*(x.double().cpu().numpy() for x in (q, k, v)), *case.make(arrays))
    modifier = nvrtc_attn.trace(*case.make({name: torch.from_numpy(x).cuda() for name, x in arrays.items()}))
    problem = describe(q, k, v, options=CallOptions(), stream=None, modifier=modifier).problem
    assert large(problem).tile_bits
    narrow = head_dim <= 64
    force(
        block_m=64, block_n=columns, num_stages=2, num_stages_q=1 + narrow, ping_pong=False, min_blocks_per_sm=2,
    )  # fmt: skip
    out, our_lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True)
    np.testing.assert_allclose(out.double().cpu().numpy(), exact, atol=4e-3)
    np.testing.assert_allclose(our_lse.double().cpu().numpy(), lse, atol=4e-3)


@pytest.mark.reliability(35)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "tile", "options"),
    [
        ("packed-64", {}, {"head_dim": 64, "seqlens": tuple((100 + 7 * n, 90 + 11 * n) for n in range(60))}),
        ("packed-128", {}, {"head_dim": 128, "seqlens": tuple((1 + 37 * (n % 9), 40 * (n % 7)) for n in range(200))}),
        ("packed-wide", {"block_m": 192, "block_n": 128}, {"head_dim": 64, "seqlens": ((700, 700), (513, 1030)) * 9}),
        ("rows", {"block_m": 64, "block_n": 64, "ping_pong": False, **SEVERAL["three"]}, {"head_dim": 64, **MANY}),
        ("between", {"block_m": 192, "block_n": 96, "half_tile": False}, {"head_dim": 80, **MANY}),
        ("192", {"block_n": 64, "num_stages": 3}, {"head_dim": 192, **MANY}),
        ("192-128", {"block_n": 64, "num_stages": 4}, {"head_dim": 192, "head_dim_v": 128, **MANY}),
        ("256", {}, {"head_dim": 256, **MANY}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_1000_repeats(name: str, tile: Options, options: Options, causal: bool, force: Any) -> None:
    """The forward pass adds in a fixed order, whoever takes which tile: the same bits every time."""
    force(**tile)
    run = Run(cases.make_case(name, **{"dtype": "bfloat16", "num_heads": 4, "causal": causal, **options}))
    first = run.forward()
    for repeat in range(1000):
        again = run.forward()
        for output, x in again.items():
            same = torch.equal(x.contiguous().view(torch.uint8), first[output].contiguous().view(torch.uint8))
            assert same, f"{output}, repeat {repeat}"
