"""Score and mask functions: our kernels with them, without them, and torch's FlexAttention.

    python benchmarks/modifiers.py [--quick] [--tuned] [--budget SECONDS] [--case REGEX] [--only-ours] [--save]

Cases: masks (document + causal, prefix-LM, 2-D neighbourhood), ALiBi, learned scale, softcap and ALiBi, T5's and Swin's
learned tables with their gradients; bfloat16, 16 heads, 16384 tokens. "ours" is `nvrtc_attn.torch.flex_attention`,
"untrained" the same without a gradient of the arrays, "plain" the same call without the function (with causal where the
case is), "flex" torch.compile(flex_attention) of the same Python function ("tuned": with max-autotune; "x flex" is of
the fastest one), "sdpa" scaled_dot_product_attention
with the bias or mask as a whole matrix, where that fits. "flash" is FlexAttention's backend of that name, where
flash-attn-4 is installed; "flex mask" and "compiled" its create_block_mask without and with ``_compile``. "cudnn" is
cudnn.flex_attention of nvidia-cudnn-frontend, where that is installed: masks alone, which it takes as the intervals of
keys of every query ("cudnn mask": its plan of them; the intervals themselves are given).
``kept``: the part of the scores that the mask keeps; "of plain" compares TFLOP/s of kept scores. First call (tracing,
compiling, loading, unless the disk cache has it), creation of the mask, and the peak of memory over both passes are
columns of their own. Peers are left out once ``--budget`` seconds have passed. About 80 seconds of an H200 with
--quick and our kernels in the cache.

``--case REGEX`` takes all cases whose names it is found in, those too that a run without it leaves out: windows of 128,
1024 and 4096 by a mask_mod, a scale of each head, a sink, Swin's windows, a list of blocks, arrays with gradients by k
and by q. ``--device cpu --length 128 --only-ours`` runs everything once in NumPy, to see that it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config
from measure import in_turn, print_table, save
from torch.nn.attention.flex_attention import create_block_mask as flex_mask
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import nvrtc_attn
import nvrtc_attn.torch as na

HEADS, TOKENS, LENGTH = 16, 16384, 4096
COLUMNS = [
    "case", "D", "pass", "kept", "ms", "untrained ms", "plain ms", "flex ms", "tuned ms", "flash ms", "cudnn ms",
    "sdpa ms", "TFLOP/s", "of plain", "x flex", "x cudnn", "x sdpa",
    "first s", "flex first s", "mask ms", "flex mask ms", "compiled mask ms", "cudnn mask ms", "MB", "flex MB",
]  # fmt: skip
Function = Callable[..., Any]
FLEX: dict[str, dict[str, Any]] = {
    "flex": {}, "flex tuned": {"mode": "max-autotune-no-cudagraphs"}, "flex flash": {},
}  # fmt: skip
KERNEL_OPTIONS: dict[str, dict[str, Any]] = {"flex flash": {"BACKEND": "FLASH"}}
SMALL_BLOCKS = {"BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32}
"""Of Flex's backward pass: with its own ones the gradient of a table needs more shared memory than there is."""


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
    sink: torch.Tensor | None = None
    """A logit of each head that takes probability: FlexAttention scales by the log-sum-exp."""
    mask_of_flex: Function | None = None
    """What the peers get in place of ``mask_mod``."""
    kernel_options: dict[str, Any] | None = None
    by_name: bool = False
    """Left out unless ``--case`` names it."""

    @property
    def mask_of_peers(self) -> Function | None:
        return self.mask_of_flex or self.mask_mod


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def cases(quick: bool, device: str = "cuda", n: int = LENGTH) -> Iterator[Case]:
    torch.manual_seed(0)
    lengths = torch.tensor([0, 700, 1500, 1600, 2900]) * n // LENGTH
    document = (torch.arange(n)[:, None] >= lengths).sum(1).to(device, torch.int32)
    prefix = (torch.tensor([100, 900, 1700, 3000]) * n // LENGTH).to(device, torch.int32)
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
    yield Case("relative table", n, table, None, (relative,), as_bias=True, kernel_options=SMALL_BLOCKS)
    yield Case("documents causal", n, None, same, causal=True)
    yield Case("prefix", n, None, with_prefix, causal=True)
    if quick:
        return
    yield Case("learned alibi", n, learned_alibi, causal, (learned,), causal=True, as_bias=True)
    yield Case("softcap and alibi", n, capped, causal, causal=True)
    yield Case("t5", n, t5, None, (buckets,), as_bias=True)
    yield Case("natten 64x64", n, None, near)
    yield from cases_by_name(device, n, learned)


def cases_by_name(device: str, n: int, learned: torch.Tensor) -> Iterator[Case]:
    sink = torch.randn(HEADS, device=device).requires_grad_()
    by_k = torch.rand(HEADS, n, device=device).add_(0.5).requires_grad_()
    by_q = torch.rand(HEADS, n, device=device).add_(0.5).requires_grad_()
    swin = torch.randn(15 * 15, HEADS, device=device).requires_grad_()
    at = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")).flatten(1)
    across = (at[:, :, None] - at[:, None]) + 7  # within windows of 8 x 8
    index = (across[0] * 15 + across[1]).to(device, torch.int32)

    def scaled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * learned[h]

    def of_windows(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + swin[index[q, k], h]

    def of_keys(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * by_k[h, k]

    def of_queries(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * by_q[h, q]

    for width in (128, 1024, 4096):
        length = n if width < n else 4 * n

        def window(b: Any, h: Any, q: Any, k: Any, width: int = width) -> Any:
            return (q >= k) & (q - k < width)

        yield Case(f"window {width}", length, None, window, causal=True, by_name=True)
    yield Case("head scale", n, scaled, causal, (learned,), causal=True, by_name=True)
    yield Case("sink", n, None, causal, (sink,), causal=True, sink=sink, by_name=True)
    yield Case("swin 8x8", 64, of_windows, None, (swin,), as_bias=True, by_name=True)
    yield block_list(device, n)
    yield Case("gradient by k", n, of_keys, causal, (by_k,), causal=True, by_name=True)
    yield Case("gradient by q", n, of_queries, causal, (by_q,), causal=True, by_name=True)


def block_list(device: str, n: int) -> Case:
    """A quarter of the blocks of 128 at random, and the diagonal."""
    blocks = -(-n // 128)
    listed = (torch.rand(blocks, blocks) < 0.25) | torch.eye(blocks, dtype=torch.bool)
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), listed.sum(1).cumsum(0)))
    ours = nvrtc_attn.block_mask(indptr, listed.nonzero()[:, 1].to(device), 128, n, n)
    table = listed.to(device)
    return Case("block list", n, None, ours, mask_of_flex=lambda b, h, q, k: table[q // 128, k // 128], by_name=True)


def whole(case: Case, batch: int) -> torch.Tensor:
    """The case as a matrix to add, in bfloat16."""
    at = [torch.arange(n, device="cuda").reshape([-1 if i == d else 1 for i in range(4)])
          for d, n in enumerate((batch, HEADS, case.length, case.length))]  # fmt: skip
    bias = torch.zeros((batch, HEADS, case.length, case.length), device="cuda", dtype=torch.bfloat16)
    if case.score_mod is not None:
        bias = case.score_mod(torch.zeros(1, device="cuda"), *at).to(torch.bfloat16).expand_as(bias)
    if case.mask_of_peers is not None:
        bias = bias.masked_fill(~case.mask_of_peers(*at), float("-inf"))
    return bias


def in_turn_on(device: str, functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each; on the CPU, where nothing is measured, those of one call."""
    if device == "cuda":
        return {name: x["ms"] for name, x in in_turn(functions, rep_ms=30).items()}
    return {name: 1e3 * timed(function)[1] for name, function in functions.items()}


def has_flash() -> bool:
    """Whether FlexAttention's FLASH backend, flash-attn-4, is installed."""
    return importlib.util.find_spec("flash_attn") is not None and bool(importlib.util.find_spec("flash_attn.cute"))


def has_cudnn() -> bool:
    """Whether cudnn.flex_attention is installed, with the compiler that it needs."""
    return all(importlib.util.find_spec(x) is not None for x in ("cudnn", "cutlass")) and bool(
        importlib.util.find_spec("cudnn.flex_attention")
    )


def key_intervals(mask_mod: Function, batch: int, length: int, device: str = "cuda") -> torch.Tensor:
    """The mask as cudnn.flex_attention takes it, int32 [1, 1 + 2 n, batch * length].

    Every query sees the keys below its first number, and those from its second one to below its third, and so on.
    """
    at, entries = torch.arange(length, device=device), torch.arange(batch, device=device)
    seen = mask_mod(entries[:, None, None], torch.zeros_like(entries[:1]), at[:, None], at)
    seen = seen.expand(batch, length, length).reshape(-1, length)
    if not seen[:, 0].all():  # what is below the first number is empty then
        seen = torch.nn.functional.pad(seen, (1, 0), value=True)
    first_key = seen.shape[1] - length
    ends = seen ^ torch.nn.functional.pad(seen[:, 1:], (0, 1), value=False)  # behind these, seen changes
    place = ends.cumsum(1) - 1
    number = int(place.max()) + 1
    found = torch.full((seen.shape[0], number + 1 - number % 2), length, device=device, dtype=torch.int32)
    row, column = ends.nonzero(as_tuple=True)
    found[row, place[row, column]] = (column + 1 - first_key).to(torch.int32)
    return found.T.contiguous()[None]


def cudnn_call(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Function, float]:
    """A function of no arguments that computes the case, and the milliseconds that its plan takes."""
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    assert case.mask_of_peers is not None
    intervals = key_intervals(case.mask_of_peers, q.shape[0], case.length)
    rows_first = [x.transpose(1, 2) for x in (q, k, v)]
    for _ in range(2):  # kernels are compiled in the first one
        plan, seconds = timed(lambda: create_mask_plan(intervals, *rows_first, build_backward=True))
    return lambda: flex_attn_func(*rows_first, mask_plan=plan).transpose(1, 2), 1e3 * seconds


def our_call(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> Any:
    if case.sink is None:
        return na.flex_attention(q, k, v, case.score_mod, mask)
    rows_first = [x.transpose(1, 2) for x in (q, k, v)]
    return na.attention(*rows_first, mask_mod=case.mask_mod, sink=case.sink).transpose(1, 2)


def flex_call(case: Case, compiled: Function, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """``options`` has the score_mod and the block mask; a sink takes its share of the probability afterwards."""
    if case.sink is None:
        return compiled(q, k, v, **options)
    out, lse = compiled(q, k, v, **options, return_lse=True)
    return out * torch.sigmoid(lse - case.sink[:, None])[..., None].to(out.dtype)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    synchronize()
    start = time.perf_counter()
    result = function()
    synchronize()
    return result, time.perf_counter() - start


def passes(forward: Callable[[], Any], leaves: list[Any], dout: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    out = forward()

    def without_graph() -> Any:
        with torch.no_grad():
            return forward()

    return without_graph, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def peak_mb(forward: Callable[[], Any], leaves: list[Any], dout: Any) -> float | None:
    if not dout.is_cuda:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(forward(), leaves, dout)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def print_refusal(case: Case, peer: str, error: Exception) -> None:
    """In one line, that a peer cannot do a case."""
    print(f"{case.name}, {peer}: {str(error).splitlines()[0][:200]}", flush=True)


def check_same(out: torch.Tensor, other: torch.Tensor, gradients: Iterable[Any], others: Iterable[Any]) -> None:
    """A benchmark of a wrong result is none."""
    torch.testing.assert_close(out.float(), other.float(), atol=3e-2, rtol=3e-2)
    for a, b in zip(gradients, others, strict=True):
        scale = max(1.0, float(b.float().abs().max()))
        torch.testing.assert_close(a.float() / scale, b.float() / scale, atol=3e-2, rtol=3e-2)


def kept_part(case: Case, batch: int, device: str) -> float:
    mask_mod = case.mask_of_peers
    if mask_mod is None:
        return 1.0
    at, entries = torch.arange(case.length, device=device), torch.arange(batch, device=device)
    rows = at[:, None].split(4096)
    kept = sum(float(mask_mod(b, b * 0, x, at[None]).sum()) for b in entries for x in rows)
    return kept / batch / case.length**2


_compiled_mask_ms: dict[str, float] = {}


def run(
    case: Case, head_dim: int, peers: bool, wanted: Container[str], device: str = "cuda", tokens: int = TOKENS
) -> Iterator[dict[str, Any]]:
    batch = max(1, tokens // case.length)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v, dout = (torch.randn(batch, HEADS, case.length, head_dim, device=device, dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)] + list(case.trained)
    row: dict[str, Any] = {"case": case.name, "D": head_dim, "kept": kept_part(case, batch, device)}

    def make_mask(of: Function, mask_mod: Function | None, **more: Any) -> Any:
        return None if mask_mod is None else of(mask_mod, batch, None, case.length, case.length, **more)

    mask, seconds = timed(lambda: make_mask(na.create_block_mask, case.mask_mod))
    row["mask ms"] = 1e3 * seconds if mask is not None else None
    ours = lambda: our_call(case, q, k, v, mask)  # noqa: E731
    result, row["first s"] = timed(lambda: torch.autograd.grad(ours(), leaves, dout))
    functions = {"ours": passes(ours, leaves, dout)}
    row["MB"] = peak_mb(ours, leaves, dout)
    mask_plain = na.create_block_mask(causal, None, None, case.length, case.length) if case.causal else None
    functions["plain"] = passes(lambda: na.flex_attention(q, k, v, None, mask_plain), leaves[:3], dout)
    if case.trained:
        for x in case.trained:
            x.requires_grad_(False)
        functions["untrained"] = passes(ours, leaves[:3], dout)
        for x in case.trained:
            x.requires_grad_()
    if peers:
        mask_mod = case.mask_of_peers
        block_mask, seconds = timed(lambda: make_mask(flex_mask, mask_mod))
        if mask is not None:
            row["flex mask ms"] = 1e3 * seconds
            if case.name not in _compiled_mask_ms:  # the same for every head dim, and seconds to compile
                for _ in range(2):
                    _, seconds = timed(lambda: make_mask(flex_mask, mask_mod, _compile=True))
                _compiled_mask_ms[case.name] = 1e3 * seconds
            row["compiled mask ms"] = _compiled_mask_ms[case.name]
        for name, options in FLEX.items():
            if name not in wanted:
                continue
            torch._dynamo.reset()
            compiled = torch.compile(flex_attention, dynamic=False, **options)

            given = {"score_mod": case.score_mod, "block_mask": block_mask}
            if case.kernel_options or name in KERNEL_OPTIONS:
                given["kernel_options"] = {**(case.kernel_options or {}), **KERNEL_OPTIONS.get(name, {})}

            def flex(compiled: Function = compiled, given: dict[str, Any] = given) -> Any:
                return flex_call(case, compiled, q, k, v, given)

            try:
                theirs, seconds = timed(lambda flex=flex: torch.autograd.grad(flex(), leaves, dout))
            except Exception as error:  # of its compiler: what it cannot do is no reason to measure nothing
                print_refusal(case, name, error)
                continue
            if name == "flex":
                row["flex first s"], row["flex MB"] = seconds, peak_mb(flex, leaves, dout)
            check_same(ours(), flex(), result, theirs)
            functions[name] = passes(flex, leaves, dout)
        if "cudnn" in wanted and case.score_mod is None and case.mask_mod is not None and case.sink is None:
            try:
                theirs_of_cudnn, row["cudnn mask ms"] = cudnn_call(case, q, k, v)
                check_same(ours(), theirs_of_cudnn(), result, torch.autograd.grad(theirs_of_cudnn(), leaves, dout))
                functions["cudnn"] = passes(theirs_of_cudnn, leaves, dout)
            except Exception as error:  # what it cannot do is no reason to measure nothing, here neither
                print_refusal(case, "cudnn", error)
        if (case.as_bias or case.mask_mod is not None) and case.sink is None and case.length <= LENGTH:
            bias = whole(case, batch).detach()
            sdpa = lambda: scaled_dot_product_attention(q, k, v, attn_mask=bias)  # noqa: E731
            functions["sdpa"] = passes(sdpa, leaves[:3], dout)
    for index, which in enumerate(("forward", "backward")):
        ms = in_turn_on(device, {n: f[index] for n, f in functions.items()})
        flops = (4, 10)[index] * batch * HEADS * case.length**2 * head_dim * row["kept"]
        density = row["kept"] / (0.5 if case.causal else 1.0)
        yield {
            **row, "pass": which, "ms": ms["ours"], "untrained ms": ms.get("untrained"), "plain ms": ms["plain"],
            "flex ms": ms.get("flex"), "tuned ms": ms.get("flex tuned"), "flash ms": ms.get("flex flash"),
            "cudnn ms": ms.get("cudnn"), "sdpa ms": ms.get("sdpa"), "TFLOP/s": flops / ms["ours"] / 1e9,
            "of plain": density * ms["plain"] / ms["ours"],
            "x flex": min(ms[x] for x in FLEX if x in ms) / ms["ours"] if ms.keys() & FLEX.keys() else None,
            "x cudnn": ms["cudnn"] / ms["ours"] if "cudnn" in ms else None,
            "x sdpa": ms["sdpa"] / ms["ours"] if "sdpa" in ms else None,
        }  # fmt: skip
        row = {"case": case.name, "D": head_dim, "kept": row["kept"]}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four cases")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which peers are left out")
    parser.add_argument("--tuned", action="store_true", help="also FlexAttention with max-autotune, minutes")
    parser.add_argument("--dims", default="128,64")
    parser.add_argument("--save", action="store_true", help="also write results/modifiers.json")
    parser.add_argument("--case", type=re.compile, help="cases whose names this is found in, of all")
    parser.add_argument("--only-ours", action="store_true", help="without peers")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: everything once, in float32")
    arguments = parser.parse_args(given)
    torch._functorch.config.donated_buffer = False  # backward passes are repeated on one graph
    start = time.perf_counter()
    found: list[dict[str, Any]] = []
    wanted = ["flex"] + ["flex tuned"] * arguments.tuned + ["flex flash"] * has_flash() + ["cudnn"] * has_cudnn()
    tokens = TOKENS if arguments.device == "cuda" else arguments.length
    for head_dim in map(int, arguments.dims.split(",")):
        for case in cases(arguments.quick and arguments.case is None, arguments.device, arguments.length):
            if case.by_name if arguments.case is None else not arguments.case.search(case.name):
                continue
            peers = not arguments.only_ours and time.perf_counter() - start < arguments.budget
            rows = list(run(case, head_dim, peers, wanted, arguments.device, tokens))
            print_table(rows, COLUMNS)
            found += rows
    print_table(found, COLUMNS)
    if arguments.save:
        print(save("modifiers", found))


if __name__ == "__main__":
    main()
