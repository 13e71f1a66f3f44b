"""The generated entry file: derived from every field of the config, and from nothing else."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from config_variants import config_variants

from nvrtc_attn.base.errors import CompileError
from nvrtc_attn.heuristics import choose_backward, choose_forward
from nvrtc_attn.jit import codegen
from nvrtc_attn.jit.codegen import ENTRY_NAME, entry_source
from nvrtc_attn.jit.compile import compile_source
from nvrtc_attn.jit.config import (
    BackwardConfig,
    DbiasConfig,
    DqConfig,
    Features,
    ForwardConfig,
    HopperBackwardConfig,
    HopperDbiasConfig,
    HopperForwardConfig,
    KernelConfig,
    SinkConfig,
)
from nvrtc_attn.jit.params import BackwardParams, ForwardParams
from nvrtc_attn.plans import precompile

COMMON: dict[str, Any] = {
    "arch": "sm_80", "dtype": "float16", "head_dim": 64, "head_dim_v": 64,
    "block_m": 128, "block_n": 64, "num_warps": 4,
}  # fmt: skip
FORWARD = ForwardConfig(kernel="forward_portable", **COMMON)
BACKWARD = BackwardConfig(kernel="backward_portable", **COMMON)
DQ = DqConfig(kernel="backward_dq", **COMMON, warps_m=4, chunk_n=32)
DBIAS = DbiasConfig(kernel="backward_dbias", **COMMON)
HOPPER = HopperForwardConfig(kernel="forward_hopper", **{**COMMON, "num_warps": 12})
HOPPER_BACKWARD = HopperBackwardConfig(kernel="backward_hopper", **{**COMMON, "num_warps": 12})
HOPPER_DBIAS = HopperDbiasConfig(kernel="backward_hopper_dbias", **{**COMMON, "num_warps": 12})
SINK = SinkConfig(kernel="sink_gradient", **COMMON)
CONFIGS = [FORWARD, BACKWARD, DQ, DBIAS, HOPPER, HOPPER_BACKWARD, HOPPER_DBIAS, SINK]


@pytest.mark.reliability(90)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kernel)
def test_every_field_changes_the_text(config: KernelConfig) -> None:
    texts = {"unchanged": entry_source(config)}
    for name, other in config_variants(config):
        texts[name] = entry_source(other)
    seen: dict[str, str] = {}
    for name, text in texts.items():
        assert text not in seen, f"{name} gives the text of {seen[text]}"
        seen[text] = name
    assert len(texts) > 25


def test_every_kind_of_config_is_tested() -> None:
    kinds = {kind.__name__ for kind in KernelConfig.__subclasses__()}  # by name: slots=True makes every class twice
    assert {type(config).__name__ for config in CONFIGS} == kinds


def test_equal_configs_give_equal_text() -> None:
    again = ForwardConfig(kernel="forward_portable", **COMMON, features=Features())
    assert entry_source(again) == entry_source(FORWARD)


@pytest.mark.reliability(89)
def test_text_does_not_depend_on_the_hash_seed(repository: Path) -> None:
    program = (
        "from nvrtc_attn.jit.config import ForwardConfig; from nvrtc_attn.jit.codegen import entry_source;"
        "import hashlib;"
        f"print(hashlib.sha256(entry_source(ForwardConfig(kernel='k', **{COMMON!r})).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=repository,
            env={"PYTHONHASHSEED": str(seed)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in range(1, 6)
    }
    assert len(digests) == 1


def test_configs_hold_no_run_time_field() -> None:
    # Head dims are compile-time tiles and run-time sizes; softcap and deterministic appear as switches only.
    run_time = {name for struct in (ForwardParams, BackwardParams) for name, *_ in struct._fields_}
    compile_time = {f.name for c in map(type, CONFIGS) for f in dataclasses.fields(c)}
    compile_time |= {f.name for f in dataclasses.fields(Features)}
    for name in (run_time & compile_time) - {"head_dim", "head_dim_v"}:
        value = next(getattr(c, name) for c in (*CONFIGS, FORWARD.features) if hasattr(c, name))
        assert value is None or isinstance(value, bool | str), f"{name} is a run-time value in a config"


@pytest.mark.reliability(90)
@pytest.mark.parametrize(
    ("field", "value", "request_"),
    [
        ("softmax_scale", 0.25, {}), ("softcap", 7.5, {"softcap": True}), ("dropout_p", 0.75, {"dropout": True}),
        ("window_right", 3, {"causal": True}), ("bottom_right", False, {"causal": True}),
    ],
)  # fmt: skip
def test_run_time_values_of_a_problem_do_not_change_the_text(field: str, value: Any, request_: dict[str, bool]) -> None:
    # One query sees every key: a mask would change what it needs.
    lengths = ((4096, 4096), (1024, 1024))
    request = precompile.Request(arch="sm_90", head_dim=64, dtype="bfloat16", seqlens=lengths, **request_)
    for problem in precompile.problems(request):
        texts = []
        for changed in (problem, dataclasses.replace(problem, **{field: value})):
            assert getattr(changed, field) == value or changed is problem
            target = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448, "backend": "portable"}
            launches = choose_forward(changed, **target).launches + choose_backward(changed, **target).launches
            texts.append([entry_source(launch.config) for launch in launches])
        assert texts[0] == texts[1]


def test_names_follow_the_field() -> None:
    text = entry_source(dataclasses.replace(BACKWARD, features=Features(bias="bfloat16", seqused_k=True)))
    for line in (
        "using Element = nvrtc_attn::half_t;",
        "using Bias = nvrtc_attn::bfloat16_t;",
        "using DBias = float;",
        "static constexpr bool kHasBias = true;",
        "static constexpr bool kHasDBias = false;",
        "static constexpr bool kSequsedK = true;",
        "static constexpr bool kDqAtomic = true;",
        "static constexpr bool kDbiasStore = false;",
        "static constexpr int kHeadDimV = 64;",
        "static constexpr int kBlockM = 128;",
        "static constexpr int kNumThreads = 128;",
        "static constexpr int kMinBlocksPerSm = 1;",
        "static constexpr int kWarpsMSdP = 4;",
        "static constexpr int kWarpsNdKV = 4;",
        "static constexpr int kWarpsMdQ = 4;",
        "static constexpr int kNumStagesDout = 1;",
        "#include <nvrtc_attn/kernel/backward_portable.cuh>",
        f"{ENTRY_NAME}(__grid_constant__ nvrtc_attn::BackwardParams const params) {{",
        "nvrtc_attn::backward_portable<Traits>(params);",
    ):
        assert line in text, line


def test_a_field_without_a_spelling_is_refused() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Extended(ForwardConfig):
        scale: float = 1.0

    with pytest.raises(TypeError, match=r"scale=1\.0.*no C\+\+ spelling for float"):
        entry_source(Extended(kernel="k", **COMMON))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "../evil"}, "lower-case C"),
        ({"kernel": 'x"\n'}, "lower-case C"),
        ({"arch": "compute_80"}, "expected sm_<number>"),
        ({"dq": "maybe"}, "accepted are atomic and none"),
    ],
)
def test_values_that_are_no_names_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entry_source(dataclasses.replace(BACKWARD, **change))


# -- what NVRTC makes of it ------------------------------------------------------------------------------------------

KERNEL = (
    "template <class Traits, class Params> void {kernel}(Params const& params) {{ *(float*)params.q = params.scale; }}"
)


def compilable(config: KernelConfig) -> str:
    """The entry text with a trivial kernel in the place of the kernel's header."""
    body = f"#include <nvrtc_attn/params.cuh>\nnamespace nvrtc_attn {{ {KERNEL.format(kernel=config.kernel)} }}"
    return entry_source(config).replace(f"#include <nvrtc_attn/kernel/{config.kernel}.cuh>", body)


