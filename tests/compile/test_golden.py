"""The golden table of machine code: no change of a kernel gets past it. test_selection.py sees that it is whole."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import golden
import pytest
from child_environment import python_path
from config_variants import config_variants

from nvrtc_attn.base.errors import CompileError
from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit import headers, worker_pool
from nvrtc_attn.jit.compile import CompiledKernel, compile_kernel, nvrtc_build
from nvrtc_attn.jit.config import BackwardConfig, DbiasConfig, Features, KernelConfig

pytest.importorskip("cuda.bindings.nvrtc")

# The smallest kernel of all: a sum, 0.3 s to compile.
SMALLEST = DbiasConfig(
    kernel="dbias_reduce", arch="sm_90", dtype="bfloat16", head_dim=64, head_dim_v=64, block_m=64, block_n=64,
    num_warps=4, num_stages=2, dbias_dtype="bfloat16", features=Features(bias="bfloat16"),
)  # fmt: skip


def test_the_table_is_of_the_nvrtc_that_is_installed() -> None:
    table = golden.read()
    if table.nvrtc != nvrtc_build():
        pytest.skip(f"machine code is compared with NVRTC {table.nvrtc} only; installed is {nvrtc_build()}")
    assert golden.text_of(table) == golden.TABLE.read_text(encoding="utf-8"), "edited by hand"


def test_every_field_is_in_the_name_of_a_variant() -> None:
    config = BackwardConfig(
        kernel="backward_portable", arch="sm_80", dtype="float16", head_dim=64, head_dim_v=64, block_m=64, block_n=64,
        num_warps=4, features=Features(band=True),
    )  # fmt: skip
    names = [golden.variant(config), *(golden.variant(changed) for _, changed in config_variants(config))]
    assert len(set(names)) == len(names) > 30
    assert names[0] == "backward_portable sm_80 float16 d64 64x64 num_warps=4 band"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what `SMALLEST` includes of the device code, which `headers` uses. Nothing else is there."""
    seen = headers.Snapshot()
    seen.digest(f"#include <nvrtc_attn/kernel/{SMALLEST.kernel}.cuh>")
    own = headers._own_root()
    for name in (name for name, header in seen._own.items() if header is not None):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(own.directories[0] / name, tmp_path / name)
    monkeypatch.setattr(headers, "_own_root", lambda: headers.Root(own.name, (tmp_path,), "test"))
    monkeypatch.setattr(compiler, "_memory", type(compiler._memory)())
    return tmp_path


def test_a_changed_header_is_seen(tree: Path) -> None:
    """And what the cache key covers is all that a compile reads of our code."""
    before = compile_kernel(SMALLEST)
    table = golden.Table(nvrtc_build(), {golden.variant(SMALLEST): golden.line(before)})
    golden.check([SMALLEST], table)
    path = tree / "nvrtc_attn" / "kernel" / f"{SMALLEST.kernel}.cuh"
    text = path.read_text()
    path.write_text("// Another line, and no other instruction.\n" + text)
    assert compile_kernel(SMALLEST).key != before.key
    golden.check([SMALLEST], table)
    assert "= 0.0f;" in text
    path.write_text(text.replace("= 0.0f;", "= 1.0f;"))
    with pytest.raises(AssertionError) as caught:
        golden.check([SMALLEST], table)
    lines = str(caught.value).splitlines()
    assert [line[:2] for line in lines[1:3]] == ["- ", "+ "]
    assert lines[1] == f"- {table.lines[golden.variant(SMALLEST)]}"
    assert "python tests/golden.py --update" in lines[-1]
    assert "why" in lines[-1]


def test_a_kernel_that_the_table_lacks_is_named() -> None:
    table = golden.Table(nvrtc_build(), {})
    with pytest.raises(AssertionError, match=r"\n\+ [0-9a-f]{16} .*dbias_reduce sm_90"):
        golden.check([SMALLEST], table)


def test_nothing_is_compared_with_code_of_another_nvrtc() -> None:
    golden.check([SMALLEST], golden.Table("13.9 another", {}))


def test_the_hash_is_of_the_instructions_only() -> None:
    kernel = compile_kernel(SMALLEST)
    start = kernel.code.index(b"\0.text.")
    named = kernel.code[: start + 7] + b"z" + kernel.code[start + 8 :]
    assert golden.machine_code(named) == golden.machine_code(kernel.code)
    other = dataclasses.replace(SMALLEST, dbias_dtype="float16", features=Features(bias="float16"))
    assert golden.machine_code(compile_kernel(other).code) != golden.machine_code(kernel.code)
    with pytest.raises(AssertionError, match="without instructions"):
        golden.machine_code(kernel.code.replace(b".text.", b".test."))


def test_kernels_that_read_the_same_headers_are_compiled_in_a_row() -> None:
    """A row is one compiler process's: one kind, and no row is what the others wait for."""
    others = [
        dataclasses.replace(SMALLEST, arch=arch, num_warps=warps) for warps in (2, 4, 8) for arch in ("sm_80", "sm_90")
    ]
    backward = [BackwardConfig(
        kernel="backward_portable", arch="sm_80", dtype="float16", head_dim=64, head_dim_v=64, block_m=64, block_n=64,
        num_warps=4,
    )]  # fmt: skip
    rows = golden.rows_of_one_kind([*others, *backward], most=2)
    assert [config for row in rows for config in row if config in others] != others  # they came in turn
    assert sorted(map(golden.variant, [c for row in rows for c in row])) == sorted(
        map(golden.variant, others + backward)
    )
    assert [{config.arch for config in row} for row in rows].count({"sm_80", "sm_90"}) == 0
    assert [len(row) for row in rows] == [1, 2, 2, 1, 1]
    assert rows[0] == backward


def test_a_kernel_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: KernelConfig) -> CompiledKernel:
        raise CompileError("no", "", "", ())

    monkeypatch.setattr(golden, "compile_kernel", refuse)
    monkeypatch.setattr(worker_pool, "_pool", worker_pool.WorkerPool())
    with pytest.raises(SystemExit, match=f"^{golden.variant(SMALLEST)}: no"):
        golden.compile_all([SMALLEST], 1)


def test_a_test_whose_kernel_is_another_fails(tmp_path: Path, repository: Path) -> None:
    """The comparison behind every test of this directory, in a run with an empty table."""
    (tmp_path / "table.txt").write_text(golden.text_of(golden.Table(nvrtc_build(), {})))
    (tmp_path / "other_table.py").write_text(
        f"import golden, pathlib\ngolden.TABLE = pathlib.Path({str(tmp_path / 'table.txt')!r})\n"
    )
    variables = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    test = "test_rows_are_prepared_by_a_thread_for_one_or_two_vectors[32-2]"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "other_table", "-p", "no:cacheprovider", "-q",
         f"tests/compile/test_hopper_backward_variants.py::{test}"],
        cwd=repository, capture_output=True, text=True, check=False,
        env={**variables, "PYTHONPATH": python_path(repository / "tests", tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "machine code is not that of table.txt" in done.stdout
    assert "backward_hopper_prepare sm_90a" in done.stdout
