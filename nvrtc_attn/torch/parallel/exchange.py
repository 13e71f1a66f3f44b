"""Tensors between the ranks of a group, by one all-to-all each time, which torch.distributed overlaps with kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Shape = tuple[int, ...]


class Pending:
    """An exchange under way. `wait` makes the current stream wait for it, the host only where the tensors are on it."""

    def __init__(
        self, work: Any, sent: torch.Tensor, received: torch.Tensor, shapes: Sequence[Sequence[Shape]]
    ) -> None:
        self._work, self._sent, self._received, self._shapes = work, sent, received, shapes

    def wait(self) -> list[list[torch.Tensor]]:
        """What each rank has sent, as views of one buffer."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        found, at = [], 0
        for shapes in self._shapes:
            tensors = []
            for shape in shapes:
                tensors.append(self._received[at : at + math.prod(shape)].view(shape))
                at += math.prod(shape)
            found.append(tensors)
        return found


def exchange(group: Any, sends: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[Shape]]) -> Pending:
    """Send ``sends[r]`` to each rank r and receive tensors of ``shapes[r]`` from it, all of one dtype and device.

    There is at least one tensor to one rank, maybe an empty one, of which dtype and device are taken. ``group`` None is
    a group of one.
    """
    flat = torch.cat([x.reshape(-1) for tensors in sends for x in tensors])
    if group is None:
        return Pending(None, flat, flat, shapes)
    counts = [sum(map(math.prod, of_rank)) for of_rank in shapes]
    received = flat.new_empty(sum(counts))
    size = flat.element_size()
    # As bytes: what a backend moves it need not be able to add up.
    work = dist.all_to_all_single(
        received.view(torch.uint8),
        flat.view(torch.uint8),
        [size * n for n in counts],
        [size * sum(x.numel() for x in tensors) for tensors in sends],
        group=group,
        async_op=True,
    )
    return Pending(work, flat, received, shapes)


def same_everywhere(groups: Sequence[Any], facts: dict[str, Any]) -> None:
    """Compare ``facts`` of all ranks: one ValueError on every rank that names what differs and where.

    ``groups`` are those of a mesh, one per dim: each is asked in turn, so that a rank hears of all of them.
    """
    known: list[dict[str, Any]] = [{"rank": dist.get_rank(), **facts}]
    for group in groups:
        if group is None:
            continue
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, known, group=group)
        known = [x for of_rank in gathered for x in of_rank]
    faults = []
    for name in facts:
        values: dict[Any, list[int]] = {}
        for of_rank in known:
            values.setdefault(of_rank[name], []).append(of_rank["rank"])
        if len(values) > 1:
            said = "; ".join(f"{value} on rank{'s' * (len(ranks) > 1)} {ranks}" for value, ranks in values.items())
            faults.append(f"{name} differs between ranks: {said}")
    if faults:
        raise ValueError(". ".join(faults) + ". All ranks of a ContextParallel say the same.")
