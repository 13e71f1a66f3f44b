"""Compiling ahead of time: from what a user will run to the kernels it needs, compiled in parallel without a GPU.

The kernels are the ones that the heuristics choose for a synthetic problem, so what ``warmup`` puts into the cache is
what a call looks up. ``python -m nvrtc_attn warmup`` is this module with a progress bar.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..base import env
from ..base.architectures import ARCHITECTURES, arch_of
from ..base.errors import CompileError, UnsupportedError
from ..front.call import Call, CallOptions, describe_shapes
from ..front.problem import AttentionProblem
from ..front.tensors import CPU, Device, view
from ..heuristics import backward_candidates, choose_backward, choose_forward
from ..heuristics.hopper_forward import plan_of_few_decisions
from ..heuristics.hopper_forward_schedule import either_order
from ..heuristics.spec import BackwardPlanSpec, ForwardPlanSpec
from ..jit import worker_pool
from ..jit.cache import KernelCache
from ..jit.compile import compile_kernel
from ..jit.config import ForwardConfig, HopperForwardConfig, KernelConfig
from ..jit.config_text import config_from_json
from ..jit.worker_pool import COMPILE_MEMORY_BYTES, available_memory_bytes
from ..modifiers.modifier import Modifier
from ..runtime import device, driver
from . import plan
from .autotune import all_forward_candidates
from .measure import Captured

REFERENCE_SMS: Final[dict[str, int]] = {
    "sm_75": 40,  # T4
    "sm_80": 108,  # A100
    "sm_86": 84,  # RTX A6000
    "sm_87": 16,  # AGX Orin
    "sm_89": 128,  # RTX 4090
    "sm_90": 132,  # H100, H200
    "sm_100": 148,  # B200
    "sm_103": 148,  # B300
    "sm_110": 20,  # AGX Thor
    "sm_120": 170,  # RTX 5090
    "sm_121": 48,  # GB10
}
"""Multiprocessors of a common GPU of each target; a choice that depends on the number takes ``num_sms``."""

_FORWARD: Final = (ForwardConfig, HopperForwardConfig)
_SMALL: Final = (
    "delta",
    "dq_convert",
    "dkv_convert",
    "dkv_hopper_convert",
    "dropout_words",
    "backward_hopper_prepare",
    "combine",
    "dbias_reduce",
    "sink_gradient",
    "captured_sum",
    "tile_plan",
    "tile_bits",
    "tile_ranges",
)
"""Kernels without a matrix product: 0.1 s each to compile, where the others take 1 to 5."""
DEFAULT_SEQLENS: Final = ((4096, 4096), (1024, 1024), (8192, 8192), (1, 4096))
"""Training or prefill, middling, short and long, and decode. Other lengths choose among the same kernels mostly."""
DECODE_QUERIES: Final = 16
"""Up to so many queries of more keys are taken to be of a cache of keys that grows up to that length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What will be run: one combination of the options of ``warmup``."""

    arch: str
    head_dim: int
    dtype: str
    head_dim_v: int | None = None
    batch: int = 4
    num_heads: int = 16
    num_heads_kv: int | None = None
    seqlens: tuple[tuple[int, int], ...] = DEFAULT_SEQLENS
    causal: bool = False
    bias: bool = False
    dbias: bool = False
    sink: bool = False
    """Attention sinks, with their gradient."""
    max_logit: bool = False
    """The largest score of each head, of the forward pass."""
    modifier: Modifier | None = None
    """What was traced of score_mod and mask_mod, with gradients of the arrays that the score captured."""
    mask: bool = False
    softcap: bool = False
    dropout: bool = False
    varlen: bool = False
    seqused_k: bool = False
    deterministic: bool = False
    backward: bool = True
    num_sms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """One compiled kernel, or why it is not. ``compile_ms`` is the time of the call, cache look-up included."""

    config: KernelConfig
    key: str = ""
    """Of its entry in the cache."""
    cached: bool = False
    compile_ms: float = 0.0
    num_regs: int | None = None
    spill_bytes: int | None = None
    stack_bytes: int | None = None
    code_bytes: int = 0
    error: str | None = None


def problems(request: Request, *, backward: bool = False) -> list[AttentionProblem]:
    """Those of `calls`, of dense operands."""
    return [call.with_dense() for call in calls(request, backward=backward)]


def calls(request: Request, *, backward: bool = False) -> list[Call]:
    """Calls of a pass of a request, of dense tensors that are aligned to 16 bytes, one for each pair of lengths.

    Each is described and validated as a user's, so that what is compiled is what such a call looks up. The kernels of a
    backward pass make the gradients of all captured arrays that have one, of which a forward pass knows nothing.

    Raises
    ------
    ValueError
        No call accepts the request. `UnsupportedError` is one, too.
    """
    heads, heads_kv = request.num_heads, request.num_heads if request.num_heads_kv is None else request.num_heads_kv
    head_dim_v = request.head_dim if request.head_dim_v is None else request.head_dim_v
    batch, dtype = request.batch, request.dtype
    found = []
    for seqlen_q, seqlen_k in request.seqlens:
        rows_q, rows_k = (
            ((1, batch * seqlen_q), (1, batch * seqlen_k)) if request.varlen else ((batch, seqlen_q), (batch, seqlen_k))
        )
        scores = (1, heads, seqlen_q, seqlen_k)
        operands: dict[str, tuple[tuple[int, ...], str]] = {
            "q": ((*rows_q, heads, request.head_dim), dtype),
            "k": ((*rows_k, heads_kv, request.head_dim), dtype),
            "v": ((*rows_k, heads_kv, head_dim_v), dtype),
        }
        if request.bias or request.dbias:
            operands["bias"] = (scores, dtype)
        if request.mask:
            operands["mask"] = (scores, "bool")
        if request.sink:
            operands["sink"] = ((heads,), "float32")
        if request.varlen:
            operands |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ((batch + 1,), "int32"))
        if request.seqused_k:
            operands["seqused_k"] = ((batch,), "int32")
        options = CallOptions(
            causal=request.causal,
            softcap=30.0 if request.softcap else 0.0,
            dropout_p=0.1 if request.dropout else 0.0,
            max_seqlen_q=seqlen_q if request.varlen else None,
            max_seqlen_k=seqlen_k if request.varlen else None,
            return_lse=request.backward,
            deterministic=request.deterministic,
            dbias=request.dbias and request.backward,
            dsink=request.sink and request.backward,
            return_max_logit=request.max_logit,
        )
        modifier, trained = request.modifier, frozenset[int]()
        if modifier is not None and backward:
            trained = frozenset(modifier.differentiable)
        found.append(describe_shapes(operands, options, Device("cuda", 0), modifier=modifier, trained=trained))
    return found


def configs(requests: Sequence[Request], *, candidates: bool = False) -> list[KernelConfig]:
    """Kernels that the requests need, each once, the slowest to compile first.

    Of few queries (`DECODE_QUERIES`) also those that fewer keys choose: a cache that grows goes through other numbers
    of stages and blocks of a cluster, and must not wait for a compile on the way. ``candidates``: of every plan that
    `tune` measures, too.

    Raises
    ------
    ValueError
        An unknown architecture, or a request that no call accepts.
    UnsupportedError
        No kernel serves a request; carries every reason.
    """
    backend = env.backend()
    chosen: dict[KernelConfig, None] = {}
    for request in requests:
        target = ARCHITECTURES.get(request.arch)
        if target is None:
            raise ValueError(f"arch {request.arch!r} is not one of {', '.join(ARCHITECTURES)}")
        # sm_90 and sm_90a are the same GPU: what a device of that compute capability would look up is compiled.
        arch = arch_of(target.compute_capability)
        num_sms = request.num_sms or REFERENCE_SMS[arch]
        smem_limit = target.smem_per_block_optin
        target_of: dict[str, Any] = {"arch": arch, "num_sms": num_sms, "smem_limit": smem_limit, "backend": backend}
        for problem, behind in zip(problems(request), problems(request, backward=True), strict=True):
            specs: list[ForwardPlanSpec | BackwardPlanSpec] = []
            backward = request.backward and problem.seqlen_q > 1
            if candidates:  # the choice is the first of them
                specs += all_forward_candidates(problem, **target_of).values()
                specs += backward_candidates(behind, **target_of).values() if backward else ()
            else:
                specs.append(choose_forward(problem, **target_of))
                if backward:
                    specs.append(choose_backward(behind, **target_of))
            if problem.seqlen_q <= min(DECODE_QUERIES, problem.seqlen_k - 1):
                shorter = tuple((problem.seqlen_q, keys) for keys in lengths_before(problem.seqlen_k))
                specs += [choose_forward(x, **target_of) for x in problems(replace(request, seqlens=shorter))]
            chosen.update((launch.config, None) for spec in specs for launch in spec.launches)
            # How many sequences there will be, which decides the order of tiles and who makes dropout's decisions, is
            # not known.
            launches = specs[0].launches if problem.seqlen_q > DECODE_QUERIES else ()
            if any(getattr(launch.config, "keep_words", False) for launch in launches):
                launches = (*launches, *plan_of_few_decisions(problem, num_sms=num_sms).launches)
            for launch in launches:
                if isinstance(launch.config, HopperForwardConfig):
                    chosen.update(dict.fromkeys(either_order(problem, launch.config)))
    return sorted(chosen, key=lambda c: (c.kernel not in _SMALL, not isinstance(c, _FORWARD), c.head_dim), reverse=True)


def lengths_before(seqlen_k: int) -> Iterator[int]:
    """Fewer keys, one length for each choice among forward kernels: of tiles of 16 up to 4096, and of tiles of 64.

    Tables change at whole tiles, whose widths are multiples of 16 and fit the keys where these are few, or at a power
    of two. Beyond 8192 keys, where kernels take turns, 1 % lies between.
    """
    yield from range(16, min(seqlen_k, 4096), 16)
    tiles = 1
    while 64 * tiles <= seqlen_k:
        yield from (x for x in (64 * tiles - 1, 64 * tiles) if x < seqlen_k and (x % 16 or x >= 4096))
        tiles += max(1, tiles // 128)


def tune(requests: Sequence[Request]) -> int:
    """Measure on the GPUs of this machine what the requests can choose between; the number of passes looked at.

    Of several GPUs of one kind the first is used. What is remembered already is not measured again. Results go to the
    log and the cache, see `autotune`.
    """
    passes = 0
    for index, request in itertools.product(device.one_of_each_kind(range(driver.device_count())), requests):
        if ARCHITECTURES[request.arch].compute_capability != device.properties(index).compute_capability:
            continue
        for call in calls(request):
            plan.forward_plan(call.with_dense(), index, 0, tune=True, captured=_captured(request, call, index))
            passes += 1
        for call in calls(request, backward=True) if request.backward else ():
            if call.problem.seqlen_q > 1:
                plan.backward_plan(call.with_dense(), index, 0, tune=True, captured=_captured(request, call, index))
                passes += 1
    return passes


def _captured(request: Request, call: Call, device_index: int) -> Captured | None:
    """What the modifier of ``call`` has: the request's arrays as they are, on the host or on the GPU."""
    if call.modifier is None or call.modified is None or request.modifier is None:
        return None
    arrays = list(call.captures)
    for i, place in enumerate(call.modified.kept):
        with contextlib.suppress(TypeError, ValueError, UnsupportedError):  # an array without memory
            found = view(request.modifier.captures[place], f"captured array {place} of the modifier")
            if found.dtype == arrays[i].dtype and found.device in (CPU, Device("cuda", device_index)):
                arrays[i] = found
    return Captured(tuple(arrays), call.modifier.numbers)


