"""The disk cache: never a wrong byte, never an exception, never a stranger's file."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from open_files import open_files

from nvrtc_attn.base.errors import CacheWarning
from nvrtc_attn.jit import cache as cache_module
from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit import headers
from nvrtc_attn.jit.cache import KernelCache, kernel_cache
from nvrtc_attn.jit.cache_entry import SCHEMA, decode_entry, encode_entry

# Some tests fork, and the test runner may have threads of its own.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

KEY = hashlib.sha256(b"a").hexdigest()
OTHER = hashlib.sha256(b"b").hexdigest()
CODE = bytes(random.Random(0).randbytes(20_000))
METADATA = {"arch": "sm_80", "kernel": "forward_portable", "log": "", "compile_ms": 1.0}
needs_other_uid = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


@pytest.fixture
def cache(directory: Path) -> KernelCache:
    return KernelCache(directory, 1 << 30)


@pytest.fixture(autouse=True)
def _nothing_else_is_stored() -> None:
    """Faults here are of the whole process: a kernel that an earlier test left compiling would meet them, too."""
    names = "nvrtc_attn compile", "nvrtc_attn prefetch", "nvrtc_attn warmup"
    while found := [thread for thread in threading.enumerate() if thread.name in names]:
        found[0].join()  # a prefetch starts compiles before it ends


def files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory)) if directory.exists() else []


def warned(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Result of ``call`` and the texts of its ``CacheWarning``s; any other warning fails."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    assert all(w.category is CacheWarning for w in caught), [str(w.message) for w in caught]
    return result, [str(w.message) for w in caught]


def test_round_trip(cache: KernelCache, directory: Path) -> None:
    assert cache.get(KEY) is None
    assert files(directory) == [], "a look-up creates nothing"
    assert cache.put(KEY, METADATA, CODE)
    entry = cache.get(KEY)
    assert entry is not None
    assert entry.code == CODE
    assert entry.metadata == {**METADATA, "key": KEY}
    assert files(directory) == [f"{KEY}.nvat"]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / f"{KEY}.nvat").stat().st_mode) == 0o600


def test_list_discard_and_clear(cache: KernelCache, directory: Path) -> None:
    for key in (KEY, OTHER):
        cache.put(key, METADATA, CODE)
    assert {info.key for info in cache.entries()} == {KEY, OTHER}
    assert all(info.metadata["arch"] == "sm_80" and info.size_bytes > len(CODE) for info in cache.entries())
    cache.discard(KEY)
    cache.discard(KEY)
    assert [info.key for info in cache.entries()] == [OTHER]
    assert cache.clear() == 1
    assert files(directory) == []


def test_verify_removes_what_would_be_a_miss(cache: KernelCache, directory: Path) -> None:
    cache.put(KEY, METADATA, CODE)
    cache.put(OTHER, METADATA, CODE)
    path = directory / f"{KEY}.nvat"
    path.write_bytes(path.read_bytes()[:-1])
    (bad,) = cache.verify()
    assert bad.key == KEY
    assert "length" in str(bad)
    assert files(directory) == [f"{OTHER}.nvat"]
    assert cache.verify() == []


def test_verify_removes_only_what_it_has_looked_at(
    cache: KernelCache, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process replaces a damaged entry between the look and the removal; a directory cannot be removed."""
    cache.put(KEY, METADATA, CODE)
    path = directory / f"{KEY}.nvat"
    path.write_bytes(b"damaged")
    (directory / f"{OTHER}.nvat").mkdir(mode=0o700)
    inspect = KernelCache._inspect

    def inspect_and_replace(self: KernelCache) -> Any:
        found = inspect(self)
        assert self.put(KEY, METADATA, CODE)
        return found

    monkeypatch.setattr(KernelCache, "_inspect", inspect_and_replace)
    assert {info.key: info.removed for info in cache.verify()} == {KEY: False, OTHER: False}
    assert cache.get(KEY) is not None
    assert files(directory) == sorted([path.name, f"{OTHER}.nvat"])


@pytest.mark.parametrize("key", ["../../etc/passwd", "ab", "x" * 64, KEY.upper(), KEY + "0", KEY + "\n"])
def test_keys_are_digests_only(key: str, cache: KernelCache) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal"):
        cache.get(key)


