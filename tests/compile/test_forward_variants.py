"""The portable forward kernel: what is chosen fits every architecture, compiles for it, and does not spill when hot."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from architectures import ONE_OF_EACH_CLASS, TWINS

from nvrtc_attn.base.architectures import ARCHITECTURES, PORTABLE_ARCHITECTURES
from nvrtc_attn.base.errors import UnsupportedError
from nvrtc_attn.front.problem import AttentionProblem, OperandLayout
from nvrtc_attn.heuristics import portable_forward
from nvrtc_attn.heuristics.common import features_of, is_vectorizable
from nvrtc_attn.heuristics.forward_combine import MAX_PARTIAL_BYTES
from nvrtc_attn.heuristics.portable_forward import choose_forward
from nvrtc_attn.heuristics.portable_forward_config import smem_bytes
from nvrtc_attn.heuristics.spec import ForwardPlanSpec
from nvrtc_attn.jit.config import Features, ForwardConfig, KernelConfig

PARKED_BYTES = 64
"""Of hot variants on GPUs that they were not tuned on: ptxas parks a few loop invariants when the accumulators take
nearly all 255 registers."""
ALLOWED_SPILL_BYTES = 256
"""Of variants that are not hot."""


def layout(shape: tuple[int, ...], dtype: str, padding: int = 0) -> OperandLayout:
    strides = [1]
    for size in (shape[-1] + padding, *shape[-2:0:-1]):
        strides.insert(0, strides[0] * size)
    return OperandLayout(shape=shape, strides=tuple(strides), dtype=dtype, offset_alignment=2 if padding else 16)


def problem(**changes: Any) -> AttentionProblem:
    """B 4, S 2048, H 16, D 64; ``bias`` is a dtype, ``mask`` a bool, ``padding`` the elements between rows."""
    p: dict[str, Any] = {
        "dtype": "bfloat16", "batch": 4, "seqlen_q": 2048, "seqlen_k": 2048, "num_heads": 16, "num_heads_kv": 16,
        "head_dim": 64, "return_lse": True, **changes,
    }  # fmt: skip
    p.setdefault("head_dim_v", p["head_dim"])
    padding, bias, mask = p.pop("padding", 0), p.pop("bias", None), p.pop("mask", False)
    b, m, n, h, kv, dtype = (
        p[name] for name in ("batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "dtype")
    )
    tokens_q, tokens_k = ((1, b * m), (1, b * n)) if p.get("varlen") else ((b, m), (b, n))
    return AttentionProblem(
        **p,
        q=layout((*tokens_q, h, p["head_dim"]), dtype, padding),
        k=layout((*tokens_k, kv, p["head_dim"]), dtype, padding),
        v=layout((*tokens_k, kv, p["head_dim_v"]), dtype, padding),
        bias=layout((b, h, m, n), bias) if bias else None,
        mask=layout((b, 1, m, n), "bool") if mask else None,
    )


def choose(arch: str, what: AttentionProblem, **changes: Any) -> ForwardPlanSpec:
    target = {"num_sms": 132, "smem_limit": ARCHITECTURES[arch].smem_per_block_optin, "legacy_mma": arch == "sm_75"}
    return choose_forward(what, arch=arch, **(target | changes))


CAUSAL: dict[str, Any] = {"window_right": 0}
WINDOW: dict[str, Any] = {"window_left": 100, "window_right": 20}
PACKED: dict[str, Any] = {"varlen": True, "seqused_k": True}
HOT: dict[str, dict[str, Any]] = {
    "d64": {},
    "d64-causal": CAUSAL,
    "d64-f16": {"dtype": "float16"},
    "d128": {"head_dim": 128},
    "d128-causal": {"head_dim": 128, **CAUSAL},
    "d128-causal-f16": {"head_dim": 128, "dtype": "float16", **CAUSAL},
    "d96": {"head_dim": 96},
    "d256": {"head_dim": 256},
    "d64-bias": {"bias": "bfloat16"},
    "d64-dropout": {"dropout_p": 0.1},
    "f32-d64": {"dtype": "float32"},
    "f32-d128": {"dtype": "float32", "head_dim": 128},
    "decode": {"head_dim": 128, "seqlen_q": 1, "seqlen_k": 8192},
    "decode-gqa": {"head_dim": 128, "seqlen_q": 1, "seqlen_k": 8192, "num_heads_kv": 4},
}
OTHERS: dict[str, dict[str, Any]] = {
    "d8": {"head_dim": 8},
    "d24": {"head_dim": 24, **WINDOW},
    "d40-f16": {"head_dim": 40, "dtype": "float16"},
    "d72-causal": {"head_dim": 72, **CAUSAL},
    "d80": {"head_dim": 80},
    "d160": {"head_dim": 160},
    "d192-dv128-causal": {"head_dim": 192, "head_dim_v": 128, **CAUSAL},
    "d264": {"head_dim": 264, "dtype": "float16"},
    "d512": {"head_dim": 512},
    "f32-d512-dv8": {"head_dim": 512, "head_dim_v": 8, "dtype": "float32"},
    "d64-dv512": {"head_dim_v": 512, "dtype": "float16"},
    "f32-d40-causal": {"dtype": "float32", "head_dim": 40, **CAUSAL},
    "f32-d128-causal": {"dtype": "float32", "head_dim": 128, **CAUSAL},
    "f32-d512": {"dtype": "float32", "head_dim": 512},
    "f32-bias-dropout": {"dtype": "float32", "bias": "float32", "dropout_p": 0.2},
    "d59": {"head_dim": 59, "dtype": "float16"},
    "d128-unaligned-causal": {"head_dim": 128, "padding": 3, **CAUSAL},
    "f32-d111": {"head_dim": 111, "dtype": "float32"},
    "packed": {**PACKED, **CAUSAL},
    "packed-decode": {"head_dim": 128, "seqlen_q": 1, "seqlen_k": 8192, "batch": 2, **PACKED},
    "softcap": {"softcap": 30.0, **CAUSAL},
    "negative-scale": {"softmax_scale": -0.1},
    "mask": {"mask": True, "dtype": "float16"},
    "bias-f32-window": {"bias": "float32", "head_dim": 128, **WINDOW},
    "dropout-d128-causal": {"dropout_p": 0.1, "head_dim": 128, **CAUSAL},
    "cross-77": {"seqlen_k": 77, "dtype": "float16"},
    "gqa-32-rows-causal": {"head_dim": 128, "seqlen_q": 8, "seqlen_k": 8192, "num_heads_kv": 4, **CAUSAL},
    "gqa-64-rows": {"head_dim": 128, "seqlen_q": 16, "seqlen_k": 8192, "num_heads_kv": 4},
    "gqa-rows-packed": {"seqlen_q": 5, "seqlen_k": 700, "num_heads_kv": 4, **PACKED, **CAUSAL},
    "gqa-rows-everything": {
        "dtype": "float16", "seqlen_q": 20, "num_heads_kv": 8, "bias": "float32", "mask": True, "softcap": 20.0,
        "dropout_p": 0.1, "head_dim": 128, "padding": 1, **WINDOW,
    },
    "few-queries-split": {"seqlen_q": 512, "seqlen_k": 8192, "batch": 1, "num_heads": 8, "num_heads_kv": 8},
    "everything": {
        "dtype": "float16", "bias": "float32", "mask": True, "softcap": 20.0, "dropout_p": 0.1, "head_dim": 128,
        **WINDOW,
    },
    "everything-unaligned": {
        "dtype": "float16", "bias": "float16", "mask": True, "softcap": 20.0, "dropout_p": 0.1, "padding": 1, **CAUSAL,
    },
}  # fmt: skip
# Some hot variants for every architecture, the others for those that do not repeat another; float16, which differs from
# bfloat16 in the type of its products, for two. Of the rest each for two, all architectures in turn.
EVERYWHERE = ("d128-causal", "decode", "f32-d64")


def hot_targets(name: str) -> list[str]:
    if name.endswith("f16"):
        return ["sm_80", "sm_90"]
    return [arch for arch in PORTABLE_ARCHITECTURES if name in EVERYWHERE or arch not in TWINS]


OTHER_TARGETS = {
    name: [PORTABLE_ARCHITECTURES[(3 * i + j) % len(PORTABLE_ARCHITECTURES)] for j in range(2)]
    for i, name in enumerate(OTHERS)
}
SAMPLES = [
    *[(name, arch) for name in HOT for arch in hot_targets(name)],
    *[(name, arch) for name, targets in OTHER_TARGETS.items() for arch in targets],
]


def supported(what: AttentionProblem, arch: str) -> bool:
    return arch != "sm_75" or what.dtype in ("float16", "bfloat16")


def for_arch(name: str, arch: str) -> AttentionProblem:
    """The named problem; compute capability 7.5 knows float16 only."""
    what = problem(**{**HOT, **OTHERS}[name])
    return dataclasses.replace(what, dtype="float16") if arch == "sm_75" and what.dtype == "bfloat16" else what


def configs(name: str, arch: str) -> list[KernelConfig]:
    what = for_arch(name, arch)
    return [launch.config for launch in choose(arch, what).launches] if supported(what, arch) else []


def known_to_nvrtc(arch: str) -> bool:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    return int(arch.removeprefix("sm_")) in nvrtc.nvrtcGetSupportedArchs()[1]


@pytest.mark.slow(
    sample=[
        *(f"decode-{arch}" for arch in ONE_OF_EACH_CLASS),
        *("d128-causal-sm_80", f"everything-{OTHER_TARGETS['everything'][0]}"),
    ]
)
@pytest.mark.reliability(92)
@pytest.mark.compiles(kernels=configs)
@pytest.mark.parametrize(("name", "arch"), SAMPLES, ids=lambda value: value)
def test_compiles_without_spills_or_warnings(name: str, arch: str) -> None:
    if not known_to_nvrtc(arch):
        pytest.skip(f"the installed NVRTC does not know {arch}")
    from nvrtc_attn.jit.compile import compile_kernel

    what = for_arch(name, arch)
    if not supported(what, arch):
        pytest.skip("float32 has no matrix instructions on compute capability 7.5: refused, see below")
    for launch in choose(arch, what).launches:
        compiled = compile_kernel(launch.config)
        assert "warning" not in compiled.log
        assert compiled.num_regs is not None
        assert compiled.spill_bytes is not None
        assert compiled.num_regs * launch.block * launch.config.min_blocks_per_sm <= 65536
        allowed = ALLOWED_SPILL_BYTES if name not in HOT else 0 if arch == "sm_90" else PARKED_BYTES
        assert compiled.spill_bytes <= allowed, f"{launch.config} spills {compiled.spill_bytes} bytes"
        assert compiled.static_smem_bytes == 0


FEATURES: list[dict[str, Any]] = [
    {}, CAUSAL, WINDOW, PACKED, {**PACKED, **CAUSAL}, {"bias": "float32"}, {"mask": True}, {"dropout_p": 0.5},
    {"softcap": 10.0}, {"softmax_scale": 0.0}, {"padding": 1}, {"padding": 1, "bias": "float32", "dropout_p": 0.1},
    {"num_heads_kv": 2}, {"num_heads_kv": 1, **PACKED},
]  # fmt: skip
LENGTHS = ((2048, 2048), (1, 8192), (16, 100), (64, 64), (100, 77), (0, 10), (10, 0), (1, 1))


def check_fits(spec: ForwardPlanSpec, what: AttentionProblem, smem_limit: int) -> None:
    for launch in spec.launches:
        config = launch.config
        if config.kernel == "tile_plan":
            assert launch.smem_bytes <= smem_limit
            continue
        assert isinstance(config, ForwardConfig)
        assert launch.smem_bytes == smem_bytes(config) <= smem_limit
        assert launch.block == config.num_threads <= 1024
        assert 0 <= launch.grid < 2**31
        assert config.head_dim_v % 8 == 0
        assert config.head_dim_v >= what.head_dim_v
        if config.kernel == "combine":
            continue
        # What the kernel's static_asserts demand.
        warps_m, rest = divmod(config.num_warps, config.warps_n * config.warps_d)
        assert rest == 0
        assert config.block_m % (16 * warps_m) == 0
        assert config.block_n % (16 * config.warps_n) == 0
        assert config.head_dim_v % (8 * config.warps_d * (2 if config.warps_d > 1 else 1)) == 0
    assert (spec.num_splits > 1) == (spec.launches[-1].config.kernel == "combine")
    if spec.num_splits > 1:
        rows = spec.num_splits * what.batch * what.num_heads * what.seqlen_q
        assert spec.softmax_partial_bytes == 8 * rows
        assert spec.out_partial_bytes == 4 * rows * spec.main.config.head_dim_v
        assert spec.out_partial_bytes <= MAX_PARTIAL_BYTES


@pytest.mark.reliability(69)
@pytest.mark.parametrize("arch", PORTABLE_ARCHITECTURES)
def test_every_choice_fits_the_architecture(arch: str) -> None:
    limit = ARCHITECTURES[arch].smem_per_block_optin
    dims = (1, 8, 40, 59, 64, 72, 96, 111, 128, 160, 192, 200, 256, 257, 320, 384, 512)
    dtypes = ("float16",) if arch == "sm_75" else ("float16", "float32")
    for dtype, dim, changes, (m, n) in itertools.product(dtypes, dims, FEATURES, LENGTHS):
        what = problem(dtype=dtype, head_dim=dim, seqlen_q=m, seqlen_k=n, **changes)
        check_fits(choose(arch, what), what, limit)
    for dim, dim_v in itertools.permutations((8, 64, 128, 256, 512), 2):
        what = problem(dtype=dtypes[-1], head_dim=dim, head_dim_v=dim_v)
        check_fits(choose(arch, what), what, limit)


@pytest.mark.reliability(69)
def test_a_smaller_limit_gives_a_smaller_tile_or_both_numbers() -> None:
    what = problem(head_dim=128)
    whole = choose("sm_90", what).launches[0]
    small = choose("sm_90", what, smem_limit=40 << 10).launches[0]
    assert small.smem_bytes <= 40 << 10 < whole.smem_bytes
    with pytest.raises(UnsupportedError, match=r"needs \d+ bytes of shared memory; a block gets 1024"):
        choose("sm_90", what, smem_limit=1024)


@pytest.mark.reliability(5, 68)
def test_all_reasons_are_given_together() -> None:
    with pytest.raises(UnsupportedError) as caught:
        choose("sm_75", problem(dtype="bfloat16", head_dim=520, head_dim_v=1024))
    assert len(caught.value.reasons) == 3
    for word in ("head_dim is 520", "head_dim_v is 1024", "dtype is bfloat16"):
        assert word in str(caught.value)
    with pytest.raises(UnsupportedError, match="dtype is float32"):
        choose("sm_75", problem(dtype="float32"))


@pytest.mark.reliability(9, 10, 13)
def test_vectors_are_used_only_where_every_row_allows_them() -> None:
    rows = layout((2, 8, 4, 64), "float16")
    assert is_vectorizable(rows, 2)
    assert not is_vectorizable(dataclasses.replace(rows, offset_alignment=8), 2)
    assert not is_vectorizable(dataclasses.replace(rows, strides=(8 * 260, 260, 65, 1)), 2)
    assert not is_vectorizable(dataclasses.replace(rows, strides=(64 * 32, 4 * 64, 1, 4)), 2)
    assert not is_vectorizable(layout((2, 8, 4, 60), "float16"), 2)
    assert is_vectorizable(layout((2, 8, 4, 60), "float32"), 4)
    # The stride of a dim of size 1 is never followed.
    assert is_vectorizable(OperandLayout(shape=(1, 8, 1, 64), strides=(3, 64, 5, 1), dtype="float16"), 2)
    assert is_vectorizable(dataclasses.replace(rows, strides=(0, 64, 0, 1)), 2)
    assert not choose("sm_90", problem(padding=1)).launches[0].config.aligned


def test_features_follow_the_problem() -> None:
    assert features_of(problem()) == Features()
    assert features_of(problem(window_left=3)) == Features(band=True)
    assert features_of(problem(softmax_scale=-1.0, softcap=2.0)) == Features(prescale=True, softcap=True)
    assert features_of(problem(bias="float32", mask=True, dropout_p=0.1, **PACKED)) == Features(
        bias="float32", mask=True, dropout=True, varlen=True, seqused_k=True
    )


def test_keys_are_split_only_when_the_gpu_would_idle() -> None:
    assert choose("sm_90", problem()).num_splits == 1
    assert choose("sm_90", problem(batch=64, seqlen_q=1, seqlen_k=8192)).num_splits == 1
    decode = choose("sm_90", problem(batch=1, num_heads=8, num_heads_kv=8, seqlen_q=1, seqlen_k=65536, head_dim=128))
    assert decode.num_splits >= 16
    assert choose("sm_90", problem(batch=1, num_heads=1, num_heads_kv=1, seqlen_q=1, seqlen_k=64)).num_splits == 1
    few = choose("sm_90", problem(batch=1, num_heads=4, num_heads_kv=4, head_dim=128))
    assert few.num_splits == 4
    # The partial results are bounded whatever the lengths.
    long = choose("sm_90", problem(batch=1, num_heads=1, num_heads_kv=1, seqlen_q=10_000, seqlen_k=1 << 20))
    assert long.out_partial_bytes <= MAX_PARTIAL_BYTES


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@pytest.mark.parametrize(
    ("queries", "heads_kv", "packed"), [(1, 4, True), (1, 1, True), (63, 4, True), (64, 4, False), (1, 16, False)]
)
def test_few_queries_make_rows_of_the_heads_that_share_a_key_head(queries: int, heads_kv: int, packed: bool) -> None:
    for changes in ({}, PACKED, {"dropout_p": 0.1, "bias": "float32"}, {"dtype": "float32"}, {"padding": 1}):
        if changes is not PACKED or queries < 64:
            spec = choose("sm_90", problem(seqlen_q=queries, seqlen_k=8192, num_heads_kv=heads_kv, **changes))
            launch = spec.launches[0]
            assert isinstance(launch.config, ForwardConfig)
            assert launch.config.packed_heads == packed
            rows, units = (queries * 16 // heads_kv, heads_kv) if packed else (queries, 16)
            num_m_blocks = ceil_div(rows, launch.config.block_m)
            sequences = 5 if changes is PACKED and spec.num_splits == 1 else 4
            assert dict(launch.params)["num_m_blocks"] == num_m_blocks
            splits = launch.config.cluster if launch.config.cluster > 1 else spec.num_splits
            assert launch.grid == sequences * units * num_m_blocks * splits
            # The partial results are those of the query heads, whoever computes them.
            assert spec.softmax_partial_bytes == (8 * spec.num_splits * 4 * 16 * queries if spec.num_splits > 1 else 0)


@pytest.mark.parametrize(
    ("shape", "splits", "stages"),
    [
        # (batch, heads, key heads, keys, head dim): what was measured fastest on 132 multiprocessors, or within 1 %.
        ((32, 32, 32, 8192, 128), (1,), 2),
        ((32, 32, 8, 8192, 128), (1,), 3),
        ((16, 64, 8, 8192, 128), (1,), 3),
        ((8, 32, 8, 8192, 128), (2,), 3),
        ((1, 32, 8, 32768, 128), (16,), 3),
        ((4, 32, 8, 32768, 128), (4,), 3),
        ((32, 32, 8, 8192, 64), (1,), 3),
        ((8, 32, 32, 2432, 64), (1,), 3),
        ((32, 20, 20, 1500, 64), (1,), 2),
        ((5, 32, 32, 3000, 80), (1,), 3),
        ((4, 64, 8, 32768, 64), (14, 15, 16), 2),
        ((8, 16, 8, 8192, 256), (2,), 2),
    ],
)
def test_decoding_splits_keys_as_measured(shape: tuple[int, ...], splits: tuple[int, ...], stages: int) -> None:
    """With a second kernel, as all GPUs but those of compute capability 9.0 have it."""
    batch, heads, heads_kv, keys, head_dim = shape
    what = problem(batch=batch, seqlen_q=1, seqlen_k=keys, num_heads=heads, num_heads_kv=heads_kv, head_dim=head_dim)
    spec = choose("sm_90", what, clusters=False)
    assert spec.num_splits in splits
    assert spec.launches[0].config.num_stages == stages


def test_a_third_stage_takes_the_place_of_splits() -> None:
    """Where blocks are many, and with 32 rows where every multiprocessor has one."""

    def chosen(
        batch: int, heads: int, keys: int, head_dim: int = 128, queries: int = 1, arch: str = "sm_90"
    ) -> tuple[int, int]:
        sizes = {"batch": batch, "seqlen_q": queries, "seqlen_k": keys, "num_heads": heads, "num_heads_kv": 8}
        spec = choose(arch, problem(**sizes, head_dim=head_dim), clusters=False)
        config = spec.launches[0].config
        assert smem_bytes(config) == spec.launches[0].smem_bytes
        wide = arch == "sm_90" and spec.num_splits == 1 and batch * 8 < 128 and head_dim <= 128
        assert config.block_n == (128 if wide else 64)
        return config.num_stages, spec.num_splits

    assert chosen(64, 32, 4096) == (3, 1)
    assert chosen(64, 32, 2048, queries=2) == (3, 1)
    assert chosen(1, 32, 8192, queries=8) == (3, 16)
    assert chosen(16, 32, 4096) == (3, 1)
    # As many blocks as half of the multiprocessors, of few keys: no second kernel; of more keys it pays.
    assert chosen(8, 64, 2048, head_dim=64) == (4, 1)
    assert chosen(8, 64, 2048) == (3, 1)
    # Where tiles of 128 keys were not measured.
    assert chosen(8, 64, 2048, head_dim=64, arch="sm_100") == (6, 1)
    assert chosen(8, 64, 2048, arch="sm_100") == (4, 1)
    assert chosen(8, 64, 8192) == (3, 2)
    assert chosen(4, 32, 8192) == (3, 4)
    assert chosen(8, 64, 8192, head_dim=256)[1] > 1


CLUSTERED: dict[str, dict[str, Any]] = {
    "d128": {},
    "d64": {"head_dim": 64},
    "d256": {"head_dim": 256},
    "32-rows-causal": {"seqlen_q": 8, **CAUSAL},
    "64-rows-causal": {"seqlen_q": 16, **CAUSAL},
    "bias-dropout": {"bias": "bfloat16", "dropout_p": 0.1},
    "seqused-k": {"seqused_k": True},
}


def clustered(name: str, splits: int) -> ForwardPlanSpec:
    sizes = {"seqlen_q": 1, "seqlen_k": 8192, "num_heads_kv": 4, "batch": 8, "head_dim": 128}
    return choose("sm_90", problem(**{**sizes, **CLUSTERED[name]}), num_splits=splits, clustered=True)


@pytest.mark.slow(sample=["8-32-rows-causal"])
@pytest.mark.compiles(kernels=lambda name, splits: [clustered(name, splits).main.config])
@pytest.mark.parametrize("name", CLUSTERED)
@pytest.mark.parametrize("splits", [4, 8])
def test_clusters_compile_without_spills(name: str, splits: int) -> None:
    from nvrtc_attn.jit.compile import compile_kernel

    compiled = compile_kernel(clustered(name, splits).main.config)
    assert "warning" not in compiled.log
    assert compiled.spill_bytes == 0
    assert compiled.static_smem_bytes == 0


APART: dict[str, dict[str, Any]] = {
    "d128": {"batch": 4, "num_heads": 16, "num_heads_kv": 16, "seqlen_k": 16384, "head_dim": 128},
    "d128-packed": {"batch": 4, "num_heads": 16, "num_heads_kv": 4, "seqlen_k": 65536, "head_dim": 128},
    "d64-max-logit": {"batch": 4, "num_heads_kv": 4, "head_dim": 64, "seqlen_k": 8192, "return_max_logit": True},
}


def apart(name: str) -> ForwardPlanSpec:
    return choose("sm_90", problem(seqlen_q=1, **APART[name]), clusters=False)


@pytest.mark.compiles(kernels=lambda name: [apart(name).main.config])
@pytest.mark.parametrize("name", APART)
def test_splits_with_a_second_kernel_compile_without_spills(name: str) -> None:
    """Of a device without clusters, and of so many keys that one does not pay."""
    from nvrtc_attn.jit.compile import compile_kernel

    spec = apart(name)
    assert isinstance(spec.main.config, ForwardConfig)
    assert (spec.main.config.split, spec.main.config.cluster) == (True, 1)
    compiled = compile_kernel(spec.main.config)
    assert "warning" not in compiled.log
    assert compiled.spill_bytes == 0


def test_splits_of_a_cluster_need_no_second_kernel() -> None:
    sizes = {"seqlen_q": 1, "seqlen_k": 8192, "num_heads_kv": 4, "batch": 8, "head_dim": 128}
    (launch,) = clustered("d128", 4).launches
    assert isinstance(launch.config, ForwardConfig)
    assert launch.config.cluster == dict(launch.params)["num_splits"] == dict(launch.params)["head_group"] == 4
    assert launch.grid == 8 * 4 * 4
    assert clustered("d128", 4).workspaces == ()
    assert launch.smem_bytes == smem_bytes(launch.config)
    for arch, splits, changes in (
        ("sm_80", 4, {}), ("sm_90", 3, {}), ("sm_90", 4, {"varlen": True}),
        ("sm_90", 4, {"mask": True, "batch": 1, "seqlen_q": 4, "seqlen_k": 65536}),
    ):  # fmt: skip
        spec = choose(arch, problem(**{**sizes, **changes}), num_splits=splits, clustered=True)
        assert spec.launches[-1].config.kernel == "combine", (arch, splits, changes)


def test_clusters_take_the_place_of_splits() -> None:
    """Not of one block that has all keys, where those are many; and of nothing on a device that launches none."""
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}

    def decode(batch: int, heads: int, keys: int, queries: int = 1, **changes: Any) -> AttentionProblem:
        sizes = {"batch": batch, "seqlen_q": queries, "seqlen_k": keys, "num_heads": heads, "num_heads_kv": 8}
        return problem(**{**sizes, "head_dim": 128, **changes})

    def chosen(what: AttentionProblem, **changes: Any) -> tuple[int, int]:
        spec = choose("sm_90", what, **changes)
        assert isinstance(spec.main.config, ForwardConfig)
        assert spec.main.smem_bytes == smem_bytes(spec.main.config) <= target["smem_limit"]
        return spec.main.config.num_stages, spec.main.config.cluster

    def clusters_of(what: AttentionProblem, clusters: bool = True) -> set[int]:
        found = portable_forward.candidates(what, **target, clusters=clusters)
        return {spec.main.config.cluster for spec in found if isinstance(spec.main.config, ForwardConfig)}

    split = (decode(1, 32, 8192), decode(1, 32, 8192, queries=8), decode(4, 32, 8192, queries=4))
    whole = (decode(64, 32, 4096), decode(16, 32, 4096))
    assert {chosen(what, clusters=False)[1] for what in (*split, *whole)} == {1}
    assert {n for what in split for n in clusters_of(what, clusters=False)} == {1}
    assert [chosen(what) for what in split] == [(3, 8), (3, 8), (3, 2)]
    assert {chosen(what)[1] for what in whole} == {1}
    assert clusters_of(split[0]) == {1, 4, 8, 16}
    # So long that half of the multiprocessors could not read the keys as fast as all.
    assert chosen(decode(1, 32, 131072))[1] == 1
    for changes in ({"varlen": True}, {"seqused_k": True}, {"head_dim": 256}):
        assert chosen(decode(4, 32, 8192, **changes))[1] == 1, changes
    assert choose("sm_80", split[0]).launches[-1].config.kernel == "combine"


WIDE: dict[str, dict[str, Any]] = {
    # Key heads of one sequence, and what else; the table takes all keys, or clusters.
    "d128-all-keys": {"batch": 8},
    "d64-all-keys": {"batch": 8, "head_dim": 64},
    "d64": {"head_dim": 64},
    "d96-float16": {"head_dim": 96, "dtype": "float16"},
    "d40-softcap": {"head_dim": 40, "softcap": 20.0},
    "bias-dropout": {"bias": "float32", "dropout_p": 0.1},
    "max-logit-bias-band": {"return_max_logit": True, "bias": "bfloat16", "seqlen_q": 2, **CAUSAL},
    "alone-all-keys": {"batch": 8, "num_heads": 8},
    "32-rows": {"seqlen_q": 8, **CAUSAL},
    "32-rows-d64-dropout": {"seqlen_q": 8, "head_dim": 64, "dropout_p": 0.1, "bias": "bfloat16", **CAUSAL},
    "32-rows-softcap": {"seqlen_q": 8, "softcap": 20.0},
}


def wide(name: str, **changes: Any) -> ForwardConfig:
    sizes = {"batch": 1, "seqlen_q": 1, "seqlen_k": 2048, "num_heads": 32, "num_heads_kv": 8, "head_dim": 128}
    config = choose("sm_90", problem(**{**sizes, **WIDE[name], **changes})).main.config
    assert isinstance(config, ForwardConfig)
    return config


@pytest.mark.slow(sample=["d64-all-keys", "32-rows"])
@pytest.mark.compiles(kernels=lambda name: [wide(name)])
@pytest.mark.parametrize("name", WIDE)
def test_tiles_of_128_keys_compile_without_spills(name: str) -> None:
    from nvrtc_attn.jit.compile import compile_kernel

    config = wide(name)
    assert (config.block_n, config.cluster > 1) == (128, not name.endswith("all-keys"))
    compiled = compile_kernel(config)
    assert "warning" not in compiled.log
    assert compiled.spill_bytes == 0
    # Not of float32, of other head dims, nor where fewer keys than two tiles or a split would not pay.
    for changes in ({"dtype": "float32"}, {"head_dim": 256}, {"seqlen_k": 100}):
        assert wide(name, **changes).block_n != 128


@pytest.mark.parametrize(
    ("batch", "heads", "keys", "count"),
    [
        (8, 64, 2048, 1), (8, 64, 4096, 1), (4, 32, 8192, 2), (2, 32, 8192, 4), (1, 32, 8192, 8), (1, 32, 32768, 8),
        (3, 32, 4096, 4), (5, 32, 2048, 2),
    ],
)  # fmt: skip
def test_clusters_leave_room_for_themselves(batch: int, heads: int, keys: int, count: int) -> None:
    """Half of the multiprocessors or a little more: of four or more blocks never so many that some wait."""
    sizes = {"batch": batch, "seqlen_q": 1, "seqlen_k": keys, "num_heads": heads, "num_heads_kv": 8, "head_dim": 128}
    spec = choose("sm_90", problem(**sizes))
    assert isinstance(spec.main.config, ForwardConfig)
    assert (spec.main.config.cluster, spec.num_splits) == (count, 1)
    for num_sms in (16, 32, 60, 78, 114, 132):
        other = choose("sm_90", problem(**sizes), num_sms=num_sms).main
        assert isinstance(other.config, ForwardConfig)
        assert other.config.cluster == 1 or other.grid <= num_sms
        assert other.config.cluster <= 2 or other.grid <= 0.75 * num_sms


def test_ragged_lengths_are_split_finer() -> None:
    decode = {"batch": 32, "seqlen_q": 1, "seqlen_k": 8192, "num_heads": 32, "num_heads_kv": 8, "head_dim": 128}
    assert choose("sm_90", problem(**decode)).num_splits == 1
    assert 4 <= choose("sm_90", problem(**decode, **PACKED)).num_splits <= 12


def test_a_tile_is_not_wider_than_the_keys() -> None:
    assert choose("sm_90", problem(seqlen_k=77)).launches[0].config.block_n == 80
    assert choose("sm_90", problem(seqlen_k=5)).launches[0].config.block_n == 16


@pytest.mark.reliability(14)
def test_empty_problems_launch_what_must_be_written() -> None:
    assert choose("sm_90", problem(seqlen_q=0)).launches[0].grid == 0
    assert choose("sm_90", problem(batch=0)).launches[0].grid == 0
    assert choose("sm_90", problem(seqlen_k=0)).launches[0].grid > 0
    # Packed tokens that belong to no sequence are zeroed by blocks of their own.
    assert choose("sm_90", problem(batch=0, varlen=True)).launches[0].grid > 0
    assert choose("sm_90", problem(seqlen_q=0, varlen=True)).launches[0].grid > 0
