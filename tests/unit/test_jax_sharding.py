"""JAX's automatic sharding on four CPU devices: nothing is gathered, and the numbers are those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import selection
from child_environment import python_path
from differences import number

jax = pytest.importorskip("jax", reason="jax is not installed")

SHAPES = {"q": (4, 32, 4, 16), "k": (4, 40, 2, 16), "v": (4, 40, 2, 24)}
# Name -> (mesh axes of batch and heads, shapes that differ, options). The mesh is 2 x 2.
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "batch and heads": ("x", "y", {"k": (4, 40, 4, 16), "v": (4, 40, 4, 24)}, {"causal": True}),
    "grouped heads": ("x", "y", {}, {"causal": True, "softcap": 5.0}),
    "one key head": ("x", "y", {"k": (4, 40, 1, 16), "v": (4, 40, 1, 24)}, {}),
    "batch over the mesh": (("x", "y"), None, {}, {"window_size": (8, 4)}),
    "heads over the mesh": (None, ("x", "y"), {"k": (4, 40, 4, 16), "v": (4, 40, 4, 24)}, {}),
    "bias of all": ("x", "y", {"bias": (4, 4, 32, 40)}, {}),
    "bias of heads": ("x", "y", {"bias": (1, 4, 32, 40)}, {"causal": True}),
    "bias of batches": ("x", "y", {"bias": (4, 1, 1, 40)}, {}),
    "bias of none": ("x", "y", {"bias": (1, 1, 32, 40)}, {}),
    "mask of batches": ("x", "y", {"mask": (4, 1, 1, 40)}, {}),
    "mask of heads": ("x", "y", {"mask": (1, 4, 32, 40)}, {}),
    "sink": ("x", "y", {"sink": (4,)}, {"causal": True}),
    "used keys": ("x", "y", {"seqused_k": (4,)}, {"causal": True}),
    "dropout": (("x", "y"), None, {}, {"dropout_p": 0.3, "rng": (5, 2**32 - 17)}),
    "dropout of a key": ("x", None, {}, {"dropout_p": 0.3, "rng": "key"}),
    "dropout of heads": (
        None,
        ("x", "y"),
        {"k": (4, 40, 4, 16), "v": (4, 40, 4, 24)},
        {"dropout_p": 0.3, "rng": (5, 2**32 - 17)},
    ),
    "dropout of groups": ("x", "y", {}, {"dropout_p": 0.3, "rng": "key", "causal": True, "deterministic": True}),
    "dropout of one key head": (
        "x",
        "y",
        {"k": (4, 40, 1, 16), "v": (4, 40, 1, 24), "bias": (1, 4, 32, 40)},
        {"dropout_p": 0.3, "rng": (5, 7)},
    ),
    "dropout of packed heads": (
        None,
        "y",
        {"q": (1, 32, 4, 16), "k": (1, 40, 2, 16), "v": (1, 40, 2, 24), "cu_seqlens_q": (4,), "cu_seqlens_k": (4,)},
        {"dropout_p": 0.3, "rng": (5, 7), "max_seqlen_q": 23, "max_seqlen_k": 20, "causal": True},
    ),
    "functions": ("x", "y", {"table": (4, 4, 32)}, {"causal": True}),
    "functions and dropout": (("x", "y"), None, {"table": (4, 4, 32)}, {"dropout_p": 0.3, "rng": (5, 7)}),
    "functions and dropout of heads": ("x", "y", {"table": (4, 4, 32)}, {"dropout_p": 0.3, "rng": (5, 7)}),
}
# Of a mesh whose axes are part of the arrays' types, which is what `jax.make_mesh` makes.
TYPED = ("grouped heads", "bias of heads", "sink", "dropout", "dropout of groups", "functions")
PROGRAM = """
import contextlib, json, os, re, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from nvrtc_attn.heuristics import choose_backward, choose_forward
from nvrtc_attn.jax import attention, handlers, passes

shapes, cases, shardy, typed, inside = json.loads(sys.argv[1])
jax.config.update("jax_use_shardy_partitioner", shardy)
kind = AxisType.Explicit if typed else AxisType.Auto
mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 1), ("x", "y", "z"), axis_types=(kind,) * 3)

