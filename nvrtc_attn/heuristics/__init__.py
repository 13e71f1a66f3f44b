"""Problem and device -> the kernels to launch. Pure functions: ``portable_*`` and ``hopper_*`` are the two families.

Imports ``front`` for problems, of ``jit`` the configs, and ``base``: no CUDA, so a choice can be looked at anywhere.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

from ..base.errors import UnsupportedError
from ..base.log import log_once
from ..front.operands import OPERANDS
from ..front.problem import LIKE_Q, AttentionProblem
from ..jit.config import HopperBackwardConfig, HopperForwardConfig
from ..modifiers.derivative import check_derivatives
from .common import is_float32
from .spec import BackwardPlanSpec, ForwardPlanSpec, label

MAX_CANDIDATES: Final = 8
"""Plans of one pass that are measured: each may have kernels of its own to compile, 1 to 5 s the first time."""
_MAX_HOPPER: Final = 5
_Spec = TypeVar("_Spec", ForwardPlanSpec, BackwardPlanSpec)


def choose_forward(
    problem: AttentionProblem,
    *,
    arch: str,
    num_sms: int,
    smem_limit: int,
    backend: str = "auto",
    clusters: bool = True,
) -> ForwardPlanSpec:
    """Kernels of the forward pass.

    Parameters
    ----------
    arch
        Compile target of the portable family, for example ``sm_90``.
    num_sms, smem_limit
        Multiprocessors, and bytes of shared memory that one block may ask for.
    backend
        ``auto`` chooses the Hopper kernel on compute capability 9.0 where there is one for the problem and it is the
        faster one, and the portable family elsewhere; why not the Hopper kernel is logged once a reason, at debug
        level. ``hopper`` prefers the Hopper kernel wherever there is one, and warns once where there is none.
        ``portable`` forces the portable family, ``legacy`` its instruction set of compute capability 7.5 on any GPU.
    clusters
        The device launches clusters of thread blocks, where its architecture has them: a slice of one may not.

    Raises
    ------
    UnsupportedError
        No kernel serves the problem; carries every reason.
    """
    from . import portable_forward

    _check_part(problem)
    whole = problem.as_whole()
    if whole is not None:
        target: dict[str, Any] = {"arch": arch, "smem_limit": smem_limit, "backend": backend, "clusters": clusters}
        return _forward_as(choose_forward(whole, num_sms=num_sms, **target), problem, num_sms=num_sms, **target)
    num_sms = _left(problem, num_sms)
    if _asks_for_hopper(arch, backend):
        from . import hopper_forward

        found = hopper_forward.choose_forward(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit)
        if not isinstance(found, list) and backend == "auto":
            found = hopper_forward.slower(problem, found, num_sms=num_sms) or found
        if not isinstance(found, list):
            return found
        _log_portable("forward: the portable kernel", found, backend)
    return portable_forward.choose_forward(
        problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit, legacy_mma=_legacy(arch, backend), clusters=clusters
    )


def narrower_forward(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int, backend: str = "auto"
) -> list[ForwardPlanSpec]:
    """What to take, best first, where the kernel of `choose_forward` spills, as one with an unknown modifier may.

    None of the portable family, whose tiles leave registers; arguments as in `choose_forward`.
    """
    from . import hopper_forward

    target: dict[str, Any] = {"arch": arch, "num_sms": num_sms, "smem_limit": smem_limit}
    if choose_forward(problem, **target, backend=backend).main.config.kernel != "forward_hopper":
        return []
    return hopper_forward.narrower(problem, num_sms=num_sms)


def choose_backward(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int, backend: str = "auto"
) -> BackwardPlanSpec:
    """Kernels of the backward pass; arguments, errors and what ``backend`` means as in `choose_forward`."""
    from . import portable_backward

    _check_part(problem)
    if problem.modifier is not None:
        check_derivatives(problem.modifier.score, problem.trained)
    whole = problem.as_whole()
    if whole is not None:
        target: dict[str, Any] = {"arch": arch, "smem_limit": smem_limit, "backend": backend}
        return _backward_as(choose_backward(whole, num_sms=num_sms, **target), problem, num_sms=num_sms, **target)
    num_sms = _left(problem, num_sms)
    plain = not (_legacy(arch, backend) or is_float32(problem, "dq", "dk", "dv"))
    short = None
    if backend in ("auto", "portable") and plain:
        short = portable_backward.short_plan(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit)
    if _asks_for_hopper(arch, backend):
        from . import hopper_backward

        if short is not None and not hopper_backward.is_ahead_of_short(problem, num_sms):
            return short
        found = hopper_backward.choose_backward(problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit)
        if not isinstance(found, list) and backend == "auto":
            found = hopper_backward.slower(problem, found, num_sms=num_sms, smem_limit=smem_limit) or found
        if not isinstance(found, list):
            return found
        _log_portable("backward: the portable kernels", found, backend)
    if short is not None:
        return short
    return portable_backward.choose_first(
        problem, arch=arch, num_sms=num_sms, smem_limit=smem_limit, legacy_mma=_legacy(arch, backend)
    )


def forward_candidates(
    problem: AttentionProblem,
    *,
    arch: str,
    num_sms: int,
    smem_limit: int,
    backend: str = "auto",
    clusters: bool = True,
) -> dict[str, ForwardPlanSpec]:
    """Plans that may be the fastest for ``problem``, by `plan.label`: the choice of `choose_forward`, then others.

    All are rows of the tables and compute the same: what ``deterministic`` promises, the dropout mask and which rows
    are empty do not depend on the plan; roundings do. Arguments and errors as in `choose_forward`.
    """
    from . import hopper_forward, portable_forward

    target: dict[str, Any] = {"arch": arch, "num_sms": num_sms, "smem_limit": smem_limit}
    chosen = choose_forward(problem, **target, backend=backend, clusters=clusters)
    portable = functools.partial(portable_forward.candidates, clusters=clusters)
    return _by_label(chosen, hopper_forward.candidates, portable, problem, target, backend)


def backward_candidates(
    problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int, backend: str = "auto"
) -> dict[str, BackwardPlanSpec]:
    """Plans for the backward pass, as `forward_candidates`."""
    from . import hopper_backward, portable_backward

    target: dict[str, Any] = {"arch": arch, "num_sms": num_sms, "smem_limit": smem_limit}
    chosen = choose_backward(problem, **target, backend=backend)
    return _by_label(chosen, hopper_backward.candidates, portable_backward.candidates, problem, target, backend)


def _by_label(
    chosen: _Spec,
    hopper_candidates: Callable[..., list[_Spec]],
    portable_candidates: Callable[..., list[_Spec]],
    problem: AttentionProblem,
    target: dict[str, Any],
    backend: str,
) -> dict[str, _Spec]:
    arch = target["arch"]
    hopper = hopper_candidates(problem, **target) if _asks_for_hopper(arch, backend) else []
    portable: list[_Spec] = []
    if backend != "hopper" or not hopper:
        portable = portable_candidates(problem, **target, legacy_mma=_legacy(arch, backend))
    found: dict[str, _Spec] = {label(chosen): chosen}
    if hopper and next(iter(found)).startswith("hopper"):
        portable = portable[:1]  # 1.2 to 1.9 times the time, wherever it was measured (H200, 2026-11-21)
    for spec in hopper[:_MAX_HOPPER] + portable:
        name = label(spec)
        if name not in found and len(found) < MAX_CANDIDATES:
            found[name] = spec
    return found


def _forward_as(
    like: ForwardPlanSpec,
    problem: AttentionProblem,
    *,
    arch: str,
    num_sms: int,
    smem_limit: int,
    backend: str,
    clusters: bool,
) -> ForwardPlanSpec:
    """The plan of a part with the kernel and the tile of the whole's plan."""
    from . import hopper_forward, portable_forward

    part = replace(problem, plan_as=None)
    left, config = _left(problem, num_sms), like.main.config
    if isinstance(config, HopperForwardConfig):
        found = hopper_forward.plan_like(like, part, arch=arch, num_sms=left, smem_limit=smem_limit)
        if not isinstance(found, list):
            return found
        _log_unlike("forward", found)
        return choose_forward(
            part, arch=arch, num_sms=num_sms, smem_limit=smem_limit, backend=backend, clusters=clusters
        )
    of_cluster = getattr(config, "cluster", 1)
    return portable_forward.choose_forward(
        part, arch=arch, num_sms=left, smem_limit=smem_limit, legacy_mma=_legacy(arch, backend), like=config,
        num_splits=max(like.num_splits, of_cluster), clustered=of_cluster > 1, clusters=clusters,
    )  # fmt: skip


