"""Every variant of the Hopper backward kernels compiles for sm_90a without a GPU, a spill or a warning."""

from __future__ import annotations

import dataclasses
import re
import struct
from typing import Any

import pytest
from architectures import untuned_spill_bytes

from nvrtc_attn.front.problem import AttentionProblem, OperandLayout, dense_layout
from nvrtc_attn.heuristics import choose_backward, hopper_backward, hopper_backward_tile, hopper_dbias
from nvrtc_attn.heuristics.hopper_backward import kernel_of
from nvrtc_attn.heuristics.spec import BackwardPlanSpec, Launch, label
from nvrtc_attn.jit.codegen import entry_source
from nvrtc_attn.jit.compile import CompiledKernel, compile_source
from nvrtc_attn.jit.config import BackwardConfig, HopperBackwardConfig, KernelConfig

pytest.importorskip("cuda.bindings.nvrtc")

SMEM_LIMIT = 232448  # bytes a block may use on compute capability 9.0
TARGET: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": SMEM_LIMIT}
FEW_SMS = 4
"""The problems here are small: on so few multiprocessors they have more key tiles than those."""


def problem(head_dim: int = 128, dtype: str = "bfloat16", **changes: Any) -> AttentionProblem:
    batch = 1 if changes.get("varlen") else 2
    layout = dense_layout((batch, 512, 4, head_dim), dtype)
    values: dict[str, Any] = {
        "dtype": dtype, "batch": 2, "seqlen_q": 512, "seqlen_k": 512, "num_heads": 4, "num_heads_kv": 4,
        "head_dim": head_dim, "head_dim_v": head_dim, "softmax_scale": head_dim**-0.5,
        "q": layout, "k": layout, "v": layout,
    }  # fmt: skip
    return AttentionProblem(**{**values, **changes})


def wide(head_dim: int, head_dim_v: int, **changes: Any) -> AttentionProblem:
    batch = 1 if changes.get("varlen") else 2
    return problem(head_dim, head_dim_v=head_dim_v, v=dense_layout((batch, 512, 4, head_dim_v), "bfloat16"), **changes)


def plan(asked: AttentionProblem, **tile: Any) -> BackwardPlanSpec:
    chosen = dataclasses.replace(hopper_backward_tile.choose_tile(asked, FEW_SMS), **tile)
    return hopper_backward.plan_spec(asked, chosen, num_sms=132)


def compiled(config: KernelConfig) -> CompiledKernel:
    return compile_source(entry_source(config), config.arch, config=config)


