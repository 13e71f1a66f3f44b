"""Every block of Python on the pages of docs/integrations runs, in its order, on the CPU."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "integrations").glob("*.md"))
HOSTS = {"transformers": "transformers", "diffusers": "diffusers", "xformers": "xformers.ops.fmha", "flax": "flax.nnx"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_blocks_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    if page.stem == "README":
        assert not blocks
        return
    assert blocks
    pytest.importorskip("jax" if page.stem == "flax" else "torch", reason="its framework is not installed")
    if page.stem in HOSTS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importlib.import_module(HOSTS[page.stem])
            except ImportError as error:
                pytest.skip(f"{page.stem} is not installed: {error}")
    scope: dict[str, object] = {"__name__": f"page_{page.stem}"}
    for block in blocks:
        exec(compile(block, str(page), "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_and_lengths(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in target or (page.parent / target).exists(), target
    assert all(len(line) <= 140 for line in text.splitlines() if not line.startswith("|"))


def test_every_integration_has_a_page() -> None:
    package = Path(__file__).resolve().parents[2] / "nvrtc_attn" / "integrations"
    modules = {path.stem for path in package.glob("*.py")} - {"__init__", "versions"}
    assert {page.stem for page in PAGES} == modules | {"README"}
