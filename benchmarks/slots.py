"""How many slots the Hopper forward kernel has for K and V: today's tile beside others with more, of all features.

    python benchmarks/slots.py [--part tuned,others] [--only REGEX] [--tiles REGEX] [--rep 6] [--compile-only] [--all]

A slot is one tile of K and V in shared memory; the loading warp fills those that consumers gave back. With more slots
the first keys of the next query tile are on the way while the last ones of this tile are computed. A line is one
problem: microseconds of today's choice, then today's time over each candidate's, best first: above 1 is faster.
The part ``tuned`` has the problems by which the table was made, ``others`` those that were looked at afterwards.
Candidates whose kernels spill, or whose products ptxas serialises, are left out (``--all`` keeps them), and those whose
name ``--tiles`` does not find: "128x64 s3 lazy_max" is a tile, its slots and how else it differs from today's. Every
candidate writes over NaN, and its output must be today's but for rounding: ``WRONG`` and exit code 1 otherwise. Runs
are replays of CUDA graphs in turn. ``--compile-only`` needs no GPU and prints what is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from forward_tiles import NUM_SMS, SKEWED, SMEM_LIMIT, TOLERANCE
from measure import graph_of, in_turn
from model_cases import spread
from portable_limits import compile_plans
from sparse import masks, runner

import nvrtc_attn as na
from nvrtc_attn.front.call import Call, CallOptions, describe, describe_shapes
from nvrtc_attn.front.problem import AttentionProblem
from nvrtc_attn.front.tensors import Device
from nvrtc_attn.heuristics import hopper_forward, hopper_forward_config, hopper_forward_tile
from nvrtc_attn.heuristics.hopper_forward_config import Tile
from nvrtc_attn.heuristics.spec import ForwardPlanSpec, label
from nvrtc_attn.plans.plan import ForwardPlan


@dataclass(frozen=True)
class Kind:
    """One problem: [batch, rows, keys, heads, key heads, head dim], options, and what goes with the scores."""

    name: str
    shape: tuple[int, int, int, int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    bias: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    functions: Callable[[str], tuple[Any, Any]] | None = None
    """Of a device: score_mod and mask_mod over arrays that lie there."""
    used: tuple[int, ...] = ()
    """Keys of each batch entry that take part, ``seqused_k``."""
    head_dim_v: int = 0
    """That of q where it is 0."""

    def operands(self) -> dict[str, tuple[tuple[int, ...], str]]:
        b, m, n, h, hkv, d = self.shape
        if self.lengths:
            b, m, n = 1, sum(self.lengths), sum(self.lengths)
        found: dict[str, tuple[tuple[int, ...], str]] = {"q": ((b, m, h, d), "bfloat16")}
        found["k"] = (b, n, hkv, d), "bfloat16"
        found["v"] = (b, n, hkv, self.head_dim_v or d), "bfloat16"
        if self.used:
            found["seqused_k"] = (b,), "int32"
        if self.bias:
            found["bias"] = self.bias, "bfloat16"
        if self.lengths:
            found |= {x: ((len(self.lengths) + 1,), "int32") for x in ("cu_seqlens_q", "cu_seqlens_k")}
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """The inputs, on the GPU."""
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        known = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "seqused_k": torch.tensor(self.used)}
        return {
            name: known[name].to(device="cuda", dtype=torch.int32)
            if dtype == "int32"
            else torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            for name, (shape, dtype) in self.operands().items()
        }

    def call(self, tensors: dict[str, torch.Tensor] | None = None) -> tuple[Call, AttentionProblem]:
        """Of these tensors, or of shapes alone; the problem has the layouts of its outputs, too."""
        options = self.options
        if self.lengths:
            options = options | {"max_seqlen_q": max(self.lengths), "max_seqlen_k": max(self.lengths)}
        asked = CallOptions(**options, return_lse=True)
        where = "cuda" if tensors else "cpu"
        modifier = None if self.functions is None else na.trace(*self.functions(where))
        if tensors:
            call = describe(**tensors, options=asked, stream=None, modifier=modifier)
        else:
            call = describe_shapes(self.operands(), asked, Device("cuda", 0), modifier=modifier)
        problem = call.problem
        return call, problem.with_layouts(out=problem.dense_layout_of("out"), lse=problem.dense_layout_of("lse"))


def score(of: Callable[[str], Callable[..., Any]]) -> Callable[[str], tuple[Any, Any]]:
    return lambda where: (of(where), None)


def t5(where: str) -> Callable[..., Any]:
    buckets = torch.randn(32, 64, device=where)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = abs(k - q)
        far = 8 + (torch.log(torch.clamp(distance, min=1) / 8.0) * (8 / 2.772588722239781)).to(torch.int32)
        bucket = torch.where(distance < 8, distance, torch.clamp(far, max=15)) + torch.where(k > q, 16, 0)
        return s + buckets[bucket, h]

    return score_mod


def table(where: str) -> Callable[..., Any]:
    relative = torch.randn(64, 8192, device=where).mul_(0.1)
    return lambda s, b, h, q, k: s + relative[h, q - k + 4096]


def slopes(where: str) -> Callable[..., Any]:
    of_head = torch.exp2(-torch.arange(1, 65) * 0.25).to(where)
    return lambda s, b, h, q, k: s + of_head[h] * (k - q)


def capped(where: str) -> Callable[..., Any]:
    of_head = torch.exp2(-torch.arange(1, 65) * 0.25).to(where)
    return lambda s, b, h, q, k: 30 * torch.tanh(s / 30) + of_head[h] * (k - q)


def scaled(where: str) -> Callable[..., Any]:
    of_head = torch.rand(64).to(where)
    return lambda s, b, h, q, k: s * of_head[h]


def of_mask(name: str, length: int) -> Callable[[str], tuple[Any, Any]]:
    return lambda where: (None, masks(length, where)[name])


def tuned() -> Iterator[Kind]:
    causal = {"causal": True}
    for b, s, h, d in ((16, 512, 16, 64), (16, 1024, 16, 64), (4, 2048, 16, 64), (4, 4096, 16, 64)):
        yield Kind("causal", (b, s, s, h, h, d), causal)
    yield Kind("window", (2, 8192, 8192, 16, 16, 64), causal | {"window_size": (511, 0)})
    yield Kind("softcap", (4, 2048, 2048, 16, 16, 64), causal | {"softcap": 30.0})
    yield Kind("softcap", (4, 2048, 2048, 16, 16, 64), {"softcap": 30.0})
    yield Kind("dropout", (16, 1024, 1024, 12, 12, 64), causal | {"dropout_p": 0.1})
    yield Kind("dropout", (16, 512, 512, 16, 16, 64), {"dropout_p": 0.1})
    yield Kind("bias", (32, 512, 512, 12, 12, 64), bias=(1, 12, 512, 512))
    yield Kind("bias", (4, 2048, 2048, 16, 16, 64), bias=(1, 16, 2048, 2048))
    yield Kind("bias", (512, 144, 144, 6, 6, 32), bias=(1, 6, 144, 144))
    yield Kind("t5", (4, 4096, 4096, 16, 16, 64), functions=score(t5))
    yield Kind("t5", (8, 512, 512, 12, 12, 64), functions=score(t5))
    yield Kind("table", (4, 4096, 4096, 16, 16, 64), functions=score(table))
    for name in ("documents", "causal documents", "prefix", "natten 7 of 64"):
        yield Kind(name, (2, 8192, 8192, 16, 16, 64), functions=of_mask(name, 8192))
    yield Kind("skewed", (0, 0, 0, 16, 16, 64), causal, lengths=SKEWED)
    yield Kind("short documents", (0, 0, 0, 16, 16, 80), lengths=spread(32, 512, 64))
    # Head dims between.
    for b, s, h, d in ((8, 1024, 16, 80), (4, 2048, 32, 80), (2, 4096, 32, 96), (16, 512, 12, 96), (2, 4096, 16, 72)):
        yield Kind("causal", (b, s, s, h, h, d), causal)
    for b, s, h, d in ((8, 1024, 16, 96), (4, 2048, 16, 96), (2, 8192, 16, 72), (64, 197, 16, 80), (2, 4096, 16, 88)):
        yield Kind("dense", (b, s, s, h, h, d))
    yield Kind("text", (4, 4096, 77, 10, 10, 80))
    yield Kind("text", (8, 1024, 154, 16, 16, 64))
    yield Kind("text", (2, 4096, 226, 48, 48, 64))
    yield Kind("dense", (32, 400, 400, 12, 12, 64))
    yield Kind("dense", (4, 1000, 1000, 16, 16, 64))
    yield Kind("causal", (2, 8192, 8192, 12, 12, 64), causal)
    yield Kind("bias", (2048, 49, 49, 6, 6, 32), bias=(1, 6, 49, 49))
    yield Kind("bias", (128, 197, 197, 12, 12, 64), bias=(1, 12, 197, 197))
    yield Kind("text", (2, 4096, 226, 30, 30, 96))
    for s in (512, 1024, 2048):
        yield Kind("causal", (16 * 512 // s, s, s, 16, 16, 128), causal)
    for b, s, h, d in ((2, 8192, 16, 64), (4, 2048, 32, 64), (8, 1024, 12, 64), (16, 512, 16, 64), (4, 2048, 16, 128)):
        yield Kind("t5", (b, s, s, h, h, d), functions=score(t5))
    yield Kind("table", (8, 1024, 1024, 12, 12, 64), functions=score(table))
    # Rows of a bias that are no multiple of 16 bytes: threads read it.
    for b, s, h, d in (
        (32, 257, 16, 64), (8, 577, 12, 64), (4, 1001, 16, 64), (2, 2049, 16, 64), (256, 81, 8, 32), (64, 145, 8, 48),
        (8, 577, 16, 80), (8, 577, 12, 128), (301, 301, 4, 32), (16, 1001, 8, 32), (64, 250, 8, 40), (8, 1500, 12, 48),
    ):  # fmt: skip
        yield Kind("bias", (b, s, s, h, h, d), bias=(1, h, s, s))
    for b, s, h, k, d in (
        (1, 4096, 96, 8, 192), (4, 2048, 16, 16, 192), (2, 8192, 12, 12, 192), (2, 4096, 16, 16, 160),
    ):  # fmt: skip
        yield Kind("wide causal", (b, s, s, h, k, d), causal)
        yield Kind("wide", (b, s, s, h, k, d))
    for b, s, h, d in ((32, 512, 8, 256), (8, 2048, 8, 256), (4, 4096, 8, 256), (1, 16384, 8, 256)):
        yield Kind("widest causal", (b, s, s, h, h, d), causal)
        yield Kind("widest", (b, s, s, h, h, d))


def others() -> Iterator[Kind]:
    causal = {"causal": True}
    for b, s, h, d in (
        (16, 729, 16, 72), (8, 576, 16, 72), (4, 1500, 20, 80), (32, 257, 16, 88), (8, 768, 12, 96), (2, 3000, 16, 96),
        (8, 700, 16, 64), (8, 900, 16, 64), (8, 1200, 16, 64),
    ):  # fmt: skip
        yield Kind("dense", (b, s, s, h, h, d))
    for b, s, h, d in (
        (4, 1024, 16, 72), (8, 512, 16, 72), (2, 2048, 16, 72), (1, 8192, 16, 72), (8, 1024, 32, 80), (4, 1500, 20, 80),
        (4, 2048, 24, 96), (8, 1024, 12, 96), (32, 256, 12, 96), (1, 16384, 32, 80), (8, 1500, 16, 64),
        (2, 6000, 16, 64), (32, 384, 16, 128), (64, 256, 16, 128),
    ):  # fmt: skip
        yield Kind("causal", (b, s, s, h, h, d), causal)
    yield Kind("causal", (2, 2560, 2560, 32, 8, 80), causal)
    yield Kind("causal", (16, 512, 512, 32, 8, 128), causal)
    yield Kind("window", (2, 8192, 8192, 32, 8, 80), causal | {"window_size": (1023, 0)})
    yield Kind("window", (2, 4096, 4096, 32, 32, 96), causal | {"window_size": (255, 0)})
    for b, m, n, h, d in (
        (8, 4096, 333, 16, 72), (4, 2048, 256, 16, 80), (2, 4096, 512, 16, 96), (8, 4096, 333, 10, 64),
        (16, 1024, 300, 16, 64),
    ):  # fmt: skip
        yield Kind("text", (b, m, n, h, h, d))
    for b, s, h, d in ((2, 4096, 16, 64), (2, 4096, 16, 96), (2, 4096, 16, 128)):
        yield Kind("softcap", (b, s, s, h, h, d), causal | {"softcap": 20.0})
    for b, s, h, d in (
        (1024, 100, 4, 32), (512, 196, 3, 32), (64, 129, 12, 64), (16, 300, 8, 64), (256, 160, 4, 32),
        (385, 385, 4, 32), (8, 1501, 4, 32), (32, 500, 12, 64), (4, 1500, 16, 64), (1, 4100, 16, 64), (128, 150, 8, 64),
        (32, 300, 8, 48),
    ):  # fmt: skip
        yield Kind("bias", (b, s, s, h, h, d), bias=(1, h, s, s))
    for b, s in ((4, 4096), (8, 1024)):
        yield Kind("slopes", (b, s, s, 16, 16, 64), causal, functions=score(slopes))
        yield Kind("slopes and softcap", (b, s, s, 16, 16, 64), causal, functions=score(capped))
        yield Kind("scale of a head", (b, s, s, 16, 16, 64), causal, functions=score(scaled))
    yield Kind("t5", (8, 2048, 2048, 12, 12, 64), functions=score(t5))
    for name in ("window and sinks", "chunks of 1024"):
        yield Kind(name, (2, 8192, 8192, 16, 16, 64), functions=of_mask(name, 8192))
    yield Kind("short documents", (0, 0, 0, 16, 16, 80), causal, lengths=spread(64, 1024, 48))
    yield Kind("short documents", (0, 0, 0, 16, 16, 72), lengths=spread(32, 512, 64))


def wide_others() -> Iterator[Kind]:
    """Beyond head dim 128: wide up to 192, widest above, latent 192 with values of 128."""
    causal = {"causal": True}
    for b, s, h, d in ((8, 1024, 16, 192), (1, 16384, 8, 192), (3, 1500, 12, 176), (8, 1024, 16, 144)):
        yield Kind("wide causal", (b, s, s, h, h, d), causal)
        yield Kind("wide", (b, s, s, h, h, d))
    for d, name in ((192, "wide"), (160, "wide"), (256, "widest")):
        shape = (4, 2048, 2048, 16, 16, d)
        for options in ({}, causal):
            yield Kind(f"{name} softcap{' causal' * bool(options)}", shape, options | {"softcap": 30.0})
            yield Kind(f"{name} dropout{' causal' * bool(options)}", shape, options | {"dropout_p": 0.1})
            yield Kind(f"{name} used keys{' causal' * bool(options)}", shape, options, used=(2048, 300, 1100, 1777))
        yield Kind(f"{name} softcap causal", (1, 8192, 8192, 16, 8, d), causal | {"softcap": 30.0})
        yield Kind(
            f"{name} softcap window", (1, 8192, 8192, 16, 8, d), causal | {"softcap": 30.0, "window_size": (4095, 0)}
        )
        yield Kind(f"{name} slopes", shape, causal, functions=score(slopes))
        yield Kind(f"{name} t5", shape, functions=score(t5))
        yield Kind(f"{name} mask of documents", shape, functions=of_mask("causal documents", 2048))
        yield Kind(
            f"{name} packed documents and softcap",
            (0, 0, 0, 16, 16, d),
            causal | {"softcap": 30.0},
            lengths=spread(64, 1024, 48),
        )
    for b, s, h in ((1, 4096, 128), (2, 8192, 16), (8, 1024, 16), (4, 2048, 32)):
        yield Kind("latent causal", (b, s, s, h, h, 192), causal, head_dim_v=128)
        yield Kind("latent", (b, s, s, h, h, 192), head_dim_v=128)
    yield Kind("latent documents", (0, 0, 0, 16, 16, 192), causal, lengths=spread(64, 1024, 48), head_dim_v=128)
    yield Kind("latent documents", (0, 0, 0, 16, 16, 192), lengths=spread(512, 4096, 8), head_dim_v=128)
    yield Kind("latent window", (2, 8192, 8192, 16, 16, 192), causal | {"window_size": (1023, 0)}, head_dim_v=128)
    yield Kind("latent used keys", (4, 2048, 2048, 16, 16, 192), causal, used=(2048, 300, 1100, 1777), head_dim_v=128)
    yield Kind("latent softcap", (4, 2048, 2048, 16, 16, 192), causal | {"softcap": 30.0}, head_dim_v=128)
    for b, m, n in ((1, 512, 512), (1, 128, 4096)):
        yield Kind("latent causal, few tiles", (b, m, n, 8, 8, 192), causal, head_dim_v=128)
    for b, m, n, h, k, d in ((1, 512, 512, 8, 8, 256), (1, 1024, 1024, 8, 8, 256), (2, 128, 2048, 32, 8, 256)):
        yield Kind("widest causal, few tiles", (b, m, n, h, k, d), causal)
        yield Kind("widest, few tiles", (b, m, n, h, k, d))
    yield Kind("widest causal, heads of a group as rows", (8, 16, 4096, 32, 4, 256), causal)
    yield Kind("widest, heads of a group as rows", (16, 8, 2048, 16, 1, 256))
    for b, s, h, k, d in ((16, 1024, 8, 8, 256), (2, 8192, 8, 8, 256), (4, 4096, 4, 1, 256), (4, 1500, 8, 8, 224)):
        yield Kind("widest causal", (b, s, s, h, k, d), causal)
        yield Kind("widest", (b, s, s, h, k, d))
    yield Kind("widest window", (4, 4096, 4096, 4, 1, 256), causal | {"window_size": (511, 0)})
    yield Kind("widest window", (2, 8192, 8192, 8, 4, 256), causal | {"window_size": (1023, 0)})
    yield Kind("widest documents", (0, 0, 0, 8, 8, 256), causal, lengths=spread(64, 1024, 48))
    yield Kind("widest documents", (0, 0, 0, 8, 8, 256), lengths=spread(512, 4096, 8))
    yield Kind("wide window", (2, 8192, 8192, 16, 16, 192), causal | {"window_size": (1023, 0)})
    yield Kind("wide window", (2, 4096, 4096, 16, 8, 160), causal | {"window_size": (255, 0)})
    for d, name in ((160, "wide"), (192, "wide"), (256, "widest")):
        for b, s, h in ((4, 2048, 16), (1, 8192, 8)):
            for options in ({}, causal):
                yield Kind(f"{name} bias{' causal' * bool(options)}", (b, s, s, h, h, d), options, bias=(1, h, s, s))
        yield Kind(f"{name} bias of keys", (8, 1024, 1024, 16, 16, d), bias=(8, 1, 1, 1024))
        yield Kind(f"{name} bias of few keys", (8, 2048, 77, 8, 8, d), bias=(8, 1, 1, 77))
        shape, bias = (4, 2048, 2048, 16, 16, d), (1, 16, 2048, 2048)
        yield Kind(f"{name} bias and softcap", shape, causal | {"softcap": 30.0}, bias=bias)
        yield Kind(f"{name} bias and used keys", shape, bias=bias, used=(2048, 300, 1100, 1777))
        yield Kind(f"{name} bias of 1500 rows", (3, 1500, 1504, 12, 12, d - 8), bias=(1, 12, 1500, 1504))
        if d <= 192:
            yield Kind(f"{name} bias and dropout", shape, {"dropout_p": 0.1}, bias=bias)
    for b, m, n, h, d in ((8, 4096, 77, 8, 160), (4, 4096, 226, 16, 192), (4, 1024, 300, 16, 144)):
        yield Kind("wide text", (b, m, n, h, h, d))
    for b, m, n, h, k, d in (
        (1, 512, 512, 8, 8, 192), (1, 1024, 1024, 8, 8, 192), (2, 512, 512, 6, 6, 160), (2, 128, 2048, 32, 4, 192),
    ):  # fmt: skip
        yield Kind("wide causal, few tiles", (b, m, n, h, k, d), causal)
        yield Kind("wide, few tiles", (b, m, n, h, k, d))
    for b, m, n, h, k, d in ((8, 16, 4096, 96, 8, 192), (16, 8, 2048, 64, 4, 160)):
        yield Kind("wide causal, heads of a group as rows", (b, m, n, h, k, d), causal)
        yield Kind("wide, heads of a group as rows", (b, m, n, h, k, d))
    for lengths in (spread(64, 1024, 48), spread(512, 4096, 8)):
        yield Kind("wide documents", (0, 0, 0, 16, 16, 192), causal, lengths=lengths)
        yield Kind("wide documents", (0, 0, 0, 16, 16, 160), lengths=lengths)


def candidates(tile: Tile, widest: int) -> Iterator[Tile]:
    """Wider and narrower tiles with fewer and more slots, of 128 and 192 rows.

    Of head dims over 128 with and without `Tile.lazy_max` and `Tile.ping_pong` instead.
    """
    plain = replace(tile, half_tile=False)
    if widest > 128:
        either = (False, True)
        for columns, stages, lazy, turns in product((48, 64, 80, 96, 112, 128), (2, 3, 4), either, either):
            if tile.score_tiles and columns % 64:  # the copy engine brings a bias in slabs of 64 columns
                continue
            yield replace(plain, block_n=columns, num_stages=stages, lazy_max=lazy, ping_pong=turns)
        return
    for rows in (128, 192):
        if tile.block_m == 64 or (rows == 192 and tile.score_tiles):
            continue
        for columns in (64, 80, 96, 112, 128):
            if tile.score_tiles and columns % 64:
                continue
            for stages in (2, 3, 4):
                for whole in (tile, plain) if tile.half_tile else (plain,):
                    yield replace(whole, block_m=rows, block_n=columns, num_stages=stages)


def specs_of(kind: Kind, tiles: str = "") -> dict[str, ForwardPlanSpec]:
    """Today's plan, and those of candidates in whose name the regular expression ``tiles`` is found."""
    _, problem = kind.call()
    packed = hopper_forward.packs_heads(problem)
    tile = (hopper_forward.packed_heads_tile if packed else hopper_forward_tile.choose_tile)(problem, NUM_SMS)
    found = {"today": hopper_forward.plan_spec(problem, tile, num_sms=NUM_SMS)}
    for other in candidates(tile, max(problem.head_dim, problem.head_dim_v)):
        if hopper_forward_config.smem_bytes(hopper_forward_config.config_of(problem, other)) > SMEM_LIMIT:
            continue
        spec = hopper_forward.plan_spec(problem, other, num_sms=NUM_SMS)
        if spec not in found.values():
            name = f"{other.block_m}x{other.block_n} s{other.num_stages}{' half' * other.half_tile}"
            for field_name in ("lazy_max", "ping_pong"):
                if (is_on := getattr(other, field_name)) != getattr(tile, field_name):
                    name += f" {'' if is_on else 'no '}{field_name}"
            found[name] = spec
    return {name: spec for name, spec in found.items() if name == "today" or re.search(tiles, name)}


