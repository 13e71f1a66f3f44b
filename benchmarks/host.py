"""What a call costs on the host: every adapter of nvrtc_attn beside torch's own attention, in microseconds.

    python benchmarks/host.py          or    python benchmarks/attention.py --part host

One small problem (1 x 64 x 8, head dim 64), which the GPU finishes before the host has launched the next one. Each
number is the best of 20 batches of up to 100 calls; the batches of all functions take turns. SDPA's backends are chosen
around a batch: choosing takes as long as a call.

A second table has problems of models whose backward pass is a few launches: the host's time of a call, and in ``GPU``
that of the backward pass's kernels alone, of replays of a CUDA graph. What is above ``GPU`` in "backward" is the host.

    python benchmarks/host.py [--part doors,models] [--only REGEX]

Takes half a minute.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from measure import graph_of, print_table
from torch.nn.attention import SDPBackend, sdpa_kernel

import nvrtc_attn
import nvrtc_attn.torch as na
from nvrtc_attn import aten
from nvrtc_attn.front.operands import INPUTS
from nvrtc_attn.torch import ops

SHAPE = (1, 64, 8, 64)
BATCHES, CALLS = 20, 100
BATCH_US = 20_000
"""What a batch takes at most, where a call takes long."""
REPLAYED, REPLAYS = 10, 10
"""Calls in a CUDA graph, and how often it is replayed."""
COLUMNS = ("forward", "with gradient", "backward", "both")
"""Without a graph, with one, the pass through it, and a call with its gradient."""
SEED = "seed, the operator"
SEED_SDPA = "seed, scaled_dot_product_attention"
MODELS = {
    "MiniLM": ((1, 128, 12, 32), torch.bfloat16, False),
    "DiT-XL/2 256": ((4, 256, 16, 72), torch.bfloat16, False),
    "Stable Diffusion 16 x 16": ((4, 256, 8, 160), torch.float16, False),
    "Whisper tiny": ((1, 1500, 6, 64), torch.bfloat16, False),
    "CLIP text": ((64, 77, 12, 64), torch.bfloat16, True),
}
"""[batch, rows, heads, head dim], element type, causal."""


class Timed(NamedTuple):
    """A function of one row and column, and what is around a batch of it."""

    row: str
    column: str
    call: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def differentiable(
    row: str, call: Callable[..., Any], leaves: Any, dout: Any, around: Callable[[], Any] = nullcontext
) -> list[Timed]:
    """All four columns of a function that autograd knows."""
    plain = [x.detach() for x in leaves]
    with around():
        # The graph of a call as a program makes it again and again: until a backward pass has run, the node of a
        # function with captured arrays goes through checks that later ones do without (ALiBi: 320 us, later 120).
        for _ in range(3):
            torch.autograd.grad(call(*leaves), leaves, dout)
        out = call(*leaves)
    return [
        Timed(row, "forward", lambda: call(*plain), around),
        Timed(row, "with gradient", lambda: call(*leaves), around),
        Timed(row, "backward", lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), around),
        Timed(row, "both", lambda: torch.autograd.grad(call(*leaves), leaves, dout), around),
    ]


def ours() -> list[Timed]:
    leaves = [torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    q, k, v = (x.detach() for x in leaves)
    dout, out, lse = torch.randn_like(q), torch.empty_like(q), torch.empty(1, 8, 64, device="cuda")
    heads_first = [x.detach().transpose(1, 2).requires_grad_() for x in leaves]
    nvrtc_attn.attention_forward(q, k, v, out, lse=lse)
    gradients = [torch.empty_like(q) for _ in range(3)]
    workspace = torch.empty(nvrtc_attn.backward_workspace_bytes(q, k, v), device="cuda", dtype=torch.uint8)
    slopes, documents = torch.rand(SHAPE[2], device="cuda"), torch.zeros(SHAPE[1], device="cuda", dtype=torch.int32)

    def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + slopes[h] * (j - i)

    blocks = na.create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, SHAPE[1], SHAPE[1])
    modified = {"": (None, None), ", ALiBi": (alibi, None), ", documents": (None, blocks)}
    flex = [
        timed
        for name, functions in modified.items()
        for timed in differentiable(
            f"nvrtc_attn.torch.flex_attention{name}",
            lambda *x, _functions=functions: na.flex_attention(*x, *_functions), heads_first, dout.transpose(1, 2),
        )
    ]  # fmt: skip
    none = (None,) * 5
    more = (*(None,) * (len(INPUTS) - 1), 0, 0, "", None, None, None, 0.0, 0.0, None, None, False, None, True, False)
    _, padded, seed, offset, *_ = aten.efficient_attention_forward(q, k, v, *none, 0.0, 0, True)
    return [
        *differentiable("nvrtc_attn.torch.attention", na.attention, leaves, dout),
        *differentiable(
            "nvrtc_attn.torch.scaled_dot_product_attention", na.scaled_dot_product_attention, heads_first,
            dout.transpose(1, 2),
        ),
        *flex,
        Timed("nvrtc_attn.attention, torch tensors", "forward", lambda: nvrtc_attn.attention(q, k, v)),
        Timed("nvrtc_attn.attention, ALiBi", "forward", lambda: nvrtc_attn.attention(q, k, v, score_mod=alibi)),
        Timed(
            "nvrtc_attn.attention_forward and _backward", "forward",
            lambda: nvrtc_attn.attention_forward(q, k, v, out, lse=lse),
        ),
        Timed(
            "nvrtc_attn.attention_forward and _backward", "backward",
            lambda: nvrtc_attn.attention_backward(dout, q, k, v, out, lse, *gradients, workspace=workspace),
        ),
        Timed(
            "operators, in compiled programs", "forward", lambda: ops.attention_forward(q, k, v, *more), torch.no_grad
        ),
        Timed(
            "operators, in compiled programs", "backward",
            lambda: ops.attention_backward(dout, None, out, lse, q, k, v, *more[:-2], False, False), torch.no_grad,
        ),
        Timed("nvrtc_attn.aten", "forward", lambda: aten.efficient_attention_forward(q, k, v, *none, 0.0, 0, True)),
        Timed(
            "nvrtc_attn.aten", "backward",
            lambda: aten.efficient_attention_backward(
                dout, q, k, v, None, out, None, None, 64, 64, padded, 0.0, seed, offset, 0, False
            ),
        ),
    ]  # fmt: skip


def torchs() -> list[Timed]:
    """The seed's operators, and `scaled_dot_product_attention` on each of its backends."""
    leaves = [
        torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)
    ]
    q, k, v = (x.detach() for x in leaves)
    dout = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    forward = torch.ops.aten._scaled_dot_product_efficient_attention
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    out, *state = forward(q, k, v, None, True)
    found = [
        Timed(SEED, "forward", lambda: forward(q, k, v, None, False)),
        Timed(SEED, "backward", lambda: backward(dout, q, k, v, None, out, *state, 0.0, [True, True, True, False])),
    ]
    for name, backend in (
        ("seed", SDPBackend.EFFICIENT_ATTENTION), ("flash2", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):  # fmt: skip
        row, around = f"{name}, scaled_dot_product_attention", partial(sdpa_kernel, [backend])
        try:
            found += differentiable(row, F.scaled_dot_product_attention, leaves, dout, around)
        except RuntimeError as error:
            print(f"{row}: {str(error).splitlines()[0]}")
    return found


def cupys() -> list[Timed]:
    import cupy

    import nvrtc_attn.cupy as adapter

    # CuPy has no bfloat16 of its own.
    q, k, v, dout = (cupy.random.standard_normal(SHAPE, dtype=cupy.float32).astype(cupy.float16) for _ in range(4))
    out, lse = adapter.attention(q, k, v, return_lse=True)
    return [
        Timed("nvrtc_attn.attention, CuPy arrays", "forward", lambda: nvrtc_attn.attention(q, k, v)),
        Timed("nvrtc_attn.cupy", "forward", lambda: adapter.attention(q, k, v)),
        Timed("nvrtc_attn.cupy", "backward", lambda: adapter.attention_backward(dout, q, k, v, out, lse)),
    ]


def jaxs() -> list[Timed]:
    import jax
    import jax.numpy as jnp

    from nvrtc_attn.jax import attention

    if jax.default_backend() != "gpu":
        raise RuntimeError("JAX has no GPU")
    importlib.import_module("jax_tvm_ffi")  # through which the kernels are launched
    q, k, v = (jax.random.normal(key, SHAPE, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))

    def loss(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v).astype(jnp.float32).sum()

    compiled = jax.jit(lambda q, k, v: attention(q, k, v))
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    return [
        Timed("nvrtc_attn.attention, JAX arrays", "forward", lambda: nvrtc_attn.attention(q, k, v)),
        Timed("nvrtc_attn.jax, eager", "forward", lambda: attention(q, k, v)),
        Timed("nvrtc_attn.jax, eager", "both", lambda: jax.grad(loss, (0, 1, 2))(q, k, v)),
        Timed("nvrtc_attn.jax, jit", "forward", lambda: compiled(q, k, v)),
        Timed("nvrtc_attn.jax, jit", "both", lambda: gradient(q, k, v)),
    ]


def models(only: str) -> list[dict[str, Any]]:
    """A row for each problem of `MODELS` and each provider, called through torch's own signature.

    ``/seed`` and ``/best`` are our times over those of the seed and of the fastest other provider.
    """
    found: list[Timed] = []
    gpu: dict[str, float] = {}
    backends = {
        "seed": SDPBackend.EFFICIENT_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }  # fmt: skip
    for name, (shape, dtype, causal) in MODELS.items():
        if not re.search(only, name):
            continue
        leaves = [torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
        dout = torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2)
        calls: dict[str, tuple[Any, Any]] = {"ours": (na.scaled_dot_product_attention, nullcontext)}
        for rival, backend in backends.items():
            calls[rival] = F.scaled_dot_product_attention, partial(sdpa_kernel, [backend])
        for who, (function, around) in calls.items():
            row, call = f"{name}, {who}", partial(function, is_causal=causal)
            try:
                found += differentiable(row, call, leaves, dout, around)
                gpu[row] = backward_on_gpu(call, leaves, dout, around)
            except RuntimeError as error:
                print(f"{row}: {str(error).splitlines()[0]}")
    table = in_turns(found)
    for row in table:
        row["GPU"] = gpu.get(row["what"])
    for row in table:
        name, who = row["what"].rsplit(", ", 1)
        others = [x for x in table if x["what"].rsplit(", ", 1)[0] == name and x is not row]
        if who == "ours":
            for column in ("backward", "both"):
                times = {x["what"].rsplit(", ", 1)[1]: x[column] for x in others}
                if "seed" in times:
                    row[f"{column}/seed"] = row[column] / times["seed"]
                row[f"{column}/best"] = row[column] / min(times.values(), default=float("nan"))
    return table


def backward_on_gpu(call: Callable[..., Any], leaves: Any, dout: Any, around: Callable[[], Any]) -> float:
    """Microseconds that the kernels of the backward pass take, one after another."""
    # New leaves: autograd adds to a leaf on the stream of its first use, for which a captured graph cannot wait.
    leaves = [x.detach().requires_grad_() for x in leaves]
    with around():
        graph = graph_of(
            lambda out: torch.autograd.grad(out, leaves, dout, retain_graph=True), REPLAYED, lambda: call(*leaves)
        )
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / REPLAYS / REPLAYED


def in_turns(functions: list[Timed]) -> list[dict[str, Any]]:
    """The best batch of each function, in a row for each ``row``."""
    best = [float("inf")] * len(functions)
    calls = [CALLS] * len(functions)
    for number in range(BATCHES + 1):
        for index, timed in enumerate(functions):
            with timed.around():
                if not number:  # the first calls compile, later ones say how many a batch has
                    batch(timed.call, 3)
                    calls[index] = max(2, min(CALLS, int(BATCH_US / batch(timed.call, 3))))
                else:
                    best[index] = min(best[index], batch(timed.call, calls[index]))
    table: dict[str, dict[str, Any]] = {}
    for timed, microseconds in zip(functions, best, strict=True):
        table.setdefault(timed.row, {"what": timed.row})[timed.column] = microseconds
    return list(table.values())


def rows() -> list[dict[str, Any]]:
    """A row for each way to call attention. ``/seed`` is its time over that of the seed in the same column."""
    functions = [*ours(), *torchs()]
    for module, make in (("cupy", cupys), ("jax", jaxs)):
        if importlib.util.find_spec(module):
            try:
                functions += make()
            except Exception as error:  # without a GPU of its own, or without the bridge
                print(f"{module}: {str(error).splitlines()[0]}")
    table = {row["what"]: row for row in in_turns(functions)}
    for row in table.values():
        for column in COLUMNS:
            seed = table[SEED].get(column) or table.get(SEED_SDPA, {}).get(column)
            if column in row and seed:
                row[f"{column}/seed"] = row[column] / seed
    return list(table.values())


def batch(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Microseconds of a call, of a batch that does not fill the launch queue."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * seconds / calls


def columns() -> list[str]:
    return ["what", *COLUMNS, *(f"{column}/seed" for column in COLUMNS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="doors,models")
    parser.add_argument("--only", default="", help="regular expression in the name of a model")
    arguments = parser.parse_args()
    parts = arguments.part.split(",")
    if "doors" in parts:
        print_table(rows(), columns())
    if "models" in parts:
        ratios = [f"{column}/{rival}" for column in ("backward", "both") for rival in ("seed", "best")]
        print_table(models(arguments.only), ["what", *COLUMNS, "GPU", *ratios])


if __name__ == "__main__":
    main()
