"""Tensors between the ranks of a group, from where they lie to where they are wanted, beside the kernels.

On GPUs: what `exchange` sends was written by work of the current stream, which NCCL's own stream waits for;
`Pending.wait` makes the stream that is current then wait for NCCL's. The host waits for neither. A `Pending` keeps what
is under way alive until a stream has waited for it, so that the allocator gives none of it away before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Pending:
    """An exchange under way, or one that is done."""

    def __init__(self, works: Sequence[Any] = (), kept: Sequence[torch.Tensor] = ()) -> None:
        self._works, self._kept = works, kept

    def wait(self) -> None:
        """Make the current stream wait for it, and the host where the tensors are on the CPU."""
        for work in self._works:
            work.wait()
        self._works, self._kept = (), ()


def exchange(
    group: Any, sends: Sequence[Sequence[torch.Tensor]], receives: Sequence[Sequence[torch.Tensor]]
) -> Pending:
    """Send ``sends[r]`` to each rank r, which has as many tensors of these shapes in its ``receives`` for this rank.

    What is received is contiguous and written in place, so it may be a part of a larger tensor. What a rank sends to
    itself is copied. Ranks call this in the same order; those without anything for one another exchange nothing.
    """
    rank = dist.get_rank(group)
    operations, kept = [], list[torch.Tensor]()
    packed: dict[int, torch.Tensor] = {}  # what goes to several ranks is made contiguous once
    # In this order on every rank: messages between two ranks are told apart by their order alone.
    for r, tensors in enumerate(sends):
        if r == rank:
            continue
        there = dist.get_global_rank(group, r)
        for x in tensors:
            if x.numel():
                if id(x) not in packed:
                    packed[id(x)] = x.contiguous()
                kept.append(packed[id(x)])
                operations.append(dist.P2POp(dist.isend, kept[-1], there, group))
    for r, tensors in enumerate(receives):
        if r == rank:
            continue
        there = dist.get_global_rank(group, r)
        for x in tensors:
            assert x.is_contiguous(), (x.shape, x.stride())
            if x.numel():
                kept.append(x)
                operations.append(dist.P2POp(dist.irecv, x, there, group))
    # With NCCL one kernel, on the communicator of the group (which its first collective has made) and one stream of it.
    works = dist.batch_isend_irecv(operations) if operations else []
    for x, y in zip(receives[rank], sends[rank], strict=True):
        x.copy_(y)  # beside it
    return Pending(works, kept)


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
