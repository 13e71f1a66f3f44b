"""The examples run as scripts: on the CPU here, and politely where their framework is missing."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from child_environment import python_path

import nvrtc_attn

ROOT = Path(__file__).resolve().parents[2]


def run(repository: Path, name: str, *arguments: str, cwd: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(repository),
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, str(repository / "examples" / name), *arguments],
        capture_output=True, text=True, env=environment, cwd=cwd, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def test_quickstart(repository: Path, tmp_path: Path) -> None:
    out = run(repository, "quickstart.py", "--arch", "sm_80", "--seqlen", "512", cwd=tmp_path)
    assert "float32, causal: forward and backward in" in out
    assert re.search(r"relative error out \S+, dq \S+, dk \S+, dv", out)
    assert "Kernels for sm_80" in out
    registers, spilled = re.findall(r"forward_portable sm_80 float16 \S+ +(\d+) +(\d+)", out)[0]
    assert 0 < int(registers) <= 255
    assert int(spilled) == 0
    assert "3. On the GPU\n   skipped: " in out


def test_quickstart_says_why_nothing_was_compiled(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was the table with a kernel that failed, and no word about what is missing."""
    monkeypatch.setenv("NVRTC_ATTN_NO_COMPILE", "1")
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.raises(AssertionError) as raised:
        run(repository, "quickstart.py", "--seqlen", "64", cwd=tmp_path)
    assert "failed: forward_hopper for sm_90a: " in str(raised.value)
    assert "NVRTC_ATTN_NO_COMPILE" in str(raised.value)


def test_quickstart_names_its_architectures(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"arch 'sm_70' is not one of sm_75, sm_80"):
        run(repository, "quickstart.py", "--arch", "sm_70", "--seqlen", "64", cwd=tmp_path)


DOORS = (
    "nvrtc_attn",
    "nvrtc_attn.torch",
    "nvrtc_attn.torch.parallel",
    "nvrtc_attn.jax",
    "nvrtc_attn.jax.parallel",
    "nvrtc_attn.cupy",
    "nvrtc_attn.aten",
)


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_use_public_names_only(name: str) -> None:
    """What users copy must not break when the inside of the package moves."""
    tree = ast.parse((ROOT / "examples" / name).read_text(encoding="utf-8"))
    private = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            private += [x.name for x in node.names if x.name.split(".")[0] == "nvrtc_attn" and x.name not in DOORS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nvrtc_attn":
            names = [f"{node.module}.{x.name}" for x in node.names]
            private += names if node.module not in DOORS else [x for x in names if x.split(".")[-1][0] == "_"]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nvrtc_attn":
            public = {*nvrtc_attn.__all__, *(door.partition(".")[2] for door in DOORS)}
            private += [f"nvrtc_attn.{node.attr}"] if node.attr not in public else []
    assert not private


def test_numpy_attention(repository: Path, tmp_path: Path) -> None:
    out = run(repository, "numpy_attention.py", cwd=tmp_path)
    assert "directional derivative" in out
    assert "repeatable: True" in out
    assert "equal to one call each" in out


@pytest.mark.turns(3)
def test_jax_attention(repository: Path, tmp_path: Path) -> None:
    out = run(repository, "jax_attention.py", cwd=tmp_path)
    if not installed("jax"):
        assert out.startswith("skipped: JAX is not installed")
        return
    first, last = map(float, re.findall(r"loss (\S+) -> (\S+) after", out)[0])
    assert last < 0.5 * first
    assert "equal to the batched call: True" in out


@pytest.mark.turns(3)
def test_jax_parallel(repository: Path, tmp_path: Path) -> None:
    """Four devices of the CPU, with dropout: out and gradients of one device by every strategy."""
    out = run(repository, "jax_parallel.py", cwd=tmp_path)
    if not installed("jax"):
        assert out.startswith("skipped: JAX is not installed")
        return
    found = re.findall(r"^(\w+) over 2 devices, batch over 2: largest difference (\S+) of", out, re.MULTILINE)
    assert [strategy for strategy, _ in found] == ["all_gather", "ring", "auto"], out
    assert max(float(difference) for _, difference in found) < 1e-5


def test_cupy_attention_without_a_gpu(repository: Path, tmp_path: Path) -> None:
    assert run(repository, "cupy_attention.py", cwd=tmp_path).startswith("skipped: ")


def test_train_gpt_compiled_under_autocast_in_two_processes(repository: Path, tmp_path: Path) -> None:
    """DistributedDataParallel under gloo; each process has every other row of the batches of one process."""
    sizes = ("--steps", "6", "--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "4")
    out = run(
        repository, "train_gpt.py", "--processes", "2", "--compile", "aot_eager", "--autocast", *sizes, cwd=tmp_path
    )
    if not installed("torch"):
        assert out.startswith("skipped: torch is not installed")
        return
    first, last = map(float, re.findall(r"nvrtc_attn +loss (\S+) -> (\S+),", out)[0])
    assert last < first < 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps: got 0"),
        (["--heads", "5", "--width", "64"], "--width 64 is not a multiple of --heads 5"),
        (["--device", "cuda"], "PyTorch finds no GPU"),
    ],
)
def test_sizes_of_a_gpt_that_there_cannot_be(
    arguments: list[str],
    said: str,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(repository / "examples")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments])
    import train_gpt

    with pytest.raises(SystemExit):
        train_gpt.main()
    assert said in capsys.readouterr().err