class Runs:
    """Tensors of one problem, and its plans as functions that run over them."""

    def __init__(self, kind: Kind, specs: dict[str, ForwardPlanSpec]) -> None:
        tensors = kind.tensors()
        call, problem = kind.call(tensors)
        tensors["out"] = tensors["q"].new_empty((*tensors["q"].shape[:3], problem.head_dim_v))
        tensors["lse"] = torch.empty(problem.shape_of("lse"), device="cuda")
        self.tensors, stream = tensors, torch.cuda.current_stream().cuda_stream
        self.functions: dict[str, Callable[[], None]] = {
            name: graph_of(runner(ForwardPlan(spec, problem, 0, stream), tensors, call)).replay
            for name, spec in specs.items()
        }

    def result(self, name: str) -> torch.Tensor:
        self.tensors["out"].fill_(torch.nan)
        self.functions[name]()
        return self.tensors["out"].double()

    def wrong(self) -> list[str]:
        """Names of candidates whose output is not today's."""
        expected = self.result("today")
        errors = {name: float((self.result(name) - expected).norm() / expected.norm()) for name in self.functions}
        return [f"{name} {error:.2g}" for name, error in errors.items() if not error < TOLERANCE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="tuned,others")
    parser.add_argument("--only", default="", help="regular expression in a problem's name")
    parser.add_argument("--tiles", default="", help="regular expression in a candidate's name")
    parser.add_argument("--rep", type=int, default=6, help="milliseconds of a measurement")
    parser.add_argument("--compile-only", action="store_true", help="no GPU is needed")
    parser.add_argument("--all", action="store_true", help="also candidates that spill or are serialised")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16))
    arguments = parser.parse_args()
    begin = time.perf_counter()
    parts = {"tuned": (tuned,), "others": (others, wide_others)}
    chosen = [x for part in arguments.part.split(",") for kinds in parts[part] for x in kinds()]
    named = [(f"{x.name} {'x'.join(map(str, x.shape))}", x) for x in chosen]
    work = [(name, x, specs_of(x, arguments.tiles)) for name, x in named if re.search(arguments.only, name)]
    compiled = compile_plans((spec for _, _, specs in work for spec in specs.values()), arguments.workers)
    failed = False
    for name, kind, specs in work:
        bad = {}
        for what, spec in specs.items():
            kernel = compiled[spec.main.config]
            if kernel.spill_bytes or "C7511" in kernel.log:
                bad[what] = f"spills {kernel.spill_bytes}" if kernel.spill_bytes else "serialised"
        if arguments.compile_only:
            print(f"{name} ({label(specs['today'])}): {len(specs) - len(bad)} candidates; left out: {bad}", flush=True)
            continue
        kept = {what: spec for what, spec in specs.items() if what == "today" or arguments.all or what not in bad}
        runs = Runs(kind, kept)
        wrong = runs.wrong()
        times = {what: 1000 * t["ms"] for what, t in in_turn(runs.functions, rep_ms=arguments.rep).items()}
        found = sorted(((times["today"] / us, what) for what, us in times.items() if what != "today"), reverse=True)
        words = [f"{what} {ratio:.3f}" for ratio, what in found] + [f"WRONG {x}" for x in wrong]
        failed |= bool(wrong)
        print(f"{name}: {times['today']:.1f} us ({label(specs['today'])}) | {' | '.join(words)}", flush=True)
        del runs
    print(f"{time.perf_counter() - begin:.0f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
