"""One rank of a ContextParallel of several processes: `python parallel_ranks.py RANK SIZE FILE DEVICE PROGRAM`.

Prints a line of JSON: what was wrong on this rank. Gloo on the CPU, NCCL on GPUs.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import faulthandler
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import parallel_problems
import torch
import torch.distributed as dist
from child_environment import leave_ranks
from parallel_problems import Shared, take
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import nvrtc_attn
import nvrtc_attn.torch
from nvrtc_attn.base.errors import UnsupportedError
from nvrtc_attn.base.log import LOGGER
from nvrtc_attn.front.call import CallOptions
from nvrtc_attn.torch.parallel import ContextParallel, context, operators, strategies
from nvrtc_attn.torch.parallel.choice import margin_of

SECONDS = int(os.environ.get("NVRTC_ATTN_TEST_RANK_SECONDS", "120"))
"""After which a rank that waits for others gives up."""
Found = list[str]


def run(shared: Shared, cp: ContextParallel, device: Any, **more: Any) -> Found:
    """One problem forward and backward; every rank collects the whole and compares it."""
    case = shared.case
    given = parallel_problems.whole_tensors(case, device)
    of_q, of_k = cp.chunks_q[cp.rank], cp.chunks_k[cp.rank]
    q, k, v = (
        take(given[name], chunks, 1).detach().requires_grad_()
        for name, chunks in (("q", of_q), ("k", of_k), ("v", of_k))
    )
    keywords = parallel_problems.options(case)
    bias = None
    for name in ("bias", "mask"):
        if name in given:
            x = given[name]
            keywords[name] = x if x.shape[2] == 1 else take(x, of_q, 2)
    if "bias" in keywords:
        bias = keywords["bias"] = keywords["bias"].detach().clone().requires_grad_()
    sink = given["sink"].detach().clone().requires_grad_() if "sink" in given else None
    if "seqused_k" in given:
        keywords["seqused_k"] = given["seqused_k"]
    out, lse = cp.attention(q, k, v, return_lse=True, sink=sink, **keywords, **more)
    gradients = [take(given["dout"], of_q, 1)]
    if "dlse" in given:
        gradients.append(take(given["dlse"], of_q, 2))
    torch.autograd.backward([out, lse][: len(gradients)], gradients)
    found = {
        "out": cp.unshard(out.detach(), 1), "lse": cp.unshard(lse.detach(), 2), "dq": cp.unshard(q.grad, 1),
        "dk": cp.unshard(k.grad, 1, keys=True), "dv": cp.unshard(v.grad, 1, keys=True),
    }  # fmt: skip
    if bias is not None:
        if given["bias"].shape[2] == 1:
            share = bias.grad.float()
            dist.all_reduce(share)
            found["dbias"] = share
        else:
            found["dbias"] = cp.unshard(bias.grad, 2)
    if sink is not None:
        found["dsink"] = sink.grad.float()
        dist.all_reduce(found["dsink"])
    return [f"{cp.strategy}, {shared}: {fault}" for fault in parallel_problems.faults(case, found)]


def problems(rank: int, size: int, device: Any) -> Found:
    """Random problems with every strategy."""
    found: Found = []
    count = 3  # kernels of a problem take seconds to compile
    for strategy in ("all_gather", "ring", "auto", "ulysses"):
        for shared in parallel_problems.problems(
            21, count, size, heads_divide=strategy == "ulysses", passes_keys=strategy == "ring"
        ):
            case = shared.case
            cp = ContextParallel(
                seqlen=case.seqlen_q, seqlen_k=case.seqlen_k, strategy=strategy, layout=shared.layout, pipeline=2
            )
            found += run(shared, cp, device)
    if size == 4:
        mesh = init_device_mesh(device, (2, 2))
        for pair in (("ulysses", "ring"), ("ulysses", "all_gather")):
            for shared in parallel_problems.problems(22, count, 4, heads_divide=True, passes_keys="ring" in pair):
                case = shared.case
                cp = ContextParallel(
                    mesh, seqlen=case.seqlen_q, seqlen_k=case.seqlen_k, strategy=pair, layout=shared.layout, pipeline=2
                )
                found += run(shared, cp, device)
    return found


def modified(rank: int, size: int, device: Any) -> Found:
    """score_mod and mask_mod over torch tensors with gradients: every rank's share of those adds up to the whole's."""
    found: Found = []
    for strategy in ("all_gather", "ring", "ulysses"):
        # Kernels of a modifier take seconds to compile.
        for given in parallel_problems.modified_problems(23, 5 if device == "cpu" else 3, size):
            (q, k, v, dout), arrays = given.tensors(device)
            for x in arrays.values():
                x.requires_grad_(x.is_floating_point())
            score_mod, mask_mod = given.case.make(arrays)
            captures = nvrtc_attn.trace(score_mod, mask_mod).captures
            cp = ContextParallel(
                seqlen=given.sizes[2], seqlen_k=given.sizes[3], strategy=strategy, layout=given.layout, pipeline=2
            )
            mine = [cp.shard(q), cp.shard(k, keys=True), cp.shard(v, keys=True)]
            mine = [x.detach().requires_grad_() for x in mine]
            rng = (3, 4) if given.options["dropout_p"] else None
            out, lse = cp.attention(
                *mine, **given.options, rng=rng, score_mod=score_mod, mask_mod=mask_mod, return_lse=True
            )
            out.backward(cp.shard(dout))
            results: dict[str, Any] = {"out": cp.unshard(out.detach()), "lse": cp.unshard(lse.detach(), 2)}
            for name, x in zip(("dq", "dk", "dv"), mine, strict=True):
                results[name] = cp.unshard(x.grad, keys=name != "dq")
            shares = [x.grad for x in captures]
            for share in shares:
                if share is not None:
                    dist.all_reduce(share)
            results = {name: x.cpu().numpy() for name, x in results.items()}
            results["daux"] = [None if x is None else x.cpu().numpy() for x in shares]
            expected = parallel_problems.of_one_call(given)
            found += [f"{strategy}, {given}: {fault}" for fault in parallel_problems.differ(results, expected)]
    return found


def dropout(rank: int, size: int, device: Any) -> Found:
    """The mask is `dropout_keep_mask` of the whole, of a seed that the first rank draws where none is given."""
    found: Found = []
    seqlen, heads, p = 32, 4, 0.5
    v = torch.eye(seqlen, device=device)[None, :, None].expand(1, seqlen, heads, seqlen)
    for strategy in ("all_gather", "ring", "ulysses"):
        cp = ContextParallel(seqlen=seqlen, strategy=strategy)
        q = torch.zeros(1, cp.local_seqlen, heads, 8, device=device)
        mine = cp.shard(v, 1).contiguous()
        out = cp.unshard(cp.attention(q, q, mine, dropout_p=p, rng=(5, 77)), 1)
        keep = nvrtc_attn.dropout_keep_mask((1, heads, seqlen, seqlen), p, (5, 77))
        if not np.array_equal(out.transpose(1, 2).float().cpu().numpy() != 0, keep):
            found.append(f"{strategy}: the mask is not the whole's")
        torch.manual_seed(rank)  # ranks disagree, and the first one is asked
        first = cp.unshard(cp.attention(q, q, mine, dropout_p=p), 1)
        torch.manual_seed(0)
        seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device=device))
        keep = nvrtc_attn.dropout_keep_mask((1, heads, seqlen, seqlen), p, seed)
        if not np.array_equal(first.transpose(1, 2).cpu().numpy() != 0, keep):
            found.append(f"{strategy}: the mask is not that of the first rank's seed")
    return found


COMPUTING = (strategies.all_gather, strategies.ring)
"""The modules that compute parts."""


@contextlib.contextmanager
def wrapped(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Every part of a rank is computed by what ``wrap`` makes of the function that does."""
    with contextlib.ExitStack() as stack:
        for module in COMPUTING:
            for name in ("forward_here", "backward_here"):
                stack.enter_context(patch.object(module, name, wrap(getattr(module, name))))
        yield


def refused(what: str, words: str, call: Callable[[], Any], kind: type[Exception] = ValueError) -> Found:
    try:
        call()
    except kind as error:
        return [] if words in str(error) else [f"{what}: {error}"]
    return [f"{what}: nothing was raised"]


