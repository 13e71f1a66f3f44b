"""What ``warmup`` compiles is what calls look up: each is made on a driver in Python, with compiling forbidden."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden
import pytest
from click.testing import CliRunner
from dlpack_producer import Producer
from fake_driver import FakeDriver, FakeGpu, installed, instant_compiler

from nvrtc_attn import api, heuristics
from nvrtc_attn.base.architectures import ARCHITECTURES, arch_of
from nvrtc_attn.base.dtypes import DTYPES
from nvrtc_attn.commands import main
from nvrtc_attn.front.problem import AttentionProblem
from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit import config_text
from nvrtc_attn.jit.config import ForwardConfig
from nvrtc_attn.plans import plan, precompile

LENGTHS = ((1024, 1024), (300, 300), (1, 4096), (4, 4096))


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("NVRTC_ATTN_BACKEND", raising=False)
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_kernels", {})
    with instant_compiler(tmp_path / "kernels"):
        yield


def gpu_of(arch: str) -> FakeGpu:
    target = ARCHITECTURES[arch]
    sms = precompile.REFERENCE_SMS[arch_of(target.compute_capability)]
    return FakeGpu(target.compute_capability, target.smem_per_block_optin, sms)


def tensor(shape: tuple[int, ...], dtype: str) -> Producer:
    return Producer(shape, dtype=DTYPES[dtype].dlpack)


def call(request: precompile.Request, seqlen_q: int, seqlen_k: int, *, backward: bool, lse: bool) -> int:
    """What a user of the request does: make the plan of a pass, which looks up and loads every kernel of it."""
    b, h = request.batch, request.num_heads
    lead_q, lead_k = ((1, b * n) if request.varlen else (b, n) for n in (seqlen_q, seqlen_k))
    hkv, dv = request.num_heads_kv or h, request.head_dim_v or request.head_dim
    q = tensor((*lead_q, h, request.head_dim), request.dtype)
    k = tensor((*lead_k, hkv, request.head_dim), request.dtype)
    v = tensor((*lead_k, hkv, dv), request.dtype)
    options: dict[str, Any] = {"causal": request.causal}
    if request.bias or request.dbias:
        options["bias"] = tensor((1, h, seqlen_q, seqlen_k), request.dtype)
    if request.mask:
        options["mask"] = tensor((1, h, seqlen_q, seqlen_k), "bool")
    if request.sink:
        options["sink"] = tensor((h,), "float32")
    if request.softcap:
        options["softcap"] = 15.0
    if request.dropout:
        options["dropout_p"] = 0.2
    if request.varlen:
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), tensor((b + 1,), "int32"))
        options |= {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    if request.seqused_k:
        options["seqused_k"] = tensor((b,), "int32")
    if backward:
        return api.backward_workspace_bytes(
            q, k, v, dbias=request.dbias, dsink=request.sink, deterministic=request.deterministic, **options
        )
    return api.forward_workspace_bytes(q, k, v, return_lse=lse, **options)


def requests() -> list[precompile.Request]:
    plain = precompile.Request(arch="sm_90", head_dim=128, dtype="bfloat16", seqlens=LENGTHS, batch=2, causal=True)
    changes: list[dict[str, Any]] = [
        {}, {"causal": False}, {"head_dim": 64}, {"head_dim": 256}, {"head_dim": 192, "head_dim_v": 128},
        {"head_dim": 72}, {"dtype": "float32"}, {"num_heads_kv": 4}, {"num_heads_kv": 1, "batch": 1},
        {"bias": True}, {"dbias": True}, {"mask": True}, {"softcap": True}, {"dropout": True}, {"varlen": True},
        {"varlen": True, "seqused_k": True}, {"deterministic": True}, {"backward": False}, {"batch": 64},
        {"sink": True},
    ]  # fmt: skip
    archs = ("sm_75", "sm_80", "sm_86", "sm_100", "sm_120")
    others = [{"arch": arch, "causal": causal} for arch in archs for causal in (True, False)]
    return [
        dataclasses.replace(plain, **({"dtype": "float16"} if change.get("arch") == "sm_75" else {}), **change)
        for change in [*changes, *others]
    ]


def identity(request: precompile.Request) -> str:
    base = precompile.Request(arch="", head_dim=0, dtype="")
    names = [field.name for field in dataclasses.fields(request) if field.name != "seqlens"]
    return "-".join(f"{n}={getattr(request, n)}" for n in names if getattr(request, n) != getattr(base, n))


@pytest.mark.reliability(93)
@pytest.mark.parametrize("request_", requests(), ids=identity)
def test_calls_find_what_warmup_compiled(request_: precompile.Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """F15: decode under ``causal`` has no band in a call, and had one in warmup's own description of it."""
    for config in precompile.configs([request_]):
        compiler.compile_kernel(config)
    compiler._memory.clear()
    monkeypatch.setenv("NVRTC_ATTN_NO_COMPILE", "1")
    with installed(FakeDriver([gpu_of(request_.arch)])) as fake:
        for seqlen_q, seqlen_k in request_.seqlens:
            for lse in (True, False):
                call(request_, seqlen_q, seqlen_k, backward=False, lse=lse)
            if request_.backward and seqlen_q > 1:
                call(request_, seqlen_q, seqlen_k, backward=True, lse=True)
        assert fake.images  # kernels were looked up


