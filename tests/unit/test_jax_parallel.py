"""A sequence that CPU devices share, in `jax.shard_map`: results of one device, and its dropout mask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import selection
from child_environment import python_path

jax = pytest.importorskip("jax", reason="jax is not installed")

if not hasattr(jax, "shard_map"):
    pytest.skip("this jax has no jax.shard_map", allow_module_level=True)

KEPT: dict[str, Any] = {"dropout_p": 0.4, "rng": [3, 2**33 - 5]}
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
    # Of a mesh with more axes: "d" has the batch, "m" the heads.
    "batch beside": ("all_gather", "zigzag", 2, ["eye", "alibi"], {"causal": True, "mesh": [2, 1, 2], **KEPT}),
    "heads beside": ("all_gather", "contiguous", 2, ["eye", "bias"], {"causal": True, "mesh": [1, 2, 2], **KEPT}),
    "both beside": ("all_gather", "zigzag", 2, ["eye"], {"causal": True, "mesh": [2, 2, 2], "rng": "key", **KEPT}),
    "both beside and none": ("ring", "zigzag", 2, ["eye", "table of all"], {"mesh": [2, 2, 1], **KEPT}),
    "operators": ("all_gather", "zigzag", 2, ["eye", "operators"], {"causal": True, "mesh": [2, 2, 2], **KEPT}),
    "table of all": ("all_gather", "zigzag", 2, ["table of all"], {"causal": True, "mesh": [2, 2, 2]}),
    "bias of all beside": ("all_gather", "zigzag", 2, ["bias of all rows", "mask"], {"mesh": [2, 2, 2], **KEPT}),
    "mask of batches": ("all_gather", "contiguous", 2, ["ids"], {"mesh": [2, 2, 2], **KEPT}),
    "ring beside": ("ring", "zigzag", 2, ["eye", "table of all"], {"causal": True, "mesh": [2, 2, 2], **KEPT}),
    "swapped beside": ("ulysses", "zigzag", 4, ["eye", "table of all"], {"causal": True, "mesh": [2, 2, 2], **KEPT}),
    "sink": ("all_gather", "zigzag", 2, ["sink"], {"causal": True}),
    "sink of the ring": ("ring", "zigzag", 2, ["sink"], {"causal": True, **KEPT}),
    "sink of the ring, bfloat16": ("ring", "contiguous", 8, ["sink", "bfloat16"], {"causal": True}),
    "sink swapped": ("ulysses", "zigzag", 4, ["sink", "alibi"], {"causal": True}),
    "sink and dropout swapped": ("ulysses", "zigzag", 4, ["sink", "eye"], {"causal": True, **KEPT}),
    "sink beside": ("all_gather", "zigzag", 2, ["sink", "bias"], {"causal": True, "mesh": [2, 2, 2], **KEPT}),
    "sink of the ring beside": ("ring", "zigzag", 2, ["sink", "mask"], {"mesh": [2, 2, 2]}),
    "sink alone": ("all_gather", "contiguous", 2, ["sink", "fewer keys"], {"causal": True}),
    "sink alone in the ring": ("ring", "zigzag", 2, ["sink", "fewer keys"], {"causal": True}),
    "sink on the device": ("all_gather", "zigzag", 2, ["sink"], {"causal": True, "places": "device"}),
    "on the device beside": ("all_gather", "zigzag", 2, [], {"causal": True, "mesh": [2, 2, 2], "places": "device"}),
}
ALONG: dict[str, Any] = {"mesh": [1, 1, 2]}
# Where rows begin is a number on the device, which is not how many keys they see.
PLACED: dict[str, tuple[str, str, int, list[str], dict[str, Any]]] = {
    "dropout on the device": ("all_gather", "zigzag", 2, ["eye"], {"causal": True, "places": "device", **KEPT}),
    "window and dropout on the device": (
        "all_gather",
        "contiguous",
        4,
        ["eye", "mask", "sink"],
        {"window_size": [9, 3], "places": "device", **KEPT},
    ),
    "right window on the device": (
        "all_gather",
        "zigzag",
        2,
        ["bias"],
        {"window_size": [None, 5], "places": "device", "softcap": 9.0},
    ),
    "functions on the device": (
        "all_gather",
        "zigzag",
        2,
        ["alibi", "fewer keys"],
        {"causal": True, "places": "device", "deterministic": True},
    ),
    "documents on the device": ("all_gather", "zigzag", 2, ["documents", "eye"], {"places": "device", **KEPT}),
    "all beside on the device": (
        "all_gather",
        "zigzag",
        2,
        ["eye", "table of all", "bias of all rows", "mask"],
        {"causal": True, "window_size": [30, None], "mesh": [2, 2, 2], "places": "device", **KEPT},
    ),
}
# The same of two devices, which tests/gpu/test_jax.py runs on two GPUs.
TWO: dict[str, tuple[str, str, int, list[str], dict[str, Any]]] = {
    "two, swapped": ("ulysses", "zigzag", 2, [], {"causal": True, "window_size": [20, None], **ALONG}),
    "two, dropout swapped": ("ulysses", "zigzag", 4, ["eye", "table"], {"causal": True, **KEPT, **ALONG}),
    "two, sink of the ring": ("ring", "zigzag", 2, ["sink"], {"causal": True, **KEPT, **ALONG}),
    "two, batch beside": ("all_gather", "zigzag", 2, ["eye", "table of all"], {"mesh": [2, 1, 1], **KEPT}),
    "two, heads beside": ("ring", "zigzag", 2, ["eye", "table of all", "sink"], {"mesh": [1, 2, 1], **KEPT}),
    "two, on the device": (
        "all_gather",
        "zigzag",
        2,
        ["eye", "table", "mask"],
        {"causal": True, "window_size": [30, None], "places": "device", **KEPT, **ALONG},
    ),
}
ALL = {**CASES, **TWO, **PLACED}
# What runs without --full: every feature with every strategy that some case has it with, and every layout with every
# strategy. The others, which --full runs, are further combinations of the same.
SAMPLE = [
    # all_gather, with branches
    "causal", "window", "bias", "table", "documents", "sink alone", "both beside", "bias of all beside",
    # all_gather, places on the device
    "causal on the device", "window and dropout on the device", "right window on the device", "functions on the device",
    "documents on the device", "all beside on the device",
    # ring
    "ring", "ring of functions", "ring with dropout", "sink of the ring, bfloat16", "sink alone in the ring",
    "ring beside",
    # ulysses
    "heads", "two, swapped", "two, dropout swapped", "sink swapped", "swapped beside",
]  # fmt: skip


def family(case: str) -> str:
    """The strategy; of all_gather also where places are known."""
    strategy, _, _, _, options = ALL[case]
    return f"{strategy}, {options['places']}" if "places" in options else strategy.replace("auto", "ulysses")


def features_of(case: str) -> set[str]:
    """What a case has of operands and options, and its layout."""
    _, layout, _, more, options = ALL[case]
    found = {
        layout,
        *more,
        *(name for name in ("causal", "window_size", "softcap", "deterministic") if options.get(name)),
    }
    if "mesh" in options:
        found |= {f"{axis} beside" for axis, size in zip(("batch", "heads"), options["mesh"], strict=False) if size > 1}
    # Functions of one array or another; v of the identity only shows what dropout hides.
    names = {"alibi": "score_mod", "table": "score_mod", "table of all": "score_mod", "operators": "score_mod"}
    names |= {"documents": "mask_mod", "ids": "mask_mod", "eye": "dropout"}
    return {names.get(x, x) for x in found} | ({"dropout"} if "dropout_p" in options else set())


PROGRAM = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
if os.environ.get("JAX_PLATFORMS") == "cpu":  # each program runs once: three cases 29 s of one core, 59 s with it
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from nvrtc_attn.heuristics import choose_backward, choose_forward
from nvrtc_attn.jax import attention, context_parallel_attention
from nvrtc_attn.jax import handlers, passes
from nvrtc_attn.jax.parallel import zigzag

def without_kernel(traced):  # of a GPU, for one of these passes
    target = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448, "backend": "auto"}
    choices = {"forward_plan": choose_forward, "backward_plan": choose_backward}
    for name, choose in choices.items():
        setattr(handlers, name, lambda problem, index, stream, captured, choose=choose: choose(problem, **target))
    found = []
    for bound in traced:
        try:
            handlers._plan(bound, 0)
        except NotImplementedError as error:
            found.append(f"{bound}: {error}")
    return found

# Each operation outside of jax.jit is compiled by itself, on arrays of 8 devices as a program of 8: inputs are made and
# results are compared in NumPy.
zigzag = jax.jit(zigzag, static_argnums=(1, 2), static_argnames="back")
results, traced = {}, {}
for name, (strategy, layout, heads_kv, more, options) in json.loads(sys.argv[1]).items():
    options = {n: tuple(x) if isinstance(x, list) else x for n, x in options.items()}
    places = {"places": options.pop("places", "auto")}
    sizes = options.pop("mesh", (1, 1, 4))
    mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), ("d", "m", "s"))
    ranks, batch = sizes[2], 2 * sizes[0]
    if sizes != (1, 1, 4):
        places |= {"batch_axis": "d", "heads_axis": ("m",)}
    if options.get("rng") == "key":
        options["rng"] = jax.random.key(7)
    random = np.random.default_rng(0)
    head_dim_v = 48 if "eye" in more else 24
    shapes = {"q": (batch, 48, 8, 16), "k": (batch, 48, heads_kv, 16), "v": (batch, 48, heads_kv, head_dim_v)}
    if "fewer keys" in more:  # the first rows see none
        shapes |= {name: (batch, 16, *shapes[name][2:]) for name in "kv"}
    if "sink" in more:
        shapes["sink"] = (8,)
    if "bias" in more:
        shapes["bias"] = (1, 8, 48, 48)
    if "bias of all rows" in more:
        shapes["bias"] = (batch, 1, 1, 48)
    if "alibi" in more:
        shapes["of_mod"] = (8,)
    if "table" in more:
        shapes["of_mod"] = (8, 96)
    if "table of all" in more:
        shapes["of_mod"] = (batch, 8, 96)
    x = {n: random.standard_normal(s, np.float32) for n, s in shapes.items()}
    if "eye" in more:  # out is then what dropout left of the probabilities
        x["v"] = np.broadcast_to(np.eye(48, dtype=np.float32)[:, None], shapes["v"])
    x = {n: jnp.asarray(y.astype(jnp.bfloat16) if "bfloat16" in more else y) for n, y in x.items()}
    ids = jnp.arange(48) // 7
    ids_of_batch = (jnp.arange(48) + 3 * jnp.arange(batch)[:, None]) // 7

    def functions(x):
        found = {n: y for n, y in x.items() if n != "of_mod"}
        if "alibi" in more:
            found["score_mod"] = lambda s, b, h, q, k: s + 0.1 * x["of_mod"][h] * (k - q)
        if "table" in more:
            found["score_mod"] = lambda s, b, h, q, k: s + jnp.tanh(x["of_mod"][h, q - k + 48])
        if "table of all" in more:
            found["score_mod"] = lambda s, b, h, q, k: s + jnp.tanh(x["of_mod"][b, h, q - k + 48])
        if "operators" in more:
            found["score_mod"] = lambda s, b, h, q, k: s + 0.1 * (b * 8 + h) * np.sin(q - k)
        if "ids" in more:
            found["mask_mod"] = lambda b, h, q, k: ids_of_batch[b, q] == ids_of_batch[b, k]
        if "documents" in more:
            found["mask_mod"] = lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)
        return found
    mask = {"mask": jnp.asarray(random.standard_normal((batch, 1, 48, 48)) > -1)} if "mask" in more else {}
    dout = jnp.asarray(random.standard_normal((batch, 48, 8, head_dim_v), np.float32))

    def loss(x):
        out, lse = attention(**functions(x), **mask, **options, return_lse=True)
        return (out * dout).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), out

    def order(n, y, back=False):
        if layout != "zigzag" or n in ("of_mod", "sink") or (n in ("bias", "mask") and y.shape[2] == 1):
            return y
        return zigzag(y, ranks, 2 if n in ("bias", "mask") else 1, back=back)

    def spec(n, y):
        if n == "of_mod":
            return P()
        if n == "sink":
            return P("m")
        if n in ("bias", "mask"):
            return P(*(axis if size > 1 else None for axis, size in zip("dms", y.shape)))
        return P("d", "s", "m")

    def sharded(x, mask, dout):
        def local(x, mask, dout):
            out, lse = context_parallel_attention(
                **functions(x), **mask, **options, axis_name="s", strategy=strategy, layout=layout, return_lse=True,
                **places
            )
            total = (out * dout).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()
            return jax.lax.psum(total, ("d", "m", "s")), out
        specs = tuple({n: spec(n, y) for n, y in g.items()} for g in (x, mask)) + (spec("q", dout),)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), spec("q", dout)))(x, mask, dout)

    (value, out), gradients = jax.value_and_grad(loss, has_aux=True)(x)
    moved = [{n: order(n, y) for n, y in g.items()} for g in (x, mask)]
    if places["places"] == "device":  # and the pieces of all devices are one call in each pass
        program = str(jax.make_jaxpr(jax.grad(lambda *y: sharded(*y)[0]))(*moved, order("q", dout)))
        assert program.count("pure_callback[") + program.count("ffi_call[") == 2, name
        wrongs = ({"strategy": "ring"}, {"q": x["q"][:, :0]}) if name == "causal on the device" else ()
        for wrong in wrongs:
            given = {"strategy": strategy, **options, **places, **{n: y for n, y in wrong.items() if n != "q"}}
            of_wrong = {n: wrong.get(n, x[n]) for n in "qkv"}
            try:
                shared = jax.shard_map(
                    lambda y: context_parallel_attention(**y, **given, axis_name="s"), mesh=mesh,
                    in_specs=({n: spec(n, x[n]) for n in "qkv"},), out_specs=spec("q", dout),
                )
                jax.eval_shape(shared, of_wrong)
            except ValueError as error:
                assert "places: 'device', but" in str(error), error
            else:
                raise AssertionError(f"{wrong} was taken")
    if name == "both beside":
        of_b = {"score_mod": lambda s, b, h, q, k: s + b}
        of_shard = {"mask_mod": lambda b, h, q, k: b * 0 + q >= k, "batch_axis": "d", "heads_axis": "s"}
        wrongs = (
            ({"dropout_p": 0.5, "rng": 1}, "rng: q, k or v are sharded over 'd', 'm'"),
            ({"dropout_p": 0.5, "rng": 1, "batch_axis": "d"}, "rng: q, k or v are sharded over 'm'"),
            (of_b, "indices of the device"), ({**of_b, "heads_axis": "m"}, "sharded over 'd', and"),
            (of_shard, "An axis of the mesh shares one thing"), ({"batch_axis": ("d", "d")}, "shares one thing"),
        )
        for wrong, words in wrongs:
            try:
                shared = jax.shard_map(
                    lambda y: context_parallel_attention(**y, **wrong, axis_name="s"), mesh=mesh,
                    in_specs=({n: spec(n, x[n]) for n in "qkv"},), out_specs=spec("q", dout),
                )
                jax.eval_shape(shared, {n: x[n] for n in "qkv"})
            except ValueError as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"{wrong} was taken")
    lowered = jax.jit(jax.value_and_grad(sharded, has_aux=True)).lower(*moved, order("q", dout))
    # An array of no indices beside shard_map, which jnp's .at[:, :n] makes: XLA died of it (JAX 0.11.2).
    assert "tensor<0xi32>" not in lowered.as_text(), name
    run = lowered.compile()
    if places["places"] == "device" or name == "causal":  # whether there is a branch for each device
        assert ("conditional(" in run.as_text()) == (name == "causal"), name
    (found, out_s), grads = jax.device_get(run(*moved, order("q", dout)))
    pairs = [(found, value), (order("q", out_s, True), out)]
    pairs += [(order(n, grads[n], True), gradients[n]) for n in x]
    pairs = [[np.asarray(y, np.float32) for y in pair] for pair in pairs]
    results[name] = [float(np.abs(a - b).max() / (1 + np.abs(b).max())) for a, b in pairs]
    if "dropout_p" in options:  # the same elements are dropped, bit for bit
        results[name].append(float(((pairs[1][0] == 0) != (pairs[1][1] == 0)).sum()))
    before = set().union(*traced.values())
    traced[name] = [bound for bound in passes._passes.values() if bound not in before]
assert all(traced.values()), traced
results["without a kernel"] = {name: without_kernel(new) for name, new in traced.items()}
print(json.dumps(results))
"""

