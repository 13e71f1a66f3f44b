"""A copy of the package with another mask rule, changed in the one place that has it, and problems that feel it.

The rule is prefix-LM: whatever a band hides behind the last key of a row, keys below `PREFIX` stay visible. Tests
see which kernels follow: tests/compile/test_mask_rule.py by machine code, tests/gpu/test_mask_rule.py by values.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cases
import fuzz_problems
import numpy as np
from cases import Array, Case, make_case
from child_environment import python_path

from nvrtc_attn.jit import headers
from nvrtc_attn.jit.config import KernelConfig

TESTS = Path(__file__).resolve().parent
PREFIX = 70
"""Off the edges of all tiles."""
PLACE = "nvrtc_attn/collective/mask.cuh"
NEVER_MASK = {
    "backward_hopper_prepare", "captured_sum", "combine", "dbias_reduce", "delta", "dkv_convert", "dkv_hopper_convert",
    "dq_convert", "dropout_words", "packed_tiles", "sink_gradient", "tile_bits", "tile_plan",
    "tile_ranges",
}  # fmt: skip
"""Kernels that see rows, or plan tiles, and no scores."""


def changes(prefix: int = PREFIX) -> dict[str, str]:
    """Text of `PLACE` -> text of the changed rule: the last key of a row, and the first row of a key."""
    return {
        "return kBand ? i + high : kFarAway;": f"return kBand ? max(i + high, {prefix - 1}) : kFarAway;",
        "return kBand ? j - high : -kFarAway;": f"return kBand ? (j < {prefix} ? -kFarAway : j - high) : -kFarAway;",
    }


def changed_text(text: str, of_place: dict[str, str]) -> str:
    """``text`` of `PLACE` with these changes, each of which it has once."""
    for old, new in of_place.items():
        assert text.count(old) == 1, f"{PLACE} has this {text.count(old)} times: {old}"
        text = text.replace(old, new)
    return text


def visible(case: Case, num_rows: int, num_keys: int) -> Array:
    """The changed rule, for the oracle: as `cases._visible` has it, and the prefix."""
    i, j = np.arange(num_rows)[:, None], np.arange(num_keys)[None, :]
    off = 0 if case.causal == "top_left" else num_keys - num_rows
    left, right = case.window_size
    right = 0 if case.causal else right
    keep: Array = np.ones((num_rows, num_keys), np.bool_)
    if right is not None:
        keep &= j <= np.maximum(i + off + right, PREFIX - 1)
    if left is not None:
        keep &= j >= i + off - left
    return keep


def _cases() -> dict[str, Case]:
    def case(name: str, **fields: object) -> Case:
        sizes = {"dtype": "bfloat16", "seqlen_q": 300, "seqlen_k": 416, "causal": "top_left"}
        return make_case(f"prefix_{name}", **{**sizes, **fields})

    found = [
        case("d64"),
        case("shared_keys", head_dim=128, num_heads=4, num_heads_kv=2),
        case("bottom_right", seqlen_q=416, seqlen_k=300, head_dim=128, causal="bottom_right"),
        case("one_key_tile", seqlen_k=104, seqlen_q=200, causal="bottom_right"),
        case("d192", head_dim=192),
        case("d256_dropout", head_dim=256, dropout_p=0.2, dtype="float16"),
        case("window", window_size=(150, 20), causal=False, seqlen_q=400),
        case("wide_window", window_size=(150, 20), causal=False, seqlen_q=400, head_dim=256),
        case("shared_bias", bias="1hqk", batch=3),
        case("shared_bias_of_a_row", bias="111k", batch=3),
        case("own_bias", bias="bhqk"),
        case("deterministic", deterministic=True, seqlen_q=600, seqlen_k=700),
        case("everything", bias="bhqk", bias_dtype="float32", mask="b11k", dropout_p=0.2, softcap=20.0),
        case("packed", seqlens=((200, 300), (90, 40), (0, 7), (310, 150)), tail=(9, 3), causal="bottom_right"),
        case("float32", dtype="float32"),
        case("few_queries", seqlen_q=5, seqlen_k=1500, num_heads=8, num_heads_kv=2, head_dim=128),
    ]
    return {case.name: case for case in found}


CASES = _cases()
BACKENDS = ("hopper", "portable")


def kernels(case: Case, backend: str) -> list[KernelConfig]:
    """The kernels of ``case`` on a Hopper GPU that mask scores."""
    problem = fuzz_problems.Problem(
        seed=0, index=0, structure=0, case=case, backend=backend, want_dbias=case.bias_grad, bias_hidden=False,
        outside_nan=False, repeat=False,
    )  # fmt: skip
    return [config for config in fuzz_problems.kernel_configs(problem) if config.kernel not in NEVER_MASK]


def one_of_each() -> dict[str, tuple[str, str]]:
    """The first case, and backend, that launches each kernel."""
    found: dict[str, tuple[str, str]] = {}
    for name, case in CASES.items():
        for backend in BACKENDS:
            for config in kernels(case, backend):
                found.setdefault(config.kernel, (name, backend))
    return found


def config_of(kernel: str) -> KernelConfig:
    name, backend = one_of_each()[kernel]
    return next(config for config in kernels(CASES[name], backend) if config.kernel == kernel)


def copy_of_tree(to: Path, repository: Path, of_place: dict[str, str]) -> Path:
    """The package and its device code under ``to``, with these changes of `PLACE`; third-party headers are linked."""
    ignored = shutil.ignore_patterns("_include", "__pycache__")
    shutil.copytree(repository / "nvrtc_attn", to / "nvrtc_attn", ignore=ignored)
    shutil.copytree(repository / "cuda_src", to / "cuda_src")
    bundle = to / "nvrtc_attn/_include"
    bundle.mkdir()
    for entry in headers.INCLUDE_DIR.iterdir():
        if entry.name != "nvrtc_attn":  # a wheel's device code would be found first
            (bundle / entry.name).symlink_to(entry)
    place = to / "cuda_src" / PLACE
    place.write_text(changed_text(place.read_text(encoding="utf-8"), of_place), encoding="utf-8")
    return to


def run_in(root: Path, script: str, *arguments: str) -> str:
    """What a process prints that runs ``script`` with the package of ``root``."""
    check = f"import nvrtc_attn; assert nvrtc_attn.__file__.startswith({str(root)!r}), nvrtc_attn.__file__\n"
    done = subprocess.run(
        [sys.executable, "-c", check + script, *arguments], cwd=root, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": python_path(root, TESTS, TESTS / "gpu")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


COMPILE = """
import changed_rule, golden, sys
from nvrtc_attn.jit.compile import compile_kernel
print(golden.machine_code(compile_kernel(changed_rule.config_of(sys.argv[1])).code))
"""
"""A script for `run_in`: a hash of the machine code of the kernel that is named, as the tree compiles it."""

RUN = """
import json, cases, changed_rule
if __import__("sys").argv[1] == "changed":
    cases._visible = changed_rule.visible
from harness import Run, backend, failures, families
for name, case in changed_rule.CASES.items():
    arrays = cases.make_arrays(case)
    exact, low = changed_rule.oracle(case, arrays)
    for family in families(case):
        with backend(family):
            run = Run(case, arrays)
            forward = run.forward()
            wrong = failures(case, {**forward, **run.backward(forward)}, exact, low, arrays)
        print(json.dumps([name, family, wrong]))
"""
"""A script for `run_in`: what is wrong with the results of each case and family on a GPU, by the rule that is named."""


def oracle(case: Case, arrays: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """As the harness of tests/gpu has it, in NumPy, which asks `cases._visible` for the rule."""
    exact = cases.attention_dense(case, cases.cast_inputs(case, arrays))
    return exact, cases.attention_low_precision(case, cases.cast_inputs(case, arrays, np.float32))


def results(output: str) -> dict[tuple[str, str], list[str]]:
    """What `RUN` has printed, by case and family."""
    return {(name, family): wrong for name, family, wrong in map(json.loads, output.splitlines())}
