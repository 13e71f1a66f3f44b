"""The package's logger, and messages that are worth saying once a process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .forks import renew_in_child

LOGGER: Final = logging.getLogger("nvrtc_attn")
_MAX_SAID: Final = 4096
"""A message may name a shape or a file: beyond so many all may be said again."""
_said: set[str] = set()
_lock = threading.Lock()
_thread = threading.local()
renew_in_child(globals(), "_lock", threading.Lock)


def log_once(message: str, level: int = logging.WARNING) -> None:
    """Log ``message`` the first time that ``level`` is enabled for it."""
    if LOGGER.isEnabledFor(level) and message not in _said and not getattr(_thread, "quiet", False):
        with _lock:  # of the threads that see it missing, one says it
            if message in _said:
                return
            if len(_said) >= _MAX_SAID:
                _said.clear()
            _said.add(message)
        LOGGER.log(level, message)


@contextmanager
def quiet() -> Iterator[None]:
    """Say nothing with `log_once` in this thread, and leave it to be said later: for work that nobody asked for yet."""
    before = getattr(_thread, "quiet", False)
    _thread.quiet = True
    try:
        yield
    finally:
        _thread.quiet = before
