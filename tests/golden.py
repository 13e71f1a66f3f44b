"""The golden table: a hash of the machine code of every kernel that tests/compile compiles, so that a diff shows them.

A line of `TABLE` has the first 16 digits of the SHA-256 of a cubin's instructions, the registers of a thread, the bytes
it spills, and the variant. tests/compile compares each kernel with its line when it has been compiled anyway. Another
NVRTC makes other code: with one that the table is not of, nothing is compared, and test_golden.py says so.

    python tests/golden.py                     compare all kernels: 11 minutes of 2 cores without a cache
    python tests/golden.py --turn 7            compare those of tests that `pytest --full --turn 7` runs
    python tests/golden.py --update            write the table anew; the commit must say why machine code changed
    python tests/golden.py --update forward    only the lines with these words, for example while an edit is tried

NVRTC_ATTN_PCH_DIR=DIRECTORY takes 40 % of that time away: kernels that read the same headers are compiled in a row.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from child_environment import python_path

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent))  # as a script; pytest has it there already

from nvrtc_attn.base.errors import CompileError  # noqa: E402
from nvrtc_attn.jit import worker_pool  # noqa: E402
from nvrtc_attn.jit.codegen import entry_source  # noqa: E402
from nvrtc_attn.jit.compile import CompiledKernel, compile_kernel, compile_kernels, nvrtc_build  # noqa: E402
from nvrtc_attn.jit.config import Features, KernelConfig  # noqa: E402
from nvrtc_attn.jit.config_text import config_from_json, config_to_json  # noqa: E402
from nvrtc_attn.plans.precompile import worker_count  # noqa: E402

TABLE = TESTS / "golden" / "machine_code.txt"
_NVRTC = "# NVRTC "
_ACCEPT = "If that is meant, run `python tests/golden.py --update` and say in the commit's message why."
_HASH_DIGITS = 16


class Table(NamedTuple):
    """``nvrtc`` is the build that the lines are of, as in cache keys."""

    nvrtc: str
    lines: dict[str, str]
    """By variant."""


def read() -> Table:
    """The table that is committed."""
    head, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert head.startswith(_NVRTC), f"{TABLE} does not begin with the build of NVRTC that it is of"
    return Table(head.removeprefix(_NVRTC), {line.split(maxsplit=3)[3]: line for line in lines})


def text_of(table: Table) -> str:
    """The file of ``table``: sorted, one kernel a line."""
    return "\n".join([_NVRTC + table.nvrtc, *(table.lines[name] for name in sorted(table.lines)), ""])


def machine_code(cubin: bytes) -> str:
    """Hash of the instructions in ``cubin``, an ELF file: its sections ``.text.*``, without line tables and names."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<3H", cubin, 0x3A)
    # Name, offset and size of every section.
    sections = [struct.unpack_from("<I20xQQ", cubin, table + i * size) for i in range(count)]
    names = cubin[sections[names_at][1] :]
    digest, found = hashlib.sha256(), 0
    for name, offset, length in sections:
        if names.startswith(b".text.", name):
            digest.update(cubin[offset : offset + length])
            found += 1
    assert found, "a cubin without instructions"
    return digest.hexdigest()[:_HASH_DIGITS]


def variant(config: KernelConfig) -> str:
    """``config`` in words: what every kernel has, then the fields that differ from their defaults."""
    dims = f"d{config.head_dim}" + (f"/{config.head_dim_v}" if config.head_dim_v != config.head_dim else "")
    words = [config.kernel, config.arch, config.dtype, dims, f"{config.block_m}x{config.block_n}"]
    shown = {"kernel", "arch", "dtype", "head_dim", "head_dim_v", "block_m", "block_n", "features"}
    for part in (config, config.features):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if value != field.default and (isinstance(part, Features) or field.name not in shown):
                words.append(field.name if value is True else f"{field.name}={value}")
    return " ".join(words)


def line(kernel: CompiledKernel) -> str:
    """The line of the table that ``kernel`` should have."""
    assert kernel.config is not None
    name = variant(kernel.config)
    return f"{machine_code(kernel.code)} {kernel.num_regs:3} {kernel.spill_bytes:3} {name}"


def differences(table: Table, kernels: Iterable[CompiledKernel]) -> list[str]:
    """Lines that a diff of the table would have for ``kernels``."""
    found = []
    for kernel in kernels:
        new = line(kernel)
        old = table.lines.get(new.split(maxsplit=3)[3])
        if old != new:
            found += [f"- {old}"] if old is not None else []
            found.append(f"+ {new}")
    return found


def check(configs: Sequence[KernelConfig], table: Table) -> None:
    """Fail where the kernels of ``configs``, which have been compiled just now, are not those of ``table``."""
    if table.nvrtc != nvrtc_build():
        return
    changed = differences(table, compile_kernels(configs))
    assert not changed, "\n".join([f"machine code is not that of {TABLE.name}:", *changed, _ACCEPT])


# ------------------------------------------------------------------------------------------ what tests/compile compiles


def configs_of(item: Any, *, only_table: bool = True) -> list[KernelConfig]:
    """The kernels that a test says it compiles, by its mark ``compiles``; by default none that the table leaves out."""
    from nvrtc_attn.base.errors import UnsupportedError

    mark = item.get_closest_marker("compiles")
    if mark is None or (only_table and not mark.kwargs.get("in_table", True)):
        return []
    try:
        callspec = getattr(item, "callspec", None)  # of a test with parameters
        return list(mark.kwargs["kernels"](**(callspec.params if callspec else {})))
    except UnsupportedError:  # the test skips it
        return []