EMPTY = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import itertools, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from nvrtc_attn.jax import attention, context_parallel_attention

mesh = Mesh(np.array(jax.devices()), ("s",))
sink = jnp.arange(4.0)
lengths = ((0, 8), (8, 0), (0, 0))
strategies, layouts = ("all_gather", "ring", "ulysses"), ("zigzag", "contiguous")
for (rows, keys), strategy, layout in itertools.product(lengths, strategies, layouts):
    x = [jnp.ones((2, n, heads, 8)) for n, heads in ((rows, 4), (keys, 2), (keys, 2))]

    def local(q, k, v, sink):
        return context_parallel_attention(
            q, k, v, sink=sink, axis_name="s", strategy=strategy, layout=layout, causal=True, return_lse=True
        )
    def whole(q, k, v, sink):
        return attention(q, k, v, sink=sink, causal=True, return_lse=True)
    tokens = P(None, "s")
    shared = jax.shard_map(local, mesh=mesh, in_specs=(tokens,) * 3 + (P(),), out_specs=(tokens, P(None, None, "s")))
    results = []
    for function in (whole, shared):
        gradients = jax.grad(lambda *y: sum(z.sum() for z in function(*y)), range(4))
        results.append(jax.tree.leaves(jax.jit(lambda *y: (function(*y), gradients(*y)))(*x, sink)))
    for a, b in zip(*results):
        assert a.shape == b.shape and np.allclose(a, b), (rows, keys, strategy, layout)
