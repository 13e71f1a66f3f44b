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
from nvrtc_attn.jit.compile import compile_kernel
from nvrtc_attn.jit.config import KernelConfig
from nvrtc_attn.modifiers.cuda_tiles import tile_source
from nvrtc_attn.modifiers.trace import trace

pytest.importorskip("cuda.bindings.nvrtc")

NAMES = ("causal documents", "prefix of documents", "natten", "block diffusion", "blocks", "circle")
# Each mask at one head dim for each family, the two heaviest at both: what walks tiles does not depend on the mask.
VARIANTS = [
    (name, head_dim, backend)
    for i, name in enumerate(NAMES)
    for j, head_dim in enumerate((64, 128))
    for k, backend in enumerate(("hopper", "portable"))
    if name in ("causal documents", "prefix of documents") or (i + j + k) % 2
]
SPILLED: dict[tuple[str, int, str], int] = {
    ("prefix of documents", 128, "backward_portable"): 20,
    ("prefix of documents", 128, "forward_hopper"): 8,
}
"""Bytes that are known. The Hopper kernel's are one counter, stored and loaded once a tile of queries."""


def kernels(
    name: str, head_dim: int = 64, arch: str = "sm_90", dtype: str = "bfloat16", backend: str = "portable"
) -> list[KernelConfig]:
    """The kernels that find tiles and those that walk them, of both passes."""
    case = next(x for x in modifiers.sparse_cases() if x.name == name)
    traced = trace(*case.make(case.arrays((2, 4, 90, 90), np.random.default_rng(0))))
    layout = dense_layout((2, 4096, 16, head_dim), dtype)
    problem = AttentionProblem(
        dtype=dtype, batch=2, seqlen_q=4096, seqlen_k=4096, num_heads=16, num_heads_kv=16, head_dim=head_dim,
        head_dim_v=head_dim, q=layout, k=layout, v=layout, softmax_scale=head_dim**-0.5, modifier=traced.program,
    )  # fmt: skip
    target: dict[str, Any] = {"arch": arch, "num_sms": 132, "smem_limit": 232448 if arch == "sm_90" else 65536}
    specs = [x(problem, **target, backend=backend) for x in (heuristics.choose_forward, heuristics.choose_backward)]
    found = [launch.config for spec in specs for launch in spec.launches if launch.config.features.tile_words]
    assert len(found) == 4
    return found


@pytest.mark.slow(sample=["causal documents-64-hopper"])
@pytest.mark.parametrize(("name", "head_dim", "backend"), VARIANTS)
def test_kernels_do_not_spill(name: str, head_dim: int, backend: str) -> None:
    for config in kernels(name, head_dim, backend=backend):
        assert config.kernel.endswith((backend, "tile_ranges"))
        kernel = compile_kernel(config)
        assert not re.search("warning", kernel.log), kernel.log
        assert kernel.spill_bytes <= SPILLED.get((name, head_dim, config.kernel), 0), config.kernel


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
    case = modifiers.random_mask(seed)
    traced = trace(*case.make(case.arrays((2, 3, 90, 90), np.random.default_rng(0))))
    assert traced.program.mask is not None
    config = next(x for x in kernels("natten", arch=arch, dtype="float16") if x.kernel == "tile_ranges")
    features = replace(config.features, modifier=tile_source(traced.program))
    kernel = compile_kernel(replace(config, features=features))
    assert kernel.code
    assert not re.search("error|warning", kernel.log), kernel.log