def _backward_as(
    like: BackwardPlanSpec, problem: AttentionProblem, *, arch: str, num_sms: int, smem_limit: int, backend: str
) -> BackwardPlanSpec:
    """The plan of a part by the family of the whole's plan: the order in which dq is added up is that of its keys."""
    from . import hopper_backward

    part = replace(problem, plan_as=None)
    config = next((x.config for x in like.launches if x.config.kernel == "backward_hopper"), None)
    if isinstance(config, HopperBackwardConfig):
        left = _left(problem, num_sms)
        found = hopper_backward.plan_like(config, part, arch=arch, num_sms=left, smem_limit=smem_limit)
        if not isinstance(found, list):
            return found
        _log_unlike("backward", found)
    elif backend == "auto":
        backend = "portable"
    return choose_backward(part, arch=arch, num_sms=num_sms, smem_limit=smem_limit, backend=backend)


def _log_unlike(what: str, reasons: list[str]) -> None:
    log_once(f"{what}: a part cannot have the kernel of the whole, so bits may differ: {'; '.join(reasons)}")


def _check_part(problem: AttentionProblem) -> None:
    """Refuse what the CPU path alone does, of parts of a larger attention."""
    reasons = []
    if is_float32(problem, *LIKE_Q):
        if problem.varlen:
            reasons.append("float32 results of packed sequences, which are whole")
        if problem.dk is not None and problem.dv is not None and problem.dk.dtype != problem.dv.dtype:
            reasons.append(f"dk is {problem.dk.dtype} and dv {problem.dv.dtype}: the kernels write both alike")
    if problem.dropout_pitches is not None:
        behind = [name for name in problem.further_inputs if OPERANDS[name].behind]
        reasons += [f"{name} is given, which no kernel reads beside dropout of a part" for name in behind]
    elif problem.device_starts:
        behind = [name for name in problem.further_inputs if OPERANDS[name].behind]
        reasons += [f"{name} is given, which no kernel reads beside starts on the device" for name in behind]
    if reasons:
        raise UnsupportedError("no GPU kernel computes this. The CPU path does.", reasons)


def _left(problem: AttentionProblem, num_sms: int) -> int:
    """Multiprocessors that the kernels of a problem may count on."""
    return max(num_sms - (problem.sm_margin or 0), 1)


def _asks_for_hopper(arch: str, backend: str) -> bool:
    return backend == "hopper" or (backend == "auto" and arch == "sm_90")


def _log_portable(chosen: str, reasons: list[str], backend: str) -> None:
    level = logging.WARNING if backend == "hopper" else logging.DEBUG
    log_once(f"{chosen} instead of the Hopper one: {'; '.join(reasons)}", level)


def _legacy(arch: str, backend: str) -> bool:
    return backend == "legacy" or arch == "sm_75"