def faults(rank: int, size: int, device: Any) -> Found:
    """What differs between ranks is one ValueError on all of them; wrong shapes are found before anything is sent."""
    found = refused("seqlen", "seqlen differs", lambda: ContextParallel(seqlen=32 + rank))
    layouts = ("zigzag", "contiguous", "zigzag", "zigzag")
    found += refused("layout", "layout differs", lambda: ContextParallel(seqlen=32, layout=layouts[rank]))
    wrong = [[(0, 32)]] if rank else "zigzag"
    found += refused("bad layout", "1 ranks", lambda: ContextParallel(seqlen=32, layout=wrong))
    names = ("ring", "all_gather", "ring", "ring")
    found += refused("strategy", "strategy differs", lambda: ContextParallel(seqlen=32, strategy=names[rank]))
    checks = ("never", "first", "first", "first")
    found += refused("check", "check differs", lambda: ContextParallel(seqlen=32, check=checks[rank]))
    with patch.dict(os.environ, {"NVRTC_ATTN_DEBUG": str(int(rank > 0))}):
        found += refused("debug", "NVRTC_ATTN_DEBUG differs", lambda: ContextParallel(seqlen=32))
    version = context.__version__
    with patch.object(context, "__version__", "0.0.9" if rank == 1 else version):
        others = [r for r in range(size) if r != 1]
        words = f"version differs between ranks: {version} on rank{'s' * (size > 2)} {others}; 0.0.9 on rank [1]"
        found += refused("version", words, lambda: ContextParallel(seqlen=32))
    cp = ContextParallel(seqlen=32)
    x = torch.zeros(1, cp.local_seqlen, 2, 8, dtype=torch.float16 if rank else torch.float32, device=device)
    found += refused("dtype", "dtype differs", lambda: cp.attention(x, x, x))
    cp = ContextParallel(seqlen=32, check="always")
    x = torch.zeros(1, cp.local_seqlen, 2, 8, device=device)
    cp.attention(x, x, x)
    found += refused("options", "options differs", lambda: cp.attention(x, x, x, causal=rank == 0))
    found += refused("lse", "return_lse differs", lambda: cp.attention(x, x, x, return_lse=rank == 0))
    kinds: tuple[Callable[[int], Any], ...] = (
        int, np.int64, torch.tensor, lambda n: (3, torch.tensor(n)), lambda n: 3 if n else None,
    )  # fmt: skip
    for make in kinds:
        found += refused("rng", "rng differs", lambda m=make: cp.attention(x, x, x, dropout_p=0.5, rng=m(rank)))
    same = (5, (5, 0), [5, 0], torch.tensor(5))
    cp.attention(x, x, x, dropout_p=0.5, rng=same[rank])  # one seed, said in several ways
    calls = (lambda: ContextParallel(seqlen=32), lambda: cp.attention(x, x, x))
    found += refused("calls", "ranks are in different calls", calls[rank > 0])
    calls = (lambda: cp.unshard(x), lambda: cp.attention(x, x, x))
    found += refused("unshard beside attention", "ranks are in different calls", calls[rank > 0])
    kind = torch.float16 if rank else torch.float32
    found += refused("unshard dtype", "dtype differs", lambda: cp.unshard(x.to(kind)))
    found += refused("unshard shape", "shape beside", lambda: cp.unshard(x.expand(1 + rank, -1, -1, -1)))
    found += refused("plan_as", "plan_as differs", lambda: ContextParallel(seqlen=32, plan_as=rank > 0))
    with patch.dict(os.environ, {"NVRTC_ATTN_DEBUG": "1"}):
        debugged = ContextParallel(seqlen=32)
    debugged.attention(x, x, x)
    found += refused("debugged", "options differs", lambda: debugged.attention(x, x, x, causal=rank == 0))
    if rank == 0:  # on one rank alone: the others are not asked
        found += refused("shape", "Nothing was sent", lambda: cp.attention(x[:, 1:], x, x))
        found += refused("bias", "Nothing was sent", lambda: cp.attention(x, x, x, bias=torch.zeros(1, 2, 32, 32)))
        found += refused("unshard", "dim 1 must be", lambda: cp.unshard(x[:, 1:]))
        found += alone(cp, x)
    cp.attention(x, x, x)  # and the group is usable
    slope = 0.5 + rank
    found += refused(
        "score_mod", "score_mod, mask_mod differs",
        lambda: cp.attention(x, x, x, score_mod=lambda s, b, h, q, k: s + slope * (q - k)),
    )  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        table = torch.zeros(2, dtype=dtype, device=device)
        table[1] = rank > 0
        found += refused(
            f"contents in {dtype}", "contents of captured arrays differs",
            lambda t=table: cp.attention(x, x, x, score_mod=lambda s, b, h, q, k: s + t[h]),
        )  # fmt: skip
    return found


def alone(cp: ContextParallel, x: torch.Tensor) -> Found:
    """What one rank knows to be wrong is refused there, before the others are asked."""
    found: Found = []
    sink = torch.zeros(2, device="meta")
    found += refused("sink elsewhere", "sink: on meta", lambda: cp.attention(x, x, x, sink=sink))
    for options in ({"sm_margin": 4}, {"plan_as": True}):
        part = nvrtc_attn.Part(heads=(0, 4), **options)
        found += refused("part", "those of the ContextParallel", lambda part=part: cp.attention(x, x, x, part=part))
    of_heads = ContextParallel.__new__(ContextParallel)
    of_heads.__dict__.update(cp.__dict__, strategy="ulysses", _strategies={}, _checked={})
    y = x.repeat(1, 1, 2, 1)
    for starts, words in (([0, 40, 32], "decreases"), ([0, 9, 33], "tokens"), ([0, 1, 32], "max_seqlen_q: got 30")):
        cu = torch.tensor(starts, dtype=torch.int32)
        keywords = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 30, "max_seqlen_k": 30}
        found += refused(f"{starts}", words, lambda more=keywords: of_heads.attention(y, y, y, **more))
    none = torch.zeros(1, cp.local_seqlen, 0, 8, device=x.device)
    found += refused("no heads", "no key heads", lambda: of_heads.attention(none, none, none))
    for what, words, call in (
        ("sparse", "q: this torch tensor has no memory", lambda: cp.attention(x.to_sparse(), x, x)),
        ("NumPy", "k: got", lambda: cp.attention(x, x.cpu().numpy(), x)),
        ("None", "v: got None", lambda: cp.attention(x, x, None)),
        ("a list", "seqused_k: got [3]", lambda: cp.attention(x, x, x, seqused_k=[3])),
        ("unshard", "x: got", lambda: cp.unshard(x.cpu().numpy())),
        ("shard", "x: got", lambda: cp.shard([1, 2])),
        ("no length", "seqlen: got None", lambda: ContextParallel(seqlen=None)),
        ("group", "group: got 'cp'", lambda: ContextParallel("cp", seqlen=32)),
    ):
        found += refused(what, words, call, TypeError)
    outside = dist.GroupMember.NON_GROUP_MEMBER
    found += refused("group of others", "rank 0 is none", lambda: ContextParallel(outside, seqlen=32))
    vmapped = torch.vmap(lambda y: cp.attention(y, y, y))
    found += refused("vmap", "torch.func", lambda: vmapped(x[None]), UnsupportedError)
    of_sum = torch.func.grad(lambda y: cp.attention(y, y, y).sum())
    found += refused("grad", "torch.func", lambda: of_sum(x), UnsupportedError)
    return found


def tensors(rank: int, size: int, device: Any) -> Found:
    """Shards put together are the whole, gradients too; sequences that do not divide, or are shorter than the ranks."""
    found: Found = []
    for seqlen in (37, 3, 0):
        for layout in ("zigzag", "contiguous"):
            cp = ContextParallel(seqlen=seqlen, layout=layout)
            whole = torch.arange(2 * seqlen * 3, dtype=torch.float32, device=device).view(2, seqlen, 3).requires_grad_()
            mine = cp.shard(whole, 1)
            again = cp.unshard(mine, 1)
            if not torch.equal(again, whole) or not torch.equal(mine, whole[:, cp.positions(device)]):
                found.append(f"{layout} {seqlen}: not the whole again")
            again.backward(torch.ones_like(again))
            expected = torch.zeros_like(whole)
            expected[:, cp.positions(device)] = size
            if not torch.equal(whole.grad, expected):
                found.append(f"{layout} {seqlen}: gradient")
            q = torch.ones(1, cp.local_seqlen, 2, 8, device=device, requires_grad=True)
            cp.attention(q, q, q, causal=True).sum().backward()
            if not torch.isfinite(q.grad).all():
                found.append(f"{layout} {seqlen}: attention")
    # Copies of a model share its group.
    cp = ContextParallel(seqlen=8)
    if copy.deepcopy([cp])[0] is not cp:
        found.append("a copy is another one")
    # What is chosen where nothing is said: lanes of long sequences, a margin beside one group of all_gather.
    for seqlen, strategy, expected in (
        (32768 * size, "all_gather", (2, 8)), (1024, "all_gather", (1, 8)), (1024, "ulysses", (1, 0)),
    ):  # fmt: skip
        cp = ContextParallel(seqlen=seqlen, strategy=strategy)
        chosen = cp._strategy(8, 8, False, False)
        if (getattr(chosen, "lanes", 1), margin_of(cp, chosen)) != expected:
            found.append(f"{strategy} at {seqlen}: {getattr(chosen, 'lanes', 1)} lanes, margin {margin_of(cp, chosen)}")
    # Every call of a rank is planned as the whole where that is asked for.
    for plan_as in (False, True):
        parts: list[Any] = []

        def noted(compute: Any, parts: Any = parts) -> Any:
            def computed(*arguments: Any, **more: Any) -> Any:
                parts.extend(x.part for x in arguments if isinstance(x, CallOptions))
                return compute(*arguments, **more)

            return computed

        cp = ContextParallel(seqlen=32, strategy="all_gather", plan_as=plan_as)
        x = torch.ones(1, cp.local_seqlen, 2, 8, device=device, requires_grad=True)
        with wrapped(noted):
            cp.attention(x, x, x, causal=True).sum().backward()
        if len(parts) < 2 or any(part.plan_as != plan_as for part in parts):
            found.append(f"plan_as {plan_as}: {parts}")
    # Groups of heads that are asked for: of pairs, too.
    pairs = (("ulysses", "ring"), ("ulysses", "all_gather")) if size == 4 else ()
    for strategy in ("ulysses", "all_gather", *pairs):
        mesh = init_device_mesh(device, (2, 2)) if strategy in pairs else None
        chosen = ContextParallel(mesh, seqlen=64, strategy=strategy, pipeline=2)._strategy(8, 8, False, False)
        groups = [x.pipeline for x in (chosen, getattr(chosen, "inside", None)) if hasattr(x, "pipeline")]
        if max(groups) != 2 or groups.count(2) != 1:
            found.append(f"{strategy}: groups {groups}, and 2 were asked for")
    return found