class Collector:
    """A plugin of pytest that lists what is collected: tests that run and that are left out, and their kernels."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.found: dict[str, list[dict[str, Any]]] = {"run": [], "left_out": []}

    @staticmethod
    def describe(item: Any) -> dict[str, Any]:
        samples = [name for mark in item.iter_markers("slow") for name in mark.kwargs.get("sample", ())]
        kernels = [config_to_json(config) for config in dict.fromkeys(configs_of(item))]
        return {"name": item.nodeid, "function": item.nodeid.split("[")[0], "sample": samples, "kernels": kernels}

    def pytest_deselected(self, items: list[Any]) -> None:
        self.found["left_out"] += map(self.describe, items)

    def pytest_collection_finish(self, session: Any) -> None:
        self.found["run"] += map(self.describe, session.items)
        self.target.write_text(json.dumps(self.found))


def pytest_configure(config: Any) -> None:
    """As a plugin, ``-p golden``: writes what is collected to the file that the environment names."""
    if "COLLECTED" in os.environ:
        config.pluginmanager.register(Collector(Path(os.environ["COLLECTED"])))


def collect(*arguments: str) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """What a run of pytest with ``arguments`` would run and leave out, and its output."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "collected.json"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "golden", "--collect-only", "-q", *arguments],
            cwd=TESTS.parent, capture_output=True, text=True, check=False,
            env={**{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
                 "PYTHONPATH": python_path(TESTS), "COLLECTED": str(target)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads(target.read_text()), done.stdout


def all_configs(*arguments: str) -> list[KernelConfig]:
    """Every kernel that tests/compile compiles with ``--full``, each once, the slowest to compile first."""
    found, _ = collect("--full", *arguments, "tests/compile")
    kernels = dict.fromkeys(config_from_json(text) for test in found["run"] for text in test["kernels"])
    # One machine code, one line: a variant's name says all that its source does.
    by_name = {variant(config): config for config in kernels}
    assert len(by_name) == len({entry_source(config) for config in kernels})
    slow = ("backward_hopper_wide", "backward_hopper", "backward_portable", "forward")
    rank = {config: next((i for i, name in enumerate(slow) if config.kernel.startswith(name)), 9) for config in kernels}
    return sorted(by_name.values(), key=lambda config: (rank[config], -config.head_dim))


def rows_of_one_kind(configs: Sequence[KernelConfig], most: int = 32) -> list[list[KernelConfig]]:
    """``configs`` in rows for one compiler process each, the longest to compile first.

    Kernels of a row read the same headers, for the same target: what `NVRTC_ATTN_PCH_DIR` makes the process read once.
    """
    kinds: dict[tuple[str, str], list[KernelConfig]] = {}
    for config in configs:
        kinds.setdefault((config.kernel, config.arch), []).append(config)
    rows = [found[start : start + most] for found in kinds.values() for start in range(0, len(found), most)]
    products = ("forward", "backward")  # 1 to 10 s a kernel, others 0.1 to 0.3
    return sorted(rows, key=lambda row: -len(row) * (10 if row[0].kernel.startswith(products) else 1))


def compile_all(configs: Sequence[KernelConfig], jobs: int | None) -> dict[str, str]:
    """The lines of ``configs``, compiled in parallel or from the cache."""
    jobs = worker_count(len(configs)) if jobs is None else jobs
    lines: dict[str, str] = {}
    end = "\r" if sys.stderr.isatty() else "\n"

    def compile_row(row: list[KernelConfig]) -> dict[str, str]:
        found = {}
        for config in row:
            try:
                found[variant(config)] = line(compile_kernel(config))
            except CompileError as error:
                raise SystemExit(f"{variant(config)}: {error}") from None
        return found

    worker_pool.pool().limit = jobs
    # A thread gives its process back and takes it again at once: the pool hands out the one that was idle last.
    with ThreadPoolExecutor(jobs) as threads:
        try:
            for row in as_completed([threads.submit(compile_row, row) for row in rows_of_one_kind(configs)]):
                lines |= row.result()
                print(f"{len(lines)} of {len(configs)} kernels", end=end, file=sys.stderr, flush=True)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only variants with all of these words in them")
    parser.add_argument("--update", action="store_true", help="write the table")
    parser.add_argument("--turn", help="leave out tests that have passed with the same sources: see fingerprints.py")
    parser.add_argument("--jobs", type=int, help="kernels that compile at a time; default: one per core")
    options = parser.parse_args(arguments)
    if options.update and options.turn is not None:
        parser.error("--update writes what was compiled, and --turn leaves kernels out: pass one of them")
    every = all_configs(*([] if options.turn is None else ["--turn", options.turn]))
    configs = [config for config in every if all(word in variant(config) for word in options.words)]
    known = read() if TABLE.is_file() else Table(nvrtc_build(), {})
    if known.nvrtc != nvrtc_build() and (options.words or not options.update):
        raise SystemExit(f"the table is of NVRTC {known.nvrtc}, the one that is installed is {nvrtc_build()}")
    lines = compile_all(configs, options.jobs)
    kept = {
        name: text
        for name, text in known.lines.items()
        if not all(word in name for word in options.words) or (options.turn is not None and name not in lines)
    }
    new = Table(nvrtc_build(), {**kept, **lines})
    before, after = text_of(known).splitlines(), text_of(new).splitlines()
    changes = [
        text for text in difflib.unified_diff(before, after, "table", "now", n=0, lineterm="") if text[:2] != "@@"
    ]
    print("\n".join(changes) if changes else f"{len(lines)} kernels are as the table says")
    if options.update:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(text_of(new), encoding="utf-8")
    return 0 if options.update else int(bool(changes))


if __name__ == "__main__":
    raise SystemExit(main())
