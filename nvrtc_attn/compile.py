"""Entry source -> cubin: derived key, memory, disk cache, NVRTC. Needs no GPU.

The key is SHA-256 over everything that decides the bytes of the cubin: the source text, the options without include
paths, the digest of all headers that can be included, and the build of NVRTC. Install prefixes and the driver are not
in it.

NVRTC is called through ``cuda.bindings.nvrtc``: ``cuda.core.Program`` cannot pass ``--modify-stack-limit``, hides the
option list that the key needs, and takes 0.2 s to import.

Concurrency: one compile per key and process (``_flights``); the others wait for it and get its result or its error, and
a failed key may be tried again. NVRTC compiles without the interpreter lock.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from . import driver, env, headers
from .cache import SCHEMA, kernel_cache
from .codegen import entry_source
from .config import KernelConfig
from .errors import CompileError

PROGRAM_NAME: Final = "attention_entry.cu"
"""Without a directory part, so that messages are the same everywhere and no directory is searched because of it."""

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
    """A compile under way."""

    __slots__ = ("done", "error", "result")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: CompiledKernel | None = None
        self.error: Exception | None = None


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
_builds: dict[str, str] = {}


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
        NVRTC is missing, too new for the driver, does not know the architecture or refused the source; or a compile
        was forbidden by ``NVRTC_ATTN_NO_COMPILE`` or ``NVRTC_ATTN_ASSERT_CACHED``.
    """
    return compile_source(entry_source(config), config.arch, config=config)


def compile_source(
    source: str, arch: str, *, config: KernelConfig | None = None, extra_options: Sequence[str] = ()
) -> CompiledKernel:
    """Like ``compile_kernel``, for any source that defines the kernel ``attention_entry``."""
    version, no_cache = _NO_CACHE
    options = (f"--gpu-architecture={arch}", *COMMON_OPTIONS, *extra_options)
    if headers.nvrtc().version >= version:
        options = (*options, no_cache)
    _check_driver()
    key = kernel_key(source, options)
    while True:
        with _lock:
            known = _memory.get(key)
            if known is not None:
                _memory.move_to_end(key)
                statistics.memory_hits += 1
                return known if known.config == config else replace(known, config=config)
            flight = _flights.get(key)
            leader = flight is None
            if flight is None:
                flight = _flights[key] = _Flight()
        if not leader:
            flight.done.wait()
            if flight.error is not None:
                # Each waiter needs its own object: raising one object in several threads mixes their tracebacks.
                raise _copy(flight.error) from flight.error
            continue
        try:
            result = flight.result = _find_or_compile(key, source, arch, options, config)
            with _lock:
                _memory[key] = result
                while len(_memory) > _MEMORY_ENTRIES:
                    _memory.popitem(last=False)
            return result
        except Exception as error:
            flight.error = error
            raise
        finally:
            # A KeyboardInterrupt leaves neither result nor error: the next waiter takes over.
            with _lock:
                _flights.pop(key, None)
            flight.done.set()


def discard(key: str) -> None:
    """Forget the cubin for ``key``, in memory and on disk."""
    with _lock:
        _memory.pop(key, None)
    kernel_cache().discard(key)


def kernel_key(source: str, options: Sequence[str]) -> str:
    """Cache key of a compile, 64 hexadecimal digits. ``options`` hold no include paths."""
    digest = hashlib.sha256(usedforsecurity=False)
    parts = (str(SCHEMA), PROGRAM_NAME, source, nvrtc_build(), headers.header_digest(), str(len(options)), *options)
    for part in parts:
        data = part.encode()
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.hexdigest()


def nvrtc_build() -> str:
    """Version and build of NVRTC and of its builtins library, for example ``13.0 65be0db3… 08d17e32…``.

    ``nvrtcVersion`` has no patch number, so the linker's build ids tell two builds of 13.0 apart.
    """
    library = headers.nvrtc()
    build = _builds.get(library.path)
    if build is None:
        path = Path(library.path)
        if path.is_file():
            builtins = sorted(p for p in path.parent.glob("*nvrtc-builtins*") if ".alt." not in p.name)
            build = " ".join(
                [f"{library.version[0]}.{library.version[1]}", *(_file_build(p) for p in (path, *builtins))]
            )
        else:
            # Not known, so not to be confused with any other: nothing is found on disk, everything works.
            build = f"{library.version[0]}.{library.version[1]} unknown {os.urandom(16).hex()}"
        _builds[library.path] = build
    return build


def _file_build(path: Path) -> str:
    """The GNU build id of an ELF file, or the SHA-256 of a file that has none (0.1 s for the 110 MB of NVRTC)."""
    with open(path, "rb") as file:
        try:
            build_id = _elf_build_id(file)
        except struct.error:  # not a whole ELF file
            build_id = ""
        if build_id:
            return build_id
        file.seek(0)
        digest = hashlib.sha256(usedforsecurity=False)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def _elf_build_id(file: BinaryIO) -> str:
    """Build id from the note segments, empty if there is none."""
    head = file.read(64)
    if head[:6] != b"\x7fELF\x02\x01":  # 64-bit little endian
        return ""
    (table,) = struct.unpack_from("<Q", head, 32)
    entry_size, count = struct.unpack_from("<HH", head, 54)
    for index in range(count):
        file.seek(table + index * entry_size)
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", file.read(56))
        if kind == 4 and size < 1 << 16:  # PT_NOTE
            file.seek(offset)
            build_id = _build_id(file.read(size))
            if build_id:
                return build_id
    return ""