def packed(rank: int, size: int, device: Any) -> Found:
    """Packed sequences by ulysses, with dropout: out and gradients of one process's call."""
    found: Found = []
    lengths = (9, 0, 17, 14)
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    keywords: dict[str, Any] = {
        "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 17, "max_seqlen_k": 17, "causal": True,
        "dropout_p": 0.25, "rng": (3, 5), "window_size": (6, None),
    }  # fmt: skip
    generator = torch.Generator(device).manual_seed(0)
    whole = [torch.randn(1, 43, heads, 16, device=device, generator=generator) for heads in (8, 4, 4, 8)]
    whole[:3] = [x.requires_grad_() for x in whole[:3]]
    expected = nvrtc_attn.torch.attention(*whole[:3], **keywords)
    gradients = torch.autograd.grad(expected, whole[:3], whole[3])
    for layout in ("zigzag", "contiguous"):
        cp = ContextParallel(seqlen=43, layout=layout)
        mine = [cp.shard(x.detach(), 1).requires_grad_() for x in whole[:3]]
        out = cp.attention(*mine, **keywords)
        parts = torch.autograd.grad(out, mine, cp.shard(whole[3], 1))
        for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *parts), (expected, *gradients), strict=True):
            error = float((cp.unshard(x.detach(), 1) - y.detach()).abs().max())
            if not error < 1e-5:
                found.append(f"{layout}: {name} {error:.3g}")
    with_gaps = torch.stack([cu, cu], 1)[:, 0]  # lengths that are a column of a table
    for strategy in ("ulysses", "all_gather"):
        cp = ContextParallel(seqlen=43, strategy=strategy)
        mine = [cp.shard(x.detach(), 1) for x in whole[:3]]
        out = cp.attention(*mine, **{**keywords, "cu_seqlens_q": with_gaps, "cu_seqlens_k": with_gaps})
        if not torch.allclose(cp.unshard(out), expected.detach(), rtol=1e-4, atol=1e-5):
            found.append(f"{strategy}: lengths that are not contiguous")
    # Lengths of some of the documents are made on the CPU, whatever torch's default device is.
    few = [0, 2, 4, 5, 22, 43]
    more = {"cu_seqlens_q": few, "cu_seqlens_k": few, "max_seqlen_q": 21, "max_seqlen_k": 21, "causal": True}
    for strategy in ("all_gather", "ring", "ulysses"):
        cp = ContextParallel(seqlen=43, strategy=strategy, layout="contiguous")
        mine = [cp.shard(x.detach(), 1) for x in whole[:3]]

        def attend(*given: Any, cp: Any = cp) -> Any:
            return cp.attention(*given, **more)

        before = attend(*mine)
        for function in (attend, _fullgraph("aot_eager")(attend)):
            with torch.device("meta"):
                out = function(*mine)
            if not torch.allclose(out, before, rtol=1e-5, atol=1e-5):
                found.append(f"{strategy}: another default device")
    cp = ContextParallel(seqlen=43, strategy="ulysses", check="always")
    mine = [cp.shard(x.detach(), 1).requires_grad_() for x in whole[:3]]
    used = torch.tensor([9, 0, 17, 5 + 9 * (rank > 0)], dtype=torch.int32, device=device)
    found += refused("seqused_k", "seqused_k differs", lambda: cp.attention(*mine, **keywords, seqused_k=used))
    other = {**keywords, "cu_seqlens_k": cu + torch.tensor([0, 0, int(rank > 0), 0, 0], device=device).int()}
    found += refused("lengths", "cu_seqlens_k differs", lambda: cp.attention(*mine, **other))
    out = cp.attention(*mine, **keywords)
    cu[3] -= 1
    found += refused("a write", "inplace operation", lambda: out.sum().backward(), RuntimeError)
    return found


def used(rank: int, size: int, device: Any) -> Found:
    """seqused_k of a dense batch: one process's call, plain and compiled, and what a ring refuses on every rank."""
    found: Found = []
    tokens, keys = 37, 45
    lengths = torch.tensor([keys, 0, 20], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(3, n, heads, 8, generator=generator).to(device)
        for n, heads in ((tokens, 4), (keys, 2), (keys, 2), (tokens, 4))
    ]
    whole[:3] = [x.requires_grad_() for x in whole[:3]]
    plain: tuple[dict[str, Any], ...] = (
        {}, {"causal": "top_left", "dropout_p": 0.25, "rng": (3, 5)}, {"causal": "top_left", "window_size": (6, 2)},
        {"mask_mod": lambda b, h, q, k: q >= k},
    )  # fmt: skip
    ends: tuple[dict[str, Any], ...] = (
        {"causal": True}, {"window_size": (5, 3), "softcap": 4.0}, {"causal": True, "dropout_p": 0.25, "rng": (3, 5)},
        {"causal": True, "mask_mod": lambda b, h, q, k: (q + k) % 3 != 1},
    )  # fmt: skip
    bound = 1e-5 if device == "cpu" else 1e-4
    for strategy in ("all_gather", "ring", "ulysses"):
        for layout in ("zigzag", "contiguous"):
            cp = ContextParallel(seqlen=tokens, seqlen_k=keys, strategy=strategy, layout=layout, check="always")
            parts = [cp.shard(x.detach(), keys=n in (1, 2)) for n, x in enumerate(whole)]
            for options in (*plain, *ends):

                def attend(*given: Any, cp: Any = cp, options: Any = options, of: Any = lengths) -> Any:
                    return cp.attention(*given, seqused_k=of, return_lse=True, **options)

                # Tracing takes longer than all else: with one layout and two of the options.
                traced = layout == "zigzag" and options in (plain[1], ends[2])
                if strategy == "ring" and options in ends:
                    for function in (attend, _fullgraph("aot_eager")(attend))[: 1 + traced]:
                        found += refused(f"{options}", "mask=", lambda f=function, p=parts: f(*p[:3]), UnsupportedError)
                    continue
                expected = nvrtc_attn.torch.attention(*whole[:3], seqused_k=lengths, return_lse=True, **options)
                wanted = [*expected, *torch.autograd.grad(expected[0], whole[:3], whole[3])]
                for kind in ("eager", "compiled")[: 1 + traced]:
                    mine = [x.clone().requires_grad_() for x in parts[:3]]
                    function = attend if kind == "eager" else _fullgraph("aot_eager")(attend)
                    out, lse = function(*mine)
                    results = [out, lse, *torch.autograd.grad(out, mine, parts[3])]
                    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), results, wanted, strict=True):
                        x = cp.unshard(x.detach(), 2 if name == "lse" else 1, keys=name in ("dk", "dv"))
                        if not torch.allclose(x, y.detach(), rtol=bound, atol=bound):
                            found.append(f"{strategy} {layout} {kind} {options}: {name}")
            if device == "cpu":  # values that the host sees
                more = lengths + torch.tensor([1, 0, 0], dtype=torch.int32)
                found += refused("too many", "element 0 is 46", lambda f=attend, p=parts, n=more: f(*p[:3], of=n))
            other = lengths + torch.tensor([0, int(rank > 0), 0], dtype=torch.int32, device=device)
            call = partial(cp.attention, *parts[:3], seqused_k=other)
            found += refused("other lengths", "seqused_k differs", call)
    return found


