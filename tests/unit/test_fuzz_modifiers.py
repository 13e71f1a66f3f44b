"""A share of `tests/fuzz.py --modifiers`: the CPU path against whole matrices and central differences."""

from __future__ import annotations

import dataclasses
from typing import Any

import fuzz_modifiers
import numpy as np
import pytest

from nvrtc_attn.modifiers import derivative


@pytest.mark.parametrize("part", range(4))
def test_random_modifiers(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = fuzz_modifiers.run(50, 2, 50 * part, 1e9, cpu=True)
    assert not wrong, capsys.readouterr().out


@pytest.mark.parametrize("part", range(4))
def test_random_modifiers_of_the_wider_grammar(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = fuzz_modifiers.run(40, 2, fuzz_modifiers.WIDE + 40 * part, 1e9, cpu=True)
    assert not wrong, capsys.readouterr().out


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A product whose derivative forgets one factor."""
    own: Any = derivative.RULES["mul"]
    monkeypatch.setitem(derivative.RULES, "mul", lambda node, d: (own(node, d)[0], d))
    derivative_cache = getattr(derivative.derivatives, "cache_clear", None)
    if derivative_cache is not None:
        derivative_cache()
    with np.errstate(all="ignore"):
        assert fuzz_modifiers.run(40, 2, 0, 1e9, cpu=True) > 0
    assert "by differences" in capsys.readouterr().out


def test_more_shapes_of_a_modifier_begin_with_the_fewer() -> None:
    """So that kernels compiled ahead for some shapes serve a campaign with more of them."""
    target = {"arch": "sm_90", "num_sms": 132, "smem_limit": 227 << 10}
    few, many = (
        list(fuzz_modifiers.kernels_on(7, target, dataclasses.replace(fuzz_modifiers.CAMPAIGN, number=number)))
        for number in (2, 8)
    )
    assert few == many[: len(few)]
    assert few
