"""Entry source -> cubin: derived key, memory, disk cache, NVRTC. Needs no GPU.

The key is SHA-256 over everything that decides the bytes of the cubin: the source text, the options without include
paths, the digest of the headers that the source can include, and the build of NVRTC. Install prefixes and the driver
are not in it.

NVRTC runs in worker processes (`worker_pool` says why), each called by a thread of its own here.

Concurrency: one compile per key and process (``_flights``); who else wants it waits and gets its result or its error,
and a failed key may be tried again. Several kernels compile side by side (`compile_kernels`), and what may be needed
later in the background (`request_kernels`). A caller only ever waits, so KeyboardInterrupt and signal handlers of the
user's arrive at once and leave nothing to repair: an interrupted caller's compile goes on, and the next call joins it.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..base import env
from ..base.errors import CompileError
from ..base.log import LOGGER
from . import headers, nvrtc_library, worker_pool
from .cache import kernel_cache
from .cache_entry import SCHEMA
from .codegen import entry_source
from .config import KernelConfig
from .config_text import config_to_json, described, warmup_command
from .dump import dump_kernel
from .nvrtc_call import PROGRAM_NAME, resources_of, run_nvrtc
from .nvrtc_library import nvrtc_build
from .worker_pool import Ticket

COMMON_OPTIONS: Final = (
    "--std=c++17",
    "--device-as-default-execution-space",  # CUTLASS needs it under NVRTC
    "--define-macro=NDEBUG",
    "--ptxas-options=-v",  # registers, spills and the C75xx warnings, which the tests read from the log
    "--modify-stack-limit=false",  # the default changes RLIMIT_STACK of the whole process during a compile
)
_NO_CACHE: Final = ((12, 9), "--no-cache")
"""NVRTC keeps a cache of its own since this version; one cache is enough to reason about."""
_MEMORY_ENTRIES: Final = 256
"""Cubins kept in memory (50 to 100 KB each): what a process without a disk cache does not compile twice."""
_BEGIN_SECONDS: Final = 1.0
"""After so long a waiter looks whether its flight has begun: only a KeyboardInterrupt leaves one that has not."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A cubin. The numbers are ptxas's own, per thread and in bytes, ``None`` if the log does not tell."""

    code: bytes
    key: str
    log: str
    compile_ms: float
    """Time that NVRTC took when it was compiled, which may have been in another process."""
    cached: bool
    """It came from the disk cache."""
    config: KernelConfig | None
    num_regs: int | None = None
    spill_bytes: int | None = None
    stack_bytes: int | None = None
    static_smem_bytes: int | None = None


class _Flight:
    """A look-up or compile under way. Without result and error when it is done, it was given up."""

    __slots__ = ("begun", "done", "error", "result", "ticket")

    def __init__(self, *, urgent: bool) -> None:
        self.begun = False
        self.done = threading.Event()
        self.result: CompiledKernel | None = None
        self.error: Exception | None = None
        self.ticket = Ticket(urgent=urgent)


@dataclass(frozen=True, slots=True)
class _Request:
    """Everything that NVRTC needs to know, and the key of the result."""

    key: str
    source: str
    arch: str
    options: tuple[str, ...]
    config: KernelConfig | None


@dataclass(slots=True)
class Statistics:
    """Counters of this process since its start."""

    compiles: int = 0
    disk_hits: int = 0
    memory_hits: int = 0


statistics = Statistics()
_lock = threading.Lock()
_flights: dict[str, _Flight] = {}
_memory: OrderedDict[str, CompiledKernel] = OrderedDict()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _flights.clear()  # their threads stayed in the parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def compile_kernel(config: KernelConfig) -> CompiledKernel:
    """The cubin for ``config``: from memory, from the disk cache, or compiled now.

    Raises
    ------
    CompileError
        NVRTC is missing, does not know the architecture or refused the source; its process died; or a compile was
        forbidden by ``NVRTC_ATTN_NO_COMPILE`` or ``NVRTC_ATTN_ASSERT_CACHED``.
    """
    return compile_source(entry_source(config), config.arch, config=config)


def compile_source(
    source: str, arch: str, *, config: KernelConfig | None = None, extra_options: Sequence[str] = ()
) -> CompiledKernel:
    """Like ``compile_kernel``, for any source that defines the kernel ``attention_entry``."""
    return _result(_request(source, arch, config, extra_options))


