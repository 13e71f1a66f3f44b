"""docs/reliability.md and the tests are one: every item has a test, every test that it names proves what it says.

    python tests/unit/test_reliability_items.py    # writes the lists of tests anew, from the markers

The promises are written by hand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ITEMS = range(1, 107)
_ITEM = re.compile(r"^\*\*(\d+)\.\*\* (.+)$")
_TEST = re.compile(r"^- `(tests/[\w/]+\.py(?:::\w+)+)`$")


class Marked(NamedTuple):
    """One test function, or one class of them, with the numbers of its ``reliability`` markers."""

    numbers: frozenset[int]
    disabled: bool
    """It is skipped whatever the machine, or expected to fail: it proves nothing."""


def _is_mark(node: ast.expr, *names: str) -> bool:
    call = node.func if isinstance(node, ast.Call) else node
    return isinstance(call, ast.Attribute) and call.attr in names and ast.unparse(call).startswith("pytest.mark.")


def _numbers(decorators: list[ast.expr]) -> frozenset[int]:
    marks = [d for d in decorators if isinstance(d, ast.Call) and _is_mark(d, "reliability")]
    return frozenset(a.value for d in marks for a in d.args if isinstance(a, ast.Constant) and isinstance(a.value, int))


def _marked(name: str, body: list[ast.stmt], inherited: frozenset[int]) -> Iterator[tuple[str, Marked]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            numbers = inherited | _numbers(node.decorator_list)
            disabled = any(_is_mark(d, "skip", "xfail") for d in node.decorator_list)
            yield f"{name}::{node.name}", Marked(numbers, disabled)
            yield from _marked(f"{name}::{node.name}", node.body, numbers)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            disabled = any(_is_mark(d, "skip", "xfail") for d in node.decorator_list)
            yield f"{name}::{node.name}", Marked(inherited | _numbers(node.decorator_list), disabled)


def marked_tests(root: Path) -> dict[str, Marked]:
    """Every test by its node name, read and not imported: tests of absent frameworks and GPUs count too."""
    found: dict[str, Marked] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.update(_marked(path.relative_to(root).as_posix(), tree.body, frozenset()))
    return found


def documented_items(text: str) -> dict[int, tuple[str, list[str]]]:
    """Number -> (promise, names of tests)."""
    found: dict[int, tuple[str, list[str]]] = {}
    current: list[str] = []
    for line in text.splitlines():
        item, test = _ITEM.match(line), _TEST.match(line)
        if item:
            assert int(item[1]) not in found, f"item {item[1]} is there twice"
            current = []
            found[int(item[1])] = (item[2], current)
        elif test:
            current.append(test[1])
        elif line.startswith(("**", "- ")):
            raise AssertionError(f"neither an item nor a test: {line}")
    return found


def disagreements(items: dict[int, tuple[str, list[str]]], tests: dict[str, Marked]) -> list[str]:
    """One line for each place where document and tests say different things."""
    found = [f"item {number} is missing" for number in ITEMS if number not in items]
    found += [f"item {number} does not exist" for number in items if number not in ITEMS]
    for number, (_, names) in sorted(items.items()):
        if not names:
            found.append(f"item {number} names no test")
        for name in names:
            test = tests.get(name)
            if test is None:
                found.append(f"item {number}: {name} does not exist")
            elif number not in test.numbers:
                found.append(f"item {number}: {name} has no reliability marker {number}")
            elif test.disabled:
                found.append(f"item {number}: {name} is skipped everywhere or expected to fail")
    for name, test in tests.items():
        found += [f"{name}: marked with item {n}, which is not documented" for n in test.numbers if n not in items]
    return found


def with_lists(text: str, tests: dict[str, Marked]) -> str:
    """The document with all tests of each item below its promise: unit tests first, a class instead of its tests."""

    def order(name: str) -> tuple[bool, bool, str]:
        return not name.startswith("tests/unit"), not name.startswith("tests/compile"), name

    def with_list(item: re.Match[str]) -> str:
        names = [name for name, test in tests.items() if int(item[1]) in test.numbers]
        names = [name for name in names if name.rpartition("::")[0] not in names]
        return "\n".join([item[0], "", *(f"- `{name}`" for name in sorted(names, key=order)), ""])

    promises = "\n".join(line for line in text.splitlines() if not _TEST.match(line))
    anew = re.sub(_ITEM.pattern, with_list, promises, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", anew).rstrip() + "\n"


@pytest.fixture(scope="module")
def document(repository: Path) -> str:
    return (repository / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_document_and_markers_agree(document: str, repository: Path) -> None:
    found = disagreements(documented_items(document), marked_tests(repository))
    assert found == [], "after a change of names or markers: python tests/unit/test_reliability_items.py"


def test_every_disagreement_is_found(document: str, repository: Path) -> None:
    """The comparison itself, on a document and on markers that are wrong in one place each."""
    tests = marked_tests(repository)
    items = documented_items(with_lists(document, tests))
    assert disagreements(items, tests) == []
    name = items[78][1][0]
    number = 78

    def changed(**marks: object) -> dict[str, Marked]:
        return {**tests, name: tests[name]._replace(**marks)}  # type: ignore[arg-type]

    without = {n: item for n, item in items.items() if n != number}
    assert f"item {number} is missing" in disagreements(without, tests)
    assert any(line.startswith(f"{name}: marked with item {number}") for line in disagreements(without, tests))
    assert disagreements({**items, number: ("promise", [])}, tests) == [f"item {number} names no test"]
    gone = {n: test for n, test in tests.items() if n != name}
    assert f"item {number}: {name} does not exist" in disagreements(items, gone)
    assert f"item {number}: {name} has no reliability marker {number}" in disagreements(
        items, changed(numbers=frozenset())
    )
    assert disagreements(items, changed(disabled=True))
    assert "item 107 does not exist" in disagreements({**items, 107: ("promise", [name])}, tests)


def test_lists_can_be_written_anew(document: str, repository: Path) -> None:
    tests = marked_tests(repository)
    bare = "\n".join(line for line in document.splitlines() if not _TEST.match(line))
    for text in (document, bare):
        anew = with_lists(text, tests)
        assert disagreements(documented_items(anew), tests) == []
        assert {n: item[0] for n, item in documented_items(anew).items()} == {
            n: item[0] for n, item in documented_items(document).items()
        }
        assert with_lists(anew, tests) == anew


@pytest.mark.parametrize("line", ["- tests/unit/test_api.py::test_x", "**7** promise", "- `tests/unit/test_api.py`"])
def test_a_line_that_is_no_item_and_no_test_is_refused(line: str) -> None:
    with pytest.raises(AssertionError, match="neither"):
        documented_items(f"**1.** A promise.\n{line}\n")


def test_markers_are_read_from_functions_classes_and_methods() -> None:
    source = (
        "@pytest.mark.reliability(1)\nclass TestA:\n    @pytest.mark.reliability(2, 3)\n    def test_b(self): ...\n"
        "@pytest.mark.xfail(reason='')\n@pytest.mark.reliability(4)\ndef test_c(): ...\ndef helper(): ...\n"
        "@pytest.mark.skipif(True, reason='')\ndef test_d(): ...\n"
    )
    assert dict(_marked("f.py", ast.parse(source).body, frozenset())) == {
        "f.py::TestA": Marked(frozenset({1}), False),
        "f.py::TestA::test_b": Marked(frozenset({1, 2, 3}), False),
        "f.py::test_c": Marked(frozenset({4}), True),
        "f.py::test_d": Marked(frozenset(), False),
    }


if __name__ == "__main__":
    _root = Path(__file__).resolve().parents[2]
    _page = _root / "docs" / "reliability.md"
    _page.write_text(with_lists(_page.read_text(encoding="utf-8"), marked_tests(_root)), encoding="utf-8")
