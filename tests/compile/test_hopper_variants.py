"""Every variant of the Hopper kernels that is shipped compiles for sm_90a without a GPU, a spill or a warning."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from nvrtc_attn import heuristics
from nvrtc_attn.front.problem import AttentionProblem, OperandLayout, dense_layout
from nvrtc_attn.heuristics import (
    hopper_forward,
    hopper_forward_config,
    hopper_forward_dropout,
    hopper_forward_splits,
    hopper_forward_tile,
)
from nvrtc_attn.heuristics.spec import ForwardPlanSpec
from nvrtc_attn.jit.codegen import entry_source
from nvrtc_attn.jit.compile import CompiledKernel, compile_source
from nvrtc_attn.jit.config import HopperForwardConfig

pytest.importorskip("cuda.bindings.nvrtc")

SMEM_LIMIT = 232448  # bytes a block may use on compute capability 9.0


def problem(
    head_dim: int = 128, head_dim_v: int | None = None, dtype: str = "bfloat16", **changes: Any
) -> AttentionProblem:
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    values: dict[str, Any] = {
        "dtype": dtype, "batch": 2, "seqlen_q": 512, "seqlen_k": 512, "num_heads": 4, "num_heads_kv": 4,
        "head_dim": head_dim, "head_dim_v": head_dim_v,
        "q": dense_layout((2, 512, 4, head_dim), dtype), "k": dense_layout((2, 512, 4, head_dim), dtype),
        "v": dense_layout((2, 512, 4, head_dim_v), dtype),
    }  # fmt: skip
    return AttentionProblem(**{**values, **changes})


def packed_problem(head_dim: int, tokens: int = 32768) -> AttentionProblem:
    layout = dense_layout((1, tokens, 4, head_dim), "bfloat16")
    return problem(head_dim, varlen=True, batch=64, q=layout, k=layout, v=layout)


def many_decisions(head_dim: int, head_dim_v: int | None = None, **changes: Any) -> AttentionProblem:
    asked = problem(head_dim, head_dim_v, dropout_p=0.1, batch=512, **changes)
    assert hopper_forward_dropout.makes_words(asked)
    return asked


def choose(asked: AttentionProblem, *, large: bool = False) -> HopperForwardConfig:
    """``large``: with the tile that longer sequences and more heads have."""
    spec: ForwardPlanSpec | list[str]
    if large:
        spec = hopper_forward.plan_spec(asked, hopper_forward_tile.large_tile(asked), num_sms=132)
    else:
        spec = hopper_forward.choose_forward(asked, arch="sm_90", num_sms=132, smem_limit=SMEM_LIMIT)
    assert not isinstance(spec, list), spec
    launch = spec.launches[-1]  # packed: behind the one that lists the tiles
    assert isinstance(launch.config, HopperForwardConfig)
    assert launch.smem_bytes <= SMEM_LIMIT
    tiles = [name for name in ("bias", "mask") if launch.config.score_tiles and getattr(asked, name) is not None]
    assert [item.pointer for item in launch.tensor_maps] == ["q", "k", "v", *tiles]
    assert all(item.field == f"tensor_map_{item.pointer}" for item in launch.tensor_maps)
    return launch.config


def compiled(config: HopperForwardConfig) -> CompiledKernel:
    return compile_source(entry_source(config), config.arch, config=config)


def compiles_clean(config: HopperForwardConfig) -> None:
    """Without a warning, serialised products and local memory."""
    kernel = compiled(config)
    assert not re.search(r"C75\d\d|warning", kernel.log), kernel.log
    assert kernel.spill_bytes == kernel.stack_bytes == 0


SCORES = OperandLayout(shape=(2, 4, 512, 512), strides=(4 * 512 * 512, 512 * 512, 512, 1), dtype="bfloat16")
MASK = dataclasses.replace(SCORES, dtype="bool")
FLOAT = dataclasses.replace(SCORES, dtype="float32")
UNALIGNED = dataclasses.replace(SCORES, offset_alignment=2)  # of which every thread reads its own elements
UNALIGNED_MASK = dataclasses.replace(MASK, offset_alignment=1)
ROWS_OF_300 = OperandLayout(shape=(1, 4, 300, 300), strides=(0, 300 * 300, 300, 1), dtype="bfloat16")
ROWS_OF_192 = OperandLayout(shape=(2, 4, 192, 192), strides=(4 * 192 * 192, 192 * 192, 192, 1), dtype="bool")
ROWS_OF_77 = OperandLayout(shape=(2, 1, 1, 77), strides=(77, 0, 0, 1), dtype="bfloat16")
CAUSAL = {"window_right": 0}
LONG: dict[str, Any] = {"seqlen_q": 2048, "seqlen_k": 2048, **CAUSAL}
NARROW_VALUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 100, "window_right": 20},
    "varlen": {"varlen": True, "batch": 1},
    "varlen_causal": {"varlen": True, "batch": 1, **CAUSAL},
    "softcap": {"softcap": 30.0},
}
EVERYTHING = {"bias": SCORES, "mask": MASK, "softcap": 30.0, "dropout_p": 0.1, **CAUSAL}
UNALIGNED_EVERYTHING = {**EVERYTHING, "bias": UNALIGNED, "mask": UNALIGNED_MASK}
SHORT = {"seqlen_q": 192, "seqlen_k": 192}
BIAS_OF_192 = dataclasses.replace(ROWS_OF_192, dtype="bfloat16")
EVERYTHING_SHORT = {"bias": BIAS_OF_192, "mask": ROWS_OF_192, "softcap": 30.0}
VARIANTS: dict[str, AttentionProblem] = {
    **{f"d{d}": problem(d) for d in (40, 64, 80, 96, 128, 192, 256)},
    **{f"d{d}_causal": problem(d, **CAUSAL) for d in (40, 64, 80, 96, 128, 192, 256)},
    **{f"d{d}_dropout": problem(d, dropout_p=0.1) for d in (16, 24, 32)},
    "d32_16_dropout_causal": problem(32, 16, dropout_p=0.1, **CAUSAL),
    # More rows than multiprocessors, as these tiles are for.
    **{f"d{d}_many": problem(d, num_heads=128) for d in (104, 120, 128)},
    **{f"d{d}_many_causal": problem(d, num_heads=128, seqlen_q=1024, **CAUSAL) for d in (112, 120)},
    **{f"d{d}_many_softcap": problem(d, num_heads=128, seqlen_q=1024, softcap=30.0) for d in (104, 120)},
    **{f"d{d}_many_max_logit": problem(d, num_heads=128, return_max_logit=True) for d in (112, 128)},
    **{f"d{d}_many_varlen": problem(d, num_heads=128, varlen=True, batch=1, **CAUSAL) for d in (104, 120)},
    "d120_many_varlen_softcap": problem(120, num_heads=128, varlen=True, batch=1, softcap=30.0, window_left=100),
    "d80_rows_of_128": problem(80, num_heads=6, seqlen_q=400, seqlen_k=300, batch=8),
    "d96_rows_of_128_max_logit": problem(96, num_heads=6, seqlen_q=400, batch=8, return_max_logit=True),
    "d192_dv128_causal": problem(192, 128, **CAUSAL),
    "d128_float16": problem(128, dtype="float16"),
    **{f"d{d}_causal_long": problem(d, seqlen_q=4096, seqlen_k=4096, **CAUSAL) for d in (64, 128, 256)},
    "d64_causal_2048": problem(64, seqlen_q=2048, seqlen_k=2048, batch=8, **CAUSAL),
    # Enough query tiles for 192 rows each.
    "d64_many": problem(64, batch=64),
    "d64_causal_many": problem(64, batch=64, **CAUSAL),
    "d64_window_many": problem(64, batch=64, window_left=100, window_right=20),
    "d64_softcap_many": problem(64, batch=64, softcap=30.0),
    "d64_softcap_causal_many": problem(64, batch=64, softcap=30.0, **CAUSAL),
    "d64_negative_scale_many": problem(64, batch=64, softmax_scale=-0.1),
    "d64_negative_scale_causal": problem(64, softmax_scale=-0.1, **CAUSAL),
    **{f"d{d}_softcap_causal": problem(d, softcap=30.0, **CAUSAL) for d in (64, 128, 192, 256)},
    "d128_softcap_causal_float16": problem(128, dtype="float16", softcap=30.0, **CAUSAL),
    "d128_negative_scale_causal": problem(128, softmax_scale=-0.1, **CAUSAL),
    "d64_seqused_k_many": problem(64, batch=64, seqused_k=True),
    "d256_1024": problem(256, seqlen_q=1024, seqlen_k=1024),
    "d64_varlen": problem(64, varlen=True, batch=1),
    **{f"d{d}_varlen_causal": problem(d, varlen=True, seqused_k=True, **CAUSAL) for d in (64, 256)},
    "d128_varlen_full": problem(128, varlen=True),
    "d64_varlen_causal_wide": problem(64, varlen=True, batch=1, **CAUSAL),
    "d72_many": problem(72, batch=64),
    **{f"d{d}_causal_2048": problem(d, batch=64, seqlen_q=2048, seqlen_k=2048, **CAUSAL) for d in (72, 80, 96)},
    **{
        f"d{d}_window_2048": problem(d, batch=64, seqlen_q=2048, seqlen_k=2048, window_left=100, window_right=20)
        for d in (72, 96)
    },
    **{f"d{d}_few_keys": problem(d, batch=64, seqlen_k=230) for d in (64, 80, 96)},
    **{f"d{d}_softcap_many": problem(d, batch=64, softcap=30.0) for d in (72, 96, 128)},
    **{f"d{d}_max_logit_many": problem(d, batch=64, return_max_logit=True) for d in (64, 72, 96)},
    **{f"d{d}_causal_max_logit_many": problem(d, batch=64, return_max_logit=True, **CAUSAL) for d in (64, 72, 128)},
    "d80_varlen_causal": problem(80, varlen=True, batch=1, **CAUSAL),
    "d96_many": problem(96, batch=16, seqlen_q=4096, seqlen_k=4096),
    **{f"d{d}_varlen_many": packed_problem(d) for d in (72, 96)},
    **{f"d192_dv128_{name}": problem(192, 128, **changes) for name, changes in NARROW_VALUES.items()},
    "d192_causal_long": problem(192, seqlen_q=4096, seqlen_k=4096, **CAUSAL),
    "cross_77": problem(64, seqlen_q=4096, seqlen_k=77),
    "cross_20_causal": problem(64, seqlen_q=1100, seqlen_k=20, **CAUSAL),
    "cross_1": problem(40, seqlen_q=1100, seqlen_k=1),
    "d64_short": problem(64, seqlen_q=128, seqlen_k=128),
    **{f"d{d}_bias_float32_causal": problem(d, bias=FLOAT, **CAUSAL) for d in (64, 128, 256)},
    "bias_float32_causal_unaligned": problem(64, bias=dataclasses.replace(FLOAT, offset_alignment=4), **CAUSAL),
    "window": problem(128, window_left=100, window_right=20),
    "varlen": problem(128, varlen=True, batch=1, **CAUSAL),
    "seqused_k": problem(64, seqused_k=True),
    "softcap": problem(128, softcap=30.0),
    "bias": problem(64, bias=SCORES),
    "bias_causal": problem(128, bias=SCORES, **CAUSAL),
    "bias_short": problem(64, bias=SCORES, seqlen_q=256, seqlen_k=256),
    "mask": problem(64, mask=MASK),
    "mask_causal": problem(128, mask=MASK, **CAUSAL),
    "dropout_short": problem(64, dropout_p=0.1, seqlen_q=128),
    "dropout_varlen": problem(64, dropout_p=0.1, varlen=True, batch=1, **CAUSAL),
    **{f"d{d}_dropout": problem(d, dropout_p=0.1) for d in (64, 128, 192, 256)},
    **{f"d{d}_dropout_causal": problem(d, dropout_p=0.1, **CAUSAL) for d in (64, 80, 96, 128, 192, 256)},
    **{f"d{d}_dropout_softcap": problem(d, dropout_p=0.1, softcap=30.0, **CAUSAL) for d in (64, 128, 192, 256)},
    **{f"d{d}_dropout_bias_causal": problem(d, dropout_p=0.1, bias=SCORES, **CAUSAL) for d in (64, 128, 192)},
    "dropout_mask": problem(64, dropout_p=0.1, mask=MASK),
    # So many scores that a launch of its own makes the decisions.
    **{f"d{d}_dropout_words": many_decisions(d) for d in (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)},
    **{f"d{d}_dropout_words_causal": many_decisions(d, **CAUSAL) for d in (32, 64, 72, 80, 128, 192, 256)},
    **{f"d{d}_dropout_words_short": many_decisions(d, seqlen_k=200) for d in (64, 128)},
    "d64_dropout_words_window": many_decisions(64, window_left=300, window_right=20),
    "d64_dropout_words_seqused_k": many_decisions(64, seqused_k=True, **CAUSAL),
    "d64_dropout_words_max_logit": many_decisions(64, return_max_logit=True, **CAUSAL),
    **{f"d{d}_dropout_words_softcap": many_decisions(d, softcap=30.0, **CAUSAL) for d in (64, 128, 256)},
    **{f"d{d}_dropout_words_bias": many_decisions(d, bias=SCORES) for d in (64, 128)},
    **{f"d192_dv128_dropout_words{x}": many_decisions(192, 128, **y) for x, y in (("", {}), ("_causal", CAUSAL))},
    **{f"d{d}_dropout_words_bias_float32": many_decisions(d, bias=FLOAT, **CAUSAL) for d in (64, 128)},
    **{f"d{d}_dropout_words_bias_unaligned": many_decisions(d, bias=UNALIGNED) for d in (64, 128, 192)},
    "d192_dropout_words_bias_of_77_keys": many_decisions(192, seqlen_k=77, bias=ROWS_OF_77),
    **{f"d{d}_dropout_words_mask": many_decisions(d, mask=ROWS_OF_192, **SHORT) for d in (64, 128, 192, 256)},
    **{f"d{d}_dropout_words_everything": many_decisions(d, **{**EVERYTHING_SHORT, **SHORT}) for d in (64, 128, 192)},
    # In tiles of 192 rows.
    **{f"d{d}_dropout_words_causal_2048": many_decisions(d, **LONG) for d in (32, 64)},
    "d64_dropout_words_window_2048": many_decisions(64, **{**LONG, "window_left": 800}),
    "d64_dropout_words_seqused_k_2048": many_decisions(64, seqused_k=True, **LONG),
    "d64_dropout_words_max_logit_2048": many_decisions(64, return_max_logit=True, **LONG),
    "d64_dropout_words_softcap_2048": many_decisions(64, softcap=30.0, **LONG),
    "d64_dropout_words_part_2048": many_decisions(64, dropout_pitches=(8, 4096, 4096), device_starts=True, **LONG),
    "d64_dropout_words_part": many_decisions(64, dropout_pitches=(8, 4096, 4096), device_starts=True, **CAUSAL),
    "dropout_bias_float32": problem(128, dropout_p=0.1, bias=FLOAT),
    "d192_dropout_varlen": problem(192, dropout_p=0.1, varlen=True, batch=1, seqused_k=True, **CAUSAL),
    **{f"d{d}_everything": problem(d, **EVERYTHING) for d in (64, 128, 192)},
    **{f"d{d}_everything_unaligned": problem(d, **UNALIGNED_EVERYTHING) for d in (64, 128, 192)},
    "bias_unaligned": problem(64, bias=UNALIGNED),
    # Three consumers read it.
    **{
        f"d{d}_dv{dv}_bias_unaligned_many": problem(d, dv, batch=64, seqlen_q=300, seqlen_k=300, bias=ROWS_OF_300)
        for d, dv in ((16, 16), (32, 32), (64, 48), (64, 64))
    },
    "bias_causal_unaligned": problem(128, bias=UNALIGNED, **CAUSAL),
    "mask_unaligned": problem(64, mask=UNALIGNED_MASK),
    "d256_bias": problem(256, bias=SCORES),
    "d256_mask_causal": problem(256, mask=MASK, **CAUSAL),
    "d256_bias_causal": problem(256, bias=SCORES, **CAUSAL),
    "d192_bias_of_77_keys": problem(192, seqlen_k=77, bias=ROWS_OF_77),
    "d192_bias_mask_causal": problem(192, bias=FLOAT, mask=MASK, softcap=30.0, **CAUSAL),
    "d64_bias_mask": problem(64, bias=FLOAT, mask=MASK),
    "d256_mask_causal_unaligned": problem(256, mask=UNALIGNED_MASK, **CAUSAL),
    "d256_bias_causal_unaligned": problem(256, bias=UNALIGNED, **CAUSAL),
}
LARGE = {
    f"{name}_large": name
    for name, asked in VARIANTS.items()
    if choose(asked).block_m == 64 and not choose(asked).keep_words
}
"""Problems that are small enough for tiles of 64 rows, with the others' tiles."""
ALWAYS = [
    "d64_causal_large", "d128_causal", "varlen", "d192_dropout_varlen", "d128_everything_unaligned",
]  # fmt: skip


