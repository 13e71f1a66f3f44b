"""Calls with functions that were made before: one question to torch's guards, the launches, a node of autograd.

As `known.Known` is for calls without functions; what a launch needs to know of one is in `plans.repeats`. Tensors are
``[batch, heads, rows, head_dim]`` of `flex_attention`, ``[batch, rows, heads, head_dim]`` of `attention`.

Concurrency: the table's entries are complete when they appear; `tables.remember` writes them.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..base import env
from ..base.tables import remember
from ..front.call import CallOptions
from ..front.guards import RECENT, guard, has_room
from ..front.operands import BACKWARD, FORWARD, INPUTS
from ..front.philox import NO_RNG
from ..front.signature import sign
from ..modifiers.cuda_values import NO_MODIFIER
from ..modifiers.modifier import Modifier
from ..modifiers.remembered import look
from ..plans import repeats
from .derivatives import apply_of, once_only, refuse_transformed
from .known import adopt
from .modified_passes import gradients as gradients_of
from .tensors import Made, allocator, current_device, dense, empty_on_current, is_transformed, raw_stream

_autocast: Final = torch._C._is_any_autocast_enabled
_autocast_dtype: Final = torch.get_autocast_dtype
_grad_enabled: Final = torch.is_grad_enabled
_deterministic: Final = torch._C._get_deterministic_algorithms
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_transformed: Final = torch._C._functorch.maybe_current_level
_forward_ad: Any = torch.autograd.forward_ad
_PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter))
_BYTE: Final = torch.uint8
_NONE_BEHIND_V: Final = (None,) * (len(FORWARD) - 3)
_ZEROS_BEHIND_LSE: Final = (0,) * (len(FORWARD) - 5 + 1)  # and no workspace of the caller's
_BEHIND_DLSE: Final = (None,) * (len(INPUTS) - 3)
_ZEROS_BEHIND_DLSE: Final = (0,) * (1 + len(_BEHIND_DLSE))
_ZEROS_BEHIND_DV: Final = (0,) * (len(BACKWARD) - BACKWARD.index("dv"))


class _Pass:
    """The launches of one pass."""

    __slots__ = ("_backend", "_index", "_repeat", "_size", "fits")

    def __init__(self, fits: Any, repeat: repeats.Repeat, index: int) -> None:
        self.fits, self._repeat, self._index = fits, repeat, index
        self._backend = env.raw_backend()
        modifier = repeat.modifier
        self._size = repeat.plan.workspace_bytes + (modifier.sums[-1] if modifier is not None and modifier.sums else 0)

    def _launch(self, new: Any, addresses: list[int]) -> None:
        """``addresses`` are in the order of a signature."""
        known = self._repeat
        plan, modifier = known.plan, known.modifier
        address = 0
        if self._size:
            workspace = new((self._size,), (1,), _BYTE)
            address = workspace.data_ptr()
        values = NO_MODIFIER
        if modifier is not None:
            for given, place in modifier.moved:
                addresses[place] = addresses[given]
            values = modifier.values(addresses, address + plan.workspace_bytes)
        plan.run(raw_stream(self._index), tuple(addresses[: len(plan.OPERANDS)]), address, NO_RNG, values)


class _KnownBackward(_Pass):
    """The backward pass behind a `_Known` call, for one layout of dout and the gradients that are asked for."""

    __slots__ = ("_arrays", "_gradients", "deterministic", "needed")

    def __init__(
        self, fits: Any, repeat: repeats.Repeat, index: int, needed: tuple[bool, ...], deterministic: bool,
        gradients: tuple[Made, ...], arrays: tuple[tuple[Made, Any] | None, ...],
    ) -> None:  # fmt: skip
        super().__init__(fits, repeat, index)
        self.needed, self.deterministic = needed, deterministic
        self._gradients, self._arrays = gradients, arrays

    def run(self, saved: tuple[Any, ...], dout: Any) -> Any:
        """Of the node's arguments, the first of which has none; None where an address is not aligned."""
        out, lse, *inputs = [x.data_ptr() for x in saved]
        address = dout.data_ptr()
        bits = out | lse | address
        for x in inputs:
            bits |= x
        if bits & 15 or env.raw_backend() != self._backend:
            return None
        index = self._index
        adopt(index)
        new = empty_on_current if current_device() == index else allocator(index)
        made = [new(*x) for x in self._gradients]
        sums = [x if x is None else new(*x[0]) for x in self._arrays]
        q, k, v, *captures = inputs
        self._launch(new, [
            q, k, v, out, address, lse, *_ZEROS_BEHIND_DLSE, *[x.data_ptr() for x in made], *_ZEROS_BEHIND_DV,
            *captures, *[0 if x is None else x.data_ptr() for x in sums],
        ])  # fmt: skip
        of_arrays = [
            x if x is None or y is None or x.dtype is y[1] else x.to(y[1])
            for x, y in zip(sums, self._arrays, strict=True)
        ]
        return None, *made, *of_arrays