SCORES = OperandLayout(shape=(2, 4, 512, 512), strides=(4 * 512 * 512, 512 * 512, 512, 1), dtype="bfloat16")
FLOAT16_SCORES, FLOAT32_SCORES = (dataclasses.replace(SCORES, dtype=name) for name in ("float16", "float32"))
MASK = dataclasses.replace(SCORES, dtype="bool")
HALF = dataclasses.replace(SCORES, dtype="float16")
BATCH_SHARED = OperandLayout(shape=(1, 4, 512, 512), strides=(0, 512 * 512, 512, 1), dtype="bfloat16")
ONE_ROW = OperandLayout(shape=(2, 1, 1, 512), strides=(512, 0, 0, 1), dtype="bfloat16")
ODD_ROWS = OperandLayout(shape=(2, 4, 512, 128), strides=(4 * 512 * 129, 512 * 129, 129, 1), dtype="bfloat16")
CAUSAL = {"window_right": 0}
SEQLENS_4096 = {"seqlen_q": 4096, "seqlen_k": 4096}
VARIANTS: dict[str, AttentionProblem] = {
    **{f"d{d}": problem(d) for d in (16, 24, 40, 64, 72, 80, 96, 128)},
    **{f"d{d}_causal": problem(d, **CAUSAL) for d in (16, 32, 40, 64, 80, 96, 128)},
    **{f"d{d}_varlen_plain": problem(d, varlen=True) for d in (24, 72, 80, 96)},
    **{f"d{d}_varlen_causal": problem(d, varlen=True, **CAUSAL) for d in (32, 72, 80, 96)},
    "d16_dbias_causal": problem(16, bias=SCORES, dbias=True, **CAUSAL),
    "d32_dropout_causal": problem(32, dropout_p=0.1, **CAUSAL),
    "d24_dropout_varlen_seqused_k": problem(24, dropout_p=0.1, varlen=True, seqused_k=True, **CAUSAL),
    "d16_softcap": problem(16, softcap=30.0),
    "d32_deterministic_varlen": problem(32, deterministic=True, varlen=True, **CAUSAL),
    "d24_key_mask": problem(24, mask=dataclasses.replace(MASK, shape=(2, 1, 1, 512), strides=(512, 0, 0, 1))),
    "d96_8192_causal": problem(96, seqlen_q=8192, **CAUSAL),
    "d80_72": wide(80, 72, **CAUSAL),
    "d72_96": wide(72, 96, window_left=100, window_right=20),
    **{f"d{d}_float16_causal": problem(d, "float16", **CAUSAL) for d in (64, 128)},
    "d64_float16": problem(64, "float16"),
    "d64_window": problem(64, window_left=100, window_right=20),
    "d128_window": problem(128, window_left=100, window_right=20),
    "d64_varlen_seqused_k": problem(64, varlen=True, seqused_k=True, **CAUSAL),
    "d128_varlen": problem(128, varlen=True, **CAUSAL),
    **{f"d{d}_varlen_full": problem(d, varlen=True, seqused_k=d == 64) for d in (64, 128, 192)},
    "d128_varlen_dropout_full": problem(128, varlen=True, dropout_p=0.1),
    "d64_softcap": problem(64, softcap=30.0, **CAUSAL),
    "d128_softcap": problem(128, softcap=30.0, **CAUSAL),
    "d64_negative_scale": problem(64, softmax_scale=-0.1),
    "d64_dbias_causal": problem(64, bias=SCORES, dbias=True, **CAUSAL),
    "d128_dbias_causal": problem(128, bias=SCORES, dbias=True, **CAUSAL),
    "d32_dbias": problem(32, bias=SCORES, dbias=True),
    "d64_dbias": problem(64, bias=SCORES, dbias=True),
    "d64_dbias_float16_window": problem(64, "float16", bias=HALF, dbias=True, window_left=100, window_right=20),
    "d64_bias_one_row": problem(64, bias=ONE_ROW, dbias=True),
    "d64_bias_float32_dbias": problem(64, bias=dataclasses.replace(SCORES, dtype="float32"), dbias=True),
    "d96_dbias": problem(96, bias=SCORES, dbias=True),
    "d128_dbias_window": problem(128, bias=SCORES, dbias=True, window_left=100, window_right=20),
    "d64_softcap_dbias": problem(64, bias=SCORES, dbias=True, softcap=30.0),
    "d64_dbias_negative_scale": problem(64, bias=SCORES, dbias=True, softmax_scale=-0.1),
    "d128_bias_float32": problem(128, bias=dataclasses.replace(SCORES, dtype="float32")),
    "d128_one_key_tile_dbias_by_threads": problem(128, seqlen_k=128, bias=ODD_ROWS, dbias=True, **CAUSAL),
    "d128_mask": problem(128, mask=MASK),
    "d128_dropout_causal": problem(128, dropout_p=0.1, **CAUSAL),
    # Lengths at which the loop or who prepares the rows is another one.
    **{f"d{d}_4096": problem(d, **SEQLENS_4096) for d in (40, 64, 128)},
    "d128_4096_float16": problem(128, "float16", **SEQLENS_4096),
    "d128_4096_negative_scale": problem(128, softmax_scale=-0.1, **SEQLENS_4096),
    "d128_16384_causal": problem(128, seqlen_q=16384, **CAUSAL),
    "d128_16384_negative_scale_window": problem(
        128, "float16", seqlen_q=16384, softmax_scale=-0.1, window_left=100, window_right=20
    ),
    "d64_4096_float16": problem(64, "float16", **SEQLENS_4096),
    "d64_4096_negative_scale": problem(64, softmax_scale=-0.1, **SEQLENS_4096),
    **{f"d{d}_8192": problem(d, seqlen_q=8192) for d in (40, 64, 80, 128)},
    **{f"d{d}_8192_causal": problem(d, seqlen_q=8192, **CAUSAL) for d in (64, 128)},
    "d64_8192_negative_scale": problem(64, seqlen_q=8192, softmax_scale=-0.1),
    "d64_8192_varlen_causal": problem(64, seqlen_q=8192, varlen=True, **CAUSAL),
    "d64_one_key_tile": problem(64, seqlen_k=77),
    "d64_one_key_tile_mask": problem(
        64, seqlen_k=128, mask=dataclasses.replace(MASK, shape=(2, 1, 1, 128), strides=(128, 0, 0, 1))
    ),
    "d64_one_key_tile_dbias_causal": problem(
        64,
        seqlen_k=128,
        bias=dataclasses.replace(SCORES, shape=(2, 4, 512, 128), strides=(4 << 16, 1 << 16, 128, 1)),
        dbias=True,
        **CAUSAL,
    ),
    "d96_one_key_tile_causal": problem(96, seqlen_k=128, **CAUSAL),
    "d128_one_key_tile_softcap_causal": problem(128, seqlen_k=128, softcap=30.0, seqused_k=True, **CAUSAL),
    "d64_dropout": problem(64, dropout_p=0.1),
    "d64_dropout_varlen_seqused_k": problem(64, dropout_p=0.1, varlen=True, seqused_k=True, **CAUSAL),
    "d96_dropout": problem(96, dropout_p=0.1),
    "d128_dropout_float16": problem(128, "float16", dropout_p=0.1),
    "d128_dropout_varlen": problem(128, dropout_p=0.1, varlen=True, **CAUSAL),
    "d64_deterministic": problem(64, deterministic=True),
    "d64_deterministic_varlen": problem(64, deterministic=True, varlen=True, **CAUSAL),
    "d64_deterministic_dropout_varlen": problem(64, deterministic=True, dropout_p=0.1, varlen=True, **CAUSAL),
    "d128_deterministic_window": problem(128, deterministic=True, window_left=100, window_right=20),
    "d128_deterministic_dbias_causal": problem(128, deterministic=True, bias=SCORES, dbias=True, **CAUSAL),
    "d128_deterministic_dropout": problem(128, deterministic=True, dropout_p=0.1),
    "d64_deterministic_mask_causal": problem(64, deterministic=True, mask=MASK, **CAUSAL),
    "d64_everything": problem(64, bias=SCORES, mask=MASK, softcap=30.0, dropout_p=0.1, **CAUSAL),
    # Beyond 128 columns, and where one width alone is beyond 64.
    **{f"d{d}": problem(d) for d in (136, 160, 192, 224, 256)},
    **{f"d{d}_causal": problem(d, **CAUSAL) for d in (160, 256)},
    **{f"d{d}_{dv}": wide(d, dv, **CAUSAL) for d, dv in ((192, 128), (256, 64), (64, 256), (128, 64), (40, 72))},
    "d256_float16_causal": problem(256, "float16", **CAUSAL),
    "d256_window": problem(256, window_left=100, window_right=20),
    "d256_varlen": problem(256, varlen=True, **CAUSAL),
    "d192_128_varlen_seqused_k": wide(192, 128, varlen=True, seqused_k=True),
    "d256_negative_scale": problem(256, softmax_scale=-0.1),
    "d256_softcap": problem(256, softcap=30.0, **CAUSAL),
    "d256_softcap_varlen": problem(256, softcap=30.0, varlen=True, seqused_k=True, window_left=100, window_right=20),
    "d256_dbias_causal": problem(256, bias=SCORES, dbias=True, **CAUSAL),
    "d192_128_dbias_causal": wide(192, 128, bias=SCORES, dbias=True, **CAUSAL),
    # The order of a turn with P ahead, and the largest head dims that have it.
    "d192_causal": problem(192, **CAUSAL),
    "d192_mask": problem(192, mask=MASK),
    "d192_mask_varlen": problem(192, mask=MASK, varlen=True, seqused_k=True, **CAUSAL),
    "d256_128_dropout_varlen": wide(256, 128, dropout_p=0.1, varlen=True, seqused_k=True, **CAUSAL),
    "d192_128_dropout_varlen": wide(192, 128, dropout_p=0.1, varlen=True, **CAUSAL),
    "d192_128_softcap_dropout": wide(192, 128, dropout_p=0.1, softcap=30.0),
    "d192_128_negative_scale": wide(192, 128, softmax_scale=-0.1, **CAUSAL),
    "d256_bias_float32": problem(256, bias=dataclasses.replace(SCORES, dtype="float32"), dbias=True),
    "d256_mask": problem(256, mask=MASK),
    "d128_bias_negative_scale": problem(128, "float16", bias=FLOAT16_SCORES, dbias=True, softmax_scale=-0.1, **CAUSAL),
    "d64_bias_mask_softcap_causal": problem(64, bias=SCORES, mask=MASK, softcap=30.0, **CAUSAL),
    "d64_bias_mask_causal": problem(64, bias=SCORES, mask=MASK, **CAUSAL),
    "d64_bias_float32_mask_dropout_softcap": problem(
        64, bias=FLOAT32_SCORES, dbias=True, mask=MASK, dropout_p=0.1, softcap=30.0, **CAUSAL
    ),
    "d40_bias_float32_mask_softcap": problem(40, bias=FLOAT32_SCORES, mask=MASK, softcap=30.0),
    "d256_dropout_causal": problem(256, dropout_p=0.1, **CAUSAL),
    "d256_dropout_varlen": problem(256, dropout_p=0.1, varlen=True, seqused_k=True, **CAUSAL),
    "d256_bias_mask": problem(256, bias=SCORES, mask=MASK, dbias=True, **CAUSAL),
    "d256_bias_mask_window": problem(256, bias=SCORES, mask=MASK, window_left=100, window_right=20),
    "d240_mask": problem(240, mask=MASK),
    "d240_96_bias_float32_mask": wide(240, 96, bias=FLOAT32_SCORES, dbias=True, mask=MASK),
    "d160_256_bias_float32": wide(160, 256, bias=FLOAT32_SCORES),
    "d96_160_softcap_bias_float32_mask": wide(96, 160, softcap=30.0, bias=FLOAT32_SCORES, mask=MASK),
    "d192_bias_mask_dropout": problem(192, bias=SCORES, mask=MASK, dropout_p=0.1, **CAUSAL),
    "d256_bias_float32_dropout": problem(256, bias=FLOAT32_SCORES, dbias=True, dropout_p=0.1),
    "d256_dropout_varlen_dense": problem(256, dropout_p=0.1, varlen=True),
    "d192_softcap_dropout_varlen": problem(192, softcap=30.0, dropout_p=0.1, varlen=True, **CAUSAL),
    "d192_224_dropout": wide(192, 224, dropout_p=0.1),
    "d256_224_varlen": wide(256, 224, varlen=True, **CAUSAL),
}
ALWAYS = [
    "d128_causal", "d64_dbias_causal", "d64_dropout_varlen_seqused_k", "d256_causal",
]  # fmt: skip


