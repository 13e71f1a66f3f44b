"""Each loop and tile of the Hopper backward kernel, each way to prepare its rows, also where the table has another."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import pytest
from harness import DEVICE, Run, backend, failures, forget_plans, oracle, torch

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.front.problem import AttentionProblem
from nvrtc_attn.heuristics import hopper_backward, hopper_backward_config, hopper_backward_tile

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the Hopper kernels need compute capability 9.0",
)
SHAPES: dict[str, dict[str, Any]] = {
    "tails": {"batch": 3, "seqlen_q": 333, "seqlen_k": 411, "num_heads": 4, "num_heads_kv": 2},
    "one_query_tile": {"batch": 2, "seqlen_q": 64, "seqlen_k": 700, "num_heads": 3, "num_heads_kv": 3},
    # More key tiles than multiprocessors; two key tiles, whose thread blocks prepare 396 pieces of rows.
    "many_tiles": {"batch": 9, "seqlen_q": 200, "seqlen_k": 257, "num_heads": 8, "num_heads_kv": 8},
    "many_rows": {"batch": 1, "seqlen_q": 2100, "seqlen_k": 130, "num_heads": 6, "num_heads_kv": 1},
}


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the table answer with these switches, for plans made from here on."""
    choose_tile = hopper_backward_tile.choose_tile
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "hopper")

    def forced(**switches: int) -> None:
        def tile(problem: AttentionProblem, num_sms: int) -> hopper_backward_config.Tile:
            assert hopper_backward_config.is_plain(problem) or not {"block_m", "fused"} & set(switches)
            return dataclasses.replace(choose_tile(problem, num_sms), **switches)

        forget_plans(monkeypatch)
        monkeypatch.setattr(hopper_backward, "choose_tile", tile)

    return forced


@pytest.mark.reliability(31)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        (64, {}),
        (64, {"causal": True}),
        (64, {"dtype": "float16", "dlse": True}),
        # Masked scores stay masked when the map turns -inf into +inf, or into NaN.
        (64, {"softmax_scale": -0.2}),
        (64, {"softmax_scale": 0.0}),
        (40, {}),
        (128, {}),
        (96, {"causal": True, "dlse": True}),
    ],
)
def test_gradients(head_dim: int, options: dict[str, Any], shape: str, fused: bool, force: Any) -> None:
    fields: dict[str, Any] = {"dtype": "bfloat16", "head_dim": head_dim, **SHAPES[shape], **options}
    case = cases.make_case(f"loops-{shape}", **fields)
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    force(block_m=128 if head_dim <= 64 else 64, fused=fused)
    assert not failures(case, run.backward(run.forward()), exact, low, run.arrays)


@pytest.mark.reliability(31)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        (128, {}),
        (128, {"dtype": "float16", "causal": True, "dlse": True}),
        (128, {"causal": "top_left", "softmax_scale": -0.2}),
        # Columns of the second slab that some warps, or all but one, do not have.
        (96, {}),
        (72, {"causal": True}),
    ],
)
def test_gradients_of_tiles_of_80_queries(head_dim: int, options: dict[str, Any], shape: str, force: Any) -> None:
    fields: dict[str, Any] = {"dtype": "bfloat16", "head_dim": head_dim, **SHAPES[shape], **options}
    case = cases.make_case(f"loops-{shape}", **fields)
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    force(block_m=80, fused=False)
    assert not failures(case, run.backward(run.forward()), exact, low, run.arrays)


