"""The largest score of each head (`return_max_logit`): what it means on the CPU, and that every door gives it."""

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
from nvrtc_attn.front.call import CallOptions, describe_shapes
from nvrtc_attn.front.tensors import Device
from nvrtc_attn.jit.codegen import params_class
from nvrtc_attn.plans import plan, precompile

Array = Any
FLOAT32, BFLOAT16 = (2, 32), (4, 16)


def tensors(rows: int = 9, keys: int = 11, heads: int = 4, heads_kv: int = 2, batch: int = 2) -> list[Array]:
    rng = np.random.default_rng(7)
    shapes = (rows, heads), (keys, heads_kv), (keys, heads_kv)
    return [rng.standard_normal((batch, n, h, 16), np.float32) for n, h in shapes]


def scores(q: Array, k: Array, scale: float = 0.25) -> Array:
    """``[B, H, Mq, Mk]`` in float64."""
    wide = np.repeat(k.astype(np.float64), q.shape[2] // k.shape[2], 2)
    return np.einsum("bihd,bjhd->bhij", q.astype(np.float64), wide) * scale


def causal(s: Array) -> Array:
    rows, keys = s.shape[2:]
    return np.where(np.arange(keys) <= np.arange(rows)[:, None] + keys - rows, s, -np.inf)


BIAS = np.random.default_rng(1).standard_normal((1, 4, 9, 11)).astype(np.float32)
MASK = np.random.default_rng(2).random((2, 1, 1, 11)) < 0.3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, lambda s: s),
        ({"causal": True}, causal),
        ({"softmax_scale": -3.0}, lambda s: s * -12.0),
        ({"softcap": 0.4}, lambda s: 0.4 * np.tanh(s / 0.4)),
        ({"bias": BIAS}, lambda s: s + BIAS),
        ({"bias": BIAS, "softcap": 0.4, "causal": True}, lambda s: causal(0.4 * np.tanh(s / 0.4) + BIAS)),
        ({"mask": MASK}, lambda s: np.where(MASK, s, -np.inf)),
        ({"sink": np.full(4, 50.0, np.float32)}, lambda s: s),
        ({"dropout_p": 0.9, "rng": (1, 2)}, lambda s: s),
        ({"score_mod": lambda s, b, h, q, k: s + 2.0 * h - 3.0 * (q - k)},
         lambda s: s + 2.0 * np.arange(4)[:, None, None] - 3.0 * (np.arange(9)[:, None] - np.arange(11))),
        ({"mask_mod": lambda b, h, q, k: k > 3}, lambda s: np.where(np.arange(11) > 3, s, -np.inf)),
        ({"window_size": (0, 0), "causal": "top_left"}, lambda s: np.where(np.eye(9, 11, dtype=bool), s, -np.inf)),
    ],
)  # fmt: skip
def test_it_is_the_largest_score_that_is_kept(options: dict[str, Any], expected: Any) -> None:
    q, k, v = tensors()
    out, lse, found = nvrtc_attn.attention(q, k, v, **options, return_lse=True, return_max_logit=True)
    assert (found.shape, found.dtype) == ((2, 4), np.float32)
    np.testing.assert_allclose(found, expected(scores(q, k)).max((2, 3)), rtol=1e-5)
    plain = nvrtc_attn.attention(q, k, v, **options, return_lse=True)
    for x, y in zip((out, lse), plain, strict=True):
        np.testing.assert_array_equal(x, y)
    alone = nvrtc_attn.attention(q, k, v, **options, return_max_logit=True)
    np.testing.assert_array_equal(alone[0], out)
    np.testing.assert_array_equal(alone[1], found)
    assert len(alone) == 2


