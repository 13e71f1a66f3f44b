"""The JAX adapter on JAX's CPU platform: values, gradients, transformations, errors; and the bridge's argument list."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import os
import struct
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from child_environment import python_path
from wrong_values import (
    NOT_CAUSAL,
    NOT_FLAGS,
    NOT_INTEGERS,
    NOT_NUMBERS,
    NOT_WINDOWS,
    Rude,
    check,
    label,
)

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402 - after the skip

import nvrtc_attn  # noqa: E402
from nvrtc_attn.base import tables  # noqa: E402
from nvrtc_attn.front.call import CallOptions  # noqa: E402
from nvrtc_attn.front.operands import FORWARD  # noqa: E402
from nvrtc_attn.front.part import ArrayStart, Part  # noqa: E402
from nvrtc_attn.front.philox import NO_RNG, RngState  # noqa: E402
from nvrtc_attn.front.tensors import Device  # noqa: E402
from nvrtc_attn.jax import attention, context_parallel_attention, custom_call, handlers, host, passes  # noqa: E402
from nvrtc_attn.jax.modifier import traced  # noqa: E402
from nvrtc_attn.plans import plan  # noqa: E402

B, M, N, H, HKV, K, KV = 2, 40, 56, 4, 2, 16, 24


@pytest.fixture(autouse=True)
def _on_cpu() -> Any:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def arrays(dtype: Any = np.float32) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((B, M, H, K), (B, N, HKV, K), (B, N, HKV, KV), (1, H, M, N))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def dense(q: Any, k: Any, v: Any, bias: Any = 0.0, causal: bool = False, keep: Any = True) -> Any:
    """(out, lse) with JAX's own operations."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("bmhd,bnhd->bhmn", q, k) / np.sqrt(q.shape[-1]) + bias
    m, n = scores.shape[2:]
    if causal:
        keep = keep & (jnp.arange(n) <= jnp.arange(m)[:, None] + n - m)
    scores = jnp.where(keep, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    return jnp.einsum("bhmn,bnhd->bmhd", jnp.exp(scores - lse[..., None]), v), lse


def close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance), found, expected)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.turns(3)
def test_forward(jit: bool) -> None:
    q, k, v, bias = arrays()
    mask = jax.random.bernoulli(jax.random.key(9), 0.8, (B, 1, 1, N))

    def call(*x: Any) -> Any:
        return attention(*x[:3], bias=x[3], mask=mask, causal=True, return_lse=True)

    out, lse = (jax.jit(call) if jit else call)(q, k, v, bias)
    assert (out.shape, lse.shape, lse.dtype) == ((B, M, H, KV), (B, H, M), np.float32)
    close((out, lse), dense(q, k, v, bias, True, mask))


@pytest.mark.turns(3)
def test_gradients_through_out_lse_and_bias() -> None:
    weight = jax.random.normal(jax.random.key(5), (B, M, H, KV))

    def loss(call: Any) -> Any:
        def value(*x: Any) -> Any:
            out, lse = call(*x)
            return (out * weight).sum() + (lse**2).sum()

        return value

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention(q, k, v, bias=bias, causal=True, return_lse=True)

    found = jax.jit(jax.grad(loss(call), (0, 1, 2, 3)))(*arrays())
    expected = jax.grad(loss(lambda *x: dense(*x, causal=True)), (0, 1, 2, 3))(*arrays())
    assert [x.shape for x in found] == [x.shape for x in arrays()]
    close(found, expected, 1e-4)