FOREIGN = (
    "notes.txt", "x.nvat", ".left.tmp", "work.tmp", f"{KEY[:-1]}.nvat", f"{KEY.upper()}.nvat", f"{KEY}.nvat.tmp",
    f"{KEY}.nvat~", f"x{KEY}.nvat", f".nvat-{'0' * 15}-1-abcdefgh.tmp", ".nvat-0-0-.tmp",
)  # fmt: skip


@pytest.mark.parametrize("how", ["clear", "verify", "put", "full", "discard"])
def test_files_of_others_are_never_deleted(
    how: str, cache: KernelCache, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F11: whatever their names resemble and however old they are."""
    cache.put(KEY, METADATA, CODE)
    for name in FOREIGN:
        (directory / name).write_bytes(bytes(1000))
        os.utime(directory / name, (1, 1))
    if how == "put":  # an eviction that wants everything gone
        assert KernelCache(directory, len(CODE) + 1000).put(OTHER, METADATA, CODE)
    elif how == "full":
        monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
        assert not warned(lambda: cache.put(OTHER, METADATA, CODE))[0]
    else:
        getattr(cache, how)(*[KEY] * (how == "discard"))
    left = {f"{OTHER}.nvat"} if how == "put" else {f"{KEY}.nvat"} if how == "verify" else set()
    assert set(files(directory)) == {*FOREIGN, *left}
    assert {info.key for info in cache.entries()} == {name[:64] for name in left}


def test_settings_are_read_at_every_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path / "one"))
    assert kernel_cache().path == tmp_path / "one"
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path / "two"))
    monkeypatch.setenv("NVRTC_ATTN_CACHE_SIZE", "12345")
    assert (kernel_cache().path, kernel_cache().max_bytes) == (tmp_path / "two", 12345)
    assert kernel_cache() is kernel_cache()
    assert files(tmp_path) == []


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.reliability(78)
def test_every_damaged_entry_is_a_silent_miss(cache: KernelCache, directory: Path) -> None:
    good = encode_entry(KEY, METADATA, CODE)
    draw = random.Random(1)
    offsets = [*range(24), *range(len(good) - 36, len(good)), *(draw.randrange(len(good)) for _ in range(200))]
    damaged = [good[:i] + bytes([good[i] ^ (1 << draw.randrange(8))]) + good[i + 1 :] for i in offsets]
    header_end = 20 + len(json.dumps({**METADATA, "key": KEY}))
    for length in (0, 1, 19, 20, header_end - 1, len(good) // 2, len(good) - 1):
        damaged.append(good[:length])
    damaged += [good + b"\0", good + good, b"\0" * len(good)]
    path = directory / f"{KEY}.nvat"
    directory.mkdir(mode=0o700)
    for data in damaged:
        path.write_bytes(data)
        path.chmod(0o600)
        found, messages = warned(lambda: cache.get(KEY))
        assert found is None
        assert messages == []
        assert not path.exists(), "a damaged entry is removed"
        with pytest.raises(ValueError):  # noqa: PT011 - the reason differs with the damage
            decode_entry(data, KEY)
    assert cache.put(KEY, METADATA, CODE)
    assert cache.get(KEY) is not None


def make_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def make_socket(path: Path) -> None:
    # A socket's name is limited to 108 bytes, so it is bound from inside its directory.
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(before)


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


@pytest.mark.reliability(78)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("make", [make_fifo, make_socket, make_dangling_link])
def test_no_file_at_the_entry_path_is_replaced(
    make: Callable[[Path], None], cache: KernelCache, directory: Path
) -> None:
    directory.mkdir(mode=0o700)
    path = directory / f"{KEY}.nvat"
    make(path)
    found, messages = warned(lambda: cache.get(KEY))
    assert (found, messages) == (None, [])
    stored, messages = warned(lambda: cache.put(KEY, METADATA, CODE))
    assert (stored, messages) == (True, [])
    assert stat.S_ISREG(path.lstat().st_mode)
    assert cache.get(KEY) is not None
    assert files(directory) == [path.name]


@pytest.mark.reliability(78)
def test_a_directory_at_the_entry_path_costs_one_warning(cache: KernelCache, directory: Path) -> None:
    (directory / f"{KEY}.nvat").mkdir(parents=True)
    directory.chmod(0o700)
    assert warned(lambda: cache.get(KEY)) == (None, [])
    stored, messages = warned(lambda: cache.put(KEY, METADATA, CODE))
    assert not stored
    assert len(messages) == 1
    assert files(directory) == [f"{KEY}.nvat"], "no temporary file is left"
    assert cache.put(OTHER, METADATA, CODE), "other entries are stored"


def sealed(header: bytes) -> bytes:
    """An entry file with this header and a good checksum."""
    body = struct.pack("<4sHHIQ", b"NVAT", 1, 0, len(header), len(CODE)) + header + CODE
    return body + hashlib.sha256(body).digest()


@pytest.mark.reliability(78)
@pytest.mark.parametrize(
    "header",
    [
        b"[]", b'"key"', b"3", b"null", b"{", b"", b"\xff\xfe", b"{} {}", b"[" * 100_000, b'{"key":' * 100_000,
        *(json.dumps({"key": KEY, **fields}).encode() for fields in (
            {"log": 3}, {"log": None}, {"kernel": []}, {"arch": {}}, {"compile_ms": "1"}, {"compile_ms": None},
            {"compile_ms": 10**400}, {"compile_ms": [1.0]}, {"key": None}, {"key": [KEY]},
        )),
    ],
    ids=lambda header: header[:40].decode(errors="replace"),
)  # fmt: skip
def test_a_header_that_is_not_ours_is_a_miss_however_good_its_checksum(
    header: bytes, cache: KernelCache, directory: Path
) -> None:
    """F12: every reader of entries, and what a compile reads of one."""
    directory.mkdir(mode=0o700)
    path = directory / f"{KEY}.nvat"

    def write() -> None:
        path.write_bytes(sealed(header))
        path.chmod(0o600)

    write()
    (info,) = cache.entries()
    assert info.problem
    assert not info.tuned
    assert warned(lambda: cache.get(KEY)) == (None, [])
    assert not path.exists()
    write()
    (info,) = cache.verify()
    assert info.removed
    assert files(directory) == []


@pytest.mark.reliability(78)
def test_nothing_at_the_entry_path_leaks_a_descriptor(cache: KernelCache, directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / f"{KEY}.nvat").mkdir()
    make_fifo(directory / f"{OTHER}.nvat")
    before = open_files()
    for _ in range(20):
        for key in (KEY, OTHER):
            assert cache.get(key) is None
        assert [bool(info.problem) for info in cache.entries()] == [True, True]
    assert not open_files() - before


@pytest.mark.reliability(79)
def test_an_entry_under_another_name_is_a_miss(cache: KernelCache, directory: Path) -> None:
    cache.put(KEY, METADATA, CODE)
    shutil.copy2(directory / f"{KEY}.nvat", directory / f"{OTHER}.nvat")
    assert cache.get(OTHER) is None
    assert cache.get(KEY) is not None
    assert files(directory) == [f"{KEY}.nvat"]


# -- strangers ---------------------------------------------------------------------------------------------------------


def refused(cache: KernelCache, why: str) -> None:
    """Neither read nor written, with one warning that says why and how to fix it."""

    def use() -> None:
        for _ in range(3):
            assert cache.get(KEY) is None
            assert not cache.put(KEY, METADATA, CODE)

    _, messages = warned(use)
    assert len(messages) == 1
    assert why in messages[0]
    assert "NVRTC_ATTN_CACHE_DIR" in messages[0]


@pytest.mark.reliability(80)
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_directory_that_others_can_write_is_not_used(mode: int, directory: Path) -> None:
    KernelCache(directory, 1 << 30).put(KEY, METADATA, CODE)
    before = (directory / f"{KEY}.nvat").stat()
    directory.chmod(mode)
    refused(KernelCache(directory, 1 << 30), "chmod go-w")
    assert (directory / f"{KEY}.nvat").stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.reliability(80)
def test_a_parent_that_the_group_can_write_is_not_used(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    KernelCache(parent / "kernels", 1 << 30).put(KEY, METADATA, CODE)
    parent.chmod(0o770)
    refused(KernelCache(parent / "kernels", 1 << 30), str(parent))
    parent.chmod(0o1777)
    assert KernelCache(parent / "kernels", 1 << 30).get(KEY) is not None, "sticky parents protect what is ours"


@pytest.mark.reliability(80)
@needs_other_uid
@pytest.mark.parametrize("which", ["directory", "parent"])
def test_a_directory_of_another_user_is_not_used(which: str, tmp_path: Path) -> None:
    directory = tmp_path / "parent" / "kernels"
    KernelCache(directory, 1 << 30).put(KEY, METADATA, CODE)
    os.chown(directory if which == "directory" else directory.parent, 12345, 12345)
    refused(KernelCache(directory, 1 << 30), "uid 12345")


@pytest.mark.reliability(80)
def test_a_link_to_a_directory_is_not_used(tmp_path: Path) -> None:
    target = tmp_path / "target"
    KernelCache(target, 1 << 30).put(KEY, METADATA, CODE)
    link = tmp_path / "link"
    link.symlink_to(target)
    refused(KernelCache(link, 1 << 30), "symbolic link")
    (tmp_path / "file").write_text("")
    refused(KernelCache(tmp_path / "file", 1 << 30), "not a directory")


@pytest.mark.reliability(80)
def test_a_private_target_behind_an_open_link_is_not_used(tmp_path: Path) -> None:
    target, open_parent = tmp_path / "target", tmp_path / "open"
    target.mkdir(mode=0o700)
    open_parent.mkdir()
    (open_parent / "link").symlink_to(target)
    open_parent.chmod(0o777)  # anybody may swap the link
    refused(KernelCache(open_parent / "link" / "kernels", 1 << 30), str(open_parent))


@pytest.mark.reliability(81)
def test_a_link_to_a_foreign_file_is_neither_read_nor_overwritten(tmp_path: Path, cache: KernelCache) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(encode_entry(KEY, METADATA, b"hostile"))
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o700)
    (directory / f"{KEY}.nvat").symlink_to(foreign)
    assert warned(lambda: cache.get(KEY)) == (None, [])
    assert cache.put(KEY, METADATA, CODE)
    assert decode_entry(foreign.read_bytes(), KEY).code == b"hostile"
    entry = cache.get(KEY)
    assert entry is not None
    assert entry.code == CODE


@pytest.mark.reliability(81)
@needs_other_uid
def test_a_file_of_another_user_is_replaced(cache: KernelCache, directory: Path) -> None:
    path = directory / f"{KEY}.nvat"
    cache.put(KEY, METADATA, b"hostile")
    os.chown(path, 12345, 12345)
    assert cache.get(KEY) is None
    assert cache.put(KEY, METADATA, CODE)
    assert path.stat().st_uid == os.geteuid()


@pytest.mark.reliability(81)
def test_a_file_that_others_can_write_is_not_read(cache: KernelCache, directory: Path) -> None:
    cache.put(KEY, METADATA, CODE)
    (directory / f"{KEY}.nvat").chmod(0o666)
    assert cache.get(KEY) is None


# -- no place, no space ----------------------------------------------------------------------------------------------

USE = """
import sys, warnings
sys.path.insert(0, {repository!r})
from nvrtc_attn.jit.cache import kernel_cache
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        kernel_cache().put("ab" * 32, {{}}, b"code")
        found = kernel_cache().get("ab" * 32)
print(len(caught), None if found is None else "hit", kernel_cache().path)
"""


def use_in_child(repository: Path, cwd: Path, environment: dict[str, str], **options: Any) -> list[str]:
    return subprocess.run(
        [sys.executable, "-B", "-c", USE.format(repository=str(repository))],
        env=environment, cwd=cwd, capture_output=True, text=True, check=True, timeout=60, **options,
    ).stdout.split()  # fmt: skip


@pytest.mark.reliability(82)
def test_homes_that_are_none(repository: Path, tmp_path: Path) -> None:
    cwd, xdg, home = tmp_path / "cwd", tmp_path / "xdg", tmp_path / "home"
    cwd.mkdir()
    root_before = set(os.listdir("/"))
    for missing in (str(home), "/nonexistent"):
        assert use_in_child(repository, cwd, {"HOME": missing})[:2] == ["1", "None"]
        assert not os.path.exists(missing)
    home.mkdir()
    assert use_in_child(repository, cwd, {"HOME": str(home)})[:2] == ["0", "hit"]
    assert (home / ".cache" / "nvrtc_attn").is_dir()
    assert use_in_child(repository, cwd, {"HOME": str(home), "XDG_CACHE_HOME": str(xdg)})[2] == str(xdg / "nvrtc_attn")
    for relative in ("", "relative/path"):
        assert use_in_child(repository, cwd, {"HOME": str(home), "XDG_CACHE_HOME": relative})[2].startswith(str(home))
    assert use_in_child(repository, cwd, {"HOME": "/"}) == ["1", "None", "None"]
    assert os.listdir(cwd) == []
    assert set(os.listdir("/")) == root_before


@pytest.mark.reliability(82)
@needs_other_uid
def test_a_user_without_entry_and_home_works_in_memory(repository: Path, tmp_path: Path) -> None:
    # The other user may not be able to read Python's own files, so everything is imported first.
    become = "import os, tempfile\nos.setgid(12345)\nos.setuid(12345)\nwith warnings"
    program = USE.format(repository=str(repository)).replace("with warnings", become, 1)
    for environment in ({}, {"HOME": "/nonexistent"}, {"HOME": "/"}):
        output = subprocess.run(
            [sys.executable, "-B", "-c", program],
            env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
        ).stdout.split()  # fmt: skip
        assert output[:2] == ["1", "None"], (environment, output)


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.reliability(83)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("call", ["os.fsync", "os.mkdir", "tempfile.mkstemp"])
def test_a_full_or_read_only_disk_costs_one_warning(
    code: int, call: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KernelCache(directory, 1 << 30)
    monkeypatch.setattr(call, failing(code))

    def use() -> None:
        for key in (KEY, OTHER):
            assert not cache.put(key, METADATA, CODE)
            assert cache.get(key) is None

    _, messages = warned(use)
    assert len(messages) == 1
    assert os.strerror(code) in messages[0]
    assert files(directory) == []


@pytest.mark.reliability(83)
def test_a_short_write_is_completed_and_a_full_disk_is_cleaned_up(
    cache: KernelCache, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # The kernel writes 4096 bytes and then refuses with EFBIG.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        stored, messages = warned(lambda: cache.put(KEY, METADATA, CODE))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not stored
    assert len(messages) == 1
    assert files(directory) == []
    assert not cache.put(KEY, METADATA, CODE), "not tried again in this process"
    assert KernelCache(directory, 1 << 30).put(KEY, METADATA, CODE)


@pytest.mark.reliability(83)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_evicts_and_the_write_is_tried_again(
    code: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F12: the limit of the cache is far, that of the disk is not. It has room for three entries."""
    sync = os.fsync

    def full(descriptor: int) -> None:
        if sum((directory / name).stat().st_size for name in files(directory)) > 3 * (len(CODE) + 500):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    cache = KernelCache(directory, 1 << 30)
    monkeypatch.setattr(os, "fsync", full)
    keys = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(8)]
    for age, key in enumerate(keys):
        assert warned(lambda key=key: cache.put(key, METADATA, CODE)) == (True, [])
        os.utime(directory / f"{key}.nvat", (time.time() - 1000 + age,) * 2)
    # More than one goes where the file system's blocks may take the place of a single one.
    assert [info.key for info in cache.entries()] in ([keys[7], keys[6], keys[5]], [keys[7], keys[6]])
    assert all(name.endswith(".nvat") for name in files(directory))


