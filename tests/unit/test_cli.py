"""The command line, above all on machines where something is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from child_environment import python_path
from click.testing import CliRunner, Result
from fake_driver import FakeDriver, FakeGpu, installed

from nvrtc_attn import collect_env, commands
from nvrtc_attn.base import env
from nvrtc_attn.base.architectures import PORTABLE_ARCHITECTURES
from nvrtc_attn.base.errors import CompileError
from nvrtc_attn.commands import main
from nvrtc_attn.doctor import show
from nvrtc_attn.jit import config_text
from nvrtc_attn.jit.cache import kernel_cache
from nvrtc_attn.jit.config import BackwardConfig, Features, ForwardConfig, KernelConfig
from nvrtc_attn.plans import precompile

SECTIONS = {"package", "environment", "driver", "gpus", "nvrtc", "headers", "cache", "frameworks", "sdpa", "problems"}


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


ROOT = Path(__file__).resolve().parents[2]
COMMAND_LINE = ("-m", "nvrtc_attn")
PROGRAM = ("-c", "from nvrtc_attn.__main__ import main; main()")
"""What the installed script ``nvrtc-attn`` does."""


def run(*arguments: str, start: tuple[str, ...] = COMMAND_LINE, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """The command line in a process of its own; an empty value removes the variable."""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), **variables}
    environment = {name: value for name, value in environment.items() if value}
    done = subprocess.run([sys.executable, *start, *arguments], capture_output=True, env=environment, check=False)
    assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")
    return done


def doctor(start: tuple[str, ...] = COMMAND_LINE, **variables: str) -> dict[str, Any]:
    """``doctor --json`` in a process of its own."""
    done = run("doctor", "--json", start=start, **variables)
    report: dict[str, Any] = json.loads(done.stdout.decode("ascii"))
    assert set(report) == SECTIONS
    assert done.returncode == (1 if report["problems"] else 0)
    return report


@pytest.mark.reliability(73, 101)
def test_doctor_without_a_gpu_is_a_problem_not_a_crash() -> None:
    report = doctor(CUDA_VISIBLE_DEVICES="-1")
    assert report["gpus"] == []
    assert any("only the CPU path" in problem for problem in report["problems"])
    assert report["package"]["version"]


@pytest.mark.reliability(101)
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NVRTC_ATTN_CACHE_SIZE": "a lot"}, "NVRTC_ATTN_CACHE_SIZE='a lot'"),
        ({"NVRTC_ATTN_NO_COMPILE": "perhaps", "NVRTC_ATTN_BACKEND": "?"}, "NVRTC_ATTN_BACKEND='?'"),
        ({"NVRTC_ATTN_CACHE_DIR": "relative"}, "NVRTC_ATTN_CACHE_DIR='relative'"),
        ({"NVRTC_ATTN_CUTLASS_DIR": "/nonexistent"}, "NVRTC_ATTN_CUTLASS_DIR='/nonexistent'"),
        ({"NVRTC_ATTN_DUMP": "relative"}, "NVRTC_ATTN_DUMP='relative'"),
        ({"NVRTC_ATTN_PCH_DIR": "relative"}, "NVRTC_ATTN_PCH_DIR='relative'"),
        ({"HOME": "/", "XDG_CACHE_HOME": "", "NVRTC_ATTN_CACHE_DIR": ""}, "no home directory"),
        ({"NVRTC_ATTN_CACHE_DIR": "/dev/null"}, "not a directory"),
        ({"NVRTC_ATTN_CACHE_DIR": "/dev/null/kernels"}, "cache: /dev/null/kernels"),
        ({"NVRTC_ATTN_CACHE_DIR": "/" + "x" * 5000}, "cache"),
    ],
)
def test_doctor_with_a_broken_environment(variables: dict[str, str], expected: str) -> None:
    report = doctor(**variables)
    assert any(expected in problem for problem in report["problems"]), report["problems"]


@pytest.mark.reliability(101)
def test_the_doctor_reads_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.ACCESSORS:
        monkeypatch.setenv(name, "no such value")
    problems: list[str] = []
    collect_env._environment({}, problems)
    assert [problem.partition("=")[0] for problem in problems] == [f"environment: {name}" for name in env.ACCESSORS]


@pytest.mark.reliability(101)
def test_doctor_with_bytes_that_are_no_text() -> None:
    report = doctor(NVRTC_ATTN_BACKEND=os.fsdecode(b"\xff\xfe"), PYTHONIOENCODING="ascii")
    assert report["environment"]["NVRTC_ATTN_BACKEND"] == os.fsdecode(b"\xff\xfe")
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": python_path(root), "NVRTC_ATTN_BACKEND": os.fsdecode(b"\xff")}
    for encoding in ("ascii", "utf-8"):
        command = [sys.executable, "-m", "nvrtc_attn", "doctor"]
        environment["PYTHONIOENCODING"] = encoding
        done = subprocess.run(command, capture_output=True, env=environment, check=False)
        assert done.returncode == 1
        assert b"NVRTC_ATTN_BACKEND" in done.stdout
        assert b"Traceback" not in done.stderr


@pytest.mark.reliability(101)
@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of POSIX")
def test_doctor_with_an_unreadable_cache(tmp_path: Path) -> None:
    """Root reads every directory, and becomes another user first, who finds a directory that is not his."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    code = (
        "import os, sys\n"
        "from nvrtc_attn import collect_env, doctor; from nvrtc_attn.jit import headers\n"
        "if os.geteuid() == 0:\n"
        "    os.setgid(12345); os.setuid(12345)\n"
        "sys.exit(doctor.show(as_json=True))\n"
    )
    done = run(start=("-c", code), NVRTC_ATTN_CACHE_DIR=str(closed))
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert "Permission denied" in report["cache"]["state"]
    assert any(problem.startswith(f"cache: {closed}") for problem in report["problems"])


