"""Where the headers of a compile come from, and the digest of what a source can read of them.

``include_roots`` and ``Snapshot.digest`` are the two halves of one fact: what NVRTC can read is what the cache key
covers. Of our own device code that is what the source includes, directly or not, so an edit recompiles only the
kernels that it can change. The third-party headers change together and count as one. Digests depend on relative names
and contents only, never on the install prefix or on time stamps.

Concurrency: the memos are dicts that are written with equal values by whoever comes first; a ``Snapshot`` belongs to
one thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import site
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..base import env
from ..base.errors import CompileError
from . import nvrtc_library
from .nvrtc_library import Nvrtc, install_hint

INCLUDE_DIR: Final = Path(__file__).resolve().parents[1] / "_include"
"""Bundled headers: written by ``hatch_build.py``, in a wheel and in an editable checkout."""

# The closure of what CUTLASS and CCCL include from the CUDA runtime, equal for CUDA 12.9, 13.0 and 13.5 (a test
# compares it with the installed headers). crt/ exists in toolkits and not in the pip packages.
CUDA_HEADERS: Final = (
    "builtin_types.h", "channel_descriptor.h", "cuComplex.h", "cuda.h", "cudaTypedefs.h", "cuda_bf16.h",
    "cuda_bf16.hpp", "cuda_device_runtime_api.h", "cuda_fp16.h", "cuda_fp16.hpp", "cuda_fp4.h", "cuda_fp4.hpp",
    "cuda_fp6.h", "cuda_fp6.hpp", "cuda_fp8.h", "cuda_fp8.hpp", "cuda_runtime.h", "cuda_runtime_api.h",
    "device_launch_parameters.h", "device_types.h", "driver_functions.h", "driver_types.h", "library_types.h", "mma.h",
    "surface_types.h", "texture_types.h", "vector_functions.h", "vector_functions.hpp", "vector_types.h",
    "crt/common_functions.h", "crt/device_functions.h", "crt/host_config.h", "crt/host_defines.h", "crt/mma.h",
)  # fmt: skip


class Root(NamedTuple):
    """One source of headers: ``directories`` are passed to NVRTC, files below ``directories[0]`` are hashed."""

    name: str
    directories: tuple[Path, ...]
    origin: str
    """Where it was found, for ``doctor`` and for error messages."""


class _Stamp(NamedTuple):
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class _OwnHeader(NamedTuple):
    """A file of our device code: the digest of its content, and the names in its ``#include`` lines."""

    stamp: _Stamp
    digest: str
    includes: tuple[tuple[str, bool], ...]
    """Each with whether it is written with quotes."""


# Every #if counts as taken, and comments count: too much is safe. Looking for `#` and not for the beginning of a line
# takes 0.2 ms instead of 2.7 for all our headers. What is neither <name> nor "name" is caught by the last group.
_INCLUDE: Final = re.compile(r'#[ \t]*include\b[ \t]*(?:<([^>\n]+)>|"([^"\n]+)"|(.*))')

_file_digests: dict[str, tuple[_Stamp, str]] = {}
_own_headers: dict[str, _OwnHeader] = {}
_cuda_roots: dict[tuple[object, ...], Root] = {}


def roots() -> tuple[Root, ...]:
    """Every source of headers, in search order.

    Raises
    ------
    CompileError
        A source is missing. The message has the searched places and the pip command.
    """
    return (_own_root(), *_bundled_roots(), cuda_root(nvrtc_library.nvrtc()))


def include_roots() -> tuple[Path, ...]:
    """Directories to pass to NVRTC as ``-I``, in this order."""
    return tuple(directory for root in roots() for directory in root.directories)


class Snapshot:
    """The headers as they are now: a file is looked at once, when the first source that can read it asks.

    A file is read once per process and again when its size, times or inode change. A snapshot therefore costs one
    ``stat`` per third-party header (3 ms) and per header of ours that its sources include; the kernels of one call
    share it.
    """

    __slots__ = ("_own", "_third_party")

    def __init__(self) -> None:
        self._own: dict[str, _OwnHeader | None] = {}
        self._third_party: tuple[str, ...] = ()

    def digest(self, source: str) -> str:
        """SHA-256 over every header of ours that ``source`` includes, directly or not, and all third-party headers."""
        if not self._third_party:
            self._third_party = tuple(_digest_lines(roots()[1:]))
        base = _own_root().directories[0]
        found: dict[str, _OwnHeader | None] = {}
        pending = [("", include) for include in _includes(source, "the source of a kernel")]
        while pending:
            directory, (name, quoted) = pending.pop()
            # As NVRTC looks: beside the file whose line is quoted, then in our root, which is the first.
            for candidate in (posixpath.join(directory, name), name) if quoted else (name,):
                path = posixpath.normpath(candidate)
                if path in found:
                    header = found[path]
                else:
                    if path not in self._own:
                        self._own[path] = _own_header(base, path)
                    header = found[path] = self._own[path]
                    if header is not None:
                        pending += [(posixpath.dirname(path), include) for include in header.includes]
                if header is not None:
                    break
        own = [f"nvrtc_attn/{path} {header.digest}\n" for path, header in sorted(found.items()) if header is not None]
        return hashlib.sha256("".join([*own, *self._third_party]).encode()).hexdigest()