def count_products(code: bytes) -> int:
    """Warp-group matrix instructions of a cubin for sm_90a: opcode 0x9f0 or 0xdf0 in the low 12 bits of 16 bytes."""
    (table,) = struct.unpack_from("<Q", code, 40)
    entry_size, entries = struct.unpack_from("<HH", code, 58)
    count = 0
    for i in range(entries):
        flags, _, offset, size = struct.unpack_from("<4Q", code, table + i * entry_size + 8)
        if flags & 4:  # instructions
            words = struct.unpack_from(f"<{size // 8}Q", code, offset)[::2]
            count += sum(word & 0xFFF in (0x9F0, 0xDF0) for word in words)
    return count


@pytest.mark.slow(sample=ALWAYS)
@pytest.mark.compiles(kernels=lambda name: [kernel_of(plan(VARIANTS[name])).config])
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_compiles_clean(name: str) -> None:
    config = kernel_of(plan(VARIANTS[name])).config
    kernel = compiled(config)
    assert not re.search(r"C75\d\d|warning", kernel.log), kernel.log
    assert kernel.spill_bytes is not None
    assert kernel.spill_bytes <= untuned_spill_bytes()
    assert kernel.stack_bytes is not None
    assert kernel.stack_bytes <= untuned_spill_bytes()
    if isinstance(config, HopperBackwardConfig) and config.kernel == "backward_hopper":
        # S, dP, dV, dK, dQ once each, in steps of 16: one that an order of the turn leaves out compiles as well.
        steps = config.head_dim + config.head_dim_v + 2 * config.block_m + config.block_n
        assert count_products(kernel.code) == (1 + config.own_code) * steps // 16


def plan_with_80_queries(head_dim: int, changes: dict[str, Any]) -> BackwardPlanSpec:
    return plan(problem(head_dim, **changes), block_m=80, fused=False)


@pytest.mark.slow
@pytest.mark.compiles(kernels=lambda **of: [launch.config for launch in plan_with_80_queries(**of).launches])
@pytest.mark.parametrize("changes", [{}, CAUSAL], ids=["dense", "causal"])
@pytest.mark.parametrize("head_dim", [72, 96, 128])
def test_tiles_of_80_queries_compile_clean(head_dim: int, changes: dict[str, Any]) -> None:
    """All three launches, also where the table has another tile."""
    spec = plan_with_80_queries(head_dim, changes)
    assert kernel_of(spec).smem_bytes <= SMEM_LIMIT
    for launch in spec.launches:
        kernel = compiled(launch.config)
        assert not re.search(r"C75\d\d|warning", kernel.log), kernel.log
        assert kernel.spill_bytes == kernel.stack_bytes == 0


IN_PARTS: dict[str, AttentionProblem] = {
    "text": problem(128, num_heads=1, num_heads_kv=1, seqlen_q=32760, seqlen_k=300),
    "grouped_causal": problem(128, num_heads=16, num_heads_kv=1, seqlen_q=16384, **CAUSAL),
}
"""On `FEW_SMS` too few key tiles for whole waves, and groups of heads far larger than L2."""


@pytest.mark.slow(sample=["text"])
@pytest.mark.compiles(kernels=lambda name: [launch.config for launch in plan(IN_PARTS[name]).launches])
@pytest.mark.parametrize("name", IN_PARTS)
def test_key_tiles_in_parts_compile_clean(name: str) -> None:
    spec = plan(IN_PARTS[name])
    config = kernel_of(spec).config
    assert isinstance(config, HopperBackwardConfig)
    assert config.parts
    assert "dkv_hopper_convert" in [launch.config.kernel for launch in spec.launches]
    for launch in spec.launches:
        kernel = compiled(launch.config)
        assert not re.search(r"C75\d\d|warning", kernel.log), kernel.log
        assert kernel.spill_bytes == kernel.stack_bytes == 0


SHARED: dict[str, AttentionProblem] = {
    **{f"d{d}": problem(d, bias=BATCH_SHARED, dbias=True) for d in (32, 64, 96, 128)},
    "d64_split": problem(64, bias=BATCH_SHARED, dbias=True, batch=64),
    "d64_causal": problem(64, bias=BATCH_SHARED, dbias=True, **CAUSAL),
    "d128_window": problem(128, bias=BATCH_SHARED, dbias=True, window_left=100, window_right=20),
    "d128_float16_causal": problem(
        128, "float16", bias=dataclasses.replace(BATCH_SHARED, dtype="float16"), dbias=True, **CAUSAL
    ),
}


