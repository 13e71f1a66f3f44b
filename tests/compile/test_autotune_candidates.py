"""What `autotune` may choose compiles without a spill, like the table's own choices; a sample of the problems."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import backward_candidates, forward_candidates
from nvrtc_attn.jit.compile import compile_kernel
from nvrtc_attn.jit.config import KernelConfig

pytest.importorskip("cuda.bindings.nvrtc")

TARGETS: dict[str, dict[str, Any]] = {
    "sm_90": {"num_sms": 132, "smem_limit": 232448},
    "sm_80": {"num_sms": 108, "smem_limit": 166912},
}


def problem(head_dim: int, seqlen: int = 2048, dtype: str = "bfloat16", **changes: Any) -> AttentionProblem:
    layout = dense_layout((4, seqlen, 16, head_dim), dtype)
    values: dict[str, Any] = {
        "dtype": dtype, "batch": 4, "seqlen_q": seqlen, "seqlen_k": seqlen, "num_heads": 16, "num_heads_kv": 16,
        "head_dim": head_dim, "head_dim_v": head_dim, "q": layout, "k": layout, "v": layout,
        "softmax_scale": head_dim**-0.5,
    }  # fmt: skip
    return AttentionProblem(**{**values, **changes})


BIAS = dense_layout((4, 16, 2048, 2048), "bfloat16")
PROBLEMS: dict[str, tuple[str, AttentionProblem]] = {
    "d64": ("sm_90", problem(64)),
    "d64_causal_short": ("sm_90", problem(64, 1024, window_right=0)),
    "d128_causal": ("sm_90", problem(128, window_right=0)),
    "d96_causal": ("sm_90", problem(96, window_right=0)),
    "d256_causal": ("sm_90", problem(256, window_right=0)),
    "d64_packed": ("sm_90", problem(64, varlen=True)),
    "d64_packed_causal": ("sm_90", problem(64, varlen=True, window_right=0)),
    "d64_bias": ("sm_90", problem(64, bias=BIAS)),
    "d128_dropout": ("sm_90", problem(128, dropout_p=0.1, window_right=0)),
    "d32_short": ("sm_90", problem(32, 49)),
    "d64_of_an_image": ("sm_90", problem(64, 197)),
    "d80_causal": ("sm_90", problem(80, window_right=0)),
    "d72_packed": ("sm_90", problem(72, varlen=True)),
    "d192_128_causal": (
        "sm_90",
        problem(192, head_dim_v=128, v=dense_layout((4, 2048, 16, 128), "bfloat16"), window_right=0),
    ),
    "d128_packed_causal": ("sm_90", problem(128, varlen=True, window_right=0)),
    "d128_sm_80": ("sm_80", problem(128, dtype="float16")),
}


def configs(arch: str, asked: AttentionProblem) -> list[KernelConfig]:
    """Kernels of the candidates but the first, and of its family: other tests have the tables' choices."""
    found: dict[KernelConfig, None] = {}
    for list_them in (forward_candidates, backward_candidates):
        specs: dict[str, Any] = list_them(asked, arch=arch, **TARGETS[arch])  # type: ignore[operator]
        first, *others = specs
        family = first.split()[0]
        found.update((launch.config, None) for x in others if x.startswith(family) for launch in specs[x].launches)
    assert found
    return list(found)


@pytest.mark.slow(sample=["d256_causal"])
@pytest.mark.compiles(kernels=lambda name: configs(*PROBLEMS[name]))
@pytest.mark.parametrize("name", PROBLEMS)
def test_candidates_compile_clean(name: str) -> None:
    for config in configs(*PROBLEMS[name]):
        kernel = compile_kernel(config)
        assert not re.search(r"C75\d\d|warning", kernel.log), kernel.log
        assert kernel.spill_bytes == 0, config
