"""Kernels of parts of a larger attention: those with dropout differ from the whole's, the others are the same."""

from __future__ import annotations

from typing import Any

import pytest

from nvrtc_attn import heuristics
from nvrtc_attn.front.call import CallOptions, describe_shapes
from nvrtc_attn.front.part import Part
from nvrtc_attn.front.tensors import Device
from nvrtc_attn.jit.compile import compile_kernel
from nvrtc_attn.jit.config import KernelConfig

pytest.importorskip("cuda.bindings.nvrtc")

PART = Part(heads=(4, 32), rows=(1024, 8192), keys=(0, 8192))


def configs(
    part: Part | None, arch: str, dtype: str = "bfloat16", queries: int = 1024, head_dim: int = 64, **options: Any
) -> list[KernelConfig]:
    """Every kernel of both passes."""
    heads = (8, 4, 4)
    shapes = {
        name: ((2, length, count, head_dim), dtype)
        for name, length, count in zip("qkv", (queries, 1024, 1024), heads, strict=True)
    }
    if options.pop("mask", False):
        shapes["mask"] = ((2, 1, queries, 1024), "bool")
    call = describe_shapes(shapes, CallOptions(return_lse=True, part=part, **options), Device("cuda", 0))
    target: dict[str, Any] = {"arch": arch, "num_sms": 132, "smem_limit": 232448 if arch == "sm_90" else 101376}
    problem = call.with_dense()
    launches = heuristics.choose_forward(problem, **target).launches
    launches += heuristics.choose_backward(problem, **target).launches
    return list(dict.fromkeys(launch.config for launch in launches))


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("sm_90", {}), ("sm_90", {"causal": True, "head_dim": 128}), ("sm_90", {"mask": True}),
        ("sm_89", {"mask": True}), ("sm_90", {"head_dim": 192}), ("sm_89", {}),
        ("sm_89", {"queries": 1, "causal": True}), ("sm_75", {"dtype": "float16"}), ("sm_90", {"dtype": "float32"}),
    ],
)  # fmt: skip
def test_kernels_with_dropout_of_a_part_compile_and_do_not_spill(arch: str, changes: dict[str, Any]) -> None:
    """The asserts in the entry file check the params, which have the sizes of the whole behind all others."""
    found = configs(PART, arch, dropout_p=0.1, **changes)
    assert any(config.features.part for config in found)
    for config in found:
        if config.features.part and config.kernel != "backward_portable":  # at the limit of registers without it
            assert compile_kernel(config).spill_bytes == 0, config
        elif config.features.part:
            compile_kernel(config)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 20)}, {"softcap": 10.0}])
def test_parts_without_dropout_run_the_kernels_of_whole_calls(options: dict[str, Any]) -> None:
    """A band in another place, which params say; where the part sees everything there is no band at all."""
    assert not any(config.features.part for config in configs(PART, "sm_90", **options))
    diagonal = Part(rows=(1024, 8192), keys=(1024, 8192))
    assert configs(diagonal, "sm_90", causal=True) == configs(None, "sm_90", causal=True)
    assert not any(
        config.features.band for config in configs(Part(rows=(4096, 8192), keys=(0, 8192)), "sm_90", causal=True)
    )


def test_whole_calls_have_kernels_of_whole_calls() -> None:
    whole = Part(rows=(0, 1024), keys=(0, 1024))
    assert configs(whole, "sm_90", dropout_p=0.1) == configs(None, "sm_90", dropout_p=0.1)
