"""Dropout's decisions of the Hopper forward kernel that a launch of their own makes: the mask bit for bit, and results.

Small problems, whose kernel makes them itself otherwise, with the bound of `makes_words` taken away.
"""

from __future__ import annotations

from typing import Any

import cases
import pytest
from harness import BANDS, Run, failures, forget_plans, oracle, torch

import nvrtc_attn
import nvrtc_attn.torch as na
from nvrtc_attn.heuristics import hopper_forward_dropout, hopper_forward_tile

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the Hopper kernels need compute capability 9.0",
)
Options = dict[str, Any]
SHAPE: Options = {"batch": 3, "seqlen_q": 700, "seqlen_k": 650, "num_heads": 6, "num_heads_kv": 2, "dropout_p": 0.3}
BEFORE_2_34 = 2**34 - 300_000
"""An offset from which the upper half of counters changes amid the scores of a small problem."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The tiles that words are asked for, of plans that are made from here on: all of them have words."""
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "hopper")
    monkeypatch.setattr(hopper_forward_dropout, "MIN_SCORES", dict.fromkeys(hopper_forward_dropout.MIN_SCORES, 0.0))
    forget_plans(monkeypatch)
    found: list[tuple[int, int]] = []
    has_room = hopper_forward_tile.has_room

    def noted(problem: Any, rows: int, columns: int) -> bool:
        found.append((rows, columns))
        return has_room(problem, rows, columns)

    monkeypatch.setattr(hopper_forward_tile, "has_room", noted)
    return found


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 192, 256])
@pytest.mark.parametrize(
    "options",
    [
        *BANDS,
        {"seqlen_q": 900, "seqlen_k": 333, "causal": True},  # rows that see no key
        {"seqused_k": (650, 5, 0), "causal": True},
        {"bias": "bhqk", "causal": True, "seqlen_k": 656},
        {"mask": "bhqk", "seqlen_k": 300},
        {"num_heads": 2, "seqlen_q": 65, "seqlen_k": 3000, "batch": 1},
    ],
    ids=str,
)
def test_results(options: Options, head_dim: int, asked: list[tuple[int, int]]) -> None:
    case = cases.make_case("words", **{"dtype": "bfloat16", "head_dim": head_dim, **SHAPE, **options})
    run = Run(case)
    found = run.forward()
    exact, low = oracle(case, run.arrays)
    wrong = failures(case, found, exact, low, run.arrays)
    assert not wrong, "\n".join(wrong)
    no_kernel = head_dim == 256 and {"seqused_k", "bias", "mask"} & set(options)
    assert asked or no_kernel


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("offset", [0, 7, BEFORE_2_34])
@pytest.mark.parametrize("keys", [256, 131, 250])  # rows that begin with a Philox block, and not
@pytest.mark.parametrize("heads", [3, 200])  # tiles of 64 or 128 rows, and of 192
@pytest.mark.reliability(33)
def test_the_mask_bit_for_bit(
    heads: int, keys: int, offset: int, on_device: bool, asked: list[tuple[int, int]]
) -> None:
    """By values that are one hot."""
    rows, seed = 333, 123456789012345
    rng: Any = tuple(torch.tensor(x, device="cuda") for x in (seed, offset)) if on_device else (seed, offset)
    q = torch.zeros(1, rows, heads, 64, device="cuda", dtype=torch.float16)
    k = torch.zeros(1, keys, heads, 64, device="cuda", dtype=torch.float16)
    eye = torch.eye(256, device="cuda", dtype=torch.float16)
    v = eye[:keys, None].expand(1, keys, heads, 256).contiguous()
    kept = []
    for first in range(0, 256, 64):
        out = na.attention(q, k, v[..., first : first + 64].contiguous(), dropout_p=0.3, rng=rng)
        kept.append(out != 0)
    found = torch.cat(kept, -1)[..., :keys].transpose(1, 2).cpu().numpy()
    expected = nvrtc_attn.dropout_keep_mask((1, heads, rows, keys), 0.3, (seed, offset))
    assert (found == expected).all()
    assert asked


@pytest.mark.parametrize("starts_on_device", [False, True])
def test_the_mask_of_a_part(starts_on_device: bool, asked: list[tuple[int, int]]) -> None:
    whole, rows, keys = (4, 6, 500, 460), 200, 64
    q = torch.zeros(2, rows, 4, 64, device="cuda", dtype=torch.float16)
    k = torch.zeros(2, keys, 4, 64, device="cuda", dtype=torch.float16)
    v = torch.eye(64, device="cuda", dtype=torch.float16)[:, None].expand(2, keys, 4, 64).contiguous()
    row, key = (torch.tensor(x, device="cuda", dtype=torch.int32) if starts_on_device else x for x in (170, 51))
    part = nvrtc_attn.Part(batch=(1, 4), heads=(2, 6), rows=(row, 500), keys=(key, 460))
    out = na.attention(q, k, v, dropout_p=0.3, rng=(5, 6), part=part)
    expected = nvrtc_attn.dropout_keep_mask(whole, 0.3, (5, 6))[1:3, 2:6, 170:370, 51:115]
    assert ((out != 0).transpose(1, 2).cpu().numpy() == expected).all()
    assert asked


def test_a_graph_draws_again_at_each_replay(asked: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 600, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    seed, offset = (torch.tensor(x, device="cuda") for x in (9, 0))
    na.attention(q, k, v, dropout_p=0.5, rng=(seed, offset), causal=True)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        out = na.attention(q, k, v, dropout_p=0.5, rng=(seed, offset), causal=True)
    for value in (9, 10, 11):
        seed.fill_(value)
        graph.replay()
        assert torch.equal(out, na.attention(q, k, v, dropout_p=0.5, rng=(value, 0), causal=True))
    assert asked


def test_a_thousand_repeats(asked: list[tuple[int, int]]) -> None:
    """Words are there when the kernel behind reads them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1100, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = na.attention(q, k, v, dropout_p=0.2, rng=(1, 2), causal=True)
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(1000):
        different += (na.attention(q, k, v, dropout_p=0.2, rng=(1, 2), causal=True) != expected).any()
    assert int(different) == 0
    assert asked