class _Known(_Pass):
    """A call of one kind of tensors and arrays."""

    __slots__ = ("_lse", "_out", "attach", "backward", "grad", "heads_first", "modifier", "options")

    def __init__(
        self, fits: Any, repeat: repeats.Repeat, index: int, modifier: Modifier | None, options: CallOptions,
        grad: bool, dtype: torch.dtype, heads_first: bool,
    ) -> None:  # fmt: skip
        super().__init__(fits, repeat, index)
        self.modifier, self.options, self.grad, self.heads_first = modifier, options, grad, heads_first
        self._out = dense(repeat.made["out"][0], dtype, heads_first=heads_first)
        self._lse = dense(repeat.made["lse"][0], torch.float32)
        self.backward: tuple[_KnownBackward, ...] = ()
        self.attach: Any = None

    def run(self, tensors: tuple[Any, ...]) -> Any:
        """(out, lse); None where an address is not aligned, or another kernel family is asked for."""
        bits = 0
        inputs = [x.data_ptr() for x in tensors]
        for address in inputs:
            bits |= address
        if bits & 15 or env.raw_backend() != self._backend:
            return None
        index = self._index
        new = empty_on_current if current_device() == index else allocator(index)
        out, lse = new(*self._out), new(*self._lse)
        self._launch(new, [*inputs[:3], out.data_ptr(), lse.data_ptr(), *_ZEROS_BEHIND_LSE, *inputs[3:]])
        return out, lse


# Everything of a call that guards do not see -> the calls of it that were made last.
_known: dict[Any, tuple[_Known, ...]] = {}


def again(
    q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any, aux: Any, asked: Any, return_lse: bool
) -> Any:  # fmt: skip
    """What a call that was made before gives; None of others.

    ``asked`` has everything of a call beside its tensors and functions, and whose call it is.
    """
    found = _looked_up(score_mod, mask_mod, aux, asked, return_lse)
    if found is None:
        return None
    name, _, captures = found
    for known in _known.get(name, ()):
        if known.fits(q, k, v, *captures):
            results = known.run((q, k, v, *captures))
            if results is None:
                continue
            if known.grad:
                return (known.attach or _node_of(known, return_lse))(results, q, k, v, *captures)
            if _forward_ad._current_level >= 0:
                return None
            return results if return_lse else results[0]
    return None


def _looked_up(score_mod: Any, mask_mod: Any, aux: Any, asked: Any, return_lse: bool) -> Any:
    """What guards do not see, the modifier and its arrays; None where some of it is not told by equality."""
    modifier = program = None
    captures: tuple[Any, ...] = ()
    if score_mod.__class__ is Modifier:
        if mask_mod is not None or aux is not None:
            return None  # refused later
        modifier, captures = score_mod, score_mod.captures
    elif score_mod is not None or mask_mod is not None:
        found = look(score_mod, mask_mod, aux)
        if found is None:
            return None
        modifier, captures = found
    if modifier is not None:
        numbers = modifier.numbers
        program = modifier.program, numbers, 0 in numbers and repr(numbers)
    autocast = _autocast() and _autocast_dtype("cuda")
    return (program, asked, return_lse, _grad_enabled(), autocast), modifier, captures


def know(
    q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any, aux: Any, asked: Any, return_lse: bool,
    options: CallOptions, *, heads_first: bool,
) -> None:  # fmt: skip
    """Remember a call that has passed every check, of tensors as autocast left them, if one like it was run before.

    ``options`` are those of the core's call.
    """
    found = _looked_up(score_mod, mask_mod, aux, asked, return_lse)
    if found is None or _dispatch_modes() or _transformed():
        return
    name, modifier, captures = found
    given = q, k, v, *captures
    recent = _known.get(name, ())
    if not all(x.__class__ in _PLAIN for x in given) or k.shape[0] != q.shape[0] or not has_room(name, recent):
        return
    with torch.no_grad():
        inner = modifier and modifier.with_captures(captures)
        rows_first = _rows_first(given[:3], heads_first)
        repeat, index = _repeat((*rows_first, *_NONE_BEHIND_V), inner, _of_core(options))
    if repeat is None or any(x.fits(*given) for x in recent):
        return
    fits = guard(*given)
    if fits is not None:
        grad = _grad_enabled() and any(x.requires_grad for x in given)
        bare = modifier and modifier.with_captures(())
        known = _Known(fits, repeat, index, bare, options, grad, q.dtype, heads_first)
        remember(_known, name, (known, *recent[: RECENT - 1]))


