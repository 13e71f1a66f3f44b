"""Which NVRTC compiles: where it is, its version and build, which are part of every cache key, and what it knows.

Concurrency: the memos are written with equal values by whoever comes first.
"""

from __future__ import annotations

import hashlib
import os
import re
import site
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..base.errors import CompileError


@dataclass(frozen=True, slots=True)
class Nvrtc:
    """The NVRTC library that kernels are compiled with."""

    version: tuple[int, int]
    path: str


_nvrtc: Nvrtc | None = None
_builds: dict[str, str] = {}


def nvrtc() -> Nvrtc:
    """NVRTC's version and file. Loads it only where it is no pip package (no GPU, no driver needed).

    Raises
    ------
    CompileError
        NVRTC, or the Python binding of it, is not installed. The message has the searched places and the pip command.
    """
    global _nvrtc
    if _nvrtc is None:
        _nvrtc = _packaged_nvrtc()
    if _nvrtc is None:
        try:
            from cuda.bindings import nvrtc as bindings
            from cuda.pathfinder import load_nvidia_dynamic_lib

            path = load_nvidia_dynamic_lib("nvrtc").abs_path or "loaded by another library"
            result, major, minor = bindings.nvrtcVersion()
        except Exception as error:  # the loader's exceptions differ between versions; all mean "no NVRTC"
            raise CompileError(f"NVRTC is not usable: {_loader_message(error)}\n{install_hint()}") from error
        if int(result) != 0:
            raise CompileError(f"NVRTC at {path} does not tell its version ({result!s})\n{install_hint()}")
        _nvrtc = Nvrtc((major, minor), path)
    return _nvrtc


def _packaged_nvrtc() -> Nvrtc | None:
    """The pip package, in the order in which ``cuda.pathfinder`` looks, without loading 110 MB to learn its version.

    The library of builtins beside it, which it can only be used with, has the version in its name.
    """
    if os.name != "posix":
        return None
    prefixes = list(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        prefixes.insert(int(sys.prefix != sys.base_prefix), site.getusersitepackages())
    for package in ("cu13", "cuda_nvrtc"):
        for prefix in prefixes:
            directory = os.path.join(prefix, "nvidia", package, "lib")
            try:
                names = os.listdir(directory)
            except OSError:
                continue
            libraries = [name for name in names if re.fullmatch(r"libnvrtc\.so\.\d+", name)]
            builtins = [re.fullmatch(r"libnvrtc-builtins\.so\.(\d+)\.(\d+)", name) for name in names]
            versions = [(int(match[1]), int(match[2])) for match in builtins if match]
            if len(libraries) == len(versions) == 1 and libraries[0].endswith(f".{versions[0][0]}"):
                return Nvrtc(versions[0], os.path.join(directory, libraries[0]))
    return None


def _loader_message(error: Exception) -> str:
    """The loader's message without its directory listings and repetitions, with the places where it looked."""
    first, *rest = str(error).splitlines() or [type(error).__name__]
    places = re.findall(r'listdir\("([^"]+)"\)', "\n".join(rest))
    first = ", ".join(dict.fromkeys(first.split(", ")))
    searched = ["site-packages/nvidia", "the linker's path", "CUDA_PATH", "CUDA_HOME", "conda", *dict.fromkeys(places)]
    return f"{first}\nSearched: {', '.join(searched)}."


def install_hint(major: int | None = None) -> str:
    """What to do where NVRTC or its headers are missing; ``major`` is the version of CUDA that is asked for."""
    extras = [f"cu{major}"] if major else ["cu13", "cu12"]
    commands = " or ".join(f'pip install "nvrtc-attn[{extra}]"' for extra in extras)
    return f"Install it with {commands}, or set CUDA_HOME to an installed toolkit; see `python -m nvrtc_attn doctor`."


def nvrtc_build() -> str:
    """Version and build of NVRTC and of its builtins library, for example ``13.0 65be0db3… 08d17e32…``.

    ``nvrtcVersion`` has no patch number, so the linker's build ids tell two builds of 13.0 apart.
    """
    library = nvrtc()
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
    from cuda.bindings import nvrtc as bindings

    _, archs = bindings.nvrtcGetSupportedArchs()[:2]
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
