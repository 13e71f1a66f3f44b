"""Which tests wait for their turn in a run with ``--turn N``, as those of `.ci/run` are: N is 0 to 19, by the commit.

A test marked ``turns(3)`` takes seconds and has passed for long: it runs at every third N, by its name. ``turns(5, 2)``
runs at N of 2, 7, 12 and 17: tests of a minute are dealt out by hand, so that no N has two.
What is cheap has no mark and always runs, as all does without ``--turn``.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

TURNS: Final = 20


def is_in_turn(text: str, turn: int, every: int = TURNS, at: int | None = None) -> bool:
    """Whether ``turn`` is ``at`` or a multiple of ``every`` away; by default at what ``text``, a name, hashes to."""
    if at is None:
        at = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
    return (at - turn) % every == 0


def waits(item: Any, turn: int) -> bool:
    """Whether the test ``item`` is marked ``turns`` and not in its turn."""
    mark = item.get_closest_marker("turns")
    return mark is not None and not is_in_turn(item.nodeid, turn, *mark.args)


def summary(count: int) -> str:
    """The line below pytest's own that says what was not run."""
    return f"{count} tests wait for their turn: --turn"