def shared_launch(name: str) -> Launch:
    return next(x for x in plan(SHARED[name]).launches if x.config.kernel == "backward_hopper_dbias")


@pytest.mark.slow(sample=["d64_split"])
@pytest.mark.compiles(kernels=lambda name: [shared_launch(name).config])
@pytest.mark.parametrize("name", SHARED)
def test_kernel_of_a_shared_bias_compiles_clean(name: str) -> None:
    launch = shared_launch(name)
    assert launch.smem_bytes <= SMEM_LIMIT
    kernel = compiled(launch.config)
    assert not re.search(r"C75\d\d|warning", kernel.log), kernel.log
    assert kernel.spill_bytes == 0
    assert kernel.stack_bytes == 0


@pytest.mark.slow(sample=["d128", "d64_deterministic_dropout_varlen"])
@pytest.mark.compiles(kernels=lambda name: [plan(VARIANTS[name], fused=False).launches[0].config])
@pytest.mark.parametrize(
    "name",
    [
        "d64",
        "d128",
        "d80",
        "d128_varlen",
        "d128_varlen_full",
        "d64_varlen_seqused_k",
        "d64_dropout",
        "d64_deterministic_dropout_varlen",
    ],
)
def test_kernel_before_it_compiles_clean(name: str) -> None:
    kernel = compiled(plan(VARIANTS[name], fused=False).launches[0].config)
    assert "warning" not in kernel.log
    assert kernel.spill_bytes == 0


def test_plan_of_a_dense_problem() -> None:
    """Two launches, one buffer that the host clears: counters of key tiles, of pieces of rows, of 2 x 4 heads."""
    spec = plan(problem(128, seqlen_q=500, seqlen_k=700, num_heads_kv=2))
    assert [launch.config.kernel for launch in spec.launches] == ["backward_hopper", "dq_convert"]
    assert [(item.field, item.nbytes) for item in spec.workspaces if item.zeroed] == [("counters", 4 * (2 + 8))]
    assert label(spec) == "hopper 64x128 num_warps=12 num_stages=2 fused"


def test_plan_in_three_launches() -> None:
    spec = plan(problem(128, seqlen_q=500, seqlen_k=700, num_heads_kv=2), fused=False)
    assert not any(item.zeroed for item in spec.workspaces)
    assert label(spec) == "hopper 64x128 num_warps=12 num_stages=2"
    prepare, main, convert = spec.launches
    assert [launch.config.kernel for launch in spec.launches] == [
        "backward_hopper_prepare", "backward_hopper", "dq_convert",
    ]  # fmt: skip
    # 8 tiles of 64 queries, for the rows 4 blocks each; 6 tiles of 128 keys for 2 x 2 key heads.
    assert prepare.grid == 4 * convert.grid == 4 * 8 * 4 * 2
    assert prepare.block == 256
    assert main.grid == 6 * 2 * 2
    assert main.block == 384
    assert main.smem_bytes <= SMEM_LIMIT
    assert dict(main.params)["heads_per_group"] == 2
    assert {item.field for item in main.tensor_maps} == {f"tensor_map_{x}" for x in ("q", "k", "v", "dout")}
    buffers = {item.field: item for item in spec.workspaces}
    assert buffers["dq_accum"].nbytes == 4 * 2 * 4 * 512 * 128
    assert buffers["delta"].nbytes == 4 * 2 * 4 * 512
    # The counter of key tiles lies behind the last row.
    assert dict(main.params)["counter_offset"] * 4 + 4 == buffers["row_lse"].nbytes


def test_preparation_by_length() -> None:
    """What the figures at ``choose_tile`` say; never where something else is done with registers or idle warps."""

    def chosen(head_dim: int, seqlen_q: int, **changes: Any) -> bool:
        changes = {"seqlen_k": seqlen_q, **changes}
        config = kernel_of(plan(problem(head_dim, seqlen_q=seqlen_q, **changes))).config
        assert isinstance(config, HopperBackwardConfig)
        return config.fused

    for head_dim in (64, 128):
        assert [chosen(head_dim, n) for n in (1024, 2048, 2049)] == [True, True, False]
        assert [chosen(head_dim, n, **CAUSAL) for n in (4096, 4097)] == [True, False]
    # Few key tiles or few keys: the start of the kernel would be spent waiting for rows.
    waves = problem(64, seqlen_q=1024, seqlen_k=1024)
    assert [hopper_backward_tile.choose_tile(waves, n).fused for n in (18, 22)] == [True, False]
    banded = dataclasses.replace(waves, window_right=0)
    assert [hopper_backward_tile.choose_tile(banded, n).fused for n in (15, 16)] == [True, False]
    wider = problem(128, seqlen_q=1024, seqlen_k=1024)
    assert [hopper_backward_tile.choose_tile(wider, n).fused for n in (25, 32)] == [True, False]
    # The last of a few waves is shared instead where that is worth more.
    assert [hopper_backward_tile.choose_tile(wider, n).parts for n in (25, 26, 31, 32)] == [1, 2, 7, 1]
    assert [chosen(64, 2048, seqlen_k=n) for n in (1024, 1000)] == [True, False]
    assert not chosen(128, 1024, seqlen_k=300)
    for head_dim in (64, 128):
        for changes in (
            {"varlen": True}, {"seqused_k": True}, {"deterministic": True}, {"seqlen_k": 128}, {"softcap": 30.0},
            {"bias": FLOAT32_SCORES}, {"mask": MASK}, {"dropout_p": 0.1},
        ):  # fmt: skip
            assert not chosen(head_dim, 2048, **changes), changes
    assert not chosen(256, 4096)
    assert not chosen(64, 512, bias=SCORES)


