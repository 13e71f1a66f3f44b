"""Run times of plans on the GPU, over scratch memory with the layouts of a problem and plausible numbers.

The caller's tensors are neither read nor written, but for the arrays that a modifier captured: what they hold decides
which tiles of scores a mask keeps, and which elements of a gradient many threads add to, so they are read where they
lie. Where nobody has them yet, numbers stand for them that are in range where they are indices.

Runs alternate between the plans, each behind a clear of more memory than any L2 holds, which also gives the host time
to queue the launches: what is timed is the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.dtypes import DTYPES
from ..base.errors import CudaError
from ..front.dlpack import compact_strides
from ..front.operands import BACKWARD, FORWARD, OPERANDS
from ..front.philox import RngState
from ..front.problem import AttentionProblem, OperandLayout
from ..front.tensorview import TensorView
from ..heuristics.common import orders_gradients
from ..modifiers.cuda_values import ModifierValues, modifier_values, ordered_bytes
from ..modifiers.graph import walk
from ..modifiers.modifier import Program
from ..runtime import driver
from ..runtime.buffers import DeviceBuffer, reclaim

BUDGET_S: Final = 0.5
"""GPU time for one problem; a problem that takes longer than a tenth of it is run fewer than `MAX_ROUNDS` times."""
MAX_ROUNDS: Final = 7
HOPELESS: Final = 1.3
"""Times the best first run, from which a plan is not run again."""
FLUSH_BYTES: Final = 256 << 20
_ALIGNMENT: Final = 256


class Captured(NamedTuple):
    """What the modifier of a call has beside its `Program`."""

    arrays: tuple[TensorView, ...]
    """In the program's order: of the GPU that is measured on, of the host, or of memory that is not known yet (address
    0)."""
    numbers: tuple[float, ...]

    @property
    def known(self) -> tuple[bool, ...]:
        """Of which arrays the memory is known."""
        return tuple(x.ptr != 0 for x in self.arrays)


def times_us(
    problem: AttentionProblem,
    backward: bool,
    plans: Mapping[str, Any],
    device_index: int,
    stream: int,
    captured: Captured | None = None,
) -> dict[str, float]:
    """Microseconds of a run of each plan, in their order; plans for which `BUDGET_S` did not suffice are missing.

    Parameters
    ----------
    backward
        Which pass the plans are for.
    plans
        By name. The first one is always run as often as the fastest.
    stream
        Must not be captured. The runs follow what is queued on it, and are done when this returns.
    captured
        What the problem's modifier needs, if it has one.

    Raises
    ------
    CudaError
        Most likely there is not enough memory for a second set of operands.
    UnsupportedError
        The call itself would raise it: of a captured array, or of its gradient.
    """

    def run() -> dict[str, float]:
        workspace_bytes = max(plan.workspace_bytes for plan in plans.values())
        scratch = _Scratch(problem, backward, workspace_bytes, device_index, stream, captured)
        runs = {name: functools.partial(plan.run, stream, *scratch.arguments) for name, plan in plans.items()}
        return alternate(runs, _Clock(scratch.flush, device_index, stream))

    with driver.device_context(device_index), driver.beside_captures():
        try:
            return run()
        finally:
            with contextlib.suppress(CudaError):  # the first error is the one to see
                driver.call("cuStreamSynchronize", stream, device=device_index)
            reclaim(device_index)  # the scratch memory, which is nobody's since run() returned


def alternate(runs: Mapping[str, Callable[[], None]], clock: Callable[..., list[float]]) -> dict[str, float]:
    """Medians of alternating runs, so that a changing clock rate changes all of them; ``clock`` times a list of runs.

    A run that is hopeless after its first one keeps that time.
    """
    times: dict[str, float] = {}
    spent_us = 0.0
    for name, run in runs.items():
        if spent_us < 0.5e6 * BUDGET_S:
            both = clock([run, run])
            spent_us += sum(both)
            times[name] = both[1]
    limit = HOPELESS * min(times.values())
    hopeful = [name for index, (name, time) in enumerate(times.items()) if index == 0 or time <= limit]
    if len(hopeful) > 1:
        rounds = int((1e6 * BUDGET_S - spent_us) / sum(times[name] for name in hopeful))
        rounds = max(1, min(rounds, MAX_ROUNDS))
        found = clock([runs[name] for name in hopeful] * rounds)
        times |= {name: statistics.median(found[index :: len(hopeful)]) for index, name in enumerate(hopeful)}
    return {name: round(time, 2) for name, time in times.items()}


class _Clock:
    """Microseconds of runs on a stream, by events around each."""

    def __init__(self, flush: Callable[[], None], device_index: int, stream: int) -> None:
        self._flush, self._device, self._stream = flush, device_index, stream

    def __call__(self, runs: list[Callable[[], None]]) -> list[float]:
        call = functools.partial(driver.call, device=self._device)
        pairs = [(call("cuEventCreate", 0), call("cuEventCreate", 0)) for _ in runs]
        try:
            for run, (start, end) in zip(runs, pairs, strict=True):
                self._flush()
                call("cuEventRecord", start, self._stream)
                run()
                call("cuEventRecord", end, self._stream)
            call("cuStreamSynchronize", self._stream)
            return [1e3 * float(call("cuEventElapsedTime", start, end)) for start, end in pairs]
        finally:
            for event in (event for pair in pairs for event in pair):
                call("cuEventDestroy", event)


class _Scratch:
    """One allocation with every operand of a pass in its own strides; inputs hold plausible numbers.

    ``arguments`` are those of a plan's ``run`` after the stream.
    """

    arguments: tuple[Any, ...]

    def __init__(
        self,
        problem: AttentionProblem,
        backward: bool,
        workspace_bytes: int,
        device_index: int,
        stream: int,
        captured: Captured | None,
    ) -> None:
        self._device, self._stream = device_index, stream
        names = BACKWARD if backward else FORWARD
        layouts = {name: x for name in names if (x := problem.layout_of(name)) is not None}
        values: dict[str, npt.NDArray[Any]] = dict(_lengths(problem))
        for name, x in layouts.items():
            if name == "lse" and backward:
                # That of scores which are standard normal, as those of such q and k are.
                values[name] = np.full(1024, math.log(problem.seqlen_k) + 0.5, np.float32)
            elif OPERANDS[name].role(backward).startswith("in"):
                values[name] = numbers(x.dtype)

        # name -> offsets of its first byte, of its first element's, and of its end
        spans: dict[str, tuple[int, int, int]] = {}
        end = 0
        for name, x in layouts.items():
            before, after = _extent(x, DTYPES[x.dtype].itemsize)
            # As far from a 16-byte boundary as the user's, which decides what a kernel may read at once.
            first = end + -(-before // _ALIGNMENT) * _ALIGNMENT + x.offset_alignment % 16
            spans[name] = (first - before, first, first + after)
            end = -(-spans[name][2] // _ALIGNMENT) * _ALIGNMENT
        for name, array in values.items():
            if name not in spans:
                spans[name] = (end, end, end + array.nbytes)
                end = -(-(end + array.nbytes) // _ALIGNMENT) * _ALIGNMENT
        program = problem.modifier
        trained = problem.trained if backward else ()
        known: tuple[TensorView, ...] = () if captured is None or program is None else captured.arrays
        words_bytes = 0
        if program is not None:
            bounds = _index_bounds(program, known)
            for i, view in enumerate(known):
                if not _is_on(view, device_index):
                    name = f"captured {i}"
                    before, after = _extent(view, DTYPES[view.dtype].itemsize)
                    spans[name] = (end, end + before, end + before + after)
                    given = _bytes_of(view, before, after) if view.ptr else None
                    values[name] = elements(view.dtype, bounds.get(i, 2)) if given is None else given
                    end = -(-spans[name][2] // _ALIGNMENT) * _ALIGNMENT
                if i in trained:
                    name = f"gradient {i}"
                    spans[name] = (end, end, end + 4 * math.prod(view.shape))
                    end = -(-spans[name][2] // _ALIGNMENT) * _ALIGNMENT
            words_bytes = ordered_bytes(trained, known) if orders_gradients(problem) else 0
        words = end
        workspace = words + -(-words_bytes // _ALIGNMENT) * _ALIGNMENT
        self._flushed = workspace + -(-workspace_bytes // _ALIGNMENT) * _ALIGNMENT
        self._buffer = DeviceBuffer((self._flushed + FLUSH_BYTES,), "uint8", device_index, stream)
        addresses = {name: self._buffer.ptr + first for name, (_, first, _) in spans.items()}
        self.arguments = (
            tuple(addresses.get(name, 0) for name in names),
            self._buffer.ptr + workspace,
            RngState(1234, 0),
        )
        if program is not None and captured is not None:
            self.arguments += (
                _modifier_values(
                    program, trained, captured, addresses, self._buffer.ptr + words if words_bytes else None
                ),
            )
        for name, array in values.items():
            self._fill(spans[name][0], spans[name][2], array)

    def flush(self) -> None:
        """Clear as much memory as no L2 holds."""
        address = self._buffer.ptr + self._flushed
        driver.call("cuMemsetD8Async", address, 0, FLUSH_BYTES, self._stream, device=self._device)

    def _fill(self, start: int, end: int, values: npt.NDArray[Any]) -> None:
        """Repeat ``values`` from ``start`` to ``end``."""
        address, size = self._buffer.ptr + start, end - start
        done = min(values.nbytes, size)
        # Pageable memory is copied before the call returns.
        driver.call("cuMemcpyHtoDAsync", address, values.ctypes.data, done, self._stream, device=self._device)
        while done < size:
            step = min(done, size - done)
            driver.call("cuMemcpyDtoDAsync", address + done, address, step, self._stream, device=self._device)
            done += step


def _is_on(x: TensorView, device_index: int) -> bool:
    return x.ptr != 0 and x.device.type == "cuda" and x.device.index == device_index


def _modifier_values(
    program: Program, trained: Sequence[int], captured: Captured, addresses: Mapping[str, int], words: int | None
) -> ModifierValues:
    """As a call's, with the arrays and gradients that have ``addresses`` there."""
    arrays = [dataclasses.replace(x, ptr=addresses.get(f"captured {i}", x.ptr)) for i, x in enumerate(captured.arrays)]
    gradients = [
        TensorView(addresses[f"gradient {i}"], x.shape, compact_strides(x.shape), "float32", x.device)
        if i in trained
        else None
        for i, x in enumerate(captured.arrays)
    ]
    return modifier_values(program, tuple(trained), arrays, gradients, captured.numbers, words)


