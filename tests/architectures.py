"""Which compile targets stand for which in the tests."""

from __future__ import annotations

from nvrtc_attn.base.architectures import ARCHITECTURES, PORTABLE_ARCHITECTURES


def architecture_class(arch: str) -> tuple[int, int, bool]:
    """What kernels are written and tiled for: instructions by major version, shared memory, ``a`` for WGMMA and TMA."""
    found = ARCHITECTURES[arch]
    return found.compute_capability[0], found.smem_per_block_optin, arch.endswith("a")


ONE_OF_EACH_CLASS = tuple({architecture_class(arch): arch for arch in reversed(PORTABLE_ARCHITECTURES)}.values())[::-1]
"""The first target of every class of the portable family: sm_75, sm_80, sm_86, sm_90, ..."""


TWINS = (*(arch for arch in PORTABLE_ARCHITECTURES if arch not in ONE_OF_EACH_CLASS), "sm_110")
"""The others, and sm_110 beside sm_100: instructions and tiles as of a target before them. Few variants are theirs."""


def untuned_spill_bytes() -> int:
    """Spills that variants outside of test_hot_variants may have: none with NVRTC 13.0, which tables are tuned with.

    Measured with 13.5: 8 bytes in the packed causal backward of shared key heads, 4 in the Hopper one with a mask.
    """
    from nvrtc_attn.jit import nvrtc_library

    return 8 if nvrtc_library.nvrtc().version > (13, 0) else 0