def compile_kernels(
    configs: Sequence[KernelConfig], meanwhile: Callable[[], None] | None = None
) -> Iterator[CompiledKernel]:
    """The cubins for ``configs``, in this order, compiled side by side: all are under way when this returns.

    ``meanwhile`` is called then, if there is any to wait for.

    Raises
    ------
    CompileError
        As `compile_kernel`, at the kernel that it is about; the others go on.
    """
    seen = headers.Snapshot()
    requests = [_request(entry_source(config), config.arch, config, (), seen) for config in configs]
    for request in requests:
        _start(request, urgent=True)
    if meanwhile is not None and any(request.key in _flights for request in requests):
        meanwhile()
    return map(_result, requests)


def request_kernels(configs: Sequence[KernelConfig]) -> None:
    """Compile ``configs`` in the background, where that is allowed, for a later call.

    Raises nothing and says nothing: what fails here fails again when it is asked for.
    """
    try:
        if env.no_compile() or env.assert_cached():
            return
        seen = headers.Snapshot()
        for config in configs:
            _start(_request(entry_source(config), config.arch, config, (), seen), urgent=False)
    except Exception as error:
        LOGGER.debug("a compile ahead of time was not possible: %s", error)


def key_of(config: KernelConfig, seen: headers.Snapshot | None = None) -> str:
    """Cache key of the kernel of ``config``: equal keys have equal sources, headers, options and compilers."""
    return _request(entry_source(config), config.arch, config, (), seen).key


def _request(
    source: str,
    arch: str,
    config: KernelConfig | None,
    extra_options: Sequence[str],
    seen: headers.Snapshot | None = None,
) -> _Request:
    version, no_cache = _NO_CACHE
    options = (f"--gpu-architecture={arch}", *COMMON_OPTIONS, *extra_options)
    if nvrtc_library.nvrtc().version >= version:
        options = (*options, no_cache)
    return _Request(kernel_key(source, options, seen), source, arch, options, config)


def _result(request: _Request) -> CompiledKernel:
    """The kernel that ``request`` asks for, when it is there."""
    while True:
        known, flight, is_ours = _join(request, urgent=True)
        if known is not None:
            return _with_config(known, request.config)
        assert flight is not None
        if is_ours:
            _look_up(flight, request)
        worker_pool.pool().hurry(flight.ticket)
        while not flight.done.wait(_BEGIN_SECONDS):
            if not flight.begun:  # KeyboardInterrupt came between the table of flights and the look-up
                _finish(flight, request.key)
        if flight.error is not None:
            # Each waiter needs its own object: raising one object in several threads mixes their tracebacks.
            raise _copy(flight.error) from flight.error.__cause__
        if flight.result is not None:
            return _with_config(flight.result, request.config)


def _with_config(kernel: CompiledKernel, config: KernelConfig | None) -> CompiledKernel:
    """``kernel``, which another request for the same source may have brought."""
    return kernel if kernel.config == config else replace(kernel, config=config)


def _start(request: _Request, *, urgent: bool) -> None:
    """Have ``request`` under way. A forbidden compile is no error here."""
    _, flight, is_ours = _join(request, urgent=urgent)
    if is_ours and flight is not None:
        try:
            _look_up(flight, request)
        except CompileError:
            if urgent:
                LOGGER.debug("%s cannot be compiled", request.key)


def _join(request: _Request, *, urgent: bool) -> tuple[CompiledKernel | None, _Flight | None, bool]:
    """The kernel if it is in memory, or else the flight that brings it, and whether the caller has to look it up."""
    with _lock:
        known = _memory.get(request.key)
        if known is not None:
            _memory.move_to_end(request.key)
            statistics.memory_hits += 1
            return known, None, False
        flight = _flights.get(request.key)
        if flight is not None:
            return None, flight, False
        flight = _flights[request.key] = _Flight(urgent=urgent)
        return None, flight, True


def _look_up(flight: _Flight, request: _Request) -> None:
    """Finish ``flight`` with what the disk cache has, or leave it to a thread that compiles."""
    compiling = False
    try:
        flight.begun = True
        flight.result = _cached(request)
        if flight.result is not None:
            _dump(request, flight.result.log, flight.result.code)
        else:
            _refuse_if_forbidden(request)
            thread = threading.Thread(target=_fly, args=(flight, request), name="nvrtc_attn compile", daemon=True)
            try:
                thread.start()
                compiling = True
            except RuntimeError:  # the interpreter is shutting down, or has no thread left
                flight.result = _compile(request, flight.ticket)
    except Exception as error:
        flight.error = error
        raise
    finally:
        # A KeyboardInterrupt leaves neither result nor error: who waits takes over.
        if not compiling:
            _finish(flight, request.key)


