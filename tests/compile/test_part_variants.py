"""Kernels of parts of a larger attention: those with dropout differ from the whole's, the others are the same."""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import Any

import modifiers
import numpy as np
import pytest

import nvrtc_attn
from nvrtc_attn import heuristics
from nvrtc_attn.front.call import CallOptions, describe_shapes
from nvrtc_attn.front.part import ArrayStart, Part
from nvrtc_attn.front.problem import dense_layout
from nvrtc_attn.front.tensors import Device
from nvrtc_attn.jit.compile import compile_kernel
from nvrtc_attn.jit.config import KernelConfig

pytest.importorskip("cuda.bindings.nvrtc")

RESULTS = ("out", "dq", "dk", "dv")
PART = Part(heads=(4, 32), rows=(1024, 8192), keys=(0, 8192))


def configs(
    part: Part | None, arch: str, dtype: str = "bfloat16", queries: int = 1024, head_dim: int = 64, **options: Any
) -> list[KernelConfig]:
    """Every kernel of both passes."""
    heads = (8, 4, 4)
    shapes = {
        name: ((2, length, count, head_dim), dtype)
        for name, length, count in zip("qkv", (queries, 1024, 1024), heads, strict=True)
    }
    if options.pop("mask", False):
        shapes["mask"] = ((2, 1, queries, 1024), "bool")
    call = describe_shapes(shapes, CallOptions(return_lse=True, part=part, **options), Device("cuda", 0))
    target: dict[str, Any] = {"arch": arch, "num_sms": 132, "smem_limit": 232448 if arch == "sm_90" else 101376}
    problem = call.with_dense()
    launches = heuristics.choose_forward(problem, **target).launches
    launches += heuristics.choose_backward(problem, **target).launches
    return list(dict.fromkeys(launch.config for launch in launches))


def name(value: object) -> str | None:
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items()) or "plain"
    return None


def with_dropout(arch: str, changes: dict[str, Any]) -> list[KernelConfig]:
    return [config for config in configs(PART, arch, dropout_p=0.1, **changes) if config.features.part]


@pytest.mark.compiles(kernels=with_dropout, in_table=False)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("sm_90", {}), ("sm_90", {"causal": True, "head_dim": 128}), ("sm_90", {"mask": True}),
        ("sm_89", {"mask": True}), ("sm_90", {"head_dim": 192}), ("sm_89", {}),
        ("sm_89", {"queries": 1, "causal": True}), ("sm_75", {"dtype": "float16"}), ("sm_90", {"dtype": "float32"}),
    ],
    ids=name,
)  # fmt: skip
def test_kernels_with_dropout_of_a_part_compile_and_do_not_spill(arch: str, changes: dict[str, Any]) -> None:
    """The asserts in the entry file check the params, which have the sizes of the whole behind all others."""
    found = with_dropout(arch, changes)
    assert found
    for config in found:
        kernel = compile_kernel(config)
        if config.kernel != "backward_portable":  # at the limit of registers without it
            assert kernel.spill_bytes == 0, config


def placed_by_counts(head_dim: int, arch: str) -> list[KernelConfig]:
    shapes = {
        name: ((1, n, count, head_dim), "bfloat16")
        for name, n, count in zip("qkv", (512, 4096, 4096), (8, 4, 4), strict=True)
    }
    options = CallOptions(causal=True, window_size=(700, None), return_lse=True)
    call = describe_shapes(shapes | {"seqused_k": ((1,), "int32")}, options, Device("cuda", 0))
    target: dict[str, Any] = {"arch": arch, "num_sms": 132, "smem_limit": 232448 if arch == "sm_90" else 101376}
    shares = {name: dense_layout(shapes["k"][0], "float32") for name in ("dk", "dv")}
    launches = heuristics.choose_forward(call.with_dense(), **target).launches
    launches += heuristics.choose_backward(call.with_outputs(**shares), **target).launches
    return list(dict.fromkeys(launch.config for launch in launches))


