"""A share of `tests/fuzz.py --simulated`: what its problems are held to, that faults show, and a few problems."""

from __future__ import annotations

from typing import Any

import cases
import fuzz_simulated
import modifiers
import numpy as np
import pytest

import nvrtc_attn
from nvrtc_attn.cpu import reference
from nvrtc_attn.modifiers.evaluate import HostModifier


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign chooses it for each problem."""
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "auto")


def test_problems_replay() -> None:
    first, modifier = fuzz_simulated.problem(3, 17, "9.0", True)
    again, _ = fuzz_simulated.problem(3, 17, "9.0", True)
    assert first == again
    assert modifier is not None
    beside, same = fuzz_simulated.problem(3, 18, "9.0", True)
    assert same is not None
    assert same.name == modifier.name
    assert (beside.case.dtype, beside.backend) == (first.case.dtype, first.backend)
    assert beside.case != first.case


@pytest.mark.parametrize(("name", "softcap"), [("documents", 5.0), ("relative bias", 0.0), ("both", 0.0)])
def test_the_textbook_with_a_modifier_is_the_reference(name: str, softcap: float) -> None:
    """Also a softcap beside a mask_mod, whose slope stays that of the softcap."""
    case = cases.make_case(
        name, seqlen_q=20, seqlen_k=30, head_dim=8, num_heads=4, num_heads_kv=2, bias="1h1k", dlse=True, softcap=softcap
    )
    made = next(x for x in modifiers.named_cases() if x.name == name)
    arrays = made.arrays((2, 4, 20, 30), np.random.default_rng(0))
    modifier = nvrtc_attn.trace(*made.make(arrays))
    inputs = cases.cast_inputs(case, cases.make_arrays(case))
    on_host = fuzz_simulated.OnHost(modifier, "float64")
    found = cases.attention_dense(case, inputs, modified=on_host)

    wide = HostModifier(modifier, [x.astype(np.float64) if x.dtype == np.float32 else x for x in modifier.captures])
    options: dict[str, Any] = {"bias": inputs["bias"], "softcap": softcap, "modifier": wide}
    q, k, v, dout = (inputs[x] for x in ("q", "k", "v", "dout"))
    out, lse = reference.attention_forward(q, k, v, **options)
    sums = [None if x is None else np.zeros_like(x) for x in on_host.gradients]
    gradients = reference.attention_backward(
        dout, q, k, v, out, lse, dlse=inputs["dlse"], bias_grad=True, capture_grads=sums, **options
    )
    expected = dict(zip(("out", "lse", "dq", "dk", "dv", "dbias"), (out, lse, *gradients), strict=False))
    for what, theirs in expected.items():
        np.testing.assert_allclose(found[what], theirs, rtol=1e-9, atol=1e-9, err_msg=what)
    for ours, theirs in zip(on_host.gradients, sums, strict=True):
        if ours is not None:
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_problem_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = fuzz_simulated.run("9.0", 1, 1, 0, 1e9, with_modifiers=True)
    assert not wrong, capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Scores, and with them the gradients, that are a hundredth larger than the oracle's."""
    own = fuzz_simulated.OnHost.__call__

    def larger(self: Any, sequence: int, s: Any) -> Any:
        score, slope, kept = own(self, sequence, s)
        return score * s.dtype.type(1.01), slope, kept

    monkeypatch.setattr(fuzz_simulated.OnHost, "__call__", larger)
    assert fuzz_simulated.run("9.0", 1, 1, 0, 1e9, with_modifiers=True) == 1
    said = capsys.readouterr().out
    assert said.startswith("WRONG python tests/fuzz.py --simulated 9.0 --modifiers --replay 1:0 | ")
    assert "max error" in said


def test_what_is_not_simulated_is_said() -> None:
    with pytest.raises(SystemExit, match=r"--simulated 6\.1: simulated are .*'9\.0'"):
        fuzz_simulated.run("6.1", 1, 1, 0, 1e9, with_modifiers=False)
