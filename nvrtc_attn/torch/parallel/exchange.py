"""Tensors between the ranks of a group, from where they lie to where they are wanted, beside the kernels.

On GPUs: what `exchange` sends was written by work of the current stream, which NCCL's own stream waits for;
`Pending.wait` makes the stream that is current then wait for NCCL's. The host waits for neither. A `Pending` keeps what
is under way alive until a stream has waited for it, so that the allocator gives none of it away before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from ...front.chunks import length, places


class Pending:
    """An exchange under way, or one that is done."""

    def __init__(self, works: Sequence[Any] = (), kept: Sequence[torch.Tensor] = ()) -> None:
        self._works, self._kept = works, kept

    def wait(self) -> None:
        """Make the current stream wait for it, and the host where the tensors are on the CPU."""
        for work in self._works:
            work.wait()
        self._works, self._kept = (), ()


class Lanes:
    """Streams for launches that do not depend on one another: one begins where another leaves multiprocessors idle.

    With one lane, and on the CPU, everything stays on the current stream. What is made on a lane is for the current
    stream after `join`; what a lane reads must be kept until then.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._streams = _streams(device.index, count) if device.type == "cuda" and count > 1 else ()
        self._turn, self._used = 0, list[Any]()

    def next(self) -> Any:
        """A context whose current stream is the next lane, behind all that the current one was given."""
        if not self._streams:
            return contextlib.nullcontext()
        stream = self._streams[self._turn % len(self._streams)]
        self._turn += 1
        stream.wait_stream(torch.cuda.current_stream())
        if stream not in self._used:
            self._used.append(stream)
        return torch.cuda.stream(stream)

    def __bool__(self) -> bool:
        """Whether there are several."""
        return len(self._streams) > 1

    def join(self, count: int | None = None) -> None:
        """Make the current stream wait for all lanes, or for the first ones that were used."""
        for stream in self._used[:count]:
            torch.cuda.current_stream().wait_stream(stream)
        del self._used[:count]


@functools.lru_cache(maxsize=64)
def _streams(index: int, count: int) -> tuple[Any, ...]:
    return tuple(torch.cuda.Stream(device=index) for _ in range(count))


def exchange(
    group: Any, sends: Sequence[Sequence[torch.Tensor]], receives: Sequence[Sequence[torch.Tensor]]
) -> Pending:
    """Send ``sends[r]`` to each rank r, which has as many tensors of these shapes in its ``receives`` for this rank.

    What is received is contiguous and written in place, so it may be a part of a larger tensor. What a rank sends to
    itself is copied. Ranks call this in the same order; those without anything for one another exchange nothing.
    """
    rank = dist.get_rank(group)
    messages, kept = list[tuple[bool, torch.Tensor, int]](), list[torch.Tensor]()
    packed: dict[int, torch.Tensor] = {}  # what goes to several ranks is made contiguous once
    # In this order on every rank: messages between two ranks are told apart by their order alone.
    for r, tensors in enumerate(sends):
        for x in tensors if r != rank else ():
            if x.numel():
                if id(x) not in packed:
                    packed[id(x)] = contiguous(x)
                kept.append(packed[id(x)])
                messages.append((True, kept[-1], r))
    for r, tensors in enumerate(receives):
        for x in tensors if r != rank else ():
            assert x.is_contiguous(), (x.shape, x.stride())
            if x.numel():
                kept.append(x)
                messages.append((False, x, r))
    works = _start(group, messages) if messages else []
    for x, y in zip(receives[rank], sends[rank], strict=True):
        copy(x, y)  # beside it
    return Pending(works, kept)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x.contiguous()``, by `copy`."""
    if x.is_contiguous():
        return x
    found = x.new_empty(x.shape)
    copy(found, x)
    return found


def copy(to: torch.Tensor, x: torch.Tensor) -> None:
    """``to.copy_(x)``, in elements of 16 bytes where both are made of such.

    On a GPU torch works out the place of every element of a strided tensor: 32 MiB of 16-bit elements take 45
    microseconds on an H100, 27 in elements of 16 bytes, which is what memory takes.
    """
    if to.dtype == x.dtype and not (to.data_ptr() | x.data_ptr()) % _WIDE.itemsize:
        size = x.element_size()
        if all(n * size % _WIDE.itemsize == 0 for n in (x.shape[-1], *x.stride()[:-1], *to.stride()[:-1])):
            with contextlib.suppress(RuntimeError):  # a last dim that is not dense
                to, x = to.view(_WIDE), x.view(_WIDE)
    to.copy_(x)


_WIDE: Final = torch.complex128


def copy_slices(to: torch.Tensor, at: Sequence[slice], x: torch.Tensor, of: Sequence[slice]) -> None:
    """`copy` slices of the first dim of x to those of ``to``: in one go where both lie evenly, as zigzag's do."""
    evenly = _in_one(to, at), _in_one(x, of)
    if evenly[0] is not None and evenly[1] is not None:
        copy(evenly[0], evenly[1])
        return
    for s, t in zip(at, of, strict=True):
        copy(to[s], x[t])


