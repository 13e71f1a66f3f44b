"""Compiling ahead of time without a GPU, and finding the result again."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from child_environment import python_path

from nvrtc_attn.jit import config_text
from nvrtc_attn.jit.cache import KernelCache
from nvrtc_attn.jit.cache_entry import TUNED
from nvrtc_attn.jit.config import ForwardConfig
from nvrtc_attn.plans import precompile

pytest.importorskip("cuda.bindings.nvrtc")
ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--arch", "sm_80", "--head-dim", "64", "--dtype", "float16", "--no-causal", "--seqlen", "512")


def warmup(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(ROOT),
        "NVRTC_ATTN_CACHE_DIR": str(directory),
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "nvrtc_attn", "warmup", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**environment, **variables}, check=False)


@pytest.mark.reliability(93, 94)
def test_what_warmup_compiles_is_found_elsewhere(tmp_path: Path) -> None:
    first = warmup(tmp_path / "here", *SMALL, "--jobs", "2")
    assert first.returncode == 0, first.stderr
    expected = precompile.configs(
        [precompile.Request(arch="sm_80", head_dim=64, dtype="float16", seqlens=((512, 512),))]
    )
    assert len(KernelCache(tmp_path / "here", 1 << 30).entries()) == len(expected)
    assert " cached" not in first.stdout
    for config in expected:
        assert config.kernel in first.stdout
    # Another machine, another place, and not allowed to compile.
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    second = warmup(tmp_path / "there", *SMALL, NVRTC_ATTN_NO_COMPILE="1")
    assert second.returncode == 0, second.stderr
    assert second.stdout.count(" cached") == len(expected)


def test_the_kernels_of_another_cache_are_compiled_again(tmp_path: Path) -> None:
    """Those that this version knows. How many it does not know is said, and where that is all, nothing is compiled."""
    kernels = precompile.configs([precompile.Request(arch="sm_80", head_dim=64, dtype="float16", backward=False)])[:1]
    kernels += [dataclasses.replace(kernels[0], arch="sm_86")]
    old = KernelCache(tmp_path / "old", 1 << 30)
    said = [*map(config_text.config_to_json, kernels), '{"type":"OfAnotherVersion"}', repr(kernels[0])]
    for number, text in enumerate(said):
        assert old.put(f"{number:064x}", {"kernel": "forward", "arch": "sm_80", "config": text}, b"old code")
    assert old.put(f"{9:064x}", {"kernel": TUNED, "problem": "one", "choice": "another"}, b"")

    done = warmup(tmp_path / "new", "--from-cache", str(tmp_path / "old"), "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert "2 of 4 kernels are of no kind" in done.stderr
    found, others = precompile.kernels_of(tmp_path / "new")
    assert (set(found), others) == (set(kernels), 0)

    for number in range(2):
        old.discard(f"{number:064x}")
    for directory, why in (("old", "2 of 2 kernels are of no kind"), ("nowhere", "there is no compiled kernel in it")):
        refused = warmup(tmp_path / "new", "--from-cache", str(tmp_path / directory))
        assert refused.returncode == 1
        assert why in refused.stderr


@pytest.mark.slow
@pytest.mark.reliability(93)
def test_the_command_in_the_error_makes_the_kernel_available(tmp_path: Path) -> None:
    directory = tmp_path / "kernels"
    missing = warmup(directory, *SMALL, "--forward-only", "--jobs", "1", NVRTC_ATTN_NO_COMPILE="1")
    assert missing.returncode == 1
    assert "NVRTC_ATTN_NO_COMPILE is set" in missing.stderr
    assert not directory.exists()
    commands = re.findall(r"^python -m nvrtc_attn warmup (.*)$", missing.stderr, re.MULTILINE)
    assert commands
    for command in commands:
        done = warmup(directory, *shlex.split(command))
        assert done.returncode == 0, done.stderr
    assert warmup(directory, *SMALL, "--forward-only", NVRTC_ATTN_NO_COMPILE="1").returncode == 0


@pytest.mark.slow
def test_a_failed_kernel_is_reported_and_the_others_compile(tmp_path: Path) -> None:
    [good, *_] = precompile.configs(
        [precompile.Request(arch="sm_80", head_dim=64, dtype="float16", seqlens=((512, 512),), backward=False)]
    )
    assert isinstance(good, ForwardConfig)
    bad = config_text.config_to_json(good).replace("sm_80", "sm_999")
    done = warmup(tmp_path / "kernels", "--config", bad, "--config", config_text.config_to_json(good), "--jobs", "2")
    assert done.returncode == 1
    assert "sm_999" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(KernelCache(tmp_path / "kernels", 1 << 30).entries()) == 1


def small_kernels() -> list[str]:
    """Options for two kernels that compile in a fraction of a second."""
    found = precompile.configs([precompile.Request(arch="sm_80", head_dim=64, dtype="float16", seqlens=((512, 512),))])
    small = [config for config in found if config.kernel in ("delta", "dq_convert")]
    assert len(small) == 2
    return [word for config in small for word in ("--config", config_text.config_to_json(config))]


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"NVRTC_ATTN_CACHE_DIR": "/dev/null/kernels"}, "the kernel cache is not fully used: /dev/null"),
        ({"NVRTC_ATTN_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/"}, "there is no home directory"),
        ({"NVRTC_ATTN_CACHE_SIZE": "1000"}, "is larger than NVRTC_ATTN_CACHE_SIZE=1000"),
    ],
    ids=["not a directory", "no home", "too small for one"],
)
def test_warmup_fails_where_nothing_is_kept(tmp_path: Path, variables: dict[str, str], why: str) -> None:
    """An image that is built with such a directory has no kernels, and may not compile any when it runs."""
    done = warmup(tmp_path / "kernels", *small_kernels(), **variables)
    assert done.returncode == 1
    assert "2 of 2 kernels were compiled and are not in the cache" in done.stderr
    assert why in done.stderr
    assert "delta" in done.stdout, "the table is there all the same"


def test_warmup_fails_where_its_kernels_drive_each_other_out(tmp_path: Path) -> None:
    done = warmup(tmp_path / "kernels", *small_kernels(), "--jobs", "1", NVRTC_ATTN_CACHE_SIZE="30000")
    assert done.returncode == 1
    assert "1 of 2 kernels were compiled and are not in the cache" in done.stderr
    assert "NVRTC_ATTN_CACHE_SIZE=30000 holds no more" in done.stderr


@pytest.mark.parametrize(
    "variables",
    [{"NVRTC_ATTN_NO_COMPILE": "maybe"}, {"NVRTC_ATTN_DUMP": "here"}, {"NVRTC_ATTN_PCH_DIR": "here"},
     {"NVRTC_ATTN_CUTLASS_DIR": "/dev/null"}],
    ids=str,
)  # fmt: skip
def test_warmup_says_in_one_line_which_variable_is_wrong(tmp_path: Path, variables: dict[str, str]) -> None:
    done = warmup(tmp_path / "kernels", *small_kernels(), **variables)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (name, value) = next(iter(variables.items()))
    (line,) = [x for x in done.stderr.splitlines() if "Error: " in x]
    assert f"Error: {name}='{value}' is not" in line


def test_configs_are_unique_and_slow_ones_come_first() -> None:
    requests = [
        precompile.Request(arch=arch, head_dim=head_dim, dtype="bfloat16", causal=causal)
        for arch in ("sm_90", "sm_90a")  # one GPU, two names of targets
        for head_dim in (64, 128)
        for causal in (False, True)
    ]
    kernels = precompile.configs(requests)
    assert len(set(kernels)) == len(kernels)
    assert kernels == list(dict.fromkeys(precompile.configs(requests[: len(requests) // 2]) + kernels))
    names = [kernel.kernel for kernel in kernels]
    assert set(names) == {
        "backward_hopper",
        "forward_hopper",
        "forward_portable",
        "backward_hopper_prepare",
        "dkv_hopper_convert",
        "dq_convert",
    }
    assert names[0] == "backward_hopper"
    assert names[-1] in ("backward_hopper_prepare", "dkv_hopper_convert", "dq_convert")
    assert names.index("backward_hopper_prepare") > names.index("forward_hopper") > 0
    assert {kernel.arch for kernel in kernels if "hopper" in kernel.kernel} == {"sm_90a"}


@pytest.mark.parametrize(
    "name", ["bias", "dbias", "mask", "softcap", "dropout", "varlen", "seqused_k", "deterministic"]
)
def test_every_option_changes_the_kernels(name: str) -> None:
    plain = precompile.Request(arch="sm_90", head_dim=64, dtype="float16", varlen=name == "seqused_k")
    options: dict[str, Any] = {name: True}
    changed = dataclasses.replace(plain, **options)
    assert set(precompile.configs([changed])) != set(precompile.configs([plain]))
