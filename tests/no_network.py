"""An audit hook that forbids this process every connection and look-up beyond the machine itself."""

from __future__ import annotations

import os
import sys
from typing import Any

attempts: list[str] = []
"""What was asked for. The exception alone may be swallowed by whoever asked."""

_LOOK_UPS = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
_SENDS = ("socket.connect", "socket.sendto", "socket.sendmsg")


def _is_local(host: object) -> bool:
    text = host.decode(errors="replace") if isinstance(host, bytes) else host
    return text in (None, "", "localhost", "::1") or (isinstance(text, str) and text.startswith("127."))


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _LOOK_UPS:
        host = arguments[0]
    elif event in _SENDS and isinstance(arguments[1], tuple):  # others are paths of the file system, or nothing
        host = arguments[1][0]
    else:
        return
    if not _is_local(host):
        attempts.append(f"{event} {host!r}")
        log = os.environ.get("NVRTC_ATTN_TEST_NETWORK_LOG")
        if log:
            with open(log, "a") as file:
                file.write(f"{event} {host!r}\n")
        raise RuntimeError(f"{event}: {host!r}: nothing here may need the network")


def forbid() -> None:
    """From now on, for good: an audit hook cannot be taken away."""
    sys.addaudithook(_hook)