def rows(rank: int, size: int, device: Any) -> Found:
    """Bias and mask where ranks have one row, several or none, compared between the ranks: those of one process."""
    found: Found = []
    generator = torch.Generator(device).manual_seed(0)
    for strategy, seqlen in ((x, y) for x in ("all_gather", "ring", "ulysses", "auto") for y in (1, size, size + 1)):
        q, k, v = (torch.randn(1, seqlen, 4, 8, device=device, generator=generator) for _ in range(3))
        mask = torch.eye(seqlen, dtype=torch.bool, device=device)[None, None].roll(1, 2)
        for one_row, keywords in ((False, {}), (True, {}), (False, {"mask": mask})):
            bias = torch.randn(1, 4, 1 if one_row else seqlen, seqlen, device=device, generator=generator)
            bias.requires_grad_()
            expected = nvrtc_attn.torch.attention(q, k, v, bias=bias, **keywords)
            (gradient,) = torch.autograd.grad(expected.square().sum(), bias)
            cp = ContextParallel(seqlen=seqlen, strategy=strategy, layout="contiguous", check="always")
            mine = (bias if one_row else cp.shard(bias, 2)).detach().requires_grad_()
            own = {name: cp.shard(x, 2) for name, x in keywords.items()}
            out = cp.attention(*map(cp.shard, (q, k, v)), bias=mine, **own)
            (share,) = torch.autograd.grad(out.square().sum(), mine)
            if one_row:
                dist.all_reduce(share)
            else:
                share = cp.unshard(share, 2)
            for name, x, y in (("out", cp.unshard(out), expected), ("dbias", share, gradient)):
                error = float((x - y).abs().max())
                if not error < 1e-4:
                    found.append(f"{strategy} {seqlen} {one_row} {list(keywords)}: {name} {error:.3g}")
    return found


def used_by_some(rank: int, size: int, device: Any) -> Found:
    """Ranks whose loss has the lse, the out, both or neither of a call send the same messages, in programs too."""
    found: Found = []
    pairs = [("ulysses", "ring")] if size == 4 else []
    generator = torch.Generator(device).manual_seed(1)
    q, k, v = (torch.randn(1, 24, 4, 8, device=device, generator=generator) for _ in range(3))
    weights = torch.randn(1, 24, 4, 8, device=device, generator=generator)
    of_out, of_lse = ((1.0, 0.0, 0.0, 1.0)[:size], (0.0, 1.0, 0.0, 1.0)[:size])

    def loss(out: Any, lse: Any, weight: Any, uses_out: float, uses_lse: float) -> Any:
        total = 0.0 * out[:, :1].sum() if uses_out or not uses_lse else 0.0
        if uses_out:
            total = total + (out * weight).sum()
        return total + lse.square().sum() if uses_lse else total

    for strategy in ("all_gather", "ring", "ulysses", *pairs):
        mesh = init_device_mesh(torch.device(device).type, (2, 2)) if isinstance(strategy, tuple) else None
        for compiled in (False, True):
            cp = ContextParallel(mesh, seqlen=24, strategy=strategy, layout="contiguous", check="always")
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out, lse = nvrtc_attn.torch.attention(*leaves, causal=True, return_lse=True)
            shares = zip(out.chunk(size, 1), lse.chunk(size, 2), weights.chunk(size, 1), of_out, of_lse, strict=True)
            expected = torch.autograd.grad(sum(loss(*share) for share in shares), leaves)
            mine = [cp.shard(x).detach().requires_grad_() for x in (q, k, v)]

            def call(*tensors: Any, cp: ContextParallel = cp) -> Any:
                return cp.attention(*tensors, causal=True, return_lse=True)

            if compiled:
                call = torch.compile(call, backend="aot_eager", fullgraph=True)
            out, lse = call(*mine)
            loss(out, lse, cp.shard(weights), of_out[rank], of_lse[rank]).backward()
            for name, x, y in zip("qkv", mine, expected, strict=True):
                error = float((cp.unshard(x.grad) - y).abs().max())
                if not error < 1e-4:
                    found.append(f"{strategy}, compiled {compiled}: d{name} {error:.3g}")
    return found


def negated(rank: int, size: int, device: Any) -> Found:
    """What is computed on has no lazy sign, whose memory is that of the opposite number."""
    found: Found = []
    lazy: list[Any] = []

    def looks(compute: Any) -> Any:
        def computed(*arguments: Any, **options: Any) -> Any:
            lazy.extend(x for x in arguments if isinstance(x, torch.Tensor) and x.is_neg())
            return compute(*arguments, **options)

        return computed

    generator = torch.Generator(device).manual_seed(0)
    whole = [torch.randn(1, 8, 4, 8, device=device, generator=generator) for _ in range(4)]
    with wrapped(looks):
        for strategy in ("all_gather", "ring", "ulysses"):
            cp = ContextParallel(seqlen=8, strategy=strategy)
            results = []
            for sign in (torch.neg, torch._neg_view):
                q, k, v = (cp.shard(x).requires_grad_() for x in whole[:3])
                bias = torch.ones(1, 4, 1, 8, device=device)
                out, lse = cp.attention(sign(q), sign(k), sign(v), bias=sign(bias), return_lse=True)
                both = (sign(cp.shard(whole[3])), sign(torch.ones_like(lse)))
                results.append([out, lse, *torch.autograd.grad((out, lse), (q, k, v), both)])
            for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
                if not torch.allclose(x, y, atol=1e-5 if device == "cpu" else 1e-4):  # GPUs add up dq in any order
                    found.append(f"{strategy}: {name} {float((x - y).abs().max()):.3g}")
    if lazy:
        found.append(f"{len(lazy)} tensors with a lazy sign were computed on")
    return found


def documents(rank: int, size: int, device: Any) -> Found:
    """Packed sequences whose tokens ranks share: every layout, lengths from anywhere, and what is refused."""
    found: Found = []
    on_gpu = device == "cuda"
    lengths = [300, 0, 1, 700, 40, 129, 5] if on_gpu else [9, 0, 1, 17, 14]
    starts = [0, *np.cumsum(lengths).tolist()]
    tokens, longest = starts[-1] + 3, max(lengths)
    kind, bound = (torch.bfloat16, 2e-2) if on_gpu else (torch.float32, 1e-5)
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    both: dict[str, Any] = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    generator = torch.Generator(device).manual_seed(0)
    whole = [
        torch.randn(1, tokens, heads, 64, device=device, dtype=kind, generator=generator) for heads in (6, 3, 3, 6)
    ]
    whole[:3] = [x.requires_grad_() for x in whole[:3]]
    given = (starts, np.asarray(starts), torch.tensor(starts, dtype=torch.int32), cu)
    for options in (
        {"causal": True, "dropout_p": 0.25, "rng": (3, 5), "window_size": (6, None)}, {"causal": True}, {},
        {"window_size": (5, 3), "softcap": 4.0},
    ):  # fmt: skip
        expected = nvrtc_attn.torch.attention(*whole[:3], cu_seqlens_q=cu, cu_seqlens_k=cu, **both, **options)
        gradients = torch.autograd.grad(expected, whole[:3], whole[3])
        for n, (strategy, layout) in enumerate(
            (x, y) for x in ("all_gather", "ring", "auto") for y in ("documents", "zigzag", "contiguous")
        ):
            more: dict[str, Any] = {"cu_seqlens": given[n % 4]} if layout == "documents" else {}
            cp = ContextParallel(seqlen=tokens, layout=layout, strategy=strategy, **more)
            mine = [cp.shard(x.detach(), 1).requires_grad_() for x in whole[:3]]
            out = cp.attention(*mine, cu_seqlens_q=given[n % 4], cu_seqlens_k=given[n % 4], **both, **options)
            parts = torch.autograd.grad(out, mine, cp.shard(whole[3], 1))
            for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *parts), (expected, *gradients), strict=True):
                y = y.detach().float()
                error = float((cp.unshard(x.detach(), 1).float() - y).abs().max() / y.abs().max().clamp(min=1))
                if not error < bound:
                    found.append(f"{strategy} {layout} {options}: {name} {error:.3g}")
    for strategy in ("all_gather", "ring"):
        cp = ContextParallel(seqlen=tokens, strategy=strategy)
        mine = [cp.shard(x.detach(), 1) for x in whole[:3]]

        def call(
            of_q: Any = cu, of_k: Any = None, *, cp: ContextParallel = cp, mine: Any = mine, **more: Any
        ) -> Any:  # fmt: skip
            return cp.attention(
                *mine, cu_seqlens_q=of_q, cu_seqlens_k=of_q if of_k is None else of_k, **{**both, **more}
            )

        used = torch.ones(len(lengths), dtype=torch.int32, device=device)
        other = [0, 2, *starts[2:]]
        found += refused("seqused_k", "'ulysses'", lambda call=call, used=used: call(seqused_k=used))
        found += refused("other keys", "'ulysses'", lambda call=call, other=other: call(starts, other))
        found += refused(
            "two lengths", "ulysses", lambda call=call: call(dropout_p=0.5, rng=1, max_seqlen_k=longest + 1)
        )
        found += refused("descending", "decreases", lambda call=call: call([0, 5, 4, *starts[3:]]))
        found += refused("too many", "tokens", lambda call=call: call([*starts[:-1], tokens + 1]))
        found += refused("too long", "max_seqlen_q", lambda call=call: call(max_seqlen_q=3, max_seqlen_k=3))
        found += refused("no bound", "max_seqlen_q", lambda call=call: call(max_seqlen_q=None))
        found += refused("bias", "bias", lambda call=call: call(bias=torch.zeros(1, 1, 1, tokens, device=device)))
        mixed = starts if rank else [0, 2, *starts[2:]]
        found += refused("other documents", "cu_seqlens_q differs", lambda call=call, mixed=mixed: call(mixed))
        call()  # and the group is usable
    if on_gpu:  # lengths there are read once, and again when somebody wrote to them
        said = Mock()
        with patch.object(LOGGER, "info", said):
            for wrote in (False, False, True, False):
                if wrote:
                    cu.add_(0)
                call()
        if said.call_count != 1:
            found.append(f"lengths on the GPU were read {said.call_count} times after they were known")
    planned = ContextParallel(seqlen=tokens, strategy="all_gather", plan_as=True)
    found += refused(
        "plan_as", "'ulysses'",
        lambda: planned.attention(*mine, cu_seqlens_q=cu, cu_seqlens_k=cu, **both),
    )  # fmt: skip
    found += refused("no documents", "cu_seqlens", lambda: ContextParallel(seqlen=tokens, layout="documents"))
    found += refused("documents", "cu_seqlens", lambda: ContextParallel(seqlen=tokens, cu_seqlens=starts))
    found += refused(
        "layouts", "layout differs",
        lambda: ContextParallel(seqlen=tokens, layout="documents", cu_seqlens=[0, 30 + 9 * rank, tokens]),
    )  # fmt: skip
    found += refused(
        "beyond", "tokens", lambda: ContextParallel(seqlen=8, layout="documents", cu_seqlens=[0, 9])
    )  # fmt: skip
    return found


