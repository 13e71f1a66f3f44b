"""Programs of repeated `nvrtc_attn.attention` calls on JAX arrays; its CPU platform counts as a GPU here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from child_environment import python_path

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402 - after the skip

import nvrtc_attn  # noqa: E402
from nvrtc_attn import api  # noqa: E402
from nvrtc_attn.base.errors import CompileError  # noqa: E402
from nvrtc_attn.front.call import CallOptions  # noqa: E402
from nvrtc_attn.front.operands import INPUTS  # noqa: E402
from nvrtc_attn.front.part import Part  # noqa: E402
from nvrtc_attn.jax import repeated  # noqa: E402

SHAPE = (2, 24, 4, 16)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(repeated, "_programs", {})
    monkeypatch.setattr(repeated, "FIRST", 3)
    monkeypatch.setattr(repeated, "on_gpu", lambda: True)
    monkeypatch.setattr(repeated, "_has_bridge", lambda: True)
    monkeypatch.setattr(api, "_programs_of", {type(jnp.zeros(())): repeated.attend})
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def qkv(seed: int = 0, dtype: Any = jnp.float32, rows: int = SHAPE[1]) -> list[Any]:
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, (SHAPE[0], rows, *SHAPE[2:]), dtype) for key in keys]


def inputs(*tensors: Any, **more: Any) -> tuple[Any, ...]:
    given = dict(zip("qkv", tensors, strict=True)) | more
    return tuple(given.get(name) for name in INPUTS)


def options(**more: Any) -> CallOptions:
    defaults: dict[str, Any] = {"window_size": (None, None)}
    return CallOptions(**defaults | more)


def as_numpy(*tensors: Any) -> list[Any]:
    return [np.asarray(x) for x in tensors]


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, lse": {"causal": True, "return_lse": True},
    "all results": {"return_lse": True, "return_max_logit": True, "softcap": 5.0, "softmax_scale": 0.5},
    "window": {"window_size": (3, 1), "deterministic": True},
    "bias": {"bias": jax.random.normal(jax.random.key(9), (1, 4, 24, 24))},
    "mask and sink": {"mask": jnp.arange(24).reshape(1, 1, 1, 24) < 20, "sink": jnp.ones(4)},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_program_computes_what_a_call_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    attend = repeated.attend
    seen = lambda *arguments: found.append(attend(*arguments)) or found[-1]  # noqa: E731
    monkeypatch.setattr(api, "_programs_of", {type(jnp.zeros(())): seen})
    for seed in range(5):
        tensors = qkv(seed)
        result = nvrtc_attn.attention(*tensors, **CALLS[name])
        more = {key: np.asarray(x) if isinstance(x, jax.Array) else x for key, x in CALLS[name].items()}
        expected = nvrtc_attn.attention(*as_numpy(*tensors), **more)
        assert isinstance(result, tuple) == isinstance(expected, tuple)
        pairs = zip(*((x if isinstance(x, tuple) else (x,)) for x in (result, expected)), strict=True)
        for x, y in pairs:
            assert isinstance(x, jax.Array)
            assert x.committed
            np.testing.assert_array_equal(np.asarray(x), y)
    assert [x is not None for x in found] == [False] * 3 + [True] * 2


def test_kinds_of_calls_are_counted_apart() -> None:
    kinds = [
        (inputs(*qkv()), options()),
        (inputs(*qkv(rows=25)), options()),
        (inputs(*qkv(dtype=jnp.bfloat16)), options()),
        (inputs(*qkv()), options(causal=True)),
        (inputs(*qkv()), options(return_lse=True)),
        (inputs(*qkv(), bias=jnp.zeros((1, 1, 24, 24))), options()),
        (inputs(*qkv(), bias=jnp.zeros((1, 4, 24, 24))), options()),
    ]
    for _ in range(3):
        for kind in kinds:
            assert repeated.attend(*kind) is None
    assert len(repeated._programs) == len(kinds)
    assert all(callable(x) for x in repeated._programs.values())
    for kind in kinds:
        assert repeated.attend(*kind) is not None


def test_what_is_no_program_is_no_program_however_often_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    others: list[tuple[tuple[Any, ...], CallOptions]] = [
        (inputs(q, k, v), options(dropout_p=0.5)),
        (inputs(q, k, np.asarray(v)), options()),
        (inputs(q, k, v, bias=np.zeros((1, 1, 24, 24), np.float32)), options()),
        (inputs(q, k, v), options(causal=1)),
        (inputs(q, k, v), options(window_size=[None, None])),
    ]
    for _ in range(6):
        for other in others:
            assert repeated.attend(*other) is None
    assert not repeated._programs
    with pytest.raises(TypeError, match="causal"):
        nvrtc_attn.attention(q, k, v, causal=1)  # type: ignore[arg-type]
    # Nor is it asked for.
    monkeypatch.setattr(api, "_programs_of", {type(q): None})
    part = Part()
    for more in ({"part": part}, {"score_mod": lambda s, b, h, i, j: s * 2}):
        nvrtc_attn.attention(q, k, v, **more)  # type: ignore[arg-type]


def test_where_a_function_is_traced_the_result_is_an_array() -> None:
    q, k, v = qkv()
    for _ in range(3):
        nvrtc_attn.attention(q, k, v)
    seen = []

    @jax.jit
    def function(x: Any) -> Any:
        seen.append(nvrtc_attn.attention(q, k, v))
        return x + seen[-1]

    out = function(q)
    assert not isinstance(seen[0], jax.core.Tracer)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(q) + nvrtc_attn.attention(*as_numpy(q, k, v)))
    with pytest.raises(TypeError, match=r"nvrtc_attn\.jax\.attention"):
        jax.jit(nvrtc_attn.attention)(q, k, v)


def test_deleted_arrays_are_refused_as_by_a_first_call() -> None:
    messages = []
    for calls in (0, 4):
        q, k, v = qkv()
        for _ in range(calls):
            nvrtc_attn.attention(q, k, v)
        k.delete()
        with pytest.raises(ValueError, match="k: ") as error:
            nvrtc_attn.attention(q, k, v)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_without_a_bridge_or_a_compiler_calls_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    call = inputs(*qkv()), options()
    asked = []
    monkeypatch.setattr(repeated, "_has_bridge", lambda: asked.append(None))
    for _ in range(9):
        assert repeated.attend(*call) is None
    assert len(asked) == 3, "asked again after as many calls"
    monkeypatch.setattr(repeated, "_has_bridge", lambda: True)

    def refused(*_: Any, **__: Any) -> Any:
        raise CompileError("not now")

    monkeypatch.setattr(repeated, "attention", refused)
    for _ in range(9):
        assert repeated.attend(*call) is None
    assert list(repeated._programs.values()) == [None]


def test_lengths_are_checked_when_they_are_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a program and after, and calls in between leave nothing behind."""
    call = inputs(*qkv(), seqused_k=jnp.array([24, 7], jnp.int32)), options()
    monkeypatch.setenv("NVRTC_ATTN_DEBUG", "1")
    assert [repeated.attend(*call) for _ in range(4)] == [None] * 4
    monkeypatch.delenv("NVRTC_ATTN_DEBUG")
    assert [repeated.attend(*call) for _ in range(3)] == [None] * 3
    assert repeated.attend(*call) is not None
    monkeypatch.setenv("NVRTC_ATTN_DEBUG", "1")
    assert repeated.attend(*call) is None
    monkeypatch.delenv("NVRTC_ATTN_DEBUG")
    assert repeated.attend(*call) is not None


