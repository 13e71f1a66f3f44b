"""One call of NVRTC: what it is asked, and what of its answer is an error, in words that say what to do."""

from __future__ import annotations

import os
import re
from typing import Final

from ..base.errors import CompileError
from . import headers, nvrtc_library, nvrtc_worker, worker_pool
from .compiler_process import Answer, WorkerDiedError
from .worker_pool import Ticket

PROGRAM_NAME: Final = "attention_entry.cu"
"""Without a directory part, so that messages are the same everywhere and no directory is searched because of it."""


def run_nvrtc(source: str, arch: str, options: tuple[str, ...], ticket: Ticket) -> tuple[bytes, str]:
    """Compile in a worker, when it is the turn of ``ticket``; the cubin and the log. ``options`` hold no include paths.

    Raises
    ------
    CompileError
        NVRTC is missing, does not know ``arch`` or refused the source; or its process died.
    """
    library = nvrtc_library.nvrtc()
    version = ".".join(map(str, library.version))
    # Absolute: a worker has another working directory.
    includes = (f"--include-path={os.path.abspath(root)}" for root in headers.include_roots())
    arguments = (arch.encode(), PROGRAM_NAME.encode(), source.encode(), *(option.encode() for option in options))
    message = [os.fsencode(os.path.abspath(library.path)), *arguments, *map(os.fsencode, includes)]
    try:
        answer = worker_pool.pool().compile(message, ticket)
    except WorkerDiedError as death:
        raise CompileError(
            f"the compiler process {death} (NVRTC {version}, {arch}). The next call starts another one. To repeat it: "
            "this exception's .source and .options under nvcc; `python -m nvrtc_attn doctor` tests NVRTC",
            death.last_words,
            source,
            options,
        ) from death
    except OSError as error:  # the library, in the process itself
        raise CompileError(
            f"NVRTC {version} ({library.path}) cannot be loaded: {error}", "", source, options
        ) from error
    if answer.status == nvrtc_worker.UNKNOWN_ARCH:
        raise CompileError(
            f"NVRTC {version} does not know {arch}; it knows {', '.join(f'sm_{n}' for n in answer.archs)}. "
            'Install a newer NVRTC: pip install -U "nvrtc-attn[cu13]" (PTX for another one is not substituted).',
            "",
            source,
            options,
        )
    if answer.status != 0:
        raise CompileError(_refusal(answer, arch, version), answer.log, source, options)
    return answer.code, answer.log


def _refusal(answer: Answer, arch: str, version: str) -> str:
    log = answer.log
    lines = [f"NVRTC {version} refused the kernel for {arch}: {answer.name}"]
    if answer.status == 7 or "builtins" in log:  # NVRTC_ERROR_BUILTIN_OPERATION_FAILURE
        directory = os.path.dirname(nvrtc_library.nvrtc().path)
        lines.append(
            f"its library of builtins (libnvrtc-builtins.so.{version}) is missing or of another version; searched "
            f'{directory}. Reinstall NVRTC: pip install --force-reinstall "nvrtc-attn[cu{version.split(".")[0]}]"'
        )
    errors = [line for line in log.splitlines() if re.search(r"\berror\b", line) and "errors detected" not in line]
    return "\n".join([*lines, *(errors or log.splitlines())[:5]])


def resources_of(log: str) -> dict[str, int | None]:
    """The numbers of a `CompiledKernel` that ptxas writes into the log, None for those that it does not."""

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
