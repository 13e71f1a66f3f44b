"""The dk/dv kernel and its helpers compile for every architecture, fit its shared memory, and do not spill when hot."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from architectures import ONE_OF_EACH_CLASS, TWINS, untuned_spill_bytes

from nvrtc_attn import heuristics
from nvrtc_attn.base.architectures import ARCHITECTURES, PORTABLE_ARCHITECTURES
from nvrtc_attn.base.errors import UnsupportedError
from nvrtc_attn.front.problem import AttentionProblem, OperandLayout
from nvrtc_attn.heuristics import portable_backward, portable_backward_tile
from nvrtc_attn.heuristics.portable_backward import choose_backward
from nvrtc_attn.heuristics.portable_backward_config import smem_bytes
from nvrtc_attn.heuristics.spec import BackwardPlanSpec
from nvrtc_attn.jit.compile import compile_kernel
from nvrtc_attn.jit.config import BackwardConfig

pytest.importorskip("cuda.bindings.nvrtc")

HELPERS = ("delta", "dq_convert", "dkv_convert")
NUM_SMS = 132


def layout(shape: tuple[int, ...], dtype: str, alignment: int = 16) -> OperandLayout:
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return OperandLayout(shape=shape, strides=tuple(strides), dtype=dtype, offset_alignment=alignment)


def problem(**changes: Any) -> AttentionProblem:
    """B 4, S 2048, H 16 of bfloat16; ``bias`` and ``mask`` are shapes, ``alignment`` that of all tensors in bytes."""
    sizes: dict[str, Any] = {
        "dtype": "bfloat16", "batch": 4, "seqlen_q": 2048, "seqlen_k": 2048, "num_heads": 16, "num_heads_kv": 16,
        "head_dim": 64, "head_dim_v": changes.get("head_dim", 64),
    }  # fmt: skip
    alignment, bias, mask = (changes.pop(name, None) for name in ("alignment", "bias", "mask"))
    bias_dtype = changes.pop("bias_dtype", None)
    sizes |= {name: changes.pop(name) for name in tuple(changes) if name in sizes}
    dtype, batch, heads, heads_kv = sizes["dtype"], sizes["batch"], sizes["num_heads"], sizes["num_heads_kv"]
    queries, keys = (batch, sizes["seqlen_q"], heads), (batch, sizes["seqlen_k"], heads_kv)
    return AttentionProblem(
        **sizes,
        q=layout((*queries, sizes["head_dim"]), dtype, alignment or 16),
        k=layout((*keys, sizes["head_dim"]), dtype, alignment or 16),
        v=layout((*keys, sizes["head_dim_v"]), dtype, alignment or 16),
        bias=layout(bias, bias_dtype or dtype) if bias else None,
        mask=layout(mask, "bool") if mask else None,
        **changes,
    )


def plan(arch: str, **changes: Any) -> BackwardPlanSpec:
    if arch == "sm_75" and changes.get("dtype", "bfloat16") == "bfloat16":
        changes["dtype"] = "float16"
    return choose_backward(
        problem(**changes), arch=arch, num_sms=NUM_SMS, smem_limit=ARCHITECTURES[arch].smem_per_block_optin,
        legacy_mma=arch == "sm_75",
    )  # fmt: skip


def dkv(spec: BackwardPlanSpec) -> BackwardConfig:
    (config,) = (launch.config for launch in spec.launches if launch.config.kernel == "backward_portable")
    assert isinstance(config, BackwardConfig)
    return config


def check(config: BackwardConfig, *, max_spill: int = 0) -> None:
    compiled = compile_kernel(config)
    assert not re.search(r"C75\d\d", compiled.log), compiled.log
    assert (compiled.spill_bytes or 0) <= max_spill, f"{config}: {compiled.spill_bytes} bytes of spills"


FULL_BIAS = (4, 16, 2048, 2048)
ALL_FEATURES: dict[str, Any] = {
    "bias": FULL_BIAS, "bias_dtype": "float32", "dbias": True, "mask": (1, 1, 2048, 2048), "softcap": 20.0,
    "dropout_p": 0.1, "window_left": 100, "window_right": 0, "seqused_k": True, "num_heads_kv": 4, "head_dim_v": 40,
}  # fmt: skip
UNBOUNDED = 1 << 20
EVERYWHERE = [{"window_right": 0}, {"head_dim": 128}, {"head_dim": 40, "varlen": True, "seqused_k": True}]
# No spill where a plain or masked training step spends its time.
HOT: list[dict[str, Any]] = [
    {},
    {"window_right": 0},
    {"head_dim": 128},
    {"head_dim": 128, "window_right": 0},
    {"head_dim": 128, "dropout_p": 0.1},
    {"head_dim": 128, "varlen": True, "window_right": 0, "num_heads_kv": 4},
    {"head_dim": 32},
    {"head_dim": 80},
    {"head_dim": 96, "window_right": 0},
    {"head_dim": 192, "head_dim_v": 128, "window_right": 0},
    {"head_dim": 256, "window_right": 0},
    {"softcap": 30.0},
    {"dropout_p": 0.1},
    {"dtype": "float32"},
    {"dtype": "float32", "head_dim": 128, "window_right": 0},
    *({"head_dim": d, "window_right": 0, "seqlen_q": 1024, "seqlen_k": 1024} for d in (64, 128, 256)),
]
# These spill addresses around the loop's products: measured faster than the variants that do not (tile table).
WARM: list[tuple[dict[str, Any], int]] = [
    ({"bias": FULL_BIAS, "dbias": True}, 64),
    ({"mask": (4, 1, 2048, 2048)}, 96),
    ({"head_dim": 128, "varlen": True, "window_right": 0, "num_heads_kv": 4, "seqlen_q": 1024, "seqlen_k": 1024}, 48),
]
RARE: list[dict[str, Any]] = [
    ALL_FEATURES,
    {"head_dim": 59, "alignment": 2},
    {"head_dim": 512},
    {"dtype": "float32", "head_dim": 512},
    {"softmax_scale": -1.0, "head_dim": 104},
    {"deterministic": True, "bias": FULL_BIAS, "dbias": True, "head_dim": 128},
]


def name(value: object) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "all_features" if value is ALL_FEATURES else ",".join(f"{k}={v}" for k, v in value.items()) or "plain"
    return None


@pytest.mark.slow(sample=[f"{arch}-window_right=0" for arch in ONE_OF_EACH_CLASS])
@pytest.mark.compiles(kernels=lambda arch, changes: [dkv(plan(arch, **changes))])
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        (arch, changes)
        for arch in PORTABLE_ARCHITECTURES
        for changes in (EVERYWHERE[:1] if arch in TWINS else EVERYWHERE)
    ],
    ids=name,
)
def test_every_architecture(arch: str, changes: dict[str, Any]) -> None:
    config = dkv(plan(arch, **changes))
    assert config.smem_bytes <= ARCHITECTURES[arch].smem_per_block_optin
    # The tiles were tuned for sm_90; what ptxas spills elsewhere is a few addresses outside the products.
    check(config, max_spill=0 if arch == "sm_90" else 128)


@pytest.mark.slow(sample=["head_dim=128,varlen=True,window_right=0,num_heads_kv=4"])
@pytest.mark.compiles(kernels=lambda changes: [dkv(plan("sm_90", **changes))])
@pytest.mark.parametrize("changes", HOT, ids=name)
def test_hot_variants_do_not_spill(changes: dict[str, Any]) -> None:
    check(dkv(plan("sm_90", **changes)), max_spill=untuned_spill_bytes())


@pytest.mark.slow
@pytest.mark.compiles(kernels=lambda changes, max_spill: [dkv(plan("sm_90", **changes))])
@pytest.mark.parametrize(("changes", "max_spill"), WARM, ids=name)
def test_spills_stay_small(changes: dict[str, Any], max_spill: int) -> None:
    check(dkv(plan("sm_90", **changes)), max_spill=max_spill)


@pytest.mark.slow(sample=["all_features-sm_86"])
@pytest.mark.compiles(kernels=lambda changes, arch: [dkv(plan(arch, **changes))])
@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_90"])
@pytest.mark.parametrize("changes", RARE, ids=name)
def test_rare_variants_compile(changes: dict[str, Any], arch: str) -> None:
    if arch == "sm_75" and changes.get("dtype") == "float32":
        pytest.skip("float32 products are emulated there: covered by the dq and dbias kernels")
    check(dkv(plan(arch, **changes)), max_spill=UNBOUNDED)


HELPED: list[dict[str, Any]] = [{}, {"alignment": 2, "head_dim": 59}, {"varlen": True, "head_dim": 8}]


def helper(kernel: str, arch: str, changes: dict[str, Any]) -> BackwardConfig:
    config = dkv(plan(arch, **changes))
    return dataclasses.replace(
        config, kernel=kernel, num_warps=8, features=dataclasses.replace(config.features, band=False)
    )


@pytest.mark.slow(
    sample=[
        f"{name(changes)}-{arch}-{kernel}"
        for kernel in HELPERS
        for arch in ONE_OF_EACH_CLASS
        for changes in (HELPED if arch == "sm_86" else HELPED[:1])
    ]
)
@pytest.mark.compiles(kernels=lambda kernel, arch, changes: [helper(kernel, arch, changes)])
@pytest.mark.parametrize("kernel", HELPERS)
@pytest.mark.parametrize("arch", ONE_OF_EACH_CLASS)
@pytest.mark.parametrize("changes", HELPED, ids=name)
def test_helpers_do_not_spill(kernel: str, arch: str, changes: dict[str, Any]) -> None:
    check(helper(kernel, arch, changes))


def helper_shape(config: BackwardConfig) -> tuple[object, ...]:
    """What decides how delta and the conversions divide a tile among their threads."""
    width = config.head_dim_v if config.kernel == "delta" else config.head_dim
    rows = config.block_n if config.kernel == "dkv_convert" else config.block_m
    return config.kernel, config.itemsize, width, rows, config.num_warps, config.aligned


def helper_configs(dtype: str) -> list[BackwardConfig]:
    """The kernels without products, of every small head dim and some large ones, with few and many query rows."""
    found: dict[tuple[object, ...], BackwardConfig] = {}
    for arch in ("sm_90", "sm_86", "sm_75"):
        for head_dim in (8, 16, 24, 40, 64, 128, 512 if arch != "sm_75" else 256):
            for more in ({"varlen": True}, {"batch": 1, "num_heads": 2, "num_heads_kv": 1}, {"alignment": 2}):
                for rows in (16, 2048):
                    if more == {"alignment": 2} and (head_dim, rows) not in ((8, 16), (128, 2048)):
                        continue
                    for launch in plan(arch, dtype=dtype, head_dim=head_dim, seqlen_q=rows, **more).launches:
                        if launch.config.kernel in HELPERS:
                            assert isinstance(launch.config, BackwardConfig)
                            found.setdefault(helper_shape(launch.config), launch.config)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.reliability(69)
@pytest.mark.compiles(kernels=helper_configs)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_shape_of_the_helpers_compiles(dtype: str) -> None:
    configs = helper_configs(dtype)
    assert {config.kernel for config in configs} == set(HELPERS)
    # A tile may have fewer rows than the threads of one pass would take.
    assert any(config.block_m < config.num_threads // 2 and config.head_dim_v == 8 for config in configs)
    for config in configs:
        check(config)


@pytest.mark.reliability(69)
@pytest.mark.parametrize("arch", PORTABLE_ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_head_dim_has_a_tile_that_fits(arch: str, dtype: str) -> None:
    limit = ARCHITECTURES[arch].smem_per_block_optin
    # 64 KiB hold float32 tiles of 16 rows up to this head dim.
    largest = 328 if arch == "sm_75" and dtype == "float32" else 512
    for head_dim in range(8, largest + 8, 8):
        for head_dim_v in {8, head_dim}:
            config = dkv(plan(arch, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v))
            assert (config.head_dim, config.head_dim_v) == (head_dim, head_dim_v)
            assert config.smem_bytes == smem_bytes(config) <= limit


@pytest.mark.reliability(69)
def test_no_tile_names_what_is_missing() -> None:
    with pytest.raises(UnsupportedError, match="no tile") as error:
        choose_backward(problem(head_dim=512), arch="sm_90", num_sms=NUM_SMS, smem_limit=32 << 10)
    assert error.value.reasons
    assert all(str(32 << 10) in reason for reason in error.value.reasons)


@pytest.mark.reliability(22)
def test_every_reason_is_reported() -> None:
    what = problem(head_dim=520, bias=(1, 1, 1, 2048), varlen=True)
    with pytest.raises(UnsupportedError) as error:
        choose_backward(what, arch="sm_75", num_sms=40, smem_limit=64 << 10, legacy_mma=True)
    assert [reason.split(":")[0] for reason in error.value.reasons] == ["head_dim", "dtype", "bias"]


def test_few_key_tiles_split_the_query_loop() -> None:
    spec = plan("sm_90", batch=2, seqlen_q=4096, seqlen_k=77)
    kernels = [launch.config.kernel for launch in spec.launches]
    assert kernels == ["delta", "backward_portable", "dkv_convert", "dq_convert"]
    assert dict(spec.launches[1].params)["num_splits"] > 1
    (accumulator,) = (w for w in spec.workspaces if w.field == "dkv_accum")
    assert accumulator.zeroed
    assert accumulator.nbytes == 4 * 2 * 16 * 128 * (64 + 64)
    packed = plan("sm_90", batch=2, seqlen_q=4096, seqlen_k=77, varlen=True)
    assert [launch.config.kernel for launch in packed.launches] == kernels
    assert dict(packed.launches[1].params)["num_splits"] == dict(spec.launches[1].params)["num_splits"]
    # Of 77 tokens and 2 sequences, each of which begins in a tile of its own.
    assert next(w for w in packed.workspaces if w.field == "dkv_accum").nbytes == 4 * 16 * (0 + 2 + 1) * 128 * (64 + 64)


def test_causal_key_tiles_are_interleaved_by_two_waves() -> None:
    def group(**changes: Any) -> int:
        return dict(plan("sm_90", **changes).launches[1].params)["head_group"]

    assert group(batch=16, seqlen_q=1024, seqlen_k=1024) == 1
    # 8 key tiles a head; D 64 runs two thread blocks a multiprocessor.
    assert group(window_right=0, batch=16, seqlen_q=1024, seqlen_k=1024) == 2 * 2 * NUM_SMS // 8
    assert group(window_right=0, head_dim=128) == 2 * NUM_SMS // 16
    assert group(window_right=0, head_dim=128, seqlen_q=65536, seqlen_k=65536) == 1


def test_short_causal_kernels_leave_out_what_is_above_the_diagonal() -> None:
    short: dict[str, Any] = {"window_right": 0, "seqlen_q": 1024, "seqlen_k": 1024}
    assert dkv(plan("sm_90", **short)).skip_hidden
    assert dkv(plan("sm_90", window_left=256, window_right=0)).skip_hidden
    bias = {"bias": (4, 16, 1024, 1024), "dbias": True}
    for other in ({"seqlen_q": 4096}, {"window_right": None}, {"dropout_p": 0.1}, {"dtype": "float32"}, bias):
        assert not dkv(plan("sm_90", **(short | other))).skip_hidden


@pytest.mark.reliability(36)
def test_deterministic_plans_have_no_accumulators() -> None:
    spec = plan("sm_90", batch=2, seqlen_q=4096, seqlen_k=77, deterministic=True)
    assert {w.field for w in spec.workspaces} == {"delta", "row_lse"}
    assert dkv(spec).dq == "none"
    assert not dkv(spec).split
    assert "backward_dq" in [launch.config.kernel for launch in spec.launches]


def short_plan(arch: str = "sm_90", fused: bool = True, **changes: Any) -> BackwardPlanSpec:
    """With dq stored by the block that holds all keys."""
    sizes = {"batch": 4096, "num_heads": 4, "num_heads_kv": 4, "seqlen_q": 49, "seqlen_k": 49, "head_dim": 32}
    what = problem(**{**sizes, **changes})
    target = {"arch": arch, "num_sms": NUM_SMS, "smem_limit": ARCHITECTURES[arch].smem_per_block_optin}
    return choose_backward(what, **target, stores_dq=True, fused=fused)


SHORT_BIAS: dict[str, Any] = {"bias": (1, 4, 49, 49), "dbias": True}
SHORT: dict[str, dict[str, Any]] = {
    "swin": SHORT_BIAS,
    "causal": {"window_right": 0},
    "dropout": {"dropout_p": 0.1},
    "softcap": {"softcap": 20.0},
    "head_dim_64": {"head_dim": 64, **SHORT_BIAS},
    "128_keys": {"seqlen_q": 128, "seqlen_k": 128, "head_dim": 64},
    "256_keys": {"seqlen_q": 256, "seqlen_k": 256, "bias": (1, 4, 256, 256), "dbias": True},
    "head_dim_128": {"seqlen_q": 128, "seqlen_k": 128, "head_dim": 128},
    "head_dim_256": {"head_dim": 256},
    "float32": {"dtype": "float32"},
}


@pytest.mark.slow(sample=["swin"])
@pytest.mark.compiles(kernels=lambda name: [dkv(short_plan(**SHORT[name]))])
@pytest.mark.parametrize("name", SHORT)
def test_one_tile_of_keys_does_not_spill(name: str) -> None:
    check(dkv(short_plan(**SHORT[name])))


def test_one_tile_of_keys_needs_no_launch_beside_its_kernel() -> None:
    spec = short_plan()
    (launch,) = spec.launches
    assert launch.grid == 4096 * 4
    assert {w.field for w in spec.workspaces} == {"delta"}
    assert dkv(spec).stores_dq
    assert dkv(spec).fused
    assert [x.config.kernel for x in short_plan(fused=False).launches] == ["delta", "backward_portable"]
    assert {w.field for w in short_plan(fused=False).workspaces} == {"delta", "row_lse"}
    # The kernel before it has no workspace of dq to zero.
    before = short_plan(fused=False).launches[0].config
    assert isinstance(before, BackwardConfig)
    assert before.dq == "none"
    gradient_of_bias = [x.config.kernel for x in short_plan(**SHORT_BIAS).launches]
    assert gradient_of_bias == ["backward_portable", "backward_dbias", "dbias_reduce"]


def test_short_sequences_have_small_tiles_and_more_blocks() -> None:
    """Three blocks a multiprocessor up to head dim 32, of 168 registers a thread."""
    assert (dkv(short_plan()).block_m, dkv(short_plan()).block_n, dkv(short_plan()).min_blocks_per_sm) == (64, 64, 3)
    assert dkv(short_plan(head_dim=64)).min_blocks_per_sm == 2
    longer = dkv(short_plan(seqlen_q=100, seqlen_k=100))
    assert longer.block_n == 128
    assert dkv(short_plan(seqlen_q=300, seqlen_k=200)).block_n == 256
    assert dkv(plan("sm_90", head_dim=32)).min_blocks_per_sm == 2, "what was measured stays"


@pytest.mark.parametrize(
    "changes",
    [{"varlen": True}, {"mask": (4096, 1, 1, 49)}, {"seqlen_k": 257}, {"head_dim": 256, "seqlen_k": 65}],
    ids=name,
)
def test_dq_of_several_blocks_is_added_up(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        short_plan(**changes)


def test_other_operands_have_the_kernels_that_their_gradients_read_from() -> None:
    """A sink's gradient comes from the statistics of ``delta``."""
    sizes: dict[str, Any] = {"batch": 64, "seqlen_q": 49, "seqlen_k": 49, "head_dim": 32}
    assert portable_backward_tile.may_store_dq(problem(**sizes))
    assert not portable_backward_tile.may_store_dq(problem(**sizes, further=(("sink", layout((16,), "float32")),)))


