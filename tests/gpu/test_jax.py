"""JAX on the GPU: the eager core call, and the adapter inside jit and grad, against the torch adapter."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_environment import python_path

sys.path.append(str(Path(__file__).resolve().parent.parent / "unit"))

torch = pytest.importorskip("torch", reason="torch is not installed: its adapter is the yardstick here")
jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402 - after the skips

import nvrtc_attn  # noqa: E402
import nvrtc_attn.torch  # noqa: E402
from nvrtc_attn.jax import attention, context_parallel_attention, repeated  # noqa: E402
from nvrtc_attn.jax.parallel import zigzag  # noqa: E402
from nvrtc_attn.runtime import buffers as device_buffer  # noqa: E402


def _gpu_of_jax() -> str:
    try:
        return "" if jax.devices("gpu") else "JAX sees no GPU"
    except RuntimeError as error:
        return f"JAX sees no GPU: {str(error).splitlines()[0]}"


pytestmark = pytest.mark.skipif(bool(_gpu_of_jax()), reason=_gpu_of_jax() or "has a GPU")
SHAPES = ((2, 300, 4, 64), (2, 333, 2, 64), (2, 333, 2, 64), (1, 4, 300, 333))


@pytest.fixture
def bridge() -> None:
    pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed: no launch from inside jit")


def make(dtype: str = "float16", seed: int = 0) -> tuple[list[Any], list[Any]]:
    """The same q, k, v and bias in JAX and in torch."""
    rng = np.random.default_rng(seed)
    host = [rng.standard_normal(shape, dtype=np.float32) for shape in SHAPES]
    ours = [jnp.asarray(x, dtype) for x in host]
    return ours, [torch.from_numpy(x).cuda().to(getattr(torch, dtype)) for x in host]


def numbers(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().double().cpu().numpy()
    return np.asarray(x).astype(np.float64)


@pytest.mark.reliability(55, 56)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_eager_core_call_gives_torchs_numbers_and_leaves_its_inputs(dtype: str) -> None:
    (q, k, v, bias), theirs = make(dtype)
    before = [numbers(x) for x in (q, k, v, bias)]
    out, lse = nvrtc_attn.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    expected, expected_lse = nvrtc_attn.attention(*theirs[:3], bias=theirs[3], causal=True, return_lse=True)
    assert isinstance(out, jax.Array)
    assert out.devices() == q.devices()
    assert (str(out.dtype), str(lse.dtype)) == (dtype, "float32")
    np.testing.assert_array_equal(numbers(out), numbers(expected))
    np.testing.assert_array_equal(numbers(lse), numbers(expected_lse))
    for x, y in zip((q, k, v, bias), before, strict=True):
        np.testing.assert_array_equal(numbers(x), y)


@pytest.mark.reliability(56)
def test_raw_call_under_jit_names_the_adapter() -> None:
    (q, k, v, _), _ = make()
    with pytest.raises(TypeError, match=r"nvrtc_attn\.jax\.attention"):
        jax.jit(nvrtc_attn.attention)(q, k, v)


@pytest.mark.reliability(47)
def test_inputs_that_jax_is_still_computing() -> None:
    (q, k, v, _), theirs = make()
    expected = numbers(nvrtc_attn.attention(*theirs[:3]))
    heavy = jax.jit(
        lambda x, q: q + 0 * jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y), x).mean().astype(q.dtype)
    )
    block = jnp.ones((2048, 2048), jnp.float32) / 2048
    jax.block_until_ready(heavy(block, q))
    for _ in range(5):
        np.testing.assert_array_equal(numbers(nvrtc_attn.attention(heavy(block, q), k, v)), expected)


@pytest.mark.reliability(48)
def test_arrays_dropped_right_after_the_call() -> None:
    """Inputs and results go out of scope while the GPU works; their memory is asked for again and overwritten."""
    expected, results = [], []
    for seed in range(20):
        (q, k, v, _), theirs = make(seed=seed)
        expected.append(numbers(2 * nvrtc_attn.attention(*theirs[:3])))
        out = nvrtc_attn.attention(q, k, v)
        results.append(out * 2)  # queued by JAX, which may forget ``out`` at once
        del q, k, v, out, theirs
        jnp.full(SHAPES[0], jnp.nan, jnp.float16)
        nvrtc_attn.attention(*(x + 1 for x in make(seed=seed + 100)[0][:3]))  # may be given the same memory
    for found, truth in zip(results, expected, strict=True):
        np.testing.assert_array_equal(numbers(found), truth)


@pytest.mark.reliability(46)
def test_stream_argument() -> None:
    (q, k, v, _), theirs = make()
    expected = numbers(nvrtc_attn.attention(*theirs[:3]))
    side = torch.cuda.Stream()
    for stream in (None, 0, 1, 2, side, side.cuda_stream):
        np.testing.assert_array_equal(numbers(nvrtc_attn.attention(q, k, v, stream=stream)), expected)


@pytest.mark.reliability(47)
def test_repeated_calls_are_a_program_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """On XLA's stream and in its memory, behind what XLA still computes; nothing of ours is allocated or described."""
    pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed")
    nvrtc_attn.attention(*make()[0][:3])  # the first call of a process is not counted
    monkeypatch.setattr(repeated, "_programs", {})
    monkeypatch.setattr(repeated, "FIRST", 3)
    heavy = jax.jit(
        lambda x, q: q + 0 * jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y), x).mean().astype(q.dtype)
    )
    block = jnp.ones((2048, 2048), jnp.float32) / 2048
    for number in range(8):
        (q, k, v, bias), theirs = make(seed=number)
        expected = nvrtc_attn.attention(*theirs[:3], bias=theirs[3], causal=True, return_lse=True)
        if number == 3:
            assert callable(next(iter(repeated._programs.values())))
            monkeypatch.setattr(device_buffer, "DeviceBuffer", None)
            monkeypatch.setattr(nvrtc_attn.api, "describe", None)
        found = nvrtc_attn.attention(heavy(block, q), k, v, bias=bias, causal=True, return_lse=True)
        again = [2 * x for x in found]  # queued behind it
        for x, y, twice in zip(found, expected, again, strict=True):
            assert isinstance(x, jax.Array)
            assert x.devices() == q.devices()
            np.testing.assert_array_equal(numbers(x), numbers(y))
            np.testing.assert_array_equal(numbers(twice), 2 * numbers(y))