print("all alike")
"""

REFUSED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from nvrtc_attn.jax import context_parallel_attention

mesh, tokens = Mesh(np.array(jax.devices()), ("s",)), P(None, "s")
x = {name: jnp.ones((2, 8, heads, 8)) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
wrongs = [
    ({"v": jnp.ones((2, 16, 2, 8)), "strategy": strategy}, ValueError, "k, v: shapes (2, 4, 2, 8) and (2, 8, 2, 8)")
    for strategy in ("all_gather", "ring", "ulysses")
]
wrongs += [
    ({"q": None}, TypeError, "q: got None"),
    ({"bias": "x"}, TypeError, "bias: got 'x' of type str"),
    ({"bias": jnp.ones((4, 8))}, ValueError, "bias: shape (4, 8) has rank 2"),
    ({"mask": jnp.ones((4, 4, 8), bool)}, ValueError, "mask: shape (4, 4, 8) has rank 3"),
    ({"axis_name": ("s",)}, TypeError, "axis_name: got ('s',)"),
    ({"axis_name": None}, TypeError, "axis_name: got None"),
]
for wrong, kind, words in wrongs:
    given = {name: wrong.get(name, y) for name, y in x.items()}
    options = {"axis_name": "s", **{name: y for name, y in wrong.items() if name not in "qkv"}}
    sharded = {name: y for name, y in given.items() if y is not None}

    def local(y):
        return context_parallel_attention(**{**dict.fromkeys("qkv"), **y}, **options)
    try:
        shared = jax.shard_map(local, mesh=mesh, in_specs=({n: tokens for n in sharded},), out_specs=tokens)
        jax.block_until_ready(jax.jit(shared)(sharded))
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{words}: nothing was raised")
print("all refused")
"""


