"""Random modifiers times random shapes: the CPU path against whole matrices in float64, the GPU against the CPU path.

    python tests/fuzz.py --modifiers [--problems 5000] [--shapes 2] [--seed 1] [--cpu | --compile-only]

On the CPU values are compared with the function called on matrices, and gradients of q, k, v and of every captured
array with central differences of that in a random direction; nothing of the package is in either. On the GPU a
modifier is compiled once and run at several shapes and with several contents of its arrays: with the portable kernels
and with those that the GPU gets, with and without words of the tiles that a mask keeps, in turn.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import modifiers
import numpy as np
from modifiers import ModifierCase

import nvrtc_attn
from nvrtc_attn.cpu import reference
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import choose_backward, choose_forward, tile_words
from nvrtc_attn.jit.config import KernelConfig
from nvrtc_attn.modifiers.evaluate import HostModifier

STEP = 1e-6
WIDE = 500_000


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Of a modifier on the GPU: how many, with other contents of its arrays each, and the lengths."""

    number: int = 6
    least: int = 2
    most: int = 400


CAMPAIGN = Shapes(2, 130, 300)
"""Lengths of one choice of tiles, mostly, and more than one tile: 2.4 kernels a modifier."""


def case_of(seed: int) -> ModifierCase:
    """Scores and masks of the grammar, every sixth time a mask with whole tiles of nothing.

    From `WIDE` on, of each million, they are those of a wider grammar: what a number stands for stays.
    """
    if seed % 1_000_000 >= WIDE:
        return modifiers.random_wide_case(seed)
    sparse = modifiers.sparse_cases()
    return sparse[seed // 6 % len(sparse)] if seed % 6 == 5 else modifiers.random_case(seed)


def shapes_of(rng: np.random.Generator, most: int, least: int = 2) -> tuple[tuple[int, int, int, int], int, int]:
    heads_kv = int(rng.integers(1, 3))
    sizes = (int(rng.integers(1, 3)), heads_kv * int(rng.integers(1, 4)), *map(int, rng.integers(least, most, 2)))
    return sizes, heads_kv, int(rng.integers(1, 5))  # type: ignore[return-value]


def check_on_cpu(seed: int) -> str:
    """What is wrong with one problem, nothing where it is right."""
    case = case_of(seed)
    rng = np.random.default_rng([seed, 5])
    sizes, heads_kv, head_dim = shapes_of(rng, 40)
    b, h, m, n = sizes
    arrays = case.arrays(sizes, rng)
    shapes = ((b, m, h, head_dim), (b, n, heads_kv, head_dim), (b, n, heads_kv, head_dim), (b, m, h, head_dim))
    q, k, v, dout = (rng.standard_normal(x) for x in shapes)
    score_mod, mask_mod = case.make(arrays)
    modifier = nvrtc_attn.trace(score_mod, mask_mod)
    wide = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in arrays.items()}
    exact, lse = modifiers.textbook(q, k, v, *case.make(wide))
    ours, our_lse = nvrtc_attn.attention(
        *(x.astype(np.float32) for x in (q, k, v)), score_mod=modifier, return_lse=True
    )
    found = differs("out", ours, exact, 2e-3) or differs("lse", our_lse, lse, 2e-3)
    if found:
        return f"{case.name} at {sizes}: {found}"

    host = HostModifier(modifier, [x.astype(np.float64) if x.dtype == np.float32 else x for x in modifier.captures])
    out, lse = reference.attention_forward(q, k, v, modifier=host)
    trained = modifier.differentiable
    sums = [np.zeros(x.shape) if i in trained else None for i, x in enumerate(modifier.captures)]
    gradients = reference.attention_backward(dout, q, k, v, out, lse, modifier=host, capture_grads=sums)[:3]
    names = [next(name for name, x in arrays.items() if x is y) for y in modifier.captures]
    for _ in range(3):  # a difference across a kink, of where or maximum, is none of a derivative
        along = [rng.standard_normal(x.shape) for x in (q, k, v)]
        moves = {names[i]: rng.standard_normal(modifier.captures[i].shape) for i in trained}

        def moved(step: float, along: Any = along, moves: Any = moves) -> float:
            there = {name: x + step * moves[name] if name in moves else x for name, x in wide.items()}
            values = (x + step * y for x, y in zip((q, k, v), along, strict=True))
            return float((modifiers.textbook(*values, *case.make(there))[0] * dout).sum())

        numeric = (moved(STEP) - moved(-STEP)) / (2 * STEP)
        terms = [x * y for x, y in zip(gradients, along, strict=True)]
        terms += [sums[i] * moves[names[i]] for i in trained]  # type: ignore[operator]
        analytic = sum(float(x.sum()) for x in terms)
        size = 1.0 + sum(float(np.abs(x).sum()) for x in terms)
        if abs(numeric - analytic) <= 1e-4 * size or not np.isfinite(numeric):
            return ""
    return f"{case.name} at {sizes}: derivative {analytic}, by differences {numeric}, in three directions"


