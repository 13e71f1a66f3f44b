"""What is in the wheel, and that it installs and imports on its own."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import hatch_build

MAX_WHEEL_BYTES = 5_000_000


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """The wheel of this checkout: given by CI, otherwise built here."""
    if given := os.environ.get("NVRTC_ATTN_TEST_WHEEL"):
        return Path(given)
    if not (repository / "pyproject.toml").is_file():
        pytest.skip("not a checkout")
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed here")
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(target), str(repository)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Could not find a version that satisfies" in done.stderr:
        pytest.skip("the build requirements cannot be fetched here")  # no network; CI passes a wheel and cannot skip
    assert done.returncode == 0, done.stderr
    return next(target.glob("nvrtc_attn-*.whl"))


@pytest.fixture(scope="session")
def sdist() -> list[str]:
    """Names of the files in the sdist, below its one folder."""
    given = os.environ.get("NVRTC_ATTN_TEST_SDIST")
    if given is None:
        pytest.skip("no sdist is given; .ci/release.py, which .ci/run calls, builds one")
    with tarfile.open(given) as archive:
        parts = [Path(member.name).parts for member in archive.getmembers() if member.isfile()]
    assert {folder for folder, *_ in parts} == {Path(given).name.removesuffix(".tar.gz")}
    return ["/".join(below) for _, *below in parts]


@pytest.fixture(scope="session")
def manifest(wheel: Path) -> dict[str, Any]:
    with zipfile.ZipFile(wheel) as archive:
        content: dict[str, Any] = json.loads(archive.read("nvrtc_attn/_include/manifest.json"))
    return content


@pytest.mark.reliability(106)
def test_wheel_is_universal_and_small(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


@pytest.mark.reliability(106)
def test_wheel_has_the_whole_package_and_nothing_else(wheel: Path, repository: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    package = repository / "nvrtc_attn"
    sources = {path.relative_to(repository).as_posix() for path in package.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert "nvrtc_attn/py.typed" in names
    device_code = {
        path.relative_to(repository / "cuda_src").as_posix() for path in (repository / "cuda_src").rglob("*.cuh")
    }
    assert device_code
    assert {f"nvrtc_attn/_include/{name}" for name in device_code} <= names
    assert {name.split("/")[0] for name in names} == {"nvrtc_attn"}
    assert not [name for name in names if name.endswith((".pyc", ".so", ".whl", ".cubin"))]
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    runtime = {re.split(r"[^\w-]", line.split(":")[1].strip())[0] for line in required}
    assert runtime == {"numpy", "cuda-bindings", "cuda-pathfinder", "click", "rich"}
    assert "Requires-Python: >=3.10" in metadata


def test_sdist_has_what_git_has(sdist: list[str], repository: Path) -> None:
    """Documents, tests and tools too: what is built and tested from it is what a checkout would give."""
    assert {"PKG-INFO", "docs/kernels.md", "README.md", "CHANGELOG.md", "hatch_build.py", ".ci/run"} <= set(sdist)
    if not (repository / ".git").exists():
        pytest.skip("not a checkout")
    command = ["git", "-C", str(repository), "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    assert set(sdist) - {"PKG-INFO"} == {name for name in tracked if (repository / name).is_file()}


def test_the_page_of_the_index_has_no_link_that_only_a_checkout_has(wheel: Path, repository: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    assert "Description-Content-Type: text/markdown" in metadata
    page = metadata.partition("\n\n")[2]
    readme = (repository / "README.md").read_text(encoding="utf-8")
    assert page.startswith(readme[:200])
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert all(target.startswith("https://") for target in targets), targets


def test_links_of_the_index_s_page_lead_to_the_tag() -> None:
    readme = "[a](docs/a.md#x) ![plot](b.png) [c](https://c.example/) [d](#install) `[e]` f(g)"
    found = hatch_build.index_page(readme, "https://host.example/us/it/", "1.2.3")
    assert found.startswith(
        "[a](https://host.example/us/it/blob/v1.2.3/docs/a.md#x) ![plot](https://host.example/us/it/raw/v1.2.3/b.png) "
        "[c](https://c.example/) [d](#install) `[e]` f(g)"
    )
    assert hatch_build.index_page(readme, None, "1.2.3").startswith("a plot (b.png) [c](https://c.example/) [d](#inst")


@pytest.mark.reliability(106)
def test_wheel_carries_the_licences(wheel: Path, manifest: dict[str, Any]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        ours = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/licenses/LICENSE")))
        assert b"Apache License" in ours
        texts = {}
        for name, digest in manifest["licenses"].items():
            texts[name] = archive.read(f"nvrtc_attn/_include/licenses/{name}")
            assert hashlib.sha256(texts[name]).hexdigest() == digest
    assert b"Redistribution and use in source and binary forms" in texts["LICENSE.cutlass.txt"]
    assert b"Apache License" in texts["LICENSE.cccl.txt"]
    assert b"LLVM" in texts["LICENSE.cccl.txt"]


@pytest.mark.reliability(106)
def test_every_vendored_header_is_in_the_manifest(wheel: Path, manifest: dict[str, Any]) -> None:
    listed = {
        f"nvrtc_attn/_include/{package['path']}/{name}": digest
        for package in manifest["packages"].values()
        for name, digest in package["files"].items()
    }
    with zipfile.ZipFile(wheel) as archive:
        actual = {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if name.startswith(("nvrtc_attn/_include/cutlass/", "nvrtc_attn/_include/nvidia/"))
        }
    assert actual == listed
    assert len(listed) > 300
    for package in manifest["packages"].values():
        assert hatch_build.tree_digest(package["files"]) == package["digest"]
    assert manifest["packages"]["cutlass"]["version"] == "4.2.0.0"
    assert manifest["packages"]["cccl"]["version"].startswith("13.1.")


def test_vendored_headers_are_closed_under_include(wheel: Path, tmp_path: Path) -> None:
    """What a bundled header names is bundled, or comes from CUDA, or belongs to the host compiler."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    include = tmp_path / "nvrtc_attn" / "_include"
    roots = [include / "cutlass", include / "nvidia" / "cccl"]
    sources = [path for root in (*roots, include / "nvrtc_attn") for path in root.rglob("*") if path.is_file()]
    files, missing = hatch_build.closure(sources, [*roots, include])
    assert {path for path in files if path.is_relative_to(roots[0].resolve())}
    # Names that CCCL 13.1 mentions and does not have either (they are other compilers' or later versions').
    unresolved = {name for name in missing if name.split("/")[0] in ("cute", "cutlass", "cuda", "nv", "nvrtc_attn")}
    assert unresolved <= {
        "cuda/std/compare",
        "cuda/std/__compare/common_comparison_category.h",
        "cuda/std/__compare/ordering.h",
        "cuda/std/__compare/synth_three_way.h",
    }


