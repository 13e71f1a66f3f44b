"""One file has the mask rule: the machine code of every kernel that masks follows it, and no other file has bounds."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import changed_rule
import golden
import pytest

from nvrtc_attn.jit.compile import compile_kernel
from nvrtc_attn.jit.config import KernelConfig

pytest.importorskip("cuda.bindings.nvrtc")

MASKING = (
    "forward_portable", "forward_hopper", "backward_portable", "backward_dq", "backward_dbias", "backward_hopper",
    "backward_hopper_wide", "backward_hopper_dbias",
)  # fmt: skip


def configs(kernel: str) -> list[KernelConfig]:
    return [changed_rule.config_of(kernel)]


def test_every_kernel_is_here(repository: Path) -> None:
    kernels = {path.stem for path in (repository / "cuda_src/nvrtc_attn/kernel").glob("*.cuh")}
    assert kernels == changed_rule.NEVER_MASK | set(MASKING)
    assert set(changed_rule.one_of_each()) == set(MASKING)


@functools.cache
def code_without_comments(repository: Path) -> dict[str, str]:
    root = repository / "cuda_src/nvrtc_attn"
    return {
        str(path.relative_to(root)): re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        for path in root.rglob("*.cuh")
    }


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (r"window_left|window_right|bottom_right|kUnbounded|kFarAway", "collective/mask.cuh"),
        # Ranges have a tanh of their own.
        (r"params\.softcap|tanh_of|kPrescale|(?<!widened\()(?<!, )tanhf", "collective/scores.cuh"),
        (r"1\.0f - tanh\w* \* tanh\w*", "collective/scores.cuh"),
        (r"\+= (to_float|b\.[xy]\b|\w*bias(\[\w+\])?;)", "collective/scores.cuh"),
    ],
)
def test_only_one_file_says(words: str, place: str, repository: Path) -> None:
    """What a rule is made of: its parameters, and what it makes of a score."""
    found = {name for name, text in code_without_comments(repository).items() if re.search(words, text)}
    assert found - {"params.cuh"} == {place}


def test_kernels_that_never_mask_do_not_ask(repository: Path) -> None:
    for kernel in changed_rule.NEVER_MASK - {
        "packed_tiles",
        "dropout_words",
    }:  # which count the key tiles that the mask leaves
        assert "PositionMask" not in code_without_comments(repository)[f"kernel/{kernel}.cuh"]


@pytest.fixture(scope="module")
def changed_tree(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed_rule.copy_of_tree(tmp_path_factory.mktemp("changed"), repository, changed_rule.changes())


@pytest.mark.slow(sample=["backward_dq"])
@pytest.mark.compiles(kernels=configs)
@pytest.mark.parametrize("kernel", MASKING)
def test_machine_code_follows_the_rule(kernel: str, changed_tree: Path) -> None:
    before = golden.machine_code(compile_kernel(changed_rule.config_of(kernel)).code)
    after = changed_rule.run_in(changed_tree, changed_rule.COMPILE, kernel).strip()
    assert len(after) == len(before)
    assert after != before


def test_machine_code_of_a_copy_is_the_same(repository: Path, tmp_path: Path) -> None:
    """What the test above sees is the rule, not the place of the tree."""
    copy = changed_rule.copy_of_tree(tmp_path, repository, {})
    here = golden.machine_code(compile_kernel(changed_rule.config_of("backward_dq")).code)
    assert changed_rule.run_in(copy, changed_rule.COMPILE, "backward_dq").strip() == here
