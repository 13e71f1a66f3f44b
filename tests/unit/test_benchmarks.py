"""The benchmarks run as they are documented, here without a GPU and at tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run_benchmark(repository: Path, *arguments: str) -> str:
    command = [sys.executable, str(repository / "benchmarks" / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_checkouts_are_compared_line_by_line(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "times.json"
    printed = run_benchmark(
        repository, "trees.py", f"old={repository}", f"new={repository}", "--dry-run", "--rounds", "1",
        "--only", "host|D 64|dbias", "--json", str(path),
    )  # fmt: skip
    times = json.loads(path.read_text())["microseconds"]
    assert set(times) == {"old", "new"}
    assert set(times["old"]) == set(times["new"])
    lines = set(times["old"])
    assert {name.split(" ")[0] for name in lines} == {"host", "fwd", "bwd"}
    assert len([name for name in lines if name.startswith("host")]) == 4
    assert all(min(values) > 0 for found in times.values() for values in found.values())
    assert all(line in printed for line in lines)
    assert "ratio" in printed


def test_a_folder_that_is_no_checkout_is_refused(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repository / "benchmarks" / "trees.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no checkout" in done.stderr