def test_a_bridge_that_would_import_torch_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    there: set[str] = set()
    monkeypatch.setattr(repeated.importlib.util, "find_spec", lambda name: name if name in there else None)
    for name in ("jax_tvm_ffi", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not repeated._has_bridge()
    there.add("jax_tvm_ffi")
    assert repeated._has_bridge()
    there.add("torch")
    assert not repeated._has_bridge()
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert repeated._has_bridge()
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setitem(sys.modules, "jax_tvm_ffi", sys)
    assert repeated._has_bridge()


DEVICES = """
import jax, numpy as np
from nvrtc_attn.jax import repeated
from nvrtc_attn.front.call import CallOptions
from nvrtc_attn.front.operands import INPUTS
repeated.FIRST, repeated.on_gpu, repeated._has_bridge = 2, lambda: True, lambda: True
first, second = jax.local_devices()
rest = (None,) * (len(INPUTS) - 3)
def call(*devices):
    arrays = [jax.device_put(np.full((2, 8, 2, 8), float(i), np.float32), x) for i, x in enumerate(devices)]
    return repeated.attend((*arrays, *rest), CallOptions())
for device in (first, second):
    assert call(*[device] * 3) is None and call(*[device] * 3) is None
    out = call(*[device] * 3)
    assert out.devices() == {device} and (np.asarray(out) == 2).all()
    with jax.default_device(second if device is first else first):
        assert [call(*[device] * 3) for _ in range(2)] == [None, None], "counted apart"
        assert call(*[device] * 3).devices() == {device}
mesh = jax.sharding.Mesh(np.array([first, second]), ("x",))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
for devices in ((first, second, first), (whole,) * 3, (first, first, whole)):
    for _ in range(4):
        assert call(*devices) is None
print("ok")
"""


def test_a_program_is_of_its_device_and_of_no_other() -> None:
    environment = {
        **os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": python_path(),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", DEVICES], env=environment, capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr


def calls_of(function: Any) -> int:
    count = 0

    def seen(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call") and f"{os.sep}nvrtc_attn{os.sep}" in frame.f_code.co_filename

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_call_of_a_program_calls_few_functions() -> None:
    q, k, v = qkv()
    for _ in range(5):
        nvrtc_attn.attention(q, k, v)
    ((key, program),) = repeated._programs.items()
    assert callable(program)
    repeated._programs[key] = lambda *arrays: arrays[0]
    # A fourteenth above what was counted with Python 3.11 and jax 0.10.2: 30.
    assert calls_of(lambda: nvrtc_attn.attention(q, k, v)) <= 32
