"""Kernels with max_logit compile for every class of architectures without a spill; others know nothing of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from architectures import ONE_OF_EACH_CLASS
from clean_compile import check_clean

from nvrtc_attn import heuristics
from nvrtc_attn.base.architectures import ARCHITECTURES
from nvrtc_attn.front.call import CallOptions, describe_shapes
from nvrtc_attn.front.problem import AttentionProblem
from nvrtc_attn.front.tensors import Device
from nvrtc_attn.heuristics.spec import Launch
from nvrtc_attn.jit.config import KernelConfig

pytest.importorskip("cuda.bindings.nvrtc")


def problem(
    head_dim: int = 64, *, dtype: str = "bfloat16", batch: int = 4, rows: int = 2048, keys: int = 2048, heads: int = 16,
    heads_kv: int = 16, packed: bool = False, bias: bool = False, sink: bool = False, wanted: bool = True,
    **options: Any,
) -> AttentionProblem:  # fmt: skip
    tokens_q, tokens_k = ((1, batch * rows), (1, batch * keys)) if packed else ((batch, rows), (batch, keys))
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "q": ((*tokens_q, heads, head_dim), dtype),
        **dict.fromkeys(("k", "v"), ((*tokens_k, heads_kv, head_dim), dtype)),
    }
    if packed:
        shapes |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ((batch + 1,), "int32"))
        options |= {"max_seqlen_q": rows, "max_seqlen_k": keys}
    if bias:
        shapes["bias"] = ((1, heads, rows, keys), dtype)
    if sink:
        shapes["sink"] = ((heads,), "float32")
    asked = CallOptions(return_lse=True, return_max_logit=wanted, **options)
    return describe_shapes(shapes, asked, Device("cuda", 0)).with_dense()


def launches(asked: AttentionProblem, arch: str, backend: str, **changes: Any) -> tuple[Launch, ...]:
    limit = ARCHITECTURES[arch].smem_per_block_optin
    target: dict[str, Any] = {"arch": arch, "num_sms": 132, "smem_limit": limit, "backend": backend}
    return heuristics.choose_forward(asked, **target, **changes).launches


DECODE: dict[str, Any] = {"batch": 1, "rows": 1, "keys": 8192, "heads": 64, "heads_kv": 8}
FEW: dict[str, Any] = {"batch": 1, "rows": 16, "keys": 4096, "heads": 64, "heads_kv": 8}
HOPPER: dict[str, dict[str, Any]] = {
    "d64": {},
    "d64-causal": {"causal": True},
    "d64-window": {"causal": True, "window_size": (127, 0), "heads": 64, "heads_kv": 8},
    "d64-softcap": {"softcap": 30.0},
    "d64-negative-scale": {"softmax_scale": -0.1},
    "d64-bias": {"bias": True},
    "d64-dropout": {"dropout_p": 0.1},
    "d64-packed": {"packed": True},
    "d64-packed-causal": {"packed": True, "causal": True},
    "d64-packed-softcap": {"packed": True, "causal": True, "softcap": 30.0},
    "d64-sink": {"sink": True, "causal": True},
    "d96": {"head_dim": 96},
    "d128": {"head_dim": 128},
    "d128-causal": {"head_dim": 128, "causal": True},
    "d128-causal-short": {"head_dim": 128, "causal": True, "rows": 512, "keys": 512},
    "d128-dropout": {"head_dim": 128, "dropout_p": 0.1, "causal": True},
    "d128-packed": {"head_dim": 128, "packed": True, "causal": True},
    "d192": {"head_dim": 192, "causal": True},
    "d256": {"head_dim": 256, "causal": True},
}
PORTABLE: dict[str, dict[str, Any]] = {
    "d64": {}, "d64-causal": {"causal": True}, "d64-packed": {"packed": True, "causal": True},
    "d128-causal": {"head_dim": 128, "causal": True}, "d128-softcap": {"head_dim": 128, "causal": True, "softcap": 9.0},
    "d256": {"head_dim": 256}, "bias": {"bias": True}, "decode": DECODE, "few-queries": FEW | {"head_dim": 128},
    "float32": {"dtype": "float32", "head_dim": 128},
}  # fmt: skip
ALWAYS_HOPPER = ["d64-packed-causal"]


def writers(found: tuple[Launch, ...]) -> list[KernelConfig]:
    return [launch.config for launch in found if launch.config.features.max_logit]


def hopper(name: str) -> list[KernelConfig]:
    (forward,) = writers(launches(problem(**HOPPER[name]), "sm_90", "hopper"))
    assert forward.kernel == "forward_hopper"
    return [forward]


def portable(arch: str, name: str) -> list[KernelConfig]:
    fields = dict(PORTABLE[name])
    if arch == "sm_75":
        fields["dtype"] = "float16"
    (forward,) = writers(launches(problem(**fields), arch, "portable"))
    assert forward.kernel == "forward_portable"
    return [forward]


@pytest.mark.slow(sample=ALWAYS_HOPPER)
@pytest.mark.compiles(kernels=hopper)
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_variants_compile_clean(name: str) -> None:
    for config in hopper(name):
        check_clean(config)


@pytest.mark.slow(sample=["d64-sm_80"])
@pytest.mark.compiles(kernels=portable)
@pytest.mark.parametrize("arch", ONE_OF_EACH_CLASS)
@pytest.mark.parametrize("name", PORTABLE)
def test_portable_variants_compile_clean(arch: str, name: str) -> None:
    for config in portable(arch, name):
        check_clean(config)


# Where registers decide, max_logit has a tile of its own.
OWN_TILES = ("d64-causal", "d64-softcap", "d64-negative-scale", "d64-packed-softcap", "d128-causal-short")


@pytest.mark.parametrize("name", [name for name in HOPPER if name not in OWN_TILES])
def test_only_the_kernel_that_computes_scores_differs(name: str) -> None:
    """The same tiles, grids and further kernels as without it, and a little more shared memory."""
    # Portable packed sequences of head dim 64 have a tile of their own with it.
    for backend in ("hopper", "portable")[: 1 if name.startswith("d64-packed") else 2]:
        given = launches(problem(**HOPPER[name]), "sm_90", backend)
        plain = launches(problem(**HOPPER[name], wanted=False), "sm_90", backend)
        assert len(given) == len(plain)
        for launch, without in zip(given, plain, strict=True):
            features = dataclasses.replace(launch.config.features, max_logit=False)
            config = dataclasses.replace(launch.config, features=features)
            assert 0 <= launch.smem_bytes - without.smem_bytes <= 8 * config.num_threads
            assert dataclasses.replace(launch, config=config, smem_bytes=without.smem_bytes) == without


def test_with_split_keys_every_split_writes_its_own() -> None:
    (cluster,) = launches(problem(**DECODE), "sm_90", "auto")
    assert cluster.config.features.max_logit
    split, merge = launches(problem(**DECODE), "sm_90", "auto", clusters=False)
    assert split.config.features.max_logit
    assert not merge.config.features.max_logit
    assert merge == launches(problem(**DECODE, wanted=False), "sm_90", "auto", clusters=False)[1]