@pytest.fixture(scope="module")
def found(repository: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": python_path(repository)}
    return run(selection.cases_asked_for(request, {**CASES, **TWO}), environment)


@pytest.fixture(scope="module")
def placed(repository: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of a process of its own: a slow machine takes minutes for each."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": python_path(repository)}
    return run(selection.cases_asked_for(request, PLACED), environment)


def run(cases: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """The errors of each case, of a process of its own."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow(sample=[x for x in SAMPLE if x not in PLACED])
@pytest.mark.parametrize("case", [*CASES, *TWO])
@pytest.mark.turns(3)
def test_devices_together_compute_the_whole(case: str, found: dict[str, Any]) -> None:
    """The loss, out, dq, dk, dv, dbias and of captured arrays, relative to their largest value."""
    check(case, found, 1e-2 if "bfloat16" in case else 2e-5)


@pytest.mark.slow(sample=[x for x in SAMPLE if x in PLACED])
@pytest.mark.parametrize("case", PLACED)
def test_one_program_of_calls_that_read_where_their_rows_begin(case: str, placed: dict[str, Any]) -> None:
    """The same, and what dropout hides is the same element by element."""
    check(case, placed, 2e-5)


def check(case: str, results: dict[str, Any], most: float) -> None:
    """And kernels compute all passes of the program, which no CPU shows: its path takes what no kernel reads."""
    assert all(x < most for x in results[case]), results[case]  # a NaN is none of these, and may not be the max
    assert not results["without a kernel"][case]


def test_what_runs_without_full_has_every_feature_by_every_strategy() -> None:
    """As far as the full matrix has it."""

    def features(cases: Iterable[str]) -> set[tuple[str, str]]:
        return {(family(case), feature) for case in cases for feature in features_of(case)}

    assert set(SAMPLE) <= set(ALL)
    assert features(SAMPLE) == features(ALL)


@pytest.mark.parametrize(
    ("program", "said"), [(EMPTY, "all alike"), (REFUSED, "all refused")], ids=["empty", "refused"]
)
@pytest.mark.turns(3)
def test_small_programs_of_two_devices(program: str, said: str, repository: Path) -> None:
    """No rows and no keys, where a sink is all that rows see, by every strategy and layout; and what is refused by
    name, values of more tokens than keys among it, whose first tokens were taken."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": python_path(repository)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.stdout.strip() == said, done.stderr[-3000:]