@pytest.mark.reliability(88, 89, 106)
def test_wheel_installs_without_dependencies_and_imports(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("pip")
    digests = set()
    for prefix in (tmp_path / "one", tmp_path / "two" / "deeper"):
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(prefix), str(wheel)]
        subprocess.run(command, check=True)
        # -S leaves out site-packages: the import must not need a dependency.
        code = "import nvrtc_attn; print(nvrtc_attn.__file__, nvrtc_attn.__version__)"
        environment = {**os.environ, "PYTHONPATH": str(prefix)}
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert str(prefix) in done.stdout
        code = (
            "from nvrtc_attn.jit import headers; "
            "assert headers.modified_headers() == []; "
            "assert headers._own_root().origin == 'wheel'; "
            "print(headers.header_digest())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        if "is not usable" in done.stderr:
            pytest.skip("no NVRTC: the digest needs the CUDA headers of its version")
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_includes_finds_every_spelling() -> None:
    text = """
#include <a.h>
  # include "b.hpp" // c
#include CUDA_STD_HEADER(cstdint)
#include <cccl/cuda/std/x>
// #include <no>
"""
    assert list(hatch_build.includes(text)) == [
        ("a.h", False), ("b.hpp", True), ("cuda/std/cstdint", False), ("cuda/std/x", False),
    ]  # fmt: skip


@pytest.mark.reliability(97)
@pytest.mark.parametrize(
    ("number", "accepted"), [(3_000_001, True), (3_001_004, True), (3_002_000, False), (2_008_000, False)]
)
def test_build_refuses_a_cccl_that_cutlass_does_not_compile_with(number: int, accepted: bool, tmp_path: Path) -> None:
    header = tmp_path / "cuda" / "std" / "__cccl" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#pragma once\n#define CCCL_VERSION {number}\n")
    if accepted:
        hatch_build.check_cccl(tmp_path)
    else:
        found = f"{number // 1_000_000}.{number // 1_000 % 1_000}"
        with pytest.raises(RuntimeError, match=rf"CCCL {found} .*>= 3.0, < 3.2"):
            hatch_build.check_cccl(tmp_path)


@pytest.mark.reliability(97)
def test_build_names_a_missing_requirement() -> None:
    package = hatch_build.CUTLASS._replace(distribution="nvidia-cutlass-that-is-not-installed")
    with pytest.raises(RuntimeError, match="nvidia-cutlass-that-is-not-installed, which is not installed"):
        hatch_build.locate(package)


def test_versions_agree(repository: Path) -> None:
    """The changelog has a section for the version of the package."""
    import nvrtc_attn

    assert f"## [{nvrtc_attn.__version__}]" in (repository / "CHANGELOG.md").read_text(encoding="utf-8")
