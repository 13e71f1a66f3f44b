"""The package's logger, and messages that are worth saying once a process."""

from __future__ import annotations

import logging
from typing import Final

LOGGER: Final = logging.getLogger("nvrtc_attn")
_said: set[str] = set()


def log_once(message: str, level: int = logging.WARNING) -> None:
    """Log ``message`` the first time that ``level`` is enabled for it."""
    if LOGGER.isEnabledFor(level) and message not in _said:
        _said.add(message)
        LOGGER.log(level, message)
