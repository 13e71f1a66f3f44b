"""ContextParallel on GPUs of one host, over NCCL."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "unit"))

from test_parallel_processes import results_of, run, start

COUNT = torch.cuda.device_count()
TIMEOUT = 40
"""Seconds of the process group, among them the compiles that one rank may wait for."""
LATEST = 4 * TIMEOUT
"""Seconds after which a rank hangs: it starts, waits as long as its group, and then as long to say goodbye."""
ENDED = ("timing out", "timed out", "ncclRemoteError")
"""What is said of a rank that waited in vain: by the watchdog, by a wait on the host, by NCCL of a lost connection."""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "programs",
    [
        ("tensors", "dropout", "packed"),
        ("documents", "used"),
        ("faults",),
        ("problems",),
        ("modified",),
        ("long",),
        ("torchs_ring",),
        ("compiled",),
        ("inductor", "programs"),
        ("rows", "negated"),
        ("distributed", "dtensors", "dtensor_functions"),
        ("used_by_some",),
    ],
)
def test_ranks_together_compute_the_whole(size: int, programs: tuple[str, ...], tmp_path: Path) -> None:
    """As on the CPU, and sequences of several tiles in bfloat16; torch's own ring around our kernels."""
    if size > COUNT:
        pytest.skip(f"needs {size} GPUs of one host, here are {COUNT}")
    found = run(size, tmp_path, *programs, device="cuda")
    assert not any(found.values()), "\n".join(f"{name}: {fault}" for name, faults in found.items() for fault in faults)


@pytest.mark.parametrize("environment", [{}, {"TORCH_NCCL_BLOCKING_WAIT": "1"}], ids=["watchdog", "blocking"])
@pytest.mark.parametrize("program", ["killed", "killed_later", "killed_backward", "exhausted"])
def test_a_rank_that_is_gone_ends_the_others(program: str, environment: dict[str, str], tmp_path: Path) -> None:
    """When the timeout of their group is over: NCCL's watchdog ends the processes of those that wait, where they do not
    wait on the host; those raise. In no case does a rank hang.
    """
    if COUNT < 2:
        pytest.skip(f"needs 2 GPUs of one host, here are {COUNT}")
    environment = {**environment, "NVRTC_ATTN_TEST_RANK_SECONDS": str(TIMEOUT)}
    begun = time.monotonic()
    ranks = start(2, tmp_path, program, device="cuda", **environment)
    try:
        for process in ranks:
            try:
                said, _ = process.communicate(timeout=max(LATEST - (time.monotonic() - begun), 1))
            except subprocess.TimeoutExpired:
                process.kill()
                pytest.fail(f"hangs, and has said:\n{process.communicate()[0][-3000:]}")
            ended = process.returncode != 0 and any(words in said for words in ENDED)
            assert ended or results_of(said).get(program) == [], said[-3000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
