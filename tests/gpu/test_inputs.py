"""Unusual arguments on the GPU: reversed memory, no heads, numbers at the ends of float32, options of other types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dlpack_producer import Producer
from harness import backend

torch = pytest.importorskip("torch", reason="torch is not installed")

import nvrtc_attn  # noqa: E402 - after the skip
import nvrtc_attn.torch as adapter  # noqa: E402
from nvrtc_attn import api, collect_env  # noqa: E402
from nvrtc_attn.base.dtypes import DTYPES  # noqa: E402
from nvrtc_attn.front.tensors import view  # noqa: E402
from nvrtc_attn.runtime import driver  # noqa: E402
from nvrtc_attn.torch import passes  # noqa: E402

B, M, N, H, HKV, D = 2, 200, 333, 4, 2, 64
FAMILIES = [
    "portable",
    *(["hopper"] if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else []),
]


def reversed_memory(x: Any, axes: tuple[int, ...]) -> tuple[Any, Producer]:
    """A tensor that owns memory, and a view of it that is reversed on ``axes`` and reads as ``x``; torch has none."""
    storage = torch.flip(x, axes).contiguous()
    strides = [-s if i in axes else s for i, s in enumerate(storage.stride())]
    first = sum((n - 1) * s for i, (n, s) in enumerate(zip(x.shape, storage.stride(), strict=True)) if i in axes)
    name = str(x.dtype).removeprefix("torch.")
    producer = Producer(
        tuple(x.shape), strides=tuple(strides), dtype=DTYPES[name].dlpack, device=(2, x.get_device()),
        data=storage.data_ptr() + first * x.element_size(),
    )  # fmt: skip
    return storage, producer


def gradients(tensors: dict[str, Any], turn: Any, **options: Any) -> dict[str, Any]:
    """Forward and backward into outputs that ``turn`` makes of NaN, as plain tensors."""
    kept: list[Any] = []
    written: dict[str, tuple[Any, Any]] = {}

    def given(name: str, x: Any) -> Any:
        storage, argument = turn(x)
        kept.append(storage)
        if name not in tensors:
            written[name] = (storage, x)
        return argument

    inputs = {name: given(name, x) for name, x in tensors.items()}
    dout = inputs.pop("dout")
    q, k, v = (inputs.pop(name) for name in "qkv")
    like = tensors["q"]
    out = given("out", torch.full_like(like, torch.nan))
    lse = torch.full((B, H, M), torch.nan, device="cuda")
    size = api.forward_workspace_bytes(q, k, v, **inputs, **options)
    workspace = torch.empty(size + (1 << 20), dtype=torch.uint8, device="cuda")
    nvrtc_attn.attention_forward(q, k, v, out, lse=lse, workspace=workspace, **inputs, **options)
    names = ["q", "k", "v", *(["bias"] if "bias" in inputs else [])]
    grads = {f"d{name}": given(f"d{name}", torch.full_like(tensors[name], torch.nan)) for name in names}
    size = api.backward_workspace_bytes(q, k, v, dbias="bias" in inputs, **inputs, **options)
    workspace = torch.empty(size + (1 << 20), dtype=torch.uint8, device="cuda")
    nvrtc_attn.attention_backward(
        dout, q, k, v, out, lse, grads["dq"], grads["dk"], grads["dv"], dbias=grads.get("dbias"), workspace=workspace,
        **inputs, **options,
    )  # fmt: skip
    torch.cuda.synchronize()
    return {"lse": lse} | {name: storage for name, (storage, _) in written.items()}


@pytest.mark.reliability(12)
@pytest.mark.parametrize("axes", [(1,), (0, 2), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("only_bias", [False, True], ids=["all", "scores"])
def test_reversed_memory(axes: tuple[int, ...], only_bias: bool) -> None:
    """F7: every input and output with negative strides, without a copy; or bias and mask beside dense q, k, v."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = {"q": (B, M, H, D), "k": (B, N, HKV, D), "v": (B, N, HKV, D), "dout": (B, M, H, D), "bias": (B, H, M, N)}
    tensors = {n: torch.randn(s, device="cuda", generator=generator).half() for n, s in shapes.items()}
    tensors["mask"] = torch.rand((B, 1, M, N), device="cuda", generator=generator) < 0.8
    scores = [name for name in tensors if name in ("bias", "mask")]

    def turned(x: Any) -> tuple[Any, Any]:
        if only_bias and not any(x is tensors[name] for name in scores):
            return x, x
        return reversed_memory(x, axes)

    expected = gradients(tensors, lambda x: (x, x), causal=True)
    found = gradients(tensors, turned, causal=True)
    for name, x in found.items():
        value = torch.flip(x, axes) if name != "lse" and not only_bias else x
        scale = float(expected[name].float().abs().max())
        assert float((value.float() - expected[name].float()).abs().max()) <= 1e-2 * max(scale, 1.0), name


