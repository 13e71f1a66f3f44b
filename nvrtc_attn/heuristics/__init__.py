"""Problem and device -> the kernels to launch. Pure functions, one module per kernel family."""

from __future__ import annotations

import logging

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
        ``auto`` and ``portable`` choose the portable family. ``hopper`` prefers the Hopper kernel where there is one
        for the problem, and says once in the log where there is none. ``legacy`` forces the instruction set of compute
        capability 7.5 on any GPU.

    Raises
    ------
    UnsupportedError
        No kernel serves the problem; carries every reason.
    """
    from . import portable_forward

    if backend == "hopper":
        from . import hopper_forward

        found = hopper_forward.choose_forward(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit)
        if not isinstance(found, list):
            return found
        _log_once("forward: the portable kernel instead of the Hopper one: " + "; ".join(found))
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


_logged: set[str] = set()


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logging.getLogger("nvrtc_attn").warning(message)


def _legacy(arch: str, backend: str) -> bool:
    return backend == "legacy" or arch == "sm_75"
