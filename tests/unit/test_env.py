"""Environment variables: defaults, values, refusals, and that they are read when they are needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvrtc_attn.base import env

BOOLEANS = {
    "NVRTC_ATTN_NO_COMPILE": env.no_compile,
    "NVRTC_ATTN_ASSERT_CACHED": env.assert_cached,
    "NVRTC_ATTN_DEBUG": env.debug,
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*env.ACCESSORS, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_every_variable_has_an_accessor_and_a_documented_line(repository: Path) -> None:
    source = Path(env.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"NVRTC_ATTN_[A-Z_]+", source)) == set(env.ACCESSORS)
    page = (repository / "docs" / "configuration.md").read_text(encoding="utf-8")
    for name in env.ACCESSORS:
        assert f"| `{name}` |" in page


def test_no_other_file_reads_the_variables() -> None:
    """One file knows the names; the others call it (``env.raw_backend`` where a key must be cheap)."""
    files = list(Path(env.__file__).parents[1].rglob("*.py"))
    assert len(files) > 100
    for path in files:
        if path.name != "env.py":
            for line in path.read_text(encoding="utf-8").splitlines():
                assert not ("environ." in line and "NVRTC_ATTN_" in line), f"{path}: {line}"


def test_the_raw_backend_follows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [env.raw_backend()]
    for value in ("hopper", "legacy"):
        monkeypatch.setenv("NVRTC_ATTN_BACKEND", value)
        keys.append(env.raw_backend())
    assert len(set(keys)) == 3
    monkeypatch.delenv("NVRTC_ATTN_BACKEND")
    assert env.raw_backend() == keys[0]


@pytest.mark.reliability(102)
@pytest.mark.parametrize("name", BOOLEANS)
def test_boolean(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accessor = BOOLEANS[name]
    assert accessor() is False
    for value in ("1", "true", "Yes", "ON", " 1 "):
        monkeypatch.setenv(name, value)
        assert accessor() is True, value
    for value in ("0", "false", "No", "off", ""):
        monkeypatch.setenv(name, value)
        assert accessor() is False, value


@pytest.mark.reliability(102)
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("NVRTC_ATTN_NO_COMPILE", "2", "one of 1, true"),
        ("NVRTC_ATTN_ASSERT_CACHED", "yess", "one of 1, true"),
        ("NVRTC_ATTN_DEBUG", "-1", "one of 1, true"),
        ("NVRTC_ATTN_AUTOTUNE", "fast", "one of 1, true"),
        ("NVRTC_ATTN_BACKEND", "cudnn", "auto, portable"),
        ("NVRTC_ATTN_CACHE_SIZE", "1GB", "a positive number of bytes"),
        ("NVRTC_ATTN_CACHE_SIZE", "0", "a positive number of bytes"),
        ("NVRTC_ATTN_CACHE_SIZE", "-5", "a positive number of bytes"),
        ("NVRTC_ATTN_CACHE_SIZE", "1e9", "a positive number of bytes"),
        ("NVRTC_ATTN_CACHE_SIZE", "\N{ARABIC-INDIC DIGIT FIVE}", "a positive number of bytes"),
        ("NVRTC_ATTN_CACHE_DIR", "relative/dir", "an absolute path"),
        ("NVRTC_ATTN_DUMP", "relative/dir", "an absolute path"),
        ("NVRTC_ATTN_PCH_DIR", "relative/dir", "an absolute path"),
        ("NVRTC_ATTN_CACHE_DIR", "~nobody-of-that-name/cache", "an absolute path"),
        ("NVRTC_ATTN_CUTLASS_DIR", "/nonexistent", "a directory"),
    ],
)
def test_invalid_value_names_variable_value_and_allowed(
    name: str, value: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name) as caught:
        env.ACCESSORS[name]()
    assert repr(value) in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.reliability(102)
def test_autotune_may_be_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, meaning in (("", None), (" ", None), ("1", True), ("on", True), ("0", False), ("No", False)):
        monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", value)
        assert env.autotune() is meaning, value


@pytest.mark.reliability(102)
def test_values_are_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.backend() == "auto"
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "Portable")
    assert env.backend() == "portable"
    monkeypatch.setenv("NVRTC_ATTN_CACHE_SIZE", "4096")
    assert env.cache_size_bytes() == 4096
    monkeypatch.delenv("NVRTC_ATTN_CACHE_SIZE")
    assert env.cache_size_bytes() == 1 << 30


@pytest.mark.reliability(82, 102)
def test_cache_directory_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / ".cache" / "nvrtc_attn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert env.cache_dir() == tmp_path / "xdg" / "nvrtc_attn"
    for ignored in ("", "relative"):  # the specification: a relative path is as good as none
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert env.cache_dir() == tmp_path / ".cache" / "nvrtc_attn"
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", "~/kernels")
    assert env.cache_dir() == tmp_path / "kernels"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.reliability(82)
def test_no_cache_directory_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    assert env.cache_dir() is None

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(env.Path, "home", no_home)
    assert env.cache_dir() is None


def test_cutlass_dir_takes_a_checkout_or_its_include_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    include = tmp_path / "include"
    for name in ("cute", "cutlass"):
        (include / name).mkdir(parents=True)
    for value in (tmp_path, include):
        monkeypatch.setenv("NVRTC_ATTN_CUTLASS_DIR", str(value))
        assert env.cutlass_dir() == include.resolve()