def functions(x):
    if "table" not in x:
        return x
    table = x["table"]
    score_mod = lambda s, b, h, q, k: s + table[b, h, q] * jnp.tanh(s)
    return {n: y for n, y in x.items() if n != "table"} | {
        "score_mod": score_mod, "mask_mod": lambda b, h, q, k: q + 4 * b + h >= k - 30
    }

def spec(name, shape, batch, heads):
    if name == "table":
        return NamedSharding(mesh, PartitionSpec())
    if name == "sink":
        return NamedSharding(mesh, PartitionSpec(tuple(heads) if isinstance(heads, list) else heads))
    axes = (batch, heads, None, None) if name in ("bias", "mask", "seqused_k") else (batch, None, heads, None)
    axes = [tuple(x) if isinstance(x, list) else x for x in axes]
    return NamedSharding(mesh, PartitionSpec(*(x if n % 2 ** len(x or "") == 0 else None for x, n in zip(axes, shape))))

def apart(found, expected):
    pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)

def same(found, expected):
    return all(np.allclose(a, b, 1e-4, 1e-4) for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True))

results = {}
for case, (batch, heads, differ, options) in cases.items():
    if options.get("rng") == "key":
        options["rng"] = jax.random.key(7)
    options = {n: tuple(x) if isinstance(x, list) else x for n, x in options.items()}
    keys = jax.random.split(jax.random.key(0), 9)
    arrays = {n: jax.random.normal(key, s) for key, (n, s) in zip(keys, {**shapes, **differ}.items())}
    if "mask" in arrays:
        arrays["mask"] = arrays["mask"] > -1
    if "seqused_k" in arrays:
        arrays["seqused_k"] = jnp.array([40, 0, 17, 33], np.int32)
    for name, offsets in (("cu_seqlens_q", [0, 9, 9, 32]), ("cu_seqlens_k", [0, 20, 20, 40])):
        if name in arrays:
            arrays[name] = jnp.array(offsets, np.int32)
    rest = {n: arrays.pop(n) for n in ("mask", "seqused_k", "cu_seqlens_q", "cu_seqlens_k") if n in arrays}
    floats = arrays

    def loss(floats, rest):
        call = jax.checkpoint(lambda x: attention(**functions(x), **rest, **options, return_lse=True)[0])
        out, lse = call(floats), attention(**functions(floats), **rest, **options, return_lse=True)[1]
        return (out**2).sum() + lse.sum(), (out, lse)

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    expected = gradient(floats, rest)
    if inside:  # of a shard_map that leaves x and y to XLA
        of_all = dict(mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names={"z"})
        gradient = jax.jit(jax.shard_map(jax.value_and_grad(loss, has_aux=True), **of_all))
    put = [{n: jax.device_put(x, spec(n, x.shape, batch, heads)) for n, x in g.items()} for g in (floats, rest)]
    with jax.set_mesh(mesh) if typed else contextlib.nullcontext():
        lowered = gradient.lower(*put)
        forms = {*passes._forms}  # which a program that XLA finds in its cache is told by, split as it is
        compiled = lowered.compile()
        assert forms == {*passes._forms}, case
        found = compiled(*put)
    if typed:
        assert [jax.typeof(y).sharding for y in jax.tree.leaves(found[1])] == [
            jax.typeof(y).sharding for y in jax.tree.leaves(put[0])
        ], case
    moves = re.findall("all-gather|all-to-all|collective-permute", compiled.as_text())
    out = found[0][1][0]
    part = out.addressable_shards[0].data.shape
    results[case] = [sorted(set(moves)), same(found, expected), part, apart(found, expected)]
# No CPU shows whether a GPU has kernels for what devices compute: its path takes what no kernel reads.
target = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448, "backend": "auto"}
for name, choose in (("forward_plan", choose_forward), ("backward_plan", choose_backward)):
    setattr(handlers, name, lambda problem, index, stream, captured, choose=choose: choose(problem, **target))
for bound in [*passes._passes.values()]:
    handlers._plan(bound, 0)