@pytest.mark.reliability(31)
@pytest.mark.parametrize("splits", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        (128, {}),
        (64, {"causal": True, "dlse": True}),
        (128, {"causal": True, "mask": "b11k"}),
        (64, {"bias": "1hqk", "causal": True}),
        (96, {"dropout_p": 0.1, "softcap": 5.0}),
        (128, {"dropout_p": 0.3}),
        (80, {"seqlen_k": 77}),
        (128, {"causal": True, "tile": {"block_m": 80, "fused": False, "descending": False}}),
        (128, {"causal": True, "tile": {"block_m": 80, "fused": False, "descending": True}}),
        (128, {"seqlens": ((333, 411), (0, 60), (70, 0), (200, 5)), "seqused_k": (400, 60, 0, 5), "tail": (5, 9)}),
    ],
)
def test_query_heads_of_a_group_in_several_blocks(
    head_dim: int, options: dict[str, Any], splits: int, force: Any
) -> None:
    fields: dict[str, Any] = {
        "dtype": "bfloat16", "head_dim": head_dim, "num_heads": 12, "num_heads_kv": 2, **options,
    }  # fmt: skip
    tile = fields.pop("tile", {})
    if "seqlens" not in options:
        fields = {"batch": 2, "seqlen_q": 333, "seqlen_k": 411, **fields}
    case = cases.make_case("loops-splits", **fields)
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    force(splits=splits, **tile)
    assert not failures(case, run.backward(run.forward()), exact, low, run.arrays)


@pytest.mark.reliability(35)
@pytest.mark.parametrize(
    ("head_dim", "switches"),
    [
        (64, {"fused": True}),
        (64, {"fused": False}),
        (128, {"block_m": 64, "fused": True}),
        (128, {"block_m": 80, "fused": False}),
    ],
)
def test_1000_repeats_beside_other_work(head_dim: int, switches: dict[str, int], force: Any) -> None:
    """Blocks that become resident late, because a matrix product on another stream has their multiprocessors."""
    case = cases.make_case(
        f"loops-repeat-{head_dim}", dtype="bfloat16", batch=12, seqlen_q=500, seqlen_k=650, num_heads=8, num_heads_kv=4,
        head_dim=head_dim,
    )  # fmt: skip
    run = Run(case)
    force(**switches)
    forward = run.forward()
    first = run.backward(forward)
    side, x = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    for repeat in range(1000):
        if repeat % 4 == 0:
            with torch.cuda.stream(side):
                torch.mm(x, x)
        again = run.backward(forward)
        for name in ("dk", "dv"):
            assert torch.equal(again[name], first[name]), f"{name}, repeat {repeat}"
        spread = float((again["dq"].float() - first["dq"].float()).abs().max())
        assert spread <= 2**-7 * float(first["dq"].float().abs().max()), f"dq, repeat {repeat}"


@pytest.mark.reliability(61)
@pytest.mark.parametrize(("head_dim", "switches"), [(64, {"fused": True}), (128, {"block_m": 80, "fused": False})])
def test_counters_of_a_graph_and_of_calls_that_share_a_workspace(
    head_dim: int, switches: dict[str, int], force: Any
) -> None:
    """Who clears the counters does it before each launch, in a graph too; whatever the workspace holds.

    Key tiles are not shared in parts, which are added up in another order each time.
    """
    force(parts=1, **switches)
    with backend("hopper"):
        sets = []
        for seed, (rows, keys) in enumerate(((300, 400), (700, 513))):
            torch.manual_seed(seed)
            q, dout = (torch.randn(2, rows, 4, head_dim, device=DEVICE, dtype=torch.float16) for _ in range(2))
            k, v = (torch.randn(2, keys, 4, head_dim, device=DEVICE, dtype=torch.float16) for _ in range(2))
            out, lse = torch.empty_like(q), torch.empty(2, 4, rows, device=DEVICE)
            scratch = torch.empty(api.forward_workspace_bytes(q, k, v), dtype=torch.uint8, device=DEVICE)
            nvrtc_attn.attention_forward(q, k, v, out, lse=lse, workspace=scratch)
            sets.append((dout, q, k, v, out, lse))
        size = max(api.backward_workspace_bytes(*x[1:4]) for x in sets)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)

        def gradients() -> list[list[Any]]:
            found = []
            for x in sets:
                grads = [torch.full_like(y, float("nan")) for y in x[1:4]]
                nvrtc_attn.attention_backward(*x, *grads, workspace=workspace)
                found.append(grads)
            return found

        expected = gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = gradients()
        for _ in range(20):
            workspace.fill_(255)
            graph.replay()
            for grads, exact in zip(found, expected, strict=True):
                torch.testing.assert_close(grads[0], exact[0], atol=2e-3, rtol=1e-2)
                assert torch.equal(grads[1], exact[1])
                assert torch.equal(grads[2], exact[2])
