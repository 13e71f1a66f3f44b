"""The disk cache of compiled kernels: one checked file per entry, safe against crashes, races and strangers.

A file is ``<directory>/<key>.nvat``; `cache_entry` says what is in it, `ownership` who could change it.

A GPU image can read and write all GPU memory of its process, so an entry counts as code. It is used only if the
directory and all its parents belong to us or root and nobody else can write to them (sticky ``/tmp``-like parents
excepted), and the file is a regular one, ours, unwritable by others, whole, and about the key that was asked for.
Everything else is a miss. Where the cache cannot be used the process goes on in memory, after one ``CacheWarning``.

``cuda.core.utils.FileStreamProgramCache`` is not the storage: importing it costs more (0.2 s) than the whole budget of
a warm start (0.15 s); it follows symbolic links, would hang on a FIFO, does not look at owners or modes, and raises
when the disk is full.

Files of others may lie in the directory. Only names that are ours are ever listed, counted or deleted: 64 hexadecimal
digits and ``.nvat``, and temporaries named ``.nvat-<machine>-<process>-<random>.tmp`` after their writer.

Concurrency: writers publish with ``os.replace``, so a reader sees an old or a new entry and never a part; there is no
lock to break. Two processes that compile the same kernel at once both publish, and the bytes are equivalent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from ..base import env
from ..base.errors import CacheWarning
from ..base.log import log_once
from .cache_entry import TUNED, Entry, decode_entry, encode_entry
from .ownership import why_unsafe, why_unusable

SUFFIX: Final = ".nvat"
_MAX_ENTRY_BYTES: Final = 256 << 20
_STALE_TEMP_S: Final = 3600.0
"""Age from which a temporary is a leftover where nothing tells whether its writer lives: one of another machine."""
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_ENTRY_NAME: Final = re.compile(rf"{_KEY.pattern}{re.escape(SUFFIX)}")
_TEMPORARY_NAME: Final = re.compile(r"\.nvat-(?P<machine>[0-9a-f]{16})-(?P<process>[0-9]{1,7})-[a-z0-9_]{8}\.tmp")
_TOUCH_INTERVAL_S: Final = 60.0
"""Age of the access time from which a hit renews it: least-recently-used order needs minutes, not every read."""
_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""After these, entries are evicted and the write is tried once more."""
_FATAL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM})
"""After these, writing is not tried again in this process."""
_POSIX: Final = os.name == "posix"


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One line of ``cache list``; ``problem`` is empty for a good entry."""

    key: str
    path: Path
    size_bytes: int
    last_used: float
    metadata: Mapping[str, Any]
    problem: str = ""
    removed: bool = False
    """`KernelCache.verify` has deleted it."""

    @property
    def tuned(self) -> bool:
        """Whether it is a choice of `autotune` and not a kernel."""
        return self.metadata.get("kernel") == TUNED

    def __str__(self) -> str:
        return f"{self.key}: {self.problem or 'good'}, {self.size_bytes} bytes"


def _machine() -> str:
    """What tells apart the machines, boots and containers whose process numbers mean different processes.

    16 hexadecimal digits; zeros where the system does not tell.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        text = boot + os.readlink("/proc/self/ns/pid").encode()
    except OSError:
        return "0" * 16
    return hashlib.sha256(text, usedforsecurity=False).hexdigest()[:16]


def _kind(name: str) -> Literal["entry", "temporary", ""]:
    """What a file called ``name`` is; empty for a file that is not the cache's own."""
    if _ENTRY_NAME.fullmatch(name):
        return "entry"
    return "temporary" if _TEMPORARY_NAME.fullmatch(name) else ""


