"""Kernels with a sink compile for every class of architectures without a spill; those that read none are as without."""

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
from nvrtc_attn.jit.codegen import params_class
from nvrtc_attn.jit.config import Features, ForwardConfig, KernelConfig
from nvrtc_attn.jit.params import BackwardParams, ForwardParams, HopperForwardParams, params_behind

pytest.importorskip("cuda.bindings.nvrtc")


def problem(
    head_dim: int = 64, *, dtype: str = "bfloat16", batch: int = 4, rows: int = 2048, keys: int = 2048,
    heads: int = 16, heads_kv: int = 16, packed: bool = False, bias: bool = False, sink: str | None = "float32",
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
    if sink is not None:
        shapes["sink"] = ((heads,), sink)
    asked = CallOptions(return_lse=True, dsink=sink is not None, **options)
    return describe_shapes(shapes, asked, Device("cuda", 0)).with_dense()


def launches(asked: AttentionProblem, arch: str, backend: str, *, backward: bool, **changes: Any) -> tuple[Launch, ...]:
    limit = ARCHITECTURES[arch].smem_per_block_optin
    target: dict[str, Any] = {"arch": arch, "num_sms": 132, "smem_limit": limit, "backend": backend}
    choose = heuristics.choose_backward if backward else heuristics.choose_forward
    return choose(asked, **target, **changes).launches


DECODE: dict[str, Any] = {"batch": 1, "rows": 1, "keys": 8192, "heads": 64, "heads_kv": 8}
CASES: dict[str, dict[str, Any]] = {
    "d64": {},
    "d64-float16-sink": {"dtype": "float16", "sink": "float16"},
    "d64-window": {"causal": True, "window_size": (127, 0), "heads": 64, "heads_kv": 8},
    "d64-causal-short": {"causal": True, "rows": 512, "keys": 512},
    "d64-softcap": {"softcap": 30.0},
    "d64-bias": {"bias": True},
    "d64-dropout": {"dropout_p": 0.1},
    "d64-packed": {"packed": True, "causal": True},
    "d128": {"head_dim": 128},
    "d128-causal": {"head_dim": 128, "causal": True},
    "d128-dropout": {"head_dim": 128, "dropout_p": 0.1, "causal": True},
    "d128-packed": {"head_dim": 128, "packed": True, "causal": True},
    "d192": {"head_dim": 192, "causal": True},
    "d256": {"head_dim": 256, "causal": True},
}
PORTABLE: dict[str, dict[str, Any]] = {
    "d64": {}, "d64-causal": {"causal": True}, "d128-causal": {"head_dim": 128, "causal": True}, "decode": DECODE,
    "float32": {"dtype": "float32", "head_dim": 128},
}  # fmt: skip
ALWAYS_HOPPER = ["d64-window"]


def readers(found: tuple[Launch, ...]) -> list[KernelConfig]:
    return [launch.config for launch in found if launch.config.features.optional == "sink"]


def hopper(name: str) -> list[KernelConfig]:
    asked = problem(**CASES[name])
    (forward,) = readers(launches(asked, "sm_90", "hopper", backward=False))
    (gradient,) = readers(launches(asked, "sm_90", "hopper", backward=True))
    assert (forward.kernel, gradient.kernel) == ("forward_hopper", "sink_gradient")
    assert gradient.arch == "sm_90a"
    return [forward, gradient]


def portable(arch: str, name: str) -> list[KernelConfig]:
    fields = dict(PORTABLE[name])
    if arch == "sm_75":
        fields["dtype"] = "float16"
    asked = problem(**fields)
    if name == "decode":
        (merge,) = readers(launches(asked, arch, "portable", backward=False, clusters=False))
        (whole,) = readers(launches(asked, arch, "portable", backward=False))
        assert merge.kernel == "combine"
        assert whole == merge or (arch == "sm_90" and isinstance(whole, ForwardConfig) and whole.cluster > 1)
        return list(dict.fromkeys([merge, whole]))
    forward = readers(launches(asked, arch, "portable", backward=False))
    assert [config.kernel for config in forward] == ["forward_portable"]
    return [*forward, *readers(launches(asked, arch, "portable", backward=True))]


@pytest.mark.slow(sample=ALWAYS_HOPPER)
@pytest.mark.compiles(kernels=hopper)
@pytest.mark.parametrize("name", CASES)
def test_hopper_variants_compile_clean(name: str) -> None:
    for config in hopper(name):
        check_clean(config)


@pytest.mark.slow(sample=["d64-sm_75"])
@pytest.mark.compiles(kernels=portable)
@pytest.mark.parametrize("arch", ONE_OF_EACH_CLASS)
@pytest.mark.parametrize("name", PORTABLE)
def test_portable_variants_compile_clean(arch: str, name: str) -> None:
    for config in portable(arch, name):
        check_clean(config)


def gradient(arch: str) -> list[KernelConfig]:
    """The kernel of the sink's gradient alone."""
    return [config for config in portable(arch, "d64") if config.kernel == "sink_gradient"]


@pytest.mark.compiles(kernels=gradient)
@pytest.mark.parametrize("arch", ONE_OF_EACH_CLASS)
def test_the_gradient_compiles_everywhere(arch: str) -> None:
    (config,) = gradient(arch)
    check_clean(config)


# Causal, in a window or packed they have a tile of their own at head dim 64, and causal at 192.
OWN_TILES = ("d64-window", "d64-causal-short", "d64-packed", "d192")


@pytest.mark.parametrize("name", [name for name in CASES if name not in OWN_TILES])
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_only_what_reads_a_sink_differs(name: str, backend: str) -> None:
    """The same tiles and kernels as without one; one small kernel more in the backward pass."""
    fields = CASES[name]
    for backward in (False, True):
        given = launches(problem(**fields), "sm_90", backend, backward=backward)
        plain = launches(problem(**fields | {"sink": None}), "sm_90", backend, backward=backward)
        if backward:
            *given_, last = given
            assert last.config.kernel == "sink_gradient"
            assert last.grid == problem(**fields).num_heads
            assert params_class(last.config) is params_behind(BackwardParams, further=True)
            assert tuple(given_) == plain
        else:
            *before, launch = given
            *before_too, without = plain
            assert before == before_too  # the list of packed tiles
            config = dataclasses.replace(launch.config, features=without.config.features)
            assert dataclasses.replace(launch, config=config) == without
            base = HopperForwardParams if "hopper" in config.kernel else ForwardParams
            assert params_class(launch.config) is params_behind(base, further=True)


def test_with_split_keys_the_sink_counts_in_the_merge() -> None:
    split, merge = launches(problem(**DECODE), "sm_90", "auto", backward=False, clusters=False)
    plain = launches(problem(**DECODE, sink=None), "sm_90", "auto", backward=False, clusters=False)
    assert split == plain[0]
    assert (merge.config.kernel, merge.config.features) == ("combine", Features(optional="sink"))


def test_without_the_gradient_the_backward_pass_is_that_without_a_sink() -> None:
    asked = dataclasses.replace(problem(), dsink=False)
    for backend in ("hopper", "portable"):
        plain = launches(problem(sink=None), "sm_90", backend, backward=True)
        assert launches(asked, "sm_90", backend, backward=True) == plain