def test_heads_of_which_nothing_is_kept() -> None:
    q, k, v = tensors()
    mask = np.ones((1, 4, 1, 1), bool)
    mask[0, 2] = False
    q[1, 3, 1], k[0, 4, 0] = np.nan, np.nan
    found = nvrtc_attn.attention(q, k, v, mask=mask, return_max_logit=True)[1]
    assert (found[:, 2] == -np.inf).all()
    # NaN in a query of one head, and in a key that two heads read.
    np.testing.assert_array_equal(np.isnan(found), [[True, True, False, False], [False, True, False, False]])
    hidden = np.ones((1, 1, 1, 11), bool)
    hidden[..., 4] = False
    assert np.isfinite(nvrtc_attn.attention(q[:1], k[:1], v[:1], mask=hidden, return_max_logit=True)[1]).all()
    for rows, keys in ((0, 5), (5, 0)):
        assert (nvrtc_attn.attention(*tensors(rows, keys), return_max_logit=True)[1] == np.full((2, 4), -np.inf)).all()


def test_packed_sequences_have_one_each() -> None:
    q, k, v = tensors(rows=20, keys=20, batch=1)
    starts = np.array([0, 7, 7, 15, 18], np.int32)
    found = nvrtc_attn.attention(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=8, max_seqlen_k=8, causal=True,
        return_max_logit=True,
    )[1]  # fmt: skip
    assert found.shape == (4, 4)
    assert (found[1] == -np.inf).all()
    for b in (0, 2, 3):
        rows = slice(starts[b], starts[b + 1])
        np.testing.assert_allclose(found[b], causal(scores(q[:, rows], k[:, rows]))[0].max((1, 2)), rtol=1e-5)


def test_a_part_has_its_own() -> None:
    q, k, v = tensors(rows=8, keys=8)
    s = causal(scores(q, k))
    for rows in (slice(0, 3), slice(3, 8)):
        part = nvrtc_attn.Part(rows=(rows.start, 8))
        found = nvrtc_attn.attention(q[:, rows], k, v, causal=True, part=part, return_max_logit=True)[1]
        np.testing.assert_allclose(found, s[:, :, rows].max((2, 3)), rtol=1e-5)


def test_into_a_given_array_and_what_is_refused() -> None:
    q, k, v = tensors()
    out, largest = np.empty_like(q), np.full((2, 4), np.nan, np.float32)
    nvrtc_attn.attention_forward(q, k, v, out, max_logit=largest)
    np.testing.assert_allclose(largest, scores(q, k).max((2, 3)), rtol=1e-5)
    assert nvrtc_attn.forward_workspace_bytes(q, k, v, max_logit=largest) == 0
    for b, h in ((0, 4), (2, 0)):  # nothing to write: NumPy says that the strides are 0
        rows = np.empty((b, 8, h, 16), np.float32)
        nvrtc_attn.attention_forward(rows, rows, rows, np.empty_like(rows), max_logit=np.empty((b, h), np.float32))
    for wrong, message in (
        (largest[:, :2], r"max_logit: shape \(2, 2\), needed is \(2, 4\)"),
        (largest.astype(np.float64), "max_logit: dtype float64, needed is float32"),
        (np.empty((4, 2), np.float32).T, r"max_logit: strides .* leave gaps, it must be row-major"),
        (q.reshape(-1)[:8].reshape(2, 4), "max_logit: shares memory with q"),
    ):
        with pytest.raises(ValueError, match=message):
            nvrtc_attn.attention_forward(q, k, v, out, max_logit=wrong)
    with pytest.raises(TypeError, match=r"return_max_logit: got 1 of type int\. It is True or False"):
        nvrtc_attn.attention(q, k, v, return_max_logit=1)


# ---------------------------------------------------------------------------------------------------------------------
# Launches, on a driver written in Python


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    with launching(monkeypatch, tmp_path / "kernels") as driver_in_python:
        yield driver_in_python


