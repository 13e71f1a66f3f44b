"""A seeded sweep over the product of all features.

A structure (everything that is compiled) costs seconds, a problem of that structure milliseconds: each structure is run
with several sets of lengths, heads, strides and values. ``NVRTC_ATTN_TEST_SWEEP`` sets the number of structures.
"""

from __future__ import annotations

import dataclasses
import os

import cases
import numpy as np
import pytest
from cases import Case
from harness import check

STRUCTURES = int(os.environ.get("NVRTC_ATTN_TEST_SWEEP", "60"))
PROBLEMS = 35
SEED = 20261120


def variant(case: Case, index: int) -> Case:
    """Another problem for the kernels of ``case``: new lengths, batch, heads, windows and numbers."""
    if index == 0:
        return case
    rng = np.random.default_rng([case.seed & 0xFFFFFFFF, index])

    def length() -> int:
        edge = int(rng.choice((16, 32, 64, 128))) + int(rng.integers(-1, 2))
        return edge if rng.random() < 0.4 else int(rng.integers(1, 200))

    group = case.num_heads // case.num_heads_kv
    heads_kv = int(rng.integers(1, 3))
    fields: dict[str, object] = {
        "name": f"{case.name}-{index}", "num_heads_kv": heads_kv, "num_heads": heads_kv * group,
        "seed": int(rng.integers(0, 2**62)),
        "window_size": tuple(None if w is None else int(rng.integers(0, 150)) for w in case.window_size),
    }  # fmt: skip
    if case.varlen:
        seqlens = tuple((length(), length()) for _ in range(int(rng.integers(1, 4))))
        fields |= {"seqlens": seqlens, "batch": len(seqlens)}
        fields |= {"seqlen_q": max(m for m, _ in seqlens), "seqlen_k": max(n for _, n in seqlens)}
        if case.seqused_k:
            fields["seqused_k"] = tuple(int(rng.integers(0, n + 1)) for _, n in seqlens)
    else:
        fields |= {"batch": int(rng.integers(1, 3)), "seqlen_q": length(), "seqlen_k": length()}
    return dataclasses.replace(case, **fields)  # type: ignore[arg-type]


@pytest.mark.reliability(31, 39)
@pytest.mark.parametrize("structure", range(STRUCTURES))
def test_random_structure(structure: int) -> None:
    case = cases.random_case(SEED, structure)
    faults = []
    for index in range(PROBLEMS):
        try:
            check(variant(case, index), seed=structure * 1000 + index)
        except AssertionError as error:
            faults.append(str(error))
    assert not faults, f"{len(faults)} of {PROBLEMS} problems\n" + "\n".join(faults)