def test_memory_of_results_is_given_back() -> None:
    q = jnp.ones((4, 2048, 8, 64), jnp.float16)  # 8 MiB a result

    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other processes allocate on the GPU meanwhile")

    def free_bytes() -> int:
        gc.collect()
        jax.block_until_ready(q + 1)
        device_buffer.reclaim(0)
        jax.block_until_ready(q + 1)
        device_buffer.reclaim(0)
        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])

    for _ in range(20):
        nvrtc_attn.attention(q, q, q)
    before = free_bytes()
    for _ in range(300):
        nvrtc_attn.attention(q, q, q)
    assert before - free_bytes() < 200 << 20
    assert len(device_buffer._exports) < 10


@pytest.mark.reliability(55)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_under_jit_are_torchs(bridge: None, dtype: str) -> None:
    """Both adapters run the same kernels; the deterministic ones give the same bits."""
    ours, theirs = make(dtype)
    weight = jax.random.normal(jax.random.key(1), SHAPES[0], dtype)

    def loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
        out, lse = attention(q, k, v, bias=bias, causal=True, return_lse=True, deterministic=True)
        return (out * weight).astype(np.float32).sum() + 0.5 * lse.sum(), out

    (_, out), found = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*ours)
    leaves = [x.clone().requires_grad_() for x in theirs]
    expected, lse = nvrtc_attn.torch.attention(
        *leaves[:3], bias=leaves[3], causal=True, return_lse=True, deterministic=True
    )
    dout = torch.from_numpy(np.array(numbers(weight), np.float32)).cuda().to(expected.dtype)
    torch.autograd.backward([expected, lse], [dout, torch.full_like(lse, 0.5)])
    np.testing.assert_array_equal(numbers(out), numbers(expected))
    for mine, leaf in zip(found, leaves, strict=True):
        np.testing.assert_array_equal(numbers(mine), numbers(leaf.grad))


