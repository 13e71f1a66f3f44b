"""What of a call's tensors decides how it is computed, read without describing them: the key of a call made before.

For tensors of torch and CuPy on a GPU only, in microseconds for all of a call. A signature holds everything that a
`TensorView` holds but the address, of which it has the alignment: calls of one signature are valid or not together.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

from ..base import env
from ..base.forks import renew_in_child
from ..modifiers.modifier import Modifier
from .call import CallOptions
from .guards import RECENT, guard, has_room
from .part import Part


class Signature(NamedTuple):
    """``key`` is a call without its addresses; ``framework`` made the tensors, the first of them on GPU ``device``."""

    key: tuple[Any, ...]
    addresses: list[int]
    framework: str
    device: int


NUMBERS: Final = frozenset((float, int))
"""Types of an option that is a number; not bool."""
_Facts = tuple[Hashable, list[int], int]
_new_tuple: Any = tuple.__new__  # a third of the time of a named tuple's own constructor


def sign(tensors: Sequence[Any], options: CallOptions, modifier: Modifier | None = None) -> Signature | None:
    """The signature of a call, with the address of each tensor or 0 for None; None where a call must be described.

    The arrays of a modifier are among ``tensors``. Its numbers are part of the key, as some of them become options; and
    so is the sign of a zero among them.
    """
    if not are_plain(options):
        return None
    found = read(tensors)
    if found is None:
        return None
    framework, facts, addresses, device = found
    key: tuple[Any, ...]
    if modifier is None:
        key = options, env.raw_backend(), facts
    else:
        numbers = modifier.numbers
        key = options, env.raw_backend(), facts, modifier.program, numbers, 0 in numbers and repr(numbers)
    signature: Signature = _new_tuple(Signature, (key, addresses, framework, device))
    return signature


def read(tensors: Sequence[Any], *, detached: bool = False) -> tuple[str, Hashable, list[int], int] | None:
    """Framework, facts, addresses and GPU of a call's tensors, the first of which is there; None where `sign` has none.

    Equal facts are those of tensors that differ in their addresses alone, and not in the alignment of these.
    ``detached``: a gradient that would be lost is no reason to refuse.
    """
    framework, reader = _READERS.get(type(tensors[0])) or _reader_of(tensors[0])
    if reader is None:
        return None
    try:
        found = reader(tensors, detached)
    except (AttributeError, RuntimeError, TypeError):
        return None  # no memory, or not a tensor: for the description to say
    return None if found is None else (framework, *found)


def are_plain(options: CallOptions) -> bool:
    """Whether equal options of this kind mean the same: 1 equals True, and is no ``causal``."""
    causal, window, scale, softcap, dropout_p, longest_q, longest_k, return_lse, deterministic = options[:9]
    part, return_max_logit = options[11:]
    return (
        (causal is False or causal is True or causal.__class__ is str)
        and (window is None or is_plain_window(window))
        and (scale is None or scale.__class__ in NUMBERS)
        and softcap.__class__ in NUMBERS
        and dropout_p.__class__ in NUMBERS
        and (longest_q is None or longest_q.__class__ is int)
        and (longest_k is None or longest_k.__class__ is int)
        and (return_lse is False or return_lse is True)
        and (deterministic is False or deterministic is True)
        and (part is None or part.__class__ is Part)
        and (return_max_logit is False or return_max_logit is True)
    )


def is_plain_window(window_size: Any) -> bool:
    """Whether it is a pair of integers or None."""
    if window_size.__class__ is not tuple or len(window_size) != 2:
        return False
    left, right = window_size
    return (left is None or left.__class__ is int) and (right is None or right.__class__ is int)


def _read_torch(tensors: Sequence[Any], detached: bool) -> _Facts | None:
    addresses: list[int] = []
    given: list[Any] = []
    bits, there = 0, 1
    for x in tensors:
        there += there
        if x is None:
            addresses.append(0)
        else:
            address = x.data_ptr()
            addresses.append(address)
            given.append(x)
            bits |= address
            there += 1
    aligned = not bits & 15
    lost = not detached and _grad_enabled()
    recent = _known.get((there, lost), ())
    if aligned:
        for fits, number, device in recent:
            if fits(*given):
                return number, addresses, device
    facts: list[Any] = []
    types = _torch_types
    for x in given:
        cls, device = x.__class__, x.get_device()
        # On the CPU, lazily negated, or with a gradient that would be lost.
        if cls not in types or device < 0 or x.is_neg() or (lost and x.requires_grad):
            return None
        facts += (x.shape, x.stride(), x.dtype, device, x.data_ptr() & 15)
    key = there, *facts
    device, known_before = tensors[0].get_device(), _numbers.get(key)
    if known_before is None:
        with _lock:
            if len(_numbers) >= _MAX_ENTRIES:
                _numbers.clear()  # numbers are not given out again: what was known by one is not found by another
            return _numbers.setdefault(key, next(_counter)), addresses, device
    new = guard(*given) if aligned and has_room((there, lost), recent) else None
    if new is not None:
        _known[there, lost] = ((new, known_before, device), *recent[: RECENT - 1])
    return known_before, addresses, device


# Facts of torch tensors -> a number that stands for them: a key of a number is hashed in no time.
_numbers: dict[tuple[Any, ...], int] = {}
# Which of a call's tensors are there, as bits, and whether a gradient would be lost, none of which a guard sees -> the
# guards of the tensors that were seen last, their number and GPU.
_known: dict[tuple[int, bool], tuple[tuple[Callable[..., bool], int, int], ...]] = {}
_counter: Final = itertools.count()
_lock = threading.Lock()
renew_in_child(globals(), "_lock", threading.Lock)
_MAX_ENTRIES: Final = 4096


def _read_cupy(tensors: Sequence[Any], _: bool) -> _Facts | None:
    facts: list[Any] = []
    addresses: list[int] = []
    cls = type(tensors[0])
    for x in tensors:
        if x is None:
            facts.append(None)
            addresses.append(0)
            continue
        if x.__class__ is not cls:
            return None
        memory = x.data
        address = memory.ptr
        facts += (x.shape, x.strides, x.dtype, memory.device_id, address & 15)
        addresses.append(address)
    return tuple(facts), addresses, tensors[0].data.device_id


_torch_types: frozenset[type] = frozenset()
_grad_enabled: Callable[[], bool] = bool
_Reader = tuple[str, "Callable[[Sequence[Any], bool], _Facts | None] | None"]
_UNREAD: Final[_Reader] = ("", None)
# Exact type of q -> its framework and how to read its tensors. Filled when a type is first seen.
_READERS: dict[type, _Reader] = {}


def _reader_of(x: object) -> _Reader:
    """Only plain arrays have one: a subclass may have no memory, or another idea of what its attributes are."""
    global _torch_types, _grad_enabled
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    plain = getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None)
    if torch is not None and type(x) in plain:
        if getattr(torch.version, "hip", None) is not None:
            return _UNREAD
        _torch_types, _grad_enabled = frozenset((torch.Tensor, torch.nn.Parameter)), torch.is_grad_enabled
        reader: _Reader = ("torch", _read_torch)
    elif cupy is not None and type(x) is getattr(cupy, "ndarray", None) and not cupy.cuda.runtime.is_hip:
        reader = ("cupy", _read_cupy)
    else:
        return _UNREAD
    _READERS[type(x)] = reader
    return reader
