"""A sequence that four CPU devices share, in `jax.shard_map`: results of one device, and its dropout mask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from child_environment import python_path

jax = pytest.importorskip("jax", reason="jax is not installed")

if not hasattr(jax, "shard_map"):
    pytest.skip("this jax has no jax.shard_map", allow_module_level=True)

# Name -> (strategy, layout, key heads, what is given beside q, k and v, options).
CASES: dict[str, tuple[str, str, int, list[str], dict[str, Any]]] = {
    "causal": ("all_gather", "zigzag", 2, [], {"causal": True}),
    "window": ("all_gather", "contiguous", 2, [], {"causal": True, "window_size": [9, None]}),
    "dropout": ("all_gather", "zigzag", 2, [], {"dropout_p": 0.4, "rng": [3, 77], "causal": True}),
    "dropout of a key": ("all_gather", "zigzag", 2, [], {"dropout_p": 0.4, "rng": "key"}),
    "bias": ("all_gather", "zigzag", 2, ["bias"], {"causal": True, "softcap": 9.0}),
    "bias of all rows": ("all_gather", "zigzag", 2, ["bias of all rows"], {}),
    "mask": ("all_gather", "contiguous", 2, ["mask"], {}),
    "heads": ("auto", "zigzag", 4, [], {"causal": True}),
    "alibi": ("all_gather", "zigzag", 2, ["alibi"], {"causal": True}),
    "table": ("all_gather", "contiguous", 2, ["table"], {}),
    "documents": ("all_gather", "zigzag", 2, ["documents"], {"dropout_p": 0.4, "rng": [3, 77]}),
    "causal on the device": ("all_gather", "zigzag", 2, [], {"causal": True, "places": "device"}),
    "bias on the device": (
        "all_gather",
        "zigzag",
        2,
        ["bias", "mask"],
        {"causal": "top_left", "places": "device", "softcap": 9.0},
    ),
    "window on the device": (
        "all_gather",
        "contiguous",
        4,
        ["bias of all rows"],
        {"causal": True, "window_size": [9, None], "places": "device"},
    ),
    "ring": ("ring", "zigzag", 2, ["bias"], {"causal": True, "softcap": 9.0}),
    "ring in bfloat16": ("ring", "zigzag", 2, ["bfloat16"], {"causal": True}),
    "ring with dropout": (
        "ring",
        "contiguous",
        2,
        ["mask"],
        {"dropout_p": 0.4, "rng": [3, 77], "window_size": [20, 5]},
    ),
    "ring of functions": ("ring", "zigzag", 2, ["alibi"], {"causal": True, "deterministic": True}),
    "alibi by heads": ("ulysses", "zigzag", 4, ["alibi"], {"causal": True}),
    "heads and dropout": ("ulysses", "zigzag", 4, [], {"causal": True, "dropout_p": 0.4, "rng": [3, 77]}),
}
PROGRAM = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from nvrtc_attn.jax import attention, context_parallel_attention
from nvrtc_attn.jax.parallel import zigzag

mesh = Mesh(np.array(jax.devices()), ("s",))
results = {}
for name, (strategy, layout, heads_kv, more, options) in json.loads(sys.argv[1]).items():
    options = {n: tuple(x) if isinstance(x, list) else x for n, x in options.items()}
    places = {"places": options.pop("places", "auto")}
    if options.get("rng") == "key":
        options["rng"] = jax.random.key(7)
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = {"q": (2, 48, 8, 16), "k": (2, 48, heads_kv, 16), "v": (2, 48, heads_kv, 24)}
    if "bias" in more:
        shapes["bias"] = (1, 8, 48, 48)
    if "bias of all rows" in more:
        shapes["bias"] = (2, 1, 1, 48)
    if "alibi" in more:
        shapes["of_mod"] = (8,)
    if "table" in more:
        shapes["of_mod"] = (8, 96)
    x = {n: jax.random.normal(key, s) for key, (n, s) in zip(keys, shapes.items())}
    if "bfloat16" in more:
        x = {n: y.astype(jnp.bfloat16) for n, y in x.items()}
    ids = jnp.arange(48) // 7

    def functions(x):
        found = {n: y for n, y in x.items() if n != "of_mod"}
        if "alibi" in more:
            found["score_mod"] = lambda s, b, h, q, k: s + 0.1 * x["of_mod"][h] * (k - q)
        if "table" in more:
            found["score_mod"] = lambda s, b, h, q, k: s + jnp.tanh(x["of_mod"][h, q - k + 48])
        if "documents" in more:
            found["mask_mod"] = lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)
        return found
    mask = {"mask": jax.random.normal(keys[5], (2, 1, 48, 48)) > -1} if "mask" in more else {}
    dout = jax.random.normal(keys[4], (2, 48, 8, 24))

    def loss(x):
        out, lse = attention(**functions(x), **mask, **options, return_lse=True)
        return (out * dout).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), out

    def order(n, y, back=False):
        if layout != "zigzag" or n == "of_mod" or (n in ("bias", "mask") and y.shape[2] == 1):
            return y
        return zigzag(y, 4, 2 if n in ("bias", "mask") else 1, back=back)

    def spec(n, y):
        if n == "of_mod":
            return P()
        if n in ("bias", "mask"):
            return P(None, None, "s" if y.shape[2] > 1 else None, None)
        return P(None, "s", None, None)

    def sharded(x, mask, dout):
        def local(x, mask, dout):
            out, lse = context_parallel_attention(
                **functions(x), **mask, **options, axis_name="s", strategy=strategy, layout=layout, return_lse=True,
                **places
            )
            total = (out * dout).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()
            return jax.lax.psum(total, "s"), out
        specs = tuple({n: spec(n, y) for n, y in g.items()} for g in (x, mask)) + (spec("q", dout),)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), spec("q", dout)))(x, mask, dout)

    (value, out), gradients = jax.value_and_grad(loss, has_aux=True)(x)
    moved = [{n: order(n, y) for n, y in g.items()} for g in (x, mask)]
    if places["places"] == "device":  # and the pieces of all devices are one call in each pass
        program = str(jax.make_jaxpr(jax.grad(lambda *y: sharded(*y)[0]))(*moved, order("q", dout)))
        assert program.count("pure_callback[") + program.count("ffi_call[") == 2, name
        wrongs = ({"dropout_p": 0.5, "rng": 1}, {"causal": False}, {"score_mod": lambda s, b, h, q, k: s + q})
        for wrong in wrongs if name == "causal on the device" else ():
            given = {**options, **wrong, **places}
            try:
                jax.shard_map(
                    lambda y: context_parallel_attention(**y, **given, axis_name="s"), mesh=mesh,
                    in_specs=({n: spec(n, x[n]) for n in "qkv"},), out_specs=spec("q", dout),
                )({n: x[n] for n in "qkv"})
            except ValueError as error:
                assert "places: 'device', but" in str(error), error
            else:
                raise AssertionError(f"{wrong} was taken")
    (found, out_s), grads = jax.jit(jax.value_and_grad(sharded, has_aux=True))(*moved, order("q", dout))
    pairs = [(found, value), (order("q", out_s, True), out)]
    pairs += [(order(n, grads[n], True), gradients[n]) for n in x]
    results[name] = [float(jnp.abs(a - b).max() / (1 + jnp.abs(b).max())) for a, b in pairs]
    if "dropout_p" in options:  # the same elements are dropped, bit for bit
        results[name].append(float(((pairs[1][0] == 0) != (pairs[1][1] == 0)).sum()))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def found(repository: Path) -> dict[str, Any]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": python_path(repository)}
    command = [sys.executable, "-c", PROGRAM, json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("case", CASES)
def test_devices_together_compute_the_whole(case: str, found: dict[str, Any]) -> None:
    """The loss, out, dq, dk, dv, dbias and of captured arrays, relative to their largest value."""
    assert max(found[case]) < (1e-2 if "bfloat16" in case else 2e-5), found[case]