def kernels_of(directory: Path) -> tuple[list[KernelConfig], int]:
    """The kernels in a directory of compiled ones, of any version and NVRTC, the most recently used first.

    One that two of these compiled is there twice. And how many this version cannot compile, having none of their kind.
    """
    found, others = list[KernelConfig](), 0
    for entry in KernelCache(directory, env.cache_size_bytes(), read_only=True).entries():
        if not entry.tuned:
            try:
                found.append(config_from_json(entry.metadata.get("config", "")))
            except ValueError:
                others += 1
    return found, others


def worker_count(num_kernels: int) -> int:
    """Processes to compile with: one per usable core, as far as memory allows."""
    return max(1, min(num_kernels, worker_pool.usable_cores(), available_memory_bytes() // COMPILE_MEMORY_BYTES))


def compile_configs(kernels: Sequence[KernelConfig], workers: int | None = None) -> Iterator[KernelReport]:
    """Compile ``kernels`` into the cache and yield a report of each as it finishes. A failure is a report too.

    Compiles run in the processes of `worker_pool`, ``workers`` at a time.
    """
    workers = worker_count(len(kernels)) if workers is None else max(1, min(workers, len(kernels)))
    todo, done = iter(kernels), queue.SimpleQueue[KernelReport | BaseException]()
    lock = threading.Lock()

    def work() -> None:
        try:
            while True:
                with lock:
                    config = next(todo, None)
                if config is None:
                    return
                done.put(_compile_one(config))
        except BaseException as error:  # for the caller
            done.put(error)

    try:
        with worker_pool.pool().limited(workers):
            for _ in range(workers):
                threading.Thread(target=work, name="nvrtc_attn warmup", daemon=True).start()
            for _ in kernels:
                report = done.get()
                if isinstance(report, BaseException):
                    raise report
                yield report
    finally:
        todo = iter(())  # a caller that stops early, or an error: nothing more is begun


def _compile_one(config: KernelConfig) -> KernelReport:
    start = time.perf_counter()
    try:
        compiled = compile_kernel(config)
    except (CompileError, OSError) as error:
        return KernelReport(config=config, error=str(error))
    return KernelReport(
        config=config,
        key=compiled.key,
        cached=compiled.cached,
        compile_ms=1e3 * (time.perf_counter() - start),
        num_regs=compiled.num_regs,
        spill_bytes=compiled.spill_bytes,
        stack_bytes=compiled.stack_bytes,
        code_bytes=len(compiled.code),
    )
