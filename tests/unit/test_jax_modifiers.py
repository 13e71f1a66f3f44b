"""score_mod and mask_mod of `nvrtc_attn.jax.attention` on JAX's CPU platform, against JAX's own operations."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402 - after the skip

import nvrtc_attn  # noqa: E402
from nvrtc_attn.front.call import CallOptions  # noqa: E402
from nvrtc_attn.jax import attention, passes  # noqa: E402
from nvrtc_attn.jax.modifier import traced  # noqa: E402
from nvrtc_attn.modifiers.recording import _KINDS as KINDS  # noqa: E402

if hasattr(jax, "enable_x64"):
    from jax import enable_x64
else:  # before jax 0.8
    from jax.experimental import enable_x64

B, M, N, H, K = 2, 12, 15, 4, 8
TABLE = jax.random.normal(jax.random.key(1), (H, M + N))
SLOPES = jnp.array([0.5, 0.25, 0.125, 0.0625])
IDS = jnp.arange(M + N) // 4
FULL = jax.random.normal(jax.random.key(2), (B, H, M, N))
LENGTHS = jnp.array([4, 9])
FLAGS = jnp.arange(N) % 3 != 1


@pytest.fixture(autouse=True)
def _on_cpu() -> Any:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def arrays() -> list[Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (B, n, H, K)) for key, n in zip(keys, (M, N, N), strict=True)]


def dense(q: Any, k: Any, v: Any, score_mod: Any = None, mask_mod: Any = None) -> Any:
    """With whole matrices: the functions are mapped over every position."""
    s = jnp.einsum("bmhd,bnhd->bhmn", q, k) / np.sqrt(K)
    at = jnp.meshgrid(*(jnp.arange(n) for n in s.shape), indexing="ij")
    if score_mod is not None:
        s = jnp.vectorize(score_mod)(s, *at)
    if mask_mod is not None:
        s = jnp.where(jnp.vectorize(mask_mod)(*at), s, -jnp.inf)
    top = jnp.max(s, -1, keepdims=True)
    p = jnp.exp(s - jnp.where(jnp.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    return jnp.einsum("bhmn,bnhd->bmhd", p / jnp.where(total > 0, total, 1), v)


SMALL = (jnp.arange(M + N) % 5).astype(jnp.int8)
SCORES: dict[str, Callable[..., Any]] = {
    "operators": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "table": lambda s, b, h, q, k: s + TABLE[h, q - k + N],
    "softcap": lambda s, b, h, q, k: 2.0 * jnp.tanh(s / 2.0),
    "full": lambda s, b, h, q, k: jnp.where(q >= k, s, s - 1.0) + FULL[b, h, q, k],
    "functions": lambda s, b, h, q, k: (
        jnp.clip(s, -1, 1) + jax.nn.softplus(s) * jax.nn.sigmoid(s) - abs(q // 3 - k % 5)
    ),
    "computed": lambda s, b, h, q, k: s + jnp.exp(SLOPES)[h] * jnp.sqrt(jnp.abs(q - k) + 1.0),
    "column": lambda s, b, h, q, k: (
        s + TABLE[:, 3][h] + jnp.take(SLOPES, h) + TABLE.T[k, h] + SLOPES[1] * jnp.square(s)
    ),
    "t5": lambda s, b, h, q, k: s + TABLE[
        h,
        jnp.where(k - q < 4, jnp.minimum(abs(k - q), 3), 4 + (jnp.log(jnp.maximum(k - q, 1) / 4.0) * 3).astype(int)),
    ],
    "integers": lambda s, b, h, q, k: (
        s + jnp.floor_divide(q - k, 4) + (q - k) % 3 + jax.lax.rem(q - k, 5) + (q - k) ** 2 * 0.1
    ),
    "round": lambda s, b, h, q, k: s + 0.1 * jnp.round(s * 3) + jnp.floor(s) + jax.lax.select(q > k, s, s * 2.0),
    "hyperbolic": lambda s, b, h, q, k: jnp.sinh(0.3 * s) + jnp.cosh(0.2 * s) + jnp.arctan(s) + jnp.tan(0.1 * s),
    "activations": lambda s, b, h, q, k: jax.nn.gelu(s) + jax.nn.leaky_relu(s) + jax.nn.elu(s) + jax.nn.mish(s),
    "of two": lambda s, b, h, q, k: jnp.logaddexp(s, 0.5 * s + k) + jnp.hypot(s, q + 1.0) + jnp.fmod(s, 0.75),
    "finite": lambda s, b, h, q, k: jnp.where(jnp.isfinite(s / k), s, 0.5) + jax.scipy.special.erfc(s),
    "small integers": lambda s, b, h, q, k: s * SMALL[k] + jnp.where(SMALL[q] > 2, SMALL[q].astype(int) - 3, 0),
    "converted": lambda s, b, h, q, k: jnp.float32(s) + jnp.float32(q - k) * 0.1 + jnp.asarray(SLOPES[h]),
    "negative index": lambda s, b, h, q, k: s + jnp.asarray(TABLE)[h, -1 - k],
}  # fmt: skip
MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
    "prefix": lambda b, h, q, k: jnp.logical_or(k < LENGTHS[b], k <= q),
    "flags": lambda b, h, q, k: jnp.logical_and(FLAGS[k], ~(k > q + 3)),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.turns(3)
def test_scores(name: str, jit: bool) -> None:
    call = lambda q, k, v: attention(q, k, v, score_mod=SCORES[name])  # noqa: E731
    found = (jax.jit(call) if jit else call)(*arrays())
    np.testing.assert_allclose(found, dense(*arrays(), SCORES[name]), atol=2e-5)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    found = jax.jit(lambda q, k, v: attention(q, k, v, mask_mod=MASKS[name]))(*arrays())
    np.testing.assert_allclose(found, dense(*arrays(), None, MASKS[name]), atol=1e-5)


def test_numbers_are_given_at_run_time() -> None:
    """Those in the text are the kernel's, captured ones are not: another one is the same program."""

    def of(slope: float) -> Any:
        return traced(lambda s, b, h, q, k: jnp.tanh(s * 0.5) + slope * (q - k), None, None)

    first, second = of(0.3), of(-7.5)
    assert first is not None
    assert second is not None
    assert first.program == second.program
    assert (first.numbers, second.numbers) == ((0.3,), (-7.5,)) or np.allclose(second.numbers, -7.5)
    assert "0.5" in repr(first.program)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.turns(3)
