"""What the documents and the quickstart show runs on the GPU, those blocks included that the CPU cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import documents
import numpy as np
import pytest
from child_environment import python_path

import nvrtc_attn

PROGRAMS = [program for page in documents.PAGES for program in documents.programs(page)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program(program: documents.Program, tmp_path: Path) -> None:
    reason = documents.run(program, on_gpu=True, cwd=tmp_path)
    if reason:
        pytest.skip(f"not all of it ran: {reason}")


@pytest.mark.parametrize("hidden", [(), ("torch", "cupy")], ids=["torch", "no framework"])
def test_quickstart(hidden: tuple[str, ...], tmp_path: Path) -> None:
    path = documents.ROOT / "examples" / "quickstart.py"
    code = f"""
import runpy, sys
for name in {hidden!r}:
    sys.modules[name] = None
sys.argv = [{str(path)!r}, "--seqlen", "256"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(documents.ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("memory by nvrtc_attn" if hidden else "memory by torch") in done.stdout
    assert "float16 against float64: relative error" in done.stdout
    assert done.stdout.count("TFLOP/s") == 2


def test_an_array_goes_to_the_gpu_and_back() -> None:
    arrays = [np.random.default_rng(seed).standard_normal((2, 100, 3, 64)).astype(np.float16) for seed in range(3)]
    q, k, v = map(nvrtc_attn.to_device, arrays)
    np.testing.assert_array_equal(q.numpy(), arrays[0])
    out = nvrtc_attn.to_device(np.full_like(arrays[0], np.nan))
    workspace = nvrtc_attn.to_device(np.zeros(nvrtc_attn.forward_workspace_bytes(q, k, v), np.uint8))
    nvrtc_attn.attention_forward(q, k, v, out, workspace=workspace)
    np.testing.assert_allclose(out.numpy(), nvrtc_attn.attention(*arrays), rtol=0, atol=5e-3)