@pytest.mark.reliability(83)
@needs_other_uid
def test_a_file_system_of_one_mebibyte_holds_the_newest_entries(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(directory)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this process may not mount a file system")
    try:
        cache = KernelCache(directory, 1 << 30)
        keys = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(100)]
        for key in keys:
            assert warned(lambda key=key: cache.put(key, METADATA, CODE * 2)) == (True, [])
        assert cache.get(keys[-1]) is not None
        assert len(cache.entries()) > 10
        assert cache.verify() == []
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.reliability(83)
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="modes do not stop root")
def test_a_directory_without_write_permission_is_read(cache: KernelCache, directory: Path) -> None:
    cache.put(KEY, METADATA, CODE)
    directory.chmod(0o500)
    second = KernelCache(directory, 1 << 30)
    assert second.get(KEY) is not None
    stored, messages = warned(lambda: second.put(OTHER, METADATA, CODE))
    assert not stored
    assert len(messages) == 1


@pytest.mark.reliability(84)
@pytest.mark.parametrize("code", [errno.EBUSY, errno.ESTALE, errno.EXDEV, errno.EACCES, errno.ENOENT])
def test_a_failing_rename_leaves_nothing(
    code: int, cache: KernelCache, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", failing(code))
    stored, messages = warned(lambda: cache.put(KEY, METADATA, CODE))
    assert not stored
    assert len(messages) == 1
    assert files(directory) == []


@pytest.mark.reliability(84)
@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE, errno.EIO])
def test_a_published_file_that_is_not_visible_is_a_miss(
    code: int, cache: KernelCache, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.put(KEY, METADATA, CODE)
    real_open = os.open

    def hidden(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(".nvat"):
            raise OSError(code, os.strerror(code))
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", hidden)
    assert warned(lambda: cache.get(KEY))[0] is None
    assert files(directory) == [f"{KEY}.nvat"]


@pytest.mark.reliability(84)
def test_a_compile_does_not_need_what_it_published(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(directory))
    monkeypatch.setattr(os, "replace", failing(errno.ESTALE))
    fake_nvrtc(monkeypatch)
    results, messages = warned(lambda: [compiler.compile_source("// rename", "sm_80") for _ in range(3)])
    assert {r.code for r in results} == {b"code of // rename"}
    assert len(messages) == 1


@pytest.mark.reliability(75)
def test_an_interrupted_write_leaves_no_temporary(
    cache: KernelCache, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_descriptor: int) -> None:
        assert len(files(directory)) == 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.put(KEY, METADATA, CODE)
    assert files(directory) == []
    assert cache.put(KEY, METADATA, CODE)


# -- several processes -----------------------------------------------------------------------------------------------


def fake_nvrtc(patch: pytest.MonkeyPatch) -> None:
    """A compiler that takes no time, headers that stand still, and an empty memory."""
    patch.setattr(headers.Snapshot, "digest", lambda _self, _source: "0" * 64)
    patch.delenv("NVRTC_ATTN_ASSERT_CACHED", raising=False)
    patch.setattr(compiler, "_memory", type(compiler._memory)())
    patch.setattr(compiler, "run_nvrtc", lambda source, arch, *_: (f"code of {source}".encode(), ""))


def race(directory: str, index: int, rounds: int, barrier: Any, results: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVRTC_ATTN_CACHE_DIR", directory)
        fake_nvrtc(patch)
        warnings.simplefilter("error")
        digest = hashlib.sha256()
        hits = 0
        try:
            for number in range(rounds):
                barrier.wait(60)
                if index == 0:
                    shutil.rmtree(directory, ignore_errors=True)  # cold
                barrier.wait(60)
                compiler._memory.clear()
                compiled = compiler.compile_source(f"// round {number}", "sm_80")
                assert compiled.code == f"code of // round {number}".encode()
                barrier.wait(60)
                # Every process has published, so now all must hit.
                compiler._memory.clear()
                again = compiler.compile_source(f"// round {number}", "sm_80")
                hits += again.cached
                digest.update(compiled.code + again.code)
            results.put((index, hits, digest.hexdigest()))
        except BaseException as error:
            barrier.abort()
            results.put((index, repr(error), ""))


@pytest.mark.reliability(76)
def test_sixteen_processes_on_a_cold_directory(directory: Path) -> None:
    processes, rounds = 16, 50
    compiler.nvrtc_build()  # 50 ms that the children inherit
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(processes), context.Queue()
    children = [
        context.Process(target=race, args=(str(directory), i, rounds, barrier, results)) for i in range(processes)
    ]
    for child in children:
        child.start()
    found = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert {hits for _, hits, _ in found} == {rounds}, found
    assert len({digest for *_, digest in found}) == 1
    assert [name for name in files(directory) if not name.endswith(".nvat")] == [], "no temporary file is left"


def write_forever(directory: str, ready: Any) -> None:
    cache = KernelCache(Path(directory), 1 << 30)
    ready.set()
    while True:
        for index in range(50):
            cache.put(hashlib.sha256(str(index).encode()).hexdigest(), METADATA, CODE * 20)


@pytest.mark.reliability(85)
def test_killed_writers_leave_whole_entries_and_temporaries_that_are_swept(cache: KernelCache, directory: Path) -> None:
    context = multiprocessing.get_context("fork")
    draw = random.Random(2)
    for _ in range(20):
        ready = context.Event()
        writer = context.Process(target=write_forever, args=(str(directory), ready))
        writer.start()
        assert ready.wait(30)
        time.sleep(draw.uniform(0.001, 0.03))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    assert cache.verify() == [], "a killed writer publishes nothing in part"
    for path in directory.glob("*.nvat"):
        assert cache.get(path.stem) is not None
    assert cache.put(KEY, METADATA, CODE)
    assert list(directory.glob(".*.tmp")) == [], "their writers are dead, so they are leftovers at once"


def temporary(directory: Path, machine: str, process: int, size: int = 1000, age_s: float = 0.0) -> Path:
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f".nvat-{machine}-{process}-abcdefgh.tmp"
    path.write_bytes(bytes(size))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


@pytest.fixture
def dead_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.reliability(85)
@pytest.mark.parametrize("how", ["put", "clear"])
def test_only_temporaries_without_a_living_writer_are_swept(
    how: str, cache: KernelCache, directory: Path, dead_process: int
) -> None:
    here, elsewhere = cache_module._machine(), "f" * 16
    assert here != "0" * 16, "Linux tells"
    kept = [
        temporary(directory, here, os.getpid()),
        temporary(directory, here, os.getppid()),
        temporary(directory, elsewhere, dead_process, age_s=3500),  # that number may live over there
    ]
    swept = [
        temporary(directory, here, dead_process),
        temporary(directory, elsewhere, os.getpid(), age_s=3700),
        temporary(directory, here, 1, age_s=3700),  # the number of a killed writer lives again
    ]
    assert cache.put(KEY, METADATA, CODE) if how == "put" else cache.clear() == 0
    assert [path.exists() for path in kept] == [True] * 3
    assert [path.exists() for path in swept] == [False] * 3


@pytest.mark.reliability(85)
def test_a_writer_is_known_by_the_name_of_its_temporary(
    cache: KernelCache, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.extend(files(directory)))
    assert cache.put(KEY, METADATA, CODE)
    (name,) = seen
    assert name.startswith(f".nvat-{cache_module._machine()}-{os.getpid()}-")
    assert cache_module._kind(name) == "temporary"


@pytest.mark.reliability(87)
def test_temporaries_count_under_the_cap(directory: Path) -> None:
    """Of living writers and of those that may live elsewhere: what is on the disk is at most the cap."""
    cache = KernelCache(directory, 4 * (ENTRY + 500))
    keys = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(4)]
    for age, key in enumerate(keys):
        assert cache.put(key, METADATA, bytes(ENTRY))
        os.utime(directory / f"{key}.nvat", (time.time() - 1000 + age,) * 2)
    temporary(directory, "f" * 16, 1, size=2 * ENTRY)
    assert cache.put(KEY, METADATA, bytes(ENTRY))
    assert {info.key for info in cache.entries()} == {keys[3], KEY}
    assert sum(path.stat().st_size for path in directory.iterdir()) <= cache.max_bytes


def write_and_stop(directory: str) -> None:
    sync = os.fsync

    def stop(descriptor: int) -> None:
        sync(descriptor)
        os.kill(os.getpid(), signal.SIGSTOP)

    os.fsync = stop
    assert KernelCache(Path(directory), 1 << 30).put(KEY, {**METADATA, "writer": "stopped"}, CODE)


@pytest.mark.reliability(86)
def test_a_stopped_writer_holds_nobody_up(cache: KernelCache, directory: Path) -> None:
    """There is no lock: who is stopped in the middle of a write of the same key is neither waited for nor swept."""
    writer = multiprocessing.get_context("fork").Process(target=write_and_stop, args=(str(directory),))
    writer.start()
    assert writer.pid is not None
    try:
        assert os.WIFSTOPPED(os.waitpid(writer.pid, os.WUNTRACED)[1])
        assert [cache_module._kind(name) for name in files(directory)] == ["temporary"]
        assert cache.get(KEY) is None
        assert cache.put(KEY, METADATA, CODE)
        assert cache.get(KEY) is not None
        assert cache.clear() == 1
        assert [cache_module._kind(name) for name in files(directory)] == ["temporary"]
    finally:
        os.kill(writer.pid, signal.SIGCONT)
        writer.join(30)
    entry = cache.get(KEY)
    assert entry is not None
    assert entry.metadata["writer"] == "stopped"
    assert files(directory) == [f"{KEY}.nvat"]


CAP, ENTRY = 1_000_000, 50_000


def fill(directory: str, index: int) -> None:
    warnings.simplefilter("error")
    cache = KernelCache(Path(directory), CAP)
    for number in range(25):
        key = hashlib.sha256(f"{index} {number}".encode()).hexdigest()
        assert cache.put(key, METADATA, bytes(ENTRY))
        entry = cache.get(key)
        assert entry is None or len(entry.code) == ENTRY


@pytest.fixture
def four_writers(directory: Path) -> Iterator[list[Any]]:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=fill, args=(str(directory), i)) for i in range(4)]
    for child in children:
        child.start()
    yield children
    for child in children:
        child.join(60)