def _bytes_of(x: TensorView, before: int, after: int) -> npt.NDArray[Any]:
    """A copy of all that an array on the host spans, before its first element and from there on."""
    return np.frombuffer(ctypes.string_at(x.ptr - before, before + after), np.uint8)


def _index_bounds(program: Program, arrays: Sequence[TensorView]) -> dict[int, int]:
    """Of arrays whose elements decide an index of another: the least size of a dim that they decide one of."""
    found: dict[int, int] = {}
    for node in walk([x for x in (program.score, program.mask) if x is not None]):
        if node.op == "load":
            for size, index in zip(arrays[node.value].shape, node.args, strict=True):
                for x in walk([index]):
                    if x.op == "load":
                        found[x.value] = min(found.get(x.value, size), size)
    return found


def elements(dtype: str, bound: int) -> npt.NDArray[Any]:
    """As `numbers`, of what a modifier captured: integers are from 0 to ``bound``, which is not one of them.

    All elements of a table must be asked for as often: gradients that are added up would wait for one of them.
    """
    if dtype == "bool" or not np.issubdtype(np.dtype("float32" if dtype == "bfloat16" else dtype), np.integer):
        return numbers(dtype)
    bound = max(1, min(bound, int(np.iinfo(dtype).max) + 1))
    return np.random.default_rng(0).integers(bound, size=1 << 16).astype(dtype)


