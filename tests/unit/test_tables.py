"""`nvrtc_attn.base.tables`: entries of bounded tables, the oldest of which make room."""

from __future__ import annotations

import threading

import pytest

from nvrtc_attn.base import tables


def test_the_oldest_entries_go_first() -> None:
    table: dict[int, str] = {}
    assert [tables.remember(table, i, str(i), 3) for i in range(5)] == ["0", "1", "2", "3", "4"]
    assert table == {2: "2", 3: "3", 4: "4"}


def test_a_table_that_names_no_size_has_the_common_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_ENTRIES", 2)
    table: dict[int, None] = {}
    for i in range(9):
        tables.remember(table, i, None)
    assert list(table) == [7, 8]


def test_threads_add_to_one_table() -> None:
    table: dict[tuple[int, int], int] = {}
    sizes: list[int] = []

    def work(number: int) -> None:
        for i in range(2000):
            tables.remember(table, (number, i), i, 7)
            sizes.append(len(table))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sizes) == 8000, "no thread met a table that changed while it looked for the oldest entry"
    assert max(sizes) <= 7
