"""What is compiled here is compared with the golden table, when the test itself has passed: see golden.py."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import golden
import pytest

golden_table = functools.cache(golden.read)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Compare the kernels of a test that carries the mark ``compiles``; they are in memory or in the cache by now.

    Where there is no table, test_golden.py fails, and not every test.
    """
    yield
    configs = golden.configs_of(item)
    if configs and golden.TABLE.is_file():
        golden.check(configs, golden_table())
