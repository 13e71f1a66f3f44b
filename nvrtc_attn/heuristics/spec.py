"""What a heuristic hands to the launcher: kernels in order, their grids, and the workspace that connects them."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Final

from ..jit.config import KernelConfig
from .tensor_map import TensorMap

HOPPER_BACKWARD: Final = ("backward_hopper", "backward_hopper_wide")
"""The dk/dv kernels of the Hopper family. A plan of theirs need not begin with another launch."""


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
    overlaps: bool = False
    """It may begin before the launch ahead of it has ended: its kernel waits for that one, in every thread block
    (``cuda_src/nvrtc_attn/common/overlapping_launch.cuh``). Where the GPU or the driver cannot, it begins behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """One temporary buffer, aligned to 16 bytes at least.

    ``field`` is the pointer of the params struct that receives its address, ``params`` the fields (strides in elements,
    counts) that describe it to every launch. Where it is not ``zeroed`` by the host, a kernel writes it first.
    """

    field: str
    nbytes: int
    params: tuple[tuple[str, int], ...] = ()
    zeroed: bool = False
    zeroed_bytes: int = 0
    """Of its beginning alone, where not all of a ``zeroed`` one is."""


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
    """The forward pass: one kernel, with ``num_splits`` > 1 one over key splits and one that combines them.

    Before the Hopper kernel on packed sequences there is one that lists their tiles.
    """

    launches: tuple[Launch, ...]
    num_splits: int = 1
    out_partial_bytes: int = 0
    softmax_partial_bytes: int = 0
    tile_list_bytes: int = 0
    """Of the list that the first of two launches makes: the tiles of packed sequences."""
    ticket_bytes: int = 0
    """Of the counter of tiles that were handed out."""
    keep_words_bytes: int = 0
    """Of dropout's decisions, which the first launch makes."""
    tile_words_bytes: int = 0
    """Of the words that the first launch makes: the tiles that a mask leaves anything of; and of bits behind them."""

    @property
    def workspaces(self) -> tuple[Workspace, ...]:
        """Partial results of splits with words of tiles behind them, or a list of tiles; none with one kernel."""
        nbytes = self.softmax_partial_bytes + self.tile_words_bytes + self.tile_list_bytes + self.ticket_bytes
        nbytes += self.keep_words_bytes
        tickets = self.ticket_bytes
        statistics = Workspace(field="softmax_partial", nbytes=nbytes, zeroed=tickets > 0, zeroed_bytes=tickets)
        if not self.out_partial_bytes:
            return (statistics,) if statistics.nbytes else ()
        return (
            Workspace(field="out_partial", nbytes=self.out_partial_bytes, params=(("num_splits", self.num_splits),)),
            statistics,
        )

    @property
    def main(self) -> Launch:
        """The launch of the forward kernel itself, which another may come before."""
        return next(launch for launch in self.launches if launch.config.kernel.startswith("forward"))


def label(spec: ForwardPlanSpec | BackwardPlanSpec) -> str:
    """What tells the plans of one problem apart: family, tile, and all that differs from its default in the config.

    For example ``hopper 192x128 num_warps=16 num_stages=2 lazy_max``. It names the same choice at other lengths.
    """
    main = next((x for x in spec.launches if x.config.kernel.startswith(("forward_", "backward_portable"))), None)
    main = main or next((x for x in spec.launches if x.config.kernel in HOPPER_BACKWARD), spec.launches[0])
    config = main.config
    words = ["hopper" if "hopper" in config.kernel else "portable", f"{config.block_m}x{config.block_n}"]
    for field in fields(config):
        value = getattr(config, field.name)
        if not field.metadata.get("given") and (field.default is MISSING or value != field.default):
            words.append(
                f"{'' if value else 'no '}{field.name}" if isinstance(value, bool) else f"{field.name}={value}"
            )
    splits = dict(main.params).get("num_splits", 1)
    return " ".join(words if splits == 1 else [*words, f"splits={splits}"])
