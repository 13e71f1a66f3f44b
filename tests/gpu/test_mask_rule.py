"""The mask rule changed in its one place, in a copy of the tree: kernels of both families compute by the new one."""

from __future__ import annotations

from pathlib import Path

import changed_rule
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

Results = dict[tuple[str, str], list[str]]


@pytest.fixture(scope="module")
def by_the_changed_rule(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What is wrong with the results of the changed tree, by the changed rule."""
    tree = changed_rule.copy_of_tree(tmp_path_factory.mktemp("changed"), repository, changed_rule.changes())
    return changed_rule.results(changed_rule.run_in(tree, changed_rule.RUN, "changed"))


@pytest.mark.parametrize("name", changed_rule.CASES)
def test_results_follow_the_rule(name: str, by_the_changed_rule: Results) -> None:
    found = {family: wrong for (case, family), wrong in by_the_changed_rule.items() if case == name}
    assert found, "no kernel family has run it"
    assert not any(found.values()), found


def test_the_rule_makes_a_difference(repository: Path, tmp_path: Path) -> None:
    """The same tree by the rule that it had: every case of every family is wrong."""
    tree = changed_rule.copy_of_tree(tmp_path, repository, changed_rule.changes())
    found = changed_rule.results(changed_rule.run_in(tree, changed_rule.RUN, "as it was"))
    assert found
    assert all(found.values()), found
