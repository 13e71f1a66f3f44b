"""The first training step of a process, with an empty cache: what compiles when, and that it computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, threading, time
import torch
import nvrtc_attn.torch as na
from nvrtc_attn import compile as compiler
def randn(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
def settle():
    names = ("nvrtc_attn prefetch", "nvrtc_attn compile")
    while threads := [thread for thread in threading.enumerate() if thread.name in names]:
        threads[0].join()
q, k, v = randn(2, 256, 4, 64), randn(2, 256, 4, 64), randn(2, 256, 4, 64)
options = {options}
before = compiler.statistics.compiles
out = na.attention(q, k, v, **options)
settle()
ahead = compiler.statistics.compiles - before
out.backward(torch.randn_like(out))
torch.cuda.synchronize()
late = compiler.statistics.compiles - before - ahead
print(ahead, late, bool(q.grad.isfinite().all()), "nvrtc" in open("/proc/self/maps").read().replace("nvrtc_attn", ""))
"""
OPTIONS = ("dict(causal=True)", "dict(bias=randn(1, 4, 256, 256))", "dict(dropout_p=0.1, deterministic=True)")


@pytest.mark.parametrize("options", OPTIONS)
def test_the_backward_kernels_are_compiled_ahead(options: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVRTC_ATTN_")}
    for name in ("NVRTC_ATTN_BACKEND",):
        if name in os.environ:
            environment[name] = os.environ[name]
    environment |= {"NVRTC_ATTN_CACHE_DIR": str(tmp_path / "kernels"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM.format(options=options)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    ahead, late, finite, _ = done.stdout.split()
    assert int(ahead) >= 2, "the forward kernel, and at least one of the backward pass"
    assert (late, finite) == ("0", "True"), "the guess is what torch's backward pass needs"
