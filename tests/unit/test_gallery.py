"""The pictures of the gallery are what its script draws, and the page shows each of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_pictures_are_those_of_the_script(repository: Path) -> None:
    spec = importlib.util.spec_from_file_location("draw_gallery", repository / "docs" / "draw_gallery.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = repository / "docs" / "guide" / "gallery"
    assert {x.stem for x in folder.iterdir()} == set(script.MASKS)
    page = (repository / "docs" / "guide" / "gallery.md").read_text(encoding="utf-8")
    for name, mask_mod in script.MASKS.items():
        assert (folder / f"{name}.svg").read_text(encoding="utf-8") == script.picture(mask_mod), name
        assert f"gallery/{name}.svg" in page