def header_digest() -> str:
    """SHA-256 over the relative path and the content of every header that any compile can read."""
    return hashlib.sha256("".join(_digest_lines(roots())).encode()).hexdigest()


def _digest_lines(of: Iterable[Root]) -> Iterator[str]:
    for root in of:
        base = root.directories[0]
        files = CUDA_HEADERS if root.name == "cuda" else _files_below(base)
        digests = _digest_files(base, files)
        yield from (f"{root.name}/{name} {digests[name]}\n" for name in sorted(digests))


def _includes(text: str, file: str) -> tuple[tuple[str, bool], ...]:
    """The names that the ``#include`` lines of ``text`` have, each with whether it is written with quotes."""
    found = []
    for match in _INCLUDE.finditer(text):
        if match[3] is None:
            found.append((match[1] or match[2], match[2] is not None))
        elif not text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip():  # not in a comment's words
            raise CompileError(
                f"{file}: the cache key cannot follow `#include {match[3]}`: write the file's name there"
            )
    return tuple(found)


def _own_header(base: Path, name: str) -> _OwnHeader | None:
    """What is known of the file ``name`` below ``base``, ``None`` if there is none."""
    path = f"{base}{os.sep}{name}"
    try:
        stamp = _stamp(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    known = _own_headers.get(path)
    if known is None or known.stamp != stamp:
        with open(path, "rb") as file:
            content = file.read()
        digest = hashlib.sha256(content, usedforsecurity=False).hexdigest()
        known = _own_headers[path] = _OwnHeader(stamp, digest, _includes(content.decode("utf-8", "replace"), name))
    return known


def bundle_versions() -> dict[str, str]:
    """Version of each bundled package, empty where nothing is bundled."""
    return {name: str(package["version"]) for name, package in _manifest().get("packages", {}).items()}


def modified_headers() -> list[str]:
    """Bundled files that differ from the manifest of the build, or are missing."""
    modified: list[str] = []
    for package in _manifest().get("packages", {}).values():
        actual = _digest_files(INCLUDE_DIR / package["path"], package["files"])
        modified += [f"{package['path']}/{name}" for name, sha in package["files"].items() if actual.get(name) != sha]
    return sorted(modified)


def _manifest() -> dict[str, Any]:
    try:
        manifest = json.loads((INCLUDE_DIR / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _own_root() -> Root:
    """Our device code: inside the wheel, or ``cuda_src`` of a checkout."""
    if (INCLUDE_DIR / "nvrtc_attn" / "params.cuh").is_file():
        return Root("nvrtc_attn", (INCLUDE_DIR,), "wheel")
    checkout = INCLUDE_DIR.parent.parent / "cuda_src"
    if (checkout / "nvrtc_attn" / "params.cuh").is_file():
        return Root("nvrtc_attn", (checkout,), "checkout")
    raise CompileError(
        f"nvrtc_attn's device code is missing: searched {INCLUDE_DIR / 'nvrtc_attn'} and {checkout}. "
        "The installation is damaged: pip install --force-reinstall nvrtc-attn"
    )


def _bundled_roots() -> tuple[Root, Root]:
    override = env.cutlass_dir()
    cutlass = Root("cutlass", (INCLUDE_DIR / "cutlass",), "bundled")
    if override is not None:
        cutlass = Root("cutlass", (override,), "NVRTC_ATTN_CUTLASS_DIR")
    # <cuda/std/x> resolves through the first, <cccl/cuda/std/x> (CUTLASS 4.2) through the second.
    cccl = Root("cccl", (INCLUDE_DIR / "nvidia" / "cccl", INCLUDE_DIR / "nvidia"), "bundled")
    for root, probe in ((cutlass, "cute/layout.hpp"), (cccl, "cuda/std/cstdint")):
        if not (root.directories[0] / probe).is_file():
            raise CompileError(
                f"{root.name} headers are missing: searched {root.directories[0]} ({root.origin}). "
                'A wheel brings them; in a checkout run pip install -e ".[cu13]", which fetches them.'
            )
    return cutlass, cccl


def cuda_root(library: Nvrtc) -> Root:
    """CUDA runtime headers of the generation of ``library``.

    Search order: beside the NVRTC library, the pip package of that major, then what ``cuda.pathfinder`` finds (conda,
    ``CUDA_PATH``, the system). A directory of another major is skipped, and named in the error.
    """
    key = (library, *(os.environ.get(name, "") for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX")))
    root = _cuda_roots.get(key)
    if root is None:
        root = _cuda_roots[key] = _find_cuda_root(library)
    return root


def _find_cuda_root(library: Nvrtc) -> Root:
    major = library.version[0]
    searched: list[str] = []
    for directory, origin in _cuda_candidates(library):
        actual = _cudart_major(directory)
        if actual == major:
            return Root("cuda", (directory,), origin)
        searched.append(f"\n  - {directory} ({origin}): {f'CUDA {actual}' if actual else 'no CUDA runtime headers'}")
    raise CompileError(
        f"CUDA runtime headers for NVRTC {major}.{library.version[1]} ({library.path}) are missing. Searched:"
        f"{''.join(searched)}\n{install_hint(major)}"
    )


def _cuda_candidates(library: Nvrtc) -> Iterator[tuple[Path, str]]:
    # cuda.pathfinder prefers the CUDA 13 layout whatever NVRTC is loaded, so two installed majors need a choice here.
    # The working directory is never searched, although ``python -m`` puts it on sys.path.
    major = library.version[0]
    package = Path(f"cu{major}" if major >= 13 else "cuda_runtime") / "include"
    for parent in Path(library.path).parents[1:3]:
        # site-packages/nvidia/cu13/lib, site-packages/nvidia/cuda_nvrtc/lib, <toolkit>/lib64, <toolkit>/targets/*/lib
        yield parent / package, "beside NVRTC"
        yield parent / "include", "beside NVRTC"
    for prefix in (*site.getsitepackages(), site.getusersitepackages()):
        yield Path(prefix) / "nvidia" / package, "pip package"
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include", variable
    from cuda.pathfinder import find_nvidia_header_directory

    located = find_nvidia_header_directory("cudart")
    if located:
        yield Path(located), "cuda.pathfinder"


def _cudart_major(directory: Path) -> int | None:
    """CUDA major of an include directory, ``None`` if it is not one."""
    if not (directory / "cuda_fp16.h").is_file():
        return None
    try:
        with open(directory / "cuda_runtime_api.h", encoding="utf-8", errors="replace") as file:
            match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", file.read(1 << 16))
    except OSError:
        return None
    return int(match[1]) // 1000 if match else None


def _files_below(root: Path) -> list[str]:
    """Names of all headers below ``root``. ``_include`` holds more than our code: only ``nvrtc_attn/`` counts there."""
    names: list[str] = []
    pending = [f"{root}{os.sep}nvrtc_attn" if root == INCLUDE_DIR else str(root)]
    skip = len(str(root)) + 1
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    pending.append(entry.path)
                elif not entry.name.startswith("."):
                    names.append(entry.path[skip:].replace(os.sep, "/"))
    return names


def _digest_files(base: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of each file that exists, by name."""
    digests: dict[str, str] = {}
    stale: list[tuple[str, str, _Stamp]] = []
    for name in names:
        path = f"{base}{os.sep}{name}"
        try:
            stamp = _stamp(path)
        except FileNotFoundError:
            continue
        known = _file_digests.get(path)
        if known is not None and known[0] == stamp:
            digests[name] = known[1]
        else:
            stale.append((name, path, stamp))
    for (name, path, stamp), digest in zip(stale, _hash_all([path for _, path, _ in stale]), strict=True):
        _file_digests[path] = (stamp, digest)
        digests[name] = digest
    return digests


def _stamp(path: str) -> _Stamp:
    status = os.stat(path)
    return _Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _hash_all(paths: list[str]) -> list[str]:
    # 18 MB in 480 files take 25 ms in one thread; reading and hashing release the interpreter lock.
    workers = min(8, os.cpu_count() or 1, len(paths) // 16)
    if workers < 2:
        return [_sha256(path) for path in paths]
    digests = [""] * len(paths)
    errors: list[OSError] = []

    def hash_share(first: int) -> None:
        try:
            for index in range(first, len(paths), workers):
                digests[index] = _sha256(paths[index])
        except OSError as error:  # for example a header that is deleted meanwhile
            errors.append(error)

    threads = [threading.Thread(target=hash_share, args=(first,)) for first in range(1, workers)]
    for thread in threads:
        thread.start()
    hash_share(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return digests


def _sha256(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        digest = hashlib.sha256()
        while block := os.read(descriptor, 1 << 20):
            digest.update(block)
        return digest.hexdigest()
    finally:
        os.close(descriptor)
