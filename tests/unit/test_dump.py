"""``NVRTC_ATTN_DUMP``: what is written for a kernel that is compiled, found on disk, or refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvrtc_attn.base import log
from nvrtc_attn.base.errors import CompileError
from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit.compile import compile_source

pytest.importorskip("cuda.bindings.nvrtc")
SOURCE = 'extern "C" __global__ void attention_entry() {}  // test_dump'


@pytest.fixture
def dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory, not made yet; NVRTC takes no time, and neither memory nor disk knows a kernel."""
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("NVRTC_ATTN_DUMP", str(tmp_path / "deep" / "dump"))
    monkeypatch.setattr(compiler, "run_nvrtc", lambda *_: (b"\x7fELF code", "a log"))
    compiler._memory.clear()
    yield tmp_path / "deep" / "dump"
    compiler._memory.clear()


def check(directory: Path, key: str) -> None:
    files = {path.suffix: path.read_bytes() for path in directory.iterdir()}
    assert {path.stem for path in directory.iterdir()} == {f"kernel-{key[:16]}"}
    assert files[".cu"].decode() == SOURCE
    assert files[".cubin"] == b"\x7fELF code"
    options, text = files[".log"].decode().splitlines()
    assert options.startswith("options: --gpu-architecture=sm_80 ")
    assert text == "a log"


def test_a_compiled_kernel_and_one_from_the_disk_are_written(dumped: Path) -> None:
    compiled = compile_source(SOURCE, "sm_80")
    check(dumped, compiled.key)
    for path in dumped.iterdir():
        path.unlink()
    compile_source(SOURCE, "sm_80")  # from memory: it has been written
    assert not list(dumped.iterdir())
    compiler._memory.clear()
    assert compile_source(SOURCE, "sm_80").cached
    check(dumped, compiled.key)


def test_a_refused_kernel_leaves_source_and_log(dumped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, arch: str, options: tuple[str, ...], *_: Any) -> tuple[bytes, str]:
        raise CompileError("NVRTC refused the kernel", "entry(1): error: no", source, options)

    monkeypatch.setattr(compiler, "run_nvrtc", refuse)
    with pytest.raises(CompileError):
        compile_source(SOURCE, "sm_80")
    files = {path.suffix: path.read_text() for path in dumped.iterdir()}
    assert set(files) == {".cu", ".log"}
    assert "entry(1): error: no" in files[".log"]


def test_a_directory_that_cannot_be_written_is_one_warning(
    dumped: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "_said", set())
    dumped.parent.write_text("a file where a directory should be")
    with caplog.at_level(logging.WARNING, "nvrtc_attn"):
        assert compile_source(SOURCE, "sm_80").code == b"\x7fELF code"
        compile_source(SOURCE + " ", "sm_80")
    assert [record.getMessage().startswith("NVRTC_ATTN_DUMP: ") for record in caplog.records] == [True]


def test_nothing_is_written_unless_asked(dumped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVRTC_ATTN_DUMP")
    compile_source(SOURCE, "sm_80")
    assert not dumped.exists()
