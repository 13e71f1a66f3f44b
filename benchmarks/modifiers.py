"""Score and mask functions: our kernels with them, without them, and torch's FlexAttention.

    python benchmarks/modifiers.py [--quick] [--tuned] [--budget SECONDS] [--save]

Cases: masks (document + causal, prefix-LM, 2-D neighbourhood), ALiBi, learned scale, softcap and ALiBi, T5's and Swin's
learned tables with their gradients; bfloat16, 16 heads, 16384 tokens. "ours" is `nvrtc_attn.torch.flex_attention`,
"plain" the same call without the function (with causal where the case is), "flex" torch.compile(flex_attention) of the
same Python function ("tuned": with max-autotune; "x flex" is of the faster one), "sdpa" scaled_dot_product_attention
with the bias or mask as a whole matrix, where that fits.
``kept``: the part of the scores that the mask keeps; "of plain" compares TFLOP/s of kept scores. First call (tracing,
compiling, loading, unless the disk cache has it), creation of the mask, and the peak of memory over both passes are
columns of their own. Peers are left out once ``--budget`` seconds have passed. About 80 seconds of an H200 with
--quick and our kernels in the cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config
from measure import in_turn, print_table, save
from torch.nn.attention.flex_attention import create_block_mask as flex_mask
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import nvrtc_attn.torch as na

HEADS, TOKENS = 16, 16384
COLUMNS = [
    "case", "D", "pass", "kept", "ms", "plain ms", "flex ms", "tuned ms", "sdpa ms",
    "TFLOP/s", "of plain", "x flex", "x sdpa",
    "first s", "flex first s", "mask ms", "flex mask ms", "MB", "flex MB",
]  # fmt: skip
Function = Callable[..., Any]
FLEX: dict[str, dict[str, Any]] = {"flex": {}, "flex tuned": {"mode": "max-autotune-no-cudagraphs"}}


@dataclass(frozen=True)
class Case:
    """What a user writes, over tensors of his."""

    name: str
    length: int
    score_mod: Function | None = None
    mask_mod: Function | None = None
    trained: tuple[torch.Tensor, ...] = ()
    causal: bool = False
    """The kernel without the function has a causal mask."""
    as_bias: bool = field(default=False)
    """SDPA can take it as a matrix that is added."""


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def cases(quick: bool) -> Iterator[Case]:
    n, device = 4096, "cuda"
    torch.manual_seed(0)
    lengths = torch.tensor([0, 700, 1500, 1600, 2900])
    document = (torch.arange(n)[:, None] >= lengths).sum(1).to(device, torch.int32)
    prefix = torch.tensor([100, 900, 1700, 3000], device=device, dtype=torch.int32)
    slopes = torch.exp2(-torch.arange(1, HEADS + 1) * 8.0 / HEADS).to(device)
    learned = slopes.clone().requires_grad_()
    relative = torch.randn(HEADS, 2 * n, device=device).mul_(0.1).requires_grad_()
    buckets = torch.randn(32, HEADS, device=device).requires_grad_()

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (document[q] == document[k]) & (q >= k)

    def with_prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < prefix[b]) | (q >= k)

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (abs(q // 64 - k // 64) <= 6) & (abs(q % 64 - k % 64) <= 6)

    def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h] * (k - q)

    def learned_alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + learned[h] * (k - q)

    def capped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 30 * torch.tanh(s / 30) + slopes[h] * (k - q)

    def table(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + relative[h, q - k + n]

    def t5(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = abs(k - q)
        far = 8 + (torch.log(torch.clamp(distance, min=1) / 8.0) * (8 / 2.772588722239781)).to(torch.int32)
        bucket = torch.where(distance < 8, distance, torch.clamp(far, max=15)) + torch.where(k > q, 16, 0)
        return s + buckets[bucket, h]

    yield Case("alibi causal", n, alibi, causal, causal=True, as_bias=True)
    yield Case("relative table", n, table, None, (relative,), as_bias=True)
    yield Case("documents causal", n, None, same, causal=True)
    yield Case("prefix", n, None, with_prefix, causal=True)
    if quick:
        return
    yield Case("learned alibi", n, learned_alibi, causal, (learned,), causal=True, as_bias=True)
    yield Case("softcap and alibi", n, capped, causal, causal=True)
    yield Case("t5", n, t5, None, (buckets,), as_bias=True)
    yield Case("natten 64x64", n, None, near)


def whole(case: Case, batch: int) -> torch.Tensor:
    """The case as a matrix to add, in bfloat16."""
    at = [torch.arange(n, device="cuda").reshape([-1 if i == d else 1 for i in range(4)])
          for d, n in enumerate((batch, HEADS, case.length, case.length))]  # fmt: skip
    bias = torch.zeros((batch, HEADS, case.length, case.length), device="cuda", dtype=torch.bfloat16)
    if case.score_mod is not None:
        bias = case.score_mod(torch.zeros(1, device="cuda"), *at).to(torch.bfloat16).expand_as(bias)
    if case.mask_mod is not None:
        bias = bias.masked_fill(~case.mask_mod(*at), float("-inf"))
    return bias


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    torch.cuda.synchronize()
    return result, time.perf_counter() - start


def passes(forward: Callable[[], Any], leaves: list[Any], dout: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    out = forward()

    def without_graph() -> Any:
        with torch.no_grad():
            return forward()

    return without_graph, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def peak_mb(forward: Callable[[], Any], leaves: list[Any], dout: Any) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(forward(), leaves, dout)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def kept_part(case: Case, batch: int) -> float:
    if case.mask_mod is None:
        return 1.0
    at, entries = torch.arange(case.length, device="cuda"), torch.arange(batch, device="cuda")
    return sum(float(case.mask_mod(b, b * 0, at[:, None], at[None]).float().mean()) for b in entries) / batch


def run(case: Case, head_dim: int, peers: bool, wanted: Container[str]) -> Iterator[dict[str, Any]]:
    batch = TOKENS // case.length
    q, k, v, dout = (
        torch.randn(batch, HEADS, case.length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)] + list(case.trained)
    row: dict[str, Any] = {"case": case.name, "D": head_dim, "kept": kept_part(case, batch)}

    def make_mask(of: Function) -> Any:
        return None if case.mask_mod is None else of(case.mask_mod, batch, None, case.length, case.length)

    mask, seconds = timed(lambda: make_mask(na.create_block_mask))
    row["mask ms"] = 1e3 * seconds if mask is not None else None
    ours = lambda: na.flex_attention(q, k, v, case.score_mod, mask)  # noqa: E731
    result, row["first s"] = timed(lambda: torch.autograd.grad(ours(), leaves, dout))
    functions = {"ours": passes(ours, leaves, dout)}
    row["MB"] = peak_mb(ours, leaves, dout)
    mask_plain = na.create_block_mask(causal, None, None, case.length, case.length) if case.causal else None
    functions["plain"] = passes(lambda: na.flex_attention(q, k, v, None, mask_plain), leaves[:3], dout)
    if peers:
        block_mask, seconds = timed(lambda: make_mask(flex_mask))
        row["flex mask ms"] = 1e3 * seconds if mask is not None else None
        for name, options in FLEX.items():
            if name not in wanted:
                continue
            torch._dynamo.reset()
            compiled = torch.compile(flex_attention, dynamic=False, **options)

            def flex(compiled: Function = compiled) -> Any:
                return compiled(q, k, v, score_mod=case.score_mod, block_mask=block_mask)

            try:
                theirs, seconds = timed(lambda flex=flex: torch.autograd.grad(flex(), leaves, dout))
            except Exception as error:  # of its compiler: what it cannot do is no reason to measure nothing
                print(f"{case.name}, {name}: {str(error).splitlines()[0][:200]}", flush=True)
                continue
            if name == "flex":
                row["flex first s"], row["flex MB"] = seconds, peak_mb(flex, leaves, dout)
            # A benchmark of a wrong result is none.
            torch.testing.assert_close(ours().float(), flex().float(), atol=3e-2, rtol=3e-2)
            for a, b in zip(result, theirs, strict=True):
                scale = max(1.0, float(b.float().abs().max()))
                torch.testing.assert_close(a.float() / scale, b.float() / scale, atol=3e-2, rtol=3e-2)
            functions[name] = passes(flex, leaves, dout)
        if case.as_bias or case.mask_mod is not None:
            bias = whole(case, batch).detach()
            sdpa = lambda: scaled_dot_product_attention(q, k, v, attn_mask=bias)  # noqa: E731
            functions["sdpa"] = passes(sdpa, leaves[:3], dout)
    for index, which in enumerate(("forward", "backward")):
        ms = {name: x["ms"] for name, x in in_turn({n: f[index] for n, f in functions.items()}, rep_ms=30).items()}
        flops = (4, 10)[index] * batch * HEADS * case.length**2 * head_dim * row["kept"]
        density = row["kept"] / (0.5 if case.causal else 1.0)
        yield {
            **row, "pass": which, "ms": ms["ours"], "plain ms": ms["plain"], "flex ms": ms.get("flex"),
            "tuned ms": ms.get("flex tuned"), "sdpa ms": ms.get("sdpa"), "TFLOP/s": flops / ms["ours"] / 1e9,
            "of plain": density * ms["plain"] / ms["ours"],
            "x flex": min(ms[x] for x in FLEX if x in ms) / ms["ours"] if ms.keys() & FLEX.keys() else None,
            "x sdpa": ms["sdpa"] / ms["ours"] if "sdpa" in ms else None,
        }  # fmt: skip
        row = {"case": case.name, "D": head_dim, "kept": row["kept"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four cases")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which peers are left out")
    parser.add_argument("--tuned", action="store_true", help="also FlexAttention with max-autotune, minutes")
    parser.add_argument("--dims", default="128,64")
    parser.add_argument("--save", action="store_true", help="also write results/modifiers.json")
    arguments = parser.parse_args()
    torch._functorch.config.donated_buffer = False  # backward passes are repeated on one graph
    start = time.perf_counter()
    found: list[dict[str, Any]] = []
    wanted = ("flex", "flex tuned") if arguments.tuned else ("flex",)
    for head_dim in map(int, arguments.dims.split(",")):
        for case in cases(arguments.quick):
            rows = list(run(case, head_dim, time.perf_counter() - start < arguments.budget, wanted))
            print_table(rows, COLUMNS)
            found += rows
    print_table(found, COLUMNS)
    if arguments.save:
        print(save("modifiers", found))


if __name__ == "__main__":
    main()
