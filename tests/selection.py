"""Which tests `python -m pytest` runs by itself, and in how many processes. The hooks are in conftest.py.

The full matrix compiles some 1,000 kernels, a third of them small: about half an hour of one core. A plain run leaves
out what is marked ``slow``, except the parameter sets that the mark names as its sample, and takes 13 minutes of two
slow cores, half of it for kernels. ``--full`` runs all, ``--turn`` leaves out what passed as it is (fingerprints.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

MAX_WORKERS = 16
"""Workers collect the tests themselves (2 s each); the longest test of the full matrix decides from here on."""
GPU_MIB_PER_WORKER = 8 << 10
"""The largest problem of tests/gpu needs about as much; without a limit 16 workers fill a GPU of 24 GB."""


def sample_of(item: pytest.Item) -> tuple[str, ...] | None:
    """The parameter sets of a slow test that a plain run keeps; ``None`` where the test is not slow."""
    marks = list(item.iter_markers("slow"))
    return tuple(name for mark in marks for name in mark.kwargs.get("sample", ())) if marks else None


def parameters_id(item: pytest.Item) -> str:
    """What is in the brackets of a test's name, empty without parameters."""
    callspec = getattr(item, "callspec", None)
    return callspec.id if callspec is not None else ""


def left_out(items: list[pytest.Item], arguments: list[str]) -> list[pytest.Item]:
    """Of ``items`` those that only ``--full`` runs. What the caller names as ``file::test`` is never left out."""
    if any("::" in argument for argument in arguments):
        return []
    samples = ((item, sample_of(item)) for item in items)
    return [item for item, sample in samples if sample is not None and parameters_id(item) not in sample]


def cases_asked_for(request: pytest.FixtureRequest, cases: dict[str, Any]) -> dict[str, Any]:
    """Of ``cases`` those that a fixture of a module computes in this run: the parameters ``case`` of its tests.

    A test of the module that has the fixture without this parameter looks at all of them.
    """
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    items = [item for item in items if request.fixturename in getattr(item, "fixturenames", ())]
    asked = [getattr(getattr(item, "callspec", None), "params", {}).get("case") for item in items]
    return cases if None in asked else {case: cases[case] for case in asked if case is not None}


def wants_workers(config: pytest.Config) -> bool:
    """Whether the run should be parallel although the caller did not say so.

    It is where whole directories are run. A file or a test that the caller names, a debugger, or uncaptured output mean
    that somebody looks at single tests. ``-n``, ``--dist``, ``--tx`` and ``-p no:xdist`` are the caller's word.
    """
    option = config.option
    if getattr(option, "numprocesses", 0) is not None or option.dist != "no" or option.tx:
        return False
    if option.collectonly or option.usepdb or option.trace or option.capture == "no":
        return False
    return all(Path(config.invocation_params.dir, argument).is_dir() for argument in config.args)


def worker_count(config: pytest.Config) -> int:
    """One worker per core that this process may use, as far as its memory and that of the GPU suffice."""
    from nvrtc_attn.plans import precompile

    gpu_mib = gpu_memory_mib() if runs_gpu_tests(config) else None
    by_gpu = MAX_WORKERS if gpu_mib is None else max(1, gpu_mib // GPU_MIB_PER_WORKER)
    return max(1, min(precompile.worker_count(MAX_WORKERS), cpu_quota(), by_gpu))


def cpu_quota(path: str = "/sys/fs/cgroup/cpu.max") -> int:
    """Cores that the container may use on average, which the scheduler's affinity does not show."""
    try:
        quota, period = Path(path).read_text(encoding="ascii").split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return MAX_WORKERS


def runs_gpu_tests(config: pytest.Config) -> bool:
    gpu = Path(__file__).resolve().parent / "gpu"
    named = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    return any(path.is_relative_to(gpu) or gpu.is_relative_to(path) for path in named)


def gpu_memory_mib() -> int | None:
    """Memory of the smallest GPU, ``None`` where there is none. A process of its own: no context stays in this one."""
    if not os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return min(int(line) for line in done.stdout.splitlines())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def summary(count: int) -> str:
    """The line below pytest's own that says what was not run."""
    return f"{count} tests of the full matrix were left out, most of them kernel compiles: python -m pytest --full"
