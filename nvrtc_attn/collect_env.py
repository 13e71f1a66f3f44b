"""What ``python -m nvrtc_attn doctor`` shows: everything a bug report needs, and nothing private.

Collecting never raises, never creates a CUDA context and never imports a framework: what fails becomes a line in
``problems``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any, Final

from .base import env
from .base.architectures import arch_of
from .base.errors import CacheWarning, CudaError, UnsupportedError
from .base.version import __version__
from .jit import headers, nvrtc_library
from .jit.cache import KernelCache
from .jit.compiler_process import WorkerDiedError
from .jit.nvrtc_library import supported_archs
from .jit.worker_pool import Ticket, pool
from .runtime import device, driver

FRAMEWORKS: Final = {"torch": "torch", "jax": "jax", "cupy": "cupy", "ml_dtypes": "ml_dtypes", "tvm_ffi": "jax-tvm-ffi"}
"""Import name and a distribution that brings it. CuPy is published under one name per CUDA major."""

REQUIREMENTS: Final = {
    "numpy": ("numpy", "ndarray"),
    "cuda-bindings": ("cuda.bindings", "__version__"),
    "cuda-pathfinder": ("cuda.pathfinder", "load_nvidia_dynamic_lib"),
    "click": ("click", "group"),
    "rich": ("rich.console", "Console"),
}
"""Distribution -> a module of it and a name in there. What pip leaves of a package may import, and be empty."""

_READ_ONLY: Final = "read-only: what is in it is used, and kernels that are compiled stay in memory"
_NOT_MADE: Final = "absent, and cannot be made here: kernels that are compiled stay in memory"
_NOT_HERE: Final = (
    "the process that calls attention, which is not this one. There print nvrtc_attn.torch.sdpa.report(), or all of "
    "this report: from nvrtc_attn.doctor import show; show()"
)
"""Where calls of torch's attention are counted that ``enable_sdpa`` took or left to torch."""


def collect() -> dict[str, Any]:
    """Return the whole report as plain JSON values; ``problems`` is empty where attention can run on a GPU."""
    problems: list[str] = []
    report: dict[str, Any] = {"problems": problems}
    for name, section in (
        ("package", _package),
        ("environment", _environment),
        ("driver", _driver),
        ("gpus", _gpus),
        ("nvrtc", _nvrtc),
        ("headers", _headers),
        ("cache", _cache),
        ("frameworks", _frameworks),
        ("sdpa", _sdpa),
    ):
        try:
            report[name] = section(report, problems)
        except (Exception, SystemExit) as error:  # one broken part must not hide what is said of the others
            report[name] = None
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return report