def test_gradient_of_the_bias_is_computed_only_when_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, bias = arrays()
    wanted = []
    real = handlers._on_cpu

    def spy(bound: Any, *operands: Any, into: Any) -> Any:
        if bound.kind.backward:
            wanted.append((bound.kind.options.dbias, "dlse" in [name for name, _, _ in bound.operands]))
        return real(bound, *operands, into=into)

    monkeypatch.setattr(handlers, "_on_cpu", spy)
    jax.clear_caches()
    jax.grad(lambda q: attention(q, k, v, bias=bias).sum())(q)
    jax.grad(lambda b: attention(q, k, v, bias=b, return_lse=True)[0].sum())(bias)
    jax.grad(lambda q: attention(q, k, v, return_lse=True)[1].sum())(q)
    jax.clear_caches()
    assert wanted == [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
@pytest.mark.turns(3)
def test_vmap_of_gradients(axes: tuple[int | None, int | None]) -> None:
    q, k, v, bias = arrays()
    x = [jnp.stack([a, 2 * a, a - 1]) if axis == 0 else a for a, axis in zip((q, bias), axes, strict=True)]

    def gradient(call: Any) -> Any:
        return jax.vmap(jax.value_and_grad(lambda q, b: (call(q, b) ** 2).sum(), (0, 1)), axes)

    found = jax.jit(gradient(lambda q, b: attention(q, k, v, bias=b, causal=True)))(*x)
    close(found, gradient(lambda q, b: dense(q, k, v, b, True)[0])(*x), 2e-4)


@pytest.mark.turns(3)
def test_gradient_of_vmap_and_scan() -> None:
    q, k, v, _ = arrays()
    stacked = jnp.stack([q, 2 * q])

    def value(call: Any) -> Any:
        def loss(x: Any) -> Any:
            mapped = jax.vmap(lambda q: call(q, k, v))(x)
            _, scanned = jax.lax.scan(lambda carry, q: (carry, call(q, k, v)), 0.0, x)
            return (mapped**2).sum() + (scanned**3).sum()

        return jax.grad(loss)

    close(value(attention)(stacked), value(lambda *x: dense(*x)[0])(stacked), 2e-4)


def test_folding_the_mapped_axis_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, bias = arrays()
    seen = []
    real = handlers._on_cpu

    def spy(bound: Any, *operands: Any, into: Any) -> Any:
        seen.extend(shape for name, shape, _ in bound.operands if name == "q")
        return real(bound, *operands, into=into)

    monkeypatch.setattr(handlers, "_on_cpu", spy)
    jax.clear_caches()
    stacked = jnp.stack([q, q, q])
    jax.vmap(lambda q: attention(q, k, v, bias=bias))(stacked)
    jax.vmap(lambda q: attention(q, k, v, dropout_p=0.5, rng=1))(stacked)
    jax.clear_caches()
    assert seen == [(3 * B, M, H, K)] + [(B, M, H, K)] * 3


def test_dropout_is_the_core_calls_whatever_holds_the_words() -> None:
    q, k, v, _ = (np.asarray(x) for x in arrays())
    seed, offset = (7 << 32) + 5, 9
    expected = nvrtc_attn.attention(q, k, v, dropout_p=0.3, rng=(seed, offset))
    words = jnp.asarray([5, 7], np.uint32)
    for rng in ((seed, offset), (words, offset), (words, jnp.asarray(9, np.int32)), (seed, jnp.uint32(9))):
        np.testing.assert_array_equal(attention(q, k, v, dropout_p=0.3, rng=rng), expected)
    call = jax.jit(lambda key: attention(q, k, v, dropout_p=0.3, rng=key))
    first, again, other = call(jax.random.key(1)), call(jax.random.key(1)), call(jax.random.key(2))
    assert (first == again).all()
    assert (first != other).any()


def test_other_seeds_are_no_other_programs() -> None:
    q, k, v, _ = (np.asarray(x) for x in arrays())
    attention(q, k, v, dropout_p=0.3, rng=1)
    attention(q, k, v, dropout_p=0.3, rng=(1, 1))
    forms, compiled = len(passes._forms), custom_call._jitted._cache_size()
    for rng in (2, 2**64 - 1, (5, 6), (0, 2**64 - 1)):
        expected = nvrtc_attn.attention(q, k, v, dropout_p=0.3, rng=rng)
        np.testing.assert_array_equal(attention(q, k, v, dropout_p=0.3, rng=rng), expected)
    assert (len(passes._forms), custom_call._jitted._cache_size()) == (forms, compiled)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_a_64_bit_seed_in_an_array_of_numpy_is_not_cut_off(dtype: Any) -> None:
    q, k, v, _ = (np.asarray(x) for x in arrays())
    seed, offset = np.array(2**40 + 3, dtype), np.array([2**34 + 1], dtype)
    expected = nvrtc_attn.attention(q, k, v, dropout_p=0.3, rng=(2**40 + 3, 2**34 + 1))
    np.testing.assert_array_equal(attention(q, k, v, dropout_p=0.3, rng=(seed, offset)), expected)


def test_gradient_with_dropout_uses_the_forward_mask() -> None:
    q, k, v, _ = arrays()

    def loss(v: Any) -> Any:
        return attention(q, k, v, dropout_p=0.4, rng=(3, 0)).sum()

    direction = jax.random.normal(jax.random.key(8), v.shape)
    slope = float((jax.grad(loss)(v) * direction).sum())  # linear in v
    assert slope == pytest.approx(float(loss(v + direction) - loss(v)), rel=1e-3, abs=1e-2)


@pytest.mark.turns(3)
def test_packed_sequences() -> None:
    x = arrays()[0][:1]
    offsets = jnp.asarray([0, 10, M], np.int32)

    def packed(x: Any) -> Any:
        return attention(
            x, x, x, causal=True, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=30, max_seqlen_k=30
        )

    def apart(x: Any) -> Any:
        return jnp.concatenate([dense(y, y, y, causal=True)[0] for y in (x[:, :10], x[:, 10:])], 1)

    close(jax.jit(packed)(x), apart(x))
    close(jax.jit(jax.grad(lambda x: (packed(x) ** 2).sum()))(x), jax.grad(lambda x: (apart(x) ** 2).sum())(x), 1e-4)


@pytest.mark.parametrize("mapped", [False, True])
def test_used_keys_of_a_dense_batch(mapped: bool) -> None:
    q, k, v, bias = arrays()
    used = jnp.array([N, 7], np.int32)
    keep = (jnp.arange(N) < used[:, None])[:, None, None]

    def gradients(call: Any) -> Any:
        gradient = jax.grad(lambda *x: (call(*x) ** 2).sum(), (0, 1, 2, 3))
        return jax.vmap(gradient)(*(jnp.stack([x, x]) for x in (q, k, v, bias))) if mapped else gradient(q, k, v, bias)

    found = gradients(lambda q, k, v, bias: attention(q, k, v, bias=bias, seqused_k=used))
    close(found, gradients(lambda q, k, v, bias: attention(q, k, v, bias=bias, mask=keep)), 1e-5)


def test_bfloat16_and_empty() -> None:
    q, k, v, _ = arrays(jnp.bfloat16)
    assert jax.grad(lambda q: attention(q, k, v).astype(np.float32).sum())(q).dtype == jnp.bfloat16
    out, lse = attention(q[:, :0], k, v, return_lse=True)
    assert (out.shape, out.dtype, lse.shape) == ((B, 0, H, KV), jnp.bfloat16, (B, H, 0))


@pytest.mark.reliability(56)
def test_inputs_are_unchanged() -> None:
    operands = arrays()
    before = [np.array(x) for x in operands]
    jax.grad(lambda q, k, v, b: attention(q, k, v, bias=b).sum(), (0, 1, 2, 3))(*operands)
    nvrtc_attn.attention(*operands[:3])
    for x, y in zip(operands, before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.reliability(55)
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32])
def test_eager_core_call_returns_jax_arrays_with_the_numbers_of_numpy(dtype: Any) -> None:
    q, k, v, _ = arrays(dtype)
    out, lse = nvrtc_attn.attention(q, k, v, return_lse=True)
    assert isinstance(out, jax.Array)
    assert (out.dtype, lse.dtype) == (dtype, np.float32)
    host, _ = nvrtc_attn.attention(*(np.asarray(x) for x in (q, k, v)), return_lse=True)
    np.testing.assert_array_equal(np.asarray(out), host)
    np.testing.assert_array_equal(np.asarray(attention(q, k, v)), host)