def _calls(cp: ContextParallel, device: Any) -> dict[str, tuple[dict[str, Any], list[torch.Tensor]]]:
    """Calls of `attention` by name: keywords, and those of their tensors that are trained. Of 37 or 38 tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    tokens, keys = cp.seqlen, cp.seqlen_k
    rows = cp.shard(draw(1, 4, tokens, keys), 2)
    one_row, sink, table = draw(1, 1, 1, keys), draw(4), draw(4, 8)
    trained = [x.detach().requires_grad_() for x in (rows, one_row, sink, table)]
    rows, one_row, sink, table = trained
    mask = cp.shard(draw(1, 1, tokens, keys) > -1, 2)
    span = 9
    starts = [0, 5, 5, 22, tokens]
    packed = {"causal": True, "max_seqlen_q": 22, "max_seqlen_k": 22}
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    found: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {
        "dropout": ({"causal": True, "dropout_p": 0.25, "rng": (3, 2**63 + 5)}, []),
        "rows": ({"bias": rows, "mask": mask, "window_size": (6, 3), "softmax_scale": 0.3}, [rows]),
        "one row": ({"bias": one_row, "softcap": 5.0, "sink": sink, "causal": "top_left"}, [one_row, sink]),
        "part": (
            {
                "dropout_p": 0.5, "rng": torch.tensor(7, device=device),
                "part": nvrtc_attn.Part(batch=(2, 9), heads=(4, 8)),
            },
            [],
        ),
        "functions": (
            {
                "score_mod": lambda s, b, h, q, k, aux: s + aux["table"][h, (q - k) % 8],
                "mask_mod": lambda b, h, q, k, aux: q - k < span, "aux": {"table": table},
            },
            [table],
        ),
        "packed": ({**packed, "cu_seqlens_q": starts, "cu_seqlens_k": starts, "sink": sink}, [sink]),
        "packed tensors": ({**packed, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "dropout_p": 0.2, "rng": 1}, []),
    }  # fmt: skip
    if tokens != keys:
        for name in ("packed", "packed tensors"):
            del found[name]
    return found


def _both(cp: ContextParallel, inputs: list[torch.Tensor], call: Any, compile_: Any) -> list[str]:
    """Out, lse and gradients of one call, plain and compiled, and where they differ."""
    keywords, trained = call
    leaves = [x.detach().requires_grad_() for x in inputs]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return cp.attention(q * 1.5, k.sin(), v, return_lse=True, **keywords)

    results = []
    for function in (attend, compile_(attend)):
        out, lse = function(*leaves)
        loss = (out.float() * torch.cos(torch.arange(out.numel(), device=out.device)).view(out.shape)).sum()
        loss = loss + lse.clamp(min=-10).sin().sum()
        results.append([out.detach(), lse.detach(), *torch.autograd.grad(loss, [*leaves, *trained])])
    names = ("out", "lse", "dq", "dk", "dv", *(f"gradient {n}" for n in range(len(trained))))
    exact = 1e-5 if results[0][0].device.type == "cpu" else 1e-4  # GPUs add up dq in any order
    bound = exact if results[0][0].dtype == torch.float32 else 2e-2
    return [
        f"{name} {float((x.float() - y.float()).abs().nan_to_num(0).max()):.3g}"
        for name, x, y in zip(names, *results, strict=True)
        if x.dtype != y.dtype or not torch.allclose(x.float(), y.float(), rtol=bound, atol=bound)
    ]


def _fullgraph(backend: str, **more: Any) -> Any:
    def compiled_one(function: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(function, backend=backend, fullgraph=True, **more)

    return compiled_one


def compiled(rank: int, size: int, device: Any) -> Found:
    """One graph of torch.compile, whatever the strategy, layout and options: out and gradients of the eager call."""
    found: Found = []
    everything = ("all_gather", "ring", "ulysses")
    cases: list[tuple[Any, Any, dict[str, Any], list[str]]] = []
    names = ["dropout", "rows", "one row", "part", "functions", "packed", "packed tensors"]
    cases += [(strategy, "zigzag", {"pipeline": 2}, names) for strategy in everything]
    cases += [
        ("all_gather", "contiguous", {"keep": True}, ["dropout", "functions", "packed"]),
        ("all_gather", "zigzag", {"keep": False, "pipeline": 2}, ["rows"]),
        ("all_gather", "documents", {"cu_seqlens": [0, 5, 5, 22, 37]}, ["packed", "packed tensors"]),
        ("ring", "contiguous", {"seqlen_k": 45}, ["rows", "dropout"]),
        ("ulysses", "contiguous", {"seqlen_k": 45}, ["rows", "one row"]),
        ("ulysses", [[(0, 1)], [(1, 37)]], {}, ["rows", "one row"]),
    ]
    if size == 4:
        cases = [
            (pair, "zigzag", {}, ["dropout", "one row"]) for pair in (("ulysses", "ring"), ("ulysses", "all_gather"))
        ]
    mesh = init_device_mesh(device, (2, 2)) if size == 4 else None
    for strategy, layout, more, wanted in cases:
        cp = ContextParallel(mesh, seqlen=37, strategy=strategy, layout=layout, **more)
        generator = torch.Generator().manual_seed(rank)
        batch = 1 if "packed" in wanted else 2
        for head_dim_v, calls in ((8, wanted), (12, wanted[:1])):
            inputs = [
                torch.randn(batch, tokens, heads, dim, generator=generator).to(device)
                for tokens, heads, dim in (
                    (cp.local_seqlen, 4, 8), (cp.local_seqlen_k, 2, 8), (cp.local_seqlen_k, 2, head_dim_v)
                )
            ]  # fmt: skip
            every = _calls(cp, device)
            for name in calls:
                for fault in _both(cp, inputs, every[name], _fullgraph("aot_eager")):
                    found.append(f"{strategy} {layout} {more} {name} {head_dim_v}: {fault}")
    return found


def inductor(rank: int, size: int, device: Any) -> Found:
    """By inductor: static shapes, one program for every batch, under autocast, and without a gradient."""
    found: Found = []
    counts = []
    for strategy, name in (("all_gather", "rows"), ("ring", "dropout"), ("ulysses", "one row")):
        cp = ContextParallel(seqlen=38, strategy=strategy)
        call = _calls(cp, device)[name]

        def draw(batch: int, cp: ContextParallel = cp) -> list[torch.Tensor]:
            generator = torch.Generator().manual_seed(rank)
            shapes = ((batch, cp.local_seqlen, heads, 8) for heads in (4, 2, 2))
            return [torch.randn(shape, generator=generator).to(device) for shape in shapes]

        for mode in ("default", "reduce-overhead"):
            for fault in _both(cp, draw(2), call, _fullgraph("inductor", mode=mode)):
                found.append(f"{strategy} {name} {mode}: {fault}")
        with torch.autocast(device, torch.bfloat16):
            for fault in _both(cp, draw(2), call, _fullgraph("aot_eager")):
                found.append(f"{strategy} {name} autocast: {fault}")
    torch._dynamo.reset()
    cp = ContextParallel(seqlen=38, strategy="all_gather")
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")

    def attend(x: torch.Tensor) -> torch.Tensor:
        return cp.unshard(cp.attention(x * 2, x, x, causal=True) + 1)

    program = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    for batch in (2, 3, 5):
        x = torch.sin(torch.arange(batch * cp.local_seqlen * 4 * 8, device=device) * 1.0)
        x = x.view(batch, cp.local_seqlen, 4, 8)
        for grad in (True, False):
            mine = [x.clone().requires_grad_(grad) for _ in range(2)]
            results = [function(y) for function, y in zip((attend, program), mine, strict=True)]
            if grad:
                results += [torch.autograd.grad(y.square().sum(), z)[0] for y, z in zip(results, mine, strict=True)]
            for a, b in zip(results[::2], results[1::2], strict=True):
                if not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
                    found.append(f"batch {batch}, gradient {grad}: off by {float((a - b).abs().max()):.3g}")
        counts.append(counter.frame_count)
    if len(set(counts)) > 1:
        found.append(f"programs after each batch: {counts}")
    if hasattr(torch.Tag, "cudagraph_unsafe") and torch.Tag.cudagraph_unsafe not in operators.context_attention.tags:
        found.append("CUDA graphs would capture the operator")
    return found


def programs(rank: int, size: int, device: Any) -> Found:
    """Of compiled calls and of modes: what differs between ranks, what is wrong on one, what nobody uses, checkpoints,
    second derivatives, fakes."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    found: Found = []
    compile_ = _fullgraph("aot_eager")
    cp = ContextParallel(seqlen=32, check="always")
    x = torch.zeros(1, cp.local_seqlen, 2, 8, device=device)

    def attend(x: torch.Tensor, k: torch.Tensor, **keywords: Any) -> Any:
        return cp.attention(x, k, k, **keywords)

    found += refused("options", "options differs", lambda: compile_(attend)(x, x, causal=rank == 0))
    found += refused("rng", "rng differs", lambda: compile_(attend)(x, x, dropout_p=0.5, rng=rank))
    found += refused("dropout_p", "in [0, 1]", lambda: compile_(attend)(x, x, dropout_p=1.5, rng=1))
    found += refused("causal", "causal", lambda: compile_(attend)(x, x, causal="left"))
    part = nvrtc_attn.Part(heads=(0, 4), sm_margin=4)
    found += refused("part", "those of the ContextParallel", lambda: compile_(attend)(x, x, part=part))
    found += refused(
        "drawn", "ranks are in different calls", lambda: compile_(attend)(x, x, dropout_p=0.5, rng=rank or None)
    )
    starts = [0, 7.5, 32]
    found += refused(
        "starts", "integers",
        lambda: compile_(attend)(x, x, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=32, max_seqlen_k=32),
        Exception,
    )  # fmt: skip
    y = x.clone().requires_grad_()
    out = attend(y, y)
    found += refused(
        "a batch of gradients", "batches of gradients",
        lambda: torch.autograd.grad(out, y, torch.stack([out, out]).detach(), is_grads_batched=True), UnsupportedError,
    )  # fmt: skip
    if rank == 0:  # on one rank alone: the others are not asked
        for strategy in ("all_gather", "ulysses"):
            cp.strategy = strategy
            cp._strategies.clear()
            for y in (x, x.clone().requires_grad_()):
                found += refused("shape", "Nothing was sent", lambda y=y: compile_(attend)(y[:, 1:], x))
                found += refused("heads", "heads", lambda y=y: compile_(attend)(y, x[:, :, :1].expand(-1, -1, 3, -1)))
        cp.strategy = "auto"
        cp._strategies.clear()
    compile_(attend)(x, x)  # and the group is usable

    # What one rank does not use is sent to those that do, and in the order of the program.
    cp = ContextParallel(seqlen=32, strategy="all_gather")
    x = cp.shard(torch.sin(torch.arange(32.0 * 4 * 8, device=device)).view(1, 32, 4, 8))
    for backend in ("aot_eager", "inductor"):

        def first(x: torch.Tensor) -> torch.Tensor:
            seen, other = cp.unshard(x * 2), cp.attention(x, x, x)
            return cp.unshard(x + 1).sum() + (seen.sum() + other.sum() if rank == 0 else 0)

        if not torch.allclose(first(x), _fullgraph(backend)(first)(x), rtol=1e-4):
            found.append(f"{backend}: a result that one rank uses")

    # Checkpoints: what the user saves is not sent twice, and dropout is the same again.
    weight = torch.linspace(-1, 1, 8, device=device).requires_grad_()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        saved = operator is operators.context_attention
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return cp.attention(x, x, x * weight, dropout_p=0.5).sin().asin()

    for selective in (False, True):
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if selective else {}

        def checkpointed(x: torch.Tensor, weight: torch.Tensor, contexts: Any = contexts) -> torch.Tensor:
            return cp.unshard(checkpoint(block, x, weight, use_reentrant=False, **contexts)).sum()

        for function in (checkpointed, compile_(checkpointed)):
            before = cp._calls
            value = function(x * 0.1, weight)
            (gradient,) = torch.autograd.grad(value, weight)
            dist.all_reduce(gradient)
            # The value is linear in the weight, where the mask of the backward pass is that of the forward pass; the
            # gradient of every rank's copy of it is one of `size`.
            error = float(((gradient * weight).sum() / size - value).detach().abs())
            if not error < 1e-3:
                found.append(f"selective {selective}: dropout differs, {error:.3g}")
            if cp._calls - before != (1 if selective else 2):
                found.append(f"selective {selective}: {cp._calls - before} forward passes")

    # Second derivatives: none of attention, and those of `unshard`.
    for function in (attend, compile_(attend)):
        y = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(y, y).square().sum(), y, create_graph=function is attend)
        if function is attend:
            found += refused(
                "twice", "second", lambda gradient=gradient, y=y: torch.autograd.grad(gradient.sum(), y), RuntimeError
            )
    # A penalty, whose dout needs no gradient: ulysses keeps none of q, k and v, and had no node to refuse it.
    for strategy in ("all_gather", "ring", "ulysses"):
        y = x.clone().requires_grad_()
        out = ContextParallel(seqlen=32, strategy=strategy).attention(y, y, y, causal=True)
        (gradient,) = torch.autograd.grad(out.sum(), y, create_graph=True)
        loss = out.sum() + gradient.square().sum()
        for way, call in (
            ("grad", lambda loss=loss, y=y: torch.autograd.grad(loss, y, retain_graph=True)),
            ("backward", loss.backward),
        ):
            found += refused(f"penalty, {strategy}, {way}", "second", call, RuntimeError)
    for name, call in (
        ("jvp", lambda: torch.func.jvp(cp.unshard, (x,), (x,))), ("grad", lambda: torch.func.grad(cp.unshard)(x)),
    ):  # fmt: skip
        found += refused(f"unshard, {name}", "torch.func", call, UnsupportedError)
    y = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cp.unshard(y).pow(3).sum(), y, create_graph=True)
    (twice,) = torch.autograd.grad(gradient.sum(), y)
    if not torch.allclose(gradient, size * 3 * y**2) or not torch.allclose(twice, size * 6 * y):
        found.append("derivatives of unshard")

    # Fakes, and what torch.library asks of an operator.
    for strategy in ("all_gather", "ring", "ulysses"):
        cp = ContextParallel(seqlen=32, strategy=strategy, keep=True if strategy == "all_gather" else None)
        bias = torch.zeros(1, 4, cp.local_seqlen, 32, device=device, requires_grad=True)
        calls: list[Any] = []
        with patch.object(operators, "context_attention", lambda *args, calls=calls: calls.append(args) or (x, x, [])):
            leaf = x.clone().requires_grad_()
            operators.attention(
                cp._name, leaf, leaf, leaf, bias, None, None, True, (5, None), None, 0.0, 0.25, (1, 2), None, None,
                None, None, None, True, None, None, None, None, None,
            )  # fmt: skip
        torch.library.opcheck(operators.context_attention, calls[0])
        torch.library.opcheck(operators.context_unshard, (leaf, cp._name, 32, 1, False, None))
        torch.library.opcheck(operators.context_reduce, (bias, cp._name, cp.local_seqlen, 3, True, None))
        kinds = []
        operators.context_attention(*calls[0])
        for mode in (None, FakeTensorMode(allow_non_fake_inputs=True)):
            with mode or contextlib.nullcontext():
                out, lse, kept, done = operators.context_attention(*calls[0])
            kinds.append([(y.shape, y.stride(), y.dtype) for y in (out, lse, done, *kept)])
        if kinds[0] != kinds[1] or (strategy != "ring") != (len(kinds[0]) > 3):
            found.append(f"{strategy}: {kinds}")
    return found


