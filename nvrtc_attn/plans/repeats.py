"""Calls that were made before: the plan of one, found again by its signature, without describing a tensor.

What a first call checks follows from its signature, but for one thing: whether an output shares memory with another
operand depends on the addresses. That is asked again of the ranges that the operands span; where two of these meet, the
call takes the long way, which looks at the elements.

Concurrency: the tables' entries are complete when they appear; `tables.remember` writes them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..base import env, tables
from ..front.call import Call, CallOptions
from ..front.dlpack import compact_strides
from ..front.operands import BACKWARD, FORWARD, OPERANDS
from ..front.philox import NO_RNG, RngState
from ..front.rng import rng_state
from ..front.signature import Signature
from ..front.tensors import Device, TensorView, current_stream
from ..front.tensorview import span
from ..heuristics.common import orders_gradients
from ..modifiers.cuda_values import NO_MODIFIER, ModifierValues
from ..runtime.arrays import address_of, allocate_again
from .plan import BackwardPlan, ForwardPlan

Span = tuple[int, int]
_new_tuple: Any = tuple.__new__  # a third of the time of a named tuple's own constructor


class Repeat(NamedTuple):
    """What a call of a known signature needs."""

    plan: ForwardPlan | BackwardPlan
    spans: tuple[Span | None, ...]
    """Bytes that what lies at each address of the signature covers, relative to it; None where it is of no account."""
    outputs: tuple[int, ...]
    """Places of the outputs that were given."""
    made: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]
    """Shape, strides and dtype of the outputs that were not."""
    apart: set[tuple[int, ...]]
    """Addresses at which no output shares memory with another operand: programs come with the same ones again."""
    modifier: RepeatedModifier | None = None


class RepeatedModifier(NamedTuple):
    """What a modifier's arrays mean to a launch: all of its `ModifierValues` but addresses.

    The addresses of a signature are those of the plan's operands, of a workspace, of each array that the caller's
    modifier has, and of the gradient of each. Places are among these.
    """

    moved: tuple[tuple[int, int], ...]
    """(from, to): an array that is a bias is an operand, and so is its gradient."""
    arrays: tuple[int, ...]
    gradients: tuple[int, ...]
    sizes: tuple[int, ...]
    """Bytes of each gradient."""
    pointers: struct.Struct
    rest: bytes
    """The block behind its addresses."""
    sums: tuple[int, ...]
    """Where sums without an order lie, behind the workspace of the plan, and their end; empty where atomics add."""
    last: list[tuple[list[int] | None, ModifierValues]]
    """One pair: where the arrays were at the last call, None before the first, and what was packed of that.

    Only of modifiers whose arrays have no gradient here. Arrays rarely move between calls.
    """

    def values(self, addresses: Sequence[int], workspace: int) -> ModifierValues:
        """As `modifier_values`; ``workspace`` is the end of that of the plan."""
        known = [addresses[place] for place in self.arrays]
        if not self.gradients:
            before, values = self.last[0]
            if before != known:
                values = _new_tuple(ModifierValues, (self.pointers.pack(*known) + self.rest, ()))
                self.last[0] = known, values
            return values
        results = [addresses[place] for place in self.gradients]
        if self.sums:
            known += [workspace + place for place in self.sums[:-1]]
            zeroed: tuple[tuple[int, int], ...] = ((workspace, self.sums[-1]),)
        else:
            zeroed = tuple(zip(results, self.sizes, strict=True))
        return ModifierValues(self.pointers.pack(*known, *results) + self.rest, tuple([x for x in zeroed if x[1]]))


# Places in the order of the operands of a pass, by their number.
_LENGTHS: Final = {len(names): (names.index("cu_seqlens_q"), names.index("seqused_k")) for names in (FORWARD, BACKWARD)}
_MADE: Final = tuple((name, FORWARD.index(name)) for name in ("out", "lse", "max_logit"))
_MAX_APART: Final = 64
_repeats: dict[tuple[Any, ...], Repeat] = {}


def find(signature: Signature, operands: tuple[Any, ...]) -> Repeat | None:
    """The call of this signature; None where it is new, or where an output may share memory with another operand.

    None also where lengths on the device are to be looked at, which a call that was made before does not.
    """
    starts, used = _LENGTHS[len(operands)]
    if (operands[starts] is not None or operands[used] is not None) and env.debug():
        return None
    found = _repeats.get(signature.key)
    if found is None:
        return None
    if found.modifier is not None:
        for given, place in found.modifier.moved:
            signature.addresses[place] = signature.addresses[given]
    if found.outputs:
        addresses = tuple(signature.addresses)
        if addresses not in found.apart:
            if not _apart(found, addresses):
                return None
            if len(found.apart) >= _MAX_APART:
                found.apart.clear()
            found.apart.add(addresses)
    return found


def remember(
    signature: Signature,
    plan: ForwardPlan | BackwardPlan,
    given: Mapping[str, TensorView],
    made: Mapping[str, tuple[tuple[int, ...], str]],
    modifier: RepeatedModifier | None = None,
    captures: Sequence[TensorView] = (),
    capture_gradients: Sequence[TensorView | None] = (),
) -> None:
    """Know a call that has passed every check, but none whose indices are looked at each time.

    Parameters
    ----------
    given
        The operands that were given to it.
    made
        Shape and dtype of those that were made.
    captures, capture_gradients
        Arrays of the modifier that is left, and their gradients.
    """
    if modifier is not None and env.debug():
        return
    backward = isinstance(plan, BackwardPlan)
    views = {place: given[name] for place, name in enumerate(plan.OPERANDS) if name in given}
    outputs = [place for place in views if OPERANDS[plan.OPERANDS[place]].role(backward).startswith("out")]
    if modifier is not None:
        views |= dict(zip(modifier.arrays, captures, strict=True))
        of_trained = [x for x in capture_gradients if x is not None]
        views |= dict(zip(modifier.gradients, of_trained, strict=True))
        outputs += modifier.gradients
    spans: list[Span | None] = [None] * (1 + max(views))
    for place, view in views.items():
        if 0 not in view.shape:
            first, end = span(view)
            spans[place] = first - view.ptr, end - view.ptr
    shapes = {name: (shape, compact_strides(shape), dtype) for name, (shape, dtype) in made.items()}
    tables.remember(_repeats, signature.key, Repeat(plan, tuple(spans), tuple(outputs), shapes, set(), modifier))


def repeated_modifier(
    call: Call, plan: ForwardPlan | BackwardPlan, values: ModifierValues, workspace: int
) -> RepeatedModifier | None:
    """The modifier of a call that ran with ``values``, whose workspace had its end at ``workspace``."""
    modified = call.modified
    if modified is None:
        return None
    arrays = len(plan.OPERANDS) + 1
    gradients = arrays + len(modified.whole.captures)
    moved = []
    if modified.bias is not None:
        moved.append((arrays + modified.bias_capture, plan.OPERANDS.index("bias")))
        if call.options.dbias:
            moved.append((gradients + modified.bias_capture, plan.OPERANDS.index("dbias")))
    if modified.modifier is None:
        return RepeatedModifier(tuple(moved), (), (), (), struct.Struct("<"), b"", (), [(None, NO_MODIFIER)])
    trained = call.problem.trained if isinstance(plan, BackwardPlan) else ()
    sums: tuple[int, ...] = ()
    ordered = bool(trained) and orders_gradients(call.problem)
    pointers = struct.Struct(f"<{len(modified.kept) + len(trained) * (1 + ordered)}Q")
    if ordered:
        of_sums = pointers.unpack_from(values.block)[len(modified.kept) : len(modified.kept) + len(trained)]
        sums = (*[x - workspace for x in of_sums], sum(nbytes for _, nbytes in values.zeroed))
    sizes = [4 * math.prod(modified.captures[i].shape) for i in trained]
    return RepeatedModifier(
        tuple(moved), tuple([arrays + place for place in modified.kept]),
        tuple([gradients + modified.kept[i] for i in trained]), tuple(sizes), pointers,
        values.block[pointers.size :], sums, [(None, NO_MODIFIER)],
    )  # fmt: skip


def _apart(known: Repeat, addresses: Sequence[int]) -> bool:
    """Whether no output's range meets that of another operand."""
    ranges = [
        (address + x[0], address + x[1], place)
        for place, (address, x) in enumerate(zip(addresses, known.spans, strict=False))
        if x is not None
    ]
    ranges.sort()
    outputs = known.outputs
    # In the order of their beginnings: the farthest end so far of anything, and of outputs.
    end = end_of_outputs = 0
    for first, last, place in ranges:
        if place in outputs:
            if first < end:
                return False
            end_of_outputs = max(end_of_outputs, last)
        elif first < end_of_outputs:
            return False
        end = max(end, last)
    return True


