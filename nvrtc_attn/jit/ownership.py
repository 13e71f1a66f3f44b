"""Whether others could change what is at a path: owners, modes and links, of a file and of all directories above it.

Elsewhere than on POSIX systems the directory that is named is trusted.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

_POSIX: Final = os.name == "posix"


def _trusted_owner(status: os.stat_result) -> bool:
    return not _POSIX or status.st_uid in (os.geteuid(), 0)


def why_unsafe(status: os.stat_result, path: str, *, sticky_ok: bool) -> str:
    """Why others could change what is at ``path``; empty if they cannot."""
    if not _POSIX:
        return ""
    if not _trusted_owner(status):
        return f"{path} belongs to uid {status.st_uid}, not to uid {os.geteuid()} or root"
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writable and not (sticky_ok and status.st_mode & stat.S_ISVTX):
        return f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, others can write to it (chmod go-w {path})"
    return ""


def why_unusable(directory: Path) -> str:
    """Why ``directory`` must not be used; empty if it may be, or if it does not exist yet below safe parents."""
    literal = os.path.abspath(directory)
    # A link may be swapped by whoever can write to the directory that holds it, so both spellings count.
    resolved = Path(os.path.realpath(os.path.dirname(literal)))
    for parent in sorted({os.fspath(p) for p in (*Path(literal).parents, resolved, *resolved.parents)}):
        try:
            status = os.stat(parent)
        except FileNotFoundError:
            continue
        why = why_unsafe(status, parent, sticky_ok=True)
        if why:
            return why
    try:
        status = os.lstat(literal)
    except FileNotFoundError:
        return ""
    if not stat.S_ISDIR(status.st_mode):
        return f"{literal} is {'a symbolic link' if stat.S_ISLNK(status.st_mode) else 'not a directory'}"
    return why_unsafe(status, literal, sticky_ok=False)
