"""Which build of NVRTC compiles: its version and what the linker wrote into its files. Part of every cache key.

And what it can compile for, which the doctor shows.

Concurrency: the memo is a dict that is written with equal values by whoever comes first.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import BinaryIO

from . import headers

_builds: dict[str, str] = {}


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


def supported_archs() -> list[str]:
    """The targets that NVRTC knows, for example ``sm_90``. Loads it into this process."""
    from cuda.bindings import nvrtc

    _, archs = nvrtc.nvrtcGetSupportedArchs()[:2]
    return [f"sm_{arch}" for arch in archs]


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