print(json.dumps(results))
"""


def printed(repository: Path, program: str, *arguments: str) -> str:
    """What a program prints, in a process of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": python_path(repository)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(repository: Path, cases: Any, shardy: bool, *, typed: bool = False, inside: bool = False) -> dict[str, Any]:
    given = json.dumps([SHAPES, cases, shardy, typed, inside])
    found: dict[str, Any] = json.loads(printed(repository, PROGRAM, given))
    return found


@pytest.fixture(scope="module")
def found(repository: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    return run(repository, selection.cases_asked_for(request, CASES), True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.turns(3)
def test_batch_and_heads_stay_split_and_the_numbers_are_the_same(case: str, found: dict[str, Any]) -> None:
    moves, same, part, apart = found[case]
    number("JAX, sharded", apart, "float32")
    assert moves == []
    assert same
    assert part == part_of(case)


def part_of(case: str) -> list[int]:
    """Shape of a device's part of out."""
    *axes, differ, _ = CASES[case]
    batch, heads = (1 if x is None else 2 ** len(x) for x in axes)
    return [differ.get("q", SHAPES["q"])[0] // batch, 32, 4 // heads, 24]


def test_arrays_whose_types_say_how_they_are_split(repository: Path) -> None:
    """Results have q's types, gradients those of what they are gradients of; also inside of `jax.set_mesh`."""
    for case, (moves, same, part, _) in run(repository, {x: CASES[x] for x in TYPED}, True, typed=True).items():
        assert same, case
        assert moves == [], case
        assert part == part_of(case), case


def test_axes_that_a_shard_map_leaves_to_xla_split_batch_and_heads(repository: Path) -> None:
    """They have no names there: what a device must know of its place it reads; sums over devices are gathered."""
    cases = {
        name: CASES[name] for name in ("grouped heads", "dropout of groups", "used keys", "bias of heads", "functions")
    }
    sums = ("bias of heads", "functions")
    for case, (moves, same, part, _) in run(repository, cases, True, inside=True).items():
        assert same, case
        assert moves == (["all-gather"] if case in sums else []), case
        assert part == part_of(case), case


OF_PARTS = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from nvrtc_attn.jax import attention, context_parallel_attention

mesh = jax.make_mesh((2, 2), ("x", "s"), axis_types=(AxisType.Auto,) * 2)
q, k, v = (jax.random.normal(key, (2, 32, 4, 16)) for key in jax.random.split(jax.random.key(0), 3))
table = jax.random.normal(jax.random.key(1), (2, 4, 32))
for strategy, axes, options in (
    ("ring", ("x",), {"dropout_p": 0.3, "rng": (5, 2**32 - 17)}),
    ("ring", (None, None, "x"), {"dropout_p": 0.3, "rng": (5, 2**32 - 17)}),
    ("all_gather", ("x",), {"dropout_p": 0.3, "rng": (5, 7), "score_mod": lambda s, b, h, q, k: s + table[b, h, q]}),
):
    def whole(q, k, v):
        return (attention(q, k, v, causal=True, **options) ** 2).sum()

    def part(q, k, v):
        return context_parallel_attention(
            q, k, v, axis_name="s", strategy=strategy, layout="contiguous", causal=True, **options
        )

    def parts(q, k, v):
        mapped = jax.shard_map(part, mesh=mesh, in_specs=(P(None, "s"),) * 3, out_specs=P(None, "s"), axis_names={"s"})
        return (mapped(q, k, v) ** 2).sum()

    expected = jax.value_and_grad(whole, (0, 1, 2))(q, k, v)
    found = jax.jit(jax.value_and_grad(parts, (0, 1, 2)))(
        *(jax.device_put(x, NamedSharding(mesh, P(*axes))) for x in (q, k, v))
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-4)
"""


def test_parts_of_a_sequence_beside_a_batch_or_heads_that_xla_splits(repository: Path) -> None:
    """The dropout mask and the indices of functions are the whole's: a batch entry has the scores of the whole, not of
    the part, before it."""
    printed(repository, OF_PARTS)


UNCHECKED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from nvrtc_attn.jax import attention, context_parallel_attention

mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 1), ("d", "s", "one"))
q, k, v = (
    jax.random.normal(key, (2, 32, heads, 8)) for key, heads in zip(jax.random.split(jax.random.key(0), 3), (4, 2, 2))
)
dropout = {"dropout_p": 0.5, "rng": (1, 2)}
of_b = {"score_mod": lambda s, b, h, q, k: s * (1 + b)}
of_h = {"mask_mod": lambda b, h, q, k: q + h >= k}
said = "check_vma=False) nothing says whether q, k or v are sharded over 'd'"
for names, options, words in (
    ({}, dropout, said),
    ({}, dropout, "Pass batch_axis= and heads_axis=: the axes, or () where none shares it."),
    ({"batch_axis": ()}, dropout, "Pass heads_axis=:"),
    ({}, of_b, said),
    ({"heads_axis": ()}, of_b, "Pass batch_axis=:"),
    ({"batch_axis": ()}, of_h, "Pass heads_axis=:"),
    ({}, {"causal": True}, None),
    ({}, {"mask_mod": lambda b, h, q, k: q >= k}, None),
    ({"batch_axis": "d"}, dropout, None),
    ({"batch_axis": "d"}, of_b, None),
    ({"heads_axis": ()}, of_h, None),
    ({"heads_axis": "d"}, dropout, None),
    ({"batch_axis": (), "heads_axis": ()}, dropout, None),
):
    axes = [None, "s", None]
    if "heads_axis" not in names:
        axes[0] = "d"
    elif names["heads_axis"]:
        axes[2] = "d"
    def part(q, k, v):
        return context_parallel_attention(q, k, v, axis_name="s", layout="contiguous", **names, **options)

    def loss(run):
        return jax.value_and_grad(lambda *x: (run(*x) ** 2).sum(), (0, 1, 2))

    spec = P(*axes)
    shared = jax.shard_map(part, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    try:
        found = loss(shared)(q, k, v)
    except ValueError as error:
        assert words is not None and words in str(error), error
        continue
    assert words is None, (names, options, words)
    for a, b in zip(*(jax.tree.leaves(x) for x in (found, loss(lambda *x: attention(*x, **options))(q, k, v)))):
        np.testing.assert_allclose(a, b, 1e-4, 1e-4)
print("the whole's")
"""


def test_what_no_type_says_has_to_be_said_by_name(repository: Path) -> None:
    """With ``check_vma=False`` dropout and functions of b or h were those of the device, without a word."""
    assert printed(repository, UNCHECKED).strip() == "the whole's"


def test_what_cannot_be_split_is_gathered_and_right(repository: Path) -> None:
    """Heads with dropout and a sink, which no kernel reads in a part with dropout; more devices than key heads."""
    cases = {
        "sink and dropout": ("x", "y", {"sink": (4,)}, {"dropout_p": 0.3, "rng": (5, 7)}),
        "key heads": (None, ("x", "y"), {}, {"causal": True}),
    }
    for moves, same, *_ in run(repository, cases, True).values():
        assert same
        assert "all-gather" in moves


def test_the_older_partitioner(repository: Path) -> None:
    names = ("grouped heads", "bias of heads", "dropout", "dropout of groups", "functions and dropout of heads")
    cases = {name: CASES[name] for name in names}
    for case, (moves, same, part, _) in run(repository, cases, False).items():
        assert same, case
        assert moves == [], case
        assert part == part_of(case), case


def test_results_of_arrays_on_another_device_of_the_host_are_there(repository: Path) -> None:
    """DLPack knows one CPU: out came back on the first, and `out + q` was refused by JAX."""
    program = """
import jax, jax.numpy as jnp, nvrtc_attn
jax.config.update("jax_num_cpu_devices", 2)
q = jax.device_put(jnp.ones((1, 8, 2, 16)), jax.devices()[1])
for x in nvrtc_attn.attention(q, q, q, return_lse=True, return_max_logit=True):
    print(x.devices() == q.devices(), float(x.sum() + q.sum()) > 0)
"""
    assert printed(repository, program) == "True True\n" * 3
