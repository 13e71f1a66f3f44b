"""The kernels of everyday shapes on an H100 or H200: no spill, no serialised product, whatever NVRTC is installed.

Variants that are not here are in test_hopper_variants.py and test_hopper_backward_variants.py, which take much longer.
.ci/check_nvrtc runs this file with the newest NVRTC of the package index.
"""

from __future__ import annotations

import pytest
from clean_compile import check_clean

from nvrtc_attn.jit.config import KernelConfig
from nvrtc_attn.plans import precompile

pytest.importorskip("cuda.bindings.nvrtc")

LENGTHS = ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))
"""(batch, length) of 16384 tokens: the grid that the benchmarks measure."""


def hot_kernels() -> dict[str, KernelConfig]:
    """Every kernel that the grid launches in bfloat16, forward and backward, each once; with dropout at 4096 tokens."""

    def chosen(head_dim: int, batch: int, length: int, causal: bool, dropout: bool) -> list[KernelConfig]:
        request = precompile.Request(
            arch="sm_90", dtype="bfloat16", head_dim=head_dim, batch=batch, num_heads=2048 // head_dim,
            seqlens=((length, length),), causal=causal, dropout=dropout,
        )  # fmt: skip
        return precompile.configs([request])

    names: dict[KernelConfig, str] = {}
    for causal in (False, True):
        shape = "causal" if causal else "dense"
        for head_dim in (64, 128, 256):
            for batch, length in LENGTHS:
                for config in chosen(head_dim, batch, length, causal, False):
                    names.setdefault(config, f"{config.kernel}-d{head_dim}-{shape}-{batch}x{length}")
        for head_dim in (64, 128):
            for config in chosen(head_dim, 4, 4096, causal, True):
                names.setdefault(config, f"{config.kernel}-d{head_dim}-{shape}-dropout")
    return {name: config for config, name in names.items()}


HOT = hot_kernels()


@pytest.mark.slow
@pytest.mark.compiles(kernels=lambda name: [HOT[name]])
@pytest.mark.parametrize("name", HOT)
def test_hot_kernel_compiles_clean(name: str) -> None:
    kernel = check_clean(HOT[name])
    assert kernel.num_regs is not None
    assert kernel.num_regs * 32 * HOT[name].num_warps * HOT[name].min_blocks_per_sm <= 65536


def test_grid_is_on_the_kernels_that_are_tuned_for_it() -> None:
    kinds = {config.kernel for config in HOT.values()}
    assert {"forward_hopper", "backward_hopper", "backward_hopper_wide"} <= kinds
    assert not any("portable" in kind for kind in kinds)
