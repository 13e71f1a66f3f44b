"""Kernels with typical modifiers compile without spills and warnings: forward and backward, head dims 64 and 128."""

from __future__ import annotations

import re
from typing import Any

import modifiers
import numpy as np
import pytest

from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import choose_backward, choose_forward
from nvrtc_attn.jit.compile import compile_kernel
from nvrtc_attn.jit.config import KernelConfig
from nvrtc_attn.modifiers.trace import trace

pytest.importorskip("cuda.bindings.nvrtc")

NAMES = (
    "distance", "alibi", "softcap and alibi", "head scale", "relative bias", "t5", "swin", "rows and columns", "prefix",
    "documents", "dilated", "natten", "both",
)  # fmt: skip
PASSES = ("forward", "backward", "trained")
VARIANTS = [(name, head_dim, which) for name in NAMES for head_dim in (64, 128) for which in PASSES]
SAMPLE = ["alibi-64-forward", "documents-64-forward", "alibi-64-trained"]


def kernels(name: str, head_dim: int, which: str) -> list[KernelConfig]:
    """The kernels with the modifier's text."""
    case = next(x for x in modifiers.named_cases() if x.name == name)
    sizes = (2, 16, 4096, 4096)
    traced = trace(*case.make(case.arrays((2, 4, 8, 8), np.random.default_rng(0))))
    layout = dense_layout((sizes[0], sizes[2], sizes[1], head_dim), "bfloat16")
    problem = AttentionProblem(
        dtype="bfloat16", batch=sizes[0], seqlen_q=sizes[2], seqlen_k=sizes[3], num_heads=sizes[1],
        num_heads_kv=sizes[1], head_dim=head_dim, head_dim_v=head_dim, q=layout, k=layout, v=layout,
        softmax_scale=head_dim**-0.5, modifier=traced.program,
        trained=traced.differentiable if which == "trained" else (),
    )  # fmt: skip
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
    spec = (choose_forward if which == "forward" else choose_backward)(problem, **target)
    return [x.config for x in spec.launches if x.config.features.modifier]


SPILLED = {("rows and columns", 128, "backward"): 4, ("both", 128, "forward"): 8}
"""Bytes that are known, of modifiers with several captured arrays."""


@pytest.mark.slow(sample=SAMPLE)
@pytest.mark.parametrize(("name", "head_dim", "which"), VARIANTS)
def test_a_modifier_compiles_without_spills(name: str, head_dim: int, which: str) -> None:
    for config in kernels(name, head_dim, which):
        kernel = compile_kernel(config)
        assert not re.search("warning", kernel.log), kernel.log
        assert kernel.spill_bytes <= SPILLED.get((name, head_dim, which), 0)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_120"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_targets_compile(arch: str, dtype: str) -> None:
    """Every operation of the grammar that C++ has a spelling for, in a few random modifiers, both passes."""
    if (arch, dtype) == ("sm_75", "float32"):
        pytest.skip("compute capability 7.5 has matrix instructions for float16 only")
    for seed in range(3):
        case = modifiers.random_case(seed)
        traced = trace(*case.make(case.arrays((2, 4, 8, 8), np.random.default_rng(0))))
        layout = dense_layout((2, 512, 4, 64), dtype)
        problem = AttentionProblem(
            dtype=dtype, batch=2, seqlen_q=512, seqlen_k=512, num_heads=4, num_heads_kv=4, head_dim=64, head_dim_v=64,
            q=layout, k=layout, v=layout, softmax_scale=0.125, modifier=traced.program, trained=traced.differentiable,
        )  # fmt: skip
        target: dict[str, Any] = {"arch": arch, "num_sms": 40, "smem_limit": 65536 if arch == "sm_75" else 101376}
        for spec in (choose_forward(problem, **target), choose_backward(problem, **target)):
            for launch in spec.launches:
                if launch.config.features.modifier:
                    assert compile_kernel(launch.config).code
