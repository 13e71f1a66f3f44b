"""What a heuristic hands to the launcher: kernels in order, their grids, and the workspace that connects them."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import KernelConfig
from ..tma import TensorMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel of a plan.

    ``grid`` and ``block`` are one-dimensional, ``smem_bytes`` is dynamic shared memory. ``params`` are the fields of
    the params struct that differ between launches (``num_m_blocks`` and the like), set just before this one.
    """

    config: KernelConfig
    grid: int
    block: int
    smem_bytes: int
    params: tuple[tuple[str, int], ...] = ()
    tensor_maps: tuple[TensorMap, ...] = ()
    """What the copy engine reads, encoded into the params for the addresses of each run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """One temporary buffer, aligned to 16 bytes at least.

    ``field`` is the pointer of the params struct that receives its address and ``params`` the fields (strides in
    elements, counts) that describe it to every launch. ``zeroed``: the host clears it before the first launch; the
    others are written by a kernel before any kernel reads them.
    """

    field: str
    nbytes: int
    params: tuple[tuple[str, int], ...] = ()
    zeroed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPlanSpec:
    """Launches in stream order. Fields of the params struct that nothing here names come from the problem."""

    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...]

    @property
    def workspace_bytes(self) -> int:
        """Total of all workspaces, each rounded up to 256 bytes."""
        return sum(-(-w.nbytes // 256) * 256 for w in self.workspaces)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlanSpec:
    """The forward pass: one kernel, or with ``num_splits`` > 1 one over key splits and one that combines them."""

    launches: tuple[Launch, ...]
    num_splits: int = 1
    out_partial_bytes: int = 0
    lse_partial_bytes: int = 0

    @property
    def workspaces(self) -> tuple[Workspace, ...]:
        """The partial results between the two kernels; none without splits."""
        if self.num_splits == 1:
            return ()
        return (
            Workspace(field="out_partial", nbytes=self.out_partial_bytes, params=(("num_splits", self.num_splits),)),
            Workspace(field="lse_partial", nbytes=self.lse_partial_bytes),
        )