@pytest.mark.reliability(56)
def test_raw_call_under_jit_names_the_adapter() -> None:
    q, k, v, _ = arrays()
    with pytest.raises(TypeError, match=r"nvrtc_attn\.jax\.attention"):
        jax.jit(nvrtc_attn.attention)(q, k, v)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": np.zeros((M, H, K), np.float32)}, ValueError, "rank 4"),
        ({"v": np.zeros((B, 3, HKV, KV), np.float32)}, ValueError, "lengths"),
        ({"bias": np.zeros((1, H, M, 3), np.float32)}, ValueError, "broadcast"),
        ({"dropout_p": 0.5}, ValueError, "rng"),
        ({"dropout_p": 0.5, "rng": np.zeros(3, np.uint32)}, ValueError, r"uint32\[2\]"),
        ({"dropout_p": 2.0, "rng": 1}, ValueError, "dropout_p"),
        ({"k": None}, TypeError, "k: got None"),
        ({"causal": "left"}, (ValueError, TypeError), "causal"),
    ],
)
def test_errors_come_while_tracing(change: dict[str, Any], error: Any, text: str) -> None:
    q, k, v, _ = arrays()
    with pytest.raises(error, match=text):
        jax.jit(lambda: attention(**{"q": q, "k": k, "v": v, **change})).lower()


def test_missing_bridge_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_registered", False)
    monkeypatch.setitem(sys.modules, "jax_tvm_ffi", None)
    with pytest.raises(ImportError, match=r'pip install "nvrtc-attn\[jax\]"'):
        handlers.register_target()


def test_import_leaves_the_bridge_and_torch_alone() -> None:
    code = "import sys, nvrtc_attn.jax; print([n for n in ('jax_tvm_ffi', 'tvm_ffi', 'torch') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class FakePlan:
    """Looks at what a plan is called with, and writes ``out`` through its address."""

    workspace_bytes = 256

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    OPERANDS = FORWARD

    def run(self, stream: int, addresses: tuple[int, ...], workspace: int, rng: RngState = NO_RNG) -> None:
        pointers = {name: address for name, address in zip(FORWARD, addresses, strict=True) if address}
        self.calls.append({"stream": stream, "rng": rng, **pointers})
        assert workspace
        for name, address in pointers.items():
            if name in ("out", "lse"):
                shape = (B, M, H, KV) if name == "out" else (B, H, M)
                array = np.ctypeslib.as_array((ctypes.c_float * int(np.prod(shape))).from_address(address))
                array[:] = 3.0 if name == "out" else 4.0