def test_queries_of_a_tile_by_length() -> None:
    """80 of plain scores at head dim 128, where the rows have a kernel of their own."""

    def chosen(head_dim: int, seqlen_q: int, **changes: Any) -> tuple[int, bool]:
        changes = {"seqlen_k": seqlen_q, **changes}
        config = kernel_of(plan(problem(head_dim, seqlen_q=seqlen_q, **changes))).config
        assert isinstance(config, HopperBackwardConfig)
        return config.block_m, config.fused

    assert chosen(128, 2048) == chosen(128, 4096, **CAUSAL) == (64, True)
    assert chosen(128, 2049) == chosen(120, 4096) == chosen(128, 4097, **CAUSAL) == (80, False)
    assert chosen(128, 1024, seqlen_k=300) == (80, False)
    # Heads that thread blocks share: beyond 4096 queries.
    grouped = {"num_heads": 32, "num_heads_kv": 2, "batch": 1}
    assert chosen(128, 8192, **grouped, **CAUSAL) == (80, False)
    assert chosen(128, 4096, **grouped, **CAUSAL) == (64, True)
    assert chosen(112, 16384) == chosen(96, 16384) == (64, False)
    assert chosen(64, 16384) == chosen(64, 16384, **CAUSAL) == (128, False)
    for changes in (
        {"varlen": True}, {"seqused_k": True}, {"deterministic": True}, {"softcap": 30.0}, {"bias": SCORES},
        {"mask": MASK}, {"dropout_p": 0.1},
    ):  # fmt: skip
        assert chosen(128, 4096, **changes) == (64, False), changes


@pytest.mark.parametrize(
    ("head_dim", "queries", "changes", "expected"),
    [
        (128, 247, {}, 64), (128, 247, CAUSAL, 64), (128, 500, CAUSAL, 64), (128, 256, {}, 64),
        (128, 150, {}, 80), (128, 200, {}, 80), (128, 300, {}, 80), (128, 400, {}, 80), (128, 4097, {}, 80),
        (64, 300, {}, 64), (64, 440, CAUSAL, 64), (64, 176, CAUSAL, 64), (64, 500, {}, 128), (64, 700, CAUSAL, 128),
    ],
)  # fmt: skip
def test_tiles_of_64_queries_where_others_stay_empty(
    head_dim: int, queries: int, changes: dict[str, Any], expected: int
) -> None:
    """With rows that are prepared apart, as up to head dim 64 those of 512 queries are where 64 leave fewer empty."""
    asked = problem(head_dim, seqlen_q=queries, seqlen_k=queries, **changes)
    assert hopper_backward_tile.choose_tile(asked, 132).block_m == expected
    many = hopper_backward_tile.choose_tile(asked, 1)
    if head_dim == 64:
        assert (many.fused, many.block_m) == (expected == 128, expected)


def test_few_key_heads_share_their_query_heads_among_blocks() -> None:
    def splits(**changes: Any) -> int:
        return hopper_backward_tile.choose_tile(problem(**changes), 132).splits

    grouped: dict[str, Any] = {"num_heads": 32, "num_heads_kv": 1, "seqlen_q": 4096, "seqlen_k": 4096}
    assert splits(**grouped) == 2  # 64 key tiles: one a multiprocessor
    # Four a multiprocessor are 8 and 2; with twice as many the rows that are read at a time stay in L2.
    assert splits(**grouped, **CAUSAL) == 16
    assert splits(**grouped | {"num_heads_kv": 4}, **CAUSAL) == 4
    assert splits(**grouped | {"batch": 16, "num_heads_kv": 8}, **CAUSAL) == 1
    documents = {"num_heads": 32, "num_heads_kv": 8, "batch": 16, "seqlen_q": 1024, "seqlen_k": 1024, "varlen": True}
    packed = {name: dense_layout((1, 16384, 8 if name in "kv" else 32, 128), "bfloat16") for name in "qkv"}
    assert splits(**documents, **packed, **CAUSAL) == 1
    half = {name: dense_layout((1, 8192, 8 if name in "kv" else 32, 128), "bfloat16") for name in "qkv"}
    assert splits(**documents | {"batch": 8}, **half, **CAUSAL) == 2
    stored: dict[str, Any] = {"bias": SCORES, "dbias": True, "num_heads_kv": 1}
    assert splits(**stored) == 1 < splits(**stored | {"dbias": False})
    assert splits(**grouped, **CAUSAL, deterministic=True) == 1
    assert splits(**grouped, head_dim=256, **CAUSAL, softcap=30.0) == 1 < splits(**grouped, head_dim=256, **CAUSAL)
    assert splits(**grouped | {"num_heads": 28, "num_heads_kv": 4, "batch": 1}, **CAUSAL) == 7

    spec = plan(problem(**grouped, **CAUSAL), splits=8)
    kernels = {launch.config.kernel: launch for launch in spec.launches}
    assert "dkv_convert" in kernels
    params = dict(kernels["backward_hopper"].params)
    assert (params["num_splits"], params["heads_per_group"], params["num_tiles"]) == (8, 4, 8 * 2 * 32)
    (workspace,) = (item for item in spec.workspaces if item.field == "dkv_accum")
    assert workspace.zeroed
    assert workspace.nbytes == 4 * 2 * 4096 * (128 + 128)
    # Packed: of the tokens, in whole tiles of each sequence, not of the longest for each sequence.
    packed = plan(problem(128, num_heads_kv=1, batch=10, seqlen_k=500, varlen=True), splits=4)
    (workspace,) = (item for item in packed.workspaces if item.field == "dkv_accum")
    assert workspace.nbytes == 4 * (512 // 128 + 10 + 1) * 128 * (128 + 128)


def split_groups(changes: dict[str, Any]) -> HopperBackwardConfig:
    """The main kernel where four thread blocks share the heads of a group."""
    config = kernel_of(plan(problem(num_heads_kv=1, **changes), splits=4)).config
    assert isinstance(config, HopperBackwardConfig)
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {}, CAUSAL, {"head_dim": 64}, {"head_dim": 96, **CAUSAL}, {"varlen": True}, {"mask": MASK}, {"dropout_p": 0.1},
        {"softcap": 30.0}, {"head_dim": 64, "bias": SCORES}, {"head_dim": 64, "varlen": True, **CAUSAL},
        {"head_dim": 192, **CAUSAL}, {"head_dim": 256},
    ],
    ids=lambda changes: "-".join(map(str, changes)) or "plain",
)  # fmt: skip
@pytest.mark.slow(sample=["varlen"])
@pytest.mark.compiles(kernels=lambda changes: [split_groups(changes)])
def test_split_groups_compile_without_a_spill(changes: dict[str, Any]) -> None:
    config = split_groups(changes)
    assert config.split
    assert compiled(config).spill_bytes == 0


TWO_SLOTS = {"key_slots": 2, "fused": False}
PACKED = {"varlen": True}


def other_ways(head_dim: int, tile: dict[str, Any], changes: dict[str, Any]) -> list[KernelConfig]:
    """The main kernel with ``tile``, and what converts its sums."""
    asked = problem(head_dim, changes.get("dtype", "bfloat16"), **{x: y for x, y in changes.items() if x != "dtype"})
    launches = plan(asked, **({"splits": 1} | tile)).launches
    return [x.config for x in launches if x.config.kernel in ("backward_hopper", "dkv_hopper_convert")]