def differs(name: str, ours: Any, exact: Any, tolerance: float) -> str:
    ours = np.asarray(ours, np.float64)
    finite = np.isfinite(exact)
    if not np.array_equal(np.isfinite(ours), finite):
        return f"{name} is finite elsewhere"
    error = np.abs(ours[finite] - exact[finite]).max(initial=0.0)
    bound = tolerance * max(np.abs(exact[finite]).max(initial=0.0), 1.0)
    return "" if error <= bound else f"{name} off by {error:.3g} of {bound:.3g}"


class _Sizes(HostModifier):
    """Sums of the sizes of what goes to the gradients: their rounding errors are relative to those."""

    def add_gradients(self, values: Any, ds: Any, gradients: Any) -> None:
        for node, derivative in self._slopes.items():
            if node.op == "load" and gradients[node.value] is not None:
                index, inside = values.indices(node)
                parts = np.abs(ds * values(derivative))
                parts = parts if inside is None else np.where(inside, parts, 0)
                np.add.at(gradients[node.value], tuple(np.broadcast_to(x, parts.shape) for x in index), parts)


def dtype_of(number: int) -> str:
    return "bfloat16" if number % 5 == 0 else "float16"


@contextmanager
def way_of(number: int) -> Iterator[str]:
    """The backend of a campaign's modifier; every other two walk tiles by words, whatever the size."""
    before = tile_words.MIN_FLOPS, tile_words.MIN_KEY_TILES
    if number % 4 > 1:
        tile_words.MIN_FLOPS, tile_words.MIN_KEY_TILES = 0, 1
    try:
        yield "auto" if number % 2 else "portable"
    finally:
        tile_words.MIN_FLOPS, tile_words.MIN_KEY_TILES = before


def kernels_on(seed: int, target: dict[str, Any], shapes: Shapes = CAMPAIGN) -> dict[KernelConfig, None]:
    """What `check_on_gpu` compiles for a modifier of a campaign."""
    case, found = case_of(seed), {}
    dtype = dtype_of(seed)
    for variant in range(shapes.number):
        rng = np.random.default_rng([seed, variant])
        sizes, heads_kv, _ = shapes_of(rng, shapes.most, shapes.least)
        b, h, m, n = sizes
        traced = nvrtc_attn.trace(*case.make(case.arrays(sizes, rng)))
        layouts = [dense_layout((b, rows, heads, 64), dtype) for rows, heads in ((m, h), (n, heads_kv), (n, heads_kv))]
        problem = AttentionProblem(
            dtype=dtype, batch=b, seqlen_q=m, seqlen_k=n, num_heads=h, num_heads_kv=heads_kv, head_dim=64,
            head_dim_v=64, q=layouts[0], k=layouts[1], v=layouts[2], softmax_scale=0.125, modifier=traced.program,
        )  # fmt: skip
        backward = dataclasses.replace(problem, trained=traced.differentiable)
        with way_of(seed) as backend:
            specs = (
                choose_forward(problem, **target, backend=backend),
                choose_backward(backward, **target, backend=backend),
            )
        found.update(dict.fromkeys(launch.config for spec in specs for launch in spec.launches))
    return found


