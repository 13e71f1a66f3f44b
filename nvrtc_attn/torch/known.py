"""Calls of plain q, k and v alone that were made before, and their backward passes: the steady state of a model.

A model's layers make the same call again and again, so what `passes` looks up for a call is kept here for the tensors
that it fits: a launch then takes one question in C++ and the addresses.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

from ..base import env
from ..base.tables import remember
from ..front.call import CallOptions
from ..front.guards import RECENT, guard, has_room
from ..front.operands import OPTIONAL_GRADIENTS, OPTIONAL_INPUTS
from ..plans.plan import BackwardPlan, ForwardPlan
from ..runtime import driver
from .tensors import Made, allocator, current_device, dense, empty_on_current, raw_stream

NO_ADDRESSES: Final = (0,) * len(OPTIONAL_INPUTS)
_NO_FURTHER_ADDRESSES: Final = (0,) * (1 + len(OPTIONAL_INPUTS))  # dlse and the inputs that may be missing
_NO_FURTHER_GRADIENTS: Final = (0,) * len(OPTIONAL_GRADIENTS)
_BYTE: Final = torch.uint8
_adopted = threading.local()


class KnownBackward:
    """The backward pass behind a `Known` call, for one layout of dout."""

    __slots__ = ("_backend", "_gradients", "_index", "_plan", "_workspace", "fits")

    def __init__(self, fits: Any, plan: BackwardPlan, gradients: Any, index: int) -> None:
        self.fits, self._plan, self._gradients, self._index = fits, plan, gradients, index
        self._backend = env.raw_backend()
        self._workspace = (plan.workspace_bytes,), (1,), _BYTE

    def run(self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> Any:
        """None, dq, dk, dv; None where an address is not aligned, or another kernel family is asked for."""
        a, b, c = q.data_ptr(), k.data_ptr(), v.data_ptr()
        d, e, f = out.data_ptr(), dout.data_ptr(), lse.data_ptr()
        if (a | b | c | d | e | f) & 15 or env.raw_backend() != self._backend:
            return None
        index = self._index
        adopt(index)
        new = empty_on_current if current_device() == index else allocator(index)
        gradients, found = self._allocate(new)
        workspace = new(*self._workspace)
        # In the order of `BACKWARD`.
        self._plan.run(
            raw_stream(index),
            (a, b, c, d, e, f, *_NO_FURTHER_ADDRESSES, *gradients, *_NO_FURTHER_GRADIENTS),
            workspace.data_ptr(),
        )
        return found

    def _allocate(self, new: Any) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Addresses of dq, dk and dv, and what autograd takes: of the node's first argument there is no gradient."""
        made_q, made_k, made_v = self._gradients
        dq, dk, dv = new(*made_q), new(*made_k), new(*made_v)
        return (dq.data_ptr(), dk.data_ptr(), dv.data_ptr()), (None, dq, dk, dv)


class KnownPackedBackward(KnownBackward):
    """The same, where dk and dv, or all three, are slices of one tensor that is made here."""

    __slots__ = ("_made", "_offsets")

    def __init__(self, fits: Any, plan: BackwardPlan, gradients: Any, index: int, packed: torch.Tensor) -> None:
        super().__init__(fits, plan, gradients, index)
        self._made = dense(packed.shape, packed.dtype)
        self._offsets = tuple(part * packed.stride(-3) * packed.element_size() for part in range(packed.shape[-3]))

    def _allocate(self, new: Any) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """As there; the packed gradient comes behind dq, where that has memory of its own."""
        packed = new(*self._made)
        begin = packed.data_ptr()
        addresses = tuple([begin + offset for offset in self._offsets])
        made_q = self._gradients[0]
        if made_q is None:
            return addresses, (None, packed)
        dq = new(*made_q)
        return (dq.data_ptr(), *addresses), (None, dq, packed)


class BackwardCalls:
    """Backward passes of one call that were made before: behind a forward pass that is known, or of an operator."""

    __slots__ = ("backward",)

    def __init__(self) -> None:
        self.backward: tuple[KnownBackward, ...] = ()


