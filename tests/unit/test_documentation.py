"""The documents are what they say: up to date with the results, short at the front, without a link to nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{name}.md" for name in ("benchmarks", "configuration", "experiments", "kernels", "torch")),
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_code_of_the_torch_page_runs(repository: Path) -> None:
    """In order, as a reader would paste it; checks in the blocks are asserts."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch._dynamo.reset()
    text = (repository / "docs" / "torch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```") // 2 >= 8
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/torch.md", "exec"), names)
