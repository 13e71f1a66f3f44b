"""Every curated case, forward and backward, in every kernel family, on both instruction sets of the portable one."""

from __future__ import annotations

import cases
import pytest
from harness import check

NAMED = cases.named_cases()


@pytest.mark.reliability(5, 8, 9, 10, 11, 13, 14, 15, 16, 17, 18, 21, 30, 31, 33, 39, 40)
@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_named_case(case: cases.Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [c for c in NAMED if c.dtype == "float16"][::3], ids=lambda case: case.name)
def test_legacy_instruction_set(case: cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of compute capability 7.5, forced."""
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "legacy")
    check(case)
