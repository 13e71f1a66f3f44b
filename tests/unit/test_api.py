"""The public functions on host memory: outputs, refusals, and agreement with the reference."""

from __future__ import annotations

import inspect
from typing import Any

import cases
import numpy as np
import pytest

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.cpu.attention import reference

Array = cases.Array


def tensors(
    seed: int = 0, m: int = 13, n: int = 21, h: int = 4, hkv: int = 2, d: int = 8
) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, *shape), np.float32) for shape in ((m, h, d), (n, hkv, d), (n, hkv, d)))
    return q, k, v


@pytest.mark.reliability(1)
def test_numpy_arrays_are_computed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA call: the driver wrapper may not even be asked for its module."""
    from nvrtc_attn.runtime import driver

    monkeypatch.setattr(driver, "api", lambda: pytest.fail("the driver was asked for"))
    q, k, v = tensors()
    out, lse = nvrtc_attn.attention(q, k, v, causal=True, softcap=3.0, return_lse=True)
    expected, expected_lse = reference.attention_forward(q, k, v, causal=True, softcap=3.0)
    assert isinstance(out, np.ndarray)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize("case", [c for c in cases.named_cases() if c.flops < 30e6 and c.dtype != "bfloat16"], ids=str)
def test_given_outputs_are_written_whole(case: cases.Case) -> None:
    """Forward and backward into poisoned outputs, against the float64 textbook."""
    if case.varlen and (case.bias or case.mask):
        pytest.skip("refused")
    arrays = cases.make_arrays(case)
    inputs = {
        name: x.astype(case.dtype)
        if name in ("q", "k", "v", "dout")
        or (name == "bias" and case.bias_dtype == "same")
        or (name == "sink" and case.sink == "same")
        else x
        for name, x in arrays.items()
    }
    shape = cases.shapes(case)
    options: dict[str, Any] = {**cases.call_options(case), "rng": (case.seed, case.offset)}
    names = ("bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "sink")
    options |= {name: inputs[name] for name in names if name in inputs}
    q, k, v = (inputs[name] for name in "qkv")

    def poisoned(name: str, dtype: Any) -> Array:
        where = cases.placement(name, shape[name], "padded_rows")
        return cases.place(np.full(shape[name], np.nan, dtype), where)

    out, lse = poisoned("out", case.dtype), poisoned("lse", np.float32)
    nvrtc_attn.attention_forward(q, k, v, out, lse=lse, **options)
    grads = {name: poisoned(name, case.dtype) for name in ("dq", "dk", "dv")}
    if "bias" in inputs:
        grads["dbias"] = poisoned("dbias", inputs["bias"].dtype)
    if "sink" in inputs:
        grads["dsink"] = poisoned("dsink", inputs["sink"].dtype)
    nvrtc_attn.attention_backward(
        inputs["dout"], q, k, v, out, lse, grads["dq"], grads["dk"], grads["dv"], dbias=grads.get("dbias"),
        dsink=grads.get("dsink"), dlse=inputs.get("dlse"), deterministic=case.deterministic, **options,
    )  # fmt: skip
    exact = cases.attention_dense(case, cases.cast_inputs(case, arrays))
    low = cases.attention_low_precision(case, cases.cast_inputs(case, arrays, np.float32))
    for name, value in {"out": out, "lse": lse, **grads}.items():
        finite = np.isfinite(exact[name])
        np.testing.assert_array_equal(value[~finite], exact[name][~finite])
        error = np.abs(value[finite].astype(np.float64) - exact[name][finite]).max(initial=0.0)
        allowance = cases.summed_rows_error(case, arrays, exact) if name == "dsink" else 1e-5
        assert error <= cases.error_bound(exact[name], low[name], case.dtype) + allowance, name


@pytest.mark.reliability(29)
@pytest.mark.parametrize("function", [api.attention, api.attention_forward, api.attention_backward])
def test_unknown_keyword_is_refused_at_the_call(function: Any) -> None:
    outputs = {api.attention: 0, api.attention_forward: 1, api.attention_backward: 6}[function]
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'is_causal'"):
        function(*tensors(), *[None] * outputs, is_causal=True)


@pytest.mark.reliability(24)
def test_outputs_that_cannot_be_written_are_refused() -> None:
    q, k, v = tensors(hkv=4, m=21)
    before = [x.copy() for x in (q, k, v)]
    readonly = np.empty_like(q)
    readonly.flags.writeable = False
    for out, message in (
        (readonly, "out: .*read-only"),
        (q, "out: shares memory with q"),
        (v[:, ::-1][:, ::-1], "out: shares memory with v"),
        (np.empty_like(q, np.float64), "out: dtype float64"),
        (np.empty((2, 21, 4, 9), np.float32), "out: shape"),
        (np.broadcast_to(np.empty((1, 1, 1, 1), np.float32), q.shape), "out: "),
    ):
        with pytest.raises(ValueError, match=message):
            nvrtc_attn.attention(q, k, v, out=out)
    for x, old in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(x, old)


def test_gradients_may_be_slices_of_one_buffer_but_not_overlap() -> None:
    q, k, v = tensors(hkv=4, m=21)
    out, lse = nvrtc_attn.attention(q, k, v, return_lse=True)
    dout = np.ones_like(out)
    packed = np.full((2, 21, 3, 4, 8), np.nan, np.float32)
    nvrtc_attn.attention_backward(dout, q, k, v, out, lse, packed[:, :, 0], packed[:, :, 1], packed[:, :, 2])
    expected = reference.attention_backward(dout, q, k, v, out, lse)
    for index in range(3):
        np.testing.assert_array_equal(packed[:, :, index], expected[index])
    with pytest.raises(ValueError, match="dk: shares memory with dq"):
        nvrtc_attn.attention_backward(dout, q, k, v, out, lse, packed[:, :, 0], packed[:, :, 0], packed[:, :, 2])


def test_backward_refuses_what_the_forward_did_not_return() -> None:
    q, k, v = tensors(hkv=4, m=21)
    out, lse = nvrtc_attn.attention(q, k, v, return_lse=True)
    grads = [np.empty_like(q) for _ in range(3)]
    with pytest.raises(ValueError, match="lse: shape"):
        nvrtc_attn.attention_backward(out, q, k, v, out, lse[:, :1], *grads)
    with pytest.raises(ValueError, match="rng: None"):
        nvrtc_attn.attention_backward(out, q, k, v, out, lse, *grads, dropout_p=0.5)
    with pytest.raises(ValueError, match="bias is None"):
        nvrtc_attn.attention_backward(out, q, k, v, out, lse, *grads, dbias=np.empty((1, 1, 1, 1), np.float32))


@pytest.mark.reliability(19)
def test_rng_forms() -> None:
    q, k, v = tensors()
    options: dict[str, Any] = {"dropout_p": 0.5}
    expected = nvrtc_attn.attention(q, k, v, rng=(7, 0), **options)
    np.testing.assert_array_equal(nvrtc_attn.attention(q, k, v, rng=7, **options), expected)
    words = (np.array(7, np.int64), np.array([0], np.int64))
    np.testing.assert_array_equal(nvrtc_attn.attention(q, k, v, rng=words, **options), expected)
    assert not np.array_equal(nvrtc_attn.attention(q, k, v, **options), nvrtc_attn.attention(q, k, v, **options))
    for bad in (-1, 2**64, (0, -1)):
        with pytest.raises(ValueError, match="rng"):
            nvrtc_attn.attention(q, k, v, rng=bad, **options)
    with pytest.raises(ValueError, match="rng seed"):
        nvrtc_attn.attention(q, k, v, rng=np.zeros(2, np.int64), **options)


def test_a_stream_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="stream"):
        nvrtc_attn.attention(*tensors(), stream=0)


def test_window_minus_one_is_unbounded() -> None:
    q, k, v = tensors()
    np.testing.assert_array_equal(
        nvrtc_attn.attention(q, k, v, window_size=(-1, 3)), nvrtc_attn.attention(q, k, v, window_size=(None, 3))
    )


def test_signatures_agree() -> None:
    """The three functions share names and defaults."""
    base = inspect.signature(api.attention).parameters
    for function in (api.attention_forward, api.attention_backward):
        for name, parameter in inspect.signature(function).parameters.items():
            if name in base and parameter.kind is parameter.KEYWORD_ONLY:
                assert parameter.default == base[name].default, name


def test_the_torch_adapter_has_the_same_signature() -> None:
    """Names and defaults in the same order, but outputs of its own, torch's stream and torch's word on determinism.

    Modifiers have a function of their own there, which gives their arrays gradients.
    """
    pytest.importorskip("torch", reason="torch is not installed")
    import nvrtc_attn.torch as adapter

    left_out = ("out", "lse", "stream", "score_mod", "mask_mod", "aux")

    def described(function: Any) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: (p.kind, p.default) for p in parameters if p.name not in left_out}

    adapted, base = described(adapter.attention), described(api.attention)
    assert list(adapted) == list(base)
    kind, default = adapted.pop("deterministic")
    assert (kind, default) == (base.pop("deterministic")[0], None)  # what `torch.use_deterministic_algorithms` says
    assert adapted == base


def reversed_copy(x: Array, axes: tuple[int, ...]) -> Array:
    """Equal to ``x``, with negative strides on ``axes``."""
    result = np.flip(np.ascontiguousarray(np.flip(x, axes)), axes)
    assert all(result.strides[axis] < 0 for axis in axes if x.shape[axis] > 1)
    return result


@pytest.mark.reliability(12)
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
def test_negative_strides_compute(axes: tuple[int, ...]) -> None:
    """F7: of every input and output, forward and backward, bit for bit."""
    q, k, v = tensors()
    rng = np.random.default_rng(1)
    bias, keep = rng.standard_normal((2, 4, 13, 21), np.float32), rng.random((2, 4, 13, 21)) < 0.7
    dout, dlse = rng.standard_normal((2, 13, 4, 8), np.float32), rng.standard_normal((2, 4, 13), np.float32)
    options: dict[str, Any] = {"causal": True, "softcap": 3.0}

    def both(turn: Any) -> list[Array]:
        inputs = {"bias": turn(bias), "mask": turn(keep)}
        out, lse = turn(np.full_like(q, np.nan)), np.full_like(dlse, np.nan)
        lse = lse[..., ::-1] if turn is not same else lse
        nvrtc_attn.attention_forward(turn(q), turn(k), turn(v), out, lse=lse, **inputs, **options)
        grads = [turn(np.full_like(x, np.nan)) for x in (q, k, v, bias)]
        nvrtc_attn.attention_backward(
            turn(dout), turn(q), turn(k), turn(v), out, lse, *grads[:3], dbias=grads[3], dlse=dlse, **inputs, **options
        )
        return [out, lse, *grads]

    def same(x: Array) -> Array:
        return x

    for found, expected in zip(both(lambda x: reversed_copy(x, axes)), both(same), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_array_subclasses_compute_as_plain_arrays() -> None:
    """F6."""

    class Odd(np.ndarray[Any, Any]):
        def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("asked")

        def __getitem__(self, index: Any) -> Any:
            return np.zeros(1)

    q, k, v = tensors()
    expected = nvrtc_attn.attention(q, k, v, bias=np.ones((1, 1, 1, 21), np.float32))
    odd = [x.view(Odd) for x in (q, k, v)]
    found = nvrtc_attn.attention(*odd, bias=np.ones((1, 1, 1, 21), np.float32).view(Odd))
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, expected)


@pytest.mark.reliability(14)
@pytest.mark.parametrize("packed", [False, True])
def test_no_query_heads(packed: bool) -> None:
    """F5: three key heads that nobody reads have gradients of zero."""
    q, k, v = np.zeros((1, 5, 0, 8), np.float32), np.ones((1, 7, 3, 8), np.float32), np.ones((1, 7, 3, 8), np.float32)
    options: dict[str, Any] = {"causal": True}
    if packed:
        options |= {"cu_seqlens_q": np.array([0, 2, 5], np.int32), "cu_seqlens_k": np.array([0, 3, 7], np.int32)}
        options |= {"max_seqlen_q": 3, "max_seqlen_k": 4}
    out, lse = nvrtc_attn.attention(q, k, v, return_lse=True, **options)
    assert (out.shape, lse.shape) == ((1, 5, 0, 8), (1, 0, 5))
    dq, dk, dv = np.empty_like(q), np.full_like(k, np.nan), np.full_like(v, np.nan)
    nvrtc_attn.attention_backward(out, q, k, v, out, lse, dq, dk, dv, **options)
    assert not dk.any()
    assert not dv.any()


def test_scale_and_softcap_at_the_ends_of_float32() -> None:
    """F4: the same on the CPU as in the kernels, whose scale is a float32."""
    q, k, v = tensors()
    zero = nvrtc_attn.attention(q, k, v, softmax_scale=0.0, causal=True)
    np.testing.assert_array_equal(nvrtc_attn.attention(q, k, v, softmax_scale=1e-46, causal=True), zero)
    np.testing.assert_allclose(nvrtc_attn.attention(q, k, v, softcap=1.2e-38, causal=True), zero, atol=1e-6)
