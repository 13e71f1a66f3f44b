"""The package's logger, and messages that are worth saying once a process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LOGGER: Final = logging.getLogger("nvrtc_attn")
_said: set[str] = set()
_thread = threading.local()


def log_once(message: str, level: int = logging.WARNING) -> None:
    """Log ``message`` the first time that ``level`` is enabled for it."""
    if LOGGER.isEnabledFor(level) and message not in _said and not getattr(_thread, "quiet", False):
        _said.add(message)
        LOGGER.log(level, message)


@contextmanager
def quiet() -> Iterator[None]:
    """Say nothing with `log_once` in this thread, and leave it to be said later: for work that nobody asked for yet."""
    _thread.quiet = True
    try:
        yield
    finally:
        _thread.quiet = False