@pytest.mark.parametrize("beside", ["sink", "largest score", "packed", "dropout"])
def test_functions_of_scores_beside_other_arguments_are_torchs(beside: str, bridge: None) -> None:
    """Inside of jit, with the gradients of what the functions captured."""
    ours, theirs = make()
    q, k, v = ours[:3]
    host = np.random.default_rng(2)
    slopes, ids, sink = host.random(4, dtype=np.float32), np.arange(333) // 70, host.standard_normal(4, np.float32)
    options: dict[str, Any] = {"deterministic": True}
    of_jax: dict[str, Any] = {}
    of_torch: dict[str, Any] = {}
    if beside == "sink":
        of_jax["sink"], of_torch["sink"] = jnp.asarray(sink), torch.from_numpy(sink).cuda()
    elif beside == "largest score":
        options["return_max_logit"] = True
    elif beside == "dropout":
        options |= {"dropout_p": 0.2, "rng": (5, 8)}
    else:
        q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
        theirs = [x.reshape(1, -1, *x.shape[2:]) for x in theirs[:3]]
        starts = {"cu_seqlens_q": [0, 90, 300, 600], "cu_seqlens_k": [0, 120, 333, 666]}
        options |= {"max_seqlen_q": 300, "max_seqlen_k": 333}
        of_jax |= {name: jnp.asarray(x, jnp.int32) for name, x in starts.items()}
        of_torch |= {name: torch.tensor(x, dtype=torch.int32).cuda() for name, x in starts.items()}

    def functions(slopes: Any, ids: Any) -> dict[str, Any]:
        return {
            "score_mod": lambda s, b, h, i, j: s * 0.5 + slopes[h] * (j - i),
            "mask_mod": lambda b, h, i, j: (ids[i] == ids[j]) | (j % 5 == 2),
        }

    places = jnp.asarray(ids)

    def loss(q: Any, k: Any, v: Any, slopes: Any, more: Any) -> Any:
        found = attention(q, k, v, **functions(slopes, places), **options, **more)
        out, *most = found if isinstance(found, tuple) else (found,)
        return out.astype(jnp.float32).sum(), (out, *most)

    trained = {name: x for name, x in of_jax.items() if name == "sink"}
    run = jax.jit(jax.value_and_grad(
        lambda q, k, v, slopes, sink: loss(q, k, v, slopes, {**of_jax, **sink}), (0, 1, 2, 3, 4), has_aux=True
    ))  # fmt: skip
    (_, values), (*found, of_sink) = run(q, k, v, jnp.asarray(slopes), trained)
    leaves = [x.clone().requires_grad_() for x in (*theirs[:3], torch.from_numpy(slopes).cuda())]
    if beside == "sink":
        of_torch["sink"].requires_grad_()
    expected = nvrtc_attn.torch.attention(
        *leaves[:3], **functions(leaves[3], torch.from_numpy(ids).cuda()), **options, **of_torch
    )
    out, *most = expected if isinstance(expected, tuple) else (expected,)
    out.float().sum().backward()
    for mine, theirs_of_it in zip(values, (out, *most), strict=True):
        np.testing.assert_array_equal(numbers(mine), numbers(theirs_of_it))
    leaves += [of_torch["sink"]] if beside == "sink" else []
    for mine, leaf in zip((*found, *of_sink.values()), leaves, strict=True):
        np.testing.assert_array_equal(numbers(mine), numbers(leaf.grad))


def test_eager_adapter_and_jit_agree_with_the_core_call(bridge: None) -> None:
    (q, k, v, _), _ = make()
    expected = numbers(nvrtc_attn.attention(q, k, v, window_size=(50, 3), softcap=10.0))
    call = jax.jit(lambda q, k, v: attention(q, k, v, window_size=(50, 3), softcap=10.0))
    np.testing.assert_array_equal(numbers(call(q, k, v)), expected)
    np.testing.assert_array_equal(numbers(attention(q, k, v, window_size=(50, 3), softcap=10.0)), expected)


