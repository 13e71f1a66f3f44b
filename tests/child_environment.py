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
    """End a rank whose work is done, without what C++ destroys at a process's end.

    There gloo of PyTorch 2.13 now and then destroys a thread that still runs: "terminate called without an active
    exception" behind the right result, seen in two runs of the suite on two busy cores.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
