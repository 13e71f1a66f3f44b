"""Few keys and few queries: dq of one key tile is stored; splits are a cluster; a Hopper tile has rows of several
heads, and its keys are split."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cases
import pytest
from harness import DEVICE, Run, failures, forget_plans, oracle, torch

from nvrtc_attn.front.call import CallOptions, describe_shapes
from nvrtc_attn.front.problem import AttentionProblem
from nvrtc_attn.front.tensors import Device
from nvrtc_attn.heuristics import (
    choose_forward,
    hopper_forward,
    hopper_forward_config,
    hopper_forward_tile,
    portable_backward,
    portable_forward,
    portable_forward_config,
)
from nvrtc_attn.jit.compile import compile_kernel
from nvrtc_attn.plans import autotune
from nvrtc_attn.runtime import driver, kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans of the portable family with these switches, for plans made from here on."""
    choose = portable_backward.choose_backward
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "portable")

    def forced(**switches: Any) -> list[Any]:
        made = []

        def chosen(problem: AttentionProblem, **target: Any) -> Any:
            made.append(choose(problem, **{**target, **switches}))
            return made[-1]

        forget_plans(monkeypatch)
        monkeypatch.setattr(portable_backward, "choose_backward", chosen)
        return made

    return forced


CASES: dict[str, dict[str, Any]] = {
    "windows_of_swin": {"batch": 5, "seqlen_q": 49, "seqlen_k": 49, "num_heads": 4, "head_dim": 32, "bias": "1hqk"},
    "full_bias": {"seqlen_q": 64, "seqlen_k": 64, "head_dim": 32, "bias": "bhqk", "dlse": True},
    "float32_bias": {"seqlen_q": 63, "seqlen_k": 50, "head_dim": 64, "bias": "11qk", "bias_dtype": "float32"},
    "one_row": {"seqlen_q": 1, "seqlen_k": 17, "head_dim": 64},
    "several_query_tiles": {"seqlen_q": 333, "seqlen_k": 100, "head_dim": 64, "num_heads": 6, "num_heads_kv": 2},
    # Rows without a key, before the first and after the last query tile that sees one.
    "rows_before": {"seqlen_q": 300, "seqlen_k": 49, "head_dim": 64, "causal": True},
    "rows_after": {"seqlen_q": 400, "seqlen_k": 100, "head_dim": 40, "causal": "top_left", "window_size": (10, 0)},
    "diagonal": {"seqlen_q": 128, "seqlen_k": 128, "head_dim": 64, "causal": True, "dlse": True},
    "diagonal_128": {"seqlen_q": 200, "seqlen_k": 128, "head_dim": 128, "causal": "top_left"},
    "window": {"seqlen_q": 77, "seqlen_k": 77, "head_dim": 32, "window_size": (20, 5)},
    "dropout": {"seqlen_q": 61, "seqlen_k": 59, "head_dim": 64, "dropout_p": 0.2, "softcap": 5.0},
    "negative_scale": {"seqlen_q": 60, "seqlen_k": 64, "head_dim": 32, "softmax_scale": -0.2},
    "narrow_head": {"seqlen_q": 70, "seqlen_k": 33, "head_dim": 8, "head_dim_v": 24},
    "odd_head": {"seqlen_q": 70, "seqlen_k": 33, "head_dim": 59, "head_dim_v": 37},
    "head_of_72": {"seqlen_q": 129, "seqlen_k": 120, "head_dim": 72, "head_dim_v": 104},
    "256_keys": {"seqlen_q": 256, "seqlen_k": 256, "num_heads": 4, "head_dim": 32, "bias": "1hqk"},
    "200_keys": {"seqlen_q": 333, "seqlen_k": 200, "head_dim": 64, "causal": True, "dlse": True},
    "head_of_256": {"seqlen_q": 129, "seqlen_k": 60, "head_dim": 256},
    "float32": {"seqlen_q": 65, "seqlen_k": 64, "head_dim": 64, "dtype": "float32", "bias": "1hqk"},
    "unaligned": {"seqlen_q": 50, "seqlen_k": 51, "head_dim": 32, "layout": "unaligned"},
    "last_strided": {"seqlen_q": 50, "seqlen_k": 51, "head_dim": 64, "layout": "last_strided"},
    "packed": {"seqlen_q": 51, "seqlen_k": 51, "head_dim": 64, "layout": "packed"},
    "many": {"batch": 70, "seqlen_q": 64, "seqlen_k": 64, "num_heads": 12, "head_dim": 64, "causal": True},
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, fused: bool, force: Any) -> None:
    case = cases.make_case(f"short-{name}", **{"dtype": "bfloat16", **CASES[name]})
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    made = force(stores_dq=True, fused=fused)
    assert not failures(case, run.backward(run.forward()), exact, low, run.arrays)
    kernels = [launch.config.kernel for launch in made[-1].launches]
    assert "dq_convert" not in kernels
    assert ("delta" in kernels) != fused