def _of_core(options: CallOptions, *, deterministic: bool = False) -> CallOptions:
    """Those of the core's calls, which `repeats` knows."""
    return options._replace(return_lse=True, deterministic=deterministic)


def _repeat(
    operands: tuple[Any, ...], modifier: Modifier | None, options: CallOptions, sums: tuple[Any, ...] = ()
) -> tuple[Any, int]:
    """What is known of a call of the core, and its GPU."""
    more = () if modifier is None else (None, *modifier.captures, *sums)
    if modifier is None and len(operands) == len(BACKWARD):
        more = (None,)
    signature = sign((*operands, *more), options, modifier)
    if signature is None:
        return None, -1
    return repeats.find(signature, operands), signature.device


def _rows_first(tensors: Any, heads_first: bool) -> tuple[Any, ...]:
    """Tensors of the one layout in the other, and back; as they are, where they have rows first already."""
    return tuple([x.transpose(1, 2) for x in tensors]) if heads_first else tuple(tensors)


def _node_of(known: _Known, return_lse: bool) -> Any:
    """What makes a node of the graph, of the results and the tensors of a known call: as `eager._node_of`."""

    class _Modified(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
        @staticmethod
        def forward(ctx: Any, results: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> Any:
            ctx.save_for_backward(*results, *tensors)
            if return_lse:
                ctx.set_materialize_grads(False)
                return results
            return results[0]

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None) -> Any:
            saved, needed = ctx.saved_tensors, ctx.needs_input_grad
            if _grad_enabled():
                return once_only(lambda: _gradients(known, saved, needed, dout, dlse), (*saved[2:], dout, dlse))
            if dlse is None and known.backward:
                deterministic = _deterministic()
                for later in known.backward:
                    if (
                        later.needed == needed
                        and later.deterministic == deterministic
                        and later.fits(*saved, dout)
                        and (found := later.run(saved, dout))
                    ):
                        return found
            return _gradients(known, saved, needed, dout, dlse)

    known.attach = apply_of(_Modified)
    return known.attach


def _gradients(
    known: _Known, saved: tuple[Any, ...], needed: tuple[bool, ...], dout: Any, dlse: Any
) -> tuple[Any, ...]:
    """The gradient of each argument of the node, by the core. It is known from its second time on."""
    if is_transformed():
        refuse_transformed()
    out, lse, *inputs = [x.detach() for x in saved]
    given = torch.zeros_like(out) if dout is None else dout
    captures, deterministic = tuple(inputs[3:]), _deterministic()
    modifier = known.modifier and known.modifier.with_captures(captures)
    q, k, v, o, do = _rows_first((*inputs[:3], out, given), known.heads_first)
    options = _of_core(known.options, deterministic=deterministic)
    found, sums = gradients_of((q, k, v, *_BEHIND_DLSE), o, lse, do, dlse, options, NO_RNG, modifier, needed[4:])
    gradients: Any = found[:3]
    if dlse is None and dout is not None and not dout.is_neg() and dout.stride(-1) == 1 and 0 not in dout.stride():
        _know_backward(known, saved, needed, dout, (q, k, v, o, do, lse, *gradients), sums, modifier, deterministic)
    of_arrays = [None if x is None else x.to(y.dtype) for x, y in zip(sums, captures, strict=True)]
    return None, *_rows_first(gradients, known.heads_first), *of_arrays


def _know_backward(
    known: _Known, saved: tuple[Any, ...], needed: tuple[bool, ...], dout: Any, tensors: tuple[Any, ...],
    sums: list[Any], modifier: Modifier | None, deterministic: bool,
) -> None:  # fmt: skip
    recent = known.backward
    if not has_room(id(known), recent):
        return
    q, k, v, out, dout_rows_first, lse, *gradients = tensors
    operands = (
        q, k, v, out, dout_rows_first, lse, None, *_BEHIND_DLSE, *gradients,
        *(None,) * (len(BACKWARD) - BACKWARD.index("dv") - 1),
    )  # fmt: skip
    asked = tuple(sums) if any(x is not None for x in sums) else ()
    options = _of_core(known.options, deterministic=deterministic)
    repeat, index = _repeat(operands, modifier, options, asked)
    if repeat is None or _dispatch_modes() or _transformed():
        return
    fits = guard(*saved, dout)
    if fits is None:
        return
    made = tuple([dense(x.shape, x.dtype, heads_first=known.heads_first) for x in gradients])
    arrays = tuple([
        None if x is None else (dense(x.shape, torch.float32), y.dtype) for x, y in zip(sums, saved[5:], strict=True)
    ])  # fmt: skip
    new = _KnownBackward(fits, repeat, index, needed, deterministic, made, arrays)
    known.backward = (new, *recent[: RECENT - 1])
