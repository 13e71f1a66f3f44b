"""`nvrtc_attn.jax.dot_product_attention` beside jax.nn's, and flax's layers with and without `attention_fn`."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
from differences import note

from nvrtc_attn import UnsupportedError

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = pytest.importorskip("jax.numpy")
adapter = pytest.importorskip("nvrtc_attn.jax")


@pytest.fixture(autouse=True)
def _on_cpu() -> Any:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def arrays(rows: int, columns: int, heads_kv: int = 2) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, rows, 4, 8), (2, columns, heads_kv, 8), (2, columns, heads_kv, 8), (1, 4, rows, columns))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def compare(inputs: list[Any], call: Any, expected: Any) -> None:
    """Values and gradients of functions of the inputs, ours jitted."""
    weight = jax.random.normal(jax.random.key(1), jax.eval_shape(expected, *inputs).shape)

    def both(function: Any) -> Any:
        def loss(*x: Any) -> Any:
            out = function(*x)
            return (out * weight).sum(), out

        return jax.value_and_grad(loss, tuple(range(len(inputs))), has_aux=True)

    (_, out), gradients = jax.jit(both(call))(*inputs)
    (_, wanted), wanted_gradients = both(expected)(*inputs)
    note("JAX", out, wanted)
    np.testing.assert_allclose(out, wanted, atol=2e-6, rtol=1e-5)
    for a, b in zip(gradients, wanted_gradients, strict=True):
        note("JAX", a, b)
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_signature() -> None:
    ours = inspect.signature(adapter.dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert set(theirs) <= set(ours)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name


@pytest.mark.parametrize("lengths", [(6, 6), (4, 7), (7, 4)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 3, (4, 1), (0, 4), (6, 3)])
@pytest.mark.turns(3)
def test_causal_and_windows(lengths: tuple[int, int], is_causal: bool, window: Any) -> None:
    """Aligned to the first query and key, in every combination. Rows without a key: see below."""
    rows, columns = lengths
    options = {"is_causal": is_causal, "local_window_size": window, "scale": 0.4}
    left = columns if window is None else window if isinstance(window, int) else window[0]
    seen = min(rows, columns + left)  # rows that see a key

    def of(function: Any) -> Any:
        return lambda q, k, v, bias: function(q, k, v, bias, **options)[:, :seen]

    compare(arrays(rows, columns), of(adapter.dot_product_attention), of(jax.nn.dot_product_attention))
    if seen < rows:
        out, lse = adapter.dot_product_attention(*arrays(rows, columns), **options, return_residual=True)
        assert not np.any(out[:, seen:])
        assert np.all(np.isneginf(lse[:, seen:]))


@pytest.mark.parametrize(("with_mask", "queries", "keys"), list(itertools.product((False, True), repeat=3)))
@pytest.mark.turns(3)
def test_masks_and_lengths(with_mask: bool, queries: bool, keys: bool) -> None:
    q, k, v, bias = arrays(5, 7)
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, (2, 1, 5, 7)).at[..., 0].set(True) if with_mask else None
    options = {
        "query_seq_lengths": jnp.array([5, 3], jnp.int32) if queries else None,
        "key_value_seq_lengths": jnp.array([7, 4], jnp.int32) if keys else None,
    }

    def of(function: Any) -> Any:
        return lambda *x: function(*x, mask, **options)

    compare([q, k, v, bias], of(adapter.dot_product_attention), of(jax.nn.dot_product_attention))


def test_without_batch_low_ranks_and_residual() -> None:
    q, k, v, _ = (x[0] for x in arrays(5, 7))
    bias = jax.random.normal(jax.random.key(3), (5, 7))
    compare(
        [q, k, v, bias],
        lambda *x: adapter.dot_product_attention(*x),
        lambda *x: jax.nn.dot_product_attention(*x),
    )
    for inputs in ((q, k, v), (q[None], k[None], v[None])):
        out, lse = adapter.dot_product_attention(*inputs, return_residual=True)
        expected, residual = jax.nn.dot_product_attention(*inputs, return_residual=True)
        assert out.shape == expected.shape
        np.testing.assert_allclose(lse, residual, atol=2e-6, rtol=1e-5)
    half = [x.astype(jnp.float16) for x in (q, k, v)]
    bias = bias.astype(jnp.bfloat16)
    expected = jax.nn.dot_product_attention(*half, bias)
    np.testing.assert_allclose(adapter.dot_product_attention(*half, bias), expected, atol=2e-2)


def test_the_residual_has_no_gradient() -> None:
    """As in jax.nn: whoever trains with it has `attention(return_lse=True)`."""
    q, k, v, _ = arrays(5, 7)

    def gradient(function: Any) -> Any:
        return jax.grad(lambda q: sum(x.sum() for x in function(q, k, v, return_residual=True)))(q)

    found, wanted = gradient(adapter.dot_product_attention), gradient(jax.nn.dot_product_attention)
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-5)


def test_nothing_needs_arrays_of_other_ranks_to_broadcast() -> None:
    q, k, v, _ = arrays(6, 7)
    lengths = jnp.array([3, 5])
    options: dict[str, Any] = {
        "query_seq_lengths": lengths, "key_value_seq_lengths": lengths + 1, "local_window_size": (2, 1),
    }  # fmt: skip
    expected = jax.nn.dot_product_attention(q, k, v, **options)
    with jax.numpy_rank_promotion("raise"):
        found = adapter.dot_product_attention(q, k, v, **options)
    seen = (jnp.arange(6)[None] < lengths[:, None])[..., None, None]
    np.testing.assert_allclose(jnp.where(seen, found, 0), jnp.where(seen, expected, 0), atol=2e-6, rtol=1e-5)


def test_vmap() -> None:
    q, k, v, _ = (jnp.stack([x, 2 * x]) for x in arrays(4, 4))
    out = jax.vmap(lambda *x: adapter.dot_product_attention(*x, is_causal=True))(q, k, v)
    expected = jax.vmap(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True))(q, k, v)
    np.testing.assert_allclose(out, expected, atol=2e-6, rtol=1e-5)


def test_scales_that_are_arrays() -> None:
    """A learned one has its gradient."""
    q, k, v, _ = arrays(4, 4)
    scale = jnp.float32(0.3)
    for number in (scale, np.float32(0.3), np.array([0.3], np.float32), np.array(0.3)):
        found = adapter.dot_product_attention(q, k, v, scale=number)
        np.testing.assert_allclose(found, jax.nn.dot_product_attention(q, k, v, scale=0.3), atol=2e-6, rtol=1e-5)
    compare(
        [q, k, v, scale],
        lambda q, k, v, scale: adapter.dot_product_attention(q, k, v, scale=scale),
        lambda q, k, v, scale: jax.nn.dot_product_attention(q, k, v, scale=scale),
    )


def test_windows_of_other_kinds() -> None:
    q, k, v, _ = arrays(4, 4)
    found, wanted = (adapter.dot_product_attention(q, k, v, local_window_size=x) for x in (np.int64(1), 1))
    assert np.array_equal(found, wanted)
    for wrong in ((1, None), (1, 2, 3), 2.0, "ab", (1.0, 2)):
        with pytest.raises(TypeError, match=r"^local_window_size: got"):
            adapter.dot_product_attention(q, k, v, local_window_size=wrong)


def test_refusals() -> None:
    q, k, v, _ = arrays(4, 4)
    with pytest.raises(UnsupportedError, match="implementation: got 'cudnn'"):
        adapter.dot_product_attention(q, k, v, implementation="cudnn")
    for options in (
        {"mask": jnp.ones((1, 1, 4, 4))}, {"bias": jnp.ones((1, 1, 1, 4, 4))},
        {"key_value_seq_lengths": jnp.ones(2)}, {"query_seq_lengths": jnp.ones(3, jnp.int32)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{next(iter(options))}: "):
            adapter.dot_product_attention(q, k, v, **options)
    with pytest.raises(ValueError, match="ranks"):
        adapter.dot_product_attention(q, k[0], v)
    for scale in (jnp.ones(2), "0.3"):
        with pytest.raises(TypeError, match=r"^scale: got "):
            adapter.dot_product_attention(q, k, v, scale=scale)
    assert jax.jit(lambda scale: adapter.dot_product_attention(q, k, v, scale=scale))(1.0).shape == q.shape


# ------------------------------------------------------------------------------------------------------------ flax


@pytest.fixture
def attention_fn() -> Any:
    pytest.importorskip("flax", reason="flax is not installed")
    return pytest.importorskip("nvrtc_attn.integrations.flax").attention_fn


def states(*lead: int) -> tuple[Any, Any]:
    """A sequence and a mask of causal and padding, as numbers, as flax makes them."""
    x = jax.random.normal(jax.random.key(0), (*lead, 6, 16))
    keep = jnp.arange(6) < 5
    causal = jnp.tril(jnp.ones((6, 6))) * keep
    return x, jnp.broadcast_to(causal, (*lead, 1, 6, 6))


@pytest.mark.parametrize("lead", [(2,), (2, 3)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_linen(attention_fn: Any, lead: tuple[int, ...], masked: bool) -> None:
    """Self-attention, its gradients in all weights, under jit and checkpoint."""
    from flax import linen

    x, mask = states(*lead)
    mask = mask if masked else None
    theirs = linen.MultiHeadDotProductAttention(num_heads=4)
    ours = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn)
    weights = theirs.init(jax.random.key(1), x)

    def loss(layer: Any) -> Any:
        return lambda w: (layer.apply(w, x, mask=mask) ** 2).sum()

    np.testing.assert_allclose(ours.apply(weights, x, mask=mask), theirs.apply(weights, x, mask=mask), atol=2e-6)
    expected = jax.grad(loss(theirs))(weights)
    for function in (loss(ours), jax.checkpoint(loss(ours))):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5),
            jax.jit(jax.grad(function))(weights),
            expected,
        )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nnx(attention_fn: Any, masked: bool, is_causal: bool) -> None:
    pytest.importorskip("flax.nnx", reason="this flax has no nnx")
    from flax import nnx

    x, mask = states(2)
    mask = mask if masked else None

    def layer(**options: Any) -> Any:
        return nnx.MultiHeadAttention(num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0), **options)

    theirs, ours = layer(), layer(attention_fn=attention_fn)
    out, expected = (model(x, mask=mask, is_causal=is_causal) for model in (ours, theirs))
    np.testing.assert_allclose(out, expected, atol=2e-6)
    found, wanted = (
        nnx.grad(lambda m: (m(x, mask=mask, is_causal=is_causal) ** 2).sum())(model) for model in (ours, theirs)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5)


def task() -> tuple[Any, Any, Any]:
    """Sequences with padding, a causal mask, and what a layer shall say: the running mean of what its rows see."""
    x = jax.random.normal(jax.random.key(5), (4, 12, 16))
    keep = jnp.arange(12) < jnp.array([12, 9, 12, 7])[:, None]
    mask = jnp.tril(jnp.ones((12, 12)))[None, None] * keep[:, None, None]
    return x, mask, jnp.einsum("bhqk,bkd->bqd", mask / mask.sum(-1, keepdims=True), x)


STEPS, RATE = 20, 0.3


def check_training(ours: list[float], theirs: list[float]) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)
    assert theirs[-1] < 0.7 * theirs[0], "nothing was learned, so that the losses say little"


def test_linen_trains_the_same(attention_fn: Any) -> None:
    """The losses of some steps of gradient descent, each of which hands its error on to the next."""
    from flax import linen

    x, mask, target = task()

    def losses(**options: Any) -> list[float]:
        layer = linen.MultiHeadDotProductAttention(num_heads=4, **options)
        weights = layer.init(jax.random.key(1), x)

        @jax.jit
        def step(w: Any) -> tuple[Any, Any]:
            loss, gradient = jax.value_and_grad(lambda w: ((layer.apply(w, x, mask=mask) - target) ** 2).mean())(w)
            return loss, jax.tree.map(lambda a, b: a - RATE * b, w, gradient)

        found = []
        for _ in range(STEPS):
            loss, weights = step(weights)
            found.append(float(loss))
        return found

    check_training(losses(attention_fn=attention_fn), losses())


def test_nnx_trains_the_same(attention_fn: Any) -> None:
    pytest.importorskip("flax.nnx", reason="this flax has no nnx")
    from flax import nnx

    x, mask, target = task()

    def losses(**options: Any) -> list[float]:
        layer = nnx.MultiHeadAttention(num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0), **options)

        @nnx.jit
        def step(model: Any) -> Any:
            loss, gradient = nnx.value_and_grad(lambda m: ((m(x, mask=mask) - target) ** 2).mean())(model)
            nnx.update(model, jax.tree.map(lambda a, b: a - RATE * b, nnx.state(model, nnx.Param), gradient))
            return loss

        return [float(step(layer)) for _ in range(STEPS)]

    check_training(losses(attention_fn=attention_fn), losses())


def test_linen_decodes(attention_fn: Any) -> None:
    """One token after the other from flax's cache: the rows of causal attention."""
    from flax import linen

    x, _ = states(2)
    layer = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn, decode=True)
    variables = layer.init(jax.random.key(1), x)
    weights, cache = variables["params"], variables["cache"]
    plain = linen.MultiHeadDotProductAttention(num_heads=4)
    expected = plain.apply({"params": weights}, x, mask=linen.make_causal_mask(x[..., 0]))
    for row in range(6):
        out, changed = layer.apply({"params": weights, "cache": cache}, x[:, row : row + 1], mutable=["cache"])
        cache = changed["cache"]
        np.testing.assert_allclose(out[:, 0], expected[:, row], atol=2e-6)