@pytest.mark.parametrize(
    ("dtype", "seqlen_k", "fused"), [("bfloat16", 30, False), ("bfloat16", 30, True), ("float32", 16, False)]
)
def test_wide_heads(dtype: str, seqlen_k: int, fused: bool, force: Any) -> None:
    """In float32 thread blocks have a slice of the head dim each: their rows are prepared before them."""
    case = cases.make_case("short-wide", dtype=dtype, seqlen_q=40, seqlen_k=seqlen_k, head_dim=512)
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    made = force(stores_dq=True, fused=fused)
    assert not failures(case, run.backward(run.forward()), exact, low, run.arrays)
    slices = portable_backward.kernel_of(made[-1]).config.dim_slices
    assert (slices > 1) == (dtype == "float32")


def test_lengths_on_the_device(force: Any) -> None:
    """Also none: every row of dq is written."""
    import nvrtc_attn.torch as na

    q, k, v = (torch.randn(4, 60, 3, 32, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn(4, 60, 3, 32, device=DEVICE, dtype=torch.bfloat16)
    used = torch.tensor([60, 0, 1, 33], dtype=torch.int32, device=DEVICE)

    def gradients() -> Any:
        return torch.autograd.grad(na.attention(q, k, v, seqused_k=used), (q, k, v), dout)

    expected = gradients()
    for fused in (False, True):
        made = force(stores_dq=True, fused=fused)
        torch.empty(1 << 24, device=DEVICE).fill_(float("nan"))  # what the outputs are made of
        for x, y in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
        assert made


@pytest.mark.parametrize("fused", [False, True])
def test_the_same_bits_every_time(fused: bool, force: Any) -> None:
    """Nothing is added up by several blocks: a race shows."""
    import nvrtc_attn.torch as na

    q, k, v = (torch.randn(512, 49, 4, 32, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 4, 49, 49, device=DEVICE, dtype=torch.bfloat16)
    dout = torch.randn(512, 49, 4, 32, device=DEVICE, dtype=torch.bfloat16)
    force(stores_dq=True, fused=fused)
    out = na.attention(q, k, v, bias=bias)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(1000):
        again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="Hopper only")
@pytest.mark.parametrize("head_dim", [64, 72, 112, 128])
@pytest.mark.parametrize(("seqlen", "columns"), [(197, 112), (257, 96), (333, 112)])
def test_key_tiles_of_which_less_stays_empty(
    seqlen: int, columns: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    forget_plans(monkeypatch)
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "hopper")
    choose_tile, chosen = hopper_forward_tile.large_tile, []

    def record(*arguments: Any) -> hopper_forward_config.Tile:
        chosen.append(choose_tile(*arguments))
        return chosen[-1]

    monkeypatch.setattr(hopper_forward, "choose_tile", record)
    case = cases.make_case("short-fits", dtype="bfloat16", batch=5, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=3,
                           head_dim=head_dim)  # fmt: skip
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    assert not failures(case, run.forward(), exact, low, run.arrays)
    assert {tile.block_n for tile in chosen} == {columns}


@pytest.mark.parametrize("stages", [3, 4, 6])
@pytest.mark.parametrize(("keys", "head_dim"), [(1, 64), (130, 128), (700, 64), (4096, 128)])
def test_more_stages_of_keys(keys: int, head_dim: int, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    forget_plans(monkeypatch)
    stream_keys, chosen = portable_forward.stream_keys, []

    def deeper(*arguments: Any, **options: Any) -> Any:
        config, splits = stream_keys(*arguments, **options)
        chosen.append(stages)
        return dataclasses.replace(config, num_stages=stages), splits

    monkeypatch.setattr(portable_forward, "stream_keys", deeper)
    case = cases.make_case("short-stages", dtype="bfloat16", batch=70, seqlen_q=1, seqlen_k=keys, num_heads=8,
                           num_heads_kv=4, head_dim=head_dim)  # fmt: skip
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    assert not failures(case, run.forward(), exact, low, run.arrays)
    assert chosen


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans that are made of what the caller's function makes of a problem, from here on: as a list, never empty.

    The end of the test asks, because values that another plan computed would pass as well.
    """
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    lists: list[list[Any]] = []

    def put(choose: Any) -> list[Any]:
        made: list[Any] = []

        def chosen(problem: AttentionProblem, **target: Any) -> Any:
            made.append(choose(problem, **{name: target[name] for name in ("arch", "num_sms", "smem_limit")}))
            return made[-1]

        forget_plans(monkeypatch)
        monkeypatch.setattr(autotune, "table_forward", chosen)
        lists.append(made)
        return made

    yield put
    assert lists, "nothing was forced"
    assert all(lists), "a forced plan was not asked for"


def clustered(splits: int) -> Any:
    return functools.partial(portable_forward.choose_forward, num_splits=splits, clustered=True)


HOPPER_ONLY = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="Hopper only"
)
CLUSTERED: dict[str, dict[str, Any]] = {
    "one_query": {"seqlen_q": 1, "seqlen_k": 3001, "num_heads": 8, "num_heads_kv": 2, "head_dim": 128},
    "every_head_alone": {"seqlen_q": 1, "seqlen_k": 2048, "num_heads": 4, "num_heads_kv": 4, "head_dim": 64},
    "causal": {"seqlen_q": 8, "seqlen_k": 2050, "num_heads": 8, "num_heads_kv": 2, "head_dim": 128, "causal": True},
    "48_rows": {"seqlen_q": 6, "seqlen_k": 2050, "num_heads": 8, "num_heads_kv": 1, "head_dim": 128, "causal": True},
    "window": {"seqlen_q": 4, "seqlen_k": 4000, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64,
               "window_size": (300, 0)},
    "several_tiles": {"seqlen_q": 200, "seqlen_k": 4100, "num_heads": 4, "num_heads_kv": 4, "head_dim": 64,
                      "causal": True},
    "bias": {"seqlen_q": 3, "seqlen_k": 1500, "num_heads": 8, "num_heads_kv": 2, "head_dim": 80, "bias": "bhqk"},
    "softcap": {"seqlen_q": 2, "seqlen_k": 1500, "num_heads": 8, "num_heads_kv": 2, "head_dim": 128, "softcap": 5.0},
    "dropout": {"seqlen_q": 2, "seqlen_k": 1500, "num_heads": 8, "num_heads_kv": 2, "head_dim": 64, "dropout_p": 0.2},
    "odd_head": {"seqlen_q": 1, "seqlen_k": 1100, "num_heads": 4, "num_heads_kv": 2, "head_dim": 59, "head_dim_v": 37},
    "head_of_256": {"seqlen_q": 1, "seqlen_k": 1100, "num_heads": 4, "num_heads_kv": 2, "head_dim": 256},
}  # fmt: skip


@HOPPER_ONLY
@pytest.mark.parametrize(
    ("name", "splits"),
    [(name, n) for name, case in CLUSTERED.items() for n in (2, 4, 8, 16) if n < 16 or case["seqlen_k"] >= 2048],
)
def test_splits_of_a_cluster(name: str, splits: int, planned: Any) -> None:
    """One launch: the blocks of a cluster add their results up."""
    case = cases.make_case(f"short-cluster-{name}", **{"dtype": "bfloat16", "batch": 3, **CLUSTERED[name]})
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    made = planned(clustered(splits))
    assert not failures(case, run.forward(), exact, low, run.arrays)
    assert all((len(spec.launches), spec.main.config.cluster) == (1, splits) for spec in made)


@HOPPER_ONLY
@pytest.mark.parametrize("splits", [2, 4, 8])
def test_lengths_that_leave_blocks_of_a_cluster_empty(splits: int, planned: Any) -> None:
    import nvrtc_attn.torch as na

    q = torch.randn(5, 1, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(5, 1030, 2, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    used = torch.tensor([1030, 0, 1, 65, 700], dtype=torch.int32, device=DEVICE)
    expected = na.attention(q, k, v, seqused_k=used, return_lse=True)

    made = planned(clustered(splits))
    found = na.attention(q, k, v, seqused_k=used, return_lse=True)
    torch.testing.assert_close(found[0], expected[0], atol=5e-4, rtol=1e-2)
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-5)
    first = found[0].clone()
    for _ in range(300):  # nobody leaves before the others have read: a race shows
        assert torch.equal(na.attention(q, k, v, seqused_k=used), first)
    assert all(spec.main.config.cluster == splits for spec in made)


@HOPPER_ONLY
def test_a_sink_counts_once_in_a_cluster(planned: Any) -> None:
    import nvrtc_attn.torch as na

    q = torch.randn(2, 2, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 1030, 2, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    sink = torch.randn(8, device=DEVICE)
    planned(functools.partial(portable_forward.choose_forward, clusters=False))
    expected = na.attention(q, k, v, sink=sink, return_lse=True)

    made = planned(clustered(4))
    for x, y in zip(na.attention(q, k, v, sink=sink, return_lse=True), expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-3, rtol=1e-2)
    assert all(spec.main.config.cluster == 4 for spec in made)


GROWING: dict[str, dict[str, Any]] = {
    "few_heads": {"batch": 1, "num_heads": 32, "num_heads_kv": 8, "head_dim": 128},
    "every_head_alone": {"batch": 2, "num_heads": 8, "num_heads_kv": 8, "head_dim": 128},
    "half_of_the_blocks": {"batch": 8, "num_heads": 64, "num_heads_kv": 8, "head_dim": 64},
    "speculative": {"batch": 1, "num_heads": 32, "num_heads_kv": 8, "head_dim": 128, "seqlen_q": 8, "causal": True},
}


@HOPPER_ONLY
@pytest.mark.parametrize("name", GROWING)
def test_a_growing_cache_by_the_table(name: str, planned: Any) -> None:
    """Whole, or as clusters of all sizes that the table has, at full and broken tiles; repeatable bit for bit."""
    made = planned(portable_forward.choose_forward)
    for keys in (9, 64, 65, 383, 640, 1000, 1024, 1025, 2048, 3001, 4096, 8192):
        case = cases.make_case(
            f"growing-{name}", **{"dtype": "bfloat16", "seqlen_q": 1, **GROWING[name], "seqlen_k": keys}
        )
        run = Run(case)
        exact, low = oracle(case, run.arrays)
        found = run.forward()
        assert not failures(case, found, exact, low, run.arrays), keys
        for _ in range(10):
            assert all((x == found[which]).all() for which, x in run.forward().items()), keys
    # Of 64 heads, a key tile of each on a multiprocessor: no clusters at head dim 64.
    assert {spec.main.config.cluster > 1 for spec in made} == (
        {False} if name == "half_of_the_blocks" else {False, True}
    )


@HOPPER_ONLY
def test_the_driver_says_how_many_clusters_have_room() -> None:
    """Of one block a multiprocessor: for an H100 or H200 as many of two, four and eight as the table counts on."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    if sms < 100:
        pytest.skip("a slice of a GPU, or one with fewer multiprocessors")
    problem = describe_shapes(
        {"q": ((1, 1, 32, 128), "bfloat16"), **dict.fromkeys("kv", ((1, 8192, 8, 128), "bfloat16"))},
        CallOptions(), Device("cuda", 0),
    ).with_dense()  # fmt: skip
    for count in (2, 4, 8):
        spec = portable_forward.choose_forward(
            problem, arch="sm_90", num_sms=sms, smem_limit=232448, num_splits=count, clustered=True
        )
        config = dataclasses.replace(spec.main.config, num_stages=6)
        loaded = kernel.load_kernel(compile_kernel(config), 0, smem_bytes=portable_forward_config.smem_bytes(config))
        with driver.device_context(0):
            room = kernel.clusters_at_once(loaded.function, config, loaded.smem_bytes, 0)
        print(f"{room} clusters of {count} blocks")
        assert room * count >= sms // 16 * 16 * 0.9


PACKED: dict[str, dict[str, Any]] = {
    "128_rows": {"seqlen_q": 16, "seqlen_k": 1000, "num_heads": 16, "num_heads_kv": 2, "head_dim": 128},
    "causal": {"seqlen_q": 16, "seqlen_k": 1000, "num_heads": 16, "num_heads_kv": 2, "head_dim": 128, "causal": True},
    "seven_heads": {"seqlen_q": 31, "seqlen_k": 777, "num_heads": 14, "num_heads_kv": 2, "head_dim": 128,
                    "causal": True},
    "48_heads": {"seqlen_q": 5, "seqlen_k": 777, "num_heads": 48, "num_heads_kv": 1, "head_dim": 128, "causal": True},
    "resampler": {"seqlen_q": 64, "seqlen_k": 2048, "num_heads": 16, "num_heads_kv": 4, "head_dim": 96},
    "several_tiles": {"seqlen_q": 300, "seqlen_k": 700, "num_heads": 6, "num_heads_kv": 2, "head_dim": 64,
                      "causal": True},
    "top_left": {"seqlen_q": 100, "seqlen_k": 300, "num_heads": 8, "num_heads_kv": 2, "head_dim": 64,
                 "causal": "top_left"},
    "rows_without_keys": {"seqlen_q": 200, "seqlen_k": 100, "num_heads": 4, "num_heads_kv": 2, "head_dim": 128,
                          "causal": True},
    "window": {"seqlen_q": 50, "seqlen_k": 900, "num_heads": 8, "num_heads_kv": 2, "head_dim": 72,
               "window_size": (100, 3)},
    "softcap": {"seqlen_q": 33, "seqlen_k": 555, "num_heads": 8, "num_heads_kv": 2, "head_dim": 128, "softcap": 5.0},
    "mla": {"seqlen_q": 20, "seqlen_k": 555, "num_heads": 8, "num_heads_kv": 1, "head_dim": 192, "head_dim_v": 128},
    "head_of_256": {"seqlen_q": 20, "seqlen_k": 555, "num_heads": 8, "num_heads_kv": 2, "head_dim": 256,
                    "causal": True},
    "strided": {"seqlen_q": 40, "seqlen_k": 555, "num_heads": 8, "num_heads_kv": 2, "head_dim": 64,
                "layout": "bhmk"},
}  # fmt: skip


@HOPPER_ONLY
@pytest.mark.parametrize("name", PACKED)
def test_packed_heads_of_the_hopper_kernel(name: str, planned: Any) -> None:
    case = cases.make_case(f"short-packed-{name}", **{"dtype": "bfloat16", "batch": 3, **PACKED[name]})
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    made = planned(hopper_forward.packed_heads_plan)
    assert not failures(case, run.forward(), exact, low, run.arrays)
    assert all(spec.main.config.packed_heads for spec in made)


@HOPPER_ONLY
def test_packed_heads_with_lengths_on_the_device(planned: Any) -> None:
    import nvrtc_attn.torch as na

    q = torch.randn(4, 24, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(4, 400, 2, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    k[0, 390:] = v[0, 390:] = float("nan")
    used = torch.tensor([390, 0, 5, 131], dtype=torch.int32, device=DEVICE)
    expected = na.attention(q, k, v, seqused_k=used, causal=True, return_lse=True)
    made = planned(hopper_forward.packed_heads_plan)
    found = na.attention(q, k, v, seqused_k=used, causal=True, return_lse=True)
    # Both round P to bfloat16, relative to another maximum: up to 2^-8 of the mean of |v| that P weighs.
    torch.testing.assert_close(found[0], expected[0], atol=2**-8, rtol=1e-2)
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-5)
    assert all(spec.main.config.packed_heads for spec in made)


def split_keys(splits: int, packs: bool = False) -> Any:
    """Plans of the Hopper kernel with so many splits of the keys."""

    def choose(problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int) -> Any:
        tile = (hopper_forward.packed_heads_tile if packs else hopper_forward_tile.choose_tile)(problem, num_sms)
        return hopper_forward.plan_spec(problem, tile, num_sms=num_sms, num_splits=splits)

    return choose


SPLIT: dict[str, dict[str, Any]] = {
    "few_tiles": {"seqlen_q": 128, "seqlen_k": 2000, "num_heads": 4, "head_dim": 128},
    "causal": {"seqlen_q": 200, "seqlen_k": 3000, "num_heads": 3, "head_dim": 64, "causal": True},
    "long_and_causal": {"seqlen_q": 1500, "seqlen_k": 1500, "num_heads": 2, "head_dim": 128, "causal": True},
    "window": {"seqlen_q": 200, "seqlen_k": 1500, "num_heads": 4, "head_dim": 128, "window_size": (300, 10)},
    "empty_shares": {"seqlen_q": 70, "seqlen_k": 300, "num_heads": 4, "head_dim": 64},
    "rows_without_keys": {"seqlen_q": 300, "seqlen_k": 200, "num_heads": 4, "head_dim": 128, "causal": True},
    "softcap": {"seqlen_q": 100, "seqlen_k": 1555, "num_heads": 4, "head_dim": 128, "softcap": 5.0},
    "negative_scale": {"seqlen_q": 100, "seqlen_k": 1555, "num_heads": 4, "head_dim": 64, "softmax_scale": -0.2},
    "head_of_72": {"seqlen_q": 150, "seqlen_k": 1555, "num_heads": 4, "head_dim": 72, "dtype": "float16"},
    "mla": {"seqlen_q": 130, "seqlen_k": 1555, "num_heads": 4, "head_dim": 192, "head_dim_v": 128, "causal": True},
    "head_of_256": {"seqlen_q": 100, "seqlen_k": 1555, "num_heads": 4, "head_dim": 256},
    "grouped": {"seqlen_q": 100, "seqlen_k": 1555, "num_heads": 8, "num_heads_kv": 2, "head_dim": 128},
    "strided": {"seqlen_q": 100, "seqlen_k": 1555, "num_heads": 4, "head_dim": 64, "layout": "bhmk"},
}  # fmt: skip


@HOPPER_ONLY
@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize("name", SPLIT)
def test_split_keys_of_the_hopper_kernel(name: str, splits: int, planned: Any) -> None:
    case = cases.make_case(f"short-split-{name}", **{"dtype": "bfloat16", "batch": 3, **SPLIT[name]})
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    made = planned(split_keys(splits))
    assert not failures(case, run.forward(), exact, low, run.arrays)
    assert all((spec.main.config.kernel, spec.num_splits) == ("forward_hopper", splits) for spec in made)


@HOPPER_ONLY
@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("name", PACKED)
def test_split_keys_of_packed_heads(name: str, splits: int, planned: Any) -> None:
    case = cases.make_case(f"short-split-packed-{name}", **{"dtype": "bfloat16", "batch": 3, **PACKED[name]})
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    made = planned(split_keys(splits, packs=True))
    assert not failures(case, run.forward(), exact, low, run.arrays)
    assert all(spec.main.config.packed_heads and spec.num_splits == splits for spec in made)


@HOPPER_ONLY
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("splits", [2, 8])
def test_splits_of_lengths_on_the_device(splits: int, packs: bool, planned: Any) -> None:
    """Lengths that leave shares empty, and keys behind them that are NaN."""
    import nvrtc_attn.torch as na

    q = torch.randn(5, 70, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(5, 2000, 2, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    used = torch.tensor([1990, 0, 5, 131, 1030], dtype=torch.int32, device=DEVICE)
    for b, length in enumerate(used.tolist()):
        k[b, length:] = v[b, length:] = float("nan")
    expected = [na.attention(q, k, v, seqused_k=used, causal=causal, return_lse=True) for causal in (False, True)]
    made = planned(split_keys(splits, packs))
    for causal in (False, True):
        found = na.attention(q, k, v, seqused_k=used, causal=causal, return_lse=True)
        torch.testing.assert_close(found[0], expected[causal][0], atol=2**-7, rtol=1e-2)
        torch.testing.assert_close(found[1], expected[causal][1], atol=1e-4, rtol=1e-5)
    assert all(spec.num_splits == splits for spec in made)


@HOPPER_ONLY
@pytest.mark.parametrize(("heads", "queries", "head_dim"), [(48, 1, 128), (64, 1, 64), (40, 1, 96), (20, 2, 128)])
def test_decoding_of_many_heads_on_one(heads: int, queries: int, head_dim: int, planned: Any) -> None:
    """33 to 64 rows of many keys are the Hopper kernel's, in splits, by the table's own choice."""
    sizes = {"batch": 2, "seqlen_q": queries, "seqlen_k": 4100, "num_heads": heads, "num_heads_kv": 1}
    case = cases.make_case(f"short-decode-{heads}", dtype="bfloat16", head_dim=head_dim, causal=True, **sizes)
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    made = planned(choose_forward)
    assert not failures(case, run.forward(), exact, low, run.arrays)
    for spec in made:
        assert spec.num_splits > 1
        assert (spec.main.config.packed_heads, spec.main.config.block_m) == (True, 64)


@HOPPER_ONLY
@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"softcap": 5.0}, {"batch": 2}], ids=str)
@pytest.mark.parametrize(
    ("queries", "head_dim"), [(33, 40), (50, 64), (63, 72), (50, 96), (40, 128), (60, 192), (47, 256)]
)
def test_tiles_of_64_rows_for_few_queries(queries: int, head_dim: int, changes: dict[str, Any], planned: Any) -> None:
    sizes = {"batch": 24, "seqlen_q": queries, "seqlen_k": queries + 9, "num_heads": 12, "num_heads_kv": 12, **changes}
    case = cases.make_case(f"short-rows-{head_dim}", dtype="bfloat16", head_dim=head_dim, **sizes)
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    made = planned(choose_forward)
    assert not failures(case, run.forward(), exact, low, run.arrays)
    hopper = head_dim > 64 or case.batch > 2
    assert all((spec.main.config.kernel == "forward_hopper") == hopper for spec in made)
    assert all(spec.main.config.block_m == 64 for spec in made)
