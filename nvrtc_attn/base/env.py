"""Every ``NVRTC_ATTN_*`` environment variable: typed, validated, read when it is asked for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

BACKENDS: Final = ("auto", "portable", "hopper", "legacy")
DEFAULT_CACHE_SIZE_BYTES: Final = 1 << 30
"""1 GiB holds about 5,000 kernels of 0.2 MB."""

_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")
_BOOLEAN: Final = "one of 1, true, yes, on, 0, false, no, off"
_ALLOWED: Final = {
    "NVRTC_ATTN_CACHE_DIR": "an absolute path",
    "NVRTC_ATTN_CACHE_SIZE": "a positive number of bytes",
    "NVRTC_ATTN_NO_COMPILE": _BOOLEAN,
    "NVRTC_ATTN_ASSERT_CACHED": _BOOLEAN,
    "NVRTC_ATTN_CUTLASS_DIR": "a directory",
    "NVRTC_ATTN_BACKEND": f"one of {', '.join(BACKENDS)}",
    "NVRTC_ATTN_AUTOTUNE": _BOOLEAN,
    "NVRTC_ATTN_DUMP": "an absolute path",
    "NVRTC_ATTN_PCH_DIR": "an absolute path",
    "NVRTC_ATTN_DEBUG": _BOOLEAN,
}
"""What a value may be, as a message says it. docs/configuration.md has defaults and meanings."""


def _read(name: str) -> str:
    # An empty value means unset, as for every XDG and CUDA variable.
    return os.environ.get(name, "").strip()


def _refuse(name: str, value: str, why: str = "") -> ValueError:
    return ValueError(f"{name}={value!r} is not {_ALLOWED[name]}{why}; see `python -m nvrtc_attn doctor`")


def _boolean_or_unset(name: str) -> bool | None:
    value = _read(name)
    if value.lower() in _TRUE:
        return True
    if value and value.lower() not in _FALSE:
        raise _refuse(name, value)
    return False if value else None


def _boolean(name: str) -> bool:
    return _boolean_or_unset(name) is True


def _absolute(name: str) -> Path | None:
    value = _read(name)
    if not value:
        return None
    path = Path(value)
    if not path.is_absolute() or "\0" in value:
        raise _refuse(name, value)
    return path


def cache_dir() -> Path | None:
    """Directory of the kernel cache, ``None`` where the user has no place for one. Creates nothing.

    The variable must be absolute, because a relative one would name another directory after every ``chdir``.
    ``XDG_CACHE_HOME`` follows its specification: a relative or empty value counts as unset.
    """
    value = _read("NVRTC_ATTN_CACHE_DIR")
    if value:
        try:
            path = Path(value).expanduser()
        except RuntimeError:
            raise _refuse("NVRTC_ATTN_CACHE_DIR", value, " (the home directory is unknown)") from None
        if not path.is_absolute() or "\0" in value:
            raise _refuse("NVRTC_ATTN_CACHE_DIR", value)
        return path
    xdg = Path(_read("XDG_CACHE_HOME"))
    if xdg.is_absolute():
        return xdg / "nvrtc_attn"
    try:
        home = Path.home()
    except RuntimeError:  # no HOME and no passwd entry
        return None
    # HOME is "/" for container users without an entry; "/.cache" belongs to nobody.
    if not home.is_absolute() or home == Path(home.anchor):
        return None
    return home / ".cache" / "nvrtc_attn"


def dump_dir() -> Path | None:
    """Where every kernel's source, log and cubin are written, ``None`` where nobody asked for them."""
    return _absolute("NVRTC_ATTN_DUMP")


def pch_dir() -> Path | None:
    """Where compiler processes keep precompiled headers while they live, ``None`` for none."""
    return _absolute("NVRTC_ATTN_PCH_DIR")


def cache_size_bytes() -> int:
    """Upper bound of the kernel cache in bytes."""
    value = _read("NVRTC_ATTN_CACHE_SIZE")
    if not value:
        return DEFAULT_CACHE_SIZE_BYTES
    if not (value.isascii() and value.isdecimal()) or int(value) == 0:
        raise _refuse("NVRTC_ATTN_CACHE_SIZE", value)
    return int(value)


def no_compile() -> bool:
    """Whether a kernel that is not in the cache is an error and nothing may be written."""
    return _boolean("NVRTC_ATTN_NO_COMPILE")


def assert_cached() -> bool:
    """Whether a compile is an error."""
    return _boolean("NVRTC_ATTN_ASSERT_CACHED")


def cutlass_dir() -> Path | None:
    """CUTLASS include directory that replaces the bundled one, ``None`` for the bundled one."""
    value = _read("NVRTC_ATTN_CUTLASS_DIR")
    if not value:
        return None
    path = Path(value)
    for candidate in (path, path / "include"):
        if (candidate / "cute").is_dir() and (candidate / "cutlass").is_dir():
            return candidate.resolve()
    raise _refuse("NVRTC_ATTN_CUTLASS_DIR", value, " with cute/ and cutlass/ in it or in its include/")


def backend() -> str:
    """Kernel family: ``"auto"`` the faster one, the others by name; ``"legacy"`` is compute capability 7.5 code."""
    value = _read("NVRTC_ATTN_BACKEND").lower() or "auto"
    if value not in BACKENDS:
        raise _refuse("NVRTC_ATTN_BACKEND", value)
    return value


# ``NVRTC_ATTN_BACKEND`` as it is, not validated: part of the keys by which calls find again what `backend` led to.
# Asked of the dictionary behind ``os.environ``, which encodes the name and decodes the value at every call: 0.7 us.
raw_backend: Final[Callable[[], Any]] = functools.partial(
    getattr(os.environ, "_data", os.environ).get,
    os.environ.encodekey("NVRTC_ATTN_BACKEND") if hasattr(os.environ, "_data") else "NVRTC_ATTN_BACKEND",
)


def debug() -> bool:
    """Whether values in device memory are checked before a launch."""
    return _boolean("NVRTC_ATTN_DEBUG")


def autotune() -> bool | None:
    """Whether plans are chosen by measurement (`nvrtc_attn.plans.autotune`); ``None`` where the user leaves it open."""
    return _boolean_or_unset("NVRTC_ATTN_AUTOTUNE")


ACCESSORS: Final[dict[str, Callable[[], object]]] = {
    "NVRTC_ATTN_CACHE_DIR": cache_dir,
    "NVRTC_ATTN_CACHE_SIZE": cache_size_bytes,
    "NVRTC_ATTN_NO_COMPILE": no_compile,
    "NVRTC_ATTN_ASSERT_CACHED": assert_cached,
    "NVRTC_ATTN_CUTLASS_DIR": cutlass_dir,
    "NVRTC_ATTN_BACKEND": backend,
    "NVRTC_ATTN_AUTOTUNE": autotune,
    "NVRTC_ATTN_DUMP": dump_dir,
    "NVRTC_ATTN_PCH_DIR": pch_dir,
    "NVRTC_ATTN_DEBUG": debug,
}
"""Every variable and what reads it: raises ``ValueError`` for a value that is not allowed."""
