"""compute-sanitizer over kernels of every family, where it is installed. `sanitizer.py` knows more cases."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

CASES = (
    "basic-float16", "basic-float32", "decode", "few-queries-packed", "tiles-4-d128", "wide-0-d256-256",
    "bias-tiles-0-bhqk", "bias-tiles-13-1hqk", "bias-11q1", "split-queries", "parts",
    "varlen-seqused-True", "deterministic", "dropout-gqa", "layout-unaligned-float16",
    "sink-24-d64", "sink-28-d64", "mask-tiles",
)  # fmt: skip
MODIFIERS = ("both", "t5", "documents")
"""Cases of `tests/modifiers.py`: deterministic, with the gradients of what they captured, and tiles planned."""
PARTS = ("dropout", "bias-dlse")
"""Problems of `sanitizer.py` that are computed in parts: rows, keys and heads of a whole, forward and backward."""
# Every kernel is launched by one of these at least; a test without a GPU counts them.
SHARES = 5
"""Processes among which a tool's cases are dealt: one alone takes more than eight minutes (H200, 2026-11-30)."""


def _sanitizer() -> str | None:
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), f"{toolkit}/bin"]))


@pytest.mark.slow
@pytest.mark.reliability(41)
@pytest.mark.skipif(_sanitizer() is None, reason="compute-sanitizer is neither on PATH nor in CUDA_HOME/bin")
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "synccheck"])
def test_no_kernel_makes_the_sanitizer_complain(tool: str, share: int) -> None:
    """Without torch's caching allocator, which would hide an access past the end of a tensor.

    Errors of the driver's functions are left out: Python's binding asks for functions that this driver does not have.
    """
    named = [*CASES, *(f"modifier-{x}" for x in MODIFIERS), *(f"part-{x}" for x in PARTS)][share::SHARES]
    command = [
        str(_sanitizer()), "--tool", tool, "--error-exitcode", "97", "--check-api-memory-access", "no",
        "--report-api-errors", "no", "--target-processes", "application-only",
        sys.executable, str(Path(__file__).with_name("sanitizer.py")), *named,
    ]  # fmt: skip
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(named)} cases ok, 0 wrong" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
