"""Problem and device -> the kernels to launch. Pure functions, one module per kernel family."""

from __future__ import annotations

from ..problem import AttentionProblem
from .plan import BackwardPlanSpec, ForwardPlanSpec


def choose_forward(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int, backend: str = "auto"
) -> ForwardPlanSpec:
    """Kernels of the forward pass.

    Parameters
    ----------
    arch
        Compile target of the portable family, for example ``sm_90``.
    num_sms, smem_limit
        Multiprocessors, and bytes of shared memory that one block may ask for.
    backend
        ``auto`` or ``portable``; ``legacy`` forces the instruction set of compute capability 7.5 on any GPU.

    Raises
    ------
    UnsupportedError
        No kernel serves the problem; carries every reason.
    """
    from . import portable_forward

    return portable_forward.choose_forward(
        problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit, legacy_mma=_legacy(arch, backend)
    )


def choose_backward(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int, backend: str = "auto"
) -> BackwardPlanSpec:
    """Kernels of the backward pass; arguments as in `choose_forward`."""
    from . import portable_backward

    return portable_backward.choose_backward(
        problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit, legacy_mma=_legacy(arch, backend)
    )


def _legacy(arch: str, backend: str) -> bool:
    return backend == "legacy" or arch == "sm_75"
