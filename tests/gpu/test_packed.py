"""Packed sequences of all kinds of lengths: every document is what it is alone, in both families and both passes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import cases
import pytest
from harness import DEVICE, Run, backend, check, families, torch

import nvrtc_attn.torch as na

HEADS = 4
MIXES: dict[str, list[int]] = {
    "even": [256] * 40,
    "one long": [64] * 31 + [6000] + [64] * 32,
    "long last": [100] * 63 + [3000],
    "eleven": [64, 4096, 512, 1536, 128, 3072, 777, 2048, 1024, 256, 2500],
    "empty": [0, 300, 0, 0, 129, 128, 0, 127, 0],
    "one token": [1] * 300 + [200],
    "more than 4096": [(7 * n) % 5 for n in range(5000)] + [130],
    "alone": [1000],
}


def cu_seqlens(lengths: list[int]) -> Any:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=DEVICE, dtype=torch.int32)


def packed_results(
    inputs: tuple[Any, Any, Any], dout: Any, lengths: list[int], **options: Any
) -> tuple[Any, tuple[Any, ...]]:
    ends = cu_seqlens(lengths)
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    out = na.attention(
        *leaves, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths), **options
    )
    return out.detach(), torch.autograd.grad(out, leaves, dout)


def alone(inputs: tuple[Any, Any, Any], dout: Any, lengths: list[int], **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The same from dense calls: documents of one length are a batch."""
    places = defaultdict(list)
    start = 0
    for length in lengths:
        places[length].append(start)
        start += length
    out, grads = torch.zeros_like(dout), tuple(torch.zeros_like(x) for x in inputs)
    for length, starts in places.items():
        if length == 0:
            continue
        rows = (torch.tensor(starts)[:, None] + torch.arange(length)).flatten().to(DEVICE)
        leaves = tuple(x[0, rows].unflatten(0, (-1, length)).detach().requires_grad_() for x in inputs)
        found = na.attention(*leaves, **options)
        own = torch.autograd.grad(found, leaves, dout[0, rows].unflatten(0, (-1, length)))
        out[0, rows] = found.detach().flatten(0, 1)
        for whole, part in zip(grads, own, strict=True):
            whole[0, rows] = part.flatten(0, 1)
    return out, grads


def worst_document(found: Any, expected: Any, lengths: list[int]) -> float:
    """The largest relative error of a document, of those that are not all but zero."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE)

    def squares(x: Any) -> Any:
        sums = torch.zeros(len(lengths), dtype=torch.float64, device=DEVICE)
        return sums.index_add_(0, document, x[0].double().square().flatten(1).sum(1))

    size = squares(expected)
    error = squares(found.double() - expected.double())
    return float((error / size.clamp_min(1e-2 * size.max())).sqrt().max())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("heads_kv", [HEADS, 1])
def test_every_document_is_what_it_is_alone(mix: str, head_dim: int, causal: bool, heads_kv: int) -> None:
    lengths = MIXES[mix]
    torch.manual_seed(len(mix))
    shape = (1, sum(lengths), HEADS, head_dim)
    q, dout = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, sum(lengths), heads_kv, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    expected, expected_grads = alone((q, k, v), dout, lengths, causal=causal)
    for family in families(cases.make_case("packed", dtype="bfloat16")):
        with backend(family):
            for deterministic in (False, True):
                out, grads = packed_results((q, k, v), dout, lengths, causal=causal, deterministic=deterministic)
                named = zip(("out", "dq", "dk", "dv"), (out, *grads), (expected, *expected_grads), strict=True)
                for name, x, y in named:
                    assert torch.isfinite(x).all(), (family, name)
                    assert worst_document(x, y, lengths) < 0.03, (family, deterministic, name)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_is_replayed_with_other_lengths_of_the_same_total(deterministic: bool) -> None:
    """The list of tiles is made anew by every replay; nothing of the lengths was baked in."""
    first = [300, 1, 0, 700, 64, 128, 500]
    others = [[700, 700, 293, 0, 0, 0, 0], [0, 0, 0, 0, 500, 600, 593], [241, 242, 242, 242, 242, 242, 242], first]
    case = cases.make_case(
        "packed-graph", seqlens=tuple((x, x) for x in first), dtype="bfloat16", causal=True, num_heads=4,
        num_heads_kv=2, head_dim=64, tail=(9, 5), deterministic=deterministic,
    )  # fmt: skip
    for family in families(case):
        with backend(family):
            run = Run(case)
            run.backward(run.forward())  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run.forward()
                grads = run.backward(out)
            for lengths in others:
                for name in ("cu_seqlens_q", "cu_seqlens_k"):
                    run.lengths[name].copy_(cu_seqlens(lengths))
                graph.replay()
                torch.cuda.synchronize()
                eager = run.forward()
                eager_grads = run.backward(eager)
                assert torch.equal(out["out"], eager["out"]), (family, lengths)
                assert torch.equal(out["lse"], eager["lse"]), (family, lengths)
                for name, x in grads.items():
                    if deterministic:
                        assert torch.equal(x, eager_grads[name]), (family, lengths, name)
                    else:
                        torch.testing.assert_close(x, eager_grads[name], atol=2e-2, rtol=2e-2)


LONG = ((700, 700), (1, 5), (0, 300), (300, 0), (64, 64), (513, 1025), (1025, 513))
USED = (650, 5, 0, 0, 1, 1000, 513)


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top_left", "deterministic": True},
        {"window_size": (200, 30)},
        {"seqused_k": USED, "causal": True},
        {"dropout_p": 0.2, "causal": True},
        {"num_heads": 8, "num_heads_kv": 1},
        {"num_heads": 8, "num_heads_kv": 2, "causal": True, "seqused_k": USED},
        {"deterministic": True, "num_heads": 4, "num_heads_kv": 2},
    ],
    ids=lambda x: "-".join(x) or "plain",
)
def test_against_float64(head_dim: int, options: dict[str, Any]) -> None:
    """Long and empty documents and tokens of none, on both sides, by the error rule of all kernels."""
    check(
        cases.make_case(
            "packed",
            seqlens=LONG,
            dtype="bfloat16",
            head_dim=head_dim,
            lead=(130, 7),
            tail=(5, 400),
            dlse=True,
            **options,
        )
    )


def test_rows_of_no_document_are_zeros_wherever_they_are() -> None:
    """Thousands of tokens before and behind the documents."""
    for lead, tail in ((5000, 0), (0, 5000), (3000, 3000)):
        check(
            cases.make_case(
                "packed-outside", seqlens=((200, 200), (70, 70)), dtype="bfloat16", lead=(lead, tail), tail=(tail, lead)
            )
        )
