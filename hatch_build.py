"""Copies the third-party headers that the kernels include into the wheel (or, editable, into the checkout).

Also makes README the page of the package index, where a link into the repository needs the repository's address.

CUTLASS and the libcudacxx part of CCCL are build requirements pinned in ``pyproject.toml``; git holds neither. Only
the transitive ``#include`` closure is copied, found by reading the text and ignoring every ``#if``: that takes more
than a compile needs, never less. The copy ends up as ::

    _include/nvrtc_attn/...             our device code (in a wheel; a checkout uses cuda_src/)
    _include/cutlass/{cute,cutlass}/... include root
    _include/nvidia/cccl/{cuda,nv}/...  two include roots: CUTLASS 4.2 writes both <cuda/std/x> and <cccl/cuda/std/x>
    _include/licenses/...
    _include/manifest.json              version and SHA-256 of everything above except our own code

``python hatch_build.py`` fills the checkout without installing anything; it needs the build requirements.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ModuleNotFoundError:  # the closure scanner is also used by tests, where hatchling is not installed
    BuildHookInterface = MetadataHookInterface = object

# Kernels may include these without a new build of the wheel: the Ampere and Hopper instruction wrappers.
ROOT_HEADERS = (
    "cute/layout.hpp",
    "cute/swizzle.hpp",
    "cute/swizzle_layout.hpp",
    "cute/tensor.hpp",
    "cute/arch/mma_sm75.hpp",
    "cute/arch/mma_sm80.hpp",
    "cute/arch/copy_sm75.hpp",
    "cute/arch/copy_sm80.hpp",
    "cute/arch/copy_sm90.hpp",
    "cute/arch/copy_sm90_tma.hpp",
    "cute/arch/copy_sm90_desc.hpp",
    "cute/arch/mma_sm90_gmma.hpp",
    "cute/arch/mma_sm90_desc.hpp",
    "cute/arch/cluster_sm90.hpp",
    "cute/atom/mma_atom.hpp",
    "cute/atom/copy_atom.hpp",
    "cutlass/arch/barrier.h",
    "cutlass/numeric_types.h",
    "cuda/std/cstdint",
    "cuda/std/limits",
    "cuda/std/type_traits",
    "cuda/std/utility",
)
CCCL_ACCEPTED = ((3, 0), (3, 2))
"""CCCL versions that CUTLASS 4.2 compiles with: from the first, below the second (packages 13.0 and 13.1)."""

_INCLUDE = re.compile(
    r'^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|"([^"\n]+)"|CUDA_STD_HEADER\(([^)\n]+)\))', re.MULTILINE
)


class Package(NamedTuple):
    """One build requirement: where its headers are and where they go below ``_include``.

    Not a dataclass: hatchling runs this file without an entry in ``sys.modules``, which dataclasses look up.
    """

    name: str
    distribution: str
    include_dir: str
    """Inside the distribution."""
    target: str
    version: str = ""
    root: Path = Path()
    license_file: Path = Path()


CUTLASS = Package("cutlass", "nvidia-cutlass", "cutlass_library/source/include", "cutlass")
CCCL = Package("cccl", "nvidia-cuda-cccl", "nvidia/cu13/include/cccl", "nvidia/cccl")


def locate(package: Package) -> Package:
    """Find an installed build requirement, its version and its licence."""
    try:
        distribution = metadata.distribution(package.distribution)
    except metadata.PackageNotFoundError:
        raise RuntimeError(
            f"building nvrtc-attn needs {package.distribution}, which is not installed: "
            "install the build-system.requires of pyproject.toml, or build with isolation"
        ) from None
    root = Path(str(distribution.locate_file(package.include_dir))).resolve()
    licenses = [
        Path(str(distribution.locate_file(file)))
        for file in distribution.files or ()
        if ".dist-info" in file.parts[0] and file.name.lower().startswith("license")
    ]
    if not root.is_dir() or not licenses:
        raise RuntimeError(f"{package.distribution} {distribution.version} has no {package.include_dir} or no licence")
    return package._replace(version=distribution.version, root=root, license_file=licenses[0])


def check_cccl(root: Path) -> None:
    """Refuse a CCCL that the bundled CUTLASS does not compile with."""
    version_header = (root / "cuda/std/__cccl/version.h").read_text()
    match = re.search(r"#\s*define\s+CCCL_VERSION\s+(\d+)", version_header)
    number = int(match[1]) if match else 0
    found = (number // 1_000_000, number // 1_000 % 1_000)
    if not CCCL_ACCEPTED[0] <= found < CCCL_ACCEPTED[1]:
        low, high = (".".join(map(str, v)) for v in CCCL_ACCEPTED)
        raise RuntimeError(
            f"CCCL {found[0]}.{found[1]} at {root}: CUTLASS 4.2 compiles with CCCL >= {low}, < {high}; "
            'install "nvidia-cuda-cccl>=13.1,<13.2"'
        )


def includes(text: str) -> Iterator[tuple[str, bool]]:
    """Every header that ``text`` may include, with whether it is written with quotes."""
    for match in _INCLUDE.finditer(text):
        if match[3]:
            yield f"cuda/std/{match[3]}", False
        else:
            # CUTLASS 4.2 writes both <cuda/std/x> and <cccl/cuda/std/x> for one file.
            yield (match[1] or match[2]).removeprefix("cccl/"), bool(match[2])


def closure(start: Iterable[str | Path], roots: Iterable[Path]) -> tuple[set[Path], set[str]]:
    """Files below ``roots`` that ``start`` (names, or files to read) may include, and the names found nowhere."""
    search = [root.resolve() for root in roots]
    files: set[Path] = set()
    missing: set[str] = set()
    pending: list[tuple[str, Path | None]] = [
        (name, source.parent if quoted else None)
        for source in start
        if isinstance(source, Path)
        for name, quoted in includes(source.read_text(encoding="utf-8"))
    ] + [(name, None) for name in start if isinstance(name, str)]
    while pending:
        name, directory = pending.pop()
        candidates = ([directory / name] if directory else []) + [root / name for root in search]
        path = next((c.resolve() for c in candidates if c.is_file()), None)
        if path is None:
            missing.add(name)
        elif path not in files and any(path.is_relative_to(root) for root in search):
            files.add(path)
            text = path.read_text(encoding="utf-8", errors="replace")
            pending.extend((n, path.parent if quoted else None) for n, quoted in includes(text))
    return files, missing


def tree_digest(files: dict[str, str]) -> str:
    """SHA-256 over the sorted ``path SHA-256`` lines: the same wherever the tree lies."""
    return hashlib.sha256("".join(f"{path} {files[path]}\n" for path in sorted(files)).encode()).hexdigest()


def collect(source: Path, target: Path) -> dict[str, Any]:
    """Fill ``target`` with the headers that the kernels under ``source`` need. Returns the manifest."""
    cutlass, cccl = locate(CUTLASS), locate(CCCL)
    check_cccl(cccl.root)
    own = sorted(path for pattern in ("*.cuh", "*.cu", "*.h") for path in source.rglob(pattern))
    files, _ = closure([*own, *ROOT_HEADERS], (cutlass.root, cccl.root))
    manifest: dict[str, Any] = {"format": 1, "packages": {}, "licenses": {}}
    for package in (cutlass, cccl):
        digests: dict[str, str] = {}
        for path in sorted(p for p in files if p.is_relative_to(package.root)):
            relative = path.relative_to(package.root).as_posix()
            content = path.read_bytes()
            copy = target / package.target / relative
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
            digests[relative] = hashlib.sha256(content).hexdigest()
        for name in ROOT_HEADERS:
            if (package.root / name).is_file() and name not in digests:
                raise RuntimeError(f"{name} of {package.distribution} was not collected")
        license_name = f"LICENSE.{package.name}.txt"
        (target / "licenses").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package.license_file, target / "licenses" / license_name)
        manifest["licenses"][license_name] = hashlib.sha256(package.license_file.read_bytes()).hexdigest()
        manifest["packages"][package.name] = {
            "distribution": package.distribution,
            "version": package.version,
            "path": package.target,
            "digest": tree_digest(digests),
            "files": digests,
        }
    manifest["digest"] = tree_digest({name: p["digest"] for name, p in manifest["packages"].items()})
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return manifest


def fill_checkout(root: Path) -> Path:
    """Bring ``nvrtc_attn/_include`` of a checkout up to date. A reader sees the old tree or the new one, no mixture."""
    package = root / "nvrtc_attn"
    target = package / "_include"
    with tempfile.TemporaryDirectory(prefix="._include-", dir=package) as scratch:
        fresh, stale = Path(scratch) / "new", Path(scratch) / "old"
        fresh.mkdir()
        collect(root / "cuda_src", fresh)
        if content(target) != content(fresh):
            if target.exists():
                target.rename(stale)
            fresh.rename(target)
    return target


def content(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by name."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def index_page(readme: str, source: str | None, version: str) -> str:
    """README for the package index: links to files lead to the tag of ``version`` in the repository ``source``.

    Without ``source`` a link becomes its text and an image its description: better than a page of dead links.
    """

    def absolute(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        if source is None:
            return f"{text} ({target})" if image else text
        return f"{image}[{text}]({source.rstrip('/')}/{'raw' if image else 'blob'}/v{version}/{target})"

    return re.sub(r"(!?)\[([^]\n]*)\]\(([^)\s]+)\)", absolute, readme)


class IndexPage(MetadataHookInterface):
    """Gives the package the description that the index shows."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme``, which pyproject.toml calls dynamic."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        page = index_page(readme, metadata.get("urls", {}).get("Source"), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": page}


class HeaderBundle(BuildHookInterface):
    """Adds ``_include`` to a wheel; an editable install gets it inside the checkout instead."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Collect the headers before hatchling gathers the files."""
        root = Path(self.root)
        if version == "editable":
            fill_checkout(root)
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="nvrtc-attn-")
        scratch = Path(self._scratch.name)
        collect(root / "cuda_src", scratch)
        build_data["force_include"][str(scratch)] = "nvrtc_attn/_include"
        build_data["force_include"][str(root / "cuda_src" / "nvrtc_attn")] = "nvrtc_attn/_include/nvrtc_attn"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the scratch copy."""
        scratch = getattr(self, "_scratch", None)
        if scratch is not None:
            scratch.cleanup()


if __name__ == "__main__":
    sys.stdout.write(f"{fill_checkout(Path(__file__).resolve().parent)}\n")
