"""Parts that begin where arrays on the GPU say: as parts of integers, at every place, also in a replayed graph."""

from __future__ import annotations

import os
from typing import Any

import cases
import pytest
from harness import DEVICE, backend, families, torch

import nvrtc_attn
import nvrtc_attn.torch as na
from nvrtc_attn.plans import plan as plans

ROWS, KEYS, WHOLE_ROWS, WHOLE_KEYS = 300, 450, 1200, 1400
PLACES = [(0, 0), (201, 403), (900, 950), (0, 950), (899, 3)]
FAMILIES = families(cases.make_case("any", dtype="float16")) if torch.cuda.is_available() else ("portable",)


def slopes(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - 0.01 * (q - k) * (h + 1)


def blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 128 == k // 128) | (k % 7 == 0)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window and dropout": {"window_size": (200, 60), "dropout_p": 0.25, "rng": (7, 9)},
    "deterministic": {"causal": True, "dropout_p": 0.25, "rng": (7, 9), "deterministic": True},
    "modifier": {"causal": "top_left", "score_mod": slopes, "mask_mod": blocks},
}


def tensors(head_dim: int) -> list[torch.Tensor]:
    """q, k, v and dout."""
    torch.manual_seed(0)
    return [
        torch.randn(1, n, heads, head_dim, device=DEVICE, dtype=torch.float16)
        for n, heads in zip((ROWS, KEYS, KEYS, ROWS), (2, 1, 1, 2), strict=True)
    ]


def run(given: list[torch.Tensor], part: nvrtc_attn.Part, **options: Any) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    out, lse = na.attention(q, k, v, return_lse=True, part=part, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), given[3])]


def same(found: list[torch.Tensor], expected: list[torch.Tensor], place: Any) -> None:
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        finite = torch.isfinite(y)
        assert torch.equal(torch.isfinite(x), finite), (name, place)
        x, y = x[finite].float(), y[finite].float()
        assert not len(y) or float((x - y).abs().max()) <= 4e-3 * max(float(y.abs().max()), 1.0), (name, place)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_arrays_say_where_a_part_begins(family: str, name: str, head_dim: int) -> None:
    """Through torch's autograd; calls after the first make no plan."""
    given, options = tensors(head_dim), OPTIONS[name]
    row, key = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros((), dtype=torch.int32, device=DEVICE)
    part = nvrtc_attn.Part(rows=(row, WHOLE_ROWS), keys=(key, WHOLE_KEYS))
    with backend(family):
        run(given, part, **options)  # makes the plans
        for place in PLACES:
            row.fill_(place[0])
            key.fill_(place[1])
            before = len(plans._plans)
            found = run(given, part, **options)
            others = nvrtc_attn.Part(rows=(row.clone(), WHOLE_ROWS), keys=(key.clone(), WHOLE_KEYS))
            again = run(given, others, **options)
            assert len(plans._plans) == before, place
            expected = run(given, nvrtc_attn.Part(rows=(place[0], WHOLE_ROWS), keys=(place[1], WHOLE_KEYS)), **options)
            mixed = run(given, nvrtc_attn.Part(rows=(row, WHOLE_ROWS), keys=(place[1], WHOLE_KEYS)), **options)
            for results in (found, again, mixed):
                same(results, expected, place)


@pytest.mark.skipif("NVRTC_ATTN_TEST_SIMULATED" in os.environ, reason="torch captures no graph there")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_takes_the_part_that_the_arrays_name_when_it_is_replayed(family: str, name: str) -> None:
    given = tensors(64)
    row, key = (torch.zeros(1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    part = nvrtc_attn.Part(rows=(row, WHOLE_ROWS), keys=(key, WHOLE_KEYS))
    options = OPTIONS[name]
    with backend(family):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(given, part, **options)  # compiles, which a capture refuses
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(given, part, **options)
        results = []
        for place in (*PLACES, PLACES[0]):
            row.fill_(place[0])
            key.fill_(place[1])
            for x in found:
                x.fill_(torch.nan)
            graph.replay()
            host = nvrtc_attn.Part(rows=(place[0], WHOLE_ROWS), keys=(place[1], WHOLE_KEYS))
            same(found, run(given, host, **options), place)
            results.append(found[0].clone())
        assert torch.equal(results[0], results[-1])
        assert not torch.equal(results[0], results[1])
