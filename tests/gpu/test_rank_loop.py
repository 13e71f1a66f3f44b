"""The strategies of ContextParallel in threads of one process on one GPU: kernels of parts without communication.

Float32 results, sums in place, tiles that are handed out: everything that two GPUs do but sending.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cases
import pytest
from cases import make_case
from harness import backend, families, torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "unit"))

from parallel_problems import Shared, take
from test_parallel_strategies import check, exchange, make, run_ranks

import nvrtc_attn
from nvrtc_attn.front.call import CallOptions
from nvrtc_attn.front.chunks import band_of, chunks_of, places
from nvrtc_attn.front.philox import RngState
from nvrtc_attn.torch.parallel import local, strategies

FAMILIES = families(cases.make_case("any", dtype="float16")) if torch.cuda.is_available() else ("portable",)
PROBLEMS: list[tuple[str, int, dict[str, Any]]] = [
    ("all_gather", 2, {"causal": True}), ("ring", 2, {"causal": True}), ("ulysses", 2, {"causal": True}),
    ("ulysses x ring", 4, {"causal": True}),
    ("all_gather", 3, {"causal": True, "window_size": (257, None), "dropout_p": 0.2}),
    ("ring", 2, {"dlse": True, "head_dim": 64, "sink": "float32"}), ("all_gather", 2, {"mask": "b11k"}),
    ("ulysses", 4, {"bias": "bhqk", "causal": True, "head_dim": 64}),
    ("ring", 2, {"causal": True, "deterministic": True}), ("all_gather", 2, {"causal": True, "head_dim": 256}),
    ("all_gather", 2, {"causal": True, "seqlen_q": 301, "seqlen_k": 1203, "softcap": 20.0}),
    ("ring", 2, {"causal": True, "dtype": "float32", "head_dim": 64}),
    ("all_gather", 2, {"causal": True, "seqused_k": (500, 777), "batch": 2}),
    ("ring", 2, {"causal": "top_left", "seqused_k": (500, 0), "batch": 2, "deterministic": True}),
    ("ulysses", 2, {"window_size": (200, 30), "seqused_k": (500, 3), "batch": 2, "dropout_p": 0.2}),
    *(("ring", 2, {"seqlen_q": m, "seqlen_k": n, "head_dim": d, "causal": m == n})  # one tile of keys a part
      for m, n, d in ((34, 257, 72), (100, 100, 40), (200, 500, 128))),
]  # fmt: skip
LENGTHS = {"seqlens": tuple((n, n) for n in (301, 0, 1, 700, 64, 5, 130)), "lead": (2, 2), "tail": (9, 9)}
PACKED: list[tuple[str, int, str, dict[str, Any]]] = [
    ("all_gather", 2, "zigzag", {"causal": True}), ("all_gather", 2, "documents", {"causal": True, "dropout_p": 0.2}),
    ("all_gather kept", 3, "contiguous", {"window_size": (100, 30), "sink": "float32", "dlse": True}),
    ("ring", 2, "zigzag", {"causal": True}), ("ring", 3, "documents", {"head_dim": 64}),
    ("all_gather", 2, "zigzag", {"head_dim": 256, "causal": True}), ("ulysses x all_gather", 4, "zigzag", {}),
    ("all_gather", 2, "documents", {"causal": True, "dtype": "float32", "head_dim": 64}),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "size", "fields"), PROBLEMS, ids=lambda x: str(x).replace(" ", ""))
def test_ranks_on_one_gpu_compute_the_whole(
    name: str, size: int, fields: dict[str, Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {
        "dtype": "bfloat16", "batch": 1, "seqlen_q": 777, "seqlen_k": 777, "num_heads": 8, "num_heads_kv": 4,
        "head_dim": 128, **fields,
    }  # fmt: skip
    if known["dtype"] == "float32" and family == "hopper":
        pytest.skip("the Hopper kernels are of 16-bit types")
    case = make_case("ranks", **known)
    with backend(family):
        faults = check(Shared(case=case, layout="zigzag"), name, size, monkeypatch, "cuda")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "size", "layout", "fields"), PACKED, ids=lambda x: str(x).replace(" ", ""))
def test_ranks_share_packed_sequences(
    name: str, size: int, layout: str, fields: dict[str, Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense calls of pieces of documents, with float32 dk and dv, and varlen calls of whole ones."""
    known = {"dtype": "bfloat16", "num_heads": 8, "num_heads_kv": 4, "head_dim": 128, **LENGTHS, **fields}
    if known["dtype"] == "float32" and family == "hopper":
        pytest.skip("the Hopper kernels are of 16-bit types")
    case = make_case("packed ranks", **known)
    with backend(family):
        faults = check(Shared(case=case, layout=layout), name, size, monkeypatch, "cuda")
    assert not faults, "\n".join(faults)


@pytest.mark.skipif("hopper" not in FAMILIES, reason="bits are promised on compute capability 9.0")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal": True, "dropout_p": 0.2}], ids=str)
@pytest.mark.parametrize("name", ["ulysses", "all_gather", "all_gather kept"])
def test_ranks_that_are_planned_as_the_whole_have_its_bits(
    name: str, options: dict[str, Any], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """out, lse, and dq of a deterministic call: pieces begin at multiples of 128, two ranks divide the key heads."""
    monkeypatch.setattr(strategies.strategy, "exchange", exchange)
    n, size, rng = 3072, 2, RngState(3, 4)
    torch.manual_seed(0)
    whole = [torch.randn(2, n, h, head_dim, device="cuda", dtype=torch.bfloat16) for h in (8, 4, 4, 8)]
    q, k, v, _ = whole
    chosen = CallOptions(**options, return_lse=True, deterministic=True)
    band = band_of(None, 0 if options.get("causal") else None, n, n, True)

    def compute(plan_as: bool, count: int) -> list[torch.Tensor]:
        """out, lse and dq of all ranks."""
        chunks = chunks_of("zigzag", n, count)
        call = local.Whole(chosen, rng, n, n, band, sm_margin=0 if plan_as else None, plan_as=plan_as)
        of_rank = make(name, count, chunks, chunks) if count > 1 else None

        def work(rank: int) -> tuple[torch.Tensor, ...]:
            mine = of_rank(rank) if of_rank else strategies.AllGather(None, 0, chunks, chunks)
            own = call._replace(tables={})
            q, k, v, dout = (take(x, chunks[rank], 1) for x in whole)
            out, lse, saved = mine.forward(strategies.Inputs(q, k, v, None, None, 0, 8), own)
            return out, lse, mine.backward(saved, own, dout, None).dq

        results = [torch.empty_like(q), torch.empty(2, 8, n, device="cuda"), torch.empty_like(q)]
        for rank, found in enumerate(run_ranks(count, work)):
            for total, x, dim in zip(results, found, (1, 2, 1), strict=True):
                for (a, b), at in zip(chunks[rank], places(chunks[rank], chunks[rank]), strict=True):
                    total.narrow(dim, a, b - a).copy_(x.narrow(dim, at.start, b - a))
        return results

    expected = compute(False, 1)
    plain = nvrtc_attn.attention(q, k, v, **options, rng=(3, 4) if "dropout_p" in options else None, return_lse=True)
    assert torch.equal(plain[0], expected[0])
    assert torch.equal(plain[1], expected[1])
    for what, x, y in zip(("out", "lse", "dq"), compute(True, size), expected, strict=True):
        assert torch.equal(x, y), (what, float((x.float() - y.float()).abs().max()))