class Known(BackwardCalls):
    """A call of plain q, k and v alone that was made before, as the layers of a model make it again and again.

    ``fits(q, k, v)`` is one question in C++ instead of thirty in Python: whether tensors are of the same types, element
    types, devices, shapes and strides, with the same wish for a gradient, below the same modes and
    transformations, and with the same lazy sign. What it does not see is in the key, or asked by `run`.
    """

    __slots__ = ("_backend", "_index", "_lse", "_out", "_plan", "_workspace", "attach", "fits", "grad", "options")

    def __init__(
        self, fits: Any, entry: tuple[ForwardPlan, Made, Made], options: CallOptions, index: int, grad: bool
    ) -> None:
        super().__init__()
        self.fits, self.options, self._index = fits, options, index
        self._plan, self._out, lse = entry
        self._lse = lse if options.return_lse else None
        size = self._plan.workspace_bytes
        self._workspace = ((size,), (1,), _BYTE) if size else None
        self._backend = env.raw_backend()
        self.grad = grad
        self.attach: Any = None  # what makes a node of the graph, once there was one

    def run(self, q: Any, k: Any, v: Any) -> Any:
        """(out, lse or None); None where an address is not aligned, or another kernel family is asked for."""
        q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (q_address | k_address | v_address) & 15 or env.raw_backend() != self._backend:
            return None
        index = self._index
        new = empty_on_current if current_device() == index else allocator(index)
        out, lse, lse_address, workspace = new(*self._out), None, 0, 0
        if self._lse is not None:
            lse = new(*self._lse)
            lse_address = lse.data_ptr()
        if self._workspace is not None:
            scratch = new(*self._workspace)
            workspace = scratch.data_ptr()
        # In the order of `FORWARD`.
        addresses = (q_address, k_address, v_address, out.data_ptr(), lse_address, 0, *NO_ADDRESSES)
        self._plan.run(raw_stream(index), addresses, workspace)
        return out, lse


# Everything of a call that `Known.fits` does not see -> the calls of it that were made last.
_known_plans: dict[Any, tuple[Known, ...]] = {}


def known_calls(key: Any) -> tuple[Known, ...] | None:
    """The calls that differ in their tensors alone, the last one first. TypeError: a key that no table takes."""
    return _known_plans.get(key)


def know(key: Any, q: Any, k: Any, v: Any, entry: Any, options: CallOptions, index: int, grad: bool) -> None:
    """Remember a forward call in `known_calls`: at its second time, not at its first."""
    recent = _known_plans.get(key, ())
    if index >= 0 and 0 not in entry[1][0] and has_room(key, recent) and not any(x.fits(q, k, v) for x in recent):
        fits = guard(q, k, v)
        if fits is not None:
            remember(_known_plans, key, (Known(fits, entry, options, index, grad), *recent[: RECENT - 1]))


def know_backward(
    known: BackwardCalls, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, entry: Any, index: int,
    packed: torch.Tensor | None,
) -> None:  # fmt: skip
    """Remember a backward pass in the call that it follows."""
    plan, made = entry
    recent = known.backward
    if index >= 0 and has_room(id(known), recent) and not any(x.fits(q, k, v, out, lse, dout) for x in recent):
        fits = guard(q, k, v, out, lse, dout)
        if fits is not None:
            if packed is None:
                new = KnownBackward(fits, plan, made[:3], index)
            else:
                new = KnownPackedBackward(fits, plan, made[:3], index, packed)
            known.backward = (new, *recent[: RECENT - 1])


def adopt(index: int) -> None:
    """Give autograd's thread the context of a GPU: cuBLAS warns where nothing was current before it."""
    try:
        adopted = _adopted.devices
    except AttributeError:
        adopted = _adopted.devices = set()
    if index >= 0 and index not in adopted:
        driver.adopt_context(index)
        adopted.add(index)