def torchs_ring(rank: int, size: int, device: Any) -> Found:
    """torch's own `context_parallel` around our kernels: out and gradients of one process, causal and balanced."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found: Found = []
    on_gpu = device == "cuda"
    kind, bound = (torch.bfloat16, 2e-2) if on_gpu else (torch.float32, 1e-5)
    seqlen, keys = 256 * size, ("CUDA",) if on_gpu else ("CPU",)
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, seqlen, 64).to(device, kind) for _ in range(4)]
    one = [x.clone().requires_grad_() for x in whole[:3]]
    expected = nvrtc_attn.torch.scaled_dot_product_attention(*one, is_causal=True)
    gradients = torch.autograd.grad(expected, one, whole[3])
    mesh = init_device_mesh(device, (size,))
    for every in (False, True):
        shards = [x.clone() for x in whole]
        taken = nvrtc_attn.torch.sdpa.report()["taken"].copy()
        with (
            nvrtc_attn.torch.enable_sdpa(all=every, _keys=keys),
            context_parallel(mesh, buffers=shards, buffer_seq_dims=[2] * 4),
        ):
            mine = [x.detach().clone().requires_grad_() for x in shards[:3]]
            if on_gpu:
                with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                    out = torch.nn.functional.scaled_dot_product_attention(*mine, is_causal=True)
            else:  # torch chooses the operator on CUDA alone: what it chooses there
                ranks = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in mine]
                out, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*ranks, None, True, 0.0, True)
                out = out.to_local()
                if every:  # and nobody takes the whole call, whose tokens are in the order of the ranks
                    try:
                        other = torch.nn.functional.scaled_dot_product_attention(*mine, is_causal=True)
                        if other.shape != out.shape:
                            found.append(f"sharded tokens were gathered: {tuple(other.shape)}")
                    except NotImplementedError as error:  # of torch's ring, which knows three operators
                        if "operator" not in str(error).lower() and "CP only" not in str(error):
                            raise
            parts = torch.autograd.grad(out, mine, shards[3])
            results = context_parallel_unshard(mesh, [out.detach(), *parts], [2] * 4)
        for name, x, y in zip(("out", "dq", "dk", "dv"), results, (expected.detach(), *gradients), strict=True):
            error = float((x.float() - y.float()).abs().max() / y.float().abs().max())
            if not error < bound:
                found.append(f"all={every}: {name} {error:.3g}")
        for name in ("", "_backward"):
            operator = f"_scaled_dot_product_efficient_attention{name}"
            if nvrtc_attn.torch.sdpa.report()["taken"].get(operator, 0) <= taken.get(operator, 0):
                found.append(f"all={every}: {operator} was not ours")
    return found


def long(rank: int, size: int, device: Any) -> Found:
    """Sequences of many tiles: every strategy against one GPU's call, and dq, dk, dv likewise."""
    found: Found = []
    for options in (
        {"causal": True}, {"causal": True, "window_size": (300, None), "dropout_p": 0.2, "rng": (3, 9)},
        {"window_size": (500, 100)}, {"causal": True, "softcap": 15.0},
    ):  # fmt: skip
        for seqlen in (4096, 3001):
            generator = torch.Generator(device).manual_seed(1)
            whole = [
                torch.randn(1, seqlen, heads, 64, device=device, dtype=torch.bfloat16, generator=generator)
                for heads in (8, 4, 4, 8)
            ]
            whole[:3] = [x.requires_grad_() for x in whole[:3]]
            expected = nvrtc_attn.torch.attention(*whole[:3], **options)
            gradients = torch.autograd.grad(expected, whole[:3], whole[3])
            beside: dict[str, Any] = {"keep": True, "lanes": 2, "sm_margin": 8, "pipeline": 2}
            for strategy, more in (
                ("all_gather", {}), ("all_gather", {"keep": False}), ("all_gather", beside), ("ring", {}),
                ("ulysses", {}), ("ulysses", {"pipeline": 2, "sm_margin": 8}),
            ):  # fmt: skip
                cp = ContextParallel(seqlen=seqlen, strategy=strategy, **more)
                mine = [cp.shard(x.detach(), 1).requires_grad_() for x in whole[:3]]
                out = cp.attention(*mine, **options)
                parts = torch.autograd.grad(out, mine, cp.shard(whole[3], 1))
                for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *parts), (expected, *gradients), strict=True):
                    error = (cp.unshard(x.detach(), 1).float() - y.float()).abs().max() / y.float().abs().max()
                    if not error < 0.02:  # two roundings to bfloat16 are 0.008
                        found.append(f"{strategy} {more} {options} {seqlen}: {name} {float(error):.3g}")
    return found