@pytest.mark.reliability(87)
def test_the_size_cap_holds_with_four_writers(directory: Path, four_writers: list[Any]) -> None:
    largest = 0
    while any(child.is_alive() for child in four_writers):
        total = 0
        for path in directory.glob("*.nvat"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        largest = max(largest, total)
    for child in four_writers:
        child.join()
        assert child.exitcode == 0
    assert largest <= CAP + 4 * (ENTRY + 1000)
    cache = KernelCache(directory, CAP)
    assert cache.put(KEY, METADATA, bytes(ENTRY))
    assert sum(info.size_bytes for info in cache.entries()) <= CAP
    assert cache.get(KEY) is not None, "the newest entry survives"
    assert not any(info.problem for info in cache.entries())


@pytest.mark.reliability(87)
def test_the_least_recently_used_entry_goes_first(directory: Path) -> None:
    cache = KernelCache(directory, 3 * (ENTRY + 500))
    keys = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(4)]
    for age, key in enumerate(keys[:3]):
        cache.put(key, METADATA, bytes(ENTRY))
        used = time.time() - 1000 + age
        os.utime(directory / f"{key}.nvat", (used, used))
    assert cache.get(keys[0]) is not None  # renews its access time, whatever the mount options are
    cache.put(keys[3], METADATA, bytes(ENTRY))
    assert {info.key for info in cache.entries()} == {keys[0], keys[2], keys[3]}


