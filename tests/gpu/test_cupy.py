"""CuPy on the GPU: its arrays, current stream and allocator; gradients of the adapter against torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: its adapter is the yardstick here")
cupy = pytest.importorskip("cupy", reason="cupy is not installed")

import nvrtc_attn  # noqa: E402 - after the skips
import nvrtc_attn.cupy as adapter  # noqa: E402
import nvrtc_attn.torch  # noqa: E402

SHAPES = ((2, 300, 4, 64), (2, 333, 2, 64), (2, 333, 2, 64), (1, 4, 300, 333))


def make(dtype: str = "float16") -> tuple[list[Any], list[Any]]:
    """The same q, k, v and bias in CuPy and in torch."""
    rng = np.random.default_rng(0)
    host = [rng.standard_normal(shape, dtype=np.float32) for shape in SHAPES]
    theirs = [torch.from_numpy(x).cuda().to(getattr(torch, dtype)) for x in host]
    if dtype != "bfloat16":
        return [cupy.asarray(x.astype(dtype)) for x in host], theirs
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed: CuPy has no bfloat16 of its own")
    try:
        return [cupy.asarray(x.astype(ml_dtypes.bfloat16)) for x in host], theirs
    except (TypeError, ValueError) as error:
        pytest.skip(f"this CuPy has no bfloat16: {error}")


def numbers(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().double().cpu().numpy()
    return cupy.asnumpy(x).astype(np.float64)


def same(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(numbers(found), numbers(expected))


@pytest.mark.reliability(55)
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_numbers_are_torchs(dtype: str) -> None:
    (q, k, v, bias), theirs = make(dtype)
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    expected, expected_lse = nvrtc_attn.attention(*theirs[:3], bias=theirs[3], **options)
    for call in (nvrtc_attn.attention, adapter.attention):
        out, lse = call(q, k, v, bias=bias, **options)
        assert isinstance(out, cupy.ndarray)
        assert (out.dtype, lse.dtype) == (q.dtype, np.float32)
        same(out, expected)
        same(lse, expected_lse)


@pytest.mark.reliability(55)
@pytest.mark.parametrize("strided", [False, True])
def test_gradients_are_torchs(strided: bool) -> None:
    (q, k, v, bias), theirs = make()
    weight = np.random.default_rng(1).standard_normal(SHAPES[0], dtype=np.float32).astype(np.float16)
    options: dict[str, Any] = {"dropout_p": 0.1, "rng": (5, 6), "softcap": 20.0, "deterministic": True}
    out, lse = adapter.attention(q, k, v, bias=bias, return_lse=True, **options)
    dout, dlse = cupy.asarray(weight), cupy.full(lse.shape, 0.5, np.float32)
    if strided:
        dout = cupy.asfortranarray(dout)
    found = adapter.attention_backward(dout, q, k, v, out, lse, dlse=dlse, bias=bias, **options)
    leaves = [x.clone().requires_grad_() for x in theirs]
    results = nvrtc_attn.torch.attention(*leaves[:3], bias=leaves[3], return_lse=True, **options)
    torch.autograd.backward(results, [torch.from_numpy(weight).cuda(), torch.full_like(results[1], 0.5)])
    for mine, leaf in zip(found, leaves, strict=True):
        assert isinstance(mine, cupy.ndarray)
        same(mine, leaf.grad)
    *_, dbias = adapter.attention_backward(
        dout, q, k, v, out, lse, bias=bias, with_dbias=False, return_lse=True, return_max_logit=True, **options
    )
    assert dbias is None
    with pytest.raises(TypeError, match=r"attention_backward\(\) got an unexpected keyword argument 'dq'"):
        adapter.attention_backward(dout, q, k, v, out, lse, dq=q)


@pytest.mark.reliability(46)
def test_streams() -> None:
    (q, k, v, _), theirs = make()
    expected = nvrtc_attn.attention(*theirs[:3])
    torch.cuda.synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    for stream in (None, 0, 1, 2, side, side.ptr):
        out = nvrtc_attn.attention(q, k, v, stream=stream)
        cupy.cuda.runtime.deviceSynchronize()
        same(out, expected)
    for current in (cupy.cuda.Stream.null, cupy.cuda.Stream.ptds, side):
        with current:
            out = nvrtc_attn.attention(q, k, v)
            current.synchronize()
        same(out, expected)


def busy(stream: Any) -> None:
    """Keep ``stream`` busy for a few milliseconds."""
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        torch.cuda._sleep(20_000_000)


@pytest.mark.reliability(47)
def test_call_on_another_stream_waits_for_the_producer() -> None:
    (q, k, v, _), theirs = make()
    expected = nvrtc_attn.attention(*theirs[:3])
    producer, consumer = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    late = cupy.full_like(q, cupy.nan)
    cupy.cuda.runtime.deviceSynchronize()
    with producer:
        busy(producer)
        late[...] = q
        out = nvrtc_attn.attention(late, k, v, stream=consumer)
    consumer.synchronize()
    same(out, expected)


@pytest.mark.reliability(48)
def test_arrays_dropped_right_after_the_call() -> None:
    (q, k, v, _), theirs = make()
    expected = nvrtc_attn.attention(*theirs[:3])
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    for _ in range(10):
        copies = [x.copy() for x in (q, k, v)]
        cupy.cuda.get_current_stream().synchronize()
        busy(side)
        out = nvrtc_attn.attention(*copies, stream=side)
        del copies
        junk = [cupy.full_like(x, cupy.nan) for x in (q, k, v)]  # CuPy's pool hands out what is free on its stream
        side.synchronize()
        same(out, expected)
        del junk


def test_refuses_other_arrays() -> None:
    (q, k, _, _), theirs = make()
    with pytest.raises(TypeError, match=r"v: got torch.*nvrtc_attn\.cupy takes CuPy arrays"):
        adapter.attention(q, k, theirs[2])


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_functions_of_scores_are_torchs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured arrays of CuPy's, its functions of numbers, and the gradient of an array."""
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels of compute capability 9.0")
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", backend)
    (q, k, v, _), theirs = make()
    host = np.random.default_rng(1)
    slopes, ids = host.random(4, dtype=np.float32), np.arange(333) // 70

    def functions(xp: Any, slopes: Any, ids: Any) -> tuple[Any, Any]:
        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return xp.where(i > j, 20 * xp.tanh(s / 20), s) + slopes[h] * (j - i)

        return score_mod, lambda b, h, i, j: (ids[i] == ids[j]) | (j % 5 == 2)

    modifier = nvrtc_attn.trace(*functions(cupy, cupy.asarray(slopes), cupy.asarray(ids)))
    out, lse = adapter.attention(q, k, v, score_mod=modifier, return_lse=True)
    dout = cupy.ones_like(out)
    sums = [cupy.empty(x.shape, np.float32) if x.dtype == np.float32 else None for x in modifier.captures]
    options: dict[str, Any] = {"score_mod": modifier, "daux": sums, "deterministic": True}
    found = adapter.attention_backward(dout, q, k, v, out, lse, **options)

    trained = torch.from_numpy(slopes).cuda().requires_grad_()
    leaves = [x.clone().requires_grad_() for x in theirs[:3]]
    score_mod, mask_mod = functions(torch, trained, torch.from_numpy(ids).cuda())
    expected = nvrtc_attn.torch.attention(*leaves, score_mod=score_mod, mask_mod=mask_mod, deterministic=True)
    expected.backward(torch.ones_like(expected))
    same(out, expected)
    for mine, leaf in zip((*found[:3], next(x for x in sums if x is not None)), (*leaves, trained), strict=True):
        same(mine, leaf.grad)
