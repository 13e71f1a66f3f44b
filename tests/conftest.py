"""What every test shares: which tests run and where, a cache of their own, and no setting of the developer's shell."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import differences
import host_cuda
import no_network
import pytest
import selection
import turns

no_network.forbid()
# Before NumPy is imported: oracles of 16 workers with 16 threads each keep each other waiting most of the time.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

REPOSITORY = Path(__file__).resolve().parent.parent
LEFT_OUT = pytest.StashKey[int]()
"""Tests that only ``--full`` runs."""
WAITING = pytest.StashKey[int]()
"""Tests that ``--turn`` leaves to another turn."""


@pytest.fixture(scope="session", autouse=True)
def _isolated_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kernels of the tests never reach the user's cache. One directory per session, which all workers share.

    A cache that the caller names is used, with the size that is named: a second run then starts warm.
    """
    with pytest.MonkeyPatch.context() as patch:
        kept = {f"NVRTC_ATTN_{name}" for name in ("CACHE_DIR", "CACHE_SIZE", "ASSERT_CACHED", "BACKEND", "PCH_DIR")}
        for name in [name for name in os.environ if name.startswith("NVRTC_ATTN_") and "_TEST_" not in name]:
            if name not in kept:
                patch.delenv(name)
        if "NVRTC_ATTN_CACHE_DIR" not in os.environ:
            kernels = host_cuda.session_root(tmp_path_factory) / "kernels"
            kernels.mkdir(mode=0o700, exist_ok=True)
            patch.setenv("NVRTC_ATTN_CACHE_DIR", str(kernels))
        yield Path(os.environ["NVRTC_ATTN_CACHE_DIR"])


@pytest.fixture(autouse=True)
def _differences(request: pytest.FixtureRequest) -> None:
    differences.of_test(request.node.user_properties)


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="Run the full matrix, also what is marked slow.")
    parser.addoption(
        "--turn", type=int, metavar="N",
        help="Leave out tests of kernels that did not change, and those that wait: tests/fingerprints.py, turns.py.",
    )  # fmt: skip
    parser.addoption(
        "--record", action="store_true", help="Write which tests of kernels passed: tests/fingerprints.py."
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Directories of tests are run in parallel without being asked; before pytest-xdist reads its options."""
    if not hasattr(config, "workerinput") and selection.wants_workers(config):
        config.option.numprocesses = "auto"
        config.option.dist = "worksteal"  # compiles take 0.1 to 10 s: no fixed share stays even


def pytest_configure(config: pytest.Config) -> None:
    if config.option.turn is not None or config.option.record:
        import fingerprints

        if not hasattr(config, "workerinput"):
            fingerprints.check_options(config)
        config.pluginmanager.register(fingerprints.Plugin(config), "fingerprints")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # pytest-xdist reads it
    return selection.worker_count(config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark and check the items; after ``-k`` and ``-m``, leave out what belongs to the full matrix only."""
    for item in items:
        # Numbers of the checklist are checked, so that a typing error does not prove a wrong one.
        for marker in item.iter_markers("reliability"):
            if not marker.args or not all(isinstance(n, int) and 1 <= n <= 106 for n in marker.args):
                raise pytest.UsageError(f"{item.nodeid}: reliability takes numbers from 1 to 106")
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
    yield
    if not config.option.full:
        out = selection.left_out(items, config.args)
        config.stash[LEFT_OUT] = len(out)
        leave_out(config, items, out)
    if (plugin := config.pluginmanager.get_plugin("fingerprints")) is not None:
        leave_out(config, items, plugin.left(items))
    if (turn := config.option.turn) is not None:
        out = [item for item in items if turns.waits(item, turn)]
        config.stash[WAITING] = len(out)
        leave_out(config, items, out)


def leave_out(config: pytest.Config, items: list[pytest.Item], out: list[pytest.Item]) -> None:
    """Deselect ``out`` of ``items``."""
    if out:
        gone = {id(item) for item in out}
        items[:] = [item for item in items if id(item) not in gone]
        config.hook.pytest_deselected(items=out)


def pytest_collection_finish() -> None:
    """Objects of 5,000 tests stay: a ``gc.collect()`` of a test that looks for what it leaks need not visit them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash.get(LEFT_OUT, 0)
        output["waiting"] = session.config.stash.get(WAITING, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker collects, and leaves out, the same tests."""
    output = getattr(node, "workeroutput", {})
    for key, name in ((LEFT_OUT, "left_out"), (WAITING, "waiting")):
        node.config.stash[key] = output.get(name, node.config.stash.get(key, 0))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if differences.WANTED:
        reports = [x for x in terminalreporter.stats.get("passed", ()) if getattr(x, "when", "") == "call"]
        terminalreporter.section("differences")
        for line in differences.table(reports):
            terminalreporter.write_line(line)
    for key, summary in ((LEFT_OUT, selection.summary), (WAITING, turns.summary)):
        if count := config.stash.get(key, 0):
            terminalreporter.write_line(summary(count))
