"""The environment of processes that tests start: what this process imports from, they import from, too."""

from __future__ import annotations

import os
from pathlib import Path


def python_path(*first: str | Path) -> str:
    """A value for PYTHONPATH: ``first``, then what this process has there, which may hold its packages."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*map(str, first), *(os.path.abspath(path) for path in own if path)])