def test_who_makes_the_decisions_of_dropout_depends_on_the_number_of_sequences() -> None:
    """Of a batch whose decisions are a launch's, also the kernel that a smaller one has."""
    request = precompile.Request(arch="sm_90", head_dim=64, dtype="bfloat16", dropout=True, causal=True, batch=16)
    request = dataclasses.replace(request, seqlens=((1024, 1024),), backward=False)
    found = precompile.configs([request])
    assert "dropout_words" in {config.kernel for config in found}
    (small,) = precompile.problems(dataclasses.replace(request, batch=1))
    spec = heuristics.choose_forward(small, arch="sm_90", num_sms=132, smem_limit=232448)
    assert [launch.config.kernel for launch in spec.launches] == ["forward_hopper"]
    assert {launch.config for launch in spec.launches} <= set(found)


def test_a_call_that_warmup_did_not_foresee_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: the same look-ups, with nothing or something else compiled."""
    request = precompile.Request(arch="sm_90", head_dim=64, dtype="float16", seqlens=LENGTHS[:1])
    for config in precompile.configs([request]):
        compiler.compile_kernel(config)
    compiler._memory.clear()
    monkeypatch.setenv("NVRTC_ATTN_NO_COMPILE", "1")
    with installed(FakeDriver([gpu_of("sm_90")])):
        call(request, 1024, 1024, backward=False, lse=True)
        with pytest.raises(RuntimeError, match="NVRTC_ATTN_NO_COMPILE"):
            call(dataclasses.replace(request, softcap=True), 1024, 1024, backward=False, lse=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 32, "num_heads_kv": 8, "batch": 1}, {"num_heads": 48, "num_heads_kv": 1, "batch": 32},
        {"num_heads": 64, "num_heads_kv": 8, "batch": 8, "head_dim": 64},
        {"num_heads": 32, "num_heads_kv": 8, "batch": 1, "causal": True},
        {"arch": "sm_80", "num_heads": 32, "num_heads_kv": 8}, {"varlen": True, "num_heads_kv": 4}, {"sink": True},
        {"mask": True, "batch": 1}, {"num_sms": 16, "num_heads_kv": 4, "batch": 1}, {"head_dim": 256, "batch": 1},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("queries", [1, 8])
def test_a_growing_cache_waits_for_no_compile(changes: dict[str, Any], queries: int) -> None:
    """Every length up to the one that was named chooses a kernel of the list, which has more than one."""
    request = precompile.Request(
        **{"arch": "sm_90", "head_dim": 128, "dtype": "bfloat16", "seqlens": ((queries, 8192),), **changes}
    )
    found = set(precompile.configs([request]))
    arch = ARCHITECTURES[request.arch]
    target = {
        "arch": arch_of(arch.compute_capability),
        "num_sms": request.num_sms or precompile.REFERENCE_SMS[arch_of(arch.compute_capability)],
        "smem_limit": arch.smem_per_block_optin,
    }
    lengths = [
        *range(queries + 1, 200),
        *range(200, 8192, 13),
        *(n + d for n in range(256, 8192, 256) for d in (-1, 0, 1)),
    ]
    chosen = set()
    for (problem,) in (precompile.problems(dataclasses.replace(request, seqlens=((queries, n),))) for n in lengths):
        spec = heuristics.choose_forward(problem, **target)
        chosen |= {launch.config for launch in spec.launches}
    assert chosen <= found, sorted(map(golden.variant, chosen - found))
    assert len(chosen) > 1
    clusters = {config.cluster for config in chosen if isinstance(config, ForwardConfig)}
    if request.num_heads_kv == 8 and request.arch == "sm_90" and request.batch == 1:
        assert max(clusters) > 1


def test_a_device_without_room_for_clusters_has_splits() -> None:
    """One refusal is enough; the results of a call come from a second kernel. A device beside it keeps its clusters."""
    request = precompile.Request(arch="sm_90", head_dim=128, dtype="bfloat16", num_heads=32, num_heads_kv=8, batch=1)
    (problem,) = precompile.problems(dataclasses.replace(request, seqlens=((1, 8192),)))
    small, large = gpu_of("sm_90"), gpu_of("sm_90")
    small.clusters = 0
    with installed(FakeDriver([small, large])) as fake:
        spec = heuristics.choose_forward(problem, arch="sm_90", num_sms=132, smem_limit=large.smem_per_block_optin)
        assert spec.main.config.cluster > 1  # type: ignore[union-attr]
        assert len(plan.forward_plan(problem, 1, 0).kernel_keys) == 1
        assert "cuOccupancyMaxActiveClusters" in fake.calls
        made = plan.forward_plan(problem, 0, 0)
        assert len(made.kernel_keys) == 2
        assert made.workspace_bytes > 0
        del fake.calls[:]
        (longer,) = precompile.problems(dataclasses.replace(request, seqlens=((1, 8000),)))
        assert len(plan.forward_plan(longer, 0, 0).kernel_keys) == 2
        assert "cuOccupancyMaxActiveClusters" not in fake.calls
        assert len(plan.forward_plan(longer, 1, 0).kernel_keys) == 1


def test_problems_are_those_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole description, not only the kernels that follow from it today."""
    seen: list[AttentionProblem] = []

    def remember(problem: AttentionProblem, *_: Any, **__: Any) -> Any:
        seen.append(problem)
        raise InterruptedError

    for module in ("api", "plans.run"):  # the question for the size of a workspace, and the call
        monkeypatch.setattr(f"nvrtc_attn.{module}.forward_plan", remember)
    for request in requests():
        if request.softcap or request.dropout:  # other values, see `call`
            continue
        for (seqlen_q, seqlen_k), problem in zip(request.seqlens, precompile.problems(request), strict=True):
            with pytest.raises(InterruptedError):
                call(request, seqlen_q, seqlen_k, backward=False, lse=request.backward)
            # What the backward pass alone says of itself.
            names = ("dbias", "dbias_layout", "dsink", "further")
            backward: dict[str, Any] = {name: getattr(problem, name) for name in names}
            assert set(seen[-1].further) <= set(problem.further)
            assert dataclasses.replace(seen.pop(), deterministic=request.deterministic, **backward) == problem