@pytest.mark.parametrize(
    ("backend", "rows", "sink", "dropout"),
    [("hopper", 512, False, 0.0), ("hopper", 512, True, 0.5), ("portable", 512, True, 0.0), ("portable", 1, True, 0.5)],
)
def test_its_address_reaches_the_kernels_that_compute_scores(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, backend: str, rows: int, sink: bool, dropout: float
) -> None:
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", backend)
    filled: list[tuple[Any, ...]] = []
    monkeypatch.setattr(fake, "cuMemsetD32Async", lambda *given: filled.append(given) or (0,), raising=False)
    keys = 512 if rows > 1 else 16384

    def tensor(place: int, *shape: int, dtype: Any = BFLOAT16) -> Producer:
        return Producer(shape, dtype=dtype, data=BOGUS_POINTER + (place << 28))

    q, out = (tensor(i, 1, rows, 4, 64) for i in range(2))
    k, v = (tensor(i, 1, keys, 2, 64) for i in (2, 3))
    optional: dict[str, Any] = {"sink": tensor(5, 4, dtype=FLOAT32)} if sink else {}
    if dropout:
        optional |= {"dropout_p": dropout, "rng": (1, 2)}
    workspace = Producer((1 << 30,), dtype=(1, 8), data=BOGUS_POINTER + (11 << 28))
    max_logit = tensor(4, 1, 4, dtype=FLOAT32)
    api.attention_forward(q, k, v, out, max_logit=max_logit, workspace=workspace, **optional)
    address = BOGUS_POINTER + (4 << 28)
    assert [tuple(map(int, x[:3])) for x in filled] == [(address, 0xFF800000, 4)]
    configs = {id(kernel.function): config for (config, _), kernel in plan._kernels.items()}
    read = []
    for launch in fake.launches:
        config = configs[id(launch[1])]
        if config.features.max_logit:
            struct = params_class(config)
            values = struct.from_buffer_copy(
                ctypes.string_at(ctypes.c_void_p.from_address(launch[10]).value or 0, ctypes.sizeof(struct))
            )
            assert (values.max_logit, values.q) == (address, BOGUS_POINTER)
            if hasattr(values, "sink"):
                assert values.sink == BOGUS_POINTER + (5 << 28)
            read.append(config.kernel)
    assert read == [f"forward_{backend}"]
    fake.launches.clear()
    filled.clear()
    api.attention_forward(q, k, v, out, workspace=workspace, **optional)
    assert not filled
    assert not any(configs_now(launch).features.max_logit for launch in fake.launches)


def configs_now(launch: Any) -> Any:
    return {id(kernel.function): config for (config, _), kernel in plan._kernels.items()}[id(launch[1])]


