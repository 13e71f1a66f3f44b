"""Repeated `flex_attention` calls on a GPU, whose launches are known: what first calls give, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from harness import forget_plans  # noqa: E402

from nvrtc_attn.modifiers import remembered  # noqa: E402
from nvrtc_attn.torch import create_block_mask, flex_attention, modified_known  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU")
B, H, M = 2, 4, 300


def sloped(slopes: Any) -> Any:
    return lambda s, b, h, i, j: s + slopes[h] * (j - i)


def relative(table: Any) -> Any:
    return lambda s, b, h, i, j: s + table[h, i - j + M]


def same_document(documents: Any) -> Any:
    return lambda b, h, i, j: documents[i] == documents[j]


CASES: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "slopes": (sloped, (H,)),
    "table": (relative, (H, 2 * M)),
    "bias": (lambda whole: lambda s, b, h, i, j: s + whole[h, i, j], (H, M, M)),
}


def forget() -> None:
    forget_plans()
    for table in (modified_known._known, remembered._traces, remembered._recent):
        table.clear()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # leaves of another stream, on purpose
@pytest.mark.parametrize("name", CASES)
def test_known_calls_are_first_ones(name: str) -> None:
    """Arrays, documents and tensors of every step are others, at other addresses; gradients in a fixed order."""
    make, shape = CASES[name]
    steps = []
    for seed in range(6):
        torch.manual_seed(seed)
        given = [torch.randn(B, H, M, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        array = torch.randn(*shape, device="cuda", requires_grad=True)
        documents = torch.arange(M, device="cuda", dtype=torch.int32) // (50 + seed)
        steps.append((given, array, documents, torch.randn(B, H, M, 64, device="cuda", dtype=torch.bfloat16)))

    def run(given: Any, array: Any, documents: Any, dout: Any) -> list[Any]:
        mask = create_block_mask(same_document(documents), None, None, M, M)
        out = flex_attention(*given, make(array), mask)
        return [out, *torch.autograd.grad(out, (*given, array), dout)]

    torch.use_deterministic_algorithms(True)
    try:
        forget()
        found = [run(*step) for step in steps]
        ((known,),) = modified_known._known.values()
        assert len(known.backward) == 1
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            elsewhere = [run(*step) for step in steps]
        torch.cuda.current_stream().wait_stream(side)
        for step, *others in zip(steps, found, elsewhere, strict=True):
            forget()
            for x, *more in zip(run(*step), *others, strict=True):
                assert all(torch.equal(x, y) for y in more)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_known_call_is_captured_and_reads_its_array_at_every_replay() -> None:
    slopes = torch.rand(H, device="cuda")
    q, k, v = (torch.randn(B, H, M, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    function = sloped(slopes)
    for _ in range(4):
        flex_attention(q, k, v, function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, v, function)
    for _ in range(3):
        slopes.copy_(torch.rand(H, device="cuda"))
        graph.replay()
        assert torch.equal(out, flex_attention(q, k, v, function))
