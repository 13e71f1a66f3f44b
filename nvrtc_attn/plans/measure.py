"""Run times of plans on the GPU, over scratch memory with the layouts of a problem and plausible numbers.

The caller's tensors are neither read nor written. Runs alternate between the plans, each behind a clear of more memory
than any L2 holds, which also gives the host time to queue the launches: what is timed is the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..base.dtypes import DTYPES
from ..base.errors import CudaError
from ..front.operands import BACKWARD, FORWARD, OPERANDS
from ..front.philox import RngState
from ..front.problem import AttentionProblem, OperandLayout
from ..runtime import driver
from ..runtime.buffers import DeviceBuffer, reclaim

BUDGET_S: Final = 0.5
"""GPU time for one problem; a problem that takes longer than a tenth of it is run fewer than `MAX_ROUNDS` times."""
MAX_ROUNDS: Final = 7
HOPELESS: Final = 1.3
"""Times the best first run, from which a plan is not run again."""
FLUSH_BYTES: Final = 256 << 20
_ALIGNMENT: Final = 256


def times_us(
    problem: AttentionProblem,
    backward: bool,
    plans: Mapping[str, Any],
    device_index: int,
    stream: int,
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

    Raises
    ------
    CudaError
        Most likely there is not enough memory for a second set of operands.
    """

    def run() -> dict[str, float]:
        workspace_bytes = max(plan.workspace_bytes for plan in plans.values())
        scratch = _Scratch(problem, backward, workspace_bytes, device_index, stream)
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

    def __init__(
        self,
        problem: AttentionProblem,
        backward: bool,
        workspace_bytes: int,
        device_index: int,
        stream: int,
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
        workspace = end
        self._flushed = workspace + -(-workspace_bytes // _ALIGNMENT) * _ALIGNMENT
        self._buffer = DeviceBuffer((self._flushed + FLUSH_BYTES,), "uint8", device_index, stream)
        addresses = {name: self._buffer.ptr + first for name, (_, first, _) in spans.items()}
        self.arguments = (
            tuple(addresses.get(name, 0) for name in names),
            self._buffer.ptr + workspace,
            RngState(1234, 0),
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


def _extent(layout: OperandLayout, itemsize: int) -> tuple[int, int]:
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
