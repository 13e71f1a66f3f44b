"""The headers of a compile: where they come from, what the digest sees, and what is said when they are missing."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from nvrtc_attn.base.errors import CompileError
from nvrtc_attn.jit import headers, nvrtc_library

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import hatch_build

pytestmark = pytest.mark.skipif(
    not (headers.INCLUDE_DIR / "manifest.json").is_file(), reason='no bundled headers: pip install -e ".[cu13]"'
)


@pytest.fixture
def library() -> nvrtc_library.Nvrtc:
    try:
        return nvrtc_library.nvrtc()
    except CompileError as error:
        pytest.skip(f"no NVRTC: {error}")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: nvrtc_library.Nvrtc) -> Path:
    """A private copy of all headers, laid out as in a wheel; `headers` uses it."""
    roots = {root.name: root.directories[0] for root in headers.roots()}
    shutil.copytree(headers.INCLUDE_DIR, tmp_path / "_include")
    shutil.copytree(roots["nvrtc_attn"] / "nvrtc_attn", tmp_path / "_include" / "nvrtc_attn", dirs_exist_ok=True)
    cuda = tmp_path / "cuda"
    for name in headers.CUDA_HEADERS:
        if (roots["cuda"] / name).is_file():
            (cuda / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(roots["cuda"] / name, cuda / name)
    monkeypatch.setattr(headers, "INCLUDE_DIR", tmp_path / "_include")
    monkeypatch.setattr(headers, "_cuda_candidates", lambda library: [(cuda, "test")])
    monkeypatch.setattr(headers, "_cuda_roots", {})
    return tmp_path


@pytest.mark.reliability(88)
@pytest.mark.parametrize(
    "name",
    [
        "_include/nvrtc_attn/params.cuh",
        "_include/cutlass/cute/layout.hpp",
        "_include/cutlass/cutlass/numeric_types.h",
        "_include/nvidia/cccl/cuda/std/cstdint",
        "_include/nvidia/cccl/nv/target",
        "cuda/cuda_fp16.h",
        "cuda/cuda_fp16.hpp",
        "cuda/cuda_bf16.h",
    ],
)
def test_one_edited_byte_changes_the_digest_and_a_touch_does_not(name: str, install: Path) -> None:
    def both() -> tuple[str, str]:
        return headers.header_digest(), headers.Snapshot().digest(entry("forward_portable"))

    path = install / name
    before = both()
    os.utime(path, (1, 1))
    assert both() == before
    content = path.read_bytes()
    stamp = path.stat()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # size and modification time as before
    assert all(after != digest for after, digest in zip(both(), before, strict=True))
    path.write_bytes(content)
    assert both() == before


@pytest.mark.reliability(88)
def test_a_new_or_removed_header_changes_the_digest(install: Path) -> None:
    before = headers.header_digest()
    extra = install / "_include" / "nvrtc_attn" / "extra.cuh"
    extra.write_text("#pragma once\n")
    assert headers.header_digest() != before
    extra.unlink()
    assert headers.header_digest() == before
    (install / "_include" / "nvidia" / "cccl" / "cuda" / "std" / "cstdint").rename(install / "moved")
    with pytest.raises(CompileError, match="cccl headers are missing"):
        headers.header_digest()


@pytest.mark.reliability(89)
def test_digest_does_not_depend_on_the_prefix(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_wheel = headers.header_digest()
    moved = install / "another" / "prefix"
    shutil.copytree(install / "_include", moved)
    monkeypatch.setattr(headers, "INCLUDE_DIR", moved)
    assert headers.header_digest() == in_wheel
    monkeypatch.undo()
    assert headers.header_digest() == in_wheel  # this checkout or wheel, another layout of the same bytes


def entry(kernel: str) -> str:
    return f"#include <nvrtc_attn/kernel/{kernel}.cuh>\n"


def digests(root: Path) -> dict[str, str]:
    """The digest of the headers of every kernel of ours."""
    seen = headers.Snapshot()
    return {path.stem: seen.digest(entry(path.stem)) for path in (root / "nvrtc_attn" / "kernel").glob("*.cuh")}


def including(root: Path, name: str) -> set[str]:
    """The kernels whose headers ``name`` is among, by the scanner of the build, which is another one."""
    file = (root / "nvrtc_attn" / name).resolve()
    kernels = (root / "nvrtc_attn" / "kernel").glob("*.cuh")
    return {path.stem for path in kernels if path.resolve() == file or file in hatch_build.closure([path], [root])[0]}


@pytest.mark.slow(sample=["4"])
@pytest.mark.reliability(88)
@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.turns(3)
def test_an_edit_of_our_code_changes_the_digest_of_the_kernels_that_include_it(step: int, install: Path) -> None:
    """Of every header, or of every fourth one and of those that are named below."""
    root = install / "_include"
    before = digests(root)
    assert len(before) == len(set(before.values())) > 10
    changed_by = {}
    named = ("hopper/wide/group_scores.cuh", "params.cuh", "collective/mask.cuh")
    names = sorted(path.relative_to(root / "nvrtc_attn").as_posix() for path in (root / "nvrtc_attn").rglob("*.cuh"))
    for name in {*names[::step], *named}:
        path = root / "nvrtc_attn" / name
        content = path.read_bytes()
        path.write_bytes(content + b"// edited\n")
        after = digests(root)
        path.write_bytes(content)
        changed_by[name] = {kernel for kernel, digest in after.items() if digest != before[kernel]}
        assert changed_by[name] == including(root, name), name
    assert digests(root) == before
    assert changed_by["hopper/wide/group_scores.cuh"] == {"backward_hopper_wide"}
    assert changed_by["params.cuh"] == set(before)
    assert {"forward_portable", "forward_hopper", "backward_hopper"} <= changed_by["collective/mask.cuh"] < set(before)


def test_a_file_that_nobody_includes_changes_no_digest(install: Path) -> None:
    before = digests(install / "_include")
    everything = headers.header_digest()
    (install / "_include" / "nvrtc_attn" / "collective" / "notes.cuh").write_text("// nobody includes it\n")
    assert digests(install / "_include") == before
    assert headers.header_digest() != everything


@pytest.mark.reliability(88)
@pytest.mark.parametrize("name", ["_include/cutlass/cute/layout.hpp", "_include/nvidia/cccl/nv/target", "cuda/mma.h"])
def test_third_party_headers_are_in_the_digest_of_every_source(name: str, install: Path) -> None:
    sources = [entry("combine"), entry("backward_hopper"), "// includes nothing"]
    before = [headers.Snapshot().digest(source) for source in sources]
    with (install / name).open("ab") as file:
        file.write(b"\n")
    after = [headers.Snapshot().digest(source) for source in sources]
    assert all(a != b for a, b in zip(after, before, strict=True))


def test_the_digest_follows_every_spelling_of_an_include(install: Path) -> None:
    root = install / "_include" / "nvrtc_attn"
    sources = {
        "angle": "#include <nvrtc_attn/extra.cuh>",
        "quoted": '#include "nvrtc_attn/extra.cuh"',
        "spaced": "  #  include\t<nvrtc_attn/extra.cuh> // why",
        "not taken": "#if 0\n#include <nvrtc_attn/extra.cuh>\n#endif",
        "through another": "#include <nvrtc_attn/deeper/beside.cuh>",
        "from the root": "#include <nvrtc_attn/deeper/root.cuh>",
    }
    (root / "deeper").mkdir()
    (root / "deeper" / "beside.cuh").write_text('#include "../deeper/../extra.cuh"\n')
    (root / "deeper" / "root.cuh").write_text('#include "nvrtc_attn/extra.cuh"\n')
    seen = []
    # Not there yet, there, edited, and in a circle.
    for content in (None, "// one\n", "// two\n", '#include "deeper/beside.cuh"\n'):
        if content is not None:
            (root / "extra.cuh").write_text(content)
        seen.append({name: headers.Snapshot().digest(source) for name, source in sources.items()})
    for name in sources:
        assert len({digests[name] for digests in seen}) == len(seen), name
    shutil.rmtree(root / "deeper")
    (root / "extra.cuh").unlink()
    assert headers.Snapshot().digest(sources["angle"]) == seen[0]["angle"]


def test_a_file_beside_the_including_one_comes_before_one_of_the_root(install: Path) -> None:
    root = install / "_include" / "nvrtc_attn"
    (root / "deeper" / "nvrtc_attn").mkdir(parents=True)
    (root / "deeper" / "a.cuh").write_text('#include "nvrtc_attn/params.cuh"\n')
    before = headers.Snapshot().digest("#include <nvrtc_attn/deeper/a.cuh>")
    (root / "deeper" / "nvrtc_attn" / "params.cuh").write_text("// hides the other one\n")
    after = headers.Snapshot().digest("#include <nvrtc_attn/deeper/a.cuh>")
    assert after != before
    (root / "params.cuh").write_text("// hidden\n")
    assert headers.Snapshot().digest("#include <nvrtc_attn/deeper/a.cuh>") == after


def test_an_include_that_the_digest_cannot_follow_is_refused(install: Path) -> None:
    with pytest.raises(CompileError, match="cannot follow `#include PARAMS`"):
        headers.Snapshot().digest("#define PARAMS <nvrtc_attn/params.cuh>\n#include PARAMS\n")
    extra = install / "_include" / "nvrtc_attn" / "extra.cuh"
    extra.write_text("#include \\\n  <nvrtc_attn/params.cuh>\n")
    with pytest.raises(CompileError, match=r"nvrtc_attn/extra\.cuh"):
        headers.Snapshot().digest("#include <nvrtc_attn/extra.cuh>")
    # Words about it are none.
    assert headers.Snapshot().digest("// what #include does\n") == headers.Snapshot().digest("")


def test_a_snapshot_looks_at_a_file_once(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    real = headers._stamp
    monkeypatch.setattr(headers, "_stamp", lambda path: looked_at.append(path) or real(path))
    seen = headers.Snapshot()
    assert [seen.digest(entry(kernel)) for kernel in ("delta", "combine", "delta")] == [
        headers.Snapshot().digest(entry(kernel)) for kernel in ("delta", "combine", "delta")
    ]
    looked_at.clear()
    seen = headers.Snapshot()
    for kernel in ("delta", "combine", "delta"):
        seen.digest(entry(kernel))
    assert len(looked_at) == len(set(looked_at))
    wide = [path for path in looked_at if "hopper" in path and "nvrtc_attn" in path]
    assert wide == [], "a kernel's digest does not look at what other kernels include"


def test_digest_of_the_bundle_is_the_manifest_s(install: Path) -> None:
    for name, package in headers._manifest()["packages"].items():
        base = install / "_include" / package["path"]
        files = headers._digest_files(base, headers._files_below(base))
        assert files == package["files"], name
        assert hatch_build.tree_digest(files) == package["digest"]


def test_modified_headers_are_found(install: Path) -> None:
    assert headers.modified_headers() == []
    with (install / "_include" / "cutlass" / "cute" / "layout.hpp").open("a") as file:
        file.write("\n")
    (install / "_include" / "nvidia" / "cccl" / "nv" / "target").unlink()
    assert headers.modified_headers() == ["cutlass/cute/layout.hpp", "nvidia/cccl/nv/target"]


def test_digest_is_fast(library: nvrtc_library.Nvrtc) -> None:
    def measure() -> float:
        headers._file_digests.clear()
        headers._own_headers.clear()
        start = time.process_time()
        headers.Snapshot().digest(entry("backward_hopper_wide"))
        return time.process_time() - start

    def read(*, contents: bool) -> float:
        start = time.process_time()
        for path in paths:
            path.stat()
            if contents:
                hashlib.sha256(path.read_bytes()).digest()
        return time.process_time() - start

    # Beside reading or asking for the same files: 1.5 and 3.4 times. Processor time, because tests share the machine.
    first = min(measure() for _ in range(10))
    paths = [Path(path) for path in headers._file_digests]
    assert len(paths) > 100
    assert first < 4 * min(read(contents=True) for _ in range(10))
    start = time.process_time()
    for _ in range(10):
        headers.Snapshot().digest(entry("backward_hopper_wide"))
    assert (time.process_time() - start) / 10 < 8 * min(read(contents=False) for _ in range(10))


def test_cuda_headers_cover_what_the_bundle_may_include(library: nvrtc_library.Nvrtc) -> None:
    """The hand-written list against the include closure of the installed CUDA headers."""
    bundle = [root.directories[0] for root in headers.roots()[:3]]
    sources = [path for root in bundle for path in root.rglob("*") if path.suffix in (".h", ".hpp", ".cuh", "")]
    cuda = headers.cuda_root(library).directories[0].resolve()
    files, _ = hatch_build.closure([path for path in sources if path.is_file()], [*bundle, cuda])
    found = {path.relative_to(cuda).as_posix() for path in files if path.is_relative_to(cuda)}
    # A toolkit has crt/, whose own includes are device code that NVRTC brings built in.
    assert {name for name in found if not name.startswith("crt/")} <= set(headers.CUDA_HEADERS)
    assert "cuda_bf16.hpp" in found


@pytest.mark.reliability(96)
def test_missing_nvrtc_says_where_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    pytest.importorskip("cuda.bindings.nvrtc")  # keeps the function that it imports
    monkeypatch.setattr(nvrtc_library, "_nvrtc", None)
    monkeypatch.setattr(nvrtc_library, "_packaged_nvrtc", lambda: None)

    def not_found(name: str) -> None:
        raise RuntimeError("No such file: libnvrtc.so*; searched in: /somewhere/nvidia/cu13/lib")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", not_found)
    with pytest.raises(CompileError, match="/somewhere/nvidia/cu13/lib") as caught:
        headers.include_roots()
    assert 'pip install "nvrtc-attn[cu13]"' in str(caught.value)


def _fake_cuda(directory: Path, version: int) -> Path:
    directory.mkdir(parents=True)
    (directory / "cuda_fp16.h").write_text("")
    (directory / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    return directory


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any CUDA headers."""
    pathfinder = pytest.importorskip("cuda.pathfinder")
    monkeypatch.setattr(headers, "_cuda_roots", {})
    monkeypatch.setattr(headers.site, "getsitepackages", lambda: [str(tmp_path / "site")])
    monkeypatch.setattr(headers.site, "getusersitepackages", lambda: str(tmp_path / "user"))
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.reliability(97)
@pytest.mark.parametrize(("name", "probe"), [("cutlass", "cute/layout.hpp"), ("cccl", "cuda/std/cstdint")])
def test_missing_bundled_headers_say_which_where_and_how(
    name: str, probe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged wheel, or a checkout that was not installed: found before NVRTC prints a page of errors."""
    directories = {"cutlass": tmp_path / "cutlass", "cccl": tmp_path / "nvidia" / "cccl"}
    for other, file in (("cutlass", "cute/layout.hpp"), ("cccl", "cuda/std/cstdint")):
        (directories[other] / file).parent.mkdir(parents=True)
        (directories[other] / file).touch()
    monkeypatch.setattr(headers, "INCLUDE_DIR", tmp_path)
    monkeypatch.delenv("NVRTC_ATTN_CUTLASS_DIR", raising=False)
    assert [root.name for root in headers._bundled_roots()] == ["cutlass", "cccl"]
    (directories[name] / probe).unlink()
    with pytest.raises(CompileError, match=rf"^{name} headers are missing") as caught:
        headers._bundled_roots()
    assert str(directories[name]) in str(caught.value)
    assert "pip install" in str(caught.value)


@pytest.mark.reliability(96)
def test_missing_cuda_headers_list_the_searched_places_and_the_extra(nowhere: Path) -> None:
    library = nvrtc_library.Nvrtc((12, 9), str(nowhere / "site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))
    with pytest.raises(CompileError, match=r"NVRTC 12\.9") as caught:
        headers.cuda_root(library)
    message = str(caught.value)
    assert str(nowhere / "site/nvidia/cuda_runtime/include") in message
    assert str(nowhere / "user/nvidia/cuda_runtime/include") in message
    assert 'pip install "nvrtc-attn[cu12]"' in message


@pytest.mark.reliability(96)
def test_two_installed_majors_are_told_apart(nowhere: Path) -> None:
    packages = nowhere / "site" / "nvidia"
    thirteen = _fake_cuda(packages / "cu13" / "include", 13000)
    twelve = _fake_cuda(packages / "cuda_runtime" / "include", 12090)
    of_13 = nvrtc_library.Nvrtc((13, 0), f"{packages}/cu13/lib/libnvrtc.so.13")
    of_12 = nvrtc_library.Nvrtc((12, 9), f"{packages}/cuda_nvrtc/lib/libnvrtc.so.12")
    assert headers.cuda_root(of_13).directories == (thirteen,)
    assert headers.cuda_root(of_12).directories == (twelve,)


@pytest.mark.reliability(96)
def test_headers_of_the_wrong_major_are_refused_by_name(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = _fake_cuda(nowhere / "toolkit" / "include", 12090)
    monkeypatch.setenv("CUDA_HOME", str(toolkit.parent))
    with pytest.raises(CompileError, match="CUDA 12") as caught:
        headers.cuda_root(nvrtc_library.Nvrtc((13, 0), "/elsewhere/a/b/libnvrtc.so.13"))
    assert f"{toolkit} (CUDA_HOME): CUDA 12" in str(caught.value)


def test_toolkit_of_the_system_is_found_through_cuda_home(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = _fake_cuda(nowhere / "toolkit" / "include", 13010)
    library = nvrtc_library.Nvrtc((13, 1), "/elsewhere/a/b/libnvrtc.so.13")
    monkeypatch.setenv("CUDA_PATH", str(toolkit.parent))
    assert headers.cuda_root(library) == headers.Root("cuda", (toolkit,), "CUDA_PATH")
    beside = nvrtc_library.Nvrtc((13, 1), str(toolkit.parent / "lib64" / "libnvrtc.so.13"))
    assert headers.cuda_root(beside).origin == "beside NVRTC"


def test_cutlass_dir_replaces_the_bundled_headers(
    install: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = headers.header_digest()
    other = tmp_path / "checkout" / "include"
    shutil.copytree(install / "_include" / "cutlass", other)
    monkeypatch.setenv("NVRTC_ATTN_CUTLASS_DIR", str(other.parent))
    assert other in headers.include_roots()
    assert headers.header_digest() == before  # the same bytes are the same headers
    (other / "cute" / "layout.hpp").write_text("// another version\n")
    assert headers.header_digest() != before


def test_a_damaged_install_says_so(install: Path) -> None:
    shutil.rmtree(install / "_include" / "nvrtc_attn")
    with pytest.raises(CompileError, match="device code is missing"):
        headers.roots()