@pytest.mark.turns(3)
def test_train_gpt(repository: Path, tmp_path: Path) -> None:
    sizes = ("--steps", "6", "--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch", "2")
    out = run(repository, "train_gpt.py", "--compare", *sizes, cwd=tmp_path)
    if not installed("torch"):
        assert out.startswith("skipped: torch is not installed")
        return
    assert ": passed" in out
    result = json.loads((tmp_path / "train_gpt_results" / "train_gpt.json").read_text())
    assert set(result["runs"]) == {"sdpa", "nvrtc_attn", "sdpa, other backend"}
    assert result["difference"] <= result["tolerance"]
    losses = result["runs"]["nvrtc_attn"]["losses"]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert (tmp_path / "train_gpt_results" / "train_gpt.png").exists() == installed("matplotlib")


@pytest.mark.parametrize("strategy", ["auto", "all_gather"])
@pytest.mark.turns(3)
def test_training_in_two_processes_is_training_in_one(repository: Path, tmp_path: Path, strategy: str) -> None:
    """By one command on gloo, with dropout: every step's loss is that of a single process on whole sequences."""
    if not installed("torch"):
        pytest.skip("torch is not installed")
    out = run(
        repository, "train_gpt_parallel.py", "--processes", "2", "--compare", "--steps", "4", "--strategy", strategy,
        cwd=tmp_path,
    )  # fmt: skip
    assert re.search(r"2 ranks, \w+: loss \d", out)
    assert "passed" in out


def assert_learned(printed: str, compared: list[str]) -> None:
    """What was compared with the framework's own operations, each in a line of its own, agrees; then the loss falls."""
    lines = re.findall(r"^(.+?)(?: of attention with .+)?, beside .+: largest difference (\S+)$", printed, re.MULTILINE)
    assert [name for name, _ in lines] == compared, printed
    assert max(float(difference) for _, difference in lines) < 1e-4, printed
    losses = [float(x) for x in re.findall(r"loss (\S+)", printed)]
    assert losses[-1] < losses[0] / 10


def test_numpy_modifiers(repository: Path, tmp_path: Path) -> None:
    """Gradient descent on a table that a modifier captured: the loss falls by an order of magnitude."""
    assert_learned(run(repository, "numpy_modifiers.py", cwd=tmp_path), ["out", "gradient of the table"])


@pytest.mark.turns(3)
def test_torch_modifiers(repository: Path, tmp_path: Path) -> None:
    """The same by autograd, with sinks and dropout in packed documents."""
    out = run(repository, "torch_modifiers.py", cwd=tmp_path)
    if not installed("torch"):
        assert out.startswith("skipped: PyTorch is not installed")
        return
    assert_learned(out, ["out", "gradient of the table", "gradient of the sinks"])


@pytest.mark.turns(3)
def test_jax_modifiers(repository: Path, tmp_path: Path) -> None:
    """The same under jax.jit, where the table is a tracer."""
    out = run(repository, "jax_modifiers.py", cwd=tmp_path)
    if not installed("jax"):
        assert out.startswith("skipped: JAX is not installed")
        return
    assert_learned(out, ["out", "gradient of the table"])