@pytest.fixture(scope="module")
def cpu_target() -> str:
    """The real handler behind the real bridge, on the CPU. XLA registers a name once."""
    jax_tvm_ffi = pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed")
    name = "nvrtc_attn.test_launch"
    jax_tvm_ffi.register_ffi_target(name, handlers._launch, ["args", "rets", "ctx.stream"], platform="cpu")
    return name


@pytest.fixture
def bridge(cpu_target: str, monkeypatch: pytest.MonkeyPatch) -> FakePlan:
    """A plan that only looks."""
    fake = FakePlan()
    monkeypatch.setattr(handlers, "_plan", lambda _bound, _index, _stream: fake)
    monkeypatch.setattr(custom_call, "TARGET", cpu_target)
    monkeypatch.setattr(handlers, "_targets", {})
    return fake


def test_custom_call_reaches_the_plan(bridge: FakePlan) -> None:
    q, k, v, bias = arrays()
    operands = {"q": q, "k": k, "v": v, "bias": bias, "seed": jnp.zeros(2, np.uint32)}
    bound = passes.bind(passes.Kind(CallOptions(return_lse=True, dropout_p=0.1)), operands)
    call = jax.jit(lambda *x: custom_call._custom_call(bound, 256, *x))
    for _ in range(3):
        out, lse = call(*operands.values())
    assert (out == 3).all()
    assert (lse == 4).all()
    seen = bridge.calls[-1]
    assert set(seen) == {"stream", "q", "k", "v", "bias", "out", "lse", "rng"}
    assert seen["rng"].seed_address != 0
    assert seen["rng"]._replace(seed_address=0) == NO_RNG


