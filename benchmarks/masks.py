"""Masks with whole tiles of nothing: time beside the kept part, beside every tile computed, beside cuDNN.

    python benchmarks/masks.py [--quick] [--save]

Cases: padding right and left ([B, 1, 1, Mk], 32 sequences of 256 to 1024 of 1024 keys), four documents as diagonal
blocks ([1, 1, Mq, Mk]), and blocks of 128 x 128 of which a part is kept; bfloat16, 16 heads. Our plans run directly,
cuDNN through scaled_dot_product_attention with the same mask. "all" is our kernel without the plan of tiles, "dense"
without a mask, ``kept`` the part of 128 x 128 tiles that keep anything, ``of dense`` our time over that without a mask.
About 50 seconds of an H200 with the kernels in the cache; otherwise they compile first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from measure import in_turn, print_table, save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import nvrtc_attn.torch as na
from nvrtc_attn.front.operands import addresses
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import tile_words
from nvrtc_attn.plans import plan
from nvrtc_attn.plans.plan import backward_plan, forward_plan

HEADS, TILE = 16, 128
COLUMNS = ["case", "D", "pass", "kept", "ms", "all ms", "dense ms", "cudnn ms", "of dense", "x all", "x cudnn"]


def padding(left: bool) -> torch.Tensor:
    lengths = torch.linspace(256, 1024, 32, device="cuda").round().int()
    keys = torch.arange(1024, device="cuda")
    kept = keys >= 1024 - lengths[:, None] if left else keys < lengths[:, None]
    return kept[:, None, None]


def diagonal(length: int, documents: int) -> torch.Tensor:
    of = torch.arange(length, device="cuda") * documents // length
    return (of[:, None] == of)[None, None]


def blocks(length: int, kept: float) -> torch.Tensor:
    tiles = length // TILE
    generator = torch.Generator("cuda").manual_seed(1)
    grid = torch.rand((tiles, tiles), device="cuda", generator=generator) < kept
    grid.fill_diagonal_(True)
    return grid.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[None, None]


def cases(quick: bool) -> Iterator[tuple[str, int, int, int, torch.Tensor]]:
    """Name, batch, length, head dim, mask."""
    for head_dim in (64, 128):
        for left in (False, True):
            yield f"32x1024 padding {'left' if left else 'right'}", 32, 1024, head_dim, padding(left)
    yield "4x4096 four documents", 4, 4096, 128, diagonal(4096, 4)
    for kept in () if quick else (0.1, 0.25, 0.5, 1.0):
        yield f"4x4096 blocks {kept}", 4, 4096, 128, blocks(4096, kept)


def kept_tiles(mask: torch.Tensor, length: int) -> float:
    full = mask.expand(*mask.shape[:2], length, length)
    tiles = full.unflatten(2, (-1, TILE)).unflatten(4, (-1, TILE)).any(5).any(3)
    return float(tiles.float().mean())


@contextmanager
def without_plan() -> Iterator[None]:
    """Calls inside look up and make plans that compute every tile."""
    saved, plans = tile_words.MIN_FLOPS, dict(plan._plans)
    keys = tile_words.MIN_KEY_BYTES
    tile_words.MIN_FLOPS, tile_words.MIN_KEY_BYTES = float("inf"), 1 << 62  # type: ignore[misc]
    plan._plans.clear()
    try:
        yield
    finally:
        tile_words.MIN_FLOPS, tile_words.MIN_KEY_BYTES = saved, keys  # type: ignore[misc]
        plan._plans.clear()
        plan._plans.update(plans)


Pass = Callable[[], Any]


def bound(q: Any, k: Any, v: Any, dout: Any, mask: Any) -> tuple[Pass, Pass]:
    """Our passes with every plan bound now, whatever the threshold is later."""
    problem = _problem(q, mask)
    stream = torch.cuda.current_stream().cuda_stream
    forward, backward = forward_plan(problem, 0, stream), backward_plan(problem, 0, stream)
    out, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
    lse = torch.empty(q.shape[0], HEADS, q.shape[1], device="cuda")
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    if mask is not None:
        tensors["mask"] = mask
    pointers = {name: x.data_ptr() for name, x in tensors.items()}
    workspace = torch.empty(max(forward.workspace_bytes, backward.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
    of = [(p, addresses(p.OPERANDS, pointers)) for p in (forward, backward)]

    def run(index: int) -> Pass:
        made, numbers = of[index]
        return lambda: (made.run(stream, numbers, workspace.data_ptr()), tensors)[0]

    run(0)()
    return run(0), run(1)


def _problem(q: Any, mask: Any) -> Any:
    batch, length, heads, head_dim = q.shape
    rows = dense_layout((batch, length, heads, head_dim), "bfloat16")
    return AttentionProblem(
        dtype="bfloat16", batch=batch, seqlen_q=length, seqlen_k=length, num_heads=heads, num_heads_kv=heads,
        head_dim=head_dim, head_dim_v=head_dim, softmax_scale=head_dim**-0.5,
        mask=None if mask is None else dense_layout(tuple(mask.shape), "bool"),
        lse=dense_layout((batch, heads, length), "float32"),
        **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), rows),
    )  # fmt: skip


def cudnn(q: Any, k: Any, v: Any, dout: Any, mask: Any) -> tuple[Pass, Pass] | None:
    """The same through cuDNN; none where it refuses."""
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    gradient = dout.transpose(1, 2)

    def forward() -> Any:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return scaled_dot_product_attention(*leaves, attn_mask=mask)

    try:
        out = forward()
        torch.autograd.grad(out, leaves, gradient, retain_graph=True)
    except RuntimeError as error:
        print(f"cuDNN: {str(error).splitlines()[0]}")
        return None
    return forward, lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)


def agree(q: Any, k: Any, v: Any, mask: Any, peer: Pass | None) -> None:
    """A benchmark of a wrong result is none."""
    if peer is not None:
        ours, theirs = na.attention(q, k, v, mask=mask), peer().transpose(1, 2)
        assert torch.allclose(ours.float(), theirs.float(), atol=3e-2), (ours - theirs).abs().max()


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    for name, batch, length, head_dim, mask in cases(quick):
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (batch, length, HEADS, head_dim)
        q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4))
        ours = bound(q, k, v, dout, mask)
        dense = bound(q, k, v, dout, None)
        with without_plan():
            every = bound(q, k, v, dout, mask)
        peer = cudnn(q, k, v, dout, mask)
        agree(q, k, v, mask, peer and peer[0])
        for index, which in enumerate(("forward", "backward")):
            functions = {"ours": ours[index], "all": every[index], "dense": dense[index]}
            if peer is not None:
                functions["cudnn"] = peer[index]
            ms = {key: x["ms"] for key, x in in_turn(functions, rep_ms=40).items()}
            yield {
                "case": name, "D": head_dim, "pass": which, "kept": kept_tiles(mask, length), "ms": ms["ours"],
                "all ms": ms["all"], "dense ms": ms["dense"], "cudnn ms": ms.get("cudnn"),
                "of dense": ms["ours"] / ms["dense"], "x all": ms["all"] / ms["ours"],
                "x cudnn": ms["cudnn"] / ms["ours"] if "cudnn" in ms else None,
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the blocks")
    parser.add_argument("--save", action="store_true", help="also write results/masks.json")
    arguments = parser.parse_args()
    found = list(rows(arguments.quick))
    print_table(found, COLUMNS)
    if arguments.save:
        print(save("masks", found))


if __name__ == "__main__":
    main()
