"""Which versions of a host library nvrtc_attn was tested with: of a framework, or of a library of models."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata

from .log import log_once


def check_version(library: str, first: str, last: str) -> None:
    """Log once if the installed ``library`` is older than ``first`` or of a later minor version than ``last``."""
    installed = _installed(library)
    if installed is None:
        return
    if not _numbers(first) <= _numbers(installed) or _numbers(installed)[:2] > _numbers(last)[:2]:
        log_once(
            f"{library} {installed} is outside of the versions that nvrtc_attn was tested with, "
            f"{first} to {last}. Compare its results with the library's own implementation before relying on it."
        )


@cache  # a look-up takes a millisecond
def _installed(library: str) -> str | None:
    """None of a copy on the path, which has no version to compare, and where the installation is damaged."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers, at least three: ``"5.23.dev1+cpu"`` is (5, 23, 0)."""
    numbers = [int(part) for part in re.split(r"[^0-9.]", version)[0].split(".") if part]
    return (*numbers, *[0] * (3 - len(numbers)))