@pytest.mark.parametrize(
    ("head_dim", "tile", "changes"),
    [
        (128, {"parts": 4, "fused": False, "block_m": 80}, {}),
        (128, {"splits": 4, "fused": False, "block_m": 80, "descending": True}, {"num_heads_kv": 1, **CAUSAL}),
        (128, {"parts": 4, "fused": False, "block_m": 80}, {"num_heads_kv": 1, **CAUSAL}),
        (128, {"parts": 4, "fused": True, "block_m": 64}, {"num_heads_kv": 1, **CAUSAL}),
        (64, {"parts": 4, "fused": False}, {}),
        (64, {"parts": 4, "fused": False}, {"seqlen_k": 77}),
        (64, {"parts": 4, "fused": True}, {"window_left": 100, "window_right": 20}),
        (96, {"parts": 4, "own_code": True, "values_in_registers": True}, CAUSAL),
        *(
            # Few causal key tiles, by head dim.
            (d, {"parts": 2, "fused": False, "descending": True} | more, CAUSAL)
            for d, more in (
                (64, {"values_in_registers": True}),
                (80, {"own_code": True, "keys_in_registers": True, "values_in_registers": True}),
                (128, {"block_m": 80}),
            )
        ),
        (64, {"values_in_registers": True}, {"dtype": "float16", **CAUSAL}),
        (64, {"values_in_registers": True, "fused": False}, {}),
        *((d, {"own_code": True, "values_in_registers": d <= 96}, CAUSAL) for d in (72, 96, 112)),
        *((d, {"own_code": True, "keys_in_registers": True, "values_in_registers": True}, CAUSAL) for d in (80, 96)),
        (96, {"own_code": True, "keys_in_registers": True, "values_in_registers": True, "fused": False}, {}),
        *((d, TWO_SLOTS | {"block_m": m}, x) for d, m in ((64, 64), (64, 128), (128, 64)) for x in (CAUSAL, {})),
        *((d, TWO_SLOTS | {"block_m": 64}, PACKED) for d in (64, 112, 128)),
    ],
    ids=lambda x: str(x) if isinstance(x, int) else "_".join(x) or "plain",
)
@pytest.mark.slow(sample=["128-parts_fused_block_m-plain"])
@pytest.mark.compiles(kernels=lambda head_dim, tile, changes: other_ways(head_dim, tile, changes))
def test_ways_that_no_table_chooses_compile(head_dim: int, tile: dict[str, Any], changes: dict[str, Any]) -> None:
    """Without a spill, and without a remark that products wait for each other."""
    for config in other_ways(head_dim, tile, changes):
        made = compiled(config)
        assert made.spill_bytes == 0
        assert not re.search("C75[01]", made.log)


def test_plan_with_80_queries() -> None:
    prepare, main, convert = (spec := plan(problem(128, seqlen_q=4096, seqlen_k=4096))).launches
    assert label(spec) == "hopper 80x128 num_warps=12 num_stages=2"
    assert prepare.grid == 5 * convert.grid == 5 * 52 * 4 * 2
    assert {item.field: item.box[1] for item in main.tensor_maps} == {
        "tensor_map_q": 80, "tensor_map_k": 128, "tensor_map_v": 128, "tensor_map_dout": 80,
    }  # fmt: skip
    buffers = {item.field: item for item in spec.workspaces}
    assert buffers["dq_accum"].nbytes == 4 * 2 * 4 * 52 * 80 * 128
    assert buffers["delta"].nbytes == 4 * 2 * 4 * 52 * 80
    # The two kernels must agree on the blocks of the workspace.
    for tile, transposed in (({}, True), ({"block_m": 64}, False)):
        config = plan(problem(128, seqlen_q=4096), **tile).launches[-1].config
        assert isinstance(config, BackwardConfig)
        assert config.transposed_blocks == transposed


def test_candidates_have_the_other_preparation_and_other_tiles() -> None:
    def switches(head_dim: int, **changes: Any) -> list[tuple[int, bool, int]]:
        specs = hopper_backward.candidates(problem(head_dim, **changes), **TARGET | {"num_sms": FEW_SMS})
        assert len({label(spec) for spec in specs}) == len(specs)
        configs = [kernel_of(spec).config for spec in specs]
        assert all(kernel_of(spec).smem_bytes <= SMEM_LIMIT for spec in specs)
        return [(x.block_m, x.fused, x.key_slots) for x in configs if isinstance(x, HopperBackwardConfig)]

    long = {"seqlen_q": 16384}
    assert switches(64) == switches(64, **CAUSAL) == [(128, True, 1), (64, True, 1), (128, False, 1), (128, False, 2)]
    # Two slots of K of every tile that can have them.
    assert switches(64, **long) == [
        (128, False, 1), (64, False, 1), (128, True, 1), (128, False, 2), (64, False, 2)
    ]  # fmt: skip
    assert switches(128) == [(64, True, 1), (64, False, 1), (80, False, 1), (64, False, 2)]
    assert switches(128, **long) == [(80, False, 1), (64, False, 1), (64, True, 1), (64, False, 2)]
    # K in registers too.
    assert switches(96, **long, **CAUSAL) == [
        (64, False, 1), (64, True, 1), (80, False, 1), (64, False, 1), (64, False, 2), (64, False, 2)
    ]  # fmt: skip
    assert switches(128, dropout_p=0.1) == [(64, False, 1)]
    assert switches(256) == [(64, False, 1)]
    # Few key tiles of many queries in parts: one tile of all keys, also of a padding mask.
    text = {"seqlen_q": 4096, "seqlen_k": 77}
    mask = dataclasses.replace(MASK, shape=(2, 1, 1, 77), strides=(77, 0, 0, 1))
    changes: dict[str, Any]
    for changes, count in (({}, 11), ({"mask": mask}, 16)):  # as the table has it, and where it has none
        parts = hopper_backward.candidates(problem(64, **text, **changes), **TARGET)[-1]
        assert dict(kernel_of(parts).params)["num_splits"] == count
        assert kernel_of(parts).grid == 8 * count


def test_dq_of_one_key_tile_needs_no_workspace() -> None:
    """All keys in one tile: no sum over tiles, so neither its workspace nor the launch that converts it."""
    spec = plan(problem(64, seqlen_k=77))
    assert [launch.config.kernel for launch in spec.launches] == ["backward_hopper_prepare", "backward_hopper"]
    assert "dq_accum" not in {item.field for item in spec.workspaces}
    for more in (problem(64, seqlen_k=129), problem(64, seqlen_k=77, varlen=True)):
        assert plan(more).launches[-1].config.kernel == "dq_convert"