def killed(rank: int, size: int, device: Any) -> Found:
    """The last rank is gone before a call: the others raise within the timeout of their group."""
    cp = ContextParallel(seqlen=64, strategy="all_gather")
    x = torch.zeros(1, cp.local_seqlen, 2, 8, device=device)
    return _without_the_last("killed", rank, size, lambda: float(cp.attention(x, x, x).sum()))


def killed_later(rank: int, size: int, device: Any) -> Found:
    """The last rank is gone before a call whose like was whole before: connections are made, kernels are loaded."""
    cp = ContextParallel(seqlen=64, strategy="all_gather")
    x = torch.zeros(1, cp.local_seqlen, 2, 8, device=device)
    float(cp.attention(x, x, x).sum())
    dist.barrier()
    return _without_the_last("killed_later", rank, size, lambda: float(cp.attention(x, x, x).sum()))


def killed_backward(rank: int, size: int, device: Any) -> Found:
    """The last rank is gone between the passes of a call whose like was whole before."""
    cp = ContextParallel(seqlen=64, strategy="all_gather")
    x = torch.ones(1, cp.local_seqlen, 2, 8, device=device, requires_grad=True)
    for _ in range(2):  # what is made once is made
        float(torch.autograd.grad(cp.attention(x, x, x).sum(), x)[0].sum())
    loss = cp.attention(x, x, x).sum()
    float(loss)
    dist.barrier()
    backward = partial(torch.autograd.grad, loss, x)
    return _without_the_last("killed_backward", rank, size, lambda: float(backward()[0].sum()))


def _without_the_last(name: str, rank: int, size: int, call: Callable[[], Any]) -> Found:
    if rank == size - 1:
        print("RESULT " + json.dumps({name: []}), flush=True)
        os._exit(0)
    # Says where this rank hangs. The test kills it four times SECONDS after its start, which takes a while itself.
    faulthandler.dump_traceback_later(2.25 * SECONDS)
    start = time.monotonic()
    said = ["nothing was raised"]
    try:
        call()
    except RuntimeError:
        said = [] if time.monotonic() - start < 2 * SECONDS else ["raised after twice the timeout"]
    print("RESULT " + json.dumps({name: said}), flush=True)
    os._exit(0)  # the group is broken: there is nothing to say goodbye to


def exhausted(rank: int, size: int, device: Any) -> Found:
    """The last rank runs out of memory at its part of the work and lives on: the others raise when their group's
    timeout is over, and another group of the same ranks still works."""
    found: Found = []
    seconds = 6

    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("Tried to allocate 20.00 GiB.")

    def both(cp: ContextParallel) -> None:
        x = torch.ones(1, cp.local_seqlen, 2, 8, device=device, requires_grad=True)
        float(torch.autograd.grad(cp.attention(x, x, x).sum(), x)[0].sum())

    for strategy, which in (
        ("all_gather", "backward_here"),
        ("ring", "forward_here"),
        ("ulysses", "forward_here"),
    ):
        both(ContextParallel(seqlen=64, strategy=strategy))
        group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
        cp = ContextParallel(group, seqlen=64, strategy=strategy)
        both(cp)  # what is made once is made
        dist.barrier()
        start, raised = time.monotonic(), "nothing was raised"
        computing = strategies.ring if strategy == "ring" else strategies.all_gather
        last, kept = rank == size - 1, getattr(computing, which)
        if last:
            setattr(computing, which, no_memory)
        try:
            both(cp)
        except torch.cuda.OutOfMemoryError as error:
            raised = "" if last and "20.00 GiB" in str(error) else f"{type(error).__name__}: {error}"
        except RuntimeError as error:  # of gloo, which names the wait that is over
            raised = f"{type(error).__name__}: {error}" if last else ""
        finally:
            setattr(computing, which, kept)
        taken = time.monotonic() - start
        if raised:
            found.append(f"{strategy} {which}: {raised}")
        if not (taken < seconds if last else 0.5 * seconds < taken < 5 * seconds):
            found.append(f"{strategy} {which}: after {taken:.1f} s")
        dist.barrier()
        both(ContextParallel(seqlen=64, strategy=strategy))
    return found