@pytest.mark.compiles(kernels=placed_by_counts, in_table=False)
@pytest.mark.slow(sample=["64-sm_89"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_89"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_of_rows_that_a_device_places_compile_and_do_not_spill(head_dim: int, arch: str) -> None:
    """A causal mask that ends where a count of keys on the device says, dk and dv float32: shares of a sum."""
    configs_of_call = placed_by_counts(head_dim, arch)
    masked = [x.kernel for x in configs_of_call if x.features.seqused_k and x.features.band]
    assert {"forward", "backward"} == {name.partition("_")[0] for name in masked}, masked
    for config in configs_of_call:
        assert compile_kernel(config).spill_bytes == 0, config


def float32_configs(
    arch: str, head_dim: int, seqlen: int = 1024, dtype: str = "bfloat16", **options: Any
) -> list[KernelConfig]:
    """Every kernel of both passes with float32 results of 16-bit tensors, and multiprocessors left to others."""
    shapes = {name: ((1, seqlen, count, head_dim), dtype) for name, count in zip("qkv", (8, 4, 4), strict=True)}
    part = Part(rows=(1024, 8192), keys=(0, 8192), sm_margin=4)
    lengths = {"seqused_k": ((1,), "int32")} if options.pop("used", False) else {}
    call = describe_shapes(shapes | lengths, CallOptions(return_lse=True, part=part, **options), Device("cuda", 0))
    target: dict[str, Any] = {"arch": arch, "num_sms": 132, "smem_limit": 232448 if arch == "sm_90" else 101376}
    results = {name: dense_layout(shapes[like][0], "float32") for name, like in zip(RESULTS, "qqkv", strict=True)}
    launches = heuristics.choose_forward(call.with_outputs(out=results.pop("out")), **target).launches
    launches += heuristics.choose_backward(call.with_outputs(**results), **target).launches
    return list(dict.fromkeys(launch.config for launch in launches))


def writers_of_float32(arch: str, changes: dict[str, Any]) -> list[KernelConfig]:
    found = float32_configs(arch, **changes)
    return [c for c in found if c.features.float32_q or c.features.float32_k or getattr(c, "tickets", False)]


@pytest.mark.compiles(kernels=writers_of_float32, in_table=False)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("sm_90", {"head_dim": 128, "seqlen": 4096, "window_size": (300, 0)}), ("sm_90", {"head_dim": 256}),
        ("sm_90", {"head_dim": 64, "seqlen": 128}), ("sm_89", {"head_dim": 64}),
        ("sm_90", {"head_dim": 128, "causal": "top_left", "used": True}), ("sm_89", {"head_dim": 64, "used": True}),
    ],
    ids=name,
)  # fmt: skip
def test_kernels_with_float32_results_compile_and_do_not_spill(arch: str, changes: dict[str, Any]) -> None:
    found = writers_of_float32(arch, changes)
    written = {config.kernel for config in found if config.features.float32_q or config.features.float32_k}
    assert len(written) >= 2, written  # what writes out, and what writes dq, dk and dv
    for config in found:
        assert compile_kernel(config).spill_bytes == 0, config


@pytest.mark.parametrize("arch", ["sm_75", "sm_89", "sm_90"])
@pytest.mark.parametrize("seqlen", [16, 49, 64, 100, 128, 256, 1024])
def test_every_float32_result_is_written_as_float32(arch: str, seqlen: int) -> None:
    """Kernels of short sequences store dq themselves, in 16 bits: they are not for parts."""
    dtype = "float16" if arch == "sm_75" else "bfloat16"
    for head_dim in (32, 40, 64, 72, 128, 256):
        for options in ({}, {"causal": True}, {"softcap": 30.0}, {"causal": "top_left", "used": True}):
            found = float32_configs(arch, head_dim, seqlen, dtype=dtype, **options)
            outputs = [c.features.float32_q for c in found if c.kernel.startswith(("forward", "combine"))]
            of_q = [c.features.float32_q for c in found if not c.kernel.startswith(("forward", "combine"))]
            of_k = [c.features.float32_k for c in found]
            assert any(outputs), (head_dim, options)
            assert any(of_q), (head_dim, options)
            assert any(of_k), (head_dim, options)
            assert not any(getattr(c, "stores_dq", False) for c in found), (head_dim, options)


def with_modifier(name: str, head_dim: int, whole: bool = False) -> list[KernelConfig]:
    case = next(x for x in modifiers.named_cases() if x.name == name)
    arrays = case.arrays((1, 8, 64, 64), np.random.default_rng(0))
    traced = nvrtc_attn.trace(*case.make(arrays))
    shapes = {key: ((1, 1024, count, head_dim), "bfloat16") for key, count in zip("qkv", (8, 4, 4), strict=True)}
    part = None if whole else Part(heads=(8, 32), rows=(1024, 8192), keys=(0, 8192), sm_margin=0)
    call = describe_shapes(
        shapes, CallOptions(return_lse=True, part=part), Device("cuda", 0), modifier=traced,
        trained=frozenset(traced.differentiable),
    )  # fmt: skip
    assert call.modifier is not None
    assert whole or len(call.modifier.numbers) > len(traced.numbers)
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
    shares = {x: dense_layout(shapes[like][0], "float32") for x, like in zip(RESULTS[2:], "kv", strict=True)}
    launches = heuristics.choose_forward(call.with_dense(), **target).launches
    launches += heuristics.choose_backward(call.with_outputs(**shares), **target).launches
    return list(dict.fromkeys(x.config for x in launches if x.config.features.modifier))