def test_jit_keeps_the_order_of_its_stream(bridge: None) -> None:
    """Attention between matrix products of one program, many times: each sees what the one before has written."""
    (q, k, v, _), _ = make("float32")

    def chain(call: Any) -> Any:
        def run(q: Any) -> Any:
            for _ in range(6):
                q = jnp.tanh(call(q, k, v) @ jnp.eye(64) * 3)
            return q

        return jax.jit(run)

    def dense(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(x, 2, 2) for x in (k, v))
        p = jax.nn.softmax(jnp.einsum("bmhd,bnhd->bhmn", q, k, precision="highest") / 8, -1)
        return jnp.einsum("bhmn,bnhd->bmhd", p, v, precision="highest")

    mine, truth = chain(attention), numbers(chain(dense)(q))
    first = numbers(mine(q))
    np.testing.assert_allclose(first, truth, atol=5e-3)
    for _ in range(20):
        np.testing.assert_array_equal(numbers(mine(q)), first)


def test_dropout_words_on_the_device(bridge: None) -> None:
    (q, k, v, _), theirs = make()
    seed, offset = (3 << 32) + 11, 8
    expected = numbers(nvrtc_attn.attention(*theirs[:3], dropout_p=0.2, rng=(seed, offset)))
    words = (jnp.asarray([11, 3], np.uint32), jnp.asarray([8, 0], np.uint32))
    found = jax.jit(lambda words: attention(q, k, v, dropout_p=0.2, rng=words))(words)
    np.testing.assert_array_equal(numbers(found), expected)
    slope = jax.jit(jax.grad(lambda v, key: attention(q, k, v, dropout_p=0.2, rng=key).astype(np.float32).sum()))
    first, again, other = (numbers(slope(v, jax.random.key(n))) for n in (1, 1, 2))
    np.testing.assert_allclose(first, again, atol=1e-2)
    assert abs(first - other).max() > 0.1


def test_vmap_scan_and_the_other_platform(bridge: None) -> None:
    (q, k, v, _), _ = make("float32")
    expected = numbers(attention(q, k, v))
    stacked = jnp.stack([q, q])
    np.testing.assert_array_equal(numbers(jax.jit(jax.vmap(lambda q: attention(q, k, v)))(stacked))[1], expected)
    _, scanned = jax.jit(lambda x: jax.lax.scan(lambda c, q: (c, attention(q, k, v)), 0, x))(stacked)
    np.testing.assert_array_equal(numbers(scanned)[1], expected)
    with jax.default_device(jax.devices("cpu")[0]):
        host = [jnp.asarray(np.asarray(x)) for x in (q, k, v)]
        np.testing.assert_allclose(numbers(attention(*host)), expected, atol=1e-4)


def test_donated_input(bridge: None) -> None:
    (q, k, v, _), _ = make()
    expected = numbers(attention(q, k, v))
    found = jax.jit(attention, donate_argnums=0)(q + 0, k, v)
    np.testing.assert_array_equal(numbers(found), expected)


def test_exported_program_runs_and_has_its_gradients(bridge: None) -> None:
    """Of `jax.export`, which is told that the custom call may be in it; serialised where flatbuffers is installed."""
    (q, k, v, _), _ = make()

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (attention(q, k, v, causal=True).astype(np.float32) ** 2).sum()

    check = jax.export.DisabledSafetyCheck.custom_call("nvrtc_attn.launch")
    exported = jax.export.export(jax.jit(jax.value_and_grad(loss)), disabled_checks=[check])(q, k, v)
    if importlib.util.find_spec("flatbuffers"):
        exported = jax.export.deserialize(exported.serialize())
    value, gradient = exported.call(q, k, v)
    expected, slope = jax.value_and_grad(loss)(q, k, v)
    np.testing.assert_allclose(numbers(value), numbers(expected), rtol=1e-4)
    np.testing.assert_allclose(numbers(gradient), numbers(slope), atol=2e-2)


