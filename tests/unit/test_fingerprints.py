"""What ``--turn`` leaves out has passed with the same file, name and kernels; ``--record`` writes what passed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fingerprints
import golden
import pytest
from turns import TURNS

from nvrtc_attn.jit import headers
from nvrtc_attn.jit.config import DbiasConfig, Features, KernelConfig

KERNEL = DbiasConfig(
    kernel="dbias_reduce", arch="sm_90", dtype="bfloat16", head_dim=64, head_dim_v=64, block_m=64, block_n=64,
    num_warps=4, num_stages=2, dbias_dtype="bfloat16", features=Features(bias="bfloat16"),
)  # fmt: skip
OTHER = dataclasses.replace(KERNEL, num_warps=8)


class Item:
    """As much of a test as the plugin looks at."""

    def __init__(self, path: Path, *kernels: KernelConfig, name: str = "", slow: bool = False) -> None:
        warps = "-".join(str(getattr(kernel, "num_warps", 0)) for kernel in kernels)
        self.nodeid, self.path = name or f"tests/compile/test_x.py::test[{warps}]", path
        self.callspec: Any = SimpleNamespace(params={})
        self.user_properties: list[tuple[str, Any]] = []
        self.marks = {"compiles": pytest.mark.compiles(kernels=lambda: kernels, in_table=False).mark} if kernels else {}
        if slow:
            self.marks["slow"] = pytest.mark.slow.mark

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "test_x.py"
    path.write_text("assert True\n")
    return path


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., fingerprints.Plugin]]:
    monkeypatch.setattr(fingerprints, "PASSED", tmp_path / "passed.txt")

    def make(turn: int | None = None, record: bool = False) -> fingerprints.Plugin:
        fingerprints.known.cache_clear()
        fingerprints._of_file.cache_clear()
        return fingerprints.Plugin(SimpleNamespace(option=SimpleNamespace(turn=turn, record=record)))  # type: ignore[arg-type]

    yield make
    fingerprints.known.cache_clear()


def record(plugin: fingerprints.Plugin, items: list[Item], outcome: str = "passed") -> None:
    """A run of ``items`` with ``--record``, that all end like this."""
    plugin.left(items)
    for item in items:
        list(plugin.pytest_runtest_setup(item))
        report = SimpleNamespace(when="call", passed=outcome == "passed", user_properties=item.user_properties)
        plugin.pytest_runtest_logreport(report)
    plugin.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))  # type: ignore[arg-type]


def test_a_test_without_parameters_has_its_kernels_too(file: Path) -> None:
    item = Item(file, KERNEL)
    del item.callspec
    assert golden.configs_of(item, only_table=False) == [KERNEL]


def test_a_fingerprint_is_of_the_file_the_name_and_the_kernels(file: Path) -> None:
    seen = headers.Snapshot()
    names = "tests/compile/test_x.py::test", "tests/compile/test_x.py::other"
    kernels = (KERNEL,), (OTHER,), (KERNEL, OTHER)
    items = [*(Item(file, *x, name=names[0]) for x in kernels), Item(file, KERNEL, name=names[1])]
    found = [fingerprints.fingerprint(item, seen) for item in items]
    fingerprints._of_file.cache_clear()
    file.write_text("assert False\n")
    found.append(fingerprints.fingerprint(items[0], seen))
    fingerprints._of_file.cache_clear()
    assert len(set(found)) == 5
    assert all(text is not None and len(text) == 16 for text in found)
    assert fingerprints.fingerprint(Item(file), seen) is None


def test_what_passed_is_left_out_in_all_turns_but_one(plugin: Callable[..., fingerprints.Plugin], file: Path) -> None:
    known, other, plain = Item(file, KERNEL), Item(file, OTHER), Item(file)
    record(plugin(record=True), [known])
    left = [plugin(turn).left([known, other, plain]) for turn in range(2 * TURNS)]
    assert sorted(map(len, left)) == [0] * 2 + [1] * 2 * (TURNS - 1)
    assert all(items in ([], [known]) for items in left)
    assert left[:TURNS] == left[TURNS:]
    assert plugin().left([known, other, plain]) == []
    file.write_text("assert 1\n")
    assert [plugin(turn).left([known]) for turn in range(TURNS)] == [[]] * TURNS


def test_what_failed_is_not_known(plugin: Callable[..., fingerprints.Plugin], file: Path) -> None:
    record(plugin(record=True), [Item(file, KERNEL)], "failed")
    assert [plugin(turn).left([Item(file, KERNEL)]) for turn in range(TURNS)] == [[]] * TURNS


def test_what_was_left_out_stays_known_and_what_is_gone_does_not(
    plugin: Callable[..., fingerprints.Plugin], file: Path
) -> None:
    first, second = Item(file, KERNEL), Item(file, OTHER)
    record(plugin(record=True), [first, second])
    both = set(fingerprints.PASSED.read_text().split())
    turn = next(n for n in range(TURNS) if len(plugin(n).left([first, second])) == 2)
    run = plugin(turn, record=True)
    run.left([first, second])
    run.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))  # type: ignore[arg-type]
    assert set(fingerprints.PASSED.read_text().split()) == both
    record(plugin(record=True), [first])
    assert len(fingerprints.PASSED.read_text().split()) == 1


def test_slow_tests_that_execute_kernels_follow_the_kernels(
    plugin: Callable[..., fingerprints.Plugin], file: Path
) -> None:
    """They are left out in all turns but one only while no test of kernels has changed."""
    known, changed = Item(file, KERNEL), Item(file, OTHER)
    slow = [Item(file, name=f"tests/simulated/test_y.py::test[{i}]", slow=True) for i in range(50)]
    always = Item(file, name="tests/simulated/test_y.py::test")
    record(plugin(record=True), [known])
    assert [x for x in plugin(0).left([known, changed, *slow, always]) if x is not known] == []
    assert plugin(0).left([*slow, always]) == [], "without the tests of kernels nobody knows whether they changed"
    left = [{x.nodeid for x in plugin(turn).left([known, *slow, always]) if x is not known} for turn in range(TURNS)]
    assert [sum(x.nodeid not in names for names in left) for x in slow] == [1] * 50
    assert not any(always.nodeid in names for names in left)


@pytest.mark.parametrize(
    "wrong", [{"full": False}, {"keyword": "x"}, {"markexpr": "slow"}, {"args": ["tests/compile/test_x.py"]}], ids=str
)
def test_a_part_of_the_tests_is_not_recorded(wrong: dict[str, Any]) -> None:
    right = {"full": True, "keyword": "", "markexpr": "", "record": True, "args": ["tests/compile"]}
    values = {**right, **wrong}
    arguments = values.pop("args")
    with pytest.raises(pytest.UsageError, match="--record is of all"):
        fingerprints.check_options(SimpleNamespace(option=SimpleNamespace(**values), args=arguments))  # type: ignore[arg-type]
    right.pop("args")
    fingerprints.check_options(SimpleNamespace(option=SimpleNamespace(**right), args=["tests/compile"]))  # type: ignore[arg-type]


def test_the_list_is_as_it_was_written() -> None:
    """Of other digits it would never be met, and every run would compile all kernels."""
    found = fingerprints.PASSED.read_text(encoding="ascii").split()
    assert found == sorted(set(found))
    assert all(len(text) == 16 and set(text) <= set("0123456789abcdef") for text in found)


def test_a_collection_that_fails_forgets_nothing(plugin: Callable[..., fingerprints.Plugin], file: Path) -> None:
    record(plugin(record=True), [Item(file, KERNEL)])
    before = fingerprints.PASSED.read_text()
    assert before.strip()
    plugin(record=True).pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))  # type: ignore[arg-type]
    assert fingerprints.PASSED.read_text() == before