def test_a_problem_without_queries_is_filled(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[tuple[Any, ...]] = []
    monkeypatch.setattr(fake, "cuMemsetD32Async", lambda *given: filled.append(given) or (0,), raising=False)
    q, out = (Producer((2, 0, 4, 64), dtype=BFLOAT16, data=0) for _ in range(2))
    k, v = (Producer((2, 64, 4, 64), dtype=BFLOAT16, data=BOGUS_POINTER + (i << 28)) for i in (1, 2))
    max_logit = Producer((2, 4), dtype=FLOAT32, data=BOGUS_POINTER)
    api.attention_forward(q, k, v, out, max_logit=max_logit)
    assert [int(x[2]) for x in filled] == [8]
    assert not fake.launches


def test_the_backward_pass_and_the_choice_of_a_measurement_know_nothing_of_it() -> None:
    shapes = dict.fromkeys("qkv", ((4, 2048, 16, 64), "bfloat16"))
    where = Device("cuda", 0)
    problems = [
        describe_shapes(shapes, CallOptions(return_lse=True, return_max_logit=wanted), where).with_dense()
        for wanted in (False, True)
    ]
    target = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
    plain, asked = (nvrtc_attn.heuristics.choose_backward(x, **target) for x in problems)
    assert plain == asked
    assert plan.autotune._essence(problems[0], False) == plan.autotune._essence(problems[1], False)


def test_warm_up_compiles_it() -> None:
    request = precompile.Request(arch="sm_90", head_dim=64, dtype="bfloat16", max_logit=True, backward=False)
    for problem in precompile.problems(request):
        assert problem.return_max_logit


# ---------------------------------------------------------------------------------------------------------------------
# The frameworks


@pytest.mark.parametrize("how", ["eager", "compiled", "func", "vmap", "heads_first"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_torch(how: str, with_lse: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import nvrtc_attn.torch as adapter

    arrays = tensors()
    expected = scores(*arrays[:2]).max((2, 3))
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in arrays)
    attention = adapter.attention
    if how == "compiled":
        attention = torch.compile(adapter.attention, fullgraph=True, backend="aot_eager")
    wanted = {"return_lse": with_lse, "return_max_logit": True}
    if how == "vmap":
        found = torch.vmap(lambda *x: adapter.attention(*x, **wanted))(*(x[:, None] for x in (q, k, v)))
        found = tuple(x[:, 0] for x in found)
    elif how == "func":

        def loss(q: Any) -> Any:
            out, *rest = adapter.attention(q, k, v, **wanted)
            return out.sum() + sum(x.sum() for x in rest), (out, *rest)

        gradient, found = torch.func.grad(loss, has_aux=True)(q)
    else:
        found = attention(q, k, v, **wanted)
    out, *lse, max_logit = found
    np.testing.assert_allclose(max_logit.detach().numpy(), expected, rtol=1e-5)
    assert len(lse) == with_lse
    total = (out.sum() + sum(x.sum() for x in lse)) if how != "func" else None
    without = adapter.attention(q, k, v, return_lse=with_lse)
    without = without if with_lse else (without,)
    plain = torch.autograd.grad(sum(x.sum() for x in without), q)[0]
    if how == "func":
        torch.testing.assert_close(gradient, plain)
    else:
        torch.testing.assert_close(torch.autograd.grad(total, q)[0], plain)
        assert not max_logit.requires_grad


def test_torch_without_gradients_packed_and_empty() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import nvrtc_attn.torch as adapter

    q, k, v = map(torch.from_numpy, tensors(rows=10, keys=10, batch=1))
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 6, "max_seqlen_k": 6}
    eager = adapter.attention(q, k, v, **packed, return_max_logit=True)
    compiled = torch.compile(adapter.attention, fullgraph=True, backend="aot_eager")
    for out, max_logit in (eager, compiled(q, k, v, **packed, return_max_logit=True)):
        assert out.shape == q.shape
        for b, rows in enumerate((slice(0, 4), slice(4, 10))):
            expected = scores(q.numpy()[:, rows], k.numpy()[:, rows])[0].max((1, 2))
            np.testing.assert_allclose(max_logit[b].numpy(), expected, rtol=1e-5)
    out, max_logit = adapter.attention(q[:, :0], k, v, return_max_logit=True)
    assert torch.equal(max_logit, torch.full((1, 4), -torch.inf))
    with pytest.raises(TypeError, match="return_max_logit: got 'yes'"):
        adapter.attention(q, k, v, return_max_logit="yes")


@pytest.mark.parametrize("with_lse", [False, True])
def test_jax(with_lse: bool) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    import nvrtc_attn.jax as adapter

    arrays = tensors()
    expected = scores(*arrays[:2]).max((2, 3))
    q, k, v = map(jax.numpy.asarray, arrays)

    def attention(*x: Any) -> Any:
        return adapter.attention(*x, return_lse=with_lse, return_max_logit=True)

    for how in (attention, jax.jit(attention)):
        _, *lse, max_logit = how(q, k, v)
        assert len(lse) == with_lse
        np.testing.assert_allclose(max_logit, expected, rtol=1e-5)
    mapped = jax.vmap(attention)(q[:, None], k[:, None], v[:, None])
    np.testing.assert_allclose(mapped[-1][:, 0], expected, rtol=1e-5)

    def loss(q: Any) -> Any:
        return sum(x.sum() for x in attention(q, k, v))

    def plain(q: Any) -> Any:
        found = adapter.attention(q, k, v, return_lse=with_lse)
        return sum(x.sum() for x in found) if with_lse else found.sum()

    np.testing.assert_allclose(jax.grad(loss)(q), jax.grad(plain)(q), rtol=1e-6)
    empty = adapter.attention(q[:, :0], k, v, return_max_logit=True)[1]
    np.testing.assert_array_equal(empty, np.full((2, 4), -np.inf))