@pytest.mark.parametrize("case", ["plain", "shared bias", "one key head", "dropout", "dropout of heads"])
def test_two_gpus_split_batch_or_heads_without_a_gather(case: str, bridge: None) -> None:
    if len(jax.devices("gpu")) < 2:
        pytest.skip("needs two GPUs")
    (q, k, v, bias), _ = make()
    if case == "one key head":
        k, v = k[:, :, :1], v[:, :, :1]
    dropout: dict[str, Any] = {"dropout_p": 0.2, "rng": (5, 2**32 - 17)}
    options = dropout if case.startswith("dropout") else {"causal": True}
    mesh = jax.sharding.Mesh(np.array(jax.devices("gpu")[:2]), ("x",))
    heads = case in ("one key head", "shared bias", "dropout of heads")

    def place(x: Any, dims: tuple[Any, ...]) -> Any:
        spec = jax.sharding.PartitionSpec(*(d if n > 1 else None for d, n in zip(dims, x.shape, strict=True)))
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    def loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
        given = bias if case == "shared bias" else None
        return (attention(q, k, v, bias=given, **options).astype(np.float32) ** 2).sum()

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    expected = gradient(q, k, v, bias)
    rows = (None, None, "x", None) if heads else ("x", None, None, None)
    put = [*(place(x, rows) for x in (q, k, v)), place(bias, (None, "x" if heads else None, None, None))]
    compiled = gradient.lower(*put).compile()
    assert "all-gather" not in compiled.as_text()
    for found, wanted in zip(jax.tree.leaves(compiled(*put)), jax.tree.leaves(expected), strict=True):
        scale = max(float(abs(numbers(wanted)).max()), 1e-3)
        assert float(abs(numbers(found) - numbers(wanted)).max()) <= 1e-2 * scale


def test_used_keys_of_a_dense_batch(bridge: None) -> None:
    (q, k, v, bias), _ = make()
    used = jnp.array([333, 77], np.int32)
    keep = (jnp.arange(333) < used[:, None])[:, None, None]

    def loss(q: Any, k: Any, v: Any, bias: Any, **options: Any) -> Any:
        return (attention(q, k, v, bias=bias, **options).astype(np.float32) ** 2).sum()

    found = jax.grad(loss, (0, 1, 2, 3))(q, k, v, bias, seqused_k=used)
    expected = jax.grad(loss, (0, 1, 2, 3))(q, k, v, bias, mask=keep)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(numbers(a), numbers(b), atol=2e-2)


COLLECTIVES = """
import sys
if sys.argv[1] == "torch":
    import torch
    torch.zeros(1, device="cuda")
elif sys.argv[1] == "jax_tvm_ffi":
    import jax_tvm_ffi
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P

x, lax = jnp.arange(2.0**20).reshape(4, -1), jax.lax
programs = {
    "psum": (lambda y: lax.psum(y, "s"), P(), x[:2] + x[2:]),
    "all_gather": (lambda y: lax.all_gather(y, "s", tiled=True) * (1 + lax.axis_index("s")), P("s"), [x, 2 * x]),
    "psum_scatter": (lambda y: lax.psum_scatter(y, "s", tiled=True), P("s"), x[:2] + x[2:]),
    "all_to_all": (lambda y: lax.all_to_all(y, "s", 0, 0, tiled=True), P("s"), x[jnp.array([0, 2, 1, 3])]),
    "ppermute": (lambda y: lax.ppermute(y, "s", [(0, 1), (1, 0)]), P("s"), [x[2:], x[:2]]),
}
mesh = Mesh(np.array(jax.devices()[:2]), ("s",))
for name, (function, spec, expected) in programs.items():
    print(name, file=sys.stderr, flush=True)
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("s"), out_specs=spec))
    expected = np.concatenate(expected) if isinstance(expected, list) else expected
    for _ in range(3):
        np.testing.assert_array_equal(run(x), expected)
    with open("/proc/self/maps") as maps:
        print({line.split()[-1] for line in maps if "nccl" in line}, file=sys.stderr, flush=True)
"""
ALONE = "NVRTC_ATTN_TEST_ALONE"