@pytest.mark.reliability(12)
def test_reversed_cupy_arrays() -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    rng = np.random.default_rng(0)
    q, k, v = (
        cupy.asarray(rng.standard_normal(s, np.float32).astype(np.float16))
        for s in ((B, M, H, D), *[(B, N, HKV, D)] * 2)
    )
    found = nvrtc_attn.attention(q[:, ::-1], k[:, :, ::-1], v[..., ::-1], causal=True)
    dense = [cupy.ascontiguousarray(x) for x in (q[:, ::-1], k[:, :, ::-1], v[..., ::-1])]
    expected = nvrtc_attn.attention(*dense, causal=True)
    np.testing.assert_allclose(cupy.asnumpy(found), cupy.asnumpy(expected), atol=4e-3)


@pytest.mark.reliability(14)
@pytest.mark.parametrize("packed", [False, True])
def test_no_query_heads(packed: bool) -> None:
    """F5: gradients of key heads that nobody reads are zeros, and are written."""
    b = 1 if packed else B
    q = torch.empty((b, M, 0, D), device="cuda", dtype=torch.float16)
    k, v = (torch.randn((b, N, 3, D), device="cuda").half() for _ in "kv")
    options: dict[str, Any] = {"causal": True}
    if packed:
        ends = {"cu_seqlens_q": [0, 50, M], "cu_seqlens_k": [0, 99, N]}
        options |= {n: torch.tensor(x, dtype=torch.int32, device="cuda") for n, x in ends.items()}
        options |= {"max_seqlen_q": M - 50, "max_seqlen_k": N - 99}
    for family in FAMILIES:
        with backend(family):
            out, lse = nvrtc_attn.attention(q, k, v, return_lse=True, **options)
            assert out.shape == q.shape
            assert lse.shape == (b, 0, M)
            dq, dk, dv = torch.empty_like(q), torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
            size = api.backward_workspace_bytes(q, k, v, **options)
            workspace = torch.empty(size + 16, dtype=torch.uint8, device="cuda")
            nvrtc_attn.attention_backward(out, q, k, v, out, lse, dq, dk, dv, workspace=workspace, **options)
            assert not bool(dk.any()), family
            assert not bool(dv.any()), family
            if packed:
                continue
            bias = torch.zeros((1, 1, M, N), device="cuda", dtype=torch.float16)
            dbias = torch.full_like(bias, torch.nan)
            size = api.backward_workspace_bytes(q, k, v, bias=bias, dbias=True, **options)
            workspace = torch.empty(size + 16, dtype=torch.uint8, device="cuda")
            nvrtc_attn.attention_backward(
                out, q, k, v, out, lse, dq, dk, dv, bias=bias, dbias=dbias, workspace=workspace, **options
            )
            assert not bool(dbias.any()), family


@pytest.mark.reliability(17)
@pytest.mark.parametrize("family", FAMILIES)
def test_scale_and_softcap_at_the_ends_of_float32(family: str) -> None:
    """F4: a mask's -inf times a scale of 0 is NaN, and so is 0 / 0."""
    q, k, v = (torch.randn((B, N, H, D), device="cuda").half() for _ in "qkv")
    with backend(family):
        zero = nvrtc_attn.attention(q, k, v, causal=True, softmax_scale=0.0)
        mean = v.float().cumsum(1) / torch.arange(1, N + 1, device="cuda")[:, None, None]
        torch.testing.assert_close(zero.float(), mean, atol=2e-3, rtol=2e-3)
        for scale in (1e-46, -1e-46, 1e-45, -1e-45, 1e-40, 1e-38):
            found = nvrtc_attn.attention(q, k, v, causal=True, softmax_scale=scale)
            torch.testing.assert_close(found, zero, atol=1e-3, rtol=1e-3, msg=f"scale {scale}")
        for cap in (1.2e-38, 1e-30):
            found = nvrtc_attn.attention(q, k, v, causal=True, softcap=cap)
            torch.testing.assert_close(found, zero, atol=1e-3, rtol=1e-3, msg=f"softcap {cap}")
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        adapter.attention(*leaves, causal=True, softmax_scale=1e-46).sum().backward()
        assert all(bool(torch.isfinite(x.grad).all()) for x in leaves)
        assert not bool(leaves[0].grad.any())


