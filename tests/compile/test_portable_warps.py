"""At least 8 warps a multiprocessor when hot: the portable tiles on GPUs with 100 or 164 KB of shared memory.

A scheduler with one warp waits with it: 4 warps a multiprocessor leave the matrix units idle between a product and the
next. Counted here from what a kernel is: its registers, its shared memory, its threads, and the limits of the GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from nvrtc_attn.base.architectures import ARCHITECTURES, Architecture
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics.portable_backward import choose_backward
from nvrtc_attn.heuristics.portable_forward import choose_forward
from nvrtc_attn.heuristics.spec import Launch

MIN_WARPS = 8
SMALL = ("sm_86", "sm_89", "sm_120", "sm_121")
LARGE = ("sm_80", "sm_87")
MAIN_KERNELS = ("forward_portable", "backward_portable", "backward_dq", "backward_dbias")
HEAD_DIMS = ((32, 32), (192, 128), *((d, d) for d in range(40, 257, 8)))
CAUSAL: dict[str, Any] = {"window_right": 0}
FEATURES: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": CAUSAL,
    "short": {"seqlen": 1024, **CAUSAL},
    "window": {"window_left": 100, "window_right": 0},
    "dropout": {"dropout_p": 0.1, **CAUSAL},
    "bias": {"bias": True},
    "dbias": {"bias": True, "dbias": True},
    "shared_dbias": {"bias": True, "dbias": True, "batch_bias": 1},
    "mask": {"mask": True},
    "softcap": {"softcap": 30.0, **CAUSAL},
    "varlen": {"varlen": True, **CAUSAL},
    "deterministic": {"deterministic": True, **CAUSAL},
}


def problem(
    head_dims: tuple[int, int], dtype: str = "bfloat16", seqlen: int = 4096, **changes: Any
) -> AttentionProblem:
    """B 4, H 16, dense."""
    d, dv = head_dims
    batch = 1 if changes.get("varlen") else 4
    layout = dense_layout((batch, seqlen, 16, d), dtype)
    if changes.pop("bias", False):
        changes["bias"] = dense_layout((changes.pop("batch_bias", 4), 16, seqlen, seqlen), dtype)
    if changes.pop("mask", False):
        changes["mask"] = dense_layout((4, 1, seqlen, seqlen), "bool")
    return AttentionProblem(
        dtype=dtype, batch=4, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=16, num_heads_kv=16, head_dim=d,
        head_dim_v=dv, q=layout, k=layout, v=dense_layout((batch, seqlen, 16, dv), dtype), softmax_scale=d**-0.5,
        **changes,
    )  # fmt: skip


def launches(arch: str, what: AttentionProblem, passes: str = "both") -> Iterator[Launch]:
    """Those with the products. Helpers read memory and use little of a multiprocessor."""
    limits: dict[str, Any] = {"num_sms": 84, "smem_limit": ARCHITECTURES[arch].smem_per_block_optin}
    found: list[Launch] = []
    if passes != "backward":
        found += choose_forward(dataclasses.replace(what, dbias=False), arch=arch, **limits).launches
    if passes != "forward":
        found += choose_backward(what, arch=arch, **limits).launches
    return (launch for launch in found if launch.config.kernel in MAIN_KERNELS)


def warps_per_sm(arch: Architecture, launch: Launch, num_regs: int) -> int:
    """By shared memory, 1 KB of which each block gives to the driver, registers (256 at a time a warp) and threads."""
    warps = launch.block // 32
    registers = -(-32 * num_regs // 256) * 256
    blocks = min(
        arch.smem_per_sm // (launch.smem_bytes + 1024),
        arch.registers_per_sm // registers // warps,
        arch.max_threads_per_sm // launch.block,
        arch.max_blocks_per_sm,
    )
    return warps * blocks


def most_registers(arch: Architecture, launch: Launch) -> int:
    """What the launch bounds allow a thread."""
    by_blocks = arch.registers_per_sm // (launch.block * launch.config.min_blocks_per_sm) // 8 * 8
    return min(by_blocks, arch.max_registers_per_thread)


def least_warps(arch: str, launch: Launch) -> int:
    """`MIN_WARPS`, with one exception: deterministic dq in 99 KB from head dim 160.

    Timed under that limit on an H200, every tile with 8 warps lost to the 4 of 64 x 32: at D 192 14.1 and 14.6 ms to
    13.2, at D 256 20.6, 21.1 and 21.5 ms to 18.3 (``benchmarks/results/portable_limits.txt``).
    """
    config = launch.config
    widest = max(config.head_dim, config.head_dim_v)
    return 4 if config.kernel == "backward_dq" and arch in SMALL and widest >= 160 else MIN_WARPS


def check(arch: str, what: AttentionProblem, passes: str = "both") -> None:
    for launch in launches(arch, what, passes):
        warps = warps_per_sm(ARCHITECTURES[arch], launch, most_registers(ARCHITECTURES[arch], launch))
        assert launch.smem_bytes <= ARCHITECTURES[arch].smem_per_block_optin
        assert warps >= least_warps(arch, launch), (
            f"{warps} warps, {launch.smem_bytes} bytes of shared memory: {launch.config}"
        )


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("arch", SMALL + LARGE)
def test_16_bit_types(arch: str, features: str) -> None:
    for head_dims, dtype in itertools.product(HEAD_DIMS, ("bfloat16", "float16")):
        check(arch, problem(head_dims, dtype, **FEATURES[features]))


@pytest.mark.parametrize("features", ["dense", "causal", "dropout", "mask", "varlen"])
@pytest.mark.parametrize("arch", SMALL + LARGE)
def test_float32_where_shared_memory_allows(arch: str, features: str) -> None:
    """A backward tile for 8 warps ends at head dim 104 in 99 KB, and in 163 at 160, from where it spills."""
    forward, backward = (192, 104) if arch in SMALL else (256, 160)
    for head_dim in range(32, 257, 8):
        what = problem((head_dim, head_dim), "float32", **FEATURES[features])
        if head_dim <= forward:
            check(arch, what, "forward")
        if head_dim <= backward:
            check(arch, what, "backward")


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_gpus_like_the_measured_one_keep_the_measured_tiles(arch: str) -> None:
    for head_dims, changes in itertools.product(HEAD_DIMS, FEATURES.values()):
        for launch in launches(arch, problem(head_dims, **changes)):
            assert not getattr(launch.config, "v_in_registers", False)
    forward, backward = (launch.config for launch in launches(arch, problem((256, 256))))
    assert (forward.block_m, forward.block_n, forward.num_warps) == (64, 64, 4)
    assert (backward.block_m, backward.block_n, backward.num_warps) == (128, 64, 8)


def backward_tile(arch: str, head_dim: int, **changes: Any) -> tuple[int, int, int]:
    """Rows, keys and warps of the dk/dv kernel."""
    config = next(launches(arch, problem((head_dim, head_dim), **changes), "backward")).config
    return config.block_m, config.block_n, config.num_warps


@pytest.mark.parametrize("arch", SMALL)
def test_rows_that_would_spill_give_way_to_the_next(arch: str) -> None:
    """What the fastest rows of 99 KB serve is what ptxas keeps in registers."""
    for name in ("dense", "causal", "short", "window", "dropout", "softcap", "varlen", "deterministic"):
        assert backward_tile(arch, 128, **FEATURES[name]) == (64, 128, 8)
    for name in ("bias", "dbias", "shared_dbias", "mask"):
        assert backward_tile(arch, 128, **FEATURES[name]) == (64, 64, 8)
    for name in FEATURES:
        spills = name in ("deterministic", "dbias") or arch in ("sm_120", "sm_121")
        assert backward_tile(arch, 256, **FEATURES[name]) == ((64, 32, 8) if spills else (32, 64, 8))
    for name in ("short", "window"):
        what = problem((256, 256), **FEATURES[name])
        config = next(launches(arch, what, "backward")).config
        assert getattr(config, "skip_hidden", None) is (config.block_m == 64)


@pytest.mark.parametrize("arch", SMALL)
def test_deterministic_dq_in_99_kb_is_as_measured(arch: str) -> None:
    """The fastest tile of each head dim, and at least 8 warps wherever they won."""
    for head_dim, expected in (
        (64, (128, 32, 4, 2)), (128, (64, 32, 4, 1)), (192, (64, 32, 4, 2)), (256, (64, 32, 4, 1)),
    ):  # fmt: skip
        what = problem((head_dim, head_dim), deterministic=True, **CAUSAL)
        config = list(launches(arch, what, "backward"))[-1].config
        assert config.kernel == "backward_dq"
        assert (config.block_m, config.block_n, config.num_warps, config.num_stages) == expected


def test_few_rows_are_not_given_warps_of_padding() -> None:
    """Decoding waits for memory: its tiles are those of the other GPUs, as far as they fit."""
    what = dataclasses.replace(problem((128, 128)), seqlen_q=1, q=dense_layout((4, 1, 16, 128), "bfloat16"))
    forward, backward = (launch.config for launch in launches("sm_86", what))
    assert forward.block_m == 16
    assert backward.block_m == 32


# Everything that 99 KB changed; of the other architectures the sizes between which the tiles change.
COMPILED: list[tuple[str, str, tuple[int, int], str, str]] = [
    *(("sm_86", "both", (d, d), "bfloat16", "dense") for d in (64, 128, 256)),
    *(("sm_86", "both", (d, d), "bfloat16", "short") for d in (64, 80, 128, 192, 256)),
    *(("sm_86", "both", (d, d), "float16", "dropout") for d in (64, 128, 256)),
    *(("sm_86", "backward", (64, 64), "bfloat16", name) for name in ("bias", "softcap", "varlen")),
    *(("sm_86", "backward", (d, d), "bfloat16", "deterministic") for d in (64, 96, 128, 192, 256)),
    *(("sm_86", "both", (d, d), "float32", "causal") for d in (64, 96)),
    ("sm_86", "forward", (128, 128), "float32", "causal"),
    ("sm_86", "forward", (192, 128), "bfloat16", "causal"),
    ("sm_86", "forward", (160, 160), "bfloat16", "causal"),
    *((arch, "both", (d, d), "bfloat16", "causal") for arch in ("sm_80", "sm_120") for d in (64, 128, 256)),
    ("sm_89", "both", (128, 128), "bfloat16", "causal"),
    *((arch, "both", (192, 128), "bfloat16", "causal") for arch in ("sm_80", "sm_120")),
    ("sm_80", "backward", (256, 256), "bfloat16", "deterministic"),
    ("sm_80", "backward", (160, 160), "float32", "causal"),
    ("sm_120", "both", (192, 192), "float16", "causal"),
    *(("sm_86", "backward", (128, 128), "bfloat16", name) for name in ("mask", "softcap", "varlen", "window")),
    *(("sm_86", "backward", (256, 256), "bfloat16", name) for name in ("bias", "mask", "varlen", "window")),
    ("sm_120", "backward", (128, 128), "bfloat16", "deterministic"),
    ("sm_86", "backward", (224, 224), "bfloat16", "causal"),
]


def compiled_launches(
    arch: str, passes: str, head_dims: tuple[int, int], dtype: str, features: str
) -> Iterator[Launch]:
    return launches(arch, problem(head_dims, dtype, **FEATURES[features]), passes)


@pytest.mark.slow
@pytest.mark.compiles(kernels=lambda **of: [launch.config for launch in compiled_launches(**of)])
@pytest.mark.parametrize(("arch", "passes", "head_dims", "dtype", "features"), COMPILED)
def test_compiled_kernels(arch: str, passes: str, head_dims: tuple[int, int], dtype: str, features: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from nvrtc_attn.jit.compile import compile_kernel

    for launch in compiled_launches(arch, passes, head_dims, dtype, features):
        compiled = compile_kernel(launch.config)
        assert compiled.num_regs is not None
        assert compiled.spill_bytes == 0, launch.config
        assert "warning" not in compiled.log
        assert warps_per_sm(ARCHITECTURES[arch], launch, compiled.num_regs) >= least_warps(arch, launch), launch.config
