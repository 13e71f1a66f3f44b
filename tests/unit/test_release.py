"""What .ci/release.py refuses before anything is built."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def release(repository: Path) -> Any:
    spec = importlib.util.spec_from_file_location("release", repository / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.0] - 2026-01-02

### Added

- Something.

## [1.1.0]

- Something else.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files that 1.2.0 can be released from."""
    (tmp_path / "nvrtc_attn" / "base").mkdir(parents=True)
    (tmp_path / "nvrtc_attn" / "base" / "version.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/index.md"):
        (tmp_path / name).write_text("# us\n\nInstall it.\n")
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nSource = "https://host.example/us/it"\n')
    return tmp_path


def test_a_good_tree_is_not_refused(release: Any, tree: Path) -> None:
    assert release.refusals(tree, "1.2.0") == release.refusals(tree, None) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "expected", "always"),
    [
        ("nvrtc_attn/base/version.py", "1.2.0", "1.3.0", "no section [1.3.0]", True),
        ("nvrtc_attn/base/version.py", "1.2.0", "1.1.0", "version.py says 1.1.0", False),
        ("CHANGELOG.md", "- Something.", "", "section [1.2.0] of CHANGELOG.md lists nothing", True),
        ("CHANGELOG.md", "## [1.2.0] -", "## 1.2.0", "no section [1.2.0]", True),
        ("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n\n- New.\n", "under [Unreleased]", False),
        ("README.md", "Install it.", "It is not on the package index yet.", "README.md says that there is no", False),
        (
            "docs/index.md",
            "Install it.",
            "It is not on the package index yet.",
            "index.md says that there is no",
            False,
        ),
        ("pyproject.toml", "Source", "# Source", "no Source in [project.urls]", False),
    ],
)
def test_what_does_not_agree_is_refused(
    file: str, old: str, new: str, expected: str, always: bool, release: Any, tree: Path
) -> None:
    """``always``: in CI too, which releases nothing."""
    path = tree / file
    path.write_text(path.read_text().replace(old, new, 1))
    assert any(expected in reason for reason in release.refusals(tree, "1.2.0"))
    assert any(expected in reason for reason in release.refusals(tree, None)) == always


def test_a_tag_is_of_a_commit_and_new(release: Any, tree: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        subprocess.run(["git", "-C", str(tree), *identity, *arguments], check=True, capture_output=True)

    git("init")
    assert release.git_refusals(tree, "1.2.0") == ["there are changes that are not committed"]
    git("add", "--all")
    git("commit", "--message", "All")
    assert release.git_refusals(tree, "1.2.0") == []
    git("tag", "v1.2.0")
    assert release.git_refusals(tree, "1.2.0") == ["there is a tag v1.2.0"]
    assert release.git_refusals(tree, "1.2.1") == []


def test_this_tree_could_be_released_but_for_what_is_said(release: Any, repository: Path) -> None:
    assert release.refusals(repository, None) == []
