"""Every variant of the Hopper backward kernels compiles for sm_90a without a GPU, a spill or a warning."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from nvrtc_attn.codegen import entry_source
from nvrtc_attn.compile import CompiledKernel, compile_source
from nvrtc_attn.config import KernelConfig
from nvrtc_attn.heuristics import choose_backward, hopper_backward
from nvrtc_attn.heuristics.plan import BackwardPlanSpec
from nvrtc_attn.problem import AttentionProblem, OperandLayout, dense_layout

pytest.importorskip("cuda.bindings.nvrtc")

SMEM_LIMIT = 232448  # bytes a block may use on compute capability 9.0
TARGET: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": SMEM_LIMIT}


def problem(head_dim: int = 128, dtype: str = "bfloat16", **changes: Any) -> AttentionProblem:
    batch = 1 if changes.get("varlen") else 2
    layout = dense_layout((batch, 512, 4, head_dim), dtype)
    values: dict[str, Any] = {
        "dtype": dtype, "batch": 2, "seqlen_q": 512, "seqlen_k": 512, "num_heads": 4, "num_heads_kv": 4,
        "head_dim": head_dim, "head_dim_v": head_dim, "softmax_scale": head_dim**-0.5,
        "q": layout, "k": layout, "v": layout,
    }  # fmt: skip
    return AttentionProblem(**{**values, **changes})


def plan(asked: AttentionProblem) -> BackwardPlanSpec:
    return hopper_backward.plan_spec(asked, hopper_backward.choose_tile(asked), num_sms=132)


def compiled(config: KernelConfig) -> CompiledKernel:
    return compile_source(entry_source(config), config.arch, config=config)


SCORES = OperandLayout(shape=(2, 4, 512, 512), strides=(4 * 512 * 512, 512 * 512, 512, 1), dtype="bfloat16")
MASK = dataclasses.replace(SCORES, dtype="bool")
CAUSAL = {"window_right": 0}
VARIANTS: dict[str, AttentionProblem] = {
    **{f"d{d}": problem(d) for d in (40, 64, 80, 96, 128)},
    **{f"d{d}_causal": problem(d, **CAUSAL) for d in (40, 64, 80, 96, 128)},
    **{f"d{d}_float16_causal": problem(d, "float16", **CAUSAL) for d in (64, 128)},
    "d64_float16": problem(64, "float16"),
    "d64_window": problem(64, window_left=100, window_right=20),
    "d128_window": problem(128, window_left=100, window_right=20),
    "d64_varlen_seqused_k": problem(64, varlen=True, seqused_k=True, **CAUSAL),
    "d128_varlen": problem(128, varlen=True, **CAUSAL),
    "d64_softcap": problem(64, softcap=30.0, **CAUSAL),
    "d128_softcap": problem(128, softcap=30.0, **CAUSAL),
    "d64_negative_scale": problem(64, softmax_scale=-0.1),
    "d64_dbias_causal": problem(64, bias=SCORES, dbias=True, **CAUSAL),
    "d128_dbias_causal": problem(128, bias=SCORES, dbias=True, **CAUSAL),
    "d128_bias_float32": problem(128, bias=dataclasses.replace(SCORES, dtype="float32")),
    "d128_mask": problem(128, mask=MASK),
    "d128_dropout_causal": problem(128, dropout_p=0.1, **CAUSAL),
    "d64_one_key_tile": problem(64, seqlen_k=77),
    "d96_one_key_tile_causal": problem(96, seqlen_k=128, **CAUSAL),
    "d128_one_key_tile_softcap_causal": problem(128, seqlen_k=128, softcap=30.0, seqused_k=True, **CAUSAL),
    "d64_everything": problem(64, bias=SCORES, mask=MASK, softcap=30.0, dropout_p=0.1, **CAUSAL),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_compiles_clean(name: str) -> None:
    kernel = compiled(plan(VARIANTS[name]).launches[1].config)
    assert not re.search(r"C75\d\d|warning", kernel.log), kernel.log
    assert kernel.spill_bytes == 0
    assert kernel.stack_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["d64", "d128", "d80", "d128_varlen"])
def test_kernel_before_it_compiles_clean(name: str) -> None:
    kernel = compiled(plan(VARIANTS[name]).launches[0].config)
    assert "warning" not in kernel.log
    assert kernel.spill_bytes == 0


def test_plan_of_a_dense_problem() -> None:
    spec = plan(problem(128, seqlen_q=500, seqlen_k=700, num_heads_kv=2))
    prepare, main, convert = spec.launches
    assert [launch.config.kernel for launch in spec.launches] == [
        "backward_hopper_prepare", "backward_hopper", "dq_convert",
    ]  # fmt: skip
    # 8 tiles of 64 queries; 6 tiles of 128 keys for 2 x 2 key heads.
    assert prepare.grid == convert.grid == 8 * 4 * 2
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


def test_dq_of_one_key_tile_needs_no_workspace() -> None:
    """All keys in one tile: no sum over tiles, so neither its workspace nor the launch that converts it."""
    spec = plan(problem(64, seqlen_k=77))
    assert [launch.config.kernel for launch in spec.launches] == ["backward_hopper_prepare", "backward_hopper"]
    assert "dq_accum" not in {item.field for item in spec.workspaces}
    for more in (problem(64, seqlen_k=129), problem(64, seqlen_k=77, varlen=True)):
        assert plan(more).launches[2].config.kernel == "dq_convert"


def test_blocks_are_no_more_than_multiprocessors() -> None:
    assert plan(problem(64, batch=64)).launches[1].grid == 132


def test_what_is_left_to_the_portable_family() -> None:
    for name, asked in VARIANTS.items():
        assert isinstance(hopper_backward.choose_backward(asked, **TARGET), BackwardPlanSpec), name
    unaligned = dataclasses.replace(dense_layout((2, 512, 4, 128), "bfloat16"), offset_alignment=2)
    for changes, part in (
        ({"deterministic": True}, "deterministic"),
        ({"seqlen_q": 32}, "seqlen_q is 32"),
        ({"bias": SCORES, "dropout_p": 0.1}, "two of bias, mask and dropout"),
        ({"head_dim_v": 64, "v": dense_layout((2, 512, 4, 64), "bfloat16")}, "beyond 64"),
        ({"q": unaligned}, "q starts at a multiple"),
    ):
        reasons = hopper_backward.choose_backward(problem(128, **changes), **TARGET)
        assert isinstance(reasons, list)
        assert any(part in reason for reason in reasons), (changes, reasons)
    for head_dim in (32, 136, 256):
        assert isinstance(hopper_backward.choose_backward(problem(head_dim), **TARGET), list)


def test_backend_chooses_the_family() -> None:
    layout = dense_layout((2, 512, 4, 64), "bfloat16")
    asked = problem(64, out=layout, dout=layout, dq=layout, dk=layout, dv=layout)
    assert choose_backward(asked, **TARGET, backend="hopper").launches[1].config.kernel == "backward_hopper"
    assert choose_backward(asked, **TARGET, backend="portable").launches[1].config.kernel == "backward_portable"
    assert choose_backward(asked, **TARGET, backend="auto").launches[1].config.kernel == "backward_hopper"
    assert choose_backward(asked, **{**TARGET, "arch": "sm_100"}).launches[1].config.kernel == "backward_portable"


def test_few_key_tiles_go_to_the_family_that_splits_queries() -> None:
    """One head, 77 keys: one multiprocessor would do all the work."""

    def kernel(seqlen_q: int, heads: int) -> str:
        q, k = dense_layout((1, seqlen_q, heads, 64), "bfloat16"), dense_layout((1, 77, heads, 64), "bfloat16")
        asked = problem(
            64, batch=1, seqlen_q=seqlen_q, seqlen_k=77, num_heads=heads, num_heads_kv=heads, q=q, k=k, v=k,
            out=q, dout=q, dq=q, dk=k, dv=k,
        )  # fmt: skip
        return choose_backward(asked, **TARGET).launches[1].config.kernel

    assert kernel(8192, 1) == "backward_portable"
    assert kernel(8192, 128) == "backward_hopper"
    assert kernel(64, 1) == "backward_hopper"  # one query tile: nothing to split
