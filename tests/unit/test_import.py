"""What an import costs and touches, and which module may import which."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

FRAMEWORKS = {"torch", "jax", "cupy", "jax_tvm_ffi", "tvm_ffi"}
CUDA_FREE = (
    "front.problem", "front.philox", "jit.config", "jit.codegen", "jit.params", "heuristics",
    "base.dtypes", "base.errors", "base.env", "cpu.reference",
)  # fmt: skip
ADAPTERS = {"torch", "jax", "cupy", "aten", "integrations"}
"""Modules that know a framework. ``aten`` is torch's operators, so it may lean on ``torch``."""


def run_python(code: str, *options: str, cwd: Path | None = None, **variables: str) -> str:
    """Run ``code`` in a fresh interpreter that can import the package under test; returns what it prints."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), **variables}
    done = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, env=environment, cwd=cwd, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.reliability(103)
def test_import_takes_less_than_200_ms() -> None:
    code = """
        import time
        start = time.perf_counter()
        import nvrtc_attn
        print(time.perf_counter() - start)
    """
    # The best of five: other processes of a busy machine are not the import's fault.
    assert min(float(run_python(code)) for _ in range(5)) < 0.2


@pytest.mark.reliability(103)
def test_import_loads_no_framework_no_cuda_and_no_numpy() -> None:
    loaded = run_python("""
        import sys
        before = set(sys.modules)
        import nvrtc_attn
        print(" ".join(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
    """).split()
    assert not FRAMEWORKS & set(loaded)
    assert not {"cuda", "numpy", "click", "rich"} & set(loaded)


@pytest.mark.reliability(103)
def test_import_opens_no_library_no_socket_and_writes_nothing(tmp_path: Path) -> None:
    """An audit hook sees every file that is opened for writing, every directory, library, socket and process."""
    code = """
        import os, sys
        seen = []
        def hook(event, arguments):
            if event == "open":
                path, mode, flags = arguments
                if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and "__pycache__" not in str(path):
                    seen.append((event, str(path)))
            elif event in ("os.mkdir", "os.rename", "ctypes.dlopen", "subprocess.Popen") or event.startswith("socket."):
                seen.append((event, str(arguments)))
        sys.addaudithook(hook)
        import nvrtc_attn
        nvrtc_attn.UnsupportedError
        print(seen)
    """
    home = tmp_path / "home"
    home.mkdir()
    assert run_python(code, cwd=home, HOME=str(home), PYTHONDONTWRITEBYTECODE="1").strip() == "[]"
    assert list(home.iterdir()) == []


@pytest.mark.reliability(103)
def test_missing_attribute_names_the_module() -> None:
    import nvrtc_attn

    with pytest.raises(AttributeError, match="'nvrtc_attn' has no attribute 'atention'"):
        nvrtc_attn.atention  # noqa: B018
    assert set(nvrtc_attn.__all__) <= set(dir(nvrtc_attn))
    for name in nvrtc_attn.__all__:
        assert getattr(nvrtc_attn, name) is not None


@pytest.mark.reliability(104)
@pytest.mark.parametrize("options", [("-O",), ("-OO",), ("-W", "error")])
def test_import_under_interpreter_options(options: tuple[str, ...]) -> None:
    code = """
        import importlib, pkgutil, nvrtc_attn
        for module in pkgutil.walk_packages(nvrtc_attn.__path__, "nvrtc_attn."):
            name = module.name.split(".")[1]
            if name not in ("_include", "__main__", "torch", "jax", "cupy", "aten", "integrations"):
                importlib.import_module(module.name)
        print("imported")
    """
    assert run_python(code, *options).strip() == "imported"


@pytest.mark.reliability(104)
@pytest.mark.parametrize("options", [(), ("-O",), ("-W", "error")])
def test_refusals_do_not_depend_on_asserts(options: tuple[str, ...]) -> None:
    code = """
        import os
        from nvrtc_attn.base import env
        from nvrtc_attn.plans import precompile
        os.environ["NVRTC_ATTN_BACKEND"] = "cudnn"
        for refused in (env.backend, lambda: precompile.config_from_json("{}")):
            try:
                refused()
            except ValueError as error:
                print(error)
    """
    lines = run_python(code, *options).splitlines()
    assert len(lines) == 2
    assert "NVRTC_ATTN_BACKEND='cudnn'" in lines[0]
    assert "is not a kernel config" in lines[1]


@pytest.mark.reliability(103)
@pytest.mark.parametrize("module", CUDA_FREE)
def test_pure_modules_load_no_cuda(module: str) -> None:
    loaded = run_python(f"""
        import sys
        import nvrtc_attn.{module}
        print(" ".join(sorted({{name.split(".")[0] for name in sys.modules}})))
    """).split()
    assert "cuda" not in loaded
    assert not FRAMEWORKS & set(loaded)


def imported_modules(path: Path) -> set[str]:
    """Absolute names of everything that a file imports at any depth; ``from .x import y`` counts as both x and x.y."""
    package = "nvrtc_attn" if path.parent.name == "nvrtc_attn" else f"nvrtc_attn.{path.parent.name}"
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def test_nothing_imports_the_framework_adapters(repository: Path) -> None:
    package = repository / "nvrtc_attn"
    for path in package.rglob("*.py"):
        if path.relative_to(package).with_suffix("").parts[0] in ADAPTERS:
            continue
        names = imported_modules(path)
        assert not names & {f"nvrtc_attn.{adapter}" for adapter in ADAPTERS}, path
        assert not {name.split(".")[0] for name in names} & FRAMEWORKS, path


def test_integrations_are_imported_on_request_only(repository: Path) -> None:
    """Nothing of the library names one, and one names no other: each needs its own host library and no more."""
    package = repository / "nvrtc_attn"
    hosts = {"comfyui": "comfy", "diffusers": "diffusers", "transformers": "transformers", "xformers": "xformers"}
    modules = {path.stem for path in (package / "integrations").glob("*.py")} - {"__init__", "versions"}
    assert set(hosts) < modules
    for path in package.rglob("*.py"):
        names = imported_modules(path)
        if path.parent.name != "integrations":
            assert not {name for name in names if name.startswith("nvrtc_attn.integrations")}, path
            continue
        assert not names & {f"nvrtc_attn.integrations.{other}" for other in modules}, path
        foreign = {name.split(".")[0] for name in names} & set(hosts.values())
        assert foreign <= {hosts.get(path.stem)}, path


def test_pure_modules_do_not_name_cuda_even_lazily(repository: Path) -> None:
    package = repository / "nvrtc_attn"
    files = [package / f"{name.replace('.', '/')}.py" for name in CUDA_FREE if name != "heuristics"]
    for path in [*files, *(package / "heuristics").glob("*.py")]:
        names = imported_modules(path)
        assert not {name for name in names if name.split(".")[0] == "cuda"}, path
        assert not names & {
            "nvrtc_attn.jit.compile", "nvrtc_attn.runtime.kernel", "nvrtc_attn.runtime.launch",
            "nvrtc_attn.runtime.driver", "nvrtc_attn.runtime.device", "nvrtc_attn.api",
        }, path  # fmt: skip
