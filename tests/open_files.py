"""The files that this process has open, to see what a test leaves behind."""

from __future__ import annotations

import os

HERE = "/proc/self/fd"


def open_files() -> set[tuple[int, str]]:
    """Number and target of each.

    A later set may lack some of an earlier one: a process that compiled ends after some seconds without work, and its
    pipes with it. What it has beyond the earlier set is new. The target of a pipe or socket has a number of the
    kernel's, so that a new one shows even where it took the place of one that is gone.
    """
    found = set()
    for number in os.listdir(HERE):
        try:
            found.add((int(number), os.readlink(f"{HERE}/{number}")))
        except FileNotFoundError:  # that of the listing itself
            continue
    return found
