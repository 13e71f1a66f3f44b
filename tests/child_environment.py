"""Processes that tests start: what this process imports from, they import from, too; and how ranks end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def python_path(*first: str | Path) -> str:
    """A value for PYTHONPATH: ``first``, then what this process has there, which may hold its packages."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*map(str, first), *(os.path.abspath(path) for path in own if path)])


def leave_ranks() -> NoReturn:
    """End the process of a rank whose work is done, without running the destructors of C++ libraries.

    Two runs of the suite (PyTorch 2.13, gloo, two busy cores) had a rank that printed its right result and then ended
    with "terminate called without an active exception": a thread was destroyed that still ran.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