@pytest.mark.compiles(kernels=with_modifier, in_table=False)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "relative bias", "documents"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_with_modifiers_of_a_part_compile_and_do_not_spill(name: str, head_dim: int) -> None:
    """Indices of the whole are a number more for each axis, which all threads have in common.

    The gradient of a table spills 16 bytes in the backward kernel of a whole call, too, and no more in a part's.
    """
    of_whole = {x.kernel: compile_kernel(x).spill_bytes or 0 for x in with_modifier(name, head_dim, whole=True)}
    for config in with_modifier(name, head_dim):
        most = of_whole.get(config.kernel, 0) if name == "relative bias" else 0
        assert (compile_kernel(config).spill_bytes or 0) <= most, config


def test_multiprocessors_are_left_and_tiles_handed_out() -> None:
    """A smaller grid of the persistent kernels, and a counter that the host zeroes; small whole calls have neither."""
    shapes = dict.fromkeys("qkv", ((1, 2048, 16, 128), "bfloat16"))
    found = {}
    for margin in (None, 0, 8):
        options = CallOptions(return_lse=True, causal=True, part=None if margin is None else Part(sm_margin=margin))
        problem = describe_shapes(shapes, options, Device("cuda", 0)).with_dense()
        target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
        forward, backward = (f(problem, **target) for f in (heuristics.choose_forward, heuristics.choose_backward))
        main = next(x for x in backward.launches if x.config.kernel == "backward_hopper")
        zeroed = [x.nbytes for x in forward.workspaces if x.zeroed]
        found[margin] = forward.main.grid, main.grid, forward.main.config.tickets, zeroed  # type: ignore[attr-defined]
    assert found == {None: (132, 132, False, []), 0: (132, 132, True, [4]), 8: (124, 124, True, [4])}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 20)}, {"softcap": 10.0}])
def test_parts_without_dropout_run_the_kernels_of_whole_calls(options: dict[str, Any]) -> None:
    """A band in another place, which params say; where the part sees everything there is no band at all."""
    assert not any(config.features.part for config in configs(PART, "sm_90", **options))
    diagonal = Part(rows=(1024, 8192), keys=(1024, 8192))
    assert configs(diagonal, "sm_90", causal=True) == configs(None, "sm_90", causal=True)
    assert not any(
        config.features.band for config in configs(Part(rows=(4096, 8192), keys=(0, 8192)), "sm_90", causal=True)
    )


def test_whole_calls_have_kernels_of_whole_calls() -> None:
    whole = Part(rows=(0, 1024), keys=(0, 1024))
    assert configs(whole, "sm_90", dropout_p=0.1) == configs(None, "sm_90", dropout_p=0.1)


def placed_by_arrays_and_by_hosts(arch: str, changes: dict[str, Any]) -> tuple[list[KernelConfig], list[KernelConfig]]:
    """The kernels of a part whose place an array has, and of one whose place the host knows."""
    options: dict[str, Any] = {"causal": True, "dropout_p": 0.1, **changes}
    read, known = Part(rows=(ArrayStart(), 8192), keys=(ArrayStart(), 8192)), Part(rows=(1024, 8192), keys=(512, 8192))
    return configs(read, arch, **options), configs(known, arch, **options)


@pytest.mark.compiles(kernels=lambda **of: [*chain(*placed_by_arrays_and_by_hosts(**of))], in_table=False)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "changes"),
    [(arch, {"head_dim": head_dim}) for arch in ("sm_90", "sm_80") for head_dim in (64, 128)],
    ids=name,
)
def test_kernels_that_read_where_a_part_begins_spill_no_more_than_others(arch: str, changes: dict[str, Any]) -> None:
    """Causal with dropout: the same kernels and tiles as of a part whose place the host knows."""
    found = placed_by_arrays_and_by_hosts(arch, changes)
    read = [config.kernel for config in found[0] if config.features.device_starts]
    assert {"forward", "backward"} == {name.partition("_")[0] for name in read}, read
    for ours, theirs in zip(*found, strict=True):
        assert dataclasses.replace(ours, features=theirs.features) == theirs
        assert compile_kernel(ours).spill_bytes <= compile_kernel(theirs).spill_bytes, ours
