"""A slice of the fuzz campaign: 300 problems of a few structures. ``python tests/fuzz.py`` is the whole."""

from __future__ import annotations

import os

import fuzz
import fuzz_problems
import pytest

SEED = 1
STRUCTURES = frozenset((0, 1, 3, 4, 6, 9))


@pytest.mark.reliability(31, 39)
def test_a_slice_of_the_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from fuzz_torch import judge

    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "auto")  # each problem sets its own
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    cores = len(os.sched_getaffinity(0))
    plan = fuzz.make_plan(SEED, 300, 60, fuzz.gpu_target(), min(4, cores), structures=STRUCTURES)
    assert not fuzz.compile_all(plan.kernels, cores)
    wrong = []
    with torch.inference_mode():
        verdicts = [judge(fuzz_problems.problem(SEED, index), "cuda") for index in plan.indices]
        for verdict in verdicts:
            if lines := verdict.lines("cuda"):
                wrong.append(fuzz.failure(SEED, verdict.problem.index, lines))
    assert not wrong, "\n".join(wrong)