def _build_id(notes: bytes) -> str:
    position = 0
    while position + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, position)
        name = notes[position + 12 : position + 12 + name_size]
        start = position + 12 + (name_size + 3) // 4 * 4
        if kind == 3 and name == b"GNU\0":  # NT_GNU_BUILD_ID
            return notes[start : start + size].hex()
        position = start + (size + 3) // 4 * 4
    return ""


def _find_or_compile(
    key: str, source: str, arch: str, options: tuple[str, ...], config: KernelConfig | None
) -> CompiledKernel:
    cache = kernel_cache()
    entry = cache.get(key)
    if entry is not None:
        log, milliseconds = str(entry.metadata.get("log", "")), float(entry.metadata.get("compile_ms", 0.0))
        statistics.disk_hits += 1
        return CompiledKernel(entry.code, key, log, milliseconds, True, config, **_resources(log))
    variable = (
        "NVRTC_ATTN_NO_COMPILE" if env.no_compile() else "NVRTC_ATTN_ASSERT_CACHED" if env.assert_cached() else ""
    )
    if variable:
        raise CompileError(
            f"{_what(config)} for {arch} is not in the kernel cache ({cache.path}) and {variable} is set. Run:\n"
            f"{_warmup_command(config, arch)}",
            "",
            source,
            options,
        )
    start = time.perf_counter()
    code, log = _run_nvrtc(source, arch, options)
    milliseconds = 1e3 * (time.perf_counter() - start)
    statistics.compiles += 1
    metadata = {
        "arch": arch,
        "kernel": config.kernel if config is not None else "",
        "config": repr(config) if config is not None else "",
        "nvrtc": nvrtc_build(),
        "options": list(options),
        "created": time.time(),
        "compile_ms": milliseconds,
        "log": log,
    }
    cache.put(key, metadata, code)
    return CompiledKernel(code, key, log, milliseconds, False, config, **_resources(log))


def _resources(log: str) -> dict[str, int | None]:
    def number(pattern: str) -> int | None:
        match = re.search(pattern, log)
        return int(match[1]) if match else None

    found = {
        "num_regs": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill stores"),
        "stack_bytes": number(r"(\d+) bytes stack frame"),
        "static_smem_bytes": number(r"(\d+) bytes smem"),
    }
    if found["num_regs"] is not None and found["static_smem_bytes"] is None:
        found["static_smem_bytes"] = 0  # ptxas does not mention what is not used
    return found


def _run_nvrtc(source: str, arch: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """Compile; the cubin and the log."""
    version = ".".join(map(str, headers.nvrtc().version))
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    known = [int(number) for number in nvrtc.nvrtcGetSupportedArchs()[1]]
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None or int(match[1]) not in known:
        raise CompileError(
            f"NVRTC {version} does not know {arch}; it knows {', '.join(f'sm_{number}' for number in known)}. "
            'Install a newer NVRTC: pip install -U "nvrtc-attn[cu13]" (PTX for another one is not substituted).',
            "",
            source,
            options,
        )
    arguments = [
        option.encode() for option in (*options, *(f"--include-path={root}" for root in headers.include_roots()))
    ]
    result, program = nvrtc.nvrtcCreateProgram(source.encode(), PROGRAM_NAME.encode(), 0, None, None)
    if int(result) != 0:
        raise CompileError(f"nvrtcCreateProgram: {result!s}", "", source, options)
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        text = log.rstrip(b"\0 \n").decode(errors="replace")
        if int(result) != 0:
            raise CompileError(_refusal(result, text, arch, version), text, source, options)
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(get_size: Any, get: Any, program: Any) -> bytes:
    result, size = get_size(program)
    buffer = bytes(size)
    if int(result) == 0:
        (result,) = get(program, buffer)
    if int(result) != 0:
        raise CompileError(f"NVRTC gave no result: {result!s}")
    return buffer


def _refusal(result: Any, log: str, arch: str, version: str) -> str:
    name = getattr(result, "name", str(result))
    lines = [f"NVRTC {version} refused the kernel for {arch}: {name}"]
    if int(result) == 7 or "builtins" in log:  # NVRTC_ERROR_BUILTIN_OPERATION_FAILURE
        directory = os.path.dirname(headers.nvrtc().path)
        lines.append(
            f"its library of builtins (libnvrtc-builtins.so.{version}) is missing or of another version; searched "
            f'{directory}. Reinstall NVRTC: pip install --force-reinstall "nvrtc-attn[cu{version.split(".")[0]}]"'
        )
    errors = [line for line in log.splitlines() if re.search(r"\berror\b", line) and "errors detected" not in line]
    return "\n".join([*lines, *(errors or log.splitlines())[:5]])


def _check_driver() -> None:
    """Refuse to compile what the driver in use could not load: a cubin needs a driver of NVRTC's major or later."""
    if not driver.is_loaded():
        return
    needed, have = headers.nvrtc().version, driver.driver_version()
    if have[0] < needed[0]:
        raise CompileError(
            f"NVRTC {needed[0]}.{needed[1]} makes code for drivers of CUDA {needed[0]} or later, and the installed "
            f'driver supports CUDA {have[0]}.{have[1]}: pip install "nvrtc-attn[cu{have[0]}]" in a new environment, or '
            "update the driver; see `python -m nvrtc_attn doctor`"
        )


def _copy(error: Exception) -> Exception:
    try:
        return type(error)(*error.args)
    except TypeError:
        return error


def _warmup_command(config: KernelConfig | None, arch: str) -> str:
    if config is None:
        return f"python -m nvrtc_attn warmup --arch {arch}"
    from .precompile import warmup_command  # imports process pools, which only this error needs

    return warmup_command(config)


def _what(config: KernelConfig | None) -> str:
    return (
        f"kernel {config.kernel} (head dim {config.head_dim}, {config.dtype})" if config is not None else "the kernel"
    )
