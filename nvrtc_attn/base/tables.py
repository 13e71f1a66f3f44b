"""Tables of bounded size: what was worked out of calls before, in the order in which it came.

Concurrency: entries are added under one lock, for the moment that it takes. Tables are read without it.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar

from .forks import renew_in_child

MAX_ENTRIES: Final = 4096
"""Of a table that says nothing else: more than a process has kinds of calls at a time."""
_Value = TypeVar("_Value")
_lock = threading.Lock()
renew_in_child(globals(), "_lock", threading.Lock)


def remember(table: dict[Any, _Value], key: Any, value: _Value, most: int | None = None) -> _Value:
    """``value``, under ``key`` in ``table`` from now on. Beyond ``most`` entries the oldest go."""
    most = MAX_ENTRIES if most is None else most
    with _lock:
        while len(table) >= most:
            del table[next(iter(table))]
        table[key] = value
    return value
