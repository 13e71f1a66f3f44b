"""The kernels of dq and dbias compile for every architecture, fit its shared memory, and do not spill when hot."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from architectures import ONE_OF_EACH_CLASS, TWINS

from nvrtc_attn.base.architectures import ARCHITECTURES, PORTABLE_ARCHITECTURES
from nvrtc_attn.front.problem import AttentionProblem, OperandLayout
from nvrtc_attn.heuristics.portable_dq import choose_dbias, choose_dq, smem_bytes
from nvrtc_attn.heuristics.spec import Launch
from nvrtc_attn.jit.codegen import entry_source, params_class
from nvrtc_attn.jit.compile import compile_kernel
from nvrtc_attn.jit.config import DbiasConfig, DqConfig, KernelConfig
from nvrtc_attn.jit.params import BackwardParams

pytest.importorskip("cuda.bindings.nvrtc")


def layout(shape: tuple[int, ...], dtype: str, padding: int = 0) -> OperandLayout:
    strides = [1]
    for size in (shape[-1] + padding, *shape[-2:0:-1]):
        strides.insert(0, strides[0] * size)
    return OperandLayout(shape=shape, strides=tuple(strides), dtype=dtype, offset_alignment=16 if not padding else 2)


def problem(**changes: Any) -> AttentionProblem:
    """A problem of B 4, S 2048, H 16; ``bias`` is a shape, ``padding`` elements between rows make it unaligned."""
    sizes: dict[str, Any] = {
        "dtype": "bfloat16", "batch": 4, "seqlen_q": 2048, "seqlen_k": 2048, "num_heads": 16, "num_heads_kv": 16,
        "head_dim": 64, "bias": None, "bias_dtype": None, "mask": False, "padding": 0,
    }  # fmt: skip
    names = {field.name for field in dataclasses.fields(AttentionProblem)}
    sizes |= {name: value for name, value in changes.items() if name in sizes}
    rest = {name: value for name, value in changes.items() if name not in sizes and name in names}
    head_dim_v = rest.pop("head_dim_v", sizes["head_dim"])
    dtype, padding = sizes["dtype"], sizes.pop("padding")
    bias, bias_dtype, mask = sizes.pop("bias"), sizes.pop("bias_dtype"), sizes.pop("mask")
    queries, keys = (sizes["batch"], sizes["seqlen_q"]), (sizes["batch"], sizes["seqlen_k"])
    heads, heads_kv, head_dim = sizes["num_heads"], sizes["num_heads_kv"], sizes["head_dim"]
    return AttentionProblem(
        **sizes, head_dim_v=head_dim_v,
        q=layout((*queries, heads, head_dim), dtype, padding),
        k=layout((*keys, heads_kv, head_dim), dtype, padding),
        v=layout((*keys, heads_kv, head_dim_v), dtype, padding),
        bias=layout(bias, bias_dtype or dtype) if bias else None,
        mask=layout((1, 1, queries[1], keys[1]), "bool") if mask else None,
        deterministic=True, dbias=bias is not None, **rest,
    )  # fmt: skip


def launches_of(kernel: str, what: AttentionProblem, arch: str) -> tuple[Launch, ...]:
    target = {"arch": arch, "num_sms": 132, "smem_limit": ARCHITECTURES[arch].smem_per_block_optin}
    if kernel == "dq":
        return (choose_dq(what, **target, legacy_mma=arch == "sm_75"),)  # type: ignore[arg-type]
    return choose_dbias(what, **target, legacy_mma=arch == "sm_75")[0]  # type: ignore[arg-type]


def check(config: KernelConfig, *, spills: bool = False) -> None:
    compiled = compile_kernel(config)
    assert "trap" not in compiled.log
    if not spills:
        assert not compiled.spill_bytes, f"{config}: {compiled.spill_bytes} bytes of spills"


ALL_FEATURES = {
    "bias": (1, 16, 2048, 2048), "bias_dtype": "float32", "mask": True, "softcap": 20.0, "dropout_p": 0.1,
    "window_right": 0, "window_left": 100, "seqused_k": True, "num_heads_kv": 4, "head_dim_v": 40,
}  # fmt: skip
EVERYWHERE = [
    ("dq", {"head_dim": 128, "window_right": 0}),
    ("dq", {"dtype": "float32", "head_dim": 72}),
    ("dbias", {"bias": (1, 16, 2048, 2048)}),
    ("dbias", {"bias": (1, 1, 1, 2048), "dtype": "float32", "dropout_p": 0.1}),
]
SOME = [
    ("dq", {}),
    ("dq", {"window_right": 0}),
    ("dq", {"head_dim": 40, "varlen": True, "seqused_k": True}),
    ("dq", {"head_dim": 256, "window_right": 0}),
    ("dq", {"head_dim": 192, "head_dim_v": 128}),
    ("dq", {"bias": (1, 16, 2048, 2048)}),
    ("dq", {"dropout_p": 0.1}),
    ("dq", {"dtype": "float32", "head_dim": 128}),
    ("dbias", {"bias": (4, 16, 1, 2048), "head_dim": 80}),
    ("dbias", {"bias": (1, 16, 2048, 2048), "head_dim": 128, "window_right": 0}),
    ("dbias", {"bias": (1, 16, 2048, 1), "bias_dtype": "float32"}),
]
RARE = [
    ("dq", {"head_dim": 512}),
    ("dq", {"dtype": "float32", "head_dim": 512}),
    ("dq", {"padding": 1, "head_dim": 104}),
    ("dq", ALL_FEATURES),
    ("dbias", ALL_FEATURES),
    ("dbias", {"bias": (1, 1, 1, 1), "head_dim": 512, "padding": 1}),
]


def name(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items()) if value != ALL_FEATURES else "all_features"
    return str(value)


def launches(kernel: str, changes: dict[str, Any], arch: str) -> tuple[Launch, ...]:
    if arch == "sm_75" and "dtype" not in changes:
        changes = {**changes, "dtype": "float16"}
    return launches_of(kernel, problem(**changes), arch)


def configs(kernel: str, changes: dict[str, Any], arch: str) -> list[KernelConfig]:
    return [launch.config for launch in launches(kernel, changes, arch)]


@pytest.mark.slow(
    sample=[
        f"{kernel}-{name(changes)}-{arch}"
        for kernel, changes, targets in (
            (*EVERYWHERE[0], ONE_OF_EACH_CLASS),  # dq
            (*EVERYWHERE[2], [arch for arch in ONE_OF_EACH_CLASS if arch not in TWINS]),  # dbias
            (*EVERYWHERE[3], ["sm_110"]),  # dbias by partial sums, in half the time of older architectures
        )
        for arch in targets
    ]
)
@pytest.mark.compiles(kernels=configs)
@pytest.mark.parametrize(
    ("kernel", "changes", "arch"),
    [
        (kernel, changes, arch)
        for kernel, changes in EVERYWHERE
        for arch in PORTABLE_ARCHITECTURES
        if arch not in TWINS or (kernel, changes) in (EVERYWHERE[0], EVERYWHERE[3])
    ],
    ids=name,
)
def test_every_architecture(kernel: str, changes: dict[str, Any], arch: str) -> None:
    for launch in launches(kernel, changes, arch):
        assert launch.smem_bytes <= ARCHITECTURES[arch].smem_per_block_optin
        check(launch.config, spills=arch == "sm_75")


def reduction(arch: str) -> list[KernelConfig]:
    """The kernel that adds up the partial sums."""
    return [config for config in configs(*EVERYWHERE[3], arch) if config.kernel == "dbias_reduce"]


@pytest.mark.compiles(kernels=reduction)
@pytest.mark.parametrize("arch", ONE_OF_EACH_CLASS)
def test_partial_sums_are_added_up_everywhere(arch: str) -> None:
    (config,) = reduction(arch)
    check(config)


@pytest.mark.slow(sample=["dq-dtype=float32,head_dim=128"])
@pytest.mark.compiles(kernels=lambda kernel, changes: configs(kernel, changes, "sm_90"))
@pytest.mark.parametrize(("kernel", "changes"), SOME, ids=name)
def test_hot_variants_do_not_spill(kernel: str, changes: dict[str, Any]) -> None:
    for launch in launches_of(kernel, problem(**changes), "sm_90"):
        check(launch.config)


@pytest.mark.slow(sample=["dbias-all_features"])
@pytest.mark.compiles(kernels=lambda kernel, changes: configs(kernel, changes, "sm_86"))
@pytest.mark.parametrize(("kernel", "changes"), RARE, ids=name)
def test_rare_variants_compile(kernel: str, changes: dict[str, Any]) -> None:
    for launch in launches_of(kernel, problem(**changes), "sm_86"):
        check(launch.config, spills=True)


@pytest.mark.reliability(69)
@pytest.mark.parametrize("arch", PORTABLE_ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_head_dim_fits_shared_memory(arch: str, dtype: str) -> None:
    limit = ARCHITECTURES[arch].smem_per_block_optin
    for head_dim in range(8, 513, 8):
        for head_dim_v in (8, head_dim, 512):
            what = problem(
                dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, bias=(1, 16, 1, 2048), bias_dtype="float32"
            )
            for kernel in ("dq", "dbias"):
                for launch in launches_of(kernel, what, arch):
                    assert launch.smem_bytes == smem_bytes(launch.config) <= limit
                    assert launch.block == launch.config.num_threads


@pytest.mark.parametrize("kernel", ["dq", "dbias"])
def test_fields_reach_the_source(kernel: str) -> None:
    (launch,) = launches_of(kernel, problem(bias=(1, 16, 2048, 2048)), "sm_90")
    config = launch.config
    assert params_class(config) is BackwardParams
    own = DqConfig if kernel == "dq" else DbiasConfig
    source = entry_source(config)
    for field in dataclasses.fields(own):
        value = getattr(config, field.name)
        if field.name in ("kernel", "arch", "dtype", "features", "dbias_dtype"):
            continue
        changed = not value if isinstance(value, bool) else value + 8
        assert entry_source(dataclasses.replace(config, **{field.name: changed})) != source, field.name


SHAPES = [(1, 16, 2048, 2048), (4, 16, 1, 2048), (1, 1, 1, 2048), (1, 1, 1, 1), (4, 1, 2048, 1), (4, 16, 2048, 2048)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dbias_partials_are_bounded(shape: tuple[int, ...]) -> None:
    numel = shape[0] * shape[1] * shape[2] * shape[3]
    launches, splits, partial_bytes = choose_dbias(
        problem(bias=shape), arch="sm_90", num_sms=132, smem_limit=ARCHITECTURES["sm_90"].smem_per_block_optin
    )
    assert partial_bytes == (4 * splits * numel if splits > 1 else 0)
    assert partial_bytes <= 256 << 20
    assert len(launches) == (2 if splits > 1 else 1)
    assert isinstance(launches[0].config, DbiasConfig)
    assert launches[0].config.split == (splits > 1)
    assert launches[0].grid >= 132, "work for every multiprocessor"


def test_bias_without_elements_needs_no_kernel() -> None:
    launches, splits, partial_bytes = choose_dbias(
        problem(bias=(0, 16, 2048, 2048), batch=0), arch="sm_90", num_sms=132, smem_limit=1 << 17
    )
    assert (launches, splits, partial_bytes) == ((), 1, 0)