def _package(report: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    requirements = {}
    for name, (module, attribute) in REQUIREMENTS.items():
        requirements[name] = _version(name)
        try:
            getattr(importlib.import_module(module), attribute)
        except (Exception, SystemExit) as error:  # an installed package may still be a broken one
            what = "is not installed" if requirements[name] is None else "is installed and cannot be imported"
            problems.append(f"{name} {what} ({type(error).__name__}: {error}): pip install --force-reinstall {name}")
    return {
        "version": __version__,
        "path": str(Path(__file__).resolve().parent),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "requirements": requirements,
    }


def _environment(report: dict[str, Any], problems: list[str]) -> dict[str, str]:
    for name, accessor in env.ACCESSORS.items():
        try:
            accessor()
        except Exception as error:
            problems.append(f"environment: {error}" if name in str(error) else f"environment: {name}: {error}")
    names = [*env.ACCESSORS, "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"]
    return {name: os.environ[name] for name in names if name in os.environ}


def _driver(report: dict[str, Any], problems: list[str]) -> dict[str, Any] | None:
    try:
        major, minor = driver.driver_version()
    except CudaError as error:
        why = error.__cause__ or error
        problems.append(f"driver: no NVIDIA driver ({why}): only the CPU path and `warmup` work")
        return None
    return {"cuda_version": f"{major}.{minor}"}


def _gpus(report: dict[str, Any], problems: list[str]) -> list[dict[str, Any]]:
    if not report.get("driver"):
        return []
    try:
        count = driver.device_count()
    except CudaError as error:
        problems.append(f"gpus: none ({error}): only the CPU path and `warmup` work")
        return []
    gpus = []
    for found in map(device.properties, range(count)):
        major, minor = found.compute_capability
        gpus.append(
            {
                "index": found.index,
                "name": found.name,
                "compute_capability": f"{major}.{minor}",
                "num_sms": found.num_sms,
                "smem_bytes": found.smem_per_block_optin,
                "memory_bytes": found.total_memory_bytes,
            }
        )
        try:
            arch_of(found.compute_capability, found.name)
        except UnsupportedError as error:
            problems.append(f"gpus: {error}")
    return gpus


def _nvrtc(report: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    library = nvrtc_library.nvrtc()
    section: dict[str, Any] = {"version": f"{library.version[0]}.{library.version[1]}", "path": library.path}
    installed = report.get("driver")
    have = installed["cuda_version"] if installed else section["version"]
    if int(have.split(".")[0]) < library.version[0]:
        problems.append(
            f"nvrtc: NVRTC {section['version']} makes code for drivers of CUDA {library.version[0]} and later, this "
            f'one is of CUDA {have}: pip install "nvrtc-attn[cu{have.split(".")[0]}]"'
        )
    section["archs"] = supported_archs()
    section["compiles"] = _compiles(library.path, section["archs"][0])
    if not section["compiles"]:
        problems.append(
            f"nvrtc: {library.path} cannot compile an empty kernel; libnvrtc-builtins is missing or of another version"
            f': pip install --force-reinstall "nvrtc-attn[cu{library.version[0]}]"'
        )
    return section


def _compiles(path: str, arch: str) -> bool:
    """Whether NVRTC makes an empty kernel, in a process of its own as for every kernel."""
    source = b'extern "C" __global__ void kernel() {}'
    message = [os.fsencode(os.path.abspath(path)), arch.encode(), b"doctor.cu", source]
    try:
        return pool().compile([*message, f"--gpu-architecture={arch}".encode()], Ticket()).status == 0
    except (OSError, WorkerDiedError):
        return False


def _headers(report: dict[str, Any], problems: list[str]) -> dict[str, Any] | None:
    if not report.get("nvrtc"):
        return None  # they are looked for beside NVRTC, whose line says what to do
    section: dict[str, Any] = {"bundled": headers.bundle_versions(), "modified": headers.modified_headers()}
    if section["modified"]:
        problems.append(
            f"headers: {len(section['modified'])} bundled files differ from the build: {section['modified'][0]}"
        )
    section["roots"] = [
        {"name": root.name, "path": str(root.directories[0]), "origin": root.origin} for root in headers.roots()
    ]
    section["digest"] = headers.header_digest()
    return section


def _cache(report: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    directory = env.cache_dir()
    section: dict[str, Any] = {"path": None if directory is None else str(directory), "state": "absent"}
    section["entries"] = section["bytes"] = section["damaged"] = section["tuned"] = 0
    if directory is None:
        section["state"] = "no home directory"
        problems.append("cache: no home directory: kernels stay in memory; set NVRTC_ATTN_CACHE_DIR")
        return section
    # The cache tells in a warning why it does not use its directory. A fresh object has not warned yet.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheWarning)
        entries = KernelCache(directory, env.cache_size_bytes(), read_only=True).entries()
    section["entries"], section["bytes"] = len(entries), sum(entry.size_bytes for entry in entries)
    section["damaged"] = sum(bool(entry.problem) for entry in entries)
    section["tuned"] = sum(entry.tuned for entry in entries)
    if caught:
        section["state"] = str(caught[0].message)
    elif directory.is_dir():
        section["state"] = "ok" if os.access(directory, os.W_OK) else _READ_ONLY
    else:
        parent = next(path for path in directory.absolute().parents if os.path.exists(path))
        if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            section["state"] = _NOT_MADE
    # Where nothing may be compiled nothing would be written: a warm cache that is mounted read-only is whole.
    is_unwritable = section["state"] in (_READ_ONLY, _NOT_MADE)
    if section["state"] not in ("ok", "absent") and not (is_unwritable and env.no_compile()):
        problems.append(f"cache: {directory}: {section['state']}")
    return section


def _frameworks(report: dict[str, Any], problems: list[str]) -> dict[str, str]:
    found = {}
    for name, distribution in FRAMEWORKS.items():
        try:
            if importlib.util.find_spec(name) is None:
                continue
        except (ImportError, ValueError):  # a broken or half-imported package
            problems.append(f"frameworks: {name} is present and cannot be found by the import system")
            continue
        names = (distribution, f"{distribution}-cuda13x", f"{distribution}-cuda12x")
        found[name] = next((version for version in map(_version, names) if version), "unknown version")
    return found


def _sdpa(report: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """What `nvrtc_attn.torch.enable_sdpa` took over in this process, or in which process to ask for it."""
    module = sys.modules.get("nvrtc_attn.torch.sdpa")
    return {"counted_in": _NOT_HERE} if module is None else {"counted_in": "this process", **module.report()}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