def test_a_program_that_ran_before_launches_with_the_addresses_of_its_run(
    bridge: FakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands in any order, those that are not there are 0; the pass is looked up once."""
    q, k, v, bias = arrays()
    asked: list[Any] = []
    original = handlers._new_target
    monkeypatch.setattr(handlers, "_new_target", lambda *x: (asked.append(x[0]), original(*x))[1])
    for names in (("k", "bias", "q", "v"), ("q", "v", "k")):
        given = {"q": q, "k": k, "v": v, "bias": bias}
        kind = passes.Kind(CallOptions(return_lse=True))
        bound = passes.bind(kind, {name: given[name] for name in names})
        call = jax.jit(lambda *x, bound=bound: custom_call._custom_call(bound, 256, *x))
        for _ in range(3):
            operands = {name: given[name] + 1 for name in names}  # elsewhere in memory
            out, lse = jax.block_until_ready(call(*operands.values()))
            seen = bridge.calls[-1]
            assert {name: seen.get(name) for name in given} == {
                name: operands[name].unsafe_buffer_pointer() if name in names else None for name in given
            }
            assert (seen["out"], seen["lse"]) == (out.unsafe_buffer_pointer(), lse.unsafe_buffer_pointer())
            assert seen["rng"] == NO_RNG
    assert len(asked) == 2


def test_where_rows_begin_is_told_to_a_launch_and_to_its_functions(
    bridge: FakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address behind those of the operands, and the same of the array that moves their q."""
    seen: list[Any] = []
    monkeypatch.setattr(FakePlan, "run", lambda _self, *x: seen.append(x))
    operands = {**dict(zip("qkv", arrays(), strict=False)), passes.ROW_START: jnp.asarray([5], np.int32)}
    here = operands[passes.ROW_START].unsafe_buffer_pointer()
    plain = passes.Kind(CallOptions(causal=True, part=Part(rows=(ArrayStart(), 3 * M), keys=(0, N))))
    modifier = traced(lambda s, b, h, q, k: s + 0.5 * q, None, None)
    assert modifier is not None
    for kind in (plain, passes.with_modifier(plain, modifier)[0]):
        bound = passes.bind(kind, operands)
        call = jax.jit(lambda *x, bound=bound: custom_call._custom_call(bound, 256, *x))
        jax.block_until_ready(call(*operands.values()))
        _, addresses, _, *more = seen[-1]
        assert len(addresses) == len(FORWARD) + 2
        assert addresses[-2:] == (here, 0)
        if kind is plain:
            assert not more
        else:
            assert here in struct.unpack(f"<{len(more[1].block) // 8}Q", more[1].block)


def test_unknown_program_is_an_error_not_a_wrong_launch(bridge: FakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = passes.bind(passes.Kind(CallOptions()), dict(zip("qkv", arrays(), strict=False)))
    call = jax.jit(lambda *x: custom_call._custom_call(bound, 256, *x))
    compiled = call.lower(*arrays()[:3]).compile()
    monkeypatch.setattr(passes, "_passes", {})
    monkeypatch.setattr(passes, "_forms", {})
    with pytest.raises(Exception, match="compiled in another process"):
        jax.block_until_ready(compiled(*arrays()[:3]))
    assert not bridge.calls


def test_program_of_other_shapes_from_xlas_cache_is_told_by_its_operands(
    bridge: FakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a device's part of a sharded call, which only the partitioner sees."""
    bound = passes.bind(passes.Kind(CallOptions()), dict(zip("qkv", arrays(), strict=False)))
    compiled = jax.jit(lambda *x: custom_call._custom_call(bound, 256, *x)).lower(*arrays()[:3]).compile()
    monkeypatch.setattr(passes, "_passes", {})
    jax.block_until_ready(compiled(*arrays()[:3]))
    assert bridge.calls
    assert passes._passes == {bound.key: bound}


def test_workspace_of_other_settings_is_an_error_not_a_write_behind_it(bridge: FakePlan) -> None:
    bound = passes.bind(passes.Kind(CallOptions()), dict(zip("qkv", arrays(), strict=False)))
    call = jax.jit(lambda *x: custom_call._custom_call(bound, FakePlan.workspace_bytes - 1, *x))
    with pytest.raises(Exception, match="compiled with 255 bytes of workspace, and its kernels now need 256"):
        jax.block_until_ready(call(*arrays()[:3]))
    assert not bridge.calls


def test_tables_have_bounds_and_older_programs_run_on(bridge: FakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_ENTRIES", 3)
    monkeypatch.setattr(passes, "_passes", {})
    calls = []
    for number in range(8):
        kind = passes.Kind(CallOptions(return_lse=True, softmax_scale=float(number)))
        bound = passes.bind(kind, dict(zip("qkv", arrays(), strict=False)))
        calls.append(jax.jit(lambda *x, bound=bound: custom_call._custom_call(bound, 256, *x)))
    for _ in range(2):
        for call in calls:
            _, lse = jax.block_until_ready(call(*arrays()[:3]))
            assert (lse == 4).all()
            assert len(passes._passes) <= 3
            assert len(handlers._targets) <= 3
    assert len(bridge.calls) == 16


def test_tables_of_plans_and_of_calls_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_ENTRIES", 3)
    monkeypatch.setattr(handlers, "_plans", {})
    monkeypatch.setattr(handlers, "_calls", {})
    monkeypatch.setattr(handlers, "forward_plan", lambda problem, *_, **_named: problem)
    operands = dict(zip("qkv", arrays(), strict=False))
    for factor in np.arange(8) + 0.3:
        modifier = traced(lambda s, b, h, q, k, factor=factor: s * s * factor, None, None)
        assert modifier is not None
        kind, _ = passes.with_modifier(passes.Kind(CallOptions()), modifier)
        bound = passes.bind(kind, operands)
        assert handlers._plan(bound, 0) is handlers._plan(bound, 0)
        (value,) = struct.unpack("<f4x", handlers._values(bound, 0, {}, Device("cuda", 0)).block)
        assert value == pytest.approx(factor)
        assert len(handlers._plans) <= 3
        assert len(handlers._calls) <= 3


def test_plans_are_those_of_row_major_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tracing on a GPU asks for: all layouts dense and aligned, float32 statistics."""
    seen = []

    def spy(real: Any) -> Any:
        def plan(*arguments: Any, **named: Any) -> str:
            seen.append(inspect.signature(real).bind(*arguments, **named).arguments)
            return "plan"

        return plan

    monkeypatch.setattr(handlers, "forward_plan", spy(plan.forward_plan))
    monkeypatch.setattr(handlers, "backward_plan", spy(plan.backward_plan))
    monkeypatch.setattr(handlers, "_plans", {})
    q, k, v, bias = arrays(np.float16)
    operands = {"bias": bias, "k": k, "q": q, "v": v}
    kind = passes.Kind(CallOptions(causal=True, return_lse=True, dbias=False))
    assert handlers._plan(passes.bind(kind, operands), 3, 77) == "plan"
    out, lse = jnp.zeros((B, M, H, KV), np.float16), jnp.zeros((B, H, M))
    operands |= {"dout": out, "out": out, "lse": lse, "dlse": lse}
    kind = passes.Kind(CallOptions(causal=True, return_lse=True, dbias=True), backward=True)
    assert handlers._plan(passes.bind(kind, operands), 3, 77) == "plan"
    forward, backward = seen
    for asked in seen:
        assert asked["device_index"] == 3
        assert asked["stream"] == 77
        assert asked["problem"].lse.strides == (H * M, M, 1)
        assert asked["problem"].q.strides == (M * H * K, H * K, K, 1)
        assert asked["problem"].window_right == 0
    assert forward["problem"].out.shape == (B, M, H, KV)
    assert forward["problem"].dlse is None
    assert backward["problem"].dlse.strides == (H * M, M, 1)
    assert backward["problem"].dbias_layout.shape == (1, H, M, N)
    assert backward["problem"].dk.shape == (B, N, HKV, K)


def test_key_is_the_same_in_every_process_and_differs_in_every_detail() -> None:
    operands = dict(zip("qkv", arrays(), strict=False))
    kinds = [
        passes.Kind(CallOptions()),
        passes.Kind(CallOptions(causal=True)),
        passes.Kind(CallOptions(softmax_scale=0.5)),
        passes.Kind(CallOptions(), backward=True),
    ]
    keys = [passes.bind(kind, operands).key for kind in kinds]
    keys.append(passes.bind(kinds[0], {**operands, "q": operands["q"][:1]}).key)
    assert len(set(keys)) == len(keys)
    code = (
        "from nvrtc_attn.jax.passes import Kind, Pass; from nvrtc_attn.front.call import CallOptions;"
        f"print(Pass(Kind(CallOptions()), {passes.bind(kinds[0], operands).operands!r}).key)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(keys[0])


def test_a_call_of_arrays_alone_goes_past_custom_vjp(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, bias = arrays()
    expected = jax.jit(lambda *x: attention(*x, causal=True, return_lse=True))(q, k, v)

    def refuse(*_: Any) -> Any:
        raise AssertionError("traced")

    monkeypatch.setattr(custom_call, "_attention", refuse)
    for _ in range(2):
        close(attention(q, k, v, causal=True, return_lse=True), expected, 1e-6)
    close(attention(np.asarray(q), k, v, causal=True), expected[0], 1e-6)
    for transformed in (jax.jit, jax.vmap, jax.grad):
        given = [x[None] for x in (q, k, v)] if transformed is jax.vmap else (q, k, v)
        with pytest.raises(AssertionError, match="traced"):
            transformed(lambda *x: attention(*x, softcap=3.0).sum())(*given)
    # Of one operand that is traced, here by closure.
    with pytest.raises(AssertionError, match="traced"):
        jax.grad(lambda bias: attention(q, k, v, bias=bias).sum())(bias)


def test_a_call_is_described_once_and_refused_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = arrays()
    monkeypatch.setattr(passes, "_checked", {})
    monkeypatch.setattr(tables, "MAX_ENTRIES", 3)
    described: list[Any] = []
    original = passes.describe
    monkeypatch.setattr(passes, "describe", lambda *x, **more: (described.append(x), original(*x, **more))[1])
    for _ in range(3):
        attention(q, k, v, causal=True, softmax_scale=0.5)
    assert len(described) == 1
    for value in (1, "yes", [True], np.bool_(False)):  # the first equals True, the last is a flag of NumPy's
        for _ in range(2):
            before = len(described)
            if isinstance(value, np.bool_):
                attention(q, k, v, causal=value, softmax_scale=0.5)
            else:
                with pytest.raises((TypeError, ValueError), match="causal"):
                    attention(q, k, v, causal=value, softmax_scale=0.5)
            assert len(described) == before + 1
    for _ in range(2):
        with pytest.raises(ValueError, match="k"):
            attention(q, k[:1], v, causal=True, softmax_scale=0.5)
    for number in range(8):
        attention(q, k, v, softmax_scale=0.5 + number)
        assert len(passes._checked) <= 3


def test_kernels_of_a_backward_pass_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager gradient is traced anew at every call; each time it looked at every header: 15 ms of a call."""
    q, k, v, bias = arrays()
    loss = jax.grad(lambda *x: attention(*x).sum(), (0, 1, 2))
    expected = loss(q, k, v)
    asked: list[Any] = []

    class Prefetch:
        def __init__(self, problem: Any, index: int) -> None:
            self.problem, self.index = problem, index

        def start(self) -> None:
            asked.append((self.problem, self.index))

    original = custom_call._compile_ahead

    def on_gpu(kind: Any, values: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(custom_call, "on_gpu", lambda: True)
            original(kind, values)

    monkeypatch.setattr(custom_call, "_ahead", {})
    monkeypatch.setattr(custom_call, "local_devices", lambda: [0, 2])
    monkeypatch.setattr(custom_call.device, "one_of_each_kind", list)
    monkeypatch.setattr(custom_call, "BackwardPrefetch", Prefetch)
    monkeypatch.setattr(custom_call, "_compile_ahead", on_gpu)
    for _ in range(3):
        close(loss(q, k, v), expected, 1e-6)
    assert [index for _, index in asked] == [0, 2]
    loss(q[:1], k[:1], v[:1])
    jax.grad(lambda bias: attention(q, k, v, bias=bias).sum())(bias)
    assert [index for _, index in asked] == [0, 2] * 3
    assert len({problem for problem, _ in asked}) == 3


def test_kernels_are_on_every_gpu_before_the_program_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load at a first launch may wait for a collective that waits for the GPU whose kernels are being loaded."""
    loaded: list[tuple[bool, int]] = []

    def plan(bound: Any, index: int) -> Any:
        loaded.append((bound.kind.backward, index))
        return SimpleNamespace(workspace_bytes=1000 + index)

    for module in (custom_call, passes):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    monkeypatch.setattr(custom_call, "local_devices", lambda: [0, 1, 2])
    monkeypatch.setattr(custom_call, "_compile_ahead", lambda *_: None)
    monkeypatch.setattr(custom_call, "register_target", lambda: None)
    monkeypatch.setattr(handlers, "_plan", plan)
    q = jnp.ones((1, 24, 3, 16), jnp.bfloat16)
    program = str(jax.make_jaxpr(jax.grad(lambda q: attention(q, q, q).astype(np.float32).sum()))(q))
    assert loaded == [(backward, index) for backward in (False, True) for index in (0, 1, 2)]
    assert "u8[1002]" in program  # the workspace of the one that needs most


WRONG: dict[str, list[Any]] = {
    "causal": NOT_CAUSAL, "window_size": NOT_WINDOWS, "softmax_scale": NOT_NUMBERS, "softcap": [*NOT_NUMBERS, -1.0],
    "dropout_p": [*NOT_NUMBERS, None, 1.1], "return_lse": NOT_FLAGS, "deterministic": NOT_FLAGS,
    "max_seqlen_q": NOT_INTEGERS, "max_seqlen_k": NOT_INTEGERS,
    "q": [None, "x", {}, object(), Rude(), 3, 10**400, b"x", np.ones((1, 4, 2, 8), np.int8)],
    "bias": ["x", {}, object(), Rude(), 3, 10**400, np.ones((1, 4, 2, 8), np.int8)],
    "rng": [None, "x", 1.5, True, -1, 2**64, 10**5000, (1,), (1, 2, 3), (1, -1), (None, 0), (0, 1.5), {}, Rude(),
            np.zeros(3, np.int32), np.ones(1, np.float32)],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kinds_are_refused_by_name(name: str) -> None:
    """F17: while tracing, before anything is compiled."""
    q, k, v = (jnp.ones((1, 4, 2, 8)) for _ in "qkv")
    given: dict[str, Any] = {"q": q, "k": k, "v": v}
    if name.startswith("max_"):
        ends = jnp.array([0, 4], np.int32)
        given |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 4, "max_seqlen_k": 4}
    if name == "rng":
        given |= {"dropout_p": 0.5, "rng": 1}
    attention(**given)
    faults = [f"{label(x)}: {fault}" for x in WRONG[name] if (fault := check(attention, given, name, x)) is not None]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "value"),
    [("causal", np.bool_(True)), ("window_size", [np.int64(2), None]), ("softcap", np.float32(2)), ("softcap", None)],
)
def test_numbers_of_other_libraries_reach_jit(name: str, value: Any) -> None:
    q, k, v, _ = arrays()
    jax.jit(lambda *x: attention(*x, **{name: value}))(q, k, v)


def test_a_length_may_be_an_array() -> None:
    q = jnp.ones((1, 4, 2, 8))
    ends = jnp.array([0, 4], np.int32)
    options: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": np.array(4)}
    assert attention(q, q, q, **options, max_seqlen_k=jnp.array(4)).shape == q.shape


MANY_DEVICES = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nvrtc_attn.jax import attention

q = jax.random.normal(jax.random.key(0), (2, 512, 4, 32))  # large enough for XLA to copy on its own threads
mesh = Mesh(np.array(jax.devices()), ("x",))
gradient = jax.grad(lambda q: (attention(q, q, q) ** 2).sum())
mapped = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")))
for _ in range(2):
    found = mapped(jax.device_put(q, NamedSharding(mesh, PartitionSpec("x"))))
np.testing.assert_allclose(found, gradient(q), 1e-4, 1e-4)
print("done")
"""


def test_as_many_calls_at_once_as_xla_has_threads_do_not_hang(repository: Any) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": python_path(repository)}
    command = [sys.executable, "-c", MANY_DEVICES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("jit", [False, True])
def test_second_derivatives_are_refused_by_name(jit: bool) -> None:
    q, k, v, _ = arrays()
    gradient = jax.grad(lambda q: (attention(q, k, v) ** 2).sum())
    for second in (jax.grad(lambda q: gradient(q).sum()), lambda q: jax.jvp(gradient, (q,), (q,))):
        with pytest.raises(nvrtc_attn.UnsupportedError, match="no second derivatives"):
            (jax.jit(second) if jit else second)(q)


def test_symbolic_sizes_and_traced_options_are_refused_by_name() -> None:
    q, k, v, _ = arrays()
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (q, k, v)]
    with pytest.raises(nvrtc_attn.UnsupportedError, match=r"q: shape \('batch', .*Export a program for each shape"):
        jax.export.export(jax.jit(attention))(*shapes)
    for options in ({"causal": True}, {"softcap": 3.0}, {"window_size": (2, 3)}, {"return_lse": True}):
        with pytest.raises(TypeError, match=f"^{next(iter(options))}: a tracer of JAX.*static_argnames"):
            jax.jit(attention)(q, k, v, **options)


def test_keys_of_other_generators_and_several_keys() -> None:
    q, k, v, _ = arrays()
    for impl in ("rbg", "unsafe_rbg"):
        typed, raw = jax.random.key(3, impl=impl), jax.random.PRNGKey(3, impl=impl)
        found = [attention(q, k, v, dropout_p=0.5, rng=x) for x in (typed, raw, jax.random.PRNGKey(4, impl=impl))]
        np.testing.assert_array_equal(found[0], found[1])
        assert np.any(found[1] != found[2])
    with pytest.raises(ValueError, match=r"rng seed: 2 JAX keys of shape \(2,\)\. Pass one"):
        attention(q, k, v, dropout_p=0.5, rng=jax.random.split(jax.random.key(0)))


def test_shard_map_outside_of_jit() -> None:
    """Whose eager form refuses what a function says of gradients of zero."""
    q, k, v, _ = arrays()
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",)), jax.sharding.PartitionSpec(None, "x")

    def mapped(function: Any) -> Any:
        return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)

    expected = dense(q, k, v, causal=True)[0]
    close(mapped(lambda q, k, v: attention(q, k, v, causal=True))(q, k, v), expected)
    call = partial(context_parallel_attention, axis_name="x", causal=True)
    for strategy in ("all_gather", "ring", "ulysses"):
        close(mapped(partial(call, strategy=strategy))(q, k, v), expected)


def test_an_error_in_the_numpy_path_is_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(handlers, "_on_cpu", fail)
    q, k, v, _ = arrays()
    # Which of the two depends on the version of JAX.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="not today"):
        attention(q, k, v).block_until_ready()


def test_what_the_numpy_path_refuses_is_said_without_a_traceback() -> None:
    q, k, v, _ = arrays()
    lengths = jnp.full(q.shape[0], k.shape[1] + 1, jnp.int32)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="ValueError: seqused_k") as caught:
        attention(q, k, v, seqused_k=lengths).block_until_ready()
    assert "Traceback" not in str(caught.value)
    assert ".py" not in str(caught.value)


def test_lengths_without_dims_are_refused_by_name() -> None:
    q, k, v, _ = arrays()
    for call in (attention, jax.jit(attention), nvrtc_attn.attention):
        with pytest.raises(ValueError, match=r"seqused_k: shape \(\) has rank 0"):
            call(q, k, v, seqused_k=jnp.int32(3))


@pytest.mark.parametrize("named", [None, (0, 3)])
def test_xla_is_told_its_own_version_of_the_interface(
    named: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the oldest, where it asks without its own: jaxlib 0.7.2 does, and a handler that raised ended the process."""
    monkeypatch.setattr(host, "_handlers", [])
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
    host.register("nvrtc_attn.test", lambda *_: None)
    (handler,) = host._handlers
    metadata = host._Metadata(ctypes.sizeof(host._Metadata))
    extension = host._Extension(ctypes.sizeof(host._Extension), host._METADATA, None, ctypes.pointer(metadata))
    frame = host._Frame(ctypes.sizeof(host._Frame), ctypes.cast(ctypes.pointer(extension), ctypes.c_void_p))
    if named is not None:
        api = host._Api(ctypes.sizeof(host._Api))
        api.version.major, api.version.minor = named
        frame.api = ctypes.pointer(api)
    assert handler(ctypes.pointer(frame)) is None
    assert (metadata.version.major, metadata.version.minor) == (named or (0, 1))


def test_an_element_type_that_is_not_known_is_named() -> None:
    buffer = host._Buffer(ctypes.sizeof(host._Buffer), None, 15, None, 0, None)  # of complex64
    pointers = (ctypes.POINTER(host._Buffer) * 1)(ctypes.pointer(buffer))
    buffers = host._Buffers(ctypes.sizeof(host._Buffers), None, 1, None, pointers)
    with pytest.raises(RuntimeError, match=r"buffer 0: element type 15 of XLA's\. It is one of 1 \(bool\), "):
        host._memory(buffers)


def test_exported_program() -> None:
    q, k, v, _ = arrays()
    gradient = jax.jit(jax.value_and_grad(lambda *x: (attention(*x, causal=True) ** 2).sum()))
    check = jax.export.DisabledSafetyCheck.custom_call("nvrtc_attn.launch")
    exported = jax.export.export(gradient, disabled_checks=[check])(q, k, v)
    if importlib.util.find_spec("flatbuffers"):
        exported = jax.export.deserialize(exported.serialize())
    close(exported.call(q, k, v), gradient(q, k, v), 1e-6)