def test_gradients_of_what_a_function_captured(jit: bool) -> None:
    """Of arrays that are tracers while the function is traced: a table, slopes read in both ways, a scalar."""

    def loss(run: Any, q: Any, k: Any, v: Any, table: Any, slopes: Any, scale: Any) -> Any:
        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return jnp.tanh(s) * scale + table[h, i - j + N] + slopes[h] * (j - i) + jnp.exp(slopes)[0]

        return (run(q, k, v, score_mod, lambda b, h, i, j: (i >= j) | (j < LENGTHS[b])) ** 2).sum()

    def ours(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any) -> Any:
        return attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)

    leaves = (*arrays(), TABLE, SLOPES, jnp.float32(0.7))
    grad = jax.grad(loss, argnums=tuple(range(1, 7)))
    found = (jax.jit(grad, static_argnums=0) if jit else grad)(ours, *leaves)
    for theirs, own in zip(grad(dense, *leaves), found, strict=True):
        np.testing.assert_allclose(own, theirs, atol=3e-5)


def test_stopped_gradients_are_stopped() -> None:
    """Of a score, of captured arrays; a function of JAX's with a rule of its own is what it computes."""

    def loss(run: Any, q: Any, k: Any, v: Any, slopes: Any) -> Any:
        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            rounded = s + jax.lax.stop_gradient(jnp.round(s) - s)
            return jax.nn.relu(rounded + 0.25) + jax.lax.stop_gradient(slopes[h] * (i - j)) + s * slopes[h]

        return (run(q, k, v, score_mod, None) ** 2).sum()

    def ours(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any) -> Any:
        return attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)

    grad = jax.grad(loss, argnums=(1, 2, 3, 4))
    for theirs, own in zip(grad(dense, *arrays(), SLOPES), grad(ours, *arrays(), SLOPES), strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-5, atol=3e-5)