READ_AGAIN = {"d256_dropout": 4}
"""Spilled bytes: the number of the warp-group, which is read once a query tile, never in the loop over keys."""


def config_of(name: str) -> HopperForwardConfig:
    return choose(VARIANTS[LARGE.get(name, name)], large=name in LARGE)


@pytest.mark.slow(sample=ALWAYS)
@pytest.mark.compiles(kernels=lambda name: [config_of(name)])
@pytest.mark.parametrize("name", [*VARIANTS, *LARGE])
def test_variant_compiles_clean(name: str) -> None:
    kernel = compiled(config_of(name))
    assert not re.search(r"C75\d\d|warning", kernel.log), kernel.log
    assert kernel.spill_bytes <= READ_AGAIN.get(name, 0)
    assert kernel.stack_bytes <= 2 * READ_AGAIN.get(name, 0)


DECISIONS = [name for name in VARIANTS if "_dropout_words" in name]


def makes_decisions(name: str) -> HopperForwardConfig:
    """The kernel before the one of `config_of`."""
    spec = hopper_forward.choose_forward(VARIANTS[name], arch="sm_90", num_sms=132, smem_limit=SMEM_LIMIT)
    assert not isinstance(spec, list), spec
    config, main = (launch.config for launch in spec.launches)
    assert isinstance(config, HopperForwardConfig)
    assert isinstance(main, HopperForwardConfig)
    assert (config.kernel, main.keep_words) == ("dropout_words", True)
    assert (config.block_m, config.block_n, config.tickets) == (main.block_m, main.block_n, main.tickets)
    return config


