"""The portable tiles of GPUs with less shared memory, on this GPU: plans are made as if it had 99 or 163 KB a block."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import pytest
from harness import Run, backend, failures, forget_plans, oracle, torch

from nvrtc_attn.heuristics.spec import label
from nvrtc_attn.plans import autotune
from nvrtc_attn.runtime import device

SMALL, LARGE = 99, 163
TAILS: dict[str, Any] = {"batch": 2, "seqlen_q": 333, "seqlen_k": 411, "num_heads": 4, "num_heads_kv": 2}
CAUSAL: dict[str, Any] = {"causal": True}
EVERYTHING: dict[str, Any] = {
    "bias": "bhqk", "mask": "b1qk", "softcap": 20.0, "dropout_p": 0.2, "window_size": (150, 0), "dlse": True,
}  # fmt: skip
# (KB, head dims, options, words of the labels of the forward and of the backward plan)
CASES: dict[str, tuple[int, tuple[int, int], dict[str, Any], str, str]] = {
    "d64": (SMALL, (64, 64), {}, "128x128", "64x128 num_warps=4 v_in_registers"),
    "d64_causal": (SMALL, (64, 64), CAUSAL, "128x128", "v_in_registers skip_hidden"),
    "d64_everything": (SMALL, (64, 64), EVERYTHING, "64x64", "v_in_registers"),
    "d64_few_keys": (SMALL, (64, 64), {"seqlen_q": 3000, "seqlen_k": 77}, "128x80", "v_in_registers splits"),
    "d40_window": (SMALL, (40, 40), {"window_size": (100, 20)}, "128x128", "64x128"),
    "d56_unaligned": (SMALL, (56, 56), {"layout": "unaligned"}, "64x64", "64x128 num_warps=4 v_in_registers"),
    "d80": (SMALL, (80, 80), {**CAUSAL, "dlse": True}, "128x32", "64x128 num_warps=8"),
    "d96": (SMALL, (96, 96), {}, "", "64x128 num_warps=8 v_in_registers"),
    "d128": (SMALL, (128, 128), {}, "128x32", "64x128 num_warps=8 num_stages=2 v_in_registers"),
    "d128_causal": (SMALL, (128, 128), CAUSAL, "128x32", "64x128 num_warps=8 num_stages=2 v_in_registers"),
    "d128_dropout": (SMALL, (128, 128), {**CAUSAL, "dropout_p": 0.2, "softcap": 20.0}, "", "64x128 num_warps=8"),
    "d128_everything": (SMALL, (128, 128), EVERYTHING, "64x64", "64x64 num_warps=8"),
    "d160": (SMALL, (160, 160), CAUSAL, "num_warps=8", "64x64 num_warps=8"),
    "d192": (SMALL, (192, 192), {"dropout_p": 0.2}, "num_warps=8", "64x64 num_warps=8 v_in_registers"),
    "d192_128": (SMALL, (192, 128), CAUSAL, "num_warps=8", "num_warps=8"),
    "d200": (SMALL, (200, 200), CAUSAL, "num_warps=8", "num_warps=8 v_in_registers"),
    "d256": (SMALL, (256, 256), {}, "num_warps=8", "32x64 num_warps=8 v_in_registers"),
    "d256_causal": (SMALL, (256, 256), CAUSAL, "num_warps=8", "32x64 num_warps=8 v_in_registers"),
    "d256_bias": (SMALL, (256, 256), {**EVERYTHING, "bias": "1hqk"}, "num_warps=8", "32x64 num_warps=8 v_in_registers"),
    "d256_everything": (SMALL, (256, 256), EVERYTHING, "num_warps=8", "64x32 num_warps=8 v_in_registers"),
    "d256_72": (SMALL, (256, 72), {"bias": "1hqk"}, "num_warps=8", "num_warps=8"),
    "d72_248": (SMALL, (72, 248), {"softcap": 5.0}, "64x64", "num_warps=8"),
    "f32_d64": (SMALL, (64, 64), {"dtype": "float32"}, "128x32", "64x64 num_warps=8"),
    "f32_d96": (SMALL, (96, 96), {"dtype": "float32", **CAUSAL}, "64x32", "32x64 num_warps=8"),
    "f32_d128": (SMALL, (128, 128), {"dtype": "float32"}, "num_warps=8", ""),
    "f32_d192": (SMALL, (192, 192), {"dtype": "float32", **CAUSAL}, "64x32 num_warps=8 warps_n=2", ""),
    "d64_deterministic": (SMALL, (64, 64), {"deterministic": True}, "", ""),
    "d128_deterministic": (SMALL, (128, 128), {"deterministic": True, **CAUSAL}, "", ""),
    "d192_deterministic": (SMALL, (192, 192), {"deterministic": True, "mask": "b11k"}, "", ""),
    "d256_deterministic": (SMALL, (256, 256), {"deterministic": True, **CAUSAL}, "", ""),
    "d192_128_on_8.0": (LARGE, (192, 128), CAUSAL, "num_warps=4", "num_warps=8"),
    "d256_on_8.0": (LARGE, (256, 256), CAUSAL, "num_warps=8", "64x64 num_warps=8"),
    "f32_d160_on_8.0": (LARGE, (160, 160), {"dtype": "float32"}, "64x32", "64x32 num_warps=8"),
    "f32_d192_on_8.0": (LARGE, (192, 192), {"dtype": "float32", **CAUSAL}, "num_warps=8", ""),
    "d128_deterministic_on_8.0": (LARGE, (128, 128), {"deterministic": True}, "", ""),
    "d256_deterministic_on_8.0": (LARGE, (256, 256), {"deterministic": True, **CAUSAL}, "", ""),
}
PACKED: dict[str, Any] = {"seqlens": ((200, 200), (0, 5), (131, 300), (1, 1)), "tail": (3, 7)}


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the plans that are made."""
    found: list[str] = []

    def noted(choose: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            spec = choose(*arguments, **options)
            found.append(label(spec))
            return spec

        return call

    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    forget_plans(monkeypatch)
    for name in ("choose_forward", "choose_backward"):
        monkeypatch.setattr(autotune, name, noted(getattr(autotune, name)))
    return found


def limit_smem(monkeypatch: pytest.MonkeyPatch, kib: int) -> None:
    whole = device.properties(torch.cuda.current_device())
    if whole.smem_per_block_optin < kib << 10:
        pytest.skip(f"{whole.name} has less than {kib} KB of shared memory per block")
    less = dataclasses.replace(whole, smem_per_block_optin=kib << 10)
    monkeypatch.setattr(device, "_properties", {whole.index: less})


def check(case: cases.Case) -> None:
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    with backend("portable"):
        forward = run.forward()
        gradients = run.backward(forward)
        if case.deterministic:
            again = run.backward(forward)
            assert all(torch.equal(gradients[name], again[name]) for name in ("dq", "dk", "dv"))
    assert not failures(case, {**forward, **gradients}, exact, low, run.arrays)


@pytest.mark.parametrize("name", CASES)
def test_tiles(name: str, labels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kib, (head_dim, head_dim_v), options, forward, backward = CASES[name]
    limit_smem(monkeypatch, kib)
    fields: dict[str, Any] = {"dtype": "bfloat16", **TAILS, **options}
    check(cases.make_case(f"less-smem-{name}", head_dim=head_dim, head_dim_v=head_dim_v, **fields))
    for words, found in zip((forward, backward), list(dict.fromkeys(labels))[:2], strict=True):
        assert all(word in found for word in words.split()), f"the table has {found} for what is tested as {words}"


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_packed_sequences(head_dim: int, labels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    limit_smem(monkeypatch, SMALL)
    check(
        cases.make_case(
            f"less-smem-packed-{head_dim}", head_dim=head_dim, num_heads=4, num_heads_kv=2, causal=True, **PACKED
        )
    )
    assert len(set(labels)) == 2