def warmup(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["warmup", "--arch", "sm_90", "--head-dim", "64", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "16", "--heads-kv", "3"], "3 heads do not divide the 16 heads"),
        (["--varlen", "--bias"], "bias: .* with cu_seqlens"),
        (["--varlen", "--mask"], "mask: .* with cu_seqlens"),
        (["--varlen", "--dbias"], "bias: .* with cu_seqlens"),
        (["--seqlen", "9999999999"], "above 2147483647"),
        (["--varlen", "--batch", "99999", "--seqlen", "99999"], "above 2147483647"),
    ],
    ids=" ".join,
)
def test_warmup_refuses_what_no_call_accepts(arguments: list[str], message: str) -> None:
    """F14."""
    code, output = warmup(*arguments)
    assert code == 1
    assert re.search(message, output.replace("\n", " ")), output
    assert "nvrtc_attn.attention refuses" in output
    assert "Traceback" not in output


GOOD: dict[str, Any] = {
    "type": "ForwardConfig", "kernel": "forward_portable", "arch": "sm_80", "dtype": "float16", "head_dim": 64,
    "head_dim_v": 64, "block_m": 64, "block_n": 64, "num_warps": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float99"}, {"dtype": 3}, {"kernel": None}, {"kernel": "../x"}, {"arch": 5}, {"arch": "x"},
        {"head_dim": "64"}, {"head_dim": [1]}, {"features": 3}, {"features": {"band": "x"}}, {"num_stages": 1.5},
        {"features": {"bias": "float99"}}, {"features": {"unknown": True}}, {"aligned": "yes"}, {"type": "Features"},
        {"type": [1]}, {"unknown": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_is_none_is_refused(change: dict[str, Any]) -> None:
    """F14: these ended in a traceback, of the command or of its worker process."""
    assert config_text.config_from_json(json.dumps(GOOD)).head_dim == 64
    with pytest.raises(ValueError, match="is not a kernel config"):
        config_text.config_from_json(json.dumps(GOOD | change))
    result = CliRunner().invoke(main, ["warmup", "--config", json.dumps(GOOD | change)])
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 1
    assert "is not a kernel config" in result.output


def test_nested_nonsense_is_no_config() -> None:
    with pytest.raises(ValueError, match="is not a kernel config"):
        config_text.config_from_json("[" * 100_000)
