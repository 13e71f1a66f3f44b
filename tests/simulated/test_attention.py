"""Attention on GPUs that are simulated, each with the kernels of its architecture: every result against float64.

The PTX that NVRTC makes is executed (tests/simulator), with copies that end as late as they may, warps in random order
and memory that nobody wrote poisoned. It is what tests/gpu does, where there is no GPU, and the only run of kernels for
GPUs that nobody of us has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from cases import Case, make_case
from simulator import gpu as simulator
from simulator.harness import GPUS, check


def case(name: str, **fields: Any) -> Case:
    """Several tiles in each direction, and the last of them not full."""
    return make_case(name, **{"dtype": "bfloat16", "batch": 1, "seqlen_q": 150, "seqlen_k": 210, **fields})


PLAIN = case("causal, shared keys", causal=True, num_heads=4, num_heads_kv=2)
HOPPER = [
    PLAIN,
    case("d128 window", head_dim=128, window_size=(70, 10)),
    case("d192/128 causal", head_dim=192, head_dim_v=128, causal=True, dtype="float16"),
    case("d256 softcap", head_dim=256, softcap=5.0),
    case("d80 dropout", head_dim=80, dropout_p=0.3),
    case("bias and mask", bias="1hqk", mask="b11k", mask_kind="padding", batch=2),
    case("packed", seqlens=((70, 90), (0, 5), (120, 140)), causal=True, seqused_k=(80, 5, 139)),
    case("sink", sink="float32", causal=True, dlse=True),
    case("deterministic", deterministic=True, causal=True, num_heads=4, num_heads_kv=1),
    case("float32", dtype="float32", seqlen_q=90, seqlen_k=130),
    case("one query", seqlen_q=1, seqlen_k=700, num_heads=8, num_heads_kv=2, head_dim=128),
]
OTHERS = [
    PLAIN,
    case("bias with gradient", bias="1hqk", head_dim=32, dtype="float16"),
    case("everything", bias="bhqk", mask="b11k", dropout_p=0.2, softcap=20.0, dtype="float16", head_dim=40),
    case("packed", seqlens=((70, 90), (0, 5), (120, 140)), causal=True),
    case("float32", dtype="float32", seqlen_q=90, seqlen_k=130, causal=True),
    case("d256", head_dim=256, seqlen_q=70, seqlen_k=90),
    case("one query", seqlen_q=1, seqlen_k=700, num_heads=8, num_heads_kv=2, head_dim=128),
]


ALWAYS = {
    **dict.fromkeys(("sm_75", "sm_80"), (PLAIN.name,)),
    "sm_89": ("everything",),
    "sm_90": ("bias and mask",),
}
"""What is not left to the full matrix: every family of kernels, with most features on one GPU of each."""


def pairs() -> Iterator[Any]:
    for name in GPUS:
        for asked in HOPPER if name == "sm_90" else OTHERS:
            if name == "sm_75" and asked.dtype == "float32":
                continue  # refused: its matrix instructions are those of float16
            if name == "sm_75" and asked.dtype == "bfloat16":
                asked = case(asked.name, **{**_given(asked), "dtype": "float16"})
            always = asked.name in ALWAYS.get(name, ())
            yield pytest.param(name, asked, marks=[] if always else [pytest.mark.slow], id=f"{name}-{asked.name}")


def _given(asked: Case) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in asked.__slots__ if name != "name"}


@pytest.mark.parametrize(("gpu", "asked"), list(pairs()))
def test_forward_and_backward(gpu: str, asked: Case, machine: Any) -> None:
    with simulator.simulated(machine, GPUS[gpu]) as driver:
        check(driver, asked)
    assert len(driver.launched) >= 2


MANY = case("more tiles than slots", batch=8, num_heads=8, seqlen_k=900)
FAULTS = {
    "cp.async is not waited for": ("sm_80", PLAIN, r"cp\.async\.wait_(group \d+|all);", "", "NaN|max error"),
    "TMA is not waited for": ("sm_90", PLAIN, r"@done bra DONE;\nbra RETRY;", "bra DONE;", "NaN|max error|memory"),
    "no slot becomes free": ("sm_90", MANY, r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", "", "deadlock"),
    "a row too many is stored": ("sm_80", PLAIN, r"setp\.ge\.s32", "setp.gt.s32", "NaN|max error|nobody"),
}  # fmt: skip
"""What is wrong: GPU, problem, text of the PTX, what it becomes, what is said then.

A tile's number that is read too early is whatever shared memory held: results are wrong, or an address is nobody's.
"""


SEEN_BY_FULL = ("no slot becomes free", "a row too many is stored")
"""A wait without an end and a store beyond the end, which take the longest to see."""


@pytest.mark.parametrize("fault", [pytest.param(x, marks=pytest.mark.slow) if x in SEEN_BY_FULL else x for x in FAULTS])
def test_faults_of_kernels_show(fault: str, machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    gpu, asked, pattern, replacement, said = FAULTS[fault]
    original = simulator.compile_to_ptx
    changed = []

    def compile_to_ptx(*arguments: Any) -> tuple[bytes, str]:
        text, log = original(*arguments)
        wrong, count = re.subn(pattern, replacement, text.decode())
        changed.append(count)
        return wrong.encode(), log

    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(simulator, "compile_to_ptx", compile_to_ptx)
    with (
        simulator.simulated(machine, GPUS[gpu]) as driver,
        pytest.raises((AssertionError, simulator.SimulationError), match=said),
    ):
        check(driver, asked, backward=False)
    assert any(changed)
