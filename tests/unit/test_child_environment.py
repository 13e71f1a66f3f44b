"""Processes that tests start find the packages that the tests found."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from child_environment import python_path

ALONE = {
    "tests/unit/test_cli.py": 3,  # broken installations, laid before the package
    "tests/unit/test_packaging.py": 1,  # an installed wheel
}
"""Tests that give a path of their own, and in how many places."""


def test_the_repository_is_before_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for own, expected in (("", []), ("/a:/b", ["/a", "/b"]), (":/a:", ["/a"]), ("here", [str(tmp_path / "here")])):
        monkeypatch.setenv("PYTHONPATH", own.replace(":", os.pathsep))
        assert python_path("/r", Path("/s")).split(os.pathsep) == ["/r", "/s", *expected]
    monkeypatch.delenv("PYTHONPATH")
    assert python_path("/r") == "/r"


def test_no_test_takes_the_packages_away(repository: Path) -> None:
    found = {}
    for path in (repository / "tests").rglob("*.py"):
        lines = re.findall(r".*[\"']?PYTHONPATH[\"']?(?:\": |=)(?!python_path\().*", path.read_text(encoding="utf-8"))
        if lines and path != Path(__file__):
            found[path.relative_to(repository).as_posix()] = len(lines)
    assert found == ALONE
