"""A release up to the upload: what the files say about the version, sdist and wheel, their metadata and contents.

    python .ci/release.py 0.2.0    of a commit that is to be published; fills dist/ and says which commands follow
    python .ci/release.py          what CI runs on every commit: the same, but there may be changes under [Unreleased]

Needs the extras `dev` and `test`. `--out DIRECTORY` takes the place of dist/.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version_of(text: str) -> str:
    """``__version__`` of ``nvrtc_attn/base/version.py``."""
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise SystemExit("nvrtc_attn/base/version.py has no __version__")
    return match[1]


def section(changelog: str, name: str) -> str | None:
    """What the changelog says under ``## [name]``, ``None`` without such a heading."""
    match = re.search(rf"^## \[{re.escape(name)}\].*?$(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return match[1].strip() if match else None


def refusals(root: Path, released: str | None) -> list[str]:
    """Why the files of ``root`` are not those of the release ``released``, or of no release where that is ``None``."""
    found = []
    version = version_of((root / "nvrtc_attn" / "base" / "version.py").read_text(encoding="utf-8"))
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if released is not None and released != version:
        found.append(f"the version to release is {released}, nvrtc_attn/base/version.py says {version}")
    text = section(changelog, version)
    if text is None:
        found.append(f"CHANGELOG.md has no section [{version}]")
    elif not re.search(r"^- ", text, re.MULTILINE):
        found.append(f"the section [{version}] of CHANGELOG.md lists nothing")
    if released is not None:
        if section(changelog, "Unreleased"):
            found.append(f"CHANGELOG.md has changes under [Unreleased]: they belong under [{version}]")
        for name in ("README.md", "docs/index.md"):
            if "not on the package index yet" in (root / name).read_text(encoding="utf-8"):
                found.append(f"{name} says that there is no release on the package index yet")
        if re.search(r"^Source\s*=", (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE) is None:
            found.append(
                "pyproject.toml has no Source in [project.urls]: README's image and links need it on the index"
            )
    return found


def git_refusals(root: Path, released: str) -> list[str]:
    """Why the checkout at ``root`` is not a commit that can be tagged as ``released``."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    found = []
    if git("status", "--porcelain"):
        found.append("there are changes that are not committed")
    if git("tag", "--list", f"v{released}"):
        found.append(f"there is a tag v{released}")
    return found


def run(*command: str, **variables: str) -> None:
    print("+", *command, flush=True)
    if subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False).returncode != 0:
        raise SystemExit(f"release: {' '.join(command)} failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", help="the version to release")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    options = parser.parse_args()
    reasons = refusals(ROOT, options.version)
    if options.version is not None:
        reasons += git_refusals(ROOT, options.version)
    out = options.out.resolve()
    if out.is_dir() and any(out.iterdir()):
        reasons.append(f"{out} is not empty")
    if reasons:
        raise SystemExit("\n".join(f"release: {reason}" for reason in reasons))
    # The wheel is built from the sdist, so that what the sdist lacks is missed here.
    run(sys.executable, "-m", "build", "--outdir", str(out), str(ROOT))
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_packaging.py",
        NVRTC_ATTN_TEST_WHEEL=str(wheel), NVRTC_ATTN_TEST_SDIST=str(sdist),
    )  # fmt: skip
    print(f"release: ok, {wheel.name} and {sdist.name} are in {out}")
    if options.version is not None:
        print(f"What follows:\n  git tag v{options.version} && git push --tags\n  python -m twine upload {out}/*")


if __name__ == "__main__":
    main()