BENT: dict[str, Callable[..., Any]] = {
    "softplus": lambda x: jax.nn.softplus(x),
    "log_sigmoid": lambda x: jax.nn.log_sigmoid(x),
    "logaddexp": lambda x: jnp.logaddexp(2 * x, x),
    "logaddexp2": lambda x: jnp.logaddexp2(x, 0.0),
    "relu": lambda x: jax.nn.relu(x),
    "relu6": lambda x: jax.nn.relu6(x) + jax.nn.relu6(x + 6),
    "fmod": lambda x: jnp.fmod(x, 1.5),
    "mod": lambda x: jnp.mod(x, 1.5),
}


@pytest.mark.parametrize("name", BENT)
def test_derivatives_where_functions_of_jax_bend(name: str) -> None:
    """At 0, where what is learned often begins."""
    begin = jnp.zeros(H)

    def loss(run: Any, x: Any) -> Any:
        return (run(*arrays(), lambda s, b, h, i, j: s + BENT[name](x[h] * s), None) ** 2).sum()

    def ours(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any) -> Any:
        return attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)

    found, wanted = (jax.grad(loss, argnums=1)(run, begin) for run in (ours, dense))
    assert np.abs(wanted).max() > 1e-3 or name.startswith("relu")
    np.testing.assert_allclose(found, wanted, atol=3e-5)


def test_a_function_of_the_users_is_what_it_says_whatever_its_name() -> None:
    """JAX's own of these names are one operation here."""

    def floor_divide(x: Any, y: Any) -> Any:
        return (x + 2) // y

    def remainder(x: Any, y: Any) -> Any:
        return x % (y + 1)

    def relu(x: Any) -> Any:
        return jnp.maximum(x, 0.25)

    for function in (floor_divide, remainder):
        inner = jax.jit(function)
        found = attention(*arrays(), score_mod=lambda s, b, h, i, j, f=inner: jnp.sin(s) + f(j, 5))
        wanted = dense(*arrays(), lambda s, b, h, i, j, f=function: jnp.sin(s) + f(j, 5))
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    found = attention(*arrays(), score_mod=lambda s, b, h, i, j: jax.jit(relu)(s))
    np.testing.assert_allclose(found, dense(*arrays(), lambda s, b, h, i, j: relu(s)), atol=2e-5)


def test_rules_of_gradients_that_would_be_left_out_are_refused() -> None:
    @jax.custom_vjp
    def halved(x: Any) -> Any:
        return x * 1.0

    halved.defvjp(lambda x: (x * 1.0, None), lambda _, dx: (dx * 0.5,))

    @jax.custom_jvp
    def doubled(x: Any) -> Any:
        return x * 1.0

    doubled.defjvps(lambda dx, _, x: dx * 2.0)
    for function, name in ((halved, "custom_vjp"), (doubled, "custom_jvp")):
        with pytest.raises(nvrtc_attn.base.errors.TraceError, match=f"'{name}': derivatives of a modifier are"):
            attention(*arrays(), score_mod=lambda s, b, h, i, j, f=function: f(s))