@pytest.mark.reliability(87)
def test_an_entry_larger_than_the_cache_is_kept_in_memory_only(directory: Path) -> None:
    cache = KernelCache(directory, 1000)
    stored, messages = warned(lambda: cache.put(KEY, METADATA, CODE))
    assert not stored
    assert "NVRTC_ATTN_CACHE_SIZE" in messages[0]
    assert files(directory) == []


def test_two_writers_of_one_key_never_mix(cache: KernelCache) -> None:
    # Metadata and code are one file: what is read was written by one of them.
    for index in (0, 1):
        cache.put(KEY, {**METADATA, "writer": index}, bytes([index]) * 100)
        entry = cache.get(KEY)
        assert entry is not None
        assert entry.code == bytes([entry.metadata["writer"]]) * 100


def test_read_only_caches_write_nothing(directory: Path) -> None:
    KernelCache(directory, 1 << 30).put(KEY, METADATA, CODE)
    path = directory / f"{KEY}.nvat"
    os.utime(path, (1, 1))
    path_of_bad = directory / f"{OTHER}.nvat"
    path_of_bad.write_bytes(b"damaged")
    path_of_bad.chmod(0o600)
    cache = KernelCache(directory, 1 << 30, read_only=True)
    assert cache.get(KEY) is not None
    assert cache.get(OTHER) is None
    assert not cache.put(OTHER, METADATA, CODE)
    cache.discard(KEY)
    assert path.stat().st_mtime_ns == 10**9
    assert files(directory) == sorted([path.name, path_of_bad.name])


def test_hashes_work_where_fips_allows_sha2_only(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise ValueError("disabled for FIPS")

    for name in ("md5", "sha1", "blake2b", "blake2s"):
        monkeypatch.setattr(hashlib, name, forbidden)
    cache.put(KEY, METADATA, CODE)
    assert cache.get(KEY) is not None
    assert SCHEMA == 1


def test_no_file_asks_for_another_hash() -> None:
    files = list(Path(cache_module.__file__).parents[1].rglob("*.py"))
    assert len(files) > 100
    for path in files:
        assert set(re.findall(r"hashlib\.(\w+)", path.read_text(encoding="utf-8"))) <= {"sha256"}, path


def test_a_directory_that_cannot_be_listed_is_not_called_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.warns(CacheWarning, match="Permission denied"):
        assert KernelCache(tmp_path, 1 << 20).entries() == []