@pytest.mark.slow(sample=["d64_dropout_words_causal"])
@pytest.mark.compiles(kernels=lambda name: [makes_decisions(name)])
@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_compile_clean(name: str) -> None:
    compiles_clean(makes_decisions(name))


def packed_heads(head_dim: int, head_dim_v: int = 0, **changes: Any) -> ForwardPlanSpec:
    """The plan of 16 queries of 16 heads on 2, in tiles of whole groups."""
    sizes = {"num_heads": 16, "num_heads_kv": 2, "seqlen_q": 16, **changes}
    batch, heads, queries = sizes.get("batch", 2), sizes["num_heads"], sizes["seqlen_q"]
    q = dense_layout((batch, queries, heads, head_dim), "bfloat16")
    k, v = (
        dense_layout((batch, 512, sizes["num_heads_kv"], d), "bfloat16") for d in (head_dim, head_dim_v or head_dim)
    )
    asked = problem(head_dim, head_dim_v or head_dim, **{**sizes, "q": q, "k": k, "v": v})
    assert hopper_forward.may_pack_heads(asked)
    spec = hopper_forward.packed_heads_plan(asked, arch="sm_90", num_sms=132, smem_limit=SMEM_LIMIT)
    assert not isinstance(spec, list), spec
    return spec


PACKED_HEADS: dict[str, dict[str, Any]] = {
    **{f"d{d}_causal": {"head_dim": d, **CAUSAL} for d in (64, 96, 128, 192, 256)},
    "d128": {"head_dim": 128},
    "d64_many_causal": {"head_dim": 64, "batch": 64, "seqlen_q": 48, **CAUSAL},
    "d192_dv128": {"head_dim": 192, "head_dim_v": 128},
    "d128_window": {"head_dim": 128, "window_left": 100, "window_right": 20},
    "d128_softcap_causal": {"head_dim": 128, "softcap": 30.0, **CAUSAL},
    "d64_softcap_causal": {"head_dim": 64, "batch": 64, "seqlen_q": 48, "softcap": 30.0, **CAUSAL},
    "d128_seqused_k_causal": {"head_dim": 128, "seqused_k": True, **CAUSAL},
    "d256_seqused_k_causal": {"head_dim": 256, "seqused_k": True, **CAUSAL},
}


