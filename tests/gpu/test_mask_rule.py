"""The mask rule changed in its one place, in a copy of the tree: kernels of both families compute by the new one.

One test for all cases: the copy compiles all of their kernels, which every worker of pytest-xdist did for its part of
the module's tests (14 of 16 workers, 180 s each).
"""

from __future__ import annotations

from pathlib import Path

import changed_rule
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


def test_results_follow_the_rule(repository: Path, tmp_path: Path) -> None:
    """Nothing is wrong with the results of the changed tree, by the changed rule."""
    tree = changed_rule.copy_of_tree(tmp_path, repository, changed_rule.changes())
    found = changed_rule.results(changed_rule.run_in(tree, changed_rule.RUN, "changed"))
    assert {case for case, _ in found} == set(changed_rule.CASES), "no kernel family has run some case"
    wrong = {which: reasons for which, reasons in found.items() if reasons}
    assert not wrong


def test_the_rule_makes_a_difference(repository: Path, tmp_path: Path) -> None:
    """The same tree by the rule that it had: every case of every family is wrong."""
    tree = changed_rule.copy_of_tree(tmp_path, repository, changed_rule.changes())
    found = changed_rule.results(changed_rule.run_in(tree, changed_rule.RUN, "as it was"))
    assert found
    assert all(found.values()), found