def test_what_the_copy_engine_moves_of_a_bias() -> None:
    """The bias as tiles where it has q's type and rows of 16-byte multiples, dbias where it has one value a score."""

    def moved(**changes: Any) -> tuple[list[str], bool, int]:
        launch = kernel_of(plan(problem(64, **changes)))
        config: Any = launch.config
        return [item.field[11:] for item in launch.tensor_maps[4:]], config.bias_tiles, config.block_m

    assert moved(bias=SCORES) == (["bias"], True, 128)
    assert moved(bias=SCORES, dbias=True) == (["bias", "dbias"], True, 128)
    assert moved(bias=BATCH_SHARED, dbias=True) == (["bias"], True, 128)
    assert moved(bias=ONE_ROW) == (["bias"], True, 128)
    odd = dataclasses.replace(SCORES, strides=(4 * 512 * 513, 512 * 513, 513, 1))
    by_threads = ([], False, 64)
    assert moved(bias=odd) == by_threads
    assert moved(bias=SCORES, dbias=True, dbias_layout=odd) == by_threads
    assert moved(bias=SCORES, dbias_layout=odd) == (["bias"], True, 128)
    assert moved(bias=dataclasses.replace(SCORES, offset_alignment=8)) == by_threads
    assert moved(bias=dataclasses.replace(SCORES, dtype="float32")) == by_threads
    assert moved(bias=dataclasses.replace(SCORES, shape=(2, 4, 512, 1))) == by_threads
    for other in ({"mask": MASK}, {"dropout_p": 0.1}, {"softcap": 5.0}):
        assert moved(bias=SCORES, **other) == by_threads, other


def test_who_sums_the_gradient_of_a_shared_bias() -> None:
    def kernels(**changes: Any) -> list[str]:
        names = [launch.config.kernel for launch in plan(problem(64, dbias=True, **changes)).launches]
        return names[names.index("dq_convert") + 1 :]

    assert kernels(bias=SCORES) == []
    assert kernels(bias=BATCH_SHARED) == ["backward_hopper_dbias"]
    assert kernels(bias=BATCH_SHARED, batch=64) == ["backward_hopper_dbias", "dbias_reduce"]
    assert kernels(bias=ONE_ROW)[0] == "backward_dbias"
    for other in ({"mask": MASK}, {"dropout_p": 0.1}, {"softcap": 5.0}):
        assert kernels(bias=BATCH_SHARED, **other)[0] == "backward_dbias", other
    odd = dataclasses.replace(BATCH_SHARED, strides=(0, 512 * 513, 513, 1))
    assert kernels(bias=BATCH_SHARED, dbias_layout=odd)[0] == "backward_dbias"
    assert kernels(bias=odd) == ["backward_hopper_dbias"]  # every thread reads its own bias


