"""What every test shares: a cache of its own, and no setting of the developer's shell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import no_network
import pytest

no_network.forbid()
# Before NumPy is imported: oracles of 16 workers with 16 threads each keep each other waiting most of the time.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def _isolated_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kernels of the tests never reach the user's cache. One directory per session and worker.

    A cache that the caller names is used: a second run then starts warm.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("NVRTC_ATTN_") and "_TEST_" not in name]:
            if name not in ("NVRTC_ATTN_CACHE_DIR", "NVRTC_ATTN_ASSERT_CACHED", "NVRTC_ATTN_BACKEND"):
                patch.delenv(name)
        if "NVRTC_ATTN_CACHE_DIR" not in os.environ:
            patch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path_factory.mktemp("kernels", numbered=True)))
        yield Path(os.environ["NVRTC_ATTN_CACHE_DIR"])


@pytest.fixture(autouse=True)
def _no_network() -> Iterator[None]:
    """No test asks for the network, not even where the one who asked swallows the refusal."""
    before = len(no_network.attempts)
    yield
    assert no_network.attempts[before:] == []


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``reliability`` takes item numbers of the checklist, so that a typing error does not prove a wrong one."""
    for item in items:
        for marker in item.iter_markers("reliability"):
            if not marker.args or not all(isinstance(n, int) and 1 <= n <= 106 for n in marker.args):
                raise pytest.UsageError(f"{item.nodeid}: reliability takes numbers from 1 to 106")
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
