"""Whatever waits for its turn has as many turns as its mark says."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import turns


def item(name: str, *every: int | None) -> Any:
    mark = None if every == (None,) else SimpleNamespace(args=every)
    return SimpleNamespace(nodeid=name, get_closest_marker={"turns": mark}.get)


@pytest.mark.parametrize("every", [1, 2, 3, 4, 10, 20])
def test_each_test_runs_in_its_share_of_the_turns(every: int) -> None:
    names = [f"tests/unit/test_x.py::test_y[{i}]" for i in range(1000)]
    runs = {name: [t for t in range(turns.TURNS) if not turns.waits(item(name, every), t)] for name in names}
    for ran in runs.values():
        assert len(ran) in (turns.TURNS // every, -(-turns.TURNS // every))
        assert all(second - first == every for first, second in itertools.pairwise(ran))
    # And no turn has them all.
    most = max(sum(turn in ran for ran in runs.values()) for turn in range(turns.TURNS))
    assert most < 1.5 * len(names) / every + 1


def test_tests_that_are_dealt_out_run_where_they_are_told() -> None:
    dealt = [[t for t in range(turns.TURNS) if not turns.waits(item("a", 5, at), t)] for at in range(5)]
    assert dealt == [list(range(at, turns.TURNS, 5)) for at in range(5)]


def test_without_the_mark_no_test_waits() -> None:
    assert not any(turns.waits(item("a", None), turn) for turn in range(turns.TURNS))
    assert [turns.waits(item("a"), turn) for turn in range(turns.TURNS)].count(False) == 1
