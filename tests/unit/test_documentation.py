"""The documents are what they say: up to date with the results, short at the front, without a link to nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

HEURISTICS = Path(__file__).resolve().parents[2] / "nvrtc_attn" / "heuristics"
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{name}.md" for name in ("benchmarks", "configuration", "experiments", "kernels")),
)


def test_tables_are_those_of_the_saved_results(repository: Path) -> None:
    command = [sys.executable, str(repository / "benchmarks" / "table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_newcomer_reads_the_readme_in_one_go(repository: Path) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    table = text[text.index("<!-- grid") : text.index("<!-- end of grid")]
    assert len([line for line in table.splitlines() if line.startswith("|")]) <= 2 + 12  # head, rule, rows


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str, repository: Path) -> None:
    path = repository / page
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page} links to {target}"


def text_blocks(source: str) -> list[tuple[int, str]]:
    """(line, text) of every docstring, string behind a constant, and block of comments on lines of their own."""
    lines = source.splitlines()
    found = []
    begin = None
    for number, line in enumerate([*lines, ""], 1):
        comment = line.strip().startswith("#")
        if comment and begin is None:
            begin = number
        elif not comment and begin is not None:
            found.append((begin, "\n".join(lines[begin - 1 : number - 1])))
            begin = None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.append((node.lineno, node.value.value))
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in HEURISTICS.glob("*.py")))
def test_a_heuristic_gives_its_reasons_in_five_lines(name: str) -> None:
    long = []
    for line, text in text_blocks((HEURISTICS / name).read_text(encoding="utf-8")):
        prose = re.split(r"\n\s*(?:Parameters|Returns|Raises)\n\s*-{3,}", text)[0]
        count = sum(bool(words.strip()) for words in prose.splitlines())
        if count > 5:
            long.append(f"{name}:{line}: {count} lines")
    assert not long, f"figures of what lost belong into docs/experiments.md: {long}"


def test_sections_that_the_heuristics_refer_to_exist(repository: Path) -> None:
    headings = re.findall(
        r"^## (.*)$", (repository / "docs" / "experiments.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = set()
    for path in HEURISTICS.glob("*.py"):
        text = " ".join(path.read_text(encoding="utf-8").replace("#", " ").split())
        named |= set(re.findall(r'docs/experiments\.md[,:]? \(?(?:under )?"([^"]+)"', text))
        named |= set(re.findall(r'under "([^"]+)"', text))
    assert len(named) >= 5
    assert named <= set(headings), named - set(headings)