def packed_heads_config(name: str) -> HopperForwardConfig:
    config = packed_heads(**PACKED_HEADS[name]).main.config
    assert isinstance(config, HopperForwardConfig)
    assert config.packed_heads
    return config


@pytest.mark.slow(sample=["d128_causal"])
@pytest.mark.compiles(kernels=lambda name: [packed_heads_config(name)])
@pytest.mark.parametrize("name", PACKED_HEADS)
def test_packed_heads_compile_clean(name: str) -> None:
    compiles_clean(packed_heads_config(name))


@pytest.mark.parametrize(
    ("heads", "heads_kv", "queries", "per_tile"),
    [(16, 2, 16, 16), (28, 4, 18, 18), (28, 4, 19, 18), (48, 1, 2, 2), (8, 4, 64, 64), (64, 1, 3, 2)],
)
def test_tiles_of_packed_heads_have_whole_groups(heads: int, heads_kv: int, queries: int, per_tile: int) -> None:
    """The schedule counts key heads, and a box of the copy engine brings the heads of some queries."""
    spec = packed_heads(128, num_heads=heads, num_heads_kv=heads_kv, seqlen_q=queries)
    params = dict(spec.main.params)
    assert params["num_m_blocks"] == -(-queries // per_tile)
    assert params["num_heads"] == heads_kv
    assert params["heads_per_group"] == heads // heads_kv
    assert params["num_tiles"] == 2 * heads_kv * params["num_m_blocks"]
    q = spec.main.tensor_maps[0]
    assert q.dims == (128, heads, queries, 2)
    assert q.strides_bytes == (256, 256 * heads, 256 * heads * queries)
    assert q.box == (64, heads // heads_kv, per_tile)


def split_keys(head_dim: int, head_dim_v: int = 0, *, packs: bool = False, rows: int = 0, **changes: Any) -> Any:
    """The plan of few query tiles and 8192 keys, in four splits; ``rows`` of a tile other than the table's."""
    sizes = {"num_heads": 8, "num_heads_kv": 2 if packs else 8, "seqlen_q": 128, "seqlen_k": 8192, "batch": 1}
    sizes |= {name: changes.pop(name) for name in tuple(changes) if name in sizes}
    q, k, v = (
        dense_layout((sizes["batch"], sizes[tokens], sizes[heads], d), "bfloat16")
        for tokens, heads, d in (
            ("seqlen_q", "num_heads", head_dim),
            ("seqlen_k", "num_heads_kv", head_dim),
            ("seqlen_k", "num_heads_kv", head_dim_v or head_dim),
        )
    )
    asked = problem(head_dim, head_dim_v or head_dim, **{**sizes, **changes, "q": q, "k": k, "v": v})
    assert hopper_forward_splits.may_split(asked)
    tile = (hopper_forward.packed_heads_tile if packs else hopper_forward_tile.large_tile)(asked)
    tile = dataclasses.replace(tile, block_m=rows or tile.block_m)
    tile = hopper_forward_splits.with_partial_results(asked, tile)
    return hopper_forward.plan_spec(asked, tile, num_sms=132, num_splits=4)


SPLIT_KEYS: dict[str, dict[str, Any]] = {
    **{f"d{d}": {"head_dim": d} for d in (32, 64, 72, 96, 128, 192, 256)},
    **{f"d{d}_causal": {"head_dim": d, **CAUSAL} for d in (64, 96, 128, 192, 256)},
    **{f"d{d}_long_causal": {"head_dim": d, "seqlen_q": 2048, **CAUSAL} for d in (64, 96, 128)},
    **{f"d{d}_64_rows": {"head_dim": d, "rows": 64} for d in (64, 128)},
    **{f"d64_192_rows{n}": {"head_dim": 64, "rows": 192, **x} for n, x in (("", {}), ("_causal", CAUSAL))},
    "d192_seqused_k_64_rows": {"head_dim": 192, "seqused_k": True, "rows": 64},
    "d128_packed_192_rows": {"head_dim": 128, "packs": True, "rows": 192, **CAUSAL},
    "d64_packed": {"head_dim": 64, "packs": True, **CAUSAL},
    **{f"d{d}_packed_64_rows": {"head_dim": d, "packs": True, "seqlen_q": 12, **CAUSAL} for d in (64, 128)},
    "d192_dv128": {"head_dim": 192, "head_dim_v": 128},
    "d128_window": {"head_dim": 128, "window_left": 100, "window_right": 20},
    "d128_softcap": {"head_dim": 128, "softcap": 30.0},
    "d64_softcap_long": {"head_dim": 64, "seqlen_q": 2048, "softcap": 30.0},
    "d64_negative_scale": {"head_dim": 64, "softmax_scale": -0.1},
    "d64_seqused_k": {"head_dim": 64, "seqused_k": True, "seqlen_q": 2048},
    "d128_seqused_k_causal": {"head_dim": 128, "seqused_k": True, **CAUSAL},
}


def split_keys_config(name: str) -> HopperForwardConfig:
    config = split_keys(**SPLIT_KEYS[name]).main.config
    assert isinstance(config, HopperForwardConfig)
    assert config.split
    return config


@pytest.mark.slow(sample=["d128", "d64_packed"])
@pytest.mark.compiles(kernels=lambda name: [split_keys_config(name)])
@pytest.mark.parametrize("name", SPLIT_KEYS)
def test_split_keys_compile_clean(name: str) -> None:
    compiles_clean(split_keys_config(name))


@pytest.mark.parametrize("packs", [False, True])
def test_the_schedule_counts_query_tiles_once_for_each_split(packs: bool) -> None:
    spec = split_keys(128, packs=packs, batch=2, **CAUSAL)
    params, main, merging = dict(spec.main.params), *spec.launches
    tiles = 2 * (2 if packs else 8) * -(-128 * (4 if packs else 1) // main.config.block_m)
    assert (params["num_splits"], params["num_tiles"], main.grid) == (4, 4 * tiles, min(4 * tiles, 132))
    assert params["num_m_blocks"] * 2 * params["num_heads"] == params["num_tiles"]
    assert (params["pair_rounds"], params["tail_whole_heads"]) == (0, 2 * params["num_heads"])
    assert (merging.config.kernel, merging.config.head_dim_v) == ("combine", 128)
    rows = 4 * 2 * 128 * 8
    assert [(x.field, x.nbytes) for x in spec.workspaces] == [
        ("out_partial", 4 * 128 * rows),
        ("softmax_partial", 8 * rows),
    ]


def few_tiles(batch: int, queries: int, keys: int, heads: int, heads_kv: int, **changes: Any) -> AttentionProblem:
    q, k = (dense_layout((batch, rows, n, 128), "bfloat16") for rows, n in ((queries, heads), (keys, heads_kv)))
    sizes = {"batch": batch, "seqlen_q": queries, "seqlen_k": keys, "num_heads": heads, "num_heads_kv": heads_kv}
    return problem(128, q=q, k=k, v=k, **sizes, **changes)


FEW_TILES = {
    "speculative": few_tiles(15, 4, 25472, 48, 1, **CAUSAL),
    "a_chunk_of_a_prompt": few_tiles(1, 256, 32768, 32, 8, **CAUSAL),
    "one_head": few_tiles(1, 4096, 4096, 1, 1),
    "resampler": few_tiles(1, 64, 16384, 32, 8),
    "decoding_of_48_heads_on_one": few_tiles(15, 1, 19411, 48, 1),
    "lengths_on_the_device": few_tiles(2, 128, 16384, 32, 8, seqused_k=True),
}


@pytest.mark.parametrize("name", FEW_TILES)
def test_few_query_tiles_of_many_keys_are_split(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": SMEM_LIMIT}
    spec = heuristics.choose_forward(FEW_TILES[name], **target)
    assert (spec.main.config.kernel, spec.num_splits > 1) == ("forward_hopper", True)
    assert spec.num_splits * 256 <= FEW_TILES[name].seqlen_k
    assert spec.main.grid >= 64
    monkeypatch.setattr(hopper_forward_splits, "SPLITS_KEYS", False)
    whole = heuristics.choose_forward(FEW_TILES[name], **target)
    assert (whole.main.config.kernel, whole.num_splits) != ("forward_hopper", spec.num_splits)
    assert getattr(whole.main.config, "split", False) == (whole.main.config.kernel == "forward_portable")


def test_numbers_of_splits_fill_waves_of_multiprocessors() -> None:
    asked = FEW_TILES["speculative"]  # 15 query tiles
    tile = hopper_forward.packed_heads_tile(asked)
    assert hopper_forward_splits.split_counts(asked, tile, 132) == [8, 17, 26, 35, 44, 52]
    assert hopper_forward_splits.split_counts(asked, tile, 20) == [2, 4, 5, 6, 8]
    short = few_tiles(1, 128, 1100, 4, 4)  # four shares of 256 keys
    tile = hopper_forward_tile.large_tile(short)
    assert hopper_forward_splits.most_splits(short, tile) == 4
    assert hopper_forward_splits.split_counts(short, tile, 132) == [4]


def test_few_rows_of_packed_heads_stay_portable_without_splits() -> None:
    """Up to 64 rows are packed for long keys alone, and where those are split."""
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": SMEM_LIMIT}
    for asked in (few_tiles(15, 1, 2048, 48, 1), few_tiles(200, 1, 8192, 64, 1), few_tiles(15, 1, 19411, 32, 1)):
        assert heuristics.choose_forward(asked, **target).main.config.kernel == "forward_portable"


def test_what_is_not_split() -> None:
    """Many query tiles, few keys, and all that beside scores needs the workspace or another merging kernel."""
    many, short = few_tiles(8, 2048, 2048, 32, 8), few_tiles(4, 512, 512, 16, 16)
    for asked in (many, short):
        spec = hopper_forward.choose_forward(asked, arch="sm_90", num_sms=132, smem_limit=SMEM_LIMIT)
        assert not isinstance(spec, list)
        assert spec.num_splits == 1
    assert hopper_forward_splits.may_split(many)
    for changes in ({"bias": SCORES}, {"mask": MASK}, {"dropout_p": 0.1}, {"varlen": True}, {"sm_margin": 0},
                    {"return_max_logit": True}):  # fmt: skip
        assert not hopper_forward_splits.may_split(problem(64, **changes))


def test_the_autotuner_knows_other_numbers_of_splits() -> None:
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": SMEM_LIMIT}
    found = heuristics.forward_candidates(FEW_TILES["a_chunk_of_a_prompt"], **target)
    counts = {spec.num_splits for spec in found.values() if spec.main.config.kernel == "forward_hopper"}
    assert len(counts) > 1


@pytest.mark.parametrize(
    ("batch", "queries", "heads", "head_dim", "rows", "blocks"),
    [(4, 55, 16, 256, 64, 1), (8, 60, 12, 128, 64, 1), (32, 60, 16, 128, 64, 2), (64, 50, 12, 64, 64, 3),
     (100, 50, 8, 80, 64, 2), (64, 36, 16, 192, 64, 1), (64, 64, 12, 96, 64, 2)],
)  # fmt: skip
def test_a_head_of_few_rows_has_a_tile_of_64(
    batch: int, queries: int, heads: int, head_dim: int, rows: int, blocks: int
) -> None:
    layout = dense_layout((batch, queries, heads, head_dim), "bfloat16")
    sizes = {"batch": batch, "seqlen_q": queries, "seqlen_k": queries, "num_heads": heads, "num_heads_kv": heads}
    asked = problem(head_dim, q=layout, k=layout, v=layout, **sizes)
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": SMEM_LIMIT}
    config = heuristics.choose_forward(asked, **target).main.config
    assert (config.kernel, config.block_m, config.min_blocks_per_sm) == ("forward_hopper", rows, blocks)
    if queries < 64:
        other = dataclasses.replace(asked, dropout_p=0.1)
        assert heuristics.choose_forward(other, **target).main.config.kernel == "forward_portable"


def test_packed_heads_are_a_choice_of_one_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off, neither the table nor the autotuner takes them; on, where rows fill a tile that queries of a head do not."""
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": SMEM_LIMIT}

    def asked(batch: int, queries: int, keys: int, heads: int, heads_kv: int) -> AttentionProblem:
        q, k = (dense_layout((batch, rows, n, 128), "bfloat16") for rows, n in ((queries, heads), (keys, heads_kv)))
        sizes = {"batch": batch, "seqlen_q": queries, "seqlen_k": keys, "num_heads": heads, "num_heads_kv": heads_kv}
        return problem(128, q=q, k=k, v=k, **sizes)

    def packs(what: AttentionProblem) -> bool:
        config = heuristics.choose_forward(what, **target).main.config
        return isinstance(config, HopperForwardConfig) and config.packed_heads

    full = (
        asked(16, 16, 4096, 64, 8),
        asked(16, 16, 4096, 28, 4),
        asked(64, 8, 4096, 64, 4),
        asked(16, 64, 2048, 16, 4),
        asked(1, 16, 8192, 64, 8),  # few tiles: keys are split
    )
    other = (
        asked(64, 1, 4096, 32, 8),  # few rows: the memory's time
        asked(4, 100, 2048, 32, 8),  # seven tiles instead of eight
        asked(2, 4096, 4096, 32, 8),
        asked(16, 16, 4096, 8, 8),
    )
    monkeypatch.setattr(hopper_forward, "PACKS_HEADS", False)
    assert not any(map(packs, (*full, *other)))
    assert not any("packed_heads" in name for what in full for name in heuristics.forward_candidates(what, **target))
    monkeypatch.setattr(hopper_forward, "PACKS_HEADS", True)
    assert all(map(packs, full))
    assert not any(map(packs, other))
    assert any("packed_heads" in name for name in heuristics.forward_candidates(other[1], **target))


def test_what_cannot_pack_heads() -> None:
    """Bias, mask and dropout know one head a tile; heads with stride 0 are one head for the copy engine."""
    grouped = {"num_heads": 16, "num_heads_kv": 2, "seqlen_q": 16}
    assert hopper_forward.may_pack_heads(problem(64, **grouped))
    repeated = OperandLayout(shape=(2, 16, 16, 64), strides=(1024, 64, 0, 1), dtype="bfloat16")
    for changes in ({"bias": SCORES}, {"mask": MASK}, {"dropout_p": 0.1}, {"varlen": True}, {"q": repeated},
                    {"num_heads_kv": 16}, {"num_heads": 130}):  # fmt: skip
        assert not hopper_forward.may_pack_heads(problem(64, **{**grouped, **changes})), changes


def tile_list(head_dim: int, changes: dict[str, Any]) -> HopperForwardConfig:
    """The config of the kernel that lists the tiles of packed sequences."""
    asked = problem(head_dim, varlen=True, batch=1, **changes)
    spec = hopper_forward.choose_forward(asked, arch="sm_90", num_sms=132, smem_limit=SMEM_LIMIT)
    assert not isinstance(spec, list), spec
    config = spec.launches[0].config
    assert isinstance(config, HopperForwardConfig)
    return config


LISTS = [{}, CAUSAL, {"seqused_k": True}, {"window_left": 100, "seqused_k": True}]


@pytest.mark.slow(sample=["list1-64"])
@pytest.mark.compiles(kernels=lambda head_dim, changes: [tile_list(head_dim, changes)])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("changes", LISTS, ids=[f"list{n}" for n in range(len(LISTS))])
def test_kernel_that_lists_tiles_compiles_clean(head_dim: int, changes: dict[str, Any]) -> None:
    config = tile_list(head_dim, changes)
    assert config.kernel == "packed_tiles"
    kernel = compiled(config)
    assert "warning" not in kernel.log
    assert kernel.spill_bytes == kernel.stack_bytes == 0


def test_lists_of_tiles_are_shared() -> None:
    """The kernel depends on the tile and the mask alone."""
    assert tile_list(112, {"dropout_p": 0.1}) == tile_list(128, {"dtype": "float16", "dropout_p": 0.1, "num_heads": 12})
    assert len({tile_list(128, changes) for changes in LISTS}) == len(LISTS)


def test_reasons_are_all_reported() -> None:
    layout = OperandLayout(shape=(2, 512, 4, 64), strides=(512 * 260, 260, 65, 1), dtype="bfloat16", offset_alignment=2)
    reasons = hopper_forward.choose_forward(
        problem(64, q=layout, seqlen_q=8), arch="sm_80", num_sms=132, smem_limit=SMEM_LIMIT
    )
    assert isinstance(reasons, list)
    for part in ("sm_80", "seqlen_q is 8", "q starts at a multiple of 2", "q has stride 260", "q has stride 65"):
        assert any(part in reason for reason in reasons), (part, reasons)
    assert hopper_forward.choose_forward(problem(dtype="float32"), arch="sm_90", num_sms=132, smem_limit=SMEM_LIMIT)
    assert hopper_forward.choose_forward(problem(264), arch="sm_90", num_sms=132, smem_limit=SMEM_LIMIT)


def test_repeated_heads_have_one_element_in_the_map() -> None:
    expanded = OperandLayout(shape=(2, 512, 4, 64), strides=(512 * 64, 64, 0, 1), dtype="bfloat16")
    spec = hopper_forward.choose_forward(problem(64, k=expanded), arch="sm_90", num_sms=132, smem_limit=SMEM_LIMIT)
    assert not isinstance(spec, list), spec
    maps = {item.pointer: item for item in spec.launches[0].tensor_maps}
    assert maps["k"].dims == (64, 512, 1, 2)
    assert maps["k"].strides_bytes == (128, 16, 512 * 128)
    assert maps["q"].dims == (64, 512, 4, 2)


@pytest.mark.parametrize("name", ["mask", "mask_unaligned", "d256_mask_causal"])
def test_a_mask_brings_barriers_for_cleaned_values(name: str) -> None:
    """``clean_v``, one a slot of V, in the layout of ``forward_hopper.cuh``."""
    config = dataclasses.replace(choose(VARIANTS[name]), score_tiles=False)
    without = dataclasses.replace(config, features=dataclasses.replace(config.features, mask=False))
    assert hopper_forward_config.smem_bytes(config) - hopper_forward_config.smem_bytes(without) == 8 * config.num_stages
