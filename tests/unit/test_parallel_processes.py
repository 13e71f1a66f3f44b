"""ContextParallel of 2 and 4 processes on gloo: numbers, dropout masks, faults."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from child_environment import python_path

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402

from nvrtc_attn.torch import parallel  # noqa: E402

TESTS = Path(__file__).resolve().parent.parent
SECONDS = 1500
"""A limit for ranks that wait for ever, no measure of their work: other steps of CI run beside them."""

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this build of torch has no gloo", allow_module_level=True)


def start(size: int, directory: Path, *programs: str, device: str = "cpu", **more: str) -> list[Any]:
    """A process for each rank, with ``more`` in its environment."""
    environment = {
        **os.environ, "PYTHONPATH": python_path(TESTS.parent, TESTS), "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more,
    }  # fmt: skip
    command = [sys.executable, str(TESTS / "parallel_ranks.py")]
    return [
        subprocess.Popen(
            [*command, str(rank), str(size), str(directory / "store"), device, *programs],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def results_of(said: str) -> dict[str, list[str]]:
    """What a rank printed: for each program that it came to the end of, what was wrong."""
    lines = [json.loads(line[7:]) for line in said.splitlines() if line.startswith("RESULT ")]
    return {name: faults for line in lines for name, faults in line.items()}


def run(size: int, directory: Path, *programs: str, device: str = "cpu") -> dict[str, list[str]]:
    """What was wrong in each program, on any rank."""
    ranks = start(size, directory, *programs, device=device)
    found: dict[str, list[str]] = {name: [] for name in programs}
    try:
        for rank, process in enumerate(ranks):
            said, _ = process.communicate(timeout=SECONDS)
            results = results_of(said)
            for name in programs:
                found[name] += results.get(name) or (
                    [] if name in results else [f"rank {rank} gave up: {said[-3000:]}"]
                )
            assert process.returncode == 0 or any(found.values()), said[-3000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return found


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.turns(5, 0)), pytest.param(4, marks=pytest.mark.turns(5, 1))]
)
def test_ranks_together_compute_the_whole(size: int, tmp_path: Path) -> None:
    """Every strategy forward and backward, the dropout mask bit for bit, lengths that do not divide, faults."""
    programs = (
        "tensors",
        "dropout",
        "packed",
        "documents",
        "used",
        "rows",
        "used_by_some",
        "negated",
        "faults",
        "problems",
        "modified",
        "compiled",
    )
    found = run(size, tmp_path, *programs)
    assert not any(found.values()), "\n".join(f"{name}: {fault}" for name, faults in found.items() for fault in faults)


@pytest.mark.turns(5, 2)
def test_programs_of_ranks_are_one_graph(tmp_path: Path) -> None:
    """By inductor, with dynamic shapes; faults, checkpoints, fakes; what one rank does not use the others still get."""
    found = run(2, tmp_path, "inductor", "programs")
    assert not any(found.values()), "\n".join(f"{name}: {fault}" for name, faults in found.items() for fault in faults)


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="enable_sdpa needs torch 2.9.1")
@pytest.mark.turns(3)
def test_torchs_own_context_parallel_runs_these_kernels(tmp_path: Path) -> None:
    """Under `enable_sdpa` its ring calls them step by step; a call of sharded tokens is not taken as a whole."""
    assert run(2, tmp_path, "torchs_ring") == {"torchs_ring": []}


COLLECTIVES = {"all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single", "barrier", "broadcast"}


def test_every_collective_is_one_that_a_timeout_ends() -> None:
    """None is called but by `exchange.complete`, which waits for it."""
    waited = 0
    for path in Path(parallel.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="dist"), attr=name)):
                    assert name not in COLLECTIVES, f"{path.name}:{node.lineno} {name}"
                case ast.Call(func=ast.Name(id="complete")):
                    waited += 1
    assert waited >= 3


@pytest.mark.turns(3)
@pytest.mark.parametrize("program", ["killed", "killed_later", "killed_backward"])
def test_a_rank_that_is_gone_lets_the_others_fail(program: str, tmp_path: Path) -> None:
    assert run(2, tmp_path, program) == {program: []}


@pytest.mark.turns(5, 4)
def test_a_rank_without_memory_lets_the_others_fail(tmp_path: Path) -> None:
    assert run(2, tmp_path, "exhausted") == {"exhausted": []}


@pytest.mark.turns(5, 4)
def test_dtensors_are_refused_and_their_local_tensors_work(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.tensor", reason="torch.distributed.tensor needs torch 2.5")
    assert run(2, tmp_path, "distributed") == {"distributed": []}


@pytest.mark.turns(5, 3)
@pytest.mark.parametrize("size", [2, 4])
def test_dtensors_of_sharded_batch_and_heads_are_the_whole(size: int, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.tensor", reason="torch.distributed.tensor needs torch 2.5")
    assert run(size, tmp_path, "dtensors") == {"dtensors": []}


@pytest.mark.turns(5, 3)
@pytest.mark.parametrize("size", [2, 4])
def test_functions_of_scores_of_dtensors_see_the_whole(size: int, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.tensor", reason="torch.distributed.tensor needs torch 2.5")
    assert run(size, tmp_path, "dtensor_functions") == {"dtensor_functions": []}
