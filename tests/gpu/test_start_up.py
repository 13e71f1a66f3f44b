"""The first training step of a process, with an empty cache: what compiles when, and that it computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_environment import python_path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, threading, time
import torch
import nvrtc_attn.torch as na
from nvrtc_attn.jit import compile as compiler
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
print(ahead, late, bool(q.grad.isfinite().all()))
"""
OPTIONS = ("dict(causal=True)", "dict(bias=randn(1, 4, 256, 256))", "dict(dropout_p=0.1, deterministic=True)")


JAX_PROGRAM = """
import jax, jax.numpy as jnp
import nvrtc_attn.jax as na
from nvrtc_attn.jit import compile as compiler
seen = []
real = compiler.run_nvrtc
def run(source, arch, options, ticket):
    seen.append((source, ticket.urgent))
    return real(source, arch, options, ticket)
compiler.run_nvrtc = run
q, k, v = (jax.random.normal(key, (2, 256, 4, 64), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))
gradient = jax.jit(jax.grad(lambda q, k, v: na.attention(q, k, v, causal=True).sum(), (0, 1, 2)))(q, k, v)
print(sum(not urgent for _, urgent in seen), len(seen) - len({source for source, _ in seen}),
      bool(jnp.isfinite(gradient[0]).all()))
"""


@pytest.mark.parametrize("options", OPTIONS)
def test_the_backward_kernels_are_compiled_ahead(options: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ahead, late, finite = run(PROGRAM.format(options=options), tmp_path)
    assert int(ahead) >= 2, "the forward kernel, and at least one of the backward pass"
    assert (late, finite) == ("0", "True"), "the guess is what torch's backward pass needs"


def test_jax_compiles_the_backward_kernels_ahead(tmp_path: Path) -> None:
    pytest.importorskip("jax_tvm_ffi")
    ahead, twice, finite = run(JAX_PROGRAM, tmp_path)
    assert int(ahead) >= 1
    assert (twice, finite) == ("0", "True")


def run(program: str, tmp_path: Path) -> list[str]:
    """What ``program`` prints in a fresh process with an empty cache."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVRTC_ATTN_")}
    for name in ("NVRTC_ATTN_BACKEND",):
        if name in os.environ:
            environment[name] = os.environ[name]
    environment |= {"NVRTC_ATTN_CACHE_DIR": str(tmp_path / "kernels"), "PYTHONPATH": python_path(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