def _in_one(x: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor | None:
    """x[s] of all slices, as one more dim, where all are of one length and one distance, forwards."""
    if len(slices) < 2:
        return x[slices[0]] if slices else None
    size, step = slices[0].stop - slices[0].start, slices[1].start - slices[0].start
    if step < 0 or any(s.start != slices[0].start + i * step or s.stop - s.start != size for i, s in enumerate(slices)):
        return None
    first = x[slices[0]]
    return first.as_strided((len(slices), *first.shape), (step * x.stride(0), *first.stride()))


def _start(group: Any, messages: Sequence[tuple[bool, torch.Tensor, int]]) -> list[Any]:
    """Begin to send (True) or receive tensors to and from ranks of the group.

    What `torch.distributed.batch_isend_irecv` does, without its checks and objects, which take several times as long as
    the messages themselves: a short sequence waits for the host then. With NCCL all are one kernel, on the communicator
    of the group (which its first collective has made) and one stream of it.
    """
    device = messages[0][1].device
    if type(group) is not dist.ProcessGroup or not hasattr(group, "_get_backend"):
        return list(
            dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend if sent else dist.irecv, x, dist.get_global_rank(group, r), group)
                    for sent, x, r in messages
                ]
            )
        )
    together = getattr(group._get_backend(device), "supports_coalescing", False)
    if together:
        group._start_coalescing(device)
    works = [group.send([x], r, 0) if sent else group.recv([x], r, 0) for sent, x, r in messages]
    return [group._end_coalescing(device)] if together else works


def complete(collective: Callable[..., Any], *arguments: Any, group: Any) -> None:
    """Run a collective of `torch.distributed`, and wait for it as long as the timeout of its group says.

    Without ``async_op`` torch 2.8 and later have nothing to wait for: with ``TORCH_NCCL_BLOCKING_WAIT=1`` and a rank
    that is gone, the host would wait for ever for what it reads next.
    """
    collective(*arguments, group=group, async_op=True).wait()


def _device_of_objects(group: Any) -> str:
    """Where torch puts the objects that ranks of this group send one another: in the CPU's memory if it can."""
    types = [device.type for device in group._device_types]
    return "cpu" if not types or "cpu" in types else types[0]


def same_everywhere(groups: Sequence[Any], call: str, facts: dict[str, Any]) -> None:
    """Compare ``facts`` of all ranks: one ValueError on every rank that names what differs and where.

    ``groups`` are those of a mesh, one per dim: each is asked in turn, so that a rank hears of all of them. ``call``:
    which call asks. Those of different calls have different facts.
    """
    known: list[dict[str, Any]] = [{"rank": dist.get_rank(), "call": call, **facts}]
    for group in groups:
        if group is None:
            continue
        # `all_gather_object` reads sizes on the host, and no timeout ends that. So the ranks meet where one does.
        complete(dist.all_reduce, torch.zeros(1, device=_device_of_objects(group)), group=group)
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, known, group=group)
        known = [x for of_rank in gathered for x in of_rank]
    faults = []
    for name in ("call", *facts):
        values: dict[Any, list[int]] = {}
        for of_rank in known:
            values.setdefault(of_rank.get(name), []).append(of_rank["rank"])
        if len(values) > 1:
            said = "; ".join(f"{value} on rank{'s' * (len(ranks) > 1)} {ranks}" for value, ranks in values.items())
            if name == "call":
                raise ValueError(f"ranks are in different calls: {said}. All ranks make the same calls in one order.")
            faults.append(f"{name} differs between ranks: {said}")
    if faults:
        raise ValueError(". ".join(faults) + ". All ranks of a ContextParallel say the same.")


def unsharded(cp: Any, x: torch.Tensor, dim: int, keys: bool) -> torch.Tensor:
    """The whole tensor of the tokens that the ranks of a `ContextParallel` have on ``dim``, on every rank."""
    if cp._check == "always":
        beside = tuple(_resized(x, dim, -1))
        same_everywhere(cp._groups, "unshard", {"shape beside the tokens": beside, "dtype": str(x.dtype), "keys": keys})
    chunks = cp.chunks_k if keys else cp.chunks_q
    parts, ranks = [x], [(cp.rank,)]
    # Over the last dim of a mesh first: ranks are numbered along it.
    for group, level in reversed(list(zip(cp._groups, range(len(cp._groups)), strict=True))):
        count = dist.get_world_size(group)
        step = 1 if level == len(cp._groups) - 1 else dist.get_world_size(cp._groups[-1])
        first = ranks[0][0] - dist.get_rank(group) * step
        theirs = [tuple(first + i * step + j for j in range(len(ranks[0]))) for i in range(count)]
        received = [[x.new_empty(_resized(x, dim, length(chunks[r]))) for r in of_rank] for of_rank in theirs]
        exchange(group, [parts] * count, received).wait()
        parts, ranks = [y for of_rank in received for y in of_rank], [tuple(r for of in theirs for r in of)]
    whole = x.new_empty(_resized(x, dim, cp.seqlen_k if keys else cp.seqlen))
    for r, part in zip(ranks[0], parts, strict=True):
        for (a, b), at in zip(chunks[r], places(chunks[r], chunks[r]), strict=True):
            copy(whole.narrow(dim, a, b - a), part.narrow(dim, at.start, b - a))
    return whole


def _resized(x: torch.Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])