@pytest.mark.reliability(101)
def test_doctor_with_a_cache_that_is_mounted_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves, and a health check that asks the doctor passes where nothing may be written anyway."""
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(directory))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    monkeypatch.delenv("NVRTC_ATTN_NO_COMPILE", raising=False)
    problems: list[str] = []
    assert collect_env._cache({}, problems)["state"].startswith("read-only: what is in it is used")
    assert len(problems) == 1
    assert str(directory) in problems[0]
    monkeypatch.setenv("NVRTC_ATTN_NO_COMPILE", "1")
    problems.clear()
    assert collect_env._cache({}, problems)["state"].startswith("read-only: what is in it is used")
    assert problems == []


@pytest.mark.reliability(101)
def test_doctor_with_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path / "not" / "there"))
    monkeypatch.delenv("NVRTC_ATTN_NO_COMPILE", raising=False)
    problems: list[str] = []
    assert collect_env._cache({}, problems)["state"] == "absent"
    assert problems == []
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    assert collect_env._cache({}, problems)["state"].startswith("absent, and cannot be made")
    assert len(problems) == 1
    monkeypatch.setenv("NVRTC_ATTN_NO_COMPILE", "1")
    problems.clear()
    collect_env._cache({}, problems)
    assert problems == []


@pytest.mark.reliability(101)
def test_doctor_with_a_cache_that_others_may_write(tmp_path: Path) -> None:
    opened = tmp_path / "open"
    opened.mkdir()
    opened.chmod(0o777)
    report = doctor(NVRTC_ATTN_CACHE_DIR=str(opened))
    assert "others can write" in report["cache"]["state"]
    assert any(str(opened) in problem for problem in report["problems"])


@pytest.mark.reliability(101)
def test_doctor_with_damaged_entries(tmp_path: Path) -> None:
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o700)
    (directory / f"{'0' * 64}.nvat").write_bytes(b"damaged")
    report = doctor(NVRTC_ATTN_CACHE_DIR=str(directory))
    assert (report["cache"]["entries"], report["cache"]["damaged"], report["cache"]["state"]) == (1, 1, "ok")
    assert (directory / f"{'0' * 64}.nvat").exists()  # a doctor looks and does not touch


@pytest.mark.reliability(98, 101)
def test_doctor_with_a_false_cuda_package(tmp_path: Path) -> None:
    """A module that shadows cuda-bindings: every section that needs it fails on its own."""
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("raise OSError('not the real one')\n")
    root = Path(__file__).resolve().parents[2]
    report = doctor(PYTHONPATH=f"{tmp_path}{os.pathsep}{root}")
    assert report["driver"] is None
    assert report["nvrtc"] is None
    assert any("not the real one" in problem for problem in report["problems"])
    assert report["package"]["requirements"]["numpy"]


BROKEN = {
    "absent": "raise ModuleNotFoundError('no such package')",
    "old": "raise RuntimeError('compiled for another version')",
    "rude": "raise SystemExit(3)",
    "torn": "def (",
    "empty": "",
}


@pytest.mark.reliability(101)
@pytest.mark.parametrize(
    "broken",
    [{"numpy": "old"}, {"numpy": "rude", "rich": "absent"}, {"click": "empty"}, {"click": "torn", "numpy": "empty"},
     {"rich": "empty"}, {"rich": "rude"}],
    ids=str,
)  # fmt: skip
def test_doctor_names_a_requirement_that_is_broken(broken: dict[str, str], tmp_path: Path) -> None:
    """F13: the other commands import all of them; the doctor speaks nevertheless, and they say what is wrong."""
    for name, how in broken.items():
        (tmp_path / name).mkdir()
        if how != "empty":  # as pip leaves a package that it could not remove: a directory that imports
            (tmp_path / name / "__init__.py").write_text(BROKEN[how] + "\n")
        else:
            (tmp_path / name / "__init__.py").touch()
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    report = doctor(PYTHONPATH=path)
    for name in broken:
        assert any(problem.startswith(f"{name} is installed and cannot be imported") for problem in report["problems"])
    assert report["nvrtc"]["compiles"], "the other sections are whole"
    for command in (("warmup", "--help"), ("cache", "path"), ()):
        done = run(*command, PYTHONPATH=path)
        assert done.returncode == 1
        assert b"`python -m nvrtc_attn doctor` works without them" in done.stderr


@pytest.mark.reliability(101)
@pytest.mark.parametrize("start", [COMMAND_LINE, PROGRAM], ids=["module", "script"])
def test_doctor_on_the_standard_library_alone(start: tuple[str, ...]) -> None:
    """Nothing at all is installed: -S leaves out site-packages."""
    bare = ("-S", *start)
    report = doctor(start=bare)
    problems = "\n".join(report["problems"])
    for name in report["package"]["requirements"]:
        assert f"{name} is not installed" in problems
    assert report["driver"] is None
    assert report["nvrtc"] is None
    text = run("doctor", start=bare)
    assert text.returncode == 1
    assert b"problem: numpy is not installed" in text.stdout
    assert run("doctor", "--help", start=bare).returncode == 0
    assert run("doctor", "--yaml", start=bare).returncode == 2
    assert b"cannot be imported (ModuleNotFoundError" in run("cache", "clear", start=bare).stderr


def test_the_installed_program_is_the_whole_command_line(repository: Path) -> None:
    assert 'nvrtc-attn = "nvrtc_attn.__main__:main"' in (repository / "pyproject.toml").read_text(encoding="utf-8")
    done = run("cache", "--help", start=PROGRAM)
    assert done.returncode == 0
    assert b"verify" in done.stdout


@pytest.mark.reliability(101)
def test_no_failing_section_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(report: dict[str, Any], problems: list[str]) -> None:
        raise MemoryError("section")

    for name in SECTIONS - {"problems"}:
        monkeypatch.setattr(collect_env, f"_{name}", fail)
    report = collect_env.collect()
    assert set(report) == SECTIONS
    assert len(report["problems"]) == len(SECTIONS) - 1


@pytest.mark.reliability(68, 101)
def test_doctor_shows_every_gpu_and_says_which_cannot_be_used() -> None:
    problems: list[str] = []
    with installed(FakeDriver([FakeGpu((9, 0)), FakeGpu((7, 0), 98304, 80, "Old GPU")], version=12090)):
        report = {"driver": collect_env._driver({}, problems)}
        gpus = collect_env._gpus(report, problems)
    assert report == {"driver": {"cuda_version": "12.9"}}
    assert [(gpu["index"], gpu["compute_capability"], gpu["num_sms"]) for gpu in gpus] == [
        (0, "9.0", 132),
        (1, "7.0", 80),
    ]
    assert gpus[1] == {
        "index": 1, "name": "Old GPU", "compute_capability": "7.0", "num_sms": 80, "smem_bytes": 98304,
        "memory_bytes": 1 << 36,
    }  # fmt: skip
    (problem,) = problems
    assert "Old GPU has compute capability 7.0" in problem
    with installed(FakeDriver(failures={"cuDeviceGetCount": [100]})):
        assert collect_env._gpus(report, problems) == []
    assert "only the CPU path" in problems[1]


@pytest.mark.reliability(66)
def test_doctor_compares_driver_and_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    from nvrtc_attn.jit import nvrtc_library

    monkeypatch.setattr(nvrtc_library, "_nvrtc", nvrtc_library.Nvrtc((13, 0), "libnvrtc.so.13"))
    monkeypatch.setattr(nvrtc, "nvrtcGetSupportedArchs", lambda: (0, [90]))
    monkeypatch.setattr(collect_env, "_compiles", lambda module, arch: True)
    problems: list[str] = []
    collect_env._nvrtc({"driver": {"cuda_version": "12.4"}}, problems)
    assert len(problems) == 1
    assert "CUDA 12.4" in problems[0]
    assert "nvrtc-attn[cu12]" in problems[0]
    problems.clear()
    collect_env._nvrtc({"driver": {"cuda_version": "13.0"}}, problems)
    assert problems == []


@pytest.mark.reliability(96)
def test_doctor_notices_an_nvrtc_that_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(collect_env, "_compiles", lambda module, arch: False)
    problems: list[str] = []
    collect_env._nvrtc({}, problems)
    assert "libnvrtc-builtins" in problems[0]


def test_doctor_says_once_that_there_is_no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers are looked for beside it; their line was the same three lines again."""
    from nvrtc_attn.base.errors import CompileError
    from nvrtc_attn.jit import nvrtc_library

    def missing() -> None:
        raise CompileError("NVRTC is not usable")

    monkeypatch.setattr(nvrtc_library, "nvrtc", missing)
    report = collect_env.collect()
    assert report["nvrtc"] is None
    assert report["headers"] is None
    assert sum("NVRTC is not usable" in problem for problem in report["problems"]) == 1


