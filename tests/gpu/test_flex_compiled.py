"""`nvrtc_attn.torch.flex_attention` in programs of inductor, with CUDA graphs too: what eager calls give."""

from __future__ import annotations

from typing import Any

import pytest
from harness import DEVICE, torch

import nvrtc_attn
from nvrtc_attn.torch import create_block_mask, flex_attention

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
HEADS, LENGTH = 4, 320


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(seed: int = 0, length: int = LENGTH, requires_grad: bool = True) -> list[Any]:
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def random(*shape: int, dtype: Any = torch.float16) -> Any:
        return torch.randn(*shape, generator=generator, device=DEVICE, dtype=dtype).requires_grad_(requires_grad)

    table, slopes = random(2 * LENGTH, HEADS, dtype=torch.float32), random(HEADS, dtype=torch.float32)
    return [*(random(2, HEADS, length, 64) for _ in range(3)), table, slopes]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (k % 7 != 3)


def step(q: Any, k: Any, v: Any, table: Any, slopes: Any) -> Any:
    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.tanh(s / 3) * 3 + table[i - j + LENGTH, h] + slopes[h] * (j - i)

    mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2])
    out, lse = flex_attention(q * 1.5, k, v, score_mod, mask, return_lse=True)
    return out * 2, lse


def results(call: Any, given: list[Any]) -> list[Any]:
    out, lse = call(*given)
    loss = out.float().square().sum() + lse.sin().sum()
    return [x.clone() for x in (out.detach(), lse.detach(), *torch.autograd.grad(loss, given))]


def same(ours: list[Any], expected: list[Any]) -> None:
    """Sums of a table's gradient come in any order, and inductor rounds its own part otherwise."""
    for x, y in zip(ours, expected, strict=True):
        scale = float(y.abs().max()) + 1e-6
        torch.testing.assert_close(x / scale, y / scale, rtol=0, atol=4e-3)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_training(mode: str) -> None:
    """Five steps over other contents: the program and its CUDA graph read the tensors of each call."""
    program = torch.compile(step, fullgraph=True, mode=mode)
    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        same(results(program, inputs(seed)), results(step, inputs(seed)))


def test_lengths() -> None:
    program = torch.compile(step, fullgraph=True, dynamic=True)
    for length in (320, 200, 256):
        same(results(program, inputs(0, length)), results(step, inputs(0, length)))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_other_closures_and_a_traced_modifier(mode: str) -> None:
    program = torch.compile(lambda q, k, v, f: flex_attention(q, k, v, f) + 1, fullgraph=True, mode=mode)
    plain = torch.no_grad()
    for traced in (False, True):
        for seed in range(4):
            q, k, v, table, slopes = inputs(seed, requires_grad=False)

            def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any = table, slopes: Any = slopes) -> Any:
                return s * slopes[h] + table[i - j + LENGTH, h]

            given = nvrtc_attn.trace(score_mod) if traced else score_mod
            with plain:
                torch.compiler.cudagraph_mark_step_begin()
                same([program(q, k, v, given)], [flex_attention(q, k, v, score_mod) + 1])


def test_no_kernel_but_those_of_the_eager_call(monkeypatch: pytest.MonkeyPatch) -> None:
    same(results(step, inputs()), results(step, inputs()))
    monkeypatch.setenv("NVRTC_ATTN_ASSERT_CACHED", "1")
    monkeypatch.setenv("NVRTC_ATTN_NO_COMPILE", "1")
    same(results(torch.compile(step, fullgraph=True, backend="aot_eager"), inputs()), results(step, inputs()))


def test_no_memory_of_the_size_of_the_scores() -> None:
    length = 8192
    given = [torch.randn(1, HEADS, length, 64, device=DEVICE, dtype=torch.float16, requires_grad=True) for _ in "qkv"]
    table = torch.zeros(2 * length, HEADS, device=DEVICE, requires_grad=True)

    def call(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + table[i - j + length, h])

    program = torch.compile(call, fullgraph=True)
    program(*given).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    program(*given).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < HEADS * length * length // 2
