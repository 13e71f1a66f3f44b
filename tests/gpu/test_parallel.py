"""ContextParallel on GPUs of one host, over NCCL."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))

from test_parallel_processes import run

COUNT = torch.cuda.device_count()


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
        ("dtensors",),
    ],
)
def test_ranks_together_compute_the_whole(size: int, programs: tuple[str, ...], tmp_path: Path) -> None:
    """As on the CPU, and sequences of several tiles in bfloat16; torch's own ring around our kernels."""
    if size > COUNT:
        pytest.skip(f"needs {size} GPUs of one host, here are {COUNT}")
    found = run(size, tmp_path, *programs, device="cuda")
    assert not any(found.values()), "\n".join(f"{name}: {fault}" for name, faults in found.items() for fault in faults)