def test_arrays_without_a_gradient_cost_none() -> None:
    """The backward pass makes gradients of what is differentiated with respect to, and no other."""

    def loss(q: Any) -> Any:
        return attention(q, *arrays()[1:], score_mod=SCORES["table"]).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(arrays()[0]))
    assert f"f32[{H},{M + N}]" in text  # the operand
    found = jax.grad(loss)(arrays()[0])
    np.testing.assert_allclose(
        found, jax.grad(lambda q: dense(q, *arrays()[1:], SCORES["table"]).sum())(arrays()[0]), atol=2e-5
    )


def test_more_than_ten_arrays_keep_their_order() -> None:
    """JAX sorts operands by their names, "aux10" before "aux2"; kernels are given shapes and types by number."""
    captured = [jnp.ones((H,) * (1 + i % 3), (np.float32, np.int32)[i % 2]) for i in range(12)]

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for x in captured:
            s = s + x[(h,) * x.ndim]
        return s

    modifier = traced(score_mod, None, None)
    assert modifier is not None
    kind, operands = passes.with_modifier(passes.Kind(CallOptions()), modifier)
    operands |= dict(zip("qkv", arrays(), strict=True))
    bound = passes.bind(kind, dict(sorted(operands.items())))
    assert bound.captures == [(x.shape, x.dtype.name) for x in captured]
    found = jax.jit(partial(attention, score_mod=score_mod))(*arrays())
    np.testing.assert_allclose(found, dense(*arrays()), atol=2e-5)


def test_vmap_and_aux() -> None:
    q, k, v = (jnp.stack([x, 2 * x]) for x in arrays())
    tables = jnp.stack([TABLE, -TABLE])

    def one(q: Any, k: Any, v: Any, table: Any) -> Any:
        return attention(q, k, v, score_mod=lambda s, b, h, i, j, aux: s + aux["t"][h, i - j + N], aux={"t": table})

    found = jax.vmap(one)(q, k, v, tables)
    for i in range(2):
        exact = dense(q[i], k[i], v[i], lambda s, b, h, m, n, i=i: s + tables[i][h, m - n + N])
        np.testing.assert_allclose(found[i], exact, atol=2e-5)


@pytest.mark.parametrize("dtype", KINDS)
def test_every_element_type_with_64_bit_types_and_without(dtype: str) -> None:
    """Those of 64 bits reach the kernel as what JAX made of them: 32 bits wide by default."""
    q, k, v = (x.astype(np.float32) for x in arrays())
    table = (np.arange(N) % 2).astype(jnp.dtype(dtype))

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[j]

    expected = nvrtc_attn.attention(*(np.asarray(x) for x in (q, k, v)), score_mod=score_mod)
    for wide in (False, True):
        with enable_x64(wide):
            modifier = traced(score_mod, None, None)
            assert modifier is not None
            kind, operands = passes.with_modifier(passes.Kind(CallOptions()), modifier)
            assert kind.program is not None
            assert kind.program.captures == ((operands["aux0"].dtype.name, 1),)
            assert (operands["aux0"].dtype.name == dtype) == (wide or "64" not in dtype)
            np.testing.assert_allclose(attention(q, k, v, score_mod=score_mod), expected, atol=1e-6)


def test_gradient_of_a_float64_array() -> None:
    with enable_x64(True):
        table, tensors = TABLE.astype(np.float64), [x.astype(np.float32) for x in arrays()]
        loss = lambda run, table: (run(*tensors, lambda s, b, h, i, j: s + table[h, i - j + N]) ** 2).sum()  # noqa: E731
        found = jax.grad(partial(loss, lambda q, k, v, f: attention(q, k, v, score_mod=f)))(table)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, jax.grad(partial(loss, dense))(table), atol=3e-5)


def test_the_docstring_says_which_arrays_a_function_may_capture() -> None:
    text = " ".join((nvrtc_attn.attention.__doc__ or "").split())
    kinds = text.partition("aux Arrays by name")[2].partition("floats of 16 to 64 bits")[0]
    assert set(re.findall(r"bool|u?int\d+", kinds)) == {x for x in KINDS if "float" not in x}


