"""Which tests of kernels have passed as they are, so that the full matrix need not compile them all at every commit.

A test's fingerprint is of its file, its name and the cache keys of its kernels, which cover all that a compile reads:
source, headers, options, build of NVRTC. A test whose fingerprint is in `PASSED` would see what it saw when it passed.
``--turn N`` leaves such tests out but for a twentieth of them, another one at the next N; while all are known, it
leaves out as many of the slow tests that execute kernels on the host.

    python -m pytest --full --record tests/compile             run all, and write the fingerprints of what passed
    python -m pytest --full --record --turn 0 tests/compile    run those that have changed, and a twentieth
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import golden
import pytest
from turns import is_in_turn

from nvrtc_attn.jit import headers
from nvrtc_attn.jit.compile import key_of

PASSED: Final = Path(__file__).resolve().parent / "golden" / "passed.txt"
_DIGITS: Final = 16
_PROPERTY: Final = "fingerprint"
_OUTPUT: Final = "fingerprints"


@cache
def known() -> frozenset[str]:
    """Fingerprints of tests that have passed."""
    return frozenset(PASSED.read_text(encoding="ascii").split()) if PASSED.is_file() else frozenset()


@cache
def _of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fingerprint(item: Any, seen: headers.Snapshot) -> str | None:
    """Of a test that says which kernels it compiles, by what the headers say now."""
    configs = golden.configs_of(item, only_table=False)
    if not configs:
        return None
    text = [item.nodeid, _of_file(item.path), *(key_of(config, seen) for config in configs)]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:_DIGITS]


class Plugin:
    """The part of pytest behind ``--turn`` and ``--record``, in the workers and in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.turn: int | None = config.option.turn
        self.records: bool = config.option.record
        self.of_tests: dict[str, str] = {}
        """Fingerprints by the names of tests."""
        self.left_out = 0
        self.collected: set[str] = set()
        self.passed: set[str] = set()

    def left(self, items: list[Any]) -> list[Any]:
        """The tests of ``items`` that need not run."""
        seen = headers.Snapshot()
        found = ((item.nodeid, fingerprint(item, seen)) for item in items)
        self.of_tests = {name: text for name, text in found if text is not None}
        self.collected = set(self.of_tests.values())
        turn = self.turn
        if turn is None:
            return []
        unchanged = bool(self.collected) and self.collected <= known()

        def is_left(item: Any) -> bool:
            if text := self.of_tests.get(item.nodeid):
                return text in known() and not is_in_turn(text, turn)
            simulated = "tests/simulated/" in item.nodeid and item.get_closest_marker("slow") is not None
            return simulated and unchanged and not is_in_turn(item.nodeid, turn)

        out = [item for item in items if is_left(item)]
        self.left_out = len(out)
        return out

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: Any) -> Iterator[None]:
        if self.records and item.nodeid in self.of_tests:
            item.user_properties.append((_PROPERTY, self.of_tests[item.nodeid]))
        yield

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.passed.update(text for name, text in report.user_properties if name == _PROPERTY)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_OUTPUT] = [self.left_out, sorted(self.collected)]
        elif self.records and self.collected:  # else collection failed, which says nothing of what passed
            PASSED.write_text("\n".join([*sorted(self.collected & (self.passed | known())), ""]), encoding="ascii")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Every worker collects, and leaves out, the same tests."""
        if output := getattr(node, "workeroutput", {}).get(_OUTPUT):
            self.left_out, self.collected = output[0], set(output[1])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.left_out:
            terminalreporter.write_line(
                f"{self.left_out} tests of kernels that {PASSED.name} knows were left out: --turn"
            )


def check_options(config: pytest.Config) -> None:
    """Refuse a run that would forget the tests that it does not collect."""
    option = config.option
    if option.record and (not option.full or option.keyword or option.markexpr or config.args != ["tests/compile"]):
        raise pytest.UsageError("--record is of all: python -m pytest --full --record tests/compile [--turn N]")