def test_equal_options_of_another_type_find_no_plan() -> None:
    """F16: after a valid call as before it."""
    q, k, v = (torch.randn((1, 128, 2, D), device="cuda").half() for _ in "qkv")
    for grad in (False, True):
        q.requires_grad_(grad)
        adapter.attention(q, k, v, causal=True, window_size=(5, 0), softcap=1.0, dropout_p=0.0)
        for wrong in (
            {"causal": 1}, {"window_size": 0}, {"window_size": ()}, {"window_size": (5.0, 0)}, {"softcap": True},
            {"softcap": [1.0]}, {"dropout_p": False}, {"return_lse": 1}, {"deterministic": 0},
        ):  # fmt: skip
            given: dict[str, Any] = {"causal": True, "window_size": (5, 0), "softcap": 1.0, **wrong}
            with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
                adapter.attention(q, k, v, **given)


def test_lengths_may_be_tensors() -> None:
    """F16: read, so that every step finds the first one's plan."""
    q, k, v = (torch.randn((1, 128, 2, D), device="cuda").half() for _ in "qkv")
    ends = torch.tensor([0, 100, 128], dtype=torch.int32, device="cuda")
    expected = adapter.attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=100, max_seqlen_k=100)
    entries = len(passes._forward_plans)
    for place in ("cpu", "cuda"):
        longest = torch.tensor(100, device=place)
        found = adapter.attention(
            q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest.clone()
        )
        assert torch.equal(found, expected)
    assert len(passes._forward_plans) == entries


def test_managed_memory_is_on_the_gpu_that_the_driver_names() -> None:
    """Producers say device 0 whatever it is, and the driver is asked.

    Which says 0 as well of what is allocated with GPU 1 current (driver 580.159): this is about GPU 0.
    """
    index = 0
    x = torch.randn((1, 128, 2, D), device="cuda:0").half()
    with driver.device_context(index):
        address = int(driver.call("cuMemAllocManaged", x.nbytes, 1, device=index))  # 1: any stream may use it
        driver.call("cuMemcpyDtoD", address, x.data_ptr(), x.nbytes, device=index)
    try:
        managed = Producer(tuple(x.shape), device=(13, 0), data=address)
        assert view(managed, "q").device == view(x, "q").device
        out = torch.full_like(x, torch.nan)
        nvrtc_attn.attention_forward(managed, managed, managed, out)
        assert torch.equal(out, nvrtc_attn.attention(x, x, x))
    finally:
        torch.cuda.synchronize()
        with driver.device_context(index):
            driver.call("cuMemFree", address, device=index)


@pytest.mark.parametrize("function", [nvrtc_attn.attention, adapter.attention], ids=["core", "torch"])
def test_lengths_on_the_gpu_are_checked_when_it_is_asked_for(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn((1, 128, 2, D), device="cuda").half()
    good, wrong = (torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in ((0, 100, 128), (0, 100, 90)))
    longest = {"max_seqlen_q": 100, "max_seqlen_k": 100}
    expected = function(q, q, q, cu_seqlens_q=good, cu_seqlens_k=good, **longest)
    monkeypatch.setenv("NVRTC_ATTN_DEBUG", "1")
    assert torch.equal(function(q, q, q, cu_seqlens_q=good, cu_seqlens_k=good, **longest), expected)
    with pytest.raises(ValueError, match="cu_seqlens_k: decreases from 100 to 90"):
        function(q, q, q, cu_seqlens_q=good, cu_seqlens_k=wrong, **longest)


def test_the_doctor_shows_the_gpus_as_torch_does() -> None:
    report = collect_env.collect()
    major, have = (int(x.split(".")[0]) for x in (torch.version.cuda, report["driver"]["cuda_version"]))
    assert have >= major
    found = [(gpu["name"], gpu["compute_capability"], gpu["num_sms"], gpu["memory_bytes"]) for gpu in report["gpus"]]
    expected = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        expected.append((p.name, f"{p.major}.{p.minor}", p.multi_processor_count, p.total_memory))
    assert found == expected