def test_a_softcap_and_a_band_become_options() -> None:
    modifier = traced(lambda s, b, h, q, k: 30.0 * jnp.tanh(s / 30.0), lambda b, h, q, k: q >= k, None)
    assert modifier is not None
    from nvrtc_attn.modifiers.canonical import canonical

    found = canonical(modifier)
    assert (found.modifier, found.softcap, found.bounds.high) == (None, 30.0, 0)


@pytest.mark.parametrize(
    ("score_mod", "message"),
    [
        (lambda s, b, h, q, k: s if jnp.tanh(s) > 0 else 0.0, "branch"),
        (lambda s, b, h, q, k: s + jnp.sum(SLOPES * h), "whole"),
        (lambda s, b, h, q, k: s + jnp.cumsum(jnp.stack([s, s]))[0], "not possible|makes an array"),
        (lambda s, b, h, q, k: jnp.stack([s, s]), "array|not possible"),
        (lambda s, b, h, q, k: (jnp.tanh(s), s), "returned 2 values"),
    ],
)
def test_what_cannot_be_traced_is_named(score_mod: Any, message: str) -> None:
    with pytest.raises(nvrtc_attn.TraceError, match=message):
        attention(*arrays(), score_mod=score_mod)


def test_what_wraps_around_in_small_integers_is_refused() -> None:
    for score_mod in (
        lambda s, b, h, q, k: s + (SMALL[q] - SMALL[k]),
        lambda s, b, h, q, k: s * jnp.square(SMALL[k]),
        lambda s, b, h, q, k: s + (SMALL[q] + 1),
    ):
        with pytest.raises(nvrtc_attn.TraceError, match="wraps around at their ends"):
            attention(*arrays(), score_mod=score_mod)


def test_functions_in_cpp_are_beside_operators_not_beside_jaxs() -> None:
    square = nvrtc_attn.cuda_function(
        "float square(float x)", "return x * x;", derivatives={"x": "return 2.0f * x;"}, numpy=np.square,
        numpy_derivatives={"x": lambda x: 2 * x},
    )  # fmt: skip
    x = arrays()
    found = jax.jit(jax.grad(lambda x: attention(*x, score_mod=lambda s, b, h, q, k: square(s) + SLOPES[h]).sum()))(x)
    wanted = jax.grad(lambda x: dense(*x, lambda s, b, h, q, k: s * s + SLOPES[h]).sum())(x)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    with pytest.raises(nvrtc_attn.TraceError, match=r"'square' is called with .*Tracer.*not of jax.numpy"):
        attention(*x, score_mod=lambda s, b, h, q, k: jnp.tanh(square(s)))


def test_aux_without_functions() -> None:
    with pytest.raises(ValueError, match="aux"):
        attention(*arrays(), aux={"x": SLOPES})


@pytest.mark.parametrize("way", ["operators", "jax.numpy", "jit"])
def test_lists_of_blocks_of_other_sizes_are_refused(way: str) -> None:
    """Also where JAX traces the function that decides inside of the blocks."""
    inner = {"jax.numpy": lambda b, h, q, k: jnp.less_equal(k, q)}.get(way)
    indptr, indices = jnp.array([[0, 1, 3]] * H), jnp.array([0, 0, 1])
    mask_mod = nvrtc_attn.block_mask(indptr, indices, 8, M, N, mask_mod=inner)
    q, k, v = arrays()
    call = jax.jit(partial(attention, mask_mod=mask_mod)) if way == "jit" else partial(attention, mask_mod=mask_mod)
    call(q, k, v)
    for given, message in (
        ((q[:, :9], k, v), "for 12 queries, but the call has 9"),
        ((q, k[:, :9], v[:, :9]), "for 15 keys, but the call has 9"),
        ((q[:, :, :2], k[:, :, :2], v[:, :, :2]), "for 4 heads, but q has 2"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*given)
