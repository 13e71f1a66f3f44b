"""Locks in the child of a fork: one that another thread of the parent held would never be given back there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def renew_in_child(namespace: dict[str, Any], name: str, make: Callable[[], Any]) -> None:
    """Let ``name`` in a module's ``namespace`` be a new lock, of ``make``, in every child of a fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: namespace.update({name: make()}))
