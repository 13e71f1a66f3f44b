"""Kernels of masks with whole tiles of nothing: what finds the tiles compiles, what walks them does not spill."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import modifiers
import numpy as np
import pytest
from architectures import ONE_OF_EACH_CLASS

from nvrtc_attn import heuristics
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import tile_words
from nvrtc_attn.jit.compile import compile_kernel
from nvrtc_attn.jit.config import KernelConfig
from nvrtc_attn.modifiers.cuda_tiles import tile_source
from nvrtc_attn.modifiers.trace import trace

pytest.importorskip("cuda.bindings.nvrtc")

NAMES = ("causal documents", "prefix of documents", "natten", "block diffusion", "blocks", "circle")
# Each mask at one head dim for each way, the two heaviest at both: what walks tiles does not depend on the mask.
WAYS = ("hopper", "portable", "every head")
"""The last one: Hopper kernels that ask the mask in every head, without a launch that does for all of them."""
VARIANTS = [
    (name, head_dim, backend)
    for i, name in enumerate(NAMES)
    for j, head_dim in enumerate((64, 128))
    for k, backend in enumerate(WAYS)
    if name in ("causal documents", "prefix of documents") or (i + j + k) % 2
]
SPILLED: dict[tuple[str, int, str], int] = {
    ("prefix of documents", 128, "backward_portable"): 20,
    ("prefix of documents", 128, "forward_hopper"): 8,
}
"""Bytes that are known. The Hopper kernel's, of the last way, are one counter, stored and loaded once a query tile."""


TARGET: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}


def problem_of(name: str, head_dim: int, dtype: str = "bfloat16") -> AttentionProblem:
    case = next(x for x in modifiers.sparse_cases() if x.name == name)
    traced = trace(*case.make(case.arrays((2, 4, 90, 90), np.random.default_rng(0))))
    layout = dense_layout((2, 4096, 16, head_dim), dtype)
    return AttentionProblem(
        dtype=dtype, batch=2, seqlen_q=4096, seqlen_k=4096, num_heads=16, num_heads_kv=16, head_dim=head_dim,
        head_dim_v=head_dim, q=layout, k=layout, v=layout, softmax_scale=head_dim**-0.5, modifier=traced.program,
    )  # fmt: skip


def kernels(
    name: str, head_dim: int = 64, backend: str = "portable", arch: str = "sm_90", dtype: str = "bfloat16"
) -> list[KernelConfig]:
    """The kernels that find tiles, and in the Hopper backward pass their order, and those that walk them."""
    problem = problem_of(name, head_dim, dtype)
    target = TARGET if arch == "sm_90" else {"arch": arch, "num_sms": 132, "smem_limit": 65536}
    family = "hopper" if backend == "every head" else backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_words, "KEEPS_BITS", backend != "every head")
        specs = [x(problem, **target, backend=family) for x in (heuristics.choose_forward, heuristics.choose_backward)]
    found = [launch.config for spec in specs for launch in spec.launches if launch.config.features.tile_words]
    assert len(found) == {"hopper": 7, "every head": 5}.get(backend, 4)
    return found


@pytest.mark.compiles(kernels=kernels, in_table=False)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "head_dim", "backend"), VARIANTS)
def test_kernels_do_not_spill(name: str, head_dim: int, backend: str) -> None:
    for config in kernels(name, head_dim, backend):
        walks = "portable" if backend == "portable" else "hopper"
        assert config.kernel.endswith((walks, "prepare", "tile_ranges", "tile_bits"))
        assert config.tile_bits == (backend == "hopper" and not config.kernel.endswith("prepare"))
        kernel = compile_kernel(config)
        assert not re.search("warning", kernel.log), kernel.log
        known = 0 if config.tile_bits else SPILLED.get((name, head_dim, config.kernel), 0)
        assert kernel.spill_bytes <= known, config.kernel


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal documents", "natten", "prefix of documents"])
def test_other_tiles_with_bits_do_not_spill(name: str) -> None:
    """Those that the autotuner tries."""
    problem = problem_of(name, 64)
    found = {}
    for candidates in (heuristics.forward_candidates, heuristics.backward_candidates):
        plans = candidates(problem, **TARGET)
        mains = [next(y.config for y in x.launches if y.config.kernel.endswith("ward_hopper")) for x in plans.values()
                 if any(y.config.tile_bits for y in x.launches)]  # fmt: skip
        found |= {f"{x.kernel} {x.block_m}x{x.block_n}": compile_kernel(x) for x in mains if x.tile_bits}
    assert {"forward_hopper 192x112", "forward_hopper 128x128", "backward_hopper 64x128"} <= set(found)
    for label, kernel in found.items():
        assert not re.search("warning", kernel.log), label
        assert kernel.spill_bytes == 0, label


def ranges_of_random_mask(arch: str, seed: int) -> list[KernelConfig]:
    case = modifiers.random_mask(seed)
    traced = trace(*case.make(case.arrays((2, 3, 90, 90), np.random.default_rng(0))))
    assert traced.program.mask is not None
    config = next(x for x in kernels("natten", arch=arch, dtype="float16") if x.kernel == "tile_ranges")
    return [replace(config, features=replace(config.features, modifier=tile_source(traced.program)))]


@pytest.mark.compiles(kernels=ranges_of_random_mask, in_table=False)
@pytest.mark.slow(sample=[f"{arch}-0" for arch in ONE_OF_EACH_CLASS])
@pytest.mark.parametrize(
    ("arch", "seed"),
    [
        (arch, seed)
        for seed in range(12)
        for i, arch in enumerate(ONE_OF_EACH_CLASS)
        if seed == 0 or seed % len(ONE_OF_EACH_CLASS) == i
    ],
)
def test_ranges_of_everything_compile_everywhere(arch: str, seed: int) -> None:
    """Every operation that a mask may have, in random ones: one for every class, the others for one class each.

    No line of this kernel asks for the architecture.
    """
    (config,) = ranges_of_random_mask(arch, seed)
    kernel = compile_kernel(config)
    assert kernel.code
    assert not re.search("error|warning", kernel.log), kernel.log


def launches_with_functions() -> list[KernelConfig]:
    """The launches before a kernel whose scores have functions of a head's number: they are given the scores, too."""
    table = np.ones(4096, np.float32)
    unary = (np.exp, np.exp2, np.expm1, np.log, np.log2, np.log1p, np.sqrt, np.tanh, np.sin, np.cos, np.arctan, np.sign)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        x = 0.1 * h + 0.5
        for function in unary:
            score = score + function(x)
        return score * table[q]

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q // 100 == k // 100) & (table[k] > 0)

    traced = trace(score_mod, mask_mod)
    problem = replace(problem_of("natten", 64), modifier=traced.program)
    return [launch.config for launch in heuristics.choose_forward(problem, **TARGET).launches[:-1]]


@pytest.mark.compiles(kernels=launches_with_functions, in_table=False)
def test_launches_before_a_kernel_know_the_functions_of_scores() -> None:
    """What asks the mask is given the text of the whole modifier, and would not compile without them."""
    found = launches_with_functions()
    assert [config.kernel for config in found] == ["tile_ranges", "tile_bits"]
    for config in found:
        assert compile_kernel(config).code, config.kernel