def alone(repository: Path, *command: str) -> None:
    """Run Python in a process of its own. XLA ends one whose devices wait for each other; its last words are kept."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {
        "PYTHONPATH": python_path(repository),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        ALONE: "1",
    }
    waits = "import faulthandler; faulthandler.dump_traceback_later(240, exit=True); "
    start = waits + "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_module('pytest', run_name='__main__')"
    how = ["-c", waits + COLLECTIVES] if command[0] == "collectives" else ["-c", start, "pytest"]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", *how, *command[1:]], cwd=repository, env=environment, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout[-8000:]}"


@pytest.mark.parametrize("before", ["nothing", "jax_tvm_ffi", "torch"])
def test_jax_by_itself_has_two_gpus_work_together(before: str, repository: Path) -> None:
    """Nothing of this package: where this fails, and torch brings a communication library of its own, look there."""
    if len(jax.devices("gpu")) < 2:
        pytest.skip("needs 2 GPUs")
    if before == "jax_tvm_ffi":
        pytest.importorskip("jax_tvm_ffi")
    alone(repository, "collectives", before)


@pytest.mark.parametrize("places", ["branches", "device", "device and dropout", "ring"])
@pytest.mark.parametrize("devices", [1, 2])
def test_devices_that_share_a_sequence(
    devices: int, places: str, bridge: None, repository: Path, request: pytest.FixtureRequest
) -> None:
    """Where rows lie is known to the program, or a number on the device; or keys go around: results of one call.

    That number is how many keys they see, or, with dropout, where they begin.
    """
    if len(jax.devices("gpu")) < devices:
        pytest.skip(f"needs {devices} GPUs")
    if devices > 1 and ALONE not in os.environ:
        alone(repository, "pytest", "-q", "-s", f"{__file__}::{request.node.name}")
        return
    mesh = jax.sharding.Mesh(np.array(jax.devices("gpu")[:devices]), ("s",))
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((2, 1024, 8, 64), (2, 1024, 2, 64), (2, 1024, 2, 64))
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=False)]
    bias = jax.random.normal(keys[4], (1, 8, 1024, 1024), np.float32)
    options: dict[str, Any] = {"causal": True, "window_size": (700, None), "softcap": 20.0}
    if places == "device and dropout":
        options |= {"dropout_p": 0.2, "rng": (5, 2**32 - 17)}

    def loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return (attention(q, k, v, bias=bias, **options).astype(np.float32) ** 2).sum()

    def shared(*values: Any) -> Any:
        def local(q: Any, k: Any, v: Any, bias: Any) -> Any:
            out = context_parallel_attention(
                q,
                k,
                v,
                bias=bias,
                axis_name="s",
                strategy="ring" if places == "ring" else "all_gather",
                places="auto" if places == "ring" else places.split()[0],
                **options,
            )
            return jax.lax.psum((out.astype(np.float32) ** 2).sum(), "s")

        rows, scores = jax.sharding.PartitionSpec(None, "s"), jax.sharding.PartitionSpec(None, None, "s")
        ordered = [zigzag(x, devices, axis) for x, axis in zip(values, (1, 1, 1, 2), strict=True)]
        return jax.shard_map(
            local, mesh=mesh, in_specs=(rows, rows, rows, scores), out_specs=jax.sharding.PartitionSpec()
        )(*ordered)

    expected = jax.value_and_grad(loss, (0, 1, 2, 3))(*arrays, bias)
    found = jax.jit(jax.value_and_grad(shared, (0, 1, 2, 3)))(*arrays, bias)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(float(abs(numbers(b)).max()), 1e-3)
        assert float(abs(numbers(a) - numbers(b)).max()) <= 1e-2 * scale


@pytest.fixture(scope="module")
def of_two(repository: Path) -> dict[str, Any]:
    """The cases of two devices of tests/unit/test_jax_parallel.py, in a process that has two GPUs."""
    if len(jax.devices("gpu")) < 2:
        pytest.skip("needs 2 GPUs")
    pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed: no launch from inside jit")
    from test_jax_parallel import TWO, run

    environment = {**os.environ, "PYTHONPATH": python_path(repository), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return run(TWO, environment)


@pytest.mark.parametrize(
    "case", ["swapped", "dropout swapped", "sink of the ring", "batch beside", "heads beside", "on the device"]
)
def test_two_gpus_together_compute_the_whole(case: str, of_two: dict[str, Any]) -> None:
    """The loss, out and all gradients, by every strategy; what dropout hides is the same, element by element."""
    assert max(of_two[f"two, {case}"]) < 2e-4, of_two[f"two, {case}"]
