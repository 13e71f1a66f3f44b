"""Masks with whole tiles of nothing: what the plan says of them, and results of the kernels that walk it.

Every problem here is small: the threshold from which on a plan is made is taken away.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import cases
import numpy as np
import pytest
from harness import DEVICE, Run, backend, failures, families, forget_plans, oracle, torch, walkers
from tile_words_twin import line_order, order_in, tile_bits, tile_words, words_in

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.heuristics import tile_words as heuristic
from nvrtc_attn.heuristics.tile_words import line_order_of, words_of

M, N = 700, 1100
"""Eleven and nine tiles of 64 and 128, the last ones partly filled."""


@pytest.fixture(autouse=True)
def _always_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heuristic, "MIN_FLOPS", 0)
    forget_plans(monkeypatch, kernels=True)


def check(case: cases.Case, mask: Any = None, *, poison: bool = False, forward_walks: bool = True) -> None:
    """Forward and backward of ``case``, with ``mask`` in its place, in every family; and words were walked in each.

    ``poison``: keys and values that the mask hides from every query are NaN. ``forward_walks``: not where heads are
    packed and a tile of rows has no line of words of its own.
    """
    arrays = cases.make_arrays(case)
    if mask is not None:
        arrays["mask"] = np.ascontiguousarray(np.broadcast_to(mask, cases.shapes(case)["mask"]))
    exact, low = oracle(case, arrays)
    if poison:
        hidden = ~(np.broadcast_to(arrays["mask"], (case.batch, 1, 1, case.seqlen_k)) != 0)[:, 0, 0]
        arrays = {**arrays, "k": arrays["k"].copy(), "v": arrays["v"].copy()}
        arrays["k"][hidden] = np.nan
        arrays["v"][hidden] = np.nan
    run = Run(case, arrays)
    lines = []
    for family in families(case):
        with backend(family):
            forget_plans(kernels=True)
            forward = run.forward()
            assert walkers("forward") or not forward_walks, family
            found = failures(case, forward, exact, low, run.arrays)
            backward = run.backward(forward)
            found += failures(case, backward, exact, low, run.arrays)
            wide = family == "hopper" and (case.head_dim > 64) != (case.head_dim_v > 64)  # two blocks compute all tiles
            if not case.deterministic and case.head_dim <= 128 and not wide:
                assert walkers("backward"), family
        lines += [f"{family}: {line}" for line in found]
    assert not lines, "\n".join([f"{case}", *lines])


def case(name: str, **fields: Any) -> cases.Case:
    defaults: dict[str, Any] = {"batch": 3, "seqlen_q": M, "seqlen_k": N, "num_heads": 2, "dtype": "bfloat16"}
    return cases.make_case(name, **{**defaults, **fields})


def lengths(*kept: int, left: bool = False, keys: int = N) -> Any:
    """A padding mask [B, 1, 1, Mk] that keeps so many keys of each batch entry."""
    flags = np.arange(keys) < np.array(kept)[:, None]
    return (flags[:, ::-1] if left else flags)[:, None, None]


def diagonal_blocks(rows: int = M, keys: int = N, documents: int = 4) -> Any:
    """[1, 1, Mq, Mk]: a query sees the keys of its own document."""
    at = np.arange(rows) * documents // rows
    return (at[:, None] == np.arange(keys) * documents // keys)[None, None]


# ----------------------------------------------------------------------------------------------------------- the words


@pytest.mark.parametrize("kind", ["padding", "left_padding", "blocks", "random", "full", "empty"])
@pytest.mark.parametrize("shape", ["b11k", "11qk", "1h1k", "b1q1", "bhqk"])
@pytest.mark.parametrize("layout", ["contiguous", "unaligned", "last_strided"])
def test_words_are_those_of_the_twin(shape: str, kind: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plan kernel leaves them in the workspace, forward, and by key tiles where the Hopper backward runs.

    There also the order of key tiles, as if it paid for so few.
    """
    monkeypatch.setattr(heuristic, "ORDERED_LINES", range(2, 1025))
    asked = case(f"{shape} {kind}", mask=shape, mask_kind=kind, layout=layout, mask_dtype="uint8", num_heads=32)
    run = Run(asked)
    mask = run.arrays["mask"]
    described: Any = SimpleNamespace(mask=SimpleNamespace(shape=mask.shape), seqlen_q=M, seqlen_k=N, modifier=None)
    i, options = run.inputs, run.options
    for family in families(asked):
        with backend(family):
            forget_plans(kernels=True)
            out, lse = torch.empty_like(run.inputs["dout"]), torch.empty(3, 32, M, device=DEVICE)
            size = api.forward_workspace_bytes(i["q"], i["k"], i["v"], lse=lse, **options)
            workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
            nvrtc_attn.attention_forward(i["q"], i["k"], i["v"], out, lse=lse, workspace=workspace, **options)
            (config,) = walkers("forward")
            assert not getattr(config, "split", False), "the words would lie behind partial results"
            words = words_of(described, config.block_m, config.block_n)
            assert np.array_equal(words_in(workspace, words), tile_words(mask, words, M, N)), family
            grads = {name: torch.empty_like(i[name[1:]]) for name in ("dq", "dk", "dv")}
            size = api.backward_workspace_bytes(i["q"], i["k"], i["v"], **options)
            workspace = torch.full((size + (1 << 20),), 255, dtype=torch.uint8, device=DEVICE)
            nvrtc_attn.attention_backward(
                i["dout"], i["q"], i["k"], i["v"], out, lse, *grads.values(), workspace=workspace, **options
            )
            (config,) = walkers("backward")
            if config.kernel == "backward_hopper":  # whose workspace begins with them
                words = words_of(described, config.block_m, config.block_n, transposed=True)
                assert np.array_equal(words_in(workspace, words), tile_words(mask, words, M, N))
                order = line_order_of(words, words.nbytes)
                assert order is not None
                expected = line_order(tile_bits(mask, words, M, N)[0])
                assert np.array_equal(order_in(workspace.cpu().numpy(), order), expected)


