"""The package's logger, and messages that are worth saying once a process."""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

LOGGER: Final = logging.getLogger("nvrtc_attn")
_said: set[str] = set()
_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def log_once(message: str, level: int = logging.WARNING) -> None:
    """Log ``message`` the first time that ``level`` is enabled for it."""
    if LOGGER.isEnabledFor(level) and message not in _said:
        with _lock:  # of the threads that see it missing, one says it
            if message in _said:
                return
            _said.add(message)
        LOGGER.log(level, message)