def test_plans_that_store_dq_are_candidates() -> None:
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": NUM_SMS, "smem_limit": 232448}
    short = problem(batch=64, seqlen_q=49, seqlen_k=49, head_dim=32)
    found = [dkv(spec) for spec in portable_backward.candidates(short, **target)]
    assert [(c.stores_dq, c.fused) for c in found[:3]] == [(True, True), (True, False), (False, False)]
    for other in (problem(), problem(batch=64, seqlen_q=49, seqlen_k=100, head_dim=512)):
        assert not any(dkv(spec).stores_dq for spec in portable_backward.candidates(other, **target))


def test_short_sequences_store_dq() -> None:
    """Up to 64 tokens ahead of every family, up to 128 where the portable family serves them, in its own tile."""
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": NUM_SMS, "smem_limit": 232448}
    sizes = {"batch": 256, "seqlen_q": 49, "seqlen_k": 49, "head_dim": 32}
    swin = problem(dtype="float16", **sizes)

    def kernels(what: AttentionProblem, backend: str = "auto") -> list[str]:
        return [x.config.kernel for x in heuristics.choose_backward(what, **target, backend=backend).launches]

    for backend in ("auto", "portable"):
        assert kernels(swin, backend) == ["delta", "backward_portable"]
    assert kernels(swin, "legacy") == ["delta", "backward_portable", "dq_convert"]
    full = {"seqlen_q": 64, "seqlen_k": 64, "head_dim": 64}
    assert kernels(problem(**{**sizes, **full})) == ["delta", "backward_portable"]
    assert "backward_hopper" in kernels(problem(**{**sizes, **full}), "hopper")
    # A wave of thread blocks at most: no launch before the kernel.
    assert kernels(problem(**{**sizes, "batch": 1})) == ["backward_portable"]
    assert kernels(problem(**{**sizes, "batch": 8, "seqlen_q": 64, "seqlen_k": 64})) == ["backward_portable"]
    for longer in ({"seqlen_q": 65, "seqlen_k": 65}, {"seqlen_k": 65}, {"head_dim": 72}):
        what = problem(**{**sizes, **full, **longer})
        assert "backward_hopper" in kernels(what)
        assert kernels(what, "portable") == ["delta", "backward_portable"]
    for other in ({"varlen": True}, {"head_dim": 512}, {"seqlen_q": 129}, {"seqlen_k": 129}):
        assert "dq_convert" in kernels(problem(**{**sizes, **other}), "portable"), other


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_120"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dq_is_stored_in_the_tile_of_the_table(arch: str, head_dim: int) -> None:
    """Past 64 tokens: the tile that holds all keys and the one with enough warps may be different ones."""
    target = {"arch": arch, "num_sms": NUM_SMS, "smem_limit": ARCHITECTURES[arch].smem_per_block_optin}
    what = problem(batch=64, seqlen_q=128, seqlen_k=128, head_dim=head_dim)
    table, first = (dkv(make(what, **target)) for make in (choose_backward, portable_backward.choose_first))
    assert (first.block_m, first.block_n, first.num_warps) == (table.block_m, table.block_n, table.num_warps)
    assert first.stores_dq == (table.block_n == 128)