def _extent(layout: OperandLayout | TensorView, itemsize: int) -> tuple[int, int]:
    """Bytes before the first element of a tensor, and from it to the end."""
    reach = [(size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True)]
    return -itemsize * sum(x for x in reach if x < 0), itemsize * (1 + sum(x for x in reach if x > 0))


@functools.cache
def numbers(dtype: str) -> npt.NDArray[Any]:
    """A mebi of standard normal numbers, or of bytes of which three quarters are one, for a mask."""
    rng = np.random.default_rng(0)
    if dtype in ("bool", "uint8"):
        return (rng.random(1 << 20) < 0.75).astype(np.uint8)
    values = rng.standard_normal(1 << 20, np.float32)
    if dtype == "bfloat16":  # cut off: it need not be rounded
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def _lengths(problem: AttentionProblem) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Sequences of one length that fill the packed tensors."""
    per_sequence = problem.k.shape[1] // problem.batch if problem.varlen else problem.seqlen_k
    if problem.varlen:
        for name, tokens, longest in (
            ("cu_seqlens_q", problem.q.shape[1], problem.seqlen_q),
            ("cu_seqlens_k", problem.k.shape[1], problem.seqlen_k),
        ):
            yield name, np.arange(problem.batch + 1, dtype=np.int32) * np.int32(min(longest, tokens // problem.batch))
    if problem.seqused_k:
        yield "seqused_k", np.full(problem.batch, min(per_sequence, problem.seqlen_k), np.int32)