def check_on_gpu(seed: int, dtype: str = "float16", shapes: Shapes = Shapes()) -> str:
    """One modifier at several shapes: what is compiled at the first serves all, but for tiles and head dims."""
    import torch

    from nvrtc_attn import api

    case = case_of(seed)
    tolerance = {"float16": 4e-3, "bfloat16": 3e-2}[dtype]
    for variant in range(shapes.number):
        rng = np.random.default_rng([seed, variant])
        sizes, heads_kv, _ = shapes_of(rng, shapes.most, shapes.least)
        b, h, m, n = sizes
        arrays = case.arrays(sizes, rng)
        of_each = ((b, m, h, 64), (b, n, heads_kv, 64), (b, n, heads_kv, 64), (b, m, h, 64))
        q, k, v, dout = (torch.from_numpy(rng.standard_normal(x)).cuda().to(getattr(torch, dtype)) for x in of_each)
        modifier = nvrtc_attn.trace(*case.make({name: torch.from_numpy(x).cuda() for name, x in arrays.items()}))
        on_host = nvrtc_attn.trace(*case.make(arrays))
        wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in on_host.captures]
        host, sizes_of = HostModifier(on_host, wide), _Sizes(on_host, wide)
        out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True)
        doubles = [x.double().cpu().numpy() for x in (q, k, v, dout)]
        exact = reference.attention_forward(*doubles[:3], modifier=host)
        trained = modifier.differentiable
        sums, bounds = ([np.zeros(x.shape) if i in trained else None for i, x in enumerate(wide)] for _ in range(2))
        expected = reference.attention_backward(doubles[3], *doubles[:3], *exact, modifier=host, capture_grads=sums)
        reference.attention_backward(doubles[3], *doubles[:3], *exact, modifier=sizes_of, capture_grads=bounds)
        grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        daux = [
            torch.full(tuple(x.shape), float("nan"), device="cuda") if i in trained else None
            for i, x in enumerate(modifier.captures)
        ]
        size = api.backward_workspace_bytes(q, k, v, score_mod=modifier, daux=daux)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        nvrtc_attn.attention_backward(
            dout, q, k, v, out, lse, *grads, score_mod=modifier, daux=daux, workspace=workspace
        )
        pairs = [
            ("out", out, exact[0]),
            ("lse", lse, exact[1]),
            *zip(("dq", "dk", "dv"), grads, expected, strict=False),
        ]
        for name, ours, theirs in pairs:
            found = differs(name, ours.double().cpu().numpy(), theirs, 4 * tolerance if name[0] == "d" else tolerance)
            if found:
                return f"{case.name} at {sizes}: {found}"
        for i in trained:
            error = np.abs(daux[i].double().cpu().numpy() - sums[i]).max(initial=0.0)  # type: ignore[union-attr]
            bound = 8 * tolerance * max(1.0, bounds[i].max(initial=0.0))  # type: ignore[union-attr]
            if not error <= bound:
                return f"{case.name} at {sizes}: daux[{i}] off by {error:.3g} of {bound:.3g}"
    return ""


def _one_of_campaign(number: int, end: float, shapes: Shapes) -> tuple[int, str | None]:
    """What is wrong with a modifier; None: time was over."""
    if time.time() > end:
        return number, None
    with way_of(number) as name, np.errstate(all="ignore"):
        os.environ["NVRTC_ATTN_BACKEND"] = name
        try:
            return number, check_on_gpu(number, dtype_of(number), shapes)
        except Exception:
            return number, traceback.format_exc()


def _begin() -> None:
    import torch

    torch.set_num_threads(1)


def campaign(numbers: Iterable[int], seconds: float, workers: int, shapes: Shapes = CAMPAIGN) -> tuple[int, int]:
    """(Modifiers that were checked on the GPU, those that are wrong), which are printed."""
    done = wrong = 0
    end = time.time() + seconds
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin) as pool:
        for future in [pool.submit(_one_of_campaign, number, end, shapes) for number in numbers]:
            number, found = future.result()
            done += found is not None
            wrong += bool(found)
            if found:
                print(f"{number}: {found}", flush=True)
    return done, wrong


def run(
    problems: int, seed: int, first: int, seconds: float, cpu: bool, workers: int = 1, number: int = CAMPAIGN.number
) -> int:
    """Print what is wrong, and return how many modifiers are. ``number``: shapes of each on the GPU; one on the CPU."""
    shapes = dataclasses.replace(CAMPAIGN, number=number)
    begin, wrong, done = time.monotonic(), 0, 0
    start = seed * 1_000_000 + first
    if not cpu:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        done, wrong = campaign(range(start, start + problems), seconds, workers, shapes)
    else:
        for number in range(start, start + problems):
            if time.monotonic() - begin >= seconds:
                break
            with np.errstate(all="ignore"):
                found = check_on_cpu(number)
            done += 1
            wrong += bool(found)
            if found:
                print(f"{number}: {found}", flush=True)
    at = "one shape" if cpu else f"{number} shapes"
    print(f"{done} modifiers at {at} each, {wrong} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    return wrong