def distributed(rank: int, size: int, device: Any) -> Found:
    """DTensors are refused on their rank before anything is sent, whatever their dim is; their local tensors work."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    found: Found = []
    cp = ContextParallel(seqlen=32)
    mesh = init_device_mesh(device, (size,))
    x = torch.sin(torch.arange(float(cp.local_seqlen * 4 * 8), device=device)).view(1, cp.local_seqlen, 4, 8)
    bias = torch.zeros(1, 4, cp.local_seqlen, 32, device=device)
    if rank == 0:  # on one rank alone: the others are not asked
        for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
            given = DTensor.from_local(x, mesh, [placement], run_check=False)
            for name, call in {
                "q": lambda y: cp.attention(y, x, x), "v": lambda y: cp.attention(x, x, y),
                "k": lambda y: cp.attention(x, y, x), "x": cp.unshard,
            }.items():  # fmt: skip
                found += refused(f"{name} {placement}", f"{name}.to_local()", partial(call, given), TypeError)
            found += refused(f"shard {placement}", "x.to_local()", partial(cp.shard, given), TypeError)
        wrong = DTensor.from_local(bias, mesh, [Shard(2)], run_check=False)
        found += refused("bias", "bias.to_local()", lambda: cp.attention(x, x, x, bias=wrong), TypeError)
    # Tokens that lie in the order of the ranks: each has what DTensor gives it.
    cp = ContextParallel(seqlen=32, layout="contiguous")
    whole = torch.sin(torch.arange(32.0 * 4 * 8, device=device)).view(1, 32, 4, 8)
    given = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
    mine = given.to_local()
    out = cp.attention(mine, mine, mine, causal=True)
    again = DTensor.from_local(out, mesh, [Shard(1)], run_check=False)
    plain = whole.clone().requires_grad_()
    expected = nvrtc_attn.torch.attention(plain, plain, plain, causal=True)
    expected.square().sum().backward()
    again.square().sum().backward()
    bound = 1e-5 if device == "cpu" else 1e-4
    for name, a, b in (("out", again.full_tensor(), expected), ("gradient", given.grad.full_tensor(), plain.grad)):
        if not torch.allclose(a, b, rtol=bound, atol=bound):
            found.append(f"{name}: off by {float((a - b).abs().max()):.3g}")
    return found


def dtensors(rank: int, size: int, device: Any) -> Found:
    """nvrtc_attn.torch.attention of DTensors whose batch or heads are sharded: values and gradients of the unsharded
    call, with the dropout mask of the whole, results that are sharded alike, and nothing that is sent."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    found: Found = []
    line = init_device_mesh(device, (size,))
    batch, heads, alike = Shard(0), Shard(2), Replicate()
    across = 6 if size == 2 else 12  # query heads of a rank that read more than one of three key heads, not all of each
    # Sizes of batch, heads and key heads, the mesh, placements of q, those of k and v, and what a pass sends.
    cases: list[Any] = [
        ((size, 2 * size, size), line, [batch], [batch], 0),
        ((size, 2 * size, size), line, [heads], [heads], 0),
        ((size + 1, 2, 1), line, [batch], [batch], 0),
        ((1, 3, 3), line, [heads], [heads], 0),  # as many as ranks, more and fewer
        ((2, 2 * size, 1), line, [heads], [alike], 0),
        ((2, across, 3), line, [heads], [alike], 0),
        ((2, across, 3), line, [heads], [heads], 2),  # k and v alone are gathered, and their gradients go back
    ]
    if size == 4:
        square = init_device_mesh(device, (2, 2))
        cases += [
            ((3, 4, 2), square, [batch, heads], [batch, heads], 0),
            ((3, 4, 1), square, [batch, heads], [batch, alike], 0),
            ((3, 5, 5), square, [heads, batch], [heads, batch], 0),
            ((2, 8, 4), square, [heads, heads], [heads, heads], 0),
        ]
    rows = 16
    kind, bound = (torch.bfloat16, 2e-2) if device == "cuda" else (torch.float32, 1e-5)
    generator = torch.Generator().manual_seed(0)
    for (entries, of_q, of_k), mesh, placements, of_keys, sent in cases:
        whole = [
            torch.randn(entries, rows, n, 64, generator=generator).to(device, kind) for n in (of_q, of_k, of_k, of_q)
        ]  # fmt: skip
        whole[:3] = [x.requires_grad_() for x in whole[:3]]
        lying = [placements, of_keys, of_keys, placements]
        for options in ({}, {"causal": True, "window_size": (9, None), "dropout_p": 0.25, "rng": (3, 5)}):
            what = f"{entries} {of_q} {of_k} {placements} {of_keys} {options}"
            expected = nvrtc_attn.torch.attention(*whole[:3], **options)
            wanted = [expected, *torch.autograd.grad(expected, whole[:3], whole[3])]
            mine = [distribute_tensor(x.detach(), mesh, y) for x, y in zip(whole, lying, strict=True)]
            mine[:3] = [x.requires_grad_() for x in mine[:3]]
            with CommDebugMode() as communication:
                out = nvrtc_attn.torch.attention(*mine[:3], **options)
                counts = [communication.get_total_counts()]
                results = [out, *torch.autograd.grad(out, mine[:3], mine[3])]
                counts.append(communication.get_total_counts())
            if counts != [sent, 3 * sent]:
                found.append(f"{what}: {counts} times something was sent")
            lies = [tuple(x.placements) for x in results]
            keys = tuple(Partial() if x == alike else x for x in of_keys)
            if lies != [tuple(placements)] * 2 + [keys] * 2:
                found.append(f"{what}: results lie as {lies}")
            for name, x, y in zip(("out", "dq", "dk", "dv"), results, wanted, strict=True):
                y = y.detach().float()
                error = float((x.detach().full_tensor().float() - y).abs().max() / y.abs().max().clamp(min=1))
                if not error < bound:
                    found.append(f"{what}: {name} {error:.3g}")
        keep = nvrtc_attn.dropout_keep_mask((entries, of_q, rows, rows), 0.5, (5, 77))
        nothing, eye = torch.zeros(entries, rows, of_q, 8), torch.eye(rows)[None, :, None]
        q, k, v = (
            distribute_tensor(x.contiguous().to(device, kind), mesh, y)
            for x, y in (
                (nothing, placements),
                (nothing[:, :, :of_k], of_keys),
                (eye.expand(entries, rows, of_k, rows), of_keys),
            )
        )
        out = nvrtc_attn.torch.attention(q, k, v, dropout_p=0.5, rng=(5, 77)).full_tensor()
        if not np.array_equal(out.transpose(1, 2).float().cpu().numpy() != 0, keep):
            found.append(f"{entries} {of_q} {of_k} {placements}: the mask is not the whole's")
    return found


def dtensor_functions(rank: int, size: int, device: Any) -> Found:
    """score_mod and mask_mod of DTensors see batch entries and heads of the whole; what they captured is the whole, and
    its gradient the sum over the ranks."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    found: Found = []
    line, rows = init_device_mesh(device, (size,)), 16
    meshes = [(line, [Shard(0)]), (line, [Shard(2)])]
    if size == 4:
        meshes.append((init_device_mesh(device, (2, 2)), [Shard(0), Shard(2)]))
    bound = 1e-5 if device == "cpu" else 1e-3
    generator = torch.Generator().manual_seed(0)
    # One batch entry more than ranks.
    whole = [torch.randn(size + 1, rows, n * size, 16, generator=generator).to(device) for n in (2, 1, 1, 2)]
    slopes = torch.randn(2 * size, generator=generator).to(device)
    lengths = torch.randint(1, rows, (size + 1,), generator=generator, dtype=torch.int32).to(device)
    whole[:3] = [x.requires_grad_() for x in whole[:3]]

    def call(q: Any, k: Any, v: Any, learned: Any, used: Any, more: dict[str, Any], flex: bool) -> Any:
        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + learned[h] * (i - j)

        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (j < used[b]) | (h == 1)

        if not flex:
            return nvrtc_attn.torch.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod, **more)
        flat = (x.transpose(1, 2) for x in (q, k, v))
        mask = nvrtc_attn.torch.create_block_mask(mask_mod, None, None, rows, rows)
        return nvrtc_attn.torch.flex_attention(*flat, score_mod, mask, enable_gqa=True).transpose(1, 2)

    for flex, more in ((False, {}), (False, {"causal": True, "dropout_p": 0.25, "rng": (3, 5)}), (True, {})):
        inputs = [*whole[:3], slopes.clone().requires_grad_()]
        expected = call(*inputs, lengths, more, flex)
        wanted = [expected, *torch.autograd.grad(expected, inputs, whole[3])]
        for (mesh, placements), plain in itertools.product(meshes, (False, True)):
            alike = [Replicate()] * mesh.ndim
            mine = [distribute_tensor(x.detach(), mesh, placements) for x in whole]
            dout = mine.pop()
            mine.append(slopes.clone() if plain else distribute_tensor(slopes, mesh, alike))
            mine = [x.requires_grad_() for x in mine]
            used = lengths if plain else distribute_tensor(lengths, mesh, alike)
            with CommDebugMode() as communication:
                out = call(*mine, used, more, flex)
                results = [out, *torch.autograd.grad(out, mine, dout)]
            what = f"{placements} plain={plain} flex={flex} {more}"
            if communication.get_total_counts() != (mesh.ndim if plain else 0):  # the sum of a plain one's gradient
                found.append(f"{what}: {communication.get_total_counts()} times something was sent")
            if not plain and list(results[-1].placements) != [Partial()] * mesh.ndim:
                found.append(f"{what}: the gradient of the captured one lies as {results[-1].placements}")
            for name, x, y in zip(("out", "dq", "dk", "dv", "dslopes"), results, wanted, strict=True):
                x = x.detach() if plain and name == "dslopes" else x.detach().full_tensor()
                error = float((x - y.detach()).abs().max() / y.abs().max().clamp(min=1))
                if not error < bound:
                    found.append(f"{what}: {name} {error:.3g}")
    return found


def main() -> None:
    rank, size, file, device, *programs = sys.argv[1:]
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(rank))
    more: dict[str, Any] = {}
    if device == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        more["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        more["device_id"] = torch.device("cuda", int(rank))
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", init_method=f"file://{Path(file).resolve()}", rank=int(rank),
        world_size=int(size), timeout=datetime.timedelta(seconds=SECONDS), **more,
    )  # fmt: skip
    results = {}
    for name in programs:
        try:
            results[name] = globals()[name](int(rank), int(size), device)
        except Exception as error:
            results[name] = [f"{type(error).__name__}: {error}"]
            raise
        finally:
            print("RESULT " + json.dumps({name: results.get(name)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    leave_ranks()


if __name__ == "__main__":
    main()