# --------------------------------------------------------------------------------------------------------- the results


@pytest.mark.parametrize("shape", ["b11k", "11qk", "1h1k"])
def test_an_expanded_mask_is_the_mask_that_was_expanded(shape: str) -> None:
    """The words are made once for what the mask tells apart, and results have the same bits."""
    asked = case(f"{shape} expanded", mask=shape, mask_kind="padding", mask_dtype="uint8", deterministic=True)
    run = Run(asked)
    i, given = run.inputs, run.inputs["mask"]
    for family in families(asked):
        with backend(family):
            forget_plans(kernels=True)
            sizes, found = [], []
            for mask in (given, given.expand(3, 2, M, N)):
                i["mask"] = mask
                ways = api.forward_workspace_bytes, partial(api.backward_workspace_bytes, deterministic=True)
                sizes.append([way(i["q"], i["k"], i["v"], **run.options) for way in ways])
                forward = run.forward()
                found.append([*forward.values(), *run.backward(forward).values()])
            assert sizes[0] == sizes[1], family
            assert all(map(torch.equal, *found)), family


@pytest.mark.parametrize("heads_kv", [1, 4])
@pytest.mark.parametrize("mask", ["b11k", "11qk", "bhqk", "1h1k"])
@pytest.mark.parametrize("causal", [False, True])
def test_key_tiles_by_their_work(mask: str, causal: bool, heads_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it paid for so few; a deterministic pass keeps the order that it must have."""
    monkeypatch.setattr(heuristic, "ORDERED_LINES", range(2, 1025))
    for deterministic in (False, True):
        asked = case(
            f"order {mask} {causal} {heads_kv} {deterministic}", mask=mask, mask_kind="blocks", num_heads=4,
            num_heads_kv=heads_kv, causal=causal, deterministic=deterministic, head_dim=64 if causal else 128,
        )  # fmt: skip
        check(asked)


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("left", [False, True])
def test_padding(head_dim: int, left: bool) -> None:
    """Lengths at and beside tile borders; hidden keys and values are NaN, and take no part."""
    asked = case(f"padding {head_dim} {left}", mask="b11k", head_dim=head_dim, batch=5)
    check(asked, lengths(N, 1, 128, 513, 640, left=left), poison=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", ["11qk", "b1qk", "1hqk", "bhqk"])
def test_blocks(head_dim: int, shape: str) -> None:
    check(case(f"diagonal {head_dim} {shape}", mask=shape, head_dim=head_dim), diagonal_blocks())
    check(case(f"blocks {head_dim} {shape}", mask=shape, mask_kind="blocks", head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_and_batch_entries_without_any_key(head_dim: int) -> None:
    """Out is 0, lse -inf, gradients 0, whatever the outputs held: whole query tiles, whole key tiles, whole entries."""
    asked = case(f"holes {head_dim}", mask="b1qk", head_dim=head_dim)
    mask = np.ones((3, 1, M, N), bool)
    mask[0, :, 100:500] = False
    mask[0, :, :, 250:900] = False
    mask[1] = False
    mask[2, :, 3::7] = False
    check(asked, mask)
    check(case(f"empty entry {head_dim}", mask="b11k", head_dim=head_dim), lengths(0, N, 70))
    check(case(f"all empty {head_dim}", mask="1111", head_dim=head_dim, seqlen_k=N), np.zeros((1, 1, 1, 1), bool))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "band",
    [{"causal": True}, {"causal": "top_left"}, {"window_size": (200, 50)}, {"causal": True, "window_size": (300, 0)}],
    ids=str,
)
def test_with_causal_and_windows(band: dict[str, Any], head_dim: int) -> None:
    check(case(f"{band} padding {head_dim}", mask="b11k", head_dim=head_dim, **band), lengths(N, 300, 700, left=True))
    check(case(f"{band} diagonal {head_dim}", mask="11qk", head_dim=head_dim, **band), diagonal_blocks())
    check(case(f"{band} blocks {head_dim}", mask="bhqk", mask_kind="blocks", head_dim=head_dim, **band))


@pytest.mark.parametrize("shape", ["b11k", "1hqk", "bh1k", "bhqk", "b1q1"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_grouped_heads(head_dim: int, shape: str) -> None:
    """Query heads of a key head with different tiles: a key tile goes over all, also where some have none."""
    kind = "blocks" if shape.endswith("qk") else "padding"
    asked = case(
        f"grouped {shape} {head_dim}", mask=shape, mask_kind=kind, head_dim=head_dim, num_heads=6, num_heads_kv=2
    )
    check(asked)
    mask = np.array(cases.make_arrays(asked)["mask"])
    if mask.shape[1] > 1:
        mask[:, 0] = mask[:, 4:] = False
        check(asked, mask)


@pytest.mark.parametrize(
    "more",
    [
        {"dropout_p": 0.2, "head_dim": 64},
        {"dropout_p": 0.2, "head_dim": 128},
        {"softcap": 5.0, "head_dim": 64},
        {"softmax_scale": -0.1, "head_dim": 64},
        {"bias": "bhqk", "head_dim": 64},
        {"bias": "bhqk", "head_dim": 64, "num_heads": 4, "num_heads_kv": 2, "causal": True},
        {"bias": "1hqk", "bias_dtype": "float32", "head_dim": 64},
        {"bias": "bhqk", "head_dim": 128},
        {"deterministic": True, "head_dim": 64},
        {"deterministic": True, "head_dim": 64, "causal": True, "num_heads": 4, "num_heads_kv": 2},
        {"deterministic": True, "head_dim": 128, "bias": "bhqk"},
        {"deterministic": True, "head_dim": 128, "window_size": (300, 40)},
        {"seqused_k": (1100, 40, 600), "head_dim": 64},
        {"dtype": "float32", "head_dim": 64},
        {"dtype": "float16", "head_dim": 80, "head_dim_v": 40},
        {"layout": "unaligned", "head_dim": 64},
        {"layout": "bhmk", "head_dim": 128},
        {"dlse": True, "head_dim": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["padding", "diagonal", "blocks"])
def test_beside_the_other_features(form: str, more: dict[str, Any]) -> None:
    name = f"{form} {more}"
    if form == "padding":
        check(case(name, mask="b11k", **more), lengths(N, 200, 777))
    elif form == "diagonal":
        check(case(name, mask="11qk", **more), diagonal_blocks())
    else:
        check(case(name, mask="bhqk", mask_kind="blocks", **more))


@pytest.mark.parametrize("rows", [1, 4, 17, 40, 64])
@pytest.mark.parametrize("shape", ["b11k", "b1qk", "11qk"])
def test_few_queries_with_split_keys(rows: int, shape: str) -> None:
    """Splits that have no tile at all write that they have none; heads of a group are rows of one tile."""
    keys = 5000
    for heads_kv in (4, 1):
        asked = case(
            f"few {rows} {shape} {heads_kv}", seqlen_q=rows, seqlen_k=keys, mask=shape, num_heads=4,
            num_heads_kv=heads_kv, head_dim=128, batch=2,
        )  # fmt: skip
        mask = lengths(keys, 900, left=True, keys=keys)
        if shape != "b11k":
            mask = np.repeat(mask, rows, axis=2)
            mask[:, :, ::3, 600:4400] = False
        check(asked, mask[:1] if shape == "11qk" else mask, forward_walks=shape == "b11k" or heads_kv == 4)


@pytest.mark.parametrize("family", ["portable", "hopper"])
def test_a_captured_graph_follows_the_mask_that_it_finds(family: str) -> None:
    """Another mask in the same memory, the graph replayed: the plan is part of the graph."""
    asked = case("graph", mask="b11k", deterministic=True)
    if family not in families(asked):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    run = Run(asked)
    i, options = run.inputs, run.options

    def both(workspace: Any) -> dict[str, Any]:
        out, lse = torch.full_like(i["dout"], float("nan")), torch.full((3, 2, M), float("nan"), device=DEVICE)
        grads = {name: torch.full_like(i[name[1:]], float("nan")) for name in ("dq", "dk", "dv")}
        nvrtc_attn.attention_forward(i["q"], i["k"], i["v"], out, lse=lse, workspace=workspace, **options)
        nvrtc_attn.attention_backward(
            i["dout"], i["q"], i["k"], i["v"], out, lse, *grads.values(), workspace=workspace, deterministic=True,
            **options,
        )  # fmt: skip
        return {"out": out, "lse": lse, **grads}

    def set_mask(mask: Any) -> None:
        i["mask"].copy_(torch.from_numpy(np.ascontiguousarray(mask)).to(DEVICE))

    with backend(family):
        size = api.backward_workspace_bytes(i["q"], i["k"], i["v"], deterministic=True, **options) + (1 << 20)
        size = max(size, api.forward_workspace_bytes(i["q"], i["k"], i["v"], return_lse=True, **options))
        workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        both(workspace)  # compiled and loaded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both(workspace)
        for mask in (lengths(N, 5, 600), lengths(1, N, 0, left=True), lengths(N, N, N), lengths(0, 0, 0)):
            set_mask(mask)
            graph.replay()
            found = {name: x.clone() for name, x in captured.items()}
            for name, x in both(workspace).items():
                assert torch.equal(found[name], x), name


@pytest.mark.parametrize("head_dim", [64, 128])
def test_repeats_have_the_same_bits(head_dim: int) -> None:
    """Producer and consumers must agree about every tile, whatever their pace: 300 runs beside each other's traffic."""
    asked = case(f"repeat {head_dim}", mask="b1qk", mask_kind="blocks", head_dim=head_dim, batch=4, num_heads=16)
    run = Run(asked)
    first = run.forward()
    grads = run.backward(first)
    for _ in range(300):
        again = run.forward()
        assert all(torch.equal(again[name], first[name]) for name in first)
        others = run.backward(first)
        for name in ("dk", "dv"):  # dq is summed in the order in which blocks arrive
            assert torch.equal(others[name], grads[name]), name


def test_a_launch_for_the_plan_is_made_from_its_threshold_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words variant and the other give the same results within rounding, on either side of the threshold."""
    asked = case("threshold", mask="b11k")
    run = Run(asked)
    with_plan = run.forward()
    assert walkers("forward")
    monkeypatch.setattr(heuristic, "MIN_FLOPS", 1e18)
    forget_plans(kernels=True)
    without = run.forward()
    assert not walkers("forward")
    assert torch.allclose(with_plan["out"].float(), without["out"].float(), atol=2e-2)
    assert torch.allclose(with_plan["lse"], without["lse"], atol=1e-3)
