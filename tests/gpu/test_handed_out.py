"""Query tiles that thread blocks of the Hopper forward kernel ask for: the results are those of a fixed order.

Small problems, which have a fixed order by themselves, with the bounds of `hands_out` taken away.
"""

from __future__ import annotations

from typing import Any

import cases
import pytest
from harness import BANDS, Run, failures, forget_plans, oracle, torch

from nvrtc_attn.heuristics import hopper_forward_schedule

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the Hopper kernels need compute capability 9.0",
)
Options = dict[str, Any]
SHAPE: Options = {"batch": 5, "seqlen_q": 700, "seqlen_k": 650, "num_heads": 6, "num_heads_kv": 2}
USED = (650, 5, 0, 513, 100)


@pytest.fixture
def hand_out(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whether plans made from here on have their tiles handed out."""
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "hopper")
    monkeypatch.setattr(hopper_forward_schedule, "MIN_TILES_HANDED_OUT", 0)

    def handed_out(answer: bool) -> None:
        forget_plans(monkeypatch)
        bound = 0.0 if answer else float("inf")
        monkeypatch.setattr(
            hopper_forward_schedule, "HANDED_OUT_FLOPS", dict.fromkeys(hopper_forward_schedule.HANDED_OUT_FLOPS, bound)
        )

    return handed_out


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize(
    "options",
    [
        *BANDS,
        {"seqused_k": USED, "causal": True},
        {"seqused_k": USED},
        {"causal": True, "dropout_p": 0.2},
        {"bias": "1hqk"},
        {"bias": "bhqk", "causal": True, "seqlen_k": 656},
        {"bias": "b11k", "window_size": (200, 30), "softcap": 20.0},
        {"causal": True, "num_heads": 7, "num_heads_kv": 7, "seqlen_q": 3000, "seqlen_k": 1000, "batch": 1},
    ],
    ids=str,
)
def test_results_and_bits(options: Options, head_dim: int, hand_out: Any) -> None:
    case = cases.make_case("handed out", **{"dtype": "bfloat16", "head_dim": head_dim, **SHAPE, **options})
    run = Run(case)
    hand_out(True)
    found = run.forward()
    exact, low = oracle(case, run.arrays)
    wrong = failures(case, found, exact, low, run.arrays)
    assert not wrong, "\n".join(wrong)
    hand_out(False)
    fixed = run.forward()
    assert all(torch.equal(found[x].view(torch.uint8), fixed[x].view(torch.uint8)) for x in ("out", "lse"))


@pytest.mark.reliability(35)
@pytest.mark.parametrize("causal", [False, True])
def test_calls_side_by_side(causal: bool, hand_out: Any) -> None:
    """Of two streams, on the same multiprocessors: each has a counter of its own, and starts when the other lets it."""
    import nvrtc_attn.torch

    hand_out(True)
    torch.manual_seed(0)
    operands = [
        tuple(torch.randn(4, 1500, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)) for _ in range(2)
    ]
    expected = [nvrtc_attn.torch.attention(*x, causal=causal) for x in operands]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in operands]
    for _ in range(50):
        found = []
        for stream, x in zip(streams, operands, strict=True):
            with torch.cuda.stream(stream):
                found.append([nvrtc_attn.torch.attention(*x, causal=causal) for _ in range(4)])
        torch.cuda.synchronize()
        for outs, want in zip(found, expected, strict=True):
            assert all(torch.equal(out, want) for out in outs)
