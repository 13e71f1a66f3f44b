"""What a launch passes to a modifier's text: addresses, sizes and strides of captured arrays, and numbers.

The order of the fields is that of the ``ModifierBlock`` that `cuda.cuda_source` writes.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ..base.dtypes import DTYPES
from ..base.errors import UnsupportedError
from .modifier import Program

_WORD_BYTES: Final = 8 * 33
"""Of the sum of one element: ``ExactSum::kWords`` in ``collective/modifier.cuh``."""
MAX_ORDERED_BYTES: Final = 1 << 30


class ModifierValues(NamedTuple):
    """What a launch passes to a modifier: the bytes of its ``ModifierBlock``, and memory to set to zero before."""

    block: bytes
    zeroed: tuple[tuple[int, int], ...]
    """(address, bytes) of the gradients that the kernel adds to."""


NO_MODIFIER: Final = ModifierValues(b"", ())


def ordered_bytes(trained: tuple[int, ...], captures: Sequence[Any]) -> int:
    """Memory for the sums of gradients that are to have no order of additions.

    Raises
    ------
    UnsupportedError
        It is more than `MAX_ORDERED_BYTES`.
    """
    nbytes: int = sum(_WORD_BYTES * math.prod(captures[i].shape) for i in trained)
    if nbytes > MAX_ORDERED_BYTES:
        raise UnsupportedError(
            f"deterministic: the gradients of captured arrays of {nbytes // _WORD_BYTES} elements take {nbytes} bytes "
            f"of sums without an order, and {MAX_ORDERED_BYTES} are allowed. An array that is added and indexed with "
            "b, h, q and k alone is a bias, whose gradient takes none."
        )
    return nbytes


def modifier_values(
    program: Program,
    trained: tuple[int, ...],
    captures: Sequence[Any],
    gradients: Sequence[Any],
    numbers: Sequence[float],
    words: int | None = None,
) -> ModifierValues:
    """The values of one call. ``captures`` and ``gradients`` are views of device memory.

    ``words`` is the address of `ordered_bytes` of memory for sums that have no order; None: atomics add to gradients.

    Raises
    ------
    UnsupportedError
        A dim or a stride of a captured array does not fit int32.
    ValueError
        A gradient is not dense.
    """
    zeroed = []
    for i in trained:
        size = math.prod(gradients[i].shape)
        span = 1 + sum((n - 1) * abs(x) for n, x in zip(gradients[i].shape, gradients[i].strides, strict=True))
        if size and (span != size or min(gradients[i].strides, default=0) < 0):
            raise ValueError(f"daux: strides {gradients[i].strides} leave gaps, and a gradient on the GPU is dense.")
        zeroed.append((gradients[i].ptr, 4 * size))
    values: list[Any] = [x.ptr for x in captures]
    results = [gradients[i].ptr for i in trained]
    counts = [nbytes // 4 for _, nbytes in zeroed]
    if words is None:
        values += results
    else:
        places = [words + _WORD_BYTES * sum(counts[:n]) for n in range(len(counts))]
        values += [*places, *results]
        zeroed = [(words, _WORD_BYTES * sum(counts))]
    for x in (*captures, *(gradients[i] for i in trained)):
        if any(abs(stride) >= 2**31 for stride in (*x.strides, *x.shape)):
            raise UnsupportedError(
                f"a captured array of shape {x.shape} has strides {x.strides}, and kernels read int32 ones: copy it"
            )
    for x in captures:
        values += (*x.shape, *x.strides)
    for i in trained:
        values += gradients[i].strides if words is None else [_WORD_BYTES // 8 * x for x in gradients[i].strides]
    if words is not None:
        values += counts
    values += numbers
    data = _packer(program, trained, words is not None).pack(*values)
    return ModifierValues(data.ljust(-(-len(data) // 8) * 8, b"\0"), tuple(x for x in zeroed if x[1]))


@functools.lru_cache(maxsize=1024)
def _packer(program: Program, trained: tuple[int, ...], ordered: bool) -> struct.Struct:
    letters = {"float": "f", "int": "i"}
    codes = ["Q" if name.endswith("_at") else letters[kind] for kind, name in block_fields(program, trained, ordered)]
    return struct.Struct("<" + "".join(codes))


def block_fields(program: Program, trained: tuple[int, ...], ordered: bool) -> list[tuple[str, str]]:
    """(type, name) of each field: pointers, sizes and strides of arrays, strides of gradients, numbers."""
    fields = [(f"{DTYPES[dtype].cpp} const*", f"x{i}_at") for i, (dtype, _) in enumerate(program.captures)]
    fields += [("ExactSum::Word*" if ordered else "float*", f"g{i}_at") for i in trained]
    fields += [("float*", f"r{i}_at") for i in trained if ordered]
    for i, (_, rank) in enumerate(program.captures):
        fields += [("int", f"x{i}_size{axis}") for axis in range(rank)]
        fields += [("int", f"x{i}_stride{axis}") for axis in range(rank)]
    for i in trained:
        fields += [("int", f"g{i}_stride{axis}") for axis in range(program.captures[i][1])]
    fields += [("int", f"g{i}_count") for i in trained if ordered]
    return fields + [(kind, f"n{i}") for i, kind in enumerate(program.numbers)]
