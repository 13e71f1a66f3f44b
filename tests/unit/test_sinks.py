"""Attention sinks on the CPU and at every door: what one means, its gradient, and what is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dlpack_producer import BOGUS_POINTER, Producer
from fake_driver import FakeDriver, launching

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.jit.params import BackwardParams, ForwardParams, HopperForwardParams, params_behind
from nvrtc_attn.plans import plan

Array = Any
BFLOAT16, FLOAT32 = (4, 16), (2, 32)


def tensors(rows: int = 9, keys: int = 11, heads: int = 4, heads_kv: int = 2) -> list[Array]:
    rng = np.random.default_rng(3)
    shapes = (rows, heads), (keys, heads_kv), (keys, heads_kv)
    return [rng.standard_normal((2, n, h, 16), np.float32) for n, h in shapes]


def gradients(dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, sink: Array, **options: Any) -> Any:
    """dq, dk, dv, dsink of poisoned outputs."""
    results = [np.full_like(x, np.nan) for x in (q, k, v, sink)]
    *tensors_, dsink = results
    nvrtc_attn.attention_backward(dout, q, k, v, out, lse, *tensors_, sink=sink, dsink=dsink, **options)
    return results


def test_a_sink_is_one_more_key_without_a_value() -> None:
    """Its logit comes as the bias of a key of zeros, whose value is zero: the same output, lse and gradients."""
    q, k, v = tensors()
    sink = np.array([0.5, -1.0, 3.0, -20.0], np.float32)
    zeros = np.zeros((2, 1, 2, 16), np.float32)
    longer_k, longer_v = (np.concatenate([x, zeros], 1) for x in (k, v))
    bias = np.zeros((1, 4, 1, 12), np.float32)
    bias[0, :, 0, -1] = sink
    out, lse = nvrtc_attn.attention(q, k, v, sink=sink, return_lse=True)
    expected, expected_lse = nvrtc_attn.attention(q, longer_k, longer_v, bias=bias, return_lse=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)
    dout, dlse = np.cos(out), np.sin(lse)
    found = gradients(dout, q, k, v, out, lse, sink, dlse=dlse)
    wanted = [np.empty_like(x) for x in (q, longer_k, longer_v, bias)]
    *tensors_, dbias = wanted
    nvrtc_attn.attention_backward(
        dout, q, longer_k, longer_v, expected, expected_lse, *tensors_, bias=bias, dbias=dbias, dlse=dlse
    )
    for gradient, want in zip(found[:3], (wanted[0], wanted[1][:, :-1], wanted[2][:, :-1]), strict=True):
        np.testing.assert_allclose(gradient, want, atol=5e-6)
    np.testing.assert_allclose(found[3], dbias[0, :, 0, -1], atol=2e-5)


@pytest.mark.reliability(15)
def test_rows_without_a_key_have_the_lse_of_the_sink() -> None:
    q, k, v = tensors(rows=11, keys=5)
    sink = np.array([0.5, -1.0, 3.0, -np.inf], np.float32)
    out, lse = nvrtc_attn.attention(q, k, v, causal=True, sink=sink, return_lse=True)
    assert not out[:, :6].any()
    np.testing.assert_array_equal(lse[:, :, :6], np.broadcast_to(sink[:, None], (2, 4, 6)))
    dlse = np.zeros_like(lse)
    dlse[:, :, :6] = 1.0
    dq, dk, dv, dsink = gradients(np.zeros_like(out), q, k, v, out, lse, sink, causal=True, dlse=dlse)
    assert not any(x.any() for x in (dq, dk, dv))
    np.testing.assert_allclose(dsink, [12, 12, 12, 0])  # the lse of such a row is the sink


def test_no_sink_and_one_that_takes_everything() -> None:
    q, k, v = tensors()
    without = nvrtc_attn.attention(q, k, v, return_lse=True)
    none = np.full(4, -np.inf, np.float32)
    for found, expected in zip(nvrtc_attn.attention(q, k, v, sink=none, return_lse=True), without, strict=True):
        np.testing.assert_array_equal(found, expected)
    for large in (90.0, 3e38, np.inf):
        sink = np.full(4, large, np.float32)
        out, lse = nvrtc_attn.attention(q, k, v, sink=sink, return_lse=True)
        assert np.abs(out).max() < 1e-30
        np.testing.assert_array_equal(lse, np.broadcast_to(sink[:, None], lse.shape))
        assert all(np.isfinite(x).all() for x in gradients(np.ones_like(out), q, k, v, out, lse, sink))
    sink = np.array([0.0, np.nan, 0.0, 0.0], np.float32)
    out, lse = nvrtc_attn.attention(q, k, v, sink=sink, return_lse=True)
    assert np.isnan(out[:, :, 1]).all()
    assert np.isnan(lse[:, 1]).all()
    assert np.isfinite(np.delete(out, 1, 2)).all()


def test_refusals() -> None:
    q, k, v = tensors()
    sink = np.zeros(4, np.float32)
    for wrong, message in (
        (sink[:2], r"sink: shape \(2,\). Needed is \[num_heads\] = \[4\]"), (sink[None], "sink: .*rank 2"),
        (sink.astype(np.float64), "sink: dtype float64.*Accepted: float32"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            nvrtc_attn.attention(q, k, v, sink=wrong)
    half = [x.astype(np.float16) for x in (q, k, v)]
    for accepted in (sink, sink.astype(np.float16)):
        assert nvrtc_attn.attention(*half, sink=accepted).dtype == np.float16
    out, lse = nvrtc_attn.attention(q, k, v, sink=sink, return_lse=True)
    grads = [np.empty_like(x) for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"dsink: .*sink is None"):
        nvrtc_attn.attention_backward(out, q, k, v, out, lse, *grads, dsink=np.empty_like(sink))
    with pytest.raises(ValueError, match="dsink: dtype float16"):
        nvrtc_attn.attention_backward(out, q, k, v, out, lse, *grads, sink=sink, dsink=np.empty(4, np.float16))
    with pytest.raises(ValueError, match="dsink: shares memory with sink"):
        nvrtc_attn.attention_backward(out, q, k, v, out, lse, *grads, sink=sink, dsink=sink)


# ---------------------------------------------------------------------------------------------------------------------
# Launches, on a driver written in Python


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    with launching(monkeypatch, tmp_path / "kernels") as driver_in_python:
        yield driver_in_python


def launched(fake: FakeDriver) -> dict[str, int]:
    """Kernel -> address of the params of its launch."""
    names = {id(kernel.function): config.kernel for (config, _), kernel in plan._kernels.items()}
    return {names[id(launch[1])]: ctypes.c_void_p.from_address(launch[10]).value or 0 for launch in fake.launches}


def of(struct: Any, address: int) -> Any:
    return struct.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(struct)))


@pytest.mark.parametrize(
    ("backend", "rows", "struct", "reader"),
    [
        ("hopper", 512, HopperForwardParams, "forward_hopper"),
        ("portable", 512, ForwardParams, "forward_portable"),
        ("portable", 1, ForwardParams, "combine"),
    ],
)
@pytest.mark.parametrize("kind", [FLOAT32, BFLOAT16])
def test_addresses_strides_and_types_reach_the_kernels_that_read_them(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, backend: str, rows: int, struct: Any, reader: str, kind: Any
) -> None:
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", backend)
    if reader == "combine":
        monkeypatch.setattr("nvrtc_attn.runtime.device.has_clusters", lambda _: False)
    keys = 512 if rows > 1 else 16384

    def tensor(place: int, *shape: int, dtype: Any = BFLOAT16, **more: Any) -> Producer:
        return Producer(shape, dtype=dtype, data=BOGUS_POINTER + (place << 28), **more)

    q, out, dout, dq = (tensor(i, 1, rows, 4, 64) for i in range(4))
    k, v, dk, dv = (tensor(i, 1, keys, 2, 64) for i in range(4, 8))
    lse = tensor(8, 1, 4, rows, dtype=FLOAT32)
    sink, dsink = (tensor(i, 4, dtype=kind, strides=(stride,)) for i, stride in ((9, 3), (10, 2)))
    workspace = Producer((1 << 30,), dtype=(1, 8), data=BOGUS_POINTER + (11 << 28))
    api.attention_forward(q, k, v, out, lse=lse, sink=sink, workspace=workspace)
    params = of(params_behind(struct, further=True), launched(fake)[reader])
    found = (params.sink, params.sink_stride_h, params.sink_float32, params.q)
    assert found == (BOGUS_POINTER + (9 << 28), 3, int(kind == FLOAT32), BOGUS_POINTER)
    assert len(fake.launches) == (2 if reader == "combine" else 1)
    if rows == 1:
        return
    fake.launches.clear()
    api.attention_backward(dout, q, k, v, out, lse, dq, dk, dv, sink=sink, dsink=dsink, workspace=workspace)
    assert list(launched(fake))[-1] == "sink_gradient"
    further = params_behind(BackwardParams, further=True)
    params = of(further, launched(fake)["sink_gradient"])
    assert (params.sink, params.dsink) == tuple(BOGUS_POINTER + (i << 28) for i in (9, 10))
    assert (params.sink_stride_h, params.dsink_stride_h, params.sink_float32) == (3, 2, int(kind == FLOAT32))
    others = {name: of(further, at) for name, at in launched(fake).items()}
    main = others["backward_hopper" if backend == "hopper" else "backward_portable"]
    assert (main.delta, main.row_lse, main.delta_stride_h) == (params.delta, params.row_lse, params.delta_stride_h)


# ---------------------------------------------------------------------------------------------------------------------
# The frameworks


def _textbook(torch: Any, q: Any, k: Any, v: Any, sink: Any) -> Any:
    """(out, lse) of a causal problem with the sink as one more column of the scores."""
    rows, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    hidden = torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows
    scores = scores.masked_fill(hidden, float("-inf"))
    column = sink[None, :, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, column], -1)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., :-1], v), scores.logsumexp(-1)


@pytest.mark.parametrize("how", ["eager", "compiled", "func"])
def test_torch_differentiates(how: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import nvrtc_attn.torch as adapter

    given = [torch.from_numpy(x).requires_grad_() for x in (*tensors(), np.float32([0.5, -1.0, 3.0, -20.0]))]

    def loss(attention: Any, *inputs: Any) -> Any:
        out, lse = attention(*inputs)
        return (out * out.detach().cos()).sum() + (lse * lse.detach().sin()).sum()

    def ours(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return adapter.attention(q, k, v, sink=sink, causal=True, return_lse=True)

    expected = torch.autograd.grad(loss(lambda *x: _textbook(torch, *x), *given), given)
    if how == "func":
        found = torch.func.grad(lambda *x: loss(ours, *x), argnums=(0, 1, 2, 3))(*given)
    else:
        run = torch.compile(loss, fullgraph=True, backend="aot_eager") if how == "compiled" else loss
        found = torch.autograd.grad(run(ours, *given), given)
    for gradient, want in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, want, atol=2e-5, rtol=1e-5)


def test_torch_gives_only_the_gradients_that_are_wanted() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import nvrtc_attn.torch as adapter

    q, k, v = map(torch.from_numpy, tensors())
    sink = torch.zeros(4, requires_grad=True)
    (alone,) = torch.autograd.grad(adapter.attention(q, k, v, sink=sink).square().sum(), sink)
    assert float(alone.abs().min()) > 0
    q.requires_grad_()
    (other,) = torch.autograd.grad(adapter.attention(q, k, v, sink=sink.detach()).square().sum(), q)
    (same,) = torch.autograd.grad(adapter.attention(q, k, v, sink=sink).square().sum(), q)
    assert torch.equal(other, same)
    half = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    low = [x.detach().bfloat16() for x in (q, k, v)]
    (gradient,) = torch.autograd.grad(adapter.attention(*low, sink=half).float().sum(), half)
    assert gradient.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):  # a sink of another type is cast as q is, one of float32 is not
        assert adapter.attention(*low, sink=half).dtype == torch.float16
        assert adapter.attention(*low, sink=sink).dtype == torch.float16
    with pytest.raises(TypeError, match="sink: got"):
        adapter.attention(q, k, v, sink=[0.0] * 4)


def test_torch_vmap() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import nvrtc_attn.torch as adapter

    q, k, v = (torch.from_numpy(x)[:, None] for x in tensors())
    sinks = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))

    def one(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return adapter.attention(q, k, v, sink=sink, causal=True)

    shared = torch.func.vmap(one, in_dims=(0, 0, 0, None))(q, k, v, sinks[0])
    each = torch.func.vmap(one)(q, k, v, sinks)
    by_sample = torch.func.vmap(torch.func.grad(lambda *x: one(*x).square().sum(), argnums=3), (0, 0, 0, None))
    found = by_sample(q, k, v, sinks[0])
    for i in range(2):
        torch.testing.assert_close(shared[i], one(q[i], k[i], v[i], sinks[0]))
        torch.testing.assert_close(each[i], one(q[i], k[i], v[i], sinks[i]))
        leaf = sinks[0].clone().requires_grad_()
        torch.testing.assert_close(found[i], torch.autograd.grad(one(q[i], k[i], v[i], leaf).square().sum(), leaf)[0])


def test_jax_differentiates_and_maps() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    import nvrtc_attn.jax as adapter

    q, k, v = map(jax.numpy.asarray, tensors())
    sink = jax.numpy.asarray([0.5, -1.0, 3.0, -20.0])

    def ours(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return adapter.attention(q, k, v, sink=sink, causal=True)

    def textbook(q: Any, k: Any, v: Any, sink: Any) -> Any:
        jnp = jax.numpy
        k, v = (jnp.repeat(x, 2, 2) for x in (k, v))
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) * 0.25
        scores = jnp.where(jnp.arange(11) > jnp.arange(9)[:, None] + 2, -jnp.inf, scores)
        column = jnp.broadcast_to(sink[None, :, None, None], (*scores.shape[:3], 1))
        p = jax.nn.softmax(jnp.concatenate([scores, column], -1), -1)[..., :-1]
        return jnp.einsum("bhij,bjhd->bihd", p, v)

    def gradient(attention: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: (attention(*x) ** 2).sum(), argnums=(0, 1, 2, 3)))(q, k, v, sink)

    for found, expected in zip(gradient(ours), gradient(textbook), strict=True):
        np.testing.assert_allclose(found, expected, atol=3e-5)
    several = jax.numpy.stack([q, 2 * q])
    for index in range(2):
        alone = ours(several[index], k, v, sink)
        shared = jax.vmap(ours, (0, None, None, None))(several, k, v, sink)[index]
        mapped = jax.vmap(ours, (0, None, None, 0))(several, k, v, jax.numpy.stack([sink, sink + 1]))[index]
        np.testing.assert_allclose(shared, alone, atol=1e-6)
        np.testing.assert_allclose(mapped, ours(several[index], k, v, sink + index), atol=1e-6)
