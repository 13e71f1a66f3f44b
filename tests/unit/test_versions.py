"""One line about a version of a host library that nobody tested, and none about one that somebody did."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvrtc_attn.base import hosts, log


@pytest.mark.parametrize(
    ("installed", "warns"),
    [
        ("5.20.0", False), ("5.23.7", False), ("5.23.0.dev1+cpu", False), ("5.20", False), ("5.21", False),
        ("5.24.0", True),
        ("5.19.9", True), ("6.0", True), ("4.57.1", True), ("5.23.0rc1", False),
    ],
)  # fmt: skip
def test_versions(
    installed: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hosts, "_installed", {"host": installed}.__getitem__)
    monkeypatch.setattr(log, "_said", set())
    with caplog.at_level(logging.WARNING, logger="nvrtc_attn"):
        hosts.check_version("host", "5.20.0", "5.23.0")
        hosts.check_version("host", "5.20.0", "5.23.0")
    assert len(caplog.records) == warns
    assert all(installed in record.message for record in caplog.records)


def test_an_unknown_version_says_nothing_and_is_looked_up_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A look-up takes a millisecond, and `nvrtc_attn.torch.enable_sdpa` may be entered in every step."""
    found: list[Any] = [None, hosts.metadata.PackageNotFoundError("host")]  # None: metadata without a version
    asked: list[str] = []

    def version(library: str) -> Any:
        asked.append(library)
        result = found[len(asked) - 1]
        if result is not None:
            raise result
        return None

    monkeypatch.setattr(hosts.metadata, "version", version)
    for _ in range(2):
        hosts._installed.cache_clear()
        with caplog.at_level(logging.WARNING, logger="nvrtc_attn"):
            for _ in range(3):
                hosts.check_version("host", "5.20.0", "5.23.0")
    hosts._installed.cache_clear()
    assert asked == ["host", "host"]
    assert not caplog.records


# What a user writes first -> the libraries whose versions it is about. All of these import what they serve.
REGISTERED = {
    "transformers": ("transformers", lambda: integration("transformers").register()),
    "diffusers": ("diffusers", lambda: integration("diffusers").register()),
    "xformers": ("xformers", lambda: integration("xformers")._operators()),
}


def integration(name: str) -> Any:
    return importlib.import_module(f"nvrtc_attn.integrations.{name}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REGISTERED)
def test_what_is_registered_warns_once(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)
    library, call = REGISTERED[name]
    integration(name)  # torch's own version is looked at by the import
    monkeypatch.setattr(hosts, "_installed", lambda _: "999.0.0")
    monkeypatch.setattr(log, "_said", set())
    with caplog.at_level(logging.WARNING, logger="nvrtc_attn"):
        call()
        call()
    (line,) = (record.message for record in caplog.records if "was tested with" in record.message)
    assert line.startswith(f"{library} 999.0.0 is outside of the versions")


DOORS = {
    "attention": "from nvrtc_attn.torch import attention",
    "enable_sdpa": "import nvrtc_attn.torch; nvrtc_attn.torch.enable_sdpa().disable()",
    "registry": "from nvrtc_attn.torch import flash; flash.activate(_key='CPU').remove()",
    "ContextParallel": "from nvrtc_attn.torch.parallel import ContextParallel",
    "modifiers": "from nvrtc_attn.torch import flex_attention",
    "comfyui": "from nvrtc_attn.integrations import comfyui; comfyui.override",
    "evoformer": "import nvrtc_attn.integrations.evoformer",
    "flash_attn": "import nvrtc_attn.integrations.flash_attn",
}
_EACH_IN_A_FORK = """
import logging, os, sys
import torch
from nvrtc_attn.base import hosts
hosts._installed = lambda _: "999.0.0"
seen = []
class Handler(logging.Handler):
    def emit(self, record):
        seen.append(record.getMessage())
logging.getLogger("nvrtc_attn").addHandler(Handler())
for door in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        for _ in range(2):
            exec(door)
        print(sum(x.startswith("torch 999.0.0 is outside of the versions") for x in seen), len(seen), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each door is opened in a fork of a process that has torch")
@pytest.mark.turns(3)
def test_every_door_of_torch_warns_once() -> None:
    """Whatever is imported first, and nothing but it: a line about torch, and no second one."""
    pytest.importorskip("torch", reason="torch is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _EACH_IN_A_FORK, *DOORS.values()],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert dict(zip(DOORS, done.stdout.splitlines(), strict=True)) == dict.fromkeys(DOORS, "1 1"), done.stderr


@pytest.mark.parametrize(("library", "module"), [("jax", "nvrtc_attn.jax"), ("flax", "nvrtc_attn.integrations.flax")])
def test_adapters_of_jax_warn_when_they_are_imported(library: str, module: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed")
    code = (
        "from nvrtc_attn.base import hosts\n"
        f"hosts._installed = lambda library: '999.0.0' if library == {library!r} else None\n"
        f"import {module}, importlib; importlib.reload({module})\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stderr.count(f"{library} 999.0.0 is outside of the versions") == 1, done.stderr