def test_doctor_says_where_calls_of_sdpa_are_counted() -> None:
    """Each process counts its own: the command line sees none of a program's."""
    done = run("doctor")
    lines = done.stdout.decode().splitlines()
    line = lines[lines.index("sdpa:") + 1]
    assert line.startswith("  counted_in: the process that calls attention, which is not this one.")
    assert "nvrtc_attn.torch.sdpa.report()" in line
    assert "from nvrtc_attn.doctor import show; show()" in line
    assert doctor()["sdpa"] == {"counted_in": line.removeprefix("  counted_in: ")}


def test_what_the_doctor_says_of_counts_is_so_in_a_program() -> None:
    """Both ways that it names, in a process whose calls were taken or left to torch."""
    pytest.importorskip("torch", reason="torch is not installed")
    code = (
        "import torch, nvrtc_attn.torch\n"
        "q = torch.randn(1, 2, 4, 8)\n"
        "with nvrtc_attn.torch.enable_sdpa(all=True, _keys=('CPU',)):\n"
        "    for x in (q, q, q.double()):\n"
        "        torch.nn.functional.scaled_dot_product_attention(x, x, x)\n"
        "from nvrtc_attn.doctor import show; show()\n"
        "print(nvrtc_attn.torch.sdpa.report())\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert "  counted_in: this process\n" in done.stdout
    assert "    scaled_dot_product_attention: 2\n" in done.stdout
    assert "    scaled_dot_product_attention: dtype torch.float64: 1\n" in done.stdout
    assert "'taken': {'scaled_dot_product_attention': 2}" in done.stdout


def test_doctor_shows_the_calls_that_its_own_process_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = {"enabled": ["all"], "taken": {"an operator": 3}, "left_to_torch": {}}
    monkeypatch.setitem(sys.modules, "nvrtc_attn.torch.sdpa", SimpleNamespace(report=lambda: counted))
    show(as_json=False)
    text = capsys.readouterr().out
    assert "an operator: 3" in text
    assert "counted_in: this process" in text


def test_doctor_does_not_import_frameworks() -> None:
    code = (
        "import sys; from nvrtc_attn import collect_env; collect_env.collect(); "
        "print({'torch', 'jax', 'cupy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "set()"


def some_configs() -> list[KernelConfig]:
    common: dict[str, Any] = {"arch": "sm_90", "dtype": "float16", "head_dim": 64, "head_dim_v": 64}
    tile: dict[str, Any] = {"block_m": 64, "block_n": 64, "num_warps": 4}
    return [
        ForwardConfig(kernel="forward_portable", **common, **tile),
        ForwardConfig(kernel="forward_portable", **common, **tile, features=Features(band=True, bias="float32")),
        BackwardConfig(kernel="backward_portable", **common, **tile, dbias="store", dbias_dtype="float32"),
        KernelConfig(kernel="delta", **common, **tile, aligned=False),
    ]


@pytest.mark.reliability(93)
@pytest.mark.parametrize("config", some_configs(), ids=lambda c: c.kernel)
def test_config_survives_json(config: KernelConfig) -> None:
    text = config_text.config_to_json(config)
    assert config_text.config_from_json(text) == config
    assert type(config_text.config_from_json(text)) is type(config)
    assert "\n" not in text
    assert config_text.warmup_command(config).startswith("python -m nvrtc_attn warmup --config '{")


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{}", '{"type":"Config"}', '{"type":"ForwardConfig","kernel":"x"}', "null"]
)
def test_config_from_bad_json(text: str) -> None:
    with pytest.raises(ValueError, match="is not a kernel config"):
        config_text.config_from_json(text)


def test_every_architecture_has_a_reference_gpu() -> None:
    assert set(precompile.REFERENCE_SMS) == set(PORTABLE_ARCHITECTURES)


@pytest.mark.reliability(100)
def test_worker_count_is_bounded_by_memory_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile.worker_pool, "usable_cores", lambda: 16)
    for available, kernels, expected in (
        (1 << 40, 100, 16),
        (1 << 40, 3, 3),
        (1500 << 20, 100, 2),
        (0, 100, 1),
        (-5, 9, 1),
    ):
        monkeypatch.setattr(precompile, "available_memory_bytes", lambda available=available: available)
        assert precompile.worker_count(kernels) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_60"], "'sm_60' is not one of sm_75"),
        (["--arch", "sm_90", "--seqlen", "12y"], "--seqlen '12y'"),
        (["--arch", "sm_90", "--seqlen", "1x"], "--seqlen '1x'"),
        (["--arch", "sm_90", "--seqlen", "0"], "--seqlen '0'"),
        (["--config", "{}"], "is not a kernel config"),
        (["--arch", "sm_90", "--dtype", "float64"], "float64"),
        (["--arch", "sm_90", "--head-dim", "0"], "head-dim"),
    ],
)
def test_warmup_refuses_bad_options(arguments: list[str], message: str) -> None:
    result = invoke("warmup", *arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output


def test_warmup_without_a_dtype_asks_for_what_the_target_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked for bfloat16 on Turing, too, and refused the whole command for it."""
    asked: list[Any] = []

    def compile_nothing(kernels: list[KernelConfig], _jobs: int | None) -> list[Any]:
        asked.extend(kernels)
        return []

    monkeypatch.setattr(commands, "_compile_with_progress", compile_nothing)
    result = invoke("warmup", "--arch", "sm_75", "--arch", "sm_80", "--head-dim", "64", "--seqlen", "64")
    assert result.exit_code == 0, result.output
    assert {(x.arch, x.dtype) for x in asked if x.dtype != "float32"} == {
        ("sm_75", "float16"), ("sm_80", "float16"), ("sm_80", "bfloat16"),
    }  # fmt: skip


def test_warmup_says_once_why_no_kernel_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_nvrtc(_: KernelConfig) -> Any:
        raise CompileError("NVRTC is not usable: not installed")

    monkeypatch.setattr(precompile, "compile_kernel", no_nvrtc)
    done = invoke("warmup", "--arch", "sm_80", "--head-dim", "64", "--dtype", "float16", "--causal")
    assert done.exit_code == 1
    assert done.output.count("NVRTC is not usable") == 1
    for name in ("forward_portable for sm_80", "backward_portable for sm_80"):
        assert name in done.output.split("failed: ")[-1]


def test_help_needs_neither_gpu_nor_nvrtc() -> None:
    for command in ((), ("doctor",), ("warmup",), ("cache",)):
        result = invoke(*command, "--help")
        assert result.exit_code == 0
        assert "Usage" in result.output


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "kernels"
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(directory))
    return directory


def test_cache_commands(cache_directory: Path) -> None:
    assert invoke("cache", "path").output.strip() == str(cache_directory)
    assert invoke("cache", "list").output.splitlines()[-1] == "0 entries, 0 bytes"
    assert not cache_directory.exists()  # looking creates nothing
    kernels = kernel_cache()
    for key in ("a" * 64, "b" * 64):
        assert kernels.put(key, {"kernel": "forward_portable", "arch": "sm_90"}, b"cubin")
    listing = invoke("cache", "list").output
    assert "forward_portable sm_90" in listing
    assert "2 entries" in listing
    assert invoke("cache", "verify").exit_code == 0
    damaged = cache_directory / f"{'a' * 64}.nvat"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert "damaged: " in invoke("cache", "list").output
    directory = cache_directory / f"{'c' * 64}.nvat"
    directory.mkdir()
    verified = invoke("cache", "verify")
    assert verified.exit_code == 1
    assert f"\nremoved {damaged}: " in "\n" + verified.output
    assert f"\ncould not remove {directory}: not a regular file" in "\n" + verified.output
    assert verified.output.splitlines()[-1] == "2 damaged entries, 1 of them still there"
    directory.rmdir()
    assert invoke("cache", "clear").output.strip() == "1 entries deleted"
    assert list(cache_directory.iterdir()) == []


@pytest.mark.parametrize("command", ["path", "list", "clear", "verify"])
def test_cache_commands_refuse_a_bad_variable_without_a_traceback(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVRTC_ATTN_CACHE_SIZE", "huge")
    result = invoke("cache", command)
    assert result.exit_code == 1
    assert "NVRTC_ATTN_CACHE_SIZE='huge'" in result.output