def _fly(flight: _Flight, request: _Request) -> None:
    try:
        flight.result = _compile(request, flight.ticket)
    except Exception as error:
        flight.error = error
    finally:
        _finish(flight, request.key)


def _finish(flight: _Flight, key: str) -> None:
    with _lock:
        if flight.result is not None:
            _memory[key] = flight.result
            while len(_memory) > _MEMORY_ENTRIES:
                _memory.popitem(last=False)
        if _flights.get(key) is flight:
            del _flights[key]
    flight.done.set()


def discard(key: str) -> None:
    """Forget the cubin for ``key``, in memory and on disk."""
    with _lock:
        _memory.pop(key, None)
    kernel_cache().discard(key)


def kernel_key(source: str, options: Sequence[str], seen: headers.Snapshot | None = None) -> str:
    """Cache key of a compile, 64 hexadecimal digits. ``options`` hold no include paths.

    ``seen`` has the headers of this moment, which the kernels of one call share.
    """
    digest = hashlib.sha256(usedforsecurity=False)
    header_digest = (headers.Snapshot() if seen is None else seen).digest(source)
    parts = (str(SCHEMA), PROGRAM_NAME, source, nvrtc_build(), header_digest, str(len(options)), *options)
    for part in parts:
        data = part.encode()
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.hexdigest()


def _cached(request: _Request) -> CompiledKernel | None:
    entry = kernel_cache().get(request.key)
    if entry is None:
        return None
    log, milliseconds = str(entry.metadata.get("log", "")), float(entry.metadata.get("compile_ms", 0.0))
    with _lock:
        statistics.disk_hits += 1
    return CompiledKernel(entry.code, request.key, log, milliseconds, True, request.config, **resources_of(log))


def _refuse_if_forbidden(request: _Request) -> None:
    variable = (
        "NVRTC_ATTN_NO_COMPILE" if env.no_compile() else "NVRTC_ATTN_ASSERT_CACHED" if env.assert_cached() else ""
    )
    if variable:
        raise CompileError(
            f"{_what(request.config)} for {request.arch} is not in the kernel cache ({kernel_cache().path}) and "
            f"{variable} is set. Where it is not, run:\n{_warmup_command(request.config, request.arch)}",
            "",
            request.source,
            request.options,
        )


def _compile(request: _Request, ticket: Ticket) -> CompiledKernel:
    config = request.config
    try:
        code, log = run_nvrtc(request.source, request.arch, request.options, ticket)
    except CompileError as error:
        _dump(request, error.log or str(error), None)
        raise
    milliseconds = 1e3 * (time.perf_counter() - ticket.started)
    _dump(request, log, code)
    with _lock:
        statistics.compiles += 1
    if config is not None:
        LOGGER.info("compiled in %.1f s, which no cache had: %s", milliseconds / 1e3, described(config))
    metadata = {
        "arch": request.arch,
        "kernel": config.kernel if config is not None else "",
        "config": config_to_json(config) if config is not None else "",
        "nvrtc": nvrtc_build(),
        "options": list(request.options),
        "created": time.time(),
        "compile_ms": milliseconds,
        "log": log,
    }
    kernel_cache().put(request.key, metadata, code)
    return CompiledKernel(code, request.key, log, milliseconds, False, config, **resources_of(log))


def _dump(request: _Request, log: str, code: bytes | None) -> None:
    directory = env.dump_dir()
    if directory is not None:
        kernel = request.config.kernel if request.config is not None else ""
        dump_kernel(directory, kernel, request.key, request.source, request.options, log, code)


def _copy(error: Exception) -> Exception:
    try:
        return type(error)(*error.args)
    except TypeError:
        return error


def _warmup_command(config: KernelConfig | None, arch: str) -> str:
    if config is None:
        return f"python -m nvrtc_attn warmup --arch {arch}"
    return warmup_command(config)


def _what(config: KernelConfig | None) -> str:
    return (
        f"kernel {config.kernel} (head dim {config.head_dim}, {config.dtype})" if config is not None else "the kernel"
    )