@pytest.fixture(autouse=True)
def _may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVRTC_ATTN_ASSERT_CACHED", raising=False)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kernel)
def test_struct_layouts_agree_with_the_ctypes_mirror(config: KernelConfig) -> None:
    assert compile_source(compilable(config), config.arch).num_regs


@pytest.mark.parametrize("struct", [ForwardParams, BackwardParams])
def test_a_moved_field_does_not_compile(struct: type[ctypes.Structure], monkeypatch: pytest.MonkeyPatch) -> None:
    fields = list(struct._fields_)
    first = next(i for i, f in enumerate(fields) if f[0] == "window_left")
    fields[first], fields[first + 1] = fields[first + 1], fields[first]
    moved = type(struct.__name__, (ctypes.Structure,), {"_fields_": fields})
    config = FORWARD if struct is ForwardParams else BACKWARD
    monkeypatch.setattr(codegen, "base_params_class", lambda config: moved)
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_source(compilable(config), config.arch)


@pytest.mark.parametrize(("arch", "other"), [("sm_80", "sm_86"), ("sm_90a", "sm_90")])
def test_the_text_compiles_for_its_own_architecture_only(arch: str, other: str) -> None:
    config = dataclasses.replace(FORWARD, arch=arch)
    assert compile_source(compilable(config), arch).code
    with pytest.raises(CompileError, match=f"this file is for {arch}"):
        compile_source(compilable(config), other)
