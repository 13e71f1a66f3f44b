"""Files of a kernel for those who want to read them: entry source, options and log, cubin (``NVRTC_ATTN_DUMP``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..base.log import log_once


def dump_kernel(
    directory: Path, kernel: str, key: str, source: str, options: Sequence[str], log: str, code: bytes | None
) -> None:
    """Write ``<kernel>-<16 digits of key>.cu``, ``.log`` and, unless the compile failed, ``.cubin`` to ``directory``.

    The directory is made where it is missing; files of an earlier run are written anew. What cannot be written is one
    warning in the log, never an error of the call.
    """
    name = f"{kernel or 'kernel'}-{key[:16]}"
    files = {".cu": source.encode(), ".log": f"options: {' '.join(options)}\n{log}\n".encode()}
    if code is not None:
        files[".cubin"] = code
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for suffix, content in files.items():
            (directory / (name + suffix)).write_bytes(content)
    except OSError as error:
        log_once(f"NVRTC_ATTN_DUMP: {directory} cannot be written: {error}")
