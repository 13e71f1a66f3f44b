"""What `python -m pytest` runs by itself compiles every kernel for every class of architectures that it is for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden
import pytest
import selection
import turns
from architectures import ONE_OF_EACH_CLASS, architecture_class
from child_environment import python_path

from nvrtc_attn.jit.config_text import config_from_json

pytest.importorskip("cuda.bindings.nvrtc")
HOPPER = architecture_class("sm_90a")


def pytest_run(root: Path, *arguments: str, **variables: str) -> str:
    """The output of a run that nothing of this one's environment steers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(
        command, cwd=root, env={**environment, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def collect(*arguments: str) -> dict[str, list[dict[str, Any]]]:
    """Tests that would run and those that are left out."""
    found, output = golden.collect(*arguments)
    assert (selection.summary(len(found["left_out"])) in output) == bool(found["left_out"])
    return found


def covered(tests: list[dict[str, Any]]) -> set[tuple[str, tuple[int, int, bool]]]:
    configs = {config_from_json(text) for test in tests for text in test["kernels"]}
    return {(config.kernel, architecture_class(config.arch)) for config in configs}


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    return collect("tests/unit", "tests/compile")


WITH_MODIFIERS = {"captured_sum", "tile_bits", "tile_ranges"}
"""Kernels of a modifier's text alone, which `test_modifier_variants` and `test_tile_ranges` compile for every class."""


def test_every_kernel_compiles_for_every_class_of_architectures(
    found: dict[str, list[dict[str, Any]]], repository: Path
) -> None:
    run, everything = covered(found["run"]), covered(found["run"] + found["left_out"])
    assert len(found["left_out"]) > 400, "the full matrix is the larger part of the compiles"
    assert sorted(everything - run) == []
    # And of every kernel there are tests, for every class that its family is for.
    kernels = {path.stem for path in (repository / "cuda_src/nvrtc_attn/kernel").glob("*.cuh")} - WITH_MODIFIERS
    portable = {architecture_class(arch) for arch in ONE_OF_EACH_CLASS}
    for kernel in kernels:
        of_hopper = "hopper" in kernel or kernel in ("packed_tiles", "dropout_words")
        missing = ({HOPPER} if of_hopper else portable) - {c for name, c in run if name == kernel}
        assert not missing, f"no test that always runs compiles {kernel} for the class of {missing}"
    assert {kernel for kernel, _ in run} == kernels


def test_the_golden_table_has_every_kernel_of_these_tests_and_no_other(found: dict[str, list[dict[str, Any]]]) -> None:
    compiled = {config_from_json(text) for test in found["run"] + found["left_out"] for text in test["kernels"]}
    assert len(compiled) > 500
    variants = {golden.variant(config) for config in compiled}
    assert len(variants) == len(compiled), "two kernels of one name"
    table = set(golden.read().lines)
    assert (sorted(variants - table), sorted(table - variants)) == ([], []), "python tests/golden.py --update"


def test_every_name_of_a_sample_is_a_test(found: dict[str, list[dict[str, Any]]]) -> None:
    tests = found["run"] + found["left_out"]
    names = {test["name"] for test in tests}
    for test in tests:
        function = test["function"]
        assert not [name for name in test["sample"] if f"{function}[{name}]" not in names], function


def test_what_is_left_out() -> None:
    path = "tests/compile/test_hopper_variants.py"
    found = collect(path)
    for test in found["run"]:
        assert not test["sample"] or test["name"].removeprefix(test["function"])[1:-1] in test["sample"]
    everything = collect(path, "--full")
    assert not everything["left_out"]
    assert names(everything["run"]) == names(found["run"] + found["left_out"])
    # What is named is run.
    left_out = found["left_out"][0]
    assert collect(left_out["name"]) == {"run": [left_out], "left_out": []}


def test_a_fixture_computes_the_cases_of_the_tests_that_run() -> None:
    """One case that somebody names costs one, all of the file and a test that looks at all of them cost all."""
    module = object()

    def item(case: str | None, fixture: str = "found", of: object = module) -> SimpleNamespace:
        callspec = {} if case is None else {"callspec": SimpleNamespace(params={"case": case})}
        return SimpleNamespace(module=of, fixturenames=[fixture], **callspec)

    def computed(*items: SimpleNamespace) -> dict[str, int]:
        session = SimpleNamespace(items=[*items, item("c", "another"), item(None, of=object()), SimpleNamespace()])
        request: Any = SimpleNamespace(module=module, fixturename="found", session=session)
        return selection.cases_asked_for(request, {"a": 1, "b": 2, "c": 3})

    assert computed(item("b")) == {"b": 2}
    assert computed(item("b"), item("a")) == {"a": 1, "b": 2}
    assert computed(item("b"), item(None)) == {"a": 1, "b": 2, "c": 3}


def names(tests: list[dict[str, Any]]) -> list[str]:
    return sorted(test["name"] for test in tests)


def test_a_parallel_run_says_what_it_left_out(repository: Path) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    arguments = ("tests/compile", "-k", "repeated_heads_have or variant_compiles and d96_ and (causal or many)")
    output = pytest_run(repository, *arguments, PYTEST_XDIST_AUTO_NUM_WORKERS="2")
    assert "2 workers" in output
    assert "1 passed" in output
    assert selection.summary(12) in output


@pytest.mark.parametrize("turn", [4, 5])
def test_a_parallel_run_says_what_it_leaves_to_fingerprints(turn: int, repository: Path, tmp_path: Path) -> None:
    """Of a list that has every test, in a turn that none is in but the fifth; and a test that waits for its turn."""
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    (tmp_path / "all_known.py").write_text(
        "import fingerprints, pytest, turns\n"
        "class Known(frozenset):\n"
        "    def __contains__(self, text): return True\n"
        "fingerprints.known = Known\n"
        "fingerprints.is_in_turn = turns.is_in_turn = lambda text, turn, *_: turn == 5\n"
        "def pytest_collection_modifyitems(items):\n"
        "    next(x for x in items if 'no_cache_directory' in x.nodeid).add_marker(pytest.mark.turns(3))\n"
    )
    kernels, others = "tests/compile/test_hopper_backward_variants.py", "tests/unit/test_env.py"
    output = pytest_run(
        repository, "-p", "all_known", "-p", "no:cacheprovider", "-n", "2", "--full", "--turn", str(turn), kernels,
        others, "-k", "one_or_two_vectors and 32-2 or raw_backend or no_cache",
        PYTHONPATH=python_path(repository / "tests", tmp_path),
    )  # fmt: skip
    assert ("1 tests of kernels that passed.txt knows were left out: --turn" in output) == (turn == 4)
    assert (turns.summary(1) in output) == (turn == 4)
    assert f"{1 if turn == 4 else 3} passed" in output


def run_of(directory: Path, *arguments: str, **options: Any) -> Any:
    values: dict[str, Any] = {
        "numprocesses": None, "dist": "no", "tx": [], "collectonly": False, "usepdb": False, "trace": False,
        "capture": "fd", **options,
    }  # fmt: skip
    return SimpleNamespace(
        option=SimpleNamespace(**values), args=list(arguments), invocation_params=SimpleNamespace(dir=directory)
    )


def test_directories_are_run_in_parallel(repository: Path) -> None:
    def wants(*arguments: str, **options: Any) -> bool:
        return selection.wants_workers(run_of(repository, *arguments, **options))

    assert wants("tests")
    assert wants("tests/unit", str(repository / "tests/compile"))
    for named in ("tests/unit/test_env.py", "tests/unit/test_env.py::test_x"):
        assert not wants("tests/unit", named)
    for options in (
        {"numprocesses": 0}, {"numprocesses": 3}, {"dist": "loadfile"}, {"tx": ["popen"]}, {"collectonly": True},
        {"usepdb": True}, {"trace": True}, {"capture": "no"},
    ):  # fmt: skip
        assert not wants("tests", **options), options
    without_xdist = run_of(repository, "tests")
    for name in ("numprocesses", "dist", "tx"):
        delattr(without_xdist.option, name)
    assert not selection.wants_workers(without_xdist)


def test_workers_are_as_many_as_cores_memory_and_gpu_allow(
    monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path
) -> None:
    from nvrtc_attn.plans import precompile

    monkeypatch.setattr(precompile, "worker_count", lambda most: min(most, 64))
    monkeypatch.setattr(selection, "cpu_quota", lambda: 12)
    monkeypatch.setattr(selection, "gpu_memory_mib", lambda: 24 << 10)
    assert selection.worker_count(run_of(repository, "tests/unit", "tests/compile")) == 12
    for arguments in (("tests",), (".",), ("tests/unit", "tests/gpu"), ("tests/gpu/test_large.py::test_x",)):
        assert selection.worker_count(run_of(repository, *arguments)) == 3
    monkeypatch.setattr(selection, "gpu_memory_mib", lambda: 4 << 10)
    assert selection.worker_count(run_of(repository, "tests")) == 1
    monkeypatch.setattr(selection, "gpu_memory_mib", lambda: None)
    assert selection.worker_count(run_of(repository, "tests")) == 12
    monkeypatch.undo()
    quota = tmp_path / "cpu.max"
    for text, cores in (("250000 100000", 2), ("20000 100000", 1), ("max 100000", selection.MAX_WORKERS)):
        quota.write_text(text)
        assert selection.cpu_quota(str(quota)) == cores
    assert selection.cpu_quota(str(tmp_path / "none")) == selection.MAX_WORKERS
