"""Every item of the reliability checklist that the project promises has a test that names it."""

from __future__ import annotations

import ast
from pathlib import Path

# 22, 23, 35, 36, 41, 42, 45, 57, 58, ... are proved too, but only these must never lose their test.
PROMISED = {
    *range(1, 22), *range(24, 35), *range(37, 41), 43, 44, *range(46, 57), 59, 60, 61, *range(66, 70), 73,
    *range(76, 80), 82, 83, 88, 89, 90, *range(92, 97), *range(101, 105),
}  # fmt: skip


def named_items(path: Path) -> set[int]:
    """Numbers in the ``reliability`` marks of one test file."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "reliability":
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, int)}
    return found


def test_every_promised_item_is_named_by_a_test(repository: Path) -> None:
    named = set().union(*(named_items(path) for path in (repository / "tests").rglob("test_*.py")))
    assert not sorted(PROMISED - named)
