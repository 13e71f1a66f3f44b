"""The machine that executes PTX, built once."""

from __future__ import annotations

from typing import Any

import pytest
from simulator import gpu


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Skips where there is no C++ compiler."""
    return gpu.build_machine(tmp_path_factory)
