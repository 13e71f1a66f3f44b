"""Names in the Hopper kernels: a function or struct has one definition, a barrier a name and no number."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "cuda_src" / "nvrtc_attn"
FILES = sorted(SOURCES.rglob("*.cuh"))
HOPPER = [path for path in FILES if "hopper" in path.relative_to(SOURCES).as_posix()]
DEFINITION = re.compile(
    r"^(?:NVRTC_ATTN_DEVICE [^\n;{}]*?\b(\w+)\(|(?:struct|enum) (?:alignas\([^)]*\) )?(\w+)\b)", re.MULTILINE
)


def code(path: Path) -> str:
    return re.sub(r"//.*", "", path.read_text())


def test_the_sources_are_found() -> None:
    assert len(HOPPER) > 20
    assert {path.parent.name for path in HOPPER} == {"common", "forward", "backward", "wide", "kernel"}


def test_a_name_of_the_hopper_kernels_is_defined_in_one_file() -> None:
    """Two files that are included together may overload a name unseen: one that overwrites, one that accumulates."""
    places: defaultdict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for match in DEFINITION.finditer(code(path)):
            places[match[1] or match[2]].add(path.relative_to(SOURCES).as_posix())
    hopper = {path.relative_to(SOURCES).as_posix() for path in HOPPER}
    assert {"start_product_abt", "transpose_quad", "KeyTileConsumer", "load_box"} <= set(places)
    assert {name: found for name, found in places.items() if len(found) > 1 and found & hopper} == {}


@pytest.mark.parametrize("path", HOPPER, ids=lambda path: path.relative_to(SOURCES).as_posix())
def test_barriers_are_called_by_name(path: Path) -> None:
    """Hardware barriers by an enumerator, mbarriers by an accessor whose place an enumerator says."""
    text = code(path)
    for call in re.finditer(r"(?<!void )named_barrier_(?:sync|arrive)\(\s*([^,]+),", text):
        assert re.match(r"(?:Shape::)?k[A-Z]|meeting\b|barrier\b", call[1]), call[0]
    assert not re.search(r"\{\s*base \+ \d|\b8 \* (?:stage|slot)\b", text)
    for place in re.finditer(r"Mbarrier \w+\([^)]*\) const \{ return at\(([^)]*)\)", text):
        assert re.match(r"(?:Map|Shape)::k[A-Z]", place[1]), place[0]
