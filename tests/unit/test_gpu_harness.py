"""What the GPU tests take from their harness, as far as it needs no GPU."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from harness import forget_plans

OWNERS = {
    "plans.plan", "plans.repeats", "torch.efficient", "torch.known", "torch.ops", "torch.packed_ops",
    "torch.parallel.local", "torch.passes", "torch.scaled_efficient",
}  # fmt: skip
if importlib.util.find_spec("jax") is not None:
    OWNERS.add("jax.handlers")


def tables() -> list[tuple[Any, str]]:
    """Where modules that are imported remember plans: the dicts whose names say so."""
    return [
        (module, name)
        for path, module in sorted(sys.modules.items())
        if path.startswith("nvrtc_attn.")
        for name, value in vars(module).items()
        if isinstance(value, dict) and re.fullmatch(r"_\w*(plans|calls|repeats)", name)
    ]


@pytest.mark.parametrize("for_a_test", [False, True])
def test_no_table_of_plans_is_left_out(for_a_test: bool) -> None:
    for owner in OWNERS:
        importlib.import_module(f"nvrtc_attn.{owner}")
    known = tables()
    assert {module.__name__.removeprefix("nvrtc_attn.") for module, _ in known} == OWNERS
    before = {(module.__name__, name): dict(getattr(module, name)) for module, name in known}
    with pytest.MonkeyPatch.context() as patch:
        for module, name in known:
            patch.setattr(module, name, {"a call": "its plan"})
        with pytest.MonkeyPatch.context() as until_the_end:
            forget_plans(until_the_end if for_a_test else None)
            assert [getattr(module, name) for module, name in known] == [{}] * len(known)
        assert all(len(getattr(module, name)) == for_a_test for module, name in known)
    assert before == {(module.__name__, name): getattr(module, name) for module, name in known}


def test_gpu_tests_forget_plans_in_one_way(repository: Path) -> None:
    """A test that empties one table by itself may run with what another one remembers."""
    emptied = re.compile(r"\b_?(forward_|backward_)?(plans|repeats)(\.clear\(\)|\", \{\})|\brepeats\._repeats\b")
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted((repository / "tests" / "gpu").glob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if emptied.search(line)
    ]
    assert not found, "use harness.forget_plans"