def test_shares_of_a_shared_bias() -> None:
    assert hopper_dbias.choose_splits(4096, 4, 132, 16 << 22) == 1  # tiles enough
    assert (
        hopper_dbias.choose_splits(32, 256, 132, 8 << 16) == 4
    )  # 128 blocks of 64 pairs; 5 shares would be two rounds
    assert hopper_dbias.choose_splits(1, 1, 132, 1 << 14) == 1
    for tiles, pairs in ((1, 7), (3, 100), (40, 9)):
        splits = hopper_dbias.choose_splits(tiles, pairs, 132, 1 << 14)
        share = -(-pairs // splits)
        assert (splits - 1) * share < pairs  # no share is empty


def test_plan_of_wide_heads() -> None:
    """Pairs of thread blocks: an even grid, boxes of half a tile, dout's second slot where it fits."""
    main = plan(problem(256, seqlen_k=700)).launches[1]
    assert main.config.kernel == "backward_hopper_wide"
    assert "__cluster_dims__(Traits::kCluster, 1, 1)" in entry_source(main.config)
    assert main.grid == 2 * 6 * 4 * 2
    many = problem(256, batch=64)
    assert (
        hopper_backward.plan_spec(many, hopper_backward_tile.choose_tile(many, 131), num_sms=131).launches[1].grid
        == 130
    )
    boxes = {item.field: item.box for item in main.tensor_maps}
    # Keys of a block; half of the queries, which each block brings to both.
    rows = {"q": 32, "k": 64, "v": 64, "dout": 32}
    assert boxes == {f"tensor_map_{name}": (64, count) for name, count in rows.items()}
    assert main.smem_bytes <= SMEM_LIMIT
    assert isinstance(main.config, HopperBackwardConfig)
    assert main.config.num_stages_dout == 1
    # Two heads in work at a time: more did not stay in L2 (the narrow kernel's budget would be four).
    long = dense_layout((2, 4096, 4, 256), "bfloat16")
    asked = problem(256, seqlen_q=4096, seqlen_k=4096, q=long, k=long, v=long, **CAUSAL)
    assert dict(plan(asked).launches[1].params)["head_group"] == 2
    config = plan(wide(192, 128)).launches[1].config
    assert isinstance(config, HopperBackwardConfig)
    assert config.num_stages_dout == 2
    # One of two widths beyond 64 is this kernel's too, both beyond 64 up to 128 the other's.
    for d, dv, kernel in ((128, 64, "wide"), (40, 72, "wide"), (128, 72, ""), (40, 64, "")):
        assert kernel_of(plan(wide(d, dv))).config.kernel == "_".join(filter(None, ("backward_hopper", kernel)))


def test_dropout_has_warps_of_its_own() -> None:
    for changes, threads in (
        ({}, 384),
        ({"dropout_p": 0.1}, 512),
        # What else a score needs takes the registers that these warps need: consumers make the decisions.
        ({"dropout_p": 0.1, "mask": MASK}, 384),
        ({"dropout_p": 0.1, "softcap": 30.0}, 384),
    ):
        prepare, main, _ = plan(problem(64, **changes), fused=False).launches
        assert main.block == threads, changes
        assert main.config.keep_words == prepare.config.keep_words == (threads == 512)
        assert main.smem_bytes <= SMEM_LIMIT


@pytest.mark.parametrize("varlen", [False, True])
def test_deterministic_plan_counts_additions_to_each_query_tile(varlen: bool) -> None:
    asked = problem(64, seqlen_q=500, seqlen_k=700, varlen=varlen)
    size = {b: {x.field: x.nbytes for x in plan(a).workspaces} for b, a in (
        (False, asked), (True, dataclasses.replace(asked, deterministic=True)),
    )}  # fmt: skip
    query_tiles = size[True]["delta"] // 4 // 128  # of 128 rows, of all heads
    assert query_tiles * 128 * 4 == size[True]["delta"]
    assert size[True]["row_lse"] - size[False]["row_lse"] == 4 * query_tiles
    prepare, main, _ = plan(dataclasses.replace(asked, deterministic=True)).launches
    assert prepare.config.ordered
    assert main.config.ordered


def test_deterministic_key_tiles_of_a_head_are_apart() -> None:
    """They wait for each other: other heads, as many as stay in L2, come between them."""

    def heads(**changes: Any) -> int:
        asked = problem(64, batch=4, num_heads=16, num_heads_kv=16, **changes)
        return dict(kernel_of(plan(asked)).params)["head_group"]

    assert heads() == 1
    assert heads(deterministic=True) == 64
    assert heads(**CAUSAL) == 16  # key tiles begin with preparing the rows of their heads
    assert heads(deterministic=True, seqlen_q=8192) == 8


def test_blocks_are_no_more_than_multiprocessors() -> None:
    assert kernel_of(plan(problem(64, batch=64))).grid == 132


def test_what_is_left_to_the_portable_family() -> None:
    for name, asked in VARIANTS.items():
        assert isinstance(hopper_backward.choose_backward(asked, **TARGET), BackwardPlanSpec), name
    unaligned = dataclasses.replace(dense_layout((2, 512, 4, 128), "bfloat16"), offset_alignment=2)
    for changes, part in (
        ({"seqlen_q": 32}, "seqlen_q is 32"),
        ({"deterministic": True, "mask": MASK}, "deterministic, with a mask"),
        ({"softcap": 30.0, "dropout_p": 0.1}, "softcap and dropout"),
        ({"bias": SCORES, "dropout_p": 0.1}, "two of bias, mask and dropout"),
        ({"q": unaligned}, "q starts at a multiple"),
    ):
        reasons = hopper_backward.choose_backward(problem(128, **changes), **TARGET)
        assert isinstance(reasons, list)
        assert any(part in reason for reason in reasons), (changes, reasons)
    for changes, part in (
        ({"deterministic": True}, "deterministic"),
        ({"bias": SCORES, "dbias": True, "softcap": 5.0}, "with softcap"),
    ):
        reasons = hopper_backward.choose_backward(problem(256, **changes), **TARGET)
        assert isinstance(reasons, list)
        assert any(part in reason for reason in reasons), (changes, reasons)
    for asked in (
        wide(160, 256, dropout_p=0.1, softcap=30.0),
        problem(256, dropout_p=0.1, bias=FLOAT32_SCORES, mask=MASK),
        problem(256, dropout_p=0.1, softcap=30.0, varlen=True),
    ):
        reasons = hopper_backward.choose_backward(asked, **TARGET)
        assert isinstance(reasons, list)
        assert any("dropout and more than" in reason for reason in reasons)
    for head_dim in (8, 264):
        assert isinstance(hopper_backward.choose_backward(problem(head_dim), **TARGET), list)
    for asked in (problem(32, mask=MASK), problem(16, bias=SCORES, softcap=5.0), problem(24, bias=FLOAT32_SCORES)):
        reasons = hopper_backward.choose_backward(asked, **TARGET)
        assert isinstance(reasons, list)
        assert any("that threads read for themselves" in reason for reason in reasons)


def test_backend_chooses_the_family() -> None:
    layout = dense_layout((2, 512, 4, 64), "bfloat16")
    asked = problem(64, out=layout, dout=layout, dq=layout, dk=layout, dv=layout)
    assert choose_backward(asked, **TARGET, backend="hopper").launches[1].config.kernel == "backward_hopper"
    assert choose_backward(asked, **TARGET, backend="portable").launches[1].config.kernel == "backward_portable"
    assert choose_backward(asked, **TARGET, backend="auto").launches[1].config.kernel == "backward_hopper"
    assert choose_backward(asked, **{**TARGET, "arch": "sm_100"}).launches[1].config.kernel == "backward_portable"


def test_few_key_tiles_are_shared_or_go_to_the_family_that_splits_queries() -> None:
    """One head, 77 keys: one multiprocessor would do all the work."""

    def kernel(seqlen_q: int, heads: int, **changes: Any) -> str:
        q, k = dense_layout((1, seqlen_q, heads, 64), "bfloat16"), dense_layout((1, 77, heads, 64), "bfloat16")
        asked = problem(
            64, batch=1, seqlen_q=seqlen_q, seqlen_k=77, num_heads=heads, num_heads_kv=heads, q=q, k=k, v=k,
            out=q, dout=q, dq=q, dk=k, dv=k, **changes,
        )  # fmt: skip
        return choose_backward(asked, **TARGET).launches[1].config.kernel

    assert kernel(8192, 1, softcap=30.0) == "backward_portable"
    assert kernel(8192, 1) == "backward_hopper"  # in parts
    assert kernel(8192, 128) == "backward_hopper"
    assert kernel(64, 1) == "backward_hopper"  # one query tile: nothing to split


def preparation(head_dim_v: int) -> KernelConfig:
    """That of a head dim of 64 and one of v above, or of one of both below."""
    asked = wide(64, head_dim_v) if head_dim_v > 64 else problem(head_dim_v, bias=SCORES)
    return plan(asked, fused=False).launches[0].config


@pytest.mark.slow(sample=["32-2", "72-4", "256-16"])
@pytest.mark.compiles(kernels=lambda head_dim_v, warps: [preparation(head_dim_v)])
@pytest.mark.parametrize(("head_dim_v", "warps"), [(32, 2), (40, 2), (64, 4), (72, 4), (128, 8), (136, 8), (256, 16)])
def test_rows_are_prepared_by_a_thread_for_one_or_two_vectors(head_dim_v: int, warps: int) -> None:
    """The kernel checks that its threads suffice for a row; here, that no more are there than have work."""
    config = preparation(head_dim_v)
    assert config.kernel == "backward_hopper_prepare"
    assert config.num_warps == warps
    kernel = compiled(config)
    assert (kernel.spill_bytes, "warning" in kernel.log) == (0, False)
    one_vector = head_dim_v & head_dim_v - 1 == 0
    # As many bytes of rows, or nearly, are waited for at a time as by 2048 threads with one vector each.
    assert kernel.num_regs <= (40 if one_vector else 56)