def _is_leftover(name: str, status: os.stat_result, machine: str) -> bool:
    """Whether no living writer can own the temporary ``name``. Where its number lives again, its age decides."""
    match = _TEMPORARY_NAME.fullmatch(name)
    if match is None:
        return False
    if _POSIX and match["machine"] == machine != "0" * 16:
        try:
            os.kill(int(match["process"]), 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # another user's process lives under that number
    return time.time() - status.st_mtime > _STALE_TEMP_S


class KernelCache:
    """Entries below one directory. ``path`` is ``None`` where the user has no place for a cache.

    No method raises for anything that the file system does; ``read_only`` also stops the renewal of access times.
    """

    def __init__(self, path: Path | None, max_bytes: int, *, read_only: bool = False) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.read_only = read_only
        self._write_disabled = False
        # Taken once by the first warning and never given back: no state to repair after a fork.
        self._warning_ticket = threading.Lock()

    # -- lookup ------------------------------------------------------------------------------------

    def get(self, key: str) -> Entry | None:
        """The entry for ``key``, ``None`` if there is no good one."""
        directory = self._usable_directory()
        if directory is None:
            return None
        path = self._entry_path(directory, key)
        try:
            data, status = self._read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            # A link, a socket, somebody's file: writing the rebuilt entry replaces it.
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EMLINK, errno.EISDIR, errno.ESTALE):
                self._warn(f"{path}: {error.strerror or error}")
            return None
        except ValueError:
            return None
        try:
            entry = decode_entry(data, key)
        except ValueError as error:
            log_once(f"{path} is damaged and not used: {error}", logging.INFO)
            if not self.read_only:
                self._remove_if_unchanged(path, status)
            return None
        self._touch(path, status)
        return entry

    def may_have(self, key: str) -> bool:
        """Whether `get` need look at all: one ``stat``, without the checks of a directory that is going to be used."""
        return self.path is not None and os.path.lexists(self._entry_path(os.fspath(self.path), key))

    def _read(self, path: str) -> tuple[bytes, os.stat_result]:
        # O_NOFOLLOW: a link is not ours. O_NONBLOCK: opening a FIFO would wait for a writer.
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(path, flags)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_ENTRY_BYTES:
                raise ValueError("not a regular file of a plausible size")
            why = why_unsafe(status, path, sticky_ok=False)
            if why:
                raise ValueError(why)
            # Not before the checks: opening a directory raises, and leaves the descriptor to us.
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                return file.readall() or b"", status
        finally:
            os.close(descriptor)

    def _touch(self, path: str, status: os.stat_result) -> None:
        now = time.time()
        if not self.read_only and now - status.st_atime > _TOUCH_INTERVAL_S:
            # noatime and relatime mounts do not keep it, so it is set by hand; the modification time stays.
            with contextlib.suppress(OSError):
                os.utime(path, ns=(int(now * 1e9), status.st_mtime_ns), follow_symlinks=not _POSIX)

    # -- change ------------------------------------------------------------------------------------

    def put(self, key: str, metadata: Mapping[str, Any], code: bytes) -> bool:
        """Publish an entry; ``False`` (after one warning) if that was not possible."""
        if self.read_only or self._write_disabled:
            return False
        data = encode_entry(key, metadata, code)
        if len(data) > min(self.max_bytes, _MAX_ENTRY_BYTES):
            self._warn(f"an entry of {len(data)} bytes is larger than NVRTC_ATTN_CACHE_SIZE={self.max_bytes}")
            return False
        directory = self._usable_directory(create=True)
        if directory is None:
            return False
        try:
            self._make_room(directory, len(data))
            try:
                self._publish(directory, key, data)
            except OSError as error:
                # The disk is full below our own limit. Old entries go, so that the cache lives on with what there is.
                if error.errno not in _FULL_ERRNOS or not self._make_room(directory, len(data), free=len(data) + 4096):
                    raise
                self._publish(directory, key, data)
        except OSError as error:
            if error.errno in _FATAL_ERRNOS:
                self._write_disabled = True
            self._warn(f"{directory}: {error.strerror or error}; compiled kernels are kept in memory")
            return False
        return True

    def _publish(self, directory: str, key: str, data: bytes) -> None:
        """Write ``data`` beside its place and rename it there. Leaves nothing behind where that fails."""
        import tempfile  # 3 ms that a warm start does not need

        prefix = f".nvat-{_machine()}-{os.getpid()}-"
        descriptor, temporary = tempfile.mkstemp(prefix=prefix, suffix=".tmp", dir=directory)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                remaining = memoryview(data)
                while remaining:  # a raw file may write a part
                    remaining = remaining[file.write(remaining) :]
                # Without it a power failure may leave the new name with old or no contents.
                os.fsync(descriptor)
            os.replace(temporary, self._entry_path(directory, key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def discard(self, key: str) -> None:
        """Remove the entry for ``key`` if there is one."""
        directory = self._usable_directory()
        if directory is not None and not self.read_only:
            with contextlib.suppress(OSError):
                os.unlink(self._entry_path(directory, key))

    def clear(self) -> int:
        """Remove all entries and the leftovers of dead writers; the number of entries removed."""
        removed = 0
        machine = _machine()
        for item in self._scan(self._usable_directory()):
            with contextlib.suppress(OSError):
                is_entry = _kind(item.name) == "entry"
                if is_entry or _is_leftover(item.name, item.stat(follow_symlinks=False), machine):
                    os.unlink(item.path)
                    removed += is_entry
        return removed

    # -- inspection --------------------------------------------------------------------------------

    def entries(self) -> list[EntryInfo]:
        """Every entry, most recently used first, bad ones with their ``problem``."""
        return [info for info, _ in self._inspect()]

    def verify(self) -> list[EntryInfo]:
        """Remove every entry that would be a miss. Returns these entries; ``removed`` says which of them are gone."""
        bad = [(info, status) for info, status in self._inspect() if info.problem]
        return [
            replace(info, removed=status is not None and self._remove_if_unchanged(os.fspath(info.path), status))
            for info, status in bad
        ]

    def _inspect(self) -> list[tuple[EntryInfo, os.stat_result | None]]:
        """`entries`, each with the state of its file, ``None`` where the file system does not tell it."""
        found: list[tuple[EntryInfo, os.stat_result | None]] = []
        for item in self._scan(self._usable_directory()):
            if _kind(item.name) != "entry":
                continue
            key = item.name[: -len(SUFFIX)]
            metadata: Mapping[str, Any] = {}
            problem = ""
            status = None
            try:
                # Not the item's own stat, which Windows answers from the listing, without an inode.
                status = os.lstat(item.path)
                metadata = decode_entry(self._read(item.path)[0], key).metadata
            except FileNotFoundError:
                continue  # evicted by another process while we look
            except (OSError, ValueError) as error:
                problem = str(error)
            size, last_used = (0, 0.0) if status is None else (status.st_size, status.st_atime)
            found.append((EntryInfo(key, Path(item.path), size, last_used, metadata, problem), status))
        return sorted(found, key=lambda pair: -pair[0].last_used)

    # -- inside ------------------------------------------------------------------------------------

    @staticmethod
    def _entry_path(directory: str, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise ValueError(f"key {key!r} is not a digest of 64 hexadecimal digits")
        return os.path.join(directory, key + SUFFIX)

    def _usable_directory(self, *, create: bool = False) -> str | None:
        if self.path is None:
            self._warn("there is no home directory for a cache; set NVRTC_ATTN_CACHE_DIR to a private directory")
            return None
        try:
            why = why_unusable(self.path)
            home = self.path.parent.parent
            if self.path.parent.name == ".cache" and not home.is_dir():
                why = f"the home directory {home} does not exist"  # and is not ours to create
            if not why and create:
                # Path.mkdir(parents=True) gives parents the umask's mode, which may let the group write.
                for directory in reversed((self.path, *self.path.parents)):
                    with contextlib.suppress(FileExistsError):
                        if not directory.is_dir():
                            os.mkdir(directory, 0o700)
                why = why_unusable(self.path)
        except OSError as error:
            why = f"{self.path}: {error.strerror or error}"
            self._write_disabled = self._write_disabled or create
        if why:
            self._warn(f"{why}; or set NVRTC_ATTN_CACHE_DIR to a private directory")
            return None
        return os.fspath(self.path)

    def _scan(self, directory: str | None) -> Iterator[os.DirEntry[str]]:
        """Entries and temporaries: the files that are ours."""
        if directory is None:
            return
        try:
            with os.scandir(directory) as items:
                yield from [item for item in items if _kind(item.name)]
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn(f"{directory}: {error.strerror or error}")

    def _make_room(self, directory: str, needed: int, *, free: int = 0) -> int:
        """Make ``needed`` more bytes fit; the number of bytes given back.

        Leftovers of dead writers go first. Then least recently used entries go until everything that is ours, the
        temporaries of living writers included, fits with ``needed`` into ``max_bytes``, and ``free`` bytes are back.
        """
        known: list[tuple[float, str, os.stat_result]] = []
        machine = _machine()
        total, freed = needed, 0
        for item in self._scan(directory):
            with contextlib.suppress(OSError):
                status = os.lstat(item.path)
                if _is_leftover(item.name, status, machine):
                    os.unlink(item.path)
                    freed += status.st_size
                    continue
                total += status.st_size
                if _kind(item.name) == "entry":
                    known.append((status.st_atime, item.path, status))
        for _, path, status in sorted(known, key=lambda row: row[:2]):
            if total <= self.max_bytes and freed >= free:
                break
            if self._remove_if_unchanged(path, status):
                total -= status.st_size
                freed += status.st_size
        return freed

    def _remove_if_unchanged(self, path: str, status: os.stat_result) -> bool:
        """Delete the file that ``status`` tells of, unless another one has taken its place; whether it is deleted."""
        with contextlib.suppress(OSError):
            current = os.lstat(path)
            if (current.st_ino, current.st_size, current.st_mtime_ns) == (
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
            ):
                os.unlink(path)
                return True
        return False

    def _warn(self, why: str) -> None:
        if self._warning_ticket.acquire(blocking=False):
            warnings.warn(f"the kernel cache is not fully used: {why}", CacheWarning, stacklevel=2)


_caches: dict[tuple[Path | None, int, bool], KernelCache] = {}


def kernel_cache() -> KernelCache:
    """The cache that the environment variables name now. Creates and reads nothing."""
    settings = (env.cache_dir(), env.cache_size_bytes(), env.no_compile())
    return _caches.setdefault(settings, KernelCache(settings[0], settings[1], read_only=settings[2]))
