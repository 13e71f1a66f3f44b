"""Random modifiers on the GPU at several shapes and with several contents: `tests/fuzz.py --modifiers`."""

from __future__ import annotations

import fuzz_modifiers
import numpy as np
import pytest
from harness import backend, forget_plans, torch

from nvrtc_attn.heuristics import tile_words

assert torch
MODIFIERS = 32


@pytest.mark.parametrize("number", range(MODIFIERS))
def test_random_modifiers(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other one through kernels that walk tiles, whatever the size, and every third on the portable family."""
    if number % 2:
        monkeypatch.setattr(tile_words, "MIN_FLOPS", 0)
        monkeypatch.setattr(tile_words, "MIN_KEY_TILES", 1)
        forget_plans(monkeypatch)
    with backend("portable" if number % 3 == 0 else "auto"), np.errstate(all="ignore"):
        found = fuzz_modifiers.check_on_gpu(7_000_000 + number, "bfloat16" if number % 5 == 0 else "float16")
    assert not found, found