def attention_again(known: Repeat, signature: Signature, q: Any, out: Any, options: CallOptions, rng: Any) -> Any:
    """`attention` of a call that was made before."""
    framework, index = signature.framework, signature.device
    addresses = signature.addresses
    results = []
    for name, place in _MADE:
        if name in known.made:
            x, addresses[place] = allocate_again(framework, q, index, *known.made[name])
            results.append(x)
        elif name == "out":
            results.append(out)
    size = known.plan.workspace_bytes
    _workspace, address = allocate_again(framework, q, index, (size,), (1,), "uint8") if size else (None, 0)
    stream = current_stream(framework, index)
    rng = _rng_again(options, rng, index, stream)
    if known.modifier is None:
        known.plan.run(stream, tuple(addresses), address, rng)
    else:
        values = known.modifier.values(addresses, address + size)
        known.plan.run(stream, tuple(addresses[: len(known.plan.OPERANDS)]), address, rng, values)
    return tuple(results) if len(results) > 1 else results[0]


def ran_again(
    signature: Signature, operands: tuple[Any, ...], options: CallOptions, rng: Any,
    new_workspace: Callable[[int], Any] | None = None,
) -> bool:  # fmt: skip
    """Run a pass that was run before. False if it was not, or lacks a workspace: for the description to say."""
    known = find(signature, operands)
    if known is None:
        return False
    count, modifier = len(known.plan.OPERANDS), known.modifier
    addresses, address = tuple(signature.addresses[:count]), signature.addresses[count]
    stream = current_stream(signature.framework, signature.device)
    size = known.plan.workspace_bytes
    if modifier is not None and modifier.sums:
        size += modifier.sums[-1]
    if not size:
        address = 0  # as in a first call, whatever was given
    elif not address:
        if new_workspace is None:
            return False
        workspace = new_workspace(size)
        address = address_of(signature.framework, workspace)
    rng = _rng_again(options, rng, signature.device, stream)
    if modifier is None:
        known.plan.run(stream, addresses, address, rng)
    else:
        values = modifier.values(signature.addresses, address + known.plan.workspace_bytes)
        known.plan.run(stream, addresses, address, rng, values)
    return True


def _rng_again(options: CallOptions, rng: Any, index: int, stream: int) -> RngState:
    return NO_RNG if options.dropout_p == 0 else rng_state(rng, Device("cuda", index), stream)