def test_flax_dropout_bias_and_refusals(attention_fn: Any) -> None:
    q = jax.random.normal(jax.random.key(0), (2, 6, 4, 8))
    bias = jax.random.normal(jax.random.key(1), (4, 6, 6))
    from flax import linen

    np.testing.assert_allclose(
        attention_fn(q, q, q, bias=bias, dtype=jnp.float32),
        linen.dot_product_attention(q, q, q, bias=bias[None]),
        atol=2e-6,
    )
    options = {"dropout_rate": 0.5, "broadcast_dropout": False}
    one, same, other = (attention_fn(q, q, q, dropout_rng=jax.random.key(n), **options) for n in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert np.array_equal(attention_fn(q, q, q, deterministic=True, dropout_rate=0.5), attention_fn(q, q, q))
    for lead in ((2,), (), (2, 3)):
        x = jnp.broadcast_to(q[0], (*lead, 6, 4, 8))
        mask = jnp.ones((*lead, 1, 0, 6))
        assert attention_fn(x[..., :0, :, :], x, x, mask=mask).shape == (*lead, 0, 4, 8)
        assert not np.any(attention_fn(x, x[..., :0, :, :], x[..., :0, :, :]))
    with pytest.raises(UnsupportedError) as caught:
        attention_fn(q, q, q, dropout_rate=0.5, module=object(), qk_attn_weights_einsum=jnp.einsum)
    assert len(caught.value.reasons) == 3


def test_a_training_loop_has_the_losses_of_flaxs_own_attention(attention_fn: Any) -> None:
    import flax_training
    from flax import linen

    own, ours = (flax_training.losses(x, 12, 32, 4) for x in (linen.dot_product_attention, attention_fn))
    assert own[-1] < own[0]
    note("Flax", ours, own, relative=True)
    assert ours == pytest.approx(own, rel=1e-5)
